"""The collectives of one process as ranges tell them: when the host launched each, its bucket and its size.

Ours, from launch to completion; else gloo's own, ``gloo:all_reduce``, from when a thread of gloo takes it up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.core.operations import OPERATIONS, operation_of
from ddp_prof.analyze.intervals import innermost
from ddp_prof.range_names import COLLECTIVES, Range, ranges_among
from ddp_prof.trace import NO_TIME, UNKNOWN, Category, Table, looked_up

if TYPE_CHECKING:
    from ddp_prof.trace import Ints, Mask, Trace


GLOO = "gloo:"
"""How torch.profiler's names of gloo's collectives begin."""


@dataclass(frozen=True)
class CollectiveRanges(Table):
    """A row a range, in the order of the trace; a range lasts from the launch to the completion that the host saw.

    Attributes:
        span: Row in the trace's spans.
        name_id: Index into ``Trace.names``.
        operation: Index into ``operations.OPERATIONS``.
        bucket: Number of the bucket; ``UNKNOWN`` where the name has none.
        bytes: Size of the message; ``UNKNOWN`` likewise.
    """

    span: Ints
    start_ns: Ints
    end_ns: Ints
    name_id: Ints
    operation: Ints
    bucket: Ints
    bytes: Ints

    def launched_in(self, launch_ns: Ints) -> Ints:
        """Row of the range that was opened last before, or at, each launch and is open still; ``UNKNOWN`` if none."""
        return innermost(self.start_ns, self.end_ns, launch_ns)

    def round_activities(self, trace: Trace, chosen: Mask | Ints) -> Ints:
        """Row of the range that each of some activities was launched in; ``UNKNOWN`` of what is no collective."""
        row = self.launched_in(looked_up(trace.calls.start_ns, trace.launching_calls[chosen], NO_TIME))
        return np.where(trace.activities.category[chosen] == Category.COMMUNICATION, row, UNKNOWN)


def find_collective_ranges(trace: Trace, process: int) -> CollectiveRanges:
    """The ranges round the collectives of a process."""
    names, mine = ranges_among(trace.names, *COLLECTIVES), trace.spans.process == process
    if not np.any(mine & np.isin(trace.spans.name_id, list(names))) and not np.any(trace.activities.process == process):
        gloo = {index: operation_of(name) for index, name in enumerate(trace.names) if name.startswith(GLOO)}
        names = {index: Range(operation, {}) for index, operation in gloo.items() if operation is not None}
    span = np.flatnonzero(mine & np.isin(trace.spans.name_id, list(names)))
    name_id = trace.spans.name_id[span]

    def number(key: str) -> Ints:
        known = {index: parsed.number(key) for index, parsed in names.items()}
        values = [known[index] for index in name_id.tolist()]
        return np.array([UNKNOWN if value is None else value for value in values], np.int64)

    operation = [OPERATIONS.index(names[index].name) for index in name_id.tolist()]
    return CollectiveRanges(
        span=span,
        start_ns=trace.spans.start_ns[span],
        end_ns=trace.spans.end_ns[span],
        name_id=name_id,
        operation=np.array(operation, np.int64),
        bucket=number("bucket"),
        bytes=number("bytes"),
    )
