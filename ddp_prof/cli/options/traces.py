"""The argument and the options of every command that reads traces."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ddp_prof.cli.options.adding import add_options
from ddp_prof.cli.options.outputs import PIPE, protect, say
from ddp_prof.cli.options.verbosity import EXIT_CODE, progress_bar
from ddp_prof.errors import InterruptedReadingError, TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddp_prof.runs.report import LoadOptions
    from ddp_prof.runs.run import Run

Function = TypeVar("Function", bound="Callable[..., Any]")

INTERRUPTED = 130
"""What a shell says of a program that Ctrl-C ended."""


def _regular_expression(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    try:
        for pattern in (value,) if isinstance(value, str) else value or ():
            re.compile(pattern)
    except re.error as error:
        raise click.BadParameter(f"not a regular expression: {error}") from error
    return value


def _read_stdin(context: click.Context, _parameter: click.Parameter, traces: tuple[Path, ...]) -> tuple[Path, ...]:
    """The traces, with what comes from stdin as a file that is there as long as the command runs."""
    if PIPE not in traces:
        return traces
    file = Path(context.with_resource(tempfile.TemporaryDirectory(prefix="ddp_prof."))) / "stdin"
    with file.open("wb") as target:
        shutil.copyfileobj(sys.stdin.buffer, target)
    return tuple(file if trace == PIPE else trace for trace in traces)


traces_argument = click.argument(
    "traces",
    metavar="TRACE...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, allow_dash=True),
    callback=_read_stdin,
)


@dataclass(frozen=True)
class Loader:
    """Reads the traces of a command.

    Attributes:
        options: How they are read.
        jobs, scheduler: As of ``Workers``.
        strict: Whether a trace that cannot be read ends the command.
    """

    options: LoadOptions
    jobs: int | None
    scheduler: str | None
    strict: bool

    def runs(self, traces: Sequence[Path], *measures: str, **reading: Any) -> list[Run]:
        """The runs, measured.

        Args:
            traces: Files and folders.
            measures: What the command asks of them, names in ``runs.report.MEASURES``.
            reading: Fields of ``LoadOptions`` that the command sets.
        """
        from ddp_prof.ingest.load import files_of
        from ddp_prof.runs.load import find_files, load_runs
        from ddp_prof.runs.workers import Workers

        files = find_files(traces)
        protect(file for trace in files for file in files_of(trace))
        with progress_bar() as show:
            workers = Workers(
                self.jobs, self.scheduler, partial(show, "reading"), None if self.strict else _say_left_out
            )
            return load_runs(files, replace(self.options, **reading), workers=workers, measures=measures)


def _say_left_out(error: TraceError) -> None:
    say(f"warning: left out: {error}", err=True)
    if isinstance(error, InterruptedReadingError):
        click.get_current_context().meta[EXIT_CODE] = INTERRUPTED


def load_options(function: Function) -> Function:
    """Adds what says how files are read, and by whom, handed over as one ``load``, a :class:`Loader`."""

    def with_loader(
        *args: Any,
        step_range: str | None,
        backward_range: str | None,
        comm_pattern: tuple[str, ...],
        one_run: bool,
        separate: bool,
        jobs: int | None,
        scheduler: str | None,
        strict: bool,
        part_rows: int | None,
        **kwargs: Any,
    ) -> Any:
        from ddp_prof.runs.report import LoadOptions

        if one_run and separate:
            raise click.UsageError("--one-run and --separate exclude each other")
        options = LoadOptions(
            step_range, backward_range, comm_pattern, one_run=one_run, separate=separate, part_rows=part_rows
        )
        return function(*args, load=Loader(options, jobs, scheduler, strict), **kwargs)

    return add_options(function, with_loader, _LOAD_OPTIONS)


_LOAD_OPTIONS = (
    click.option("--strict", is_flag=True, help="Fail if a trace cannot be read, instead of going on without it."),
    click.option(
        "--scheduler",
        metavar="ADDRESS|FILE",
        help="Let the workers of a Dask scheduler read the traces; they must find them at the same paths.",
    ),
    click.option(
        "--part-rows",
        type=click.IntRange(min=1),
        help="Read an export in parts of about this many rows. Default: 3 million, if it has more than 9 million.",
    ),
    click.option(
        "--jobs",
        type=click.IntRange(min=1),
        help="Number of processes that read traces. Default: one a core, fewer for small traces.",
    ),
    click.option("--one-run", is_flag=True, help="The traces are ranks of one run, whatever their names."),
    click.option("--separate", is_flag=True, help="Each trace is a run of its own, whatever their names."),
    click.option(
        "--comm-pattern",
        metavar="REGEX",
        multiple=True,
        callback=_regular_expression,
        help="Count kernels whose name matches as communication, too. May be repeated.",
    ),
    click.option(
        "--backward-range",
        metavar="REGEX",
        callback=_regular_expression,
        help="Names of ranges that hold the backward pass. Default: 'backward' and the like, else autograd's threads.",
    ),
    click.option(
        "--step-range",
        metavar="REGEX",
        callback=_regular_expression,
        help="Names of ranges that are steps; a first group is the step's number. Default: the usual names.",
    ),
)
