"""The results database: what is written comes back, whole or not at all, and nothing twice."""

from __future__ import annotations

import hashlib
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_prof.benchmark import store
from ddp_prof.benchmark.store import (
    OK,
    OUT_OF_MEMORY,
    Environment,
    StoredMessages,
    StoredRun,
    StoredStep,
    load_results,
    open_database,
    write_run,
)
from ddp_prof.errors import TraceError
from tests.conftest import ROOT
from tests.ingest import endless

ENVIRONMENT = Environment("e1", "some CPU", 2, 2**34, "Linux", "", "3.11", "2.13", None, None, "0.1")
RUN = StoredRun(
    id="r1", environment="e1", repeat=0, variant="bucketed", bucket_size_mb=2.5, model_size="mini", d_model=256,
    num_layers=4, parameters=10, gradient_bytes=40, world_size=2, backend="gloo", device="cpu", local_batch_size=2,
    seq_len=64, warmup=1, steps=2, status=OK, reason=None, caveat=None, collectives=3, communicated_bytes=40,
    peak_memory_bytes=1000, tokens=256, created="2026-01-01T00:00:00+00:00", git_commit=None, command="python",
)  # fmt: skip
STEPS = (
    StoredStep(False, 0, 100, None, None, 20, None, run="r1"),
    StoredStep(True, 0, 110, 30, 50, 20, 10, run="r1"),
)
MESSAGES = (StoredMessages(40, 2, 15, 14, run="r1"),)


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.db"
    database = open_database(path)
    write_run(database, ENVIRONMENT, RUN, STEPS, MESSAGES)
    write_run(database, ENVIRONMENT, replace(RUN, id="r2", status=OUT_OF_MEMORY, reason="too big", backend=None))
    database.close()
    found = load_results(path)
    assert found.environments == (ENVIRONMENT,)
    assert found.runs[0] == RUN
    assert (found.runs[1].status, found.runs[1].backend) == (OUT_OF_MEMORY, None)
    assert found.steps == STEPS
    assert found.messages == MESSAGES


def endless_database(path: Path, kind: str) -> Path:
    """A database of a few kB with as many rows as one likes."""
    database = open_database(path)
    write_run(database, ENVIRONMENT, RUN, STEPS, MESSAGES)
    database.close()
    if kind == "shared pages":
        root, data = endless.root_page(path, "measurements"), path.read_bytes()
        last = len(data) // endless.PAGE
        leaf = data[(root - 1) * endless.PAGE : root * endless.PAGE]
        chain = {last + 1 + level: endless.interior(last + level) for level in range(1, 5)}
        return endless.put_pages(path, {last + 1: leaf, **chain, root: endless.interior(last + 5)})
    columns = endless.columns_of("measurements", path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE measurements")
        named = ", ".join(f"x AS {column}" for column in columns.split(", "))
        query = endless.ENDLESS.format(f"x AS rowid, {named}") + " WHERE x < 0"
        connection.execute(f"CREATE VIEW {'measurements' if kind == 'a view' else 'other'} AS {query}")
        if kind == "a virtual table":
            connection.execute(f"CREATE VIRTUAL TABLE measurements USING fts5({columns}, content='other')")
    return path


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["shared pages", "a virtual table", "a view"])
def test_a_database_without_an_end_is_refused(kind: str, tmp_path: Path) -> None:
    path = endless_database(tmp_path / "results.db", kind)
    with pytest.raises(TraceError, match=r"results\.db: not a results database \("):
        load_results(path)


def test_a_database_that_takes_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = endless_database(tmp_path / "results.db", "shared pages")
    monkeypatch.setattr(store, "MOST_S", -1)
    monkeypatch.setattr(store, "OPERATIONS_PER_CHECK", 1)
    with pytest.raises(TraceError, match=r"results\.db: cannot be used \(interrupted\)"):
        load_results(path)


def test_a_run_that_is_repeated_takes_the_place_of_the_first(tmp_path: Path) -> None:
    database = open_database(tmp_path / "results.db")
    write_run(database, ENVIRONMENT, RUN, STEPS, MESSAGES)
    write_run(database, ENVIRONMENT, replace(RUN, steps=1), STEPS[:1])
    database.close()
    found = load_results(tmp_path / "results.db")
    assert (found.runs, found.steps, found.messages) == ((replace(RUN, steps=1),), STEPS[:1], ())


def test_a_run_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    database = open_database(tmp_path / "results.db")
    with pytest.raises(Exception, match="NOT NULL"):
        write_run(database, ENVIRONMENT, RUN, [replace(STEPS[0], step_ns=None)])  # type: ignore[arg-type]
    database.close()
    found = load_results(tmp_path / "results.db")
    assert (found.environments, found.runs, found.steps) == ((), (), ())


