"""Marks a model by hooks: forward, backward, optimizer, the buckets of DDP, the gathers and scatters of FSDP2.

No hook of torch encloses a whole backward pass. So ``torch.autograd.backward``, which every ``loss.backward()`` calls,
is replaced by a function that opens a range around it.
"""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import wraps
from itertools import count
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_prof import range_names
from ddp_prof.annotate import ranges
from ddp_prof.annotate.calls import MarkedCalls
from ddp_prof.annotate.ranges import NestedRange, OpenRange
from ddp_prof.annotate.tracebacks import hide_own_frames

NSYS_VARIABLES = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH", "QUADD_INJECTION_CONFIG")
"""nsys sets one of them for the program that it runs."""
_NAMED_RANKS = 16
DEFAULT_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
"""A communication hook of DDP: takes its state and a bucket."""


class BackwardPasses:
    """Marks backward passes, which nest if a part of the model is computed again (activation checkpointing).

    DDP may wait for its buckets at the end of a pass: there ``synchronize`` is opened. If the buckets are marked, the
    outermost ``backward`` range ends there, so that what is still to be communicated is the tail of backward. Ranges of
    buckets that are still open are closed with the outermost pass.
    """

    def __init__(self) -> None:
        self._open: list[OpenRange] = []
        self._depth = self._users = 0
        self._may_wait = self._ends_at_wait = False

    def acquire(self) -> Callable[[], None]:
        """Mark all passes from now on, and return the function that ends this, once every caller has called it."""
        hide_own_frames()
        self._users += 1
        if self._users == 1:
            self._original = original = torch.autograd.backward

            @wraps(original)
            def marked(tensors: Any, *args: Any, **kwargs: Any) -> None:
                if isinstance(tensors, Iterator):
                    tensors = tuple(tensors)
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
        self._depth += 1
        is_queued = False
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
        """Tell that DDP reduces gradients in the next pass."""
        self._may_wait, self._ends_at_wait = True, marks_buckets

    def add_bucket(self, span: OpenRange) -> None:
        """Close the range of a bucket with the pass at the latest, as gloo's thread may close it only later."""
        if self._depth:  # outside of a pass, a rank without a batch takes part in the reductions of the others
            self._open.append(span)


_passes = BackwardPasses()

agreement_follows = False
"""Whether a DDP has run its first pass: in the second one, ranks agree on the order of its buckets."""

at_synchronized_forward: list[Callable[[DistributedDataParallel], None]] = []
"""Called before each forward of a marked DDP whose backward synchronizes gradients."""

_marking_all: list[Instrumented] = []
"""The instances that mark everything created later (``ddp-prof capture``); others must mark nothing twice."""


