from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddp_prof.analyze.core.rank_events import ONLY_INCOMPLETE
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.inventory import take_inventory
from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.analyze.quality import diagnose, merge_file_warnings, warn_silent_steps
from ddp_prof.analyze.why_unknown import EMPTY, GRAPHS, NO_COMMUNICATION, NO_DURATIONS, reason_of_run
from ddp_prof.notes import Doubt
from ddp_prof.table import select
from ddp_prof.trace import UNKNOWN, Activities, Calls, Category, Kind, Overhead, Trace, concatenate, empty
from tests.drawing import column, draw_trace


def doubts(trace: Trace) -> str:
    return "\n".join(diagnose(trace, find_rank_events(trace)))


def is_doubted(trace: Trace) -> bool:
    return any(isinstance(note, Doubt) for note in diagnose(trace, find_rank_events(trace)))


SOUND = draw_trace(
    ranges={"step 0": "##########", "backward": "..####...."},
    launches={"main": "aN........"},
    streams={7: ".aaaa.....", 9: "..NNN....."},
)


def test_a_sound_trace_raises_none() -> None:
    assert doubts(SOUND) == ""


def test_collectives_on_the_compute_stream() -> None:
    trace = draw_trace(launches={"main": "aNb......."}, streams={7: ".aaaaNNNbb"}, ranges={"backward": "#"})
    assert "1 collective ran on the compute stream (7)" in doubts(trace)


def test_which_process_lost_steps_is_said_where_others_did_not() -> None:
    """Of two processes in one file, "steps 0 to 2 left out" was said of both."""
    is_launch, one = np.ones(len(SOUND.calls), np.bool_), select(SOUND.activities, np.array([0]))
    lost = replace(SOUND, is_launch=is_launch, activities=one, launching_calls=None)
    other = {
        name: replace(table, process=table.process + 1)
        for name, table in (("activities", SOUND.activities), ("calls", lost.calls), ("spans", SOUND.spans))
    }
    tables = {name: concatenate(getattr(lost, name), table) for name, table in other.items()}
    both = replace(lost, **tables, is_launch=np.ones(4, np.bool_), launching_calls=None)
    assert "process 4242: step 0 left out: 1 of 2 launches in it has no activity" in doubts(both)
    assert "rank 3: step 0 left out" in doubts(replace(both, ranks={4242: 3, 4243: 1}))
    assert doubts(lost).startswith("step 0 left out")


def test_no_calls() -> None:
    assert "--trace=cuda,nvtx" in doubts(replace(SOUND, calls=empty(Calls), launching_calls=None))


def test_calls_without_any_work() -> None:
    """As torch.profiler writes if it has no room for records of kernels, and on some GPUs of Intel."""
    lost = replace(SOUND, activities=empty(Activities), launching_calls=None)
    assert "2 API calls of a device are in this trace, but no kernels or copies" in doubts(lost)
    (advice,) = [text for text in take_inventory(lost).advice if text.startswith("overlap")]
    assert "ProfilerActivity.CUDA" not in advice, "it was on"


@pytest.mark.parametrize(("work", "lacks"), [("", ["overlap", "ranks"]), (".aa", ["backward", "ranks"])])
def test_a_range_of_backward_is_asked_for_where_there_is_work(work: str, lacks: list[str]) -> None:
    trace = draw_trace(ranges={"step 0": "####"}, launches={"main": "a"} if work else {}, streams={7: work})
    assert [text.partition(":")[0] for text in take_inventory(trace).advice] == lacks


def test_collectives_that_were_recorded_twice() -> None:
    """As where two exports of one report were put together: their number doubles, their time does not."""
    twice = replace(SOUND, activities=concatenate(SOUND.activities, SOUND.activities), launching_calls=None)
    assert "1 duplicate collective:" in doubts(twice)
    (once, again) = (measure_overlap(trace).ranks[0] for trace in (SOUND, twice))
    assert (once.comm_ns, again.collectives - once.collectives) == (again.comm_ns, 1)
    kernels = select(SOUND.activities, SOUND.activities.category == Category.COMPUTE)
    of_kernels = replace(SOUND, activities=concatenate(SOUND.activities, kernels), launching_calls=None)
    assert "duplicate" not in doubts(of_kernels)


def test_activities_that_were_launched_before_the_recording_began() -> None:
    """Their numbers are lower than all recorded calls'. It was said that the capture seems to be trimmed."""
    trace = draw_trace(launches={"main": "..b"}, streams={7: "aa..bb"})
    assert "1 of 2 activities was launched before the recording began" in doubts(trace)
    assert "no launching call" not in doubts(trace)


def test_a_trimmed_capture() -> None:
    trace = draw_trace(launches={"main": "a"}, streams={7: "aaabbb"})
    assert "1 of 2 activities has no launching call" in doubts(trace)


