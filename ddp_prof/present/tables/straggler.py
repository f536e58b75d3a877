"""The skew of a run as rows, as a JSON document and in words."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ddp_prof.present.charts.theme import milliseconds
from ddp_prof.present.tables.collectives import alignment_document, alignment_note
from ddp_prof.present.tables.rows import SCHEMA, Row, TableView

if TYPE_CHECKING:
    from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
    from ddp_prof.analyze.collectives.straggler import RankSkew, RunSkew


def skew_view(run: RunAnalysis, skew: RunSkew) -> TableView:
    """A row a rank."""
    title = f"{run.trace} · device: {run.device} · {len(skew.steps)} steps\n{skew_headline(skew)}"
    rows = [{"run": run.label, **_row(rank, len(skew.steps))} for rank in skew.ranks]
    notes = [
        "lag: how much later than the other ranks' median it arrives, at most in a step; its median over the steps",
        "exposed wait and what it costs others: mean of a step",
        alignment_note(skew.alignment),
        *skew.warnings,
    ]
    return TableView(title, rows, notes, _document(run, skew))


def skew_headline(skew: RunSkew) -> str:
    """Who arrives last, how often, by how much, and what that costs."""
    if skew.reason:
        return f"Nothing can be said about skew: {skew.reason}."
    steps = len(skew.steps)
    if skew.straggler is None:
        most = max(skew.ranks, key=lambda rank: rank.last_steps)
        if not most.last_steps:
            return "No rank is late by more than the clocks' residual."
        return (
            f"No rank is last more often than chance would have it; {rank_name(most)} is most often, "
            f"in {most.last_steps} of {steps} steps."
        )
    late = skew.ranks[skew.straggler]
    return (
        f"{_capital(rank_name(late))} arrives last in {late.last_steps} of {steps} steps, "
        f"by {milliseconds(late.lag_ns or 0)} (median); others wait for it without anything to compute for "
        f"{milliseconds(round(late.cost_ns / late.last_steps))} of such a step."
    )


def rank_name(rank: RankSkew) -> str:
    """What a person calls it."""
    return f"process {rank.process}" if rank.rank is None else f"rank {rank.rank}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _row(rank: RankSkew, steps: int) -> Row:
    per_step = 1e6 * max(1, steps)
    return {
        "rank": rank_name(rank).removeprefix("rank "),
        "collectives": rank.collectives,
        "last_collectives": rank.last_collectives,
        "last_steps": rank.last_steps,
        "last_%": 100 * rank.last_steps / steps if steps else None,
        "lag_ms": None if rank.lag_ns is None else rank.lag_ns / 1e6,
        "worst_lag_ms": None if rank.worst_lag_ns is None else rank.worst_lag_ns / 1e6,
        "exposed_wait_ms": None if rank.exposed_wait_ns is None else rank.exposed_wait_ns / per_step,
        "costs_others_ms": rank.cost_ns / per_step,
    }


def _document(run: RunAnalysis, skew: RunSkew) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "trace": str(run.trace),
        "label": run.label,
        "device": run.device,
        "ranks": [asdict(rank) for rank in skew.ranks],
        "steps": [asdict(step) for step in skew.steps],
        "straggler": skew.straggler,
        "alignment": alignment_document(skew.alignment),
        "headline": skew_headline(skew),
        "warnings": list(skew.warnings),
    }
