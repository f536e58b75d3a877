"""Parameters and buffers become those of rank 0: when a variant is made, and buffers again before each forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddp_prof import range_names
from ddp_prof.ddp.collective import global_rank, launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def broadcast_state(module: torch.nn.Module, group: dist.ProcessGroup | None) -> None:
    """Make parameters and buffers those of rank 0, one by one."""
    for tensor in (*module.parameters(), *module.buffers()):
        dense = tensor.detach().contiguous()
        dist.broadcast(dense, global_rank(0, group), group)
        if dense.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(dense)


def broadcast_buffers(buffers: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Make buffers those of rank 0: one broadcast a data type and device, waited for.

    Raises:
        CommunicationError: The broadcast failed.
    """
    for number, members in enumerate(by_kind(buffer.detach() for buffer in buffers)):
        launch_broadcast(members, 0, group, number)()


def by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Those of one data type and device together."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


def launch_broadcast(
    tensors: Sequence[torch.Tensor], source: int, group: dist.ProcessGroup | None, bucket: int
) -> Callable[[], None]:
    """Launch one broadcast of tensors of one kind; returns what waits for it and then makes them those of the source.

    A contiguous tensor alone is sent from and received in its own memory.

    Args:
        tensors: At least one.
        source: Rank in the group.
        group: ``None`` is the default group.
        bucket: Number in the range.

    Raises:
        CommunicationError: The broadcast could not be launched.
    """
    is_in_place = len(tensors) == 1 and tensors[0].is_contiguous()
    flat = tensors[0].detach() if is_in_place else torch.cat([tensor.flatten() for tensor in tensors])

    def start() -> Any:
        return dist.broadcast(flat, global_rank(source, group), group, async_op=True)

    flight = launch(start, range_names.BROADCAST, flat, group, bucket, len(tensors))

    def finish() -> None:
        flight.wait()
        if is_in_place:
            return
        for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    return finish
