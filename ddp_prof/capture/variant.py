"""Captures one variant; ``scripts/profile_variant.sh`` describes the settings, which are environment variables.

Settings and arguments are checked before anything begins. ``run.json`` holds a digest of all that determines the files,
so an existing capture is made again only if something has changed.
"""

from __future__ import annotations

import argparse
import inspect
import io
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, TypeVar

from ddp_prof.capture.job import (
    CAPTURE_RANGE,
    CHECKOUT,
    PACKAGE,
    Job,
    choose_nsys,
    export_reports,
    file_suffix,
    installed,
    profile_command,
    read_place,
    visible_gpus,
)
from ddp_prof.capture.losses import find_losses
from ddp_prof.capture.processes import NOT_DONE, find_reason, hold_folder, process_namespace, run, scratch_folder
from ddp_prof.errors import TraceError, UsageError, WorkloadError
from ddp_prof.ingest.nsys_program import Nsys
from ddp_prof.run_config import RunConfig
from ddp_prof.train.arguments import parse_arguments
from ddp_prof.train.launch import most_ranks
from ddp_prof.variants import BUCKETED, VARIANTS, variant_extras

MOST = 999_999_999
"""The largest number that a setting may be, unless said otherwise."""
KEPT_VARIABLES = re.compile(
    r"(CUDA|NCCL|GLOO|OMP|MKL|(PY)?TORCH|TORCHINDUCTOR|TRITON|FI|OFI_NCCL|UCX)_[A-Za-z0-9_]*"
    r"|NVIDIA_TF32_OVERRIDE|CUBLAS_WORKSPACE_CONFIG|LD_LIBRARY_PATH|CC|CXX"
)
"""Environment variables that a captured run keeps."""
MEETING_VARIABLES = re.compile(r"MASTER_ADDR|MASTER_PORT|TORCHELASTIC_[A-Z_]*")
"""Environment variables by which the ranks of a launcher find each other."""
FIRST_PORT = 29500
"""Ranks that SLURM starts meet at this port plus the job's number modulo 1000, unless MASTER_PORT is set."""
LOST_RACE = re.compile(
    rb"= sem_open|The proxy is not started|Local Endpoint is not available|Connection to the Agent lost|"
    rb"^(End of file|Connection reset by peer)$",
    re.M,
)
"""What nsys prints if its agent has looked for the program's semaphore, proxy or endpoint before that existed.

It happens with nsys 2022.4, which may then end with 0: rarely, and in two of seven starts where ten processes kept each
core busy. ``scripts/install_nsys.sh`` has the same.
"""
LEAST_ROOM = 2**20
"""Bytes; a folder that has less after a failed capture is full."""
NSYS_STARTS = 8
"""How often nsys is started if it prints :data:`LOST_RACE`."""
Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Plan:
    """A requested capture.

    Attributes:
        environ: The settings and all other environment variables.
        workload: The arguments of ``python -m ddp_prof.train``.
        config: The same arguments, parsed.
        base: Name of the files without ``part``.
        ranks: Number of ranks on this machine; if a launcher started this program once per rank, on all machines.
        place: If a launcher started this program once per rank, torchrun's variables of this rank; else empty.
        gpus: Names of the GPUs that CUDA sees.
        on_gpus: Whether the ranks train on GPUs.
        traces: The folder for the files.
        nsys_flags: Further flags for nsys.
        limit_s: The most seconds that the run may take; ``None``: any time.
    """

    environ: Mapping[str, str]
    workload: tuple[str, ...]
    config: RunConfig
    base: str
    ranks: int
    place: Mapping[str, str]
    gpus: tuple[str, ...]
    on_gpus: bool
    traces: Path
    nsys_flags: tuple[str, ...]
    limit_s: int | None

    @property
    def torchrun(self) -> list[str]:
        """Arguments with which torchrun starts the ranks of this machine; empty if it is not used."""
        words = self.environ.get("TORCHRUN", "").split()
        return ["-m", "torch.distributed.run", *words, "--nproc-per-node", str(self.ranks)] if words else []

    @property
    def part(self) -> str:
        """Suffix of the files if other processes or machines capture the other ranks: ``.rank3``, ``.node1``."""
        return file_suffix([self.python, *self.torchrun], self.environ)

    @property
    def name(self) -> str:
        return self.base + self.part

    @property
    def python(self) -> str:
        """The Python that runs the ranks: that of the virtual environment ``VENV`` if it is set, else this one."""
        venv = self.environ.get("VENV")
        return f"{venv}/bin/python" if venv else sys.executable

    def is_set(self, name: str, default: str = "0") -> bool:
        return self.environ.get(name, default) == "1"

    def job(self, folder: Path, nsys: Nsys | None, profiler: str | None, key: str) -> Job:
        """Return the job that makes the files of this capture.

        Args:
            folder: Where the files go.
            nsys: The nsys that records; ``None``: torch.profiler or nothing records.
            profiler: The profiler's name and version for ``run.json``; ``None``: nothing records.
            key: The digest for ``run.json``.
        """
        program = [self.python, *self.torchrun, "-m", "ddp_prof.train", *self.workload]
        program += ["--run-json", str(folder / f"{self.base}.run.json"), "--key", key]
        program += ["--profiler", profiler] if profiler else []
        if nsys is not None:
            capture_range = self.environ.get("CAPTURE_RANGE") or CAPTURE_RANGE
            program = profile_command(
                nsys,
                program,
                folder / self.name,
                traces_cuda=self.on_gpus,
                capture_range=None if capture_range == "none" else capture_range,
                # Only one process per node can.
                samples_gpus=self.is_set("GPU_METRICS") and self.place.get("LOCAL_RANK", "0") == "0",
                further=self.nsys_flags,
            )
        elif profiler:
            program += ["--kineto", str(folder / f"{self.base}.json.gz")]
        # With several nodes, torchrun decides which ranks run on this one.
        ranks = [int(self.place["RANK"])] if self.place else [] if self.part else range(self.ranks)
        return Job(tuple(program), folder, self.base, self.part, nsys, self.on_gpus, ranks)


