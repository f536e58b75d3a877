"""Rules that need a GPU, on programs that a device ran: each with one that it must name, and one that it must not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_prof.analyze.collectives.results import measure_collectives
from ddp_prof.analyze.collectives.run_analysis import analyze_trace, merge_analyses
from ddp_prof.analyze.collectives.skew import StepSkew
from ddp_prof.analyze.collectives.straggler import measure_skew
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.critical.critical_path import find_rank_work, measure_critical_paths
from ddp_prof.analyze.critical.what_if import Gain, WhatIf
from ddp_prof.analyze.doctor import Diagnosis, diagnose_run, gains
from ddp_prof.analyze.doctor.buckets import bucket_copies
from ddp_prof.analyze.doctor.communication import _reduction_couples_all
from ddp_prof.analyze.doctor.evidence import NO_LAUNCHES, Finding, RunEvidence
from ddp_prof.analyze.doctor.gains import NO_QUEUE
from ddp_prof.analyze.doctor.hosts import host_sync, straggler
from ddp_prof.analyze.doctor.rank_facts import measure_facts
from ddp_prof.analyze.kernels.contention import Contention
from ddp_prof.analyze.missing import Missing
from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.analyze.root_cause import find_root_cause
from ddp_prof.analyze.step_cost import find_slowed
from ddp_prof.communication import BARRIER, OPERATIONS
from ddp_prof.ingest.load import load_trace
from ddp_prof.present.cause_headlines import root_cause_headline
from ddp_prof.runs import load_runs
from ddp_prof.runs import run as runs
from ddp_prof.table import NO_TIME, fill, select
from ddp_prof.trace import HOST_WAITS, UNKNOWN, Category, CollectiveMetadata, Kind, Overhead, SyncKind, Trace
from tests.analyze.critical.scheduler import Device
from tests.command_line import run
from tests.drawing import column
from tests.measuring import results_of
from tests.nsys_factory import NCCL, US, Capture, Kernel, Range, Sync, bucket_steps, write_capture

MS = 1_000_000
TRACES = Path(__file__).parents[3] / "traces"
STEPS = 6
NO_CONTENTION = Contention(5, 50, 1.0, 1.0, 1.0, 1.0, 0, None)


def evidence_of(
    trace: Trace, contention: Contention = NO_CONTENTION, compared_files: tuple[int, int] | None = None
) -> RunEvidence:
    ranks = find_rank_events(trace)
    run = analyze_trace(trace, ranks)
    work = list(map(find_rank_work, ranks))
    return RunEvidence(
        analysis=run,
        collectives=measure_collectives(run),
        overlap=measure_overlap(trace, ranks),
        critical=measure_critical_paths(run, work),
        skew=measure_skew(run),
        facts=tuple(measure_facts(rank) for rank in ranks),
        contention=lambda: contention,
        what_if=WhatIf(run, work, lambda: find_slowed(contention, run.device)),
        compared_files=compared_files,
    )


def diagnose(
    trace: Trace, contention: Contention = NO_CONTENTION, compared_files: tuple[int, int] | None = None
) -> Diagnosis:
    return diagnose_run(evidence_of(trace, contention, compared_files))


def named(trace: Trace, contention: Contention = NO_CONTENTION) -> list[str]:
    return [one.rule for one in diagnose(trace, contention).findings]


def with_sizes(trace: Trace, sizes: list[int]) -> Trace:
    """The trace with bytes for the collectives, which run on stream 20; ``sizes`` repeat."""
    rows = np.flatnonzero(trace.activities.lane == 20)
    noted = fill(CollectiveMetadata, len(rows), activity=rows, bytes=np.resize(column(sizes), len(rows)))
    return replace(trace, collective_metadata=noted)


def training(
    *,
    comm_stream: int = 20,
    consumer: str = "gemm",
    in_backward: Callable[[Device, int], None] = lambda _device, _bucket: None,
    before_optimizer_ns: int = 0,
    buckets: int = 4,
    bucket_ns: int = MS,
    needed: Callable[[int], int] = lambda bucket: bucket,
    waits_in_hooks: bool = False,
    operation: str = "AllReduce_Sum",
) -> Device:
    """Steps of data parallelism without fault: forward, then a kernel and an all-reduce per bucket, then an optimizer.

    The host launches a step in less than a millisecond, and the device takes 10 for it.
    """
    device = Device()
    us = 1_000
    for step in range(STEPS):
        with device.range(f"step {step}"):
            with device.range("forward"):
                device.launch(us, 7, 4 * MS, is_collective=False)
            with device.range("backward"):
                for bucket in range(buckets):
                    device.launch(us, 7, 2 * MS, is_collective=False)
                    in_backward(device, bucket)
                    device.record(us, 7, 10)
                    device.wait(us, comm_stream, 10)
                    name = f"ncclDevKernel_{operation}_f32_RING_LL(x)"
                    device.launch(us, comm_stream, bucket_ns, is_collective=True, name=name)
                    device.record(us, comm_stream, 100 + bucket)
                    if waits_in_hooks:
                        device.wait(us, 7, 100 + bucket)
                device.launch(us, 7, 2 * MS, is_collective=False)
            device.now += before_optimizer_ns
            with device.range("optimizer"):
                for bucket in range(buckets):
                    device.wait(us, 7, 100 + needed(bucket))
                    device.launch(us, 7, 100 * us, is_collective=False, name=consumer)
                device.launch(us, 7, MS // 2, is_collective=False)
        device.synchronize(us)
    return device


def with_another(name: str, where: str, *, since: int = 2) -> Trace:
    """Steps of which all but the first ones have one collective more, in a phase."""
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            for phase in ("forward", "backward", "optimizer"):
                with device.range(phase):
                    if phase == where and step >= since:
                        device.launch(1_000, 7, MS, is_collective=True, name=name)
                    device.launch(1_000, 7, 4 * MS, is_collective=False)
        device.synchronize(1_000)
    return device.trace()


def with_buckets(*orders: list[int], updates_each: bool = True) -> Trace:
    """Steps with a backward for each of these orders of buckets, which ranges name, and an optimizer after it.

    Without ``updates_each`` the optimizer follows the last one only.
    """
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            for order in orders:
                with device.range("backward"):
                    for bucket in order:
                        device.launch(1_000, 7, 2 * MS, is_collective=False)
                        device.record(1_000, 7, 1)
                        device.wait(1_000, 20, 1)
                        with device.range(f"all_reduce|bucket={bucket}|bytes={(1 + bucket) << 20}|params=2"):
                            device.launch(1_000, 20, MS, is_collective=True)
                if updates_each or order is orders[-1]:
                    with device.range("optimizer"):
                        device.launch(1_000, 7, MS, is_collective=False)
        device.synchronize(1_000)
    return device.trace()


def test_passes_that_reduce_the_same_buckets_are_of_one_model() -> None:
    found = diagnose(with_buckets([0, 1], [0, 1], updates_each=False)).findings
    (one,) = (each for each in found if each.rule == "buckets reduced several times")
    assert one.evidence == f"In {STEPS} of {STEPS} steps each bucket is reduced several times, typically 2."


@pytest.mark.parametrize(
    ("orders", "times"),
    [
        ([[0, 1, 2]], 1),
        ([[0, 1, 2] * 2], 2),
        ([[0, 1, 2] * 3], 3),
        ([[0, 0, 1, 1, 2, 2]], 1),
        ([[0, 1, 0]], 1),
        ([[0, 1, 2], [0, 1, 2]], 1),
    ],
    ids=["once", "twice", "three times", "two models at once", "in no order", "two models in turns"],
)
def test_a_step_that_reduces_each_bucket_several_times(orders: list[list[int]], times: int) -> None:
    """One pass of backward reduces buckets of equal numbers also if it is of two models, as those of a CycleGAN."""
    found = [one for one in diagnose(with_buckets(*orders)).findings if one.rule == "buckets reduced several times"]
    said = f"In {STEPS} of {STEPS} steps each bucket is reduced several times, typically {times}"
    assert [one.evidence for one in found] == (
        [f"{said}, if all of these are buckets of one model."] if times > 1 else []
    )
    assert all("no_sync()" in one.advice for one in found)


def passes_that_reduce(sizes: list[int], *, updates_each: bool = False, name: str = "") -> Trace:
    """Steps with a backward for each two of these sizes (MiB), which it reduces; ``name`` is that of the reductions."""
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            for _ in range(max(1, len(sizes) // 2)):
                with device.range("forward"):
                    device.launch(1_000, 7, MS, is_collective=False)
                with device.range("backward"):
                    for bucket in range(2):
                        device.launch(1_000, 7, MS, is_collective=False)
                        device.record(1_000, 7, 1)
                        device.wait(1_000, 20, 1)
                        device.launch(1_000, 20, MS, is_collective=True, name=name)
                        device.record(1_000, 20, 2 + bucket)
                device.wait(1_000, 7, 3)
                if updates_each:
                    with device.range("optimizer"):
                        device.launch(1_000, 7, MS, is_collective=False)
            with device.range("optimizer"):
                device.launch(1_000, 7, MS, is_collective=False)
        device.synchronize(1_000)
    return with_sizes(device.trace(), [size if size == UNKNOWN else size << 20 for size in sizes or [8, 4]])


@pytest.mark.parametrize(
    ("sizes", "times", "updates_each"),
    [
        ([8, 4] * 3, 3, False),
        ([8, 4, 8, 2, 8, 4], 1, False),
        ([8, 8] * 3, 3, False),
        ([8, UNKNOWN] * 3, 1, False),
        ([], 1, False),
        ([8, 4] * 3, 1, True),
    ],
    ids=["micro-batches", "several models", "equal buckets", "not known", "one pass", "alike models"],
)
def test_passes_that_reduce_the_same_sizes_reduce_each_bucket_several_times(
    sizes: list[int], times: int, updates_each: bool
) -> None:
    """torch.profiler tells no numbers of buckets: of micro-batches that each reduce, a smaller bucket was advised.

    Of two models that are alike, as those of a CycleGAN, each bucket was said to be reduced twice. An optimizer tells
    them from micro-batches if it is launched between the passes.
    """
    trace = passes_that_reduce(sizes, updates_each=updates_each)
    diagnosis, rule = diagnose(trace), "buckets reduced several times"
    found = [one for one in diagnosis.findings if one.rule == rule]
    assert (rule in [one.rule for one in diagnosis.abstained]) == (UNKNOWN in sizes)  # else 'no fault' was said
    said = f"In {STEPS} of {STEPS} steps each bucket is reduced several times, typically {times}, if its passes of "
    said += "backward, which reduce the same sizes, are of one model."
    assert [one.evidence for one in found] == ([said] if times > 1 else [])
    cause = find_root_cause(results_of(trace))
    assert cause is not None
    assert (cause.times_per_step, "no_sync()" in root_cause_headline(cause).text) == (times, times > 1)


@pytest.mark.parametrize(("world_size", "rules"), [(2, ["one collective per parameter"]), (1, [])])
def test_who_is_alone_in_a_job_is_told_nothing_of_communication(world_size: int, rules: list[str]) -> None:
    """A run of one rank, by which one sees whether a job scales, was told to take larger buckets."""
    diagnosis = diagnose(replace(training(buckets=40, bucket_ns=10_000).trace(), world_size=world_size))
    assert [one.rule for one in diagnosis.findings] == rules
    assert ("all rules about communication" in [one.rule for one in diagnosis.abstained]) == (world_size == 1)


@pytest.mark.parametrize(("group_size", "couples"), [(4, True), (2, False)])
def test_a_barrier_is_called_needless_only_where_the_reduction_couples_all_ranks(
    group_size: int, couples: bool
) -> None:
    run = evidence_of(with_buckets([0, 1, 2]))
    ranks = [
        replace(
            rank,
            world_size=4,
            timings=replace(rank.timings, group_size=np.full(len(rank.timings), group_size)),
        )
        for rank in run.analysis.ranks
    ]
    assert _reduction_couples_all(replace(run, analysis=replace(run.analysis, ranks=tuple(ranks)))) is couples


def test_a_rank_that_reduces_no_gradients_is_coupled_to_no_other_one() -> None:
    run = evidence_of(with_buckets([0, 1, 2]))
    ranks = [
        replace(rank, timings=replace(rank.timings, operation=np.full(len(rank.timings), OPERATIONS.index(BARRIER))))
        for rank in run.analysis.ranks
    ]
    assert _reduction_couples_all(run)
    assert not _reduction_couples_all(replace(run, analysis=replace(run.analysis, ranks=tuple(ranks))))


def queued(delay_ns: int) -> Trace:
    """A run whose collectives begin so long after the kernel that runs when they could begin has ended."""
    trace = training().trace()
    activities = trace.activities
    start, end = activities.start_ns.copy(), activities.end_ns.copy()
    compute = np.flatnonzero(activities.lane == 7)
    for row in np.flatnonzero(activities.lane == 20):
        running = compute[(start[compute] <= start[row]) & (end[compute] > start[row])]
        shift = int(end[running].max() - start[row]) if len(running) else 0
        start[row] += shift + delay_ns
        end[row] = start[row] + 100_000
    return replace(trace, activities=replace(activities, start_ns=start, end_ns=end))


def fsdp(
    scatter_stream: int, reduction: str = "ReduceScatter", last_ns: int = MS, steps: int = STEPS, first_ns: int = 0
) -> Trace:
    """Backwards that gather and scatter, on stream 20 and on another one or the same.

    With ``first_ns``, a step begins with a gather of this length, for which compute waits.
    """
    device = Device()
    gather, scatter = (f"ncclDevKernel_{name}_RING_LL(x)" for name in ("AllGather", f"{reduction}_Sum_f32"))
    for step in range(steps):
        with device.range(f"step {step}"):
            if first_ns:
                device.launch(1, 20, first_ns, is_collective=True, name=gather)
                device.record(1, 20, 2)
                device.wait(1, 7, 2)
            with device.range("backward"):
                for _ in range(3):
                    device.launch(1, 7, MS, is_collective=False)
                    device.record(1, 7, 1)
                    for stream, name in ((20, gather), (scatter_stream, scatter)):
                        device.wait(1, stream, 1)
                        device.launch(1, stream, MS, is_collective=True, name=name)
                device.launch(1, 7, last_ns, is_collective=False)
        device.synchronize(1)
    return device.trace()


def profiled(share: float) -> Trace:
    """A run of whose activities a profiler takes a share itself."""
    trace = training().trace()
    start = trace.activities.start_ns
    length = int((trace.activities.end_ns - start).sum() * share)
    return replace(trace, overhead=Overhead(start[:1], start[:1] + length))


def test_a_sound_run_is_not_blamed_for_anything() -> None:
    found = diagnose(training().trace())
    assert found.findings == ()
    assert {one.rule for one in found.abstained} == {"straggler", "vote on unused parameters"}


@pytest.mark.parametrize(
    ("name", "where", "rule"),
    [
        ("ncclDevKernel_Broadcast_RING_LL(x)", "forward", "broadcast in forward"),
        ("ncclDevKernel_Broadcast_RING_LL(x)", "optimizer", None),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "forward", None),
        ("EpDeviceSync_barrier", "optimizer", "barrier in each step"),
    ],
)
def test_what_most_steps_have_beside_the_reduction_of_gradients(name: str, where: str, rule: str | None) -> None:
    found = [
        one
        for one in diagnose(with_another(name, where)).findings
        if one.rule in ("broadcast in forward", "barrier in each step")
    ]
    assert [one.rule for one in found] == ([rule] if rule else [])
    for one in found:
        assert one.evidence == "4 of 6 steps have such collectives: 1.00 ms of a typical step are exposed."


@pytest.mark.parametrize(("source", "words"), [("nsys-sqlite", "--include-json=true"), ("kineto", "PyTorch 2.2")])
def test_where_sizes_are_not_known_it_is_said_what_records_them(source: str, words: str) -> None:
    run = evidence_of(training().trace())
    found = diagnose_run(replace(run, overlap=replace(run.overlap, source=source)))
    (reason,) = [one.reason for one in found.abstained if one.rule == "vote on unused parameters"]
    assert words in reason


def test_collectives_on_the_stream_of_compute() -> None:
    assert "communication on the compute stream" in named(training(comm_stream=7).trace())


def test_what_communication_costs_at_most_without_steps_is_what_the_worst_rank_has() -> None:
    """Device 0 ran four of six steps, device 1 the last two: 4 ms of communication in each."""
    device = training(comm_stream=7)
    device.ranges = []
    trace = device.trace()
    on_device = np.arange(len(trace.activities)) >= len(trace.activities) * 4 // STEPS
    trace = replace(trace, activities=replace(trace.activities, device=on_device.astype(np.int64)))
    (finding,) = [one for one in diagnose(trace).findings if one.rule == "communication on the compute stream"]
    assert finding.cost_ns == 16 * MS


def test_copies_out_of_buckets() -> None:
    (finding,) = diagnose(training(consumer="memcpy").trace()).findings
    assert finding.rule == "copies out of buckets"
    assert finding.evidence.startswith(
        f"For {4 * STEPS} of {4 * STEPS} reductions of gradients, a memory copy is what needs the result first"
    )
    assert "gradient_as_bucket_view" in finding.advice


def test_a_rank_that_marks_no_steps_is_no_step_of_the_run() -> None:
    """Copies "out of buckets on rank 0 (at most 0.54 ms per step)" were all copies of the capture of rank 1."""
    device = training(consumer="memcpy")
    marked = evidence_of(device.trace())
    device.ranges = [one for one in device.ranges if not str(one[0]).startswith("step")]
    unmarked = evidence_of(device.trace())
    both = replace(
        marked,
        analysis=merge_analyses([marked.analysis, unmarked.analysis]),
        facts=(*marked.facts, *unmarked.facts),
    )
    assert max(unmarked.facts[0].copies_ns) > max(marked.facts[0].copies_ns), "all of a capture, and of a step"
    alone, found = bucket_copies(marked), bucket_copies(both)
    assert isinstance(alone, Finding)
    assert isinstance(found, Finding)
    assert (found.cost_ns, found.evidence) == (alone.cost_ns, alone.evidence)


def test_copies_out_of_buckets_cost_what_a_step_has_of_them() -> None:
    """Also of those beside the all-reduce of a later bucket, but not of others on a stream of their own."""
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            with device.range("backward"):
                for bucket in range(2):
                    device.launch(1_000, 7, MS, is_collective=False)
                    device.record(1_000, 7, 10)
                    device.wait(1_000, 20, 10)
                    device.launch(1_000, 20, MS, is_collective=True)
                    device.record(1_000, 20, 100 + bucket)
            with device.range("optimizer"):
                for bucket in range(2):
                    device.wait(1_000, 7, 100 + bucket)
                    device.launch(1_000, 7, MS, is_collective=False, name="memcpy")
                device.launch(1_000, 30, 6 * MS, is_collective=False, name="memcpy")
    trace = device.trace()
    (finding,) = [one for one in diagnose(trace).findings if one.rule == "copies out of buckets"]
    assert finding.cost_ns == 2 * MS


def test_copies_of_input_and_of_the_loss_are_not_out_of_buckets() -> None:
    """On the stream of compute, as ``tensor.to(device)`` copies: with views, 2 ms were said to be gained, not 1."""

    def run_steps(*, copies: bool) -> Device:
        device = Device()
        for step in range(STEPS):
            with device.range(f"step {step}"):
                with device.range("forward"):
                    device.launch(1_000, 7, MS, is_collective=False, name="memcpy HtoD")
                    device.launch(1_000, 7, MS, is_collective=False, name="memcpy")
                    device.launch(1_000, 7, MS, is_collective=False)
                with device.range("backward"):
                    device.launch(1_000, 7, MS, is_collective=False)
                    device.record(1_000, 7, 10)
                    device.wait(1_000, 20, 10)
                    device.launch(1_000, 20, MS, is_collective=True)
                    device.record(1_000, 20, 100)
                with device.range("optimizer"):
                    device.wait(1_000, 7, 100)
                    for _ in range(2 * copies):
                        device.launch(1_000, 7, MS // 2, is_collective=False, name="memcpy")
                    device.launch(1_000, 7, MS, is_collective=False)
                device.launch(1_000, 7, MS, is_collective=False, name="memcpy DtoH")
            device.synchronize(1)
        return device

    device = run_steps(copies=True)
    (finding,) = [one for one in diagnose(device.trace()).findings if one.rule == "copies out of buckets"]
    assert "copies on the stream of compute take 1.00 ms of a typical step" in finding.evidence
    gained_ns = (device.end - run_steps(copies=False).end) / STEPS
    assert finding.expected_gain_ns == pytest.approx(gained_ns, rel=0.02)


def test_copies_out_of_buckets_cost_their_launches_too() -> None:
    """A host that needs 500 us to launch a copy of 100 us: without copies a step was shorter by more than the limit."""

    def run_steps(*, copies: bool) -> Device:
        device = Device()
        for step in range(STEPS):
            with device.range(f"step {step}"):
                with device.range("backward"):
                    device.launch(1_000, 7, MS // 10, is_collective=False)
                    device.record(0, 7, 10)
                    device.wait(0, 20, 10)
                    device.launch(0, 20, MS // 10, is_collective=True)
                    device.record(0, 20, 100)
                with device.range("optimizer"):
                    device.wait(0, 7, 100)
                    for _ in range(4 * copies):
                        device.launch(MS // 2, 7, MS // 10, is_collective=False, name="memcpy")
                    device.launch(MS // 2, 7, MS // 10, is_collective=False)
            device.synchronize(0)
        return device

    device = run_steps(copies=True)
    (finding,) = [one for one in diagnose(device.trace()).findings if one.rule == "copies out of buckets"]
    assert "copies on the stream of compute take 0.40 ms of a typical step" in finding.evidence
    assert (device.end - run_steps(copies=False).end) / STEPS <= (finding.cost_ns or 0) <= 2_500_000


def test_copies_out_of_buckets_cost_at_most_what_the_slowest_rank_has_of_them() -> None:
    """Of two ranks it was the median, though the others wait for the slower one; its copies were called launches."""
    run = evidence_of(training(consumer="memcpy").trace())
    (facts,) = run.facts
    slower = replace(facts, copies_ns=tuple(20 * ns for ns in facts.copies_ns))
    analysis = replace(run.analysis, ranks=2 * run.analysis.ranks)
    alone, finding = bucket_copies(run), bucket_copies(replace(run, analysis=analysis, facts=(facts, slower)))
    assert isinstance(alone, Finding)
    assert isinstance(finding, Finding)
    copies_ns = facts.copies_ns[0]
    assert set(facts.copies_ns) == {copies_ns}
    assert finding.cost_ns == (alone.cost_ns or 0) + 19 * copies_ns
    assert f"take {20 * copies_ns / 1e6:.2f} ms of a typical step of {analysis.ranks[1].name}" in finding.evidence
    assert alone.evidence.partition("their launches")[2] == finding.evidence.partition("their launches")[2]


def test_a_host_that_waits_in_backward() -> None:
    """The last wait is behind the step's range, so the device's clock measures steps: 18.6 ms, not 15."""
    run = training(in_backward=lambda device, _bucket: device.synchronize(1_000), bucket_ns=3 * MS)
    (finding,) = [one for one in diagnose(run.trace()).findings if one.rule == "host synchronization in backward"]
    assert re.search(
        r"its last collective, \d+\.\d+ ms in a typical step, in which the stream of compute idles for 3\.71 ms\.$",
        finding.evidence,
    )
    assert finding.cost_ns == 3_713_002


def test_waits_of_the_host_cost_at_most_what_the_slowest_rank_has_of_them() -> None:
    """Of two ranks it was the median, though the others wait for the slower one."""
    device = training(in_backward=lambda device, _bucket: device.synchronize(1_000), bucket_ns=3 * MS)
    run = evidence_of(device.trace())
    (facts,) = run.facts
    slower = replace(facts, sync_ns=2 * facts.sync_ns, bare_ns=tuple(2 * ns for ns in facts.bare_ns))
    both = replace(
        run,
        analysis=replace(run.analysis, ranks=2 * run.analysis.ranks),
        overlap=replace(run.overlap, ranks=2 * run.overlap.ranks),
        facts=(facts, slower),
    )
    alone, finding = host_sync(run), host_sync(both)
    assert isinstance(alone, Finding)
    assert isinstance(finding, Finding)
    assert finding.cost_ns == 2 * (alone.cost_ns or 0)


def test_a_host_that_waits_for_a_device_that_is_never_idle_costs_nothing() -> None:
    """It waits for 8 ms of each step, and the device computes on as soon as the wait is over."""
    assert named(training(in_backward=lambda device, _bucket: device.synchronize(1_000)).trace()) == []


@pytest.mark.parametrize("is_in_its_rest", [False, True], ids=["after backward", "after its last collective"])
def test_a_host_that_waits_after_backward_does_not_wait_in_it(is_in_its_rest: bool) -> None:
    """For a loss that it prints, before a last collective that does not carry gradients."""
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            with device.range("forward"):
                device.launch(1_000, 7, 2 * MS, is_collective=False)
            with device.range("backward"):
                device.launch(1_000, 7, 2 * MS, is_collective=False)
                device.record(1_000, 7, 2)
                device.wait(1_000, 20, 2)
                device.launch(1_000, 20, 3 * MS, is_collective=True)
                device.record(1_000, 20, 1)
                if is_in_its_rest:
                    device.synchronize(1_000)
                    device.launch(1_000, 7, 1_000, is_collective=False)
            device.wait(1_000, 7, 1)
            device.launch(1_000, 7, 1_000, is_collective=False)
            device.synchronize(1_000)
            device.launch(1_000, 20, 1_000, is_collective=True)
    assert "host synchronization in backward" not in named(device.trace())


def test_a_loss_that_is_read_between_micro_batches_is_no_wait_in_backward() -> None:
    """Each of three micro-batches reduces its gradients, and the program reads its loss: no pass waits."""
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            for _ in range(3):
                with device.range("forward"):
                    device.launch(1_000, 7, 2 * MS, is_collective=False)
                with device.range("backward"):
                    device.launch(1_000, 7, 2 * MS, is_collective=False)
                    device.record(1_000, 7, 2)
                    device.wait(1_000, 20, 2)
                    device.launch(1_000, 20, 3 * MS, is_collective=True)
                    device.record(1_000, 20, 1)
                device.wait(1_000, 7, 1)
                device.synchronize(1_000)
    assert "host synchronization in backward" not in named(device.trace())


def test_a_host_that_launches_late() -> None:
    (finding,) = diagnose(training(before_optimizer_ns=25 * MS).trace()).findings
    assert finding.rule == "launch-bound host"
    assert finding.cost_ns is not None
    assert finding.cost_ns >= 5 * MS


@pytest.mark.parametrize("waits", [True, False])
def test_a_host_that_waits_for_each_loss_launches_the_optimizer_late(waits: bool) -> None:
    """It launches 200 short kernels in 10 ms; without the wait, the device has work for 18 ms meanwhile."""
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            with device.range("backward"):
                device.launch(1_000, 7, 16 * MS, is_collective=False)
            if waits:
                device.synchronize(1_000)  # loss.item()
            with device.range("optimizer"):
                for _ in range(200):
                    device.launch(50_000, 7, 10_000, is_collective=False)
    found = [one for one in diagnose(device.trace()).findings if one.rule == "launch-bound host"]
    assert [".item()" in one.advice for one in found] == [True] * waits


@pytest.mark.parametrize(("length", "is_named"), [(9 * MS // 10, False), (MS // 2, True)])
def test_a_host_that_never_waits_costs_at_most_what_the_device_does_not_compute(length: int, is_named: bool) -> None:
    """The host is all of each step, 10 ms, but a faster one could not make it shorter than the device's compute."""
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            for _ in range(10):
                device.launch(MS, 7, length, is_collective=False)
    found = [one.cost_ns for one in diagnose(device.trace()).findings if one.rule == "launch-bound host"]
    assert found == [5 * MS + 2] * is_named


