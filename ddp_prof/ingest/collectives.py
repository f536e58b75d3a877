"""Finds facts about collectives that kernels do not hold: operation, bytes, communicator, and copies that are one.

Ranges of torch and NCCL around the launch calls name the operation. Kineto writes operation, bytes and communicator
into the event of a kernel (PyTorch 2.2 and later). NCCL 2.16 and later passes them to NVTX as payloads, which Nsight
Systems exports as ``jsonText`` with ``--include-json=true``.

A CUDA call is *inside* a range if the thread that makes the call opened the range before and has not closed it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ddp_prof.communication import (
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GLOO,
    ONE_RANK,
    REDUCE,
    REDUCE_SCATTER,
    REDUCTIONS,
    operation_of,
)
from ddp_prof.ingest.enrich import MOST
from ddp_prof.ingest.names import NameTable
from ddp_prof.table import (
    UNKNOWN,
    Ints,
    Mask,
    Table,
    begins_run,
    concatenate,
    distinct,
    distinct_rows,
    empty,
    fill,
    is_in,
    positions,
    select,
    take_or_unknown,
)
from ddp_prof.trace import Calls, Category, CollectiveMetadata, Kind, Spans, Trace

_COLLECTIVE = re.compile(
    r"^nccl(?:AllReduce|AllGather|ReduceScatter|Broadcast|Bcast|Reduce|AlltoAll|AllToAll|Gather|Scatter|Send|Recv)v?$"
)
"""Names of NCCL's own ranges around its calls that start a collective, or a send or receive."""
_GROUP = {"ncclGroupStart": 1, "ncclGroupEnd": -1}
"""NCCL's calls around a group of such calls, which are launched together at the end: how each changes the number of
open groups."""


TORCH_RANGES = ("nccl:", "xccl:", "mccl:")
"""Start of the names of torch's ranges around collectives on a device."""


def mark_copies_that_communicate(trace: Trace, within_device: Mask, of_one_rank: Spans | None = None) -> Trace:
    """Return the trace in which copies that carry out a collective have the category COMMUNICATION.

    NCCL 2.28 and later lets the copy engines carry out collectives on symmetric windows. Such a copy is launched inside
    a range of a collective whose operation copies alone can do (no reduction), without a kernel::

        nccl:_all_gather_base    C C         the two copies are the collective
        nccl:all_gather          K C C       the kernel is the collective; the copies move its result to its place

    At the left is the name of torch's range, at the right what was launched inside it: K a kernel, C a copy. A copy
    inside one of NCCL's own ranges counts as well, and ``ncclGroupEnd`` launches the collectives of its group.

    Args:
        trace: The trace.
        within_device: Which activities copy from memory of a device to memory of the same device; only these can
            become communication.
        of_one_rank: Ranges of the collectives that are known to be of a group of one rank. There a copy is all that a
            collective does, and it is no communication.
    """
    # The copies in question, and the calls that launched them.
    rows = np.flatnonzero(within_device & (trace.launching_calls != UNKNOWN))
    rows = rows[trace.activities.category[rows] == Category.MEMORY]
    if not len(rows) or trace.world_size == 1:
        return trace
    calls = select(trace.calls, trace.launching_calls[rows])
    # Copies inside NCCL's own ranges.
    may_copy, nccl_calls = _may_copy(trace)[trace.spans.name_id], find_nccl_calls(trace)
    copying = np.unique(nccl_calls.call[may_copy[nccl_calls.member]])
    communicates = _inside(select(trace.spans, copying), calls)
    # Copies inside torch's ranges in which no kernel was launched.
    torch_ranges = _find_torch_ranges(trace)
    torch_ranges = torch_ranges[may_copy[torch_ranges]]
    by_torch = last_opened(select(trace.spans, torch_ranges), calls)
    if np.any(by_torch != UNKNOWN):
        kernels = (trace.activities.kind == Kind.KERNEL) & (trace.launching_calls != UNKNOWN)
        launches = select(trace.calls, np.unique(trace.launching_calls[kernels]))
        with_kernel = last_opened(select(trace.spans, torch_ranges), launches)
        communicates |= (by_torch != UNKNOWN) & ~np.isin(by_torch, with_kernel)
    if of_one_rank is not None:
        communicates &= ~_inside(of_one_rank, calls)
    if not communicates.any():
        return trace
    category = trace.activities.category.copy()
    category[rows[communicates]] = Category.COMMUNICATION
    return replace(trace, activities=replace(trace.activities, category=category))


