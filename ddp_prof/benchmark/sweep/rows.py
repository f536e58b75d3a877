"""Rows of the results database: from the ``run.json`` of a run, or from the reason why there is none."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ddp_prof.benchmark.grid import train_arguments
from ddp_prof.benchmark.store import FAILED, OK, OUT_OF_MEMORY, Message, Run, StepTime
from ddp_prof.benchmark.sweep.identity import run_id
from ddp_prof.errors import OutOfMemoryError
from ddp_prof.manifest import caveats_of
from ddp_prof.train.sizes import MODEL_SIZES

if TYPE_CHECKING:
    from ddp_prof.benchmark.grid import Conditions, Job
    from ddp_prof.benchmark.sweep.probe import Machine
    from ddp_prof.errors import WorkloadError
    from ddp_prof.manifest import Manifest

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Finished:
    """A run with all that was measured in it."""

    run: Run
    steps: tuple[StepTime, ...] = ()
    messages: tuple[Message, ...] = ()


def finished(job: Job, conditions: Conditions, machine: Machine, outcome: Manifest | WorkloadError) -> Finished:
    """The rows of a run that ended, well or not."""
    run = _run(job, conditions, machine, outcome)
    if isinstance(outcome, Exception):
        return Finished(run)
    return Finished(
        run,
        tuple(StepTime(run=run.id, **asdict(times)) for times in outcome.host_times),
        tuple(Message(run=run.id, **asdict(times)) for times in outcome.messages),
    )


def _run(job: Job, conditions: Conditions, machine: Machine, outcome: Manifest | WorkloadError) -> Run:
    setting, size = job.setting, MODEL_SIZES[job.setting.model_size]
    manifest = None if isinstance(outcome, Exception) else outcome
    return Run(
        id=run_id(job, conditions, machine.environment.id),
        environment=machine.environment.id,
        repeat=job.repeat,
        variant=setting.variant,
        bucket_size_mb=setting.bucket_size_mb,
        model_size=setting.model_size,
        d_model=size.d_model,
        num_layers=size.layers,
        parameters=size.parameters,
        gradient_bytes=FLOAT32_BYTES * size.parameters,
        world_size=setting.world_size,
        backend=manifest.backend if manifest else None,
        device=manifest.device if manifest else None,
        local_batch_size=setting.local_batch_size,
        seq_len=setting.seq_len,
        warmup=conditions.warmup,
        steps=conditions.steps,
        status=_status(outcome),
        reason=None if manifest else str(outcome),
        caveat="; ".join(caveats_of(manifest)) or None if manifest else None,
        collectives=manifest.collectives if manifest else None,
        communicated_bytes=manifest.communicated_bytes if manifest else None,
        peak_memory_bytes=manifest.peak_memory_bytes if manifest else None,
        tokens=setting.world_size * setting.local_batch_size * setting.seq_len,
        created=manifest.created if manifest else datetime.now(timezone.utc).isoformat(timespec="seconds"),
        git_commit=machine.git_commit,
        command=" ".join(("python -m ddp_prof.train", *train_arguments(setting, conditions))),
        code=machine.code,
    )


def _status(outcome: Manifest | WorkloadError) -> str:
    if not isinstance(outcome, Exception):
        return OK
    return OUT_OF_MEMORY if isinstance(outcome, OutOfMemoryError) else FAILED
