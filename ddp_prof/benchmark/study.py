"""Makes what a report says about bucket sizes, from a database of measurements beside the traces or from captures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_prof.analyze.variants.comparison import VariantSummary
from ddp_prof.benchmark.bucket_model import BucketModel, compare_expectations, mismatch_text
from ddp_prof.benchmark.charts import testbed_subtitle
from ddp_prof.benchmark.findings import TestbedResults, bucket_sizes, gather_testbeds
from ddp_prof.benchmark.report import link_note
from ddp_prof.benchmark.settings import SettingSummary, half_ms, value_ms
from ddp_prof.benchmark.store import load_results
from ddp_prof.benchmark.turns import TURNS
from ddp_prof.manifest import Manifest, caveats_of
from ddp_prof.present import theme
from ddp_prof.present.charts import Chart
from ddp_prof.present.charts.sizes import SizePoint, draw_sizes
from ddp_prof.present.columns import ms
from ddp_prof.present.html.one_file import Study
from ddp_prof.runs.run import Run

DATABASES = (TURNS, "results.db")
"""Names of databases beside the traces. The first one that has measurements of the testbed of the runs is used."""
SIZES = "sizes"
"""Name of the figure."""
NOT_EXPECTED = (
    "What was to be expected of each bucket size is not known: no measurements of all-reduces by size lie beside the "
    "traces (scripts/run_comparison.sh, or profile_all.sh, makes them)."
)


def study_of(runs: Sequence[Run], summaries: Sequence[VariantSummary]) -> Study:
    """Return a figure of step and tail over bucket size, sentences about them, and how well predictions fit.

    All three come from a database beside the traces. Without one the figure is drawn from the captured runs, if they
    have two bucket sizes with the same workload; ``summaries`` are the figures of ``runs``, in the same order.

    Raises:
        TraceError: A file with the name of a database is something else.
    """
    if results := _testbed_of(runs):
        workload = _workload_of(runs, results)
        sentences = [one.text for one in results.observations if one.text and one.name != "model_error"]
        return Study({SIZES: _draw_results(results, workload)}, sentences, _expectation(results))
    # Group the captures by workload and draw the group with the most bucket sizes.
    by_work: dict[tuple[Any, ...], list[tuple[SizePoint, Manifest]]] = {}
    for run, summary in zip(runs, summaries, strict=True):
        made = run.manifest
        if made and made.variant == "bucketed" and made.bucket_size_mb:
            point = SizePoint(made.bucket_size_mb, ms(summary.step_ns), ms(summary.tail_ns))
            work = (made.device, made.backend, made.world_size, made.model_size, made.batch_size, made.seq_len)
            by_work.setdefault(work, []).append((point, made))
    alike = max(by_work.values(), key=lambda of_work: len({point.mb for point, _ in of_work}), default=[])
    points = [point for point, _ in alike]
    if len({point.mb for point in points}) < 2:  # a line through different work would show no effect of buckets
        return Study({})
    made = alike[0][1]
    which = f" with batch size {made.batch_size}, sequence length {made.seq_len}" if len(by_work) > 1 else ""
    caveats = [caveat for _, one in alike for caveat in caveats_of(one)]
    title = f"{theme.device_notice({made.device}, caveats)}  ·  of the captures{which}"
    gradients = 4 * sum(one.numel for one in made.parameters)
    return Study({SIZES: draw_sizes(points, gradients, title)}, (), [NOT_EXPECTED])


def _testbed_of(runs: Sequence[Run]) -> TestbedResults | None:
    """Return the measured testbed that has the model, device and number of ranks of the runs, and several bucket sizes.

    Returns ``None`` if no database beside the traces has one.
    """
    made = next((run.manifest for run in runs if run.manifest), None)
    if made is None:
        return None
    folders = dict.fromkeys(run.files[0].parent for run in runs)
    for path in (folder / name for folder in folders for name in DATABASES):
        for results in gather_testbeds(load_results(path)) if path.is_file() else ():
            testbed = results.testbed
            same = (testbed.model_size, testbed.device, testbed.world_size) == (
                made.model_size,
                made.device,
                made.world_size,
            )
            if same and len(bucket_sizes(results.summaries)) > 1:
                return results
    return None


def _workload_of(runs: Sequence[Run], results: TestbedResults) -> tuple[int, int]:
    """Return a workload of the runs that was measured, else the largest measured workload."""
    measured = {one.setting.workload for one in results.summaries if one.setting.swept_mb is not None}
    workloads = [(run.manifest.local_batch_size, run.manifest.seq_len) for run in runs if run.manifest]
    return next((workload for workload in workloads if workload in measured), max(measured))


def _draw_results(results: TestbedResults, workload: tuple[int, int]) -> Chart:
    """Return the figure of the measured bucket sizes of one workload."""
    model = results.model if isinstance(results.model, BucketModel) else None
    drawn = [one for one in results.summaries if one.setting.swept_mb is not None and one.setting.workload == workload]
    points = [_point(one, model) for one in drawn if one.step_ns]
    title = f"{testbed_subtitle(results)}  ·  {drawn[0].setting.work_text}"
    return draw_sizes(points, drawn[0].first.gradient_bytes, title)


def _point(one: SettingSummary, model: BucketModel | None) -> SizePoint:
    """Return what the figure shows of a setting: step, how far its interval reaches, tail and predicted tail, in ms."""
    mb = one.setting.swept_mb or 0.0
    expected = model.expected_ns(mb, one.setting.workload) if model else None
    tail = one.trace.tail_ns if one.trace else None
    return SizePoint(mb, value_ms(one.step_ns), ms(tail), ms(expected), half_ms(one.step_ns))


def _expectation(results: TestbedResults) -> list[str]:
    """Return a paragraph about the prediction and one about its error, or one that says why there is no prediction."""
    if not isinstance(results.model, BucketModel):
        return [f"What was to be expected is not known: {results.model}."]
    text = link_note(results.model, contradicted=results.contradicts_model)
    expectations = compare_expectations(results.model, results.summaries)
    paragraphs = [f"Expected: {text}."]
    return [*paragraphs, f"Measured: {mismatch_text(results.model, expectations)}"] if expectations else paragraphs


def picture_folders(runs: Sequence[Run], output: Path) -> list[Path]:
    """Return the folders in which screenshots may lie.

    They are the output's folder, the traces' folders, and for each of these a folder ``figures`` beside it.
    """
    folders = [run.files[0].absolute().parent for run in runs]
    return [*dict.fromkeys((output.absolute().parent, *folders, *(one.parent / "figures" for one in folders)))]
