from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.analyze.core import steps as steps_module
from ddp_prof.analyze.core.steps import Steps, find_phases
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.intervals import innermost
from ddp_prof.analyze.inventory import take_inventory
from ddp_prof.errors import TraceError
from ddp_prof.range_names import PHASES
from ddp_prof.trace import UNKNOWN
from tests.drawing import PID, column, draw_trace, runs


def find_steps_and_notes(trace, process: int, pattern: str | None = None) -> tuple[Steps, tuple[str, ...]]:
    found = steps_module.find_steps(trace, process, pattern)
    assert (found.left_out > 0) == any("left out" in note for note in found.notes)
    return found.steps, found.notes


def find_steps(trace, process: int, pattern: str | None = None) -> Steps:
    steps, notes = find_steps_and_notes(trace, process, pattern)
    assert notes == ()
    return steps


def test_the_inner_range_wins() -> None:
    outer, inner = "##########....", "...###........"
    want = [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, UNKNOWN]
    ranges = [runs(outer)[0][1:], runs(inner)[0][1:]]
    got = innermost(column(a for a, _ in ranges), column(b for _, b in ranges), column(range(11)))
    assert got.tolist() == want


def test_a_step_in_which_the_program_ended_is_left_out() -> None:
    """Also where it holds phases, as of a second optimizer or of a test after training."""
    ranges = [
        ("step|index=0", "####............"),
        ("step|index=1", "....####........"),
        ("step|index=2", "........########"),
        ("forward", "..#...#...####.."),
        ("step|index=2|unfinished=1", "..............#."),
    ]
    trace = draw_trace(ranges=ranges)
    last = trace.spans.name_id == trace.names.index("step|index=2")
    for one in (trace, replace(trace, spans=replace(trace.spans, is_open=column(last)))):
        steps, notes = find_steps_and_notes(one, PID)
        assert steps.number.tolist() == [0, 1]
        assert notes == ("1 range that could be a step left out: the program ended in it",)


def test_a_step_is_warm_up_if_that_is_known_in_it_only() -> None:
    ranges = [
        ("step|index=0|warmup=1", "####............"),
        ("step|index=1", "....####........"),
        ("step|index=2", "........########"),
        ("forward", "..#...#...####.."),
        ("step|index=1|late_warmup=1", "......#........."),
    ]
    steps, notes = find_steps_and_notes(draw_trace(ranges=ranges), PID)
    assert steps.number.tolist() == [0, 1, 2]
    assert steps.warmup.tolist() == [True, True, False]
    assert notes == ()


@pytest.mark.parametrize(("pattern", "hints"), [(r"sample_(\d+)", 1), (r"sample_(\d+)$", 0), (r"sample_(\d+)\.", 0)])
def test_a_pattern_that_fits_the_beginning_of_other_names_gets_a_hint(pattern: str, hints: int) -> None:
    ranges = [
        ("sample_0", "########........"),
        ("sample_1", "........########"),
        ("sample_0.blocks", "..##............"),
        ("sample_1.blocks", "..........##...."),
    ]
    _, notes = find_steps_and_notes(draw_trace(ranges=ranges), PID, pattern)
    found = [note for note in notes if "end the pattern with $" in note]
    assert len(found) == hints
    assert all("'sample_0.blocks'" in note for note in found)


TIMES = st.lists(st.integers(-2, 60), max_size=20)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), max_size=10), TIMES)
def test_innermost_is_the_latest_start_then_the_shortest(ranges: list[tuple[int, int]], times: list[int]) -> None:
    check_innermost([(start, start + length) for start, length in ranges], times)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=10), TIMES, st.randoms())
def test_of_ranges_one_after_another_the_innermost_is_the_only_one(
    ranges: list[tuple[int, int]], times: list[int], random: Random
) -> None:
    """Some touch, and some are empty."""
    edges = [0, *accumulate(part for both in ranges for part in both)]
    one_after_another = list(zip(edges[1::2], edges[2::2], strict=True))
    random.shuffle(one_after_another)
    check_innermost(one_after_another, times)


