"""Measure what an HTML report shows of each run, and write the pages of the runs with several workers."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.step_view import RankStepView, view_step
from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.atomic_file import atomic_write
from ddp_prof.errors import TraceError
from ddp_prof.present.charts import Chart
from ddp_prof.present.html.report import (
    KERNELS,
    TIMELINE,
    WHY,
    PagesOutcome,
    Place,
    ReportRun,
    write_pages_in_turn,
    write_run_pages,
)
from ddp_prof.present.tables.kernels import kernels_views
from ddp_prof.present.timeline.model import Source
from ddp_prof.runs.pickles import unpickle_with_names
from ddp_prof.runs.run import SUMMARY_RESULTS, Run, timeline_sources
from ddp_prof.runs.timelines import DrawnTimeline, draw_timelines, find_drawings
from ddp_prof.runs.workers import pack_task, run_tasks
from ddp_prof.threads import count_cores

MEASURES = (*SUMMARY_RESULTS, "kernels", "device use")
"""What is measured of each run for a report, and what is made of it; see :func:`~ddp_prof.runs.run.prepare_runs`."""
MOST_STEPS = 200
"""The most steps that can be chosen on the page of a run on why communication is exposed."""
MOST_RANKS = 8
"""The most ranks of a run whose events are drawn one by one."""
RUNS_PER_WORKER = 4
"""Default number of runs per worker: starting one takes a second or two."""


def report_runs(runs: Sequence[Run], turns: Mapping[Path, Mapping[str, float]] | None = None) -> list[ReportRun]:
    """Measure what a report shows of each run.

    Views of steps, the timeline and the doctor's diagnosis are functions, called when a page needs them.
    ``turns``: see ``compare_variants``.
    """
    results = [run.overlap() for run in runs]
    summaries = compare_variants(results, turns, [run.manifest for run in runs])
    reports = []
    for run, result, summary in zip(runs, results, summaries, strict=True):
        explanation = run.explanation()
        # Single events are shown only of the ranks with the most exposed time, and of the steps around the typical one.
        exposed = [int(exposure.exposed_ns.sum()) for exposure in explanation.run.exposures]
        ranks = sorted(sorted(range(len(exposed)), key=lambda index: -exposed[index])[:MOST_RANKS])
        step = explanation.collectives.typical_step
        keys = [] if step is None else sorted(explanation.collectives.exposed_by_step, key=lambda key: abs(key - step))
        views = partial(_views, explanation.run, sorted(keys[:MOST_STEPS]), ranks)
        files = {explanation.run.ranks[index].clock for index in ranks}
        drawn = partial(_draw, run, [file for file in run.files if file in files] or run.files)
        use = kernels_views(result, run.device_use())
        reports.append(
            ReportRun(run.name, result, drawn, explanation, summary, views, use, cache(run.doctor), run.cost())
        )
    return reports


def _views(run: RunAnalysis, keys: Sequence[int], ranks: Sequence[int]) -> dict[int, Sequence[RankStepView]]:
    """Return for the key of each step what these ranks did in it; ``ranks`` are indices into the run's ranks."""
    return {key: view_step(run, key, ranks) for key in keys}


def _draw(run: Run, files: Sequence[Path], *, with_picture: bool) -> DrawnTimeline:
    """Return the timeline of the given traces of a run; if these are not all its files, a caveat says so.

    The run then drops its events.
    """

    def read() -> list[Source]:
        run.doctor()  # of all files, as every page tells it; the run of the drawn files takes it over
        first, *more = timeline_sources([replace(run, files=tuple(files))])
        run.release_events()
        if len(files) < len(run.files):
            caveat = f"{len(files)} of {len(run.files)} traces, those with the most exposed communication"
            first = first._replace(caveats=(caveat, *first.caveats))
        return [first, *more]

    drawn = draw_timelines(read, find_drawings([run]), with_picture=with_picture)
    run.release_events()  # pages need neither events nor figures of kernels any more
    return drawn


def make_pages(
    runs: Sequence[Run], reports: Sequence[ReportRun], folder: Path, places: Sequence[Place]
) -> Generator[PagesOutcome]:
    """Write the pages of runs into a folder with the workers of the first run.

    Args:
        runs: The runs.
        reports: What was measured of each run, which serves to write its pages in this process.
        folder: Where the pages are written.
        places: For each run, the name of its pages and its place in the report.

    Yields:
        For each run, as it is done: its position, and its picture or the reason why its pages are missing.

    Raises:
        TraceError: A trace cannot be read, and ``workers.leave_out`` is not set.
    """
    workers = runs[0].workers
    processes = min(len(runs), workers.jobs or min(count_cores(), 1 + len(runs) // RUNS_PER_WORKER))
    is_here = workers.scheduler is None and processes < 2
    made = write_pages_in_turn(reports, folder, places) if is_here else _make_elsewhere(runs, folder, places, processes)
    with closing(made) as outcomes:
        for at, outcome in outcomes:
            if isinstance(outcome, TraceError) and workers.leave_out is None:
                raise outcome
            yield at, outcome


def _make_elsewhere(
    runs: Sequence[Run], folder: Path, places: Sequence[Place], processes: int
) -> Generator[PagesOutcome]:
    """Write the pages as :func:`make_pages` does; other processes make them, and this one writes them."""
    tasks = []
    for run, place in zip(runs, places, strict=True):
        of_run = {name: getattr(run, name) for name in ("files", "options", "notes", "folder", "file_name")}
        tasks.append(
            pack_task(run.files[0], _make_page_files, {**of_run, "measured": run.measured, "made": run.made}, place)
        )
        run.release_events()
    with closing(run_tasks(tasks, runs[0].workers, processes)) as outcomes:
        for at, made in outcomes:
            outcome = unpickle_with_names(made)
            yield at, outcome if isinstance(outcome, TraceError) else _write_pages(outcome, folder, places[at])


def _make_page_files(of_run: dict[str, Any], place: Place) -> tuple[dict[str, bytes], Chart | None]:
    """Make the pages of a run in a worker; return the content of each page by its file name, and the run's picture."""
    (report,) = report_runs([Run(**of_run)])
    with TemporaryDirectory(prefix="ddp_prof.") as name:
        folder = Path(name)
        picture = write_run_pages(report, folder, place)
        if isinstance(picture, TraceError):
            raise picture
        return {page.name: page.read_bytes() for page in folder.iterdir()}, picture


def _write_pages(made: tuple[dict[str, bytes], Chart | None], folder: Path, place: Place) -> Chart | None:
    """Write the pages that a worker made into the folder under their final names; return the picture."""
    pages, picture = made
    for end in (TIMELINE, WHY, KERNELS):
        name = f"{place.name}{end}.html"
        with atomic_write(folder / name) as file:
            file.write_bytes(pages[name])
    return picture
