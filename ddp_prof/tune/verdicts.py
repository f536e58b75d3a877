"""Judges each try by the trials: how much it gains, whether it changes losses, and which try is to be recommended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ddp_prof.tune.measure import Loss
from ddp_prof.tune.sequential import Gain, measure_gain, smallest_shown
from ddp_prof.tune.store import OK, OUT_OF_MEMORY, OUT_OF_TIME, Trial
from ddp_prof.tune.tries import TODAY, Try

FASTER, SLOWER, EQUAL, OPEN = "faster", "slower", "no difference", "cannot be told"
TODAYS, FAILS = "set today", "failed"
SAME, CHANGED, VARY, UNSEEN = "same", "changed", "vary by themselves", "not seen"
ROUNDING = 1e-3
"""Losses that differ by less, relative to their size, differ only by rounding.

So do losses that differ by less than twice the precision of their data type.
"""
MOST_FAILURES = 2
"""After this number of failed runs a try is given up.

A single run is enough if it ran out of memory, as that would happen again, or out of time, as that takes minutes.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a try.

    Attributes:
        outcome: ``faster``, ``slower``, ``no difference`` (beyond what is worth having), ``cannot be told``, ``set
            today`` or ``failed``.
        gain: Its gain with an interval; ``None`` without a pair.
        step_ns: Median over its runs of each run's median step.
        losses: Whether its losses equal the losses with today's settings: ``same``, ``changed``, ``vary by themselves``
            (from run to run, with today's settings, too) or ``not seen``.
        loss_difference: The largest relative difference from today's losses; ``None`` if not known.
        reason: Why it failed.
        more: If the outcome is ``cannot be told`` after enough pairs for a verdict, a number of further rounds.
        could_show: The smallest gain that these further rounds could show, as a fraction of a step.
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
        """Whether it may be recommended: it is faster, and changes neither losses nor gradients."""
        return self.outcome == FASTER and self.losses != CHANGED and not self.tried.changes_numerics


def judge(tried: Try, trials: Sequence[Trial], tries: int, worth: float) -> Verdict:
    """Return the verdict on a try by the trials so far.

    Args:
        tried: The try.
        trials: The runs of all tries and of today's settings.
        tries: Number of tries in the tuning.
        worth: The smallest gain that is worth having, as a fraction of a step (0.01: 1 %).
    """
    label, todays = tried.label, TODAY.label  # made of texts at each call
    ran = [trial for trial in trials if trial.tried == label]  # in round 0, too: by itself, for its losses
    # The pairs: today's and the try's median step, of each round that has both; not of round 0.
    own = [trial for trial in ran if trial.round]
    today = {trial.round: trial for trial in trials if trial.tried == todays and trial.status == OK}
    pairs = [
        (before, after)
        for trial in own
        if (before := today[trial.round].median_ns if trial.round in today else None) and (after := trial.median_ns)
    ]
    gain = measure_gain(pairs, tries)
    lengths = [length for trial in own if (length := trial.median_ns)]
    losses, difference = compare_losses([*today.values()], [trial for trial in ran if trial.status == OK])
    known = {
        "gain": gain,
        "step_ns": median(lengths) if lengths else None,
        "losses": losses,
        "loss_difference": difference,
    }
    # A try that failed too often is judged by that alone.
    failures = [trial for trial in ran if trial.status != OK]
    lasts = any(trial.status in (OUT_OF_MEMORY, OUT_OF_TIME) or not trial.round for trial in failures)
    if len(failures) >= MOST_FAILURES or lasts:
        return Verdict(tried, FAILS, reason=failures[-1].reason, **known)  # type: ignore[arg-type]
    outcome = outcome_of(gain, worth)
    more, could_show = (None, None)
    if outcome == OPEN and gain and gain.spread is not None:
        more = gain.pairs
        could_show = smallest_shown(gain.spread, gain.pairs + more, tries)
    reason = failures[-1].reason if failures and not pairs else None
    return Verdict(tried, outcome, reason=reason, more=more, could_show=could_show, **known)  # type: ignore[arg-type]


def outcome_of(gain: Gain | None, worth: float) -> str:
    """Return what the interval of a gain shows.

    It is ``no difference`` if the interval lies within ``-worth`` to ``worth``, ``faster`` if all of it is above 0,
    ``slower`` if all of it is below 0, else ``cannot be told``.
    """
    if gain is None or gain.low is None or gain.high is None:
        return OPEN
    if -worth <= gain.low and gain.high <= worth:
        return EQUAL
    return FASTER if gain.low > 0 else SLOWER if gain.high < 0 else OPEN


def best_of(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Return the verdict with the largest gain among those that may be recommended; ``None`` if there is none."""
    return max((each for each in verdicts if each.is_recommended), key=_value, default=None)


def rivals_of(best: Verdict, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the other tries that may be recommended and whose intervals reach above the low end of the best one's.

    Their gain may be as large as that of the best try.
    """
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
    """Compare the losses of a try's runs with the losses of today's first run, one by one on each rank.

    Returns ``same``, ``changed``, ``vary by themselves`` or ``not seen``, and the largest difference relative to
    today's losses (``None`` if it is not known or not finite). If today's runs differ from each other, the program
    draws other random numbers in each run, and its losses tell nothing. Another run with today's settings may have
    losses of fewer steps; then only these steps are compared.
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
    """Return the losses of a trial by rank and position among the losses of the rank."""
    return {(rank, at): loss for rank, of_rank in enumerate(trial.losses) for at, loss in enumerate(of_rank)}


def _until(trial: Trial, losses: dict[tuple[int, int], Loss]) -> dict[tuple[int, int], Loss]:
    """Return those of ``losses`` that are of steps up to the last step for which the trial has a loss."""
    last = max(loss.step for of_rank in trial.losses for loss in of_rank)
    return {key: loss for key, loss in losses.items() if loss.step <= last}


def _difference(first: dict[tuple[int, int], Loss], second: dict[tuple[int, int], Loss]) -> float:
    """Return the largest relative difference between losses at the same position.

    It is infinite if one side has a loss that the other lacks, or if only one of two losses is finite.
    """
    if first.keys() != second.keys():
        return math.inf
    # Differences are relative to the loss, but not to one that is far smaller than the typical loss.
    scale = median([abs(loss.value) for loss in first.values() if loss.value is not None] or [1.0]) or 1.0
    largest = 0.0
    for key, loss in first.items():
        before, after = loss.value, second[key].value
        if (before is None) != (after is None):
            return math.inf
        if before is not None and after is not None:
            largest = max(largest, abs(after - before) / max(abs(before), scale * ROUNDING))
    return largest
