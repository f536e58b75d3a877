"""profile_all.sh with stand-ins for nsys, the workload and what draws: order, failures, signals, what is done once."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from ddp_prof.benchmark.store import open_database
from ddp_prof.capture import variant
from ddp_prof.errors import DdpProfError
from ddp_prof.run_config import RunConfig
from ddp_prof.variants import VARIANT_NAMES
from tests.capture.conftest import Machine, is_sleeping, machine, needs_namespace  # noqa: F401  # a fixture
from tests.scripts.conftest import ROOT, Checkout
from tests.waiting import ignores, is_running, wait_until

NAMES = ["naive", "flat", "overlap", "bucketed_1mb", "bucketed_10mb", "bucketed_100mb", "torch", "sharded", "fsdp"]
DDP_PROF = """
echo "ddp-prof $*" >>"$FOLDER/calls"
case "$1" in
  report) echo "seven pages"; mkdir -p "${@: -1}" && touch "${@: -1}/index.html"; exit "${REPORT:-0}" ;;
  compare) echo "THE TABLE" ;;
esac
"""


def environment_of(machine: Machine) -> dict[str, str]:  # noqa: F811
    return {**machine.environment, "FIGURES_DIR": str(machine.folder / "figures"), "TURNS_S": "0"}


def start(machine: Machine, **settings: str) -> subprocess.Popen[str]:  # noqa: F811
    """What profile_all.sh starts once the environment is there, as a process."""
    program = machine.program("ddp-prof", DDP_PROF)
    code = f"import pathlib, profile_all; profile_all.DDP_PROF = pathlib.Path({str(program)!r})\n"
    return subprocess.Popen(
        [sys.executable, "-c", code + "raise SystemExit(profile_all.main())"],
        env={**environment_of(machine), "PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}", **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(machine: Machine, **settings: str) -> tuple[int, list[str], list[str]]:  # noqa: F811
    """The same in this process: the exit code, and the lines on stdout and stderr."""

    def measure_turns(
        configs: Sequence[RunConfig], path: Path, seconds: float, *, force: bool, progress: Callable[[int], object]
    ) -> int:
        with (machine.folder / "calls").open("a") as calls:
            print("turns", *(config.label.replace(" ", "_") for config in configs), seconds, force, file=calls)
        if seconds == 13:
            open_database(path).close()
            raise DdpProfError("too big")
        if "MASTER_PORT" in os.environ:
            raise DdpProfError("its port is taken")
        if force or not path.exists():
            shutil.copy(ROOT / "traces" / "results.db", path)
            progress(0)
        return 3

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        profile_all = importlib.import_module("profile_all")
        patch.setattr(profile_all, "DDP_PROF", machine.program("ddp-prof", DDP_PROF))
        patch.setattr(profile_all, "measure_turns", measure_turns)
        patch.setattr(profile_all, "add_captures", lambda path, captures: None)
        patch.chdir(ROOT)  # it goes there itself
        for name in list(os.environ):
            patch.delenv(name)
        for name, value in {**environment_of(machine), **settings}.items():
            patch.setenv(name, value)
        code = profile_all.main()
    said = machine.capfd.readouterr()
    return code, said.out.splitlines(), said.err.splitlines()


def drawn(machine: Machine) -> int:  # noqa: F811
    return sum(call.startswith("ddp-prof report") for call in machine.calls)


def test_all_variants_in_the_order_of_the_story_and_once(machine: Machine) -> None:  # noqa: F811
    code, said, complaint = run(machine)
    assert (code, complaint) == (0, [])
    assert list(dict.fromkeys(name.partition("_")[0] for name in NAMES)) == list(VARIANT_NAMES)
    captured = [line.partition("--variant ")[2].split()[0] for line in machine.runs]
    assert captured == [name.partition("_")[0] for name in NAMES]
    told = [line for line in said if line.startswith("[")]
    assert [line.partition(" ... ")[0] for line in told][3:5] == ["[4/9] bucketed, 1 MB", "[5/9] bucketed, 10 MB"]
    assert (len(told), all(line.endswith(" s") for line in told)) == (9, True)
    traces = machine.folder / "traces"
    files = " ".join(f"{traces}/{name}.sqlite" for name in NAMES)
    calls = [call for call in machine.calls if call.startswith("ddp-prof")]
    assert calls == [f"ddp-prof report {files} -o {machine.folder}/figures", f"ddp-prof compare {files}"]
    assert "THE TABLE" in said
    assert f"  ddp-prof overlap '{traces}/overlap.sqlite' --steps" in said

    _, said, _ = run(machine)
    assert "[9/9] fsdp ... up to date" in said
    assert (len(machine.runs), drawn(machine)) == (9, 1)
    newer = traces / "flat.sqlite"
    os.utime(newer, (time.time() + 5, time.time() + 5))
    run(machine, VARIANTS="flat")
    assert drawn(machine) == 2, "figures older than their origin are drawn again"


def test_a_machine_without_process_namespaces_is_told_once(machine: Machine) -> None:  # noqa: F811
    machine.program("unshare", "exit 1")
    variant._say_once.cache_clear()
    code, _, complaint = run(machine, VARIANTS="naive flat overlap", ISOLATE="1")
    assert (code, len(complaint)) == (0, 1)
    assert "no process namespace here" in complaint[0]


def test_what_was_captured_is_trained_in_turns_and_both_are_drawn(machine: Machine) -> None:  # noqa: F811
    code, said, complaint = run(machine, VARIANTS="naive bucketed", TURNS_S="")
    assert (code, complaint) == (0, [])
    assert "bucketed, 1000 MB: the same buckets as 100 MB, captured once" in said
    (told,) = (line for line in said if line.startswith("training in turns, without a profiler: round 1"))
    assert told.partition(" (the machine is busy")[0].endswith("round 1")
    calls = [call.partition(" -o ")[0] for call in machine.calls if call.startswith(("turns", "ddp-prof"))]
    assert calls[0] == "turns naive bucketed_1_MB bucketed_10_MB bucketed_100_MB 60.0 False"
    assert [call.split()[:2] for call in calls[1:]] == [["ddp-prof", name] for name in ("results", "report", "compare")]
    assert calls[1].endswith("traces/turns.db")

    _, said, _ = run(machine, VARIANTS="naive bucketed", TURNS_S="40")
    assert "training in turns: up to date, 3 rounds" in said
    assert drawn(machine) == 1


def test_without_speedups_the_rest_is_there(machine: Machine) -> None:  # noqa: F811
    code, said, complaint = run(machine, VARIANTS="naive flat", TURNS_S="13")
    expected = ["profile_all: no speed-ups in turns: too big", "profile_all: 1 of the steps above failed"]
    assert (code, complaint) == (1, expected)
    assert "THE TABLE" in said
    # The database is there, without a round: ddp-prof results failed, and so no timelines were drawn.
    assert [call.split()[1] for call in machine.calls if call.startswith("ddp-prof")] == ["report", "compare"]


def test_where_ranks_of_another_program_meet_is_of_no_concern(machine: Machine) -> None:  # noqa: F811
    """As in a container for training: captures left it out, training in turns met at that port and failed."""
    code, _, complaint = run(machine, VARIANTS="naive flat", TURNS_S="40", MASTER_ADDR="elsewhere", MASTER_PORT="1")
    assert (code, complaint) == (0, [])


def test_a_rank_of_a_launcher_says_that_it_waits_for_the_others(machine: Machine) -> None:  # noqa: F811
    """Variables of a launcher may be left over; each capture took two minutes then, and did not say why it failed."""
    machine.workload("exit 1")
    code, _, complaint = run(machine, VARIANTS="naive", RANK="0", WORLD_SIZE="2", LOCAL_RANK="0")
    assert code == 1
    assert complaint[0] == (
        "profile_all: a launcher started this as rank 0 of 2, and it waits for the others: if none did, "
        "unset RANK WORLD_SIZE LOCAL_RANK"
    )


def test_rounds_that_cannot_be_read_are_told_once_and_before_the_captures(machine: Machine) -> None:  # noqa: F811
    """They were told by three programs, after minutes."""
    (machine.folder / "traces").mkdir()
    (machine.folder / "traces" / "turns.db").write_text("garbage")
    code, _, (complaint,) = run(machine, VARIANTS="naive flat")
    assert (code, machine.calls) == (1, [])
    assert "turns.db: not a results database (file is not a database): name another file" in complaint


def test_without_naive_nothing_is_trained_in_turns(machine: Machine) -> None:  # noqa: F811
    run(machine, VARIANTS="flat", TURNS_S="40")
    assert not any(call.startswith("turns") for call in machine.calls), "there is nothing to compare with"


@pytest.mark.parametrize("seconds", ["soon", "-1", "nan", "inf"])
def test_seconds_are_a_number(machine: Machine, seconds: str) -> None:  # noqa: F811
    code, _, complaint = run(machine, TURNS_S=seconds)
    assert (code, machine.runs) == (2, [])
    assert f"TURNS_S={seconds}: not a number of seconds" in complaint[0]


def test_a_failure_does_not_stop_the_others(machine: Machine) -> None:  # noqa: F811
    machine.workload('case "$*" in *"variant flat"*) echo "ddp_prof.train: error: too big" >&2; exit 1 ;; esac')
    code, said, complaint = run(machine, VARIANTS="naive flat\noverlap", REPORT="1")
    assert code == 1
    assert said[1] == "[2/3] flat ... failed"
    assert complaint[0].startswith("profile_all: flat: the workload failed (exit code 1): too big")
    assert complaint[1:] == ["profile_all: 2 of the steps above failed"]
    assert "seven pages" in said, "what the drawing said is shown where it failed"
    assert "THE TABLE" in said
    assert "flat.sqlite" not in machine.calls[-1]


def test_without_nsys_all_ranks_are_compared_and_the_reason_is_told_once(machine: Machine) -> None:  # noqa: F811
    (machine.folder / "programs/nsys").unlink()
    more = {"NSYS_SEARCH": "", "NSYS_FETCH": "0", "NSYS_PREFIX": str(machine.folder / "none")}
    code, _, complaint = run(machine, VARIANTS="naive flat", **more)
    assert code == 0
    assert complaint[1:] == ["profile_all: torch.profiler records, there is no nsys here: set NSYS=/path/to/nsys"]
    files = [f"{machine.folder}/traces/{name}.rank{rank}.json.gz" for name in ("naive", "flat") for rank in (0, 1)]
    assert machine.calls[-1] == " ".join(["ddp-prof compare", *files])


@pytest.mark.parametrize(
    ("settings", "code", "reason"),
    [
        ({"VARIANTS": " "}, 2, "VARIANTS or BUCKET_SIZES_MB names nothing to capture; there are naive flat"),
        ({"VARIANTS": "bucketed", "BUCKET_SIZES_MB": "\n"}, 2, "VARIANTS or BUCKET_SIZES_MB names nothing"),
        ({"VARIANTS": "naive *"}, 2, "invalid choice: '*'"),
        ({"TRACES_DIR": "/proc/mine"}, 1, "No such file or directory: set TRACES_DIR and FIGURES_DIR to"),
        ({"FIGURES_DIR": "/proc/mine"}, 1, "No such file or directory: set TRACES_DIR and FIGURES_DIR to"),
        ({"DEVICE": "tpu"}, 2, "--device: invalid choice: 'tpu'"),
    ],
)
def test_a_setting_that_no_capture_can_have_is_one_line(
    machine: Machine,  # noqa: F811
    settings: dict[str, str],
    code: int,
    reason: str,
) -> None:
    found, _, complaint = run(machine, **settings)
    assert (found, len(complaint)) == (code, 1)
    assert reason in complaint[0]
    assert machine.runs == []


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.nightly),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_ends_the_capture_in_one_line(machine: Machine, number: signal.Signals, code: int) -> None:  # noqa: F811
    """And a second one, as the end of a session sends, cuts nothing off."""
    process, workload = _started(machine)
    os.killpg(process.pid, number)
    wait_until(lambda: not is_running(process.pid) or ignores(process.pid, signal.SIGTERM))
    for each in (signal.SIGTERM, signal.SIGINT):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, each)
    _, complaint = process.communicate()
    assert process.returncode == code
    assert complaint == "\nprofile_all: stopped; what was captured before is kept, and the next run goes on\n"
    assert not is_running(workload)
    assert machine.traces == ["naive.nsys-rep", "naive.run.json", "naive.sqlite"]
    assert drawn(machine) == 0


def test_ctrl_c_while_it_imports_is_one_line(tmp_path: Path) -> None:
    """Half a second after the start 16 lines of a traceback were printed."""
    (tmp_path / "ddp_prof.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    command = [sys.executable, str(ROOT / "scripts/profile_all.py")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr == "\nprofile_all: stopped; what was captured before is kept, and the next run goes on\n"


def test_killed_it_takes_the_capture_with_it(machine: Machine) -> None:  # noqa: F811
    needs_namespace()
    marker = 600_000 + os.getpid()
    machine.workload(f"exec sleep {marker}")
    process = start(machine, ISOLATE="1")
    wait_until(lambda: is_sleeping(marker))
    process.kill()
    process.communicate()
    wait_until(lambda: not is_sleeping(marker))


def _started(machine: Machine) -> tuple[subprocess.Popen[str], int]:  # noqa: F811
    """It, in its second capture, and a process of that."""
    machine.workload('case "$*" in *"variant flat"*) echo $$ >"$FOLDER/pid"; while :; do sleep 0.1; done ;; esac')
    process = start(machine)
    pid = machine.folder / "pid"
    wait_until(lambda: pid.exists() and bool(pid.read_text().strip()))
    return process, int(pid.read_text())


def test_the_environment_is_made_first(checkout: Checkout) -> None:
    checkout.program("env.sh", 'echo "env $*" >>"$CALLS"', checkout.root / "scripts")
    checkout.program("python", 'echo "python $*" >>"$CALLS"; exit 7', checkout.root / ".venv/bin")
    assert checkout.run("profile_all.sh").returncode == 7
    assert checkout.calls == ["env train", "python scripts/profile_all.py"]


def test_a_closed_output_is_no_file(checkout: Checkout) -> None:
    """As of a daemon: ranks that train in turns failed, as there was nothing to write to."""
    checkout.program("env.sh", "", checkout.root / "scripts")
    checkout.program("python", 'readlink /proc/$$/fd/1 >>"$CALLS"', checkout.root / ".venv/bin")
    command = ["bash", "-c", 'exec bash "$0" >&-', str(checkout.root / "profile_all.sh")]
    subprocess.run(command, env=checkout.full_environment(), check=True)
    assert checkout.calls == ["/dev/null"]


def test_git_knows_nothing_of_what_it_makes(clone: Path) -> None:
    places = ["traces/local/overlap.sqlite", "figures/local/index.html"]
    ignored = subprocess.run(["git", "check-ignore", *places], cwd=clone, capture_output=True, text=True, check=True)
    assert ignored.stdout.split() == places
