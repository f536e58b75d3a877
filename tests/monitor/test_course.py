"""When a figure changed: pictures of courses, and how often chance is taken for a change."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_prof.monitor.course import CHANCE, FIGURES, LEAST_IN_ALL, find_bounds, find_changes, find_late_ranks
from tests.monitor.records import MS, courses, record


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        ("......########", [6]),
        ("..........####..........", [10, 14]),
        ("................########................", [16, 24]),
        ("....................", []),
        ("..........#.........", []),
        ("..........##........", []),
        (".....####", []),
    ],
)
def test_a_stretch_is_found_where_it_begins_and_ends(picture: str, expected: list[int]) -> None:
    assert [one.position for one in find_changes(courses(picture, 10, 30))] == expected


def test_a_change_tells_the_medians_of_both_sides() -> None:
    first, second = find_changes(courses("..........######..........", 10, 30))
    assert (first.figure, round(first.before_ns / MS), round(first.after_ns / MS)) == ("exposed_ns", 10, 30)
    assert (round(second.before_ns / MS), round(second.after_ns / MS)) == (30, 10)


def test_two_levels_without_any_scatter_are_a_change() -> None:
    """What the means of 13 and 11 equal values are rounded by was taken for likeness, and for the change itself."""
    (change,) = find_changes([record(at, step=50 if at < 13 else 70) for at in range(24)])
    assert (change.figure, change.position, change.before_ns, change.after_ns) == ("step_ns", 13, 50 * MS, 70 * MS)


def test_a_change_below_two_per_cent_of_the_step_is_none() -> None:
    assert not find_changes(courses("............############", 10, 10.9))
    assert find_changes(courses("............############", 10, 11.5))


def test_what_is_unknown_in_some_measurements_changes_where_it_is_known() -> None:
    records = courses("..........##########", 10, 30, "contention")
    for at in (3, 4, 12):
        records[at]["contention_ns"] = None
    assert [one.position for one in find_changes(records)] == [10]


def test_fewer_measurements_can_show_no_change() -> None:
    half, chance = LEAST_IN_ALL // 2, CHANCE / len(FIGURES)
    assert find_bounds([*range(half), *range(100, 100 + half)], chance) == [half]
    for length in range(LEAST_IN_ALL):
        half = length // 2
        assert not find_bounds([*range(half), *range(100, 100 + length - half)], chance), length


@pytest.mark.parametrize(("length", "of_one", "of_five"), [(12, [6], []), (14, [7], [7])])
def test_a_change_in_one_of_five_figures_must_be_rarer(length: int, of_one: list[int], of_five: list[int]) -> None:
    """Five figures have five chances to look like a change."""
    half = length // 2
    exposed = [*range(10, 10 + half), *range(30, 30 + length - half)]
    wave = [50 + 5 * (number % 2) for number in range(length)]
    alone = [record(number, exposed=value) for number, value in enumerate(exposed)]
    others = ("step", "comm", "blocking", "contention")
    among = [record(at, exposed=value, **dict.fromkeys(others, wave[at])) for at, value in enumerate(exposed)]
    assert [change.position for change in find_changes(alone)] == of_one
    assert [change.position for change in find_changes(among)] == of_five


@pytest.mark.parametrize("length", [12, 40])
def test_chance_is_seldom_taken_for_a_change(length: int) -> None:
    generator = np.random.default_rng(5)
    taken = sum(bool(find_bounds(list(generator.normal(0, 1, length)))) for _ in range(200))
    assert taken <= 6  # 1 % of 200 is 2; more than 6 has a probability of 0.5 %


@pytest.mark.parametrize("length", [16, 40])
def test_chance_is_as_seldom_taken_for_a_change_of_any_of_the_figures(length: int) -> None:
    generator = np.random.default_rng(6)
    names = ("step", "comm", "exposed", "blocking", "contention")
    taken = 0
    for _ in range(120):
        drawn = generator.normal(50, 5, (length, len(names)))
        records = [record(number, **dict(zip(names, values, strict=True))) for number, values in enumerate(drawn)]
        taken += bool(find_changes(records))
    assert taken <= 5  # 1 % of 120 is 1.2; more than 5 has a probability of 0.2 %


@pytest.mark.parametrize(("like", "most"), [(0.3, 2), (0.6, 4)])
def test_measurements_that_resemble_the_one_before_are_no_change(like: float, most: int) -> None:
    """As beside programs that come and go: of 20 such courses 12 showed a change at a correlation of 0.6."""
    generator = np.random.default_rng(3)
    taken = found = 0
    for _ in range(20):
        values = generator.normal(0, 1, 60)
        for at in range(1, 60):
            values[at] = like * values[at - 1] + np.sqrt(1 - like**2) * values[at]
        taken += bool(find_bounds(values.tolist()))
        found += any(abs(at - 30) <= 3 for at in find_bounds((values + 6 * (np.arange(60) >= 30)).tolist()))
    assert taken <= most
    assert found >= 15


def test_a_long_course_is_put_together_first() -> None:
    generator = np.random.default_rng(1)
    values = [*generator.normal(10, 1, 3000), *generator.normal(20, 1, 3000)]
    (found,) = find_bounds(values)
    assert abs(found - 3000) <= 15


def late(*ranks: int | None, lag: float = 6.0) -> list[dict[str, object]]:
    return [record(number, late=None if rank is None else (rank, lag)) for number, rank in enumerate(ranks)]


def test_a_rank_is_late_from_its_first_to_its_last_measurement_in_a_row() -> None:
    (found,) = find_late_ranks(late(None, 0, 1, 1, 1, 1, 1, 1, 0, None))
    assert (found.rank, found.first, found.last, found.lag_ns) == (1, 2, 7, 6 * MS)


def test_a_row_that_chance_explains_is_none() -> None:
    assert not find_late_ranks(late(1, 1, 1, 0, 0, None, 1))
    assert not find_late_ranks(late(1, 1, 1, None))  # of two equal ranks one is last in nine steps in 1 of 256 rows
    assert find_late_ranks(late(1, 1, 1, 1, 1))


def test_chance_goes_by_the_ranks_with_results() -> None:
    """Of eight ranks two are known: each of these is last in half of the steps by chance, not in an eighth."""
    records = [{**one, "world_size": 8, "ranks": 2} for one in late(1, 1, 1, None)]
    assert not find_late_ranks(records)
    assert find_late_ranks([{**one, "ranks": 8} for one in records])


@pytest.mark.parametrize(("lag", "rank"), [(20.0, 1), (-20.0, 0), (0.5, None), (0.9, None)])
def test_in_a_stretch_between_changes_the_lag_tells_the_rank(lag: float, rank: int | None) -> None:
    """Even if it is last in some steps only."""
    records = courses("..........####..........", 50, 80, "step")
    for at in range(10, 14):
        records[at]["by_rank"] = record(at, lag=lag + at % 3 / 10)["by_rank"]
    found = find_late_ranks(records, find_changes(records))
    assert [(one.rank, one.first, one.last) for one in found] == ([] if rank is None else [(rank, 10, 13)])
    assert not found or abs(found[0].lag_ns - 20 * MS) < MS


def test_lags_that_resemble_the_one_before_make_no_late_rank_of_a_stretch() -> None:
    """Equal ranks, at a correlation of 0.6: without this, 6 of 10 courses had a late rank in the stretch."""
    generator = np.random.default_rng(5)
    taken = found = 0
    for _ in range(10):
        lags = generator.normal(0, 2, (30, 8))
        for at in range(1, 30):
            lags[at] = 0.6 * lags[at - 1] + 0.8 * lags[at]
        records = courses("..........##########..........", 50, 80, "step")
        changes = find_changes(records)
        for is_late in (False, True):
            for at, one in enumerate(records):
                own = lags[at] + [8 * (is_late and 10 <= at < 20), *[0] * 7]
                one["by_rank"] = [{"rank": rank, "lag_ns": round(lag * MS)} for rank, lag in enumerate(own.tolist())]
            late_ranks = [one.rank for one in find_late_ranks(records, changes)]
            taken += bool(late_ranks) and not is_late
            found += late_ranks == [0] and is_late
    assert taken <= 1
    assert found >= 7


def test_a_lag_below_two_per_cent_of_the_step_is_none() -> None:
    assert not find_late_ranks(late(1, 1, 1, 1, 1, 1, lag=0.9))
    assert find_late_ranks(late(1, 1, 1, 1, 1, 1, lag=1.1))
