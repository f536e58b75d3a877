"""The critical path of each step over all ranks, and its division into parts.

The path starts at the end of the step, on the rank that ends last. From there it is followed backwards. Each operation
was delayed by what came last: the end of the operation before it on its stream, the end of an operation that its stream
waits for, or its launch. Before a launch, the path stays on the host, back to the last time when the launching thread,
or one that trains, waited for the device::

    host        L......S...........L              L: launches a kernel, S: waits for the device
    stream 7    .kkkk..............kkk            k: kernels
    stream 20   .....CCCCCCCCCCCC                 C: a collective
    path        lkkkkCCCCCCCCCCCChhlkkk           k, C: as above, l: from launch to start, h: host

At a collective that several ranks take part in, the path continues on the rank that arrived last, since no rank could
go on before. If the clocks cannot tell which rank that was, the path stays on its rank, and the wait for the other
ranks becomes the part ``peer_wait``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.core.attribution import last_by_step
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.recording import LOST_CALLS
from ddp_prof.analyze.core.work import BACK_TO_BACK_NS, Work
from ddp_prof.analyze.critical.hardware_queue import find_held_ns
from ddp_prof.analyze.critical.replay import (
    NOTHING,
    Ends,
    Recorded,
    Replay,
    Without,
    find_replay,
    join_replays,
    measure_gains,
    record,
)
from ddp_prof.analyze.result_bases import DataFrame, FrameResult, make_frame_from_rows
from ddp_prof.analyze.why_unknown import NOT_TIMED, hides_work, why_no_steps, why_unknown, why_unknown_work
from ddp_prof.columns import ALWAYS, USUALLY, WITH_ROOM, ResultColumn, column, frame_names, frame_row
from ddp_prof.table import (
    NO_TIME,
    UNKNOWN,
    Ints,
    Table,
    concatenate,
    distinct_rows,
    empty,
    is_among,
    is_in,
    positions,
    rows_of,
    take_or_unknown,
)
from ddp_prof.trace import Category

COPIES, HOST_WAITS, COMMON_QUEUE = "copies", "host waits", "common queue"
"""What can be left out when a step is replayed; see :attr:`RankWork.left_out`."""
WITH_GAPS = ", gaps stay"
"""Appended to one of these names: the idle time before what is left out stays; see ``Without.leaves_gaps``."""

_MEANINGS = {
    "compute": ("compute on it", ALWAYS),
    "transfer": ("collectives on it", ALWAYS),
    "peer_wait": ("waiting for peers on it", USUALLY),
    "queue": ("gaps between an operation and the one after which it could begin", USUALLY),
    "launch": ("from the launch call to the start, of work that waited for nothing else", USUALLY),
    "host": ("the host, before it launched work that waited for nothing else", ALWAYS),
    "copies": ("memory copies on it", USUALLY),
}
PARTS = tuple(_MEANINGS)
"""The parts of a critical path."""

_PARTS = {
    category.value: {Category.COMMUNICATION: "transfer", Category.MEMORY: "copies"}.get(category, "compute")
    for category in Category
}
"""For the category of an operation, the part of a path to which its duration belongs."""

NO_RANKS = "the trace holds no rank"
NO_WORK = "no step has any work"
CALLS_OUT_OF_ORDER = "the numbers of calls contradict the order in which the work that they launched could begin"
NOT_ASKED = "no gain was asked for"
NO_COMMON_CLOCK = "the clocks of the ranks cannot be compared"
CLOCKS_CONTRADICT = "by the clocks of the ranks some work began before what it waited for had ended"
NO_HOST_PATH = "collectives ran on the host, as gloo's do, and what they waited for is not recorded"


@dataclass(frozen=True)
class StepEnds(Table):
    """Where the path of each step of a rank begins and ends; one row per step, times in nanoseconds.

    Attributes:
        last: Row in :class:`.work.Work` of the operation with which the step ends; ``UNKNOWN`` if there is none.
        start_ns: When the step begins on the device.
        end_ns: When the step ends: at the end of ``last`` or, if ``last`` is the first work of the next step, at the
            start of ``last``.
        waited: Row in :class:`.work.Work` of the operation that the host waited for last before the end of the step's
            range; ``UNKNOWN`` if it waited for none.
        host_end_ns: End of the step's range on the host; ``NO_TIME`` where the range does not measure the step.
        host_ns: Length of that range.
        window_ns: From the start of the first device work of the step to the end of the last.
    """

    last: Ints
    start_ns: Ints
    end_ns: Ints
    waited: Ints
    host_end_ns: Ints
    host_ns: Ints
    window_ns: Ints


@dataclass(frozen=True)
class RankWork:
    """The operations of one rank, through which paths are followed, and what is needed to replay them.

    Attributes:
        process, device: Which rank it is.
        work: The operations, and what delayed each of them.
        of_timing: Row in ``work`` of each of the rank's collectives, in the order of its timings.
        steps: Where the path of each step begins and ends.
        recorded: What replays of the rank are made of, when one is asked for; ``None`` where paths cannot be followed.
        reason: Why paths cannot be followed; ``None`` if they can.
    """

    process: int
    device: int | None
    work: Work
    of_timing: Ints
    steps: StepEnds
    recorded: Recorded | None
    reason: str | None = None

    @cached_property
    def replay(self) -> Replay | None:
        """Times and links from which the rank is replayed; ``None`` if times contradict the order of the calls."""
        return find_replay(self.recorded) if self.recorded else None

    @cached_property
    def left_out(self) -> Mapping[str, Without]:
        """What the rank could do without, which findings of the doctor are about.

        These are :data:`COPIES` out of buckets on the stream of compute (also :data:`WITH_GAPS`), :data:`HOST_WAITS` in
        backward, and the :data:`COMMON_QUEUE` of all streams. A name is a key only if the rank has that.
        """
        found, recorded = dict[str, Without](), self.recorded
        if recorded is None:
            return found
        if len(recorded.copies):
            found[COPIES] = Without(rows=recorded.copies)
            found[f"{COPIES}{WITH_GAPS}"] = Without(rows=recorded.copies, leaves_gaps=True)
        if len(recorded.waits_in_backward):
            found[HOST_WAITS] = Without(syncs=recorded.waits_in_backward)
        held_ns = find_held_ns(self.work, recorded.stream, recorded.place)
        if np.any(held_ns[self.work.is_collective] > BACK_TO_BACK_NS):
            found[COMMON_QUEUE] = Without(held_ns=held_ns)
        return found

    def replay_without(self, what: str, slowed: Mapping[str, float] | None) -> Replay | None:
        """Return the replay without ``what``: a key of :attr:`left_out`, else nothing is left out.

        ``slowed``: see :func:`.find_replay`.
        """
        return find_replay(self.recorded, self.left_out.get(what, NOTHING), slowed) if self.recorded else None


@dataclass(frozen=True, slots=True)
class PathCollective:
    """A collective on the path.

    Attributes:
        rank: Index of its rank in the run.
        index: Its position among the collectives of the step.
        on_path_ns: How much of the path it takes.
        gain_ns: How much earlier the step would end if the collective took no time on any rank; ``None`` if not known,
            as of several ranks if it is not known which collective it is on the others.
        is_matched: Whether the same collective is known on other ranks. If not, ``gain_ns`` includes the time in which
            it waited for these.
    """

    rank: int
    index: int
    on_path_ns: int
    gain_ns: int | None
    is_matched: bool


def _get_part(part: str, path: StepPath) -> int | None:
    """Return a part of a path; ``None`` for the wait for peers where collectives on it are not found on other ranks."""
    if part == "peer_wait" and not path.parts_ns[part] and not all(one.is_matched for one in path.collectives):
        return None  # it is a part of transfer
    return path.parts_ns[part]


_PART_COLUMNS = tuple(
    ResultColumn(
        f"{part}_ns",
        meaning,
        key=f"path_{part}_ms",
        get=partial(_get_part, part),
        null="collectives on it are found on no other rank: transfer includes it" if part == "peer_wait" else "",
        stays=stays,
        adds_up=True,
    )
    for part, (meaning, stays) in _MEANINGS.items()
)


@dataclass(frozen=True, slots=True)
class StepPath:
    """The critical path of one step. The order of the columns is that of tables, documents and frames."""

    step: int | None = column("number of the step", null="it has none", stays=ALWAYS, describes=True)
    step_key: int | None = column("number of the step, see ``Steps.keys``", null="the trace marks no steps")
    rank: str = column("the rank on which the step ended last", key="ends_on", stays=WITH_ROOM)
    window_ns: int = column("from the first to the last work of the step on this rank")
    path_ns: int = column(
        "length of the path: that of this rank's window or, where the host runs ahead, to its next step",
        key="path_ms",
        stays=ALWAYS,
        adds_up=True,
    )
    parts_ns: dict[str, int] = column("the parts of the path by name, which sum to its length", parts=_PART_COLUMNS)
    collectives: tuple[PathCollective, ...] = column(
        "the collectives on the path, from the last to the first",
        parts=(
            ResultColumn("on_path", "collectives on the path", get=lambda path: len(path.collectives), stays=WITH_ROOM),
        ),
    )
    changes: int = column("how often the path changes to another rank", key="rank_changes", stays=WITH_ROOM)
    host_delay_ns: int = column(
        "how long the host, with its launches, delayed the end of the step: on the path that goes back from the end of "
        "the step's range on the host or, where the host runs ahead or no steps are marked, on this one"
    )
    host_ns: int | None = column("length of the step's range on the host", null="the trace marks no steps")


@dataclass(frozen=True, slots=True)
class RunCritical(FrameResult):
    """The critical paths of a run.

    Attributes:
        steps: One path per step. A step would end no earlier without a collective that is not on its path.
        reason: Why there are no paths; ``None`` if there are.
        gain_reason: Why gains are not known; ``None`` if they are.
    """

    steps: tuple[StepPath, ...]
    reason: str | None
    gain_reason: str | None = None

    @property
    def median(self) -> StepPath | None:
        """The path of median length; its step need not be the step with the median exposed time."""
        by_length = sorted(self.steps, key=lambda path: path.path_ns)
        return by_length[len(by_length) // 2] if by_length else None

    def to_frame(self) -> DataFrame:
        """Return one row per step; times in nanoseconds. ``host_ns`` is the host's part of the path."""
        rows = [frame_row(path) | {"host_ns": path.parts_ns["host"]} for path in self.steps]  # not the step's range
        return make_frame_from_rows(frame_names(StepPath), rows)


