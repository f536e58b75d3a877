"""Backward passes that hold more than one model, another backward pass, or none: what is marked in them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_prof import annotate
from ddp_prof.annotate.backward_passes import BackwardPasses
from ddp_prof.range_names import parse_range
from tests.ddp.gloo_ranks import run_ranks

WIDTH = 16
LAYER_MB = (WIDTH * WIDTH + WIDTH) * 4 / 2**20
LATE_S = 0.2


def make_layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)])


class Checkpointed(nn.Sequential):
    """Three layers, of which the second is computed again in a backward pass within backward."""

    def forward(self, inputs: torch.Tensor) -> Any:
        first, second, third = self
        return third(checkpoint(second, first(inputs), use_reentrant=True))


class CheckpointedFirst(nn.Sequential):
    """Three layers, of which the first is: DDP's last bucket is full in the inner pass, at whose end DDP waits."""

    def forward(self, inputs: torch.Tensor) -> Any:
        first, second, third = self
        return third(second(checkpoint(first, inputs.requires_grad_(), use_reentrant=True)))


def recorded(train: Any) -> list[annotate.Recorded]:
    recorder = annotate.Recorder()
    with pytest.MonkeyPatch.context() as patch, annotate.only_sink(recorder):
        patch.setenv("NSYS_PROFILING_SESSION_ID", "1")
        train()
    return sorted(recorder.ranges, key=lambda each: each.start_ns)


def two_models() -> None:
    """As the generator's step of a GAN: gradients go through one model into another."""
    models = [DistributedDataParallel(make_layers(3), bucket_cap_mb=LAYER_MB) for _ in range(2)]
    marks = [annotate.instrument(model) for model in models]
    for _ in range(2):  # the first step has one bucket per model
        models[1](models[0](torch.randn(4, WIDTH))).sum().backward()
    for each in marks:
        each.remove()


def backward_within_backward(kind: type[nn.Sequential]) -> None:
    model = DistributedDataParallel(kind(*make_layers(3)), bucket_cap_mb=LAYER_MB)
    marks = annotate.instrument(model)

    def reduce_late(_state, bucket):
        """It ends when backward has long gone on."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        threading.Timer(LATE_S, lambda: future.set_result(bucket.buffer())).start()
        return future

    model.register_comm_hook(None, reduce_late)
    for _ in range(2):
        model(torch.randn(4, WIDTH)).sum().backward()
    marks.remove()


def uneven_inputs(rank: int) -> None:
    """Rank 1 has one batch less, and joins the reductions of rank 0 outside of any backward pass."""
    model = DistributedDataParallel(make_layers(2), bucket_cap_mb=LAYER_MB)
    marks = annotate.instrument(model)
    with model.join():
        for _ in range(3 - rank):
            model(torch.randn(4, WIDTH)).sum().backward()
    marks.remove()


def all_of_them(rank: int) -> dict[str, list[annotate.Recorded]]:
    return {
        "two models": recorded(two_models),
        "within": recorded(lambda: backward_within_backward(Checkpointed)),
        "wait within": recorded(lambda: backward_within_backward(CheckpointedFirst)),
        "uneven": recorded(lambda: uneven_inputs(rank)),
    }


@pytest.fixture(scope="module")
def ranges() -> list[dict[str, list[annotate.Recorded]]]:
    return run_ranks(all_of_them)


def named(ranges: list[annotate.Recorded], name: str) -> list[annotate.Recorded]:
    return [each for each in ranges if parse_range(each.text).name == name]


def last_backward(ranges: list[annotate.Recorded]) -> annotate.Recorded:
    return max(named(ranges, "backward"), key=lambda each: each.end_ns)


def test_the_wait_begins_after_the_last_bucket_of_all_models(
    ranges: list[dict[str, list[annotate.Recorded]]],
) -> None:
    found = ranges[0]["two models"]
    start = last_backward(found).start_ns
    launched = [each.start_ns for each in named(found, "all_reduce") if each.start_ns > start]
    (waiting,) = [each for each in named(found, "synchronize") if each.start_ns > start]
    assert len(launched) == 6
    assert max(launched) < waiting.start_ns


def test_backward_ends_where_the_wait_begins(ranges: list[dict[str, list[annotate.Recorded]]]) -> None:
    """The buckets that end after it are then in the tail, not within backward."""
    found = ranges[0]["two models"]
    waits, passes = named(found, "synchronize"), named(found, "backward")
    assert [each.end_ns <= wait.start_ns for each, wait in zip(passes, waits, strict=True)] == [True, True]


def test_a_backward_pass_within_backward_ends_no_bucket(ranges: list[dict[str, list[annotate.Recorded]]]) -> None:
    found = ranges[0]["within"]
    lengths = [each.end_ns - each.start_ns for each in named(found, "all_reduce")]
    assert len(lengths) == 1 + 3
    assert min(lengths) >= 0.9 * LATE_S * 1e9


def test_a_wait_in_a_backward_pass_within_backward_is_marked(
    ranges: list[dict[str, list[annotate.Recorded]]],
) -> None:
    waits = named(ranges[0]["wait within"], "synchronize")
    assert sum(each.end_ns - each.start_ns > 0.8 * LATE_S * 1e9 for each in waits) == 2  # one per pass


def test_a_rank_that_joins_others_is_marked_without_waits(ranges: list[dict[str, list[annotate.Recorded]]]) -> None:
    assert [len(named(of_rank["uneven"], "backward")) for of_rank in ranges] == [3, 2]
    assert [len(named(of_rank["uneven"], "synchronize")) for of_rank in ranges] == [3, 2]


def test_a_pass_that_compiled_autograd_takes_is_left_alone() -> None:
    """It refuses calls before the end of a pass, and the program ended with that."""
    from torch._dynamo import config  # takes a second

    passes, model = BackwardPasses(), torch.nn.Linear(2, 2)
    release = passes.acquire()

    @torch.compile(backend="eager")
    def train(batch: torch.Tensor) -> None:
        model(batch).sum().backward()

    try:
        passes.expect_wait(marks_buckets=False)
        with config.patch(compiled_autograd=True):
            train(torch.ones(2, 2))
    finally:
        release()
    assert model.bias.grad is not None
