"""Check each measurement of a monitor's log against limits, and compare logs: ``ddp-prof check`` and ``compare``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_prof.analyze.statistics import StepFigure, half_width_of_change, median_of_steps
from ddp_prof.columns import Row, milliseconds
from ddp_prof.errors import printable
from ddp_prof.monitor.course import find_changes
from ddp_prof.monitor.log import MonitorLog, count_jobs_at_once, find_other_job
from ddp_prof.monitor.record import reason_without
from ddp_prof.present.columns import ms
from ddp_prof.present.table import SCHEMA, Document, TableView
from ddp_prof.present.tables.check import UNITS, summarize_verdicts, why_alike
from ddp_prof.present.text import readable_times

_LIMITS = {
    "min_overlap": ("min overlap", "overlap_ratio", "ratio"),
    "max_exposed_ns": ("max exposed", "exposed_ns", "ns"),
    "max_tail_ns": ("max tail", "tail_ns", "ns"),
    "max_blocking_ns": ("max blocking", "blocking_ns", "ns"),
}
"""For each limit: its name in a table, the figure of a rank that it limits, and the unit of both."""
_COMPARED = ("step_ns", "comm_ns", "exposed_ns", "blocking_ns")


def check_log(log: MonitorLog, limits: Mapping[str, float]) -> tuple[TableView, bool]:
    """Judge each measurement by its worst rank.

    Args:
        log: The log.
        limits: By the names of the attributes of :class:`.Requirements`: a ratio (0 to 1), or nanoseconds of the median
            step of a rank.

    Returns:
        The verdicts as a table (the bad ones or, if there are none, those of the last measurement), and whether all
        limits are met in all measurements.
    """
    verdicts = [_judge(record, name, limit) for record in log.records for name, limit in limits.items()]
    statuses = [str(one["status"]) for one in verdicts]
    passed = bool(verdicts) and all(status == "passed" for status in statuses)
    title = summarize_verdicts(statuses, len(log.records), "measurement")
    bad = [one for one in verdicts if one["status"] != "passed"]
    document = {
        "schema": SCHEMA,
        "passed": passed,
        "log": str(log.file),
        "verdicts": verdicts,
        "warnings": [*log.notes],
    }
    rows = [_row(log, one) for one in bad or verdicts[-len(limits) :]]
    return TableView(title, rows, list(log.notes), document, readable_times(rows)), passed


def _judge(record: Mapping[str, Any], name: str, limit: float) -> Document:
    """Return the verdict on one limit in one measurement; it is unknown if the limit is met but not all is known."""
    shown, figure, unit = _LIMITS[name]
    known = [(rank[figure], rank["rank"]) for rank in record["by_rank"] if rank[figure] is not None]
    measured: float | None = None
    decides, status, reason = None, "unknown", "not known of any rank"
    if known:
        is_least = name.startswith("min")
        measured, decides = min(known, key=_first) if is_least else max(known, key=_first)
        is_met = measured >= limit if is_least else measured <= limit
        # A rank without a result is in ``missing_ranks`` only.
        missing = record.get("missing_ranks") or ()
        knows_all = len(known) == len(record["by_rank"]) and not missing
        status = "passed" if is_met and knows_all else "failed" if not is_met else "unknown"
        of_whom = "the known ranks meet the limit; not known of every rank"
        reason = "" if status != "unknown" else reason_without(missing) if missing else of_whom
    return {
        "time": record["time"],
        "step": record["step"],
        "requirement": shown,
        "unit": unit,
        "measured": measured,
        "limit": limit,
        "status": status,
        "reason": reason or None,
        "rank": decides,
        # The same under the names that they had first.
        "verdict": status,
        "decided_by": None if decides is None else f"rank {decides}",
        "why": reason,
    }


def _row(log: MonitorLog, verdict: Document) -> Row:
    """Return the row of a verdict in the table."""
    scale, unit = UNITS[verdict["unit"]]
    measured = None if verdict["measured"] is None else verdict["measured"] * scale
    limit = verdict["limit"] * scale
    why = verdict["reason"] or (why_alike(measured, limit) if verdict["status"] == "failed" else "")
    return {
        "run": str(log.file),
        **{name: verdict[name] for name in ("time", "step", "requirement")},
        "measured": measured,
        "limit": limit,
        "unit": unit,
        "verdict": verdict["status"],
        "decided_by": verdict["decided_by"],
        "why": why,
    }


def _first(pair: tuple[float, Any]) -> float:
    return pair[0]


@dataclass(frozen=True)
class _Level:
    """What of a log is compared.

    Attributes:
        log: The log with these measurements alone: those since its step last changed, all if it did not, and none where
            several jobs wrote it at once. A median over measurements of two levels would stand for neither.
        why: Why it has not all measurements; empty if it has.
        step: The median step.
    """

    log: MonitorLog
    why: str
    step: StepFigure | None

    @property
    def name(self) -> str:
        """The file and, if earlier measurements are left out, the first step that is not."""
        since = f" from step {self.log.records[0]['step']} on" if self.why and self.log.records else ""
        return f"{self.log.file}{since}"


def compare_logs(logs: Sequence[MonitorLog]) -> TableView:
    """Return a table with a row per log: medians over its measurements; and whether its step differs from the first's.

    Of a log whose step changed, the measurements since the last change count. The interval of a median is that of the
    bootstrap over measurements (:mod:`ddp_prof.analyze.statistics`).
    """
    levels = [_last_level(log) for log in logs]
    rows, figures = list[Row](), list[Document]()
    for level in levels:
        row: Row = {"run": str(level.log.file), "measurements": len(level.log.records)}
        of_log: Document = {}
        for figure in _COMPARED:
            found = level.step if figure == "step_ns" else median_of_steps([_known(level.log, figure)])
            of_log[figure] = round(found.value) if found else None
            row[figure.replace("_ns", "_ms")] = ms(of_log[figure])
            if figure == "step_ns":
                half = found.half_width if found else None
                of_log["step_half_width_ns"] = None if half is None else round(half)
                row["step_±_ms"] = ms(of_log["step_half_width_ns"])
        rows.append(row)
        since = level.log.records[0]["step"] if level.why and level.log.records else None
        figures.append({**row, **of_log, "since_step": since})
    said = [printable(_difference(levels[0], level)) for level in levels[1:]]
    notes = [
        *[note for log in logs for note in log.notes],
        *[printable(f"{level.log.file}: {level.why}") for level in levels if level.why],
        "medians over measurements; jobs that ran at different times differ by the machine, too",
    ]
    document = {"schema": SCHEMA, "logs": figures, "differences": said, "warnings": notes}
    return TableView("\n".join(said), rows, notes, document)


def _last_level(log: MonitorLog) -> _Level:
    """Return the measurements of a log that are compared."""
    records, why = log.records, ""
    changes = [change for change in find_changes(records) if change.figure == "step_ns"]
    if jobs := count_jobs_at_once(records):
        records, why = (), f"{jobs} jobs wrote it at the same time: no figure is that of one job"
    elif changes:
        *_, last = changes
        records = records[last.position :]
        change = f"{milliseconds(last.before_ns)} -> {milliseconds(last.after_ns)}"
        why = (
            f"its step changed, last from step {records[0]['step']} on ({change}): its figures are those from there on"
        )
    level = MonitorLog(log.file, records, log.notes)
    return _Level(level, why, median_of_steps([_known(level, "step_ns")]))


def _known(log: MonitorLog, figure: str) -> list[int]:
    return [record[figure] for record in log.records if record.get(figure) is not None]


def _difference(first: _Level, other: _Level) -> str:
    """Return a sentence on how the median step of a log differs from that of the first one."""
    names, before, after = f"{other.name} against {first.name}", first.step, other.step
    if differs := find_other_job(other.log.records, first.log.records):
        return f"{names}: not compared: these are other jobs, {differs}"
    if mixed := next((level for level in (first, other) if not level.log.records), None):
        return f"{names}: not compared: several jobs wrote {mixed.log.file} at the same time"
    if before is None or after is None or before.half_width is None or after.half_width is None:
        return f"{names}: cannot be told: too few measurements"
    change = after.value - before.value
    half_width = half_width_of_change(before.half_width, after.half_width)
    interval = f"{milliseconds(round(abs(change)))} ± {milliseconds(round(half_width))}"
    if abs(change) <= half_width:
        return f"{names}: cannot be told: the steps differ by {interval}"
    return f"{names}: steps are {'longer' if change > 0 else 'shorter'} by {interval}"