def find_rank_work(rank: RankEvents) -> RankWork:
    """Return the operations of a rank with what delayed them, or the reason why there are no paths."""
    if reason := _why_no_paths(rank):
        nothing = empty(Work), np.empty(0, np.int64), empty(StepEnds), None
        return RankWork(rank.process, rank.device, *nothing, reason)
    row_of = positions(rank.work.activity, len(rank.trace.activities))
    steps, ends = _find_ends(rank, row_of)
    return RankWork(
        process=rank.process,
        device=rank.device,
        work=rank.work,
        of_timing=take_or_unknown(row_of, rank.events.activity[rank.operation_rows]),
        steps=steps,
        recorded=record(rank, ends),
    )


def _why_no_paths(rank: RankEvents) -> str | None:
    """Return why the recorded events do not tell what the operations of a rank waited for; ``None`` if they do."""
    coverage, unknown = rank.blocking.coverage, why_unknown(rank)
    if rank.recording.lacks_calls:
        return LOST_CALLS
    if unknown in NOT_TIMED:
        return unknown
    on_host = rank.device is None or coverage.source == "host"
    reason = why_unknown_work(rank) if on_host or hides_work(rank) else coverage.reason
    return reason or (unknown or NO_HOST_PATH if on_host else None)


def _find_ends(rank: RankEvents, row_of: Ints) -> tuple[StepEnds, Ends]:
    """Return where the path of each step begins and ends, and with which operations a replayed step ends.

    ``row_of`` holds the row in the rank's work of each activity of the trace.
    """
    # The events in steps, and the row of each in ``work``. ``next_ns``: when the next step begins on the device.
    events, work, steps = rank.events, rank.work, len(rank.steps)
    row = take_or_unknown(row_of, events.activity)
    in_step = rows_of((row != UNKNOWN) & (events.step != UNKNOWN))
    row, step_of, launcher = row[in_step], events.step[in_step], events.launcher[in_step]
    began_ns, ended_ns = events.start_ns[in_step], events.end_ns[in_step]
    start_ns, begins_ns = rank.breakdown.start_ns, rank.device_steps[0]
    next_ns = np.where(rank.is_followed, np.append(begins_ns[1:], NO_TIME), NO_TIME)

    # A step does not have to wait for what other threads launch, such as data loaders, nor for what still runs when the
    # next step begins, such as a receive that was posted ahead.
    trains = np.ones(len(row), np.bool_)
    if np.any(launcher == rank.main_thread):
        trains = is_in(launcher, rank.training_threads)
    has_ended = trains & (ended_ns <= next_ns[step_of])
    trains &= has_ended | ~is_among(step_of, step_of[has_ended])  # all of them where none ended before that
    end_ns = np.maximum(start_ns, last_by_step(ended_ns[trains], step_of[trains], steps))
    is_last = trains & (ended_ns == end_ns[step_of])
    last = np.full(steps, UNKNOWN, np.int64)
    last[step_of[is_last]] = row[is_last]

    # Where the host runs ahead, a step lasts from its first work to that of the next one.
    is_first = began_ns == begins_ns[step_of]
    following = np.full(steps + 1, UNKNOWN, np.int64)
    following[step_of[is_first]] = row[is_first]
    following = following[1:]  # now for each step the first work of the next one
    to_next = rank.runs_ahead & (begins_ns != NO_TIME) & (next_ns > begins_ns) & (following != UNKNOWN)
    start_ns = np.where(rank.runs_ahead & (begins_ns != NO_TIME), begins_ns, start_ns)

    # What a replayed step ends with: the last operation on each of its streams, or the first work of the next step.
    step = np.full(len(work), UNKNOWN, np.int64)
    step[row[trains]] = step_of[trains]
    rows = np.flatnonzero(~is_in(step, [UNKNOWN, *np.flatnonzero(to_next)]))[::-1]
    # Work is stream by stream in the order of launch, and ``rows`` is reversed, so the first row of each combination of
    # step and stream is its last operation.
    rows = rows[distinct_rows(step[rows], rank.dependencies().stream[work.activity[rows]])[0]]
    ends = concatenate(
        Ends(step[rows], rows, np.zeros_like(rows)),
        Ends(np.flatnonzero(to_next), following[to_next], (work.end_ns - work.start_ns)[following[to_next]]),
    )
    # The last call before the end of each step's range in which a thread that trains waited for the device.
    main, any_place = np.full(steps, rank.main_thread), np.full(steps, np.iinfo(np.int64).max)
    calls = rank.host_calls
    waits = calls.last_before(main, rank.training_threads, rank.steps.end_ns, any_place, calls.waited)
    found = StepEnds(
        last=np.where(to_next, following, last),
        start_ns=start_ns,
        end_ns=np.where(to_next, next_ns, end_ns),
        waited=take_or_unknown(calls.latest, waits),
        host_end_ns=np.where(rank.has_steps and not rank.runs_ahead, rank.steps.end_ns, NO_TIME),
        host_ns=rank.steps.end_ns - rank.steps.start_ns,
        window_ns=rank.breakdown.window_ns,
    )
    return found, ends


