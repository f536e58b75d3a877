from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from ddp_prof.analyze.collectives.step_view import view_step
from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.analyze.variants.waterfall import measure_waterfall
from ddp_prof.manifest import Caveat, Manifest, in_variant_order
from ddp_prof.present.charts.collectives import draw_skew, draw_step_collectives
from ddp_prof.present.charts.comparison import draw_comparison, draw_step_times, draw_waterfall
from ddp_prof.present.headlines import Headline, gain_headline
from ddp_prof.present.html.report import ReportRun, counts_text, write_index, write_report
from tests.charts import validated
from tests.command_line import run
from tests.drawing import draw_trace
from tests.present.runs import HOSTILE_TITLE, cpu_run, run_of

draw_comparison = validated(draw_comparison)
draw_step_times = validated(draw_step_times)
draw_waterfall = validated(draw_waterfall)
draw_step_collectives = validated(draw_step_collectives)
draw_skew = validated(draw_skew)


def manifest(**changes: object) -> Manifest:
    values = {
        "variant": "overlap", "bucket_size_mb": None, "world_size": 2, "backend": "gloo", "device": "cpu",
        "model_size": "mini", "batch_size": 4, "seq_len": 128, "steps": 10, "warmup": 5, "seed": 0,
        "step_seconds": (), "communication_seconds": (), "final_loss": 1.0, "profiler": "nsys 2023.4", "key": None,
        "versions": {"torch": "2.9"}, "machine": {"cpus": 2, "memory_bytes": 3 << 30, "gpus": ""},
        "git_commit": "abc123", "created": "2026-01-01", "command": ("python", "-m", "ddp_prof.train", "<b>"),
        "parameters": (),
    }  # fmt: skip
    return Manifest(**{**values, **changes})  # type: ignore[arg-type]


def made(run: ReportRun, **changes: object) -> ReportRun:
    told = replace(run.explanation, run=replace(run.explanation.run, manifest=manifest(**changes)))
    return replace(run, explanation=told)


def warned(run: ReportRun, *warnings: str) -> ReportRun:
    return replace(run, result=replace(run.result, warnings=warnings))


ENDS = ("", "-why", "-kernels")
PAGES_OF_TWO = [f"{name}{end}" for name in ("naive", "overlap") for end in ENDS]


