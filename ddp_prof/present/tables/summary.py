"""Makes the summary of runs: text about one run, or a table of several runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from string import digits

from ddp_prof.analyze.cost import RunCost
from ddp_prof.analyze.doctor import Diagnosis
from ddp_prof.analyze.doctor.evidence import Finding
from ddp_prof.analyze.doctor.hosts import LAUNCH_BOUND, PROFILER_OVERHEAD
from ddp_prof.analyze.overlap import TraceOverlap
from ddp_prof.analyze.root_cause import RunExplanation
from ddp_prof.analyze.statistics import WORTH
from ddp_prof.analyze.variants.comparison import VariantSummary
from ddp_prof.analyze.why_unknown import NOTHING_LEFT
from ddp_prof.columns import Row, count_noun, milliseconds, percent
from ddp_prof.errors import shell_path, shell_quote
from ddp_prof.notes import Doubt
from ddp_prof.present.cause_headlines import cause_headline, cause_in_short
from ddp_prof.present.columns import in_percent, times_of, values_of
from ddp_prof.present.headlines import (
    communicating_steps_text,
    cost_text,
    gain_headline,
    gain_in_short,
    idle_headline,
    level_change_text,
    outliers_text,
)
from ddp_prof.present.recorders import profiler_name
from ddp_prof.present.run_notes import blocking_notes, differences, each_once, missing_notes, reason_notes, step_notes
from ddp_prof.present.table import NEXT, SCHEMA, Document, TableView
from ddp_prof.present.tables.doctor import rule_and_cost, undecided_text
from ddp_prof.present.text import join_lines, source_name
from ddp_prof.trace import SOURCE_NAMES

_PARTS = {
    "compute_only": "compute alone",
    "overlapped": "compute and communication",
    "exposed": "communication alone",
    "exposed_memory": "copies alone",
    "idle": "idle",
}

_SHORT_PARTS = _PARTS | {"overlapped": "overlapped", "exposed": "exposed", "exposed_memory": "copies"}
"""The parts of a step, by their names in results, in the words of the whole answer and of the short answer."""
_LEAST_SHARE = 0.01
"""Fraction of the step below which the short answer leaves a part out."""
_FAR = 0.05
"""Fraction of the median above which the typical step's length differs so much that the short answer gives both."""
_SHORT = 130
"""Most characters of advice in the short answer: two lines of a terminal, beside the line's label."""
_SEE_DOCTOR = " (ddp-prof doctor)"
_BETWEEN = "mostly from the last work of a step to the first of the next"
_REASONS_OF_IDLE = {
    LAUNCH_BOUND: "the host launches work too late",
    PROFILER_OVERHEAD: "the profiler itself takes time",
}
"""For rules of the doctor: why the device is idle, in the words of a sentence."""
_REASONS_ON_CPU = {
    **_REASONS_OF_IDLE,
    LAUNCH_BOUND: "what no phase holds, such as loading data, takes that time",
}
"""The same of ranks on a CPU, which have no device."""


