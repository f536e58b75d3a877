"""Launches collectives, marks them with ranges and explains their errors; compares ranks; sends the state of rank 0."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ddp_prof import annotate, range_names
from ddp_prof.annotate import OpenRange
from ddp_prof.annotate.process_groups import is_on_host, name_group
from ddp_prof.errors import CommunicationError, first_line

PEER_IS_GONE = ("closed by peer", "connection reset", "connection refused", "broken pipe", "socket", "remote process")
"""Texts in the messages of gloo and NCCL, in lower case, which say that another rank has ended."""
SOURCE_LINE = re.compile(r"^\[[^\]]*:\d+\]\s*")
"""Prefix of gloo's messages: ``[.../pair.cc:537]``."""
ADVICE = re.compile(r"\. This is typically caused by .*")
"""End of a message that does not help to find the cause; it is left out."""
SENT_AS_THEY_ARE = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
}
"""Data types that both gloo and NCCL can send; tensors of other types are sent as bytes."""
T = TypeVar("T")
launches: Counter[object] = Counter()
"""How many collectives this module has launched in each process group, by the group's name."""

# torch 2.13 renamed both and warns of the old names; earlier versions know only these.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched collective that may not have ended yet.

    Attributes:
        works: The handles of its calls to ``torch.distributed``: one or several.
        span: Its range, which ends with the collective.
        group: The ranks that take part; ``None`` is the default group.
        operation: Its name in error messages: ``all-reduce of bucket 3``.
    """

    works: Sequence[dist.Work]
    span: OpenRange
    group: dist.ProcessGroup | None
    operation: str

    def is_completed(self) -> bool:
        """Whether the collective has ended, on the device too."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Wait for the result and end the range: gloo blocks the host, NCCL makes the current stream wait.

        Raises CommunicationError if the collective failed.
        """
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise communication_error(dist.get_rank(self.group), self.operation, error) from error
        finally:
            self.span.end()


def launch_all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    bucket: int,
    params: int,
    operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    **more: int,
) -> InFlight:
    """Launch an all-reduce of ``tensor``, in place, by ``operation``; all other arguments are as in :func:`launch`."""
    return launch(
        lambda: dist.all_reduce(tensor, operation, group, async_op=True),
        range_names.ALL_REDUCE, tensor, group, bucket, params, **more,
    )  # fmt: skip


def launch(
    start: Callable[[], Any],
    name: str,
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    bucket: int,
    params: int,
    **more: int,
) -> InFlight:
    """Open the range of an asynchronous collective, start the collective and return it.

    With gloo the range ends on gloo's thread when the collective completes (for a CUDA tensor, when the copy back to
    the device has been launched). With NCCL the host does not know the completion, so the range ends in
    :meth:`InFlight.wait`; the kernel shows when the collective ended on the device.

    Args:
        start: Calls ``torch.distributed``, once or several times, and returns one work handle or a list of them.
        name: Name of the range, such as ``all_reduce``.
        tensor: The whole tensor: the input of a reduce-scatter, the output of an all-gather. The range has its bytes.
        group: The ranks that take part; ``None`` is the default group.
        bucket: Number of the bucket, for the range and error messages.
        params: Number of parameters in the tensor, for the range.
        more: Further fields of the range.

    Raises:
        CommunicationError: The collective could not be started.
    """
    operation = f"{name.replace('_', '-')} of bucket {bucket}"
    try:
        names = name_group(group)
    except (KeyError, ValueError) as error:
        raise CommunicationError(
            f"{operation} could not be started: its process group was destroyed, so nothing can be trained in it"
        ) from error
    launches[names["group"]] += 1
    span = annotate.start_collective(name, bucket, tensor.nbytes, params, **more, **names)
    try:
        started = start()
        works = started if isinstance(started, list) else [started]
        if annotate.is_enabled() and is_on_host(tensor, group):
            # gloo reports the completion: end the range when all calls are done.
            futures = [work.get_future() for work in works]
            done = futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)
            done.add_done_callback(span.end)
    except RuntimeError as error:
        span.end()
        raise communication_error(dist.get_rank(group), operation, error) from error
    return InFlight(works, span, group, operation)


def broadcast_state(module: torch.nn.Module, group: dist.ProcessGroup | None) -> None:
    """Copy the values of all parameters and buffers from rank 0 to all ranks, one tensor at a time."""
    for tensor in map(_without_repetition, (*module.parameters(), *module.buffers())):
        dense = _resolved(tensor.detach()).contiguous()
        dist.broadcast(_sendable(dense), global_rank(0, group), group)
        if dense.data_ptr() != tensor.data_ptr():  # a copy was broadcast
            tensor.detach().copy_(dense)


def broadcast_buffers(buffers: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Copy buffers from rank 0 by one broadcast per data type and device, and wait for each."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for buffer in buffers:
        # ``data`` has its own version counter. That of the buffer must not change: an earlier forward may have saved
        # the buffer for a backward that is still to come, as in two forwards of BatchNorm before one backward.
        kinds.setdefault((buffer.dtype, buffer.device), []).append(_without_repetition(buffer.data))
    try:
        for number, members in enumerate(kinds.values()):
            launch_broadcast(members, 0, group, number)()
    except CommunicationError as error:
        raise CommunicationError(
            f"{error}; buffers are copied from rank 0 before a forward, so every rank must call it: "
            "to evaluate on one rank, call variant.module"
        ) from error


def launch_broadcast(
    tensors: Sequence[torch.Tensor], source: int, group: dist.ProcessGroup | None, bucket: int
) -> Callable[[], None]:
    """Launch one broadcast of several tensors from rank ``source`` of the group; return a function that finishes it.

    The tensors have one data type and device, and are sent together in a copy. The returned function waits for the
    broadcast and copies the result into the tensors. A single contiguous tensor is broadcast in place. ``bucket`` is
    the number for the range. The tensors' version counters stay as they are, as only the caller knows what changed.
    """
    is_in_place = len(tensors) == 1 and tensors[0].is_contiguous() and _resolved(tensors[0]) is tensors[0]
    flat = tensors[0].detach() if is_in_place else torch.cat([_resolved(tensor).flatten() for tensor in tensors])

    # ``sent`` is ``flat`` or a view of its bytes, so the result of the broadcast is in ``flat``.
    sent = _sendable(flat)
    flight = launch(
        lambda: dist.broadcast(sent, global_rank(source, group), group, async_op=True),
        range_names.BROADCAST, flat, group, bucket, len(tensors),
    )  # fmt: skip

    def finish() -> None:
        """Wait for the broadcast and copy the parts of the result into the tensors."""
        flight.wait()
        if is_in_place:
            return
        for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.data.copy_(part.view(tensor.shape))

    return finish


def _without_repetition(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the dimensions that ``expand`` made: torch refuses to write to one place twice."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or a copy if its memory holds conjugates or negatives of its values, as after conj."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor itself if gloo and NCCL can send its data type, else a view of its bytes."""
    return tensor if tensor.dtype in SENT_AS_THEY_ARE else tensor.reshape(-1).view(torch.uint8)


