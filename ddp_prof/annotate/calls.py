"""Runs functions before and after each call of a module, outside of the code that ``torch.compile`` compiles.

The *marks* of a module are these two functions: they open and close a range. Dynamo compiles the hooks of a module
together with the module, so marks in its hooks would break its graphs, be compiled themselves, or vanish. Therefore,
as soon as a module with marks is compiled, the marks move to the object that ``torch.compile`` returns:

    torch.compile(model)    returns a module that calls the model: its hooks are not compiled, and get the marks
    model.compile()         compiles ``_call_impl``, which runs the hooks: it is wrapped in a function with the marks
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_marked: weakref.WeakKeyDictionary[torch.nn.Module, MarkedCalls] = weakref.WeakKeyDictionary()
"""The marks of each module that has some."""
_COMPILED_CALLS = ("_call_impl", "_wrapped_call_impl", "__call__")
"""Names of the methods that run a module's hooks and its forward; ``model.compile()`` compiles one of them."""


class MarkedCalls:
    """Calls ``begin(module)`` before and ``end()`` after each call of ``model``, until :meth:`remove`.

    ``module`` is ``model``, or the compiled module that is called in its place.

    Args:
        model: The module; only a weak reference is kept.
        begin: Is called before each call.
        end: Is called after each call, even if the call raises an exception.
    """

    def __init__(
        self, model: torch.nn.Module, begin: Callable[[torch.nn.Module], None], end: Callable[[], None]
    ) -> None:
        """Add hooks to ``model``, or wrap its compiled call if ``model.compile()`` was called before."""
        self._begin, self._end, self._is_on = begin, end, True
        self._model = weakref.ref(model)
        self._handles: list[Any] = []  # of the hooks
        _marked[model] = self
        _follow_compilation()
        # model.compile() has set _compiled_call_impl, if it was called before.
        compiled: Any = getattr(model, "_compiled_call_impl", None)
        if compiled is None:
            self._add_hooks(model)
        else:
            model._compiled_call_impl = self._around(model, compiled)

    def remove(self) -> None:
        """Stop calling ``begin`` and ``end``."""
        self._is_on = False  # for the function around a compiled call, which stays in place
        self._remove_hooks()
        if (model := self._model()) is not None and _marked.get(model) is self:
            del _marked[model]

    def move_to(self, compiled: Any) -> Any:
        """Move the marks from the module to what ``torch.compile`` made of it.

        Args:
            compiled: A compiled module, or the compiled method that calls the module.

        Returns:
            The object to use in place of ``compiled``: the same module, or a function with marks around the method.
        """
        model = self._model()
        self._remove_hooks()
        if isinstance(compiled, torch.nn.Module):
            self._add_hooks(compiled)
            return compiled
        return self._around(model, compiled)

    def _add_hooks(self, module: torch.nn.Module) -> None:
        """Call ``begin`` and ``end`` from hooks of ``module``; ``end`` is called even if forward raises."""

        def before(_module: torch.nn.Module, _args: Any) -> None:
            if not torch.compiler.is_compiling():  # compiled by a ``torch.compile`` that was imported before the marks
                self._begin(module)

        def after(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self._end()

        self._handles += [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True),
        ]

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _around(self, model: torch.nn.Module | None, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs ``begin(model)``, ``call`` and ``end()``; after ``remove``, only ``call``."""

        @wraps(call)
        def marked(*args: Any, **kwargs: Any) -> Any:
            """Run ``call`` between ``begin`` and ``end``; after ``remove``, only ``call``."""
            if not self._is_on or model is None:
                return call(*args, **kwargs)
            self._begin(model)
            try:
                return call(*args, **kwargs)
            finally:
                self._end()

        return marked


def _follow_compilation() -> None:
    """Replace ``torch.compile`` by a function that also moves the marks of a module; do this once per process."""
    original = torch.compile
    if getattr(original, "moves_marks", False):
        return

    @wraps(original)
    def compile_with_marks(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        compiled = original(model, *args, **kwargs)
        marks = _find(model)
        return marks.move_to(compiled) if marks else compiled

    compile_with_marks.moves_marks = True  # type: ignore[attr-defined]
    torch.compile = compile_with_marks


def _find(compiled: Any) -> MarkedCalls | None:
    """Return the marks of a module, given the module or one of its methods in ``_COMPILED_CALLS``, if it has marks."""
    if getattr(compiled, "__name__", None) in _COMPILED_CALLS:
        compiled = getattr(compiled, "__self__", None)
    return _marked.get(compiled) if isinstance(compiled, torch.nn.Module) else None
