from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof import growing_column
from ddp_prof.analyze.intervals import Intervals, count_up_to, union, union_by_group
from tests.drawing import column, instants, picture_of

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def united(raw: list[tuple[int, int]]) -> Intervals:
    return union(column(a for a, _ in raw), column(b for _, b in raw))


def members(raw: list[tuple[int, int]]) -> set[int]:
    """The brute-force oracle: every instant one by one."""
    return {instant for start, end in raw for instant in range(start, end)}


def instants_of(intervals: Intervals) -> set[int]:
    return {instant for a, b in zip(intervals.start_ns, intervals.end_ns, strict=True) for instant in range(a, b)}


def test_the_three_operations_as_pictures() -> None:
    a = "######....####"
    b = "...########..."
    both, either, only_a = "...###....#...", "##############", "###........###"
    assert picture_of(instants(a) & instants(b), 14) == both
    assert picture_of(instants(a) | instants(b), 14) == either
    assert picture_of(instants(a) - instants(b), 14) == only_a


def test_touching_intervals_become_one() -> None:
    assert len(united([(0, 3), (3, 5)])) == 1


def test_an_interval_that_ends_before_it_starts_is_empty() -> None:
    assert united([(5, 2), (3, 3)]).length_ns == 0


@given(pairs)
def test_a_union_is_what_its_members_are(raw: list[tuple[int, int]]) -> None:
    got = united(raw)
    assert instants_of(got) == members(raw)
    assert got.length_ns == len(members(raw))
    assert np.all(got.end_ns > got.start_ns)
    assert np.all(got.start_ns[1:] > got.end_ns[:-1]), "disjoint, ascending and not even touching"


@given(pairs, pairs)
def test_algebra_agrees_with_sets_of_instants(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    for got, want in (
        (united(a) & united(b), members(a) & members(b)),
        (united(a) | united(b), members(a) | members(b)),
        (united(a) - united(b), members(a) - members(b)),
    ):
        assert instants_of(got) == want
        assert np.all(got.start_ns[1:] > got.end_ns[:-1])


@given(pairs, pairs, st.sampled_from([2, growing_column._PART_ROWS]))
def test_covered_counts_the_common_instants_of_each_interval(
    of: list[tuple[int, int]], windows: list[tuple[int, int]], part: int
) -> None:
    windows = [(min(pair), max(pair)) for pair in windows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing_column, "_PART_ROWS", part)
        got = united(of).covered_ns(column(a for a, _ in windows), column(b for _, b in windows))
    assert got.tolist() == [len(members(of) & members([window])) for window in windows]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 3)), max_size=15))
def test_groups_are_united_on_their_own(rows: list[tuple[int, int, int]]) -> None:
    start, end, group = union_by_group(*(column(row[index] for row in rows) for index in range(3)))
    for wanted in range(4):
        mine = group == wanted
        assert instants_of(Intervals(start[mine], end[mine])) == members([row[:2] for row in rows if row[2] == wanted])
    assert group.tolist() == sorted(group.tolist())


@pytest.mark.parametrize("origin", [0, 1_790_000_000_000_000_000], ids=["small", "unix time in ns"])
def test_times_of_any_epoch_are_exact(origin: int) -> None:
    got = union(column([origin, origin + 5]), column([origin + 7, origin + 9]))
    assert (got.start_ns.tolist(), got.end_ns.tolist()) == ([origin], [origin + 9])


@given(st.lists(st.integers(0, 20), max_size=9), st.lists(st.integers(0, 20), max_size=9), st.booleans())
def test_edges_are_counted_up_to_each_time(edges: list[int], times: list[int], are_in_order: bool) -> None:
    times = sorted(times) if are_in_order else times
    counted = count_up_to(column(sorted(edges)), column(times))
    assert counted.tolist() == [sum(edge <= time for edge in edges) for time in times]
