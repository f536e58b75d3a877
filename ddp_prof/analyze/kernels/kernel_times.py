"""The kernels of a run, each with its time, and how much slower they compute while communication runs beside them.

Executions with the same name, launch shape and phase are one kernel; ``docs/metrics.md`` defines its slowdown::

    kernel         aaaa  aaaaaa  aaaa
    communication        ######   #
                   alone beside  neither          slowdown 6/4

Contention is the slowdown of all kernels together. Executions with the same name and launch shape at the same position
in the step (the n-th launch of these) are compared: those beside communication with those without any::

    step 3   compute  aaaabbbb        step 4   compute  aaaabbbbbb      b takes 6 instead of 4
             stream                            stream       NNNNNN

The executions may be from one run or from several, for example ``naive`` and ``overlap``. Within one run, an execution
that is slow for another reason is a little more likely to overlap communication, so two runs are more reliable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.step_breakdown import sum_by_group
from ddp_prof.analyze.result_bases import measure_fields
from ddp_prof.analyze.statistics import Numbers, bootstrap_interval
from ddp_prof.columns import ALWAYS, USUALLY, WITH_MUCH_ROOM, WITH_ROOM, column
from ddp_prof.communication import MOST_NAMES
from ddp_prof.range_names import PHASES
from ddp_prof.table import count_before
from ddp_prof.trace import UNKNOWN, Category, Ints, Mask, distinct, distinct_rows

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


@lru_cache(MOST_NAMES)  # a kernel has one name in all steps and ranks
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


@dataclass(frozen=True)
class KernelExecutions:
    """All executions of one kernel, what its figures are measured from. Columns have one element per execution.

    Attributes:
        rank: Index of the rank.
        all_kernels_ns: Summed durations of all kernels of the run.
    """

    key: Key
    duration_ns: Ints
    beside_ns: Ints
    rank: Ints
    all_kernels_ns: int

    @property
    def communicates(self) -> bool:
        return self.key[3] == COMMUNICATION

    @cached_property
    def is_beside(self) -> Mask:
        return is_mostly_overlapped(self.duration_ns, self.beside_ns)

    @cached_property
    def is_alone(self) -> Mask:
        is_alone: Mask = self.beside_ns == 0
        return is_alone

    @cached_property
    def has_both(self) -> Mask:
        """Whether the rank has executions of both kinds: ranks may hold other work, so only these are compared."""
        ranks = np.intersect1d(self.rank[self.is_beside], self.rank[self.is_alone])
        has_both: Mask = np.isin(self.rank, ranks)
        return has_both

    @cached_property
    def compared_ns(self) -> tuple[Ints, Ints]:
        """The durations beside communication, and alone, of the ranks that have both."""
        return self.duration_ns[self.is_beside & self.has_both], self.duration_ns[self.is_alone & self.has_both]

    @cached_property
    def why_no_slowdown(self) -> str | None:
        beside, alone = self.compared_ns
        if self.communicates:
            return "it communicates itself"
        if min(len(beside), len(alone)) < LEAST_EXECUTIONS:
            where = "" if self.has_both.all() else " of the ranks that have both"
            counted = f"{len(beside)} executions beside communication, {len(alone)} alone{where}"
            return f"{counted}; {LEAST_EXECUTIONS} of each are needed"
        return None if np.median(alone) else "alone it takes no time"

    def count(self, chosen: Mask) -> int | None:
        return None if self.communicates else int(chosen.sum())

    def median_of_ns(self, chosen: Mask) -> float | None:
        return None if self.communicates or not chosen.any() else float(np.median(self.duration_ns[chosen]))


def _slowdown_of_kernel(of: KernelExecutions) -> float | None:
    beside, alone = of.compared_ns
    return None if of.why_no_slowdown else float(np.median(beside) / np.median(alone))


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
        null="it communicates itself",
        stays=WITH_MUCH_ROOM,
    )
    alone: int | None = column(
        "executions without any communication beside them",
        measure=lambda of: of.count(of.is_alone),
        null="it communicates itself",
        stays=WITH_MUCH_ROOM,
    )
    beside_ns: float | None = column(
        "median duration of those beside communication",
        measure=lambda of: of.median_of_ns(of.is_beside),
        null="there are none; it communicates itself",
    )
    alone_ns: float | None = column(
        "median duration of those alone",
        measure=lambda of: of.median_of_ns(of.is_alone),
        null="there are none; it communicates itself",
    )
    slowdown: float | None = column(
        "median duration beside communication over that alone, on the ranks that have both",
        measure=_slowdown_of_kernel,
        null="``reason`` says why",
        stays=ALWAYS,
        decimals=2,
    )
    reason: str | None = column(
        "why the slowdown is not known", measure=lambda of: of.why_no_slowdown, null="it is known"
    )


def find_kernel_runs(rank: RankEvents) -> KernelRuns:
    """All kernels of a rank, including those outside of steps, without warm-up."""
    events, rows, trace = rank.events, np.flatnonzero(rank.is_kernel), rank.trace
    rows = rows[np.lexsort((events.start_ns[rows], events.launch_ns[rows], events.step[rows]))]
    activity = events.activity[rows]
    shape_id = np.full(len(rows), UNKNOWN) if trace.shape_id is None else trace.shape_id[activity]
    columns = (trace.activities.name_id[activity], shape_id, events.phase[rows], events.category[rows])
    del activity
    first, kernel = distinct_rows(*columns)
    texts = (*trace.names, "")  # the additional last element is for UNKNOWN, which is -1
    kinds, keys = {Category.COMMUNICATION: COMMUNICATION, Category.UNKNOWN: UNNAMED}, list[Key]()
    for name_id, shape, phase, category in zip(*(values[first].tolist() for values in columns), strict=True):
        name = texts[name_id]
        kind = kinds[Category(category)] if category in kinds else kind_of_compute(name)
        keys.append((name, texts[shape], None if phase == UNKNOWN else PHASES[phase], kind))
    start_ns, end_ns = events.start_ns[rows], events.end_ns[rows]
    return KernelRuns(
        keys=tuple(keys),
        kernel=kernel,
        duration_ns=end_ns - start_ns,
        beside_ns=rank.union_of(Category.COMMUNICATION).covered_ns(start_ns, end_ns),
        step=events.step[rows] if rank.has_steps else np.full(len(rows), UNKNOWN),
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
    rank = np.repeat(np.arange(len(ranks)), [len(runs.kernel) for runs in ranks])
    of_ranks = np.split(rank[order], borders)
    whole_ns = sum(int(runs.duration_ns.sum()) for runs in ranks)
    kernels = [
        KernelTime(**measure_fields(KernelTime, KernelExecutions(*of_kernel, all_kernels_ns=whole_ns)))
        for of_kernel in zip(keys, durations, besides, of_ranks, strict=True)
        if len(of_kernel[1])
    ]
    return tuple(sorted(kernels, key=lambda time: (-time.total_ns, time.name, time.shape, time.phase or "")))


Floats = NDArray[np.float64]

LEAST_KERNELS = 5
"""At least this number of different kernels (name and position) must be compared, or there is no figure."""

SAME_WORK, AGREEING, AGREEING_NS = 0.9, 0.05, 1000
"""Two ranks have the same work if such a share of kernels that ran alone on both takes as long: within 5 % or 1 us."""

SAME = 0.02
"""Two kinds of steps count as equal if the ratio of their times differs from 1 by no more than this."""


@dataclass(frozen=True, slots=True)
class Contention:
    """How much communication slows the compute beside it, of one run; without figures if there is a reason.

    A kernel that takes ``alone`` by itself, and runs beside communication for ``beside`` of its ``duration``, does
    there what takes ``alone - (duration - beside)`` by itself. The slowdown is the ratio of the two, of their sums over
    all compared executions::

        alone      ######          6
        beside     ####======      4 without communication, 6 beside it, where it does what takes 2: slowdown 3

    Contention is what this makes of *all* time beside communication::

        contention = sum over kinds of kernels of beside * (1 - 1 / slowdown)

    A kind has its own slowdown if half of its time beside communication could be compared, of some kernels, and if
    these differ from those of other kinds. The others have that of all compared kernels of such kinds or, if there are
    none, of all kinds.
    The interval also holds what comes out if each kind with enough kernels has its own, and how much compared kernels
    differ, as those that could not be compared may.

    Attributes:
        kernels: Number of different kernels (name and position) that were compared.
        runs: Number of executions beside communication that were compared.
        share: The compared share of all time of kernels beside communication, 0 to 1.
        slowdown: That of all compared executions together.
        slowdown_low, slowdown_high: Its 95 % interval; ``None`` for too few steps.
        slowed: Share of the time beside communication that is contention, 0 to 1.
        slowed_low, slowed_high: Its 95 % interval; ``None`` for too few steps.
        slowed_by_kind: That share of each kind.
        contention_ns: The mean cost for a step of a rank, of all time beside communication, summed over streams.
        half_width_ns: Half of the interval of ``contention_ns``.
    """

    kernels: int = 0
    runs: int = 0
    share: float | None = None
    slowdown: float | None = None
    slowdown_low: float | None = None
    slowdown_high: float | None = None
    contention_ns: int | None = None
    reason: str | None = None
    half_width_ns: int | None = None
    slowed: float | None = None
    slowed_low: float | None = None
    slowed_high: float | None = None
    slowed_by_kind: tuple[tuple[str, float], ...] = ()


def measure_contention(ranks: Sequence[KernelRuns], reference: Sequence[KernelRuns] = ()) -> Contention:
    """Compare kernels of a run beside communication with the same kernels alone.

    A kernel is compared with itself on its own rank, and on ranks on which the same kernels alone take as long: others
    may hold other work. ``reference`` are ranks of other runs of the same model; their executions without communication
    are used where these have none.
    """
    both = list(map(_compute_in_steps, (*ranks, *reference)))
    of_ranks = sum(len(runs.kernel) for runs in both[: len(ranks)])
    if not of_ranks:
        return Contention(reason="no GPU kernels in steps: contention cannot be measured")
    keys, kernel = merge_keys(([key[:2] for key in runs.keys], runs.kernel) for runs in both)
    duration, beside, step = (
        np.concatenate([getattr(runs, name) for runs in both]) for name in ("duration_ns", "beside_ns", "step")
    )
    rank = np.repeat(np.arange(len(both)), [len(runs.kernel) for runs in both])
    _, key = distinct_rows(kernel, count_before(distinct_rows(rank, step, kernel)[1]))  # rows are in order of launch
    own = np.arange(len(key)) < of_ranks
    is_mostly_beside: Mask = own & is_mostly_overlapped(duration, beside)
    if not is_mostly_beside.any():
        return Contention(reason="no kernel ran beside communication for more than half of its time")
    alone = _by_work(key, rank, own, beside == 0, duration)
    alone_ns, has_alone = _medians_by_key(alone, duration, beside == 0)
    compared = own & (beside > 0) & has_alone[alone]
    kernels = np.unique(key[compared & is_mostly_beside])
    if len(kernels) < LEAST_KERNELS:
        some = {0: "no kernel", 1: "only one kernel"}.get(len(kernels), f"only {len(kernels)} kernels")
        counted = f"{some} ran both beside communication and alone"
        return Contention(reason=f"{counted}; {LEAST_KERNELS} are needed")
    if doubt := _other_difference(rank, step, key, own, duration, beside, is_mostly_beside):
        return Contention(reason=doubt)

    # What a compared execution did beside communication takes so long alone.
    done_ns = alone_ns[alone] - (duration - beside)
    if not alone_ns[alone[compared]].sum():
        return Contention(reason="the kernels that ran both beside communication and alone took no time alone")
    if done_ns[compared].sum() <= 0:
        return Contention(reason="the compared kernels were as long without communication as they are alone")
    names, kind = np.unique([kind_of_compute(name) for name, _ in keys], return_inverse=True)
    kind, kinds = kind[kernel], range(len(names))
    has_enough = np.array([len(np.unique(key[compared & (kind == one)])) >= LEAST_KERNELS for one in kinds])
    sums = _sums_by_step(step, kind, len(kinds), (beside * compared, done_ns * compared, beside * own))
    compared_ns, took_ns, all_ns = np.split(sums.sum(axis=0), 3)
    differs = _differ_from_others(key, kind, beside * compared, done_ns * compared, len(kinds))
    # The second widens the intervals.
    own_slowdown = has_enough & (2 * compared_ns >= all_ns) & differs, has_enough
    slowdown, slowed = float(_slowdown(sums[None])[0]), float(_slowed(own_slowdown[0], sums[None])[0])
    of_kinds = _slowdown_by_kind(own_slowdown[0], compared_ns, took_ns)
    slowed_by_kind = np.maximum(0.0, 1 - 1 / of_kinds).tolist()
    doubt_of_alone = _error_of_medians(alone, duration, beside == 0, compared) / done_ns[compared].sum()
    slowdown_interval = _widest(slowdown, slowdown * doubt_of_alone, [bootstrap_interval(sums, _slowdown)])
    slowed_intervals = [bootstrap_interval(sums, partial(_slowed, kinds)) for kinds in own_slowdown]
    doubt_of_rest = _doubt_of_rest(key, compared, beside * own, done_ns)
    slowed_interval = _widest(slowed, math.hypot(doubt_of_alone / slowdown, doubt_of_rest), slowed_intervals)
    beside_of_step_ns = float(all_ns.sum()) / sum(runs.steps for runs in ranks)
    return Contention(
        kernels=len(kernels),
        runs=int(compared.sum()),
        share=float(beside[compared].sum() / beside[own].sum()),
        slowdown=slowdown,
        slowdown_low=slowdown_interval and slowdown_interval[0],
        slowdown_high=slowdown_interval and slowdown_interval[1],
        contention_ns=round(slowed * beside_of_step_ns),
        half_width_ns=slowed_interval and round((slowed_interval[1] - slowed_interval[0]) / 2 * beside_of_step_ns),
        slowed=slowed,
        slowed_low=slowed_interval and slowed_interval[0],
        slowed_high=slowed_interval and slowed_interval[1],
        slowed_by_kind=tuple(zip(map(str, names), slowed_by_kind, strict=True)),
    )


def _widest(figure: float, doubt: float, intervals: Iterable[tuple[float, float] | None]) -> tuple[float, float] | None:
    """An interval that holds all intervals of a figure, and an independent doubt."""
    known = [interval for interval in intervals if interval is not None]
    if not known:
        return None
    low, high = min(low for low, _ in known), max(high for _, high in known)
    return figure - math.hypot(figure - low, doubt), figure + math.hypot(high - figure, doubt)


def _doubt_of_rest(key: Ints, compared: Mask, beside_ns: Ints, done_ns: Floats) -> float:
    """Half of the 95 % interval of the contended share because kernels that were not compared may be slowed otherwise.

    Kernels that were compared are a sample of those that ran beside communication. The bootstrap draws them; the others
    are as many draws more, so that what they add up to differs, too.
    """
    beside, compared_ns, done = (
        np.bincount(key, weights=weights) for weights in (beside_ns, beside_ns * compared, done_ns * compared)
    )
    rows = np.flatnonzero((compared_ns > 0) & (done > 0))
    rest = (beside > 0) & (compared_ns == 0)
    left = float((beside - compared_ns).sum() / beside.sum())
    interval = _interval_of_kernels(compared_ns[rows], done[rows])
    if interval is None:
        return left
    # Of few, the bootstrap's interval is too narrow: by the bias of its variance, and as Student's is wider.
    count, others = len(rows), max(1, int(rest.sum()))
    of_few = math.sqrt(count / (count - 1)) * (1 + 1.22 / (count - 1))
    return left * (interval[1] - interval[0]) / 2 * math.sqrt(1 + count / others) * of_few


def _interval_of_kernels(compared_ns: Numbers, done_ns: Numbers) -> tuple[float, float] | None:
    """The 95 % interval of the contended share of compared kernels, which are drawn; ``None`` for too few."""
    sums = np.column_stack([compared_ns, done_ns])
    return bootstrap_interval(
        sums[np.lexsort(sums.T)],  # keys are numbered as the file is written, and what is drawn must not depend on it
        lambda drawn: 1 - drawn[..., 1].sum(axis=1) / np.maximum(1.0, drawn[..., 0].sum(axis=1)),
    )


def _differ_from_others(key: Ints, kind: Ints, compared_ns: Floats, done_ns: Floats, kinds: int) -> Mask:
    """Whether the kernels of each kind are slowed otherwise than those of all others, by more than kernels differ."""
    compared, done = (np.bincount(key, weights=weights) for weights in (compared_ns, done_ns))
    of_key = np.zeros(len(compared), np.int64)
    of_key[key] = kind
    is_known = (compared > 0) & (done > 0)
    found = np.zeros(kinds, np.bool_)
    for one in range(kinds):
        intervals = [
            _interval_of_kernels(compared[rows], done[rows])
            for rows in (is_known & (of_key == one), is_known & (of_key != one))
        ]
        (low, high), (others_low, others_high) = (interval or (0.0, 1.0) for interval in intervals)
        found[one] = abs(low + high - others_low - others_high) > math.hypot(high - low, others_high - others_low)
    return found


def _error_of_medians(key: Ints, duration: Ints, alone: Mask, compared: Mask) -> float:
    """Half of the 95 % interval of the summed medians with which executions are compared.

    The standard error of a median of normal values is 1.25 standard deviations, divided by the root of their number.
    """
    keys = int(key.max()) + 1
    count = np.bincount(key[alone], minlength=keys)
    mean = np.bincount(key[alone], weights=duration[alone], minlength=keys) / np.maximum(1, count)
    squares = np.bincount(key[alone], weights=(duration[alone] - mean[key[alone]]) ** 2, minlength=keys)
    deviation = np.sqrt(squares / np.maximum(1, count - 1))
    used = np.bincount(key[compared], minlength=keys)
    return float(1.96 * 1.25 * np.sqrt((used**2 * deviation**2 / np.maximum(1, count)).sum()))


def _sums_by_step(step: Ints, kind: Ints, kinds: int, columns: Sequence[Floats | Ints]) -> Floats:
    """The sum of each column by step and kind; shape (steps, columns x kinds), the kinds of a column together."""
    _, unit = np.unique(step, return_inverse=True)
    size = (int(unit.max()) + 1) * kinds
    return np.column_stack(
        [np.bincount(unit * kinds + kind, weights=column, minlength=size).reshape(-1, kinds) for column in columns]
    )


def _slowdown(drawn: Numbers) -> Numbers:
    """Time beside communication of compared executions, divided by what it takes alone; for sums by step and kind."""
    beside, done, _ = np.split(drawn.sum(axis=1), 3, axis=-1)
    found: Numbers = np.maximum(1.0, beside.sum(axis=-1)) / np.maximum(1.0, done.sum(axis=-1))
    return found


def _slowed(has_own: Mask, drawn: Numbers) -> Numbers:
    """The share of the time beside communication that is contention; ``has_own``: kinds with their own slowdown."""
    beside, done, everything = np.split(drawn.sum(axis=1), 3, axis=-1)
    slowed = everything * (1 - 1 / _slowdown_by_kind(has_own, beside, done))
    found: Numbers = slowed.sum(axis=-1) / np.maximum(1.0, everything.sum(axis=-1))
    return found


def _slowdown_by_kind(has_own: Mask, beside: Numbers, done: Numbers) -> Numbers:
    """Of each kind (last axis) its own or, if it has none, that of all others that have none, or of all."""
    rest_ns, rest_done = ((~has_own * column).sum(axis=-1, keepdims=True) for column in (beside, done))
    every = np.maximum(1.0, beside.sum(axis=-1, keepdims=True)) / np.maximum(1.0, done.sum(axis=-1, keepdims=True))
    rest = np.where((rest_ns > 0) & (rest_done > 0), rest_ns / np.maximum(1.0, rest_done), every)
    found: Numbers = np.where(has_own & (beside > 0) & (done > 0), beside / np.maximum(1.0, done), rest)
    return found


def _compute_in_steps(runs: KernelRuns) -> KernelRuns:
    computes = np.array([kind not in (COMMUNICATION, UNNAMED) for *_, kind in runs.keys], np.bool_)
    rows = np.flatnonzero(computes[runs.kernel] & (runs.step != UNKNOWN))
    columns = {name: getattr(runs, name)[rows] for name in ("kernel", "duration_ns", "beside_ns", "step")}
    return replace(runs, **columns)


def _by_work(key: Ints, rank: Ints, own: Mask, sampled: Mask, duration: Ints) -> Ints:
    """Keys by which executions are compared: of ranks with the same work, if these have samples; else of other runs."""
    of_work = _same_work(key, rank, own, sampled, duration)
    _, of_key = distinct_rows(key, of_work)
    has_samples = np.bincount(of_key[own & sampled], minlength=int(of_key.max()) + 1) > 0
    found: Ints = distinct_rows(key, np.where(own & has_samples[of_key], of_work, UNKNOWN))[1]
    return found


def _same_work(key: Ints, rank: Ints, own: Mask, sampled: Mask, duration: Ints) -> Ints:
    """For each execution the rank whose samples stand for its own: the first one with the same work, or its own.

    Of two ranks with the same work almost all kernels take as long; those that do not are compared on their own rank.
    """
    found: Ints = rank.copy()
    first = dict[int, tuple[Floats, Mask]]()
    for one in distinct(rank[own]):
        ns, has = _medians_by_key(key, duration, own & sampled & (rank == one))
        for other, (other_ns, other_has) in first.items():
            both = has & other_has
            agrees = np.abs(ns - other_ns) <= np.maximum(AGREEING * np.maximum(ns, other_ns), AGREEING_NS)
            if both.sum() >= LEAST_KERNELS and agrees[both].mean() >= SAME_WORK:
                rows = np.flatnonzero(rank == one)
                found[rows[~both[key[rows]] | agrees[key[rows]]]] = other
                break
        else:
            first[one] = ns, has
    return found


def _other_difference(
    rank: Ints, step: Ints, key: Ints, own: Mask, duration: Ints, beside: Ints, is_beside: Mask
) -> str | None:
    """Why the slowdown has another cause: in steps that overlap communication, kernels are slower even when alone.

    Kernels alone in these steps are compared with the same kernels alone in other steps, of ranks with the same work
    or, if these have none, of the reference. If there are no other steps, ``None``.
    """
    _, step = distinct_rows(rank, step)
    in_communicating = np.isin(step, np.unique(step[is_beside]))
    sampled = (beside == 0) & ~in_communicating
    alone = _by_work(key, rank, own, sampled, duration)
    alone_ns, has_alone = _medians_by_key(alone, duration, sampled)
    control = own & in_communicating & (beside == 0) & has_alone[alone]
    if len(np.unique(key[control])) < LEAST_KERNELS:
        return None
    expected_ns = alone_ns[alone[control]]
    slowdown = float(duration[control].sum() / expected_ns.sum())
    # The bootstrap draws kernels, not steps: a kernel that is matched wrongly is slower in every step.
    low, high = _slowdown_interval(key[control], duration[control], expected_ns) or (slowdown, slowdown)
    if low <= 1 + SAME and high >= 1 - SAME:
        return None
    return (
        f"kernels without communication beside them also take {slowdown:.2f} times as long in the "
        "steps that communicate: the steps differ otherwise, so contention cannot be measured"
    )


def _medians_by_key(key: Ints, values: Ints, rows: Mask) -> tuple[Floats, Mask]:
    """The median of the chosen values of each key, and whether it has any."""
    keys = int(key.max()) + 1
    key, values = key[rows], values[rows]
    count = np.bincount(key, minlength=keys)
    first = np.cumsum(count) - count
    has = count > 0
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


def _slowdown_interval(unit: Ints, taken_ns: Ints, expected_ns: Floats) -> tuple[float, float] | None:
    """The interval of the ratio of the sums; the bootstrap draws units (steps or kernels)."""
    _, unit = np.unique(unit, return_inverse=True)
    sums = np.column_stack([np.bincount(unit, weights=taken_ns), np.bincount(unit, weights=expected_ns)])
    sums = sums[np.lexsort(sums.T)]  # what is drawn must not depend on the order in the file

    def ratio(drawn: Numbers) -> Numbers:
        total = drawn.sum(axis=1)
        found: Numbers = total[:, 0] / np.maximum(1.0, total[:, 1])
        return found

    return bootstrap_interval(sums, ratio)


class NameTimes(NamedTuple):
    """Executions of the kernels of one name: the shortest of all, and number and summed time of those ``beside``."""

    shortest_ns: int
    beside: int
    beside_ns: int


@dataclass(frozen=True)
class SlowdownLimit:
    """Input of :func:`limit_contention_ns` for one rank; it needs no launch shapes, which take long to read.

    Attributes:
        compares: Whether enough kernels ran both beside communication and alone.
        all_communicate: Whether each step with kernels has some beside communication.
    """

    by_name: dict[str, NameTimes]
    steps: int
    compares: bool
    all_communicate: bool


def limit_slowdown(rank: RankEvents) -> SlowdownLimit:
    events = rank.events
    computes = rank.is_kernel & (events.category == Category.COMPUTE)
    rows = np.flatnonzero(computes & (events.step != UNKNOWN) & rank.has_steps)
    step, start, end = events.step[rows], events.start_ns[rows], events.end_ns[rows]
    duration_ns, beside_ns = end - start, rank.union_of(Category.COMMUNICATION).covered_ns(start, end)
    is_beside = is_mostly_overlapped(duration_ns, beside_ns)
    name, steps, names = rank.trace.activities.name_id[events.activity[rows]], len(rank.steps), len(rank.trace.names)
    shortest_ns = np.full(names, duration_ns.max(initial=0))
    np.minimum.at(shortest_ns, name, duration_ns)
    total_ns = sum_by_group(duration_ns[is_beside], name[is_beside], names)
    count = np.bincount(name[is_beside], minlength=names)
    has_kernels, communicates = (np.bincount(of, minlength=steps) > 0 for of in (step, step[is_beside]))

    def count_compared(first_steps: int) -> int:
        """Number of kernels (name and position in the step) that ran both beside communication and alone."""
        own = np.flatnonzero(step < first_steps)
        own = own[np.lexsort((events.launch_ns[rows[own]], step[own]))]
        position = count_before(distinct_rows(step[own], name[own])[1])
        first, kernel = distinct_rows(name[own], position)
        runs = (np.bincount(kernel[of[own]], minlength=len(first)) > 0 for of in (is_beside, beside_ns == 0))
        return int(np.logical_and(*runs).sum())

    return SlowdownLimit(
        by_name={
            rank.trace.names[number]: NameTimes(int(shortest_ns[number]), int(count[number]), int(total_ns[number]))
            for number in distinct(name)
        },
        steps=steps,
        compares=any(count_compared(first) >= LEAST_KERNELS for first in (min(steps, _FIRST_STEPS), steps)),
        all_communicate=bool(np.all(communicates[has_kernels])),
    )


_FIRST_STEPS = 20
"""Usually this number of steps contains enough kernels that can be compared."""


def limit_contention_ns(limits: Sequence[SlowdownLimit]) -> int | None:
    """Upper limit of ``contention_ns`` in :func:`measure_contention`; ``None`` if that might give a reason instead.

    It holds because no kernel alone is shorter than the shortest execution of its name.
    """
    if not (any(limit.compares for limit in limits) and all(limit.all_communicate for limit in limits)):
        return None
    longer_ns = 0
    for name in {name for limit in limits for name in limit.by_name}:
        times = [limit.by_name[name] for limit in limits if name in limit.by_name]
        shortest_ns, beside = min(one.shortest_ns for one in times), sum(one.beside for one in times)
        longer_ns += sum(one.beside_ns for one in times) - beside * shortest_ns
    return longer_ns // sum(limit.steps for limit in limits) + 1
