"""Finds what the timings of one testbed show: the cost of an all-reduce, the model of bucketing, at most ten sentences.

*Model.* See :mod:`.bucket_model`.

*Sentences.* A sentence compares two settings. Only runs of the same workload and the same repeat are compared: they are
near in time, so a machine that is slow for a while slows both. Each such pair of runs gives one saving. The effect is
the median saving over all pairs; its interval is found by drawing pairs again and again (bootstrap). If the interval
contains zero, the effect is kept, but no sentence is written about it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ddp_prof.analyze import DEFINITIONS
from ddp_prof.analyze.statistics import MISSES, bootstrap_interval
from ddp_prof.benchmark.bucket_model import (
    BucketModel,
    LinkModel,
    compare_expectations,
    make_model,
    median_error,
    mismatch_text,
)
from ddp_prof.benchmark.settings import SettingSummary, Testbed, label_of, summarize_settings
from ddp_prof.benchmark.store import OK, Environment, Results, StoredMessages
from ddp_prof.columns import capitalized, count_noun, digits, percent
from ddp_prof.manifest import CAVEATS_JOINT, Caveat
from ddp_prof.variants import BUCKETED

HUBER = 1.345
"""Residuals beyond this number of standard deviations lose weight in a fit (P. J. Huber, 1964).

