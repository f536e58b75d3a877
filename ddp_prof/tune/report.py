"""Makes the texts of ``ddp-prof tune``: a sentence and a row for each try, the line to write, the plan of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_prof.benchmark.findings import LEAST_PAIRS
from ddp_prof.columns import Row, count_noun
from ddp_prof.errors import printable
from ddp_prof.present.columns import in_percent, ms
from ddp_prof.present.table import SCHEMA, TableView
from ddp_prof.tune.measure import Program
from ddp_prof.tune.sequential import Gain, smallest_shown
from ddp_prof.tune.session import Limits, Tuning
from ddp_prof.tune.store import Trial
from ddp_prof.tune.tries import TODAY
from ddp_prof.tune.verdicts import (
    CHANGED,
    EQUAL,
    FAILS,
    FASTER,
    SAME,
    SLOWER,
    TODAYS,
    UNSEEN,
    VARY,
    Verdict,
    rivals_of,
)
from ddp_prof.tune.why import BEYOND, UNKNOWN, WITHIN, Foreseen, Why

HOW_TO_READ = (
    "gain: what a try takes off the step of today's settings, by pairs of runs of one round; low, high: 95 % interval, "
    "valid for all tries together, and whenever a try ends"
)
IN_PROCESS = (
    "a pair is two blocks of steps of one run, which trains on from block to block (--in-process): losses are "
    "compared by one run by itself, of each try that is faster"
)
SPREADS = (0.003, 0.01, 0.03)
"""Spreads of pairs for a plan before enough pairs are known: a quiet GPU, a quiet CPU, and other work beside."""
LOSSES = {
    SAME: "same losses",
    VARY: "its losses vary from run to run, so they cannot be compared: seed the program",
    UNSEEN: "its losses were not compared",
}
CHANGES_NUMERICS = "but it changes the gradients: so few steps do not show how it affects convergence"


def sentence_of(verdict: Verdict, worth: float) -> str:
    """Return a sentence on a try, with the interval of its gain.

    ``worth`` is the smallest gain that is worth having, as a fraction of a step.
    """
    label, gain = verdict.tried.label, verdict.gain
    if verdict.outcome == TODAYS:
        return f"{label}: the program has it already"
    if verdict.outcome == FAILS:
        return f"{label}: failed: {verdict.reason}"
    if gain is None:
        failed = f", as its run failed: {verdict.reason}" if verdict.reason else ""
        return f"{label}: cannot be told: no round is complete{failed}"
    if verdict.outcome == FASTER:
        return f"{label}: {_percent(gain.value)} faster ({_interval(gain)}), {_losses(verdict)}"
    if verdict.outcome == SLOWER:
        return f"{label}: {_percent(-gain.value)} slower ({_interval(gain, sign=-1)})"
    if verdict.outcome == EQUAL:
        return f"{label}: no difference of {_percent(worth)} or more (gain {_interval(gain)})"
    # It cannot be told: say what more rounds could show.
    could = f"; a verdict needs {LEAST_PAIRS}" if gain.pairs < LEAST_PAIRS else ""
    if verdict.more and verdict.could_show is not None:
        could = f"; {verdict.more} more rounds could show a gain of {_percent(verdict.could_show)}"
    known = f"gain {_interval(gain)}" if gain.low is not None else f"{gain.pairs} pair{'s' * (gain.pairs != 1)}"
    return f"{label}: cannot be told ({known}){could}"


def _losses(verdict: Verdict) -> str:
    """Return the end of a sentence: whether the try changes losses or gradients."""
    if verdict.losses == CHANGED:
        by = "" if verdict.loss_difference is None else f" by {verdict.loss_difference:.1g} of their size"
        return f"but its losses differ{by}: not recommended"
    said = LOSSES[verdict.losses]
    return f"{said}, {CHANGES_NUMERICS}" if verdict.tried.changes_numerics else said


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _interval(gain: Gain, sign: int = 1) -> str:
    """Return the interval of a gain in per cent, ``1.2 to 2.5``; with ``sign=-1`` that of the loss."""
    ends = sorted(100 * sign * end for end in (gain.low, gain.high) if end is not None)
    return f"{ends[0]:.1f} to {ends[1]:.1f}"


def conclusion_of(tuning: Tuning) -> list[str]:
    """Return lines that recommend what to write for the best try, or say that there is none, and what else may do."""
    best = tuning.best
    numeric = [
        f"faster, but with other gradients, so only if the training allows them: {verdict.tried.line}"
        for verdict in tuning.verdicts
        if verdict.outcome == FASTER and verdict.losses != CHANGED and verdict.tried.changes_numerics
    ]
    if best is None:
        changes = any(verdict.outcome == FASTER and verdict.losses == CHANGED for verdict in tuning.verdicts)
        left = " and ".join([*(["the gradients"] * bool(numeric)), *(["the losses"] * changes)])
        what = f"no try that leaves {left} as they are" if left else "no try"
        return [f"nothing recommended: {what} is known to be faster than today's settings", *numeric]
    lines = [f"recommended: {best.tried.line}"]
    if rivals := rivals_of(best, tuning.verdicts):
        names = ", ".join(rival.tried.label for rival in rivals)
        lines.append(f"as good, as far as these rounds tell: {names}")
    return lines + numeric


def sentences_of(tuning: Tuning) -> list[str]:
    """Return a sentence on each try, then the lines of the conclusion."""
    return [*(sentence_of(each, tuning.limits.worth) for each in tuning.verdicts), *conclusion_of(tuning)]


def place_of(tuning: Tuning) -> str:
    """Return where the tuning ran: number of ranks, backend, device and version of torch."""
    today = tuning.today
    ranks = count_noun(today.world or 0, "rank")
    return " · ".join(filter(None, (ranks, today.backend, today.device, f"torch {today.torch}")))


def rows_of(tuning: Tuning) -> list[Row]:
    return [_today_row(tuning), *(_row(verdict) for verdict in tuning.verdicts)]


def tuning_view(tuning: Tuning, why: Why | None = None) -> TableView:
    """Return the result as sentences, a table with notes, and a JSON document."""
    notes = [HOW_TO_READ, f"{count_noun(tuning.rounds, 'round')}: {tuning.ended}", place_of(tuning)]
    notes += [IN_PROCESS] if tuning.program.in_process else []
    said = map(printable, sentences_of(tuning))
    return TableView("\n".join(said), rows_of(tuning), list(map(printable, notes)), _document(tuning, why))


NOT_FORESEEN = "the capture of today's settings does not predict this gain"
HOW_TO_READ_WHY = (
    "measured: by pairs of runs in which nothing is recorded; the other rows are from the capture of today's settings "
    "alone, so they could have been known before"
)
AGREES = {
    BEYOND: ("more than that: something else became shorter, too", "the intervals exclude each other"),
    WITHIN: ("within that", "the intervals overlap"),
    UNKNOWN: ("", ""),
}
"""For each result of a comparison with the measured gain, the words for a bound and the words for an expectation."""


def foreseen_text(foreseen: Foreseen, measured: Gain) -> str | None:
    """Return a sentence that compares what was foreseen with what was measured; ``None`` if nothing was foreseen."""
    if foreseen.gain is None:
        return None
    foretold = _with_interval(foreseen.gain, foreseen.low, foreseen.high)
    said = f"{foreseen.source}: {'at most ' if foreseen.is_bound else ''}{foretold}"
    agrees = AGREES[foreseen.compare(measured)][not foreseen.is_bound]  # False is index 0: the words for a bound
    found = _with_interval(measured.value, measured.low, measured.high)
    return f"{said}; measured {found}" + (f": {agrees}" if agrees else "")


def _with_interval(share: float, low: float | None, high: float | None) -> str:
    """Return a fraction in per cent, with its interval if there is one: ``2.1 % (1.8 to 2.4)``."""
    known = "" if low is None or high is None else f" ({100 * low:.1f} to {100 * high:.1f})"
    return f"{_percent(share)}{known}"


def why_view(why: Why) -> TableView:
    """Return a table of the best try's gain: first as measured, then as each source foresaw it."""
    said = [text for one in why.foreseen if (text := foreseen_text(one, why.measured))]
    measured = {
        "source": f"measured, {count_noun(why.measured.pairs, 'pair')}",
        "gain_%": in_percent(why.measured.value),
        "gain_low_%": in_percent(why.measured.low),
        "gain_high_%": in_percent(why.measured.high),
        "why": None,
    }
    rows = [
        {
            "source": f"{one.source}{', at most' if one.is_bound else ''}",
            "gain_%": in_percent(one.gain),
            "gain_low_%": in_percent(one.low),
            "gain_high_%": in_percent(one.high),
            "why": one.reason,
        }
        for one in why.foreseen
    ]
    title = [f"why {why.tried.label} is faster:", *(said or [NOT_FORESEEN])]
    return TableView("\n".join(map(printable, title)), [measured, *rows], [HOW_TO_READ_WHY], {})


