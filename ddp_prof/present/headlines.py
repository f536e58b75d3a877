"""Sentences about the main findings of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_prof.analyze.collectives.exposed_time import (
    BLOCKING_CALL,
    LATE_INPUT,
    LAUNCHED_LATE,
    OUTSIDE,
    PEER_WAIT,
    QUEUED,
    TAIL,
    TRANSFER,
    UNKNOWN_WHEN,
    UNKNOWN_WHY,
)
from ddp_prof.analyze.collectives.timing import FEW_BYTES
from ddp_prof.analyze.overlap import RankOverlap
from ddp_prof.analyze.quality import NO_COMMUNICATION
from ddp_prof.analyze.statistics import Outliers
from ddp_prof.analyze.variants.comparison import TURNS, VariantSummary
from ddp_prof.present.text import collective_name, count_noun, milliseconds, percent, size
from ddp_prof.range_names import BACKWARD, FORWARD, OPTIMIZER
from ddp_prof.variants import BASELINE

if TYPE_CHECKING:
    from ddp_prof.analyze.collectives.collective import Collective
    from ddp_prof.analyze.collectives.results import RunBlocking
    from ddp_prof.analyze.collectives.sizes import AlikeTimes
    from ddp_prof.analyze.collectives.straggler import RankSkew, RunSkew
    from ddp_prof.analyze.cost import Bounds, Cost
    from ddp_prof.analyze.root_cause import RootCause

_SHOWN_PARAMETERS = 2
"""Most parameters that a sentence names; more are only counted."""
_WORTH_A_WORD = 0.05
"""Waiting for peers is mentioned if it is at least this fraction of the exposed time."""
_WORTH_ADVICE = 0.01
"""Advice is given, and contention is mentioned, if it is about at least this fraction of the step."""
_LEAST_IDLE = 0.05
"""Idle time is reported first if it is longer than the exposed time and than this fraction of the step."""
_NAMED_RUNS = 3
"""A sentence on more runs than this names only two of them."""
_LARGE_PART = 0.25
"""A collective, or a late rank, is named as the cause if it explains at least this fraction of the time in question."""


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
    if not step_ns or not contention_ns or contention_ns < _WORTH_ADVICE * step_ns:
        return _gain_text(summary)
    share = f"{milliseconds(contention_ns)} per step ({_fine_percent(contention_ns / step_ns)})"
    return f"{_gain_text(summary)} But it slows the compute that hides it: by {share}."


def slows(cost: Cost) -> bool:
    """Whether communication certainly slows compute: the interval of contention does not include 0."""
    return cost.contention_ns is not None and (cost.contention_low_ns or 0) > 0


def gain_in_short(summary: VariantSummary, cost: Cost | None, bounds: Bounds | None) -> str:
    """Return a short form of :func:`gain_headline`, which also says what a faster network could gain.

    It is for the short summary, where other lines report the blocking time.

    Args:
        summary: The figures of the run.
        cost: What communication costs a step; ``None`` if not measured.
        bounds: What a step could gain at most; ``None`` if not measured.
    """
    step_ns, exposed_ns, gain = summary.communicating_step_ns, summary.exposed_ns, summary.gain_at_most
    text = _gain_text(summary)
    if summary.reason or not step_ns or exposed_ns is None or gain is None or summary.host_waits:
        return text
    # The upper end of the interval, if the figure itself is not known.
    network_ns = (bounds.network_ns if bounds.network_ns is not None else bounds.high_ns) if bounds else None
    network = _fine_percent(network_ns / step_ns) if network_ns is not None else None
    faster = f", a faster network {network}" if network not in (None, _fine_percent(gain)) else ""
    # Nothing to gain from hiding: change the long sentence.
    if not gain:
        why = " (communication slows compute)" if faster and cost and slows(cost) else ""
        text = text.rstrip(".").replace("hiding all of it would gain", "hiding it gains")
        return f"{text}{faster.replace('network', 'network at most')}{why}."
    # The beginning of the long sentence: the exposed time.
    exposed, _, _ = text.partition(" is exposed")
    some = f" in {which}" if (which := communicating_steps_text(summary)) else ""
    limit_ns = summary.blocking_at_most_ns
    is_limited = summary.blocking_ns is None and limit_ns is not None and limit_ns < exposed_ns
    delays = f", and delays other work by at most {milliseconds(limit_ns or 0)}" if is_limited else ""
    return f"{exposed} is exposed{some}{delays}: hiding it gains at most {_fine_percent(gain)}{faster}."


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
        found = "what no phase holds, such as loading data, takes that time"
        return f"A rank neither computes nor communicates {share}: {found}."
    return f"The device is idle {share}: {reason or 'ddp-prof kernels shows what it waits for'}."


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
    schedule = f"no schedule can gain more than {milliseconds(bounds.schedule_ns)} per step"
    network = bounds.network_ns if bounds.network_ns is not None else bounds.high_ns
    if network is None:
        return f"{slows}; {schedule}."
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
    if summary.reason == NO_COMMUNICATION:
        return _silence_text(summary)
    if summary.reason:
        return f"Whether communication is exposed is not known: {summary.reason}."
    hidden = f"{percent(summary.overlap_ratio)} of communication is hidden"
    step_ns, exposed_ns, gain = summary.communicating_step_ns, summary.exposed_ns, summary.gain_at_most
    if not step_ns or exposed_ns is None or gain is None:
        why = "more communication is exposed in a step than the step lasts"
        if not step_ns:
            why = "the length of its steps is not known" if summary.steps else "the trace marks no steps"
        elif exposed_ns is None:
            why = "no step is known to have launched it"
        return f"{hidden}; what the rest costs per step is not known, because {why}."
    some = f" in {which}" if (which := communicating_steps_text(summary)) else ""
    share = f"{milliseconds(exposed_ns)} of a {milliseconds(step_ns)} step ({_fine_percent(exposed_ns / step_ns)})"
    is_exposed = f"{share} is exposed{some}"
    of_step = "such a step" if some else "a typical step"
    at_most = f"so hiding all of it would gain at most {_fine_percent(gain)} of {of_step}"
    stands = f"the step stands still for communication for {milliseconds(summary.blocking_ns or 0)}"
    if summary.host_waits:
        more = f"{stands}, and " if (summary.blocking_ns or 0) > exposed_ns else ""
        return f"{hidden}; {is_exposed}, and {more}the host waits for it, {at_most}."
    # Blocking is not known, but may have an upper limit.
    limit_ns = summary.blocking_at_most_ns
    if summary.blocking_ns is None and limit_ns != 0:
        if limit_ns is None or limit_ns >= exposed_ns:
            return f"{hidden}; {is_exposed}, {at_most}."
        delays = f"it delays other work by at most {milliseconds(limit_ns)}"
        return f"{hidden}; {is_exposed}, but {delays}, {at_most}."
    # Nothing waits for communication in a typical step.
    if not summary.blocking_ns:
        where = more = ""
        if summary.blocking_ns is None or summary.blocked_steps:
            where, more = " in a typical step", " there"
        if summary.blocked_steps:
            more += f", but {count_noun(summary.blocked_steps, 'step')} of all ranks stood still for it"
        return f"{hidden}; {is_exposed}, but nothing waits for it{where}: hiding all of it would gain nothing{more}."
    return f"{hidden}; {is_exposed}, and {stands}, {at_most}."


def _silence_text(summary: VariantSummary) -> str:
    """Say that nothing communicates, and why that may be so."""
    others = f", although its job has {summary.world_size} ranks" if (summary.world_size or 1) > 1 else ""
    if others or summary.ranks > 1:
        return f"Nothing in this trace is known to communicate{others}."
    if summary.world_size == 1:
        return "This process is the only rank of its job: it communicates with nobody, so there is nothing to hide."
    alone = "if its one process works alone, it communicates with nobody, and there is nothing to hide"
    return f"Nothing in this trace is known to communicate: {alone}."


def communicating_steps_text(summary: VariantSummary) -> str:
    """Say how many steps communicate, if not all do, as in gradient accumulation; else return an empty text.

    Medians of communication are over these steps only.
    """
    some, where = summary.communicating_steps, " in backward" if summary.others_communicate else ""
    return f"the {some} of {summary.steps} steps that communicate{where}" if 0 < some < summary.steps else ""


def _fine_percent(ratio: float) -> str:
    """Format a ratio in per cent, with one decimal below 10 %."""
    return f"{100 * ratio:.1f} %" if 0.0005 <= ratio < 0.0995 else percent(ratio)


def step_lengths(ranks: Iterable[RankOverlap]) -> dict[int, str]:
    """Return the length of each step as text, by the step's key; if ranks differ, from shortest to longest."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        for step in rank.marked_steps:
            if step.step_key is not None and step.length.ns is not None:
                found.setdefault(step.step_key, []).append(step.length.ns)
    ends = {key: (milliseconds(min(lengths)), milliseconds(max(lengths))) for key, lengths in found.items()}
    return {key: low if low == high else f"{low} to {high}" for key, (low, high) in ends.items()}


