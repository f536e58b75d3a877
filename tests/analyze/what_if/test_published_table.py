"""The published table of the course's XL model: bucket sizes predicted from the row of one all-reduce per parameter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_prof.train import MODEL_SIZES
from scripts import whatif_table as script


@pytest.fixture
def table(shared_traces: Path) -> Path:
    return shared_traces.parent / "data" / "cs336_xl_2gpu_reference.csv"


@pytest.mark.slow
def test_bucket_sizes_follow_from_the_rows_without_buckets(table: Path) -> None:
    rows = script.read_table(table)
    found = script.predict_table(rows, 4 * np.array(MODEL_SIZES["xl"].parameter_counts[::-1]))
    errors = [abs(ns / row.step_ns - 1) for row, ns, _ in found]
    null = [abs(today_ns / row.step_ns - 1) for row, _, today_ns in found]
    assert len(errors) == 24
    assert np.median(errors) <= 0.016
    assert max(errors) <= 0.035
    assert np.median(null) <= 0.016, "nothing changes is as good: the table's bucket sizes hardly differ"


def test_a_row_that_contradicts_another_one_is_refused(table: Path) -> None:
    rows = script.read_table(table)
    ((row, reason),) = script.find_refused(rows).items()
    assert row.text == "(flat, 4, 512)"
    assert "1560 ms" in reason
    assert "818 ms in (overlap, 4, 512)" in reason


@pytest.mark.parametrize(
    ("slower", "refused"), [(1.0, []), (1.4, []), (1.9, ["(flat, 2, 128)"]), (3.0, ["(flat, 2, 128)"])]
)
def test_compute_alone_is_no_longer_than_beside_communication(slower: float, refused: int) -> None:
    """The rule knows no row: 300 ms of compute alone, 450 ms of it beside communication."""
    flat = script.Row("flat", ("2", "128"), None, slower * 300e6 + 400e6, 400e6)
    rows = [
        flat,
        replace(flat, variant="naive", step_ns=710e6),
        replace(flat, variant="overlap", step_ns=700e6, wait_ns=250e6),
    ]
    assert [row.text for row in script.find_refused(rows)] == refused
