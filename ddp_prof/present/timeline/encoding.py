"""The boxes of a timeline as columns of bytes, small enough to travel in a page by the million.

Boxes are sorted by row (a level of a lane) and start. A column of integers is turned into small numbers, these into
natural ones, and these into planes of bytes, the lowest first. A block of rows is left out of the planes of high bytes
that its numbers do not need, and what is left of these is nearly all zero. The parts of where time goes begin and end
with boxes of the rank's other lanes: they hold the positions of their times among those of the others, which need
hardly any room. ``assets/data/columns.js`` reads it back::

    gap        start of a box less the end of the one before it, the first from 0; of times or of positions
    duration   end less start, likewise
    category   index into ``theme.CATEGORIES``
    title      index into the page's titles
    step       key of the step less that of the box before
    bytes      as it is
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddp_prof.analyze.intervals import Intervals
from ddp_prof.present import theme
from ddp_prof.present.timeline.figure import box_label, box_title
from ddp_prof.present.timeline.model import COMMUNICATION, STRIP, WAITING, Boxes, Lane, RankExposure
from ddp_prof.trace import UNKNOWN, Ints, distinct, distinct_rows, select, take_or_unknown

LONGEST_TITLE = 1000
"""Names are searched in so many characters; templates of kernels have thousands."""

OVERVIEW_COLUMNS = 1000

NEEDS = ("box", "index", "of", "blocking", "held", "slack", "name", "stream", "after", "consumer")

_BLOCK = 1 << 16
"""Rows that are encoded at once: what that takes stays in the processor's cache."""

_COMPRESSION = 4  # 6 is a fifth smaller and takes twice as long


class PlacedLane(NamedTuple):
    """A lane, and where it belongs on the page."""

    rank: int
    place: int
    lane: Lane

    def with_boxes(self, boxes: Boxes) -> PlacedLane:
        return self._replace(lane=replace(self.lane, boxes=boxes))


class PackedRow(NamedTuple):
    """A level of a lane: its boxes, in order, do not overlap; the first one's position among those of all rows."""

    placed: PlacedLane
    level: int
    boxes: Boxes
    offset: int


class PackedTable(NamedTuple):
    """How many rows a table has, and of each of its columns the blocks: how many planes they are in, how many rows."""

    rows: int
    columns: dict[str, list[tuple[int, int]]]


@dataclass(frozen=True)
class PackedBoxes:
    """Boxes, row after row, and what is known of them: tables, one after the other, each column after column."""

    rows: tuple[PackedRow, ...]
    tables: tuple[PackedTable, ...]
    packed: bytes

    def payload(self) -> str:
        return base64.b64encode(zlib.compress(self.packed, _COMPRESSION)).decode()


