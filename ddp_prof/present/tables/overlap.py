"""Makes the table of how much communication hides behind compute, by rank or step."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from ddp_prof.analyze.overlap import RankOverlap, TraceOverlap
from ddp_prof.analyze.step_columns import StepOverlap
from ddp_prof.analyze.step_cost import PARTS, StepCost
from ddp_prof.analyze.why_unknown import LOST, NO_COMMUNICATION, NOTHING
from ddp_prof.columns import Row, count_noun, document_of, milliseconds, percent, table_columns, table_rows
from ddp_prof.errors import shown_path
from ddp_prof.present.columns import values_of
from ddp_prof.present.recorders import profiler_name
from ddp_prof.present.run_notes import overlap_notes, reason_of
from ddp_prof.present.table import SCHEMA, Digest, Document, TableView
from ddp_prof.present.text import join_lines, source_name
from ddp_prof.trace import UNKNOWN

if TYPE_CHECKING:
    from ddp_prof.analyze.cost import RankCost, RunCost

MOST_STEPS = 200
"""Most rows of the table of steps on a page."""
DIGEST = Digest(
    "exposed_ms",
    tuple({one.table_key for kind in (RankOverlap, StepOverlap) for one in table_columns(kind) if one.adds_up}),
)
"""How the table is shortened for a terminal."""


def overlap_view(
    result: TraceOverlap,
    headline: str = "",
    cost: RunCost | None = None,
    *,
    by_step: bool,
    told: str | None = None,
) -> TableView:
    """Return the table of overlap, with a row for each rank, or for each step of each rank.

    Args:
        result: The overlap of the run.
        headline: The main finding; part of the title.
        cost: What communication costs, for the document; ``None`` if not measured.
        by_step: Whether rows are steps.
        told: The reason that the headline gives, if it gives one; no note repeats it.
    """
    notes = overlap_notes(result, told)
    if by_step:
        notes += _window_notes(result)
    if not by_step and any(len(rank.steps) > 1 for rank in result.ranks):
        notes.append("times of a rank are totals over its steps and what lies outside of them; for each step: --steps")
    if by_step and (twice_ns := sum(rank.overlapping_windows_ns for rank in result.ranks)):
        notes.append(
            f"windows of steps overlap: sums of them, and of their parts, count {milliseconds(twice_ns)} more than once"
        )
    title = join_lines(filter(None, (headline, _title(result))))
    rows = _rows(result, by_step=by_step)
    return TableView(title, rows, notes, lambda: _document(result, headline, cost), digest=DIGEST)


def _document(result: TraceOverlap, headline: str, cost: RunCost | None) -> Document:
    """Return the document for JSON, with every step; the arguments are those of :func:`overlap_view`."""
    return {
        "schema": SCHEMA,
        "trace": shown_path(result.trace),
        **values_of(result, "label", "source", "producer", "device"),
        "recorder": result.recorder,
        "attribution": values_of(result.attribution, "activities", "device_time", "method"),
        "ranks": [
            _rank_document(result, rank, cost.ranks[at] if cost else None) for at, rank in enumerate(result.ranks)
        ],
        "cost": asdict(cost.cost) if cost else None,
        "bounds": asdict(cost.bounds) if cost else None,
        "outliers": asdict(result.outliers) if result.outliers else None,
        "warnings": list(result.warnings),
        "headline": headline,
        "missing": result.missing and result.missing.text,
    }


def steps_view(result: TraceOverlap) -> TableView:
    """Return the table of the first ``MOST_STEPS`` rows by step, for a page."""
    left_out = sum(len(rank.steps) for rank in result.ranks) - MOST_STEPS
    more = [f"{count_noun(left_out, 'more row')}; all of them: ddp-prof overlap --steps"] if left_out > 0 else []
    return TableView("the steps", _rows(result, by_step=True, most=MOST_STEPS), [*_window_notes(result), *more], {})


def _rows(result: TraceOverlap, *, by_step: bool, most: int | None = None) -> list[Row]:
    """Return a row for each rank, or with ``by_step`` for each step of each rank; of many rows the first ``most``."""
    rows: list[Row] = []
    has_nodes = len({rank.node for rank in result.ranks}) > 1
    # The figures of all rows are made at once, since a column may be left out for all of them.
    shown = [(rank, of) for rank in result.ranks for of in (rank.steps if by_step else [rank])]
    for (rank, of), figures in zip(shown[:most], table_rows([of for _, of in shown], most), strict=True):
        identity: Row = {
            "run": f"{result.label} ({rank.qualifier})" if rank.qualifier else result.label,
            **({"node": rank.node} if has_nodes else {}),
            "rank": rank.rank,
            "process": rank.process,
            "device": "cpu" if _is_of_cpu(rank, result) else _number_of_device(rank),
        }
        of_step: Row = {"step": of.step} if isinstance(of, StepOverlap) else {}
        rows.append({**identity, **of_step, **figures, **_communication_not_recorded(rank, of)})
    return rows


def _is_of_cpu(rank: RankOverlap, result: TraceOverlap) -> bool:
    """Return whether a CPU computed; no if what a device did was lost, or, of a job on devices, not recorded."""
    return rank.device is None and rank.reason != LOST and (rank.reason != NOTHING or result.device == "cpu")


def _number_of_device(rank: RankOverlap) -> int | None:
    return None if rank.device == UNKNOWN else rank.device


def _window_notes(result: TraceOverlap) -> list[str]:
    """Return a note on the columns of windows, unless the window of each step is the step itself."""
    if all(step.window_ns == step.length.ns for rank in result.ranks for step in rank.marked_steps):
        return []
    note = (
        "window: from a step's first device work to its last; the times after it, up to idle, are its parts; "
        "step: how long the step took"
    )
    return [note]


def _rank_document(result: TraceOverlap, rank: RankOverlap, cost: RankCost | None) -> Document:
    """Return a rank with its steps for JSON; costs are ``None`` if not measured."""
    of_steps = cost.steps if cost else (None,) * len(rank.steps)
    steps = [
        {**document_of(step), "cost": of_step and _step_cost_document(of_step)}
        for step, of_step in zip(rank.steps, of_steps, strict=True)
    ]
    return {
        **document_of(rank, steps=steps),
        "device": _number_of_device(rank),
        "reason": reason_of(result, rank),
        "cost": asdict(cost.cost) if cost else None,
        "bounds": asdict(cost.bounds) if cost else None,
    }


def _step_cost_document(cost: StepCost) -> Document:
    """Return the parts of a step for JSON.

    ``limits_ns`` has the lower and upper limit of each part that is estimated, or not known exactly.
    """
    limits: dict[str, tuple[int | None, int | None]] = {
        part: (getattr(cost, f"{part}_low_ns"), getattr(cost, f"{part}_high_ns")) for part in PARTS
    }
    return {
        **values_of(cost, *(f"{part}_ns" for part in PARTS), "standstill_by_ns"),
        "limits_ns": {part: ends for part, ends in limits.items() if None not in ends and ends[0] != ends[1]},
        "reasons": cost.reasons,
    }


def _title(result: TraceOverlap) -> str:
    """Return the title: files, profiler, device, and how much of the work could be assigned to a step."""
    parts = [source_name(result.trace, result.files), profiler_name(result), f"device: {result.device}"]
    attribution = result.attribution
    if attribution.device_time:
        kind = "device time" if result.device != "cpu" else "time"
        time, events = percent(attribution.device_time), percent(attribution.activities)
        parts.append(f"assigned to a step: {time} of {kind}, {events} of events")
    return " · ".join(parts)


def _communication_not_recorded(rank: RankOverlap, of: RankOverlap | StepOverlap) -> Row:
    """Return the times of communication as unknown, if what communicated was not recorded; else an empty row.

    Without this, the table would show zeros.
    """
    if rank.reason not in (None, NO_COMMUNICATION) and not of.comm_ns:
        return {"comm_ms": None, "overlapped_ms": None, "exposed_ms": None}
    return {}
