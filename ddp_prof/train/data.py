"""Random tokens, the same for a seed; rank 0 makes the batches of all steps and scatters them before the first step.

So no communication but that of gradients falls into the captured steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddp_prof.train.sizes import VOCABULARY

if TYPE_CHECKING:
    from torch import Tensor


def make_tokens(steps: int, batch_size: int, seq_len: int, seed: int) -> Tensor:
    """Tokens ``[steps, batch_size, seq_len + 1]``: inputs, and targets one position on."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (steps, batch_size, seq_len + 1), generator=generator)


def scatter_batches(steps: int, batch_size: int, seq_len: int, seed: int, device: torch.device) -> Tensor:
    """This rank's share ``[steps, batch_size / world, seq_len + 1]`` of every step's batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    through = torch.device("cpu") if dist.get_backend() == dist.Backend.GLOO else device  # where it lies anyway
    share = torch.empty(steps, batch_size // world, seq_len + 1, dtype=torch.int64, device=through)
    shares = None
    if rank == 0:
        tokens = make_tokens(steps, batch_size, seq_len, seed).to(through)
        shares = [item.contiguous() for item in tokens.chunk(world, dim=1)]
    dist.scatter(share, shares, src=0)
    return share.to(device)
