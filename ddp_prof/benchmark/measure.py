"""One run of the study: its id, the machine, how it is measured or captured, and its rows of the database."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

from ddp_prof.analyze import DEFINITIONS
from ddp_prof.benchmark.store import FAILED, OK, OUT_OF_MEMORY, Environment, StoredMessages, StoredRun, StoredStep
from ddp_prof.capture.variant import capture as capture_variant
from ddp_prof.capture.variant import digest_code
from ddp_prof.errors import DdpProfError, OutOfMemoryError, TraceError, WorkloadError
from ddp_prof.manifest import Manifest, caveats_of, load_manifest
from ddp_prof.run_config import RunConfig
from ddp_prof.train import MODEL_SIZES
from ddp_prof.train.launch import launch
from ddp_prof.variants import VARIANTS


@dataclass(frozen=True, slots=True)
class Job:
    config: RunConfig
    repeat: int

    def run_id(self, environment: str) -> str:
        """Digest of settings, repeat and environment.

        Not of the code that is measured: when that changes, the new run replaces the old one, so that a database never
        holds runs of two versions under one setting.
        """
        config = self.config
        cap = config.bucket_size_mb
        if cap is None and VARIANTS[config.variant].can_be_uncapped:
            cap = math.inf  # as in the ids of existing databases
        names = ("variant", "model_size", "world_size", "local_batch_size", "seq_len")
        setting = {name: getattr(config, name) for name in names} | {"bucket_size_mb": cap}
        conditions = {name: getattr(config, name) for name in ("steps", "warmup", "seed", "device", "backend")}
        return digest([{"setting": setting, "repeat": self.repeat}, conditions, environment])


def digest(value: Any) -> str:  # whatever JSON can hold
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Machine:
    environment: Environment
    gpus: int  # that torch can use
    git_commit: str | None
    code: str  # digest of the code that is measured


def probe_machine() -> Machine:
    """Ask a process that imports torch, so that this one need not; raises WorkloadError where it cannot."""
    code = "import json; from ddp_prof.train.record import describe_host; print(json.dumps(describe_host()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603  # our own
    if done.returncode:
        reason = next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")
        raise WorkloadError(f"torch does not work in {sys.prefix}: {reason}: run scripts/env.sh train")
    found = json.loads(done.stdout.splitlines()[-1])
    versions = {name: found["versions"].get(name) for name in ("python", "torch", "cuda", "nccl", "ddp_prof")}
    known = found["machine"] | versions
    return Machine(Environment(id=digest(known), **known), found["gpus"], found["git_commit"], digest_code())


def measure(config: RunConfig) -> Manifest | WorkloadError:
    """Make a run; returns its ``run.json``, or why it could not run."""
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as directory:
        run_json = Path(directory, "run.json")
        command = ["-m", "ddp_prof.train", *config.argv(), "--run-json", str(run_json)]
        try:
            launch(config.world_size or 1, command, log=Path(directory, "log"), forked=True)
        except WorkloadError as error:
            return error
        manifest = load_manifest(run_json)
    return manifest or WorkloadError("the ranks ended well, but left no run.json")


def rows_of(
    job: Job, machine: Machine, outcome: Manifest | WorkloadError
) -> tuple[StoredRun, list[StoredStep], list[StoredMessages]]:
    config, size = job.config, MODEL_SIZES[job.config.model_size]
    manifest = None if isinstance(outcome, Exception) else outcome
    measured = ("backend", "device", "collectives", "communicated_bytes", "peak_memory_bytes")
    reported: dict[str, Any] = {name: getattr(manifest, name, None) for name in measured}
    run = StoredRun(
        **config.row_fields(),
        id=job.run_id(machine.environment.id),
        environment=machine.environment.id,
        repeat=job.repeat,
        d_model=size.d_model,
        num_layers=size.layers,
        parameters=size.parameter_count,
        gradient_bytes=size.gradient_bytes(),
        **reported,
        status=OK if manifest else OUT_OF_MEMORY if isinstance(outcome, OutOfMemoryError) else FAILED,
        reason=None if manifest else str(outcome),
        caveat="; ".join(caveat.value for caveat in caveats_of(manifest)) or None if manifest else None,
        tokens=config.batch_size * config.seq_len,
        created=manifest.created if manifest else datetime.now(timezone.utc).isoformat(timespec="seconds"),
        git_commit=machine.git_commit,
        command=" ".join(("python -m ddp_prof.train", *config.argv())),
        code=machine.code,
        definitions=DEFINITIONS,
    )
    steps = [StoredStep(run=run.id, **asdict(times)) for times in manifest.host_times] if manifest else []
    messages = [StoredMessages(run=run.id, **asdict(times)) for times in manifest.messages] if manifest else []
    return run, steps, messages


def capture(config: RunConfig, folder: Path, *, force: bool) -> tuple[Path, dict[str, int | None]]:
    """Capture a run, or only read the capture of the same code that is there; its first file and its figures."""
    folder.mkdir(parents=True, exist_ok=True)
    config = replace(config, synchronized_steps=0)  # no capture shows them
    settings = {"TRACES_DIR": str(folder.absolute()), "VENV": sys.prefix, "FORCE": str(int(force)), "VERBOSE": "0"}
    settings |= {"DEVICE": config.device, "NGPU": str(config.world_size or 2)}
    try:
        with redirect_stderr(io.StringIO()):  # a sweep says one line per capture
            said = capture_variant(config.script_argv(), {**os.environ, **settings})
    except DdpProfError as error:
        raise WorkloadError(str(error)) from error
    name = said.partition(":")[0]  # "bucketed_10mb: captured by nsys 2022.4.2.1 in 6 s"
    files = sorted([*folder.glob(f"{name}.sqlite"), *folder.glob(f"{name}.rank*.json.gz")])
    if not files:
        raise WorkloadError(f"the capture left no trace in {folder}: is PROFILER=none?")
    return files[0], read_figures(files)


def read_figures(files: Sequence[Path]) -> dict[str, int | None]:
    """Columns of the database in nanoseconds, the figures of ``ddp-prof compare``; ``None`` is not known."""
    from ddp_prof.analyze.variants.comparison import compare_variants
    from ddp_prof.runs import load_runs
    from ddp_prof.runs.report import LoadOptions

    try:
        (run,) = load_runs(files, LoadOptions(one_run=True), measures=("overlap",))
        (summary,) = compare_variants([run.overlap()])
    except TraceError as error:
        raise WorkloadError(f"{files[0]} cannot be measured: {error}") from error
    return {f"trace_{part}_ns": getattr(summary, f"{part}_ns") for part in ("comm", "overlapped", "exposed", "tail")}