@pytest.mark.parametrize(("launched", "is_named"), [(2 * MS, False), (7 * MS, True)])
def test_a_device_that_waits_although_its_work_was_launched_does_not_wait_for_the_host(
    launched: int, is_named: bool
) -> None:
    """Its stream is idle for 3 of 8 ms before a kernel that was launched in the middle of the one before, or late."""
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            device.launch(1_000, 7, 4 * MS, is_collective=False)
            device.now += launched - 1_000
            device.launch(1_000, 7, MS, is_collective=False)
            device.now += 8 * MS - launched - 1_000
    trace = device.trace()
    second = np.arange(len(trace.activities)) % 2 == 1
    by_ns = np.where(second & (not is_named), 3 * MS, 0)
    moved = {name: getattr(trace.activities, name) + by_ns for name in ("start_ns", "end_ns")}
    trace = replace(trace, activities=replace(trace.activities, **moved), launching_calls=trace.launching_calls)
    assert ("launch-bound host" in [one.rule for one in diagnose(trace).findings]) == is_named


def test_a_host_that_loads_data_while_the_device_is_idle() -> None:
    """Between the last work of a step and the first one of the next, which the window of no step contains."""
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            device.now += 8 * MS
            device.launch(1_000, 7, 4 * MS, is_collective=False)
            device.launch(1_000, 20, MS, is_collective=True)
            device.record(1_000, 20, 1)
            device.wait(1_000, 7, 1)
            device.launch(1_000, 7, MS, is_collective=False)
            device.synchronize(1_000)
    (finding,) = [one for one in diagnose(device.trace()).findings if one.rule == "launch-bound host"]
    assert finding.evidence.startswith("62 % of a typical step, 8.00 ms, is time in which the device waits")
    assert "or in the next step" in finding.evidence
    without_steps = diagnose(replace(device, ranges=[]).trace()).findings
    assert [(one.rule, "next step" in one.evidence) for one in without_steps] == [("launch-bound host", False)]
    assert without_steps[0].advice.startswith("Mark steps (--step-range) to see whether steps wait for the host")
    assert finding.advice.startswith("If the host loads data meanwhile, load and move it in other processes")


