"""Writes the result of a tuning as an HTML page: what to write, the gain of each try, the rounds, and why."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_prof import __version__
from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.columns import Row, capitalized, count_noun
from ddp_prof.present import theme
from ddp_prof.present.charts import LEGEND, STILL, Chart, axis, make_chart, rows_axis, run_label
from ddp_prof.present.charts.comparison import draw_waterfall
from ddp_prof.present.columns import columns_of, in_percent, ms
from ddp_prof.present.html.page import asset, write_page
from ddp_prof.present.tables.compare import HOW_TO_READ_CHANGES, change_rows, changed_text, compare_rows, how_to_read
from ddp_prof.present.text import shown_name
from ddp_prof.runs.run import are_one_variant, changes_between, compare_steps
from ddp_prof.tune.report import HOW_TO_READ, IN_PROCESS, conclusion_of, place_of, rows_of, sentence_of, why_view
from ddp_prof.tune.sequential import Gain
from ddp_prof.tune.session import Tuning
from ddp_prof.tune.tries import TODAY
from ddp_prof.tune.verdicts import Verdict
from ddp_prof.tune.why import Why

_MOST_MARKS = 10
"""The most rounds that an axis names. Plotly's own marks would also lie between rounds and repeat numbers."""


def write_tuning_page(tuning: Tuning, path: Path, why: Why | None = None) -> None:
    """Write the page, which works offline.

    With ``why`` it also compares the captures of today's settings and of the best try.
    """
    rows = rows_of(tuning)
    heading, *more = conclusion_of(tuning)
    values = {
        "heading": capitalized(heading),
        "story": [*(sentence_of(each, tuning.limits.worth) for each in tuning.verdicts), *more],
        "place": place_of(tuning),
        "version": __version__,
        "rows": rows,
        "columns": columns_of(rows),
        "how_to_read": f"{HOW_TO_READ}; {IN_PROCESS}" if tuning.program.in_process else HOW_TO_READ,
        "facts": _facts(tuning),
        "why": _why_values(why) if why else None,
    }
    figures = {"gains": draw_gains(tuning), "rounds": draw_rounds(tuning)}
    if why:
        figures["waterfall"] = draw_waterfall(compare_steps(why.runs))
    css = asset("index.css") + asset("tables.css")
    scripts = ["html/assets/tables.js"]
    write_page(path, "tune.html", values, title=heading, figures=figures, css=css, scripts=scripts)


def _measured_unit(tuning: Tuning) -> str:
    """Return what of a round measures one try: a run, or a block of steps of the one run of ``--in-process``."""
    return "block" if tuning.program.in_process else "run"


def _facts(tuning: Tuning) -> list[tuple[str, str]]:
    """Return (label, text) pairs that say what was run: the program, its steps, the runs, the limit and the place."""
    program = tuning.program
    # Round 0 is not counted: today's first run, and runs of tries by themselves, for their losses.
    ran = [trial for trial in tuning.trials if trial.round]
    what = _measured_unit(tuning)
    warmup = "" if program.in_process else f"{count_noun(program.warmup, 'step')} of warm-up, "
    counted = f"{count_noun(len(ran), what)} in {count_noun(tuning.rounds, 'round')}"
    return [
        ("program", shlex.join(program.command)),
        (f"of each {what}", f"{warmup}{count_noun(program.steps, 'step')} measured"),
        (f"{what}s", f"{counted}: {tuning.ended}"),
        ("a difference is none below", f"{100 * tuning.limits.worth:g} % of the step (--worth)"),
        ("where", place_of(tuning)),
    ]


def _why_values(why: Why) -> Mapping[str, Any]:
    """Return what the template shows of the two captures: sentences on the gain, and the tables of ``compare``."""
    view = why_view(why)
    summaries = compare_variants([run.overlap() for run in why.runs])
    compared = compare_rows(summaries, [run.cost() for run in why.runs])
    changes = changes_between(*why.runs) if are_one_variant(why.runs) else ()
    changed = change_rows(changes)
    return {
        "story": view.title.splitlines()[1:],  # without the first line, a heading
        "foreseen": _table(view.rows, view.notes[0]),
        "changed": changed_text(changes) if changes else "",
        "changes": _table(changed, HOW_TO_READ_CHANGES),
        "compared": _table(compared, how_to_read(summaries)),
    }


def _table(rows: Sequence[Row], caption: str) -> Mapping[str, Any]:
    """Return a table for the template, without columns in which no row has a value."""
    columns = [one for one in columns_of(rows) if any(row[one.key] is not None for row in rows)]
    return {"rows": rows, "columns": columns, "caption": caption}


