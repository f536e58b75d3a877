"""A timeline as data: the position, the category and the properties of each box.

Each rank has these lanes, from top to bottom::

    host           steps, and below them forward, backward, synchronize, optimizer; backward may be inferred
    ranges         the program's ranges, nested; one lane per thread, folded at first
    CUDA calls     one lane per thread, folded at first
    compute        one lane per stream; the colour is that of the phase that launched the kernel
    communication  one lane per stream; events at the same time are stacked
    copies         memory copies and sets, of all streams
    graphs         CUDA graphs that the profiler recorded as a whole; one lane per stream
    unnamed        kernels without a name; one lane per stream
    waiting        when a compute stream (on a CPU: the host) stood still for communication; missing if that is not
                   known or did not happen
    where time     each instant is one of: compute only, overlapped, exposed, exposed memory, idle (or CUDA graph,
    goes           unnamed kernel). It is computed as in the tables, from all events of the rank, warm-up included. A
                   step in the tables differs in two ways: it has no communication that other steps launched, and
                   CUDA graphs that were recorded as a whole do not count there
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddp_prof.analyze.collectives.alignment import ClockOffset
from ddp_prof.analyze.collectives.exposed_time import Exposure
from ddp_prof.analyze.collectives.timing import CollectiveTimings
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.overlap import RankOverlap, TraceOverlap
from ddp_prof.columns import milliseconds
from ddp_prof.trace import UNKNOWN, Ints, Table, Trace

HOST = "host"
RANGES = "ranges"
CALLS = "calls"
COMPUTE = "compute"
COMMUNICATION = "communication"
COPIES = "copies"
GRAPHS = "graphs"
UNNAMED = "unnamed"
WAITING = "waiting"
STRIP = "strip"
"""The kinds of lanes, from top to bottom; ``STRIP`` is the lane ``where time goes``."""


class RankExposure(NamedTuple):
    """The collectives of a rank, and when and why each is exposed; one row per collective.

    Attributes:
        rank: Name of the rank.
        timings: When each collective was ready, launched, started and ended.
        exposure: The overlapped time of each collective, and its exposed time by when and why.
        transfer_ns: Transfer time, ``UNKNOWN`` if no peer is known; see ``RunAnalysis.transfers_ns``.
        knows_wait: Whether waiting for peers can be distinguished from transfer.
        consumer: Row in ``Trace.activities`` of the operation that needs the collective (its consumer), ``UNKNOWN`` for
            none.
        consumer_names: The names that ``timings.consumer`` indexes.
    """

    rank: str
    timings: CollectiveTimings
    exposure: Exposure
    transfer_ns: Ints
    knows_wait: bool
    consumer: Ints
    consumer_names: tuple[str, ...]


class Source(NamedTuple):
    """A trace that is drawn as one panel, with its results.

    Attributes:
        ranks, overlap: The ranks of the trace, and the overlap of each rank and step.
        explained: The collectives of each rank.
        gain: A sentence on what hiding all communication would gain at most.
        caveats: Why the run is not representative.
        run: Number of the run; all files of one run have the same number.
        told_of_run: What hiding the communication of all files of the run would gain, and the main cause of exposed
            time; empty for a run of one file.
        clock: Converts times of this trace to those of the first file of the run; ``None`` if the clocks cannot be
            compared.
        typical_step: Key of the step that headlines are about; ``None`` if there is none.
    """

    title: str
    trace: Trace
    ranks: Sequence[RankEvents]
    overlap: TraceOverlap
    explained: Sequence[RankExposure]
    gain: str = ""
    caveats: tuple[str, ...] = ()
    run: int = 0
    told_of_run: str = ""
    clock: ClockOffset | None = None
    typical_step: int | None = None


def line_up(sources: Sequence[Source], starts_ns: Sequence[int]) -> list[int]:
    """Return for each trace the time, in the trace's own times, that its panel shows as 0.

    It is the start of the trace. Files of one run whose clocks can be compared share one time 0: the earliest of their
    starts.

    Args:
        sources: The traces.
        starts_ns: For each trace, the start of what is shown, in the trace's own times.
    """
    # What to add to a time of the trace, near its start, to get a time of the run's first file.
    shifts = [
        int(source.clock.common_ns(np.array([start]))[0]) - start if source.clock else 0
        for source, start in zip(sources, starts_ns, strict=True)
    ]
    # Traces with equal keys share time 0. A trace without a comparable clock has a key of its own.
    keys = [(source.run, UNKNOWN if source.clock else at) for at, source in enumerate(sources)]
    first: dict[tuple[int, int], int] = {}
    for key, start, shift in zip(keys, starts_ns, shifts, strict=True):
        first[key] = min(first.get(key, start + shift), start + shift)
    return [first[key] - shift for key, shift in zip(keys, shifts, strict=True)]


def captured_times(trace: Trace) -> tuple[int, int]:
    """Return the start of the first event and the end of the last one; 0 and 1 if there are no events.

    An event without length counts as 1 ns.
    """
    calls, details = trace.calls.start_ns, trace.call_details
    # Activities, ranges, and calls; the ends of calls may not be recorded.
    columns = [
        (trace.activities.start_ns, trace.activities.end_ns),
        (trace.spans.start_ns, trace.spans.end_ns),
        (calls, details.end_ns if details else calls),
    ]
    starts = [int(start.min()) for start, _ in columns if len(start)]
    ends = [int(np.maximum(start + 1, end).max()) for start, end in columns if len(start)]
    return min(starts, default=0), max(ends, default=1)


def drift_text(source: Source, first_ns: int, last_ns: int) -> Iterator[str]:
    """Yield a note if the trace's clock drifts from that of the run's first file between the two times.

    Pictures align only the starts of traces, so the drift is not drawn.
    """
    if source.clock and source.clock.drift:
        first, last = source.clock.common_ns(np.array([first_ns, last_ns])).tolist()
        if drift_ns := abs(last - first - (last_ns - first_ns)):
            yield f"its clock drifts by {milliseconds(drift_ns)} from the first file's meanwhile, which is not drawn"


@dataclass(frozen=True)
class Boxes(Table):
    """The boxes of one lane; a value that is not known, or does not exist, is ``UNKNOWN``.

    Attributes:
        start_ns, end_ns: Times that count from the panel's time 0.
        category: Index into ``theme.CATEGORIES``.
        name_id: Index into :attr:`Lane.names`; ``UNKNOWN`` if the name of the category says enough.
        step: Key of the measured step; see ``Steps.keys``.
        bucket, bytes: Number of the gradient bucket, and size in bytes of the collective or copy.
        phase: Index into ``range_names.PHASES`` of the phase that launched it.
        call: Row in ``Trace.calls`` of its launch call. The box of a call has its own row here.
        shape: Index into :attr:`Lane.names` of the launch shape.
        registers: Registers per thread.
        collective: Row in :attr:`RankLanes.explained` of this collective, or of the collective that a waiting box waits
            for; ``UNKNOWN`` in warm-up.
        consumer: Row in :attr:`RankLanes.explained` of the first collective that this operation needs.
        level: Row within the lane, from 0 at the top.
    """

    start_ns: Ints
    end_ns: Ints
    category: Ints
    name_id: Ints
    step: Ints
    bucket: Ints
    bytes: Ints
    phase: Ints
    call: Ints
    shape: Ints
    registers: Ints
    collective: Ints
    consumer: Ints
    level: Ints


@dataclass(frozen=True)
class Lane:
    """Boxes on one or several rows.

    Attributes:
        title: Text beside the lane.
        kind: One of the constants ``HOST`` to ``STRIP`` above.
        boxes: The boxes; ``boxes.level`` is the row.
        names: The texts that ``Boxes.name_id`` and ``Boxes.shape`` index.
        from_launch: Whether boxes last from launch to completion on the host, not from start to end on the device.
    """

    title: str
    kind: str
    boxes: Boxes
    names: tuple[str, ...] = ()
    from_launch: bool = False

    @property
    def is_folded(self) -> bool:
        """Whether a page shows only the title of the lane at first; a picture leaves the lane out."""
        return self.kind in (RANGES, CALLS)

    @property
    def levels(self) -> int:
        """Number of rows of the lane, at least 1."""
        return int(self.boxes.level.max(initial=0)) + 1


@dataclass(frozen=True)
class RankLanes:
    """One rank: its lanes, and its figures over the whole capture.

    Attributes:
        overlap: Overlap of the rank and of its steps.
        explained: The collectives of the rank.
        backward: How the backward pass was found: by ``ranges``, ``inferred`` (by the launching thread), or ``none``.
        why_unknown: Why the blocking time is not known for all collectives; ``None`` if it is known.
    """

    title: str
    overlap: RankOverlap
    lanes: tuple[Lane, ...]
    explained: RankExposure
    backward: str
    why_unknown: str | None = None

    @property
    def knows_blocking(self) -> bool:
        """Whether the blocking time of all, or at least of some, collectives is known."""
        return self.why_unknown is None or bool((self.explained.timings.blocking_ns != UNKNOWN).any())


class StepMark(NamedTuple):
    """A step that is shown: its key (see ``Steps.keys``), and its interval over all ranks, from the panel's time 0."""

    key: int
    start_ns: int
    end_ns: int


