"""Runs one rank: makes model, data, variant and optimizer, trains, and writes the ``run.json``."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_prof import annotate, variants
from ddp_prof.ddp import VARIANTS, DataParallel, ShardedDDP
from ddp_prof.ddp.collective import communication_errors
from ddp_prof.ddp.reference import sent_bytes
from ddp_prof.errors import OutOfMemoryError, WorkloadError
from ddp_prof.manifest import Manifest, write_manifest
from ddp_prof.run_config import FAULTS, LEARNING_RATE, RunConfig
from ddp_prof.train import MODEL_SIZES
from ddp_prof.train.arguments import Arguments
from ddp_prof.train.process_group import RankInfo, Seat, check_memory, choose_seat, process_group
from ddp_prof.train.record import MessageLog, choose_recording, describe_run, peak_resident_bytes, write_errors
from ddp_prof.train.workload import (
    StepResult,
    Trainer,
    TransformerLM,
    activation_bytes,
    scatter_batches,
    wait_for_device,
)

NOTHING, HOST_SYNC, ONE_BUCKET, REVERSED, SLOW_RANK, STARVED = FAULTS  # the values of --inject
SLOWED_RANK, SLEEP_S = 1, 0.2
"""The rank that ``--inject slow-rank`` slows down, and how long it sleeps at the start of each backward."""
PROGRESS_LINES = 4
"""About how many lines about finished steps rank 0 prints."""


def check(arguments: Arguments, place: RankInfo) -> Seat:
    """Return the device and backend of this rank; raise WorkloadError if the run cannot work with these arguments.

    The result of the checks is the same on every rank. ``place`` is this rank's number and the number of ranks.
    """
    if arguments.world_size not in (None, place.world):
        raise WorkloadError(
            f"--world-size {arguments.world_size}, but torchrun started {place.world} ranks: leave it out"
        )
    if arguments.batch_size % place.world:
        raise WorkloadError(
            f"a batch of {arguments.batch_size} cannot be split evenly over {place.world} ranks: "
            f"use --batch-size {place.world * max(1, round(arguments.batch_size / place.world))}"
        )
    seat = choose_seat(arguments, place)
    check_numerics(arguments, seat.device)
    if seat.device.type == "cpu":
        check_memory(arguments.model_size, place.local_world)
    return seat


def run(blocks: Sequence[Arguments], place: RankInfo, seat: Seat) -> None:
    """Train the configurations in ``blocks``, one after another, in one process group; then write their ``run.json``.

    All of them use the device and backend in ``seat`` and the timeout of the first configuration.
    """
    for arguments in blocks:
        if arguments.accounting and place.rank == 0:
            _say(describe_step(arguments, place.world))
    with process_group(place, seat, blocks[0].timeout):
        manifests = [_run_block(arguments, place, seat) for arguments in blocks]
    if len(blocks) > 1:  # the peak of the process may be of another configuration
        manifests = [replace(manifest, peak_memory_bytes=None) for manifest in manifests]
    if place.rank == 0:
        for arguments, manifest in zip(blocks, manifests, strict=True):
            _report(arguments, manifest)


def _run_block(arguments: Arguments, place: RankInfo, seat: Seat) -> Manifest:
    """Train one configuration, free its memory and return its manifest."""
    waiting = blocking_collectives(seat.device) if arguments.inject == HOST_SYNC else nullcontext()
    with _clear_errors(arguments, place), waiting:
        trainer = make_trainer(arguments, seat.device, place.rank)
        manifest = _train(trainer, arguments, place, seat)
    del trainer  # its hooks refer to it
    gc.collect()
    if seat.device.type == "cuda":
        torch.cuda.empty_cache()
    return manifest


def _report(arguments: Arguments, manifest: Manifest) -> None:
    """Write the ``run.json``, if one is wanted, and print step time, waiting time, loss and kept memory."""
    if arguments.run_json is not None:
        with write_errors(arguments.run_json):
            write_manifest(manifest, arguments.run_json)
    step_ms = 1000 * statistics.median(manifest.step_seconds)
    waits = manifest.communication_seconds
    wait = f"{1000 * statistics.median(waits):.1f} ms" if waits else "n/a"
    _say(
        f"{arguments.variant}: step {step_ms:.1f} ms, waiting for gradients {wait} "
        f"(medians of {arguments.steps} on rank 0), final loss {manifest.final_loss:.4f}"
    )
    kept = (f"{name} {size / 2**20:.1f} MiB" for name, size in manifest.options["state_bytes"].items())
    _say(f"{arguments.variant}: rank 0 keeps between steps: {', '.join(kept)}")


def describe_step(arguments: Arguments, world: int) -> str:
    """Return a text about what a step of one rank computes, keeps and sends, calculated for float32.

    The model is on the meta device, so nothing is computed or allocated. ``world`` is the number of ranks.
    """
    size = MODEL_SIZES[arguments.model_size]
    local = arguments.batch_size // world
    with torch.device("meta"):
        model = TransformerLM(size, checkpoint_blocks=arguments.activation_checkpointing)
        kept = activation_bytes(model, torch.zeros(local, arguments.seq_len, dtype=torch.long))
    gradients = size.gradient_bytes()
    sent = sum(sent_bytes(parameter, arguments.comm_hook) for parameter in model.parameters())
    compressed = f", as {arguments.comm_hook} {sent / 2**20:.1f} MiB" if arguments.comm_hook else ""
    return (
        f"accounting of a step of one rank ({local} x {arguments.seq_len} tokens, float32): "
        f"{size.step_flops(local * arguments.seq_len, arguments.seq_len):.4g} FLOPs, "
        f"{size.parameter_count:,} parameters ({4 * size.parameter_count / 2**20:.1f} MiB), "
        f"activations {kept / 2**20:.1f} MiB (attention not fused), "
        f"gradients {gradients / 2**20:.1f} MiB{compressed}, sent by a ring all-reduce "
        f"{2 * (world - 1) / world * sent / 2**20:.1f} MiB"
    )


def make_trainer(arguments: Arguments, device: torch.device, rank: int) -> Trainer:
    """Make the model, the variant that wraps it and the optimizer, with the fault of ``--inject`` if there is one."""
    torch.manual_seed(arguments.seed)
    with device:
        model = TransformerLM(MODEL_SIZES[arguments.model_size], checkpoint_blocks=arguments.activation_checkpointing)
    set_numerics(model, arguments)
    variant = make_variant(arguments, ReversedModules(model) if arguments.inject == REVERSED else model)
    optimizer = torch.optim.AdamW(variant.optimizer_parameters(), lr=LEARNING_RATE, fused=device.type == "cuda")
    return Trainer(
        variant,
        optimizer,
        SLEEP_S if arguments.inject == SLOW_RANK and rank == SLOWED_RANK else 0.0,
        arguments.precision,
        begins_late=arguments.inject == STARVED,
    )


def make_variant(arguments: Arguments, model: torch.nn.Module) -> DataParallel:
    """Wrap the model in the variant that the arguments name, with those options that the variant has."""
    options: dict[str, Any] = {}
    if arguments.variant == "torch":
        options = {
            "bucket_cap_mb": arguments.bucket_size_mb,
            "mark_buckets": not arguments.no_communication_hook,
            "comm_hook": arguments.comm_hook,
            "gradient_as_bucket_view": arguments.gradient_as_bucket_view,
        }
    elif variants.VARIANTS[arguments.variant].takes_bucket_size:
        options = {"bucket_size_mb": None if arguments.inject == ONE_BUCKET else arguments.bucket_size_mb}
    make: Callable[..., DataParallel] = VARIANTS[arguments.variant]
    return make(model, find_unused_parameters=arguments.find_unused_parameters, **options)


def _train(trainer: Trainer, arguments: Arguments, place: RankInfo, seat: Seat) -> Manifest:
    """Train the warm-up steps, the measured steps and the synchronized steps; return the manifest of the run."""
    device, backend, ranks_per_gpu = seat
    steps = arguments.warmup + arguments.steps
    batches = scatter_batches(steps, arguments.batch_size, arguments.seq_len, arguments.seed, device)
    recording = choose_recording(device, arguments.kineto, place.rank, arguments.timeout)
    process = annotate.process(
        rank=place.rank,
        world=place.world,
        variant=arguments.variant,
        backend=backend,
        device=device.type,
        ranks_per_gpu=ranks_per_gpu,
    )

    def take(first: int, end: int) -> list[StepResult]:
        return [_step(trainer, batches, index, arguments, place) for index in range(first, end)]

    if recording:
        take(0, arguments.warmup)
    with recording or nullcontext(), process:
        # Without ``recording`` the whole process is recorded, or nothing: then the warm-up is part of it.
        results = take(arguments.warmup if recording else 0, steps)[-arguments.steps :]
        if isinstance(trainer.variant, ShardedDDP):  # torch.profiler crashes if it is stopped during gloo's work
            trainer.variant.wait_for_parameters()
    final_loss = _all_reduce(results[-1].loss, device, dist.ReduceOp.SUM) / place.world
    # The synchronized steps, which no profiler records: their ranges go only into the log. They use the batches of the
    # measured steps again.
    log = MessageLog(partial(wait_for_device, device if trainer.variant.is_blocking else torch.device("cpu")))
    with annotate.only_sink(log):
        chosen = (batches[arguments.warmup + index % arguments.steps] for index in range(arguments.synchronized_steps))
        results += [trainer.train_step(batch[:, :-1], batch[:, 1:], synchronized=True) for batch in chosen]
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()
    peak_bytes = round(_all_reduce(peak_bytes, device, dist.ReduceOp.MAX))
    times = [result.times for result in results]
    return describe_run(
        arguments, trainer, seat, times, log.summarize(), final_loss=final_loss, peak_memory_bytes=peak_bytes
    )


def _step(trainer: Trainer, batches: torch.Tensor, index: int, arguments: Arguments, place: RankInfo) -> StepResult:
    """Train step ``index``, counted from the first warm-up step; rank 0 prints a line now and then."""
    tokens = batches[index]
    is_warmup = index < arguments.warmup
    result = trainer.train_step(tokens[:, :-1], tokens[:, 1:], warmup=is_warmup)  # the targets are the next tokens
    total = len(batches)
    if place.rank == 0 and index % max(1, total // PROGRESS_LINES) == 0:
        kind = "warm-up step" if is_warmup else "step"
        _say(f"{kind} {index + 1}/{total}: loss {result.loss:.4f}, {result.times.step_ns / 1e6:.1f} ms")
    return result


def _all_reduce(value: float, device: torch.device, op: dist.ReduceOp.RedOpType) -> float:
    """Return the sum or maximum (``op``) of a number over the ranks."""
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total, op)
    return total.item()


@contextmanager
def _clear_errors(arguments: Arguments, place: RankInfo) -> Iterator[None]:
    """Raise, for errors in the block, CommunicationError or OutOfMemoryError with a message that users understand."""
    try:
        with communication_errors(None, "communication"):
            yield
    except (RuntimeError, MemoryError) as error:  # the CPU's allocator raises a plain RuntimeError
        is_known = isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError))
        if not is_known and "allocate memory" not in str(error):
            raise
        raise OutOfMemoryError(
            f"rank {place.rank}: out of memory with --model-size {arguments.model_size} --batch-size "
            f"{arguments.batch_size} --seq-len {arguments.seq_len}: choose smaller ones"
        ) from error


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def check_numerics(config: RunConfig, device: torch.device) -> None:
    """Raise WorkloadError if ``--tf32`` or ``--compile`` is not possible here."""
    if config.tf32 and device.type == "cpu":
        raise WorkloadError("--tf32: only GPUs compute in TF32, and this run is on the CPU: leave it out")
    compilers = [os.environ.get("CXX"), os.environ.get("CC"), "g++", "clang++", "gcc", "clang"]
    if config.compile and not any(shutil.which(compiler) for compiler in compilers if compiler):
        raise WorkloadError("--compile: torch.compile needs a C++ compiler: install g++, or set CXX to one")


def set_numerics(model: TransformerLM, config: RunConfig) -> None:
    """Set the precision of matrix products for the process, and let ``torch.compile`` compile blocks or the model.

    A module is compiled at its first call.
    """
    if config.tf32:
        torch.set_float32_matmul_precision("high")
    parts: dict[str | None, list[torch.nn.Module]] = {"blocks": [*model.blocks.children()], "model": [model]}
    for part in parts.get(config.compile, []):
        part.compile()


class ReversedModules(nn.Module):
    """A model whose parameters are registered in reverse order.

    Buckets are filled from the last registered parameter to the first, as this is usually the order in which gradients
    become ready. Here it is the opposite order: the gradients of the first bucket become ready last, so no bucket can
    be launched early. All parameters of ``model`` must be in modules without children.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        leaves = [module for module in model.modules() if not any(module.children())]
        for index, module in enumerate(reversed(leaves)):
            self.add_module(str(index), module)
        self._model = (model,)  # in a tuple, so that it is not registered as a submodule

    def forward(self, *inputs: Any) -> Any:
        return self._model[0](*inputs)


@contextmanager
def blocking_collectives(device: torch.device) -> Iterator[None]:
    """Let the host wait, in the block, for each asynchronous all-reduce right after its launch (a fault to inject)."""
    launch = dist.all_reduce

    def launch_and_wait(*args: Any, **options: Any) -> Any:
        """Launch an all-reduce as ``dist.all_reduce`` does; if it is asynchronous, wait until it has ended."""
        work = launch(*args, **options)
        if work is not None:
            work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return work

    dist.all_reduce = launch_and_wait
    try:
        yield
    finally:
        dist.all_reduce = launch
