"""What ``ddp-prof results`` shows: the settings of each place, the published study beside them, and what that says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_prof.benchmark.conclusions import judge
from ddp_prof.benchmark.facts import BYTES_PER_MB
from ddp_prof.benchmark.report.rows import comparison_rows, csv_rows, half_ms, setting_rows, value_ms
from ddp_prof.benchmark.report.words import CONCLUSIONS, analysis, evidence_text, place_title
from ddp_prof.benchmark.store import OK
from ddp_prof.present.charts.theme import milliseconds, percent, size
from ddp_prof.present.columns import Row, ms
from ddp_prof.present.table_view import TableView
from ddp_prof.variants import BUCKETED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.benchmark.alpha_beta import BucketModel
    from ddp_prof.benchmark.conclusions import Judgement
    from ddp_prof.benchmark.places import PlaceResults
    from ddp_prof.benchmark.settings import Place, SettingSummary
    from ddp_prof.benchmark.store import Environment
    from ddp_prof.benchmark.study import Study

HOW_TO_READ = (
    "step and comm: medians over runs of medians over steps, by rank 0's host timer; comm: from the end of backward to "
    "the last gradient, without synchronizing first; synchronized comm: with; speedup: over naive, median over repeats "
    "of what each shows"
)
SPREAD = (
    "±: how far a median may be off in 95 of 100 cases, from the scatter between runs of one setting, pooled over the "
    "machine's settings (comm: over the variant's); two sweeps differ by up to 1.4 times that. Settings are compared "
    "within a repeat, whose runs are near in time, and so more closely than by ±"
)
SPREAD_WITHIN = (
    "±: from the steps of one run, since no setting was run twice; another run may be further off, so that no "
    "difference is taken for one by it: repeat the sweep"
)
SUPPORTED = "in brackets, how far each figure may be off in 95 of 100 cases: of twenty sentences one may be luck"
NOTHING_SUPPORTED = "nothing is said of differences, since none exceeds the measured spread"
NOTHING_REPEATED = "nothing is said of differences, since no setting was run twice"
NOTHING_MEASURED = "nothing is said of differences, since no run came to its end"
NOTHING_BESIDE = "nothing is said of differences, since there is only one variant here"
BUCKETS = (
    "predicted: communication left when backward ends, s / (n w) + n o, for s bytes of gradients in n buckets, one a "
    "collective; the model takes backward to be as long as the transfer, and the ranks to be alike"
)
PLACES = "{} places are kept apart, as times of different machines, models or numbers of ranks are not comparable"
OTHER_MACHINE = "the study's machine and model are not those here: compare shares and speed-ups, not milliseconds"
NO_REPEATS = (
    "in brackets, how far a figure may be off: here, of the mean over the settings, from the spread of each between "
    "runs; for the study, which tells none, of their median, from how they differ. 'cannot tell': not measured, or "
    "not beyond that"
)


def results_view(places: Sequence[PlaceResults], study: Study | None) -> list[TableView]:
    """The tables to read, a place after the other."""
    views = []
    for place in places:
        views.append(settings_view(place))
        if study:
            views += [comparison_view(place, study), conclusions_view(place, study)]
        views.append(analysis_view(place))
    if len(places) > 1:
        views.append(TableView("", [], [PLACES.format(len(places))], {}))
    return views


def settings_view(place: PlaceResults) -> TableView:
    """A row a setting, with how to read them."""
    title = place_title(place.place, place.environment)
    return TableView(title, setting_rows(place.summaries), place_notes(place), {})


def comparison_view(place: PlaceResults, study: Study) -> TableView:
    """The published rows, with ours beside them."""
    return TableView(study.about, comparison_rows(study.timings, place.summaries), [OTHER_MACHINE], {})


def conclusions_view(place: PlaceResults, study: Study) -> TableView:
    """The study's conclusions, put to its own figures and to ours."""
    theirs = judge(study.timings)
    rows: list[Row] = [
        {
            "conclusion": CONCLUSIONS[own.name],
            "study": published.holds,
            "study_figure": evidence_text(published.evidence),
            "here": own.holds,
            "here_figure": evidence_text(own.evidence),
        }
        for published, own in zip(theirs, place.judgements, strict=True)
    ]
    return TableView(conclusions_line(theirs, place.judgements), rows, [NO_REPEATS], {})


def conclusions_line(study: Sequence[Judgement], here: Sequence[Judgement]) -> str:
    """How many of the conclusions that the study's figures bear out hold here."""
    borne = [own.holds for theirs, own in zip(study, here, strict=True) if theirs.holds == "yes"]
    return (
        f"Of {len(borne)} conclusions that the study's own figures bear out, {borne.count('yes')} hold here, "
        f"{borne.count('no')} do not, {borne.count('cannot tell')} cannot be told"
    )


