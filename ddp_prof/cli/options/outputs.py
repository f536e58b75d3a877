"""Writes and prints for commands: never over inputs, and safe for a terminal."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ddp_prof.atomic_file import protect_files, refuse_protected
from ddp_prof.errors import TraceError, printable, printable_lines
from ddp_prof.manifest import SUFFIX

PIPE = Path("-")
"""Stands for stdin among traces, and for stdout as what is written."""


class Output(click.Path):
    """The type of all options that name what is written.

    Args:
        kind: ``file``, ``folder``, or ``pipe`` for a file that may be stdout.
    """

    def __init__(self, kind: str = "file") -> None:
        super().__init__(
            dir_okay=kind == "folder", file_okay=kind != "folder", allow_dash=kind == "pipe", path_type=Path
        )

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; not the name of a manifest, which would be taken for what a run was."""
        path = super().convert(value, param, ctx)
        if str(path).endswith(SUFFIX):
            self.fail(f"{printable(str(path))} is the name of a manifest, which only captures have", param, ctx)
        return path


def protect_inputs(files: Iterable[Path], *also_written: Path) -> None:
    """Refuse to write to these files while the command runs; checks the command's options at once.

    What options do not name, such as the files in a folder, is refused when it is written, or named here.
    """
    context = click.get_current_context()
    context.with_resource(protect_files(files))
    asked = [context.params[param.name or ""] for param in context.command.params if isinstance(param.type, Output)]
    for path in (*asked, *also_written):
        if path not in (None, PIPE):
            try:
                refuse_protected(path)
            except TraceError as error:
                raise click.UsageError(str(error)) from error


def default_output(title: str, ending: str) -> Path:
    """The default output file of a command, named after what it shows."""
    from ddp_prof.present.text import plain_name

    return Path(plain_name(title).replace("/", "-") + ending)


@contextmanager
def open_output(output: Path) -> Iterator[Path]:
    """The file to write; its name is printed when it is whole, or its content where it stands for stdout."""
    if output != PIPE:
        yield output
        say(output)
        return
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as folder:
        file = Path(folder) / "stdout"
        yield file
        with file.open("rb") as source:
            shutil.copyfileobj(source, sys.stdout.buffer)


def say(text: object, *, err: bool = False) -> None:
    """Print lines. All that commands print passes here: names of files and of what is in them may hold anything."""
    click.echo(printable_lines(str(text)), err=err)
