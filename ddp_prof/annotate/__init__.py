"""Marks a training program, so that its steps, phases and collectives can be told apart in a recording.

    from ddp_prof import annotate

    annotate.instrument(model, optimizer)
    for index, batch in enumerate(loader):
        with annotate.step(index, warmup=index < 2):
            ...

Importing this needs no torch. Without a profiler a range costs a few microseconds. Ranges go to NVTX (Nsight Systems)
and to torch.profiler; ``DDP_PROF_RANGES=0`` in the environment switches them off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_prof.annotate.callbacks import lightning_callback, trainer_callback
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
        model: The outermost module, that is, with its wrapper; ``None``: every ``DistributedDataParallel``, FSDP2 unit
            and optimizer that is created later.
        optimizers: The model's optimizers.

    Returns:
        An object whose ``remove()`` takes the marks off again.
    """
    from ddp_prof.annotate.hooks import Instrumented

    return Instrumented(model, optimizers)
