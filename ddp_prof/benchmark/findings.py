"""What the timings of one testbed show: the cost of an all-reduce, the model of bucketing, at most ten sentences.

*Model.* See :mod:`.bucket_model`.

*Sentences.* A setting is compared with another of the same work and in the same repeat, whose runs are near in time, so
that a machine that is slow for a while slows both. Such a pair of runs gives one saving; the effect is the median over
all pairs of repeats and work, and its interval is found by drawing pairs. An effect whose
interval contains zero is kept, but no sentence is written about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ddp_prof.analyze import DEFINITIONS
from ddp_prof.analyze.statistics import bootstrap_interval
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
from ddp_prof.present.text import percent
from ddp_prof.variants import BUCKETED

HUBER = 1.345
"""Residuals beyond so many standard deviations lose weight: 95 % efficient on normal ones (P. J. Huber, 1964)."""
MAD_TO_SIGMA = 1.4826
LEAST_PAIRS = 6
"""Fewer pairs of runs all differ in one direction by chance in more than one of twenty cases (2 / 2**5 = 6 %)."""

Kind = tuple[str, "float | None"]  # a variant and its bucket size in MiB
NAIVE, FLAT, OVERLAP, TORCH = ((name, None) for name in ("naive", "flat", "overlap", "torch"))


@dataclass(frozen=True, slots=True)
class MessageCost:
    """All-reduces of one size: the median over runs of each run's median over its calls."""

    bytes: int
    calls: int
    median_ns: float
    low_ns: float | None = None  # to high_ns: the 95 % interval, of three values or more
    high_ns: float | None = None
    runs: int = 1


def message_costs(results: Results) -> dict[Testbed, list[MessageCost]]:
    testbeds = {run.id: Testbed.from_run(run) for run in results.runs if run.status == OK}
    by_size: dict[tuple[Testbed, int], list[StoredMessages]] = {}
    for message in results.messages:
        if message.run in testbeds and message.bytes > 0 and message.median_ns > 0:
            by_size.setdefault((testbeds[message.run], message.bytes), []).append(message)
    costs: dict[Testbed, list[MessageCost]] = {}
    for (testbed, number), messages in sorted(by_size.items(), key=lambda item: item[0][1]):
        medians = [message.median_ns for message in messages]
        low, high = bootstrap_interval(medians) or (None, None)
        calls = sum(message.calls for message in messages)
        cost = MessageCost(number, calls, float(np.median(medians)), low, high, len(medians))
        costs.setdefault(testbed, []).append(cost)
    return costs


def fit_link(messages: Sequence[MessageCost]) -> LinkModel | str:
    """Fit the model to messages of one testbed, each size with the same weight; or return why that is impossible.

    Least squares of *relative* errors, since times span orders of magnitude, with Huber's weights, so that a size that
    was disturbed does not bend the line (iteratively reweighted; P. W. Holland and R. E. Welsch, 1977).
    """
    if len(messages) < 2:
        return "messages of fewer than two sizes were timed"
    sizes = np.array([message.bytes for message in messages], float)
    times = np.array([message.median_ns for message in messages])
    # A line through (0, 0) of relative units: 1 = (o + s / w) / t.
    columns = np.column_stack([1 / times, sizes / times])
    overhead, slope = _robust_line(columns)
    if overhead < 0:
        overhead, (slope,) = 0.0, _robust_line(columns[:, 1:])
    if slope <= 0:
        return "larger messages did not take longer"
    residuals = columns @ np.array([overhead, slope]) - 1
    return LinkModel(float(overhead), float(1 / slope), len(messages), float(np.median(np.abs(residuals))))


def _robust_line(columns: np.ndarray) -> np.ndarray:
    """Coefficients whose combination of the columns is nearest to 1 in each row."""
    weights = np.ones(len(columns))
    coefficients = np.zeros(columns.shape[1])
    scaling = np.linalg.norm(columns, axis=0)  # the columns differ by orders of magnitude
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
    """An effect in the timings of one testbed: a share from 0 to 1, with an interval unless there are too few pairs."""

    name: str
    before: str
    after: str
    value: float
    low: float | None
    high: float | None
    pairs: int
    text: str | None = None  # where the interval supports a sentence


