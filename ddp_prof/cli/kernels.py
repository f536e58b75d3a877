"""``ddp-prof kernels``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ddp_prof.cli.options.commands import Loader, load_options, table_options, trace_command, traces_argument
from ddp_prof.present.table import TableOptions, TableView, show
from ddp_prof.runs.run import Run

TABLES = ("kernels", "hidden", "idle")

MEASURES = ("overlap", "device use")


@trace_command("kernels", "--top 5 traces/overlap.sqlite")
@traces_argument
@click.option(
    "--table",
    "name",
    type=click.Choice(TABLES),
    help="Which table. Default: all of them, and kernels where rows are for programs; JSON always holds all.",
)
@click.option(
    "--top", type=click.IntRange(min=0), default=15, show_default=True, help="How many kernels; 0 shows all of them."
)
@table_options
@load_options
def command(traces: tuple[Path, ...], load: Loader, name: str | None, top: int, output: TableOptions) -> None:
    """Which kernels took the time, what hid communication, and why devices were idle.

    A kernel's slowdown is its median duration beside communication, divided by its median duration without. Overlapped
    communication is divided by the compute beside it, idle time by its cause; both sum exactly to the figures of
    'ddp-prof overlap'.
    """
    runs = load.runs(traces, *MEASURES)
    is_whole = output.form == "table" and not (name or output.columns)
    names = TABLES if is_whole else (name or TABLES[0],)
    show(output, views(runs, names, top))


def views(runs: list[Run], names: Sequence[str] = TABLES[:1], top: int = 0) -> list[TableView]:
    from ddp_prof.present.tables.kernels import kernels_views

    tables = [kernels_views(run.overlap(), run.device_use(), top or None) for run in runs]
    return [of_run[name] for of_run in tables for name in names]
