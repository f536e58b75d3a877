"""What records: the command line of nsys profile, by what a version can do, and the GPUs that a process sees.

And what keeps it from recording: a folder without locks, and a program into which ddp_prof cannot be loaded.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.capture import job, processes
from ddp_prof.capture.job import injection, profile_command, visible_gpus
from ddp_prof.capture.processes import scratch_folder
from ddp_prof.errors import WorkloadError
from ddp_prof.ingest.nsys_program import Nsys
from tests.night import of_which_the_gate_keeps

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
    program.write_text(f'#!/bin/sh\necho "$*" >>"{asked}"\ncat "{tmp_path}/help"\n', encoding="utf-8")
    program.chmod(0o755)
    nsys = Nsys(str(program), "2024.1.1.1")  # its number tells nothing
    for _ in range(2):
        command = profile_command(nsys, ["python"], Path("x/flat"), **PLAIN)
    assert ("--cuda-event-trace=true" in command) is has_it
    assert asked.read_text(encoding="utf-8").splitlines() == ["profile --help"], "asked once"


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


def test_a_folder_without_locks_is_told_with_the_reason_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(processes.fcntl, "flock", refuse)
    monkeypatch.setattr(processes.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    with pytest.raises(WorkloadError) as raised, scratch_folder():
        pass
    why = "a folder in /tmp cannot be locked (No locks available): /tmp must be on a file system with locks"
    assert str(raised.value).startswith(why)


def test_a_program_into_which_it_cannot_be_loaded_goes_on(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    environ = injection({"PYTHONPATH": str(tmp_path)}) | {"DDP_PROF_PACKAGE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(7)"], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == "7\n"
    (said,) = done.stderr.splitlines()
    assert said.startswith("ddp-prof could not be loaded into this program, so it sees none of its steps: FileNotFound")


@pytest.mark.parametrize(("module", "variables"), [("unattended", {}), ("trial", {"DDP_PROF_TRIAL": "{}"})])
def test_a_program_that_first_asks_whether_there_is_a_torch_is_marked_once(
    tmp_path: Path, module: str, variables: dict[str, str]
) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "annotate").mkdir()
    for name in ("__init__.py", "annotate/__init__.py"):
        (tmp_path / name).touch()
    (tmp_path / "annotate" / f"{module}.py").write_text("def start(): print('marked')", encoding="utf-8")
    environ = injection({"PYTHONPATH": str(tmp_path)}) | variables | {"DDP_PROF_PACKAGE": str(tmp_path)}
    program = "from importlib import reload, util; print(util.find_spec('torch').name); import torch; reload(torch)"
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("torch\nmarked\n", "")


TRY = json.dumps({"is_recorded": False, "folder": ".", "warmup": 1, "steps": 1, "ddp": {}, "fsdp": {}})


MARKING = {"unattended": {}, "trial": {"DDP_PROF_TRIAL": TRY}}


@pytest.mark.parametrize(
    ("first", "module"),
    of_which_the_gate_keeps(
        [("annotate.Monitor", "unattended"), ("annotate.instrument()", "trial")],  # each imports torch for seconds
        product(["annotate.Monitor", "annotate.instrument()"], MARKING),
    ),
)
def test_a_program_that_uses_ddp_prof_before_it_imports_torch_is_marked(first: str, module: str) -> None:
    environ = os.environ | injection(os.environ) | MARKING[module]
    program = f"import sys; from ddp_prof import annotate; {first}; print('ddp_prof.annotate.{module}' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


# Takes a terminal and asks itself to end, as Ctrl-C does; prints what it sends to the program.
ON_TERMINAL = """
import fcntl, os, signal, subprocess, sys, termios
from pathlib import Path
from ddp_prof.capture import processes
fcntl.ioctl(2, termios.TIOCSCTTY, 0)
with subprocess.Popen(["sleep", "60"]) as program:
    sent, kill = [], os.kill
    os.kill = lambda _, number: sent.append(signal.Signals(number).name)
    with processes._forward_signals(program, Path(sys.argv[1]), []):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    kill(program.pid, signal.SIGKILL)
print(*sent)
"""


def test_ctrl_c_reaches_the_program_once_though_stdin_is_no_terminal(tmp_path: Path) -> None:
    own, terminal = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", ON_TERMINAL, tmp_path],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=terminal, start_new_session=True, text=True,
        )  # fmt: skip
    finally:
        os.close(own)
        os.close(terminal)
    assert done.stdout == "SIGTERM\n", "a Ctrl-C comes from the terminal"
