"""Broken, hostile and odd input: what each gives, as a table.

Every row is an input, the exit code and a part of the one line that is printed. The command runs as its users run it,
in bounded time and memory; the input stays as it was, nothing is left beside it, and nothing else changes: a folder of
files that no command has any business with lies there as a canary.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import re
import sqlite3
import stat
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from click.testing import Result

from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.load import load_trace
from tests.command_line import run
from tests.examples import IS_NIGHTLY
from tests.ingest import endless
from tests.ingest.test_nsys_export import known_truth
from tests.night import of_which_the_gate_keeps
from tests.nsys_factory import Capture, Kernel, Range, write_capture
from tests.test_manifest import LIES

KERNELS, CALLS, NVTX = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
Make = Callable[[Path], Path]


def content(data: bytes, name: str = "x") -> Make:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def export(*statements: str, product: str = "2024.6", change: Callable[[bytes], bytes] | None = None) -> Make:
    """An export after some SQL, then its bytes changed."""

    def make(folder: Path) -> Path:
        path = write_capture(folder / "x.sqlite", known_truth(2), product)
        with closing(sqlite3.connect(path)) as database:
            for statement in statements:
                database.execute(statement)
            database.commit()
        if change:
            path.write_bytes(change(path.read_bytes()))
        return path

    return make


def retyped(table: str, column: str, value: str) -> tuple[str, ...]:
    """A column without a declared type, every value of it replaced."""
    return (
        f"CREATE TABLE other AS SELECT * FROM {table}",
        f"DROP TABLE {table}",
        f"ALTER TABLE other RENAME TO {table}",
        f"ALTER TABLE {table} DROP COLUMN {column}",
        f"ALTER TABLE {table} ADD COLUMN {column}",
        f"UPDATE {table} SET {column} = {value}",
    )


def without(table: str, column: str) -> Make:
    return export(f"ALTER TABLE {table} DROP COLUMN {column}")


KERNEL = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 2, "pid": 0, "tid": 7}
NCCL = KERNEL | {"name": "ncclDevKernel_AllReduce_Sum_f32", "tid": 9}


def kineto(*events: Any, suffix: str = ".json", **top: Any) -> Make:
    data = json.dumps({**top, "traceEvents": [KERNEL, NCCL, *events]}).encode()
    return content(gzip.compress(data) if suffix.endswith(".gz") else data, "x" + suffix)


PROFILE = json.dumps({"traceEvents": [KERNEL, NCCL]}).encode()
OPERATOR = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2, "pid": 1, "tid": 1}
MARK = OPERATOR | {"cat": "user_annotation"}
GLOO = MARK | {"name": "gloo:all_reduce", "ts": 6, "tid": 2}


def cpu(*events: Any) -> Make:
    return content(json.dumps({"traceEvents": events}).encode(), "x.json")


def kernel(**changes: Any) -> Make:
    return kineto(KERNEL | changes)


def raw_kernel(field: str, text: str) -> Make:
    """A kernel with a field whose text no JSON writer would write."""
    event = json.dumps(KERNEL | {field: "@"}).replace('"@"', text)
    return content(f'{{"traceEvents": [{json.dumps(NCCL)}, {event}]}}'.encode(), "x.json")


def arguments(**args: Any) -> Make:
    return kineto(NCCL | {"args": args})


WHOLE_GZIP = gzip.compress(json.dumps({"traceEvents": [KERNEL] * 2000}).encode())


def bomb(folder: Path) -> Path:
    """One GiB of spaces in an event, in 1 MB."""
    path = folder / "x.json.gz"
    path.write_bytes(endless.packed(b'{"traceEvents": [', b" " * (1 << 20), 1024, b"]}"))
    return path


def symbolic_link(target: str) -> Make:
    def make(folder: Path) -> Path:
        write_capture(folder / "good.sqlite", known_truth(1))
        (folder / "x.sqlite").symlink_to(target)
        return folder / "x.sqlite"

    return make


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "x.sqlite")
    return folder / "x.sqlite"


def beside_a_report(data: bytes) -> Make:
    def make(folder: Path) -> Path:
        (folder / "x.nsys-rep").write_bytes(b"NVIDIA Tegra Profiler Report 2023@4@4@54-234433681190v0.\n")
        (folder / "x.sqlite").write_bytes(data)
        return folder / "x.nsys-rep"

    return make


def with_manifest(text: str) -> Make:
    def make(folder: Path) -> Path:
        (folder / "x.run.json").write_text(text)
        return write_capture(folder / "x.sqlite", known_truth(1))

    return make


def with_log(folder: Path) -> Path:
    """A database in WAL mode whose last rows are in the log beside it, as a crashed writer leaves it."""
    source = write_capture(folder / "source", known_truth(1))
    with closing(sqlite3.connect(source)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA wal_autocheckpoint=0")
        database.execute(f"DELETE FROM {KERNELS} WHERE start > 60000000")
        database.commit()
        for suffix in ("", "-wal"):
            (folder / f"x.sqlite{suffix}").write_bytes((folder / f"source{suffix}").read_bytes())
    source.unlink()
    return folder / "x.sqlite"


def changed_log(change: Callable[[bytes], bytes]) -> Make:
    """An export with a log that its writer has left, changed."""

    def make(folder: Path) -> Path:
        path = with_log(folder)
        log = path.with_name("x.sqlite-wal")
        log.write_bytes(change(log.read_bytes()))
        return path

    return make


def changed_journal(change: Callable[[bytes], bytes]) -> Make:
    def make(folder: Path) -> Path:
        path = with_journal(None)(folder)
        log = path.with_name("x.sqlite-journal")
        log.write_bytes(change(log.read_bytes()))
        return path

    return make


JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")


def journal(path: Path, super_journal: Path | None = None) -> None:
    """The rollback journal that a crashed writer leaves: it restores the first page as it is.

    One of a transaction over several databases names a file at its end, which is deleted once all are rolled back.
    """
    data = path.read_bytes()
    page, nonce, sector = data[:4096], 7, 512
    checksum = nonce + sum(page[at] for at in range(len(page) - 200, 0, -200))
    head = JOURNAL_MAGIC + struct.pack(">IIIII", 1, nonce, len(data) // 4096, sector, 4096)
    rows = head.ljust(sector, b"\0") + struct.pack(">I", 1) + page + struct.pack(">I", checksum)
    if super_journal:
        name = bytes(super_journal)
        rows = rows.ljust(-(-len(rows) // sector) * sector, b"\0") + struct.pack(">I", (1 << 30) // 4096 + 1) + name
        rows += struct.pack(">II", len(name), sum(name)) + JOURNAL_MAGIC
    path.with_name(f"{path.name}-journal").write_bytes(rows)


def with_journal(super_journal: str | None, *, hidden: bool = False) -> Make:
    """An export beside its journal, which may name a file, relative to the folder."""

    def make(folder: Path) -> Path:
        path = write_capture(folder / "x.sqlite", known_truth(1))
        journal(path, folder / super_journal if super_journal else None)
        if not hidden:
            return path
        path.rename(folder / "y.sqlite")  # the journal beside what a link leads to counts
        path.with_name("x.sqlite-journal").rename(folder / "y.sqlite-journal")
        path.symlink_to("y.sqlite")
        return path

    return make


def utf16(encoding: str, pack: Callable[[bytes], bytes] = bytes) -> Make:
    return content(pack(json.dumps({"traceEvents": [KERNEL]}).encode(encoding)), "x.json")


def long_names(part: str, table: str = "StringIds") -> Make:
    """Names that repeat something for 400 kB."""
    text = f"replace(hex(zeroblob({400_000 // len(part)})), '00', '{part}')"
    if table == "StringIds":
        return export(f"UPDATE StringIds SET value = {text} || id")
    return export(f"UPDATE {table} SET textId = NULL, text = {text} || rowid")


def remade(table: str, how: str, *more: str) -> Make:
    """A table made anew from another statement, with the same rows."""

    def make(folder: Path) -> Path:
        with tempfile.TemporaryDirectory() as other:
            columns = endless.columns_of(table, export()(Path(other)))
        return export(
            f"ALTER TABLE {table} RENAME TO other",
            how.format(columns=columns, rest=columns.partition(", ")[2]),
            f"INSERT INTO {table} ({columns}) SELECT {columns} FROM other" if "AS (" not in how else "SELECT 1",
            "DROP TABLE other",
            *more,
        )(folder)

    return make


def in_pages_of(size: int) -> Make:
    return export("PRAGMA journal_mode = DELETE", f"PRAGMA page_size = {size}", "VACUUM")


HOSTILE: dict[str, tuple[Make, int, str]] = {
    # what is no file
    "nothing there": (lambda folder: folder / "none.sqlite", 1, "No such file or directory: check the path"),
    "a folder without traces": (lambda folder: folder, 1, "a folder without traces"),
    "a pipe that nobody writes to": (pipe, 1, "not a regular file"),
    "a device": (lambda _: Path("/dev/zero"), 1, "not a regular file"),
    "a link to nothing": (symbolic_link("none"), 1, "No such file"),
    "a link to itself": (symbolic_link("x.sqlite"), 1, "symbolic links"),
    "a link to a folder": (symbolic_link("."), 0, ""),
    "a link to a capture": (symbolic_link("good.sqlite"), 0, ""),
    "a name of 255 letters": (lambda folder: export()(folder).rename(folder / f"{'x' * 248}.sqlite"), 0, ""),
    "a name of 255 letters, of a profile": (
        lambda folder: kineto()(folder).rename(folder / f"{'x' * 250}.json"), 0, ""),
    "a name that is too long": (lambda folder: folder / ("x" * 256), 1, "File name too long"),
    "a name with an escape sequence": (lambda folder: folder / ESCAPE, 1, r"\x1b]0;owned\x07\x1b[2J: No such file"),
    # what is no trace
    "empty": (content(b""), 1, "an empty file"),
    "zeros": (content(bytes(5000)), 1, "neither a report of Nsight"),
    "text": (content(b"hello\n" * 99), 1, "neither a report of Nsight"),
    "a picture": (content(b"\x89PNG\r\n\x1a\n" + bytes(99)), 1, "neither a report of Nsight"),
    "a program": (content(b"\x7fELF" + bytes(99)), 1, "neither a report of Nsight"),
    "an export in JSON Lines": (content(b'{"data":["QnxKernelTrace"]}\n'), 1, "nor its SQLite export"),
    "other JSON": (content(b'{"schema": 1}'), 1, "neither a report of Nsight"),
    "the description of a run": (content(b"{}", "x.run.json"), 1, "the description of a run"),
    "the log of a monitor": (content(b'{"schema": 1, "time": "x"}\n', "monitor.jsonl"), 1, "with 'ddp-prof monitor'"),
    "a page": (content(b"<!doctype html>\n<html>", "x.html"), 1, "open it in a browser"),
    "a list of numbers": (content(b"[1, 2, 3]"), 1, "neither a report of Nsight"),
    "a brace": (content(b"{"), 1, "neither a report of Nsight"),
    "JSON as UTF-16": (utf16("utf-16"), 1, "in UTF-16"),
    "JSON as UTF-16, the other way round": (utf16("utf-16-be"), 1, "in UTF-16"),
    "JSON as UTF-16, packed": (utf16("utf-16", gzip.compress), 1, "in UTF-16"),
    "JSON as UTF-32": (utf16("utf-32-le"), 1, "in UTF-16"),
    "another archive": (content(b"PK\x03\x04" + bytes(99)), 1, "packed by zip, which is not read: unpack it first: "),
    **{f"a profile packed by {name}": (content(pack(PROFILE), f"x.json{suffix}"), 1, f"packed by {name}, which is not")
       for name, suffix, pack in (
           ("zstd", ".zst", lambda data: b"\x28\xb5\x2f\xfd" + data), ("xz", ".xz", lzma.compress),
           ("bzip2", ".bz2", bz2.compress), ("lz4", ".lz4", lambda data: b"\x04\x22\x4d\x18" + data),
           ("7-Zip", ".7z", lambda data: b"7z\xbc\xaf\x27\x1c" + data))},
    "an archive of tar": (content(b"x.json".ljust(257, b"\0") + b"ustar\0" + PROFILE), 1, "an archive of tar"),
    "a packed archive of tar": (
        content(gzip.compress(b"x.json".ljust(257, b"\0") + b"ustar\0" + PROFILE)), 1, "a packed archive of tar"),
    "a packed export": (content(gzip.compress(b"SQLite format 3\0" + bytes(99)), "x.sqlite.gz"), 1, "gunzip -k "),
    "a packed report": (
        content(gzip.compress(b"NVIDIA Tegra Profiler Report 2023@4@4@54"), "x.nsys-rep.gz"), 1, "gunzip -k "),
    "a folder of packed profiles": (
        lambda folder: content(lzma.compress(PROFILE), "x.json.xz")(folder).parent, 1, "unpack the files in it first"),
    # SQLite, broken
    "only the header": (content(b"SQLite format 3\0"), 1, "not a readable SQLite database"),
    "a header and zeros": (content(b"SQLite format 3\0" + bytes(4080)), 1, "not a readable SQLite database"),
    "cut in half": (export(change=lambda data: data[: len(data) // 2]), 1, "malformed"),
    "cut after the first page": (export(change=lambda data: data[:4096]), 1, "malformed"),
    "a page of garbage": (export(change=lambda data: data[:4096] + b"\xff" * 4096 + data[8192:]), 1, "malformed"),
    "a schema of garbage": (export(change=lambda data: data[:100] + b"\xff" * 3996 + data[4096:]), 1, "malformed"),
    "a page size of nonsense": (export(change=lambda data: data[:16] + b"\x00\x03" + data[18:]), 1, "not a database"),
    "no tables": (export(*(f"DROP TABLE {table}" for table in (KERNELS, CALLS, NVTX, "StringIds")),
                         "DROP TABLE META_DATA_EXPORT"), 1, "no Nsight Systems export"),
    "a foreign table of a hostile name": (
        lambda folder: export_of(folder, f'CREATE TABLE "{ESCAPE}" AS SELECT 1 AS x'), 1, r"\x1b]0;owned"),
    "a table named like SQL": (export('CREATE TABLE "x""; DROP TABLE StringIds; --" AS SELECT 1 AS x'), 0, ""),
    "views instead of tables": (export(
        f"ALTER TABLE {KERNELS} RENAME TO k",
        f"CREATE VIEW {KERNELS} AS WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start FROM n) SELECT * FROM n",
    ), 0, ""),
    "a log beside it": (with_log, 0, ""),
    "a log beside it, cut in its header": (changed_log(lambda log: log[:17]), 0, ""),
    "a log beside it, cut in a frame's header": (changed_log(lambda log: log[:40]), 0, ""),
    "a log beside it, cut in a page": (changed_log(lambda log: log[:-2000]), 0, ""),
    "a log beside it with a page of garbage": (changed_log(lambda log: log[:3000] + b"\xff" * 99 + log[3099:]), 0, ""),
    "a log beside it with the salt of another": (changed_log(lambda log: log[:16] + b"salty!!!" + log[24:]), 0, ""),
    "a log beside it of a page size of 3": (changed_log(lambda log: log[:8] + b"\0\0\0\3" + log[12:]), 0, ""),
    "a log beside it of a page size of 2 GB": (changed_log(lambda log: log[:8] + b"\x80\0\0\0" + log[12:]), 0, ""),
    "a log beside it, and garbage behind": (changed_log(lambda log: log + b"\xff" * 99_999), 0, ""),
    "a log beside it, and the same behind": (changed_log(lambda log: log + log), 0, ""),
    "a log beside it that is text": (changed_log(lambda _: b"killed by signal 9\n" * 999), 0, ""),
    "an index of a log beside it, of garbage": (
        lambda folder: content(b"\xff" * 32768, "x.sqlite-shm")(folder) and with_log(folder), 0, ""),
    "a journal beside it whose head was cleared": (changed_journal(lambda data: bytes(28) + data[28:]), 0, ""),
    "a journal beside it of three bytes": (changed_journal(lambda data: data[:3]), 0, ""),
    "a journal beside it, cut in its page": (changed_journal(lambda data: data[:1000]), 0, ""),
    "a journal beside it for four billion pages": (
        changed_journal(lambda data: data[:16] + b"\xff\xff\xff\xfe" + data[20:]), 0, ""),
    "a partial file of a dead writer beside it": (
        lambda folder: content(b"half", ".x.html.999999.partial")(folder) and export()(folder), 0, ""),
    **{f"a header that knows of {name}": (
        export(change=lambda data, pages=pages: data[:28] + pages + data[32:]), 1, "malformed")
       for name, pages in (("one page", b"\0\0\0\1"), ("four billion pages", b"\xff\xff\xff\xfe"))},
    "a journal beside it": (with_journal(None), 0, ""),
    "a journal that names a file": (with_journal("../canary/precious"), 1, "a transaction over several databases"),
    "a journal that names the input": (with_journal("x.sqlite"), 1, "a transaction over several databases"),
    "a journal that names nothing": (with_journal("../canary/none"), 1, "a transaction over several databases"),
    "a journal that names a file, behind a link": (
        with_journal("../canary/precious", hidden=True), 1, "a transaction over several databases"),
    # SQLite, small and endless
    **{f"a virtual table of {name}": (endless.virtual(table), code, told) for name, table, code, told in (
        ("kernels", KERNELS, 0, ""), ("calls", CALLS, 0, ""), ("ranges", NVTX, 0, ""),
        ("strings", "StringIds", 1, "has a name"))},
    "a view that is noted as a table": (endless.disguised_view(KERNELS, by_name=False), 1, "malformed"),
    "a view behind the name of a table": (endless.disguised_view(KERNELS, by_name=True), 1, "malformed"),
    "a view behind the name of the strings": (endless.disguised_view("StringIds", by_name=True), 1, "malformed"),
    **{f"pages that are shared, of {table}": (endless.shared_pages(table), 1, "pages of it are shared")
       for table in (KERNELS, CALLS, NVTX, "StringIds", "ThreadNames")},
    "pages that are shared, of the metadata": (endless.shared_pages("META_DATA_EXPORT"), 0, ""),
    "pages that are shared, of the session": (endless.shared_pages("TARGET_INFO_SESSION_START_TIME"), 0, ""),
    "pages that are shared, without rows": (
        endless.shared_pages(KERNELS, without_rows=True), 1, "malformed"),
    "kernels whose tree is a ring": (endless.tree_in_a_ring(KERNELS), 1, "malformed"),
    "strings whose tree is a ring": (endless.tree_in_a_ring("StringIds"), 1, "malformed"),
    "strings that share their text": (endless.one_text_everywhere("StringIds", 2, 1), 1, "pages of it are shared"),
    "ranges that share their text": (endless.one_text_everywhere(NVTX, 13, 6), 0, ""),
    "ranges that share their payload": (endless.one_text_everywhere(NVTX, 13, 12), 0, ""),
    "a string of 70 MB": (  # Python 3.10 cannot set the limit; a blob is no name then
        export("INSERT INTO StringIds VALUES (99, zeroblob(70000000))"), int(sys.version_info >= (3, 11)), "too big"),
    "numbers of rows up to the largest": (
        export(f"UPDATE {KERNELS} SET rowid = 9223372036854775807 - rowid"), 0, ""),
    "starts that are computed": (remade(
        KERNELS, f"CREATE TABLE {KERNELS} ({{rest}}, start AS (printf('%.*c', 99999999, 'x')))",
        f'INSERT INTO {KERNELS} ("end") VALUES (5)'), 1, "has no column start"),
    "a column that is computed": (
        export(f"ALTER TABLE {KERNELS} ADD COLUMN more AS (printf('%.*c', 999999999, 'x'))"), 0, ""),
    "triggers": (export(*(
        f"CREATE TRIGGER t{at} {when} ON {KERNELS} BEGIN DELETE FROM {KERNELS}; DELETE FROM StringIds; END"
        for at, when in enumerate(("BEFORE INSERT", "AFTER UPDATE", "AFTER DELETE")))), 0, ""),
    "an index over what is computed": (export(f'CREATE INDEX i ON {KERNELS} (abs(start), "end", deviceId)'), 0, ""),
    "strings without row numbers": (
        remade("StringIds", "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value) WITHOUT ROWID"), 0, ""),
    "kernels without row numbers": (
        remade(KERNELS, f"CREATE TABLE {KERNELS} ({{columns}}, PRIMARY KEY (correlationId, start)) WITHOUT ROWID"),
        0, ""),
    "pages of 512 bytes": (in_pages_of(512), 0, ""),
    "pages of 64 kB": (in_pages_of(65536), 0, ""),
    "a header that says there is a log": (export(change=lambda data: data[:18] + b"\2\2" + data[20:]), 0, ""),
    "a schema of the future": (export(change=lambda data: data[:44] + b"\0\0\0\x63" + data[48:]), 1, "unsupported"),
    "a table of 1,900 columns": (
        export(f"CREATE TABLE wide ({', '.join(f'c{at}' for at in range(1900))})", "INSERT INTO wide (c7) VALUES (1)"),
        0, ""),
    "500 tables": (export(*(f"CREATE TABLE t{at} AS SELECT 1 AS x" for at in range(500))), 0, ""),
    "a table with a name of a million letters": (export(f"CREATE TABLE {'x' * 1_000_000} AS SELECT 1 AS x"), 0, ""),
    # SQLite, long names
    "kernel names of 400 kB that nearly communicate": (long_names("multimem_"), 0, ""),
    "kernel names of 400 kB that begin as NCCL's": (long_names("1nccl"), 0, ""),
    "kernel names of 400 kB in many scopes": (long_names("ab"), 0, ""),
    "kernel names of 400 kB that open brackets": (long_names("(a"), 0, ""),
    "range names of 400 kB of hashes": (long_names("#", NVTX), 0, ""),
    "range names of 400 kB of a framework": (long_names("[Strategy]a", NVTX), 0, ""),
    "range names of 400 kB of fields": (long_names("|a=1", NVTX), 0, ""),
    **{f"a process range with {name} of 1e18": (export(
        f"UPDATE {NVTX} SET textId = NULL, text = 'process|rank={rank}|world={world}' WHERE rowid = 1"), 0, "")
       for name, rank, world in (("a rank", 10**18, 2), ("a world", 0, 10**18), ("both", 10**18 - 1, 10**18))},
    # SQLite, wrong columns
    "kernels without start": (without(KERNELS, "start"), 1, f"{KERNELS} has no column start"),
    "kernels without end": (without(KERNELS, "end"), 1, f"{KERNELS} has no column end"),
    "calls without start": (without(CALLS, "start"), 1, f"{CALLS} has no column start"),
    "ranges without start": (without(NVTX, "start"), 1, f"{NVTX} has no column start"),
    "ranges without kind": (without(NVTX, "eventType"), 1, f"{NVTX} has no column eventType"),
    "ranges without thread": (without(NVTX, "globalTid"), 1, f"{NVTX} has no column globalTid"),
    "strings without values": (without("StringIds", "value"), 1, "has a name"),
    "kernels without correlation": (without(KERNELS, "correlationId"), 0, ""),
    "kernels without process": (without(KERNELS, "globalPid"), 0, ""),
    "metadata without values": (without("META_DATA_EXPORT", "value"), 0, ""),
    # SQLite, wrong values
    "words for times": (export(*retyped(KERNELS, "start", "'soon'")), 1, "start holds something that is no integer"),
    "fractions for times": (export(*retyped(KERNELS, "start", "1.5")), 1, "start holds something that is no integer"),
    "blobs for times": (export(*retyped(KERNELS, "end", "x'ff'")), 1, "end holds something that is no integer"),
    "one word among the times": (
        export(*retyped(KERNELS, "start", "CASE rowid WHEN 3 THEN 'soon' ELSE rowid END")), 1, "no integer"),
    "words for devices": (export(*retyped(KERNELS, "deviceId", "'one'")), 1, "deviceId holds something that is no"),
    "words for the times of ranges": (export(*retyped(NVTX, "start", "'soon'")), 1, "start holds something that is no"),
    "words for threads": (export(*retyped(NVTX, "globalTid", "'main'")), 1, "globalTid holds something"),
    "words for the threads of calls": (export(*retyped(CALLS, "globalTid", "'x'")), 1, "globalTid holds something"),
    "numbers for names of ranges": (export(*retyped(NVTX, "text", "7")), 0, ""),
    "blobs for names of ranges": (export(*retyped(NVTX, "text", "x'ff00'")), 0, ""),
    "numbers for strings": (export(*retyped("StringIds", "value", "7")), 1, "has a name"),
    "blobs for strings": (export(*retyped("StringIds", "value", "x'ff'")), 1, "has a name"),
    "words for ids of strings": (export(*retyped("StringIds", "id", "'x' || rowid")), 1, "has a name"),
    "words for domains": (export(*retyped(NVTX, "domainId", "'x'")), 0, ""),
    "words for ids of names of threads": (export(*retyped("ThreadNames", "nameId", "'x'")), 0, ""),
    "words for threads that have names": (export(*retyped("ThreadNames", "globalTid", "'x'")), 0, ""),
    "a word for the session's start": (
        export(*retyped("TARGET_INFO_SESSION_START_TIME", "utcEpochNs", "'now'")), 0, ""),
    "no starts": (export(f"UPDATE {KERNELS} SET start = NULL"), 1, "none of its 30 activities has a start"),
    "one call without a start": (export(f"UPDATE {CALLS} SET start = NULL WHERE rowid = 3"), 0, ""),
    "one kernel without a start": (export(f"UPDATE {KERNELS} SET start = NULL WHERE rowid = 3"), 0, ""),
    "no ends": (export(f"UPDATE {KERNELS} SET end = NULL"), 0, ""),
    "ends before starts": (export(f"UPDATE {KERNELS} SET end = start - 5"), 0, ""),
    "times below zero": (export(f"UPDATE {KERNELS} SET start = start - 1e9, end = end - 1e9"), 0, ""),
    "the largest of times": (
        export(f"UPDATE {KERNELS} SET end = 9223372036854775807 WHERE rowid = 1"), 1, "impossible times"),
    "the smallest of times": (
        export(f"UPDATE {KERNELS} SET start = -9223372036854775808 WHERE rowid = 1"), 1, "impossible times"),
    "a range of 300 years": (
        export(f"UPDATE {NVTX} SET end = 9223372036854775807 WHERE rowid = 1"), 1, "impossible times"),
    "a kernel of 20 years": (
        export(f"UPDATE {KERNELS} SET end = start + 631152000000000000 WHERE rowid = 1"), 1, "impossible times"),
    "a call at the end of time": (
        export(f"UPDATE {CALLS} SET start = 9223372036854775807 WHERE rowid = 1"), 1, "impossible times"),
    "numbers of devices beyond all bounds": (export(f"UPDATE {KERNELS} SET deviceId = 1 << 62 WHERE rowid = 1"), 0, ""),
    "correlations below zero": (export(f"UPDATE {KERNELS} SET correlationId = -correlationId"), 0, ""),
    "the same correlation everywhere": (export(f"UPDATE {CALLS} SET correlationId = 1"), 0, ""),
    "names that are no UTF-8": (export("UPDATE StringIds SET value = CAST(x'6e63636cff' AS TEXT)"), 0, ""),
    "ranges that are no UTF-8": (export(f"UPDATE {NVTX} SET text = CAST(x'ff41' AS TEXT)"), 0, ""),
    "domains that are no UTF-8": (
        export(f"INSERT INTO {NVTX} (start, eventType, text, globalTid, domainId) "
               "VALUES (1, 75, CAST(x'ff' AS TEXT), 'x', 1), (1, 75, x'ff', 3, 'y')"), 0, ""),
    "names with escape sequences": (
        export(f"UPDATE StringIds SET value = 'nccl{ESCAPE}' || id", f"UPDATE {NVTX} SET text = '{ESCAPE}'"), 0, ""),
    "names with markup": (export("UPDATE StringIds SET value = '[bold]<script>nccl' || id"), 0, ""),
    "names of ten million letters": (
        export("UPDATE StringIds SET value = 'nccl' || hex(zeroblob(5000000)) WHERE rowid = 1"), 0, ""),
    "a version of a million letters": (export(
        "UPDATE META_DATA_EXPORT SET value = hex(zeroblob(500000))"), 0, ""),
    "payloads of depth 10,000": (export(
        "UPDATE StringIds SET value = 'nccl' || value",
        f"UPDATE {NVTX} SET jsonText = '{'[' * 10_000}{']' * 10_000}'"), 0, ""),
    "payloads that are no JSON": (export(
        "UPDATE StringIds SET value = 'nccl' || value", f"UPDATE {NVTX} SET jsonText = '{{'"), 0, ""),
    "payloads that are blobs": (export(
        "UPDATE StringIds SET value = 'nccl' || value", *retyped(NVTX, "jsonText", "x'ff'")), 0, ""),
    # Kineto, broken
    "JSON cut off": (content(json.dumps({"traceEvents": [KERNEL] * 9}).encode()[:-30], "x.json"), 1, "cut off"),
    "gzip cut off": (content(WHOLE_GZIP[:-40], "x.json.gz"), 1, "damaged or cut off"),
    "gzip with a wrong sum": (content(WHOLE_GZIP[:-8] + bytes(8), "x.json.gz"), 1, "damaged or cut off"),
    "gzip with flipped bytes": (
        content(WHOLE_GZIP[:200] + b"\xff\x00\xff" + WHOLE_GZIP[203:], "x.json.gz"), 1, "x.json.gz"),
    "gzip of nothing": (content(gzip.compress(b""), "x.json.gz"), 1, "neither a report of Nsight"),
    "gzip of gzip": (content(gzip.compress(WHOLE_GZIP), "x.json.gz"), 1, "packed twice by gzip"),
    "a gzip bomb": (bomb, 1, "unpacks to more than"),
    "rubbish after gzip": (content(WHOLE_GZIP + b"rubbish", "x.json.gz"), 1, "damaged or cut off"),
    "not UTF-8": (content(b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "\xff"}]}'), 0, ""),
    **{f"a name with {what}": (raw_kernel("name", f'"a{text}b"'), 0, "") for what, text in (
        ("half a letter", r"\ud83d"), ("the other half", r"\ude00"), ("both halves turned round", r"\ude00\ud83d"),
        ("a letter in two halves", r"\ud83d\ude00"), ("a backslash before what looks like half", r"\\ud83d"),
        ("half a letter in capitals", r"\uD83D"), ("half a letter, cut", r"\ud8"))},
    "a range with half a letter": (kineto(MARK | {"name": "step 1\ud83d"}), 0, ""),
    "a rank with half a letter": (kineto(distributedInfo={"rank": "\ud83d", "backend": "\udfff"}), 0, ""),
    "a byte order mark": (content(b"\xef\xbb\xbf" + b'{"traceEvents": []}'), 1, "behind a byte order mark"),
    "25 million empty objects": (endless.repeated(b"{}", 25_000_000), 1, "more objects than one in 24 bytes"),
    "25 million lists in an event": (
        endless.repeated(b"[]", 25_000_000, b'{"ph":"X","args":{"name":[', b"]}}"), 1, "more objects than one in"),
    "10 million objects among what is printed": (
        endless.repeated(b'{"a":1}', 10_000_000, b'],"deviceProperties": [', b'],"x":['), 1, "more objects than one"),
    "few objects, each of nothing": (endless.repeated(b"{}", 10_000), 0, ""),
    "a rank of two billion": (kineto(distributedInfo={"rank": 2**31 - 1, "world_size": 2**31 - 1}), 0, ""),
    "a job of two billion ranks": (kineto(distributedInfo={"rank": 0, "world_size": 2**31 - 1}), 0, ""),
    "a job of 1e18 ranks": (kineto(distributedInfo={"rank": 1, "world_size": 10**18}), 0, ""),
    "a category of a million letters": (kernel(cat="_" * 1_000_000), 0, ""),
    "a thread name of a million letters": (
        kineto({"ph": "M", "name": "thread_name", "tid": 7, "args": {"name": "x" * 1_000_000}}), 0, ""),
    "a stream of a million digits": (kernel(tid="stream " + "9" * 1_000_000), 0, ""),
    "a kernel name of 400 kB that nearly communicates": (kernel(name="multimem_" * 44_000), 0, ""),
    "a kernel name of 400 kB that opens brackets": (kernel(name="(a" * 200_000), 0, ""),
    "a kernel name of 400 kB of one letter": (kernel(name="x<" + "a" * 400_000), 0, ""),
    "a range of 400 kB of hashes": (kineto(KERNEL | {"cat": "user_annotation", "name": "#" * 400_000}), 0, ""),
    "depth 10,000 in an event": (
        raw_kernel("args", '{"x": ' + "[" * 10_000 + "]" * 10_000 + "}"), 1, "nested too deep"),
    "depth 10,000 beside the events": (
        content(b'{"x": ' + b"[" * 10_000 + b"]" * 10_000 + b', "traceEvents": []}'), 1, "nested too deep"),
    "events that are no list": (content(b'{"traceEvents": {"ph": "X"}}'), 1, "Expected `array`"),
    "events that are numbers": (content(b'{"traceEvents": [1, 2]}'), 1, "Expected `object`"),
    "no events key": (content(b'{"schemaVersion": 1}'), 1, "missing required field `traceEvents`"),
    # Kineto, wrong values
    "a word for a time": (kernel(ts="soon"), 1, "traceEvents"),
    "no number for a time": (kernel(ts="nan"), 1, "impossible times"),
    "no number for a time among exact ones": (
        kineto(KERNEL | {"ts": 1790857026000000.1}, KERNEL | {"ts": "nan"}), 1, "impossible times"),
    "no number for a duration among exact times": (
        kineto(KERNEL | {"ts": 1790857026000000.1, "dur": "nan"}), 1, "impossible times"),
    "infinity for a time": (kernel(ts="inf"), 1, "impossible times"),
    "no number for the time of an operator": (cpu(OPERATOR | {"ts": "nan"}), 1, "impossible times"),
    "no number for when a collective was asked for": (
        cpu(OPERATOR | {"name": "c10d::allreduce_", "ts": "nan"}), 1, "impossible times"),
    "buckets beyond all bounds": (
        cpu(MARK | {"name": f"buckets|bytes={'9' * 30},,-1,{'9' * 18}|others=99999999999999999"}, OPERATOR,
            MARK | {"name": "backward", "ts": 5, "dur": 9}, GLOO, GLOO | {"ts": 8}), 0, ""),
    "NaN": (raw_kernel("ts", "NaN"), 1, "malformed"),
    "an exponent beyond all bounds": (raw_kernel("ts", "1e999"), 1, "out of range"),
    "an exponent": (raw_kernel("ts", "1e300"), 1, "impossible times"),
    "a number of 400 digits": (raw_kernel("ts", "9" * 400), 1, "impossible times"),
    "a duration of 30 digits": (raw_kernel("dur", "9" * 30), 1, "impossible times"),
    "null for a time": (kernel(ts=None), 1, "traceEvents"),
    "a duration below zero": (kernel(dur=-5), 0, ""),
    "correlations beyond all bounds": (arguments(correlation=2**80), 0, ""),
    "devices beyond all bounds": (arguments(device=2**80, stream=-(2**80)), 0, ""),
    "sizes beyond all bounds": (
        arguments(**{"Collective name": "allreduce", "In msg nelems": 2**70, "dtype": "Float", "Seq": -1}), 0, ""),
    "grids beyond all bounds": (arguments(grid=[2**80, 1, 1], block=[-1, True, None]), 0, ""),
    "a collective whose name is a list": (arguments(**{"Collective name": ["x"], "Group size": "two"}), 0, ""),
    "words for ids": (kernel(pid="GPU 0", tid="stream 7"), 0, ""),
    "thread ids beyond all bounds": (
        kineto({"ph": "M", "name": "thread_name", "tid": 2**90, "args": {"name": 1}}), 0, ""),
    "a rank that is a word": (kineto(distributedInfo={"rank": "zero", "world_size": [2]}), 0, ""),
    "a rank beyond all bounds": (kineto(distributedInfo={"rank": -(2**80), "world_size": 0}), 0, ""),
    "a base beyond all bounds": (kineto(baseTimeNanoseconds=2**80), 0, ""),
    "a base that is a word": (kineto(baseTimeNanoseconds="x"), 1, "baseTimeNanoseconds"),
    "two files in one gzip": (content(WHOLE_GZIP[:0] + gzip.compress(b'{"traceEvents": [') + gzip.compress(
        json.dumps(NCCL).encode() + b"]}"), "x.json.gz"), 0, ""),
    # reports
    "a report that nsys cannot read": (
        content(b"NVIDIA Tegra Profiler Report 2023@4@4@54-234433681190v0.\n"), 1, "nsys"),
    "a report beside a broken export": (beside_a_report(b"SQLite format 3\0" + bytes(4080)), 1, "x.sqlite"),
    # what lies beside a trace
    **{f"a manifest that lies: {name}": (with_manifest(text), 1, "not a run.json of ddp_prof") for name, (text, _)
       in LIES.items()},
    "a manifest that is empty": (with_manifest(""), 1, "not a run.json of ddp_prof"),
}  # fmt: skip


def export_of(folder: Path, statement: str) -> Path:
    """A database that holds one foreign table."""
    with closing(sqlite3.connect(folder / "x.sqlite")) as database:
        database.execute(statement)
        database.commit()
    return folder / "x.sqlite"


COMMANDS = {
    "overlap": ["--format", "json"],
    "info": ["--format", "json"],
    "collectives": [],
    "skew": [],
    "kernels": [],
    "compare": [],
    "check": ["--min-overlap", "0%"],
    "timeline": ["-o", "OUT/x.html"],
    "export": ["-o", "OUT/x.json"],
    "report": ["-o", "OUT/report"],
}


FEW = ("overlap", "export") if IS_NIGHTLY else ("export",)
"""The commands that read what can be read: one the least of a capture, one the most, which measures it, too."""
BY_EVERY_COMMAND = {
    *("nothing there", "a name with an escape sequence", "text", "a header and zeros", "words for times"),
    *("no ends", "names with escape sequences", "JSON cut off", "a word for a time", "devices beyond all bounds"),
    "a report that nsys cannot read",
}
"""Inputs of each kind, on which all commands run; in a nightly all commands run on all inputs."""
LARGE = {
    *("a gzip bomb", "names of ten million letters", "25 million empty objects", "25 million lists in an event"),
    *("10 million objects among what is printed", "a string of 70 MB"),
}
"""Inputs that take a second to read."""


def commands_for(name: str, code: int) -> list[str]:
    """The commands that run on an input; a report of what can be read takes long."""
    if name in LARGE or not (IS_NIGHTLY or name in BY_EVERY_COMMAND):
        return ["overlap"] if code else [*FEW]
    return [command for command in COMMANDS if code or command != "report"]


def run_on(path: Path, command: str, out: Path) -> Result:
    return run(command, path, *(word.replace("OUT", str(out)) for word in COMMANDS[command]))


def assert_said(result: Result, code: int, told: str) -> None:
    """One line where it cannot be read; else a result, or of ``check`` that a requirement is not met."""
    assert result.exit_code in ({code} if code else {0, 3}), result.stderr or repr(result.exception)
    assert isinstance(result.exception, (SystemExit, type(None)))
    assert "\x1b" not in result.stderr
    if code:
        assert told in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert len(result.stderr) < 1000


MOST_SECONDS, MOST_BYTES = 30, 1 << 30
"""Processor time and memory of one command on one input. If a command waits for ever, pytest's time limit ends it."""


