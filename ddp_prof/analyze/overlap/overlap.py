"""How much communication hides behind compute, for each rank and each step.

For one rank, C is the union of its compute and N the union of its communication; a step's N is what was launched in
the step, measured against all of C::

    C           ######....####
    N           ...########...
    overlapped  ...###....#...   |N and C|
    exposed     ......####....   |N minus C|
    tail        ..........####   |(N minus C) after the last compute of the step's backward|
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.core.rank_events import RankEvents, find_rank_events
from ddp_prof.analyze.core.step_breakdown import sum_by_group
from ddp_prof.analyze.frames import Framed, frame_of_rows, known, rows_of
from ddp_prof.analyze.intervals import EVER, Intervals, union, union_by_group
from ddp_prof.analyze.outliers import Outliers, find_outliers
from ddp_prof.analyze.overlap.coverage import Attribution, measure_attribution, merge_attributions
from ddp_prof.analyze.quality.diagnostics import diagnose, find_caveats
from ddp_prof.analyze.quality.unknown_work import hides_work, is_blind, why_unknown
from ddp_prof.analyze.ranks import Ranked, told_apart
from ddp_prof.manifest import label_of
from ddp_prof.trace import UNKNOWN, Category

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pandas as pd

    from ddp_prof.manifest import Caveat
    from ddp_prof.trace import Trace


@dataclass(frozen=True, slots=True)
class StepOverlap:
    """One step of one rank; see :class:`.step_breakdown.StepBreakdown` for the parts of the window.

    Attributes:
        step: The step's own number, ``None`` where it carries none.
        step_key: A number that no other step of the rank has, see ``Steps.keys``; ``None`` for a capture without steps.
        host_ns: Length of the host's range; ``None`` where the trace tells no steps and this is all of it.
        compute_only_ns, idle_ns: ``None`` where CUDA graphs were recorded whole, which hide what ran in them, or where
            kernels have no name.
        tail_ns: Exposed communication after the last compute of the step's backward; ``None`` where none is known.
        backward_overlapped_ns: Communication under compute of backward; ``None`` likewise.
    """

    step: int | None
    start_ns: int
    host_ns: int | None
    kernels: int
    collectives: int
    comm_ns: int
    overlapped_ns: int
    exposed_ns: int
    backward_overlapped_ns: int | None
    tail_ns: int | None
    window_ns: int
    compute_only_ns: int | None
    exposed_memory_ns: int
    idle_ns: int | None
    other_comm_ns: int
    step_key: int | None = None


@dataclass(frozen=True, slots=True)
class RankOverlap(Ranked):
    """One rank over the whole capture, warm-up left out. Times are ``None`` where the trace cannot tell them.

    Attributes:
        process: Operating-system process id; 0 for a Kineto file, which holds a single process.
        device: CUDA ordinal, ``None`` on a CPU.
        file: Name of the trace.
        reason: Why ``overlap_ratio`` is ``None``.
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
    """Name of the machine, where the trace tells it."""

    @property
    def told_steps(self) -> tuple[StepOverlap, ...]:
        """The steps that the trace tells; none where the whole capture stands for one."""
        return tuple(step for step in self.steps if step.host_ns is not None)

    @property
    def communicating_steps(self) -> tuple[StepOverlap, ...]:
        """Those of them that communicate."""
        return tuple(step for step in self.told_steps if step.comm_ns)

    @property
    def overlap_ratio(self) -> float | None:
        """Share of communication that compute hides, 0 to 1."""
        return None if self.reason else _ratio(self.overlapped_ns, self.comm_ns)

    @property
    def backward_overlap_ratio(self) -> float | None:
        """Share of communication that compute of backward hides, 0 to 1."""
        return None if self.reason else _ratio(self.backward_overlapped_ns, self.comm_ns)


@dataclass(frozen=True, slots=True)
class TraceOverlap(Framed):
    """The overlap of every rank in one trace, or in the traces of one run.

    Attributes:
        trace: The file, of several the first.
        label: What the run is called.
        device: ``cuda`` where the trace holds activities of a device, else ``cpu``.
        world_size: Ranks in the job, ``None`` where unknown; ``ranks`` may be some of them.
    """

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
    """Why the run is not representative; warnings say so, too."""

    @property
    def outliers(self) -> Outliers | None:
        """The steps that alone hold a large part of the exposed time; ``None`` where none does."""
        return find_outliers(
            (step.step_key, step.step, step.comm_ns, step.exposed_ns)
            for rank in self.ranks
            for step in rank.steps
            if not rank.reason
        )

    def to_frame(self, *, by_step: bool = False) -> pd.DataFrame:
        """A row a rank, or a row a step of each rank; times in nanoseconds, ratios from 0 to 1."""
        if by_step:
            identity = ("process", "device", "rank")
            return frame_of_rows(
                [
                    {**{name: getattr(rank, name) for name in identity}, **asdict(step)}
                    for rank in self.ranks
                    for step in rank.steps
                ]
            )
        names = [field.name for field in fields(RankOverlap) if field.name != "steps"]
        names += ["overlap_ratio", "backward_overlap_ratio"]
        rows = [{name: getattr(rank, name) for name in names} for rank in self.ranks]
        return frame_of_rows([{"run": self.label, **row} for row in rows])