class _Reader(HTMLParser):
    """A page as its reader sees it: the text of each section, the pairs of its lists, the cells of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: dict[str, list[str]] = {"": []}
        self.pairs: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self._tag, self._section = "", ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag, given = tag, dict(attrs)
        if tag == "h2":
            self._section = given["id"] or ""
            self.sections[self._section] = []
        elif tag == "tr":
            self.rows.append([])
        elif tag == "a":
            self.links.append(given["href"] or "")
        elif tag == "dt":
            self.pairs.append(("", ""))

    def handle_data(self, data: str) -> None:
        if self._tag in {"script", "style"} or not data.strip():
            return
        self.sections[self._section].append(data)
        if self._tag in {"td", "th", "button"}:
            self.rows[-1].append(data)
        elif self._tag in {"dt", "dd"}:
            key, value = self.pairs[-1]
            self.pairs[-1] = (key + data, value) if self._tag == "dt" else (key, value + data)


def charts_of(page: Path) -> list[str]:
    return re.findall(r'class="figure" id="([^"]*)"', page.read_text(encoding="utf-8"))


def read(page: Path) -> _Reader:
    reader = _Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    return reader


class TestOrder:
    def test_variants_come_as_the_story_goes_and_buckets_by_size(self) -> None:
        told = ["naive", "flat", "overlap", "bucketed 1", "bucketed 10", "bucketed 100", "torch"]
        runs = []
        for name in sorted(told):
            variant, _, size = name.partition(" ")
            runs.append(made(run_of(cpu_run(), name), variant=variant, bucket_size_mb=float(size) if size else None))
        assert [run.name for run in in_variant_order(runs, lambda run: run.explanation.run.manifest)] == told

    @pytest.mark.parametrize("variant", [None, "one of yours"])
    def test_where_a_run_does_not_say_its_variant_all_stay_as_given(self, variant: str | None) -> None:
        odd = run_of(cpu_run(), "x")
        runs = [made(run_of(cpu_run(), "torch"), variant="torch"), made(odd, variant=variant) if variant else odd]
        runs.append(made(run_of(cpu_run(), "naive"), variant="naive"))
        assert in_variant_order(runs, lambda run: run.explanation.run.manifest) == runs


@pytest.mark.browser
@pytest.mark.slow
def test_a_page_and_a_picture_of_each_run(tmp_path: Path) -> None:
    assert write_report([run_of(cpu_run(shift=4), "naive"), run_of(cpu_run(), "overlap")], tmp_path) == []
    pages = {f"{name}.html" for name in ("index", *PAGES_OF_TWO)}
    pictures = {f"{name}.png" for name in ("naive", "overlap", "comparison", "overlap-by-step", "step-times")}
    assert {path.name for path in tmp_path.iterdir()} == {"plotly.min.js"} | pages | pictures


@pytest.mark.usefixtures("no_browser")
class TestPages:
    def test_how_long_a_step_stands_still_is_said_once(self, tmp_path: Path) -> None:
        """The heading and the sentence under it said it, as did two cells of one row."""
        trace = Path(__file__).parents[3] / "traces" / "bucketed_100mb.sqlite"
        assert run("report", "-q", trace, "-o", tmp_path / "report").exit_code == 0
        # The page of all runs has its headline, and a row of the table.
        for page, times in (("bucketed_100mb-why", 1), ("index", 2)):
            text = (tmp_path / "report" / f"{page}.html").read_text(encoding="utf-8")
            shown = re.sub("<script.*?</script>", "", text.partition("<body>")[2], flags=re.DOTALL)
            assert shown.count("stands still for communication for 33.4 ms") == times

    def test_what_is_not_known_is_said_in_one_cell_of_a_row(self, tmp_path: Path) -> None:
        """'Whether communication is exposed is not known: ...' stood in two cells of one row, and under the heading."""
        silent = draw_trace(ranges={"step|index=0": "####"}, ranks={4242: 0})
        write_report([run_of(silent)], tmp_path)
        (row,) = [row for row in read(tmp_path / "index.html").rows if any("is not known" in cell for cell in row)]
        assert sum(cell.startswith("Whether communication is exposed") for cell in row) == 1, row

    def test_without_chromium_the_pages_are_written_all_the_same(self, tmp_path: Path) -> None:
        problems = write_report([run_of(cpu_run())], tmp_path)
        assert len(problems) == 1
        assert "apt-get install chromium" in problems[0]
        assert {path.name for path in tmp_path.iterdir()} == {
            "index.html",
            "overlap.html",
            "overlap-kernels.html",
            "overlap-why.html",
            "plotly.min.js",
        }
        assert "<img" not in (tmp_path / "index.html").read_text(encoding="utf-8")

    @pytest.mark.slow
    def test_with_a_chromium_that_fails_they_are_written_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken = tmp_path / "broken"
        broken.write_text("#!/bin/sh\nexit 1\n")
        broken.chmod(0o755)
        monkeypatch.setenv("BROWSER_PATH", str(broken))
        (problem,) = write_report([run_of(cpu_run())], tmp_path / "report")
        assert "could not be drawn" in problem
        assert (tmp_path / "report" / "index.html").is_file()

    def test_a_script_that_lies_in_the_folder_is_not_taken_for_ours(self, tmp_path: Path) -> None:
        (tmp_path / "plotly.min.js").write_text("document.title = 'owned'")
        write_report([run_of(cpu_run())], tmp_path)
        assert (tmp_path / "plotly.min.js").read_text(encoding="utf-8") == get_plotlyjs()

    def test_all_that_a_page_loads_lies_beside_it(self, tmp_path: Path) -> None:
        write_report([run_of(cpu_run(), name) for name in ("a/../b c", "index", "x-why", "x")], tmp_path)
        for page in tmp_path.glob("*.html"):
            text = page.read_text(encoding="utf-8")
            for target in re.findall(r'(?:src|href)="([^"#][^"#]*)[^"]*"', text):
                assert target == "data:," or (tmp_path / target).is_file(), target
            assert len(text) < 200_000  # plotly.js lies beside the pages, once
        assert {path.stem for path in tmp_path.glob("*.html")} == {
            "index", *(f"{name}{end}" for name in ("index-2", "a-..-b-c", "x-why", "x-2") for end in ENDS)
        }  # fmt: skip

    def test_the_first_thing_that_it_says_is_the_answer(self, tmp_path: Path) -> None:
        runs = [run_of(cpu_run(shift=4), "naive"), run_of(cpu_run(), "overlap")]
        gain = gain_headline(runs[0].summary)
        idle = runs[0].summarized.idle
        assert idle
        assert idle.startswith("A rank neither computes nor communicates for "), "a CPU is no device that waits"
        for shown, said in ((runs, f"Most is to be gained in naive: {gain}"), (runs[:1], idle)):
            write_report(shown, tmp_path)
            page = (tmp_path / "index.html").read_text(encoding="utf-8")
            assert f"<h1>{said}</h1>" in page
            assert gain in page
        summaries = compare_variants([run.result for run in runs])
        compared = [replace(run, summary=summary) for run, summary in zip(runs, summaries, strict=True)]
        write_report(compared, tmp_path)
        assert "<h1>In these captures overlap hides most, 100 % of its" in (tmp_path / "index.html").read_text(
            encoding="utf-8"
        )

    def test_links_lead_to_the_sections_each_timeline_and_what_is_exposed_on_it(self, tmp_path: Path) -> None:
        write_report([run_of(cpu_run(shift=4), "naive"), run_of(cpu_run(), "overlap")], tmp_path)
        page = read(tmp_path / "index.html")
        assert [link for link in page.links if not link.startswith("#")] == [
            "naive.html#worst", *(f"naive{end}.html" for end in ENDS),
            *(f"overlap{end}.html" for end in ENDS),
            "naive-why.html", "naive.html#worst", "overlap-why.html",
            "naive-kernels.html", "overlap-kernels.html",
            "naive.html", "overlap.html",
        ]  # fmt: skip
        assert {link[1:] for link in page.links if link.startswith("#")} == set(page.sections) - {""}

    def test_the_runs_are_compared(self, tmp_path: Path) -> None:
        write_report([run_of(cpu_run(shift=4), "naive"), run_of(cpu_run(shift=2), "half")], tmp_path)
        page = read(tmp_path / "index.html")
        heads, naive, half, *_ = page.rows
        assert [dict(zip(heads, row, strict=True))["overlap %"] for row in (naive, half)] == ["0.0", "50.0"]
        assert "device: cpu" in page.sections[""]
        assert "50 % overlapped, device: cpu" in page.sections["timelines"]

    def test_steps_that_come_again_are_told_apart(self, tmp_path: Path) -> None:
        trace = cpu_run(steps=3)
        names = tuple(name.replace("index=2", "index=0") for name in trace.names)
        write_report([run_of(replace(trace, names=names), "epochs")], tmp_path)
        why = (tmp_path / "epochs-why.html").read_text(encoding="utf-8")
        assert re.findall(r"<option[^>]*>([^<]*)</option>", why) == ["0 (1 of 2)", "1 (typical)", "0 (2 of 2)"]
        assert "step 0 (2 of 2)" in why, "below the chart's title"

    def test_without_steps_no_page_speaks_of_any(self, tmp_path: Path) -> None:
        write_report([run_of(draw_trace(streams={7: "aa....", 9: ".BBB.."}), "stepless")], tmp_path)
        page = read(tmp_path / "index.html")
        assert charts_of(tmp_path / "index.html") == ["chart-comparison"]
        assert "steps" not in page.sections
        assert page.rows[0] == ["variant", "overlap %"], "columns of n/a are left out, and what stands above"
        why = (tmp_path / "stepless-why.html").read_text(encoding="utf-8")
        assert "<select" not in why
        assert "the whole capture, in which no whole step is marked" in why

    def test_without_communication_no_chart_is_empty(self, tmp_path: Path) -> None:
        write_report([run_of(draw_trace(streams={7: "aa.bb"}), "silent")], tmp_path)
        assert [chart for page in tmp_path.glob("*.html") for chart in charts_of(page)] == []
        page = read(tmp_path / "index.html")
        assert "There is no overlap figure" in " ".join(page.sections[""])
        assert not any("#worst" in link for link in page.links), "there is nothing to show"
        why = (tmp_path / "silent-why.html").read_text(encoding="utf-8")
        assert "silent: Nothing in this trace is known to communicate" in why

    def test_runs_without_a_known_gain_are_not_said_to_gain_most(self, tmp_path: Path) -> None:
        write_report([run_of(draw_trace(streams={7: "aa.bb"}), name) for name in ("one", "other")], tmp_path)
        page = (tmp_path / "index.html").read_text(encoding="utf-8")
        assert "<h1>No run is known to gain from hiding communication</h1>" in page

    def test_ranks_that_shared_a_gpu_are_told_of_in_each_page_and_figure(self, tmp_path: Path) -> None:
        trace = cpu_run()
        names = [f"{name}|ranks_per_gpu=2" if name.startswith("process|") else name for name in trace.names]
        run = run_of(replace(trace, names=tuple(names)), "overlap")
        write_report([run], tmp_path)
        assert f"device: cpu · {Caveat.SHARED_GPU.value}" in read(tmp_path / "index.html").sections[""]
        for page in ("overlap.html", "overlap-why.html"):
            assert Caveat.SHARED_GPU.value in (tmp_path / page).read_text(encoding="utf-8")
        found = run.explanation.run
        figures = (
            draw_comparison([run.result], [run.summary]),
            draw_step_times([run.result]),
            draw_waterfall(measure_waterfall([(found, ())])),
            draw_step_collectives(found, 0, view_step(found, 0), Headline("tail")),
            draw_skew(found, run.explanation.skew),
        )
        assert all(Caveat.SHARED_GPU.value in figure.layout.title.subtitle.text for figure in figures)

    def test_it_says_why_communication_is_exposed(self, tmp_path: Path) -> None:
        runs = [run_of(cpu_run(shift=4), "naive"), run_of(cpu_run(shift=2), "overlap")]
        waterfall = measure_waterfall([(run.explanation.run, ()) for run in runs])
        write_report(runs, tmp_path, waterfall)
        page = read(tmp_path / "index.html")
        why = " ".join(page.sections["why"])
        assert "is tail, in collectives launched after backward" in why
        assert "is tail, in transfer" in why
        assert why.count("at least two ranks") == 2
        assert (tmp_path / "index.html").read_text().count('id="chart-waterfall"') == 1
        alone = tmp_path / "alone"
        write_report(runs[:1], alone, measure_waterfall([(runs[0].explanation.run, ())]))
        assert 'id="chart-waterfall"' not in (alone / "index.html").read_text(), "nothing to compare with"

    def test_what_is_not_known_is_told_once_with_its_runs(self, tmp_path: Path) -> None:
        runs = [
            warned(made(run_of(cpu_run(), "a")), "of all", "of some"),
            warned(made(run_of(cpu_run(), "b")), "of all", "of some"),
            warned(run_of(cpu_run(), "c"), "of all"),
        ]
        write_report(runs, tmp_path)
        pairs = read(tmp_path / "index.html").pairs
        assert pairs[:3] == [
            ("all runs", "of all"),
            ("a, b", "of some"),
            ("c", "how the run was made: no run.json lies beside its trace"),
        ]

    def test_what_comparing_the_ranks_does_not_tell_is_among_it(self, tmp_path: Path) -> None:
        run = made(run_of(cpu_run(), "a"))
        told = replace(run.explanation, run=replace(run.explanation.run, trace_warnings=("of both", "of waiting")))
        write_report([warned(replace(run, explanation=told), "of both")], tmp_path)
        assert read(tmp_path / "index.html").pairs[:2] == [("a", "of both"), ("a", "of waiting")]

    def test_where_nothing_is_in_doubt_the_page_says_so(self, tmp_path: Path) -> None:
        write_report([made(run_of(cpu_run()))], tmp_path)
        assert read(tmp_path / "index.html").sections["unknown"][1:] == ["Nothing."]

    def test_the_profiler_has_the_name_that_all_commands_print(self, tmp_path: Path) -> None:
        """'Read from: kineto' stood where each command says torch.profiler."""
        run = run_of(cpu_run())
        recorded = replace(run, result=replace(run.result, source="kineto", producer=None, recorder=None))
        write_report([recorded], tmp_path)
        assert ("profiler", "torch.profiler") in read(tmp_path / "index.html").pairs

    def test_what_runs_share_is_told_once(self, tmp_path: Path) -> None:
        runs = [made(run_of(cpu_run(), "a"), seed=0), made(run_of(cpu_run(), "b"), seed=1)]
        write_report(runs, tmp_path)
        pairs = read(tmp_path / "index.html").pairs
        for shared in (
            ("commit", "abc123"),
            ("command", "python -m ddp_prof.train <b>"),
            ("recorded by", "nsys 2023.4"),
            ("versions", "torch 2.9"),
            ("machine", "cpus 2, memory 3.0 GiB"),
        ):
            assert pairs.count(shared) == 1
        assert [value[-1] for key, value in pairs if key == "steps"] == ["0", "1"]

    def test_labels_and_warnings_are_text(self, tmp_path: Path) -> None:
        write_report([warned(run_of(cpu_run(), HOSTILE_TITLE), HOSTILE_TITLE), run_of(cpu_run())], tmp_path)
        for page in tmp_path.glob("*.html"):
            assert "<img src=x" not in page.read_text(encoding="utf-8"), page.name
        assert (HOSTILE_TITLE, HOSTILE_TITLE) in read(tmp_path / "index.html").pairs


def test_the_index_links_to_the_study_that_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "buckets.html").touch()
    write_index([run_of(cpu_run())], tmp_path, {})
    index = (tmp_path / "index.html").read_text()
    assert '<a href="buckets.html">step time</a>' in index
    assert "model.html" not in index


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([(1, 1)], "1 run of 1 rank and 1 step"),
        ([(8, 20)], "1 run of 8 ranks and 20 steps"),
        ([(1, 10), (1, 12)], "2 runs of 1 rank each"),
        ([(1, 10), (2, 12)], "2 runs"),
    ],
)
def test_counts_are_singular_where_there_is_one(counts: list[tuple[int, int]], text: str) -> None:
    assert counts_text([{"device": "cpu", "ranks": ranks, "steps": steps} for ranks, steps in counts]) == text
