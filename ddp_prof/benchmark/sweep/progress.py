"""Progress of the sweep: a bar with the remaining time on a terminal, a line for each run elsewhere."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import TaskID

REFRESHES_A_SECOND = 1
"""Few, since drawing takes time from the ranks."""
MEMORY_S = 3600.0
"""The remaining time is estimated from the runs of the last so many seconds."""


class Progress(Protocol):
    """Shows the runs as they begin and end."""

    def begin(self, what: str) -> None:
        """A run begins."""

    def end(self, what: str, outcome: str, *, is_bad: bool) -> None:
        """It has ended."""


@contextmanager
def show_progress(total: int) -> Iterator[Progress]:
    """Show how far ``total`` runs are, on stderr."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield Lines(console, total)
        return
    columns = (
        BarColumn(bar_width=20),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=7)),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
        TextColumn("left", table_column=Column(no_wrap=True, min_width=4)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        # What is run gives way to the others.
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    )
    bar = RichProgress(
        *columns, expand=True, console=console, refresh_per_second=REFRESHES_A_SECOND, speed_estimate_period=MEMORY_S
    )
    with bar:
        yield Bar(bar, bar.add_task("", total=total))


class Bar:
    """On a terminal: a bar; failures stay above it."""

    def __init__(self, bar: RichProgress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def begin(self, what: str) -> None:
        """See :class:`Progress`."""
        self._bar.update(self._task, description=what)

    def end(self, what: str, outcome: str, *, is_bad: bool) -> None:
        """See :class:`Progress`."""
        if is_bad:
            self._bar.console.print(f"{what}: {outcome}", markup=False)
        self._bar.advance(self._task)


class Lines:
    """Elsewhere: a line for each run, when it has ended."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total = console, total
        self._done = 0
        self._began = time.monotonic()

    def begin(self, what: str) -> None:
        """See :class:`Progress`."""

    def end(self, what: str, outcome: str, *, is_bad: bool) -> None:  # noqa: ARG002  # all lines are alike
        """See :class:`Progress`."""
        self._done += 1
        left_s = (time.monotonic() - self._began) / self._done * (self._total - self._done)
        line = f"[{self._done}/{self._total}] {what}: {outcome} ({format_time(left_s)} left)"
        self._console.print(line, markup=False, soft_wrap=True)


def format_time(seconds: float) -> str:
    """``50 s``, ``7 min``, ``2 h 05 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