def root_cause_headline(
    cause: RootCause | None, reason: str | None = None, blocking: RunBlocking | None = None
) -> Headline:
    """Return what communication costs (blocking time, or else exposed time) and the main cause.

    Args:
        cause: The main cause of exposed time; ``None`` if nothing is exposed.
        reason: Why exposed time is not known; ``None`` if it is.
        blocking: How long work stood still for communication; ``None`` if that is not known.
    """
    if reason == NO_COMMUNICATION:
        return Headline("Nothing in this trace is known to communicate")
    if reason:
        return Headline(f"Whether communication is exposed is not known: {reason}")
    if blocking and not blocking.total_ns:
        return Headline("Nothing waited for communication", _nothing_blocked_text(blocking, cause))
    if blocking and blocking.steps and not blocking.typical_ns:
        which = f"{blocking.blocked_steps} of {blocking.steps} steps stood still for it"
        detail = f"{which}, for {milliseconds(blocking.total_ns)} in all."
        return Headline("Nothing waits for communication in a typical step", detail)
    exposed = _exposed_headline(cause)
    if blocking is None:
        return exposed
    if not blocking.steps:
        return Headline(
            f"Work stood still for communication for {milliseconds(blocking.total_ns)} in all", exposed.text
        )
    return Headline(
        f"A typical step stands still for communication for {milliseconds(blocking.typical_ns)}", exposed.text
    )


