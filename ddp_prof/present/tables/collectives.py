"""Collectives as rows: one each, or summed by step or by bucket; their JSON document; the headline in words."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ddp_prof.analyze.collectives.exposure import CAUSES, LAUNCHED_LATE, QUEUED, STARVED, SYNCHRONOUS, TAIL, WAITING
from ddp_prof.analyze.root_cause import find_root_cause
from ddp_prof.present.charts.theme import milliseconds, percent, size
from ddp_prof.present.tables.rows import SCHEMA, Row, TableView

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from ddp_prof.analyze.collectives.clock_alignment import Alignment
    from ddp_prof.analyze.collectives.results import Collective, RunCollectives
    from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
    from ddp_prof.analyze.root_cause import RootCause

BY = ("collective", "step", "bucket")
"""What a row can stand for."""

_SHOWN_PARAMETERS = 2
_WORTH_A_WORD = 0.05


def collectives_view(run: RunAnalysis, result: RunCollectives, by: str = BY[0]) -> TableView:
    """The collectives of a run."""
    headline = root_cause_text(find_root_cause(result.collectives, run.manifest), result.collectives)
    title = f"{run.trace} · device: {run.device} · {len(result.collectives):,} collectives\n{headline}"
    notes = [alignment_note(result.alignment), *result.warnings]
    if by == BY[0]:
        origins = _origins(result.collectives)
        rows = [_collective_row(collective, origins[collective.step_identity]) for collective in result.collectives]
        notes.append("ready, launch, start, end: within the step, from the first of these times")
    else:
        rows = list(_summed_rows(result.collectives, by))
    return TableView(title, [{"run": run.label, **row} for row in rows], notes, _document(run, result, headline))


def alignment_note(alignment: Alignment) -> str:
    """How the clocks of the ranks were brought together, and how well."""
    if alignment.residual_p95_ns is None:
        return f"clocks of the ranks: {alignment.method}; how well they agree is not known"
    if not alignment.residual_p95_ns:
        return f"clocks of the ranks: {alignment.method}"
    p50, p95 = milliseconds(alignment.residual_p50_ns or 0), milliseconds(alignment.residual_p95_ns)
    return f"clocks of the ranks: {alignment.method}; residual p50 {p50}, p95 {p95}: nothing below that is claimed"


def root_cause_text(headline: RootCause | None, collectives: Sequence[Collective]) -> str:
    """The finding as one or two sentences."""
    if headline is None:
        return "Compute hides all communication." if collectives else "No communication was recorded."
    share = percent(headline.cause_ns / headline.exposed_ns)
    which = f"{_which(headline)}{_described(headline)}"
    if headline.cause == TAIL:
        waiting = headline.wait_ns / headline.cause_ns
        meanwhile = f" ({percent(waiting)} of it waiting for a peer)" if waiting >= _WORTH_A_WORD else ""
        advice = _ADVICE[WAITING] if waiting > 1 / 2 else _tail_advice(headline)
        return f"{share} of exposed time is tail{meanwhile}: {which} {_when(headline)}. {advice}"
    if headline.cause == SYNCHRONOUS:
        count = headline.collectives_a_step
        subject = "the one collective of a step starts" if count == 1 else f"all {count} collectives of a step start"
        return (
            f"{share} of exposed time is synchronous: {subject} after backward. "
            "Launched by gradient hooks, some of it would hide behind backward."
        )
    part = percent(headline.bucket_ns / headline.cause_ns)
    meaning, advice = _MEANING[headline.cause], _ADVICE[headline.cause]
    return f"{share} of exposed time is {meaning}, {part} of that with {which}. {advice}"


_MEANING = {
    WAITING: "waiting for a peer",
    LAUNCHED_LATE: "due to late launches by the host",
    QUEUED: "due to queueing behind another collective",
    STARVED: "due to compute that stood still during backward",
}
_ADVICE = {
    WAITING: "'ddp-prof skew' tells who arrives late.",
    LAUNCHED_LATE: "The host is behind the device: fewer, larger kernels and collectives would help.",
    QUEUED: "Communication needs more time than backward gives: fewer bytes or a faster link would help.",
    STARVED: "What held compute up is on the host or a dependency, not in the collective.",
}


def _which(headline: RootCause) -> str:
    kind = "bucket" if headline.bucket is not None else "collective"
    if headline.collectives_a_step == 1:
        return f"the only {kind}"
    if headline.is_last:
        return f"the last {kind}"
    return f"{kind} {headline.index if headline.bucket is None else headline.bucket} of {headline.collectives_a_step}"


def _described(headline: RootCause) -> str:
    parts = [] if headline.bytes is None else [size(headline.bytes)]
    if headline.parameters:
        shown = ", ".join(headline.parameters[:_SHOWN_PARAMETERS])
        more = len(headline.parameters) - _SHOWN_PARAMETERS
        parts.append(f"{shown} and {more} more" if more > 0 else shown)
    return f" ({', '.join(parts)})" if parts else ""


def _when(headline: RootCause) -> str:
    if headline.lead_ns is None:
        return "starts late"
    if not headline.lead_ns:
        return "starts when backward ends"
    side = "before" if headline.lead_ns >= 0 else "after"
    return f"starts {milliseconds(abs(headline.lead_ns))} {side} backward ends"


def _tail_advice(headline: RootCause) -> str:
    if len(headline.parameters) == 1:
        return "It holds a single parameter: only fewer bytes or a faster link would hide more of it."
    if headline.is_last and headline.collectives_a_step > 1:
        return "A smaller last bucket would hide more of it."
    return "Smaller buckets would start earlier and hide more of it."


def _origins(collectives: Sequence[Collective]) -> dict[Hashable, int]:
    """The first time of each step of each rank."""
    origins: dict[Hashable, int] = {}
    for collective in collectives:
        first = min(
            time for time in (collective.ready_ns, collective.launch_ns, collective.start_ns) if time is not None
        )
        origins[collective.step_identity] = min(first, origins.get(collective.step_identity, first))
    return origins


def _collective_row(collective: Collective, origin_ns: int) -> Row:
    def since(time_ns: int | None) -> float | None:
        return None if time_ns is None else (time_ns - origin_ns) / 1e6

    return {
        "rank": _rank(collective),
        "step": collective.step,
        "index": collective.index,
        "bucket": collective.bucket,
        "op": collective.op,
        "bytes": collective.bytes,
        "ready_ms": since(collective.ready_ns),
        "launch_ms": since(collective.launch_ns),
        "start_ms": since(collective.start_ns),
        "end_ms": since(collective.end_ns),
        "queueing_ms": _ms(collective.queueing_ns),
        "duration_ms": _ms(collective.duration_ns),
        "wait_ms": _ms(collective.wait_ns),
        "transfer_ms": _ms(collective.transfer_ns),
        "algbw_GB/s": _gigabytes(collective.algbw_bytes_per_s),
        "busbw_GB/s": _gigabytes(collective.busbw_bytes_per_s),
        "overlapped_ms": _ms(collective.overlapped_ns),
        "exposed_ms": _ms(collective.exposed_ns),
        "exposed_wait_ms": _ms(collective.exposed_wait_ns),
        **{f"{cause}_ms": _ms(getattr(collective.causes, cause)) for cause in CAUSES},
        "ready_by": collective.ready_source,
    }


def _summed_rows(collectives: Sequence[Collective], by: str) -> Iterable[Row]:
    groups: dict[tuple[tuple[str, str | int | None], ...], list[Collective]] = {}
    for collective in collectives:
        groups.setdefault(tuple((_step_key if by == "step" else _bucket_key)(collective).items()), []).append(
            collective
        )
    for key, members in groups.items():
        yield {
            **dict(key),
            "collectives": len(members),
            "duration_ms": _ms(sum(member.duration_ns for member in members)),
            "wait_ms": _ms(_sum_known(member.wait_ns for member in members)),
            "overlapped_ms": _ms(sum(member.overlapped_ns for member in members)),
            "exposed_ms": _ms(sum(member.exposed_ns for member in members)),
            "exposed_wait_ms": _ms(_sum_known(member.exposed_wait_ns for member in members)),
            **{f"{cause}_ms": _ms(sum(getattr(member.causes, cause) for member in members)) for cause in CAUSES},
        }


def _step_key(collective: Collective) -> dict[str, str | int | None]:
    return {"rank": _rank(collective), "step": collective.step}


def _bucket_key(collective: Collective) -> dict[str, str | int | None]:
    """Without buckets the position in the step tells collectives apart."""
    index = collective.index if collective.bucket is None else None
    return {
        "rank": _rank(collective),
        "bucket": collective.bucket,
        "index": index,
        "op": collective.op,
        "bytes": collective.bytes,
    }


def _rank(collective: Collective) -> str | int:
    return f"process {collective.process}" if collective.rank is None else collective.rank


def _sum_known(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _document(run: RunAnalysis, result: RunCollectives, headline: str) -> dict[str, Any]:
    """The JSON document of ``ddp-prof collectives``: keys may be added, never renamed."""
    return {
        "schema": SCHEMA,
        "trace": str(run.trace),
        "label": run.label,
        "device": run.device,
        "collectives": [
            {
                **asdict(collective),
                "queueing_ns": collective.queueing_ns,
                "duration_ns": collective.duration_ns,
                "exposed_transfer_ns": collective.exposed_transfer_ns,
                "algbw_bytes_per_s": collective.algbw_bytes_per_s,
                "busbw_bytes_per_s": collective.busbw_bytes_per_s,
            }
            for collective in result.collectives
        ],
        "alignment": alignment_document(result.alignment),
        "matched": result.matched,
        "unmatched": result.unmatched,
        "headline": headline,
        "warnings": list(result.warnings),
    }


def alignment_document(alignment: Alignment) -> dict[str, Any]:
    """How clocks were aligned, as JSON."""
    return {
        "method": alignment.method,
        "residual_p50_ns": alignment.residual_p50_ns,
        "residual_p95_ns": alignment.residual_p95_ns,
        "missing_ranks": list(alignment.missing_ranks),
        "clocks": [{**asdict(clock), "clock": str(clock.clock)} for clock in alignment.clocks],
    }


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


def _gigabytes(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else bytes_per_s / 1e9
