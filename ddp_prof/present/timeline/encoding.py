"""Encodes the boxes of a timeline as columns of bytes, so compact that a page can hold millions.

Boxes are sorted by row (a level of a lane) and start. Each column of integers is turned into small numbers, then into
natural numbers, then into planes of bytes, the lowest byte first. A block of rows has only the planes that its numbers
need, and the planes of high bytes are nearly all zero, so they compress well. The boxes of ``where time goes`` start
and end at the times of boxes in the rank's other lanes; so they hold positions in the sorted list of these times, which
need hardly any room. ``assets/data/columns.js`` decodes the columns::

    gap        start of a box minus the end of the box before (for the first box, minus 0); a time or a position
    duration   end minus start; a time or a position
    category   index into ``theme.CATEGORIES``
    title      index into the page's titles
    step       key of the step minus that of the box before
    bytes      unchanged
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddp_prof.present import theme
from ddp_prof.present.timeline.figure import box_label, box_title
from ddp_prof.present.timeline.model import COMMUNICATION, STRIP, WAITING, Boxes, Lane, RankExposure
from ddp_prof.trace import UNKNOWN, Ints, distinct_rows, select, take_or_unknown

LONGEST_TITLE = 1000
"""Characters of a name that a page holds and searches; C++ templates give kernels names of thousands."""

NEEDS = ("box", "index", "of", "blocking", "held", "slack", "name", "stream", "after", "consumer")

_BLOCK = 1 << 16
"""Rows that are encoded at once, so few that they stay in the processor's cache."""

_COMPRESSION = 4  # 6 is a fifth smaller and takes twice as long


class PlacedLane(NamedTuple):
    """A lane, with its rank and its place on the page."""

    rank: int
    place: int
    lane: Lane

    def with_boxes(self, boxes: Boxes) -> PlacedLane:
        return self._replace(lane=replace(self.lane, boxes=boxes))


class PackedRow(NamedTuple):
    """A level of a lane. Its boxes are sorted and do not overlap; ``offset`` is the first one's position among all."""

    placed: PlacedLane
    level: int
    boxes: Boxes
    offset: int


class PackedTable(NamedTuple):
    """The shape of a table: its number of rows, and for each block of each column the number of planes and of rows."""

    rows: int
    columns: dict[str, list[tuple[int, int]]]


@dataclass(frozen=True)
class PackedBoxes:
    """Boxes and further tables as bytes: table after table, in each column after column."""

    rows: tuple[PackedRow, ...]
    tables: tuple[PackedTable, ...]
    packed: bytes

    def payload(self) -> str:
        return base64.b64encode(zlib.compress(self.packed, _COMPRESSION)).decode()


class Titles:
    """The texts of boxes, each stored once; boxes hold their numbers.

    Attributes:
        titles: Title, a shorter label, and the bucket; without a label the page cuts the title.
        shapes: Launch shape and registers per thread; number 0 means none.
        consumers: Names of operations that need collectives.
    """

    def __init__(self) -> None:
        self.titles: dict[tuple[str, str, int], int] = {}
        self.shapes: dict[tuple[str, int], int] = {("", UNKNOWN): 0}
        self.consumers: dict[str, int] = {}

    def index_for(self, lane: Lane, boxes: Boxes) -> Ints:
        """Return the number of each box's title; new titles are added."""
        first, which = distinct_rows(boxes.category, boxes.name_id, boxes.bucket)
        ids = []
        for row in first.tolist():
            category = theme.CATEGORIES[int(boxes.category[row])]
            name_id, bucket = int(boxes.name_id[row]), int(boxes.bucket[row])
            title = box_title(lane, category, name_id, bucket, LONGEST_TITLE)
            key = (title, box_label(lane, category, name_id, bucket), bucket)
            ids.append(self.titles.setdefault(key, len(self.titles)))
        numbered: Ints = np.array(ids, np.int64)[which]
        return numbered

    def shape_of(self, lane: Lane, boxes: Boxes) -> Ints:
        first, which = distinct_rows(boxes.shape, boxes.registers)
        used = zip(boxes.shape[first].tolist(), boxes.registers[first].tolist(), strict=True)
        keys = [("" if shape == UNKNOWN else lane.names[shape], registers) for shape, registers in used]
        numbered: Ints = np.array([self.shapes.setdefault(key, len(self.shapes)) for key in keys], np.int64)[which]
        return numbered


