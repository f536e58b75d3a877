"""What is added to a trace once it was read: an ordered list of steps that share one launch join."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

import ddp_prof.trace
from ddp_prof.errors import TraceError
from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.load import load_trace
from ddp_prof.trace import UNKNOWN, Activities, Calls, Category
from tests.ingest.test_nsys_raw_report import report, stand_in  # noqa: F401
from tests.nsys_factory import US, Capture, Kernel, Range, write_capture

MAIN, AUTOGRAD = 100, 131

EVERYTHING = Capture(
    kernels=[
        Kernel("gemm", 1000, 2000, launch=100, thread=MAIN),
        Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 1500, 2600, launch=610, thread=AUTOGRAD, stream=9),
        Kernel("copy", 1500, 2600, launch=510, thread=AUTOGRAD, kind="memcpy", stream=9, bytes=4096),
    ],
    ranges=[
        Range("process|rank=1|world=2", 0, 5000, MAIN, domain="ddp_prof"),
        Range("ncclAllGather", 500, 530, AUTOGRAD, domain="NCCL", registered=True),
        Range("ncclAllReduce", 600, 630, AUTOGRAD, domain="NCCL", registered=True),
    ],
)


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one element with each join of activities and calls."""
    counted: list[int] = []
    join = ddp_prof.trace.join_launches

    def counting(activities: Activities, calls: Calls) -> Any:
        counted.append(len(activities))
        return join(activities, calls)

    monkeypatch.setattr(ddp_prof.trace, "join_launches", counting)
    return counted


def everything(path: Path) -> Path:
    """A capture that each of the steps adds something to."""
    write_capture(path, EVERYTHING)
    with closing(sqlite3.connect(path)) as database:
        payload = json.dumps({"NCCL communicator ID": 77, "Message size [bytes]": 4096})
        database.execute("UPDATE NVTX_EVENTS SET jsonText = ? WHERE start = 600", (payload,))
        database.commit()
    return path


def test_launches_are_joined_once(joins: list[int], tmp_path: Path) -> None:
    trace = load_trace(everything(tmp_path / "x.sqlite"), ReadOptions(with_launches=True))
    assert trace.activities.category.tolist() == [Category.COMPUTE, Category.COMMUNICATION, Category.COMMUNICATION]
    assert (trace.ranks, trace.world_size) == ({MAIN: 1}, 2)
    assert trace.collective_metadata.bytes.tolist() == [4096, UNKNOWN], "the copies' range has no payload"
    assert trace.shape_id is not None
    assert trace.calls.start_ns[trace.launching_calls].tolist() == [100, 610, 510]
    assert joins == [3]


def test_launches_of_a_report_are_joined_once(
    joins: list[int],
    report: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(tmp_path, monkeypatch)
    trace = load_trace(report)
    assert trace.source == "nsys-report"
    assert len(trace.launching_calls) == 60
    assert joins == [60]


def test_launches_of_kineto_are_joined_once(joins: list[int], tmp_path: Path) -> None:
    event = {"ph": "X", "name": "gemm", "ts": 1, "dur": 2, "pid": 0, "tid": 7, "args": {"correlation": 3}}
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"traceEvents": [event | {"cat": "kernel"}, event | {"cat": "cuda_runtime"}]}))
    assert load_trace(path, ReadOptions(with_launches=True)).launching_calls.tolist() == [0]
    assert joins == [1]


@pytest.mark.parametrize(("other", "refused"), [(MAIN, True), (MAIN + 1, False)])
def test_one_number_for_processes_of_two_machines_is_refused(tmp_path: Path, other: int, refused: bool) -> None:
    """Their kernels would be one rank's. Processes of several machines that have numbers of their own are read."""
    kernels = [Kernel("gemm", 10 * at, 20 * at, launch=at, thread=MAIN, process=at) for at in (MAIN, MAIN + 1)]
    path = write_capture(tmp_path / "x.sqlite", Capture(kernels))
    with closing(sqlite3.connect(path)) as database:
        database.execute(
            "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET globalPid = ? WHERE start = ?", (7 << 48 | other << 24, 1010)
        )
        database.commit()
    with pytest.raises(TraceError, match="several machines") if refused else nullcontext():
        load_trace(path)


@pytest.mark.parametrize(("others", "ends_us"), [(2, 60), (3, 20)])
def test_only_a_kernel_that_is_longer_than_three_others_of_its_name_ends_as_the_next_one_begins(
    others: int, ends_us: int, tmp_path: Path
) -> None:
    """Two may be short by chance.

    us         0         10        20        30
    stream 7   .bbbbbbbb....fffff                             fffff begins while the first bbb... seems to run, until 60
    """
    alike = [Kernel("bwd", at * US, (at + 8) * US, (at - 1) * US, MAIN) for at in range(100, 100 + 20 * others, 20)]
    first, after = Kernel("bwd", US, 60 * US, 0, MAIN), Kernel("fwd", 20 * US, 25 * US, 2 * US, MAIN)
    trace = load_trace(write_capture(tmp_path / "x.sqlite", Capture(kernels=[first, after, *alike])), ReadOptions())
    assert int(trace.activities.end_ns[0]) == ends_us * US
    assert len(trace.overlong) == (others > 2)
