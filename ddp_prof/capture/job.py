"""Records a program as it is: the command line round it, the run, the files, and what they lack."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ddp_prof.capture.command_line import CAPTURE_RANGE, Recording, profile_command
from ddp_prof.capture.gpus import visible_gpus
from ddp_prof.capture.processes import end_started
from ddp_prof.errors import WorkloadError
from ddp_prof.ingest.nsys.program import Nsys, find_nsys
from ddp_prof.printable import printable

PACKAGE = Path(__file__).parents[1]
MARK = "DDP_PROF_CAPTURE"
"""In the environment of all that a capture starts."""
RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # the second in a task of srun alone, not in the batch script
)
LAUNCHERS = {"srun": "SLURM_PROCID", "mpirun": "OMPI_COMM_WORLD_RANK", "mpiexec": "PMI_RANK"}
"""Programs that start ranks elsewhere, so that nsys must come after them, and what tells a rank its number."""


@dataclass(frozen=True)
class Job:
    """A program that is to be recorded.

    Attributes:
        command: All that is run, recorder and marks included.
        folder: For the files.
        name: What they are called, up to a rank or node.
        part: ``.rank3`` or ``.node1`` where other processes make the rest, else empty.
        nsys: The nsys that records; ``None``: torch.profiler.
        on_gpus: Whether there are GPUs here.
        why: Why this recorder.
    """

    command: tuple[str, ...]
    folder: Path
    name: str
    part: str
    nsys: Nsys | None
    on_gpus: bool
    why: str

    @property
    def traces(self) -> list[Path]:
        """The files that are to be read, those of all parts that are there."""
        suffix = r"\.sqlite" if self.nsys else r"\.json\.gz"
        part = re.escape(self.part) if self.part else r"(?:\.(?:rank|node)\d+)?"
        ranks = r"(?:\.rank\d+)?" if not self.nsys else ""
        pattern = re.compile(rf"{re.escape(self.name)}{part}{ranks}{suffix}")
        return sorted((file for file in self.folder.iterdir() if pattern.fullmatch(file.name)), key=_by_number)


def plan_job(program: Sequence[str], folder: Path, profiler: str, steps: str | None, environ: Mapping[str, str]) -> Job:
    """How a program is recorded here.

    Args:
        program: Its command line, launcher included.
        folder: For the files.
        profiler: ``nsys``, ``torch`` or ``auto``: nsys where there is one and a GPU.
        steps: The steps to record, ``10:20``; all by default.
        environ: The environment.

    Raises:
        WorkloadError: nsys is asked for and not there.
    """
    on_gpus = bool(visible_gpus(environ))
    nsys = None if profiler == "torch" else find_nsys(environ)
    if profiler == "nsys" and nsys is None:
        raise WorkloadError("no nsys on PATH nor in the usual places: set NSYS=/path/to/nsys, or use --profiler torch")
    why = "as asked for"
    if profiler == "auto":
        why = "of what there is, it tells most of a GPU"
        if nsys is None:
            why = "there is no nsys here: set NSYS=/path/to/nsys for it"
        elif not on_gpus:
            nsys, why = None, "there is no GPU here, and of a CPU it tells more than nsys"
    name = _name_of(program)
    at = _place_of_recorder(program)
    part = _part(program, environ, at)
    marks = [f"PYTHONPATH={_joined(PACKAGE / 'capture' / 'inject', environ.get('PYTHONPATH'))}"]
    marks += [f"DDP_PROF_PACKAGE={PACKAGE}", *([f"DDP_PROF_STEPS={steps}"] if steps else [])]
    inner = list(program[at:])
    if nsys is None:
        # The rank is added by the rank itself; a node's number would hide it.
        marks.append(f"DDP_PROF_TRACE={folder / name}")
        part = part if ".rank" in part else ""
    else:
        recording = Recording(
            folder / f"{name}{part}",
            traces_cuda=on_gpus,
            capture_range=CAPTURE_RANGE if steps and on_gpus else None,
        )
        inner = profile_command(nsys, recording, inner)
    command = (*program[:at], "env", *marks, *inner)
    return Job(command, folder, name, part if "%q" not in part else "", nsys, on_gpus, why)


def run_job(job: Job) -> int:
    """Run it to its end; the exit code, or 128 and the number of the signal that ended it.

    What it says is not touched. Signals reach it; ranks that it leaves behind after one are ended.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    _remove_old(job)
    mark = f"{job.name}.{uuid.uuid4().hex}"
    with subprocess.Popen(job.command, env={**os.environ, MARK: mark}) as process, _signals_to(process) as came:  # noqa: S603
        code = process.wait()
        if came or code:
            end_started(f"{MARK}={mark}")
    return 128 - code if code < 0 else code


