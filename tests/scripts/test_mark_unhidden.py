"""The outline in screenshots of the profiler's GUI: where the picture has a step, which one, and what is outlined."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/dev"))

from mark_unhidden import (  # noqa: E402  # type: ignore[import-not-found, unused-ignore]
    ROW,
    Box,
    MismatchError,
    Pixels,
    Rows,
    draw,
    find_rows,
    label_of,
    main,
    read_picture,
    region,
    shown_step,
    steps_of,
)

RANGE, BORDER = (0x14, 0x14, 0xFF), (0, 0, 0xAA)
LETTERS = {"=": RANGE, "|": BORDER, ".": (255, 255, 255)}
TOP, LETTER = 200, 10
SCREEN = [
    "==========================",  # the run
    "=|======================|=",  # steps
    "=|====|=====|======|====|=",  # phases
    "..........................",
    ".............=====.=......",  # collectives
    "..........................",
    "..........................",
    "==========================",  # the next rank
    "=========|================",
    "==========================",
    "...............======.....",
]


def drawn(rows: list[str]) -> Pixels:
    """A screenshot in which a letter is 10 pixels wide; a border is one."""
    picture = np.full((TOP + ROW * (len(rows) + 1), LETTER * len(rows[0]), 3), 255, np.int16)
    for at, row in enumerate(rows):
        for column, letter in enumerate(row):
            top, left = TOP + at * ROW, column * LETTER
            picture[top : top + ROW - 1, left : left + LETTER] = RANGE if letter == "|" else LETTERS[letter]
            if letter == "|":
                picture[top : top + ROW - 1, left] = BORDER
    return picture


def test_a_picture_tells_where_rank_0_has_its_step_and_phases() -> None:
    assert find_rows(drawn(SCREEN)) == Rows(
        top=TOP, bottom=TOP + 5 * ROW - 2, left=10, right=240, phases=(10, 60, 120, 190, 240)
    )


@pytest.mark.parametrize(
    ("screen", "reason"),
    [(["." * 26] * 9, "no range from end to end"), ([row.replace("|", "=") for row in SCREEN], "no step is fitted")],
    ids=["no ranges", "no step"],
)
def test_another_picture_is_refused(screen: list[str], reason: str) -> None:
    with pytest.raises(MismatchError, match=reason):
        find_rows(drawn(screen))


def test_the_outline_is_drawn_into_the_picture(tmp_path: Path) -> None:
    before = drawn(SCREEN)
    Image.fromarray(before.astype(np.uint8)).save(tmp_path / "x.png")
    assert np.array_equal(read_picture(tmp_path / "x.png"), before)

    box = Box(left=120, top=TOP + 2 * ROW - 2, right=180, bottom=TOP + 5 * ROW + 2)
    draw(tmp_path / "x.png", box, "not hidden: 1.0 ms")
    after = read_picture(tmp_path / "x.png")
    rows, columns = np.nonzero((after != before).any(axis=2))
    assert (columns.min(), rows.min(), rows.max()) == (box.left, box.top, box.bottom)
    assert columns.max() > box.right, "the label is longer than the outline"
    assert {tuple(after[row, box.left]) for row in range(box.top, box.bottom + 1)} == {(0xD4, 0x00, 0x6A)}


class TestRealCaptures:
    """The borders of phases in the pictures that the project shows, as the GUI drew them."""

    NAIVE = Rows(195, 345, 229, 1554, (229, 236, 405, 699, 1111, 1553))
    OVERLAP = Rows(195, 387, 229, 1554, (227, 238, 481, 1015, 1223, 1553))

    @pytest.mark.parametrize(
        ("variant", "rows", "number", "columns", "label"),
        [
            ("naive", NAIVE, 2, (699, 1110), "not hidden: 79.8 ms"),
            ("overlap", OVERLAP, 3, (1015, 1222), "not hidden: 32.6 ms"),
        ],
    )
    def test_backwards_end_to_the_last_collective_is_outlined(
        self, variant: str, rows: Rows, number: int, columns: tuple[int, int], label: str
    ) -> None:
        step = shown_step(steps_of(ROOT / "traces" / f"{variant}.sqlite"), rows)
        box = region(step, rows)
        assert (step.number, (box.left, box.right), label_of(step)) == (number, columns, label)
        assert box.top < rows.top + 2 * ROW < rows.bottom < box.bottom, "phases and collectives"

    def test_a_picture_of_another_capture_is_refused(self) -> None:
        with pytest.raises(MismatchError, match="px off"):
            shown_step(steps_of(ROOT / "traces/overlap.sqlite"), self.NAIVE)

    def test_without_a_tail_nothing_is_marked(self) -> None:
        with pytest.raises(MismatchError, match="nothing is left to mark"):
            shown_step([], self.NAIVE)

    def test_a_refusal_is_one_line(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        picture = tmp_path / "x.png"
        shutil.copy(ROOT / "figures/buckets.png", picture)
        before = picture.read_bytes()
        monkeypatch.setattr(sys, "argv", ["x", str(picture), str(ROOT / "traces/naive.sqlite")])
        assert main() == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "shows no range from end to end" in line
        assert picture.read_bytes() == before
