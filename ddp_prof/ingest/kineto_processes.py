"""Finds the process of each event of a ``torch.profiler`` trace that was put together from the traces of several ranks.

Some programs that put traces together keep the ranks apart by a label in the ``pid``, for example ``[TP00] 80`` for a
rank's events on the host and ``[TP00] 0`` for its events on the device, or ``rank0-80`` and ``rank0-0``. Each rank
numbers its calls on its own, so different ranks have the same numbers.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ddp_prof.errors import TraceError
from ddp_prof.ingest.kineto_columns import CallEvents, DeviceEvents, HostEvents
from ddp_prof.table import UNKNOWN, Ints, count_before, distinct, distinct_rows, select

_LABEL = re.compile(r"\[[^\]]*\]")
"""The label at the start of a ``pid``, such as ``[TP00]``."""
_LEAST_IN_TURNS = 3
"""Smallest number of calls that two processes with one pid make in turns under the same numbers.

Also of operators of theirs that cross on what seems to be one thread.
"""
_MOST_AGAIN = 4
"""A stream seems to run kernels twice if more than one part in this of its kernels begin beside one of their name."""
_ROUNDING_NS = 2_000
"""Some releases of torch write whole microseconds."""
_NUMBER = re.compile(r"^\d+|\d+$")
"""The number at the start or the end of a ``pid``; what is left is a label, such as ``rank0-``, too."""


@dataclass(frozen=True)
class Processes:
    """The processes that launched work, numbered from 0, and then those that only have ranges.

    Attributes:
        count: Number of processes.
        launching: Number of those that launched work.
        of_pid: The process for each ``pid`` on the host, by the code (index) of the ``pid``; 0 for a ``pid`` that
            neither launched anything nor has ranges.
        of_device: For each table of events of devices, the process of each of its rows; ``None`` if there are fewer
            than two processes, so that all rows belong to process 0.
    """

    count: int
    launching: int
    of_pid: Ints
    of_device: Sequence[Ints] | None = None

    def of_host(self, pid: Ints) -> Ints:
        """Return the process of each row of a table of the host; ``pid`` holds the code of each row's ``pid``."""
        return self.of_pid[pid] if self.count > 1 else np.zeros(len(pid), np.int64)

    def of_table(self, place: int, rows: int) -> Ints:
        """Return the process of each row of table ``place`` in ``of_device``; that table has ``rows`` rows."""
        return self.of_device[place] if self.of_device else np.zeros(rows, np.int64)


def number_processes(
    path: Path,
    pids: Sequence[str],
    calls: CallEvents,
    ranges: HostEvents,
    operations: HostEvents,
    of_device: Sequence[DeviceEvents | CallEvents],
) -> Processes:
    """Number the processes that launched work, and find the process of each event of a device.

    If some launched work, others with ranges are processes, too: their work and their calls were not recorded. If none
    did, as on a CPU, there is one process only, as torch.profiler records it.

    An event of a device belongs to the process whose label its ``pid`` has. Without labels, it belongs to the only
    process that made a call with its number, or else to the process that launched most of the work of its device.

    Args:
        path: The trace, for errors.
        pids: The distinct values of ``pid``; the index of a ``pid`` is its code in the tables.
        calls: The calls that launched work.
        ranges: The ranges of the host.
        operations: Its operators.
        of_device: Tables of events of devices.

    Raises:
        TraceError: There are several processes, and none launched work, or nothing tells which of them launched it.
    """
    launching = sorted({pids[code] for code in distinct(calls.pid)})
    marking = sorted({pids[code] for code in distinct(ranges.pid)} - {*launching}) if launching else []
    numbers = {pid: number for number, pid in enumerate(launching)}
    all_numbers = numbers | {pid: number for number, pid in enumerate(marking, len(launching))}
    of_pid = np.array([all_numbers.get(pid, 0) for pid in pids], np.int64)
    hosts = {pids[code] for table in (ranges, operations) for code in distinct(table.pid)}
    if not launching and len(hosts) > 1:
        raise _error_of_several(path, len(hosts))
    if len(launching) < 2:
        return Processes(len(all_numbers), len(launching), of_pid)
    # By labels, if each process has its own label and each event of a device has one of these.
    by_label = {_label(pid): number for pid, number in numbers.items()}
    of_label = np.array([by_label.get(_label(pid), UNKNOWN) for pid in pids], np.int64)
    owners = [of_label[table.pid] for table in of_device]
    if len(by_label) == len(numbers) and not any(np.any(found == UNKNOWN) for found in owners):
        return Processes(len(all_numbers), len(launching), of_pid, owners)
    callers: dict[int, set[int]] = defaultdict(set)  # the processes that made a call with each number
    for number, process in zip(_numbers(calls), of_pid[calls.pid].tolist(), strict=True):
        callers[number].add(process)
    owners = _own_by_numbers(path, len(launching), callers, of_device)
    return Processes(len(all_numbers), len(launching), of_pid, owners)


