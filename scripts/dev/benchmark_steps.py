"""Measures what our variants and ranges cost in a step. Each benchmark prints one ratio and its target.

    python scripts/dev/benchmark.py ddp       # step time of our bucketed variant against torch's DDP
    python scripts/dev/benchmark.py sharded   # of our sharded variant against torch's DDP with ZeroRedundancyOptimizer
    python scripts/dev/benchmark.py ranges    # step time with ranges against without

Both sides alternate step by step within one run, so that other load on the machine affects both alike. The ranks are
processes on the CPU (gloo) by default (see ``--device``, ``--backend``, ``--ranks-per-gpu``).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from script_ranks import add_options, run_ranks

from ddp_prof.errors import WorkloadError
from ddp_prof.train import MODEL_SIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ddp_prof.ddp import DataParallel
    from ddp_prof.train.process_group import RankInfo
    from ddp_prof.train.workload import Trainer

Seconds = tuple[list[float], list[float]]
"""The times of the steps of both sides."""
WARMUP = 4  # torch's DDP makes its buckets in the first two steps


class Contest(NamedTuple):
    """Two ways to take a step; ``target`` is the largest ratio of the first one's time to the second one's."""

    names: tuple[str, str]
    take: tuple[Callable[[int], float], Callable[[int], float]]
    target: float


def compare_ddp(arguments: argparse.Namespace) -> Contest:
    """Our bucketed variant against torch's DDP as it is, on the same model."""
    from ddp_prof.ddp import BucketedDDP, TorchDDP

    ours = make_taker(arguments, lambda model: BucketedDDP(model, arguments.bucket_size_mb))
    theirs = make_taker(arguments, lambda model: TorchDDP(model, mark_buckets=False))
    return Contest((f"bucketed at {arguments.bucket_size_mb:g} MB", "torch's DDP"), (ours, theirs), 1.05)


