"""Steps and phases as the program's ranges tell them, and which of them holds an instant."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.range_names import BACKWARD, FORWARD, OPTIMIZER, PHASES, STEP, SYNCHRONIZE, parse_range
from ddp_prof.trace import UNKNOWN, Table

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ddp_prof.trace import Ints, Mask, Spans, Trace

STEP_PATTERNS = (
    r"^ProfilerStep#(\d+)$",
    r"^(?:training|train|global)?[ _-]?(?:step|iteration|iter)[ _#:=-]{0,2}(\d+)$",
)
"""How others name their steps, tried in this order where there are no ranges of ours; any case."""

PHASE_PATTERNS: Mapping[str, str] = {
    FORWARD: r"^#* ?(?:forward|fwd)(?:[ _]?pass)? ?#*$",
    BACKWARD: r"^#* ?(?:loss[._])?(?:backward|bwd)(?:[ _]?pass)? ?#*$",
    SYNCHRONIZE: r"^synchronize$",
    OPTIMIZER: r"^#* ?(?:optimizer|opt)(?:[ _.]?step)? ?#*$|^Optimizer\.step#",
}
"""How ranges of phases are named, by us and by others; any case."""


@dataclass(frozen=True, slots=True)
class RangePatterns:
    """How the user's own ranges are named: regular expressions, ``None`` for the usual names.

    Attributes:
        step: Of step ranges; its first group, if it has one, is the step's number.
        backward: Of ranges that hold the backward pass.
    """

    step: str | None = None
    backward: str | None = None


NO_PATTERNS = RangePatterns()


@dataclass(frozen=True)
class Steps(Table):
    """The steps of one process in the order of their start.

    Attributes:
        number: The number in the range's name; ``UNKNOWN`` where steps carry none.
        start_ns: Start of the host's range.
        end_ns: Its end.
        warmup: Whether the step is marked as warm-up.
    """

    number: Ints
    start_ns: Ints
    end_ns: Ints
    warmup: Mask

    @property
    def keys(self) -> Ints:
        """A number for each step that no other one has: its own, its position where it carries none.

        Where numbers come again, as when each epoch counts anew, they tell no step apart, and all are positions.
        """
        position = np.arange(len(self), dtype=np.int64)
        known = self.number[self.number != UNKNOWN]
        if len(np.unique(known)) < len(known):
            return position
        return np.where(self.number == UNKNOWN, position, self.number)

    def index_at(self, time_ns: Ints) -> Ints:
        """Index of the step that holds each instant, ``UNKNOWN`` outside of any."""
        return innermost(self.start_ns, self.end_ns, time_ns)

    @classmethod
    def whole(cls, start_ns: int, end_ns: int) -> Steps:
        """A capture without steps as a single one without a number."""
        return cls(np.array([UNKNOWN]), np.array([start_ns]), np.array([end_ns]), np.zeros(1, np.bool_))


@dataclass(frozen=True)
class Phases(Table):
    """The ranges of phases of one process.

    Attributes:
        start_ns: Start of the host's range.
        end_ns: Its end.
        kind: Index into ``range_names.PHASES``.
    """

    start_ns: Ints
    end_ns: Ints
    kind: Ints

    def union_of(self, kind: int) -> Intervals:
        """The time covered by the ranges of one kind."""
        return union(self.start_ns[self.kind == kind], self.end_ns[self.kind == kind])

    def kind_at(self, time_ns: Ints) -> Ints:
        """The kind of the innermost phase that holds each instant, ``UNKNOWN`` outside of any."""
        kinds: Ints = np.append(self.kind, UNKNOWN)[innermost(self.start_ns, self.end_ns, time_ns)]
        return kinds


def find_steps(trace: Trace, process: int, pattern: str | None = None) -> Steps:
    """The steps of a process.

    Args:
        trace: The trace.
        process: Process id.
        pattern: Regular expression for the names of step ranges, its first group the number, if it has one;
            by default our own ranges, else the first of :data:`STEP_PATTERNS` that occurs.
    """
    spans, mine = trace.spans, trace.spans.process == process
    if pattern is not None:
        return _matching_steps(trace, mine, pattern, re.RegexFlag(0))
    ours = {index: parse_range(name) for index, name in enumerate(trace.names) if name.startswith(f"{STEP}|")}
    if (rows := _rows_named(spans, mine, ours)).size:
        names = spans.name_id[rows]
        number = np.array([_or_unknown(ours[int(name)].number("index")) for name in names], np.int64)
        warmup = np.array([bool(ours[int(name)].number("warmup")) for name in names], np.bool_)
        return Steps(number, spans.start_ns[rows], spans.end_ns[rows], warmup)
    for usual in STEP_PATTERNS:
        steps = _matching_steps(trace, mine, usual, re.IGNORECASE)
        if len(steps):
            return steps
    return steps


def find_phases(trace: Trace, process: int, backward_pattern: str | None = None) -> Phases:
    """The ranges of phases of a process.

    Args:
        trace: The trace.
        process: Process id.
        backward_pattern: Regular expression for the names of backward ranges, instead of the usual names.
    """
    patterns = {**PHASE_PATTERNS, **({BACKWARD: backward_pattern} if backward_pattern else {})}
    mine = trace.spans.process == process
    rows, kinds = [], []
    for kind, phase in enumerate(PHASES):
        matches = re.compile(patterns[phase], re.IGNORECASE).search
        rows.append(_rows_named(trace.spans, mine, [index for index, name in enumerate(trace.names) if matches(name)]))
        kinds.append(np.full(len(rows[-1]), kind, np.int64))
    row = np.concatenate(rows)
    return Phases(trace.spans.start_ns[row], trace.spans.end_ns[row], np.concatenate(kinds))


def innermost(start_ns: Ints, end_ns: Ints, time_ns: Ints) -> Ints:
    """Index of the range that holds each instant, ``UNKNOWN`` where none does.

    Of several, the one that starts last, and of those that start together the shortest::

        ranges    0000000000..
                  ...111......
        innermost 000111000000..  and UNKNOWN after the end
    """
    edges = np.unique(np.concatenate([start_ns, end_ns]))
    if not len(edges):
        return np.full(len(time_ns), UNKNOWN, np.int64)
    owner = np.full(len(edges) + 1, UNKNOWN, np.int64)
    first, last = np.searchsorted(edges, start_ns) + 1, np.searchsorted(edges, end_ns) + 1
    for row in np.lexsort((-end_ns, start_ns)):  # outer ranges first: inner ones overwrite their part
        owner[first[row] : last[row]] = row
    holder: Ints = owner[np.searchsorted(edges, time_ns, side="right")]
    return holder


def _matching_steps(trace: Trace, mine: Mask, pattern: str, flags: re.RegexFlag) -> Steps:
    match = re.compile(pattern, flags).search
    found = {index: hit for index, name in enumerate(trace.names) if (hit := match(name))}
    rows = _rows_named(trace.spans, mine, found)
    numbers = {index: _number(hit) for index, hit in found.items()}
    number = np.array([numbers[int(name_id)] for name_id in trace.spans.name_id[rows]], np.int64)
    return Steps(number, trace.spans.start_ns[rows], trace.spans.end_ns[rows], np.zeros(len(rows), np.bool_))


def _number(hit: re.Match[str]) -> int:
    text = hit.group(1) if hit.re.groups else None
    return int(text) if text is not None and text.isdecimal() else UNKNOWN


def _rows_named(spans: Spans, mine: Mask, ids: Collection[int]) -> Ints:
    """The rows of ``mine`` with one of these names, by start."""
    rows = np.flatnonzero(mine & np.isin(spans.name_id, np.fromiter(ids, np.int64, len(ids))))
    return rows[np.argsort(spans.start_ns[rows], kind="stable")]


def _or_unknown(value: int | None) -> int:
    return UNKNOWN if value is None else value
