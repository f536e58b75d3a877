"""The boxes of a timeline as columns of bytes, small enough to travel in a page by the million.

Boxes are sorted by row (a level of a lane) and start. A column of integers is turned into small numbers, these into
natural ones, and these into planes of bytes, the lowest first: planes of high bytes are nearly all zero, so that the
compressor takes them away. ``assets/columns.js`` reads it back::

    gap        start of a box less the end of the one before it, the first from 0
    duration   end less start
    category   index into ``theme.CATEGORIES``
    title      index into the page's titles
    step       number of the step less that of the box before
    bytes      as it is
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddp_prof.analyze.intervals import Intervals
from ddp_prof.present import theme
from ddp_prof.present.timeline.captions import box_label, box_title
from ddp_prof.present.timeline.model import Boxes
from ddp_prof.trace import select

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ddp_prof.present.timeline.model import Lane
    from ddp_prof.trace import Ints

LONGEST_TITLE = 1000
"""Names are searched in so many characters; templates of kernels have thousands."""

OVERVIEW_COLUMNS = 1000

_COMPRESSION = 4  # 6 is a fifth smaller and takes twice as long
_MOST_FLAGS = 1_000_000


class PackedRow(NamedTuple):
    """A level of a lane: its boxes, in order, do not overlap."""

    lane: int
    level: int
    boxes: Boxes


@dataclass(frozen=True)
class PackedBoxes:
    """The boxes of some lanes, row after row.

    Attributes:
        widths: Bytes a number, by column.
        payload: Column after column, compressed, as base64.
        titles: What boxes are called, each with a shorter label; without one a beginning of the title will do.
    """

    rows: tuple[PackedRow, ...]
    widths: dict[str, int]
    payload: str
    titles: tuple[tuple[str, str], ...]


def pack_boxes(lanes: Sequence[Lane]) -> PackedBoxes:
    """Pack all boxes of all lanes."""
    titles: dict[tuple[str, str], int] = {}
    tables = [_in_order(lane.boxes) for lane in lanes]
    columns = [_title_ids(lane, boxes, titles) for lane, boxes in zip(lanes, tables, strict=True)]
    widths, packed = pack_columns(
        {
            "gap": _gaps(_joined([boxes.start_ns for boxes in tables]), _joined([boxes.end_ns for boxes in tables])),
            "duration": _joined([boxes.end_ns - boxes.start_ns for boxes in tables]),
            "category": _joined([boxes.category for boxes in tables]),
            "title": _joined(columns),
            "step": _differences(_joined([boxes.step for boxes in tables])),
            "bytes": _joined([boxes.bytes for boxes in tables]),
        }
    )
    rows = tuple(row for at, boxes in enumerate(tables) for row in _rows_of(at, boxes))
    payload = base64.b64encode(zlib.compress(packed, _COMPRESSION)).decode()
    return PackedBoxes(rows, widths, payload, tuple(titles))


def pack_columns(columns: Mapping[str, Ints]) -> tuple[dict[str, int], bytes]:
    """Columns as planes of bytes, and the number of planes of each."""
    natural = {name: _natural(column) for name, column in columns.items()}
    widths = {name: (int(column.max(initial=0)).bit_length() + 7) // 8 for name, column in natural.items()}
    digits = {name: column.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8) for name, column in natural.items()}
    return widths, b"".join(digits[name][:, plane].tobytes() for name in columns for plane in range(widths[name]))


def _natural(column: Ints) -> Ints:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    natural: Ints = (column << 1) ^ (column >> 63)
    return natural


def _joined(columns: list[Ints]) -> Ints:
    return np.concatenate(columns) if columns else np.empty(0, np.int64)


def _gaps(start_ns: Ints, end_ns: Ints) -> Ints:
    before: Ints = np.concatenate([np.zeros(1, np.int64), end_ns])[:-1]
    return start_ns - before


def _differences(column: Ints) -> Ints:
    return np.diff(column, prepend=np.zeros(1, np.int64))


def _in_order(boxes: Boxes) -> Boxes:
    """By level and start; of those that start together the empty ones first."""
    one_level = not np.any(boxes.level)
    if one_level and np.all(boxes.start_ns[1:] >= np.maximum(boxes.end_ns, boxes.start_ns + 1)[:-1]):
        return boxes
    return select(boxes, np.lexsort((boxes.end_ns, boxes.start_ns, boxes.level)))


def _rows_of(lane: int, boxes: Boxes) -> Iterator[PackedRow]:
    levels, first = np.unique(boxes.level, return_index=True)
    ends = [*first.tolist(), len(boxes)][1:]
    for level, start, end in zip(levels.tolist(), first.tolist(), ends, strict=True):
        yield PackedRow(
            lane, level, Boxes(**{column.name: getattr(boxes, column.name)[start:end] for column in fields(Boxes)})
        )


def _title_ids(lane: Lane, boxes: Boxes, titles: dict[tuple[str, str], int]) -> Ints:
    """Index of each box's title, where it is new after those that there are."""
    first, which = _distinct(boxes.category, boxes.name_id, boxes.bucket)
    ids = [titles.setdefault(_title(lane, boxes, row), len(titles)) for row in first.tolist()]
    numbered: Ints = np.array(ids, np.int64)[which]
    return numbered


def _distinct(*columns: Ints) -> tuple[Ints, Ints]:
    """A row of each distinct combination, and for each row which combination it is."""
    which = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        codes = _codes(column)
        which = _codes(which * (codes.max(initial=0) + 1) + codes)
    rows = np.arange(len(which))[::-1]
    first = np.zeros(which.max(initial=-1) + 1, np.int64)
    first[which[::-1]] = rows  # of several rows of one combination the last one written stays: the first
    return first, which


def _codes(column: Ints) -> Ints:
    """Distinct values as 0, 1, 2, ..."""
    low, high = column.min(initial=0), column.max(initial=0)
    if low == high:
        return np.zeros_like(column)
    if high - low > _MOST_FLAGS:
        return np.asarray(np.unique(column, return_inverse=True)[1], np.int64)
    # Several times as fast as sorting.
    seen = np.zeros(high - low + 1, np.int64)
    seen[column - low] = 1
    numbered: Ints = (np.cumsum(seen) - 1)[column - low]
    return numbered


def _title(lane: Lane, boxes: Boxes, row: int) -> tuple[str, str]:
    category = theme.CATEGORIES[int(boxes.category[row])]
    name_id, bucket, step = int(boxes.name_id[row]), int(boxes.bucket[row]), int(boxes.step[row])
    title = box_title(lane, category, name_id, bucket, LONGEST_TITLE)
    return title, box_label(lane, category, name_id, bucket, step)


def overview(boxes: Boxes, start_ns: int, end_ns: int) -> dict[int, str]:
    """A timeline at low resolution, to show until its boxes are read.

    For each category, how much of each column its boxes cover, from 0 to 255, as base64.

    Args:
        boxes: In order; they do not overlap.
        start_ns: Start of the first column.
        end_ns: End of the last column.
    """
    edges = np.linspace(start_ns, end_ns, OVERVIEW_COLUMNS + 1).astype(np.int64)
    result = {}
    for category in np.unique(boxes.category).tolist():
        mine = select(boxes, boxes.category == category)
        covered = Intervals(mine.start_ns, mine.end_ns).covered_ns(edges[:-1], edges[1:])
        shares = np.ceil(255 * covered / np.maximum(1, np.diff(edges)))  # whatever is there is seen
        result[category] = base64.b64encode(shares.astype(np.uint8).tobytes()).decode()
    return result
