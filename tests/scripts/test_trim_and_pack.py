"""Captures with fewer steps: what is kept reads as before, and a packed file keeps to its size."""

from __future__ import annotations

import gzip
import json
import os
import random
import sqlite3
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.analyze.overlap import TraceOverlap, measure_overlap
from ddp_prof.analyze.step_columns import StepOverlap
from ddp_prof.errors import TraceError
from ddp_prof.ingest.load import load_trace
from ddp_prof.manifest import write_manifest
from tests.analyze.collectives.test_straggler import STEPS, rank_capture
from tests.nsys_factory import GENERATIONS, Capture, Kernel, Range, write_capture
from tests.test_manifest import MANIFEST

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts/dev")]
from pack_captures import pack  # noqa: E402
from profiling_cost import describe, read_rounds  # noqa: E402
from trim_capture import main, trim_capture  # noqa: E402


def steps_of(result: TraceOverlap) -> dict[tuple[int | None, int | None], StepOverlap]:
    return {(rank.rank, step.step): step for rank in result.ranks for step in rank.steps}


def measured(path: Path) -> TraceOverlap:
    return measure_overlap(load_trace(path))


@pytest.mark.parametrize("product", GENERATIONS)
def test_kept_steps_of_a_gpu_are_the_same_to_the_nanosecond(product: str, tmp_path: Path) -> None:
    big = write_capture(tmp_path / "big.sqlite", rank_capture(1), product)
    before = big.read_bytes()
    trim_capture(big, tmp_path / "small.sqlite", 3)
    whole, kept = steps_of(measured(big)), steps_of(measured(tmp_path / "small.sqlite"))
    assert list(kept) == [(1, number) for number in range(STEPS - 3, STEPS)]
    assert kept == {key: whole[key] for key in kept}
    assert measured(tmp_path / "small.sqlite").attribution.device_time == 1.0
    assert big.read_bytes() == before


def test_a_shared_capture_reads_the_same_and_tells_nothing_of_the_machine(
    own_traces: list[Path], tmp_path: Path
) -> None:
    path, small = own_traces[0], tmp_path / "small.sqlite"
    trim_capture(path, small, STEPS, share=True)
    assert steps_of(measured(small)) == steps_of(measured(path))
    with closing(sqlite3.connect(small)) as database:
        names = {name for (name,) in database.execute("SELECT name FROM TARGET_INFO_SYSTEM_ENV")}
        processes = database.execute("SELECT count(*) FROM PROCESSES").fetchone()[0]
        texts = {value for (value,) in database.execute("SELECT value FROM StringIds")}
    assert {"CpuDescription", "OsDescription"} <= names
    assert not {"DeviceEnvironment", "Hostname", "TargetInstallDir"} & names
    assert processes <= 3  # the program and its ranks
    assert not any("_stdout.log" in text for text in texts)


def test_real_captures_of_two_ranks_keep_both(own_traces: list[Path], tmp_path: Path) -> None:
    for path in own_traces:
        trim_capture(path, tmp_path / path.name, 2)
        whole, kept = steps_of(measured(path)), steps_of(measured(tmp_path / path.name))
        assert {rank for rank, _ in kept} == {rank for rank, _ in whole}
        assert len(kept) == 2 * len({rank for rank, _ in whole})
        assert all(step.comm_ns == whole[key].comm_ns for key, step in kept.items())
        assert (tmp_path / path.name).stat().st_size <= path.stat().st_size


def test_what_a_kept_call_launched_stays_also_where_it_ran_late(tmp_path: Path) -> None:
    """And what an earlier call launched goes, though it ran in the time of the step that is kept."""
    capture = Capture(
        kernels=[
            Kernel("of_step_0", 210, 220, launch=10, thread=100),
            Kernel("of_step_1", 230, 900, launch=240, thread=100),
        ],
        ranges=[Range(f"step|index={step}", 200 * step, 200 * step + 100, 100) for step in (0, 1)],
    )
    trim_capture(write_capture(tmp_path / "big.sqlite", capture), tmp_path / "small.sqlite", 1)
    trace = load_trace(tmp_path / "small.sqlite")
    assert [trace.names[name_id] for name_id in trace.activities.name_id] == ["of_step_1"]


