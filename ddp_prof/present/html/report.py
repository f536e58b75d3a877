"""A report: a folder with one page about all runs, and several pages about each run.

It works offline, from the disk; its pages share one plotly.js.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ddp_prof import __version__
from ddp_prof.analyze.collectives.collective import Collective
from ddp_prof.analyze.collectives.results import RunCollectives
from ddp_prof.analyze.collectives.step_view import RankStepView
from ddp_prof.analyze.cost import RunCost
from ddp_prof.analyze.doctor import Diagnosis
from ddp_prof.analyze.overlap import TraceOverlap
from ddp_prof.analyze.root_cause import RunExplanation
from ddp_prof.analyze.variants.comparison import VariantSummary
from ddp_prof.analyze.variants.waterfall import Waterfall
from ddp_prof.columns import MISSING, Column, Row, capitalized, count_noun, percent
from ddp_prof.errors import TraceError
from ddp_prof.present import theme
from ddp_prof.present.cause_headlines import root_cause_headline
from ddp_prof.present.charts import Chart
from ddp_prof.present.charts.collectives import draw_skew, draw_step_collectives
from ddp_prof.present.charts.comparison import draw_comparison, draw_overlap_by_step, draw_step_times, draw_waterfall
from ddp_prof.present.charts.ranks import draw_ranks
from ddp_prof.present.charts.static_images import Pictures
from ddp_prof.present.columns import columns_of
from ddp_prof.present.comparison_headlines import describe_changes
from ddp_prof.present.headlines import Headline, cost_text, gain_headline, step_lengths
from ddp_prof.present.html.page import asset, json_in_page, write_page, write_shared_plotly
from ddp_prof.present.html.timeline_page import TimelineContent, write_timeline_page
from ddp_prof.present.recorders import profiler_name
from ddp_prof.present.run_notes import warnings_by_run
from ddp_prof.present.skew_headlines import skew_headline
from ddp_prof.present.table import TableView
from ddp_prof.present.tables.collectives import rows_of_step
from ddp_prof.present.tables.compare import compare_rows, how_to_read
from ddp_prof.present.tables.kernels import most_of
from ddp_prof.present.tables.overlap import steps_view
from ddp_prof.present.tables.summary import SummarizedRun, main_advice
from ddp_prof.present.text import plain_name, source_name
from ddp_prof.present.timeline.encoding import LONGEST_TITLE


class DrawTimeline(Protocol):
    """A function that draws the timeline of a run."""

    def __call__(self, *, with_picture: bool) -> tuple[TimelineContent, Chart | None]: ...


@dataclass(frozen=True)
class ReportRun:
    """One run, with everything that its pages show.

    Attributes:
        name: Name of the trace; :func:`write_report` replaces it by a unique name for the run's pages.
        result: Its overlap.
        draw_timeline: Returns what the page of its timeline shows and, if asked for, the picture of a part of it.
        explanation: Its collectives, why they are exposed, and the skew of its ranks.
        summary: Its row in the comparison of runs.
        load_steps: Returns what each rank communicated, by the key of the step.
        use: Tables on how its devices spent their time, by name: ``kernels``, ``hidden`` and ``idle``.
        diagnose: Returns its findings.
        cost: What communication costs it.
    """

    name: str
    result: TraceOverlap
    draw_timeline: DrawTimeline
    explanation: RunExplanation
    summary: VariantSummary
    load_steps: Callable[[], Mapping[int, Sequence[RankStepView]]]
    use: Mapping[str, TableView]
    diagnose: Callable[[], Diagnosis]
    cost: RunCost

    @property
    def summarized(self) -> SummarizedRun:
        """The run in the form in which advice is made from it."""
        return SummarizedRun(self.result, self.summary, self.explanation, self.diagnose(), self.cost)

    @property
    def gain(self) -> str:
        """A sentence on what hiding its communication would gain."""
        return gain_headline(self.summary, self.cost.cost)

    @property
    def bounds(self) -> str:
        """A sentence on what communication slows, and what could be gained at most; empty if that is not known."""
        text = "" if self.summary.reason else cost_text(self.cost.cost, self.cost.bounds) or ""
        return capitalized(text)

    @property
    def cause(self) -> Headline:
        """What communication costs, and its main cause."""
        collectives = self.explanation.collectives
        return root_cause_headline(self.explanation.root_cause, collectives.why_no_cause, collectives.blocking)

    @property
    def cause_beside_gain(self) -> str:
        """The cause as a text to read after :attr:`gain`, without what both say; empty if they say the same."""
        cause, gain = self.cause, self.gain
        if gain.startswith(cause.claim.rstrip(".")):
            return ""
        # "A typical step stands still for communication for 4.00 ms": the same words, without who does.
        _, _, stands_still = cause.claim.partition(" step ")
        return cause.detail if stands_still and stands_still in gain else cause.text


MOST_PICTURES = 20
"""A report of more runs has no pictures of timelines, because each takes a browser about a second."""
CHARTS = ("comparison", "overlap-by-step", "step-times")
"""Names of the charts of all runs, in the order of the page."""
STUDY = {
    "buckets.html": "step time",
    "model.html": "tail, as expected and as measured",
    "results.md": "all results of training in turns",
}
"""Files that ``ddp-prof results`` may have written into the folder, each with the text of the link to it."""
INDEX = "index"
"""Name of the page about all runs, without ``.html``."""
TIMELINE, WHY, KERNELS = "", "-why", "-kernels"
"""Endings of the names of a run's pages: ``overlap.html``, ``overlap-why.html``, ``overlap-kernels.html``."""


