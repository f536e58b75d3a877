"""Runs the tries in turns with today's settings until each try is decided, or the rounds or minutes are used up.

round 0   today                                 fills caches; shows what is set today, and how long a run takes
round 1   today  A  C  B                        in an order that is drawn, so that no try has a place of its own
round 2   B  today  A  C
...
round 7   today  C  B                           A is decided, and is left out
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ddp_prof.benchmark.findings import LEAST_PAIRS
from ddp_prof.errors import OutOfMemoryError, WorkloadError
from ddp_prof.tune.measure import SETTLING, Blocks, Loss, Measured, OutOfTimeError, Program, is_todays
from ddp_prof.tune.store import FAILED, OK, OUT_OF_MEMORY, OUT_OF_TIME, Store, Trial
from ddp_prof.tune.tries import TODAY, Try
from ddp_prof.tune.verdicts import MOST_FAILURES, TODAYS, Verdict, best_of, judge

Measure = Callable[[Try, int], Measured]
"""A function that runs the program with a try, for at most a number of seconds; raises WorkloadError if it fails."""
MeasureBlocks = Callable[[Sequence[Try], int], Blocks]
"""A function that runs the program once with a block of steps for each try; all else is as in :data:`Measure`."""
LEAST_LIMIT_S = 120
"""A run may always take this many seconds."""
TIMES_LONGEST = 5
"""A run that takes this many times as long as the longest run with today's settings counts as hanging."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a tuning ends.

    Attributes:
        rounds: The most rounds.
        minutes: The most minutes that the command may take; it starts no round that it would not finish.
        worth: The smallest gain that is worth having, as a fraction of a step (0.01: 1 %).
    """

    rounds: int = 20
    minutes: float = 10.0
    worth: float = 0.01


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result of a tuning: a verdict for each try, in the order of the tries, all runs, and why it ended."""

    program: Program
    verdicts: tuple[Verdict, ...]
    trials: tuple[Trial, ...]
    limits: Limits
    ended: str

    @property
    def rounds(self) -> int:
        return max((trial.round for trial in self.trials), default=0)

    @property
    def best(self) -> Verdict | None:
        return best_of(self.verdicts)

    @property
    def today(self) -> Trial:
        """The run of round 0, with today's settings."""
        return self.trials[0]

    @property
    def today_ns(self) -> float:
        """The median over the runs with today's settings of each run's median step.

        The run of round 0 counts only if there is no other.
        """
        own = [length for trial in self.trials if trial.tried == TODAY.label and (length := trial.median_ns)]
        return median(own[1:] or own)


