"""Whether the host and the devices of a process share one clock.

Nothing begins before it is launched, a host that waits for work does not return before its end, and some of what
follows idle time of its device begins soon after its launch (if the device has a backlog all the time, a wait of the
host ends with its work). If the times contradict this beyond a few exceptions, the clocks of host and device disagree:
then no time between a call and an activity means anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddp_prof.columns import by_number
from ddp_prof.table import NO_TIME, UNKNOWN, Ints, distinct, is_in, parts_of, rows_of, take_or_unknown
from ddp_prof.trace import HOST_WAITS, SyncKind, Trace

HANDFUL = 3
"""Largest number of activities that may begin before their launch before the clocks count as disagreeing.

Also the number of waits above which :data:`LEAST_EARLY_SHARE` applies to waits that return early.
"""

LEAST_EARLY_SHARE = 0.1
"""Fraction of the host's waits that must return early for the clocks to disagree, if more than a handful do.

If only a handful or fewer return early, it is half of the waits.
"""

CLOCK_ERROR_NS = 50_000
"""A wait is early if it returns more than this before the end of the work that it waits for.

In sound captures, a wait may seem to return up to 8 us before that end.
"""

LATE_NS = 1_000_000
"""What follows idle time begins late if it does so more than this after its launch.

In sound captures, some of it begins within 40 us.
"""

IDLE_NS = 20_000
"""A device is idle before an activity if nothing ran on it for longer than this."""

MOST_STRETCHED = 100
"""If clocks disagree, and one runs more than this times as fast as the other, their units differ."""

MOST_APART = 0.02
"""If clocks disagree, and one runs by more than this fraction faster than the other, that is told."""

UNITS = "times of host and device are in different units in this capture, so no time of the device is known"

CLOCKS = "the clocks of host and device disagree in this capture, so no time between a launch and its work is known"


@dataclass(frozen=True)
class Clocks:
    """How the times of the host of a process and of its devices fit together.

    Attributes:
        launched: Number of activities whose launch is known.
        early: Number of these activities that begin before their launch.
        late: Number of these activities that follow idle time, if all of the process begin late; else 0.
        jumped: Number of those that begin late, and equally so, from some time on, if the device was idle before that
            and no later one begins soon; else 0. A device's clock that jumps looks so.
        jump_ns: The last launch before that time.
        stretch: How many times as far apart these activities begin as their launches; 1 if that is not known.
        waits: Number of waits of the host for known work.
        early_waits: Number of these waits that returned before this work had ended.
        prompt_waits: Number of these waits that began before this work had ended, and returned soon after that.
        rate: How many times as far apart the ends of this work are as those of the waits; 1 if that is not known.
    """

    launched: int
    early: int
    late: int
    jumped: int
    jump_ns: int
    stretch: float
    waits: int
    early_waits: int
    prompt_waits: int
    rate: float

    def disagree(self, *, loses_work: bool) -> bool:
        """Return whether the clocks disagree; work that was lost may have run before activities that begin late."""
        if self.early > HANDFUL:
            return True
        if self.jumps(loses_work=loses_work):
            return True
        # If the device's clock is late, no wait ends with its work.
        if self.late > HANDFUL and not loses_work and (self.early_waits or not self.prompt_waits):
            return True
        least = LEAST_EARLY_SHARE if self.early_waits > HANDFUL else 0.5
        return self.early_waits > 0 and self.early_waits >= least * self.waits

    def jumps(self, *, loses_work: bool) -> bool:
        """Return whether the device's clock jumps; work that was lost may have run in the idle time before."""
        return self.jumped > HANDFUL and not loses_work

    @property
    def are_stretched(self) -> bool:
        """Whether one clock runs so much faster than the other that their units differ, if they disagree."""
        return not 1 / MOST_STRETCHED <= self.stretch <= MOST_STRETCHED

    def describe_disagreement(self) -> str:
        """Return a note on clocks that disagree, and why they do."""
        if self.are_stretched:
            return f"{UNITS} (activities begin {self.stretch:.4g} times as far apart as their launches)"
        begin = by_number(self.early, "begins before its", "begin before their")
        wait = by_number(
            self.early_waits, "returns before the work that it waits", "return before the work that they wait"
        )
        found = [
            f"{count:,} of {of:,} {what}"
            for count, of, what in (
                (self.early, self.launched, f"activities {begin} launch"),
                (self.early_waits, self.waits, f"waits of the host {wait} for ends"),
            )
            if count
        ]
        if self.late > HANDFUL:
            found.append(
                f"all {self.late:,} activities before which the device was idle begin more than "
                f"{LATE_NS // 1_000_000} ms after their launch"
            )
        if self.jumped > HANDFUL:
            found.append(
                f"from some time on, {self.jumped:,} activities before which the device was idle begin more than "
                f"{LATE_NS // 1_000_000} ms after their launch, and none sooner"
            )
        if abs(self.rate - 1) > MOST_APART:
            found.append(
                f"between waits of the host, {self.rate:.3g} times as much time passes on the device: durations of the "
                "one or the other are wrong"
            )
        return f"{CLOCKS} ({', '.join(found)})"


