"""Opens ranges by hooks: forward, backward, optimizer, DDP's buckets, FSDP2's all-gathers and reduce-scatters.

*To mark* something is to open a range when it begins and to close the range when it ends; *marks* are the hooks that do
so. No hook of torch encloses a whole backward pass. So ``torch.autograd.backward``, which every ``loss.backward()``
calls, is replaced by a function that opens a range around it.
"""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial, update_wrapper, wraps
from itertools import count
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_prof import range_names
from ddp_prof.annotate import ranges
from ddp_prof.annotate.calls import MarkedCalls, Owned
from ddp_prof.annotate.ranges import NestedRange, OpenRange
from ddp_prof.annotate.tracebacks import hide_own_frames

NSYS_VARIABLES = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH", "QUADD_INJECTION_CONFIG")
"""Environment variables; nsys sets at least one of them for the program that it runs."""
_OF_BUCKETS = "_ddp_prof_buckets"
"""Attribute of a DDP that holds its :class:`BucketMarks` in an :class:`.Owned`."""
_NAMED_RANKS = 16
"""Most ranks that are listed in the name of a process group."""
DEFAULT_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
"""A communication hook of DDP: takes its state and a bucket, returns a future of the reduced bucket."""


class BackwardPasses:
    """Marks backward passes, which nest if a part of the model is computed again (activation checkpointing).

    DDP may wait for its buckets at the end of a pass: a ``synchronize`` range is opened there. If the buckets have
    ranges, the outermost ``backward`` range ends where this wait begins, so that the communication after it counts as
    the tail of backward. Ranges of buckets that are still open are closed at the end of the outermost pass.
    """

    def __init__(self) -> None:
        self._open: list[OpenRange] = []
        self._depth = self._users = 0
        self._may_wait = self._ends_at_wait = False

    def acquire(self) -> Callable[[], None]:
        """Mark all passes from now on, and return the function :meth:`_release`, by which the caller stops this.

        All callers share one replacement of ``torch.autograd.backward``, so that a pass gets one range. It is taken
        back when every caller has called the function that it got.
        """
        hide_own_frames()
        self._users += 1
        if self._users == 1:
            self._original = original = torch.autograd.backward

            @wraps(original)
            def marked(tensors: Any, *args: Any, **kwargs: Any) -> None:
                """Run ``torch.autograd.backward`` within a range, as long as marks are wanted."""
                if isinstance(tensors, Iterator):
                    tensors = tuple(tensors)  # _mark and original both read them
                with self._mark(tensors) if self._users else nullcontext():
                    original(tensors, *args, **kwargs)

            torch.autograd.backward = self._marked = marked
        return self._release

    def _release(self) -> None:
        self._users -= 1
        if not self._users and torch.autograd.backward is self._marked:
            torch.autograd.backward = self._original

    @contextmanager
    def _mark(self, tensors: Any) -> Iterator[None]:
        """Return a context that marks one backward pass, and DDP's wait for its buckets at the end of the pass.

        Args:
            tensors: The roots of the pass (one tensor or several), for example the loss.
        """
        self._depth += 1
        is_queued = False
        # own holds the backward range, waits the synchronize range; each closes what it holds.
        own, waits, thread = ExitStack(), ExitStack(), get_ident()

        def queue_begin_wait(_gradient: torch.Tensor) -> None:
            """Let autograd call ``begin_wait`` at the end of this pass.

            DDP queues its own callback when its last bucket is full, which is later, so it is called later.
            """
            nonlocal is_queued
            if not is_queued and not torch.compiler.is_compiling():  # compiled autograd refuses callbacks
                is_queued = True
                with suppress(RuntimeError):  # raised in a compiled pass
                    torch.autograd.Variable._execution_engine.queue_callback(begin_wait)

        def begin_wait() -> None:
            """End the backward range if buckets have ranges; open ``synchronize``. Autograd's thread may call this."""
            if get_ident() == thread:  # a nested range is cheaper
                if self._depth == 1 and self._ends_at_wait:
                    own.close()
                waits.enter_context(ranges.synchronize())
            else:
                waits.callback(ranges.start_synchronize().end)

        roots = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
        # Autograd accepts callbacks only while it runs, and it may begin with any of the roots.
        hooks = [
            root.register_hook(queue_begin_wait)  # type: ignore[no-untyped-call]
            for root in roots
            if self._may_wait and isinstance(root, torch.Tensor) and root.requires_grad
        ]
        try:
            with own, waits:
                own.enter_context(ranges.backward())
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._depth -= 1
            if not self._depth:
                self._may_wait = False
                while self._open:
                    self._open.pop().end()

    def expect_wait(self, *, marks_buckets: bool) -> None:
        """Note that DDP reduces gradients in the next pass; ``marks_buckets``: whether each bucket gets a range."""
        self._may_wait, self._ends_at_wait = True, marks_buckets

    def add_bucket(self, span: OpenRange) -> None:
        """Close ``span``, the range of a bucket, at the end of the pass if it is still open then.

        gloo's thread may close it only later.
        """
        if self._depth:  # outside of a pass, a rank without a batch takes part in the reductions of the others
            self._open.append(span)


