"""Check each measurement of a monitor's log against limits, and compare logs: ``ddp-prof check`` and ``compare``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_prof.analyze.statistics import StepFigure, half_width_of_change, median_of_steps
from ddp_prof.columns import Row, milliseconds
from ddp_prof.monitor.log import MonitorLog, find_other_job
from ddp_prof.present.columns import ms
from ddp_prof.present.table import SCHEMA, TableView
from ddp_prof.present.tables.check import summarize_verdicts

_LIMITS = {
    "min_overlap": ("min overlap", "overlap_ratio", "%", 100.0),
    "max_exposed_ns": ("max exposed", "exposed_ns", "ms", 1e-6),
    "max_tail_ns": ("max tail", "tail_ns", "ms", 1e-6),
    "max_blocking_ns": ("max blocking", "blocking_ns", "ms", 1e-6),
}
"""For each limit: its name in a table, the figure of a rank that it limits, the unit shown, and the factor to it."""
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
    rows = [_judge(record, name, limit) for record in log.records for name, limit in limits.items()]
    verdicts = [str(row["verdict"]) for row in rows]
    passed = bool(rows) and all(verdict == "passed" for verdict in verdicts)
    title = summarize_verdicts(verdicts, len(log.records), "measurement")
    bad = [row for row in rows if row["verdict"] != "passed"]
    document = {"schema": SCHEMA, "passed": passed, "log": str(log.file), "verdicts": rows, "warnings": [*log.notes]}
    return TableView(title, bad or rows[-len(limits) :], list(log.notes), document), passed


def _judge(record: Mapping[str, Any], name: str, limit: float) -> Row:
    """Return the verdict on one limit in one measurement; it is unknown if the limit is met but not all is known."""
    shown, figure, unit, scale = _LIMITS[name]
    known = [(rank[figure], rank["rank"]) for rank in record["by_rank"] if rank[figure] is not None]
    row: Row = {"time": record["time"], "step": record["step"], "requirement": shown}
    if not known:
        why = "not known of any rank"
        return {**row, "measured": None, "limit": limit * scale, "unit": unit, "verdict": "unknown", "why": why}
    is_least = name.startswith("min")
    value, rank = min(known, key=_first) if is_least else max(known, key=_first)
    is_met = value >= limit if is_least else value <= limit
    # A rank without a result is in ``missing_ranks`` only.
    missing = ", ".join(map(str, record.get("missing_ranks") or ()))
    knows_all = len(known) == len(record["by_rank"]) and not missing
    verdict = "passed" if is_met and knows_all else "failed" if not is_met else "unknown"
    of_whom = f"not known of rank {missing}, which has no result" if missing else "not known of every rank"
    why = "" if verdict != "unknown" else f"the known ranks meet the limit; {of_whom}"
    return {
        **row,
        "measured": value * scale,
        "limit": limit * scale,
        "unit": unit,
        "verdict": verdict,
        "decided_by": f"rank {rank}",
        "why": why,
    }


def _first(pair: tuple[float, Any]) -> float:
    return pair[0]


def compare_logs(logs: Sequence[MonitorLog]) -> TableView:
    """Return a table with a row per log: medians over its measurements; and whether its step differs from the first's.

    The interval of a median is that of the bootstrap over measurements (:mod:`ddp_prof.analyze.statistics`).
    """
    rows, medians = list[Row](), list[StepFigure | None]()
    for log in logs:
        medians.append(median_of_steps([_known(log, "step_ns")]))
        row: Row = {"run": str(log.file), "measurements": len(log.records)}
        for figure in _COMPARED:
            found = median_of_steps([_known(log, figure)])
            row[figure.replace("_ns", "_ms")] = ms(found.value if found else None)
            if figure == "step_ns":
                row["step_±_ms"] = ms(found.half_width if found else None)
        rows.append(row)
    said = [_difference(logs[0], medians[0], log, found) for log, found in zip(logs[1:], medians[1:], strict=True)]
    notes = [
        *[note for log in logs for note in log.notes],
        "medians over measurements; jobs that ran at different times differ by the machine, too",
    ]
    document = {"schema": SCHEMA, "logs": rows, "differences": said, "warnings": notes}
    return TableView("\n".join(said), rows, notes, document)


def _known(log: MonitorLog, figure: str) -> list[int]:
    return [record[figure] for record in log.records if record.get(figure) is not None]


def _difference(first: MonitorLog, before: StepFigure | None, log: MonitorLog, after: StepFigure | None) -> str:
    """Return a sentence on how the median step of ``log`` (``after``) differs from that of ``first`` (``before``)."""
    names = f"{log.file} against {first.file}"
    if differs := find_other_job(log.records, first.records):
        return f"{names}: not compared: these are other jobs, {differs}"
    if before is None or after is None or before.half_width is None or after.half_width is None:
        return f"{names}: cannot be told: too few measurements"
    change = after.value - before.value
    half_width = half_width_of_change(before.half_width, after.half_width)
    interval = f"{milliseconds(round(abs(change)))} ± {milliseconds(round(half_width))}"
    if abs(change) <= half_width:
        return f"{names}: cannot be told: the steps differ by {interval}"
    return f"{names}: steps are {'longer' if change > 0 else 'shorter'} by {interval}"
