"""Runs ``ddp-prof`` as its user does, within this process."""

from __future__ import annotations

import csv
import io
import os
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from click.testing import CliRunner

from ddp_prof.cli import main
from ddp_prof.runs import report
from ddp_prof.runs import run as run_module
from tests.conftest import ROOT, SHARED_TRACES

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


def said_on(terminal: int) -> bytes:
    """What is written to a terminal of :func:`os.openpty` until all who write to it have ended; closes it."""
    said = b""
    with suppress(OSError):  # Linux tells the end by an error
        while block := os.read(terminal, 65536):
            said += block
    os.close(terminal)
    return said


MOST_CAPTURES = 32
"""How many captures are kept in memory."""
_captures: dict[tuple[Any, ...], report.TraceEvents] = {}
_measured = WeakKeyDictionary[report.TraceEvents, dict[tuple[Any, ...], Any]]()


@contextmanager
def each_read_once() -> Iterator[None]:
    """Commands that read one file in one way get the same events, measured once, until it changes.

    The events of captures that no test changes are there for later tests, too.
    """
    load_events, measure_events = report.load_events, report.measure_events
    of_block = dict[tuple[Any, ...], report.TraceEvents]()

    def load_once(file: Path, options: report.LoadOptions, *why: str) -> report.TraceEvents:
        path = file.resolve()
        key = (file, path, path.stat().st_mtime_ns, options)  # what is told has the name that was given
        is_capture = any(path.is_relative_to(folder) for folder in (ROOT / "traces", SHARED_TRACES))
        found = _captures if is_capture else of_block
        if key not in found:
            found[key] = load_events(file, options, *why)
            if len(_captures) > MOST_CAPTURES:
                del _captures[next(iter(_captures))]
        return found[key]

    def measure_once(
        part: report.TraceEvents, options: report.LoadOptions, measures: tuple[str, ...]
    ) -> dict[str, Any]:
        known = _measured.setdefault(part, {})
        missing = tuple(measure for measure in measures if (options, measure) not in known)
        measured = measure_events(part, options, missing)
        known |= {(options, measure): result for measure, result in measured.items()}
        # Contention is not measured of each capture.
        return {measure: known[options, measure] for measure in measures if (options, measure) in known}

    with ExitStack() as patches:
        for module in (report, run_module):
            patches.enter_context(patch.object(module, "load_events", load_once))
            patches.enter_context(patch.object(module, "measure_events", measure_once))
        yield
