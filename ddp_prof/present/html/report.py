"""A report: a folder with one page about all runs, and several pages about each run.

It works offline, from the disk; its pages share one plotly.js.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ddp_prof.analyze.collectives.results import Collective, RunCollectives
from ddp_prof.analyze.collectives.straggler import RankStepView
from ddp_prof.analyze.variants.waterfall import Waterfall
from ddp_prof.errors import TraceError
from ddp_prof.present.charts import Chart
from ddp_prof.present.charts.collectives import draw_step_collectives
from ddp_prof.present.charts.comparison import draw_comparison, draw_overlap_by_step, draw_step_times, draw_waterfall
from ddp_prof.present.charts.ranks import draw_skew
from ddp_prof.present.charts.static_images import Pictures
from ddp_prof.present.columns import Column, Row, columns_of
from ddp_prof.present.headlines import Headline, gain_headline, step_lengths
from ddp_prof.present.html import index
from ddp_prof.present.html.index import ReportRun
from ddp_prof.present.html.page import asset, json_in_page, write_page, write_shared_plotly
from ddp_prof.present.html.timeline_page import write_timeline_page
from ddp_prof.present.tables.collectives import rows_of_step
from ddp_prof.present.text import plain_name
from ddp_prof.present.timeline.build import build_excerpt, build_timeline
from ddp_prof.present.timeline.encoding import LONGEST_TITLE
from ddp_prof.present.timeline.figure import draw_timeline

PagesOutcome = tuple[int, Chart | TraceError | None]
"""The position of a run, and its picture (``None`` for no picture) or the reason why its pages are missing."""

WATERFALL = "waterfall"
"""Name of the chart of the changes from run to run."""


class Place(NamedTuple):
    """The place of a run in a report.

    Attributes:
        name: Name of its pages.
        before, after: Name and label of the neighbouring runs.
        is_drawn: Whether to draw a picture of its timeline.
    """

    name: str
    before: tuple[str, str] | None
    after: tuple[str, str] | None
    is_drawn: bool


def write_report(
    runs: Sequence[ReportRun],
    folder: Path,
    waterfall: Waterfall | None = None,
    pictures: Pictures | None = None,
    *,
    make_pages: Callable[[Sequence[Place]], Generator[PagesOutcome]] | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[str]:
    """Write ``index.html``, then the pages of each run, then the index again.

    Args:
        runs: The runs.
        folder: Where to write.
        waterfall: Changes from run to run.
        pictures: Draws the pictures; by default a new browser does.
        make_pages: Writes the pages of the runs in any order; by default this process does, in turn.
        progress: Called with the number of runs that have their pages (0 when the first index is written) and the
            number of all runs.

    Returns:
        What could not be made, one line each.
    """
    names = _page_names(run.name for run in runs)
    runs = [replace(run, name=name) for name, run in zip(names, runs, strict=True)]
    write_shared_plotly(folder)
    charts = _charts(runs, waterfall)
    index.write_index(runs, folder, charts, is_whole=False)
    progress(0, len(runs))
    missing: dict[str, TraceError] = {}
    drawn = set()
    with nullcontext(pictures) if pictures else Pictures() as drawing:
        for name, chart in charts.items():
            drawing.draw(chart, folder / f"{name}.png")
        known = [None, *((run.name, run.result.label) for run in runs), None]
        is_drawn = len(runs) <= index.MOST_PICTURES
        places = [Place(run.name, known[at], known[at + 2], is_drawn) for at, run in enumerate(runs)]
        with closing(make_pages(places) if make_pages else write_pages_in_turn(runs, folder, places)) as outcomes:
            for done, (at, outcome) in enumerate(outcomes, 1):
                if isinstance(outcome, TraceError):
                    missing[runs[at].name] = outcome
                elif outcome is not None:
                    drawing.draw(outcome, folder / f"{runs[at].name}.png")
                    drawn.add(runs[at].name)
                progress(done, len(runs))
        undrawn = drawing.try_finish()
    index.write_index(runs, folder, charts, missing=missing, pictures=set() if undrawn else {*charts, *drawn})
    return [*(f"the pages of a run are missing: {error}" for error in missing.values()), *undrawn]


def _charts(runs: Sequence[ReportRun], waterfall: Waterfall | None) -> dict[str, Chart]:
    results, summaries = [run.result for run in runs], [run.summary for run in runs]
    figures = (draw_comparison(results, summaries), draw_overlap_by_step(results), draw_step_times(results))
    # Some are empty if a capture has no steps or no communication.
    has_data = [any(len(trace["x"]) for trace in figure["data"]) for figure in figures]
    charts = {name: figure for name, figure, shown in zip(index.CHARTS, figures, has_data, strict=True) if shown}
    if waterfall is not None and waterfall.changes:
        charts[WATERFALL] = draw_waterfall(waterfall)
    return charts


def write_pages_in_turn(runs: Sequence[ReportRun], folder: Path, places: Sequence[Place]) -> Generator[PagesOutcome]:
    """Write the pages of each run in this process; yield an outcome after each run."""
    for at, (run, place) in enumerate(zip(runs, places, strict=True)):
        yield at, write_run_pages(run, folder, place)


def write_run_pages(run: ReportRun, folder: Path, place: Place) -> Chart | TraceError | None:
    """Write the pages of a run: its timeline, why its communication is exposed, its kernels.

    Returns:
        A figure of a few steps of the timeline if ``place.is_drawn``; an error if a trace can no longer be read.
    """
    try:
        sources = run.load_sources()
    except TraceError as error:
        return error
    picture = draw_timeline(build_excerpt(sources)) if place.is_drawn else None
    model = build_timeline(sources)
    del sources  # the events take more memory than the boxes that are drawn
    path = folder / f"{place.name}{index.TIMELINE}.html"
    write_timeline_page(model, path, navigation=_navigation(place, index.TIMELINE), shared_plotly=True)
    del model
    _write_why_page(run, folder, place)
    _write_kernels_page(run, folder, place)
    return picture


_PAGES = {index.TIMELINE: "timeline", index.WHY: "why it is exposed", index.KERNELS: "kernels"}
"""The pages of a run: ending of the file name, and text of links to it."""


def _navigation(place: Place, here: str) -> list[dict[str, str]]:
    """Return links to the run's other pages, and to the same page (a key of ``_PAGES``) of neighbouring runs."""
    links = [
        {"title": title, "href": f"{place.name}{end}.html", "relation": "", "page": end.removeprefix("-") or "timeline"}
        for end, title in _PAGES.items()
        if end != here
    ]
    for other, relation in ((place.before, "prev"), (place.after, "next")):
        if other:
            name, label = other
            links.append({"title": label, "href": f"{name}{here}.html", "relation": relation, "page": ""})
    return links


