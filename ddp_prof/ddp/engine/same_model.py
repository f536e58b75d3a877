"""All ranks must train one model: its tensors are compared before any of them is sent.

Otherwise gloo ends in its C++ code, and NCCL waits for ever or mixes the parameters up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from ddp_prof.ddp.engine.collective import communication_errors
from ddp_prof.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class Described(NamedTuple):
    """What must be alike of a parameter or buffer on all ranks."""

    what: str
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    is_trained: bool


def check_same_model(module: torch.nn.Module, group: dist.ProcessGroup | None) -> None:
    """Compare the model of every rank with that of rank 0. Every rank must call this.

    Raises:
        CommunicationError: They differ; on every rank the error names the first rank that does, and in what.
    """
    if dist.get_world_size(group) == 1:
        return
    own = describe(module)
    with communication_errors(group, "the comparison of the models"):
        reference = [own]
        dist.broadcast_object_list(reference, 0 if group is None else dist.get_global_rank(group, 0), group)
        differences: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(differences, find_difference(own, reference[0]), group)
    for rank, difference in enumerate(differences):
        if difference is not None:
            raise CommunicationError(f"rank {rank}: {difference}: build the same model on every rank")


def describe(module: torch.nn.Module) -> list[Described]:
    """Parameters, then buffers, each in the module's order."""
    named = [
        *((f"parameter {name!r}", parameter) for name, parameter in module.named_parameters()),
        *((f"buffer {name!r}", buffer) for name, buffer in module.named_buffers()),
    ]
    return [
        Described(what, tuple(tensor.shape), str(tensor.dtype), tensor.stride(), tensor.requires_grad)
        for what, tensor in named
    ]


def find_difference(own: Sequence[Described], reference: Sequence[Described]) -> str | None:
    """The first difference between this rank's tensors and rank 0's, in words; ``None`` where there is none."""
    for mine, theirs in zip(own, reference, strict=False):
        if mine.what != theirs.what:
            return f"{mine.what} stands where rank 0 has {theirs.what}"
        for field in ("shape", "dtype", "strides", "is_trained"):
            value, expected = getattr(mine, field), getattr(theirs, field)
            if value != expected:
                return f"{mine.what} has {_phrase(field, value)}, on rank 0 {_phrase(field, expected)}"
    if len(own) > len(reference):
        return f"{own[len(reference)].what} is not there on rank 0"
    if len(own) < len(reference):
        return f"{reference[len(own)].what} of rank 0 is missing"
    return None


def _phrase(field: str, value: object) -> str:
    if field == "is_trained":
        return f"requires_grad={value}"
    return f"{field} {value}"
