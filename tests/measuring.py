"""Short ways from a trace to what is measured of it."""

from __future__ import annotations

from dataclasses import replace

from ddp_prof.analyze.collectives.collective import Collective
from ddp_prof.analyze.collectives.results import RunCollectives, measure_collectives
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis, analyze_trace, merge_analyses
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.present.timeline.model import Source
from ddp_prof.runs.report import TraceEvents
from ddp_prof.runs.run import timeline_source
from ddp_prof.trace import Trace


def analysis_of(*traces: Trace, label: str | None = None) -> RunAnalysis:
    """The traces of one run, compared."""
    analysis = merge_analyses([analyze_trace(trace, find_rank_events(trace)) for trace in traces])
    return analysis if label is None else replace(analysis, label=label)


def results_of(*traces: Trace) -> RunCollectives:
    return measure_collectives(analysis_of(*traces))


def collectives_of(*traces: Trace) -> tuple[Collective, ...]:
    return results_of(*traces).collectives


def source_of(title: str, trace: Trace) -> Source:
    return sources_of({title: trace})[0]


def sources_of(traces: dict[str, Trace]) -> list[Source]:
    """The traces of one run, by title."""
    parts = [TraceEvents(trace, find_rank_events(trace)) for trace in traces.values()]
    analysis = merge_analyses([analyze_trace(*part) for part in parts])
    return [timeline_source(title, part, analysis) for title, part in zip(traces, parts, strict=True)]