def nothing_view(reasons: Sequence[str]) -> TableView:
    """Return what is shown if there is nothing to try: the reasons."""
    document = {"schema": SCHEMA, "tries": [], "recommended": None, "write": None, "ended": "; ".join(reasons)}
    return TableView("", [], [printable(reason) for reason in reasons], document)


def _today_row(tuning: Tuning) -> Row:
    """Return the row of today's settings, which have no gain."""
    return {
        "try": TODAY.label,
        "outcome": None,
        "step_ms": ms(tuning.today_ns),
        **dict.fromkeys(("gain_%", "gain_low_%", "gain_high_%")),
        "pairs": None,
        "losses": None,
        "write": None,
    }


def _row(verdict: Verdict) -> Row:
    """Return the row of a try; a gain without an interval, by which noise may pass for a gain, is left out."""
    gain = verdict.gain
    is_judged = gain is not None and gain.low is not None
    return {
        "try": verdict.tried.label,
        "outcome": verdict.outcome,
        "step_ms": ms(verdict.step_ns),
        "gain_%": in_percent(gain.value if gain and is_judged else None),
        "gain_low_%": in_percent(gain.low if gain else None),
        "gain_high_%": in_percent(gain.high if gain else None),
        "pairs": gain.pairs if gain else 0,
        "losses": verdict.losses,
        "write": verdict.tried.line,
    }


