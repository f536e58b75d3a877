"""Measures on a GPU how much communication slows compute, in two ways that share nothing but the kernels.

    python scripts/dev/contention_gpu.py --out FOLDER     # FOLDER/contention_KIND.rank0.json.gz and .truth.json

1. By events: the time of a chain of equal kernels, alone and beside communication all the time, in turns.
2. By a capture: steps of these kernels with communication beside a part of them, in each step another part, recorded
   by torch.profiler. ``ddp-prof overlap`` and ``kernels`` read it and infer the slowdown.

The communication is NCCL's, of a group of one rank, so that no other process takes turns on the GPU:

send     an all-to-all of the rank with itself, which NCCL 2.28 carries out by copies on the device
average  an all-reduce that averages, the kernel oneRankReduce
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from ddp_prof import annotate
from ddp_prof.annotate.recording import make_profile

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = ("send", "average")
UNITS = 24
"""Length of a step's chain; a unit is a matrix product and an addition."""
SIDE = 4096
"""Rows and columns of the matrix products, in bfloat16."""
ADDED = 2**26
"""Numbers of an addition, in float32: 256 MiB read, as much written."""
ROUNDS = 15
STEPS, WARMUP = 24, 3
CALLS = 3
"""Collectives of a step."""


class Chain:
    """The kernels that are timed, with buffers of their own."""

    def __init__(self) -> None:
        self.factor = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
        self.product = torch.empty_like(self.factor)
        self.numbers = torch.randn(ADDED, device="cuda")

    def multiply(self) -> None:
        torch.mm(self.factor, self.factor, out=self.product)

    def add(self) -> None:
        self.numbers.add_(1.0)

    def unit(self) -> None:
        self.multiply()
        self.add()


class Communication:
    """Collectives of one kind, each of ``size`` bytes, on NCCL's own stream."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size = kind, size
        self.sent = torch.randn(size // 4, device="cuda")
        self.received = torch.empty_like(self.sent)

    def launch(self) -> Any:
        if self.kind == "send":
            return dist.all_to_all_single(self.received, self.sent, async_op=True)
        return dist.all_reduce(self.sent, dist.ReduceOp.AVG, async_op=True)


class Timed(NamedTuple):
    chain_ms: float
    communication_ms: float


def time_chain(work: Callable[[], None], communication: Communication | None, calls: int) -> Timed:
    """Time the chain, after ``calls`` collectives were launched; both begin together."""
    begin, chain_end, comm_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(5_000_000 + 400_000 * calls)  # the host launches everything meanwhile
    pending = [communication.launch() for _ in range(calls)] if communication else []
    begin.record()
    for _ in range(UNITS):
        work()
    chain_end.record()
    with torch.cuda.stream(side):
        for one in pending:
            one.wait()
        comm_end.record()
    torch.cuda.synchronize()
    return Timed(begin.elapsed_time(chain_end), begin.elapsed_time(comm_end))


def measure_by_events(chain: Chain, communication: Communication) -> dict[str, Any]:
    """Time each kind of kernel alone and beside communication that lasts as long as the chain, in turns."""
    found: dict[str, Any] = {}
    for name, work in {"multiply": chain.multiply, "add": chain.add, "unit": chain.unit}.items():
        calls = 2
        time_chain(work, communication, calls)
        while (timed := time_chain(work, communication, calls)).communication_ms < 1.05 * timed.chain_ms:
            calls *= 2
            if calls > 4096:
                raise SystemExit(f"{communication.kind}: 4096 collectives end before {UNITS} of {name}")
        pairs = [(time_chain(work, None, 0), time_chain(work, communication, calls)) for _ in range(ROUNDS)]
        ratios = sorted(beside.chain_ms / alone.chain_ms for alone, beside in pairs)
        found[name] = {
            "alone_ms": statistics.median(alone.chain_ms for alone, _ in pairs),
            "beside_ms": statistics.median(beside.chain_ms for _, beside in pairs),
            "slowdown": statistics.median(ratios),
            "least": ratios[0],
            "most": ratios[-1],
            "calls": calls,
        }
    return found


def take_step(index: int, chain: Chain, communication: Communication) -> None:
    """Take one step; its collectives begin at another unit than in the step before."""
    first = (7 * index) % (UNITS - 4)
    pending: list[Any] = []
    with annotate.step(index, warmup=index < WARMUP):
        with annotate.forward():
            chain.unit()
        with annotate.backward():
            for number in range(UNITS):
                if number == first:
                    pending = [communication.launch() for _ in range(CALLS)]
                chain.unit()
        with annotate.synchronize():
            for one in pending:
                one.wait()
        with annotate.optimizer():
            chain.unit()


def record(path: Path, chain: Chain, communication: Communication) -> None:
    recorded = make_profile(on_gpu=True)
    torch.cuda.synchronize()
    with recorded, annotate.process(rank=0, world=1, variant="contention", backend="nccl", device="cuda"):
        for index in range(WARMUP + STEPS):
            take_step(index, chain, communication)
        torch.cuda.synchronize()
    recorded.export_chrome_trace(str(path))
    Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes(), 9))
    path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--mib", type=int, default=256, help="of a collective (default: %(default)s)")
    parser.add_argument(
        "--only-steps", action="store_true", help="take the steps without a recorder, to run under nsys"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl", init_method=f"file://{folder}/meet", rank=0, world_size=1, device_id=torch.device("cuda", 0)
        )
        chain = Chain()
        for kind in arguments.kinds:
            communication = Communication(kind, arguments.mib * 2**20)
            for index in range(WARMUP):
                take_step(index, chain, communication)
            torch.cuda.synchronize()
            if arguments.only_steps:
                with annotate.process(rank=0, world=1, variant="contention", backend="nccl", device="cuda"):
                    for index in range(WARMUP + STEPS):
                        take_step(index, chain, communication)
                    torch.cuda.synchronize()
                continue
            record(arguments.out / f"contention_{kind}.rank0.json", chain, communication)
            truth = {
                "kind": kind,
                "bytes": communication.size,
                "gpu": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "nccl": ".".join(map(str, torch.cuda.nccl.version())),
                "by_events": measure_by_events(chain, communication),
            }
            (arguments.out / f"contention_{kind}.truth.json").write_text(json.dumps(truth, indent=1) + "\n")
            for name, times in truth["by_events"].items():
                print(
                    f"{kind} {name}: {times['slowdown']:.3f} ({times['least']:.3f} to {times['most']:.3f})", flush=True
                )
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
