"""Steps that are told apart, and backward found on threads beside the one that opens the steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from ddp_prof.analyze.collectives.straggler import measure_skew
from ddp_prof.analyze.core.trace_ranks import UNMARKED, find_rank_events
from ddp_prof.analyze.inventory import take_inventory
from ddp_prof.analyze.overlap import RankOverlap, measure_overlap
from ddp_prof.analyze.why_unknown import NO_BACKWARD, UNMARKED_WAITS
from ddp_prof.ingest.load import load_trace
from ddp_prof.range_names import PHASES
from ddp_prof.trace import NO_TIME, Category, CollectiveCalls, Operators, Trace
from tests.drawing import PID, column, draw_trace, runs
from tests.measuring import analysis_of, collectives_of
from tests.nsys_factory import Capture, Range, write_capture

EPOCHS = [
    ("process|rank=0|world=2", "####################"),
    ("step|index=0", "#########..........."),
    ("backward", ".####..............."),
    ("all_reduce|bucket=0|bytes=8", "...####............."),
    ("step|index=0", "..........#########."),
    ("backward", "...........####....."),
    ("all_reduce|bucket=0|bytes=8", ".............#####.."),
]
"""Two epochs, each of which counts its steps anew."""


def epochs(rank: int):
    return draw_trace(ranges=EPOCHS, ranks={PID: rank}, world_size=2, path=f"x.rank{rank}.json")


class TestStepNumbersThatRepeat:
    def test_each_step_has_a_key_of_its_own(self) -> None:
        (rank,) = find_rank_events(epochs(0))
        assert rank.steps.number.tolist() == [0, 0]
        assert rank.step_keys.tolist() == [0, 1]

    def test_collectives_of_two_steps_are_not_one(self) -> None:
        found = collectives_of(epochs(0))
        assert [(collective.step, collective.step_key, collective.index) for collective in found] == [
            (0, 0, 0),
            (0, 1, 0),
        ]

    def test_skew_tells_both_steps(self) -> None:
        skew = measure_skew(analysis_of(epochs(0), epochs(1)))
        assert [step.step for step in skew.steps] == [0, 1]


@pytest.mark.parametrize("name", ["step 0", "batch 0"])
def test_the_thread_that_opens_the_steps_is_not_taken_for_autograds(name: str) -> None:
    """A second thread trains: it opens the step and launches the collective, so nothing tells a backward."""
    trace = draw_trace(
        ranges=[(name, "##############"), ("load", "#"), ("load", ".#")],
        launches={"main": "..", "trainer": "a.N"},
        streams={7: ".aa.....", 8: ".....NNN"},
    )
    trainer = next(lane for (_, lane), thread in trace.threads.items() if thread == "trainer")
    opened_by = np.where(trace.spans.end_ns == 14, trainer, trace.spans.lane)
    trace = replace(trace, spans=replace(trace.spans, lane=opened_by))
    found = measure_overlap(trace, find_rank_events(trace, rf"{name[:5].strip()} (\d+)"))
    assert found.attribution.method == "none"


@pytest.mark.parametrize(
    ("variant", "collective", "is_noted"),
    [
        ("ResNet", "all_reduce|bucket=0|bytes=8", True),
        ("ResNet", "gloo:all_reduce", False),
        ("overlap", "all_reduce|bucket=0|bytes=8", False),
    ],
)
def test_that_collectives_without_a_range_are_left_out_is_said(variant: str, collective: str, is_noted: bool) -> None:
    """Nsys records no events of gloo: a barrier, or the all-reduce of a loss, was in no figure without a word.

    Each variant of ours has a range round all of its collectives.
    """
    ranges = {
        f"process|rank=0|world=2|variant={variant}|backend=gloo|device=cpu": "#########",
        "backward": ".####....",
        collective: "..###....",
    }
    (rank,) = find_rank_events(draw_trace(ranges=ranges, ranks={PID: 0}))
    assert (UNMARKED in rank.step_notes) is is_noted


def test_info_takes_the_name_of_the_backward_range() -> None:
    trace = draw_trace(ranges={"step 0": "########", "my bwd": "..###"}, launches={"main": "a"}, streams={7: ".aa"})
    (process,) = take_inventory(trace, backward_range="my bwd").processes
    assert process.backward_ranges == 1
    (process,) = take_inventory(trace).processes
    assert process.backward_ranges == 0


@pytest.mark.parametrize(("launched", "method"), [("..NM", "none"), (".bNM", "inferred")])
def test_a_thread_that_launches_collectives_alone_is_not_taken_for_autograds(launched: str, method: str) -> None:
    """As Horovod's, which sends what TensorFlow's threads computed."""
    main = "".join(character if character not in launched else "." for character in "ab..")
    trace = draw_trace(
        ranges={"step 0": "#" * 9},
        launches={"main": main, "python3": launched},
        streams={7: ".aabb....", 9: "...NNMM.."},
    )
    assert measure_overlap(trace).attribution.method == method


@pytest.mark.parametrize(("main", "method"), [("a", "inferred"), (".", "none")])
def test_a_thread_that_launches_all_compute_is_not_taken_for_autograds(main: str, method: str) -> None:
    """Nor is one that serves a model: its collectives were said to run during backward."""
    others = "..NMb" if main == "a" else "a.NMb"
    trace = draw_trace(launches={"main": main, "python3": others}, streams={7: ".aabb....", 9: "...NNMM.."})
    assert measure_overlap(trace).attribution.method == method


@pytest.mark.parametrize(("opener", "tail"), [("autograd", 6), ("main", 0)])
def test_what_autograd_launches_in_an_optimizers_range_is_backward_but_where_it_opens_the_range(
    opener: str, tail: int
) -> None:
    """In a hook, as of torch's _apply_optimizer_in_backward, c does not end backward; in a closure, as Lightning's, it
    is backward's.
    """
    trace = draw_trace(
        ranges={"step 0": "#" * 14, "Optimizer.step#SGD.step": "....##"},
        launches={"main": "a.....", "pt_autograd_0": "..bN.c"},
        streams={7: ".aabbb......cc", 9: "......NNNNNN.."},
    )
    if opener == "autograd":
        ((_, lane),) = (thread for thread, name in trace.threads.items() if name == "pt_autograd_0")
        of_optimizer = trace.spans.name_id == trace.names.index("Optimizer.step#SGD.step")
        trace = replace(trace, spans=replace(trace.spans, lane=np.where(of_optimizer, lane, trace.spans.lane)))
    ((step,),) = (rank.steps for rank in measure_overlap(trace).ranks)
    assert (step.exposed_ns, step.tail_ns) == (6, tail)


def test_phases_in_the_closure_of_an_optimizer_count() -> None:
    """Lightning computes forward and backward in a closure that it gives to the optimizer."""
    trace = draw_trace(
        ranges={
            "[pl][profile]run_training_batch": "##############",
            "Optimizer.step#Adam.step": "##############",
            "[pl][profile][Strategy]DDPStrategy.training_step": "##............",
            "[pl][profile][Strategy]DDPStrategy.backward": "..####........",
        },
        launches={"main": "a.....d", "pt_autograd_0": "..bNc.."},
        streams={7: ".aabbcc.....dd", 9: "....NNNNNNN..."},
    )
    (rank,) = find_rank_events(trace)
    assert [PHASES[phase] for phase in rank.events.phase] == [
        "forward",
        "backward",
        "backward",
        "optimizer",
        "backward",
    ]
    assert len(rank.steps) == 1
    assert rank.has_steps


class TestAHostWithoutMarksOfItsWaits:
    RANGES = (
        ("process|rank=0|world=2|backend=gloo", "##########"),
        ("step|index=0", "##########"),
        ("backward", "##########"),
        ("all_reduce|bucket=0|bytes=8", "..######.."),
    )

    def test_what_computed_meanwhile_is_not_known(self) -> None:
        (rank,) = measure_overlap(draw_trace(ranges=self.RANGES)).ranks
        assert (rank.reason, rank.overlap_ratio, rank.blocking_ns) == (UNMARKED_WAITS, None, None)

    def test_marked_waits_are_known(self) -> None:
        (rank,) = measure_overlap(draw_trace(ranges=[*self.RANGES, ("synchronize", ".....###..")])).ranks
        assert (rank.reason, rank.overlapped_ns, rank.blocking_ns) == (None, 3, 3)

    def test_what_no_phase_holds_is_exposed(self) -> None:
        (rank,) = measure_overlap(
            draw_trace(ranges=[*self.RANGES[:2], ("backward", "##........"), self.RANGES[3]])
        ).ranks
        assert (rank.reason, rank.exposed_ns, rank.blocking_ns) == (None, 6, None)

    def test_its_operators_tell_what_computed(self) -> None:
        computing = Operators(np.array([0, 4], np.int64), np.array([4, 5], np.int64), np.zeros(2, np.int64))  # #####
        trace = replace(draw_trace(ranges=self.RANGES), operators=computing)
        (rank,) = measure_overlap(trace).ranks
        assert (rank.overlapped_ns, rank.exposed_ns) == (3, 3)
        (events,) = find_rank_events(trace)
        assert events.blocking.total_ns is None

    def test_a_variant_marks_its_waits_where_nothing_marks_backward(self) -> None:
        """A monitor marks no phases: of a job with a variant of ours it said only how long a step took."""
        computing = Operators(np.array([0, 4], np.int64), np.array([4, 5], np.int64), np.ones(2, np.int64))
        ranges = [self.RANGES[1], self.RANGES[3], ("synchronize", ".....###..")]
        (rank,) = measure_overlap(replace(draw_trace(ranges=ranges), operators=computing)).ranks
        assert (rank.reason, rank.overlapped_ns, rank.exposed_ns) == (None, 3, 3)


class TestGloosOwnEvents:
    """What torch.profiler tells of a CPU run whose waits are marked, but not its collectives."""

    PROCESS = "process|rank=0|world=2|backend=gloo"

    @staticmethod
    def run_of(
        operators: str, asked: dict[str, str], gloo: list[tuple[str, str]], **phases: str
    ) -> tuple[Trace, RankOverlap]:
        """Operators by picture, one per run of equal letters; a collective is asked for by each ``#``."""
        names = [("step|index=0", "#" * len(operators)), *phases.items(), *gloo]
        drawn = draw_trace(ranges=[(TestGloosOwnEvents.PROCESS, "#" * len(operators)), *names])
        by_thread = np.array([drawn.names[name_id].startswith("gloo:") for name_id in drawn.spans.name_id])
        spans = replace(drawn.spans, lane=np.where(by_thread, 7, drawn.spans.lane))
        of_operators = [(start, end) for _, start, end in runs(operators)]
        calls = [(start, number) for number, picture in enumerate(asked.values()) for _, start, _ in runs(picture)]
        trace = replace(
            drawn,
            spans=spans,
            names=(*drawn.names, *asked),
            operators=Operators(*(column(each) for each in zip(*((*one, 0) for one in of_operators), strict=True))),
            collective_calls=CollectiveCalls(
                column(start for start, _ in calls), column(len(drawn.names) + number for _, number in calls)
            ),
        )
        (rank,) = measure_overlap(trace).ranks
        return trace, rank

    def test_launched_is_what_was_asked_for_in_the_same_order(self) -> None:
        trace, _ = self.run_of(
            "aabbccdd..", {"c10d::allreduce_": ".#.#......"},
            [("gloo:all_reduce", "..##......"), ("gloo:all_reduce", "......###.")],
            backward="########..", synchronize="........##",
        )  # fmt: skip
        (rank,) = find_rank_events(trace)
        rows = rank.events.category == Category.COMMUNICATION
        assert rank.events.launch_ns[rows].tolist() == [1, 3]
        assert rank.events.start_ns[rows].tolist() == [2, 6]

    @pytest.mark.parametrize(
        ("asked", "why"),
        [
            ({"c10d::allreduce_": "...#......"}, "one was asked for before the recording"),
            ({"c10d::allreduce_": ".#", "c10d::broadcast_": "...#......"}, "other operations"),
            ({"c10d::allreduce_": ".#.....#.."}, "it begins before it is asked for"),
        ],
    )
    def test_where_the_orders_differ_no_launch_is_known(self, asked: dict[str, str], why: str) -> None:
        gloo = [("gloo:all_reduce", "..##......"), ("gloo:all_reduce", "......###.")]
        trace, _ = self.run_of("aabbccdd..", asked, gloo, backward="########..", synchronize="........##")
        (rank,) = find_rank_events(trace)
        rows = rank.events.category == Category.COMMUNICATION
        assert rank.events.launch_ns[rows].tolist() == [NO_TIME, NO_TIME], why

    @pytest.mark.parametrize(
        ("asked", "expected"), [("..#.......", [None]), (".........#", ["after_backward"]), ("..........", [None])]
    )
    def test_what_begins_in_the_wait_was_launched_after_backward_only_if_it_is_known(
        self, asked: str, expected: list[str | None]
    ) -> None:
        trace, _ = self.run_of(
            "aabbccdd...", {"c10d::allreduce_": asked}, [("gloo:all_reduce", ".........##")],
            backward="########...", synchronize="........###",
        )  # fmt: skip
        assert [collective.blocking for collective in collectives_of(trace)] == expected

    def test_what_is_asked_for_in_backward_and_begins_later_is_backwards(self) -> None:
        trace, _ = self.run_of(
            "aabbccdd..", {"c10d::allreduce_": ".......#.."}, [("gloo:all_reduce", "........##")],
            backward="########..", synchronize="........##",
        )  # fmt: skip
        (rank,) = find_rank_events(trace)
        assert PHASES[rank.events.phase[rank.events.category == Category.COMMUNICATION][0]] == "backward"

    ASKED: ClassVar = {"c10d::broadcast_": "#"}

    @pytest.mark.parametrize(
        ("asked", "phases", "reason"),
        [
            (ASKED, {"forward": "####......", "optimizer": "........##"}, NO_BACKWARD),
            (ASKED, {"forward": "####......", "backward": "....####..", "optimizer": "........##"}, None),
            (ASKED, {"forward": "##########"}, None),
            ({}, {"forward": "##########"}, NO_BACKWARD),
            ({}, {}, NO_BACKWARD),
        ],
    )
    def test_a_backward_pass_that_was_not_recorded_hides_what_it_launched(
        self, asked: dict[str, str], phases: dict[str, str], reason: str | None
    ) -> None:
        """As one that a thread of its own runs: what else communicates tells nothing about gradients.

        Where that thread asked for all collectives, and the optimizer has no range, nothing was said to be hidden.
        """
        _, rank = self.run_of("aabb....cc", asked, [("gloo:broadcast", ".##.......")], **phases)
        assert (rank.reason, rank.overlap_ratio is None) == (reason, reason is not None)

    def test_a_broadcast_in_forward_is_waited_for_where_no_operator_runs(self) -> None:
        """As DDP's of buffers: the forward range holds the wait, and computes nothing meanwhile."""
        _, rank = self.run_of(
            "a....bbcc.", {"c10d::broadcast_": ".#........"}, [("gloo:broadcast", "..####....")],
            forward="#######...", backward=".......###", synchronize=".........#",
        )  # fmt: skip
        assert (rank.overlapped_ns, rank.exposed_ns, rank.blocking_ns) == (1, 3, 3)

    def test_an_operator_that_only_holds_the_wait_computes_nothing_in_it(self) -> None:
        """As the backward pass of a checkpoint, at whose end DDP waits: only the copies after it compute."""
        _, rank = self.run_of(
            "aabbbbbbbb", {"c10d::allreduce_": "...#......"}, [("gloo:all_reduce", "....####..")],
            backward="##########", synchronize="......###.",
        )  # fmt: skip
        assert (rank.overlapped_ns, rank.exposed_ns, rank.blocking_ns) == (2, 2, 2)

    def test_gaps_between_operators_of_backward_are_no_waits(self) -> None:
        _, rank = self.run_of(
            "aa.bb.cc..", {"c10d::allreduce_": ".#........"}, [("gloo:all_reduce", "..#######.")],
            backward="##########", synchronize="........##",
        )  # fmt: skip
        assert (rank.overlapped_ns, rank.exposed_ns, rank.blocking_ns) == (4, 3, 1)

    def test_where_the_host_waits_is_told_by_the_range_that_the_reason_names(self) -> None:
        """Of a loop that reduces gradients itself: ``instrument`` marks no wait there, and was all that was named."""
        asked, gloo = {"c10d::allreduce_": "....#....."}, [("gloo:all_reduce", ".....###..")]
        _, unmarked = self.run_of("aabb....cc", asked, gloo, backward="####......")
        assert unmarked.blocking_ns is None
        assert "instrument(model) of DDP or FSDP2, else synchronize()" in str(unmarked.dependencies.reason)
        _, marked = self.run_of("aabb....cc", asked, gloo, backward="####......", synchronize="....####..")
        assert (marked.blocking_ns, marked.dependencies.reason) == (3, None)


