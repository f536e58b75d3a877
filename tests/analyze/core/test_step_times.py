"""How long a step took: by its range on the host, or, where the host runs ahead, by its work on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.overlap import RankOverlap, measure_overlap
from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.analyze.variants.waterfall import PARTS, measure_waterfall
from ddp_prof.notes import Doubt
from ddp_prof.present.tables.compare import waterfall_notes
from ddp_prof.present.tables.overlap import overlap_view
from ddp_prof.trace import Trace
from tests.drawing import draw_trace
from tests.measuring import analysis_of

STEPS = {"step 0": "####", "step 1": "....####", "step 2": "........####"}
LAUNCHES = {"main": "aA..bB..cC"}

AHEAD = draw_trace(
    ranges=STEPS,
    launches=LAUNCHES,
    streams={
        7: "..aaaaaa...bbbbbb...cccc",
        9: "......AAAAA....BBBB.........CCCC",
    },
)
"""Of step 0's device work 2 lie in its host range, of the others' none."""


def rank_of(trace: Trace) -> RankOverlap:
    (rank,) = measure_overlap(trace).ranks
    return rank


def lengths_of(trace: Trace) -> list[int | None]:
    return [step.length.ns for step in rank_of(trace).marked_steps]


def test_where_the_host_keeps_up_its_ranges_tell() -> None:
    prompt = draw_trace(ranges=STEPS, launches=LAUNCHES, streams={7: ".aaa.bbb.ccc", 9: "..AA..BB..CC"})
    assert rank_of(prompt).clock == "host"
    assert lengths_of(prompt) == [4, 4, 4]
    assert measure_overlap(prompt).step_notes == ()


def test_where_the_host_runs_ahead_a_step_lasts_until_the_next_one_begins_on_the_device() -> None:
    assert rank_of(AHEAD).clock == "device"
    assert [step.host_ns for step in rank_of(AHEAD).steps] == [4, 4, 4]
    assert lengths_of(AHEAD) == [9, 9, None], "from 2 to 11, and from 11 to 20"
    (note,) = measure_overlap(AHEAD).step_notes
    assert note.startswith("the host runs ahead: ")


def test_all_parts_of_a_length_lie_in_one_window() -> None:
    """
    window 0   ..#########
    compute    ..aaaaaa...        6, 2 of it beside communication
    exposed    ........AAA        3
    """
    first, second, _ = (step.length for step in rank_of(AHEAD).steps)
    assert (first.compute_only_ns, first.overlapped_ns, first.exposed_ns, first.idle_ns) == (4, 2, 3, 0)
    assert (second.compute_only_ns, second.overlapped_ns, second.exposed_ns, second.idle_ns) == (4, 2, 2, 1)


def test_the_waterfall_takes_the_same_window() -> None:
    """Compute was cut by the host's clock, 2 of 6, and communication counted by its launch: the rest was negative."""
    (budget,) = measure_waterfall([(analysis_of(AHEAD), ())]).budgets
    assert (budget.step_ns, budget.compute_ns, budget.steps) == (9, 6, 2)
    assert (budget.transfer_ns, budget.tail_ns) == (2, None), "of 3 and 2 the mean, rounded to even"
    assert budget.rest_ns == 1
    assert sum(getattr(budget, f"{part}_ns") or 0 for part in PARTS) == budget.step_ns


def test_compare_takes_the_same_length() -> None:
    (summary,) = compare_variants([measure_overlap(AHEAD)])
    assert (summary.step_ns, summary.steps, summary.compute_only_ns) == (9, 3, 4)


def test_a_copy_fetched_ahead_on_a_stream_of_its_own_begins_no_step() -> None:
    """Nor does what a data loader computes there: the step begins where it computes most."""
    streams = {7: "..aaaaaa...bbbbbb...cccc", 8: "..........1x..", 9: ".....2y"}
    trace = draw_trace(ranges=STEPS, launches={"main": "a...b1x.c2y"}, streams=streams)
    assert lengths_of(trace) == [9, 9, None]


def test_communication_of_another_step_counts_where_it_runs() -> None:
    """Of step 0's 9 the last 3 run in the window of step 1, two of them beside its compute."""
    streams = {7: "..aaaaaa...bbbbbb...cccc", 9: "........AAAAAAAAAA.."}
    trace = draw_trace(ranges=STEPS, launches={"main": "aA..b...c"}, streams=streams)
    first, second, _ = rank_of(trace).steps
    assert (first.comm_ns, second.comm_ns) == (10, 0), "by launch"
    assert (first.length.overlapped_ns, first.length.exposed_ns) == (0, 3)
    assert (second.length.overlapped_ns, second.length.exposed_ns, second.length.idle_ns) == (6, 1, 2)


