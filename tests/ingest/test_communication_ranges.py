"""What ranges of NCCL and torch tell: copies that are collectives, and operations that kernels do not name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_prof.analyze.overlap import RankOverlap, measure_overlap
from ddp_prof.ingest.load import load_trace
from ddp_prof.trace import Category
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


COPY_ON_DEVICE, COPY_TO_DEVICE = "Memcpy DtoD (Device -> Device)", "Memcpy HtoD (Pinned -> Device)"


def copies_within(path: Path, range_name: str, *work: str, world: int = 2, group: int = 2) -> list[int]:
    """The lengths of what communicates, in us, of copies (10 us) and kernels (30 us) launched within a range of torch.

    Work that begins with ``other:`` is launched after the range.
    """
    events = [
        event("user_annotation", "ProfilerStep#1", "0", "500"),
        event("user_annotation", range_name, "10", "20"),
        event("cpu_op", "record_param_comms", "11", "18", **{"Group size": group}),
    ]
    for number, name in enumerate(work, 1):
        launch = 40 + number if name.startswith("other:") else 12 + number
        is_copy = "Memcpy" in name
        category, length = ("gpu_memcpy", 10) if is_copy else ("kernel", 30)
        place = {"tid": 7, "device": 0, "stream": 7, "correlation": number}
        events.append(event("cuda_runtime", "cudaLaunchKernel", f"{launch}", "0.5", correlation=number))
        events.append(event(category, name.removeprefix("other:"), f"{50 * number}", f"{length}", **place))
    info = {"backend": "nccl", "rank": 0, "world_size": world}
    trace = load_trace(write(path / "x.json", events, distributedInfo=info))
    rows = trace.activities.category == Category.COMMUNICATION
    return ((trace.activities.end_ns - trace.activities.start_ns)[rows] // 1000).tolist()


@pytest.mark.parametrize(
    "name",
    ["nccl:_all_gather_base", "nccl:all_to_all", "nccl:coalesced", "nccl:gather", "nccl:scatter", "nccl:broadcast",
     "nccl:all_gather_into_tensor_coalesced, op_id = 7", "xccl:_all_gather_base"],
)  # fmt: skip
def test_a_range_of_torch_whose_work_is_copies_alone_communicates(name: str, tmp_path: Path) -> None:
    """FSDP2 with symmetric memory and NCCL's zero-CTA policy: 100 % of communication seemed to be hidden."""
    work = [COPY_ON_DEVICE, COPY_ON_DEVICE, f"other:{COPY_ON_DEVICE}", "other:gemm"]
    assert copies_within(tmp_path, name, *work) == [10, 10]


@pytest.mark.parametrize(
    ("name", "work", "communicates"),
    [
        ("nccl:all_gather", ["ncclDevKernel_AllGather_RING_LL(x)", COPY_ON_DEVICE, COPY_ON_DEVICE], [30]),
        ("nccl:all_gather", [COPY_ON_DEVICE, "ncclDevKernel_AllGather_RING_LL(x)"], [30]),
        ("nccl:_all_gather_base", [COPY_TO_DEVICE], []),
        ("nccl:all_reduce", [COPY_ON_DEVICE], []),
        ("nccl:_reduce_scatter_base", [COPY_ON_DEVICE], []),
        ("nccl:barrier", [COPY_ON_DEVICE], []),
        ("FSDP::all_gather (layers.0)", [COPY_ON_DEVICE], []),
    ],
    ids=[
        "unflattened after",
        "flattened before",
        "set up",
        "copies add nothing",
        "nor these",
        "a barrier",
        "no library",
    ],
)
def test_other_copies_within_a_range_are_no_communication(
    name: str, work: list[str], communicates: list[int], tmp_path: Path
) -> None:
    assert copies_within(tmp_path, name, *work) == communicates


@pytest.mark.parametrize(("world", "group"), [(1, 1), (8, 1)])
def test_a_group_of_one_rank_copies_to_itself(world: int, group: int, tmp_path: Path) -> None:
    """NCCL carries out the collectives of such a group as one copy."""
    assert copies_within(tmp_path, "nccl:_all_gather_base", COPY_ON_DEVICE, world=world, group=group) == []


@pytest.mark.parametrize("product", GENERATIONS)
@pytest.mark.parametrize(("name", "comm_ns"), [("nccl:_all_gather_base", 1100), ("nccl:all_reduce", 0)])
def test_torchs_ranges_tell_it_in_nsys_too(name: str, comm_ns: int, product: str, tmp_path: Path) -> None:
    """Recorded with ``torch.autograd.profiler.emit_nvtx``, where NCCL's own ranges are switched off."""
    assert measured(tmp_path, [Range(name, 500, 530, AUTOGRAD)], product).comm_ns == comm_ns


@pytest.mark.parametrize(
    ("name", "arguments", "communicates"),
    [
        ("Memcpy PtoP (Device -> Device)", {}, True),
        ("Memcpy", {"copy kind": "PtoP"}, True),
        ("Memcpy", {"copy kind": 10}, True),
        ("Memcpy", {"copy kind": "DtoD"}, False),
        ("Memcpy", {"copy kind": 8}, False),
        ("Memcpy", {"copy kind": None}, False),
        (COPY_ON_DEVICE, {}, False),
    ],
)
def test_a_copy_between_devices_communicates_in_kineto(
    name: str, arguments: dict[str, Any], communicates: bool, tmp_path: Path
) -> None:
    place = {"tid": 7, "device": 0, "stream": 7, "correlation": 5}
    events = [
        event("cuda_runtime", "cudaMemcpyAsync", "15", "1", correlation=5),
        event("gpu_memcpy", name, "20", "10", **place, **arguments),
        event("kernel", "gemm", "40", "10", tid=7, device=0, stream=7),
    ]
    (rank,) = measure_overlap(load_trace(write(tmp_path / "x.json", events))).ranks
    assert (rank.comm_ns, rank.collectives) == ((10_000, 1) if communicates else (0, 0))


@pytest.mark.parametrize("product", GENERATIONS)
@pytest.mark.parametrize(("copy_kind", "comm_ns"), [(10, 1100), (8, 0), (1, 0)])
def test_a_copy_between_devices_communicates_in_nsys(
    copy_kind: int, comm_ns: int, product: str, tmp_path: Path
) -> None:
    capture = Capture(
        kernels=[
            Kernel("gemm", 1000, 2000, launch=100, thread=MAIN),
            Kernel("copy", 1500, 2600, launch=510, thread=MAIN, kind="memcpy", stream=9, copy_kind=copy_kind),
        ],
        ranges=[Range("step 0", 0, 900, MAIN)],
    )
    (rank,) = measure_overlap(load_trace(write_capture(tmp_path / "x.sqlite", capture, product))).ranks
    assert rank.comm_ns == comm_ns
