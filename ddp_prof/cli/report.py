"""``ddp-prof report``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_prof.cli.options.traces import load_options, traces_argument
from ddp_prof.cli.options.verbosity import progress, say_note

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddp_prof.analyze.collectives.results import Collective
    from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
    from ddp_prof.cli.options.traces import Loader
    from ddp_prof.present.html.report_run import ReportRun
    from ddp_prof.present.timeline.model import Source
    from ddp_prof.runs.run import Run

MOST_STEPS = 20
"""Steps of a run to choose from on its page on why communication is exposed."""

MOST_RANKS = 8
"""Ranks of a run whose events are drawn one by one."""


@click.command("report")
@traces_argument
@click.option(
    "-o",
    "--output",
    "folder",
    default="figures/report",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder to write.",
)
@load_options
def command(traces: tuple[Path, ...], load: Loader, folder: Path) -> None:
    """Linked pages about a set of runs: comparison, why communication is exposed, timelines, what is not known.

    A folder stands for the traces in it. Pictures need Chromium, the pages do not.
    """
    from ddp_prof.manifest import in_variant_order
    from ddp_prof.present.charts.static_images import Pictures
    from ddp_prof.present.html.report import write_report
    from ddp_prof.runs.run import compare_steps

    runs = load.runs(traces, "overlap", "collectives", "kernels", "device use", with_launches=True, to_draw=True)
    runs = in_variant_order(runs, lambda run: run.manifest)
    with Pictures() as pictures, progress(2 * len(runs) + 1) as begin:  # the browser starts while runs are compared
        problems = write_report(_report_runs(runs, begin), folder, compare_steps(runs), begin, pictures)
    for problem in problems:
        say_note(problem)
    click.echo(folder / "index.html")


def _report_runs(runs: Sequence[Run], begin: Callable[[str], None] = lambda _part: None) -> list[ReportRun]:
    """All that the pages tell of each run."""
    from ddp_prof.analyze.collectives.results import typical_step
    from ddp_prof.analyze.collectives.step_view import view_step
    from ddp_prof.analyze.overlap.comparison import compare_variants
    from ddp_prof.analyze.root_cause import explain_run
    from ddp_prof.present.html.report_run import ReportRun
    from ddp_prof.present.tables.kernels import kernels_views

    results = [run.overlap() for run in runs]
    found = []
    for run, result, summary in zip(runs, results, compare_variants(results), strict=True):
        begin(f"comparing the ranks of {run.label}")
        explanation = explain_run(run.analysis())
        collectives = explanation.collectives.collectives
        step, ranks = typical_step(collectives), _ranks_to_show(explanation.run)
        views = {key: view_step(explanation.run, key, ranks) for key in _steps_to_view(collectives, step)}
        files = {explanation.run.ranks[index].clock for index in ranks}
        sources = partial(_sources, run, [file for file in run.files if file in files] or run.files)
        use = kernels_views(result, run.device_use())
        found.append(ReportRun(run.name, result, sources, explanation, summary, views, step, use))
    return found


def _ranks_to_show(run: RunAnalysis) -> list[int]:
    """Indices of the ranks that are shown event by event: of many those with the most exposed time."""
    exposed = [int(exposure.exposed_ns.sum()) for exposure in run.exposures]
    return sorted(sorted(range(len(exposed)), key=lambda index: -exposed[index])[:MOST_RANKS])


def _sources(run: Run, files: Sequence[Path]) -> list[Source]:
    """The traces of a run's timeline, which says how many of them it shows."""
    from ddp_prof.runs.run import timeline_sources

    first, *others = timeline_sources([run.of_files(files)])
    run.forget()  # the pages need no more of either
    if len(files) < len(run.files):
        caveat = f"{len(files)} of {len(run.files)} traces, those with the most exposed communication"
        first = first._replace(caveats=(caveat, *first.caveats))
    return [first, *others]


def _steps_to_view(collectives: Sequence[Collective], typical: int | None) -> list[int]:
    """Keys of steps that communicate, at most some around the typical one."""
    if typical is None:
        return []
    keys = {collective.step_key for collective in collectives if collective.step_key is not None}
    return sorted(sorted(keys, key=lambda key: abs(key - typical))[:MOST_STEPS])
