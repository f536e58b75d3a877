"""What a capture lacks altogether is the first that is said of it, with what records it."""

from __future__ import annotations

import csv
import gzip
import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import run
from tests.conftest import ROOT
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import Capture, Kernel, Range, write_capture

STEP = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 90, "pid": 1, "tid": 1}
GEMM = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 5, "dur": 9, "pid": 0, "tid": 7, "args": {"device": 0}}


def without(drops: Callable[[str], bool]) -> Callable[[Path], list[Path]]:
    """An export without some of its tables."""

    def make(folder: Path) -> list[Path]:
        path = write_capture(folder / "x.sqlite", known_truth(2))
        with closing(sqlite3.connect(path)) as database:
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            for (name,) in tables:
                if drops(name):
                    database.execute(f"DROP TABLE {name}")
            database.commit()
        return [path]

    return make


def kineto(*events: dict[str, Any], ranks: int = 1) -> Callable[[Path], list[Path]]:
    def make(folder: Path) -> list[Path]:
        paths = [folder / f"x_rank{rank}.json" for rank in range(ranks)]
        for rank, path in enumerate(paths):
            place = {"backend": "nccl", "rank": rank, "world_size": 2}
            path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": place, "traceEvents": events}))
        return paths

    return make


def named(name: str) -> dict[str, Any]:
    return STEP | {"name": name, "ts": 4, "dur": 3}


EMPTY, NO_GPU = "this capture is empty: ", "no GPU activities were recorded: record with nsys profile --trace=cuda,nvtx"
CAPTURES = {
    "an export without tables": (without(lambda table: not table.startswith("META")), EMPTY),
    "an export of nothing but strings": (without(lambda table: table.startswith(("CUPTI", "NVTX"))), EMPTY),
    "an export without CUDA": (without(lambda table: table.startswith("CUPTI")), NO_GPU),
    "an export of calls and ranges": (
        without(lambda table: table.endswith(("KERNEL", "MEMCPY", "MEMSET"))),
        # '--trace=cuda' was set, so that to set it was no way out.
        "no GPU activities were recorded, only 30 launches of kernels or graphs: the profiler lost what they ran: ",
    ),
    "an empty profile": (kineto(), EMPTY),
    "two empty profiles": (kineto(ranks=2), EMPTY),
    "a profile of a range": (kineto(STEP), NO_GPU),
    "a profile of operators": (kineto(STEP | {"cat": "cpu_op", "name": "aten::mm"}), NO_GPU),
    "a profile of ranges of NCCL alone": (kineto(STEP, named("nccl:all_reduce")), NO_GPU),
    **{f"a profile without the kernel of {name}": (
        kineto(STEP, named(name), GEMM),
        f"no NCCL kernel was recorded, nor another that communicates, although '{name}' names a collective: ")
       for name in ("nccl:all_reduce", "nccl:_all_gather_base", "nccl:broadcast", "ncclAllReduce", "nccl:coalesced",
                    "xccl:all_reduce", "mccl:broadcast")},
}  # fmt: skip


@pytest.mark.parametrize("name", CAPTURES)
def test_it_is_the_first_that_is_said(name: str, tmp_path: Path) -> None:
    make, told = CAPTURES[name]
    paths = make(tmp_path)
    lines = run("summary", *paths).stdout.splitlines()
    assert lines[0].split(maxsplit=1)[0] == "missing"
    assert " ".join(lines[0].split()[1:]).startswith(told)
    text = " ".join(lines)
    assert "works alone" not in text, "that nobody communicates is not known"
    assert ("capture is empty" in text) == (told is EMPTY), "what holds operators was said to be empty in a second line"
    assert "is not known: " in next(line for line in lines if line.startswith("gain"))
    notes = [line for line in run("overlap", *paths).stdout.splitlines() if line.startswith("note: ")]
    assert notes[0].startswith(f"note: missing: {told}")
    document = json.loads(run("overlap", *paths, "--format", "json").stdout)
    assert document["missing"].startswith(told)
    assert all(rank["overlap_ratio"] is None and rank["reason"] for rank in document["ranks"])
    steps = [step for rank in document["ranks"] for step in rank["steps"]]
    assert all(step[key] is None for step in steps for key in ("comm_ns", "exposed_ns", "idle_ns"))
    (compared,) = json.loads(run("compare", *paths, "--format", "json").stdout)["variants"]
    assert [compared[key] for key in ("comm_ns", "overlapped_ns", "exposed_ns", "overlap_ratio")] == [None] * 4


