"""Columns grow in memory or in a file; what they hold is the same."""

from __future__ import annotations

import errno
import io
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_prof import growing_column
from ddp_prof.growing_column import GrowingColumn, in_file, in_order, in_parts, joined
from ddp_prof.ingest import sqlite_pages
from ddp_prof.table import translate
from tests.command_line import run
from tests.conftest import ROOT
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import write_capture

LONG = 80
"""Steps of a capture whose tables take more than a page."""
BATCHES = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), max_size=8)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_column, "MOST_ROWS_IN_MEMORY", 4)
    monkeypatch.setattr(growing_column, "_PART_ROWS", 3)
    monkeypatch.setattr(growing_column, "_FEW_ROWS", 2)


def grow(batches: list[list[int]]) -> GrowingColumn:
    column = GrowingColumn()
    for batch in batches:
        column.add(np.array(batch, np.int64))
    return column


def flat(batches: list[list[int]]) -> list[int]:
    return [value for batch in batches for value in batch]


@given(BATCHES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_column_in_a_file_holds_what_a_list_does(batches: list[list[int]]) -> None:
    assert grow(batches).values().tolist() == flat(batches)


@given(BATCHES, st.integers(0, 6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_where_the_disk_fills_up_it_goes_on_in_memory(batches: list[list[int]], most_bytes: int) -> None:
    """The last write takes a part of the bytes only, as on a real disk."""
    real = tempfile.TemporaryFile

    class Full:
        def __init__(self, **options: object) -> None:
            self.file, self.left = real(buffering=0), 8 * most_bytes + 3

        def write(self, data: memoryview) -> int:
            if not self.left:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = self.file.write(data[: self.left])
            self.left -= written
            return written

        def __enter__(self) -> object:
            return self.file.__enter__()

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def fileno(self) -> int:
            return self.file.fileno()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", Full)
        assert grow(batches).values().tolist() == flat(batches)


def test_a_system_that_reads_little_at_a_time_loses_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of Linux reads 2 GiB at most, and a column that moves from a full disk into memory may be longer."""
    real = tempfile.TemporaryFile

    class ShortReads(io.FileIO):
        def __init__(self, **options: object) -> None:
            with real(buffering=0) as file:
                super().__init__(os.dup(file.fileno()), "r+")

        def write(self, data: Any) -> int:
            if os.fstat(self.fileno()).st_size >= 8 * 6:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

        def read(self, size: int | None = -1) -> bytes:
            return super().read(16)

    monkeypatch.setattr(tempfile, "TemporaryFile", ShortReads)
    assert grow([[1, 2, 3, 4], [5], [6], [7], [8]]).values().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_file_that_grows_leaves_others_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk had room when the first rows were written; columns that grow side by side take it."""
    free = iter([growing_column.LEAST_FREE_BYTES] * 2)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _folder: SimpleNamespace(free=next(free, growing_column.LEAST_FREE_BYTES - 1))
    )
    column = grow([[1, 2, 3, 4], [5], [6], [7]])
    assert column._file is None
    assert column.values().tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_no_address_space_for_a_file_is_a_lack_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of ``ulimit -v``, or of a system that promises no more memory than it has."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    path = write_capture(tmp_path / "x.sqlite", known_truth(LONG))
    monkeypatch.setattr(sqlite_pages, "BATCH_BYTES", 1)  # of a page each
    monkeypatch.setattr(mmap, "mmap", refuse)
    found = run("overlap", path)
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr.startswith(f"Error: {path}: there is not enough memory")


@pytest.mark.parametrize("why", ["no folder", "little room"])
def test_without_room_for_a_file_it_stays_in_memory(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_folder() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    if why == "no folder":
        monkeypatch.setattr(tempfile, "gettempdir", no_folder)
    else:
        monkeypatch.setattr(
            shutil, "disk_usage", lambda _folder: SimpleNamespace(free=growing_column.LEAST_FREE_BYTES - 1)
        )
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_options: pytest.fail("a file was opened"))
    assert grow([[1, 2, 3, 4], [5], [6]]).values().tolist() == [1, 2, 3, 4, 5, 6]
    assert joined([np.arange(3), np.arange(3)]).tolist() == [0, 1, 2, 0, 1, 2], "nor where its length is known before"


def test_what_is_returned_can_be_changed_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    values = grow([[1, 2, 3, 4], [5], [6]]).values()
    values[5] = 7
    assert values.tolist() == [1, 2, 3, 4, 5, 7]
    assert list(tmp_path.iterdir()) == []


def test_a_column_that_will_be_long_is_in_its_file_from_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    real, opened = tempfile.TemporaryFile, []
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: opened.append(options) or real(**options))
    GrowingColumn(4).add(np.arange(4))
    assert not opened
    GrowingColumn(5).add(np.arange(1))
    assert len(opened) == 1


@given(BATCHES, st.randoms(use_true_random=False))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_long_column_is_put_in_order_like_a_short_one(batches: list[list[int]], random: object) -> None:
    values = np.array(flat(batches), np.int64)
    order = np.random.default_rng(random.randrange(99)).permutation(len(values))  # type: ignore[attr-defined]
    assert in_order(values, order).tolist() == values[order].tolist()


@given(BATCHES, st.integers(-5, 5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_long_column_is_computed_in_parts_like_a_short_one_at_once(batches: list[list[int]], more: int) -> None:
    values = np.array(flat(batches), np.int64) // 2
    assert in_parts(len(values), lambda rows: values[rows] + more).tolist() == (values + more).tolist()
    assert in_file(values).tolist() == values.tolist()
    assert joined([values, values[:1]]).tolist() == [*values, *values[:1]]


@given(st.lists(st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1)), max_size=9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_value_of_a_column_is_translated_once(values: list[int]) -> None:
    asked: list[int] = []

    def number_of(value: int) -> int:
        asked.append(value)
        return len(asked)

    found = translate(np.array(values, np.int64), number_of).tolist()
    assert asked == sorted(set(values)), "in ascending order"
    assert found == [1 + asked.index(value) for value in values]


def test_a_capture_whose_columns_are_in_files_is_measured_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, opened = tempfile.TemporaryFile, []
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: opened.append(options) or real(**options))
    monkeypatch.setattr(sqlite_pages, "BATCH_BYTES", 1)  # of a page each
    path = write_capture(tmp_path / "x.sqlite", known_truth(LONG))
    found = run("overlap", path, "--format", "json")
    assert opened, "columns are in files"
    monkeypatch.setattr(growing_column, "MOST_ROWS_IN_MEMORY", 1 << 22)
    assert found.exit_code == 0, found.stderr
    assert found.stdout == run("overlap", path, "--format", "json").stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_command_that_is_stopped_leaves_no_file(tmp_path: Path, number: int, code: int) -> None:
    """The files of columns have no names, so that the system deletes them whatever ends the program."""
    path, temporary = write_capture(tmp_path / "x.sqlite", known_truth(LONG)), tmp_path / "temporary"
    temporary.mkdir()
    program = (
        "import os, tempfile\n"
        "from ddp_prof.cli import main\n"
        "from ddp_prof import growing_column\n"
        "from ddp_prof.ingest import sqlite_pages\n"
        "growing_column.MOST_ROWS_IN_MEMORY, sqlite_pages.BATCH_BYTES, real = 4, 1, tempfile.TemporaryFile\n"
        "opened = []\n"
        "def watched(**options):\n"
        "    opened.append(0)\n"
        f"    if len(opened) == 3: print('in files', flush=True); os.kill(os.getpid(), {int(number)})\n"
        "    return real(**options)\n"
        "tempfile.TemporaryFile = watched\n"
        "main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, "overlap", path],
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (code, "in files\n"), ended.stderr
    assert ended.stderr.count("\n") <= 1
    assert list(temporary.iterdir()) == []
