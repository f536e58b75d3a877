"""``ddp-prof collectives``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_prof.cli.options.commands import Loader, load_options, table_options, trace_command, traces_argument
from ddp_prof.cli.options.outputs import Output
from ddp_prof.errors import TraceError
from ddp_prof.present.table import TableOptions, TableView, show
from ddp_prof.runs.run import Run

if TYPE_CHECKING:
    from ddp_prof.present.headlines import Headline

MEASURES = ("collectives",)


@trace_command("collectives", "--by bucket traces/bucketed_10mb.sqlite")
@traces_argument
@click.option(
    "--by",
    type=click.Choice(["collective", "step", "bucket", "group"]),
    help="What a row stands for; JSON always lists every collective. Default: a collective in CSV and JSON; in tables "
    "buckets, or the ten worst collectives.",
)
@click.option("--html", "page", type=Output(), help="Also write a page that shows one step.")
@click.option("--png", type=Output(), help="Also write a picture of it; needs Chromium.")
@click.option("--step", type=int, help="The step that --html and --png show. Default: a typical one.")
@table_options
@load_options
def command(
    traces: tuple[Path, ...],
    load: Loader,
    by: str | None,
    page: Path | None,
    png: Path | None,
    step: int | None,
    output: TableOptions,
) -> None:
    """The life of each collective, and why it is exposed.

    A row tells when the collective was ready, launched, started and ended, and how much of it is overlapped or exposed.
    Exposed time is divided by when (forward, backward, tail, optimizer, outside) and by why (blocking call, launched
    late, queued, late input, peer wait, transfer). The ranks of a run may be in several files.
    """
    runs = load.runs(traces, *MEASURES, to_draw=bool(page or png))
    if (page or png) and len(runs) > 1:
        raise click.UsageError("--html and --png show one run: give the traces of a single one")
    show(output, views(runs, by or ("collective" if output.columns else None)))
    if page or png:
        _draw(runs[0], step, page, png)


def views(runs: list[Run], by: str | None = None) -> list[TableView]:
    from ddp_prof.present.tables.collectives import collectives_view

    return [collectives_view(run.analysis(), run.collectives(), _headline(run), by) for run in runs]


def _headline(run: Run) -> Headline:
    from ddp_prof.present.headlines import root_cause_headline

    found = run.collectives()
    return root_cause_headline(run.root_cause(), found.reason, found.blocking)


def _draw(run: Run, step: int | None, page: Path | None, png: Path | None) -> None:
    from ddp_prof.analyze.collectives.straggler import view_step
    from ddp_prof.present.charts.collectives import draw_step_collectives
    from ddp_prof.present.html.page import write_figure

    analysis = run.analysis()
    shown = run.collectives().typical_step if step is None else step
    ranks = () if shown is None else view_step(analysis, shown)
    if shown is None or not ranks:
        raise TraceError(analysis.trace, "no communication in the step asked for", "choose another one with --step")
    headline = _headline(run)
    figure = draw_step_collectives(analysis, shown, ranks, headline)
    write_figure(figure, title=headline.claim, page=page, picture=png)
