"""The transformer of Stanford's CS336: pre-norm, RMSNorm, rotary positions, SwiGLU, untied embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ddp_prof.train.sizes import VOCABULARY, ModelSize

ROPE_BASE = 10_000.0


class TransformerLM(nn.Module):
    """Token ids ``[batch, seq]`` to logits ``[batch, seq, vocabulary]``.

    ``checkpoint_blocks`` keeps each block's input only, and computes the rest again in backward.
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
            # Not re-entrant: a gradient hook then fires once.
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpoint_blocks else block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Block(nn.Module):
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
    """Causal self-attention of several heads with rotary positions."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(size.d_model, size.d_model, bias=False) for _ in range(4)
        )

    def forward(self, hidden: Tensor) -> Tensor:
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
    """Feed-forward ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.w1 = nn.Linear(size.d_model, size.d_ff, bias=False)
        self.w2 = nn.Linear(size.d_ff, size.d_model, bias=False)
        self.w3 = nn.Linear(size.d_model, size.d_ff, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.w2(functional.silu(self.w1(hidden)) * self.w3(hidden))
        return result


def activation_bytes(model: nn.Module, tokens: Tensor) -> int:
    """What autograd keeps of a forward for backward, each storage once, parameters left out."""
    own = {id(parameter) for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
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
    """Cosine and sine ``[length, width / 2]`` of each position's turn of each pair of dimensions."""
    exponents = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), ROPE_BASE**-exponents)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i + 1) of ``[..., length, width]`` by each position's angle."""
    even, odd = heads[..., 0::2], heads[..., 1::2]
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1).flatten(-2)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        deviation = (2 / (module.in_features + module.out_features)) ** 0.5
        nn.init.normal_(module.weight, std=deviation)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight)
