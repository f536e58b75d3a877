"""How much communication hides behind compute, for each rank and each step.

For one rank, C is the union of its compute and N the union of its communication. For one step, N is the communication
launched in the step; C is still all compute of the rank::

    C           ######....####
    N           ...########...
    overlapped  ...###....#...   |N and C|
    exposed     ......####....   |N minus C|
    tail        ..........####   |(N minus C) after the last compute of its pass of backward|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import compress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ddp_prof.analyze.core.attribution import BACKWARD_PHASE, SYNCHRONIZE_PHASE, last_by_step
from ddp_prof.analyze.core.blocking import DependencyCoverage
from ddp_prof.analyze.core.operations import Part, assign_instants, cut_pauses, find_pauses
from ddp_prof.analyze.core.rank_events import RankEvents, find_rank_events
from ddp_prof.analyze.core.step_breakdown import DEVICE, HOST, lacks_work, sum_by_group
from ddp_prof.analyze.core.steps import RankSteps, Steps, align_unnumbered_steps
from ddp_prof.analyze.intervals import EVER, Intervals, union, union_by_group
from ddp_prof.analyze.missing import find_missing
from ddp_prof.analyze.quality import (
    NO_DURATIONS,
    NOT_TIMED,
    NOTHING,
    Attribution,
    Diagnostics,
    gather_diagnostics,
    has_no_usable_events,
    hides_graphs,
    hides_work,
    measure_attribution,
    merge_attributions,
    merge_file_warnings,
    merge_reasons,
    warn_world_sizes,
    why_unknown,
)
from ddp_prof.analyze.result_bases import (
    DataFrame,
    FrameResult,
    RankResult,
    disambiguate,
    make_frame_from_rows,
    make_rows,
    none_for_unknown,
)
from ddp_prof.analyze.statistics import Outliers, find_outliers
from ddp_prof.manifest import Caveat, device_of, distinct_names, label_of
from ddp_prof.trace import NO_TIME, UNKNOWN, Category, Ints, Trace, select, take_or_unknown

LEAST_IN_STEPS = 0.95
"""Share of a rank's communication that must belong to steps, so that steps represent the rank."""

MOST_LOST = 0.2
"""Largest share of a rank's communication without a recorded launch; if it is larger, steps get no figures."""


@dataclass(frozen=True, slots=True)
class StepLength:
    """How long a step took, and what filled that time; see :mod:`.step_breakdown`.

    If all parts are known they sum to ``ns``. Parts are ``None`` for the same reasons as in :class:`StepOverlap`; every
    attribute is ``None`` if the length is not known.

    Attributes:
        blocking_ns: The part without compute in which a stream, or a host that communicates, stands still for
            communication. Of the parts above it is no further one: it lies in what is exposed, copied or idle.
        blocking_at_most_ns: Upper limit of it; the same where it is known.
        blocking_exposed_ns, blocking_memory_ns: The parts of it in ``exposed_ns`` and in ``exposed_memory_ns``.
    """

    start_ns: int | None = None
    ns: int | None = None
    compute_only_ns: int | None = None
    overlapped_ns: int | None = None
    exposed_ns: int | None = None
    exposed_memory_ns: int | None = None
    idle_ns: int | None = None
    blocking_ns: int | None = None
    blocking_at_most_ns: int | None = None
    blocking_exposed_ns: int | None = None
    blocking_memory_ns: int | None = None


