"""What the timings of one testbed show by themselves: at most ten sentences, each of an effect with its interval.

A setting is compared with another of the same work and in the same repeat, whose runs are near in time, so that a
machine that is slow for a while slows both. Such a pair of runs gives one saving; the effect is the median over all
pairs of repeats and work, and its interval is found by drawing pairs. An effect that the interval does not tell from
nothing is kept, and no sentence is written about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ddp_prof.analyze.statistics import bootstrap_interval
from ddp_prof.benchmark.bucket_model import BucketModel, Unknown
from ddp_prof.benchmark.settings import SettingSummary, label_of
from ddp_prof.present.text import percent, size
from ddp_prof.variants import BUCKETED, BYTES_PER_MB

LEAST_PAIRS = 6
"""Fewer pairs of runs all differ in one direction by chance in more than one of twenty cases (2 / 2**5 = 6 %)."""

Kind = tuple[str, "float | None"]
"""A variant and its bucket size in MiB."""
NAIVE, FLAT, OVERLAP, TORCH = ((name, None) for name in ("naive", "flat", "overlap", "torch"))


@dataclass(frozen=True, slots=True)
class Observation:
    """An effect found in the timings of one testbed.

    Attributes:
        value: The effect, a share from 0 to 1.
        low: Lower end of its interval; ``None`` for too few pairs. ``high`` likewise.
        pairs: Pairs of figures that it is the median of.
        text: The sentence; ``None`` where the interval does not support one.
    """

    name: str
    before: str
    after: str
    value: float
    low: float | None
    high: float | None
    pairs: int
    text: str | None = None


def find_observations(summaries: Sequence[SettingSummary], model: BucketModel | Unknown) -> tuple[Observation, ...]:
    """All observations of one testbed, in the order of their sentences."""
    found = [
        _change(summaries, "step", NAIVE, FLAT),
        _change(summaries, "communication", NAIVE, FLAT),
        _change(summaries, "step", NAIVE, OVERLAP),
        _change(summaries, "step", FLAT, OVERLAP),
        _change(summaries, "communication", NAIVE, OVERLAP),
        *_bucket_size(summaries, model),
        _host_timer(summaries),
    ]
    return tuple(observation for observation in found if observation is not None)


def bucket_sizes(summaries: Sequence[SettingSummary]) -> list[float]:
    """The bucket sizes measured, in MiB, ascending."""
    return sorted({mb for one in summaries if one.step_ns and (mb := one.setting.swept_mb) is not None})


def contradicts_model(observations: Sequence[Observation]) -> bool:
    """Whether the measured steps contradict the bucket size that the model chooses, beyond the spread."""
    return any(found.name == "model_disagrees" and found.text for found in observations)


def _bucket_size(summaries: Sequence[SettingSummary], model: BucketModel | Unknown) -> Iterator[Observation | None]:
    """The fastest size against the slowest and against other variants; whether the model chooses it."""
    sizes = bucket_sizes(summaries)
    if len(sizes) < 2:
        return
    losses = {}  # what others take off a size, on average
    for mb in sizes:
        savings = [_savings(summaries, (BUCKETED, mb), (BUCKETED, other)) for other in sizes]
        if not all(savings):
            return
        losses[mb] = float(np.mean([np.median(each) for each in savings]))
    fastest, slowest = min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)
    yield _change(summaries, "step", (BUCKETED, slowest), (BUCKETED, fastest))
    yield _change(summaries, "step", OVERLAP, (BUCKETED, fastest))
    yield _change(summaries, "step", TORCH, (BUCKETED, fastest))
    if isinstance(model, Unknown):
        return
    chosen = min(sizes, key=lambda mb: model.overhead_ns(mb * BYTES_PER_MB))
    choice = (
        f"The model's best bucket size is {size(round(model.best_bytes))}; of the sizes measured, it prefers "
        f"{chosen:g} MiB."
    )
    if chosen == fastest:
        second = min((mb for mb in sizes if mb != fastest), key=losses.__getitem__)
        before, after, name = second, chosen, "model_agrees"
        text = f"{choice} That size is the fastest: it takes {{effect}} off the step of {second:g} MiB."
    else:
        before, after, name = chosen, fastest, "model_disagrees"
        text = f"{choice} But {fastest:g} MiB takes {{effect}} off that step: the model does not fit this testbed."
    changes = _savings(summaries, (BUCKETED, before), (BUCKETED, after))
    yield _observe(name, f"{before:g} MiB", f"{after:g} MiB", changes, text, None)


def _host_timer(summaries: Sequence[SettingSummary]) -> Observation | None:
    """What the host's timer misses of communication that compute hides, where settings were captured."""
    missed = [
        1 - timer.value / summary.trace.comm_ns
        for summary in summaries
        if (timer := summary.communication_ns) and summary.trace and summary.trace.overlapped_ns
    ]
    text = (
        "Where compute hides communication, the host timer sees {effect} less of it than the trace: it cannot see "
        "what is hidden."
    )
    return _observe("timer_misses_hidden", "trace", "host timer", missed, text, None)


def _change(summaries: Sequence[SettingSummary], name: str, before: Kind, after: Kind) -> Observation | None:
    """What one variant takes off the other's step or communication."""
    old, new = label_of(*before), label_of(*after)
    what = "step" if name == "step" else "communication (host timer)"
    savings = _savings(summaries, before, after, f"{name}_ns")
    new_first = new[:1].upper() + new[1:]
    return _observe(
        name, old, new, savings,
        f"{new_first} takes {{effect}} off the {what} of {old}.",
        f"{new_first} adds {{effect}} to the {what} of {old}.",
    )  # fmt: skip


def _savings(summaries: Sequence[SettingSummary], before: Kind, after: Kind, column: str = "step_ns") -> list[float]:
    """What the second takes off the first in each pair of runs of the same work and repeat, as a share of the first."""
    found = []
    for old, new in product(summaries, summaries):
        kinds = [(one.setting.variant, one.setting.bucket_size_mb) for one in (old, new)]
        first, second = getattr(old, column), getattr(new, column)
        if kinds == [before, after] and old.setting.workload == new.setting.workload and first and second:
            common = first.medians.keys() & second.medians.keys()
            found += [1 - second.medians[key] / first.medians[key] for key in sorted(common) if first.medians[key]]
    return found


def _observe(
    name: str, before: str, after: str, savings: Sequence[float], takes: str, adds: str | None
) -> Observation | None:
    """An observation of savings; ``takes`` words a saving, ``adds`` a loss, which without words supports nothing."""
    if not savings:
        return None
    value = float(np.median(savings))
    low, high = (bootstrap_interval(savings) if len(savings) >= LEAST_PAIRS else None) or (None, None)
    text = None
    if low is not None and high is not None and (low > 0 or high < 0):
        words, (shown, *ends) = (takes, (value, low, high)) if value > 0 else (adds, (-value, -high, -low))
        effect = f"{percent(shown)} ({percent(ends[0])} to {percent(ends[1])}, {len(savings)} pairs)"
        text = words and words.format(effect=effect)
    return Observation(name, before, after, value, low, high, len(savings), text)