def test_activities_without_correlation_numbers_are_not_trimmed() -> None:
    numbers = np.full(len(SOUND.activities), UNKNOWN)
    none = replace(SOUND, activities=replace(SOUND.activities, correlation=numbers), launching_calls=None)
    assert "2 of 2 activities carry no correlation number" in doubts(none)
    assert "trimmed" not in doubts(none)
    numbers[0], launching = 999, None
    some = replace(SOUND, activities=replace(SOUND.activities, correlation=numbers), launching_calls=launching)
    assert "1 of 2 activities carries no correlation number" in doubts(some)
    assert "1 of 2 activities has no launching call" in doubts(some)


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([(None, True), (None, True)], None),
        ([(None, True), (NO_DURATIONS, True)], NO_DURATIONS),
        ([(None, True), (NO_COMMUNICATION, False)], None),
        ([(NO_DURATIONS, True), (NO_COMMUNICATION, False)], NO_DURATIONS),
        ([(None, False), (NO_COMMUNICATION, False)], None),
        ([(NO_DURATIONS, True), (GRAPHS, True)], GRAPHS),
        ([(None, True), (ONLY_INCOMPLETE, True)], None),
        ([(ONLY_INCOMPLETE, True), (ONLY_INCOMPLETE, True)], ONLY_INCOMPLETE),
        ([], EMPTY),
    ],
)
def test_a_run_is_known_where_all_of_its_ranks_are_that_communicate(
    ranks: list[tuple[str | None, bool]], reason: str | None
) -> None:
    """Of each rank: why its figures are not known, and whether it communicates.

    Beside a rank without a complete step, whose collective lay outside of steps, those of the others were 'not known',
    and their 0.35 ms of exposed communication stood below.
    """
    assert reason_of_run(ranks) == reason


def test_what_only_some_files_say_is_said_with_their_names() -> None:
    busy, busier = (f"the profiler itself was at work in {share} of the measured time" for share in ("2 %", "24 %"))
    assert merge_file_warnings([("a", ["x", busy]), ("b", ["x", busier])]) == ("x", f"a: {busy}", f"b: {busier}")
    many = [(f"rank{rank}", ["x", busy if rank else busier]) for rank in range(64)]
    assert merge_file_warnings(many) == ("x", f"rank0: {busier}", f"rank1 and 62 more: {busy}")
    each = [(f"rank{rank}", [f"{rank + 2} of 100 activities have no launching call"]) for rank in range(64)]
    said = "rank0: 2 of 100 activities have no launching call (63 more like it, with other numbers)"
    assert merge_file_warnings(each) == (said,)


def test_overhead_of_the_profiler_above_one_percent() -> None:
    assert "at work in 20 %" in doubts(replace(SOUND, overhead=Overhead(column([2, 3]), column([4, 4]))))
    long = draw_trace(ranges={"step 0": "#" * 1000}, launches={"main": "a"}, streams={7: ".a"})
    for busy, said in ((10, False), (11, True)):
        overhead = Overhead(column([100]), column([100 + busy]))
        assert ("at work in 1 %" in doubts(replace(long, overhead=overhead))) is said
        assert not is_doubted(replace(long, overhead=overhead)), "by one percent they may be"
    overhead = Overhead(column([100]), column([300]))
    assert is_doubted(replace(long, overhead=overhead))


@pytest.mark.parametrize(("length", "said"), [(1, False), (2, True)])
def test_a_name_that_smells_of_communication_counts_from_one_percent_of_the_time_on(length: int, said: bool) -> None:
    trace = draw_trace(launches={"main": "ab"}, streams={7: "a" * (100 - length), 8: "b" * length})
    names = tuple(name.replace("compute b", "my_all_reduce_kernel") for name in trace.names)
    assert ("'my_all_reduce_kernel' counts as compute" in doubts(replace(trace, names=names))) is said


def test_a_name_that_smells_of_communication() -> None:
    names = tuple(name.replace("compute a", "my_all_reduce_kernel") for name in SOUND.names)
    assert "'my_all_reduce_kernel' counts as compute" in doubts(replace(SOUND, names=names))
    assert is_doubted(replace(SOUND, names=names))


def test_a_kernel_of_torch_compile_is_not_said_to_look_like_what_it_prepares() -> None:
    """To follow the advice made a collective of what copies its input."""
    name = "triton_poi_fused_all_reduce_lift_fresh_0"
    names = tuple(text.replace("compute a", name) for text in SOUND.names)
    assert name in names
    assert "looks like a collective's" not in doubts(replace(SOUND, names=names))


def test_graphs_recorded_whole_are_no_idle_gpu() -> None:
    activities = replace(
        SOUND.activities,
        kind=column([Kind.GRAPH, Kind.KERNEL]),
        category=column([Category.OTHER, Category.COMPUTE]),
    )
    trace = replace(SOUND, activities=activities)
    assert "--cuda-graph-trace=node" in doubts(trace)
    (rank,) = measure_overlap(trace).ranks
    assert (rank.overlap_ratio, rank.steps[0].idle_ns, rank.steps[0].compute_only_ns) == (None, None, None)
    assert "CUDA graphs" in (rank.reason or "")


def test_a_step_without_the_collectives_of_all_other_ranks_is_doubted() -> None:
    """Their kernels and calls were lost: 'communication 0.0 ms' of one step, and no word. Step 2 accumulates."""
    whole = {0: 3, 1: 3, 2: 0, 3: 3}
    (warning,) = warn_silent_steps({"rank 0": whole | {1: 0}, "rank 1": whole, "rank 2": whole})
    assert warning.startswith("rank 0: no collective was recorded in step 1, in which all other ranks have some")
    assert isinstance(warning, Doubt)
    assert not [*warn_silent_steps({"rank 0": whole, "rank 1": dict.fromkeys(whole, 0)})]
    assert not [*warn_silent_steps({"rank 0": whole})]