def pack_boxes(lanes: Sequence[PlacedLane], titles: Titles) -> PackedBoxes:
    """Pack all boxes of some lanes.

    There are two tables: the boxes, and the times of ``where time goes`` at which no other box starts or ends. The
    second has the columns ``rank`` and ``time``, which is the difference from the row before.
    """
    lanes = [_in_order(placed) for placed in lanes]
    positioned, ranks, extra = [], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for placed in lanes:
        if placed.lane.kind != STRIP:
            positioned.append(placed)
            continue
        boxes, times = placed.lane.boxes, _times(lanes, placed.rank)
        starts, ends, missing = _positions(times, boxes)
        extra.append(missing)
        ranks.append(np.full(len(missing), placed.rank, np.int64))
        positioned.append(placed.with_boxes(replace(boxes, start_ns=starts, end_ns=ends)))
    table, packed = _pack_rows(positioned, titles)
    columns = {"rank": ranks, "time": [_differences(np.concatenate(extra))]}
    others, more = pack_table(sum(map(len, extra)), columns)
    return PackedBoxes(_rows(lanes), (table, others), packed + more)


def pack_folded(
    lanes: Sequence[PlacedLane], shown: PackedBoxes, explained: Sequence[RankExposure], titles: Titles
) -> PackedBoxes:
    """Pack what a page needs when a box is selected or a lane is unfolded.

    There are four tables:

    - the boxes of these lanes;
    - for each box of ``shown``: ``call`` (see :func:`_links`), ``shape`` and ``phase``, both 0 for none;
    - the parts of collectives among them: ``box`` (difference from the row before), ``part`` and ``ns``. ``part`` is an
      index into ``figure.EXPOSED_PARTS``; the next index means overlapped time, the one after it transfer time;
    - which operation waited for which collective (see :func:`_needs`).

    Args:
        lanes: The lanes that are folded at first.
        shown: The boxes of all other lanes, packed.
        explained: The collectives of each rank.
        titles: The titles of ``shown``; new ones are added.
    """
    lanes = [_in_order(placed) for placed in lanes]
    table = _pack_rows(lanes, titles)
    rows = _rows(lanes)
    facts = {
        "call": [_links(rows, shown.rows)],
        "shape": (titles.shape_of(row.placed.lane, row.boxes) for row in shown.rows),
        "phase": (row.boxes.phase + 1 for row in shown.rows),
    }
    launches = pack_table(sum(len(row.boxes) for row in shown.rows), facts)
    exposed = _exposed(shown.rows, explained)
    needs = _needs(shown.rows, explained, titles)
    tables = (table, launches, *(pack_table(len(columns["box"][0]), columns) for columns in (exposed, needs)))
    return PackedBoxes(rows, tuple(shape for shape, _ in tables), b"".join(packed for _, packed in tables))


def _rows(lanes: Sequence[PlacedLane]) -> tuple[PackedRow, ...]:
    """Split lanes into levels, a row each; the boxes of a lane are sorted by level."""
    packed, offset = [], 0
    for placed in lanes:
        boxes = placed.lane.boxes
        first = np.flatnonzero(np.diff(boxes.level, prepend=-1))
        for level, start, end in zip(boxes.level[first].tolist(), first, np.append(first, len(boxes))[1:], strict=True):
            boxes_of_level = Boxes(**{column.name: getattr(boxes, column.name)[start:end] for column in fields(Boxes)})
            packed.append(PackedRow(placed, level, boxes_of_level, offset))
            offset += len(boxes_of_level)
    return tuple(packed)


def _pack_rows(lanes: Sequence[PlacedLane], titles: Titles) -> tuple[PackedTable, bytes]:
    tables = [placed.lane.boxes for placed in lanes]
    columns = {
        "gap": _differences_to_column([boxes.start_ns for boxes in tables], [boxes.end_ns for boxes in tables]),
        "duration": (boxes.end_ns - boxes.start_ns for boxes in tables),
        "category": (boxes.category for boxes in tables),
        "title": (titles.index_for(placed.lane, placed.lane.boxes) for placed in lanes),
        "step": _differences_to_column([boxes.step for boxes in tables], [boxes.step for boxes in tables]),
        "bytes": (boxes.bytes for boxes in tables),
    }
    return pack_table(sum(map(len, tables)), columns)


