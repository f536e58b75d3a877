"""All-reduces measured alone, ``python -m ddp_prof.benchmark.allreduce``: what one costs by its size.

Calls of all sizes are interleaved in rounds, so that drift affects all sizes alike. Before each call the ranks meet in
a barrier. The time of a call is the shortest over the ranks, since the rank that enters last does not wait for others,
or, if asked for, the longest, which holds what the barrier left of the others' delays.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_prof.analyze.core.attribution import ALL_REDUCE, bus_factor
from ddp_prof.analyze.statistics import bootstrap_interval
from ddp_prof.benchmark.findings import BucketModel, LinkModel, MessageCost, fit_link
from ddp_prof.benchmark.measure import probe_machine
from ddp_prof.errors import DdpProfError, WorkloadError
from ddp_prof.present.columns import Row, ms, times_of, values_of
from ddp_prof.present.table import SCHEMA, TableOptions, TableView, show
from ddp_prof.present.text import milliseconds, percent, size
from ddp_prof.run_config import RunConfig
from ddp_prof.train import MODEL_SIZES
from ddp_prof.train.arguments import at_least
from ddp_prof.train.launch import die_with_launcher, launch, leave_failure, run_program
from ddp_prof.variants import BYTES_PER_MB

if TYPE_CHECKING:
    import torch

FLOAT32_BYTES = 4
SIZES_MB = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
"""From messages whose time is all overhead to messages whose time is all transfer: the fit needs both ends."""
RANK = "--rank"
"""What a started rank is called with, before what it is to do."""
HOW_TO_READ = (
    "latency: median over calls, each after a barrier, of the {} time of a call over the ranks (nccl-tests: the mean "
    "of calls one behind the other, averaged over the ranks); low, high: 95 % interval of the median within this "
    "launch of the ranks; algbw: bytes / latency; busbw: algbw x 2 (n - 1) / n"
)


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == [RANK]:
        return run_rank(json.loads(words[1]))
    arguments = make_parser().parse_args(words)
    return run_program("ddp_prof.benchmark.allreduce", lambda: _benchmark(arguments))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddp_prof.benchmark.allreduce",
        description="Time all-reduces of float32 alone, one at a time, for each message size and number of ranks, and "
        "fit the cost model o + s / w that the model of bucket sizes uses. The ranks run on this machine.",
        epilog="Exit codes: 0 done, 1 the ranks failed, 2 wrong usage. "
        "Example: python -m ddp_prof.benchmark.allreduce --sizes-mb 0.001 1 25 --world-size 2 4",
    )
    add = parser.add_argument
    text = f"message sizes in MiB (default: {' '.join(f'{number:g}' for number in SIZES_MB)})"
    add("--sizes-mb", nargs="+", type=size_mb, default=SIZES_MB, metavar="MIB", help=text)
    add("--world-size", nargs="+", type=at_least(2), default=[2], metavar="N", help="ranks (default: 2)")
    add("--backend", choices=("auto", "gloo", "nccl"), default="auto", help="default: nccl where each rank has a GPU")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    add("--calls", type=at_least(1), default=20, metavar="N", help="timed calls of each size (default: %(default)s)")
    add("--warmup", type=at_least(1), default=3, metavar="N", help="calls of each size before (default: %(default)s)")
    text = "time of a call: the shortest of the ranks, or the longest (default: %(default)s)"
    add("--over-ranks", choices=("min", "max"), default="min", help=text)
    text = "the best bucket size is given for this model's gradients (default: %(default)s)"
    add("--model-size", choices=list(MODEL_SIZES), default="mini", help=text)
    add("--format", choices=("table", "json", "csv", "markdown"), default="table", help="default: %(default)s")
    return parser


def size_mb(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return value


def message_bytes(sizes_mb: Sequence[float]) -> list[int]:
    """Whole float32 elements nearest to each size, in bytes, ascending and each once."""
    counts = {max(1, round(number * BYTES_PER_MB / FLOAT32_BYTES)) for number in sizes_mb}
    return [FLOAT32_BYTES * count for count in sorted(counts)]


def _benchmark(arguments: argparse.Namespace) -> None:
    where = probe_machine().environment.title
    views = []
    for world in dict.fromkeys(arguments.world_size):
        answer = _measure(world, arguments)
        title = f"all-reduce · {world} ranks · {answer['backend']} · device: {answer['device']} · {where}"
        rows = [summarize_times(int(number), times) for number, times in answer["times_ns"].items()]
        views.append(timings_view(rows, world, title, arguments.model_size, arguments.over_ranks))
    if arguments.format == "json":
        views = [replace(views[0], document={"schema": SCHEMA, "all_reduces": [view.document for view in views]})]
    show(TableOptions(arguments.format), views)


def _measure(world: int, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as directory:
        output = Path(directory, "times.json")
        asked = {name: getattr(arguments, name) for name in ("backend", "device", "calls", "warmup", "over_ranks")}
        asked |= {"bytes": message_bytes(arguments.sizes_mb), "output": str(output)}
        command = ["-m", "ddp_prof.benchmark.allreduce", RANK, json.dumps(asked)]
        launch(world, command, log=Path(directory, "log"), forked=True)
        if not output.is_file():
            raise WorkloadError("the ranks ended without an error, but left no times")
        answer: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return answer


def run_rank(asked: dict[str, Any]) -> int:
    """On one rank: measure what is asked for; rank 0 writes the times of each size."""
    die_with_launcher()
    from ddp_prof.train.process_group import choose_seat, find_place, process_group

    place = find_place(os.environ)
    config = RunConfig(variant="naive", device=asked["device"], backend=asked["backend"])
    try:
        seat = choose_seat(config, place)
        if seat.ranks_per_gpu > 1:
            raise WorkloadError(
                f"{place.world} ranks share a GPU, so their times are not representative: use --device cpu"
            )
        with process_group(place, seat, config.timeout):
            times = time_calls(asked["bytes"], asked["calls"], asked["warmup"], seat.device, asked["over_ranks"])
        if place.rank == 0:
            answer = {"device": seat.device.type, "backend": seat.backend, "times_ns": times}
            Path(asked["output"]).write_text(json.dumps(answer), encoding="utf-8")
    except (DdpProfError, RuntimeError) as error:
        leave_failure(place.rank, error if isinstance(error, DdpProfError) else WorkloadError(str(error).strip()))
        return 1
    return 0


def time_calls(
    sizes: Sequence[int], calls: int, warmup: int, device: torch.device, over_ranks: str
) -> dict[int, list[int]]:
    """Nanoseconds of each call, by size: the shortest or longest over the ranks."""
    import torch
    import torch.distributed as dist

    # The same random numbers on all ranks: zeros may be quicker to move, and to add up.
    generator = torch.Generator(device).manual_seed(0)
    source = torch.rand(max(sizes) // FLOAT32_BYTES, generator=generator, dtype=torch.float32, device=device)
    buffer = source.clone()
    dist.all_reduce(buffer)
    if not torch.allclose(buffer, source * dist.get_world_size()):
        raise WorkloadError("the all-reduce gave a wrong sum")

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def time_call(size: int) -> int:
        """Nanoseconds of the host's clock from the call to the finished sum."""
        message = buffer[: size // FLOAT32_BYTES]
        message.copy_(source[: len(message)])  # sums of sums would leave the range of numbers
        dist.barrier()
        settle()
        start_ns = time.perf_counter_ns()
        dist.all_reduce(message)
        settle()
        return time.perf_counter_ns() - start_ns

    rounds = [[time_call(size) for size in sizes] for _ in range(warmup + calls)]
    own = torch.tensor(rounds[warmup:], device=device)
    dist.all_reduce(own, dist.ReduceOp.MIN if over_ranks == "min" else dist.ReduceOp.MAX)
    return dict(zip(sizes, own.T.tolist(), strict=True))


def summarize_times(message: int, times_ns: Sequence[int]) -> MessageCost:
    ends = [round(end) for end in bootstrap_interval(times_ns) or ()]
    return MessageCost(message, len(times_ns), round(float(np.median(times_ns))), *ends)


def timings_view(
    rows: Sequence[MessageCost], world: int, title: str, model_size: str, over_ranks: str = "min"
) -> TableView:
    link = fit_link(rows)
    model = None if isinstance(link, str) else BucketModel(link, MODEL_SIZES[model_size].gradient_bytes())
    notes = [HOW_TO_READ.format({"min": "shortest", "max": "longest"}[over_ranks]), *_link_notes(rows, link)]
    if model:
        gradients, best = size(model.gradient_bytes), size(round(model.best_bytes))
        notes.append(f"best bucket size for {gradients} of gradients ({model_size} model): {best}")
    shown = ("bytes", "calls", "median_ns", "low_ns", "high_ns")
    document = {
        "schema": SCHEMA,
        "world_size": world,
        "over_ranks": over_ranks,
        "messages": [{**values_of(row, *shown), **_bandwidths(row, world)} for row in rows],
        "link": model and asdict(model.link),
        "best_bucket_bytes": model and model.best_bytes,
        "warnings": notes,
    }
    return TableView(title, [_row(row, world, link) for row in rows], notes, document)


def _row(row: MessageCost, world: int, link: LinkModel | str) -> Row:
    return {
        "ranks": world,
        "size": size(row.bytes),
        **values_of(row, "bytes", "calls"),
        "latency_ms": ms(row.median_ns),
        **times_of(row, "low", "high"),
        "fitted_ms": None if isinstance(link, str) else ms(link.time_ns(row.bytes)),
        **{f"{name.removesuffix('_bytes_per_s')}_GB/s": rate / 1e9 for name, rate in _bandwidths(row, world).items()},
    }


def _bandwidths(row: MessageCost, world: int) -> dict[str, float]:
    factor = bus_factor(ALL_REDUCE, world) or 0.0
    found = {"algbw_median_bytes_per_s": row.bytes / row.median_ns * 1e9}
    if row.low_ns and row.high_ns:
        found["algbw_low_bytes_per_s"] = row.bytes / row.high_ns * 1e9
        found["algbw_high_bytes_per_s"] = row.bytes / row.low_ns * 1e9
    return found | {name.replace("algbw", "busbw"): factor * value for name, value in found.items()}


def _link_notes(rows: Sequence[MessageCost], link: LinkModel | str) -> list[str]:
    if isinstance(link, str):
        return [f"no cost model: {link}"]
    overhead, error = milliseconds(round(link.overhead_ns)), percent(link.relative_error)
    notes = [f"fitted: {overhead} per call plus the bytes at {link.bytes_per_ns:.3g} GB/s, median error {error}"]
    half = link.overhead_ns * link.bytes_per_ns
    if rows[0].bytes > half:
        notes.append(f"the overhead of a call is extrapolated: add --sizes-mb below {size(max(1, round(half)))}")
    if rows[-1].bytes < 4 * half:
        notes.append(f"the bandwidth is extrapolated: add --sizes-mb above {size(round(4 * half))}")
    return notes


if __name__ == "__main__":
    sys.exit(main())
