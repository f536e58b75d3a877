"""Emits all ranges of ddp_prof: to NVTX if installed, and by ``record_function`` while torch.profiler records.

A range is a named interval of time on the host. It is either nested, opened and closed by one thread around a block of
code, or a start/end range, which another thread may close. A *sink* is an object that receives ranges.

``DDP_PROF_RANGES=0`` in the environment or ``enable(False)`` switches them off.
"""

from __future__ import annotations

import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

from ddp_prof import range_names
from ddp_prof.range_names import Value

try:
    import nvtx
except ImportError:
    nvtx = None

RANGES_VARIABLE = "DDP_PROF_RANGES"
"""Environment variable; ``0`` switches ranges off from the start."""


class Sink(Protocol):
    """Receives ranges when they open and when they close."""

    def push(self, text: str) -> object:
        """Open a nested range of this thread; return the token that :meth:`pop` needs."""

    def pop(self, token: Any) -> None:
        """Close the innermost nested range of this thread; ``token`` is what :meth:`push` returned."""

    def start(self, text: str) -> object:
        """Open a start/end range, which does not nest with others; return the token that :meth:`end` needs."""

    def end(self, token: Any) -> None:
        """Close a range that :meth:`start` opened, on any thread; ``token`` is what :meth:`start` returned."""


class NvtxSink:
    """Sends ranges to the attached profiler, if any, by the package nvtx or by torch's NVTX.

    nvtx 0.2.12 and later silently emit nothing under nsys up to 2023.4. torch's NVTX, which CUDA builds of torch
    contain, always works but has no domains (names for the ranges of one library).
    """

    def __init__(self) -> None:
        self._api: Any = None

    def push(self, text: str) -> None:
        if api := self._api or self._find_nvtx():
            api.push(text)

    def pop(self, _token: object) -> None:
        if self._api:
            self._api.pop()

    def start(self, text: str) -> object:
        api = self._api or self._find_nvtx()
        return api.start(text) if api else None

    def end(self, token: object) -> None:
        if self._api and token is not None:
            self._api.end(token)

    def prepare(self, text: str) -> None:
        """Register a name that is new, as the package nvtx does when the first range of that name opens."""
        if api := self._api or self._find_nvtx():
            api.prepare(text)

    @property
    def is_listening(self) -> bool:
        return (self._api or self._find_nvtx()) is not None

    def _find_nvtx(self) -> Any:
        """Choose nvtx or torch's NVTX; return its functions ``push``, ``pop``, ``start``, ``end`` and ``prepare``.

        Returns ``None`` if there is neither yet; the next call looks again, because torch may be imported later.
        """
        has_torch = hasattr(sys.modules.get("torch._C"), "_nvtx")
        # The package nvtx if it certainly emits, or if there is nothing else; it puts ranges into our domain.
        if nvtx is not None and not (has_torch and _is_silent_under_old_nsys()):
            domain = range_names.DOMAIN
            self._api = SimpleNamespace(
                push=lambda text: nvtx.push_range(text, None, domain),
                pop=lambda: nvtx.pop_range(domain),
                start=lambda text: nvtx.start_range(text, None, domain),
                end=nvtx.end_range,
                prepare=lambda text: nvtx.annotate(text, None, domain),  # registers it, in all releases of nvtx
            )
        elif has_torch:
            torch_nvtx = import_module("torch.cuda.nvtx")
            self._api = SimpleNamespace(
                push=torch_nvtx.range_push,
                pop=torch_nvtx.range_pop,
                start=torch_nvtx.range_start,
                end=torch_nvtx.range_end,
                prepare=lambda _text: None,  # it registers no names
            )
        return self._api


def _is_silent_under_old_nsys() -> bool:
    """Return whether the installed nvtx is 0.2.12 or later, see :class:`NvtxSink`."""
    numbers = [int(part) for part in version("nvtx").split(".")[:3] if part.isdecimal()]
    return numbers >= [0, 2, 12]


class TorchSink:
    """Sends ranges to a ``torch.profiler`` while it records; uses torch only if the program has imported it.

    Without a GPU, nested ranges are recorded as operators with a prefix in their name, which takes much less time than
    ``record_function``. With a GPU ``record_function`` is used, as torch.profiler then mirrors ranges onto streams.
    """

    def __init__(self) -> None:
        self._has_gpu: bool | None = None

    def push(self, text: str) -> Any:
        """Open a nested range; return torch's context, ``None`` if no profiler records."""
        if not self.is_listening:
            return None
        if self._has_gpu is None:
            self._has_gpu = sys.modules["torch"].cuda.is_available()
        if self._has_gpu:
            function = sys.modules["torch.autograd.profiler"].record_function(text)
        else:
            function = sys.modules["torch._C._profiler"]._RecordFunctionFast(range_names.OPERATOR_PREFIX + text)
        function.__enter__()
        return function

    def pop(self, token: Any) -> None:
        if token is not None:
            token.__exit__(None, None, None)

    def start(self, text: str) -> object:
        """Open a start/end range; return the future that ends it, ``None`` if no profiler records."""
        if not self.is_listening:
            return None
        function = sys.modules["torch.autograd.profiler"].record_function(text)
        function.__enter__()
        # A thread that the profiler does not know can end a range only by a future: the range ends with its result.
        future = sys.modules["torch"].futures.Future()
        function._call_end_callbacks_on_future(future)
        return future

    def end(self, token: Any) -> None:
        if token is not None:
            token.set_result(None)

    @property
    def is_listening(self) -> bool:
        return getattr(sys.modules.get("torch.autograd.profiler"), "_is_profiler_enabled", False)


