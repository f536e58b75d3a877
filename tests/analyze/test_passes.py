"""A step with several passes of backward: each has its own end, tail and lead, and the step sums them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import ddp_prof as dp
from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.analyze.root_cause import explain_run
from ddp_prof.trace import Trace
from tests.drawing import draw_trace
from tests.ingest.test_kineto_json import event, write
from tests.measuring import analysis_of, collectives_of

STEP = "#" * 30


def exposed(trace: Trace) -> list[dict[str, int]]:
    """What is exposed of each collective, by when; the step says the same tail."""
    found = collectives_of(trace)
    (step,) = measure_overlap(trace).ranks[0].steps
    assert sum(one.exposed_ns for one in found) == step.exposed_ns
    assert sum(one.when_ns("tail") for one in found) == step.tail_ns
    return [{when: one.when_ns(when) for when in dict.fromkeys(part.when for part in one.exposed_by)} for one in found]


def leads(trace: Trace) -> list[int | None]:
    return [one.before_backward_end_ns for one in collectives_of(trace)]


def passes(trace: Trace) -> int | None:
    (step,) = measure_overlap(trace).ranks[0].steps
    return step.passes


def accumulating(**more: str) -> Trace:
    """Two micro-batches, each of which reduces its gradients: forward f, backward a; forward g, backward b."""
    return draw_trace(
        ranges=[("step 0", STEP), *more.items()],
        launches={"main": "f..........g", "pt_autograd_0": "...a.N........b.M."},
        streams={7: ".fff.aaa.....ggg.bbb", 9: "......NNNNN........MMMMM"},
    )


class TestMicroBatches:
    def test_what_is_exposed_after_the_first_is_its_tail(self) -> None:
        trace = accumulating(forward="##.........###", backward="..#####......#####")
        assert exposed(trace) == [{"tail": 3}, {"tail": 4}]

    def test_each_starts_before_the_end_of_its_own_backward(self) -> None:
        assert leads(accumulating(forward="##.........###", backward="..#####......#####")) == [2, 1]

    def test_a_lead_of_one_of_them_is_no_median_of_all(self) -> None:
        """Of a GAN's 2 passes, and of a pipeline's 4, one has the collective that is named."""
        trace = accumulating(forward="##.........###", backward="..#####......#####")
        cause = explain_run(analysis_of(trace)).root_cause
        assert cause is not None
        assert (cause.passes, cause.lead_ns, cause.lead_passes) == (2, 1, 1)

    def test_the_step_tells_how_many_there_are(self) -> None:
        assert passes(accumulating(forward="##.........###", backward="..#####......#####")) == 2

    def test_without_ranges_of_phases_what_the_main_thread_launches_parts_them(self) -> None:
        assert exposed(accumulating()) == [{"tail": 3}, {"tail": 4}]
        assert leads(accumulating()) == [2, 1]

    def test_a_thread_that_only_helps_parts_nothing(self) -> None:
        """It computes on the device in the middle of backward, as a data loader does."""
        trace = draw_trace(
            ranges={"step 0": STEP},
            launches={"main": "f", "pt_autograd_0": "...a.N..b", "loader": ".......x"},
            streams={7: ".fff.aaa....bbb", 8: ".......x", 9: "......NNNNN"},
        )
        assert exposed(trace) == [{"backward": 3}]
        assert passes(trace) == 1

    def test_what_forward_launches_is_of_the_next_one(self) -> None:
        """A broadcast of buffers, for which the second forward waits."""
        trace = draw_trace(
            ranges={"step 0": STEP, "forward": "##.......#####", "backward": "..#####.......###"},
            launches={"main": "f........Bg", "pt_autograd_0": "...a..........b"},
            streams={7: ".fff.aaa......ggg.bbb", 9: "..........BBBB"},
        )
        assert [set(part) <= {"outside", "forward"} for part in exposed(trace)] == [True]
        assert leads(trace) == [11]

    def test_a_receive_between_them_is_of_the_next_one(self) -> None:
        """A stage of a pipeline waits for the next micro-batch; it is no tail of the one before."""
        trace = draw_trace(
            ranges={"step 0": STEP, "forward": "##..........##", "backward": "..#####.......###"},
            launches={"main": "f.......R...g", "pt_autograd_0": "...a..........b"},
            streams={7: ".fff.aaa.....ggg.bbb", 9: ".........RRRR"},
        )
        names = tuple("ncclDevKernel_SendRecv(x)" if name == "communication R" else name for name in trace.names)
        assert exposed(replace(trace, names=names)) == [{"outside": 4}]

    def test_what_the_program_waits_for_after_the_first_is_a_blocking_call(self) -> None:
        """As with ``naive``: launched after backward, by the main thread."""
        trace = draw_trace(
            ranges={"step 0": STEP, "forward": "##.........###", "backward": "..####.......####"},
            launches={"main": "f.....N....g.....M", "pt_autograd_0": "...a..........b..."},
            streams={7: ".fff.aa.......ggg.bbb", 9: ".......NNNNN.........MMM"},
        )
        assert [one.blocking for one in collectives_of(trace)] == ["after_backward"] * 2
        assert exposed(trace) == [{"tail": 5}, {"tail": 3}]

    def test_a_reduction_that_lasts_into_the_next_forward_is_tail_all_the_same(self) -> None:
        trace = draw_trace(
            ranges={"step 0": STEP, "forward": "##......######", "backward": "..#####.......####"},
            launches={"main": "f.......gh", "pt_autograd_0": "...a.N.........b"},
            streams={7: ".fff.aaa.gg..hh..bbb", 9: "......NNNNNNNN"},
        )
        assert exposed(trace) == [{"tail": 3}]

    def test_where_two_run_at_once_an_instant_is_of_the_one_that_ends_last(self) -> None:
        """Instant 9 is tail of the first pass; from 10 on, N ends last, which the second one launched."""
        trace = draw_trace(
            ranges={"step 0": STEP, "forward": "##.....##", "backward": "..#####..########"},
            launches={"main": "f......g", "pt_autograd_0": "...a.N....b.M..c"},
            streams={7: ".fff.aaagg.b......cc", 9: "......NNNNNNNNN", 10: ".............MMMM"},
        )
        assert exposed(trace) == [{"tail": 3 - 1}, {"backward": 4}]


def test_backward_of_two_networks_after_the_forward_of_both() -> None:
    """The ranges part them, and an optimizer steps between them."""
    trace = draw_trace(
        ranges={"step 0": STEP, "forward": "##", "backward": "..#####....####", "optimizer": ".......####....##"},
        launches={"main": "f.......o......p", "pt_autograd_0": "...a.N.....b.M."},
        streams={7: ".fff.aaa...oo.bbb.....pp", 9: "......NNNNN....MMMMMM"},
    )
    assert exposed(trace) == [{"tail": 3}, {"tail": 4}]
    assert leads(trace) == [2, 2]


def test_the_same_without_a_range_of_backward() -> None:
    """The main thread launches the optimizer, so it steps after backward."""
    trace = draw_trace(
        ranges={"step 0": STEP, "optimizer": ".......####....##"},
        launches={"main": "f.......o......p", "pt_autograd_0": "...a.N.....b.M."},
        streams={7: ".fff.aaa...oo.bbb.....pp", 9: "......NNNNN....MMMMMM"},
    )
    assert exposed(trace) == [{"tail": 3}, {"tail": 4}]


def test_an_optimizer_in_a_hook_parts_nothing() -> None:
    trace = draw_trace(
        ranges={"step 0": STEP, "backward": "..##########", "optimizer|bucket=0": ".....##"},
        launches={"main": "f", "pt_autograd_0": "...a..oN.b"},
        streams={7: ".fff.aaaoo...bbb", 9: ".........NNNN"},
    )
    assert exposed(trace) == [{"backward": 3}]
    assert passes(trace) == 1


def test_a_closure_within_the_optimizer() -> None:
    """LBFGS: forward and backward several times in ``optimizer.step(closure)``."""
    trace = draw_trace(
        ranges=[
            ("step 0", STEP), ("optimizer", "#" * 28),
            ("forward", "##.........###"), ("backward", "..#####......#####"),
        ],
        launches={"main": "f..........g.......o", "pt_autograd_0": "...a.N........b.M."},
        streams={7: ".fff.aaa.....ggg.bbb....oo", 9: "......NNNNN........MMMMM"},
    )  # fmt: skip
    assert exposed(trace) == [{"tail": 3}, {"tail": 4}]
    assert leads(trace) == [2, 1]


def test_micro_batches_that_only_accumulate_change_nothing() -> None:
    """Three passes, of which the last communicates."""
    trace = draw_trace(
        ranges={"step 0": STEP, "forward": "#...#...#", "backward": ".##..##..#####"},
        launches={"main": "f...g...h", "pt_autograd_0": ".a...b...c.N"},
        streams={7: ".f.a.g.b..h.ccc", 9: "............NNNNN"},
    )
    assert exposed(trace) == [{"tail": 2}]
    assert passes(trace) == 3


def test_on_a_cpu_each_pass_ends_where_the_host_waits() -> None:
    trace = draw_trace(
        ranges=[
            ("process|rank=0|world=2|variant=overlap|backend=gloo|device=cpu", STEP),
            ("step|index=0", STEP),
            ("forward", "###.......###"), ("backward", "...####......####"),
            ("synchronize", ".......###.......###"),
            ("all_reduce|bucket=0|bytes=8|params=1", ".....#####.....#####"),
        ],
        ranks={4242: 0},
    )  # fmt: skip
    assert exposed(trace) == [{"tail": 3}, {"tail": 3}]
    assert leads(trace) == [2, 2]


def test_without_backward_no_pass_is_known() -> None:
    trace = draw_trace(ranges={"step 0": STEP}, launches={"main": "fN"}, streams={7: ".fff", 9: "..NNNN"})
    assert passes(trace) is None


def test_a_collective_of_backward_outside_of_all_steps_is_not_between_phases() -> None:
    """As in the step that the program's end cut off."""
    trace = draw_trace(
        ranges={"step 0": "#" * 10, "backward": ".####......####"},
        launches={"pt_autograd_0": ".a..........N", "main": "..........M"},
        streams={7: "..aa", 9: ".............NNN", 10: "................MMM"},
    )
    found = sorted((part.when, part.ns) for one in collectives_of(trace) for part in one.exposed_by)
    assert found == [("outside", 3), ("unknown", 3)], "M was launched in no phase"


