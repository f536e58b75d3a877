"""Says what this machine has for captures on GPUs, a line each, and how to come by what is missing.

    python3 scripts/gpu_preflight.py --python .venv/bin/python --out gpu_capture

Needs nothing but Python. Whether a recorder records CUDA here is found out by recording: a run of the smallest model as
two ranks, whose capture must hold kernels. Each nsys that can be found is tried in turn, where its capture range loses
something with the whole run, too, then torch.profiler; what each of them said goes to OUT/preflight.log, and the
settings for scripts/profile_variant.sh of the first that records go to OUT/recorder.

Exit: 0, or 1 where something is missing without which nothing can be captured.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from glob import glob
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from ddp_prof.ingest import nsys_program as program  # noqa: E402  # needs nothing but Python

NSIGHT_COMPUTE = (
    "/opt/nvidia/nsight-compute*/*/host/target-linux-*/nsys /usr/local/cuda*/nsight-compute*/host/target-linux-*/nsys"
)
"""Where Nsight Compute keeps an nsys that records, but as a rule lacks the importer that makes the report."""

INSTALL_NSYS = ("bash", str(ROOT / "scripts/install_nsys.sh"))

PROBE = {"MODEL_SIZE": "tiny", "SEQ_LEN": "16", "BATCH_SIZE": "2", "STEPS": "1", "WARMUP": "1", "DEVICE": "cuda"}
PROBE |= {"NGPU": "2", "RANKS_PER_GPU": "2", "BACKEND": "gloo", "FORCE": "1"}
"""Two ranks: one alone does not tell whether a recorder keeps several. With gloo any GPU will do for both."""
PROBE_LIMIT_S = 120
"""Of the recorded run alone: not of what sets it up, makes the report or exports it."""
HANG_LIMIT_S = 600
"""Of all of it."""
WHOLE_RUN = "CAPTURE_RANGE=none"
"""What scripts/profile_variant.sh advises where ranks or kernels did not arrive."""
TORCH_LIMIT_S = 300
"""Gigabytes of libraries, read for the first time."""
DOWNLOAD = "nsys by download"
DOWNLOAD_LIMIT_S = 600
"""More than a slice of scripts/capture_gpu.sh, in which it is tried once: a network may drop all packets."""
ASK_TORCH = """
import torch, torch.distributed as dist
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda and dist.is_nccl_available() else ""
print(torch.__version__, torch.version.cuda or "none", torch.cuda.device_count(), nccl or "none", sep="|")
"""


class Finding(NamedTuple):
    """One line of the table.

    Attributes:
        hint: How to come by it; empty where it is there.
        is_needed: Whether nothing can be captured without it.
    """

    name: str
    found: str
    hint: str = ""
    is_needed: bool = True

    def __str__(self) -> str:
        state = "missing" if self.hint else "ok"
        return f"{self.name:9} {state:8} {self.found}{': ' if self.hint else ''}{self.hint}"


class Recorder(NamedTuple):
    """Something that may record CUDA: settings of scripts/profile_variant.sh."""

    name: str
    settings: Mapping[str, str]


def ask(command: Sequence[str], limit_s: float = 60) -> tuple[bool, str]:
    """Whether a command succeeds, and what it says on stdout, or else all that it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    said = done.stdout if done.returncode == 0 else done.stdout + done.stderr
    return done.returncode == 0, said.strip()


