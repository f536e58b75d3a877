"""Sentences about a run: what hiding its communication would gain, what it costs, and which steps stand out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_prof.analyze.core.blocking import BESIDE, ON_OTHER_DEVICE
from ddp_prof.analyze.overlap import RankOverlap
from ddp_prof.analyze.statistics import CHANGES_OVERLAP, WORTH, Outliers
from ddp_prof.analyze.step_levels import LevelChange
from ddp_prof.analyze.variants.comparison import VariantSummary
from ddp_prof.analyze.why_unknown import NO_COMMUNICATION
from ddp_prof.columns import count_noun, milliseconds, percent, with_article

if TYPE_CHECKING:
    from ddp_prof.analyze.cost import Bounds, Cost

_LEAST_IDLE = 0.05
"""Idle time is reported first if it is longer than the exposed time and than this fraction of the step."""
_WHOLE = 0.9
"""From this fraction of the step on, a limit of a gain that rests on nothing measured is left out."""


@dataclass(frozen=True, slots=True)
class Headline:
    """A finding as text.

    Attributes:
        claim: The main sentence without its period; it is also the title of a figure.
        detail: What follows it; may be empty.
        joint: What stands between both.
    """

    claim: str
    detail: str = ""
    joint: str = ": "

    @property
    def text(self) -> str:
        return f"{self.claim}{self.joint}{self.detail}" if self.detail else f"{self.claim}."


def gain_headline(summary: VariantSummary, cost: Cost | None = None) -> str:
    """Say how much hiding all communication would gain at most, and how much communication slows compute.

    Args:
        summary: The figures of the run; the gain is ``VariantSummary.gain_at_most``.
        cost: What communication costs a step; ``None`` if that was not measured. The slowdown of compute is mentioned
            only if its interval is known, which few steps do not tell, and does not include 0.
    """
    step_ns, contention_ns = summary.communicating_step_ns, cost.contention_ns if cost and slows(cost) else None
    if not step_ns or not contention_ns or contention_ns < WORTH * step_ns:
        return _gain_text(summary)
    share = f"{milliseconds(contention_ns)} per step ({_fine_percent(contention_ns / step_ns)})"
    return f"{_gain_text(summary)} But it slows the compute that hides it: by {share}."


def slows(cost: Cost) -> bool:
    """Whether communication certainly slows compute: the interval of contention does not include 0."""
    return cost.contention_ns is not None and (cost.contention_low_ns or 0) > 0


def gain_in_short(
    summary: VariantSummary, cost: Cost | None, bounds: Bounds | None, *, follows_idle: bool = False
) -> str:
    """Return a short form of :func:`gain_headline`, which also says what a faster network could gain.

    It is for the short summary, where other lines report the blocking time.

    Args:
        summary: The figures of the run.
        cost: What communication costs a step; ``None`` if not measured.
        bounds: What a step could gain at most; ``None`` if not measured.
        follows_idle: Whether the answer is about idle time first: then only another line has the limit of what waits.
    """
    step_ns, exposed_ns, gain = summary.communicating_step_ns, summary.exposed_ns, summary.gain_at_most
    if summary.reason or not step_ns or exposed_ns is None or gain is None or summary.host_waits_usually:
        return _gain_text(summary)
    # A limit is the upper end of the interval, if that is known.
    network_ns = (bounds.high_ns if bounds.high_ns is not None else bounds.network_ns) if bounds else None
    if bounds and _is_whole_step(bounds, step_ns):
        network_ns = None
    network = _percent_at_most(network_ns / step_ns) if network_ns is not None else None
    is_other = network not in (None, _percent_at_most(gain))
    faster = f", a faster network {'' if gain else 'at most '}{network}" if is_other else ""
    if not gain:
        why = " (communication slows compute)" if faster and cost and slows(cost) else ""
        return f"{_gain_clauses(summary, 'hiding it gains')}{faster}{why}."
    limit_ns = summary.blocking_at_most_ns
    is_limited = summary.blocking_ns is None and limit_ns is not None and limit_ns < exposed_ns and not follows_idle
    delays = f", and delays other work by at most {milliseconds(limit_ns or 0)}" if is_limited else ""
    exposed = _exposed_text(summary, step_ns, exposed_ns)
    return f"{exposed}{delays}: hiding it gains at most {_percent_at_most(gain)}{faster}."


def idle_headline(summary: VariantSummary, reason: str = "") -> str | None:
    """Say that a device is idle for longer than communication is exposed.

    ``None`` if it is not, or if it is idle for less than ``_LEAST_IDLE`` of the step.

    Args:
        summary: The figures of the run.
        reason: Why it is idle; empty if that is not known.
    """
    parts, step_ns = summary.parts_ns, summary.nearest_step_ns
    idle_ns, exposed_ns = parts["idle"], parts["exposed"]
    if not step_ns or not idle_ns or exposed_ns is None or idle_ns <= max(exposed_ns, _LEAST_IDLE * step_ns):
        return None
    other = ", longer than communication is exposed" if exposed_ns else ""
    share = f"for {percent(idle_ns / step_ns)} of a typical step{other}"
    if summary.device == "cpu":  # no device waits for a host
        where = reason or "ddp-prof kernels shows where the host was"
        return f"A rank neither computes nor communicates {share}: {where}."
    return f"The device is idle {share}: {reason or 'ddp-prof kernels shows what it waits for'}."


def _is_whole_step(bounds: Bounds, step_ns: int | None) -> bool:
    """Return whether the limit of a faster network's gain says nothing: it is not measured, and as long as the step."""
    return bounds.network_ns is None and bool(step_ns and bounds.high_ns and bounds.high_ns >= _WHOLE * step_ns)