def check_innermost(ranges: list[tuple[int, int]], times: list[int]) -> None:
    starts, ends = column(start for start, _ in ranges), column(end for _, end in ranges)
    for time, got in zip(times, innermost(starts, ends, column(times)), strict=True):
        holding = [(start, -end) for start, end in ranges if start <= time < end]
        if holding:
            assert (int(starts[got]), -int(ends[got])) == max(holding)
        else:
            assert got == UNKNOWN


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        (["step|index=3", "step|index=4|warmup=1"], [3, 4]),
        (["step 7", "step 8"], [7, 8]),
        (["step_0", "step_1"], [0, 1]),
        (["Iteration 12", "iteration 13"], [12, 13]),
        (["ProfilerStep#551", "ProfilerStep#552"], [551, 552]),
        (["training_step_5", "training_step_6"], [5, 6]),
        (["step-1", "iter:2"], [1, 2]),
        (["Rank 1 Step 5", "rank_1_iteration_6"], [5, 6]),
        (["iteration[257,261)", "iteration[261,265)"], [257, 261]),  # Grendel-GS's
        (["train_step[5]", "step[6/10]"], [5, 6]),
        (["measured_step_5", "measurement_step_6"], [5, 6]),
        ([f"step {10**18}", "step 7"], [UNKNOWN, 7]),  # too long for a number
    ],
    ids=lambda value: str(value[0]),
)
def test_steps_are_found_by_their_usual_names(names: list[str], numbers: list[int]) -> None:
    trace = draw_trace(ranges={names[0]: "####......", names[1]: ".....#####", "setup": "##########"})
    assert find_steps(trace, PID).number.tolist() == numbers


def test_ours_come_before_others() -> None:
    trace = draw_trace(ranges={"step|index=1": "####", "ProfilerStep#9": "####"})
    assert find_steps(trace, PID).number.tolist() == [1]


@pytest.mark.parametrize(
    ("backward", "last", "kept"),
    [
        ("##..##", "....####", [0, 1]),
        ("##......", "....####", [0]),
        (".####.....", "....######", [0]),  # a phase of the step before ends in it
        (".#######", "....####", [0, 1]),  # one phase over both
    ],
)
def test_a_last_step_in_which_the_program_ended_is_left_out(backward: str, last: str, kept: list[int]) -> None:
    trace = draw_trace(ranges={"ProfilerStep#0": "####", "ProfilerStep#1": last, "backward": backward})
    (rank,) = find_rank_events(trace)
    assert rank.steps.number.tolist() == kept
    assert [process.steps for process in take_inventory(trace).processes] == [len(kept)]
    assert [note.partition(":")[0] for note in rank.step_notes] == ([] if kept == [0, 1] else ["step 1 left out"])


def test_warmup_is_marked() -> None:
    trace = draw_trace(ranges={"step|index=0|warmup=1": "##...", "step|index=1": "...##"})
    assert find_steps(trace, PID).warmup.tolist() == [True, False]


def test_a_pattern_of_the_user_takes_its_first_group_as_the_number() -> None:
    trace = draw_trace(ranges={"epoch 1 batch 17": "####", "step 1": "####"})
    assert find_steps(trace, PID, r"batch (\d+)").number.tolist() == [17]
    assert find_steps(trace, PID, r"batch").number.tolist() == [UNKNOWN]


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("forward", "forward"),
        ("Backward", "backward"),
        ("## backward ##", "backward"),
        ("loss.backward", "backward"),
        ("Loss Backward", "backward"),
        ("BWD_STEP", "backward"),
        ("Forward 3", "forward"),  # torch.distributed.pipelining numbers micro-batches
        ("Backward 3", "backward"),
        ("backward_step[3]", "backward"),
        ("Backward pass 3/10", "backward"),
        ("model_backward", "backward"),
        ("train/backward", "backward"),
        ("Train/Forward", "forward"),
        ("train/optimizer_step", "optimizer"),
        ("Optimizer_Update", "optimizer"),
        ("GradSync", "synchronize"),
        ("train/final_forward", None),
        ("train/zero_grad", None),
        ("val/forward", None),
        ("epoch_3_forward", None),
        ("optimizer_init", None),
        ("Backward_Layer_3", None),
        ("backward[3].sync_tick.0", None),
        ("backward_step", "backward"),
        ("forward_step", "forward"),
        ("FullyShardedDataParallel.forward", "forward"),
        ("DataParallel.forward", "forward"),
        ("optimizer.step()", "optimizer"),
        ("optim_step", "optimizer"),
        ("bwd", "backward"),
        ("optimizer_step", "optimizer"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("DeepSpeedEngine.forward", "forward"),
        ("DeepSpeedEngine.backward", "backward"),
        ("DeepSpeedEngine.step", "optimizer"),
        ("[Strategy]SingleDeviceStrategy.training_step", "forward"),
        ("[pl][profile][Strategy]DDPStrategy.training_step", "forward"),
        ("[pl][profile][Strategy]DDPStrategy.backward", "backward"),
        ("[pl][profile][Strategy]FSDPStrategy.optimizer_step", "optimizer"),
        ("[pl][profile][LightningModule]MyModel.optimizer_step", "optimizer"),
        ("[pl][profile][LightningModule]MyModel.on_after_backward", None),
        ("[pl][profile][Strategy]DDPStrategy.pre_backward", None),
        ("synchronize", "synchronize"),
        ("grad_sync", "synchronize"),
        ("gradient_sync_wait", "synchronize"),
        ("finish_gradient_synchronization", "synchronize"),
        ("sync_gradients", "synchronize"),
        ("reduce-grads", "synchronize"),  # fairseq's
        ("gradient clipping", None),
        ("sync_tick", None),
        ("ncclAllReduce", None),
        ("forwarder", None),
        ("backward_hooks_setup", None),
    ],
)
def test_phases_are_found_by_their_usual_names(name: str, phase: str | None) -> None:
    kinds = find_phases(draw_trace(ranges={name: "##"}), PID).kind.tolist()
    assert kinds == ([] if phase is None else [PHASES.index(phase)])