def read_plan(argv: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Return the capture that the arguments and environment variables request, with defaults for what is not set.

    Raises UsageError if an argument or a variable is invalid.
    """
    # The arguments before -- are ours, those after it are for the workload.
    at = argv.index("--") if "--" in argv else len(argv)
    options = _parsed(_make_parser().parse_args, argv[:at])

    # The number of ranks. If a launcher started them, this process is one of them, and ``place`` says which; otherwise
    # torchrun or the workload will start them.
    place = {} if environ.get("TORCHRUN") else read_place(environ)
    if place and "SLURM_JOB_ID" in environ:
        port = FIRST_PORT + (_whole(environ, "SLURM_JOB_ID", 0) or 0) % 1000
        environ = {"MASTER_PORT": str(port), **environ}
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        _whole(place, name, 0)
    _whole(environ, "NODE_RANK", 0)
    sharing = _whole(environ, "RANKS_PER_GPU", 1)
    local = "NGPU" if environ.get("NGPU") else "WORLD_SIZE"
    ranks = _whole(place, "WORLD_SIZE", 1) or _whole(environ, local, 1, most_ranks()) or 2
    nodes = _count_nodes(environ.get("TORCHRUN", ""))

    # Device: GPUs if each rank of this machine has a place on one.
    gpus = visible_gpus(environ)
    device = environ.get("DEVICE") or "auto"
    if device == "auto":
        here = int(place.get("LOCAL_WORLD_SIZE", ranks))
        device = "cuda" if len(gpus) * (sharing or 1) >= here else "cpu"
    settings = {
        "--bucket-size-mb": options.bucket_size_mb,
        # A launcher passes the number of ranks in the environment.
        "--world-size": None if place or environ.get("TORCHRUN") else str(ranks),
        "--device": device,
        "--model-size": environ.get("MODEL_SIZE") or ("medium" if device == "cuda" else "mini"),
        "--batch-size": environ.get("BATCH_SIZE") or str(2 * ranks * nodes),
        "--seq-len": environ.get("SEQ_LEN") or "128",
        "--steps": environ.get("STEPS") or "10",
        "--warmup": environ.get("WARMUP") or "2",
        "--backend": environ.get("BACKEND"),
        "--ranks-per-gpu": str(sharing) if sharing else None,
    }
    workload = ["--variant", options.variant]
    workload += [word for option, value in settings.items() if value for word in (option, value)] + list(argv[at + 1 :])
    arguments = _parsed(parse_arguments, workload)
    base = _name_files(options.variant, arguments, has_size=options.bucket_size_mb or options.variant == BUCKETED)
    try:
        flags = shlex.split(environ.get("NSYS_FLAGS", ""))
    except ValueError as error:
        raise UsageError(f"NSYS_FLAGS: {error}") from error
    traces = Path(environ.get("TRACES_DIR") or CHECKOUT / "traces" / "local")
    limit_s = _whole(environ, "LIMIT_S", 1)
    return Plan(
        environ,
        tuple(workload),
        arguments,
        base,
        ranks,
        place,
        tuple(gpus),
        device == "cuda",
        traces,
        tuple(flags),
        limit_s,
    )


def _make_parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments that are not for the workload."""
    parser = argparse.ArgumentParser(
        "profile_variant.sh",
        description="Capture one variant. What follows -- is for python -m ddp_prof.train. Settings are environment "
        "variables; scripts/profile_variant.sh lists them.",
        epilog="Example: STEPS=5 scripts/profile_variant.sh bucketed --bucket-size-mb 25 -- --precision bf16",
        allow_abbrev=False,
    )
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--bucket-size-mb")
    return parser


def _count_nodes(torchrun: str) -> int:
    """Return the number of machines that the arguments of torchrun ask for: of ``1:4``, 4; without any, 1."""
    found = re.search(r"--nnodes[= ](?:[0-9]+:)?([0-9]+)", torchrun)
    return _whole({"--nnodes": found[1]}, "--nnodes", 1, 1_000_000) or 1 if found else 1


def _name_files(variant: str, config: RunConfig, *, has_size: object) -> str:
    """Return the name of a capture's files: the variant, its bucket size if it has one, options that change it."""
    size = config.bucket_size_mb
    sizes = ["unbounded" if size is None else f"{size:g}mb"] if has_size else []
    return "_".join([variant, *sizes, *variant_extras(config.manifest_options())]).replace(" ", "_")


def _parsed(parse: Callable[[Sequence[str]], Parsed], words: Sequence[str]) -> Parsed:
    """Return what argparse makes of the words; raise UsageError with argparse's message instead of its exit."""
    output = io.StringIO()
    try:
        with redirect_stderr(output):
            return parse(words)
    except SystemExit as end:
        if not end.code:  # --help
            raise
        raise UsageError(output.getvalue().strip().rpartition("error: ")[2]) from end


def _whole(environ: Mapping[str, str], name: str, least: int, most: int = MOST) -> int | None:
    """Return a variable as a whole number; ``None`` if it is not set or empty.

    Raises UsageError if it is no whole number from ``least`` to ``most``.
    """
    text = environ.get(name, "")
    if not text:
        return None
    if re.fullmatch(r"0|[1-9][0-9]{0,8}", text) and least <= int(text) <= most:
        return int(text)
    raise UsageError(f"{name}={text[:80]}: not a whole number from {least} to {most}")


def clean_environment(plan: Plan) -> dict[str, str]:
    """Return the environment for a run: only what it needs, because the report of nsys keeps the environment."""
    kept = {name: value for name, value in plan.environ.items() if KEPT_VARIABLES.fullmatch(name)}
    if plan.place:
        kept |= {name: value for name, value in plan.environ.items() if MEETING_VARIABLES.fullmatch(name)}
        kept |= plan.place
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", **kept}


def digest_plan(plan: Plan, profiler: str | None) -> str:
    """Return a digest of all that determines the content of a capture: machine, settings, versions and code."""
    machine = [*platform.uname()[:3], platform.machine(), str(os.cpu_count()), *plan.gpus]
    for file, pattern in (("/etc/machine-id", ".*"), ("/proc/cpuinfo", "model name.*")):
        with suppress(OSError):
            found = re.search(pattern, Path(file).read_text(encoding="utf-8", errors="replace"))
            machine.append(found[0] if found else "")
    settings = [plan.environ.get(name, "") for name in ("NSYS_FLAGS", "CAPTURE_RANGE", "GPU_METRICS", "TORCHRUN")]
    versions = [str(profiler), installed("torch"), installed("nvtx")]
    variables = [f"{name}={value}" for name, value in sorted(clean_environment(plan).items())]
    everything = [*machine, *settings, *versions, *variables, *plan.workload, digest_code()]
    everything.append(inspect.getsource(profile_command))
    return sha256("\0".join(everything).encode(errors="surrogateescape")).hexdigest()


def digest_code(package: Path = PACKAGE) -> str:
    """Return a digest of the package's code that the ranks run; code that records or reads captures is left out."""
    ground = (package / f"{name}.py" for name in ("bucket_assignment", "range_names", "run_config", "variants"))
    contents = sha256()
    for file in sorted([*package.glob("ddp/**/*.py"), *package.glob("train/**/*.py"), *ground]):
        contents.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes() + b"\0")
    return contents.hexdigest()[:16]


