"""Encodes the boxes of a timeline as columns of bytes, so compact that a page can hold millions.

Boxes are sorted by row (a level of a lane) and start. Each column of integers becomes small numbers (by differences),
then natural numbers, then *planes* of bytes: first the lowest byte of all numbers, then the next byte of all, and so
on. A block of numbers has only the planes that it needs, and the planes of high bytes are nearly all zero, so they
compress well. The boxes of ``where time goes`` start and end at the times of boxes in the rank's other lanes. So they
hold positions in the sorted list of these times, which need hardly any space. ``assets/data/columns.js`` decodes the
columns::

    gap        start of a box minus the end of the box before (for the first box, minus 0); a time or a position
    duration   end minus start; a time or a position
    category   index into ``theme.CATEGORIES``
    title      index into the page's titles
    step       key of the step minus that of the box before
    bytes      unchanged
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddp_prof.growing_column import in_order, in_parts, joined
from ddp_prof.present import theme
from ddp_prof.present.timeline.figure import box_label, box_title
from ddp_prof.present.timeline.model import COMMUNICATION, STRIP, WAITING, Boxes, Lane, RankExposure
from ddp_prof.table import begins_run
from ddp_prof.trace import UNKNOWN, Ints, distinct_rows, select, take_or_unknown

LONGEST_TITLE = 1000
"""Characters of a name that a page stores and searches; C++ templates give kernels names of thousands."""

NEEDS = ("box", "index", "of", "blocking", "held", "slack", "name", "stream", "after", "consumer")
"""The columns of :func:`_needs`."""

_BLOCK = 1 << 16
"""Rows that are encoded at once, few enough to stay in the processor's cache."""

_COMPRESSION = 4  # level of zlib: at 6 a page is a fifth smaller and takes twice as long


class PlacedLane(NamedTuple):
    """A lane with the index of its rank, and its position among all lanes of the page."""

    rank: int
    place: int
    lane: Lane

    def with_boxes(self, boxes: Boxes) -> PlacedLane:
        return self._replace(lane=replace(self.lane, boxes=boxes))


class PackedRow(NamedTuple):
    """A level of a lane: its boxes, which are sorted and do not overlap.

    ``offset`` is the position of its first box among the boxes of all rows that are packed together.
    """

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
    """Boxes and further tables that are packed as bytes.

    Attributes:
        rows: The rows of the boxes.
        tables: The shape of each table.
    """

    rows: tuple[PackedRow, ...]
    tables: tuple[PackedTable, ...]


class Packed(NamedTuple):
    """What was packed, and its bytes: they are many, and nobody needs them any more once they are compressed.

    Attributes:
        boxes: The boxes and tables.
        pieces: The tables one after the other; in each, its columns one after the other, in pieces.
    """

    boxes: PackedBoxes
    pieces: list[bytes]

    def compressed(self) -> bytes:
        """Return the bytes as a page holds them, where they are in base64: compressed."""
        compressor = zlib.compressobj(_COMPRESSION)
        return b"".join([*map(compressor.compress, self.pieces), compressor.flush()])


class Titles:
    """Numbers the texts of boxes, so that a page stores each text once and boxes hold its number.

    Attributes:
        titles: The number of each (title, short label, bucket); if the label is empty, the page cuts the title to fit.
        shapes: The number of each (launch shape, registers per thread); number 0 means none.
        consumers: The number of each name of an operation that needs a collective.
    """

    def __init__(self) -> None:
        self.titles: dict[tuple[str, str, int], int] = {}
        self.shapes: dict[tuple[str, int], int] = {("", UNKNOWN): 0}
        self.consumers: dict[str, int] = {}

    def index_for(self, lane: Lane, boxes: Boxes) -> Ints:
        """Return the number of each box's title; texts that are new get a number."""
        # The few distinct titles are made once; `which` says which of them each box has.
        first, which = distinct_rows(boxes.category, boxes.name_id, boxes.bucket)
        ids = []
        for row in first.tolist():
            category = theme.CATEGORIES[int(boxes.category[row])]
            name_id, bucket = int(boxes.name_id[row]), int(boxes.bucket[row])
            title = box_title(lane, category, name_id, bucket, LONGEST_TITLE)
            key = (title, box_label(lane, category, name_id, bucket), bucket)
            ids.append(self.titles.setdefault(key, len(self.titles)))
        return in_order(np.array(ids, np.int64), which)

    def shape_of(self, lane: Lane, boxes: Boxes) -> Ints:
        """Return the number of each box's launch shape and registers; shapes that are new get a number."""
        first, which = distinct_rows(boxes.shape, boxes.registers)
        used = zip(boxes.shape[first].tolist(), boxes.registers[first].tolist(), strict=True)
        keys = [("" if shape == UNKNOWN else lane.names[shape], registers) for shape, registers in used]
        return in_order(np.array([self.shapes.setdefault(key, len(self.shapes)) for key in keys], np.int64), which)