def _document(tuning: Tuning, why: Why | None) -> dict[str, Any]:
    """Return the JSON document of a tuning; keys may be added to it, never renamed."""
    today, best = tuning.today, tuning.best
    return {
        "schema": SCHEMA,
        "command": list(tuning.program.command),
        "warmup": tuning.program.warmup,
        "steps": tuning.program.steps,
        "in_process": tuning.program.in_process,
        "worth": tuning.limits.worth,
        "rounds": tuning.rounds,
        "ended": tuning.ended,
        "world_size": today.world,
        "backend": today.backend,
        "device": today.device,
        "torch": today.torch,
        "today_step_ns": tuning.today_ns,
        "tries": [_try_document(verdict, tuning.limits.worth) for verdict in tuning.verdicts],
        "recommended": best.tried.label if best else None,
        "write": best.tried.line if best else None,
        "foreseen": [{**asdict(one), "measured": one.compare(why.measured)} for one in why.foreseen] if why else None,
    }


def _try_document(verdict: Verdict, worth: float) -> dict[str, Any]:
    """Return the part of the JSON document about one try."""
    gain = verdict.gain
    return {
        "try": verdict.tried.label,
        "settings": {setting.name: setting.value for setting in verdict.tried.settings},
        "write": verdict.tried.line,
        "outcome": verdict.outcome,
        "gain": gain.value if gain else None,
        "gain_low": gain.low if gain else None,
        "gain_high": gain.high if gain else None,
        "pairs": gain.pairs if gain else 0,
        "step_ns": verdict.step_ns,
        "losses": verdict.losses,
        "changes_numerics": verdict.tried.changes_numerics,
        "loss_difference": verdict.loss_difference,
        "reason": verdict.reason,
        "more_rounds": verdict.more,
        "could_show": verdict.could_show,
        "sentence": sentence_of(verdict, worth),
    }


