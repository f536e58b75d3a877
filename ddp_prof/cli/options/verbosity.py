"""Notes and progress on stderr, and the options that control them; valid after and before a command."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from threading import Timer

import click

from ddp_prof.cli.options.outputs import say
from ddp_prof.errors import printable

DELAY_S = 1.0
"""Seconds after which a command shows its progress."""

EXIT_CODE = "ddp_prof.exit_code"
"""Key in click's context of an exit code other than 0 for a command that ran to its end."""

_QUIET = "ddp_prof.quiet"


def is_quiet() -> bool:
    """Whether notes are left out in the command that runs."""
    return bool(click.get_current_context().meta.get(_QUIET))


def print_note(text: str) -> None:
    """A note on stderr, where they are not left out."""
    if not is_quiet():
        say(f"note: {text}", err=True)


@contextmanager
def progress(parts: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with the name of each part of the work when it begins; shows a bar."""
    with progress_bar() as show:
        done = count()
        yield lambda part: show(part, next(done), parts)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function to call with the current part, the number of finished parts and of all parts.

    A bar on stderr shows it where that is a terminal and the work takes more than a second. Of a single part nobody
    knows how far it is: the bar moves to and fro.
    """
    if is_quiet() or not sys.stderr.isatty():
        yield lambda _what, _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
    task = bar.add_task("", total=None)

    def show(what: str, done: int, total: int) -> None:
        text, known = (f"{what}, {done} of {total} done", total) if total > 1 else (what, None)
        bar.update(task, description=printable(text), completed=done, total=known)

    timer = Timer(DELAY_S, bar.start)
    timer.start()
    try:
        yield show
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


def _set_quiet(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        context.meta[_QUIET] = True
        _set_level(context, logging.ERROR)


def _set_verbose(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        logging.basicConfig(format="%(message)s", force=True)
        _set_level(context, logging.INFO)


def _set_level(context: click.Context, level: int) -> None:
    """As long as the command runs."""
    log = logging.getLogger("ddp_prof")
    log.setLevel(level)
    context.call_on_close(partial(log.setLevel, logging.NOTSET))


VERBOSITY = [
    click.Option(
        ["-q", "--quiet"], is_flag=True, expose_value=False, callback=_set_quiet, help="Leave out notes and progress."
    ),
    click.Option(
        ["-v", "--verbose"],
        is_flag=True,
        expose_value=False,
        callback=_set_verbose,
        help="Say on stderr what is read, and how long that takes.",
    ),
]
