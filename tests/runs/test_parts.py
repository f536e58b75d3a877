"""A capture read in parts gives the integers, and the words, of the whole."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from ddp_prof.analyze.collectives.results import measure_collectives
from ddp_prof.bounded_file import free_memory
from ddp_prof.errors import TraceError
from ddp_prof.ingest import nsys_export, split_export
from ddp_prof.ingest.nsys_export import count_rows
from ddp_prof.ingest.split_export import SplitExport
from ddp_prof.runs import report
from ddp_prof.runs.report import (
    SPLITTABLE,
    LoadOptions,
    TraceEvents,
    load_events,
    measure_events,
    measure_in_parts,
    measure_report,
)
from ddp_prof.trace import SYNC_IN_PARTS, UNKNOWN, Category, Kind, Trace
from tests.analyze.random_runs import runs
from tests.examples import examples
from tests.ingest.test_nsys_export import MAIN, MS, known_truth
from tests.nsys_factory import Capture, Kernel, Range, write_capture
from tests.runs.test_pickles import FOREIGN, same

KINDS = {Kind.KERNEL: "kernel", Kind.COPY: "memcpy", Kind.MEMORY_SET: "memset", Kind.GRAPH: "graph"}
NAMES = {Category.COMPUTE: "gemm", Category.COMMUNICATION: "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"}


def capture_of(trace: Trace) -> Capture:
    """What an export of a drawn trace holds."""
    capture = Capture(threads=dict(trace.threads))
    activities, calls = trace.activities, trace.calls
    for row, call in enumerate(trace.launching_calls.tolist()):
        capture.kernels.append(
            Kernel(
                NAMES.get(Category(activities.category[row]), "") if activities.kind[row] == Kind.KERNEL else "x",
                int(activities.start_ns[row]),
                int(activities.end_ns[row]),
                None if call == UNKNOWN else int(calls.start_ns[call]),
                0 if call == UNKNOWN else int(calls.lane[call]),
                int(activities.process[row]),
                int(activities.lane[row]),
                int(activities.device[row]),
                KINDS[Kind(activities.kind[row])],
            )
        )
    for row, name_id in enumerate(trace.spans.name_id.tolist()):
        spans = trace.spans
        end = None if spans.is_open[row] else int(spans.end_ns[row])
        name, start, lane = trace.names[name_id], int(spans.start_ns[row]), int(spans.lane[row])
        capture.ranges.append(Range(name, start, end, lane, int(spans.process[row])))
    return capture


def whole_of(path: Path, options: LoadOptions = LoadOptions()) -> dict[str, Any]:  # noqa: B008
    """Without what waits tell, which are not followed in parts."""
    trace, ranks = load_events(path, options)
    trace = replace(trace, sync_reason=SYNC_IN_PARTS)
    return measure_events(
        TraceEvents(trace, tuple(replace(rank, trace=trace) for rank in ranks)), options, tuple(SPLITTABLE)
    )


def parts_of(path: Path, rows: int, options: LoadOptions = LoadOptions()) -> dict[str, Any] | None:  # noqa: B008
    with patch.object(split_export, "BLOCK_ROWS", 4), suppress(split_export.CannotSplitError):
        return measure_in_parts(path, replace(options, part_rows=rows))
    return None


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["overlap"] == expected["overlap"]
    assert found["collectives"].trace_warnings == expected["collectives"].trace_warnings
    for one, other in zip(found["collectives"].ranks, expected["collectives"].ranks, strict=True):
        for name in ("timings", "compute", "device_phases", "times", "step_keys", "groups"):
            assert same(getattr(one, name), getattr(other, name)), name
        assert same(one, other)
    one, other = measure_collectives(found["collectives"]), measure_collectives(expected["collectives"])
    assert one.collectives == other.collectives
    for name in ("alignment", "matched", "unmatched", "warnings", "reason", "host_waits"):
        assert getattr(one, name) == getattr(other, name), name


@pytest.mark.slow
@examples(50, suppress_health_check=list(HealthCheck))
@given(runs(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_parts_of_any_run_tell_what_the_whole_does(traces: tuple[Trace, ...], rows: int, random: Any) -> None:
    capture = capture_of(traces[0])
    random.shuffle(capture.kernels)
    random.shuffle(capture.ranges)
    with TemporaryDirectory() as folder:
        path = write_capture(Path(folder) / "x.sqlite", capture)
        found = parts_of(path, rows)
        assume(found is not None)
        assert_equal(found, whole_of(path))


@pytest.mark.parametrize(("steps_without_launches", "are_known"), [(1, True), (2, False)])
def test_how_much_of_communication_has_no_launch_is_asked_of_the_whole_capture(
    steps_without_launches: int, are_known: bool, tmp_path: Path
) -> None:
    """Of an eighth the steps keep their figures, though one part holds nothing else; of a quarter none does."""
    capture = known_truth(8)
    for step in capture.ranges[::3]:
        step.end = step.start + 90 * MS
    for kernel in [kernel for kernel in capture.kernels if "nccl" in kernel.name][: 2 * steps_without_launches]:
        kernel.launch = None
    path = write_capture(tmp_path / "x.sqlite", capture)
    found = parts_of(path, 20)
    assert found is not None
    assert_equal(found, whole_of(path))
    (rank,) = found["overlap"].ranks
    assert [step.comm_ns is not None for step in rank.steps] == [are_known] * 8


def test_a_graph_in_one_part_is_the_reason_of_all(tmp_path: Path) -> None:
    capture = known_truth(8)
    last = capture.kernels[-1]
    capture.kernels.append(Kernel("graph", last.start, last.end + 1, last.launch, last.thread, kind="graph"))
    path = write_capture(tmp_path / "x.sqlite", capture)
    found = parts_of(path, 20)
    assert found is not None
    assert_equal(found, whole_of(path))


@pytest.mark.parametrize("world", [None, 1])
def test_a_rank_that_worked_in_warm_up_only_keeps_its_steps(world: int | None, tmp_path: Path) -> None:
    """Also in a job of one rank, of which it is known that it communicates with nobody: it had figures of 0."""
    capture = known_truth(8)
    for index, step in enumerate(capture.ranges[::3]):
        step.name = f"step|index={index}" + "|warmup=1" * (index == 0)
    if world:
        capture.ranges.append(Range(f"process|rank=0|world={world}|variant=torch", 0, 1, MAIN))
    capture.kernels.append(Kernel("gemm_forward", 6 * MS, 7 * MS, 2 * MS, MAIN, device=1))
    path = write_capture(tmp_path / "x.sqlite", capture)
    found = parts_of(path, 20)
    assert found is not None
    assert_equal(found, whole_of(path))
    _, other = found["overlap"].ranks
    assert [(step.step, step.comm_ns) for step in other.steps] == [(index, None) for index in range(1, 8)]


def test_a_capture_with_a_row_without_a_start_is_read_whole(tmp_path: Path) -> None:
    """How many rows have none is said of the whole file."""
    capture = known_truth(8)
    path = write_capture(tmp_path / "x.sqlite", capture)
    assert parts_of(path, 20) is not None
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = -1 WHERE rowid = 3")
        database.commit()
    assert parts_of(path, 20) is None


CUDA = [trace for trace in FOREIGN if trace.suffix == ".sqlite"]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [500, 7_000])
@pytest.mark.parametrize("trace", CUDA, ids=lambda path: path.name)
def test_parts_of_a_real_capture_tell_what_the_whole_does(trace: Path, rows: int) -> None:
    found = None
    with suppress(split_export.CannotSplitError):
        found = measure_in_parts(trace, LoadOptions(part_rows=rows))
    if "ddp_unet" in trace.name:
        assert found is not None, "it has steps and collectives, and can be cut"
    if found is not None:
        assert_equal(found, whole_of(trace))


@pytest.mark.slow
def test_a_step_that_ends_in_the_next_part_is_whole(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth(5))
    for rows in (1, 8, 14, 30):
        found = parts_of(path, rows)
        assert found is not None
        assert_equal(found, whole_of(path))


@pytest.mark.parametrize(
    ("why", "capture"),
    [
        ("it has no ranges", replace(known_truth(2), ranges=[])),
        ("it has no kernels with the calls", replace(known_truth(2), kernels=[])),
        (
            "it has kernels without a name",
            replace(known_truth(2), kernels=[*known_truth(2).kernels, Kernel("", 1, 2, 1, 100)]),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_cut_is_read_as_a_whole(
    why: str, capture: Capture, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_capture(tmp_path / "x.sqlite", capture)
    assert parts_of(path, 5) is None
    options = LoadOptions(part_rows=5)
    expected = measure_events(load_events(path, LoadOptions()), LoadOptions(), ("overlap",))
    assert measure_report(path, options, ("overlap",)) == expected
    (told,) = caplog.messages
    assert f"x.sqlite: read as a whole, {count_rows(path, 1)} rows in up to" in told
    assert f": {why}" in told
    assert told.endswith("so it cannot be cut into parts")


@pytest.mark.parametrize(("free", "is_too_little"), [(33 * 250 - 1, True), (33 * 250, False)])
def test_where_the_memory_would_not_do_a_way_out_is_told(
    free: int, is_too_little: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth(1))
    with patch.object(nsys_export, "MOST_ROWS_AS_A_WHOLE", 32), patch.object(report, "free_memory", lambda: free):
        load_events(path, LoadOptions())
    (told,) = caplog.messages
    assert "33 rows in up to 0.0 GB of memory: this needs all events at once" in told
    assert ("leave steps out" in told) == is_too_little
    assert (here := free_memory()) is None or here > 2**20


@pytest.mark.slow
@pytest.mark.parametrize(("option", "notes"), [("", 3), ("-q", 0)])
def test_commands_that_read_all_at_once_say_so_unless_quiet(option: str, notes: int, tmp_path: Path) -> None:
    write_capture(tmp_path / "x.sqlite", known_truth(1))
    code = "import sys; from ddp_prof.cli import main; [main(x.split(), standalone_mode=False) for x in sys.argv[1:]]"
    commands = [f"{command} x.sqlite --part-rows 5 {option}" for command in ("kernels", "info", "timeline -o x.html")]
    program = [sys.executable, "-c", code, *commands]
    done = subprocess.run(program, capture_output=True, text=True, check=True, cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if "note: " in line and "this needs all events at once" in line]
    assert len(said) == notes


def test_small_ones_are_read_as_a_whole_unless_told(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth(5))
    assert count_rows(path, None) == 0
    assert count_rows(path, 1) == 5 * (15 + 15 + 3)


def test_the_capture_stays_as_it_is(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth(5))
    path.chmod(0o400)
    before = path.read_bytes()
    assert parts_of(path, 10) is not None
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_capture_is_one_error(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth(5))
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon' WHERE rowid = 3")
        database.commit()
    assert parts_of(path, 10) is None


def test_marks_without_a_time_are_no_hindrance(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth(5))
    with closing(sqlite3.connect(path)) as database:
        database.execute("INSERT INTO NVTX_EVENTS (eventType, text, globalTid) VALUES (33, 'a category', 1)")
        database.commit()
    found = parts_of(path, 10)
    assert found is not None
    assert_equal(found, whole_of(path))


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth(5))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_000_000))
    with pytest.raises(TraceError, match=r"takes about 3,000 MB in .*, where 1 MB are free: make room there"):
        parts_of(path, 10**7)


def test_a_disk_that_fills_up_while_parts_are_made_is_told(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth(200))
    full, other = (sqlite3.OperationalError(text) for text in ("database or disk is full", "disk I/O error"))
    with (
        patch.object(SplitExport, "_copy_calls", side_effect=full),
        pytest.raises(TraceError, match=r"no room in .*: make room there"),
    ):
        parts_of(path, 100)
    with patch.object(SplitExport, "_copy_calls", side_effect=other):
        assert parts_of(path, 100) is None


def test_a_part_in_which_nothing_ran_hides_nothing_of_the_others(tmp_path: Path) -> None:
    """Its warm-up is a part of its own, and of no length."""
    ranges = [Range("process|rank=0|world=1|variant=overlap|backend=nccl|device=x", 0, 600, 1)]
    ranges += [Range("step|index=0|warmup=1", 20, 32, 1), Range("step|index=1", 32, 44, 1)]
    kernels = [Kernel("gemm", at, at, at, 1) for at in (20, 20, 32, 32)]
    communication = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
    kernels += [Kernel(communication, 32, end, 32, 1, stream=9) for end in (32, 32, 33)]
    path = write_capture(tmp_path / "x.sqlite", Capture(kernels=kernels, ranges=ranges))
    found = parts_of(path, 1)
    assert found is not None
    assert [rank.comm_ns for rank in found["overlap"].ranks] == [1]
    assert_equal(found, whole_of(path))
