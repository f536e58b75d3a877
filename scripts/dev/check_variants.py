"""Checks on real ranks that every variant trains as one process does: the cases of tests/ddp on any device.

    python scripts/dev/check_variants.py --device cuda --backend nccl --ranks-per-gpu 2 --variants overlap,torch

A case is four steps of a small model on the whole batch in one process, and on a share of it in each rank: unused and
tied parameters, gradients that share storage, channels_last, accumulation, checkpoints, on GPUs branches on streams of
their own, with SGD and with AdamW, plain, foreach and fused. Parameters and buffers must agree.

Exit: 0, or 1 where a variant differs or fails.
"""

from __future__ import annotations

import argparse
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
"""Of double precision; sums come in another order than in one process."""
MIXED_TOLERANCE = 1e-4
"""Where part of a model is in single precision."""


class Finding(NamedTuple):
    """How far a run was from one process: the largest deviation of a parameter, relative to one plus its size."""

    setting: str
    case: str
    optimizer: str
    deviation: float

    @property
    def agrees(self) -> bool:
        """Whether it is rounding."""
        return self.deviation <= (MIXED_TOLERANCE if self.case == "mixed-dtypes" else TOLERANCE)


class OnDevice:
    """A variant of which the inputs come to the device first."""

    def __init__(self, variant: Any, device: torch.device) -> None:
        self.variant, self.device = variant, device

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Forward."""
        with self.device:
            return self.variant(*(tensor.to(self.device) for tensor in inputs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.variant, name)


def add_streams() -> None:
    """The case that only a GPU can have: two branches on streams of their own."""
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
    """Train in one process and as this rank; ranks start from different weights, of which rank 0's must win."""
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
    """Infinite where a value is no number."""
    import torch

    difference = (got.double() - expected.double()).abs() / (1 + expected.double().abs())
    return torch.nan_to_num(difference, nan=torch.inf).max()


def describe(findings: Sequence[Finding]) -> list[str]:
    """One line per setting, and one for each run that differs."""
    lines = []
    for setting in dict.fromkeys(finding.setting for finding in findings):
        own = [finding for finding in findings if finding.setting == setting]
        worst = max(finding.deviation for finding in own if finding.case != "mixed-dtypes")
        agreeing = sum(finding.agrees for finding in own)
        lines.append(f"{setting}: {agreeing} of {len(own)} runs equal one process, largest deviation {worst:.1e}")
        lines += [f"  differs by {run.deviation:.1e}: {run.case}, {run.optimizer}" for run in own if not run.agrees]
    return lines


def check_all(arguments: argparse.Namespace, place: RankInfo, device: torch.device) -> list[Finding]:
    """Check all cases that were asked for on this rank."""
    from tests.ddp import cases

    if device.type == "cuda":
        add_streams()
    findings = [
        check(setting, case, optimizer, device, place.rank, place.world)
        for case, setting, optimizer in cases.possible()
        if not arguments.variants or cases.SETTINGS[setting][0] in arguments.variants
    ]
    if not findings:
        raise WorkloadError(f"tests/ddp/cases.py has no case of {', '.join(arguments.variants)}: add one to SETTINGS")
    return findings


def report(findings: Sequence[Finding]) -> None:
    """Print what was found.

    Raises:
        WorkloadError: A variant differs from one process.
    """
    print("\n".join(describe(findings)))
    if not all(finding.agrees for finding in findings):
        raise WorkloadError("a variant differs from one process")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, choices=(2, 4), default=2, help="ranks (default: %(default)s)")
    add_options(parser)
    parser.add_argument(
        "--variants", type=lambda text: text.split(","), metavar="NAME,...", help="which (default: all)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one."""
    arguments = parse(argv)
    return run_ranks(arguments, partial(check_all, arguments), report)


if __name__ == "__main__":
    sys.exit(main())
