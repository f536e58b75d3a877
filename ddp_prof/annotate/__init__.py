"""Marks a training program, so that its steps, phases and collectives can be told apart in a recording.

    from ddp_prof import annotate

    annotate.instrument(model, optimizer)
    for batch in loader:
        with annotate.step():
            ...

Importing this needs no torch. Without a profiler a range costs a few microseconds. Ranges go to NVTX (Nsight Systems)
and to torch.profiler; ``DDP_PROF_RANGES=0`` in the environment switches them off.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ddp_prof.annotate.ranges import (
    NestedRange,
    OpenRange,
    Recorded,
    Recorder,
    Sink,
    backward,
    enable,
    forward,
    is_enabled,
    only_sink,
    optimizer,
    process,
    start_all_reduce,
    start_collective,
    start_synchronize,
    step,
    synchronize,
)

if TYPE_CHECKING:
    from ddp_prof.annotate.hooks import Instrumented
    from ddp_prof.annotate.monitor import Monitor, log_overlap

__all__ = [
    "Monitor",
    "NestedRange",
    "OpenRange",
    "Recorded",
    "Recorder",
    "Sink",
    "backward",
    "enable",
    "forward",
    "instrument",
    "is_enabled",
    "lightning_callback",
    "log_overlap",
    "only_sink",
    "optimizer",
    "process",
    "start_all_reduce",
    "start_collective",
    "start_synchronize",
    "step",
    "synchronize",
    "trainer_callback",
]


def __getattr__(name: str) -> Any:
    if name in {"Monitor", "log_overlap"}:  # they import torch
        from ddp_prof.annotate import monitor

        return getattr(monitor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def instrument(model: Any = None, *optimizers: Any) -> Instrumented:
    """Mark forward, backward, optimizer and collectives of a model by hooks, its code unchanged.

    For ``DistributedDataParallel`` each bucket's all-reduce is marked, even if a communication hook is registered
    later; for FSDP2 (``fully_shard``, torch 2.9 and later) each gather and scatter. Buckets are marked from the first
    step that a profiler records, so that an unprofiled run is not changed.

    Args:
        model: The outermost module, that is, with its wrapper, or a list of such modules; ``None``: every
            ``DistributedDataParallel``, FSDP2 unit and optimizer that is created later.
        optimizers: The model's optimizers, or lists of them.

    Returns:
        An object whose ``remove()`` takes the marks off again.

    Raises:
        TypeError: The first argument is no module, or one of the others is no optimizer.

    Where the order of the calls leaves buckets without marks, it warns: it comes after ``DistributedDataParallel(...)``
    and takes what that returns; without a model it comes before.
    """
    from ddp_prof.annotate.hooks import Instrumented

    return Instrumented(model, optimizers)


def lightning_callback(every: int | None = None, **monitoring: Any) -> Any:
    """Return a callback for Lightning's ``Trainer(callbacks=[...])`` that marks steps and what ``instrument`` marks.

    With ``every`` it marks nothing, but measures and logs as :class:`Monitor` with these arguments.

    It is for ``lightning`` or the older ``pytorch_lightning``, whichever is installed. A step lasts from one step of
    the optimizer to the next, loading and accumulation included, as under ``ddp-prof capture``, which needs no callback
    and counts the same steps with one.
    """
    from ddp_prof.annotate.hooks import Instrumented

    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback
    undo = ExitStack()

    class Marks(Callback):  # type: ignore[misc]  # the package need not be installed
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            undo.close()
            if every is not None:
                undo.callback(_monitor_steps(every, {"start": getattr(trainer, "global_step", 0), **monitoring}))
                return
            undo.callback(Instrumented(trainer.model or pl_module, list(trainer.optimizers)).remove)
            undo.callback(_count_steps())

        def on_train_end(self, *_: Any) -> None:
            undo.close()

        def on_exception(self, *_: Any) -> None:
            undo.close()

    return Marks()


def trainer_callback(every: int | None = None, **monitoring: Any) -> Any:
    """Return a callback for Hugging Face's ``Trainer(callbacks=[...])``: marks steps and what ``instrument`` marks.

    With ``every`` it marks nothing, but measures and logs as :class:`Monitor` with these arguments.

    A step is that of :func:`lightning_callback`. The Trainer does not pass the DDP wrapper to a callback, so every DDP
    that is created later is marked.
    """
    from transformers import TrainerCallback

    from ddp_prof.annotate.hooks import Instrumented

    undo = ExitStack()
    if every is None:
        undo.callback(Instrumented(None, []).remove)

    class Marks(TrainerCallback):  # type: ignore[misc]  # the package need not be installed
        def on_train_begin(self, _arguments: Any = None, state: Any = None, *_: Any, **__: Any) -> None:
            if every is None:
                undo.callback(_count_steps())
                return
            undo.close()  # an earlier training may have ended by an exception
            undo.callback(_monitor_steps(every, {"start": getattr(state, "global_step", 0), **monitoring}))

        def on_train_end(self, *_: Any, **__: Any) -> None:
            undo.close()

    return Marks()


def _count_steps() -> Callable[[], None]:
    """Mark steps from now on, unless a capture does; return what ends this."""
    from ddp_prof.annotate import steps

    if steps.counts:
        return lambda: None
    counted = steps.CountedSteps()
    counted.begin()
    return counted.stop


def _monitor_steps(every: int, arguments: dict[str, Any]) -> Callable[[], None]:
    """Measure now and then from now on, steps counted from ``start``; return what ends this, once all is logged."""
    from ddp_prof.annotate import steps
    from ddp_prof.annotate.monitor import Monitor

    monitor = Monitor(every, **arguments)
    start = arguments.get("start", 0)
    counted = steps.CountedSteps(lambda index: monitor.at_step(start + index), marks=False)
    counted.begin()

    def stop() -> None:
        counted.stop()
        monitor.close()

    return stop
