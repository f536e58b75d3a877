"""The programs of :mod:`.contended_device` as captures, which nsys or torch.profiler would write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.analyze.contended_device import BARRIER, INTO_BUCKET, Rank
from tests.kineto_factory import event, write_kineto
from tests.nsys_factory import Capture, Kernel, Range, Sync, write_capture

SOON_NS = 40
"""How soon calls that record events, or let streams wait, follow each other."""
COPY_BYTES = 8 << 20
BYTES_OF_BLOCK = 2048
"""Of a kernel that copies into a bucket: 128 threads, each of which computes four numbers."""
NO_STREAM = 2**32 - 1
NAMES = {BARRIER: "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int)"}
"""By which files name what they would else not know."""


def capture_of(rank: Rank, number: int, ranks: int, *, times: int = 1, later_ns: int = 0) -> Capture:
    """What is recorded of a rank, whose backward a thread of autograd launches; all times are ``times`` as long."""
    process, autograd = 100 + number, 101 + number
    called_ns = {op.call: round(op.launch) for op in rank.ops} | {call: round(at) for call, at, _ in rank.syncs}
    for call in range(2, rank.calls + 1):
        called_ns.setdefault(call, called_ns.get(call - 1, 0) + SOON_NS)
    backwards = [(round(start), round(end) + 10 * SOON_NS) for name, start, end in rank.ranges if name == "backward"]

    def thread(at_ns: int) -> int:
        return autograd if any(start <= at_ns <= end for start, end in backwards) else process

    def at(time: float) -> int:
        return later_ns + times * round(time)

    def sync(call: str, number: int, stream: int, event: int, sync_type: int, lasts: int = SOON_NS // 2) -> Sync:
        at_ns = called_ns[number]
        return Sync(call, at(at_ns), number, stream, event, event, sync_type, thread(at_ns), process, 0, times * lasts)

    capture = Capture(threads={(process, process): "python", (process, autograd): "pt_autograd_0"})
    for op in rank.ops:
        about = {"kind": "memcpy", "bytes": COPY_BYTES if op.bytes < 0 else op.bytes} if op.name == "memcpy" else {}
        if op.name == INTO_BUCKET:
            about = {"grid": -(-op.bytes // BYTES_OF_BLOCK)}
        launch = round(op.launch)
        capture.kernels.append(
            Kernel(
                NAMES.get(op.name, op.name),
                at(op.start),
                at(op.end),
                at(launch),
                thread(launch),
                process,
                op.stream,
                0,
                number=op.call,
                **about,
            )  # type: ignore[arg-type]
        )
    records = enumerate(rank.records, 1)
    capture.syncs += [
        sync("cudaEventRecordWithFlags_v11010", call, stream, place, 0) for place, (call, stream) in records
    ]
    capture.syncs += [
        sync("cudaStreamWaitEvent_v3020", call, stream, of + 1, 2) for call, stream, of in rank.stream_waits
    ]
    capture.syncs += [
        sync("cudaDeviceSynchronize_v3020", call, NO_STREAM, 0, 4, max(1, round(end) - round(start)))
        for call, start, end in rank.syncs
    ]
    last = max(end for _, _, end in rank.ranges)
    whole = f"process|rank={number}|world={max(2, ranks)}|variant=overlap|backend=nccl|device=cuda"
    capture.ranges.append(Range(whole, at(0), at(last + 1000), process, process, "ddp_prof"))
    for name, start, end in rank.ranges:
        until = round(end) + (10 * SOON_NS if name == "backward" else 0)
        capture.ranges.append(Range(name, at(start), at(until), process, process))
    return capture


def write(folder: Path, captures: Sequence[Capture], product: str = "2024.6") -> list[Path]:
    """A file per rank, as a release of nsys exports it, or as torch.profiler writes it (``kineto``)."""
    folder.mkdir(exist_ok=True)
    files = [folder / f"rank{rank}.{'json' if product == 'kineto' else 'sqlite'}" for rank in range(len(captures))]
    for rank, (path, capture) in enumerate(zip(files, captures, strict=True)):
        if product == "kineto":
            write_kineto(path, capture, rank=rank, world=max(2, len(captures)), others=[*_waits_of(capture)])
            document = json.loads(path.read_text())
            for one in document["traceEvents"]:
                if one.get("cat") == "gpu_memcpy":
                    one["args"]["bytes"] = COPY_BYTES
            path.write_text(json.dumps(document))
        else:
            path.unlink(missing_ok=True)
            write_capture(path, capture, product)
    return files


def _waits_of(capture: Capture) -> Iterator[dict[str, Any]]:
    """Calls that record events or wait, and the rows of the waits."""
    records = {one.event: one for one in capture.syncs if "Record" in one.call}
    for one in capture.syncs:
        call = one.call.partition("_v")[0]
        yield event("cuda_runtime", call, one.at, one.at + one.lasts, one.process, one.thread, correlation=one.number)
        about = {"stream": one.stream, "correlation": one.number, "device": 0, "context": 1}
        if call == "cudaStreamWaitEvent":
            of = records[one.event]
            about |= {"wait_on_stream": of.stream, "wait_on_cuda_event_record_corr_id": of.number}
            about |= {"wait_on_cuda_event_id": one.event}
            yield _wait("Stream Wait Event", one, about)
        elif call == "cudaDeviceSynchronize":
            yield _wait("Context Sync", one, about | {"stream": -1})


def _wait(kind: str, one: Sync, about: dict[str, int]) -> dict[str, Any]:
    return event("cuda_sync", kind, one.at, one.at + one.lasts, 0, about["stream"], cuda_sync_kind=kind, **about)