def global_rank(rank: int, group: dist.ProcessGroup | None) -> int:
    """Return the rank in the default group that is rank ``rank`` of ``group``."""
    return rank if group is None else dist.get_global_rank(group, rank)


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that makes a GPU the current one; on a CPU it does nothing.

    NCCL sends Python objects from the current GPU, which is GPU 0 unless the program has called ``set_device``.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def communication_errors(group: dist.ProcessGroup | None, operation: str) -> Iterator[None]:
    """Raise CommunicationError instead of a RuntimeError if communication failed in the block; other errors pass.

    It is for code of torch that communicates internally. ``operation`` names what failed in the message.
    """
    try:
        yield
    except RuntimeError as error:
        # A CommunicationError raised within a future arrives as a RuntimeError whose text contains its name.
        _, is_ours, message = str(error).partition(f"{CommunicationError.__name__}: ")
        if is_ours:
            raise CommunicationError(message.splitlines()[0]) from error
        if isinstance(error, dist.DistError) or _hint(error):
            raise communication_error(dist.get_rank(group), operation, error) from error
        raise


def communication_error(rank: int, operation: str, error: BaseException) -> CommunicationError:
    """Return the error to raise when ``operation`` failed: rank, the backend's reason in one line, and what to do."""
    # Takes the rank, not the group: a callback on a thread of the group must not hold the group, see TorchDDP.
    reason = ADVICE.sub("", SOURCE_LINE.sub("", first_line(error))).strip().rstrip(".")
    return CommunicationError(f"rank {rank}: {operation} failed: {reason}{_hint(error)}")


def _hint(error: BaseException) -> str:
    """Return the end of a message that says what another rank did; empty if the error shows nothing about it."""
    text = str(error).lower()
    if "timed out" in text or "timeout" in text:
        return ": another rank is stuck or ended, see its output"
    if any(sign in text for sign in PEER_IS_GONE):
        return ": another rank ended, see its output"
    return ""


class TensorSpec(NamedTuple):
    """The properties of a parameter or buffer that must be equal on all ranks; ``label``: ``parameter 'a.weight'``."""

    label: str
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    requires_grad: bool


