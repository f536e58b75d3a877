"""Marks the buckets of a DDP by a communication hook, where no profiler records them by itself."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_prof.annotate import ranges
from ddp_prof.annotate.backward_passes import passes
from ddp_prof.annotate.calls import Owned
from ddp_prof.annotate.process_groups import Hook, MarkingGroup, bytes_of, name_group, sends_through_its_state
from ddp_prof.annotate.ranges import NestedRange
from ddp_prof.annotate.tracebacks import stands_for, unseen

NSYS_VARIABLES = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH", "QUADD_INJECTION_CONFIG")
"""Environment variables; nsys sets at least one of them for the program that it runs."""
_OF_BUCKETS = "_ddp_prof_buckets"
"""Attribute of a DDP that holds its :class:`BucketMarks` in an :class:`.Owned`."""

_SPARSE_LAYERS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
"""Layers whose weight has sparse gradients if ``sparse`` is set; of other layers DDP expects none."""

agreement_follows = False
"""Whether a DDP has run a forward since the last step began, and ranks still have to agree on the order of its buckets.

They do so in its second pass, that is, in the next step; with ``static_graph`` in its third."""

at_synchronized_forward: list[Callable[[DistributedDataParallel], None]] = []
"""Called before each forward of a marked DDP whose backward synchronizes gradients."""


def is_under_nsys() -> bool:
    """Return whether nsys runs this program, by the environment variables that it sets."""
    return any(name in os.environ for name in NSYS_VARIABLES)


def is_recorded() -> bool:
    """Return whether ranges are switched on and torch.profiler records, or nsys runs the program."""
    return ranges.is_enabled() and (is_under_nsys() or bool(torch.autograd.profiler._is_profiler_enabled))


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
        self._passes = 0  # forwards whose backward reduces, as long as ranks have to agree on the order of buckets
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

    @property
    def _finds_unused(self) -> bool:
        """Whether the DDP keeps its first buckets, and also reduces a map of the parameters that were used."""
        return bool(self._ddp.find_unused_parameters and not self._ddp.static_graph)  # it may be set to static later

    @property
    def _passes_before_agreement(self) -> int:
        """How many passes end before ranks agree on a new order of buckets; 0 if they never do."""
        if self._ddp.static_graph:
            return 2  # the first one only finds out which parameters are used, and how often
        return 0 if self._finds_unused else 1

    @property
    def _divides_by_active_ranks(self) -> bool:
        """Whether DDP divides gradients by the number of ranks that still have inputs, which no hook is told."""
        ddp: Any = self._ddp
        return ddp._join_config.enable and not ddp._divide_by_initial_world_size

    def _warn_of_join(self) -> None:
        """Say, once for each place in the program, what ``join(divide_by_initial_world_size=False)`` does to marks."""
        outcome = (
            "our communication hook, registered before, divides by all ranks" if self._is_installed else "not marked"
        )
        warnings.warn(f"buckets of a DDP in join(divide_by_initial_world_size=False): {outcome}", stacklevel=2)

    def remove(self) -> None:
        """Let ``ddp.register_comm_hook`` do what torch's does again; a hook of ours that is installed stays."""
        if (ddp := self._owner()) is not None:
            vars(ddp).pop(_OF_BUCKETS, None)

    def has_agreed_unseen(self) -> bool:
        """Return, once, whether ranks have agreed on new buckets though no forward was seen, as in compiled code."""
        ddp: Any = self._owner()
        if not getattr(ddp, "_has_rebuilt_buckets", False) or self._passes >= self._passes_before_agreement:
            return False
        self._passes = self._passes_before_agreement
        return True

    def begin_forward(self) -> None:
        """Install our communication hook if a profiler records, unless one is installed or none is needed."""
        # DDP reduces gradients in the backward of this forward.
        if self._ddp.require_backward_grad_sync and torch.is_grad_enabled():
            for call in at_synchronized_forward:
                call(self._ddp)
        needs_hook = is_under_nsys() or not self._reduces_on_host
        if needs_hook and is_recorded() and self._hook is None:
            if self._divides_by_active_ranks:
                self._warn_of_join()
            elif not self._is_installed:
                _register_with_torch(self._ddp, CommHook(self._reduce, None))
                self._is_installed = True

    def end_forward(self) -> None:
        """Announce a backward in which DDP reduces gradients; if no hook is installed, emit a range of bucket sizes."""
        global agreement_follows
        if not (self._ddp.require_backward_grad_sync and torch.is_grad_enabled()):
            return
        if self._passes < self._passes_before_agreement:
            self._passes += 1
            agreement_follows = True
        if not is_recorded():
            return
        passes.expect_wait(marks_buckets=self._is_installed)
        if not self._is_installed:
            self._sizes = self._sizes or self._find_sizes()
            if self._sizes:
                with self._sizes:
                    pass

    def _find_sizes(self) -> NestedRange | None:
        """Return a range that holds the bucket sizes; ``None`` until DDP has rebuilt its buckets.

        DDP rebuilds them after the first pass, in the order in which the gradients arrived. Also ``None`` if a layer
        has sparse gradients, of which DDP knows only the size that they would have if they were dense.
        """
        if any(isinstance(layer, _SPARSE_LAYERS) and layer.sparse for layer in self._ddp.modules()):
            return None
        ddp, known = self._ddp, self._ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        sizes = known["bucket_sizes"] if self._finds_unused else known.get("rebuilt_bucket_sizes")
        if not sizes:
            return None
        names = name_group(ddp.process_group)
        # After the buckets DDP reduces a map of which parameters were used, an int32 for each.
        vote = 4 * sum(parameter.requires_grad for parameter in ddp._module_parameters) if self._finds_unused else None
        return ranges.buckets([int(size) for size in sizes.split(",")], vote, **names)

    @unseen
    def register(self, state: Any, hook: Callable[..., Any]) -> None:
        """Register our communication hook, and keep the user's, which it calls; as ``ddp.register_comm_hook``."""
        if self._hook is None and self._is_installed:  # ours is registered and calls the user's from now on
            self._ddp._check_comm_hook(hook)  # type: ignore[no-untyped-call]
        else:
            _register_with_torch(self._ddp, CommHook(self._reduce, hook))
        self._state, self._hook, self._is_installed = state, hook, True

    def _reduce(self, bucket: Any) -> Any:
        """Reduce one bucket by the user's hook or as DDP does, with ranges; return the future of the result.

        Each message gets a range if we see it, else the whole hook gets one.
        """
        if self._hook is None or sends_through_its_state(self._hook, self._state, self._group.marked):
            future, spans = self._group.reduce_bucket(bucket, self._hook, self._state)
        else:  # its messages are not known
            size, params = bytes_of(bucket.buffer()), len(bucket.parameters())
            spans = [ranges.start_all_reduce(bucket.index(), size, params, **self._group.names)]
            future = self._hook(self._state, bucket)
            future.add_done_callback(spans[0].end)
        for span in spans:
            passes.add_bucket(span)
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


@unseen
def _register_with_torch(ddp: DistributedDataParallel, hook: Callable[..., Any]) -> None:
    """Register a communication hook as torch does, though :func:`_follow_registration` has replaced its method."""
    method: Any = DistributedDataParallel.register_comm_hook
    getattr(method, "__wrapped__", method)(ddp, None, hook)  # None: the hook has no state


def _follow_registration() -> None:
    """Replace ``register_comm_hook`` of all DDPs: one with marks hands the hook to them. Do this once per process."""
    original: Any = DistributedDataParallel.register_comm_hook
    if getattr(original, "asks_marks", False):
        return

    @stands_for(original)
    def register_comm_hook(ddp: DistributedDataParallel, state: Any, hook: Callable[..., Any]) -> None:
        register = marks.register if (marks := BucketMarks.of(ddp)) else partial(original, ddp)
        register(state, hook)

    register_comm_hook.asks_marks = True  # type: ignore[attr-defined]
    setattr(DistributedDataParallel, "register_comm_hook", register_comm_hook)  # noqa: B010  # mypy refuses it
