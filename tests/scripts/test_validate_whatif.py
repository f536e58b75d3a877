"""``scripts/validate_whatif.sh``: it measures and predicts; how well is no question of a test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_prof.analyze.what_if.prediction import MODEL_ERROR

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "figures" / "what_if.txt"
SAID = (
    "predicted ", "nothing changes ", "the course's formula ", "from run to run ", "rms error of the change: ",
    "90 % intervals that hold the measured change: ", "signs right where ",
)  # fmt: skip


@pytest.mark.slow
def test_a_matrix_and_what_it_is_compared_with(tmp_path: Path) -> None:
    file = tmp_path / "matrix.txt"
    command = [
        sys.executable,
        ROOT / "scripts" / "validate_whatif.py",
        "--link",
        "sleep",
        "--rounds",
        "1",
        "--steps",
        "3",
    ]
    done = subprocess.run([*command, "-o", file], capture_output=True, text=True, check=True)
    assert file.read_text() == done.stdout
    rows = re.findall(r"^ +(\d+) \| ((?: +(?:[0-9.]+|n/a))+)$", done.stdout, re.MULTILINE)
    assert len(rows) == 7
    assert all(word in done.stdout for word in SAID)


def test_the_published_matrix_is_what_intervals_allow_for() -> None:
    text = PUBLISHED.read_text(encoding="utf-8")
    assert all(word in text for word in SAID)
    shares = re.findall(r"rms error of the matrix above: ([0-9.]+)% of a step", text)
    assert len(shares) == 2, "of gloo, and of transfers that sleep"
    share = max(map(float, shares)) / 100
    assert share <= MODEL_ERROR <= 1.5 * share