def plan_lines(limits: Limits, first: Trial, verdicts: Sequence[Verdict]) -> list[str]:
    """Return lines about how long a tuning would take and which gains it could show.

    Args:
        limits: When it ends.
        first: A run with today's settings, which tells how long a run takes.
        verdicts: What is known of each try already.
    """
    counted = [verdict for verdict in verdicts if verdict.outcome != TODAYS]
    if not counted:
        return ["the program has all of these settings already: there is nothing to run"]
    wanted = [verdict for verdict in counted if verdict.is_open]
    if not wanted:
        return ["all tries are decided already: there is nothing to run, and without --plan the answer is shown"]
    runs = len(wanted) + 1  # of a round: the tries and today's settings
    kept = min(verdict.gain.pairs if verdict.gain else 0 for verdict in wanted)
    further = max(0, min(limits.rounds - kept, int(60 * limits.minutes / (runs * first.wall_s))))
    rounds = kept + further
    tries = "1 try" if len(wanted) == 1 else f"{len(wanted)} tries"
    before = f", beside the {kept} of before" if kept else ""
    most = f"{count_noun(further, 'round')}, {count_noun(further * runs, 'run')}"
    takes = _duration(further * runs * first.wall_s)
    given = f"--rounds {limits.rounds}, --minutes {limits.minutes:g}"
    lines = [
        f"{tries} and today's settings: {runs} runs a round, of about {first.wall_s:.0f} s each",
        f"at most {most}, {takes}{before} ({given}); a try that is decided ends earlier",
    ]
    if rounds < LEAST_PAIRS:
        missing = LEAST_PAIRS - kept
        takes = _duration(missing * runs * first.wall_s)
        lines.append(f"too few: a verdict needs {LEAST_PAIRS} rounds; {missing} take {takes}")
        return lines
    # What could be shown: by the spread of the pairs that are known, else by typical spreads.
    known = [verdict.gain.spread for verdict in wanted if verdict.gain and verdict.gain.spread is not None]
    for spread in [max(known)] if known else SPREADS:
        shown = smallest_shown(spread, rounds, len(counted))
        source = "as those measured so far" if known else f"by {_percent(spread)}"
        lines.append(f"{rounds} rounds can show a gain of {_percent(shown)}, if pairs of runs vary {source}")
    return lines


def _duration(seconds: float) -> str:
    """Return a duration in seconds, or in minutes if it has some."""
    return count_noun(round(seconds / 60), "minute") if seconds >= 90 else f"{seconds:.0f} s"


def kept_note(store: Path) -> str:
    """Return a line for users whose program was started for no run, as the store has all runs that were asked for."""
    return f"no run was made: {store} has these runs from before; another --store measures them anew"


def warning_of(limits: Limits, program: Program) -> str:
    """Return a line for users whose program writes files: how often it is started, and what it should leave out."""
    often = f"once per try in each of up to {count_noun(limits.rounds, 'round')}"
    if program.in_process:
        of_a_run = count_noun(min(LEAST_PAIRS, limits.rounds), "round")
        often = (
            f"once for {of_a_run}, in which its settings change from block to block of its steps, and once for each "
            "try that is faster"
        )
    return (
        f"a tuning starts the program {often}, and ends it after the last measured step: if it writes checkpoints or "
        "logs, let it leave them out where DDP_PROF_TUNE=1 is set"
    )
