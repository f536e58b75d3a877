"""The critical path of each step over all ranks, and the parts of it.

The path starts at the end of the step on the rank that ends last, and follows backwards what delayed each operation;
see :mod:`~ddp_prof.analyze.critical.chains`. At a collective that several ranks have in common, it continues on the
rank that arrived last, since no rank could go on before. If the clocks cannot tell that rank, the path stays on its
rank, and the wait for peers is a part of its own. With the trace of a single rank, that wait is part of transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.timing import collective_rows
from ddp_prof.analyze.core.attribution import last_by_step
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.critical.chains import PARTS as CHAIN_PARTS
from ddp_prof.analyze.critical.chains import Chains, find_work, follow_chains
from ddp_prof.analyze.critical.replay import Replay, find_replay, join_replays, measure_gains
from ddp_prof.analyze.quality import hides_work, why_no_steps, why_unknown, why_unknown_work
from ddp_prof.analyze.result_bases import DataFrame, FrameResult, make_frame_from_rows
from ddp_prof.table import UNKNOWN, Ints, distinct_rows, empty, positions, take_or_unknown

PARTS = ("compute", "transfer", "peer_wait", "queue", "launch", "host", "copies")

NO_RANKS = "the trace holds no rank"
NO_WORK = "no step has any work"
CALLS_OUT_OF_ORDER = "the numbers of calls contradict the order in which the work that they launched could begin"
NO_COMMON_CLOCK = "the clocks of the ranks cannot be compared"
CLOCKS_CONTRADICT = "by the clocks of the ranks some work began before what it waited for had ended"
NO_HOST_PATH = "collectives ran on the host, as gloo's do, and what they waited for is not recorded"


@dataclass(frozen=True)
class RankChains:
    """The chains of one rank.

    Attributes:
        of_timing: Row in ``chains`` of each of the rank's collectives, in the order of its timings.
        window_start_ns: Start of each step's window.
        end_ns: End of each step's last operation that was launched by threads that train.
        replay: What is needed to replay the rank; ``None`` if its times are not in the order of their calls.
        reason: Why there are no chains; ``None`` if there are.
    """

    process: int
    device: int | None
    chains: Chains
    of_timing: Ints
    window_start_ns: Ints
    end_ns: Ints
    replay: Replay | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class PathCollective:
    """A collective on the path: the index of its rank, and its position in the step.

    ``gain_ns`` is how much earlier the step would end if it took no time on any rank; ``None`` if not known.
    Unless ``is_matched``, no other rank's part in it is known: ``gain_ns`` then counts waiting for peers, too.
    """

    rank: int
    index: int
    on_path_ns: int
    gain_ns: int | None
    is_matched: bool = True


@dataclass(frozen=True, slots=True)
class StepPath:
    """The critical path of one step.

    Attributes:
        step: The step's own number, ``None`` if it has none.
        step_key: See ``Steps.keys``.
        rank: The rank on which the step ended last.
        window_ns: Length of that rank's window.
        parts_ns: The parts of the path, by :data:`PARTS`; they sum to ``window_ns``.
        changes: How often the path changes to another rank.
        collectives: The collectives on the path, from the last to the first.
    """

    step: int | None
    step_key: int | None
    rank: str
    window_ns: int
    parts_ns: dict[str, int]
    changes: int
    collectives: tuple[PathCollective, ...]


@dataclass(frozen=True, slots=True)
class RunCritical(FrameResult):
    """The critical paths of a run.

    Attributes:
        steps: One path per step. A collective that is on no path has a gain of 0.
        reason: Why there are no paths; ``None`` if there are.
        gain_reason: Why gains are not known; ``None`` if they are.
    """

    steps: tuple[StepPath, ...]
    reason: str | None
    gain_reason: str | None = None

    @property
    def median(self) -> StepPath | None:
        """The path with the median length; its step may differ from the one with the median exposed time."""
        by_length = sorted(self.steps, key=lambda path: path.window_ns)
        return by_length[len(by_length) // 2] if by_length else None

    def to_frame(self) -> DataFrame:
        """One row per step; times in nanoseconds."""
        columns = ("step", "rank", "window_ns", *(f"{part}_ns" for part in PARTS), "changes")
        rows = [
            {"step": path.step, "rank": path.rank, "window_ns": path.window_ns, "changes": path.changes}
            | {f"{part}_ns": ns for part, ns in path.parts_ns.items()}
            for path in self.steps
        ]
        return make_frame_from_rows(columns, rows)


def measure_chains(rank: RankEvents) -> RankChains:
    coverage = rank.blocking.coverage
    on_host = rank.device is None or coverage.source == "host"
    reason = why_unknown_work(rank) if on_host or hides_work(rank) else coverage.reason
    if on_host:
        reason = reason or why_unknown(rank) or NO_HOST_PATH
    if reason:
        nothing = np.empty(0, np.int64)
        return RankChains(rank.process, rank.device, empty(Chains), nothing, nothing, nothing, None, reason)
    trace, events, window = rank.trace, rank.events, rank.breakdown
    step = np.full(len(trace.activities), UNKNOWN, np.int64)
    on_device = events.activity != UNKNOWN
    step[events.activity[on_device]] = events.step[on_device]
    # A step does not have to wait for what other threads launch, such as data loaders.
    trains = on_device & (events.step != UNKNOWN)
    if np.any(trains & (events.launcher == rank.main_thread)):
        trains &= np.isin(events.launcher, [rank.main_thread, *rank.gradient_threads])
    ends_ns = last_by_step(events.end_ns, np.where(trains, events.step, UNKNOWN), len(rank.steps))
    step_of_training = np.full(len(trace.activities), UNKNOWN, np.int64)
    step_of_training[events.activity[trains]] = events.step[trains]
    trains[trains] = events.end_ns[trains] == ends_ns[events.step[trains]]
    last = np.full(len(rank.steps), UNKNOWN, np.int64)
    last[events.step[trains]] = events.activity[trains]
    ends_ns = np.where(last == UNKNOWN, window.start_ns, ends_ns)
    work = find_work(rank)
    of_step = step_of_training[work.activity]
    rows = np.flatnonzero(of_step != UNKNOWN)[::-1]  # work is stream by stream in the order of launch
    lasts = rows[distinct_rows(of_step[rows], rank.dependencies().stream[work.activity[rows]])[0]]
    step_of_last = np.full(len(work), UNKNOWN, np.int64)
    step_of_last[lasts] = of_step[lasts]
    chains = follow_chains(work, step, window.start_ns, ends_ns, last)
    row_of = positions(chains.activity, len(trace.activities))
    of_timing = take_or_unknown(row_of, events.activity[collective_rows(rank)])
    replay = find_replay(rank, work, step_of_last)
    return RankChains(rank.process, rank.device, chains, of_timing, window.start_ns, ends_ns, replay, None)


def measure_critical_paths(run: RunAnalysis, chains: Iterable[tuple[Path, RankChains]]) -> RunCritical:
    """The critical path of each step of a run; ``chains`` are pairs of a file and the chains of a rank in it."""
    by_rank = {(file, one.process, one.device): one for file, one in chains}
    ranks = [by_rank[rank.clock, rank.process, rank.device] for rank in run.ranks]
    reason = next((one.reason for one in ranks if one.reason), None if ranks else NO_RANKS)
    if reason:
        return RunCritical((), reason)
    gains = _Gains(run, ranks)
    walker = _Walker(run, ranks, gains)
    last: dict[int, tuple[int, int, int]] = {}
    for index, (rank, own) in enumerate(zip(run.ranks, ranks, strict=True)):
        ends = run.alignment.offset_for(rank.clock).common_ns(own.end_ns)
        for step, (key, end) in enumerate(zip(rank.step_keys.tolist(), ends.tolist(), strict=True)):
            if key != UNKNOWN and own.end_ns[step] > own.window_start_ns[step]:
                last[key] = max(last.get(key, (end, index, step)), (end, index, step))
    paths = tuple(walker.walk(index, step) for _, (_, index, step) in sorted(last.items()))
    reason = None if paths else why_no_steps((rank.reason for rank in run.ranks), NO_WORK)
    return RunCritical(paths, reason, gains.reason)


class _Walker:
    """Follows chains from collective to collective, over all ranks of a run."""

    def __init__(self, run: RunAnalysis, ranks: Sequence[RankChains], gains: _Gains) -> None:
        self.run, self.ranks, self.gains = run, ranks, gains
        self.can_change = run.alignment.residual_p95_ns is not None
        self.timing_of = [positions(chains.of_timing, len(chains.chains)) for chains in ranks]
        self.match_of = [
            positions(run.matches.rows[:, index], len(rank.timings)) for index, rank in enumerate(run.ranks)
        ]

    def walk(self, index: int, step: int) -> StepPath:
        """Follow the path backwards from the end of a rank's step."""
        first, own = self.run.ranks[index], self.ranks[index]
        window_ns = left = int(own.end_ns[step] - own.window_start_ns[step])
        row = int(np.flatnonzero((own.chains.activity == UNKNOWN) & (own.chains.step == step))[0])
        parts = dict.fromkeys(PARTS, 0)
        on_path: list[tuple[int, int, int]] = []  # rank, timing, how long
        changes = 0
        seen = set()  # with wrong clocks, the path could go back and forth between ranks
        while (index, row) not in seen:
            seen.add((index, row))
            chains = self.ranks[index].chains
            left -= _add_parts(parts, {part: int(getattr(chains, f"{part}_ns")[row]) for part in CHAIN_PARTS}, left)
            before = int(chains.before[row])
            if not left or before == UNKNOWN:
                break
            arrived_ns = int(chains.from_ns[row])
            timing = int(self.timing_of[index][before])
            if timing == UNKNOWN:  # in a warm-up step, for example: not measured
                break
            late, begins_ns = self._last_to_arrive(index, timing)
            length = max(0, arrived_ns - begins_ns)
            wait_ns = 0 if self.can_change else max(0, int(self.run.waits_ns[index][timing]))
            used = _add_parts(parts, {"transfer": max(0, length - wait_ns), "peer_wait": min(wait_ns, length)}, left)
            left -= used
            on_path.append((index, timing, used))
            row = before
            if late != index:
                changes += 1
                row = int(self.ranks[late].of_timing[self.run.matches.rows[self.match_of[index][timing], late]])
                index = late
        parts["host"] += left
        key = int(first.step_keys[step])
        gains = self.gains.for_collectives(key, [(rank, timing) for rank, timing, _ in on_path])
        return StepPath(
            step=None if (number := int(first.step_numbers[step])) == UNKNOWN else number,
            step_key=key if self.run.has_steps else None,
            rank=first.name,
            window_ns=window_ns,
            parts_ns=parts,
            changes=changes,
            collectives=tuple(
                PathCollective(
                    rank=rank,
                    index=int(self.run.ranks[rank].timings.index[timing]),
                    on_path_ns=used,
                    gain_ns=gain,
                    is_matched=bool(self.match_of[rank][timing] != UNKNOWN),
                )
                for (rank, timing, used), gain in zip(on_path, gains, strict=True)
            ),
        )

    def _last_to_arrive(self, index: int, timing: int) -> tuple[int, int]:
        """The rank that began a collective last, and when, on this rank's clock."""
        own_ns = int(self.run.ranks[index].timings.start_ns[timing])
        match = int(self.match_of[index][timing])
        if not self.can_change or match == UNKNOWN:
            return index, own_ns
        arrivals = {}
        for other, row in enumerate(self.run.matches.rows[match].tolist()):
            if row != UNKNOWN:
                rank = self.run.ranks[other]
                start = rank.timings.start_ns[[row]]
                arrivals[other] = int(self.run.alignment.offset_for(rank.clock).common_ns(start)[0])
        late = max(arrivals, key=arrivals.__getitem__)
        lag = arrivals[late] - arrivals[index]
        if lag <= (self.run.alignment.residual_p95_ns or 0):
            return index, own_ns
        return late, own_ns + lag