@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [
        ("......##......##......##......##......##", [0, 1, 2, 3, 4]),
        ("......##......##......##......##........", [0, 1, 2, 3]),
        ("......##..............##........" + "........", [0, 1, 2, 3, 4]),  # as where gradients are accumulated
    ],
)
def test_a_last_step_without_a_phase_that_all_others_have_was_cut_off(optimizer: str, steps: list[int]) -> None:
    """An older torch.profiler stops in it, and does not say that its range was open."""
    ranges = {f"step {number}": "." * 8 * number + "########" for number in range(5)}
    trace = draw_trace(
        ranges=ranges | {"backward": "..##...." * 5, "optimizer": optimizer},
        launches={"main": "a.......b.......c.......d.......e......."},
        streams={7: ".aa.....bb......cc......dd......ee......"},
    )
    (rank,) = find_rank_events(trace)
    assert rank.steps.number.tolist() == steps
    assert any("step 4 left out: it has no optimizer, as all" in note for note in rank.step_notes) == (len(steps) == 4)


@pytest.mark.parametrize(("is_open", "steps"), [(True, [0, 1, 2, 3]), (False, [0, 1, 2])])
def test_a_phase_that_ends_with_the_recording_is_of_the_step_in_which_it_begins(
    is_open: bool, steps: list[int]
) -> None:
    """A monitor stops within the optimizer: of each three steps it measured two, and "the program ended" in the third.

    ::

        step 3     |------|
        optimizer       |------------   the profiler stops, which takes its time
    """
    marks = {f"step {number}": "." * 8 * number + "########" for number in range(4)}
    optimizer = [("optimizer", "." * (8 * number + 6) + "##") for number in range(3)]
    trace = draw_trace(
        ranges=[*marks.items(), ("backward", "..##...." * 4), *optimizer, ("optimizer", "." * 30 + "#" * 9)],
        launches={"main": "a.......b.......c.......d.............."},
        streams={7: ".aa.....bb......cc......dd............."},
    )
    ends_last = trace.spans.end_ns == trace.spans.end_ns.max()
    trace = replace(trace, spans=replace(trace.spans, is_open=(ends_last & is_open).astype(np.int64)))
    (rank,) = find_rank_events(trace)
    assert rank.steps.number.tolist() == steps


def test_a_phase_that_takes_no_time_is_one(tmp_path: Path) -> None:
    """On a host whose collectives end within the backward, what waits for them takes none: "it has no synchronize"."""
    capture = Capture(ranges=[Range("process|rank=0|world=1|backend=gloo|device=cpu", 0, 500, 100, domain="ddp_prof")])
    for number in range(5):
        at = 100 * number
        for name, start, end in ((f"step|index={number}", at, at + 100), ("synchronize", at + 50, at + 50)):
            capture.ranges.append(Range(name, start, end, 100, domain="ddp_prof"))
    (rank,) = find_rank_events(load_trace(write_capture(tmp_path / "x.sqlite", capture)))
    assert rank.steps.number.tolist() == [0, 1, 2, 3, 4]
    assert not any("left out" in note for note in rank.step_notes)