def cause_headline(cause: RootCause | None, reason: str | None, blocking: RunBlocking | None) -> str:
    """Return the main cause of exposed time, or why hiding it gains nothing.

    Arguments as in :func:`root_cause_headline`.
    """
    if reason:
        return f"not known: {reason}."
    if blocking and not blocking.total_ns:
        return f"none that costs time: {_nothing_blocked_text(blocking, None)}"
    return _exposed_headline(cause).text


def cause_in_short(cause: RootCause | None, reason: str | None, blocking: RunBlocking | None) -> tuple[str, str]:
    """Return the main cause of exposed time in short, and the advice that follows from it.

    The cause is that of :func:`cause_headline` without brackets and advice. The advice is empty if there is none; that
    a rank is late counts as advice, to look for what delays it. Arguments as in :func:`root_cause_headline`.
    """
    if not reason and blocking and not blocking.total_ns and blocking.least_slack_ns is not None:
        which = "the collective" if blocking.needed == 1 else f"each of {blocking.needed} collectives"
        return f"none: {which} ended {milliseconds(blocking.least_slack_ns)} or more before its use.", ""
    if reason or (blocking and not blocking.total_ns) or cause is None or not cause.exposed_ns:
        return cause_headline(cause, reason, blocking), ""
    share = percent(cause.pair_ns / cause.exposed_ns)
    text = f"{share} of exposed time is {_exposure_kind(cause)}: {_culprit_name(cause, shown=1)}."
    if _is_late(cause):
        return text, f"{_late_text(cause)} (ddp-prof skew)."
    return text, _advice(cause).strip()


def _nothing_blocked_text(blocking: RunBlocking, cause: RootCause | None) -> str:
    """Say why nothing stood still, and that hiding what is exposed would gain nothing.

    Either each collective ended before its use, with some slack, or nothing is known to need one.
    """
    exposed = cause.total_exposed_ns if cause else 0
    gain = f"so hiding the {milliseconds(exposed)} that are exposed in all would gain nothing" if exposed else ""
    if blocking.least_slack_ns is None:
        return f"nothing is known to need a collective{', ' + gain if gain else ''}."
    which = "collective" if blocking.needed == 1 else f"of {blocking.needed} collectives"
    ended = f"each {which} ended at least {milliseconds(blocking.least_slack_ns)} before what needs it could begin"
    return f"{ended}{', ' + gain if gain else ''}."


