"""The whole command on programs that fail in one try, are stopped, or start their ranks in every way that there is.

By the real torchrun in a nightly; the gate has forked ranks (:mod:`tests.forked_torchrun`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.capture.processes import _find_marked_processes
from ddp_prof.tune.measure import Program, _error_of_rank
from ddp_prof.tune.store import Store
from ddp_prof.tune.tries import parse_tries
from tests.command_line import run
from tests.tune.test_programs import (
    ACCUMULATION,
    DDP_PROF,
    LIGHTNING,
    PLAIN,
    SCALER,
    SHARDED,
    SPAWNED,
    STUBBORN,
    TIDY,
    TRAINER,
    programs,
)
from tests.waiting import wait_until

__all__ = ["programs"]
pytestmark = [pytest.mark.torch, pytest.mark.slow]

# MODE: memory (there is none for what it asks), killed (as the kernel does that lacks memory), error (on one rank: the
# other waits for it in a collective), paused (until it is stopped).
FAILING = PLAIN.replace(
    "    optimizer.step()",
    """
    mode = os.environ.get("MODE")
    if mode == "memory":
        torch.empty(1 << 60)
    if mode == "killed":
        os.kill(os.getpid(), 9)
    if mode == "error" and dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("planted")
    if mode == "paused":
        open(os.environ["PAUSED"] + str(dist.get_rank()), "w").close()
        time.sleep(1000)
    optimizer.step()""",
)
TRIES = ("MODE=memory,killed,error", "static_graph")
FORKED = ("torchrun", "--nproc-per-node", "1")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


def command(folder: Path, tries: tuple[str, ...], launcher: tuple[str, ...], rounds: int, text: str) -> list[str]:
    (folder / "train.py").write_text(text.replace('"after"', repr(str(folder / "after"))))
    asked = [word for tried in tries for word in ("--try", tried)]
    limits = ["--rounds", str(rounds), "--steps", "3", "--warmup", "2", "--minutes", "60", "--format", "json"]
    return ["tune", *asked, *limits, "--store", str(folder / "tune.db"), "--", *launcher, str(folder / "train.py")]


def stored(folder: Path, tries: tuple[str, ...], launcher: tuple[str, ...]) -> dict[tuple[int, str], str]:
    """How each run ended, by round and try."""
    program = Program((*launcher, str(folder / "train.py")), 2, 3)
    store = Store(folder / "tune.db", program, parse_tries(tries), Path.cwd(), os.environ)
    return {(trial.round, trial.tried): trial.status for trial in store.load()}


def check_failing(folder: Path, document: dict[str, Any], launcher: tuple[str, ...]) -> None:
    memory, killed, error, good = document["tries"]
    assert [one["outcome"] for one in (memory, killed, error)] == ["failed"] * 3
    assert "allocate" in memory["reason"] or "memory" in memory["reason"]
    assert error["reason"] == "ValueError: planted"
    assert (good["outcome"], good["pairs"], good["losses"]) == ("cannot be told", 2, "same")
    kept = stored(folder, TRIES, launcher)
    assert [kept.pop((number, "MODE=memory"), None) for number in (1, 2)] == ["out_of_memory", None], "it lasts"
    failed = {(number, f"MODE={mode}"): "failed" for number in (1, 2) for mode in ("killed", "error")}
    fine = {(0, "today"), *((number, one) for number in (1, 2) for one in ("today", "static_graph=True"))}
    assert kept == failed | dict.fromkeys(fine, "ok")
    assert not (folder / "after").exists()


def test_a_try_that_fails_stops_no_other(
    tmp_path: Path, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once more, the same command makes no run, and says so: it said that the program is started.

    Then it said that the program was not started, which --why does next.
    """
    monkeypatch.setenv("PATH", programs["PATH"])
    words = command(tmp_path, TRIES, FORKED, 2, FAILING)
    done = run(*words)
    assert done.exit_code == 0, done.output
    check_failing(tmp_path, json.loads(done.stdout), FORKED)
    assert done.stderr.startswith("note: a tuning starts the program once per try in each of up to 2 rounds")
    again = run(*words)
    assert (again.exit_code, again.stdout) == (0, done.stdout)
    kept = "has these runs from before; another --store measures them anew"
    assert again.stderr == f"note: no run was made: {tmp_path / 'tune.db'} {kept}\n"


def test_who_was_killed_is_said_in_place_of_torchruns_summary() -> None:
    """What torchrun prints of a rank that the kernel has killed, while the other waited for it."""
    text = """RuntimeError: Connection closed by peer
W1127 04:00:01.000000 5 elastic/api.py:1010] Sending process 8 closing signal
E1127 04:00:01.000000 5 elastic/api.py:984] failed (exitcode: -9) local_rank: 0 (pid: 7)
Traceback (most recent call last):
  File "torchrun", line 6, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 7)
  traceback : Signal 9 (SIGKILL) received by PID 7
"""
    assert _error_of_rank(text) == "a rank was ended by SIGKILL, which often means that the machine lacks memory"


STARS = f"\n{'*' * 41}\nSetting OMP_NUM_THREADS environment variable\n{'*' * 41}\n"
SUMMARY = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
train.py FAILED
Root Cause (first observed failure):
[0]:
  exitcode  : {} (pid: 7)
