"""Makes the tables of collectives: a row for each, or sums by step, bucket or group."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict
from heapq import nlargest

from ddp_prof.analyze.collectives.alignment import Alignment
from ddp_prof.analyze.collectives.collective import Collective
from ddp_prof.analyze.collectives.results import RunCollectives
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.columns import Row, by_number, count_noun, document_of, milliseconds, table_columns, table_row
from ddp_prof.present.cause_headlines import exposed_words
from ddp_prof.present.columns import values_of
from ddp_prof.present.headlines import Headline, outliers_text
from ddp_prof.present.table import MOST_ROWS, Digest, Document, RowsOnDemand, TableView, run_document
from ddp_prof.present.text import collective_name, join_lines, source_name

COLLECTIVES_SCHEMA = 2
"""Version of the document. Version 2 has ``exposed_by`` (when and why) in place of ``causes``."""
SUMMED = [one for one in table_columns(Collective) if one.adds_up]
"""Columns that are summed if a row stands for several collectives.

Some of them are known only for matched collectives: a warning says how many have no match.
"""
ON_PAGE = [one for one in table_columns(Collective) if one.on_page]
"""Columns of the table on a page about a step."""
DIGEST = Digest("exposed_ms", ("collectives", *(one.table_key for one in SUMMED)))
"""How the table is shortened for a terminal."""
MOST_READ = 1000
"""Most rows that a terminal shows in full, of a run with few ranks; a longer table is shortened."""
WORST_ROWS = 10
"""Number of collectives that a table shows by default if there are no buckets."""


def collectives_view(
    run: RunAnalysis, result: RunCollectives, headline: Headline, by: str | None = "collective"
) -> TableView:
    """Return the table of collectives under a headline.

    Args:
        run: The run.
        result: Its collectives.
        headline: The main cause of exposed time.
        by: What a row stands for: ``collective``, ``step``, ``bucket`` or ``group``. If it is ``None``, rows for
            programs are collectives; rows for people are buckets, or the worst collectives if there are no buckets.
    """
    count = len(result.collectives)
    source = f"{source_name(run.trace, run.files)} · device: {run.device}"
    counted = count_noun(count, "collective")
    if any(rank.unknown_work for rank in run.ranks):
        counted = f"{counted} {by_number(count, 'is', 'are')} known" if count else "no collective is known"
    title = join_lines([f"{source} · {counted}", headline.text])
    outliers = [outliers_text(result.outliers)] if result.outliers else []
    notes = [*outliers, *result.warnings]
    if count and len(run.ranks) > 1:
        notes.insert(0, alignment_note(result.alignment))
    of_all = [*notes]
    rows: Sequence[Row]
    shown: Sequence[Row] = ()
    is_summed = False
    # One row per collective; for people perhaps fewer rows instead.
    if by in {None, "collective"}:

        def rows_of(collectives: Sequence[Collective]) -> list[Row]:
            origins = _origins(result.collectives)
            found = ((_collective_row(one, origins[one.step_identity]), one.name) for one in collectives)
            return _named(run, (result.only_known(row, name) for row, name in found))

        rows = RowsOnDemand(count, lambda: rows_of(result.collectives))
        if by is None and count > MOST_ROWS:
            is_summed = all(one.bucket is not None for one in result.collectives)
            if is_summed:
                shown, note = _named(run, _summed_rows(result, "bucket")), "one row per bucket"
            else:
                worst, note = _worst(result)
                shown = rows_of(worst)
            notes.append(f"{note}; all {count_noun(count, 'collective')}: --by collective")
        if count and not is_summed:
            whole = "step" if run.has_steps else "capture"
            notes.append(f"ready, launch, start, end: time since the first of these in the {whole}")
            of_all.append(notes[-1])
    else:
        rows = _named(run, _summed_rows(result, by or ""))
        is_summed = by != "step"
    if (is_summed or by == "step") and any(_runs_at_once(row) for row in shown or rows):
        notes.append(
            "durations are summed over collectives that may run at once, so they may exceed the time that passed"
        )
    steps = len(run.step_names)
    if is_summed and rows and steps > 1:
        notes.insert(0, f"times are totals over {steps} steps; for each step: --by step")
    # A person can read hundreds of collectives of a few ranks one by one, but not those of hundreds of ranks.
    digest = DIGEST if len(run.ranks) > MOST_ROWS or len(rows) > MOST_READ else None
    of_shown = [note for note in notes if note not in of_all] if shown else []
    return TableView(
        title, rows, notes, lambda: _document(run, result, headline), shown, digest=digest, notes_of_shown=of_shown
    )


def _named(run: RunAnalysis, rows: Iterable[Row]) -> list[Row]:
    """Return the rows with the label of the run as first column."""
    return [{"run": run.label, **row} for row in rows]


def _document(run: RunAnalysis, result: RunCollectives, headline: Headline) -> Document:
    """Return the document for JSON, with every collective."""
    document = run_document(
        run,
        collectives=[result.only_known(document_of(one), one.name) for one in result.collectives],
        alignment=alignment_document(result.alignment),
        matched=result.matched,
        unmatched=result.unmatched,
        headline=headline.text,
        outliers=asdict(result.outliers) if result.outliers else None,
        warnings=list(result.warnings),
    )
    document["schema"] = COLLECTIVES_SCHEMA
    return document


def _worst(result: RunCollectives) -> tuple[list[Collective], str]:
    """Return the collectives with most blocking time (exposed time if none blocks), and a text that says so."""
    cost = "blocking" if any(collective.blocking_ns for collective in result.collectives) else "exposed"

    def known_ns(one: Collective) -> int:
        return result.only_known({f"{cost}_ns": getattr(one, f"{cost}_ns")}, one.name)[f"{cost}_ns"] or 0

    return nlargest(WORST_ROWS, result.collectives, key=known_ns), f"the {WORST_ROWS} with most {cost} time"


def alignment_document(alignment: Alignment) -> Document:
    """Return for JSON how the clocks of the ranks were aligned."""
    clocks = [{**asdict(clock), "clock": str(clock.clock)} for clock in alignment.clocks]
    return {**asdict(alignment), "clocks": clocks}


def alignment_note(alignment: Alignment) -> str:
    """Say how the clocks of the ranks were aligned, and how large the remaining differences are."""
    if alignment.residual_p95_ns is None:
        return f"clocks of the ranks: {alignment.method}; how well they agree is not known"
    if not alignment.residual_p95_ns:
        return f"clocks of the ranks: {alignment.method}"
    p50, p95 = milliseconds(alignment.residual_p50_ns or 0), milliseconds(alignment.residual_p95_ns)
    return (
        f"clocks of the ranks: {alignment.method}; residual p50 {p50}, p95 {p95}; smaller differences are not reported"
    )


def _origins(collectives: Sequence[Collective]) -> dict[Hashable, int]:
    """Return for each step the earliest ready, launch or start time of its collectives: time 0 of its rows."""
    origins: dict[Hashable, int] = {}
    for collective in collectives:
        times = (collective.ready_ns, collective.launch_ns, origins.get(collective.step_identity))
        origins[collective.step_identity] = min([collective.start_ns, *(time for time in times if time is not None)])
    return origins


def _collective_row(collective: Collective, origin_ns: int) -> Row:
    return {"rank": _rank(collective), **table_row(collective, origin_ns=origin_ns)}


def rows_of_step(result: RunCollectives, collectives: Sequence[Collective]) -> list[Row]:
    """Return the rows of some collectives for a page, with the cause of their exposed time in words.

    Values that are not known for a rank are ``None``.
    """
    rows: Iterable[Row] = (
        {
            "collective": collective_name(collective.index, collective.bucket),
            "rank": _rank(collective),
            **{one.table_key: one.table_value(one.of(collective)) for one in ON_PAGE},
            "cause": exposed_words(collective),
        }
        for collective in collectives
    )
    return [result.only_known(row, one.name) for row, one in zip(rows, collectives, strict=True)]


def _summed_rows(result: RunCollectives, by: str) -> Iterable[Row]:
    """Yield a row for each step, bucket or group (``by``), with sums over its collectives."""
    groups: dict[Hashable, list[Collective]] = {}
    for collective in result.collectives:  # by key: two steps with the same number have a row each
        step = collective.step_key if by == "step" else None
        groups.setdefault((*_key(collective, by).values(), step), []).append(collective)
    for members in groups.values():
        sums: Row = {
            one.table_key: one.table_value(one.add_up([one.of(member) for member in members])) for one in SUMMED
        }
        row = {**_key(members[0], by), "collectives": len(members), **sums}
        yield result.only_known(row, members[0].name)


def _runs_at_once(row: Row) -> bool:
    """Whether collectives of a row ran at the same time: durations sum to more than the overlapped and exposed time."""
    parts = [row["duration_ms"], row["overlapped_ms"], row["exposed_ms"]]
    whole, *known = (part for part in parts if isinstance(part, (int, float)))
    return len(known) == len(parts) - 1 and whole > sum(known) + 1e-6  # 1e-6 ms is a nanosecond


def _key(collective: Collective, by: str) -> Row:
    """Return the columns that identify a row: what its collectives have in common.

    Args:
        collective: One of them.
        by: ``step``, ``group`` or ``bucket``. A collective without a bucket is identified by its position in the step.
    """
    if by == "step":
        return {"rank": _rank(collective), "step": collective.step}
    if by == "group":
        return {"rank": _rank(collective), **values_of(collective, "group", "op", "phase")}
    bucket = {"bucket": collective.bucket, "index": collective.index if collective.bucket is None else None}
    return {"rank": _rank(collective), **bucket, **values_of(collective, "op", "bytes")}


def _rank(collective: Collective) -> str | int:
    """Return the number of the rank; its name if the number is not known, or if its process uses several devices."""
    return collective.name if collective.rank is None or collective.of_several else collective.rank
