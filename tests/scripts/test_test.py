"""scripts/test.sh: how many test processes there are on a small machine and in a container."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Checkout

GIB = 2**30


@pytest.fixture
def machine(checkout: Checkout) -> Checkout:
    """A machine on which nothing is to be set up, with stand-ins for the checks; its groups set no limit."""
    for name in ("ruff", "lint-imports", "mypy"):
        checkout.program(name, "exit 0", checkout.root / ".venv/bin")
    checkout.program("python", "exit 0", checkout.root / ".venv/bin")
    checkout.program(
        "pytest", 'while [ "$1" != -n ]; do shift; done; echo "$2" >>"$CALLS"', checkout.root / ".venv/bin"
    )
    checkout.program("env.sh", "exit 0", checkout.root / "scripts")
    checkout.program("awk", "echo 64000")
    checkout.program("nproc", "echo ${CORES:-4}")
    checkout.environment["CONTROL_GROUPS"] = str(checkout.root.parent / "groups")
    return checkout


@pytest.mark.parametrize(
    ("cores", "files", "processes"),
    [
        (4, {}, 4),
        (64, {}, 8),
        (64, {"cpu.max": "max 100000", "memory.max": "max"}, 8),
        (64, {"cpu.max": "150000 100000"}, 2),
        (2, {"cpu.max": "800000 100000"}, 2),
        (64, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        (64, {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        (64, {"memory.max": f"{4 * GIB}"}, 2),
        (64, {"memory/memory.limit_in_bytes": f"{GIB}"}, 1),
        (64, {"memory/memory.limit_in_bytes": f"{2**63 - 4096}"}, 8),
    ],
)
def test_as_many_processes_as_cores_and_memory_allow(
    cores: int, files: dict[str, str], processes: int, machine: Checkout
) -> None:
    for name, text in files.items():
        group = Path(machine.environment["CONTROL_GROUPS"], name)
        group.parent.mkdir(parents=True, exist_ok=True)
        group.write_text(f"{text}\n")
    done = machine.run("scripts/test.sh", "fast", CORES=str(cores))
    assert (done.returncode, machine.calls) == (0, [str(processes)]), done.stderr


@pytest.mark.parametrize(("mib", "processes"), [(900, 1), (3200, 2), (60_000, 5)])
def test_the_whole_gate_takes_no_more_memory_than_there_is(mib: int, processes: int, machine: Checkout) -> None:
    machine.program("awk", f"echo {mib}")
    for name in ("nsys", "python3"):
        machine.program(name, "exit 0")
    machine.program("node", "exit 0", machine.root / ".venv/bin")
    machine.program("tsc", "exit 0", machine.root / "node_modules/typescript/bin")
    machine.program("python", f"echo {machine.programs}/nsys", machine.root / ".venv/bin")
    done = machine.run("scripts/test.sh")
    assert (done.returncode, machine.calls) == (0, [str(processes)]), done.stderr
