"""Collectives without a kernel: NCCL launches copies, and the copy engines move the gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.analyze.overlap.overlap import RankOverlap, measure_overlap
from ddp_prof.ingest.load import load_trace
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
    assert measured(tmp_path, [Range(name, 500, 530, thread)]).comm_ns == 0
