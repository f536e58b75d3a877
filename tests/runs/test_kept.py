"""What was measured of a trace is kept for what it depends on, and is never more than a result."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import zlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.ingest import cache_folder, cached
from ddp_prof.ingest.cache_folder import CacheFolder
from ddp_prof.present.html.timeline_page import TimelineContent
from ddp_prof.runs import kept as kept_module
from ddp_prof.runs import report, timelines
from ddp_prof.runs import run as run_module
from ddp_prof.runs.pickles import read_result, write_result
from ddp_prof.runs.report import LoadOptions
from tests.command_line import run
from tests.examples import IS_NIGHTLY
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import write_capture


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDP_PROF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cached, "LEAST_BYTES", 0)
    return tmp_path / "cache"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_capture(tmp_path / "known.sqlite", known_truth())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The measures that were measured, by reading; those of the cache are not."""
    found: list[tuple[str, ...]] = []

    def measuring(events: Any, options: LoadOptions, measures: tuple[str, ...]) -> dict[str, Any]:
        found.append(measures)
        return measure_events(events, options, measures)

    measure_events = report.measure_events
    monkeypatch.setattr(report, "measure_events", measuring)
    return found


def results(folder: Path) -> list[Path]:
    return [file.path for file in CacheFolder(folder).files() if file.path.suffix == cache_folder.RESULTS]


def measures_of(folder: Path) -> set[str]:
    """The names of the results that are kept."""
    return {key["measure"] for key in map(kept_module.read_key_of_result, results(folder)) if key}


def test_each_measure_is_measured_once(trace: Path, folder: Path, measured: list[tuple[str, ...]]) -> None:
    for command in (
        ["overlap"],
        ["overlap", "--steps"],
        ["collectives"],
        ["skew"],
        ["summary"],
        ["kernels"],
        ["doctor"],
    ):
        assert run(*command, trace).exit_code == 0
    names = [name for names in measured for name in names]
    assert sorted(names) == sorted(set(names))
    assert measures_of(folder) == {*names, *run_module._MADE_OF}
    assert len(results(folder)) == len(measures_of(folder))


