"""What communication slows, from two captures that hide unequal parts of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddp_prof.analyze.statistics import Numbers
from ddp_prof.analyze.step_cost import Slowed
from ddp_prof.analyze.what_if import questions as ask
from ddp_prof.analyze.what_if.calibration import calibrate, slowed_between
from ddp_prof.analyze.what_if.captured import Captured
from ddp_prof.analyze.what_if.prediction import RunPrediction, predict_run
from ddp_prof.analyze.what_if.questions import Question
from ddp_prof.analyze.what_if.rules import fill_until_reached
from tests.analyze.what_if.test_prediction import JOB, SIZES, buckets_of

ALL = [list(range(len(SIZES)))]
SLOWER = replace(JOB, per_mb=16, slowed=0.4)


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_what_hides_more_takes_longer(noise: float) -> None:
    job = replace(SLOWER, noise=noise)
    found = calibrate(job.capture(buckets_of(10), steps=12), job.capture(ALL, steps=12, seed=1))
    assert found.share == pytest.approx(0.4, abs=0.01 + 4 * noise)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= 0.4 <= found.high or noise == 0


def test_captures_that_hide_as_much_say_nothing() -> None:
    found = calibrate(SLOWER.capture(buckets_of(10), steps=3), SLOWER.capture(buckets_of(10), steps=3))
    assert found.share is None
    assert "such as naive" in str(found.reason)
    hide_nothing = calibrate(SLOWER.capture(ALL, steps=3), SLOWER.capture(ALL, steps=3))
    assert "hides more of it, as with smaller buckets" in str(hide_nothing.reason), "naive hides nothing, either"


def test_captures_of_different_jobs_are_refused() -> None:
    other = replace(SLOWER, works=tuple(3 * work for work in SLOWER.works))
    found = calibrate(SLOWER.capture(buckets_of(10), steps=3), other.capture(ALL, steps=3))
    assert found.share is None
    assert "record both again" in str(found.reason)


def test_what_compute_beside_communication_explains_is_no_spread() -> None:
    """Steps of 100 ms, and of what is lost beside 10 to 30 ms of communication."""
    hides_more, hides_less = (np.array([[100 + 0.4 * ms, ms] for ms in of]) * 1e6 for of in ((10, 20, 30), (1, 2, 3)))
    found = slowed_between(hides_more, hides_less)
    assert (found.share, found.low, found.high) == (pytest.approx(0.4), pytest.approx(0.4), pytest.approx(0.4))
    assert "20.0 and 20.5 ms per step" in str(slowed_between(hides_more, hides_more + 0.5e6).reason)


@pytest.mark.parametrize(("steps", "alike"), [(3, 0.0), (30, 0.0), (60, 0.3)])
def test_the_interval_holds_the_truth_in_19_of_20_pairs(steps: int, alike: float) -> None:
    """By a plain bootstrap it held it in 14 of 20 pairs of 3 steps."""
    random, inside, pairs = np.random.default_rng(5), 0, 300

    def noise() -> Numbers:
        found = random.normal(size=steps)
        for at in range(1, steps):
            found[at] = alike * found[at - 1] + (1 - alike**2) ** 0.5 * found[at]
        return found

    def times(mean_ms: float, beside_ms: float) -> Numbers:
        return 1e6 * np.stack([mean_ms + 0.4 * beside_ms + noise(), beside_ms + 0.2 * noise()], axis=1)

    for _ in range(pairs):
        found = slowed_between(times(100, 20), times(100, 0.5))
        assert found.low is not None
        assert found.high is not None
        inside += found.low <= 0.4 <= found.high
    assert 0.92 <= inside / pairs <= 0.99


def test_where_a_capture_tells_its_own_slowdown_a_second_one_that_hides_as_much_is_no_obstacle() -> None:
    one = SLOWER.capture(buckets_of(10), steps=3)
    captured = Captured((one,), parameters=SIZES[::-1])
    found = predict_run(
        captured, [Question(ask.BUCKET_SIZE, 40)], lambda: Slowed(0.4, 0.39, 0.41, None), None, captured
    )
    assert found.reason is None


def test_a_second_capture_adds_sizes_to_the_line() -> None:
    """Two sizes are on any line: with those of the other capture it is known how far off it is."""
    own, other = (
        SLOWER.capture(buckets, steps=3)
        for buckets in (fill_until_reached(np.array(SIZES), 2**20, 2**30), buckets_of(10))
    )
    slowed = Slowed(0.4, 0.4, 0.4, None)

    def answer(*calibration: Captured) -> RunPrediction:
        captured = Captured((own,), parameters=SIZES[::-1])
        return predict_run(captured, [Question(ask.BUCKET_SIZE, 10)], lambda: slowed, None, *calibration)

    alone, both = answer(), answer(Captured((other,), parameters=SIZES[::-1]))
    truth = SLOWER.length_ns(buckets_of(10)) - float((own.ends_ns - own.begins_ns).mean())
    (wide,), (narrow,) = alone.predictions, both.predictions
    assert narrow.change_ns == pytest.approx(truth, rel=0.05)
    assert both.link is not None
    assert both.link.sizes > 2
    assert narrow.parts_ns["time per byte"] < 0.2 * wide.parts_ns["time per byte"]


def test_a_capture_on_a_cpu_is_predicted_from_with_a_second_one() -> None:
    own, naive = (replace(SLOWER.capture(buckets, steps=3), on_host=True) for buckets in (buckets_of(10), ALL))

    def ask_it(*calibration: Captured) -> float | None:
        asked = [Question(ask.BUCKET_SIZE, 40)]
        captured = Captured((own,), parameters=SIZES[::-1])
        found = predict_run(captured, asked, lambda: Slowed(None, None, None, "shared cores"), None, *calibration)
        return found.predictions[0].change_ns if found.predictions else None

    assert ask_it() is None
    truth = SLOWER.length_ns(buckets_of(40)) - SLOWER.length_ns(buckets_of(10))
    assert ask_it(Captured((naive,))) == pytest.approx(truth, rel=0.1)


def test_what_a_refusal_names_lifts_it() -> None:
    """On a GPU more steps were asked for: of 12 simulated jobs these told kappa in 2, a second bucket size in all."""
    own, other = (Captured((SLOWER.capture(buckets, steps=3),), SIZES[::-1]) for buckets in (buckets_of(10), ALL))

    def ask_it(*calibration: Captured) -> RunPrediction:
        kernels = Slowed(None, 0, 1, "no kernel ran both beside communication and alone")
        return predict_run(own, [Question(ask.BUCKET_SIZE, 40)], lambda: kernels, None, *calibration)

    assert str(ask_it().reason).endswith("as with another bucket size, to 'ddp-prof whatif --calibrate'")
    assert ask_it(other).reason is None


def test_a_capture_of_another_job_calibrates_nothing() -> None:
    """Its times may differ by what communication would explain, too."""
    own = replace(SLOWER.capture(buckets_of(10), steps=3), world_size=2)
    naive = replace(SLOWER.capture(ALL, steps=3), world_size=2)
    half = replace(naive, bytes=naive.bytes // 2)
    for other, difference in (
        (replace(naive, on_host=True), "on a CPU"),
        (replace(naive, world_size=4), "of 4 ranks and not of 2"),
        (half, "whose gradients have 71.0 MiB and not 142.0 MiB"),
    ):
        asked, captured = [Question(ask.BUCKET_SIZE, 40)], Captured((own,), parameters=SIZES[::-1])
        found = predict_run(captured, asked, lambda: Slowed(0.4, 0.4, 0.4, None), None, Captured((other,)))
        assert difference in str(found.reason)
