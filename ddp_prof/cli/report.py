"""``ddp-prof report``."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_prof.cli.options import load_options, traces_argument
from ddp_prof.printable import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.analyze.collectives.results import Collective
    from ddp_prof.cli.options import Loader
    from ddp_prof.present.html.report import ReportRun
    from ddp_prof.runs.run import Run

MOST_STEPS = 20
"""Steps of a run to choose from on its page on why communication is exposed."""


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
    """One page to read on a set of runs: comparison, why communication is exposed, timelines, what is not known.

    A folder stands for the traces in it. Pictures need Chromium; without it the pages are written all the same.
    """
    from ddp_prof.manifest import in_variant_order
    from ddp_prof.present.html.report import write_report
    from ddp_prof.runs.run import compare_steps

    runs = load.runs(traces, "overlap", "collectives", "kernels", with_shapes=True, to_draw=True)
    runs = in_variant_order(runs, lambda run: run.manifest)
    for problem in write_report(_report_runs(runs), folder, compare_steps(runs)):
        click.echo(f"note: {printable(problem)}", err=True)
    click.echo(folder / "index.html")


def _report_runs(runs: Sequence[Run]) -> list[ReportRun]:
    """All that the pages tell of each run."""
    from ddp_prof.analyze.collectives.results import typical_step
    from ddp_prof.analyze.collectives.step_view import view_step
    from ddp_prof.analyze.overlap.comparison import compare_variants
    from ddp_prof.analyze.root_cause import explain_run
    from ddp_prof.present.html.report import ReportRun
    from ddp_prof.runs.run import timeline_sources

    sources = iter(timeline_sources(runs))
    results = [run.overlap() for run in runs]
    found = []
    for run, result, summary in zip(runs, results, compare_variants(results), strict=True):
        explanation = explain_run(run.analysis())
        collectives = explanation.collectives.collectives
        step = typical_step(collectives)
        views = {key: view_step(explanation.run, key) for key in _steps_to_view(collectives, step)}
        own = tuple(islice(sources, len(run.files)))
        found.append(ReportRun(run.name, result, own, explanation, summary, views, step))
    return found


def _steps_to_view(collectives: Sequence[Collective], typical: int | None) -> list[int]:
    """Keys of steps that communicate, at most some around the typical one."""
    if typical is None:
        return []
    keys = {collective.step_key for collective in collectives if collective.step_key is not None}
    return sorted(sorted(keys, key=lambda key: abs(key - typical))[:MOST_STEPS])
