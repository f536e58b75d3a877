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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import ClassVar

import numpy as np

from ddp_prof.analyze.core.blocking import DependencyCoverage
from ddp_prof.analyze.core.clocks import UNITS
from ddp_prof.analyze.core.passes import seem_lost
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.step_breakdown import DEVICE, HOST, NO_LEAD, Lead, lacks_work
from ddp_prof.analyze.core.steps import RankSteps, Steps, align_unnumbered_steps
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.analyze.missing import Missing, find_missing
from ddp_prof.analyze.quality import (
    Attribution,
    Diagnostics,
    gather_diagnostics,
    measure_attribution,
    merge_attributions,
    merge_file_warnings,
    warn_silent_steps,
    warn_world_sizes,
)
from ddp_prof.analyze.result_bases import (
    DataFrame,
    FrameResult,
    RankResult,
    make_frame_from_rows,
    measure_fields,
    merge_files,
)
from ddp_prof.analyze.statistics import Outliers, find_outliers
from ddp_prof.analyze.step_columns import StepOverlap, hide, measure_steps
from ddp_prof.analyze.step_levels import LevelChange, find_level_change
from ddp_prof.analyze.why_unknown import (
    LOST,
    NO_COMMUNICATION,
    NOT_TIMED,
    NOTHING,
    NOTHING_LEFT,
    has_no_usable_events,
    hides_compute,
    hides_work,
    lacks_names,
    lacks_times_of_communication,
    loses_launches,
    why_unknown,
)
from ddp_prof.columns import (
    ALWAYS,
    USUALLY,
    WITH_ROOM,
    Hidden,
    column,
    derived,
    frame_names,
    frame_row,
    hidden_fields,
    percent,
    result_columns,
)
from ddp_prof.manifest import Caveat, device_of, distinct_names, label_of
from ddp_prof.notes import Doubt, prefixed
from ddp_prof.table import distinct
from ddp_prof.trace import NO_TIME, UNKNOWN, Category, Trace

LEAST_IN_STEPS = 0.95
"""Smallest fraction of the ranks' communication, and of what of it is exposed, that must belong to steps.

If less does, a note says so.
"""


@dataclass(frozen=True)
class RankSource:
    """A rank, and intermediate results from which several of its figures are measured."""

    rank: RankEvents

    @cached_property
    def compute(self) -> Intervals:
        return self.rank.union_of(Category.COMPUTE)

    @cached_property
    def communication(self) -> Intervals:
        return self.rank.union_of(Category.COMMUNICATION)

    @cached_property
    def backward(self) -> Intervals:
        """When compute of backward runs."""
        events, rows = self.rank.events, self.rank.is_backward
        return union(events.start_ns[rows], events.end_ns[rows])

    @cached_property
    def overlapped_ns(self) -> int:
        return (self.communication & self.compute).length_ns

    @cached_property
    def reason(self) -> str | None:
        """Why the overlap of the rank is not known; ``None`` if it is."""
        return why_unknown(self.rank)

    @property
    def lead(self) -> Lead:
        return self.rank.lead if self.rank.has_steps else NO_LEAD

    @cached_property
    def hidden(self) -> tuple[Hidden, Hidden]:
        """What the capture does not tell: for the figures of the rank, and for those of its steps."""
        return _find_hidden(self.rank, self.reason, self.communication.length_ns)


def _steps(of: RankSource) -> tuple[StepOverlap, ...]:
    """Return the steps of the rank, without the figures that are not known."""
    steps = measure_steps(of.rank, of.backward)
    if has_no_usable_events(of.rank):
        steps = tuple(step for step in steps if step.host_ns is not None)
    _, hidden = of.hidden
    return tuple(hide(step, hidden) for step in steps) if hidden else steps


def _compute_ns(of: RankSource) -> int:
    """Return how long the rank computes, without compute of steps that were not recorded completely."""
    if of.rank.beside is None:
        return of.compute.length_ns
    return of.rank.events.union_of(Category.COMPUTE).length_ns


