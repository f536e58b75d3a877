"""Small runs to show: sources, results and runs of a report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ddp_prof.analyze.collectives.step_view import view_step
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.cost import RunCost, measure_run_cost
from ddp_prof.analyze.doctor import Diagnosis
from ddp_prof.analyze.kernels.contention import Contention
from ddp_prof.analyze.kernels.device_use import DeviceUse, measure_rank_use
from ddp_prof.analyze.kernels.kernel_times import find_kernel_runs, measure_kernels
from ddp_prof.analyze.overlap import TraceOverlap, measure_overlap
from ddp_prof.analyze.root_cause import explain_run
from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.present.html.report import ReportRun
from ddp_prof.present.tables.kernels import kernels_views
from ddp_prof.runs.timelines import draw_timelines
from ddp_prof.trace import Trace
from tests.drawing import draw_trace
from tests.measuring import analysis_of, source_of

HOSTILE_TITLE = '<img src=x onerror=alert(1)> & "run" \N{FIRE}'


def cpu_run(steps: int = 2, shift: int = 0) -> Trace:
    """Steps of 20 ns on a CPU; the later its all-reduce starts, the less of it is overlapped."""
    collective = "." * (8 + shift) + "####" + "." * (8 - shift)
    return draw_trace(
        ranges={
            "process|rank=0|world=1|variant=overlap|backend=gloo|device=cpu": "#" * (20 * steps),
            **{f"step|index={index}": "." * (20 * index) + "#" * 20 for index in range(steps)},
            "forward": ".####..............." * steps,
            "backward": "......######........" * steps,
            "synchronize": "............####...." * steps,
            "optimizer": "................#..." * steps,
            "all_reduce|bucket=0|bytes=1048576|params=2": collective * steps,
        },
        ranks={4242: 0},
    )


def two_clocks() -> tuple[Trace, Trace]:
    """Two ranks of a run, each on a clock of its own; the second one's host begins its first step 3 ns later."""
    first = cpu_run()
    by_ns = np.where(first.spans.name_id == first.names.index("step|index=0"), 1003, 1000)
    spans = replace(first.spans, start_ns=first.spans.start_ns + by_ns, end_ns=first.spans.end_ns + 1000)
    return first, replace(first, path=Path("second.sqlite"), ranks={4242: 1}, spans=spans)


def result_of(trace: Trace, label: str = "overlap") -> TraceOverlap:
    return replace(measure_overlap(trace), label=label)


def cost_of(result: TraceOverlap) -> RunCost:
    """Where no kernel could be compared."""
    return measure_run_cost(result, Contention)


def run_of(trace: Trace, name: str = "overlap", label: str | None = None) -> ReportRun:
    label = label or name
    explanation = explain_run(analysis_of(trace, label=label))
    result = result_of(trace, label)
    (summary,) = compare_variants([result])
    steps = {key: view_step(explanation.run, key) for key in sorted(explanation.collectives.exposed_by_step)}
    ranks = find_rank_events(trace)
    kernels = measure_kernels(list(map(find_kernel_runs, ranks)))
    use = kernels_views(result, DeviceUse(tuple(map(measure_rank_use, ranks)), kernels))
    return ReportRun(
        name,
        result,
        lambda with_picture: draw_timelines(lambda: (source_of(label, trace),), None, with_picture=with_picture),
        explanation,
        summary,
        lambda: steps,
        use,
        lambda: Diagnosis((), ()),
        cost_of(result),
    )
