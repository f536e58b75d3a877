from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.analyze.overlap import TraceOverlap, measure_overlap
from ddp_prof.errors import TraceError
from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.load import load_trace
from ddp_prof.ingest.sqlite_columns import SqliteFile
from tests.nsys_factory import GENERATIONS, KERNEL, NVTX, Capture, Kernel, Range, global_tid, write_capture

MS = 1_000_000
MAIN, AUTOGRAD = 100, 131


def known_truth(steps: int = 4) -> Capture:
    """Forward 20 ms, backward 40 ms, optimizer 10 ms; two all-reduces (15 and 20 ms) launched in backward by autograd.

    ms        0         20                  60        70
    compute   FFFFFFFFFFBBBBBBBBBBBBBBBBBBBB.........OOOOO
    first     ..............AAAAAAA........................    34 to 49
    second    .....................AAAAAAAAAA..............    49 to 69: its last 9 ms are exposed
    """
    capture = Capture(threads={(MAIN, MAIN): "python3", (MAIN, AUTOGRAD): "pt_autograd_0"})
    for step in range(steps):
        origin = step * 100 * MS + MS

        def kernel(name: str, start: int, end: int, thread: int, launch: float, stream: int = 7) -> None:
            at = origin + int(launch * MS)  # noqa: B023
            capture.kernels.append(Kernel(name, origin + start * MS, origin + end * MS, at, thread, stream=stream))  # noqa: B023

        for part in range(4):
            kernel("gemm_forward", 5 * part, 5 * part + 5, MAIN, part / 10)
        for part in range(8):
            kernel("gemm_backward", 20 + 5 * part, 25 + 5 * part, AUTOGRAD, 2 + part / 10)
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", 34, 49, AUTOGRAD, 2.35, stream=13)
        kernel("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32(ncclSymkArgs)", 49, 69, AUTOGRAD, 2.75, stream=13)
        kernel("multi_tensor_adam", 69, 79, MAIN, 4.0)
        for name, start, end, registered in (
            (f"step_{step}", 0, 5, False),
            ("forward", 0, 1, True),
            ("backward", 2, 3, True),
        ):
            capture.ranges.append(Range(name, origin + start * MS, origin + end * MS, MAIN, registered=registered))
    return capture


def overlap_of(path: Path) -> TraceOverlap:
    return measure_overlap(load_trace(path))


@pytest.mark.parametrize(("start_ns", "epoch_ns"), [(5 * MS, 1_700_000_000 * 10**9), (1_700_000_005 * 10**9, 0)])
def test_times_that_are_utc_already_get_no_session_start(start_ns: int, epoch_ns: int, tmp_path: Path) -> None:
    """As ``nsys export --ts-normalize=true`` writes them; sessions begin at 1,700,000,000 s here."""
    kernel = Kernel("gemm", start_ns, start_ns + MS, start_ns, MAIN)
    assert load_trace(write_capture(tmp_path / "x.sqlite", Capture([kernel]))).epoch_ns == epoch_ns


@pytest.mark.parametrize("product", GENERATIONS)
def test_every_generation_of_exports_gives_the_same_truth(product: str, tmp_path: Path) -> None:
    result = overlap_of(write_capture(tmp_path / "x.sqlite", known_truth(), product))
    (rank,) = result.ranks
    assert [step.step for step in rank.steps] == [0, 1, 2, 3]
    for step in rank.steps:
        assert (step.kernels, step.collectives) == (15, 2)
        assert (step.comm_ns, step.overlapped_ns, step.exposed_ns) == (35 * MS, 26 * MS, 9 * MS)
        assert (step.backward_overlapped_ns, step.tail_ns, step.window_ns) == (26 * MS, 9 * MS, 79 * MS)
    assert result.attribution.method == "ranges"
    assert result.attribution.device_time == 1.0
    assert result.producer == (None if product == "2020.3" else f"{product}.0.1")


def test_equal_correlation_ids_of_two_processes_are_not_mixed_up(tmp_path: Path) -> None:
    """The first kernel of both processes has correlation id 1, but the other's call lies in a step."""
    capture = Capture(
        kernels=[
            Kernel("gemm", 10, 20, launch=5, thread=200, process=200),
            Kernel("gemm", 30, 40, launch=500, thread=300, process=300, device=1),
        ],
        ranges=[Range(f"step {process}", 0, 100, process, process) for process in (200, 300)],
    )
    first, second = overlap_of(write_capture(tmp_path / "x.sqlite", capture)).ranks
    assert (first.process, first.device, first.steps[0].kernels) == (200, 0, 1)
    assert (second.process, second.device, second.steps[0].kernels) == (300, 1, 0)


