"""Which steps count, and whether the clocks of host and device agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_prof.analyze.core.blocking import NO_COPIES
from ddp_prof.analyze.core.clocks import CLOCKS, UNITS
from ddp_prof.analyze.core.rank_events import ONLY_BESIDE
from ddp_prof.analyze.core.recording import LOST_CALLS, Recording
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.kernels.device_use import measure_rank_use
from ddp_prof.analyze.overlap import RankOverlap, measure_overlap, measure_rank
from ddp_prof.analyze.why_unknown import LOST_MAY_COMMUNICATE, MIXED_CLOCKS, NO_COMMUNICATION
from ddp_prof.ingest.load import load_trace
from ddp_prof.table import UNKNOWN, select
from ddp_prof.trace import Kind, Synchronizations, SyncKind, Trace
from tests.drawing import MAIN, PID, column, draw_trace, table
from tests.measuring import collectives_of
from tests.nsys_factory import NCCL, STEP_NS, US, Capture, Kernel, Range, write_capture

THREE_STEPS = {"step 0": "########", "step 1": "........########", "step 2": "................########"}


def launching(trace: Trace, *, but: str = "") -> Trace:
    """The trace of a reader that knows which calls launched kernels; those of ``but`` did not."""
    is_launch = ~np.isin(trace.calls.correlation, [*map(ord, but)])
    return replace(trace, is_launch=is_launch)


def steps_of(trace: Trace) -> list[int | None]:
    (rank,) = find_rank_events(trace)
    return [*rank.steps.number.tolist()]


def test_a_step_of_which_a_launch_has_no_activity_does_not_count() -> None:
    trace = draw_trace(
        ranges=THREE_STEPS,
        launches={"main": "aN......bM......cO......"},
        streams={7: ".aa.....bb......cc......", 9: "..NN..............OO...."},
    )
    assert steps_of(launching(trace)) == [0, 2]


@pytest.mark.parametrize(
    ("lost", "counted", "note"),
    [
        ([0, 0, 2, 0], [0, 1, 3], "step 2 left out: 2 of 400 launches in it have no activity"),
        ([1, 1, 1, 1], [0, 1, 2, 3], "count, although 1 launch has no activity in each of them"),  # never has one
        ([1, 1, 2, 1], [0, 1, 3], "count, although 1 launch has no activity in each of them"),
        ([5, 3, 2, 9], [], "19 of 1,600 launches in them have no activity"),  # it was the best one, and counted
        ([9, 9, 9, 9], [], "36 of 1,600 launches in them have no activity"),
    ],
)
def test_the_step_that_lost_least_counts_if_most_lack_as_much(lost: list[int], counted: list[int], note: str) -> None:
    recording = recorded_with(step_lost=lost)
    assert np.flatnonzero(~recording.is_incomplete).tolist() == counted
    assert note in "; ".join(recording.notes([f"step {number}" for number in range(4)]))


def test_no_step_counts_if_those_that_lost_least_lost_others() -> None:
    assert recorded_with(step_lost=[1, 1, 1, 1], are_lost_alike=False).is_incomplete.all()
    assert recorded_with(step_lost=[0] * 4, step_lost_copies=(1, 1, 1, 1), are_copies_alike=False).is_incomplete.all()
    assert not recorded_with(step_lost=[1, 1, 1, 1], step_lost_copies=(1, 1, 1, 1)).is_incomplete.any()


def test_a_step_without_launches_does_not_tell_how_many_the_others_always_lose() -> None:
    recording = replace(recorded_with(step_lost=[1, 1, 0, 1]), step_launches=column([400, 400, 0, 400]))
    assert (recording.always_lost, recording.is_incomplete.any()) == (1, False)


def test_of_a_single_step_that_always_loses_some_the_note_is_in_the_singular() -> None:
    recording = replace(recorded_with(step_lost=[1, 0, 0, 0]), step_launches=column([400, 0, 0, 0]))
    (told,) = recording.notes([f"step {number}" for number in range(4)])
    assert told == "step 0 counts, although 1 launch has no activity in it"


def test_of_a_step_that_is_damaged_twice_one_reason_is_told() -> None:
    timeless = np.array([False, True, False, False])
    recording = replace(recorded_with(step_lost=[0, 2, 0, 0]), is_timeless=timeless)
    (told,) = recording.notes([f"step {number}" for number in range(4)])
    assert told == "step 1 left out: a kernel in it takes no time, which is impossible"


@pytest.mark.parametrize(
    ("launches", "lost", "are_alike"),
    [
        ("abc.....efg.....ijk.....", "bfj", True),
        ("abc.....efg.....ijk.....", "bgj", False),
        ("abc.....efg.....ijk.....mnop....", "bfjo", True),  # the last step launches one more before it
        ("abc.....efg.....ijk.....mnop....", "bfko", False),
    ],
)
def test_whether_steps_lost_the_same_is_told_by_the_places_of_most(launches: str, lost: str, are_alike: bool) -> None:
    streams = {7: "".join("." if letter in lost else letter for letter in launches)}
    steps = {f"step {at // 8}": "." * at + "########" for at in range(0, len(launches), 8)}
    (rank,) = find_rank_events(launching(draw_trace(ranges=steps, launches={"main": launches}, streams=streams)))
    assert rank.recording.are_lost_alike is are_alike


def recorded_with(*, step_lost: list[int], step_lost_copies: tuple[int, ...] = (0,) * 4, **others: bool) -> Recording:
    """Four steps that launch as much, and lack these activities."""
    (rank,) = find_rank_events(launching(draw_trace(launches={"main": "a"}, streams={7: "a"})))
    nothing = dict.fromkeys(("is_overlong", "is_timeless", "is_silent", "is_partial"), np.zeros(4, np.bool_))
    lost = {"step_lost": column(step_lost), "step_lost_copies": column(step_lost_copies)}
    others = {"are_lost_alike": True, "are_copies_alike": True, "are_copies_local": False} | others
    lost["step_collectives"] = column([1, 0, 1, 0])
    lost |= dict.fromkeys(("step_ranges", "step_silent_ranges"), column([0] * 4))
    return replace(rank.recording, step_launches=column([400] * 4), **lost, **nothing, **others)


@pytest.mark.parametrize(
    ("lost", "counted"),
    [
        ((0, 2, 0, 0), [0, 2, 3]),
        ((3, 3, 3, 4), [0, 1, 2]),  # calls for copies of 0 bytes
        ((2, 1, 3, 2), []),  # step 1 counted, as the one that lost least
    ],
)
def test_the_step_that_lost_fewest_copies_counts_if_most_did(lost: tuple[int, ...], counted: list[int]) -> None:
    recording = recorded_with(step_lost=[0, 0, 0, 0], step_lost_copies=lost)
    assert np.flatnonzero(~recording.is_incomplete).tolist() == counted


@pytest.mark.parametrize(
    ("lost", "counted", "note"),
    [
        ((2, 1, 3, 2), [0, 1, 2, 3], "steps 0 to 3 (4 of 4): 8 calls that copy or set memory have no activity there"),
        ((1, 0, 1, 0), [0, 1, 2, 3], "steps 0, 2 (2 of 4): 2 calls that copy or set memory"),  # all that communicate
        ((0, 1, 0, 1), [0, 2], "steps 1, 3 (2 of 4) left out: 2 calls that copy or set memory"),
        ((0, 0, 1, 0), [0, 1, 3], "step 2 left out: a call that copies or sets memory has no activity there"),
    ],
)
def test_where_most_steps_lost_copies_they_count_without_what_needs_copies(
    lost: tuple[int, ...], counted: list[int], note: str
) -> None:
    """No step was left, and exposed communication, which needs no copy, was not known."""
    recording = recorded_with(step_lost=[0] * 4, step_lost_copies=lost, are_copies_local=True)
    assert np.flatnonzero(~recording.is_incomplete).tolist() == counted
    assert recording.hides_copies is (len(counted) == 4)
    (told,) = recording.notes([f"step {number}" for number in range(4)])
    assert told.startswith(note)


def test_steps_that_lost_kernels_as_well_do_not_hide_the_copies_of_others() -> None:
    recording = recorded_with(step_lost=[9, 9, 9, 0], step_lost_copies=(1, 1, 2, 0), are_copies_local=True)
    assert (np.flatnonzero(~recording.is_incomplete).tolist(), recording.hides_copies) == ([3], False)


def losing_copies() -> Capture:
    """Copies within the device were lost, as many as each step has buckets."""
    capture = Capture()
    for step, buckets in enumerate((1, 2, 3, 2)):
        at, first = step * STEP_NS, 20 * step
        capture.ranges.append(Range(f"step {step}", at, at + STEP_NS, 100))
        capture.kernels += [
            Kernel("gradient", at + 1 * US, at + 9 * US, at, 100, number=first + 1),
            Kernel(NCCL, at + 5 * US, at + 15 * US, at + 1, 100, stream=20, number=first + 2),
            Kernel("in", at + 20 * US, at + 21 * US, at + 3, 100, kind="memcpy", copy_kind=1, number=first + 3),
        ] + [
            Kernel("out", at, at, at + 4 + of, 100, kind="memcpy", number=first + 4 + of, is_lost=True)
            for of in range(buckets)
        ]
        for kernel in capture.kernels:
            kernel.call = "cudaMemcpyAsync" if kernel.kind == "memcpy" else kernel.call
    return capture


def test_of_such_steps_communication_is_known_and_what_needs_copies_is_not(tmp_path: Path) -> None:
    (rank,) = measure_overlap(load_trace(write_capture(tmp_path / "a.sqlite", losing_copies()))).ranks
    found = [(step.comm_ns, step.exposed_ns, step.exposed_memory_ns, step.idle_ns) for step in rank.steps]
    assert (rank.reason, found) == (None, [(10 * US, 6 * US, None, None)] * 4)
    assert rank.dependencies
    assert rank.dependencies.reason == NO_COPIES


@pytest.mark.parametrize("where", ["within a collective", "on another device", "to another device"])
def test_copies_that_may_communicate_are_no_such_copies(where: str, tmp_path: Path) -> None:
    capture = losing_copies()
    if where == "within a collective":
        capture.ranges.append(Range("nccl:all_gather", 4, 5, 100))
    elif where == "on another device":
        capture.kernels.append(Kernel("gemm", 2 * US, 3 * US, 20, 100, device=1, number=90))
    else:
        capture.kernels[-3].copy_kind = 10
    ranks = measure_overlap(load_trace(write_capture(tmp_path / "a.sqlite", capture))).ranks
    assert [rank.step_count for rank in ranks] == [0] * len(ranks)


@pytest.mark.parametrize(
    ("are_unnumbered", "why"), [(False, ", which the profiler lost"), (True, " with their number")]
)
def test_of_a_step_that_lost_kernels_and_copies_both_are_named(are_unnumbered: bool, why: str) -> None:
    """Only the copies were, and copies without numbers were said to be lost."""
    recording = recorded_with(step_lost=[0, 9, 0, 0], step_lost_copies=(0, 2, 1, 0), are_unnumbered=are_unnumbered)
    assert recording.notes([f"step {number}" for number in range(4)]) == (
        f"step 1 left out: 9 of 400 launches in it have no activity{why}",
        f"steps 1, 2 (2 of 4) left out: 3 calls that copy or set memory have no activity there{why}",
    )


def test_a_step_that_launches_less_counts() -> None:
    """A micro-batch under no_sync."""
    trace = draw_trace(
        ranges=THREE_STEPS,
        launches={"main": "a.......bM......cO......"},
        streams={7: ".aa.....bb......cc......", 9: "..........MM......OO...."},
    )
    assert steps_of(launching(trace)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("between", "is_said"),
    [
        ("cP", True),
        ("c.", False),  # a validation, which does not reduce
        ("..", False),
    ],
)
def test_of_a_step_whose_range_was_lost_it_is_said_that_no_step_has_its_work(between: str, is_said: bool) -> None:
    """One of many steps has so little of all communication that nothing else says so."""
    ranges = [("train_step", "." * (4 * at) + "####") for at in (0, 1, 3, 4)]
    trace = draw_trace(
        ranges=ranges,
        launches={"main": f"aN..bO..{between}..dQ..eR.."},
        streams={7: f".a...b...{between[0]}...d...e..", 9: f"..N...O...{between[1]}...Q...R."},
    )
    noted = [note for note in measure_overlap(launching(trace)).warnings if "in no range of a step" in note]
    assert [note.partition(",")[0] for note in noted] == (["after step 1"] if is_said else [])


@pytest.mark.parametrize(
    ("numbers", "between", "is_said"),
    [
        ((0, 2, 4), "cP", True),
        ((0, 2, 4), "c.", False),  # every second step has a number that is printed, and a part that no range holds
        ((0, 1, 2), "cP", False),  # as where ranges hold the first of two micro-batches
    ],
)
def test_lost_steps_are_told_by_their_numbers_though_ranges_of_most_were_lost(
    numbers: tuple[int, ...], between: str, is_said: bool
) -> None:
    """Steps 1 and 3 were, and a step seemed to take twice as long."""
    c, p = between
    trace = draw_trace(
        ranges=[(f"step {number}", "." * (8 * at) + "####") for at, number in enumerate(numbers)],
        launches={"main": f"aN..{c}{p}..bO..{c.replace('c', 'd')}{p.replace('P', 'Q')}..eR.."},
        streams={
            7: f"....aaaa{c * 4}bbbb{c.replace('c', 'd') * 4}eeee",
            9: f".....NN..{p * 2}...OO..{p.replace('P', 'Q') * 2}...RR.",
        },
    )
    overlap = measure_overlap(launching(trace))
    noted = [note.partition(",")[0] for note in overlap.warnings if "in no range of a step" in note]
    lengths = [step.length.ns for step in overlap.ranks[0].steps]
    assert (noted, lengths) == ((["after steps 0"], [None] * 3) if is_said else ([], [8, 8, None]))


def test_what_hid_communication_of_no_step_is_not_known_where_all_steps_are_left_out() -> None:
    """Compute of the steps, which hid 2 of 5, is left out with them: all seemed to be exposed."""
    trace = draw_trace(
        ranges={"step 0": "....####"},
        launches={"main": "gQ..ab.c"},
        streams={7: ".g...aaaaa", 9: "..QQQQQ..."},
    )
    (events,) = find_rank_events(launching(trace))
    rank = measure_rank(events)
    assert (rank.comm_ns, rank.overlapped_ns, rank.exposed_ns) == (5, None, None)
    assert measure_rank_use(events).overlapped_ns is None


def test_a_copy_that_was_not_recorded_is_no_lost_launch() -> None:
    trace = draw_trace(
        ranges=THREE_STEPS, launches={"main": "a.......bM......c......."}, streams={7: ".aa.....bb......cc......"}
    )
    assert steps_of(launching(trace, but="M")) == [0, 1, 2]


def test_a_launch_whose_number_comes_again_is_not_said_to_be_lost() -> None:
    """The host is far ahead: both kernels follow both calls, and are taken for the second call's."""
    trace = draw_trace(
        ranges=THREE_STEPS,
        launches={"main": "a.......b.......c......."},
        streams={7: "...........aaabbbb......cccc"},
    )
    number = {ord("b"): ord("a")}
    again = replace(
        trace,
        calls=replace(
            trace.calls, correlation=column(number.get(one, one) for one in trace.calls.correlation.tolist())
        ),
        activities=replace(
            trace.activities, correlation=column(number.get(one, one) for one in trace.activities.correlation.tolist())
        ),
        launching_calls=None,
    )
    assert steps_of(launching(again)) == [0, 1, 2]


