"""Makes what ``ddp-prof results`` shows and writes: tables, JSON, ``results.csv``, pages, pictures, ``results.md``.

The texts below are notes under tables.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_prof.analyze.core.attribution import bus_factor
from ddp_prof.analyze.statistics import EACH_ALONE, LEAST_STEPS
from ddp_prof.atomic_file import atomic_write
from ddp_prof.benchmark.bucket_model import BucketModel
from ddp_prof.benchmark.charts import draw_figures
from ddp_prof.benchmark.findings import TestbedResults
from ddp_prof.benchmark.settings import Setting, SettingSummary, half_ms, status_text, value_ms
from ddp_prof.benchmark.store import OK
from ddp_prof.columns import Row, count_noun, digits, milliseconds, percent, size
from ddp_prof.communication import ALL_REDUCE
from ddp_prof.present.charts.static_images import Pictures
from ddp_prof.present.columns import in_percent, ms, times_of, values_of
from ddp_prof.present.html.page import write_figure, write_shared_plotly
from ddp_prof.present.table import SCHEMA, TableView, markdown, markdown_text, write_csv
from ddp_prof.variants import BYTES_PER_MB

REPORT = "results.md"
HOW_TO_READ = (
    "step and comm: medians over runs of the median over steps, by rank 0's host timer; comm: from the end of backward "
    "to the last gradient, without synchronizing the device first; synchronized comm: with synchronizing; speedup: "
    "over naive in the same repeat, geometric mean over repeats"
)
SPREAD = (
    "±: how far the 95 % interval reaches from the figure, by bootstrap over runs, widened as they are few; that of a "
    f"speedup: half of the interval by Student's t over repeats; {EACH_ALONE}. "
    "The sentences below compare pairs of runs of one repeat, so they can show smaller differences than ±"
)
NO_SPREAD = f"no ±: fewer than {LEAST_STEPS} runs of a setting"
PREDICTED = (
    "predicted: tail expected by the real buckets of the size: each is sent when its last gradient is ready and the "
    "link is free, beside compute as much slower as captures show; gradients become ready in proportion to the work of "
    "backward, which is as long as naive's; all ranks are equal"
)
MESSAGES = (
    "latency: from the launch of an all-reduce to its end on rank 0, where each is waited for, so that it contains the "
    "delay of a late rank; median over runs of each run's median; low, high: 95 % interval over runs; algbw: bytes / "
    "latency; busbw: algbw x 2 (n - 1) / n for n ranks; fitted: by overhead and bandwidth"
)
SENTENCES = (
    "in brackets: the 95 % interval of the median over pairs of runs, wider between the fastest and the slowest size, "
    "as these were chosen; of twenty such sentences, one may be due to chance"
)
NOTHING = "no difference is reported: none is clear in enough pairs of runs"
OTHER_CODE = "runs of several versions of the measured code are mixed: the same sweep measures the older ones again"
KEPT_APART = (
    "{} testbeds are shown separately: times of different machines, models, numbers of ranks or definitions are not "
    "comparable"
)


def results_views(testbeds: Sequence[TestbedResults]) -> list[TableView]:
    """Return the tables that the terminal shows: for each testbed its settings, sentences and messages."""
    views = []
    for results in testbeds:
        rows: list[Row] = [{"observation": text} for text in results.sentences]
        views += [settings_view(results), TableView("", rows, [SENTENCES if rows else NOTHING], {})]
        views += [messages_view(results)] if results.messages else []
    if len(testbeds) > 1:
        views.append(TableView("", [], [KEPT_APART.format(len(testbeds))], {}))
    return views


def settings_view(results: TestbedResults) -> TableView:
    """Return the table of a testbed with one row per setting, and its notes."""
    has_traces = any(summary.trace for summary in results.summaries)
    rows = [_setting_row(summary, results.model, has_traces=has_traces) for summary in results.summaries]
    return TableView(results.title, rows, testbed_notes(results), {})


def _setting_row(summary: SettingSummary, model: BucketModel | str, *, has_traces: bool) -> Row:
    """Return the row of a setting; columns of captures or of the model are there only if the testbed has any."""
    return {
        "variant": summary.setting.label,
        "batch": summary.setting.local_batch_size,
        "context": summary.setting.seq_len,
        "status": status_text(summary),
        "runs": summary.runs,
        "step_ms": value_ms(summary.step_ns),
        "step_±_ms": half_ms(summary.step_ns),
        "comm_ms": value_ms(summary.communication_ns),
        "comm_±_ms": half_ms(summary.communication_ns),
        "comm_%": in_percent(summary.communication_share),
        "synchronized_comm_ms": value_ms(summary.synchronized_ns),
        **({f"trace_{part}_ms": _trace_ms(summary, part) for part in ("exposed", "tail")} if has_traces else {}),
        **({} if isinstance(model, str) else {"predicted_ms": ms(predicted_ns(summary, model))}),
        "collectives": summary.first.collectives,
        "speedup": summary.speedup.value if summary.speedup else None,
        "speedup_±": summary.speedup.half_width if summary.speedup else None,
    }


def messages_view(results: TestbedResults) -> TableView:
    """Return the table of all-reduce times by message size, from runs whose variant waits for each all-reduce."""
    link = None if isinstance(results.model, str) else results.model.link
    rows: list[Row] = [
        {
            "size": size(cost.bytes),
            **values_of(cost, "bytes", "calls", "runs"),
            "latency_ms": ms(cost.median_ns),
            **times_of(cost, "low", "high"),
            "fitted_ms": ms(link.time_ns(cost.bytes)) if link else None,
            "algbw_median_GB/s": cost.bytes / cost.median_ns,
            "busbw_median_GB/s": cost.bytes
            / cost.median_ns
            * (bus_factor(ALL_REDUCE, results.testbed.world_size) or 0.0),
        }
        for cost in results.messages
    ]
    # Overhead or bandwidth is not well known if all messages are large or all are small.
    notes = [MESSAGES]
    if link:
        half = link.overhead_ns * link.bytes_per_ns  # bytes that take as long as the overhead
        if results.messages[0].bytes > half:
            notes.append(f"the overhead of a call is extrapolated: no message below {size(round(half))} was timed")
        if results.messages[-1].bytes < 4 * half:
            notes.append(f"the bandwidth is extrapolated: no message above {size(round(4 * half))} was timed")
    return TableView(f"all-reduces, {count_noun(results.testbed.world_size, 'rank')}", rows, notes, {})


def predicted_ns(summary: SettingSummary, model: BucketModel) -> float | None:
    """Return the tail that the model predicts for a measured setting; ``None`` if it has no bucket size."""
    mb = summary.setting.swept_mb
    if mb is None or summary.status != OK:
        return None
    return model.expected_ns(mb, summary.setting.workload)


def testbed_notes(results: TestbedResults) -> list[str]:
    """Return the notes under the table of settings: how to read it, caveats, missing runs and the model."""
    steps = [step for summary in results.summaries if (step := summary.step_ns)]
    notes = [HOW_TO_READ]
    if steps:
        notes.append(SPREAD if any(step.half_width is not None for step in steps) else NO_SPREAD)
    if len({code for summary in results.summaries for code in summary.codes}) > 1:
        notes.append(OTHER_CODE)
    notes += dict.fromkeys(caveat for summary in results.summaries for caveat in summary.caveats)  # each one once
    stopped: dict[str, list[Setting]] = {}  # by the reason why runs are missing
    for summary in results.summaries:
        if summary.reason:
            stopped.setdefault(summary.reason, []).append(summary.setting)
    for reason, (first, *others) in stopped.items():
        more = f", and {len(others)} more" if others else ""
        notes.append(f"{first.label}, {first.work_text}{more}: {reason}")
    if isinstance(results.model, str):
        return [*notes, f"no model of bucketing: {results.model}"]
    return [*notes, PREDICTED, link_note(results.model, contradicted=results.contradicts_model)]


def link_note(model: BucketModel, *, contradicted: bool) -> str:
    """Return a text about the fitted link and the best bucket size; ``contradicted``: measured steps disagree."""
    link, best = model.link, model.best_mb
    left = milliseconds(round(model.mean_ns(best)))
    text = (
        f"{link.text} (fitted to {link.sizes} message sizes, median error {percent(link.relative_error)}); the "
        f"model expects the least communication after backward with buckets of {digits(best, 2)} MiB, {left}"
        f"{', which the measured steps contradict' if contradicted else ''}; the course's b* = sqrt(s o w), for equal "
        f"buckets and a backward as long as the transfers, is {size(round(model.course_best_bytes))}"
    )
    largest = 4 * max(model.counts, default=0)
    if largest > model.course_best_bytes:
        text += f", but a bucket holds whole parameters, and the largest has {size(largest)}"
    return text


def csv_rows(testbeds: Sequence[TestbedResults]) -> list[Row]:
    return [_csv_row(summary, results) for results in testbeds for summary in results.summaries]


def _csv_row(summary: SettingSummary, results: TestbedResults) -> Row:
    """Return the row of a setting in ``results.csv``: first the columns that the course's study asks for.

    ``avg_comm_time_ms`` is measured without synchronizing the device first, as in the study: on a GPU it includes
    device work of backward that is still pending. All times are medians, although the study's column names say average.
    """
    run, setting, step = summary.first, summary.setting, summary.step_ns
    row: Row = {
        "implementation": setting.variant,
        **values_of(run, "model_size", "d_model", "num_layers", "world_size"),
        "avg_step_time_ms": value_ms(step),
        "avg_comm_time_ms": value_ms(summary.communication_ns),
        "comm_overhead_pct": in_percent(summary.communication_share),
        "num_comm_ops": run.collectives,
        "speedup_vs_naive": summary.speedup.value if summary.speedup else None,
        "comm_speedup_vs_naive": summary.communication_speedup.value if summary.communication_speedup else None,
        **values_of(setting, "bucket_size_mb", "local_batch_size", "seq_len"),
        **values_of(summary, "status", "reason", "runs", "failed_runs"),
        "steps_per_run": run.steps,
        "step_time_spread_ms": half_ms(step),
        "comm_time_spread_ms": half_ms(summary.communication_ns),
        "speedup_spread": summary.speedup.half_width if summary.speedup else None,
        "comm_time_synchronized_ms": value_ms(summary.synchronized_ns),
        "comm_time_synchronized_spread_ms": half_ms(summary.synchronized_ns),
    }
    for phase in ("forward", "backward", "optimizer"):
        estimate = getattr(summary, f"{phase}_ns")
        row |= {f"{phase}_ms": value_ms(estimate), f"{phase}_spread_ms": half_ms(estimate)}
    return row | {
        "trace_captures": summary.trace.captures if summary.trace else None,
        **{f"trace_{part}_ms": _trace_ms(summary, part) for part in ("comm", "overlapped", "exposed", "tail")},
        "comm_bytes": run.communicated_bytes,
        "gradient_bytes": run.gradient_bytes,
        "parameters": run.parameters,
        "peak_memory_bytes": summary.peak_memory_bytes,
        "tokens_per_s": run.tokens / step.value * 1e9 if step and step.value else None,
        "device": results.testbed.device,
        "backend": run.backend,
        "caveat": "; ".join(summary.caveats) or None,
        "environment": results.testbed.environment,
        **{name: getattr(results.environment, name, None) for name in ("cpu", "cores", "gpus", "torch", "ddp_prof")},
        "git_commit": run.git_commit,
        "definitions": results.testbed.definitions,
    }


def _trace_ms(summary: SettingSummary, part: str) -> float | None:
    return ms(getattr(summary.trace, f"{part}_ns")) if summary.trace else None


def results_document(database: Path, testbeds: Sequence[TestbedResults]) -> dict[str, Any]:
    """Return the JSON document of all testbeds, with times in nanoseconds. Keys may be added to it, never renamed."""
    return {
        "schema": SCHEMA,
        "database": str(database),
        "testbeds": [_testbed_document(results) for results in testbeds],
        "warnings": [KEPT_APART.format(len(testbeds))] if len(testbeds) > 1 else [],
    }


def _testbed_document(results: TestbedResults) -> dict[str, Any]:
    """Return the part of the JSON document about one testbed."""
    model = None if isinstance(results.model, str) else results.model
    return {
        **asdict(results.testbed),
        "environment": asdict(results.environment) if results.environment else {"id": results.testbed.environment},
        "settings": [_setting_document(summary) for summary in results.summaries],
        "link": model and asdict(model.link),
        "best_bucket_bytes": model and model.best_mb * BYTES_PER_MB,
        "slowdown_beside_compute": model and model.slowdown,
        "messages": [asdict(cost) for cost in results.messages],
        "observations": [asdict(observation) for observation in results.observations],
        "warnings": testbed_notes(results),
    }


def _setting_document(summary: SettingSummary) -> dict[str, Any]:
    """Return the part of the JSON document about one setting, with what all of its runs have in common."""
    values = asdict(summary)
    setting, run = values.pop("setting"), values.pop("first")
    shared = (
        "d_model", "num_layers", "parameters", "gradient_bytes", "backend", "steps", "collectives",
        "communicated_bytes", "tokens", "git_commit",
    )  # fmt: skip
    return {**setting, **{key: run[key] for key in shared}, **values}


def results_markdown(testbeds: Sequence[TestbedResults], pictures: Sequence[dict[str, str]] = ()) -> str:
    """Return all results as a Markdown document.

    ``pictures`` holds for each testbed the titles of its pictures by file name without suffix; empty: no pictures.
    """
    parts = ["# Results\n", "Written by `ddp-prof results` from the database of `scripts/run_comparison.sh`.\n"]
    if len(testbeds) > 1:
        parts.append(f"{KEPT_APART.format(len(testbeds)).capitalize()}.\n")
    for index, results in enumerate(testbeds):
        settings = settings_view(results)
        parts += [f"## {markdown_text(settings.title)}\n", markdown(settings.rows), _list(settings.notes)]
        if results.messages:
            messages = messages_view(results)
            parts += [f"### {messages.title.capitalize()}\n", markdown(messages.rows), _list(messages.notes)]
        parts += [f"![{title}]({name}.png)\n" for name, title in (pictures[index] if pictures else {}).items()]
        sentences = results.sentences
        parts += ["### What these numbers show\n", _list([*sentences, SENTENCES] if sentences else [NOTHING])]
    return "\n".join(parts)


def _list(lines: Sequence[str]) -> str:
    return "".join(f"- {markdown_text(line)}\n" for line in lines)


def write_results(testbeds: Sequence[TestbedResults], folder: Path) -> list[str]:
    """Write the figures of all testbeds as HTML pages and pictures, and ``results.md``.

    Returns one line for each reason why pictures could not be made; ``results.md`` then shows none.
    """
    write_shared_plotly(folder)
    titles_of_all = []
    with Pictures() as drawing:
        for number, results in enumerate(testbeds, 1):
            testbed, prefix, titles = results.testbed, "", {}
            if len(testbeds) > 1:  # the names of the files begin with the testbed
                prefix = f"{number}-{testbed.model_size}-{testbed.world_size}-ranks-{testbed.device or 'none'}-"
                prefix = re.sub(r"[^A-Za-z0-9.-]+", "-", prefix)
            for name, (title, figure) in draw_figures(results).items():
                titles[f"{prefix}{name}"] = title
                drawing.draw(figure, folder / f"{prefix}{name}.png")
                write_figure(figure, title=title, page=folder / f"{prefix}{name}.html", shared_plotly=True)
            titles_of_all.append(titles)
        problems = drawing.try_finish()
    with atomic_write(folder / REPORT) as partial:
        text = results_markdown(testbeds, () if problems else titles_of_all)
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    return problems


def write_results_csv(testbeds: Sequence[TestbedResults], path: Path) -> None:
    """Write ``results.csv``: a row for each setting of each testbed."""
    with (
        atomic_write(path) as partial,
        partial.open("w", encoding="utf-8", newline="") as file,
    ):
        write_csv(csv_rows(testbeds), file)
