"""Makes the table of skew: which rank arrives last, how often, and what that costs."""

from __future__ import annotations

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.skew import LateGroup, RankSkew, RunSkew
from ddp_prof.columns import Row, count_noun, document_of, table_columns, table_row
from ddp_prof.present.columns import values_of
from ddp_prof.present.skew_headlines import skew_headline
from ddp_prof.present.table import Digest, Document, TableView, run_document
from ddp_prof.present.tables.collectives import alignment_document, alignment_note
from ddp_prof.present.text import join_lines, source_name

SKEW_SCHEMA = 2
"""Version of the document.

In version 2, ``collectives`` means what it does in ``overlap``; what it meant in version 1 is called ``matched``.
"""
SKEW_DIGEST = Digest(
    "costs_others_ms", ("collectives", "matched", "last_collectives", "last_steps", "last_%", "costs_others_ms")
)
"""How the table is shortened for a terminal."""


def skew_view(run: RunAnalysis, skew: RunSkew) -> TableView:
    """Return the table of skew, with a row per rank; no rows if lags are not known."""
    headline = skew_headline(skew).text

    def document() -> Document:
        return run_document(
            run,
            schema=SKEW_SCHEMA,
            ranks=[document_of(rank) for rank in skew.ranks],
            steps=[document_of(step) for step in skew.steps],
            straggler=skew.straggler,
            group=_group_document(skew.group) if skew.group else None,
            doubt=skew.doubt,
            alignment=alignment_document(skew.alignment),
            headline=headline,
            warnings=list(skew.warnings),
        )

    title = f"{source_name(run.trace, run.files)} · device: {run.device}"
    if skew.reason:  # the rows would have only zeros
        keys = ("run", "rank", *(one.table_key for one in table_columns(RankSkew)))
        return TableView(join_lines([title, headline]), [], skew.warnings, document, keys=keys)
    rows: list[Row] = [
        {"run": run.label, "rank": rank.name.removeprefix("rank "), **table_row(rank)} for rank in skew.ranks
    ]
    notes = [*(_OF_STEPS if skew.steps else _OF_THE_CAPTURE), alignment_note(skew.alignment), *skew.warnings]
    steps = f" · {count_noun(len(skew.steps), 'step')}" if skew.has_steps else ""
    return TableView(join_lines([title + steps, headline]), rows, notes, document, digest=SKEW_DIGEST)


def _group_document(group: LateGroup) -> Document:
    """Return the figures of ranks that are late together; ``ranks`` are indices, as ``straggler`` is one."""
    return {"ranks": list(group.ranks), **values_of(group, "steps", "lag_ns", "cost_ns")}


_OF_STEPS = (
    "lag: per step, the rank's largest delay behind the others' median; shown is the median over the steps",
    "exposed wait and what it costs others: mean per step",
)
_OF_THE_CAPTURE = (
    "lag: the rank's delay behind the others' median; shown is the median over the collectives",
    "exposed wait and what it costs others: of the whole capture",
)
