"""Broken, hostile and odd folders of tables: what each gives, as a table, by every command."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from tests.ingest.nsys.test_sqlite_export import known_truth
from tests.ingest.nsys.test_table_folder import write_tables
from tests.ingest.test_hostile import CALLS, COMMANDS, ESCAPE, FEW, KERNELS, NVTX, assert_said, contents, run_on
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
    "a link to nothing": (instead(CALLS, lambda file: file.symlink_to("none")), 1, f"{CALLS}."),
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


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tables(name: str, kind: str, tmp_path: Path) -> None:
    change, code, told = HOSTILE[name]
    export = write_capture(tmp_path / "x.sqlite", known_truth(2))
    folder = write_tables(export, tmp_path / "x_pqtdir", kind)
    change(folder)
    before = contents(folder)
    for command in COMMANDS if code and kind == "parquet" else FEW:  # all read both kinds in one way
        result = run_on(folder, command, tmp_path / "out")
        assert_said(result, code, told)
        assert not code or (f"Error: {folder}" in result.stderr and len(result.stderr.split(": ")) > 3)
    assert contents(folder) == before
    if code:
        assert not list((tmp_path / "out").rglob("*"))