@dataclass(frozen=True)
class SummarizedRun:
    """The results of a run that a summary shows; its properties are the texts made from them.

    ``options`` are those of the command line with which the run was read, quoted for a shell.
    """

    result: TraceOverlap
    summary: VariantSummary
    explanation: RunExplanation
    diagnosis: Diagnosis
    cost: RunCost | None = None
    options: str = ""

    @property
    def headline(self) -> str:
        """What hiding all communication would gain at most."""
        return gain_headline(self.summary, self.cost.cost if self.cost else None)

    @property
    def cost_text(self) -> str | None:
        """What communication slows, and the most that could be gained; ``None`` if not known."""
        return cost_text(self.cost.cost, self.cost.bounds) if self.cost and not self.summary.reason else None

    @property
    def cause(self) -> str:
        """The main cause of exposed time."""
        collectives = self.explanation.collectives
        return cause_headline(self.explanation.root_cause, collectives.why_no_cause, collectives.blocking)

    @property
    def idle(self) -> str | None:
        """A sentence that the device is idle for longer than communication is exposed; ``None`` if it is not."""
        return self.idle_text(_SEE_DOCTOR)

    def idle_text(self, see: str = "") -> str | None:
        """Return :attr:`idle` with the words ``see`` after a reason that the doctor found."""
        return idle_text(self.summary, self.result, lambda: self.diagnosis, see)

    @property
    def advice(self) -> str | None:
        """The advice of the first finding; ``None`` without findings."""
        return self.diagnosis.findings[0].advice if self.diagnosis.findings else None

    def notes(self, told: str | None = None) -> list[str]:
        """Return the notes: doubts about the capture first, then what is not known of blocking.

        The reason ``told`` is left out, as the headline gives it; what is missing altogether is none of the notes.
        """
        doubts = [*reason_notes(self.result, told), *step_notes(self.result), *self.explanation.run.match_doubts]
        return [*doubts, *blocking_notes(self.result)]

    @property
    def all_files(self) -> str:
        """The files of the run, quoted for a shell.

        Files whose names differ only in a number become a pattern: ``train.rank*.json.gz``.
        """
        paths = {rank.clock for rank in self.explanation.run.ranks} | {self.result.trace}
        names = sorted(str(path) for path in paths)
        # What all names begin with and end with, without digits at the border: these belong to the number.
        first = os.path.commonprefix(names).rstrip(digits)  # noqa: RUF071 - of characters
        end = os.path.commonprefix([name[::-1] for name in names])[::-1].lstrip(digits)  # noqa: RUF071
        if len(names) > 1 and all(name[len(first) : len(name) - len(end)].isdecimal() for name in names):
            return f"{shell_path(first)}*{shell_quote(end)}"
        return " ".join(map(shell_path, names))

    @property
    def as_read(self) -> str:
        """The words of a command line that read the run as it was read: options and files, quoted for a shell."""
        return f"{self.options} {self.all_files}".lstrip()

    @property
    def next_commands(self) -> list[str]:
        """The commands that show more, the most useful one first."""
        traces = self.as_read
        if self.summary.reason:
            return [f"ddp-prof info {traces}", f"ddp-prof kernels {traces}"]
        return [f"ddp-prof {'doctor' if self.advice else 'collectives'} {traces}", f"ddp-prof report {traces}"]


def idle_text(
    summary: VariantSummary, result: TraceOverlap, diagnose: Callable[[], Diagnosis], see: str = _SEE_DOCTOR
) -> str | None:
    """Return a sentence that the device is idle for longer than communication is exposed; ``None`` if it is not.

    The sentence gives the reason if the doctor found one that explains at least half of that time, as far as its cost
    is known; see :func:`idle_headline`.

    Args:
        summary: The figures of the run.
        result: The overlap of the run.
        diagnose: Returns the doctor's findings; called only where the device is idle for longer.
        see: Words after a reason that the doctor found.
    """
    if idle_headline(summary) is None:
        return None
    least_ns = (summary.parts_ns["idle"] or 0) / 2
    costs = {finding.rule: finding.cost_ns for finding in diagnose().findings}
    explains = {rule for rule, cost_ns in costs.items() if cost_ns is None or cost_ns >= least_ns}
    reasons = _REASONS_ON_CPU if summary.device == "cpu" else _REASONS_OF_IDLE
    reason = next((text for rule, text in reasons.items() if rule in explains), None)
    return idle_headline(summary, f"{reason}{see}" if reason else _idle_between(result))


def _idle_between(result: TraceOverlap) -> str:
    """Return that devices are mostly idle between the work of two steps, which no table of kernels divides.

    Empty if they are not.
    """
    steps = [step for rank in result.ranks for step in rank.timed_steps]
    of_steps = sum(step.length.idle_ns or 0 for step in steps)
    return _BETWEEN if 2 * sum(step.idle_ns or 0 for step in steps) < of_steps else ""