def test_what_the_host_costs_counts_beside_a_copy_that_no_step_waits_for() -> None:
    """The copy runs on into the next step, while the host loads data: 0.5 of 2 ms were told, so nothing was found."""
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            device.now += 2 * MS
            device.launch(0, 7, 3 * MS, is_collective=False)
            device.synchronize(0)
            device.launch(0, 16, 3 * MS // 2, is_collective=False, name="memcpy")
    (finding,) = diagnose(device.trace()).findings
    assert (finding.rule, finding.cost_ns) == ("launch-bound host", 2 * MS + 1)


@pytest.mark.parametrize(("steps", "is_named"), [(5, False), (6, True)])
def test_a_late_rank_costs_also_the_transfers_that_compute_no_longer_hides(
    steps: int, is_named: bool, tmp_path: Path
) -> None:
    """Without process 101's slow kernels a step would be 8 us shorter; process 100 waits without compute for 4 of them.

    us            0         10        20        30        40
    100 compute   ggggggggggGGGGGGGGGG..................o
    100 comm      ..........wwwwAAAAAAAAAAwwwwBBBBBBBBBB
    101 compute   ggggggggggggggGGGGGGGGGGGGGG..........o
    101 comm      ..............AAAAAAAAAA....BBBBBBBBBB
    """
    capture = Capture()
    for at in range(0, steps * 50 * US, 50 * US):
        for process, length in ((100, 10), (101, 14)):
            capture.ranges.append(Range(f"step {at}", at, at + 49 * US, process, process))
            for name, stream, start, end in (
                ("gemm", 7, 0, length),
                ("gemm", 7, length, 2 * length),
                (NCCL, 20, length, 24),
                (NCCL, 20, max(24, 2 * length), 38),
                ("adam", 7, 38, 39),
            ):
                launch = at + start
                kernel = Kernel(name, at + start * US, at + end * US, launch, process, process, stream, process - 100)
                capture.kernels.append(kernel)
    (job,) = load_runs(write_capture(tmp_path / "late.sqlite", capture))
    found = job.doctor()
    if not is_named:
        reason = "process 101 arrives last in each of 5 steps, too few to exclude chance"
        assert reason in [one.reason for one in found.abstained if one.rule == "straggler"]
        return
    (finding,) = [one for one in found.findings if one.rule == "straggler"]
    assert finding.cost_ns == 8 * US
    assert finding.evidence.endswith("; that costs another rank 8.0 µs in such a step.")

    # Where no launch tells whether B queued behind A's wait, what is lost if it did is a bound, and no gain.
    known = evidence_of(load_trace(tmp_path / "late.sqlite"))
    # Compute hides a part of the waiting: a step gains more than it exposes less, if communication slows that compute.
    assert known.skew.hides_waits
    slowed = straggler(replace(known, contention=lambda: Contention(slowdown=1.5)))
    assert isinstance(slowed, Finding)
    assert slowed.evidence.endswith("; that costs another rank 8.0 µs of exposed time in such a step.")

    unknown = {name: np.full(2 * steps, NO_TIME) for name in ("launch_ns", "ready_ns", "input_ns")}
    ranks = tuple(replace(one, timings=replace(one.timings, **unknown)) for one in known.analysis.ranks)
    run = replace(known, analysis=replace(known.analysis, ranks=ranks))
    rule = straggler(run)
    assert rule is not None
    assert " at most 8.0 µs" in rule.evidence
    finding = gains.with_expected_gain(run, rule)
    assert (finding.expected_gain_ns, finding.gain_reason, finding.cost_ns) == (None, gains.NO_LAUNCH, 8 * US)


def add_step(
    capture: Capture,
    step: int,
    process: int,
    device: int,
    kernels: Sequence[tuple[int, str, int, int, int]],
    calls: Sequence[tuple[int, str, int]],
) -> None:
    """Add a step of 38 us, of which all is launched at its begin.

    Args:
        capture: Gets the step.
        step, process, device: Number of the step, and who makes it.
        kernels: The place of the launch among the calls, name, stream, start and end in us.
        calls: The place, "Record" or "Stream" (that waits), and the stream, all of one event.
    """
    at = step * 40 * US + US
    capture.ranges.append(Range(f"step {step}", at - US, at + 38 * US, process, process))
    for place, name, stream, start, end in kernels:
        times, number = (at + start * US, at + end * US, at - US + 100 * place), 20 * step + place
        capture.kernels.append(Kernel(name, *times, process, process, stream, device, number=number))
    for place, call, stream in calls:
        name = "cudaEventRecord_v3020" if call == "Record" else "cudaStreamWaitEvent_v3020"
        where = {"thread": process, "process": process, "device": device}
        capture.syncs.append(Sync(name, at - US + 100 * place, 20 * step + place, stream, event=5, **where))


def test_a_late_rank_costs_also_what_stands_still_beside_compute_of_another_stream(tmp_path: Path) -> None:
    """Without process 101's slow kernel a step would be 8 us shorter; stream 8 computes while process 100 waits.

    us              0         10        20
    100 stream 7    gggggggggg..............oo
    100 stream 8    ..........sssssssssssss...
    100 stream 20   ..........wwwwwwwwAAAAAA..
    101 stream 7    gggggggggggggggggg......oo
    101 stream 20   ..................AAAAAA..
    """
    capture = Capture()
    for step in range(STEPS):
        for process, length in ((100, 10), (101, 18)):
            kernels = [
                (1, "gemm", 7, 0, length),
                (4, NCCL, 20, length, 24),
                *([(6, "side", 8, 10, 23)] if process == 100 else []),
                (8, "adam", 7, 24, 26),
            ]
            calls = [(2, "Record", 7), (3, "Stream", 20), (5, "Record", 20), (7, "Stream", 7)]
            add_step(capture, step, process, process - 100, kernels, calls)
    (job,) = load_runs(write_capture(tmp_path / "late.sqlite", capture))
    assert [rank.dependencies.reason for rank in job.overlap().ranks] == [None, None]
    (finding,) = [one for one in job.doctor().findings if one.rule == "straggler"]
    assert finding.cost_ns == 8 * US


def test_what_begins_and_ends_later_on_one_rank_is_no_lag_that_a_replay_removes(tmp_path: Path) -> None:
    """Both ranks share a GPU in turns. Only A waits, for 2 us; a replay without the lag of process 101 gains 6 us.

    us              0         10        20
    100 stream 7    ggg....................oo..
    100 stream 20   ...wwAAAAAABBBBBBCCCCCC....
    101 stream 7    ggggg....................oo
    101 stream 20   .....AAAAAA..BBBBBBCCCCCC..
    """
    capture = Capture()
    for step in range(STEPS):
        for process, length, begins in ((100, 3, (3, 11, 17, 23)), (101, 5, (5, 13, 19, 25))):
            ends = (11, *begins[2:])
            kernels = [
                (1, "gemm", 7, 0, length),
                *((4 + nth, NCCL, 20, begins[nth], ends[nth]) for nth in range(3)),
                (9, "adam", 7, begins[3], begins[3] + 2),
            ]
            calls = [(2, "Record", 7), (3, "Stream", 20), (7, "Record", 20), (8, "Stream", 7)]
            add_step(capture, step, process, 0, kernels, calls)
    (job,) = load_runs(write_capture(tmp_path / "turns.sqlite", capture))
    (finding,) = [one for one in job.doctor().findings if one.rule == "straggler"]
    assert (finding.cost_ns, finding.expected_gain_ns) == (2 * US, 2 * US)


def test_a_host_that_loads_data_between_the_ranges_of_steps() -> None:
    """As in ``for batch in loader: with annotate.step():``, where no range of a step holds the loader's time."""
    device = Device()
    for step in range(STEPS):
        device.now += 5 * MS
        with device.range(f"step {step}"):
            device.launch(1_000, 7, 3 * MS, is_collective=False)
            device.launch(1_000, 20, MS, is_collective=True)
            device.synchronize(1_000)
    run = evidence_of(device.trace())
    (finding,) = diagnose_run(run).findings
    assert (finding.rule, finding.cost_ns) == ("launch-bound host", 5 * MS + 1)
    assert finding.evidence.startswith("62 % of the time from step to step, 5.00 ms, lies between the ranges of steps")
    lacking = replace(run, overlap=replace(run.overlap, missing=Missing("no GPU activities")))
    assert not diagnose_run(lacking).findings, "what ran between steps may be what was not recorded"


@pytest.mark.parametrize(("last_steps", "is_seldom"), [(STEPS // 2 - 1, True), (STEPS // 2, False)])
def test_a_rank_that_is_late_in_less_than_half_of_the_steps_does_something_now_and_then(
    last_steps: int, is_seldom: bool
) -> None:
    run = evidence_of(training().trace())
    (rank,), steps = run.skew.ranks, tuple(StepSkew(step, (0,), None, 0) for step in range(STEPS))
    late = replace(rank, last_steps=last_steps, lag_when_last_ns=MS, cost_ns=last_steps * MS)
    skew = replace(run.skew, ranks=(late,), steps=steps, straggler=0, reason=None, costs_ns=(MS,) * STEPS)
    finding = straggler(replace(run, skew=skew))
    assert isinstance(finding, Finding)
    assert ("in the mean step" in finding.evidence, "now and then" in finding.advice) == (is_seldom, is_seldom)


def test_one_collective_per_parameter() -> None:
    trace = training(buckets=40, bucket_ns=10_000).trace()
    assert named(trace) == ["one collective per parameter"]
    assert named(with_sizes(trace, [8 << 20])) == [], "a large model has many buckets"


def test_without_steps_a_capture_is_not_taken_for_one() -> None:
    device = training(consumer="memcpy", buckets=8)
    device.ranges = [one for one in device.ranges if not one[0].startswith("step ")]
    found = diagnose(device.trace())
    (finding,) = found.findings
    assert (finding.rule, (finding.cost_ns or 0) // 10_000) == ("copies out of buckets", 8 * STEPS * 10)
    assert "step" not in found.findings[0].evidence
    assert {one.rule for one in found.abstained if "marks no whole step" in one.reason} == {
        "gradients reduced after backward", "one collective per parameter",
        "gradients ready in another order than buckets", "the last bucket is needed first", "vote on unused parameters",
        "host synchronization in backward", "overlap without gain", "time does not depend on size",
        "broadcast in forward", "barrier in each step", "buckets reduced several times",
    }  # fmt: skip


def without_compute(trace: Trace) -> Trace:
    """Nothing hides communication: all computes before it, in a kernel."""
    category = trace.activities.category.copy()
    category[np.flatnonzero(category == Category.COMPUTE)[1:]] = Category.MEMORY
    return replace(trace, activities=replace(trace.activities, category=category))


def test_without_sizes_nothing_is_said_to_depend_on_them() -> None:
    exposed = without_compute(training().trace())
    assert "time does not depend on size" in [one.rule for one in diagnose(exposed).abstained]
    known = diagnose(with_sizes(exposed, [8 << 20]))
    assert "time does not depend on size" not in [one.rule for one in (*known.findings, *known.abstained)]


def test_the_sizes_of_many_collectives_differ() -> None:
    _, finding = diagnose(load_trace(TRACES / "naive.sqlite")).findings
    assert "39 collectives, half of them of 256 KiB or less" in finding.evidence  # 37 MB in all


def test_a_device_that_copies_while_the_path_is_on_the_host_is_not_said_to_be_idle() -> None:
    """The loader's copy ends before the host, which does not wait for it, launches what ends the step."""
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            device.launch(1_000, 30, 8 * MS, is_collective=False, name="memcpy")
            device.launch(9 * MS, 7, MS, is_collective=False)
    (finding,) = diagnose(device.trace()).findings
    assert finding.rule == "launch-bound host"
    assert finding.cost_ns is not None
    assert finding.cost_ns > 8 * MS
    assert "nothing to do" not in finding.evidence


@pytest.mark.parametrize(
    ("late_steps", "size", "compute_ns", "cost_ns"),
    [
        (STEPS, UNKNOWN, 0, 6 * MS),
        (STEPS, 4 << 10, 0, None),
        (STEPS, 40 << 10, 0, 6 * MS),
        (STEPS // 2, UNKNOWN, 0, None),
        (STEPS, UNKNOWN, 5 * MS, None),
    ],
    ids=["sizes unknown", "few bytes in all", "many small ones", "half of the steps", "hidden by the next forward"],
)
def test_gradients_reduced_after_backward(late_steps: int, size: int, compute_ns: int, cost_ns: int | None) -> None:
    """Three all-reduces of 2 ms; in the other steps backward's hooks launch them."""
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            with device.range("backward"):
                device.launch(1, 7, 4 * MS, is_collective=False)
                device.record(1, 7, 1)
                device.wait(1, 20, 1)
                for _ in range(3 if step >= late_steps else 0):
                    device.launch(1, 20, 2 * MS, is_collective=True)
            for _ in range(3 if step < late_steps else 0):
                device.launch(1, 20, 2 * MS, is_collective=True)
            device.record(1, 20, 2)
            device.launch(1, 7, compute_ns or 1, is_collective=False)
            device.wait(1, 7, 2)
            device.launch(1, 7, MS, is_collective=False)
        device.synchronize(1)
    trace = with_sizes(device.trace(), [size])
    rule = "gradients reduced after backward"
    diagnosis = diagnose(trace)
    costs = [round((one.cost_ns or 0) / MS) * MS for one in diagnosis.findings if one.rule == rule]
    assert costs == ([] if cost_ns is None else [cost_ns])
    assert "one bucket for all gradients" not in [one.rule for one in diagnosis.findings]


@pytest.mark.parametrize(
    ("collectives", "waits_in", "may_be_ddp"), [(1, "other", True), (2, "other", False), (1, "synchronize", False)]
)
def test_ddp_of_one_bucket_is_not_told_to_use_ddp(collectives: int, waits_in: str, may_be_ddp: bool) -> None:
    """Where only ranges of operators tell backward, DDP's only bucket is launched after the last of them."""
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            with device.range("backward"):
                device.launch(1, 7, 4 * MS, is_collective=False)
                device.record(1, 7, 1)
            with device.range(waits_in):
                device.wait(1, 20, 1)
                for _ in range(collectives):
                    device.launch(1, 20, 3 * MS, is_collective=True)
                device.record(1, 20, 2)
            with device.range("optimizer"):
                device.wait(1, 7, 2)
                device.launch(1, 7, MS, is_collective=False)
        device.synchronize(1)
    (finding,) = diagnose(device.trace()).findings
    assert finding.rule == "gradients reduced after backward"
    assert ("If DDP runs already, one bucket" in finding.advice) == may_be_ddp


@pytest.mark.parametrize(("size", "is_named"), [(UNKNOWN, True), (8 << 20, True), (80, False)])
def test_one_bucket_for_all(size: int, is_named: bool) -> None:
    """Of 80 bytes all is latency, which several buckets would have several times."""
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            with device.range("backward"):
                device.launch(1, 7, 4 * MS, is_collective=False)
                device.record(1, 7, 1)
                device.wait(1, 20, 1)
                device.launch(1, 20, 3 * MS, is_collective=True)
                device.record(1, 20, 2)
            with device.range("optimizer"):
                device.wait(1, 7, 2)
                device.launch(1, 7, MS, is_collective=False)
        device.synchronize(1)
    trace = with_sizes(device.trace(), [size])
    found = named(trace)
    assert found == (["one bucket for all gradients"] if is_named else [])


def test_the_last_bucket_is_needed_first() -> None:
    slow = training(bucket_ns=3 * MS, needed=lambda bucket: 3 - bucket)
    assert "the last bucket is needed first" in named(slow.trace())
    assert "the last bucket is needed first" not in named(training(bucket_ns=3 * MS).trace())
    hidden = training(needed=lambda bucket: 3 - bucket)
    assert "the last bucket is needed first" not in named(hidden.trace()), "nothing stands still for it"


@pytest.mark.parametrize(("delay_ns", "is_named"), [(0, True), (100_000, False)])
def test_a_single_queue_lets_collectives_begin_only_when_compute_has_ended(delay_ns: int, is_named: bool) -> None:
    found = [one for one in diagnose(queued(delay_ns)).findings if one.rule == "single hardware queue"]
    assert bool(found) == is_named
    # Kernels that were launched after them had begun: a common queue does not let these pass.
    assert [one.gain_reason for one in found] == [NO_QUEUE] * is_named


@pytest.mark.parametrize(
    ("per_step", "known"),
    [(1, 4 * STEPS - (STEPS - 1)), (8, 4)],  # those of the first step are left
)
def test_lost_event_records_do_not_make_a_single_queue(per_step: int, known: int) -> None:
    """Of the first records of all steps but the first one, the calls alone are known: waits seem to be for its own."""
    trace = training().trace()
    calls = trace.synchronizations
    is_record = calls.kind == SyncKind.RECORD
    records, waits = np.flatnonzero(is_record), np.flatnonzero(calls.awaits != UNKNOWN)
    number, of_step = np.searchsorted(records, calls.awaits[waits]), len(records) // STEPS
    lost = np.flatnonzero((np.arange(len(records)) % of_step < per_step) & (np.arange(len(records)) >= of_step))
    awaits, stream = calls.awaits.copy(), calls.stream.copy()
    awaits[waits] = records[np.where(np.isin(number, lost), number % of_step, number)]
    stream[records[lost]] = UNKNOWN
    damaged = replace(trace, synchronizations=replace(calls, awaits=awaits, stream=stream))
    assert "single hardware queue" not in named(trace) + named(damaged)
    facts = evidence_of(damaged).facts[0]
    assert (facts.serialized, facts.could_begin) == (0, known)


@pytest.mark.parametrize(("high_ns", "is_named"), [(-36_000, False), (12_000, True)])
def test_what_would_make_steps_longer_is_not_advised(
    high_ns: int, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = "single hardware queue"
    monkeypatch.setattr(gains, "SIMULATED", {rule: lambda _run: Gain(-50_000, -80_000, high_ns)})
    assert (rule in named(queued(0))) == is_named


def test_gathers_and_scatters_of_one_stream_wait_for_each_other() -> None:
    rule = "one communicator serializes gathers and scatters"
    (finding,) = [one for one in diagnose(fsdp(20)).findings if one.rule == rule]
    assert round((finding.cost_ns or 0) / MS) == 3, "each of 5 waits for 1 ms, but all but 3 ms are hidden"
    assert rule not in named(fsdp(20, last_ns=9 * MS)), "compute hides all of it"
    assert rule not in named(fsdp(20, last_ns=9 * MS, first_ns=4 * MS)), "what is exposed waited for none of them"
    assert rule not in named(fsdp(21)) + named(fsdp(21, steps=1))
    assert rule not in named(fsdp(20, "AllReduce"))


def gathering_late(stream: int) -> Device:
    """Each scatter waits for its gradients, and so does the gather launched behind it on its stream, which needs none.

    ms         0   1   2   3   4   5
    stream 7   ggggggggg       ggggggggg
    stream 20  .........SSSSGGG         SSSSGGG      on a stream of its own, G would run at once
    """
    gather, scatter = (f"ncclDevKernel_{name}_RING_LL(x)" for name in ("AllGather", "ReduceScatter_Sum_f32"))
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"), device.range("backward"):
            for _ in range(4):
                device.launch(1, 7, 2 * MS, is_collective=False)
                device.record(1, 7, 1)
                device.wait(1, 20, 1)
                device.launch(1, 20, MS // 8, is_collective=True, name=scatter)
                device.launch(1, stream, MS, is_collective=True, name=gather)
                device.record(1, stream, 2)
                device.wait(1, 7, 2)
            device.launch(1, 7, MS, is_collective=False)
        device.synchronize(1)
    return device


def test_own_communicators_gain_no_more_than_the_bound() -> None:
    """What waits behind a scatter that waits itself could have begun before that: 0.50 ms was the bound of 4 ms."""
    shared, own = gathering_late(20), gathering_late(21)
    (finding,) = [one for one in diagnose(shared.trace()).findings if one.rule.startswith("one communicator")]
    assert (finding.cost_ns or 0) >= (shared.end - own.end) // STEPS > 4 * MS


def test_where_shards_are_reduced_several_times_the_advice_is_that_of_fully_shard() -> None:
    found = diagnose(passes_that_reduce([8, 4] * 2, name="ncclDevKernel_ReduceScatter_Sum_f32(x)")).findings
    (finding,) = [one for one in found if one.rule == "buckets reduced several times"]
    assert "set_requires_gradient_sync(False) of fully_shard" in finding.advice


@pytest.mark.parametrize("phase", ["optimizer", "forward"])
def test_what_gathers_updated_parameters_does_not_queue_behind_their_gradients(phase: str) -> None:
    """As ZeRO-1 gathers in the optimizer, or Megatron-LM before the next forward: own communicators gain nothing."""
    gather, scatter = (f"ncclDevKernel_{name}_RING_LL(x)" for name in ("AllGather", "ReduceScatter_Sum_f32"))
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            with device.range("forward"):
                if phase == "forward":
                    device.launch(1, 20, MS, is_collective=True, name=gather)
                    device.record(1, 20, 1)
                    device.wait(1, 7, 1)
                device.launch(1, 7, MS, is_collective=False)
            with device.range("backward"):
                device.launch(1, 7, MS, is_collective=False)
                device.record(1, 7, 1)
                device.wait(1, 20, 1)
                device.launch(1, 20, MS, is_collective=True, name=scatter)
                device.record(1, 20, 2)
            with device.range("optimizer"):
                device.wait(1, 7, 2)
                device.launch(1, 7, MS, is_collective=False)
                device.record(1, 7, 1)
                device.wait(1, 20, 1)
                if phase == "optimizer":
                    device.launch(1, 20, MS, is_collective=True, name=gather)
                    device.record(1, 20, 2)
                    device.wait(1, 7, 2)
        device.synchronize(1)
    assert "one communicator serializes gathers and scatters" not in named(device.trace())


@pytest.mark.parametrize(("steps", "is_named"), [(STEPS - 2, True), (STEPS // 2, False)])
def test_a_broadcast_in_forward_of_half_of_the_steps_is_no_fault(steps: int, is_named: bool) -> None:
    """As where an evaluation begins now and then; DDP broadcasts its buffers in each step."""
    trace = with_another("ncclDevKernel_Broadcast_RING_LL(x)", "forward", since=STEPS - steps)
    assert ("broadcast in forward" in named(trace)) == is_named


@pytest.mark.parametrize(("vote_bytes", "is_named"), [(512, True), (4 << 20, False)])
def test_a_vote_on_unused_parameters(vote_bytes: int, is_named: bool) -> None:
    trace = with_sizes(training().trace(), [8 << 20] * 3 + [vote_bytes])
    assert ("vote on unused parameters" in named(trace)) == is_named


@pytest.mark.parametrize(
    "sizes",
    [[8 << 20, 4], [8 << 20, 8 << 20, 12]],
    ids=["a loss, or a barrier of NCCL", "other metrics"],
)
def test_small_reductions_after_backward_are_no_vote(sizes: list[int]) -> None:
    """Of a loop that reduces its gradients after backward: DDP votes within it."""
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            with device.range("backward"):
                device.launch(1, 7, 4 * MS, is_collective=False)
            device.record(1, 7, 1)
            device.wait(1, 20, 1)
            for _ in sizes:
                device.launch(1, 20, 3 * MS, is_collective=True)
            device.record(1, 20, 2)
            with device.range("optimizer"):
                device.wait(1, 7, 2)
                device.launch(1, 7, MS, is_collective=False)
        device.synchronize(1)
    trace = with_sizes(device.trace(), sizes)
    assert named(trace) == ["gradients reduced after backward"]


@pytest.mark.parametrize(
    ("sizes", "is_named"),
    [
        ([8, 8, 8], True),
        ([UNKNOWN, UNKNOWN, UNKNOWN], True),
        ([16, 8, 8], False),  # half of the gradients are late in any order
        ([8, 8, UNKNOWN], False),  # two buckets and a vote
    ],
)
def test_buckets_that_are_all_complete_only_at_the_end(sizes: list[int], is_named: bool) -> None:
    device = Device()
    us = 1_000
    for step in range(STEPS):
        with device.range(f"step {step}"):
            with device.range("backward"):
                for _ in range(20):
                    device.launch(us, 7, MS, is_collective=False)
                for _ in sizes:
                    device.launch(us, 20, MS, is_collective=True)
                device.launch(us, 7, MS, is_collective=False)
            device.synchronize(us)
    trace = with_sizes(device.trace(), sizes)
    found = named(trace)
    assert ("gradients ready in another order than buckets" in found) == is_named


@pytest.mark.parametrize("last_in", ["backward", "synchronize"])
def test_the_last_bucket_of_a_pass_may_be_launched_after_it(last_in: str) -> None:
    """All are ready when backward is over, as where parameters are registered in the wrong order."""
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            with device.range("backward"):
                for _ in range(20):
                    device.launch(1_000, 7, MS, is_collective=False)
            for bucket, phase in enumerate(("backward", "backward", last_in)):
                with device.range(phase), device.range(f"all_reduce|bucket={bucket}|bytes={8 << 20}|params=2"):
                    device.launch(1_000, 20, MS, is_collective=True)
        device.synchronize(1_000)
    assert "gradients ready in another order than buckets" in named(device.trace())


@pytest.mark.parametrize(("size", "is_named"), [(8 << 20, True), (UNKNOWN, False)])
def test_of_a_stage_of_a_pipeline_sizes_tell_gradients_from_their_norm(size: int, is_named: bool) -> None:
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            with device.range("backward"):
                device.launch(1, 21, MS, is_collective=True, name="ncclDevKernel_SendRecv(x)")
                device.launch(1, 7, 4 * MS, is_collective=False)
            device.record(1, 7, 1)
            device.wait(1, 20, 1)
            device.launch(1, 20, 3 * MS, is_collective=True)
            device.record(1, 20, 2)
            with device.range("optimizer"):
                device.wait(1, 7, 2)
                device.launch(1, 7, MS, is_collective=False)
        device.synchronize(1)
    diagnosis, rule = diagnose(with_sizes(device.trace(), [1 << 20, size])), "gradients reduced after backward"
    assert (rule in [one.rule for one in diagnosis.findings]) == is_named
    assert (rule in [one.rule for one in diagnosis.abstained]) == (not is_named)


@pytest.mark.parametrize(
    ("rule", "sizes", "left_out"),
    [
        ("one bucket for all gradients", [8 << 20], 1),
        ("gradients ready in another order than buckets", [8 << 20] * 3, 3),
        ("vote on unused parameters", [8 << 20, 8 << 20, 512], 1),
    ],
)
def test_a_collective_costs_also_what_stands_still_for_it_beside_compute_of_another_stream(
    rule: str, sizes: list[int], left_out: int
) -> None:
    """Of 3 ms each, all but 2 ms in all are hidden, and the optimizer waits for all of them: 2 ms were the limit."""
    device = Device()
    for step in range(STEPS):
        with device.range(f"step {step}"):
            with device.range("backward"):
                for _ in range(20):
                    device.launch(1_000, 7, MS, is_collective=False)
                device.record(1, 7, 1)
                for stream in (20, 8):
                    device.wait(1, stream, 1)
                for _ in sizes:
                    device.launch(1, 20, 3 * MS, is_collective=True)
                device.record(1, 20, 2)
                device.launch(1, 8, (3 * len(sizes) - 2) * MS, is_collective=False)
            with device.range("optimizer"):
                device.wait(1, 7, 2)
                device.launch(1, 7, MS, is_collective=False)
        device.synchronize(1)
    trace = with_sizes(device.trace(), sizes)
    findings = diagnose(trace).findings
    (cost_ns,) = [one.cost_ns for one in findings if one.rule == rule]
    rows = np.flatnonzero(trace.activities.lane == 20)
    free = rows[np.arange(len(rows)) % len(sizes) >= len(sizes) - left_out]
    assert (device.again().end - device.again(*free).end) / STEPS <= (cost_ns or 0) <= 3 * MS * left_out


@pytest.mark.parametrize("is_pass_a_step", [False, True])
def test_buckets_are_late_in_the_pass_that_launches_them_not_in_the_step(is_pass_a_step: bool) -> None:
    """Gradients are accumulated over six passes of backward, and reduced in the last one."""
    device = Device()
    us = 1_000
    for step in range(STEPS):
        with device.range(f"batch {step}" if is_pass_a_step else f"step {step}"):
            for part in range(6):
                own = device.range(f"step {6 * step + part}") if is_pass_a_step else nullcontext()
                with own, device.range("backward"):
                    for _ in range(3):
                        device.launch(us, 7, MS, is_collective=False)
                        if part == 5:
                            device.launch(us, 20, MS, is_collective=True)
            device.synchronize(us)
    assert "gradients ready in another order than buckets" not in named(device.trace())


@pytest.mark.parametrize(("contention_ns", "is_named"), [(50 * MS, True), (MS // 10, False)])
def test_hiding_that_costs_more_than_it_saves(contention_ns: int, is_named: bool) -> None:
    contention = replace(NO_CONTENTION, contention_ns=contention_ns)
    assert ("overlap without gain" in named(training().trace(), contention)) == is_named


def test_hiding_of_which_the_cost_is_known_of_some_ranks_is_judged_only_where_it_costs() -> None:
    def findings_with(contention_ns: int) -> tuple[list[str], dict[str, str]]:
        found = diagnose(training().trace(), replace(NO_CONTENTION, contention_ns=contention_ns), (8, 64))
        return [one.rule for one in found.findings], {one.rule: one.reason for one in found.abstained}

    rule = "overlap without gain"
    assert findings_with(MS // 10)[1][rule] == "kernels of 8 of 64 traces were compared: in these overlap gains time"
    assert rule in findings_with(50 * MS)[0]


def test_the_doctor_says_of_how_many_files_kernels_were_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MOST_FILES_OF_KERNELS", 1)
    files = [write_capture(tmp_path / f"{name}.sqlite", bucket_steps(20, 4)) for name in "ab"]
    document = json.loads(run("doctor", *files, "--one-run", "--format", "json").stdout)
    (reason,) = [one["reason"] for one in document["abstained"] if one["rule"] == "overlap without gain"]
    assert reason.startswith("kernels of 1 of 2 traces were compared: ")


def test_hiding_of_which_the_cost_is_not_known_is_not_judged() -> None:
    refused = replace(NO_CONTENTION, contention_ns=None, reason="fewer than 5 kernels to compare")
    abstained = {one.rule: one.reason for one in diagnose(training().trace(), refused).abstained}
    assert abstained["overlap without gain"] == "fewer than 5 kernels to compare"


@pytest.mark.parametrize(("share", "is_named"), [(0.2, True), (0.01, False)])
def test_a_profiler_that_is_at_work_itself(share: float, is_named: bool) -> None:
    assert ("overhead of the profiler" in named(profiled(share))) == is_named


def test_a_profiler_that_is_at_work_is_found_without_steps_too() -> None:
    device = training()
    device.ranges = []
    trace = device.trace()
    start = trace.activities.start_ns[:1]
    busy = replace(trace, overhead=Overhead(start, start + device.end // 4))
    (finding,) = [one for one in diagnose(busy).findings if one.rule == "overhead of the profiler"]
    assert finding.evidence == "The profiler was at work in 25 % of the capture."


def test_where_no_launch_is_known_the_rules_about_steps_do_not_decide() -> None:
    """They were said not to have found anything."""
    trace = training(in_backward=lambda device, _bucket: device.synchronize(1_000)).trace()
    start = trace.activities.start_ns[:1]
    busy = replace(trace, overhead=Overhead(start, start + trace.activities.end_ns.max() // 4))
    known = diagnose(busy)
    assert {one.rule for one in known.abstained} == {"straggler", "vote on unused parameters"}
    nothing = np.full(len(trace.activities), UNKNOWN)
    is_collective = trace.activities.category == Category.COMMUNICATION
    unnumbered = replace(trace.activities, correlation=np.where(is_collective, nothing, trace.activities.correlation))
    launching = np.where(is_collective, nothing, trace.launching_calls)
    found = diagnose(replace(busy, activities=unnumbered, launching_calls=launching))
    assert {one.rule for one in found.abstained if one.reason == NO_LAUNCHES} == {
        "gradients reduced after backward", "one collective per parameter",
        "gradients ready in another order than buckets", "copies out of buckets",
        "the last bucket is needed first", "vote on unused parameters",
        "host synchronization in backward", "overlap without gain", "time does not depend on size",
            "broadcast in forward", "barrier in each step", "buckets reduced several times",
    }  # fmt: skip
    (overhead,) = found.findings
    assert overhead in known.findings


def without_recorded_waits(device: Device) -> Trace:
    """As nsys 2025 and later record by default: what streams wait for is not told."""
    trace = device.trace()
    calls = trace.synchronizations
    return replace(
        trace, sync_source="none", sync_reason="not recorded",
        synchronizations=replace(calls, awaits=np.full(len(calls), -1)),
    )  # fmt: skip


def test_without_recorded_waits_what_needs_them_is_not_judged() -> None:
    unknown = without_recorded_waits(training(consumer="memcpy"))
    found = diagnose(unknown)
    assert found.findings == ()
    rules = {one.rule for one in found.abstained}
    assert rules >= {
        "copies out of buckets", "single hardware queue", "launch-bound host", "the last bucket is needed first",
    }  # fmt: skip
    assert "host synchronization in backward" not in rules, "the host's own waits are there"
    calls = unknown.synchronizations
    of_streams = np.where(calls.kind == SyncKind.HOST_WAIT_DEVICE, SyncKind.HOST_WAIT_STREAM, calls.kind)
    for_unknown = replace(unknown, synchronizations=replace(calls, kind=of_streams))  # a wait for some stream
    assert "host synchronization in backward" in {one.rule for one in diagnose(for_unknown).abstained}
    none_held = replace(unknown, synchronizations=select(calls, ~np.isin(calls.kind, HOST_WAITS)))
    assert "host synchronization in backward" in {one.rule for one in diagnose(none_held).abstained}


def test_without_recorded_waits_an_idle_device_tells_that_the_host_launches_late() -> None:
    """Each step the device computes until 14 ms after the step began, and the host launches the rest after 39 ms."""
    trace = without_recorded_waits(training(before_optimizer_ns=39 * MS))
    (finding,) = diagnose(trace).findings
    assert (finding.rule, finding.ranks) == ("launch-bound host", ("process 4242",))
    assert finding.cost_ns == pytest.approx(25 * MS, abs=MS // 10)
    assert finding.steps == ()
    without_launches = replace(trace, launching_calls=np.full(len(trace.activities), -1))
    assert "launch-bound host" in {one.rule for one in diagnose(without_launches).abstained}


def test_why_dependencies_are_not_known_is_said_by_the_first_rank_that_lacks_them() -> None:
    """The reason of rank 0, which has none, stood for all ranks."""
    run = evidence_of(training().trace())
    (known,) = run.overlap.ranks
    assert known.dependencies is not None
    unknown = replace(known, dependencies=replace(known.dependencies, reason="not recorded"))
    for ranks, reason in (((known, unknown), "not recorded"), ((known, known), None)):
        assert replace(run, overlap=replace(run.overlap, ranks=ranks)).why_no_dependencies == reason


def test_a_host_that_waits_in_backward_is_found_without_them() -> None:
    run = training(in_backward=lambda device, _bucket: device.synchronize(1_000), bucket_ns=3 * MS)
    trace = without_recorded_waits(run)
    assert "host synchronization in backward" in [one.rule for one in diagnose(trace).findings]
    kinds = np.where(np.isin(trace.synchronizations.kind, HOST_WAITS), SyncKind.HOST_WAIT_EVENT, SyncKind.RECORD)
    by_event = replace(trace, synchronizations=replace(trace.synchronizations, kind=kinds))
    found = diagnose(by_event)
    assert found.findings == ()
    reasons = {one.rule: one.reason for one in found.abstained}
    assert reasons["host synchronization in backward"] == "the trace does not tell what the host waited for"


def with_averaged_metric(where: str, bucket_steps: tuple[int, ...]) -> Trace:
    """Steps with an all-reduce of unknown size ``where``; backward of some reduces four buckets, too."""
    device = Device()

    def average(place: str) -> None:
        if place == where:
            device.record(1_000, 7, 1)
            device.wait(1_000, 20, 1)
            device.launch(1_000, 20, MS, is_collective=True)
            device.record(1_000, 20, 2)
            device.wait(1_000, 7, 2)

    for step in range(STEPS):
        with device.range(f"step {step}"):
            average("before forward")
            with device.range("forward"):
                device.launch(1_000, 7, 4 * MS, is_collective=False)
            with device.range("backward"):
                for _ in range(4):
                    device.launch(1_000, 7, 2 * MS, is_collective=False)
                    if step in bucket_steps:
                        device.record(1_000, 7, 1)
                        device.wait(1_000, 20, 1)
                        device.launch(1_000, 20, MS, is_collective=True)
            average("after backward")
            with device.range("optimizer"):
                average("in the optimizer")
                device.launch(1_000, 7, MS, is_collective=False)
                average("end of the optimizer")
            average("after the optimizer")
        device.synchronize(1_000)
    return device.trace()


@pytest.mark.parametrize(
    ("where", "bucket_steps", "rules"),
    [
        ("in the optimizer", (), ["gradients reduced after backward"]),
        ("end of the optimizer", (), []),
        ("after the optimizer", (), []),
        ("after backward", (), ["gradients reduced after backward"]),
        ("after backward", (2, 5), []),
        ("before forward", (), []),
        ("before forward", (2, 5), []),
    ],
    ids=[
        "before its first kernel",
        "parameters",
        "parameters later",
        "a flat reduction",
        "a loss of each micro-batch",
        "a metric alone",
        "a metric of each micro-batch",
    ],
)
def test_what_no_gradient_can_be_is_no_fault_of_the_reduction_of_gradients(
    where: str, bucket_steps: tuple[int, ...], rules: list[str]
) -> None:
    """Gradients are not reduced before backward, nor after it in steps between those whose backward reduces them.

    Nor are they after the optimizer that needs them.
    """
    found = diagnose(with_averaged_metric(where, bucket_steps))
    assert [one.rule for one in found.findings] == rules
    assert "all rules about gradients" not in [one.rule for one in found.abstained]


def test_how_late_the_first_bucket_is_does_not_depend_on_what_follows_backward() -> None:
    (facts,) = evidence_of(with_averaged_metric("after backward", (2, 5))).facts
    assert len(facts.first_share) == 2
    assert max(facts.first_share) < 0.5


def test_a_hook_that_waits_makes_backward_stand_still_for_all_but_the_last_bucket() -> None:
    """Four buckets of 1 ms; what follows the last one in backward waits for it, too, but would in any schedule."""
    assert "backward waits for its reductions" not in named(training().trace())
    (finding,) = diagnose(training(waits_in_hooks=True).trace()).findings
    assert finding.rule == "backward waits for its reductions"
    assert f"In {STEPS} of {STEPS} steps" in finding.evidence
    assert abs((finding.cost_ns or 0) - 3 * MS) < MS // 100


@pytest.mark.parametrize(
    ("operation", "argument", "words"),
    [("AllReduce_Sum", "bucket_cap_mb", "bucket"), ("ReduceScatter_Sum", None, "Shard"), ("Reduce_Sum", None, "Shard")],
)
@pytest.mark.parametrize("buckets", [1, 40])
def test_buckets_are_the_advice_to_all_reduces_and_units_to_shards(
    buckets: int, operation: str, argument: str | None, words: str
) -> None:
    """fully_shard has no bucket_cap_mb."""
    length_ns = 5 * MS if buckets == 1 else 10_000
    found = diagnose(training(buckets=buckets, bucket_ns=length_ns, operation=operation).trace()).findings
    (finding,) = [one for one in found if one.rule in ("one bucket for all gradients", "one collective per parameter")]
    assert finding.argument == argument
    assert words in finding.advice


@pytest.mark.parametrize("operation", ["AllReduce_Sum", "ReduceScatter_Sum", "Reduce_Sum"])
def test_gradient_as_bucket_view_is_the_advice_to_all_reduces_alone(operation: str) -> None:
    """What shards gradients has no such argument; torch's DDP, which has it, does not shard them."""
    trace = training(consumer="memcpy", operation=operation).trace()
    assert ("copies out of buckets" in named(trace)) == (operation == "AllReduce_Sum")


def test_a_copy_of_the_loss_to_the_host_is_none_out_of_a_bucket() -> None:
    copied = with_consumer_bytes(training(consumer="memcpy").trace(), 8 << 20)
    assert "copies out of buckets" in named(copied)
    assert "copies out of buckets" not in named(with_consumer_bytes(copied, 4))
    to_host = replace(copied, names=tuple("Memcpy DtoH" if name == "memcpy" else name for name in copied.names))
    assert "copies out of buckets" not in named(to_host)


def with_consumer_bytes(trace: Trace, size: int) -> Trace:
    """The trace with copies of this size."""
    is_copy = trace.activities.kind == Kind.COPY
    return replace(trace, activities=replace(trace.activities, bytes=np.where(is_copy, size, UNKNOWN)))
