"""How much a command says beside its result; options of all commands, and before them."""

from __future__ import annotations

import logging

import click

_QUIET = "ddp_prof.quiet"


def is_quiet() -> bool:
    """Whether notes are left out in the command that runs."""
    return bool(click.get_current_context().meta.get(_QUIET))


def _be_quiet(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        context.meta[_QUIET] = True


def _be_verbose(_context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        logging.basicConfig(format="%(message)s", force=True)
        logging.getLogger("ddp_prof").setLevel(logging.INFO)


TALKING = [
    click.Option(["-q", "--quiet"], is_flag=True, expose_value=False, callback=_be_quiet, help="Leave out the notes."),
    click.Option(
        ["-v", "--verbose"],
        is_flag=True,
        expose_value=False,
        callback=_be_verbose,
        help="Say on stderr what is read, and how long that takes.",
    ),
]
