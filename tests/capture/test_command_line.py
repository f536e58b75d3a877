"""The command line of nsys profile, by what a version can do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddp_prof.capture.command_line import Recording, profile_command
from ddp_prof.ingest.nsys.program import Nsys

ALWAYS = ["--sample=none", "--cpuctxsw=none", "--stats=false", "--force-overwrite=true", "--output=x/flat"]
CPU = Recording(Path("x/flat"), traces_cuda=False, capture_range="cudaProfilerApi", samples_gpus=True)
CUDA = replace(CPU, traces_cuda=True)
OLD: set[str] = set()
NEW = {"--cuda-graph-trace", "--capture-range-end", "--gpu-metrics-devices"}


class Version(Nsys):
    """An nsys that knows some options."""

    def __init__(self, options: set[str]) -> None:
        super().__init__("/opt/nsys", "2024.1.1.1")
        object.__setattr__(self, "options", options)

    def supports(self, command: str, option: str) -> bool:
        return command == "profile" and option in self.__dict__["options"]


@pytest.mark.parametrize(
    ("options", "recording", "flags"),
    [
        (NEW, CPU, ["--trace=nvtx"]),
        (
            NEW,
            replace(CPU, flags=("--nvtx-domain-include=ddp_prof",)),
            ["--trace=nvtx", "--nvtx-domain-include=ddp_prof"],
        ),
        (
            NEW,
            CUDA,
            [
                *("--trace=cuda,nvtx", "--cuda-graph-trace=node"),
                *("--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--gpu-metrics-devices=all"),
            ],
        ),
        (
            OLD,
            CUDA,
            [
                *("--trace=cuda,nvtx", "--capture-range=cudaProfilerApi", "--stop-on-range-end=true"),
                "--gpu-metrics-device=all",
            ],
        ),
        (NEW, replace(CUDA, capture_range=None, samples_gpus=False), ["--trace=cuda,nvtx", "--cuda-graph-trace=node"]),
    ],
)
def test_flags(options: set[str], recording: Recording, flags: list[str]) -> None:
    command = profile_command(Version(options), recording, ["python", "-m", "x"])
    assert command == ["/opt/nsys", "profile", *ALWAYS, *flags, "python", "-m", "x"]
