"""Which rank arrives last, how often, and what that costs."""

from __future__ import annotations

from dataclasses import asdict

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.straggler import RankSkew, RunSkew
from ddp_prof.columns import Row
from ddp_prof.present.columns import times_of, values_of
from ddp_prof.present.headlines import skew_headline
from ddp_prof.present.table import Digest, TableView, run_document
from ddp_prof.present.tables.collectives import alignment_document, alignment_note
from ddp_prof.present.text import count_noun, join_lines, source_name

SKEW_SCHEMA = 2
"""2: ``collectives`` means what it does in ``overlap``; what it meant before is called ``matched``."""
SKEW_DIGEST = Digest(
    "costs_others_ms", ("collectives", "matched", "last_collectives", "last_steps", "last_%", "costs_others_ms")
)


def skew_view(run: RunAnalysis, skew: RunSkew) -> TableView:
    headline = skew_headline(skew).text
    document = run_document(
        run,
        schema=SKEW_SCHEMA,
        ranks=[asdict(rank) for rank in skew.ranks],
        steps=[asdict(step) for step in skew.steps],
        straggler=skew.straggler,
        alignment=alignment_document(skew.alignment),
        headline=headline,
        warnings=list(skew.warnings),
    )
    title = f"{source_name(run.trace, run.files)} · device: {run.device}"
    if skew.reason:  # the rows would hold only zeros
        return TableView(join_lines([title, headline]), [], skew.warnings, document)
    rows: list[Row] = [{"run": run.label, **_skew_row(rank, skew)} for rank in skew.ranks]
    notes = [*(_OF_STEPS if skew.steps else _OF_THE_CAPTURE), alignment_note(skew.alignment), *skew.warnings]
    steps = f" · {count_noun(len(skew.steps), 'step')}" if skew.has_steps else ""
    return TableView(join_lines([title + steps, headline]), rows, notes, document, digest=SKEW_DIGEST)


_OF_STEPS = (
    "lag: per step, the rank's largest delay behind the others' median; shown is the median over the steps",
    "exposed wait and what it costs others: mean per step",
)
_OF_THE_CAPTURE = (
    "lag: the rank's delay behind the others' median; shown is the median over the collectives",
    "exposed wait and what it costs others: of the whole capture",
)


def _skew_row(rank: RankSkew, skew: RunSkew) -> Row:
    steps = len(skew.steps)
    per_step = 1e6 * max(1, steps)
    return {
        "rank": rank.name.removeprefix("rank "),
        **values_of(rank, "collectives", "matched", "last_collectives"),
        "last_steps": rank.last_steps if steps else None,
        "last_%": 100 * rank.last_steps / steps if steps else None,
        **times_of(rank, "lag", "worst_lag"),
        "exposed_wait_ms": None if rank.exposed_wait_ns is None else rank.exposed_wait_ns / per_step,
        "costs_others_ms": None if rank.cost_ns is None else rank.cost_ns / per_step,
    }
