"""Input of the doctor's rules: the results of the other analyses, and a few more facts per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from ddp_prof.analyze.collectives.gradients import NUMBER_BYTES, carry_gradients
from ddp_prof.analyze.collectives.results import RunCollectives
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.skew import RunSkew
from ddp_prof.analyze.core.attribution import BACKWARD_PHASE, MAY_REDUCE, Events
from ddp_prof.analyze.core.backward_waits import waits_in_backward
from ddp_prof.analyze.core.bucket_copies import find_bucket_copies, is_copy_within_device
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.step_breakdown import sum_by_group
from ddp_prof.analyze.core.work import BACK_TO_BACK_NS
from ddp_prof.analyze.critical.critical_path import RunCritical
from ddp_prof.analyze.critical.hardware_queue import find_held_ns
from ddp_prof.analyze.critical.what_if import WhatIf
from ddp_prof.analyze.doctor.gradients import Gradients, median_or_zero
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.analyze.kernels.contention import Contention
from ddp_prof.analyze.kernels.contention_limit import SlowdownLimit, limit_slowdown
from ddp_prof.analyze.kernels.device_use import measure_starvation
from ddp_prof.analyze.overlap import TraceOverlap
from ddp_prof.analyze.root_cause import RootCause
from ddp_prof.analyze.why_unknown import NOT_TIMED, why_no_steps, why_unknown
from ddp_prof.communication import BROADCAST, GATHER, OPERATIONS, PEER_COPY, REDUCE, SCATTER
from ddp_prof.range_names import FORWARD, PHASES
from ddp_prof.table import (
    NEVER,
    NO_TIME,
    UNKNOWN,
    Ints,
    Mask,
    begins_run,
    concatenate,
    distinct,
    empty,
    is_in,
    rows_of,
    select,
    take_or_unknown,
)
from ddp_prof.trace import HOST_WAITS, Category, SyncKind

_OF_DATA_PARALLEL = {BROADCAST, REDUCE, GATHER, SCATTER, PEER_COPY}
"""The operations of ``torch.nn.DataParallel``."""

NO_STEPS = "the trace marks no whole step (see --step-range)"
NO_PHASES = "the trace does not tell what backward launched (see --backward-range)"

NO_LAUNCHES = "no step is known to have launched what communicates"

_NO_SIZES_IN_GRAPHS = (
    "the trace does not tell the sizes of collectives that a CUDA graph launches: record some steps without graphs, "
    "or, with PyTorch later than 2.13, export by export_chrome_trace(cuda_graph_annotations=...)"
)
_BY_PROFILER, _BY_NSYS = True, False
_WHAT_TELLS_SIZES = {
    ("nccl", _BY_PROFILER): (
        "torch.profiler writes them for NCCL with PyTorch 2.2 and later, if it records the CPU, too"
    ),
    ("nccl", _BY_NSYS): "NCCL 2.16 and later tells them to nsys, and 'nsys export --include-json=true' keeps them",
    ("gloo", _BY_PROFILER): (
        "torch.profiler writes them for gloo with record_shapes=True; 'ddp-prof capture', which does not set it, marks "
        "the buckets of DDP by --profiler nsys"
    ),
    ("gloo", _BY_NSYS): "nsys records none of gloo, but ddp_prof.annotate.instrument(model) marks those of DDP",
}
"""What records the sizes of collectives, by the library and by whether torch.profiler recorded, or nsys."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in the set-up of a run that costs time.

    Attributes:
        rule: Name of the rule that found it.
        evidence, advice: What was measured, and what to do about it, in sentences.
        ranks: Names of the ranks that it concerns; empty if it concerns the whole run.
        steps: Numbers of the steps that it concerns; empty if it concerns the whole run, or if steps have no numbers.
        cost_ns: Upper limit of its cost in a typical step; ``None`` if not known, for ``cost_reason``.
        expected_gain_ns: How much shorter a typical step would be without it, by a simulation, at most ``cost_ns``;
            ``None`` if that could not be simulated, for ``gain_reason``. Of late ranks, both are those of the mean
            step: they may be late in some steps only.
        gain_low_ns, gain_high_ns: The 95 % interval of ``expected_gain_ns``; ``None`` if steps are too few for one.
        gain_reason: Why the gain, or its interval, is not known.
        argument, value: The setting to change, an argument of DistributedDataParallel or an environment variable, and
            its new value; ``None`` where the advice is no single setting, or names no value.
        cost_reason: Why ``cost_ns`` is not known.
    """

    rule: str
    evidence: str
    advice: str
    ranks: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    cost_ns: int | None = None
    expected_gain_ns: int | None = None
    gain_low_ns: int | None = None
    gain_high_ns: int | None = None
    gain_reason: str | None = None
    argument: str | None = None
    value: str | float | bool | None = None
    cost_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Abstained:
    """A rule that cannot decide with these traces, and the reason."""

    rule: str
    reason: str


@dataclass(frozen=True)
class RankFacts:
    """Facts of one rank; arrays and tuples have one element per step.

    Attributes:
        process, device: Which rank it is.
        is_gloo: Whether collectives have no activity on a device, which means that gloo runs them on the host.
        syncs: How often a thread that trains waited for the device between the first launch of a pass of backward and
            the last launch of a collective of this pass.
        sync_ns: The sum of the lengths of these waits.
        bare_ns: The part of the step in which the stream with most compute does nothing, not even communicate.
        unfed_ns: The same without the time before work that had been launched long before. Launching earlier cannot
            make the step shorter by more than that.
        copies_ns: How long copies out of buckets ran on the stream with most compute, in the steps whose length is
            known; if none is, in the windows of all steps.
        copy_launches_ns: Upper limit of the time in which the host launched these copies: the time since the launch
            before each of them.
        knows_syncs: Whether the trace contains the waits of the host.
        first_share: For each pass of backward that launches collectives, the fraction of it (0 to 1) that was over when
            it launched the first one; NaN if not known.
        serialized: Number of collectives that could have begun earlier, but began when an operation of another stream
            ended, or when an operation that was launched before them began.
        could_begin: Number of collectives for which it is known when they could have begun.
        graphs: Number of replays of CUDA graphs that were recorded as single activities.
        outside_ns: The host's time outside of all phases while nothing communicated; empty without ranges of forward.
        between_ns: How long nothing ran between a step and the next one; empty where the host runs ahead.
        starved_ns: How long the device was idle before its next work was launched; empty if not known, or where
            dependencies are known, which tell more.
        overhead_share: The fraction (0 to 1) of the time of the rank's steps in which the profiler itself was at work.
        slowdown: Times of kernels that limit how much communication can slow them; faster to read than ``contention``.
    """

    process: int
    device: int | None
    is_gloo: bool
    syncs: Ints
    sync_ns: Ints
    bare_ns: tuple[int, ...]
    unfed_ns: tuple[int, ...]
    copies_ns: tuple[int, ...]
    copy_launches_ns: tuple[int, ...]
    knows_syncs: bool
    first_share: tuple[float, ...]
    serialized: int
    could_begin: int
    graphs: int
    outside_ns: tuple[int, ...]
    between_ns: tuple[int, ...]
    starved_ns: tuple[int, ...]
    overhead_share: float
    slowdown: SlowdownLimit

    def without_steps(self) -> RankFacts:
        """Return the facts without those that have one element per step."""
        no_times: tuple[int, ...] = ()
        return replace(
            self,
            syncs=self.syncs[:0],
            sync_ns=self.sync_ns[:0],
            bare_ns=no_times,
            unfed_ns=no_times,
            copies_ns=no_times,
            copy_launches_ns=no_times,
            outside_ns=no_times,
            between_ns=no_times,
            starved_ns=no_times,
        )


@dataclass(frozen=True)
class RunEvidence:
    """The input of all rules.

    Attributes:
        analysis, collectives, overlap, critical, skew: Results of the other analyses.
        facts: One per rank, in the order of the ranks of ``analysis``.
        contention: Measures when it is called how much communication slows compute, since it reads kernels again.
        what_if: Replays steps without the cause of a finding.
        cause: Why most of the exposed time is exposed.
        compared_files: The number of traces in which contention is measured, and that of all traces; ``None`` if it is
            measured in all.
    """

    analysis: RunAnalysis
    collectives: RunCollectives
    overlap: TraceOverlap
    critical: RunCritical
    skew: RunSkew
    facts: tuple[RankFacts, ...]
    contention: Callable[[], Contention]
    what_if: WhatIf
    cause: RootCause | None = None
    compared_files: tuple[int, int] | None = None

    @property
    def is_cpu(self) -> bool:
        return self.analysis.device == "cpu"

    @cached_property
    def is_data_parallel(self) -> bool:
        """Whether one process broadcasts to its devices and reduces to one of them, as ``torch.nn.DataParallel``."""
        ranks = self.analysis.ranks
        operations = {OPERATIONS[one] for rank in ranks for one in distinct(rank.timings.operation) if one != UNKNOWN}
        return all(rank.of_several for rank in ranks) and {BROADCAST, REDUCE} <= operations <= _OF_DATA_PARALLEL

    @cached_property
    def facts_of_steps(self) -> tuple[RankFacts, ...]:
        """The facts of each rank, for figures of a step.

        Of a rank that marks no steps in a run that has some, what is measured per step is of its whole capture. That is
        no step of the run, and is left out.
        """
        return tuple(
            facts.without_steps() if self.analysis.has_steps and not rank.marks_steps else facts
            for rank, facts in zip(self.analysis.ranks, self.facts, strict=True)
        )

    @cached_property
    def gradients(self) -> Gradients:
        """The collectives of all ranks that reduce gradients in a step; a unit is a step."""
        of_ranks = []
        for index, (rank, exposure) in enumerate(zip(self.analysis.ranks, self.analysis.exposures, strict=True)):
            rows = np.flatnonzero(carry_gradients(rank) & (rank.keys != UNKNOWN))
            shared = {item.name for item in fields(Gradients)} & {item.name for item in fields(rank.timings)}
            columns = {name: getattr(rank.timings, name)[rows] for name in shared}
            # The additional last element is for UNKNOWN, which is -1.
            is_copy = np.array([*map(is_copy_within_device, rank.consumers), False])
            copied_bytes = rank.timings.consumer_bytes[rows]
            is_number = (copied_bytes != UNKNOWN) & (copied_bytes <= NUMBER_BYTES)
            is_needed = rank.timings.needed_by_backward[rows] == 1
            is_needed &= rank.timings.consumer_lane[rows] == rank.compute_stream
            of_rank = Gradients(
                rank=np.full(len(rows), index),
                unit=columns["step"],
                number=take_or_unknown(rank.step_numbers, columns["step"]),
                is_copied=is_copy[columns["consumer"]] & ~is_number,
                is_needed_on_stream=is_needed,
                exposed_ns=exposure.exposed_ns[rows],
                **columns,
            )
            of_ranks.append(of_rank)
        every = concatenate(*of_ranks) if of_ranks else empty(Gradients)

        # Steps are numbered over all ranks: one begins where the rank, or its step, differs from the row before.
        step = np.cumsum(begins_run(every.rank, every.step)) - 1
        return replace(every, step=step, unit=step)

    def where(self, found: Gradients) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the names of the ranks, and the numbers of the steps, to which the collectives belong."""
        ranks = dict.fromkeys(self.analysis.ranks[index].name for index in distinct(found.rank))
        return tuple(ranks), tuple(number for number in distinct(found.number) if number != UNKNOWN)

    def cost_ns(self, of_steps: Sequence[int]) -> int | None:
        """Return the median of costs per step; without steps, the largest cost of a rank; ``None`` without costs."""
        if not of_steps:
            return None
        return median_or_zero(of_steps) if self.analysis.has_steps else max(of_steps)

    def typical_exposed_ns(self, values: Ints) -> int | None:
        """Return the median of exposed times, or of costs that rest on them; ``None`` if exposed time is not known."""
        return None if self.collectives.reason else median_or_zero(values)

    @cached_property
    def why_no_steps(self) -> str | None:
        """Why it is not known which collectives belong to which step.

        ``None`` if that is known, or if nothing seems to reduce gradients.
        """
        if not self.analysis.has_steps:
            return why_no_steps((rank.reason for rank in self.analysis.ranks), NO_STEPS) if self.gradients else None
        communicates = any(rank.comm_ns for rank in self.overlap.ranks)
        return (
            NO_LAUNCHES if communicates and not any(rank.communicating_steps for rank in self.overlap.ranks) else None
        )

    @property
    def whole(self) -> str:
        """What medians over steps are of, in words: a step or, where nothing marks steps, the capture."""
        return "a typical step" if self.analysis.has_steps else "the capture"

    @property
    def why_no_gradients(self) -> str | None:
        """Why it is not known whether a collective reduces gradients; ``None`` if that is known, or nothing reduces."""
        ranks = self.analysis.ranks
        is_known = len(self.gradients) or any(
            (rank.timings.phase != UNKNOWN).any() or (rank.timings.backward_end_ns != NO_TIME).any() for rank in ranks
        )
        reduces = any(np.isin(rank.timings.operation, MAY_REDUCE).any() for rank in ranks)
        return NO_PHASES if reduces and not is_known else None

    @property
    def knows_queues(self) -> bool:
        """Whether it is known of all collectives on streams whether they queued: from when on they could have begun."""
        for timings in (rank.timings for rank in self.analysis.ranks):
            could_ns = np.maximum.reduce((timings.launch_ns, timings.ready_ns, timings.input_ns))
            if np.any((timings.step != UNKNOWN) & (timings.lane != UNKNOWN) & (could_ns == NO_TIME)):
                return False
        return True

    @property
    def why_no_dependencies(self) -> str | None:
        """Why the dependencies of some rank that communicates are not known; ``None`` if they are, on all of them."""
        reasons = (rank.dependencies.reason for rank in self.overlap.ranks if rank.dependencies and rank.collectives)
        return next(filter(None, reasons), None)

    @property
    def why_no_sizes(self) -> str:
        """That sizes are not known, and what records them."""
        timings = [rank.timings for rank in self.analysis.ranks]
        if all(np.all(one.graph_input_ns[one.bytes == UNKNOWN] != NO_TIME) for one in timings):
            return _NO_SIZES_IN_GRAPHS
        library = "gloo" if all(facts.is_gloo for facts in self.facts) else "nccl"
        recorded = {source == "kineto" for source, *_ in self.overlap.recorded_by}
        told = [_WHAT_TELLS_SIZES[library, by] for by in (_BY_PROFILER, _BY_NSYS) if by in recorded]
        return f"the trace does not tell the sizes of collectives: {'; '.join(told)}"

    @property
    def unknown_needs(self) -> str:
        """Why it is not known which operation needs a collective."""
        return self.why_no_dependencies or "it is not known what needs the collectives"


