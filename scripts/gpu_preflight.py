"""Prints what this machine has for captures on GPUs, one line each, and how to get what is missing.

    python3 scripts/gpu_preflight.py --python .venv/bin/python --out gpu_capture

Needs only Python. To find a recorder that records CUDA here, it records a run of the smallest model on two ranks; the
capture must be complete, with kernels of both. It tries each nsys (if the capture range loses data, also without one),
then torch.profiler. Their output goes to OUT/preflight.log, and the settings for scripts/profile_variant.sh of the
first one that records go to OUT/recorder.

Exit: 0, or 1 if something that is needed for a capture is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from glob import glob
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from ddp_prof.ingest import nsys_program as program  # noqa: E402  # needs nothing but Python

NSIGHT_COMPUTE = (
    "/opt/nvidia/nsight-compute*/*/host/target-linux-*/nsys:/usr/local/cuda*/nsight-compute*/host/target-linux-*/nsys"
)
"""Where Nsight Compute installs an nsys; it records, but usually lacks the importer, which makes the report."""

INSTALL_NSYS = ("bash", str(ROOT / "scripts/install_nsys.sh"))

PROBE = {"MODEL_SIZE": "tiny", "SEQ_LEN": "16", "BATCH_SIZE": "2", "STEPS": "1", "WARMUP": "1", "DEVICE": "cuda"}
PROBE |= {"NGPU": "2", "RANKS_PER_GPU": "2", "BACKEND": "gloo", "FORCE": "1"}
"""Two ranks, because a recorder may lose one of them; with gloo they can share any GPU."""
PROBE_LIMIT_S = 120
"""Time limit of the recorded run, without set-up, report and export."""
HANG_LIMIT_S = 600
"""Time limit of the whole attempt."""
WHOLE_RUN = "CAPTURE_RANGE=none"
"""The setting that scripts/profile_variant.sh advises if ranks or kernels are missing in a capture."""
TORCH_LIMIT_S = 300
"""Long, because gigabytes of libraries are read for the first time."""
DOWNLOAD = "nsys by download"
DOWNLOAD_LIMIT_S = 600
"""A network may drop all packets. Longer than a slice of scripts/capture_gpu.sh, so the download is tried only once."""
ASK_TORCH = """
import torch, torch.distributed as dist
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda and dist.is_nccl_available() else ""
print(torch.__version__, torch.version.cuda or "none", torch.cuda.device_count(), nccl or "none", sep="|")
"""


class Finding(NamedTuple):
    """One line of the table.

    Attributes:
        hint: How to get it; empty if it is there.
        is_needed: Whether no capture is possible without it.
    """

    name: str
    found: str
    hint: str = ""
    is_needed: bool = True

    def __str__(self) -> str:
        state = "missing" if self.hint else "ok"
        return f"{self.name:9} {state:8} {self.found}{': ' if self.hint else ''}{self.hint}"


class Recorder(NamedTuple):
    """A candidate that may record CUDA, and its settings for scripts/profile_variant.sh."""

    name: str
    settings: Mapping[str, str]


def ask(command: Sequence[str], limit_s: float = 60) -> tuple[bool, str]:
    """Run a command; return whether it succeeded, and its stdout or, after a failure, all its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    output = done.stdout if done.returncode == 0 else done.stdout + done.stderr
    return done.returncode == 0, output.strip()


