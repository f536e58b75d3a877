"""What must change no figure: when a capture began, its numbers of strings, processes and calls, and unrelated rows."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import each_read_once, run
from tests.conftest import ROOT, SHARED_TRACES
from tests.examples import IS_NIGHTLY
from tests.night import of_which_the_gate_keeps, one_of_each_kind

COMMANDS = ("overlap", "collectives", "critical", "doctor", *(("skew", "kernels", "whatif") if IS_NIGHTLY else ()))
LATER_NS = 10**12
TIMES = ("start_ns", "end_ns", "launch_ns", "ready_ns", "comm_end_ns")
EVENTS = ("NVTX_EVENTS", "CUDA_EVENT", "RUNTIME", "KERNEL", "MEMCPY", "MEMSET", "SYNCHRONIZATION", "GRAPH_TRACE")
NSYS = [ROOT / "traces" / "naive.sqlite", *sorted(SHARED_TRACES.glob("*.sqlite"))]


KINETO = ("a100_ddp_rank0of2", "a100_rank0of128", "b200_rank0of8", "no_distributed_info")


def documents(path: Path, later_ns: int = 0, commands: Sequence[str] = COMMANDS) -> list[Any]:
    """What the commands say of a capture that began later."""

    def earlier(fields: dict[str, Any]) -> dict[str, Any]:
        return {key: value - later_ns if key in TIMES and value else value for key, value in fields.items()}

    with each_read_once():
        found = [run(command, str(path), "--format", "json").stdout for command in commands]
    return [json.loads(text, object_hook=earlier) for text in found]


def columns_of(database: sqlite3.Connection) -> dict[str, list[str]]:
    tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'ENUM%'")
    return {name: [row[1] for row in database.execute(f"PRAGMA table_info('{name}')")] for (name,) in tables.fetchall()}


def renumber(database: sqlite3.Connection) -> None:
    """Give strings, machines, calls and contexts other numbers, and let everything happen later."""
    ids = [row[0] for row in database.execute("SELECT id FROM StringIds")]
    others = random.Random(1).sample(range(2**31, 2**31 + 10 * len(ids)), len(ids))
    database.create_function("other_string", 1, dict(zip(ids, others, strict=True)).get)
    strings = ("nameId", "demangledName", "shortName", "mangledName", "textId", "jsonTextId")
    changes = {
        **dict.fromkeys(("start", "end"), f"{{0}} + {LATER_NS}"),
        **dict.fromkeys(strings, "ifnull(other_string({0}), {0})"),
        **dict.fromkeys(("globalTid", "endGlobalTid", "globalPid"), "({0} & 0xFFFFFFFFFFFF) | (0x7305 << 48)"),
        "correlationId": "{0} * 3 + 1000000",
        "contextId": "{0} + 40",
    }
    for table, columns in columns_of(database).items():
        for column in set(columns) & set(changes):
            new = changes[column].format(f'"{column}"')
            database.execute(f'UPDATE {table} SET "{column}" = {new} WHERE typeof("{column}") = \'integer\'')
    database.execute("UPDATE StringIds SET id = other_string(id)")


def add_unrelated_rows(database: sqlite3.Connection) -> None:
    """Another process without a GPU marks steps; strings that no event has."""
    if "NVTX_EVENTS" in columns_of(database):
        rows = [
            (LATER_NS + 1000 * i, LATER_NS + 1000 * i + 900, f"step {i}", 0x7305 << 48 | 99 << 24 | 99)
            for i in range(9)
        ]
        database.executemany(
            "INSERT INTO NVTX_EVENTS (start, end, text, globalTid, eventType) VALUES (?, ?, ?, ?, 59)", rows
        )
    unused = [(1, "step 99"), (2, "process|rank=3|world=9"), (3, "ncclDevKernel_AllReduce_Sum_f32_RING_LL")]
    database.executemany("INSERT INTO StringIds (id, value) VALUES (?, ?)", unused)


@pytest.mark.parametrize("real", one_of_each_kind(NSYS), ids=lambda path: path.stem)
def test_numbers_and_unrelated_rows_of_an_export(real: Path, tmp_path: Path) -> None:
    path = Path(shutil.copyfile(real, tmp_path / real.name))
    before = documents(path)
    with closing(sqlite3.connect(path)) as database:
        database.text_factory = lambda text: text.decode("utf-8", "replace")
        renumber(database)
        add_unrelated_rows(database)
        database.commit()
    found = documents(path, LATER_NS)
    for document in found:  # that steps of that process were recorded, and nothing else of it, is said
        document["warnings"] = [note for note in document["warnings"] if not note.startswith("process 99 has ranges")]
    assert found == before


def test_a_run_twice_in_a_capture_has_the_same_steps_though_numbers_of_calls_repeat(
    shared_traces: Path, tmp_path: Path
) -> None:
    """The path of the second half was said to be the host's: its copies were taken for those of the first half."""
    (real,) = shared_traces.glob("*unet*.sqlite")
    path = Path(shutil.copyfile(real, tmp_path / real.name))
    overlap, critical = documents(path, commands=("overlap", "critical"))
    with closing(sqlite3.connect(path)) as database:
        for table, columns in columns_of(database).items():
            if table.endswith(EVENTS):
                later = [f'"{name}" + {3 * 10**9}' if name in ("start", "end") else f'"{name}"' for name in columns]
                database.execute(f"INSERT INTO {table} SELECT {', '.join(later)} FROM {table}")
        database.commit()
    twice, critical_twice = documents(path, commands=("overlap", "critical"))
    totals = ("compute_ns", "comm_ns", "overlapped_ns", "exposed_ns", "kernels", "collectives")
    assert [twice["ranks"][0][key] for key in totals] == [2 * overlap["ranks"][0][key] for key in totals]
    assert twice["headline"] == overlap["headline"]
    paths, both = ([step["parts_ns"] for step in found["steps"]] for found in (critical, critical_twice))
    assert both == paths + paths


@pytest.mark.parametrize("name", of_which_the_gate_keeps(["a100_rank0of128", "no_distributed_info"], KINETO))
def test_how_a_trace_of_torch_profiler_is_written(name: str, shared_traces: Path, tmp_path: Path) -> None:
    """Events in another order without flows, keys in another order, all numbers as floats, over several lines."""
    real = shared_traces / f"kineto_{name}.json.gz"
    document = json.loads(gzip.decompress(real.read_bytes()))
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(document))
    before = documents(path)
    events = [dict(reversed(event.items())) for event in document["traceEvents"] if event["ph"] not in "sf"]
    random.Random(1).shuffle(events)
    document["traceEvents"] = json.loads(json.dumps(events), parse_int=float)
    path.write_text(json.dumps(dict(reversed(document.items())), indent=1))
    assert documents(path) == before
