"""What a capture lacks that its job should have recorded: ranks, steps, kernels, collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ddp_prof.capture.job import Job
from ddp_prof.capture.preflight import FIRST_SILENT_NVTX, LAST_OLD_NSYS
from ddp_prof.errors import WorkloadError
from ddp_prof.ingest.nsys_program import Nsys
from ddp_prof.range_names import BACKWARD, STEP

if TYPE_CHECKING:
    from ddp_prof.analyze.inventory import ProcessInventory, TraceInventory


def find_losses(job: Job, contents: Sequence[TraceInventory] = ()) -> list[str]:
    """Return one line for each kind of data that a capture lacks.

    ``contents`` are inventories of the job's traces; if they are not given, the traces are read. Raises WorkloadError
    if there is no trace.
    """
    # Imported here because they load numpy.
    from ddp_prof.analyze.inventory import take_inventory
    from ddp_prof.ingest.load import load_trace

    files = job.traces
    if not files:
        hint = (
            "did the program train anything (DDP, FSDP2, backward, optimizer), reach the first step of --steps, and "
            "end by itself? a program that is killed, or calls os._exit or exec, needs --steps, as 1:10; one that "
            "starts its ranks without its own variables, or by python -I or -E, must pass them on (PYTHONPATH, "
            "DDP_PROF_*); what goes on in the background is read by 'ddp-prof overlap' when it has ended"
        )
        raise WorkloadError(f"no rank wrote a trace into {job.folder}: {hint}")
    contents = contents or [take_inventory(load_trace(file)) for file in files]
    names = [name for content in contents for _, name, _ in content.recognized]
    if not any(name.startswith((f"{STEP}|", BACKWARD)) for name in names):  # then nothing else can be said
        if job.nsys is None:
            return ["no step is marked: nothing of torch's DDP, FSDP2 or optimizers was seen"]
        return [f"no range arrived: {_why_no_range(job.nsys, is_variant=job.ranks is not None)}"]
    processes = [process for content in contents for process in content.processes]
    world = max(content.world_size or 0 for content in contents)
    return [
        *_lost_ranks_and_steps(job, processes, world),
        *_lost_kernels(job, processes),
        *_lost_collectives(job, processes, world),
    ]


def _lost_ranks_and_steps(job: Job, processes: Sequence[ProcessInventory], world: int) -> list[str]:
    """Return the losses of whole ranks, and of steps; ``world`` is the world size in the traces, 0 if not known."""
    losses = []
    steps: Counter[int] = Counter()  # of each rank, over all files
    for process in processes:
        if process.rank is not None:
            steps[process.rank] += process.steps + process.warmup_steps + process.incomplete_steps
    expected = job.ranks if job.ranks is not None else () if job.part else range(world)
    if missing := set(expected) - set(steps):
        absent, pronoun = ("is", "it") if len(missing) == 1 else ("are", "they")
        why = f"{pronoun} may have been killed, have called os._exit, have trained nothing, or have run elsewhere"
        losses.append(f"{_format_ranks(missing)} {absent} not in the capture: {why}")
    most = max([0 if job.ranks is None else 1, *steps.values()])  # our variants have at least one step
    if incomplete := {rank for rank in steps if steps[rank] < most}:
        # The ranks of our variants make the same number of steps.
        uneven = f", or {'it' if len(incomplete) == 1 else 'they'} made fewer than the other ranks"
        losses.append(f"steps of {_format_ranks(incomplete)} are missing{uneven if job.ranks is None else ''}")
    first, _, end = (job.steps or "").partition(":")
    if end and (asked := int(end) - int(first)) > most:
        losses.append(
            f"--steps {job.steps} asks for {asked}, and {most} arrived: did the program end before step {end}?"
        )
    return losses


def _lost_kernels(job: Job, processes: Sequence[ProcessInventory]) -> list[str]:
    """Return the loss of all kernels of some ranks, where the program is expected to use GPUs."""
    kernels: Counter[int] = Counter()  # of each rank, over all files
    for process in processes:
        if process.rank is not None:
            kernels[process.rank] += process.kernels
    has_kernels = any(process.kernels for process in processes)
    without = {rank for rank in kernels if not kernels[rank]}
    if not job.on_gpus or (has_kernels and not without):
        return []
    whose = f" of {_format_ranks(without)}" if has_kernels else ""
    return [f"no kernels arrived{whose}: did the program use the GPUs, and does this profiler fit the driver?"]


def _lost_collectives(job: Job, processes: Sequence[ProcessInventory], world: int) -> list[str]:
    """Return why a user's program has no communication in its capture, if it has none; ``world`` as above."""
    if job.ranks is not None:
        return []
    if not job.part and world < 2 and sum(process.ranges > 0 for process in processes) < 2:
        if world:  # it says itself that it is alone
            several = "start several, as by 'torchrun --nproc-per-node 2', to see what they exchange"
            return [f"the only rank has no other to communicate with (world size 1): {several}"]
        several = "does the launcher start several that train (DDP, FSDP2, backward, optimizer)?"
        return [f"only one process was recorded: {several}"]
    is_recorded = job.on_gpus or any(process.kernels or process.marked_collectives for process in processes)
    if not job.nsys or is_recorded:
        return []
    seen = "on a CPU nsys sees those of DistributedDataParallel and FSDP2 only"
    return [f"no collective was recorded: {seen}, --profiler torch records all"]


def _why_no_range(nsys: Nsys, *, is_variant: bool) -> str:
    """Return what may keep all ranges of a program out of a report of nsys; one of our variants has trained surely."""
    last_old = ".".join(map(str, LAST_OLD_NSYS))
    package = f"the package nvtx (with nsys up to {last_old}, nvtx older than {FIRST_SILENT_NVTX})"
    needed = f"the program's Python needs {package}, or torch with CUDA; nsys here is {nsys.version}"
    if is_variant:
        return needed
    trained = (
        "did the program train with torch's DDP, FSDP2 or optimizers, reach the first step of --steps, and not fork "
        "its ranks, as nsys records no fork?"
    )
    return f"{trained} if so, {needed}; --profiler torch needs neither"


def _format_ranks(ranks: Collection[int]) -> str:
    """Return ``rank 3``, or ``ranks 0, 2``."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, sorted(ranks)))}"