def say(text: str) -> None:
    sys.stderr.write(f"profile_variant: {text}\n")
    sys.stderr.flush()


class Captured(NamedTuple):
    """A capture.

    Attributes:
        name: Name of its files, without suffixes.
        seconds: How long it took; ``None`` if an existing capture was up to date.
        profiler: What recorded it; ``None`` if nothing did, or it was there.
    """

    name: str
    seconds: float | None = None
    profiler: str | None = None

    @property
    def took(self) -> str:
        """How long it took, in words."""
        return "up to date" if self.seconds is None else f"{self.seconds:.0f} s"

    @property
    def text(self) -> str:
        """One line that says what was done."""
        how = "" if self.seconds is None else f"captured by {self.profiler or 'no profiler'} in "
        return f"{self.name}: {how}{self.took}"


def capture(argv: Sequence[str], environ: Mapping[str, str]) -> Captured:
    """Capture a variant, unless an existing capture is up to date.

    ``argv`` are the arguments, ``environ`` holds the settings. After an error an existing capture is unchanged.
    """
    began = time.monotonic()
    plan = read_plan(argv, environ)
    nsys, profiler = _choose_profiler(environ)
    key = digest_plan(plan, profiler)
    try:
        plan.traces.mkdir(parents=True, exist_ok=True)
        if _is_done(plan, nsys, profiler, key):
            return Captured(plan.name)
        holding = nullcontext() if plan.part else _hold_output(plan.traces)  # parts are made at the same time
        with holding, scratch_folder() as scratch, _partial_folder(plan) as partial:
            if _is_done(plan, nsys, profiler, key):  # the process that held the folder has made this capture
                return Captured(plan.name)
            # Before anything runs; what is recorded goes into another folder first.
            plan.job(partial, nsys, profiler, key).refuse_to_replace(plan.traces, plan.ranks)
            try:
                _record(plan, nsys, profiler, key, scratch, partial)
            except WorkloadError as error:
                if full := [folder for folder in (scratch.parent, plan.traces) if _is_full(folder)]:
                    raise WorkloadError(f"{full[0]} is full, make room there: {error}") from error
                raise
    except WorkloadError as error:
        raise WorkloadError(f"{plan.name}: {error}") from error
    except OSError as error:
        hint = "set TRACES_DIR to a folder of yours, with room"
        raise WorkloadError(f"{error.filename or plan.traces}: {error.strerror}: {hint}") from error
    return Captured(plan.name, time.monotonic() - began, profiler)