def compare_clocks(trace: Trace, process: int) -> Clocks:
    """Return how the times of the host of a process and of its devices fit together."""
    launched = _find_launched(trace, process)
    begins_ns, ends_ns, ended_ns = _find_waits(trace, process)
    is_prompt = (ended_ns > begins_ns) & (ended_ns <= ends_ns) & (ends_ns <= ended_ns + CLOCK_ERROR_NS)
    jumped, jump_ns = _count_behind_jump(trace, process, launched)
    if np.any(ends_ns[is_prompt] > jump_ns):  # if the device's clock is late, no wait ends with its work
        jumped = 0
    return Clocks(
        launched=launched.number,
        early=launched.early,
        late=_count_late_starts(trace, process) if launched.number and launched.soon_ns == NO_TIME else 0,
        jumped=jumped,
        jump_ns=jump_ns,
        stretch=_measure_stretch(trace, process),
        waits=len(ended_ns),
        early_waits=int((ended_ns > ends_ns + CLOCK_ERROR_NS).sum()),
        prompt_waits=int(is_prompt.sum()),
        rate=_measure_rate(ends_ns, ended_ns),
    )


class _Launched(NamedTuple):
    """What a process launched.

    Attributes:
        number: Number of activities whose launch is known.
        early: Number of these that begin before their launch.
        last_ns: The last launch.
        soon_ns: The last launch of an activity that begins soon; ``NO_TIME`` if all begin late.
        devices: The devices of these activities.
    """

    number: int
    early: int
    last_ns: int
    soon_ns: int
    devices: frozenset[int]


def _find_launched(trace: Trace, process: int) -> _Launched:
    """Return what a process launched, as far as that is known."""
    number, early, last_ns, soon_ns, devices = 0, 0, NO_TIME, NO_TIME, set[int]()
    for rows, launch_ns in _launched_by_part(trace, process):
        start_ns = trace.activities.start_ns[rows]
        number += len(rows)
        early += int(np.count_nonzero(start_ns < launch_ns))
        last_ns = max(last_ns, int(launch_ns.max(initial=NO_TIME)))
        soon_ns = max(soon_ns, int(launch_ns[start_ns - launch_ns <= LATE_NS].max(initial=NO_TIME)))
        devices.update(distinct(trace.activities.device[rows]))
    return _Launched(number, early, last_ns, soon_ns, frozenset(devices))