class _Gains:
    """Computes how much earlier steps would end without a collective; ``reason`` is why this is not known, if so."""

    def __init__(self, run: RunAnalysis, ranks: Sequence[RankChains]) -> None:
        replays = [one.replay for one in ranks if one.replay]
        self.reason = None if len(replays) == len(ranks) else CALLS_OUT_OF_ORDER
        if len(replays) > 1 and run.alignment.residual_p95_ns is None:
            self.reason = NO_COMMON_CLOCK
        if self.reason:
            return
        self._chains = ranks
        self._first = np.cumsum([0, *(len(replay.times) for replay in replays)]).tolist()
        self._arrivals = [replay.arrivals for replay in replays]
        keyed, common_ns = [], []
        for rank, replay in zip(run.ranks, replays, strict=True):
            times = replace(replay.times, step=take_or_unknown(rank.step_keys, replay.times.step))
            keyed.append(replace(replay, times=times))
            common_ns.append(run.alignment.offset_for(rank.clock).common_ns(times.time_ns))
        matches = [
            [self._arrival(index, timing) for index, timing in enumerate(rows) if timing != UNKNOWN]
            for rows in run.matches.rows.tolist()
        ]
        joined = join_replays(keyed, common_ns, matches)
        if joined is None:
            self.reason = CLOCKS_CONTRADICT
        else:
            self._replay, self._place = joined

    def _arrival(self, index: int, timing: int) -> int:
        """The row of a collective's arrival in the joined replay."""
        return int(self._first[index] + self._arrivals[index][self._chains[index].of_timing[timing]])

    def for_collectives(self, key: int, collectives: Sequence[tuple[int, int]]) -> Sequence[int | None]:
        """How much earlier a step would end without each collective (index of its rank, row in its timings)."""
        if self.reason or not collectives:
            return [None] * len(collectives)
        arrivals = self._place[[self._arrival(*one) for one in collectives]]
        gains: list[int | None] = measure_gains(self._replay, arrivals, key).tolist()
        return gains


def _add_parts(parts: dict[str, int], more: dict[str, int], most: int) -> int:
    """Add parts up to a total of ``most``, cutting the last ones; return the sum that was added."""
    left = most
    for part, length in more.items():
        taken = min(length, left)
        parts[part] += taken
        left -= taken
    return most - left
