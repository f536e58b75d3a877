"""Opens ranges by hooks: forward, backward, optimizer, DDP's buckets, FSDP2's all-gathers and reduce-scatters.

*To mark* something is to open a range when it begins and to close the range when it ends; *marks* are the hooks that do
so.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_prof.annotate import ranges
from ddp_prof.annotate.backward_passes import passes
from ddp_prof.annotate.bucket_marks import BucketMarks
from ddp_prof.annotate.calls import MarkedCalls, follow_compilation
from ddp_prof.annotate.fsdp_marks import mark_fsdp_unit, mark_group
from ddp_prof.annotate.outer_steps import OuterSteps
from ddp_prof.annotate.ranges import NestedRange
from ddp_prof.annotate.tracebacks import stands_for

_marking_all: list[Instrumented] = []
"""The instances that mark everything created later (``ddp-prof capture``); other instances leave out what they mark."""


class Instrumented:
    """The marks on a model and its optimizers; arguments as of :func:`ddp_prof.annotate.instrument`."""

    def __init__(self, model: Any, optimizers: Sequence[Any]) -> None:
        """Mark backward passes, the forward of each model, its FSDP2 units, and the optimizers, unless they have marks.

        If an earlier instance marks everything (``is_marked``), backward passes and optimizers have ranges already.
        Without a model, this instance marks everything that is created later.
        """
        models, steppers = _take_models(model), _take_optimizers(optimizers)
        self._undo: list[Callable[[], object]] = []
        is_marked = bool(_marking_all)
        if not is_marked:
            self._undo.append(passes.acquire())
            _warn_of_order(models)
        if not models and not is_marked:
            self._mark_future_objects()
        for each in models:
            self._mark_forward(each)
            # Modules to which fully_shard was applied are numbered as buckets.
            units = [unit for unit in each.modules() if hasattr(unit, "_get_fsdp_state")]
            for index, unit in enumerate(units):
                mark_fsdp_unit(unit, index)
        for inner in () if is_marked else steppers:
            if not self._take(inner):
                continue
            marks = OptimizerMarks()
            self._undo += [
                inner.register_step_pre_hook(marks.begin).remove,
                inner.register_step_post_hook(marks.end).remove,
            ]

    def remove(self) -> None:
        """Take the marks off, the last one first.

        A communication hook that is installed stays in DDP, which cannot remove one.
        """
        while self._undo:
            self._undo.pop()()

    def _take(self, one: Any) -> bool:
        """Claim a model or an optimizer for this instance until :meth:`remove`.

        Returns:
            Whether it was claimed; ``False`` if it has marks already, of this instance or of another one.
        """
        if one in _marked:
            return False
        _marked.add(one)
        claimed = weakref.ref(one)  # what is undone must not keep what the program deletes
        self._undo.append(lambda: None if (there := claimed()) is None else _marked.discard(there))
        return True

    def _replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the function ``owner.name`` by ``make(original)`` until :meth:`remove`.

        If somebody has replaced it again by then, :meth:`remove` leaves it.
        """
        original = getattr(owner, name)
        marked = stands_for(original)(make(original))
        setattr(owner, name, marked)
        self._undo.append(lambda: setattr(owner, name, original) if getattr(owner, name) is marked else None)

    def _mark_forward(self, model: torch.nn.Module) -> None:
        """Mark each forward of ``model``, and the buckets if it is a DDP, unless it has marks already."""
        wrapped = getattr(model, "_orig_mod", model)  # torch.compile keeps the module as _orig_mod
        if BucketMarks.of(wrapped) or not self._take(wrapped):
            return
        opened: list[NestedRange] = []
        process = None
        buckets = BucketMarks(wrapped) if _has_buckets(wrapped) else None

        def begin(_module: torch.nn.Module) -> None:
            """Open the range of a forward pass, after a short range that tells the rank; prepare DDP's buckets."""
            nonlocal process
            if buckets:
                buckets.begin_forward()
            # At the first forward: if a DDP's forward is running, this module is inside the DDP, which has no marks.
            elif process is None and DistributedDataParallel._active_ddp_module is not None:
                warnings.warn(f"{_NOT_THE_WRAPPER}: {_WRAP_FIRST}", stacklevel=2)
            # Opened in each step and so short that every recording of a step contains one.
            with (process := process or process_range(type(wrapped).__name__, wrapped.parameters())):
                pass
            opened.append(ranges.forward())
            opened[-1].__enter__()

        def end() -> None:
            """Close the range of the innermost forward pass, and prepare for backward."""
            if opened:
                opened.pop().__exit__()
            if buckets:
                buckets.end_forward()

        remove_calls = weakref.WeakMethod(MarkedCalls(model, begin, end).remove)
        remove_buckets = weakref.WeakMethod(buckets.remove) if buckets else None
        self._undo += [partial(_call_if_there, remove) for remove in (remove_buckets, remove_calls) if remove]

    def _mark_future_objects(self) -> None:
        """Mark every DDP, FSDP2 parameter group and optimizer from now on, until :meth:`remove`.

        The ``__init__`` of DDP and of FSDP2's parameter group are replaced, so that each new object gets its marks.
        """

        def mark_made(mark: Callable[[Any], None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            """Return a function that wraps an ``__init__``, so that ``mark`` is called with each new object."""

            def make(original: Callable[..., Any]) -> Callable[..., Any]:
                """Return an ``__init__`` that does what ``original`` does, and then marks the object."""

                def init(made: Any, *args: Any, **kwargs: Any) -> None:
                    original(made, *args, **kwargs)
                    mark(made)

                return init

            return make

        follow_compilation()  # now: in torch.compile(DistributedDataParallel(...)) Python looks up torch.compile first
        self._replace(DistributedDataParallel, "__init__", mark_made(self._mark_forward))
        with suppress(ImportError):  # torch without FSDP2
            from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

            numbers = count()
            self._replace(FSDPParamGroup, "__init__", mark_made(lambda group: mark_group(group, next(numbers))))
        _marking_all.append(self)
        marks = OptimizerMarks()
        self._undo += [
            lambda: _marking_all.remove(self),
            register_optimizer_step_pre_hook(marks.begin).remove,
            register_optimizer_step_post_hook(marks.end).remove,
        ]


def _call_if_there(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call the method, unless its object was deleted."""
    if (call := method()) is not None:
        call()


_marked: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models and optimizers that have marks."""
_NOT_THE_WRAPPER = "annotate.instrument got the module inside a DistributedDataParallel, whose buckets are not marked"
_WRAP_FIRST = "call it after DistributedDataParallel(...), with what that returns"


def has_agreed_unseen() -> bool:
    """Return whether ranks have agreed on the buckets of a DDP since the last call, in a forward that was not seen."""
    marks = [BucketMarks.of(one) for one in _marked if isinstance(one, torch.nn.Module)]
    return sum(each.has_agreed_unseen() for each in marks if each) > 0  # each is asked


def _each(given: Any) -> list[Any]:
    """Return the elements of lists and tuples, nested to any depth, as one list; ``[given]`` if it is neither."""
    if isinstance(given, (list, tuple)):
        return [one for part in given for one in _each(part)]
    return [given]


def _take_models(given: Any) -> list[torch.nn.Module]:
    """Return the first argument of ``instrument`` as a list: a module, modules in lists, or ``None``.

    Raises:
        TypeError: An element is no module.
    """
    models = [] if given is None else _each(given)
    for one in models:
        if not isinstance(one, torch.nn.Module):
            raise TypeError(
                "annotate.instrument takes the model first, then its optimizers, as instrument(model, optimizer): "
                f"a {type(one).__name__} is no torch.nn.Module"
            )
    return models


def _take_optimizers(given: Sequence[Any]) -> list[Any]:
    """Return the torch optimizers that ``instrument`` was given, unwrapped.

    Accelerate and other libraries wrap an optimizer in an object that never calls its own hooks, only those of the
    optimizer inside, which is its attribute ``optimizer``.

    Raises:
        TypeError: An element is no optimizer.
    """
    found = [getattr(one, "optimizer", one) for one in _each(given)]
    for one in found:
        if isinstance(one, type) or not hasattr(one, "register_step_pre_hook"):
            name = f"the class {one.__name__}" if isinstance(one, type) else f"a {type(one).__name__}"
            raise TypeError(
                "annotate.instrument takes optimizers, or lists of them, after the model, as "
                f"instrument(model, optimizer): {name} is no torch.optim.Optimizer"
            )
    return found


def _warn_of_order(models: Sequence[torch.nn.Module]) -> None:
    """Warn if the order of the calls leaves buckets without ranges; ``models``: the arguments of ``instrument``.

    Without models, only a DDP that is created later is marked, so one that exists already is missed. With models, the
    wrapper must be passed: the module inside it, or a module that is wrapped later, has no buckets.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    there = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    if not models and any(BucketMarks.of(one) is None for one in there if _has_buckets(one)):
        warnings.warn(
            "annotate.instrument() marks what is created after it, and a DistributedDataParallel is there already, "
            "whose buckets are not marked: call it first, or pass the model",
            stacklevel=4,
        )
    for model in models:
        inner = getattr(model, "_orig_mod", model)
        if any(one is not inner and inner in one.modules() for one in there):
            warnings.warn(f"{_NOT_THE_WRAPPER}: {_WRAP_FIRST}", stacklevel=4)
        elif not any(_reduces_gradients(one) for one in inner.modules()):
            warnings.warn(
                f"annotate.instrument got a {type(inner).__name__} that nothing wraps, so only its phases are marked: "
                f"if it is to be wrapped, {_WRAP_FIRST}",
                stacklevel=4,
            )


def _has_buckets(module: torch.nn.Module) -> TypeGuard[DistributedDataParallel]:
    """Return whether the module is a DDP that reduces buckets.

    With ``torch._dynamo.config.optimize_ddp = "python_reducer"`` it compiles all-reduces of parameters into backward,
    and would call a hook for buckets with each parameter.
    """
    return isinstance(module, DistributedDataParallel) and not getattr(module, "_use_python_reducer", False)


def _reduces_gradients(module: torch.nn.Module) -> bool:
    """Return whether the module is a DDP, a unit of FSDP1 or FSDP2, or one of the variants in ``ddp_prof.ddp``."""
    is_sharded = hasattr(module, "_get_fsdp_state") or type(module).__name__ == "FullyShardedDataParallel"
    return (
        isinstance(module, DistributedDataParallel) or is_sharded or hasattr(module, "finish_gradient_synchronization")
    )


def process_range(variant: str, parameters: Iterable[torch.Tensor]) -> NestedRange:
    """Return the ``process`` range, from which the readers of a trace know the rank.

    Args:
        variant: Name of the wrapper or optimizer class, which is shown as the variant.
        parameters: Parameters of the model; the first one tells the device.
    """
    parameter = next(iter(parameters), None)
    is_ready = dist.is_available() and dist.is_initialized()
    return ranges.process(
        rank=dist.get_rank() if is_ready else 0,
        world=dist.get_world_size() if is_ready else 1,
        variant=variant,
        backend=str(dist.get_backend()).replace("|", " ") if is_ready else "none",
        device="cpu" if parameter is None else parameter.device.type,
    )


_outer_steps = OuterSteps()
"""Of all optimizers that have marks."""


class OptimizerMarks:
    """Hooks that open a range around ``optimizer.step()``; if it raises, the range stays open until the next step.

    A step within the step of another marked optimizer is in the range of that one.
    """

    def __init__(self) -> None:
        self._opened: list[NestedRange] = []

    def begin(self, optimizer: Any, *_: Any) -> None:
        if not _outer_steps.begins(optimizer):
            return
        self._close()
        self._opened.append(ranges.optimizer())
        self._opened[-1].__enter__()

    def end(self, optimizer: Any, *_: Any) -> None:
        if _outer_steps.ends(optimizer):
            self._close()

    def _close(self) -> None:
        while self._opened:
            self._opened.pop().__exit__()
