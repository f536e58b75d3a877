"""The launcher, with ranks that are a line of Python each: reasons of failures, and no rank left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing import connection
from pathlib import Path

import pytest

from ddp_prof.errors import OutOfMemoryError, WorkloadError
from ddp_prof.signals import stop_on_signals
from ddp_prof.train.launch import launch, most_ranks, short_socket_paths
from tests.waiting import is_running, wait_until

PRELUDE = """
import os, sys, time
from ddp_prof.errors import CommunicationError, OutOfMemoryError, WorkloadError
from ddp_prof.train.launch import die_with_launcher, leave_failure
die_with_launcher()
rank = int(os.environ["RANK"])
def fail(error):
    leave_failure(rank, error)
    sys.exit(1)
"""


def ranks(code: str, *, forked: bool = False) -> list[str]:
    return ["-m", "tests.train.run_code", PRELUDE + code] if forked else ["-c", PRELUDE + code]


@pytest.fixture(params=[False, True], ids=["started", "forked"])
def forked(request: pytest.FixtureRequest) -> bool:
    """Whether ranks are forked from a server."""
    return bool(request.param)


def test_no_more_ranks_than_the_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**18}.__getitem__)  # 1 GiB
    assert most_ranks() == 5
    with pytest.raises(WorkloadError, match="1000000000 ranks do not fit: the memory of this machine holds at most 5"):
        launch(1_000_000_000, ["-c", "pass"])


def test_every_rank_knows_its_place(tmp_path: Path, forked: bool) -> None:
    keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    code = f"open('{tmp_path}/' + str(rank), 'w').write(' '.join(os.environ[each] for each in {keys}))"
    launch(2, ranks(code, forked=forked), forked=forked)
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == [f"0 2 0 2 {threads}", f"1 2 1 2 {threads}"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("fail(WorkloadError('no room'))", "no room"),
        ("rank == 1 and fail(WorkloadError('no room: at all'))", "no room: at all"),
        ("sys.exit(3 * rank)", "rank 1 ended with exit code 3, see its output"),
        ("rank == 1 and os.abort()", "rank 1 ended with SIGABRT, see its output"),
        # what a peer noticed is not the cause
        ("fail(CommunicationError('peer gone') if rank == 0 else WorkloadError('cause'))", "cause"),
        ("fail(CommunicationError('peer gone')) if rank == 0 else sys.exit(7)", "rank 1 ended with exit code 7"),
        ("fail(CommunicationError(f'rank {rank} timed out'))", "rank 0 timed out"),
    ],
)
def test_one_reason_is_given(code: str, reason: str, forked: bool) -> None:
    with pytest.raises(WorkloadError, match=f"^{reason}"):
        launch(2, ranks(code, forked=forked), forked=forked)


@pytest.fixture
def system_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that kills a process for want of memory while the ranks run."""
    counts = iter((4, 5))
    monkeypatch.setattr("ddp_prof.train.launch._kills_for_memory", lambda: next(counts))


@pytest.mark.usefixtures("system_kills")
@pytest.mark.parametrize(
    "code",
    [
        "rank == 1 and fail(OutOfMemoryError('too big'))",
        "rank == 1 and os.kill(os.getpid(), 9)",
        # a peer of a killed rank may notice first, and end in any way
        "fail(CommunicationError('peer gone')) if rank == 0 else os.kill(os.getpid(), 9)",
        "sys.exit(1) if rank == 0 else os.kill(os.getpid(), 9)",
    ],
)
def test_want_of_memory_is_told_from_other_failures(code: str) -> None:
    with pytest.raises(OutOfMemoryError):
        launch(2, ranks(code))


