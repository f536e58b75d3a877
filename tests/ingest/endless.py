"""Small files that read as if they were endless: trees and texts that share pages, views in disguise.

What SQLite itself would not write is written over its pages.
"""

from __future__ import annotations

import sqlite3
import struct
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import write_capture

KERNELS, CALLS, NVTX = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
PAGE = 4096
Make = Callable[[Path], Path]
ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT {} FROM n"


def columns_of(table: str, path: Path) -> str:
    with closing(sqlite3.connect(path)) as database:
        return ", ".join(f'"{row[1]}"' for row in database.execute(f"PRAGMA table_info({table})"))


def virtual(table: str) -> Make:
    """A full text index over an endless view, under the name of a table."""

    def make(folder: Path) -> Path:
        path = write_capture(folder / "x.sqlite", known_truth(1))
        columns = columns_of(table, path)
        with closing(sqlite3.connect(path)) as database:
            database.execute(f"DROP TABLE {table}")
            named = ", ".join(f"x AS {column}" for column in columns.split(", "))
            database.execute(f"CREATE VIEW other AS {ENDLESS.format(f'x AS rowid, {named}')} WHERE x < 0")
            database.execute(f"CREATE VIRTUAL TABLE {table} USING fts5({columns}, content='other')")
            database.commit()
        return path

    return make


def disguised_view(table: str, *, by_name: bool) -> Make:
    """An endless view that the schema calls a table; or whose name another table bears in the schema."""

    def make(folder: Path) -> Path:
        path = write_capture(folder / "x.sqlite", known_truth(1))
        named = ", ".join(f"x AS {column}" for column in columns_of(table, path).split(", "))
        with closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE pretext (x)")
            database.execute("INSERT INTO pretext VALUES (1)")
            database.execute(f"DROP TABLE {table}")
            database.execute(f"CREATE VIEW {table} AS {ENDLESS.format(named)} WHERE x < 0")
            database.execute("PRAGMA writable_schema = ON")
            if by_name:
                database.execute("UPDATE sqlite_master SET name = 'hidden' WHERE type = 'view'")
                database.execute(f"UPDATE sqlite_master SET name = '{table}' WHERE name = 'pretext'")
            else:
                root = "(SELECT rootpage FROM sqlite_master WHERE name = 'pretext')"
                database.execute(f"UPDATE sqlite_master SET type = 'table', rootpage = {root} WHERE type = 'view'")
            database.commit()
        return path

    return make


def root_page(path: Path, name: str) -> int:
    with closing(sqlite3.connect(path)) as database:
        return int(database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()[0])


def put_pages(path: Path, pages: dict[int, bytes]) -> Path:
    """Pages written over others, or behind them; the first one as long as it says."""
    data = bytearray(path.read_bytes())
    for number, page in pages.items():
        data[(number - 1) * PAGE : number * PAGE] = page
    data[28:32] = struct.pack(">I", len(data) // PAGE)
    path.write_bytes(data)
    return path


def interior(child: int, cells: int = 400) -> bytes:
    """A page of a tree all of whose children are one page."""
    content = b"".join(struct.pack(">IB", child, 1 + at % 100) for at in range(cells))
    head = struct.pack(">BHHHBI", 5, 0, cells, PAGE - len(content), 0, child)
    pointers = b"".join(struct.pack(">H", PAGE - len(content) + 5 * at) for at in range(cells))
    return (head + pointers).ljust(PAGE - len(content), b"\0") + content


def shared_pages(name: str, levels: int = 5, *, without_rows: bool = False) -> Make:
    """A table whose tree has the same child everywhere: 400 to the power of its levels of its rows."""

    def make(folder: Path) -> Path:
        path = write_capture(folder / "x.sqlite", known_truth(1))
        root, data = root_page(path, name), path.read_bytes()
        last = len(data) // PAGE
        leaf = data[(root - 1) * PAGE : root * PAGE]
        if without_rows:
            leaf = struct.pack(">BHHHB", 13, 0, 0, PAGE, 0).ljust(PAGE, b"\0")
        chain = {last + 1 + level: interior(last + level) for level in range(1, levels)}
        return put_pages(path, {last + 1: leaf, **chain, root: interior(last + levels)})

    return make


def tree_in_a_ring(name: str) -> Make:
    """A table whose root is its own child."""

    def make(folder: Path) -> Path:
        path = write_capture(folder / "x.sqlite", known_truth(1))
        root = root_page(path, name)
        return put_pages(path, {root: interior(root)})

    return make


def varint(number: int) -> bytes:
    parts = [number & 127]
    while number := number >> 7:
        parts.append(number & 127 | 128)
    return bytes(reversed(parts))


def one_text_everywhere(table: str, columns: int, at: int, pages: int = 256) -> Make:
    """Rows that lie in one place, each with a text of a megabyte whose pages they share: 600 of 1 MB in 1 MB."""
    cells = 600

    def make(folder: Path) -> Path:
        path = write_capture(folder / "x.sqlite", known_truth(1))
        root, last = root_page(path, table), len(path.read_bytes()) // PAGE
        usable, length = PAGE, pages * (PAGE - 4)
        types = [varint(13 + 2 * length) if column == at else b"\x01" for column in range(columns)]
        head = b"".join(types)
        body = bytes([len(head) + 1]) + head + b"\x01" * at
        size = len(body) + length + columns - at - 1
        least = (usable - 12) * 32 // 255 - 23
        local = least + (size - least) % (usable - 4)
        local = local if local <= usable - 35 else least
        cell = varint(size) + varint(7) + body.ljust(local, b"A") + struct.pack(">I", last + 1)
        begin = PAGE - len(cell)
        cells_here = min(cells, (begin - 8) // 2)
        page = struct.pack(">BHHHB", 13, 0, cells_here, begin, 0) + struct.pack(">H", begin) * cells_here
        following = (*range(last + 2, last + 1 + pages), 0)
        chain = {last + 1 + n: struct.pack(">I", at).ljust(PAGE, b"A") for n, at in enumerate(following)}
        return put_pages(path, {**chain, root: page.ljust(begin, b"\0") + cell})

    return make


def repeated(part: bytes, times: int, head: bytes = b"", tail: bytes = b"") -> Make:
    """A trace with an event that repeats something, packed."""
    block = 10_000 * (part + b",")

    def make(folder: Path) -> Path:
        path = folder / "x.json.gz"
        path.write_bytes(packed(b'{"traceEvents": [' + head, block, times // 10_000, part + tail + b"]}"))
        return path

    return make


def packed(head: bytes, block: bytes, times: int, tail: bytes) -> bytes:
    """A gzip of one member of a block that comes again and again: it is packed once, and its packed bytes repeated."""
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    parts = [packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH) for piece in (head, block)]
    end = packer.compress(tail) + packer.flush()
    checksum = zlib.crc32(head)
    for _ in range(times):
        checksum = zlib.crc32(block, checksum)
    size = len(head) + times * len(block) + len(tail)
    ending = struct.pack("<II", zlib.crc32(tail, checksum), size % (1 << 32))
    return bytes.fromhex("1f8b08000000000002ff") + parts[0] + times * parts[1] + end + ending
