"""profile_all.sh with stand-ins for what it calls: order, failures, what is said once, what is not drawn again."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.train.test_launch import is_running

if TYPE_CHECKING:
    from conftest import Checkout

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "profile_all.sh"
CAPTURE = """
echo "capture $*" >>"$CALLS"
name="$1${3:+_$3mb}"
[ -z "${WRONG:-}" ] || { echo "profile_variant: DEVICE=tpu: there are auto, cpu and cuda" >&2; exit 2; }
exec 7<"$TRACES_DIR"
flock -n 7 || { echo "profile_variant: waiting for another capture into $TRACES_DIR" >&2; flock 7; }
echo "profile_variant: a note" >&2
if [ "$1" = "${SLOW:-}" ]; then
  [ -z "${TIDY:-}" ] || trap 'trap "" TERM HUP; sleep 1; echo tidied >>"$CALLS"; exit 143' TERM HUP
  echo $$ >"$CALLS.pid"
  while :; do sleep 0.1 7<&-; done
fi
[ "$1" != "${BROKEN:-}" ] || { echo "profile_variant: $1: the workload failed: too big" >&2; exit 1; }
[ -e "$TRACES_DIR/$name.sqlite" ] && echo "$name: up to date" && exit
touch "$TRACES_DIR/$name.${SUFFIX:-sqlite}"
echo "$name: captured by nsys 2022.4.2.1 in 6 s"
"""
DDP_PROF = """
echo "ddp-prof $*" >>"$CALLS"
case "$1" in
  report) echo "seven pages"; mkdir -p "${@: -1}" && touch "${@: -1}/index.html"; exit "${REPORT:-0}" ;;
  compare) echo "THE TABLE" ;;
esac
"""


@pytest.fixture
def machine(checkout: Checkout) -> Checkout:
    """All is set up."""
    scripts = checkout.root / "scripts"
    checkout.program("env.sh", 'echo "env $*" >>"$CALLS"', scripts)
    checkout.program("install_nsys.sh", 'echo "nsys" >>"$CALLS"; echo /opt/nsys; exit "${NO_NSYS:-0}"', scripts)
    checkout.program("profile_variant.sh", CAPTURE, scripts)
    checkout.program("python", "echo naive flat overlap bucketed torch", checkout.root / ".venv/bin")
    checkout.program("ddp-prof", DDP_PROF, checkout.root / ".venv/bin")
    (checkout.root / "ddp_prof").mkdir()
    (checkout.root / "ddp_prof/present.py").write_text("# draws\n")
    return checkout


def test_all_variants_in_the_order_of_the_story(machine: Checkout) -> None:
    done = machine.run(SCRIPT)
    assert done.returncode == 0, done.stderr
    names = ["naive", "flat", "overlap", "bucketed_1mb", "bucketed_10mb", "bucketed_100mb", "torch"]
    files = " ".join(f"traces/local/{name}.sqlite" for name in names)
    assert machine.calls == [
        "env train",
        "nsys",
        "capture naive",
        "capture flat",
        "capture overlap",
        "capture bucketed --bucket-size-mb 1",
        "capture bucketed --bucket-size-mb 10",
        "capture bucketed --bucket-size-mb 100",
        "capture torch",
        f"ddp-prof report {files} -o figures/local",
        f"ddp-prof compare {files}",
    ]
    lines = done.stdout.splitlines()
    assert lines[0] == "[1/7] naive ... 6 s"
    assert lines[4] == "[5/7] bucketed, 10 MB ... 6 s"
    assert "THE TABLE" in lines
    assert "  ddp-prof overlap traces/local/overlap.sqlite --steps" in lines
    assert done.stderr == "profile_variant: a note\n"  # seven times said, once shown


def test_afterwards_git_status_is_clean(machine: Checkout) -> None:
    """Captures and figures of one's own go to places that git ignores; those of the repository stay as they are."""
    shutil.copy2(ROOT / ".gitignore", machine.root)
    (machine.root / "traces").mkdir()
    (machine.root / "traces/overlap.sqlite").write_text("the repository's")
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=machine.root, check=True)
    assert machine.run(SCRIPT).returncode == 0
    status = subprocess.run(["git", "status", "--short"], cwd=machine.root, capture_output=True, text=True, check=True)
    assert status.stdout == ""
    assert (machine.root / "traces/overlap.sqlite").read_text() == "the repository's"
    assert (machine.root / "traces/local/overlap.sqlite").exists()


