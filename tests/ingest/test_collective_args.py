"""Arguments of collectives: from Kineto's kernels, and from the payload of NCCL's ranges."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.collectives import message_bytes
from ddp_prof.ingest.load import load_trace
from ddp_prof.trace import UNKNOWN, Category
from tests.ingest.test_kineto_json import event, write
from tests.ingest.test_nsys_export import known_truth
from tests.measuring import collectives_of, results_of
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


def test_a_kernel_with_a_collective_s_arguments_communicates_whatever_its_name(tmp_path: Path) -> None:
    """Torch's own kernels that run within a collective's call are no collectives, for example that for NaN."""
    noted = {"Collective name": "allreduce", "In msg nelems": 4, "Out msg nelems": 4, "dtype": "Float"}
    checks = "void c10d::checkForNaN<float>(float*, unsigned long)"
    copies = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int, ...)"
    names = ("vendor_ring", checks, copies, "")
    kernels = [event("kernel", name, str(at), "1", device=0, stream=9, **noted) for at, name in enumerate(names)]
    trace = load_trace(write(tmp_path / "x.json", kernels))
    assert trace.activities.category.tolist() == [
        Category.COMMUNICATION, Category.COMPUTE, Category.COMPUTE, Category.UNKNOWN,
    ]  # fmt: skip
    (only,) = collectives_of(trace)
    assert (only.op, only.bytes) == ("all_reduce", 16)


@pytest.mark.parametrize(
    ("others", "patterns", "category"),
    [
        (["gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"], (), Category.COMPUTE),
        (["gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"], ("oneRank",), Category.COMMUNICATION),
        (["gemm"], (), Category.COMMUNICATION),
    ],
    ids=["beside others", "as the user says", "of a job of one rank"],
)
def test_a_reduction_of_one_rank_communicates_with_nobody(
    others: list[str], patterns: tuple[str, ...], category: Category, tmp_path: Path
) -> None:
    """As in the data-parallel group of a job that only divides tensors; it counted as exposed communication."""
    names = ["void oneRankReduce<FuncPreMulSum<float>>(void*, void*, unsigned long)", *others]
    kernels = [event("kernel", name, str(at), "1", device=0, stream=9) for at, name in enumerate(names, 1)]
    capture = Capture([Kernel(name, 10 * at + 5, 10 * at + 9, 10 * at, 5) for at, name in enumerate(names, 1)])
    paths = write(tmp_path / "x.json", kernels), write_capture(tmp_path / "x.sqlite", capture, "2026.2")
    for path in paths:
        assert load_trace(path, ReadOptions(comm_patterns=patterns)).activities.category[0] == category


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
        ((None, 2), "Float8_e5m2", 2),
        ((3, 3), "float32", 12),
        ((3, 3), "bfloat16", 6),
        ((3, 3), "uint8", 3),
        ((3, 3), "complex64", 24),
        ((3, 3), "Float4_e2m1fn_x2", UNKNOWN),
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


def nccl_capture(
    path: Path, launches: list[int], ranges: list[tuple[str, int, int, int | None]], *of_others: Range
) -> Path:
    """Collectives of a communicator, each on the device for 10 us, and NCCL's ranges: name, start, end and bytes.

    Args:
        path: To be written.
        launches: When each kernel is launched; kernels with one launch are nodes of a graph.
        ranges: All of one thread.
        of_others: Ranges of other threads.
    """
    capture = Capture(
        kernels=[
            Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", at, at + 10_000, launch, 131, stream=9)
            for at, launch in zip(range(100_000, 10**6, 20_000), launches, strict=False)
        ],
        ranges=[
            *of_others,
            *(Range(name, start, end, 131, domain="NCCL", registered=True) for name, start, end, _ in ranges),
        ],
    )
    write_capture(path, capture)
    with closing(sqlite3.connect(path)) as database:
        for _, start, _, size in ranges:
            payload = json.dumps({"NCCL communicator ID": 77, "Message size [bytes]": size})
            if size is not None:
                database.execute("UPDATE NVTX_EVENTS SET jsonText = ? WHERE start = ?", (payload, start))
        database.commit()
    return path


MB = 1_000_000
GROUPED = [
    ("ncclGroupStart", 50, 55, None),
    ("ncclAllReduce", 60, 65, 3 * MB),
    ("ncclAllReduce", 70, 75, 5 * MB),
    ("ncclAllReduce", 80, 85, 2 * MB),
    ("ncclGroupEnd", 90, 110, None),
]
START = ("ncclGroupStart", 70, 72, None)


def test_a_range_that_is_closed_at_the_launch_tells_nothing_of_what_is_launched(tmp_path: Path) -> None:
    """A graph by node: its all-reduces of 1, 2 and 64 MB are captured one by one, and launched long after."""
    captured = [("ncclAllReduce", at, at + 5, size * MB) for at, size in ((10, 1), (20, 2), (30, 64))]
    found = collectives_of(load_trace(nccl_capture(tmp_path / "x.sqlite", [500, 500, 500], captured)))
    assert [(one.op, one.bytes, one.group, one.algbw_bytes_per_s) for one in found] == [
        ("all_reduce", None, None, None)
    ] * 3


def test_a_kernel_that_carries_out_a_group_moves_all_bytes_of_the_group(tmp_path: Path) -> None:
    (only,) = collectives_of(load_trace(nccl_capture(tmp_path / "x.sqlite", [100], GROUPED)))
    assert (only.op, only.bytes, only.group) == ("all_reduce", 10 * MB, "77")
    assert only.algbw_bytes_per_s == pytest.approx(1e12)


def test_a_group_is_of_one_thread_also_beside_one_that_another_thread_left_open(tmp_path: Path) -> None:
    left_open = Range("ncclGroupStart", 5, 8, 130, domain="NCCL", registered=True)
    (only,) = collectives_of(load_trace(nccl_capture(tmp_path / "x.sqlite", [100], GROUPED, left_open)))
    assert only.bytes == 10 * MB


@pytest.mark.parametrize(
    ("launches", "ranges", "expected"),
    [
        pytest.param([100, 101], GROUPED, [None, None], id="two kernels for three collectives"),
        pytest.param([100, 101, 102], GROUPED, [None] * 3, id="as many kernels, of different sizes"),
        pytest.param(
            [100, 101],
            [GROUPED[0], ("ncclAllReduce", 60, 65, MB), ("ncclAllReduce", 70, 75, MB), GROUPED[-1]],
            [MB, MB],
            id="as many kernels, of one size",
        ),
        pytest.param(
            [62, 100],
            [("ncclAllReduce", 60, 65, 4 * MB), START, ("ncclAllReduce", 75, 78, MB), GROUPED[-1]],
            [4 * MB, MB],
            id="one before the group",
        ),
        pytest.param(
            [100],
            [*GROUPED[:2], START, ("ncclAllReduce", 75, 78, MB), ("ncclGroupEnd", 80, 85, None), GROUPED[-1]],
            [4 * MB],
            id="a group within a group",
        ),
        pytest.param(
            [100],
            [GROUPED[0], ("ncclAllReduce", 60, 65, MB), ("ncclReduceScatter", 70, 75, MB), GROUPED[-1]],
            [None],
            id="one of which the whole size is not noted",
        ),
    ],
)
def test_bytes_of_what_groups_launch(
    launches: list[int], ranges: list[tuple[str, int, int, int | None]], expected: list[int | None], tmp_path: Path
) -> None:
    found = collectives_of(load_trace(nccl_capture(tmp_path / "x.sqlite", launches, ranges)))
    assert [one.bytes for one in found] == expected


def test_a_group_of_several_operations_names_none(tmp_path: Path) -> None:
    ranges = [GROUPED[0], ("ncclBroadcast", 60, 65, MB), ("ncclReduce", 70, 75, MB), GROUPED[-1]]
    path = nccl_capture(tmp_path / "x.sqlite", [100], ranges)
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE StringIds SET value = 'ncclDevKernel_Generic' WHERE value LIKE 'ncclDevKernel%'")
        database.commit()
    (only,) = collectives_of(load_trace(path))
    assert (only.op, only.bytes) == (None, 2 * MB)


def test_what_no_link_can_do_is_a_doubt_and_no_figure(tmp_path: Path) -> None:
    """64 MB in 10 us; the other one, with 10 MB, is as fast as it says."""
    calls = [("ncclAllReduce", 60, 65, 64 * MB), ("ncclAllReduce", 70, 75, 10 * MB)]
    result = results_of(load_trace(nccl_capture(tmp_path / "x.sqlite", [62, 72], calls)))
    assert [(one.bytes, one.algbw_bytes_per_s) for one in result.collectives] == [(64 * MB, None), (10 * MB, 1e12)]
    assert any("in their time: 1 (over 4,000 GB/s)" in warning for warning in result.warnings)


def test_without_a_payload_the_size_is_not_known(tmp_path: Path) -> None:
    found = collectives_of(load_trace(write_capture(tmp_path / "x.sqlite", known_truth(1))))
    assert [(value.op, value.bytes, value.group) for value in found] == [("all_reduce", None, None)] * 2
    assert [value.when_ns("tail") for value in found] == [0, 9_000_000]


@pytest.mark.parametrize(
    ("operator", "range_name", "arguments", "size"),
    [
        ("c10d::allreduce_", "nccl:all_reduce", {"Input Dims": [[10, 20]], "Input type": ["float"]}, 800),
        ("c10d::allreduce_", "nccl:allreduce_coalesced", {"Input Dims": [[3], [5]], "Input type": ["float"] * 2}, 32),
        ("c10d::allreduce_", "nccl:all_reduce", {"Input Dims": [[8]], "Input type": ["c10::BFloat16"]}, 16),
        ("c10d::allreduce_", "nccl:all_reduce", {"Input Dims": [[8]], "Input type": ["long int"]}, 64),
        ("c10d::allreduce_", "nccl:all_reduce", {"Input Dims": [[8]], "Input type": ["unsigned char"]}, 8),
        ("c10d::allreduce_", "nccl:all_reduce", {"Input Dims": [[8]], "Input type": ["c10::complex<float>"]}, 64),
        ("c10d::allreduce_", "nccl:all_reduce", {"Input Dims": [[8]], "Input type": ["Mystery"]}, None),
        ("c10d::allreduce_", "nccl:all_reduce", {"Input Dims": [[8], [2**40, 2**40]], "Input type": ["int"] * 2}, None),
        ("c10d::allreduce_", "nccl:all_reduce", {"Input Dims": "gone", "Input type": ["int"]}, None),
        ("c10d::allreduce_", "nccl:all_reduce", {}, None),
        ("c10d::_allgather_base_", "nccl:_all_gather_base", {"Input Dims": [[2]], "Input type": ["float"]}, None),
        ("c10d::_reduce_scatter_base_", "nccl:_reduce_scatter_base", {"Input Dims": [[8]], "Input type": ["int"]}, 32),
    ],
)
def test_torchs_ranges_tell_the_size_of_what_they_launch(
    operator: str, range_name: str, arguments: dict[str, object], size: int | None, tmp_path: Path
) -> None:
    """With ``record_shapes``, where the kernel itself has no arguments, as up to torch 2.1."""
    events = [
        event("cpu_op", operator, "10", "9", **{"Input Dims": [[], []], "Input type": ["TensorList", "Scalar"]}),
        event("user_annotation", range_name, "11", "7", **arguments),
        event("cuda_runtime", "cudaLaunchKernel", "12", "1", correlation=5),
        event("kernel", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)", "20", "5", device=0, stream=9, correlation=5),
    ]
    (only,) = collectives_of(load_trace(write(tmp_path / "x.json", events)))
    assert only.bytes == size


def alltoall(output: int, given: int) -> list[str]:
    shapes = {"Input Dims": [[output], [given], [], []], "Input type": ["int", "int", "", "Scalar"]}
    return [
        event("cpu_op", "c10d::alltoall_base_", "10", "9", **shapes),
        event("user_annotation", "nccl:all_to_all", "11", "7", **{"Input Dims": [[given]], "Input type": ["int"]}),
    ]


@pytest.mark.parametrize(("output", "given", "size"), [(768, 3392, 13568), (3392, 768, 13568)])
def test_the_call_tells_the_larger_side_of_an_all_to_all(output: int, given: int, size: int, tmp_path: Path) -> None:
    call = event("cuda_runtime", "cudaLaunchKernel", "12", "1", correlation=5)
    kernel = event("kernel", "ncclKernel_SendRecv_RING(x)", "20", "5", device=0, stream=9, correlation=5)
    (only,) = collectives_of(load_trace(write(tmp_path / "x.json", [*alltoall(output, given), call, kernel])))
    assert (only.op, only.bytes) == ("all_to_all", size)


def test_what_several_kernels_carry_out_is_not_the_size_of_one(tmp_path: Path) -> None:
    events = alltoall(768, 3392)
    for number in (5, 6):
        place = {"device": 0, "stream": number, "correlation": number}
        events.append(event("cuda_runtime", "cudaLaunchKernel", f"{7 + number}", "0.5", correlation=number))
        events.append(event("kernel", "ncclKernel_SendRecv_RING(x)", "20", "5", **place))
    assert {one.bytes for one in collectives_of(load_trace(write(tmp_path / "x.json", events)))} == {None}


def test_gloos_own_events_tell_their_size(tmp_path: Path) -> None:
    events = [event("user_annotation", "step|index=0", "0", "100")]
    events += [event("cpu_op", "aten::mm", f"{50 + at}", "1") for at in range(5)]
    sizes = [("all_reduce", 321_271, 1_285_084), ("all_reduce", 2_082_411, 8_329_644), ("all_gather", 8, None)]
    for number, (operation, elements, _) in enumerate(sizes):
        shapes = {"Input Dims": [[elements]], "Input type": ["float"]}
        events.append(event("user_annotation", f"gloo:{operation}", f"{10 * number}", "9", tid=2, **shapes))
        events.append(event("cpu_op", f"c10d::{operation}_", f"{10 * number}", "1"))
    found = collectives_of(load_trace(write(tmp_path / "x.json", events)))
    assert [(one.op, one.bytes) for one in found] == [(operation, size) for operation, _, size in sizes]
