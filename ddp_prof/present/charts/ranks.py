"""Draws where the time of each rank goes: one bar per rank, the latest one first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddp_prof.analyze.collectives.straggler import RunSkew
from ddp_prof.analyze.overlap import RankOverlap, TraceOverlap
from ddp_prof.present import theme
from ddp_prof.present.charts import LEGEND, STILL, Chart, axis, make_chart, rows_axis
from ddp_prof.present.charts.comparison import subtitle
from ddp_prof.present.headlines import late_text
from ddp_prof.present.text import milliseconds, shown_name

MOST_RANKS = 128
"""Ranks that are drawn: of more, those with the most exposed time."""
_BAR, _LEAST_BAR = 26, 14
"""Pixels of a bar, and of one of many."""
_MANY = 16


class RankBar(NamedTuple):
    """A rank of a run: where its mean step goes, in nanoseconds by part; without steps, its whole capture."""

    run: str
    rank: str
    parts_ns: dict[str, float]
    mark: str = ""


def rank_bars(result: TraceOverlap, skew: RunSkew) -> list[RankBar]:
    """Return the bars of a run: the rank that arrives last first and marked, the others in their order.

    Where a rank has steps, those of which the parts of a step are not known are left out: a capture is no step.
    """
    find = _parts_of_step_ns if _has_steps(result) else _parts_of_capture_ns
    parts = [(rank.name, find(rank)) for rank in result.ranks if not rank.reason]
    bars = [RankBar(result.label, name, parts_ns) for name, parts_ns in parts if parts_ns]
    late = skew.latest.name if skew.latest else None
    marked = [bar._replace(mark=late_text(skew)) for bar in bars if bar.rank == late]
    return [*marked, *(bar for bar in bars if bar.rank != late)]


def _parts_of_step_ns(rank: RankOverlap) -> dict[str, float] | None:
    """The parts of the mean step: means sum to the step as medians do not; ``None`` if not known."""
    lengths = [step.length for step in rank.timed_steps]
    if not lengths or any(length.exposed_ns is None for length in lengths):
        return None
    return {part: sum(getattr(length, f"{part}_ns") or 0 for length in lengths) / len(lengths) for part in theme.STRIP}


def _parts_of_capture_ns(rank: RankOverlap) -> dict[str, float]:
    known = ((rank.compute_ns or 0) - (rank.overlapped_ns or 0), rank.overlapped_ns or 0, rank.exposed_ns or 0)
    return dict(zip((theme.COMPUTE_ONLY, theme.OVERLAPPED, theme.EXPOSED), known, strict=True))


def draw_ranks(result: TraceOverlap, skew: RunSkew) -> Chart | None:
    """Draw one stacked bar per rank of a run; ``None`` for fewer than two ranks."""
    bars = rank_bars(result, skew)
    if len(bars) < 2:
        return None
    shown = bars
    if len(bars) > MOST_RANKS:
        most = sorted(bars, key=lambda bar: (not bar.mark, -bar.parts_ns[theme.EXPOSED]))[:MOST_RANKS]
        shown = [bar for bar in bars if bar in most]
    rows = list(range(len(shown)))
    traces = [
        {
            "type": "bar", "orientation": "h", "name": theme.LEGEND[part], "width": 0.72, "y": rows,
            "x": [ns / 1e6 for ns in lengths],
            "hovertext": [
                f"<b>{shown_name(bar.rank)}: {theme.LEGEND[part]}</b><br>{milliseconds(round(ns))}"
                for bar, ns in zip(shown, lengths, strict=True)
            ],
            "hovertemplate": "%{hovertext}<extra></extra>",
            "marker": {"color": theme.LIGHT.colors[part]},
        }
        for part in theme.STRIP
        if any(lengths := [bar.parts_ns.get(part, 0) for bar in shown])
    ]  # fmt: skip
    return make_chart(
        traces,
        title=_title(shown, len(bars)),
        subtitle=subtitle([result]),
        height=(_BAR if len(shown) <= _MANY else _LEAST_BAR) * len(shown), t=110, b=64, l=170, r=230,
        barmode="stack",
        **STILL,
        legend={**LEGEND, "traceorder": "normal"},
        xaxis=axis(
            "ms: of each part the mean over the rank's steps" if _has_steps(result) else "ms, in the whole capture",
            rangemode="tozero", fixedrange=True,
        ),
        yaxis=rows_axis(
            [f"<b>{shown_name(bar.rank)}</b>  " if bar.mark else f"{shown_name(bar.rank)}  " for bar in shown],
            tickfont={"size": 13 if len(shown) <= _MANY else 11},
        ),
        annotations=[
            {
                "xref": "paper", "x": 1, "xanchor": "left", "xshift": 10, "yref": "y", "y": row, "showarrow": False,
                "text": f"<b>{shown_name(bar.mark)}</b>", "font": {"color": theme.LIGHT.notice, "size": 13},
            }
            for row, bar in enumerate(shown)
            if bar.mark
        ],
    )  # fmt: skip


def _has_steps(result: TraceOverlap) -> bool:
    return any(rank.timed_steps for rank in result.ranks)


def _title(shown: Sequence[RankBar], ranks: int) -> str:
    exposed = sorted((bar.parts_ns[theme.EXPOSED], bar.rank) for bar in shown)
    (least, first), (most, last) = exposed[0], exposed[-1]
    of_ranks = f"{len(shown)} of {ranks} ranks, those with the most: " if len(shown) < ranks else ""
    if not most:
        return f"{of_ranks}No rank exposes communication"
    text = (
        f"From {milliseconds(round(least))} ({shown_name(first)}) to {milliseconds(round(most))} ({shown_name(last)})"
    )
    return f"{of_ranks}{text} of communication is exposed"
