"""One run of the workload, in processes and a process group of its own, and its rows of the results database."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_prof.benchmark.store import FAILED, OK, OUT_OF_MEMORY, StoredMessages, StoredRun, StoredStep
from ddp_prof.errors import OutOfMemoryError, WorkloadError
from ddp_prof.manifest import caveats_of, load_manifest
from ddp_prof.train.launch import launch
from ddp_prof.train.sizes import MODEL_SIZES

if TYPE_CHECKING:
    from ddp_prof.benchmark.sweep.grid import Job
    from ddp_prof.benchmark.sweep.probe import Machine
    from ddp_prof.manifest import Manifest
    from ddp_prof.run_config import RunConfig

MEASURED = ("backend", "device", "collectives", "communicated_bytes", "peak_memory_bytes")
"""What a run that failed does not tell."""


@dataclass(frozen=True, slots=True)
class RunRows:
    """A run with its measurements, as rows of the database."""

    run: StoredRun
    steps: tuple[StoredStep, ...] = ()
    messages: tuple[StoredMessages, ...] = ()


def measure(config: RunConfig) -> Manifest | WorkloadError:
    """Make a run; returns its ``run.json``, or why it could not run.

    Raises:
        Stopped: A signal asked this process to end; the ranks are gone.
    """
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as directory:
        run_json = Path(directory, "run.json")
        command = ["-m", "ddp_prof.train", *config.argv(), "--run-json", str(run_json)]
        try:
            launch(config.world_size or 1, command, log=Path(directory, "log"))
        except WorkloadError as error:
            return error
        manifest = load_manifest(run_json)
    return manifest or WorkloadError("the ranks ended well, but left no run.json")


def rows_of(job: Job, machine: Machine, outcome: Manifest | WorkloadError) -> RunRows:
    """The rows of a run that ended, well or not."""
    run = _run(job, machine, outcome)
    if isinstance(outcome, Exception):
        return RunRows(run)
    return RunRows(
        run,
        tuple(StoredStep(run=run.id, **asdict(times)) for times in outcome.host_times),
        tuple(StoredMessages(run=run.id, **asdict(times)) for times in outcome.messages),
    )


def _run(job: Job, machine: Machine, outcome: Manifest | WorkloadError) -> StoredRun:
    config, size = job.config, MODEL_SIZES[job.config.model_size]
    manifest = None if isinstance(outcome, Exception) else outcome
    reported: dict[str, Any] = {name: getattr(manifest, name, None) for name in MEASURED}
    return StoredRun(
        **config.row_fields(),
        id=job.run_id(machine.environment.id),
        environment=machine.environment.id,
        repeat=job.repeat,
        d_model=size.d_model,
        num_layers=size.layers,
        parameters=size.parameters,
        gradient_bytes=size.gradient_bytes(),
        **reported,
        status=_status(outcome),
        reason=None if manifest else str(outcome),
        caveat="; ".join(caveat.value for caveat in caveats_of(manifest)) or None if manifest else None,
        tokens=config.batch_size * config.seq_len,
        created=manifest.created if manifest else datetime.now(timezone.utc).isoformat(timespec="seconds"),
        git_commit=machine.git_commit,
        command=" ".join(("python -m ddp_prof.train", *config.argv())),
        code=machine.code,
    )


def _status(outcome: Manifest | WorkloadError) -> str:
    if not isinstance(outcome, Exception):
        return OK
    return OUT_OF_MEMORY if isinstance(outcome, OutOfMemoryError) else FAILED
