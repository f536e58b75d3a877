"""The argument and the options of every command that reads traces."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Function = TypeVar("Function", bound="Callable[..., Any]")


def _regular_expression(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    try:
        for pattern in (value,) if isinstance(value, str) else value or ():
            re.compile(pattern)
    except re.error as error:
        raise click.BadParameter(f"not a regular expression: {error}") from error
    return value


PIPE = Path("-")
"""Stands for stdin among traces, and for stdout as what is written."""


def _read_stdin(context: click.Context, _parameter: click.Parameter, traces: tuple[Path, ...]) -> tuple[Path, ...]:
    """The traces, with what comes from stdin as a file that is there as long as the command runs."""
    if PIPE not in traces:
        return traces
    file = Path(context.with_resource(tempfile.TemporaryDirectory(prefix="ddp_prof."))) / "stdin"
    with file.open("wb") as target:
        shutil.copyfileobj(sys.stdin.buffer, target)
    return tuple(file if trace == PIPE else trace for trace in traces)


@contextmanager
def written(output: Path) -> Iterator[Path]:
    """The file to write; its name is printed when it is whole, or its content where it stands for stdout."""
    if output != PIPE:
        yield output
        click.echo(output)
        return
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as folder:
        file = Path(folder) / "stdout"
        yield file
        with file.open("rb") as source:
            shutil.copyfileobj(source, sys.stdout.buffer)


traces_argument = click.argument(
    "traces",
    metavar="TRACE...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, allow_dash=True),
    callback=_read_stdin,
)


def load_options(function: Function) -> Function:
    """Adds what says how files are read, handed over as one ``options``."""

    def with_options(
        *args: Any,
        step_range: str | None,
        backward_range: str | None,
        comm_pattern: tuple[str, ...],
        one_run: bool,
        separate: bool,
        **kwargs: Any,
    ) -> Any:
        from ddp_prof.runs.run import LoadOptions

        if one_run and separate:
            raise click.UsageError("--one-run and --separate exclude each other")
        options = LoadOptions(step_range, backward_range, comm_pattern, one_run=one_run, separate=separate)
        return function(*args, options=options, **kwargs)

    with_options.__doc__ = function.__doc__
    with_options.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    options = (
        click.option("--one-run", is_flag=True, help="The traces are ranks of one run, whatever their names."),
        click.option("--separate", is_flag=True, help="Each trace is a run of its own, whatever their names."),
        click.option(
            "--comm-pattern",
            metavar="REGEX",
            multiple=True,
            callback=_regular_expression,
            help="Kernels whose name matches communicate, too. May be repeated.",
        ),
        click.option(
            "--backward-range",
            metavar="REGEX",
            callback=_regular_expression,
            help="Ranges that hold the backward pass. Default: 'backward' and the like, else autograd's threads.",
        ),
        click.option(
            "--step-range",
            metavar="REGEX",
            callback=_regular_expression,
            help="Ranges that are steps; a first group is the step's number. Default: the usual names.",
        ),
    )
    decorated: Any = with_options
    for option in options:
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]