def _knows_backward(of: RankSource) -> bool:
    """Return whether compute of backward is known, and its range is not lost in some steps."""
    rank, step = of.rank, of.rank.events.step
    collectives, backward = (
        np.bincount(step[rows & (step != UNKNOWN)], minlength=len(rank.steps))
        for rows in (rank.is_collective, rank.is_backward)
    )
    is_lost = seem_lost(collectives, backward > 0) | rank.lacks_phase
    return len(of.backward) > 0 and not is_lost.any()


def _dependencies(of: RankSource) -> DependencyCoverage:
    """Return how completely dependencies are known; the reason is that of the overlap if blocking itself has none."""
    coverage = of.rank.blocking.coverage
    return replace(coverage, reason=coverage.reason or of.reason)


def _exposed_between_ns(of: RankSource) -> int:
    """Return how long communication launched between steps was exposed; 0 unless most steps are followed by some.

    What a job communicates once, as before or after an evaluation, is no part of its steps.
    """
    rank, events = of.rank, of.rank.events
    if not rank.has_steps or not len(rank.steps):  # all of them may be left out
        return 0
    rows = np.flatnonzero(events.category == Category.COMMUNICATION)
    rows = rows[events.step[rows] == UNKNOWN]
    # The step that was the last to begin before each launch.
    step = np.searchsorted(rank.steps.start_ns, events.launch_ns[rows], side="right") - 1
    rows, step = (column[(step >= 0) & rank.is_followed[step]] for column in (rows, step))
    exposed = union(events.start_ns[rows], events.end_ns[rows]) - of.compute
    is_exposed = exposed.covered_ns(events.start_ns[rows], events.end_ns[rows]) > 0
    is_usual = 2 * len(distinct(step[is_exposed])) > np.count_nonzero(rank.is_followed)
    return exposed.length_ns if is_usual else 0