def test_a_launch_is_not_said_to_be_lost_where_a_kernel_lacks_its_number() -> None:
    """As of collectives of some releases of ROCm."""
    trace = draw_trace(
        ranges=THREE_STEPS,
        launches={"main": "aN......bM......cO......"},
        streams={7: ".aa.....bb......cc......", 9: "..NN......MM......OO...."},
    )
    is_collective = np.isin(trace.activities.correlation, [*map(ord, "NMO")])
    unnumbered = replace(trace.activities, correlation=np.where(is_collective, UNKNOWN, trace.activities.correlation))
    assert steps_of(launching(replace(trace, activities=unnumbered, launching_calls=None))) == [0, 1, 2]


def test_nor_beside_a_step_that_launches_nothing() -> None:
    """Such a step lacks no number, which tells nothing about the others."""
    trace = draw_trace(
        ranges=THREE_STEPS | {"step 3": "." * 24 + "########"},
        launches={"main": "aN......bM......cO.............."},
        streams={7: ".aa.....bb......cc..............", 9: "..NN......MM......OO............"},
    )
    numbers = trace.activities.correlation
    lacking = replace(trace.activities, correlation=np.where(np.isin(numbers, [*map(ord, "abc")]), UNKNOWN, numbers))
    assert steps_of(launching(replace(trace, activities=lacking, launching_calls=None))) == [0, 1, 2]