@dataclass(frozen=True, slots=True)
class StepOverlap:
    """One step of one rank; see :class:`.step_breakdown.StepBreakdown` for the parts of the window.

    Times are ``None`` if the rank's compute and communication, or the steps that launched them, are not known.

    Attributes:
        step: The step's own number, ``None`` if it has none.
        step_key: Unique number of the step within its rank, see ``Steps.keys``; ``None`` in a capture without steps.
        start_ns: Start of the step's window; ``None`` if the step launched nothing.
        host_ns: Length of the host's range; ``None`` in a capture without steps, which counts as a single step.
        compute_only_ns, idle_ns: ``None`` if kernels have no name. These, and everything else that depends on what
            computed, are ``None`` if CUDA graphs were recorded as a whole, which hides what ran in them.
        tail_ns: Exposed communication after the last compute of its pass of backward, summed over the step's passes;
            ``None`` if no compute of backward is known, or if the step does not communicate.
        comm_end_ns: End of the step's last communication; ``None`` if it has none.
        passes: Number of passes of backward; ``None`` if none is known.
        in_backward: Number of collectives launched in backward or ``synchronize``, as those of gradients are.
        blocking_at_most_ns: Upper limit of ``blocking_ns`` and of what waits of the host cost, if these are not known;
            see ``RankEvents.may_block``.
    """

    step: int | None
    start_ns: int | None
    host_ns: int | None
    kernels: int
    collectives: int
    comm_ns: int | None
    overlapped_ns: int | None
    exposed_ns: int | None
    backward_overlapped_ns: int | None
    tail_ns: int | None
    window_ns: int | None
    compute_only_ns: int | None
    exposed_memory_ns: int | None
    idle_ns: int | None
    other_comm_ns: int | None
    step_key: int | None = None
    blocking_ns: int | None = None
    length: StepLength = StepLength()
    comm_end_ns: int | None = None
    blocking_at_most_ns: int | None = None
    in_backward: int = 0
    passes: int | None = None

    @property
    def overlap_ratio(self) -> float | None:
        """Share of the step's communication that compute hides, 0 to 1."""
        return _ratio(self.overlapped_ns, self.comm_ns)


@dataclass(frozen=True, slots=True)
class RankOverlap(RankResult):
    """One rank over the whole capture, without warm-up. Times are ``None`` if the trace does not contain them.

    Attributes:
        process: Operating-system process id; 0 for a Kineto file, which contains a single process.
        clock: The clock that measures the length of steps, ``HOST`` or ``DEVICE``; ``None`` without steps.
        step_work_ns: Summed durations of the steps' work on the device, and ``held_work_ns`` of the device work in
            their ranges on the host, whichever step launched it; ``None`` if their clocks disagree.
        clocks_disagree: Whether times between launches and their work mean nothing; see :mod:`.core.recording`.
        reason: Why ``overlap_ratio`` is ``None``.
        blocking_ns: How long something stood still for communication.
        dependencies: How completely the dependencies behind ``blocking_ns`` are known.
        node: Name of the machine, if known.
        gpu: Name of the GPU, if known.
    """

    process: int
    device: int | None
    rank: int | None
    kernels: int
    collectives: int
    compute_ns: int | None
    comm_ns: int | None
    overlapped_ns: int | None
    exposed_ns: int | None
    backward_overlapped_ns: int | None
    reason: str | None
    steps: tuple[StepOverlap, ...]
    file: str = ""
    qualifier: str = ""
    of_several: bool = False
    node: str | None = None
    gpu: str | None = None
    blocking_ns: int | None = None
    dependencies: DependencyCoverage | None = None
    clock: str | None = None
    step_work_ns: int = 0
    held_work_ns: int | None = 0
    clocks_disagree: bool = False

    @property
    def step_names(self) -> dict[int | None, str]:
        """The name of each marked step by its key; see ``Steps.names``."""
        keys = [step.step_key for step in self.marked_steps]
        numbers = [key if step.step is None else step.step for key, step in zip(keys, self.marked_steps, strict=True)]
        return dict(zip(keys, Steps.from_numbers(np.array(numbers, np.int64)).names, strict=True))

    @property
    def lacks_work(self) -> bool:
        """Whether the ranges of its steps lack some of the device work that the steps launched."""
        return self.held_work_ns is not None and lacks_work(self.step_work_ns, self.held_work_ns)

    @property
    def marked_steps(self) -> tuple[StepOverlap, ...]:
        """The steps that the trace marks; none if the whole capture counts as one step."""
        return tuple(step for step in self.steps if step.host_ns is not None)

    @property
    def communicating_steps(self) -> tuple[StepOverlap, ...]:
        """The marked steps that communicate; if only some of those with a backward do so in it, these.

        A micro-batch that only accumulates gradients communicates nothing that could hide, though it may broadcast.
        """
        found = tuple(step for step in self.marked_steps if step.comm_ns)
        reducing = tuple(step for step in found if step.in_backward)
        knows_backward = all(step.in_backward or step.tail_ns is not None for step in found)
        return reducing if reducing and knows_backward else found

    @property
    def timed_steps(self) -> tuple[StepOverlap, ...]:
        """The marked steps whose length is known."""
        return tuple(step for step in self.marked_steps if step.length.ns is not None)

    @property
    def lengths_ns(self) -> list[int]:
        """The lengths of the timed steps."""
        return [step.length.ns for step in self.timed_steps if step.length.ns is not None]

    @property
    def overlapping_windows_ns(self) -> int:
        """The time that is counted more than once in the sum of the steps' windows."""
        windows = [
            (step.start_ns, step.start_ns + (step.window_ns or 0)) for step in self.steps if step.start_ns is not None
        ]
        start, end = np.array(windows, np.int64).reshape(len(windows), 2).T
        return int((end - start).sum()) - union(start, end).length_ns

    @property
    def outside_of_steps_ns(self) -> int:
        """Communication that belongs to no step; 0 if no communication belongs to a step."""
        in_steps_ns = sum(step.comm_ns or 0 for step in self.marked_steps)
        return max(0, (self.comm_ns or 0) - in_steps_ns) if in_steps_ns else 0

    @property
    def overlap_ratio(self) -> float | None:
        """Share of the rank's communication that compute hides, 0 to 1."""
        return None if self.reason else _ratio(self.overlapped_ns, self.comm_ns)

    @property
    def backward_overlap_ratio(self) -> float | None:
        """Share of the rank's communication that compute of backward hides, 0 to 1."""
        return None if self.reason else _ratio(self.backward_overlapped_ns, self.comm_ns)


