"""The words for what a results database says: facts as sentences, conclusions of the published study as statements.

A sentence is written only of a fact that the measured spread supports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_prof.benchmark.conclusions import FEW, HARDLY
from ddp_prof.benchmark.facts import TOPICS
from ddp_prof.present.charts.theme import milliseconds, percent, size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ddp_prof.benchmark.evidence import Evidence
    from ddp_prof.benchmark.facts import Fact, Topic
    from ddp_prof.benchmark.settings import Place
    from ddp_prof.benchmark.store import Environment

HEADINGS: Mapping[Topic, str] = {
    "naive_and_flat": "Naive against flat",
    "overlap": "Overlap",
    "bucket_size": "Bucket size",
    "host_timer": "Where a host timer misleads",
}

ID_LENGTH = 8
"""Characters of an environment's id that are shown."""

CONCLUSIONS: Mapping[str, str] = {
    "half_of_naive": "under naive, communication takes more than half of the step",
    "flat_hardly_helps": f"flat takes less than {percent(HARDLY)} off naive's step",
    "bytes_dominate": f"one call for all gradients takes less than {percent(FEW)} off naive's communication",
    "overlap_beats_naive": "overlap is faster than naive (off the step)",
    "overlap_beats_flat": "overlap is faster than flat (off the step)",
    "hidden_is_not_saved": "overlap hides more communication than it saves time (difference, of naive's step)",
    "context_hides_more": "longer contexts lower the share of communication that is left (shortest less longest)",
    "buckets_beat_overlap": "buckets of the best size are faster than overlap (off the step)",
    "100_mb_beats_1_mb": "buckets of 100 MB are faster than of 1 MB (off the step)",
    "inner_bucket_waits_least": "an inner bucket size leaves less communication than the least and the greatest",
    "inner_bucket_is_fastest": "an inner bucket size is faster than the least and the greatest (off the step)",
}
"""Each conclusion as a statement that its figure, named where it is not plain, bears out or not."""


def place_title(place: Place, environment: Environment | None) -> str:
    """Where and on what was measured, in a line."""
    ranks = f"{place.world_size} rank{'' if place.world_size == 1 else 's'}"
    parts = [f"{place.model_size} model", ranks, f"device: {place.device or 'n/a'}"]
    if environment:
        parts += [f"{environment.cpu}, {environment.cores} cores"]
        parts += [environment.gpus] if environment.gpus else []
        parts += [f"torch {environment.torch}", f"environment {place.environment[:ID_LENGTH]}"]
    return " · ".join(parts)


def analysis(facts: Sequence[Fact]) -> dict[str, list[str]]:
    """The sentences that the numbers support, by heading."""
    return {
        HEADINGS[topic]: [sentence(fact) for fact in facts if fact.topic == topic and fact.is_supported]
        for topic in TOPICS
    }


def sentence(fact: Fact) -> str:
    """A fact in words."""
    text = _SENTENCES[fact.name](fact)
    return text[:1].upper() + text[1:]


def evidence_text(evidence: Evidence | None) -> str:
    """A share with its interval."""
    if evidence is None:
        return "not measured"
    count = f"{evidence.settings} setting{'' if evidence.settings == 1 else 's'}"
    if evidence.low is None or evidence.high is None:
        return f"{percent(evidence.value)} (no spread, {count})"
    return f"{percent(evidence.value)} ({percent(evidence.low)} to {percent(evidence.high)}, {count})"


def _changes(fact: Fact, thing: str) -> str:
    """How much one takes off the other, or adds to it."""
    evidence = fact.evidence
    if evidence.value >= 0:
        return f"{fact.after} takes {evidence_text(evidence)} off the {thing} of {fact.before}."
    return f"{fact.after} adds {evidence_text(evidence.negated())} to the {thing} of {fact.before}."


def _same_step(fact: Fact) -> str:
    limit = percent(fact.numbers["limit"])
    return (
        f"{fact.after} and {fact.before} take the same time, to within {limit}: they differ by "
        f"{evidence_text(fact.evidence)}."
    )


def _hidden_is_not_saved(fact: Fact) -> str:
    return (
        "By the host's timer, overlap takes more off communication than off the step: the difference, "
        f"{evidence_text(fact.evidence)} of naive's step, is what compute became slower beside communication, or "
        "what the timer misses."
    )


def _context_hides_more(fact: Fact) -> str:
    return (
        "A longer context gives backward more to hide under: communication's share of the step is lower at the "
        f"longest than at the shortest by {evidence_text(fact.evidence)}, in percent of the step."
    )


def _model_agrees(fact: Fact) -> str:
    best, chosen = fact.numbers["best_bytes"], fact.numbers["chosen_mb"]
    return (
        f"The course's model puts the best bucket at {size(round(best))}, which of the sizes measured speaks for "
        f"{chosen:g} MB, and that is the fastest: by {evidence_text(fact.evidence)} or more."
    )


def _model_disagrees(fact: Fact) -> str:
    best, chosen, fastest = (fact.numbers[key] for key in ("best_bytes", "chosen_mb", "fastest_mb"))
    return (
        f"The course's model puts the best bucket at {size(round(best))}, which of the sizes measured speaks for "
        f"{chosen:g} MB, but {fastest:g} MB is faster: {chosen:g} MB adds "
        f"{evidence_text(fact.evidence.negated())} to the step."
    )


def _timer_synchronized(fact: Fact) -> str:
    numbers = fact.numbers
    before, after = (milliseconds(round(numbers[key])) for key in ("before_ns", "after_ns"))
    meaning = (
        "; the difference is what the device had yet to finish when backward returned"
        if fact.evidence.value > 0
        else ""
    )
    return (
        f"{fact.after}: a host timer without synchronizing sees {before} of communication a step, with "
        f"synchronizing {after}{meaning}."
    )


def _timer_misses_hidden(fact: Fact) -> str:
    numbers = fact.numbers
    before, after = (milliseconds(round(numbers[key])) for key in ("before_ns", "after_ns"))
    if fact.evidence.value > 0:
        return f"{fact.after}: the trace has {after} of communication a step, where the host's timer sees {before}."
    return (
        f"{fact.after}: the trace has {after} of communication a step, of which the host's timer sees {before}: what "
        "compute hides, and what that costs, no timer on the host tells."
    )


def _timer_and_trace(fact: Fact) -> str:
    numbers = fact.numbers
    before, after = (milliseconds(round(numbers[key])) for key in ("before_ns", "after_ns"))
    tail = f", and a tail of {milliseconds(round(numbers['tail_ns']))}" if "tail_ns" in numbers else ""
    return (
        f"{fact.after}: where the host's timer sees {before} of communication a step, the trace has {after} exposed"
        f"{tail}."
    )


_SENTENCES: Mapping[str, Callable[[Fact], str]] = {
    "step": lambda fact: _changes(fact, "step"),
    "communication": lambda fact: _changes(fact, "communication, as a host timer sees it,"),
    "same_step": _same_step,
    "hidden_is_not_saved": _hidden_is_not_saved,
    "context_hides_more": _context_hides_more,
    "model_agrees": _model_agrees,
    "model_disagrees": _model_disagrees,
    "timer_synchronized": _timer_synchronized,
    "timer_misses_hidden": _timer_misses_hidden,
    "timer_and_trace": _timer_and_trace,
}
