"""What the figures mean, as pictures. Lower-case letters are compute kernels, upper-case ones collectives."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.analyze import DEFINITIONS
from ddp_prof.analyze.inventory import take_inventory
from ddp_prof.analyze.overlap import TraceOverlap, measure_overlap, merge_ranks
from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.analyze.variants.regression_gate import Requirements, check_run
from ddp_prof.analyze.why_unknown import NO_BEGIN, NO_COLLECTIVE, NO_COMMUNICATION, UNNAMED_BACKWARD
from ddp_prof.ingest.load import load_trace
from ddp_prof.notes import Doubt
from ddp_prof.present.headlines import gain_headline
from ddp_prof.present.recorders import profiler_name
from ddp_prof.trace import Trace
from tests.analyze.core.test_phases import STEPPING
from tests.analyze.critical.scheduler import Device
from tests.command_line import run
from tests.drawing import PID, draw_trace
from tests.measuring import collectives_of
from tests.nsys_factory import NCCL, Capture, Kernel, Range, write_capture


def only_rank(result: TraceOverlap):
    (rank,) = result.ranks
    return rank


def backward_on_autograd(communication: str) -> Trace:
    return draw_trace(
        ranges={
            "step 0": "####################..........",
            "forward": "####..........................",
            "backward": "....########..................",
        },
        launches={
            "main": "a.............d...............",
            "pt_autograd_0": "....bN.cO.....................",
        },
        streams={
            7: ".aaaa.bbbbbbccccc.....dd......",
            9: communication,
        },
    )


BACKWARD_ON_AUTOGRAD = backward_on_autograd("........NNNNN...OOOO..........")


def test_autograds_kernels_belong_to_the_range_of_the_main_thread() -> None:
    rank = only_rank(measure_overlap(BACKWARD_ON_AUTOGRAD))
    (step,) = rank.steps
    assert (rank.kernels, rank.collectives) == (6, 2)
    assert (step.kernels, step.collectives) == (6, 2)
    assert (rank.comm_ns, rank.overlapped_ns, rank.exposed_ns) == (9, 6, 3)
    assert rank.backward_overlapped_ns == 6
    assert step.tail_ns == 3, "the last collective ends at 20, backward's last compute at 17"


def test_a_collective_that_ends_before_backward_does_has_no_tail() -> None:
    """M ends at 6. Until backward ends at 14 the device computes and idles; N has a tail of 3."""
    trace = draw_trace(
        ranges={"step 0": "####################", "backward": "##########.........."},
        launches={"main": "aM.bN..............."},
        streams={7: ".aaa.......bbb......", 9: "...MMM.......NNNN..."},
    )
    (step,) = only_rank(measure_overlap(trace)).steps
    assert (step.exposed_ns, step.tail_ns) == (5, 3)


def test_another_figure_is_another_version_of_the_definitions() -> None:
    """Stores of figures hold the version. Where a figure changes here, raise it and add a line.

    Of version 1 the tail was 7: the optimizer's compute did not count against it.
    """
    trace = backward_on_autograd("........NNNNN...OOOOOOOO......")
    (step,) = only_rank(measure_overlap(trace)).steps
    measured = (step.comm_ns, step.overlapped_ns, step.exposed_ns, step.tail_ns, step.window_ns)
    assert measured == {2: (13, 8, 5, 5, 23)}[DEFINITIONS]


def test_a_step_is_divided_without_rest() -> None:
    (step,) = only_rank(measure_overlap(BACKWARD_ON_AUTOGRAD)).steps
    assert step.window_ns == 23, "from the first activity's start at 1 to the last one's end at 24"
    assert (step.compute_only_ns, step.overlapped_ns, step.exposed_ns, step.exposed_memory_ns, step.idle_ns) == (
        11,
        6,
        3,
        0,
        3,
    )


def test_attribution_says_how_backward_was_known() -> None:
    with_range = measure_overlap(BACKWARD_ON_AUTOGRAD).attribution
    assert (with_range.method, with_range.activities, with_range.device_time) == ("ranges", 1.0, 1.0)
    trace = draw_trace(
        ranges={"step 0": "##########"},
        launches={"main": "a.........", "pt_autograd_0": "..bN......"},
        streams={7: ".aabbb....", 9: "....NNN..."},
    )
    inferred = measure_overlap(trace)
    assert inferred.attribution.method == "inferred"
    assert any("inferred" in warning for warning in inferred.warnings)
    assert only_rank(inferred).backward_overlapped_ns == 2


def test_backward_is_inferred_from_who_launches_collectives_where_threads_have_no_names() -> None:
    trace = draw_trace(
        ranges={"step 0": "##########"},
        launches={"main": "a.........", "python": "..bN......"},
        streams={7: ".aabbb....", 9: "....NNN..."},
    )
    assert only_rank(measure_overlap(trace)).backward_overlapped_ns == 2


def test_collectives_launched_by_the_main_thread_do_not_make_it_autograd() -> None:
    trace = draw_trace(
        ranges={"step 0": "##########"}, launches={"main": "aN........"}, streams={7: ".aaa......", 9: "..NNN....."}
    )
    result = measure_overlap(trace)
    assert result.attribution.method == "none"
    assert only_rank(result).backward_overlapped_ns is None


def test_copies_are_neither_compute_nor_communication() -> None:
    trace = draw_trace(
        ranges={"step 0": "##########"},
        launches={"main": "aN1......."},
        streams={7: ".aa.......", 9: "..NNNN....", 11: "...111111."},
    )
    (step,) = only_rank(measure_overlap(trace)).steps
    assert (step.comm_ns, step.overlapped_ns, step.exposed_ns) == (4, 1, 3)
    assert step.exposed_memory_ns == 3, "the copy beside the collective is not counted twice"
    assert step.window_ns == 8


def test_a_step_that_launches_nothing_has_no_window_and_no_start() -> None:
    """Its first work was said to be at time 0."""
    trace = draw_trace(
        ranges=[("step 0", ".####"), ("step 1", ".....####")], launches={"main": ".aN"}, streams={7: "..aa", 9: "...NN"}
    )
    steps = only_rank(measure_overlap(trace)).steps
    assert [(step.start_ns, step.window_ns, step.comm_ns) for step in steps] == [(2, 3, 2), (None, 0, 0)]


def test_a_kernel_without_a_call_belongs_to_no_step_but_counts_for_the_rank() -> None:
    trace = draw_trace(
        ranges={"step 0": "##########"}, launches={"main": "a........."}, streams={7: ".aa..bb...", 9: "..NNN....."}
    )
    result = measure_overlap(trace)
    rank = only_rank(result)
    assert (rank.kernels, rank.comm_ns, rank.overlapped_ns) == (3, 3, 1)
    (step,) = rank.steps
    assert (step.kernels, step.comm_ns, step.exposed_ns, step.blocking_ns) == (None, None, None, None)
    assert result.attribution.activities == 1 / 3
    (run,) = compare_variants([result])
    assert (run.step_ns, run.compute_only_ns, run.exposed_ns, run.gain_at_most) == (10, 3, None, None)
    assert "not known, because no step is known to have launched much of it" in gain_headline(run)


@pytest.mark.parametrize(
    ("phases", "reason"),
    [
        (["forward", "synchronize"], UNNAMED_BACKWARD),
        (["forward", "optimizer"], UNNAMED_BACKWARD),
        (["forward"], UNNAMED_BACKWARD),
        ([], UNNAMED_BACKWARD),
        (["forward", "backward"], None),
    ],
)
def test_of_a_cpu_it_is_known_what_hides_where_backward_has_a_name(phases: list[str], reason: str | None) -> None:
    """What backward computed counted as idle: nothing hid there, it was said. Without collectives none could."""
    process = {"process|rank=0|world=2|backend=gloo|device=cpu": "#" * 10, "step|index=0": "#" * 10}
    pictures = dict(zip(phases, ["####......", "........#."], strict=False))
    collective = {"all_reduce|bucket=0|bytes=8|params=1": "....###..."}
    rank = only_rank(measure_overlap(draw_trace(ranges=process | pictures | collective, ranks={PID: 0})))
    assert (rank.reason, rank.overlap_ratio) == (reason, None if reason else 0)
    silent = only_rank(measure_overlap(draw_trace(ranges=process | {"forward": "####"}, ranks={PID: 0})))
    assert silent.reason == NO_COMMUNICATION


@pytest.mark.parametrize(("between", "is_told"), [("B", True), ("b", False)])
def test_communication_between_steps_is_told_beside_figures_of_steps(between: str, is_told: bool) -> None:
    """A quarter of it was launched there, and what hiding all of it gains was told of what steps expose."""
    trace = draw_trace(
        ranges={"step|index=0": "########............", "step|index=1": "..........########.."},
        launches={"main": f"aA......{between}.cC........"},
        streams={7: "aaaa......cccc", 9: f"..AAAA..{2 * between}....CC"},
    )
    result = measure_overlap(trace)
    told = [note for note in result.step_notes if "belongs to no step" in note]
    assert told == (["25 % of communication belongs to no step: figures per step leave it out"] if is_told else [])
    assert [step.comm_ns for step in only_rank(result).steps] == [4, 2]


@pytest.mark.parametrize("is_told", [True, False])
def test_exposed_communication_that_each_step_launches_behind_its_range_is_told(is_told: bool) -> None:
    """As of ranges that end before the last bucket is reduced: 2.6 % of communication, all that is exposed.

    What follows the last step may be no part of it.
    """
    launches, compute, communication = "", "", ""
    for k, hidden, exposed in ("aAX", "bBY", "cCZ"):
        behind = exposed if is_told else "."
        launches += f"{k}{hidden}{38 * '.'}{behind}."
        compute += f"{40 * k}.."
        communication += f".{39 * hidden}{behind}."
    trace = draw_trace(
        ranges={f"step {index}": 42 * index * "." + 40 * "#" for index in range(3)},
        launches={"main": launches},
        streams={7: compute, 9: communication},
    )
    result = measure_overlap(trace)
    told = [note for note in result.step_notes if "belongs to no step" in note]
    assert told == (
        ["67 % of exposed communication belongs to no step: figures per step leave it out"] if is_told else []
    )
    assert [step.exposed_ns for step in only_rank(result).steps] == [0, 0, 0]
    (judged,) = check_run(result, Requirements(max_exposed_ns=0)).verdicts
    assert judged.status == ("unknown" if is_told else "passed")


def test_what_is_launched_between_steps_is_not_said_to_cost_them_nothing() -> None:
    """As where a range names a part of each step: what all of it cost was told as that of steps without any."""
    trace = draw_trace(
        ranges={"step 0": "####......", "step 1": "..........####......"},
        launches={"main": ".a...B.....c...D...."},
        streams={7: "..aa........cc......", 20: "......BBB.......DDD."},
    )
    (run,) = compare_variants([measure_overlap(trace)])
    assert (run.comm_ns, run.exposed_ns, run.blocking_ns, run.gain_at_most) == (None, None, None, None)
    assert (run.step_ns, run.compute_only_ns, run.overlap_ratio) == (4, 2, 0)
    assert "what the rest costs per step is not known, because no step is known to have launched" in gain_headline(run)


def test_no_more_than_a_whole_step_is_said_to_be_gained() -> None:
    """What the first step launched runs beside the others."""
    trace = draw_trace(
        ranges={"step 0": "####........", "step 1": "....####....", "step 2": "........####"},
        launches={"main": "aB..c...d..."},
        streams={7: ".aa..c...d..", 20: "...BBBBBBBBB"},
    )
    (run,) = compare_variants([measure_overlap(trace)])
    assert (run.communicating_step_ns, run.exposed_ns, run.gain_at_most) == (4, 7, None)
    for one in (run, replace(run, blocking_ns=0), replace(run, blocking_ns=2)):
        assert one.gain_at_most is None
        assert gain_headline(one).endswith(
            "is not known, because more communication is exposed in a step than the step lasts."
        )


def test_what_another_stream_waits_for_beside_compute_gains_no_more_than_the_stream_of_compute_is_idle() -> None:
    """As FSDP converts shards on the stream that scatters them, and hooks what they reduced on their own.

    Steps of which 11 % was exposed were said to stand still for 43 %, and that hiding it might gain as much.
    """
    device = Device()
    with device.range("step 0"):
        for _ in range(4):
            device.launch(1, 7, 100, is_collective=False)
            device.record(0, 7, 1)
            device.wait(0, 20, 1)
            device.launch(0, 20, 90, is_collective=True)
            device.record(0, 20, 2)
            device.wait(0, 8, 2)
            device.launch(0, 8, 5, is_collective=False)
        device.synchronize(1)
    (run,) = compare_variants([measure_overlap(device.trace())])
    assert (run.exposed_ns, run.blocking_ns, run.communicating_step_ns) == (90, 4 * 90, 4 * 100 + 90 + 5 + 2)
    spare_ns = 90 + 5 + 2
    assert (run.hideable_ns, round((run.gain_at_most or 0) * (run.communicating_step_ns or 0))) == (spare_ns, spare_ns)
    assert "and a stream stands still for communication for 0.4 µs, so hiding all of it would gain at most 20 %" in (
        gain_headline(run)
    )
    (step,) = measure_overlap(device.trace()).ranks[0].steps
    assert step.length.spare_ns == spare_ns


def test_what_a_step_that_communicates_gains_is_a_share_of_such_a_step() -> None:
    """As where gradients are accumulated: more than all of a step was said to be exposed."""
    trace = draw_trace(
        ranges={"step 0": "####", "step 1": "....####", "step 2": "........##########"},
        launches={"main": "a...b...cD........"},
        streams={7: "aaa.bbb.ccc.......", 20: "...........DDDDDD."},
    )
    (run,) = compare_variants([measure_overlap(trace)])
    assert (run.step_ns, run.communicating_step_ns, run.exposed_ns, run.gain_at_most) == (4, 10, 6, 0.6)
    assert "(60 %) is exposed in the 1 of 3 steps that communicate, so" in gain_headline(run)


def test_a_broadcast_in_each_step_does_not_make_it_one_that_reduces_gradients() -> None:
    """As Lightning's, once a batch, where gradients are accumulated over three."""
    trace = draw_trace(
        ranges={
            "step 0": "####",
            "step 1": "....####",
            "step 2": "........##########",
            "backward": "..##..##..########",
        },
        launches={"main": "B.a.F.c.H.deD....."},
        streams={7: "..a...c...de......", 20: "B...F...H...DDDDDD"},
    )
    (rank,) = measure_overlap(trace).ranks
    assert [(step.comm_ns, step.in_backward) for step in rank.marked_steps] == [(1, 0), (1, 0), (7, 1)]
    assert [step.comm_ns for step in rank.communicating_steps] == [7]
    (run,) = compare_variants([measure_overlap(trace)])
    assert (run.communicating_steps, run.comm_ns) == (1, 7)
    assert "in the 1 of 3 steps that communicate in backward" in gain_headline(run)