def choose_step(steps: Sequence[StepMark], typical: int | None) -> int:
    """Return the key of the step to show first.

    It is the typical step, or if that is not among ``steps``, the step of median length (of two, the shorter one).

    Args:
        steps: The steps that are shown, at least one.
        typical: Key of the typical step, ``None`` if there is none.
    """
    lengths = {step.key: step.end_ns - step.start_ns for step in steps}
    if typical in lengths:
        return typical
    return sorted(lengths, key=lambda key: (lengths[key], key))[(len(lengths) - 1) // 2]


@dataclass(frozen=True)
class Panel:
    """One trace, drawn. Time 0 is what :func:`line_up` returns: usually the start of the first step shown.

    Attributes:
        gain, run, told_of_run, typical_step: As in :class:`Source`.
        facts: Short texts about the run.
        steps: The steps that are shown.
        step_names: Name of each measured step, by its key (see ``Steps.keys``).
        start_ns, end_ns: Interval that the panel shows.
        home_ns: Interval of the measured steps, or of the whole capture if there are none.
    """

    title: str
    device: str
    gain: str
    run: int
    told_of_run: str
    facts: tuple[str, ...]
    ranks: tuple[RankLanes, ...]
    steps: tuple[StepMark, ...]
    step_names: Mapping[int, str]
    typical_step: int | None
    start_ns: int
    end_ns: int
    home_ns: tuple[int, int]

    @property
    def overlap_ratio(self) -> float | None:
        """Fraction of communication that is overlapped; see :func:`overlap_ratio_of`."""
        return overlap_ratio_of([self])


def overlap_ratio_of(panels: Sequence[Panel]) -> float | None:
    """Return the fraction of communication that is overlapped, over the whole capture and all ranks that know theirs.

    ``None`` if there is no such rank or no communication.
    """
    known = [rank.overlap for panel in panels for rank in panel.ranks if rank.overlap.overlap_ratio is not None]
    comm_ns = sum(rank.comm_ns or 0 for rank in known)
    return sum(rank.overlapped_ns or 0 for rank in known) / comm_ns if comm_ns else None


@dataclass(frozen=True)
class Timeline:
    """Panels below each other, on one axis of time. Times count from time 0 of the panels."""

    panels: tuple[Panel, ...]

    @property
    def boxes(self) -> int:
        """Number of boxes that are drawn at first: those of all lanes that are not folded."""
        lanes = (lane for panel in self.panels for rank in panel.ranks for lane in rank.lanes)
        return sum(len(lane.boxes) for lane in lanes if not lane.is_folded)

    @property
    def start_ns(self) -> int:
        return min((panel.start_ns for panel in self.panels), default=0)

    @property
    def end_ns(self) -> int:
        return max((panel.end_ns for panel in self.panels), default=0)

    @property
    def home_ns(self) -> tuple[int, int]:
        """The interval of the measured steps of all panels; see :attr:`Panel.home_ns`."""
        starts, ends = zip(*(panel.home_ns for panel in self.panels), strict=True) if self.panels else ([0], [0])
        return min(starts), max(ends)

    @property
    def opening_ns(self) -> tuple[tuple[int, int], ...] | None:
        """For each panel, the interval that a page shows first: the typical step with a margin.

        All intervals have one length, that of the longest such step. A panel without this step takes the interval of
        the first panel that has it. ``None`` if no panel has steps.
        """
        key = self.typical_step
        marks = [next((mark for mark in panel.steps if mark.key == key), None) for panel in self.panels]
        shown = [mark for mark in marks if mark is not None]
        if not shown:
            return None
        longest = max(mark.end_ns - mark.start_ns for mark in shown)
        starts = [(mark or shown[0]).start_ns for mark in marks]
        # A third of a step and 1 µs on either side.
        return tuple((start - longest // 3 - 1000, start + longest + longest // 3 + 1000) for start in starts)

    @property
    def typical_step(self) -> int | None:
        """Key of the step that :func:`choose_step` takes from the first panel with steps; ``None`` without steps."""
        first = next((panel for panel in self.panels if panel.steps), None)
        return choose_step(first.steps, first.typical_step) if first else None
