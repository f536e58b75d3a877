"""The verdicts of ``ddp-prof check``: a table, a JSON document, a Markdown summary for a pull request."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddp_prof.present.tables.render import markdown
from ddp_prof.present.tables.rows import SCHEMA, Row, TableView, notes_of_runs, rank_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.analyze.overlap.overlap import TraceOverlap
    from ddp_prof.analyze.overlap.regression_gate import GateReport, GateResult

HOW_TO_READ = "the worst rank decides: overlap is of all its communication, times are medians over its steps"
HOW_TO_READ_BASELINE = (
    "against the baseline: a step's medians over all ranks; failed is what is beyond the limit and further from the "
    "baseline than both runs' spread (1.57 IQR / sqrt(steps) of each, McGill, Tukey and Larsen 1978)"
)

UNITS = {"ratio": (100, "%"), "ns": (1e-6, "ms"), "ranks": (1, "ranks")}
"""Of each unit of a verdict what it is multiplied by to be shown, and its name then."""


def check_view(checks: Sequence[GateReport], baseline: TraceOverlap | None) -> TableView:
    """A row a requirement of each run."""
    verdicts = [(check, verdict) for check in checks for verdict in check.verdicts]
    return TableView(
        verdict_line(checks),
        [_row(check, verdict, compared=baseline is not None) for check, verdict in verdicts],
        _notes(checks, baseline),
        _document(checks, baseline),
    )


def check_summary(view: TableView) -> str:
    """The view as Markdown that can stand alone: what came out, the table, the notes."""
    notes = "".join(f"- {_escaped(note)}\n" for note in view.notes)
    return f"### ddp-prof check: {view.title}\n\n{markdown(view.rows)}\n{notes}"


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*\[\]<>])", r"\\\1", text)


def verdict_line(checks: Sequence[GateReport]) -> str:
    """What came out, in a line."""
    statuses = [verdict.status for check in checks for verdict in check.verdicts]
    missed = len(statuses) - statuses.count("passed")
    if missed:
        return f"failed, {missed} of {len(statuses)} requirements not met"
    return f"passed, {len(statuses)} of {len(statuses)} requirements met"


def _row(check: GateReport, verdict: GateResult, *, compared: bool) -> Row:
    scale, unit = UNITS[verdict.unit]

    def scaled(value: float | None) -> float | None:
        return None if value is None else value * scale

    return {
        "run": check.run.label,
        "device": check.run.device,
        "requirement": verdict.requirement,
        "measured": scaled(verdict.measured),
        "limit": scaled(verdict.limit),
        **({"baseline": scaled(verdict.baseline), "spread": scaled(verdict.spread)} if compared else {}),
        "unit": unit,
        "verdict": verdict.status,
        "decided_by": rank_name(verdict.rank) if verdict.rank else "all ranks",
        "why": verdict.reason,
    }


def _notes(checks: Sequence[GateReport], baseline: TraceOverlap | None) -> list[str]:
    runs = [check.run for check in checks]
    partial = [
        f"{run.label}: judged by {len(run.ranks)} of {run.world_size} ranks; to require them all: --all-ranks"
        for run in runs
        if len(run.ranks) < (run.world_size or 0)
    ]
    if baseline is None:
        return [HOW_TO_READ, *partial, *notes_of_runs(runs)]
    runs.append(replace(baseline, label=f"baseline {baseline.label}"))
    return [HOW_TO_READ, *partial, f"baseline: {baseline.trace}", HOW_TO_READ_BASELINE, *notes_of_runs(runs)]


def _document(checks: Sequence[GateReport], baseline: TraceOverlap | None) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "passed": all(check.passed for check in checks),
        "baseline": None if baseline is None else str(baseline.trace),
        "runs": [
            {
                "trace": str(check.run.trace),
                "label": check.run.label,
                "device": check.run.device,
                "passed": check.passed,
                "verdicts": [_verdict_document(verdict) for verdict in check.verdicts],
            }
            for check in checks
        ],
        "warnings": _notes(checks, baseline),
    }


def _verdict_document(verdict: GateResult) -> dict[str, Any]:
    rank = verdict.rank
    return {
        "requirement": verdict.requirement,
        "unit": verdict.unit,
        "measured": verdict.measured,
        "limit": verdict.limit,
        "baseline": verdict.baseline,
        "spread": verdict.spread,
        "status": verdict.status,
        "reason": verdict.reason or None,
        "rank": rank and rank.rank,
        "process": rank and rank.process,
        "rank_device": rank and rank.device,
    }
