"""Measures the peak memory of a rank, to see that memory saved by sharding is not lost by copies.

    python scripts/dev/benchmark.py memory     # DDP, DDP with ZeroRedundancyOptimizer, ShardedOptimizer, sharded

It counts bytes of tensors, on a CPU by torch.profiler, on a GPU by torch's allocator: all tensors during the fourth
training step, and those that an optimizer step and its collectives allocate; each on the rank that needs most.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from script_ranks import add_options, run_ranks

from ddp_prof.errors import WorkloadError
from ddp_prof.train import MODEL_SIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ddp_prof.train.process_group import RankInfo

WARMUP = 3
REPEATS = 3
TARGET = 1.1
THEIRS = "DDP with ZeroRedundancyOptimizer"
OURS = ("DDP with ShardedOptimizer", "sharded")
Peaks = dict[str, tuple[int, int]]


def measure_peaks(arguments: argparse.Namespace, device: torch.device) -> Peaks:
    """Return the peaks of a training step and of an optimizer step for each way to train."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from ddp_prof.ddp import DataParallel, ShardedDDP, ShardedOptimizer, TorchDDP
    from ddp_prof.train.workload import Trainer, TransformerLM, make_tokens

    def unhooked(model: torch.nn.Module) -> DataParallel:
        return TorchDDP(model, mark_buckets=False)

    makers: Any = torch.optim.AdamW, ZeroRedundancyOptimizer, ShardedOptimizer  # the last two take its class
    whole, zero, ours = makers
    ways: dict[str, tuple[Callable[[torch.nn.Module], DataParallel], Callable[..., Any]]] = {
        "DDP": (unhooked, whole),
        THEIRS: (unhooked, lambda parameters, **options: zero(parameters, whole, **options)),
        OURS[0]: (unhooked, lambda parameters, **options: ours(parameters, whole, **options)),
        OURS[1]: (lambda model: ShardedDDP(model, arguments.bucket_size_mb), whole),
    }
    tokens = make_tokens(1, arguments.batch_size // arguments.world_size, arguments.seq_len, seed=0).to(device)

    def peaks_of(wrap: Callable[..., DataParallel], make_optimizer: Callable[..., Any]) -> tuple[int, int]:
        made: list[Any] = []

        def train() -> None:
            torch.manual_seed(0)
            with device:
                variant = wrap(TransformerLM(MODEL_SIZES[arguments.model_size]))
            made.extend((variant, make_optimizer(variant.optimizer_parameters(), lr=1e-3, fused=device.type == "cuda")))
            for _ in range(WARMUP):  # DDP rebuilds its buckets in these
                take_step()

        def take_step() -> None:
            Trainer(*made).train_step(tokens[0, :, :-1], tokens[0, :, 1:])

        def step() -> None:
            variant, optimizer = made
            optimizer.step()
            if isinstance(variant, ShardedDDP):
                variant.wait_for_parameters()

        _, kept = count_bytes(train, device)
        training, _ = count_bytes(take_step, device)
        optimizing, _ = count_bytes(step, device)
        return kept + training, optimizing

    # The smallest of several, because gloo's threads may keep a tensor that is not used any more.
    repeats = [[peaks_of(*way) for way in ways.values()] for _ in range(REPEATS)]
    own = torch.tensor(repeats, device=device).amin(0)
    torch.distributed.all_reduce(own, torch.distributed.ReduceOp.MAX)
    return dict(zip(ways, map(tuple, own.tolist()), strict=True))


def count_bytes(action: Callable[[], None], device: torch.device) -> tuple[int, int]:
    """Return by how many bytes the tensors grew during ``action`` at most, and by how many at its end."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        return torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
    with torch.profiler.profile(profile_memory=True) as profiler:
        action()
        gc.collect()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    levels = [*itertools.accumulate((size for _, size in changes), initial=0)]
    return max(levels), levels[-1]


def judge(peaks: Peaks, gate: bool) -> None:
    """Print the peaks; ours also as multiples of ZeroRedundancyOptimizer's."""
    missed = False
    for name, (training, step) in peaks.items():
        line = f"{name}: {training / 2**20:.1f} MiB in a training step, {step / 2**20:.1f} MiB of an optimizer step"
        if name in OURS:
            ratio = training / peaks[THEIRS][0]
            missed |= ratio > TARGET
            line += f"; in training {ratio:.3f} times {THEIRS}'s"
        print(line)
    print(f"target at most {TARGET}: {'NOT MET' if missed else 'met'}")
    if gate and missed:
        raise WorkloadError(f"a peak is above {TARGET} times that of {THEIRS}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2, help="ranks (default: %(default)s)")
    add_options(parser)
    parser.add_argument("--model-size", choices=MODEL_SIZES, default="mini", help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=4, help="of all ranks together (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--bucket-size-mb", type=float, default=25.0, help="for sharded (default: %(default)g)")
    parser.add_argument("--gate", action="store_true", help="fail if the target is missed")
    arguments = parser.parse_args(argv)

    def measure_on_rank(_place: RankInfo, device: torch.device) -> Peaks:
        return measure_peaks(arguments, device)

    return run_ranks(arguments, measure_on_rank, lambda peaks: judge(peaks, arguments.gate))


if __name__ == "__main__":
    sys.exit(main())
