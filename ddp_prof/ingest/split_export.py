"""Cuts a large export into parts along time; each part is read like a small export.

Each part covers a span of time, from the start of a step to the start of a later one. It holds

- the activities that run in the span or were launched in its steps, and those that run at the same time as these;
- the calls that launched them, all calls of the span that launch anything, and the first call of each process;
- all ranges of the capture that mark steps and phases, and NCCL's ranges around the launches.

So measurements of the span and its steps equal those of the whole capture. A part is a database of its own in a
temporary folder; the capture is only read.

Exports have no indexes. So one pass over a table records the limits of the times and correlation ids in each block of
consecutive rows, and a query then reads only the blocks that may hold its rows. In an unordered table, these are all.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ddp_prof.errors import DdpProfError, TraceError
from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.enrich import REGISTERS, SHAPE_COLUMNS, CallKind
from ddp_prof.ingest.names import read_strings
from ddp_prof.ingest.nsys_export import (
    ACTIVITIES,
    ACTIVITY_COLUMNS,
    CALL_COLUMNS,
    CALL_NAME,
    CALLS,
    COPIES,
    COPY_KIND,
    IS_RANGE,
    KERNELS,
    NVTX,
    OVERHEADS,
    RANGE_COLUMNS,
    ids_of_calls,
    load_nsys_sqlite,
)
from ddp_prof.ingest.sqlite_columns import SqliteFile, are_integers, quote_name, require_disk_space, sqlite_uri
from ddp_prof.trace import SYNC_IN_PARTS, UNKNOWN, Ints, Mask, Trace

PART_ROWS = 3_000_000
"""Approximate rows of activities and calls per part; measuring a part takes some hundred megabytes."""
BLOCK_ROWS = 1 << 16
END = 'max(start, coalesce("end", start))'
"""SQL for the end of a row: its start, if it has no end or ends before it starts."""


class CannotSplitError(DdpProfError):
    """A capture that cannot be read in parts; the message is the reason: ``it has no ranges``."""


@dataclass(frozen=True)
class Blocks:
    """The non-empty blocks of one table, in the order of the file, with the limits of their times and ids.

    A block has the row ids from ``first`` to ``first + BLOCK_ROWS - 1``; without ends, ``end_ns`` is the latest start.
    """

    table: str
    first: Ints
    rows: Ints
    start_ns: Ints
    last_start_ns: Ints
    end_ns: Ints
    least_id: Ints
    most_id: Ints

    def where(self, chosen: Mask) -> str:
        """Return an SQL condition for the rows of the chosen blocks."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]).astype(np.int8)))
        runs = [
            f"rowid BETWEEN {self.first[low]} AND {self.first[high - 1] + BLOCK_ROWS - 1}"
            for low, high in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        ]
        return f"({' OR '.join(runs)})" if runs else "0"


def scan_blocks(
    database: sqlite3.Connection, table: str, columns: Sequence[str], max_id_gap: int, condition: str = "1"
) -> Blocks:
    """Read a table with a column ``start`` once, in the database attached as ``whole``, and return its blocks.

    Only rows that meet the condition count. A CannotSplitError says that a start is missing, or that row ids differ by
    more than ``max_id_gap``.
    """
    end = END if "end" in columns else "start"
    number = "correlationId" if "correlationId" in columns else "NULL"
    query = (
        f"SELECT count(*), sum(typeof(start) = 'integer' AND start != {UNKNOWN}), min(start), max(start), max({end}), "
        f"coalesce(min({number}), 0), coalesce(max({number}), -1) "
        f'FROM whole."{table}" WHERE rowid BETWEEN ? AND ? AND {condition}'
    )
    low, high = database.execute(f'SELECT min(rowid), max(rowid) FROM whole."{table}"').fetchone()
    if high - low > max_id_gap:
        raise CannotSplitError(f"{table} has rows whose numbers are far apart")
    found = []
    for first in range(low, high + 1, BLOCK_ROWS):
        rows, starts, *edges = database.execute(query, (first, first + BLOCK_ROWS - 1)).fetchone()
        if rows and (starts != rows or not all(isinstance(edge, int) for edge in edges)):
            raise CannotSplitError(f"{table} has rows without a start")
        if rows:
            found.append((first, rows, *edges))
    return Blocks(table, *np.array(found, np.int64).reshape(len(found), 7).T)


BYTES_PER_ROW = 300
"""Bytes of a part on the disk, including what it holds beside its span."""
END_OF_TIME_NS = 2**62
"""Later than any event; ``-END_OF_TIME_NS`` is earlier."""

