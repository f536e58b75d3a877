"""Makes the table of critical paths: how the length of each step's path divides."""

from __future__ import annotations

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.critical.critical_path import RunCritical, StepPath
from ddp_prof.columns import Row, by_number, count_noun, document_of, milliseconds, percent, table_columns, table_row
from ddp_prof.present.table import Digest, Document, TableView, run_document
from ddp_prof.present.text import join_lines, source_name

CRITICAL_SCHEMA = 2
"""Version of the document.

In version 2, ``window_ns`` and ``host_ns`` mean what they do in ``overlap``; what they meant in version 1 is called
``path_ns`` and ``host_delay_ns``.
"""
PART_NAMES = {
    "compute": "compute",
    "transfer": "collectives",
    "peer_wait": "waiting for peers",
    "queue": "gaps between operations",
    "launch": "launches",
    "host": "the host",
    "copies": "copies",
}
"""The parts of a critical path, in the words of a sentence."""


_HOW_TO_READ_PATHS = (
    "the parts of a path sum to its length: from the first work on the device to the last or, where the host runs "
    "ahead, to the next step's first; transfer includes waiting for peers whose traces are missing"
)


def critical_view(run: RunAnalysis, critical: RunCritical) -> TableView:
    """Return the table of critical paths, a row per step."""
    headline = critical_headline(critical)
    title = f"{source_name(run.trace, run.files)} · device: {run.device}"
    if run.has_steps and critical.steps:
        found, whole = len(critical.steps), len(run.step_names)
        steps = f"{found} of {count_noun(whole, 'step')} with work" if found < whole else count_noun(found, "step")
        title += f" · {steps}"
    rows: list[Row] = [
        {"run": run.label, **table_row(path), "ends_on": path.rank.removeprefix("rank ")} for path in critical.steps
    ]
    notes = [
        _HOW_TO_READ_PATHS,
        *([f"what collectives would gain is not known: {reason}"] if (reason := _why_gains_unknown(critical)) else []),
        *run.warnings,
    ]

    def document() -> Document:
        return run_document(
            run,
            schema=CRITICAL_SCHEMA,
            steps=[document_of(path) for path in critical.steps],
            reason=critical.reason,
            gain_reason=critical.gain_reason,
            headline=headline,
            warnings=list(run.warnings),
        )

    columns = table_columns(StepPath)
    digest = Digest("path_ms", tuple(one.table_key for one in columns if one.adds_up), "ends_on")
    keys = ("run", *(one.table_key for one in columns))
    notes = notes if rows else list(run.warnings)
    return TableView(join_lines([title, headline]), rows, notes, document, digest=digest, keys=keys)


def _why_gains_unknown(critical: RunCritical) -> str | None:
    """Return why the gain of all or some collectives is not known; ``None`` if it is known of all."""
    on_paths = [one for path in critical.steps for one in path.collectives]
    unknown = sum(one.gain_ns is None for one in on_paths)
    if critical.gain_reason or not unknown:
        return critical.gain_reason
    return (
        f"{unknown:,} of {len(on_paths):,} on the paths {by_number(unknown, 'is', 'are')} not found on the other ranks"
    )


def critical_headline(critical: RunCritical) -> str:
    """Return what the critical path of median length consists of, or why it is not known.

    It also names the collective on the path that costs most, and how much earlier the step would end without it.
    """
    path = critical.median
    if path is None:
        return f"The critical path is not known: {critical.reason}."
    parts = sorted(path.parts_ns.items(), key=lambda part: -part[1])
    words = [f"{percent(ns / path.path_ns)} {PART_NAMES[part]}" for part, ns in parts if ns / path.path_ns >= 0.005]
    whole = "the capture" if path.step_key is None else "median length"
    where = "" if path.step is None else f" in step {path.step}, counted from its first device work to its end"
    text = f"The critical path of {whole}, {milliseconds(path.path_ns)}{where}, is {', '.join(words)}"
    if not path.collectives:
        # As where gradients are accumulated over several steps, or where nothing waits in most of them.
        others = sum(bool(one.collectives) for one in critical.steps)
        where = f"; {others} of {len(critical.steps)} paths {by_number(others, 'has', 'have')} one" if others else ""
        return f"{text}: no collective is on it{where}."
    best = max(path.collectives, key=lambda one: (one.gain_ns or 0, one.index))
    if not best.gain_ns:
        return f"{text}."
    waited = "" if best.is_matched else " and waited for no peer"
    earlier = f"{milliseconds(best.gain_ns)} earlier"
    return f"{text}. If its collective {best.index} took no time{waited}, it would end {earlier}."
