"""Which GPUs a process sees, as nvidia-smi and CUDA_VISIBLE_DEVICES tell."""

from __future__ import annotations

import pytest

from ddp_prof.capture import job
from ddp_prof.capture.job import visible_gpus

DIVIDED = [
    "GPU 0: NVIDIA A100 (UUID: GPU-1)",
    "  MIG 3g.20gb     Device  0: (UUID: MIG-2)",
    "  MIG 3g.20gb     Device  1: (UUID: MIG-3)",
]


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, "ABCD"),
        ("0,1", "AB"),
        ("3,2", "DC"),
        ("00,01", "AB"),
        ("GPU-5ebe9f43,GPU-ad2367dd", "AA"),  # which ones only CUDA knows
        ("2", "C"),
        ("", ""),
        ("-1", ""),
        ("0,-1,1", "A"),  # what comes after one that is none does not count
        ("0,7", "A"),
        ("0,99999999999999999999", "A"),
        ("0,x[$(touch canary)]", "A"),
        ("0,08", "A"),
        ("MIG-2,MIG-3", "A"),  # a process sees one instance
    ],
)
def test_a_gpu_that_is_hidden_is_none(monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: str) -> None:
    monkeypatch.setattr(job, "_ask", lambda *question: [] if "-L" in question else list("ABCD"))
    assert visible_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == list(seen)


def test_a_divided_gpu_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_ask", lambda *question: DIVIDED if "-L" in question else ["A", "A"])
    assert visible_gpus({}) == ["A"]
