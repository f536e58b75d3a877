from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.analyze.quality import diagnose
from ddp_prof.notes import Doubt
from ddp_prof.trace import UNKNOWN, Activities, Calls, Ints, empty, join_launches
from tests.drawing import draw_trace, table

keys = st.lists(st.tuples(st.integers(1, 3), st.integers(-1, 6)), max_size=15)


def find_launching_calls(activities: Activities, calls: Calls) -> Ints:
    return join_launches(activities, calls)[0]


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


def drawn(calls: str, activities: str, threads: str = "") -> list[int | None]:
    """For each activity, when it was launched; a character is the correlation number."""
    offered = [
        {"start_ns": at, "process": 1, "lane": int((threads or "0" * len(calls))[at]), "correlation": int(number)}
        for at, number in enumerate(calls)
        if number != "."
    ]
    asked = [(at, int(number)) for at, number in enumerate(activities) if number != "."]
    blank = dict.fromkeys(Activities.__dataclass_fields__, 0) | {"process": 1}
    table_of_calls = table(Calls, offered)
    found = find_launching_calls(
        table(Activities, [blank | {"start_ns": at, "correlation": number} for at, number in asked]), table_of_calls
    )
    return [None if row == UNKNOWN else int(table_of_calls.start_ns[row]) for row in found]


def test_a_number_that_is_used_again_belongs_to_the_last_call_before() -> None:
    assert drawn(calls="56....56....", activities="...56....56.") == [0, 1, 6, 7]


def test_a_number_used_once_belongs_to_its_call_wherever_that_is() -> None:
    assert drawn(calls="5..6........", activities=".6.5.5......") == [3, 0, 0]


def test_of_a_runtime_call_and_the_driver_call_in_it_the_first_launches() -> None:
    assert drawn(calls="55..6...55..", activities="...5..6...5.") == [0, 4, 8]
    assert drawn(calls="5.5.6.......", activities="...5..6.....", threads="0.1.0.......") == [2, 4]


def test_with_a_host_ahead_of_what_it_launched_before_the_number_is_ambiguous() -> None:
    """Both calls are before both activities: nothing tells them apart, and the trace says so."""
    trace = draw_trace(launches={"main": "ab..ab"}, streams={7: "......aa.a.bb.b."})
    assert trace.calls.start_ns[trace.launching_calls].tolist() == [4, 4, 5, 5]
    (doubt,) = (line for line in diagnose(trace, find_rank_events(trace)) if "correlation" in line)
    assert doubt.startswith("4 of 4 activities have several calls with their correlation number before them")
    assert isinstance(doubt, Doubt)


def test_each_step_gets_its_own_kernels_where_each_uses_the_same_numbers() -> None:
    trace = draw_trace(
        ranges={f"step|index={step}": "....." * step + "#####" for step in range(4)},
        launches={"main": "ab...ab...ab...ab..."},
        streams={7: "..aab..aab..aab..aab"},
    )
    (rank,) = measure_overlap(trace).ranks
    assert [step.kernels for step in rank.steps] == [2, 2, 2, 2]
    assert not any("several calls" in line for line in measure_overlap(trace).warnings), "each call has its kernel"


def test_where_an_earlier_call_of_the_number_has_no_work_it_may_have_launched_what_follows() -> None:
    trace = draw_trace(launches={"main": "a.b..a..b..a...b"}, streams={7: "......a..b..a...b"})
    (doubt,) = (line for line in diagnose(trace, find_rank_events(trace)) if "correlation" in line)
    assert doubt.startswith("4 of 4 activities have several calls with their correlation number before them")
    # The work of the second call of b was lost, all others have theirs.
    trace = draw_trace(launches={"main": "a.b..a..b..a...b"}, streams={7: ".a.b..a.........b"})
    (doubt,) = (line for line in diagnose(trace, find_rank_events(trace)) if "correlation" in line)
    assert doubt.startswith("1 of 4 activities has several calls with its correlation number before it")
