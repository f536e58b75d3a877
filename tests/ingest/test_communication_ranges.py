"""What ranges of NCCL and torch tell: copies that are collectives, and operations that kernels do not name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.analyze.overlap import RankOverlap, measure_overlap
from ddp_prof.ingest.load import load_trace
from tests.ingest.test_kineto_json import event, write
from tests.measuring import collectives_of
from tests.nsys_factory import GENERATIONS, Capture, Kernel, Range, write_capture

MAIN, AUTOGRAD = 100, 131


def measured(path: Path, ranges: list[Range], product: str = "2026.2", thread: int = AUTOGRAD) -> RankOverlap:
    capture = Capture(
        kernels=[
            Kernel("gemm", 1000, 2000, launch=100, thread=MAIN),
            Kernel("copy", 1500, 2600, launch=510, thread=thread, kind="memcpy", stream=9, bytes=4096),
        ],
        ranges=[Range("step 0", 0, 900, MAIN), *ranges],
    )
    (rank,) = measure_overlap(load_trace(write_capture(path / "x.sqlite", capture, product))).ranks
    return rank


@pytest.mark.parametrize("product", GENERATIONS)
@pytest.mark.parametrize("registered", [True, False], ids=["registered", "inline"])
def test_a_copy_launched_by_a_collective_is_communication(product: str, registered: bool, tmp_path: Path) -> None:
    collective = Range("ncclAllGather", 500, 530, AUTOGRAD, domain="NCCL", registered=registered)
    rank = measured(tmp_path, [collective], product)
    assert (rank.collectives, rank.comm_ns, rank.overlapped_ns, rank.exposed_ns) == (1, 1100, 500, 600)
    assert rank.kernels == 1, "a copy is no kernel, whatever it is for"


def test_a_grouped_collective_is_launched_by_the_end_of_the_group(tmp_path: Path) -> None:
    group = [("ncclGroupStart", 480), ("ncclAllGather", 490), ("ncclGroupEnd", 500)]
    rank = measured(tmp_path, [Range(name, at, at + 20 * (name == "ncclGroupEnd") + 5, AUTOGRAD) for name, at in group])
    assert rank.comm_ns == 1100


@pytest.mark.parametrize(
    ("name", "thread"),
    [("ncclGroupEnd", AUTOGRAD), ("ncclCommInitRank", AUTOGRAD), ("all_gather", AUTOGRAD), ("ncclAllGather", MAIN)],
    ids=["a group without a collective", "no collective", "not NCCL's", "another thread"],
)
def test_other_copies_stay_memory(name: str, thread: int, tmp_path: Path) -> None:
    before = [Range("ncclAllGather", 400, 410, AUTOGRAD), Range("ncclGroupStart", 480, 485, AUTOGRAD)]
    assert measured(tmp_path, [*before, Range(name, 500, 530, thread)]).comm_ns == 0


def operation(path: Path, kernel: str, ranges: list[Range], launch: int = 510) -> str | None:
    capture = Capture(kernels=[Kernel(kernel, 600, 700, launch, AUTOGRAD, stream=9)], ranges=ranges)
    (only,) = collectives_of(load_trace(write_capture(path / "x.sqlite", capture)))
    return only.op


SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
GROUP = [
    Range("ncclGroupStart", 470, 475, AUTOGRAD),
    Range("ncclSend", 480, 485, AUTOGRAD),
    Range("ncclRecv", 490, 495, AUTOGRAD),
    Range("ncclGroupEnd", 500, 530, AUTOGRAD),
]


def test_an_all_to_all_is_one_though_its_kernel_is_called_send_and_receive(tmp_path: Path) -> None:
    torchs = Range("nccl:all_to_all, op_id = 991144", 450, 540, AUTOGRAD)
    assert operation(tmp_path, SEND_RECV, [torchs, *GROUP]) == "all_to_all"


@pytest.mark.parametrize(
    ("ranges", "launch", "told"),
    [
        ([], 510, "send_recv"),
        (GROUP, 510, "send_recv"),
        ([Range("ncclAllReduce", 500, 530, AUTOGRAD, domain="NCCL")], 510, "all_reduce"),
        ([Range("ncclAllReduce", 500, 530, MAIN, domain="NCCL")], 510, "send_recv"),
        ([Range("ncclAllReduce", 400, 410, AUTOGRAD), Range("ncclGroupEnd", 500, 530, AUTOGRAD)], 510, "all_reduce"),
        ([Range("ncclAllReduce", 400, 410, AUTOGRAD)], 510, "send_recv"),
        ([Range("nccl:coalesced", 500, 530, AUTOGRAD)], 510, "send_recv"),
    ],
    ids=["no range", "send and receive", "NCCL's", "another thread's", "a group's", "closed: a graph", "says nothing"],
)
def test_a_kernels_name_yields_to_the_range_round_its_launch(
    ranges: list[Range], launch: int, told: str, tmp_path: Path
) -> None:
    assert operation(tmp_path, SEND_RECV, ranges, launch) == told


@pytest.mark.parametrize(
    ("backend", "kernel"),
    [
        ("nccl", "ncclKernel_SendRecv_RING(x)"),
        ("xccl", "oneccl_reduce_base<float, 2, 16>"),
        ("mccl", "mcclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(mcclWorkElem)"),
    ],
)
def test_torchs_annotation_names_the_operation_in_kineto(backend: str, kernel: str, tmp_path: Path) -> None:
    events = [
        event("user_annotation", f"{backend}:_reduce_scatter_base", "10", "20"),
        event("cuda_runtime", "cudaLaunchKernelExC", "15", "1", correlation=5),
        event("kernel", kernel, "20", "10", tid=7, device=0, stream=7, correlation=5),
    ]
    (only,) = collectives_of(load_trace(write(tmp_path / "x.json", events)))
    assert only.op == "reduce_scatter"