def _is_full(folder: Path) -> bool:
    """Return whether a folder has no room; what nsys and torch say of that is not always plain."""
    return shutil.disk_usage(folder).free < LEAST_ROOM


def _choose_profiler(environ: Mapping[str, str]) -> tuple[Nsys | None, str | None]:
    """Return the nsys that records, or ``None``, and the profiler's name in ``run.json``, or ``None``.

    The name is such as ``nsys 2022.4.2.1`` or ``torch.profiler 2.13.0``, and ``None`` if nothing is to record.
    """
    profiler = environ.get("PROFILER") or "auto"
    if profiler not in {"auto", "nsys", "kineto", "none"}:
        raise UsageError(f"PROFILER={profiler}: choose nsys, kineto, none or auto")
    if profiler == "none":
        return None, None
    nsys, why = choose_nsys(
        "torch" if profiler == "kineto" else profiler, environ, may_fetch=True, instead="PROFILER=kineto"
    )
    if nsys is not None:
        return nsys, f"nsys {nsys.version}"
    if profiler == "auto":
        say(f"torch.profiler records, {why}")
    return None, f"torch.profiler {installed('torch')}"


def _is_done(plan: Plan, nsys: Nsys | None, profiler: str | None, key: str) -> bool:
    """Whether the capture exists, complete and up to date, and is not forced.

    False for a part, because the other parts are not known.
    """
    if plan.part or plan.is_set("FORCE"):
        return False
    with suppress(OSError, ValueError, AttributeError):
        made_from = json.loads((plan.traces / f"{plan.name}.run.json").read_bytes()).get("key")
        suffixes = [".nsys-rep", ".sqlite"] if nsys else [".rank0.json.gz"] if profiler else []
        sizes = [(plan.traces / f"{plan.name}{suffix}").stat().st_size for suffix in suffixes]
        return made_from == key and all(sizes)
    return False


@contextmanager
def _hold_output(traces: Path) -> Iterator[None]:
    """Lock the folder of the captures in the block, and remove first what killed captures left in it."""
    with hold_folder(traces, lambda: say(f"waiting for another capture into {traces}")):
        for left in traces.glob(".*.partial"):  # left by captures that were killed
            if not re.search(r"\.(rank|node)[0-9]+\.partial$", left.name):  # other processes may still write parts
                shutil.rmtree(left, ignore_errors=True)
        yield


