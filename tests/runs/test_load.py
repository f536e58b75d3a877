"""Which files are one run, and what is refused."""

from __future__ import annotations

import filecmp
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from ddp_prof import DdpProfError, LoadOptions, TraceError, load_runs
from ddp_prof.analyze import overlap
from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.notes import Doubt
from ddp_prof.present.headlines import Headline
from ddp_prof.present.tables.collectives import collectives_view
from ddp_prof.present.tables.compare import how_to_read
from ddp_prof.present.tables.kernels import kernels_views
from ddp_prof.present.tables.overlap import overlap_view
from ddp_prof.present.tables.skew import skew_view
from ddp_prof.runs import workers
from ddp_prof.runs.run import prepare_runs, timeline_sources
from tests.ingest.test_nsys_export import known_truth
from tests.kineto_factory import write_kineto
from tests.nsys_factory import Capture, Range, write_capture

TRACES = Path(__file__).parents[2] / "traces"


@pytest.fixture
def foreign(tmp_path: Path) -> list[Path]:
    """Two captures of one program without a run.json, named by rank."""
    return [write_capture(tmp_path / f"job.rank{rank}.sqlite", known_truth(2)) for rank in (0, 1)]


def test_files_that_differ_in_a_rank_are_one_run_and_say_so(foreign: list[Path]) -> None:
    (run,) = load_runs(foreign)
    result = run.overlap()
    assert len(result.ranks) == 2
    assert any("read as ranks of one run" in warning for warning in result.warnings)
    assert any("read as ranks of one run" in warning for warning in run.collectives().warnings)


def test_a_run_of_two_ranks_is_not_called_by_the_name_of_one(tmp_path: Path) -> None:
    files = [write_capture(tmp_path / f"job_rank{rank}of8.sqlite", known_truth(2)) for rank in (0, 4)]
    (run,) = load_runs(files)
    assert {run.label, run.overlap().label, run.analysis().label} == {"job_rank{0,4}of8"}
    title = f"{files[0]} and 1 more file"
    assert overlap_view(run.overlap(), by_step=False).title.startswith(title)
    assert collectives_view(run.analysis(), run.collectives(), Headline("x")).title.startswith(title)
    assert skew_view(run.analysis(), run.skew()).title.startswith(title)
    assert kernels_views(run.overlap(), run.device_use())["kernels"].title.startswith(title)


@pytest.mark.parametrize(
    ("folders", "labels"),
    [
        (("before", "after"), ["before/train", "after/train"]),
        (("a/out", "b/out"), ["a/out/train", "b/out/train"]),
    ],
)
def test_runs_of_one_name_are_told_apart_by_their_folders(
    folders: tuple[str, str], labels: list[str], tmp_path: Path
) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        write_capture(tmp_path / folder / "train.sqlite", known_truth())
    runs = load_runs([tmp_path / folder for folder in folders])
    assert [run.label for run in runs] == labels
    assert [run.overlap().label for run in runs] == [run.analysis().label for run in runs] == labels


