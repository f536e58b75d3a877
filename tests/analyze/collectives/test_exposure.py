"""Why communication is exposed: a picture a cause, and an oracle that looks at every instant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_prof.analyze.collectives.exposure import CAUSES, explain_exposure
from ddp_prof.analyze.collectives.timing import CollectiveTimings, RankCollectives
from ddp_prof.analyze.core.step_breakdown import StepTimes
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.analyze.overlap.overlap import measure_overlap
from ddp_prof.trace import UNKNOWN, empty
from tests.drawing import column, draw_trace, instants
from tests.measuring import collectives_of

STEP = {"step 0": "#" * 24}


def causes_of(stream: str, compute: str, launches: dict[str, str], **more) -> list[dict[str, int]]:
    """What is exposed of each collective, by cause."""
    ranges = {**STEP, "backward": "#" * 18, **more}
    trace = draw_trace(ranges=ranges, launches=launches, streams={7: compute, 9: stream})
    found = collectives_of(trace)
    (step,) = measure_overlap(trace).ranks[0].steps
    assert sum(value.exposed_ns for value in found) == step.exposed_ns
    assert sum(value.overlapped_ns for value in found) == step.overlapped_ns
    return [{cause: ns for cause in CAUSES if (ns := getattr(value.causes, cause))} for value in found]


def test_tail() -> None:
    assert causes_of(
        compute=".aaaa.......",
        stream="....NNNN....",
        launches={"pt_autograd_0": "aN"},
    ) == [{"tail": 3}]


def test_starved() -> None:
    assert causes_of(
        compute=".aaaa....bbb",
        stream="....NNNN....",
        launches={"pt_autograd_0": "aN......b"},
    ) == [{"starved": 3}]


def test_launched_late() -> None:
    """Ready at 5, launched at 7: of its end, as much as it was late."""
    assert causes_of(
        compute=".aaaa.......",
        stream=".......NNNN.",
        launches={"pt_autograd_0": "a......N"},
    ) == [{"tail": 2, "launched_late": 2}]


def test_queued() -> None:
    """Ready at 3 and held up until 7 by another: of its end, as much as it stood in the queue."""
    assert causes_of(
        compute=".aabbb.........",
        stream="...MMMMNNNNNN..",
        launches={"pt_autograd_0": "aMb.N"},
    ) == [{"tail": 1}, {"tail": 5, "queued": 1}]


def test_synchronous() -> None:
    assert causes_of(
        compute=".aaaa........oo",
        stream="......MM.NNNN..",
        launches={"main": ".....M..N...o", "pt_autograd_0": "a"},
        backward="#####",
        synchronize=".....########",
    ) == [{"synchronous": 2}, {"synchronous": 4}]


def test_a_collective_after_backward_is_synchronous_where_nothing_is_said_of_synchronizing() -> None:
    assert causes_of(
        compute=".aaaa..........",
        stream="......MM.......",
        launches={"main": "......M........", "pt_autograd_0": "a"},
        backward="#####",
    ) == [{"synchronous": 2}]


def test_an_instant_belongs_to_the_collective_that_ends_last() -> None:
    trace = draw_trace(
        ranges=STEP | {"backward": "#"},
        launches={"pt_autograd_0": "aMNO"},
        streams={7: ".aa", 8: "...MMMMMMMMM", 9: ".....NNNNNN", 10: "........OOOOOOOOO"},
    )
    first, second, third = collectives_of(trace)
    assert [item.exposed_ns for item in (first, second, third)] == [5, 0, 9]


@st.composite
def schedules(draw) -> tuple[RankCollectives, np.ndarray]:
    """Up to six collectives on two streams in two steps, any compute, any wait."""
    rows = sorted(
        draw(
            st.lists(
                st.tuples(
                    st.integers(0, 1), st.integers(0, 20), st.integers(0, 8), st.integers(0, 9), st.integers(-9, 9),
                    st.sampled_from([7, 9, UNKNOWN]), st.booleans(),
                ),
                max_size=6,
            )
        )
    )  # fmt: skip
    step, launch, queueing, duration, readiness, lane, blocking = zip(*rows, strict=True) if rows else [()] * 7
    launch_ns, unknown = column(launch) + 10, np.full(len(rows), UNKNOWN, np.int64)
    ready = launch_ns + column(readiness)
    start = launch_ns + column(queueing)
    timings = CollectiveTimings(
        step=column(step), lane=column(lane), ready_ns=np.where(ready == 12, UNKNOWN, ready), ready_source=unknown,
        launch_ns=launch_ns, start_ns=start, end_ns=start + column(duration), blocking=column(blocking),
        operation=unknown, bucket=unknown, bytes=unknown, group=unknown, group_size=unknown, sequence=unknown,
    )  # fmt: skip
    wait = column(draw(st.integers(UNKNOWN, length)) for length in duration)
    ends = column(draw(st.lists(st.sampled_from([UNKNOWN, 5, 15, 25, 35]), min_size=2, max_size=2)))
    compute = instants(draw(st.text("#.", min_size=45, max_size=45)))
    return RankCollectives(
        1, 0, 0, Path("x"), None, None, timings, (), column([0, 1]), column([0, 1]), ends, compute, empty(StepTimes)
    ), wait


@settings(deadline=None)
@given(schedules())
def test_causes_are_those_of_an_oracle_that_looks_at_every_instant(
    schedule: tuple[RankCollectives, np.ndarray],
) -> None:
    rank, wait = schedule
    exposure = explain_exposure(rank, wait)
    expected = [dict.fromkeys((*CAUSES, "overlapped", "exposed", "exposed_wait"), 0) for _ in range(len(rank.timings))]
    for instant in range(60):
        for step in (0, 1):
            running = [
                (int(rank.timings.end_ns[row]), row)
                for row in range(len(rank.timings))
                if rank.timings.step[row] == step and rank.timings.start_ns[row] <= instant < rank.timings.end_ns[row]
            ]
            if not running:
                continue
            _, row = max(running)
            if holds(rank.compute, instant):
                expected[row]["overlapped"] += 1
            else:
                expected[row]["exposed"] += 1
                expected[row]["exposed_wait"] += instant < rank.timings.start_ns[row] + wait[row]
                expected[row][cause_at(rank, row, int(wait[row]), instant)] += 1
    for row, parts in enumerate(expected):
        assert {name: int(getattr(exposure, f"{name}_ns")[row]) for name in parts} == parts


def holds(intervals: Intervals, instant: int) -> bool:
    return any(start <= instant < end for start, end in zip(intervals.start_ns, intervals.end_ns, strict=True))


def cause_at(rank: RankCollectives, row: int, wait: int, instant: int) -> str:
    """The table of causes, said once more in the plainest words."""
    timings = rank.timings
    start, end, launch = int(timings.start_ns[row]), int(timings.end_ns[row]), int(timings.launch_ns[row])
    ready = launch if timings.ready_ns[row] == UNKNOWN else int(timings.ready_ns[row])
    late = max(0, launch - ready)
    same_stream = timings.lane == timings.lane[row]
    stream = union(timings.start_ns[same_stream], timings.end_ns[same_stream])
    in_queue = range(max(launch, ready), start) if timings.lane[row] != UNKNOWN else ()
    queued = sum(holds(stream, item) for item in in_queue)
    backward_end = int(rank.backward_end_ns[timings.step[row]])
    if timings.blocking[row]:
        return "synchronous"
    is_wait = instant < start + wait
    if not is_wait and instant >= end - late:
        return "launched_late"
    if not is_wait and instant >= end - late - queued:
        return "queued"
    if backward_end != UNKNOWN and instant >= backward_end:
        return "tail"
    return "waiting" if is_wait else "starved"


def test_on_real_captures_causes_add_up_to_the_exposed_time_of_each_step(shared_traces: Path) -> None:
    from ddp_prof.ingest.load import load_trace

    for path in sorted(path for path in shared_traces.iterdir() if path.name.endswith((".sqlite", ".gz"))):
        trace = load_trace(path)
        found = collectives_of(trace)
        assert all(value.causes.total_ns == value.exposed_ns for value in found), path
        for rank in measure_overlap(trace).ranks:
            for step in rank.steps:
                own = [
                    value
                    for value in found
                    if (value.process, value.device, value.step) == (rank.process, rank.device, step.step)
                ]
                if step.step is not None:
                    assert sum(summary.exposed_ns for summary in own) == step.exposed_ns, path


def test_of_the_eight_collectives_of_a_real_ddp_step_the_last_is_exposed(shared_traces: Path) -> None:
    from ddp_prof.ingest.load import load_trace

    found = collectives_of(load_trace(shared_traces / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite"))
    by_position = [[value for value in found if value.index == index] for index in range(8)]
    assert [len(item) for item in by_position] == [59] * 8
    last = sum(item.exposed_ns for item in by_position[-1])
    assert last == sum(value.causes.tail for value in found) == pytest.approx(12.62e6, rel=1e-3)
    assert last > sum(value.exposed_ns for value in found) / 2


def test_our_own_variants_are_exposed_for_the_reasons_they_are_made_for(committed_traces: list[Path]) -> None:
    from ddp_prof.analyze.root_cause import find_root_cause
    from ddp_prof.ingest.load import load_trace

    headlines = {}
    for path in committed_traces:
        trace = load_trace(path)
        headlines[path.stem] = find_root_cause(collectives_of(trace), trace.manifest)
    for blocking in ("naive", "flat"):
        assert headlines[blocking].cause == "synchronous"
        assert headlines[blocking].cause_ns == headlines[blocking].exposed_ns
    for name, parameters in (("overlap", 1), ("bucketed_100mb", 39)):
        headline = headlines[name]
        assert headline.cause == "tail"
        assert headline.cause_ns > 0.9 * headline.exposed_ns
        assert headline.is_last
        assert (headline.parameters[0], len(headline.parameters)) == ("embedding.weight", parameters)
