"""The options of every command that prints a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from ddp_prof.cli.options.adding import add_options
from ddp_prof.cli.options.verbosity import is_quiet

if TYPE_CHECKING:
    from collections.abc import Callable

Function = TypeVar("Function", bound="Callable[..., Any]")

FORMS = ("table", "json", "csv", "markdown")


def table_options(function: Function) -> Function:
    """Adds ``--format``, ``--wide`` and ``--columns``, handed over as one ``output``, a ``TableOptions``."""

    def with_output(*args: Any, form: str, wide: bool, columns: tuple[str, ...], **kwargs: Any) -> Any:
        from ddp_prof.present.table import TableOptions

        return function(*args, output=TableOptions(form, wide, columns, is_quiet()), **kwargs)

    return add_options(function, with_output, _OPTIONS)


def _keys(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[str, ...]:
    """``rank,step_ms`` as keys; as a person may write them, with spaces for underscores."""
    return tuple("_".join(key.split()) for key in (text or "").split(",") if key.strip())


_OPTIONS = (
    click.option(
        "--columns",
        metavar="KEY,...",
        callback=_keys,
        help="Columns to show, in this order, by their names in the CSV: rank,step_ms.",
    ),
    click.option("--wide", is_flag=True, help="Show all columns, however narrow the terminal."),
    click.option(
        "--format",
        "form",
        type=click.Choice(FORMS),
        default=FORMS[0],
        show_default=True,
        help="Form of the output.",
    ),
)
