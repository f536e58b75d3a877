"""The command line of nsys profile, by what a version can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_prof.capture.job import profile_command
from ddp_prof.ingest.nsys_program import Nsys

ALWAYS = ["--sample=none", "--cpuctxsw=none", "--stats=false", "--force-overwrite=true", "--output=x/flat"]
CPU: dict[str, Any] = {"traces_cuda": False, "capture_range": "cudaProfilerApi", "samples_gpus": True}
CUDA = CPU | {"traces_cuda": True}
OLD: set[str] = set()
PLAIN = {"traces_cuda": True}
EVENTS = {"--cuda-event-trace"}
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
            CPU | {"further": ("--nvtx-domain-include=ddp_prof",)},
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
        (NEW, PLAIN, ["--trace=cuda,nvtx", "--cuda-graph-trace=node"]),
        (EVENTS, PLAIN, ["--trace=cuda,nvtx", "--cuda-event-trace=true"]),
        (EVENTS, CPU, ["--trace=nvtx"]),
        (
            EVENTS,
            PLAIN | {"further": ("--cuda-event-trace=false",)},
            ["--trace=cuda,nvtx", "--cuda-event-trace=false"],
        ),
    ],
)
def test_flags(options: set[str], recording: dict[str, Any], flags: list[str]) -> None:
    command = profile_command(Version(options), ["python", "-m", "x"], Path("x/flat"), **recording)
    assert command == ["/opt/nsys", "profile", *ALWAYS, *flags, "python", "-m", "x"]


# As releases of 2025 and of 2022 print them.
HELP_2025 = """    --cuda-event-trace=

       Possible values are 'true' or 'false'.
       Trace CUDA Event completion on the device side.
       Default is 'false'.
"""
HELP_2022 = """    --cuda-graph-trace=

       If 'graph' is selected, CUDA graphs will be traced as a whole.
"""


@pytest.mark.parametrize(("text", "has_it"), [(HELP_2025, True), (HELP_2022, False)])
def test_event_records_are_asked_for_where_the_help_names_them(tmp_path: Path, text: str, has_it: bool) -> None:
    asked = tmp_path / "asked"
    program = tmp_path / "nsys"
    (tmp_path / "help").write_text(text, encoding="utf-8")
    program.write_text(f'#!/bin/sh\necho "$*" >>{asked}\ncat {tmp_path}/help\n', encoding="utf-8")
    program.chmod(0o755)
    nsys = Nsys(str(program), "2024.1.1.1")  # its number tells nothing
    for _ in range(2):
        command = profile_command(nsys, ["python"], Path("x/flat"), **PLAIN)
    assert ("--cuda-event-trace=true" in command) is has_it
    assert asked.read_text(encoding="utf-8").splitlines() == ["profile --help"], "asked once"