def summary_view(runs: Sequence[SummarizedRun], *, whole: bool) -> TableView:
    """Return the answer about one run as about ten lines of text; for several runs a table with a row each.

    Args:
        runs: The runs, at least one.
        whole: Whether to add the notes, and the sentences that the short answer leaves out.
    """

    def document() -> Document:
        return {"schema": SCHEMA, "runs": [_document(run) for run in runs]}

    rows = [_row(run) for run in runs]
    if len(runs) == 1:
        named = _whole_lines(runs[0]) if whole else _short_lines(runs[0])
        width = max(len(name) for name, text in named if text) + 2
        lines = [f"{name:<{width}}{text}" for name, text in named if text]
        return TableView(join_lines(lines), rows, [], document, is_text=True)
    unknown = [(run.headline, run.summary.label) for run in runs if run.summary.gain_at_most is None]
    unknown += [
        (note, run.summary.label)
        for run in runs
        for note in (*missing_notes(run.result), *run.notes(run.summary.reason))
        if whole or isinstance(note, Doubt)
    ]
    notes = [
        *each_once(unknown, len(runs)),
        "times are medians over steps",
        f"more about one of them: ddp-prof {runs[0].as_read}",
    ]
    return TableView("", rows, notes, document)


def _document(run: SummarizedRun) -> Document:
    """Return the figures and the texts of a run for JSON."""
    known = (
        "label",
        "device",
        "ranks",
        "steps",
        "step_ns",
        "nearest_step_ns",
        "parts_ns",
        "comm_ns",
        "overlapped_ns",
        "exposed_ns",
    )
    return {
        **values_of(run.summary, *known, "blocking_ns", "blocking_at_most_ns", "gain_at_most"),
        "missing": run.result.missing and run.result.missing.text,
        "cost": asdict(run.cost.cost) if run.cost else None,
        "bounds": asdict(run.cost.bounds) if run.cost else None,
        "idle": run.idle,
        "headline": run.headline,
        "cause": run.cause,
        "advice": run.advice,
        "next": run.next_commands,
        "warnings": list(run.result.warnings),
        "not_known": [*missing_notes(run.result), *run.notes()],
    }


def _row(run: SummarizedRun) -> Row:
    """Return the row of a run in the table of several runs."""
    summary = run.summary
    return {
        "run": summary.label,
        **values_of(summary, "device", "ranks", "steps"),
        **times_of(summary, "step", "comm", "overlapped", "exposed", "blocking"),
        "overlap_%": in_percent(summary.overlap_ratio),
        "gain_at_most_%": in_percent(summary.gain_at_most),
    }


def _short_lines(run: SummarizedRun) -> list[tuple[str, str | None]]:
    """Return the lines of the short answer as label and text: what to gain and to change first, then the figures.

    A text may be ``None`` or empty; then the line is left out. Most runs need at most twelve lines of a terminal. Where
    the device is idle for longer than communication is exposed, the cause of exposed time is left to the notes.
    """
    summary, result, collectives = run.summary, run.result, run.explanation.collectives
    cause, of_cause = cause_in_short(run.explanation.root_cause, collectives.why_no_cause, collectives.blocking)
    findings = run.diagnosis.findings
    notes = run.notes(run.summary.reason)
    costs = (run.cost.cost, run.cost.bounds) if run.cost else (None, None)
    # What makes the figures doubtful; all other notes are only counted.
    doubts = [*result.caveats, *([outliers_text(result.outliers)] if result.outliers else [])]
    # Steps that stand out are often the first ones, which need no second note if the median does not depend on them.
    levels = result.level_change
    told = {level_change_text(levels)} if levels and result.outliers and not levels.moves_median else set()
    told.update(doubts)
    of_files = tuple(f": {caveat.value}" for caveat in result.caveats)  # the same, with the files that tell it
    short = {f"{difference}; {meaning}": difference for difference, meaning in differences(result)}
    untold = [note for note in notes if note not in told and not note.endswith(of_files)]
    doubts += [short.get(note, note) for note in untold if isinstance(note, Doubt)]
    profilers = dict.fromkeys(SOURCE_NAMES.get(source, source) for source, *_ in result.recorded_by)
    read = [*_source_facts(result, summary), " and ".join(profilers)]
    why = ("cause", None if summary.reason or run.idle else cause)
    # Advice that follows from the cause comes after it, and not without it; a finding of the doctor comes before, if it
    # may gain much.
    is_of_cause = of_cause and all(_gains_little(run, one) for one in findings) and not summary.reason and not run.idle
    little = f" {count_noun(len(findings), 'finding')} below {percent(WORTH)} of a step." if findings else ""
    change = ("change", f"{of_cause}{little}" if is_of_cause else _short_advice(run))
    return [
        ("missing", result.missing and result.missing.text),
        ("idle", run.idle_text()),
        ("gain", gain_in_short(summary, *costs, follows_idle=bool(run.idle))),
        *((why, change) if is_of_cause else (change, why)),
        ("step", _shares(summary)),
        ("comm", _communication(summary, in_short=True)),
        ("notes", "; ".join(doubts)),
        ("read", " · ".join([*read, *([f"{count_noun(len(notes), 'note')}: --notes"] if notes else [])])),
        (NEXT, run.next_commands[0]),
    ]


