"""Shared parts of commands: layout of the help, options for reading traces, options for tables."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from ddp_prof.cli.options.outputs import PIPE, protect_inputs, say
from ddp_prof.cli.options.verbosity import EXIT_CODE, is_quiet, progress_bar
from ddp_prof.errors import InterruptedReadingError, TraceError
from ddp_prof.present.table import TableOptions
from ddp_prof.runs.report import LoadOptions
from ddp_prof.runs.run import Run

Function = TypeVar("Function", bound="Callable[..., Any]")

_READING = frozenset(
    {"step_range", "backward_range", "comm_pattern", "separate", "one_run", "jobs", "part_rows", "scheduler", "strict"}
)
"""Options for reading traces."""
_GENERAL = frozenset({"quiet", "verbose", "help"})


class TraceCommand(click.Command):
    """A command whose help has its own options first, and ends with an example."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Options": [], "How traces are read": [], "General": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record and isinstance(parameter, click.Option):
                name = parameter.opts[-1].removeprefix("--").replace("-", "_")
                group = "How traces are read" if name in _READING else "General" if name in _GENERAL else "Options"
                groups[group].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def trace_command(name: str, example: str) -> Callable[[Callable[..., Any]], click.Command]:
    """A command whose help ends with an example: what follows ``ddp-prof`` and its name."""
    return click.command(name, cls=TraceCommand, epilog=f"Example: ddp-prof {name} {example}")


def add_options(function: Function, taking: Callable[..., Any], options: Iterable[Callable[..., Any]]) -> Function:
    """A command's function with more options; ``taking`` takes their values and calls it with what it makes of them."""
    taking.__doc__ = function.__doc__
    taking.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    for option in options:
        taking = option(taking)
    return taking  # type: ignore[return-value]


INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended, as shells report it."""


def _check_regular_expression(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
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
        from ddp_prof.runs import find_files, load_runs
        from ddp_prof.runs.workers import Workers

        files = find_files(traces)
        protect_inputs(file for trace in files for file in files_of(trace))
        with progress_bar() as show:
            workers = Workers(
                self.jobs, self.scheduler, partial(show, "reading"), None if self.strict else _warn_left_out
            )
            return load_runs(files, replace(self.options, **reading), workers=workers, measures=measures)


def _warn_left_out(error: TraceError) -> None:
    say(f"warning: left out: {error}", err=True)
    if isinstance(error, InterruptedReadingError):
        click.get_current_context().meta[EXIT_CODE] = INTERRUPTED


def load_options(function: Function) -> Function:
    """Add the options for reading traces, passed on as one argument ``load``, a :class:`Loader`."""

    def with_loader(*args: Any, **values: Any) -> Any:
        if values["one_run"] and values["separate"]:
            raise click.UsageError("--one-run and --separate exclude each other")
        names = [field.name for field in fields(LoadOptions) if field.name in values]
        options = LoadOptions(**{name: values.pop(name) for name in names})
        load = Loader(options, values.pop("jobs"), values.pop("scheduler"), values.pop("strict"))
        return function(*args, load=load, **values)

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
        help="Number of processes that read traces. Default: one per core, fewer for small traces.",
    ),
    click.option("--one-run", is_flag=True, help="The traces are ranks of one run, whatever their names."),
    click.option("--separate", is_flag=True, help="Each trace is a run of its own, whatever their names."),
    click.option(
        "--comm-pattern",
        "comm_patterns",
        metavar="REGEX",
        multiple=True,
        callback=_check_regular_expression,
        help="Count kernels whose name matches as communication, too. May be repeated.",
    ),
    click.option(
        "--backward-range",
        metavar="REGEX",
        callback=_check_regular_expression,
        help="Names of ranges that hold the backward pass. Default: 'backward' and the like, else autograd's threads.",
    ),
    click.option(
        "--step-range",
        metavar="REGEX",
        callback=_check_regular_expression,
        help="Names of ranges that are steps; a first group is the step's number. Default: the usual names.",
    ),
)


FORMS = ("table", "json", "csv", "markdown")


def table_options(function: Function) -> Function:
    """Add ``--format``, ``--wide`` and ``--columns``, passed on as one argument ``output``, a ``TableOptions``."""

    def with_output(*args: Any, form: str, wide: bool, columns: tuple[str, ...], **kwargs: Any) -> Any:
        return function(*args, output=TableOptions(form, wide, columns, is_quiet()), **kwargs)

    return add_options(function, with_output, _TABLE_OPTIONS)


def _parse_columns(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[str, ...]:
    """``rank,step_ms`` as keys; as a person may write them, with spaces for underscores."""
    return tuple("_".join(key.split()) for key in (text or "").split(",") if key.strip())


_TABLE_OPTIONS = (
    click.option(
        "--columns",
        metavar="KEY,...",
        callback=_parse_columns,
        help="Columns to show, in this order, by their names in the CSV: rank,step_ms.",
    ),
    click.option("--wide", is_flag=True, help="Show all columns, however narrow the terminal."),
    click.option(
        "--format",
        "form",
        type=click.Choice(FORMS),
        default=FORMS[0],
        show_default=True,
        help="Form of the output.",
    ),
)
