"""Work whose call was lost is of the step and the phase in which the calls before and behind it were made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.core.unlaunched import find_unlaunched
from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.trace import UNKNOWN, Trace, select
from tests.drawing import PID, column, draw_trace

RANGES = [
    ("step 0", "############............"),
    ("step 1", "............############"),
    ("backward", "....#####.......#####..."),
]
MAIN, AUTOGRAD = "a.b......h..i.k......q..", "....cd.Ef.......lm.Np..."
COMPUTE, REDUCTIONS = ".aabb.ccddff.hh..iikk.llmmmppqq", "..........EEEE.............NNNNN"


def without_calls(lost: str) -> Trace:
    """Two steps with the launches, and their numbers in alphabetical order, of which some were not recorded."""
    drawn = draw_trace(
        ranges=RANGES, launches={"main": MAIN, "autograd": AUTOGRAD}, streams={7: COMPUTE, 9: REDUCTIONS}
    )
    in_order = {ord(letter): ord(letter.lower()) for letter in MAIN + AUTOGRAD}
    calls, activities = (
        replace(table, correlation=column(in_order[number] for number in table.correlation.tolist()))
        for table in (drawn.calls, drawn.activities)
    )
    calls = select(calls, ~np.isin(calls.correlation, [*map(ord, lost.lower())]))
    return replace(
        drawn, calls=calls, activities=activities, is_launch=None, launching_calls=None, has_ambiguous_launch=None
    )


@pytest.mark.parametrize(
    ("lost", "in_backward", "tails"),
    [
        ("", [1, 1], [1, 1]),
        ("E", [1, 1], [1, 1]),
        ("dN", [1, 1], [1, 1]),
        ("b", [None, 1], [None, 1]),  # of forward or of backward
        ("p", [1, None], [1, None]),  # of backward, or what follows it
    ],
)
def test_work_whose_call_was_lost_is_of_the_step_of_the_calls_beside(
    lost: str, in_backward: list[int | None], tails: list[int | None]
) -> None:
    """It was in no step: a step without its collective seemed not to communicate."""
    trace = without_calls(lost)
    (rank,), (whole,) = (measure_overlap(one).ranks for one in (trace, without_calls("")))
    same = ("kernels", "collectives", "comm_ns", "exposed_ns", "window_ns", "compute_only_ns", "idle_ns")
    for step, of_whole in zip(rank.steps, whole.steps, strict=True):
        assert [getattr(step, name) for name in same] == [getattr(of_whole, name) for name in same]
    assert [step.in_backward for step in rank.steps] == in_backward
    assert [step.tail_ns for step in rank.steps] == tails
    notes = [note for note in measure_overlap(trace).warnings if "no launching call" in note]
    assert [note.partition(" activities")[0] for note in notes] == [f"{len(lost)} of 14"] * bool(lost)
    assert all("tell" in note for note in notes)


def test_work_between_two_steps_is_of_none() -> None:
    trace = without_calls("h")
    overlap = measure_overlap(trace)
    assert [step.kernels for step in overlap.ranks[0].steps] == [6, 7]
    assert any("1 of 14 activities has no launching call and belongs to no step" in note for note in overlap.warnings)


@pytest.mark.parametrize(("lost", "kernels"), [("a", [6, 7]), ("q", [7, 6])])
def test_work_before_the_first_call_or_behind_the_last_one_is_of_no_step(lost: str, kernels: list[int]) -> None:
    """Which calls were before it, or behind, is not known."""
    trace = without_calls(lost)
    assert len(find_unlaunched(trace, PID).caller) == 0
    assert [step.kernels for step in measure_overlap(trace).ranks[0].steps] == kernels


def test_the_thread_that_made_a_lost_call_is_that_of_the_calls_beside() -> None:
    trace = without_calls("")
    main, autograd = (int(trace.calls.lane[trace.calls.correlation == ord(letter)][0]) for letter in "ac")
    callers = {lost: find_unlaunched(without_calls(lost), PID).caller.tolist() for lost in "dikb"}
    assert callers == {"d": [autograd], "i": [main], "k": [UNKNOWN], "b": [UNKNOWN]}


@pytest.mark.parametrize(
    ("lost", "share"),
    [
        ("d", 0),
        ("b", 2 / 25),  # of forward or of backward
        ("h", 2 / 25),  # of which step
    ],
)
def test_work_counts_as_of_an_unknown_launch_unless_the_calls_beside_tell_step_and_phase(
    lost: str, share: float
) -> None:
    (rank,) = find_rank_events(without_calls(lost))
    assert rank.recording.unlaunched == pytest.approx(share)
