"""``ddp-prof summary``, which ``ddp-prof TRACE`` stands for."""

from pathlib import Path

from ddp_prof.cli.options.commands import Loader, load_options, table_options, trace_command, traces_argument
from ddp_prof.present.table import TableOptions, TableView, show
from ddp_prof.runs.run import DOCTOR, Run, summarize_runs


@trace_command("summary", "traces/overlap.sqlite")
@traces_argument
@table_options
@load_options
def command(traces: tuple[Path, ...], load: "Loader", output: "TableOptions") -> None:
    """The answer in ten lines: a step's parts, what of communication is exposed, what hiding it would gain at most.

    'ddp-prof TRACE...' does the same.
    """
    from ddp_prof.runs import find_files

    measures = summary_measures(find_files(traces), load.options.part_rows)
    show(output, views(load.runs(traces, *measures)))


def summary_measures(files: list[Path], part_rows: int | None = None) -> tuple[str, ...]:
    """What is measured for it: without the doctor, who needs all events at once, where a trace is read in parts."""
    from ddp_prof.runs.report import is_read_in_parts

    return ("overlap", "collectives") if any(is_read_in_parts(file, part_rows) for file in files) else DOCTOR


def views(runs: "list[Run]") -> "list[TableView]":
    from ddp_prof.present.tables.summary import summary_view

    was_asked_for = all("facts" in run.measured[file] for run in runs for file in run.files)
    return [summary_view(summarize_runs(runs, ask_doctor=was_asked_for))]