def measure_facts(rank: RankEvents) -> RankFacts:
    """Measure the facts of a rank that the doctor's rules need and no other analysis has."""
    syncs, sync_ns = _syncs_in_backward(rank)
    # ``busy``: when the stream with most compute was busy; ``held``: its gaps that more launches would not have filled.
    events, on_stream = rank.events, rank.events.lane == rank.compute_stream
    busy = _union_of(events, on_stream)
    held = _held_gaps(busy, events, on_stream)
    is_copy = (events.activity != UNKNOWN) & np.isin(events.activity, find_bucket_copies(rank))
    start_ns, length_ns = _windows(rank)
    end_ns = start_ns + length_ns
    bare_ns = length_ns - busy.covered_ns(start_ns, end_ns)
    starved = measure_starvation(rank) if rank.blocking.coverage.reason else None
    overhead = union(rank.trace.overhead.start_ns, rank.trace.overhead.end_ns)
    windows = rank.breakdown
    if rank.clocks_disagree:
        windows_ns = rank.steps.start_ns, rank.steps.end_ns
    else:
        windows_ns = windows.start_ns, windows.end_ns
    overhead_ns = int(overhead.covered_ns(*windows_ns).sum())
    serialized, could_begin = _count_serialized(rank)
    return RankFacts(
        process=rank.process,
        device=rank.device,
        is_gloo=bool(np.all(rank.operations.activity == UNKNOWN)),
        syncs=syncs,
        sync_ns=sync_ns,
        bare_ns=tuple(bare_ns.tolist()),
        unfed_ns=tuple((bare_ns - held.covered_ns(start_ns, end_ns)).tolist()),
        copies_ns=tuple(_union_of(events, is_copy).covered_ns(start_ns, end_ns).tolist()),
        copy_launches_ns=tuple(_launches_ns(rank, is_copy).tolist()),
        knows_syncs=_knows_syncs(rank),
        first_share=tuple(_first_shares(rank)),
        serialized=serialized,
        could_begin=could_begin,
        graphs=int(np.count_nonzero(events.category == Category.OTHER)),
        outside_ns=tuple(_outside_phases_ns(rank)),
        between_ns=tuple(_between_steps_ns(rank)),
        starved_ns=() if starved is None else tuple(starved.tolist()),
        overhead_share=overhead_ns / max(1, int((windows_ns[1] - windows_ns[0]).sum())),
        slowdown=limit_slowdown(rank),
    )


