"""What one capture of today's settings predicts of a try; it stands beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_prof.analyze.what_if.questions import BUCKET_SIZE, VIEWS, Question
from ddp_prof.runs.run import Run
from ddp_prof.tune.tries import Try


@dataclass(frozen=True, slots=True)
class Predicted:
    """The share of today's step that a try is predicted to gain, with a 90 % interval; ``None`` for ``reason``."""

    gain: float | None
    low: float | None
    high: float | None
    reason: str | None


def predict_tries(run: Run, tries: Sequence[Try]) -> Mapping[str, Predicted]:
    """What is predicted of tries that change one thing that can be predicted, by their labels."""
    asked = {one.label: question for one in tries if (question := _question_of(one)) is not None}
    if not asked:
        return {}
    answer = run.what_if([*asked.values()])
    if answer.reason or not answer.measured_ns:
        return {label: Predicted(None, None, None, answer.reason) for label in asked}
    step_ns, found = answer.measured_ns, dict[str, Predicted]()
    for label, one in zip(asked, answer.predictions, strict=True):
        gain, low, high = (None if ns is None else -ns / step_ns for ns in (one.change_ns, one.high_ns, one.low_ns))
        found[label] = Predicted(gain, low, high, one.reason)
    return found


def _question_of(tried: Try) -> Question | None:
    if len(tried.settings) != 1:
        return None
    (setting,) = tried.settings
    if setting.name == "bucket_cap_mb" and isinstance(setting.value, int | float):
        return Question(BUCKET_SIZE, float(setting.value))
    return Question(VIEWS) if setting.name == "gradient_as_bucket_view" and setting.value is True else None
