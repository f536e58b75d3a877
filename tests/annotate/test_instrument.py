"""A program of others, marked by hooks: what is marked, that results do not change, that nothing stays behind."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import ddp_prof as dp
from ddp_prof import annotate
from ddp_prof.annotate.process_groups import sends_through_its_state
from ddp_prof.range_names import BUCKETS as BUCKETS_RANGE
from ddp_prof.range_names import parse_range
from tests.ddp.gloo_ranks import run_ranks
from tests.kineto_events import ranges_in
from tests.waiting import wait_until

WIDTH = 16
LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * 4
STEPS = 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def make_ddp() -> DistributedDataParallel:
    return DistributedDataParallel(make_model(), bucket_cap_mb=LAYER_BYTES / 2**20)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    for index in range(STEPS):
        with annotate.step(index):
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH)).sum().backward()
            optimizer.step()


def of_step(ranges: list[annotate.Recorded], index: int) -> list[str]:
    (step,) = (each for each in ranges if each.text == f"step|index={index}")
    inside = [each for each in ranges if step.start_ns <= each.start_ns and each.end_ns <= step.end_ns]
    return [each.text for each in sorted(inside, key=lambda each: each.start_ns)]


def marked_by(hook: str, *, by_nsys: bool) -> dict[str, Any]:
    """What is marked in a training step, and the weights after training."""
    ddp = make_ddp()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    recorder = annotate.Recorder()
    with pytest.MonkeyPatch.context() as patch, annotate.only_sink(recorder):
        if by_nsys:
            patch.setenv("NSYS_PROFILING_SESSION_ID", "1")
        marks = annotate.instrument(ddp, optimizer)
        if hook == "own":
            ddp.register_comm_hook(ddp.process_group, allreduce_hook)
        train(ddp, optimizer)
        marks.remove()
        marked = len(recorder.ranges)
        ddp(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
    phases = [each.text for each in recorder.ranges[marked:] if each.text in ("forward", "backward", "optimizer")]
    weights = [parameter.tolist() for parameter in ddp.parameters()]
    return {"step": of_step(recorder.ranges, 2), "after remove": phases, "weights": weights}


def messages(state: Any, hook: Any) -> tuple[list[int], list[int]]:
    """The bytes of each marked all-reduce of a training with one of torch's hooks, and of each that was asked for."""
    ddp, sent = DistributedDataParallel(make_model()), []
    recorder, all_reduce = annotate.Recorder(), dist.all_reduce

    def noted(tensor: torch.Tensor, *words: Any, **options: Any) -> Any:
        sent.append(tensor.nbytes)
        return all_reduce(tensor, *words, **options)

    with pytest.MonkeyPatch.context() as patch, annotate.only_sink(recorder):
        patch.setenv("NSYS_PROFILING_SESSION_ID", "1")
        patch.setattr(dist, "all_reduce", noted)
        patch.setattr(ddp, "_check_comm_hook", lambda hook: None)  # refuses bf16 where there is no GPU
        marks = annotate.instrument(ddp)
        ddp.register_comm_hook(state, hook)
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
        marks.remove()

        def marked() -> list[int]:
            launched = sorted(recorder.ranges, key=lambda each: each.start_ns)
            ranges = [parse_range(each.text) for each in launched]
            return [each.number("bytes") or 0 for each in ranges if each.name == "all_reduce"]

        wait_until(lambda: len(marked()) >= len(sent))  # gloo's threads close the last ranges
    return marked(), sent


def groups() -> list[bool]:
    """Whether a hook of torch's sends through the group of a DDP on a subgroup, by its state."""
    own, other = dist.new_group(), dist.new_group()
    ddp = DistributedDataParallel(make_model(), process_group=own)
    states = (own, other, None, PowerSGDState(own), PowerSGDState(None))
    return [sends_through_its_state(allreduce_hook, state, ddp.process_group) for state in states]