def compare_sharded(arguments: argparse.Namespace) -> Contest:
    """Our sharded variant against torch's DDP with its ZeroRedundancyOptimizer, on the same model."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from ddp_prof.ddp import ShardedDDP, TorchDDP

    def divided(parameters: Any, **options: Any) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **options)

    ours = make_taker(arguments, lambda model: ShardedDDP(model, arguments.bucket_size_mb))
    theirs = make_taker(arguments, lambda model: TorchDDP(model, mark_buckets=False), divided)
    names = (f"sharded at {arguments.bucket_size_mb:g} MB", "torch's DDP with ZeroRedundancyOptimizer")
    return Contest(names, (ours, theirs), 1.05)


def compare_ranges(arguments: argparse.Namespace) -> Contest:
    """Our bucketed variant with ranges against without; the smaller its buckets, the more ranges."""
    from ddp_prof import annotate
    from ddp_prof.ddp import BucketedDDP

    take = make_taker(arguments, lambda model: BucketedDDP(model, arguments.bucket_size_mb))

    def with_ranges(index: int, on: bool) -> float:
        annotate.enable(on)
        return take(index)

    takers = (lambda index: with_ranges(index, True), lambda index: with_ranges(index, False))
    return Contest(("with ranges", "without"), takers, 1.01)


BENCHMARKS: dict[str, Callable[[argparse.Namespace], Contest]] = {
    "ddp": compare_ddp,
    "sharded": compare_sharded,
    "ranges": compare_ranges,
}


def make_taker(
    arguments: argparse.Namespace,
    wrap: Callable[[torch.nn.Module], DataParallel],
    make_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
) -> Callable[[int], float]:
    """Return a function that takes one training step and returns its seconds on this rank."""
    import torch

    from ddp_prof.train.workload import Trainer, TransformerLM, make_tokens

    torch.manual_seed(0)
    device = arguments.chosen_device
    with device:
        model = TransformerLM(MODEL_SIZES[arguments.model_size])
    variant = wrap(model)
    make_optimizer = make_optimizer or torch.optim.AdamW
    optimizer = make_optimizer(variant.optimizer_parameters(), lr=1e-3, fused=device.type == "cuda")
    trainer: Trainer = Trainer(variant, optimizer)
    tokens = make_tokens(8, arguments.batch_size // arguments.world_size, arguments.seq_len, seed=0).to(device)

    def take(index: int) -> float:
        batch = tokens[index % len(tokens)]
        torch.distributed.barrier()
        return trainer.train_step(batch[:, :-1], batch[:, 1:]).times.step_ns / 1e9

    return take


def measure(contest: Contest, steps: int, device: torch.device) -> Seconds:
    """Return the seconds of each step of both, on the slower rank; they take turns in going first."""
    import torch

    seconds: Seconds = ([], [])
    for index in range(WARMUP + steps):
        for which in (0, 1) if index % 2 else (1, 0):
            seconds[which].append(contest.take[which](index))
    slower = torch.tensor(seconds, dtype=torch.float64, device=device)[:, WARMUP:].contiguous()
    torch.distributed.all_reduce(slower, torch.distributed.ReduceOp.MAX)
    first, second = slower.tolist()
    return first, second


def judge(contest: Contest, seconds: Seconds, gate: bool) -> None:
    """Print the medians and their ratio; its error is the standard error of the median ratio of neighbouring steps."""
    medians = [statistics.median(second) for second in seconds]
    ratio = medians[0] / medians[1]
    lower, _, upper = statistics.quantiles([a / b for a, b in zip(*seconds, strict=True)], n=4)
    error = 0.93 * (upper - lower) / len(seconds[0]) ** 0.5  # the formula for a median of normal values
    is_above = ratio - 2 * error > contest.target
    verdict = "met" if ratio <= contest.target else "NOT MET" if is_above else "undecided: take more --steps"
    for name, median in zip(contest.names, medians, strict=True):
        print(f"{name}: {1000 * median:.2f} ms per step (median of {len(seconds[0])})")
    print(f"ratio {ratio:.4f} +- {error:.4f}, target at most {contest.target}: {verdict}")
    if gate and is_above:
        raise WorkloadError(f"the ratio of {ratio:.4f} is above the target of {contest.target}")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what this toolkit itself costs.")
    subparsers = parser.add_subparsers(dest="benchmark", required=True)
    for name, function in BENCHMARKS.items():
        sub = subparsers.add_parser(name, help=function.__doc__, description=function.__doc__)
        sub.add_argument("--steps", type=int, default=60, help="measured steps of each (default: %(default)s)")
        sub.add_argument("--world-size", type=int, default=2, help="ranks (default: %(default)s)")
        add_options(sub)
        sub.add_argument("--model-size", choices=MODEL_SIZES, default="mini", help="default: %(default)s")
        sub.add_argument("--batch-size", type=int, default=4, help="of all ranks together (default: %(default)s)")
        sub.add_argument("--seq-len", type=int, default=128, help="default: %(default)s")
        sub.add_argument("--bucket-size-mb", type=float, default=25.0, help="for our variant (default: %(default)g)")
        sub.add_argument("--target", type=float, help="replaces the benchmark's target")
        sub.add_argument("--gate", action="store_true", help="fail if the target is missed by more than chance")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    make = BENCHMARKS[arguments.benchmark]

    def measure_on_rank(_place: RankInfo, device: torch.device) -> tuple[Contest, Seconds]:
        arguments.chosen_device = device
        contest = make(arguments)
        return contest, measure(contest, arguments.steps, device)

    def report(found: tuple[Contest, Seconds]) -> None:
        contest, seconds = found
        target = contest.target if arguments.target is None else arguments.target
        judge(contest._replace(target=target), seconds, arguments.gate)

    return run_ranks(arguments, measure_on_rank, report)


if __name__ == "__main__":
    sys.exit(main())
