"""Makes the text and the rows of the doctor's findings: what keeps communication from hiding, and what to change."""

from __future__ import annotations

from dataclasses import asdict

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.doctor import UNDECIDED_TOGETHER, Diagnosis
from ddp_prof.analyze.doctor.evidence import Finding
from ddp_prof.columns import Row, count_noun, milliseconds
from ddp_prof.present.columns import ms
from ddp_prof.present.table import TableView, run_document
from ddp_prof.present.text import join_lines, source_name

_SHOWN_RANKS = 3
"""Most ranks that a text names; more are only counted."""


def undecided_text(diagnosis: Diagnosis) -> str:
    """Return how many rules could not be decided, after ``; ``; empty if all could."""
    which = [one.rule for one in diagnosis.abstained if one.rule in UNDECIDED_TOGETHER]
    rules = [one.rule for one in diagnosis.abstained if one.rule not in UNDECIDED_TOGETHER]
    which += [f"{len(rules)} more" if which else count_noun(len(rules), "rule")] if rules else []
    return f"; {' and '.join(which)} could not be decided" if which else ""


def rule_and_cost(finding: Finding, ranks: int, *, has_steps: bool) -> str:
    """Return the name of a finding, the ranks that it concerns if not all, its expected gain, and its cost at most.

    Args:
        finding: The finding.
        ranks: Number of ranks of the run.
        has_steps: Whether times are per step, not of the whole capture.
    """
    found = len(finding.ranks)
    names = ", ".join(finding.ranks) if found <= _SHOWN_RANKS else f"{found} of {ranks} ranks"
    where = f" on {names}" if 0 < found < ranks else ""
    of = "per step" if has_steps else "in all"
    expected, low, high = finding.expected_gain_ns, finding.gain_low_ns, finding.gain_high_ns
    parts = [] if expected is None else [f"expected gain {milliseconds(expected)}"]
    if expected is not None and low is not None and high is not None and low < high:
        parts[0] += f", {milliseconds(low)} to {milliseconds(high)}"
    parts += [] if finding.cost_ns is None else [f"at most {milliseconds(finding.cost_ns)}"]
    return f"{finding.rule}{where} ({'; '.join(parts)} {of})" if parts else f"{finding.rule}{where}"


def doctor_view(run: RunAnalysis, diagnosis: Diagnosis) -> TableView:
    """Return the findings as lines of text, and as rows for programs."""
    lines = [f"{source_name(run.trace, run.files)} · device: {run.device}"]
    for number, finding in enumerate(diagnosis.findings, 1):
        found = rule_and_cost(finding, len(run.ranks), has_steps=run.has_steps)
        lines.append(f"{number}. {found}: {finding.evidence} {finding.advice}")
    if not diagnosis.findings:
        lines.append(f"No finding{undecided_text(diagnosis)}")
    by_reason: dict[str, list[str]] = {}
    for one in diagnosis.abstained:
        by_reason.setdefault(one.reason, []).append(one.rule)
    notes = [f"not decided: {', '.join(rules)}: {reason}" for reason, rules in by_reason.items()]
    notes += run.doubts
    rows = [_row(run.label, one) for one in diagnosis.findings]
    document = run_document(
        run,
        findings=[asdict(one) for one in diagnosis.findings],
        abstained=[asdict(one) for one in diagnosis.abstained],
        warnings=list(run.warnings),
    )
    return TableView(join_lines(lines), rows, notes, document, is_text=True, keys=_KEYS)


_KEYS = ("run", "finding", "gain_ms", "costs_ms", "of_ranks", "evidence", "advice")


def _row(label: str, one: Finding) -> Row:
    """Return the row of a finding of the run with this label."""
    cells = (ms(one.expected_gain_ns), ms(one.cost_ns), ", ".join(one.ranks), one.evidence, one.advice)
    return dict(zip(_KEYS, (label, one.rule, *cells), strict=True))
