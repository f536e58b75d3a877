"""What the doctor says of a run, one row per finding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_prof.present.columns import Row, ms
from ddp_prof.present.json_documents import doctor_document
from ddp_prof.present.table import TableView
from ddp_prof.present.text import count_noun, milliseconds, source_name

if TYPE_CHECKING:
    from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
    from ddp_prof.analyze.doctor import Diagnosis


def doctor_view(run: RunAnalysis, diagnosis: Diagnosis) -> TableView:
    """The findings in words, and a row each for programs."""
    lines = [f"{source_name(run.trace, run.files)} · device: {run.device}"]
    of = "per step" if run.has_steps else "in all"
    for number, finding in enumerate(diagnosis.findings, 1):
        cost = "" if finding.cost_ns is None else f" (at most {milliseconds(finding.cost_ns)} {of})"
        lines.append(f"{number}. {finding.rule}{cost}: {finding.evidence} {finding.advice}")
    if not diagnosis.findings:
        undecided = len(diagnosis.abstained)
        lines.append("none found" + (f"; {count_noun(undecided, 'rule')} could not decide" if undecided else ""))
    by_reason: dict[str, list[str]] = {}
    for one in diagnosis.abstained:
        by_reason.setdefault(one.reason, []).append(one.rule)
    notes = [f"not decided: {', '.join(rules)}: {reason}" for reason, rules in by_reason.items()]
    rows: list[Row] = [
        {
            "run": run.label,
            "finding": one.rule,
            "costs_ms": ms(one.cost_ns),
            "of_ranks": ", ".join(one.ranks),
            "evidence": one.evidence,
            "advice": one.advice,
        }
        for one in diagnosis.findings
    ]
    return TableView("\n".join(lines), rows, notes, doctor_document(run, diagnosis), is_text=True)