def find_gpus() -> Finding:
    ok, output = ask(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    lines = output.splitlines() if ok else []
    if not lines:
        return Finding("GPU", "nvidia-smi finds none", "run this on a machine with an NVIDIA GPU and its driver")
    names = sorted({line.rpartition(",")[0] for line in lines})
    driver = lines[0].rpartition(",")[2].strip()
    return Finding("GPU", f"{len(lines)} x {', '.join(names)}, driver {driver}")


def find_torch(python: Path) -> tuple[Finding, Finding]:
    ok, output = ask([str(python), "-c", ASK_TORCH], TORCH_LIMIT_S)
    if not ok:
        reason = output.splitlines()[-1] if output else "it does not start"
        hint = "scripts/env.sh train makes the environment, offline with WHEELS=FOLDER"
        return (
            Finding("torch", f"{python} has none ({reason})", hint),
            Finding("NCCL", "not known without torch", "see torch", is_needed=False),
        )
    version, cuda, gpus, nccl = output.splitlines()[-1].split("|")
    if cuda == "none":
        torch = Finding("torch", f"{version} is built without CUDA", "install a CUDA build of torch")
    elif gpus == "0":
        torch = Finding(
            "torch",
            f"{version} for CUDA {cuda} sees no GPU",
            "install a build for this driver, see CUDA_VISIBLE_DEVICES",
        )
    else:
        torch = Finding("torch", f"{version} for CUDA {cuda} sees {gpus} GPU{'s' * (gpus != '1')}")
    if nccl == "none":
        return torch, Finding(
            "NCCL", "not in this torch", "capture gloo alone, or install another build", is_needed=False
        )
    return torch, Finding("NCCL", nccl, is_needed=False)


def list_nsys() -> list[str]:
    return [nsys.path for nsys in program.list_nsys()]


def find_recorders(environment: Mapping[str, str], log: Path, tried: FailedAttempts) -> Iterator[Recorder | Finding]:
    """Yield what may record CUDA here, in the order in which to try it: torch.profiler last, before it a download."""
    if own := environment.get("NSYS"):
        yield _nsys(own)
    else:
        found = list_nsys()
        yield from map(_nsys, found)
        for pattern in environment.get("NSIGHT_COMPUTE_SEARCH", NSIGHT_COMPUTE).split(os.pathsep):
            yield from map(_nsys, sorted(glob(pattern), reverse=True))  # noqa: PTH207  # the patterns are absolute
        if not found:
            reason = tried.reason(DOWNLOAD) or tried.attempt(DOWNLOAD, lambda: download(log))
            if reason:
                yield Finding("recorder", DOWNLOAD, reason, is_needed=False)
            yield from map(_nsys, list_nsys())
    yield Recorder("torch.profiler", {"PROFILER": "kineto"})


def download(log: Path) -> str:
    """Download an nsys; return the reason of a failure, else an empty text."""
    ok, output = ask(INSTALL_NSYS, DOWNLOAD_LIMIT_S)
    _write(log, f"scripts/install_nsys.sh: exit code {int(not ok)}", output)
    return "" if ok else (output.splitlines() or ["it printed nothing"])[-1]


def _nsys(path: str) -> Recorder:
    return Recorder(f"nsys {path}", {"PROFILER": "nsys", "NSYS": path})


def _write(log: Path, heading: str, text: str) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(f"== {heading}\n{text}\n")


def try_recorder(recorder: Recorder, log: Path) -> str:
    """Record a small run; return why it is not complete, for example without kernels, or an empty text if it is."""
    with tempfile.TemporaryDirectory(prefix="ddp_prof.probe.") as folder:
        environment = {**os.environ, **PROBE, **recorder.settings, "TRACES_DIR": folder, "VERBOSE": "1"}
        environment["LIMIT_S"] = str(PROBE_LIMIT_S)
        command = ["bash", str(ROOT / "scripts/profile_variant.sh"), "naive"]
        code, output = run_for(command, environment, HANG_LIMIT_S)
    _write(log, f"{recorder.name}: exit code {code}", output)
    if code == 0:
        return ""
    ours = [line for line in output.splitlines() if line.startswith("profile_variant: error: naive: ")]
    last = (ours or output.splitlines() or ["it printed nothing"])[-1]
    return last.removeprefix("profile_variant: error: naive: ")[:300]


class FailedAttempts:
    """Failed attempts and their reasons, kept in a file: an interrupted preflight continues with the next attempt.

    Attributes:
        path: A JSON file; during an attempt it says that the attempt was interrupted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reasons: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def reason(self, name: str) -> str:
        """Return why it failed; empty if it was not tried, or did not fail."""
        return self._reasons.get(name, "")

    def attempt(self, name: str, attempt: Callable[[], str]) -> str:
        """Try it; save and return the reason of a failure."""
        self._save_reason(name, "it was interrupted")
        reason = attempt()
        self._save_reason(name, reason)
        return reason

    def _save_reason(self, name: str, reason: str) -> None:
        self._reasons[name] = reason
        self.path.write_text(json.dumps(self._reasons), encoding="utf-8")


def run_for(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> tuple[int, str]:
    """Run a script and return its exit code and output; after ``limit_s`` seconds it is terminated."""
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # the script then ends its own processes
            output = f"{process.communicate()[0]}not done after {limit_s:g} s\n"
    return process.returncode, output


def find_recorder(log: Path, chosen: Path) -> Iterator[Finding]:
    """Try recorders until one records CUDA, and write its settings to ``chosen``; yield a line for each."""
    tried = FailedAttempts(chosen.with_name(f"{chosen.name}.tried"))
    for recorder in find_recorders(os.environ, log, tried):
        if isinstance(recorder, Finding):
            yield recorder
            continue
        name, _, value = WHOLE_RUN.partition("=")
        whole_run = Recorder(f"{recorder.name}, whole run", {**recorder.settings, name: value})
        for way in (recorder, whole_run):
            reason = tried.reason(way.name) or tried.attempt(way.name, partial(try_recorder, way, log))
            if not reason:
                chosen.write_text("".join(f"{key}={value}\n" for key, value in way.settings.items()), encoding="utf-8")
                yield Finding("recorder", f"{way.name} records CUDA")
                return
            yield Finding("recorder", way.name, reason, is_needed=False)
            if WHOLE_RUN not in reason:
                break
    yield Finding("recorder", "none records CUDA here", f"see {log} for their output")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; return 0 if captures can begin."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="the Python with torch")
    parser.add_argument("--out", type=Path, required=True, help="folder for the log and the chosen recorder")
    arguments = parser.parse_args(argv)
    log = arguments.out / "preflight.log"
    log.touch()
    findings = [find_gpus(), *find_torch(arguments.python)]
    print("\n".join(map(str, findings)), flush=True)
    if any(finding.hint and finding.is_needed for finding in findings):
        found = ", ".join([*list_nsys(), "torch.profiler"])
        print(f"{'recorder':9} {'untried':8} {found}: they can be tried when nothing is missing above")
    else:
        for finding in find_recorder(log, arguments.out / "recorder"):
            findings.append(finding)
            print(finding, flush=True)
    missing = [finding.name for finding in findings if finding.hint and finding.is_needed]
    if missing:
        print(f"gpu_preflight: missing: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