def _exposed_headline(cause: RootCause | None) -> Headline:
    """Return the main cause of the typical step's exposed time, with its collective and advice.

    Args:
        cause: The main cause; ``None`` if nothing is exposed.
    """
    if cause is None:
        return Headline("Compute hides all communication")
    if not cause.exposed_ns:
        detail = f"other steps expose {milliseconds(cause.total_exposed_ns)} in all."
        return Headline("Compute hides all communication of the typical step", detail, "; ")
    share, waited = percent(cause.pair_ns / cause.exposed_ns), cause.wait_ns / cause.exposed_ns
    whole = "the typical step's exposed time" if cause.steps > 1 else "exposed time"
    is_worth_a_word = waited >= _WORTH_A_WORD and cause.why != PEER_WAIT
    more = f" (a peer was missing in {percent(waited)} of the exposed time)" if is_worth_a_word else ""
    if _is_late(cause):
        more = f" ({_late_text(cause)})"
    return Headline(
        f"{share} of {whole} is {_exposure_kind(cause)}{more}",
        f"{_culprit_name(cause)}.{_advice(cause)}",
    )


def _late_text(cause: RootCause) -> str:
    """Say which rank is late, and how much shorter the step would be if it were not."""
    gain = milliseconds(cause.late_cost_ns or 0)
    return f"{cause.late_rank} is late: without that, and what queued behind it, the step is {gain} shorter"


WHEN = {
    FORWARD: "during forward",
    BACKWARD: "during backward",
    OPTIMIZER: "during the optimizer",
    TAIL: "tail",
    OUTSIDE: "outside of named phases",
    UNKNOWN_WHEN: "",
}
WHY = {
    BLOCKING_CALL: "in collectives launched after backward",
    LAUNCHED_LATE: "launched late by the host",
    QUEUED: "queued behind another collective",
    LATE_INPUT: "held up by late input",
    PEER_WAIT: "waiting for a peer",
    TRANSFER: "in transfer",
    UNKNOWN_WHY: "for a reason that is not known",
}
"""Why communication is exposed, and in ``WHEN`` when it is, as parts of a sentence."""


def _exposure_kind(cause: RootCause) -> str:
    """Return in words when and why the time is exposed: ``tail, queued behind another collective``."""
    when = f"{words}, " if (words := WHEN[cause.when]) else ""
    if cause.why == BLOCKING_CALL and cause.blocking == "compute_stream":
        return f"{when}in collectives on the stream of compute"
    if cause.why == TRANSFER and not cause.knows_wait:
        return f"{when}in transfer or waiting for a peer"
    return when + WHY[cause.why]


def exposed_words(collective: Collective) -> str:
    """Return when and why most of a collective's exposed time is exposed; ``all hidden`` if none is."""
    if not collective.exposed_by:
        return "all hidden"
    most = max(collective.exposed_by, key=lambda part: part.ns)
    why = WHY[most.why]
    if most.why == TRANSFER and collective.exposed_wait_ns is None:
        why += " or waiting for a peer"
    return ", ".join(filter(None, (WHEN[most.when], why)))


def _culprit_name(cause: RootCause, shown: int = _SHOWN_PARAMETERS) -> str:
    """Return which collective, or which collectives, the exposed time belongs to.

    Args:
        cause: The cause, with its main collective.
        shown: Most parameters of its bucket that are named.
    """
    if cause.why == BLOCKING_CALL and cause.blocking == "after_backward":
        count, alike = cause.collectives_per_step, cause.alike_per_step
        if alike == count:
            return (
                f"these are all {count} collectives of a step" if count > 1 else "this is the only collective of a step"
            )
        return f"{'this is' if alike == 1 else 'these are'} {alike} of {count} collectives of a step"
    if cause.when == TAIL:
        return f"{_name_collective(cause)}{_describe_collective(cause, shown)} {_lead_text(cause)}"
    share = cause.collective_ns / cause.pair_ns
    if share < _LARGE_PART:
        return f"spread over {cause.collectives_per_step} collectives, with at most {percent(share)} in one"
    which = f"{_name_collective(cause)}{_describe_collective(cause, shown)}"
    if share < 1:
        return f"{percent(share)} of that in {which}"
    return f"it is that of {which}" if cause.collectives_per_step == 1 else f"all of that in {which}"


