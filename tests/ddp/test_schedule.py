"""What each variant sends, when, and from where: read from the ranges that it emits."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ddp_prof import annotate
from ddp_prof.annotate import Recorded, Recorder
from ddp_prof.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP, ShardedDDP, TorchDDP
from ddp_prof.ddp.collective import launch_all_reduce
from ddp_prof.errors import CommunicationError
from ddp_prof.range_names import Range, parse_range
from tests.waiting import wait_until

WIDTH = 64
LAYERS = 8
LAYER_MB = (WIDTH + 1) * WIDTH * 4 / 2**20
MAKE = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlapDDP,
    "bucketed": lambda module: BucketedDDP(module, 2 * LAYER_MB),
    "torch": lambda module: TorchDDP(module, bucket_cap_mb=2 * LAYER_MB),
    "sharded": lambda module: ShardedDDP(module, 2 * LAYER_MB),
}


def make_model() -> nn.Module:
    """Eight equal layers, the first one frozen."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model[0].requires_grad_(False)
    return model


class Scale(nn.Module):
    """One weight, times the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def record_step(variant: Any, *, sync: bool = True) -> list[Recorded]:
    recorder = Recorder()
    with annotate.only_sink(recorder):
        loss = variant(torch.randn(4, WIDTH)).sum()
        with annotate.backward():
            loss.backward()
        if sync:
            variant.finish_gradient_synchronization()
    return recorder.ranges


def schedules(rank: int) -> dict[str, list[Recorded]]:
    recorded = {}
    for key, make in MAKE.items():
        variant = make(make_model())
        record_step(variant)  # torch's DDP makes its buckets in the first step
        recorded[key] = record_step(variant)
    return recorded


def no_sync(rank: int) -> dict[str, Any]:
    """Ranges within ``no_sync``, after it, and after an exception in it."""
    result = {}
    for key, make in MAKE.items():
        variant = make(make_model())
        with variant.no_sync():
            inside = record_step(variant)
        after = record_step(variant)
        with suppress(ZeroDivisionError), variant.no_sync():
            raise ZeroDivisionError
        result[key] = [inside, after, record_step(variant)]
    return result


def gradients(rank: int) -> dict[str, Any]:
    """Where gradients lie after they were reduced."""
    variant = OverlapDDP(make_model())
    places = []
    for _ in range(2):
        variant.zero_grad()
        record_step(variant)
        places.append([trained_parameter.grad.data_ptr() for trained_parameter in variant.trained_parameters()])
    bucketed = BucketedDDP(make_model(), None)
    record_step(bucketed)
    storages = {
        trained_parameter.grad.untyped_storage().data_ptr() for trained_parameter in bucketed.trained_parameters()
    }
    return {"places": places, "storages": len(storages), "seconds": bucketed.communication_seconds}


def completion(rank: int) -> dict[str, int]:
    """An all-reduce that is waited for much later: its range, and when the wait began."""
    recorder = Recorder()
    with annotate.only_sink(recorder):
        flight = launch_all_reduce(torch.ones(10), None, bucket=0, params=1)
        wait_until(lambda: recorder.ranges)
        wait_ns = time.perf_counter_ns()
        flight.wait()
    return {"end_ns": recorder.ranges[0].end_ns, "wait_ns": wait_ns, "ranges": len(recorder.ranges)}


def irregular(rank: int) -> dict[str, Any]:
    """Backwards in an unusual order; the gradient of ``sum(x * w)`` is ``x``, here a number of rank and micro-batch."""
    variant = OverlapDDP(Scale())
    weight = variant.module.weight
    counts = []
    for micro_batches in (("sync", "local"), ("sync", "sync"), ("sync",)):
        weight.grad = None
        recorder = Recorder()
        with annotate.only_sink(recorder):
            for index, how in enumerate(micro_batches):
                with nullcontext() if how == "sync" else variant.no_sync():
                    variant(torch.full((3,), 10.0 ** (2 * index) * (rank + 1))).sum().backward()
            variant.finish_gradient_synchronization()
        counts.append((weight.grad.tolist(), sum("all_reduce" in range_.text for range_ in recorder.ranges)))
    return {"gradients and all-reduces": counts}


def errors(rank: int) -> dict[str, Any]:
    """Messages of two steps with sparse gradients, and the gradient of the dense step after them."""
    messages: dict[str, Any] = {}
    for key in ("naive", "bucketed"):
        embedding = nn.Embedding(5, 3, sparse=True)
        variant = MAKE[key](embedding)
        for is_sparse in (True, True, False):
            embedding.sparse = is_sparse
            variant.zero_grad()
            variant(torch.tensor([rank])).sum().backward()
            try:
                variant.finish_gradient_synchronization()
            except CommunicationError as error:
                messages[f"{key} {is_sparse}"] = str(error)
        messages[f"{key} gradient"] = embedding.weight.grad[:, 0].tolist()
    return messages


def gathers(rank: int) -> list[Recorded]:
    """The optimizer's step of ``sharded`` and the forward after it, in which each layer is marked."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    variant = ShardedDDP(model, LAYER_MB)
    optimizer = torch.optim.AdamW(variant.optimizer_parameters())
    record_step(variant)
    recorder = Recorder()
    with annotate.only_sink(recorder):
        with annotate.optimizer():
            optimizer.step()
        for layer in model:
            layer.register_forward_hook(lambda *_: annotate.start_all_reduce(99, 0, 0).end())
        with annotate.forward():
            variant(torch.randn(4, WIDTH))
    return recorder.ranges


