"""The only home of nsys's flags: the command line that records a program, for what this version of nsys can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_prof.ingest.nsys_program import Nsys

CAPTURE_RANGE = "cudaProfilerApi"
EVENT_TRACE = "--cuda-event-trace"


@dataclass(frozen=True)
class Recording:
    """What is to be recorded.

    Attributes:
        output: The report's name without its suffix.
        traces_cuda: Whether the program computes on GPUs.
        capture_range: What nsys waits for on GPUs; ``None``: it records the whole run.
        samples_gpus: Whether the counters of all GPUs are sampled, which one process per node can.
        flags: Further ones.
    """

    output: Path
    traces_cuda: bool
    capture_range: str | None = None
    samples_gpus: bool = False
    flags: Sequence[str] = ()


def profile_command(nsys: Nsys, recording: Recording, program: Sequence[str]) -> list[str]:
    """``nsys profile`` with the program behind it."""
    flags = ["--sample=none", "--cpuctxsw=none", "--stats=false", "--force-overwrite=true"]
    flags.append(f"--output={recording.output}")
    flags.append(f"--trace={'cuda,nvtx' if recording.traces_cuda else 'nvtx'}")
    if recording.traces_cuda:
        if nsys.supports("profile", "--cuda-graph-trace"):
            flags.append("--cuda-graph-trace=node")
        # Event records tell who waited for whom; newer releases leave them out unless told.
        is_told = any(flag.startswith(EVENT_TRACE) for flag in recording.flags)
        if nsys.supports("profile", EVENT_TRACE) and not is_told:
            flags.append(f"{EVENT_TRACE}=true")
        if recording.capture_range:
            flags.append(f"--capture-range={recording.capture_range}")
            # Else the end of the range would end the program.
            has_end = nsys.supports("profile", "--capture-range-end")
            flags.append("--capture-range-end=stop" if has_end else "--stop-on-range-end=true")
        if recording.samples_gpus:
            is_new = nsys.supports("profile", "--gpu-metrics-devices")
            flags.append("--gpu-metrics-devices=all" if is_new else "--gpu-metrics-device=all")
    return [nsys.path, "profile", *flags, *recording.flags, *program]
