"""Step time by bucket size, a line a context length, with the variants that have no buckets as reference lines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ddp_prof.benchmark.effects import bucket_sizes
from ddp_prof.benchmark.facts import BYTES_PER_MB
from ddp_prof.benchmark.report.figure import TOP, axis, layout
from ddp_prof.benchmark.report.rows import half_ms, value_ms
from ddp_prof.present.charts import theme
from ddp_prof.present.timeline.text import shown_name
from ddp_prof.variants import BUCKETED

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

    from ddp_prof.benchmark.places import PlaceResults
    from ddp_prof.benchmark.settings import SettingSummary
    from ddp_prof.present.charts.theme import Palette

_HEIGHT, _BOTTOM = 640, 70
_LABEL_PX = 16
_ASIDE = 1.025
"""How far the contexts' curves stand aside of each other, so that their spreads do not cover each other."""
_DASHES = {"naive": "dot", "flat": "dash", "overlap": "dashdot", "torch": "longdash"}
_COLORS = ("backward", theme.OVERLAPPED, theme.EXPOSED_MEMORY, "optimizer", theme.EXPOSED, theme.MEMORY)
"""Of the context lengths, in order: colours that are told apart by all eyes."""


def draw_bucket_sweep(place: PlaceResults, batch_size: int, palette: Palette = theme.LIGHT) -> go.Figure:
    """The settings of one batch size; where the model of bucketing tells its best size, that is marked."""
    import plotly.graph_objects as go

    measured = [
        summary
        for summary in place.summaries
        if summary.timing.step_ns and summary.setting.local_batch_size == batch_size
    ]
    contexts = sorted({summary.setting.seq_len for summary in measured})
    colors = {context: palette.colors[_COLORS[index % len(_COLORS)]] for index, context in enumerate(contexts)}
    low, high = _range(measured)
    sizes = bucket_sizes([summary.timing for summary in measured])
    least, most = _size_range(sizes, _best_mb(place))
    references = [summary for summary in measured if summary.setting.variant in _DASHES]
    traces = [
        _curve(measured, context, colors[context], _ASIDE ** (index - (len(contexts) - 1) / 2))
        for index, context in enumerate(contexts)
    ]
    traces += [_reference(reference, colors[reference.setting.seq_len], (least, most)) for reference in references]
    traces += _best(place, (low, high), palette)
    figure_layout = layout(place, palette, _headline(measured, batch_size), _HEIGHT, b=_BOTTOM, l=80, r=190)
    figure_layout |= {
        "xaxis": axis(
            palette, "bucket size, MB, logarithmic", type="log", range=[math.log10(least), math.log10(most)],
            tickmode="array", tickvals=sizes, ticktext=[f"{size:g}" for size in sizes],
        ),
        "yaxis": axis(palette, "step, ms, with the spread of its median", range=[low, high]),
        "annotations": [*_labels(references, colors, (low, high)), *_best_label(place, palette)],
    }  # fmt: skip
    return go.Figure(traces, figure_layout)


def batch_sizes(place: PlaceResults) -> list[int]:
    """The batch sizes for which several bucket sizes were measured."""
    found: dict[int, set[float | None]] = {}
    for bucket in _buckets(place.summaries):
        found.setdefault(bucket.setting.local_batch_size, set()).add(bucket.setting.bucket_size_mb)
    return sorted(batch for batch, sizes in found.items() if len(sizes) > 1)


def _buckets(summaries: Sequence[SettingSummary]) -> list[SettingSummary]:
    return [
        summary
        for summary in summaries
        if summary.timing.step_ns and summary.setting.variant == BUCKETED and summary.setting.bucket_size_mb is not None
    ]


def _best_mb(place: PlaceResults) -> float | None:
    return place.model.best_bytes / BYTES_PER_MB if place.model and place.model.best_bytes else None


def _range(measured: Sequence[SettingSummary]) -> tuple[float, float]:
    """All values in ms, those of buckets with their spreads, and room above and below."""
    values = [value_ms(summary.timing.step_ns) or 0.0 for summary in measured]
    buckets = [
        (value_ms(bucket.timing.step_ns) or 0.0, half_ms(bucket.timing.step_ns) or 0.0) for bucket in _buckets(measured)
    ]
    low = min([*values, *(value - half for value, half in buckets)], default=0.0)
    high = max([*values, *(value + half for value, half in buckets)], default=1.0)
    room = 0.05 * (high - low) or 1
    return max(0.0, low - room), high + room


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
        "hovertemplate": f"context {context}, %{{customdata:g}} MB: %{{y:.2f}} ms<extra></extra>",
    }  # fmt: skip


def _reference(summary: SettingSummary, color: str, sizes: tuple[float, float]) -> dict[str, Any]:
    step_ms = value_ms(summary.timing.step_ns)
    return {
        "type": "scatter", "mode": "lines", "showlegend": False, "x": list(sizes), "y": [step_ms, step_ms],
        "line": {"color": color, "width": 1.3, "dash": _DASHES[summary.setting.variant]},
        "hovertemplate": f"{shown_name(_name(summary))}: %{{y:.2f}} ms<extra></extra>",
    }  # fmt: skip


def _name(summary: SettingSummary) -> str:
    return f"{summary.setting.label}, context {summary.setting.seq_len}"


def _labels(
    references: Sequence[SettingSummary], colors: dict[int, str], limits: tuple[float, float]
) -> list[dict[str, Any]]:
    """The names of the reference lines at the right, pushed apart where they would cover each other."""
    low, high = limits
    least = _LABEL_PX * (high - low) / (_HEIGHT - TOP - _BOTTOM)
    ordered = sorted(references, key=lambda reference: value_ms(reference.timing.step_ns) or 0.0)
    heights = _apart([value_ms(summary.timing.step_ns) or 0.0 for summary in ordered], least)
    return [
        {
            "xref": "paper", "x": 1, "xanchor": "left", "xshift": 8, "yref": "y", "y": height, "showarrow": False,
            "text": shown_name(_name(summary)), "font": {"color": colors[summary.setting.seq_len]},
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


def _best(place: PlaceResults, limits: tuple[float, float], palette: Palette) -> list[dict[str, Any]]:
    best_mb = _best_mb(place)
    if best_mb is None:
        return []
    return [
        {
            "type": "scatter", "mode": "lines", "showlegend": False, "x": [best_mb, best_mb], "y": list(limits),
            "line": {"color": palette.quiet, "width": 1, "dash": "dot"}, "hoverinfo": "skip",
        }
    ]  # fmt: skip


def _best_label(place: PlaceResults, palette: Palette) -> list[dict[str, Any]]:
    best_mb = _best_mb(place)
    if best_mb is None:
        return []
    return [
        {
            "xref": "x", "x": math.log10(best_mb), "yref": "paper", "y": 0, "yanchor": "bottom", "xanchor": "left",
            "xshift": 4, "showarrow": False, "text": f"the model's best: {theme.size(round(best_mb * BYTES_PER_MB))}",
            "font": {"color": palette.quiet},
        }
    ]  # fmt: skip


def _headline(measured: Sequence[SettingSummary], batch_size: int) -> str:
    return f"Step time by bucket size, batch {batch_size} a rank" if measured else "No setting was measured"