def _advice(cause: RootCause) -> str:
    """Return what would shorten the exposed time, after a space; empty if nothing follows from the cause."""
    if cause.step_ns and cause.pair_ns < _WORTH_ADVICE * cause.step_ns:
        return f" That is {percent(cause.pair_ns / cause.step_ns)} of the step: hiding all of it would gain no more."
    # Whether waiting for peers is most of it.
    waits = 2 * cause.wait_ns > cause.exposed_ns or cause.why == PEER_WAIT
    skew = " 'ddp-prof skew' shows which rank arrives late." if waits and cause.knows_late else ""
    if _is_late(cause):
        waits, skew = True, f" 'ddp-prof skew' shows how late {cause.late_rank} is in other steps."
    if cause.times_per_step > 1 and cause.carries_gradients:  # fewer reductions also wait less often
        return (
            f" The step reduces this bucket {cause.times_per_step} times: if it accumulates gradients, no_sync() in "
            f"all passes but the last leaves the others out.{skew}"
        )
    if waits:
        return skew
    if cause.why == BLOCKING_CALL and cause.blocking == "compute_stream":
        return " Kernels that follow on that stream wait for them."
    if cause.why == BLOCKING_CALL and cause.carries_gradients and not cause.follows_own_bucket:
        return " If gradient hooks launched them, backward could hide part of their time."
    if cause.why == LAUNCHED_LATE:
        return " The host is behind the device: fewer, larger kernels and collectives would help."
    if cause.why == LATE_INPUT:
        return " Its input ended after its launch: an earlier launch would not help."
    if cause.why == QUEUED and cause.alike:
        return f" {alike_text(cause.alike)}"
    if cause.why == QUEUED:
        if_transfer = "" if cause.knows_wait else ", if these transfer rather than wait"
        return f" It waits for earlier collectives on its stream: fewer bytes or a faster link would help{if_transfer}."
    if cause.why == UNKNOWN_WHY:
        return " The clocks of host and device disagree, so it is not known when it was launched."
    if cause.when == TAIL and cause.carries_gradients:
        return f" {_tail_advice(cause)}"
    if cause.when == UNKNOWN_WHEN:
        if not cause.has_launch:
            return " Launches are not in the trace, so the phase is not known."
        return " The trace names no phases there: see --step-range and --backward-range."
    if cause.why == TRANSFER and cause.when != OUTSIDE:
        return " No compute ran meanwhile."
    return ""


def _is_late(cause: RootCause) -> bool:
    """Whether a late rank explains a large part of the exposed time.

    The exposed time is the sum over all ranks. So what one rank would gain without the lag is multiplied by the number
    of ranks that wait.
    """
    gained_ns = (cause.late_cost_ns or 0) * max(1, cause.ranks - 1)
    return cause.late_rank is not None and gained_ns >= _LARGE_PART * cause.exposed_ns


def _name_collective(cause: RootCause) -> str:
    """Name the collective: by its place in the step, or else by its bucket or index.

    Its operation is part of the name if the step has several operations.
    """
    has_others = cause.operation is not None and cause.same_operation_per_step < cause.collectives_per_step
    operation = (cause.operation or "").replace("_", "-") if has_others else ""
    kind = "bucket" if cause.bucket is not None else operation or "collective"
    if cause.same_operation_per_step == 1:
        which = f"the only {kind}"
    elif cause.is_last:
        which = f"the last {kind}{' of its pass' if cause.passes > 1 else ''}"
    else:
        which = collective_name(cause.index, cause.bucket)
    return f"the {operation} of {which}" if operation and cause.bucket is not None else which


def _describe_collective(cause: RootCause, most: int) -> str:
    """Return facts about the collective in brackets; empty if there are none.

    They are its size, the parameters in its bucket, and up to which number buckets (or collectives) are counted.

    Args:
        cause: The cause, with its main collective.
        most: Most parameters that are named.
    """
    is_numbered = not cause.is_last and cause.same_operation_per_step > 1
    highest = cause.collectives_per_step - 1 if cause.bucket is None else cause.last_bucket
    parts = [f"of 0 to {highest}"] if is_numbered and highest else []
    parts += [] if cause.bytes is None else [size(cause.bytes)]
    if cause.parameters:
        shown = ", ".join(cause.parameters[:most])
        more = len(cause.parameters) - most
        parts.append(f"{shown} and {more} more" if more > 0 else shown)
    return f" ({', '.join(parts)})" if parts else ""


