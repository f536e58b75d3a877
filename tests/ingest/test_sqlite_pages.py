"""Columns out of the pages of a database, beside what SQLite itself says of the same rows."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.errors import TraceError
from ddp_prof.ingest import sqlite_pages
from ddp_prof.ingest.export_tables import HOLDS
from ddp_prof.ingest.sqlite_columns import SqliteFile, open_sqlite
from ddp_prof.ingest.sqlite_pages import TablePages, UnusualPagesError
from ddp_prof.trace import UNKNOWN
from tests.nsys_factory import Capture, Kernel, Range, write_capture

PAGE = 512
EDGES = [sign * (1 << power) + by for power in (7, 8, 15, 23, 31, 47, 63) for sign in (1, -1) for by in (-1, 0)]
INTEGERS = st.none() | st.sampled_from([edge for edge in EDGES if -(2**63) <= edge < 2**63]) | st.integers(-2, 300)
TEXTS = st.none() | st.sampled_from(["", "a", "ä", "a" * 57, "b" * 58, "c" * 300]) | st.binary(max_size=3)
ROWS = st.lists(st.tuples(INTEGERS, TEXTS, INTEGERS), min_size=1, max_size=60)
KIND = (0, 1)


def write_table(
    file: Path, rows: Sequence[Sequence[object]], columns: str = "a INTEGER, t TEXT, b INTEGER", *then: str
) -> Path:
    """A table in small pages, so that few rows make a tree of them."""
    with closing(sqlite3.connect(file)) as database, database:
        database.execute(f"PRAGMA page_size = {PAGE}")
        database.execute(f"CREATE TABLE x ({columns})")
        database.executemany(f"INSERT INTO x VALUES ({', '.join('?' * len(rows[0]))})", rows)
        for statement in then:
            database.execute(statement)
    return file


def root_of(file: Path) -> int:
    with closing(sqlite3.connect(file)) as database:
        (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'x'").fetchone()
        return int(root)


def decode(file: Path, *columns: int) -> list[list[int]]:
    """Columns from the pages alone."""
    batches = list(TablePages(file, root_of(file)).batches(columns))
    return [[value for rows in batches for value in rows.integers(column).tolist()] for column in columns]


def forbid_sqlite(patch: pytest.MonkeyPatch) -> None:
    def asked(*_of: object) -> None:
        raise AssertionError("SQLite was asked for rows")

    patch.setattr(SqliteFile, "_query", asked)


def known(values: Sequence[int | None]) -> list[int]:
    return [UNKNOWN if value is None else value for value in values]


@given(ROWS, st.sampled_from([PAGE, 3 * PAGE, 1 << 20]))
def test_integers_and_texts_are_those_of_sqlite(
    rows: list[tuple[int | None, str | bytes | None, int | None]], batch_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(sqlite_pages, "BATCH_BYTES", batch_bytes)
        file = write_table(Path(folder) / "file.sqlite", [(one, text, two) for one, text, two in rows])
        forbid_sqlite(patch)
        with open_sqlite(file) as database:
            found = list(database.batches("x", ("b", "a"), holds=("a", "absent", "t")))
            texts = list(database.text_batches("x", "t", ("b", KIND)))
    first, text, last = zip(*rows, strict=True)
    columns = {name: np.concatenate([batch[name] for batch in found]).tolist() for name in found[0]}
    assert columns["a"] == known(first)
    assert columns["b"] == known(last)
    assert columns[HOLDS] == [(a is not None) + 4 * (t is not None) for a, t in zip(first, text, strict=True)]
    named = [held[number] if number != UNKNOWN else b"" for numbers, held in texts for number in numbers.tolist()]
    expected = [t.encode() if isinstance(t, str) else t or b"" for t, b in zip(text, last, strict=True) if b in KIND]
    assert named == [one.partition(b"\0")[0] for one in expected]


@given(
    st.lists(st.tuples(st.integers(-(2**40), 2**40), st.sampled_from(["", "a" * 90, "b" * 900])), min_size=60),
    st.sets(st.integers(1, 60)),
)
def test_rows_that_were_deleted_are_gone(rows: list[tuple[int, str]], deleted: set[int]) -> None:
    """Records that go on in other pages, too."""
    gone = ", ".join(map(str, deleted))
    with tempfile.TemporaryDirectory() as folder:
        then = f"DELETE FROM x WHERE rowid IN ({gone})"
        file = write_table(Path(folder) / "file.sqlite", rows, "a INTEGER, t TEXT", then)
        with open_sqlite(file) as database:
            found = database.read_integers("x", ("a",))["a"].tolist()
    assert found == [value for row, (value, _) in enumerate(rows, 1) if row not in deleted]


@pytest.mark.parametrize(
    ("columns", "then", "expected"),
    [
        ("a REAL", [], None),  # a float for SQLite, whatever its pages hold
        ("a INTEGER PRIMARY KEY", [], [1, 2, 3]),
        ("k INTEGER PRIMARY KEY, a INT", [], [4, 5, 6]),
        ("b INTEGER, a INTEGER AS (b + 1) STORED", [], []),  # PRAGMA table_info does not name it
        ("a INTEGER PRIMARY KEY, b) WITHOUT ROWID; --", [], [1, 2, 3]),
        ("b INTEGER", ["ALTER TABLE x ADD COLUMN a INTEGER DEFAULT 7", "UPDATE x SET a = 8 WHERE b = 2"], [7, 8, 7]),
        ("a INTEGER, b INTEGER", ["ALTER TABLE x DROP COLUMN b"], [1, 2, 3]),
        ("a INTEGER, b INTEGER", ["UPDATE x SET a = 'text' WHERE b = 5"], None),
        ("a INTEGER, b INTEGER", ["UPDATE x SET a = 1e300 WHERE b = 6"], None),
    ],
)
def test_unusual_tables_are_read_as_sqlite_reads_them(
    tmp_path: Path, columns: str, then: list[str], expected: list[int] | None
) -> None:
    names = [part.split()[0] for part in columns.split(",") if " AS " not in part]
    rows = [(1, 4), (2, 5), (3, 6)]
    file = tmp_path / "file.sqlite"
    with closing(sqlite3.connect(file)) as database, database:
        database.executescript(f"CREATE TABLE x ({columns})")
        for row in rows:
            values = ", ".join(map(str, row[: len(names)]))
            database.execute(f"INSERT INTO x ({', '.join(name.strip(')') for name in names)}) VALUES ({values})")
        for statement in then:
            database.execute(statement)
    with open_sqlite(file) as database:
        if expected is None:
            with pytest.raises(TraceError, match="column a holds something that is no integer"):
                database.read_integers("x", ("a",))
        else:
            assert database.read_integers("x", ("a",))["a"].tolist() == expected


def test_sqlite_goes_on_where_a_record_leaves_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_pages, "BATCH_BYTES", PAGE)
    rows = [(number, "long" * 200 if number == 500 else "short", -number) for number in range(1000)]
    file = write_table(tmp_path / "file.sqlite", rows)
    asked, query = [], SqliteFile._query
    monkeypatch.setattr(SqliteFile, "_query", lambda *of: asked.append(of[2]) or query(*of))
    with open_sqlite(file) as database:
        assert database.read_integers("x", ("a",))["a"].tolist() == list(range(1000))
        (first,) = asked
        assert 0 < first <= 500
        texts = list(database.text_batches("x", "t", ("b", tuple(-number for number in range(1000)))))
    named = [held[number] for numbers, held in texts for number in numbers.tolist()]
    assert named == [text.encode() for _, text, _ in rows]


def test_an_export_is_read_from_its_pages_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = [Range(name, 10, 20, thread=1) for name in ("step|1", "backward")]
    file = write_capture(tmp_path / "x.sqlite", Capture([Kernel("gemm", 10, 20, launch=5, thread=1)], ranges))
    forbid_sqlite(monkeypatch)
    with open_sqlite(file) as database:
        for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"):
            assert len(database.read_integers(table, ("start",))["start"])


def test_no_page_is_read_twice(tmp_path: Path) -> None:
    """A tree whose pages point to one child seems endless."""
    file = write_table(tmp_path / "file.sqlite", [(number, "text", 0) for number in range(500)])
    data = bytearray(file.read_bytes())
    at = (root_of(file) - 1) * PAGE
    first, second = (at + int.from_bytes(data[at + 12 + 2 * row : at + 14 + 2 * row], "big") for row in (0, 1))
    data[second : second + 4] = data[first : first + 4]
    file.write_bytes(data)
    with pytest.raises(UnusualPagesError):
        decode(file, 0)


def test_a_row_whose_values_do_not_fill_it_is_damaged(tmp_path: Path) -> None:
    """Its kind says that ``a`` has no byte instead of one, so ``b`` was read a byte early: 116, the last letter."""
    file = write_table(tmp_path / "file.sqlite", [(number, "text" * 8, number) for number in range(60)])
    kinds_and_a = bytes([4, 1, 77, 1, 47])  # an integer of one byte, 32 letters, an integer; a is 47
    file.write_bytes(file.read_bytes().replace(kinds_and_a, bytes([4, 12, 77, 1, 47])))
    with open_sqlite(file) as opened, pytest.raises(TraceError):
        opened.read_integers("x", ("b",))


def test_a_leaf_without_rows_beside_others_is_damaged(tmp_path: Path) -> None:
    """Its number of rows was lost: twelve rows were left out, and nothing said so."""
    file = write_table(tmp_path / "file.sqlite", [(number, "text" * 8, number) for number in range(60)])
    held = bytearray(file.read_bytes())
    assert (held[3 * PAGE], held[3 * PAGE + 4]) == (13, 12)  # a leaf, and its number of rows
    held[3 * PAGE + 4] = 0
    file.write_bytes(held)
    with open_sqlite(file) as opened, pytest.raises(TraceError):
        opened.read_integers("x", ("b",))


@given(st.data())
def test_damage_is_told_or_gives_what_sqlite_gives(data: st.DataObject) -> None:
    """Any bytes of any page but the first one: no other error, no value that SQLite does not read."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_pages, "BATCH_BYTES", 2 * PAGE)
        file = write_table(Path(folder) / "file.sqlite", [(number, "text" * 8, number) for number in range(60)])
        held = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            within = st.integers(0, 40) | st.integers(0, PAGE - 1)
            page = data.draw(st.integers(1, len(held) // PAGE - 1))
            held[page * PAGE + data.draw(within)] = data.draw(st.integers(0, 255))
        file.write_bytes(held)
        expected = None
        with suppress(sqlite3.Error, OverflowError), closing(sqlite3.connect(file)) as database:
            database.text_factory = bytes
            expected = [value for (value,) in database.execute("SELECT b FROM x")]
        try:
            with open_sqlite(file) as opened:
                found = opened.read_integers("x", ("b",))["b"].tolist()
        except TraceError:
            found = None
        assert found is None or found == known(expected or [])


def test_a_database_in_utf_16_gives_its_texts(tmp_path: Path) -> None:
    file = tmp_path / "file.sqlite"
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("PRAGMA encoding = 'UTF-16'")
        database.execute("CREATE TABLE x (t TEXT, b INTEGER)")
        database.execute("INSERT INTO x VALUES ('größe', 1)")
    with open_sqlite(file) as opened:
        ((number, held),) = opened.text_batches("x", "t", ("b", KIND))
    assert [held[one].decode() for one in number.tolist()] == ["größe"]


def test_one_value_in_all_rows_takes_no_memory(tmp_path: Path) -> None:
    file = write_table(tmp_path / "file.sqlite", [(1, None, number) for number in range(100)])
    (batch,) = TablePages(file, root_of(file)).batches((0, 2))
    assert batch.integers(0).strides == (0,)
    assert len(batch) == 100
