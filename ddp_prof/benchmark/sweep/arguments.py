"""The command line of the sweep; needs no torch, so that ``--help`` and mistakes are answered at once."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
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
    def add(flag: str, dest: str, kind: Callable[[str], Any], text: str, metavar: str = "N") -> None:
        group.add_argument(flag, dest=dest, action=Several, type=several(kind), metavar=metavar, help=text)

    text = f"of {', '.join(VARIANT_NAMES)} (default: all)"
    add("--variants", "variants", _one_of(VARIANT_NAMES), text, "VARIANT")
    text = f"of {', '.join(MODEL_SIZES)} (default: xl on two GPUs, else mini)"
    add("--model-size", "model_sizes", _one_of(MODEL_SIZES), text, "SIZE")
    add("--world-size", "world_sizes", at_least(1), "ranks (default: 2)")
    text = "sequences a step of one rank (default: 2 4 on two GPUs, else 2)"
    add("--batch-sizes", "local_batch_sizes", at_least(1), text)
    text = "tokens of a sequence (default: 128 256 512 on two GPUs, else 32 64 128)"
    add("--seq-lens", "seq_lens", at_least(1), text)
    text = "bucket sizes of bucketed; none: no cap (default: 1 10 100 1000 on two GPUs, else 1 10 100)"
    add("--bucket-sizes-mb", "bucket_sizes_mb", _bucket_size, text, "MB")


def _add_runs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num-steps",
        dest="steps",
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
    asked = {field.name: getattr(arguments, field.name) for field in fields(Grid)}
    return replace(grid, **{name: value for name, value in asked.items() if value is not None})


class Several(argparse.Action):
    """One or more words that hold several values each, as a tuple of each value once, in the order given."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs="+", **more)

    def __call__(self, _parser: object, namespace: argparse.Namespace, values: Any, _option: object = None) -> None:
        """Keep the values."""
        setattr(namespace, self.dest, tuple(dict.fromkeys(value for group in values for value in group)))


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
