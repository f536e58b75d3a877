"""Every document of ``--format json``: a contract, in which keys may be added and are never renamed.

Times are nanoseconds. What is not known is ``null``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_prof.analyze.collectives.results import RunCollectives
    from ddp_prof.analyze.collectives.run_analysis import Alignment, RunAnalysis
    from ddp_prof.analyze.collectives.straggler import RunSkew
    from ddp_prof.analyze.critical.critical_path import RunCritical
    from ddp_prof.analyze.doctor import Diagnosis
    from ddp_prof.analyze.inventory import TraceInventory
    from ddp_prof.analyze.kernels.device_use import DeviceUse
    from ddp_prof.analyze.overlap import RankOverlap, StepLength, StepOverlap, TraceOverlap
    from ddp_prof.analyze.variants.before_after import PartChange
    from ddp_prof.analyze.variants.comparison import VariantSummary
    from ddp_prof.analyze.variants.regression_gate import GateReport, GateResult

Document = dict[str, Any]

SCHEMA = 1

COLLECTIVES_SCHEMA = 2
"""2: ``exposed_by`` (when and why) in place of ``causes``."""


def overlap_document(result: TraceOverlap, headline: str) -> Document:
    return {
        "schema": SCHEMA,
        "trace": str(result.trace),
        "label": result.label,
        "source": result.source,
        "producer": result.producer,
        "device": result.device,
        "attribution": {name: getattr(result.attribution, name) for name in ("activities", "device_time", "method")},
        "ranks": [_rank_document(rank) for rank in result.ranks],
        "outliers": asdict(result.outliers) if result.outliers else None,
        "warnings": list(result.warnings),
        "headline": headline,
    }


def _rank_document(rank: RankOverlap) -> Document:
    return {
        **_fields_of(rank),
        "dependencies": asdict(rank.dependencies) if rank.dependencies else None,
        "overlap_ratio": rank.overlap_ratio,
        "backward_overlap_ratio": rank.backward_overlap_ratio,
        "steps": [{**_fields_of(step), "length": _fields_of(step.length)} for step in rank.steps],
    }


def _fields_of(result: RankOverlap | StepOverlap | StepLength | GateResult) -> Document:
    """The fields as they are; ``asdict`` would copy each of them."""
    return {column.name: getattr(result, column.name) for column in fields(result)}


def _run(run: TraceOverlap | RunAnalysis) -> Document:
    return {"trace": str(run.trace), "label": run.label, "device": run.device}


def compare_document(summaries: Iterable[VariantSummary], warnings: Sequence[str]) -> Document:
    """JSON document of ``ddp-prof compare``, without the waterfall."""
    return {"schema": SCHEMA, "variants": [asdict(summary) for summary in summaries], "warnings": list(warnings)}


def changes_document(changes: Sequence[PartChange]) -> list[Document]:
    """What changed between two runs of one variant, a part of the document of ``ddp-prof compare``."""
    return [
        {**asdict(change), "change_ns": change.change_ns, "is_beyond_spread": change.is_beyond_spread}
        for change in changes
    ]


def info_document(inventory: TraceInventory) -> Document:
    return {"schema": SCHEMA, **asdict(inventory), "trace": str(inventory.trace)}


def collectives_document(run: RunAnalysis, result: RunCollectives, headline: str) -> Document:
    derived = ("queueing_ns", "duration_ns", "exposed_transfer_ns", "algbw_bytes_per_s", "busbw_bytes_per_s")
    return {
        "schema": COLLECTIVES_SCHEMA,
        **_run(run),
        "collectives": [
            {**asdict(collective), **{name: getattr(collective, name) for name in derived}}
            for collective in result.collectives
        ],
        "alignment": _alignment_document(result.alignment),
        "matched": result.matched,
        "unmatched": result.unmatched,
        "headline": headline,
        "outliers": asdict(result.outliers) if result.outliers else None,
        "warnings": list(result.warnings),
    }


def _alignment_document(alignment: Alignment) -> Document:
    clocks = [{**asdict(clock), "clock": str(clock.clock)} for clock in alignment.clocks]
    return {**asdict(alignment), "clocks": clocks}


def kernels_document(result: TraceOverlap, use: DeviceUse, warnings: Sequence[str]) -> Document:
    return {
        "schema": SCHEMA,
        **_run(result),
        "kernels": [asdict(kernel) for kernel in use.kernels],
        "ranks": [
            {
                "process": rank.process,
                "device": rank.device,
                "rank": rank.rank,
                "overlapped_ns": rank.overlapped_ns,
                "hidden": [asdict(part) for part in rank.hidden],
                "idle_ns": rank.idle.idle_ns,
                "idle": [{"cause": cause, "idle_ns": idle_ns} for cause, idle_ns in rank.idle.causes],
                "idle_reason": rank.idle.reason,
            }
            for rank in use.ranks
        ],
        "warnings": list(warnings),
    }


def critical_document(run: RunAnalysis, critical: RunCritical, headline: str) -> Document:
    return {
        "schema": SCHEMA,
        **_run(run),
        "steps": [asdict(path) for path in critical.steps],
        "reason": critical.reason,
        "gain_reason": critical.gain_reason,
        "headline": headline,
        "warnings": list(run.warnings),
    }


def doctor_document(run: RunAnalysis, diagnosis: Diagnosis) -> Document:
    return {
        "schema": SCHEMA,
        **_run(run),
        "findings": [asdict(one) for one in diagnosis.findings],
        "abstained": [asdict(one) for one in diagnosis.abstained],
        "warnings": list(run.warnings),
    }


def skew_document(run: RunAnalysis, skew: RunSkew, headline: str) -> Document:
    return {
        "schema": SCHEMA,
        **_run(run),
        "ranks": [asdict(rank) for rank in skew.ranks],
        "steps": [asdict(step) for step in skew.steps],
        "straggler": skew.straggler,
        "alignment": _alignment_document(skew.alignment),
        "headline": headline,
        "warnings": list(skew.warnings),
    }


def gate_document(checks: Sequence[GateReport], baseline: TraceOverlap | None, warnings: Sequence[str]) -> Document:
    return {
        "schema": SCHEMA,
        "passed": all(check.passed for check in checks),
        "baseline": None if baseline is None else str(baseline.trace),
        "runs": [
            {
                **_run(check.run),
                "passed": check.passed,
                "verdicts": [_gate_result_document(verdict) for verdict in check.verdicts],
            }
            for check in checks
        ],
        "warnings": list(warnings),
    }


def _gate_result_document(verdict: GateResult) -> Document:
    rank = verdict.rank
    return {
        **_fields_of(verdict),
        "reason": verdict.reason or None,
        "rank": rank and rank.rank,
        "process": rank and rank.process,
        "rank_device": rank and rank.device,
    }