def draw_gains(tuning: Tuning) -> Chart:
    """Return a figure with a row for each try: a mark at its gain, and its interval as a bar.

    A filled mark is a try that is decided. The band around 0 contains gains that are too small to be worth having. With
    few pairs a gain has no interval; a try without a pair has an empty row.
    """
    verdicts, worth = tuning.verdicts, 100 * tuning.limits.worth
    known = [(at, each, each.gain) for at, each in enumerate(verdicts) if each.gain]
    with_interval = [one for one in known if one[2].low is not None and one[2].high is not None]
    # Drawn apart: even a bar of length 0 would show its two ends.
    alone = [one for one in known if one not in with_interval]
    traces = [_gain_marks(gains, tuning.limits.worth) for gains in (with_interval, alone) if gains]
    if with_interval:
        traces[0]["error_x"] = {
            "type": "data", "symmetric": False, "color": theme.LIGHT.text, "thickness": 1.6, "width": 6,
            "array": [100 * ((gain.high or 0) - gain.value) for _, _, gain in with_interval],
            "arrayminus": [100 * (gain.value - (gain.low or 0)) for _, _, gain in with_interval],
        }  # fmt: skip
    band = {
        "type": "rect", "xref": "x", "yref": "paper", "x0": -worth, "x1": worth, "y0": 0, "y1": 1, "layer": "below",
        "line": {"width": 0}, "fillcolor": theme.LIGHT.line, "opacity": 0.6,
    }  # fmt: skip
    return make_chart(
        traces, title="Gain of each try", height=44 * max(1, len(verdicts)), t=90, b=60, l=190, r=30, size=18, pad=16,
        subtitle=f"share of today's step that it takes off, with its interval; open: cannot be told; band: {worth:g} %",
        **STILL, shapes=[band],
        xaxis=axis("faster by, %", fixedrange=True, zeroline=True, zerolinecolor=theme.LIGHT.quiet),
        yaxis=rows_axis([run_label(each.tried.label) for each in verdicts]),
    )  # fmt: skip


def _gain_marks(gains: Sequence[tuple[int, Verdict, Gain]], worth: float) -> dict[str, Any]:
    """Return Plotly's trace of the marks of tries; each of ``gains`` is the try's row, verdict and gain."""
    return {
        "type": "scatter", "mode": "markers", "showlegend": False,
        "x": [in_percent(gain.value) for _, _, gain in gains], "y": [at for at, _, _ in gains],
        "marker": {
            "symbol": ["circle-open" if each.is_open else "circle" for _, each, _ in gains],
            "size": 11, "color": theme.LIGHT.text,
        },
        "hovertext": [shown_name(sentence_of(each, worth)) for _, each, _ in gains],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }  # fmt: skip


def draw_rounds(tuning: Tuning) -> Chart:
    """Return a figure of the median step of each run, or block, over the rounds, one line for each try.

    What disturbs a round shows in all of its runs.
    """
    what = _measured_unit(tuning)
    labels = [TODAY.label, *(each.tried.label for each in tuning.verdicts)]
    dashes = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
    symbols = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "triangle-down")
    traces = []
    for at, label in enumerate(labels):
        own = [trial for trial in tuning.trials if trial.round and trial.tried == label and trial.median_ns]
        if not own:
            continue
        color = theme.LIGHT.text if label == TODAY.label else theme.LIGHT.quiet
        traces.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": shown_name(label),
                "x": [trial.round for trial in own], "y": [ms(trial.median_ns) for trial in own],
                "line": {"color": color, "width": 1.6, "dash": dashes[at % len(dashes)]},
                "marker": {"symbol": symbols[at % len(symbols)], "size": 8},
                "hovertemplate": f"round %{{x}}: {shown_name(label)} %{{y:.2f}} ms<extra></extra>",
            }
        )  # fmt: skip
    return make_chart(
        traces, title=f"Each {what}, by rounds",
        subtitle=f"median step of the {what}, ms; only {what}s of one round are compared",
        height=300, t=110, b=60, l=70, r=30, size=18, pad=16, **STILL, legend=LEGEND,
        xaxis=axis("round", fixedrange=True, tick0=1, dtick=-(-tuning.rounds // _MOST_MARKS) or 1),
        yaxis=axis("ms", fixedrange=True, rangemode="tozero"),
    )  # fmt: skip
