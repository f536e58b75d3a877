"""Sets of instants as half-open intervals, and their algebra; all times are integers of nanoseconds.

a        ######....####
b        ...########...
a & b    ...###....#...
a - b    ###........###
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ddp_prof.growing_column import in_order, in_parts
from ddp_prof.trace import NEVER, UNKNOWN, Ints, Mask


@dataclass(frozen=True)
class Intervals:
    """A set of instants: intervals ``[start, end)`` in ascending order that neither overlap nor touch.

    Make one with :func:`union`; ``&``, ``|`` and ``-`` combine sets.
    """

    start_ns: Ints
    end_ns: Ints

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def length_ns(self) -> int:
        """The sum of the lengths of all intervals."""
        return int((self.end_ns - self.start_ns).sum())

    def __and__(self, other: Intervals) -> Intervals:
        """Return the instants that are in both sets."""
        if not len(self) or not len(other):
            return self if not len(self) else other
        # Each interval of the set with fewer intervals is cut by the intervals of the other set that it meets: these
        # are `met` intervals from `first` on. `nth` counts them 0, 1, 2, ... for each interval.
        few, many = sorted((self, other), key=len)
        if len(few) == 1:
            return many._within(int(few.start_ns[0]), int(few.end_ns[0]))
        first = np.searchsorted(many.end_ns, few.start_ns, side="right")
        met = np.searchsorted(many.start_ns, few.end_ns, side="left") - first
        row = np.repeat(np.arange(len(few)), met)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(met) - met, met)
        cut = first[row] + nth
        return Intervals(
            in_parts(len(cut), lambda part: np.maximum(few.start_ns[row[part]], many.start_ns[cut[part]])),
            in_parts(len(cut), lambda part: np.minimum(few.end_ns[row[part]], many.end_ns[cut[part]])),
        )

    def _within(self, start_ns: int, end_ns: int) -> Intervals:
        """Return the instants from a start on and before an end; columns that need no change are not copied."""
        met = slice(np.searchsorted(self.end_ns, start_ns, side="right"), np.searchsorted(self.start_ns, end_ns))
        start, end = self.start_ns[met], self.end_ns[met]
        if len(start) and (start[0] < start_ns or end[-1] > end_ns):
            start, end = np.maximum(start, start_ns), np.minimum(end, end_ns)
        return Intervals(start, end)

    def __or__(self, other: Intervals) -> Intervals:
        """Return the instants that are in at least one of the sets."""
        start = np.concatenate([self.start_ns, other.start_ns])
        return union(start, np.concatenate([self.end_ns, other.end_ns]))

    def __sub__(self, other: Intervals) -> Intervals:
        """Return the instants that are in this set, but not in the other one."""
        # Each interval ends where the intersection begins, and continues where the intersection ends.
        common = self & other
        if not len(common) and np.all(self.end_ns > self.start_ns):
            return self
        start = np.sort(np.concatenate([self.start_ns, common.end_ns]), kind="stable")
        end = np.sort(np.concatenate([common.start_ns, self.end_ns]), kind="stable")
        some = np.flatnonzero(end > start)
        return Intervals(in_order(start, some), in_order(end, some))

    def covered_ns(self, start_ns: Ints, end_ns: Ints) -> Ints:
        """Return how much (ns) of each interval ``[start, end)`` lies in this set.

        The intervals may be in any order and overlap; an end must not be before its start.
        """

        def covered(rows: slice) -> Ints:
            start, end = start_ns[rows], end_ns[rows]
            begun = np.searchsorted(self.start_ns, start, side="right")
            # The second search is only needed if an interval of the set begins within [start, end), which few do.
            more = begun < len(self)
            more[more] = end[more] > self.start_ns[begun[more]]
            begun_by_end = begun.copy()
            begun_by_end[more] = np.searchsorted(self.start_ns, end[more], side="right")
            return self._length_before(end, begun_by_end) - self._length_before(start, begun)

        return in_parts(len(start_ns), covered)

    @cached_property
    def _length_by_begun(self) -> Ints:
        """The total length of the first 0, 1, 2, ... intervals."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.end_ns - self.start_ns)])

    def _length_before(self, time_ns: Ints, begun: Ints) -> Ints:
        """Return how much (ns) of the set lies before each time, at which ``begun`` of its intervals have begun.

        That is the length of these intervals, less what is to come of the last of them.
        """
        before: Ints = self._length_by_begun[begun]
        if len(self):
            to_come = self.end_ns[begun - 1]  # a copy: it may be changed in place
            to_come -= time_ns
            to_come[begun == 0] = 0  # no interval has begun: index -1 took the last one
            before -= np.maximum(0, to_come, out=to_come)
        return before

    def holds(self, time_ns: Ints) -> Mask:
        """Return whether each time is in this set."""
        if len(self) == 1:
            within: Mask = (time_ns >= self.start_ns[0]) & (time_ns < self.end_ns[0])
            return within
        begun = np.searchsorted(self.start_ns, time_ns, side="right")
        ended = np.searchsorted(self.end_ns, time_ns, side="right")
        inside: Mask = begun > ended
        return inside


