"""The command line of the sweep; needs no torch, so that ``--help`` and mistakes are answered at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ddp_prof.benchmark.sweep.grid import Grid
from ddp_prof.train.arguments import NO_CAP, at_least, bucket_size
from ddp_prof.train.sizes import MODEL_SIZES
from ddp_prof.variants import VARIANT_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Value = TypeVar("Value")


def make_parser() -> argparse.ArgumentParser:
    """The options, in groups."""
    parser = argparse.ArgumentParser(
        prog="python -m ddp_prof.benchmark.sweep",
        description="Run each variant in each setting several times and write the times into a results database. A "
        "run that the database already has, of the same code on the same machine, is not repeated, so an interrupted "
        "sweep continues where it stopped. A run that ran out of memory is not repeated, a failed run is.",
        epilog="Exit codes: 0 done, runs that were out of memory included, 1 a run failed, 2 wrong usage. "
        "MASTER_PORT and MASTER_ADDR are honoured as by ddp_prof.train.",
    )
    _add_grid(parser.add_argument_group("settings; separate several values by blanks or commas"))
    _add_runs(parser.add_argument_group("each run"))
    _add_outcome(parser.add_argument_group("outcome"))
    return parser


def _add_grid(group: argparse._ArgumentGroup) -> None:
    def add(flag: str, kind: Callable[[str], Any], text: str, metavar: str = "N") -> None:
        group.add_argument(flag, nargs="+", type=several(kind), metavar=metavar, help=text)

    add("--variants", _one_of(VARIANT_NAMES), f"of {', '.join(VARIANT_NAMES)} (default: all)", "VARIANT")
    add(
        "--model-size",
        _one_of(MODEL_SIZES),
        f"of {', '.join(MODEL_SIZES)} (default: xl on two GPUs, else mini)",
        "SIZE",
    )
    add("--world-size", at_least(1), "ranks (default: 2)")
    add("--batch-sizes", at_least(1), "sequences a step of one rank (default: 2 4 on two GPUs, else 2)")
    add("--seq-lens", at_least(1), "tokens of a sequence (default: 128 256 512 on two GPUs, else 32 64 128)")
    text = "bucket sizes of bucketed; none: no cap (default: 1 10 100 1000 on two GPUs, else 1 10 100)"
    add("--bucket-sizes-mb", _bucket_size, text, "MB")


def _add_runs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num-steps",
        type=at_least(1),
        metavar="N",
        help="measured steps, and as many synchronized ones after them (default: 10 on two GPUs, else 4)",
    )
    group.add_argument("--warmup", type=at_least(0), metavar="N", help="steps before (default: 5 on two GPUs, else 2)")
    group.add_argument("--repeats", type=at_least(1), metavar="N", help="runs of each setting (default: 3)")
    group.add_argument("--seed", type=int, default=0, help="of the weights and the tokens (default: %(default)s)")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    group.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto", help="default: %(default)s")


def _add_outcome(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--database",
        type=Path,
        default=Path("traces/results.db"),
        metavar="PATH",
        help="where results go (default: %(default)s)",
    )
    group.add_argument("--force", action="store_true", help="repeat and replace runs that the database has")
    group.add_argument(
        "--profile",
        action="store_true",
        help="also capture each setting once under a profiler, into a folder beside the database: overlapped and "
        "exposed communication cannot be measured by the host's clock",
    )


def choose_grid(arguments: argparse.Namespace, grid: Grid) -> Grid:
    """What was asked for, and the values of a default grid for the rest."""
    return Grid(
        variants=_flat(arguments.variants, grid.variants),
        bucket_sizes_mb=_flat(arguments.bucket_sizes_mb, grid.bucket_sizes_mb),
        model_sizes=_flat(arguments.model_size, grid.model_sizes),
        world_sizes=_flat(arguments.world_size, grid.world_sizes),
        local_batch_sizes=_flat(arguments.batch_sizes, grid.local_batch_sizes),
        seq_lens=_flat(arguments.seq_lens, grid.seq_lens),
        steps=arguments.num_steps or grid.steps,
        warmup=grid.warmup if arguments.warmup is None else arguments.warmup,
        repeats=arguments.repeats or grid.repeats,
        seed=arguments.seed,
        device=arguments.device,
        backend=arguments.backend,
    )


def _flat(groups: list[list[Value]] | None, default: tuple[Value, ...]) -> tuple[Value, ...]:
    """Each value once, in the order given."""
    if groups is None:
        return default
    return tuple(dict.fromkeys(value for group in groups for value in group))


def several(kind: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """Reads ``1`` and ``1,10,100``."""

    def values(text: str) -> list[Value]:
        parts = [part for part in text.split(",") if part]
        if not parts:
            raise argparse.ArgumentTypeError("a value is missing")
        try:
            return [kind(part) for part in parts]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error

    return values


def _bucket_size(text: str) -> float | None:
    size = bucket_size(text)
    return None if size == NO_CAP else size


def _one_of(choices: Sequence[str] | dict[str, Any]) -> Callable[[str], str]:
    def choice(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown: choose from {', '.join(choices)}")
        return text

    return choice