class Words(nn.Module):
    """Two words of a thousand, whose gradient is sparse, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(1000, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(self.words((inputs[:2, 0] > 0).long()))


def sparse(*, by_nsys: bool | None) -> dict[str, Any]:
    """The marks that tell sizes, and the weights, of a model with sparse gradients; ``None``: without marks."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Words(), bucket_cap_mb=LAYER_BYTES / 2**20)
    optimizer, recorder = torch.optim.SGD(ddp.parameters(), lr=0.1), annotate.Recorder()
    with pytest.MonkeyPatch.context() as patch, annotate.only_sink(recorder):
        if by_nsys:
            patch.setenv("NSYS_PROFILING_SESSION_ID", "1")
        marks = None if by_nsys is None else annotate.instrument(ddp, optimizer)
        with profile(activities=[ProfilerActivity.CPU]):
            train(ddp, optimizer)
        if marks:
            marks.remove()
    ranges = [parse_range(text) for text in of_step(recorder.ranges, 2)]
    return {
        "bytes": [each.number("bytes") for each in ranges if each.name == "all_reduce"],
        "names": {each.name for each in ranges},
        "weights": [parameter.tolist() for parameter in ddp.parameters()],
    }


def uneven(*, is_marked: bool) -> list[Any]:
    """The weights after a training in which rank 1 has more inputs, whose gradients are divided by one rank then."""
    ddp = make_ddp()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch, annotate.only_sink(annotate.Recorder()):
        if is_marked:
            patch.setenv("NSYS_PROFILING_SESSION_ID", "1")
        marks = annotate.instrument(ddp, optimizer) if is_marked else None
        with warnings.catch_warnings(record=True), ddp.join(divide_by_initial_world_size=False):
            for index in range(2 + dist.get_rank()):
                optimizer.zero_grad()
                ddp(torch.full((4, WIDTH), float(index))).sum().backward()
                optimizer.step()
        if marks:
            marks.remove()
    return [parameter.tolist() for parameter in ddp.parameters()]


def weights_without_marks() -> list[Any]:
    plain = make_ddp()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    train(plain, optimizer)
    plain(torch.randn(4, WIDTH)).sum().backward()
    optimizer.step()
    return [parameter.tolist() for parameter in plain.parameters()]


def everything(rank: int) -> dict[str, Any]:
    without_marks = weights_without_marks()
    late = make_ddp()
    late.register_comm_hook(None, lambda state, bucket: allreduce_hook(late.process_group, bucket))
    with pytest.warns(UserWarning, match="before register_comm_hook"):
        annotate.instrument(late).remove()
    twice = make_ddp()
    marks = annotate.instrument(twice)
    twice.register_comm_hook(twice.process_group, allreduce_hook)
    with pytest.raises(RuntimeError, match="only be called once"):
        twice.register_comm_hook(twice.process_group, allreduce_hook)
    marks.remove()
    return {
        "nsys": marked_by("default", by_nsys=True),
        "own": marked_by("own", by_nsys=True),
        "unprofiled": marked_by("default", by_nsys=False),
        "weights": without_marks,
        "fsdp": fsdp(),
        "made later": made_later(),
        "marked twice": made_later(is_marked_itself=True),
        "bf16": messages(None, bf16_compress_hook),
        "powersgd": messages(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook),
        "groups": groups(),
        "uneven": [uneven(is_marked=is_marked) for is_marked in (False, True)],
        "sparse": {how: sparse(by_nsys=how) for how in (None, False, True)},
        "profiled": profiled(),
        "profiled with a hook": profiled(has_hook=True),
        "profiled, unused": profiled(find_unused_parameters=True),
    }


def fsdp(**options: Any) -> list[str]:
    model = make_model()
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = annotate.Recorder()
    with annotate.only_sink(recorder):
        marks = annotate.instrument(model, optimizer)
        train(model, optimizer)
        marks.remove()
    return of_step(recorder.ranges, 1)


def made_later(*, is_marked_itself: bool = False) -> list[str]:
    """What is marked where all that is made later is; where the program marks it, too, as under ``capture``."""
    recorder = annotate.Recorder()
    with pytest.MonkeyPatch.context() as patch, annotate.only_sink(recorder):
        patch.setenv("NSYS_PROFILING_SESSION_ID", "1")
        marks = annotate.instrument()
        ddp = make_ddp()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        own = annotate.instrument(ddp, optimizer) if is_marked_itself else None
        train(ddp, optimizer)
        if own:
            own.remove()
        marks.remove()
    return of_step(recorder.ranges, 2)