def _gpu(of: RankSource) -> str | None:
    rank = of.rank
    return None if rank.device is None else rank.trace.gpus.get((rank.process, rank.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOverlap(RankResult):
    """One rank over the whole capture, without warm-up. Times are ``None`` if the trace does not contain them.

    Its figures, and those of a step, are in the tables of docs/formats.md, which are made from these declarations.
    """

    process: int = column(
        "number of the operating system's process; 0 in a Kineto file, which has only one",
        measure=lambda of: of.rank.process,
    )
    device: int | None = column(
        "number of the GPU", measure=lambda of: of.rank.device, null="the host computes; not recorded"
    )
    rank: int | None = column("number of the rank", measure=lambda of: of.rank.rank, null="it is not known")
    kernels: int = column(
        "kernels that ran on the device",
        measure=lambda of: int(of.rank.is_kernel.sum()),
        stays=WITH_ROOM,
        adds_up=True,
    )
    collectives: int | None = column(
        "collectives",
        measure=lambda of: None if lacks_names(of.rank) else int(of.rank.is_collective.sum()),
        null="kernels have no names",
        stays=WITH_ROOM,
        adds_up=True,
    )
    compute_ns: int | None = column(
        "union of all compute",
        measure=_compute_ns,
        needs=Hidden.WORK | Hidden.WAITS,
        stays=USUALLY,
        adds_up=True,
    )
    comm_ns: int | None = column(
        "union of all communication",
        measure=lambda of: of.communication.length_ns,
        needs=Hidden.WORK | Hidden.DURATIONS,
        stays=USUALLY,
        adds_up=True,
    )
    overlapped_ns: int | None = column(
        "communication with compute at the same time",
        measure=lambda of: of.overlapped_ns,
        needs=Hidden.WORK | Hidden.DURATIONS | Hidden.GRAPHS | Hidden.WAITS | Hidden.STEPS,
        stays=WITH_ROOM,
        adds_up=True,
    )
    exposed_ns: int | None = column(
        "communication without compute at the same time",
        measure=lambda of: of.communication.length_ns - of.overlapped_ns,
        needs=Hidden.WORK | Hidden.DURATIONS | Hidden.GRAPHS | Hidden.WAITS | Hidden.STEPS,
        stays=ALWAYS,
        adds_up=True,
    )
    backward_overlapped_ns: int | None = column(
        "communication with compute of backward at the same time",
        measure=lambda of: (of.communication & of.backward).length_ns if _knows_backward(of) else None,
        needs=Hidden.WORK | Hidden.DURATIONS | Hidden.GRAPHS | Hidden.WAITS | Hidden.STEPS,
        null="no compute of backward is known, or in some steps it is not",
    )
    reason: str | None = column("why the overlap is not known", measure=lambda of: of.reason, null="it is")
    steps: tuple[StepOverlap, ...] = column("its steps; a capture that marks none counts as one", measure=_steps)
    file: str = column("name of its file", default="", measure=lambda of: of.rank.trace.path.name)
    qualifier: str = column("name of its file, if ranks of several files are called alike; else empty", default="")
    of_several: bool = column("whether its process uses several devices", default=False)
    exposed_between_ns: int = column(
        "exposed communication that was launched between steps; 0 unless most steps are followed by some",
        default=0,
        measure=_exposed_between_ns,
        in_document=False,
    )
    node: str | None = column(
        "name of the machine", default=None, measure=lambda of: of.rank.trace.node, null="it is not known"
    )
    gpu: str | None = column("name of the GPU", default=None, measure=_gpu, null="it is not known")
    blocking_ns: int | None = column(
        "time in which a stream (on a CPU: the host) stood still for communication",
        default=None,
        measure=lambda of: None if of.reason else of.rank.blocking.total_ns,
        null="what work waits for is not known",
        stays=USUALLY,
        adds_up=True,
    )
    dependencies: DependencyCoverage | None = column(
        "how completely it is known what work waits for", default=None, measure=_dependencies, null="nothing waits"
    )
    clock: str | None = column(
        "the clock that measures the length of steps: ``host`` or ``device``",
        default=None,
        measure=lambda of: (DEVICE if of.rank.runs_ahead else HOST) if of.rank.has_steps else None,
        null="no steps are marked",
    )
    step_work_ns: int = column(
        "summed durations of the steps' work on the device", default=0, measure=lambda of: of.lead.work_ns
    )
    held_work_ns: int | None = column(
        "summed durations of the device work in the steps' ranges on the host, whichever step launched it",
        default=0,
        measure=lambda of: None if of.rank.clocks_disagree else of.lead.held_ns,
        null="the clocks of host and device disagree",
    )
    clocks_disagree: bool = column(
        "whether times between launches and their work mean nothing, see ``analyze/core/clocks.py``",
        default=False,
        measure=lambda of: of.rank.clocks_disagree,
    )

    @property
    def step_names(self) -> dict[int | None, str]:
        """The name of each marked step by its key; see ``Steps.names``."""
        keys = [step.step_key for step in self.marked_steps]
        numbers = [key if step.step is None else step.step for key, step in zip(keys, self.marked_steps, strict=True)]
        return dict(zip(keys, Steps.from_numbers(np.array(numbers, np.int64)).names, strict=True))

    @property
    def lacks_work(self) -> bool:
        """Whether the steps' ranges on the host lack so much of the steps' device work that a note says so."""
        return self.held_work_ns is not None and lacks_work(self.step_work_ns, self.held_work_ns)

    @property
    def marked_steps(self) -> tuple[StepOverlap, ...]:
        """The steps that the trace marks; none if the whole capture counts as one step."""
        return tuple(step for step in self.steps if step.host_ns is not None)

    @property
    def communicating_steps(self) -> tuple[StepOverlap, ...]:
        """The marked steps that communicate; if some of them communicate in backward, only these.

        The others are then steps that only accumulate gradients. They may broadcast, but communicate nothing that could
        hide behind compute. They are not left out if backward is not known in some of these steps.
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
    @derived("measured steps, warm-up left out", key="steps", stays=USUALLY, in_document=False, after="rank")
    def step_count(self) -> int:
        return len(self.marked_steps)

    @property
    @derived("share of communication that is overlapped", key="overlap_%", stays=ALWAYS)
    def overlap_ratio(self) -> float | None:
        """Fraction of the rank's communication that compute hides, 0 to 1; ``None`` if not known."""
        return None if self.reason else _ratio(self.overlapped_ns, self.comm_ns)

    @property
    @derived("share of communication that compute of backward overlaps", key="in_backward_%", stays=WITH_ROOM)
    def backward_overlap_ratio(self) -> float | None:
        """Fraction of the rank's communication that compute of backward hides, 0 to 1; ``None`` if not known."""
        return None if self.reason else _ratio(self.backward_overlapped_ns, self.comm_ns)


@dataclass(frozen=True, slots=True)
class TraceOverlap(FrameResult):
    """The overlap of every rank in one trace, or in the traces of one run.

    Attributes:
        trace: The file; the first one if there are several.
        attribution: How much of the ranks' work was assigned to steps.
        ranks: The ranks in these files, which may be only some of the job's ranks.
        world_size: Number of ranks in the job, ``None`` if unknown.
        caveats: Why the run is not representative; also in ``warnings``.
        files: Number of files.
        missing: What the traces lack altogether; ``None`` if nothing is known to be missing.
        producer, recorder: See :class:`ddp_prof.trace.Trace`; those of the first file, as ``source``.
        profilers: Source, recorder and producer of the files, each combination once; empty for a single file.
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
    missing: Missing | None = None
    recorder: str | None = None
    profilers: tuple[tuple[str, str | None, str | None], ...] = ()

    @property
    def recorded_by(self) -> tuple[tuple[str, str | None, str | None], ...]:
        """:attr:`profilers`, also of a single file."""
        return self.profilers or ((self.source, self.recorder, self.producer),)

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
    def level_change(self) -> LevelChange | None:
        """Where the steps divide into two levels, by the medians of their lengths over ranks; ``None`` if nowhere.

        Nor if ranks begin with other steps: then the first ones of the run are not the first ones of each rank.
        """
        if len({rank.timed_steps[0].step_key for rank in self.ranks if rank.timed_steps}) > 1:
            return None
        of_steps: dict[int, list[int]] = {}
        for rank in self.ranks:
            for step in rank.timed_steps:
                if step.step_key is not None and step.length.ns is not None:
                    of_steps.setdefault(step.step_key, []).append(step.length.ns)
        return find_level_change([round(median(of_steps[key])) for key in sorted(of_steps)])

    @property
    def job_ranks(self) -> tuple[RankOverlap, ...]:
        """The ranks of the job, without silent devices of a process that communicates on another device."""
        of_process = [(rank.file, rank.node, rank.process, rank.rank) for rank in self.ranks]
        both = list(zip(self.ranks, of_process, strict=True))
        communicating = {process for rank, process in both if rank.collectives}
        return tuple(rank for rank, process in both if rank.collectives or process not in communicating)

    @property
    def rank_numbers(self) -> frozenset[int] | None:
        """The numbers of the ranks of the job that were read; ``None`` if that of a process is not known.

        Several devices of a process are of one rank.
        """
        numbers = {rank.rank for rank in self.ranks}
        return None if None in numbers else frozenset(number for number in numbers if number is not None)

    @property
    def step_notes(self) -> tuple[str, ...]:
        """Lines on ranks without steps, communication outside of steps, and how the lengths of steps are measured."""
        found: list[str] = []
        whole_ns = sum(rank.comm_ns or 0 for rank in self.ranks if rank.communicating_steps)
        outside_ns = sum(rank.outside_of_steps_ns for rank in self.ranks)
        exposed_ns = sum(rank.exposed_ns or 0 for rank in self.ranks if rank.communicating_steps)
        between_ns = sum(rank.exposed_between_ns for rank in self.ranks if rank.exposed_ns is not None)
        parts = {"communication": (outside_ns, whole_ns), "exposed communication": (between_ns, exposed_ns)}
        for part, (lost_ns, all_ns) in parts.items():
            if lost_ns > (1 - LEAST_IN_STEPS) * all_ns:
                share = percent(lost_ns / all_ns)
                found.append(Doubt(f"{share} of {part} belongs to no step: figures per step leave it out"))
                break
        for is_about, text in _NOTES_ABOUT_RANKS if any(rank.marked_steps for rank in self.ranks) else ():
            if about := [rank for rank in self.ranks if is_about(rank)]:
                names = "" if len(about) == len(self.ranks) else f"{', '.join(rank.name for rank in about)}: "
                said = type(text)(text.format(outside=percent(_share_outside_of_ranges(about))))
                found.append(prefixed(names, said))
        return tuple(found)

    def to_frame(self, *, by_step: bool = False) -> DataFrame:
        """Return one row per rank or, with ``by_step``, one row per step of each rank.

        Times are in nanoseconds, ratios from 0 to 1.
        """
        if by_step:
            identity = ("process", "device", "rank")
            return make_frame_from_rows(
                [*identity, *frame_names(StepOverlap)],
                [
                    {**{name: getattr(rank, name) for name in identity}, **frame_row(step)}
                    for rank in self.ranks
                    for step in rank.steps
                ],
            )
        names = [one.name for one in result_columns(RankOverlap) if one.in_document and one.name != "steps"]
        rows = [{name: getattr(rank, name) for name in names} for rank in self.ranks]
        return make_frame_from_rows(["run", *names], [{"run": self.label, **row} for row in rows])


_NOTES_ABOUT_RANKS: tuple[tuple[Callable[[RankOverlap], object], str], ...] = (
    (
        lambda rank: rank.collectives and rank.clock is None,
        Doubt("no whole step is marked, so figures per step are those of other ranks (see --step-range)"),
    ),
    (
        lambda rank: rank.lacks_work and rank.clock == HOST,
        Doubt(
            "{outside} of the device work that steps launched ran outside of their ranges on the host: the length "
            "of a step is that of its range, and its parts are what ran in it"
        ),
    ),
    (
        lambda rank: rank.clock == DEVICE and rank.lengths_ns and not rank.clocks_disagree,
        (
            "the host runs ahead: a step's range on the host does not hold the device work that it launched, so a step "
            "lasts from its first device work to the next step's, and how long the last one took is not known"
        ),
    ),
    (
        lambda rank: rank.clocks_disagree and rank.lengths_ns,
        Doubt(
            "as the clocks of host and device disagree, a step lasts from its first device work to the next step's, "
            "and how long the last one took is not known"
        ),
    ),
    (
        lambda rank: rank.marked_steps and not rank.lengths_ns and rank.reason not in (LOST, NOTHING, UNITS),
        (
            "how long a step took is not known: most of its device work lies outside of its range on the host, and no "
            "step is known to be followed by one whose device work begins later"
        ),
    ),
)
"""Which ranks a note of :attr:`TraceOverlap.step_notes` is about, and its text."""


def _share_outside_of_ranges(ranks: Sequence[RankOverlap]) -> float:
    """Return the share of the steps' work on the device that ran outside of their ranges on the host."""
    return 1 - sum(rank.held_work_ns or 0 for rank in ranks) / max(1, sum(rank.step_work_ns for rank in ranks))


def keys_of(steps: Sequence[StepOverlap]) -> list[int]:
    """Return the keys of the steps that have one."""
    return [step.step_key for step in steps if step.step_key is not None]


def measure_overlap(
    trace: Trace, ranks: Sequence[RankEvents] | None = None, diagnostics: Diagnostics | None = None
) -> TraceOverlap:
    """Return the overlap of every rank and step in a trace.

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


def measure_rank(rank: RankEvents) -> RankOverlap:
    """Return the overlap of a rank and of its steps."""
    source = RankSource(rank)
    of_rank, _ = source.hidden
    figures = measure_fields(RankOverlap, source) | hidden_fields(RankOverlap, of_rank)
    return RankOverlap(**figures)


def _find_hidden(rank: RankEvents, reason: str | None, comm_ns: int) -> tuple[Hidden, Hidden]:
    """Return what the capture of a rank does not tell: for the figures of the rank, and for those of its steps.

    ``reason`` is why its overlap is not known, ``None`` if it is; ``comm_ns`` is the length of its communication.
    """
    of_rank, of_steps = Hidden.NOTHING, Hidden.COPIES if rank.lacks_copies or rank.lacks_sets else Hidden.NOTHING
    is_blind = has_no_usable_events(rank)
    if is_blind or loses_launches(rank):
        of_steps |= Hidden.LAUNCHES
        if not lacks_names(rank):
            of_steps |= Hidden.KERNELS
    if rank.recording.lacks_calls:
        of_steps |= Hidden.CALLS
    if is_blind:
        return Hidden.WORK, of_steps | Hidden.WORK
    if lacks_times_of_communication(rank, reason, comm_ns):
        of_rank, of_steps = Hidden.DURATIONS, of_steps | Hidden.COMMUNICATION  # in warm-up steps, too
    elif comm_ns == 0 and reason not in (None, NO_COMMUNICATION):
        of_steps |= Hidden.COMMUNICATION
    if reason in NOT_TIMED:
        # Sums over the rank are of what was recorded; what a step communicated is not known.
        return of_rank, Hidden.LAUNCHES | Hidden.WORK | Hidden.KERNELS
    if reason in NOTHING_LEFT and comm_ns:
        of_rank |= Hidden.STEPS
    if rank.hides_waits:
        # Whether the host computed or waited while it communicated is not known.
        return of_rank | Hidden.WAITS, of_steps | Hidden.WAITS
    if hides_compute(rank):
        # What a graph computed, and whether it hid communication or copies, is not known. Where nothing communicates,
        # the figures of the rank need nothing of that.
        return of_rank | (Hidden.GRAPHS if comm_ns else Hidden.NOTHING), of_steps | Hidden.GRAPHS
    if hides_work(rank):
        # While a kernel without a name runs, it is not known what the device does.
        return of_rank, of_steps | Hidden.NAMES
    return of_rank, of_steps


def merge_ranks(results: Sequence[TraceOverlap]) -> TraceOverlap:
    """Return one result for the files of a run, from the results of the single files."""
    parts = [(result.trace, rank) for result in results for rank in result.ranks]
    raised, notes = align_unnumbered_steps([_last_ends(file, rank) for file, rank in parts])
    ranks = merge_files((file, _raise_keys(rank, by)) for (file, rank), by in zip(parts, raised, strict=True))
    names = distinct_names(result.trace for result in results)
    counts = {
        rank.name: {
            step.step_key: step.collectives
            for step in rank.steps
            if step.step_key is not None and step.collectives is not None
        }
        for rank in ranks
        if rank.collectives and not all(step.collectives is None for step in rank.steps)
    }
    return replace(
        results[0],
        profilers=tuple(dict.fromkeys((one.source, one.recorder, one.producer) for one in results)),
        device=device_of(result.device for result in results),
        attribution=merge_attributions([result.attribution for result in results]),
        ranks=ranks,
        files=len(results),
        warnings=(
            *notes,
            *warn_world_sizes(result.world_size for result in results),
            *warn_silent_steps(counts),
            *merge_file_warnings([(names[result.trace], result.warnings) for result in results]),
        ),
        world_size=max((result.world_size or 0 for result in results), default=0) or None,
        caveats=tuple(dict.fromkeys(caveat for result in results for caveat in result.caveats)),
        missing=_merge_missing(
            [(names[result.trace], result.missing) for result in results],
            has_device=any(rank.device is not None for rank in ranks),
        ),
    )


def _merge_missing(files: Sequence[tuple[str, Missing | None]], has_device: bool) -> Missing | None:
    """Return what all files lack; if only some files lack something, what the first of them lacks, with its name.

    ``files`` are pairs of a file's name and what it lacks; ``has_device`` tells whether the job ran on devices.
    ``None`` if no file lacks anything.
    """
    lacking = [(name, missing) for name, missing in files if missing]
    if not lacking:
        return None
    (name, missing), *others = lacking
    if len(lacking) == len(files):
        return missing
    named = f"{name}{f' and {len(others)} more' if others else ''}: {missing.of_device}"
    return Missing(named, "" if has_device else missing.on_cpu)


def _last_ends(file: Path, rank: RankOverlap) -> RankSteps:
    """Return the numbers of a rank's marked steps, and the end of each step's last communication."""
    numbers = [UNKNOWN if step.step is None else step.step for step in rank.marked_steps]
    ends_ns = [NO_TIME if step.comm_end_ns is None else step.comm_end_ns for step in rank.marked_steps]
    return RankSteps(file, np.array(numbers, np.int64), np.array(ends_ns, np.int64))


def _raise_keys(rank: RankOverlap, by: int) -> RankOverlap:
    """Return the rank with ``by`` added to its step keys, so that they agree with those of the other ranks."""
    if not by:
        return rank
    steps = [(step, step.step_key) for step in rank.steps]
    return replace(rank, steps=tuple(replace(step, step_key=None if key is None else key + by) for step, key in steps))


def _ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None