def analysis_view(place: PlaceResults) -> TableView:
    """The sentences that the numbers support."""
    rows: list[Row] = [
        {"on": heading.lower(), "these_numbers_say": text}
        for heading, texts in analysis(place.facts).items()
        for text in texts
    ]
    return TableView("", rows, [SUPPORTED if rows else nothing_supported(place)], {})


def nothing_supported(place: PlaceResults) -> str:
    """Why nothing is said."""
    steps = [(summary.setting.label, summary.timing.step_ns) for summary in place.summaries if summary.timing.step_ns]
    if not steps:
        return NOTHING_MEASURED
    if len({label for label, _ in steps}) == 1:
        return NOTHING_BESIDE
    return NOTHING_SUPPORTED if any(step.is_between_runs for _, step in steps) else NOTHING_REPEATED


def place_notes(place: PlaceResults) -> list[str]:
    """How to read the figures, what restricts them, and what an all-reduce costs."""
    caveats = dict.fromkeys(caveat for summary in place.summaries for caveat in summary.caveats)
    return [HOW_TO_READ, *_spread_notes(place.summaries), *caveats, *_reasons(place.summaries), link_note(place)]


def _reasons(summaries: Sequence[SettingSummary]) -> list[str]:
    """Each reason why runs are missing, with the first setting that it stopped."""
    stopped: dict[str, list[SettingSummary]] = {}
    for summary in summaries:
        if summary.reason:
            stopped.setdefault(summary.reason, []).append(summary)
    notes = []
    for reason, (first, *others) in stopped.items():
        setting = first.setting
        more = f", and {len(others)} more" if others else ""
        notes.append(f"{setting.label}, batch {setting.local_batch_size} x {setting.seq_len}{more}: {reason}")
    return notes


def _spread_notes(summaries: Sequence[SettingSummary]) -> list[str]:
    steps = [summary.timing.step_ns for summary in summaries if summary.timing.step_ns]
    if not steps:
        return []
    return [SPREAD if any(step.is_between_runs for step in steps) else SPREAD_WITHIN]


def link_note(place: PlaceResults) -> str:
    """What an all-reduce costs by its size, and which bucket size follows."""
    link, model = place.link, place.model
    if isinstance(link, str) or model is None:
        return f"no model of bucketing: {link}"
    return (
        f"an all-reduce takes {milliseconds(round(link.overhead_ns))} a call and {link.bytes_per_ns:.3g} GB/s (fitted "
        f"to {link.sizes} message sizes, off by {percent(link.relative_error)} in the median); the course's model, "
        f"b* = sqrt(s o w), puts the best bucket at {size(round(model.best_bytes))}, leaving "
        f"{milliseconds(round(model.overhead_ns(model.best_bytes)))}"
    )


def bucket_rows(place: PlaceResults) -> list[Row]:
    """What the model predicts to be left of communication by bucket size, beside what was measured."""
    model = place.model
    if model is None:
        return []
    return [
        {
            "bucket_mb": summary.setting.bucket_size_mb,
            "batch": summary.setting.local_batch_size,
            "context": summary.setting.seq_len,
            "collectives": summary.first.collectives,
            "predicted_ms": ms(model.overhead_ns(_bucket_bytes(summary, model))),
            "comm_ms": value_ms(summary.timing.communication_ns),
            "trace_tail_ms": ms(summary.trace.tail_ns) if summary.trace else None,
            "step_ms": value_ms(summary.timing.step_ns),
            "step_±_ms": half_ms(summary.timing.step_ns),
        }
        for summary in place.summaries
        if summary.setting.variant == BUCKETED
        and summary.setting.bucket_size_mb is not None
        and summary.timing.status == OK
    ]


def bucket_notes(place: PlaceResults) -> list[str]:
    """What the model is, and what it says."""
    return [BUCKETS, link_note(place)]


def _bucket_bytes(summary: SettingSummary, model: BucketModel) -> float:
    """The mean bucket as it was, since parameters do not divide; by its cap where the number is not known."""
    if summary.first.collectives:
        return model.gradient_bytes / summary.first.collectives
    return (summary.setting.bucket_size_mb or 0.0) * BYTES_PER_MB


def csv_view(places: Sequence[PlaceResults], study: Study | None) -> TableView:
    """One table for programs: the rows of ``results.csv``, or the study's with ours beside them."""
    if study is None:
        return TableView(
            "", [row for place in places for row in csv_rows(place.summaries, _environments(place))], [], {}
        )
    rows = [
        row for place in places for row in _with_place(place.place, comparison_rows(study.timings, place.summaries))
    ]
    return TableView("", rows, [OTHER_MACHINE], {})


def _with_place(place: Place, rows: Sequence[Row]) -> list[Row]:
    first: Row = {"environment": place.environment, "model_size": place.model_size, "world_size": place.world_size}
    return [first | row for row in rows]


def _environments(place: PlaceResults) -> dict[str, Environment]:
    return {place.environment.id: place.environment} if place.environment else {}
