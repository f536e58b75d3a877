"""Groups files into runs: by their ``run.json``, by their names, or by what the traces say about their ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ddp_prof.atomic_file import is_file
from ddp_prof.errors import TraceError
from ddp_prof.manifest import distinct_ends, manifest_path
from ddp_prof.runs.report import LoadOptions
from ddp_prof.runs.run import Run, prepare_runs
from ddp_prof.runs.workers import Workers

_NAMED_RANK = re.compile(
    r"(?<![A-Za-z])(?<!lora[._-])(?:(rank)|r|proc|procid|task|gpu|worker)[._-]?(?P<rank>\d+)"
    r"(?P<of>[._-]?of[._-]?\d+)?(?!\d)",
    re.I,
)
_BARE_NUMBER = re.compile(r"(?<=[._-])(?P<rank>\d+)(?=(?:of\d+)?(?:\.[A-Za-z][\w-]*)+$)")
"""``report.3.sqlite``, ``trace_3.json.gz``, ``x_3of8.sqlite``."""
_COUNTED = re.compile(r"(?<![A-Za-z])(?:step|epoch|iter|iteration|batch|cycle|run|trial|seed)[._-]$", re.I)
"""What stands before numbers that are no ranks."""
_OWN_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d{2,}(?![A-Za-z0-9])")
"""A number that may be a process id or a part of a time."""
_NODE = re.compile(
    r"(?<![A-Za-z])(?:node[._-]?\d+|gpu\d+(?=[._-]rank))|(?<=_on_)[A-Za-z][\w-]*|(?<=host[._-])[A-Za-z][\w-]*?(?=[._-]rank)",
    re.I,
)
_NODE_AND_RANK = re.compile(r"(?<=[._-])(?P<node>\d+)[._-](?P<rank>\d+)(?=(?:\.[A-Za-z][\w-]*)+$)")
"""``profile_99_1_8.nsys-rep``."""
_WRITTEN = re.compile(r"\.(\d{13,19})\.pt\.trace\.json")
"""The time in the names that torch's ``tensorboard_trace_handler`` gives its files, in ns or ms."""


def group_rank_files(files: Sequence[Path]) -> list[list[Path]]:
    """Find files of one folder whose names differ only in a rank number: ``rank3``, ``_r3of8``, ``x.3.sqlite``.

    Names may also differ in the node, if no other node has the same rank: ``node_1_rank_8_on_gpu07``, ``x_1_8``. A
    number without ``rank`` before it or ``of8`` after it is a rank only if the files are numbered 0, 1, 2 and so on.
    The remaining files with a clear rank may also differ in process ids and times.
    """
    ways = (
        _group_by_node_and_rank,
        partial(_group_by_names, str),
        partial(_group_by_names, partial(_OWN_NUMBER.sub, "*")),
    )
    groups = list[list[Path]]()
    for find in ways:
        grouped = set().union(*groups)
        groups += find([file for file in files if file not in grouped])
    return groups


