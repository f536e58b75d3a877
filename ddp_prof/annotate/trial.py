"""Runs one try of ``ddp-prof tune`` in each rank of an unchanged program: sets arguments, times steps, then exits.

A *try* is a set of arguments for DDP or FSDP2 that ``tune`` compares with the program's own arguments. Nothing is
recorded, except in the run that shows what is worth trying. A step lasts from one step of the optimizer to the next
(module ``steps`` says of which optimizer). It is timed by the host's clock, or by events of the GPU's stream if the
program uses a GPU. After the last step all ranks wait for each other and leave the program by ``SystemExit(0)``: what
the program does at any exit is done, what it does after training is not.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_prof.annotate import ranges, unattended
from ddp_prof.annotate.recording import call_at_exit
from ddp_prof.annotate.rewrap import Wrapped
from ddp_prof.annotate.steps import CountedSteps
from ddp_prof.annotate.tracebacks import stands_for

TRIAL_VARIABLE = "DDP_PROF_TRIAL"
"""Environment variable with JSON: ``is_recorded``, whether the program is marked and recorded as well; the other keys
are the arguments of :class:`_Trial`."""
MEETING = timedelta(seconds=30)
"""How long a rank that has finished waits for the other ranks."""
PATIENCE_S = 30.0
"""How long a program has to exit after ``SystemExit``, before it is ended: its threads may keep the process alive."""
_STORE = "ddp_prof/tune"
_SHARDED = "torch.distributed.fsdp"
_WRAPPER = "DistributedDataParallel"
_COMM_HOOK = "comm_hook"
_PREFETCHES = {
    "forward_prefetch": "set_modules_to_forward_prefetch",
    "backward_prefetch": "set_modules_to_backward_prefetch",
}
"""Arguments of a try of FSDP2 that are no arguments of ``fully_shard``, and the methods of a module that set them."""


def start() -> None:
    """Replace functions of torch so that the try runs in this process, as :data:`TRIAL_VARIABLE` says; call it once."""
    asked = json.loads(os.environ[TRIAL_VARIABLE])
    if asked.pop("is_recorded"):
        unattended.start()  # first, so that the recording ends before the program does
    else:
        ranges.enable(False)
    trial = _Trial(**asked)
    trial.watch_losses()
    trial.set_arguments_of_ddp()
    trial.set_arguments_of_fsdp()


class _Trial:
    """The try in this process: sets its arguments, times the steps, and writes one JSON file with the result.

    Args:
        folder: Where the ranks write their files.
        warmup: Number of steps before the first timed one; at least one.
        steps: Number of timed steps.
        ddp: Arguments for ``DistributedDataParallel`` in place of the program's; ``comm_hook`` names a hook of torch.
        fsdp: Arguments for ``fully_shard``, or keys of ``_PREFETCHES`` with a depth.
        blocks: If given, the timed steps are divided into blocks of equal length, one for each element, which holds the
            arguments of DDP in that block.
    """

    def __init__(
        self,
        folder: str,
        warmup: int,
        steps: int,
        ddp: Mapping[str, Any],
        fsdp: Mapping[str, Any],
        blocks: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Register the hook that counts steps; the class describes the parameters."""
        self._folder, self._warmup, self._count = Path(folder), max(1, warmup), steps
        self._blocks = blocks
        self._wrapped: list[Wrapped] = []  # the program's DDPs, if there are blocks
        self._ddp, self._fsdp = ddp, fsdp
        self._prefetch = _Prefetch({method: fsdp[name] for name, method in _PREFETCHES.items() if name in fsdp})
        self._process = 0  # the process that trains
        self._made: list[dict[str, Any]] = []  # the program's own arguments of each wrapper
        self._host_ns: list[int] = []  # when each timed step began, and the last one ended
        self._events: list[Any] = []  # the same on the GPU
        self._losses: list[tuple[int, torch.Tensor]] = []  # step and scalar
        self._is_left = False  # whether the last step is done
        self._steps = CountedSteps(self._at_step, marks=False)

    def set_arguments_of_ddp(self) -> None:
        """Replace ``DistributedDataParallel.__init__`` and ``register_comm_hook``, so that the try's arguments hold."""
        original = DistributedDataParallel.__init__
        signature = inspect.signature(original)

        @stands_for(original)
        def init(made: Any, *args: Any, **kwargs: Any) -> None:
            """Initialize a DDP with the arguments of the program, of which the try's arguments replace some."""
            self._begin()
            given = signature.bind(made, *args, **kwargs)
            self._note_arguments(_WRAPPER, signature, given.arguments)
            if self._blocks:
                self._wrapped.append(Wrapped(made, original, given))
            asked = {name: value for name, value in self._ddp.items() if name != _COMM_HOOK}
            given.arguments.update(_known(asked, _WRAPPER, signature))
            original(*given.args, **given.kwargs)
            if _COMM_HOOK in self._ddp:
                register(made, *_load_comm_hook(self._ddp[_COMM_HOOK]))

        register = DistributedDataParallel.register_comm_hook

        @stands_for(register)
        def register_comm_hook(made: Any, state: Any, hook: Any) -> None:
            """Register the program's hook, unless the try has one; keep it for a DDP that is initialized again."""
            if _COMM_HOOK not in self._ddp:  # a try has its hook in place of the program's
                register(made, state, hook)
            for wrapped in self._wrapped:
                if wrapped.is_of(made) and wrapped.hook is None:
                    wrapped.hook = (state, hook)

        setattr(DistributedDataParallel, "__init__", init)  # noqa: B010  # mypy refuses an assignment
        setattr(DistributedDataParallel, "register_comm_hook", register_comm_hook)  # noqa: B010

    def set_arguments_of_fsdp(self) -> None:
        """Replace ``fully_shard`` before the program imports it, so that the try's arguments hold.

        Without arguments for FSDP2 nothing is done, because the import takes a second.
        """
        if not self._fsdp:
            return
        with suppress(ImportError):
            package: Any = import_module(_SHARDED)
            original = package.fully_shard
            signature = inspect.signature(original)

            @stands_for(original)
            def fully_shard(*args: Any, **kwargs: Any) -> Any:
                """Shard with the arguments of the program, of which the try's arguments replace some."""
                self._begin()
                given = signature.bind(*args, **kwargs)
                self._note_arguments("fully_shard", signature, given.arguments)
                # The depths of prefetching are set later, by methods of the modules.
                asked = {name: value for name, value in self._fsdp.items() if name not in _PREFETCHES}
                sharded = original(*given.args, **{**given.kwargs, **_known(asked, "fully_shard", signature)})
                self._prefetch.watch(sharded)
                return sharded

            package.fully_shard = fully_shard

    def watch_losses(self) -> None:
        """Keep the tensor of each loss, that is, each scalar on which the program calls ``backward``.

        The values are read at the end: to read one earlier, the host would have to wait for the GPU.
        """
        original = torch.autograd.backward

        @stands_for(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            """Run ``torch.autograd.backward``, after keeping the tensor if it is a scalar, with the step's number."""
            self._begin()
            if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
                self._losses.append((self._steps.index, tensors.detach()))
            original(tensors, *args, **kwargs)

        torch.autograd.backward = backward

    def _note_arguments(self, what: str, signature: inspect.Signature, given: Mapping[str, Any]) -> None:
        """Note the arguments of one call of ``what`` for the result: numbers, booleans and ``None``, with defaults."""
        defaults = {name: one.default for name, one in signature.parameters.items()}
        known = {**defaults, **given}
        plain = {name: value for name, value in known.items() if value is None or isinstance(value, (bool, int, float))}
        self._made.append({"what": what, "arguments": plain})

    def _begin(self) -> None:
        """Begin to count steps, at the first sign of training; later calls do nothing."""
        if self._steps.index < 0:
            self._process = os.getpid()
            call_at_exit(self._leave_early)
            self._steps.begin()

    def _at_step(self, index: int) -> None:
        """Note the time after ``index`` steps; after the last step of the try, write the result and end the program."""
        if self._is_left:  # the program has caught SystemExit
            _end_process()
        if index == 1:  # the first step has shown the order of the modules
            self._prefetch.set()
        if index < self._warmup:
            return
        if _uses_gpu():
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's omission
            self._events.append(event)
            event.record()
        self._host_ns.append(time.perf_counter_ns())
        if len(self._host_ns) > self._count:  # a time before each timed step, and one after the last
            self._write()
            self._is_left = True
            _meet()
            if threading.current_thread() is not threading.main_thread():
                _end_process()  # SystemExit would end only this thread
            late = threading.Timer(PATIENCE_S, _end_process)  # threads of the program may keep it from ending
            late.daemon = True
            late.start()
            sys.exit(0)
        self._begin_block(index - self._warmup)

    def _begin_block(self, position: int) -> None:
        """Initialize each DDP with the arguments of a block that begins here; ``position`` steps have been timed."""
        if not self._blocks or position % (length := self._count // len(self._blocks)):
            return
        self._ddp = _known(self._blocks[position // length], _WRAPPER, inspect.signature(DistributedDataParallel))
        if not self._wrapped:
            raise RuntimeError("the program calls no DistributedDataParallel, so there is nothing to set")
        for wrapped in self._wrapped:
            wrapped.set(self._ddp)

    def _leave_early(self) -> None:
        """Write the result so far, if the program ends before the last step of the try."""
        if not self._is_left and os.getpid() == self._process:
            self._write()

    def _write(self) -> None:
        """Write the result of this rank to a file named by the process id; the file appears when it is complete."""
        if _uses_gpu():
            with suppress(RuntimeError):  # after an error of CUDA nothing works
                torch.cuda.synchronize()
        # Without a process group, the launcher's variables tell rank and number of ranks.
        is_ready = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if is_ready else int(os.environ.get("RANK", "0"))
        found = {
            "rank": rank,
            "world": dist.get_world_size() if is_ready else int(os.environ.get("WORLD_SIZE", "1")),
            "backend": str(dist.get_backend()) if is_ready else None,
            "device": torch.cuda.get_device_name() if _uses_gpu() else "cpu",
            "torch": torch.__version__,
            "done": self._steps.index,
            "made": self._made,
            "step_ns": self._lengths_ns(),
            "losses": self._loss_values(),
        }
        target = self._folder / f"{os.getpid()}.json"
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(found), encoding="utf-8")
        partial.replace(target)

    def _lengths_ns(self) -> list[int]:
        """Return the length of each timed step: by the GPU's events if there is one at each step, else by the host."""
        if self._events and len(self._events) == len(self._host_ns):
            pairs = zip(self._events, self._events[1:], strict=False)
            return [round(before.elapsed_time(after) * 1e6) for before, after in pairs]  # elapsed_time is in ms
        return [after - before for before, after in zip(self._host_ns, self._host_ns[1:], strict=False)]

    def _loss_values(self) -> list[dict[str, Any]]:
        """Return the losses in the order of the ``backward`` calls: dictionaries for JSON.

        Each has ``step``, ``value`` (``None`` if it is not finite), and ``precision``, the epsilon of its data type.
        """
        values = []
        for step, loss in self._losses:
            number = float(loss.to("cpu", torch.float64))
            value = number if math.isfinite(number) else None
            precision = torch.finfo(loss.dtype).eps if loss.is_floating_point() else 0.0
            values.append({"step": step, "value": value, "precision": precision})
        return values


class _Prefetch:
    """Sets how many modules of ``fully_shard`` are gathered ahead (the depth), once a first step has shown their order.

    For example, if forward runs the modules in this order and the depth is 2::

        embed -> layer 0 -> layer 1 -> layer 2 -> head

    then layer 0 prefetches layers 1 and 2 in forward, and embed in backward, whose order is the reverse.

    Args:
        depths: The depth for each method of ``_PREFETCHES`` that is to be called.
    """

    def __init__(self, depths: Mapping[str, int]) -> None:
        self._depths = depths
        self._order: list[Any] = []
        self._watching: list[Any] = []

    def watch(self, sharded: Any) -> None:
        """Note the first forward of a module, so that the order of the modules is known.

        Args:
            sharded: What ``fully_shard`` returned: a module, or a list of modules that share one parameter group, of
                which the first is watched.
        """
        if not self._depths:
            return
        module = sharded[0] if isinstance(sharded, (list, tuple)) else sharded

        def note(called: Any, _inputs: Any) -> None:
            if not any(called is known for known in self._order):
                self._order.append(called)

        self._watching.append(module.register_forward_pre_hook(note))

    def set(self) -> None:
        """Stop watching, and let each module prefetch the modules that come next in the order that was seen.

        Raises:
            RuntimeError: Fewer than two modules were seen.
        """
        for handle in self._watching:
            handle.remove()
        if self._depths and len(self._order) < 2:
            raise RuntimeError(f"the forward of {len(self._order)} modules of fully_shard was seen: none to prefetch")
        for method, depth in self._depths.items():
            order = self._order if "forward" in method else self._order[::-1]
            for at, module in enumerate(order):
                if ahead := order[at + 1 : at + 1 + depth]:
                    getattr(module, method)(ahead)


def _load_comm_hook(name: str) -> tuple[Any, Any]:
    """Return state and function of a communication hook of torch: PowerSGD's, or the default hook ``{name}_hook``."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "powerSGD":  # from the first step on that it can: by default it begins after a thousand
        return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    return None, getattr(default_hooks, f"{name}_hook")


def _uses_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's omission


def _known(asked: Mapping[str, Any], what: str, signature: inspect.Signature) -> Mapping[str, Any]:
    """Return the arguments ``asked`` for the function ``what``.

    Raises:
        TypeError: In this release of torch the function has no argument of one of these names.
    """
    for name in asked:
        if name not in signature.parameters:
            raise TypeError(f"{what} of torch {torch.__version__} has no argument {name}")
    return asked


def _meet() -> None:
    """Wait until all ranks have done the last step, for :data:`MEETING` at most; then leave, rank 0 as the last one.

    If rank 0 ended earlier, the store that its process may hold would end, while other ranks still wait for it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    world = dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    with suppress(RuntimeError):  # a rank does not come in time, or the store's rank has ended
        if store.add(f"{_STORE}/done", 1) == world:  # this rank is the last one: it frees all
            store.set(f"{_STORE}/all", "")
        store.wait([f"{_STORE}/all"], MEETING)
        if dist.get_rank():
            store.add(f"{_STORE}/left", 1)
            return
        # Rank 0 waits until all other ranks have counted themselves; to add 0 reads the counter.
        until = time.monotonic() + MEETING.total_seconds()
        while store.add(f"{_STORE}/left", 0) < world - 1 and time.monotonic() < until:
            time.sleep(0.01)


def _end_process() -> None:
    """End the process at once with success, without exit functions and without waiting for threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
