from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.benchmark.findings import BucketModel, LinkModel, MessageCost, fit_link, message_costs
from tests.benchmark.results_factory import BYTES_PER_NS, OTHER_ENVIRONMENT, OVERHEAD_NS, SIZES, Sweep, line

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


@given(s=positive, o=positive, w=positive, factor=st.floats(1.01, 50))
def test_the_predicted_overhead_is_least_at_the_best_size(s: float, o: float, w: float, factor: float) -> None:
    model = BucketModel(LinkModel(o, w, 2, 0.0), s)
    best = model.best_bytes
    least = model.overhead_ns(best)
    assert all(model.overhead_ns(size) >= least * (1 - 1e-9) for size in (best / factor, best * factor))
    if best < s:
        assert best == pytest.approx(math.sqrt(s * o * w))
        assert least == pytest.approx(2 * math.sqrt(s * o / w))
    else:
        assert best == s


@pytest.mark.parametrize("buckets", [1, 2, 10, 63, 435])
def test_the_formula_is_what_its_assumptions_come_to(buckets: int) -> None:
    """Backward and the link, event by event, for buckets whose backward takes as long as their transfer."""
    model = BucketModel(LinkModel(20_000.0, 100.0, 2, 0.0), 8_000_000_000)
    transfer = model.gradient_bytes / buckets / model.link.bytes_per_ns
    free = 0.0
    for bucket in range(1, buckets + 1):
        free = max(free, bucket * transfer) + transfer + model.link.overhead_ns
    left = free - buckets * transfer
    assert model.overhead_ns(model.gradient_bytes / buckets) == pytest.approx(left)


def test_messages_of_a_size_are_medians_over_runs_of_one_testbed() -> None:
    sweep = Sweep(repeats=3)
    sweep.add("naive", 100, 50, messages=[(1000, 5000.0)])
    sweep.runs[0][3][0] = type(sweep.runs[0][3][0])(1000, 10, 9000, 9000, run=sweep.runs[0][1].id)
    sweep.environment = OTHER_ENVIRONMENT
    sweep.add("naive", 100, 50, messages=[(1000, 70000.0)])
    found = message_costs(sweep.results())
    assert {testbed.environment: times for testbed, times in found.items()} == {
        "e1": [MessageCost(1000, 30, 5000.0, 5000, 9000, 3)],
        "e2": [MessageCost(1000, 30, 70000.0, 70000, 70000, 3)],
    }
