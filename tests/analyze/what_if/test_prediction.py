"""Predicted changes against truth that is known: computed tick by tick, or measured on a real job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_prof import load_runs
from ddp_prof.analyze.step_cost import ON_CPU, Slowed
from ddp_prof.analyze.what_if import questions as ask
from ddp_prof.analyze.what_if.captured import Captured
from ddp_prof.analyze.what_if.link import fit_link
from ddp_prof.analyze.what_if.prediction import (
    CANNOT_BE_TOLD,
    GAIN,
    LOSS,
    MOST_FILES,
    NO_CHANGE,
    REFUSED,
    Prediction,
    Predictor,
    RunPrediction,
    predict_run,
)
from ddp_prof.analyze.what_if.questions import Question
from ddp_prof.analyze.what_if.rules import fill_at_most, fill_until_reached
from ddp_prof.analyze.what_if.sizes import find_gradients
from ddp_prof.analyze.what_if.structure import RankStructure
from ddp_prof.analyze.why_unknown import GRAPHS
from ddp_prof.runs.run import MOST_FILES_OF_KERNELS
from tests.analyze.what_if.ticking import TICK_NS, Job

MB = 2**20
SIZES = tuple(mb * MB for mb in (4, 1, 16, 1, 2, 24, 1, 8, 2, 16, 1, 4, 12, 1, 2, 30, 1, 2, 4, 10))
JOB = Job(SIZES, works=tuple(60 + size / MB * 6 for size in SIZES))
THIRD = Slowed(1 / 3, 0.3, 0.36, None)
SMALLER = Question(ask.BUCKET_SIZE, 4)


def buckets_of(mb: float) -> list[list[int]]:
    return fill_until_reached(np.array(SIZES), MB, mb * MB)  # the first bucket is small, as by default


CAPTURE = JOB.capture(buckets_of(10), steps=3)


def predictor_of(structure: RankStructure, slowed: Slowed = THIRD, **more: object) -> Predictor:
    gradients = find_gradients(structure, SIZES[::-1])
    assert not isinstance(gradients, str), gradients
    link = fit_link(structure.took_ns.astype(float), gradients.bucket_bytes)
    assert not isinstance(link, str), link
    return Predictor(structure, gradients, link, slowed, **more)  # type: ignore[arg-type]


def ask_of(
    *structures: RankStructure, asked: Sequence[Question], slowed: Slowed = THIRD, bare: bool = False
) -> RunPrediction:
    captured = Captured(structures, parameters=() if bare else SIZES[::-1])
    return predict_run(captured, asked, lambda: slowed)


def one_of(structure: RankStructure, asked: Question) -> Prediction:
    (found,) = ask_of(structure, asked=[asked]).predictions
    return found


SETTINGS = (1, 6, 10, 20, 30, 40, 60)


@pytest.mark.parametrize("slowed", [0.0, 1 / 3])
def test_every_setting_follows_from_every_other(slowed: float) -> None:
    """Within 3 %, the best of seven is found from each, and each step is built again from its parts."""
    job = replace(JOB, slowed=slowed, per_mb=16)
    truth = {mb: job.length_ns(buckets_of(mb)) for mb in SETTINGS}
    best = min(truth, key=lambda mb: truth[mb])
    for mb in SETTINGS:
        one = predictor_of(job.capture(buckets_of(mb), steps=3), Slowed(slowed, slowed, slowed, None))
        assert one.off < 0.003
        found = {
            other: truth[mb] + float(one.change_ns(Question(ask.BUCKET_SIZE, other), buckets_of(other)).mean())
            for other in SETTINGS
        }
        for other in SETTINGS:
            assert found[other] == pytest.approx(truth[other], rel=0.005), (mb, other)
        assert truth[min(found, key=lambda one: found[one])] <= 1.001 * truth[best]


def test_without_times_of_single_gradients_the_interval_is_wider() -> None:
    structure = replace(JOB.capture(buckets_of(20)), into=None)
    known, unknown = one_of(JOB.capture(buckets_of(20)), SMALLER), one_of(structure, SMALLER)
    assert "ready" in unknown.parts_ns
    assert "ready" not in known.parts_ns
    assert unknown.low_ns is not None
    assert unknown.high_ns is not None
    truth = JOB.length_ns(buckets_of(4)) - JOB.length_ns(buckets_of(20))
    assert unknown.low_ns <= truth <= unknown.high_ns


def test_a_large_first_bucket_that_is_divided_starts_to_communicate_earlier() -> None:
    """In a recent torch the first bucket has the cap that is given. All of it was taken as ready with its last part.

    So more buckets cost their overheads only: a loss of 0.07 to 0.17 ms was told, where the truth is a gain of 0.20.
    """
    job, asked = replace(JOB, per_mb=20, overhead=20), Question(ask.BUCKET_SIZE, 4)
    explicit = {mb: fill_until_reached(np.array(SIZES), mb * MB, mb * MB) for mb in (40, 4)}
    structure = replace(job.capture(explicit[40]), into=None, is_recent_torch=True)
    (found,) = ask_of(structure, asked=[asked]).predictions
    truth = job.length_ns(explicit[4]) - job.length_ns(explicit[40])
    assert truth < 0
    assert found.verdict != LOSS
    assert found.low_ns is not None
    assert found.high_ns is not None
    assert found.low_ns <= truth <= found.high_ns


def test_25_mb_that_are_given_are_not_the_default_of_a_recent_torch() -> None:
    """Today's first bucket, a single gradient of 4 MiB, fits both ways to divide gradients; today's cap is 4 MiB."""
    explicit, default = (fill_until_reached(np.array(SIZES), first * MB, 25 * MB) for first in (25, 1))
    structure, asked = JOB.capture(buckets_of(4)), Question(ask.BUCKET_SIZE, 25)
    assert buckets_of(4) == fill_until_reached(np.array(SIZES), 4 * MB, 4 * MB)
    told, other = (predictor_of(replace(structure, is_recent_torch=told)) for told in (True, None))
    assert told.buckets(asked) == explicit != default
    assert other.buckets(asked) == default
    assert one_of(structure, asked).parts_ns["first bucket"] > 0, "which one of both is not known"
    of_default = predictor_of(replace(JOB.capture(buckets_of(25)), is_recent_torch=True))
    assert of_default.buckets(asked) == default, "today's"


def test_views_save_the_copies_and_uncover_the_last_collective() -> None:
    job = replace(JOB, copy_per_mb=8)
    structure = job.capture(buckets_of(10))
    truth = JOB.length_ns(buckets_of(10)) - job.length_ns(buckets_of(10))
    found = one_of(structure, Question(ask.VIEWS))
    assert found.change_ns == pytest.approx(truth, rel=0.05)
    assert found.verdict == GAIN


def test_a_faster_link_and_half_of_the_bytes() -> None:
    job = replace(JOB, per_mb=30)
    structure = job.capture(buckets_of(10))
    truth = replace(job, per_mb=15).length_ns(buckets_of(10)) - job.length_ns(buckets_of(10))
    for asked in (Question(ask.TIME_PER_BYTE, 0.5), Question(ask.HALF_BYTES)):
        found = one_of(structure, asked)
        assert (found.change_ns, found.verdict) == (pytest.approx(truth, rel=0.02), GAIN)
    slower = one_of(structure, Question(ask.TIME_PER_BYTE, 2))
    assert slower.verdict == LOSS


def test_of_a_hundred_equal_settings_hardly_any_seems_to_differ() -> None:
    """Backward is so long, and the last bucket so small, that no cap up to 20 MB makes a difference."""
    verdicts, slow = [], Slowed(0.0, 0.0, 0.02, None)
    for seed in range(10):
        job = replace(JOB, works=tuple(2 * work for work in JOB.works), slowed=0.0, overhead=2, per_mb=0.6, noise=0.02)
        structure = job.capture(buckets_of(10), steps=12, seed=seed)
        sizes = np.linspace(3, 20, 10).tolist()
        found = ask_of(structure, asked=[Question(ask.BUCKET_SIZE, mb) for mb in sizes], slowed=slow)
        verdicts += [one.verdict for one in found.predictions]
    assert len(verdicts) == 100
    assert sum(one != CANNOT_BE_TOLD for one in verdicts) <= 10


def test_intervals_cover_the_truth_of_noisy_captures() -> None:
    job, asked, inside = replace(JOB, per_mb=16), (1, 4, 30, 40), 0
    for seed in range(5):
        structure = replace(job, noise=0.03).capture(buckets_of(10), steps=12, seed=seed)
        found = ask_of(structure, asked=[Question(ask.BUCKET_SIZE, mb) for mb in asked]).predictions
        for mb, one in zip(asked, found, strict=True):
            truth = job.length_ns(buckets_of(mb)) - job.length_ns(buckets_of(10))
            assert one.low_ns is not None
            assert one.high_ns is not None
            inside += one.low_ns <= truth <= one.high_ns
    assert inside >= 18, "90 % of 20"


def test_today_itself_is_no_change() -> None:
    found = one_of(JOB.capture(buckets_of(10)), Question(ask.BUCKET_SIZE, 10))
    assert (found.change_ns, found.verdict, found.reason) == (0, NO_CHANGE, "the same buckets as today")


class TestRefusals:
    """Each says in one line what is missing, and what would lift it."""

    @pytest.mark.parametrize(
        ("captured", "slowed", "way"),
        [
            (Captured(()), THIRD, "capture a step of training"),
            (Captured((RankStructure(GRAPHS),)), THIRD, "--cuda-graph-trace=node"),
            (Captured((RankStructure("its steps differ in their kernels"),)), THIRD, "steps differ"),
            (Captured((CAPTURE,), shares_gpu=True), THIRD, "a GPU for each rank"),
            (Captured((CAPTURE,), is_alone=True), THIRD, "with several ranks"),
            (Captured((replace(CAPTURE, is_gloo=True, at_once=3),)), THIRD, "such as naive"),
            (Captured((CAPTURE,)), Slowed(None, 0, 1, "no kernel ran both ways"), "no kernel ran both ways"),
            (Captured((replace(CAPTURE, on_host=True),)), Slowed(None, None, None, ON_CPU), "--calibrate"),
        ],
    )
    def test_of_a_capture(self, captured: Captured, slowed: Slowed, way: str) -> None:
        found = predict_run(captured, [SMALLER], lambda: slowed)
        assert found.reason is not None
        assert way in found.reason
        assert "\n" not in found.reason
        assert found.predictions == ()

    def test_unknown_sizes(self) -> None:
        structure = replace(JOB.capture(buckets_of(10)), into=None, sizes_from=None)
        found = ask_of(structure, asked=[SMALLER], bare=True)
        assert found.reason is not None
        assert "--parameters FILE" in found.reason

    def test_one_size_of_collectives(self) -> None:
        job = replace(JOB, sizes=(MB,) * 8, works=(100.0,) * 8)
        structure = job.capture([[0, 1], [2, 3], [4, 5], [6, 7]])
        found = ask_of(structure, asked=[SMALLER], bare=True)
        assert found.reason is not None
        assert "another bucket size" in found.reason

    def test_a_rebuild_that_is_off(self) -> None:
        structure = JOB.capture(buckets_of(10))
        late = replace(
            structure, resumes_ns=structure.resumes_ns + 300 * TICK_NS, ends_ns=structure.ends_ns + 300 * TICK_NS
        )
        found = ask_of(late, asked=[SMALLER])
        assert found.reason is not None
        assert "ddp-prof critical" in found.reason
        assert found.predictions == ()

    def test_a_bucket_far_beyond_what_was_measured(self) -> None:
        found = one_of(JOB.capture(buckets_of(10)), Question(ask.ONE_BUCKET))
        assert (found.verdict, found.change_ns) == (REFUSED, None)
        assert found.reason is not None
        assert "capture it with buckets of" in found.reason
        assert found.beyond_ns is not None

    def test_questions_that_one_rank_does_not_answer(self) -> None:
        structure = JOB.capture(buckets_of(10))
        for kind in (ask.COMMUNICATION, ask.WAITS):
            found = one_of(structure, Question(kind))
            assert (found.verdict, found.reason and found.reason.endswith("give the captures of all ranks")) == (
                REFUSED,
                True,
            )
        found = one_of(structure, Question(ask.RANKS, 8))
        assert found.reason is not None
        assert "capture it with 8 ranks" in found.reason

    def test_views_where_nothing_is_copied(self) -> None:
        found = one_of(JOB.capture(buckets_of(10)), Question(ask.VIEWS))
        assert found.verdict == REFUSED

    def test_buckets_that_cannot_be_divided(self) -> None:
        structure = replace(JOB.capture(buckets_of(20)), into=None)
        found = ask_of(structure, asked=[SMALLER], bare=True)
        assert [one.verdict for one in found.predictions] == [REFUSED]
        assert found.predictions[0].reason == (
            "single gradients are not known, and today's buckets are larger: give --parameters FILE"
        )


def test_the_captures_of_all_ranks_tell_transfers_from_waits() -> None:
    """Rank 1 waits 50 ticks in each collective, which it would not if no rank were late."""
    structure = JOB.capture(buckets_of(10))
    waiting = replace(JOB, overhead=JOB.overhead + 50).capture(buckets_of(10))
    asked = [Question(ask.WAITS), Question(ask.COMMUNICATION)]
    assert [one.verdict for one in ask_of(waiting, asked=asked).predictions] == [REFUSED, REFUSED]
    found = ask_of(waiting, structure, asked=asked)
    assert found.measured_ns == pytest.approx(JOB.length_ns(buckets_of(10)), rel=1e-3), "of the one that waits least"
    waits, without = found.predictions
    assert waits.change_ns == 0
    assert without.change_ns == pytest.approx(
        JOB.forward * TICK_NS + sum(JOB.works) * TICK_NS + JOB.rest * TICK_NS - found.measured_ns, rel=0.01
    )


def test_our_buckets_hold_at_most_their_cap() -> None:
    one = predictor_of(JOB.capture(fill_at_most(np.array(SIZES), 10 * MB)), holds_at_most=True)
    assert one.buckets(Question(ask.BUCKET_SIZE, 20)) == fill_at_most(np.array(SIZES), 20 * MB)


class TestOnARealJob:
    """A U-Net on four A100, 25 MB buckets: one of the ranks."""

    @pytest.fixture
    def found(self, shared_traces: Path) -> RunPrediction:
        (run,) = load_runs(shared_traces / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite")
        sizes = [Question(ask.BUCKET_SIZE, mb) for mb in (1, 2, 5, 10, 25, 50, 100, 150, 200)]
        return run.what_if([*sizes, Question(ask.ONE_BUCKET), Question(ask.VIEWS)])

    def test_its_step_is_built_again_from_its_parts(self, found: RunPrediction) -> None:
        assert found.reason is None
        assert found.simulated_ns == pytest.approx(found.measured_ns, rel=0.01)

    def test_copies_tell_the_buckets(self, found: RunPrediction) -> None:
        mb = [round(size / 1e6, 1) for size in found.bucket_bytes]
        assert (found.sizes_from, mb) == ("copies out of buckets", [4.4, 83.9, 134.2, 67.1, 67.1, 67.1, 33.6, 10.6])

    def test_torchs_rule_gives_8_calls_at_25_mb_and_5_at_100(self, found: RunPrediction) -> None:
        calls = {one.change: one.calls for one in found.predictions}
        assert (calls["bucket size 25 MiB"], calls["bucket size 100 MiB"]) == (8, 5)

    def test_it_is_flat_but_for_a_single_bucket(self, found: RunPrediction) -> None:
        *sizes, one, _ = found.predictions
        changes = [size.change_ns or 0 for size in sizes]
        assert max(changes) - min(changes) <= 300_000
        assert {size.verdict for size in sizes} == {CANNOT_BE_TOLD, NO_CHANGE}
        assert one.verdict == REFUSED
        assert one.beyond_ns is not None
        assert 1_500_000 <= one.beyond_ns <= 2_700_000

    def test_views_gain(self, found: RunPrediction) -> None:
        views = found.predictions[-1]
        assert (views.change_ns, views.verdict) == (pytest.approx(-640_000, abs=60_000), GAIN)


@pytest.mark.parametrize("is_recent", [None, False, True])
def test_a_recent_torch_has_no_small_first_bucket_where_a_size_is_given(is_recent: bool | None) -> None:
    """Since torch 2.5, ``bucket_cap_mb`` is the cap of the first bucket, too, which by default has its own 1 MiB."""
    default = replace(JOB.capture(buckets_of(25), steps=3), is_recent_torch=is_recent)
    found = one_of(default, Question(ask.BUCKET_SIZE, 40))
    buckets = fill_until_reached(np.array(SIZES), 40 * MB if is_recent else MB, 40 * MB)
    assert len(buckets[0]) == (6 if is_recent else 1)
    assert found.calls == len(buckets)
    assert found.change_ns == pytest.approx(JOB.length_ns(buckets) - JOB.length_ns(buckets_of(25)), abs=5 * TICK_NS)
    assert ("first bucket" in found.parts_ns) == (is_recent is None), "both are in the interval"
    assert one_of(default, Question(ask.BUCKET_SIZE, 25)).verdict == NO_CHANGE, "as today, where no size is given"


def test_buckets_of_another_size_behind_a_small_first_one_tell_an_older_torch() -> None:
    found = one_of(CAPTURE, Question(ask.BUCKET_SIZE, 6))
    assert (found.calls, "first bucket" in found.parts_ns) == (len(buckets_of(6)), False)


def test_the_same_buckets_in_an_older_torch_are_not_said_to_be_the_same_in_each() -> None:
    """Of gradients of 9 MiB, 1 of them in the first bucket, a cap of 50 makes a single bucket in a recent torch."""
    few = replace(JOB, sizes=(MB, 4 * MB, 4 * MB), works=(100.0,) * 3)
    structure = few.capture([[0], [1, 2]])
    found = predict_run(Captured((structure,), few.sizes[::-1]), [Question(ask.BUCKET_SIZE, 50)], lambda: THIRD)
    (one,) = found.predictions
    assert (one.change_ns, one.verdict) == (0, CANNOT_BE_TOLD)
    assert one.parts_ns["first bucket"] > 0
    told = predict_run(
        Captured((replace(structure, is_recent_torch=False),), few.sizes[::-1]),
        [Question(ask.BUCKET_SIZE, 50)],
        lambda: THIRD,
    )
    assert told.predictions[0].verdict == NO_CHANGE


def test_both_torches_are_in_the_interval_with_their_errors() -> None:
    """A recent one lay at its end: of such intervals half held the truth."""
    either, recent = (
        one_of(replace(JOB.capture(buckets_of(25), steps=3), is_recent_torch=told), Question(ask.BUCKET_SIZE, 60))
        for told in (None, True)
    )
    assert 0 < (recent.change_ns or 0) < (either.change_ns or 0)
    assert (either.low_ns or 0) <= (recent.change_ns or 0) - recent.parts_ns["model"]


def test_what_views_save_on_a_cpu_is_not_said_to_be_nothing() -> None:
    """DDP copies there, too: "nothing is copied out of buckets, as with gradient_as_bucket_view"."""
    found = one_of(replace(CAPTURE, on_host=True), Question(ask.VIEWS))
    assert (found.verdict, "ddp-prof tune" in str(found.reason)) == (REFUSED, True)


def test_where_another_bucket_may_end_within_one_of_today_s_that_is_in_the_interval() -> None:
    """Of buckets of which no single gradient is known, 81 of 100 intervals held the truth."""
    structure = replace(JOB.capture(buckets_of(10)), into=None, is_recent_torch=False)
    asked = Question(ask.BUCKET_SIZE, 40)
    (found,) = ask_of(structure, asked=[asked], bare=True).predictions
    assert found.parts_ns["whole buckets"] > 0
    assert found.low_ns is not None
    assert found.high_ns is not None
    assert found.low_ns <= JOB.length_ns(buckets_of(40)) - JOB.length_ns(buckets_of(10)) <= found.high_ns
    (known,) = ask_of(structure, asked=[asked]).predictions
    assert "whole buckets" not in known.parts_ns


class TestWaits:
    """Waits, and a step without communication, are known only where all ranks were captured."""

    ASKED = (Question(ask.WAITS), Question(ask.COMMUNICATION))

    def test_two_of_four_ranks_do_not_tell_what_they_wait_for(self) -> None:
        one = replace(JOB.capture(buckets_of(10)), world_size=4)
        found = ask_of(one, one, asked=self.ASKED).predictions
        assert [two.verdict for two in found] == [REFUSED, REFUSED]
        assert "2 of 4 ranks were read: give the captures of all ranks" in str(found[0].reason)

    def test_who_gave_all_files_that_are_read_is_not_asked_for_more(self) -> None:
        one = replace(JOB.capture(buckets_of(10)), world_size=64)
        found = ask_of(*[one] * MOST_FILES, asked=self.ASKED).predictions
        assert {two.verdict for two in found} == {REFUSED}
        assert "8 of 64 ranks were read: with a file for each rank, at most 8 are" in str(found[0].reason)

    def test_all_ranks_whose_transfers_are_on_no_line_are_not_asked_for_all_ranks(self) -> None:
        one = replace(JOB.capture(buckets_of(10)), world_size=2)
        took_ns = np.where(one.bytes > np.median(one.bytes), 10**4, 10**8)  # large ones take least
        other = replace(one, end_ns=one.start_ns + took_ns)
        waits, without = ask_of(one, other, asked=self.ASKED).predictions
        assert (waits.verdict, "does not grow with their size" in str(waits.reason)) == (REFUSED, True)
        assert without.verdict == GAIN


def test_what_is_so_today_is_no_change() -> None:
    half = replace(JOB.capture(buckets_of(10)), are_half=True, world_size=8)
    found = ask_of(half, asked=[Question(ask.HALF_BYTES), Question(ask.RANKS, 8)]).predictions
    assert [one.verdict for one in found] == [REFUSED, REFUSED]
    assert "two bytes a number today" in str(found[0].reason)
    assert "that many ranks today" in str(found[1].reason)


def test_as_many_files_are_looked_at_as_runs_measure() -> None:
    assert MOST_FILES == MOST_FILES_OF_KERNELS


def test_a_slowdown_without_an_interval_may_be_any() -> None:
    """Too few steps tell no interval: it was taken as exact."""
    exact, unknown = (Slowed(1 / 3, *ends, None) for ends in ((1 / 3, 1 / 3), (None, None)))
    asked = [Question(ask.BUCKET_SIZE, 4)]
    job = replace(JOB, per_mb=16).capture(buckets_of(20), steps=3)
    halves = [ask_of(job, asked=asked, slowed=slowed).predictions[0].parts_ns["kappa"] for slowed in (exact, unknown)]
    assert halves[0] == 0
    assert halves[1] > 0


def test_what_a_call_costs_has_a_doubt_of_its_own() -> None:
    """More calls add overheads, and how far these are known does not hang on the time per byte alone."""
    structure = JOB.capture(buckets_of(20), steps=3)
    scatter = np.array([1, -1] * structure.calls)[: structure.calls] * 40 * TICK_NS
    rough = replace(structure, end_ns=structure.end_ns + scatter)
    one, other = (predictor_of(of) for of in (structure, rough))
    assert one.link.level_error == pytest.approx(0, abs=1e3)
    assert other.link.level_error > 40 * TICK_NS / structure.calls**0.5
    parts = dict(other._doubts(SMALLER, other.buckets(SMALLER) or [], other.change_ns(SMALLER, buckets_of(4))))
    assert parts["overhead"] > 0


def test_other_buckets_that_change_nothing_are_not_those_of_today() -> None:
    """Where all is hidden, other buckets make no difference: that is no reason to call them the same."""
    job = replace(JOB, works=tuple(20 * work for work in JOB.works), slowed=0.0, overhead=1, per_mb=0.5)
    structure = job.capture(buckets_of(10), steps=3)
    found = ask_of(structure, asked=[Question(ask.BUCKET_SIZE, 12)], slowed=Slowed(0.0, 0.0, 0.0, None))
    (one,) = found.predictions
    assert one.change_ns == 0
    assert (one.verdict, one.reason) == (CANNOT_BE_TOLD, None)


def test_the_time_per_byte_of_today_is_no_change() -> None:
    found = one_of(CAPTURE, Question(ask.TIME_PER_BYTE, 1.0))
    assert (found.change_ns, found.verdict, found.reason) == (0, NO_CHANGE, "the time per byte of today")


def test_buckets_and_views_at_once() -> None:
    """Both changes interact: with larger buckets other copies hide the last collective."""
    job = replace(JOB, copy_per_mb=8)
    structure = job.capture(buckets_of(10))
    truth = JOB.length_ns(buckets_of(30)) - job.length_ns(buckets_of(10))
    found = one_of(structure, Question(ask.BUCKET_SIZE, 30, with_views=True))
    assert found.change == "bucket size 30 MiB with gradient_as_bucket_view"
    assert found.change_ns == pytest.approx(truth, rel=0.05)
    refused = one_of(CAPTURE, Question(ask.BUCKET_SIZE, 30, with_views=True))
    assert (refused.verdict, "copies out of buckets" in str(refused.reason)) == (REFUSED, True)