def mark_reductions_of_one_rank(trace: Trace, comm_patterns: Sequence[str]) -> Trace:
    """Return the trace in which reductions in a communicator of one rank compute, if anything else communicates.

    They only scale the rank's own values, as in the data-parallel group of a job that is parallel otherwise. If nothing
    else communicates, the job has one rank, and these are the collectives that are studied.

    Args:
        trace: The trace.
        comm_patterns: Regular expressions for names of kernels that the user says communicate.
    """
    names = (at for at, name in enumerate(trace.names) if ONE_RANK in name)
    alone = [at for at in names if not any(re.search(pattern, trace.names[at]) for pattern in comm_patterns)]
    communicates = trace.activities.category == Category.COMMUNICATION
    are_alone = communicates & is_in(trace.activities.name_id, alone) if alone else np.zeros(0, np.bool_)
    if not are_alone.any() or np.array_equal(are_alone, communicates):
        return trace
    category = np.where(are_alone, Category.COMPUTE, trace.activities.category).astype(np.int64)
    return replace(trace, activities=replace(trace.activities, category=category))


def _may_copy(trace: Trace) -> Mask:
    """Return a mask of the trace's names: ``False`` for ranges of reductions and barriers, which copies cannot do.

    Only its values for names of collectives are used.
    """
    found = np.ones(len(trace.names), np.bool_)
    for name_id in distinct(trace.spans.name_id):
        found[name_id] = operation_of(trace.names[name_id]) not in (*REDUCTIONS, BARRIER)
    return found


def _find_torch_ranges(trace: Trace) -> Ints:
    """Return the rows of torch's ranges around collectives."""
    ids = [index for index, name in enumerate(trace.names) if name.startswith(TORCH_RANGES)]
    return np.flatnonzero(is_in(trace.spans.name_id, ids))


def name_operations(trace: Trace) -> Trace:
    """Return the trace with the operations of collectives from the ranges around their launches, if none was recorded.

    The name of the kernel is only a hint: NCCL runs an all-to-all as a kernel called ``SendRecv``, and some releases
    run every operation as that kernel. Torch's ranges (``nccl:all_to_all``) say more than NCCL's own (``ncclSend``).
    """
    recorded = trace.collective_metadata
    rows = (trace.activities.category == Category.COMMUNICATION) & (trace.launching_calls != UNKNOWN)
    rows[recorded.activity[recorded.op_id != UNKNOWN]] = False
    activity = np.flatnonzero(rows)  # the collectives without a recorded operation
    if not len(activity):
        return trace
    calls = select(trace.calls, trace.launching_calls[activity])
    torch_ranges = _find_torch_ranges(trace)
    nccl_ranges, group_ops = _operations_of_nccl_calls(trace)
    # Take operation and range from torch's ranges first, then from NCCL's.
    op_id, span = np.full(len(activity), UNKNOWN, np.int64), np.full(len(activity), UNKNOWN, np.int64)
    for ranges, name_id in (
        (torch_ranges, trace.spans.name_id[torch_ranges]),
        (nccl_ranges, group_ops),
    ):
        open_range = last_opened(select(trace.spans, ranges), calls)
        op_id = np.where(op_id == UNKNOWN, take_or_unknown(name_id, open_range), op_id)
        span = np.where(span == UNKNOWN, take_or_unknown(ranges, open_range), span)
    span[trace.activities.kind[activity] != Kind.COPY] = UNKNOWN  # only copies need their range, see CollectiveMetadata
    # Complete the rows that exist in the collectives' metadata, and add rows for the other collectives.
    row = positions(recorded.activity, len(trace.activities))[activity]
    is_known, is_new = (op_id != UNKNOWN) | (span != UNKNOWN), row == UNKNOWN
    completed = recorded.op_id.copy()
    completed[row[is_known & ~is_new]] = op_id[is_known & ~is_new]
    added = is_known & is_new
    found = fill(CollectiveMetadata, int(added.sum()), activity=activity[added], op_id=op_id[added], span=span[added])
    return replace(trace, collective_metadata=concatenate(replace(recorded, op_id=completed), found))