@pytest.mark.parametrize("change", ["DROP COLUMN globalPid", "RENAME COLUMN globalPid TO other"])
def test_activities_without_a_process_are_of_the_only_process_that_made_calls(change: str, tmp_path: Path) -> None:
    """It was said that nothing launched them, and that the capture seems to be trimmed."""
    path = tmp_path / "x.sqlite"
    expected = overlap_of(write_capture(path, known_truth()))
    with closing(sqlite3.connect(path)) as file:
        file.execute(f"ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL {change}")
        file.commit()
    found = overlap_of(path)
    assert (found.ranks, found.warnings) == (expected.ranks, expected.warnings)


@pytest.mark.parametrize("missing", ["NULL", "0"])
def test_activities_without_a_process_are_of_the_only_process_without_activities(missing: str, tmp_path: Path) -> None:
    """They were a rank of their own, beside 'none of the launches of process 300 was recorded'."""
    path, capture = tmp_path / "x.sqlite", known_truth()
    capture.kernels += [replace(one, process=300, thread=one.thread + 200) for one in known_truth().kernels]
    capture.ranges += [replace(one, process=300, thread=one.thread + 200) for one in known_truth().ranges]
    expected = overlap_of(write_capture(path, capture))
    with closing(sqlite3.connect(path)) as file:
        file.execute(f"UPDATE {KERNEL} SET globalPid = {missing} WHERE globalPid = {global_tid(300, 0)}")
        file.commit()
    assert overlap_of(path).ranks == expected.ranks


@pytest.mark.parametrize("missing", ["NULL", "0"])
def test_activities_that_several_processes_may_have_launched_are_in_no_figure(missing: str, tmp_path: Path) -> None:
    """Those of two ranks were one rank, of which compute of one hid communication of the other."""
    path, capture = tmp_path / "x.sqlite", known_truth()
    capture.kernels += [replace(one, process=300, device=1, thread=one.thread + 200) for one in known_truth().kernels]
    write_capture(path, capture)
    with closing(sqlite3.connect(path)) as file:
        file.execute(f"UPDATE {KERNEL} SET globalPid = {missing} WHERE start >= {100 * MS}")
        file.commit()
        found = overlap_of(path)
        assert [[step.comm_ns for step in rank.steps] for rank in found.ranks] == [[35 * MS], [35 * MS]]
        assert "90 of 120 activities left out: no process is recorded" in " ".join(found.warnings)
        file.execute(f"UPDATE {KERNEL} SET globalPid = {missing}")
        file.commit()
    with pytest.raises(TraceError, match="nothing tells which ranks its 120 activities are of"):
        load_trace(path)


@pytest.mark.parametrize("product", GENERATIONS)
def test_a_step_still_open_at_the_end_is_no_step(product: str, tmp_path: Path) -> None:
    capture = Capture(
        kernels=[Kernel("gemm", 20, 30, launch=15, thread=1), Kernel("gemm", 60, 70, launch=55, thread=1)],
        ranges=[Range("step 0", 10, 40, 1), Range("step 1", 50, None, 1), Range("later", 80, 90, 1)],
    )
    (rank,) = overlap_of(write_capture(tmp_path / "x.sqlite", capture, product)).ranks
    assert [(step.step, step.kernels, step.host_ns) for step in rank.steps] == [(0, 1, 30)]