@dataclass(frozen=True, slots=True)
class TraceOverlap(FrameResult):
    """The overlap of every rank in one trace, or in the traces of one run.

    Attributes:
        trace: The file; the first one if there are several.
        ranks: The ranks in these files, which may be some of the job's only.
        world_size: Number of ranks in the job, ``None`` if unknown.
        caveats: Why the run is not representative; also in ``warnings``.
        missing: What the traces lack altogether, and what records it; ``None`` if nothing.
        producer, recorder: See :class:`ddp_prof.trace.Trace`.
    """

    main_columns: ClassVar[tuple[str, ...]] = ("rank", "comm_ns", "overlapped_ns", "exposed_ns", "blocking_ns")

    trace: Path
    label: str
    source: str
    producer: str | None
    device: str
    attribution: Attribution
    ranks: tuple[RankOverlap, ...]
    warnings: tuple[str, ...]
    world_size: int | None = None
    caveats: tuple[Caveat, ...] = ()
    files: int = 1
    missing: str | None = None
    recorder: str | None = None

    @property
    def has_nothing(self) -> bool:
        """Whether nothing was recorded that tells what a device or a host did."""
        return bool(self.missing) and all(rank.reason == NOTHING for rank in self.ranks)

    @property
    def outliers(self) -> Outliers | None:
        """The steps that stand out by their exposed time; ``None`` if there are none."""
        return find_outliers(
            (step.step_key, step.step, step.comm_ns or 0, step.exposed_ns or 0)
            for rank in self.ranks
            for step in rank.steps
            if not rank.reason
        )

    @property
    def job_ranks(self) -> tuple[RankOverlap, ...]:
        """The ranks of the job, without silent devices of a process that communicates on another device."""
        of_process = [(rank.file, rank.node, rank.process, rank.rank) for rank in self.ranks]
        both = list(zip(self.ranks, of_process, strict=True))
        communicating = {process for rank, process in both if rank.collectives}
        return tuple(rank for rank, process in both if rank.collectives or process not in communicating)

    @property
    def step_notes(self) -> tuple[str, ...]:
        """A line each about ranks without steps, communication outside of steps, and lengths by the device's clock."""
        ahead = (
            "the host runs ahead: a step's range on the host does not hold the device work that it launched, so a step "
            "lasts from its first device work to the next step's, and how long the last one took is not known"
        )
        apart = (
            "as the clocks of host and device disagree, a step lasts from its first device work to the next step's, "
            "and how long the last one took is not known"
        )
        unfollowed = (
            "how long a step took is not known: most of its device work lies outside of its range on the host, and no "
            "step is known to be followed by one whose device work begins later"
        )
        outside = (
            "{:.0%} of the device work that steps launched ran outside of their ranges on the host, which are taken "
            "for their lengths: parts of a step are what ran within"
        )
        lacking = [rank for rank in self.ranks if rank.lacks_work and rank.clock == HOST]
        share = 1 - sum(rank.held_work_ns or 0 for rank in lacking) / max(1, sum(rank.step_work_ns for rank in lacking))
        unmarked = "no steps are marked, so figures per step are those of other ranks (see --step-range)"
        found = []
        whole_ns = sum(rank.comm_ns or 0 for rank in self.ranks if rank.communicating_steps)
        outside_ns = sum(rank.outside_of_steps_ns for rank in self.ranks)
        if outside_ns > (1 - LEAST_IN_STEPS) * whole_ns:
            found.append(
                f"{outside_ns / whole_ns:.0%} of communication belongs to no step: figures per step leave it out"
            )
        for text, about in (
            (unmarked, [rank.name for rank in self.ranks if rank.collectives and rank.clock is None]),
            (outside.format(share), [rank.name for rank in lacking if not rank.clocks_disagree]),
            (
                ahead,
                [
                    rank.name
                    for rank in self.ranks
                    if rank.clock == DEVICE and rank.lengths_ns and not rank.clocks_disagree
                ],
            ),
            (apart, [rank.name for rank in self.ranks if rank.clocks_disagree and rank.lengths_ns]),
            (unfollowed, [rank.name for rank in self.ranks if rank.marked_steps and not rank.lengths_ns]),
        ):
            if about and any(rank.marked_steps for rank in self.ranks):
                found.append(text if len(about) == len(self.ranks) else f"{', '.join(about)}: {text}")
        return tuple(found)

    def to_frame(self, *, by_step: bool = False) -> DataFrame:
        """One row per rank, or one row per step of each rank; times in nanoseconds, ratios from 0 to 1."""
        if by_step:
            identity = ("process", "device", "rank")
            return make_frame_from_rows(
                [
                    *(*identity, *(field.name for field in fields(StepOverlap) if field.name != "length")),
                    *(f"length_{field.name}" for field in fields(StepLength)),
                ],
                [
                    {**{name: getattr(rank, name) for name in identity}, **asdict(step)}
                    for rank in self.ranks
                    for step in rank.steps
                ],
            )
        names = [field.name for field in fields(RankOverlap) if field.name != "steps"]
        names += ["overlap_ratio", "backward_overlap_ratio"]
        rows = [{name: getattr(rank, name) for name in names} for rank in self.ranks]
        return make_frame_from_rows(["run", *names], [{"run": self.label, **row} for row in rows])


