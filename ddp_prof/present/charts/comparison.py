"""Runs side by side: how a step's time divides, and how much of the communication hides, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddp_prof.present import theme
from ddp_prof.present.charts.frame import LEGEND, STILL, axis, chart_frame, rows_axis, run_label
from ddp_prof.present.text import percent, shown_name

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ddp_prof.analyze.overlap import TraceOverlap
    from ddp_prof.analyze.variants.comparison import VariantSummary

_THIN = 0.04
"""Share of the chart's width below which a bar cannot hold its number."""
_TOP, _ROW, _BOTTOM, _LEFT = 150, 46, 64, 170


def draw_comparison(results: Sequence[TraceOverlap], summaries: Sequence[VariantSummary]) -> go.Figure:
    """One row per run, in the order given: left the median step by parts, right the overlap of each step."""
    import plotly.graph_objects as go

    return go.Figure(
        [*_step_part_bars(summaries), *_step_dots(results), _totals(summaries)], _layout(results, summaries)
    )


def parts_ms(summary: VariantSummary) -> dict[str, float]:
    """Median length in milliseconds of each part of a step, as in the table; empty without steps."""
    return {part: (getattr(summary, f"{part}_ns") or 0) / 1e6 for part in theme.STRIP if summary.steps}


def _step_part_bars(summaries: Sequence[VariantSummary]) -> list[dict[str, Any]]:
    parts = [parts_ms(summary) for summary in summaries]
    return [
        {
            "type": "bar", "orientation": "h", "name": theme.LEGEND[part], "width": 0.62,
            "x": lengths, "y": list(range(len(summaries))),
            "text": [f"{length:.3g}" if length else "" for length in lengths],
            "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
            "hovertext": [
                f"<b>{shown_name(summary.label)}: {theme.LEGEND[part]}</b><br>{length:.3f} ms per step"
                for summary, length in zip(summaries, lengths, strict=True)
            ],
            "hovertemplate": "%{hovertext}<extra></extra>",
            "marker": {"color": theme.LIGHT.colors[part], "line": {"width": 0.8, "color": theme.LIGHT.paper}},
        }
        for part in theme.STRIP
        if any(lengths := [item.get(part, 0.0) for item in parts])
    ]  # fmt: skip


def _step_dots(results: Sequence[TraceOverlap]) -> list[dict[str, Any]]:
    """One dot per step of each rank; equal ones are spread in height."""
    dots = []
    for row, result in enumerate(results):
        known = [
            (rank, names[step.step_key], step)
            for rank, names in ((rank, rank.step_names) for rank in result.ranks)
            for step in rank.communicating_steps
        ]
        shares = [100 * (step.overlap_ratio or 0) for _, _, step in known]
        dots.append(
            {
                "type": "scatter", "mode": "markers", "xaxis": "x2", "showlegend": row == 0, "legendgroup": "dots",
                "name": "overlap of one step of one rank",
                "x": shares, "y": [row + spread for spread in _spread(len(shares))],
                "hovertext": [
                    f"<b>{shown_name(result.label)}</b><br>{name}, {shown_name(rank.name)}<br>"
                    f"{share:.1f} % of {(step.comm_ns or 0) / 1e6:.3f} ms communication overlapped"
                    for (rank, name, step), share in zip(known, shares, strict=True)
                ],
                "hovertemplate": "%{hovertext}<extra></extra>",
                "marker": {"color": theme.LIGHT.colors[theme.OVERLAPPED], "size": 7, "opacity": 0.45},
            }
        )  # fmt: skip
    return dots


def _spread(count: int) -> list[float]:
    """Heights within the row that repeat only after many points: multiples of the golden ratio, modulo 1."""
    return [0.44 * ((index * 0.618034) % 1 - 0.5) for index in range(count)]