def test_communication_of_another_step_in_the_window_is_named() -> None:
    trace = draw_trace(
        ranges={"step 0": "#####.....", "step 1": ".....#####"},
        launches={"main": "aN....b..."},
        streams={7: ".aa......b", 9: "...NNNNN.."},
    )
    first, second = only_rank(measure_overlap(trace)).steps
    assert (first.exposed_ns, first.other_comm_ns) == (5, 0)
    assert (second.window_ns, second.idle_ns, second.other_comm_ns) == (1, 0, 0)


def test_no_communication_is_not_zero_overlap() -> None:
    rank = only_rank(measure_overlap(draw_trace(launches={"main": "a"}, streams={7: "aaa"})))
    assert rank.overlap_ratio is None
    assert rank.reason
    assert rank.comm_ns == 0


def test_a_trace_that_tells_nothing_gives_nothing() -> None:
    rank = only_rank(measure_overlap(draw_trace(ranges={"step 0": "####"})))
    assert (rank.comm_ns, rank.compute_ns, rank.overlap_ratio) == (None, None, None)
    assert "no GPU activities" in (rank.reason or "")
    assert not only_rank(measure_overlap(draw_trace(ranges={"other": "####"}))).steps


def test_steps_are_counted_and_timed_where_nothing_tells_what_was_done_in_them() -> None:
    """As of a CPU job by torch.profiler: 'overlap' said 0 steps, 'info' 4."""
    trace = draw_trace(ranges=[("step 0", "####"), ("step 1", "....###")])
    rank = only_rank(measure_overlap(trace))
    assert [(step.step, step.length.ns) for step in rank.marked_steps] == [(0, 4), (1, 3)]
    for step in rank.steps:
        unknown = {value for name, value in asdict(step).items() if name.endswith("_ns") and name not in _TOLD}
        assert unknown == {None}
        assert {value for name, value in asdict(step.length).items() if name not in ("ns", "start_ns")} == {None}
    assert take_inventory(trace).processes[0].steps == len(rank.marked_steps)


