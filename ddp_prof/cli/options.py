"""What the commands have in common: the options for reading traces and for tables, and the form of the help."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from ddp_prof.cli.terminal import EXIT_CODE, PIPE, is_quiet, progress, protect_inputs, say, say_lines
from ddp_prof.errors import STDIN, InterruptedReadingError, TraceError
from ddp_prof.heap import share_one_heap
from ddp_prof.present.table import TableOptions, TableView
from ddp_prof.runs.report import LoadOptions
from ddp_prof.runs.run import Run

INTERRUPTED = 130
"""Exit code after Ctrl-C, by the convention of shells."""

_GENERAL = frozenset({"--quiet", "--verbose", "--help", "--help-all"})
"""Options that the help lists as general."""
_FORMS = ("table", "json", "csv", "markdown")
"""The forms of output."""
_RARE = frozenset({"--separate", "--one-run", "--jobs", "--scheduler", "--strict", "--no-cache"})
"""Options that only --help-all shows."""
_SHOWS_ALL = "ddp_prof.help_all"
"""Key in the ``meta`` of click's context: whether the help shows all options."""


class TraceCommand(click.Command):
    """A command with options that several commands have; its help lists these after its own options.

    The function is called with its own options and

    - if it reads traces: ``traces``, the paths, and ``load``, a :class:`Loader`;
    - if it prints tables: ``output``, the ``TableOptions`` of ``--format``, ``--wide`` and ``--columns``.

    ``params`` are the command's own options. ``example`` is what follows ``ddp-prof NAME`` in the example of the help.
    ``answer`` is what the command measures and shows, if it only prints tables of traces; ``ddp-prof mcp`` then gives
    the same answer.
    """

    def __init__(
        self,
        name: str,
        *,
        example: str,
        answer: Answer | None = None,
        params: list[click.Parameter],
        reads_traces: bool = True,
        prints_tables: bool = True,
        **attributes: Any,
    ) -> None:
        """Add the common options to ``params``; ``attributes`` are further arguments of ``click.Command``."""
        params += _TABLE_OPTIONS if prints_tables else ()
        if reads_traces:
            params = [_TRACES, *params, *_READING_OPTIONS, _HELP_ALL]
        super().__init__(name, params=params, epilog=f"Example: ddp-prof {name} {example}", **attributes)
        self.reads_traces, self.prints_tables, self.answer = reads_traces, prints_tables, answer

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; a form of output that is given as an option leads to ``--format``."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            form = error.option_name.lstrip("-")
            if not self.prints_tables or form not in _FORMS:
                raise
            said = f"No such option {error.option_name!r}. Did you mean '--format {form}'?"
            raise click.NoSuchOption(error.option_name, said, ctx=ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Replace the values of the common options by ``load`` and ``output``, and call the function."""
        values = ctx.params
        if self.reads_traces:
            options = _take_load_options(values)
            jobs, scheduler, strict = (values.pop(name) for name in ("jobs", "scheduler", "strict"))
            values["load"] = Loader(options, jobs, scheduler, strict, self.answer)
        if self.prints_tables:
            form, wide, columns = (values.pop(name) for name in ("form", "wide", "columns"))
            values["output"] = TableOptions(form, wide, columns, is_quiet())
        return super().invoke(ctx)

    def parse_load_options(self, words: Sequence[str]) -> LoadOptions:
        """Return how these words of a command line, options and traces, read traces; nothing is read yet.

        Raises:
            click.UsageError: The command line refuses them.
        """
        with self.make_context(self.name, list(words)) as context:
            return _take_load_options(context.params)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of the help in three groups, without the rare ones unless ``--help-all`` asks for these."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": [], "How traces are read": [], "General": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            is_left_out = parameter.opts[-1] in _RARE and not ctx.meta.get(_SHOWS_ALL)
            if record and isinstance(parameter, click.Option) and not is_left_out:
                title = "General" if parameter.opts[-1] in _GENERAL else "Options"
                groups["How traces are read" if parameter in _READING_OPTIONS else title].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _take_load_options(values: dict[str, Any]) -> LoadOptions:
    """Take how traces are read out of the values of a command's options.

    Raises:
        click.UsageError: Two of them exclude each other.
    """
    if values["one_run"] and values["separate"]:
        raise click.UsageError("--one-run and --separate exclude each other")
    return LoadOptions(**{one.name: values.pop(one.name) for one in fields(LoadOptions) if one.name in values})


@dataclass(frozen=True)
class Answer:
    """What a command measures, and the tables that it makes from that.

    Attributes:
        measures: What to measure: names in ``runs.report.MEASURES``, or of results that :mod:`ddp_prof.runs.run` makes
            from these.
        views: Makes the tables of some runs. Its other arguments are options of the command, and all have defaults.
        for_json: What to measure in addition for the JSON document.
    """

    measures: Sequence[str]
    views: Callable[..., list[TableView]]
    for_json: Sequence[str] = ()

    def measures_for(self, *, as_json: bool) -> Sequence[str]:
        return (*self.measures, *(self.for_json if as_json else ()))


@dataclass(frozen=True)
class Loader:
    """Reads the traces of a command.

    Attributes:
        options: How traces are read.
        jobs: Number of processes that read; ``None`` for the default.
        scheduler: Address or file of a Dask scheduler whose workers read; ``None`` for processes of this machine.
        strict: Whether a trace that cannot be read ends the command; otherwise it is left out with a warning.
        answer: What the command measures; ``None`` if it says so itself.
    """

    options: LoadOptions
    jobs: int | None
    scheduler: str | None
    strict: bool
    answer: Answer | None = None

    def runs_for(self, traces: Sequence[Path], output: TableOptions, **reading: Any) -> list[Run]:
        """Read the runs and measure what the command's answer needs; ``reading`` as in :meth:`runs`."""
        assert self.answer is not None
        return self.runs(traces, *self.answer.measures_for(as_json=output.form == "json"), **reading)

    def runs(self, traces: Sequence[Path], *measures: str, **reading: Any) -> list[Run]:
        """Read the runs and measure them.

        Args:
            traces: Files and folders.
            measures: What to measure, as in :class:`Answer`.
            reading: Fields of ``LoadOptions`` that the command sets itself.
        """
        from ddp_prof.ingest.trace_files import files_of
        from ddp_prof.runs import find_files, load_runs
        from ddp_prof.runs.workers import Workers

        share_one_heap()
        files = find_files(traces)
        protect_inputs(file for trace in files for file in files_of(trace))
        with progress() as show:
            workers = Workers(
                self.jobs, self.scheduler, partial(show, "reading"), None if self.strict else _warn_left_out
            )
            return load_runs(files, replace(self.options, **reading), workers=workers, measures=measures)


def _warn_left_out(error: TraceError) -> None:
    """Print a warning about a trace that is left out; after Ctrl-C also set the exit code."""
    say(f"warning: left out: {error}", err=True)
    if isinstance(error, InterruptedReadingError):
        click.get_current_context().meta[EXIT_CODE] = INTERRUPTED


def _check_regular_expression(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    """Return the value of an option, or raise an error if a pattern in it is no regular expression."""
    try:
        for pattern in (value,) if isinstance(value, str) else value or ():
            if not pattern:
                raise click.BadParameter("an empty pattern fits every name: leave the option out, or give a name")
            re.compile(pattern)
    except re.error as error:
        raise click.BadParameter(f"not a regular expression: {error}") from error
    return value


MOST_WARMUP_STEPS = 2**31 - 1
"""Of ``--warmup-steps``; no capture has more steps."""

_CHUNK = 1 << 20
"""Bytes that are read from stdin at once."""


def _read_stdin(context: click.Context, _parameter: click.Parameter, traces: tuple[Path, ...]) -> tuple[Path, ...]:
    """Replace ``-`` among the traces by a temporary file with the content of stdin.

    The content may take half of the free disk, because stdin may never end.

    Raises:
        TraceError: The content is larger.
    """
    if PIPE not in traces:
        return traces
    file = Path(context.with_resource(tempfile.TemporaryDirectory(prefix=STDIN))) / "stdin"
    left = most = shutil.disk_usage(file.parent).free // 2
    with file.open("wb") as target:
        while chunk := sys.stdin.buffer.read(min(left, _CHUNK) + 1):  # + 1: a byte too many
            if len(chunk) > left:
                reason = f"it sends more than {most:,} bytes, which is half of the room for temporary files"
                raise TraceError(PIPE, reason, "write it into a file, and give that, or set TMPDIR to a larger disk")
            target.write(chunk)
            left -= len(chunk)
    return tuple(file if trace == PIPE else trace for trace in traces)


def _parse_columns(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[str, ...]:
    """Return the keys in ``rank,step_ms``; a heading such as ``step ms`` means ``step_ms``."""
    return tuple("_".join(key.split()) for key in (text or "").split(",") if key.strip())


class InputPath(click.Path):
    """A path; not an empty one, as of a variable of the shell that is not set: it would be this folder."""

    def __init__(self, way_out: str, *, allow_dash: bool = False) -> None:
        super().__init__(path_type=Path, allow_dash=allow_dash)
        self._way_out = way_out

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail(f"an empty name: is a variable of the shell not set? {self._way_out}", param, ctx)
        return super().convert(value, param, ctx)


_TRACES = click.Argument(
    ["traces"],
    metavar="TRACE...",
    nargs=-1,
    required=True,
    type=InputPath("give the trace, or . for this folder", allow_dash=True),
    callback=_read_stdin,
)
_TABLE_OPTIONS = (
    click.Option(
        ["--format", "form"],
        type=click.Choice(_FORMS),
        default="table",
        show_default=True,
        help="Form of the output.",
    ),
    click.Option(["--wide"], is_flag=True, help="Show all columns, however narrow the terminal."),
    click.Option(
        ["--columns"],
        metavar="KEY,...",
        callback=_parse_columns,
        help="Columns to show, in this order, by their names in the CSV: rank,step_ms. JSON always holds all.",
    ),
)


def _show_all_help(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    """Print the help with all options and exit; the callback of ``--help-all``."""
    if value:
        context.meta[_SHOWS_ALL] = True
        say_lines(context.get_help())
        context.exit()


_HELP_ALL = click.Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all_help,
    help="Show this message with the rare options of reading, and exit.",
)  # fmt: skip

_READING_OPTIONS = (
    click.Option(
        ["--step-range"],
        metavar="REGEX",
        callback=_check_regular_expression,
        help="Names of ranges that are steps; its first group is the step's number. Default: the usual names.",
    ),
    click.Option(
        ["--backward-range"],
        metavar="REGEX",
        callback=_check_regular_expression,
        help="Names of ranges that hold the backward pass. Default: 'backward' and the like, else autograd's threads.",
    ),
    click.Option(
        ["--warmup-steps"],
        metavar="N",
        type=click.IntRange(0, MOST_WARMUP_STEPS),
        default=0,
        help="Leave out the first N steps of each rank, besides those that are marked as warm-up.",
    ),
    click.Option(
        ["--comm-pattern", "comm_patterns"],
        metavar="REGEX",
        multiple=True,
        callback=_check_regular_expression,
        help="Count kernels whose name matches as communication, too. May be repeated.",
    ),
    click.Option(["--separate"], is_flag=True, help="Each trace is a run of its own, whatever their names."),
    click.Option(["--one-run"], is_flag=True, help="The traces are ranks of one run, whatever their names."),
    click.Option(
        ["--jobs"],
        type=click.IntRange(min=1),
        help="Number of processes that read traces. Default: one per core, fewer for small traces.",
    ),
    click.Option(
        ["--scheduler"],
        metavar="ADDRESS|FILE",
        help="Let the workers of a Dask scheduler read the traces; they must find them at the same paths.",
    ),
    click.Option(
        ["--no-cache", "use_cache"],
        is_flag=True,
        flag_value=False,
        default=True,
        help="Read all traces again, and keep nothing of large ones in the cache; see 'ddp-prof cache'.",
    ),
    click.Option(["--strict"], is_flag=True, help="Fail if a trace cannot be read, instead of going on without it."),
)