def _copy_of_naive(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(TRACES / "naive.sqlite", path)
    shutil.copy(TRACES / "naive.run.json", path.with_suffix(".run.json"))


@pytest.mark.parametrize(
    ("files", "labels"),
    [
        (("before/naive", "after/naive"), ["before/naive", "after/naive"]),
        (("naive", "again"), ["naive.sqlite/naive", "again.sqlite/naive"]),
    ],
)
def test_two_runs_of_one_variant_are_told_apart_and_the_first_is_the_baseline(
    files: tuple[str, str], labels: list[str], tmp_path: Path
) -> None:
    """What changed was told "from naive to naive"."""
    paths = [tmp_path / f"{name}.sqlite" for name in files]
    for path in paths:
        _copy_of_naive(path)
    runs = load_runs(paths)
    assert [run.label for run in runs] == labels
    summaries = compare_variants([run.overlap() for run in runs], manifests=[run.manifest for run in runs])
    assert [summary.speedup for summary in summaries] == [1, 1]
    assert [summary.supported for summary in summaries] == [None, False]
    assert f"speedup: over {labels[0]}," in how_to_read(summaries)


def test_files_that_all_say_to_be_rank_0_are_kept_apart_with_a_word(tmp_path: Path) -> None:
    """As of launchers that start each rank as the only one of its job."""
    files = [write_kineto(tmp_path / f"job.rank{rank}.json", known_truth(2), rank=0) for rank in (0, 1)]
    notes = [run.notes for run in load_runs(files)]
    assert [len(of_run) for of_run in notes] == [1, 1]
    assert "their names differ in a rank number only: several of them say that they are rank 0" in notes[0][0]


def test_runs_of_one_name_in_a_folder_are_told_apart_by_their_files(tmp_path: Path) -> None:
    """A table of two ranks that were kept apart had two rows and no name."""
    files = [write_capture(tmp_path / f"job.rank{rank}.sqlite", known_truth(2 + rank)) for rank in (0, 1)]
    runs = load_runs(files, LoadOptions(separate=True))
    labels = ["job.rank0.sqlite", "job.rank1.sqlite"]
    assert [run.label for run in runs] == [run.overlap().label for run in runs] == labels
    assert [source.title for source in timeline_sources(runs)] == labels


def test_panels_of_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    """Two runs were both 'x', and so were two ranks of one; the page said of each how much it hides."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_capture(tmp_path / folder / "x.sqlite", known_truth(2))
    files = [tmp_path / folder / "x.sqlite" for folder in ("a", "b")]
    for one_run, titles in ((False, ["a/x", "b/x"]), (True, ["x (a/x.sqlite)", "x (b/x.sqlite)"])):
        sources = timeline_sources(load_runs(files, LoadOptions(one_run=one_run, separate=not one_run)))
        assert [source.title for source in sources] == titles


def test_a_folder_stands_for_its_files(foreign: list[Path]) -> None:
    (run,) = load_runs([foreign[0].parent])
    assert run.files == tuple(foreign)


def test_a_path_alone_is_one_path(foreign: list[Path]) -> None:
    for path in (foreign[0], str(foreign[0])):
        (run,) = load_runs(path)
        assert run.files == (foreign[0],)


def test_separate_undoes_it(foreign: list[Path]) -> None:
    assert len(load_runs(foreign, LoadOptions(separate=True))) == 2


def test_ranks_of_equal_process_numbers_are_told_apart_by_their_files(foreign: list[Path]) -> None:
    (run,) = load_runs(foreign)
    first, second = run.overlap().ranks
    assert first.process == second.process
    assert [first.qualifier, second.qualifier] == [file.name for file in foreign]
    names = [rank.name for rank in run.analysis().ranks]
    assert len(set(names)) == 2


def test_a_file_given_twice_is_refused(foreign: list[Path]) -> None:
    with pytest.raises(TraceError, match="given twice: give each file once"):
        load_runs([foreign[0], foreign[0].parent / "." / foreign[0].name])


def test_a_copy_of_a_rank_under_the_name_of_another_is_told(tmp_path: Path) -> None:
    """It counted as a rank of its own, in silence."""
    files = [write_capture(tmp_path / f"job.rank{rank}.sqlite", known_truth(2 + rank)) for rank in (0, 1, 2)]
    (run,) = load_runs(files)
    assert len(run.files) == 3
    assert not [note for note in run.notes if "the same bytes" in note]
    shutil.copy(files[1], files[2])
    (run,) = load_runs(files)
    (told,) = (note for note in run.notes if isinstance(note, Doubt))
    assert "the same bytes" in told
    assert len(run.files) == 3
    assert told.startswith("job.rank1.sqlite, job.rank2.sqlite: these files have")


def test_files_that_cannot_be_compared_are_no_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read is told where it is measured, not by an error of the comparison."""

    def refuse(*_: object, **__: object) -> bool:
        raise PermissionError("not for you")

    for rank in (0, 1):
        write_capture(tmp_path / f"job.rank{rank}.sqlite", known_truth(2))
    monkeypatch.setattr(filecmp, "cmp", refuse)
    (run,) = load_runs(tmp_path)
    assert len(run.files) == 2
    assert not [note for note in run.notes if "the same bytes" in note]


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    for number in (0, 1):
        shutil.copy(TRACES / "overlap.sqlite", tmp_path / f"x.rank{number}.sqlite")
    shutil.copy(TRACES / "overlap.run.json", tmp_path / "x.run.json")
    (run,) = load_runs([tmp_path])
    for measure in (run.overlap, run.collectives):
        with pytest.raises(DdpProfError, match=r"rank 0 of this run is in x\.rank0\.sqlite, too"):
            measure()


def test_two_files_of_one_rank_are_refused_where_folders_alone_tell_them_apart(tmp_path: Path) -> None:
    """Each rank was counted twice."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(TRACES / "overlap.sqlite", tmp_path / folder / "x.sqlite")
    (run,) = load_runs([tmp_path / "a" / "x.sqlite", tmp_path / "b" / "x.sqlite"], LoadOptions(one_run=True))
    for measure in (run.overlap, run.collectives):
        with pytest.raises(DdpProfError, match=r"b/x\.sqlite: rank 0 of this run is in a/x\.sqlite, too"):
            measure()


def test_the_public_interface_gives_typed_frames() -> None:
    (run,) = load_runs([str(TRACES / "overlap.sqlite")])
    ranks, steps = run.overlap().to_frame(), run.overlap().to_frame(by_step=True)
    assert ranks["exposed_ns"].dtype == "Int64"
    assert steps.groupby("rank")["comm_ns"].sum().tolist() == ranks["comm_ns"].tolist()
    collectives = run.collectives().to_frame()
    whens = [column for column in collectives if column.startswith("when_")]
    whys = [column for column in collectives if column.startswith("why_")]
    assert (collectives[whens].sum(axis=1) == collectives["exposed_ns"]).all()
    assert (collectives[whys].sum(axis=1) == collectives["exposed_ns"]).all()
    assert run.skew().to_frame()["rank"].tolist() == [0, 1]
    assert "<table" in run.overlap()._repr_html_()
    assert len(run.waterfall().budgets) == 1
    assert run.timeline().data


def test_frames_without_rows_have_the_columns_of_others(shared_traces: Path, tmp_path: Path) -> None:
    """As that of kernels of a CPU capture, which had none."""
    one, *_ = load_runs([shared_traces / "kineto_a100_ddp_rank0of2.json.gz"])
    (none,) = load_runs(write_capture(tmp_path / "x.sqlite", Capture(ranges=[Range("load", 0, 5, 1)])))
    frames = {
        "overlap by step": lambda run: run.overlap().to_frame(by_step=True),
        "collectives": lambda run: run.collectives().to_frame(),
        "kernels": lambda run: run.device_use().to_frame(),
    }
    for name, frame in frames.items():
        assert len(frame(one)), name
        assert not len(frame(none)), name
        assert list(frame(none)) == list(frame(one)), name
    assert list(none.waterfall().to_frame()), "changes, of which a single run has none"


def test_what_is_public_shows_itself_in_one_short_line() -> None:
    """Hundreds of collectives, steps and rows are counted, not listed."""
    (run,) = load_runs(TRACES / "overlap.sqlite")
    assert repr(run) == f"<Run overlap: {TRACES / 'overlap.sqlite'}>"
    ((trace, ranks),) = run.events()
    shown = [run.overlap(), *run.inventory(), run.collectives(), run.analysis(), run.root_cause(), run.skew()]
    shown += [*run.kernels(), run.device_use(), run.waterfall(), trace, *ranks, trace.spans]
    for thing in shown:
        assert len(repr(thing).replace(str(TRACES), "")) < 800, type(thing)  # wherever the checkout lies
        assert "\n" not in repr(thing)
    assert "matched=" in repr(run.collectives())
    assert repr(trace.spans) == f"<Spans: {len(trace.spans)} rows>"


def test_a_notebook_shows_what_a_run_is_made_of(tmp_path: Path) -> None:
    file = tmp_path / "a<b>&.sqlite"
    shutil.copy(TRACES / "overlap.sqlite", file)
    (run,) = load_runs(file)
    unread = run._repr_html_()
    assert "a&lt;b&gt;&amp;.sqlite" in unread
    assert "<table" not in unread, "showing it reads nothing"
    assert run.measured == {}
    run.overlap()
    shown = run._repr_html_()
    assert shown.count("<tr") == 3, "a head and two ranks"
    assert "<p>67 % of communication is hidden; 29.7 ms of a 227.5 ms step (13 %) is exposed" in shown
    assert re.findall("<th>(.*?)</th>", shown) == ["rank", "comm_ms", "overlapped_ms", "exposed_ms", "blocking_ms"]
    assert re.findall("<td>(.*?)</td>", shown)[1] == f"{run.overlap().ranks[0].comm_ns / 1e6:.2f}"


def test_a_timeline_takes_the_overlap_that_was_measured_before(monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh,) = timeline_sources(load_runs([TRACES / "overlap.sqlite"]))
    (run,) = load_runs([TRACES / "overlap.sqlite"], measures=("overlap", "collectives"))
    monkeypatch.setattr(overlap, "measure_overlap", lambda *_: pytest.fail("measured twice"))
    (source,) = timeline_sources([run])
    assert source.overlap is run.measured[run.files[0]]["overlap"]
    assert source.overlap.ranks == fresh.overlap.ranks


def test_each_of_several_runs_is_read_with_its_own_options(tmp_path: Path) -> None:
    """Compared with another run, a run was read as that one: by its ranges of steps."""
    file = write_capture(tmp_path / "x.sqlite", known_truth(2))
    (all_steps,), (one_step,) = load_runs(file), load_runs(file, LoadOptions(step_range=r"step_(1)"))
    prepare_runs([all_steps, one_step], "overlap")
    assert [len(run.overlap().ranks[0].marked_steps) for run in (all_steps, one_step)] == [2, 1]


@pytest.mark.parametrize("of_one_run", [False, True])
def test_kernels_are_measured_in_eight_files_however_a_run_is_recognized(
    of_one_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files that were joined by their names, the kernels of all were measured, and the doctor spoke of eight."""
    asked: list[tuple[str, ...]] = []
    measure = workers.measure_report

    def spy(file: Path, options: LoadOptions, measures: tuple[str, ...], *rest: Any) -> dict[str, Any]:
        asked.append(measures)
        return measure(file, options, measures, *rest)

    monkeypatch.setattr(workers, "measure_report", spy)
    for rank in range(9):
        write_capture(tmp_path / f"job.rank{rank}.sqlite", known_truth(2))
    (run,) = load_runs(tmp_path, LoadOptions(one_run=of_one_run), measures=["overlap", "kernels"])
    assert ["kernels" in measures for measures in asked] == 8 * [True] + [False]
    assert len(run.kernels()) == 8
    run.device_use()
    (note,) = (warning for warning in run.overlap().warnings if "kernels" in warning)
    assert note == "kernels and contention are measured in 8 of its traces only"
    (without,) = load_runs(tmp_path, LoadOptions(one_run=of_one_run), measures=["overlap"])
    assert not [warning for warning in without.overlap().warnings if "kernels" in warning]


def test_a_ninth_file_that_is_a_run_of_its_own_has_its_kernels(tmp_path: Path) -> None:
    for rank in range(9):
        write_kineto(tmp_path / f"job.rank{rank}.json", known_truth(2), rank=0)
    runs = load_runs(tmp_path, measures=["overlap", "kernels"])
    assert [len(run.kernels()) for run in runs] == 9 * [1]
    assert not [warning for run in runs for warning in run.overlap().warnings if "of its traces only" in warning]
