"""Makes a smaller capture with only the last measured steps of a capture.

    python scripts/trim_capture.py BIG.sqlite SMALL.sqlite --steps 3                  # export of nsys
    python scripts/trim_capture.py BIG.rank0.json.gz SMALL.rank0.json.gz --steps 3    # trace of torch.profiler

It keeps the ranges and calls that start within these steps, the device work that these calls launched, even if it ran
later, and the ranges that name the ranks. No event is cut in two, and the given capture is not changed.

``--share`` also leaves out what an export of nsys tells of the machine beside its hardware: the environment, other
processes, what the program printed, its command line and folder.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ddp_prof.atomic_file import is_stream
from ddp_prof.errors import DdpProfError, TraceError
from ddp_prof.range_names import PROCESS, STEP, parse_range
from ddp_prof.train.arguments import at_least

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CALLS, NVTX = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
LAUNCHED = tuple(f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE"))
LAUNCHED_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
_TEXT = "coalesce(text, (SELECT value FROM StringIds WHERE id = textId), '')"
_RANGES = (59, 60)  # NVTX event types; others name domains and the like, once


_PRINTED = ("ANALYSIS_FILE", "ProcessStreams")
_HARDWARE = ("CpuCores", "CpuDescription", "CudaDriverVersion", "NvDriverVersion", "OsDescription")
"""Rows of ``TARGET_INFO_SYSTEM_ENV`` that are kept for sharing."""


class Window(NamedTuple):
    """The time from the start of the first kept step to the end of the last one, in the capture's unit."""

    start: float
    end: float


def window_of(path: Path, ranges: Iterable[tuple[str, float, float]], steps: int) -> Window:
    """Return the time of the last measured steps, over all ranks."""
    times: dict[int, list[tuple[float, float]]] = {}
    for text, start, end in ranges:
        parsed = parse_range(text)
        number = parsed.number("index")
        if parsed.name == STEP and number is not None and "warmup" not in parsed.fields:
            times.setdefault(number, []).append((start, end))
    if not times:
        raise TraceError(path, "no measured step is marked in it", "only captures of this toolkit can be trimmed")
    kept = [time for number in sorted(times)[-steps:] for time in times[number]]
    return Window(min(start for start, _ in kept), max(end for _, end in kept))


def trim_sqlite(big: Path, small: Path, steps: int, share: bool = False) -> None:
    with closing(sqlite3.connect(f"file:{big.absolute()}?mode=ro", uri=True)) as source:
        window = window_of(big, _step_rows(source), steps)
        small.unlink(missing_ok=True)
        source.execute("VACUUM INTO ?", (str(small),))
    with closing(sqlite3.connect(small)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        timed = {table for table in tables if {"start", "end"} <= _columns(database, table)}
        for table in timed - set(LAUNCHED) - {NVTX}:
            database.execute(f'DELETE FROM "{table}" WHERE start < ? OR start > ?', window)
        database.execute(
            f"DELETE FROM {NVTX} WHERE eventType IN {_RANGES} AND (start < ? OR start > ?) AND {_TEXT} NOT LIKE ?",
            (*window, f"{PROCESS}|%"),
        )
        _delete_not_launched(database, timed, window)
        if share:
            _delete_private(database, tables)
        database.commit()
        database.execute("VACUUM")


def _step_rows(database: sqlite3.Connection) -> list[tuple[str, float, float]]:
    if "textId" not in _columns(database, NVTX):
        return []
    query = (
        f"SELECT {_TEXT}, start, end FROM {NVTX} WHERE end IS NOT NULL AND eventType IN {_RANGES} AND {_TEXT} LIKE ?"
    )
    return database.execute(query, (f"{STEP}|%",)).fetchall()


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in database.execute(f'PRAGMA table_info("{table}")')}


def _delete_not_launched(database: sqlite3.Connection, timed: set[str], window: Window) -> None:
    """Delete device work that no kept call launched; without calls, what began outside of the window."""
    if CALLS not in timed:
        for table in timed & set(LAUNCHED):
            database.execute(f"DELETE FROM {table} WHERE start < ? OR start > ?", window)
        return
    database.execute(
        f"CREATE TEMP TABLE kept AS SELECT DISTINCT globalTid >> 24 AS process, correlationId AS id FROM {CALLS}"
    )
    database.execute("CREATE INDEX temp.by_id ON kept (id, process)")
    for table in timed & set(LAUNCHED):
        by_process = "AND process = globalPid >> 24" if "globalPid" in _columns(database, table) else ""
        database.execute(
            f"DELETE FROM {table} WHERE NOT EXISTS (SELECT 1 FROM kept WHERE id = correlationId {by_process})"
        )