def in_order_of_ranks(run: RunAnalysis, work: Iterable[tuple[Path, RankWork]]) -> list[RankWork]:
    """Return the work of the ranks of a run in their order, from pairs of a file and the work of one rank in it."""
    by_rank = {(file, one.process, one.device): one for file, one in work}
    return [by_rank[rank.clock, rank.process, rank.device] for rank in run.ranks]


def measure_critical_paths(run: RunAnalysis, ranks: Sequence[RankWork], *, with_gains: bool = True) -> RunCritical:
    """Return the critical path of each step of a run.

    Args:
        run: The run.
        ranks: The work of each of its ranks, in their order.
        with_gains: Whether to replay the ranks for the gains of collectives; else these are not known.
    """
    reason = next((one.reason for one in ranks if one.reason), None if ranks else NO_RANKS)
    if reason:
        return RunCritical((), reason)
    gains = _Gains(run, ranks if with_gains else ())
    walker = _Walker(run, ranks, gains)
    # For the key of each step, the latest end on the common clock, with index of the rank and row of the step there.
    last: dict[int, tuple[int, int, int]] = {}
    for index, (rank, own) in enumerate(zip(run.ranks, ranks, strict=True)):
        ends = run.alignment.offset_for(rank.clock).common_ns(own.steps.end_ns)
        for step, (key, end) in enumerate(zip(rank.step_keys.tolist(), ends.tolist(), strict=True)):
            if key != UNKNOWN and own.steps.end_ns[step] > own.steps.start_ns[step]:
                last[key] = max(last.get(key, (end, index, step)), (end, index, step))
    paths = tuple(walker.walk(index, step) for _, (_, index, step) in sorted(last.items()))
    reason = None if paths else why_no_steps((rank.reason for rank in run.ranks), NO_WORK)
    return RunCritical(paths, reason, gains.reason)