def _whole_lines(run: SummarizedRun) -> list[tuple[str, str | None]]:
    """Return all lines of the answer as label and text, with every note; without a text a line is left out."""
    notes = run.notes(run.summary.reason)
    source = source_name(run.result.trace, run.result.files)
    read = (source, *_source_facts(run.result, run.summary), profiler_name(run.result))
    return [
        ("missing", run.result.missing and run.result.missing.text),
        ("idle", run.idle),
        ("gain", run.headline),
        ("cost", run.cost_text),
        ("change", main_advice(run)),
        ("cause", None if run.summary.reason else run.cause),
        ("step", _parts(run.summary)),
        ("comm", _communication(run.summary)),
        *(("" if number else "notes", note) for number, note in enumerate(notes)),
        ("read", " · ".join(read)),
        (NEXT, run.next_commands[0]),
    ]


def _gains_little(run: SummarizedRun, finding: Finding) -> bool:
    """Return whether the expected gain of a finding is known, and too small to be the first advice."""
    step_ns, gain_ns = run.summary.step_ns, finding.gain_high_ns
    return step_ns is not None and gain_ns is not None and gain_ns < WORTH * step_ns


def _short_advice(run: SummarizedRun) -> str:
    """Return the first finding's advice, cut after the last clause that fits; remarks in brackets are left out."""
    if not run.diagnosis.findings:
        return main_advice(run)
    first, *others = run.diagnosis.findings
    # Brackets may contain a pair of brackets, as in no_sync().
    clauses = re.split(r"(?<=[;:.]) ", re.sub(r" \([^()]*(?:\(\)[^()]*)*\)", "", first.advice))
    kept = clauses[:1]
    for clause in clauses[1:]:
        if len(" ".join([*kept, clause])) > _SHORT:
            break
        kept.append(clause)
    text = first.advice if len(first.advice) <= _SHORT else f"{' '.join(kept).rstrip(';:.')}."
    more = f" {count_noun(len(others), 'more finding')}." if others else ""
    if first.expected_gain_ns is not None:  # beside it, the cost at most is left out
        first = replace(first, cost_ns=None)
    return f"{rule_and_cost(first, run.summary.ranks, has_steps=bool(run.summary.steps))}: {text}{more}"


def _source_facts(result: TraceOverlap, summary: VariantSummary) -> list[str]:
    """Return device, number of ranks and number of steps, as texts."""
    numbers = result.rank_numbers
    count = summary.ranks if numbers is None else min(summary.ranks, len(numbers))
    of = f" of {result.world_size}" if result.world_size and result.world_size != count else ""
    ranks = f"{count}{of} ranks" if of else count_noun(count, "rank")
    if count < summary.ranks:
        ranks = f"{summary.ranks} devices of {ranks}"
    no_steps = (
        summary.reason if summary.reason in NOTHING_LEFT else "no steps are marked from begin to end (see --step-range)"
    )
    return [f"device: {result.device}", ranks, count_noun(summary.steps, "step") if summary.steps else no_steps]