def write_index(
    runs: Sequence[ReportRun],
    folder: Path,
    figures: Mapping[str, Chart],
    *,
    is_whole: bool = True,
    missing: Collection[str] = (),
    pictures: Collection[str] = (),
) -> None:
    """Write the page about all runs.

    Args:
        runs: The runs, at least one.
        folder: The folder of the report.
        figures: The charts of the page, by name.
        is_whole: Whether the pages of the runs are written; else the page says that they are not yet.
        missing: Names of runs whose pages could not be made.
        pictures: Names (without ``.png``) of the pictures beside the page.
    """
    rows = compare_rows([run.summary for run in runs], [run.cost for run in runs])
    facts = [facts_of(run) for run in runs]
    # Facts that are the same for all runs stand on the page once.
    shared = set.intersection(*(set(fact.items()) for fact in facts))
    values = {
        **place_values(runs),
        "story": story_of(runs),
        "version": __version__,
        "charts": [name for name in CHARTS if name in figures],
        "is_whole": is_whole,
        "pictures": pictures,
        "most_pictures": MOST_PICTURES,
        "study": {file: title for file, title in STUDY.items() if (folder / file).exists()},
        "comparison": rows,
        "comparison_columns": _columns(rows),
        "counts": counts_text(rows),
        "how_to_read": how_to_read(run.summary for run in runs),
        "unknown": unknown_facts(runs),
        "shared_facts": [pair for pair in facts[0].items() if pair in shared],
        "runs": [run_values(run, fact, shared, missing) for run, fact in zip(runs, facts, strict=True)],
    }
    write_page(
        folder / f"{INDEX}.html",
        "index.html",
        values,
        title="Communication behind compute",
        figures=figures,
        css=asset("index.css") + asset("tables.css"),
        scripts=["html/assets/tables.js"],
        shared_plotly=True,
    )


_COUNTS = ("device", "ranks", "steps")
"""Columns that stand above the table if all runs have the same value, to save the room of a column."""


def _columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of the comparison: without those that stand above the table, and those without any value."""
    shared = _shared_counts(rows)
    return [
        item for item in columns_of(rows) if item.key not in shared and any(row[item.key] is not None for row in rows)
    ]


def _shared_counts(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the number of ranks, the number of steps and the device, each only if it is the same in all rows."""
    return {key: rows[0][key] for key in _COUNTS if len({row[key] for row in rows}) == 1}


def counts_text(rows: Sequence[Row]) -> str:
    """Say how many runs there are, and how many ranks and steps each has if that is the same for all."""
    shared = _shared_counts(rows)
    known = " and ".join(count_noun(shared[key], key.removesuffix("s")) for key in ("ranks", "steps") if key in shared)
    each = " each" if len(rows) > 1 else ""
    return count_noun(len(rows), "run") + (f" of {known}{each}" if known else "")


def story_of(runs: Sequence[ReportRun]) -> list[str]:
    """Return the sentences that begin a report: what distinguishes the runs, or where there is most to gain."""
    # Several runs of which one is the baseline: how they differ.
    if sentences := describe_changes([run.summary for run in runs]) if len(runs) > 1 else []:
        return sentences
    worst = max(runs, key=lambda run: run.summary.gain_at_most or 0)
    if len(runs) > 1 and not worst.summary.gain_at_most:
        return ["No run is known to gain from hiding communication"]
    gain = worst.gain
    if len(runs) == 1 and (idle := worst.summarized.idle):
        return [idle, gain]
    return [gain if len(runs) == 1 else f"Most is to be gained in {worst.result.label}: {gain}"]