def pack_boxes(lanes: Sequence[PlacedLane], titles: Titles) -> Packed:
    """Pack all boxes of some lanes as two tables.

    The first table has the boxes, the second has those times at which boxes of ``where time goes`` start or end but no
    other box of the rank does. The columns of the second are ``rank`` and ``time``, which is the difference from the
    row before.

    Args:
        lanes: The lanes; the result has their boxes in the order of :func:`_in_order`.
        titles: Gets the titles of the boxes.
    """
    lanes = [_in_order(placed) for placed in lanes]
    positioned, ranks, extra = [], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for placed in lanes:
        if placed.lane.kind != STRIP:
            positioned.append(placed)
            continue
        # Times become positions among the times of the rank's other boxes.
        boxes, times = placed.lane.boxes, _times(lanes, placed.rank)
        starts, ends, missing = _positions(times, boxes)
        extra.append(missing)
        ranks.append(np.full(len(missing), placed.rank, np.int64))
        positioned.append(placed.with_boxes(replace(boxes, start_ns=starts, end_ns=ends)))
    table, packed = _pack_rows(positioned, titles)
    columns = {"rank": ranks, "time": [_differences(np.concatenate(extra))]}
    others, more = pack_table(sum(map(len, extra)), columns)
    return Packed(PackedBoxes(_rows(lanes), (table, others)), [*packed, *more])


def pack_folded(
    lanes: Sequence[PlacedLane], shown: PackedBoxes, explained: Sequence[RankExposure], titles: Titles
) -> Packed:
    """Pack what a page needs when a box is selected or a lane is unfolded.

    There are four tables:

    - the boxes of the folded lanes;
    - for each box of ``shown``: ``call``, its launch call (see :func:`_links`), ``shape`` and ``phase``, both 0 for
      none;
    - how the time of the collectives in ``shown`` divides (see :func:`_exposed`);
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
        "call": _links(rows, shown.rows),
        "shape": (titles.shape_of(row.placed.lane, row.boxes) for row in shown.rows),
        "phase": (row.boxes.phase + 1 for row in shown.rows),
    }
    launches = pack_table(sum(len(row.boxes) for row in shown.rows), facts)
    exposed = _exposed(shown.rows, explained)
    needs = _needs(shown.rows, explained, titles)
    tables = (table, launches, *(pack_table(len(columns["box"][0]), columns) for columns in (exposed, needs)))
    boxes = PackedBoxes(rows, tuple(shape for shape, _ in tables))
    return Packed(boxes, [*chain(*(packed for _, packed in tables))])


def _rows(lanes: Sequence[PlacedLane]) -> tuple[PackedRow, ...]:
    """Split lanes into levels; each level is one row. The boxes of a lane must be sorted by level."""
    packed, offset = [], 0
    for placed in lanes:
        boxes = placed.lane.boxes
        # Positions where a new level begins.
        first = np.flatnonzero(np.diff(boxes.level, prepend=-1))
        for level, start, end in zip(boxes.level[first].tolist(), first, np.append(first, len(boxes))[1:], strict=True):
            boxes_of_level = Boxes(**{column.name: getattr(boxes, column.name)[start:end] for column in fields(Boxes)})
            packed.append(PackedRow(placed, level, boxes_of_level, offset))
            offset += len(boxes_of_level)
    return tuple(packed)


def _pack_rows(lanes: Sequence[PlacedLane], titles: Titles) -> tuple[PackedTable, list[bytes]]:
    """Pack the table of boxes, with the columns that the module's docstring lists."""
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
    """Return the sorted, distinct times at which boxes of a rank start or end, without those of ``where time goes``."""
    own = [placed.lane.boxes for placed in lanes if placed.rank == rank and placed.lane.kind != STRIP]
    times, first = np.empty(2 * sum(map(len, own)), np.int64), 0
    for boxes in own:
        last = first + 2 * len(boxes)
        times[first:last:2], times[first + 1 : last : 2] = boxes.start_ns, boxes.end_ns
        first = last
    # The times of a row are sorted already; a stable sort makes use of that and takes a fraction of the time.
    times.sort(kind="stable")
    return times[begins_run(times)]  # the first of equal times


