"""Sentences about which rank arrives last, and what that costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_prof.columns import capitalized, count_noun, milliseconds
from ddp_prof.present.headlines import Headline

if TYPE_CHECKING:
    from ddp_prof.analyze.collectives.skew import LateGroup, RankSkew, RunSkew


def skew_headline(skew: RunSkew) -> Headline:
    """Return which rank arrives last, in how many steps and by how much, and what that costs the others."""
    if skew.reason:
        return Headline(f"The skew is not known: {skew.reason}")
    steps = len(skew.steps)
    if not steps:
        why = "No collective of several ranks lies in a step" if skew.has_steps else "The trace marks no whole step"
        return Headline(why, _last_at_collectives(skew), "; ")
    if skew.group:
        return _group_headline(skew, skew.group)
    # No rank is last more often than chance explains.
    if skew.straggler is None:
        most = max((rank.last_steps for rank in skew.ranks), default=0)
        if not most:
            return Headline("No rank is late by more than the clocks' residual")
        if len(late := [rank for rank in skew.ranks if rank.last_steps]) == 1:
            is_usual = 2 * late[0].last_steps > steps  # what one step of many shows is no habit
            older = _older_text(late[0]) if is_usual else ""
            return Headline(_arrives_last(late[0], steps), f"so few steps do not exclude chance.{older}", "; ")
        names = [rank.name for rank in skew.ranks if rank.last_steps == most]
        if len(names) == len(skew.ranks):
            which = f"each of the {len(names)} ranks is last"
        elif len(names) > 1:
            which = f"{len(names)} ranks are last most often, each"
        else:
            which = f"{names[0]} is last most often,"
        detail = f"{which} in {most} of {steps} steps.{_in_turns_text(skew)}"
        return Headline("No rank is last more often than chance explains", detail, "; ")
    # One rank is last more often than chance explains.
    last = skew.ranks[skew.straggler]
    detail = "what that costs is not known."
    if last.cost_ns == 0:
        detail = "compute hides all of the others' waiting."
    elif last.cost_when_last_ns is not None:
        costs = milliseconds(last.cost_when_last_ns)
        detail = f"such a step would be up to {costs} shorter without its lag{skew.or_more} (mean of these steps)."
    return Headline(_arrives_last(last, steps), f"{detail}{_older_text(last)}{_doubt_text(skew, 'It')}", "; ")


def _group_headline(skew: RunSkew, group: LateGroup) -> Headline:
    """Return which ranks arrive last together, in how many steps and by how much, and what that costs the others."""
    which = skew.names_of(group.ranks)
    where = f"in {group.steps} of {count_noun(len(skew.steps), 'step')}"
    claim = f"{capitalized(which)} arrive last together {where}, by {milliseconds(group.lag_ns)} (median)"
    detail = "what that costs is not known."
    if group.cost_ns == 0:
        detail = "compute hides all of the others' waiting."
    elif group.cost_ns is not None:
        detail = (
            f"such a step would be up to {milliseconds(group.cost_ns)} shorter without their lag{skew.or_more} "
            "(mean of these steps)."
        )
    return Headline(claim, f"{detail}{_doubt_text(skew, 'They')}", "; ")


def _doubt_text(skew: RunSkew, who: str) -> str:
    """Say, after a space, why those that arrive last may not be the cause; empty if nothing says so."""
    return f" {who} {skew.doubt}." if skew.doubt else ""


def _in_turns_text(skew: RunSkew) -> str:
    """Say, after a space, what it costs that ranks are late in turns; empty if that is nothing, or not known."""
    if skew.in_turns:
        gain = f"up to {milliseconds(skew.in_turns.cost_ns)} shorter{skew.or_more}"
        return f" Without the lag of its late ranks, a step would be {gain} (mean of all steps)."
    costs = [step.cost_ns for step in skew.steps if step.cost_ns is not None]
    if len(costs) < len(skew.steps) or not any(costs):
        return ""
    mean = milliseconds(round(sum(costs) / len(costs)))
    return f" Without the lag of its last rank, a step would be up to {mean} shorter{skew.or_more} (mean of all steps)."


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
    return f"{capitalized(rank.name)} arrives last {where}, {_lateness_text(rank, rank.last_steps)}"


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
        matched = {rank.matched for rank in latest}  # ranks of subgroups may take part in fewer
        where = f"{most} of {matched.pop()} collectives" if len(matched) == 1 else count_noun(most, "collective")
        return f"{len(latest)} ranks arrive last most often, each at {where}."
    (last,) = latest
    where = f"at {most} of {last.matched} collectives" if last.matched > 1 else "at the only collective"
    return f"{last.name} arrives last {where}, {_lateness_text(last, most)}."
