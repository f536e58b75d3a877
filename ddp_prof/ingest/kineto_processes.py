"""Which process each event of a ``torch.profiler`` trace belongs to, if the traces of several ranks were put together.

Some programs that do so keep the ranks apart by the ``pid``, for example ``[TP00] 80`` for the host's events of a rank
and ``[TP00] 0`` for those of its device. Each rank numbers its calls on its own: the same numbers come again.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ddp_prof.errors import TraceError
from ddp_prof.ingest.kineto_columns import CallEvents, DeviceEvents
from ddp_prof.table import UNKNOWN, Ints, distinct

_LABEL = re.compile(r"\[[^\]]*\]")


@dataclass(frozen=True)
class Processes:
    """The processes that launched work, numbered from 0.

    Attributes:
        count: How many there are.
        of_pid: The process of each code of a ``pid`` on the host; 0 for one that launched nothing.
        of_device: The process of each row of what the devices did, for each table of it; ``None`` if there are fewer
            than two processes, so that all is of process 0.
    """

    count: int
    of_pid: Ints
    of_device: Sequence[Ints] | None = None

    def of_host(self, pid: Ints) -> Ints:
        """Return the process of each row by the code of its ``pid``."""
        return self.of_pid[pid] if self.count > 1 else np.zeros(len(pid), np.int64)

    def of_table(self, place: int, rows: int) -> Ints:
        """Return the process of each row of a table of what the devices did."""
        return self.of_device[place] if self.of_device else np.zeros(rows, np.int64)


def number_processes(
    path: Path, pids: Sequence[str], calls: CallEvents, of_device: Sequence[DeviceEvents | CallEvents]
) -> Processes:
    """Number the processes that launched work; ``pids`` are the texts of the codes of ``pid``.

    An event of a device belongs to the process whose label its ``pid`` has; without labels, to the only process that
    made a call with its number, or else to the process that launched most of what its device did. A TraceError says
    that this is not known.
    """
    launching = sorted({pids[code] for code in distinct(calls.pid)})
    of_pid = np.zeros(len(pids), np.int64)
    if len(launching) < 2:
        return Processes(len(launching), of_pid)
    numbers = {pid: number for number, pid in enumerate(launching)}
    of_pid[:] = [numbers.get(pid, 0) for pid in pids]
    by_label = {_label(pid): number for pid, number in numbers.items()}
    of_label = np.array([by_label.get(_label(pid), UNKNOWN) for pid in pids], np.int64)
    owners = [of_label[table.pid] for table in of_device]
    if len(by_label) == len(numbers) and not any(np.any(found == UNKNOWN) for found in owners):
        return Processes(len(launching), of_pid, owners)
    callers: dict[int, set[int]] = defaultdict(set)
    for number, process in zip(_numbers(calls), of_pid[calls.pid].tolist(), strict=True):
        callers[number].add(process)
    return Processes(len(launching), of_pid, _own_by_numbers(path, len(launching), callers, of_device))


def _own_by_numbers(
    path: Path, count: int, callers: Mapping[int, set[int]], of_device: Sequence[DeviceEvents | CallEvents]
) -> list[Ints]:
    tables = [(_numbers(table), _devices(table)) for table in of_device]
    launched: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for numbers, devices in tables:
        for number, device in zip(numbers, devices, strict=True):
            if len(found := callers.get(number, ())) == 1:
                launched[device].update(found)

    def owner(number: int, device: tuple[int, int]) -> int:
        found, of_same_device = callers.get(number, ()), launched[device]
        if len(found) == 1:
            return next(iter(found))
        if of_same_device:
            return of_same_device.most_common(1)[0][0]
        reason = f"put together from the traces of {count} processes, and nothing tells which launched what"
        raise TraceError(path, reason, "give the trace of each rank")

    return [np.array([*map(owner, numbers, devices)], np.int64) for numbers, devices in tables]


def _label(pid: str) -> str:
    found = _LABEL.match(pid)
    return found[0] if found else ""


def _numbers(table: DeviceEvents | CallEvents) -> list[int]:
    """The number of each event's call, ``UNKNOWN`` without one."""
    return [number or UNKNOWN for number in table.correlation.tolist()]


def _devices(table: DeviceEvents | CallEvents) -> list[tuple[int, int]]:
    """What each event's device is known by: its number, or the code of its ``pid``."""
    if isinstance(table, DeviceEvents):
        named_by = table.named_by
    else:
        named_by = np.where(table.device == UNKNOWN, table.pid, UNKNOWN)
    device = np.where(named_by == UNKNOWN, table.device, UNKNOWN)
    return list(zip(device.tolist(), named_by.tolist(), strict=True))
