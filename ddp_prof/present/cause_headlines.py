"""Sentences about why communication is exposed: the main cause, its collective, and the advice that follows."""

from __future__ import annotations

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
from ddp_prof.analyze.statistics import WORTH
from ddp_prof.analyze.why_unknown import LOST_LAUNCHES, NO_COMMUNICATION
from ddp_prof.columns import milliseconds, percent, size
from ddp_prof.present.headlines import Headline
from ddp_prof.present.text import collective_name
from ddp_prof.range_names import BACKWARD, FORWARD, OPTIMIZER

if TYPE_CHECKING:
    from ddp_prof.analyze.collectives.collective import Collective
    from ddp_prof.analyze.collectives.results import RunBlocking
    from ddp_prof.analyze.collectives.sizes import AlikeTimes
    from ddp_prof.analyze.root_cause import RootCause

_SHOWN_PARAMETERS = 2
"""Most parameters that a sentence names; more are only counted."""
_WORTH_A_WORD = 0.05
"""Waiting for peers is mentioned if it is at least this fraction of the exposed time."""
_LARGE_PART = 0.25
"""A collective is named as the cause if it explains at least this fraction of the time in question."""


def root_cause_headline(
    cause: RootCause | None, reason: str | None = None, blocking: RunBlocking | None = None
) -> Headline:
    """Return what communication costs (blocking time, or else exposed time) and the main cause.

    Args:
        cause: The main cause of exposed time; ``None`` if nothing is exposed.
        reason: Why exposed time, or its cause, is not known; ``None`` if it is.
        blocking: How long work stood still for communication; ``None`` if that is not known.
    """
    if reason == NO_COMMUNICATION:
        return Headline("Nothing in this trace is known to communicate")
    if reason == LOST_LAUNCHES:
        return Headline(f"What exposes communication is not known: {reason}")
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
    who = "A stream of a typical step" if blocking.exceeds_exposed else "A typical step"
    return Headline(f"{who} stands still for communication for {milliseconds(blocking.typical_ns)}", exposed.text)


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
    if cause.is_late:
        return text, f"{_late_text(cause)} (ddp-prof skew)."
    said = _advice(cause).strip()
    return (f"{text} {said}", "") if said in _FACTS or _is_small(cause) else (text, said)


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
    if cause.is_late:
        more = f" ({_late_text(cause)})"
    return Headline(
        f"{share} of {whole} is {_exposure_kind(cause)}{more}",
        f"{_culprit_name(cause)}.{_advice(cause)}",
    )


def _late_text(cause: RootCause) -> str:
    """Say which rank is late, and how much shorter the step would be if it were not."""
    gain = milliseconds(cause.late_cost_ns or 0)
    late = f"{cause.late_rank} {'is' if cause.late_ranks == 1 else 'are'} late"
    late += "" if cause.is_usually_late else " in this step"
    return f"{late}: without that, and what queued behind it, the step is {gain} shorter"


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


_NO_COMPUTE = "No compute ran meanwhile."
_STREAM_WAITS = "Kernels that follow on that stream wait for them."
_NO_LAUNCH = "What launched it is not known, so the phase is not known, either."
_OTHER_CLOCK = "The clocks of host and device disagree, so it is not known when it was launched."
_IN_GRAPH = (
    "A CUDA graph launched it together with compute, so the trace does not tell whether it waited for earlier "
    "collectives or for its input."
)
_FACTS = (_NO_COMPUTE, _STREAM_WAITS, _NO_LAUNCH, _OTHER_CLOCK, _IN_GRAPH)
"""What is said where a cause has no advice: it belongs to the cause."""


def _exposure_kind(cause: RootCause) -> str:
    """Return in words when and why the time is exposed: ``tail, queued behind another collective``."""
    when = f"{words}, " if (words := WHEN[cause.when]) else ""
    if cause.why == BLOCKING_CALL and cause.blocking == "compute_stream":
        return f"{when}in collectives on the stream of compute"
    if cause.why == TRANSFER and not cause.knows_wait:
        return f"{when}in transfer or waiting for a peer"
    return when + WHY[cause.why]


def exposed_words(collective: Collective) -> str:
    """Return when and why most of a collective's exposed time is exposed; ``all hidden`` if none is.

    Time that several collectives share is counted with one of them; of the others it is not known here whether compute
    hides it.
    """
    if not collective.exposed_by:
        is_hidden = collective.overlapped_ns >= collective.duration_ns
        return "all hidden" if is_hidden else "hidden, or counted with another collective"
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


def _is_small(cause: RootCause) -> bool:
    """Return whether the cause explains too little of the step for advice."""
    return bool(cause.step_ns) and cause.pair_ns < WORTH * (cause.step_ns or 0)


_SHOWS_WHO = " 'ddp-prof skew' shows whether the same rank is late each time."


