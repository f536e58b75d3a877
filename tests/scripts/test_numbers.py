"""Numbers from outside: no script calculates with what is none: bash would run the command in ``x[$(command)]``.

Those of scripts/profile_variant.sh are in tests/capture/test_plan.py.
"""

from __future__ import annotations

import subprocess

import pytest

from tests.scripts.conftest import Checkout

# A script with its arguments, the setting, and what must be set beside it for the setting to be read.
SETTINGS = [
    *((("scripts/dev/nsys_screenshot.sh",), name, {}) for name in ("WIDTH", "HEIGHT", "TIMEOUT")),
]
NO_NUMBERS = ["root[$(touch canary)]", "2x", "-1", "1e3", "2.5", "0x10", "08", " 2", "2\n3", "٣", "9" * 30]


@pytest.fixture
def machine(checkout: Checkout) -> Checkout:
    """Two GPUs, so that all settings are read, and a Python that is not to be started."""
    checkout.program("nvidia-smi", "printf 'NVIDIA H100\\nNVIDIA H100\\n'")
    checkout.program("python", 'echo "python $*" >>"$CALLS"', checkout.root / ".venv/bin")
    checkout.environment |= {"TRACES_DIR": str(checkout.root / "traces"), "PROFILER": "none"}
    return checkout


@pytest.mark.parametrize(("command", "name", "beside"), SETTINGS)
def test_what_is_no_number_is_refused_in_one_line(
    machine: Checkout, command: tuple[str, ...], name: str, beside: dict[str, str]
) -> None:
    beside = {key: text.replace(".", str(machine.root)) for key, text in beside.items()}
    for value in NO_NUMBERS:
        _assert_refused(machine, machine.run(*command, **{**beside, name: value}), name)


def _assert_refused(machine: Checkout, done: subprocess.CompletedProcess[str], name: str) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{name}=" in done.stderr
    assert "no whole number from" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not any(call.startswith("python") for call in machine.calls), "nothing begins"
    assert not list(machine.root.parent.rglob("canary")), "a command in the setting has run"
