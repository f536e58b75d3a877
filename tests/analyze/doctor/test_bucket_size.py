"""The advised size of buckets leaves several of them, so that the step is not longer than today's.

What a step takes is that of :mod:`tests.analyze.what_if.ticking`, which knows no advice.
"""

from __future__ import annotations

import numpy as np
import pytest

from ddp_prof.analyze.doctor.evidence import Finding
from ddp_prof.analyze.what_if.rules import fill_until_reached
from ddp_prof.tune.candidates import tries_of
from ddp_prof.variants import BYTES_PER_MB
from tests.analyze.doctor.test_gpu_rules import diagnose, training, with_sizes
from tests.analyze.what_if.ticking import Job

SIZE = 150_000
"""Of each of 40 gradients: 5.7 MiB in all, which 25 MiB would hold in one bucket."""


def found(rule: str, buckets: int, size: int | None) -> Finding:
    trace = training(buckets=buckets, bucket_ns=10_000 if buckets > 1 else 8_000_000).trace()
    findings = diagnose(trace if size is None else with_sizes(trace, [size])).findings
    (finding,) = (one for one in findings if one.rule == rule)
    return finding


def length(job: Job, cap_mb: float) -> float:
    """Of a step with buckets of this size, by torch's rule."""
    cap = cap_mb * BYTES_PER_MB
    return job.length_ns(fill_until_reached(np.array(job.sizes), cap, cap))


@pytest.mark.parametrize("per_mb", [20, 200])
def test_many_small_ones_are_joined_to_several(per_mb: float) -> None:
    """The advice was "buckets of some MiB", and 25 was tried: one bucket, which no backward hides."""
    finding = found("one collective per parameter", 40, SIZE)
    assert finding.value == 0.36
    assert tries_of(finding) == ("bucket_cap_mb=0.36",)
    assert "bucket_cap_mb=0.36" in finding.advice
    job = Job((SIZE,) * 40, (30.0,) * 40, overhead=6, per_mb=per_mb, forward=50, rest=50)
    today, advised, single = (length(job, mb) for mb in (1e-6, 0.36, 25))
    assert advised < min(today, single)


def test_a_single_one_is_divided() -> None:
    """Of 5.7 MiB, 5 and 25 were tried, which leave most of them, or all, in one bucket."""
    finding = found("one bucket for all gradients", 1, 40 * SIZE)
    assert finding.value == 0.95
    job = Job((SIZE,) * 40, (30.0,) * 40, overhead=15, per_mb=200, forward=50, rest=50)
    advised, *others = (length(job, mb) for mb in (0.95, 5, 25))
    assert advised < 0.9 * min(others)


def test_of_a_large_model_torchs_own_size_is_advised() -> None:
    assert found("one bucket for all gradients", 1, 1 << 30).value == 25


@pytest.mark.parametrize(
    ("rule", "buckets", "tries"),
    [("one collective per parameter", 40, "25"), ("one bucket for all gradients", 1, "5,25")],
)
def test_without_sizes_usual_ones_are_tried(rule: str, buckets: int, tries: str) -> None:
    assert tries_of(found(rule, buckets, None)) == (f"bucket_cap_mb={tries}",)