def _knows_syncs(rank: RankEvents) -> bool:
    """Return whether the trace contains the waits of the host for the device, and for what each waits.

    A trace may contain these even if it does not contain the waits of streams.
    """
    calls = rank.trace.synchronizations
    is_held = is_in(calls.kind, HOST_WAITS)
    for_unknown = (calls.kind == SyncKind.HOST_WAIT_EVENT) & (calls.awaits == UNKNOWN)
    for_unknown |= (calls.kind == SyncKind.HOST_WAIT_STREAM) & (calls.stream == UNKNOWN)
    return rank.device is None or rank.trace.sync_source != "none" or bool(is_held.any() and not for_unknown.any())


def _first_shares(rank: RankEvents) -> list[float]:
    """Return ``RankFacts.first_share``: which fraction of each pass of backward precedes its first collective."""
    operations, passes = rank.operations, rank.passes
    row = rank.pass_of_operation
    in_backward = (operations.phase == BACKWARD_PHASE) & (operations.launch_ns != NO_TIME)
    rows = np.flatnonzero((row != UNKNOWN) & in_backward)
    rows = rows[operations.launch_ns[rows] >= passes.first_ns[row[rows]]]
    rows = rows[np.lexsort((operations.launch_ns[rows], row[rows]))]
    rows = rows[begins_run(row[rows])]  # the first of each pass
    first_ns = passes.first_ns[row[rows]]
    # A pass lasts until its last launch, or on a CPU, until the end of its range.
    last_ns = (passes.last_ns if rank.device is not None else passes.end_ns)[row[rows]]
    known = (last_ns > first_ns) & (not rank.clocks_disagree)
    share = np.full(len(rows), np.nan)
    share[known] = np.minimum(1, (operations.launch_ns[rows] - first_ns)[known] / (last_ns - first_ns)[known])
    found: list[float] = share.tolist()
    return found


