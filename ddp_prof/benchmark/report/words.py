"""The words for results: observations as sentences, the published study's claims as statements.

A sentence is written only of an observation that the measured spread supports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_prof.present.text import milliseconds, percent, size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ddp_prof.benchmark.observations import Observation, Topic
    from ddp_prof.benchmark.settings import Testbed
    from ddp_prof.benchmark.statistics import Effect
    from ddp_prof.benchmark.store import Environment

HEADINGS: Mapping[Topic, str] = {
    "naive_and_flat": "Naive against flat",
    "overlap": "Overlap",
    "bucket_size": "Bucket size",
    "host_timer": "Limits of a host timer",
}

ID_LENGTH = 8
"""Characters of an environment's id that are shown."""


def testbed_title(testbed: Testbed, environment: Environment | None) -> str:
    """Where and on what was measured, in a line."""
    ranks = f"{testbed.world_size} rank{'' if testbed.world_size == 1 else 's'}"
    parts = [f"{testbed.model_size} model", ranks, f"device: {testbed.device or 'n/a'}"]
    if environment:
        parts += [environment.title, f"environment {testbed.environment[:ID_LENGTH]}"]
    return " · ".join(parts)


def analysis(observations: Sequence[Observation]) -> dict[str, list[str]]:
    """The sentences that the numbers support, by heading."""
    supported = [observation for observation in observations if observation.is_supported]
    return {
        heading: [sentence(observation) for observation in supported if observation.topic == topic]
        for topic, heading in HEADINGS.items()
    }


def sentence(found: Observation) -> str:
    """An observation in words."""
    adds, takes = _SENTENCES[found.name]
    numbers = {name: _UNITS[name.rpartition("_")[2]](value) for name, value in found.numbers.items()}
    text = (takes if found.effect.value >= 0 else adds).format(
        before=found.before,
        after=found.after,
        effect=effect_text(found.effect),
        opposite=effect_text(found.effect.negated()),
        tail=f", of which the tail is {numbers['tail_ns']}" if "tail_ns" in numbers else "",
        **numbers,
    )
    return text[:1].upper() + text[1:]


def effect_text(effect: Effect | None) -> str:
    """A share with its interval."""
    if effect is None:
        return "not measured"
    count = f"{effect.settings} setting{'' if effect.settings == 1 else 's'}"
    if effect.low is None or effect.high is None:
        return f"{percent(effect.value)} (no spread, {count})"
    return f"{percent(effect.value)} ({percent(effect.low)} to {percent(effect.high)}, {count})"


_UNITS: Mapping[str, Callable[[float], str]] = {
    "ns": lambda value: milliseconds(round(value)),
    "bytes": lambda value: size(round(value)),
    "mb": lambda value: f"{value:g} MiB",
    "limit": percent,
}
"""How the numbers of a sentence are written, by the end of their names."""


def _alike(text: str) -> tuple[str, str]:
    return text, text


_MODEL_CHOICE = "The model's best bucket size is {best_bytes}; of the sizes measured, it prefers {chosen_mb}. "
_TIMERS = (
    "{after}: a host timer shows {before_ns} of communication a step without synchronizing, and {after_ns} with "
    "synchronizing"
)
_TRACE = "{after}: the trace shows {after_ns} of communication a step, and the host timer {before_ns}."
_SENTENCES: Mapping[str, tuple[str, str]] = {
    "step": (
        "{after} adds {opposite} to the step of {before}.",
        "{after} takes {effect} off the step of {before}.",
    ),
    "communication": (
        "{after} adds {opposite} to the communication (host timer) of {before}.",
        "{after} takes {effect} off the communication (host timer) of {before}.",
    ),
    "same_step": _alike("{after} and {before} take the same time, to within {limit}: they differ by {effect}."),
    "hidden_is_not_saved": _alike(
        "By the host timer, overlap takes more off communication than off the step. The difference is {effect} of "
        "naive's step: compute is slower beside communication, or the timer misses part of the communication."
    ),
    "context_hides_more": _alike(
        "A longer context gives backward more compute to hide communication under: communication's share of the step "
        "is lower at the longest context than at the shortest by {effect}, in percent of the step."
    ),
    "model_agrees": _alike(_MODEL_CHOICE + "That size is the fastest, by {effect} or more."),
    "model_disagrees": _alike(
        _MODEL_CHOICE + "But {fastest_mb} is faster: {chosen_mb} adds {opposite} to the step, so the model does not "
        "fit this testbed."
    ),
    "timer_synchronized": (
        _TIMERS + ".",
        _TIMERS + ". The difference is device work still pending when backward returned.",
    ),
    "timer_misses_hidden": (_TRACE + " The host timer cannot see the part that compute hides.", _TRACE),
    "timer_and_trace": _alike(
        "{after}: the host timer shows {before_ns} of communication a step, and the trace {after_ns} of exposed "
        "communication{tail}."
    ),
}
"""Of each observation the sentence where its effect is negative, and where it is not."""
