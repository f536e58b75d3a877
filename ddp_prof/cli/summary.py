"""``ddp-prof summary``, which ``ddp-prof TRACE`` stands for."""

from pathlib import Path
from typing import TYPE_CHECKING

from ddp_prof.cli.options.commands import load_options, table_options, trace_command, traces_argument

if TYPE_CHECKING:  # they import what takes long
    from ddp_prof.cli.options.commands import Loader
    from ddp_prof.present.table import TableOptions


@trace_command("summary", "traces/overlap.sqlite")
@traces_argument
@table_options
@load_options
def command(traces: tuple[Path, ...], load: "Loader", output: "TableOptions") -> None:
    """The answer in ten lines: a step's parts, what of communication is exposed, what hiding it would gain at most.

    'ddp-prof TRACE...' does the same.
    """
    from ddp_prof.present.table import show
    from ddp_prof.present.tables.summary import summary_view
    from ddp_prof.runs.load import find_files
    from ddp_prof.runs.parts import is_read_in_parts
    from ddp_prof.runs.run import DOCTOR, summarize_runs

    files = find_files(traces)
    ask_doctor = not any(is_read_in_parts(file, load.options.part_rows) for file in files)
    runs = load.runs(traces, *(DOCTOR if ask_doctor else ("overlap", "collectives")))
    show(output, [summary_view(summarize_runs(runs, ask_doctor=ask_doctor))])
