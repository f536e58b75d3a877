from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.trace import UNKNOWN, Activities, Calls, empty, find_launching_calls
from tests.drawing import table

keys = st.lists(st.tuples(st.integers(1, 3), st.integers(-1, 6)), max_size=15)


def rows(kind, pairs: list[tuple[int, int]]):
    blank = dict.fromkeys(kind.__dataclass_fields__, 0)
    return table(kind, [blank | {"process": process, "correlation": correlation} for process, correlation in pairs])


@given(keys, keys)
def test_the_first_call_with_the_same_process_and_correlation(
    activities: list[tuple[int, int]], calls: list[tuple[int, int]]
) -> None:
    got = find_launching_calls(rows(Activities, activities), rows(Calls, calls)).tolist()
    want = [calls.index(key) if key[1] != UNKNOWN and key in calls else UNKNOWN for key in activities]
    assert got == want


def test_without_calls_nothing_is_known() -> None:
    assert find_launching_calls(rows(Activities, [(1, 1)]), empty(Calls)).tolist() == [UNKNOWN]
