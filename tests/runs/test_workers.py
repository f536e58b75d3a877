"""Many reports by several workers: the same results, nothing left behind, and what is lost is said."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest

from ddp_prof import DdpProfError, LoadOptions, TraceError, Workers, load_runs
from ddp_prof.runs import workers as workers_module
from ddp_prof.runs.run import Run, prepare_runs
from ddp_prof.runs.workers import WantedReport
from tests.command_line import run
from tests.examples import IS_NIGHTLY
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import write_capture
from tests.waiting import is_running, wait_until

RANKS = 5


@pytest.fixture
def reports(tmp_path: Path) -> list[Path]:
    return [write_capture(tmp_path / f"job.rank{rank}.sqlite", known_truth(2)) for rank in range(RANKS)]


COMMANDS = [("collectives", "--format", "json")]
if IS_NIGHTLY:  # what is printed of the same measures
    COMMANDS += [(name, "--format", "json") for name in ("overlap", "info", "skew", "compare")] + [
        ("overlap", "--steps")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_processes_tell_the_same_to_the_byte(reports: list[Path], command: tuple[str, ...]) -> None:
    folder = reports[0].parent
    (folder / "broken.rank9.sqlite").write_bytes(b"SQLite format 3\0" + b"?" * 100)
    alone, together = (run(*command, "--jobs", jobs, folder) for jobs in (1, 2))
    assert alone.exit_code == 0, alone.stderr
    assert (alone.stdout, alone.stderr) == (together.stdout, together.stderr)
    assert "broken.rank9.sqlite" in alone.stderr


def test_an_unreadable_report_is_named_and_the_others_go_on(reports: list[Path]) -> None:
    reports[2].write_bytes(b"no trace")
    result = run("overlap", "--format", "json", *reports)
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert len(document["ranks"]) == RANKS - 1
    assert f"warning: left out: {reports[2]}: neither a report" in result.stderr
    assert any(f"left out: {reports[2]}" in warning for warning in document["warnings"])


def test_strict_fails_where_one_cannot_be_read(reports: list[Path]) -> None:
    reports[2].write_bytes(b"no trace")
    result = run("overlap", "--strict", *reports)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {reports[2]}: neither a report")


def test_a_gate_does_not_pass_without_a_report(reports: list[Path]) -> None:
    reports[2].write_bytes(b"no trace")
    assert run("check", "--max-tail-ms", 1000, *reports).exit_code == 1


def test_nothing_readable_is_an_error(reports: list[Path]) -> None:
    for report in reports:
        report.write_bytes(b"no trace")
    result = run("overlap", *reports)
    assert result.exit_code == 1
    assert str(reports[0]) in result.stderr


def test_a_program_is_told_by_an_exception(reports: list[Path]) -> None:
    reports[2].write_bytes(b"no trace")
    with pytest.raises(TraceError, match=r"rank2\.sqlite"):
        load_runs(reports, measures=["overlap"])


def test_a_run_that_fails_leaves_no_process_behind(reports: list[Path]) -> None:
    """The error holds the frames of what raised it: whatever ends by the garbage collector alone still runs here."""
    reports[0].write_bytes(b"no trace")
    with pytest.raises(TraceError) as failed:
        load_runs(reports, LoadOptions(one_run=True), workers=Workers(2), measures=["overlap"])
    assert active_children() == []
    assert failed.value.path == reports[0]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read."""
    from ddp_prof.ingest import load

    names: list[str] = []
    load_trace = load.load_trace
    monkeypatch.setattr(
        load, "load_trace", lambda path, options: (names.append(path.name), load_trace(path, options))[1]
    )
    return names


def test_each_report_is_read_once(reports: list[Path], read: list[str]) -> None:
    assert run("compare", *reports).exit_code == 0
    assert sorted(read) == [report.name for report in reports]


@pytest.mark.slow
@pytest.mark.usefixtures("no_browser")
@pytest.mark.parametrize("command", ["report", "timeline"])
def test_a_report_that_is_read_alone_is_read_once(
    reports: list[Path], read: list[str], tmp_path: Path, command: str
) -> None:
    assert run(command, reports[0], "-o", tmp_path / "page").exit_code == 0
    assert read == [reports[0].name]


def test_a_figure_asked_for_later_needs_no_second_reading(reports: list[Path], read: list[str]) -> None:
    (kept,), (again,) = load_runs(reports[:1]), load_runs(reports[:1], measures=["collectives", "device use"])
    kept.overlap()
    assert kept.collectives().to_frame().equals(again.collectives().to_frame())
    assert kept.device_use().to_frame().equals(again.device_use().to_frame())
    assert len(list(kept.events())) == 1
    assert len(read) == 2