@pytest.mark.parametrize(
    ("kills", "reason"),
    [(None, r"rank 1 ended with SIGKILL \(out of memory\?\), "), (4, "rank 1 ended with SIGKILL, ")],
)
def test_who_is_killed_by_somebody_else_does_not_lack_memory(
    kills: int | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_prof.train.launch._kills_for_memory", lambda: kills)
    with pytest.raises(WorkloadError, match=f"^{reason}see its output") as caught:
        launch(2, ranks("rank == 1 and os.kill(os.getpid(), 9)"))
    assert isinstance(caught.value, OutOfMemoryError) == (kills is None)


def test_what_the_ranks_say_goes_into_a_log_whose_last_line_is_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], forked: bool
) -> None:
    with pytest.raises(
        WorkloadError, match=r"^rank 1 ended with exit code 1, after saying: ValueError: odd$"
    ) as caught:
        launch(2, ranks("if rank == 1: raise ValueError('odd')", forked=forked), log=tmp_path / "log", forked=forked)
    assert not isinstance(caught.value, OutOfMemoryError)
    assert "Traceback" in (tmp_path / "log").read_text()
    assert capfd.readouterr() == ("", "")


def test_ranks_that_do_not_notice_are_ended(tmp_path: Path) -> None:
    code = f"""
if rank == 1:
    while not os.path.exists('{tmp_path}/pid'):
        time.sleep(0.02)
    sys.exit(1)
open('{tmp_path}/pid', 'w').write(str(os.getpid()))
time.sleep(600)
open('{tmp_path}/ended by itself', 'w')
"""
    with pytest.raises(WorkloadError, match="rank 1 ended with exit code 1"):
        launch(2, ranks(code))
    assert not is_running(int((tmp_path / "pid").read_text()))
    assert not (tmp_path / "ended by itself").exists()


@pytest.mark.torch
def test_forked_ranks_have_torch_already() -> None:
    """The server imports it once; without it a rank would wait for seconds."""
    code = "import sys; 'torch' in sys.modules and 'ddp_prof.train.run' in sys.modules or fail(WorkloadError('no'))"
    launch(2, ranks(code, forked=True), forked=True)


def test_the_server_is_reached_under_a_long_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on clusters: profile_all.sh ended in a traceback after its captures, "AF_UNIX path too long"."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)  # type: ignore[attr-defined]
    with short_socket_paths():
        connection.Listener(family="AF_UNIX").close()
    assert tempfile.gettempdir() == str(folder)


def test_the_signal_handlers_of_the_caller_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    launch(1, ranks("pass"))
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_hangup_that_nohup_ignores_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("stop", "forked"),
    [
        (signal.SIGINT, True),
        (signal.SIGKILL, True),
        (signal.SIGTERM, False),
        (signal.SIGKILL, False),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.nightly),
        pytest.param(signal.SIGHUP, True, marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.nightly),
        pytest.param(signal.SIGHUP, False, marks=pytest.mark.nightly),
    ],
)
def test_no_rank_outlives_the_launcher(stop: signal.Signals, tmp_path: Path, forked: bool) -> None:
    # a rank that ignores being asked
    code = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open('{tmp_path}/partial%d' % rank, 'w').write(str(os.getpid()))
os.rename('{tmp_path}/partial%d' % rank, '{tmp_path}/pid%d' % rank)
time.sleep(600)
"""
    # These ranks need no torch: the server is not to take seconds to import it.
    launcher = f"""
import sys
from ddp_prof.signals import Stopped
from ddp_prof.train.launch import FORKING, launch
FORKING.set_forkserver_preload([])
try:
    launch(2, {ranks(code, forked=forked)!r}, forked={forked})
except Stopped as stopped:
    sys.exit(128 + stopped.number)
"""
    # What a killed launcher cannot remove lies in the test's folder.
    process = subprocess.Popen([sys.executable, "-c", launcher], env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        wait_until(lambda: len(list(tmp_path.glob("pid*"))) == 2)
        process.send_signal(stop)
        code_ = process.wait()
    finally:
        process.kill()
        process.wait()
    assert code_ == (-9 if stop == signal.SIGKILL else 128 + stop)
    pids = [int(path.read_text()) for path in tmp_path.glob("pid*")]
    wait_until(lambda: not any(map(is_running, pids)))
    assert stop == signal.SIGKILL or not list(tmp_path.glob("ddp_prof.*")), "its temporary folder is removed"
