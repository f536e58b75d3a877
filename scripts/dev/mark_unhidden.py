"""Outlines, in a screenshot of the profiler's GUI, the communication that backward does not hide.

    python scripts/dev/mark_unhidden.py PICTURE.png TRACE

The screenshot is one of scripts/dev/nsys_screenshot.sh: the topmost rows are those of rank 0, and a step is fitted to
them. The times at which its phases begin tell which step it is: those of no other step are at the same pixels. The
outline reaches from the end of backward to the end of the step's last collective; its label is the step's tail, as
``ddp-prof overlap --steps`` has it.

Exit: 0; 1 and one line on stderr if the picture and the trace do not fit, or if nothing is left to hide.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ddp_prof.analyze.core.attribution import BACKWARD_PHASE
from ddp_prof.errors import DdpProfError
from ddp_prof.runs import load_runs
from ddp_prof.trace import Category

Pixels = NDArray[np.int16]
"""Red, green and blue, by row and column."""

RULER = 105
"""Rows above the timeline."""
ROW = 21
TOLERANCE = 3
"""Pixels between where a phase begins in the picture and by the trace: a border is two wide."""
COLOR = "#d4006a"
OUTLINE, FONT_SIZE = 3, 17


class MismatchError(Exception):
    """The picture does not show what the trace holds."""


class Step(NamedTuple):
    """A step of rank 0: where it and its phases begin, and what of its communication is not hidden, in ns."""

    number: int
    start_ns: int
    end_ns: int
    phases_ns: tuple[int, ...]
    backward_end_ns: int
    last_end_ns: int
    tail_ns: int


class Rows(NamedTuple):
    """Rank 0 in a picture, in pixels: the first row of its topmost range and the last one of its ranges."""

    top: int
    bottom: int
    left: int
    right: int
    phases: tuple[int, ...]
    """Columns at which a phase may begin."""


class Box(NamedTuple):
    left: int
    top: int
    right: int
    bottom: int


def find_rows(picture: Pixels) -> Rows:
    """Find rank 0 and the step that is fitted to the view: its borders are the outermost ones in the row of steps.

    Raises:
        MismatchError: The picture has no row of ranges from end to end.
    """
    red, green, blue = (picture[:, :, color] for color in range(3))
    is_range = (blue > 150) & (blue - red > 90) & (blue - green > 90)
    width = picture.shape[1]
    is_whole = is_range[:, width // 5 : width * 9 // 10].mean(axis=1) > 0.7
    is_whole[:RULER] = False
    whole = np.flatnonzero(is_whole)
    if not len(whole):
        raise MismatchError("it shows no range from end to end: is it a picture of nsys_screenshot.sh?")
    top = int(whole[0])
    # Ranges of phases end three rows below; the next rank begins with the next range from end to end.
    others = whole[whole > top + 4 * ROW]
    used = np.flatnonzero(is_range.sum(axis=1) > 3)
    bottom = int(used[(used >= top) & (used < (others[0] if len(others) else len(picture)))].max())
    is_border = (red < 0x30) & (green < 0x30) & (blue > 0x90) & (blue < 0xC0)
    steps, phases = (np.flatnonzero(is_border[top + at * ROW + ROW // 2]) for at in (1, 2))
    if len(steps) < 2 or steps[-1] - steps[0] < width // 2:
        raise MismatchError("no step is fitted to the view")
    return Rows(top, bottom, int(steps[0]), int(steps[-1]), tuple(phases.tolist()))


def steps_of(trace: Path) -> list[Step]:
    """The measured steps of rank 0 that mark backward and have a tail.

    Raises:
        DdpProfError: The trace cannot be read.
    """
    (run,) = load_runs([trace])
    ranks = [rank for part in run.events() for rank in part.ranks if rank.rank in (0, None)]
    tails = {step.step_key: step.tail_ns for rank in run.overlap().ranks[:1] for step in rank.steps}
    found = []
    for rank in ranks[:1]:
        events, steps = rank.events, rank.steps
        for at, (number, start, end) in enumerate(zip(rank.step_keys, steps.start_ns, steps.end_ns, strict=True)):
            ends = events.end_ns[(events.category == Category.COMMUNICATION) & (events.step == at)]
            inside = (rank.phases.start_ns >= start) & (rank.phases.start_ns < end)
            backward = rank.phases.end_ns[inside & (rank.phases.kind == BACKWARD_PHASE)]
            tail_ns = tails.get(int(number))
            if len(backward) and len(ends) and tail_ns:
                phases = tuple(sorted(rank.phases.start_ns[inside].tolist()))
                times = int(start), int(end), phases, int(backward.max()), int(ends.max())
                found.append(Step(int(number), *times, tail_ns))
    return found


def place(time_ns: int, step: Step, rows: Rows) -> float:
    """The column of a time: the step is linear between its borders."""
    return rows.left + (time_ns - step.start_ns) / (step.end_ns - step.start_ns) * (rows.right - rows.left)


def shown_step(steps: list[Step], rows: Rows) -> Step:
    """The step whose phases begin where the picture shows it.

    Raises:
        MismatchError: There is none.
    """

    def error(step: Step) -> float:
        borders = np.array(rows.phases or (-width,))
        return max(float(np.abs(borders - place(time, step, rows)).min()) for time in step.phases_ns)

    width = rows.right - rows.left
    if not steps:
        raise MismatchError("no step of rank 0 has communication after backward: nothing is left to mark")
    best = min(steps, key=error)
    if error(best) > TOLERANCE:
        off = f"the nearest, {best.number}, is {error(best):.0f} px off"
        raise MismatchError(f"no step begins its phases where the picture does ({off})")
    return best


def region(step: Step, rows: Rows) -> Box:
    """Rank 0's phases and collectives, from the end of backward to the end of the last collective."""
    left, right = (round(place(time, step, rows)) for time in (step.backward_end_ns, step.last_end_ns))
    return Box(left, rows.top + 2 * ROW - 2, max(right, left + 2), rows.bottom + 4)


def label_of(step: Step) -> str:
    return f"not hidden: {step.tail_ns / 1e6:.1f} ms"


def read_picture(path: Path) -> Pixels:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB")).astype(np.int16)


def draw(path: Path, box: Box, label: str) -> None:
    """Draw the outline into the picture, and the label in the free rows between phases and collectives."""
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    pen = ImageDraw.Draw(picture)
    pen.rectangle(box, outline=COLOR, width=OUTLINE)
    # "ls": the place is where the first letter stands, at the left and on the line.
    pen.text(
        (box.left + 8, box.top + 2 * ROW + 2), label, fill=COLOR, font=ImageFont.load_default(FONT_SIZE), anchor="ls"
    )
    marked = path.with_name(f".{path.name}.marked.png")
    picture.save(marked)
    marked.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("trace", type=Path)
    arguments = parser.parse_args()
    try:
        rows = find_rows(read_picture(arguments.picture))
        step = shown_step(steps_of(arguments.trace), rows)
        draw(arguments.picture, region(step, rows), label_of(step))
    except MismatchError as mismatch:
        print(f"mark_unhidden: {arguments.picture} and {arguments.trace}: {mismatch}", file=sys.stderr)
    except DdpProfError as error:
        print(f"mark_unhidden: {error}", file=sys.stderr)
    except OSError as error:
        print(f"mark_unhidden: {arguments.picture} cannot be marked: {error}", file=sys.stderr)
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
