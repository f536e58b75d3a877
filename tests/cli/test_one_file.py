"""``report --one-file``: what is handed in and mailed holds all that it shows, and says what other commands say."""

from __future__ import annotations

import base64
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_prof.benchmark.bucket_model import BucketModel
from ddp_prof.benchmark.findings import gather_testbeds
from ddp_prof.benchmark.store import load_results
from ddp_prof.benchmark.study import study_of
from ddp_prof.manifest import load_manifest
from tests.command_line import csv_rows, run

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "traces"
GLOO = TRACES / "h200" / "gloo"


class Page(HTMLParser):
    """The sentences, cells, figures and addresses of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sentences: list[str] = []
        self.rows: list[list[str]] = []
        self.figures: dict[str, Any] = {}
        self._open = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        kind = dict(attrs).get("class") or ""
        if tag == "tr":
            self.rows.append([])
        self._open = "sentence" if tag == "h1" or kind == "story" else tag

    def handle_data(self, data: str) -> None:
        name = self.tags[-1][1].get("id") or "" if self.tags else ""
        if self._open == "sentence" and data.strip():
            self.sentences.append(data.strip())
        elif self._open in ("th", "td") and data.strip():
            self.rows[-1].append(data.strip())
        elif self._open == "script" and name.startswith("chart-"):
            self.figures[name.removeprefix("chart-").removesuffix("-data")] = json.loads(data)

    def handle_endtag(self, tag: str) -> None:
        if tag == self._open or tag in ("h1", "p"):
            self._open = ""

    def values(self, name: str) -> list[str]:
        return [value for _, attributes in self.tags if (value := attributes.get(name))]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    path = tmp_path_factory.mktemp("mail") / "report.html"
    assert run("report", TRACES, "--one-file", path).exit_code == 0
    return Page(path)


def test_nothing_in_it_is_elsewhere(page: Page) -> None:
    assert {value.partition(":")[0] for value in page.values("src")} == {"data"}
    assert all(value.startswith(("#", "data:")) for value in page.values("href"))
    targets = {value.removeprefix("#") for value in page.values("href") if value.startswith("#")}
    assert targets <= set(page.values("id"))


def test_its_table_is_that_of_compare(page: Page) -> None:
    rows = {row[0]: row[1:] for row in reversed(page.rows) if row}  # the first table
    for found in csv_rows("compare", TRACES):
        step, comm, share = (float(found[key]) for key in ("step_ms", "comm_ms", "comm_of_step_%"))
        assert [float(cell) for cell in rows[found["variant"]][:3]] == pytest.approx([step, comm, share], abs=0.06)
        assert share == pytest.approx(100 * comm / step, rel=0.15), "a ratio of medians is near the median ratio"


def test_it_draws_step_and_tail_by_bucket_size_with_the_expectation(page: Page) -> None:
    (results,) = gather_testbeds(load_results(TRACES / "results.db"))
    assert isinstance(results.model, BucketModel)
    traces = {trace["name"]: trace for trace in page.figures["sizes"]["data"]}
    assert traces["step"]["x"] == [1, 10, 100]
    workload = (4, 128)  # that of the captures, if it was measured, else the largest
    measured = {one.setting.workload for one in results.summaries}
    workload = workload if workload in measured else max(measured)
    expected = [results.model.expected_ns(mb, workload) / 1e6 for mb in (1, 10, 100)]
    assert traces["tail, expected"]["y"] == pytest.approx(expected)
    known = {one.setting.swept_mb: one for one in results.summaries if one.setting.workload == workload}
    tails = [trace.tail_ns / 1e6 for mb in (1, 10, 100) if (trace := known[mb].trace)]
    assert traces["tail, measured"]["y"] == pytest.approx(tails)


def test_its_sentences_are_those_that_the_measurements_support(page: Page) -> None:
    (results,) = gather_testbeds(load_results(TRACES / "results.db"))
    text = " ".join(page.sentences)
    for one in results.observations:
        if one.text:
            assert one.text in text, one.name
    expectation = [sentence for sentence in page.sentences if sentence.startswith(("Expected: ", "Measured: "))]
    assert len(expectation) == 2
    assert "off by" in expectation[1]


def test_it_holds_the_pictures_of_the_gui(page: Page) -> None:
    pictures = [value.partition(",")[2] for value in page.values("src")]
    held = [base64.b64decode(picture) for picture in dict.fromkeys(pictures)]
    assert held == [(ROOT / "figures" / f"nsys_{name}.png").read_bytes() for name in ("naive", "overlap")]


def test_without_measurements_by_size_it_says_that_nothing_was_expected(tmp_path: Path) -> None:
    assert run("report", *GLOO.glob("bucketed*.json.gz"), "--one-file", tmp_path / "x.html").exit_code == 0
    page = Page(tmp_path / "x.html")
    assert [trace["name"] for trace in page.figures["sizes"]["data"]] == ["step", "tail, measured"]
    steps = {row["variant"]: float(row["step_ms"]) for row in csv_rows("compare", *GLOO.glob("bucketed*.json.gz"))}
    drawn = page.figures["sizes"]["data"][0]["y"]
    assert drawn == pytest.approx([steps[f"bucketed {mb} MB"] for mb in (1, 10, 100)], abs=0.01)
    assert any(sentence.startswith("What was to be expected") for sentence in page.sentences)


def test_sizes_of_different_work_are_no_curve(tmp_path: Path) -> None:
    """A line joined a small batch with 1 MiB and one twice as large with 10 MiB: its slope is no effect of buckets."""
    for name, batch_size in (("bucketed_1mb", 8), ("bucketed_10mb", 16)):
        shutil.copy(TRACES / f"{name}.sqlite", tmp_path)
        made = json.loads((TRACES / f"{name}.run.json").read_text(encoding="utf-8"))
        (tmp_path / f"{name}.run.json").write_text(json.dumps(made | {"batch_size": batch_size}), encoding="utf-8")
    path = tmp_path / "report.html"
    assert run("report", tmp_path, "--one-file", path).exit_code == 0
    assert "sizes" not in Page(path).figures


@pytest.mark.parametrize("tokens", [32, 64])
def test_the_curve_is_of_the_work_of_the_runs(tokens: int) -> None:
    """``run.json`` has the batch of both ranks, the database that of one: none was found, and the largest was drawn."""
    made = replace(load_manifest(TRACES / "bucketed_10mb.run.json"), seq_len=tokens)
    run_of_it = SimpleNamespace(files=[TRACES / "bucketed_10mb.sqlite"], manifest=made)
    (figure,) = study_of([run_of_it], []).figures.values()
    assert f"batch 2 x {tokens}" in json.dumps(figure["layout"]["title"])


def test_a_folder_beside_it_is_refused(tmp_path: Path) -> None:
    """It was ignored, and whoever asked for both looked for the folder."""
    done = run("report", TRACES / "flat.sqlite", "--one-file", tmp_path / "report.html", "-o", tmp_path / "pages")
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "--one-file writes a page and no folder: leave out --output" in done.stderr


def test_one_picture_is_not_called_two(tmp_path: Path) -> None:
    shutil.copy(TRACES / "flat.sqlite", tmp_path)
    shutil.copy(ROOT / "figures" / "nsys_naive.png", tmp_path)
    assert run("report", tmp_path / "flat.sqlite", "--one-file", tmp_path / "x.html").exit_code == 0
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert ("Two schedules in the GUI" in text, "A schedule in the GUI" in text) == (False, True)


def test_of_one_run_it_has_no_curve(tmp_path: Path) -> None:
    assert run("report", *GLOO.glob("overlap.*.json.gz"), "--one-file", tmp_path / "x.html").exit_code == 0
    page = Page(tmp_path / "x.html")
    assert "sizes" not in page.figures
    assert re.match(r"28 % of communication is hidden", page.sentences[0])
    assert "ranks" in page.figures


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    assert run("report", TRACES / "overlap.sqlite", "--one-file", tmp_path / "x.pdf").exit_code == 2
