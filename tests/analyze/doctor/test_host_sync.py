"""On a CPU: a host that waits in its hooks is told from one whose collectives are over before the next is launched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddp_prof.analyze.doctor.evidence import Abstained, Finding
from ddp_prof.runs import load_runs
from tests.ingest.test_nsys_export import MS
from tests.nsys_factory import Capture, Range, write_capture

RULE = "host synchronization in backward"
STEP = 500 * MS


def job(
    path: Path,
    *,
    waits: bool,
    steps: int,
    seed: int = 0,
    lengths_ms: tuple[int, int] = (5, 15),
    load: float = 0,
    operation: str = "all_reduce",
) -> list[Finding | Abstained]:
    """What the rule says of four collectives per step; between them 30 ms are computed.

    In each step other programs make all of it up to ``load`` times longer.
    """
    random = np.random.default_rng(seed)
    capture = Capture()
    for step in range(steps):
        at = step * STEP
        capture.ranges.append(Range(f"step|index={step}", at, at + STEP - MS, 100, 100, "ddp_prof"))
        capture.ranges.append(Range("forward", at, at + 50 * MS, 100, 100, "ddp_prof"))
        launch, slower = at + 60 * MS, 1 + load * random.random()
        for bucket in range(4):
            length = int(slower * random.integers(*(end * MS for end in lengths_ms)))
            name = f"{operation}|bucket={bucket}|bytes=1000|params=1"
            capture.ranges.append(Range(name, launch, launch + length, 101, 100, "ddp_prof", is_start_end=True))
            launch += int(slower * (30 * MS + random.integers(0, 2 * MS))) + (length if waits else 0)
        capture.ranges.append(Range("backward", at + 55 * MS, launch, 100, 100, "ddp_prof"))
    (run,) = load_runs(write_capture(path, capture))
    diagnosis = run.doctor()
    return [one for one in (*diagnosis.findings, *diagnosis.abstained) if one.rule == RULE]


@pytest.mark.parametrize("seed", range(5))
def test_who_waits_is_found(seed: int, tmp_path: Path) -> None:
    (finding,) = job(tmp_path / "job.sqlite", waits=True, steps=8, seed=seed)
    assert isinstance(finding, Finding)
    assert finding.cost_ns == pytest.approx(40 * MS, rel=0.2)
    assert finding.evidence.startswith("In 8 of 8 steps each reduction of gradients in backward had")
    assert finding.advice.startswith("In hooks of your own")


def test_of_fully_shard_it_is_said_first_that_it_waits_itself(tmp_path: Path) -> None:
    """The short answer has room for the first sentence only, and told of hooks that the program does not have."""
    (finding,) = job(tmp_path / "job.sqlite", waits=True, steps=8, operation="reduce_scatter")
    assert isinstance(finding, Finding)
    assert finding.advice.startswith("On a CPU, torch's fully_shard waits for each collective itself")


@pytest.mark.parametrize("seed", range(5))
def test_collectives_that_are_short_are_no_fault(seed: int, tmp_path: Path) -> None:
    """It was told of torch's own DDP, wherever compute between two buckets took longer than sending one."""
    assert job(tmp_path / "job.sqlite", waits=False, steps=8, seed=seed) == []


@pytest.mark.parametrize("seed", range(20))
def test_what_slows_collectives_and_compute_alike_is_no_wait(seed: int, tmp_path: Path) -> None:
    """The next launch comes later where a collective takes longer, by about as much, but not because of it."""
    found = job(tmp_path / "job.sqlite", waits=False, steps=6, seed=seed, lengths_ms=(23, 28), load=0.5)
    assert not any(isinstance(one, Finding) for one in found)


@pytest.mark.parametrize("waits", [True, False])
def test_of_two_steps_it_cannot_be_told(waits: bool, tmp_path: Path) -> None:
    (one,) = job(tmp_path / "job.sqlite", waits=waits, steps=2)
    assert isinstance(one, Abstained)