def test_a_step_that_another_thread_made_begin_earlier_has_no_length() -> None:
    """Its streams do not work in the order of launches, so nothing tells: no length is negative."""
    trace = draw_trace(ranges=STEPS, launches=LAUNCHES, streams={7: ".........aa", 8: "......bb......cc"})
    assert rank_of(trace).clock == "device"
    assert lengths_of(trace) == [None, 8, None]


def test_what_cannot_be_told_is_said() -> None:
    trace = draw_trace(ranges={"step 0": "####"}, launches={"main": "a"}, streams={7: ".......aaa"})
    rank = rank_of(trace)
    assert (rank.clock, lengths_of(trace)) == ("device", [None])
    notes = overlap_view(measure_overlap(trace), by_step=False).notes
    assert any(note.startswith("how long a step took is not known") for note in notes)
    waterfall = measure_waterfall([(replace(analysis_of(trace), label="x"), ())])
    assert (waterfall.budgets, waterfall.left_out, waterfall.untimed) == ((), (), ("x",))
    assert waterfall_notes(waterfall) == ["x: left out, the lengths of its steps are not known"]


@pytest.mark.parametrize(
    ("computes", "clock", "length"), [("aaa.bbb.ccc", "host", 4), ("..aaabbbbbbbbbbbbbbcccc", "device", None)]
)
def test_compute_without_launches_tells_which_clock_measures_steps(
    computes: str, clock: str, length: int | None
) -> None:
    """By the launches of copies alone the host was said to run ahead, or to keep up with what takes twice as long."""
    trace = draw_trace(ranges=STEPS, launches={"main": "1...2...3"}, streams={7: computes, 8: "...1..........2......3"})
    assert (rank_of(trace).clock, lengths_of(trace)) == (clock, [length] * 3)
    assert not any("runs ahead" in note for note in measure_overlap(trace).step_notes)


def test_the_period_after_which_warm_up_follows_is_no_length() -> None:
    names = ("step|index=0", "step|index=1|warmup=1", "step|index=2", "step|index=3")
    ranges = {name: "." * (4 * index) + "####" for index, name in enumerate(names)}
    launches = {"main": "a...b...c...d"}
    trace = draw_trace(ranges=ranges, launches=launches, streams={7: "....aaaabbbbccccdddd...."})
    rank = rank_of(trace)
    assert (rank.clock, [step.step for step in rank.steps]) == ("device", [0, 2, 3])
    assert lengths_of(trace) == [None, 4, None]


@pytest.mark.parametrize(
    ("launches", "lengths"),
    [
        ("a...b...c...d...e", [4, None, 4, None]),  # a step whose range was lost, or a validation
        ("a...b.......d...e", [4, 8, 4, None]),
    ],
)
def test_nor_is_one_in_which_as_much_as_a_step_was_launched_in_no_step(
    launches: str, lengths: list[int | None]
) -> None:
    """Without numbers that tell that a step is missing, the step before it seemed to take twice as long."""
    ranges = [("train_step", "." * (4 * at) + "####") for at in (0, 1, 3, 4)]
    work = "....aaaabbbbccccddddeeee....".replace("c", "c" if "c" in launches else ".")
    trace = draw_trace(ranges=ranges, launches={"main": launches}, streams={7: work})
    assert (rank_of(trace).clock, lengths_of(trace)) == ("device", lengths)


def test_a_step_that_the_next_one_did_not_follow_has_no_length_although_another_step_is_left_out() -> None:
    """Of step 1 no launch was recorded, and steps 3 to 6 were not recorded at all."""
    ranges = {f"step {number}": "." * 4 * at + "####" for at, number in enumerate((0, 1, 2, 7, 8))}
    trace = draw_trace(
        ranges=ranges, launches={"main": "a.......c...d...e"}, streams={7: "....aaaa....ccccddddeeee...."}
    )
    trace = replace(trace, is_launch=np.ones(len(trace.calls), np.bool_))
    assert [step.step for step in rank_of(trace).steps] == [0, 2, 7, 8]
    assert lengths_of(trace) == [None, None, 4, None]