class Instrumented:
    """The marks on a model and its optimizers, see :func:`ddp_prof.annotate.instrument`."""

    def __init__(self, model: Any, optimizers: Sequence[Any]) -> None:
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
        """Take the marks off. The communication hook stays in DDP, but opens no range."""
        while self._undo:
            self._undo.pop()()

    def _take(self, one: Any) -> bool:
        """Whether it has no marks yet; from now on it has."""
        if one in _marked:
            return False
        _marked.add(one)
        self._undo.append(lambda: _marked.discard(one))
        return True

    def _replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(owner, name)
        marked = wraps(original)(make(original))
        setattr(owner, name, marked)
        self._undo.append(lambda: setattr(owner, name, original) if getattr(owner, name) is marked else None)

    def _mark_forward(self, model: torch.nn.Module) -> None:
        wrapped = getattr(model, "_orig_mod", model)  # of what torch.compile made
        if "register_comm_hook" in vars(wrapped) or not self._take(wrapped):
            return
        opened: list[NestedRange] = []
        process = None
        buckets = BucketMarks(wrapped) if isinstance(wrapped, DistributedDataParallel) else None

        def begin(_module: torch.nn.Module) -> None:
            nonlocal process
            if buckets:
                buckets.begin_forward()
            elif process is None and DistributedDataParallel._active_ddp_module is not None:
                warnings.warn(f"{_NOT_THE_WRAPPER}: {_WRAP_FIRST}", stacklevel=2)
            # Opened in each step and so short that every recording of a step contains one.
            with (process := process or process_range(type(wrapped).__name__, wrapped.parameters())):
                pass
            opened.append(ranges.forward())
            opened[-1].__enter__()

        def end() -> None:
            if opened:
                opened.pop().__exit__()
            if buckets:
                buckets.end_forward()

        self._undo += [
            lambda: wrapped.__dict__.pop("register_comm_hook", None),
            MarkedCalls(model, begin, end).remove,
        ]

    def _mark_future_objects(self) -> None:
        def mark_made(mark: Callable[[Any], None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            def make(original: Callable[..., Any]) -> Callable[..., Any]:
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


_marked: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models and optimizers that have marks."""
_NOT_THE_WRAPPER = "annotate.instrument got the module inside a DistributedDataParallel, whose buckets are not marked"
_WRAP_FIRST = "call it after DistributedDataParallel(...), with what that returns"


def _each(given: Any) -> list[Any]:
    if isinstance(given, (list, tuple)):
        return [one for part in given for one in _each(part)]
    return [given]


def _take_models(given: Any) -> list[torch.nn.Module]:
    models = [] if given is None else _each(given)
    for one in models:
        if not isinstance(one, torch.nn.Module):
            raise TypeError(
                "annotate.instrument takes the model first, then its optimizers, as instrument(model, optimizer): "
                f"a {type(one).__name__} is no torch.nn.Module"
            )
    return models


def _take_optimizers(given: Sequence[Any]) -> list[Any]:
    """Return torch's optimizers: those of Accelerate and others wrap them, and never call the hooks of the wrapper."""
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
    """Warn where buckets cannot be marked, because the wrapper came before the marks or will come after them."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    there = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    if not models and any("register_comm_hook" not in vars(one) for one in there):
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
    """Whether it is DDP, a unit of FSDP, or one of our variants."""
    is_sharded = hasattr(module, "_get_fsdp_state") or type(module).__name__ == "FullyShardedDataParallel"
    return (
        isinstance(module, DistributedDataParallel) or is_sharded or hasattr(module, "finish_gradient_synchronization")
    )


def is_under_nsys() -> bool:
    return any(name in os.environ for name in NSYS_VARIABLES)


def is_recorded() -> bool:
    """Whether torch.profiler or nsys records ranges."""
    return ranges.is_enabled() and (is_under_nsys() or bool(torch.autograd.profiler._is_profiler_enabled))


def process_range(variant: str, parameters: Iterable[torch.Tensor]) -> NestedRange:
    """Return the range by which readers know the rank."""
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
    """Hooks around ``optimizer.step()``; if a step raises, its range is open until the next step."""

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
    """Marks each bucket of one DDP by a communication hook, which calls the user's hook if there is one.

    With gloo on a CPU, torch.profiler records the collectives and a hook costs time: then DDP keeps its own all-reduce,
    and a range holds the sizes of the buckets.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp, self._register = ddp, ddp.register_comm_hook
        self._hook: Hook | None = None
        self._state: Any = None
        self._group = MarkingGroup(ddp.process_group)
        self._is_installed = bool(ddp._comm_hooks)
        # A DDP that finds unused parameters keeps its first buckets, and also reduces a map of the used parameters.
        self._finds_unused = ddp.find_unused_parameters and not ddp.static_graph
        self._has_run = self._finds_unused
        on_host = all(parameter.device.type == "cpu" for parameter in ddp.parameters())
        self._reduces_on_host = on_host and dist.get_backend(ddp.process_group) == dist.Backend.GLOO
        self._sizes: NestedRange | None = None
        if self._is_installed:
            warnings.warn("buckets are not marked: call annotate.instrument before register_comm_hook", stacklevel=4)
        else:
            ddp.register_comm_hook = self._register_hook_inside  # type: ignore[method-assign]

    def begin_forward(self) -> None:
        """If a profiler records, install the hook, unless one is installed."""
        if self._ddp.require_backward_grad_sync and torch.is_grad_enabled():
            for call in at_synchronized_forward:
                call(self._ddp)
        needs_hook = is_under_nsys() or not self._reduces_on_host
        if needs_hook and is_recorded() and not self._is_installed:
            self._register(None, lambda _state, bucket: self._reduce(bucket))
            self._is_installed = True

    def end_forward(self) -> None:
        """Prepare for the reduction of gradients in backward; without a hook, mark the sizes of the buckets."""
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
        """Return the range that holds the sizes; ``None`` until DDP has rebuilt its buckets in the gradients' order."""
        ddp, known = self._ddp, self._ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        sizes = known["bucket_sizes"] if self._finds_unused else known.get("rebuilt_bucket_sizes")
        if not sizes:
            return None
        names = name_group(ddp.process_group)
        return ranges.buckets([int(size) for size in sizes.split(",")], int(self._finds_unused), **names)

    def _register_hook_inside(self, state: Any, hook: Callable[..., Any]) -> None:
        """Register the user's hook inside ours; replaces ``ddp.register_comm_hook``."""
        if self._hook is None and self._is_installed:  # ours is registered and calls the user's from now on
            self._ddp._check_comm_hook(hook)  # type: ignore[no-untyped-call]
        else:
            self._register(None, wraps(hook)(lambda _state, bucket: self._reduce(bucket)))
        self._state, self._hook, self._is_installed = state, hook, True

    def _reduce(self, bucket: Any) -> Any:
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


def name_group(group: dist.ProcessGroup | None) -> dict[str, range_names.Value]:
    """Return the fields by which a range names a process group: torch's name with the ranks, and their number.

    Groups of different ranks may have one name, for example those that another group was split into.
    """
    group = group or dist.distributed_c10d._get_default_group()
    ranks = dist.get_process_group_ranks(group)
    shown = ", ".join(map(str, ranks[:_NAMED_RANKS])) + (", ..." if len(ranks) > _NAMED_RANKS else "")
    return {"group": f"{group.group_name} [{shown}]".replace("|", " "), "ranks": len(ranks)}


class MarkingGroup(dist.ProcessGroup):
    """Wraps a process group and marks each all-reduce with a range of the bucket that is being reduced."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))  # type: ignore[call-arg]  # torch's stub
        self.marked = group or dist.distributed_c10d._get_default_group()
        self.names = name_group(self.marked)

    def reduce_bucket(
        self, bucket: Any, hook: Hook | None = None, state: Any = None
    ) -> tuple[torch.futures.Future[torch.Tensor], list[OpenRange]]:
        """Reduce a bucket of DDP by a hook of torch's, or average it as DDP does.

        Returns:
            The result, and a list of the ranges; PowerSGD adds to it when its first message has ended.
        """
        self.bucket, self.params, self.spans = bucket.index(), len(bucket.parameters()), list[OpenRange]()
        if hook is None:
            tensor = bucket.buffer()
            op = average_op(tensor, self.marked)
            if op == dist.ReduceOp.SUM:
                tensor.mul_(1 / self.size())  # rounds as DDP does
            work = self.mark(tensor, lambda: dist.all_reduce(tensor, op, self.marked, async_op=True))
            future = work.get_future().then(lambda done: done.value()[0])
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
        span = ranges.start_all_reduce(self.bucket, tensor.nbytes, self.params, **self.names)
        self.spans.append(span)
        work = launch()
        work.get_future().add_done_callback(span.end)
        return work


def sends_through_its_state(hook: Hook, state: Any, group: dist.ProcessGroup) -> bool:
    """Whether a hook is torch's, its state is or holds the group of its all-reduces, and this group is ``group``.

    These send less than their bucket: half of it (bfloat16), or two thin matrices (PowerSGD).
    """
    is_default = getattr(hook, "__module__", "") == DEFAULT_HOOKS and not hook.__name__.endswith("wrapper_hook")
    sends_by = getattr(state, "process_group", state) or dist.distributed_c10d._get_default_group()
    return (is_default or type(state).__name__ == "PowerSGDState") and sends_by is group


def average_op(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> dist.ReduceOp.RedOpType:
    """Return ``AVG`` if the backend (NCCL) divides within the collective, else ``SUM``: the caller must divide."""
    return dist.ReduceOp.SUM if is_on_host(tensor, group) else dist.ReduceOp.AVG


def is_on_host(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether collectives of this tensor run on the host, that is, by gloo."""
    return not tensor.is_cuda or dist.get_backend(group) == dist.Backend.GLOO


def mark_fsdp_unit(unit: Any, bucket: int) -> None:
    state = unit._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        if group is not None:
            _mark_group(group, bucket)


def _mark_group(group: Any, bucket: int) -> None:
    for name, attribute in (
        (range_names.ALL_GATHER, "_all_gather_comm"),
        (range_names.REDUCE_SCATTER, "_reduce_scatter_comm"),
    ):
        inner = getattr(group, attribute, None)
        # torch checks the class of collectives in symmetric memory, so they stay unmarked; its FSDP:: ranges show them.
        if inner is not None and "SymmMem" not in type(inner).__name__ and not isinstance(inner, MarkedCollective):
            setattr(group, attribute, MarkedCollective(inner, name, bucket, len(group.fsdp_params)))


class MarkedCollective:
    """A collective of FSDP2 with a range.

    On a CPU the range ends with the collective; on a GPU right after the launch, because the kernel is recorded.
    """

    def __init__(self, inner: Any, name: str, bucket: int, params: int) -> None:
        self._inner, self._name, self._bucket, self._params = inner, name, bucket, params
        self._group, self._names = object(), dict[str, range_names.Value]()  # no group yet

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.allocate(*args, **kwargs)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, **options: Any) -> Any:
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
