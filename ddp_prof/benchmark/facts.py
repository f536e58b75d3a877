"""What the numbers of one place support saying: each fact is a figure with its spread, and a test passed or not.

A fact that the spread leaves open is kept, marked as not supported, and nothing is written about it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from ddp_prof.benchmark import effects as measures
from ddp_prof.benchmark.conclusions import HARDLY
from ddp_prof.benchmark.effects import FLAT, NAIVE, OVERLAP, Variant
from ddp_prof.benchmark.evidence import gather
from ddp_prof.benchmark.spread import Estimate
from ddp_prof.variants import BUCKETED, variant_label

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddp_prof.benchmark.alpha_beta import BucketModel
    from ddp_prof.benchmark.effects import Quantity
    from ddp_prof.benchmark.evidence import Evidence
    from ddp_prof.benchmark.settings import SettingSummary, Timing

Topic = Literal["naive_and_flat", "overlap", "bucket_size", "host_timer"]
TOPICS: tuple[Topic, ...] = ("naive_and_flat", "overlap", "bucket_size", "host_timer")

TORCH: Variant = ("torch", None)
BYTES_PER_MB = 2**20
ALONE = ""
"""The block of figures that are compared as they are."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that the numbers may say.

    Attributes:
        name: Key of its words.
        evidence: The figure, a share from 0 to 1 where nothing else is said, and its spread.
        is_supported: Whether the figure passes its test by more than its spread.
        before: What was compared with, as tables call it.
        after: What was compared.
        numbers: More that the sentence tells; units are in the names.
    """

    topic: Topic
    name: str
    evidence: Evidence
    is_supported: bool
    before: str = ""
    after: str = ""
    numbers: dict[str, float] = field(default_factory=dict)


def find_all(summaries: Sequence[SettingSummary], model: BucketModel | None) -> tuple[Fact, ...]:
    """All facts of one place, in the order in which they are told.

    Args:
        summaries: The settings of the place.
        model: The bucketing model, where messages were timed.
    """
    timings = [summary.timing for summary in summaries]
    return (
        *_naive_and_flat(timings),
        *_overlap(timings),
        *_bucket_size(timings, model),
        *_host_timer(summaries),
    )


def _naive_and_flat(timings: Sequence[Timing]) -> Iterator[Fact]:
    for found in _change(timings, "naive_and_flat", "step", NAIVE, FLAT):
        yield found
        if not found.is_supported:
            yield Fact(
                "naive_and_flat", "same_step", found.evidence, found.evidence.is_within(HARDLY), "naive", "flat",
                {"limit": HARDLY},
            )  # fmt: skip
    yield from _change(timings, "naive_and_flat", "communication", NAIVE, FLAT)


def _overlap(timings: Sequence[Timing]) -> Iterator[Fact]:
    yield from _change(timings, "overlap", "step", NAIVE, OVERLAP)
    yield from _change(timings, "overlap", "step", FLAT, OVERLAP)
    yield from _change(timings, "overlap", "communication", NAIVE, OVERLAP)
    unsaved = measures.hidden_but_not_saved(timings)
    if unsaved:
        yield Fact("overlap", "hidden_is_not_saved", unsaved, unsaved.is_beyond("above", 0) == "yes")
    drop = measures.share_drop_with_context(timings)
    if drop:
        yield Fact("overlap", "context_hides_more", drop, drop.is_beyond("above", 0) == "yes")


def _bucket_size(timings: Sequence[Timing], model: BucketModel | None) -> Iterator[Fact]:
    sizes, fastest = measures.bucket_sizes(timings), measures.fastest_bucket_size(timings)
    if fastest is None:
        return
    for size in sizes:
        if size != fastest:
            yield from _change(
                timings, "bucket_size", "step", (BUCKETED, size), (BUCKETED, fastest), choices=math.comb(len(sizes), 2)
            )
    for other in (OVERLAP, FLAT, NAIVE, TORCH):
        yield from _change(timings, "bucket_size", "step", other, (BUCKETED, fastest), choices=len(sizes))
    if model and len(sizes) > 1:
        yield from _model(timings, model, sizes, fastest)


def _model(timings: Sequence[Timing], model: BucketModel, sizes: Sequence[float], fastest: float) -> Iterator[Fact]:
    """Whether the size that the model would choose of those measured is the fastest.

    It is where it beats each of the others, and is not where the fastest beats it.
    """
    chosen = min(sizes, key=lambda size: model.overhead_ns(size * BYTES_PER_MB))
    numbers = {"best_bytes": model.best_bytes, "chosen_mb": chosen, "fastest_mb": fastest}
    choices = math.comb(len(sizes), 2)
    others = [
        measures.saving(timings, (BUCKETED, size), (BUCKETED, chosen), choices=choices)
        for size in sizes
        if size != chosen
    ]
    known = [other for other in others if other]
    if not known:
        return
    worst = min(known, key=lambda value: value.value)
    agrees = all(value.is_beyond("above", 0) == "yes" for value in known)
    yield Fact("bucket_size", "model_agrees", worst, agrees, numbers=numbers)
    if chosen != fastest:
        yield Fact("bucket_size", "model_disagrees", worst, worst.is_beyond("below", 0) == "yes", numbers=numbers)


def _host_timer(summaries: Sequence[SettingSummary]) -> Iterator[Fact]:
    variants = dict.fromkeys((summary.setting.variant, summary.setting.bucket_size_mb) for summary in summaries)
    for variant in variants:
        own = [summary for summary in summaries if (summary.setting.variant, summary.setting.bucket_size_mb) == variant]
        label = own[0].setting.label
        timers = [
            (summary.timing.communication_ns, summary.synchronized_ns)
            for summary in own
            if summary.timing.communication_ns and summary.timing.communication_ns.value > 0 and summary.synchronized_ns
        ]
        if own[0].place.device != "cpu":  # which has done what it was asked, so that synchronizing changes nothing
            yield from _compare("host_timer", "timer_synchronized", timers, label, label)
        yield from _compare("host_timer", "timer_misses_hidden", _timer_and_trace(own, "comm_ns"), label, label)
        tails = [summary.trace.tail_ns for summary in own if summary.trace and summary.trace.tail_ns is not None]
        more = {"tail_ns": float(np.mean(tails))} if tails else {}
        exposed = _timer_and_trace(own, "exposed_ns")
        yield from _compare("host_timer", "timer_and_trace", exposed, label, label, more=more)


def _timer_and_trace(
    summaries: Sequence[SettingSummary], column: Literal["comm_ns", "exposed_ns"]
) -> list[tuple[Estimate, Estimate]]:
    """The host's communication and a figure of the trace, of runs of their own, and so without common blocks.

    A capture is mostly one of its kind: it is taken to scatter as the same variant's host timer does between runs.
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
                Estimate(timer.value, paired_half_width=timer.half_width, medians={ALONE: timer.value}),
                Estimate(traced_ns, paired_half_width=relative * traced_ns, medians={ALONE: traced_ns}),
            )
        )
    return found


def _change(
    timings: Sequence[Timing], topic: Topic, name: str, before: Variant, after: Variant, *, choices: int = 1
) -> Iterator[Fact]:
    """What one variant takes off the other's step or communication."""
    quantity: Quantity = measures.step_of if name == "step" else measures.communication_of
    found = measures.pairs(timings, before, after, quantity)
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
) -> Iterator[Fact]:
    """A fact of figures before and after, where there are any: supported where they differ, to whichever side."""
    evidence = gather([measures.relative_saving(*pair) for pair in found], choices=choices)
    if evidence is None:
        return
    means = {
        key: float(np.mean([pair[side].value for pair in found])) for side, key in enumerate(("before_ns", "after_ns"))
    }
    differs = evidence.is_beyond("above", 0) != "cannot tell"
    yield Fact(topic, name, evidence, differs, before, after, means | (more or {}))