def test_a_closure_within_the_optimizer_on_a_cpu_without_marks(tmp_path: Path) -> None:
    """As in Lightning: what autograd's engine runs there is backward's, but not the optimizer in a hook.

    A second pass steps on one bucket in a hook, within the engine's operator.
    """
    engine = "autograd::engine::evaluate_function: "
    drawn = {
        1: [
            ("user_annotation", "step 1", 0, 120), ("user_annotation", "Optimizer.step#SGD.step", 0, 110),
            ("user_annotation", "DistributedDataParallel.forward", 0, 20), ("cpu_op", "aten::mm", 0, 20),
            ("cpu_op", f"{engine}MmBackward0", 20, 40), ("cpu_op", "aten::mm", 20, 30),
            ("cpu_op", "c10d::allreduce_", 30, 31), ("cpu_op", "aten::mm", 31, 40),
            ("user_annotation", "DistributedDataParallel.forward", 60, 70), ("cpu_op", "aten::mm", 60, 70),
            ("cpu_op", f"{engine}MmBackward0", 70, 90), ("cpu_op", "aten::mm", 70, 80),
            ("cpu_op", "c10d::allreduce_", 80, 81), ("cpu_op", "aten::mm", 86, 90),
            ("user_annotation", "Optimizer.step#Adam.step", 82, 86), ("cpu_op", "aten::add_", 82, 86),
            ("cpu_op", "aten::add_", 100, 110),
        ],
        2: [("user_annotation", "gloo:all_reduce", 35, 60), ("user_annotation", "gloo:all_reduce", 85, 98)],
    }  # fmt: skip
    events = [
        event(kind, name, str(start), str(end - start), tid=thread)
        for thread, of_thread in drawn.items()
        for kind, name, start, end in of_thread
    ]
    (run,) = dp.load_runs(write(tmp_path / "x.json", events))
    (step,) = run.overlap().ranks[0].steps
    assert (step.passes, step.tail_ns, step.exposed_ns) == (2, 28_000, 28_000)
    assert step.backward_overlapped_ns == (5 + 4) * 1_000, "but for the optimizer in its hook"


