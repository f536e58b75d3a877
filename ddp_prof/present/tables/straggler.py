"""The skew of a run, a row a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_prof.present.columns import Row, ms
from ddp_prof.present.headlines import skew_headline
from ddp_prof.present.json_documents import skew_document
from ddp_prof.present.table_view import Digest, TableView
from ddp_prof.present.tables.collectives import alignment_note

if TYPE_CHECKING:
    from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
    from ddp_prof.analyze.collectives.straggler import RankSkew, RunSkew


DIGEST = Digest("costs_others_ms", ("collectives", "last_collectives", "last_steps", "last_%", "costs_others_ms"))


def skew_view(run: RunAnalysis, skew: RunSkew) -> TableView:
    """A row a rank."""
    headline = skew_headline(skew).text
    steps = len(skew.steps) if skew.has_steps else 0
    title = f"{run.trace} · device: {run.device} · {steps} steps\n{headline}"
    if skew.reason:  # a table would be of zeros
        return TableView(title, [], skew.warnings, skew_document(run, skew, headline))
    rows: list[Row] = [{"run": run.label, **_row(rank, len(skew.steps))} for rank in skew.ranks]
    notes = [
        "lag: how much later than the other ranks' median it arrives, at most in a step; its median over the steps",
        "exposed wait and what it costs others: mean of a step",
        alignment_note(skew.alignment),
        *skew.warnings,
    ]
    return TableView(title, rows, notes, skew_document(run, skew, headline), digest=DIGEST)


def _row(rank: RankSkew, steps: int) -> Row:
    per_step = 1e6 * max(1, steps)
    return {
        "rank": rank.name.removeprefix("rank "),
        "collectives": rank.collectives,
        "last_collectives": rank.last_collectives,
        "last_steps": rank.last_steps,
        "last_%": 100 * rank.last_steps / steps if steps else None,
        "lag_ms": ms(rank.lag_ns),
        "worst_lag_ms": ms(rank.worst_lag_ns),
        "exposed_wait_ms": None if rank.exposed_wait_ns is None else rank.exposed_wait_ns / per_step,
        "costs_others_ms": rank.cost_ns / per_step,
    }
