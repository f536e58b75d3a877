"""Two runs whose kernels all take longer by one factor: the device is slower, not a part of the program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import run
from tests.nsys_factory import NCCL, Capture, Kernel, Range, write_capture

STEPS, KERNELS = 8, 6

Factor = Callable[[int, int], float]
"""By how much kernel ``number`` takes longer in step ``step``."""


def capture(
    factor: Factor,
    *,
    steps: int = STEPS,
    grid: int = 64,
    repeats: int = 1,
    beside: bool = False,
    odd_beside: bool = False,
) -> Capture:
    """In each step six kernels of 1.0 to 1.5 ms, which scatter by 1 us, and a collective of 0.3 ms after them.

    With ``beside``, the collective runs as long as all of them; with ``odd_beside``, it does so in every second step.
    """
    found = Capture()
    for step in range(2 * steps if odd_beside else steps):
        begin = 30_000_000 * step + 1_000
        at = begin
        for number in range(KERNELS):
            for _ in range(repeats if number == 0 else 1):
                length = round((1_000_000 + 100_000 * number) * factor(number, step)) + 1_000 * (step % 3)
                found.kernels.append(Kernel(f"gemm_{number}", at, at + length, begin, 100, grid=grid))
                at += length
        found.kernels.append(
            Kernel(NCCL, begin if beside or (odd_beside and step % 2) else at, at + 300_000, begin, 100, stream=20)
        )
        found.ranges.append(Range(f"step {step}", begin, at + 400_000, 100))
    return found


def compared(tmp_path: Path, before: Capture, after: Capture) -> tuple[str, object]:
    paths = [str(write_capture(tmp_path / f"{name}.sqlite", of)) for name, of in (("old", before), ("new", after))]
    said = " ".join(run("compare", *paths).stdout.split())
    return said, json.loads(run("compare", *paths, "--format", "json").stdout)["same_factor"]


@pytest.mark.parametrize(("factor", "which"), [(1.1, "slower, as at lower"), (0.9, "faster, as at higher")])
def test_of_a_slower_device_one_sentence_tells_all(tmp_path: Path, factor: float, which: str) -> None:
    """A row for each part of the step that changed was all that was shown."""
    said, found = compared(tmp_path, capture(lambda *_: 1), capture(lambda *_: factor))
    sentence = (
        f"the 6 kernels that take 100 % of compute all take {factor:.2f} times as long as before ({factor:.2f} to "
    )
    assert sentence in said
    work = "more" if factor > 1 else "less"
    assert f"and run as often: the device is {which} clocks, or equal launches do {work} work" in said
    assert isinstance(found, dict)
    assert (found["kernels"], found["factor"]) == (6, pytest.approx(factor, abs=1e-3))


def test_runs_may_have_other_numbers_of_steps(tmp_path: Path) -> None:
    _, found = compared(tmp_path, capture(lambda *_: 1), capture(lambda *_: 1.1, steps=STEPS + 4))
    assert isinstance(found, dict)
    assert (found["kernels"], found["factor"]) == (6, pytest.approx(1.1, abs=1e-3))


def test_a_gate_that_fails_says_so_too(tmp_path: Path) -> None:
    ends = (("old", 1.0), ("new", 1.1))
    old, new = (str(write_capture(tmp_path / f"{name}.sqlite", capture(lambda *_, by=by: by))) for name, by in ends)
    result = run("check", "--baseline", old, new)
    assert result.exit_code == 3
    said = " ".join(result.stdout.split())
    assert (
        "note: new, against the baseline: the 6 kernels that take 100 % of compute all take 1.10 times as long" in said
    )


@pytest.mark.parametrize(("factor", "said"), [(1.3, "slower, as at lower"), (0.8, "faster, as at higher")])
def test_kernels_that_always_run_beside_communication_may_be_slowed_by_it(
    tmp_path: Path, factor: float, said: str
) -> None:
    """Only contention changed, and 'the device is slower, as at lower clocks' was said."""
    text, found = compared(tmp_path, capture(lambda *_: 1, beside=True), capture(lambda *_: factor, beside=True))
    slows = "more" if factor > 1 else "less"
    work = f"or equal launches do {slows} work, or communication slows them {slows}, beside which they run"
    assert f"the device is {said} clocks, {work}" in text
    assert isinstance(found, dict)
    assert (found["kernels"], found["alone"]) == (6, 0)


def test_where_communication_slows_kernels_more_too_the_factor_is_that_of_kernels_alone(tmp_path: Path) -> None:
    """Of a device 1.2 times slower, with a contention of 1.6, it was said that all kernels take 1.20 times as long."""
    before, slower, both = (
        capture(factor, odd_beside=True)
        for factor in (lambda *_: 1, lambda *_: 1.2, lambda _, step: 1.2 + 0.72 * (step % 2))
    )
    text, found = compared(tmp_path, before, both)
    assert "1.20 times as long as before (1.20 to 1.20) where no communication runs beside them, and run as" in text
    assert isinstance(found, dict)
    assert found["differs_beside"]
    (other := tmp_path / "other").mkdir()
    text, _ = compared(other, before, slower)
    assert "1.20 times as long as before (1.20 to 1.20), and run as often: the device is slower" in text


OTHERS: dict[str, Capture] = {
    "one kernel is not longer": capture(lambda number, _: 1 if number == 3 else 1.1),
    "one kernel runs twice": capture(lambda *_: 1.1, repeats=2),
    "half of the steps are longer": capture(lambda _, step: 1 + 0.2 * (step % 2)),
    "kernels have other sizes": capture(lambda *_: 1.1, grid=70),
    "what differs is within a few per cent": capture(lambda number, _: 1 + 0.01 * (number % 2)),
    "nothing changed": capture(lambda *_: 1),
}


@pytest.mark.parametrize("other", OTHERS)
def test_of_other_changes_it_is_not_said(tmp_path: Path, other: str) -> None:
    said, found = compared(tmp_path, capture(lambda *_: 1), OTHERS[other])
    assert found is None
    assert "times as long as before" not in said
