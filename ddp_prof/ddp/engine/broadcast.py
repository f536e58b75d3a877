"""Parameters and buffers become those of rank 0: when a variant is made, and buffers again before each forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddp_prof import range_names
from ddp_prof.ddp.engine.collective import launch

if TYPE_CHECKING:
    from collections.abc import Sequence


def broadcast_state(module: torch.nn.Module, group: dist.ProcessGroup | None) -> None:
    """Make parameters and buffers those of rank 0, one by one."""
    for tensor in (*module.parameters(), *module.buffers()):
        dense = tensor.detach().contiguous()
        dist.broadcast(dense, source_rank(group), group)
        if dense.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(dense)


def broadcast_buffers(buffers: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Make buffers those of rank 0: one broadcast a data type and device, waited for.

    Raises:
        CommunicationError: The broadcast failed.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for buffer in buffers:
        kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer.detach())
    for number, members in enumerate(kinds.values()):
        flat = torch.cat([member.flatten() for member in members])
        _broadcast(flat, group, number, len(members))
        for member, part in zip(members, torch.split(flat, [member.numel() for member in members]), strict=True):
            member.copy_(part.view(member.shape))


def _broadcast(flat: torch.Tensor, group: dist.ProcessGroup | None, number: int, tensors: int) -> None:
    def start() -> Any:
        return dist.broadcast(flat, source_rank(group), group, async_op=True)

    launch(start, range_names.BROADCAST, flat, group, number, tensors).wait()


def source_rank(group: dist.ProcessGroup | None) -> int:
    """The global rank of the group's rank 0."""
    return 0 if group is None else dist.get_global_rank(group, 0)