_TOLD = ("start_ns", "host_ns")


def test_an_empty_trace_has_no_ranks() -> None:
    result = measure_overlap(draw_trace())
    assert (result.ranks, result.attribution.activities) == ((), None)


CPU = {
    "process|rank=1|world=2|variant=overlap|backend=gloo|device=cpu": "##############################",
    "step|index=0|warmup=1": "##########....................",
    "step|index=1": "..........####################",
    "forward": "###.......####................",
    "backward": "...####.......########........",
    "synchronize": ".......##.............####....",
    "optimizer": ".........#................####",
    "all_reduce|bucket=0|bytes=8|params=1": "....##.........####...........",
    "all_reduce|bucket=1|bytes=8|params=1": "......##.........#######......",
}


def test_on_a_cpu_the_ranges_are_the_work() -> None:
    result = measure_overlap(draw_trace(ranges=CPU, ranks={PID: 1}))
    rank = only_rank(result)
    assert (result.device, rank.rank, rank.device, rank.kernels) == ("cpu", 1, None, 0)
    assert (rank.collectives, rank.compute_ns) == (2, 16)
    assert (rank.comm_ns, rank.overlapped_ns, rank.exposed_ns) == (9, 7, 2)
    (step,) = rank.steps
    assert (step.step, step.window_ns, step.tail_ns) == (1, 20, 2)
    assert step.compute_only_ns + step.overlapped_ns + step.exposed_ns + step.idle_ns == 20
    assert any("1 warm-up step" in warning for warning in result.warnings)