@contextmanager
def _partial_folder(plan: Plan) -> Iterator[Path]:
    """Return a context with a folder for the files of a capture until all of them exist.

    At the end the folder is removed. A ``.qdstrm``, a recording that could not be imported, is kept.
    """
    partial = plan.traces / f".{plan.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
    finally:
        for recorded in partial.glob("*.qdstrm"):
            recorded.replace(plan.traces / recorded.name)
        shutil.rmtree(partial, ignore_errors=True)


def _record(plan: Plan, nsys: Nsys | None, profiler: str | None, key: str, scratch: Path, partial: Path) -> None:
    """Run the capture, check its files and move them to their folder.

    ``run.json`` is moved last, so that its presence proves that all other files are there.

    Args:
        plan: What to capture.
        nsys: The nsys that records, if any.
        profiler: The profiler's name, ``None`` if nothing records.
        key: The digest for ``run.json``.
        scratch: The temporary folder of the run.
        partial: The folder for the files until they are complete.

    Raises:
        WorkloadError: The run failed, took too long, or its capture lacks data.
    """
    job = plan.job(partial, nsys, profiler, key)
    log = scratch / "log"
    # nsys opens sockets in TMPDIR, whose paths must be short.
    environ = {**clean_environment(plan), "HOME": str(scratch), "TMPDIR": str(scratch)}
    namespace = _namespace(plan) if nsys else []
    # Start again if nsys has failed by its race; anything else ends the loop.
    for _ in range(NSYS_STARTS):
        log.write_bytes(b"")
        with _follow_log(log) if plan.is_set("VERBOSE") else nullcontext():
            code = run(job.command, environ, scratch, log=log, namespace=namespace, limit_s=plan.limit_s)
        is_done = code == 0 and (plan.part or (partial / f"{plan.base}.run.json").is_file())
        if is_done or not LOST_RACE.search(log.read_bytes()):
            break
    reason = find_reason(log, code, profiler or "the launcher")
    if plan.limit_s is not None and code == NOT_DONE:
        raise WorkloadError(f"the run was not done after {plan.limit_s} s: {reason}")
    # Rank 0 writes run.json on success. The exit code may be that of nsys, so it counts only if other
    # processes capture the other ranks, and rank 0 may be one of theirs.
    if not (partial / f"{plan.base}.run.json").is_file() and not (plan.part and code == 0):
        is_of_nsys = nsys is not None and b"ddp_prof.train: error: " not in log.read_bytes()
        instead = "; without nsys: PROFILER=kineto" if is_of_nsys else ""
        raise WorkloadError(f"the workload failed (exit code {code}): {reason} [all output: VERBOSE=1{instead}]")
    if profiler:
        hint = "; try CAPTURE_RANGE=none, or ISOLATE=0" if plan.on_gpus else ""
        export_reports(job, plan.environ, find_reason(log, 0, "nsys") + hint)
        try:
            losses = find_losses(job)
        except TraceError as error:  # the file is removed, so its path would lead nowhere
            hint = "capture again, with another nsys (NSYS), or with PROFILER=kineto"
            raise WorkloadError(
                f"what {profiler} wrote cannot be read ({error.path.name}: {error.reason[:200]}): {hint}"
            ) from error
        for loss in losses:
            hint = ", with CAPTURE_RANGE=none, another nsys, or PROFILER=kineto" if plan.on_gpus and nsys else ""
            raise WorkloadError(f"{loss}: capture again{hint}")
    job.remove_old(plan.traces, plan.ranks)
    # False sorts before True, so run.json is the last.
    for file in sorted(partial.iterdir(), key=lambda file: file.name.endswith(".run.json")):
        file.chmod(0o644)
        file.replace(plan.traces / file.name)


def _namespace(plan: Plan) -> list[str]:
    """Return the command prefix for a process namespace; empty if ``ISOLATE=0`` or it is not possible.

    It is empty, too, for ranks of a launcher and under CUDA's multi-process service: they need the machine's namespace.
    """
    pipe = Path(plan.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps", "control")  # noqa: S108
    if not plan.is_set("ISOLATE", "1") or plan.place or (plan.on_gpus and pipe.exists()):
        return []
    words = process_namespace()
    if not words:
        _say_once("no process namespace here, so the report also holds the environments of other processes")
    return words


@cache
def _say_once(text: str) -> None:
    """Print a line to stderr the first time: profile_all.sh captures all variants in one process."""
    say(text)


@contextmanager
def _follow_log(log: Path) -> Iterator[None]:
    """Print to stderr, in the block, what is appended to the log."""
    with subprocess.Popen(["tail", "-f", str(log)], stdout=sys.stderr) as tail:  # noqa: S603, S607
        try:
            yield
        finally:
            time.sleep(0.2)  # let tail print the last lines
            tail.terminate()