def keys_of(steps: Sequence[StepOverlap]) -> list[int]:
    return [step.step_key for step in steps if step.step_key is not None]


def measure_overlap(
    trace: Trace, ranks: Sequence[RankEvents] | None = None, diagnostics: Diagnostics | None = None
) -> TraceOverlap:
    """Measure the overlap of every rank and step in a trace.

    If ``ranks`` are not passed, steps and phases are found by the usual names of ranges. ``diagnostics`` is the result
    of :func:`gather_diagnostics`, if the caller has it already.
    """
    ranks = find_rank_events(trace) if ranks is None else ranks
    diagnostics = diagnostics or gather_diagnostics(trace, ranks)
    return TraceOverlap(
        trace=trace.path,
        label=label_of(trace.path, trace.manifest),
        source=trace.source,
        producer=trace.producer,
        device=trace.device,
        attribution=measure_attribution(ranks),
        ranks=tuple(measure_rank(rank) for rank in ranks),
        warnings=diagnostics.warnings(),
        world_size=trace.world_size,
        caveats=diagnostics.all_caveats,
        missing=find_missing(trace, ranks),
        recorder=trace.recorder,
    )


class RankPart(NamedTuple):
    """One rank in a span of time: what is measured there, and what decides which figures of the rank are known.

    ``is_blind``, ``hides_work`` and ``hides_graphs`` are the results of the functions of :mod:`.quality` with these
    names, ``hides_waits`` is of ``RankEvents``. ``lost_ns`` is how long communication without a recorded launch ran
    during steps.
    """

    overlap: RankOverlap
    is_blind: bool
    hides_work: bool
    hides_graphs: bool
    hides_waits: bool
    lost_ns: int