def union_of_one(start_ns: int, end_ns: int) -> Intervals:
    return Intervals(np.array([start_ns]), np.array([end_ns]))


EVER = union_of_one(-NEVER, NEVER)


def union(start_ns: Ints, end_ns: Ints) -> Intervals:
    """Return the union of intervals, which may overlap, be in any order, or be empty (end <= start)."""
    start, end, _ = _unite(start_ns, end_ns)
    return Intervals(start, end)


def union_by_group(start_ns: Ints, end_ns: Ints, group: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the union of each group's intervals.

    ``group`` is the number of each interval's group, which must not be negative.

    Returns:
        Starts, ends and groups of the united intervals, ordered by group and start.
    """
    if not len(start_ns):
        return start_ns, end_ns, group
    # On an axis with all groups end to end, groups cannot overlap, so one pass is enough.
    origin = int(start_ns.min())
    span = max(0, int(end_ns.max()) - origin) + 1
    shift = group * span - origin
    start, end, row = _unite(start_ns + shift, end_ns + shift)
    group = group[row]
    shift = group * span - origin
    return start - shift, end - shift, group


def _unite(start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Return starts and ends of the union's intervals, and for each of them a row of the input that lies in it.

    Intervals that follow each other are returned without a copy.
    """
    rows: Ints | None = None  # of the input; None: all rows in their order, which needs no copies
    if not np.all(some := end > start):
        rows = np.flatnonzero(some)
        start, end = in_order(start, rows), in_order(end, rows)
    if np.any(start[1:] < start[:-1]):
        order = np.argsort(start, kind="stable")
        start, end, rows = in_order(start, order), in_order(end, order), order if rows is None else rows[order]
    # An interval of the union begins where a start is after all ends so far.
    reach = end if np.all(end[1:] >= end[:-1]) else np.maximum.accumulate(end)
    begins = np.ones(len(start), np.bool_)
    np.greater(start[1:], reach[:-1], out=begins[1:])
    first = np.flatnonzero(begins)
    if len(first) < len(start):  # it ends with the row before the next such start, or with the last row
        start, reach = in_order(start, first), in_order(reach, np.flatnonzero(np.append(begins[1:], True)))
    return start, reach, first if rows is None else rows[first]


def innermost(start_ns: Ints, end_ns: Ints, time_ns: Ints) -> Ints:
    """Return the index of the innermost range that contains each time, ``UNKNOWN`` if there is none.

    The innermost range is the one that starts last; if several start together, the shortest. Digits are indices::

        ranges    0000000000..
                  ...111......
        innermost 000111000000..  and UNKNOWN after the end
    """
    find = innermost_of(start_ns, end_ns)
    return in_parts(len(time_ns), lambda rows: find(time_ns[rows]))


def innermost_of(start_ns: Ints, end_ns: Ints) -> Callable[[Ints], Ints]:
    """Return the function that finds the innermost of these ranges at some times, see :func:`innermost`."""
    if not len(start_ns):
        return lambda time_ns: np.full(len(time_ns), UNKNOWN, np.int64)
    if np.all(end_ns[:-1] <= start_ns[1:]) and np.all(start_ns <= end_ns):  # one after the other, as steps are

        def find_in_row(time_ns: Ints) -> Ints:
            begun = count_up_to(start_ns, time_ns) - 1  # UNKNOWN before the first range
            return np.where(time_ns < end_ns[begun], begun, UNKNOWN)

        return find_in_row
    edges = np.sort(np.concatenate([start_ns, end_ns]))
    # `owner` is the innermost range between two neighbouring edges; its first and last element are outside of all.
    owner = np.full(len(edges) + 1, UNKNOWN, np.int64)
    first, last = np.searchsorted(edges, start_ns) + 1, np.searchsorted(edges, end_ns) + 1
    for row in np.lexsort((-end_ns, start_ns)):  # outer ranges first; inner ones overwrite them
        owner[first[row] : last[row]] = row

    def find(time_ns: Ints) -> Ints:
        holder: Ints = owner[count_up_to(edges, time_ns)]
        return holder

    return find


def count_up_to(edges_ns: Ints, time_ns: Ints) -> Ints:
    """Return how many edges (sorted) are not after each time; fast if the times are many and in order, too."""
    if not len(time_ns) or np.any(time_ns[1:] < time_ns[:-1]):
        return np.searchsorted(edges_ns, time_ns, side="right")
    # Look up the few edges among the times instead: the number grows at the first time that is not before an edge.
    first, last = np.searchsorted(edges_ns, time_ns[[0, -1]], side="right")
    grows = np.searchsorted(time_ns, edges_ns[first:last])
    return np.repeat(np.arange(first, last + 1), np.diff(grows, prepend=0, append=len(time_ns)))
