from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.analyze import DEFINITIONS
from ddp_prof.benchmark import report
from ddp_prof.benchmark.charts import draw_bandwidth, draw_buckets, draw_figures, draw_model, draw_variants
from ddp_prof.benchmark.findings import TestbedResults, gather_testbeds
from ddp_prof.benchmark.report import (
    NO_SPREAD,
    OTHER_CODE,
    SPREAD,
    csv_rows,
    messages_view,
    results_document,
    results_markdown,
    results_views,
    settings_view,
    write_results,
    write_results_csv,
)
from ddp_prof.benchmark.store import load_results
from ddp_prof.columns import size
from ddp_prof.manifest import Caveat
from ddp_prof.present.charts.static_images import Pictures
from tests.benchmark.results_factory import GRADIENT_BYTES, MS, OTHER_ENVIRONMENT, SIZES, Sweep, line, study_like
from tests.charts import validated
from tests.conftest import ROOT
from tests.present.runs import HOSTILE_TITLE

draw_bandwidth = validated(draw_bandwidth)
draw_buckets = validated(draw_buckets)
draw_model = validated(draw_model)
draw_variants = validated(draw_variants)

HEADER = (
    "implementation,model_size,d_model,num_layers,world_size,avg_step_time_ms,avg_comm_time_ms,comm_overhead_pct,"
    "num_comm_ops,speedup_vs_naive,comm_speedup_vs_naive,bucket_size_mb,local_batch_size,seq_len,status,reason,runs,"
    "failed_runs,steps_per_run,step_time_spread_ms,comm_time_spread_ms,speedup_spread,comm_time_synchronized_ms,"
    "comm_time_synchronized_spread_ms,forward_ms,forward_spread_ms,backward_ms,backward_spread_ms,optimizer_ms,"
    "optimizer_spread_ms,trace_captures,trace_comm_ms,trace_overlapped_ms,trace_exposed_ms,trace_tail_ms,comm_bytes,"
    "gradient_bytes,parameters,peak_memory_bytes,tokens_per_s,device,backend,caveat,environment,cpu,cores,gpus,torch,"
    "ddp_prof,git_commit,definitions"
)


def testbeds_of(sweep: Sweep) -> list[TestbedResults]:
    return gather_testbeds(sweep.results())


def testbed_of(sweep: Sweep) -> TestbedResults:
    (testbed,) = testbeds_of(sweep)
    return testbed


def exact() -> Sweep:
    sweep = Sweep(noise=0)
    sweep.add("naive", 100, 40, messages=[(size, line(size)) for size in SIZES], caveat="ranks share a GPU")
    for bucket, step in ((1.0, 90), (10.0, 80), (100.0, 85)):
        sweep.add("bucketed", step, 20, bucket=bucket, collectives=4)
    sweep.add("bucketed", 60, 10, bucket=1.0, work=(2, 32))
    sweep.fail("flat")
    return sweep


