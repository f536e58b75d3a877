"""Settings and arguments of a capture of a variant, checked before anything begins, and their digest."""

from __future__ import annotations

import argparse
import io
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from ddp_prof.capture.command_line import CAPTURE_RANGE, Recording, profile_command
from ddp_prof.capture.gpus import visible_gpus
from ddp_prof.capture.job import CHECKOUT, PACKAGE, Job, installed, read_place
from ddp_prof.errors import DdpProfError
from ddp_prof.ingest.nsys_program import Nsys
from ddp_prof.train.arguments import parse_arguments
from ddp_prof.train.launch import most_ranks
from ddp_prof.variants import BUCKETED, VARIANTS, variant_extras

MOST = 999_999_999
KEPT_VARIABLES = re.compile(
    r"(CUDA|NCCL|GLOO|OMP|MKL|(PY)?TORCH|TORCHINDUCTOR|TRITON|FI|OFI_NCCL|UCX)_[A-Za-z0-9_]*"
    r"|NVIDIA_TF32_OVERRIDE|CUBLAS_WORKSPACE_CONFIG|LD_LIBRARY_PATH|CC|CXX"
)
MEETING_VARIABLES = re.compile(r"MASTER_ADDR|MASTER_PORT|TORCHELASTIC_[A-Z_]*")
FIRST_PORT = 29500
"""Where ranks that SLURM starts meet, unless MASTER_PORT says it: jobs that share a node have a port each."""
Parsed = TypeVar("Parsed")


class UsageError(DdpProfError):
    """A setting or an argument that no capture can have."""


@dataclass(frozen=True)
class Plan:
    """A requested capture.

    Attributes:
        environ: The settings.
        workload: The command line of ``ddp_prof.train``.
        base: The capture's name.
        ranks: That run on this machine, or where a launcher started this once per rank, of all machines.
        place: Of the rank that is captured, where a launcher started this once per rank: torchrun's variables.
        gpus: Names of those that a process sees.
        on_gpus: Whether the ranks run there.
        traces: Folder for the files.
        nsys_flags: Further flags of nsys profile.
        limit_s: For the recorded run.
    """

    environ: Mapping[str, str]
    workload: tuple[str, ...]
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
        """Arguments with which torchrun starts the ranks of this machine; none where they are started without it."""
        words = self.environ.get("TORCHRUN", "").split()
        return ["-m", "torch.distributed.run", *words, "--nproc-per-node", str(self.ranks)] if words else []

    @property
    def part(self) -> str:
        """Suffix of this process's files among those of other processes or machines of the capture."""
        if self.place:
            return f".rank{self.place['RANK']}"
        node = self.environ.get("NODE_RANK", "") if self.torchrun else ""
        return f".node{node}" if node else ""

    @property
    def name(self) -> str:
        return self.base + self.part

    @property
    def python(self) -> str:
        """What runs the workload."""
        venv = self.environ.get("VENV")
        return f"{venv}/bin/python" if venv else sys.executable

    def is_set(self, name: str, default: str = "0") -> bool:
        return self.environ.get(name, default) == "1"

    def job(self, folder: Path, nsys: Nsys | None, profiler: str | None, key: str) -> Job:
        """What is run, and the files that come of it; ``profiler`` is what ``run.json`` says of the recorder."""
        program = [self.python, *self.torchrun, "-m", "ddp_prof.train", *self.workload]
        program += ["--run-json", str(folder / f"{self.base}.run.json"), "--key", key]
        program += ["--profiler", profiler] if profiler else []
        if nsys is not None:
            capture_range = self.environ.get("CAPTURE_RANGE") or CAPTURE_RANGE
            recording = Recording(
                folder / self.name,
                traces_cuda=self.on_gpus,
                capture_range=None if capture_range == "none" else capture_range,
                # One process per node can.
                samples_gpus=self.is_set("GPU_METRICS") and self.place.get("LOCAL_RANK", "0") == "0",
                flags=self.nsys_flags,
            )
            program = profile_command(nsys, recording, program)
        elif profiler:
            program += ["--kineto", str(folder / f"{self.base}.json.gz")]
        # Which ranks torchrun gave this of several nodes is its own affair.
        ranks = [int(self.place["RANK"])] if self.place else [] if self.part else range(self.ranks)
        return Job(tuple(program), folder, self.base, self.part, nsys, self.on_gpus, ranks)


