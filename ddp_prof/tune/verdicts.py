"""What the trials show of each try: its gain by pairs, whether it changes losses, and which is to be written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ddp_prof.benchmark.findings import LEAST_PAIRS
from ddp_prof.tune.measure import Loss
from ddp_prof.tune.sequential import Gain, measure_gain, smallest_shown
from ddp_prof.tune.store import OK, OUT_OF_MEMORY, Trial
from ddp_prof.tune.tries import TODAY, Try

FASTER, SLOWER, EQUAL, OPEN = "faster", "slower", "no difference", "cannot be told"
TODAYS, FAILS = "set today", "failed"
SAME, CHANGED, VARY, UNSEEN = "same", "changed", "vary by themselves", "not seen"
ROUNDING = 1e-3
"""Losses that differ by less, relative to their size, differ by rounding; or by twice the precision of their type."""
MOST_FAILURES = 2
"""So many failures end a try, or one for want of memory, which lasts."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a try.

    Attributes:
        outcome: ``faster``, ``slower``, ``no difference`` (beyond what is worth having), ``cannot be told``, ``set
            today`` or ``failed``.
        step_ns: Median over its runs of each run's median step.
        losses: Whether they are those of today: ``same``, ``changed``, ``vary by themselves`` or ``not seen``.
        loss_difference: The largest relative difference from today's losses.
        more: For ``cannot be told``: so many further rounds could show a gain of ``could_show``.
    """

    tried: Try
    outcome: str
    gain: Gain | None = None
    step_ns: float | None = None
    losses: str = UNSEEN
    loss_difference: float | None = None
    reason: str | None = None
    more: int | None = None
    could_show: float | None = None

    @property
    def is_open(self) -> bool:
        return self.outcome == OPEN

    @property
    def is_recommended(self) -> bool:
        """Whether it may be written: it is faster, and does not change what is trained."""
        return self.outcome == FASTER and self.losses != CHANGED and not self.tried.changes_numerics


def judge(tried: Try, trials: Sequence[Trial], tries: int, worth: float) -> Verdict:
    """Judge one of several ``tries`` by the trials so far; a gain of less than ``worth`` (0.01: 1 %) is none."""
    own = [trial for trial in trials if trial.tried == tried.label and trial.round]
    today = {trial.round: trial for trial in trials if trial.tried == TODAY.label and trial.status == OK}
    pairs = [
        (before, after)
        for trial in own
        if (before := today[trial.round].median_ns if trial.round in today else None) and (after := trial.median_ns)
    ]
    gain = measure_gain(pairs, tries)
    lengths = [length for trial in own if (length := trial.median_ns)]
    ran = [trial for trial in trials if trial.tried == tried.label]  # in round 0, too: by itself, for its losses
    losses, difference = compare_losses([*today.values()], [trial for trial in ran if trial.status == OK])
    known = {
        "gain": gain,
        "step_ns": median(lengths) if lengths else None,
        "losses": losses,
        "loss_difference": difference,
    }
    failures = [trial for trial in ran if trial.status != OK]
    lasts = any(trial.status == OUT_OF_MEMORY or not trial.round for trial in failures)
    if len(failures) >= MOST_FAILURES or lasts:
        return Verdict(tried, FAILS, reason=failures[-1].reason, **known)  # type: ignore[arg-type]
    outcome = outcome_of(gain, worth)
    more, could_show = (None, None)
    if outcome == OPEN and gain and gain.spread is not None:
        more = max(LEAST_PAIRS, gain.pairs)
        could_show = smallest_shown(gain.spread, gain.pairs + more, tries)
    return Verdict(tried, outcome, more=more, could_show=could_show, **known)  # type: ignore[arg-type]


def outcome_of(gain: Gain | None, worth: float) -> str:
    """What an interval says: nothing while there is none, else on which side of 0 and of ``worth`` it is."""
    if gain is None or gain.low is None or gain.high is None:
        return OPEN
    if -worth <= gain.low and gain.high <= worth:
        return EQUAL
    return FASTER if gain.low > 0 else SLOWER if gain.high < 0 else OPEN


def best_of(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Return the try to write: of those that may be, the one with the largest gain."""
    return max((each for each in verdicts if each.is_recommended), key=_value, default=None)


def rivals_of(best: Verdict, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return other tries whose gain may be as large as that of the best: their intervals reach into its interval."""
    low = best.gain.low if best.gain and best.gain.low is not None else -math.inf
    return [
        each
        for each in verdicts
        if each is not best
        and each.is_recommended
        and each.gain
        and each.gain.high is not None
        and each.gain.high > low
    ]


def _value(verdict: Verdict) -> float:
    return verdict.gain.value if verdict.gain else -math.inf


def compare_losses(today: Sequence[Trial], tried: Sequence[Trial]) -> tuple[str, float | None]:
    """Compare the losses of runs, step by step on each rank, with those of today's first run.

    Return whether they are the same, and by how much they differ at most, relative to today's. A program that draws
    other numbers in each run has losses that vary by themselves: then nothing is known. Of a run of today that is known
    for fewer steps, these are compared.
    """
    today, tried = ([trial for trial in trials if any(trial.losses)] for trials in (today, tried))
    if not today or not tried:
        return UNSEEN, None
    reference = _by_position(today[0])
    precision = max((loss.precision for loss in reference.values()), default=0.0)
    tolerance = max(ROUNDING, 2 * precision)
    if any(_difference(_until(trial, reference), _by_position(trial)) > tolerance for trial in today[1:]):
        return VARY, None
    differences = [_difference(reference, _by_position(trial)) for trial in tried]
    largest = max(differences)
    return (SAME if largest <= tolerance else CHANGED), largest if math.isfinite(largest) else None


def _by_position(trial: Trial) -> dict[tuple[int, int], Loss]:
    return {(rank, at): loss for rank, of_rank in enumerate(trial.losses) for at, loss in enumerate(of_rank)}


def _until(trial: Trial, losses: dict[tuple[int, int], Loss]) -> dict[tuple[int, int], Loss]:
    """Return the losses of the steps of which the trial has some."""
    last = max(loss.step for of_rank in trial.losses for loss in of_rank)
    return {key: loss for key, loss in losses.items() if loss.step <= last}


def _difference(first: dict[tuple[int, int], Loss], second: dict[tuple[int, int], Loss]) -> float:
    """The largest relative difference; infinite if one has losses that the other lacks, or one alone is not finite."""
    if first.keys() != second.keys():
        return math.inf
    scale = median([abs(loss.value) for loss in first.values() if loss.value is not None] or [1.0]) or 1.0
    largest = 0.0
    for key, loss in first.items():
        before, after = loss.value, second[key].value
        if (before is None) != (after is None):
            return math.inf
        if before is not None and after is not None:
            largest = max(largest, abs(after - before) / max(abs(before), scale * ROUNDING))
    return largest