def run_values(
    run: ReportRun, facts: Mapping[str, str], shared: set[tuple[str, str]], missing: Collection[str]
) -> dict[str, Any]:
    """Return what the templates of a whole report, and of a report in one file, show of a run.

    Args:
        run: The run.
        facts: How it was made; see :func:`facts_of`.
        shared: Facts that all runs have in common, which are left out.
        missing: Names of runs whose pages could not be made, so that no links lead to them.
    """
    ends = {"timeline": TIMELINE, "why": WHY, "kernels": KERNELS}
    pages = {page: f"{run.name}{end}.html" for page, end in ends.items()}
    worst = f"{run.name}.html#worst" if any(rank.exposed_ns or rank.blocking_ns for rank in run.result.ranks) else ""
    return {
        "name": run.name,
        "has_pages": run.name not in missing,
        "label": run.result.label,
        "device": run.result.device,
        "share": percent(run.summary.overlap_ratio),
        **pages,
        "gain": run.gain,
        "cost": run.bounds,
        "finding": run.cause_beside_gain or MISSING,
        "advice": main_advice(run.summarized),
        "skew": skew_headline(run.explanation.skew).text,
        "use": most_of(run.use),
        "facts": [pair for pair in facts.items() if pair not in shared],
        "worst": "" if run.name in missing else worst,
        "pages": {} if run.name in missing else ({"show me": worst} if worst else {}) | pages,
    }


def place_values(runs: Sequence[ReportRun]) -> dict[str, Any]:
    """Return for a template the device that the runs ran on, and whether to highlight it; see ``device_label``."""
    words, is_notice = theme.device_label(
        (run.result.device for run in runs), (caveat for run in runs for caveat in run.result.caveats)
    )
    return {"where": " · ".join(words), "is_notice": is_notice}


def unknown_facts(runs: Sequence[ReportRun]) -> list[tuple[str, str]]:
    """Return what is not known, as pairs: the labels of the runs (``all runs`` for all), and what it is."""
    warnings = warnings_by_run([run.result for run in runs])
    for run in runs:
        for text in run.explanation.run.warnings:
            if run.result.label not in warnings.setdefault(text, []):
                warnings[text].append(run.result.label)
    if unmade := [run.result.label for run in runs if run.explanation.run.manifest is None]:
        warnings["how the run was made: no run.json lies beside its trace"] = unmade
    # A single run is named by its label.
    everyone = len(runs) if len(runs) > 1 else None
    return [("all runs" if len(labels) == everyone else ", ".join(labels), text) for text, labels in warnings.items()]


def facts_of(run: ReportRun) -> dict[str, str]:
    """Return how a run was made and recorded: texts by name; only the trace if no manifest (run.json) is known."""
    result, made = run.result, run.explanation.run.manifest
    facts = {
        "trace": source_name(result.trace.name, result.files),
        "profiler": profiler_name(result),
    }
    if made is None:
        return facts
    return facts | {
        "command": " ".join(made.command),
        "created": made.created,
        "commit": made.git_commit or "not known",
        "model": f"{made.model_size}, {sum(parameter.numel for parameter in made.parameters):,} parameters",
        "batch": f"{made.batch_size} x {made.seq_len} tokens",
        "ranks": f"{made.world_size}, {made.backend}, device: {made.device}",
        "steps": f"{made.steps} after {made.warmup} of warm-up, seed {made.seed}",
        **({} if made.profiler == facts["profiler"] else {"recorded by": made.profiler or "no profiler"}),
        "versions": _pairs(made.versions),
        "machine": _pairs(made.machine),
    }


def _pairs(values: Mapping[str, Any]) -> str:
    """Format names with their values, without empty values; bytes are converted to GiB."""
    return ", ".join(
        f"{key.removesuffix('_bytes')} {value / 2**30:.1f} GiB" if key.endswith("_bytes") else f"{key} {value}"
        for key, value in values.items()
        if value != ""
    )


PagesOutcome = tuple[int, Chart | TraceError | None]
"""The position of a run among all; and its picture (``None`` for none), or the error that left it without pages."""

RANKS = "ranks"
"""Name of the chart of the ranks of a single run."""
WATERFALL = "waterfall"
"""Name of the chart of the changes from run to run."""


