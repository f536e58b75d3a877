"""Checks that all ranks train the same model with the same options, before anything of the model is sent.

If they differ, gloo aborts in its C++ code, and NCCL waits for ever or mixes the parameters up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ddp_prof.ddp.collective import communication_errors, current_device, global_rank
from ddp_prof.errors import CommunicationError

T = TypeVar("T")


class TensorSpec(NamedTuple):
    label: str
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    requires_grad: bool


def check_rank_consistency(
    module: torch.nn.Module, options: Mapping[str, object], group: dist.ProcessGroup | None
) -> None:
    """Compare model and options of every rank with those of rank 0. Every rank must call this."""
    compare_with_rank_0(
        ({name: _comparable(value) for name, value in options.items()}, describe_tensors(module)),
        lambda own, reference: find_option_difference(own[0], reference[0]) or find_difference(own[1], reference[1]),
        group,
        next((parameter.device for parameter in module.parameters()), torch.device("cpu")),
    )


def compare_with_rank_0(
    own: T, find: Callable[[T, T], str | None], group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Compare ``own`` with that of rank 0. Every rank must call this.

    ``find`` describes the first difference between its two arguments, if any. If a rank differs, every rank raises an
    error that names the ranks that differ and describes the difference of the first one.
    """
    if dist.get_world_size(group) == 1:
        return
    with communication_errors(group, "the comparison of the models"), current_device(device):
        reference = [own]
        dist.broadcast_object_list(reference, global_rank(0, group), group)
        differences: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(differences, find(own, reference[0]), group)
    others = [rank for rank, difference in enumerate(differences) if difference is not None]
    if others:
        more = f" (so ranks {', '.join(map(str, others))} differ from rank 0)" if len(others) > 1 else ""
        raise CommunicationError(f"rank {others[0]}: {differences[others[0]]}{more}")


def describe_tensors(module: torch.nn.Module) -> list[TensorSpec]:
    named = [
        *((f"parameter {name!r}", parameter) for name, parameter in module.named_parameters()),
        *((f"buffer {name!r}", buffer) for name, buffer in module.named_buffers()),
    ]
    return [describe_tensor(label, tensor) for label, tensor in named]


def describe_tensor(label: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(label, tuple(tensor.shape), str(tensor.dtype), tensor.stride(), tensor.requires_grad)


def find_option_difference(own: Mapping[str, object], reference: Mapping[str, object]) -> str | None:
    for name in (*own, *reference):
        if own.get(name) != reference.get(name):
            return f"{name}={own.get(name)}, on rank 0 {name}={reference.get(name)}: give every rank the same options"
    return None


def _comparable(value: object) -> object:
    """Return a comparable form of an option: a plain value itself, for other objects the type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    return repr(value) if is_dataclass(value) else type(value).__name__


def find_difference(own: Sequence[TensorSpec], reference: Sequence[TensorSpec]) -> str | None:
    for mine, theirs in zip_longest(own, reference):
        if theirs is None:
            found = f"{mine.label} is not there on rank 0"
        elif mine is None:
            found = f"{theirs.label} of rank 0 is missing"
        elif mine.label != theirs.label:
            found = f"{mine.label} stands where rank 0 has {theirs.label}"
        elif field := next((name for name in TensorSpec._fields if getattr(mine, name) != getattr(theirs, name)), None):
            phrase = f"{field}=" if field == "requires_grad" else f"{field} "
            found = f"{mine.label} has {phrase}{getattr(mine, field)}, on rank 0 {phrase}{getattr(theirs, field)}"
        else:
            continue
        return f"{found}: build the same model on every rank"
    return None
