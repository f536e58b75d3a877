"""The tables of ``ddp-prof results``: each testbed's settings, the published study beside them, observations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_prof.benchmark.alpha_beta import BucketModel, Unknown
from ddp_prof.benchmark.claims import check_claims
from ddp_prof.benchmark.observations import contradicts_model
from ddp_prof.benchmark.report.rows import comparison_rows, csv_rows, half_ms, setting_rows, value_ms
from ddp_prof.benchmark.report.words import analysis, effect_text, testbed_title
from ddp_prof.benchmark.store import OK
from ddp_prof.present.columns import Row, ms
from ddp_prof.present.table import TableView
from ddp_prof.present.text import milliseconds, percent, size
from ddp_prof.variants import BYTES_PER_MB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.benchmark.claims import ClaimResult
    from ddp_prof.benchmark.report.testbeds import TestbedResults
    from ddp_prof.benchmark.settings import SettingSummary
    from ddp_prof.benchmark.study import Study

HOW_TO_READ = (
    "step and comm: medians over runs of the median over steps, by rank 0's host timer; comm: from the end of backward "
    "to the last gradient, without synchronizing the device first; synchronized comm: with synchronizing; speedup: "
    "over naive, median over repeats"
)
SPREAD = (
    "±: half of the 95 % interval of a median, from the scatter between runs of one setting, pooled over the machine's "
    "settings (comm: over the variant's); two sweeps differ by up to 1.4 times that. Settings are compared within a "
    "repeat, whose runs are near in time, so differences are known better than ± says"
)
SPREAD_WITHIN = (
    "±: from the steps of one run, since no setting was run twice; another run may differ by more, so no difference is "
    "reported: repeat the sweep"
)
SUPPORTED = "in brackets: the 95 % interval; of twenty such sentences, one may be due to chance"
NOTHING_SUPPORTED = "no difference is reported: none exceeds the measured spread"
NOTHING_REPEATED = "no difference is reported: no setting was run twice"
NOTHING_MEASURED = "no difference is reported: no run finished"
NOTHING_BESIDE = "no difference is reported: there is only one variant"
BUCKETS = (
    "predicted: communication left when backward ends, s / (n w) + n o, for s bytes of gradients in n buckets, one "
    "collective each; the model assumes that backward takes as long as the transfer, and that all ranks are equal"
)
KEPT_APART = (
    "{} testbeds are shown separately: times of different machines, models or numbers of ranks are not comparable"
)
OTHER_MACHINE = "the study used another machine and model: compare shares and speed-ups, not milliseconds"
NO_REPEATS = (
    "in brackets: the 95 % interval; here, of the mean over the settings, from the spread between runs; for the study, "
    "which reports no spread, of the median over the settings, from how they differ. 'cannot tell': not measured, or "
    "the interval includes the threshold"
)


def results_view(testbeds: Sequence[TestbedResults], study: Study | None) -> list[TableView]:
    """The tables to read, one testbed after the other."""
    views = []
    for results in testbeds:
        views.append(settings_view(results))
        if study:
            views += [comparison_view(results, study), claims_view(results, study)]
        views.append(analysis_view(results))
    if len(testbeds) > 1:
        views.append(TableView("", [], [KEPT_APART.format(len(testbeds))], {}))
    return views


def settings_view(results: TestbedResults) -> TableView:
    """A row for each setting, with notes on how to read them."""
    title = testbed_title(results.testbed, results.environment)
    return TableView(title, setting_rows(results.summaries), testbed_notes(results), {})


def comparison_view(results: TestbedResults, study: Study) -> TableView:
    """The rows of the published study, with ours beside them."""
    return TableView(study.about, comparison_rows(study.timings, results.summaries), [OTHER_MACHINE], {})


def claims_view(results: TestbedResults, study: Study) -> TableView:
    """Whether the study's claims hold by its own figures and by ours."""
    theirs = check_claims(study.timings)
    rows: list[Row] = [
        {
            "claim": own.text,
            "study": published.holds,
            "study_figure": effect_text(published.effect),
            "here": own.holds,
            "here_figure": effect_text(own.effect),
        }
        for published, own in zip(theirs, results.claims, strict=True)
    ]
    return TableView(claims_line(theirs, results.claims), rows, [NO_REPEATS], {})