class Place(NamedTuple):
    """The place of a run in a report, which is what its pages need to know of the other runs.

    Attributes:
        name: Name of its pages.
        before, after: Name and label of the run before and of the run after it; ``None`` if there is none.
        is_drawn: Whether its timeline also becomes a picture.
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
    """Write a report: the page about all runs, the pages of each run, and pictures.

    The index is written twice: before the pages of the runs, so that it can be read meanwhile, and after them, with the
    pictures and without links to pages that could not be made.

    Args:
        runs: The runs, at least one.
        folder: The folder of the report.
        waterfall: How the mean step changes from run to run; drawn if it has changes.
        pictures: What draws the pictures, already started; by default a new one.
        make_pages: Writes the pages of the runs, given their places, in any order; by default one after the other.
        progress: Called with the number of runs that have their pages, and the number of all runs.

    Returns:
        A line for each run whose pages could not be made, and one if there are no pictures; empty after full success.
    """
    names = _page_names(run.name for run in runs)
    runs = [replace(run, name=name) for name, run in zip(names, runs, strict=True)]
    write_shared_plotly(folder)
    charts = charts_of(runs, waterfall)
    write_index(runs, folder, charts, is_whole=False)
    progress(0, len(runs))
    with nullcontext(pictures) if pictures else Pictures() as drawing:
        for name, chart in charts.items():
            drawing.draw(chart, folder / f"{name}.png")
        # The neighbours of a run are the runs before and after it; the first and the last one have only one.
        neighbours = [None, *((run.name, run.result.label) for run in runs), None]
        is_drawn = len(runs) <= MOST_PICTURES
        places = [Place(run.name, neighbours[at], neighbours[at + 2], is_drawn) for at, run in enumerate(runs)]
        with closing(make_pages(places) if make_pages else write_pages_in_turn(runs, folder, places)) as outcomes:
            missing, drawn = _take_outcomes(outcomes, names, folder, drawing, progress)
        # Pictures are all there or none.
        undrawn = drawing.try_finish()
    write_index(runs, folder, charts, missing=missing, pictures=set() if undrawn else {*charts, *drawn})
    return [*(f"the pages of a run are missing: {error}" for error in missing.values()), *undrawn]


def _take_outcomes(
    outcomes: Iterable[PagesOutcome],
    names: Sequence[str],
    folder: Path,
    drawing: Pictures,
    progress: Callable[[int, int], None],
) -> tuple[dict[str, TraceError], set[str]]:
    """Draw the picture of each run when its pages are written.

    ``names`` are the names of all runs; the other arguments are those of :func:`write_report`.

    Returns:
        Why pages are missing, by the name of the run; and the names of the runs with a picture.
    """
    missing, drawn = dict[str, TraceError](), set[str]()
    for done, (at, outcome) in enumerate(outcomes, 1):
        if isinstance(outcome, TraceError):
            missing[names[at]] = outcome
        elif outcome is not None:
            drawing.draw(outcome, folder / f"{names[at]}.png")
            drawn.add(names[at])
        progress(done, len(names))
    return missing, drawn


def charts_of(runs: Sequence[ReportRun], waterfall: Waterfall | None) -> dict[str, Chart]:
    """Return the charts of all runs by name, without charts that would be empty.

    Args:
        runs: The runs; a single run also gets the chart of its ranks.
        waterfall: Drawn if it has changes.
    """
    results, summaries = [run.result for run in runs], [run.summary for run in runs]
    figures = (draw_comparison(results, summaries), draw_overlap_by_step(results), draw_step_times(results))
    # A chart is empty if no capture has steps, or none has communication.
    has_data = [any(len(trace["x"]) for trace in figure["data"]) for figure in figures]
    charts = {name: figure for name, figure, shown in zip(CHARTS, figures, has_data, strict=True) if shown}
    if len(runs) == 1 and (ranks := draw_ranks(runs[0].result, runs[0].explanation.skew)):
        charts[RANKS] = ranks
    if waterfall is not None and waterfall.changes:
        charts[WATERFALL] = draw_waterfall(waterfall, summaries)
    return charts


def write_pages_in_turn(runs: Sequence[ReportRun], folder: Path, places: Sequence[Place]) -> Generator[PagesOutcome]:
    """Write the pages of the runs one after the other; yield the outcome of each."""
    for at, (run, place) in enumerate(zip(runs, places, strict=True)):
        yield at, write_run_pages(run, folder, place)


def write_run_pages(run: ReportRun, folder: Path, place: Place) -> Chart | TraceError | None:
    """Write the pages of a run.

    Returns:
        The picture of its timeline if ``place.is_drawn``, else ``None``; or the error if a trace can no longer be read.
    """
    try:
        content, picture = run.draw_timeline(with_picture=place.is_drawn)
    except TraceError as error:
        return error
    path = folder / f"{place.name}{TIMELINE}.html"
    write_timeline_page(content, path, navigation=_navigation(place, TIMELINE), shared_plotly=True)
    del content
    _write_why_page(run, folder, place)
    _write_kernels_page(run, folder, place)
    return picture


_PAGES = {TIMELINE: "timeline", WHY: "why it is exposed", KERNELS: "kernels"}
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
    """Write the page on why communication is exposed: the collectives of each step, and the skew of the ranks."""
    found, views = run.explanation, run.load_steps()
    step = found.collectives.typical_step
    # Each step has a figure and the rows of a table. The page shows the typical step first.
    title = Headline(f"The collectives of {'a step' if found.run.has_steps else 'the capture'}")
    drawn = {key: draw_step_collectives(found.run, key, ranks, title) for key, ranks in views.items()}
    figures = {} if step is None else {"collectives": drawn[step]}
    # The rows of the table, by step.
    rows = {
        key: _rows_by_cost(found.collectives, found.collectives.of_step(key), ranks) for key, ranks in views.items()
    }
    columns = _columns_of_steps([row for of_step in rows.values() for _, row in of_step])
    steps = {key: found.run.step_names[key] for key in drawn} if found.run.has_steps else {}
    figures |= {f"step-{key}": drawn[key] for key in steps}
    # The skew is drawn if the clocks of the ranks can be compared.
    if found.skew.reason is None:
        nodes = {rank.name: rank.node for rank in run.result.ranks}
        figures["skew"] = draw_skew(found.run, found.skew, nodes)
    gain = run.gain
    heading = f"{run.result.label}: {gain}"
    write_page(
        folder / f"{place.name}{WHY}.html",
        "why.html",
        {
            "heading": heading,
            "cause": run.cause_beside_gain,
            "steps": steps,
            "timeline": f"{place.name}{TIMELINE}.html",
            "columns": columns,
            "rows": [] if step is None else [row for _, row in rows[step]],
            # By step: of each row its rank and index of the collective, then the texts of its cells.
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
        navigation=_navigation(place, WHY),
        figures=figures,
        css=asset("tables.css") + asset("why.css"),
        scripts=["html/assets/tables.js", "html/assets/why.js"],
        shared_plotly=True,
    )


def _rows_by_cost(
    result: RunCollectives, step: Iterable[Collective], ranks: Sequence[RankStepView]
) -> list[tuple[tuple[str, int], Row]]:
    """Return the collectives of a step that belong to ``ranks``, the most costly ones first.

    Each is a pair: its rank with its index in the step, and its row of a table. The cost is the blocking time, then the
    exposed time.
    """
    names = {rank.name for rank in ranks}
    found = [one for one in step if one.name in names]
    found.sort(key=lambda one: (one.blocking_ns or 0, one.exposed_ns), reverse=True)
    return [((one.name, one.index), row) for one, row in zip(found, rows_of_step(result, found), strict=True)]


def _columns_of_steps(rows: Sequence[Row]) -> list[Column]:
    """Return the columns that hold a value; rank, operation and cause are left out if all rows have the same one."""
    constant = {key for key in ("rank", "op", "cause") if len({row[key] for row in rows}) == 1}
    found = columns_of(rows)
    return [item for item in found if item.key not in constant and any(row[item.key] is not None for row in rows)]


def _write_kernels_page(run: ReportRun, folder: Path, place: Place) -> None:
    """Write the page on what took the time: kernels, what was hidden, idle time, and the steps."""
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
        for view in (*run.use.values(), steps_view(run.result))
        for rows in [view.readable_rows]
    ]
    write_page(
        folder / f"{place.name}{KERNELS}.html",
        "kernels.html",
        {"heading": heading, **place_values([run]), "views": views, "kernels": json_in_page(kernels)},
        title=heading,
        navigation=_navigation(place, KERNELS),
        css=asset("tables.css"),
        scripts=["html/assets/tables.js", "html/assets/kernels.js"],
        shared_plotly=True,
    )


def _page_names(names: Iterable[str]) -> list[str]:
    """Return a unique name for each run, valid in every file system and URL, whose pages do not overwrite others."""
    taken = {INDEX, WATERFALL, RANKS, *CHARTS}
    result = []
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "trace"
        # A name that is taken gets a number.
        numbered = (plain, *(f"{plain}-{number}" for number in range(2, 10_000)))
        free = next(name for name in numbered if not {f"{name}{end}" for end in _PAGES} & taken)
        taken |= {f"{free}{end}" for end in _PAGES}
        result.append(free)
    return result
