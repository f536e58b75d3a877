"""What is asked of a capture: settings and arguments, checked before anything begins, and the digest of all of it."""

from __future__ import annotations

import io
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ddp_prof.capture.code import digest_code
from ddp_prof.capture.gpus import visible_gpus
from ddp_prof.errors import DdpProfError
from ddp_prof.train.arguments import Arguments, parse_arguments
from ddp_prof.train.launch import most_ranks
from ddp_prof.variants import BUCKETED, VARIANTS, variant_extras

CHECKOUT = Path(__file__).parents[2]
MOST = 999_999_999
KEPT_VARIABLES = re.compile(
    r"(CUDA|NCCL|GLOO|OMP|MKL|(PY)?TORCH|TORCHINDUCTOR|TRITON|FI|OFI_NCCL|UCX)_[A-Za-z0-9_]*"
    r"|NVIDIA_TF32_OVERRIDE|CUBLAS_WORKSPACE_CONFIG|LD_LIBRARY_PATH|CC|CXX"
)
LAUNCHER_VARIABLES = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_[A-Z_]*"
)


class UsageError(DdpProfError):
    """A setting or an argument that no capture can have."""


@dataclass(frozen=True)
class Plan:
    """A capture that is asked for.

    Attributes:
        environ: The settings.
        workload: The command line of ``ddp_prof.train``.
        base: The capture's name.
        ranks: That run on this machine, or where a launcher started this once per rank, of all machines.
        rank: The one that is captured, where a launcher started this once per rank.
        gpus: Names of those that a process sees.
        on_gpus: Whether the ranks run there.
        traces: Folder for the files.
        limit_s: For the recorded run.
    """

    environ: Mapping[str, str]
    workload: tuple[str, ...]
    base: str
    ranks: int
    rank: int | None
    gpus: tuple[str, ...]
    on_gpus: bool
    traces: Path
    limit_s: int | None

    @property
    def torchrun(self) -> list[str]:
        """Arguments with which torchrun starts the ranks of this machine; none where they are started without it."""
        words = self.environ.get("TORCHRUN", "").split()
        return ["-m", "torch.distributed.run", *words, "--nproc-per-node", str(self.ranks)] if words else []

    @property
    def name(self) -> str:
        """What the files are called: the capture's name, or that of one part, of which others make the rest."""
        if self.rank is not None:
            return f"{self.base}.rank{self.rank}"
        node = self.environ.get("NODE_RANK", "") if self.torchrun else ""
        return f"{self.base}.node{node}" if node else self.base

    @property
    def is_part(self) -> bool:
        """Whether other processes or machines make the other files of this capture."""
        return self.name != self.base

    @property
    def python(self) -> str:
        """What runs the workload."""
        venv = self.environ.get("VENV")
        return f"{venv}/bin/python" if venv else sys.executable

    @property
    def nsys_flags(self) -> list[str]:
        """Further flags of nsys profile."""
        try:
            return shlex.split(self.environ.get("NSYS_FLAGS", ""))
        except ValueError as error:
            raise UsageError(f"NSYS_FLAGS: {error}") from error

    def is_set(self, name: str, default: str = "0") -> bool:
        """Whether a setting says 1."""
        return self.environ.get(name, default) == "1"