def _lead_text(cause: RootCause) -> str:
    """Say how long before, or after, the end of backward the collective starts."""
    if cause.lead_ns is None:
        return "starts late"
    ends = "backward ends" if cause.passes < 2 else f"its pass of backward ends (median of {cause.passes})"
    if not cause.lead_ns:
        return f"starts when {ends}"
    side = "before" if cause.lead_ns >= 0 else "after"
    return f"starts {milliseconds(abs(cause.lead_ns))} {side} {ends}"


def _tail_advice(cause: RootCause) -> str:
    """Say what would shorten the tail: smaller buckets, fewer bytes, a faster link, or nothing of these."""
    if_transfer = "" if cause.knows_wait else ", if it is transfer"
    if cause.alike:
        return alike_text(cause.alike)
    if len(cause.parameters) == 1:
        return f"It holds a single parameter: only fewer bytes or a faster link would hide more of it{if_transfer}."
    if cause.exceeds_others and not cause.parameters:
        return (
            "It is more than twice as large as the others, so most of it is one parameter: only fewer bytes or a "
            f"faster link would hide more of it{if_transfer}."
        )
    if cause.bytes is not None and cause.bytes < FEW_BYTES:
        latency = "latency" if cause.knows_wait else "latency or waiting"
        return f"With so few bytes it is {latency}, which smaller buckets would not shorten."
    if cause.is_last and cause.has_others:
        return f"A smaller last bucket would shorten it{if_transfer}{_half_of_bucket(cause)}."
    return f"Smaller buckets would start earlier and hide more of it{if_transfer}."


def alike_text(alike: AlikeTimes) -> str:
    """Say that large and small messages of an operation take equally long, so bandwidth does not limit them."""
    operation = alike.operation.replace("_", "-")
    sizes, times = (size(alike.small_bytes), size(alike.large_bytes)), (alike.small_ns, alike.large_ns)
    return (
        f"It is no question of bandwidth: {operation}s of {sizes[0]} and {sizes[1]} take {milliseconds(times[0])} and "
        f"{milliseconds(times[1])} (medians), so neither fewer bytes nor a faster link would shorten them."
    )


def _half_of_bucket(cause: RootCause) -> str:
    return f": {cause.smaller_bucket_advice}" if cause.smaller_bucket_advice else ""


def skew_headline(skew: RunSkew) -> Headline:
    """Return which rank arrives last, in how many steps and by how much, and what that costs the others."""
    if skew.reason:
        return Headline(f"The skew is not known: {skew.reason}")
    steps = len(skew.steps)
    if not steps:
        why = "No collective of several ranks lies in a step" if skew.has_steps else "The trace marks no steps"
        return Headline(why, _last_at_collectives(skew), "; ")
    # No rank is last more often than chance explains.
    if skew.straggler is None:
        most = max((rank.last_steps for rank in skew.ranks), default=0)
        if not most:
            return Headline("No rank is late by more than the clocks' residual")
        if len(late := [rank for rank in skew.ranks if rank.last_steps]) == 1:
            return Headline(_arrives_last(late[0], steps), f"too few to exclude chance.{_older_text(late[0])}", "; ")
        names = [rank.name for rank in skew.ranks if rank.last_steps == most]
        which = (
            f"{names[0]} is last most often, in"
            if len(names) == 1
            else f"{len(names)} ranks are last most often, each in"
        )
        return Headline("No rank is last more often than chance explains", f"{which} {most} of {steps} steps.", "; ")
    # One rank is last more often than chance explains.
    last = skew.ranks[skew.straggler]
    detail = "what that costs is not known."
    if last.cost_ns == 0:
        detail = "compute hides all of the others' waiting."
    elif last.cost_when_last_ns is not None:
        costs = milliseconds(last.cost_when_last_ns)
        detail = f"such a step would be up to {costs} shorter without its lag (mean of these steps)."
    return Headline(_arrives_last(last, steps), f"{detail}{_older_text(last)}", "; ")


def late_text(skew: RunSkew) -> str:
    """Return in how many steps (or collectives) the latest rank arrives last; empty if no rank is the latest.

    It is a mark beside the rank's name.
    """
    if not (rank := skew.latest):
        return ""
    times, of, noun = rank.last_collectives, rank.matched, "at"
    if skew.steps:
        times, of, noun = rank.last_steps, len(skew.steps), "in"
    what = "step" if skew.steps else "collective"
    return (
        f"arrives last {noun} {times} of {count_noun(of, what)}" if of > 1 else f"arrives last {noun} the only {what}"
    )