def measure_rank(rank: RankEvents) -> RankOverlap:
    return merge_rank_parts([measure_rank_part(rank, EVER)])


def measure_rank_part(rank: RankEvents, span: Intervals) -> RankPart:
    """Measure a rank within a span: the time within it counts, and events and steps that start within it."""
    events = rank.events
    compute, communication = rank.union_of(Category.COMPUTE), rank.union_of(Category.COMMUNICATION) & span
    own = rank.select_category(Category.COMPUTE) if rank.beside is not None else None
    own_compute = compute if own is None else union(own.start_ns, own.end_ns)
    counts = span.holds(events.start_ns)
    overlapped = (communication & compute).length_ns
    backward = union(events.start_ns[rank.is_backward], events.end_ns[rank.is_backward])
    is_lost = (events.category == Category.COMMUNICATION) & (events.step == UNKNOWN) & (events.launch_ns == NO_TIME)
    is_lost &= take_or_unknown(rank.trace.launching_calls, events.activity) == UNKNOWN
    lost = union(events.start_ns[is_lost], events.end_ns[is_lost]) & union(rank.steps.start_ns, rank.steps.end_ns)
    reason, coverage = why_unknown(rank), rank.blocking.coverage
    lead = rank.lead_of(span.holds(rank.steps.start_ns) & rank.has_steps)
    overlap = RankOverlap(
        process=rank.process,
        device=rank.device,
        rank=rank.rank,
        kernels=int(rank.is_kernel[counts].sum()),
        collectives=int(rank.is_collective[counts].sum()),
        compute_ns=(span & own_compute).length_ns,
        comm_ns=communication.length_ns,
        overlapped_ns=overlapped,
        exposed_ns=communication.length_ns - overlapped,
        backward_overlapped_ns=(communication & backward).length_ns if len(backward) else None,
        reason=reason,
        steps=_measure_steps(rank, backward, span),
        file=rank.trace.path.name,
        node=rank.trace.node,
        blocking_ns=None if reason else rank.blocking.total_ns,
        dependencies=replace(coverage, reason=coverage.reason or reason),
        gpu=None if rank.device is None else rank.trace.gpus.get((rank.process, rank.device)),
        clock=(DEVICE if rank.runs_ahead else HOST) if rank.has_steps else None,
        step_work_ns=lead.work_ns,
        held_work_ns=None if rank.clocks_disagree else lead.held_ns,
        clocks_disagree=rank.clocks_disagree,
    )
    hidden = has_no_usable_events(rank), hides_work(rank), hides_graphs(rank), rank.hides_waits
    return RankPart(overlap, *hidden, (lost & span).length_ns)


