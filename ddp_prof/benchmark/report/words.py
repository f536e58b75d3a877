"""The words for results: observations as sentences, the published study's claims as statements.

A sentence is written only of an observation that the measured spread supports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_prof.present.text import milliseconds, percent, size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ddp_prof.benchmark.claims import Observation, Topic
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
        parts += [f"{environment.cpu}, {environment.cores} cores"]
        parts += [environment.gpus] if environment.gpus else []
        parts += [f"torch {environment.torch}", f"environment {testbed.environment[:ID_LENGTH]}"]
    return " · ".join(parts)


def analysis(observations: Sequence[Observation]) -> dict[str, list[str]]:
    """The sentences that the numbers support, by heading."""
    supported = [observation for observation in observations if observation.is_supported]
    return {
        heading: [sentence(observation) for observation in supported if observation.topic == topic]
        for topic, heading in HEADINGS.items()
    }


def sentence(observation: Observation) -> str:
    """An observation in words."""
    text = _SENTENCES[observation.name](observation)
    return text[:1].upper() + text[1:]


def effect_text(effect: Effect | None) -> str:
    """A share with its interval."""
    if effect is None:
        return "not measured"
    count = f"{effect.settings} setting{'' if effect.settings == 1 else 's'}"
    if effect.low is None or effect.high is None:
        return f"{percent(effect.value)} (no spread, {count})"
    return f"{percent(effect.value)} ({percent(effect.low)} to {percent(effect.high)}, {count})"


def _before_and_after(found: Observation) -> tuple[str, str]:
    before, after = (milliseconds(round(found.numbers[key])) for key in ("before_ns", "after_ns"))
    return before, after


def _changes(found: Observation, thing: str) -> str:
    """How much one takes off the other, or adds to it."""
    if found.effect.value >= 0:
        return f"{found.after} takes {effect_text(found.effect)} off the {thing} of {found.before}."
    return f"{found.after} adds {effect_text(found.effect.negated())} to the {thing} of {found.before}."


def _same_step(found: Observation) -> str:
    limit = percent(found.numbers["limit"])
    return (
        f"{found.after} and {found.before} take the same time, to within {limit}: they differ by "
        f"{effect_text(found.effect)}."
    )


def _hidden_is_not_saved(found: Observation) -> str:
    return (
        "By the host timer, overlap takes more off communication than off the step. The difference is "
        f"{effect_text(found.effect)} of naive's step: compute is slower beside communication, or the timer misses "
        "part of the communication."
    )


def _context_hides_more(found: Observation) -> str:
    return (
        "A longer context gives backward more compute to hide communication under: communication's share of the step "
        f"is lower at the longest context than at the shortest by {effect_text(found.effect)}, in percent of the step."
    )


def _model_choice(found: Observation) -> str:
    best, chosen = found.numbers["best_bytes"], found.numbers["chosen_mb"]
    return f"The model's best bucket size is {size(round(best))}; of the sizes measured, it prefers {chosen:g} MB."


def _model_agrees(found: Observation) -> str:
    return f"{_model_choice(found)} That size is the fastest, by {effect_text(found.effect)} or more."


def _model_disagrees(found: Observation) -> str:
    chosen, fastest = found.numbers["chosen_mb"], found.numbers["fastest_mb"]
    return (
        f"{_model_choice(found)} But {fastest:g} MB is faster: {chosen:g} MB adds "
        f"{effect_text(found.effect.negated())} to the step, so the model does not fit this testbed."
    )


def _timer_synchronized(found: Observation) -> str:
    before, after = _before_and_after(found)
    meaning = ". The difference is device work still pending when backward returned" if found.effect.value > 0 else ""
    return (
        f"{found.after}: a host timer shows {before} of communication a step without synchronizing, and {after} with "
        f"synchronizing{meaning}."
    )


def _timer_misses_hidden(found: Observation) -> str:
    before, after = _before_and_after(found)
    missed = "" if found.effect.value > 0 else " The host timer cannot see the part that compute hides."
    return f"{found.after}: the trace shows {after} of communication a step, and the host timer {before}.{missed}"


def _timer_and_trace(found: Observation) -> str:
    before, after = _before_and_after(found)
    numbers = found.numbers
    tail = f", of which the tail is {milliseconds(round(numbers['tail_ns']))}" if "tail_ns" in numbers else ""
    return (
        f"{found.after}: the host timer shows {before} of communication a step, and the trace {after} of exposed "
        f"communication{tail}."
    )


_SENTENCES: Mapping[str, Callable[[Observation], str]] = {
    "step": lambda found: _changes(found, "step"),
    "communication": lambda found: _changes(found, "communication (host timer)"),
    "same_step": _same_step,
    "hidden_is_not_saved": _hidden_is_not_saved,
    "context_hides_more": _context_hides_more,
    "model_agrees": _model_agrees,
    "model_disagrees": _model_disagrees,
    "timer_synchronized": _timer_synchronized,
    "timer_misses_hidden": _timer_misses_hidden,
    "timer_and_trace": _timer_and_trace,
}