def cost_text(cost: Cost, bounds: Bounds) -> str | None:
    """Say what communication slows, and the most that could be gained by schedule and network.

    ``None`` if the slowdown is not known, not even its upper limit.
    """
    if cost.contention_ns is None and cost.contention_high_ns is None:
        return None
    if cost.kappa is not None and cost.contention_ns is not None:
        interval = _interval_text(cost.contention_low_ns, cost.contention_high_ns)
        compared = count_noun(cost.kernels_compared, "kernel")
        adds = f"{milliseconds(cost.contention_ns)} per step{interval}"
        slows = f"compute beside communication takes {cost.kappa:.2f} times as long ({compared} compared): {adds}"
    elif cost.contention_ns == 0:
        slows = "in a typical step nothing ran beside communication, so it slowed nothing"
    else:
        at_most = milliseconds(cost.contention_high_ns or 0)
        slows = f"by how much communication slows compute is not known, at most {at_most} per step: {cost.reason}"
    if bounds.schedule_ns is None:
        return f"{slows}."
    at_most = f"no more than {milliseconds(bounds.schedule_ns)} per step" if bounds.schedule_ns else "nothing"
    schedule = f"hiding all of it can gain {at_most}"
    network = bounds.network_ns if bounds.network_ns is not None else bounds.high_ns
    if network is None:
        return f"{slows}; {schedule}."
    if _is_whole_step(bounds, (cost.medians_ns or {}).get("step")):
        return f"{slows}; {schedule}; for a faster network no limit that is much less than the step is known."
    interval = _interval_text(bounds.low_ns, bounds.high_ns) if bounds.network_ns is not None else ""
    return f"{slows}; {schedule}, no network more than {milliseconds(network)}{interval}."


def _interval_text(low_ns: int | None, high_ns: int | None) -> str:
    """Return an interval in brackets, after a space; empty if it is not known or has no length."""
    if low_ns is None or high_ns is None or low_ns == high_ns:
        return ""
    return f" ({milliseconds(low_ns)} to {milliseconds(high_ns)})"


def _gain_text(summary: VariantSummary) -> str:
    """Say how much communication is hidden, how much is exposed, and what hiding all of it would gain at most.

    Where that is not known, say why.
    """
    return f"{_gain_clauses(summary)}."


def _gain_clauses(summary: VariantSummary, hiding: str = "hiding all of it would gain") -> str:
    """Return the sentence of :func:`_gain_text` without its end; ``hiding`` are its words for that."""
    if summary.reason == NO_COMMUNICATION:
        return _silence_text(summary)
    if summary.reason:
        return f"Whether communication is exposed is not known: {summary.reason}"
    step_ns, exposed_ns, gain = summary.communicating_step_ns, summary.exposed_ns, summary.gain_at_most
    if not step_ns or exposed_ns is None or gain is None:
        why = "more communication is exposed in a step than the step lasts"
        if not step_ns:
            why = "the length of its steps is not known" if summary.steps else "the trace marks no whole step"
        elif exposed_ns is None:
            why = f"no step is known to have launched {'it' if summary.collectives == 0 else 'much of it'}"
        elif summary.serves_other_devices:
            why = ON_OTHER_DEVICE
        return f"{_hidden_text(summary)}; what the rest costs per step is not known, because {why}"
    exposed = _exposed_text(summary, step_ns, exposed_ns)
    of_step = "such a step" if communicating_steps_text(summary) else "a typical step"
    at_most = f"so {hiding} at most {_percent_at_most(gain)} of {of_step}"
    who = "a stream" if (summary.blocking_ns or 0) > BESIDE * exposed_ns else "the step"
    stands = f"{who} stands still for communication for {milliseconds(summary.blocking_ns or 0)}"
    if summary.host_waits_usually:
        more = f"{stands}, and " if (summary.blocking_ns or 0) > exposed_ns else ""
        return f"{exposed}, and {more}the host waits for it, {at_most}"
    # Blocking is not known, but may have an upper limit.
    limit_ns = summary.blocking_at_most_ns
    if summary.blocking_ns is None and limit_ns != 0:
        if limit_ns is None or limit_ns >= exposed_ns:
            return f"{exposed}, {at_most}"
        delays = f"it delays other work by at most {milliseconds(limit_ns)}"
        return f"{exposed}, but {delays}, {at_most}"
    # Nothing waits for communication in a typical step.
    if not summary.blocking_ns:
        where = more = ""
        if summary.blocking_ns is None or summary.blocked_steps:
            where, more = " in a typical step", " there"
        if summary.blocked_steps:
            more += f", but {count_noun(summary.blocked_steps, 'step')} of all ranks stood still for it"
        return f"{exposed}, but nothing waits for it{where}: {hiding} nothing{more}"
    return f"{exposed}, and {stands}, {at_most}"


