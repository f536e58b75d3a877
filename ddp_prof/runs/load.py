"""Which files belong to which run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_prof.errors import TraceError
from ddp_prof.manifest import manifest_path
from ddp_prof.runs.rank_files import groups_alike_but_for_a_rank
from ddp_prof.runs.run import LoadOptions, Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def load_runs(paths: Iterable[Path | str], options: LoadOptions | None = None) -> list[Run]:
    """The runs that files belong to, in the order in which they come first.

    Files are ranks of one run where one ``run.json`` is theirs; and where their names differ in a rank number only, or
    the traces say that they are ranks of one job, and their collectives are as many and of the same kinds.

    Args:
        paths: Files, or folders that stand for the traces in them.
        options: How they are read.

    Raises:
        TraceError: A path is not there, is given twice, or a folder holds no trace. What is wrong inside of a file is
            raised when the run is first measured.
    """
    options = options or LoadOptions()
    files = _find_files(paths)
    if options.one_run or options.separate:
        return [Run(tuple(files), options)] if options.one_run else [Run((file,), options) for file in files]
    found: dict[Path, list[Path]] = {}
    for file in files:
        manifest = manifest_path(file)
        found.setdefault(manifest if manifest.is_file() else file, []).append(file)
    return _join_ranks([Run(tuple(own), options) for own in found.values()])


def _find_files(paths: Iterable[Path | str]) -> list[Path]:
    from ddp_prof.ingest.load import find_traces

    files: dict[Path, Path] = {}
    for path in (Path(path) for path in paths):
        for file in find_traces(path):
            real = Path(os.path.realpath(file))  # of a link to itself Path.resolve would raise no OSError
            if real in files:
                raise TraceError(file, "given twice", "give each file once")
            files[real] = file
    return list(files.values())


def _join_ranks(runs: list[Run]) -> list[Run]:
    """Make one run of those of a single file each, without a ``run.json``, that are ranks of one job."""
    alone = {run.files[0]: run for run in runs if len(run.files) == 1 and run.manifest is None}
    if len(alone) < 2:
        return runs
    joined: dict[Run, Run] = {}
    for group in groups_alike_but_for_a_rank(list(alone)):
        joined |= _joined([alone.pop(file) for file in group], "their names differ in a rank number only")
    by_world: dict[int, list[Run]] = {}
    for run in alone.values():
        if world := _rank_and_world(run):
            by_world.setdefault(world[1], []).append(run)
    for group_of_runs in by_world.values():
        joined |= _joined(group_of_runs, "the traces say which rank of a job each is")
    return list(dict.fromkeys(joined.get(run, run) for run in runs))


def _rank_and_world(run: Run) -> tuple[int, int] | None:
    """The rank and the number of ranks, where a file says that it is one rank of a job."""
    ranks = run.analysis().ranks
    if len(ranks) != 1 or ranks[0].rank is None or (ranks[0].world_size or 1) < 2:
        return None
    return ranks[0].rank, ranks[0].world_size or 1


def _joined(runs: Sequence[Run], why: str) -> dict[Run, Run]:
    """The run that each becomes a part of; nothing where they do not fit together."""
    kinds = [[sorted(rank.timings.operation.tolist()) for rank in run.analysis().ranks] for run in runs]
    numbers = [rank.rank for run in runs for rank in run.analysis().ranks if rank.rank is not None]
    if len(runs) < 2 or any(kind != kinds[0] for kind in kinds) or len(set(numbers)) < len(numbers):
        return {}
    note = f"{len(runs)} files are taken for ranks of one run, since {why}; --separate keeps them apart"
    whole = Run(tuple(run.files[0] for run in runs), runs[0].options, notes=(note,))
    return dict.fromkeys(runs, whole)