def _operations_of_nccl_calls(trace: Trace) -> tuple[Ints, Ints]:
    """Return the NCCL calls that may launch collectives, as rows of the spans, and the name of each call's operation.

    A group has the operation that its calls share, ``UNKNOWN`` if they differ; a mix of sends and receives counts as
    receives.
    """
    calls, names = find_nccl_calls(trace), list(trace.names)
    name_id, first = trace.spans.name_id[calls.member], np.flatnonzero(begins_run(calls.call))
    if "ncclSend" in names and "ncclRecv" in names:
        send, receive = names.index("ncclSend"), names.index("ncclRecv")
        receives = np.logical_or.reduceat(name_id == receive, first)[np.cumsum(begins_run(calls.call)) - 1]
        name_id = np.where((name_id == send) & receives, receive, name_id)
    low, high = np.minimum.reduceat(name_id, first), np.maximum.reduceat(name_id, first)
    return calls.call[first], np.where(low == high, low, UNKNOWN)


@dataclass(frozen=True)
class NcclCalls(Table):
    """NCCL's calls that may launch collectives, and the calls that started these: a row for each such pair.

    Both are rows of the trace's spans. The rows of one ``call`` follow each other, in the order in time of ``member``.
    """

    call: Ints
    member: Ints


def find_nccl_calls(trace: Trace) -> NcclCalls:
    """Return the NCCL calls that may launch collectives, each with the calls that started these.

    A call may launch its own collective. In a group, the end of the outermost group may launch the collectives of all
    calls in it::

        ncclGroupStart  ncclAllReduce  ncclAllReduce  ncclGroupEnd
        call                 A              B              E            pairs: (A, A), (B, B), (E, A), (E, B)
    """
    # The last element, for no name, is what the name_id UNKNOWN (-1) selects.
    is_collective = np.array([bool(_COLLECTIVE.match(name)) for name in (*trace.names, "")])
    if not is_collective.any():
        return empty(NcclCalls)
    border = np.array([_GROUP.get(name, 0) for name in (*trace.names, "")])
    spans = trace.spans
    rows = np.flatnonzero((is_collective | (border != 0))[spans.name_id])
    rows = rows[np.lexsort((spans.start_ns[rows], spans.lane[rows], spans.process[rows]))]
    change, new_thread = border[spans.name_id[rows]], begins_run(spans.process[rows], spans.lane[rows])
    # How many groups are open after each row. An end without a start, which may not have been recorded, closes none:
    # so the least sum so far, if it is below 0, counts as none open. Sums of each thread are below those of the last.
    sums = np.cumsum(change)
    thread = np.cumsum(new_thread) - 1
    before_thread = (sums - change)[new_thread][thread]
    floor = -thread * (len(rows) + 1)
    sums += floor - before_thread
    depth = sums - np.minimum.accumulate(np.minimum(sums, floor))
    # Rows from one border to the next are a section. A section with an end of an outermost group ends there.
    is_end = (change < 0) & (depth == 0)
    is_border = new_thread | ((change > 0) & (depth == 1))
    is_border[1:] |= is_end[:-1]
    section = np.cumsum(is_border) - 1
    end_of = np.full(int(np.count_nonzero(is_border)), UNKNOWN)
    end_of[section[is_end]] = np.flatnonzero(is_end)
    member = np.flatnonzero(change == 0)
    end = end_of[section[member]]
    call = np.concatenate([member, end[end != UNKNOWN]])
    order = np.argsort(call, kind="stable")
    return NcclCalls(rows[call[order]], rows[np.concatenate([member, member[end != UNKNOWN]])[order]])


