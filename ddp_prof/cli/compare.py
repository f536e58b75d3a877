"""``ddp-prof compare``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ddp_prof.cli.options import Selection, format_option, selection_options, traces_argument

if TYPE_CHECKING:
    from pathlib import Path


@click.command("compare")
@traces_argument
@format_option
@selection_options
def command(traces: tuple[Path, ...], selection: Selection, form: str) -> None:
    """Variants side by side: step time, communication, what hides and what does not.

    Speed-ups are over the run called 'naive', where there is one.
    """
    from ddp_prof.present.rows import compare_sheet
    from ddp_prof.present.table import show

    show(form, [compare_sheet(selection.measure(traces))])
