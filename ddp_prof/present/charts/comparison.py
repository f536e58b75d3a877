"""Runs side by side: how a step's time divides, and how much of the communication hides, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_prof.present import theme
from ddp_prof.present.charts.frame import LEGEND, chart_frame, run_label
from ddp_prof.present.text import percent, shown_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

    from ddp_prof.analyze.overlap.comparison import VariantSummary
    from ddp_prof.analyze.overlap.overlap import TraceOverlap
    from ddp_prof.present.theme import Palette

_TOP, _ROW, _BOTTOM, _LEFT = 150, 46, 64, 170


def draw_comparison(
    results: Sequence[TraceOverlap], summaries: Sequence[VariantSummary], palette: Palette = theme.LIGHT
) -> go.Figure:
    """A row a run, in the order given: at the left the median step by parts, at the right the overlap of each step."""
    import plotly.graph_objects as go

    figure = go.Figure([*_split_bars(summaries, palette), *_step_dots(results, palette), _totals(results, palette)])
    figure.update_layout(_layout(results, summaries, palette))
    return figure


def parts_ms(summary: VariantSummary) -> dict[str, float]:
    """Median length in milliseconds of each part of a step's window, as in the table; empty without steps."""
    return {part: (getattr(summary, f"{part}_ns") or 0) / 1e6 for part in theme.STRIP if summary.steps}


def overlap_ratio(result: TraceOverlap) -> float | None:
    """Share of all communication of all ranks that compute hides; ``None`` where there is none."""
    comm_ns = sum(rank.comm_ns or 0 for rank in result.ranks)
    return sum(rank.overlapped_ns or 0 for rank in result.ranks) / comm_ns if comm_ns else None


def _split_bars(summaries: Sequence[VariantSummary], palette: Palette) -> list[dict[str, Any]]:
    parts = [parts_ms(summary) for summary in summaries]
    return [
        {
            "type": "bar", "orientation": "h", "name": theme.LEGEND[part], "width": 0.62,
            "x": lengths, "y": list(range(len(summaries))),
            "text": [f"{length:.3g}" if length else "" for length in lengths],
            "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
            "hovertext": [
                f"<b>{shown_name(summary.label)}: {theme.LEGEND[part]}</b><br>{length:.3f} ms a step"
                for summary, length in zip(summaries, lengths, strict=True)
            ],
            "hovertemplate": "%{hovertext}<extra></extra>",
            "marker": {"color": palette.colors[part], "line": {"width": 0.8, "color": palette.paper}},
        }
        for part in theme.STRIP
        if any(lengths := [item.get(part, 0.0) for item in parts])
    ]  # fmt: skip


def _step_dots(results: Sequence[TraceOverlap], palette: Palette) -> list[dict[str, Any]]:
    """A dot a step of each rank, spread a little in height so that equal ones are seen."""
    dots = []
    for row, result in enumerate(results):
        known = [
            (rank, step) for rank in result.ranks for step in rank.steps if step.comm_ns and step.host_ns is not None
        ]
        shares = [100 * step.overlapped_ns / step.comm_ns for _, step in known]
        dots.append(
            {
                "type": "scatter", "mode": "markers", "xaxis": "x2", "showlegend": row == 0, "legendgroup": "dots",
                "name": "overlap of one step of one rank",
                "x": shares, "y": [row + spread for spread in _spread(len(shares))],
                "hovertext": [
                    f"<b>{shown_name(result.label)}</b><br>step {step.step}, "
                    f"{'process ' + str(rank.process) if rank.rank is None else 'rank ' + str(rank.rank)}<br>"
                    f"{share:.1f} % of {step.comm_ns / 1e6:.3f} ms communication overlapped"
                    for (rank, step), share in zip(known, shares, strict=True)
                ],
                "hovertemplate": "%{hovertext}<extra></extra>",
                "marker": {"color": palette.colors[theme.OVERLAPPED], "size": 7, "opacity": 0.45},
            }
        )  # fmt: skip
    return dots


