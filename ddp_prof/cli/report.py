"""``ddp-prof report``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_prof.cli.options import load_options, traces_argument

if TYPE_CHECKING:
    from ddp_prof.runs import LoadOptions


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
def command(traces: tuple[Path, ...], options: LoadOptions, folder: Path) -> None:
    """One page to read on a set of runs: comparison, why communication is exposed, timelines, what is not known.

    A folder stands for the traces in it. Pictures need Chromium; without it the pages are written all the same.
    """
    from ddp_prof.analyze.collectives.step_view import typical_step, view_step
    from ddp_prof.analyze.overlap.comparison import compare_variants
    from ddp_prof.analyze.root_cause import explain_run
    from ddp_prof.manifest import in_variant_order
    from ddp_prof.present.html.report import ReportRun, write_report
    from ddp_prof.runs import compare_steps, load_runs, timeline_sources

    runs = load_runs(traces, replace(options, with_shapes=True, keep_events=True))
    runs = in_variant_order(runs, lambda run: run.manifest)
    sources = iter(timeline_sources(runs))
    summaries = compare_variants([run.overlap() for run in runs])
    shown = [
        ReportRun(
            name=run.name,
            result=run.overlap(),
            sources=tuple(islice(sources, len(run.files))),
            explanation=explain_run(run.analysis()),
            summary=summary,
            typical_step=typical_step(run.analysis().ranks),
            view_step=partial(view_step, run.analysis()),
        )
        for run, summary in zip(runs, summaries, strict=True)
    ]
    for problem in write_report(shown, folder, compare_steps(runs)):
        click.echo(f"note: {problem}", err=True)
    click.echo(folder / "index.html")
