"""A straggler made on purpose, in a real run of two ranks, is found with its delay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddp_prof.analyze.collectives.straggler import measure_skew
from ddp_prof.ingest.load import load_trace
from ddp_prof.manifest import load_manifest
from ddp_prof.trace import Ints, Trace
from tests.measuring import analysis_of
from tests.train.forked import train

DELAY_MS = 200
STEPS = 8


def launches_by_step(trace: Trace) -> Ints:
    """When each range of an all-reduce began, in UTC: a row for each step."""
    ours = [index for index, name in enumerate(trace.names) if name.startswith("all_reduce|")]
    assert trace.epoch_ns is not None
    return np.sort(trace.spans.start_ns[np.isin(trace.spans.name_id, ours)]).reshape(STEPS, -1) + trace.epoch_ns


def test_skew_names_the_delayed_rank_and_its_delay(tmp_path: Path) -> None:
    """On a busy machine a rank is later than it sleeps: how late it was, the ranges tell, too."""
    sizes = ["--model-size", "tiny", "--seq-len", "16", "--batch-size", "4", "--steps", str(STEPS), "--warmup", "1"]
    outputs = ["--kineto", tmp_path / "x.json.gz", "--run-json", tmp_path / "x.run.json"]
    train("--variant", "overlap", *sizes, "--inject", "slow-rank", *outputs)
    manifest = load_manifest(tmp_path / "x.run.json")
    assert manifest is not None
    assert manifest.options["inject"] == "slow-rank"
    traces = [load_trace(tmp_path / f"x.rank{rank}.json.gz") for rank in (0, 1)]
    skew = measure_skew(analysis_of(*traces))
    on_time, late = map(launches_by_step, traces)
    later_ns = (late - on_time).max(axis=1)
    is_last = later_ns > (on_time - late).max(axis=1)
    # A busy machine may delay the other rank by more in a step or two: then chance is no worse an explanation.
    assert skew.straggler in ((1,) if is_last.all() else (1, None)), later_ns
    assert skew.ranks[1].rank == 1
    lag_ns = float(np.median(later_ns))
    assert lag_ns > 0.8 * DELAY_MS * 1e6
    assert skew.ranks[1].lag_ns == pytest.approx(lag_ns, rel=0.05)