@pytest.mark.parametrize(
    ("command", "used"),
    [
        ("summary", ["collectives", "contention", "diagnosis", "overlap"]),
        ("doctor", ["collectives", "diagnosis"]),
        ("overlap --format json", ["contention", "overlap"]),
    ],
)
def test_a_second_command_takes_what_was_made_of_the_measures(
    command: str, used: list[str], trace: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measures themselves are large, and making a diagnosis of them takes longer than reading them."""
    first, asked, find = run(*command.split(), trace), list[str](), kept_module.KeptResults.find
    monkeypatch.setattr(kept_module.KeptResults, "find", lambda kept, name: asked.append(name) or find(kept, name))
    assert run(*command.split(), trace).output == first.output
    assert sorted(asked) == used


@pytest.mark.usefixtures("no_browser")
@pytest.mark.parametrize(("command", "target"), [("timeline", "page.html"), ("report", "pages")])
def test_a_page_takes_what_a_summary_measured(
    command: str,
    target: str,
    trace: Path,
    folder: Path,
    tmp_path: Path,
    measured: list[tuple[str, ...]],
) -> None:
    """A report measured all again and kept it a second time, because it draws; only its collectives need that."""
    pages = []
    for place, further in (("first", ["--no-cache"]), ("second", []), ("third", [])):
        run("summary", trace)
        measured.clear()
        assert run(command, trace, "-o", tmp_path / place / target, *further).exit_code == 0
        pages.append({file.name: file.read_bytes() for file in (tmp_path / place).rglob("*.html")})
        if place == "second":
            names = {name for names in measured for name in names}
            assert not names & {"overlap", "kernels", "contention"}, names
    assert not measured, "nothing is measured by a second page"
    assert pages[0] == pages[1] == pages[2]


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps of each timeline that was laid out for a page; those of the cache are not."""
    found: list[Any] = []

    def laying_out(sources: Any, steps: Any = None) -> Any:
        found.append(steps)
        return build_timeline(sources, steps)

    build_timeline = timelines.build_timeline
    monkeypatch.setattr(timelines, "build_timeline", laying_out)
    return found


@pytest.mark.usefixtures("no_browser")
def test_a_timeline_is_laid_out_once_for_all_its_pages(
    trace: Path, folder: Path, tmp_path: Path, laid_out: list[Any]
) -> None:
    """The page of ``timeline`` and that in a report show the same; of the second, only links differ."""
    page, again = tmp_path / "page.html", tmp_path / "again.html"
    run("timeline", trace, "-o", page)
    assert run("timeline", trace, "-o", again).exit_code == 0
    assert again.read_bytes() == page.read_bytes()
    for place in ("first", "second"):
        assert run("report", trace, "-o", tmp_path / place).exit_code == 0
    assert laid_out == [None]
    pages = [{file.name: file.read_bytes() for file in (tmp_path / place).iterdir()} for place in ("first", "second")]
    assert pages[0] == pages[1]
    data = re.compile(rb'<script type="application/[^>]*>.*?</script>', re.DOTALL)
    assert data.findall(pages[0]["known.html"]) == data.findall(page.read_bytes())
    assert measures_of(folder) >= {report.PAGE, report.PICTURE}


def test_some_steps_are_laid_out_each_time_and_leave_what_is_kept(
    trace: Path, folder: Path, tmp_path: Path, laid_out: list[Any]
) -> None:
    run("timeline", trace, "-o", tmp_path / "whole.html")
    kept = {*results(folder)}
    for _ in range(2):
        assert run("timeline", trace, "--steps", "1", "-o", tmp_path / "part.html").exit_code == 0
    run("timeline", trace, "-o", tmp_path / "again.html")
    assert laid_out == [None, [1], [1]]
    assert {*results(folder)} == kept
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "whole.html").read_bytes()


def test_several_traces_are_laid_out_each_time(trace: Path, folder: Path, tmp_path: Path, laid_out: list[Any]) -> None:
    """Their panels are aligned with each other, and the titles tell them apart."""
    other = write_capture(tmp_path / "other.sqlite", known_truth(2))
    for _ in range(2):
        assert run("timeline", trace, other, "-o", tmp_path / "page.html").exit_code == 0
    run("timeline", trace, "-o", tmp_path / "page.html")
    assert laid_out == [None, None, None]