def merge_rank_parts(parts: Sequence[RankPart]) -> RankOverlap:
    """Merge the parts of one rank's capture, ordered by time, and leave out the figures that are not known."""
    ranks = [part.overlap for part in parts]
    total: dict[str, Any] = {name: sum(getattr(rank, name) for rank in ranks) for name in (*_COUNTS, *_TIMES)}
    held_ns = [rank.held_work_ns for rank in ranks if rank.held_work_ns is not None]
    total["held_work_ns"] = sum(held_ns) if len(held_ns) == len(ranks) else None
    backward_ns = [rank.backward_overlapped_ns for rank in ranks if rank.backward_overlapped_ns is not None]
    steps = [step for rank in ranks for step in rank.steps]
    # A part of a capture may have no events. If a whole capture has none, nothing was recorded.
    is_blind = all(part.is_blind for part in parts)
    if is_blind or sum(part.lost_ns for part in parts) > MOST_LOST * total["comm_ns"]:
        steps = list(map(without_figures, steps))
    if is_blind:
        total |= dict.fromkeys(_TIMES)
        steps = [step for step in steps if step.host_ns is not None]
        steps = [replace(step, length=StepLength(step.length.start_ns, step.length.ns)) for step in steps]
    elif (reasons := {rank.reason for rank in ranks}) <= NOT_TIMED:
        # Sums over the rank are of what was recorded; what a step communicated is not known.
        if NO_DURATIONS in reasons:
            total |= dict.fromkeys(("comm_ns", "overlapped_ns", "exposed_ns"))
        steps = [
            replace(without_figures(step), length=StepLength(step.length.start_ns, step.length.ns)) for step in steps
        ]
    elif any(part.hides_waits for part in parts):
        # Whether the host computed or waited while it communicated is not known.
        total |= dict.fromkeys(("compute_ns", "overlapped_ns", "exposed_ns"))
        steps = [replace(step, **_IN_WAITS, length=replace(step.length, **_LENGTH_IN_WAITS)) for step in steps]
    elif any(part.hides_graphs for part in parts):
        # What a graph computed, and whether it hid communication or copies, is not known. Of no communication, all is.
        if total["comm_ns"]:
            total |= dict.fromkeys(("overlapped_ns", "exposed_ns"))
        steps = [replace(step, **_IN_GRAPHS, length=replace(step.length, **_LENGTH_IN_GRAPHS)) for step in steps]
    elif any(part.hides_work for part in parts):
        # While a kernel without a name runs, it is not known what the device does.
        hidden: dict[str, Any] = {"compute_only_ns": None, "idle_ns": None}
        steps = [replace(step, **hidden, length=replace(step.length, **hidden)) for step in steps]
    return replace(
        ranks[0],
        **total,
        backward_overlapped_ns=sum(backward_ns)
        if backward_ns and not is_blind and total["overlapped_ns"] is not None
        else None,
        reason=merge_reasons([rank.reason for rank in ranks]),
        steps=tuple(steps),
    )


_COUNTS, _TIMES = (
    ("kernels", "collectives", "step_work_ns"),
    ("compute_ns", "comm_ns", "overlapped_ns", "exposed_ns"),
)
_PARTS_IN_GRAPHS: dict[str, Any] = dict.fromkeys(
    ("compute_only_ns", "overlapped_ns", "exposed_ns", "exposed_memory_ns", "idle_ns")
)
_LENGTH_IN_GRAPHS: dict[str, Any] = _PARTS_IN_GRAPHS | dict.fromkeys(
    ("blocking_ns", "blocking_at_most_ns", "blocking_exposed_ns", "blocking_memory_ns")
)
_IN_GRAPHS: dict[str, Any] = _PARTS_IN_GRAPHS | dict.fromkeys(
    ("other_comm_ns", "backward_overlapped_ns", "tail_ns", "blocking_ns", "blocking_at_most_ns")
)
"""Figures of a step, and of its length, that are not known if graphs were recorded as a whole."""
_OF_BOTH = ("overlapped_ns", "exposed_ns", "blocking_ns", "blocking_at_most_ns")
_LENGTH_IN_WAITS: dict[str, Any] = dict.fromkeys((*_OF_BOTH, "blocking_exposed_ns", "blocking_memory_ns"))
_IN_WAITS: dict[str, Any] = dict.fromkeys((*_OF_BOTH, "backward_overlapped_ns", "tail_ns"))
"""Those that are not known if a host that communicates may have waited meanwhile."""


def merge_ranks(results: Sequence[TraceOverlap]) -> TraceOverlap:
    parts = [(result.trace, rank) for result in results for rank in result.ranks]
    raised, notes = align_unnumbered_steps([_last_ends(file, rank) for file, rank in parts])
    ranks = [_raise_keys(rank, by) for (_, rank), by in zip(parts, raised, strict=True)]
    names = distinct_names(result.trace for result in results)
    return replace(
        results[0],
        device=device_of(result.device for result in results),
        attribution=merge_attributions([result.attribution for result in results]),
        ranks=disambiguate(ranks, [file for file, _ in parts]),
        files=len(results),
        warnings=(
            *notes,
            *warn_world_sizes(result.world_size for result in results),
            *merge_file_warnings([(names[result.trace], result.warnings) for result in results]),
        ),
        world_size=max((result.world_size or 0 for result in results), default=0) or None,
        caveats=tuple(dict.fromkeys(caveat for result in results for caveat in result.caveats)),
        missing=_merge_missing([(names[result.trace], result.missing) for result in results]),
    )


