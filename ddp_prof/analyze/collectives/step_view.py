"""One step to be looked at: the life of each of its collectives, and when and why it is exposed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ddp_prof.analyze.collectives.clock_alignment import ClockOffset
from ddp_prof.analyze.collectives.exposed_time import WHENS, divide_by_when, divide_by_why, wait_end_ns
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.timing import RankCollectives
from ddp_prof.analyze.intervals import union
from ddp_prof.analyze.result_bases import none_for_unknown
from ddp_prof.trace import NO_TIME, Ints


class ExposedStretch(NamedTuple):
    """An exposed stretch of a collective: when and why, and whether a peer had not arrived."""

    when: str
    why: str
    is_wait: bool
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class CollectiveView:
    """One collective, in nanoseconds from the step's first time on any rank; ``None`` for what is not known."""

    index: int
    bucket: int | None
    bytes: int | None
    ready_ns: int | None
    launch_ns: int | None
    start_ns: int
    end_ns: int
    exposed: tuple[ExposedStretch, ...]


@dataclass(frozen=True, slots=True)
class RankStepView:
    """The collectives of one rank in the step.

    Attributes:
        name: Of the rank.
        compute: Starts and ends of the rank's compute from the step's first time to its last.
        backward_end_ns: End of backward's compute.
    """

    name: str
    compute: tuple[tuple[int, int], ...]
    backward_end_ns: int | None
    collectives: tuple[CollectiveView, ...]


def view_step(run: RunAnalysis, step: int, ranks: Collection[int] | None = None) -> tuple[RankStepView, ...]:
    """The collectives of each rank in a step, on one clock; ranks without any are left out.

    Args:
        run: The run.
        step: The step's key, see ``Steps.keys``.
        ranks: Indices of the ranks to look at; by default all.
    """
    drawn = []
    for index, (rank, wait_ns) in enumerate(zip(run.ranks, run.waits_ns, strict=True)):
        if ranks is not None and index not in ranks:
            continue
        rows = np.flatnonzero(rank.keys == step)
        if len(rows):
            drawn.append((rank, rows, wait_ns, run.alignment.offset_for(rank.clock)))
    origin = min((int(clock.common_ns(_first_time(rank, rows))) for rank, rows, _, clock in drawn), default=0)
    return tuple(_rank_view(*part, origin) for part in drawn)


def _first_time(rank: RankCollectives, rows: Ints) -> Ints:
    """The first time at which anything is known of the collectives."""
    timings = rank.timings
    times = np.concatenate([timings.ready_ns[rows], timings.launch_ns[rows], timings.start_ns[rows]])
    first: Ints = times[times != NO_TIME].min()
    return first


def _rank_view(rank: RankCollectives, rows: Ints, wait_ns: Ints, clock: ClockOffset, origin: int) -> RankStepView:
    timings = rank.timings

    def since(time_ns: Ints) -> list[Any]:
        moved = (clock.common_ns(time_ns) - origin).tolist()
        return [None if time == NO_TIME else shifted for time, shifted in zip(time_ns.tolist(), moved, strict=True)]

    window = union(_first_time(rank, rows)[np.newaxis], timings.end_ns[rows].max()[np.newaxis])
    compute = rank.compute & window
    exposed = _exposed(rank, rows, wait_ns, since)
    times = (since(column[rows]) for column in (timings.ready_ns, timings.launch_ns, timings.start_ns, timings.end_ns))
    parts = [tuple(exposed[row]) for row in rows.tolist()]
    columns: Any = zip(
        none_for_unknown(timings.bucket[rows]), none_for_unknown(timings.bytes[rows]), *times, parts, strict=True
    )
    return RankStepView(
        name=rank.name,
        compute=tuple(zip(since(compute.start_ns), since(compute.end_ns), strict=True)),
        backward_end_ns=since(rank.backward_end_ns[timings.step[rows[:1]]])[0],
        collectives=tuple(CollectiveView(index, *values) for index, values in enumerate(columns)),
    )


def _exposed(
    rank: RankCollectives, rows: Ints, wait_ns: Ints, since: Callable[[Ints], list[int]]
) -> dict[int, list[ExposedStretch]]:
    """The exposed stretches of some collectives, in the time that ``since`` makes of the rank's own."""
    found: dict[int, list[ExposedStretch]] = {row: [] for row in rows.tolist()}
    wait_end = wait_end_ns(rank.timings, wait_ns)
    for why, part in divide_by_why(rank.timings, wait_ns).items():
        cells = divide_by_when(rank, part)
        for index in np.flatnonzero(np.isin(cells.row, rows)).tolist():
            row = int(cells.row[index])
            bare = union(cells.start_ns[[index]], cells.end_ns[[index]]) - rank.compute
            waiting = union(rank.timings.start_ns[[row]], wait_end[[row]])
            for is_wait, stretches in ((True, bare & waiting), (False, bare - waiting)):
                times = zip(since(stretches.start_ns), since(stretches.end_ns), strict=True)
                found[row] += [
                    ExposedStretch(WHENS[cells.when[index]], why, is_wait, start, end) for start, end in times
                ]
    return found
