"""A machine on which programs can be recorded: stand-ins for nsys, nvidia-smi and the Python that runs the workload."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_prof.capture.__main__ import main
from ddp_prof.capture.processes import process_namespace
from ddp_prof.manifest import write_manifest
from tests.nsys_factory import Capture, Kernel, Range, write_capture
from tests.scripts.conftest import SYSTEM_PATH
from tests.test_manifest import MANIFEST

# Writes down how it was called and its environment, and writes what it should; $FOLDER/workload comes in between.
PYTHON = f"""
[ "$2" != ddp_prof.capture ] || exec {shlex.quote(sys.executable)} "$@"
env >"$FOLDER/workload.env"
echo "workload $*" >>"$FOLDER/calls"
[ ! -e "$FOLDER/workload" ] || . "$FOLDER/workload"
while [ $# -gt 0 ]; do
  case "$1" in
    --run-json) out="$2" ;;
    --key) key="$2" ;;
    --kineto) for rank in 0 1; do cp "$FOLDER/rank$rank.json.gz" "${{2/.json.gz/.rank$rank.json.gz}}"; done ;;
  esac
  shift
done
sed 's/"key": .*,/"key": "'"$key"'",/' "$FOLDER/run.json" >"$out"
"""
# Runs what follows its flags; what its report is exported to lies in $FOLDER.
NSYS = """
echo "nsys $*" >>"$FOLDER/calls"
case "$*" in
  --version) echo "NVIDIA Nsight Systems version 2022.4.2.1-abc" ;;
  "profile --help") printf -- '--capture-range-end=\\n--cuda-graph-trace=\\n' ;;
  "export --help") ;;
  profile*)
    shift
    while [[ "$1" == -* ]]; do [[ "$1" != --output=* ]] || output="${1#--output=}"; shift; done
    "$@" || exit
    echo report >"$output.${SUFFIX:-nsys-rep}" ;;
  export*) cp "$FOLDER/export.sqlite" "$5" ;;
esac
"""


def exported(path: Path, ranks: dict[int, int], *, lost_kernels: int | None = None, world: int = 2) -> None:
    """An export with ranges of ours: of each rank so many steps, and kernels but for one."""
    capture = Capture()
    for rank, steps in ranks.items():
        process = 100 + rank
        capture.ranges.append(Range(f"process|rank={rank}|world={world}", 0, 1000, process, process, "ddp_prof"))
        for step in range(steps):
            at = 100 * step + 10
            capture.ranges.append(Range(f"step|index={step}", at, at + 90, process, process, "ddp_prof"))
        if rank != lost_kernels:
            # One in each step: a step without any counts as lost where others have some.
            for at in range(0, 100 * max(steps, 1), 100):
                capture.kernels.append(Kernel("gemm", at + 20, at + 30, at + 15, process, process))
    path.unlink(missing_ok=True)
    write_capture(path, capture)


def written_by_torch(path: Path, rank: int, collectives: int = 0) -> None:
    """A trace of torch.profiler with our ranges: one step of one rank of two."""
    ranges = {f"process|rank={rank}|world=2": (0, 100), "step|index=0": (10, 80)}
    ranges |= {f"all_reduce|bucket={bucket}|bytes=8|params=1": (20 + bucket, 1) for bucket in range(collectives)}
    rows = [
        {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": duration, "pid": 7 + rank, "tid": 1}
        for name, (start, duration) in ranges.items()
    ]
    trace = {"distributedInfo": {"backend": "gloo", "rank": rank, "world_size": 2}, "traceEvents": rows}
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))


def is_sleeping(seconds: int) -> bool:
    command = f"sleep\0{seconds}\0".encode()
    return any(_read(path) == command for path in Path("/proc").glob("[0-9]*/cmdline"))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


def needs_namespace() -> None:
    """Skip the rest of a test where no process namespace can be made, as in a container without rights."""
    if not process_namespace():
        pytest.skip("no process namespace can be made here")


@dataclass
class Machine:
    """``folder`` holds all that is its own; ``root`` is a checkout with an environment."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    capfd: pytest.CaptureFixture[str]

    def program(self, name: str, body: str, folder: Path | None = None) -> Path:
        """Put a shell script on the PATH, or into ``folder``; ``$FOLDER`` is that of the machine."""
        target = (folder or self.folder / "programs") / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"#!/bin/bash\nFOLDER={shlex.quote(str(self.folder))}\n{body}\n")
        target.chmod(0o755)
        return target

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.folder}/programs:{SYSTEM_PATH}",
            "HOME": str(self.folder / "home"),
            "VENV": str(self.folder / "venv"),
            "TRACES_DIR": str(self.folder / "traces"),
            "ISOLATE": "0",
        }

    def capture(self, *arguments: str, **settings: str) -> tuple[int, str, str]:
        """The exit code, and what was said on stdout and stderr."""
        for name in list(os.environ):
            self.monkeypatch.delenv(name)
        for name, value in {**self.environment, **settings}.items():
            self.monkeypatch.setenv(name, value)
        self.monkeypatch.setattr(sys, "argv", ["capture", *arguments])
        try:
            code = main()
        except SystemExit as end:
            code = int(end.code or 0)
        said = self.capfd.readouterr()
        return code, said.out, said.err

    def done(self, *arguments: str, **settings: str) -> str:
        """What came of a capture that succeeds without a word on stderr."""
        code, said, complaint = self.capture(*arguments, **settings)
        assert (code, complaint) == (0, ""), complaint
        return said

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def runs(self) -> list[str]:
        return [call for call in self.calls if call.startswith("workload")]

    @property
    def traces(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "traces").iterdir())

    def workload(self, body: str) -> None:
        """What the workload does before it writes its results; ``$FOLDER`` is the machine's."""
        (self.folder / "workload").write_text(body)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Machine:
    """A CPU machine with an environment and an nsys, whose exports hold two ranks of one step."""
    made = Machine(tmp_path / "a machine", monkeypatch, capfd)  # a blank in the path, as some have
    (made.folder / "home").mkdir(parents=True)
    made.program("python", PYTHON, made.folder / "venv/bin")
    made.program("nsys", NSYS)
    made.program("nvidia-smi", "exit 9")
    exported(made.folder / "export.sqlite", {0: 1, 1: 1})
    for rank in (0, 1):
        written_by_torch(made.folder / f"rank{rank}.json.gz", rank)
    write_manifest(MANIFEST, made.folder / "run.json")
    return made
