"""What the commands have in common: groups of options that are added to them, and how their help is laid out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Function = TypeVar("Function", bound="Callable[..., Any]")

_READING = frozenset(
    {"step_range", "backward_range", "comm_pattern", "separate", "one_run", "jobs", "part_rows", "scheduler", "strict"}
)
"""Options of how traces are read."""
_GENERAL = frozenset({"quiet", "verbose", "help"})


class TraceCommand(click.Command):
    """A command whose help has its own options first, and ends with an example."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options in groups."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": [], "How traces are read": [], "General": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record and isinstance(parameter, click.Option):
                name = parameter.opts[-1].removeprefix("--").replace("-", "_")
                group = "How traces are read" if name in _READING else "General" if name in _GENERAL else "Options"
                groups[group].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def trace_command(name: str, example: str) -> Callable[[Callable[..., Any]], click.Command]:
    """A command with an example of its use, which its help ends with.

    Args:
        name: Of the command.
        example: What follows ``ddp-prof`` and its name.
    """
    return click.command(name, cls=TraceCommand, epilog=f"Example: ddp-prof {name} {example}")


def add_options(function: Function, taking: Callable[..., Any], options: Iterable[Callable[..., Any]]) -> Function:
    """A command's function with more options.

    Args:
        function: The command's, with the options that it has.
        taking: Takes the values of the options, and calls the function with what it makes of them.
        options: Decorators of click.
    """
    taking.__doc__ = function.__doc__
    taking.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    for option in options:
        taking = option(taking)
    return taking  # type: ignore[return-value]
