"""Decides which traces of a monitor stay on disk, over all restarts of a job that append to one log.

A measurement is a few recorded steps; it is known by its first step, and each rank writes one trace of it. The cost of
a measurement is ``worst_ns`` in the log: what communication cost a step. Only files that a monitor wrote are deleted.
Such a file has the name of a monitor's trace, and also contains that name: torch.profiler ends a trace with the name
under which it wrote the file, and gzip begins a compressed file with that name.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from typing import Literal

Keep = Literal["all", "worst and last", "none"]

_NAME = re.compile(r"step(\d{8,})\.rank(\d+)\.json(\.gz)?")
_MOST_OF_NAME = 8192
"""Bytes at the end of a trace, and at its start if it is compressed, in which the name is looked for."""


class KeptTraces:
    """Chooses and deletes traces: a rank deletes its own, rank 0 those of all ranks that write into the same folder.

    Args:
        folder: Folder of the traces.
        keep: Which traces stay: all, the one with the highest cost and the last one, or none.
    """

    def __init__(self, folder: Path, keep: Keep) -> None:
        """Note what is given; the traces of earlier starts are looked for at the first :meth:`add`."""
        self._folder, self._keep = folder, keep
        # First steps of measurements on disk: of this process, of earlier starts of the job; and of those that stay.
        self._own, self._earlier = set[int](), set[int]()
        self._kept = set[int]()
        self._worst: tuple[int, int] | None = None  # first step and cost of the most expensive measurement
        self._knows_earlier = False
        self._since_ns = time.time_ns()  # what is written from now on is no earlier start's

    def add(self, step: int, rank: int, trace: Path, log: Path | None) -> None:
        """Note a trace that this process wrote; at the first call, also the traces that earlier starts of the job left.

        Args:
            step: First step of the measurement.
            rank: Rank of this process.
            trace: File of the trace.
            log: Log of the job, which tells the costs of earlier measurements; ``None`` if no trace of an earlier start
                may be deleted.
        """
        if not self._knows_earlier and log is not None:
            self._find_earlier(step, rank, trace, log)
        self._knows_earlier = True
        self._own.add(step)
        self._earlier.discard(step)

    def _find_earlier(self, step: int, rank: int, trace: Path, log: Path) -> None:
        """Find the traces that earlier starts left, and on rank 0 the most expensive of them; arguments as of `add`.

        Files written since this process started are not from earlier starts: another rank may have written them.
        """
        # The clock of the disk may be behind that of the host: its time of our first trace counts if it is earlier.
        self._since_ns = min(self._since_ns, trace.stat().st_mtime_ns)
        # The files of other measurements that this rank may delete, with the steps of their measurements.
        names = dict[str, int]()
        for file, of_step, of_rank in _named_as_traces(self._folder):
            with suppress(OSError):
                if (
                    of_step != step
                    and rank in (0, of_rank)
                    and file.stat().st_mtime_ns < self._since_ns
                    and _is_of_monitor(file)
                ):
                    names[file.name] = of_step
        self._earlier = {*names.values()}
        if rank == 0 and names:
            costs = {names[name]: cost_ns for name, cost_ns in _costs(log, {*names})}
            if costs:
                worst = max(costs, key=lambda of_step: costs[of_step])
                self._worst = worst, costs[worst]

    def choose(self, step: int, cost_ns: int | None) -> set[int]:
        """Return the first steps of the measurements whose traces stay, after the measurement at ``step``.

        ``cost_ns`` is the cost of this measurement, ``None`` if it was not analysed.
        """
        if self._worst is not None and self._worst[0] == step:  # measured again after a restart
            self._worst = None
        if cost_ns is not None and (self._worst is None or cost_ns > self._worst[1]):
            self._worst = step, cost_ns
        if self._keep == "all":
            return self._own | self._earlier
        worst = {self._worst[0]} if self._worst else set()
        return {step, *worst} if self._keep == "worst and last" else set()

    def delete(self, last: int, kept: Set[int], rank: int) -> None:
        """Delete the traces of measurements up to step ``last`` that are not in ``kept``.

        ``rank`` is this rank: rank 0 deletes the traces of all ranks, another rank only its own.
        """
        self._kept = {*kept}
        decided = {own for own in self._own if own <= last} | self._earlier
        self._delete(decided - kept, rank)

    def delete_undecided(self, most: int, rank: int) -> None:
        """Delete the oldest traces of this process, so that at most ``most`` stay besides what rank 0 chose to keep."""
        undecided = sorted(self._own - self._kept)
        if self._keep != "all":
            self._delete({*undecided[: max(0, len(undecided) - most)]}, rank)

    def _delete(self, steps: Set[int], rank: int) -> None:
        """Delete and forget the traces of these measurements: of all ranks if ``rank`` is 0, else of ``rank``."""
        if steps:
            for file, step, of_rank in _named_as_traces(self._folder):
                if step in steps and rank in (0, of_rank):
                    with suppress(OSError):
                        # Another rank may have measured a step of an earlier start again: that file is not decided yet.
                        is_new = step in self._earlier and file.stat().st_mtime_ns >= self._since_ns
                        if not is_new and _is_of_monitor(file):
                            file.unlink()
        self._own -= steps
        self._earlier -= steps


def name_of_trace(step: int, rank: int) -> str:
    return f"step{step:08d}.rank{rank}.json"


def _named_as_traces(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield file, step and rank of each file in the folder that has the name of a monitor's trace."""
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            if (named := _NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                yield Path(entry.path), int(named[1]), int(named[2])


def _is_of_monitor(file: Path) -> bool:
    """Return whether a monitor wrote a file: whether the file contains its own name, see the top of this module."""
    with file.open("rb") as read:
        if file.suffix != ".gz":
            read.seek(max(0, file.stat().st_size - _MOST_OF_NAME))
        # Who writes a trace gives it a temporary name first: ".", the name of the trace, "." and more.
        return f".{file.name}.".encode() in read.read(_MOST_OF_NAME)


def _costs(log: Path, names: Set[str]) -> Iterator[tuple[str, int]]:
    """Yield name and cost of the traces in ``names`` that the log lists, in the order of the log.

    If a step was measured again after a restart, its name comes twice: the last one is the file that exists.
    """
    with suppress(OSError), log.open("rb") as lines:
        for line in lines:
            if not any(name.encode() in line for name in names):
                continue
            with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                record = json.loads(line)
                for name in names & {*record["traces"]}:
                    yield name, int(record["worst_ns"] or 0)
