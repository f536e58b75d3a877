"""scripts/run_comparison.sh with stand-ins for what it calls: what is passed on, what follows a failure, signals."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.scripts.conftest import ROOT, Checkout
from tests.waiting import is_running, wait_until

SCRIPT = "scripts/run_comparison.sh"
# The script itself is run by a real Python, which takes this one for its own.
REAL = (
    "import runpy, sys; sys.executable = sys.argv.pop(1); del sys.argv[0]; runpy.run_path(sys.argv[0], {}, '__main__')"
)
PYTHON = f"""
[ "$1" = -m ] || PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} -c {shlex.quote(REAL)} "$0" "$@"
echo "python $*" >>"$CALLS"
[ -z "${{SLOW:-}}" ] || {{ echo $$ >"$CALLS.pid"; exec sleep 3600; }}
[ -n "${{NO_DATABASE:-}}" ] || {{ mkdir -p "$(dirname "$4")" && echo data >"$4"; }}
exit "${{BENCH:-0}}"
"""


@pytest.fixture
def machine(checkout: Checkout) -> Checkout:
    """All is set up."""
    checkout.program("env.sh", 'echo "env $*" >>"$CALLS"', checkout.root / "scripts")
    checkout.program("python", PYTHON, checkout.root / ".venv/bin")
    results = 'echo "ddp-prof $*" >>"$CALLS"; echo "THE TABLE"; exit "${RESULTS:-0}"'
    checkout.program("ddp-prof", results, checkout.root / ".venv/bin")
    return checkout


def test_sweep_and_results(machine: Checkout) -> None:
    done = machine.run(SCRIPT, "--seq-len", "128", "256")
    assert done.returncode == 0, done.stderr
    database = f"{machine.root}/traces/local/results.db"
    assert machine.calls == [
        "env train",
        f"python -m ddp_prof.benchmark.sweep --database {database} --seq-len 128 256",
        f"ddp-prof results {database} -o {machine.root}/figures/local",
    ]
    assert done.stdout == "THE TABLE\n"


def test_knobs(machine: Checkout) -> None:
    machine.run(SCRIPT, "--repeats", "2", "--database", "other/r.db", FIGURES_DIR="pictures")
    assert machine.calls[-2:] == [
        "python -m ddp_prof.benchmark.sweep --database other/r.db --repeats 2",
        "ddp-prof results other/r.db -o pictures",
    ]


@pytest.mark.parametrize(
    ("variables", "code", "has_results"),
    [
        ({"BENCH": "1"}, 1, True),  # a run failed: the others are shown
        ({"BENCH": "1", "NO_DATABASE": "1"}, 1, False),
        ({"BENCH": "2"}, 2, False),
        ({"BENCH": "130"}, 130, False),
        ({"RESULTS": "1"}, 1, True),
    ],
)
def test_failures(machine: Checkout, variables: dict[str, str], code: int, has_results: bool) -> None:
    done = machine.run(SCRIPT, **variables)
    assert done.returncode == code
    assert any(call.startswith("ddp-prof results") for call in machine.calls) == has_results


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_reaches_the_sweep(machine: Checkout, number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(["bash", str(machine.root / SCRIPT)], env=machine.full_environment(SLOW="1"))
    pid_file = machine.calls_file.with_name("calls.pid")
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text().strip())
        sweep = int(pid_file.read_text())
        process.send_signal(number)
        assert process.wait() == code
        wait_until(lambda: not is_running(sweep))  # where the signal came as it was started, the system ends it
    finally:
        process.kill()
        process.wait()
        with suppress(FileNotFoundError, ValueError, ProcessLookupError):
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert not any("results" in call and call.startswith("ddp-prof") for call in machine.calls)