_passes = BackwardPasses()

agreement_follows = False
"""Whether a DDP has run its first forward since the last step began.

In DDP's second pass, that is, in the next step, ranks agree on the order of its buckets."""

at_synchronized_forward: list[Callable[[DistributedDataParallel], None]] = []
"""Called before each forward of a marked DDP whose backward synchronizes gradients."""

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
            self._undo.append(_passes.acquire())
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
        marked = wraps(original)(make(original))
        setattr(owner, name, marked)
        self._undo.append(lambda: setattr(owner, name, original) if getattr(owner, name) is marked else None)

    def _mark_forward(self, model: torch.nn.Module) -> None:
        """Mark each forward of ``model``, and the buckets if it is a DDP, unless it has marks already."""
        wrapped = getattr(model, "_orig_mod", model)  # torch.compile keeps the module as _orig_mod
        if BucketMarks.of(wrapped) or not self._take(wrapped):
            return
        opened: list[NestedRange] = []
        process = None
        buckets = BucketMarks(wrapped) if isinstance(wrapped, DistributedDataParallel) else None

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

        self._replace(DistributedDataParallel, "__init__", mark_made(self._mark_forward))
        with suppress(ImportError):  # torch without FSDP2
            from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

            numbers = count()
            self._replace(FSDPParamGroup, "__init__", mark_made(lambda group: _mark_group(group, next(numbers))))
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
    if not models and any(BucketMarks.of(one) is None for one in there):
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


def _reduces_gradients(module: torch.nn.Module) -> bool:
    """Return whether the module is a DDP, a unit of FSDP1 or FSDP2, or one of the variants in ``ddp_prof.ddp``."""
    is_sharded = hasattr(module, "_get_fsdp_state") or type(module).__name__ == "FullyShardedDataParallel"
    return (
        isinstance(module, DistributedDataParallel) or is_sharded or hasattr(module, "finish_gradient_synchronization")
    )


def is_under_nsys() -> bool:
    """Return whether nsys runs this program, by the environment variables that it sets."""
    return any(name in os.environ for name in NSYS_VARIABLES)


def is_recorded() -> bool:
    """Return whether ranges are switched on and torch.profiler records, or nsys runs the program."""
    return ranges.is_enabled() and (is_under_nsys() or bool(torch.autograd.profiler._is_profiler_enabled))


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


class OptimizerMarks:
    """Hooks that open a range around ``optimizer.step()``; if it raises, the range stays open until the next step."""

    def __init__(self) -> None:
        self._opened: list[NestedRange] = []

    def begin(self, *_: Any) -> None:
        self.end()
        self._opened.append(ranges.optimizer())
        self._opened[-1].__enter__()

    def end(self, *_: Any) -> None:
        while self._opened:
            self._opened.pop().__exit__()


