"""Runs side by side, a row a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddp_prof.analyze.overlap.comparison import VariantSummary
from ddp_prof.analyze.overlap.overlap import TraceOverlap
from ddp_prof.present.columns import Row, ms, percent, times_of
from ddp_prof.present.json_documents import compare_document
from ddp_prof.present.table import TableView
from ddp_prof.present.tables.overlap import notes_of_runs, recorder_name
from ddp_prof.variants import BASELINE

HOW_TO_READ = (
    "times are medians over the steps of all ranks; those of communication over the steps that communicate; "
    "overlapped: comm minus exposed; spread: interquartile range of the steps; overlap: share of all communication"
)


def compare_view(results: Sequence[TraceOverlap], summaries: Sequence[VariantSummary]) -> TableView:
    """The summaries of some runs, with what is noted of their results."""
    warnings = notes_of_runs(results)
    recorders = ", ".join(dict.fromkeys(map(recorder_name, results)))
    notes = [how_to_read(summaries), f"recorded by {recorders}", *_other_devices(summaries), *warnings]
    return TableView("", compare_rows(summaries), notes, compare_document(summaries, warnings))


def how_to_read(summaries: Iterable[VariantSummary]) -> str:
    """What the columns hold; speed-ups are there only where a run is the baseline."""
    is_sped_up = any(summary.speedup is not None for summary in summaries)
    return f"{HOW_TO_READ}; speedup: over {BASELINE}" if is_sped_up else HOW_TO_READ


def _other_devices(summaries: Sequence[VariantSummary]) -> list[str]:
    base = next((summary for summary in summaries if summary.label == BASELINE), None)
    other = [summary.label for summary in summaries if base and summary.device != base.device]
    return [f"no speedup of {', '.join(other)}: {BASELINE} ran on another device"] if other else []


def compare_rows(summaries: Iterable[VariantSummary]) -> list[Row]:
    return [
        {
            "variant": summary.label,
            **{name: getattr(summary, name) for name in ("device", "ranks", "steps")},
            "step_ms": ms(summary.step_ns),
            "spread_ms": ms(summary.step_spread_ns),
            "collectives": summary.collectives,
            **times_of(summary, "comm", "overlapped", "exposed", "blocking", "tail", "exposed_memory"),
            "overlap_%": percent(summary.overlap_ratio),
            "in_backward_%": percent(summary.backward_overlap_ratio),
            "speedup": summary.speedup,
        }
        for summary in summaries
    ]
