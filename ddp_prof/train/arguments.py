"""The command line of the workload; needs no torch, so that ``--help`` and usage errors appear at once."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from ddp_prof.errors import OutOfMemoryError
from ddp_prof.run_config import FAULTS, RunConfig
from ddp_prof.train import MODEL_SIZES
from ddp_prof.variants import COMM_HOOKS, VARIANT_NAMES, VARIANTS

NO_CAP = math.inf
"""The value of ``--bucket-size-mb none`` during parsing, when ``None`` means that the option was not given.

In the result of :func:`parse_arguments` ``None`` means that buckets have no cap.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments(RunConfig):
    """The configuration of a run, with the options that say what is written; :func:`_add_output` describes these."""

    run_json: Path | None = None
    key: str | None = None
    profiler: str | None = None
    kineto: Path | None = None
    accounting: bool = False


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; its defaults are those of :class:`Arguments`."""
    parser = argparse.ArgumentParser(
        prog="python -m ddp_prof.train",
        description="Train a transformer language model by one data-parallel variant and mark what it does with NVTX "
        "ranges. Starts its ranks itself (--world-size), or is started by torchrun, or runs alone.",
        epilog="Exit codes: 0 done, 1 the run failed, 2 wrong usage, "
        f"{OutOfMemoryError.exit_code} out of memory. Where MASTER_PORT is set (and MASTER_ADDR, default 127.0.0.1), "
        "the ranks that --world-size starts meet there, else by a file. "
        "Example: python -m ddp_prof.train --world-size 2 --variant bucketed --bucket-size-mb 10",
    )
    _add_variant(parser.add_argument_group("variant"))
    _add_work(parser.add_argument_group("work"))
    _add_numerics_and_memory(parser.add_argument_group("numerics and memory"))
    _add_ranks(parser.add_argument_group("ranks"))
    _add_experiments(parser.add_argument_group("experiments"))
    _add_output(parser.add_argument_group("output"))
    parser.set_defaults(**{field.name: field.default for field in fields(Arguments) if field.default is not MISSING})
    return parser


def _add_variant(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--variant", choices=VARIANT_NAMES, required=True, help="how gradients are synchronized")
    group.add_argument(
        "--bucket-size-mb",
        type=bucket_size,
        metavar="MB|none",
        help="cap of a bucket in MiB, as torch's bucket_cap_mb; bucketed, sharded: default 25, none is one bucket; "
        "torch: its own",
    )
    group.add_argument(
        "--comm-hook",
        choices=COMM_HOOKS,
        help="torch: its bf16_compress_hook, which sends gradients as bfloat16, or its powerSGD_hook of rank 1, which "
        "from the third step on sends matrices as products of two thin ones",
    )
    group.add_argument(
        "--no-communication-hook",
        action="store_true",
        help="torch: leave DDP unchanged, so that it divides while it copies; its buckets then have no ranges",
    )
    group.add_argument(
        "--gradient-as-bucket-view",
        action="store_true",
        help="torch: gradients are views of its buckets, so that nothing is copied out of them",
    )
    group.add_argument(
        "--find-unused-parameters",
        action="store_true",
        help="find out in each step which parameters no rank used, by a small all-reduce",
    )


def _add_work(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model-size", choices=MODEL_SIZES, help="default: %(default)s")
    group.add_argument(
        "--batch-size",
        type=_positive,
        help="sequences per step, of all ranks together; must be a multiple of the number of ranks (default: "
        "%(default)s)",
    )
    group.add_argument("--seq-len", type=_positive, help="tokens of a sequence (default: %(default)s)")
    group.add_argument("--steps", type=_positive, help="measured steps (default: %(default)s)")
    group.add_argument("--warmup", type=at_least(0), help="steps before, marked as warm-up (default: %(default)s)")
    group.add_argument(
        "--synchronized-steps",
        type=at_least(0),
        metavar="N",
        help="further steps, in which the host waits for the device after each phase; their times go into the "
        "run.json, and no capture contains them (default: %(default)s)",
    )
    group.add_argument("--seed", type=int, help="of the weights and the tokens (default: %(default)s)")


def _add_numerics_and_memory(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        help="bf16: autocast; weights, gradients and what is sent stay float32 (default: %(default)s)",
    )
    group.add_argument("--tf32", action="store_true", help="let matrix products of a GPU round their inputs to TF32")
    group.add_argument(
        "--compile",
        nargs="?",
        const="blocks",
        choices=("blocks", "model"),
        help="torch.compile each block, or the whole model, whose gradients are then all ready at the end of backward "
        "(default without a value: blocks). No CUDA graphs: a graph of the whole step would call no gradient hook",
    )
    group.add_argument(
        "--activation-checkpointing",
        action="store_true",
        help="keep only each block's input and compute the rest again in backward",
    )


def _add_ranks(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--world-size", type=_positive, help="start so many ranks on this machine (default: torchrun's, else one)"
    )
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        help="auto: cuda if each rank has its own GPU, else cpu",
    )
    group.add_argument(
        "--backend",
        choices=("auto", "gloo", "nccl"),
        help="auto: nccl if each rank has its own GPU, else gloo",
    )
    group.add_argument(
        "--ranks-per-gpu",
        type=_positive,
        metavar="N",
        help="let N ranks take turns on each GPU, also with NCCL: to test that something works, not how fast",
    )
    group.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="how long a rank waits for another before it gives up (default: %(default)g)",
    )


def _add_experiments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--inject",
        choices=FAULTS,
        help="put a fault into the run: the host waits for each collective after its launch, one bucket holds all "
        "gradients, parameters are registered in reverse order, rank 1 is slow, or each step begins late "
        "(default: %(default)s)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--run-json", type=Path, metavar="PATH", help="describe the run in this file, if it succeeds")
    group.add_argument(
        "--accounting",
        action="store_true",
        help="first print what a step of one rank computes, keeps and sends: FLOPs, parameters, activations, gradients",
    )
    group.add_argument("--key", metavar="HEX", help="stored in the run.json")
    group.add_argument("--profiler", metavar="TEXT", help="what records this run; stored in the run.json")
    group.add_argument(
        "--kineto",
        type=Path,
        metavar="PATH",
        help="record the measured steps with torch.profiler: NAME.json.gz becomes NAME.rank0.json.gz, NAME.rank1...",
    )


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Parse the words of a command line, by default of this program; exit with 2 if they are invalid or contradictory.

    A bucket size that was not given becomes the variant's default.
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    # The bucket size: not given (None), no cap (NO_CAP) or a number.
    size, variant = options.bucket_size_mb, VARIANTS[options.variant]
    if size is not None and not variant.takes_bucket_size:
        parser.error(f"--bucket-size-mb: variant {options.variant} has no buckets to cap")
    if size == NO_CAP and not variant.can_be_uncapped:
        parser.error(f"--bucket-size-mb: {options.variant} needs a number")
    size = variant.default_bucket_size_mb if size is None else None if size == NO_CAP else size
    # Options that only some variants have, and those that contradict each other.
    arguments = Arguments(**{**vars(options), "bucket_size_mb": size})
    if arguments.no_communication_hook and arguments.variant != "torch":
        parser.error(f"--no-communication-hook: variant {arguments.variant} has none")
    if arguments.comm_hook and (arguments.variant != "torch" or arguments.no_communication_hook):
        parser.error("--comm-hook: only variant torch has one, and not with --no-communication-hook")
    if arguments.gradient_as_bucket_view and arguments.variant != "torch":
        parser.error(f"--gradient-as-bucket-view: only torch's DDP copies out of buckets, not {arguments.variant}")
    if arguments.compile and not arguments.warmup:
        parser.error("--compile: the first step compiles, so it takes a --warmup of at least 1")
    if arguments.kineto is not None and not arguments.kineto.name.endswith((".json", ".json.gz")):
        parser.error("--kineto: the name must end in .json or .json.gz")
    return arguments


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers for argparse that refuses numbers below ``least``."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
        return value

    return number


_positive = at_least(1)


def bucket_size(text: str) -> float:
    """Return the number of MiB in a text, :data:`NO_CAP` for ``none``; raise an error of argparse if it is invalid."""
    if text.lower() == "none":
        return NO_CAP
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    if value >= 2**40:
        raise argparse.ArgumentTypeError(f"must be less than 2**40, not {text[:80]}")
    return value
