"""What is found of a run, in words: a claim that can stand alone, and what belongs to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ddp_prof.analyze.collectives.exposure import LAUNCHED_LATE, QUEUED, STARVED, SYNCHRONOUS, TAIL, WAITING
from ddp_prof.present.charts.theme import milliseconds, percent, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.analyze.collectives.straggler import RunSkew
    from ddp_prof.analyze.overlap.comparison import VariantSummary
    from ddp_prof.analyze.root_cause import RootCause

_SHOWN_PARAMETERS = 2
_WORTH_A_WORD = 0.05


@dataclass(frozen=True, slots=True)
class Headline:
    """A finding in words.

    Attributes:
        claim: A sentence without its end; the title of a figure.
        detail: What goes on from it, to its end.
        joint: What stands between the two in a text.
    """

    claim: str
    detail: str = ""
    joint: str = ": "

    @property
    def text(self) -> str:
        """Both in one or more sentences."""
        return f"{self.claim}{self.joint}{self.detail}" if self.detail else f"{self.claim}."


def root_cause_headline(cause: RootCause | None, *, has_collectives: bool) -> Headline:
    """The main cause of exposed time.

    Args:
        cause: ``None`` where nothing is exposed.
        has_collectives: Whether anything was communicated.
    """
    if cause is None:
        return Headline("Compute hides all communication" if has_collectives else "No communication was recorded")
    share = percent(cause.cause_ns / cause.exposed_ns)
    if cause.cause == TAIL:
        waiting = cause.wait_ns / cause.cause_ns
        meanwhile = f" ({percent(waiting)} of it waiting for a peer)" if waiting >= _WORTH_A_WORD else ""
        advice = _ADVICE[WAITING] if waiting > 1 / 2 else _tail_advice(cause)
        detail = f"{_which(cause)}{_described(cause)} {_when(cause)}. {advice}"
        return Headline(f"{share} of exposed time is tail{meanwhile}", detail)
    if cause.cause == SYNCHRONOUS:
        count = cause.collectives_a_step
        subject = "the one collective of a step starts" if count == 1 else f"all {count} collectives of a step start"
        advice = "Launched by gradient hooks, some of it would hide behind backward."
        return Headline(f"{share} of exposed time is synchronous", f"{subject} after backward. {advice}")
    part = percent(cause.bucket_ns / cause.cause_ns)
    detail = f"{part} of that with {_which(cause)}{_described(cause)}. {_ADVICE[cause.cause]}"
    return Headline(f"{share} of exposed time is {_MEANING[cause.cause]}", detail, ", ")


_MEANING = {
    WAITING: "waiting for a peer",
    LAUNCHED_LATE: "due to late launches by the host",
    QUEUED: "due to queueing behind another collective",
    STARVED: "due to compute that stood still during backward",
}
_ADVICE = {
    WAITING: "'ddp-prof skew' tells who arrives late.",
    LAUNCHED_LATE: "The host is behind the device: fewer, larger kernels and collectives would help.",
    QUEUED: "Communication needs more time than backward gives: fewer bytes or a faster link would help.",
    STARVED: "What held compute up is on the host or a dependency, not in the collective.",
}


def _which(cause: RootCause) -> str:
    kind = "bucket" if cause.bucket is not None else "collective"
    if cause.collectives_a_step == 1:
        return f"the only {kind}"
    if cause.is_last:
        return f"the last {kind}"
    return f"{kind} {cause.index if cause.bucket is None else cause.bucket} of {cause.collectives_a_step}"


def _described(cause: RootCause) -> str:
    parts = [] if cause.bytes is None else [size(cause.bytes)]
    if cause.parameters:
        shown = ", ".join(cause.parameters[:_SHOWN_PARAMETERS])
        more = len(cause.parameters) - _SHOWN_PARAMETERS
        parts.append(f"{shown} and {more} more" if more > 0 else shown)
    return f" ({', '.join(parts)})" if parts else ""


def _when(cause: RootCause) -> str:
    if cause.lead_ns is None:
        return "starts late"
    if not cause.lead_ns:
        return "starts when backward ends"
    side = "before" if cause.lead_ns >= 0 else "after"
    return f"starts {milliseconds(abs(cause.lead_ns))} {side} backward ends"


def _tail_advice(cause: RootCause) -> str:
    if len(cause.parameters) == 1:
        return "It holds a single parameter: only fewer bytes or a faster link would hide more of it."
    if cause.is_last and cause.collectives_a_step > 1:
        return "A smaller last bucket would hide more of it."
    return "Smaller buckets would start earlier and hide more of it."


def skew_headline(skew: RunSkew) -> Headline:
    """Who arrives last, how often, by how much, and what that costs."""
    if skew.reason:
        return Headline(f"Nothing can be said about skew: {skew.reason}")
    steps = len(skew.steps)
    if skew.straggler is None:
        most = max(skew.ranks, key=lambda rank: rank.last_steps)
        if not most.last_steps:
            return Headline("No rank is late by more than the clocks' residual")
        detail = f"{rank_name(most)} is most often, in {most.last_steps} of {steps} steps."
        return Headline("No rank is last more often than chance would have it", detail, "; ")
    late = skew.ranks[skew.straggler]
    claim = (
        f"{rank_name(late).capitalize()} arrives last in {late.last_steps} of {steps} steps, "
        f"by {milliseconds(late.lag_ns or 0)} (median)"
    )
    detail = (
        "others wait for it without anything to compute for "
        f"{milliseconds(round(late.cost_ns / late.last_steps))} of such a step."
    )
    return Headline(claim, detail, "; ")


def tell_story(summaries: Sequence[VariantSummary]) -> list[str]:
    """How the share of communication hidden and the time saved go together; empty without a baseline."""
    base = next((summary for summary in summaries if summary.speedup == 1), None)
    others = [summary for summary in summaries if summary is not base and summary.speedup]
    known = [summary for summary in others if summary.overlap_ratio is not None]
    if base is None or not known:
        return []
    hides, fastest = max(known, key=lambda run: run.overlap_ratio or 0), max(others, key=lambda run: run.speedup or 0)
    story = (
        f"{hides.label} hides most, {percent(hides.overlap_ratio)} of its communication; its step is "
        f"{_change(hides)} than that of {base.label}."
    )
    if fastest is not hides and (fastest.speedup or 0) > 1:
        story += (
            f" {fastest.label} is fastest: its step is {_change(fastest)}, and it hides "
            f"{percent(fastest.overlap_ratio)}.{_communicates(fastest, base)}"
        )
    told = [story + " Time is saved in two ways: by hiding communication, and by having less of it."]
    if any(summary.device == "cpu" for summary in summaries):
        told.append(
            "These runs used CPUs, whose ranks share cores: communication takes time from the compute that hides it, "
            "so that hiding it saves less than its share suggests."
        )
    return told


def _change(summary: VariantSummary) -> str:
    speedup = summary.speedup or 1.0
    return f"{percent(abs(1 - 1 / speedup))} {'shorter' if speedup >= 1 else 'longer'}"


def _communicates(summary: VariantSummary, base: VariantSummary) -> str:
    """Less communication, where that is so, as the other way of saving time."""
    if summary.comm_ns is None or base.comm_ns is None or summary.comm_ns >= base.comm_ns:
        return ""
    return (
        f" It communicates for {milliseconds(round(summary.comm_ns))} of a step, "
        f"{base.label} for {milliseconds(round(base.comm_ns))}."
    )


class _Ranked(Protocol):
    @property
    def rank(self) -> int | None: ...

    @property
    def process(self) -> int: ...


def rank_name(ranked: _Ranked) -> str:
    """What a rank is called; by its process where its number is not known."""
    return f"process {ranked.process}" if ranked.rank is None else f"rank {ranked.rank}"
