"""The model (the transformer of Stanford's course CS336), its random tokens, and a training step for all variants.

A step is marked with ranges and timed. The model is pre-norm, with RMSNorm, rotary positions, SwiGLU and untied
embeddings.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from math import isnan
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ddp_prof import annotate
from ddp_prof.ddp import DataParallel
from ddp_prof.ddp.collective import communication_errors
from ddp_prof.manifest import HostTimes
from ddp_prof.train import VOCABULARY, ModelSize

ROPE_BASE = 10_000.0


class TransformerLM(nn.Module):
    """Maps token ids ``[batch, seq]`` to logits ``[batch, seq, vocabulary]``.

    With ``checkpoint_blocks`` only the input of each block is kept for backward, which computes the rest again.
    """

    def __init__(self, size: ModelSize, *, checkpoint_blocks: bool = False) -> None:
        super().__init__()
        self.checkpoint_blocks = checkpoint_blocks
        self.embedding = nn.Embedding(VOCABULARY, size.d_model)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.d_model)
        self.head = nn.Linear(size.d_model, VOCABULARY, bias=False)
        self.apply(_initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        for block in self.blocks:
            # Not re-entrant, so that each gradient hook is called once.
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpoint_blocks else block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Block(nn.Module):
    """Attention and feed-forward layer, each with a norm before it; ``[batch, seq, d_model]`` in and out."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(size.d_model)
        self.attention = Attention(size)
        self.norm2 = nn.RMSNorm(size.d_model)
        self.feed_forward = SwiGLU(size)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        result: Tensor = hidden + self.feed_forward(self.norm2(hidden))
        return result