def claims_line(study: Sequence[ClaimResult], here: Sequence[ClaimResult]) -> str:
    """How many of the claims that the study's own figures support hold here."""
    supported = [own.holds for theirs, own in zip(study, here, strict=True) if theirs.holds == "yes"]
    return (
        f"Of {len(supported)} claims that the study's own figures support, {supported.count('yes')} hold here, "
        f"{supported.count('no')} do not, {supported.count('cannot tell')} cannot be decided"
    )


def analysis_view(results: TestbedResults) -> TableView:
    """The sentences that the numbers support."""
    rows: list[Row] = [
        {"topic": heading.lower(), "observation": text}
        for heading, texts in analysis(results.observations).items()
        for text in texts
    ]
    return TableView("", rows, [SUPPORTED if rows else nothing_supported(results)], {})


def nothing_supported(results: TestbedResults) -> str:
    """Why no difference is reported."""
    steps = [(summary.setting.label, summary.timing.step_ns) for summary in results.summaries if summary.timing.step_ns]
    if not steps:
        return NOTHING_MEASURED
    if len({label for label, _ in steps}) == 1:
        return NOTHING_BESIDE
    return NOTHING_SUPPORTED if any(step.is_between_runs for _, step in steps) else NOTHING_REPEATED


def testbed_notes(results: TestbedResults) -> list[str]:
    """How to read the figures, what restricts them, and what an all-reduce costs."""
    caveats = dict.fromkeys(caveat for summary in results.summaries for caveat in summary.caveats)
    return [HOW_TO_READ, *_spread_notes(results.summaries), *caveats, *_reasons(results.summaries), link_note(results)]


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


def link_note(results: TestbedResults) -> str:
    """What an all-reduce costs by its size, and which bucket size follows."""
    model = results.model
    if isinstance(model, Unknown):
        return f"no model of bucketing: {model.reason}"
    link = model.link
    return (
        f"an all-reduce takes {milliseconds(round(link.overhead_ns))} a call plus its bytes at {link.bytes_per_ns:.3g} "
        f"GB/s (fitted to {link.sizes} message sizes, median error {percent(link.relative_error)}); the model of "
        f"bucketing, b* = sqrt(s o w), gives a best bucket size of {size(round(model.best_bytes))}, which leaves "
        f"{milliseconds(round(model.overhead_ns(model.best_bytes)))} of communication after backward"
        f"{'; the measured steps contradict it' if contradicts_model(results.observations) else ''}"
    )


def bucket_rows(results: TestbedResults) -> list[Row]:
    """What the model predicts to be left of communication by bucket size, beside what was measured."""
    model = results.model
    if isinstance(model, Unknown):
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
        for summary in results.summaries
        if summary.setting.swept_mb is not None and summary.timing.status == OK
    ]


def bucket_notes(results: TestbedResults) -> list[str]:
    """What the model is, and its result."""
    return [BUCKETS, link_note(results)]


def _bucket_bytes(summary: SettingSummary, model: BucketModel) -> float:
    """The mean bucket as it was, since parameters do not divide; by its cap where the number is not known."""
    if summary.first.collectives:
        return model.gradient_bytes / summary.first.collectives
    return (summary.setting.bucket_size_mb or 0.0) * BYTES_PER_MB


def csv_view(testbeds: Sequence[TestbedResults], study: Study | None) -> TableView:
    """One table for programs: the rows of ``results.csv``, or the study's with ours beside them."""
    if study is None:
        return TableView("", csv_rows(summary for results in testbeds for summary in results.summaries), [], {})
    rows: list[Row] = [
        {**{name: getattr(results.testbed, name) for name in ("environment", "model_size", "world_size")}, **row}
        for results in testbeds
        for row in comparison_rows(study.timings, results.summaries)
    ]
    return TableView("", rows, [OTHER_MACHINE], {})
