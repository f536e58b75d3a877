"""Of several ranks: whose host launches too late."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from ddp_prof.runs import load_runs
from tests.nsys_factory import NCCL, Capture, Kernel, Range, Sync, write_capture

MS = 1_000_000


def slow_hosts(slow: Collection[int], ranks: int = 4, steps: int = 6) -> Capture:
    """Four kernels, an all-reduce and an optimizer; a slow host launches a kernel each 2 ms, of rank 3 a bit later.

    ms          0    1    2    3    4    5    6    7    8
    slow host   k    .    k    .    k    .    k    AAA  o
    other one   kkkk AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA  o
    """
    capture = Capture(threads={(100 + rank, 100 + rank): "python3" for rank in range(ranks)})
    for rank in range(ranks):
        write_rank(capture, rank, ranks, steps, is_slow=rank in slow)
    return capture


def write_rank(capture: Capture, rank: int, ranks: int, steps: int, *, is_slow: bool) -> None:
    process, number = 100 + rank, 0
    whole = f"process|rank={rank}|world={ranks}|variant=torch|backend=nccl|device=cuda"
    capture.ranges.append(Range(whole, 0, steps * 10 * MS, process, process, "ddp_prof"))
    for step in range(steps):
        begin, event = step * 10 * MS + 1_000, 2 * step + 1
        end = begin + 8 * MS

        def launch(at: int, start: int, end: int, stream: int = 7, name: str = "gemm") -> None:
            nonlocal number
            number += 1
            capture.kernels.append(Kernel(name, start, end, at, process, process, stream, number=number))

        def sync(call: str, at: int, stream: int, event: int, lasts: int = 1) -> None:
            nonlocal number
            number += 1
            capture.syncs.append(
                Sync(call, at, number, stream, event=event, sync_id=event, thread=process, process=process, lasts=lasts)
            )

        capture.ranges.append(Range(f"step {step}", begin, end + MS, process, process))
        at, ready = begin, begin
        for kernel in range(4):
            at = begin + (kernel * 2 * MS + (rank == 3) * 20_000 if is_slow else kernel * 10_000)
            start = max(at + 2_000, ready)
            ready = start + MS // 2
            launch(at, start, ready)
        sync("cudaEventRecord_v3020", at + 6_000, 7, event)
        sync("cudaStreamWaitEvent_v3020", at + 7_000, 20, event)
        launch(at + 8_000, max(at + 10_000, ready), end, 20, NCCL)
        sync("cudaEventRecord_v3020", at + 14_000, 20, event + 1)
        sync("cudaStreamWaitEvent_v3020", at + 15_000, 7, event + 1)
        launch(at + 16_000, end, end + MS // 2, 7, "adam")
        sync("cudaDeviceSynchronize_v3020", at + 30_000, 4294967295, 4294967295, end + MS // 2 - at)


@pytest.mark.parametrize("slow", [(3,), (2, 3)])
def test_each_rank_whose_host_is_late_is_named(tmp_path: Path, slow: tuple[int, ...]) -> None:
    """The path of each step goes through rank 3, so it alone was named, though rank 2 of its node is no faster."""
    (run,) = load_runs(write_capture(tmp_path / "x.sqlite", slow_hosts(slow)))
    (finding,) = [one for one in run.doctor().findings if one.rule == "launch-bound host"]
    assert finding.ranks == tuple(f"rank {rank}" for rank in slow)


def test_where_no_waits_are_recorded_the_rank_is_named_whose_time_is_given(tmp_path: Path) -> None:
    """'For 40 % of a typical step, 7.17 ms' was said of eight ranks whose typical step takes 14.5 ms."""
    capture = slow_hosts((2, 3))
    capture.syncs.clear()
    (run,) = load_runs(write_capture(tmp_path / "x.sqlite", capture))
    (finding,) = [one for one in run.doctor().findings if one.rule == "launch-bound host"]
    assert " of a typical step of rank 3, " in finding.evidence, "of the one that is late most"
