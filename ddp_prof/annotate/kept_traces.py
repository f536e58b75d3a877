"""Which traces of a monitor stay on disk, over all restarts of a job that append to one log.

A file is the monitor's if it has the name of one and says inside that a monitor wrote it: torch.profiler ends a trace
with the name under which it was exported, and gzip begins with the name under which it was compressed. No other file is
ever deleted, whatever its name.
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
    """Chooses and deletes the traces of one rank, and on rank 0 of all ranks whose disk this is.

    Args:
        folder: Where traces are.
        keep: Which stay.
    """

    def __init__(self, folder: Path, keep: Keep) -> None:
        self._folder, self._keep = folder, keep
        self._own, self._earlier = set[int](), set[int]()
        self._kept = set[int]()
        self._worst: tuple[int, int] | None = None
        self._knows_earlier = False
        self._since_ns = time.time_ns()  # what is written from now on is no earlier start's

    def add(self, step: int, rank: int, trace: Path, log: Path | None) -> None:
        """Take note of a trace of this process; the first time, also of those that earlier starts of the job left.

        ``log`` tells what these cost; ``None`` if nothing of an earlier start may be deleted.
        """
        if not self._knows_earlier and log is not None:
            self._find_earlier(step, rank, trace, log)
        self._knows_earlier = True
        self._own.add(step)
        self._earlier.discard(step)

    def _find_earlier(self, step: int, rank: int, trace: Path, log: Path) -> None:
        # Other ranks may have gone on, or be ahead; and the clock of the disk may be behind.
        self._since_ns = min(self._since_ns, trace.stat().st_mtime_ns)
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
        """Return the measurements whose traces stay; ``cost_ns`` is of ``step``, ``None`` if that was not analysed."""
        if self._worst is not None and self._worst[0] == step:  # measured again after a restart
            self._worst = None
        if cost_ns is not None and (self._worst is None or cost_ns > self._worst[1]):
            self._worst = step, cost_ns
        if self._keep == "all":
            return self._own | self._earlier
        worst = {self._worst[0]} if self._worst else set()
        return {step, *worst} if self._keep == "worst and last" else set()

    def delete(self, last: int, kept: Set[int], rank: int) -> None:
        """Delete traces up to measurement ``last`` that are not kept: of all ranks for rank 0, else its own."""
        self._kept = {*kept}
        decided = {own for own in self._own if own <= last} | self._earlier
        self._delete(decided - kept, rank)

    def delete_undecided(self, most: int, rank: int) -> None:
        """Delete the oldest traces that rank 0 says nothing of, if there are more than ``most``."""
        undecided = sorted(self._own - self._kept)
        if self._keep != "all":
            self._delete({*undecided[: max(0, len(undecided) - most)]}, rank)

    def _delete(self, steps: Set[int], rank: int) -> None:
        if steps:
            for file, step, of_rank in _named_as_traces(self._folder):
                if step in steps and rank in (0, of_rank):
                    with suppress(OSError):
                        # A step of an earlier start may be measured again, and not be analysed yet.
                        is_new = step in self._earlier and file.stat().st_mtime_ns >= self._since_ns
                        if not is_new and _is_of_monitor(file):
                            file.unlink()
        self._own -= steps
        self._earlier -= steps


def name_of_trace(step: int, rank: int) -> str:
    return f"step{step:08d}.rank{rank}.json"


def _named_as_traces(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield files, their step and their rank."""
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            if (named := _NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                yield Path(entry.path), int(named[1]), int(named[2])


def _is_of_monitor(file: Path) -> bool:
    """Whether a monitor wrote a file: see above."""
    with file.open("rb") as read:
        if file.suffix != ".gz":
            read.seek(max(0, file.stat().st_size - _MOST_OF_NAME))
        return f".{file.name}.".encode() in read.read(_MOST_OF_NAME)


def _costs(log: Path, names: Set[str]) -> Iterator[tuple[str, int]]:
    """Yield the named traces of a log, and the cost of their measurement; the last ones are those that exist."""
    with suppress(OSError), log.open("rb") as lines:
        for line in lines:
            if not any(name.encode() in line for name in names):
                continue
            with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                record = json.loads(line)
                for name in names & {*record["traces"]}:
                    yield name, int(record["worst_ns"] or 0)