class BucketMarks:
    """Marks each bucket of one DDP by a communication hook of ours, which calls the user's hook if there is one.

    With gloo on a CPU, torch.profiler records the collectives by itself, and a hook costs time. Then no hook is
    installed unless nsys records: DDP does its own all-reduce, and one range before backward holds the bucket sizes.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        """Let ``ddp.register_comm_hook`` call :meth:`register`, so that a hook of the program is called by ours.

        If the program has registered its hook before, the buckets cannot be marked, and a warning says so.
        """
        self._owner = weakref.ref(ddp)  # DDP's reducer, in C++, holds the hook, so the hook must not hold the DDP
        vars(ddp)[_OF_BUCKETS] = Owned(self)
        _follow_registration()
        self._hook: Hook | None = None  # the program's communication hook, and its state
        self._state: Any = None
        self._group = MarkingGroup(ddp.process_group)
        self._is_installed = bool(ddp._comm_hooks)
        # A DDP that finds unused parameters keeps its first buckets, and also reduces a map of the used parameters.
        self._finds_unused = ddp.find_unused_parameters and not ddp.static_graph
        self._has_run = self._finds_unused  # such a DDP never agrees on a new order of buckets
        on_host = all(parameter.device.type == "cpu" for parameter in ddp.parameters())
        self._reduces_on_host = on_host and dist.get_backend(ddp.process_group) == dist.Backend.GLOO
        self._sizes: NestedRange | None = None
        if self._is_installed:
            warnings.warn("buckets are not marked: call annotate.instrument before register_comm_hook", stacklevel=4)

    @staticmethod
    def of(ddp: torch.nn.Module) -> BucketMarks | None:
        """Return the marks of a DDP; ``None`` for any other module, also for a copy that shares its attributes."""
        marks: BucketMarks | None = getattr(vars(ddp).get(_OF_BUCKETS), "held", None)
        return marks if marks is not None and marks._owner() is ddp else None

    @property
    def _ddp(self) -> DistributedDataParallel:
        ddp = self._owner()
        assert ddp is not None, "only calls of the DDP come here"
        return ddp

    def remove(self) -> None:
        """Let ``ddp.register_comm_hook`` do what torch's does again; a hook of ours that is installed stays."""
        if (ddp := self._owner()) is not None:
            vars(ddp).pop(_OF_BUCKETS, None)

    def has_agreed_unseen(self) -> bool:
        """Return, once, whether ranks have agreed on new buckets though no forward was seen, as in compiled code."""
        if self._has_run or not getattr(self._owner(), "_has_rebuilt_buckets", False):
            return False
        self._has_run = True
        return True

    def begin_forward(self) -> None:
        """Install our communication hook if a profiler records, unless one is installed or none is needed."""
        # DDP reduces gradients in the backward of this forward.
        if self._ddp.require_backward_grad_sync and torch.is_grad_enabled():
            for call in at_synchronized_forward:
                call(self._ddp)
        needs_hook = is_under_nsys() or not self._reduces_on_host
        if needs_hook and is_recorded() and not self._is_installed:
            _register_with_torch(self._ddp, None, CommHook(self._reduce, None))
            self._is_installed = True

    def end_forward(self) -> None:
        """Announce a backward in which DDP reduces gradients; if no hook is installed, emit a range of bucket sizes."""
        global agreement_follows
        if not (self._ddp.require_backward_grad_sync and torch.is_grad_enabled()):
            return
        if not self._has_run:
            self._has_run = agreement_follows = True
        if not is_recorded():
            return
        _passes.expect_wait(marks_buckets=self._is_installed)
        if not self._is_installed:
            self._sizes = self._sizes or self._find_sizes()
            if self._sizes:
                with self._sizes:
                    pass

    def _find_sizes(self) -> NestedRange | None:
        """Return a range that holds the bucket sizes; ``None`` until DDP has rebuilt its buckets.

        DDP rebuilds them after the first pass, in the order in which the gradients arrived.
        """
        ddp, known = self._ddp, self._ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        sizes = known["bucket_sizes"] if self._finds_unused else known.get("rebuilt_bucket_sizes")
        if not sizes:
            return None
        names = name_group(ddp.process_group)
        return ranges.buckets([int(size) for size in sizes.split(",")], int(self._finds_unused), **names)

    def register(self, state: Any, hook: Callable[..., Any]) -> None:
        """Register our communication hook, and keep the user's, which it calls; as ``ddp.register_comm_hook``."""
        if self._hook is None and self._is_installed:  # ours is registered and calls the user's from now on
            self._ddp._check_comm_hook(hook)  # type: ignore[no-untyped-call]
        else:
            _register_with_torch(self._ddp, None, CommHook(self._reduce, hook))
        self._state, self._hook, self._is_installed = state, hook, True

    def _reduce(self, bucket: Any) -> Any:
        """Reduce one bucket by the user's hook or as DDP does, with ranges; return the future of the result.

        Each message gets a range if we see it, else the whole hook gets one.
        """
        if self._hook is None or sends_through_its_state(self._hook, self._state, self._group.marked):
            future, spans = self._group.reduce_bucket(bucket, self._hook, self._state)
        else:  # its messages are not known
            size, params = bucket.buffer().nbytes, len(bucket.parameters())
            spans = [ranges.start_all_reduce(bucket.index(), size, params, **self._group.names)]
            future = self._hook(self._state, bucket)
            future.add_done_callback(spans[0].end)
        for span in spans:
            _passes.add_bucket(span)
        return future


