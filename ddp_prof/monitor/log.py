"""Read the log of a monitor: each line is a record as JSON, see :mod:`.record`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, ValidationError, convert

from ddp_prof.annotate.monitor_format import LOG_NAME, first_step
from ddp_prof.bounded_file import read_at_most
from ddp_prof.columns import count_noun
from ddp_prof.errors import TraceError, printable
from ddp_prof.file_kinds import GZIP
from ddp_prof.monitor.record import SCHEMA

MOST_BYTES = 2**30
_WAY_OUT = f"give the {LOG_NAME} of a job with annotate.Monitor, or of 'ddp-prof capture --every'"

_MOST = 2**62
"""No number of a record is as large; larger ones do not fit into the arrays in which they are compared."""
_Number = Annotated[float, Meta(gt=-_MOST, lt=_MOST)]
_Length = Annotated[float, Meta(ge=0, lt=_MOST)]


@dataclass
class _OfRank:
    """What is read of a rank's figures."""

    rank: int | None
    overlap_ratio: _Number | None
    exposed_ns: _Length | None
    tail_ns: _Length | None
    blocking_ns: _Length | None
    lag_ns: _Number | None


@dataclass
class _Late:
    """What is read of the rank that arrives last."""

    rank: int
    lag_ns: _Number
    steps: int
    of_steps: int


@dataclass
class _Record:
    """What a record must hold to be read, and the types of what it may hold."""

    schema: int
    step: Annotated[int, Meta(ge=0, lt=_MOST)]
    time: str
    text: str
    step_ns: _Length | None
    exposed_ns: _Length | None
    by_rank: list[_OfRank]
    communicating_step_ns: _Length | None = None
    comm_ns: _Length | None = None
    overlapped_ns: _Length | None = None
    blocking_ns: _Length | None = None
    contention_ns: _Number | None = None
    schedule_gain_ns: _Number | None = None
    overlap_ratio: _Number | None = None
    late: _Late | None = None
    finding: dict[str, Any] | None = None
    failed: list[str] | None = None
    missing_ranks: list[int] | None = None


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
    if file.is_dir():
        raise TraceError(file, "a folder", _WAY_OUT)
    try:
        content = read_at_most(file, MOST_BYTES, "the log of a monitor", _WAY_OUT)
    except OSError as error:
        way_out = "check the path" if isinstance(error, FileNotFoundError) else _WAY_OUT
        raise TraceError(file, error.strerror or str(error), way_out) from error
    if content.startswith(GZIP):
        raise TraceError(file, "compressed by gzip", "unpack it first, as by gunzip")
    records, unread = [], 0
    lines = list(filter(str.strip, content.decode("utf-8-sig", "replace").splitlines()))  # an editor may add a mark
    distinct = dict.fromkeys(lines)  # no two measurements have one line: parts of a log were joined that overlap
    for line in distinct:
        record = _record_in(line)
        if record is None:
            unread += 1
        else:
            records.append(record)
    if not records:
        raise TraceError(file, "it holds no record of a monitor", _WAY_OUT)
    left_out = {
        "without a record of a monitor: cut off, or of another version": unread,
        "that the log has already": len(lines) - len(distinct),
    }
    notes = [
        printable(f"{file}: left out {count_noun(count, 'line')} {why}") for why, count in left_out.items() if count
    ]
    return MonitorLog(file, tuple(records), tuple(notes))


_OF_A_JOB = {"ranks": "world_size", "device": "device"}
"""What of a record must be the same for steps to be compared, with the word for it."""


def find_other_job(records: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what makes records those of another job than the reference, such as "ranks 8 and 2"; else ``None``."""
    differing = []
    for what, name in _OF_A_JOB.items():
        own, others = ({one.get(name) for one in group} - {None} for group in (records, reference))
        if own and others and own != others:
            texts = (" or ".join(map(str, sorted(values, key=str))) for values in (own, others))
            differing.append(f"{what} {' and '.join(texts)}")
    return ", ".join(differing) or None


def count_jobs_at_once(records: Sequence[Mapping[str, Any]]) -> int:
    """Return how many processes have written records of which one began before another one's last record; else 0.

    Restarts of one job follow each other, so these are several jobs with one folder.
    """
    last: dict[str, str] = {}  # by the time at which a process began; both times are of one format, and sort as text
    for record in records:
        if started := record.get("started"):
            last[str(started)] = max(last.get(str(started), ""), str(record["time"]))
    at_once, until, before = set[str](), "", ""
    for started in sorted(last):
        if started < until:
            at_once |= {before, started}
        if last[started] > until:
            until, before = last[started], started
    return len(at_once)


def _record_in(line: str) -> dict[str, Any] | None:
    """Return the record in a line; ``None`` if there is none, or it does not hold what is read of it."""
    try:
        record: dict[str, Any] = json.loads(line, parse_float=_finite, parse_constant=_finite)
        convert(record, _Record)
    except (ValueError, ValidationError, RecursionError):  # of msgspec 0.18 it is no ValueError
        return None
    return record if record["schema"] == SCHEMA else None


def _finite(text: str) -> float:
    """Return a number; raise ValueError if it is none, or infinite, which no JSON for other programs may hold."""
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number