def last_opened(ranges: Spans, calls: Calls) -> Ints:
    """Return for each call the range that its thread opened last, ``UNKNOWN`` if that range had ended before the call.

    The result holds rows of ``ranges``.
    """
    found = np.full(len(calls), UNKNOWN, np.int64)
    for of_ranges, of_calls in _by_thread(ranges, calls):
        ordered = of_ranges[np.argsort(ranges.start_ns[of_ranges], kind="stable")]
        at = np.searchsorted(ranges.start_ns[ordered], calls.start_ns[of_calls], side="right") - 1
        holds = (at >= 0) & (ranges.end_ns[ordered[at]] > calls.start_ns[of_calls])
        found[of_calls[holds]] = ordered[at[holds]]
    return found


def _inside(ranges: Spans, calls: Calls) -> Mask:
    """Return which calls are inside at least one of the ranges, nested or not."""
    inside = np.zeros(len(calls), np.bool_)
    for of_ranges, of_calls in _by_thread(ranges, calls):
        at = calls.start_ns[of_calls]
        begun = np.searchsorted(np.sort(ranges.start_ns[of_ranges]), at, side="right")
        ended = np.searchsorted(np.sort(ranges.end_ns[of_ranges]), at, side="right")
        inside[of_calls] = begun > ended  # more ranges have begun by then than ended
    return inside


def _by_thread(ranges: Spans, calls: Calls) -> Iterator[tuple[Ints, Ints]]:
    """Yield for each thread that has ranges: the rows of its ranges, and the rows of its calls."""
    first, which = distinct_rows(ranges.process, ranges.lane)
    for thread, row in enumerate(first.tolist()):
        is_own_call = (calls.process == ranges.process[row]) & (calls.lane == ranges.lane[row])
        yield np.flatnonzero(which == thread), np.flatnonzero(is_own_call)


ELEMENT_BYTES = {
    "double": 8, "long": 8, "complexfloat": 8, "complexdouble": 16, "float": 4, "int": 4, "half": 2, "short": 2,
    "char": 1, "byte": 1, "bool": 1,
}  # fmt: skip
"""Size of an element by the C++ name of its type in torch, in lower case."""
_SPELLINGS = re.compile(r"^c10::|^(?:un)?signed |(?<=long|hort) int$|[<> ]")
"""Parts of a type's name that are removed, as in ``c10::BFloat16``, ``long int``, ``unsigned char`` and
``c10::complex<float>``."""
_BITS = re.compile(r"\d{1,3}$")
"""Bits of an element at the end of the other names, as in ``BFloat16``, ``UInt64`` and ``float32``. All Float8 types
have one byte."""

_WHOLE_MESSAGE = re.compile(r"nccl(?:AllReduce|Broadcast|Bcast|Reduce)$")
"""NCCL's calls whose recorded size is that of the whole message; for all other calls it is the part of one rank."""


def message_bytes(elements: Iterable[object], element_type: object) -> int:
    """Return the size in bytes of a collective's larger buffer, ``UNKNOWN`` if it cannot be computed.

    Args:
        elements: Number of elements of the input and of the output, as recorded; all but integers are ignored.
        element_type: Name of the elements' type, as recorded.
    """
    kind = _SPELLINGS.sub("", str(element_type).lower())
    bits = _BITS.search(kind)
    size = 1 if kind.startswith("float8") else int(bits[0]) // 8 if bits else ELEMENT_BYTES.get(kind)
    counts = [element for element in elements if isinstance(element, int)]
    return max(counts) * size if counts and size else UNKNOWN