class CommHook:
    """A communication hook that calls ``reduce(bucket)``, which may call ``hook``, the program's own.

    In a deep copy or pickle of the DDP, where torch lists its hooks but does not call them, the program's hook or
    torch's all-reduce is in its place.
    """

    def __init__(self, reduce: Callable[[Any], Any], hook: Callable[..., Any] | None) -> None:
        self._reduce, self._hook = reduce, hook
        update_wrapper(self, hook or allreduce_hook)  # torch asks for name and parameters

    def __call__(self, _state: Any, bucket: Any) -> Any:
        return self._reduce(bucket)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (self._hook or allreduce_hook,)


def _register_with_torch(ddp: DistributedDataParallel, state: Any, hook: Callable[..., Any]) -> None:
    """Register a communication hook as torch does, though :func:`_follow_registration` has replaced its method."""
    method: Any = DistributedDataParallel.register_comm_hook
    getattr(method, "__wrapped__", method)(ddp, state, hook)


def _follow_registration() -> None:
    """Replace ``register_comm_hook`` of all DDPs: one with marks hands the hook to them. Do this once per process."""
    original: Any = DistributedDataParallel.register_comm_hook
    if getattr(original, "asks_marks", False):
        return

    @wraps(original)
    def register_comm_hook(ddp: DistributedDataParallel, state: Any, hook: Callable[..., Any]) -> None:
        register = marks.register if (marks := BucketMarks.of(ddp)) else partial(original, ddp)
        register(state, hook)

    register_comm_hook.asks_marks = True  # type: ignore[attr-defined]
    setattr(DistributedDataParallel, "register_comm_hook", register_comm_hook)  # noqa: B010  # mypy refuses it


def name_group(group: dist.ProcessGroup | None) -> dict[str, range_names.Value]:
    """Return the fields of a range for a process group: ``group``, torch's name and the ranks; ``ranks``, their number.

    For example ``{"group": "1 [0, 2]", "ranks": 2}``; ``None`` is the default group. The ranks belong to the name,
    because torch may give groups of different ranks the same name, for example when it splits a group.
    """
    group = group or dist.distributed_c10d._get_default_group()
    ranks = dist.get_process_group_ranks(group)
    shown = ", ".join(map(str, ranks[:_NAMED_RANKS])) + (", ..." if len(ranks) > _NAMED_RANKS else "")
    return {"group": f"{group.group_name} [{shown}]".replace("|", " "), "ranks": len(ranks)}