def _group_by_node_and_rank(files: Sequence[Path]) -> list[list[Path]]:
    """Find groups of files whose names end with a node number and a rank; all nodes have the same number of ranks."""
    jobs: dict[tuple[Path, str], list[tuple[int, int, Path]]] = {}
    for file in files:
        if (hit := _NODE_AND_RANK.search(file.name)) and not _NAMED_RANK.search(file.name):
            of_job = jobs.setdefault((file.parent, _NODE_AND_RANK.sub("*", file.name)), [])
            of_job.append((int(hit["rank"]), int(hit["node"]), file))
    groups = []
    for of_job in map(sorted, jobs.values()):
        nodes = len({node for _, node, _ in of_job})
        numbers = [(rank, rank * nodes // len(of_job)) for rank in range(len(of_job))]
        if nodes > 1 and len(of_job) % nodes == 0 and [(rank, node) for rank, node, _ in of_job] == numbers:
            groups.append([file for _, _, file in of_job])
    return groups


def _group_by_names(in_common: Callable[[str], str], files: Sequence[Path]) -> list[list[Path]]:
    """Group files by what ``in_common`` returns for their names without rank and node."""
    alike: dict[tuple[bool, Path, str], dict[tuple[str, ...], list[tuple[int, Path]]]] = {}
    for file in files:
        for name in (_NODE.sub("*", file.name), file.name):
            named = list(_NAMED_RANK.finditer(name))
            hit = named[-1] if named else _BARE_NUMBER.search(name)
            if hit and (named or not _COUNTED.search(name[: hit.start()])):
                is_certain = bool(named and (hit[1] or hit["of"]))
                rest = f"{name[: hit.start()]}*{name[hit.end() :]}"
                key = is_certain, file.parent, in_common(rest) if is_certain else rest
                alike.setdefault(key, {}).setdefault(_node_of(file), []).append((int(hit["rank"]), file))
                break
    groups = []
    for (is_certain, *_), nodes in alike.items():
        job = [numbered_file for of_node in nodes.values() for numbered_file in of_node]
        for part in [job] if len(dict(job)) == len(job) else nodes.values():
            ranks = dict(part)
            if len(part) == len(ranks) > 1 and (is_certain or {*ranks} == {*range(len(ranks))}):
                groups.append([ranks[rank] for rank in sorted(ranks)])
    return groups


def _node_of(file: Path) -> tuple[str, ...]:
    return tuple(_NODE.findall(file.name))


def _differences(group: Sequence[Path]) -> str:
    """Say how the names of a group of :func:`group_rank_files` differ, such as ``rank and node``."""
    is_named = bool(_NAMED_RANK.search(group[0].name))
    nodes = {None if is_named or not (hit := _NODE_AND_RANK.search(file.name)) else hit["node"] for file in group}
    differing = ["node"] if max(len({*map(_node_of, group)}), len(nodes)) > 1 else []
    if is_named and len({_NAMED_RANK.sub("", _NODE.sub("", file.name)) for file in group}) > 1:
        differing.append("process id or time")
    return " and ".join(["rank", *differing]) if differing else "a rank number"


def load_runs(
    paths: Path | str | Iterable[Path | str],
    options: LoadOptions | None = None,
    *,
    workers: Workers | None = None,
    measures: Sequence[str] = (),
) -> list[Run]:
    """Return the runs that files belong to, in the order of their first files.

    Files are ranks of one run if they share a ``run.json``, if their names differ only in a rank number, or if the
    traces say that they are ranks of one job and they have the same number of collectives of each kind.

    Args:
        paths: A file, a folder (it stands for the traces in it), or several of them.
        options: How they are read.
        workers: What reads them; by default this process.
        measures: Names in ``report.MEASURES``. They are measured now, so that each file is read once. Without them,
            a file is read when something is asked for, launches included.

    Raises:
        TraceError: A path is not there, is given twice, or a folder holds no trace. What is wrong inside of a file is
            raised when the run is first measured.
    """
    options, workers = options or LoadOptions(), workers or Workers()
    options = options if measures else replace(options, with_launches=True)
    files = find_files([paths] if isinstance(paths, str | Path) else paths)
    if options.one_run or options.separate:
        groups = [files] if options.one_run else [[file] for file in files]
    else:
        by_manifest: dict[Path, list[Path]] = {}
        for file in files:
            manifest = manifest_path(file)
            by_manifest.setdefault(manifest if is_file(manifest) else file, []).append(file)
        groups = list(by_manifest.values())
    runs = [Run(tuple(group), options, workers=workers) for group in groups]
    may_join = not (options.one_run or options.separate) and sum(map(_may_be_rank, runs)) > 1
    left = prepare_runs(runs, *measures, *(("identity",) if may_join else ()))
    left_out = tuple(note for run in runs if run not in left for note in run.notes)
    loaded = _join_ranks(left, left_out) if may_join else left
    if len(loaded) > 1:
        _tell_apart(loaded)
    return loaded


def _tell_apart(runs: Sequence[Run]) -> None:
    """Add their folders to the labels of runs whose files have the same name: ``before/train``, ``after/train``."""
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        if run.manifest is None:  # else it is named after its variant, which a baseline is found by
            by_label.setdefault(run.label, []).append(run)
    for alike in by_label.values():
        folders = [run.files[0].absolute().parent for run in alike]
        if len(set(folders)) == len(alike) > 1:
            ends = distinct_ends(folders)
            for run, folder in zip(alike, folders, strict=True):
                run.folder = ends[folder]


def find_files(paths: Iterable[Path | str]) -> list[Path]:
    """Return the traces that paths stand for, each once."""
    from ddp_prof.ingest.load import find_traces

    files: dict[Path, Path] = {}
    for path in (Path(path) for path in paths):
        for file in find_traces(path):
            real = Path(os.path.realpath(file))  # of a link to itself Path.resolve would raise no OSError
            if real in files:
                raise TraceError(file, "given twice", "give each file once")
            files[real] = file
    return list(files.values())


def _may_be_rank(run: Run) -> bool:
    return len(run.files) == 1 and run.manifest is None


def _join_ranks(runs: Sequence[Run], left_out: tuple[str, ...]) -> list[Run]:
    """Join runs of single files that are ranks of one job; files that were left out may have been ranks of it, too."""
    alone = {run.files[0]: run for run in runs if _may_be_rank(run)}
    joined: dict[Run, Run] = {}
    for group in group_rank_files(list(alone)):
        joined |= _join_runs([alone.pop(file) for file in group], f"their names differ in {_differences(group)} only")
    by_world: dict[int | None, list[Run]] = {}
    for run in alone.values():
        (rank, world, _), *more_ranks = run.identities() or [(None, None, ())]
        if rank is not None and world != 1 and not more_ranks:
            by_world.setdefault(world, []).append(run)
    for group_of_runs in by_world.values():
        why, captures = "the traces say which rank of a job each is", _divide_captures(group_of_runs)
        if len(captures) > 1:
            why += ", and their names when they were written"
        for capture in captures:
            joined |= _join_runs(capture, why)
    for whole in set(joined.values()):
        whole.notes = (*whole.notes, *left_out)
    return list(dict.fromkeys(joined.get(run, run) for run in runs))


def _divide_captures(runs: Sequence[Run]) -> list[list[Run]]:
    """Divide files into captures, if all ranks have the same number: the first file of each rank, the second, ..."""
    by_rank: dict[int, list[Run]] = {}
    times = {run: int(written[1]) for run in runs if (written := _WRITTEN.search(run.files[0].name))}
    for run in sorted(times, key=lambda run: times[run]):
        by_rank.setdefault(run.identities()[0][0] or 0, []).append(run)
    if len(times) < len(runs) or len({*map(len, by_rank.values())}) > 1:
        return [[*runs]]
    return [[*capture] for capture in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)]


def _join_runs(runs: Sequence[Run], why: str) -> dict[Run, Run]:
    """Join runs into one; return it for each of them, or an empty dictionary if they do not fit together."""
    kinds = [[operations for _, _, operations in run.identities()] for run in runs]
    numbers = [rank for run in runs for rank, _, _ in run.identities() if rank is not None]
    if len(runs) < 2 or len(set(numbers)) < len(numbers):
        return {}
    if any(kind != kinds[0] for kind in kinds):
        apart = f"{len(runs)} files are read as runs of their own, though {why}: they differ in their collectives"
        for run in runs:
            run.notes = (*run.notes, f"{apart}; --one-run joins them")
        return {}
    note = f"{len(runs)} files are read as ranks of one run, because {why}; --separate keeps them apart"
    files = tuple(run.files[0] for run in runs)
    measured: dict[Path, dict[str, Any]] = {}
    for run in runs:
        measured |= run.measured
    whole = Run(files, runs[0].options, (note,), runs[0].workers, measured)
    return dict.fromkeys(runs, whole)