class Titles:
    """What boxes are called, and how kernels were launched: each said once, boxes hold its number.

    Attributes:
        titles: Title, a shorter label, and the bucket; without a label a beginning of the title will do.
        shapes: Launch shape and registers a thread; the first is that of what has none.
        consumers: Operations that need collectives.
    """

    def __init__(self) -> None:
        self.titles: dict[tuple[str, str, int], int] = {}
        self.shapes: dict[tuple[str, int], int] = {("", UNKNOWN): 0}
        self.consumers: dict[str, int] = {}

    def index_for(self, lane: Lane, boxes: Boxes) -> Ints:
        """The number of each box's title, where it is new after those that there are."""
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

    Two tables: the boxes, and of the times of where time goes those that no other box tells: ``rank``, and ``time``,
    less that of the row before.
    """
    lanes = [_in_order(placed) for placed in lanes]
    positioned, ranks, untold = [], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for placed in lanes:
        if placed.lane.kind != STRIP:
            positioned.append(placed)
            continue
        boxes, times = placed.lane.boxes, _times(lanes, placed.rank)
        starts, ends, missing = _positions(times, boxes)
        untold.append(missing)
        ranks.append(np.full(len(missing), placed.rank, np.int64))
        positioned.append(placed.with_boxes(replace(boxes, start_ns=starts, end_ns=ends)))
    table, packed = _pack_rows(positioned, titles)
    columns = {"rank": ranks, "time": [_differences(np.concatenate(untold))]}
    others, more = pack_table(sum(map(len, untold)), columns)
    return PackedBoxes(_rows(lanes), (table, others), packed + more)


def pack_folded(
    lanes: Sequence[PlacedLane], shown: PackedBoxes, explained: Sequence[RankExposure], titles: Titles
) -> PackedBoxes:
    """Pack what a page needs once a box is selected or a lane unfolded.

    Four tables: the boxes of these lanes; for each box shown ``call`` (see :func:`_links`), ``shape`` and ``phase``,
    0 where there is none; of the collectives among them ``box``, less that of the row before, ``part``, an index
    into ``figure.EXPOSED_PARTS``, its length for what is overlapped or one more for the transfer, and ``ns``; and
    what waited for what (see :func:`_needs`).

    Args:
        lanes: The lanes that are folded at first; ``shown`` are the boxes of all others.
        shown: As packed.
        explained: The collectives of each rank.
        titles: Those of the boxes shown; grows.
    """
    lanes = [_in_order(placed) for placed in lanes]
    table = _pack_rows(lanes, titles)
    rows = _rows(lanes)
    facts = {
        "call": [_links(rows, shown.rows)],
        "shape": (titles.shape_of(row.placed.lane, row.boxes) for row in shown.rows),
        "phase": (row.boxes.phase + 1 for row in shown.rows),
    }
    told = pack_table(sum(len(row.boxes) for row in shown.rows), facts)
    exposed = _exposed(shown.rows, explained)
    needs = _needs(shown.rows, explained, titles)
    tables = (table, told, *(pack_table(len(columns["box"][0]), columns) for columns in (exposed, needs)))
    return PackedBoxes(rows, tuple(shape for shape, _ in tables), b"".join(packed for _, packed in tables))


def _rows(lanes: Sequence[PlacedLane]) -> tuple[PackedRow, ...]:
    """The levels of lanes whose boxes are in order."""
    found, offset = [], 0
    for placed in lanes:
        boxes = placed.lane.boxes
        first = np.flatnonzero(np.diff(boxes.level, prepend=-1))
        for level, start, end in zip(boxes.level[first].tolist(), first, np.append(first, len(boxes))[1:], strict=True):
            own = Boxes(**{column.name: getattr(boxes, column.name)[start:end] for column in fields(Boxes)})
            found.append(PackedRow(placed, level, own, offset))
            offset += len(own)
    return tuple(found)


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
    """All times at which boxes of a rank's lanes start or end, but for those of where time goes, each once."""
    own = [placed.lane.boxes for placed in lanes if placed.rank == rank and placed.lane.kind != STRIP]
    # Those of a row are in order; a sort that sees it takes a fraction of the time.
    times = np.sort(_joined([np.stack([boxes.start_ns, boxes.end_ns], axis=1).ravel() for boxes in own]), kind="stable")
    return times[np.diff(times, prepend=times[:1] - 1) > 0]


def _positions(times: Ints, boxes: Boxes) -> tuple[Ints, Ints, Ints]:
    """Positions of starts and ends once those that are not among the times are added to them; and which these are."""
    start, end, known = boxes.start_ns, boxes.end_ns, np.append(times, 0)
    starts, ends = np.searchsorted(times, start), np.searchsorted(times, end)
    missing = np.unique(np.append(start[known[starts] != start], end[known[ends] != end]))
    return starts + np.searchsorted(missing, start), ends + np.searchsorted(missing, end), missing


def _links(folded: Sequence[PackedRow], shown: Sequence[PackedRow]) -> Ints:
    """For each box shown the call that launched it: 0 for none, else an odd number.

    Half of the number below is the call's position among the boxes of the folded lanes, less that of the box before
    that has one.
    """
    places = {rank: _places(folded, rank) for rank in {row.placed.rank for row in shown}}
    found = _joined([places[row.placed.rank].take(row.boxes.call + 1, mode="clip") for row in shown])
    known = found != UNKNOWN
    links = np.zeros(len(found), np.int64)
    links[known] = 2 * _differences(found[known]) + 1
    return links


