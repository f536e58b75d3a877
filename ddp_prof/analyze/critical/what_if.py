"""How much steps would gain without copies, without waits of the host, or without some collectives, by replays.

Each step is replayed on its own, from the recorded times before it; see :mod:`.replay`. Recorded compute is divided
into its work and what communication slowed it by. Where a replay moves compute or communication, compute runs at
``1 / kappa`` of its speed while communication runs beside it, and at full speed otherwise::

    recorded   ggggssssGGGGGG      g, G: compute, s: the host waits
               ........CCCCCC      C: a collective, beside which G takes 1.5 times as long
    replayed   ggggGGGG            without s, where nothing runs beside G

A replay that leaves nothing out gives the recorded times.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median

import numpy as np

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.timing import RankCollectives
from ddp_prof.analyze.critical.critical_path import (
    CALLS_OUT_OF_ORDER,
    CLOCKS_CONTRADICT,
    NO_COMMON_CLOCK,
    NO_WORK,
    WITH_GAPS,
    RankWork,
)
from ddp_prof.analyze.critical.replay import Links, Replay, join_replays
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.analyze.statistics import bootstrap_interval, mean_per_draw, median_per_draw
from ddp_prof.analyze.step_cost import Slowed
from ddp_prof.table import (
    NO_TIME,
    UNKNOWN,
    Floats,
    Ints,
    Mask,
    concatenate,
    distinct,
    positions,
    select,
    take_or_unknown,
)

Step = tuple[int, int, tuple[int, ...]]
"""The key of a step, when it begins on the common clock, and the indices of its late ranks."""

MOST_STEPS = 24
"""The most steps that are replayed: this number of evenly spread steps is enough for the interval."""
_MOST_PASSES, _SETTLED_NS = 12, 100
"""A step is replayed at most this often, until no time moves by more than this (see :func:`_replay`)."""
_MOST_LAST = 4
"""The number of ranks of a collective that may be the last to arrive in a replay: those that arrived last."""
_MOST_SLOWED = 0.95
"""The most that communication takes from the speed of compute: compute keeps at least a twentieth of it."""
_UNKNOWN_SHARES = (0.0, 0.0, 0.5)
"""Estimate, low and high of :class:`Slowed` where the slowdown is not known: none, and up to twice as long."""


@dataclass(frozen=True, slots=True)
class Gain:
    """How much shorter a typical step would be, with the 95 % interval, in nanoseconds; ``None`` with a reason.

    The interval includes how much steps vary, how well the slowdown beside communication is known, and whether gaps
    before operations that are left out would stay.
    """

    ns: int | None
    low_ns: int | None
    high_ns: int | None
    reason: str | None = None


def unknown_gain(reason: str) -> Gain:
    return Gain(None, None, None, reason)


def gain_of_steps(gains_ns: Sequence[int], *, is_mean: bool = False) -> Gain:
    """Return the gain of a typical step: the median over steps, or their mean; without an interval for few steps."""
    if not len(gains_ns):
        return unknown_gain(NO_WORK)
    combine = np.mean if is_mean else np.median
    values = np.array(gains_ns, np.float64)
    interval = bootstrap_interval(values, mean_per_draw if is_mean else median_per_draw, are_consecutive=True)
    low, high = interval or (None, None)
    return Gain(
        round(float(combine(values))), None if low is None else round(low), None if high is None else round(high)
    )


class WhatIf:
    """Replays the steps of a run.

    ``slowed`` returns by how much communication slows compute; it is called only if something is replayed.
    """

    def __init__(self, run: RunAnalysis, ranks: Sequence[RankWork], slowed: Callable[[], Slowed]) -> None:
        self._run, self._ranks, self._slowed = run, ranks, slowed

    @cached_property
    def reason(self) -> str | None:
        """Why nothing can be replayed; ``None`` if that is possible."""
        reason = next((one.reason for one in self._ranks if one.reason), None)
        if reason:
            return reason
        if not all(one.replay for one in self._ranks):
            return CALLS_OUT_OF_ORDER
        return NO_COMMON_CLOCK if self._run.alignment.residual_p95_ns is None else None

    def knows(self, what: str) -> bool:
        """Return whether :meth:`without` has an answer: some rank has ``what``, or there is a reason for no gain."""
        return bool(self.reason) or any(what in one.left_out for one in self._ranks)

    def without(self, what: str, keys: Collection[int] | None = None) -> Gain:
        """Return the gain without ``what``: a key of :attr:`.critical_path.RankWork.left_out`, such as ``COPIES``.

        ``keys`` are those of the steps that count; by default all.
        """
        # If the gaps before it may stay, the interval covers the results with and without them.
        gain = self._gain(what, keys=keys)
        with_gaps = f"{what}{WITH_GAPS}"
        if gain.low_ns is None or gain.high_ns is None or not any(with_gaps in one.left_out for one in self._ranks):
            return gain
        other = self._gain(with_gaps, keys=keys)
        ends = [end for end in (other.low_ns, other.high_ns) if end is not None]
        return replace(gain, low_ns=min(gain.low_ns, *ends), high_ns=max(gain.high_ns, *ends))

    def without_collectives(self, choose: Callable[[RankCollectives], Mask]) -> Gain:
        """Return the gain if the chosen collectives took no time, and no rank waited for another one in them.

        ``choose`` returns the mask of these among the collectives of a rank.
        """
        return self._gain(choose=choose)

    def without_lag(self, late: Callable[[int], tuple[int, ...]], surely: Collection[int] = ()) -> Gain:
        """Return the gain of the other ranks if none of them waited for the ranks that are late: the mean over steps.

        ``late`` returns their indices, given the key of a step; steps without late ranks gain nothing. ``surely`` are
        the keys of the steps in which they surely are late: of these, and of the others, as many are replayed as is
        their share.
        """
        return self._gain(late=late, surely=surely)

    @cached_property
    def _recorded(self) -> list[Replay]:
        """The replay of each rank that leaves nothing out."""
        return self._replay_without("")

    def _replay_without(self, what: str) -> list[Replay]:
        """Return the replay of each rank without ``what``, but of those whose times contradict the order of calls."""
        slowed = self._slowed()
        # Kinds of kernels that communication slows more than the average count more.
        weights = {kind: share / slowed.share for kind, share in slowed.by_kind} if slowed.share else {}
        return [replay for one in self._ranks if (replay := one.replay_without(what, weights))]

    def _gain(
        self,
        what: str = "",
        choose: Callable[[RankCollectives], Mask] | None = None,
        late: Callable[[int], tuple[int, ...]] | None = None,
        surely: Collection[int] = (),
        keys: Collection[int] | None = None,
    ) -> Gain:
        """Return the gain of changed replays against the recorded ones: of a typical step or, with ``late``, the mean.

        Args:
            what: See :meth:`without`.
            choose: See :meth:`without_collectives`.
            late: See :meth:`without_lag`.
            surely: See :meth:`without_lag`.
            keys: See :meth:`without`.
        """
        if self.reason:
            return unknown_gain(self.reason)
        slowed, recorded = self._slowed(), self._recorded
        changed = self._replay_without(what) if what else recorded
        if min(len(recorded), len(changed)) < len(self._ranks):
            return unknown_gain(CALLS_OUT_OF_ORDER)
        before = self._join(recorded)
        if before is None:
            return unknown_gain(CLOCKS_CONTRADICT)
        # One replay for each choice of late ranks; a late rank does not tell when the step of the others ends.
        every = [(key, start_ns, late(key) if late else ()) for key, start_ns in self._steps(before)]
        if keys is not None:
            every = [step for step in every if step[0] in keys]
        concerned = [step for step in every if step[2] or not late]
        steps = _spread(concerned, surely)
        found_after = {who: self._join(changed, choose, who) for who in dict.fromkeys(who for *_, who in steps)}
        afters = {who: after for who, after in found_after.items() if after is not None}
        if len(afters) < len(found_after):
            return unknown_gain(CLOCKS_CONTRADICT)
        ended = {who: set(after.ends.step.tolist()) for who, after in afters.items()}
        steps = [(key, start_ns, who) for key, start_ns, who in steps if key in ended[who]]
        if not steps:
            return unknown_gain(NO_WORK)
        # The steps are replayed with the estimated slowdown and with both ends of its interval.
        shares = (slowed.share, slowed.low, slowed.high) if slowed.share is not None else _UNKNOWN_SHARES
        others = (len(every) - len(concerned)) / len(concerned)
        gains = {
            share: _with_zeros(
                [simulate_gain(before, afters[who], key, at_ns, share) for key, at_ns, who in steps], others
            )
            for share in {max(0.0, one) for one in shares if one is not None}
        }
        found = gain_of_steps(gains[max(0.0, shares[0] or 0.0)], is_mean=late is not None)
        of_shares = [fmean(of_share) if late else median(of_share) for of_share in gains.values()]
        ends = [end for end in (found.low_ns, found.high_ns) if end is not None]
        if not ends or found.ns is None:
            return found
        return replace(found, low_ns=round(min(*ends, *of_shares)), high_ns=round(max(*ends, *of_shares)))

    def _join(
        self,
        replays: Sequence[Replay],
        choose: Callable[[RankCollectives], Mask] | None = None,
        late: Collection[int] = (),
    ) -> Replay | None:
        """Return one replay of all ranks, in which a collective ends as long after the last arrival as it did.

        ``None`` if the clocks contradict the links. Arguments: see :meth:`_gain`.
        """
        run, keyed, common_ns, arrivals = self._run, [], [], []
        first = np.cumsum([0, *(len(one.times) for one in replays)]).tolist()
        for index, (rank, own, one) in enumerate(zip(run.ranks, self._ranks, replays, strict=True)):
            at = positions(one.times.collective, len(own.work))
            arrival, links = take_or_unknown(at, own.of_timing), one.links
            # A chosen collective takes no time, and is no common one: its ranks do not wait for each other.
            if choose is not None:
                is_chosen = choose(rank)
                is_free = np.isin(links.tail, arrival[is_chosen]) & (links.is_duration == 1)
                arrival = np.where(is_chosen, UNKNOWN, arrival)
                length_ns = np.where(is_free, 0, links.length_ns)
                links = replace(links, length_ns=length_ns, is_duration=np.where(is_free, 0, links.is_duration))
            arrivals.append(np.where(arrival == UNKNOWN, UNKNOWN, arrival + first[index]))
            ends = select(one.ends, np.full(len(one.ends), index not in late))
            keyed.append(replace(one, links=links, ends=replace(ends, step=rank.step_keys[ends.step])))
            common_ns.append(run.alignment.offset_for(rank.clock).common_ns(one.times.time_ns))
        joined = join_replays(keyed, common_ns, [])
        if joined is None or len(replays) == 1:
            return joined and joined[0]
        # For each matched collective and each rank, the row of its arrival in the joined replay.
        replay, place = joined
        columns = [
            take_or_unknown(take_or_unknown(place, arrival), run.matches.rows[:, index])
            for index, arrival in enumerate(arrivals)
        ]
        return _let_ranks_meet(replay, np.stack(columns, axis=1), late)

    def _steps(self, replay: Replay) -> list[tuple[int, int]]:
        """Return the keys of the steps that communicate and whose end is in ``replay``, and their starts.

        A start is when a step begins on the common clock.
        """
        # For each step: its earliest start on any rank, and whether any rank communicates in it.
        starts: dict[int, int] = {}
        communicating: set[int] = set()
        for rank, own in zip(self._run.ranks, self._ranks, strict=True):
            common = self._run.alignment.offset_for(rank.clock).common_ns(own.steps.start_ns)
            communicating |= set(rank.keys.tolist()) - {UNKNOWN}
            for key, start, length in zip(
                rank.step_keys.tolist(), common.tolist(), (own.steps.end_ns - own.steps.start_ns).tolist(), strict=True
            ):
                if length > 0:
                    starts[key] = min(start, starts.get(key, start))
        found = sorted((key, start) for key, start in starts.items() if key in communicating and key != UNKNOWN)
        ended = set(replay.ends.step.tolist())
        return [one for one in found if one[0] in ended]


def _spread(steps: Sequence[Step], surely: Collection[int]) -> list[Step]:
    """Return at most ``MOST_STEPS`` steps, evenly spread over those whose key is in ``surely``, and over the others."""
    kinds = [[step for step in steps if (step[0] in surely) == is_in] for is_in in (True, False)]
    chosen = list[Step]()
    for kind in filter(None, kinds):
        number = min(len(kind), max(1, round(MOST_STEPS * len(kind) / len(steps))))
        chosen += [kind[at] for at in np.unique(np.linspace(0, len(kind) - 1, number).round().astype(int)).tolist()]
    return sorted(chosen)


def _with_zeros(gains_ns: Sequence[int], share: float) -> list[int]:
    """Return the gains and so many zeros for each, evenly spread, for steps that gain nothing."""
    zeros = round(share * len(gains_ns))
    at = [(place + 0.5) / max(1, number) for number in (len(gains_ns), zeros) for place in range(number)]
    return [gain for _, gain in sorted(zip(at, [*gains_ns, *[0] * zeros], strict=True), key=lambda one: one[0])]


def _let_ranks_meet(replay: Replay, arrivals: Ints, late: Collection[int]) -> Replay | None:
    """Return the replay with links that let the ranks of a collective wait for each other.

    On each rank, a collective ends as long after the last arrival as it did, also if another rank arrives last in the
    replay. Of many ranks, only the ``_MOST_LAST`` that arrived last can be that rank.

    Args:
        replay: The joined replay, whose ranks do not wait for each other yet.
        arrivals: Row in its times of each rank's arrival, ``UNKNOWN`` where a rank takes no part; shape (collectives,
            ranks).
        late: Indices of ranks that no other rank waits for.

    Returns:
        The replay; ``None`` if links contradict the order of its times.
    """
    # ``own``: the link of each rank's own duration; ``ends``: the time at which its collective ends.
    time_ns, links = replay.times.time_ns, replay.links
    durations = np.flatnonzero(links.is_duration == 1)
    own = take_or_unknown(durations, take_or_unknown(positions(links.tail[durations], len(time_ns)), arrivals))
    arrivals = np.where(own == UNKNOWN, UNKNOWN, arrivals)
    ends = take_or_unknown(links.head, own)
    arrived_ns = take_or_unknown(time_ns, arrivals, NO_TIME)
    transfer_ns = take_or_unknown(time_ns, ends, 0) - arrived_ns.max(axis=1, initial=NO_TIME)[:, None]
    length_ns, takes_part = links.length_ns.copy(), own != UNKNOWN
    length_ns[own[takes_part]] = transfer_ns[takes_part]
    # A link from the arrival of each rank that may be the last to the end on each other rank. Others that may be the
    # last are left if several late ranks are not waited for.
    most = _MOST_LAST + max(0, len(late) - 1)
    last = np.argsort(-arrived_ns, axis=1, kind="stable")[:, :most]
    added = []
    for nth in range(last.shape[1]):
        by = last[:, nth]
        tail = arrivals[np.arange(len(arrivals)), by]
        for index in range(arrivals.shape[1]):
            rows = np.flatnonzero((tail != UNKNOWN) & takes_part[:, index] & (by != index))
            rows = rows if index in late else rows[~np.isin(by[rows], [*late])]
            nothing = np.zeros(len(rows), np.int64)
            added.append(
                Links(
                    tail=tail[rows],
                    head=ends[rows, index],
                    length_ns=transfer_ns[rows, index],
                    rank=nothing + index,
                    **dict.fromkeys(("is_duration", "compute_ns", "beside_ns"), nothing),
                )
            )
    links = concatenate(replace(links, length_ns=length_ns), *added)
    return replace(replay, links=links) if np.all(links.tail < links.head) else None


def simulate_gain(before: Replay, after: Replay, key: int, start_ns: int, share: float) -> int:
    """Return how much earlier a step ends in ``after`` than in ``before``, in nanoseconds.

    Args:
        before: The replay that gives the recorded times.
        after: The replay of the same times with other links.
        key: Key of the step.
        start_ns: Times before this one stay as recorded.
        share: The fraction of the compute beside communication that is contention.
    """
    last = select(after.ends, after.ends.step == key)
    ends = [_replay(one, start_ns, last.row, share) for one in (before, after)]
    was_ns, is_ns = (int((time_ns - last.before_ns).max()) for time_ns in ends)
    return was_ns - is_ns


def _replay(replay: Replay, start_ns: int, wanted: Ints, share: float) -> Ints:
    """Return some times of a replay, for which all times from ``start_ns`` on are replayed.

    When compute runs beside communication depends on the times, and these depend on how much slower it runs there. So
    the replay is repeated with the communication of the pass before, until times hardly move.

    Args:
        replay: The replay.
        start_ns: Times before this one stay as recorded.
        wanted: The rows of the times to return.
        share: The fraction of the compute beside communication that is contention.
    """
    # Select the links to these times, ordered by head, and number the times from ``first`` on.
    # Times are in the order of calls: those of a host that runs ahead are before those of earlier calls' work.
    # Times count from ``start_ns`` on: as a float, a time since 1970 is off by more than 100 ns.
    recorded, end = replay.times.time_ns - start_ns, int(wanted.max()) + 1
    low = int(np.argmax(recorded >= 0))
    links = select(replay.links, np.flatnonzero((replay.links.head >= low) & (replay.links.head < end)))
    links = select(links, np.argsort(links.head, kind="stable"))
    known = links.tail[links.tail != UNKNOWN]
    first = min(low, int(known.min(initial=low)))
    links = replace(
        links,
        head=links.head - first,
        tail=np.where(links.tail == UNKNOWN, UNKNOWN, links.tail - first),
        length_ns=links.length_ns - np.where(links.tail == UNKNOWN, start_ns, 0),
    )
    # ``rate``: the fraction of its speed that a link loses beside communication. ``work_ns``: its length without that.
    part = links.compute_ns / np.maximum(1, links.length_ns)
    rate = np.where((links.tail == UNKNOWN) | (links.length_ns <= 0), 0.0, np.minimum(_MOST_SLOWED, part * share))
    work_ns: Floats = (links.length_ns - np.where(rate > 0, share * links.beside_ns, 0.0)).astype(np.float64)
    time_ns = recorded[first:end].copy()
    for _ in range(_MOST_PASSES if share else 1):
        settled = _replay_once(time_ns, links, work_ns, rate, _communication(links, time_ns) if share else {})
        is_settled = np.abs(settled - time_ns).max(initial=0) <= _SETTLED_NS
        time_ns = settled
        if is_settled:
            break
    found: Ints = time_ns[wanted - first] + start_ns
    return found


def _communication(links: Links, time_ns: Ints) -> dict[int, Intervals]:
    """Return, for each rank, when its collectives run at these times."""
    rows = np.flatnonzero(links.is_duration == 1)
    found = {}
    for rank in distinct(links.rank):
        own = rows[links.rank[rows] == rank]
        start_ns = time_ns[links.tail[own]]
        found[rank] = union(start_ns, np.maximum(start_ns, time_ns[links.head[own]]))
    return found


def _replay_once(time_ns: Ints, links: Links, work_ns: Floats, rate: Floats, besides: Mapping[int, Intervals]) -> Ints:
    """Return the times with those at the heads of links computed anew, one after the other.

    Links are ordered by head. So the tail of a link is computed before its head, and the links of one head stand
    together: the latest of them counts.

    Args:
        time_ns: The times before; a time that is no head of a link stays.
        links: The links.
        work_ns: The length of each link without communication beside it.
        rate: The fraction of its speed that each link loses beside communication.
        besides: When communication runs on each rank.
    """
    found = time_ns.tolist()
    edges = {rank: (beside.start_ns.tolist(), beside.end_ns.tolist()) for rank, beside in besides.items()}
    columns = (links.tail, links.head, work_ns, rate, links.rank)
    last, latest = UNKNOWN, 0  # the head of the link before, and the latest time that its links gave
    for tail, head, work, slowed, rank in zip(*(column.tolist() for column in columns), strict=True):
        since = found[tail] if tail != UNKNOWN else 0
        until = since + round(work)
        if slowed and rank in edges:
            until = _advance(since, work, slowed, *edges[rank])
        latest = until if head != last else max(latest, until)
        last, found[head] = head, latest
    return np.array(found, np.int64)


def _advance(at_ns: int, work_ns: float, slowed: float, starts_ns: list[int], ends_ns: list[int]) -> int:
    """Return when work is done that loses a fraction of its speed beside communication.

    Args:
        at_ns: When it begins.
        work_ns: How long it takes without communication.
        slowed: The fraction of its speed that it loses beside communication.
        starts_ns: When the intervals of communication begin, in order.
        ends_ns: When they end.
    """
    at, left, row = float(at_ns), work_ns, bisect_right(ends_ns, at_ns)
    while left > 0 and row < len(ends_ns):
        alone = min(left, max(0.0, starts_ns[row] - at))
        at, left = at + alone, left - alone
        beside = min(left / (1 - slowed), max(0.0, ends_ns[row] - at)) if left > 0 else 0.0
        at, left = at + beside, left - beside * (1 - slowed)
        row += 1
    return round(at + max(0.0, left))