def read_plan(argv: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """What is asked for; every number is checked before anything is calculated.

    Raises:
        UsageError: It is not to be had.
    """
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        "profile_variant.sh",
        description="Capture one variant. What follows -- is for python -m ddp_prof.train. Settings are environment "
        "variables; scripts/profile_variant.sh lists them.",
        epilog="Example: STEPS=5 scripts/profile_variant.sh bucketed --bucket-size-mb 25 -- --precision bf16",
        allow_abbrev=False,
    )
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--bucket-size-mb")
    asked = _parsed(parser.parse_args, argv[:at])

    place = read_place(environ)
    if place and "SLURM_JOB_ID" in environ:
        port = FIRST_PORT + (_whole(environ, "SLURM_JOB_ID", 0) or 0) % 1000
        environ = {"MASTER_PORT": str(port), **environ}
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        _whole(place, name, 0)
    _whole(environ, "NODE_RANK", 0)
    sharing = _whole(environ, "RANKS_PER_GPU", 1)
    local = "NGPU" if environ.get("NGPU") else "WORLD_SIZE"
    ranks = _whole(place, "WORLD_SIZE", 1) or _whole(environ, local, 1, most_ranks()) or 2

    gpus = visible_gpus(environ)
    device = environ.get("DEVICE") or "auto"
    if device == "auto":
        here = int(place.get("LOCAL_WORLD_SIZE", ranks))
        device = "cuda" if len(gpus) * (sharing or 1) >= here else "cpu"
    settings = {
        "--bucket-size-mb": asked.bucket_size_mb,
        # A launcher tells it.
        "--world-size": None if place or environ.get("TORCHRUN") else str(ranks),
        "--device": device,
        "--model-size": environ.get("MODEL_SIZE") or ("medium" if device == "cuda" else "mini"),
        "--batch-size": environ.get("BATCH_SIZE") or str(2 * ranks * _nodes(environ)),
        "--seq-len": environ.get("SEQ_LEN") or "128",
        "--steps": environ.get("STEPS") or "10",
        "--warmup": environ.get("WARMUP") or "2",
        "--backend": environ.get("BACKEND"),
        "--ranks-per-gpu": str(sharing) if sharing else None,
    }
    workload = ["--variant", asked.variant]
    workload += [word for option, value in settings.items() if value for word in (option, value)] + list(argv[at + 1 :])
    arguments = _parsed(parse_arguments, workload)
    size = arguments.bucket_size_mb
    has_size = asked.bucket_size_mb or asked.variant == BUCKETED
    sizes = ["unbounded" if size is None else f"{size:g}mb"] if has_size else []
    base = "_".join([asked.variant, *sizes, *variant_extras(arguments.manifest_options())]).replace(" ", "_")
    try:
        flags = shlex.split(environ.get("NSYS_FLAGS", ""))
    except ValueError as error:
        raise UsageError(f"NSYS_FLAGS: {error}") from error
    traces = Path(environ.get("TRACES_DIR") or CHECKOUT / "traces" / "local")
    limit_s = _whole(environ, "LIMIT_S", 1)
    return Plan(
        environ, tuple(workload), base, ranks, place, tuple(gpus), device == "cuda", traces, tuple(flags), limit_s
    )


def _parsed(parse: Callable[[Sequence[str]], Parsed], words: Sequence[str]) -> Parsed:
    """Parse a command line; a mistake is an error of one line."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return parse(words)
    except SystemExit as end:
        if not end.code:  # --help
            raise
        raise UsageError(said.getvalue().strip().rpartition("error: ")[2]) from end


def _whole(environ: Mapping[str, str], name: str, least: int, most: int = MOST) -> int | None:
    """A setting that is a whole number; ``None`` where it is not set."""
    text = environ.get(name, "")
    if not text:
        return None
    if re.fullmatch(r"0|[1-9][0-9]{0,8}", text) and least <= int(text) <= most:
        return int(text)
    raise UsageError(f"{name}={text[:80]}: no whole number from {least} to {most}")


def _nodes(environ: Mapping[str, str]) -> int:
    found = re.search(r"--nnodes[= ](?:[0-9]+:)?([0-9]+)", environ.get("TORCHRUN", ""))
    return _whole({"--nnodes": found[1]}, "--nnodes", 1, 1_000_000) or 1 if found else 1


def clean_environment(plan: Plan) -> dict[str, str]:
    """The environment of a run, without unrelated variables, because a report keeps it."""
    kept = {name: value for name, value in plan.environ.items() if KEPT_VARIABLES.fullmatch(name)}
    if plan.place:
        kept |= {name: value for name, value in plan.environ.items() if MEETING_VARIABLES.fullmatch(name)}
        kept |= plan.place
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", **kept}


def digest_plan(plan: Plan, profiler: str | None) -> str:
    """Digest of machine, settings and code: of all that determines what a capture holds."""
    machine = [*platform.uname()[:3], platform.machine(), str(os.cpu_count()), *plan.gpus]
    for file, pattern in (("/etc/machine-id", ".*"), ("/proc/cpuinfo", "model name.*")):
        with suppress(OSError):
            found = re.search(pattern, Path(file).read_text(encoding="utf-8", errors="replace"))
            machine.append(found[0] if found else "")
    settings = [plan.environ.get(name, "") for name in ("NSYS_FLAGS", "CAPTURE_RANGE", "GPU_METRICS", "TORCHRUN")]
    versions = [str(profiler), installed("torch"), installed("nvtx")]
    given = [f"{name}={value}" for name, value in sorted(clean_environment(plan).items())]
    flags = Path(__file__).with_name("command_line.py").read_text(encoding="utf-8")
    everything = [*machine, *settings, *versions, *given, *plan.workload, digest_code(), flags]
    return sha256("\0".join(everything).encode(errors="surrogateescape")).hexdigest()


def digest_code(package: Path = PACKAGE) -> str:
    """Digest of the code that the ranks run, without the code that records and reads."""
    ground = (package / f"{name}.py" for name in ("range_names", "run_config", "variants"))
    contents = sha256()
    for file in sorted([*package.glob("ddp/**/*.py"), *package.glob("train/**/*.py"), *ground]):
        contents.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes() + b"\0")
    return contents.hexdigest()[:16]
