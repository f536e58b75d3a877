"""What the timings of one testbed show by themselves.

An *observation* is an effect found in the data with its interval, and whether the interval supports it. One that is not
supported is kept and marked so, and no sentence is written about it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from ddp_prof.benchmark import effects
from ddp_prof.benchmark.alpha_beta import BucketModel, Unknown
from ddp_prof.benchmark.effects import FLAT, HARDLY, NAIVE, OVERLAP, TORCH, Variant
from ddp_prof.benchmark.statistics import Estimate, combine, relative_saving
from ddp_prof.variants import BUCKETED, BYTES_PER_MB, variant_label

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddp_prof.benchmark.alpha_beta import Unknown
    from ddp_prof.benchmark.effects import Quantity
    from ddp_prof.benchmark.settings import SettingSummary, Timing
    from ddp_prof.benchmark.statistics import Effect

ONE_BLOCK = ""
"""The block of figures that are compared without pairing."""

Topic = Literal["naive_and_flat", "overlap", "bucket_size", "host_timer"]


@dataclass(frozen=True, slots=True)
class Observation:
    """An effect found in the timings of one testbed.

    Attributes:
        name: Key of its sentence.
        effect: The figure, a share from 0 to 1, and its interval.
        is_supported: Whether the whole interval passes the test.
        before: Label of the variant compared with.
        after: Label of the variant compared.
        numbers: Further numbers of the sentence; units are in the names.
    """

    topic: Topic
    name: str
    effect: Effect
    is_supported: bool
    before: str = ""
    after: str = ""
    numbers: dict[str, float] = field(default_factory=dict)


def find_observations(summaries: Sequence[SettingSummary], model: BucketModel | Unknown) -> tuple[Observation, ...]:
    """All observations of one testbed, in the order of their sentences.

    Args:
        summaries: The settings of the testbed.
        model: The bucketing model, which is known where messages were timed.
    """
    timings = [summary.timing for summary in summaries]
    return (
        *_naive_and_flat(timings),
        *_overlap(timings),
        *_bucket_size(timings, model),
        *_host_timer(summaries),
    )


def _naive_and_flat(timings: Sequence[Timing]) -> Iterator[Observation]:
    for found in _change(timings, "naive_and_flat", "step", NAIVE, FLAT):
        yield found
        if not found.is_supported:
            yield Observation(
                "naive_and_flat", "same_step", found.effect, found.effect.is_within(HARDLY), "naive", "flat",
                {"limit": HARDLY},
            )  # fmt: skip
    yield from _change(timings, "naive_and_flat", "communication", NAIVE, FLAT)


def _overlap(timings: Sequence[Timing]) -> Iterator[Observation]:
    yield from _change(timings, "overlap", "step", NAIVE, OVERLAP)
    yield from _change(timings, "overlap", "step", FLAT, OVERLAP)
    yield from _change(timings, "overlap", "communication", NAIVE, OVERLAP)
    unsaved = effects.hidden_but_not_saved(timings)
    if unsaved:
        yield Observation("overlap", "hidden_is_not_saved", unsaved, unsaved.is_beyond("above", 0) == "yes")
    drop = effects.share_drop_with_context(timings)
    if drop:
        yield Observation("overlap", "context_hides_more", drop, drop.is_beyond("above", 0) == "yes")


def _bucket_size(timings: Sequence[Timing], model: BucketModel | Unknown) -> Iterator[Observation]:
    sizes, fastest = effects.bucket_sizes(timings), effects.fastest_bucket_size(timings)
    if fastest is None:
        return
    for size in sizes:
        if size != fastest:
            yield from _change(
                timings, "bucket_size", "step", (BUCKETED, size), (BUCKETED, fastest), choices=math.comb(len(sizes), 2)
            )
    for other in (OVERLAP, FLAT, NAIVE, TORCH):
        yield from _change(timings, "bucket_size", "step", other, (BUCKETED, fastest), choices=len(sizes))
    if isinstance(model, BucketModel) and len(sizes) > 1:
        yield from _model(timings, model, sizes, fastest)


def _model(
    timings: Sequence[Timing], model: BucketModel, sizes: Sequence[float], fastest: float
) -> Iterator[Observation]:
    """Whether the size that the model chooses, of those measured, is the fastest.

    The model agrees where its choice beats each other size, and disagrees where the fastest size beats its choice.
    """
    chosen = min(sizes, key=lambda size: model.overhead_ns(size * BYTES_PER_MB))
    numbers = {"best_bytes": model.best_bytes, "chosen_mb": chosen, "fastest_mb": fastest}
    choices = math.comb(len(sizes), 2)
    others = [
        effects.saving(timings, (BUCKETED, size), (BUCKETED, chosen), choices=choices)
        for size in sizes
        if size != chosen
    ]
    known = [other for other in others if other]
    if not known:
        return
    worst = min(known, key=lambda value: value.value)
    agrees = all(value.is_beyond("above", 0) == "yes" for value in known)
    yield Observation("bucket_size", "model_agrees", worst, agrees, numbers=numbers)
    if chosen != fastest:
        yield Observation(
            "bucket_size", "model_disagrees", worst, worst.is_beyond("below", 0) == "yes", numbers=numbers
        )


def contradicts_model(observations: Sequence[Observation]) -> bool:
    """Whether the measured steps contradict the bucket size that the model chooses, beyond the spread."""
    return any(found.name == "model_disagrees" and found.is_supported for found in observations)


def _host_timer(summaries: Sequence[SettingSummary]) -> Iterator[Observation]:
    for variant in dict.fromkeys(summary.setting.kind for summary in summaries):
        own = [summary for summary in summaries if summary.setting.kind == variant]
        label = own[0].setting.label
        timers = [
            (summary.timing.communication_ns, summary.synchronized_ns)
            for summary in own
            if summary.timing.communication_ns and summary.timing.communication_ns.value > 0 and summary.synchronized_ns
        ]
        if own[0].testbed.device != "cpu":  # a CPU has no pending work, so synchronizing changes nothing
            yield from _compare("host_timer", "timer_synchronized", timers, label, label)
        yield from _compare("host_timer", "timer_misses_hidden", _timer_and_trace(own, "comm_ns"), label, label)
        tails = [summary.trace.tail_ns for summary in own if summary.trace and summary.trace.tail_ns is not None]
        more = {"tail_ns": float(np.mean(tails))} if tails else {}
        exposed = _timer_and_trace(own, "exposed_ns")
        yield from _compare("host_timer", "timer_and_trace", exposed, label, label, more=more)


def _timer_and_trace(
    summaries: Sequence[SettingSummary], column: Literal["comm_ns", "exposed_ns"]
) -> list[tuple[Estimate, Estimate]]:
    """The host's communication and a figure of the trace. They come from different runs, so they share no blocks.

    A capture is mostly made once, so its scatter is unknown: that of the same variant's host timer is used.
    """
    found = []
    for summary in summaries:
        timer, trace = summary.timing.communication_ns, summary.trace
        if not timer or not trace or timer.value <= 0 or timer.half_width is None or not timer.is_between_runs:
            continue
        relative = timer.half_width / timer.value * math.sqrt(len(timer.medians) / trace.captures)
        traced_ns = getattr(trace, column)
        found.append(
            (
                Estimate(timer.value, paired_half_width=timer.half_width, medians={ONE_BLOCK: timer.value}),
                Estimate(traced_ns, paired_half_width=relative * traced_ns, medians={ONE_BLOCK: traced_ns}),
            )
        )
    return found


def _change(
    timings: Sequence[Timing], topic: Topic, name: str, before: Variant, after: Variant, *, choices: int = 1
) -> Iterator[Observation]:
    """What one variant takes off the other's step or communication."""
    quantity: Quantity = effects.step_of if name == "step" else effects.communication_of
    found = effects.pairs(timings, before, after, quantity)
    return _compare(topic, name, found, variant_label(*before), variant_label(*after), choices=choices)


def _compare(
    topic: Topic,
    name: str,
    found: Sequence[tuple[Estimate, Estimate]],
    before: str,
    after: str,
    *,
    choices: int = 1,
    more: dict[str, float] | None = None,
) -> Iterator[Observation]:
    """An observation of figures before and after, where there are any; supported where they differ."""
    effect = combine([relative_saving(*pair) for pair in found], choices=choices)
    if effect is None:
        return
    means = {
        key: float(np.mean([pair[side].value for pair in found])) for side, key in enumerate(("before_ns", "after_ns"))
    }
    differs = effect.is_beyond("above", 0) != "cannot tell"
    yield Observation(topic, name, effect, differs, before, after, means | (more or {}))
