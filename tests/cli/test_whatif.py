"""``ddp-prof whatif``: predictions as tables, and refusals, each one line."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from ddp_prof.analyze.what_if.prediction import MODEL_ERROR
from ddp_prof.present.tables.whatif import VIEWS_SAVE_COPIES
from tests.command_line import run


@pytest.fixture
def unet(shared_traces: Path) -> Path:
    return shared_traces / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite"


def test_a_row_for_each_question_with_bounds_first(unet: Path) -> None:
    asked = ("--bucket-sizes-mb", "25,100", "--views", "--time-per-byte", "0.5,2", "--bf16", "--one-bucket")
    found = json.loads(run("whatif", *asked, "--format", "json", unet).stdout)
    assert [one["change"] for one in found["predictions"]] == [
        *("bucket size 25 MiB", "bucket size 100 MiB", "one bucket", "gradient_as_bucket_view", "bf16 on the wire"),
        *("time per byte x 0.5", "time per byte x 2"),
    ]
    assert found["reason"] is None
    assert found["sizes"]["source"] == "copies out of buckets"
    assert found["sizes"]["doubts"] == []
    assert found["bounds"]["schedule_ns"] is not None
    views = found["predictions"][3]
    assert views["low_ns"] < views["change_ns"] < views["high_ns"] < 0
    table = run("whatif", *asked, unet).stdout
    assert table.index("no network more than") < table.index("gradient_as_bucket_view"), "bounds come first"
    # It gains more than the bound above it, and says why.
    assert -views["change_ns"] > found["bounds"]["schedule_ns"]
    assert VIEWS_SAVE_COPIES in " ".join(table.split())
    assert VIEWS_SAVE_COPIES not in " ".join(run("whatif", "--time-per-byte", "0.5", unet).stdout.split())
    rows = list(csv.DictReader(run("whatif", "--views", "--format", "csv", unet).stdout.splitlines()))
    assert [(row["what_if"], row["verdict"]) for row in rows] == [("gradient_as_bucket_view", "gain")]


def test_questions_that_are_not_answered_are_rows_with_a_reason(unet: Path) -> None:
    asked = ("--without", "waits", "--without", "communication", "--ranks", "8", "--bucket-sizes-mb", "400")
    found = json.loads(run("whatif", *asked, "--format", "json", unet).stdout)["predictions"]
    assert {one["verdict"] for one in found} == {"not predicted"}
    assert all(one["change_ns"] is None and one["reason"] for one in found)


def test_parameters_from_a_file(unet: Path, tmp_path: Path) -> None:
    file = tmp_path / "parameters.txt"
    for content, reason in (
        ("", "it holds no parameter"),
        ("many weight\n", "line 1 does not begin with a number of bytes"),
        ("12 a\n\n-3 b\n", "line 3 does not begin with a number of bytes"),
        (b"\xff\xfe\x00", "it is no text"),
        (f"{1 << 50} w\n" * (1 << 14), "more bytes than any model"),  # their sum would overflow
    ):
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        failed = run("whatif", "--parameters", file, unet)
        assert reason in failed.stderr
        assert len(failed.stderr.strip().splitlines()) == 1
    file.write_text("4096 a\n")
    assert "446 MiB" in run("whatif", "--parameters", file, unet).stdout, "copies come first"


@pytest.mark.parametrize("wrong", ["0", "-1", "x", "nan", "inf", "1e6"])
def test_impossible_numbers(wrong: str, own_traces: list[Path]) -> None:
    """Of 1e6 it said: "is no positive number"."""
    reason = f"'{wrong}' cannot be used: give positive numbers below 1,000,000, such as 0.5,2"
    assert reason in run("whatif", "--bucket-sizes-mb", wrong, own_traces[0]).stderr


@pytest.mark.parametrize("nothing", ["", ",", " "])
def test_no_number_is_not_taken_for_the_usual_questions(nothing: str, own_traces: list[Path]) -> None:
    failed = run("whatif", "--time-per-byte", nothing, own_traces[0])
    assert (failed.exit_code, "there is no number" in failed.stderr) == (2, True)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("nsys2024_6_cuda_graphs_a100.sqlite", "--cuda-graph-trace=node"),
        ("kineto_a100_ddp_rank0of2.json.gz", "capture it with another bucket size"),
        ("kineto_gloo_ddp_rank34of300.json.gz", "such as naive"),
    ],
)
def test_captures_that_tell_nothing(name: str, way: str, shared_traces: Path) -> None:
    text = run("whatif", shared_traces / name).stdout
    (line,) = [line for line in text.splitlines() if line.startswith("Nothing is predicted: ")]
    assert way in line


def test_ranks_that_share_a_gpu_and_cores() -> None:
    folder = Path(__file__).parents[2] / "traces"
    assert "a GPU for each rank" in run("whatif", folder / "h200" / "nccl" / "torch.sqlite").stdout
    assert "--calibrate" in run("whatif", folder / "torch.sqlite").stdout


def test_a_second_capture_calibrates_one_on_a_cpu() -> None:
    folder = Path(__file__).parents[2] / "traces"
    for other, reason in (
        ("naive.sqlite", "a simulation of today's step is off"),
        ("overlap.sqlite", "such as naive"),
    ):
        text = run("whatif", "--calibrate", folder / other, folder / "bucketed_10mb.sqlite").stdout
        assert reason in text
    several = run("whatif", "--calibrate", folder, folder / "naive.sqlite")
    assert several.exit_code == 2
    assert "give one" in several.stderr


def test_a_terminal_shows_the_whole_interval_and_each_reason(unet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns the lower end was hidden beside the higher one, and a refusal stood there without its reason."""
    for width, most in (("80", 80), ("120", 120), ("", 200)):
        monkeypatch.setenv("COLUMNS", width)
        lines = run("whatif", "--views", "--one-bucket", "--ranks", "8", unet).stdout.splitlines()
        (views,) = [line for line in lines if line.rstrip().endswith(" gain")]
        assert "-0.93" in views
        assert "-0.40" in views
        text = " ".join(line.strip() for line in lines)
        assert "note: one bucket: its largest collective, 446.2 MiB" in text
        assert "note: 8 ranks: a link between" in text
        assert len(views) <= most
        assert " MB" not in text