class TestRangesThatOverlap:
    def test_of_nested_ones_the_inner_are_the_steps(self) -> None:
        trace = draw_trace(ranges={"epoch step 1": "############", "step 5": ".####", "step 6": "......#####"})
        steps, (note,) = find_steps_and_notes(trace, PID, r"step (\d+)")
        assert steps.number.tolist() == [5, 6]
        assert note == "1 range that could be a step left out: it, or most ranges of its name, contain others"

    def test_outer_ones_that_hold_none_are_not_mixed_with_inner_ones_of_others(self) -> None:
        outer = [("step 0", "#####"), ("step 1", ".....#####"), ("step 2", "..........#####")]
        inner = [("iter 7", ".##"), ("iter 8", "...##"), ("iter 9", ".....####")]
        steps, (note,) = find_steps_and_notes(draw_trace(ranges=[*outer, *inner]), PID)
        assert steps.number.tolist() == [7, 8, 9]
        assert note.startswith("3 ranges")

    def test_a_single_one_that_holds_others_makes_no_outer_ones_of_its_name(self) -> None:
        """As one in which a model is validated; nor do those of one name that hold each other."""
        outer = [("step 0", "#####"), ("step 1", ".....#####"), ("step 2", "..........#####")]
        for inner in ("iter 7", "step 7"):
            steps, (note,) = find_steps_and_notes(draw_trace(ranges=[*outer, (inner, "......##")]), PID)
            assert steps.number.tolist() == [0, 7, 2]
            assert note.startswith("1 range ")

    def test_half_of_the_ranges_of_a_name_are_not_most_of_them(self) -> None:
        ranges = {"step a0": "####....", "step a1": "....####", "step b0": ".##....."}
        steps, (note,) = find_steps_and_notes(draw_trace(ranges=ranges), PID, "step ")
        assert list(zip(steps.start_ns.tolist(), steps.end_ns.tolist(), strict=True)) == [(1, 3), (4, 8)]
        assert note.startswith("1 range ")

    def test_where_most_ranges_of_the_only_name_hold_others_the_innermost_is_the_step(self) -> None:
        ranges = {"step 0": "########", "step 1": ".######.", "step 2": "..####.."}
        steps, (note,) = find_steps_and_notes(draw_trace(ranges=ranges), PID)
        assert (steps.number.tolist(), note[:8]) == ([2], "2 ranges")

    def test_of_two_threads_the_one_with_more_counts(self) -> None:
        trace = draw_trace(
            ranges=[("step 0", "####"), ("step 1", "....####"), ("step 2", "........####"), ("step 0", ".###")]
        )
        loader = [PID + 7 if end - start == 3 else PID for start, end in zip(*spans_of(trace), strict=True)]
        trace = replace(trace, spans=replace(trace.spans, lane=column(loader)))
        steps, (note,) = find_steps_and_notes(trace, PID)
        assert steps.number.tolist() == [0, 1, 2]
        assert f"it overlaps those of thread {PID}" in note

    @pytest.mark.parametrize("more", [True, False])
    def test_of_two_threads_with_as_many_none_is_said_to_have_most(self, more: bool) -> None:
        """Where none is the first of the process, as torch.profiler does not tell."""
        trace = draw_trace(ranges=[("step 0", "####"), ("step 0", ".####"), *[("step 1", "......##")] * more])
        threads = [PID + 7 if start == 1 else PID + 3 for start, _ in zip(*spans_of(trace), strict=True)]
        trace = replace(trace, spans=replace(trace.spans, lane=column(threads)))
        _, (note,) = find_steps_and_notes(trace, PID)
        why = f"it overlaps those of thread {PID + 3} (no thread has more)"
        assert note == f"1 range that could be a step left out: {why}"

    def test_of_two_threads_the_first_of_the_process_counts(self) -> None:
        """A data loader reads ahead, so that it may have more of them than the thread that trains."""
        ranges = [("batch 0", "....####"), ("batch 0", "####"), ("batch 1", "....###"), ("batch 2", "......###")]
        trace = draw_trace(ranges=ranges)
        threads = [PID if span == (4, 8) else PID + 7 for span in zip(*spans_of(trace), strict=True)]
        steps, (note,) = find_steps_and_notes(replace(trace, spans=replace(trace.spans, lane=column(threads))), PID)
        assert steps.start_ns.tolist() == [4]
        why = f"they overlap those of thread {PID} (the first of the process)"
        assert note == f"3 ranges that could be steps left out: {why}"

    @pytest.mark.parametrize("behind", [0, 1])
    def test_of_two_programs_that_number_the_steps_one_counts(self, behind: int) -> None:
        """As where a trainer and its script each step a profiler of torch: there were twice as many steps."""
        at = [(number, "." * (20 * number - 40)) for number in (2, 3, 4)]
        ranges = [(f"ProfilerStep#{number}", before + "#" * 20) for number, before in at]
        ranges += [(f"ProfilerStep#{number - behind}", before + "..." + "#" * 20) for number, before in at]
        steps, (note,) = find_steps_and_notes(draw_trace(ranges=ranges), PID)
        assert steps.number.tolist() == [2, 3, 4]
        assert steps.end_ns.tolist() == [20, 40, 60]
        assert note == "3 ranges that could be steps left out: another range marks the same step"

    @pytest.mark.parametrize("length", [21, 28])
    def test_where_numbers_begin_anew_each_step_counts(self, length: int) -> None:
        """Of two epochs, of which each step runs on a little, or begins before the one before it has ended."""
        ranges = [(f"step {at % 2}", "." * 20 * at + "#" * length) for at in range(4)]
        steps, (note,) = find_steps_and_notes(draw_trace(ranges=ranges), PID)
        assert steps.number.tolist() == [0, 1, 0, 1]
        assert note == "ranges of steps that end after the next step begins: 3; each is taken to end there"

    def test_of_others_each_ends_where_the_next_one_starts(self) -> None:
        """As of a scheduler that begins a step before the one before it has ended."""
        trace = draw_trace(ranges=[("step 0", "####"), ("step 1", "...####"), ("step 2", "........####")])
        steps, (note,) = find_steps_and_notes(trace, PID)
        assert (steps.number.tolist(), steps.end_ns.tolist()) == ([0, 1, 2], [3, 7, 12])
        assert note.startswith("ranges of steps that end after the next step begins: 1;")


