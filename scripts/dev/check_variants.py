"""Checks on real ranks, on any device, that every variant trains as one process does, with the cases of tests/ddp.

    python scripts/dev/check_variants.py --device cuda --backend nccl --ranks-per-gpu 2 --variants overlap,torch

A case trains a small model for four steps, in one process on the whole batch and in each rank on its share. The models
have unused and tied parameters, gradients that share storage, channels_last, accumulation, checkpoints, on GPUs also
branches on their own streams; the optimizers are SGD and AdamW, plain, foreach and fused. Parameters and buffers must
agree.

Exit: 0, or 1 if a variant differs or fails.
"""

from __future__ import annotations

import argparse
import random
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from script_ranks import add_options, run_ranks

from ddp_prof.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ddp_prof.train.process_group import RankInfo

TOLERANCE = 1e-9
"""For double precision; the order of sums differs from that in one process."""
MIXED_TOLERANCE = 1e-4
"""For models of which a part is in single precision."""


class Finding(NamedTuple):
    """The largest deviation of a parameter from its value in one process, relative to one plus that value."""

    setting: str
    case: str
    optimizer: str
    deviation: float

    @property
    def agrees(self) -> bool:
        return self.deviation <= (MIXED_TOLERANCE if self.case == "mixed-dtypes" else TOLERANCE)


class OnDevice:
    """A variant whose inputs are moved to the device first."""

    def __init__(self, variant: Any, device: torch.device) -> None:
        self.variant, self.device = variant, device

    def __call__(self, *inputs: torch.Tensor) -> Any:
        with self.device:
            return self.variant(*(tensor.to(self.device) for tensor in inputs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.variant, name)


def add_streams() -> None:
    """Add a case for GPUs: two branches, each on its own stream."""
    import torch
    from torch import nn

    from tests.ddp import cases

    class Streams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = cases.mlp(), cases.mlp()

        def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
            here, streams = torch.cuda.current_stream(), [torch.cuda.Stream(), torch.cuda.Stream()]
            results = []
            for stream, branch in zip(streams, (self.left, self.right), strict=True):
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    results.append(branch(x))
                here.wait_stream(stream)
            return torch.stack(results).sum(0)

    cases.CASES["streams"] = cases.Case(Streams, optimizers=cases.EVERY_OPTIMIZER)


def check(setting: str, case: str, optimizer: str, device: torch.device, rank: int, world: int) -> Finding:
    """Train in one process and as this rank; ranks start with different weights, and rank 0's must be used."""
    import torch

    from tests.ddp import cases

    what = cases.CASES[case]
    alone = OnDevice(cases.OneProcess(cases.build(what, seed=0).to(device)), device)
    expected = cases.train(what, alone, optimizer)
    variant = OnDevice(cases.make_variant(what, setting, cases.build(what, seed=rank).to(device)), device)
    got = cases.train(what, variant, optimizer, rank, world)
    worst = torch.stack([deviation(got[name], value) for name, value in expected.items()]).max()
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
    return Finding(setting, case, optimizer, float(worst))


def deviation(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the largest relative difference; infinite if a value is NaN."""
    import torch

    difference = (got.double() - expected.double()).abs() / (1 + expected.double().abs())
    return torch.nan_to_num(difference, nan=torch.inf).max()


def describe(findings: Sequence[Finding]) -> list[str]:
    """Return one line per setting, and one for each run that differs."""
    lines = []
    for setting in dict.fromkeys(finding.setting for finding in findings):
        own = [finding for finding in findings if finding.setting == setting]
        worst = max(finding.deviation for finding in own if finding.case != "mixed-dtypes")
        agreeing = sum(finding.agrees for finding in own)
        lines.append(f"{setting}: {agreeing} of {len(own)} runs equal one process, largest deviation {worst:.1e}")
        lines += [f"  differs by {run.deviation:.1e}: {run.case}, {run.optimizer}" for run in own if not run.agrees]
    return lines


def check_all(arguments: argparse.Namespace, place: RankInfo, device: torch.device) -> list[Finding]:
    from tests.ddp import cases

    if device.type == "cuda":
        add_streams()
    chosen = [
        (setting, case, optimizer)
        for case, setting, optimizer in cases.possible()
        if not arguments.variants or cases.SETTINGS[setting][0] in arguments.variants
    ]
    if arguments.draw is not None:  # the same on all ranks
        chosen = sorted(random.Random(0).sample(chosen, min(arguments.draw, len(chosen))))  # noqa: S311
    findings = []
    for run in chosen:
        if arguments.verbose and place.rank == 0:
            print(*run, file=sys.stderr, flush=True)
        findings.append(check(*run, device, place.rank, place.world))
    if not findings:
        raise WorkloadError(f"tests/ddp/cases.py has no case of {', '.join(arguments.variants)}: add one to SETTINGS")
    return findings


def report(findings: Sequence[Finding]) -> None:
    print("\n".join(describe(findings)))
    if not all(finding.agrees for finding in findings):
        raise WorkloadError("a variant differs from one process")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, choices=(1, 2, 4), default=2, help="ranks (default: %(default)s)")
    add_options(parser)
    parser.add_argument(
        "--variants", type=lambda text: text.split(","), metavar="NAME,...", help="which (default: all)"
    )
    parser.add_argument(
        "--draw", type=int, metavar="N", help="only so many of the runs, drawn at random (default: all)"
    )
    parser.add_argument("--verbose", action="store_true", help="name each run before it begins, on stderr")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    return run_ranks(arguments, partial(check_all, arguments), report)


if __name__ == "__main__":
    sys.exit(main())