@pytest.mark.parametrize("lost", ["forward", "optimizer"])
def test_a_host_is_not_said_to_be_idle_where_ranges_do_not_name_its_phases(lost: str) -> None:
    """The ranges of one phase were lost in all steps, and its time was idle."""
    result = measure_overlap(draw_trace(ranges={name: CPU[name] for name in CPU if name != lost}, ranks={PID: 1}))
    rank = only_rank(result)
    (step,) = rank.steps
    assert (step.compute_only_ns, step.idle_ns, step.length.idle_ns) == (None, None, None)
    assert (rank.comm_ns, rank.overlapped_ns, rank.exposed_ns, step.exposed_ns, step.tail_ns) == (9, 7, 2, 2, 2)
    assert any("when the host computed there is not known" in warning for warning in result.warnings)


def test_a_host_that_waits_for_gradients_is_not_said_to_do_without_communication() -> None:
    """All ranges of collectives were lost: it was idle while it waited for them."""
    ranges = {name: picture for name, picture in CPU.items() if not name.startswith("all_reduce")}
    rank = only_rank(measure_overlap(draw_trace(ranges=ranges, ranks={PID: 1}, world_size=2)))
    (step,) = rank.steps
    assert (rank.reason, step.comm_ns, step.idle_ns) == (NO_COLLECTIVE, None, None)


