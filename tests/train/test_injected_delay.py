"""A straggler made on purpose, in a real run of two ranks, is found with its delay."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.analyze.collectives.straggler import measure_skew
from ddp_prof.errors import WorkloadError
from ddp_prof.ingest.load import load_trace
from ddp_prof.manifest import load_manifest
from ddp_prof.train.arguments import parse_arguments
from ddp_prof.train.process_group import RankInfo
from ddp_prof.train.run import check
from tests.measuring import analysis_of
from tests.train.forked import train

DELAY_MS = 150


def test_skew_names_the_delayed_rank_and_its_delay(tmp_path: Path) -> None:
    sizes = ["--model-size", "tiny", "--seq-len", "16", "--batch-size", "4", "--steps", "8", "--warmup", "1"]
    outputs = ["--kineto", tmp_path / "x.json.gz", "--run-json", tmp_path / "x.run.json"]
    delay = ["--inject-delay-ms", str(DELAY_MS), "--inject-delay-rank", "1"]
    train("--variant", "overlap", *sizes, *delay, *outputs)
    manifest = load_manifest(tmp_path / "x.run.json")
    assert manifest is not None
    assert (manifest.options["inject_delay_ms"], manifest.options["inject_delay_rank"]) == (DELAY_MS, 1)
    traces = [load_trace(tmp_path / f"x.rank{rank}.json.gz") for rank in (0, 1)]
    skew = measure_skew(analysis_of(*traces))
    assert skew.straggler == 1
    assert skew.ranks[1].rank == 1
    assert skew.ranks[1].lag_ns == pytest.approx(DELAY_MS * 1e6, rel=0.2)


def test_a_rank_that_is_not_there_cannot_be_delayed() -> None:
    arguments = parse_arguments(["--variant", "flat", "--inject-delay-ms", "5", "--inject-delay-rank", "2"])
    with pytest.raises(WorkloadError, match="--inject-delay-rank 2, but the ranks are 0 to 1"):
        check(arguments, RankInfo(0, 2, 0, 2))