def _positions(times: Ints, boxes: Boxes) -> tuple[Ints, Ints, Ints]:
    """Replace the times of boxes by positions in a sorted list of times.

    Returns:
        The positions of the boxes' starts and of their ends in ``times`` with the missing times inserted; and the
        missing times: those of the boxes that ``times`` lacks.
    """
    start, end = boxes.start_ns, boxes.end_ns
    # Boxes that follow each other without a gap, as those of ``where time goes`` do, share their times.
    is_shared = len(start) > 1 and np.array_equal(end[:-1], start[1:])
    wanted = np.append(start, end[-1:]) if is_shared else np.append(start, end)
    # Where a time belongs in the list; it is missing if another time is there. 0: for positions after the end.
    found = np.searchsorted(times, wanted)
    missing = np.unique(wanted[np.append(times, 0)[found] != wanted])
    # A position moves by the number of missing times before it.
    found += np.searchsorted(missing, wanted)
    return found[: len(start)], found[1:] if is_shared else found[len(start) :], missing


def _links(folded: Sequence[PackedRow], shown: Sequence[PackedRow]) -> Iterator[Ints]:
    """Yield for each shown row a number for the launch call of each box: 0 if it has none, else ``2 * difference + 1``.

    The difference is the position of the call's box among the folded boxes, minus that of the last box before with a
    call, also across rows. The odd number distinguishes a difference of 0 from no call.
    """
    places = {rank: _places(folded, rank) for rank in {row.placed.rank for row in shown}}
    last = 0
    for row in shown:
        # An index of 0 (no call), or one after the last call, finds UNKNOWN.
        found = _take_clipped(places[row.placed.rank], row.boxes.call)
        known = np.flatnonzero(found != UNKNOWN)
        links = np.zeros(len(found), np.int64)
        if len(known):
            of_calls = in_order(found, known)
            links[known] = 2 * np.diff(of_calls, prepend=last) + 1
            last = int(of_calls[-1])
        yield links


def _take_clipped(places: Ints, call: Ints) -> Ints:
    return in_parts(len(call), lambda rows: places.take(call[rows] + 1, mode="clip"))


def _places(folded: Sequence[PackedRow], rank: int) -> Ints:
    """Return for the launch calls of a rank the positions of their boxes among all folded boxes.

    The index is the call's row plus 1. ``UNKNOWN`` for a call without a box; also the first and the last element, which
    stand for no call and for later calls.
    """
    calls = [(row.boxes.call, row.offset) for row in folded if row.placed.rank == rank]
    # Rows 0 to the last call with a box, and the two elements at the ends.
    places = np.full(max((int(call.max(initial=UNKNOWN)) for call, _ in calls), default=UNKNOWN) + 3, UNKNOWN, np.int64)
    for call, offset in calls:
        known = np.flatnonzero(call != UNKNOWN)
        places[call[known] + 1] = offset + known
    return places


def _exposed(shown: Sequence[PackedRow], explained: Sequence[RankExposure]) -> dict[str, list[Ints]]:
    """Return the parts of the time of each shown collective: exposed (by when and why), overlapped, and transfer.

    A part has a row if it is not 0; transfer has one if it is known. The columns are:

    - ``box``: position of the collective's box, as the difference from the row before;
    - ``part``: index into ``figure.EXPOSED_PARTS``; the next index means overlapped time, the one after it transfer
      time;
    - ``ns``: its length.
    """
    boxes, parts, lengths = [], [], []
    for row in shown:
        found = explained[row.placed.rank]
        rows = np.flatnonzero(row.boxes.collective != UNKNOWN)
        if len(rows) and row.placed.lane.kind == COMMUNICATION:
            which = row.boxes.collective[rows]
            # One row per collective, one column per part: pairs of when and why, overlapped, transfer.
            pairs = found.exposure.pairs_ns[which].reshape(len(rows), -1)
            beside = np.stack([found.exposure.overlapped_ns[which], found.transfer_ns[which]], axis=1)
            all_ns = np.concatenate([pairs, beside], axis=1)
            has_part = all_ns != 0
            # A transfer time of 0 is known, too.
            has_part[:, -1] = all_ns[:, -1] != UNKNOWN
            at, part = np.nonzero(has_part)
            boxes.append(row.offset + rows[at])
            parts.append(part)
            lengths.append(all_ns[at, part])
    return {"box": [_differences(_joined(boxes))], "part": [_joined(parts)], "ns": [_joined(lengths)]}