def test_all_variants_that_there_are(machine: Checkout) -> None:
    machine.program("python", "echo naive fsdp", machine.root / ".venv/bin")
    machine.run(SCRIPT)
    assert [call for call in machine.calls if call.startswith("capture")] == ["capture naive", "capture fsdp"]


def test_what_is_there_is_not_drawn_again(machine: Checkout) -> None:
    machine.run(SCRIPT)
    again = machine.run(SCRIPT)
    assert "[7/7] torch ... up to date" in again.stdout
    assert sum("report" in call for call in machine.calls) == 1
    assert sum("compare" in call for call in machine.calls) == 2
    machine.run(SCRIPT, FORCE="1")
    assert sum("report" in call for call in machine.calls) == 2


@pytest.mark.parametrize("name", ["traces/local/flat.sqlite", "ddp_prof/present.py"])
def test_figures_older_than_their_origin_are_drawn_again(machine: Checkout, name: str) -> None:
    machine.run(SCRIPT)
    os.utime(machine.root / name, (time.time() + 5, time.time() + 5))
    machine.run(SCRIPT)
    assert sum("report" in call for call in machine.calls) == 2


def test_a_failure_does_not_stop_the_others(machine: Checkout) -> None:
    done = machine.run(SCRIPT, BROKEN="overlap")
    assert done.returncode == 1
    assert "[3/7] overlap ... failed" in done.stdout
    assert "profile_variant: overlap: the workload failed: too big" in done.stderr
    assert done.stderr.splitlines()[-1] == "profile_all: 1 of the steps above failed"
    assert "traces/local/overlap.sqlite" not in machine.calls[-1]
    assert "traces/local/torch.sqlite" in machine.calls[-1]
    assert "THE TABLE" in done.stdout


def test_a_failed_drawing_is_shown_and_told(machine: Checkout) -> None:
    done = machine.run(SCRIPT, REPORT="1")
    assert done.returncode == 1
    assert "seven pages" in done.stdout
    assert "THE TABLE" in done.stdout


def test_knobs(machine: Checkout, tmp_path: Path) -> None:
    done = machine.run(
        SCRIPT, VARIANTS="bucketed torch", BUCKET_SIZES_MB="25", TRACES_DIR=str(tmp_path / "t"), FIGURES_DIR="figures"
    )
    assert [call for call in machine.calls if call.startswith("capture")] == [
        "capture bucketed --bucket-size-mb 25",
        "capture torch",
    ]
    assert f"ddp-prof overlap {tmp_path}/t/bucketed_25mb.sqlite --steps" in done.stdout


def test_without_nsys_all_ranks_are_compared(machine: Checkout) -> None:
    (machine.root / "traces/local").mkdir(parents=True)
    (machine.root / "traces/local/flat.rank1.json.gz").touch()
    done = machine.run(SCRIPT, NO_NSYS="1", SUFFIX="rank0.json.gz", VARIANTS="naive flat")
    assert done.returncode == 0, done.stderr
    files = ["naive.rank0.json.gz", "flat.rank0.json.gz", "flat.rank1.json.gz"]
    assert machine.calls[-1] == "ddp-prof compare " + " ".join(f"traces/local/{name}" for name in files)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_ends_the_capture_in_one_line(machine: Checkout, number: signal.Signals, code: int) -> None:
    process, capture = _started(machine)
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert (process.returncode, is_running(capture)) == (code, False)
    assert said.splitlines()[-1] == "profile_all: stopped; what was captured before is kept, and the next run goes on"
    assert not any(call.startswith("ddp-prof") for call in machine.calls)


def test_killed_it_takes_the_capture_with_it(machine: Checkout) -> None:
    process, capture = _started(machine)
    process.kill()
    process.communicate(timeout=20)
    machine.wait_until(lambda: not is_running(capture))


@pytest.mark.parametrize("name", ["TERM", "KILL"])
def test_a_capture_that_is_killed_is_told_and_the_others_go_on(machine: Checkout, name: str) -> None:
    process, capture = _started(machine)
    os.kill(capture, getattr(signal, f"SIG{name}"))
    _, said = process.communicate(timeout=20)
    assert process.returncode == 1
    assert said.splitlines()[-2:] == [
        f"profile_all: this capture was ended by SIG{name}",
        "profile_all: 1 of the steps above failed",
    ]
    assert "capture torch" in machine.calls


