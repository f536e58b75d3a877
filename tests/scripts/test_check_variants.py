"""scripts/dev/check_variants.py: a real run on CPU ranks, and what it says of a variant that differs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.errors import WorkloadError
from ddp_prof.train.launch import launch
from tests.ddp.gloo_ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/dev/check_variants.py"
pytestmark = pytest.mark.torch


def sabotaged(rank: int) -> Any:
    """What a rank finds where a variant adds a little to each gradient after the ranks have agreed.

    It stands for fsdp, which has the fewest cases.
    """
    import check_variants
    import torch

    from ddp_prof.ddp import VARIANTS
    from ddp_prof.train.process_group import RankInfo

    class Wrong(VARIANTS["naive"]):
        def finish_gradient_synchronization(self) -> None:
            super().finish_gradient_synchronization()
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.add_(1e-3)

    VARIANTS["fsdp"] = Wrong
    arguments = check_variants.parse(["--variants", "fsdp"])
    return check_variants.check_all(arguments, RankInfo(rank, 2, rank, 2), torch.device("cpu"))


@pytest.fixture
def check_variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, whose ranks are forked, which need not import torch, and write into ``log``."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))

    def launch_forked(world: int, argv: list[str]) -> None:
        launch(world, ["-m", "check_variants", *argv[1:]], tmp_path / "log", forked=True)

    monkeypatch.setattr("script_ranks.launch", launch_forked)
    return importlib.import_module("check_variants")


def test_a_variant_equals_one_process(check_variants: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--variants", "fsdp"])
    assert check_variants.main() == 0
    where, line = (tmp_path / "log").read_text().splitlines()
    assert where == "2 ranks, gloo, device: cpu"
    agreeing, total = line.removeprefix("fsdp: ").split(" runs")[0].split(" of ")
    assert agreeing == total
    assert int(total) > 10


def test_one_that_does_not_is_named_with_its_cases(check_variants: Any, capsys: pytest.CaptureFixture[str]) -> None:
    findings, _ = run_ranks(sabotaged)
    with pytest.raises(WorkloadError, match="a variant differs from one process"):
        check_variants.report(findings)
    said = capsys.readouterr().out
    assert "fsdp: 0 of " in said
    assert "  differs by " in said
    assert ": blocks, adamw\n" in said


def test_without_a_gpu_it_says_so(
    check_variants: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cuda", "--variants", "naive"])
    assert check_variants.main() == 1
    assert "torch finds no GPU here" in capsys.readouterr().err
