"""Draws where the time of each rank goes: one bar per rank, the rank that arrives last on top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddp_prof.analyze.collectives.skew import RunSkew
from ddp_prof.analyze.overlap import RankOverlap, TraceOverlap
from ddp_prof.columns import milliseconds
from ddp_prof.present import theme
from ddp_prof.present.charts import LEGEND, STILL, Chart, axis, make_chart, rows_axis
from ddp_prof.present.charts.comparison import subtitle
from ddp_prof.present.skew_headlines import late_text
from ddp_prof.present.text import shown_name

MOST_RANKS = 128
"""Most ranks that are drawn; of more ranks, those with the most exposed time."""
_BAR, _LEAST_BAR = 26, 14
"""Height of a bar in pixels, up to ``_MANY`` bars and beyond."""
_MANY = 16


class RankBar(NamedTuple):
    """A rank of a run, and how its time is divided.

    Attributes:
        run: Label of the run.
        rank: Name of the rank.
        parts_ns: Nanoseconds in each part (see ``theme.STRIP``) of the mean step; without steps, of the whole capture.
        mark: Text beside the bar, for the rank that arrives last.
    """

    run: str
    rank: str
    parts_ns: dict[str, float]
    mark: str = ""


def rank_bars(result: TraceOverlap, skew: RunSkew) -> list[RankBar]:
    """Return the bars of a run: first the rank that arrives last, with a mark, then the others in their order.

    Ranks without known figures are left out. If at least one rank has steps, bars show mean steps, and ranks whose
    steps cannot be divided are left out, too: a whole capture cannot be compared with a step.
    """
    find = _parts_of_step_ns if _has_steps(result) else _parts_of_capture_ns
    parts = [(rank.name, find(rank)) for rank in result.ranks if not rank.reason]
    bars = [RankBar(result.label, name, parts_ns) for name, parts_ns in parts if parts_ns]
    late = skew.latest.name if skew.latest else None
    marked = [bar._replace(mark=late_text(skew)) for bar in bars if bar.rank == late]
    return [*marked, *(bar for bar in bars if bar.rank != late)]


def _parts_of_step_ns(rank: RankOverlap) -> dict[str, float] | None:
    """Return the parts of the rank's mean step; ``None`` if they are not known.

    They are means because the means of parts sum to the mean step; medians would not sum.
    """
    lengths = [step.length for step in rank.timed_steps]
    if not lengths or any(length.exposed_ns is None for length in lengths):
        return None
    return {part: sum(getattr(length, f"{part}_ns") or 0 for length in lengths) / len(lengths) for part in theme.STRIP}


def _parts_of_capture_ns(rank: RankOverlap) -> dict[str, float]:
    """Return the known parts of the whole capture: compute only, overlapped and exposed communication."""
    known = ((rank.compute_ns or 0) - (rank.overlapped_ns or 0), rank.overlapped_ns or 0, rank.exposed_ns or 0)
    return dict(zip((theme.COMPUTE_ONLY, theme.OVERLAPPED, theme.EXPOSED), known, strict=True))


def draw_ranks(result: TraceOverlap, skew: RunSkew) -> Chart | None:
    """Draw one stacked bar per rank of a run; return ``None`` if fewer than two ranks have a bar."""
    bars = rank_bars(result, skew)
    if len(bars) < 2:
        return None
    shown = bars
    # The marked rank is always drawn.
    if len(bars) > MOST_RANKS:
        most = sorted(bars, key=lambda bar: (not bar.mark, -bar.parts_ns[theme.EXPOSED]))[:MOST_RANKS]
        shown = [bar for bar in bars if bar in most]
    # One Plotly trace for each part that at least one rank has.
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
    """Whether at least one rank has a step of known length."""
    return any(rank.timed_steps for rank in result.ranks)


def _title(shown: Sequence[RankBar], ranks: int) -> str:
    """Return the title: from which to which exposed time the bars range.

    Args:
        shown: The bars that are drawn.
        ranks: Number of ranks that could have been drawn.
    """
    exposed = sorted((bar.parts_ns[theme.EXPOSED], bar.rank) for bar in shown)
    (least, first), (most, last) = exposed[0], exposed[-1]
    of_ranks = f"{len(shown)} of {ranks} ranks, those with the most: " if len(shown) < ranks else ""
    if not most:
        return f"{of_ranks}No rank exposes communication"
    ends = f"{milliseconds(round(least))} ({shown_name(first)}) to {milliseconds(round(most))} ({shown_name(last)})"
    return f"{of_ranks}A rank exposes {ends} of communication"