def test_the_ranks_of_an_mpi_program_are_known(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", Capture([Kernel("gemm", 5, 9, 1, 7, process=7)]))
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE MPI_RANKS (globalTid, rank)")
        rows = [(global_tid(7, 7), 3), (global_tid(7, 9), 3), (global_tid(8, 8), None), (None, 5)]
        database.executemany("INSERT INTO MPI_RANKS VALUES (?, ?)", rows)
        database.commit()
    trace = load_trace(path)
    assert trace.ranks == {7: 3}
    assert trace.warnings == ("MPI calls are not read: only kernels and copies of NCCL and the like communicate here",)


def test_a_users_pattern_adds_communication(tmp_path: Path) -> None:
    capture = Capture(kernels=[Kernel("my_fabric_reduce(float*)", 10, 20, launch=5, thread=1)])
    path = write_capture(tmp_path / "x.sqlite", capture)
    assert overlap_of(path).ranks[0].collectives == 0
    assert measure_overlap(load_trace(path, ReadOptions(comm_patterns=("fabric_reduce",)))).ranks[0].collectives == 1


def test_the_file_stays_as_it_was(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth())
    before = hashlib.sha256(path.read_bytes()).digest()
    path.chmod(0o444)
    overlap_of(path)
    assert hashlib.sha256(path.read_bytes()).digest() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x.sqlite"], "no side file"


def test_odd_file_names_are_read(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "a b?c#d%20é.sqlite", known_truth(1))
    assert len(overlap_of(path).ranks) == 1


@pytest.mark.parametrize(
    ("tables", "first"),
    [
        (["cats (name)"], "cats"),
        (["CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId)", "StringTable (value)"], "CUPTI_ACTIVITY_KIND_MEMCPY"),
    ],
    ids=["of no profiler", "of nvprof"],
)
def test_a_foreign_database_is_refused_by_name(tables: list[str], first: str, tmp_path: Path) -> None:
    """The kernels of nvprof are in a table of another name, so its databases seemed to hold copies only."""
    path = tmp_path / "x.sqlite"
    with closing(sqlite3.connect(path)) as database:
        for table in tables:
            database.execute(f"CREATE TABLE {table}")
            database.execute(f"INSERT INTO {table.split()[0]} DEFAULT VALUES")
        database.commit()
    with pytest.raises(TraceError, match=rf"x\.sqlite: .*no Nsight Systems export .*{first}.*: record .* nsys profile"):
        load_trace(path)


def test_a_damaged_database_is_refused(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth())
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xff" * 4096 + data[8192:])
    with pytest.raises(TraceError, match=r"x\.sqlite"):
        load_trace(path)


@pytest.mark.parametrize("content", [b"", b"\0\1\2garbage" * 99, b"SQLite format 3\0", b"{", b"[1, 2", b"\x1f\x8bnope"])
def test_anything_else_is_refused_with_a_reason(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=str(path)):
        load_trace(path)


@pytest.mark.slow
def test_real_captures_agree_with_an_independent_program(shared_traces: Path) -> None:
    expected = json.loads((shared_traces / "expected.json").read_text())
    for name, want in expected.items():
        result = overlap_of(shared_traces / name)
        ranks = {f"{rank.process}/{rank.device}": rank for rank in result.ranks}
        for key, totals in want["totals"].items():
            assert {field: getattr(ranks[key], field) for field in totals} == totals, f"{name} {key}"
        steps = [step for rank in result.ranks for step in rank.steps] if "steps" in want else []
        for step, got in zip(want.get("steps", []), steps, strict=True):
            fields = [field for field in step if hasattr(got, field)]
            assert {"kernels", "collectives", "comm_ns", "overlapped_ns", "exposed_ns", "host_ns"} <= set(fields)
            assert {field: getattr(got, field) for field in fields} == {field: step[field] for field in fields}
        if not want["totals"]:
            assert all(rank.overlap_ratio is None and rank.reason for rank in result.ranks), name


@pytest.mark.parametrize("product", GENERATIONS)
def test_a_range_left_open_is_marked(product: str, tmp_path: Path) -> None:
    """Releases write NULL, 0 or -1 for the end that never came."""
    capture = Capture(ranges=[Range("step 0", 10, 40, 1), Range("step 1", 50, None, 1), Range("later", 80, 90, 1)])
    spans = load_trace(write_capture(tmp_path / "x.sqlite", capture, product)).spans
    assert list(zip(spans.start_ns, spans.end_ns, spans.is_open, strict=True)) == [
        (10, 40, 0),
        (50, 90, 1),
        (80, 90, 0),
    ]


@pytest.mark.parametrize("product", GENERATIONS)
def test_an_open_range_lasts_until_the_last_event_of_the_capture(product: str, tmp_path: Path) -> None:
    capture = Capture(
        kernels=[Kernel("gemm", 60, 700, launch=55, thread=1)],
        ranges=[Range("step 0", 0, 40, 1), Range("step 1", 50, None, 1)],
    )
    spans = load_trace(write_capture(tmp_path / "x.sqlite", capture, product)).spans
    assert spans.end_ns.tolist() == [40, 700]


def test_the_name_of_the_machine_where_the_export_tells_it(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth(1))
    assert load_trace(path).node is None
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT)")
        database.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('Hostname', 'node7'), ('OS', 'Linux')")
        database.commit()
    assert load_trace(path).node == "node7"