def _needs(shown: Sequence[PackedRow], explained: Sequence[RankExposure], titles: Titles) -> dict[str, list[Ints]]:
    """Return the columns of a table with a row for each box of a collective, and for each waiting box.

    A position is that of a box among the shown boxes; "position + 1" is 0 for no box. The columns are:

    - ``box``: position, as the difference from the row before;
    - ``index``: number of the collective in its step;
    - ``of``: for a waiting box, position + 1 of the collective that it waits for;
    - ``blocking``: how long something stood still for the collective, in ns;
    - ``slack``: how much later the collective could have ended without delaying its consumer, in ns;
    - ``held``: what the consumer waited for last, as index into ``HELD_BY`` + 1; 0 if nothing is known to need the
      collective;
    - ``name``, ``stream``, ``after``, ``consumer``: the consumer's name and stream, its start minus that of the
      collective in ns, and its position + 1.
    """
    # For each collective of a rank, position + 1 of its own box (0) and of the box that needs it (1).
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
        # For each box of the row: the collective that it is, or that it waits for.
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
        # What is known of the consumer, for boxes of collectives that have one. A consumer's box is at its first
        # collective.
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


def pack_table(rows: int, columns: Mapping[str, Iterable[Ints]]) -> tuple[PackedTable, list[bytes]]:
    """Pack columns as planes of bytes.

    Args:
        rows: Number of rows.
        columns: The columns by name; each is given in parts, which are encoded one by one.

    Returns:
        The shape of the table, and its bytes in pieces.
    """
    shapes: dict[str, list[tuple[int, int]]] = {}
    packed: list[bytes] = []
    for name, parts in columns.items():
        blocks = [_byte_planes(part[at : at + _BLOCK]) for part in parts for at in range(0, len(part), _BLOCK)]
        shapes[name] = [block.shape for block in blocks]
        for at in range(max(map(len, blocks), default=0)):  # a plane of all blocks, then the next one
            packed += (block[at].tobytes() for block in blocks if at < len(block))
    return PackedTable(rows, shapes), packed


def _byte_planes(column: Ints) -> NDArray[np.uint8]:
    """Return a column as planes of bytes: the lowest byte of each number, then the next byte of each, and so on.

    The numbers are mapped to natural numbers first: 0, -1, 1, -2, ... to 0, 1, 2, 3, ... The shape is (planes, rows),
    with as many planes as the largest number needs.
    """
    # The shift by 63 gives 0 for numbers from 0 on and all ones for negative numbers, whose bits are thereby inverted.
    natural = ((column << 1) ^ (column >> 63)).view(np.uint64)
    width = (int(natural.max()).bit_length() + 7) // 8
    # The 8 bytes of each number, the lowest first.
    digits = natural.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)
    planes: NDArray[np.uint8] = digits[:, :width].T.copy()
    return planes


def _joined(columns: list[Ints]) -> Ints:
    return joined(columns) if columns else np.empty(0, np.int64)


def _differences_to_column(columns: Sequence[Ints], before: Sequence[Ints]) -> Iterator[Ints]:
    """Yield the values of ``columns``, each minus the value of ``before`` in the row before; 0 is before the first row.

    Both arguments are columns in parts of equal lengths; differences also cross from part to part.
    """
    last = 0
    for column, other in zip(columns, before, strict=True):
        if len(column):
            yield column - np.append(last, other[:-1])
            last = int(other[-1])


def _differences(column: Ints) -> Ints:
    """Return each value minus the one before; the first value stays."""
    return np.diff(column, prepend=np.zeros(1, np.int64))


def _in_order(placed: PlacedLane) -> PlacedLane:
    """Return the lane with its boxes sorted by level and start.

    Of boxes on a level that start together, those without length come first.
    """
    boxes = placed.lane.boxes
    one_level = not np.any(boxes.level)
    # Boxes on one level that follow each other are in order already.
    if one_level and np.all(boxes.start_ns[1:] >= np.maximum(boxes.end_ns, boxes.start_ns + 1)[:-1]):
        return placed
    return placed.with_boxes(select(boxes, np.lexsort((boxes.end_ns, boxes.start_ns, boxes.level))))
