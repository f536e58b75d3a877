"""Runs ``ddp-prof`` as its user does, within this process."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from click.testing import CliRunner

from ddp_prof.cli import main

if TYPE_CHECKING:
    from click.testing import Result


def run(*arguments: object, stdin: bytes | None = None) -> Result:
    """What a command prints, and its exit code; an error that the command line does not know is raised here."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin, catch_exceptions=False)


def csv_rows(*arguments: object) -> list[dict[str, str]]:
    """The rows that a command prints."""
    return list(csv.DictReader(io.StringIO(run(*arguments, "--format", "csv").stdout)))
