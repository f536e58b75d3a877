"""Large captures for benchmarks are true copies of a small one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import run
from tests.conftest import ROOT


def test_each_copy_has_the_figures_of_the_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its waits and event records, a copy knew neither what its collectives waited for nor who waited."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts/dev"))
    from repeat_capture import repeat_capture

    small = ROOT / "traces/h200/nccl/overlap.sqlite"
    big = repeat_capture(small, tmp_path / "big.sqlite", copies=3)
    once, repeated = (
        json.loads(run("overlap", capture, "--format", "json", "--no-cache").stdout)["ranks"]
        for capture in (small, big)
    )
    for one, several in zip(once, repeated, strict=True):
        figures = [
            {name: step[name] for name in ("overlapped_ns", "exposed_ns", "blocking_ns")} for step in one["steps"]
        ]
        assert figures
        assert all(step["blocking_ns"] is not None for step in figures)
        assert [{name: step[name] for name in figures[0]} for step in several["steps"]] == 3 * figures
