"""scripts/dev/check_variants.py: a real run on CPU ranks, and what it says of a variant that differs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/dev/check_variants.py"
# As the script, with a variant that adds a little to each gradient after the ranks have agreed. It stands for fsdp,
# which has the fewest cases.
SABOTAGED = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "scripts/dev")!r}]
import check_variants
from ddp_prof.ddp import VARIANTS

class Wrong(VARIANTS["naive"]):
    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(1e-3)

VARIANTS["fsdp"] = Wrong
sys.exit(check_variants.main())
"""
pytestmark = pytest.mark.torch


def check(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, check=False)


def test_a_variant_equals_one_process() -> None:
    done = check(str(SCRIPT), "--variants", "fsdp")
    assert done.returncode == 0, done.stderr
    where, line = done.stdout.splitlines()
    assert where == "2 ranks, gloo, device: cpu"
    agreeing, total = line.removeprefix("fsdp: ").split(" runs")[0].split(" of ")
    assert agreeing == total
    assert int(total) > 10


def test_one_that_does_not_is_named_with_its_cases(tmp_path: Path) -> None:
    script = tmp_path / "sabotaged.py"
    script.write_text(SABOTAGED)
    done = check(str(script), "--variants", "fsdp")
    assert done.returncode == 1
    assert "fsdp: 0 of " in done.stdout
    assert "  differs by " in done.stdout
    assert ": blocks, adamw\n" in done.stdout
    assert done.stderr == "sabotaged: error: a variant differs from one process\n"


def test_without_a_gpu_it_says_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = check(str(SCRIPT), "--device", "cuda", "--variants", "naive")
    assert done.returncode == 1
    assert "torch finds no GPU here" in done.stderr
