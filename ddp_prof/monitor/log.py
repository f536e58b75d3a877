"""Read the log of a monitor: each line is a record as JSON, see :mod:`.record`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_prof.annotate.monitor_format import LOG_NAME, first_step
from ddp_prof.bounded_file import read_at_most
from ddp_prof.errors import TraceError, printable
from ddp_prof.monitor.record import SCHEMA

MOST_BYTES = 2**30
_NEEDED = ("step", "time", "step_ns", "exposed_ns", "text")
_WAY_OUT = f"give the {LOG_NAME} of a job with annotate.Monitor, or of 'ddp-prof capture --every'"


@dataclass(frozen=True)
class MonitorLog:
    """The records of a log in their order; ``notes`` say what could not be read."""

    file: Path
    records: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]


def log_in(folder: Path) -> Path:
    """Return the log in a monitor's folder."""
    return folder / LOG_NAME


def steps_of_first(every: int, steps: int) -> int:
    """Return how many steps a job makes until its first measurement, of ``steps`` steps after warm-up, is complete."""
    return first_step(every) + 1 + steps  # 1 for warm-up


def load_log(file: Path) -> MonitorLog:
    """Read a log; lines that are no records are left out with a note, such as a line that was not written to its end.

    Raises:
        TraceError: It cannot be read, or holds no record.
    """
    lines = read_at_most(file, MOST_BYTES, "the log of a monitor", _WAY_OUT).decode("utf-8", "replace").splitlines()
    records, unread = [], 0
    for line in filter(str.strip, lines):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and record.get("schema") == SCHEMA and all(name in record for name in _NEEDED):
            records.append(record)
        else:
            unread += 1
    if not records:
        raise TraceError(file, "it holds no record of a monitor", _WAY_OUT)
    what = f"{unread} line{'s' * (unread != 1)} without a record of a monitor: cut off, or of another version"
    notes = (printable(f"{file}: left out {what}"),) if unread else ()
    return MonitorLog(file, tuple(records), notes)
