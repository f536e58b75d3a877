"""Whether parameters of a module share memory with others, or with buffers, which ``sharded`` refuses."""

from __future__ import annotations

from typing import Any

import torch

from ddp_prof.errors import CommunicationError


def refuse_shared_memory(module: torch.nn.Module) -> None:
    """Raise CommunicationError if a trained parameter shares memory with another parameter or with a buffer.

    Parameters become views of buckets, each with a place of its own, so a change of one would no longer be one of the
    other. One parameter under several names is fine.
    """
    named = [(*each, True) for each in module.named_parameters()] + [(*each, False) for each in module.named_buffers()]
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), name, tensor, is_parameter and tensor.requires_grad)
        for name, tensor, is_parameter in named
        if tensor.layout is torch.strided and tensor.numel()
    )
    reach: list[Any] = []  # those that may reach into what comes next
    for span in spans:
        start, _, name, tensor, is_trained = span
        reach = [other for other in reach if other[1] > start]
        for _, _, known, other, is_other_trained in reach:
            if (is_trained or is_other_trained) and tensor.device == other.device and _overlap(tensor, other):
                raise CommunicationError(
                    f"{known!r} and {name!r} share memory, and sharded gives each parameter a place of its own: make "
                    "one of them a copy (clone()), or one parameter of both, or use another variant"
                )
        reach.append(span)


def _extent(tensor: torch.Tensor) -> int:
    """Return how many bytes lie between the first byte of a tensor and the end of its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have an element at one place, as halves of the columns of a matrix do not."""
    first = min(one.data_ptr(), other.data_ptr())
    offsets = [tensor.data_ptr() - first for tensor in (one, other)]
    size = one.element_size()
    if other.element_size() != size or any(offset % size for offset in offsets):
        return True
    end = max(offset + _extent(tensor) for offset, tensor in zip(offsets, (one, other), strict=True))
    is_used = torch.zeros(end // size, dtype=torch.bool)
    own, others = (
        is_used.as_strided(tensor.shape, tensor.stride(), offset // size)
        for offset, tensor in zip(offsets, (one, other), strict=True)
    )
    own.fill_(True)
    return bool(others.any())
