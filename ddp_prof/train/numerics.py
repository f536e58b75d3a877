"""Numerics and memory: options that change how much is computed and kept, and so how much communication can overlap."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from ddp_prof.errors import WorkloadError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ddp_prof.run_config import RunConfig
    from ddp_prof.train.model import TransformerLM


def check_numerics(config: RunConfig, device: torch.device) -> None:
    """Refuse what the device or the machine cannot do.

    Raises:
        WorkloadError: TF32 without a GPU of that kind, or nothing to compile with.
    """
    if config.tf32 and device.type == "cpu":
        raise WorkloadError("--tf32: only GPUs compute in TF32, and this run is on the CPU: leave it out")
    compilers = [os.environ.get("CXX"), os.environ.get("CC"), "g++", "clang++", "gcc", "clang"]
    if config.compile and not any(shutil.which(compiler) for compiler in compilers if compiler):
        raise WorkloadError("--compile: torch.compile needs a C++ compiler: install g++, or say where one is with CXX")


def set_numerics(model: TransformerLM, config: RunConfig) -> None:
    """Set what holds for the whole process, and mark what is to be compiled, which its first call does."""
    if config.tf32:
        torch.set_float32_matmul_precision("high")
    parts: dict[str | None, list[torch.nn.Module]] = {"blocks": [*model.blocks.children()], "model": [model]}
    for part in parts.get(config.compile, []):
        part.compile()


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Where forward and loss are computed in ``precision``; weights and gradients stay float32."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