class Recorded(NamedTuple):
    """A closed range, as :class:`Recorder` keeps it.

    Attributes:
        text: The name with its fields, see ``range_names``.
        start_ns: Start by ``time.perf_counter_ns``.
        end_ns: End by the same clock; it is not part of the interval.
        thread: Native id of the thread that opened the range.
        is_start_end: Whether it is a start/end range, as in ``trace.Spans``; else a nested one.
    """

    text: str
    start_ns: int
    end_ns: int
    thread: int
    is_start_end: bool


class Recorder:
    """A sink that keeps ranges in memory, in ``ranges``, in the order in which they ended."""

    def __init__(self) -> None:
        self.ranges: list[Recorded] = []

    def push(self, text: str) -> object:
        return text, time.perf_counter_ns(), threading.get_native_id()

    start = push  # a start/end range opens in the same way

    def pop(self, token: Any) -> None:
        self._keep(token, is_start_end=False)

    def end(self, token: Any) -> None:
        self._keep(token, is_start_end=True)

    def _keep(self, token: tuple[str, int, int], *, is_start_end: bool) -> None:
        """Keep a range that ends now; ``token`` is what :meth:`push` returned."""
        text, start_ns, thread = token
        self.ranges.append(Recorded(text, start_ns, time.perf_counter_ns(), thread, is_start_end))


