"""The tokens, and one training step of any variant, marked with ranges and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ddp_prof import annotate, range_names
from ddp_prof.ddp import DataParallel
from ddp_prof.ddp.collective import communication_errors
from ddp_prof.train.sizes import VOCABULARY


def make_tokens(steps: int, batch_size: int, seq_len: int, seed: int) -> Tensor:
    """Tokens ``[steps, batch_size, seq_len + 1]``: inputs, and targets one position on."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (steps, batch_size, seq_len + 1), generator=generator)


def scatter_batches(steps: int, batch_size: int, seq_len: int, seed: int, device: torch.device) -> Tensor:
    """This rank's share ``[steps, batch_size / world, seq_len + 1]`` of every step's batch, which rank 0 makes.

    All of it is scattered before the first step, so that no communication but that of gradients is captured.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    through = torch.device("cpu") if dist.get_backend() == dist.Backend.GLOO else device  # where it lies anyway
    share = torch.empty(steps, batch_size // world, seq_len + 1, dtype=torch.int64, device=through)
    shares = None
    if rank == 0:
        tokens = make_tokens(steps, batch_size, seq_len, seed).to(through)
        shares = [item.contiguous() for item in tokens.chunk(world, dim=1)]
    dist.scatter(share, shares, src=0)
    return share.to(device)


class StepResult(NamedTuple):
    """What a step gave and cost on this rank.

    Attributes:
        loss: Mean over this rank's share of the batch.
        step_seconds: Host seconds from the step's start until the device has finished it.
        communication_seconds: Of waiting for gradients: the host's on a CPU, the device's on a GPU; NaN if not known.
        phase_seconds: Host seconds of forward, backward and optimizer, by the names of ``range_names``.
    """

    loss: float
    step_seconds: float
    communication_seconds: float
    phase_seconds: Mapping[str, float]


class PhaseClock:
    """Times the phases of a step by the host's clock.

    Args:
        settle: Called at the end of each phase, within its time: waits for the device, or does nothing.
    """

    def __init__(self, wait_for_device: Callable[[], None]) -> None:
        self.seconds: dict[str, float] = {}
        self.wait_for_device = wait_for_device

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.wait_for_device()
        self.seconds[name] = time.perf_counter() - begin


class Trainer:
    """Trains ``variant`` with ``optimizer``; counts the steps, warm-up ones apart from the others.

    Args:
        delay_s: Sleep so long at the start of each backward; a straggler to be found.
        precision: ``fp32``, or ``bf16`` by autocast.
        begins_late: Sleep at the start of each step for as long as the one before took; a host that prepares data.
    """

    def __init__(
        self,
        variant: DataParallel,
        optimizer: torch.optim.Optimizer,
        delay_s: float = 0.0,
        precision: str = "fp32",
        *,
        begins_late: bool = False,
    ) -> None:
        self.precision = precision
        self.variant = variant
        self.optimizer = optimizer
        self.delay_s = delay_s
        self.begins_late = begins_late
        self._last_seconds = 0.0
        self._done = {False: 0, True: 0}

    def train_step(
        self, inputs: Tensor, targets: Tensor, *, warmup: bool = False, synchronized: bool = False
    ) -> StepResult:
        """Take one step on this rank's share of the batch, ``[batch, seq]`` each.

        With ``synchronized`` the host waits for the device after each phase, so that each is timed with its own work.
        """
        clock = PhaseClock(partial(wait_for_device, inputs.device) if synchronized else lambda: None)
        begin = time.perf_counter()
        with annotate.step(self._done[warmup], warmup):
            if self.begins_late:
                time.sleep(self._last_seconds)
            started = time.perf_counter()
            loss = self._step(inputs, targets, clock)
            if inputs.is_cuda:
                torch.cuda.synchronize(inputs.device)
            self._last_seconds = time.perf_counter() - started
        self._done[warmup] += 1
        seconds = time.perf_counter() - begin
        return StepResult(loss.item(), seconds, self.variant.communication_seconds, clock.seconds)

    def _step(self, inputs: Tensor, targets: Tensor, clock: PhaseClock) -> Tensor:
        self.optimizer.zero_grad()
        with clock.phase(range_names.FORWARD), annotate.forward(), autocast(inputs.device, self.precision):
            loss = functional.cross_entropy(self.variant(inputs).flatten(0, 1), targets.flatten())
        # torch's DDP communicates in backward, where it fails with a bare RuntimeError.
        failures = communication_errors(self.variant.process_group, "communication in backward")
        with clock.phase(range_names.BACKWARD), annotate.backward(), failures:
            if self.delay_s:
                time.sleep(self.delay_s)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's omission
        self.variant.finish_gradient_synchronization()
        clock.wait_for_device()
        with clock.phase(range_names.OPTIMIZER), annotate.optimizer():
            self.optimizer.step()
        return loss.detach()


def wait_for_device(device: torch.device) -> None:
    # Not torch.cuda.synchronize: collectives may still be in flight on streams of their own.
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Where forward and loss are computed in ``precision``; weights and gradients stay float32."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