@dataclass(slots=True)
class _Path:
    """A path that is followed backwards.

    Attributes:
        now_ns: The time that is reached, on the clock of the rank where the path is.
        left_ns: What is left of its length.
        parts_ns: The length of each part so far.
        collectives: Those on it, from the last to the first: index of the rank, row of its timings, length on the path.
        changes: How often it changed to another rank.
    """

    now_ns: int
    left_ns: int
    parts_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    collectives: list[tuple[int, int, int]] = field(default_factory=list)
    changes: int = 0

    def go_back(self, until_ns: int, part: str) -> None:
        """Go back to a time; what lies between belongs to ``part``. Does nothing if ``now_ns`` is no later."""
        if self.now_ns > until_ns:
            self.take(min(self.now_ns - until_ns, self.left_ns), part)

    def take(self, length_ns: int, part: str) -> None:
        """Go back by a length, which belongs to ``part``."""
        self.parts_ns[part] += length_ns
        self.now_ns -= length_ns
        self.left_ns -= length_ns


class _Walker:
    """Follows paths from operation to operation, over all ranks of a run.

    Attributes:
        can_change: Whether clocks can be compared, so that a path can change to the rank that arrived last.
        is_alone: Whether no two ranks communicate, so that no collective can be found on another rank.
        columns: For each rank, columns of its work and of its :class:`Chains`, in the order in which they are unpacked.
        timing_of: For each rank, the row in its timings of each of its operations, if that is a collective.
        index_of: For each rank, the position of each of its collectives in its step.
        match_of: For each rank, the row in ``run.matches`` of each of its collectives; ``UNKNOWN`` without a match.
    """

    def __init__(self, run: RunAnalysis, ranks: Sequence[RankWork], gains: _Gains) -> None:
        self.run, self.ranks, self.gains = run, ranks, gains
        self.can_change = run.alignment.residual_p95_ns is not None
        self.is_alone = sum(len(rank.timings) > 0 for rank in run.ranks) < 2
        # ``data`` is a memoryview: reading single elements of it is faster than of an array.
        self.columns = []
        for work in (own.work for own in ranks):
            of_work = work.start_ns, work.end_ns, work.category, work.bound_by, work.launch_ns, work.after_sync
            chains = find_chains(work)
            of_chains = chains.first, chains.copies_ns, chains.gaps_ns
            self.columns.append([column.data for column in (*of_work, *of_chains)])
        self.timing_of = [positions(own.of_timing, len(own.work)) for own in ranks]
        self.index_of = [rank.timings.index for rank in run.ranks]
        self.match_of = [
            positions(run.matches.rows[:, index], len(rank.timings)) for index, rank in enumerate(run.ranks)
        ]

    def walk(self, index: int, step: int) -> StepPath:
        """Return the path of a step from its end on a rank.

        Args:
            index: Index of the rank in the run.
            step: Index of the step on this rank.
        """
        first, own = self.run.ranks[index], self.ranks[index].steps
        end_ns, path_ns = int(own.end_ns[step]), int(own.end_ns[step] - own.start_ns[step])
        path = self._follow(index, int(own.last[step]), end_ns, path_ns)
        # A second path, from the end of the range on the host; see ``StepPath.host_delay_ns``.
        to_host = path
        if (host_end_ns := int(own.host_end_ns[step])) != NO_TIME:
            to_host = self._follow(index, int(own.waited[step]), host_end_ns, int(own.host_ns[step]))
        key = int(first.step_keys[step])
        gains = self.gains.for_collectives(key, [(rank, timing) for rank, timing, _ in path.collectives])
        matched = [bool(self.match_of[rank][timing] != UNKNOWN) for rank, timing, _ in path.collectives]
        return StepPath(
            step=None if (number := int(first.step_numbers[step])) == UNKNOWN else number,
            step_key=key if self.run.has_steps else None,
            rank=first.name,
            path_ns=path_ns,
            parts_ns=path.parts_ns,
            changes=path.changes,
            collectives=tuple(
                PathCollective(
                    rank=rank,
                    index=int(self.index_of[rank][timing]),
                    on_path_ns=used,
                    gain_ns=gain if is_matched or self.is_alone else None,
                    is_matched=is_matched,
                )
                for (rank, timing, used), gain, is_matched in zip(path.collectives, gains, matched, strict=True)
            ),
            host_delay_ns=to_host.parts_ns["host"] + to_host.parts_ns["launch"],
            window_ns=int(own.window_ns[step]),
            host_ns=int(own.host_ns[step]) if first.marks_steps else None,
        )

    def _follow(self, index: int, at: int, end_ns: int, length_ns: int) -> _Path:
        """Follow a path backwards until it has a given length.

        Args:
            index: Index of the rank on which the path ends.
            at: Row in the rank's work of the operation with which the path ends; ``UNKNOWN`` if there is none.
            end_ns: The end of the path on this rank's clock; what is after the operation belongs to the host.
            length_ns: Length of the path.
        """
        path = _Path(end_ns, length_ns)
        seen = set()  # with wrong clocks, the path could go back and forth between ranks
        start, end, category, bound_by, launch, after_sync, first, copies_ns, gaps_ns = self.columns[index]
        if at != UNKNOWN:
            path.go_back(end[at], "host")
        while path.left_ns and at != UNKNOWN:
            # Go back through the operation ``at`` to its start; for a collective on the rank that arrived last.
            part = _PARTS[category[at]]
            if path.now_ns <= start[at]:
                pass  # it is the first work of the next step
            elif part != "transfer":
                path.go_back(start[at], part)
            elif (index, at) in seen:
                break
            else:
                seen.add((index, at))
                late, at = self._pass_collective(path, index, at)
                if late != index:
                    index = late
                    start, end, category, bound_by, launch, after_sync, first, copies_ns, gaps_ns = self.columns[index]
                path.now_ns = start[at]
            # Then at once through its chain, as far as the path goes: ``upto`` is where it leaves the chain.
            if path.now_ns == start[at] and first[at] < at:
                upto = bisect_left(start, path.now_ns - path.left_ns, first[at], at)
                path.take(gaps_ns[at] - gaps_ns[upto], "queue")
                path.take(copies_ns[at] - copies_ns[upto], "copies")
                at = upto
                path.go_back(start[at], "compute")  # the rest
            # Then to the end of what delayed it: an operation, or its launch and, before that, a wait of the host.
            before_it, gap = bound_by[at], "queue"
            if before_it == UNKNOWN:
                path.go_back(launch[at], "host" if launch[at] == NO_TIME else "launch")
                before_it, gap = after_sync[at], "host"
            if before_it != UNKNOWN:
                path.go_back(end[before_it], gap)
            at = before_it
        path.take(path.left_ns, "host")
        return path

    def _pass_collective(self, path: _Path, index: int, at: int) -> tuple[int, int]:
        """Go back through a collective to its start, on the rank that arrived last.

        Args:
            path: The path, which is within the collective.
            index: Index of the rank on which it is.
            at: Row of the collective in the rank's work.

        Returns:
            The index of the rank that arrived last, and the row of the collective in that rank's work.
        """
        timing, before_ns = int(self.timing_of[index][at]), path.left_ns
        late, begins_ns, wait_ns = self._last_to_arrive(index, timing, self.columns[index][0][at])
        path.go_back(begins_ns + wait_ns, "transfer")
        path.go_back(begins_ns, "peer_wait")
        if timing != UNKNOWN:  # else it is one of a warm-up step, for example: not measured
            path.collectives.append((index, timing, before_ns - path.left_ns))
        if late == index:
            return index, at
        path.changes += 1
        return late, int(self.ranks[late].of_timing[self.run.matches.rows[self.match_of[index][timing], late]])

    def _last_to_arrive(self, index: int, timing: int, own_ns: int) -> tuple[int, int, int]:
        """Find the rank that began a collective last.

        Args:
            index: Index of this rank.
            timing: Row of the collective in this rank's timings; ``UNKNOWN`` if it is not measured.
            own_ns: When this rank began the collective, on its own clock.

        Returns:
            The index of the rank that began last; when the path leaves the collective, on this rank's clock: the time
            at which that rank began; and how long after that time this rank still waited for peers, which is 0 where
            the clocks tell the last rank.
        """
        if timing == UNKNOWN:
            return index, own_ns, 0
        if not self.can_change:
            return index, own_ns, max(0, int(self.run.waits_ns[index][timing]))
        if (match := int(self.match_of[index][timing])) == UNKNOWN:
            return index, own_ns, 0
        arrivals = {}
        for other, row in enumerate(self.run.matches.rows[match].tolist()):
            if row != UNKNOWN:
                rank = self.run.ranks[other]
                start = rank.timings.start_ns[[row]]
                arrivals[other] = int(self.run.alignment.offset_for(rank.clock).common_ns(start)[0])
        late = max(arrivals, key=arrivals.__getitem__)
        lag = arrivals[late] - arrivals[index]
        if lag <= (self.run.alignment.residual_p95_ns or 0):  # less than the clocks can tell
            return index, own_ns, 0
        return late, own_ns + lag, 0


