"""Arguments of collectives: from Kineto's kernels, and from the payload of NCCL's ranges."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ddp_prof.ingest.collective_args import message_bytes
from ddp_prof.ingest.load import load_trace
from ddp_prof.trace import UNKNOWN
from tests.ingest.nsys.test_sqlite_export import known_truth
from tests.ingest.test_kineto_json import event, write
from tests.measuring import collectives_of
from tests.nsys_factory import Capture, Kernel, Range, write_capture


def test_kineto_notes_operation_size_and_communicator(tmp_path: Path) -> None:
    noted = {
        "Collective name": "_allgather_base", "In msg nelems": 100, "Out msg nelems": 400, "dtype": "BFloat16",
        "Process Group Name": "3", "Group size": 4, "Seq": 17,
    }  # fmt: skip
    kernel = event("kernel", "ncclDevKernel_Generic(x)", "5", "1", device=0, stream=9, correlation=1, **noted)
    plain = event("kernel", "gemm", "1", "1", device=0, stream=7, correlation=2)
    trace = load_trace(write(tmp_path / "x.json", [plain, kernel]))
    assert trace.collective_metadata.activity.tolist() == [1]
    (only,) = collectives_of(trace)
    assert (only.op, only.bytes, only.group, only.ranks) == ("all_gather", 800, "3", 4)
    assert only.busbw_bytes_per_s == pytest.approx(0.75 * 800 / 1e-6)


def test_numbers_that_no_column_holds_are_not_known(tmp_path: Path) -> None:
    noted = {"Collective name": "allreduce", "In msg nelems": 2**70, "dtype": "Float", "Group size": -3, "Seq": 2**64}
    kernel = event("kernel", "ncclDevKernel_Generic(x)", "5", "1", device=0, stream=9, correlation=1, **noted)
    (only,) = collectives_of(load_trace(write(tmp_path / "x.json", [kernel])))
    assert (only.op, only.bytes, only.ranks) == ("all_reduce", None, None)


@pytest.mark.parametrize(
    ("elements", "kind", "size"),
    [
        ((3, 2), "Float", 12),
        ((None, 2), "Float8_e4m3fn", 2),
        ((None,), "Float", UNKNOWN),
        ((3,), "UInt16", 6),
        ((1,), "Quaternion", UNKNOWN),
    ],
)
def test_size_of_a_message(elements: tuple[int | None, ...], kind: str, size: int) -> None:
    assert message_bytes(elements, kind) == size


@pytest.mark.parametrize("product", ["2022.2", "2024.6", "2026.2", "2026.4"])
@pytest.mark.parametrize("column", ["jsonText", "jsonTextId", "both, the text in the row", "both, the text elsewhere"])
def test_nccls_payload_gives_size_and_communicator(tmp_path: Path, product: str, column: str) -> None:
    """The collective is launched by the end of the group, after its own range."""
    capture = Capture(
        kernels=[Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 50, 70, 27, 131, stream=9)],
        ranges=[
            Range("ncclAllReduce", 10, 20, 131, domain="NCCL", registered=True),
            Range("ncclGroupEnd", 25, 30, 131, domain="NCCL", registered=True),
        ],
    )
    path = write_capture(tmp_path / "x.sqlite", capture, product)
    payload = json.dumps({"NCCL": [{"NCCL communicator ID": 77, "Message size [bytes]": 4096}]})
    with closing(sqlite3.connect(path)) as database:
        if column == "jsonTextId":
            database.execute("ALTER TABLE NVTX_EVENTS DROP COLUMN jsonText")
        if column != "jsonText":
            database.execute("ALTER TABLE NVTX_EVENTS ADD COLUMN jsonTextId INTEGER")
        if column in {"jsonTextId", "both, the text elsewhere"}:
            database.execute("INSERT INTO StringIds (id, value) VALUES (9999, ?)", (payload,))
            database.execute("UPDATE NVTX_EVENTS SET jsonTextId = 9999 WHERE start = 10")
        else:
            database.execute("UPDATE NVTX_EVENTS SET jsonText = ? WHERE start = 10", (payload,))
        database.commit()
    (only,) = collectives_of(load_trace(path))
    assert (only.op, only.bytes, only.group) == ("all_reduce", 4096, "77")


def test_without_a_payload_the_size_is_not_known(tmp_path: Path) -> None:
    found = collectives_of(load_trace(write_capture(tmp_path / "x.sqlite", known_truth(1))))
    assert [(value.op, value.bytes, value.group) for value in found] == [("all_reduce", None, None)] * 2
    assert [value.when_ns("tail") for value in found] == [0, 9_000_000]
