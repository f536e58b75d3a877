"""Sentences about several runs: which hides most, which is fastest, and of which no speed-up is reported."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_prof.analyze.variants.comparison import COMPUTE, EXPLAINED_BY, TURNS, VariantSummary
from ddp_prof.columns import listed, milliseconds, percent
from ddp_prof.present.headlines import communicating_steps_text
from ddp_prof.variants import is_baseline

_NAMED_RUNS = 3
"""A sentence on more runs than this names only two of them."""


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
    base = next((summary for summary in summaries if summary.speedup == 1 and is_baseline(summary.label)), None)
    others = [summary for summary in summaries if summary is not base and summary.speedup]
    known = [summary for summary in others if summary.overlap_ratio is not None]
    if base is None or not known:
        return []
    sentences = []
    hides, fastest = max(known, key=lambda run: run.overlap_ratio or 0), max(others, key=lambda run: run.speedup or 0)
    hides_more = (hides.overlap_ratio or 0) > (base.overlap_ratio or 0)
    if hides_more:
        sentences.append(_most_hidden_text(hides, known, base))
    elif base.overlap_ratio is not None:
        share = percent(base.overlap_ratio)
        sentences.append(f"No run hides more of its communication than {base.label}, which hides {share}.")
    # A faster run is named only if the speed-up is supported, and if the first sentence is not about it.
    if (fastest.speedup or 0) > 1 and fastest.supported and not (hides_more and fastest is hides):
        sentences.append(_fastest_text(fastest, others, base))
    sentences += _unreported_texts(summaries, base)
    if any(summary.device == "cpu" for summary in summaries):
        sentences.append(
            "These runs used CPUs, and their ranks share cores. Communication takes time from the compute that "
            "hides it, so hiding it saves less than its share suggests."
        )
    return sentences


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
        others_too = f" ({listed(alike)} {'hides' if len(alike) == 1 else 'hide'} as much)"
    change = _step_change_text(run, base.label)
    # A busier machine changes the overlap, too, and these captures are not made in turns.
    hides = f"In these captures {run.label} hides most, {most} of its communication{others_too}"
    return f"{hides}; its {_step_name(run)} is {change}."


def _fastest_text(run: VariantSummary, others: Sequence[VariantSummary], base: VariantSummary) -> str:
    """Return a sentence on the fastest run, and on those of the others that are as fast."""
    share = "" if run.overlap_ratio is None else f", and it hides {percent(run.overlap_ratio)}"
    as_fast = [other.label for other in others if other is not run and other.is_as_fast_as(run)]
    if not as_fast:
        return (
            f"{run.label} is fastest: its {_step_name(run)} is {_step_change_text(run)}{share}."
            f"{_less_communication_text(run, base)}"
        )
    return (
        f"{run.label} has the shortest {_step_name(run).rstrip(',')}, {_step_change_text(run)}{share}, "
        f"but is not clearly faster than {listed(as_fast)}."
    )


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


def _unreported_texts(summaries: Sequence[VariantSummary], base: VariantSummary) -> list[str]:
    """Return sentences on runs without a speed-up: other jobs, and differences that something else explains."""
    texts = [
        f"No speed-up of {run.label} is reported: {base.label} is another job ({run.other_job})."
        for run in summaries
        if run.other_job and run.device == base.device
    ]
    for cause, words in EXPLAINED_BY.items():
        if names := ", ".join(run.label for run in summaries if run.confounded_by == cause):
            busier = ", as on a machine that was busier" if cause == COMPUTE else ""
            texts.append(
                f"No speed-up of {names} is reported: most of the difference from {base.label} is {words}{busier}."
            )
    return texts


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
    found = f"{change}{interval} {'shorter' if speedup > 1 else 'longer'}" + (f" than that of {base}" if base else "")
    return f"{found}, which so few steps do not show to be more than chance" if summary.supported is None else found


def other_job_texts(summaries: Sequence[VariantSummary]) -> list[str]:
    """Say for each run of another job than that of the baseline, or else of the first run, what differs."""
    against = next((run.label for run in summaries if is_baseline(run.label)), summaries[0].label if summaries else "")
    return [f"{run.label} is another job than {against}: {run.other_job}" for run in summaries if run.other_job]