class TestRows:
    def test_the_columns_of_the_study_come_first(self) -> None:
        rows = csv_rows(testbeds_of(exact()))
        assert ",".join(rows[0]) == HEADER
        assert all(list(row) == list(rows[0]) for row in rows)

    def test_numbers_are_in_the_units_of_their_columns(self) -> None:
        rows = csv_rows(testbeds_of(exact()))
        row = next(row for row in rows if row["bucket_size_mb"] == 10.0)
        numbers = {key: row[key] for key in ("avg_step_time_ms", "avg_comm_time_ms", "comm_overhead_pct")}
        assert numbers == pytest.approx({"avg_step_time_ms": 80, "avg_comm_time_ms": 20, "comm_overhead_pct": 25})
        assert (row["speedup_vs_naive"], row["comm_speedup_vs_naive"]) == pytest.approx((1.25, 2))
        assert row["tokens_per_s"] == pytest.approx(2 * 2 * 64 / 0.080)
        assert (row["peak_memory_bytes"], row["gradient_bytes"]) == (1002, GRADIENT_BYTES)
        assert (row["cpu"], row["environment"], row["device"]) == ("Two Cores", "e1", "cpu")

    def test_out_of_memory_is_a_row_with_its_reason(self) -> None:
        view = settings_view(testbed_of(exact()))
        row = next(row for row in view.rows if row["variant"] == "flat")
        assert (row["status"], row["step_ms"], row["runs"]) == ("out_of_memory", None, 0)
        assert "flat, batch 2 x 64: it needs 9 GB" in view.notes

    def test_a_reason_is_told_once(self) -> None:
        sweep = exact()
        sweep.fail("torch")
        sweep.fail("torch", work=(4, 64))
        notes = settings_view(testbed_of(sweep)).notes
        assert [note for note in notes if "9 GB" in note] == ["flat, batch 2 x 64, and 2 more: it needs 9 GB"]

    def test_notes_tell_the_spread_the_caveat_and_the_best_bucket(self) -> None:
        notes = settings_view(testbed_of(exact())).notes
        assert SPREAD in notes
        assert "ranks share a GPU" in notes
        best = size(round(math.sqrt(GRADIENT_BYTES * 200_000 * 0.8)))
        assert any(note.endswith(f"as long as the transfers, is {best}") for note in notes)

    def test_two_runs_of_each_are_said_to_tell_no_spread(self) -> None:
        sweep = Sweep(repeats=2)
        sweep.add("naive", 100, 40)
        assert NO_SPREAD in settings_view(testbed_of(sweep)).notes

    def test_traces_have_columns_where_there_are_some(self) -> None:
        assert "trace_exposed_ms" not in settings_view(testbed_of(exact())).rows[0]
        sweep = exact()
        sweep.add("torch", 70, 15, trace_comm_ns=9 * MS, trace_overlapped_ns=4 * MS, trace_exposed_ns=5 * MS)
        rows = settings_view(testbed_of(sweep)).rows
        assert [row["trace_exposed_ms"] for row in rows if row["variant"] in ("naive", "torch")] == [None, 5]

    def test_the_model_predicts_beside_what_was_measured(self) -> None:
        row = next(row for row in settings_view(testbed_of(exact())).rows if row["variant"] == "bucketed 10 MiB")
        assert row["predicted_ms"] == pytest.approx((GRADIENT_BYTES / 4 / 0.8 + 4 * 200_000) / 1e6, rel=1e-6)
        assert (row["comm_ms"], row["step_ms"]) == pytest.approx((20, 80))

    def test_bandwidths_follow_from_the_latency(self) -> None:
        sweep = Sweep(noise=0)
        for context, times in enumerate(((1e5, 4e6), (2e5, 5e6), (3e5, 6e6)), 64):
            messages = list(zip((1000, 10_000_000), times, strict=True))
            sweep.add("naive", 100, 50, work=(2, context), world_size=4, messages=messages)
        small, large = messages_view(testbed_of(sweep)).rows
        assert (small["latency_ms"], large["latency_ms"]) == (0.2, 5.0)
        assert large["algbw_median_GB/s"] == pytest.approx(10_000_000 / 5e6)
        assert large["busbw_median_GB/s"] == pytest.approx(1.5 * 10_000_000 / 5e6), "2 (n - 1) / n of four ranks"
        assert large["low_ms"] < large["latency_ms"] < large["high_ms"]

    @pytest.mark.parametrize(
        ("sizes", "note"),
        [
            ((1_000, 10_000_000), None),
            ((1_000_000, 10_000_000), "the overhead of a call is extrapolated"),
            ((1_000, 100_000), "the bandwidth is extrapolated"),
        ],
    )
    def test_sizes_that_do_not_span_the_range_of_the_fit_are_said(self, sizes: Sequence[int], note: str | None) -> None:
        sweep = Sweep(noise=0)
        sweep.add("naive", 100, 50, messages=[(size, line(size)) for size in sizes])
        found = [each for each in messages_view(testbed_of(sweep)).notes if "extrapolated" in each]
        assert [each.startswith(str(note)) for each in found] == ([True] if note else [])

    def test_where_messages_were_timed_their_table_is_shown_and_in_the_document(self) -> None:
        testbed = testbed_of(exact())
        (view,) = [view for view in results_views([testbed]) if view.title == "all-reduces, 2 ranks"]
        assert [row["bytes"] for row in view.rows] == sorted(SIZES)
        assert "### All-reduces, 2 ranks" in results_markdown([testbed])
        (document,) = results_document(Path("x.db"), [testbed])["testbeds"]
        assert [message["bytes"] for message in document["messages"]] == sorted(SIZES)

    def test_other_definitions_are_another_table_that_says_so(self) -> None:
        sweep = exact()
        sweep.add("torch", 70, 15, definitions=None)
        today, before = testbeds_of(sweep)
        assert "definitions" not in today.title
        old = "measured by version 1 or older of the definitions"
        assert f"{old}, today's is {DEFINITIONS}: measure again" in before.title
        assert [row["variant"] for row in settings_view(before).rows] == ["torch"]
        views = results_views([today, before])
        assert "2 testbeds are shown separately" in views[-1].notes[0]

    def test_runs_of_several_versions_of_the_code_are_said_to_be_mixed(self) -> None:
        sweep = exact()
        assert OTHER_CODE not in settings_view(testbed_of(sweep)).notes
        sweep.add("torch", 70, 15, code="c2")
        assert OTHER_CODE in settings_view(testbed_of(sweep)).notes