def _launched_by_part(trace: Trace, process: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield for parts of the trace the activities with a known launch of a process, and their launches."""
    for part in parts_of(len(trace.activities)):
        launching = trace.launching_calls[part]
        mine = np.flatnonzero((trace.activities.process[part] == process) & (launching != UNKNOWN))
        yield part.start + mine, trace.calls.start_ns[launching[mine]]


def _count_late_starts(trace: Trace, process: int) -> int:
    """Return how many activities with a known launch follow idle time of their device."""
    activities = trace.activities
    rows = np.flatnonzero(activities.process == process)
    is_launched = trace.launching_calls[rows] != UNKNOWN
    late = 0
    for device in distinct(activities.device[rows]):
        own = np.flatnonzero(activities.device[rows] == device)
        own = own[np.argsort(activities.start_ns[rows[own]], kind="stable")]
        busy_until_ns = np.maximum.accumulate(activities.end_ns[rows[own]])
        is_idle = activities.start_ns[rows[own[1:]]] - busy_until_ns[:-1] > IDLE_NS
        late += int((is_idle & is_launched[own[1:]]).sum())
    return late


def _count_behind_jump(trace: Trace, process: int, launched: _Launched) -> tuple[int, int]:
    """Return :attr:`Clocks.jumped` and :attr:`Clocks.jump_ns`; (0, NO_TIME) without such a time.

    The device's clock jumps where the dots are longer than this::

        launches      a   b   c   d   e   f
        activities    aa  bb  cc  ........dd  ee  ff
    """
    nothing, activities = (0, NO_TIME), trace.activities
    if launched.number <= HANDFUL or len(launched.devices) != 1 or not NO_TIME < launched.soon_ns < launched.last_ns:
        return nothing
    # All that was launched after the last one that begins soon, and when the device is done with what was before.
    behind, until_ns = [], NO_TIME
    for rows, launch_ns in _launched_by_part(trace, process):
        is_behind = launch_ns > launched.soon_ns
        behind.append((rows[is_behind], launch_ns[is_behind]))
        until_ns = max(until_ns, int(activities.end_ns[rows[~is_behind]].max(initial=NO_TIME)))
    rows, launch_ns = map(np.concatenate, zip(*behind, strict=True))
    order = np.argsort(launch_ns, kind="stable")
    launch_ns, start_ns, end_ns = launch_ns[order], activities.start_ns[rows[order]], activities.end_ns[rows[order]]
    # Before each launch: when the device is done with all that was launched by then.
    done_ns = np.maximum.accumulate(np.append(until_ns, end_ns[:-1]))
    jumps = np.flatnonzero(np.minimum.accumulate(start_ns[::-1])[::-1] - done_ns > LATE_NS // 2)
    if not len(jumps):
        return nothing
    first = int(jumps[0])
    before_ns = int(launch_ns[first - 1]) if first else launched.soon_ns
    done_by_then_ns, delay_ns = done_ns[first], (start_ns - launch_ns)[first:]
    start_ns, end_ns = start_ns[first:], end_ns[first:]
    order = np.argsort(start_ns, kind="stable")
    busy_until_ns = np.append(done_by_then_ns, np.maximum.accumulate(end_ns[order])[:-1])
    is_late = (start_ns[order] - busy_until_ns > IDLE_NS) & (delay_ns[order] <= delay_ns.min() + CLOCK_ERROR_NS)
    return int(is_late.sum()), before_ns


def _measure_stretch(trace: Trace, process: int) -> float:
    """Return how many times as far apart activities begin as their launches; 1 if fewer than a handful are launched."""
    mine = rows_of((trace.activities.process == process) & (trace.launching_calls != UNKNOWN))
    start_ns, launch_ns = trace.activities.start_ns[mine], trace.calls.start_ns[trace.launching_calls[mine]]
    if len(start_ns) <= HANDFUL or launch_ns.min() == launch_ns.max():
        return 1.0
    return float((start_ns.max() - start_ns.min()) / (launch_ns.max() - launch_ns.min()))


def _measure_rate(ends_ns: Ints, ended_ns: Ints) -> float:
    """Return how many times as far apart the ends of awaited work (``ended_ns``) are as those of waits (``ends_ns``).

    The median of the later half of the waits less that of the former half; 1 if there are fewer than two handfuls.
    """
    if len(ends_ns) < 2 * HANDFUL:
        return 1.0
    order = np.argsort(ends_ns, kind="stable")
    former, later = order[: len(order) // 2], order[len(order) // 2 :]
    host_ns, device_ns = (np.median(at[later]) - np.median(at[former]) for at in (ends_ns, ended_ns))
    return float(device_ns / host_ns) if host_ns > 0 else 1.0


def _find_waits(trace: Trace, process: int) -> tuple[Ints, Ints, Ints]:
    """Return of each wait of the host for known work when it begins and ends, and when this work has ended.

    Only work counts that the waiting thread launched before the wait: what another thread launches meanwhile may come
    after it. In a process with several devices it is not known which device a stream or a wait belongs to; no wait is
    returned then.
    """
    calls, activities = trace.synchronizations, trace.activities
    mine = rows_of((activities.process == process) & (trace.launching_calls != UNKNOWN))
    waits = np.flatnonzero((calls.process == process) & is_in(calls.kind, HOST_WAITS) & (calls.start_ns != NO_TIME))
    is_for_event = calls.kind[waits] == SyncKind.HOST_WAIT_EVENT
    mark = np.where(is_for_event, calls.awaits[waits], waits)  # the record of the event, or the call itself
    at_ns = take_or_unknown(calls.start_ns, mark, NO_TIME)
    waits, mark, at_ns = waits[at_ns != NO_TIME], mark[at_ns != NO_TIME], at_ns[at_ns != NO_TIME]
    if not len(waits) or len(distinct(activities.device[mine])) != 1:
        return waits[:0], waits[:0], waits[:0]
    launching = trace.launching_calls[mine]
    thread, launch_ns = trace.calls.lane[launching], trace.calls.start_ns[launching]
    lane, end_ns = activities.lane[mine], activities.end_ns[mine]
    # For each thread and stream (UNKNOWN: all streams): the latest end among all work launched before each wait.
    found, ends_ns = [], []
    any_stream = np.where(calls.kind[waits] == SyncKind.HOST_WAIT_DEVICE, UNKNOWN, calls.stream[mark])
    for caller in distinct(calls.thread[mark]):
        for stream in distinct(any_stream[calls.thread[mark] == caller]):
            rows = np.flatnonzero((thread == caller) & ((lane == stream) | (stream == UNKNOWN)))
            rows = rows[np.argsort(launch_ns[rows], kind="stable")]
            last_ns = np.maximum.accumulate(end_ns[rows])
            own = (calls.thread[mark] == caller) & (any_stream == stream)
            at = np.searchsorted(launch_ns[rows], at_ns[own]) - 1
            ended_ns = take_or_unknown(last_ns, np.maximum(at, UNKNOWN), NO_TIME)
            found.append(waits[own][ended_ns != NO_TIME])
            ends_ns.append(ended_ns[ended_ns != NO_TIME])
    rows = np.concatenate(found)
    return calls.start_ns[rows], calls.end_ns[rows], np.concatenate(ends_ns)