@pytest.mark.parametrize(
    "events",
    [(STEP, GEMM), (STEP, GEMM | {"name": "ncclDevKernel_AllReduce_Sum_f32"}), (STEP, GEMM, named("nccl setup"))],
)
def test_nothing_is_missing_where_nothing_says_so(events: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    paths = kineto(*events)(tmp_path)
    assert json.loads(run("overlap", *paths, "--format", "json").stdout)["missing"] is None
    assert "missing " not in run("summary", *paths).stdout


def test_nccl_is_not_missing_where_its_kernels_may_be_in_what_is_not_known(tmp_path: Path) -> None:
    """In a graph recorded whole, whose capture called NCCL, or among kernels without names: the device was blamed."""
    ranges = [Range("step 0", 0, 1000, 100), Range("nccl:all_reduce", 10, 20, 100)]
    graph = Capture([Kernel("graph", 100, 900, 50, 100, kind="graph")], ranges)
    unnamed = kineto(STEP, named("nccl:all_reduce"), GEMM, GEMM | {"name": "", "ts": 20})(tmp_path)
    for paths in ([write_capture(tmp_path / "x.sqlite", graph)], unnamed):
        assert json.loads(run("overlap", *paths, "--format", "json").stdout)["missing"] is None
        assert "Whether communication is exposed is not known: " in run("summary", *paths).stdout


def test_of_several_files_the_one_that_lacks_it_is_named(tmp_path: Path) -> None:
    whole = kineto(STEP, GEMM | {"name": "ncclDevKernel_AllReduce_Sum_f32"}, ranks=2)(tmp_path)
    empty = json.loads(whole[1].read_text()) | {"traceEvents": []}
    whole[1].write_text(json.dumps(empty))
    document = json.loads(run("overlap", *whole, "--one-run", "--format", "json").stdout)
    assert document["missing"].startswith("x_rank1.json: this capture is empty: ")


def test_beside_ranks_on_gpus_no_way_to_record_a_cpu_is_advised(tmp_path: Path) -> None:
    whole = kineto(STEP, GEMM | {"name": "ncclDevKernel_AllReduce_Sum_f32"}, ranks=2)(tmp_path)
    silent = json.loads(whole[1].read_text()) | {"traceEvents": [STEP]}
    whole[1].write_text(json.dumps(silent))
    missing = json.loads(run("overlap", *whole, "--one-run", "--format", "json").stdout)["missing"]
    assert missing.startswith(f"x_rank1.json: {NO_GPU}")
    assert "CPU" not in missing


def test_of_a_device_whose_activities_were_all_lost_the_device_is_told_and_no_length(tmp_path: Path) -> None:
    """It was 'device: cpu', with steps as long as the host's ranges: 5 of 79 ms."""
    path = write_capture(tmp_path / "x.sqlite", known_truth())
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL")
    said = run("summary", path).stdout
    assert "device: cuda" in said
    assert "the launches of this process have no activities: the profiler lost them" in said
    assert not re.search(r"^step|\d ms", said, re.MULTILINE)


def without_device(folder: Path, name: str, *, is_described: bool = True) -> Path:
    """One of our captures of a job on GPUs, as if recorded by ``--trace=nvtx`` or ``ProfilerActivity.CPU`` alone.

    The range that describes the process is missing in a recording that began after it.
    """
    real = ROOT / "traces" / "h200" / "nccl" / name
    path = folder / real.name
    if path.suffix == ".sqlite":
        shutil.copyfile(real, path)
        with closing(sqlite3.connect(path)) as database, database:
            for (table,) in database.execute("SELECT name FROM sqlite_master WHERE name LIKE 'CUPTI%'").fetchall():
                database.execute(f"DROP TABLE {table}")
            if not is_described:
                database.execute("UPDATE StringIds SET value = 'other' WHERE value LIKE 'process|%'")
        return path
    document = json.loads(gzip.decompress(real.read_bytes()))
    of_host = {None, "cpu_op", "user_annotation", "fwdbwd", "Trace"}
    document["traceEvents"] = [
        one
        for one in document["traceEvents"]
        if one.get("cat") in of_host and (is_described or not one["name"].startswith("process|"))
    ]
    path.write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    return path


@pytest.mark.parametrize("is_described", [True, False])
@pytest.mark.parametrize("name", ["torch.sqlite", "sharded.rank1.json.gz"])
def test_of_a_job_on_gpus_that_were_not_recorded_no_time_of_its_host_is_told(
    name: str, is_described: bool, tmp_path: Path
) -> None:
    """Ranges say 'backend=nccl|device=cuda', or name NCCL's calls: it was 'device: cpu', with '100 % [...] hidden'."""
    path = without_device(tmp_path, name, is_described=is_described)
    document = json.loads(run("overlap", path, "--format", "json").stdout)
    assert document["device"] == "cuda"
    assert document["missing"].startswith(NO_GPU)
    assert "CPU, with" not in document["missing"]
    for rank in document["ranks"]:
        assert {rank[key] for key in ("compute_ns", "comm_ns", "exposed_ns", "overlap_ratio")} <= {None, 0}
        assert all(step[key] is None for step in rank["steps"] for key in ("comm_ns", "exposed_ns", "tail_ns"))
        assert all(step["length"]["ns"] is None for step in rank["steps"])
    shown = run("overlap", path, "--format", "csv").stdout
    assert {row["device"] for row in csv.DictReader(shown.splitlines())} == {""}, "not known, and no CPU"
    said = run("summary", path, "--notes").stdout
    assert not re.search(r"\d (ms|%)|device work lies outside", said)


def test_a_rank_whose_gpu_was_not_recorded_changes_no_figure_of_another(tmp_path: Path) -> None:
    """Its marks on the host were matched with the kernels of rank 0, which then waited for it 49 % of the time."""
    whole = tmp_path / "sharded.rank0.json.gz"
    shutil.copyfile(ROOT / "traces" / "h200" / "nccl" / whole.name, whole)
    alone = json.loads(run("overlap", whole, "--format", "json").stdout)
    silent = without_device(tmp_path, "sharded.rank1.json.gz")
    both = json.loads(run("overlap", whole, silent, "--format", "json").stdout)
    assert both["ranks"][0] == alone["ranks"][0]
    (found,) = json.loads(run("summary", whole, silent, "--format", "json").stdout)["runs"]
    (expected,) = json.loads(run("summary", whole, "--format", "json").stdout)["runs"]
    keys = ("comm_ns", "overlapped_ns", "exposed_ns", "blocking_ns", "step_ns")
    assert {key: found[key] for key in keys} == {key: expected[key] for key in keys}
    document = json.loads(run("collectives", whole, silent, "--format", "json").stdout)
    assert {one["rank"] for one in document["collectives"]} == {0}
    assert {one["wait_ns"] for one in document["collectives"]} == {None}


def test_of_a_process_whose_gpu_was_not_recorded_nothing_is_found(tmp_path: Path) -> None:
    """In a report of two processes. 100 % of its time 'lies between the ranges of steps', as nothing ran in either."""
    whole = ROOT / "traces" / "h200" / "nccl" / "overlap.sqlite"
    path = Path(shutil.copyfile(whole, tmp_path / whole.name))
    with closing(sqlite3.connect(path)) as database, database:
        (process,) = database.execute("SELECT max(globalPid) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE name LIKE 'CUPTI%'").fetchall():
            owner = "globalTid" if table.endswith("RUNTIME") else "globalPid"
            database.execute(f"DELETE FROM {table} WHERE {owner} >> 24 = {process >> 24}")
    both, less = (json.loads(run("overlap", file, "--format", "json").stdout)["ranks"] for file in (whole, path))
    assert less[0] == both[0]
    assert less[1]["comm_ns"] is None
    found = json.loads(run("doctor", path, "--format", "json").stdout)["findings"]
    assert not [one for one in found if "rank 1" in one["ranks"]]


@pytest.mark.parametrize("passes_model", [False, True])
def test_what_capture_does_by_itself_is_no_advice_without_saying_what_it_lacks(
    passes_model: bool, tmp_path: Path
) -> None:
    """'No ddp_prof ranges' stood below 'recognized: step as step|index=1 (ddp_prof)'.

    The program has one process and no DDP, so capture marks its backward and optimizer, not the forward of its model.
    """
    step, forward, rank = (
        [Range("backward", 40, 70, 100), Range("optimizer", 70, 90, 100)],
        Range("forward", 5, 40, 100),
        Range("process|rank=0|world=1|backend=none|device=cpu", 4, 5, 100),
    )
    ranges = [
        replace(one, start=one.start + at * 100, end=(one.end or 0) + at * 100)
        for at in range(3)
        for one in [Range(f"step|index={at}", 0, 100, 100), *([rank, forward] if passes_model else []), *step]
    ]
    path = write_capture(tmp_path / "x.sqlite", Capture([], ranges))
    summary, info = run("summary", path).stdout, " ".join(run("info", path).stdout.split())
    assert ("no GPU activities" in summary) == ("no GPU activities" in info) == (not passes_model)
    for text in (summary, info):
        assert ("marks one only if DDP or FSDP2 wraps it" in text) == (not passes_model)
    assert "no ddp_prof ranges:" not in info
