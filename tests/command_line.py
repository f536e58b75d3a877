"""Runs ``ddp-prof`` as its user does, within this process."""

from __future__ import annotations

import csv
import io
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from click.testing import CliRunner

from ddp_prof.cli import main
from ddp_prof.runs import report

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from click.testing import Result


def run(*arguments: object, stdin: bytes | None = None) -> Result:
    """What a command prints, and its exit code; an error that the command line does not know is raised here."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin, catch_exceptions=False)


def csv_rows(*arguments: object) -> list[dict[str, str]]:
    """The rows that a command prints."""
    return list(csv.DictReader(io.StringIO(run(*arguments, "--format", "csv").stdout)))


@contextmanager
def each_read_once() -> Iterator[None]:
    """Commands that read one file in one way get the same events until it changes: reading takes the most time."""
    load_events, found = report.load_events, dict[tuple[Any, ...], report.TraceEvents]()

    def load_once(file: Path, options: report.LoadOptions, *why: str) -> report.TraceEvents:
        key = (file.absolute(), file.stat().st_mtime_ns, options)
        if key not in found:
            found[key] = load_events(file, options, *why)
        return found[key]

    with patch.object(report, "load_events", load_once):
        yield
