"""Which files are one run, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ddp_prof import DdpProfError, LoadOptions, TraceError, load_runs
from tests.ingest.nsys.test_sqlite_export import known_truth
from tests.nsys_factory import write_capture

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


def test_a_folder_stands_for_its_files(foreign: list[Path]) -> None:
    (run,) = load_runs([foreign[0].parent])
    assert run.files == tuple(foreign)


def test_separate_undoes_it(foreign: list[Path]) -> None:
    assert len(load_runs(foreign, LoadOptions(separate=True))) == 2


def test_another_number_of_collectives_is_another_run(tmp_path: Path) -> None:
    files = [write_capture(tmp_path / f"job.rank{rank}.sqlite", known_truth(2 + rank)) for rank in (0, 1)]
    assert len(load_runs(files)) == 2


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


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    for number in (0, 1):
        shutil.copy(TRACES / "overlap.sqlite", tmp_path / f"x.rank{number}.sqlite")
    shutil.copy(TRACES / "overlap.run.json", tmp_path / "x.run.json")
    (run,) = load_runs([tmp_path])
    for measure in (run.overlap, run.collectives):
        with pytest.raises(DdpProfError, match=r"rank 0 of this run is in x\.rank0\.sqlite, too"):
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