@dataclass(frozen=True)
class Chains(Table):
    """Operations that each could begin when the one before on their stream had ended; one row per row of ``Work``.

    A path passes a chain from its last operation to its first, so the lengths of its parts are differences of sums. A
    chain has no collective but perhaps its last operation, and its operations do not overlap.

    Attributes:
        first: The first operation of each operation's chain.
        copies_ns: How long the copies took of all operations before this one, in ns.
        gaps_ns: The length of all gaps up to the start of this operation between operations of a chain, in ns.
    """

    first: Ints
    copies_ns: Ints
    gaps_ns: Ints


def find_chains(work: Work) -> Chains:
    rows, length_ns = np.arange(len(work)), work.end_ns - work.start_ns
    follows = (work.bound_by == rows - 1) & (rows > 0)
    gap_ns = np.append(0, work.start_ns[1:] - work.end_ns[:-1])[: len(work)]
    follows[1:] &= (gap_ns[1:] >= 0) & (length_ns[:-1] >= 0) & ~work.is_collective[:-1]
    copies_ns = np.append(0, np.cumsum(np.where(work.category == Category.MEMORY, length_ns, 0)))[: len(work)]
    return Chains(np.maximum.accumulate(np.where(follows, 0, rows)), copies_ns, np.cumsum(np.where(follows, gap_ns, 0)))