def profiled(*, has_hook: bool = False, **options: Any) -> dict[str, Any]:
    """Under torch.profiler that is started after the marks were made: ranges, what is read of them, and the weights."""
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=LAYER_BYTES / 2**20, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    marks = annotate.instrument(ddp, optimizer)
    if has_hook:
        ddp.register_comm_hook(ddp.process_group, allreduce_hook)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        train(ddp, optimizer)
    ddp(torch.randn(4, WIDTH)).sum().backward()
    optimizer.step()
    marks.remove()
    with tempfile.TemporaryDirectory() as folder:  # each rank has one of its own
        path = Path(folder) / "profile.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
        collectives = dp.load_runs([path])[0].collectives().collectives
    return {
        "ranges": [(each["name"], each["ts"], each["dur"]) for each in ranges_in(events)],
        "buckets": [(each.bucket, each.bytes) for each in collectives if each.step == STEPS - 1],
        "blocking": [each.blocking_ns for each in collectives],
        "weights": [parameter.tolist() for parameter in ddp.parameters()],
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(everything)


def names_of(texts: list[str]) -> list[str]:
    return [parse_range(text).name for text in texts]


BUCKETS = [f"all_reduce|bucket={index}|bytes={LAYER_BYTES}|params=2|group=0 [0, 1]|ranks=2" for index in (0, 1)]
PROCESS = "process|rank=1|world=2|variant=DistributedDataParallel|backend=gloo|device=cpu"


@pytest.mark.parametrize("how", ["nsys", "own", "made later", "marked twice"])
def test_phases_and_buckets_are_marked_once(results: list[dict[str, Any]], how: str) -> None:
    found = results[1][how]["step"] if how in ("nsys", "own") else results[1][how]
    assert found == ["step|index=2", PROCESS, "forward", "backward", *BUCKETS, "synchronize", "optimizer"]


def test_sparse_gradients_have_the_bytes_that_are_sent(results: list[dict[str, Any]]) -> None:
    """Under nsys, and on a GPU, an error ended the program; else their size was that of the whole weight."""
    found = results[1]["sparse"]
    two_rows = 2 * 8 + 2 * WIDTH * 4  # their indices, and values
    assert sorted(found[True]["bytes"]) == [two_rows, LAYER_BYTES]
    assert BUCKETS_RANGE not in found[False]["names"]
    assert found[None]["weights"] == found[False]["weights"] == found[True]["weights"]


def test_uneven_inputs_are_divided_as_without_marks(results: list[dict[str, Any]]) -> None:
    """By a hook, gradients were divided by all ranks, not by those that still have inputs: other weights."""
    plain, marked = results[1]["uneven"]
    assert marked == plain


def fsdp_of_groups(rank: int) -> list[str]:
    """The marks of a step of FSDP2 within ranks 0 and 2, and within ranks 1 and 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    return fsdp(mesh=mesh["shard"])


def test_marks_of_fsdp2_name_their_group() -> None:
    """Without its name, collectives of two groups count as one collective of four ranks."""
    ranges = [[parse_range(text) for text in of_rank] for of_rank in run_ranks(fsdp_of_groups, world=4)]
    groups = [{each.text("group") for each in of_rank if each.number("bucket") is not None} for of_rank in ranges]
    assert [len(names) for names in groups] == [1] * 4
    assert groups[0] == groups[2] != groups[1] == groups[3]
    assert str(groups[0]).endswith("[0, 2]'}")
    assert {each.number("ranks") for each in ranges[0] if each.name == "reduce_scatter"} == {2}


def test_a_hook_of_torchs_keeps_a_group_that_is_not_the_models(results: list[dict[str, Any]]) -> None:
    assert results[0]["groups"] == [True, False, False, True, False]


@pytest.mark.parametrize(("hook", "least"), [("bf16", STEPS), ("powersgd", STEPS + 1)])
def test_messages_of_torchs_hooks_are_marked_with_what_they_send(
    results: list[dict[str, Any]], hook: str, least: int
) -> None:
    marked, sent = results[1][hook]
    assert marked == sent
    assert len(sent) >= least
    assert sent[-1] < 2 * LAYER_BYTES


def test_gathers_and_scatters_of_fsdp2_are_marked(results: list[dict[str, Any]]) -> None:
    names = [name for name in names_of(results[0]["fsdp"]) if name != "synchronize"]
    forward = names[names.index("forward") : names.index("backward")]
    backward = names[names.index("backward") :]
    assert forward.count("all_gather") == 2  # the root has no parameters of its own
    assert backward.count("reduce_scatter") == 2
    assert backward[-1] == "optimizer"


def test_without_a_profiler_ddp_keeps_its_own_all_reduce(results: list[dict[str, Any]]) -> None:
    assert results[0]["unprofiled"]["step"] == [
        "step|index=2", PROCESS.replace("rank=1", "rank=0"), "forward", "backward", "optimizer",
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["nsys", "own", "unprofiled"])
def test_what_is_trained_does_not_change(results: list[dict[str, Any]], how: str) -> None:
    assert results[0][how]["weights"] == results[1][how]["weights"] == results[0]["weights"]


def of_a_third(rank: int) -> bool:
    return bool(weights_without_marks() == marked_by("default", by_nsys=True)["weights"])


def test_no_weight_changes_where_the_number_of_ranks_is_no_power_of_two() -> None:
    """DDP multiplies gradients by 1/3, and dividing them by 3 rounds otherwise."""
    assert run_ranks(of_a_third, world=3) == [True] * 3


def test_after_remove_nothing_is_marked(results: list[dict[str, Any]]) -> None:
    assert results[0]["nsys"]["after remove"] == []


def ranges_under_profiler(found: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """The last range of each name, start and end."""
    return {name: (ts, ts + length) for name, ts, length in sorted(found["ranges"], key=lambda each: each[1])}


def test_torch_profiler_takes_all_ranges_also_those_that_end_on_other_threads(results: list[dict[str, Any]]) -> None:
    found = ranges_under_profiler(results[0]["profiled with a hook"])
    assert {"step|index=2", "forward", "backward", "optimizer", "synchronize", *BUCKETS} <= set(found)
    ranges = results[0]["profiled with a hook"]["ranges"]
    gloo = [(start, start + length) for name, start, length in ranges if name == "gloo:all_reduce"]
    wait_start, _ = found["synchronize"]
    for bucket in BUCKETS:
        start, end = found[bucket]
        # A callback ends the range: on gloo's thread, within gloo's event; or, if the all-reduce had already ended when
        # the callback was added, on the thread that launched it, which only waits afterwards.
        assert any(start <= begun <= end <= max(ended, wait_start) for begun, ended in gloo), bucket
        earlier = [begun + length for name, begun, length in ranges if name == bucket and begun < start]
        assert len(earlier) == STEPS - 1 - 1  # the first step has one bucket
        assert max(earlier) < start


@pytest.mark.parametrize(
    ("how", "others", "votes"),
    [("profiled", "others=0", []), ("profiled, unused", "others=1|other_bytes=16", [(None, 4 * 4)])],
)
def test_under_torch_profiler_ddp_keeps_its_own_all_reduce_and_its_buckets_are_known(
    results: list[dict[str, Any]], how: str, others: str, votes: list[tuple[int | None, int]]
) -> None:
    """The vote on four unused parameters, too: it was the last bucket, and a smaller one was to shorten it."""
    found = ranges_under_profiler(results[0][how])
    sizes = f"buckets|bytes={LAYER_BYTES},{LAYER_BYTES}|{others}|group=0 [0, 1]|ranks=2"
    assert {"step|index=2", "forward", sizes, "backward", "optimizer", "synchronize"} <= set(found)
    assert not any(name.startswith("all_reduce|") for name in found)
    assert results[0][how]["buckets"] == [(0, LAYER_BYTES), (1, LAYER_BYTES), *votes]
    last_launch = max(ts for name, ts, _ in results[0][how]["ranges"] if name == "gloo:all_reduce")
    (start, end), backward = found["synchronize"], found["backward"]
    assert backward[0] < start < end <= backward[1]
    assert backward[0] < last_launch < end
    assert None not in results[0][how]["blocking"]
    assert results[0][how]["weights"] == results[0]["weights"]


def test_importing_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from ddp_prof import annotate\nwith annotate.step(0): pass"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