def _older_text(rank: RankSkew) -> str:
    """Say, after a space, how late the rank was before its step began; empty if that is less than half of its lag."""
    before_ns, lag_ns = rank.lag_before_ns or 0, rank.lag_when_last_ns or 0
    if 2 * before_ns < lag_ns or not lag_ns:
        return ""
    return f" It is {milliseconds(before_ns)} late when the step begins: look for the cause in what comes before."


def _arrives_last(rank: RankSkew, steps: int) -> str:
    """Say in how many of the steps a rank arrives last, and how late."""
    where = f"in {rank.last_steps} of {steps} steps" if steps > 1 else "in the only step"
    return f"{rank.name[:1].upper()}{rank.name[1:]} arrives last {where}, {_lateness_text(rank, rank.last_steps)}"


def _lateness_text(rank: RankSkew, times: int) -> str:
    """Return how late a rank is when it is the last; the median, if it is last several ``times``."""
    return f"by {milliseconds(rank.lag_when_last_ns or 0)}{' (median)' if times > 1 else ''}"


def _last_at_collectives(skew: RunSkew) -> str:
    """Say which rank is last at most collectives; for traces without steps."""
    most = max(rank.last_collectives for rank in skew.ranks)
    latest = [rank for rank in skew.ranks if rank.last_collectives == most]
    if not most:
        return "no rank is late by more than the clocks' residual."
    if len(latest) > 1:
        return f"{len(latest)} ranks arrive last most often, each at {most} of {latest[0].matched} collectives."
    (last,) = latest
    where = f"at {most} of {last.matched} collectives" if last.matched > 1 else "at the only collective"
    return f"{last.name} arrives last {where}, {_lateness_text(last, most)}."


def hidden_shares_text(shares: Sequence[tuple[str, float | None]]) -> str:
    """Say how much of its communication each run hides; of many runs, which hide least and most.

    Args:
        shares: Label and overlap ratio (0 to 1) of each run; ``None`` if it is not known.
    """
    known = sorted((ratio, label) for label, ratio in shares if ratio is not None)
    if not known:
        names = ", ".join(label for label, _ in shares)
        return ": ".join(filter(None, (names, "how much communication hides is not known")))
    if len(shares) > _NAMED_RUNS:
        (least, worst), (most, best) = known[0], known[-1]
        if percent(least) == percent(most):
            return f"{percent(most)} of the communication hides behind compute"
        return f"From {percent(least)} ({worst}) to {percent(most)} ({best}) of the communication hides behind compute"
    (first, ratio), *others = shares
    rest = "".join(f", {label} {percent(ratio)}" for label, ratio in others)
    return f"{first} hides {percent(ratio)}{rest} of {'their' if others else 'its'} communication behind compute"


def describe_changes(summaries: Sequence[VariantSummary]) -> list[str]:
    """Return sentences on which run hides most and which is fastest; empty without a baseline among the runs."""
    base = next((summary for summary in summaries if summary.speedup == 1 and summary.label == BASELINE), None)
    others = [summary for summary in summaries if summary is not base and summary.speedup]
    known = [summary for summary in others if summary.overlap_ratio is not None]
    if base is None or not known:
        return []
    # First sentence: which run hides most.
    hides, fastest = max(known, key=lambda run: run.overlap_ratio or 0), max(others, key=lambda run: run.speedup or 0)
    hides_more = (hides.overlap_ratio or 0) > (base.overlap_ratio or 0)
    found = [_most_hidden_text(hides, known, base)] if hides_more else []
    if not hides_more and base.overlap_ratio is not None:
        share = percent(base.overlap_ratio)
        found = [f"No run hides more of its communication than {base.label}, which hides {share}."]
    # A faster run is named only if the speed-up is supported, and if the first sentence is not about it.
    if (fastest.speedup or 0) > 1 and fastest.supported and not (hides_more and fastest is hides):
        share = "" if fastest.overlap_ratio is None else f", and it hides {percent(fastest.overlap_ratio)}"
        if as_fast := [run.label for run in others if run is not fastest and run.is_as_fast_as(fastest)]:
            others_too = " and ".join(filter(None, (", ".join(as_fast[:-1]), as_fast[-1])))
            found.append(
                f"{fastest.label} has the shortest {_step_name(fastest).rstrip(',')}, "
                f"{_step_change_text(fastest)}{share}, "
                f"but is not clearly faster than {others_too}."
            )
        else:
            found.append(
                f"{fastest.label} is fastest: its {_step_name(fastest)} is {_step_change_text(fastest)}{share}."
                f"{_less_communication_text(fastest, base)}"
            )
    # Speed-ups that something else explains.
    if confounded := [summary for summary in summaries if summary.confounded_by]:
        names = ", ".join(run.label for run in confounded)
        found.append(
            f"No speed-up of {names} is reported: most of the difference from {base.label} is compute, which no "
            "variant changes, as on a machine that was busier."
        )
    if any(summary.device == "cpu" for summary in summaries):
        found.append(
            "These runs used CPUs, and their ranks share cores. Communication takes time from the compute that "
            "hides it, so hiding it saves less than its share suggests."
        )
    return found