def test_a_sentence_goes_when_the_spread_grows() -> None:
    quiet, loud = (results_markdown([testbed_of(study_like(noise))]) for noise in (0.002, 0.3))
    assert re.search(r"- Bucketed 10 MiB takes \d+ % \(.*\) off the step of torch\.", quiet)
    assert "off the step of torch" not in loud
    assert "- no difference is reported: none is clear in enough pairs of runs" in results_markdown(
        [testbed_of(exact())], None
    )


def test_the_committed_study_follows_todays_definitions() -> None:
    results = load_results(ROOT / "traces" / "results.db")
    assert {run.definitions for run in results.runs} == {DEFINITIONS}
    traced = [run for run in results.runs if run.trace_tail_ns is not None]
    assert traced
    assert all(run.trace_tail_ns <= run.trace_exposed_ns <= run.trace_comm_ns for run in traced)


def test_names_are_text() -> None:
    sweep = Sweep()
    sweep.add("naive", 100, 40, caveat=HOSTILE_TITLE)
    text = results_markdown([testbed_of(sweep)])
    assert "<img" not in text.replace("\\<img", "")


def test_figures_say_that_ranks_shared_a_gpu() -> None:
    sweep = Sweep()
    sweep.add("naive", 100, 40, device="cuda", caveat=Caveat.SHARED_GPU.value)
    sweep.add("flat", 100, 40, device="cuda")
    assert Caveat.SHARED_GPU.value in draw_variants(testbed_of(sweep)).layout.title.subtitle.text


def test_two_environments_are_never_in_one_table_or_figure(tmp_path: Path) -> None:
    sweep = study_like()
    sweep.environment = OTHER_ENVIRONMENT
    sweep.add("naive", 9000, 10)
    testbeds = testbeds_of(sweep)
    views = [view for view in results_views(testbeds) if "environment" in view.title]
    assert [("e1" in view.title, "e2" in view.title) for view in views] == [(True, False), (False, True)]
    assert "2 testbeds are shown separately" in results_views(testbeds)[-1].notes[0]
    assert max(max(trace.x) for trace in draw_variants(testbeds[0]).data) < 400
    assert "step of naive" not in results_markdown(testbeds[1:])


def partly_captured() -> TestbedResults:
    """Results of which two have captures, with a tail of 5 ms."""
    sweep = exact()
    for bucket in (1.0, 10.0):
        sweep.add("bucketed", 90, 20, bucket=bucket, work=(4, 64), trace_comm_ns=9 * MS, trace_overlapped_ns=2 * MS,
                  trace_exposed_ns=7 * MS, trace_tail_ns=5 * MS)  # fmt: skip
    return testbed_of(sweep)