class _Gains:
    """Computes how much earlier a step would end without one of its collectives.

    Attributes:
        reason: Why this is not known; ``None`` if it is.
    """

    def __init__(self, run: RunAnalysis, ranks: Sequence[RankWork]) -> None:
        replays = [one.replay for one in ranks if one.replay]
        self.reason = None if ranks else NOT_ASKED
        if len(replays) < len(ranks):
            self.reason = CALLS_OUT_OF_ORDER
        if ranks and run.alignment.residual_p95_ns is None:
            self.reason = NO_COMMON_CLOCK
        if self.reason:
            return
        # ``_first``: where the times of each rank begin when those of all ranks are concatenated. ``_arrivals``: for
        # each operation of a rank, the row of its arrival in the rank's times, if it is a collective.
        self._ranks = ranks
        self._first = np.cumsum([0, *(len(replay.times) for replay in replays)]).tolist()
        self._arrivals = [
            positions(replay.times.collective, len(own.work)) for own, replay in zip(ranks, replays, strict=True)
        ]
        keyed, common_ns = [], []
        for rank, replay in zip(run.ranks, replays, strict=True):
            keyed.append(replace(replay, ends=replace(replay.ends, step=rank.step_keys[replay.ends.step])))
            common_ns.append(run.alignment.offset_for(rank.clock).common_ns(replay.times.time_ns))
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
        """Return the row of a collective's arrival in the concatenated times of all ranks.

        ``index`` is that of its rank, ``timing`` its row in the rank's timings.
        """
        return int(self._first[index] + self._arrivals[index][self._ranks[index].of_timing[timing]])

    def for_collectives(self, key: int, collectives: Sequence[tuple[int, int]]) -> Sequence[int | None]:
        """Return how much earlier a step would end without each of some collectives, in nanoseconds; ``None``: unknown.

        Args:
            key: Key of the step.
            collectives: For each collective, the index of its rank and its row in the rank's timings.
        """
        if self.reason or not collectives:
            return [None] * len(collectives)
        arrivals = self._place[[self._arrival(*one) for one in collectives]]
        gains: list[int | None] = measure_gains(self._replay, arrivals, key).tolist()
        return gains
