"""The critical paths of a run, one row per step."""

from __future__ import annotations

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.critical.critical_path import PARTS, RunCritical, StepPath
from ddp_prof.present.columns import Row, ms
from ddp_prof.present.json_documents import critical_document
from ddp_prof.present.table import TableView
from ddp_prof.present.text import milliseconds, percent, source_name

NAMES = {
    "compute": "compute",
    "transfer": "collectives",
    "peer_wait": "waiting for peers",
    "queue": "gaps between operations",
    "launch": "launches",
    "host": "the host",
    "copies": "copies",
}
"""Names of the parts in a sentence."""


def critical_view(run: RunAnalysis, critical: RunCritical) -> TableView:
    """A row per step, under what the typical step's path consists of."""
    headline = critical_headline(critical)
    steps = [f"{len(critical.steps)} steps"] if run.has_steps and critical.steps else []
    title = "\n".join((" · ".join((source_name(run.trace, run.files), f"device: {run.device}", *steps)), headline))
    rows: list[Row] = [{"run": run.label, **_row(path)} for path in critical.steps]
    notes = [
        "the parts of a path sum to its length; transfer holds waiting for peers where their traces are not given",
        *([f"what collectives would gain is not known: {critical.gain_reason}"] if critical.gain_reason else []),
        *run.warnings,
    ]
    return TableView(title, rows, notes if rows else run.warnings, critical_document(run, critical, headline))


def critical_headline(critical: RunCritical) -> str:
    """What the path of the typical step consists of, largest parts first."""
    path = critical.typical
    if path is None:
        return f"The critical path is not known: {critical.reason or 'no step has any work'}."
    parts = sorted(path.parts_ns.items(), key=lambda part: -part[1])
    words = [f"{percent(ns / path.window_ns)} {NAMES[part]}" for part, ns in parts if ns / path.window_ns >= 0.005]
    whole = "the capture" if path.step_key is None else "a typical step"
    text = f"The critical path of {whole}, {milliseconds(path.window_ns)}, is {', '.join(words)}"
    if not path.collectives:
        return f"{text}: no collective is on it."
    gain_ns, index = max((one.gain_ns or 0, one.index) for one in path.collectives)
    if not gain_ns:
        return f"{text}."
    return f"{text}. If its collective {index} took no time, it would end {milliseconds(gain_ns)} earlier."


def _row(path: StepPath) -> Row:
    return {
        "step": path.step,
        "ends_on": path.rank.removeprefix("rank "),
        "path_ms": ms(path.window_ns),
        **{f"path_{part}_ms": ms(path.parts_ns[part]) for part in PARTS},
        "on_path": len(path.collectives),
        "rank_changes": path.changes,
    }
