"""scripts/profile_variant.sh and slurm_profile.sbatch: what they hand on; tests/capture has what comes of it."""

from __future__ import annotations

import subprocess

import pytest

from tests.scripts.conftest import Checkout

SCRIPT = "scripts/profile_variant.sh"
TOLD = "SLURM_PROCID SLURM_JOB_ID MASTER_ADDR"
PYTHON = f"""
echo "$*" >>"$CALLS"
echo "$VENV|$TRACES_DIR" >>"$CALLS"
for name in {TOLD}; do echo "$name=${{!name}}"; done | tr '\\n' ' ' >>"$CALLS"
echo >>"$CALLS"
exit 7
"""
SRUN = """
echo "srun $1 $2" >>"$CALLS"
shift
for SLURM_PROCID in 1 0; do
  export SLURM_PROCID
  "$@" || true
done
"""


@pytest.fixture
def machine(checkout: Checkout) -> Checkout:
    """An environment whose Python writes down what it is asked."""
    checkout.program("python", PYTHON, checkout.root / ".venv/bin")
    return checkout


def test_arguments_and_places_are_handed_on(machine: Checkout) -> None:
    done = machine.run(SCRIPT, "bucketed", "--bucket-size-mb", "2 5", "--", "--seed", "3")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    venv, traces = machine.root / ".venv", machine.root / "traces/local"
    assert machine.calls[:2] == ["-m ddp_prof.capture bucketed --bucket-size-mb 2 5 -- --seed 3", f"{venv}|{traces}"]
    machine.run(SCRIPT, "flat", TRACES_DIR="mine")
    assert machine.calls[-2] == f"{venv}|mine"


def test_without_an_environment_it_says_what_to_run(machine: Checkout) -> None:
    (machine.root / ".venv/bin/python").unlink()
    done = machine.run(SCRIPT, "overlap")
    assert done.returncode == 1
    assert done.stderr == f"profile_variant: there is no {machine.root}/.venv/bin/python: run scripts/env.sh first\n"


def test_a_slurm_job_profiles_each_task_behind_the_launcher(machine: Checkout) -> None:
    machine.program("scontrol", "printf 'node3\\nnode4\\n'")
    machine.program("srun", SRUN)
    job = {"SLURM_SUBMIT_DIR": str(machine.root), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[3-4]"}
    done = subprocess.run(
        ["bash", str(machine.root / "scripts/slurm_profile.sbatch"), "bucketed", "--bucket-size-mb", "25"],
        env=machine.full_environment(**job),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.calls[0] == "srun --kill-on-bad-exit=1 scripts/profile_variant.sh"
    assert machine.calls[1] == "-m ddp_prof.capture bucketed --bucket-size-mb 25"
    common = "SLURM_JOB_ID=7 MASTER_ADDR=node3 "
    assert machine.calls[3::3] == [f"SLURM_PROCID={rank} {common}" for rank in (1, 0)]
