"""Why the best try is faster: one capture of today and of it, and what was foreseen beside what was measured.

What is foreseen comes from the capture of today alone, so it could have been known before the first try. ``FORESEERS``
lists what foresees; each returns a share of a step, as a bound or as an expectation, or a reason why it cannot tell.
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
from ddp_prof.tune.candidates import OF_FINDINGS
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
    """What the capture of today's settings tells of the gain of a try, as a share of a step (0.02: 2 %).

    Attributes:
        gain: What is gained at most if ``is_bound``, else what is expected, with its interval where there is one;
            ``None`` if not known, for ``reason``.
    """

    source: str
    is_bound: bool
    gain: float | None
    low: float | None = None
    high: float | None = None
    reason: str | None = None

    def compare(self, measured: Gain) -> str:
        """Whether what was measured is ``beyond`` what was foreseen, ``within`` it, or this is ``not known``."""
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
    """The best try with its gain as measured, the captures of today and of the try, and what was foreseen."""

    tried: Try
    measured: Gain
    runs: tuple[Run, Run]
    foreseen: tuple[Foreseen, ...]


def bounds_of(run: Run, _tried: Try) -> Iterator[Foreseen]:
    """The bounds of the cost model: no schedule gains more than what waits, no network more than that and contention.

    The second needs a known slowdown beside communication; its interval is that of contention.
    """
    bounds, step_ns = run.cost().bounds, _step_ns(run)
    named = (("any schedule", bounds.schedule_ns), ("any network", bounds.network_ns))
    for source, ns in named:
        yield _foreseen(source, True, (ns, None, None), step_ns, bounds.reason)


def findings_of(run: Run, tried: Try) -> Iterator[Foreseen]:
    """The doctor's findings that a setting of the try answers: what each costs at most, and its simulated gain."""
    step_ns, names = _step_ns(run), {setting.name for setting in tried.settings}
    for finding in run.doctor().findings:
        answers = parse_tries(OF_FINDINGS.get(finding.rule, ()))
        if not names & {setting.name for answer in answers for setting in answer.settings}:
            continue
        yield _foreseen(finding.rule, True, (finding.cost_ns, None, None), step_ns, finding.cost_reason)
        simulated = (finding.expected_gain_ns, finding.gain_low_ns, finding.gain_high_ns)
        yield _foreseen(f"{finding.rule}, simulated", False, simulated, step_ns, finding.gain_reason)


def predictions_of(run: Run, tried: Try) -> Iterator[Foreseen]:
    """What ``ddp-prof whatif`` predicts of a try of one bucket size, or of views; its interval is one of 90 %."""
    question = _question_of(tried)
    if question is None:
        return
    answer = run.what_if([question])
    if answer.reason or not answer.predictions:
        yield _foreseen(PREDICTED, False, (None, None, None), None, answer.reason)
        return
    (one,) = answer.predictions
    gains = (None if ns is None else -ns for ns in (one.change_ns, one.high_ns, one.low_ns))
    yield _foreseen(PREDICTED, False, (*gains,), answer.measured_ns, one.reason)


def _question_of(tried: Try) -> Question | None:
    if len(tried.settings) != 1:
        return None
    (setting,) = tried.settings
    if setting.name == "bucket_cap_mb" and isinstance(setting.value, int | float):
        return Question(BUCKET_SIZE, float(setting.value))
    return Question(VIEWS) if setting.name == "gradient_as_bucket_view" and setting.value is True else None


FORESEERS: Sequence[Callable[[Run, Try], Iterator[Foreseen]]] = (bounds_of, findings_of, predictions_of)


def find_why(program: Program, best: Verdict, store: Path, folder: Path, environ: Mapping[str, str]) -> Why:
    """Capture the program with today's settings and with the best try, or read the captures that are there.

    Raises WorkloadError if it cannot be captured, TraceError if a capture cannot be read.
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
    return tuple(one for foreseer in FORESEERS for one in foreseer(today, tried))


def _step_ns(run: Run) -> float | None:
    (summary,) = compare_variants([run.overlap()])
    return summary.communicating_step_ns


def _foreseen(
    source: str, is_bound: bool, found_ns: tuple[int | None, ...], step_ns: float | None, reason: str | None
) -> Foreseen:
    gain, low, high = (ns / step_ns if ns is not None and step_ns else None for ns in found_ns)
    return Foreseen(source, is_bound, gain, low, high, None if gain is not None else reason or NO_STEP)
