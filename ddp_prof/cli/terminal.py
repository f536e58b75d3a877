"""Output of commands: text that is safe for a terminal, files that never replace inputs, notes and progress."""

from __future__ import annotations

import io
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

import click

from ddp_prof.atomic_file import is_stream, protect_files, refuse_protected
from ddp_prof.errors import TraceError, printable, printable_lines
from ddp_prof.manifest import SUFFIX

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PIPE = Path("-")
"""As a trace this stands for stdin, as an output for stdout."""


class Output(click.Path):
    """The type of all options for output paths.

    Args:
        kind: ``file``, ``folder``, or ``pipe`` (a file or stdout).
        suffix: How the name must end, because the ending decides what is written; empty for any name.
    """

    def __init__(self, kind: str = "file", suffix: str = "") -> None:
        """Accept a folder, a file, or a file and ``-`` for stdout, by the kind."""
        self.suffix = suffix
        super().__init__(
            dir_okay=kind == "folder", file_okay=kind != "folder", allow_dash=kind == "pipe", path_type=Path
        )

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path.

        Refuse the name of a manifest: readers would take the file for the manifest of a run.
        """
        path: Path = super().convert(value, param, ctx)  # type: ignore[assignment]
        if path.suffix.lower() != self.suffix and self.suffix:
            self.fail(f"{printable(str(path))} does not end in {self.suffix}", param, ctx)
        if str(path).endswith(SUFFIX):
            what = f"{printable(str(path))} is a name for the description of a run, which only a capture writes"
            self.fail(f"{what}: choose a name that does not end in {SUFFIX}", param, ctx)
        return path


def complete_file(_context: click.Context, _parameter: click.Parameter | None, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete ``incomplete`` as the name of a file."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def protect_inputs(files: Iterable[Path], *also_written: Path) -> None:
    """Refuse to write to these files, the inputs, while the command runs.

    The paths of output options, and ``also_written``, are checked at once; other outputs (files in a folder) when they
    are written.

    Raises:
        click.UsageError: An output would replace an input.
    """
    context = click.get_current_context()
    context.with_resource(protect_files(files))
    outputs = [context.params[param.name or ""] for param in context.command.params if isinstance(param.type, Output)]
    for path in (*outputs, *also_written):
        if path not in (None, PIPE):
            try:
                refuse_protected(path)
            except TraceError as error:
                raise click.UsageError(str(error)) from error


def default_output(title: str, ending: str) -> Path:
    """Return a file name made from a title and an ending."""
    from ddp_prof.present.text import plain_name

    return Path(plain_name(title).replace("/", "-") + ending)


@contextmanager
def open_output(output: Path) -> Iterator[Path]:
    """Yield the file to write; at the end print its path, or its content if ``output`` is ``PIPE``.

    The path of a device or a pipe, such as ``/dev/stdout``, is not printed, because the output itself goes there.
    """
    if output != PIPE:
        is_file = not is_stream(output)
        yield output
        if is_file:
            say_written(output)
        return
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as folder:
        file = Path(folder) / "stdout"
        yield file
        with file.open("rb") as source:
            shutil.copyfileobj(source, sys.stdout.buffer)


def say(text: object, *, err: bool = False) -> None:
    """Print a line, with control characters escaped: names of files, and names in traces, may contain any character."""
    click.echo(printable(str(text)), err=err)


def say_written(path: Path) -> None:
    """Print the path of a file that a command has written; if stdout is closed, the file itself is the answer."""
    if not isinstance(sys.stdout, ClosedStream):
        say(path)


class ClosedStream(io.TextIOWrapper):
    """Stands for stdout or stderr if the program was started with it closed (``>&-``)."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")

    @property
    def has_lost(self) -> bool:
        """Whether something was printed, which nobody sees."""
        return self.tell() > 0


def say_lines(text: str) -> None:
    """Print text of several lines; names in it must have passed ``printable``, so that they have no line breaks."""
    click.echo(printable_lines(text))


DELAY_S = 1.0
"""Seconds before the progress bar appears."""

EXIT_CODE = "ddp_prof.exit_code"
"""Key in the ``meta`` of click's context: the exit code of a command that ran to its end, if the code answers, too."""

_QUIET = "ddp_prof.quiet"
"""Key in the ``meta`` of click's context: whether ``--quiet`` is given."""


def is_quiet() -> bool:
    return bool(click.get_current_context().meta.get(_QUIET))


def print_note(text: str) -> None:
    if not is_quiet():
        say(f"note: {text}", err=True)


@contextmanager
def progress(what: str | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function to call with the current part, the number of finished parts, and the number of all parts.

    If stderr is a terminal and the work takes more than a second, a bar shows the progress. With a single part the bar
    only moves to and fro. ``what`` is the first part, shown without a call.
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

    if what is not None:
        show(what, 0, 1)
    # Short work ends before the timer starts the bar.
    timer = Timer(DELAY_S, bar.start)
    timer.start()
    try:
        yield show
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


def _set_verbosity(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Apply ``--quiet`` or ``--verbose`` until the command ends."""
    if not value:
        return
    log = logging.getLogger("ddp_prof")
    if parameter.name == "quiet":
        context.meta[_QUIET] = True
        log.setLevel(logging.ERROR)
    else:
        logging.basicConfig(format="%(message)s", force=True)
        log.setLevel(logging.INFO)
    context.call_on_close(partial(log.setLevel, logging.NOTSET))


VERBOSITY = [
    click.Option(
        ["-q", "--quiet"],
        is_flag=True,
        expose_value=False,
        callback=_set_verbosity,
        help="Leave out notes and progress.",
    ),
    click.Option(
        ["-v", "--verbose"],
        is_flag=True,
        expose_value=False,
        callback=_set_verbosity,
        help="Say on stderr what is read, and how long that takes.",
    ),
]