def find_observations(summaries: Sequence[SettingSummary], model: BucketModel | str) -> tuple[Observation, ...]:
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
    """The bucket sizes that were measured, in MiB, in ascending order."""
    return sorted({mb for one in summaries if one.step_ns and (mb := one.setting.swept_mb) is not None})


def _bucket_size(summaries: Sequence[SettingSummary], model: BucketModel | str) -> Iterator[Observation | None]:
    """Compare the fastest bucket size with the slowest and with other variants, and with the model's choice."""
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
    if isinstance(model, str):
        return
    chosen = min(sizes, key=model.mean_ns)
    choice = (
        f"The model expects the least communication after backward of {model.best_mb:.2g} MiB; of the sizes measured, "
        f"it prefers {chosen:g} MiB."
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
    expectations = [] if isinstance(model, str) else compare_expectations(model, summaries)
    if isinstance(model, str) or not expectations:
        return None
    errors = [one.error() for one in expectations]
    low, high = (bootstrap_interval(errors) if len(errors) >= LEAST_PAIRS else None) or (None, None)
    text = mismatch_text(model, expectations)
    return Observation("model_error", "expected", "measured", median_error(expectations), low, high, len(errors), text)


def _host_timer(summaries: Sequence[SettingSummary]) -> Observation | None:
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
    old, new = label_of(*before), label_of(*after)
    subject, what = new[:1].upper() + new[1:], "step" if name == "step" else "communication (host timer)"
    takes = f"{subject} takes {{effect}} off the {what} of {old}."
    adds = f"{subject} adds {{effect}} to the {what} of {old}."
    return _observe(name, old, new, _savings(summaries, before, after, f"{name}_ns"), takes, adds)


def _savings(summaries: Sequence[SettingSummary], before: Kind, after: Kind, column: str = "step_ns") -> list[float]:
    """The share that the second setting saves of the first, for each pair of runs of one repeat and workload."""
    savings = []
    for old, new in product(summaries, summaries):
        kinds = [(one.setting.variant, one.setting.bucket_size_mb) for one in (old, new)]
        first, second = getattr(old, column), getattr(new, column)
        if kinds == [before, after] and old.setting.workload == new.setting.workload and first and second:
            common = first.medians.keys() & second.medians.keys()
            savings += [1 - second.medians[key] / first.medians[key] for key in sorted(common) if first.medians[key]]
    return savings


def _observe(
    name: str, before: str, after: str, savings: Sequence[float], takes: str, adds: str | None
) -> Observation | None:
    """Make an observation from savings.

    ``takes`` is the sentence of a gain and ``adds`` that of a loss, with ``{effect}`` in it; ``None``: no sentence.
    """
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


@dataclass(frozen=True, slots=True)
class TestbedResults:
    testbed: Testbed
    environment: Environment | None
    summaries: tuple[SettingSummary, ...]
    messages: Sequence[MessageCost]
    model: BucketModel | str
    observations: tuple[Observation, ...]

    @property
    def contradicts_model(self) -> bool:
        return any(observation.name == "model_disagrees" and observation.text for observation in self.observations)

    @property
    def sentences(self) -> list[str]:
        return [observation.text for observation in self.observations if observation.text]

    @property
    def title(self) -> str:
        testbed = self.testbed
        ranks = f"{testbed.world_size} rank{'' if testbed.world_size == 1 else 's'}"
        parts = [f"{testbed.model_size} model", ranks, f"device: {testbed.device or 'n/a'}"]
        if testbed.definitions != DEFINITIONS:
            other = testbed.definitions or "of before 2"
            parts.append(f"by definitions {other}, today's are {DEFINITIONS}: measure again")
        if self.environment:
            parts += [self.environment.title, f"environment {testbed.environment[:8]}"]
        return " · ".join(parts)


def gather_testbeds(results: Results) -> list[TestbedResults]:
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
