"""Tables of collectives (one row each, or summed), of the skew of ranks, and of the critical paths of steps."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict

from ddp_prof.analyze.collectives.collective import Collective
from ddp_prof.analyze.collectives.results import RunCollectives
from ddp_prof.analyze.collectives.run_analysis import Alignment, RunAnalysis
from ddp_prof.analyze.collectives.straggler import RankSkew, RunSkew
from ddp_prof.analyze.critical.critical_path import PARTS, RunCritical
from ddp_prof.columns import Row, document_of, table_columns, table_row
from ddp_prof.present.columns import ms, times_of, values_of
from ddp_prof.present.headlines import Headline, exposed_words, outliers_text, skew_headline
from ddp_prof.present.table import MOST_ROWS, Digest, Document, TableView, run_document
from ddp_prof.present.text import collective_name, count_noun, join_lines, milliseconds, percent, source_name

COLLECTIVES_SCHEMA = 2
"""2: ``exposed_by`` (when and why) in place of ``causes``."""
CRITICAL_SCHEMA = SKEW_SCHEMA = 2
"""2: ``window_ns``, ``host_ns`` and ``collectives`` mean what they do in ``overlap``; what they meant before is called
``path_ns``, ``host_delay_ns`` and ``matched``."""
SUMMED = [one for one in table_columns(Collective) if one.adds_up]
"""Times that are summed if a row stands for several collectives. Only matched collectives have some of them: a warning
says how many have no match."""
DIGEST = Digest("exposed_ms", ("collectives", *(one.table_key for one in SUMMED)))
MOST_READ = 1000
"""A terminal shows at most so many rows of a few ranks; longer tables are shortened."""
WORST_ROWS = 10
"""Number of collectives that a table shows by default if there are no buckets."""


def collectives_view(
    run: RunAnalysis, result: RunCollectives, headline: Headline, by: str | None = "collective"
) -> TableView:
    """Return a row per ``collective``, ``step``, ``bucket`` or ``group`` (the values of ``by``) under a headline.

    If ``by`` is ``None``, the rows for programs are collectives; the rows for people are buckets, or the worst
    collectives if there are no buckets.
    """
    count = len(result.collectives)
    source = f"{source_name(run.trace, run.files)} · device: {run.device}"
    title = join_lines([f"{source} · {count_noun(count, 'collective')}", headline.text])
    outliers = [outliers_text(result.outliers)] if result.outliers else []
    notes = [*outliers, *result.warnings]
    if count and len(run.ranks) > 1:
        notes.insert(0, alignment_note(result.alignment))
    shown: Sequence[Row] = ()
    is_summed = False
    if by in {None, "collective"}:
        origins = _origins(result.collectives)
        rows = [
            result.only_known(_collective_row(one, origins[one.step_identity]), one.name) for one in result.collectives
        ]
        if by is None and len(rows) > MOST_ROWS:
            shown, note = _digest_rows(result, rows)
            is_summed = "ready_ms" not in shown[0]
            notes.append(f"{note}; all {count_noun(count, 'collective')}: --by collective")
        if any("ready_ms" in row for row in shown or rows):
            whole = "step" if run.has_steps else "capture"
            notes.append(f"ready, launch, start, end: time since the first of these in the {whole}")
    else:
        rows = list(_summed_rows(result, by or ""))
        is_summed = by != "step"
    if any(_runs_at_once(row) for row in shown or rows) and (is_summed or by == "step"):
        notes.append(
            "durations are summed over collectives that may run at once, so they may exceed the time that passed"
        )
    steps = len(run.step_names)
    if is_summed and rows and steps > 1:
        notes.insert(0, f"times are in all, summed over {steps} steps; of each step: --by step")
    document = run_document(
        run,
        collectives=[result.only_known(document_of(one), one.name) for one in result.collectives],
        alignment=_alignment_document(result.alignment),
        matched=result.matched,
        unmatched=result.unmatched,
        headline=headline.text,
        outliers=asdict(result.outliers) if result.outliers else None,
        warnings=list(result.warnings),
    )
    document["schema"] = COLLECTIVES_SCHEMA
    # A person can read hundreds of collectives of a few ranks one by one, but not those of hundreds of ranks.
    digest = DIGEST if len(run.ranks) > MOST_ROWS or len(rows) > MOST_READ else None
    named, shown = ([{"run": run.label, **row} for row in some] for some in (rows, shown))
    return TableView(title, named, notes, document, shown, digest=digest)


def _digest_rows(result: RunCollectives, rows: Sequence[Row]) -> tuple[list[Row], str]:
    if all(collective.bucket is not None for collective in result.collectives):
        return list(_summed_rows(result, "bucket")), "one row per bucket"
    cost = "blocking" if any(collective.blocking_ns for collective in result.collectives) else "exposed"
    worst = sorted(rows, key=lambda row: float(row[f"{cost}_ms"] or 0), reverse=True)[:WORST_ROWS]
    return worst, f"the {WORST_ROWS} with most {cost} time"


def _alignment_document(alignment: Alignment) -> Document:
    clocks = [{**asdict(clock), "clock": str(clock.clock)} for clock in alignment.clocks]
    return {**asdict(alignment), "clocks": clocks}


def alignment_note(alignment: Alignment) -> str:
    if alignment.residual_p95_ns is None:
        return f"clocks of the ranks: {alignment.method}; how well they agree is not known"
    if not alignment.residual_p95_ns:
        return f"clocks of the ranks: {alignment.method}"
    p50, p95 = milliseconds(alignment.residual_p50_ns or 0), milliseconds(alignment.residual_p95_ns)
    return (
        f"clocks of the ranks: {alignment.method}; residual p50 {p50}, p95 {p95}; smaller differences are not reported"
    )


def _origins(collectives: Sequence[Collective]) -> dict[Hashable, int]:
    origins: dict[Hashable, int] = {}
    for collective in collectives:
        times = (collective.ready_ns, collective.launch_ns, origins.get(collective.step_identity))
        origins[collective.step_identity] = min([collective.start_ns, *(time for time in times if time is not None)])
    return origins


def _collective_row(collective: Collective, origin_ns: int) -> Row:
    return {"rank": _rank(collective), **table_row(collective, origin_ns=origin_ns)}


def rows_of_step(result: RunCollectives, collectives: Sequence[Collective]) -> list[Row]:
    rows: Iterable[Row] = (
        {
            "collective": collective_name(collective.index, collective.bucket),
            "rank": _rank(collective),
            **values_of(collective, "op", "bytes"),
            **times_of(collective, "duration", "exposed", "blocking"),
            "cause": exposed_words(collective),
        }
        for collective in collectives
    )
    return [result.only_known(row, one.name) for row, one in zip(rows, collectives, strict=True)]


def _summed_rows(result: RunCollectives, by: str) -> Iterable[Row]:
    groups: dict[Hashable, list[Collective]] = {}
    for collective in result.collectives:  # two steps with the same number have a row each
        step = collective.step_key if by == "step" else None
        groups.setdefault((*_key(collective, by).values(), step), []).append(collective)
    for members in groups.values():
        sums: Row = {
            one.table_key: one.table_value(one.add_up([one.of(member) for member in members])) for one in SUMMED
        }
        row = {**_key(members[0], by), "collectives": len(members), **sums}
        yield result.only_known(row, members[0].name)


def _runs_at_once(row: Row) -> bool:
    parts = [row["duration_ms"], row["overlapped_ms"], row["exposed_ms"]]
    whole, *known = (part for part in parts if isinstance(part, (int, float)))
    return len(known) == len(parts) - 1 and whole > sum(known) + 1e-6  # a nanosecond


def _key(collective: Collective, by: str) -> Row:
    """Return what the collectives of a row share; without buckets that is the position in the step."""
    if by == "step":
        return {"rank": _rank(collective), "step": collective.step}
    if by == "group":
        return {"rank": _rank(collective), **values_of(collective, "group", "op", "phase")}
    bucket = {"bucket": collective.bucket, "index": collective.index if collective.bucket is None else None}
    return {"rank": _rank(collective), **bucket, **values_of(collective, "op", "bytes")}


def _rank(collective: Collective) -> str | int:
    return collective.name if collective.rank is None or collective.of_several else collective.rank


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
        alignment=_alignment_document(skew.alignment),
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


PART_NAMES = {
    "compute": "compute",
    "transfer": "collectives",
    "peer_wait": "waiting for peers",
    "queue": "gaps between operations",
    "launch": "launches",
    "host": "the host",
    "copies": "copies",
}
"""The parts of a critical path, as words of a sentence."""


_HOW_TO_READ_PATHS = (
    "the parts of a path sum to its length: from the first work on the device to the last or, where the host runs "
    "ahead, to the next step's first; transfer includes waiting for peers whose traces are missing"
)


def critical_view(run: RunAnalysis, critical: RunCritical) -> TableView:
    headline = critical_headline(critical)
    title = f"{source_name(run.trace, run.files)} · device: {run.device}"
    if run.has_steps and critical.steps:
        found, whole = len(critical.steps), len(run.step_names)
        steps = f"{found} of {count_noun(whole, 'step')} with work" if found < whole else count_noun(found, "step")
        title += f" · {steps}"
    rows: list[Row] = [
        {
            "run": run.label,
            "step": path.step,
            "ends_on": path.rank.removeprefix("rank "),
            "path_ms": ms(path.path_ns),
            **{f"path_{part}_ms": ms(path.parts_ns[part]) for part in PARTS},
            "on_path": len(path.collectives),
            "rank_changes": path.changes,
        }
        for path in critical.steps
    ]
    notes = [
        _HOW_TO_READ_PATHS,
        *([f"what collectives would gain is not known: {critical.gain_reason}"] if critical.gain_reason else []),
        *run.warnings,
    ]
    document = run_document(
        run,
        schema=CRITICAL_SCHEMA,
        steps=[asdict(path) for path in critical.steps],
        reason=critical.reason,
        gain_reason=critical.gain_reason,
        headline=headline,
        warnings=list(run.warnings),
    )
    digest = Digest("path_ms", ("path_ms", *(f"path_{part}_ms" for part in PARTS)), "ends_on")
    return TableView(join_lines([title, headline]), rows, notes if rows else run.warnings, document, digest=digest)


def critical_headline(critical: RunCritical) -> str:
    path = critical.median
    if path is None:
        return f"The critical path is not known: {critical.reason}."
    parts = sorted(path.parts_ns.items(), key=lambda part: -part[1])
    words = [f"{percent(ns / path.path_ns)} {PART_NAMES[part]}" for part, ns in parts if ns / path.path_ns >= 0.005]
    whole = "the capture" if path.step_key is None else "median length"
    where = "" if path.step is None else f" in step {path.step}, counted from its first device work to its end"
    text = f"The critical path of {whole}, {milliseconds(path.path_ns)}{where}, is {', '.join(words)}"
    if not path.collectives:
        return f"{text}: no collective is on it."
    best = max(path.collectives, key=lambda one: (one.gain_ns or 0, one.index))
    if not best.gain_ns:
        return f"{text}."
    waited = "" if best.is_matched else " and waited for no peer"
    earlier = f"{milliseconds(best.gain_ns)} earlier"
    return f"{text}. If its collective {best.index} took no time{waited}, it would end {earlier}."
