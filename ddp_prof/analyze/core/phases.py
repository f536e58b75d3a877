"""The phases of a step as the program's ranges tell them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.core.known_names import phase_pattern
from ddp_prof.analyze.core.steps import rows_named
from ddp_prof.analyze.intervals import Intervals, innermost, union
from ddp_prof.range_names import BACKWARD, FORWARD, PHASES
from ddp_prof.trace import Ints, Table, Trace, select, take_or_unknown


@dataclass(frozen=True)
class Phases(Table):
    """The ranges of phases of one process.

    Attributes:
        start_ns: Start of the host's range.
        end_ns: Its end.
        kind: Index into ``range_names.PHASES``.
        lane: Thread that opened the range.
    """

    start_ns: Ints
    end_ns: Ints
    kind: Ints
    lane: Ints

    def union_of(self, kind: int) -> Intervals:
        """The time covered by the ranges of one kind."""
        return union(self.start_ns[self.kind == kind], self.end_ns[self.kind == kind])

    def innermost_of(self, kind: int) -> Intervals:
        """The time in which the innermost phase is of this kind. The times of two kinds never overlap."""
        edges = np.sort(np.concatenate([self.start_ns, self.end_ns]))
        rows = np.flatnonzero(self.kind_at(edges) == kind)
        return union(edges[rows], edges[rows + 1])

    def kind_at(self, time_ns: Ints) -> Ints:
        """The kind of the innermost phase that holds each instant, ``UNKNOWN`` outside of any."""
        return take_or_unknown(self.kind, innermost(self.start_ns, self.end_ns, time_ns))


def find_phases(trace: Trace, process: int, backward_pattern: str | None = None) -> Phases:
    """The ranges of phases of a process.

    Args:
        trace: The trace.
        process: Process id.
        backward_pattern: Regular expression for the names of backward ranges, instead of the usual names.
    """
    mine = trace.spans.process == process
    rows, kinds = [], []
    for kind, phase in enumerate(PHASES):
        own = backward_pattern if phase == BACKWARD else None
        matches = re.compile(own or phase_pattern(phase), re.IGNORECASE).search
        rows.append(rows_named(trace.spans, mine, [index for index, name in enumerate(trace.names) if matches(name)]))
        kinds.append(np.full(len(rows[-1]), kind, np.int64))
    row = np.concatenate(rows)
    spans = trace.spans
    phases = Phases(spans.start_ns[row], spans.end_ns[row], np.concatenate(kinds), spans.lane[row])
    # What is computed again in backward, as with activation checkpointing, is backward's.
    is_again = (phases.kind == PHASES.index(FORWARD)) & phases.union_of(PHASES.index(BACKWARD)).holds(phases.start_ns)
    return select(phases, ~is_again)
