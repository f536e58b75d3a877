"""Explains why the best try is faster: captures today's settings and the try, and compares predictions with the gain.

A prediction comes from the capture of today's settings alone, so it could have been known before the first try. Each
function in :data:`FORESEERS` yields predictions: a fraction of a step, as a bound or as an expectation, or the reason
why it is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.analyze.what_if.questions import BUCKET_SIZE, VIEWS, Question
from ddp_prof.runs import load_runs
from ddp_prof.runs.report import LoadOptions
from ddp_prof.runs.run import SUMMARY, Run
from ddp_prof.tune.candidates import tries_of
from ddp_prof.tune.measure import Program
from ddp_prof.tune.recorded import record
from ddp_prof.tune.sequential import Gain
from ddp_prof.tune.tries import TODAY, Try, parse_tries
from ddp_prof.tune.verdicts import Verdict

BEYOND, WITHIN, UNKNOWN = "beyond", "within", "not known"
PREDICTED = "predicted (whatif)"
NO_STEP = "how long a step of the capture takes is not known"


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What the capture of today's settings predicts for the gain of a try, as a fraction of a step (0.02: 2 %).

    Attributes:
        source: What predicts it.
        is_bound: Whether the try can gain at most this; otherwise it is what is expected.
        gain: The bound or the expected gain; ``None`` if not known.
        low: Lower end of the interval of an expected gain, if there is one.
        high: Upper end of that interval.
        reason: Why the gain is not known.
    """

    source: str
    is_bound: bool
    gain: float | None
    low: float | None = None
    high: float | None = None
    reason: str | None = None

    def compare(self, measured: Gain) -> str:
        """Return whether the measured gain is ``beyond`` the prediction or ``within`` it, or that it is ``not known``.

        Intervals are compared: a gain is beyond a bound if all of its interval is, and beyond an expectation if the two
        intervals do not overlap.
        """
        if self.gain is None or measured.low is None or measured.high is None:
            return UNKNOWN
        if self.is_bound:
            return BEYOND if measured.low > self.gain else WITHIN
        low, high = self.low, self.high
        if low is None or high is None:
            return UNKNOWN
        return BEYOND if measured.low > high or measured.high < low else WITHIN


@dataclass(frozen=True, slots=True)
class Why:
    """The best try with its measured gain, the captures of today's settings and of the try, and the predictions."""

    tried: Try
    measured: Gain
    runs: tuple[Run, Run]
    foreseen: tuple[Foreseen, ...]


def bounds_of(run: Run, _tried: Try) -> Iterator[Foreseen]:
    """Yield the two bounds of the cost model for today's run.

    Hiding communication gains no more than the time that waits for it. No network gains more than that and contention
    (the time by which communication slows compute), which is known only if the slowdown is known. The bound is the
    upper end of its interval, if there is one.
    """
    bounds, step_ns = run.cost().bounds, _step_ns(run)
    network_ns = bounds.network_ns if bounds.network_ns is None or bounds.high_ns is None else bounds.high_ns
    named = (("hiding communication", bounds.schedule_ns), ("any network", network_ns))
    for source, ns in named:
        yield _foreseen(source, True, (ns, None, None), step_ns, bounds.reason)


def findings_of(run: Run, tried: Try) -> Iterator[Foreseen]:
    """Yield, for each of the doctor's findings that a setting of the try may remove, its cost and its simulated gain.

    The cost is a bound on the gain, the simulated gain is an expectation.
    """
    step_ns, names = _step_ns(run), {setting.name for setting in tried.settings}
    for finding in run.doctor().findings:
        answers = parse_tries(tries_of(finding))
        if not names & {setting.name for answer in answers for setting in answer.settings}:
            continue
        yield _foreseen(finding.rule, True, (finding.cost_ns, None, None), step_ns, finding.cost_reason)
        simulated = (finding.expected_gain_ns, finding.gain_low_ns, finding.gain_high_ns)
        yield _foreseen(f"{finding.rule}, simulated", False, simulated, step_ns, finding.gain_reason)


def predictions_of(run: Run, tried: Try) -> Iterator[Foreseen]:
    """Yield what ``ddp-prof whatif`` predicts for a try of one bucket size or of views into buckets; else nothing.

    Its interval is a 90 % interval.
    """
    question = _question_of(tried)
    if question is None:
        return
    answer = run.what_if([question])
    if answer.reason or not answer.predictions:
        yield _foreseen(PREDICTED, False, (None, None, None), None, answer.reason)
        return
    (one,) = answer.predictions
    # A negative change of the step is a gain, so the high end of the change is the low end of the gain.
    gains = (None if ns is None else -ns for ns in (one.change_ns, one.high_ns, one.low_ns))
    yield _foreseen(PREDICTED, False, (*gains,), answer.measured_ns, one.reason)


def _question_of(tried: Try) -> Question | None:
    """Return the question for ``whatif`` that a try asks; ``None`` if there is no such question."""
    if len(tried.settings) != 1:
        return None
    (setting,) = tried.settings
    if setting.name == "bucket_cap_mb" and isinstance(setting.value, int | float):
        return Question(BUCKET_SIZE, float(setting.value))
    return Question(VIEWS) if setting.name == "gradient_as_bucket_view" and setting.value is True else None


FORESEERS: Sequence[Callable[[Run, Try], Iterator[Foreseen]]] = (bounds_of, findings_of, predictions_of)


def find_why(program: Program, best: Verdict, store: Path, folder: Path, environ: Mapping[str, str]) -> Why:
    """Return why the best try is faster, from captures of the program with today's settings and with the try.

    Captures that are there are read, others are made.

    Args:
        program: The program.
        best: The verdict on the best try.
        store: The file of the tuning; captures lie beside it.
        folder: Where the program is started.
        environ: Its environment.

    Raises:
        WorkloadError: The program cannot be captured.
        TraceError: A capture cannot be read.
    """
    files = [record(program, tried, store, folder, environ) for tried in (TODAY, best.tried)]
    today, tried = (_load(of_try, label) for of_try, label in zip(files, (TODAY.label, best.tried.label), strict=True))
    assert best.gain is not None, "the best try has pairs"
    return Why(best.tried, best.gain, (today, tried), foresee(today, best.tried))


def _load(files: Sequence[Path], label: str) -> Run:
    (run,) = load_runs(files, LoadOptions(one_run=True), measures=SUMMARY)
    run.folder = label
    return run


def foresee(today: Run, tried: Try) -> tuple[Foreseen, ...]:
    """Return all predictions for a try from the capture of today's settings."""
    return tuple(one for foreseer in FORESEERS for one in foreseer(today, tried))


def _step_ns(run: Run) -> float | None:
    """Return the median length of a step that communicates; ``None`` if not known."""
    (summary,) = compare_variants([run.overlap()])
    return summary.communicating_step_ns


def _foreseen(
    source: str, is_bound: bool, found_ns: tuple[int | None, ...], step_ns: float | None, reason: str | None
) -> Foreseen:
    """Return a prediction from gain, low and high in nanoseconds (``found_ns``) and the length of a step."""
    gain, low, high = (ns / step_ns if ns is not None and step_ns else None for ns in found_ns)
    return Foreseen(source, is_bound, gain, low, high, None if gain is not None else reason or NO_STEP)
