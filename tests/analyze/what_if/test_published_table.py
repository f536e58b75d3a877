"""The published table of the course's XL model: bucket sizes predicted from the row of one all-reduce per parameter.

The table has times of steps and waits only. A workload's own row gives its compute, and the time of a byte beside it;
what that does not tell is the same for all workloads, and from the first one.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from ddp_prof.analyze.what_if.rules import fill_at_most
from ddp_prof.analyze.what_if.simulate import Buckets, LinkTimes, StepModel, simulate
from ddp_prof.train import MODEL_SIZES
from ddp_prof.variants import BYTES_PER_MB

KAPPA, OF_BACKWARD, OVERHEAD_NS = 1.5, 0.6, 45_000.0
"""How compute is slowed; the share of it that is backward; of a call, by the 100 MB of the first workload."""


@pytest.fixture
def rows(shared_traces: Path) -> list[dict[str, str]]:
    with (shared_traces.parent / "data" / "cs336_xl_2gpu_reference.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["status"] == "ok"]


def test_bucket_sizes_follow_from_the_row_without_buckets(rows: list[dict[str, str]]) -> None:
    sizes = 4 * np.array(MODEL_SIZES["xl"].parameter_counts[::-1])
    share = 1 - 1 / KAPPA
    workloads = {(row["local_batch_size"], row["sequence_length"]) for row in rows}
    errors, null = [], []
    for workload in sorted(workloads):
        own = [row for row in rows if (row["local_batch_size"], row["sequence_length"]) == workload]
        (today,) = (row for row in own if row["variant"] == "overlap")
        step_ns, wait_ns = (1e9 * float(today[name]) for name in ("step_time_s", "grad_all_reduce_s"))
        compute_ns = (step_ns - wait_ns) / (1 + (KAPPA - 1) * OF_BACKWARD)
        model = step_of(sizes, compute_ns)
        each = [[at] for at in range(len(sizes))]
        link = fitted_link(model, each, step_ns, share)
        for row in own:
            if row["variant"] == "bucketed":
                buckets = fill_at_most(sizes, float(row["bucket_size_mb"]) * BYTES_PER_MB)
                (predicted_ns,) = simulate(model, buckets, link, share)
                measured_ns = 1e9 * float(row["step_time_s"])
                errors.append(abs(predicted_ns / measured_ns - 1))
                null.append(abs(step_ns / measured_ns - 1))
    assert len(errors) == 24
    assert np.median(errors) <= 0.017
    assert max(errors) <= 0.04
    assert np.median(null) <= 0.016, "nothing changes is as good: the table's bucket sizes hardly differ"


def step_of(sizes: np.ndarray, compute_ns: float) -> StepModel:
    """A step whose gradients become ready by their sizes; that of the embedding, the last one, when backward ends."""
    others = np.append(sizes[:-1], 0)
    backward_ns, rest_ns = OF_BACKWARD * compute_ns, 0.2 * (1 - OF_BACKWARD) * compute_ns
    before_ns = compute_ns - backward_ns - rest_ns
    ready_ns = before_ns + backward_ns * np.cumsum(others) / others.sum()
    nothing = np.zeros((1, len(sizes)))
    return StepModel(sizes, ready_ns[None, :], np.array([before_ns + backward_ns]), nothing, np.array([rest_ns]))


def fitted_link(model: StepModel, buckets: Buckets, step_ns: float, share: float) -> LinkTimes:
    """The time per byte with which the step is as long as it was measured: by halving."""
    low, high = 0.0, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        (found_ns,) = simulate(model, buckets, LinkTimes(OVERHEAD_NS, middle), share)
        low, high = (middle, high) if found_ns < step_ns else (low, middle)
    return LinkTimes(OVERHEAD_NS, high)