def _syncs_in_backward(rank: RankEvents) -> tuple[Ints, Ints]:
    """Return ``syncs`` and ``sync_ns`` of :class:`RankFacts`: number and length of the waits in backward, per step."""
    waits, step = waits_in_backward(rank)
    length_ns = (rank.host_calls.end_ns - rank.host_calls.start_ns)[waits]
    return np.bincount(step, minlength=len(rank.steps)), sum_by_group(length_ns, step, len(rank.steps))


def _outside_phases_ns(rank: RankEvents) -> list[int]:
    """Return ``RankFacts.outside_ns``: the host's time of each step that no phase and no communication covers.

    Without ranges of forward, its time would be outside, too. Where the clocks disagree, a range of the host says
    nothing about times of the device.
    """
    if not rank.has_steps or rank.clocks_disagree or PHASES.index(FORWARD) not in rank.phases.kind:
        return []
    phases = concatenate(rank.phases, rank.inferred_backward)
    covered = union(phases.start_ns, phases.end_ns) | _union_of(rank.events, rank.is_backward)
    covered |= rank.union_of(Category.COMMUNICATION)
    covered_ns = covered.covered_ns(rank.steps.start_ns, rank.steps.end_ns)
    outside: list[int] = (rank.steps.end_ns - rank.steps.start_ns - covered_ns).tolist()
    return outside if covered_ns.any() else []


