"""Results as rows of plain values, for tables and for files, and as the documents of ``--format json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ddp_prof.analyze.overlap.comparison import compare_variants

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddp_prof.analyze.overlap.comparison import VariantSummary
    from ddp_prof.analyze.overlap.overlap import RankOverlap, StepOverlap, TraceOverlap
    from ddp_prof.analyze.quality.inventory import TraceInventory
    from ddp_prof.manifest import Manifest

Row = dict[str, "str | int | float | None"]

SCHEMA = 1

HOW_TO_READ = "a step's medians over all ranks; spread: interquartile range; overlap: of all communication"
"""What the table of compared runs shows."""


@dataclass(frozen=True, slots=True)
class TableView:
    """A table with what belongs to it.

    Attributes:
        title: A line above the table.
        rows: Rows with the same keys.
        notes: Lines below the table.
        document: The JSON document, which carries the notes itself.
    """

    title: str
    rows: Sequence[Row]
    notes: Sequence[str]
    document: dict[str, Any]


def overlap_view(result: TraceOverlap, *, by_step: bool) -> TableView:
    """The overlap of one run: a row a rank, or a row a step of each rank."""
    return TableView(
        overlap_title(result), overlap_rows(result, by_step=by_step), overlap_notes(result), overlap_document(result)
    )


def compare_view(results: Sequence[TraceOverlap]) -> TableView:
    """Runs side by side, a row a run."""
    summaries = compare_variants(results)
    document = {**compare_document(summaries), "warnings": notes_of_runs(results)}
    return TableView("", compare_rows(summaries), compare_notes(results), document)


def info_view(inventory: TraceInventory) -> TableView:
    """What a trace holds, a row a process."""
    rows: list[Row] = [
        {
            "rank": process.rank,
            "process": process.process,
            "devices": ", ".join(map(str, process.devices)) or "cpu",
            "kernels": process.kernels,
            "comm_kernels": process.collectives,
            "copies": process.copies,
            "CUDA_calls": process.calls,
            "ranges": process.ranges,
            "steps": process.steps,
            "warm-up_steps": process.warmup_steps,
            "backward_ranges": process.backward_ranges,
        }
        for process in inventory.processes
    ]
    producer = f" {inventory.producer}" if inventory.producer else ""
    title = (
        f"{inventory.trace} · {inventory.source}{producer} · device: {inventory.device} · "
        f"{inventory.duration_ns / 1e9:.3f} s"
    )
    document = {"schema": SCHEMA, **asdict(inventory), "trace": str(inventory.trace)}
    return TableView(title, rows, [*_run_notes(inventory.manifest), *inventory.advice, *inventory.warnings], document)


def _run_notes(run: Manifest | None) -> list[str]:
    if run is None:
        return []
    bucket = "" if run.bucket_size_mb is None else f", buckets of at most {run.bucket_size_mb:g} MB"
    parameters = sum(parameter.numel for parameter in run.parameters)
    note = (
        f"run: {run.variant}{bucket}, {run.world_size} ranks, {run.backend}, {run.model_size} model "
        f"({parameters:,} parameters), batch {run.batch_size} x {run.seq_len} tokens, "
        f"{run.steps} steps after {run.warmup} of warm-up, recorded by {run.profiler or 'no profiler'}, {run.created}"
    )
    return [note]


def overlap_title(result: TraceOverlap) -> str:
    """What was measured, and how much of it could be placed in a step."""
    parts = [str(result.trace), _recorder(result), f"device: {result.device}"]
    attribution = result.attribution
    if attribution.device_time:
        kind = "device time" if result.device == "cuda" else "time"
        parts.append(f"in a step: {attribution.device_time:.1%} of {kind}, {attribution.activities:.1%} of events")
    return " · ".join(parts)


def overlap_rows(result: TraceOverlap, *, by_step: bool) -> list[Row]:
    """A row a rank, or a row a step of each rank."""
    if by_step:
        rows = [_step_row(rank, step) for rank in result.ranks for step in rank.steps]
    else:
        rows = [_rank_row(rank) for rank in result.ranks]
    return [{"run": result.label, **row} for row in rows]


def overlap_notes(result: TraceOverlap) -> list[str]:
    """What could not be known or was assumed, a line each."""
    reasons = [f"{rank_name(rank)}: no overlap figure: {rank.reason}" for rank in result.ranks if rank.reason]
    return [*reasons, *result.warnings]


def overlap_document(result: TraceOverlap) -> dict[str, Any]:
    """The JSON document of ``ddp-prof overlap``: keys may be added, never renamed."""
    return {
        "schema": SCHEMA,
        "trace": str(result.trace),
        "label": result.label,
        "source": result.source,
        "producer": result.producer,
        "device": result.device,
        "attribution": {
            "activities": result.attribution.activities,
            "device_time": result.attribution.device_time,
            "method": result.attribution.method,
        },
        "ranks": [_rank_document(rank) for rank in result.ranks],
        "warnings": list(result.warnings),
    }


def compare_rows(summaries: Iterable[VariantSummary]) -> list[Row]:
    """A row a run."""
    return [
        {
            "variant": summary.label,
            "device": summary.device,
            "ranks": summary.ranks,
            "steps": summary.steps,
            "step_ms": ms(summary.step_ns),
            "spread_ms": ms(summary.step_spread_ns),
            "collectives": summary.collectives,
            "comm_ms": ms(summary.comm_ns),
            "overlapped_ms": ms(summary.overlapped_ns),
            "exposed_ms": ms(summary.exposed_ns),
            "tail_ms": ms(summary.tail_ns),
            "overlap_%": percent(summary.overlap_ratio),
            "in_backward_%": percent(summary.backward_overlap_ratio),
            "speedup": summary.speedup,
        }
        for summary in summaries
    ]


def compare_notes(results: Sequence[TraceOverlap]) -> list[str]:
    """How to read the table, and what could not be known or was assumed."""
    recorders = dict.fromkeys(map(_recorder, results))
    return [HOW_TO_READ, f"recorded by {', '.join(recorders)}", *notes_of_runs(results)]


def _recorder(result: TraceOverlap) -> str:
    """What recorded the trace, with the version of its export where the trace tells it."""
    if result.source == "kineto":
        return "torch.profiler"
    return f"nsys {result.producer}" if result.producer else "nsys"


def notes_of_runs(results: Sequence[TraceOverlap]) -> list[str]:
    """Each warning once, with the runs that it is about where these are not all."""
    warnings = warnings_by_run(results).items()
    return [text if len(labels) == len(results) else f"{', '.join(labels)}: {text}" for text, labels in warnings]


def warnings_by_run(results: Sequence[TraceOverlap]) -> dict[str, list[str]]:
    """Each thing that could not be known or was assumed, and the labels of the runs that it is about."""
    about: dict[str, list[str]] = {}
    for result in results:
        for warning in overlap_notes(result):
            about.setdefault(warning, []).append(result.label)
    return about


def compare_document(summaries: Iterable[VariantSummary]) -> dict[str, Any]:
    """The JSON document of ``ddp-prof compare``, times in nanoseconds."""
    return {"schema": SCHEMA, "variants": [asdict(summary) for summary in summaries]}


def _rank_row(rank: RankOverlap) -> Row:
    return {
        "rank": rank.rank,
        "process": rank.process,
        "device": "cpu" if rank.device is None else rank.device,
        "steps": sum(step.host_ns is not None for step in rank.steps),
        "kernels": rank.kernels,
        "collectives": rank.collectives,
        "compute_ms": ms(rank.compute_ns),
        "comm_ms": ms(rank.comm_ns),
        "overlapped_ms": ms(rank.overlapped_ns),
        "exposed_ms": ms(rank.exposed_ns),
        "overlap_%": percent(rank.overlap_ratio),
        "in_backward_%": percent(rank.backward_overlap_ratio),
    }


def _step_row(rank: RankOverlap, step: StepOverlap) -> Row:
    return {
        "rank": rank.rank,
        "process": rank.process,
        "device": "cpu" if rank.device is None else rank.device,
        "step": step.step,
        "kernels": step.kernels,
        "collectives": step.collectives,
        "window_ms": ms(step.window_ns),
        "compute_only_ms": ms(step.compute_only_ns),
        "overlapped_ms": ms(step.overlapped_ns),
        "exposed_ms": ms(step.exposed_ns),
        "exposed_memory_ms": ms(step.exposed_memory_ns),
        "idle_ms": ms(step.idle_ns),
        "comm_ms": ms(step.comm_ns),
        "overlap_%": percent(step.overlapped_ns / step.comm_ns if step.comm_ns else None),
        "tail_ms": ms(step.tail_ns),
    }


def _rank_document(rank: RankOverlap) -> dict[str, Any]:
    return {
        **_document(rank),
        "overlap_ratio": rank.overlap_ratio,
        "backward_overlap_ratio": rank.backward_overlap_ratio,
        "steps": [_document(step) for step in rank.steps],
    }


def _document(result: RankOverlap | StepOverlap) -> dict[str, Any]:
    """The fields as they are; ``asdict`` would copy each of them."""
    return {column.name: getattr(result, column.name) for column in fields(result)}


def rank_name(rank: RankOverlap) -> str:
    """What a rank is called; by its process where its number is not known."""
    return f"process {rank.process}" if rank.rank is None else f"rank {rank.rank}"


def ms(ns: float | None) -> float | None:
    """Milliseconds of nanoseconds."""
    return None if ns is None else ns / 1e6


def percent(ratio: float | None) -> float | None:
    """Percent of a share."""
    return None if ratio is None else ratio * 100
