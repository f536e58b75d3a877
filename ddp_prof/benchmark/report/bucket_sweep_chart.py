"""Step time by bucket size, a curve for each context length, beside the fastest variant without buckets."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ddp_prof.benchmark.alpha_beta import Unknown
from ddp_prof.benchmark.effects import bucket_sizes
from ddp_prof.benchmark.observations import contradicts_model
from ddp_prof.benchmark.report.chart_layout import LINE, TOP, layout
from ddp_prof.benchmark.report.rows import half_ms, value_ms
from ddp_prof.present import theme
from ddp_prof.present.charts.frame import axis
from ddp_prof.present.text import shown_name, size
from ddp_prof.variants import BUCKETED, BYTES_PER_MB

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

    from ddp_prof.benchmark.report.testbeds import TestbedResults
    from ddp_prof.benchmark.settings import SettingSummary

_HEIGHT, _BOTTOM = 640, 70
_LABEL_PX = 16
_ASIDE = 1.025
"""Factor between the curves' x values, so that their error bars do not cover each other."""
_COLORS = ("backward", theme.OVERLAPPED, theme.EXPOSED_MEMORY, "optimizer", theme.EXPOSED, theme.MEMORY)
"""Of the context lengths, in order; distinct with any colour vision."""


def draw_bucket_sweep(results: TestbedResults, batch_size: int) -> go.Figure:
    """The settings of one batch size; the best size of the model of bucketing is marked where it fits."""
    import plotly.graph_objects as go

    measured = [
        summary
        for summary in results.summaries
        if summary.timing.step_ns and summary.setting.local_batch_size == batch_size
    ]
    contexts = sorted({bucket.setting.seq_len for bucket in _buckets(measured)})
    colors = {context: theme.LIGHT.colors[_COLORS[index % len(_COLORS)]] for index, context in enumerate(contexts)}
    references = [reference for context in contexts if (reference := _fastest_without_buckets(measured, context))]
    limits = _range([*_buckets(measured), *references])
    sizes = bucket_sizes([summary.timing for summary in measured])
    best_mb = _best_mb(results)
    least, most = _size_range(sizes, best_mb)
    traces = [
        _curve(measured, context, colors[context], _ASIDE ** (index - (len(contexts) - 1) / 2))
        for index, context in enumerate(contexts)
    ]
    traces += [_reference(reference, colors[reference.setting.seq_len], (least, most)) for reference in references]
    traces += _best(best_mb, limits)
    title, note = f"Step time by bucket size, batch {batch_size} per rank", _model_note(results)
    figure_layout = layout(results, title, _HEIGHT, note=note, b=_BOTTOM, l=80, r=190)
    figure_layout |= {
        "xaxis": axis(
            "bucket size (MiB, log scale)", type="log", range=[math.log10(least), math.log10(most)],
            fixedrange=True, tickmode="array", tickvals=sizes,
            ticktext=[_size_text(size, measured[0]) for size in sizes],
        ),
        "yaxis": axis("step time (ms); bars: 95 % interval", range=limits, fixedrange=True),
        "annotations": [*_labels(references, colors, limits), *_best_label(best_mb)],
    }  # fmt: skip
    return go.Figure(traces, figure_layout)


def batch_sizes(results: TestbedResults) -> list[int]:
    """The batch sizes for which several bucket sizes were measured."""
    found: dict[int, set[float | None]] = {}
    for bucket in _buckets(results.summaries):
        found.setdefault(bucket.setting.local_batch_size, set()).add(bucket.setting.bucket_size_mb)
    return sorted(batch for batch, sizes in found.items() if len(sizes) > 1)


def _buckets(summaries: Sequence[SettingSummary]) -> list[SettingSummary]:
    return [summary for summary in summaries if summary.timing.step_ns and summary.setting.swept_mb is not None]


def _fastest_without_buckets(measured: Sequence[SettingSummary], context: int) -> SettingSummary | None:
    """One reference for each curve; the other variants are in the chart of variants."""
    others = [
        summary for summary in measured if summary.setting.variant != BUCKETED and summary.setting.seq_len == context
    ]
    return min(others, key=lambda summary: value_ms(summary.timing.step_ns) or math.inf, default=None)


def _size_text(size_mb: float, summary: SettingSummary) -> str:
    is_one_bucket = size_mb * BYTES_PER_MB >= summary.first.gradient_bytes
    return f"{size_mb:g}<br>(one bucket)" if is_one_bucket else f"{size_mb:g}"


def _best_mb(results: TestbedResults) -> float | None:
    """The best size by the model; ``None`` where there is none, or where the measurements contradict it."""
    if isinstance(results.model, Unknown) or contradicts_model(results.observations):
        return None
    return results.model.best_bytes / BYTES_PER_MB or None


