"""A faster network also shortens the copies that run beside communication: the bound holds them."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from ddp_prof import load_runs
from tests.nsys_factory import NCCL, US, Capture, Kernel, Range, Sync, write_capture


def two_buckets() -> Capture:
    """Steps whose first copy out of a bucket runs beside the second all-reduce, which makes it twice as long.

    us         0    5    10   15   20
    stream 7   .gggg.....ccccc.....kk    c: copy of bucket 1, 2.5 alone; it and k need an all-reduce each
    stream 20  .....11111222222222       waits: 5 and 4; without communication, gccck takes 11.5 less
    """
    capture = Capture()
    for step in range(5):
        at, first = 100 * US * step, 20 * step
        capture.ranges += [
            Range(f"step {step}", at, at + 60 * US, 100),
            Range("backward", at + 1, at + 1 * US, 100),
        ]
        kernels = [
            ("gradient", 1, 5, 7, "kernel"),
            (NCCL, 5, 10, 20, "kernel"),
            (NCCL, 10, 19, 20, "kernel"),
            ("copy", 10, 15, 7, "memcpy"),
            ("adam", 19, 21, 7, "kernel"),
        ]
        numbers, launches = (1, 4, 6, 9, 11), (100, 300, 500, 700, 900)
        for (name, start, end, stream, kind), number, launch in zip(kernels, numbers, launches, strict=True):
            capture.kernels.append(
                Kernel(
                    name, at + start * US, at + end * US, at + launch, 100, stream=stream, kind=kind, bytes=1 << 20,
                    number=first + number,
                )
            )  # fmt: skip
        capture.syncs += [
            Sync("cudaEventRecord_v3020", at + 200, first + 2, 7, event=first + 2),
            Sync("cudaStreamWaitEvent_v3020", at + 250, first + 3, 20, event=first + 2),
            Sync("cudaEventRecord_v3020", at + 400, first + 5, 20, event=first + 5),
            Sync("cudaEventRecord_v3020", at + 600, first + 7, 20, event=first + 7),
            Sync("cudaStreamWaitEvent_v3020", at + 650, first + 8, 7, event=first + 5),
            Sync("cudaStreamWaitEvent_v3020", at + 800, first + 10, 7, event=first + 7),
            Sync("cudaDeviceSynchronize_v3020", at + 1_000, first + 12, 4294967295, lasts=21 * US),
        ]
    return capture


def test_a_faster_network_shortens_the_copies_beside_communication(tmp_path: Path) -> None:
    """Its bound was 9 us, which wait, though 11.5 are true."""
    (run,) = load_runs(write_capture(tmp_path / "two.sqlite", two_buckets()))
    bounds = run.cost().bounds
    waits, copy = 9 * US, 5 * US
    assert bounds.schedule_ns == waits
    assert bounds.high_ns == waits + copy, "by how much they are slowed is not known"


def test_what_the_host_waits_for_is_no_copy() -> None:
    """Of a step of 272 ms with 229 of communication, of which the host waits for all that is exposed, 344 were told."""
    (run,) = load_runs("traces/h200/nccl/sharded.rank0.json.gz")
    (rank,) = run.overlap().ranks
    bounds = run.cost().bounds
    assert bounds.high_ns == pytest.approx(median(step.comm_ns or 0 for step in rank.communicating_steps), rel=1e-3)
