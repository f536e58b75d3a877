"""``ddp-prof collectives``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ddp_prof.cli.options import Selection, format_option, one_run_option, selection_options, traces_argument

if TYPE_CHECKING:
    from pathlib import Path


@click.command("collectives")
@traces_argument
@click.option(
    "--by",
    type=click.Choice(["collective", "step", "bucket"]),
    default="collective",
    show_default=True,
    help="What a row stands for; JSON always lists every collective.",
)
@one_run_option
@format_option
@selection_options
def command(traces: tuple[Path, ...], selection: Selection, by: str, one_run: bool, form: str) -> None:
    """The life of each collective, and why it is exposed.

    Ready, launch, start, end; what of it is overlapped or exposed; and one cause for each exposed nanosecond: tail,
    launched late, queued, waiting, starved, synchronous. The ranks of one run may lie in several files.
    """
    from ddp_prof.analyze.collectives import measure_collectives
    from ddp_prof.present.collective_rows import collectives_sheet
    from ddp_prof.present.table import show

    runs = selection.runs(traces, one_run=one_run)
    show(form, [collectives_sheet(run, measure_collectives(run.ranks, run.warnings), by) for run in runs])