def spans_of(trace):
    return trace.spans.start_ns.tolist(), trace.spans.end_ns.tolist()


def test_a_range_left_open_is_no_step() -> None:
    trace = draw_trace(ranges={"step 0": "####", "step 1": "....####"})
    trace = replace(trace, spans=replace(trace.spans, is_open=column([0, 1])))
    steps, (note,) = find_steps_and_notes(trace, PID)
    assert steps.number.tolist() == [0]
    assert "still open when the recording ended" in note


@pytest.mark.parametrize("option", ["step", "backward"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_pattern_that_matches_no_range_names_the_ranges_there_are(option: str, device: str) -> None:
    on_device = {"launches": {"main": "a"}, "streams": {7: ".a"}} if device == "cuda" else {}
    trace = draw_trace(ranges={"iter_17": "####", "backward": "#"}, **on_device)
    expected = rf"no range matches --{option}-range 'batch': the ranges there are: 'iter_N', 'backward'"
    with pytest.raises(TraceError, match=expected):
        find_rank_events(trace, *(("batch", None) if option == "step" else (None, "batch")))


def test_a_pattern_that_matches_no_range_is_told_where_gloo_communicates() -> None:
    """A note on what counts as communication was taken for one on ranges that match."""
    process = "process|rank=0|world=2|variant=ResNet|backend=gloo|device=cpu"
    trace = draw_trace(ranges={process: "#########", "iter_17": ".######", "gloo:all_reduce": "..###"})
    with pytest.raises(TraceError, match="no range matches --step-range 'batch'"):
        find_rank_events(trace, "batch")
