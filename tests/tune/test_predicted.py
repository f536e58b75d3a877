"""What one capture predicts of a try stands beside what was measured of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof import load_runs
from ddp_prof.tune.tries import parse_tries
from ddp_prof.tune.why import PREDICTED, Foreseen, predictions_of

TRACES = Path(__file__).parents[2] / "traces"


def predicted_of(trace: Path, text: str) -> list[Foreseen]:
    (run,) = load_runs(trace)
    (tried,) = parse_tries([text])
    return list(predictions_of(run, tried))


def test_tries_of_one_thing_are_predicted(shared_traces: Path) -> None:
    trace = shared_traces / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite"
    (views,) = predicted_of(trace, "gradient_as_bucket_view")
    assert (views.source, views.is_bound, views.reason) == (PREDICTED, False, None)
    assert views.gain == pytest.approx(0.022, abs=0.003)
    assert views.low is not None
    assert views.high is not None
    assert 0 < views.low < views.gain < views.high
    (far,) = predicted_of(trace, "bucket_cap_mb=1000")
    assert far.gain is None
    assert "more than twice the largest" in str(far.reason)
    assert predicted_of(trace, "static_graph") == []
    assert predicted_of(trace, "bucket_cap_mb=5+static_graph") == []


def test_a_capture_that_predicts_nothing_says_why() -> None:
    (one,) = predicted_of(TRACES / "torch.sqlite", "bucket_cap_mb=5")
    assert one.gain is None
    assert "--calibrate" in str(one.reason)