def refuse_shared_threads(
    path: Path, pids: Sequence[str], steps: HostEvents, operations: HostEvents, kernels: DeviceEvents
) -> None:
    """Raise TraceError if operators of several processes seem to run on one thread, as their numbers are equal.

    An operator on a thread ends before the one that called it. If the thread is in one step twice at the same time as
    well, durations that are too long are not the reason. Nor are they if kernels run on one stream twice::

        step 5         |---------------|
        step 5            |---------------|
        operators       aaaaaa bbbb
        of the other       aaaaaa bbbb

    Args:
        path: The trace, for errors.
        pids: The distinct values of ``pid``; the index of a ``pid`` is its code in the tables.
        steps: The ranges of steps whose names are unique in a process.
        operations: The operators.
        kernels: The kernels.
    """
    steps = select(steps, np.lexsort((steps.start_ns, steps.name, steps.tid, steps.pid)))
    is_again = (np.diff(steps.pid) == 0) & (np.diff(steps.tid) == 0) & (np.diff(steps.name) == 0)
    is_again &= steps.start_ns[1:] < steps.end_ns[:-1]
    twice = select(steps, np.flatnonzero(is_again))
    for pid, tid in sorted(set(zip(twice.pid.tolist(), twice.tid.tolist(), strict=True))):
        own = select(operations, (operations.pid == pid) & (operations.tid == tid))
        own = select(own, np.lexsort((-own.end_ns, own.start_ns)))
        until_ns = np.maximum.accumulate(own.end_ns)[:-1]
        crosses = (own.start_ns[1:] < until_ns - _ROUNDING_NS) & (own.end_ns[1:] > until_ns + _ROUNDING_NS)
        if np.count_nonzero(crosses) >= _LEAST_IN_TURNS or run_on_one_stream_twice(kernels):
            raise _error_of_one_pid(path, pids[pid])


def run_on_one_stream_twice(kernels: DeviceEvents) -> bool:
    """Return whether kernels seem to be of several devices that have one number, as a stream runs many of them twice.

    Kernels of a stream follow each other, or the next one begins a little early. Here it has the same name and runs
    beside most of the former, or this one beside most of it; and it is no other node of a CUDA graph, whose nodes have
    one number, but several names::

        stream 7       gggg aaaaa  gggg
        of the other     gggg aaaaa  gggg
    """
    kernels = select(kernels, kernels.lane != UNKNOWN)
    first, stream = distinct_rows(kernels.device, kernels.named_by, kernels.lane)
    order = np.lexsort((kernels.start_ns, stream))
    stream, start_ns, end_ns = stream[order], kernels.start_ns[order], kernels.end_ns[order]
    number, name = kernels.correlation[order], kernels.name[order]
    at_once_ns = np.minimum(end_ns[:-1], end_ns[1:]) - start_ns[1:]
    shorter_ns = np.minimum(end_ns[:-1] - start_ns[:-1], end_ns[1:] - start_ns[1:])
    again = (stream[1:] == stream[:-1]) & (name[1:] == name[:-1])
    again &= (at_once_ns > _ROUNDING_NS) & (2 * at_once_ns > shorter_ns)
    of_number, which = distinct_rows(number)
    has_other_names = np.zeros(len(of_number), np.bool_)
    has_other_names[which[name != name[of_number][which]]] = True
    again &= (number[1:] != number[:-1]) | (number[1:] <= 0) | ~has_other_names[which[1:]]
    times = np.bincount(stream[1:][again], minlength=len(first))
    return bool(np.any((times >= _LEAST_IN_TURNS) & (_MOST_AGAIN * times > np.bincount(stream, minlength=len(first)))))


def refuse_shared_streams(path: Path, kernels: DeviceEvents) -> None:
    """Raise TraceError if kernels, of which no call was recorded, are of several processes with the same streams."""
    if run_on_one_stream_twice(kernels):
        reason = "put together from the traces of several processes whose devices and streams have the same numbers"
        raise TraceError(path, f"{reason}: nothing tells which of them ran what", "give the trace of each rank")