With this number the fit is 95 % as efficient as least squares if residuals are normal.
"""
MAD_TO_SIGMA = 1.4826
"""Standard deviation over median absolute deviation, for a normal distribution."""
LEAST_PAIRS = 6
"""The fewest pairs of runs for an interval. By chance, 5 pairs all differ in one direction in 2 / 2**5 = 6 % of cases,
which is more than one in twenty."""

Kind = tuple[str, "float | None"]  # a variant and its bucket size in MiB
NAIVE, FLAT, OVERLAP, TORCH = ((name, None) for name in ("naive", "flat", "overlap", "torch"))


@dataclass(frozen=True, slots=True)
class MessageCost:
    """How long all-reduces of one message size took.

    ``median_ns`` is the median over runs of the median over the calls of a run; ``calls`` and ``runs`` are how many.
    """

    bytes: int
    calls: int
    median_ns: float
    low_ns: float | None = None  # low_ns to high_ns: the 95 % interval over runs; None for fewer than three runs
    high_ns: float | None = None
    runs: int = 1


def message_costs(results: Results) -> dict[Testbed, list[MessageCost]]:
    """Return for each testbed the times of its all-reduces by message size, smallest first, from successful runs."""
    testbeds = {run.id: Testbed.from_run(run) for run in results.runs if run.status == OK}
    by_size: dict[tuple[Testbed, int], list[StoredMessages]] = {}
    for message in results.messages:
        if message.run in testbeds and message.bytes > 0 and message.median_ns > 0:
            by_size.setdefault((testbeds[message.run], message.bytes), []).append(message)
    costs: dict[Testbed, list[MessageCost]] = {}
    for (testbed, number), messages in sorted(by_size.items(), key=lambda item: item[0][1]):
        medians = np.array([message.median_ns for message in messages])
        middle = float(np.median(medians))
        # Of logarithms, as times span orders of magnitude and no end of the interval is below zero.
        interval = bootstrap_interval(np.log(medians / middle))
        low, high = map(float, middle * np.exp(interval)) if interval else (None, None)
        calls = sum(message.calls for message in messages)
        cost = MessageCost(number, calls, middle, low, high, len(medians))
        costs.setdefault(testbed, []).append(cost)
    return costs


def fit_link(messages: Sequence[MessageCost]) -> LinkModel | str:
    """Fit time = overhead + bytes / bandwidth to the messages of a testbed; return the fit, or why there is none.

    It is a least-squares fit of *relative* errors, as times span orders of magnitude, so each size has the same weight.
    Huber's weights keep a size that was disturbed from bending the line (iteratively reweighted least squares; P. W.
    Holland and R. E. Welsch, 1977).
    """
    if len(messages) < 2:
        return "messages of fewer than two sizes were timed"
    sizes = np.array([message.bytes for message in messages], float)
    times = np.array([message.median_ns for message in messages])
    # In relative units: (o + s / w) / t should be 1, so o and 1 / w are the coefficients of 1 / t and s / t.
    columns = np.column_stack([1 / times, sizes / times])
    overhead, slope = _robust_line(columns)
    if overhead < 0:  # fit again without an overhead
        overhead, (slope,) = 0.0, _robust_line(columns[:, 1:])
    if slope <= 0:
        return "larger messages did not take longer"
    residuals = columns @ np.array([overhead, slope]) - 1
    return LinkModel(float(overhead), float(1 / slope), len(messages), float(np.median(np.abs(residuals))))


def _robust_line(columns: np.ndarray) -> np.ndarray:
    """Return the coefficients of the columns whose weighted sum is nearest to 1 in each row, by a robust fit."""
    weights = np.ones(len(columns))
    coefficients = np.zeros(columns.shape[1])
    scaling = np.linalg.norm(columns, axis=0)  # the columns differ by orders of magnitude
    # Fit, give rows with large residuals less weight, and fit again. 50 rounds are more than enough.
    for _ in range(50):
        root = np.sqrt(weights)
        coefficients = np.linalg.lstsq(columns / scaling * root[:, None], root, rcond=None)[0] / scaling
        residuals = np.abs(columns @ coefficients - 1)
        scale = MAD_TO_SIGMA * float(np.median(residuals))
        if scale < 1e-12:
            break
        weights = np.minimum(1, HUBER * scale / np.maximum(residuals, 1e-300))
    return coefficients


@dataclass(frozen=True, slots=True)
class Observation:
    """An effect in the timings of one testbed.

    Attributes:
        name: What is compared.
        before: Label of the setting to which another one is compared.
        after: Label of the other setting.
        value: The effect as a fraction: what the other setting saves; negative if it adds.
        low: Lower end of the 95 % interval; ``None`` if there are too few pairs of runs.
        high: Upper end of the interval.
        pairs: Number of pairs of runs.
        text: A sentence, if the interval supports one.
    """

    name: str
    before: str
    after: str
    value: float
    low: float | None
    high: float | None
    pairs: int
    text: str | None = None


def find_observations(summaries: Sequence[SettingSummary], model: BucketModel | str) -> tuple[Observation, ...]:
    """Return all effects that the settings of a testbed allow; ``model`` is a text if there is no model."""
    observations = [
        _change(summaries, "step", NAIVE, FLAT),
        _change(summaries, "communication", NAIVE, FLAT),
        _change(summaries, "step", NAIVE, OVERLAP),
        _change(summaries, "step", FLAT, OVERLAP),
        _change(summaries, "communication", NAIVE, OVERLAP),
        *_bucket_size(summaries, model),
        _model_error(summaries, model),
        _host_timer(summaries),
    ]
    return tuple(observation for observation in observations if observation is not None)


def bucket_sizes(summaries: Sequence[SettingSummary]) -> list[float]:
    """Return the bucket sizes that were measured, in MiB, in ascending order."""
    return sorted({mb for one in summaries if one.step_ns and (mb := one.setting.swept_mb) is not None})


def _bucket_size(summaries: Sequence[SettingSummary], model: BucketModel | str) -> Iterator[Observation | None]:
    """Yield the effects of bucket sizes: the fastest one against the slowest, other variants and the model's choice."""
    sizes = bucket_sizes(summaries)
    if len(sizes) < 2:
        return
    losses = {}  # for each size, the mean of what the sizes save in comparison with it: least for the fastest size
    for mb in sizes:
        savings = [_savings(summaries, (BUCKETED, mb), (BUCKETED, other)) for other in sizes]
        if not all(savings):
            return
        losses[mb] = float(np.mean([np.median(each) for each in savings]))
    # The fastest size against the slowest size and against variants with other buckets.
    fastest, slowest = min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)
    # Any two of them might have been these two.
    yield _change(summaries, "step", (BUCKETED, slowest), (BUCKETED, fastest), math.comb(len(sizes), 2))
    yield _change(summaries, "step", OVERLAP, (BUCKETED, fastest))
    yield _change(summaries, "step", TORCH, (BUCKETED, fastest))
    if isinstance(model, str):
        return
    # The size with the smallest predicted tail against the fastest size or, if it is the fastest, the second fastest.
    chosen = min(sizes, key=model.mean_ns)
    choice = (
        f"The model expects the least communication after backward with buckets of {digits(model.best_mb, 2)} MiB; of "
        f"the sizes measured, it prefers {chosen:g} MiB."
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


def _model_error(summaries: Sequence[SettingSummary], model: BucketModel | str) -> Observation | None:
    """Return how far the model's tails are from the tails of captures; ``None`` without a model or captures."""
    expectations = [] if isinstance(model, str) else compare_expectations(model, summaries)
    if isinstance(model, str) or not expectations:
        return None
    errors = [one.error() for one in expectations]
    low, high = (bootstrap_interval(errors) if len(errors) >= LEAST_PAIRS else None) or (None, None)
    text = mismatch_text(model, expectations)
    return Observation("model_error", "expected", "measured", median_error(expectations), low, high, len(errors), text)


def _host_timer(summaries: Sequence[SettingSummary]) -> Observation | None:
    """Return the fraction of the communication in captures with overlap that the host timer does not see."""
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


def _change(
    summaries: Sequence[SettingSummary], name: str, before: Kind, after: Kind, chosen_of: int = 1
) -> Observation | None:
    """Return what ``after`` saves of the step or communication (``name``) of ``before``; ``None`` if not measured.

    ``chosen_of`` is as in :func:`_observe`.
    """
    old, new = label_of(*before), label_of(*after)
    subject, what = capitalized(new), "step" if name == "step" else "communication (host timer)"
    takes = f"{subject} takes {{effect}} off the {what} of {old}."
    adds = f"{subject} adds {{effect}} to the {what} of {old}."
    return _observe(name, old, new, _savings(summaries, before, after, f"{name}_ns"), takes, adds, chosen_of)


def _savings(summaries: Sequence[SettingSummary], before: Kind, after: Kind, column: str = "step_ns") -> list[float]:
    """Return the fraction that setting ``after`` saves of setting ``before``, for each pair of runs.

    The runs of a pair have the same workload and repeat. ``column`` is the field of the summaries that is compared.
    """
    savings = []
    for old, new in product(summaries, summaries):
        kinds = [(one.setting.variant, one.setting.bucket_size_mb) for one in (old, new)]
        first, second = getattr(old, column), getattr(new, column)
        if kinds == [before, after] and old.setting.workload == new.setting.workload and first and second:
            common = first.medians.keys() & second.medians.keys()
            savings += [1 - second.medians[key] / first.medians[key] for key in sorted(common) if first.medians[key]]
    return savings


def _observe(
    name: str, before: str, after: str, savings: Sequence[float], takes: str, adds: str | None, chosen_of: int = 1
) -> Observation | None:
    """Return the median of savings as an observation, with a sentence if its interval excludes zero.

    Args:
        name: What is compared.
        before: Label of the setting to which another one is compared.
        after: Label of the other setting.
        savings: The saving of each pair of runs, as a fraction.
        takes: The sentence for a gain; ``{effect}`` in it becomes the numbers.
        adds: The sentence for a loss; ``None``: there is none.
        chosen_of: The number of comparisons of which this one was chosen, as its effect is the largest.

    Returns:
        ``None`` if there are no savings.
    """
    if not savings:
        return None
    value = float(np.median(savings))
    interval = bootstrap_interval(savings) if chosen_of == 1 else _interval_of_chosen(savings, chosen_of)
    low, high = (interval if len(savings) >= LEAST_PAIRS else None) or (None, None)
    text = None
    if low is not None and high is not None and (low > 0 or high < 0):
        # A loss is a negative saving; it is shown as a positive number, so the ends of its interval are swapped.
        words, (shown, *ends) = (takes, (value, low, high)) if value > 0 else (adds, (-value, -high, -low))
        effect = f"{percent(shown)} ({percent(ends[0])} to {percent(ends[1])}, {len(savings)} pairs)"
        text = words and words.format(effect=effect)  # None if there is no sentence for a loss
    return Observation(name, before, after, value, low, high, len(savings), text)


def _interval_of_chosen(values: Sequence[float], chosen_of: int) -> tuple[float, float] | None:
    """Return the interval of a median that misses it in 5 % / ``chosen_of`` of cases at most; ``None`` for few values.

    Its ends are two of the values, as many from the least as from the largest one: each value is above the median as
    often as below. So it holds however the values scatter, also far out, where a bootstrap of few values shows nothing.
    """
    ordered, beyond, misses = sorted(values), 0, 2 / 2 ** len(values)
    while misses <= MISSES / chosen_of:
        beyond += 1
        misses += 2 * math.comb(len(values), beyond) / 2 ** len(values)
    return (ordered[beyond - 1], ordered[-beyond]) if beyond else None


@dataclass(frozen=True, slots=True)
class TestbedResults:
    """All that is known about one testbed; ``model`` is a text if there is no model, the reason why."""

    testbed: Testbed
    environment: Environment | None
    summaries: tuple[SettingSummary, ...]
    messages: Sequence[MessageCost]
    model: BucketModel | str
    observations: tuple[Observation, ...]

    @property
    def contradicts_model(self) -> bool:
        """Whether another bucket size than the model's choice is clearly faster."""
        return any(observation.name == "model_disagrees" and observation.text for observation in self.observations)

    @property
    def sentences(self) -> list[str]:
        return [observation.text for observation in self.observations if observation.text]

    @property
    def caveats(self) -> tuple[Caveat, ...]:
        """Why the figures of some settings are not representative."""
        stated = {text for summary in self.summaries for told in summary.caveats for text in told.split(CAVEATS_JOINT)}
        return tuple(caveat for caveat in Caveat if caveat.value in stated)

    @property
    def title(self) -> str:
        """What was measured, device and machine, in one line."""
        return " · ".join([self.work, f"device: {self.testbed.device or 'n/a'}", *self.place])

    @property
    def work(self) -> str:
        """Model and number of ranks."""
        return f"{self.testbed.model_size} model · {count_noun(self.testbed.world_size, 'rank')}"

    @property
    def place(self) -> list[str]:
        """Definitions if they are old, and the machine if it is known."""
        parts, definitions = [], self.testbed.definitions
        if definitions != DEFINITIONS:
            other = definitions or "1 or older"
            parts.append(f"measured by version {other} of the definitions, today's is {DEFINITIONS}: measure again")
        if self.environment:
            parts += [self.environment.title, f"environment {self.testbed.environment[:8]}"]
        return parts


def gather_testbeds(results: Results) -> list[TestbedResults]:
    """Return the results of each testbed in a database, with its model and observations."""
    environments = {environment.id: environment for environment in results.environments}
    messages = message_costs(results)
    gathered = []
    for testbed, summaries in summarize_settings(results).items():
        environment, costs = environments.get(testbed.environment), messages.get(testbed, ())
        link = fit_link(costs)
        model = link if isinstance(link, str) else make_model(link, summaries)
        observations = find_observations(summaries, model)
        gathered.append(TestbedResults(testbed, environment, summaries, costs, model, observations))
    return gathered