def measure_overlap(trace: Trace, ranks: Sequence[RankEvents] | None = None) -> TraceOverlap:
    """Measure the overlap of every rank and step in a trace.

    Args:
        trace: The trace.
        ranks: What its ranks did, as :func:`find_rank_events` finds it; by default with the usual names of ranges.
    """
    ranks = find_rank_events(trace) if ranks is None else ranks
    return TraceOverlap(
        trace=trace.path,
        label=label_of(trace.path, trace.manifest),
        source=trace.source,
        producer=trace.producer,
        device=trace.device,
        attribution=measure_attribution(ranks),
        ranks=tuple(measure_rank(rank) for rank in ranks),
        warnings=diagnose(trace, ranks),
        world_size=trace.world_size,
        caveats=find_caveats(trace),
    )


def measure_rank(rank: RankEvents, span: Intervals = EVER) -> RankOverlap:
    """Measure one rank.

    Args:
        rank: What it did.
        span: What counts: the time in it, the events and the steps that start in it.
    """
    compute, communication = rank.union_of(Category.COMPUTE), rank.union_of(Category.COMMUNICATION) & span
    counts = span.holds(rank.events.start_ns)
    overlapped = _common_ns(communication, compute)
    is_backward = rank.is_backward
    backward = union(rank.events.start_ns[is_backward], rank.events.end_ns[is_backward])
    # That nothing happened in a part of a capture is known; of a whole one it means that nothing was recorded.
    blind = is_blind(rank) and (span is EVER or len(rank.events) > 0)
    return RankOverlap(
        process=rank.process,
        device=rank.device,
        rank=rank.rank,
        kernels=int(rank.events.kernel[counts].sum()),
        collectives=int((rank.events.category[counts] == Category.COMMUNICATION).sum()),
        compute_ns=None if blind else _common_ns(span, compute),
        comm_ns=None if blind else communication.length_ns,
        overlapped_ns=None if blind else overlapped,
        exposed_ns=None if blind else communication.length_ns - overlapped,
        backward_overlapped_ns=_common_ns(communication, backward) if len(backward) and not blind else None,
        reason=why_unknown(rank),
        steps=() if blind else _measure_steps(rank, backward, span),
        file=rank.trace.path.name,
        node=rank.trace.node,
    )


def merge_ranks(results: Sequence[TraceOverlap]) -> TraceOverlap:
    """The results of several files that hold the ranks of one run, as one result.

    Raises:
        ValueError: There is no result.
    """
    if not results:
        raise ValueError("no results to merge")
    ranks = [rank for result in results for rank in result.ranks]
    return replace(
        results[0],
        attribution=merge_attributions([result.attribution for result in results]),
        ranks=told_apart(ranks, [rank.file for rank in ranks]),
        warnings=tuple(dict.fromkeys(warning for result in results for warning in result.warnings)),
        world_size=max((result.world_size or 0 for result in results), default=0) or None,
        caveats=tuple(dict.fromkeys(caveat for result in results for caveat in result.caveats)),
    )


def _measure_steps(rank: RankEvents, backward: Intervals, span: Intervals) -> tuple[StepOverlap, ...]:
    events, steps, parts = rank.events, len(rank.steps), rank.breakdown
    launched = events.step != UNKNOWN
    communicating = launched & (events.category == Category.COMMUNICATION)
    start, end, step = union_by_group(
        events.start_ns[communicating], events.end_ns[communicating], events.step[communicating]
    )
    hidden_ns = sum_by_group(backward.covered_ns(start, end), step, steps)
    has_backward = np.bincount(events.step[launched & rank.is_backward], minlength=steps) > 0
    tail_from = np.minimum(np.maximum(start, rank.backward_end_ns[step]), end)
    tail_ns = sum_by_group(end - tail_from - rank.union_of(Category.COMPUTE).covered_ns(tail_from, end), step, steps)
    # Of time in which a graph recorded whole or an unnamed kernel ran it is not known what it was.
    nothing = [None] * steps
    is_hidden = hides_work(rank)
    as_they_are = (
        "start_ns",
        "window_ns",
        "comm_ns",
        "overlapped_ns",
        "exposed_ns",
        "exposed_memory_ns",
        "other_comm_ns",
    )
    columns = {
        "step": known(rank.steps.number),
        "step_key": known(rank.step_keys),
        "host_ns": (rank.steps.end_ns - rank.steps.start_ns).tolist() if rank.has_steps else nothing,
        "kernels": np.bincount(events.step[launched & (events.kernel == 1)], minlength=steps).tolist(),
        "collectives": np.bincount(events.step[communicating], minlength=steps).tolist(),
        **{name: getattr(parts, name).tolist() for name in as_they_are},
        "compute_only_ns": nothing if is_hidden else parts.compute_only_ns.tolist(),
        "idle_ns": nothing if is_hidden else parts.idle_ns.tolist(),
        "backward_overlapped_ns": known(np.where(has_backward, hidden_ns, UNKNOWN)),
        "tail_ns": known(np.where(rank.backward_end_ns == UNKNOWN, UNKNOWN, tail_ns)),
    }
    chosen = span.holds(rank.steps.start_ns)
    return tuple(rows_of(StepOverlap, {name: list(compress(column, chosen)) for name, column in columns.items()}))


def _common_ns(few: Intervals, many: Intervals) -> int:
    """Length of the intersection, quickest where the first set has few intervals."""
    return int(many.covered_ns(few.start_ns, few.end_ns).sum())


def _ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None