def read_plan(argv: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """What is asked for; every number is checked before anything is calculated.

    Raises:
        UsageError: It is not to be had.
    """
    variant, size, more = _split(argv)
    launched = bool(environ.get("RANK"))
    most = 1_000_000 if launched else most_ranks()
    world, ngpu = (_whole(environ, name, 1, most) for name in ("WORLD_SIZE", "NGPU"))
    rank = _whole(environ, "RANK", 0, MOST)
    local_world = _whole(environ, "LOCAL_WORLD_SIZE", 1, MOST)
    sharing = _whole(environ, "RANKS_PER_GPU", 1, MOST)
    for name, least in (("LOCAL_RANK", 0), ("NODE_RANK", 0), ("SEQ_LEN", 1), ("STEPS", 1), ("WARMUP", 0)):
        _whole(environ, name, least, MOST)
    if launched and world is None:
        raise UsageError("a launcher that sets RANK sets WORLD_SIZE, too")
    ranks = (world if launched else ngpu or world) or 2
    batch_size = _whole(environ, "BATCH_SIZE", 1, MOST) or 2 * ranks * _nodes(environ)

    gpus = visible_gpus(environ)
    device = environ.get("DEVICE") or "auto"
    if device == "auto":
        here = (local_world or ranks) if launched else ranks
        device = "cuda" if len(gpus) * (sharing or 1) >= here else "cpu"
    workload = ["--variant", variant, *(["--bucket-size-mb", size] if size else [])]
    if not launched and not environ.get("TORCHRUN"):  # a launcher tells it
        workload += ["--world-size", str(ranks)]
    workload += [
        "--device",
        device,
        "--model-size",
        environ.get("MODEL_SIZE") or ("medium" if device == "cuda" else "mini"),
    ]
    workload += ["--batch-size", str(batch_size), "--seq-len", environ.get("SEQ_LEN") or "128"]
    workload += ["--steps", environ.get("STEPS") or "10", "--warmup", environ.get("WARMUP") or "2"]
    workload += ["--backend", environ["BACKEND"]] if environ.get("BACKEND") else []
    workload += ["--ranks-per-gpu", str(sharing)] if sharing else []
    workload += more
    return Plan(
        environ=environ,
        workload=tuple(workload),
        base=_name(_parsed(workload), has_size=bool(size) or variant == BUCKETED),
        ranks=ranks,
        rank=rank,
        gpus=tuple(gpus),
        on_gpus=device == "cuda",
        traces=Path(environ.get("TRACES_DIR") or CHECKOUT / "traces" / "local"),
        limit_s=_whole(environ, "LIMIT_S", 1, MOST),
    )


def _split(argv: Sequence[str]) -> tuple[str, str | None, list[str]]:
    """The variant, its bucket size, and what goes on to the workload."""
    own, more = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, more = own[:at], own[at + 1 :]
    size = None
    if "--bucket-size-mb" in own:
        at = own.index("--bucket-size-mb")
        if at + 1 == len(own):
            raise _wrong_usage("--bucket-size-mb needs a number")
        size = own[at + 1]
        own[at : at + 2] = []
    if options := [word for word in own if word.startswith("-")]:
        raise _wrong_usage(f"no such option: {options[0]}")
    if len(own) != 1:
        raise _wrong_usage(f"one variant at a time, not {own}" if own else "which variant?")
    if own[0] not in VARIANTS:
        raise _wrong_usage(f"no such variant: {own[0]}; there are {', '.join(VARIANTS)}")
    return own[0], size, more


def _wrong_usage(reason: str) -> UsageError:
    usage = "profile_variant.sh VARIANT [--bucket-size-mb MB] [-- arguments of ddp_prof.train]"
    return UsageError(f"{reason}; usage: {usage}")


def _whole(environ: Mapping[str, str], name: str, least: int, most: int) -> int | None:
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


def _parsed(workload: Sequence[str]) -> Arguments:
    """What the workload will make of its command line, found out before anything begins."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return parse_arguments(workload)
    except SystemExit as end:
        raise UsageError(said.getvalue().strip().rpartition("error: ")[2]) from end


def _name(arguments: Arguments, *, has_size: bool) -> str:
    """The variant with its bucket size and options: ``bucketed_25mb``, ``torch_bf16``."""
    size = arguments.bucket_size_mb
    sizes = ["unbounded" if size is None else f"{size:g}mb"] if has_size else []
    return "_".join([arguments.variant, *sizes, *variant_extras(arguments.manifest_options())]).replace(" ", "_")


def clean_environment(plan: Plan) -> dict[str, str]:
    """What a run is given: a report keeps its environment, so only what concerns it."""
    environ = plan.environ
    kept = {name: value for name, value in environ.items() if KEPT_VARIABLES.fullmatch(name)}
    if plan.rank is not None:
        kept |= {name: value for name, value in environ.items() if LAUNCHER_VARIABLES.fullmatch(name)}
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", **kept}


def digest_plan(plan: Plan, profiler: str | None) -> str:
    """Of machine, settings and code: of all that decides what a capture holds."""
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


def installed(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return ""
