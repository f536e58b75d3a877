"""The captures that come with the repository: exact identities on real input."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.ingest.load import load_trace
from tests.conftest import ROOT

TRACES = sorted((ROOT / "traces").glob("*.sqlite"))


def test_every_variant_is_there() -> None:
    names = {"naive", "flat", "overlap", "bucketed_1mb", "bucketed_10mb", "bucketed_100mb", "torch"}
    assert names <= {path.stem for path in TRACES}


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_identities_hold_exactly(path: Path) -> None:
    trace = load_trace(path)
    result = measure_overlap(trace)
    assert trace.manifest
    assert len(result.ranks) == trace.manifest.world_size
    assert result.attribution.activities == 1.0
    for rank in result.ranks:
        assert rank.comm_ns
        assert rank.overlapped_ns + rank.exposed_ns == rank.comm_ns
        assert sum(step.comm_ns for step in rank.steps) == rank.comm_ns
        assert sum(step.overlapped_ns for step in rank.steps) == rank.overlapped_ns
        assert len(rank.steps) == trace.manifest.steps
        for step in rank.steps:
            parts = (step.overlapped_ns, step.exposed_ns, step.compute_only_ns, step.exposed_memory_ns, step.idle_ns)
            assert sum(parts) == step.window_ns


def test_variants_overlap_as_they_are_meant_to() -> None:
    """Naive and flat wait for everything; one bucket of everything is launched when nothing is left to hide it."""
    ratio = {
        variant.label: variant.overlap_ratio
        for variant in compare_variants([measure_overlap(load_trace(path)) for path in TRACES])
    }
    assert ratio["naive"] == ratio["flat"] == 0
    assert min(ratio[label] for label in ("overlap", "bucketed 1 MB", "bucketed 10 MB")) > 0.25
    assert ratio["bucketed 100 MB"] < ratio["bucketed 10 MB"]