def test_a_second_signal_does_not_cut_off_the_clean_up(machine: Checkout, tmp_path: Path) -> None:
    """The end of a session reaches the whole group, and more than once."""
    (tmp_path / "temporary").mkdir()
    process, capture = _started(machine, TIDY="1", TMPDIR=str(tmp_path / "temporary"))
    assert list((tmp_path / "temporary").iterdir())
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        os.killpg(process.pid, number)
        time.sleep(0.1)
    _, said = process.communicate(timeout=20)
    assert (process.returncode, is_running(capture)) == (143, False)
    assert "tidied" in machine.calls, "it waits for the capture, which has its own to tidy up"
    assert said.count("profile_all: stopped") == 1
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_next_run_removes_what_a_killed_one_left(machine: Checkout, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process, _ = _started(machine, TMPDIR=str(temporary))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=20)
    (left,) = temporary.iterdir()
    other, _ = _started(machine, TMPDIR=str(temporary))
    (own,) = temporary.iterdir()
    assert own != left
    assert machine.run(SCRIPT, TMPDIR=str(temporary), TRACES_DIR="elsewhere").returncode == 0
    assert list(temporary.iterdir()) == [own], "that of a run which lives stays"
    os.killpg(other.pid, signal.SIGTERM)
    other.communicate(timeout=20)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        (
            {"VARIANTS": " "},
            2,
            "profile_all: VARIANTS or BUCKET_SIZES_MB names nothing to capture; there are naive flat",
        ),
        (
            {"VARIANTS": "bucketed", "BUCKET_SIZES_MB": "\n"},
            2,
            "profile_all: VARIANTS or BUCKET_SIZES_MB names nothing",
        ),
        ({"TRACES_DIR": "/proc/mine"}, 1, "No such file or directory: set TRACES_DIR and FIGURES_DIR to"),
        ({"FIGURES_DIR": "/proc/mine"}, 1, "No such file or directory: set TRACES_DIR and FIGURES_DIR to"),
        ({"WRONG": "1"}, 2, "profile_variant: DEVICE=tpu: there are auto, cpu and cuda"),
    ],
)
def test_a_setting_that_no_capture_can_have_is_one_line(
    machine: Checkout, settings: dict[str, str], code: int, said: str
) -> None:
    done = machine.run(SCRIPT, LC_ALL="C.UTF-8", **settings)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert sum(call.startswith("capture") for call in machine.calls) <= 1


def test_a_variant_is_no_pattern_for_files(machine: Checkout) -> None:
    machine.run(SCRIPT, VARIANTS="* flat\noverlap")
    assert [call for call in machine.calls if call.startswith("capture")] == [
        "capture *",
        "capture flat",
        "capture overlap",
    ]


def test_that_it_waits_is_said_while_it_waits_and_once(machine: Checkout, tmp_path: Path) -> None:
    traces = machine.root / "traces/local"
    traces.mkdir(parents=True)
    said = tmp_path / "said"
    held = os.open(traces, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with said.open("w") as file:
        process = subprocess.Popen(
            ["bash", str(machine.root / SCRIPT)], env=machine.full_environment(), stderr=file, start_new_session=True
        )
    try:
        machine.wait_until(lambda: "waiting" in said.read_text())
        assert process.poll() is None
    finally:
        os.close(held)
    assert process.wait(timeout=20) == 0
    waiting = "profile_variant: waiting for another capture into traces/local"
    assert said.read_text().splitlines() == [waiting, "profile_variant: a note"]


def _started(machine: Checkout, **settings: str) -> tuple[subprocess.Popen[str], int]:
    """It, in its second capture, and the process of that."""
    pid_file = machine.calls_file.with_name("calls.pid")
    pid_file.unlink(missing_ok=True)
    process = subprocess.Popen(
        ["bash", str(machine.root / SCRIPT)],
        env=machine.full_environment(**{"SLOW": "flat", **settings}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    machine.wait_until(lambda: pid_file.exists() and bool(pid_file.read_text().strip()))
    return process, int(pid_file.read_text())
