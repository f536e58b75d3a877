"""How a group of options is added to a command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Function = TypeVar("Function", bound="Callable[..., Any]")


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