def _most_hidden_text(run: VariantSummary, known: Sequence[VariantSummary], base: VariantSummary) -> str:
    """Say which run hides most, which runs hide as much, and how its step differs from the baseline's.

    Args:
        run: The run that hides most.
        known: All runs but the baseline whose overlap is known.
        base: The baseline.
    """
    most = percent(run.overlap_ratio)
    alike = [other.label for other in known if other is not run and percent(other.overlap_ratio) == most]
    others_too = ""
    if alike:
        names = " and ".join(filter(None, (", ".join(alike[:-1]), alike[-1])))
        others_too = f" ({names} {'hides' if len(alike) == 1 else 'hide'} as much)"
    change = _step_change_text(run, base.label)
    # A busier machine changes the overlap, too, and these captures are not made in turns.
    hides = f"In these captures {run.label} hides most, {most} of its communication{others_too}"
    return f"{hides}; its {_step_name(run)} is {change}."


def _less_communication_text(run: VariantSummary, base: VariantSummary) -> str:
    """Say, after a space, that a run communicates less than the baseline; empty if it does not."""
    if run.comm_ns is None or base.comm_ns is None or run.comm_ns >= base.comm_ns:
        return ""
    some = " that communicates" if any(map(communicating_steps_text, (run, base))) else ""
    exposed = ""
    if run.exposed_ns is not None and base.exposed_ns is not None:
        exposed = f"; {milliseconds(run.exposed_ns)} and {milliseconds(base.exposed_ns)} of that are exposed"
    return (
        f" It communicates for {milliseconds(round(run.comm_ns))} of a step{some}, "
        f"{base.label} for {milliseconds(round(base.comm_ns))}{exposed}."
    )


def _step_name(summary: VariantSummary) -> str:
    return "step, measured in turns," if summary.speedup_from == TURNS else "median step"


def _step_change_text(summary: VariantSummary, base: str = "") -> str:
    """Return how much shorter or longer the step of a run is than the baseline's.

    Args:
        summary: The run.
        base: Label of the baseline, if the text is to name it.
    """
    if summary.supported is False:
        return f"not clearly different{f' from that of {base}' if base else ''}"
    speedup = summary.speedup or 1.0
    if speedup == 1:
        return f"as long as that of {base}"
    change, interval = percent(abs(1 - 1 / speedup)), ""
    if summary.speedup_from == TURNS and summary.speedup_low and summary.speedup_high:
        low, high = sorted(abs(1 - 1 / end) for end in (summary.speedup_low, summary.speedup_high))
        interval = f" ({percent(low)} to {percent(high)})"
    return f"{change}{interval} {'shorter' if speedup > 1 else 'longer'}" + (f" than that of {base}" if base else "")


def outliers_text(outliers: Outliers) -> str:
    """Say which steps hold how much of the exposed time, and the overlap without them."""
    keys = [str(key) for key, _ in outliers.steps]
    one = len(keys) == 1
    held = milliseconds(sum(ns for _, ns in outliers.steps))
    whole = milliseconds(outliers.exposed_ns)
    which = f"step{'' if one else 's'} {'at position ' if outliers.are_positions else ''}{', '.join(keys)}"
    text = f"{which} alone hold{'s' if one else ''} {held} of {whole} exposed"
    if outliers.overlap_ratio is not None and outliers.overlap_ratio_without is not None:
        without = percent(outliers.overlap_ratio_without)
        text += f": overlap {percent(outliers.overlap_ratio)}, without {'it' if one else 'them'} {without}"
    return text