def _advice(cause: RootCause) -> str:
    """Return what would shorten the exposed time, after a space; empty if nothing follows from the cause."""
    if _is_small(cause):
        return f" That is {percent(cause.pair_ns / (cause.step_ns or 1))} of the step."
    # Whether waiting for peers is most of it.
    waits = 2 * cause.wait_ns > cause.exposed_ns or cause.why == PEER_WAIT
    skew = _SHOWS_WHO if waits and cause.knows_late else ""
    if cause.is_late:
        who = f"how late {cause.late_rank} {'is' if cause.late_ranks == 1 else 'are'}"
        waits, skew = True, f" 'ddp-prof skew' shows {who if cause.is_usually_late else 'who is late'} in other steps."
    if cause.times_per_step > 1 and cause.carries_gradients:  # fewer reductions also wait less often
        what = f"The step reduces this bucket {cause.times_per_step} times: if it"
        if cause.bucket is None:
            what = f"The {cause.times_per_step} passes of backward of the step reduce the same sizes: if the step"
        return f" {what} accumulates gradients, no_sync() in all passes but the last leaves the others out.{skew}"
    if waits:
        return skew
    if cause.why == BLOCKING_CALL and cause.blocking == "compute_stream":
        return f" {_STREAM_WAITS}"
    if cause.why == BLOCKING_CALL and cause.carries_gradients and not cause.follows_own_bucket:
        if cause.collectives_per_step == 1:
            return " If gradient hooks launched it in several buckets, backward could hide part of its time."
        one, its = ("it", "its") if cause.alike_per_step == 1 else ("them", "their")
        return f" If gradient hooks launched {one}, backward could hide part of {its} time."
    if cause.why == LAUNCHED_LATE:
        return " The host is behind the device: fewer, larger kernels and collectives would help."
    if cause.why == LATE_INPUT:
        return " Its input ended after its launch: an earlier launch would not help."
    if cause.why == QUEUED and cause.alike:
        return f" {alike_text(cause.alike)}"
    if cause.why == QUEUED:
        # What it is queued behind may wait for a peer, although this part of the time is no wait itself.
        is_waited_for = cause.wait_ns >= _WORTH_A_WORD * cause.exposed_ns
        if_transfer = ", if these transfer rather than wait" if is_waited_for or not cause.knows_wait else ""
        skew = _SHOWS_WHO if is_waited_for and cause.knows_late else ""
        if cause.are_many_and_small:
            return (
                " It waits for earlier collectives on its stream, which are many and small: each costs its latency, so "
                f"fewer, larger ones would help{if_transfer}.{skew}"
            )
        return (
            " It waits for earlier collectives on its stream: fewer bytes or a faster link would help"
            f"{if_transfer}.{skew}"
        )
    if cause.why == UNKNOWN_WHY and cause.is_in_graph:
        return f" {_IN_GRAPH}"
    if cause.why == UNKNOWN_WHY:
        return f" {_OTHER_CLOCK}"
    if cause.when == TAIL and cause.carries_gradients:
        return f" {_tail_advice(cause)}"
    if cause.when == UNKNOWN_WHEN:
        if not cause.has_launch:
            return f" {_NO_LAUNCH}"
        return " No phase is known there: see the notes, --step-range and --backward-range."
    if cause.why == TRANSFER and cause.when != OUTSIDE:
        return f" {_NO_COMPUTE}"
    return ""


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
    ends = "backward ends" if cause.passes < 2 else "its pass of backward ends"
    ends += f" (median of {cause.lead_passes})" if cause.lead_passes > 1 else ""
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
    if cause.is_last_bucket and cause.follows_another:
        return (
            "Its stream is busy with earlier collectives until it starts: smaller buckets would help only as far as "
            f"the first bucket starts earlier; fewer bytes or a faster link would help{if_transfer}."
        )
    if cause.held_up_ns * cause.ranks >= _LARGE_PART * cause.collective_ns > 0:
        return (
            f"Between its launch and its start earlier collectives run for {milliseconds(cause.held_up_ns)}: "
            f"fewer bytes or a faster link would help{if_transfer}."
        )
    if cause.is_last_bucket:
        size_text = f": {cause.smaller_bucket_advice}" if cause.smaller_bucket_advice else ""
        return f"A smaller last bucket would shorten it{if_transfer}{size_text}."
    return f"Smaller buckets would start earlier and hide more of it{if_transfer}."


def alike_text(alike: AlikeTimes) -> str:
    """Say that large and small messages of an operation take equally long, so bandwidth does not limit them."""
    operation = alike.operation.replace("_", "-")
    sizes, times = (size(alike.small_bytes), size(alike.large_bytes)), (alike.small_ns, alike.large_ns)
    return (
        f"Bandwidth does not limit it: {operation}s of {sizes[0]} and {sizes[1]} take {milliseconds(times[0])} and "
        f"{milliseconds(times[1])} (medians), so neither fewer bytes nor a faster link would shorten them."
    )
