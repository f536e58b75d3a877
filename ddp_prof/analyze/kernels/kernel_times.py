"""The kernels of a run, each with its time, and how much slower it is while communication runs beside it.

Executions with the same name, launch shape (grid and block) and phase are one kernel; ``docs/metrics.md`` defines its
slowdown. An execution is *beside* communication if communication covers more than half of it, and *alone* if no
communication runs at the same time::

    kernel         aaaa  aaaaaa  aaaa
    communication        ######   #
                   alone beside  neither          slowdown 6/4

Only executions at one position of the step are compared, the n-th of this kernel: one matrix product may have the name
and launch shape of another that takes six times as long.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np

from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.result_bases import measure_fields
from ddp_prof.analyze.why_unknown import why_unknown_work
from ddp_prof.columns import ALWAYS, USUALLY, WITH_MUCH_ROOM, WITH_ROOM, column, count_noun
from ddp_prof.communication import MOST_NAMES
from ddp_prof.growing_column import in_file, in_order, in_parts
from ddp_prof.range_names import PHASES
from ddp_prof.table import Floats, concatenate_columns, constant_column, count_before
from ddp_prof.trace import UNKNOWN, Category, Ints, Mask, distinct_rows

KINDS = {
    "attention": r"flash_|fmha|attention|attn|sdpa",
    "optimizer": r"multi_tensor_apply|adam|sgd_|lamb_|adagrad",
    "normalization": r"norm_|_norm|cudnn::bn_|batchnorm",
    "layout": r"nchwToNhwc|nhwcToNchw|transpose|permute|copy_kernel|CatArray",
    "convolution": r"conv(?!er[st])|wgrad|dgrad|fprop|winograd|cudnn",
    # The library FBGEMM also looks up embeddings, and a type of CUTLASS is no matrix product.
    "matrix product": r"(?<!fb)gemm|gemv|cutlass(?!::\w+_t\b)|cublas|nvjet|^bmm_|_mm_|dot_kernel",
    "embedding": r"embedding|index|gather|scatter",
    "reduction": r"reduce|softmax|triton_red|triton_per",
    "elementwise": r"elementwise|triton_poi|dropout|fill",
}
"""Kinds of work, each with a regular expression for the names of its kernels, ignoring case; the first match counts."""
OTHER = "other"
COMMUNICATION = "communication"
UNNAMED = "unnamed"

_COMPILED = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KINDS.items()]


@lru_cache(MOST_NAMES)  # a kernel has one name in all steps and ranks
def kind_of_compute(name: str) -> str:
    """Return the kind of work of a compute kernel by its name: one of :data:`KINDS` or :data:`OTHER`."""
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), OTHER)


AnyKey = TypeVar("AnyKey", bound="Hashable")


def merge_keys(parts: Iterable[tuple[Sequence[AnyKey], Ints]]) -> tuple[list[AnyKey], Ints]:
    """Return the distinct keys of all parts, and for each row of the concatenated parts the index of its key.

    A part is a list of keys, and for each of its rows an index into this list.
    """
    parts = list(parts)
    number: dict[AnyKey, int] = {}
    rows = [
        in_order(np.array([number.setdefault(key, len(number)) for key in keys], np.int64), row) for keys, row in parts
    ]
    return list(number), concatenate_columns(rows) if rows else np.empty(0, np.int64)


def is_mostly_overlapped(duration_ns: Ints, communication_ns: Ints) -> Mask:
    """Return whether communication covers more than half of each duration."""
    found: Mask = 2 * communication_ns > duration_ns
    return found


def medians_by_key(key: Ints, values: Ints, rows: Mask, keys: int | None = None) -> tuple[Floats, Mask]:
    """Return the median of the chosen values of each key, and whether the key has any.

    Args:
        key: A number from 0 on for each value; the results have one element per key.
        values: The values.
        rows: Mask of the values that are chosen.
        keys: The number of keys, ``None`` if the largest one occurs.
    """
    keys = int(key.max()) + 1 if keys is None else keys
    key, values = key[rows], values[rows]
    count = np.bincount(key, minlength=keys)
    first = np.cumsum(count) - count
    has = count > 0
    # Rows, in the order of keys and values, of the one or two middle values of each key. To sort by both, they are put
    # into one number if it does not overflow.
    middles = np.stack([first[has] + (count[has] - 1) // 2, first[has] + count[has] // 2])
    least = int(values.min(initial=0))
    span = int(values.max(initial=0)) - least + 1
    if keys * span < 1 << 63:  # sorting numbers is several times faster than finding their order
        found = np.sort(key * span + (values - least))[middles] % span + least
    else:
        found = values[np.lexsort((values, key))[middles]]
    middle = np.zeros(keys)
    middle[has] = found.sum(axis=0) / 2
    return middle, has


NO_TIMES_OF_COMMUNICATION = "it is not known when communication ran"

LEAST_EXECUTIONS = 5
"""A slowdown needs this number of executions beside communication, and as many alone."""

Key = tuple[str, str, str | None, str]
"""Name, launch shape, phase and kind of a kernel."""


@dataclass(frozen=True)
class KernelRuns:
    """All executions of kernels by one rank, ordered by step and in each step by launch.

    Attributes:
        keys: The distinct kernels.
        kernel: Index into ``keys`` for each execution.
        duration_ns: Duration of each execution.
        beside_ns: The part of each duration in which communication ran; for collectives, all of it. ``UNKNOWN`` if it
            is not known what communicates.
        step: Index of each execution's step; ``UNKNOWN`` outside of all steps, and in a capture without steps.
        steps: Number of measured steps.
    """

    keys: tuple[Key, ...]
    kernel: Ints
    duration_ns: Ints
    beside_ns: Ints
    step: Ints
    steps: int


@dataclass(frozen=True)
class KernelExecutions:
    """All executions of one kernel, from which its figures are measured. Columns have one element per execution.

    Attributes:
        key: The kernel.
        duration_ns: Duration of each execution.
        beside_ns: The part of each duration in which communication ran; ``UNKNOWN`` if that is not known.
        rank: Index of the rank of each execution.
        step: Index of each execution's step; ``UNKNOWN`` outside of all steps, and in a capture without steps.
        all_kernels_ns: Sum of the durations of all kernels of the run.
    """

    key: Key
    duration_ns: Ints
    beside_ns: Ints
    rank: Ints
    step: Ints
    all_kernels_ns: int

    @property
    def communicates(self) -> bool:
        return self.key[3] == COMMUNICATION

    @cached_property
    def lacks_communication(self) -> bool:
        """Whether it is not known beside which executions communication ran."""
        return bool(np.any(self.beside_ns == UNKNOWN))

    @cached_property
    def is_beside(self) -> Mask:
        """Whether communication covers more than half of each execution."""
        return is_mostly_overlapped(self.duration_ns, self.beside_ns)

    @cached_property
    def is_alone(self) -> Mask:
        """Whether no communication runs beside each execution."""
        is_alone: Mask = self.beside_ns == 0
        return is_alone

    @cached_property
    def place(self) -> Ints:
        """For each execution a number for its rank and its position in the step: the n-th of this kernel."""
        nth = count_before(distinct_rows(self.rank, self.step)[1])  # executions are in the order of launches
        return distinct_rows(self.rank, nth)[1]

    @cached_property
    def has_both(self) -> Mask:
        """For each execution, whether its rank has executions beside communication and alone at its position.

        Only these are compared, because the same kernel may do other work on other ranks and at other positions.
        """
        is_placed = self.step != UNKNOWN
        places = np.intersect1d(self.place[is_placed & self.is_beside], self.place[is_placed & self.is_alone])
        has_both: Mask = is_placed & np.isin(self.place, places)
        return has_both

    @cached_property
    def compared(self) -> tuple[Mask, Mask]:
        """Which executions beside communication are compared, and with which of those alone."""
        return self.is_beside & self.has_both, self.is_alone & self.has_both

    @cached_property
    def slowdown(self) -> float:
        """Median of the executions beside communication, each divided by the median of those alone at its position."""
        beside, alone = self.compared
        alone_ns, _ = medians_by_key(self.place, self.duration_ns, alone)
        longer = self.duration_ns[beside] / np.maximum(1.0, alone_ns[self.place[beside]])
        return float(np.median(longer))

    @cached_property
    def why_no_slowdown(self) -> str | None:
        """Why the slowdown is not known; ``None`` if it is."""
        if self.communicates:
            return "it communicates itself"
        if self.lacks_communication:
            return NO_TIMES_OF_COMMUNICATION
        (beside, alone), where = (int(mask.sum()) for mask in (self.is_beside, self.is_alone)), ""
        if min(beside, alone) >= LEAST_EXECUTIONS:
            if (self.step == UNKNOWN).all():
                return "no whole step is marked, so it is not known which of its executions do the same work"
            beside, alone = (int(mask.sum()) for mask in self.compared)
            where = ", at positions of the step with both"
            if not beside:
                return "it runs beside communication and alone at different positions of the step: other work is likely"
        if min(beside, alone) < LEAST_EXECUTIONS:
            counted = f"{count_noun(beside, 'execution')} beside communication, {alone} alone{where}"
            return f"{counted}; {LEAST_EXECUTIONS} of each are needed"
        return None if self.duration_ns[self.compared[1]].any() else "alone it takes no time"

    def count(self, chosen: Mask) -> int | None:
        return None if self.communicates or self.lacks_communication else int(chosen.sum())

    def median_of_ns(self, chosen: Mask) -> float | None:
        return None if self.communicates or not chosen.any() else float(np.median(self.duration_ns[chosen]))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """One kernel over all ranks and steps."""

    name: str = column("name of the kernel", measure=lambda of: of.key[0], key="kernel", stays=ALWAYS, describes=True)
    shape: str = column(
        "grid and block of its launch; empty if they are not in the trace",
        measure=lambda of: of.key[1],
        stays=WITH_MUCH_ROOM,
        describes=True,
    )
    phase: str | None = column(
        "phase of the step that launched it",
        measure=lambda of: of.key[2],
        null="not known",
        stays=ALWAYS,
        describes=True,
    )
    kind: str = column(
        "kind of work, by the kernel's name", measure=lambda of: of.key[3], stays=USUALLY, describes=True
    )
    count: int = column("executions, over all ranks and steps", measure=lambda of: len(of.duration_ns), stays=WITH_ROOM)
    total_ns: int = column("sum of their durations", measure=lambda of: int(of.duration_ns.sum()), stays=ALWAYS)
    all_kernels_ratio: float | None = column(
        "share of the summed durations of all kernels",
        measure=lambda of: int(of.duration_ns.sum()) / of.all_kernels_ns if of.all_kernels_ns else None,
        null="no kernel takes any time",
        key="of_kernel_time_%",
        stays=WITH_ROOM,
        in_document=False,
    )
    median_ns: float = column(
        "median duration",
        measure=lambda of: float(np.median(of.duration_ns)),
        key="median_us",
        called="median µs",
        stays=ALWAYS,
    )
    beside: int | None = column(
        "executions that communication covers for more than half of their time",
        measure=lambda of: of.count(of.is_beside),
        null="it communicates itself; it is not known when communication ran",
        stays=WITH_MUCH_ROOM,
    )
    alone: int | None = column(
        "executions without any communication beside them",
        measure=lambda of: of.count(of.is_alone),
        null="it communicates itself; it is not known when communication ran",
        stays=WITH_MUCH_ROOM,
    )
    beside_ns: float | None = column(
        "median duration of those beside communication",
        measure=lambda of: of.median_of_ns(of.is_beside),
        null="there are none; it communicates itself; it is not known when communication ran",
    )
    alone_ns: float | None = column(
        "median duration of those alone",
        measure=lambda of: of.median_of_ns(of.is_alone),
        null="there are none; it communicates itself; it is not known when communication ran",
    )
    slowdown: float | None = column(
        "how many times as long as alone it takes beside communication, at the same position of the step: the median",
        measure=lambda of: None if of.why_no_slowdown else of.slowdown,
        null="``reason`` says why",
        stays=ALWAYS,
        decimals=2,
    )
    reason: str | None = column(
        "why the slowdown is not known", measure=lambda of: of.why_no_slowdown, null="it is known"
    )


def find_kernel_runs(rank: RankEvents) -> KernelRuns:
    """Return all kernels of a rank, including those outside of steps, but not those of warm-up steps."""
    events, rows, trace = rank.events, np.flatnonzero(rank.is_kernel), rank.trace
    launch_ns = rank.launched_events.launch_ns
    rows = in_order(rows, np.lexsort([in_order(of, rows) for of in (events.start_ns, launch_ns, events.step)]))
    activity = in_order(events.activity, rows)
    shape_id = constant_column(UNKNOWN, len(rows)) if trace.shape_id is None else in_order(trace.shape_id, activity)
    name_id, phase, category = (
        in_order(of, at)
        for of, at in ((trace.activities.name_id, activity), (events.phase, rows), (events.category, rows))
    )
    columns = (name_id, shape_id, phase, category)
    first, kernel = distinct_rows(*columns)
    texts = (*trace.names, "")  # the additional last element is for UNKNOWN, which is -1
    kinds, keys = {Category.COMMUNICATION: COMMUNICATION, Category.UNKNOWN: UNNAMED}, list[Key]()
    for name_id, shape, phase, category in zip(*(values[first].tolist() for values in columns), strict=True):
        name = texts[name_id]
        kind = kinds[Category(category)] if category in kinds else kind_of_compute(name)
        keys.append((name, texts[shape], None if phase == UNKNOWN else PHASES[phase], kind))
    del columns
    start_ns, end_ns = in_order(events.start_ns, rows), in_order(events.end_ns, rows)
    is_known = why_unknown_work(rank) is None
    return KernelRuns(
        keys=tuple(keys),
        kernel=in_file(kernel),
        duration_ns=in_parts(len(rows), lambda part: end_ns[part] - start_ns[part]),
        beside_ns=rank.union_of(Category.COMMUNICATION).covered_ns(start_ns, end_ns)
        if is_known
        else constant_column(UNKNOWN, len(rows)),
        step=in_order(events.step, rows) if rank.has_steps else constant_column(UNKNOWN, len(rows)),
        steps=len(rank.steps),
    )


def measure_kernels(ranks: Sequence[KernelRuns]) -> tuple[KernelTime, ...]:
    """Return the kernels of all ranks together, in descending order of total time."""
    keys, kernel = merge_keys((runs.keys, runs.kernel) for runs in ranks)
    if not keys:
        return ()
    # Split the executions of all ranks by kernel.
    order = np.argsort(kernel, kind="stable")
    borders = np.cumsum(np.bincount(kernel, minlength=len(keys)))[:-1]
    durations = np.split(np.concatenate([runs.duration_ns for runs in ranks])[order], borders)
    besides = np.split(np.concatenate([runs.beside_ns for runs in ranks])[order], borders)
    rank = np.repeat(np.arange(len(ranks)), [len(runs.kernel) for runs in ranks])
    of_ranks = np.split(rank[order], borders)
    of_steps = np.split(concatenate_columns([runs.step for runs in ranks])[order], borders)
    whole_ns = sum(int(runs.duration_ns.sum()) for runs in ranks)
    kernels = [
        KernelTime(**measure_fields(KernelTime, KernelExecutions(*of_kernel, all_kernels_ns=whole_ns)))
        for of_kernel in zip(keys, durations, besides, of_ranks, of_steps, strict=True)
        if len(of_kernel[1])
    ]
    return tuple(sorted(kernels, key=lambda time: (-time.total_ns, time.name, time.shape, time.phase or "")))