def contents(folder: Path, but: str | None = None) -> dict[str, str]:
    """What lies in a folder and below by name, but in one: digests of files, targets of links, else the kind."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name, kind = str(path.relative_to(folder)), stat.S_IFMT(path.lstat().st_mode)
        if name.partition("/")[0] == but:
            continue
        if kind == stat.S_IFREG:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = str(path.readlink()) if kind == stat.S_IFLNK else oct(kind)
    return found


def put_canary(folder: Path) -> None:
    """Files that nothing has any business with."""
    (folder / "deep").mkdir(parents=True)
    (folder / "precious").write_bytes(b"precious\0")
    (folder / "deep" / "other.run.json").write_text("{}")
    write_capture(folder / "deep" / "other.sqlite", known_truth(1))


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A canary, an own folder of temporary files, and pages that are not five megabytes for their plotly.js."""
    put_canary(folder / "canary")
    (folder / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "temporary"))
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly.js */")


@contextmanager
def bounded() -> Iterator[None]:
    """Fails where what runs within computes long, or much memory at any time."""

    def peak() -> int:
        return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, started = peak(), process_time()
    yield
    assert process_time() - started < MOST_SECONDS
    assert peak() - before < MOST_BYTES


def test_every_command_runs_on_inputs_of_each_kind() -> None:
    assert HOSTILE.keys() >= BY_EVERY_COMMAND