def test_a_step_on_a_cpu_of_which_nothing_was_recorded_does_not_count() -> None:
    """It was said to do without communication, and to be idle."""
    lost = {"step|index=7": "#" * 10} | {name: "." * 10 + picture for name, picture in CPU.items()}
    result = measure_overlap(draw_trace(ranges=lost, ranks={PID: 1}))
    rank = only_rank(result)
    assert [step.step for step in rank.steps] == [step.step for step in rank.communicating_steps] == [1]
    (left_out,) = (note for note in result.warnings if isinstance(note, Doubt))
    assert left_out == "step 7 left out: nothing that its host did was recorded in it"


@pytest.mark.parametrize(("length", "counted"), [(1, [7, 1]), (10, [1])])
def test_a_step_on_a_cpu_without_the_time_to_do_anything_skipped_its_batch(length: int, counted: list[int]) -> None:
    steps = {"step|index=7": "#" * length} | {name: "." * 10 + picture for name, picture in CPU.items()}
    result = measure_overlap(draw_trace(ranges=steps, ranks={PID: 1}))
    assert [step.step for step in only_rank(result).steps] == counted


def test_an_evaluation_beside_what_the_step_before_it_launched_counts() -> None:
    """Gloo's thread noted the end of a collective late: 'ranges of phases seem to be recorded only in part'."""
    ranges = {
        "forward": "##........" * 4,
        "backward": "..#####............." + "..#####..." * 2,
        "all_reduce|bucket=0|bytes=8|params=1": ".....######........." + ".....##..." * 2,
    }
    steps = {f"step|index={number}": "." * 10 * number + "#" * 10 for number in range(4)}
    result = measure_overlap(draw_trace(ranges=steps | ranges, ranks={PID: 1}))
    assert [step.step for step in only_rank(result).steps] == [0, 1, 2, 3]


def test_a_step_on_a_cpu_that_only_computes_counts() -> None:
    """It accumulates gradients."""
    accumulates = {"step|index=7": "##########", "forward": "####......", "backward": "....######"}
    ranges = accumulates | {name: accumulates.get(name, "." * 10) + picture for name, picture in CPU.items()}
    result = measure_overlap(draw_trace(ranges=ranges, ranks={PID: 1}))
    assert [(step.step, step.collectives) for step in only_rank(result).steps] == [(7, 0), (1, 2)]
    assert not any("left out: nothing" in note for note in result.warnings)


def test_a_frame_has_a_value_per_cell() -> None:
    frame = measure_overlap(draw_trace(ranges=CPU, ranks={PID: 1})).to_frame()
    assert not [name for name in frame if isinstance(frame[name][0], (tuple, list))]