def _between_steps_ns(rank: RankEvents) -> list[int]:
    """Return ``RankFacts.between_ns``: how long nothing ran between each step and the step that followed it."""
    if not rank.has_steps or not len(rank.events) or rank.runs_ahead or why_unknown(rank) in NOT_TIMED:
        return []
    start_ns, end_ns = rank.steps.end_ns[:-1], rank.steps.start_ns[1:]
    busy = union(rank.events.start_ns, rank.events.end_ns)
    between: list[int] = (end_ns - start_ns - busy.covered_ns(start_ns, end_ns))[rank.is_followed[:-1]].tolist()
    return between


def _windows(rank: RankEvents) -> tuple[Ints, Ints]:
    """Return start and length of each step whose length is known or, if none is, of the window of each step."""
    times = select(rank.step_times, rank.step_times.is_known)
    return (times.start_ns, times.length_ns) if len(times) else (rank.breakdown.start_ns, rank.breakdown.window_ns)


def _union_of(events: Events, chosen: Mask) -> Intervals:
    rows = rows_of(chosen)
    return union(events.start_ns[rows], events.end_ns[rows])


LAUNCHED_AHEAD_NS = 50_000
"""Work that was launched so long before its stream became idle did not wait for its launch; no launch takes so long."""


def _held_gaps(busy: Intervals, events: Events, on_stream: Mask) -> Intervals:
    """Return when a stream was idle although its next work had been launched long before it became idle.

    ``busy`` is when the stream was not idle, ``on_stream`` tells which of the events are on it.
    """
    rows = rows_of(on_stream)
    start_ns, launched_ns = events.start_ns[rows], events.launch_ns[rows]
    launch_ns = np.full(len(busy), NO_TIME)  # the latest launch among the events with which each busy stretch begins
    first = np.searchsorted(busy.start_ns, start_ns)
    begins = np.flatnonzero(take_or_unknown(busy.start_ns, np.minimum(first, len(busy) - 1)) == start_ns)
    unknown = np.where(launched_ns == NO_TIME, NEVER, launched_ns)
    np.maximum.at(launch_ns, first[begins], unknown[begins])
    idle_from, idle_to = busy.end_ns[:-1], busy.start_ns[1:]
    is_held = launch_ns[1:] < idle_from - LAUNCHED_AHEAD_NS
    return Intervals(idle_from[is_held], idle_to[is_held])  # none touches another: the stream is busy in between


