"""Chooses what records on this machine, nsys or torch.profiler, and builds the command line of nsys."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ddp_prof.capture.processes import run_tethered
from ddp_prof.errors import WorkloadError
from ddp_prof.ingest.nsys_program import Nsys, find_nsys

PACKAGE = Path(__file__).parents[1]
CHECKOUT = PACKAGE.parent
INSTALLER = CHECKOUT / "scripts" / "install_nsys.sh"
"""Fetches an nsys from the packages of the Linux distribution; exists in a checkout only."""
CAPTURE_RANGE = "cudaProfilerApi"
EVENT_TRACE = "--cuda-event-trace"
ANSWER_LIMIT_S = 60


def choose_nsys(
    profiler: str, environ: Mapping[str, str], *, is_preferred: bool = True, may_fetch: bool = False
) -> tuple[Nsys | None, str]:
    """Return the nsys that records, or ``None`` for torch.profiler, and the reason.

    ``profiler`` is ``nsys``, ``torch`` or ``auto``, which chooses nsys if there is one and it ``is_preferred``. Raises
    WorkloadError if ``profiler`` is ``nsys`` and there is none.
    """
    if profiler == "torch":
        return None, "as requested"
    nsys = find_nsys(environ)
    chosen = environ.get("NSYS")
    if nsys is None and may_fetch and not chosen and INSTALLER.is_file():
        code, path = run_tethered([str(INSTALLER)], subprocess.PIPE, environ)  # it prints the reason of a failure
        nsys = find_nsys({**environ, "NSYS": path.strip()}) if code == 0 else None
    hint = f"NSYS={chosen} does not run: correct it or unset it" if chosen else "set NSYS=/path/to/nsys"
    if profiler == "nsys":
        if nsys is None:
            raise WorkloadError(f"no nsys on PATH nor in the usual places: {hint}, or choose torch.profiler")
        return nsys, "as requested"
    if nsys is None:
        return None, f"there is no nsys here: {hint}"
    if not is_preferred:
        return None, "there is no GPU here, and it records more of a CPU than nsys"
    return nsys, "it records more of a GPU than torch.profiler"


def installed(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


def profile_command(
    nsys: Nsys,
    program: Sequence[str],
    output: Path,
    *,
    traces_cuda: bool,
    capture_range: str | None = None,
    samples_gpus: bool = False,
    further: Sequence[str] = (),
) -> list[str]:
    """Return the command line of ``nsys profile`` for a program; no other function knows nsys's flags.

    ``output`` is the report's name without its suffix. On GPUs nsys records while the program is in ``capture_range``;
    ``None``: the whole run. ``samples_gpus`` samples the counters of all GPUs, which only one process per node can.
    """
    flags = ["--sample=none", "--cpuctxsw=none", "--stats=false", "--force-overwrite=true"]
    flags.append(f"--output={output}")
    flags.append(f"--trace={'cuda,nvtx' if traces_cuda else 'nvtx'}")
    if traces_cuda:
        if nsys.supports("profile", "--cuda-graph-trace"):
            flags.append("--cuda-graph-trace=node")
        # Event records show which stream waits for which; newer releases record them only with this flag.
        is_set = any(flag.startswith(EVENT_TRACE) for flag in further)
        if nsys.supports("profile", EVENT_TRACE) and not is_set:
            flags.append(f"{EVENT_TRACE}=true")
        if capture_range:
            flags.append(f"--capture-range={capture_range}")
            # Without this flag nsys would end the program with the range.
            has_end = nsys.supports("profile", "--capture-range-end")
            flags.append("--capture-range-end=stop" if has_end else "--stop-on-range-end=true")
        if samples_gpus:
            is_new = nsys.supports("profile", "--gpu-metrics-devices")
            flags.append("--gpu-metrics-devices=all" if is_new else "--gpu-metrics-device=all")
    return [nsys.path, "profile", *flags, *further, *program]


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the GPUs that CUDA sees.

    nvidia-smi also lists GPUs that CUDA_VISIBLE_DEVICES hides; with MIG, a process sees one instance only.
    """
    names = _ask("--query-gpu=name", "--format=csv,noheader")
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        is_divided = bool(names) and any(line.strip().startswith("MIG ") for line in _ask("-L"))
        return names[:1] if is_divided else names
    found: list[str] = []
    for entry in visible.replace(",", " ").split():
        if entry.startswith("MIG-"):
            return found + names[:1]
        if entry.startswith("GPU-"):
            found += names[:1]
        elif re.fullmatch(r"[0-9]{1,4}", entry) and int(entry) < len(names):
            found.append(names[int(entry)])
        else:  # for CUDA, too, the first invalid entry ends the list
            break
    return found


def _ask(*question: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none if it fails, because then stdout holds the error message."""
    try:
        done = subprocess.run(  # noqa: S603
            ["nvidia-smi", *question],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=ANSWER_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
