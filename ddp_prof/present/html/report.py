"""A folder to open in a browser: one page that tells of a set of runs, and a timeline of each.

It works from disk and without network; its pages share one plotly.js.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_prof.present.charts.collectives import draw_step_collectives
from ddp_prof.present.charts.comparison import draw_comparison
from ddp_prof.present.charts.heat_map import LEAST_RANKS, draw_heat_map
from ddp_prof.present.charts.static_images import Pictures
from ddp_prof.present.charts.steps import draw_overlap_by_step, draw_step_times
from ddp_prof.present.charts.straggler import draw_skew
from ddp_prof.present.charts.waterfall import draw_waterfall
from ddp_prof.present.columns import columns_of
from ddp_prof.present.headlines import Headline
from ddp_prof.present.html.index import INDEX, KERNELS, TIMELINE, WHY, index_values, place_values
from ddp_prof.present.html.page import Link, Navigation, asset, write_page
from ddp_prof.present.html.timeline_page import write_timeline_page
from ddp_prof.present.timeline.build import build_excerpt, build_timeline
from ddp_prof.present.timeline.figure import draw_timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    import plotly.graph_objects as go

    from ddp_prof.analyze.variants.waterfall import Waterfall
    from ddp_prof.present.columns import Column, Row
    from ddp_prof.present.html.report_run import ReportRun

WATERFALL = "waterfall"
"""Name of the chart that tells what the runs changed of each other."""
CHARTS = ("comparison", "overlap-by-step", "step-times")
"""Names of the charts of all runs, in the order of the page."""


def write_report(
    runs: Sequence[ReportRun],
    folder: Path,
    waterfall: Waterfall | None = None,
    begin: Callable[[str], None] = lambda _part: None,
    pictures: Pictures | None = None,
) -> list[str]:
    """Write ``index.html``, a page and a picture of each run's timeline, and a page on why it is exposed.

    Args:
        runs: The runs in the order in which they are told of.
        folder: Made where it is missing; files of the same names are replaced.
        waterfall: What the runs changed of each other.
        begin: Called with the name of each part of the work when it begins: the pages of each run, the pictures.
        pictures: Who draws them, where a browser was started before.

    Returns:
        What could not be made, a line each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = _file_names(run.name for run in runs)
    runs = [replace(run, name=name) for name, run in zip(names, runs, strict=True)]
    results, summaries = [run.result for run in runs], [run.summary for run in runs]
    figures = (draw_comparison(results, summaries), draw_overlap_by_step(results), draw_step_times(results))
    charts = {name: figure for name, figure in zip(CHARTS, figures, strict=True) if _shows_something(figure)}
    if waterfall is not None and waterfall.changes:
        charts[WATERFALL] = draw_waterfall(waterfall)
    with nullcontext(pictures) if pictures else Pictures() as drawing:
        for name, chart in charts.items():
            drawing.draw(chart, folder / f"{name}.png")
        for at, run in enumerate(runs):
            begin(f"pages of {run.result.label}")
            sources, path = run.load_sources(), folder / f"{run.name}.html"
            drawing.draw(draw_timeline(build_excerpt(sources)), folder / f"{run.name}.png")
            model, navigation = build_timeline(sources), _navigation(runs, at, TIMELINE)
            del sources  # the events take more memory than all that is drawn
            write_timeline_page(model, path, navigation=navigation, shared_plotly=True)
            del model
            _write_why_page(run, folder, _navigation(runs, at, WHY))
            _write_kernels_page(run, folder, _navigation(runs, at, KERNELS))
        begin("pictures")
        problems = drawing.try_finish()
    write_page(
        folder / f"{INDEX}.html",
        "index.html",
        index_values(runs, [name for name in CHARTS if name in charts], pictures=not problems),
        title="Communication behind compute",
        figures=charts,
        css=asset("index.css") + asset("tables.css"),
        script=asset("tables.js"),
        shared_plotly=True,
    )
    return problems


def _shows_something(figure: go.Figure) -> bool:
    """Captures without steps, or without communication, leave some charts empty."""
    return any(len(trace.x) for trace in figure.data)


_PAGES = {TIMELINE: "timeline", WHY: "why it is exposed", KERNELS: "kernels"}
"""The pages of a run: how their names end, and what links to them say."""


def _navigation(runs: Sequence[ReportRun], at: int, here: str) -> Navigation:
    """From a page of a run to its other ones, and to those of its neighbours.

    Args:
        runs: All of them.
        at: The run's position.
        here: A key of ``_PAGES``.
    """
    name = runs[at].name
    links = [
        Link(title, f"{name}{end}.html", keeps_step=KERNELS not in (here, end))
        for end, title in _PAGES.items()
        if end != here
    ]
    for other, relation in ((at - 1, "prev"), (at + 1, "next")):
        if 0 <= other < len(runs):
            links.append(Link(runs[other].result.label, f"{runs[other].name}{here}.html", relation))
    return Navigation(f"{INDEX}.html", tuple(links))


def _write_why_page(run: ReportRun, folder: Path, navigation: Navigation) -> None:
    """The collectives of each step, of which one is seen, and who was late in which."""
    found, cause, step = run.explanation, run.cause, run.typical_step
    of_what = "a step" if found.run.has_steps else "the capture"
    title = Headline(f"The collectives of {of_what}")  # the cause is the page's heading
    drawn = {number: draw_step_collectives(found.run, number, ranks, title) for number, ranks in run.steps.items()}
    figures = {} if step is None else {"collectives": drawn[step]}
    steps = list(drawn) if found.run.has_steps else []
    figures |= {f"step-{number}": drawn[number] for number in steps}
    if len(run.result.ranks) >= LEAST_RANKS:
        figures["skew"] = draw_heat_map(run.result, found.skew)
    elif found.skew.reason is None:
        figures["skew"] = draw_skew(found.run, found.skew)
    heading = f"{run.result.label}: {cause.claim[:1].lower()}{cause.claim[1:]}"
    write_page(
        folder / f"{run.name}{WHY}.html",
        "why.html",
        {"heading": heading, "detail": cause.detail, "steps": steps, "typical": step},
        title=heading,
        navigation=navigation,
        figures=figures,
        script=asset("why.js"),
        shared_plotly=True,
    )


def _write_kernels_page(run: ReportRun, folder: Path, navigation: Navigation) -> None:
    """Which kernels took the time, what hid communication, why devices were idle."""
    heading = f"{run.result.label}: what took the time"
    views = [(view, _telling_columns(view.rows_to_read)) for view in run.use.values()]
    write_page(
        folder / f"{run.name}{KERNELS}.html",
        "kernels.html",
        {"heading": heading, **place_values([run]), "views": views},
        title=heading,
        navigation=navigation,
        css=asset("tables.css"),
        script=asset("tables.js"),
        shared_plotly=True,
    )


def _telling_columns(rows: Sequence[Row]) -> list[Column]:
    """The columns in which something is known, without the run, which is all of the page's."""
    return [column for column in columns_of(rows) if column.key != "run" and any(row[column.key] for row in rows)]


def _file_names(names: Iterable[str]) -> list[str]:
    """Names that every file system and address takes, each once."""
    taken = {INDEX, WATERFALL, *CHARTS}
    result = []
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "trace"
        numbered = (plain, *(f"{plain}-{number}" for number in range(2, 10_000)))
        free = next(name for name in numbered if not {f"{name}{end}" for end in _PAGES} & taken)
        taken |= {f"{free}{end}" for end in _PAGES}
        result.append(free)
    return result
