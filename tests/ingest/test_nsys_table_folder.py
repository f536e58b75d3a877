"""Exports as a folder of tables: the same trace as from SQLite."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from ddp_prof.errors import TraceError
from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.load import find_traces, load_trace
from ddp_prof.ingest.table_folder import _is_valid
from ddp_prof.trace import Trace
from tests.command_line import run
from tests.conftest import ROOT
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import GENERATIONS, Capture, Kernel, Range, write_capture


def write_tables(export: Path, folder: Path, kind: str) -> Path:
    """A folder as nsys writes it: identifiers of threads and processes are unsigned there."""
    folder.mkdir()
    with closing(sqlite3.connect(f"file:{export}?mode=ro", uri=True)) as database:
        for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            cursor = database.execute(f'SELECT * FROM "{name}"')
            columns = [column[0] for column in cursor.description]
            rows = cursor.fetchall()
            arrays = [pa.array([row[at] for row in rows]) for at in range(len(columns))]
            arrays = [
                array.view(pa.uint64()) if pa.types.is_int64(array.type) and column.startswith("global") else array
                for column, array in zip(columns, arrays, strict=True)
            ]
            table = pa.table(dict(zip(columns, arrays, strict=True)))
            if kind == "parquet":
                parquet.write_table(table, folder / f"{name}.parquet")
            else:
                with ipc.new_stream(folder / f"{name}.arrow", table.schema) as stream:
                    stream.write_table(table)
    return folder


def assert_same(one: Trace, other: Trace) -> None:
    for field in fields(one):
        if field.name in ("path", "source"):
            continue
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if hasattr(mine, "__dataclass_fields__") and not isinstance(mine, type) and field.name != "manifest":
            for column in fields(mine):
                assert np.array_equal(getattr(mine, column.name), getattr(theirs, column.name)), column.name
        elif isinstance(mine, np.ndarray):
            assert np.array_equal(mine, theirs), field.name
        else:
            assert mine == theirs, field.name


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("product", GENERATIONS)
def test_the_trace_is_that_of_the_database(tmp_path: Path, product: str, kind: str) -> None:
    export = write_capture(tmp_path / "x.sqlite", known_truth(2), product)
    folder = write_tables(export, tmp_path / "x_pqtdir", kind)
    trace = load_trace(folder, ReadOptions(with_launches=True))
    assert (trace.path, trace.source) == (folder, "nsys-tables")
    assert_same(trace, load_trace(export, ReadOptions(with_launches=True)))


def test_text_as_other_programs_write_it_is_text(tmp_path: Path) -> None:
    export = write_capture(tmp_path / "x.sqlite", known_truth())
    folder = write_tables(export, tmp_path / "x_pqtdir", "parquet")
    for file in folder.iterdir():
        table = parquet.read_table(file)
        types = [pa.large_string() if pa.types.is_string(kind) else kind for kind in table.schema.types]
        parquet.write_table(table.cast(pa.schema(zip(table.schema.names, types, strict=True))), file)
    assert_same(load_trace(folder), load_trace(export))


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64(), pa.int32()], ids=str)
def test_a_number_that_is_missing_or_none_is_no_value(kind: pa.DataType) -> None:
    """As other programs write numbers: pandas makes floats of a column of integers of which some are missing."""
    nothing = None if pa.types.is_integer(kind) else np.float16("nan")
    number = np.float16 if pa.types.is_float16(kind) else int  # older pyarrow takes no other number for it
    column = pa.array([number(1), None, nothing, number(0), nothing, number(7), None], kind, from_pandas=False)
    assert _is_valid(column).tolist() == [True, False, False, True, False, True, False]
    assert _is_valid(column.slice(3, 3)).tolist() == [True, False, True]
    assert _is_valid(column.slice(1, 2)).tolist() == [False, False]
    assert _is_valid(column.slice(0, 0)).tolist() == []


def test_what_is_wrong_within_is_said_of_the_folder(tmp_path: Path) -> None:
    folder = write_tables(write_capture(tmp_path / "x.sqlite", known_truth()), tmp_path / "x_pqtdir", "parquet")
    strings = parquet.read_table(folder / "StringIds.parquet")
    parquet.write_table(strings.slice(0, 0), folder / "StringIds.parquet")
    with pytest.raises(TraceError, match=r"none of its .* kernels has a name") as caught:
        load_trace(folder)
    assert caught.value.path == folder


def test_a_real_capture_with_its_run_json(tmp_path: Path) -> None:
    for name in ("overlap.sqlite", "overlap.run.json"):
        shutil.copy(ROOT / "traces" / name, tmp_path)
    folder = write_tables(tmp_path / "overlap.sqlite", tmp_path / "overlap_arwdir", "arrow")
    trace, whole = load_trace(folder), load_trace(tmp_path / "overlap.sqlite")
    assert trace.manifest == whole.manifest is not None
    assert_same(trace, replace(whole, launching_calls=trace.launching_calls))


def test_a_folder_of_traces_lists_it_and_it_is_no_folder_of_traces_itself(tmp_path: Path) -> None:
    export = write_capture(tmp_path / "x.sqlite", known_truth())
    folder = write_tables(export, tmp_path / "y_pqtdir", "parquet")
    assert find_traces(folder) == [folder]
    assert find_traces(tmp_path) == [export, folder]


def test_a_damaged_table_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    folder = write_tables(write_capture(tmp_path / "x.sqlite", known_truth()), tmp_path / "y_pqtdir", "parquet")
    table = folder / "NVTX_EVENTS.parquet"
    table.write_bytes(table.read_bytes()[:100])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(TraceError, match=r"NVTX_EVENTS\.parquet: cannot be read \("):
        load_trace(folder)
    done = run("overlap", str(folder))
    assert (done.exit_code, done.output.count("\n")) == (1, 1)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.slow
def test_the_command_line_reads_it_by_two_processes(tmp_path: Path) -> None:
    export = write_capture(tmp_path / "x.sqlite", known_truth())
    folder = write_tables(export, tmp_path / "y_arwdir", "arrow")
    shutil.copytree(folder, tmp_path / "z_arwdir")
    command = ["overlap", str(folder), str(tmp_path / "z_arwdir"), "--format", "csv", "--separate"]
    by_two, by_one = (run(*command, "--jobs", jobs) for jobs in ("2", "1"))
    assert (by_two.exit_code, by_two.stdout) == (0, by_one.stdout), by_two.output
    assert by_two.stdout.count("\n") == 3


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_text_that_is_held_once_and_referred_to_is_text(kind: str, tmp_path: Path) -> None:
    export = write_capture(tmp_path / "x.sqlite", known_truth(2))
    folder = write_tables(export, tmp_path / "x_pqtdir", kind)
    file = folder / f"StringIds.{kind}"
    read = parquet.read_table(file) if kind == "parquet" else ipc.open_stream(file.read_bytes()).read_all()
    packed = read.set_column(1, "value", read["value"].dictionary_encode())
    if kind == "parquet":
        parquet.write_table(packed, file)
    else:
        with ipc.new_stream(file, packed.schema) as stream:
            stream.write_table(packed)
    assert_same(load_trace(folder), load_trace(export))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_what_nsys_itself_reports_is_told(kind: str, tmp_path: Path) -> None:
    """The table was not read from a folder, so that lost events were told of with the database alone."""
    export = write_capture(tmp_path / "x.sqlite", known_truth())
    with closing(sqlite3.connect(export)) as database, database:
        database.execute("CREATE TABLE DIAGNOSTIC_EVENT (severity INTEGER, text TEXT)")
        database.execute("INSERT INTO DIAGNOSTIC_EVENT VALUES (2, 'Some events were lost')")
    folder = write_tables(export, tmp_path / "x_pqtdir", kind)
    assert "nsys itself reports: 'Some events were lost'" in load_trace(folder).warnings
    assert_same(load_trace(folder), load_trace(export))


def test_more_than_127_texts_may_be_referred_to_by_eight_bits(tmp_path: Path) -> None:
    """Other programs number few texts by unsigned integers of eight bits."""
    export = write_capture(
        tmp_path / "x.sqlite",
        Capture(
            [Kernel("gemm", 1, 2, launch=None, thread=100)], [Range(f"step {at}", at, at + 1, 100) for at in range(200)]
        ),
    )
    folder = write_tables(export, tmp_path / "x_arwdir", "arrow")
    file = folder / "NVTX_EVENTS.arrow"
    read = ipc.open_stream(file.read_bytes()).read_all()
    assert read["text"].null_count == 0
    packed = read["text"].combine_chunks().cast(pa.dictionary(pa.uint8(), pa.string()))
    with ipc.new_stream(
        file, read.schema.set(read.schema.get_field_index("text"), pa.field("text", packed.type))
    ) as to:
        to.write_table(read.set_column(read.schema.get_field_index("text"), "text", packed))
    assert_same(load_trace(folder), load_trace(export))


def test_no_folder_for_temporary_files_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tables(write_capture(tmp_path / "x.sqlite", known_truth()), tmp_path / "x_pqtdir", "parquet")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert len(load_trace(folder).activities)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_pandas_is_not_imported(kind: str, tmp_path: Path) -> None:
    """It took as long as reading 800,000 rows: pyarrow's conversions from and to NumPy import it."""
    folder = write_tables(write_capture(tmp_path / "x.sqlite", known_truth()), tmp_path / "x_pqtdir", kind)
    program = (
        "import pathlib, sys\n"
        "from ddp_prof.ingest.load import load_trace\n"
        f"load_trace(pathlib.Path({str(folder)!r}))\n"
        "print('pandas' in sys.modules)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
