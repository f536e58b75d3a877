"""Exports of nsys 2025.6 and later promise no order of rows: every table may be shuffled, and no figure changes."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ddp_prof.ingest.load import load_trace
from tests.command_line import each_read_once, run
from tests.conftest import ROOT, SHARED_TRACES
from tests.examples import IS_NIGHTLY
from tests.ingest.test_enrich import EVERYTHING
from tests.ingest.test_nsys_export import known_truth
from tests.night import one_of_each_kind
from tests.nsys_factory import GENERATIONS, Capture, Kernel, Range, write_capture

COMMANDS = (
    "overlap",
    "collectives",
    "info",
    *(("critical", "skew", "doctor", "kernels", "whatif") if IS_NIGHTLY else ()),
)
REAL = sorted([*(ROOT / "traces").glob("*.sqlite"), *SHARED_TRACES.glob("*.sqlite")])


def shuffle_tables(path: Path, seed: int) -> None:
    """Put the rows of every table in another order; rows that have a key get another one."""
    order = random.Random(seed)
    with closing(sqlite3.connect(path)) as database:
        database.text_factory = lambda text: text.decode("utf-8", "replace")
        tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'")
        for (name,) in tables.fetchall():
            table = f'"{name}"'
            keys = [row[0] for row in database.execute(f"PRAGMA table_info({table})") if row[5]]
            rows = database.execute(f"SELECT * FROM {table}").fetchall()
            order.shuffle(rows)
            if keys and name == "NVTX_EVENTS":  # the other keys are what rows refer to
                rows = [(*row[:key], number, *row[key + 1 :]) for number, row in enumerate(rows) for key in keys]
            database.execute(f"DELETE FROM {table}")
            if rows:
                database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        database.commit()


def documents(path: Path) -> list[str]:
    """What the commands say of a capture, or the reason why they say nothing."""
    with each_read_once():
        results = [run(command, str(path), "--format", "json") for command in COMMANDS]
    assert {result.exit_code for result in results} <= {0, 1}
    return [result.stdout + result.stderr for result in results]


def assert_order_is_nothing(path: Path, seeds: tuple[int, ...] = (1, 2)) -> None:
    before = documents(path)
    for seed in seeds:
        shuffle_tables(path, seed)
        assert documents(path) == before


@pytest.mark.parametrize("product", GENERATIONS)
@pytest.mark.parametrize(
    "capture", [pytest.param(known_truth(2), marks=pytest.mark.nightly), EVERYTHING], ids=["two steps", "everything"]
)
def test_captures_of_every_generation(product: str, capture: Capture, tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", capture, product)
    if capture is EVERYTHING:
        with closing(sqlite3.connect(path)) as database:
            payload = json.dumps({"NCCL communicator ID": 77, "Message size [bytes]": 4096})
            database.execute("UPDATE NVTX_EVENTS SET jsonText = ? WHERE start = 600", (payload,))
            database.commit()
    assert_order_is_nothing(path)


@pytest.mark.parametrize("real", one_of_each_kind(REAL), ids=lambda path: path.stem)
def test_real_captures(real: Path, tmp_path: Path) -> None:
    assert_order_is_nothing(Path(shutil.copyfile(real, tmp_path / real.name)), seeds=(1, 2) if IS_NIGHTLY else (1,))


def test_the_earliest_of_several_calls_counts(tmp_path: Path) -> None:
    """A runtime call and the driver call in it carry one correlation; the first begins within the step."""
    capture = Capture(
        kernels=[Kernel("gemm", 100, 200, launch=10, thread=1)], ranges=[Range("step 0", 0, 12, 1), Range("x", 0, 9, 1)]
    )
    path = write_capture(tmp_path / "x.sqlite", capture)
    with closing(sqlite3.connect(path)) as database:
        table = "CUPTI_ACTIVITY_KIND_RUNTIME"
        database.execute(f"INSERT INTO {table} SELECT 14, 16, 1, globalTid, correlationId, nameId, 0 FROM {table}")
        database.commit()
    assert json.loads(documents(path)[0])["ranks"][0]["steps"][0]["kernels"] == 1
    assert_order_is_nothing(path)


def test_a_thread_renamed_has_one_name(tmp_path: Path) -> None:
    """That of the higher priority, wherever its row is."""
    path = write_capture(tmp_path / "x.sqlite", known_truth(1))
    with closing(sqlite3.connect(path)) as database:
        database.execute(
            "INSERT INTO ThreadNames (nameId, priority, globalTid) SELECT (SELECT id FROM StringIds WHERE "
            "value = 'python3'), priority - 1, globalTid FROM ThreadNames"
        )
        database.commit()
    for seed in range(5):
        shuffle_tables(path, seed)
        assert load_trace(path).threads == {(100, 100): "python3", (100, 131): "pt_autograd_0"}