def _write_why_page(run: ReportRun, folder: Path, place: Place) -> None:
    found, views = run.explanation, run.load_steps()
    step = found.collectives.typical_step
    title = Headline(f"The collectives of {'a step' if found.run.has_steps else 'the capture'}")
    drawn = {key: draw_step_collectives(found.run, key, ranks, title) for key, ranks in views.items()}
    figures = {} if step is None else {"collectives": drawn[step]}
    by_step: dict[int | None, list[Collective]] = defaultdict(list)
    for one in found.collectives.collectives:
        by_step[one.step_key].append(one)
    rows = {key: _rows_by_cost(found.collectives, by_step[key], ranks) for key, ranks in views.items()}
    columns = _columns_of_steps([row for of_step in rows.values() for _, row in of_step])
    steps = {key: found.run.step_names[key] for key in drawn} if found.run.has_steps else {}
    figures |= {f"step-{key}": drawn[key] for key in steps}
    if found.skew.reason is None:
        nodes = {rank.name: rank.node for rank in run.result.ranks}
        figures["skew"] = draw_skew(found.run, found.skew, nodes)
    gain = gain_headline(run.summary)
    heading = f"{run.result.label}: {gain}"
    write_page(
        folder / f"{place.name}{index.WHY}.html",
        "why.html",
        {
            "heading": heading,
            "cause": "" if run.cause.claim.rstrip(".") == gain.rstrip(".") else run.cause.text,
            "steps": steps,
            "timeline": f"{place.name}{index.TIMELINE}.html",
            "columns": columns,
            "rows": [] if step is None else [row for _, row in rows[step]],
            "cells": json_in_page(
                {
                    key: [[*of, *(column.text(row[column.key]) for column in columns)] for of, row in of_step]
                    for key, of_step in rows.items()
                }
            ),
            "all_steps": len(found.run.step_names),
            "typical": step,
            "lengths": json_in_page(step_lengths(run.result.ranks)),
        },
        title=heading,
        navigation=_navigation(place, index.WHY),
        figures=figures,
        css=asset("tables.css") + asset("why.css"),
        script=asset("tables.js") + asset("why.js"),
        shared_plotly=True,
    )


def _rows_by_cost(
    result: RunCollectives, step: Iterable[Collective], ranks: Sequence[RankStepView]
) -> list[tuple[tuple[str, int], Row]]:
    """Return rows of a step's collectives on some ranks, the most expensive first, with their ranks and indices."""
    names = {rank.name for rank in ranks}
    found = [one for one in step if one.name in names]
    found.sort(key=lambda one: (one.blocking_ns or 0, one.exposed_ns), reverse=True)
    return [((one.name, one.index), row) for one, row in zip(found, rows_of_step(result, found), strict=True)]


def _columns_of_steps(rows: Sequence[Row]) -> list[Column]:
    """Return the columns that hold a value, without a rank, operation or cause that is the same in all rows."""
    constant = {key for key in ("rank", "op", "cause") if len({row[key] for row in rows}) == 1}
    found = columns_of(rows)
    return [item for item in found if item.key not in constant and any(row[item.key] is not None for row in rows)]


def _write_kernels_page(run: ReportRun, folder: Path, place: Place) -> None:
    heading = f"{run.result.label}: what took the time"
    kernels = [
        {
            "kernel": plain_name(str(row["kernel"]), LONGEST_TITLE),
            "shape": row["shape"] or "",
            "phase": row["phase"] or "",
        }
        for row in run.use["kernels"].rows
    ]
    views = [  # without the run, which is the same on the whole page
        (view, [one for one in columns_of(rows) if one.key != "run" and any(row[one.key] for row in rows)])
        for view in run.use.values()
        for rows in [view.readable_rows]
    ]
    write_page(
        folder / f"{place.name}{index.KERNELS}.html",
        "kernels.html",
        {"heading": heading, **index.place_values([run]), "views": views, "kernels": json_in_page(kernels)},
        title=heading,
        navigation=_navigation(place, index.KERNELS),
        css=asset("tables.css"),
        script=asset("tables.js") + asset("kernels.js"),
        shared_plotly=True,
    )


def _page_names(names: Iterable[str]) -> list[str]:
    """Return unique names that are valid in every file system and URL."""
    taken = {index.INDEX, WATERFALL, *index.CHARTS}
    result = []
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "trace"
        numbered = (plain, *(f"{plain}-{number}" for number in range(2, 10_000)))
        free = next(name for name in numbered if not {f"{name}{end}" for end in _PAGES} & taken)
        taken |= {f"{free}{end}" for end in _PAGES}
        result.append(free)
    return result
