"""``timeline``, ``report`` and ``export`` from the command line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.command_line import run
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import write_capture

pytestmark = pytest.mark.usefixtures("no_browser")


def test_a_timeline_of_two_traces(trace: Path, tmp_path: Path) -> None:
    other = write_capture(tmp_path / "other.sqlite", known_truth(2))
    page = tmp_path / "new" / "page.html"
    result = run("timeline", trace, other, "-o", page)
    assert (result.exit_code, result.stdout.strip()) == (0, str(page))
    assert "<title>known hides 74 %, other 74 % of their communication behind compute</title>" in page.read_text()


def test_a_page_is_written_even_where_its_picture_cannot_be(trace: Path, tmp_path: Path) -> None:
    result = run("timeline", trace, "-o", tmp_path / "page.html", "--png", tmp_path / "page.png")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: pictures need Chromium")
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize("steps", ["x", "5-3", "1-", "-2", "", "1,,2", "0-99999999999"])
def test_steps_that_are_none_are_wrong_usage(trace: Path, steps: str) -> None:
    assert run("timeline", trace, "--steps", steps).exit_code == 2


def test_steps_that_are_not_there_are_an_error(trace: Path, tmp_path: Path) -> None:
    result = run("timeline", trace, "--steps", "98-99", "-o", tmp_path / "page.html")
    assert result.exit_code == 1
    assert "none of the steps asked for is among its measured steps 0 to 3" in result.stderr


def test_another_step_is_advised_only_where_a_step_communicates(trace: Path, tmp_path: Path) -> None:
    """Where nothing communicates, '--step' could not help."""
    alone = known_truth()
    alone.kernels = [kernel for kernel in alone.kernels if "nccl" not in kernel.name]
    nothing = write_capture(tmp_path / "alone.sqlite", alone)
    picture = ("--html", tmp_path / "x.html", "--step", "99")
    assert "choose another one with --step" in run("collectives", trace, *picture).stderr
    said = run("collectives", nothing, *picture)
    assert (said.exit_code, said.stderr.splitlines()[-1]) == (
        1,
        f"Error: {nothing}: nothing in its steps is known to communicate: 'ddp-prof timeline' draws what they hold",
    )
    assert run("timeline", nothing, "-o", tmp_path / "y.html").exit_code == 0
    assert not (tmp_path / "x.html").exists()


def test_a_report(trace: Path, tmp_path: Path) -> None:
    result = run("report", trace, "-o", tmp_path / "figures")
    assert (result.exit_code, result.stdout.strip()) == (0, str(tmp_path / "figures" / "index.html"))
    assert result.stderr.startswith("note: pictures need Chromium")
    assert (tmp_path / "figures" / "known.html").is_file()


def test_an_export_holds_calls_and_arrows(shared_traces: Path, tmp_path: Path) -> None:
    assert run("export", shared_traces / "nsys2025_3_single_gpu_t4.sqlite", "-o", tmp_path / "x.json").exit_code == 0
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} >= {"s", "f"}
    assert {"cudaLaunchKernel"} <= {event["name"] for event in events if event.get("cat") == "call"}


def test_an_export_of_two_traces(trace: Path, tmp_path: Path) -> None:
    other = write_capture(tmp_path / "other.sqlite", known_truth(2))
    target = tmp_path / "new" / "both.json.gz"
    result = run("export", trace, other, "-o", target)
    assert (result.exit_code, result.stdout.strip()) == (0, str(target))
    events = json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    assert len({event["pid"] for event in events}) == 2


def test_an_export_never_replaces_its_trace(trace: Path) -> None:
    before = trace.read_bytes()
    result = run("export", trace, "-o", trace)
    assert result.exit_code == 2
    assert "which is only read" in result.stderr
    assert trace.read_bytes() == before