def _delete_private(database: sqlite3.Connection, tables: set[str]) -> None:
    """Delete what tells of the machine, its other processes and its user."""
    for table in tables & set(_PRINTED):
        database.execute(f"DELETE FROM {table}")
    if "TARGET_INFO_SYSTEM_ENV" in tables:
        database.execute(f"DELETE FROM TARGET_INFO_SYSTEM_ENV WHERE name NOT IN {_HARDWARE}")
    if "META_DATA_CAPTURE" in tables:
        database.execute("DELETE FROM META_DATA_CAPTURE WHERE name LIKE 'PROCESS%' OR name LIKE 'DEVICE_%'")
    if "META_DATA_EXPORT" in tables:
        database.execute("DELETE FROM META_DATA_EXPORT WHERE name LIKE '%PATH%'")
    traced = " UNION ".join(f"SELECT globalTid >> 24 FROM {table}" for table in sorted({CALLS, NVTX} & tables))
    for table, column in {"PROCESSES": "globalPid", "ThreadNames": "globalTid"}.items():
        if table in tables:
            database.execute(f"DELETE FROM {table} WHERE {column} >> 24 NOT IN ({traced})")
    if "DIAGNOSTIC_EVENT" in tables:  # paths of the profiler's own files
        database.execute("DELETE FROM DIAGNOSTIC_EVENT WHERE text LIKE '%/%'")
    used = [
        f'SELECT "{column}" FROM "{table}" WHERE "{column}" IS NOT NULL'
        for table in tables - {"StringIds"}
        for column in sorted(_columns(database, table))
        if column.lower().endswith(("nameid", "textid", "contentid", "name"))
    ]
    if "StringIds" in tables:  # texts that nothing refers to any more
        database.execute(f"DELETE FROM StringIds WHERE id NOT IN ({' UNION '.join(used)})")


def trim_kineto(big: Path, small: Path, steps: int) -> None:
    content = big.read_bytes()
    document = json.loads(gzip.decompress(content) if big.name.endswith(".gz") else content)
    events = document["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X"]
    ranges = (
        (item["name"], item["ts"], item["ts"] + item["dur"]) for item in spans if item["name"].startswith("step|")
    )
    window = window_of(big, ranges, steps)
    launched = {
        _correlation(item) for item in spans if item.get("cat") not in LAUNCHED_EVENTS and _is_in_window(item, window)
    }
    document["traceEvents"] = [event for event in events if _is_kept(event, window, launched - {None})]
    text = json.dumps(document, separators=(",", ":")).encode()
    small.write_bytes(gzip.compress(text, 9) if small.name.endswith(".gz") else text)


def _is_kept(event: dict[str, Any], window: Window, launched: set[Any]) -> bool:
    """Whether an event is kept; both events of a flow are judged separately."""
    if event.get("cat") in LAUNCHED_EVENTS:
        return _correlation(event) in launched
    if event.get("ph") != "X":
        return event.get("ph") == "M" or "ts" not in event or _is_in_window(event, window)
    return _is_in_window(event, window) or event["name"].startswith(f"{PROCESS}|")


def _is_in_window(event: dict[str, Any], window: Window) -> bool:
    return window.start <= float(event["ts"]) <= window.end


def _correlation(event: dict[str, Any]) -> Any:
    return (event.get("args") or {}).get("correlation")


def trim_capture(big: Path, small: Path, steps: int, share: bool = False) -> None:
    """Write ``small`` with the last measured ``steps`` of ``big``; ``share`` leaves out what tells of the machine.

    Raises:
        TraceError: ``big`` is not a capture of this toolkit, both are the same file, or ``small`` is a device or pipe.
    """
    if small.exists() and big.exists() and small.samefile(big):
        raise TraceError(big, "it would be written over itself", "give the smaller one another name")
    if is_stream(small):
        raise TraceError(small, "it is no file, and would be deleted", "give the smaller one a name of its own")
    try:
        if big.suffix == ".sqlite":
            trim_sqlite(big, small, steps, share)
        else:
            trim_kineto(big, small, steps)
    except (OSError, sqlite3.Error, ValueError, LookupError, TypeError) as error:
        reason = f"it cannot be trimmed ({error})"
        raise TraceError(
            big, reason, "give an export of nsys or a trace of torch.profiler, and where to write"
        ) from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("big", type=Path)
    parser.add_argument("small", type=Path)
    parser.add_argument("--steps", type=at_least(1), default=3, help="how many steps to keep (default: %(default)s)")
    parser.add_argument("--share", action="store_true", help="leave out environment, other processes and paths")
    arguments = parser.parse_args(argv)
    try:
        trim_capture(arguments.big, arguments.small, arguments.steps, arguments.share)
    except DdpProfError as error:
        print(f"trim_capture: error: {error}", file=sys.stderr)
        return 1
    print(
        f"{arguments.small}: {arguments.small.stat().st_size / 1e6:.2f} of {arguments.big.stat().st_size / 1e6:.2f} MB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
