"""Marks a training program, so that its steps, phases and collectives can be told apart in a recording.

    from ddp_prof import annotate

    annotate.instrument(model, optimizer)
    for batch in loader:
        with annotate.step():
            ...

A range is a named interval of time that a profiler records, here for example one step or one all-reduce. Importing
this module needs no torch. Without a profiler a range costs a few microseconds. Ranges go to NVTX (Nsight Systems) and
to torch.profiler; ``DDP_PROF_RANGES=0`` in the environment switches them off.
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
    """Import ``Monitor`` or ``log_overlap`` when the program first asks for it: their module imports torch."""
    if name in {"Monitor", "log_overlap"}:  # they import torch
        _import_torch()
        from ddp_prof.annotate import monitor

        return getattr(monitor, name)  # not stored here: this function is called at every use
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _import_torch() -> None:
    """Import torch before any of our modules that import it, as programs often import ddp_prof before torch.

    As soon as torch is loaded, ``ddp-prof capture`` and ``tune`` import these modules to mark the program. They would
    find one incomplete that itself imports torch at that moment.
    """
    import torch  # noqa: F401


def instrument(model: Any = None, *optimizers: Any) -> Instrumented:
    """Put ranges around forward, backward, optimizer and collectives of a model by hooks, without changing its code.

    For ``DistributedDataParallel`` each bucket's all-reduce gets a range, even if a communication hook is registered
    later; for FSDP2 (``fully_shard``, torch 2.9 and later) each all-gather and reduce-scatter. Buckets get ranges from
    the first step that a profiler records, so that an unprofiled run is not changed.

    Args:
        model: The outermost module (the ``DistributedDataParallel`` and not the module inside it), or a list of such
            modules. ``None``: every ``DistributedDataParallel``, FSDP2 unit and optimizer that is created later.
        optimizers: The model's optimizers, or lists of them.

    Returns:
        An object whose ``remove()`` takes the hooks off again.

    Raises:
        TypeError: The first argument is no module, or a later argument is no optimizer.

    Call it after ``DistributedDataParallel(...)`` with the wrapper that this returned. Without a model, call it before
    any wrapper is created. In another order the buckets get no ranges, and a warning says so.
    """
    _import_torch()
    from ddp_prof.annotate.hooks import Instrumented

    return Instrumented(model, optimizers)


def lightning_callback(every: int | None = None, **monitoring: Any) -> Any:
    """Return a callback for Lightning's ``Trainer(callbacks=[...])`` that marks steps and what ``instrument`` marks.

    It works with ``lightning`` or the older ``pytorch_lightning``, whichever is installed. A step lasts from one step
    of the optimizer to the next, with data loading and gradient accumulation. ``ddp-prof capture`` counts the same
    steps, with or without this callback.

    Args:
        every: If given, the callback marks nothing: it measures and logs as a :class:`Monitor` with this ``every``.
        monitoring: Further arguments of that :class:`Monitor`.
    """
    _import_torch()
    from ddp_prof.annotate.hooks import Instrumented

    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback
    undo = ExitStack()  # what ends the marks or the monitor

    class Marks(Callback):  # type: ignore[misc]  # the package need not be installed
        """Marks or monitors the steps from the start of a training to its end."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Start to mark or to monitor; what an earlier training has left is ended first."""
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
    """Return a callback for Hugging Face's ``Trainer(callbacks=[...])`` that marks steps and what ``instrument`` marks.

    A step is the same as for :func:`lightning_callback`. The Trainer does not pass the DDP wrapper to a callback, so
    every DDP that is created later is marked.

    Args:
        every: If given, the callback marks nothing: it measures and logs as a :class:`Monitor` with this ``every``.
        monitoring: Further arguments of that :class:`Monitor`.
    """
    _import_torch()
    from transformers import TrainerCallback

    from ddp_prof.annotate.hooks import Instrumented

    undo = ExitStack()  # what ends the marks or the monitor
    if every is None:
        undo.callback(Instrumented(None, []).remove)

    class Marks(TrainerCallback):  # type: ignore[misc]  # the package need not be installed
        """Marks or monitors the steps from the start of a training to its end."""

        def on_train_begin(self, _arguments: Any = None, state: Any = None, *_: Any, **__: Any) -> None:
            """Start to mark or to monitor; ``state`` is the Trainer's, which holds the number of the first step."""
            if every is None:
                undo.callback(_count_steps())
                return
            undo.close()  # an earlier training may have ended by an exception
            undo.callback(_monitor_steps(every, {"start": getattr(state, "global_step", 0), **monitoring}))

        def on_train_end(self, *_: Any, **__: Any) -> None:
            undo.close()

    return Marks()


def _count_steps() -> Callable[[], None]:
    """Mark steps from now on, unless ``ddp-prof capture`` marks them already; return a function that stops this."""
    from ddp_prof.annotate import steps

    if steps.counts:
        return lambda: None
    counted = steps.CountedSteps()
    counted.begin()
    return counted.stop


def _monitor_steps(every: int, arguments: dict[str, Any]) -> Callable[[], None]:
    """Start a :class:`Monitor` that measures a few steps now and then.

    Args:
        every: Steps between two measurements.
        arguments: Further arguments of the monitor; ``start`` is the number of the first step.

    Returns:
        A function that stops the monitor; it returns after everything measured is logged.
    """
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