def _merge_missing(files: Sequence[tuple[str, str | None]]) -> str | None:
    """What all files lack; if some do, the first of them and what it lacks."""
    lacking = [(name, missing) for name, missing in files if missing]
    if not lacking:
        return None
    (name, missing), *others = lacking
    if len(lacking) == len(files):
        return missing
    return f"{name}{f' and {len(others)} more' if others else ''}: {missing}"


def _last_ends(file: Path, rank: RankOverlap) -> RankSteps:
    numbers = [UNKNOWN if step.step is None else step.step for step in rank.marked_steps]
    ends_ns = [NO_TIME if step.comm_end_ns is None else step.comm_end_ns for step in rank.marked_steps]
    return RankSteps(file, np.array(numbers, np.int64), np.array(ends_ns, np.int64))


def _raise_keys(rank: RankOverlap, by: int) -> RankOverlap:
    """The rank with step keys that agree with those of the other ranks."""
    if not by:
        return rank
    steps = [(step, step.step_key) for step in rank.steps]
    return replace(rank, steps=tuple(replace(step, step_key=None if key is None else key + by) for step, key in steps))


def _measure_steps(rank: RankEvents, backward: Intervals, span: Intervals) -> tuple[StepOverlap, ...]:
    """The steps that start in a span."""
    events, steps, parts = rank.events, len(rank.steps), rank.breakdown
    launched = events.step != UNKNOWN
    communicating = launched & (events.category == Category.COMMUNICATION)
    start, end, step = union_by_group(
        events.start_ns[communicating], events.end_ns[communicating], events.step[communicating]
    )
    hidden_ns = sum_by_group(backward.covered_ns(start, end), step, steps)
    has_backward = np.bincount(events.step[launched & rank.is_backward], minlength=steps) > 0
    passes = rank.passes.count(steps) if rank.has_steps else np.zeros(steps, np.int64)
    tail_ns = _tail_of_each_pass(rank) if rank.passes.any_several else _tail_of_one_pass(rank, start, end, step)
    coverage = rank.blocking.coverage
    may_block = rank.may_block if coverage.reason or coverage.host_waits else None
    nothing = [None] * steps
    columns = {
        "step": none_for_unknown(rank.steps.number),
        "step_key": none_for_unknown(rank.step_keys),
        "start_ns": none_for_unknown(np.where(parts.window_ns > 0, parts.start_ns, NO_TIME), NO_TIME),
        "host_ns": (rank.steps.end_ns - rank.steps.start_ns).tolist() if rank.has_steps else nothing,
        "kernels": np.bincount(events.step[launched & rank.is_kernel], minlength=steps).tolist(),
        "collectives": np.bincount(events.step[launched & rank.is_collective], minlength=steps).tolist(),
        "in_backward": np.bincount(
            events.step[launched & rank.is_collective & np.isin(events.phase, (BACKWARD_PHASE, SYNCHRONIZE_PHASE))],
            minlength=steps,
        ).tolist(),
        **{name: getattr(parts, name).tolist() for name in _AS_THEY_ARE},
        "blocking_ns": nothing if why_unknown(rank) else none_for_unknown(rank.blocking.by_step_ns),
        "blocking_at_most_ns": (
            nothing if may_block is None else sum_by_group(may_block.covered_ns(start, end), step, steps).tolist()
        ),
        "backward_overlapped_ns": none_for_unknown(np.where(has_backward, hidden_ns, UNKNOWN)),
        "tail_ns": none_for_unknown(np.where((passes == 0) | (parts.comm_ns == 0), UNKNOWN, tail_ns)),
        "passes": none_for_unknown(np.where(passes == 0, UNKNOWN, passes)),
    }
    ends_ns = last_by_step(events.end_ns[communicating], events.step[communicating], steps)
    columns |= {"length": _lengths(rank, may_block), "comm_end_ns": none_for_unknown(ends_ns, NO_TIME)}
    chosen = span.holds(rank.steps.start_ns)
    return tuple(make_rows(StepOverlap, {name: list(compress(column, chosen)) for name, column in columns.items()}))