def test_a_step_whose_kernels_alone_lack_the_numbers_of_their_launches_does_not_count() -> None:
    """It was said to be the one of three steps that does not communicate."""
    trace = draw_trace(
        ranges=THREE_STEPS,
        launches={"main": "aN......bM......cO......"},
        streams={7: ".aa.....bb......cc......", 9: "..NN......MM......OO...."},
    )
    numbers = trace.activities.correlation
    lacking = replace(trace.activities, correlation=np.where(np.isin(numbers, [*map(ord, "bM")]), UNKNOWN, numbers))
    unnumbered = launching(replace(trace, activities=lacking, launching_calls=None))
    (rank,) = measure_overlap(unnumbered).ranks
    assert [(step.step, step.comm_ns, step.exposed_ns) for step in rank.steps] == [(0, 2, 1), (2, 2, 2)]
    assert len(rank.communicating_steps) == rank.step_count == 2
    (events,) = find_rank_events(unnumbered)
    assert events.step_notes == ("step 1 left out: 2 of 2 launches in it have no activity with their number",)


@pytest.mark.parametrize(
    ("calls", "kernels", "counted"),
    [
        ("abcdef..gh..kl..mnopqr..", ".abcdef..ghi..kl.mnopqr.", [0, 2]),  # i was launched between h and k
        ("abcdef..ghijkl..mnopqr..", ".abcdef..ghijkl..mnopqr.", [0, 1, 2]),
        ("ab.def..gh..kl..mn.pqr..", ".abcdef..ghi..kl.mnopqr.", [0, 1, 2]),  # a call of each step is not recorded
        ("ab......gh.jkl..mn......", ".ab......ghijkl..mn.....", [0, 1, 2]),  # it launches more than other steps
    ],
)
def test_a_step_of_which_work_shows_that_calls_were_lost_does_not_count(
    calls: str, kernels: str, counted: list[int]
) -> None:
    """Calls and work of a part of it were lost, with its collectives: it was said to do without communication."""
    trace = draw_trace(ranges=THREE_STEPS, launches={"main": calls}, streams={7: kernels})
    assert steps_of(launching(trace)) == counted


def test_steps_that_accumulate_say_nothing_of_those_whose_collectives_lack_numbers() -> None:
    trace = draw_trace(
        ranges=THREE_STEPS,
        launches={"main": "a.......bM......c......."},
        streams={7: ".aa.....bb......cc......", 9: "..........MM............"},
    )
    numbers = trace.activities.correlation
    lacking = replace(trace.activities, correlation=np.where(numbers == ord("M"), UNKNOWN, numbers))
    assert steps_of(launching(replace(trace, activities=lacking, launching_calls=None))) == [0, 1, 2]


def test_where_work_of_the_other_steps_was_lost_steps_that_accumulate_do_not_say_that_nothing_communicates() -> None:
    trace = launching(
        draw_trace(
            ranges=THREE_STEPS,
            launches={"main": "a.......bM......c......."},
            streams={7: ".aa.....bb......cc......"},
        )
    )
    (rank,) = measure_overlap(trace).ranks
    assert (rank.reason, [step.comm_ns for step in rank.steps]) == (LOST_MAY_COMMUNICATE, [None, None])
    (alone,) = measure_overlap(replace(trace, world_size=1)).ranks
    assert (alone.reason, [step.comm_ns for step in alone.steps]) == (NO_COMMUNICATION, [0, 0])


def test_nor_do_they_where_the_calls_of_the_other_steps_were_lost_too() -> None:
    trace = draw_trace(
        ranges=THREE_STEPS, launches={"main": "a...............c......."}, streams={7: ".aa.............cc......"}
    )
    (rank,) = measure_overlap(launching(trace)).ranks
    assert (rank.reason, [step.comm_ns for step in rank.steps]) == (LOST_MAY_COMMUNICATE, [None, None])