@pytest.mark.parametrize(
    ("lost", "counted"),
    [
        ("", [0, 1, 2, 3]),
        ("backward", [0, 1, 3]),  # all of its communication seemed to be exposed
        ("forward", [0, 1, 3]),  # it seemed to compute less
        ("all_reduce|bucket=0|bytes=8|params=1", [0, 1, 3]),  # it seemed to do without communication
        ("optimizer", [0, 1, 2, 3]),  # as where gradients are accumulated
    ],
)
def test_a_step_on_a_cpu_of_which_ranges_were_lost_does_not_count(lost: str, counted: list[int]) -> None:
    pictures = {
        "forward": "##........",
        "backward": "..####....",
        "all_reduce|bucket=0|bytes=8|params=1": "...####...",
        "synchronize": "......#...",
        "optimizer": ".......##.",
    }
    steps = {f"step|index={number}": "." * 10 * number + "#" * 10 for number in range(4)}
    ranges = {
        name: picture * 2 + ("." * 10 if name == lost else picture) + picture for name, picture in pictures.items()
    }
    result = measure_overlap(draw_trace(ranges=steps | ranges, ranks={PID: 1}))
    assert [step.step for step in only_rank(result).steps] == counted
    told = "step 2 left out: ranges of phases seem to be recorded only in part in it"
    assert (told in result.warnings) is (len(counted) < 4)


def test_micro_batches_that_wait_for_nothing_have_lost_nothing() -> None:
    """A loop that calls ``synchronize`` in each step, but communicates in every second one, lost half of its steps."""
    ranges = {
        "forward": "##........##........" * 2,
        "backward": "..####......####...." * 2,
        "all_reduce|bucket=0|bytes=8|params=1": "............####...." * 2,
        "synchronize": "......#.........##.." * 2,
    }
    steps = {f"step|index={number}": "." * 10 * number + "#" * 10 for number in range(4)}
    result = measure_overlap(draw_trace(ranges=steps | ranges, ranks={PID: 1}))
    assert [step.step for step in only_rank(result).steps] == [0, 1, 2, 3]


def test_without_calls_it_is_not_known_that_nothing_stood_still_in_a_step() -> None:
    """No collective is known to be of the step, and it was said to stand still for none."""
    whole = {"ranges": {"step 0": "########"}, "streams": {7: ".aa..bb.", 9: "..NNN..."}}
    (step,) = only_rank(measure_overlap(draw_trace(**whole))).steps
    assert (step.length.exposed_ns, step.length.blocking_ns, step.blocking_ns) == (2, None, None)


def test_waiting_inside_backward_is_not_compute() -> None:
    """Torch's DDP waits for its buckets inside backward."""
    trace = draw_trace(
        ranges=[
            ("process|rank=0", "##########"),
            ("step|index=0", "##########"),
            ("backward", "########.."),
            ("synchronize", ".....###.."),
            ("all_reduce|bucket=0|bytes=8|params=1", "...#####.."),
        ],
        ranks={PID: 0},
    )
    rank = only_rank(measure_overlap(trace))
    assert (rank.compute_ns, rank.comm_ns, rank.overlapped_ns) == (5, 5, 2)
    assert rank.steps[0].tail_ns == 3


def test_an_optimizer_that_steps_in_backward_neither_ends_nor_hides_it_on_a_cpu() -> None:
    rank = only_rank(measure_overlap(draw_trace(ranges=STEPPING, ranks={PID: 0})))
    (step,) = rank.steps
    assert (rank.compute_ns, rank.comm_ns, rank.overlapped_ns, rank.exposed_ns) == (21, 16, 13, 3)
    assert rank.backward_overlapped_ns == 11, "what the optimizer hides is not hidden by backward"
    assert step.tail_ns == 3, "after the end of backward at 17, not after the first optimizer step at 9"
    assert (step.compute_only_ns, step.overlapped_ns, step.exposed_ns, step.idle_ns) == (8, 13, 3, 0)


def test_an_optimizer_that_steps_in_backward_neither_ends_nor_hides_it_on_a_gpu() -> None:
    trace = draw_trace(
        ranges={
            "step 0": "##################",
            "forward": "##................",
            "backward": "..##########......",
            "optimizer|bucket=0": ".....##...........",
        },
        launches={"main": "a", "pt_autograd_0": "..bN.o.c.M"},
        streams={
            7: ".aabbb.ooocccc....",
            9: "......NN......MMM.",
        },
    )
    rank = only_rank(measure_overlap(trace))
    (step,) = rank.steps
    assert (rank.comm_ns, rank.overlapped_ns, rank.backward_overlapped_ns) == (5, 1, 0)
    assert (step.exposed_ns, step.tail_ns) == (4, 3), "the instant before the optimizer's kernel is no tail"
    assert (step.window_ns, step.compute_only_ns, step.idle_ns) == (16, 11, 0)


