"""The workload: trains a transformer language model by one of the variants and marks what it does with ranges.

python -m ddp_prof.train --world-size 2 --variant bucketed --bucket-size-mb 25 --model-size mini
torchrun --nproc-per-node 2 -m ddp_prof.train --variant overlap --model-size xl --batch-size 4 --seq-len 128

The model sizes are in this file, which needs no torch, so that ``--help`` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY = 10_000


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The dimensions of the model: width, width of the feed-forward layers, number of blocks, heads of an attention."""

    d_model: int  # a multiple of 2 * heads: rotary embedding rotates pairs
    d_ff: int
    layers: int
    heads: int

    @property
    def parameter_counts(self) -> tuple[int, ...]:
        """How many numbers each parameter has, in the order of the model's ``parameters()``."""
        norm, table = self.d_model, VOCABULARY * self.d_model
        # A block has a norm, four matrices of the attention, a norm, and three matrices of the feed-forward layer.
        block = (norm, *4 * (self.d_model**2,), norm, *3 * (self.d_model * self.d_ff,))
        return (table, *self.layers * block, norm, table)

    @property
    def parameter_count(self) -> int:
        return sum(self.parameter_counts)

    def step_flops(self, tokens: int, seq_len: int) -> int:
        """Return the number of multiplications and additions in the matrix products of forward and backward of a step.

        Forward has 2 per token and weight of a matrix (the embedding is a look-up), and 4 * ``seq_len`` * ``d_model``
        per token in each attention (scores and weighted values, including the masked half). Backward costs twice
        forward (Kaplan et al. 2020, section 2.1). Not included: activation checkpointing, which computes the forward of
        the blocks again. ``tokens`` is the number of tokens in the step.
        """
        weights = self.layers * (4 * self.d_model**2 + 3 * self.d_model * self.d_ff) + VOCABULARY * self.d_model
        return 3 * tokens * (2 * weights + 4 * self.layers * seq_len * self.d_model)

    def gradient_bytes(self) -> int:
        return 4 * self.parameter_count


MODEL_SIZES = {
    "tiny": ModelSize(32, 64, 2, 2),  # for tests
    "mini": ModelSize(256, 1024, 4, 4),  # for captures on two CPU cores
    "wide": ModelSize(1024, 4096, 4, 16),  # for small captures on a GPU: few kernels, of the size of medium's
    # Stanford CS336, spring 2025, assignment 2
    "small": ModelSize(768, 3072, 12, 12),
    "medium": ModelSize(1024, 4096, 24, 16),
    "large": ModelSize(1280, 5120, 36, 20),
    "xl": ModelSize(1600, 6400, 48, 25),
    "2.7B": ModelSize(2560, 10240, 32, 32),
    # The same course, spring 2026; its xl is what was the 2.7B
    "xl-2026": ModelSize(2560, 10240, 32, 32),
    "10B-2026": ModelSize(4608, 12288, 50, 36),
}
