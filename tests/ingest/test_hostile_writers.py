"""Names in every encoding, sizes that lie, and writers that died: what each gives, as a table.

The rows of :mod:`.test_hostile` in further kinds. What can be read is also printed by the commands that print names,
and nothing that they print hides or reorders text.
"""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
import struct
import unicodedata
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.command_line import each_read_once, run
from tests.examples import IS_NIGHTLY
from tests.ingest.test_hostile import (
    CALLS,
    KERNEL,
    KERNELS,
    MARK,
    NCCL,
    NVTX,
    PROFILE,
    Make,
    arguments,
    assert_answered,
    changed_journal,
    commands_for,
    content,
    export,
    kernel,
    kineto,
    prepare,
    raw_kernel,
    with_journal,
    with_log,
)

KEEPS_255_BYTES = (0, "") if sqlite3.sqlite_version_info >= (3, 40) else (1, "malformed")
"""What SQLite makes of pages that are shorter than they were when they were written: 3.37 refuses them."""
PAGE = 4096
LONG = 1 << 20


def text(hexadecimal: str) -> str:
    """A TEXT of these bytes, whatever they are."""
    return f"CAST(x'{hexadecimal}' AS TEXT)"


def named_by(value: str) -> Make:
    """An export whose kernels, ranges, domains and threads have such names; of kernels they are still NCCL's."""
    return export(
        f"UPDATE StringIds SET value = 'nccl' || {value} || id",
        f"UPDATE {NVTX} SET textId = NULL, text = {value} || rowid",
        f"INSERT INTO {NVTX} (start, eventType, text, globalTid, domainId) VALUES (1, 75, {value}, 5, 1)",
    )


def spelled(name: str) -> Make:
    """A profile in which everything that has a name has this one, as JSON writes it."""

    def make(folder: Path) -> Path:
        events = [
            KERNEL | {"name": "@"}, NCCL | {"name": "nccl@"}, MARK | {"name": "step @"}, MARK | {"name": "@"},
            *({"ph": "M", "name": f"{what}_{kind}", "pid": 0, "tid": 7, "args": {kind: "@"}}
              for what in ("process", "thread") for kind in ("name", "labels")),
        ]  # fmt: skip
        document = {"traceEvents": events, "trace_name": "@", "deviceProperties": [{"name": "@"}]}
        return content(json.dumps(document).replace("@", name).encode("utf-8", "surrogatepass"), "x.json")(folder)

    return make


def in_utf16(folder: Path) -> Path:
    """The same export, written by a program that keeps its text in UTF-16."""
    path = export()(folder)
    with closing(sqlite3.connect(path)) as old, closing(sqlite3.connect(folder / "new")) as new:
        new.execute("PRAGMA encoding = 'UTF-16le'")
        new.executescript("\n".join(old.iterdump()))
    path.unlink()
    return (folder / "new").rename(path)


def header(at: int, data: bytes) -> Make:
    """An export whose header says something else."""
    return export(change=lambda whole: whole[:at] + data + whole[at + len(data) :])


def zeroed(choose: Callable[[int], range]) -> Make:
    """Pages that were allocated, and never written: those that are chosen of so many."""

    def change(data: bytes) -> bytes:
        pages = [data[at : at + PAGE] for at in range(0, len(data), PAGE)]
        for number in choose(len(pages)):
            pages[number] = bytes(PAGE)
        return b"".join(pages)

    return export(change=change)