@pytest.mark.parametrize(
    ("machine", "seen", "gpu"),
    [
        ([(0, "Intel Iris"), (3, "NVIDIA H100")], [(100, 0, 3), (7, 0, 0)], "NVIDIA H100"),
        ([(0, "NVIDIA A100"), (3, "NVIDIA A100")], None, "NVIDIA A100"),
        ([(0, "Quadro"), (3, "NVIDIA H100")], None, None),
        ([(0, "Quadro")], [(100, 0, 9)], None),
    ],
    ids=[
        "a process sees some of the GPUs",
        "all are of one kind",
        "which of them is not told",
        "one that is not listed",
    ],
)
def test_the_name_of_the_gpu_where_the_export_tells_it(
    tmp_path: Path, machine: list[tuple[int, str]], seen: list[tuple[int, int, int]] | None, gpu: str | None
) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth(1))
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE TARGET_INFO_GPU (vmId INTEGER, id INTEGER, name TEXT)")
        database.executemany("INSERT INTO TARGET_INFO_GPU VALUES (1, ?, ?)", machine)
        if seen is not None:
            database.execute("CREATE TABLE TARGET_INFO_CUDA_DEVICE (pid INTEGER, cudaId INTEGER, gpuId INTEGER)")
            database.executemany("INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (?, ?, ?)", seen)
        database.commit()
    assert overlap_of(path).ranks[0].gpu == gpu


SHARED = "shared GPU: time-sliced"
PERHAPS = "processes 100, 101 use a device 0 at one time"


@pytest.mark.parametrize(
    ("machine", "seen", "second", "said"),
    [
        ([0], None, 0, SHARED),  # the only GPU of the machine
        ([0, 1], [(100, 0, 1), (101, 0, 1)], 0, SHARED),
        ([0, 1], [(100, 0, 1), (101, 0, 0)], 0, None),  # each process sees one GPU, and calls it 0
        ([0, 1], None, 0, PERHAPS),
        ([], None, 0, PERHAPS),
        ([0], None, 50, None),  # one after the other
    ],
)
def test_two_processes_that_compute_on_one_gpu_share_it(
    tmp_path: Path, machine: list[int], seen: list[tuple[int, int, int]] | None, second: int, said: str | None
) -> None:
    kernels = [
        Kernel("gemm", start, start + 10, launch=start, thread=process, process=process)
        for process, begin in ((100, 0), (101, second))
        for start in (begin, begin + 20)
    ]
    path = write_capture(tmp_path / "x.sqlite", Capture(kernels=kernels))
    with closing(sqlite3.connect(path)) as database:
        if machine:
            database.execute("CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT)")
            database.executemany("INSERT INTO TARGET_INFO_GPU VALUES (?, 'NVIDIA A100')", [(one,) for one in machine])
        if seen is not None:
            database.execute("CREATE TABLE TARGET_INFO_CUDA_DEVICE (pid INTEGER, cudaId INTEGER, gpuId INTEGER)")
            database.executemany("INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (?, ?, ?)", seen)
        database.commit()
    warnings = overlap_of(path).warnings
    assert [text for text in (SHARED, PERHAPS) if any(text in warning for warning in warnings)] == [said] * bool(said)


@pytest.mark.parametrize(("uuids", "said"), [(("a", "b"), False), (("a", "a"), True), ((None, None), True)])
def test_two_parts_of_a_gpu_are_not_shared(tmp_path: Path, uuids: tuple[str | None, ...], said: bool) -> None:
    """Of two processes on instances of one GPU (MIG), which compute at once, 'time-sliced' was said."""
    kernels = [Kernel("gemm", 0, 10, launch=0, thread=process, process=process) for process in (100, 101)]
    path = write_capture(tmp_path / "x.sqlite", Capture(kernels=kernels))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT)")
        database.execute("INSERT INTO TARGET_INFO_GPU VALUES (3, 'NVIDIA A100')")
        database.execute("CREATE TABLE TARGET_INFO_CUDA_DEVICE (pid, cudaId, gpuId, uuid)")
        rows = [(process, 0, 3, uuid) for process, uuid in zip((100, 101), uuids, strict=True)]
        database.executemany("INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (?, ?, ?, ?)", rows)
    found = overlap_of(path)
    assert any(SHARED in warning for warning in found.warnings) == said
    assert [rank.gpu for rank in found.ranks] == ["NVIDIA A100"] * 2


