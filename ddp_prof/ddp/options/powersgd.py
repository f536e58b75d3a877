"""PowerSGD: gradient matrices travel as products of two thin ones (Vogels, Karimireddy and Jaggi 2019, algorithm 1).

A bucket's gradients are matrices M [n, m]: the first dimension against all others. Those for which it saves at least
half of the bytes are sent as P [n, rank] and Q [m, rank]; the others, all vectors among them, are sent whole, with P.

    M   += error                      error feedback: what was not sent in the steps before
    P    = M orthonormal(Q)           Q of the step before (warm start), else random, the same on all ranks
    P    = all-reduce(P)              first message of the bucket
    Q    = M' orthonormal(P)
    Q    = all-reduce(Q)              second message, ``part=2`` in its range
    mean = orthonormal(P) Q'          the averaged gradient, the same on all ranks
    error = M - mean

The second message needs the first one's result, and ranks must launch in one order. So the second message of a bucket
is launched just before the first one of the next bucket; should the result not be there, the hook waits for it:

    compute    |####|P0|#####|Q0 P1|#####|Q1 P2|  |Q2|        |
    all-reduce       [  P0  ] [Q0][  P1 ] [Q1][ P2 ] [ Q2 ]
    host       |             backward          | synchronize  |

A step's error against float32 is the part of the mean, past errors included, that lies outside the span of P: at most
the mean itself, at least what the best product of this rank leaves (its smaller singular values, by Eckart and Young).
With error feedback nothing is lost: what was applied over the steps and the ranks' mean error sum to the gradients. A
gradient that is not finite would stay in the error for good, so this does not go with dynamic loss scaling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ddp_prof.ddp.engine.collective import launch_all_reduce
from ddp_prof.ddp.engine.reducer import Reducer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.ddp.engine.collective import InFlight
    from ddp_prof.ddp.engine.gradients import GradientBucket

LEAST_SAVING = 2
"""A matrix is compressed where that divides its bytes by more than this; torch's ``powerSGD_hook`` has the same."""
SEED = 0


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """How to compress.

    Args:
        rank: Columns of P and Q.
        error_feedback: Add to a gradient what was not sent of those before it.
        warm_start: Begin with the Q of the step before; otherwise with a random one in each step.

    Raises:
        ValueError: The rank is no positive whole number.
    """

    rank: int = 1
    error_feedback: bool = True
    warm_start: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"the rank of PowerSGD must be a positive whole number, got {self.rank!r}")

    def columns(self, shape: Sequence[int]) -> int:
        """Columns of P and Q for a parameter of this shape; 0 where it is sent whole."""
        if len(shape) < 2 or not all(shape):
            return 0
        rows, others = shape[0], torch.Size(shape[1:]).numel()
        columns = min(rows, others, self.rank)
        return columns if (rows + others) * columns * LEAST_SAVING < rows * others else 0

    def sent_numel(self, shape: Sequence[int]) -> int:
        """How many numbers a parameter of this shape sends in a step."""
        numel = torch.Size(shape).numel()
        return (shape[0] + numel // shape[0]) * columns if (columns := self.columns(shape)) else numel


class PowerSGDReducer(Reducer):
    """Reduces buckets in two messages each; late contributions whole. Arguments as of :class:`Reducer`."""

    def __init__(self, *args: Any, how: PowerSGD) -> None:
        super().__init__(*args)
        generator = torch.Generator().manual_seed(SEED)
        self.compressors = [BucketCompressor(bucket, how, generator, self._scale) for bucket in self.buckets]
        self._second: list[InFlight] = []

    def kept_tensors(self) -> list[torch.Tensor]:
        """The buckets, messages and errors."""
        own = (tensor for compressor in self.compressors for tensor in compressor.kept_tensors())
        return [*super().kept_tensors(), *own]

    def _launch(self, bucket: GradientBucket) -> InFlight:
        if bucket.index:
            self._launch_second(bucket.index - 1)
        message = self.compressors[bucket.index].first_message()
        return launch_all_reduce(message, self._group, bucket.index, len(bucket))

    def _launch_second(self, index: int) -> None:
        compressor = self.compressors[index]
        if compressor.matrices:
            self._in_flight[index].wait()
            message, params = compressor.second_message(), len(compressor.matrices)
            self._second.append(launch_all_reduce(message, self._group, index, params, part=2))

    def _give_back(self, unused: set[int], late: dict[int, torch.Tensor]) -> None:
        if self.buckets:
            self._launch_second(len(self.buckets) - 1)
        for flight in self._second:
            flight.wait()
        self._second.clear()
        for compressor in self.compressors:
            compressor.restore()
        super()._give_back(unused, late)


class BucketCompressor:
    """The messages of one bucket, and what it keeps from step to step.

    Args:
        bucket: Whose gradients are sent, divided by the number of ranks.
        how: The rank and so on.
        generator: Of random Qs; the same on all ranks, and used by their buckets in one order.
        scale: By what the gradients were divided, as a factor.
    """

    def __init__(self, bucket: GradientBucket, how: PowerSGD, generator: torch.Generator, scale: float) -> None:
        self._bucket, self._how, self._generator, self._scale = bucket, how, generator, scale
        columns = [how.columns(view.shape) for view in bucket.views]
        self._whole = [view for view, rank in zip(bucket.views, columns, strict=True) if not rank]
        self.matrices = [view for view, rank in zip(bucket.views, columns, strict=True) if rank]
        shapes = [
            (*matrix.flatten(1).shape, rank) for matrix, rank in zip(self.matrices, filter(None, columns), strict=True)
        ]
        buffer = bucket.tensor()
        whole = sum(view.numel() for view in self._whole)
        # Kept from step to step: a later step may run on another stream, for which a new tensor would have to be held.
        self._first = buffer.new_zeros(whole + sum(rows * rank for rows, _, rank in shapes))
        self._second = buffer.new_zeros(sum(others * rank for _, others, rank in shapes))
        self._whole_sent = _cut(self._first[:whole], [tuple(view.shape) for view in self._whole])
        self._p = _cut(self._first[whole:], [(rows, rank) for rows, _, rank in shapes])
        self.q = _cut(self._second, [(others, rank) for _, others, rank in shapes])
        self._errors = [torch.zeros_like(matrix) for matrix in self.matrices] if how.error_feedback else []
        self._is_first_step = True

    def kept_tensors(self) -> list[torch.Tensor]:
        """Both messages, and the errors."""
        return [self._first, self._second, *self._errors]

    def first_message(self) -> torch.Tensor:
        """What is sent whole, and P."""
        self._bucket.tensor()  # which waits for the copies of the gradients
        for matrix, error in zip(self.matrices, self._errors, strict=False):
            matrix.add_(error)
        for view, sent in zip(self._whole, self._whole_sent, strict=True):
            sent.copy_(view)
        for matrix, p, q in zip(self.matrices, self._p, self.q, strict=True):
            if self._is_first_step or not self._how.warm_start:
                q.copy_(torch.randn(q.shape, generator=self._generator, dtype=torch.float64))
            torch.mm(matrix.flatten(1), orthonormal(q), out=p)
        self._is_first_step = False
        return self._first

    def second_message(self) -> torch.Tensor:
        """Q, once the first message was reduced."""
        for matrix, p, q in zip(self.matrices, self._p, self.q, strict=True):
            p.copy_(orthonormal(p))
            torch.mm(matrix.flatten(1).t(), p, out=q)
        return self._second

    def restore(self) -> None:
        """Put the averages into the bucket, once both messages were reduced."""
        for view, sent in zip(self._whole, self._whole_sent, strict=True):
            view.copy_(sent)
        for index, (matrix, p, q) in enumerate(zip(self.matrices, self._p, self.q, strict=True)):
            mean = torch.mm(p, q.t()).view(matrix.shape)
            if self._errors:
                torch.sub(matrix, mean, alpha=self._scale, out=self._errors[index])
            matrix.copy_(mean)


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span those of ``matrix``; of zeros any.

    P asks for them by definition. Q is as large as the gradient, whose square could leave the range of numbers.
    """
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))  # there is no factorization of half numbers
    columns: torch.Tensor = torch.linalg.qr(wide)[0]
    return columns.to(matrix.dtype)


def _cut(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    parts = torch.split(flat, [torch.Size(shape).numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
