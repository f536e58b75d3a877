"""``ddp-prof info``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ddp_prof.cli.options import Selection, format_option, selection_options, traces_argument

if TYPE_CHECKING:
    from pathlib import Path


@click.command("info")
@traces_argument
@format_option
@selection_options
def command(traces: tuple[Path, ...], selection: Selection, form: str) -> None:
    """What a trace holds, and what is missing for which question."""
    from ddp_prof.analyze.core.inventory import take_inventory
    from ddp_prof.present.tables.info import info_view
    from ddp_prof.present.tables.render import show

    inventories = [take_inventory(trace, step_pattern=selection.step_pattern) for trace in selection.load(traces)]
    show(form, [info_view(inventory) for inventory in inventories])