def _spread(count: int) -> list[float]:
    """Heights within the row that repeat only after many points: multiples of the golden ratio, modulo 1."""
    return [0.44 * ((index * 0.618034) % 1 - 0.5) for index in range(count)]


def _totals(results: Sequence[TraceOverlap], palette: Palette) -> dict[str, Any]:
    shares = [(row, 100 * ratio) for row, result in enumerate(results) if (ratio := overlap_ratio(result)) is not None]
    return {
        "type": "scatter", "mode": "markers", "xaxis": "x2", "name": "overlap of all communication",
        "x": [share for _, share in shares], "y": [row for row, _ in shares],
        "hovertemplate": "%{x:.1f} % of all communication overlapped<extra></extra>",
        "marker": {"symbol": "line-ns", "size": 22, "line": {"width": 3, "color": palette.text}, "color": palette.text},
    }  # fmt: skip


def _layout(results: Sequence[TraceOverlap], summaries: Sequence[VariantSummary], palette: Palette) -> dict[str, Any]:
    axis = {"gridcolor": palette.line, "zeroline": False, "tickfont": {"color": palette.quiet}, "fixedrange": True}
    title = {"color": palette.quiet, "size": theme.FONT_SIZE}
    longest = max((sum(parts_ms(summary).values()) for summary in summaries), default=0)
    return {
        **chart_frame(
            palette,
            title=_headline(results),
            subtitle=subtitle(results, palette),
            height=_TOP + _BOTTOM + _ROW * max(1, len(results)), t=_TOP, b=_BOTTOM, l=_LEFT, r=90,
        ),
        "barmode": "stack",
        "uniformtext": {"mode": "hide", "minsize": theme.FONT_SIZE - 1},
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "font": {"family": theme.FONT, "size": 13}},
        "dragmode": False,
        "legend": {**LEGEND, "traceorder": "normal"},
        "xaxis": {
            **axis, "domain": [0, 0.58], "range": [0, longest * 1.02 or 1],
            "title": {"text": "median step by parts, ms, over steps and ranks", "font": title, "standoff": 8},
        },
        "xaxis2": {
            **axis, "domain": [0.66, 1], "range": [-4, 104], "anchor": "y", "ticksuffix": " %",
            "title": {"text": "communication overlapped by compute", "font": title, "standoff": 8},
        },
        "yaxis": {
            "tickmode": "array", "tickvals": list(range(len(results))),
            "ticktext": [run_label(result.label) for result in results], "tickfont": {"size": 13},
            "range": [len(results) - 0.5, -0.5], "showgrid": False, "zeroline": False, "fixedrange": True,
        },
        "annotations": [_share_label(row, result) for row, result in enumerate(results)],
    }  # fmt: skip


def _share_label(row: int, result: TraceOverlap) -> dict[str, Any]:
    return {
        "xref": "paper", "x": 1, "xanchor": "left", "xshift": 14, "yref": "y", "y": row, "showarrow": False,
        "text": f"<b>{percent(overlap_ratio(result))}</b>", "font": {"size": 16},
    }  # fmt: skip


def _headline(results: Sequence[TraceOverlap]) -> str:
    known = [(ratio, result.label) for result in results if (ratio := overlap_ratio(result)) is not None]
    if not known:
        return "No communication was recorded"
    (least, worst), (most, best) = min(known), max(known)
    if percent(least) == percent(most):
        return f"{percent(most)} of the communication hides behind compute"
    return (
        f"From {percent(least)} ({shown_name(worst)}) to {percent(most)} ({shown_name(best)}) "
        "of the communication hides behind compute"
    )


def subtitle(results: Sequence[TraceOverlap], palette: Palette) -> str:
    """What a figure of runs must say: on which device, of how many ranks."""
    caveats = {caveat for result in results for caveat in result.caveats}
    text = theme.place_notice((result.device for result in results), caveats, palette)
    ranks = sorted({len(result.ranks) for result in results})
    return f"{text}  ·  {'/'.join(map(str, ranks))} {'rank' if ranks == [1] else 'ranks'}  ·  warm-up left out"
