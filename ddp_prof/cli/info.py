"""``ddp-prof info``."""

from __future__ import annotations

from pathlib import Path

from ddp_prof.cli.options.commands import Loader, load_options, table_options, trace_command, traces_argument
from ddp_prof.present.table import TableOptions, TableView, show
from ddp_prof.runs.run import Run

MEASURES = ("inventory",)


@trace_command("info", "traces/overlap.sqlite")
@traces_argument
@table_options
@load_options
def command(traces: tuple[Path, ...], load: Loader, output: TableOptions) -> None:
    """What a trace holds, and what is missing for which question."""
    show(output, views(load.runs(traces, *MEASURES)))


def views(runs: list[Run]) -> list[TableView]:
    from ddp_prof.present.tables.overlap import info_view

    return [info_view(file) for run in runs for file in run.inventory()]
