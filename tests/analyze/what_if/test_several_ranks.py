"""Captures of several ranks: some of them unusable, some with few steps in common."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddp_prof.analyze.what_if import questions as ask
from ddp_prof.analyze.what_if.captured import Captured
from ddp_prof.analyze.what_if.prediction import REFUSED, predict_run
from ddp_prof.analyze.what_if.questions import Question
from ddp_prof.analyze.what_if.structure import MOST_STEPS, SHARDED, RankStructure, spread_evenly
from tests.analyze.what_if.test_prediction import JOB, SIZES, SMALLER, THIRD, ask_of, buckets_of
from tests.analyze.what_if.ticking import TICK_NS

RANK_0 = replace(JOB.capture(buckets_of(10)), rank=0, world_size=2)
RANK_1 = replace(JOB.capture(buckets_of(10), seed=1), rank=1, world_size=2)
BROKEN = RankStructure("its steps differ in their kernels: record steps of one kind", rank=1)
WAITS = Question(ask.WAITS)


def test_a_rank_that_cannot_be_used_is_left_out_with_a_note() -> None:
    found = ask_of(RANK_0, BROKEN, asked=[SMALLER, WAITS])
    assert found.reason is None
    assert found.notes == ("rank 1 is left out: its steps differ in their kernels: record steps of one kind",)
    alone = ask_of(RANK_0, asked=[SMALLER])
    assert found.predictions[0] == alone.predictions[0]
    assert found.predictions[1].verdict == REFUSED, "waits need all ranks"


def test_several_such_ranks_are_one_note() -> None:
    found = ask_of(RANK_0, BROKEN, replace(BROKEN, rank=2), replace(BROKEN, rank=None), asked=[SMALLER])
    assert found.notes == (
        "ranks 1, 2 and 1 more are left out: its steps differ in their kernels: record steps of one kind",
    )


def test_where_no_rank_can_be_used_the_reason_is_said() -> None:
    assert ask_of(BROKEN, replace(BROKEN, rank=0), asked=[SMALLER]).reason == BROKEN.reason


def test_what_is_so_for_the_job_is_not_left_out() -> None:
    sharded = RankStructure(SHARDED, rank=1, is_of_job=True)
    for other in (RANK_0, replace(BROKEN, rank=0)):
        assert ask_of(other, sharded, asked=[SMALLER]).reason == SHARDED


def test_a_calibration_may_have_such_a_rank_too() -> None:
    found = predict_run(
        Captured((RANK_0,), parameters=SIZES[::-1]), [SMALLER], lambda: THIRD, None, Captured((BROKEN, RANK_0))
    )
    assert found.reason is None
    assert found.notes == (f"--calibrate: rank 1 is left out: {BROKEN.reason}",)


def test_waits_are_known_from_the_steps_that_all_ranks_have() -> None:
    shifted = replace(RANK_1, keys=RANK_1.keys + 3)
    found = ask_of(RANK_0, shifted, asked=[WAITS])
    assert found.shared_steps == 5
    assert found.predictions[0].reason is None
    two = replace(RANK_1, keys=RANK_1.keys + 6)
    found = ask_of(RANK_0, two, asked=[WAITS])
    assert (found.shared_steps, found.predictions[0].verdict) == (2, REFUSED)
    assert "only 2 steps are in the captures of all ranks" in str(found.predictions[0].reason)
    assert ask_of(RANK_0, asked=[SMALLER]).shared_steps is None


def test_how_well_transfers_are_known_is_in_the_interval_of_waits() -> None:
    (found,) = ask_of(RANK_0, RANK_1, asked=[WAITS]).predictions
    noisy = replace(RANK_1, start_ns=RANK_1.start_ns + 60_000 * (np.arange(RANK_1.calls) % 2))
    (wide,) = ask_of(RANK_0, noisy, asked=[WAITS]).predictions
    assert wide.parts_ns["transfers"] > found.parts_ns["transfers"]


def test_a_faster_link_does_not_shorten_the_waits_of_the_one_rank_that_was_read() -> None:
    """Of a rank that waits for a slower one, half the time per byte was a gain of 578 us; it is 128."""
    lag_ns = TICK_NS * 600 * (np.arange(RANK_0.calls) % 3 == 0)
    waiting = replace(RANK_0, start_ns=RANK_0.start_ns - lag_ns, ready_ns=RANK_0.ready_ns - lag_ns)
    asked = [Question(ask.TIME_PER_BYTE, 0.5), Question(ask.HALF_BYTES)]
    for one in ask_of(waiting, asked=asked).predictions:
        assert (one.verdict, "as where a rank waits for others" in str(one.reason)) == (REFUSED, True)
    assert all(one.reason is None for one in ask_of(waiting, RANK_1, asked=asked).predictions)
    assert all(one.reason is None for one in ask_of(RANK_0, asked=asked).predictions)


@pytest.mark.parametrize(
    ("one", "other"), [(range(100), range(99)), (range(70), range(5, 70)), (range(200), range(0, 200, 2))]
)
def test_ranks_that_have_the_same_steps_choose_the_same(one: range, other: range) -> None:
    """Evenly spread positions of 100 and of 99 steps had 31 of 60 in common."""
    first, second = (set(np.array(keys)[spread_evenly(np.array(keys))].tolist()) for keys in (one, other))
    common = set(one) & set(other)
    assert len(first) == len(second) == min(MOST_STEPS, len(other))
    assert len(first & second) >= min(0.9 * MOST_STEPS, len(first) * len(common) / len(one))


def test_chosen_steps_are_spread_over_all() -> None:
    chosen = spread_evenly(np.arange(1000))
    assert len(chosen) == MOST_STEPS
    assert np.all(np.diff(chosen) > 0)
    assert np.histogram(chosen, bins=10, range=(0, 1000))[0].min() >= 4
    assert len({*(chosen % 2)}) == 2