_SMALL = (
    *("StringIds", "ThreadNames", "META_DATA_EXPORT", "EXPORT_META_DATA", "TARGET_INFO_SESSION_START_TIME"),
    "DIAGNOSTIC_EVENT",
    *("TARGET_INFO_SYSTEM_ENV", "TARGET_INFO_GPU", "TARGET_INFO_CUDA_DEVICE", "MPI_RANKS", *OVERHEADS),
)
"""Tables that each part holds whole."""
_ID_RANGE = "SELECT coalesce(min(id), 0), coalesce(max(id), -1) FROM {}"
_COLUMNS = {
    CALLS: (*CALL_COLUMNS, CALL_NAME),
    NVTX: (*RANGE_COLUMNS, "textId", "text", "jsonText", "jsonTextId"),
    **dict.fromkeys(ACTIVITIES, (*ACTIVITY_COLUMNS, "demangledName", "shortName", "mangledName")),
    COPIES: (*ACTIVITY_COLUMNS, COPY_KIND),
}
_OF_LAUNCHES = {KERNELS: (*SHAPE_COLUMNS, REGISTERS)}
"""Columns that are read with launches only."""


class Part(NamedTuple):
    """A part of a capture: its span, and a trace that holds more than the span.

    The first span starts at ``-END_OF_TIME_NS``, the last one ends at ``END_OF_TIME_NS``.
    """

    trace: Trace
    start_ns: int
    end_ns: int


