"""The kernels of a run, each with its time and its slowdown beside communication.

Executions with the same name, launch shape and phase are one kernel; ``docs/metrics.md`` defines the slowdown::

    kernel         aaaa  aaaaaa  aaaa
    communication        ######   #
                   alone beside  neither          slowdown 6/4
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.range_names import PHASES
from ddp_prof.trace import UNKNOWN, Category, Ints, Mask, distinct_rows, select

KINDS = {
    "attention": r"flash_|fmha|attention|attn|sdpa",
    "optimizer": r"multi_tensor_apply|adam|sgd_|lamb_|adagrad",
    "normalization": r"norm_|_norm|cudnn::bn_|batchnorm",
    "layout": r"nchwToNhwc|nhwcToNchw|transpose|permute|copy_kernel|CatArray",
    "convolution": r"conv(?!er[st])|wgrad|dgrad|fprop|winograd|cudnn",
    "matrix product": r"gemm|gemv|cutlass|cublas|nvjet|^bmm_|_mm_|dot_kernel",
    "embedding": r"embedding|index|gather|scatter",
    "reduction": r"reduce|softmax|triton_red|triton_per",
    "elementwise": r"elementwise|triton_poi|dropout|fill",
}
"""Kinds of work, each with a pattern for the names of its kernels, ignoring case; the first match counts."""
OTHER = "other"
COMMUNICATION = "communication"
UNNAMED = "unnamed"

_COMPILED = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KINDS.items()]


def kind_of_compute(name: str) -> str:
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), OTHER)


AnyKey = TypeVar("AnyKey", bound="Hashable")


def merge_keys(parts: Iterable[tuple[Sequence[AnyKey], Ints]]) -> tuple[list[AnyKey], Ints]:
    """Distinct keys of all parts, and for each row of the concatenated parts the index of its key."""
    parts = list(parts)
    number: dict[AnyKey, int] = {}
    rows = [np.array([number.setdefault(key, len(number)) for key in keys], np.int64)[row] for keys, row in parts]
    return list(number), np.concatenate(rows) if rows else np.empty(0, np.int64)


def is_mostly_overlapped(duration_ns: Ints, communication_ns: Ints) -> Mask:
    """Whether communication covers more than half of each duration."""
    found: Mask = 2 * communication_ns > duration_ns
    return found


LEAST_EXECUTIONS = 5
"""A slowdown needs this number of executions beside communication, and as many alone."""

Key = tuple[str, str, str | None, str]


@dataclass(frozen=True)
class KernelRuns:
    """All executions of kernels by one rank, in each step in the order of launch.

    Attributes:
        keys: Name, launch shape, phase and kind of each kernel.
        kernel: Index into ``keys`` for each execution.
        beside_ns: The part of each duration in which communication ran; for collectives, all of it.
        step: Index of the step; ``UNKNOWN`` outside of all steps, and in a capture without steps.
        steps: Number of measured steps.
    """

    keys: tuple[Key, ...]
    kernel: Ints
    duration_ns: Ints
    beside_ns: Ints
    step: Ints
    steps: int


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel over all ranks and steps.

    Attributes:
        shape: Grid and block of its launch; empty if they are not in the trace.
        phase: The phase that launched it; ``None`` if not known.
        beside, alone: Number of executions beside communication, and alone; ``None`` for a kernel that communicates.
        beside_ns, alone_ns: Median duration of these executions, ``None`` if there are none.
        slowdown: ``beside_ns`` divided by ``alone_ns``; ``None`` with a reason.
    """

    name: str
    shape: str
    phase: str | None
    kind: str
    count: int
    total_ns: int
    median_ns: float
    beside: int | None
    alone: int | None
    beside_ns: float | None
    alone_ns: float | None
    slowdown: float | None
    reason: str | None


def find_kernel_runs(rank: RankEvents) -> KernelRuns:
    """All kernels of a rank, including those outside of steps, without warm-up."""
    rows = np.flatnonzero(rank.is_kernel)
    events = select(rank.events, rows[np.lexsort((rank.events.launch_ns[rows], rank.events.step[rows]))])
    trace = rank.trace
    shape_id = np.full(len(events), UNKNOWN) if trace.shape_id is None else trace.shape_id[events.activity]
    columns = (trace.activities.name_id[events.activity], shape_id, events.phase, events.category)
    first, kernel = distinct_rows(*columns)
    texts = (*trace.names, "")  # the additional last element is for UNKNOWN, which is -1
    kinds, keys = {Category.COMMUNICATION: COMMUNICATION, Category.UNKNOWN: UNNAMED}, list[Key]()
    for name_id, shape, phase, category in zip(*(column[first].tolist() for column in columns), strict=True):
        name = texts[name_id]
        kind = kinds[Category(category)] if category in kinds else kind_of_compute(name)
        keys.append((name, texts[shape], None if phase == UNKNOWN else PHASES[phase], kind))
    return KernelRuns(
        keys=tuple(keys),
        kernel=kernel,
        duration_ns=events.end_ns - events.start_ns,
        beside_ns=rank.union_of(Category.COMMUNICATION).covered_ns(events.start_ns, events.end_ns),
        step=events.step if rank.has_steps else np.full(len(events), UNKNOWN),
        steps=len(rank.steps),
    )


def measure_kernels(ranks: Sequence[KernelRuns]) -> tuple[KernelTime, ...]:
    """The kernels of all ranks together, in descending order of total time."""
    keys, kernel = merge_keys((runs.keys, runs.kernel) for runs in ranks)
    if not keys:
        return ()
    order = np.argsort(kernel, kind="stable")
    borders = np.cumsum(np.bincount(kernel, minlength=len(keys)))[:-1]
    durations = np.split(np.concatenate([runs.duration_ns for runs in ranks])[order], borders)
    besides = np.split(np.concatenate([runs.beside_ns for runs in ranks])[order], borders)
    found = [_measure_kernel(*row) for row in zip(keys, durations, besides, strict=True) if len(row[1])]
    return tuple(sorted(found, key=lambda time: (-time.total_ns, time.name, time.shape, time.phase or "")))


def _measure_kernel(key: Key, duration_ns: Ints, beside_ns: Ints) -> KernelTime:
    communicates = key[3] == COMMUNICATION
    beside, alone = duration_ns[is_mostly_overlapped(duration_ns, beside_ns)], duration_ns[beside_ns == 0]
    medians = [float(np.median(part)) if len(part) else None for part in (beside, alone)]
    reason = None if medians[1] else "alone it takes no time"
    if communicates:
        reason = "it communicates itself"
    elif min(len(beside), len(alone)) < LEAST_EXECUTIONS:
        counted = f"{len(beside)} executions beside communication, {len(alone)} alone"
        reason = f"{counted}; {LEAST_EXECUTIONS} of each are needed"
    return KernelTime(
        *key,
        count=len(duration_ns),
        total_ns=int(duration_ns.sum()),
        median_ns=float(np.median(duration_ns)),
        beside=None if communicates else len(beside),
        alone=None if communicates else len(alone),
        beside_ns=None if communicates else medians[0],
        alone_ns=None if communicates else medians[1],
        slowdown=None if reason or medians[0] is None or not medians[1] else medians[0] / medians[1],
        reason=reason,
    )
