"""The model of bucketing, and effects with their intervals: sentences where these support them, and none elsewhere."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import strategies as st

from ddp_prof.benchmark.findings import (
    MessageCost,
    Observation,
    TestbedResults,
    find_observations,
    fit_link,
    gather_testbeds,
    message_costs,
)
from tests.benchmark.results_factory import (
    BYTES_PER_NS,
    MS,
    OTHER_ENVIRONMENT,
    OVERHEAD_NS,
    SIZES,
    Sweep,
    line,
    study_like,
)
from tests.examples import IS_NIGHTLY

positive = st.floats(1e-3, 1e3)


def messages(times: dict[int, float]) -> list[MessageCost]:
    return [MessageCost(size, 30, time, time, time, 3) for size, time in times.items()]


def test_the_fit_finds_a_known_link() -> None:
    link = fit_link(messages({size: line(size) for size in SIZES}))
    assert (link.overhead_ns, link.bytes_per_ns) == (pytest.approx(OVERHEAD_NS), pytest.approx(BYTES_PER_NS))
    assert (link.sizes, link.relative_error) == (len(SIZES), pytest.approx(0, abs=1e-9))


def test_a_disturbed_size_does_not_bend_the_line() -> None:
    times = {size: line(size) * (1 + 0.02 * (-1) ** index) for index, size in enumerate(SIZES * 1)}
    times[SIZES[2]] *= 5
    link = fit_link(messages(times))
    assert link.overhead_ns == pytest.approx(OVERHEAD_NS, rel=0.15)
    assert link.bytes_per_ns == pytest.approx(BYTES_PER_NS, rel=0.15)


def test_a_link_that_costs_nothing_a_call_has_no_negative_overhead() -> None:
    link = fit_link(messages({1_000: 900.0, 1_000_000: 1_000_000.0, 2_000_000: 2_100_000.0}))
    assert link.overhead_ns == 0
    assert link.bytes_per_ns == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize(
    ("times", "why"),
    [({}, "fewer than two sizes"), ({8: 5.0}, "fewer than two sizes"), ({8: 5.0, 80: 0.5}, "did not take longer")],
)
def test_without_a_model_it_says_why(times: dict[int, float], why: str) -> None:
    found = fit_link(messages(times))
    assert isinstance(found, str)
    assert why in found


def test_messages_of_a_size_are_medians_over_runs_of_one_testbed() -> None:
    sweep = Sweep(repeats=3)
    sweep.add("naive", 100, 50, messages=[(1000, 5000.0)])
    sweep.runs[0][3][0] = type(sweep.runs[0][3][0])(1000, 10, 9000, 9000, run=sweep.runs[0][1].id)
    sweep.environment = OTHER_ENVIRONMENT
    sweep.add("naive", 100, 50, messages=[(1000, 70000.0)])
    found = message_costs(sweep.results())
    # The interval is that of logarithms, as times are positive: 1.34 and not 0.5 times ln(9 / 5) to either side.
    low, high = ((5000 * 9000) ** 0.5 * (9 / 5) ** (sign * 2.6887 / 2) for sign in (-1, 1))
    assert {testbed.environment: times for testbed, times in found.items()} == {
        "e1": [MessageCost(1000, 30, 5000.0, pytest.approx(low, rel=1e-3), pytest.approx(high, rel=1e-3), 3)],
        "e2": [MessageCost(1000, 30, 70000.0, pytest.approx(70000), pytest.approx(70000), 3)],
    }


def testbed_of(sweep: Sweep) -> TestbedResults:
    (testbed,) = gather_testbeds(sweep.results())
    return testbed


def supported(sweep: Sweep) -> dict[tuple[str, str, str], Observation]:
    return {
        (observation.name, observation.before, observation.after): observation
        for observation in testbed_of(sweep).observations
        if observation.text
    }


def test_an_observation_is_the_median_over_pairs_of_runs_of_the_same_work_and_repeat() -> None:
    found = supported(study_like())
    step = found["step", "naive", "overlap"]
    assert step.pairs == 9, "three repeats of three workloads"
    assert step.value == pytest.approx(1 - (140 + 90) / (140 + 140), abs=0.005), "the middle one of the workloads"
    assert step.low == pytest.approx(1 - (190 + 90) / (190 + 140), abs=0.01)
    assert step.high == pytest.approx(1 - (100 + 90) / (100 + 140), abs=0.01)
    assert found["communication", "naive", "overlap"].value == pytest.approx(0.63, abs=0.02)
    assert step.text.startswith("Overlap takes 18 % (14 % to 22 %, 9 pairs) off the step of naive")


def test_at_most_ten_sentences() -> None:
    sweep = study_like()
    for work, base in (((2, 64), 100), ((2, 128), 140), ((4, 128), 190)):
        sweep.add("sharded", base + 10, 10, work=work)
        for bucket in (2.0, 5.0, 20.0, 50.0):
            sweep.add("bucketed", base + 80 + bucket, 50, bucket=bucket, work=work)
    assert 5 < len(supported(sweep)) <= 10


def test_what_slows_down_is_said_to_add() -> None:
    sweep = Sweep(noise=0.0001, repeats=6)
    sweep.add("naive", 100, 40)
    sweep.add("overlap", 150, 40)
    text = supported(sweep)["step", "naive", "overlap"].text
    assert text.startswith("Overlap adds 50 % (50 % to 50 %, 6 pairs) to the step of naive")


def test_what_the_spread_leaves_open_is_not_supported() -> None:
    names = {name for name in supported(study_like()) if name[0] == "step"}
    assert {("step", "naive", "overlap"), ("step", "overlap", "bucketed 10 MiB")} <= names
    assert ("step", "naive", "flat") not in supported(study_like(noise=0.1))
    assert ("step", "overlap", "bucketed 10 MiB") not in supported(study_like(noise=0.3))


def test_few_pairs_support_nothing_however_clear_they_are() -> None:
    """Five pairs all go in one direction in 6 of 100 cases by chance, six in 3."""
    for repeats, is_told in ((5, False), (6, True)):
        sweep = Sweep(noise=0, repeats=repeats)
        sweep.add("naive", 200, 40)
        sweep.add("flat", 100, 40)
        assert (("step", "naive", "flat") in supported(sweep)) == is_told


def test_a_machine_that_drifts_between_repeats_does_not_hide_a_difference() -> None:
    sweep = Sweep(noise=0, repeats=1)
    for repeat in range(6):
        drift = 1 + repeat
        sweep.add("naive", 100 * drift, 40, repeat=repeat, id=f"naive{repeat}")
        sweep.add("flat", 90 * drift, 40, repeat=repeat, id=f"flat{repeat}")
    sweep.runs = [
        (environment, run, [replace(step, run=run.id) for step in steps], messages)
        for environment, run, steps, messages in sweep.runs
    ]
    found = supported(sweep)["step", "naive", "flat"]
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1), abs=1e-6)


@pytest.mark.slow
def test_equal_variants_are_rarely_taken_for_different() -> None:
    """In some 5 of 100 sweeps, however loud the machine is."""
    wrong, sweeps = 0, 100 if IS_NIGHTLY else 25
    for seed in range(sweeps):
        sweep = Sweep(noise=0.05, seed=seed)
        for work in ((2, 32), (2, 64), (2, 128)):
            sweep.add("naive", 100, 40, work=work)
            sweep.add("flat", 100, 40, work=work)
        wrong += ("step", "naive", "flat") in supported(sweep)
    assert wrong <= 0.12 * sweeps


def test_the_model_is_said_to_be_right_only_where_its_choice_is_fastest() -> None:
    """With 40 MB of gradients at 0.2 ms and 0.8 GB/s the model chooses 1 MiB before 10 and 100."""
    sweep = Sweep(noise=0.0001, repeats=6)
    sweep.add("naive", 200, 20, messages=[(1000, 201_250.0), (1_000_000, 1_450_000.0)])
    for size in (1.0, 10.0, 100.0):
        sweep.add("bucketed", 100 + size, 20, bucket=size)
    found = supported(sweep)
    assert "it prefers 1 MiB. That size is the fastest" in found["model_agrees", "10 MiB", "1 MiB"].text
    assert testbed_of(sweep).model.course_best_bytes == pytest.approx((40e6 * 200_000 * 0.8) ** 0.5)
    slow_choice = supported(study_like())
    assert "it prefers 1 MiB. But 10 MiB takes" in slow_choice["model_disagrees", "1 MiB", "10 MiB"].text
    assert not any(name == "model_agrees" for name, *_ in slow_choice)


def test_what_compute_hides_no_host_timer_tells() -> None:
    sweep = Sweep(noise=0.001)
    for context in range(6):
        work = (2, 16 << context)
        sweep.add(
            "overlap", 100, 20, work=work, trace_comm_ns=60 * MS, trace_overlapped_ns=40 * MS, trace_exposed_ns=20 * MS
        )
        sweep.add("naive", 100, 60, work=work, trace_comm_ns=60 * MS, trace_overlapped_ns=0, trace_exposed_ns=60 * MS)
    found = supported(sweep)["timer_misses_hidden", "trace", "host timer"]
    assert (found.value, found.pairs) == (pytest.approx(2 / 3, abs=0.01), 6), "naive hides nothing"


def test_no_model_without_messages() -> None:
    sweep = Sweep()
    for size in (1.0, 10.0):
        sweep.add("bucketed", 100 + size, 20, bucket=size)
    testbed = testbed_of(sweep)
    assert isinstance(testbed.model, str)
    assert "fewer than two sizes" in testbed.model
    assert not [item for item in find_observations(testbed.summaries, testbed.model) if item.name.startswith("model")]


def test_the_fastest_and_the_slowest_of_equal_sizes_seldom_differ() -> None:
    """They are chosen by what is compared then: of 30 sweeps of equal sizes 10 had a sentence."""
    sentences = 0
    for seed in range(30):
        sweep = Sweep(noise=0.02, repeats=6, seed=seed)
        for size, context in product((1, 10, 100, 1000), (32, 64, 128)):
            sweep.add("bucketed", 100, 20, bucket=size, work=(2, context))
        sentences += sum(bool(one.text) for one in testbed_of(sweep).observations if one.before.startswith("bucketed"))
    assert sentences <= 4
