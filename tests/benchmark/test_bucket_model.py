"""What is expected of a bucket size, by the real buckets."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.benchmark.bucket_model import (
    CURVE_MB,
    BucketModel,
    LinkModel,
    compare_expectations,
    make_model,
    median_error,
    mismatch_text,
)
from ddp_prof.benchmark.settings import summarize_settings
from ddp_prof.train import MODEL_SIZES
from tests.benchmark.results_factory import Sweep

MINI = MODEL_SIZES["mini"]
WORK = (2, 64)
LINK = LinkModel(500_000.0, 1.0, 2, 0.0)
"""0.5 ms per call and 1 GB/s."""
LARGEST = 4 * max(MINI.parameter_counts)
MS = 1_000_000


def model(backward_ms: float = 100, **changes: object) -> BucketModel:
    found = BucketModel(LINK, MINI.gradient_bytes(), MINI.parameter_counts, {WORK: backward_ms * MS})
    return replace(found, **changes)  # type: ignore[arg-type]


positive = st.floats(1e-3, 1e12)


@given(s=positive, o=positive, w=positive)
def test_of_unknown_parameters_the_courses_formula_is_expected(s: float, o: float, w: float) -> None:
    """n equal buckets whose backward takes as long as their transfer leave s / (n w) + n o, least at sqrt(s o w)."""
    of_course = BucketModel(LinkModel(o, w, 2, 0.0), round(s * 2**20) or 1)
    size = of_course.gradient_bytes
    for buckets in (1, 2, 10, 63):
        left, backward = size / buckets / w + buckets * o, size / w
        expected = of_course.expected_ns(size / buckets / 2**20 * (1 + 1e-12))
        assert expected == pytest.approx(left, rel=1e-6, abs=1e-6 * backward)
    assert of_course.course_best_bytes == pytest.approx(min(size, math.sqrt(size * o * w)))


def test_a_bucket_holds_whole_parameters() -> None:
    """However small the cap: the embedding, whose gradient comes last, cannot be divided."""
    sizes = [size for size, _ in model().buckets(0.25)]
    assert (sizes[0], sizes[-1]) == (LARGEST, LARGEST)
    assert sum(sizes) == MINI.gradient_bytes()
    assert min(model(backward_ms=1e6).expected_ns(mb, WORK) for mb in CURVE_MB) >= LINK.time_ns(LARGEST) * (1 - 1e-9)


def test_where_backward_is_long_the_last_buckets_are_left() -> None:
    """That of the embedding, and the one whose last gradient is the first block's."""
    *_, (_, before), (first_block, at_end), (embedding, last) = model().buckets(10)
    assert before < at_end == last == 1
    left = LINK.time_ns(first_block) + LINK.time_ns(embedding)
    assert model(backward_ms=10_000).expected_ns(10, WORK) == pytest.approx(left)


def test_where_backward_is_short_all_are_left() -> None:
    in_all = sum(LINK.time_ns(size) for size, _ in model().buckets(1))
    assert model(backward_ms=0.001).expected_ns(1, WORK) == pytest.approx(in_all, rel=0.001)


def test_sizes_above_all_gradients_are_one_bucket() -> None:
    assert model().expected_ns(100, WORK) == model().expected_ns(1000, WORK) == LINK.time_ns(MINI.gradient_bytes())


def test_what_is_sent_beside_compute_is_slower() -> None:
    """Of two buckets, head and blocks, and the embedding: the first is beside backward as a whole."""
    alone, beside = model(backward_ms=40), model(backward_ms=40, slowdown=3.0)
    assert beside.expected_ns(1, WORK) > alone.expected_ns(1, WORK)
    assert beside.expected_ns(1, WORK, contended=False) == alone.expected_ns(1, WORK)
    assert beside.expected_ns(1000, WORK) == alone.expected_ns(1000, WORK), "nothing runs beside a single bucket"


def test_the_best_size_leaves_the_least_of_all_drawn() -> None:
    for backward_ms in (1, 30, 300):
        found = model(backward_ms)
        assert found.mean_ns(found.best_mb) <= 1.01 * min(map(found.mean_ns, CURVE_MB))


def sweep(slowdown: float) -> Sweep:
    """Captures as the model has it: tails of a link that is so much slower beside a backward of 50 ms."""
    made, truth = Sweep(noise=0), model(backward_ms=50, slowdown=slowdown)
    mini: dict[str, object] = {"gradient_bytes": MINI.gradient_bytes(), "parameters": MINI.parameter_count}
    made.add("naive", 140, 40, **mini, messages=[(size, LINK.time_ns(size)) for size in (1_000, 1_000_000)])
    for bucket in (1.0, 10.0, 100.0):
        tail = round(truth.expected_ns(bucket, WORK))
        alone = sum(LINK.time_ns(size) for size, _ in truth.buckets(bucket))
        comm = round(slowdown * alone) if bucket < 100 else tail
        figures = {"trace_comm_ns": comm, "trace_overlapped_ns": comm - tail, "trace_exposed_ns": tail}
        made.add("bucketed", 120, 30, bucket=bucket, **mini, **figures, trace_tail_ns=tail)
    return made


@pytest.mark.parametrize("slowdown", [1.0, 2.0, 3.0])
def test_contention_is_found_in_captures_and_expected(slowdown: float) -> None:
    (summaries,) = summarize_settings(sweep(slowdown).results()).values()
    found = make_model(LINK, summaries)
    assert found.slowdown == pytest.approx(slowdown, rel=0.01)
    assert found.backward_ns == {WORK: pytest.approx(50 * MS, rel=0.01)}
    compared = compare_expectations(found, summaries)
    assert median_error(compared) < 0.02
    text = mismatch_text(found, compared)
    assert ("takes 2.0 times as long" in text) == (slowdown == 2)


def test_without_captures_nothing_is_compared() -> None:
    made = Sweep(noise=0)
    made.add("bucketed", 120, 30, bucket=1.0)
    (summaries,) = summarize_settings(made.results()).values()
    found = make_model(LINK, summaries)
    assert (found.slowdown, found.counts, compare_expectations(found, summaries)) == (None, (), [])