class NestedRange:
    """A nested range around a ``with`` block; it closes in the same sinks in which it was opened.

    One object can be used again, but not within itself.
    """

    __slots__ = ("_open", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._open: list[tuple[Sink, object]] = []

    def __enter__(self) -> None:
        self._open = [(sink, sink.push(self._text)) for sink in _active]

    def __exit__(self, *_: object) -> None:
        for sink, token in reversed(self._open):
            sink.pop(token)


class OpenRange:
    """A start/end range: it opens when the object is made and runs until :meth:`end`, which any thread may call."""

    __slots__ = ("_open",)

    def __init__(self, text: str) -> None:
        self._open = [(sink, sink.start(text)) for sink in _active]

    def end(self, _completed: object = None) -> None:
        """Close the range, unless it is closed; the argument is not used.

        ``Future.add_done_callback`` can call it, which passes the completed future.
        """
        while self._open:
            try:
                sink, token = self._open.pop()  # atomic: of two threads only one gets it
            except IndexError:
                return
            sink.end(token)


_sinks: tuple[Sink, ...] = NvtxSink(), TorchSink()
"""The sinks that get ranges while ranges are switched on."""
_active = _sinks if os.environ.get(RANGES_VARIABLE, "1") != "0" else ()
"""The sinks that get ranges: all, or none while ranges are switched off."""

steps_are_marked = False
"""Whether the program has called :func:`step`."""
WARMUP_STEPS = 2
"""Number of steps at the start of a run that are warm-up if the program does not say which steps are."""
monitor_marks_steps = False
"""Whether a monitor measures, and opens the ranges of steps meanwhile, so that nobody else who counts steps does."""
warms_up = False
"""Whether a monitor has begun to measure: the next step that the program marks by :func:`step` is warm-up."""
_own_steps = 0
"""How many steps the program has marked by :func:`step` in this run."""
_largest_index = -1
"""The largest number of these steps."""
at_own_step: Callable[[], None] | None = None
"""Called before each range of :func:`step`; set by ``ddp-prof capture``."""


def is_enabled() -> bool:
    """Return whether any sink would receive a range now."""
    return any(getattr(sink, "is_listening", True) for sink in _active)


def enable(on: bool = True) -> None:
    """Switch all ranges on or off; ranges that are open when they are switched off are still closed."""
    global _active
    _active = _sinks if on else ()


@contextmanager
def only_sink(sink: Sink) -> Iterator[None]:
    """Within a ``with`` block, send ranges only to ``sink``, not to a profiler, even if ranges are switched off.

    Steps that the program marks are counted from 0 in the block; after it, the old count goes on.
    """
    global _sinks, _active, steps_are_marked, _own_steps, _largest_index
    before = _sinks, _active, steps_are_marked, _own_steps, _largest_index
    _sinks = _active = (sink,)
    steps_are_marked, _own_steps, _largest_index = False, 0, -1
    try:
        yield
    finally:
        _sinks, _active, steps_are_marked, _own_steps, _largest_index = before


def prepare(text: str) -> None:
    """Have a range with this name open at once when it is its turn.

    A name that is new has to be registered with nsys first, which takes 0.1 ms, and 10 ms on a busy machine.
    """
    for sink in _active:
        if ready := getattr(sink, "prepare", None):
            ready(text)


def process(*, rank: int, world: int, variant: str, backend: str, device: str, ranks_per_gpu: int = 1) -> NestedRange:
    """Return the range around everything that is recorded, to be opened on the main thread.

    Args:
        rank: The rank of this process.
        world: Number of ranks.
        variant: Name of the way in which gradients are reduced, for example the class that wraps the model.
        backend: Communication backend, for example ``nccl``.
        device: ``cuda`` or ``cpu``.
        ranks_per_gpu: Number of ranks that share a GPU; the analysis must know if they do.
    """
    shared = {"ranks_per_gpu": ranks_per_gpu} if ranks_per_gpu > 1 else {}
    return NestedRange(
        range_names.format_range(
            range_names.PROCESS, rank=rank, world=world, variant=variant, backend=backend, device=device, **shared
        )
    )


def step(index: int | None = None, warmup: bool | None = None) -> NestedRange:
    """Return the range around one training step; analysis leaves out steps marked as warm-up.

    Args:
        index: The number of the step; ``None``: one more than the largest so far in this run.
        warmup: Whether the step is warm-up; ``None``: the first two steps of the run are, if ``index`` is not given. A
            step whose number is not larger than all before never is warm-up: with ``warmup=index < 2`` in each epoch,
            only steps 0 and 1 of the first epoch are.

    Raises TypeError if ``index`` is no whole number; an integer of numpy or a tensor is one.
    """
    global steps_are_marked, warms_up, _own_steps, _largest_index
    try:
        index = None if index is None else operator.index(index)
    except TypeError:
        raise TypeError(f"annotate.step takes the number of the step, and {index!r} is no int") from None
    steps_are_marked = True
    if at_own_step:
        at_own_step()
    if warmup is None:
        warmup = index is None and _own_steps < WARMUP_STEPS
    index = _largest_index + 1 if index is None else index
    is_warmup = (warmup and index > _largest_index) or warms_up
    warms_up = False
    _own_steps, _largest_index = _own_steps + 1, max(index, _largest_index)
    marks = {"warmup": 1} if is_warmup else {}
    return NestedRange(range_names.format_range(range_names.STEP, index=index, **marks))


def forward() -> NestedRange:
    """Return the range around the forward pass, loss included."""
    return NestedRange(range_names.FORWARD)


def backward() -> NestedRange:
    """Return the range around ``loss.backward()``."""
    return NestedRange(range_names.BACKWARD)


def synchronize() -> NestedRange:
    """Return the range around the host's wait for gradient communication."""
    return NestedRange(range_names.SYNCHRONIZE)


def optimizer() -> NestedRange:
    """Return the range around ``optimizer.step()``."""
    return NestedRange(range_names.OPTIMIZER)


def buckets(sizes: Sequence[int], vote: int | None = None, **more: Value) -> NestedRange:
    """Return a range whose name holds the sizes of the buckets that the next backward pass reduces.

    It is for buckets whose collectives get no ranges of their own.

    Args:
        sizes: Bytes of each bucket, in the order of launch.
        vote: Bytes of the all-reduce after the buckets, of which parameters were used; ``None`` if there is none.
        more: Further fields of the range.
    """
    fields: dict[str, Value] = {"bytes": ",".join(map(str, sizes)), "others": int(vote is not None)}
    fields |= {} if vote is None else {"other_bytes": vote}
    return NestedRange(range_names.format_range(range_names.BUCKETS, **fields, **more))


def start_synchronize() -> OpenRange:
    """Open a ``synchronize`` range where no ``with`` block can enclose the wait, for example inside ``backward``."""
    return OpenRange(range_names.SYNCHRONIZE)


# The argument is called ``bytes`` like the field of the range, though this hides Python's type.
def start_all_reduce(bucket: int, bytes: int, params: int, **more: Value) -> OpenRange:  # noqa: A002
    """Open the range of one all-reduce; see :func:`start_collective`."""
    return start_collective(range_names.ALL_REDUCE, bucket, bytes, params, **more)


def start_collective(name: str, bucket: int, bytes: int, params: int, **more: Value) -> OpenRange:  # noqa: A002
    """Open the range of one collective; end it when the collective completes.

    Args:
        name: One of ``range_names.COLLECTIVES``.
        bucket: Position of the collective in the order of launch.
        bytes: Size of the whole tensor: the tensor of an all-reduce, the input of a reduce-scatter, the output of an
            all-gather.
        params: Number of parameters in the tensor.
        more: Further fields of the range: ``group``, the name of the process group; ``ranks``, their number; or
            ``late=1`` for gradients that arrived after their bucket was sent.

    Raises:
        ValueError: There is no such collective.
    """
    if name not in range_names.COLLECTIVES:
        raise ValueError(f"{name!r} is not a collective: choose from {', '.join(range_names.COLLECTIVES)}")
    return OpenRange(_collective_text(name, bucket, bytes, params, **more))


@lru_cache(maxsize=8192)  # the same few names every step
def _collective_text(name: str, bucket: int, size: int, params: int, **more: Value) -> str:
    """Return the name of a collective's range with its fields."""
    return range_names.format_range(name, bucket=bucket, bytes=size, params=params, **more)
