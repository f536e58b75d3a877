"""What records a program: an nsys or torch.profiler, whichever fits this machine, and the command line of nsys."""

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
"""Fetches an nsys from the packages of the Linux distribution; not there where only the package is installed."""
CAPTURE_RANGE = "cudaProfilerApi"
EVENT_TRACE = "--cuda-event-trace"
ANSWER_LIMIT_S = 60


def choose_nsys(
    profiler: str, environ: Mapping[str, str], *, is_preferred: bool = True, may_fetch: bool = False
) -> tuple[Nsys | None, str]:
    """The nsys that records, ``None`` where torch.profiler does, and why.

    ``profiler`` is ``nsys``, ``torch`` or ``auto``, which takes nsys where there is one and it ``is_preferred``. Raises
    WorkloadError where nsys is asked for and not to be had.
    """
    if profiler == "torch":
        return None, "as asked for"
    nsys = find_nsys(environ)
    chosen = environ.get("NSYS")
    if nsys is None and may_fetch and not chosen and INSTALLER.is_file():
        code, path = run_tethered([str(INSTALLER)], subprocess.PIPE, environ)  # stderr says why it fails
        nsys = find_nsys({**environ, "NSYS": path.strip()}) if code == 0 else None
    hint = f"NSYS={chosen} does not run: correct it or unset it" if chosen else "set NSYS=/path/to/nsys"
    if profiler == "nsys":
        if nsys is None:
            raise WorkloadError(f"no nsys on PATH nor in the usual places: {hint}, or choose torch.profiler")
        return nsys, "as asked for"
    if nsys is None:
        return None, f"there is no nsys here: {hint}"
    if not is_preferred:
        return None, "there is no GPU here, and of a CPU it tells more than nsys"
    return nsys, "of what there is, it tells most of a GPU"


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
    """``nsys profile`` with the program behind it: the only home of nsys's flags.

    ``output`` is the report's name without its suffix. On GPUs nsys waits for ``capture_range``, or records the whole
    run, and ``samples_gpus`` samples the counters of all GPUs, which one process per node can.
    """
    flags = ["--sample=none", "--cpuctxsw=none", "--stats=false", "--force-overwrite=true"]
    flags.append(f"--output={output}")
    flags.append(f"--trace={'cuda,nvtx' if traces_cuda else 'nvtx'}")
    if traces_cuda:
        if nsys.supports("profile", "--cuda-graph-trace"):
            flags.append("--cuda-graph-trace=node")
        # Event records tell who waited for whom; newer releases leave them out unless told.
        is_told = any(flag.startswith(EVENT_TRACE) for flag in further)
        if nsys.supports("profile", EVENT_TRACE) and not is_told:
            flags.append(f"{EVENT_TRACE}=true")
        if capture_range:
            flags.append(f"--capture-range={capture_range}")
            # Else the end of the range would end the program.
            has_end = nsys.supports("profile", "--capture-range-end")
            flags.append("--capture-range-end=stop" if has_end else "--stop-on-range-end=true")
        if samples_gpus:
            is_new = nsys.supports("profile", "--gpu-metrics-devices")
            flags.append("--gpu-metrics-devices=all" if is_new else "--gpu-metrics-device=all")
    return [nsys.path, "profile", *flags, *further, *program]


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """As CUDA counts: nvidia-smi also shows what ``CUDA_VISIBLE_DEVICES`` hides, and all parts of a divided one."""
    names = _ask("--query-gpu=name", "--format=csv,noheader")
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        is_divided = bool(names) and any(line.strip().startswith("MIG ") for line in _ask("-L"))
        return names[:1] if is_divided else names
    found: list[str] = []
    for entry in visible.replace(",", " ").split():
        if entry.startswith("MIG-"):  # of several instances a process sees one
            return found + names[:1]
        if entry.startswith("GPU-"):
            found += names[:1]
        elif re.fullmatch(r"[0-9]{1,4}", entry) and int(entry) < len(names):
            found.append(names[int(entry)])
        else:  # as for CUDA the first that is none ends the list
            break
    return found


def _ask(*question: str) -> list[str]:
    """Lines of its answer; none without a driver, which it says on stdout, where names are otherwise."""
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