"""
WAITED = (
    "a rank ended while the others waited for it: do all ranks make the same number of steps? If not, give so few "
    "--steps that each of them makes these"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SUMMARY.format(5), "a rank ended with exit code 5 and raised no exception"),
        (STARS + SUMMARY.format(5), "a rank ended with exit code 5 and raised no exception"),
        (
            STARS
            + "usage: train.py\ntrain.py: error: --steps\n\nE1130 05:18:11 5 torch/distributed/elastic/api.py:1002] "
            "failed\n" + SUMMARY.format(2),
            (
                "a rank ended with exit code 2 and raised no exception; before, the program's output ends with: "
                "train.py: error: --steps"
            ),
        ),
        ("ValueError: no\n" + SUMMARY.format(1), "ValueError: no"),
        ("[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [::1]:3\n" + SUMMARY.format(1), WAITED),
        ("RuntimeError: [pair.cc:537] Read error [::1]:3: Connection reset by peer. GLHF!\n", WAITED),
        ("hello\n", None),
    ],
)
def test_how_a_rank_ended_is_said(text: str, said: str | None) -> None:
    """Of ``sys.exit(5)`` only torchrun's ``ChildFailedError:`` was told."""
    assert _error_of_rank(text) == said


@pytest.mark.nightly
def test_nightly_a_try_that_fails_under_torchrun(tmp_path: Path) -> None:
    done = run(*command(tmp_path, TRIES, TORCHRUN, 2, FAILING))
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    check_failing(tmp_path, document, TORCHRUN)
    assert (
        document["tries"][1]["reason"] == "a rank was ended by SIGKILL, which often means that the machine lacks memory"
    )


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nightly_a_stopped_tuning_under_torchrun(tmp_path: Path, number: signal.Signals) -> None:
    """No process of it is left, what was measured is kept, and the same command goes on."""
    tries, paused = ("MODE=paused",), str(tmp_path / "paused")
    words = command(tmp_path, tries, TORCHRUN, 1, FAILING)
    environ = {**os.environ, "PAUSED": paused}
    with subprocess.Popen(
        [DDP_PROF, *words], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as tuning:
        wait_until(lambda: len([*tmp_path.glob("paused*")]) == 2 or tuning.poll() is not None)
        tuning.send_signal(number)
        printed, said = tuning.communicate()
    assert (tuning.returncode, printed) == (128 + number, "")
    kept = f"{tmp_path / 'tune.db'} has the finished runs"
    assert said.splitlines()[-1] == f"stopped: {kept}: run the same command again to continue"
    assert _find_marked_processes(f"PAUSED={paused}") == {}
    kept = stored(tmp_path, tries, TORCHRUN)
    assert kept[0, "today"] == "ok"
    assert set(kept) <= {(0, "today"), (1, "today")}
    assert not (tmp_path / "after").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "text",
    [PLAIN, ACCUMULATION, SCALER, SHARDED, STUBBORN, TIDY, SPAWNED],
    ids=["plain", "accumulation", "scaler", "sharded", "stubborn", "tidy", "spawned"],
)
def test_nightly_unchanged_programs_are_tuned(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torchrun, or, where the program spawns its ranks, by Python alone."""
    monkeypatch.setenv("MEETING", str(tmp_path / "meeting"))
    launcher = (sys.executable,) if text == SPAWNED else TORCHRUN
    tried = "reshard_after_forward=false" if text == SHARDED else "gradient_as_bucket_view"
    check_unchanged(tmp_path, command(tmp_path, (tried,), launcher, 2, text), monkeypatch)


@pytest.mark.trainers
@pytest.mark.parametrize(
    ("text", "launcher", "makes"),
    [(TRAINER, TORCHRUN, {"out"}), (LIGHTNING, TORCHRUN, set()), (LIGHTNING, (sys.executable,), set())],
    ids=["transformers", "lightning", "lightning starts its ranks"],
)
def test_unchanged_trainers_are_tuned(
    tmp_path: Path, text: str, launcher: tuple[str, ...], makes: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import torch; torch.manual_seed(0)\n" + text.replace('"out"', repr(str(tmp_path / "out")))
    words = command(tmp_path, ("gradient_as_bucket_view",), launcher, 2, text)
    check_unchanged(tmp_path, words, monkeypatch, makes)


def check_unchanged(
    folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, makes: Collection[str] = ()
) -> None:
    """Its tuning ends, and leaves neither a process nor a file but those it makes itself; the program is as it was."""
    monkeypatch.setenv("OF_THIS_TEST", str(folder))
    before = (folder / "train.py").read_bytes()
    done = run(*words)
    assert done.exit_code == 0, done.output
    (one,) = json.loads(done.stdout)["tries"]
    assert (one["outcome"], one["pairs"]) == ("cannot be told", 2)
    assert one["losses"] == "same"
    assert set(_find_marked_processes(f"OF_THIS_TEST={folder}")) <= {os.getpid()}
    left = {path.name for path in folder.iterdir()} - {"train.py", "tune.db"}
    assert {name for name in left if not name.startswith("meeting")} == set(makes)
    assert (folder / "train.py").read_bytes() == before