def _places(folded: Sequence[PackedRow], rank: int) -> Ints:
    """Position among the boxes of all folded lanes: first that of no call, then of each of a rank, then of others."""
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
            told = all_ns != 0
            told[:, -1] = all_ns[:, -1] != UNKNOWN
            at, part = np.nonzero(told)
            boxes.append(row.offset + rows[at])
            parts.append(part)
            lengths.append(all_ns[at, part])
    return {"box": [_differences(_joined(boxes))], "part": [_joined(parts)], "ns": [_joined(lengths)]}


def _needs(shown: Sequence[PackedRow], explained: Sequence[RankExposure], titles: Titles) -> dict[str, list[Ints]]:
    """Of each collective shown, and of each time at which something stood still for one.

    ``box`` is its position, less that of the row before; ``index`` that of the collective in its step; ``of`` of such a
    time that of the collective, 0 for none, else one more than its position. The rest is of collectives: ``blocking``
    and ``slack`` in ns; ``held``, 0 where nothing is known to need it, else one more than the index into ``HELD_BY``;
    of the consumer ``name``, ``stream``, ``after``, its start less that of the collective, and ``consumer``, as ``of``.
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
        told = titles.consumers
        names = np.array([told.setdefault(name, len(told)) for name in found.consumer_names], np.int64)
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
    """Columns, in parts one after the other, as planes of bytes."""
    shapes: dict[str, list[tuple[int, int]]] = {}
    packed: list[bytes] = []
    for name, parts in columns.items():
        blocks = [_byte_planes(part[at : at + _BLOCK]) for part in parts for at in range(0, len(part), _BLOCK)]
        shapes[name] = [block.shape for block in blocks]
        for at in range(max(map(len, blocks), default=0)):
            packed += (block[at].tobytes() for block in blocks if at < len(block))
    return PackedTable(rows, shapes), b"".join(packed)


def _byte_planes(column: Ints) -> NDArray[np.uint8]:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ..., and of that a row of bytes a digit, the lowest first."""
    natural = ((column << 1) ^ (column >> 63)).view(np.uint64)
    width = (int(natural.max()).bit_length() + 7) // 8
    digits = natural.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)
    planes: NDArray[np.uint8] = digits[:, :width].T.copy()
    return planes


def _joined(columns: list[Ints]) -> Ints:
    return np.concatenate(columns) if columns else np.empty(0, np.int64)


def _differences_to_column(columns: Sequence[Ints], before: Sequence[Ints]) -> Iterator[Ints]:
    """Each value less the other column's of the row before, the first as it is; the rows come in parts."""
    last = 0
    for column, other in zip(columns, before, strict=True):
        if len(column):
            yield column - np.append(last, other[:-1])
            last = int(other[-1])


def _differences(column: Ints) -> Ints:
    return np.diff(column, prepend=np.zeros(1, np.int64))


def _in_order(placed: PlacedLane) -> PlacedLane:
    """By level and start; of those that start together the empty ones first."""
    boxes = placed.lane.boxes
    one_level = not np.any(boxes.level)
    if one_level and np.all(boxes.start_ns[1:] >= np.maximum(boxes.end_ns, boxes.start_ns + 1)[:-1]):
        return placed
    return placed.with_boxes(select(boxes, np.lexsort((boxes.end_ns, boxes.start_ns, boxes.level))))


def overview(boxes: Boxes, start_ns: int, end_ns: int) -> dict[int, str]:
    """Boxes that do not overlap at low resolution, to show until they are read.

    For each category, how much of each column from start to end its boxes cover, from 0 to 255, as base64.
    """
    edges = np.linspace(start_ns, end_ns, OVERVIEW_COLUMNS + 1).astype(np.int64)
    result = {}
    for category in distinct(boxes.category):
        rows = np.flatnonzero(boxes.category == category)
        covered = Intervals(boxes.start_ns[rows], boxes.end_ns[rows]).covered_ns(edges[:-1], edges[1:])
        shares = np.ceil(255 * covered / np.maximum(1, np.diff(edges)))  # whatever is there is seen
        result[category] = base64.b64encode(shares.astype(np.uint8).tobytes()).decode()
    return result
