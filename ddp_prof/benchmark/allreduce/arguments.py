"""The command line of the all-reduce benchmark; needs no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_prof.benchmark.sweep.arguments import Several, several
from ddp_prof.train.arguments import at_least
from ddp_prof.train.sizes import MODEL_SIZES
from ddp_prof.variants import BYTES_PER_MB

if TYPE_CHECKING:
    from collections.abc import Sequence

FLOAT32_BYTES = 4
SIZES_MB = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
"""From messages whose time is all overhead to messages whose time is all transfer: the fit needs both ends."""


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m ddp_prof.benchmark.allreduce",
        description="Time all-reduces of float32 alone, one at a time, for each message size and number of ranks, and "
        "fit the cost model o + s / w that the model of bucket sizes uses. The ranks run on this machine.",
        epilog="Exit codes: 0 done, 1 the ranks failed, 2 wrong usage.",
    )
    add = parser.add_argument
    add(
        "--sizes-mb",
        action=Several,
        type=several(size_mb),
        default=SIZES_MB,
        metavar="MB",
        help=f"message sizes in MB of 2**20 bytes (default: {','.join(f'{size:g}' for size in SIZES_MB)})",
    )
    add(
        "--world-sizes", action=Several, type=several(at_least(2)), default=(2,), metavar="N", help="ranks (default: 2)"
    )
    add("--backend", choices=("auto", "gloo", "nccl"), default="auto", help="default: nccl where each rank has a GPU")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    add("--calls", type=at_least(1), default=20, metavar="N", help="timed calls of each size (default: %(default)s)")
    add("--warmup", type=at_least(1), default=3, metavar="N", help="calls of each size before (default: %(default)s)")
    add(
        "--over-ranks",
        choices=("min", "max"),
        default="min",
        help="time of a call: the shortest of the ranks, or the longest (default: %(default)s)",
    )
    add("--timeout", type=float, default=120.0, metavar="SECONDS", help="of a rank waiting (default: %(default)g)")
    add(
        "--model-size",
        choices=MODEL_SIZES,
        default="mini",
        help="the best bucket size is given for this model's gradients (default: %(default)s)",
    )
    add(
        "--database",
        type=Path,
        metavar="PATH",
        help="also keep the timings in this results database; ddp-prof results then fits its model of bucket sizes to "
        "them (default: they are only printed)",
    )
    add("--format", choices=("table", "json", "csv", "markdown"), default="table", help="default: %(default)s")
    return parser


def size_mb(text: str) -> float:
    """Reads a positive number of MB."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return value


def message_bytes(sizes_mb: Sequence[float]) -> list[int]:
    """Whole float32 elements nearest to each size, in bytes, ascending and each once."""
    counts = {max(1, round(size * BYTES_PER_MB / FLOAT32_BYTES)) for size in sizes_mb}
    return [FLOAT32_BYTES * count for count in sorted(counts)]
