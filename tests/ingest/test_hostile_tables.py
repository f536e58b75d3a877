"""Broken, hostile and odd folders of tables: what each gives, as a table."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from tests.ingest.test_hostile import (
    CALLS,
    ESCAPE,
    KERNELS,
    NVTX,
    assert_said,
    bounded,
    commands_for,
    contents,
    prepare,
    run_on,
)
from tests.ingest.test_nsys_export import known_truth
from tests.ingest.test_nsys_table_folder import write_tables
from tests.night import of_which_the_gate_keeps
from tests.nsys_factory import write_capture

Change = Callable[[Path], object]


def edited(table: str, change: Callable[[pa.Table], pa.Table]) -> Change:
    """A table changed as pyarrow can."""

    def make(folder: Path) -> None:
        file = next(folder.glob(f"{table}.*"))
        if file.suffix == ".parquet":
            parquet.write_table(change(parquet.read_table(file)), file)
            return
        new = change(ipc.open_stream(file.read_bytes()).read_all())
        with ipc.new_stream(file, new.schema) as stream:
            stream.write_table(new)

    return make


def column(name: str, values: Callable[[int], Any]) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        return table.set_column(table.schema.get_field_index(name), name, [values(table.num_rows)])

    return change


def data(table: str, change: Callable[[bytes], bytes]) -> Change:
    """The bytes of a table changed."""

    def make(folder: Path) -> None:
        file = next(folder.glob(f"{table}.*"))
        file.write_bytes(change(file.read_bytes()))

    return make


def instead(table: str, make: Callable[[Path], object]) -> Change:
    """Something else under the name of a table."""

    def change(folder: Path) -> None:
        file = next(folder.glob(f"{table}.*"))
        file.unlink()
        make(file)

    return change


def named(old: str, new: str) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.rename_columns([new if name == old else name for name in table.column_names])


def of_a_hostile_name(folder: Path) -> None:
    strings = next(folder.glob("StringIds.*"))
    shutil.copy(strings, folder / f'NVTX_"; DROP TABLE StringIds; --{ESCAPE}{strings.suffix}')


HUGE = 1 << 62
HOSTILE: dict[str, tuple[Change, int, str]] = {
    "as it is": (lambda _: None, 0, ""),
    "an empty table": (data(KERNELS, lambda _: b""), 1, f"{KERNELS}."),
    "zeros": (data(NVTX, lambda _: bytes(5000)), 1, f"{NVTX}."),
    "cut in half": (data(KERNELS, lambda content: content[: len(content) // 2]), 1, f"{KERNELS}."),
    "the last byte missing": (data(NVTX, lambda content: content[:-9]), 1, f"{NVTX}."),
    "the first byte missing": (data(CALLS, lambda content: content[1:]), 1, f"{CALLS}."),
    "garbage in the middle": (
        data(NVTX, lambda content: content[:200] + b"\xff" * 400 + content[600:]), 1, f"{NVTX}."),
    "a database": (data(NVTX, lambda _: b"SQLite format 3\0" + bytes(4080)), 1, f"{NVTX}."),
    "a folder": (instead(KERNELS, Path.mkdir), 1, f"{KERNELS}."),
    "a pipe that nobody writes to": (instead(KERNELS, os.mkfifo), 1, "not a regular file"),
    "a link to itself": (instead(KERNELS, lambda file: file.symlink_to(file.name)), 1, f"{KERNELS}."),
    "a link to nothing": (instead(CALLS, lambda file: file.symlink_to("none")), 1, "No such file"),
    "a link to its folder": (instead(CALLS, lambda file: file.symlink_to(".")), 1, f"{CALLS}."),
    "the strings missing": (lambda folder: next(folder.glob("StringIds.*")).unlink(), 1, "a folder without traces"),
    "the kernels missing": (lambda folder: next(folder.glob(f"{KERNELS}.*")).unlink(), 0, ""),
    "all but the strings missing": (
        lambda folder: [file.unlink() for file in folder.iterdir() if file.stem != "StringIds"], 0, ""),
    "a table of a hostile name": (of_a_hostile_name, 0, ""),
    "no starts": (edited(KERNELS, lambda table: table.drop_columns(["start"])), 1, f"{KERNELS} has no column start"),
    "no threads": (edited(NVTX, lambda table: table.drop_columns(["globalTid"])), 1, f"{NVTX} has no column"),
    "no columns": (edited(KERNELS, lambda table: table.select([])), 0, ""),
    "no rows": (edited(KERNELS, lambda table: table.slice(0, 0)), 0, ""),
    "a column that differs in case": (
        edited(KERNELS, lambda table: table.append_column("START", table["end"])), 1, f"{KERNELS}."),
    "a column of a hostile name": (
        edited(KERNELS, named("deviceId", f'x" INTEGER); DROP TABLE StringIds; --{ESCAPE}')), 0, ""),
    "a column without a name": (edited(KERNELS, named("deviceId", "")), 0, ""),
    "words for times": (edited(KERNELS, column("start", lambda n: pa.array(["soon"] * n))), 1, "no integer"),
    "fractions for times": (edited(KERNELS, column("start", lambda n: pa.array([1.5] * n))), 1, "no integer"),
    "no numbers for times": (
        edited(KERNELS, column("start", lambda n: pa.array([float("nan")] * n))), 1, "none of its 30 activities"),
    "truths for times": (edited(KERNELS, column("start", lambda n: pa.array([True] * n))), 1, "has no column start"),
    "lists for times": (edited(KERNELS, column("start", lambda n: pa.array([[1]] * n))), 1, "has no column start"),
    "dates for times": (
        edited(KERNELS, column("start", lambda n: pa.array([1] * n, pa.timestamp("ns")))), 1, "has no column start"),
    "nothing for times": (edited(KERNELS, column("start", lambda n: pa.nulls(n, pa.int64()))), 1, "none of its"),
    "nothing of no kind for times": (edited(KERNELS, column("start", lambda n: pa.nulls(n))), 1, "has no column start"),
    "unsigned times beyond all bounds": (
        edited(KERNELS, column("end", lambda n: pa.array([2**64 - 1] * n, pa.uint64()))), 0, ""),
    "times of eight bits": (edited(KERNELS, column("start", lambda n: pa.array([7] * n, pa.int8()))), 0, ""),
    "the largest of times": (edited(KERNELS, column("end", lambda n: pa.array([2 * HUGE - 1] * n))), 1, "impossible"),
    "numbers for strings": (edited("StringIds", column("value", lambda n: pa.array([7] * n))), 1, "has a name"),
    "blobs for strings": (edited("StringIds", column("value", lambda n: pa.array([b"\xff"] * n))), 1, "name"),
    "strings of four million letters": (
        edited("StringIds", column("value", lambda n: pa.array(["nccl" * 1_000_000] * n))), 0, ""),
    "strings with escape sequences": (
        edited("StringIds", column("value", lambda n: pa.array([f"nccl{ESCAPE}"] * n))), 0, ""),
}  # fmt: skip


def same_rows(table: str, rows: int, **changes: Any) -> Change:
    """The first row, so many times; Parquet packs it into nothing."""

    def make(folder: Path) -> None:
        file = folder / f"{table}.parquet"
        first = parquet.read_table(file).slice(0, 1)
        for name, value in changes.items():
            first = first.set_column(first.schema.get_field_index(name), name, [pa.array([value])])
        block = pa.Table.from_arrays(
            [pa.repeat(first[name][0], 100_000) for name in first.column_names], schema=first.schema
        )
        with parquet.ParquetWriter(file, first.schema) as writer:
            for _ in range(rows // 100_000):
                writer.write_table(block)

    return make


def much_text(folder: Path) -> None:
    """200 kB of names in a table of 2 MB, each of its rows with all of them."""
    file = folder / f"{NVTX}.parquet"
    table, rows = parquet.read_table(file).slice(0, 1), 20_000
    columns = {name: pa.repeat(table[name][0], rows) for name in table.column_names}
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["x" * 200_000]))
    columns |= {"text": text, "start": pa.array(np.random.default_rng(0).integers(0, 1 << 30, rows))}
    parquet.write_table(pa.table(columns), file)


def many_columns(folder: Path) -> None:
    zeros = pa.repeat(pa.scalar(0), 100_000)
    parquet.write_table(pa.table({f"c{at}": zeros for at in range(500)}), folder / "NVTX_MORE.parquet")


def offsets(change: Callable[[Any], None], kind: pa.DataType = pa.string()) -> Change:  # noqa: B008
    """Where each string lies in its buffer, changed."""

    def make(folder: Path) -> None:
        file = folder / "StringIds.arrow"
        table = ipc.open_stream(file.read_bytes()).read_all()
        strings = table["value"].combine_chunks().cast(kind)
        width = np.int64 if pa.types.is_large_string(kind) else np.int32
        before = np.frombuffer(strings.buffers()[1], width)[: len(strings) + 1]
        found = before.copy()
        change(found)
        table = pa.table({"id": table["id"], "value": strings})
        with ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        assert before.tobytes() in file.read_bytes()
        file.write_bytes(file.read_bytes().replace(before.tobytes(), found.tobytes()))

    return make


def at(row: int, value: int) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        found[row] = value

    return change


def packed(table: str, columns: Callable[[], dict[str, pa.Array]], times: int = 1) -> Change:
    """A table that is little until it is unpacked; it is made by its test alone, for it may fill a gigabyte."""

    def make(folder: Path) -> None:
        read = pa.table(columns())
        file, options = folder / f"{table}.arrow", ipc.IpcWriteOptions(compression="zstd")
        with ipc.new_stream(file, read.schema, options=options) as stream:
            for _ in range(times):
                stream.write_table(read)

    return make


def as_the_other_kind(table: str) -> Change:
    def make(folder: Path) -> None:
        read = parquet.read_table(folder / f"{table}.parquet")
        with ipc.new_stream(folder / f"{table}.arrow", read.schema) as stream:
            stream.write_table(read)

    return make


OF_ONE_KIND: dict[str, tuple[str, Change, int, str]] = {
    "3 million rows of kernels": ("parquet", same_rows(KERNELS, 3_000_000), 1, "3,000,000 rows in"),
    "3 million rows of strings": ("parquet", same_rows("StringIds", 3_000_000), 1, "3,000,000 rows in"),
    "3 million rows of calls": ("parquet", same_rows(CALLS, 3_000_000), 1, "3,000,000 rows in"),
    "500 columns in many rows": ("parquet", many_columns, 1, "100,000 rows in"),
    "4 GB of text, held once": ("parquet", much_text, 0, ""),
    **{f"the table {table} of both kinds": (
        "parquet", as_the_other_kind(table), 1, "the table is there as Parquet and as Arrow")
       for table in ("StringIds", "ThreadNames", KERNELS)},
    "200 million numbers in 10 kB": (
        "arrow", packed("NVTX_MORE", lambda: {"start": pa.repeat(pa.scalar(0), 1_000_000)}, 200), 1,
        "unpacks to 1,600,000,0"),
    "a string of a gigabyte in 100 kB": (
        "arrow", packed("NVTX_MORE", lambda: {"text": pa.array(["x" * 1_000_000_000])}), 1, "unpacks to 1,000,000,0"),
    "a table that is packed": ("arrow", packed("NVTX_MORE", lambda: {"start": pa.repeat(pa.scalar(0), 100)}), 0, ""),
    "strings that begin beyond the file": ("arrow", offsets(at(2, 1 << 30)), 1, "out of bounds"),
    "strings that end beyond the file": ("arrow", offsets(at(-1, 1 << 20)), 1, "StringIds.arrow"),
    "strings that begin before the file": ("arrow", offsets(at(0, -4096)), 1, "StringIds.arrow"),
    "strings that end before they begin": ("arrow", offsets(at(3, 0)), 1, "StringIds.arrow"),
    "large strings that begin beyond the file": (
        "arrow", offsets(at(2, 1 << 40), pa.large_string()), 1, "out of bounds"),
    "large strings that end beyond the file": (
        "arrow", offsets(at(-1, 1 << 50), pa.large_string()), 1, "StringIds.arrow"),
    "strings that are no UTF-8": (
        "arrow", data("StringIds", lambda content: content.replace(b"gemm", b"\xff\xfemm")), 0, ""),
}  # fmt: skip
KINDS = ("parquet", "arrow")
ROWS = [(name, kind, *row) for name, row in HOSTILE.items() for kind in KINDS]
ROWS += [(name, *row) for name, row in OF_ONE_KIND.items()]
LONG = {"a string of a gigabyte in 100 kB", "3 million rows of strings", "3 million rows of calls"}
IN_THE_GATE = [
    (name, kind, *row)
    for at, (name, row) in enumerate(HOSTILE.items())
    for kind in (KINDS if at < 7 else KINDS[at % 2 :][:1])
]
IN_THE_GATE += [(name, *row) for name, row in OF_ONE_KIND.items() if name not in LONG]
"""What is damaged in both kinds; what pyarrow changed in one of them, in turns."""


@pytest.mark.parametrize(
    ("name", "kind", "change", "code", "told"),
    of_which_the_gate_keeps(IN_THE_GATE, ROWS),
    ids=[f"{row[0]}-{row[1]}" for row in ROWS],
)
def test_hostile_tables(
    name: str, kind: str, change: Change, code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path, monkeypatch)
    export = write_capture(tmp_path / "x.sqlite", known_truth(2))
    folder = write_tables(export, tmp_path / "x_pqtdir", kind)
    change(folder)
    before = contents(tmp_path)
    for command in commands_for(name, code):
        with bounded():
            result = run_on(folder, command, tmp_path / "out")
        assert_said(result, code, told)
        assert not code or (f"Error: {folder}" in result.stderr and len(result.stderr.split(": ")) > 3)
    assert contents(tmp_path, but="out") == before
    assert not (code and (tmp_path / "out").exists())