def test_what_is_forgotten_is_read_again_when_it_is_asked_for(reports: list[Path], read: list[str]) -> None:
    (run_,) = load_runs(reports[:1], measures=["device use"])
    before, events = run_.device_use().to_frame(), len(next(run_.events()).trace.activities)
    run_.release_events()
    assert len(read) == 1
    assert run_.device_use().to_frame().equals(before)
    assert len(next(run_.events()).trace.activities) == events
    assert len(read) == 2


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_was_read_before_an_interruption_is_shown(reports: list[Path], jobs: int) -> None:
    def interrupt(done: int, _total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    left_out: list[TraceError] = []
    workers = Workers(jobs, progress=interrupt, leave_out=left_out.append)
    (found,) = load_runs(reports, LoadOptions(one_run=True), workers=workers, measures=["overlap"])
    assert len(found.overlap().ranks) == 1  # the second one is read, and the interruption came before it was taken
    assert "interrupted: 4 of 5 traces were not read" in str(left_out[0])
    assert active_children() == []


@pytest.mark.slow
def test_a_killed_process_is_told_and_nothing_hangs(reports: list[Path]) -> None:
    def kill(_done: int, _total: int) -> None:
        for child in active_children():
            child.kill()

    with pytest.raises(DdpProfError, match="a worker process was killed"):
        load_runs(reports, workers=Workers(2, progress=kill), measures=["overlap"])
    assert active_children() == []


SLOW_READER = """
import sys, time
from multiprocessing import active_children
from ddp_prof import Workers, load_runs

def wait(done, total):
    if done:
        print(*(child.pid for child in active_children()), flush=True)
        time.sleep(600)

if __name__ == "__main__":
    load_runs(sys.argv[1:], workers=Workers(2, progress=wait), measures=["overlap"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [signal.SIGKILL, *(pytest.param(how, marks=pytest.mark.nightly) for how in (signal.SIGTERM, signal.SIGINT))],
)
def test_workers_end_with_their_parent(reports: list[Path], tmp_path: Path, how: signal.Signals) -> None:
    script = tmp_path / "read.py"
    script.write_text(SLOW_READER)
    with subprocess.Popen(
        [sys.executable, script, *reports], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(how)
    assert len(workers) == 2
    wait_until(lambda: not any(map(is_running, workers)))


WITHOUT_MAIN_GUARD = """
import sys
from ddp_prof import Workers, load_runs

print("begun", flush=True)
load_runs(sys.argv[1:], workers=Workers(2), measures=["overlap"])
print("ended", flush=True)
"""


def test_workers_do_not_run_the_script_that_started_them(reports: list[Path], tmp_path: Path) -> None:
    """A script of thousands of commands was run as a whole by each worker, and seemed to wait for ever."""
    script = tmp_path / "read.py"
    script.write_text(WITHOUT_MAIN_GUARD)
    ran = subprocess.run([sys.executable, script, *reports], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "begun\nended\n", "")


def test_an_interrupted_command_shows_what_it_has_and_says_so(
    reports: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddp_prof.runs import workers

    measure = workers.measure_report
    read: list[Path] = []

    def interrupted(file: Path, *rest: Any) -> dict[str, Any]:
        read.append(file)
        if len(read) == 4:
            raise KeyboardInterrupt
        return measure(file, *rest)

    monkeypatch.setattr(workers, "measure_report", interrupted)
    result = run("overlap", "--format", "json", "--one-run", *reports)
    assert result.exit_code == 130
    assert len(json.loads(result.stdout)["ranks"]) == 3
    assert result.stderr == (
        f"warning: left out: {reports[3]}: interrupted: 2 of 5 traces were not read: run the command again\n"
    )


@pytest.mark.parametrize(
    ("name", "size", "processes"),
    [
        ("x.sqlite", 40 * 2**20, 2),
        ("x.sqlite", 4 * 2**20, 1),
        ("x.json.gz", 4 * 2**20, 2),
        ("x.json.gz", 2**20, 1),
        ("x.nsys-rep", 4 * 2**20, 2),
    ],
)
def test_packed_files_count_by_what_they_unpack_to(
    name: str, size: int, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 packed ranks were read by one core."""
    files = [WantedReport(tmp_path / f"{rank}{name}", LoadOptions(), ("overlap",)) for rank in range(2)]
    for file, *_ in files:
        with file.open("wb") as opened:
            opened.truncate(size)
    asked = []

    def measure(*given: Any) -> Iterator[Any]:
        asked.append(given[2] if len(given) > 2 else 1)
        yield from ()

    monkeypatch.setattr(workers_module, "count_cores", lambda: 8)
    monkeypatch.setattr(workers_module, "_measure_here", measure)
    monkeypatch.setattr(workers_module, "_measure_elsewhere", measure)
    assert list(workers_module.measure_files(files, Workers(None))) == []
    assert asked == [processes]


def test_many_small_files_are_read_by_several_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 ranks of a few kilobytes took as long as one large file, on one core."""
    files = [WantedReport(tmp_path / f"{rank}.json", LoadOptions(), ("overlap",)) for rank in range(64)]
    for file, *_ in files:
        file.write_bytes(b"{}")
    asked = []

    def elsewhere(*given: Any) -> Iterator[Any]:
        asked.append(given[2])
        yield from ()

    monkeypatch.setattr(workers_module, "count_cores", lambda: 8)
    monkeypatch.setattr(workers_module, "_measure_elsewhere", elsewhere)
    assert list(workers_module.measure_files(files, Workers(None))) == []
    assert asked == [2]


def test_each_run_says_that_an_interruption_took_some_of_its_files(reports: list[Path]) -> None:
    """Only the run of the first file that was not read said so."""

    def interrupt(done: int, _total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    left_out: list[TraceError] = []
    workers = Workers(1, progress=interrupt, leave_out=left_out.append)
    later, earlier = Run(tuple(reports[2:4]), workers=workers), Run(tuple(reports[:2]), workers=workers)
    assert prepare_runs([later, earlier], "overlap") == [later]
    assert len(later.files) == len(left_out) == 1
    assert [note for note in later.notes if "interrupted: 3 of 4 traces were not read" in note]
