"""Steps of two levels: the first ones take longer than the others, or the last ones another time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_prof.analyze.step_levels import LevelChange, find_level_change
from tests.command_line import csv_rows, run
from tests.nsys_factory import NCCL, Capture, Kernel, Range, write_capture

MS = 1_000_000


@pytest.mark.parametrize(
    ("lengths", "divided"),
    [  # a digit is a step of so many milliseconds
        ("88883333", (4, 8, 3)),
        ("9333", (1, 9, 3)),
        ("9533333333", (2, 7, 3)),
        ("4443333333", (3, 4, 3)),
        ("333333338888", (8, 3, 8)),
        ("88883333333393333333", (4, 8, 3)),  # a later step that is long, too
        ("3333333", None),
        ("63333333333333333333", None),  # a long first step among many: no figure depends on it
        ("33393333", None),  # a step that stands out is no level
        ("3333338", None),
        ("3838383838", None),
        ("4433333333", None),
        ("8877885566", None),  # levels, but lengths vary about them by half of their distance
        ("43", None),  # of so few nothing is told
        ("", None),
    ],
)
def test_where_the_steps_divide(lengths: str, divided: tuple[int, int, int] | None) -> None:
    found = find_level_change([int(digit) * MS for digit in lengths])
    assert (found and (found.first, found.before_ns // MS, found.after_ns // MS)) == divided


def test_lengths_that_vary_seldom_divide_by_chance() -> None:
    """Of 200 runs of 20 steps that vary by 20 %, each with the part 0.6 of the step before, 14 % did."""
    generator = np.random.default_rng(0)
    divided = found = 0
    for _ in range(200):
        lengths = generator.standard_normal(20)
        for step in range(1, 20):
            lengths[step] = 0.6 * lengths[step - 1] + 0.8 * lengths[step]
        divided += find_level_change((50 * MS * np.exp(0.2 * lengths)).astype(int).tolist()) is not None
        warmed_up = np.log(1.5) * (np.arange(20) < 6) + 0.03 * lengths
        found += find_level_change((50 * MS * np.exp(warmed_up)).astype(int).tolist()) is not None
    assert divided <= 8
    assert found == 200


def test_the_median_moves_where_it_is_of_the_fewer_steps_too() -> None:
    of_few, of_half = (find_level_change([int(digit) * MS for digit in lengths]) for lengths in ("9333", "88833333"))
    assert of_few == LevelChange(1, 4, 9 * MS, 3 * MS, moves_median=False)
    assert of_half == LevelChange(3, 8, 8 * MS, 3 * MS, moves_median=False)
    assert find_level_change([8 * MS] * 4 + [3 * MS] * 4) == LevelChange(4, 8, 8 * MS, 3 * MS, moves_median=True)


def capture_of(lengths: str, marked: int = 0) -> Capture:
    """Steps of which each digit is the length in 10 us: compute, and an all-reduce for the last third.

    us         0         10        20        30
    stream 7   ggggggggggggggggggggg.........a      a step of 3
    stream 20  .....................AAAAAAAAA.

    The first ``marked`` are marked as warm-up.
    """
    capture, at = Capture(), 0
    for step, digit in enumerate(lengths):
        us = int(digit) * 10_000
        warmup = "|warmup=1" if step < marked else ""
        capture.ranges.append(Range(f"step|index={step}{warmup}", at, at + us, 100))
        capture.kernels += [
            Kernel("gradient", at, at + us * 2 // 3, at, 100),
            Kernel(NCCL, at + us * 2 // 3, at + us - 1000, at + 1, 100, stream=20),
            Kernel("adam", at + us - 1000, at + us, at + 2, 100),
        ]
        at += us
    return capture


def test_first_steps_that_are_longer_are_named_and_can_be_left_out(tmp_path: Path) -> None:
    """A 'typical' step of 55 us was told, which no step takes, and nothing else."""
    path = write_capture(tmp_path / "x.sqlite", capture_of("88883333"))
    marked = write_capture(tmp_path / "marked.sqlite", capture_of("88883333", marked=4))
    said = run("summary", path).stdout
    assert "the first 4 of 8 steps take 80.0 µs, the others 30.0 µs" in said
    assert "--warmup-steps 4 leaves them out if they are warm-up" in said

    def rows(file: Path, *options: object) -> list[dict[str, str]]:
        return [{**row, "run": ""} for row in csv_rows("overlap", "--steps", file, *options)]

    assert len(rows(path, "--warmup-steps", 4)) == 4
    assert rows(path, "--warmup-steps", 4) == rows(marked) != rows(path)
    assert rows(marked, "--warmup-steps", 1) == rows(marked)[1:], "besides those that are marked"
    left = run("summary", path, "--warmup-steps", 4, "--format", "json")
    (found,) = json.loads(left.stdout)["runs"]
    assert all("--warmup-steps 4" in command for command in found["next"])
    assert "steps take" not in left.output


def test_steps_that_take_longer_later_are_no_warmup(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", capture_of("333333338888"))
    said = run("summary", path).stdout
    assert "the first 8 of 12 steps take 30.0 µs, the others 80.0 µs; figures of all steps mix both" in said
    assert "--warmup-steps" not in said


def test_levels_are_those_of_the_median_rank(tmp_path: Path) -> None:
    """One rank of three with slow first steps makes no level of the run."""
    paths = [
        write_capture(tmp_path / f"rank{rank}.sqlite", capture_of(lengths))
        for rank, lengths in enumerate(("88883333", "33333333", "33333333"))
    ]
    assert "steps take" not in run("overlap", "--one-run", *paths).output


def test_ranks_that_begin_with_other_steps_have_no_first_steps_in_common(tmp_path: Path) -> None:
    """The option leaves out steps of each rank: of rank 1, whose first steps are lost, it would be other ones."""
    whole, later = capture_of("888833333333"), capture_of("888833333333")
    later.kernels = [one for one in later.kernels if one.start >= 160_000]
    later.ranges = [one for one in later.ranges if one.start >= 160_000]
    paths = [write_capture(tmp_path / f"rank{rank}.sqlite", one) for rank, one in enumerate((whole, later))]
    assert "steps take" in run("overlap", paths[0]).output
    assert "steps take" not in run("overlap", "--one-run", *paths).output


@pytest.mark.parametrize("steps", [8, 9])
def test_to_leave_out_all_steps_is_an_error(tmp_path: Path, steps: int) -> None:
    path = write_capture(tmp_path / "x.sqlite", capture_of("88883333"))
    result = run("overlap", path, "--warmup-steps", steps)
    assert result.exit_code != 0
    assert f"x.sqlite: --warmup-steps {steps} leaves out all 8 steps: give fewer" in result.stderr


def test_steps_that_were_recorded_in_part_are_none_of_the_first(tmp_path: Path) -> None:
    """The note counts the steps that are measured, and so does the option."""
    capture = capture_of("888833333")
    capture.kernels = [
        replace(one, is_lost=True) if one.start < 80_000 and one.name == "gradient" else one for one in capture.kernels
    ]
    path = write_capture(tmp_path / "x.sqlite", capture)
    assert [row["step"] for row in csv_rows("overlap", "--steps", path)] == [str(step) for step in range(1, 9)]
    assert "the first 3 of 8 steps take" in run("overlap", path).output
    left = csv_rows("overlap", "--steps", path, "--warmup-steps", 3)
    assert [row["step"] for row in left] == ["4", "5", "6", "7", "8"]