class TestFigures:
    def test_bars_are_the_step_in_two_parts(self) -> None:
        testbed = testbed_of(exact())
        rest, communication = draw_variants(testbed).data
        assert [a + b for a, b in zip(rest.x, communication.x, strict=True)] == pytest.approx([60, 100, 90, 80, 85])
        assert draw_variants(testbed).layout.yaxis.ticktext[0] == "<b>batch 2 x 32 tokens</b>  "
        texts = [item.text for item in draw_variants(testbed).layout.annotations]
        assert "out of memory" in texts
        assert "<b>40 %</b> communication" in texts
        assert "device: cpu" in draw_variants(testbed).layout.title.subtitle.text

    def test_a_curve_a_workload_and_a_line_for_its_fastest_other_variant(self) -> None:
        sweep = exact()
        for variant, step_ms in (("flat", 99), ("overlap", 95), ("torch", 97)):
            sweep.add(variant, step_ms, 30)
        curves = {item.name: item for item in draw_buckets(testbed_of(sweep)).data}
        assert list(curves) == [
            "bucketed, batch 2 x 32",
            "bucketed, batch 2 x 64",
            "fastest other, batch 2 x 64: overlap",
        ]
        assert list(curves["bucketed, batch 2 x 64"].customdata) == [1, 10, 100]
        assert list(curves["bucketed, batch 2 x 64"].y) == pytest.approx([90, 80, 85])
        assert list(curves["fastest other, batch 2 x 64: overlap"].y) == pytest.approx([95, 95])

    def test_what_is_said_of_the_model_is_not_cut(self) -> None:
        testbed = partly_captured()
        (told,) = [one.text for one in testbed.observations if one.name.startswith("model_") and one.text]
        lines = draw_buckets(testbed).layout.title.subtitle.text.split("<br>")[1:]
        assert " ".join(lines) == told
        assert len(lines) > 1

    def test_a_size_above_all_gradients_is_one_bucket(self) -> None:
        axis = draw_buckets(testbed_of(exact())).layout.xaxis
        assert list(axis.ticktext) == ["1", "10", "100 and more<br>(one bucket)"]
        assert (axis.title.text, axis.type) == ("bucket size (MiB, log scale)", "log")

    def test_the_model_is_drawn_with_what_was_left_by_trace_else_by_timer(self) -> None:
        testbed = partly_captured()
        drawn = draw_model(testbed, testbed.model)
        lines, dots = drawn.data[::2], drawn.data[1::2]
        assert {item.name: list(item.y) for item in dots} == {
            "host timer, batch 2 x 32": pytest.approx([10]),
            "host timer, batch 2 x 64": pytest.approx([20, 20, 20]),
            "tail by trace, batch 4 x 64": pytest.approx([5, 5]),
        }
        for curve, of_line in zip(lines, dots, strict=True):
            expected = dict(zip(curve.x, curve.y, strict=True))
            sizes = [min(expected, key=lambda mb: abs(mb - at)) for at in of_line.x]
            assert [expected[mb] for mb in sizes] == pytest.approx(list(of_line.customdata)), "dots have their line's"
        assert drawn.layout.title.text.startswith("<b>Tail by bucket size: what was expected is off by")

    def test_figures_need_what_they_show(self) -> None:
        sweep = Sweep()
        sweep.add("naive", 100, 40)
        assert list(draw_figures(testbed_of(sweep))) == ["variants"]
        assert list(draw_figures(testbed_of(exact()))) == ["variants", "buckets", "model", "bandwidth"]

    def test_bandwidth_has_the_measured_sizes_and_the_fitted_line(self) -> None:
        dots, fitted = draw_bandwidth(testbed_of(exact())).data
        assert list(dots.x) == list(SIZES)
        assert list(dots.y) == pytest.approx([size / line(size) for size in SIZES], rel=1e-4)
        assert fitted.y[0] == pytest.approx(dots.y[0], rel=1e-3)
        assert fitted.y[-1] == pytest.approx(dots.y[-1], rel=1e-3)

    def test_ticks_of_bandwidth_have_units_and_no_lone_digits(self) -> None:
        layout = draw_bandwidth(testbed_of(exact())).layout
        assert all(text.split()[1] in ("KiB", "MiB", "GiB") for text in layout.xaxis.ticktext)
        assert min(layout.xaxis.tickvals) <= min(SIZES)
        assert max(layout.xaxis.tickvals) >= max(SIZES)
        assert layout.yaxis.dtick == 1, "a label for each power of ten"

    def test_bars_of_bandwidth_are_the_interval_over_runs(self) -> None:
        sweep = Sweep(repeats=3)
        sweep.add("naive", 100, 50, messages=[(1000, 5000.0), (100_000, 50_000.0)])
        results = testbed_of(sweep)
        (small, _) = results.messages
        dots = draw_bandwidth(results).data[0]
        assert small.low_ns <= small.median_ns <= small.high_ns
        assert dots.y[0] + dots.error_y.array[0] == pytest.approx(1000 / small.low_ns)
        assert dots.y[0] - dots.error_y.arrayminus[0] == pytest.approx(1000 / small.high_ns)


@pytest.mark.usefixtures("no_browser")
class TestFiles:
    def test_without_chromium_pages_and_text_are_written_all_the_same(self, tmp_path: Path) -> None:
        (problem,) = write_results([testbed_of(exact())], tmp_path / "new")
        assert "apt-get install chromium" in problem
        assert {path.name for path in (tmp_path / "new").iterdir()} == {
            "results.md", "plotly.min.js", "variants.html", "buckets.html", "model.html", "bandwidth.html",
        }  # fmt: skip
        text = (tmp_path / "new" / "results.md").read_text()
        assert "![" not in text

    def test_testbeds_have_files_of_their_own(self, tmp_path: Path) -> None:
        sweep = exact()
        sweep.add("naive", 100, 40, model_size="a/../b")
        write_results(testbeds_of(sweep), tmp_path / "new")
        names = {path.name for path in (tmp_path / "new").glob("*variants.html")}
        assert names == {"1-mini-2-ranks-cpu-variants.html", "2-a-..-b-2-ranks-cpu-variants.html"}

    def test_the_csv_is_replaced_whole(self, tmp_path: Path) -> None:
        results = exact().results()
        path = tmp_path / "results.csv"
        path.write_text("old")
        write_results_csv(gather_testbeds(results), path)
        assert path.read_text().splitlines()[0] == HEADER
        assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]


class NotDrawn(Pictures):
    """Makes the files, and nothing in them."""

    def draw(self, chart: Any, path: Path) -> None:
        path.touch()

    def try_finish(self) -> list[str]:
        return []


@pytest.mark.usefixtures("no_browser")
def test_pictures_are_shown_in_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "Pictures", NotDrawn)
    assert write_results([testbed_of(exact())], tmp_path) == []
    text = (tmp_path / "results.md").read_text()
    shown = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert shown == ["variants.png", "buckets.png", "model.png", "bandwidth.png"]
    assert all((tmp_path / name).is_file() for name in shown)