def find_gpus() -> Finding:
    """GPUs and driver."""
    ok, said = ask(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    lines = said.splitlines() if ok else []
    if not lines:
        return Finding("GPU", "nvidia-smi finds none", "run this on a machine with an NVIDIA GPU and its driver")
    names = sorted({line.rpartition(",")[0] for line in lines})
    driver = lines[0].rpartition(",")[2].strip()
    return Finding("GPU", f"{len(lines)} x {', '.join(names)}, driver {driver}")


def find_torch(python: Path) -> tuple[Finding, Finding]:
    """The torch there is, and the NCCL that it was built with."""
    ok, said = ask([str(python), "-c", ASK_TORCH], TORCH_LIMIT_S)
    if not ok:
        reason = said.splitlines()[-1] if said else "it does not start"
        hint = "scripts/env.sh train makes the environment, offline with WHEELS=FOLDER"
        return (
            Finding("torch", f"{python} has none ({reason})", hint),
            Finding("NCCL", "not known without torch", "see torch", is_needed=False),
        )
    version, cuda, gpus, nccl = said.splitlines()[-1].split("|")
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
    """The programs of Nsight Systems that are installed."""
    return [nsys.path for nsys in program.list_nsys()]


def untried_recorders() -> str:
    """A line on what there is, where it cannot be tried."""
    found = ", ".join([*list_nsys(), "torch.profiler"])
    return f"{'recorder':9} {'untried':8} {found}: to find out which records CUDA takes what is missing above"


def find_recorders(environment: Mapping[str, str], log: Path, tried: FailedAttempts) -> Iterator[Recorder | Finding]:
    """What may record CUDA here, in the order in which it is tried: torch.profiler last, a download just before."""
    if own := environment.get("NSYS"):
        yield _nsys(own)
    else:
        found = list_nsys()
        yield from map(_nsys, found)
        for pattern in environment.get("NSIGHT_COMPUTE_SEARCH", NSIGHT_COMPUTE).split():
            yield from map(_nsys, sorted(glob(pattern), reverse=True))  # noqa: PTH207  # the patterns are absolute
        if not found:
            reason = tried.reason(DOWNLOAD) or tried.attempt(DOWNLOAD, lambda: download(log))
            if reason:
                yield Finding("recorder", DOWNLOAD, reason, is_needed=False)
            yield from map(_nsys, list_nsys())
    yield Recorder("torch.profiler", {"PROFILER": "kineto"})


def download(log: Path) -> str:
    """Fetch an nsys; returns the reason where there is none then, else nothing."""
    ok, said = ask(INSTALL_NSYS, DOWNLOAD_LIMIT_S)
    _write(log, f"scripts/install_nsys.sh: exit code {int(not ok)}", said)
    return "" if ok else (said.splitlines() or ["it said nothing"])[-1]


def _nsys(path: str) -> Recorder:
    return Recorder(f"nsys {path}", {"PROFILER": "nsys", "NSYS": path})


def _of_whole_run(recorder: Recorder) -> Recorder:
    name, _, value = WHOLE_RUN.partition("=")
    return Recorder(f"{recorder.name}, whole run", {**recorder.settings, name: value})


def _write(log: Path, heading: str, text: str) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(f"== {heading}\n{text}\n")


def try_recorder(recorder: Recorder, log: Path) -> str:
    """Record a small run; returns the reason where no kernels came of it, else nothing."""
    with tempfile.TemporaryDirectory(prefix="ddp_prof.probe.") as folder:
        environment = {**os.environ, **PROBE, **recorder.settings, "TRACES_DIR": folder, "VERBOSE": "1"}
        environment["LIMIT_S"] = str(PROBE_LIMIT_S)
        command = ["bash", str(ROOT / "scripts/profile_variant.sh"), "naive"]
        said, kernels = run_for(command, environment, HANG_LIMIT_S), count_kernels(Path(folder))
    _write(log, f"{recorder.name}: {kernels} kernels", said)
    if kernels:
        return ""
    ours = [line for line in said.splitlines() if line.startswith("profile_variant: naive: ")]
    last = (ours or said.splitlines() or ["it said nothing"])[-1]
    return last.removeprefix("profile_variant: naive: ") if ours else f"no kernels in its capture ({last[:200]})"


class FailedAttempts:
    """Failed attempts and their reasons, kept in a file: a preflight that was cut off continues with the next one.

    Attributes:
        path: A JSON object; while something is being tried it says that it did not end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reasons: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def reason(self, name: str) -> str:
        """Why it failed; empty where it was not tried, or did not fail."""
        return self._reasons.get(name, "")

    def attempt(self, name: str, attempt: Callable[[], str]) -> str:
        """Try it, and keep and return the reason."""
        self._save_reason(name, "it was cut off before it was done")
        reason = attempt()
        self._save_reason(name, reason)
        return reason

    def _save_reason(self, name: str, reason: str) -> None:
        self._reasons[name] = reason
        self.path.write_text(json.dumps(self._reasons), encoding="utf-8")


def run_for(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> str:
    """Run a script to its end or, politely ended, for so many seconds; returns what it said."""
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # it then ends what it started
            said = f"{process.communicate()[0]}not done after {limit_s:g} s\n"
    return said


def count_kernels(folder: Path) -> int:
    """Kernels in the captures in a folder, of nsys or of torch.profiler."""
    count = 0
    for path in folder.glob("*.sqlite"):
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            table = "CUPTI_ACTIVITY_KIND_KERNEL"
            if database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
                count += database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    return count + sum(
        gzip.decompress(path.read_bytes()).replace(b'"cat": ', b'"cat":').count(b'"cat":"kernel"')
        for path in folder.glob("*.json.gz")
    )


def find_recorder(log: Path, chosen: Path) -> Iterator[Finding]:
    """Try what may record until something does; its settings are written down."""
    tried = FailedAttempts(chosen.with_name(f"{chosen.name}.tried"))
    for recorder in find_recorders(os.environ, log, tried):
        if isinstance(recorder, Finding):
            yield recorder
            continue
        for way in (recorder, _of_whole_run(recorder)):
            reason = tried.reason(way.name) or tried.attempt(way.name, partial(try_recorder, way, log))
            if not reason:
                chosen.write_text("".join(f"{key}={value}\n" for key, value in way.settings.items()), encoding="utf-8")
                yield Finding("recorder", f"{way.name} records CUDA")
                return
            yield Finding("recorder", way.name, reason, is_needed=False)
            if WHOLE_RUN not in reason:
                break
    yield Finding("recorder", "none records CUDA here", f"see {log} for what each of them said")


def main(argv: Sequence[str] | None = None) -> int:
    """Look, print, and say by the exit status whether captures can begin."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="the one with torch")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is found")
    arguments = parser.parse_args(argv)
    log = arguments.out / "preflight.log"
    log.touch()
    findings = [find_gpus(), *find_torch(arguments.python)]
    print("\n".join(map(str, findings)), flush=True)
    if any(finding.hint and finding.is_needed for finding in findings):
        print(untried_recorders())
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
