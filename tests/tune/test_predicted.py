"""A prediction stands beside what was measured of a try."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof import load_runs
from ddp_prof.tune.predicted import predict_tries
from ddp_prof.tune.tries import parse_tries

TRIES = parse_tries(
    ["bucket_cap_mb=25,100,1000", "gradient_as_bucket_view", "static_graph", "bucket_cap_mb=5+static_graph"]
)


def test_tries_of_one_thing_are_predicted(shared_traces: Path) -> None:
    (run,) = load_runs(shared_traces / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite")
    found = predict_tries(run, TRIES)
    assert list(found) == [
        "bucket_cap_mb=25",
        "bucket_cap_mb=100",
        "bucket_cap_mb=1000",
        "gradient_as_bucket_view=True",
    ]
    views, far = found["gradient_as_bucket_view=True"], found["bucket_cap_mb=1000"]
    assert views.gain == pytest.approx(0.022, abs=0.003)
    assert views.low is not None
    assert views.high is not None
    assert 0 < views.low < views.gain < views.high
    assert far.gain is None
    assert "more than twice the largest" in str(far.reason)
    assert found["bucket_cap_mb=25"].gain == 0


def test_a_capture_that_predicts_nothing_says_why(own_traces: list[Path]) -> None:
    (run,) = load_runs(next(path for path in own_traces if path.name == "torch.sqlite"))
    found = predict_tries(run, TRIES)
    assert {one.gain for one in found.values()} == {None}
    assert all("--calibrate" in str(one.reason) for one in found.values())
    assert predict_tries(run, parse_tries(["static_graph"])) == {}