def _hidden_text(summary: VariantSummary) -> str:
    """Say how much communication is hidden: without steps that stand out, if the share depends on them.

    The collectives of a rank without others are no communication, whatever time they take.
    """
    if summary.world_size == 1:
        return "The only rank of its job sends nothing to another one"
    share, without = summary.overlap_ratio, summary.overlap_ratio_without_outliers
    if share is None or without is None or abs(share - without) <= CHANGES_OVERLAP:
        return f"{percent(share)} of communication is hidden"
    return f"{percent(without)} of communication is hidden ({percent(share)} with outliers)"


def _exposed_text(summary: VariantSummary, step_ns: int, exposed_ns: int) -> str:
    """Say how much communication is hidden, and how much of a step is exposed; in which steps, if not in all."""
    some = f" in {which}" if (which := communicating_steps_text(summary)) else ""
    step = f"{with_article(milliseconds(step_ns))} step"
    share = f"{milliseconds(exposed_ns)} of {step} ({_fine_percent(exposed_ns / step_ns)})"
    own = " time of its collectives" if summary.world_size == 1 else ""
    return f"{_hidden_text(summary)}; {share} is exposed{own}{some}"


def _silence_text(summary: VariantSummary) -> str:
    """Say that nothing communicates, and why that may be so; without the end of the sentence."""
    others = f", although its job has {summary.world_size} ranks" if (summary.world_size or 1) > 1 else ""
    if others or summary.ranks > 1:
        return f"Nothing in this trace is known to communicate{others}"
    if summary.world_size == 1:
        return "This process is the only rank of its job: it communicates with nobody, so there is nothing to hide"
    alone = "if its one process works alone, it communicates with nobody, and there is nothing to hide"
    return f"Nothing in this trace is known to communicate: {alone}"


def communicating_steps_text(summary: VariantSummary) -> str:
    """Say how many steps communicate, if not all do, as in gradient accumulation; else return an empty text.

    Medians of communication are over these steps only.
    """
    some, where = summary.communicating_steps, " in backward" if summary.others_communicate else ""
    return f"the {some} of {summary.steps} steps that communicate{where}" if 0 < some < summary.steps else ""


def _fine_percent(ratio: float) -> str:
    """Format a ratio in per cent, with one decimal below 10 %."""
    return f"{100 * ratio:.1f} %" if 0.0005 <= ratio < 0.0995 else percent(ratio)


def _percent_at_most(ratio: float) -> str:
    """Format a limit in per cent as :func:`_fine_percent` does; it is not rounded down to ``0.0 %``."""
    return _fine_percent(max(ratio, 0.001) if ratio else ratio)


def step_lengths(ranks: Iterable[RankOverlap]) -> dict[int, str]:
    """Return the length of each step as text, by the step's key; if ranks differ, from shortest to longest."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        for step in rank.marked_steps:
            if step.step_key is not None and step.length.ns is not None:
                found.setdefault(step.step_key, []).append(step.length.ns)
    ends = {key: (milliseconds(min(lengths)), milliseconds(max(lengths))) for key, lengths in found.items()}
    return {key: low if low == high else f"{low} to {high}" for key, (low, high) in ends.items()}


def level_change_text(change: LevelChange) -> str:
    """Say that the first steps take another time than the others and, if they are longer, how to leave them out."""
    first, times = change.first, f"{milliseconds(change.before_ns)}, the others {milliseconds(change.after_ns)}"
    if first == 1:
        said = f"the first of {change.steps} steps takes {times}"
    else:
        said = f"the first {first} of {change.steps} steps take {times}"
    if change.before_ns < change.after_ns:
        return f"{said}; figures of all steps mix both"
    which, they = ("it", "it is") if first == 1 else ("them", "they are")
    return f"{said}; --warmup-steps {first} leaves {which} out if {they} warm-up"


def outliers_text(outliers: Outliers) -> str:
    """Say which steps hold how much of the exposed time or of communication, and the overlap without them."""
    keys = [str(key) for key, _ in outliers.steps]
    one = len(keys) == 1
    held, whole, what = sum(ns for _, ns in outliers.steps), outliers.exposed_ns, "exposed"
    if outliers.held_comm_ns is not None and outliers.comm_ns is not None:
        held, whole, what = outliers.held_comm_ns, outliers.comm_ns, "of communication"
    which = f"step{'' if one else 's'} {'at position ' if outliers.are_positions else ''}{', '.join(keys)}"
    text = f"{which} alone hold{'s' if one else ''} {milliseconds(held)} of {milliseconds(whole)} {what}"
    if outliers.overlap_ratio is not None and outliers.overlap_ratio_without is not None:
        without = percent(outliers.overlap_ratio_without)
        text += f": overlap {percent(outliers.overlap_ratio)}, without {'it' if one else 'them'} {without}"
    return text
