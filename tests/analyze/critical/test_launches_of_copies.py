"""What copies out of buckets cost a host that launches more slowly than its device works."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof import load_runs
from tests.nsys_factory import NCCL, US, Capture, Kernel, Range, Sync, write_capture

COPIES, LAUNCH = 4, 20 * US


def slow_host(thread: int) -> Capture:
    """Steps whose copies are launched long after their all-reduce has ended, by autograd's thread or by the main one.

    us         0   20  40  60  80  100 120
    host       g   A   c   c   c   c   o        each launch takes 20
    stream 7   .ggg     c   c   c   c   ooo|
    stream 20  ....AA
    """
    capture = Capture(threads={(100, 100): "python", (100, 101): "pt_autograd_0"})
    for step in range(6):
        at, first = 300 * US * step, 20 * step
        copies = at + 40 * US
        optimizer = copies + COPIES * LAUNCH
        end = optimizer + 30 * US
        capture.ranges += [
            Range(f"step {step}", at, end, 100),
            Range("backward", at + 100, optimizer - 1 * US, 100),
            Range("optimizer", optimizer - 500, end - 1 * US, 100),
        ]
        capture.kernels += [
            Kernel("gradient", at + 3 * US, at + 15 * US, at + 1 * US, 101, number=first + 1),
            Kernel(NCCL, at + 22 * US, at + 32 * US, at + 20 * US, 101, stream=20, number=first + 4),
            *(
                Kernel(
                    "copy", begins + 7 * US, begins + 9 * US, begins, thread, kind="memcpy", bytes=1 << 20,
                    number=first + 7 + copy, call="cudaMemcpyAsync",
                )
                for copy in range(COPIES)
                for begins in [copies + copy * LAUNCH]
            ),
            Kernel("adam", optimizer + 7 * US, optimizer + 20 * US, optimizer, 100, number=first + 7 + COPIES),
        ]  # fmt: skip
        capture.syncs += [
            Sync("cudaEventRecord_v3020", at + 8 * US, first + 2, 7, event=first + 2, thread=101),
            Sync("cudaStreamWaitEvent_v3020", at + 10 * US, first + 3, 20, event=first + 2, thread=101),
            Sync("cudaEventRecord_v3020", at + 24 * US, first + 5, 20, event=first + 5, thread=101),
            Sync("cudaStreamWaitEvent_v3020", at + 26 * US, first + 6, 7, event=first + 5, thread=101),
            Sync(
                "cudaDeviceSynchronize_v3020", optimizer + 8 * US, first + 8 + COPIES, 4294967295, lasts=14 * US,
            ),
        ]  # fmt: skip
    return capture


@pytest.mark.parametrize("thread", [100, 101])
def test_without_copies_the_host_goes_on_earlier(tmp_path: Path, thread: int) -> None:
    """Each launch takes 20 us, and the optimizer is launched after all of them: it was said to gain nothing."""
    (run,) = load_runs(write_capture(tmp_path / "slow.sqlite", slow_host(thread)))
    (copies,) = (one for one in run.doctor().findings if one.rule == "copies out of buckets")
    assert copies.expected_gain_ns == pytest.approx(COPIES * LAUNCH, rel=0.1)