@pytest.mark.parametrize(
    ("launches", "communication", "reason"),
    [
        ("aN......bMg.....cO......", "..NN......MM......OO....", NO_COMMUNICATION),
        ("a.......bMg.....c.......", "..........MM............", LOST_MAY_COMMUNICATE),  # micro-batches are whole
    ],
)
def test_a_device_does_not_communicate_if_another_one_does_in_a_whole_step(
    launches: str, communication: str, reason: str
) -> None:
    """A stage of a pipeline that only computes: one lost launch, which may be of either device, hid that."""
    trace = draw_trace(
        ranges=THREE_STEPS,
        launches={"main": launches},
        streams={7: ".aa.....bb......cc......", 9: communication},
    )
    on_two = replace(trace.activities, device=trace.activities.lane // 9)
    computes, _ = measure_overlap(launching(replace(trace, activities=on_two))).ranks
    assert (computes.device, computes.reason) == (0, reason)


@pytest.mark.parametrize(
    ("later_ns", "kernels", "kind", "counted"),
    [
        (0, "aa......bb......cc......", Kind.KERNEL, [0, 2]),
        (1, "aa......bb......cc......", Kind.KERNEL, [0, 2]),
        (0, "a.......b.......c.......", Kind.KERNEL, [0, 1, 2]),  # whole microseconds: it may have taken half of one
        (1, "a.......b.......c.......", Kind.KERNEL, [0, 2]),
        (1, "aa......bb......cc......", Kind.COPY, [0, 1, 2]),
    ],
)
def test_a_step_with_a_kernel_that_takes_no_time_does_not_count(
    later_ns: int, kernels: str, kind: Kind, counted: list[int]
) -> None:
    trace = draw_trace(
        ranges=THREE_STEPS,
        launches={"main": "a.......b.......c......."},
        streams={7: kernels},
        character_ns=1000,
        first_ns=later_ns,
    )
    is_b = trace.activities.correlation == ord("b")
    activities = replace(
        trace.activities,
        end_ns=np.where(is_b, trace.activities.start_ns, trace.activities.end_ns),
        name_id=np.zeros_like(trace.activities.name_id),
        kind=np.where(is_b, kind, trace.activities.kind),
    )
    assert steps_of(launching(replace(trace, activities=activities))) == counted


class TestStepsThatLostTheirCallsToo:
    """As with a buffer that keeps only the last records."""

    def test_a_step_without_any_launch_does_not_count(self) -> None:
        trace = draw_trace(
            ranges=THREE_STEPS,
            launches={"main": "........bM......cO......"},
            streams={7: ".........bb.....cc......", 9: "..........MM......OO...."},
        )
        assert steps_of(launching(trace)) == [1, 2]
        assert "step 0 left out: no launch was recorded in it" in measure_overlap(launching(trace)).warnings

    def test_nor_the_one_in_which_the_recording_seems_to_begin(self) -> None:
        trace = draw_trace(
            ranges=THREE_STEPS | {"step 3": "." * 24 + "########"},
            launches={"main": "..........M.....cOe.....dPf....."},
            streams={7: "................ccee....ddff....", 9: "..........MM......OO......PP...."},
        )
        assert steps_of(launching(trace)) == [2, 3]
        note = "step 1 left out: its launches seem to be recorded only in part"
        assert note in measure_overlap(launching(trace)).warnings

    def test_a_micro_batch_beside_it_counts(self) -> None:
        trace = draw_trace(
            ranges=THREE_STEPS | {"step 3": "." * 24 + "########"},
            launches={"main": "........b.......c.......dP......"},
            streams={7: ".........b......c.......d.......", 9: "..........................PP...."},
        )
        assert steps_of(launching(trace)) == [1, 2, 3]

    def test_a_step_that_only_copies_counts(self) -> None:
        trace = draw_trace(
            ranges=THREE_STEPS, launches={"main": "1.......b.......c......."}, streams={7: ".11.....bb......cc......"}
        )
        assert steps_of(launching(trace, but="1")) == [0, 1, 2]

    @pytest.mark.parametrize(
        ("launches", "counted"),
        [
            ("ab......cd..............ef......gh......ij......", [0, 1, 2, 3, 4, 5]),  # a batch is skipped
            ("ab......cd..............gh......ij......kl......", [0, 1, 3, 4, 5]),  # e and f are lost
            ("ABC.....DEF.............GIJ.....KLM.....NOP.....QST.....", [0, 1, 2, 3, 4, 5, 6]),  # H, R: other calls
            ("ABC.....D.......EFG.....HIJ.....KLM.....NOP.....QRS.....", [0, 1, 2, 3, 4, 5, 6]),
            ("........ab......cd......ef......gh......ij......", [1, 2, 3, 4, 5]),  # nothing tells when it began
            ("a.......bcd.....efg.....hij.....klm.....nop.....", [0, 1, 2, 3, 4, 5]),  # without an optimizer
            ("..c.....def.....ghi.....jkl.....mno.....pqr.....", [1, 2, 3, 4, 5]),  # a and b are lost
            ("abc.....def.....ghi.....jkl.....mno.....p.......q", [0, 1, 2, 3, 4, 5]),  # an evaluation
            ("abc.....def.....ghi.....jkl.....mno.....p.......s", [0, 1, 2, 3, 4]),  # q and r are lost
            ("a.b...c.d.e...f.g.h...i.j.k...l.m.n...o.p.......", [0, 1, 2, 3, 4]),  # so they may be
        ],
    )
    def test_a_step_that_launches_less_counts_if_no_numbers_of_calls_are_missing(
        self, launches: str, counted: list[int]
    ) -> None:
        """It was left out: a batch that was skipped, a first step without an optimizer, an evaluation in the last."""
        steps = {f"step {number}": "." * 8 * number + "########" for number in range(len(launches) // 8)}
        trace = draw_trace(ranges=steps, launches={"main": launches}, streams={7: launches})
        assert steps_of(launching(trace)) == counted

    @pytest.mark.parametrize(
        ("launches", "counted"),
        [
            ("ab..cd..ef..gh..ij......kl..mn..op..qr..", [0, 1, 2, 3, 4]),  # its gradients overflowed
            ("ab..cd..ef..gh..ij......mn..op..qr..st..", [0, 1, 3, 4]),  # k and l are lost
        ],
    )
    def test_nor_does_an_optimizer_that_steps_over_a_step(self, launches: str, counted: list[int]) -> None:
        steps = {f"step {number}": "." * 8 * number + "########" for number in range(5)}
        ranges = steps | {"optimizer": "....####" * 5}
        trace = draw_trace(ranges=ranges, launches={"main": launches}, streams={7: launches})
        assert steps_of(launching(trace)) == counted

    @pytest.mark.parametrize(
        ("launches", "counted"),
        [
            ("a.....f.b.....g.c.......d.....h.e.....i.", [0, 1, 3, 4]),
            ("a.....f.b.....g.c.......d.....h.e.......", [0, 1, 2, 3, 4]),  # as where gradients are accumulated
        ],
    )
    def test_nor_one_that_launches_nothing_in_a_phase_in_which_all_others_do(
        self, launches: str, counted: list[int]
    ) -> None:
        steps = {f"step {number}": "." * 8 * number + "########" for number in range(5)}
        trace = draw_trace(
            ranges=steps | {"optimizer": "......##" * 5}, launches={"main": launches}, streams={7: launches}
        )
        assert steps_of(launching(trace)) == counted

    @pytest.mark.parametrize(
        ("launches", "counted"),
        [
            ("aeN.....bfM.....cgO.....dhP.....iQ......j.......", [0, 1, 2, 3, 4]),  # the recording ended in the last
            ("e.......bfM.....cgO.....dhP.....ikQ.....jlR.....", [1, 2, 3, 4, 5]),  # it began in the first
            ("N.......bfM.....cgO.....dhP.....ikQ.....jlR.....", [1, 2, 3, 4, 5]),
            ("ae......bf......cg......dh......ik......jlR.....", [0, 1, 2, 3, 4, 5]),  # micro-batches
            ("aeN.....bf......cgO.....dh......ikQ.....jl......", [0, 1, 2, 3, 4, 5]),
            ("aeN.....bfM.....cgO.....d.......", [0, 1, 2, 3]),  # too few to tell
            ("aeNp....bfMq....cgOr....dhPs....klRt....iQv.....", [0, 1, 2, 3, 4, 5]),  # fewer micro-batches: it ends
            ("aeNp....bfMq....cgOr....dhPs....klRt....iQ......", [0, 1, 2, 3, 4]),  # as all others, or does not
        ],
    )
    def test_nor_the_first_or_the_last_one_if_all_others_launch_more(self, launches: str, counted: list[int]) -> None:
        """A step that was cut off was said to do without communication."""
        count = len(launches) // 8
        streams = {
            lane: "".join("." if letter.isupper() != is_upper else letter for letter in launches)
            for lane, is_upper in ((7, False), (9, True))
        }
        trace = draw_trace(
            ranges={f"step {number}": "." * 8 * number + "########" for number in range(count)},
            launches={"main": launches},
            streams=streams,
        )
        assert steps_of(launching(trace)) == counted

    @pytest.mark.parametrize(
        ("launches", "counted"),
        [
            ("a..N..e...b..M..f...c.........", [0, 1]),
            ("a..N..e...b..M..f...c..O......", [0, 1]),
            ("a..N..e...b..M..f...c.....g...", [0, 1, 2]),  # a micro-batch
            (".......h..b..M..f...c..O..g...", [1, 2]),
            ("a.....h...b..M..f...c..O..g...", [0, 1, 2]),
            ("a..N..e...b..M......c.........", [0, 1, 2]),  # too few are alike
            ("aN........bM........c.........", [0, 1, 2]),  # the host may have waited for all the rest
        ],
    )
    def test_nor_does_one_of_three_through_which_launches_reach_less(self, launches: str, counted: list[int]) -> None:
        """The recording ended in it, or began: the step was the shortest of three."""
        streams = {
            lane: "".join("." if letter.isupper() != is_upper else letter for letter in launches)
            for lane, is_upper in ((7, False), (9, True))
        }
        steps = {f"step {number}": "." * 10 * number + "#" * 10 for number in range(3)}
        trace = draw_trace(ranges=steps, launches={"main": launches}, streams=streams)
        assert steps_of(launching(trace)) == counted

    @pytest.mark.parametrize(
        ("launches", "counted"),
        [
            ("abc.....d.f.....ghi.....", [0, 2]),
            ("abc.....de......fgh.....", [0, 1, 2]),
            ("abc.....def.....g.i.....jkl.....mno.....", [0, 1, 3, 4]),  # h is lost, with its work
            ("abcde...fghij...k.m.o...pqrst...uvwxy...", [0, 1, 3, 4]),  # so are l and n
            ("abc.....def.....gh......jkl.....mno.....", [0, 1, 3, 4]),  # the last one is
            ("abc.....def......hi.....jkl.....mno.....", [0, 1, 3, 4]),  # the first one is
            ("abcde...fghij...k.l.m...nopqr...stuvw...", [0, 1, 2, 3, 4]),
            ("abc.....d.f.....ghi.....j.l.....mno.....p.r.....stu.....", [*range(7)]),  # every second one lacks some
            ("abc.....def.....ghi.....j.l.....mno.....p.r.....stu.....", [0, 1, 2, 4, 6]),
            ("abc.....d.f.....ghi.....jkl.....mno.....p.r.....stu.....vwx.....yz{.....", [0, 2, 3, 4, 6, 7, 8]),
            # Every third step reduces gradients.
            ("A.C.....D.F.....GHI.....J.L.....M.O.....PQR.....S.U.....V.X.....abc.....", [*range(9)]),
            ("abc.....def.....gh......ijk.....lmn.....", [0, 1, 2, 3, 4]),  # it launches less
            ("abc.....de......fg......hij.....klm.....", [0, 1, 2, 3, 4]),
            ("abc.....dfg.....h.j.....klm.....nop.....", [0, 1, 2, 3, 4]),  # numbers of other calls jump as far
        ],
    )
    def test_nor_one_that_lacks_launches_over_which_numbers_jump(self, launches: str, counted: list[int]) -> None:
        """Their work was lost, too: a step with two collectives less was taken for a whole one."""
        trace = draw_trace(
            ranges={f"step {number}": "." * 8 * number + "########" for number in range(len(launches) // 8)},
            launches={"main": launches},
            streams={7: launches},
        )
        of_places = replace(trace.activities, name_id=trace.activities.start_ns % 8)
        assert steps_of(launching(replace(trace, activities=of_places))) == counted

    @pytest.mark.parametrize(
        ("lost", "uses_numbers", "counted"),
        [
            ({0: 3, 1: 5, 2: 2, 3: 6, 4: 0}, True, [4]),
            ({0: 3, 1: 5, 2: 2, 3: 6, 4: 4}, True, []),
            ({0: 3, 1: 5, 2: 2, 3: 6, 4: 0}, False, [0, 1, 2, 3, 4]),  # they launch what their data need
        ],
        ids=["most", "all", "by itself"],
    )
    def test_nor_those_that_lack_some_where_no_number_of_launches_is_usual(
        self, lost: dict[int, int], uses_numbers: bool, counted: list[int]
    ) -> None:
        """As where calls were lost at random with their work: each step counted with less compute than it had."""
        per_step = 40
        is_lost = np.zeros((len(lost), per_step), np.bool_)
        for step, count in lost.items():
            is_lost[step, (np.arange(count) * 7 + 3 * step + 1) % per_step] = True
        place = np.arange(is_lost.size)
        number = place if uses_numbers else np.cumsum(~is_lost.ravel()) - 1
        letters = np.array([chr(0x100 + at) for at in number])
        launches = "".join(np.where(is_lost.ravel(), ".", letters).tolist())
        trace = draw_trace(
            ranges={f"step {step}": "." * per_step * step + "#" * per_step for step in lost},
            launches={"main": launches},
            streams={7: launches},
        )
        of_places = replace(trace.activities, name_id=trace.activities.start_ns % per_step)
        assert steps_of(launching(replace(trace, activities=of_places))) == counted

    @pytest.mark.parametrize(("lost", "another", "counted"), [(8, 1, [0, 1, 3, 4]), (8, 4, [0, 1, 2, 3, 4])])
    def test_nor_if_a_few_of_those_that_are_left_are_other_kernels(
        self, lost: int, another: int, counted: list[int]
    ) -> None:
        """A library chose another one: the step seemed to do something else, and counted with the compute it lost."""
        number = np.delete(np.arange(5 * 40), slice(90, 90 + lost))  # 40 launches a step
        launches = "".join(chr(0x100 + at) if at in number else "." for at in range(5 * 40))
        trace = draw_trace(
            ranges={f"step {step}": "." * 40 * step + "#" * 40 for step in range(5)},
            launches={"main": launches},
            streams={7: launches},
        )
        names = trace.activities.start_ns % 40
        names[np.isin(trace.activities.start_ns, np.arange(105, 105 + another))] = 40
        assert steps_of(launching(replace(trace, activities=replace(trace.activities, name_id=names)))) == counted

    @pytest.mark.parametrize(
        ("ranges", "launches", "counted"),
        [
            ("..##.##..." * 3, "a.N..O....b.M..L....c.P..Q....", [0, 1, 2]),
            ("..##.##..." * 3, "a.N..O....b.M.......c.P..Q....", [0, 2]),
            ("..##.##..." * 3, "a.N..O....b.M..l....c.P..Q....", [0, 2]),  # its name is not known
            ("..##.##..." * 3, "a.N..O....b.........c.........", [0]),  # of most steps
            ("..##.##..." * 3, "a.N.......b.M..L....c.P.......", [1]),
            ("..##.##..." * 3, "a.N.......b.M.......c.P.......", [0, 1, 2]),  # one of them launches nothing
            ("..##.##.##" * 3, "a.N..O....b.M.......c.P..Q....", [0, 2]),  # and one of step 1 is lost
            ("..##.##............." + "..##.##...", "a.N..O....b.........c.P..Q....", [0, 1, 2]),  # a micro-batch
            ("..##.##..." * 3, "a.........b.........c.........", [0, 1, 2]),  # as on a CPU
        ],
    )
    @pytest.mark.parametrize("name", ["nccl:all_reduce", "ncclGroupEnd", "all_reduce|bucket=0|bytes=8|params=1"])
    def test_nor_one_in_whose_ranges_of_collectives_nothing_communicates(
        self, name: str, ranges: str, launches: str, counted: list[int]
    ) -> None:
        """Their calls were lost with their work: it was said to do without communication."""
        steps = {f"step {number}": "." * 10 * number + "#" * 10 for number in range(3)}
        trace = draw_trace(ranges=[*steps.items(), (name, ranges)], launches={"main": launches}, streams={7: launches})
        assert steps_of(launching(trace)) == counted
        if len(counted) == 2 and "##.##.##" not in ranges:
            (rank,) = find_rank_events(launching(trace))
            (note,) = rank.step_notes
            assert note == (
                "step 1 left out: collectives in it seem to be recorded only in part: in 1 of 2 ranges of collectives "
                "nothing was launched that is known to communicate"
            )

    @pytest.mark.parametrize(
        ("lost", "counted"),
        [
            ("one in seven", []),
            ("all around one collective", [0, 2, 4, 6]),  # as a buffer that was dropped: the others have all
            ("a few", [0, 1, 2, 4, 5, 6, 7]),
            ("in two steps", [0, 1, 3, 4, 6, 7]),  # of eight, which is too few to leave out the others
        ],
    )
    def test_steps_with_all_collectives_do_not_count_where_launches_of_all_were_lost_here_and_there(
        self, lost: str, counted: list[int]
    ) -> None:
        """Of the U-Net without 15 % of its launches three steps happened to have all collectives: 83 % hidden for 93 %.

        Steps differ by themselves, so how many launches one lacks is told by none of them::

            step        |0..............................|1..............................|
            all_reduce          [C]      [C]      [C]           [C]      [ ]      [C]
            launches     kkkkkk.kkkkkk.kkkkkk.kkkkkk.kk  kkk.kkkkkk.kkkkkk.kkkkkk.kkkkk
        """
        is_lost = {
            "one in seven": lambda step, at: (at + 3 * step) % 7 == 0,
            "all around one collective": lambda step, at: step % 2 == 1 and abs(at - 20) < 8,
            "a few": lambda step, at: step == 3 and at in (5, 20),
            "in two steps": lambda step, at: step in (2, 5) and at in (5, 10, 30),
        }[lost]
        launches, collectives = "", iter("ABCDEFGHIJKLMNOPQRSTUVWXYZÀÁÂÃÄÅÆÇ")
        for step in range(8):
            for at in range(50):
                launch = next(collectives) if at in (10, 20, 30, 40) else chr(0x4E00 + 50 * step + at)
                has_one = at not in (11, 21, 31, 41) and at < 45 + step % 4
                launches += launch if has_one and not is_lost(step, at) else "."
        reduces = f"{10 * '.'}##{8 * '.'}##{8 * '.'}##{8 * '.'}##{8 * '.'}"
        trace = draw_trace(
            ranges=[
                *((f"step {number}", 50 * number * "." + 50 * "#") for number in range(8)),
                ("nccl:all_reduce", 8 * reduces),
            ],
            launches={"main": launches},
            streams={7: launches},
        )
        (rank,) = find_rank_events(launching(trace))
        assert [*rank.steps.number.tolist()] == counted
        told = [note for note in rank.step_notes if "one by one, about 12 % of all: also in the steps" in note]
        assert len(told) == (lost == "in two steps"), "4 of 32 collectives are lost"

    def test_ranges_whose_ends_were_lost_do_not_tell_that_a_collective_was(self) -> None:
        """That of the last range, as torch.profiler wrote 0 for the durations of what began late."""
        steps = {f"step {number}": "." * 10 * number + "#" * 10 for number in range(3)}
        launches = "a.N..O....b.M..L....c.P..Q...."
        trace = draw_trace(
            ranges=[*steps.items(), ("nccl:all_reduce", "..##.##..." * 3)],
            launches={"main": launches},
            streams={7: launches},
        )
        spans = trace.spans
        is_lost = (spans.start_ns >= 25) & (spans.end_ns - spans.start_ns == 2)
        damaged = replace(spans, end_ns=np.where(is_lost, spans.start_ns, spans.end_ns))
        assert steps_of(launching(replace(trace, spans=damaged))) == [0, 1, 2]

    def test_steps_of_which_work_alone_was_lost_are_not_what_others_are_compared_with(self) -> None:
        trace = draw_trace(
            ranges={f"step {number}": "." * 8 * number + "########" for number in range(6)},
            launches={"main": "abc.....def.....ghi.....j.l.....mno.....pqr....."},
            streams={7: "a.......def.....ghi.....j.l.....mno.....pqr....."},
        )
        of_places = replace(trace.activities, name_id=trace.activities.start_ns % 8)
        assert steps_of(launching(replace(trace, activities=of_places))) == [1, 2, 4, 5]

    def test_nor_does_what_began_in_such_a_step_though_its_launch_is_lost(self) -> None:
        """Compute beside it may be lost, so it was said to be exposed."""
        trace = draw_trace(
            ranges=THREE_STEPS,
            launches={"main": "........bM......cO......"},
            streams={7: ".........bb.....cc......", 9: "....NN....MM......OO...."},
        )
        (rank,) = measure_overlap(launching(trace)).ranks
        assert ([step.step for step in rank.steps], rank.comm_ns, rank.collectives) == ([1, 2], 4, 2)


class TestWorkBesideThatOfALostStep:
    def test_a_step_at_work_when_a_lost_one_began_does_not_count(self) -> None:
        trace = draw_trace(
            ranges=THREE_STEPS,
            launches={"main": "a.......bM......c......."},
            streams={7: ".aaaaaaaaabb....cc......"},
        )
        assert steps_of(launching(trace)) == [2]
        (rank,) = find_rank_events(launching(trace))
        assert [note.partition(" left out: ")[0] for note in rank.step_notes] == ["step 1", "step 0"]

    def test_if_no_step_is_left_not_all_are_said_to_be_recorded_in_part(self) -> None:
        trace = draw_trace(
            ranges={"step 0": "########", "step 1": "........########"},
            launches={"main": "a.......bM......"},
            streams={7: ".aaaaaaaaabb...."},
        )
        (rank,) = find_rank_events(launching(trace))
        assert (len(rank.steps), rank.why_left_out) == (0, ONLY_BESIDE)

    def test_compute_of_a_lost_step_hides_communication_all_the_same(self) -> None:
        """``b`` was launched in the lost step and ran beside the last step's collective."""
        trace = draw_trace(
            ranges=THREE_STEPS,
            launches={"main": "a.......bM......cO......"},
            streams={7: ".aa.............cc......", 8: "..............bbbbbbbbb.", 9: "..................OOOO.."},
        )
        (rank,) = measure_overlap(launching(trace)).ranks
        assert ([step.step for step in rank.steps], rank.compute_ns) == ([0, 2], 4)
        assert (rank.comm_ns, rank.overlapped_ns) == (4, 4)


def shifted(trace: Trace, by: int) -> Trace:
    table = trace.activities
    return replace(trace, activities=replace(table, start_ns=table.start_ns + by, end_ns=table.end_ns + by))


class TestClocksThatDisagree:
    SOUND = draw_trace(
        ranges=THREE_STEPS,
        launches={"main": "aN......bM......cO......"},
        streams={7: ".aa......bb......cc.....", 9: "..NN......MM......OO...."},
    )

    @staticmethod
    def on_a_slow_clock(launches: str) -> Trace:
        """A character is 10 us: 50 us of idle time before each step but the first."""
        steps = {f"step {number}": "." * 8 * number + "########" for number in range(5)}
        streams = {7: ".aa.....bb......cc......dd......ee......"}
        return launching(draw_trace(ranges=steps, launches={"main": launches}, streams=streams, character_ns=10_000))

    @pytest.mark.parametrize(
        ("launches", "late_ns", "disagree"),
        [
            ("a.......b.......c.......d.......e.......", 1_000_000, False),
            ("a.......b.......c.......d.......e.......", 1_010_000, True),
            ("a.......bf......c.......d.......e.......", 1_010_000, False),  # what was lost may have run before
        ],
    )
    def test_a_device_that_is_idle_begins_some_work_soon(self, launches: str, late_ns: int, disagree: bool) -> None:
        """No wait of the host was recorded: a clock off by 140 ms was said to be a host that runs ahead."""
        late = shifted(self.on_a_slow_clock(launches), late_ns)
        assert one_rank(late).clocks_disagree is disagree
        told = "all 4 activities before which the device was idle begin more than 1 ms after their launch"
        assert any(told in warning for warning in measure_overlap(late).warnings) is disagree

    @pytest.mark.parametrize(
        ("first", "counted"), [(0, [0, 1, 2, 3, 4, 5, 6]), (2, [0, 2, 3, 4, 5, 6]), (4, [0, 1, 2, 3, 4, 5, 6])]
    )
    def test_nor_does_its_clock_jump(self, first: int, counted: list[int]) -> None:
        """From one step on all work came 2 ms later: that step took 2 ms longer, and the host seemed to run ahead."""
        steps = {f"step {number}": "." * 8 * number + "########" for number in range(7)}
        launches = "a.......b.......c.......d.......e.......f.......g......."
        streams = {7: ".aa.....bb......cc......dd......ee......ff......gg......"}
        trace = draw_trace(ranges=steps, launches={"main": launches}, streams=streams, character_ns=10_000)
        later_ns = 2_000_000 * (trace.activities.correlation >= ord("a") + first)
        start_ns, end_ns = (of + later_ns for of in (trace.activities.start_ns, trace.activities.end_ns))
        jumps = replace(trace, activities=replace(trace.activities, start_ns=start_ns, end_ns=end_ns))
        assert one_rank(launching(jumps)).clocks_disagree is (first < 4)
        assert steps_of(launching(jumps)) == counted

    @pytest.mark.parametrize(("returned_ns", "disagree"), [(10_000, False), (400_000, True), (-100_000, True)])
    def test_a_wait_that_ends_with_its_work_tells_that_the_device_has_a_backlog(
        self, returned_ns: int, disagree: bool
    ) -> None:
        """Another process had the device in between, and the clocks were said to disagree."""
        late = shifted(self.on_a_slow_clock("a.......b.......c.......d.......e......."), 1_010_000)
        until_ns = int(late.activities.end_ns.max())
        wait = dict.fromkeys(Synchronizations.__dataclass_fields__, UNKNOWN) | {
            "kind": SyncKind.HOST_WAIT_DEVICE,
            "start_ns": until_ns - 500_000,
            "end_ns": until_ns + returned_ns,
            "process": PID,
            "thread": MAIN,
            "correlation": 1000,
        }
        waited = replace(late, synchronizations=table(Synchronizations, [wait]))
        assert one_rank(waited).clocks_disagree is disagree

    @pytest.mark.parametrize("times", [1000, 0.001])
    def test_times_in_other_units_tell_nothing(self, times: float) -> None:
        """As of kernels in ns beside a host in us: communication took a thousand times as long."""
        trace = self.on_a_slow_clock("a.......b.......c.......d.......e.......")
        table = trace.activities
        start_ns, end_ns = ((of * times).astype(np.int64) for of in (table.start_ns, table.end_ns))
        rank = one_rank(replace(trace, activities=replace(table, start_ns=start_ns, end_ns=end_ns)))
        assert (rank.reason, rank.compute_ns, rank.comm_ns) == (UNITS, None, None)
        assert {(step.window_ns, step.length.ns, step.length.idle_ns) for step in rank.steps} == {(None,) * 3}

    def test_communication_outside_of_steps_was_launched_all_the_same(self) -> None:
        """It ran during steps, by the other clock, and is no reason to give up their figures."""
        trace = draw_trace(
            ranges={"step 0": "..######", "step 1": "........########"},
            launches={"main": "N.abe...cdf.........."},
            streams={7: "....aabe....cdf..", 9: "..NN........"},
        )
        (rank,) = measure_overlap(launching(shifted(trace, -9))).ranks
        assert (rank.clocks_disagree, [step.comm_ns for step in rank.steps]) == (True, [0, 0])

    def test_what_the_host_communicates_is_not_compared_with_the_device(self) -> None:
        """Gloo: ranges on the host's clock, compute on the device's."""
        trace = draw_trace(
            ranges=[*THREE_STEPS.items(), ("all_reduce|bucket=0|bytes=8|params=1", "..####")],
            launches={"main": "aefgh...b.......c......."},
            streams={7: ".aefgh..bb......cc......"},
        )
        sound, off = (one_rank(launching(shifted(trace, by))) for by in (0, -500))
        assert (sound.reason, sound.overlapped_ns) == (None, 4)
        assert (off.reason, off.overlapped_ns, off.exposed_ns, off.overlap_ratio) == (MIXED_CLOCKS, None, None, None)
        assert {step.exposed_ns for step in off.steps} == {None}

    def test_nor_said_to_be_launched_after_a_backward(self) -> None:
        """The device's backward seems to have been launched long before."""
        trace = draw_trace(
            ranges=[
                ("step 0", "########"),
                ("backward", "#######"),
                ("all_reduce|bucket=0|bytes=8|params=1", ".......#"),
            ],
            launches={"main": "aefgh..."},
            streams={7: ".aefgh.."},
        )
        (collective,) = collectives_of(launching(shifted(trace, -500)))
        assert collective.blocking is None

    def test_neighbours_of_a_lost_step_do_not_count_where_steps_overlap(self) -> None:
        """That of step 0 runs into step 1's, so that of the lost step 3 may have run beside its neighbours'."""
        trace = draw_trace(
            ranges={f"step {number}": "." * 8 * number + "########" for number in range(6)},
            launches={"main": "a.......b.......c.......dN......e.......f......."},
            streams={7: ".aaaaaaaaa......c.......d.......e.......f.......", 8: "........bb"},
        )
        assert steps_of(launching(shifted(trace, -500))) == [0, 1, 5]


AHEAD = {f"step {number}": "." * 2 * number + "##" for number in range(6)}
"""The host has launched all six steps before the device has ended the first two."""


def test_a_lost_step_leaves_those_before_it_where_steps_follow_each_other() -> None:
    """None of them had ended when step 4 began on the host, and none counted; but no step runs beside another one."""
    trace = draw_trace(
        ranges=AHEAD, launches={"main": "a.b.c.d.e.f."}, streams={7: "..........aaaaabbbbbcccccddddd.....fffff"}
    )
    assert steps_of(launching(trace)) == [0, 1, 2, 3, 5]


def test_a_lost_step_leaves_out_the_ones_that_overlap_steps_so_far_ahead() -> None:
    """Each step's communication runs beside the next step's compute, so that of step 4's is not known to be alone."""
    trace = draw_trace(
        ranges=AHEAD,
        launches={"main": "aMbNcOdPeQf."},
        streams={7: "..aaaaabbbbbcccccddddd.....fffff", 8: ".......MMMMMNNNNNOOOOOPPPPPQQQQQ"},
    )
    assert steps_of(launching(trace)) == [0, 1, 2]


def one_rank(trace: Trace) -> RankOverlap:
    (rank,) = measure_overlap(trace).ranks
    return rank


def test_a_doubt_about_clocks_is_said_once() -> None:
    warnings = measure_overlap(launching(shifted(TestClocksThatDisagree.SOUND, -500))).warnings
    assert sum(CLOCKS in warning for warning in warnings) == 1


class TestCallsOfAThread:
    """They were lost, and the work that they launched was not."""

    TRACE = draw_trace(
        ranges=[(f"step {step}", "." * 10 * step + "##########") for step in range(3)]
        + [("backward", "...####......####......####...")],
        launches={
            "main": "a.......h.b.......i.c.......k.",
            "autograd": "....dN........eM........fO....",
        },
        streams={7: ".aaa.dd..h.bbb.ee..i.ccc.ff..k", 9: "......NN........MM........OO.."},
    )

    @pytest.mark.parametrize(
        ("lost", "windows", "tails"),
        [
            ("", [9, 9, 9], [1, 1, 1]),
            ("ahbick", [None] * 3, [None] * 3),  # windows were from the first to the last work of the other thread
            ("def", [None] * 3, [None] * 3),  # only what the main thread launched seemed to be backward
        ],
    )
    def test_what_a_step_launched_is_not_known(
        self, lost: str, windows: list[int | None], tails: list[int | None]
    ) -> None:
        calls = self.TRACE.calls
        kept = select(calls, ~np.isin(calls.correlation, [*map(ord, lost)]))
        trace = replace(self.TRACE, calls=kept, is_launch=None, launching_calls=None, has_ambiguous_launch=None)
        rank, overlap = one_rank(trace), measure_overlap(trace)
        assert [step.window_ns for step in rank.steps] == windows
        assert [step.tail_ns for step in rank.steps] == tails
        assert [(step.comm_ns, step.overlapped_ns) for step in rank.steps] == [(2, 1)] * 3
        assert (rank.backward_overlapped_ns is None) is (LOST_CALLS in overlap.warnings) is bool(lost)
        assert [(step.kernels, step.in_backward) for step in rank.steps] == [(None, None) if lost else (4, 1)] * 3

    def test_nor_are_its_collectives_if_their_calls_were_lost(self) -> None:
        """Autograd's thread: 0 were counted, and 2 kernels of 4."""
        calls = self.TRACE.calls
        kept = select(calls, ~np.isin(calls.correlation, [*map(ord, "defNMO")]))
        trace = replace(self.TRACE, calls=kept, is_launch=None, launching_calls=None, has_ambiguous_launch=None)
        assert [(step.kernels, step.collectives, step.in_backward, step.comm_ns) for step in one_rank(trace).steps] == [
            (None, None, None, None)
        ] * 3

    @pytest.mark.parametrize(
        ("backward", "counts"),
        [
            ("...####................####...", [1, None, 1]),  # the range of one step was lost
            ("..............................", [None, None, None]),  # those of all steps were, and nothing is inferred
        ],
    )
    def test_what_is_of_backward_is_not_known_without_its_range(self, backward: str, counts: list[int | None]) -> None:
        spans = [(f"step {step}", "." * 10 * step + "##########") for step in range(3)] + [("backward", backward)]
        drawn = draw_trace(
            ranges=spans,
            launches={"main": "...dN........eM........fO"},
            streams={7: "....dd........ee........ff", 9: "......NN........MM........OO"},
        )
        assert [step.in_backward for step in one_rank(drawn).steps] == counts


@pytest.mark.parametrize("is_open", [False, True])
def test_a_step_that_was_still_open_is_in_no_total(is_open: bool) -> None:
    """Its collective O was one of three; that N and M ran beside its forward g counts for them."""
    drawn = draw_trace(
        ranges=[(f"step {step}", "." * 10 * step + "##########") for step in range(3)]
        + [("backward", "..####......####......####")],
        launches={"main": "a.b.......d.e.......g.h.......", "pt_autograd_0": "...N.........M.........O"},
        streams={7: "aa.bbb....dd.eee....gg.hhh", 9: ".....NNNN......MMMMMM....OOOO"},
    )
    spans = drawn.spans
    last = is_open & (spans.start_ns == 20)
    trace = replace(drawn, spans=replace(spans, is_open=last.astype(np.int64)))
    rank = one_rank(trace)
    assert [step.step for step in rank.steps] == ([0, 1] if is_open else [0, 1, 2])
    of_last = 0 if is_open else 1
    assert (rank.collectives, rank.kernels) == (2 + of_last, 6 + 3 * of_last)
    assert (rank.comm_ns, rank.overlapped_ns, rank.exposed_ns) == (10 + 4 * of_last, 3 + of_last, 7 + 3 * of_last)
