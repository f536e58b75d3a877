"""Activities that a file holds twice, at slightly different times.

As where two profilers recorded them, or two exports of one recording that round times differently were put together::

    file holds      aa   bbb   cc
                     aa   bbb   cc        under the same numbers, 1 us later

A stream does not run two activities of one name and number at one time: the second one is the same as the first.
"""

from __future__ import annotations

import numpy as np

from ddp_prof.table import UNKNOWN, Ints, Mask, parts_of

MOST_SHIFTED_NS = 2_000
"""Largest difference between the starts, and between the ends, of an activity and its copy."""

_LEAST_SHIFTED = 0.4
"""Smallest fraction of the activities that must be such copies; about half are if the file holds all of them twice."""

_ASKED = 1_000
"""About the number of activities by which it is seen whether numbers occur twice."""


def find_shifted_copies(start_ns: Ints, end_ns: Ints, number: Ints, *same: Ints) -> Mask:
    """Return which activities another one of the file stands for; none if that is not so of about half of them.

    Args:
        start_ns: Their starts.
        end_ns: Their ends.
        number: Their correlation numbers.
        same: Columns in which both are equal, such as the stream and the name.
    """
    found = np.zeros(len(start_ns), np.bool_)
    if not _occur_twice(number):
        return found
    order = np.lexsort((start_ns, *same, number))
    first, second = order[:-1], order[1:]
    is_copy = (number[second] == number[first]) & (number[second] != UNKNOWN)
    for column in same:
        is_copy &= column[second] == column[first]
    is_copy &= (start_ns[second] - start_ns[first] <= MOST_SHIFTED_NS) & (start_ns[second] < end_ns[first])
    is_copy &= np.abs(end_ns[second] - end_ns[first]) <= MOST_SHIFTED_NS
    if is_copy.sum() >= _LEAST_SHIFTED * len(order):
        found[second[is_copy]] = True
    return found


def _occur_twice(number: Ints) -> bool:
    """Return whether most numbers occur twice, by about ``_ASKED`` that follow each other: columns may be long.

    Nodes of a graph have one number, too, but are seldom two.
    """
    sampled = number[:: max(1, len(number) // _ASKED)]
    sampled = np.sort(sampled[sampled != UNKNOWN])
    if not len(sampled):
        return False
    low = sampled[len(sampled) // 2]
    high = low + max(1, int(sampled[-1] - sampled[0]) // len(number)) * _ASKED
    parts = (number[part] for part in parts_of(len(number)))
    asked = np.concatenate([values[(values >= low) & (values < high)] for values in parts])
    _, times = np.unique(asked, return_counts=True)
    return bool(2 * np.count_nonzero(times == 2) > len(times))