class MarkingGroup(dist.ProcessGroup):
    """Wraps a process group, and opens a range for each all-reduce of the bucket that is being reduced.

    Attributes:
        marked: The wrapped group.
        names: Fields of its ranges that name the group, see :func:`name_group`.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))  # type: ignore[call-arg]  # torch's stub
        self.marked = group or dist.distributed_c10d._get_default_group()
        self.names = name_group(self.marked)

    def reduce_bucket(
        self, bucket: Any, hook: Hook | None = None, state: Any = None
    ) -> tuple[torch.futures.Future[torch.Tensor], list[OpenRange]]:
        """Reduce a bucket of DDP by ``hook``, one of torch's, or if there is none, average it as DDP does.

        Returns:
            A future of the reduced bucket, and a list of the ranges of its messages. PowerSGD starts its second message
            when the first one has ended, so its range is added to the list later.
        """
        self.bucket, self.params, self.spans = bucket.index(), len(bucket.parameters()), list[OpenRange]()
        if hook is None:
            tensor = bucket.buffer()
            op = average_op(tensor, self.marked)
            if op == dist.ReduceOp.SUM:
                tensor.mul_(1 / self.size())  # rounds as DDP does
            work = self.mark(tensor, lambda: dist.all_reduce(tensor, op, self.marked, async_op=True))
            future = work.get_future().then(lambda done: done.value()[0])
        # A hook of torch calls all-reduce on the group that its state holds or is: give it this one for the call.
        elif hasattr(state, "process_group"):
            state.process_group, own = self, state.process_group
            future = hook(state, bucket)
            state.process_group = own
        else:
            future = hook(self, bucket)
        return future, self.spans

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        return self.mark(tensors[0], lambda: self.marked.allreduce(tensors, *options))

    def mark(self, tensor: torch.Tensor, launch: Callable[[], Any]) -> Any:
        """Call ``launch``, which starts an all-reduce of ``tensor``; return its work. The range ends with the work."""
        span = ranges.start_all_reduce(self.bucket, tensor.nbytes, self.params, **self.names)
        self.spans.append(span)
        work = launch()
        work.get_future().add_done_callback(span.end)
        return work


def sends_through_its_state(hook: Hook, state: Any, group: dist.ProcessGroup) -> bool:
    """Return whether the all-reduces of a hook go through the process group that its ``state`` is or holds.

    This is known of torch's own hooks. They may send less than their bucket: half of it (bfloat16), or two thin
    matrices (PowerSGD), so each of their messages needs a range of its own. False also if that group is not ``group``.
    """
    is_default = getattr(hook, "__module__", "") == DEFAULT_HOOKS and not hook.__name__.endswith("wrapper_hook")
    sends_by = getattr(state, "process_group", state) or dist.distributed_c10d._get_default_group()
    return (is_default or type(state).__name__ == "PowerSGDState") and sends_by is group


def average_op(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> dist.ReduceOp.RedOpType:
    """Return ``AVG`` if the backend divides within the all-reduce (NCCL), else ``SUM``: then the caller must divide."""
    return dist.ReduceOp.SUM if is_on_host(tensor, group) else dist.ReduceOp.AVG


def is_on_host(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Return whether collectives of this tensor run on the host, that is, by gloo."""
    return not tensor.is_cuda or dist.get_backend(group) == dist.Backend.GLOO


def mark_fsdp_unit(unit: Any, bucket: int) -> None:
    """Mark the collectives of a module to which ``fully_shard`` was applied; ``bucket`` is its number in the ranges."""
    state = unit._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        if group is not None:
            _mark_group(group, bucket)


def _mark_group(group: Any, bucket: int) -> None:
    """Mark the all-gather and the reduce-scatter of ``group``, an ``FSDPParamGroup``, unless they are marked."""
    for name, attribute in (
        (range_names.ALL_GATHER, "_all_gather_comm"),
        (range_names.REDUCE_SCATTER, "_reduce_scatter_comm"),
    ):
        inner = getattr(group, attribute, None)
        # torch checks the class of collectives in symmetric memory, so they stay unmarked; its FSDP:: ranges show them.
        if inner is not None and "SymmMem" not in type(inner).__name__ and not isinstance(inner, MarkedCollective):
            setattr(group, attribute, MarkedCollective(inner, name, bucket, len(group.fsdp_params)))


class MarkedCollective:
    """Wraps an object that FSDP2 calls for a collective, and opens a range for each call.

    On a CPU the range ends with the collective. On a GPU it ends right after the launch, because the profiler records
    the kernel itself.

    Args:
        inner: The object of FSDP2.
        name: ``all_gather`` or ``reduce_scatter``.
        bucket: Number of the FSDP2 unit.
        params: Number of the unit's parameters.
    """

    def __init__(self, inner: Any, name: str, bucket: int, params: int) -> None:
        self._inner, self._name, self._bucket, self._params = inner, name, bucket, params
        self._group, self._names = object(), dict[str, range_names.Value]()  # no group yet

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.allocate(*args, **kwargs)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, **options: Any) -> Any:
        """Run the collective in a range; arguments and result are those of ``inner``: a work, ``None`` if it blocks."""
        on_host = is_on_host(output_tensor, group)
        size = max(output_tensor.nbytes, input_tensor.nbytes)
        if group is not self._group:  # it is the same in all steps
            self._group, self._names = group, name_group(group)
        span = ranges.start_collective(self._name, self._bucket, size, self._params, **self._names)
        with ExitStack() as waiting:
            if on_host and not options.get("async_op"):  # the call blocks, on whichever thread
                waiting.callback(ranges.start_synchronize().end)
            work = self._inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, **options)
        if work is None or output_tensor.is_cuda or self._name == range_names.REDUCE_SCATTER:
            span.end()  # gloo's reduce-scatter has ended here, unless async_op: then its end cannot be observed
        else:
            work.get_future().add_done_callback(span.end)
        return work
