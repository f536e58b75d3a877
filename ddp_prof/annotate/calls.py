"""Runs functions before and after each call of a module, outside of the code that ``torch.compile`` compiles.

The *marks* of a module are these two functions: they open and close a range. Dynamo compiles the hooks of a module
together with the module, so marks in its hooks would break its graphs, be compiled themselves, or vanish. Therefore,
as soon as a module with marks is compiled, the marks move to the object that ``torch.compile`` returns:

    torch.compile(model)    returns a module that calls the model: its hooks are not compiled, and get the marks
    model.compile()         compiles ``_call_impl``, which runs the hooks: it is wrapped in a function with the marks

A module owns its marks, so they go with it when the program deletes it. A deep copy or pickle of the module has none.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from ddp_prof.annotate.tracebacks import stands_for

_ATTRIBUTE = "_ddp_prof_calls"
"""Attribute of a module that holds its :class:`MarkedCalls` in an :class:`Owned`."""
_COMPILED_CALLS = ("_call_impl", "_wrapped_call_impl", "__call__")
"""Names of the methods that run a module's hooks and its forward; ``model.compile()`` compiles one of them."""


class Owned:
    """Holds an object in an attribute of a module. In a deep copy or pickle of the module the attribute is ``None``."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class Hook:
    """A hook of a module that calls a function. In a deep copy or pickle of the module it is one that does nothing.

    A function within a function, as hooks with a state are, cannot be pickled; and a program that loads the pickle need
    not have ddp_prof.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments and returns None


class MarkedCalls:
    """Calls ``begin(module)`` before and ``end()`` after each call of ``model``, until :meth:`remove`.

    ``module`` is ``model``, or the compiled module that is called in its place.

    Args:
        model: The module, which keeps this object; this object has only a weak reference to it.
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
        vars(model)[_ATTRIBUTE] = Owned(self)
        follow_compilation()
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
        if (model := self._model()) is not None and _marks_of(model) is self:
            del vars(model)[_ATTRIBUTE]

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
            module.register_forward_pre_hook(Hook(before), prepend=True),
            module.register_forward_hook(Hook(after), always_call=True),
        ]

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _around(self, model: torch.nn.Module | None, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs ``begin(model)``, ``call`` and ``end()``; after ``remove``, only ``call``."""

        @stands_for(call)
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


def follow_compilation() -> None:
    """Replace ``torch.compile`` by a function that also moves the marks of a module; do this once per process."""
    original = torch.compile
    if getattr(original, "moves_marks", False):
        return

    @stands_for(original)
    def compile_with_marks(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        compiled = original(model, *args, **kwargs)
        leave_to_python()
        marks = _find(model)
        return marks.move_to(compiled) if marks else compiled

    compile_with_marks.moves_marks = True  # type: ignore[attr-defined]
    torch.compile = compile_with_marks


@cache
def leave_to_python() -> None:
    """Let dynamo leave our functions to Python: it also sees those that mark passes and steps of what it compiles."""
    leave_out = getattr(sys.modules.get("torch._dynamo.trace_rules"), "add", None)
    if leave_out is not None:
        for package in (__package__, "nvtx"):
            leave_out(package)


def _find(compiled: Any) -> MarkedCalls | None:
    """Return the marks of a module, given the module or one of its methods in ``_COMPILED_CALLS``, if it has marks."""
    if getattr(compiled, "__name__", None) in _COMPILED_CALLS:
        compiled = getattr(compiled, "__self__", None)
    return _marks_of(compiled) if isinstance(compiled, torch.nn.Module) else None


def _marks_of(model: torch.nn.Module) -> MarkedCalls | None:
    """Return the marks of a module; ``None`` if it has none, or shares the attributes of one that it is a copy of."""
    marks: MarkedCalls | None = getattr(vars(model).get(_ATTRIBUTE), "held", None)
    return marks if marks is not None and marks._model() is model else None