def root_of(table: str, data: bytes) -> Make:
    """An export in which the root page of a table begins like this."""

    def make(folder: Path) -> Path:
        path = export()(folder)
        with closing(sqlite3.connect(path)) as database:
            (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        whole = path.read_bytes()
        at = PAGE * (root - 1)
        path.write_bytes(whole[:at] + data + whole[at + len(data) :])
        return path

    return make


def cut_with_journal(keep: int) -> Make:
    """The writer died in a transaction that made the file shorter; its journal is beside it."""

    def make(folder: Path) -> Path:
        path = with_journal(None)(folder)
        path.write_bytes(path.read_bytes()[:keep])
        return path

    return make


def log_without_database(folder: Path) -> Path:
    path = with_log(folder)
    path.write_bytes(b"")
    return path


def log_of_zeros_after(keep: int) -> Make:
    """A log whose later frames were allocated, and never written."""

    def make(folder: Path) -> Path:
        path = with_log(folder)
        log = path.with_name("x.sqlite-wal")
        data = log.read_bytes()
        log.write_bytes(data[:keep] + bytes(len(data) - keep))
        return path

    return make


def json_of(data: bytes) -> Make:
    return content(data, "x.json")


def packed(data: bytes) -> Make:
    return content(data, "x.json.gz")


PACKED = gzip.compress(PROFILE, mtime=0)
WHOLE = json.dumps({"traceEvents": [KERNEL, NCCL, *[MARK] * 50]}).encode()

HOSTILE: dict[str, tuple[Make, int, str]] = {
    # names within an export
    **{f"an export with names that hold {what}": (named_by(text(data)), 0, "") for what, data in (
        ("Latin-1", "6772fcdf65"), ("half a pair of UTF-16", "eda0bd"), ("an overlong letter", "c18172"),
        ("a letter beyond Unicode", "f5808080"), ("a letter that is cut", "e697"), ("UTF-16", "fffe61006200"),
        ("a reversal", "e280ae"), ("isolates that are never closed", "e281a6e281a7e281a8"),
        ("a NUL", "610062"), ("nothing but NULs", "000000"), ("letters without width", "e2808be2808de28094efbbbf"),
        ("a control of Latin-1", "c29b33316d"), ("line separators", "e280a8e280a9c285"),
        ("tags that no one sees", "f3a08181f3a08182"), ("no letter of Unicode", "efbfbff09fbfbe"))},
    "an export with names of a megabyte without a space": (named_by(f"hex(zeroblob({LONG // 2}))"), 0, ""),
    "an export with names of a megabyte of accents": (
        named_by(f"replace(hex(zeroblob({LONG // 8})), '00', char(0x301))"), 0, ""),
    "an export in UTF-16": (in_utf16, 0, ""),
    # names within a profile
    **{f"a profile with names that hold {what}": (spelled(name), code, told) for what, name, code, told in (
        ("a NUL", r"a\u0000b", 0, ""), ("a reversal", r"\u202e", 0, ""), ("isolates", r"\u2066\u2067\u2068", 0, ""),
        ("half a letter", r"\ud83d", 0, ""), ("no letter of Unicode", r"\uffff\ufdd0", 0, ""),
        ("line separators", r"\u2028\u2029\u0085", 0, ""), ("an escape sequence", r"\u001b[2J\u009b2J", 0, ""),
        ("half a letter in its bytes", "\ud83d", 0, ""), ("a megabyte", "x" * LONG, 0, ""),
        ("a line break that is not escaped", "a\nb", 0, ""), ("a tab that is not escaped", "a\tb", 0, ""),
        ("an escape that is none", r"\x41", 0, ""), ("an escape that is cut", r"\u12", 0, ""))},
    # sizes and kinds that lie: SQLite
    "a header that says UTF-16": (header(56, b"\0\0\0\2"), 1, "x.sqlite"),
    "a header of an encoding that there is not": (header(56, b"\0\0\0\x07"), 1, "x.sqlite"),
    "a header whose list of free pages is the schema": (header(32, b"\0\0\0\1\0\0\0\x63"), 0, ""),
    "a header that keeps 255 bytes of each page": (header(20, b"\xff"), *KEEPS_255_BYTES),
    "a header whose pages are 64 kB": (header(16, b"\0\1"), 1, "x.sqlite"),
    "a header that trims itself": (header(52, b"\xff\xff\xff\xff\0\0\0\1"), 0, ""),
    "a root that has 65,535 rows": (root_of(KERNELS, b"\x0d\0\0\xff\xff"), 1, "malformed"),
    "a root that leads to a page beyond the end": (
        root_of(CALLS, b"\x05\0\0\0\1\x0f\0\0\x7f\xff\xff\xff"), 1, "malformed"),
    # sizes and kinds that lie: gzip and JSON
    "gzip that says it unpacks to four billion bytes": (packed(PACKED[:-4] + b"\xff\xff\xff\xff"), 1, "damaged or cut"),
    "gzip that says it unpacks to nothing": (packed(PACKED[:-4] + bytes(4)), 1, "damaged or cut"),
    "gzip with a name that never ends": (packed(PACKED[:3] + b"\x08" + PACKED[4:10] + b"x" * 5000), 1, "x.json.gz"),
    "gzip with more fields than it has bytes": (
        packed(PACKED[:3] + b"\x04" + PACKED[4:10] + b"\xff\xff" + PACKED[10:]), 1, "x.json.gz"),
    "gzip of another method": (packed(PACKED[:2] + b"\x07" + PACKED[3:]), 1, "x.json.gz"),
    "gzip, and zeros behind": (packed(PACKED + bytes(5000)), 0, ""),
    **{f"a duration of {name}": (raw_kernel("dur", value), code, told) for name, value, code, told in (
        ("1e400", "1e400", 1, "out of range"), ("minus 1e400", "-1e400", 1, "out of range"),
        ("2 to the 63rd", str(2**63), 1, "impossible times"), ("minus 2 to the 63rd", str(-(2**63)), 0, ""),
        ("minus nothing", "-0.0", 0, ""), ("1e-400", "1e-400", 0, ""), ("true", "true", 1, "traceEvents"))},
    "a start that is true": (raw_kernel("ts", "true"), 1, "traceEvents"),
    "a start of minus 2 to the 63rd": (raw_kernel("ts", str(-(2**63))), 1, "impossible times"),
    "a process that is a fraction": (raw_kernel("pid", "0.5"), 0, ""),
    "a process of 1e400": (raw_kernel("pid", "1e400"), 1, "out of range"),
    "a process that is true": (kernel(pid=True, tid=False), 0, ""),
    "a rank that is true": (kineto(distributedInfo={"rank": True, "world_size": True}), 0, ""),
    "a rank of one half": (kineto(distributedInfo={"rank": 0.5, "world_size": 1.5}), 0, ""),
    "streams and devices that are truths": (arguments(device=True, stream=False, correlation=True), 0, ""),
    "sizes that are truths": (
        arguments(**{"Collective name": "allreduce", "In msg nelems": True, "dtype": True, "Group size": True}), 0, ""),
    "sizes below zero": (
        arguments(**{"Collective name": "allreduce", "In msg nelems": -5, "dtype": "Float", "Group size": -1}), 0, ""),
    # writers that died
    **{f"JSON that ends {where}": (json_of(data), 1, told) for where, data, told in (
        ("behind a comma", WHOLE[:-2] + b",", "cut off"),
        ("in a letter", WHOLE[:-2] + ', {"name": "é'.encode()[:-1], "x.json"),
        ("in an escape", WHOLE[:-2] + rb', {"name": "\u00', "x.json"),
        ("in a number", WHOLE[:-2] + b', {"ts": 1e', "x.json"),
        ("behind a key", WHOLE[:-2] + b', {"ts":', "cut off"),
        ("in its first key", b'{"traceEve', "neither a report"),
        ("before its last brace", WHOLE[:-1], "cut off"))},
    "JSON, and zeros behind": (json_of(WHOLE + bytes(5000)), 0, ""),
    "JSON with a block of zeros within": (json_of(WHOLE[:300] + bytes(512) + WHOLE[812:]), 1, "x.json"),
    "JSON, and the same behind": (json_of(WHOLE + WHOLE), 1, "x.json"),
    "gzip cut in its header": (packed(PACKED[:7]), 1, "x.json.gz"),
    "gzip cut behind its header": (packed(PACKED[:10]), 1, "x.json.gz"),
    "gzip cut in its sum": (packed(PACKED[:-6]), 1, "damaged or cut off"),
    "gzip of JSON that was cut": (packed(gzip.compress(WHOLE[:-30])), 1, "cut off"),
    "an export cut in its first page, and its journal": (cut_with_journal(2000), 1, "x.sqlite"),
    "an export cut in half, and its journal": (cut_with_journal(5 * PAGE), 1, "malformed"),
    "an export of nothing, and its journal": (cut_with_journal(0), 1, "x.sqlite"),
    "a journal of another export": (
        changed_journal(lambda data: data[:16] + struct.pack(">I", 3) + data[20:]), 1, "malformed"),
    "an export of nothing, and its log": (log_without_database, 1, "x.sqlite"),
    "a log that was allocated": (log_of_zeros_after(0), 0, ""),
    "a log whose frames were allocated": (log_of_zeros_after(32), 0, ""),
    "the last page allocated, never written": (zeroed(lambda pages: range(pages - 1, pages)), 1, "malformed"),
    "all pages but the first allocated, never written": (zeroed(lambda pages: range(1, pages)), 1, "malformed"),
    "the second half allocated, never written": (zeroed(lambda pages: range(pages // 2, pages)), 1, "malformed"),
}  # fmt: skip

LARGE = {name for name in HOSTILE if "megabyte" in name}


def assert_shows_what_it_holds(printed: str) -> None:
    """Nothing hides, reorders or controls text; a letter of an alphabet that joins may."""
    hidden = {letter for letter in printed if unicodedata.category(letter) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}}
    assert hidden <= {"\n"}, {f"U+{ord(letter):04X}" for letter in hidden}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, code, told = HOSTILE[name]
    prepare(tmp_path, monkeypatch)
    assert_answered(make, code, told, ["overlap"] if name in LARGE else commands_for(name, code), tmp_path)


COMMANDS = ("collectives", "kernels", "info", "summary") if IS_NIGHTLY else ("kernels", "info")
"""They print the names of kernels, of processes, of ranges and of the file."""
NAMED = [name for name, (_, code, _) in HOSTILE.items() if "names" in name and not code]


@pytest.mark.parametrize("name", NAMED)
@each_read_once()
def test_names_are_shown_as_text(name: str, tmp_path: Path) -> None:
    path = HOSTILE[name][0](tmp_path)
    for command in COMMANDS:
        result = run(command, path)
        assert result.exit_code == 0, result.stderr
        assert_shows_what_it_holds(result.stdout + result.stderr)
        assert max(map(len, result.stdout.splitlines()), default=0) < 5000
        document = run(command, path, "--format", "json").stdout
        assert not re.search(r"\\u[dD][89a-fA-F]", document.replace("\\\\u", "")) or json.loads(document)
        json.loads(document).__class__  # noqa: B018
        document.encode()