def test_the_compute_of_another_step_begins_no_pass() -> None:
    """The clocks disagree: y of step 1 runs between two passes of step 0, before g."""
    pause = "." * 40
    trace = draw_trace(
        ranges=[("step 0", pause + "#" * 17), ("step 1", pause + "." * 17 + "#" * 13)],
        launches={"main": pause + "f....g............y", "pt_autograd_0": pause + ".a.N....b........c.d"},
        streams={7: "f.aa....gg.bb", 8: "c....y.......d", 9: "......NN"},
    )
    (tail,) = collectives_of(trace)
    assert tail.when_ns("tail") == 2, "N follows y, and is of the first pass all the same"


@pytest.mark.parametrize("pause", [0, 40], ids=["one clock", "another clock"])
def test_what_is_launched_before_backward_and_runs_beside_it_begins_no_pass(pause: int) -> None:
    """Forward copies parameters on a stream of its own, as FSDP does: it runs between a and b, on whatever clock."""
    before = "." * pause
    trace = draw_trace(
        ranges=[
            ("step 0", before + "#" * 20),
            ("forward", before + "####"),
            ("backward", before + "....######"),
        ],
        launches={"main": before + "fpgh", "pt_autograd_0": before + "....a.b.N"},
        streams={7: "...." + "f.gh.aaa....bbb", 8: "...." + ".......pppp", 9: "...." + "..........NNNNNNNN"},
    )
    (step,) = measure_overlap(trace).ranks[0].steps
    assert (step.passes, step.tail_ns) == (1, 3)