BY_NIGHT = {"strings that share their text", "starts that are computed", "a string of 70 MB"}
"""Inputs that take longest; of what each is, another one tells the same."""


@pytest.mark.parametrize("name", of_which_the_gate_keeps(HOSTILE.keys() - BY_NIGHT, HOSTILE))
def test_hostile_input(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, code, told = HOSTILE[name]
    prepare(tmp_path, monkeypatch)
    assert_answered(make, code, told, commands_for(name, code), tmp_path)


def assert_answered(make: Make, code: int, told: str, commands: Iterable[str], place: Path) -> None:
    """Each command answers, or refuses in one line, and leaves its input as it was."""
    folder, out = place / "in", place / "out"
    folder.mkdir()
    path = make(folder)
    before = contents(place)
    for command in commands:
        with bounded():
            result = run_on(path, command, out)
        assert_said(result, code, told)
        if not code and "json" in COMMANDS[command]:
            json.loads(result.stdout)
    assert contents(place, but="out") == before
    assert not (code and out.exists())


TERABYTE = 10**12
REPORT = b"NVIDIA Tegra Profiler Report 2023@4@4@54-234433681190v0.\n"


def grown(make: Make, name: str | None = None) -> Make:
    """An input one of whose files, by default itself, is a terabyte of holes longer."""

    def make_grown(folder: Path) -> Path:
        path = make(folder)
        with (folder / name if name else path).open("ab") as file:
            file.truncate(file.tell() + TERABYTE)
        return path

    return make_grown


HOLES: dict[str, tuple[Make, int, str]] = {
    "nothing but holes": (grown(content(b"")), 1, "neither a report of Nsight"),
    "an export": (grown(export()), 0, ""),
    "an export whose pages are shared": (grown(endless.shared_pages(KERNELS)), 1, "pages of it are shared"),
    "an export whose header claims all": (
        grown(export(change=lambda data: data[:28] + b"\x0e\x8d\x4a\x51" + data[32:])), 0, ""),
    "a profile": (grown(kineto()), 1, "zeros that were never written"),
    "a packed profile": (grown(kineto(suffix=".json.gz")), 1, "zeros that were never written"),
    "a report": (grown(content(REPORT, "x.nsys-rep")), 1, "nsys"),
    "a log that was never written": (grown(lambda folder: _with_empty(folder, "-wal"), "x.sqlite-wal"), 0, ""),
    "a log, and what follows": (grown(with_log, "x.sqlite-wal"), 0, ""),
    "a log of a salt of zeros": (grown(changed_log(lambda log: log[:16] + bytes(8)), "x.sqlite-wal"), 0, ""),
    "a journal that was never written": (
        grown(lambda folder: _with_empty(folder, "-journal"), "x.sqlite-journal"), 0, ""),
    "a journal, and what follows": (grown(with_journal(None), "x.sqlite-journal"), 0, ""),
    "a manifest": (grown(with_manifest("{}"), "x.run.json"), 1, "a run.json of ddp_prof has at most"),
}  # fmt: skip
"""Files with a size that lies: they take no room on the disk, but would fill it, or the memory, if copied or read."""


def _with_empty(folder: Path, suffix: str) -> Path:
    (folder / f"x.sqlite{suffix}").touch()
    return export()(folder)


@pytest.mark.parametrize("name", HOLES)
def test_a_size_that_lies(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, code, told = HOLES[name]
    folder = tmp_path / "in"
    folder.mkdir()
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    path = make(folder)
    before = {file.name: file.stat() for file in folder.iterdir()}
    with bounded():
        result = run_on(path, "overlap", tmp_path / "out")
    assert_said(result, code, told)
    assert {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in folder.iterdir()} == {
        name: (of.st_size, of.st_mtime_ns) for name, of in before.items()
    }
    assert list(temporary.iterdir()) == []


def test_in_a_folder_the_others_are_read_and_the_one_is_named(tmp_path: Path) -> None:
    grown(kineto())(tmp_path).rename(tmp_path / "lies.json")
    export()(tmp_path)
    result = run("overlap", tmp_path, "--jobs", "2", "--format", "csv")
    assert result.exit_code == 0, result.stderr
    assert "lies.json: damaged or cut off (it holds " in result.stderr
    assert len(result.stdout.splitlines()) == 2


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_lack_of_memory_names_the_file_and_a_way_out(
    jobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kineto()(tmp_path)
    monkeypatch.setattr("ddp_prof.ingest.kineto_document.free_memory", lambda: 100)
    monkeypatch.setattr("ddp_prof.ingest.kineto_document._LEAST_BYTES_TO_DOUBT", 10)
    result = run("overlap", tmp_path, "--jobs", jobs)
    assert_said(result, 1, "x.json: there is not enough memory: its 0.0 GB take several times as much, and 0.0 GB are")
    assert "take a larger machine" in result.stderr


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "there is not enough memory"),
        (ImportError("libarrow.so: failed to map segment from shared object"), "there is not enough memory"),
        (RuntimeError("can't start new thread"), "there is not enough memory"),
        (RecursionError(), "deep"),
    ],
)
def test_a_limit_of_python_names_the_file(
    error: BaseException, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    path = export()(tmp_path)
    monkeypatch.setattr("ddp_prof.ingest.load.load_trace", fail)
    for command in ("overlap", "timeline", "kernels"):
        result = run(command, path, *(["-o", str(tmp_path / "x.html")] if command == "timeline" else []))
        assert_said(result, 1, told)
        assert "x.sqlite: " in result.stderr


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs as root may read everything, so the refusal is the system's stand-in."""
    path = write_capture(tmp_path / "x.sqlite", known_truth(1))

    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    result = run("overlap", path)
    assert (result.exit_code, "x.sqlite: Permission denied: give a file that can be read" in result.stderr) == (1, True)


def test_a_database_that_another_process_has_locked_is_read(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth(1))
    with closing(sqlite3.connect(path)) as database:
        database.execute("BEGIN EXCLUSIVE")
        assert run("overlap", path).exit_code == 0


def test_rows_that_are_only_in_the_log_count(tmp_path: Path) -> None:
    assert len(load_trace(with_log(tmp_path)).activities) < 15
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.sqlite", "x.sqlite-wal"]


@pytest.mark.parametrize("size", [str(2**80), "1e999"])
def test_shapes_beyond_all_bounds_are_not_known(size: str, tmp_path: Path) -> None:
    path = arguments(grid=["SIZE", 1, 1], block=[1, 1, 1])(tmp_path)
    path.write_text(path.read_text().replace('"SIZE"', size))
    shapes = load_trace(path, ReadOptions(with_launches=True)).shape_id
    assert shapes is not None
    assert {*shapes.tolist()} == {-1}


def test_a_table_whose_name_is_no_text_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = export()(tmp_path / "whole")
    names = "UPDATE sqlite_master SET name = CAST(name AS BLOB) WHERE name = 'ThreadNames'"
    path = export("PRAGMA writable_schema = ON", names)(tmp_path)
    assert len(load_trace(path).activities) == len(load_trace(whole).activities)


def test_sizes_at_both_ends_of_the_range_are_told_apart(tmp_path: Path) -> None:
    ends = (
        f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET gridX = {size} WHERE rowid = {row}"
        for row, size in ((1, 2**63 - 1), (2, -(2**63) + 7))
    )
    shapes = load_trace(export(*ends)(tmp_path), ReadOptions(with_launches=True)).shape_id
    assert shapes is not None
    assert len(set(shapes[:3].tolist())) == 3


@pytest.mark.parametrize("version", ["hex(zeroblob(500000))", "char(27) || '[2J'", "NULL", "x'ff'"])
def test_what_is_no_version_is_not_taken_for_one(version: str, tmp_path: Path) -> None:
    assert load_trace(export(f"UPDATE META_DATA_EXPORT SET value = {version}")(tmp_path)).producer is None


def test_a_kernel_without_a_start_is_left_out_and_said(tmp_path: Path) -> None:
    trace = load_trace(export(f"UPDATE {KERNELS} SET start = NULL WHERE rowid = 3")(tmp_path))
    assert len(trace.activities) == 29
    assert "1 of 30 activities has no start and is left out" in trace.warnings


@pytest.mark.parametrize("end", ["NULL", "0", "-1", "start - 1"])
def test_a_kernel_without_an_end_is_told(tmp_path: Path, end: str) -> None:
    trace = load_trace(export(f"UPDATE {KERNELS} SET end = {end} WHERE rowid = 3")(tmp_path))
    assert trace.activities.end_ns[2] == trace.activities.start_ns[2]
    assert "activities that have no end, or one before they start: 1; they count as taking no time" in trace.warnings


def test_many_nested_ranges_take_no_time_that_grows_with_their_square(tmp_path: Path) -> None:
    """Many ranges in each other would take minutes, were every pair of them looked at."""
    depth = 100_000 if IS_NIGHTLY else 30_000
    ranges = [Range("layer", at, 2 * depth - at, 1) for at in range(depth)]
    capture = Capture(kernels=[Kernel("gemm", depth, depth + 5, launch=depth, thread=1)], ranges=ranges)
    trace = load_trace(write_capture(tmp_path / "x.sqlite", capture))
    assert len(trace.spans) == depth


@pytest.mark.parametrize("form", ["table", "markdown"])
@pytest.mark.parametrize("command", ["overlap", "collectives", "skew", "info"])
def test_no_table_passes_an_escape_sequence_on(command: str, form: str, tmp_path: Path) -> None:
    make = HOSTILE["names with escape sequences"][0]
    path = make(tmp_path).rename(tmp_path / f"{ESCAPE}.sqlite")
    result = run(command, str(path), "--format", form)
    assert result.exit_code == 0, result.stderr
    assert "\x1b" not in result.stdout + result.stderr
