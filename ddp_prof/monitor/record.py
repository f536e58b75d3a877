"""Make the record of one measurement of a job that trains.

A record is one line of the monitor's log. Its figures are those that ``ddp-prof`` shows for the same traces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from ddp_prof.analyze.collectives.skew import RunSkew
from ddp_prof.analyze.doctor import Diagnosis
from ddp_prof.analyze.overlap import TraceOverlap
from ddp_prof.analyze.variants.comparison import VariantSummary, compare_variants
from ddp_prof.analyze.variants.regression_gate import GateResult, Requirements, check_run
from ddp_prof.annotate.monitor_format import LIMITS
from ddp_prof.columns import by_number, milliseconds, percent
from ddp_prof.errors import UsageError, printable
from ddp_prof.present.headlines import communicating_steps_text, gain_headline
from ddp_prof.runs.report import LoadOptions
from ddp_prof.runs.run import Run

SCHEMA = 1
NS_PER_MS = 1e6
OF_RANKS = ("comm_ns", "overlapped_ns", "exposed_ns", "tail_ns", "blocking_ns")


@dataclass(frozen=True)
class Part:
    """The results of one rank in a measurement.

    Attributes:
        rank, host: Number of the rank, and name of its machine.
        overhead_ns: How long start, stop and export of the profiler held up its training.
        usual_ns: Median length of its steps before the measurement, by the host's clock; ``None`` if there were none.
        recorded_ns: Length of each recorded step, by the host's clock.
        error: Why its trace was not measured; ``None`` if it was.
        measured: The measures of its trace by name, under the file of the trace; empty if there is an error.
    """

    rank: int
    host: str
    overhead_ns: int
    usual_ns: int | None
    recorded_ns: Sequence[int]
    error: str | None
    measured: dict[Path, dict[str, Any]]


def make_record(asked: Mapping[str, Any], parts: Sequence[Part]) -> dict[str, Any]:
    """Return the record of one measurement.

    Args:
        asked: What was asked of the ranks: ``step`` (number of the step with which the measurement began), ``started``
            (when the process that trains created its monitor), ``world`` (number of ranks), and ``limits`` by the names
            in :data:`.LIMITS`.
        parts: The results of the ranks that answered.

    Raises:
        UsageError: No rank was measured, or a limit is unknown.
    """
    # The traces of all ranks that were measured are one run, whose measures are known already.
    known = [part for part in parts if part.measured]
    if not known:
        raise UsageError("; ".join(sorted({part.error or "nothing arrived" for part in parts})))
    measured = {file: found for part in known for file, found in part.measured.items()}
    run = Run(tuple(measured), LoadOptions(one_run=True), measured=measured)
    overlap, diagnosis = run.overlap(), run.doctor()
    (summary,) = compare_variants([overlap])
    cost = run.cost()
    missing = sorted({*range(asked["world"])} - {part.rank for part in known})
    verdicts = _judge(overlap, asked["limits"], run, missing)
    late = _find_last(run)
    bounds = asdict(cost.bounds)
    record = {
        "schema": SCHEMA,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "started": asked.get("started"),
        "step": asked["step"],
        "steps": summary.steps,
        "world_size": asked["world"],
        "ranks": len(known),
        "device": summary.device,
        "step_ns": summary.step_ns,
        "communicating_step_ns": summary.communicating_step_ns,
        "communicating_steps": communicating_steps_text(summary) or None,
        "comm_ns": summary.comm_ns,
        "overlapped_ns": summary.overlapped_ns,
        "exposed_ns": summary.exposed_ns,
        "overlap_ratio": summary.overlap_ratio,
        "blocking_ns": summary.blocking_ns,
        "contention_ns": cost.cost.contention_ns,
        "schedule_gain_ns": bounds["schedule_ns"],
        "network_gain_ns": bounds["network_ns"],
        "cost": asdict(cost.cost),
        "bounds": bounds,
        "late": late,
        "groups": _groups(run),
        "finding": _finding(diagnosis),
        "headline": gain_headline(summary, cost.cost),
        "by_rank": _by_rank(overlap, run.skew()),
        "usual_step_ns": _median(part.usual_ns for part in parts if part.usual_ns is not None),
        "recorded_step_ns": _median(ns for part in parts for ns in part.recorded_ns),
        "overhead_ns": max(part.overhead_ns for part in parts),
        "limits": [_limit(verdict) for verdict in verdicts],
        "failed": [text for verdict in verdicts if (text := _failure(verdict))],
        "missing_ranks": missing,
        "worst_ns": _worst(summary, cost.cost.contention_ns),
        "traces": [file.name for file in measured],
        "not_known": [
            *[f"rank {part.rank}: {part.error}" for part in parts if part.error],
            *[f"nothing arrived from rank {rank}" for rank in missing if rank not in {part.rank for part in parts}],
            *overlap.warnings,
        ],
    }
    return {**record, "text": _text(record)}


def _judge(
    overlap: TraceOverlap, limits: Mapping[str, float], run: Run, missing: Sequence[int]
) -> Sequence[GateResult]:
    """Return the verdicts on the limits that the user gave; limits of times are in milliseconds.

    A limit that all ranks with a result meet is unknown if others, those ``missing``, have none.

    Raises:
        UsageError: There is no limit of such a name.
    """
    if unknown := limits.keys() - LIMITS.keys():
        raise UsageError(f"no such limit: {', '.join(sorted(unknown))}; there are {', '.join(LIMITS)}")
    scaled: dict[str, Any] = {
        LIMITS[name]: limit * NS_PER_MS if name.endswith("_ms") else limit for name, limit in limits.items()
    }
    costs = run.cost().steps if "max_cost_ns" in scaled else None
    verdicts = check_run(overlap, Requirements(**scaled), costs).verdicts
    if not missing:
        return verdicts
    reason = reason_without(missing)
    return [replace(one, status="unknown", reason=reason) if one.status == "passed" else one for one in verdicts]


def reason_without(missing: Sequence[int]) -> str:
    """Return why a limit that all ranks with a result meet cannot be judged: ``missing`` have none."""
    ranks = by_number(len(missing), "rank", "ranks")
    have = by_number(len(missing), "which has", "which have")
    return f"the known ranks meet the limit; not known of {ranks} {', '.join(map(str, missing))}, {have} no result"


def _limit(verdict: GateResult) -> dict[str, Any]:
    """Return a verdict as a dictionary; its rank is a number, or ``None``."""
    found = {name: getattr(verdict, name) for name in ("requirement", "unit", "measured", "limit", "status", "reason")}
    return {**found, "rank": verdict.rank and verdict.rank.rank}


def _failure(verdict: GateResult) -> str | None:
    """Return a sentence on a limit that is not met or cannot be judged; ``None`` if it is met."""
    if verdict.status == "passed":
        return None
    if verdict.status == "unknown" or verdict.measured is None or verdict.limit is None:
        return f"{verdict.requirement} cannot be judged: {verdict.reason}"
    show = percent if verdict.unit == "ratio" else lambda ns: milliseconds(round(ns))
    where = f" on {verdict.rank.name}" if verdict.rank and verdict.rank.rank is not None else ""
    return f"{verdict.requirement} is not met{where}: {show(verdict.measured)}, limit {show(verdict.limit)}"


def _find_last(run: Run) -> dict[str, Any] | None:
    """Return the rank that arrives last in most steps, with its lag and what that costs.

    ``None`` if no rank does, or if the clocks cannot be compared.
    """
    skew = run.skew()
    if skew.reason or not skew.steps:
        return None
    rank = max(skew.ranks, key=lambda one: one.last_steps)
    if rank.rank is None or rank.last_steps * 2 <= len(skew.steps) or rank.lag_when_last_ns is None:
        return None
    return {
        "rank": rank.rank,
        "steps": rank.last_steps,
        "of_steps": len(skew.steps),
        "lag_ns": rank.lag_when_last_ns,
        "cost_ns": rank.cost_when_last_ns,
    }


def _groups(run: Run) -> list[dict[str, Any]]:
    """Return the communication of each process group in each phase: medians over the steps of all ranks.

    Empty if there is only one such combination.
    """
    # For each group and phase, and each step of a rank: number of collectives, overlapped and exposed nanoseconds.
    by_place: dict[tuple[str | None, str | None], dict[Any, list[int]]] = {}
    for one in run.collectives().collectives:
        if one.step is not None:
            of_steps = by_place.setdefault((one.group, one.phase), {})
            sums = of_steps.setdefault(one.step_identity, [0, 0, 0])
            sums[0] += 1
            sums[1] += one.overlapped_ns
            sums[2] += one.exposed_ns
    if len(by_place) < 2:
        return []
    return [
        {
            "group": group,
            "phase": phase,
            "collectives": _median(count for count, _, _ in of_steps.values()),
            "overlapped_ns": _median(overlapped for _, overlapped, _ in of_steps.values()),
            "exposed_ns": _median(exposed for _, _, exposed in of_steps.values()),
        }
        for (group, phase), of_steps in by_place.items()
    ]


def _finding(diagnosis: Diagnosis) -> dict[str, Any] | None:
    """Return the finding of the doctor with the largest expected gain or, if that is not known, the largest cost."""

    def gain(finding: Any) -> int:
        """Return the expected gain or, if that is not known, the upper limit of the cost; -1 if neither is known."""
        known = finding.expected_gain_ns if finding.expected_gain_ns is not None else finding.cost_ns
        return -1 if known is None else int(known)

    if not diagnosis.findings:
        return None
    most = max(diagnosis.findings, key=gain)
    names = ("rule", "evidence", "advice", "cost_ns", "expected_gain_ns", "gain_low_ns", "gain_high_ns")
    return {name: getattr(most, name) for name in names}


def _by_rank(overlap: TraceOverlap, skew: RunSkew) -> list[dict[str, Any]]:
    """Return the figures of each rank: medians over its steps that communicate, and its lag as in ``ddp-prof skew``."""
    lags_ns = {rank.rank: rank.lag_ns for rank in skew.ranks} if not skew.reason else {}
    return [
        {
            "rank": rank.rank,
            "step_ns": _median(rank.lengths_ns),
            **{name: _median_of_known([getattr(step, name) for step in rank.communicating_steps]) for name in OF_RANKS},
            "overlap_ratio": rank.overlap_ratio,
            "lag_ns": lags_ns.get(rank.rank),
            "reason": rank.reason,
        }
        for rank in overlap.ranks
    ]


def _median_of_known(values: Sequence[int | None]) -> int | None:
    """Return the median; ``None`` if one of the values is not known, or there are none."""
    return None if None in values else _median(values)


def _worst(summary: VariantSummary, contention_ns: int | None) -> int | None:
    """Return the time by which the worst measurement is chosen, whose trace is kept.

    That is the blocking time (the exposed time where blocking is not known) plus contention where it is known.
    """
    waits_ns = summary.blocking_ns if summary.blocking_ns is not None else summary.exposed_ns
    return None if waits_ns is None else waits_ns + (contention_ns or 0)


def _median(values: Any) -> int | None:
    known = list(values)
    return round(median(known)) if known else None


def _text(record: Mapping[str, Any]) -> str:
    """Return the record as one line of text for people."""
    said, some = [f"step {record['step']}"], record["communicating_steps"]
    if record["step_ns"] is not None:
        said.append(f"{milliseconds(record['step_ns'])} a step")
    if record["comm_ns"] is not None and record["exposed_ns"] is not None:
        waits = "" if record["blocking_ns"] is None else f", {milliseconds(record['blocking_ns'])} blocking"
        exposed = f"{milliseconds(record['exposed_ns'])} exposed{waits}"
        communication = f"communication {milliseconds(record['comm_ns'])}, of which {exposed}"
        if some and record["communicating_step_ns"]:
            communication = f"{milliseconds(record['communicating_step_ns'])} in {some}: {communication}"
        said.append(communication)
    if record["contention_ns"]:
        said.append(f"compute slowed by {milliseconds(record['contention_ns'])}")
    if (gain := record["schedule_gain_ns"]) is not None and (step_ns := record["communicating_step_ns"]):
        said.append(f"hiding all of it gains at most {percent(gain / step_ns)}{' of these' if some else ''}")
    if late := record["late"]:
        said.append(
            f"rank {late['rank']} arrives last in {late['steps']} of {late['of_steps']} steps, "
            f"by {milliseconds(late['lag_ns'])}"
        )
    if finding := record["finding"]:
        said.append(f"doctor: {finding['rule']}")
    if record["missing_ranks"]:
        said.append(f"without rank {', '.join(map(str, record['missing_ranks']))}")
        said += record["not_known"][:1]  # why one of them is missing
    return printable("; ".join(said))
