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

__all__ = [
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


def lightning_callback() -> Any:
    """Return a callback for Lightning's ``Trainer(callbacks=[...])`` that marks steps and what ``instrument`` marks.

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
            undo.callback(Instrumented(trainer.model or pl_module, list(trainer.optimizers)).remove)
            undo.callback(_count_steps())

        def on_train_end(self, *_: Any) -> None:
            undo.close()

        def on_exception(self, *_: Any) -> None:
            undo.close()

    return Marks()


def trainer_callback() -> Any:
    """Return a callback for Hugging Face's ``Trainer(callbacks=[...])``: marks steps and what ``instrument`` marks.

    A step is that of :func:`lightning_callback`. The Trainer does not pass the DDP wrapper to a callback, so every DDP
    that is created later is marked.
    """
    from transformers import TrainerCallback

    from ddp_prof.annotate.hooks import Instrumented

    undo = ExitStack()
    undo.callback(Instrumented(None, []).remove)

    class Marks(TrainerCallback):  # type: ignore[misc]  # the package need not be installed
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            undo.callback(_count_steps())

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