def test_gloo_with_tensors_on_a_gpu_communicates_on_the_host() -> None:
    trace = draw_trace(
        ranges={
            "process|rank=0": "##########",
            "step|index=0": "##########",
            "backward": "#####.....",
            "all_reduce|bucket=0|bytes=8|params=1": "...####...",
        },
        launches={"main": "a........."},
        streams={7: ".aaaa....."},
    )
    result = measure_overlap(trace)
    rank = only_rank(result)
    assert (result.device, rank.device, rank.collectives, rank.kernels) == ("cuda", 0, 1, 1)
    assert (rank.comm_ns, rank.overlapped_ns) == (4, 2)


def test_gloo_begins_when_the_data_leaves_the_gpu() -> None:
    """Seen on an H200: naive "hid" 28 % of its communication, which was its host's wait for backward's kernels."""
    trace = draw_trace(
        ranges={
            "process|rank=0": "##############",
            "step|index=0": "##############",
            "backward": "##............",
            "synchronize": "..########....",
            "all_reduce|bucket=0|bytes=8|params=1": ".#####........",
            "all_reduce|bucket=1|bytes=8|params=1": "..########....",
        },
        launches={"main": "a12...........", "pt_gloo": "....3..4......"},
        streams={7: "aaaa..........", 8: "....1...2.....", 9: ".....3...4...."},
    )
    result = measure_overlap(trace)
    rank = only_rank(result)
    assert (rank.comm_ns, rank.overlapped_ns, rank.exposed_ns, rank.blocking_ns) == (4, 0, 4, 4)
    assert any(
        note.endswith("each collective begins with its copy from the GPU to the host") for note in result.warnings
    )


def test_a_copy_that_begins_when_its_range_ends_takes_no_bucket_away() -> None:
    trace = draw_trace(
        ranges={
            "process|rank=0": "##############",
            "step|index=0": "##############",
            "backward": "##............",
            "all_reduce|bucket=4|bytes=8|params=1": ".#####........",
        },
        launches={"main": "a12..........."},
        streams={7: "aaaa..........", 8: "......1.2....."},
    )
    (collective,) = collectives_of(trace)
    assert (collective.start_ns, collective.end_ns, collective.bucket, collective.bytes) == (6, 6, 4, 8)


GLOO_ON_A_GPU = {
    "process|rank=0": "##########",
    "step|index=0": "##########",
    "backward": "##........",
    "all_reduce|bucket=0|bytes=8|params=1": ".#####....",
}


def test_gloo_without_its_copies_begins_at_the_launch_and_that_is_said() -> None:
    trace = draw_trace(
        ranges=GLOO_ON_A_GPU,
        launches={"main": "a........."},
        streams={7: "aaaa......"},
    )
    result = measure_overlap(trace)
    assert (only_rank(result).comm_ns, only_rank(result).overlapped_ns) == (5, 3)
    assert any("no copy to the host was recorded for 1 of 1 collectives" in note for note in result.warnings)


def test_if_the_launch_of_a_copy_to_gloo_is_lost_it_is_not_known_what_is_hidden() -> None:
    """The collective seemed to begin with its range, beside all of the compute: a gate on hidden time passed."""
    trace = draw_trace(
        ranges=GLOO_ON_A_GPU,
        launches={"main": "0a........"},
        streams={7: ".aaa......", 8: "0...1....."},
    )
    rank = only_rank(measure_overlap(trace))
    assert (rank.reason, rank.comm_ns, rank.overlapped_ns, rank.exposed_ns) == (NO_BEGIN, None, None, None)
    (step,) = rank.steps
    assert (step.comm_ns, step.overlapped_ns, step.exposed_ns) == (None, None, None)


def test_a_device_that_computes_while_its_host_waits_for_gloo_does_not_stand_still() -> None:
    """Seen on an H200: a step of 298 ms "stood still" for 256 ms, 71 of them while backward's kernels ran."""
    trace = draw_trace(
        ranges={
            "process|rank=0": "##########",
            "step|index=0": "##########",
            "backward": "###.......",
            "synchronize": "...#####..",
            "all_reduce|bucket=0|bytes=8|params=1": "...####...",
        },
        launches={"main": "a........."},
        streams={7: ".aaaa....."},
    )
    rank = only_rank(measure_overlap(trace))
    assert (rank.exposed_ns, rank.blocking_ns) == (2, 2)