def test_bucket_sizes_and_views_at_once(unet: Path) -> None:
    asked = ("--bucket-sizes-mb", "25,100", "--views", "--together", "--format", "json")
    found = json.loads(run("whatif", *asked, unet).stdout)
    changes = {one["change"]: one["change_ns"] for one in found["predictions"]}
    today, larger, views, at_25, at_100 = changes.values()
    assert list(changes)[-2:] == [f"bucket size {mb} MiB with gradient_as_bucket_view" for mb in (25, 100)]
    assert (today, at_25) == (0, views)
    assert at_100 < min(larger, views)
    wrong = run("whatif", "--views", "--together", unet)
    assert (wrong.exit_code, "--bucket-sizes-mb" in wrong.stderr) == (2, True)


def test_where_the_figures_of_a_prediction_are_from(unet: Path) -> None:
    """The headline's kappa and that of the simulation looked like one figure."""
    found = json.loads(run("whatif", "--views", "--format", "json", unet).stdout)
    assert found["cost"]["kappa"] == pytest.approx(1.51, abs=0.01)
    assert found["kappa_of_step"] == found["kappa"] == pytest.approx(1.455, abs=0.01)
    assert found["model_error"]["share_of_step"] == MODEL_ERROR
    assert "gloo on a CPU" in found["model_error"]["from"]
    text = run("whatif", "--views", unet).stdout
    assert "takes 1.46 times as long, which is kappa of the step" in text
    assert "0.26 ms of each half of an interval are the model's own error, 1.645 x 0.53 % of a step" in text