def add_nccl_metadata(trace: Trace, payloads: Mapping[tuple[int, int, int, str], str]) -> Trace:
    """Return the trace with bytes and communicator of collectives, from the NCCL call inside which each was launched.

    A collective that was launched outside of such a call, for example by a CUDA graph, stays unknown. If one kernel
    carries out a whole group, its size is the sum over the group. If several kernels do, their sizes are known only if
    there is one kernel for each call and all calls are alike.

    Args:
        trace: The trace, without metadata of collectives.
        payloads: The JSON texts of NCCL's ranges, by process, thread, start and name.
    """
    spans, nccl_calls = trace.spans, dict[int, list[int]]()
    pairs = find_nccl_calls(trace)
    for launching, member in zip(pairs.call.tolist(), pairs.member.tolist(), strict=True):
        nccl_calls.setdefault(launching, []).append(member)
    is_launched = (trace.activities.category == Category.COMMUNICATION) & (trace.launching_calls != UNKNOWN)
    activities = np.flatnonzero(is_launched)
    rows, launches = np.array(list(nccl_calls), np.int64), select(trace.calls, trace.launching_calls[activities])
    call = take_or_unknown(rows, last_opened(select(spans, rows), launches))
    kernels = Counter(call.tolist())  # number of collectives that each NCCL call launched
    found = []  # activity, bytes and communicator
    for activity, row in zip(activities.tolist(), call.tolist(), strict=True):
        # Look up the payloads of the calls that started this collective.
        keys = [
            (int(spans.process[member]), int(spans.lane[member]), int(spans.start_ns[member]), name)
            for member in nccl_calls.get(row, ())
            if (name := trace.names[spans.name_id[member]])
        ]
        if any(key in payloads for key in keys):
            members = [_size_and_group(key[-1], payloads.get(key, "")) for key in keys]
            found.append((activity, *_merge_members(members, kernels[row])))
    names = NameTable(trace.names)
    metadata = fill(
        CollectiveMetadata,
        len(found),
        activity=np.array([activity for activity, _, _ in found], np.int64),
        bytes=np.array([size if size < MOST else UNKNOWN for _, size, _ in found], np.int64),
        group_id=np.array([UNKNOWN if group is None else names.intern(group) for *_, group in found], np.int64),
    )
    return replace(trace, collective_metadata=metadata, names=tuple(names))


_OF_INPUT = (ALL_REDUCE, BROADCAST, REDUCE, REDUCE_SCATTER, ALL_TO_ALL)
"""Operations whose size is that of their input: it is not smaller than the output; an all-to-all tells no more."""


