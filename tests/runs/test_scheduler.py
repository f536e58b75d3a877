"""Reports read by the workers of a Dask scheduler: the same to the byte, also where one of them is lost."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_prof import LoadOptions, TraceError, Workers, load_runs
from tests.command_line import run
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import write_capture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("distributed") is None, reason="the extra 'cluster' is not installed"),
]
RANKS = 6


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("reports")
    return [write_capture(folder / f"job.rank{rank}.sqlite", known_truth(2)) for rank in range(RANKS)]


@contextmanager
def cluster_of(workers: int) -> Iterator[Any]:
    """A scheduler with worker processes; one that is lost is started anew.

    Dask gives up where a connection takes half a minute, as between starting processes of a busy machine it may.
    """
    import dask
    from distributed import LocalCluster  # half a second, of each process that collects

    limits = {"distributed.comm.timeouts.connect": "1h", "distributed.comm.timeouts.tcp": "1h"}
    kind = {"processes": True, "threads_per_worker": 1, "dashboard_address": None}
    with dask.config.set(limits), LocalCluster(n_workers=workers, host="127.0.0.1", **kind) as found:
        yield found


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a scheduler with two worker processes."""
    with cluster_of(2) as found:
        yield found.scheduler_address


def run_command(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize(
    "command", ["collectives", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("compare", "info"))]
)
def test_the_same_to_the_byte(cluster: str, reports: list[Path], command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reports[0].parent)  # names are relative here, and workers are elsewhere
    asked = (command, "--format", "json", *(report.name for report in reports))
    assert run_command(*asked, "--scheduler", cluster) == run_command(*asked)


def test_the_same_pages(cluster: str, reports: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reports[0].parent)
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    for name, who in (("here", ("--jobs", 1)), ("there", ("--scheduler", cluster))):
        run_command("report", "--separate", *(report.name for report in reports[:2]), "-o", tmp_path / name, *who)
    here, there = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("here", "there"))
    assert len(here) == 8
    assert here == there


def test_an_unreadable_report_is_named_as_it_was_given(cluster: str, tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_bytes(b"no trace")
    with pytest.raises(TraceError, match=r"x\.sqlite: neither a report"):
        load_runs([tmp_path / "x.sqlite"], workers=Workers(scheduler=cluster), measures=["overlap"])


def test_a_run_that_fails_leaves_no_client_that_could_block_the_next(cluster: str, reports: list[Path]) -> None:
    """The error holds the frames of what raised it: whatever is closed by the garbage collector alone is open here."""
    from distributed import Client

    (broken := reports[0].with_name("broken.sqlite")).write_bytes(b"no trace")
    asked = Workers(scheduler=cluster)
    with pytest.raises(TraceError) as failed:
        load_runs([broken, *reports], LoadOptions(one_run=True), workers=asked, measures=["overlap"])
    assert [client.status for client in Client._instances if client.status != "closed"] == []
    assert len(load_runs(reports, workers=asked, measures=["overlap"])[0].overlap().ranks) == RANKS
    assert failed.value.path == broken


def test_what_a_lost_worker_had_begun_is_done_again(cluster: str, reports: list[Path]) -> None:
    from distributed import Client

    lost: list[int] = []

    def kill(done: int, _total: int) -> None:
        if done == 1:
            with Client(cluster, set_as_default=False) as client:
                lost.append(next(iter(client.run(os.getpid).values())))
            os.kill(lost[0], signal.SIGKILL)

    (found,) = load_runs(reports, workers=Workers(scheduler=cluster, progress=kill), measures=["overlap"])
    (alone,) = load_runs(reports, measures=["overlap"])
    assert len(lost) == 1
    assert found.overlap() == alone.overlap()


def test_a_result_that_never_arrives_is_asked_for_again(
    cluster: str, reports: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As seen once on a busy machine: a worker was killed while its result was fetched, and Dask waited for ever."""
    from distributed import Future

    asked: list[float] = []
    fetch = Future.result

    def late(future: Any, timeout: float | None = None) -> Any:
        assert timeout is not None
        asked.append(timeout)
        if len(asked) in (1, 7):
            raise TimeoutError
        return fetch(future, timeout)

    monkeypatch.setattr(Future, "result", late)
    (found,) = load_runs(reports, workers=Workers(scheduler=cluster), measures=["overlap"])
    assert len(found.overlap().ranks) == RANKS
    assert len(asked) == RANKS + 2


def test_a_report_over_which_workers_end_is_named(
    cluster: str, reports: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that a report was given up, and not which, nor what to do."""
    from distributed import Future, KilledWorker

    def killed(_future: Any, timeout: float | None = None) -> Any:
        raise KilledWorker(f"run_task-{timeout}", SimpleNamespace(address="tcp://127.0.0.1:1"), 3)

    monkeypatch.setattr(Future, "result", killed)
    result = run("overlap", "--scheduler", cluster, reports[0])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"Error: {reports[0]}: several Dask workers ended while they read it")
    assert result.stderr.endswith(": start workers with more memory, or leave out --scheduler\n")


def test_a_scheduler_without_workers_is_told_and_waited_for(
    reports: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ddp_prof.runs.workers.SECONDS_WITHOUT_WORKERS", 0.2)
    with cluster_of(0) as found:

        class Worker(logging.Handler):
            """Comes when it is missed, and not after a time in which the program may not even have asked."""

            def emit(self, record: logging.LogRecord) -> None:
                found.scale(1)

        missed = Worker()
        logging.getLogger("ddp_prof").addHandler(missed)
        try:
            (run,) = load_runs(reports, workers=Workers(scheduler=found.scheduler_address), measures=["overlap"])
        finally:
            logging.getLogger("ddp_prof").removeHandler(missed)
    (told,) = [record.getMessage() for record in caplog.records if record.name == "ddp_prof"]
    assert told.startswith("note: no worker is connected to the Dask scheduler at tcp://127.0.0.1:")
    assert len(run.overlap().ranks) == RANKS


def test_no_scheduler_there_is_one_line(reports: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_prof.runs.workers.SECONDS_TO_CONNECT", 1)
    result = run("overlap", "--scheduler", "tcp://127.0.0.1:9", str(reports[0]))
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: no Dask scheduler at tcp://127.0.0.1:9")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("content", ["no JSON", "{}", "[]", '{"address": 3}', None])
def test_a_file_without_an_address_is_one_line(content: str | None, reports: list[Path], tmp_path: Path) -> None:
    """It was a traceback of Dask, and of a file that is not there "missing port number in address"."""
    file = tmp_path / "scheduler.json"
    if content is not None:
        file.write_text(content)
    result = run("overlap", "--scheduler", file, reports[0])
    what = "it holds no address" if content is not None else "neither a file nor an address"
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert result.stderr.startswith(f"Error: {file}: {what} of a Dask scheduler: give the file of 'dask scheduler")


def test_without_dask_the_way_out_is_said(reports: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    result = run("overlap", "--scheduler", "tcp://127.0.0.1:9", str(reports[0]))
    assert result.exit_code == 1
    assert result.stderr == "Error: --scheduler needs Dask: pip install 'distributed>=2024.8'\n"