def test_that_windows_overlap_is_said_where_they_could_be_summed() -> None:
    """
    window 0   .#####
    window 1   .....#####
    window 2   .........######      3 of them count twice, or the sum would be 14
    """
    trace = draw_trace(ranges=STEPS, launches=LAUNCHES, streams={7: ".aaa.bbb.ccc", 9: "..AAAABBBB..CCC"})
    rank = rank_of(trace)
    assert rank.clock == "host"
    assert sum(step.window_ns for step in rank.steps) == 16
    said = "windows of steps overlap: sums of them, and of their parts, count 0.0 µs more than once"
    assert said in overlap_view(measure_overlap(trace), by_step=True).notes
    assert said not in overlap_view(measure_overlap(trace), by_step=False).notes
    apart = draw_trace(ranges=STEPS, launches=LAUNCHES, streams={7: ".aaa.bbb.ccc"})
    assert not any("windows" in note for note in overlap_view(measure_overlap(apart), by_step=True).notes)


def test_where_one_run_knows_no_waiting_it_is_told_apart_in_neither() -> None:
    """Of the second run rank 1 is missing: its whole tail was compared with a tail without the waiting."""

    def runs(label: str, ranks: int) -> RunAnalysis:
        streams = ({9: "...AAAA.", 7: "aaa....o"}, {9: ".....AA.", 7: "aaaaa..o"})
        return replace(
            analysis_of(
                *(
                    draw_trace(
                        ranges={"step 0": "########", "backward": "#"},
                        launches={"main": "a", "pt_autograd_0": "A", "other": "..o"},
                        streams=streams[rank],
                        ranks={4242: rank},
                        world_size=2,
                        path=f"{label}{rank}",
                    )
                    for rank in range(ranks)
                )
            ),
            label=label,
        )

    both, one = runs("naive", 2), runs("flat", 1)
    waterfall = measure_waterfall([(both, ()), (one, ())])
    known, unknown = waterfall.budgets
    (change,) = waterfall.changes
    assert (known.wait_ns, unknown.wait_ns, change.wait_ns) == (1, None, None)
    assert (known.tail_ns, unknown.tail_ns, change.tail_ns) == (2, 4, 0), "of rank 0 alone, with its waiting of 2"
    assert sum(getattr(change, f"{part}_ns") or 0 for part in PARTS) == change.step_ns


EARLY = draw_trace(
    ranges={"step 0": "######", "step 1": "..........######", "step 2": "....................######"},
    launches={"main": "aA........bB........cC"},
    streams={7: ".aaaaaa....bbbbbb....cccccc", 9: "....AAAA......BBBB......CCCC"},
)
"""Each range of 6 holds 5 + 2 of the 10 that its step launched: host and device take 10 for a step."""


def test_ranges_that_end_early_do_not_measure_steps() -> None:
    """Less than half lies outside, but a reader would conclude that the step is 6 long and computes 5."""
    rank = rank_of(EARLY)
    assert (rank.step_work_ns, rank.held_work_ns) == (30, 21), "9 of 30 are in no range, 6 between two"
    assert rank.clock == "device"
    assert lengths_of(EARLY) == [10, 10, None]
    assert [step.length.compute_only_ns for step in rank.steps] == [3, 3, None]
    (note,) = measure_overlap(EARLY).step_notes
    assert note.startswith("the host runs ahead: a step's range on the host does not hold")


def test_ranges_that_lack_as_much_as_they_hold_of_the_step_before_do() -> None:
    """In a steady state each has the length of a step; only the first and the last one differ."""
    steps = {f"step {index}": f"{'.' * 10 * index}{'#' * 10}" for index in range(9)}
    letters = "abcdefghi"
    trace = draw_trace(
        ranges=steps,
        launches={"main": "".join(f"{letter}........." for letter in letters)},
        streams={7: "...." + "".join(f"{letter * 8}.." for letter in letters)},
    )
    rank = rank_of(trace)
    assert (rank.step_work_ns, rank.held_work_ns, rank.clock) == (72, 70, "host")
    assert lengths_of(trace) == [10] * 9
    assert measure_overlap(trace).step_notes == ()


def test_of_a_single_step_a_note_says_what_lies_outside() -> None:
    """There is no next step whose first work would end it."""
    trace = draw_trace(ranges={"step 0": "######"}, launches={"main": "aA"}, streams={7: ".aaaaaa", 9: "....AAAA"})
    rank = rank_of(trace)
    assert (rank.clock, lengths_of(trace)) == ("host", [6])
    (note,) = measure_overlap(trace).step_notes
    assert note.startswith("30 % of the device work that steps launched ran outside of their ranges on the host")
    assert isinstance(note, Doubt)
