"""``ddp-prof overlap``."""

from __future__ import annotations

from pathlib import Path

import click

from ddp_prof.cli.options.commands import Loader, load_options, table_options, trace_command, traces_argument
from ddp_prof.present.table import TableOptions, TableView, show
from ddp_prof.runs.run import Run

MEASURES = ("overlap",)


@trace_command("overlap", "--steps traces/overlap.sqlite")
@traces_argument
@click.option("--steps", is_flag=True, help="One row per step instead of one row per rank.")
@table_options
@load_options
def command(traces: tuple[Path, ...], load: Loader, steps: bool, output: TableOptions) -> None:
    """How much communication hides behind compute, per rank and step.

    TRACE is a report of Nsight Systems (.nsys-rep) or its export (sqlite, parquetdir, arrowdir), a trace of
    torch.profiler (.json, .json.gz), or a folder with several of these.
    """
    show(output, views(load.runs(traces, *MEASURES), by_step=steps))


def views(runs: list[Run], *, by_step: bool = False) -> list[TableView]:
    from ddp_prof.analyze.variants.comparison import compare_variants
    from ddp_prof.present.headlines import gain_headline
    from ddp_prof.present.tables.overlap import overlap_view

    results = [run.overlap() for run in runs]
    headlines = map(gain_headline, compare_variants(results))
    return [overlap_view(result, next(headlines), by_step=by_step) for result in results]
