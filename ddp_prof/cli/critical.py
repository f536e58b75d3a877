"""``ddp-prof critical``."""

from __future__ import annotations

from pathlib import Path

from ddp_prof.cli.options.commands import Loader, load_options, table_options, trace_command, traces_argument
from ddp_prof.present.table import TableOptions, TableView, show
from ddp_prof.runs.run import Run

MEASURES = ("collectives", "critical")


@trace_command("critical", "traces/overlap.sqlite")
@traces_argument
@table_options
@load_options
def command(traces: tuple[Path, ...], load: Loader, output: TableOptions) -> None:
    """What the critical path of each step consists of: compute, transfer, waiting, host.

    The path begins with the last operation of a step and follows backwards what each operation began after: the one
    before it on its stream, a recorded wait, or its launch. Its parts sum to its length. Give the traces of all ranks:
    at a collective the path goes on with the rank that arrived last.
    """
    show(output, views(load.runs(traces, *MEASURES)))


def views(runs: list[Run]) -> list[TableView]:
    from ddp_prof.present.tables.collectives import critical_view

    return [critical_view(run.analysis(), run.critical()) for run in runs]
