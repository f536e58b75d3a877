"""Which process each event of a ``torch.profiler`` trace belongs to, if the traces of several ranks were put together.

Some programs that do so keep the ranks apart by the ``pid``, for example ``[TP00] 80`` for the host's events of a rank
and ``[TP00] 0`` for those of its device. Each rank numbers its calls on its own: the same numbers come again.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ddp_prof.errors import TraceError
from ddp_prof.ingest.kineto_document import NO_ARGUMENTS, Event

_LABEL = re.compile(r"\[[^\]]*\]")


def number_processes(path: Path, calls: Sequence[Event], of_host: Iterable[Event], of_device: Sequence[Event]) -> int:
    """Number the processes that launched work from 0, write the number into each event, and return how many there are.

    An event of a device belongs to the process whose label its ``pid`` has; without labels, to the only process that
    made a call with its number, or else to the process that launched most of what its device did. A TraceError says
    that this is not known. A file of one process is left as it is.
    """
    processes = {str(call.pid): 0 for call in calls}
    if len(processes) < 2:
        return len(processes)
    processes = {pid: number for number, pid in enumerate(sorted(processes))}
    for event in of_host:
        event.process = processes.get(str(event.pid), 0)
    by_label = {_label(pid): number for pid, number in processes.items()}
    if len(by_label) == len(processes) and all(_label(event.pid) in by_label for event in of_device):
        for event in of_device:
            event.process = by_label[_label(event.pid)]
        return len(processes)
    owners: dict[object, set[int]] = defaultdict(set)
    for call in calls:
        owners[_correlation(call)].add(call.process)
    _own_by_numbers(path, len(processes), owners, of_device)
    return len(processes)


def _own_by_numbers(path: Path, count: int, owners: Mapping[object, set[int]], of_device: Sequence[Event]) -> None:
    launched: dict[object, Counter[int]] = defaultdict(Counter)
    for event in of_device:
        if len(found := owners.get(_correlation(event), ())) == 1:
            launched[_device(event)].update(found)
    for event in of_device:
        found, of_same_device = owners.get(_correlation(event), ()), launched[_device(event)]
        if len(found) == 1:
            (event.process,) = found
        elif of_same_device:
            event.process = of_same_device.most_common(1)[0][0]
        else:
            reason = f"put together from the traces of {count} processes, and nothing tells which launched what"
            raise TraceError(path, reason, "give the trace of each rank")


def _label(pid: object) -> str:
    found = _LABEL.match(str(pid))
    return found[0] if found else ""


def _correlation(event: Event) -> object:
    number = (event.args or NO_ARGUMENTS).correlation
    return number if isinstance(number, (int, str)) and number else None


def _device(event: Event) -> object:
    device = (event.args or NO_ARGUMENTS).device
    return str(event.pid if device is None else device)
