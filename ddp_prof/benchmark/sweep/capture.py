"""A run captured under a profiler, and the figures that ``ddp-prof`` computes from it."""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_prof.errors import TraceError, WorkloadError
from ddp_prof.train.launch import PR_SET_PDEATHSIG

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddp_prof.analyze.overlap.overlap import StepOverlap
    from ddp_prof.run_config import RunConfig

CHECKOUT = Path(__file__).parents[3]
FIGURES = ("comm_ns", "overlapped_ns", "exposed_ns", "tail_ns")
STOP_S = 15.0
"""How long a capture may take to end what it started."""


@dataclass(frozen=True, slots=True)
class CaptureFigures:
    """Times of a capture's step in nanoseconds: medians over its steps and ranks; ``None`` is not known."""

    file: Path
    comm_ns: int | None
    overlapped_ns: int | None
    exposed_ns: int | None
    tail_ns: int | None


def capture(config: RunConfig, folder: Path, *, force: bool) -> CaptureFigures:
    """Capture a run into a folder and read the capture; one that is there, of the same code, is only read.

    Synchronized steps are left out: no capture shows them.

    Raises:
        WorkloadError: It cannot be captured, or not be read.
        Stopped: A signal asked this process to end; what was started is gone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = _capture(replace(config, synchronized_steps=0), folder, force=force)
    if not files:
        raise WorkloadError(f"the capture left no trace in {folder}: is PROFILER=none?")
    return read_figures(files)


def read_figures(files: Sequence[Path]) -> CaptureFigures:
    """Measure the overlap.

    Raises:
        WorkloadError: The files cannot be read.
    """
    from ddp_prof.analyze.overlap.overlap import measure_overlap
    from ddp_prof.ingest.load import load_trace

    try:
        steps = [step for file in files for rank in measure_overlap(load_trace(file)).ranks for step in rank.steps]
    except TraceError as error:
        raise WorkloadError(f"{files[0]} cannot be measured: {error}") from error
    return CaptureFigures(files[0], **{name: _median(steps, name) for name in FIGURES})


def _median(steps: Sequence[StepOverlap], name: str) -> int | None:
    values = [value for step in steps if (value := getattr(step, name)) is not None]
    return round(statistics.median(values)) if values else None


def _capture(config: RunConfig, folder: Path, *, force: bool) -> list[Path]:
    environment = {
        **os.environ,
        **config.script_environment(),
        "TRACES_DIR": str(folder.absolute()),
        "VENV": sys.prefix,
        "FORCE": str(int(force)),
    }
    said = _run_tethered([sys.executable, "-m", "ddp_prof.capture", *config.script_argv()], environment)
    name = said.partition(":")[0]  # "bucketed_10mb: captured by nsys 2022.4.2.1 in 6 s"
    return sorted([*folder.glob(f"{name}.sqlite"), *folder.glob(f"{name}.rank*.json.gz")])


def _run_tethered(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a command that ends when this process does, even if that is killed; returns what it says."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def tether() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(  # noqa: S603  # our own
            command, env=environment, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=errors, text=True,
            start_new_session=True, preexec_fn=tether,  # it makes one system call and no more
        )  # fmt: skip
        try:
            said, _ = process.communicate()
        except BaseException:
            process.terminate()
            process.wait(STOP_S)
            raise
        finally:
            process.kill()
        errors.seek(0)
        if process.returncode:
            raise WorkloadError(_last_line(errors.read()))
    return said.strip()


def _last_line(text: str) -> str:
    return next(iter(text.strip().splitlines()[-1:]), "without a word")
