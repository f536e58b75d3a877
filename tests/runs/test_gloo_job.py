"""A CPU job of others by torch.profiler: torch's DDP on gloo, names of others; against a count by hand."""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ddp_prof as dp

STEPS = 4
Spans = list[tuple[int, int]]


def train(names: str, folder: Path, rank: int) -> None:
    """One rank, in a process group of two: with names for its phases, with none (bare), or marked."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    from ddp_prof import annotate

    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
    model = DistributedDataParallel(model, bucket_cap_mb=0.5)
    optimizer = torch.optim.AdamW(model.parameters())
    if names in ("instrumented", "instrumented late"):
        if names == "instrumented late":
            model.register_comm_hook(None, allreduce_hook)  # too late to mark buckets
        annotate.instrument(model, optimizer)
    phase = record_function if names == "named" else nullcontext
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=STEPS),
        on_trace_ready=lambda done: done.export_chrome_trace(f"{folder}/job.rank{rank}.json.gz"),
    ) as profiler:
        for _ in range(STEPS + 1):
            optimizer.zero_grad()
            with phase("fwd"):
                loss = model(torch.randn(128, 256)).square().mean()
            with phase("bwd"):
                loss.backward()
            with phase("opt"):
                optimizer.step()
            profiler.step()


def record(folder: Path, names: str) -> list[Path]:
    from tests.ddp.gloo_ranks import run_ranks  # imports torch

    run_ranks(partial(train, names, folder))
    return sorted(folder.glob("job.rank*.json.gz"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return record(tmp_path_factory.mktemp("job"), "named")


def spans_of(events: list[dict[str, Any]], wanted: Any) -> Spans:
    """In nanoseconds, as the file has three decimals of microseconds."""
    chosen = [event for event in events if event.get("ph") == "X" and wanted(event)]
    return [(round(event["ts"] * 1000), round(event["ts"] * 1000) + round(event["dur"] * 1000)) for event in chosen]


def length(covered: Any, *sets: Spans) -> int:
    """How long the sets that hold an instant are such that ``covered`` says so: by sweeping over all their edges."""
    edges = sorted((time, which, delta) for which, spans in enumerate(sets)
                   for start, end in spans for time, delta in ((start, 1), (end, -1)))  # fmt: skip
    depth, total, last = [0] * len(sets), 0, 0
    for time, which, delta in edges:
        if covered(*(count > 0 for count in depth)):
            total += time - last
        depth[which] += delta
        last = time
    return total


def counted(file: Path) -> dict[str, Any]:
    """The same figures, from the JSON alone."""
    events = json.loads(gzip.decompress(file.read_bytes()), parse_float=Decimal)["traceEvents"]
    comm = spans_of(events, lambda e: str(e["name"]).startswith("gloo:"))
    calls = [event for event in events if str(event["name"]).startswith("c10d::")]
    engine = [event for event in events if str(event["name"]).startswith("autograd::engine::evaluate_function")]

    def lies_in(event: dict[str, Any], outer: dict[str, Any]) -> bool:
        return bool(event["tid"] == outer["tid"] and outer["ts"] <= event["ts"] < outer["ts"] + outer["dur"])

    def computes(event: dict[str, Any]) -> bool:
        return (
            event.get("cat") == "cpu_op"
            and not event["name"].startswith(("c10d::", "ddp_prof|"))
            and not any(lies_in(call, event) for call in calls)
        )

    operators = spans_of(events, computes)
    backward_operators = spans_of(events, lambda e: computes(e) and any(lies_in(e, node) for node in engine))
    steps = spans_of(events, lambda e: str(e["name"]).startswith("ProfilerStep#"))
    backward = spans_of(events, lambda e: e["name"] == "bwd")
    by_step = [[span for span in comm if start <= span[0] < end] for start, end in sorted(steps)]
    return {
        "comm": length(lambda c: c, comm),
        "overlapped": length(lambda c, o: c and o, comm, operators),
        "exposed": length(lambda c, o: c and not o, comm, operators),
        "overlapped by backward": length(lambda c, o: c and o, comm, backward_operators),
        "exposed in backward": length(lambda c, o, b: c and b and not o, comm, operators, backward),
        "collectives": len([span for own in by_step for span in own]),
        "steps": [length(lambda c, o: c and not o, own, operators) for own in by_step],
    }


@pytest.mark.torch
@pytest.mark.slow
def test_overlap_and_exposed_are_those_counted_by_hand(files: list[Path]) -> None:
    (run,) = dp.load_runs(files)
    for rank, file in zip(run.overlap().ranks, files, strict=True):
        by_hand = counted(file)
        assert (rank.comm_ns, rank.overlapped_ns, rank.exposed_ns, rank.collectives) == tuple(
            by_hand[key] for key in ("comm", "overlapped", "exposed", "collectives")
        )
        assert [step.exposed_ns for step in rank.steps] == by_hand["steps"]
        assert rank.exposed_ns > 0


@pytest.mark.torch
@pytest.mark.slow
def test_the_cause_is_where_the_time_is(files: list[Path]) -> None:
    (run,) = dp.load_runs(files)
    exposed = in_backward = 0
    for file in files:
        by_hand = counted(file)
        exposed += sum(by_hand["steps"])  # an instant at which two steps communicate is of both
        in_backward += by_hand["exposed in backward"]
    causes: dict[str, int] = {}
    for collective in run.collectives().collectives:
        for cause in collective.exposed_by:
            causes[cause.when] = causes.get(cause.when, 0) + cause.ns
    assert sum(causes.values()) == exposed
    # Phases of a cause are those of what computes before and after. DDP's finalization computes nothing of backward, so
    # what is exposed before backward's range ends is tail where it follows the last gradient.
    assert causes["backward"] <= 1.1 * in_backward
    assert causes["backward"] + causes["tail"] >= 0.9 * in_backward


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("how", ["instrumented", pytest.param("instrumented late", marks=pytest.mark.nightly)])
def test_of_a_model_that_is_marked_operators_tell_what_computed(tmp_path: Path, how: str) -> None:
    files = record(tmp_path, how)
    (run,) = dp.load_runs(files)
    for rank, file in zip(run.overlap().ranks, files, strict=True):
        by_hand = counted(file)
        assert (rank.overlapped_ns, rank.exposed_ns) == (by_hand["overlapped"], by_hand["exposed"])
        assert rank.blocking_ns is not None
        assert 0 < rank.blocking_ns <= rank.exposed_ns


@pytest.mark.torch
@pytest.mark.slow
def test_without_ranges_of_phases_operators_tell_backward(tmp_path: Path) -> None:
    files = record(tmp_path, "bare")
    (run,) = dp.load_runs(files)
    for rank, file in zip(run.overlap().ranks, files, strict=True):
        by_hand = counted(file)
        assert (rank.overlapped_ns, rank.backward_overlapped_ns) == (
            by_hand["overlapped"],
            by_hand["overlapped by backward"],
        )
        assert rank.dependencies.reason is not None
        assert "instrument(model)" in rank.dependencies.reason  # tests/annotate: it is known then
