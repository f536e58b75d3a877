"""Group files into runs: by their ``run.json``, by their names, or by what the traces say about their ranks."""

from __future__ import annotations

import filecmp
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ddp_prof.atomic_file import is_file
from ddp_prof.errors import TraceError
from ddp_prof.manifest import distinct_ends, manifest_path
from ddp_prof.notes import Doubt
from ddp_prof.runs.report import OF_EACH_KERNEL, LoadOptions
from ddp_prof.runs.run import MOST_FILES_OF_KERNELS, Communication, Run, prepare_runs
from ddp_prof.runs.workers import Workers

_NAMED_RANK = re.compile(
    r"(?<![A-Za-z])(?<!lora[._-])(?:(rank)|r|proc|procid|task|gpu|worker)[._-]?(?P<rank>\d+)"
    r"(?P<of>[._-]?of[._-]?\d+)?(?!\d)",
    re.I,
)
"""A rank number after a word for it, such as ``rank3`` or ``_r3of8``; ``lora_r8`` is no rank."""
_BARE_NUMBER = re.compile(r"(?<=[._-])(?P<rank>\d+)(?=(?:of\d+)?(?:\.[A-Za-z][\w-]*)+$)")
"""A number before the ending, as in ``report.3.sqlite``, ``trace_3.json.gz`` or ``x_3of8.sqlite``."""
_COUNTED = re.compile(r"(?<![A-Za-z])(?:step|epoch|iter|iteration|batch|cycle|run|trial|seed)[._-]$", re.I)
"""Words before a number that say that it is no rank."""
_OWN_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d{2,}(?![A-Za-z0-9])")
"""A number that may be a process id or a part of a time."""
_NODE = re.compile(
    r"(?<![A-Za-z])(?:node[._-]?\d+|gpu\d+(?=[._-]rank))|(?<=_on_)[A-Za-z][\w-]*|(?<=host[._-])[A-Za-z][\w-]*?(?=[._-]rank)",
    re.I,
)
"""The name of a node, as in ``node_1_rank_8_on_gpu07``."""
_NODE_AND_RANK = re.compile(r"(?<=[._-])(?P<node>\d+)[._-](?P<rank>\d+)(?=(?:\.[A-Za-z][\w-]*)+$)")
"""The numbers of a node and of a rank before the ending, as in ``profile_99_1_8.nsys-rep``."""
_CLOCKS_APART_NS = 1_000_000_000
"""Longest time between recordings that were made at one time: clocks of hosts differ by less."""
_WRITTEN = re.compile(r"\.(\d{13,19})\.pt\.trace\.json")
"""The time in the names that torch's ``tensorboard_trace_handler`` gives its files, in ns or ms."""


