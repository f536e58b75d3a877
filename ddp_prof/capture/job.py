"""Records a program (a user's or one of our variants): chooses the profiler, runs the command and exports the reports.

A *part* is what one of several recorders of a run records: each rank, or each node, writes its own files then.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

from ddp_prof.capture.preflight import find_doubts, find_interpreter, why_no_ranges
from ddp_prof.capture.processes import claim, run, run_tethered, scratch_folder
from ddp_prof.errors import WorkloadError, printable
from ddp_prof.ingest.nsys_program import Nsys, by_number, find_nsys

PACKAGE = Path(__file__).parents[1]
CHECKOUT = PACKAGE.parent
INSTALLER = CHECKOUT / "scripts" / "install_nsys.sh"
"""Fetches an nsys from the packages of the Linux distribution; exists in a checkout only."""
CAPTURE_RANGE = "cudaProfilerApi"
"""Value of nsys's ``--capture-range``: record from ``cudaProfilerStart`` to ``cudaProfilerStop``."""
EVENT_TRACE = "--cuda-event-trace"
ANSWER_LIMIT_S = 60
"""Seconds to wait for an answer of nvidia-smi."""
PLACE_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (*(f"OMPI_COMM_WORLD_{word}" for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # SLURM sets SLURM_STEP_NUM_TASKS in tasks of srun only, not in the batch script.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
"""For each launcher, the variables that hold rank, world size, local rank and local world size; torchrun's first."""
LAUNCHERS = {"srun": "SLURM_PROCID", "mpirun": "OMPI_COMM_WORLD_RANK", "mpiexec": "PMI_RANK"}
"""Launchers that may start ranks on other machines, each with its variable for the rank.

They have to start nsys, which starts the program: nsys records only processes of its own machine.
"""
TAKES_NAME = re.compile(r"-[ACDJpqw]|--(account|constraint|chdir|job-name|partition|qos|reservation|nodelist|comment)")
"""Options of srun whose value may also be the name of a program: ``-J test``, ``-p batch``."""


@dataclass(frozen=True)
class Job:
    """A program to record, and the files that the recording makes.

    Attributes:
        command: The whole command line, with the profiler and the environment variables that mark the program.
        folder: The folder of the files.
        name: Name of the files, without ``part`` and suffix.
        part: ``.rank3`` or ``.node1`` if other processes record the other ranks; empty if this job records all.
        nsys: The nsys that records; ``None``: torch.profiler.
        on_gpus: Whether the program is expected to use GPUs.
        ranks: The ranks that must be in the capture; ``None``: all ranks up to the world size in the traces.
        doubts: What may spoil the recording, as far as it is known before the start; one line each.
        steps: The steps to record, as ``10:20``; ``None``: all.
    """

    command: tuple[str, ...]
    folder: Path
    name: str
    part: str
    nsys: Nsys | None
    on_gpus: bool
    ranks: Collection[int] | None = None
    doubts: tuple[str, ...] = ()
    steps: str | None = None

    @property
    def monitored(self) -> Path:
        """Folder of a monitor's log and traces."""
        return self.folder / f"{self.name}.monitor"

    @property
    def traces(self) -> list[Path]:
        """The existing traces of this job: exports of nsys, or files of torch.profiler."""
        if self.nsys:
            return self.files(".sqlite")
        # torch.profiler writes a file per rank, however the ranks were started.
        return self.files(".json.gz", None if self.part.startswith(".rank") else r"\.rank\d+")

    def files(self, suffix: str, part: str | None = None) -> list[Path]:
        """Return the existing files of this job with a suffix, sorted by the numbers in their names.

        ``part`` is a regular expression for what stands between name and suffix. By default it matches this job's part;
        if the job records all ranks, any part.
        """
        part = part or re.escape(self.part) or r"(\.(rank|node)\d+)?"
        own = re.compile(re.escape(self.name) + part + re.escape(suffix))
        return sorted(
            (file for file in self.folder.iterdir() if own.fullmatch(file.name)),
            key=lambda file: by_number(file.name),
        )

    def refuse_to_replace(self, folder: Path, world: int | None = None) -> None:
        """Raise WorkloadError if :meth:`remove_old` would remove a file that no capture has made.

        It may be data of the user: ``train.sqlite``, in a folder that was given for the files of the capture.
        """
        from ddp_prof.ingest.load import is_of_capture

        for file in self._find_old(folder, world):
            if not is_of_capture(file) and os.path.lexists(file):  # another part may have removed it meanwhile
                raise WorkloadError(
                    f"{file} would be replaced, and it is no file of a capture: move it away, or capture into another "
                    "folder"
                )

    def remove_old(self, folder: Path, world: int | None = None) -> None:
        """Remove the files that an earlier capture of the same name left in a folder.

        The parts of a capture, nodes or ranks that each record themselves, run this at the same time. So a part removes
        only its own files, and files that no part of this run will write: of a capture without parts, of parts of
        another kind, and of parts whose number is ``world`` or more. ``None``: the number of ranks is not known.
        """
        for file in self._find_old(folder, world):
            file.unlink(missing_ok=True)

    def _find_old(self, folder: Path, world: int | None) -> list[Path]:
        """Return the files that :meth:`remove_old` removes, by their names."""
        pattern = re.compile(
            re.escape(self.name) + r"(?:(\.rank|\.node)(\d+))?\.(run\.json|nsys-rep|sqlite|json\.gz|qdstrm)"
        )
        old = []
        for file in folder.iterdir():
            if (found := pattern.fullmatch(file.name)) is None:
                continue
            kind, number, suffix = found.groups()  # such as ``.rank``, ``3``, ``sqlite``; no kind: of a whole run
            if suffix == "json.gz" and kind != ".rank":
                is_old = False  # torch.profiler writes a file per rank: this one is the user's
            elif not self.part or f"{kind}{number}" == self.part:
                is_old = True
            elif kind is None:  # of a capture without parts; run.json is common to all parts
                is_old = suffix != "run.json"
            elif self.part.startswith(".node") and suffix == "json.gz":  # of torch.profiler: a rank of any node
                is_old = self.nsys is not None
            else:  # a capture has parts of one kind, nodes or ranks
                is_old = not self.part.startswith(kind) or (world is not None and int(number) >= world)
            old += [file] if is_old else []
        return old


def plan_job(
    program: Sequence[str],
    folder: Path,
    profiler: str,
    steps: str | None,
    environ: Mapping[str, str],
    every: str | None = None,
) -> tuple[Job, str]:
    """Plan how to record an unchanged program on this machine; return the job and why this profiler was chosen.

    Args:
        program: The command line, with its launcher.
        folder: Where the files go.
        profiler: ``nsys``, ``torch`` or ``auto``: nsys if there is one, and a GPU.
        steps: Limits the recording to these steps: ``10:20``. ``None``: the whole program.
        environ: The environment in which the program will run.
        every: Do not record, but let a monitor measure some steps now and then: ``1000:3`` is three steps of each
            thousand. Its files are in :attr:`Job.monitored`.

    Raises:
        WorkloadError: The requested profiler is not there or would see no step.
    """
    # Choose the profiler; not an nsys that would see no range of the program, unless it was requested.
    on_gpus = bool(visible_gpus(environ))
    nsys, why = choose_nsys(profiler, environ, is_preferred=on_gpus)
    name = _program_name(program)
    launched = _programs(program)
    python = find_interpreter(launched[0][1], environ)
    if nsys and python and (obstacle := why_no_ranges(nsys, python)):
        if profiler == "nsys":
            raise WorkloadError(f"{obstacle}, or choose --profiler torch")
        nsys, why = None, obstacle
    # The words that go before the program: environment variables (marks) and nsys with its flags (recorder).
    part = file_suffix(program, environ, len(launched[0][0]))
    marks = [f"{variable}={value}" for variable, value in injection(environ).items()]
    marks += [f"DDP_PROF_STEPS={steps}"] if steps else []
    recorder: list[str] = []
    if every is not None:
        monitored = folder / f"{name}.monitor"
        marks += [f"DDP_PROF_EVERY={every}", f"DDP_PROF_MONITOR={monitored}", f"DDP_PROF_PYTHON={sys.executable}"]
    elif nsys is None:
        marks.append(f"DDP_PROF_TRACE={folder / name}")  # each rank adds its number
    else:
        capture_range = CAPTURE_RANGE if steps and on_gpus else None
        marks += ["DDP_PROF_SHARED=1"] if capture_range and ".rank" not in part else []
        recorder = profile_command(nsys, [], folder / f"{name}{part}", traces_cuda=on_gpus, capture_range=capture_range)
    command = [word for before, own in launched for word in (*before, "env", *marks, *recorder, *own)]
    doubts = tuple(find_doubts(python, folder))
    # With ``%q``, which nsys replaces by a variable of each rank, this one job makes the files of all parts.
    part = part if "%q" not in part else ""
    return Job(tuple(command), folder, name, part, nsys, on_gpus, doubts=doubts, steps=steps), why


def injection(environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with which every Python runs ``inject/sitecustomize.py`` at its start."""
    path = os.pathsep.join(filter(None, [str(PACKAGE / "capture" / "inject"), environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "DDP_PROF_PACKAGE": str(PACKAGE)}


def run_job(job: Job, *, replaces: bool = True) -> int:
    """Run the program of a job at this terminal and return its exit code.

    Signals to this process go to the program; after a signal, ranks that still run are ended. With ``replaces`` the
    files of an earlier capture are removed before.

    Raises:
        WorkloadError: The folder cannot be written, one of these files is of no capture, or another capture is writing
            them.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    if not os.access(job.folder, os.W_OK | os.X_OK):  # the program may run for hours before it would be noticed
        raise WorkloadError(f"{job.folder} cannot be written: capture into another folder")
    with scratch_folder() as scratch:
        if replaces:
            if not claim(scratch, job.folder / f"{job.name}{job.part}"):
                raise WorkloadError(
                    f"another capture writes the files {job.name}{job.part}.* in {job.folder}: wait for it, or capture "
                    "into another folder"
                )
            job.refuse_to_replace(job.folder)
            job.remove_old(job.folder)
        return run(job.command, os.environ, scratch)


def export_reports(job: Job, environ: Mapping[str, str], why_none: str) -> None:
    """Export each report that nsys recorded to SQLite; does nothing if torch.profiler recorded.

    An nsys without an importer leaves a ``.qdstrm`` instead of a report; the program that ``QDSTRM_IMPORTER`` names in
    ``environ`` makes a report of it.

    Raises:
        WorkloadError: There is no report, for the reason ``why_none``, or one cannot be made or exported.
    """
    if job.nsys is None:
        return
    # Import what an nsys without an importer has left.
    for recorded in job.files(".qdstrm"):
        report = recorded.with_suffix(".nsys-rep")
        if not report.is_file():
            importer = environ.get("QDSTRM_IMPORTER")
            if importer is None:
                hint = "give the one of the same version, QDSTRM_IMPORTER=/path/to/QdstrmImporter, or another nsys"
                raise WorkloadError(
                    f"nsys {job.nsys.version} recorded {recorded.name} but has no importer here: {hint}"
                )
            subprocess.run([importer, "-i", str(recorded)], capture_output=True, check=False)  # noqa: S603
        if report.is_file():
            recorded.unlink()
    # Export each report beside it.
    reports = job.files(".nsys-rep")
    if not reports:
        raise WorkloadError(f"nsys wrote no report: {why_none}")
    for report in reports:
        target = report.with_suffix(".sqlite")
        target.unlink(missing_ok=True)
        output = job.nsys.export(report, target)
        if not target.is_file():  # the last words of its output tell why
            raise WorkloadError(
                f"{report.name}: nsys export failed: {printable(' '.join(output.split()[-20:])[-300:])}"
            )


def _program_name(program: Sequence[str]) -> str:
    """Return the name for a program's files: its first script, else its last module (``-m``), else its first word."""
    scripts = [Path(word).stem for word in program if word.endswith((".py", ".sh"))]
    modules = [word.rpartition(".")[2] for option, word in pairwise(program) if option == "-m"]
    (name,) = scripts[:1] or modules[-1:] or [Path(program[0]).stem]
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:80] or "program"


def _programs(command: Sequence[str]) -> list[tuple[Sequence[str], Sequence[str]]]:
    """Return, for each program of a command line, the words before it and the program with its arguments.

    If the command line begins with srun, mpirun or mpiexec, the words before the program are this launcher and its
    options, else there are no words. These launchers start several programs if ``:`` separates them.
    """
    launcher = Path(command[0]).name
    if launcher not in LAUNCHERS:
        return [((), command)]
    starts = [0, *(at for at, word in enumerate(command) if word == ":"), len(command)]
    return [_split_at_program(launcher, command[start:end]) for start, end in pairwise(starts)]


def _split_at_program(launcher: str, words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split a launcher's command line before the first word that is a program and no value of an option of srun.

    Raises WorkloadError if there is no such word.
    """
    for at, (before, word) in enumerate(pairwise(words), 1):
        is_value = launcher == "srun" and TAKES_NAME.fullmatch(before)
        if not word.startswith("-") and not is_value and shutil.which(word):
            return words[:at], words[at:]
    raise WorkloadError(
        f"no program in '{' '.join(words)}': give its path, as 'which' prints it, after the launcher's options"
    )


def file_suffix(program: Sequence[str], environ: Mapping[str, str], at: int = 0) -> str:
    """Return the suffix of the files that this process records: ``.rank3``, ``.node1``, or nothing for a whole run.

    If the command line begins with one of :data:`LAUNCHERS`, the suffix holds a variable that nsys replaces in each
    process: ``.rank%q{SLURM_PROCID}``.

    Args:
        program: The whole command line.
        environ: The environment of this process.
        at: Position in ``program`` after the launcher and its options; 0 without one of :data:`LAUNCHERS`.

    Raises:
        WorkloadError: There are several nodes and it is unknown which of them this is.
    """
    # Whether this process starts the ranks of a node, or is started once for each rank.
    inner = Path(program[at]).name
    starts_ranks = inner == "torchrun" or "torch.distributed.run" in program or inner == "accelerate"
    kind = "node" if starts_ranks else "rank"
    if at:
        launcher = Path(program[0]).name
        variable = "SLURM_NODEID" if starts_ranks and launcher == "srun" else LAUNCHERS[launcher]
        return f".{kind}%q{{{variable}}}"
    if place := read_place(environ):
        return f".{kind}{place['RANK']}"
    # torchrun or accelerate: several nodes only with an option that says so.
    words = " ".join(program)
    nodes = re.search(r"--(?:nnodes|num[-_]machines)[= ](\S+)", words)
    if not starts_ranks or nodes is None or nodes[1] in ("1", "1:1"):
        return ""
    number = re.search(r"--(?:node|machine)[-_]rank[= ](\d+)", words)
    node = number[1] if number else environ.get("NODE_RANK") or environ.get("GROUP_RANK") or ""
    if not node.isdecimal():
        raise WorkloadError("which of the nodes is this? set NODE_RANK=0 on the first, 1 on the next, and so on")
    return f".node{node}"


def read_place(environ: Mapping[str, str]) -> dict[str, str]:
    """Return rank, world size and their local counterparts that a launcher gave this process, by torchrun's names.

    Empty if no launcher did, or if the world size is 1.
    """
    for names in PLACE_VARIABLES:
        values = [environ.get(name, "") for name in names]
        values[3] = re.sub(r"\(x\d+\).*|,.*", "", values[3])  # SLURM writes "8(x2)"
        if values[0].isdecimal() and values[1] not in ("", "1"):
            return {name: value for name, value in zip(PLACE_VARIABLES[0], values, strict=True) if value}
    return {}


def choose_nsys(
    profiler: str,
    environ: Mapping[str, str],
    *,
    is_preferred: bool = True,
    may_fetch: bool = False,
    instead: str = "--profiler torch",
) -> tuple[Nsys | None, str]:
    """Return the nsys that is to record, or ``None`` for torch.profiler, and the reason of the choice.

    Args:
        profiler: ``nsys``, ``torch`` or ``auto``, which chooses nsys if there is one and it ``is_preferred``.
        environ: The environment; ``NSYS`` in it may name the nsys.
        is_preferred: Whether nsys is better than torch.profiler here, as it is on a GPU.
        may_fetch: Whether nsys may be installed by :data:`INSTALLER` if there is none.
        instead: How the user of the caller chooses torch.profiler, for the error message.

    Raises:
        WorkloadError: ``profiler`` is ``nsys`` and there is none.
    """
    if profiler == "torch":
        return None, "as requested"
    nsys = find_nsys(environ)
    chosen = environ.get("NSYS")
    # Install one if that is allowed, and the user has not named one that does not run.
    if nsys is None and may_fetch and not chosen and INSTALLER.is_file():
        code, path = run_tethered([str(INSTALLER)], subprocess.PIPE, environ)  # it prints the reason of a failure
        nsys = find_nsys({**environ, "NSYS": path.strip()}) if code == 0 else None
    hint = f"NSYS={chosen} does not run: correct it or unset it" if chosen else "set NSYS=/path/to/nsys"
    if profiler == "nsys":
        if nsys is None:
            raise WorkloadError(f"no nsys on PATH nor in the usual places: {hint}, or choose {instead}")
        return nsys, "as requested"
    if nsys is None:
        return None, f"there is no nsys here: {hint}"
    if not is_preferred:
        return None, "no GPU is visible here, and torch.profiler records more of a CPU than nsys does"
    return nsys, "nsys records more of a GPU than torch.profiler does"


def installed(package: str) -> str:
    """Return the version of an installed package, empty if it is not installed."""
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

    Args:
        nsys: The nsys that records.
        program: The command line of the program, with its arguments.
        output: The report's path without its suffix.
        traces_cuda: Record the GPU too, not only ranges.
        capture_range: On GPUs, record only while the program is in this range; ``None``: the whole run.
        samples_gpus: Sample the counters of all GPUs, which only one process per node can do.
        further: Further flags.
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
    """Return the names of the GPUs that CUDA sees in a process with this environment.

    nvidia-smi also lists GPUs that CUDA_VISIBLE_DEVICES hides. On a GPU that is divided (MIG) a process sees only one
    instance.
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
    """Return the lines that nvidia-smi prints for these arguments, or none if it fails or is not there.

    If it fails, its stdout holds an error message.
    """
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
