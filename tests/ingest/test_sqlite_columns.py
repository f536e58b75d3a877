"""Columns out of SQLite, read some rows at a time."""

from __future__ import annotations

import os
import signal
import sqlite3
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from threading import Timer
from time import sleep
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.errors import TraceError
from ddp_prof.ingest import export_tables, sqlite_columns
from ddp_prof.ingest.enrich import UNNAMED_RANGE
from ddp_prof.ingest.export_tables import gather_batches
from ddp_prof.ingest.load import load_trace
from ddp_prof.ingest.sqlite_columns import open_sqlite
from ddp_prof.trace import UNKNOWN
from tests.nsys_factory import Capture, Range, write_capture
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

VALUES = st.none() | st.sampled_from((7, -(2**63), 2**63 - 1)) | st.integers(-3, 3)


def write_column(file: Path, values: Sequence[object]) -> None:
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE t (a, b)")
        database.executemany("INSERT INTO t VALUES (?, 5)", [(value,) for value in values])


@given(st.lists(VALUES, min_size=1, max_size=20), st.integers(1, 7))
def test_all_rows_arrive_whatever_the_size_of_a_batch(values: list[int | None], batch_rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(sqlite_columns, "_BATCH_ROWS", batch_rows)
        file = Path(folder) / "file.sqlite"
        write_column(file, values)
        with open_sqlite(file) as database:
            found = database.read_integers("t", ("a", "b", "absent"))
    assert found["a"].tolist() == [UNKNOWN if value is None else value for value in values]
    assert found["b"].tolist() == [5] * len(values)
    assert found["absent"].tolist() == [UNKNOWN] * len(values)
    assert found["b"].strides == found["absent"].strides == (0,)  # they take no memory


@pytest.mark.parametrize("value", ["text", 0.5, b"\0"])
@pytest.mark.parametrize("row", [0, 1, 5])
def test_what_is_no_integer_is_refused_in_each_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object, row: int
) -> None:
    monkeypatch.setattr(sqlite_columns, "_BATCH_ROWS", 2)
    file = tmp_path / "file.sqlite"
    write_column(file, [value if at == row else at for at in range(7)])
    with open_sqlite(file) as database, pytest.raises(TraceError) as caught:
        database.read_integers("t", ("b", "a"))
    assert caught.value.reason == "column a holds something that is no integer"


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"


def open_files(name: str) -> list[Path]:
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread has closed it meanwhile
            found += [path] if path.exists() and name in str(path.readlink()) else []
    return found


def test_what_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_column(tmp_path / "file.sqlite", [1])
    with open_sqlite(tmp_path / "file.sqlite") as database:
        monkeypatch.setattr(export_tables, "LEAST_S", 0.2)
        with pytest.raises(TraceError, match=r"file\.sqlite: reading it takes more than 0 s") as failed:
            database.run_with_deadline(lambda: database.rows(ENDLESS))
        assert failed.value.path.name == "file.sqlite"
        wait_until(lambda: not open_files("file.sqlite"))
        with pytest.raises(TraceError, match="reading it was stopped"):
            database.run_with_deadline(lambda: database.rows("SELECT 1"))


def test_a_busy_machine_does_not_make_a_file_endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A good export of 2.6 MB was refused beside other work: only the clock counted, not the processor's time."""
    write_column(tmp_path / "file.sqlite", [1])
    monkeypatch.setattr(export_tables, "LEAST_S", 0.2)
    with open_sqlite(tmp_path / "file.sqlite") as database:
        assert database.run_with_deadline(lambda: sleep(0.5) or database.rows("SELECT 1")) == [(1,)]


def test_an_interrupt_comes_through_a_query(tmp_path: Path) -> None:
    write_column(tmp_path / "file.sqlite", [1])
    with open_sqlite(tmp_path / "file.sqlite") as database:
        interrupt = Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            database.run_with_deadline(lambda: interrupt.start() or database.rows(ENDLESS))
        wait_until(lambda: not open_files("file.sqlite"))


def test_a_query_gives_no_more_than_the_file_has_room_for(tmp_path: Path) -> None:
    write_column(tmp_path / "file.sqlite", [1])
    with open_sqlite(tmp_path / "file.sqlite") as database:
        for query in (f"{ENDLESS.replace('count(*)', 'x')}", "SELECT hex(zeroblob(1 << 20))"):
            with pytest.raises(TraceError, match="more rows or text than it has room for"):
                database.run_with_deadline(lambda query=query: database.rows(query))  # type: ignore[misc]
            database._is_stopped = False


@pytest.mark.parametrize("name", ["plain", "a b", 'a"b', "a`b", "a]b", "größe", "select", "a'b", "a(b", " a", "7"])
def test_a_table_is_known_whatever_its_name(name: str, tmp_path: Path) -> None:
    for sign, end in ('""', "``", "[]", "''"):
        if name != "plain" and sign == "[" and "]" in name:
            continue
        with closing(sqlite3.connect(tmp_path / "file.sqlite")) as database, database:
            named = sign + (name if sign == "[" else name.replace(sign, 2 * sign)) + end
            database.execute(f"CREATE TABLE {named} AS SELECT 1 AS x")
        with open_sqlite(tmp_path / "file.sqlite") as file:
            assert set(file.columns) == {name}
        (tmp_path / "file.sqlite").unlink()


def test_a_file_is_closed_when_reading_it_fails(tmp_path: Path) -> None:
    """The error holds the frames of what raised it: whatever is closed by the garbage collector alone is open here."""
    write_column(tmp_path / "file.sqlite", ["text"])
    with open_sqlite(tmp_path / "file.sqlite") as database, pytest.raises(TraceError) as failed:
        database.read_integers("t", ("a",))
    assert open_files("file.sqlite") == []
    assert failed.value.path.name == "file.sqlite"


@given(st.lists(st.lists(st.sampled_from((1, 2)), max_size=5), max_size=8))
def test_a_column_grows_as_a_list_does(parts: list[list[int]]) -> None:
    column = gather_batches("c", ({"c": np.array(part, np.int64)} for part in parts))["c"]
    assert column.tolist() == [value for part in parts for value in part]


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(("", "step", "backward")), st.booleans()), min_size=1, max_size=9))
def test_names_of_ranges_arrive_inline_and_by_number_whatever_the_batch(ranges: list[tuple[str, bool]]) -> None:
    spans = [Range(name, at, at + 1, 100, registered=by_number) for at, (name, by_number) in enumerate(ranges, 1)]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(sqlite_columns, "_BATCH_ROWS", 2)
        trace = load_trace(write_capture(Path(folder) / "capture.sqlite", Capture(ranges=spans)))
    found = [trace.names[name_id] for name_id in trace.spans.name_id[np.argsort(trace.spans.start_ns)]]
    assert found == [name or UNNAMED_RANGE for name, _ in ranges]