def _error_of_one_pid(path: Path, pid: str) -> TraceError:
    reason = f"put together from the traces of several processes with one pid, {pid}"
    return TraceError(path, f"{reason}: nothing tells which launched what", "give the trace of each rank")


def refuse_shared_pids(path: Path, pids: Sequence[str], launches: CallEvents) -> None:
    """Raise TraceError if several processes with one ``pid`` launched work in turns: nothing tells whose it is.

    In containers, all ranks may have one pid. A process numbers its calls, and may begin anew; then it made each call
    of the former round before the first one of the next round::

        one process     1 2 3 4 ... 1 2 3 4
        two processes   1 2 1 3 2 4 3 4         1 is there again before 3 and 4 are there the first time

    Args:
        path: The trace, for errors.
        pids: The distinct values of ``pid``; the index of a ``pid`` is its code in the table.
        launches: The calls that launched work.
    """
    launches = select(launches, launches.correlation > 0)
    if np.all(np.diff(np.sort(launches.correlation))):
        return
    launches = select(launches, np.lexsort((launches.start_ns, launches.correlation, launches.pid)))
    is_again = (np.diff(launches.pid) == 0) & (np.diff(launches.correlation) == 0)
    is_within = is_again & (launches.start_ns[1:] < launches.end_ns[:-1])  # of the driver, within one of the runtime
    launches = select(launches, np.append(True, ~is_within))
    _, which = distinct_rows(launches.pid, launches.correlation)
    times = count_before(which)  # how often the number was there before
    again = np.flatnonzero(times)
    for code, round_ in sorted(set(zip(launches.pid[again].tolist(), times[again].tolist(), strict=True))):
        rows = again[(launches.pid[again] == code) & (times[again] == round_)]
        in_turns = launches.start_ns[rows] < launches.start_ns[rows - 1].max()
        if np.count_nonzero(in_turns) >= _LEAST_IN_TURNS:
            raise _error_of_one_pid(path, pids[code])


def _own_by_numbers(
    path: Path, count: int, callers: Mapping[int, set[int]], of_device: Sequence[DeviceEvents | CallEvents]
) -> list[Ints]:
    """Return the process of each row of the tables of devices, by the numbers of the calls that launched the rows.

    Args:
        path: The trace, for errors.
        count: Number of processes.
        callers: The processes that made a call with each number.
        of_device: Tables of events of devices.
    """
    tables = [(_numbers(table), _devices(table)) for table in of_device]
    # For each device, how many of its events each process launched, where the number of the call tells it.
    launched: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for numbers, devices in tables:
        for number, device in zip(numbers, devices, strict=True):
            if len(found := callers.get(number, ())) == 1:
                launched[device].update(found)

    def owner(number: int, device: tuple[int, int]) -> int:
        """Return the process of an event: its only caller, else the process that launched most of its device's work."""
        found, of_same_device = callers.get(number, ()), launched[device]
        if len(found) == 1:
            return next(iter(found))
        if of_same_device:
            return of_same_device.most_common(1)[0][0]
        raise _error_of_several(path, count)

    return [np.array([*map(owner, numbers, devices)], np.int64) for numbers, devices in tables]


def _error_of_several(path: Path, count: int) -> TraceError:
    reason = f"put together from the traces of {count} processes, and nothing tells which launched what"
    return TraceError(path, reason, "give the trace of each rank")


def _label(pid: str) -> str:
    found = _LABEL.match(pid)
    return found[0] if found else _NUMBER.sub("", pid)


def _numbers(table: DeviceEvents | CallEvents) -> list[int]:
    """Return the number of the call that launched each event, ``UNKNOWN`` if it has none."""
    return [number or UNKNOWN for number in table.correlation.tolist()]


def _devices(table: DeviceEvents | CallEvents) -> list[tuple[int, int]]:
    """Return for each event what tells its device: (number, UNKNOWN), or (UNKNOWN, code of a ``pid``)."""
    if isinstance(table, DeviceEvents):
        named_by = table.named_by
    else:
        named_by = np.where(table.device == UNKNOWN, table.pid, UNKNOWN)
    device = np.where(named_by == UNKNOWN, table.device, UNKNOWN)
    return list(zip(device.tolist(), named_by.tolist(), strict=True))