def test_what_nsys_reports_about_lost_events_is_said(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth(1))
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE DIAGNOSTIC_EVENT (timestamp, timestampType, source, severity, text, globalPid)")
        rows = [
            (2, "Not all CUDA events might have been\n collected."),
            (3, "Number of CUDA events dropped: 12."),
            (2, "Number of CPU IP samples lost: 3."),
            (1, "Common injection library initialized; nothing was lost."),
            (2, "CUPTI is of another version."),
            (2, None),
        ]
        database.executemany("INSERT INTO DIAGNOSTIC_EVENT VALUES (1, 0, 1, ?, ?, NULL)", rows)
        database.commit()
    assert load_trace(path).warnings == (
        "nsys itself reports: 'Not all CUDA events might have been collected.'",
        "nsys itself reports: 'Number of CUDA events dropped: 12.'",
    )


def test_two_strings_with_one_number_are_refused_and_the_last_does_not_win(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth(1))
    with closing(sqlite3.connect(path)) as database:
        database.execute("INSERT INTO StringIds SELECT id, value FROM StringIds")  # of two halves of one export
        database.commit()
    assert overlap_of(path).ranks[0].collectives
    with closing(sqlite3.connect(path)) as database:
        database.execute("INSERT INTO StringIds SELECT id, 'ncclDevKernel_AllReduce(x)' FROM StringIds LIMIT 1")
        database.commit()
    with pytest.raises(TraceError, match=r"two strings have the number \d+: it is put together from several exports"):
        load_trace(path)


@pytest.mark.parametrize(("table", "is_beside"), [(KERNEL, False), (NVTX, False), (KERNEL, True), ("OTHER", False)])
def test_a_table_of_a_later_version_alone_is_not_said_to_be_missing(
    table: str, is_beside: bool, tmp_path: Path
) -> None:
    """'No GPU activities were recorded', or no steps were marked."""
    path = write_capture(tmp_path / "x.sqlite", known_truth(1))
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE OTHER (id)")
        database.execute(f"CREATE TABLE {table}_V3 AS SELECT * FROM {table}")
        database.execute(f"INSERT INTO {table}_V3 DEFAULT VALUES")
        if not is_beside:
            database.execute(f"DROP TABLE {table}")
        database.commit()
    if is_beside or table == "OTHER":
        assert overlap_of(path).ranks[0].collectives
    else:
        with pytest.raises(TraceError, match=f"the form of its table {table}_V3 is not known"):
            load_trace(path)


def test_an_activity_without_times_is_left_out(tmp_path: Path) -> None:
    kernels = [Kernel("gemm", 10, 20, launch=5, thread=1), Kernel("gemm", 0, 0, launch=6, thread=1)]
    trace = load_trace(write_capture(tmp_path / "x.sqlite", Capture(kernels)))
    assert (len(trace.activities), trace.warnings) == (1, ("1 of 2 activities has no start and is left out",))


@pytest.mark.parametrize(("at_zero", "read"), [(3, 10), (4, 6)])
def test_activities_that_lost_their_start_alone_are_left_out(tmp_path: Path, at_zero: int, read: int) -> None:
    """They keep their ends, but many cannot all begin at 0."""
    starts = [0 if at < at_zero else 10 * at for at in range(10)]
    kernels = [Kernel("gemm", start, 10 * at + 5, launch=at, thread=1) for at, start in enumerate(starts)]
    trace = load_trace(write_capture(tmp_path / "x.sqlite", Capture(kernels)))
    assert len(trace.activities) == read
    assert ("4 of 10 activities have no start and are left out" in trace.warnings) == (read < 10)


def test_ranges_that_change_between_two_looks_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of ranges are read after their times: of an export that is still written, more or fewer."""
    path, read = write_capture(tmp_path / "x.sqlite", known_truth(8)), SqliteFile.text_batches

    def without_the_last(*of: Any) -> Any:
        for numbers, texts in read(*of):
            yield numbers[:-1], texts

    monkeypatch.setattr(SqliteFile, "text_batches", without_the_last)
    with pytest.raises(TraceError, match="it changed while it was read: wait until its export has ended"):
        load_trace(path)
