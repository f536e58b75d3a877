"""The skew of a run, one row per rank."""

from __future__ import annotations

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.straggler import RankSkew, RunSkew
from ddp_prof.present.columns import Row, ms
from ddp_prof.present.headlines import skew_headline
from ddp_prof.present.json_documents import skew_document
from ddp_prof.present.table import Digest, TableView
from ddp_prof.present.tables.collectives import alignment_note
from ddp_prof.present.text import count_noun, source_name

DIGEST = Digest("costs_others_ms", ("collectives", "last_collectives", "last_steps", "last_%", "costs_others_ms"))


def skew_view(run: RunAnalysis, skew: RunSkew) -> TableView:
    headline = skew_headline(skew).text
    title = f"{source_name(run.trace, run.files)} · device: {run.device}"
    if skew.reason:  # a table would be of zeros
        return TableView(f"{title}\n{headline}", [], skew.warnings, skew_document(run, skew, headline))
    rows: list[Row] = [{"run": run.label, **_row(rank, skew)} for rank in skew.ranks]
    notes = [*(_OF_STEPS if skew.steps else _OF_THE_CAPTURE), alignment_note(skew.alignment), *skew.warnings]
    steps = f" · {count_noun(len(skew.steps), 'step')}" if skew.has_steps else ""
    return TableView(f"{title}{steps}\n{headline}", rows, notes, skew_document(run, skew, headline), digest=DIGEST)


_OF_STEPS = (
    "lag: per step, the rank's largest delay behind the others' median; shown is the median over the steps",
    "exposed wait and what it costs others: mean per step",
)
_OF_THE_CAPTURE = (
    "lag: the rank's delay behind the others' median; shown is the median over the collectives",
    "exposed wait and what it costs others: of the whole capture",
)


def _row(rank: RankSkew, skew: RunSkew) -> Row:
    steps = len(skew.steps)
    per_step = 1e6 * max(1, steps)
    return {
        "rank": rank.name.removeprefix("rank "),
        "collectives": rank.collectives,
        "last_collectives": rank.last_collectives,
        "last_steps": rank.last_steps if steps else None,
        "last_%": 100 * rank.last_steps / steps if steps else None,
        "lag_ms": ms(rank.lag_ns),
        "worst_lag_ms": ms(rank.worst_lag_ns),
        "exposed_wait_ms": None if rank.exposed_wait_ns is None else rank.exposed_wait_ns / per_step,
        "costs_others_ms": rank.cost_ns / per_step,
    }
