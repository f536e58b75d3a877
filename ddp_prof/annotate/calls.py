"""Runs functions before and after each call of a module, outside of what ``torch.compile`` compiles.

Dynamo compiles the hooks of a module together with the module: marks in hooks would break its graphs, be compiled
themselves, or vanish. So as soon as a marked module is compiled, its marks move to what ``torch.compile`` returns.

    torch.compile(model)    returns a module, which is called first: its hooks run outside
    model.compile()         keeps a compiled ``_call_impl``, hooks included: it is put into a function
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_marked: weakref.WeakKeyDictionary[torch.nn.Module, MarkedCalls] = weakref.WeakKeyDictionary()
_COMPILED_CALLS = ("_call_impl", "_wrapped_call_impl", "__call__")


class MarkedCalls:
    """Calls ``begin(module)`` before and ``end()`` after each call of ``model``, until :meth:`remove`."""

    def __init__(
        self, model: torch.nn.Module, begin: Callable[[torch.nn.Module], None], end: Callable[[], None]
    ) -> None:
        self._begin, self._end, self._is_on = begin, end, True
        self._model = weakref.ref(model)
        self._handles: list[Any] = []
        _marked[model] = self
        _follow_compilation()
        compiled: Any = getattr(model, "_compiled_call_impl", None)
        if compiled is None:
            self._add_hooks(model)
        else:
            model._compiled_call_impl = self._around(model, compiled)

    def remove(self) -> None:
        self._is_on = False
        self._remove_hooks()
        if (model := self._model()) is not None and _marked.get(model) is self:
            del _marked[model]

    def move_to(self, compiled: Any) -> Any:
        """Mark the calls of a compiled module, or of a compiled call, instead of those of the module itself."""
        model = self._model()
        self._remove_hooks()
        if isinstance(compiled, torch.nn.Module):
            self._add_hooks(compiled)
            return compiled
        return self._around(model, compiled)

    def _add_hooks(self, module: torch.nn.Module) -> None:
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
        @wraps(call)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on or model is None:
                return call(*args, **kwargs)
            self._begin(model)
            try:
                return call(*args, **kwargs)
            finally:
                self._end()

        return marked


def _follow_compilation() -> None:
    """Let ``torch.compile`` move marks, from the first call on."""
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
    """Return the marks of a module, or of the module whose call this is."""
    if getattr(compiled, "__name__", None) in _COMPILED_CALLS:
        compiled = getattr(compiled, "__self__", None)
    return _marked.get(compiled) if isinstance(compiled, torch.nn.Module) else None