class Session:
    """One tuning while it goes on.

    Args:
        program: The program.
        tries: What to try.
        measure: Runs the program with a try.
        store: The file with the runs of this tuning; runs that it has already are not repeated.
        limits: When to end.
        environ: The environment of the program.
        report: Called with a line about each run and each round.
        clock: Returns seconds; a test passes its own.

    Attributes:
        trials: The runs that count so far.
    """

    def __init__(
        self,
        program: Program,
        tries: Sequence[Try],
        measure: Measure,
        store: Store,
        limits: Limits,
        environ: Mapping[str, str],
        report: Callable[[str], None] = lambda _text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.program, self.tries, self.limits = program, tuple(tries), limits
        self._measure, self._store, self._environ = measure, store, environ
        self._report, self._clock, self._began = report, clock, clock()
        self.trials: list[Trial] = []
        self._kept = {(trial.round, trial.tried): trial for trial in store.load()}
        self._measured_to = 0  # the last round that this session has measured

    @property
    def has_runs(self) -> bool:
        """Whether the store has a run of this tuning."""
        return bool(self.trials or self._kept)

    def run(self) -> Tuning:
        """Run rounds until the tuning ends, and return its result.

        Raises WorkloadError if the program fails with today's settings in round 0.
        """
        self.run_today()
        ended, verdicts = "all tries are decided", self.verdicts()
        # Each round measures today's settings and the tries that are not decided.
        while wanted := [verdict.tried for verdict in verdicts if verdict.is_open]:
            failures = [trial for trial in self.trials if trial.tried == TODAY.label and trial.status != OK]
            if len(failures) >= MOST_FAILURES:
                ended = f"{len(failures)} runs with today's settings failed: {failures[-1].reason}"
                break
            number = max(trial.round for trial in self.trials) + 1
            if number > self.limits.rounds:
                ended = "the number of --rounds is reached"
                break
            turns = self._draw_turns(number, wanted)
            # A round that the store has completely is taken from there, unless today's settings failed in it.
            kept = [self._kept.get((number, tried.label)) for tried in turns]
            is_kept = all(each and (each.tried != TODAY.label or each.status == OK) for each in kept)
            if not is_kept and not self._has_time_for(turns):
                ended = f"the next round would not end within {self.limits.minutes:g} minutes (--minutes)"
                break
            # A round that was interrupted is run again as a whole, since its runs must be near in time.
            self.trials += [self._kept[number, one.label] for one in turns] if is_kept else self._round(number, turns)
            verdicts = self.verdicts()
            if number == self._measured_to:  # one run may measure several rounds: the last one is told
                decided = sum(not verdict.is_open for verdict in verdicts)
                waits = number < LEAST_PAIRS and decided < len(verdicts)
                waiting = f"; a verdict needs {LEAST_PAIRS} pairs" if waits else ""
                self._report(f"round {number}: {decided} of {len(verdicts)} decided{waiting}")
        return Tuning(self.program, tuple(verdicts), tuple(self.trials), self.limits, ended)

    def run_today(self) -> Trial:
        """Return the run of round 0; make it, with today's settings, if it is not known."""
        if not self.trials:
            kept = self._kept.get((0, TODAY.label))
            self.trials.append(kept or self._run(0, TODAY))
        return self.trials[0]

    def verdicts(self, *, of_all_kept: bool = False) -> list[Verdict]:
        """Return a verdict for each try by the runs so far, or with ``of_all_kept`` by all runs that the store has."""
        trials = [*self._kept.values()] if of_all_kept else self.trials
        counted = [tried for tried in self.tries if not self._is_todays(tried)]
        return [
            judge(tried, trials, len(counted), self.limits.worth) if tried in counted else Verdict(tried, TODAYS)
            for tried in self.tries
        ]

    def _is_todays(self, tried: Try) -> bool:
        """Whether the program has all settings of a try already."""
        made = self.trials[0].made
        return all(is_todays(setting, made, self._environ) for setting in tried.settings)

    def _round(self, number: int, turns: Sequence[Try]) -> list[Trial]:
        """Run one round, in the order of ``turns``, and return its runs."""
        self._measured_to = number
        return [self._run(number, tried) for tried in turns]

    def _draw_turns(self, number: int, wanted: Sequence[Try]) -> list[Try]:
        """Return today's settings and the tries in a random order that depends only on tuning and round.

        So the same command draws the same order again.
        """
        turns = [TODAY, *wanted]
        random.Random(f"{self._store.id}/{number}").shuffle(turns)  # noqa: S311  # no secret
        return turns

    def _has_time_for(self, turns: Sequence[Try]) -> bool:
        longest = {trial.tried: 0.0 for trial in self.trials}  # of each try: one that hung has no part in the others
        for trial in self.trials:
            longest[trial.tried] = max(longest[trial.tried], trial.wall_s)
        return sum(longest.get(tried.label, longest[TODAY.label]) for tried in turns) <= self._seconds_left()

    def _seconds_left(self) -> float:
        return 60 * self.limits.minutes - (self._clock() - self._began)

    def _run(self, number: int, tried: Try) -> Trial:
        """Run the program once with a try, keep the run in the store and return it; a failure is kept, too.

        Raises WorkloadError only if the program fails with today's settings in round 0, and TraceError if the store
        cannot be written.
        """
        self._store.check()
        # The time limit follows the longest run with today's settings; the first run has the time of the whole tuning.
        todays = TODAY.label
        before = [trial.wall_s for trial in self.trials if trial.tried == todays and trial.status == OK]
        limit_s = max(LEAST_LIMIT_S, round(TIMES_LONGEST * max(before) if before else 60 * self.limits.minutes))
        began = self._clock()
        try:
            measured = self._measure(tried, limit_s)
        except WorkloadError as error:
            reason = _reason_of(error, before)
            if tried == TODAY and not number:
                raise WorkloadError(f"with today's settings: {reason}") from error
            kinds = {OutOfMemoryError: OUT_OF_MEMORY, OutOfTimeError: OUT_OF_TIME}
            status = kinds.get(type(error), FAILED)
            trial = Trial(number, tried.label, status, self._clock() - began, reason)
            said = f"{status.replace('_', ' ')}: {reason}"
        else:
            trial = Trial.of(number, tried, measured, self._clock() - began)
            said = f"{measured.median_ns / 1e6:.2f} ms a step"
        self._store.write(trial)
        self._report(f"round {number}, {tried.label}: {said}")
        return trial


def _reason_of(error: WorkloadError, before: Sequence[float]) -> str:
    """Return why a run failed and, if its time was over, the way out.

    ``before`` are the seconds of the runs with today's settings so far, which set the limit; the first run has none.
    """
    if not isinstance(error, OutOfTimeError):
        return str(error)
    if not before:
        return f"{error}: raise --minutes, or give fewer --steps"
    return f"{error}, and a run with today's settings takes {max(before):.0f} s: does it hang?"


class BlocksSession(Session):
    """A tuning in which one run of the program measures several rounds: its settings change between blocks of steps.

    one run     warm-up | round 1: today A C B | round 2: B today A C | ... | round 6

    The training goes on from block to block, so the losses of a block depend on the tries before it, too. Therefore a
    try that is faster is also run once by itself. This run counts as one of round 0, and its losses are compared with
    those of today's settings in round 0.
    """

    def __init__(self, measure_blocks: MeasureBlocks, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._measure_blocks = measure_blocks

    def run(self) -> Tuning:
        """Run rounds until the tuning ends, then each try that is faster once by itself, if there is time.

        Raises WorkloadError also if the program's first run shows no call whose arguments could change between blocks.
        """
        if not any(call.what == "DistributedDataParallel" for call in self.run_today().made):
            raise WorkloadError(
                "the program calls no DistributedDataParallel, and --in-process changes nothing else: leave it out, "
                "and try arguments of what the program calls, or variables"
            )
        result = super().run()
        if any(self.trials[0].losses):
            for verdict in result.verdicts:
                if verdict.is_recommended:
                    self._run_alone(verdict.tried)
        return replace(result, verdicts=tuple(self.verdicts()), trials=tuple(self.trials))

    def _run_alone(self, tried: Try) -> None:
        """Add a run of a try by itself to the trials: a run that the store has, or a new run if there is time."""
        kept = self._kept.get((0, tried.label))
        if not kept and self.trials[0].wall_s <= self._seconds_left():
            self._report(f"{tried.label} is run by itself, for its losses")
            kept = self._run(0, tried)
        self.trials += [kept] if kept else []

    def _has_time_for(self, turns: Sequence[Try]) -> bool:
        return self._seconds_of(1, turns) <= self._seconds_left()

    def _seconds_of(self, rounds: int, turns: Sequence[Try]) -> float:
        """Return an estimate of the seconds that one run of the program with ``rounds`` rounds takes.

        It is the time for the start, as in today's first run, and the time for all steps.
        """
        first, program = self.trials[0], self.program
        known_ns = {trial.tried: trial.median_ns or 0.0 for trial in self.trials}
        today_ns = known_ns[TODAY.label]
        start_s = first.wall_s - (program.warmup + program.steps) * (first.median_ns or 0.0) / 1e9
        round_ns = (SETTLING + program.steps) * sum(known_ns.get(tried.label, today_ns) for tried in turns)
        return max(0.0, start_s) + (program.warmup * today_ns + rounds * round_ns) / 1e9

    def _round(self, number: int, turns: Sequence[Try]) -> list[Trial]:
        """Measure several rounds in one run of the program; return the trials of the first round, ``number``.

        There are as many rounds as a verdict needs, or as there is time for. The trials of the further rounds are kept,
        so :meth:`run` finds them when it comes to these rounds.
        """
        self._store.check()
        # How many rounds, and the order of their blocks.
        rounds = min(LEAST_PAIRS, self.limits.rounds + 1 - number)
        while rounds > 1 and self._seconds_of(rounds, turns) > self._seconds_left():
            rounds -= 1
        numbers = range(number, number + rounds)
        wanted = [tried for tried in turns if tried != TODAY]
        blocks = [(each, tried) for each in numbers for tried in self._draw_turns(each, wanted)]
        limit_s = max(LEAST_LIMIT_S, round(TIMES_LONGEST * self._seconds_of(rounds, turns)))
        began = self._clock()
        try:
            measured = self._measure_blocks([tried for _, tried in blocks], limit_s)
        except WorkloadError as error:
            raise WorkloadError(f"{error} (without --in-process, a try that fails stops no other)") from error
        # Keep each block as a trial. Only the first trial of today's settings has losses, those of the warm-up.
        wall_s = (self._clock() - began) / len(blocks)
        for (each, tried), step_ns in zip(blocks, measured.step_ns, strict=True):
            trial = Trial.of(each, tried, Measured(step_ns, measured.ranks), wall_s)
            trial = replace(trial, losses=self._todays_losses(trial) if (each, tried) == (number, TODAY) else ())
            self._store.write(trial)
            self._kept[each, tried.label] = trial
        self._measured_to = numbers[-1]
        self._report(f"rounds {numbers[0]} to {numbers[-1]} are measured, in one run")
        return [self._kept[number, tried.label] for tried in turns]

    def _todays_losses(self, trial: Trial) -> tuple[tuple[Loss, ...], ...]:
        """Return the losses of the warm-up steps, before the first block, with today's settings.

        They show whether losses vary from run to run.
        """
        return tuple(tuple(loss for loss in rank if loss.step < self.program.warmup) for rank in trial.losses)