def _launches_ns(rank: RankEvents, chosen: Mask) -> Ints:
    """Return an upper limit of the time that the host spent on launching the chosen events, for each step.

    For each launch, that is the time since the launch before it on the same thread or, for the first launch of a thread
    in a step, since the start of the step's range.
    """
    events = rank.events
    rows = np.flatnonzero((events.launch_ns != NO_TIME) & (events.step != UNKNOWN))
    rows = rows[np.lexsort((events.launch_ns[rows], events.launcher[rows], events.step[rows]))]
    launch_ns, step = events.launch_ns[rows], events.step[rows]
    # ``np.roll`` by 1: the launch before.
    since_ns = launch_ns - np.where(
        begins_run(step, events.launcher[rows]), rank.steps.start_ns[step], np.roll(launch_ns, 1)
    )
    return sum_by_group(since_ns[chosen[rows]], step[chosen[rows]], len(rank.steps))


def _count_serialized(rank: RankEvents) -> tuple[int, int]:
    """Return ``serialized`` and ``could_begin`` of :class:`RankFacts`, two numbers of collectives.

    A collective that began late does not count if its wait may be for an event record that was lost.
    """
    if rank.device is None or rank.blocking.coverage.reason:
        return 0, 0
    work = rank.work
    stream, place = (column[work.activity] for column in (rank.dependencies().stream, rank.dependencies().place))
    bound_ns = work.bound_ns
    rows = np.flatnonzero(work.is_collective & (bound_ns != NO_TIME))
    # Collectives that began later than they could, and the operations that ended shortly before each of them began:
    # positions ``first`` to ``last`` in ``by_end``.
    is_late = work.start_ns[rows] - bound_ns[rows] > BACK_TO_BACK_NS
    is_told = ~(is_late & is_in(work.activity[rows], _after_doubtful_waits(rank)))
    rows, is_late = rows[is_told], is_late[is_told]
    late = rows[is_late]
    by_end = np.argsort(work.end_ns, kind="stable")
    first = np.searchsorted(work.end_ns[by_end], work.start_ns[late] - BACK_TO_BACK_NS)
    last = np.searchsorted(work.end_ns[by_end], work.start_ns[late], side="right")
    # Held up until an operation launched before it began; else until one of another stream ended that ran already when
    # the collective could have begun.
    is_held = find_held_ns(work, stream, place, late) > BACK_TO_BACK_NS
    found = int(np.count_nonzero(is_held))
    late, first, last = late[~is_held], first[~is_held], last[~is_held]
    for row, low, high in zip(late.tolist(), first.tolist(), last.tolist(), strict=True):
        ended = by_end[low:high]
        found += bool(np.any((stream[ended] != stream[row]) & (work.start_ns[ended] < bound_ns[row])))
    return found, len(rows)


def _after_doubtful_waits(rank: RankEvents) -> Ints:
    """Return the activities directly after a wait that may be for another record than the one found.

    That is so if a record of which the profiler kept the call alone lies between the two::

        calls     record 1   wait for 1   record ?   wait for 1   launch
        recorded  record 1                (lost)                   is returned
    """
    calls, dependencies = rank.trace.synchronizations, rank.dependencies()
    place, own = dependencies.call_place, calls.process == rank.process
    lost = np.sort(place[own & (calls.kind == SyncKind.RECORD) & (calls.stream == UNKNOWN)])
    waits = np.flatnonzero(own & dependencies.is_resolved)
    before, since = np.searchsorted(lost, place[waits]), np.searchsorted(lost, place[calls.awaits[waits]])
    next_work = dependencies.next_work[waits[before > since]]
    found: Ints = next_work[next_work != UNKNOWN]
    return found
