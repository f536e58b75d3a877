from __future__ import annotations

import random

import pytest

from ddp_prof.benchmark.alpha_beta import Unknown
from ddp_prof.benchmark.effects import relative_saving
from ddp_prof.benchmark.observations import Observation, find_observations
from ddp_prof.benchmark.report.testbeds import TestbedResults, gather_testbeds
from ddp_prof.benchmark.settings import summarize_settings
from ddp_prof.benchmark.statistics import combine, estimate_all
from tests.benchmark.results_factory import MS, Sweep, study_like


def testbed_of(sweep: Sweep) -> TestbedResults:
    results = sweep.results()
    (testbed,) = gather_testbeds(results, summarize_settings(results))
    return testbed


def supported(sweep: Sweep) -> dict[tuple[str, str, str], Observation]:
    return {
        (observation.name, observation.before, observation.after): observation
        for observation in testbed_of(sweep).observations
        if observation.is_supported
    }


def test_an_observation_is_the_effect_it_names() -> None:
    found = supported(study_like())
    step = found["step", "naive", "overlap"].effect
    expected = [1 - (base + 90) / (base + 140) for base in (100, 140, 190)]
    assert step.value == pytest.approx(sum(expected) / 3, abs=0.005)
    assert step.low < sum(expected) / 3 < step.high
    assert found["communication", "naive", "overlap"].effect.value == pytest.approx(0.64, abs=0.02)


def test_equal_within_a_limit_is_an_observation_of_its_own() -> None:
    sweep = Sweep(noise=0.003)
    for variant in ("naive", "flat", "overlap"):
        sweep.add(variant, 100, 50)
    found = supported(sweep)
    assert ("same_step", "naive", "flat") in found
    assert ("step", "naive", "flat") not in found


def test_what_the_spread_leaves_open_is_not_supported() -> None:
    names = {name for name in supported(study_like()) if name[0] == "step"}
    assert {("step", "naive", "overlap"), ("step", "overlap", "bucketed 10 MB")} <= names
    loud = {name for name in supported(study_like(noise=0.3)) if name[0] in ("step", "same_step")}
    assert not loud & {("step", "naive", "overlap"), ("step", "overlap", "bucketed 10 MB"), ("step", "flat", "overlap")}
    assert not supported(study_like(noise=0, repeats=1)), "one run of each tells no spread"


def test_the_model_is_said_to_be_right_only_where_its_choice_is_fastest() -> None:
    """With 40 MB of gradients at 0.2 ms and 0.8 GB/s the model chooses 1 MB before 10 and 100."""
    sweep = Sweep(noise=0.001)
    for variant, bucket, step in (
        ("naive", None, 200),
        *(("bucketed", size, 100 + size) for size in (1.0, 10.0, 100.0)),
    ):
        sweep.add(variant, step, 20, bucket=bucket, messages=[(1000, 201_250.0), (1_000_000, 1_450_000.0)])
    found = supported(sweep)
    assert found["model_agrees", "", ""].numbers["chosen_mb"] == 1.0
    assert testbed_of(sweep).model.best_bytes == pytest.approx((40e6 * 200_000 * 0.8) ** 0.5)
    slow_choice = study_like()
    numbers = supported(slow_choice)["model_disagrees", "", ""].numbers
    assert (numbers["chosen_mb"], numbers["fastest_mb"]) == (1.0, 10.0)
    assert ("model_agrees", "", "") not in supported(slow_choice)


@pytest.mark.parametrize(("device", "is_told"), [("cuda", True), ("cpu", False)])
def test_synchronizing_matters_where_the_device_runs_on_its_own(device: str, is_told: bool) -> None:
    sweep = Sweep()
    sweep.add("naive", 100, 60, synchronized_ms=30, device=device)
    sweep.add("flat", 100, 60, device=device)
    found = supported(sweep)
    assert (("timer_synchronized", "naive", "naive") in found) == is_told
    assert ("timer_synchronized", "flat", "flat") not in found


def test_the_host_timer_is_held_to_the_trace() -> None:
    sweep = Sweep()
    traced = {"trace_comm_ns": 60 * MS, "trace_overlapped_ns": 40 * MS, "trace_tail_ns": 12 * MS}
    sweep.add("overlap", 100, 60, trace_exposed_ns=20 * MS, **traced)
    sweep.add("naive", 100, 60, trace_exposed_ns=60 * MS, **traced)
    found = supported(sweep)
    numbers = found["timer_and_trace", "overlap", "overlap"].numbers
    assert numbers == pytest.approx({"before_ns": 60 * MS, "after_ns": 20 * MS, "tail_ns": 12 * MS}, rel=0.02)
    assert ("timer_and_trace", "naive", "naive") not in found


def test_what_compute_hides_no_host_timer_tells() -> None:
    sweep = Sweep()
    sweep.add("overlap", 100, 20, trace_comm_ns=60 * MS, trace_overlapped_ns=40 * MS, trace_exposed_ns=20 * MS)
    sweep.add("naive", 100, 60, trace_comm_ns=60 * MS, trace_overlapped_ns=0, trace_exposed_ns=60 * MS)
    found = supported(sweep)
    numbers = found["timer_misses_hidden", "overlap", "overlap"].numbers
    assert numbers == pytest.approx({"before_ns": 20 * MS, "after_ns": 60 * MS}, rel=0.02)
    assert ("timer_misses_hidden", "naive", "naive") not in found


def test_equal_variants_are_rarely_taken_for_different() -> None:
    """At most in some 5 of 100 sweeps, however much the machine drifts between repeats."""
    random.seed(2)
    wrong = 0
    for _ in range(200):
        drift = [random.gauss(1, 0.2) for _ in range(3)]
        found = estimate_all(
            {key: {str(n): [100 * drift[n] * random.gauss(1, 0.03)] for n in range(3)} for key in "abcde"},
            lambda _: "work",
            lambda _: ("all",),
        )
        effect = combine([relative_saving(found["a"], found["b"])])
        wrong += effect.is_beyond("above", 0) != "cannot tell"
    assert wrong / 200 < 0.08


def test_no_model_without_messages() -> None:
    sweep = Sweep()
    for size in (1.0, 10.0):
        sweep.add("bucketed", 100 + size, 20, bucket=size)
    testbed = testbed_of(sweep)
    assert isinstance(testbed.model, Unknown)
    assert "fewer than two sizes" in testbed.model.reason
    assert not [item for item in find_observations(testbed.summaries, testbed.model) if item.name.startswith("model")]
