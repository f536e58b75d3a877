"""The collectives of one step as a picture shows them: when each was ready, launched and run, and what is exposed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ddp_prof.analyze.collectives.alignment import ClockOffset
from ddp_prof.analyze.collectives.exposed_time import WHENS, PhaseParts
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.timing import RankCollectives
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.analyze.result_bases import none_for_unknown
from ddp_prof.table import select
from ddp_prof.trace import NO_TIME, Ints


class ExposedStretch(NamedTuple):
    """An exposed part of a collective: its when and why, whether a peer had not arrived yet, and its times."""

    when: str
    why: str
    is_wait: bool
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class CollectiveView:
    """One collective of a picture. Times are in nanoseconds from the step's first time on any rank.

    A value that is not known is ``None``, and so is ``exposed`` if exposed time is not known.
    """

    index: int
    bucket: int | None
    bytes: int | None
    ready_ns: int | None
    launch_ns: int | None
    start_ns: int
    end_ns: int
    exposed: tuple[ExposedStretch, ...] | None


@dataclass(frozen=True, slots=True)
class RankStepView:
    """The collectives of one rank in the step, and the starts and ends of its compute in that time.

    ``backward_ends_ns`` are the ends of the passes of backward that communicate.
    """

    name: str
    compute: tuple[tuple[int, int], ...]
    backward_ends_ns: tuple[int, ...]
    collectives: tuple[CollectiveView, ...]


def view_step(run: RunAnalysis, step: int, ranks: Collection[int] | None = None) -> tuple[RankStepView, ...]:
    """Return what a picture of the step with the key ``step`` shows: one view per rank, on the common clock.

    ``ranks`` are indices of the ranks to show, by default all. Ranks without collectives in the step are left out.
    """
    drawn = []
    for index, (rank, wait_end, parts) in enumerate(zip(run.ranks, run.wait_ends_ns, run.parts, strict=True)):
        if ranks is not None and index not in ranks:
            continue
        rows = np.flatnonzero(rank.keys == step)
        if len(rows):
            drawn.append((rank, rows, wait_end, parts, run.alignment.offset_for(rank.clock)))
    origin = min((int(clock.common_ns(_first_time(rank, rows))) for rank, rows, *_, clock in drawn), default=0)
    return tuple(_rank_view(*part, origin) for part in drawn)


def _first_time(rank: RankCollectives, rows: Ints) -> Ints:
    """Return the first known time (ready, launch or start) of the collectives in ``rows``, on the rank's clock."""
    timings = rank.timings
    times = np.concatenate([timings.ready_ns[rows], timings.launch_ns[rows], timings.start_ns[rows]])
    first: Ints = times[times != NO_TIME].min()
    return first


def _rank_view(
    rank: RankCollectives, rows: Ints, wait_end: Ints, parts: Mapping[str, PhaseParts], clock: ClockOffset, origin: int
) -> RankStepView:
    """Return the view of one rank.

    Args:
        rank: The rank.
        rows: The rows of its collectives in the step.
        wait_end: When each of its collectives' wait for peers ended; the rank's element of
            :attr:`.RunAnalysis.wait_ends_ns`.
        parts: The rank's element of :attr:`.RunAnalysis.parts`.
        clock: Converts the rank's times to the common clock.
        origin: Time 0 of the picture on the common clock.
    """
    timings = rank.timings

    def since(time_ns: Ints) -> list[Any]:
        """Return times of the rank as times of the picture; ``None`` for unknown times."""
        moved = (clock.common_ns(time_ns) - origin).tolist()
        return [None if time == NO_TIME else shifted for time, shifted in zip(time_ns.tolist(), moved, strict=True)]

    # Compute from the first known time of the collectives to their last end.
    window = union(_first_time(rank, rows)[np.newaxis], timings.end_ns[rows].max()[np.newaxis])
    compute = rank.compute & window
    found = _exposed(rows, wait_end, parts, compute, since)
    exposed = [None if rank.reason else tuple(found[row]) for row in rows.tolist()]
    times = (since(column[rows]) for column in (timings.ready_ns, timings.launch_ns, timings.start_ns, timings.end_ns))
    sizes = (none_for_unknown(column[rows]) for column in (timings.bucket, timings.bytes))
    columns: Any = zip(*sizes, *times, exposed, strict=True)
    return RankStepView(
        name=rank.name,
        compute=tuple(zip(since(compute.start_ns), since(compute.end_ns), strict=True)),
        backward_ends_ns=tuple(end for end in since(np.unique(timings.backward_end_ns[rows])) if end is not None),
        collectives=tuple(CollectiveView(index, *values) for index, values in enumerate(columns)),
    )


def _exposed(
    rows: Ints,
    wait_end: Ints,
    parts: Mapping[str, PhaseParts],
    compute: Intervals,
    since: Callable[[Ints], list[int]],
) -> dict[int, list[ExposedStretch]]:
    """Return the exposed parts of the collectives in ``rows``, by row.

    ``compute`` is the rank's compute in the step; ``since`` converts the rank's times to times of the picture. For
    ``wait_end`` and ``parts`` see :func:`_rank_view`.
    """
    found: dict[int, list[ExposedStretch]] = {row: [] for row in rows.tolist()}
    is_chosen = np.zeros(len(wait_end), np.bool_)
    is_chosen[rows] = True
    for why, every in parts.items():
        cells = select(every, is_chosen[every.row] & (every.start_ns < every.end_ns))
        cells = select(cells, np.argsort(cells.start_ns))
        bare = Intervals(cells.start_ns, cells.end_ns) - compute  # cells are disjoint: each instant belongs to one
        cell = np.searchsorted(cells.start_ns, bare.start_ns, side="right") - 1
        # Each exposed part is cut in two where the collective's wait for peers ends.
        cut = np.clip(wait_end[cells.row[cell]], bare.start_ns, bare.end_ns)
        for is_wait, start, end in ((True, bare.start_ns, cut), (False, cut, bare.end_ns)):
            some = start < end
            owners = zip(cells.row[cell[some]].tolist(), cells.when[cell[some]].tolist(), strict=True)
            times = zip(since(start[some]), since(end[some]), strict=True)
            for (row, when), (begin, stop) in zip(owners, times, strict=True):
                found[row].append(ExposedStretch(WHENS[when], why, is_wait, begin, stop))
    return found
