"""The captures that come with the repository: exact identities on real input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.ingest.load import load_trace
from tests.command_line import each_read_once, run
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


H200 = ROOT / "traces" / "h200"


@pytest.fixture(scope="module", autouse=True)
def _of_one_reading() -> Iterator[None]:
    with each_read_once():
        yield


@cache
def compared_on_a_gpu(folder: str) -> dict[str, dict[str, Any]]:
    result = run("compare", "--jobs", 1, "--format", "json", H200 / folder)
    return {variant["label"]: variant for variant in json.loads(result.stdout)["variants"]}


class TestOnAGpu:
    """Two ranks that share one H200: what each variant's schedule says is what was recorded."""

    @pytest.mark.parametrize("folder", ["gloo", "nccl"])
    def test_nearly_all_device_time_belongs_to_a_step(self, folder: str) -> None:
        for document in json.loads(run("overlap", "--jobs", 1, "--format", "json", H200 / folder).stdout):
            assert document["attribution"]["device_time"] > 0.99
            assert len(document["ranks"]) == 2
            for rank in document["ranks"]:
                assert rank["overlapped_ns"] + rank["exposed_ns"] == rank["comm_ns"]
                assert sum(step["comm_ns"] for step in rank["steps"]) == rank["comm_ns"]
                assert len(rank["steps"]) == 3

    @pytest.mark.parametrize("folder", ["gloo", "nccl"])
    @pytest.mark.parametrize("label", ["naive", "flat"])
    def test_nothing_is_hidden_after_backward(self, folder: str, label: str) -> None:
        found = compared_on_a_gpu(folder)[label]
        assert found["overlapped_ns"] == 0
        assert found["tail_ns"] == found["exposed_ns"] == found["comm_ns"]

    @pytest.mark.parametrize("folder", ["gloo", "nccl"])
    def test_what_is_launched_during_backward_overlaps_with_it(self, folder: str) -> None:
        found = compared_on_a_gpu(folder)
        for label in ("overlap", "bucketed 10 MB", "torch", "torch + gradient as bucket view"):
            assert found[label]["overlapped_ns"] > 0.15 * found[label]["comm_ns"], label

    def test_with_gloo_all_exposed_time_is_waited_for(self) -> None:
        for label in ("naive", "flat", "overlap", "bucketed 1 MB", "bucketed 10 MB", "bucketed 100 MB", "torch"):
            found = compared_on_a_gpu("gloo")[label]
            assert found["blocking_ns"] == pytest.approx(found["exposed_ns"], rel=0.001), label

    def test_a_speedup_is_told_only_where_the_variant_can_have_caused_it(self) -> None:
        found = compared_on_a_gpu("gloo")
        assert {variant["confounded_by"] for variant in found.values()} == {None}
        bucketed = found["bucketed 10 MB"]
        assert bucketed["supported"]
        assert 1 < bucketed["speedup_low"] < bucketed["speedup"] < bucketed["speedup_high"]


def test_a_speedup_within_what_steps_differ_is_not_supported() -> None:
    (overlap,) = [run for run in compare_variants([measure_overlap(load_trace(path)) for path in TRACES])
                  if run.label == "overlap"]  # fmt: skip
    assert (overlap.supported, overlap.confounded_by) == (False, None)
    assert overlap.speedup_low is not None
    assert overlap.speedup_high is not None
    assert overlap.speedup_low < 1 < overlap.speedup_high
