"""Progress of the sweep: a bar with the remaining time on a terminal, a line for each run elsewhere."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

if TYPE_CHECKING:
    from collections.abc import Iterator

REFRESHES_A_SECOND = 1
"""Few, since drawing takes time from the ranks."""
MEMORY_S = 3600.0
"""The remaining time is estimated from the runs of the last so many seconds."""


@contextmanager
def show_progress(total: int) -> Iterator[Progress]:
    """Show how far ``total`` runs are, on stderr."""
    console = Console(stderr=True, highlight=False)
    columns = (
        BarColumn(bar_width=20),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=7)),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
        TextColumn("left", table_column=Column(no_wrap=True, min_width=4)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        # What is run gives way to the others.
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    )
    has_bar = console.is_terminal and not console.is_dumb_terminal
    bar = RichProgress(
        *columns, expand=True, console=console, refresh_per_second=REFRESHES_A_SECOND, speed_estimate_period=MEMORY_S,
        disable=not has_bar,
    )  # fmt: skip
    with bar:
        yield Progress(bar, total)


class Progress:
    """Shows the runs as they begin and end: on a terminal a bar, above which failures stay; elsewhere a line each."""

    def __init__(self, bar: RichProgress, total: int) -> None:
        self._bar, self._task = bar, bar.add_task("", total=total)

    def begin(self, what: str) -> None:
        """A run begins."""
        self._bar.update(self._task, description=what)

    def end(self, what: str, outcome: str, *, is_bad: bool) -> None:
        """It has ended."""
        self._bar.advance(self._task)
        if self._bar.disable:
            (task,) = self._bar.tasks
            left_s = (task.elapsed or 0) / task.completed * (task.remaining or 0)
            line = f"[{task.completed:g}/{task.total:g}] {what}: {outcome} ({format_time(left_s)} left)"
            self._bar.console.print(line, markup=False, soft_wrap=True)
        elif is_bad:
            self._bar.console.print(f"{what}: {outcome}", markup=False)


def format_time(seconds: float) -> str:
    """``50 s``, ``7 min``, ``2 h 05 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
