"""A timeline as data: which box lies where, of what colour, and what is known of it.

For each rank, top to bottom::

    host           step, and in it forward, backward, synchronize, optimizer; backward also where it is inferred
    ranges         the program's own, one lane per thread, nested; folded at first
    CUDA calls     a lane per thread; folded at first
    compute        a lane a stream; coloured by the phase that launched it
    communication  a lane a stream; what is in flight at the same time is stacked
    copies
    waiting        when a stream that computes, on a CPU the host, stood still for communication; left out where nothing
                   tells that, and where nothing waited
    where time     compute only, overlapped, exposed, exposed memory, idle: each instant that is held is one of these,
    goes           from the same algebra as the table and all events of the rank, warm-up included. So a window's sums
                   are those of its device, a step's in the table without what other steps launched (and what was idle
                   to the table while a CUDA graph ran that was recorded whole is shown as that)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddp_prof.analyze.collectives.exposed_time import Exposure
from ddp_prof.analyze.collectives.run_analysis import ClockOffset
from ddp_prof.analyze.collectives.timing import CollectiveTimings
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.overlap import RankOverlap
from ddp_prof.present.text import milliseconds
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


class RankExposure(NamedTuple):
    """The collectives of a rank, and when and why each is exposed; row by row.

    Attributes:
        transfer_ns: How long each moved bytes, ``UNKNOWN`` where no peer is known; see ``RunAnalysis.transfers_ns``.
        knows_wait: Whether waiting for peers is told from transfer.
        consumer: Of each the row in ``Trace.activities`` of its consumer, ``UNKNOWN`` for none.
        consumer_names: What ``timings.consumer`` points into.
    """

    rank: str
    timings: CollectiveTimings
    exposure: Exposure
    transfer_ns: Ints
    knows_wait: bool
    consumer: Ints
    consumer_names: tuple[str, ...]


class Source(NamedTuple):
    """What is drawn as one panel: a trace, what its ranks did, their figures, and what is not representative of it.

    ``gain`` is what hiding all its communication would gain at most, in a sentence. ``clock`` leads from its times to
    those of the first file of ``run``; ``None`` where the clocks of these cannot be compared. ``typical_step`` is the
    key of the one that headlines are about.
    """

    title: str
    trace: Trace
    ranks: Sequence[RankEvents]
    overlaps: Sequence[RankOverlap]
    explained: Sequence[RankExposure]
    gain: str = ""
    caveats: tuple[str, ...] = ()
    run: int = 0
    clock: ClockOffset | None = None
    typical_step: int | None = None


def line_up(sources: Sequence[Source], starts_ns: Sequence[int]) -> list[int]:
    """Time 0 of each trace: where it starts; of the files of a run on one clock, where the first of them does."""
    shifts = [
        int(source.clock.common_ns(np.array([start]))[0]) - start if source.clock else 0
        for source, start in zip(sources, starts_ns, strict=True)
    ]
    keys = [(source.run, UNKNOWN if source.clock else at) for at, source in enumerate(sources)]
    first: dict[tuple[int, int], int] = {}
    for key, start, shift in zip(keys, starts_ns, shifts, strict=True):
        first[key] = min(first.get(key, start + shift), start + shift)
    return [first[key] - shift for key, shift in zip(keys, shifts, strict=True)]


def captured_times(trace: Trace) -> tuple[int, int]:
    """From the first event of a trace to the last; an instant lasts as long as a nanosecond."""
    calls, details = trace.calls.start_ns, trace.call_details
    columns = [
        (trace.activities.start_ns, trace.activities.end_ns),
        (trace.spans.start_ns, trace.spans.end_ns),
        (calls, details.end_ns if details else calls),
    ]
    starts = [int(start.min()) for start, _ in columns if len(start)]
    ends = [int(np.maximum(start + 1, end).max()) for start, end in columns if len(start)]
    return min(starts, default=0), max(ends, default=1)


def drift_text(source: Source, first_ns: int, last_ns: int) -> Iterator[str]:
    """How far its clock drifts from the run's first file's meanwhile: pictures line up the starts and leave it out."""
    if source.clock and source.clock.drift:
        first, last = source.clock.common_ns(np.array([first_ns, last_ns])).tolist()
        if drift_ns := abs(last - first - (last_ns - first_ns)):
            yield f"its clock drifts by {milliseconds(drift_ns)} from the first file's meanwhile, which is not drawn"


@dataclass(frozen=True)
class Boxes(Table):
    """The boxes of one lane; ``UNKNOWN`` is what is not told, or is none.

    Attributes:
        start_ns, end_ns: From the panel's time 0.
        category: Index into ``theme.CATEGORIES``.
        name_id: Index into :attr:`Lane.names`; ``UNKNOWN`` where the category says it all.
        step: Key of the measured step it belongs to; see ``Steps.keys``.
        phase: Index into ``range_names.PHASES`` of the phase that launched it.
        call: Row in ``Trace.calls`` of the call that launched it, or that it is.
        shape: Index into :attr:`Lane.names` of its launch shape.
        registers: Of a thread.
        collective: Row in :attr:`RankLanes.explained` of the collective that it is, or for which something stood still;
            ``UNKNOWN`` of warm-up.
        consumer: Row there of the first collective that it needs, and that it needs more closely than others do.
        level: Row within the lane, from 0 at its top.
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
    """Boxes on a row or, stacked, on a few.

    Attributes:
        kind: One of ``HOST`` to ``STRIP``.
        names: What ``Boxes.name_id`` points into.
        from_launch: Whether boxes last from launch to completion, as the host saw them, not from start to end.
    """

    title: str
    kind: str
    boxes: Boxes
    names: tuple[str, ...] = ()
    from_launch: bool = False

    @property
    def is_folded(self) -> bool:
        """Whether a page shows no more than the title at first, and a picture nothing."""
        return self.kind in (RANGES, CALLS)

    @property
    def levels(self) -> int:
        return int(self.boxes.level.max(initial=0)) + 1


