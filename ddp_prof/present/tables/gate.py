"""The results of ``ddp-prof check``: a row per requirement, and a Markdown summary for a pull request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_prof.analyze.overlap import TraceOverlap
from ddp_prof.analyze.variants.regression_gate import GateReport, GateResult
from ddp_prof.present.columns import Row
from ddp_prof.present.json_documents import gate_document
from ddp_prof.present.table import TableView, markdown, markdown_text
from ddp_prof.present.tables.overlap import notes_of_runs
from ddp_prof.present.text import source_name

HOW_TO_READ = (
    "the worst rank decides; its overlap is that of all its communication; its times are medians over its steps, "
    "unless the requirement names a percentile"
)
HOW_TO_READ_BASELINE = (
    "against the baseline: medians over the steps of all ranks; a run fails if it is beyond the limit, and further "
    "from the baseline than the spread of both runs (95 %, by bootstrap over steps)"
)

UNITS = {"ratio": (100, "%"), "ns": (1e-6, "ms"), "ranks": (1, "ranks")}
"""Display scale and label per unit."""


def check_view(checks: Sequence[GateReport], baseline: TraceOverlap | None, causes: Sequence[str] = ()) -> TableView:
    """One row per run and requirement; the causes of failures lead the notes."""
    compared = baseline is not None
    rows = [_row(check, verdict, compared=compared) for check in checks for verdict in check.verdicts]
    notes = [*causes, *_notes(checks, baseline)]
    return TableView(verdict_line(checks), rows, notes, gate_document(checks, baseline, notes))


def check_summary(view: TableView) -> str:
    """The view as Markdown that can stand alone: what came out, the table, the notes."""
    notes = "".join(f"- {markdown_text(note)}\n" for note in view.notes)
    return f"### ddp-prof check: {markdown_text(view.title)}\n\n{markdown(view.rows)}\n{notes}"


def verdict_line(checks: Sequence[GateReport]) -> str:
    statuses = [verdict.status for check in checks for verdict in check.verdicts]
    failed, unknown = statuses.count("failed"), statuses.count("unknown")
    of_all = f"of {len(statuses)} requirements"
    if failed:
        rest = f", {unknown} cannot be judged" if unknown else ""
        return f"failed, {failed} {of_all} not met{rest}"
    return f"unknown, {unknown} {of_all} cannot be judged" if unknown else f"passed, {len(statuses)} {of_all} met"


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
        "decided_by": verdict.rank.name if verdict.rank else "all ranks",
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
    return [
        HOW_TO_READ,
        *partial,
        f"baseline: {source_name(baseline.trace, baseline.files)}",
        HOW_TO_READ_BASELINE,
        *notes_of_runs(runs),
    ]