def _model_note(results: TestbedResults) -> str:
    """Whether the measurements agree with the model of bucketing."""
    choice = next((found for found in results.observations if found.name == "model_agrees"), None)
    if choice is None:
        return ""
    chosen, fastest = (f"{choice.numbers[key]:g} MiB" for key in ("chosen_mb", "fastest_mb"))
    if chosen == fastest:
        extent = "" if choice.is_supported else ", though not beyond the spread"
        return f"The cost model fits: of the sizes measured it prefers {chosen}, which is the fastest{extent}"
    if contradicts_model(results.observations):
        return f"The cost model does not fit: of the sizes measured it prefers {chosen}, but {fastest} is faster"
    return (
        f"The cost model is not confirmed: of the sizes measured it prefers {chosen}; {fastest} is the fastest, within "
        "the spread"
    )


def _range(shown: Sequence[SettingSummary]) -> list[float]:
    """All values in ms with their intervals, and room above and below."""
    values = [(value_ms(summary.timing.step_ns) or 0.0, half_ms(summary.timing.step_ns) or 0.0) for summary in shown]
    low = min((value - half for value, half in values), default=0.0)
    high = max((value + half for value, half in values), default=1.0)
    room = 0.05 * (high - low) or 1
    return [max(0.0, low - room), high + room]


def _size_range(sizes: Sequence[float], best_mb: float | None) -> tuple[float, float]:
    known = [*sizes, *([best_mb] if best_mb else [])]
    return min(known) / 1.4, max(known) * 1.4


def _curve(measured: Sequence[SettingSummary], context: int, color: str, aside: float) -> dict[str, Any]:
    own = [bucket for bucket in _buckets(measured) if bucket.setting.seq_len == context]
    sizes = [summary.setting.bucket_size_mb or 0.0 for summary in own]
    return {
        "type": "scatter", "mode": "lines+markers", "name": f"bucketed, context {context}",
        "x": [size * aside for size in sizes], "y": [value_ms(summary.timing.step_ns) for summary in own],
        "customdata": sizes,
        "error_y": {
            "type": "data", "array": [half_ms(summary.timing.step_ns) or 0.0 for summary in own],
            "color": color, "thickness": 1.2, "width": 5,
        },
        "line": {"color": color, "width": 2.5}, "marker": {"color": color, "size": 9},
        "hovertemplate": f"context {context}, %{{customdata:g}} MiB: %{{y:.2f}} ms<extra></extra>",
    }  # fmt: skip


def _reference(summary: SettingSummary, color: str, sizes: tuple[float, float]) -> dict[str, Any]:
    step_ms = value_ms(summary.timing.step_ns)
    return {
        "type": "scatter", "mode": "lines", "showlegend": False, "x": list(sizes), "y": [step_ms, step_ms],
        "line": {"color": color, "width": 1.3, "dash": "dash"},
        "hovertemplate": f"{shown_name(_name(summary))}: %{{y:.2f}} ms<extra></extra>",
    }  # fmt: skip


def _name(summary: SettingSummary) -> str:
    return f"{summary.setting.label}, context {summary.setting.seq_len}"


def _labels(
    references: Sequence[SettingSummary], colors: dict[int, str], limits: Sequence[float]
) -> list[dict[str, Any]]:
    """The names of the reference lines at the right, pushed apart where they would cover each other."""
    low, high = limits
    least = _LABEL_PX * (high - low) / (_HEIGHT - TOP - LINE - _BOTTOM)
    ordered = sorted(references, key=lambda reference: value_ms(reference.timing.step_ns) or 0.0)
    heights = _apart([value_ms(summary.timing.step_ns) or 0.0 for summary in ordered], least)
    return [
        {
            "xref": "paper", "x": 1, "xanchor": "left", "xshift": 8, "yref": "y", "y": height, "showarrow": False,
            "text": f"fastest other: {shown_name(summary.setting.label)}",
            "font": {"color": colors[summary.setting.seq_len]},
        }
        for summary, height in zip(ordered, heights, strict=True)
    ]  # fmt: skip


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Ascending heights moved so that neighbours are ``least`` apart, each run of labels about its own middle."""
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _bottom(groups[-1], least) - _top(groups[-2], least) < least:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_bottom(group, least) + index * least for group in groups for index in range(len(group))]


def _bottom(group: Sequence[float], least: float) -> float:
    return sum(group) / len(group) - least * (len(group) - 1) / 2


def _top(group: Sequence[float], least: float) -> float:
    return sum(group) / len(group) + least * (len(group) - 1) / 2


def _best(best_mb: float | None, limits: Sequence[float]) -> list[dict[str, Any]]:
    if best_mb is None:
        return []
    return [
        {
            "type": "scatter", "mode": "lines", "showlegend": False, "x": [best_mb, best_mb], "y": list(limits),
            "line": {"color": theme.LIGHT.quiet, "width": 1, "dash": "dot"}, "hoverinfo": "skip",
        }
    ]  # fmt: skip


def _best_label(best_mb: float | None) -> list[dict[str, Any]]:
    if best_mb is None:
        return []
    return [
        {
            "xref": "x", "x": math.log10(best_mb), "yref": "paper", "y": 0, "yanchor": "bottom", "xanchor": "left",
            "xshift": 4, "showarrow": False, "text": f"best by the model: {size(round(best_mb * BYTES_PER_MB))}",
            "font": {"color": theme.LIGHT.quiet},
        }
    ]  # fmt: skip
