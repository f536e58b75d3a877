"""``ddp-prof doctor``."""

from __future__ import annotations

from pathlib import Path

from ddp_prof.cli.options.commands import Loader, load_options, table_options, trace_command, traces_argument
from ddp_prof.present.table import TableOptions, TableView, show
from ddp_prof.runs.run import DOCTOR, Run

MEASURES = DOCTOR


@trace_command("doctor", "traces/flat.sqlite")
@traces_argument
@table_options
@load_options
def command(traces: tuple[Path, ...], load: Loader, output: TableOptions) -> None:
    """What in the set-up of a job keeps its communication from hiding: findings, evidence, what to change.

    Each rule looks for one thing, such as collectives on the stream of compute, one bucket for all gradients, a host
    that waits in backward, or a rank that is late. A rule that the traces do not let decide says so.
    """
    show(output, views(load.runs(traces, *MEASURES)))


def views(runs: list[Run]) -> list[TableView]:
    from ddp_prof.present.tables.summary import doctor_view

    return [doctor_view(run.analysis(), run.doctor()) for run in runs]