@dataclass(frozen=True)
class RankLanes:
    """One rank: its lanes, and its figures over the whole capture.

    Attributes:
        backward: How it was told: ``ranges``, ``inferred`` or ``none``.
        why_unknown: Why it is not known of all collectives whether anything waited for them; ``None`` where it is.
    """

    title: str
    overlap: RankOverlap
    lanes: tuple[Lane, ...]
    explained: RankExposure
    backward: str
    why_unknown: str | None = None

    @property
    def knows_blocking(self) -> bool:
        """Whether it is known of any collective how long something stood still for it."""
        return self.why_unknown is None or bool((self.explained.timings.blocking_ns != UNKNOWN).any())


class StepMark(NamedTuple):
    """Where a step lies, from the panel's time 0, over all its ranks; and its key, see ``Steps.keys``."""

    key: int
    start_ns: int
    end_ns: int


def choose_step(steps: Sequence[StepMark], typical: int | None) -> int:
    """Key of the step to look at first: the typical one, or where that is not shown the one of median length."""
    lengths = {step.key: step.end_ns - step.start_ns for step in steps}
    if typical in lengths:
        return typical
    return sorted(lengths, key=lambda key: (lengths[key], key))[(len(lengths) - 1) // 2]


@dataclass(frozen=True)
class Panel:
    """One trace.

    Attributes:
        gain, typical_step: As of ``Source``.
        facts: What else is known of the run, a short text each.
        step_names: What all measured steps are called, by ``Steps.keys``.
        start_ns, end_ns: Of what is held, from time 0: the start of the first step shown on any rank.
        home_ns: From when to when the measured steps lie, or all that was captured where there are none.
    """

    title: str
    device: str
    gain: str
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
        """Share of all communication of all ranks that compute hides, over the whole capture."""
        comm_ns = sum(rank.overlap.comm_ns or 0 for rank in self.ranks)
        return sum(rank.overlap.overlapped_ns or 0 for rank in self.ranks) / comm_ns if comm_ns else None


@dataclass(frozen=True)
class Timeline:
    """Panels above each other on one axis of time, each from the start of its first step shown."""

    panels: tuple[Panel, ...]

    @property
    def boxes(self) -> int:
        lanes = (lane for panel in self.panels for rank in panel.ranks for lane in rank.lanes)
        return sum(len(lane.boxes) for lane in lanes if not lane.is_folded)

    @property
    def start_ns(self) -> int:
        """Start of what is held; not after 0."""
        return min((panel.start_ns for panel in self.panels), default=0)

    @property
    def end_ns(self) -> int:
        return max((panel.end_ns for panel in self.panels), default=0)

    @property
    def home_ns(self) -> tuple[int, int]:
        starts, ends = zip(*(panel.home_ns for panel in self.panels), strict=True) if self.panels else ([0], [0])
        return min(starts), max(ends)

    @property
    def opening_ns(self) -> tuple[tuple[int, int], ...] | None:
        """Of each panel what a page shows at first: the typical step, and a little on either side.

        ``None`` where no panel has steps. A panel without this step is shown where the first that has it is.
        """
        key = self.typical_step
        marks = [next((mark for mark in panel.steps if mark.key == key), None) for panel in self.panels]
        shown = [mark for mark in marks if mark is not None]
        if not shown:
            return None
        longest = max(mark.end_ns - mark.start_ns for mark in shown)
        starts = [(mark or shown[0]).start_ns for mark in marks]
        return tuple((start - longest // 3 - 1000, start + longest + longest // 3 + 1000) for start in starts)

    @property
    def typical_step(self) -> int | None:
        """Key of the first panel's step that :func:`choose_step` takes."""
        first = next((panel for panel in self.panels if panel.steps), None)
        return choose_step(first.steps, first.typical_step) if first else None
