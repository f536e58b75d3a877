"""``ddp-prof skew``."""

from __future__ import annotations

from pathlib import Path

import click

from ddp_prof.cli.options.commands import Loader, load_options, table_options, trace_command, traces_argument
from ddp_prof.cli.options.outputs import Output
from ddp_prof.present.table import TableOptions, TableView, show
from ddp_prof.runs.run import Run

MEASURES = ("collectives",)


@trace_command("skew", "traces/overlap.sqlite")
@traces_argument
@click.option("--html", "page", type=Output(), help="Also write a page with the picture.")
@click.option("--png", type=Output(), help="Also write the picture; needs Chromium.")
@table_options
@load_options
def command(traces: tuple[Path, ...], load: Loader, page: Path | None, png: Path | None, output: TableOptions) -> None:
    """Which rank arrives last at the collectives, how often, by how much, and what it costs.

    Give the traces of all ranks of a run; the clocks of several files are aligned. Some ranks may be missing.
    """
    runs = load.runs(traces, *MEASURES)
    if (page or png) and len(runs) > 1:
        raise click.UsageError("--html and --png show one run: give the traces of a single one")
    show(output, views(runs))
    if page or png:
        from ddp_prof.present.charts.ranks import draw_skew
        from ddp_prof.present.headlines import skew_headline
        from ddp_prof.present.html.page import write_figure

        skew = runs[0].skew()
        figure = draw_skew(runs[0].analysis(), skew)
        write_figure(figure, title=skew_headline(skew).claim, page=page, picture=png)


def views(runs: list[Run]) -> list[TableView]:
    from ddp_prof.present.tables.collectives import skew_view

    return [skew_view(run.analysis(), run.skew()) for run in runs]
