"""Damages captures at random: bytes, rows and columns of a database, values of a JSON document."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

BYTES = (b"\0", b"\xff", b"\x7f", b"\x80", b"{", b'"', b"[" * 3000, b"\0" * 512, b"\xff" * 64, b"9" * 40, b"1e999")
VALUES: tuple[Any, ...] = (
    None, 0, -1, 1, 1.5, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63), 4 * 10**18, -(4 * 10**18), "", "x", "nan", "1e999",
    "nccl", "step 1", "ncclAllReduce", "\x1b[2J", "[bold]", "\u202e", "x" * 10_000, b"", b"\xff\x00", 1e300, -0.0,
)  # fmt: skip


def change_bytes(data: bytes, random: Random) -> bytes:
    """Overwrite, remove or repeat some places, or cut off the end."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 8)):
        at = random.randrange(len(changed) + 1)
        length = random.choice((1, 1, 2, 4, 8, 100, 5000))
        match random.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 1:
                changed[at : at + length] = random.randbytes(length)
            case 2:
                piece = random.choice(BYTES)
                changed[at : at + len(piece)] = piece
            case 3:
                del changed[at : at + length]
            case 4:
                changed[at:at] = changed[at : at + length]
            case 5 if random.random() < 0.2:
                del changed[at:]
    return bytes(changed)


def change_database(path: Path, random: Random) -> None:
    """Change rows, columns and tables of a database; changes that SQLite refuses are left out."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA synchronous=OFF")
        for _ in range(random.randint(1, 6)):
            tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            if tables:
                with suppress(sqlite3.Error, OverflowError):
                    _change_table(database, _drawn(tables, random), tables, random)
        database.commit()


def _drawn(tables: list[str], random: Random) -> str:
    """Return a random table; those with events are more likely."""
    weighty = [table for table in tables if table.startswith(("CUPTI", "NVTX", "StringIds"))]
    return random.choice(weighty if weighty and random.random() < 0.8 else tables)


def _change_table(database: sqlite3.Connection, table: str, tables: list[str], random: Random) -> None:
    columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
    column = random.choice(columns)
    rows = random.choice(("1", f"rowid % {random.randint(2, 9)} = 0", f"rowid = {random.randint(1, 30)}"))
    match random.randrange(11):
        case 0 | 1 | 2 | 3:
            database.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE {rows}', (random.choice(VALUES),))
        case 4:
            other = random.choice(columns)
            database.execute(f'UPDATE "{table}" SET "{column}" = "{other}" WHERE {rows}')
        case 5:
            factor = random.choice((-1, 0, 2, 1 << 20, 1 << 40))
            database.execute(f'UPDATE "{table}" SET "{column}" = "{column}" * {factor} WHERE {rows}')
        case 6:
            database.execute(f'DELETE FROM "{table}" WHERE {rows}')
        case 7:
            database.execute(f'INSERT INTO "{table}" SELECT * FROM "{table}" WHERE {rows}')
        case 8:
            database.execute(f'ALTER TABLE "{table}" DROP COLUMN "{column}"')
        case 9:
            database.execute(f'DROP TABLE "{table}"')
        case 10:
            other = random.choice(tables)
            database.execute(f'DROP TABLE "{table}"')
            database.execute(f'CREATE TABLE "{table}" AS SELECT * FROM "{other}"')


def change_document(document: Any, random: Random) -> Any:
    """Replace, remove, repeat or nest values of a JSON document."""
    for _ in range(random.randint(1, 8)):
        holder, key = _drawn_place(document, random)
        match random.randrange(6):
            case 0 | 1 | 2:
                holder[key] = random.choice([value for value in VALUES if not isinstance(value, bytes)])
            case 3:
                del holder[key]
            case 4 if isinstance(holder, list):
                holder.extend(holder[key : key + random.randint(1, 3)])
            case 5:
                holder[key] = random.choice(([], {}, [holder[key]], {"x": holder[key]}, True, 10**30))
        if not document:
            break
    return document


def _drawn_place(document: Any, random: Random) -> tuple[Any, Any]:
    """Return a random container within the document and a key or position in it."""
    holder = document
    while True:
        key = random.choice([*holder]) if isinstance(holder, dict) else random.randrange(len(holder))
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or random.random() < 0.1:
            return holder, key
        holder = inner


def write_kineto(data: bytes, target: Path, random: Random) -> None:
    """Write a damaged trace of Kineto: changed values or bytes, sometimes gzipped before or after the damage."""
    by_value = random.random() < 0.6
    damaged = json.dumps(change_document(json.loads(data), random)).encode() if by_value else change_bytes(data, random)
    if random.random() < 0.2:
        damaged = gzip.compress(damaged, 1, mtime=0)  # without the time, so that only the seed determines the bytes
        damaged = change_bytes(damaged, random) if random.random() < 0.5 else damaged
    target.write_bytes(damaged)


def write_database(data: bytes, target: Path, random: Random) -> None:
    """Write a damaged export: changed bytes or tables."""
    if random.random() < 0.4:
        target.write_bytes(change_bytes(data, random))
        return
    target.write_bytes(data)
    change_database(target, random)