def _times(lanes: Sequence[PlacedLane], rank: int) -> Ints:
    """Return the sorted times at which boxes of a rank start or end, without those of ``where time goes``."""
    own = [placed.lane.boxes for placed in lanes if placed.rank == rank and placed.lane.kind != STRIP]
    # The times of a row are sorted already; a stable sort makes use of that and takes a fraction of the time.
    times = np.sort(_joined([np.stack([boxes.start_ns, boxes.end_ns], axis=1).ravel() for boxes in own]), kind="stable")
    return times[np.diff(times, prepend=times[:1] - 1) > 0]


def _positions(times: Ints, boxes: Boxes) -> tuple[Ints, Ints, Ints]:
    """Return the positions of starts and ends in the times with the missing ones added, and these missing times."""
    start, end, known = boxes.start_ns, boxes.end_ns, np.append(times, 0)
    starts, ends = np.searchsorted(times, start), np.searchsorted(times, end)
    missing = np.unique(np.append(start[known[starts] != start], end[known[ends] != end]))
    return starts + np.searchsorted(missing, start), ends + np.searchsorted(missing, end), missing


def _links(folded: Sequence[PackedRow], shown: Sequence[PackedRow]) -> Ints:
    """Return a number for the launch call of each box shown: 0 for none, else ``2 * difference + 1``.

    The difference is the call's position among the folded boxes minus that of the last box that has a call.
    """
    places = {rank: _places(folded, rank) for rank in {row.placed.rank for row in shown}}
    found = _joined([places[row.placed.rank].take(row.boxes.call + 1, mode="clip") for row in shown])
    known = found != UNKNOWN
    links = np.zeros(len(found), np.int64)
    links[known] = 2 * _differences(found[known]) + 1
    return links


def _places(folded: Sequence[PackedRow], rank: int) -> Ints:
    """Return positions among the folded boxes, by a call's row plus 1; ``UNKNOWN`` first and last, for no such box."""
    calls = [(row.boxes.call, row.offset) for row in folded if row.placed.rank == rank]
    places = np.full(max((int(call.max(initial=UNKNOWN)) for call, _ in calls), default=UNKNOWN) + 3, UNKNOWN, np.int64)
    for call, offset in calls:
        known = np.flatnonzero(call != UNKNOWN)
        places[call[known] + 1] = offset + known
    return places


def _exposed(shown: Sequence[PackedRow], explained: Sequence[RankExposure]) -> dict[str, list[Ints]]:
    boxes, parts, lengths = [], [], []
    for row in shown:
        found = explained[row.placed.rank]
        rows = np.flatnonzero(row.boxes.collective != UNKNOWN)
        if len(rows) and row.placed.lane.kind == COMMUNICATION:
            which = row.boxes.collective[rows]
            pairs = found.exposure.pairs_ns[which].reshape(len(rows), -1)
            beside = np.stack([found.exposure.overlapped_ns[which], found.transfer_ns[which]], axis=1)
            all_ns = np.concatenate([pairs, beside], axis=1)
            has_part = all_ns != 0
            has_part[:, -1] = all_ns[:, -1] != UNKNOWN
            at, part = np.nonzero(has_part)
            boxes.append(row.offset + rows[at])
            parts.append(part)
            lengths.append(all_ns[at, part])
    return {"box": [_differences(_joined(boxes))], "part": [_joined(parts)], "ns": [_joined(lengths)]}