def everything(rank: int) -> dict[str, Any]:
    checks = (schedules, no_sync, gradients, completion, irregular, errors, gathers)
    return {check.__name__: check(rank) for check in checks}


class Step(NamedTuple):
    """A recorded step, taken apart."""

    all_reduces: list[Recorded]
    names: list[Range]
    backward: Recorded
    synchronize: Recorded


def take_apart(recorded: list[Recorded]) -> Step:
    reductions = (taken for taken in recorded if taken.text.startswith(("all_reduce", "reduce_scatter")))
    all_reduces = sorted(reductions, key=lambda taken: taken.start_ns)
    (backward,) = (taken for taken in recorded if taken.text == "backward")
    (synchronize,) = (taken for taken in recorded if taken.text == "synchronize")
    return Step(all_reduces, [parse_range(all_reduce.text) for all_reduce in all_reduces], backward, synchronize)


@pytest.fixture(params=[(rank, key) for rank in (0, 1) for key in MAKE], ids=str)
def step(request: pytest.FixtureRequest, results: list[dict[str, Any]]) -> tuple[str, Step]:
    rank, key = request.param
    return key, take_apart(results[rank]["schedules"][key])


TRAINED = LAYERS - 1


def test_number_of_collectives(step: tuple[str, Step]) -> None:
    expected = {"naive": 2 * TRAINED, "flat": 1, "overlap": 2 * TRAINED, "bucketed": 4, "torch": 4, "sharded": 4}
    key, taken = step
    assert len(taken.all_reduces) == expected[key]


def test_every_trained_byte_travels_once_and_frozen_ones_never(step: tuple[str, Step]) -> None:
    _, taken = step
    assert sum(name.number("bytes") or 0 for name in taken.names) == TRAINED * (WIDTH + 1) * WIDTH * 4
    assert sum(name.number("params") or 0 for name in taken.names) == 2 * TRAINED


def test_buckets_are_launched_in_order(step: tuple[str, Step]) -> None:
    _, taken = step
    assert [name.number("bucket") for name in taken.names] == list(range(len(taken.names)))


def test_communication_lies_where_the_schedule_says(step: tuple[str, Step]) -> None:
    key, taken = step
    in_backward = [
        taken.backward.start_ns <= all_reduce.start_ns <= taken.backward.end_ns for all_reduce in taken.all_reduces
    ]
    assert all(in_backward) if key in ("overlap", "bucketed", "torch", "sharded") else not any(in_backward)