def _tail_of_one_pass(rank: RankEvents, start_ns: Ints, end_ns: Ints, step: Ints) -> Ints:
    """Exposed communication of each step after the end of its only pass; the times are when steps communicate."""
    last_ns = np.full(len(rank.steps), NO_TIME)
    last_ns[rank.passes.step] = rank.passes.end_ns
    tail_from = np.minimum(np.maximum(start_ns, last_ns[step]), end_ns)
    bare_ns = end_ns - tail_from - rank.union_of(Category.COMPUTE).covered_ns(tail_from, end_ns)
    return sum_by_group(bare_ns, step, len(rank.steps))


def _tail_of_each_pass(rank: RankEvents) -> Ints:
    """The same with several passes: an instant counts for the operation that it belongs to, and so for its pass."""
    operations, pauses = rank.operations, find_pauses(rank.events, rank.operation_parts)
    backward_end_ns = rank.backward_end_of_operation_ns
    first, last = assign_instants(operations)
    tail_from = np.where(backward_end_ns == NO_TIME, last, np.clip(backward_end_ns, first, last))
    pieces = cut_pauses(operations, pauses, Part(tail_from, last))
    pieces = select(pieces, operations.step[pieces.row] != UNKNOWN)
    compute = rank.union_of(Category.COMPUTE)
    bare_ns = pieces.end_ns - pieces.start_ns - compute.covered_ns(pieces.start_ns, pieces.end_ns)
    return sum_by_group(bare_ns, operations.step[pieces.row], len(rank.steps))


_AS_THEY_ARE = (
    *("window_ns", "comm_ns", "overlapped_ns", "exposed_ns", "exposed_memory_ns", "other_comm_ns"),
    *("compute_only_ns", "idle_ns"),
)
_FIGURES = (*_AS_THEY_ARE, "backward_overlapped_ns", "tail_ns", "blocking_ns", "blocking_at_most_ns")


def without_figures(step: StepOverlap) -> StepOverlap:
    """The step with its length only."""
    nothing: dict[str, Any] = dict.fromkeys(_FIGURES)
    return replace(step, **nothing)


def _lengths(rank: RankEvents, may_block: Intervals | None) -> list[StepLength]:
    if not rank.has_steps:
        return [StepLength()] * len(rank.steps)
    times = rank.step_times
    columns = {
        **{
            name: getattr(times, name).tolist()
            for name in ("start_ns", "overlapped_ns", "exposed_ns", "exposed_memory_ns")
        },
        "ns": times.length_ns.tolist(),
        "compute_only_ns": (times.compute_ns - times.overlapped_ns).tolist(),
        "idle_ns": (times.length_ns - times.compute_ns - times.exposed_ns - times.exposed_memory_ns).tolist(),
        **_blocking_of_lengths(rank, may_block),
    }
    lengths = make_rows(StepLength, columns)
    return [length if known else StepLength() for length, known in zip(lengths, times.is_known.tolist(), strict=True)]


def _blocking_of_lengths(rank: RankEvents, may_block: Intervals | None) -> dict[str, list[Any]]:
    """See ``StepLength``. What a step stands still for may be collectives of the step before."""
    times, blocking, steps = rank.step_times, rank.blocking, len(rank.steps)
    start_ns, end_ns = times.start_ns, times.start_ns + times.length_ns
    compute, communication, memory = map(rank.union_of, (Category.COMPUTE, Category.COMMUNICATION, Category.MEMORY))
    is_unknown = blocking.by_step_ns == UNKNOWN
    is_unknown |= np.append(False, is_unknown[:-1])[:steps]
    known = blocking.known_stretches
    still = union(known.start_ns, known.end_ns) - compute
    blocking_ns, most_ns = still.covered_ns(start_ns, end_ns), times.length_ns - times.compute_ns
    if may_block is not None:
        most_ns = ((may_block | still) - compute).covered_ns(start_ns, end_ns)
    parts = {"": blocking_ns}
    for name, part in (("exposed_", still & communication), ("memory_", (still & memory) - communication)):
        parts[name] = part.covered_ns(start_ns, end_ns)
    return {
        **{f"blocking_{name}ns": none_for_unknown(np.where(is_unknown, UNKNOWN, ns)) for name, ns in parts.items()},
        "blocking_at_most_ns": np.where(is_unknown, most_ns, blocking_ns).tolist(),
    }


def _ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None