def _needs(shown: Sequence[PackedRow], explained: Sequence[RankExposure], titles: Titles) -> dict[str, list[Ints]]:
    """Return a row for each collective shown, and for each waiting box.

    Positions are those of boxes; "position + 1" is 0 for none. The columns are:

    - ``box``: position, as the difference from the row before;
    - ``index``: position of the collective in its step;
    - ``of``: position + 1 of the collective that a waiting box waits for;
    - ``blocking``, ``slack``: of a collective, in ns;
    - ``held``: index into ``HELD_BY`` + 1, or 0 if nothing is known to need the collective;
    - ``name``, ``stream``, ``after``, ``consumer``: name and stream of the consumer, its start minus that of the
      collective, and its position + 1.
    """
    at = {(rank, of): np.zeros(len(found.timings), np.int64) for rank, found in enumerate(explained) for of in (0, 1)}
    for row in shown:
        for of, column in enumerate((row.boxes.collective, row.boxes.consumer)):
            known = np.flatnonzero(column != UNKNOWN)
            if row.placed.lane.kind != WAITING:
                at[row.placed.rank, of][column[known]] = row.offset + known + 1
    parts: list[dict[str, Ints]] = []
    for row in shown:
        rows, rank = np.flatnonzero(row.boxes.collective != UNKNOWN), row.placed.rank
        if not len(rows):
            continue
        which, found, waits = row.boxes.collective[rows], explained[rank], row.placed.lane.kind == WAITING
        timings, (first, same) = found.timings, distinct_rows(found.consumer)
        known_names = titles.consumers
        names = np.array([known_names.setdefault(name, len(known_names)) for name in found.consumer_names], np.int64)
        facts = {
            "blocking": timings.blocking_ns[which],
            "held": timings.held_by[which] + 1,
            "slack": timings.slack_ns[which],
            "name": take_or_unknown(names, timings.consumer[which]),
            "stream": timings.consumer_lane[which],
            "after": timings.consumer_start_ns[which] - timings.start_ns[which],
            "consumer": at[rank, 1][first[same[which]]],
        }
        is_needed = (timings.held_by[which] != UNKNOWN) & (not waits)
        beside = {
            "box": row.offset + rows,
            "index": timings.index[which],
            "of": at[rank, 0][which] * waits,
            "blocking": facts.pop("blocking"),
        }
        parts.append(beside | {name: np.where(is_needed, column, 0) for name, column in facts.items()})
    columns = {name: [_joined([part[name] for part in parts])] for name in NEEDS}
    return columns | {"box": [_differences(columns["box"][0])]}


def pack_table(rows: int, columns: Mapping[str, Iterable[Ints]]) -> tuple[PackedTable, bytes]:
    """Pack columns, each given in parts, as planes of bytes."""
    shapes: dict[str, list[tuple[int, int]]] = {}
    packed: list[bytes] = []
    for name, parts in columns.items():
        blocks = [_byte_planes(part[at : at + _BLOCK]) for part in parts for at in range(0, len(part), _BLOCK)]
        shapes[name] = [block.shape for block in blocks]
        for at in range(max(map(len, blocks), default=0)):
            packed += (block[at].tobytes() for block in blocks if at < len(block))
    return PackedTable(rows, shapes), b"".join(packed)


def _byte_planes(column: Ints) -> NDArray[np.uint8]:
    """Map 0, -1, 1, -2, ... to 0, 1, 2, 3, ..., and return these numbers as rows of bytes, the lowest byte first."""
    natural = ((column << 1) ^ (column >> 63)).view(np.uint64)
    width = (int(natural.max()).bit_length() + 7) // 8
    digits = natural.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)
    planes: NDArray[np.uint8] = digits[:, :width].T.copy()
    return planes


def _joined(columns: list[Ints]) -> Ints:
    return np.concatenate(columns) if columns else np.empty(0, np.int64)


def _differences_to_column(columns: Sequence[Ints], before: Sequence[Ints]) -> Iterator[Ints]:
    """Yield ``columns`` minus the value of ``before`` in the row before (0 for the first); both come in parts."""
    last = 0
    for column, other in zip(columns, before, strict=True):
        if len(column):
            yield column - np.append(last, other[:-1])
            last = int(other[-1])


def _differences(column: Ints) -> Ints:
    return np.diff(column, prepend=np.zeros(1, np.int64))


def _in_order(placed: PlacedLane) -> PlacedLane:
    """Sort boxes by level and start; among those that start together, boxes without length come first."""
    boxes = placed.lane.boxes
    one_level = not np.any(boxes.level)
    if one_level and np.all(boxes.start_ns[1:] >= np.maximum(boxes.end_ns, boxes.start_ns + 1)[:-1]):
        return placed
    return placed.with_boxes(select(boxes, np.lexsort((boxes.end_ns, boxes.start_ns, boxes.level))))