def test_all_reduces_complete_within_the_step(step: tuple[str, Step]) -> None:
    _, taken = step
    assert all(all_reduce.end_ns <= taken.synchronize.end_ns for all_reduce in taken.all_reduces)


def test_naive_waits_for_each(results: list[dict[str, Any]]) -> None:
    taken = take_apart(results[0]["schedules"]["naive"])
    assert all(a.end_ns <= b.start_ns for a, b in zip(taken.all_reduces, taken.all_reduces[1:], strict=False))


def test_torch_synchronizes_within_backward_after_its_last_launch(results: list[dict[str, Any]]) -> None:
    taken = take_apart(results[0]["schedules"]["torch"])
    assert taken.all_reduces[-1].start_ns <= taken.synchronize.start_ns <= taken.backward.end_ns
    assert taken.synchronize.end_ns >= taken.backward.end_ns


@pytest.mark.parametrize("key", list(MAKE))
def test_no_sync_communicates_nothing_and_ends_even_by_an_exception(results: list[dict[str, Any]], key: str) -> None:
    counts = [sum("|bytes=" in taken.text for taken in recorded) for recorded in results[0]["no_sync"][key]]
    assert counts[0] == 0
    assert counts[1] > 0
    assert counts[2] > 0


def test_a_gradient_alone_lies_in_the_same_buffer_in_every_step(results: list[dict[str, Any]]) -> None:
    first, second = results[0]["gradients"]["places"]
    assert first == second


def test_gradients_of_a_bucket_are_views_of_its_buffer(results: list[dict[str, Any]]) -> None:
    assert results[0]["gradients"]["storages"] == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_range_ends_when_the_collective_does_not_when_it_is_waited_for(
    results: list[dict[str, Any]], rank: int
) -> None:
    completed = results[rank]["completion"]
    assert completed["end_ns"] < completed["wait_ns"]
    assert completed["ranges"] == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_irregular_backwards_lose_nothing(results: list[dict[str, Any]], rank: int) -> None:
    local_then, late, regular = results[rank]["irregular"]["gradients and all-reduces"]
    # mean of the first micro-batch, and this rank's own second one, which comes to the others with the next finish
    assert local_then == ([1.5 + 100 * (rank + 1)] * 3, 1)
    assert late == ([1.5 + 150] * 3, 3)  # votes, and a second round
    assert regular == ([1.5] * 3, 1)


def test_communication_seconds_are_measured(results: list[dict[str, Any]]) -> None:
    assert 0 < results[0]["gradients"]["seconds"] < 60


@pytest.mark.parametrize("key", ["naive", "bucketed"])
def test_sparse_gradients_are_refused_by_one_clear_error(results: list[dict[str, Any]], key: str) -> None:
    assert "sparse gradient" in results[0]["errors"][f"{key} True"]
    assert "sparse=False" in results[0]["errors"][f"{key} True"]


@pytest.mark.parametrize("key", ["naive", "bucketed"])
def test_after_a_sparse_gradient_the_next_step_is_as_usual(results: list[dict[str, Any]], key: str) -> None:
    assert f"{key} False" not in results[0]["errors"]
    assert results[0]["errors"][f"{key} gradient"] == [0.5, 0.5, 0, 0, 0]


def test_sharded_gathers_the_first_layers_first_from_the_end_of_the_step(results: list[dict[str, Any]]) -> None:
    recorded = results[0]["gathers"]
    launched = sorted((taken for taken in recorded if taken.text.startswith("all_gather")), key=lambda at: at.start_ns)
    (optimizer,) = (taken for taken in recorded if taken.text == "optimizer")
    layers = [taken.end_ns for taken in recorded if "bucket=99" in taken.text]
    assert [parse_range(taken.text).number("bucket") for taken in launched] == list(reversed(range(LAYERS)))
    assert all(optimizer.start_ns <= taken.start_ns <= optimizer.end_ns for taken in launched)
    # Gloo takes collectives in turns over its threads: a layer waits for its own bucket, whatever came before.
    assert all(taken.end_ns <= layer_ns for taken, layer_ns in zip(launched, layers, strict=True))