@contextmanager
def _signals_to(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Hand signals on to a process; from a terminal Ctrl-C reaches it anyway, and twice would be once too often."""
    came: list[int] = []

    def hand_on(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        if number != signal.SIGINT or not _is_in_foreground():
            process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    with suppress(OSError):
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    return False


def export_reports(job: Job) -> None:
    """Make each report of nsys readable without it.

    Raises:
        WorkloadError: There is none, or it cannot be exported.
    """
    if job.nsys is None:
        return
    reports = [file for file in job.folder.glob(f"{job.name}{job.part}*.nsys-rep") if _is_of(job, file)]
    if not reports:
        raise WorkloadError(f"nsys wrote no report into {job.folder}: see what it said above")
    for report in sorted(reports):
        target = report.with_suffix(".sqlite")
        target.unlink(missing_ok=True)
        said = job.nsys.export(report, target)
        if not target.is_file():
            raise WorkloadError(f"{report}: nsys export failed: {printable(' '.join(said.split()[-20:])[:300])}")


def find_doubts(job: Job) -> list[str]:
    """What the files lack that should be in them, a line each.

    Raises:
        WorkloadError: There is no file.
        TraceError: One cannot be read.
    """
    from ddp_prof.ingest.load import load_trace
    from ddp_prof.trace import Kind

    files = job.traces
    if not files:
        way_out = "did it train anything (DDP, FSDP2 or backward), and end by itself?"
        raise WorkloadError(f"no rank wrote a trace into {job.folder}: {way_out}")
    traces = [load_trace(file) for file in files]
    doubts = []
    ranks = {rank for trace in traces for rank in trace.ranks.values()}
    world = max((trace.world_size or 0 for trace in traces), default=0)
    if not job.part and (missing := sorted(set(range(world)) - ranks)):
        doubts.append(f"rank {', '.join(map(str, missing))} of {world} is not in it: it was killed, or ran elsewhere")
    if job.on_gpus and not any((trace.activities.kind == Kind.KERNEL).any() for trace in traces):
        doubts.append("no kernel arrived: did the program use the GPUs, and does this profiler fit the driver?")
    if not any(name.startswith(("step|", "backward")) for trace in traces for name in trace.names):
        if job.nsys and not job.on_gpus:
            doubts.append(
                "no range arrived: the program's Python needs the package nvtx, on nsys to 2023.4 below 0.2.12"
            )
        else:
            doubts.append("no step is marked: nothing of torch's DDP, FSDP2 or optimizers was seen")
    return doubts


def _name_of(program: Sequence[str]) -> str:
    """The script's or module's name, else the program's."""
    words = list(program)
    script = next((Path(word).stem for word in words if word.endswith(".py")), None)
    if script is None and "-m" in words[:-1]:
        modules = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "-m"]
        script = modules[-1].rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9_-]", "_", script or Path(words[0]).stem)[:80] or "program"


def _place_of_recorder(program: Sequence[str]) -> int:
    """Where in the command line the recorder goes: first, or behind a launcher that starts ranks elsewhere."""
    if Path(program[0]).name not in LAUNCHERS:
        return 0
    for at, word in enumerate(program[1:], 1):
        if not word.startswith("-") and shutil.which(word):
            return at
    raise WorkloadError(
        f"no program in '{' '.join(program)}': put its path, as from 'which', after the launcher's options"
    )


def _part(program: Sequence[str], environ: Mapping[str, str], at: int) -> str:
    """What tells the files of this process from those of others: ``.rank3``, ``.node1``, or nothing."""
    inner = Path(program[at]).name
    starts_ranks = inner == "torchrun" or "torch.distributed.run" in program or inner == "accelerate"
    if at:
        if starts_ranks:
            return ".node%q{SLURM_NODEID}" if Path(program[0]).name == "srun" else ".node%q{OMPI_COMM_WORLD_RANK}"
        return f".rank%q{{{LAUNCHERS[Path(program[0]).name]}}}"
    for rank, world in RANK_VARIABLES:
        if environ.get(rank, "").isdecimal() and environ.get(world, "1") not in ("", "1"):
            return f".{'node' if starts_ranks else 'rank'}{environ[rank]}"
    words = " ".join(program)
    nodes = re.search(r"--nnodes[= ](\S+)", words)
    if not starts_ranks or nodes is None or nodes[1] in ("1", "1:1"):
        return ""
    number = re.search(r"--node[-_]rank[= ](\d+)", words)
    node = number[1] if number else environ.get("NODE_RANK") or environ.get("GROUP_RANK") or ""
    if not node.isdecimal():
        raise WorkloadError("which of the nodes is this? set NODE_RANK=0 on the first, 1 on the next, and so on")
    return f".node{node}"


def _joined(folder: Path, path: str | None) -> str:
    return f"{folder}{os.pathsep}{path}" if path else str(folder)


def _by_number(file: Path) -> list[int | str]:
    return [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", file.name)]


def _is_of(job: Job, file: Path) -> bool:
    """Whether a file is of this capture, or of this part of it."""
    part = re.escape(job.part) if job.part else r"(?:\.(?:rank|node)\d+)?"
    return (
        re.fullmatch(rf"{re.escape(job.name)}{part}(?:\.rank\d+)?\.(?:nsys-rep|sqlite|json\.gz)", file.name) is not None
    )


def _remove_old(job: Job) -> None:
    """Files of an earlier capture of this name; of a part its own alone."""
    for file in job.folder.iterdir():
        if _is_of(job, file):
            file.unlink(missing_ok=True)
