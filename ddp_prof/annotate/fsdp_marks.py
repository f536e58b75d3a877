"""Marks the all-gathers and reduce-scatters of FSDP2."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ddp_prof import range_names
from ddp_prof.annotate import ranges
from ddp_prof.annotate.process_groups import is_on_host, name_group


def mark_fsdp_unit(unit: Any, bucket: int) -> None:
    """Mark the collectives of a module to which ``fully_shard`` was applied; ``bucket`` is its number in the ranges."""
    state = unit._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        if group is not None:
            mark_group(group, bucket)


def mark_group(group: Any, bucket: int) -> None:
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