def _totals(summaries: Sequence[VariantSummary]) -> dict[str, Any]:
    ratios = enumerate(summary.overlap_ratio for summary in summaries)
    shares = [(row, 100 * ratio) for row, ratio in ratios if ratio is not None]
    return {
        "type": "scatter", "mode": "markers", "xaxis": "x2", "name": "overlap of all communication",
        "x": [share for _, share in shares], "y": [row for row, _ in shares],
        "hovertemplate": "%{x:.1f} % of all communication overlapped<extra></extra>",
        "marker": {
            "symbol": "line-ns", "size": 22, "line": {"width": 3, "color": theme.LIGHT.text}, "color": theme.LIGHT.text,
        },
    }  # fmt: skip


def _layout(results: Sequence[TraceOverlap], summaries: Sequence[VariantSummary]) -> dict[str, Any]:
    longest = max((sum(parts_ms(summary).values()) for summary in summaries), default=0)
    return {
        **chart_frame(
            title=_headline(summaries),
            subtitle=subtitle(results),
            height=_TOP + _BOTTOM + _ROW * max(1, len(results)), t=_TOP, b=_BOTTOM, l=_LEFT, r=90,
        ),
        "barmode": "stack",
        "uniformtext": {"mode": "hide", "minsize": theme.FONT_SIZE - 1},
        **STILL,
        "legend": {**LEGEND, "traceorder": "normal"},
        "xaxis": axis(
            "parts of a step, ms: of each the median over steps and ranks",
            domain=[0, 0.58], range=[0, longest * 1.02 or 1], fixedrange=True, visible=bool(longest),
        ),
        "xaxis2": axis(
            "communication overlapped by compute",
            domain=[0.66 if longest else 0, 1], range=[-4, 104], anchor="y", ticksuffix=" %", fixedrange=True,
        ),
        "yaxis": rows_axis([run_label(result.label) for result in results], tickfont={"size": 13}),
        "annotations": [
            *(_share_label(row, summary) for row, summary in enumerate(summaries)),
            *_thin_labels([parts_ms(summary) for summary in summaries], longest),
        ],
    }  # fmt: skip


def _thin_labels(rows: Sequence[Mapping[str, float]], longest: float) -> Iterator[dict[str, Any]]:
    """The number of each exposed part that is too thin to hold it, above the part."""
    for row, parts in enumerate(rows):
        exposed = parts.get(theme.EXPOSED, 0)
        if 0 < exposed < _THIN * longest:
            yield {
                "xref": "x", "x": parts[theme.COMPUTE_ONLY] + parts[theme.OVERLAPPED] + exposed / 2, "yref": "y",
                "y": row, "yshift": 19, "showarrow": False, "text": f"{exposed:.3g}",
                "font": {"size": theme.FONT_SIZE - 1, "color": theme.LIGHT.colors[theme.EXPOSED]},
            }  # fmt: skip


def _share_label(row: int, summary: VariantSummary) -> dict[str, Any]:
    return {
        "xref": "paper", "x": 1, "xanchor": "left", "xshift": 14, "yref": "y", "y": row, "showarrow": False,
        "text": f"<b>{percent(summary.overlap_ratio)}</b>", "font": {"size": 16},
    }  # fmt: skip


def _headline(summaries: Sequence[VariantSummary]) -> str:
    known = [(summary.overlap_ratio, summary.label) for summary in summaries if summary.overlap_ratio is not None]
    if not known:
        return "How much communication hides is not known"
    (least, worst), (most, best) = min(known), max(known)
    if percent(least) == percent(most):
        return f"{percent(most)} of the communication hides behind compute"
    return (
        f"From {percent(least)} ({shown_name(worst)}) to {percent(most)} ({shown_name(best)}) "
        "of the communication hides behind compute"
    )


def subtitle(results: Sequence[TraceOverlap]) -> str:
    """Subtitle of a figure of runs: device and number of ranks."""
    caveats = {caveat for result in results for caveat in result.caveats}
    text = theme.device_notice((result.device for result in results), caveats)
    ranks = sorted({len(result.ranks) for result in results})
    return f"{text}  ·  {'/'.join(map(str, ranks))} {'rank' if ranks == [1] else 'ranks'}"