def test_a_full_disk_loses_no_run_that_was_written(tmp_path: Path) -> None:
    """SQLite says of a largest size that is reached what it says of a full disk."""
    path = tmp_path / "results.db"
    database = open_database(path)
    write_run(database, ENVIRONMENT, RUN, STEPS, MESSAGES)
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}")
    many = [replace(STEPS[0], run="r2", step=step) for step in range(5000)]
    with pytest.raises(
        TraceError, match=r"results\.db: .*full.*make room there, and run the same command again to continue"
    ):
        write_run(database, ENVIRONMENT, replace(RUN, id="r2"), many)
    found = load_results(path)
    assert (found.runs, found.steps, found.messages) == ((RUN,), STEPS, MESSAGES)
    database.execute("PRAGMA max_page_count = 1000000")
    write_run(database, ENVIRONMENT, replace(RUN, id="r2"), many)
    database.close()
    assert len(load_results(path).steps) == 5002


ON_A_FULL_DISK = """
import sys
from pathlib import Path
from dataclasses import replace
from ddp_prof.benchmark.store import load_results, open_database, write_run
from ddp_prof.errors import TraceError
from tests.conftest import ROOT
from tests.benchmark.test_store import ENVIRONMENT, RUN, STEPS
folder = Path(sys.argv[1])
def write(run):
    database = open_database(folder / "r.db")
    if run == "r2":
        try:
            with (folder / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError:
            pass
    write_run(database, ENVIRONMENT, replace(RUN, id=run), [replace(STEPS[0], run=run, step=n) for n in range(400)])
write("r1")
try:
    write("r2")
except TraceError as error:
    print(error)
(folder / "filler").unlink()
assert [run.id for run in load_results(folder / "r.db").runs] == ["r1"]
write("r3")
assert [run.id for run in load_results(folder / "r.db").runs] == ["r1", "r3"]
"""


@pytest.mark.slow
def test_on_a_disk_that_is_really_full(tmp_path: Path) -> None:
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=2m tmpfs "$1" && shift && exec "$@"', "sh"]
    if subprocess.run([*mount, str(tmp_path), "true"], capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here")
    done = subprocess.run(
        [*mount, str(tmp_path), sys.executable, "-c", ON_A_FULL_DISK, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "full" in done.stdout
    assert "make room there, and run the same command again to continue" in done.stdout


def test_a_database_from_before_a_column_was_added_is_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    database = open_database(path)
    write_run(database, ENVIRONMENT, RUN, STEPS)
    database.table("runs").transform(drop={"code"})
    database.close()
    assert load_results(path).runs == (RUN,)
    database = open_database(path)
    write_run(database, ENVIRONMENT, replace(RUN, id="r2", code="c0ffee"))
    database.close()
    assert load_results(path).runs == (RUN, replace(RUN, id="r2", code="c0ffee"))


def test_opening_again_and_reading_leave_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    database = open_database(path)
    write_run(database, ENVIRONMENT, RUN, STEPS, MESSAGES)
    database.close()
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    load_results(path)
    open_database(path).close()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert [path.name for path in tmp_path.iterdir()] == ["results.db"]


def test_another_file_is_refused_in_one_line(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("no database at all, but long enough to be taken for one " * 20)
    for use in (load_results, open_database):
        with pytest.raises(TraceError, match=r"notes\.txt: not a results database .*: name another file"):
            use(other)
    with pytest.raises(TraceError, match="no such file"):
        load_results(tmp_path / "none.db")
    with pytest.raises(TraceError, match=": a folder: name a database in it"):
        load_results(tmp_path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            "update measurements set step_ns = 'fast'",
            r"measurements: Expected `int`, got `str` - at `\$\.step_ns`",
        ),
        ("update measurements set step_ns = 0", r"measurements: Expected `int` >= 1 - at `\$\.step_ns`"),
        ("update runs set gradient_bytes = 0", r"runs: Expected `int` >= 1 - at `\$\.gradient_bytes`"),
        ("alter table runs drop column status", r"runs: Object missing required field `status`"),
        ("alter table runs drop column variant", r"runs: Object missing required field `variant`"),
        ("drop table measurements", "no table measurements"),
    ],
)
def test_what_no_sweep_wrote_is_refused_by_name(tmp_path: Path, change: str, complaint: str) -> None:
    path = tmp_path / "results.db"
    database = open_database(path)
    write_run(database, ENVIRONMENT, RUN, STEPS)
    database.conn.execute(change)
    database.conn.commit()
    database.close()
    with pytest.raises(TraceError, match=rf"results\.db: not a results database \({complaint}\)"):
        load_results(path)


def test_a_database_that_somebody_else_writes_is_not_called_another_file(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    database = open_database(path)
    database.execute("pragma busy_timeout = 0")
    with closing(sqlite3.connect(path)) as other:
        other.execute("begin exclusive")
        with pytest.raises(TraceError, match=r"results\.db: cannot be used \(database is locked\): see that no other"):
            write_run(database, ENVIRONMENT, RUN, STEPS)
    database.close()
