"""Makes a large Nsight Systems export for benchmarks by repeating the events of a small one end to end.

    python scripts/dev/repeat_capture.py SMALL.sqlite BIG.sqlite --copies 50

In each copy, times are shifted by the capture's length, and numbers of calls by their largest one, so that every copy
has the same measures as the original. Handles of events stay, since real captures use them again, too.
"""

from __future__ import annotations

import argparse
import sqlite3
from contextlib import closing
from pathlib import Path

_CUPTI = ("KERNEL", "MEMCPY", "MEMSET", "RUNTIME", "SYNCHRONIZATION", "CUDA_EVENT")
EVENTS = (*(f"CUPTI_ACTIVITY_KIND_{kind}" for kind in _CUPTI), "NVTX_EVENTS")
_PAUSE_NS = 1_000_000
_MARKS = 70  # NVTX event types from here on name domains, once


def repeat_capture(small: Path, big: Path, copies: int) -> Path:
    """Write ``big`` with the events of ``small`` repeated ``copies`` times; return ``big``."""
    if big.exists() and big.samefile(small):
        raise SystemExit(f"{big}: it would be written over itself: give the larger one another name")
    big.unlink(missing_ok=True)
    with closing(sqlite3.connect(f"file:{small.absolute()}?mode=ro", uri=True)) as source:
        source.execute("VACUUM INTO ?", (str(big),))
    with closing(sqlite3.connect(big)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        found = [table for table in EVENTS if table in tables]
        period = _PAUSE_NS + max(_largest(database, table, "start", "end") for table in found)
        calls = 1 + max(_largest(database, table, "correlationId") for table in found)
        for table in found:
            statement = _copy_statement(database, table)
            for copy in range(1, copies):
                database.execute(statement, {"time": copy * period, "id": copy * calls})
        database.commit()
    return big


def _largest(database: sqlite3.Connection, table: str, *columns: str) -> int:
    """Return the largest value in columns of a table; 0 if it has none of them."""
    held = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
    largest = [database.execute(f'SELECT max("{name}") FROM {table}').fetchone()[0] for name in columns if name in held]
    return max((int(value) for value in largest if value is not None), default=0)


def _copy_statement(database: sqlite3.Connection, table: str) -> str:
    """Copies the rows that are there now, with shifted times and ids; domains are named once."""
    shifts = {"start": ":time", "end": ":time", "correlationId": ":id"}
    columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})") if not row[5]]
    values = [f'"{name}" + {shifts[name]}' if name in shifts else f'"{name}"' for name in columns]
    names = ", ".join(f'"{name}"' for name in columns)
    (rows,) = database.execute(f"SELECT max(rowid) FROM {table}").fetchone()
    only_ranges = f"AND eventType < {_MARKS}" if table == "NVTX_EVENTS" else ""
    original = f"SELECT {', '.join(values)} FROM {table} WHERE rowid <= {rows} {only_ranges}"
    return f"INSERT INTO {table} ({names}) {original}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Repeat the events of an Nsight Systems export end to end.")
    parser.add_argument("small", type=Path)
    parser.add_argument("big", type=Path)
    parser.add_argument("--copies", type=int, default=50)
    arguments = parser.parse_args()
    repeat_capture(arguments.small, arguments.big, arguments.copies)
    print(f"{arguments.big}: {arguments.big.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
