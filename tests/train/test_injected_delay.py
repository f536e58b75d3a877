"""A straggler made on purpose, in a real run of two ranks, is found with its delay."""

from __future__ import annotations

from pathlib import Path

from ddp_prof.analyze.collectives.straggler import measure_skew
from ddp_prof.ingest.load import load_trace
from ddp_prof.manifest import load_manifest
from tests.measuring import analysis_of
from tests.train.forked import train

DELAY_MS = 200


def test_skew_names_the_delayed_rank_and_its_delay(tmp_path: Path) -> None:
    sizes = ["--model-size", "tiny", "--seq-len", "16", "--batch-size", "4", "--steps", "8", "--warmup", "1"]
    outputs = ["--kineto", tmp_path / "x.json.gz", "--run-json", tmp_path / "x.run.json"]
    train("--variant", "overlap", *sizes, "--inject", "slow-rank", *outputs)
    manifest = load_manifest(tmp_path / "x.run.json")
    assert manifest is not None
    assert manifest.options["inject"] == "slow-rank"
    traces = [load_trace(tmp_path / f"x.rank{rank}.json.gz") for rank in (0, 1)]
    skew = measure_skew(analysis_of(*traces))
    assert skew.straggler == 1
    assert skew.ranks[1].rank == 1
    lag_ms = (skew.ranks[1].lag_ns or 0) / 1e6
    assert 0.9 * DELAY_MS < lag_ms < 2 * DELAY_MS, "on a busy machine the rank is later still"