def add_input_sizes(trace: Trace, calls: Spans, input_bytes: Ints, call_bytes: Ints) -> Trace:
    """Return the trace in which collectives without a recorded size get one from the arguments of what launched them.

    This is the range of torch, or the operator of torch, inside which a collective was launched. Collectives of gloo
    have no activity: their rows of :class:`CollectiveMetadata` name the range itself.

    Args:
        trace: The trace.
        calls: Torch's operators that call collectives.
        input_bytes: Bytes of the input of each of the trace's ranges, ``UNKNOWN`` if not recorded.
        call_bytes: Bytes of the largest argument of each of ``calls``, ``UNKNOWN`` if not recorded.
    """
    if np.all(input_bytes == UNKNOWN) and np.all(call_bytes == UNKNOWN):
        return trace
    # Sizes of inputs count only for operations whose size is that of their input; the element "" is for UNKNOWN (-1).
    told = np.array([operation_of(name) in _OF_INPUT for name in (*trace.names, "")], np.bool_)
    input_bytes = np.where(told[trace.spans.name_id], input_bytes, UNKNOWN)
    # The kernels of collectives without a recorded size.
    recorded, activities = trace.collective_metadata, trace.activities
    rows = (activities.category == Category.COMMUNICATION) & (activities.kind == Kind.KERNEL)
    rows[recorded.activity[recorded.bytes != UNKNOWN]] = False
    activity = np.flatnonzero(rows & (trace.launching_calls != UNKNOWN))
    launches = select(trace.calls, trace.launching_calls[activity])
    ranges = _find_torch_ranges(trace)
    size = np.full(len(activity), UNKNOWN, np.int64)
    for spans, of_spans in ((select(trace.spans, ranges), input_bytes[ranges]), (calls, call_bytes)):
        span = last_opened(spans, launches)
        # If several kernels were launched inside a range, its size is not that of one kernel. The 1 added makes room
        # for UNKNOWN (-1) in the count.
        is_only = np.bincount(span + 1, minlength=len(spans) + 1)[span + 1] == 1
        size = np.maximum(size, np.where(is_only, take_or_unknown(of_spans, span), UNKNOWN))
    # Complete the rows that exist in the collectives' metadata, and add rows for the other kernels and for gloo.
    row, known = positions(recorded.activity, len(activities))[activity], size != UNKNOWN
    completed = recorded.bytes.copy()
    completed[row[known & (row != UNKNOWN)]] = size[known & (row != UNKNOWN)]
    new = known & (row == UNKNOWN)
    found = fill(CollectiveMetadata, int(new.sum()), activity=activity[new], bytes=size[new])
    is_gloo = np.array([name.startswith(GLOO) for name in (*trace.names, "")], np.bool_)
    gloo = np.flatnonzero(is_gloo[trace.spans.name_id] & (input_bytes != UNKNOWN))
    of_gloo = fill(CollectiveMetadata, len(gloo), span=gloo, bytes=input_bytes[gloo])
    return replace(trace, collective_metadata=concatenate(replace(recorded, bytes=completed), found, of_gloo))


def _merge_members(members: Sequence[tuple[int, str | None]], kernels: int) -> tuple[int, str | None]:
    """Return bytes and communicator of each kernel of a group of NCCL calls.

    Args:
        members: Bytes and communicator of each call in the group.
        kernels: Number of kernels that carry out the group.

    Returns:
        The bytes, ``UNKNOWN`` if they cannot be told; the communicator, ``None`` if the calls have several.
    """
    sizes, groups = [size for size, _ in members], {group for _, group in members}
    size = UNKNOWN
    if kernels == 1 and UNKNOWN not in sizes:
        size = sum(sizes)
    elif kernels == len(members) and len(set(members)) == 1:
        size = sizes[0]
    return size, groups.pop() if len(groups) == 1 else None


def _size_and_group(name: str, payload: str) -> tuple[int, str | None]:
    """Return the bytes of an NCCL call's whole message and its communicator's name, from its payload in JSON.

    The bytes are ``UNKNOWN`` if they are not recorded or if only the part of one rank is; the name may be ``None``.
    """
    try:
        fields = dict(_fields(json.loads(payload)))
    except (ValueError, RecursionError):
        fields = {}
    size, group = fields.get("message size [bytes]"), fields.get("nccl communicator id")
    is_whole = isinstance(size, int) and size >= 0 and _WHOLE_MESSAGE.match(name)
    return (size if is_whole and isinstance(size, int) else UNKNOWN), (None if group is None else str(group))


def _fields(document: Any) -> Iterable[tuple[str, Any]]:
    """Yield key and value of all fields of a JSON document, at any depth: the nesting of payloads is not documented.

    Keys are in lower case.
    """
    if isinstance(document, dict):
        for key, value in document.items():
            yield key.lower(), value
            yield from _fields(value)
    elif isinstance(document, list):
        for entry in document:
            yield from _fields(entry)