def test_ranks_of_several_files_become_one_result() -> None:
    first, second = (
        measure_overlap(draw_trace(ranges=CPU, ranks={PID: number}, path=f"x.rank{number}.json")) for number in (0, 1)
    )
    merged = merge_ranks([first, second])
    assert [rank.rank for rank in merged.ranks] == [0, 1]
    assert merged.attribution.events == 2 * first.attribution.events
    assert merged.warnings == first.warnings, "the same warning is said once"


def test_files_of_two_profilers_are_not_said_to_be_of_one() -> None:
    first = replace(measure_overlap(draw_trace(ranges=CPU, ranks={PID: 0}, path="x.rank0.json")), source="kineto")
    second = replace(first, source="nsys-sqlite", producer="2024.6.2")
    assert profiler_name(merge_ranks([first, first])) == profiler_name(first)
    assert profiler_name(merge_ranks([first, second])) == "torch.profiler and exported by nsys 2024.6.2"


@given(st.text("ab.", min_size=30, max_size=30), st.text("N.", min_size=30, max_size=30), st.text("1.", min_size=30))
def test_identities_hold_for_any_schedule(compute: str, communication: str, copies: str) -> None:
    """Every run of equal characters is a kernel; those of one character are launched by one call."""
    trace = draw_trace(
        ranges={"step 0": "#" * 15, "step 1": "." * 15 + "#" * 15, "backward": "." * 8 + "#" * 6},
        launches={"main": "a......N.......b1"},
        streams={7: compute, 9: communication, 11: copies[:30]},
    )
    for rank in measure_overlap(trace).ranks:
        assert rank.overlapped_ns + rank.exposed_ns == rank.comm_ns
        for step in rank.steps:
            assert step.overlapped_ns + step.exposed_ns == step.comm_ns
            parts = (
                step.compute_only_ns,
                step.overlapped_ns,
                step.exposed_ns,
                step.exposed_memory_ns,
                step.idle_ns,
            )
            assert sum(parts) == step.window_ns
            assert min(parts) >= 0
            assert 0 <= step.other_comm_ns <= step.idle_ns


def test_what_prepares_a_collective_counts_with_it(tmp_path: Path) -> None:
    """A dispatch and a combine of DeepEP, each after a kernel that tells peers how much will come; its time counts."""
    names = ("internode::get_dispatch_layout<256>", "intranode::notify_dispatch<8>", "intranode::dispatch<8, 768>")
    names += ("intranode::cached_notify_combine<8>", "intranode::combine<__nv_bfloat16, 8>")
    kernels = [
        Kernel(f"void deep_ep::{name}(...)", 10 * at, 10 * at + 6, launch=at, thread=1, stream=9)
        for at, name in enumerate(names, 1)
    ]
    trace = load_trace(write_capture(tmp_path / "x.sqlite", Capture(kernels, [Range("step 0", 0, 9, 1)])))
    (rank,) = measure_overlap(trace).ranks
    assert (rank.collectives, rank.steps[0].collectives, rank.kernels) == (2, 2, 5)
    assert (rank.comm_ns, rank.compute_ns) == (24, 6)
    found = collectives_of(trace)
    assert [(one.op, one.index, one.exposed_ns) for one in found] == [("all_to_all", 0, 12), ("all_to_all", 1, 12)]
    assert [(one.launch_ns, one.start_ns, one.end_ns) for one in found] == [(2, 20, 36), (4, 40, 56)]


@pytest.mark.parametrize(
    ("second", "count"), [(None, 1), ("fill", 1), (NCCL, 2)], ids=["one device", "a context", "two devices"]
)
def test_a_device_that_a_process_only_touches_is_no_rank(second: str | None, count: int, tmp_path: Path) -> None:
    """A process that makes a context on the first GPU, too, was two ranks of its job, one of unknown overlap."""
    kernels = [Kernel("gemm", 10, 90, 5, 100), Kernel(NCCL, 20, 95, 6, 100, stream=9)]
    if second:
        kernels.append(Kernel(second, 10, 12, 7, 100, device=1))
    result = measure_overlap(load_trace(write_capture(tmp_path / "x.sqlite", Capture(kernels))))
    assert (len(result.ranks), len(result.job_ranks)) == (1 + bool(second), count)
    assert f"· {count} rank" in run("summary", str(tmp_path / "x.sqlite")).stdout
    assert run("check", "--min-overlap", "0", str(tmp_path / "x.sqlite")).exit_code == 0
