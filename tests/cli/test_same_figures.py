"""A figure does not depend on the command that prints it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_prof.runs.load import load_runs
from tests.command_line import run
from tests.nsys_factory import Capture, Kernel, Range, write_capture

KERNELS, STEPS, STEP_NS = 12, 8, 100_000


def contended(factor: float) -> Capture:
    """Twelve kernels of one name a step, the n-th of 1,000 + 100 n ns; beside most of them a collective in even steps.

    Beside it they take 1.3 times as long. In odd steps one of another launch shape comes first, so that only who knows
    shapes compares the n-th with the n-th. All lengths are multiplied by ``factor``.
    """
    found = Capture(threads={(100, 100): "python3", (100, 131): "pt_autograd_0"})
    for step in range(STEPS):
        time = launch = step * STEP_NS + 1000

        def kernel(length: float, grid: int = 64) -> None:
            nonlocal time, launch
            launch += 5
            end = time + round(factor * length)
            found.kernels.append(Kernel("gemm", time, end, launch, 131, grid=grid))
            time = end

        communicates = step % 2 == 0
        kernel(200, 64 if communicates else 7)
        if communicates:
            found.kernels.pop()
        start = time
        for position in range(KERNELS):
            kernel((1000 + 100 * position + 10 * (step % 3)) * (1.3 if communicates and position < 9 else 1))
            if communicates and position == 8:
                comm = Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", start, time, launch + 1, 131, stream=9)
                found.kernels.append(comm)
        found.ranges.append(Range(f"step_{step}", step * STEP_NS + 900, time + 100, 100))
    return found


@pytest.fixture
def before_and_after(tmp_path: Path) -> list[Path]:
    return [write_capture(tmp_path / f"{name}.sqlite", contended(by)) for name, by in (("old", 1), ("new", 1.5))]


def test_a_gate_says_what_compare_says(before_and_after: list[Path]) -> None:
    """It read no launch shapes, so that its contention was another one."""
    compared = json.loads(run("compare", "--format", "json", *before_and_after).stdout)
    assert [budget["contention"]["slowdown"] for budget in compared["waterfall"]["budgets"]] == pytest.approx(
        [1.3] * 2, abs=0.01
    )
    title = next(line for line in run("compare", *before_and_after).stdout.splitlines() if line.startswith("from old"))
    checked = run("check", before_and_after[1], "--baseline", before_and_after[0], "--format", "json")
    notes = json.loads(checked.stdout)["warnings"]
    said = [note.partition("new, mean step against the baseline: ")[2] for note in notes]
    assert title == f"from old to new, mean step: {'; '.join(filter(None, said))}"
    assert "contention +" in title


def test_a_notebook_tells_kernels_apart_as_the_command_does(before_and_after: list[Path]) -> None:
    """Whatever was asked of the run before."""
    told = json.loads(run("kernels", "--top", "0", "--format", "json", before_and_after[0]).stdout)["kernels"]
    for measures in ((), ("overlap",)):
        (loaded,) = load_runs(before_and_after[0], measures=measures)
        loaded.overlap()
        found = loaded.device_use().kernels
        assert [(kernel.shape, kernel.count) for kernel in found] == [(row["shape"], row["count"]) for row in told]
        assert len({kernel.shape for kernel in found}) == 2
