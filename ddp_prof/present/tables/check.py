"""Makes the table of verdicts: whether runs meet requirements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_prof.analyze.overlap import TraceOverlap
from ddp_prof.analyze.variants.regression_gate import GateReport, GateResult
from ddp_prof.columns import Row, count_noun
from ddp_prof.errors import shown_path
from ddp_prof.present.columns import fields_of, values_of
from ddp_prof.present.recorders import find_profilers, how_recorded
from ddp_prof.present.run_notes import OVER_ALL_RANKS, notes_of_runs
from ddp_prof.present.table import SCHEMA, Document, TableView, markdown, markdown_text
from ddp_prof.present.text import source_name

HOW_TO_READ_CHECK = (
    "the worst rank decides; its overlap is that of all its communication; its times are medians over its steps, "
    "unless the requirement names a percentile"
)
HOW_TO_READ_BASELINE = (
    "against the baseline: medians over the steps of all ranks; a run fails if its median, or else its mean, is beyond "
    "the limit, and further from the baseline's than the spread of both runs (95 %, by bootstrap over steps)"
)

UNITS = {"ratio": (100, "%"), "ns": (1e-6, "ms"), "ranks": (1, "ranks")}
"""For each unit of a verdict: the factor and the unit with which a table shows its figures."""


def check_view(checks: Sequence[GateReport], baseline: TraceOverlap | None, causes: Sequence[str] = ()) -> TableView:
    """Return the table of verdicts, a row per requirement and run.

    Args:
        checks: The verdicts of each run.
        baseline: The run that they were compared with; ``None`` for none.
        causes: Notes on what caused differences from the baseline.
    """
    compared = baseline is not None
    rows = [_verdict_row(check, verdict, compared=compared) for check in checks for verdict in check.verdicts]
    notes = [*causes, *_check_notes(checks, baseline)]
    document = {
        "schema": SCHEMA,
        "passed": all(check.passed for check in checks),
        "baseline": None if baseline is None else shown_path(baseline.trace),
        "runs": [_gate_document(check) for check in checks],
        "warnings": notes,
    }
    return TableView(verdict_line(checks), rows, notes, document)


def _gate_document(check: GateReport) -> Document:
    """Return the verdicts of a run for JSON."""
    verdicts = [
        {
            **fields_of(verdict),
            "reason": verdict.reason or None,
            "rank": verdict.rank and verdict.rank.rank,
            "process": verdict.rank and verdict.rank.process,
            "rank_device": verdict.rank and verdict.rank.device,
        }
        for verdict in check.verdicts
    ]
    run = check.run
    named = {"trace": shown_path(run.trace), "label": run.label, "device": run.device}
    return {**named, "passed": check.passed, "verdicts": verdicts}


def check_summary(view: TableView) -> str:
    """Return the table of verdicts with a heading and notes, in Markdown, as for a pull request."""
    notes = "".join(f"- {markdown_text(note)}\n" for note in view.notes)
    return f"### ddp-prof check: {markdown_text(view.title)}\n\n{markdown(view.rows)}\n{notes}"


def verdict_line(checks: Sequence[GateReport]) -> str:
    """Return the verdict over all runs and requirements, and how many of these are not met or cannot be judged."""
    statuses = [verdict.status for check in checks for verdict in check.verdicts]
    return summarize_verdicts(statuses, len(checks), "run")


def summarize_verdicts(statuses: Sequence[str], judged: int, noun: str) -> str:
    """Return the verdict over all requirements, and how many of these are not met or cannot be judged.

    If several runs or measurements are judged by each requirement, these are counted as cases: one requirement is not
    three because it was judged three times.

    Args:
        statuses: ``passed``, ``failed`` or ``unknown``, of each requirement for each of what is judged.
        judged: How many runs or measurements are judged.
        noun: ``run`` or ``measurement``.
    """
    failed, unknown = statuses.count("failed"), statuses.count("unknown")
    of_all, by_what = f"of {count_noun(len(statuses), 'requirement')}", ""
    if judged > 1:
        requirements = count_noun(len(statuses) // judged, "requirement")
        of_all, by_what = f"of {len(statuses)} cases", f" ({requirements}, {count_noun(judged, noun)})"
    if failed:
        rest = f", {unknown} cannot be judged" if unknown else ""
        return f"failed, {failed} {of_all} not met{rest}{by_what}"
    if unknown or not statuses:
        return f"unknown, {unknown} {of_all} cannot be judged{by_what}"
    return f"passed, {len(statuses)} {of_all} met{by_what}"


def _verdict_row(check: GateReport, verdict: GateResult, *, compared: bool) -> Row:
    """Return the row of one requirement; ``compared``: whether there is a baseline, which has further columns."""
    scale, unit = UNITS[verdict.unit]
    figures = ("measured", "limit", "baseline", "spread") if compared else ("measured", "limit")
    values = {name: None if value is None else value * scale for name, value in values_of(verdict, *figures).items()}
    why = verdict.reason
    if verdict.status == "failed" and not why:
        why = why_alike(values["measured"], values["limit"])
    return {
        "run": check.run.label,
        "device": check.run.device,
        "requirement": verdict.requirement,
        **values,
        "unit": unit,
        "verdict": verdict.status,
        "decided_by": verdict.rank.name if verdict.rank else _given_ranks(check.run),
        "why": why,
    }


_EVERY_RANK = "all ranks"
_BY_ALL = "against baseline"
"""End of the names of requirements that medians over all ranks decide, not the worst rank."""


def _given_ranks(run: TraceOverlap) -> str:
    """Name the ranks whose traces are given: all, or how many of how many."""
    count = len(run.ranks if run.rank_numbers is None else run.rank_numbers)
    return f"{count} of {run.world_size} ranks" if count < (run.world_size or 0) else _EVERY_RANK


def why_alike(measured: float | None, limit: float | None) -> str:
    """Say why a requirement is not met although a table shows the same number as measured and limit; or empty."""
    is_same = measured is not None and limit is not None and f"{measured:.2f}" == f"{limit:.2f}"
    return "beyond the limit by less than the table shows" if is_same else ""


def _check_notes(checks: Sequence[GateReport], baseline: TraceOverlap | None) -> list[str]:
    """Return how to read the table, which ranks decided, and what is not known of the runs and the baseline."""
    runs = [check.run for check in checks]
    asked = {verdict.requirement for check in checks for verdict in check.verdicts}
    advice = "" if _EVERY_RANK in asked else "; to require them all: --all-ranks"
    given = {run.label: _given_ranks(run) for run in runs}
    partial = [f"{label}: judged by {ranks}{advice}" for label, ranks in given.items() if ranks != _EVERY_RANK]
    by_rank = any(not name.endswith((_BY_ALL, _EVERY_RANK)) for name in asked)
    notes = [*([HOW_TO_READ_CHECK] if by_rank else []), *partial]
    if baseline is None:
        return [*notes, *(note.removesuffix(f"; {OVER_ALL_RANKS}") for note in notes_of_runs(runs))]
    runs.append(replace(baseline, label=f"baseline {baseline.label}"))
    notes += [f"baseline: {source_name(baseline.trace, baseline.files)}", HOW_TO_READ_BASELINE]
    notes += [how_recorded(runs)] if len(find_profilers(runs)) > 1 else []
    return [*notes, *notes_of_runs(runs)]