def kineto(tmp_path: Path) -> Path:
    """Three steps, each with a call and the kernel that it launches after the step's end on the host."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
    annotation = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1}
    events.append({**annotation, "name": "process|rank=0|world=1", "ts": 1, "dur": 400})
    for step in range(3):
        begin = 100 * step + 10
        link = {"correlation": step + 1}
        events += [
            {**annotation, "name": f"step|index={step}", "ts": begin, "dur": 50},
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "l",
                "pid": 1,
                "tid": 1,
                "ts": begin + 5,
                "dur": 1,
                "args": link,
            },
            {
                "ph": "X",
                "cat": "kernel",
                "name": f"k{step}",
                "pid": 0,
                "tid": 7,
                "ts": begin + 55,
                "dur": 9,
                "args": {**link, "device": 0, "stream": 7},
            },
        ]
    path = tmp_path / "big.rank0.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events, "schemaVersion": 1}).encode()))
    return path


def test_kineto_is_trimmed_alike(tmp_path: Path) -> None:
    big, small = kineto(tmp_path), tmp_path / "small.rank0.json.gz"
    trim_capture(big, small, 2)
    trace = load_trace(small)
    assert [trace.names[name_id] for name_id in trace.activities.name_id] == ["k1", "k2"]
    assert trace.ranks == dict.fromkeys(trace.processes, 0)
    assert list(steps_of(measured(small))) == [(0, 1), (0, 2)]


def test_a_capture_without_our_steps_is_refused(tmp_path: Path) -> None:
    capture = Capture(kernels=[Kernel("gemm", 10, 20, launch=5, thread=100)], ranges=[Range("mine", 0, 30, 100)])
    big = write_capture(tmp_path / "big.sqlite", capture)
    with pytest.raises(TraceError, match="no measured step is marked in it"):
        trim_capture(big, tmp_path / "small.sqlite", 1)


@pytest.mark.parametrize("link", [Path.hardlink_to, Path.symlink_to])
def test_a_link_to_the_capture_is_the_capture(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    big = tmp_path / "big.json"
    big.write_text('{"traceEvents": []}')
    link(tmp_path / "small.json", big)
    with pytest.raises(TraceError, match="over itself"):
        trim_capture(big, tmp_path / "small.json", 1)
    assert big.read_text() == '{"traceEvents": []}'


@pytest.mark.parametrize(
    ("name", "content", "small", "reason"),
    [
        ("none.sqlite", None, "small.sqlite", "unable to open database file"),
        ("none.json.gz", None, "small.json.gz", "No such file"),
        ("bad.sqlite", b"bytes", "small.sqlite", "file is not a database"),
        ("bad.json", b"bytes", "small.json", "Expecting value"),
        ("list.json", b"[]", "small.json", "it cannot be trimmed"),
        ("same.json", b"bytes", "same.json", "it would be written over itself"),
        ("bad.sqlite", b"bytes", "/dev/stdout", "it is no file, and would be deleted"),
    ],
)
def test_what_cannot_be_trimmed_is_one_line(
    tmp_path: Path, name: str, content: bytes | None, small: str, reason: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/trim_capture.py"), name, small],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("trim_capture: error: ")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1
    assert content is None or (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize("steps", [0, -1])
def test_no_steps_is_wrong_usage(tmp_path: Path, steps: int) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "a.sqlite"), str(tmp_path / "b.sqlite"), "--steps", str(steps)])
    assert stopped.value.code == 2


def test_an_empty_folder_cannot_be_packed(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(TraceError, match="there is nothing in it to pack: make captures"):
            pack(folder, tmp_path / "x.tar.gz", 1000)


def busy_capture() -> Capture:
    """Enough kernels a step that the size of a file tells how many steps are in it."""
    capture, generator = rank_capture(0), random.Random(0)
    for step in range(STEPS):
        for number in range(100):
            start = (50 * step + 2) * 1_000_000 + 10_000 * number
            capture.kernels.append(
                Kernel("small", start, start + generator.randrange(10_000), start, thread=100, stream=21)
            )
    return capture


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    """What capture_gpu.sh leaves: a setup with a capture and a report, tables, and runs made for their times."""
    folder = tmp_path / "gpu_capture"
    for name in ("nccl", "tables/nccl", "cost/nccl/with.1", "nccl/.naive.partial"):
        (folder / name).mkdir(parents=True)
    write_capture(folder / "nccl/naive.rank0.sqlite", busy_capture())
    (folder / "nccl/naive.rank0.nsys-rep").write_bytes(random.Random(1).randbytes(300_000))
    (folder / "nccl/.naive.partial/half.sqlite").write_text("unfinished")
    (folder / "tables/nccl/overlap.txt").write_text("all steps")
    (folder / "cost/nccl/with.1/bucketed_10mb.sqlite").write_text("large")
    (folder / "cost/nccl/with.1/bucketed_10mb.run.json").write_text("{}")
    return folder


def names_in(target: Path) -> set[str]:
    with tarfile.open(target) as archive:
        return {item.name.removeprefix("gpu_capture/") for item in archive if item.isfile()}


TABLES = {"tables/nccl/overlap.txt", "cost/nccl/with.1/bucketed_10mb.run.json", "LEFT_OUT.txt"}


def test_what_fits_is_packed_whole(captured: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.tar.gz"
    assert pack(captured, target, 1_000_000) == "nothing"
    assert names_in(target) == TABLES | {"nccl/naive.rank0.sqlite", "nccl/naive.rank0.nsys-rep"}


def test_rather_than_leave_out_more_files_are_made(captured: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        (captured / f"nccl/flat.rank{number}.nsys-rep").write_bytes(random.Random(number).randbytes(300_000))
    assert pack(captured, tmp_path / "x.tar.gz", 500_000, max_files=8) == "nothing"
    files = sorted(path.name for path in tmp_path.glob("x*.tar.gz"))
    assert files == ["x.2.tar.gz", "x.3.tar.gz", "x.tar.gz"]
    assert all((tmp_path / name).stat().st_size <= 500_000 for name in files)
    packed = [name for file in files for name in names_in(tmp_path / file)]
    reports = {"nccl/naive.rank0.nsys-rep", "nccl/flat.rank1.nsys-rep", "nccl/flat.rank2.nsys-rep"}
    assert sorted(packed) == sorted(TABLES | reports | {"nccl/naive.rank0.sqlite"}), "each once"
    assert "the profiler's own reports" in pack(captured, tmp_path / "y.tar.gz", 500_000, max_files=2)


def test_a_slice_packs_what_it_made(captured: Path, tmp_path: Path) -> None:
    for path in captured.rglob("*"):
        os.utime(path, (1, 1))
    (captured / ".slice").touch()
    with pytest.raises(TraceError, match="there is nothing in it to pack"):
        pack(captured, tmp_path / "x.tar.gz", 10**9, newer_than=captured / ".slice")
    (captured / "nccl/flat.run.json").write_text("{}")
    pack(captured, tmp_path / "x.tar.gz", 10**9, newer_than=captured / ".slice")
    assert names_in(tmp_path / "x.tar.gz") == {"nccl/flat.run.json", "LEFT_OUT.txt"}


def test_steps_are_left_out_until_it_fits(captured: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.tar.gz"
    pack(captured, target, 10**9)
    left_out = ["the profiler's own reports", *(f"all but the last {count}" for count in (3, 2, 1))]
    for expected, kept in zip(left_out, (STEPS, 3, 2, 1), strict=True):
        limit = target.stat().st_size * 95 // 100
        assert expected in pack(captured, target, limit)
        assert target.stat().st_size <= limit
        assert names_in(target) == TABLES | {"nccl/naive.rank0.sqlite"}
        with tarfile.open(target) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4
            archive.extractall(tmp_path / str(kept))
        assert len(steps_of(measured(tmp_path / str(kept) / "gpu_capture/nccl/naive.rank0.sqlite"))) == kept
    with pytest.raises(TraceError, match="with one step of each capture, of at most 0: raise --max-mb"):
        pack(captured, target, 1000)
    assert (captured / "nccl/naive.rank0.nsys-rep").exists(), "nothing is taken from what was captured"


def test_the_cost_is_that_of_neighbouring_runs(tmp_path: Path) -> None:
    for index, (plain, recorded) in enumerate([(1.0, 1.1), (2.0, 2.4), (1.0, 1.05)], 1):
        for kind, seconds in (("without", plain), ("with", recorded)):
            folder = tmp_path / f"{kind}.{index}"
            folder.mkdir()
            run = replace(MANIFEST, step_seconds=(seconds,) * 3, options={"ranks_per_gpu": 2})
            write_manifest(run, folder / "bucketed_10mb.run.json")
    (tmp_path / "without.2/bucketed_10mb.run.json").unlink()
    rounds = read_rounds(tmp_path)
    assert [round(round_.ratio, 3) for round_ in rounds] == [1.1, 1.05]
    said = describe(rounds)
    assert "cost +7.5% (rounds: +5.0% to +10.0%)" in said
    assert "shared GPU: time-sliced" in said


def test_without_rounds_the_cost_is_one_clear_error(tmp_path: Path) -> None:
    script = ROOT / "scripts/dev/profiling_cost.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"profiling_cost: error: {tmp_path}: no round with both")