def check_group(group: dist.ProcessGroup | None) -> None:
    """Raise CommunicationError if there is no process group, or if this rank is no member of ``group``."""
    if not dist.is_initialized():
        raise CommunicationError("there is no process group: call torch.distributed.init_process_group() first")
    if dist.get_rank(group) < 0:
        raise CommunicationError(
            f"rank {dist.get_rank()} is no member of the process group that it was given: give each rank a group of "
            "its own, or let only members train in it"
        )


def check_rank_consistency(
    module: torch.nn.Module, options: Mapping[str, object], group: dist.ProcessGroup | None
) -> None:
    """Raise CommunicationError if the model or the options of a rank differ from those of rank 0.

    Every rank must call this, before anything of the model is sent. If models differed, gloo would abort in its C++
    code, and NCCL would wait for ever or mix the parameters up.
    """
    compare_with_rank_0(
        ({name: _comparable(value) for name, value in options.items()}, describe_tensors(module)),
        lambda own, reference: find_option_difference(own[0], reference[0]) or find_difference(own[1], reference[1]),
        group,
        next((parameter.device for parameter in module.parameters()), torch.device("cpu")),
    )


def compare_with_rank_0(
    own: T, find: Callable[[T, T], str | None], group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Raise CommunicationError if ``own`` differs from the ``own`` of rank 0 on any rank. Every rank must call this.

    All ranks raise the same error. It names the ranks that differ and describes the difference of the first one.

    Args:
        own: What to compare; it is pickled and sent.
        find: Takes ``own`` of this rank and ``own`` of rank 0, and returns a description of the first difference, or
            ``None`` if there is none.
        group: The ranks to compare; ``None`` is the default group.
        device: The device of the model; with NCCL its GPU sends the objects.
    """
    if dist.get_world_size(group) == 1:
        return
    with communication_errors(group, "the comparison of the models"), current_device(device):
        reference = [own]  # on the other ranks the broadcast replaces the element
        dist.broadcast_object_list(reference, global_rank(0, group), group)
        differences: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(differences, find(own, reference[0]), group)
    others = [rank for rank, difference in enumerate(differences) if difference is not None]
    if others:
        more = f" (so ranks {', '.join(map(str, others))} differ from rank 0)" if len(others) > 1 else ""
        raise CommunicationError(f"rank {others[0]}: {differences[others[0]]}{more}")


def describe_tensors(module: torch.nn.Module) -> list[TensorSpec]:
    """Return the properties of all parameters, then of all buffers, in the module's order."""
    named = [
        *((f"parameter {name!r}", parameter) for name, parameter in module.named_parameters()),
        *((f"buffer {name!r}", buffer) for name, buffer in module.named_buffers()),
    ]
    return [describe_tensor(label, tensor) for label, tensor in named]


def describe_tensor(label: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(label, tuple(tensor.shape), str(tensor.dtype), tensor.stride(), tensor.requires_grad)


def find_option_difference(own: Mapping[str, object], reference: Mapping[str, object]) -> str | None:
    """Describe the first option that differs from that of rank 0 (``reference``); ``None`` if all are equal."""
    for name in (*own, *reference):
        if own.get(name) != reference.get(name):
            return f"{name}={own.get(name)}, on rank 0 {name}={reference.get(name)}: give every rank the same options"
    return None


def _comparable(value: object) -> object:
    """Return a form of an option's value that can be sent and compared.

    Plain values stay as they are, a sequence becomes a list of such forms, a dataclass its ``repr``, and any other
    object the name of its type.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    return repr(value) if is_dataclass(value) else type(value).__name__


def find_difference(own: Sequence[TensorSpec], reference: Sequence[TensorSpec]) -> str | None:
    """Describe the first tensor that differs from the tensor at its place on rank 0; ``None`` if all are equal."""
    for mine, theirs in zip_longest(own, reference):
        if theirs is None:
            found = f"{mine.label} is not there on rank 0"
        elif mine is None:
            found = f"{theirs.label} of rank 0 is missing"
        elif mine.label != theirs.label:
            found = f"{mine.label} stands where rank 0 has {theirs.label}"
        elif field := next((name for name in TensorSpec._fields if getattr(mine, name) != getattr(theirs, name)), None):
            phrase = f"{field}=" if field == "requires_grad" else f"{field} "
            found = f"{mine.label} has {phrase}{getattr(mine, field)}, on rank 0 {phrase}{getattr(theirs, field)}"
        else:
            continue
        return f"{found}: build the same model on every rank"
    return None
