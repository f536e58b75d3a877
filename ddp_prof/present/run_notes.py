"""Notes about runs: what is missing, unknown or assumed, and how ranks and steps differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, median

from ddp_prof.analyze.overlap import RankOverlap, TraceOverlap
from ddp_prof.analyze.why_unknown import NO_COMMUNICATION
from ddp_prof.columns import count_noun, milliseconds
from ddp_prof.notes import Doubt
from ddp_prof.present.headlines import level_change_text, outliers_text

_LARGE_DIFFERENCE = 0.05
"""Least difference of exposed time, as a fraction of a step, with which ranks or steps count as different."""
OVER_ALL_RANKS = "figures per step are medians over the steps of all ranks"
"""What it means for figures that ranks differ; a gate, which judges the worst rank, has none of these figures."""


def notes_of_runs(results: Sequence[TraceOverlap]) -> list[str]:
    """Return the notes of all runs, each once; a note that does not hold for all runs begins with their labels."""
    return each_once(_notes_with_labels(results), len(results))


def warnings_by_run(results: Sequence[TraceOverlap]) -> dict[str, list[str]]:
    """Return each note on what is unknown or assumed, with the labels of the runs to which it applies."""
    return _labels_by_note(_notes_with_labels(results))


def _notes_with_labels(results: Sequence[TraceOverlap]) -> list[tuple[str, str]]:
    return [(note, result.label) for result in results for note in overlap_notes(result)]


def each_once(notes: Iterable[tuple[str, str]], runs: int) -> list[str]:
    """Return the notes of some runs, each once, from pairs of a note and the label of the run for which it holds.

    A note that does not hold for all ``runs`` begins with the labels of those for which it does.
    """
    of_note = _labels_by_note(notes).items()
    return [note if len(labels) == runs else f"{', '.join(labels)}: {note}" for note, labels in of_note]


def _labels_by_note(notes: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    by_note: dict[str, list[str]] = {}
    for note, label in notes:
        by_note.setdefault(note, []).append(label)
    return by_note


def overlap_notes(result: TraceOverlap, told: str | None = None) -> list[str]:
    """Return what is unknown or assumed, one line each, without the reason ``told``."""
    reasons = reason_notes(result, told)
    return [*missing_notes(result), *reasons, *blocking_notes(result), *step_notes(result)]


def missing_notes(result: TraceOverlap) -> list[str]:
    """Return what the traces lack altogether; empty if nothing is known to be missing."""
    return [Doubt(f"missing: {result.missing.text}")] if result.missing else []


def reason_notes(result: TraceOverlap, told: str | None = None) -> list[str]:
    """Return why ranks have no overlap figure, without the reason ``told``."""
    return [
        Doubt(f"{rank.name}: no overlap figure: {reason_of(result, rank)}")
        for rank in result.ranks
        if rank.reason and rank.reason != told
    ]


def reason_of(result: TraceOverlap, rank: RankOverlap) -> str | None:
    """Return why a rank has no overlap figure, in words that hold where others of its file communicate."""
    others = [one for one in result.ranks if one.file == rank.file and one.collectives]
    if rank.reason != NO_COMMUNICATION or not others:
        return rank.reason
    what = "device" if any(one.process == rank.process for one in others) else "process"
    return f"nothing of this {what} is known to communicate"


def blocking_notes(result: TraceOverlap) -> list[str]:
    """Return why it is not known what stood still for communication, and what blocking does not cover."""
    unknown = {}
    for rank in result.ranks:
        if not rank.reason and rank.dependencies and rank.dependencies.reason:
            is_known = rank.blocking_ns is not None or any(step.blocking_ns is not None for step in rank.steps)
            unknown[rank.dependencies.reason] = " for some steps" if is_known else ""
    notes = [f"blocking is not known{which}: {reason}" for reason, which in unknown.items()]
    if hosts := sum(rank.dependencies.host_waits for rank in result.ranks if rank.dependencies):
        notes.append(f"blocking is that of streams; the host also waited for a collective {count_noun(hosts, 'time')}")
    return notes


def step_notes(result: TraceOverlap) -> list[str]:
    """Return how steps and ranks differ, how they were found, and the warnings of the traces."""
    outliers = [outliers_text(result.outliers)] if result.outliers else []
    levels = [Doubt(level_change_text(result.level_change))] if result.level_change else []
    differ = [Doubt(f"{difference}; {meaning}") for difference, meaning in differences(result)]
    return [*levels, *outliers, *differ, *result.step_notes, *result.warnings]


def differences(result: TraceOverlap) -> Iterator[tuple[str, str]]:
    """Yield how ranks, or steps, differ so much that the median over steps represents few of them.

    Each comes as two texts: the difference in exposed time, and what it means for the figures.
    """
    exposed: dict[str, list[int]] = {}
    for rank in (rank for rank in result.ranks if not rank.reason):
        if known := [step.exposed_ns for step in rank.communicating_steps if step.exposed_ns is not None]:
            exposed[rank.name] = known
    typical = {name: round(median(values)) for name, values in exposed.items()}
    lengths_ns = [ns for rank in result.ranks for ns in rank.lengths_ns]
    if not typical or not lengths_ns:
        return
    least_ns = _LARGE_DIFFERENCE * median(lengths_ns)
    low, high = (choose(typical, key=typical.__getitem__) for choose in (min, max))
    if typical[high] - typical[low] > max(typical[low], least_ns):
        most, least = milliseconds(typical[high]), milliseconds(typical[low])
        difference = f"ranks differ: {high} exposes {most} per step, {low} {least}"
        yield difference, OVER_ALL_RANKS
    # A mean far above the median: a few steps expose much more than the others.
    mean = {name: round(fmean(values)) for name, values in exposed.items()}
    name = max(mean, key=lambda name: mean[name] - typical[name])
    is_said = result.outliers is not None and result.outliers.comm_ns is None
    if not is_said and mean[name] - typical[name] > max(typical[name], least_ns):
        in_mean, in_median = milliseconds(mean[name]), milliseconds(typical[name])
        difference = f"steps differ: {name} exposes {in_mean} in the mean step, {in_median} in the median one"
        yield difference, "hiding all of it may gain more than in a typical step"