class SplitExport:
    """A large export, cut into parts; only one part at a time is on the disk, in ``folder``.

    ``marks_structure`` says of a name whether it marks a step, a phase, a collective or a process. ``find_step_times``
    gives the start of each step of each process, and the time until which its launches matter. A CannotSplitError says
    that the export must be read as a whole.
    """

    def __init__(
        self,
        file: SqliteFile,
        folder: Path,
        options: ReadOptions,
        marks_structure: Callable[[str], bool],
        find_step_times: Callable[[Trace], tuple[Ints, Ints]],
        part_rows: int,
    ) -> None:
        require_disk_space(file.path, folder, BYTES_PER_ROW * part_rows)
        self.path, self._file = file.path, file
        self._options = ReadOptions(comm_patterns=options.comm_patterns, with_launches=options.with_launches)
        self._base, self._made = folder / "base.sqlite", folder / "part.sqlite"
        if not (file.has_columns(KERNELS, "start", "end", "correlationId") and file.has_columns(CALLS, *CALL_COLUMNS)):
            raise CannotSplitError("it has no kernels with the calls that launched them")
        if not file.has_columns(NVTX, *RANGE_COLUMNS):
            raise CannotSplitError("it has no ranges")
        with self._translate_errors():
            file.run_with_deadline(lambda: self._make_base(marks_structure))
            self.steps = find_step_times(self._load(self._base))
            if not len(self.steps[0]):
                raise CannotSplitError("no range of it is known to be a step, and --step-range names none")
            file.run_with_deadline(self._add_ranges_that_start_with_steps)
            self.spans = self._spans(part_rows)

    def _load(self, export: Path) -> Trace:
        trace = load_nsys_sqlite(export, self._options, self.path)
        return replace(trace, sync_reason=SYNC_IN_PARTS)

    def _make_base(self, marks_structure: Callable[[str], bool]) -> None:
        file = self._file
        self._base.unlink(missing_ok=True)
        with self._open(self._base) as database:
            tables = [table for table in (*ACTIVITIES, CALLS) if file.has_columns(table, "start")]
            for table in (*tables, NVTX, *_SMALL):
                few = f'SELECT count(*) FROM (SELECT 1 FROM whole."{table}" LIMIT {file.most_rows + 1})'
                if table in file.columns and database.execute(few).fetchone()[0] > file.most_rows:
                    raise CannotSplitError(f"{table} has more rows than it has room for")
            max_id_gap = file.bytes
            self._blocks = {
                table: scan_blocks(database, table, self._existing_columns(table), max_id_gap) for table in tables
            }
            self._ranges = scan_blocks(database, NVTX, ("start",), max_id_gap, IS_RANGE)
            last = f'SELECT max({END}) FROM whole."{NVTX}" WHERE {IS_RANGE}'
            ends = [int(blocks.end_ns.max()) for blocks in self._blocks.values()]
            self._last_ns = max(*ends, database.execute(last).fetchone()[0] or 0)
            for table in _SMALL:
                if table in file.columns:
                    columns = ", ".join(map(quote_name, file.columns[table]))  # "*" would include generated columns
                    database.execute(f'CREATE TABLE main."{table}" AS SELECT {columns} FROM whole."{table}"')
            for table in (*self._blocks, NVTX):
                database.execute(
                    f'CREATE TABLE main."{table}" AS SELECT {self._column_list(table)} FROM whole."{table}" LIMIT 0'
                )
            names = read_strings(file)
            text, text_id = file.columns_or_null(NVTX, "text", "textId")
            database.execute("CREATE TEMP TABLE structure (id INTEGER PRIMARY KEY)")
            ids = [(key,) for key, name in names.items() if marks_structure(name)]
            database.executemany("INSERT INTO structure VALUES (?)", ids)
            database.create_function("marks", 1, lambda name: isinstance(name, str) and marks_structure(name))
            database.create_function("is_named", 2, lambda name, key: bool(name) or key in names)
            unnamed = f'SELECT 1 FROM whole."{NVTX}" WHERE {IS_RANGE} AND NOT is_named({text}, {text_id}) LIMIT 1'
            if database.execute(unnamed).fetchone():
                raise CannotSplitError("it has ranges without a name")
            is_structure = f"({text_id} IN (SELECT id FROM structure) OR ({text} IS NOT NULL AND marks({text})))"
            self._copy_rows(database, NVTX, f"NOT {IS_RANGE} OR {is_structure}")
            first = (
                f'SELECT at FROM (SELECT rowid AS at, min(correlationId) FROM whole."{CALLS}" '
                f"WHERE {are_integers('correlationId')} AND correlationId != {UNKNOWN} GROUP BY globalTid >> 24)"
            )
            self._copy_rows(database, CALLS, f"rowid IN ({first})")
            database.commit()
            self._nccl_ids = [key for key, name in names.items() if name.startswith("nccl")]
            calls = ids_of_calls(names) if file.has_columns(CALLS, CALL_NAME) else {}
            self._launch_ids = calls.pop(CallKind.LAUNCH, [])
            if borders := [key for ids in calls.values() for key in ids]:
                self._copy_rows(database, CALLS, f"{CALL_NAME} IN ({', '.join(map(str, borders))})")
                database.commit()

    def parts(self, numbers: Sequence[int] | None = None) -> Iterator[tuple[int, Part]]:
        """Yield the parts with these numbers, or all, one after the other."""
        for number in range(len(self.spans)) if numbers is None else numbers:
            start_ns, end_ns = self.spans[number]
            with self._translate_errors():
                self._file.run_with_deadline(partial(self._copy_part, start_ns, end_ns))
                trace = replace(self._load(self._made), path=self.path)
            # The activities of all launches are there for the span only.
            in_span = (trace.calls.start_ns >= start_ns) & (trace.calls.start_ns < end_ns)
            trace = replace(trace, is_launch=None if trace.is_launch is None else trace.is_launch & in_span)
            spans = trace.spans
            spans = replace(spans, end_ns=np.where(spans.is_open == 1, self._last_ns, spans.end_ns))
            yield number, Part(replace(trace, spans=spans), start_ns, end_ns)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn errors of a part into a CannotSplitError, but a full disk into a TraceError."""
        try:
            yield
        except TraceError as error:
            if isinstance(error.__cause__, sqlite3.Error) and "full" in str(error.__cause__):
                reason = f"its parts, even one at a time, have no room in {self._made.parent.parent}"
                raise TraceError(self.path, reason, "make room there, or set TMPDIR") from error
            raise CannotSplitError(f"its parts cannot be made ({error})") from error

    @contextmanager
    def _open(self, path: Path) -> Iterator[sqlite3.Connection]:
        """Open the database of a part with the export attached as ``whole``."""
        with self._file.connect(sqlite_uri(path)) as database:
            database.execute("PRAGMA journal_mode=OFF")
            database.execute("PRAGMA synchronous=OFF")
            database.execute("ATTACH ? AS whole", (self._file.uri,))
            yield database

    def _add_ranges_that_start_with_steps(self) -> None:
        """Copy ranges that start exactly with a step: a thread that opens one counts as a main thread."""
        with self._open(self._base) as database:
            database.execute("CREATE TEMP TABLE starts (at INTEGER PRIMARY KEY)")
            rows = ((start,) for start in np.unique(self.steps[0]).tolist())
            database.executemany("INSERT INTO starts VALUES (?)", rows)
            self._copy_rows(database, NVTX, f"{IS_RANGE} AND start IN (SELECT at FROM starts)")
            database.commit()

    def _existing_columns(self, table: str) -> list[str]:
        wanted = (*_COLUMNS[table], *(_OF_LAUNCHES.get(table, ()) if self._options.with_launches else ()))
        return [column for column in wanted if column in self._file.columns[table]]

    def _column_list(self, table: str) -> str:
        return ", ".join(f'"{column}"' for column in self._existing_columns(table))

    def _copy_rows(self, database: sqlite3.Connection, table: str, condition: str) -> None:
        """Copy rows with their row ids, which keeps their order; skip rows that are already there."""
        columns = self._column_list(table)
        database.execute(
            f'INSERT OR IGNORE INTO main."{table}" (rowid, {columns}) '
            f'SELECT rowid, {columns} FROM whole."{table}" WHERE {condition}'
        )

    def _spans(self, part_rows: int) -> list[tuple[int, int]]:
        """Return spans of about so many rows each, from the start of one step to that of another."""
        starts = np.unique(self.steps[0])
        blocks = list(self._blocks.values())
        first = np.concatenate([block.start_ns for block in blocks])
        rows = np.concatenate([block.rows for block in blocks])
        order = np.argsort(first, kind="stable")
        part = np.cumsum(rows[order]) // part_rows
        borders = first[order][1:][np.diff(part) > 0]
        at = np.unique(np.searchsorted(starts, borders))
        edges = [-END_OF_TIME_NS, *starts[at[(at > 0) & (at < len(starts))]].tolist(), END_OF_TIME_NS]
        return list(pairwise(edges))

    def _copy_part(self, start_ns: int, end_ns: int) -> None:
        shutil.copyfile(self._base, self._made)
        with self._open(self._made) as database:
            self._copy_activities(database, start_ns, end_ns)
            self._copy_calls(database, start_ns, end_ns)
            self._copy_nccl_ranges(database)
            database.commit()

    def _copy_activities(self, database: sqlite3.Connection, start_ns: int, end_ns: int) -> None:
        step_start, step_end = self.steps
        mine = (step_start >= start_ns) & (step_start < end_ns)
        launches = (
            int(step_start[mine].min(initial=start_ns)),
            int(step_end[mine].max(initial=end_ns)),
        )
        calls = self._blocks[CALLS]
        database.execute("CREATE TEMP TABLE launched (id INTEGER PRIMARY KEY)")
        where = calls.where((calls.start_ns < launches[1]) & (calls.last_start_ns >= launches[0]))
        database.execute(
            f'INSERT OR IGNORE INTO launched SELECT correlationId FROM whole."{CALLS}" '
            f"WHERE {where} AND start >= ? AND start < ? AND correlationId IS NOT NULL",
            launches,
        )
        least, most = database.execute(_ID_RANGE.format("launched")).fetchone()
        start, end = min(start_ns, launches[0]), max(end_ns, launches[1])
        for blocks in self._activity_blocks():
            where = blocks.where((blocks.least_id <= most) & (blocks.most_id >= least))
            self._copy_rows(database, blocks.table, f"{where} AND correlationId IN (SELECT id FROM launched)")
            query = f'SELECT min(start), max({END}) FROM main."{blocks.table}"'
            first, last = database.execute(query).fetchone()
            start, end = min(start, first if first is not None else start), max(end, last if last is not None else end)
        for blocks in self._activity_blocks():
            where = blocks.where((blocks.start_ns < end) & (blocks.end_ns >= start))
            beside = f"start < {end} AND {END} >= {start}"
            self._copy_rows(database, blocks.table, f"{where} AND {beside}")

    def _activity_blocks(self) -> Iterator[Blocks]:
        return (blocks for table, blocks in self._blocks.items() if table != CALLS)

    def _copy_calls(self, database: sqlite3.Connection, start_ns: int, end_ns: int) -> None:
        database.execute("CREATE TEMP TABLE wanted (id INTEGER PRIMARY KEY)")
        for blocks in self._activity_blocks():
            if "correlationId" in self._file.columns[blocks.table]:
                database.execute(
                    f'INSERT OR IGNORE INTO wanted SELECT correlationId FROM main."{blocks.table}" '
                    "WHERE correlationId IS NOT NULL"
                )
        least, most = database.execute(_ID_RANGE.format("wanted")).fetchone()
        calls = self._blocks[CALLS]
        where = calls.where((calls.least_id <= most) & (calls.most_id >= least))
        self._copy_rows(database, CALLS, f"{where} AND correlationId IN (SELECT id FROM wanted)")
        if self._launch_ids:
            where = calls.where((calls.start_ns < end_ns) & (calls.last_start_ns >= start_ns))
            ids = ", ".join(map(str, self._launch_ids))
            within = f"start >= {start_ns} AND start < {end_ns}"
            self._copy_rows(database, CALLS, f"{where} AND {within} AND {CALL_NAME} IN ({ids})")

    def _copy_nccl_ranges(self, database: sqlite3.Connection) -> None:
        """Copy NCCL's ranges, which name collectives and their sizes, from one part before the launches to the last."""
        first, last = database.execute(f'SELECT min(start), max(start) FROM main."{CALLS}"').fetchone()
        if first is None:
            return
        text, text_id = self._file.columns_or_null(NVTX, "text", "textId")
        ids = ", ".join(map(str, self._nccl_ids)) or "NULL"
        since = first - (last - first)
        where = self._ranges.where((self._ranges.start_ns <= last) & (self._ranges.last_start_ns >= since))
        self._copy_rows(
            database,
            NVTX,
            f"{where} AND {IS_RANGE} AND start BETWEEN {since} AND {last} "
            f"AND ({text_id} IN ({ids}) OR {text} GLOB 'nccl*')",
        )