def _parts(summary: VariantSummary) -> str | None:
    """Return the median length of a step, and the parts of the step nearest to all medians, which sum to its length.

    ``None`` if no length is known.
    """
    if not summary.step_ns:
        return None
    whole, nearest_ns = milliseconds(summary.step_ns), summary.nearest_step_ns
    if not nearest_ns or summary.exposed_ns is None:
        return _length(summary)
    parts = ", ".join(
        f"{name} {milliseconds(part)} ({percent(part / nearest_ns)})"
        for key, name in _PARTS.items()
        if (part := summary.parts_ns[key]) or (part == 0 and key != "exposed_memory")
    )
    own = milliseconds(nearest_ns)
    if (which := communicating_steps_text(summary)) and summary.communicating_step_ns:
        median = milliseconds(summary.communicating_step_ns)
        nearest = "" if own == median else f"; the one nearest to their medians, {own}"
        return f"{whole}, the median of all steps; {median} in {which}{nearest}: {parts}"
    if own != whole:
        return f"{whole}, the median; the step nearest to all medians, {own}: {parts}"
    several = summary.steps > 1 or summary.ranks > 1
    return f"{whole}: {parts}{'; parts of the step nearest to all medians' if several else ''}"


def _length(summary: VariantSummary) -> str:
    """Return the length of a step, of which the parts are not known."""
    several = summary.steps > 1 or summary.ranks > 1
    return f"{milliseconds(summary.step_ns or 0)}{', the median of all steps' if several else ''}"


def _shares(summary: VariantSummary) -> str | None:
    """Return the length of the step nearest to all medians, and its parts in per cent.

    ``None`` if no length is known.
    """
    step_ns = summary.communicating_step_ns or summary.step_ns
    if not summary.step_ns or not step_ns:
        return None
    which = f" in {some}" if (some := communicating_steps_text(summary)) else ""
    if not summary.nearest_step_ns or summary.exposed_ns is None:
        return _length(summary)
    shares = [(name, (summary.parts_ns[key] or 0) / summary.nearest_step_ns) for key, name in _SHORT_PARTS.items()]
    shown = ", ".join(f"{name} {percent(share)}" for name, share in shares if share >= _LEAST_SHARE)
    whole, own = milliseconds(step_ns), milliseconds(summary.nearest_step_ns)
    if own == whole:
        return f"{own}{which}: {shown}"
    if not summary.comm_ns:
        return f"{whole}{which}, the median; the typical one, {own}: {shown}"
    # The line on the gain speaks of the median.
    median = f" (median {whole})" if abs(summary.nearest_step_ns - step_ns) > _FAR * step_ns else ""
    return f"typical, {own}{median}{which}: {shown}"


def _communication(summary: VariantSummary, *, in_short: bool = False) -> str | None:
    """Return how long a step communicates, and how much of that is overlapped, exposed and blocking.

    ``None`` if it is not known, or if nothing communicates. ``in_short`` leaves out which steps it is of.
    """
    if not summary.comm_ns or summary.overlapped_ns is None or summary.exposed_ns is None:
        return None
    blocking = "blocking is not known"
    if summary.blocking_ns is not None:
        blocking = f"{milliseconds(summary.blocking_ns)} blocking"
    elif (limit_ns := summary.blocking_at_most_ns) is not None and limit_ns < summary.exposed_ns:
        blocking = f"at most {milliseconds(limit_ns)} blocking"
    some = " per step that communicates" if communicating_steps_text(summary) else " per step"
    return (
        f"{milliseconds(summary.comm_ns)}{'' if in_short else some}: {milliseconds(summary.overlapped_ns)} overlapped, "
        f"{milliseconds(summary.exposed_ns)} exposed, {blocking}"
    )


def main_advice(run: SummarizedRun) -> str:
    """Return the first finding with its cost and advice, and how many others there are."""
    diagnosis = run.diagnosis
    if not diagnosis.findings:
        return f"no finding{undecided_text(diagnosis)}"
    first, *others = diagnosis.findings
    more = f" {count_noun(len(others), 'more finding')}." if others else ""
    return f"{rule_and_cost(first, run.summary.ranks, has_steps=bool(run.summary.steps))}: {first.advice}{more}"