def test_a_timeline_is_laid_out_anew_for_other_options_code_and_files(
    trace: Path, folder: Path, tmp_path: Path, laid_out: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(*options: str) -> bytes:
        page = tmp_path / "page.html"
        for _ in range(2):
            assert run("timeline", trace, *options, "-o", page).exit_code == 0
        return page.read_bytes()

    first = draw()
    other = draw("--step-range", "step_[012]")
    assert other != first
    assert len(laid_out) == 2
    assert draw() == first
    assert len(laid_out) == 2, "both are kept"
    code_version = kept_module.code_version
    monkeypatch.setattr(
        kept_module, "code_version", lambda of: code_version(of) + "changed" * any("present" in one for one in of)
    )
    assert draw() == first
    assert len(laid_out) == 3, "the code that draws is another"
    trace.unlink()
    write_capture(trace, known_truth(2))
    assert draw() != first
    assert len(laid_out) == 4, "the trace is another"


def test_a_writer_that_is_killed_leaves_no_timeline(
    trace: Path, folder: Path, tmp_path: Path, laid_out: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has written until then is neither read nor counted."""

    def killed(key: Any, result: Any, target: Path) -> None:
        write(key, result, target)
        if key["measure"] == report.PAGE:
            target.write_bytes(target.read_bytes()[:-100])
            os._exit(9)

    page, write = tmp_path / "page.html", kept_module._write
    run("timeline", trace, "--no-cache", "-o", page)
    right = page.read_bytes()
    monkeypatch.setattr(kept_module, "_write", killed)
    if not (writer := os.fork()):
        run("timeline", trace, "-o", page)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == 9
    monkeypatch.setattr(kept_module, "_write", write)
    assert "overlap" in measures_of(folder)
    assert report.PAGE not in measures_of(folder)
    for _ in range(2):
        run("timeline", trace, "-o", page)
        assert page.read_bytes() == right
    assert len(laid_out) == 2, "once without the cache, once after the writer was killed"


def test_an_option_of_measuring_is_measured_anew(trace: Path, folder: Path, measured: list[tuple[str, ...]]) -> None:
    ways = ([], ["--step-range", "step_[012]"], ["--backward-range", "^forward$"], ["--comm-pattern", "adam"],
            ["--warmup-steps", "1"])  # fmt: skip
    alone = [run("overlap", trace, *way, "--format", "json", "--no-cache").stdout for way in ways]
    assert len(set(alone)) == len(ways)
    measured.clear()
    for _ in range(2):
        assert [run("overlap", trace, *way, "--format", "json").stdout for way in ways] == alone
    assert len(measured) == len(ways)


def test_each_option_is_one_that_results_depend_on_or_not() -> None:
    of_runs = {"one_run", "separate", "use_cache"}
    of_single = {name for names in report._ALSO_DEPENDED_ON.values() for name in names}
    assert {item.name for item in fields(LoadOptions)} == {*report._DEPENDED_ON, *of_runs, *of_single, "with_launches"}


def test_a_change_of_the_analysis_or_of_the_trace_is_measured_anew(
    trace: Path, folder: Path, measured: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("overlap", trace)
    run("overlap", trace)
    assert len(measured) == 1
    code_version = kept_module.code_version
    monkeypatch.setattr(kept_module, "code_version", lambda patterns: f"{code_version(patterns)} changed")
    run("overlap", trace)
    assert len(measured) == 2
    trace.unlink()
    write_capture(trace, known_truth(2))
    run("overlap", trace)
    assert len(measured) == 3
    assert len(results(folder)) == 1, "the former results are gone"


def test_the_code_that_measures_is_all_of_the_analysis() -> None:
    files = {file.name for pattern in kept_module._MEASURING for file in cached._PACKAGE.glob(pattern)}
    assert {"overlap.py", "rank_events.py", "nsys_export.py", "table.py", "report.py", "hosts.py"} <= files


def test_paths_are_told_as_they_are_given(trace: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trace.parent)
    for _ in range(2):
        assert json.loads(run("overlap", trace.name, "--format", "json").stdout)["trace"] == trace.name
        assert json.loads(run("overlap", trace, "--format", "json").stdout)["trace"] == str(trace)


@pytest.mark.parametrize("is_cut", [False, True], ids=["a byte is wrong", "cut off"])
@pytest.mark.parametrize("command", ["collectives --format json", "timeline -o -"])
def test_a_damaged_result_is_not_used(command: str, is_cut: bool, trace: Path, folder: Path) -> None:
    right = run(*command.split(), trace).stdout
    good = {place: place.read_bytes() for place in results(folder)}
    shares = 12 if IS_NIGHTLY or command != "timeline -o -" else 4
    for share in range(shares):
        for place, data in good.items():
            at = share * len(data) // shares
            place.write_bytes(data[:at] if is_cut else data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        assert run(*command.split(), trace).stdout == right


class _Command:
    """What a pickle may do that somebody else has written."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_bytes_of_others_run_nothing(trace: Path, folder: Path, tmp_path: Path) -> None:
    right = run("overlap", trace).stdout
    (place, *_) = results(folder)
    head, data = place.read_bytes().partition(b"\n")[0], pickle.dumps(_Command(tmp_path / "made"))
    place.write_bytes(head + b"\n" + data + zlib.crc32(data).to_bytes(4, "little"))
    assert run("overlap", trace).stdout == right
    assert not (tmp_path / "made").exists()


def _with_checksum(data: bytes) -> io.BytesIO:
    return io.BytesIO(data + zlib.crc32(data).to_bytes(4, "little"))


@pytest.mark.parametrize("name", ["np.ndarray", "replace", "measure_overlap", "dataclass"])
def test_only_classes_of_results_can_be_named(name: str) -> None:
    module, named = (bytes([0x8C, len(text)]) + text.encode() for text in ("ddp_prof.analyze.overlap", name))
    with pytest.raises(pickle.UnpicklingError):
        read_result(_with_checksum(b"\x80\x04" + module + named + b"\x93."), {})


def test_many_ranks_by_several_processes(folder: Path, tmp_path: Path, measured: list[tuple[str, ...]]) -> None:
    """Processes that start anew keep large traces only; what they find here they do not read."""
    ranks = [write_capture(tmp_path / f"job.rank{rank}.sqlite", known_truth(2)) for rank in range(3)]
    right = run("overlap", *ranks, "--format", "json").stdout
    assert len(measured) == 3
    assert run("overlap", *ranks, "--format", "json").stdout == right
    assert run("overlap", *ranks, "--format", "json", "--jobs", "2", "--no-cache").stdout == right
    assert len(measured) == 3


def test_ranks_that_were_measured_one_by_one_have_the_cost_of_their_run(folder: Path, tmp_path: Path) -> None:
    """The cache holds the contention of each; that of the run is made from the kernels of all."""
    ranks = [write_capture(tmp_path / f"job.rank{rank}.sqlite", known_truth(2)) for rank in range(2)]
    for rank in ranks:
        assert run("overlap", rank, "--format", "json").exit_code == 0
    right = run("overlap", *ranks, "--format", "json", "--no-cache").stdout
    assert '"contention"' in right
    assert run("overlap", *ranks, "--format", "json").stdout == right


def test_contention_is_made_from_kernels_of_the_cache(
    trace: Path, folder: Path, measured: list[tuple[str, ...]]
) -> None:
    run("kernels", trace)
    assert measured == [("overlap", "kernels", "device use")]
    right = run("overlap", trace, "--format", "json", "--no-cache").stdout
    measured.clear()
    assert run("overlap", trace, "--format", "json").stdout == right
    assert not measured


def test_a_result_is_told_by_its_trace(trace: Path, folder: Path) -> None:
    run("overlap", trace)
    (one,) = json.loads(run("cache", "--format", "json").stdout)["traces"]
    assert one["trace"] == str(trace)
    assert one["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    results(folder)[0].write_bytes(b"no result")
    assert "(damaged)" in run("cache").stdout
    shutil.rmtree(folder)


def test_paths_in_results_get_the_names_that_they_have_here() -> None:
    file = io.BytesIO()
    write_result({Path("/x"): {1, 2}}, file)
    file.seek(0)
    assert read_result(file, {"/x": Path("x")}) == {Path("x"): {1, 2}}


def test_compiled_code_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "_PACKAGE", tmp_path)
    (tmp_path / "analyze" / "__pycache__").mkdir(parents=True)
    (tmp_path / "analyze" / "x.py").write_text("x = 1")
    version = cached.code_version.__wrapped__(("analyze/**/*.py*",))
    (tmp_path / "analyze" / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"compiled now")
    assert cached.code_version.__wrapped__(("analyze/**/*.py*",)) == version


def test_what_others_wrote_into_a_kept_timeline_is_no_markup(
    trace: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = '</script><img src="x">'

    def write(key: Any, result: Any, target: Path) -> None:
        if isinstance(result, TimelineContent):
            texts = dict.fromkeys(("title", "headline", "data"), ending)
            result = replace(result, **texts, explanation=((ending, ending),), boxes={"boxes": ending.encode()})
        kept_write(key, result, target)

    kept_write = kept_module._write
    monkeypatch.setattr(kept_module, "_write", write)
    for _ in range(2):
        assert run("timeline", trace, "-o", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert ending not in page
    assert page.count("img src=") >= 4, "the texts are there, escaped"