class Attention(nn.Module):
    """Causal self-attention of several heads, with rotary positions; ``[batch, seq, d_model]`` in and out."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(size.d_model, size.d_model, bias=False) for _ in range(4)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        # [batch, heads, seq, d_model / heads] each
        query, key, value = (
            projection(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        cosine, sine = rotary_angles(hidden.shape[1], query.shape[-1], hidden.device)
        attended = functional.scaled_dot_product_attention(
            rotate(query, cosine, sine), rotate(key, cosine, sine), value, is_causal=True
        )
        result: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return result


class SwiGLU(nn.Module):
    """The feed-forward layer: w2(silu(w1 x) * w3 x), with an inner width of ``d_ff``."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.w1 = nn.Linear(size.d_model, size.d_ff, bias=False)
        self.w2 = nn.Linear(size.d_ff, size.d_model, bias=False)
        self.w3 = nn.Linear(size.d_model, size.d_ff, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.w2(functional.silu(self.w1(hidden)) * self.w3(hidden))
        return result


def activation_bytes(model: nn.Module, tokens: Tensor) -> int:
    """Return the bytes of the tensors that autograd keeps from forward for backward.

    Each storage counts once; parameters and their views do not count.
    """
    own = {id(parameter) for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        """Note a tensor that autograd saves, by the address of its storage, unless it is or views a parameter."""
        storage = tensor.untyped_storage()
        if id(tensor) not in own and (tensor._base is None or id(tensor._base) not in own):
            kept[storage._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits: Tensor = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def rotary_angles(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, ``[length, width / 2]`` each, of the angle for each position and pair of dimensions."""
    exponents = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), ROPE_BASE**-exponents)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair (2i, 2i + 1) of the last dimension of ``[..., length, width]`` by the angle of its position."""
    even, odd = heads[..., 0::2], heads[..., 1::2]
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1).flatten(-2)


def _initialize(module: nn.Module) -> None:
    """Draw the weights of a layer: normal, for a linear layer with Glorot's deviation."""
    if isinstance(module, nn.Linear):
        deviation = (2 / (module.in_features + module.out_features)) ** 0.5
        nn.init.normal_(module.weight, std=deviation)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight)


def make_tokens(steps: int, batch_size: int, seq_len: int, seed: int) -> Tensor:
    """Return random tokens ``[steps, batch_size, seq_len + 1]``; targets are the inputs shifted by one position."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (steps, batch_size, seq_len + 1), generator=generator)


def scatter_batches(steps: int, batch_size: int, seq_len: int, seed: int, device: torch.device) -> Tensor:
    """Return this rank's sequences of all steps, ``[steps, batch_size / world, seq_len + 1]``.

    Rank 0 makes the batches and sends each rank its part. That happens before the first step, so that a capture
    contains no communication of data.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    through = torch.device("cpu") if dist.get_backend() == dist.Backend.GLOO else device  # the tokens are on the CPU
    share = torch.empty(steps, batch_size // world, seq_len + 1, dtype=torch.int64, device=through)
    shares = None
    if rank == 0:
        tokens = make_tokens(steps, batch_size, seq_len, seed).to(through)
        shares = [item.contiguous() for item in tokens.chunk(world, dim=1)]
    dist.scatter(share, shares, src=0)
    return share.to(device)


class StepResult(NamedTuple):
    """The mean loss over this rank's sequences of the batch, and the times of the step on this rank."""

    loss: float
    times: HostTimes


@dataclass
class Trainer:
    """Trains ``variant`` with ``optimizer``; warm-up, measured and synchronized steps are numbered separately.

    Args:
        variant: The wrapped model.
        optimizer: The optimizer of the variant's ``optimizer_parameters()``.
        delay_s: Seconds to sleep at the start of each backward, to imitate a straggler.
        precision: ``fp32``, or ``bf16`` by autocast.
        begins_late: Sleep at the start of each step for as long as the work of the last step took, to imitate a host
            that prepares data.
    """

    variant: DataParallel
    optimizer: torch.optim.Optimizer
    delay_s: float = 0.0
    precision: str = "fp32"
    begins_late: bool = False
    _last_seconds: float = field(default=0.0, init=False)
    # Finished steps by (is a warm-up step, is a synchronized step).
    _done: Counter[tuple[bool, bool]] = field(default_factory=Counter, init=False)

    def train_step(
        self, inputs: Tensor, targets: Tensor, *, warmup: bool = False, synchronized: bool = False
    ) -> StepResult:
        """Take one step on this rank's sequences and return its loss and times.

        Args:
            inputs: Token ids, ``[batch, seq]``.
            targets: The token that follows each input, ``[batch, seq]``.
            warmup: Mark the step as a warm-up step.
            synchronized: Let the host wait for the device after each phase, so that a phase's time contains its own
                work and no other.
        """
        begin_ns, index = time.perf_counter_ns(), self._done[warmup, synchronized]
        with annotate.step(index, warmup):
            if self.begins_late:
                time.sleep(self._last_seconds)
            started = time.perf_counter()
            loss, marks_ns = self._step(inputs, targets, synchronized)
            if inputs.is_cuda:
                torch.cuda.synchronize(inputs.device)
            self._last_seconds = time.perf_counter() - started
        self._done[warmup, synchronized] += 1
        step_ns = time.perf_counter_ns() - begin_ns
        waited_s = self.variant.communication_seconds
        forward, backward, _, optimizer = (end - start for start, end in pairwise(marks_ns))
        communication_ns = None if isnan(waited_s) else round(waited_s * 1e9)
        times = HostTimes(synchronized, index, step_ns, forward, backward, communication_ns, optimizer)
        return StepResult(loss.item(), times)

    def _step(self, inputs: Tensor, targets: Tensor, synchronized: bool) -> tuple[Tensor, list[int]]:
        """Take the step; return its loss and five times of the host's clock in ns.

        They are the starts of forward, backward, synchronization and optimizer, and the end of the optimizer.
        """
        marks_ns: list[int] = []

        def mark() -> None:
            if synchronized:
                wait_for_device(inputs.device)
            marks_ns.append(time.perf_counter_ns())

        self.optimizer.zero_grad()
        mark()
        with annotate.forward(), autocast(inputs.device, self.precision):
            loss = functional.cross_entropy(self.variant(inputs).flatten(0, 1), targets.flatten())
        mark()
        # torch's DDP communicates in backward; if that fails, it raises a plain RuntimeError.
        failures = communication_errors(self.variant.process_group, "communication in backward")
        with annotate.backward(), failures:
            if self.delay_s:
                time.sleep(self.delay_s)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's omission
        mark()
        self.variant.finish_gradient_synchronization()
        mark()
        with annotate.optimizer():
            self.optimizer.step()
        mark()
        return loss.detach(), marks_ns


def wait_for_device(device: torch.device) -> None:
    """Let the host wait until a GPU's current stream has done its work; does nothing on a CPU."""
    # Not torch.cuda.synchronize, which would also wait for collectives on other streams.
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return the context in which forward runs: autocast to bfloat16 for ``bf16``, else one that does nothing."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
