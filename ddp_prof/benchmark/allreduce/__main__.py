"""What ``python -m ddp_prof.benchmark.allreduce`` starts."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_prof.benchmark.allreduce.arguments import make_parser, message_bytes
from ddp_prof.errors import WorkloadError
from ddp_prof.train.launch import exit_code_of, launch
from ddp_prof.train.sizes import MODEL_SIZES

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from ddp_prof.benchmark.store import Environment, StoredAllReduce

ASKED = ("backend", "device", "calls", "warmup", "over_ranks", "timeout")
"""What the ranks are told as it is."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.database is not None and arguments.over_ranks != "min":
        parser.error("--database keeps the shortest times of the ranks: leave out --over-ranks, or --database")
    return exit_code_of("ddp_prof.benchmark.allreduce", lambda: _benchmark(arguments))


def _benchmark(arguments: Namespace) -> None:
    # Only now, so that --help and mistakes are answered at once.
    from ddp_prof.benchmark.store import open_database, write_all_reduces
    from ddp_prof.benchmark.sweep.probe import probe_machine

    environment = probe_machine().environment
    rows = {world: _measure(world, arguments, environment) for world in arguments.world_sizes}
    if arguments.database is not None:
        with closing(open_database(arguments.database)) as database:
            write_all_reduces(database, environment, [row for own in rows.values() for row in own])
    _show(rows, arguments, environment)


def _measure(world: int, arguments: Namespace, environment: Environment) -> list[StoredAllReduce]:
    """Start the ranks and summarize what they measure.

    Raises:
        WorkloadError: A rank failed.
        OutOfMemoryError: The messages do not fit.
    """
    from ddp_prof.benchmark.allreduce.timings import summarize_times

    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as directory:
        output = Path(directory, "times.json")
        asked = {name: getattr(arguments, name) for name in ASKED}
        asked["bytes"] = message_bytes(arguments.sizes_mb)
        asked["output"] = str(output)
        launch(world, ["-m", "ddp_prof.benchmark.allreduce.ranks", json.dumps(asked)], log=Path(directory, "log"))
        if not output.is_file():
            raise WorkloadError("the ranks ended without an error, but left no times")
        answer = json.loads(output.read_text(encoding="utf-8"))
    if answer["ranks_per_gpu"] > 1:
        raise WorkloadError(f"{world} ranks share a GPU, so their times are not representative: use --device cpu")
    return summarize_times(
        {int(size): times for size, times in answer["times_ns"].items()},
        environment=environment.id,
        world_size=world,
        backend=answer["backend"],
        device=answer["device"],
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _show(rows: dict[int, list[StoredAllReduce]], arguments: Namespace, environment: Environment) -> None:
    from ddp_prof.benchmark.allreduce.timings import timings_view
    from ddp_prof.present.json_documents import SCHEMA
    from ddp_prof.present.table import show

    gradient_bytes = MODEL_SIZES[arguments.model_size].gradient_bytes()
    views = [
        timings_view(
            own,
            f"all-reduce · {world} ranks · {own[0].backend} · device: {own[0].device} · {environment.title}",
            gradient_bytes,
            arguments.model_size,
            arguments.over_ranks,
        )
        for world, own in rows.items()
    ]
    if arguments.format == "json":
        views = [replace(views[0], document={"schema": SCHEMA, "all_reduces": [view.document for view in views]})]
    show(arguments.format, views)


if __name__ == "__main__":
    sys.exit(main())