def group_rank_files(files: Sequence[Path]) -> list[list[Path]]:
    """Return the groups of files that are ranks of one run by their names; files without a group are not returned.

    The files of a group are in one folder, and their names differ only in a rank number, such as ``rank3``, ``_r3of8``
    or ``x.3.sqlite``. Names may also differ in the node, as in ``node_1_rank_8_on_gpu07`` or ``x_1_8``, if no two nodes
    have the same rank. A number without ``rank`` before it or ``of8`` after it is a rank only if the files are numbered
    0, 1, 2 and so on. Files that have a clear rank but no group yet may also differ in process ids and times.
    """
    # Each way gets the files that the ways before it did not group.
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
        # Of 16 ranks on 2 nodes, ranks 0 to 7 must be on node 0, and 8 to 15 on node 1.
        numbers = [(rank, rank * nodes // len(of_job)) for rank in range(len(of_job))]
        if nodes > 1 and len(of_job) % nodes == 0 and [(rank, node) for rank, node, _ in of_job] == numbers:
            groups.append([file for _, _, file in of_job])
    return groups


def _group_by_names(in_common: Callable[[str], str], files: Sequence[Path]) -> list[list[Path]]:
    """Group the files for whose names, without rank and node, ``in_common`` returns the same text.

    Names whose rank is not certain (a bare number) must be equal without rank and node.
    """
    # First by folder and name, then by node: the rank number and file of each.
    alike: dict[tuple[bool, Path, str], dict[tuple[str, ...], list[tuple[int, Path]]]] = {}
    for file in files:
        for name in (_NODE.sub("*", file.name), file.name):  # the rank may be a part of what looks like a node
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
        # All nodes together if no rank occurs twice, else each node by itself.
        job = [numbered_file for of_node in nodes.values() for numbered_file in of_node]
        for part in [job] if len(dict(job)) == len(job) else nodes.values():
            ranks = dict(part)
            if len(part) == len(ranks) > 1 and (is_certain or {*ranks} == {*range(len(ranks))}):
                groups.append([ranks[rank] for rank in sorted(ranks)])
    return groups


def _node_of(file: Path) -> tuple[str, ...]:
    """Return all parts of a file's name that name a node; empty if it names none."""
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
    """Return the runs to which the given files belong, in the order of their first files.

    Files are ranks of one run if they share a ``run.json``. They also are if their names differ only in a rank number,
    or if the traces say that they are ranks of one job, provided that they have the same number of collectives of each
    kind.

    Args:
        paths: A file, a folder (which stands for the traces in it), or several of them.
        options: How the files are read.
        workers: The processes that read the files; by default this process.
        measures: Names in ``report.MEASURES``. They are measured now, so that each file is read once. Without them,
            a file is read when a figure is asked for, and launches are read, too.

    Raises:
        TraceError: A path is not there, is given twice, or a folder holds no trace. What is wrong inside of a file is
            raised when the run is first measured.
    """
    options, workers = options or LoadOptions(), workers or Workers()
    options = options if measures else replace(options, with_launches=True)
    # Groups that are certain: what the user says, or a common ``run.json``.
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
    # Runs of single files may be ranks of one job: then it must be known which rank each file is of.
    may_join = not (options.one_run or options.separate) and sum(map(_may_be_rank, runs)) > 1
    if may_join:
        groups = group_rank_files([run.files[0] for run in runs if _may_be_rank(run)])
        place = {file: at for group in groups for at, file in enumerate(group)}
        for run in runs:
            run.place = place.get(run.files[0], 0)
    left = prepare_runs(runs, *measures, *(("identity",) if may_join else ()))
    left_out = tuple(dict.fromkeys(note for run in runs if run not in left for note in run.notes))
    loaded = left
    if may_join:
        loaded = _join_ranks(left, left_out)
        for run in loaded:
            run.place = 0
        # Kernels of files that were not joined, and what a run of several files makes a result from that the cache
        # holds for single files only.
        loaded = prepare_runs(loaded, *measures)
    for run in loaded:
        run.notes = (*run.notes, *_notes_on_copies(run.files))
    if len(loaded) > 1:
        _tell_apart(loaded)
    return loaded


def _notes_on_copies(files: Sequence[Path]) -> list[str]:
    """Return a note on each set of files that have the same bytes, as if a rank was copied by mistake."""
    by_size: dict[int, list[list[Path]]] = {}
    for file in filter(is_file, files):  # a folder of tables is no file
        with suppress(OSError):  # what cannot be read is told where it is measured
            sets = by_size.setdefault(file.stat().st_size, [])
            if equal := next((equal for equal in sets if filecmp.cmp(file, equal[0], shallow=False)), None):
                equal.append(file)
            else:
                sets.append([file])
    return [
        Doubt(
            f"{', '.join(file.name for file in equal)}: these files have the same bytes, "
            "so what counts as several ranks may be one that was copied"
        )
        for sets in by_size.values()
        for equal in sets
        if len(equal) > 1
    ]


def _tell_apart(runs: Sequence[Run]) -> None:
    """Add the folder to the labels of runs that have the same label, as in ``before/train`` and ``after/train``.

    In one folder, the names of the files are the labels: ``x.rank0.json`` and ``x.rank1.json``. A run with a
    ``run.json`` has the label of its variant, by which a baseline is found: there the file stands in place of the
    folder, as in ``again.sqlite/naive``.
    """
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        by_label.setdefault(run.label, []).append(run)
    for alike in by_label.values():
        folders = [run.files[0].absolute().parent for run in alike]
        if len(set(folders)) == len(alike) > 1:
            ends = distinct_ends(folders)
            for run, folder in zip(alike, folders, strict=True):
                run.folder = ends[folder]
        elif len(alike) > 1:
            names = distinct_ends([run.files[0].absolute() for run in alike])
            for run in alike:
                more = f" and {len(run.files) - 1} more" if len(run.files) > 1 else ""
                name = f"{names[run.files[0].absolute()]}{more}"
                run.folder, run.file_name = (name, "") if run.manifest else ("", name)


def find_files(paths: Iterable[Path | str]) -> list[Path]:
    """Return the traces for which the paths stand: files, and the traces in folders.

    Raises:
        TraceError: A path is not there, a folder holds no trace, or a file is given twice.
    """
    from ddp_prof.ingest.load import find_traces

    files: dict[Path, Path] = {}
    for path in (Path(path) for path in paths):
        try:  # a name may be mistyped; a trace that is there and cannot be read may be left out
            path.lstat()
        except FileNotFoundError as error:
            raise TraceError(path, error.strerror or str(error), "check the path") from error
        except (OSError, ValueError):
            pass
        for file in find_traces(path):
            real = Path(os.path.realpath(file))  # for a link to itself, Path.resolve would raise no OSError
            if real in files:
                raise TraceError(file, "given twice", "give each file once")
            files[real] = file
    return list(files.values())


def _may_be_rank(run: Run) -> bool:
    """Return whether a run is a single file without a ``run.json``, which may be one rank of a larger run."""
    return len(run.files) == 1 and run.manifest is None


def _rank_numbers(run: Run) -> set[int]:
    """Return the numbers of ranks that a run's traces say; several devices of a process are of one rank."""
    return {rank for rank, *_ in run.identities() if rank is not None}


def _join_ranks(runs: Sequence[Run], left_out: tuple[str, ...]) -> list[Run]:
    """Return the runs, with those of single files joined where these are ranks of one job.

    Args:
        runs: The runs.
        left_out: Notes on files that could not be read. They may have been ranks of a joined run, so they become notes
            of each joined run.
    """
    # First by names; then the files that are left, by what the traces say. ``joined``: for each joined run of a single
    # file, the run that it is a part of now.
    alone = {run.files[0]: run for run in runs if _may_be_rank(run)}
    joined: dict[Run, Run] = {}
    for group in group_rank_files(list(alone)):
        of_names = [alone.pop(file) for file in group]
        why = f"their names differ in {_differences(group)} only"
        joined |= (found := _join_runs(of_names, why, names_tell=True))
        if not found:
            _tell_of_repeated_ranks(of_names, why)
    by_world: dict[int | None, list[Run]] = {}
    for run in alone.values():
        # All ranks of a node may be in one file, as nsys records them.
        told = [of_rank[:2] for of_rank in run.identities()]
        worlds = {world for _, world in told}
        world = next(iter(worlds)) if len(worlds) == 1 else 1
        # A run that has all ranks of its job lacks none: two of them are compared, and no word is due on that.
        if world != 1 and len(_rank_numbers(run)) != world and all(rank is not None for rank, _ in told):
            by_world.setdefault(world, []).append(run)
    for group_of_runs in by_world.values():
        why, captures = "the traces say which rank of a job each is", _divide_captures(group_of_runs)
        if len(captures) > 1:
            why += ", and their names when they were written"
        for capture in captures:
            joined |= (found := _join_runs(capture, why))
            if not found and len({rank for run in capture for rank in _rank_numbers(run)}) > 1:
                _tell_of_repeated_ranks(capture, why)
    for whole in set(joined.values()):
        whole.notes = (*whole.notes, *left_out)
    return list(dict.fromkeys(joined.get(run, run) for run in runs))


def _tell_of_repeated_ranks(runs: Sequence[Run], why: str) -> None:
    """Note, if several runs say that they are one rank, that they are not joined; ``why`` speaks for joining them."""
    numbers = [rank for run in runs for rank in _rank_numbers(run)]
    if twice := [rank for rank in numbers if numbers.count(rank) > 1]:
        _keep_apart(runs, why, f"several of them say that they are rank {twice[0]}: give the files of one recording")


def _divide_captures(runs: Sequence[Run]) -> list[list[Run]]:
    """Divide the files of one job into captures: the first file that each rank wrote, the second file, and so on.

    They are a single capture if the time of writing is not in all names, or ranks have unequally many files.
    """
    by_rank: dict[int, list[Run]] = {}
    times = {run: int(written[1]) for run in runs if (written := _WRITTEN.search(run.files[0].name))}
    for run in sorted(times, key=lambda run: times[run]):
        by_rank.setdefault(run.identities()[0][0] or 0, []).append(run)
    if len(times) < len(runs) or len({*map(len, by_rank.values())}) > 1:
        return [[*runs]]
    return [[*capture] for capture in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)]


def _join_runs(runs: Sequence[Run], why: str, *, names_tell: bool = False) -> dict[Run, Run]:
    """Join runs into one; return the joined run for each of them, or an empty dictionary if they do not fit together.

    They fit if no rank occurs twice and all ranks have as many collectives of each operation. Where they were recorded
    at one time, or ``names_tell`` that they belong together, it is enough that they have as many in most steps that
    both recorded: one of them may have lost some, or all, where each says which rank it is. There it is also enough
    that they have as many in each communicator that they share: stages of a pipeline have communicators of their own.
    Unless ``names_tell``, they do not fit if they were recorded at different times: then they are of two jobs, or of
    two recordings of one. ``why`` is the reason to join them, which becomes a note.
    """
    of_ranks = [run.identities() for run in runs]
    numbers = [rank for run in runs for rank in _rank_numbers(run)]
    if len(runs) < 2 or len(set(numbers)) < len(numbers):
        return {}
    times = [times_ns for run in of_ranks for *_, times_ns in run]
    known = [times_ns for times_ns in times if times_ns]
    silent = sum(not of_rank for run in of_ranks for _, _, of_rank, _ in run)  # they have no times
    are_at_once = len(known) + silent == len(times) > silent and max(known)[0] <= min(end for _, end in known)
    apart_ns = max(known)[0] - min(end for _, end in known) if known else 0
    if not names_tell and apart_ns > _CLOCKS_APART_NS:
        _keep_apart(runs, why, f"they were recorded {apart_ns / 1e9:,.1f} s apart, by UTC; --one-run joins them")
        return {}
    counts = [[of_rank for _, _, of_rank, _ in run] for run in of_ranks]
    belongs = names_tell or are_at_once
    # The device's work of a rank may be lost as a whole; then its file says which rank of a job it is.
    lost_all = [belongs and len(numbers) == len(times) and not any(own) for own in counts]
    first = next((own for own, is_lost in zip(counts, lost_all, strict=True) if not is_lost), counts[0])
    are_alike = all(
        len(own) == len(first)
        and (is_lost or all(_communicate_alike(*pair, in_most_steps=belongs) for pair in zip(own, first, strict=True)))
        for own, is_lost in zip(counts, lost_all, strict=True)
    )
    if not are_alike and not (belongs and _meet_in_communicators([of_rank for own in counts for of_rank in own])):
        _keep_apart(runs, why, "they differ in their collectives; --one-run joins them")
        return {}
    note = f"{len(runs)} files are read as ranks of one run, because {why}; --separate keeps them apart"
    files = tuple(run.files[0] for run in runs)
    measured: dict[Path, dict[str, Any]] = {}
    for run in runs:
        measured |= run.measured
    for file in files[MOST_FILES_OF_KERNELS:]:  # a run has kernels of as many files, however it was recognized
        measured[file] = {name: result for name, result in measured[file].items() if name not in OF_EACH_KERNEL}
    whole = Run(files, runs[0].options, (note,), runs[0].workers, measured)
    return dict.fromkeys(runs, whole)


def _meet_in_communicators(ranks: Sequence[Communication]) -> bool:
    """Return whether ranks communicate alike in each communicator that they share, and these link all ranks.

    Sends and receives do not count: each rank has its own number of them. All communicators must have names. The ranks
    are told as by :meth:`.Run.identities`.
    """
    from ddp_prof.communication import OPERATIONS, PEER_COPY, POINT_TO_POINT

    between = {OPERATIONS.index(POINT_TO_POINT), OPERATIONS.index(PEER_COPY)}
    of_groups: dict[str | None, dict[int, Communication]] = {}
    for index, counts in enumerate(ranks):
        for key, number in counts.items():
            if key[2] not in between:
                of_groups.setdefault(key[0], {}).setdefault(index, Counter())[key] = number
    linked, left = {0}, [*of_groups.values()]
    while meeting := [of_group for of_group in left if not linked.isdisjoint(of_group)]:
        linked.update(*meeting)
        left = [of_group for of_group in left if not linked.issuperset(of_group)]
    return (
        None not in of_groups
        and len(linked) == len(ranks)
        and all(
            _communicate_alike(own, next(iter(of_group.values())), in_most_steps=True)
            for of_group in of_groups.values()
            for own in of_group.values()
        )
    )


def _communicate_alike(own: Communication, other: Communication, *, in_most_steps: bool) -> bool:
    """Return whether two ranks have as many collectives of each operation, or have so in most steps that both recorded.

    The ranks are told as by :meth:`.Run.identities`.
    """
    from ddp_prof.table import UNKNOWN

    def sums(counts: Communication) -> Counter[int]:
        found = Counter[int]()
        for (_, _, operation), number in counts.items():
            found[operation] += number
        return found

    def of_steps(counts: Communication) -> dict[int, Counter[int]]:
        found: dict[int, Counter[int]] = {}
        for (_, key, operation), number in counts.items():
            if key != UNKNOWN:
                found.setdefault(key, Counter())[operation] += number
        return found

    if sums(own) == sums(other):
        return True
    first, second = of_steps(own), of_steps(other)
    shared = first.keys() & second.keys()
    return in_most_steps and 2 * sum(first[key] == second[key] for key in shared) > len(shared)


def _keep_apart(runs: Sequence[Run], why: str, reason: str) -> None:
    """Note that single files are not joined, though there is a reason to do so (``why``), and the reason against it."""
    note = Doubt(f"{len(runs)} files are read as runs of their own, though {why}: {reason}")
    for run in runs:
        run.notes = (*run.notes, note)
