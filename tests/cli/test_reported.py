"""Situations of public bug reports, rebuilt small, as nsys and as torch.profiler record them.

Each step of a job takes 1 ms, if nothing else is said::

    us       0    200         600   800  900
    compute  .FFFF BBBBBBBBBBBB..... OO .
    NCCL     ............NNNNNNNNNNN.....       400 us, 200 of them beside backward
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import csv_rows, run
from tests.kineto_factory import event, write_kineto
from tests.night import of_which_the_gate_keeps
from tests.nsys_factory import CALL, KERNEL, NCCL, NVTX, US, Capture, Kernel, Range, Sync, bucket_steps, write_capture

MAIN, AUTOGRAD, PROCESS = 100, 101, 100
STEP = 1000
BARRIER = "void (anonymous namespace)::c10d::symmetric_memory::barrier_kernel(unsigned int**, unsigned long, int, int)"
REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(x)"

USUAL = (
    ("fwd_gemm", 20, 200, 7, 10, MAIN),
    ("bwd_gemm", 200, 600, 7, 120, AUTOGRAD),
    (NCCL, 400, 800, 20, 300, AUTOGRAD),
    ("adam", 800, 900, 7, 510, MAIN),
)
"""Name, start, end, stream, launch and thread of the work of a step."""
PHASES = (("forward", 5, 100), ("backward", 110, 400), ("optimizer", 500, 560))

Work = tuple[str, int, int, int, int | None, int]


def step(
    index: int,
    work: tuple[Work, ...] = USUAL,
    phases: tuple[tuple[str, int, int], ...] = PHASES,
    *,
    name: str = "ProfilerStep#{}",
    late: int = 0,
    process: int = PROCESS,
) -> Capture:
    """One step; the first one begins at 10 us, or ``late`` after that."""
    at = (10 + STEP * index + late) * US
    shift = process - PROCESS
    kernels = [
        Kernel(
            what,
            at + start * US,
            at + end * US,
            None if launch is None else at + launch * US,
            thread + shift,
            process,
            stream,
        )
        for what, start, end, stream, launch, thread in work
    ]
    ranges = [Range(name.format(index), at, at + STEP * US, MAIN + shift, process)]
    ranges += [Range(phase, at + start * US, at + end * US, MAIN + shift, process) for phase, start, end in phases]
    return Capture(kernels, ranges)


def job(*steps: Capture, **more: Any) -> Capture:
    processes = sorted({one.process for of in steps for one in of.ranges} | {PROCESS})
    threads = {(process, process): "python" for process in processes}
    threads |= {(process, process + 1): "pt_autograd_0" for process in processes}
    kernels, ranges = [k for of in steps for k in of.kernels], [r for of in steps for r in of.ranges]
    return Capture(kernels, ranges, threads=threads, **more)


def usual(steps: int = 5) -> Capture:
    return job(*map(step, range(steps)))


def changed(capture: Capture, change: Callable[[int, Kernel], Kernel]) -> Capture:
    return replace(capture, kernels=[change(place, kernel) for place, kernel in enumerate(capture.kernels)])


def since_1970() -> Capture:
    """Times count from 1970: nsys export --ts-normalize=true, and torch.profiler before May 2024."""
    found, by = usual(12), 1_700_000_000_000_000_000
    kernels = [
        replace(one, start=one.start + by, end=one.end + by, launch=(one.launch or 0) + by) for one in found.kernels
    ]
    ranges = [replace(one, start=one.start + by, end=(one.end or 0) + by) for one in found.ranges]
    return replace(found, kernels=kernels, ranges=ranges)


def lost_first() -> Capture:
    """The profiler dropped all kernels of the first four of six steps."""
    return changed(usual(6), lambda place, kernel: replace(kernel, is_lost=place < 16))


def lost_half_a_step() -> Capture:
    """It dropped two kernels of a step in the middle."""
    return changed(usual(6), lambda place, kernel: replace(kernel, is_lost=place in (9, 10)))


def lost_calls() -> Capture:
    """A buffer kept the last records only: calls and kernels of two steps and of the first half of a third are gone."""
    sound = usual(6)
    return replace(sound, kernels=sound.kernels[10:])


def lost_host_events() -> Capture:
    """Ranges and calls of the last three of six steps are lost."""
    numbered = [replace(one, number=100 + place) for place, one in enumerate(usual(6).kernels)]
    kernels = [replace(one, launch=None if place >= 12 else one.launch) for place, one in enumerate(numbered)]
    return replace(usual(6), kernels=kernels, ranges=[one for one in usual(6).ranges if one.start < 3 * STEP * US])


def lost_first_launches() -> Capture:
    """All launches of a step but the last are lost, and its kernels are there; no range names a phase."""
    unnamed = job(*(step(index, phases=()) for index in range(6)))
    return changed(unnamed, lambda place, one: replace(one, launch=None if 8 <= place < 11 else one.launch))


def lost_collectives() -> Capture:
    """The all-reduce of a step in the middle is lost, with its call."""
    numbered = [replace(one, number=100 + place) for place, one in enumerate(usual(6).kernels)]
    return replace(usual(6), kernels=[one for place, one in enumerate(numbered) if place != 14])


def lost_on_another_accelerator() -> Capture:
    """Intel's GPU: all kernels of two steps in the middle are lost."""
    return changed(
        usual(6), lambda place, one: replace(one, call="urEnqueueKernelLaunch", is_lost=place // 4 in (2, 3))
    )


def lost_launches() -> Capture:
    """The launches of a step are lost; calls that record events have numbers before and behind those of its kernels."""
    numbered = changed(
        usual(), lambda place, one: replace(one, number=10 * place + 10, launch=None if 8 <= place < 12 else one.launch)
    )
    records = [
        Sync("cudaEventRecord_v3020", (10 + STEP * 2 + at) * US, number, 7) for at, number in ((5, 85), (940, 125))
    ]
    return replace(numbered, syncs=records)


def without_times() -> Capture:
    """All times of the second half are 0: of three steps of six."""
    late = usual(6)
    kernels = [replace(one, start=0, end=0, launch=0) if place >= 12 else one for place, one in enumerate(late.kernels)]
    ranges = [replace(one, start=0, end=0) if place >= 12 else one for place, one in enumerate(late.ranges)]
    return replace(late, kernels=kernels, ranges=ranges)


def without_durations() -> Capture:
    """The durations of the kernels of three steps of six are 0, those of one more below 0."""
    return changed(
        usual(6),
        lambda place, one: replace(one, end=one.start - (50 if place < 16 else 0)) if place >= 12 else one,
    )


def ends_before_starts() -> Capture:
    """Of each step another kernel ends before it starts."""
    return changed(
        usual(6), lambda place, one: replace(one, end=one.start - 50) if place % 4 == place // 4 % 4 else one
    )


def steps_without_time() -> Capture:
    """The ranges of three steps of six have no duration."""
    found = usual(6)
    is_step = [one.name.startswith("Prof") and one.start > STEP * 2 * US + 20 * US for one in found.ranges]
    ranges = [replace(one, end=one.start) if is_it else one for one, is_it in zip(found.ranges, is_step, strict=True)]
    return replace(found, ranges=ranges)


def in_a_wrong_unit() -> Capture:
    """All durations are a thousand times too long, as where nanoseconds were taken for microseconds."""
    return changed(usual(6), lambda place, one: replace(one, end=one.start + 1000 * (one.end - one.start)))


def collectives_in_a_wrong_unit() -> Capture:
    """Durations of all all-reduces are a thousand times too long, so each ends after the begin of all later ones."""
    return changed(usual(), lambda _, one: replace(one, end=one.start + 400 * STEP * US) if one.name == NCCL else one)


def overlong() -> Capture:
    """Step 1's backward lasts 3.5 ms, over nine later kernels of its stream."""
    return changed(usual(), lambda place, one: replace(one, end=one.start + 3500 * US) if place == 5 else one)


def overlong_over_one(name: str, us: int) -> Callable[[], Capture]:
    """A kernel of step 3 runs on beside the next one of its stream, which it may outlive."""
    return lambda: changed(
        usual(),
        lambda place, one: replace(one, end=one.start + us * US) if place // 4 == 3 and one.name == name else one,
    )


def overlong_last(steps: int = 5) -> Capture:
    """The last all-reduce, which nothing follows on its stream, seems to last 12 ms; the host had waited for it."""
    waits = [
        Sync("cudaDeviceSynchronize_v3020", (10 + STEP * index + 910) * US, 900 + index, 4294967295)
        for index in range(steps)
    ]
    last = 4 * steps - 2
    return changed(
        replace(usual(steps), syncs=waits),
        lambda place, one: replace(one, end=one.start + 12_000 * US) if place == last else one,
    )


def one_wait() -> Capture:
    return replace(found := overlong_last(), syncs=found.syncs[-1:])


def twice_as_fast() -> Capture:
    """The clock of the device runs twice as fast as that of the host, which waits for the device in each step."""
    return changed(
        overlong_last(6), lambda _, one: replace(one, start=2 * one.start, end=2 * min(one.end, one.start + 400 * US))
    )


def jumps_back() -> Capture:
    """The clock of the device jumps back before step 3, whose first half lies where the second half of step 2 does."""
    return changed(
        usual(6),
        lambda place, one: replace(one, start=one.start - 600 * US, end=one.end - 600 * US) if place >= 12 else one,
    )


def cut_by_time(*, cuts_calls: bool) -> Capture:
    """A tool cut all before the middle of step 0, where the host waits: its range and what ran begin there now."""
    cut, sound = 660 * US, overlong_last(6)
    kernels = [
        replace(
            one,
            start=max(one.start, cut),
            launch=one.launch if (one.launch or 0) >= cut else None,
            number=5 * (place // 4) + place % 4,
        )
        for place, one in enumerate(usual(6).kernels)
        if one.end > cut
    ]
    ranges = [replace(one, start=max(one.start, cut)) for one in sound.ranges if (one.end or 0) > cut]
    first, *others = [replace(one, number=5 * step + 4) for step, one in enumerate(sound.syncs)]
    first = replace(first, at=cut if cuts_calls else cut - 50 * US, lasts=270 * US)
    return replace(sound, kernels=kernels, ranges=ranges, syncs=[first, *others])


def early_start() -> Capture:
    """Programmatic dependent launch: a kernel begins before the one before it has ended."""
    work = (*USUAL, ("pdl_secondary", 150, 260, 7, 15, MAIN))
    return job(*(step(index, work) for index in range(5)))


def starts_before_launch() -> Capture:
    """One NCCL kernel begins 5 us before its launch call: a handful is no doubt about the clocks."""
    work = tuple((*one[:1], 395, *one[2:]) if one[0] == NCCL else one for one in USUAL)
    early = job(*(step(index, work) for index in range(5)))
    return changed(early, lambda place, one: replace(one, launch=one.start + 5 * US) if place == 2 else one)


def open_range() -> Capture:
    """The second step was still open when the recording ended."""
    second = step(1, USUAL[:2], PHASES[:2], name="step {}")
    second.ranges[0] = replace(second.ranges[0], end=None)
    return job(step(0, name="step {}"), second)


def copy_engines() -> Capture:
    """FSDP2 on symmetric memory: its all-gathers are copies within the range of the collective."""
    steps = []
    for index in range(5):
        work = (
            ("fwd_gemm", 220, 400, 7, 30, MAIN), ("bwd_gemm", 400, 800, 7, 120, AUTOGRAD),
            (REDUCE_SCATTER, 500, 700, 21, 135, AUTOGRAD), ("adam", 800, 900, 7, 510, MAIN),
        )  # fmt: skip
        one = step(index, work)
        at = (10 + STEP * index) * US
        one.ranges += [
            Range("FSDP::all_gather (layers.0)", at + 6 * US, at + 12 * US, MAIN),
            Range("nccl:_all_gather_base", at + 7 * US, at + 11 * US, MAIN),
            Range("nccl:_reduce_scatter_base", at + 130 * US, at + 140 * US, AUTOGRAD),
        ]
        one.kernels += [
            Kernel(
                "copy",
                at + (20 + 100 * half) * US,
                at + (120 + 100 * half) * US,
                at + (8 + half) * US,
                MAIN,
                stream=20,
                kind="memcpy",
            )
            for half in range(2)
        ]
        steps.append(one)
    return job(*steps)


def lost_copies(*steps: int) -> Capture:
    """Of some steps the copies are lost that carry out all-gathers; the calls that launch them are there."""
    return changed(
        copy_engines(),
        lambda _, one: (
            replace(one, call="cudaMemcpyAsync", is_lost=one.start // US // STEP in steps)
            if one.kind == "memcpy"
            else one
        ),
    )


def captures_a_graph() -> Capture:
    """In step 2 a copy is captured into a CUDA graph, so that it does not run::

    calls    cudaStreamBeginCapture  cudaMemcpyAsync  cudaStreamEndCapture
    """
    calls = ("cudaStreamBeginCapture_v10000", "cudaMemcpyAsync_v3020", "cudaStreamEndCapture_v10000")
    begin = (10 + STEP * 2 + 15) * US
    captured = [
        Kernel("", 0, 0, begin + at * 5 * US, MAIN, call=call, number=500 + at, is_lost=True)
        for at, call in enumerate(calls)
    ]
    sound = copy_engines()
    return replace(sound, kernels=[*sound.kernels, *captured])


def copies_between_devices(**of_copy: Any) -> Capture:
    """Async tensor parallelism: copies to the other GPU between two barriers of symmetric memory."""
    of_copy = {"copy_kind": 10} | of_copy
    steps = []
    for index in range(5):
        at = (10 + STEP * index) * US
        one = step(
            index,
            (
                ("fwd_gemm", 20, 200, 7, 10, MAIN), (BARRIER, 200, 205, 7, 30, MAIN), (BARRIER, 505, 510, 7, 50, MAIN),
                ("fwd_gemm2", 510, 900, 7, 60, MAIN),
            ),
            (("forward", 5, 400),),
        )  # fmt: skip
        one.kernels += [
            Kernel(
                "copy",
                at + (205 + 100 * part) * US,
                at + (305 + 100 * part) * US,
                at + (35 + part) * US,
                MAIN,
                kind="memcpy",
                **of_copy,
            )
            for part in range(3)
        ]
        steps.append(one)
    return job(*steps)


def graph_by_node(*, streams: Callable[[int, int], int], steps: int = 5) -> Capture:
    """Each step is a CUDA graph of four nodes; ``streams`` are of a step and a node."""
    found = []
    for index in range(steps):
        work = tuple(
            (what, start + 10 * (node == 0), end, streams(index, node), 20 if node == 0 else None, MAIN)
            for node, (what, start, end, *_) in enumerate(USUAL)
        )
        one = step(index, work, ())
        found.append(replace(one, kernels=[replace(kernel, number=200 + index) for kernel in one.kernels]))
    return job(*found)


def waiting() -> Capture:
    """In the third of six steps, backward and NCCL beside it last 29.6 ms longer, and all that follows is later."""
    at, by = (10 + 2 * STEP + 500) * US, 29_600 * US

    def later(time: int) -> int:
        return time + by if time > at else time

    found = usual(6)
    kernels = [
        replace(one, start=later(one.start), end=later(one.end), launch=later(one.launch or 0)) for one in found.kernels
    ]
    ranges = [replace(one, start=later(one.start), end=later(one.end or 0)) for one in found.ranges]
    return replace(found, kernels=kernels, ranges=ranges)


def lost_node() -> Capture:
    """Of the graph of the third of six steps, the all-reduce was not recorded."""
    graphs = graph_by_node(streams=lambda _, node: 20 if node == 2 else 7, steps=6)
    return replace(graphs, kernels=[one for place, one in enumerate(graphs.kernels) if place != 10])


def graph_whole() -> Capture:
    """Compute is a CUDA graph that was recorded whole; NCCL runs beside it."""
    steps = []
    for index in range(5):
        one = step(index, (("graph", 20, 600, 7, 10, MAIN), USUAL[2], USUAL[3]), ())
        one.kernels[0] = replace(one.kernels[0], kind="graph")
        steps.append(one)
    return job(*steps)


def silent_process() -> Capture:
    """A second process marks steps and launches, and none of its kernels was recorded."""
    other = [step(index, process=200) for index in range(5)]
    silent = [replace(one, kernels=[replace(kernel, is_lost=True) for kernel in one.kernels]) for one in other]
    return job(*map(step, range(5)), *silent)


def process_of_ranges() -> Capture:
    """Of a second process neither calls nor kernels were recorded, only its ranges, which begin 150 us later."""
    other = [replace(step(index, late=150, process=200), kernels=[]) for index in range(5)]
    return job(*map(step, range(5)), *other)


def process_that_names_collectives() -> Capture:
    """The same of a process without steps: NCCL's ranges tell that it communicated."""
    others = [
        Range("nccl:all_reduce", (300 + STEP * index) * US, (330 + STEP * index) * US, 201, 200) for index in range(5)
    ]
    return job(*map(step, range(5)), Capture(ranges=others))


def merged() -> Capture:
    """Two ranks in one file; the second one is 150 us later."""
    return job(*map(step, range(5)), *(step(index, late=150, process=200) for index in range(5)))


def expert_parallel() -> Capture:
    """DeepEP: each dispatch and combine has a kernel that prepares it."""
    work = (
        ("fwd_gemm", 20, 200, 7, 10, MAIN),
        ("void deep_ep::intranode::notify_dispatch<8>(int const*, int*)", 200, 230, 30, 20, MAIN),
        ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*)", 230, 330, 30, 22, MAIN),
        ("shared_expert_gemm", 330, 430, 7, 24, MAIN),
        ("void deep_ep::intranode::cached_notify_combine<8>(void**, int*)", 430, 440, 30, 26, MAIN),
        (
            "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(__nv_bfloat16*, float*)",
            440,
            560,
            30,
            28,
            MAIN,
        ),
        ("fwd_gemm2", 560, 900, 7, 32, MAIN),
    )
    return job(*(step(index, work, (("forward", 5, 400),)) for index in range(5)))


def with_stack() -> Capture:
    """Ranges of steps run 3 us into the next one."""
    steps = usual()
    ranges = [replace(one, end=one.end + 3 * US) if "Step" in one.name else one for one in steps.ranges]  # type: ignore[operator]
    return replace(steps, ranges=ranges)


def micro_batches() -> Capture:
    """A step of the profiler is a micro-batch, and three of four do not reduce."""
    return job(*(step(index, USUAL if index % 4 == 3 else (*USUAL[:2], USUAL[3])) for index in range(20)))


def start_end_ranges() -> Capture:
    return replace(
        usual(),
        ranges=[replace(one, is_start_end=True) for one in job(*(step(i, name="step {}") for i in range(5))).ranges],
    )


def library_ranges() -> Capture:
    """Only a library of CUDA marks what it does."""
    ranges = [
        Range(
            "cub::DeviceRadixSort",
            (15 + STEP * index) * US,
            (18 + STEP * index) * US,
            MAIN,
            domain="CCCL",
            registered=True,
        )
        for index in range(5)
    ]
    return replace(usual(), ranges=ranges)


def duplicates() -> Capture:
    """Each kernel is in the file twice."""
    once = usual()
    numbered = [replace(kernel, number=100 + place) for place, kernel in enumerate(once.kernels)]
    return replace(once, kernels=[*numbered, *(replace(kernel, launch=None) for kernel in numbered)])


def shared_numbers() -> Capture:
    """Backward's kernels have the number of forward's launch, and no kernel has that of their own."""
    numbered = [replace(kernel, number=100 + place) for place, kernel in enumerate(usual().kernels)]
    kernels = [replace(one, is_lost=one.name == "bwd_gemm") for one in numbered]
    kernels += [replace(one, launch=None, number=(one.number or 0) - 1) for one in numbered if one.name == "bwd_gemm"]
    return replace(usual(), kernels=kernels)


def on_a_second_stream() -> Capture:
    """Each all-reduce is there again, under the number of its launch, on a stream of its own."""
    numbered = [replace(one, number=100 + place) for place, one in enumerate(usual().kernels)]
    again = [replace(one, stream=120, launch=None) for one in numbered if one.name == NCCL]
    return replace(usual(), kernels=[*numbered, *again])


def numbered_0() -> Capture:
    """The profiler tells no numbers."""
    return changed(usual(), lambda _, one: replace(one, number=0))


def without_numbers() -> Capture:
    """No kernel has the number of its launch; the last launch has no kernel, as the recording ended before it."""
    numbered = [replace(kernel, number=100 + place) for place, kernel in enumerate(usual(30).kernels)]
    calls = [replace(one, is_lost=True) for one in numbered]
    return replace(usual(30), kernels=[*calls, *(replace(one, launch=None, number=0) for one in numbered[:-1])])


def coalesced() -> Capture:
    """An all-gather of several tensors at once, without the arguments of a collective."""
    steps = []
    for index in range(5):
        at = (10 + STEP * index) * US
        one = step(index, (*USUAL, (ALL_GATHER, 620, 720, 30, 218, MAIN)))
        one.ranges.append(Range("nccl:all_gather_into_tensor_coalesced", at + 205 * US, at + 225 * US, MAIN))
        steps.append(one)
    return job(*steps)


@dataclass(frozen=True)
class Reported:
    """What must be said.

    Attributes:
        report: Where the situation is from.
        capture: Builds it.
        times_us: Communication, overlapped and exposed of the first rank.
        steps: Number of its steps that count.
        says, says_not: Expressions for what the summary says, over its lines.
        formats: In which it can occur.
    """

    report: str
    capture: Callable[[], Capture]
    times_us: tuple[int | None, int | None, int | None]
    steps: int | None = 5
    says: tuple[str, ...] = ()
    says_not: tuple[str, ...] = ()
    formats: tuple[str, ...] = ("nsys", "kineto")


HALF = (2000, 1000, 1000)
CASES = {
    "a sound job": Reported("", usual, HALF, says=("5 steps", "50 % of communication is hidden")),
    "times since 1970": Reported("", since_1970, (4800, 2400, 2400), 12, says=("50 % of communication is hidden",)),
    "first steps lost": Reported(
        "pytorch#192021, kineto#996", lost_first, (800, 400, 400), 2,
        says=("steps 0 to 3 .* left out: 16 of 16 launches", r"step 1\.00 ms"), says_not=("steps that communicate",),
    ),
    "a step lost in half": Reported("kineto#996", lost_half_a_step, HALF, says=("step 2 left out: 2 of 4 launches",)),
    "calls and kernels lost": Reported(
        "", lost_calls, (1200, 600, 600), 3,
        says=("steps 0, 1 .* left out: no launch was recorded in them", "step 2 left out: .* recorded only in part"),
        says_not=("steps that communicate",),
    ),
    "the first launches of a step lost": Reported(
        "", lost_first_launches, (2000, 1000, 1000), says=("step 2 left out: .* recorded only in part",),
        says_not=("steps that communicate",),
    ),
    "the collectives of a step lost": Reported(
        "", lost_collectives, HALF, says=("step 3 left out: .* recorded only in part",),
        says_not=("steps that communicate",),
    ),
    "steps lost on another accelerator": Reported(
        "", lost_on_another_accelerator, (1600, 800, 800), 4, says=("steps 2, 3 .* left out: 8 of 8 launches",),
        says_not=("steps that communicate",), formats=("kineto",),
    ),
    "the launches of a step lost": Reported(
        "", lost_launches, (2000, 1000, 1000), 5, says=("4 of 20 activities have no launching call: the numbers of",),
        says_not=("left out",), formats=("nsys",),
    ),
    "half of the times are 0": Reported(
        "pytorch#188481", without_times, (1200, 600, 600), 3, says=(r"step 1\.00 ms", "3 steps"),
        says_not=(r"0\.50 ms", "steps that communicate"),
    ),
    "no durations of kernels": Reported(
        "", without_durations, (1200, 600, 600), 3,
        says=("steps 3 to 5 .* left out: a kernel in them takes no time",), says_not=("steps that communicate",),
    ),
    "in each step a kernel that ends before it starts": Reported(
        "", ends_before_starts, (None, None, None), 0,
        says=("steps 0 to 5 .* left out: a kernel in them takes no time",), says_not=("of communication is hidden",),
    ),
    "the host's times are 0 in the second half": Reported(
        "pytorch#188481", lost_host_events, (2400, 1200, 1200), 3,
        says=("12 of 24 activities have no launching call",), says_not=("ran outside of their ranges",),
    ),
    "steps that take no time": Reported(
        "", steps_without_time, (2400, 1200, 1200), 3,
        says=("3 ranges that could be steps left out: no time was recorded", r"step 1\.00 ms", "50 % of communication"),
        says_not=("steps that communicate",),
    ),
    "durations in a wrong unit": Reported(
        "roctracer#104", in_a_wrong_unit, (None, None, None), 0,
        says=("steps 0 to 4 .* impossible start", "step 5 left out: most steps have", "not known: no step of this"),
        says_not=("of communication is hidden",),
    ),
    "durations of collectives in a wrong unit": Reported(
        "roctracer#104", collectives_in_a_wrong_unit, (None, None, None), 0,
        says=("running on while many later ones of their stream began: 4", "not known: no step of this"),
        says_not=("of communication is hidden",),
    ),
    "a kernel over nine later ones": Reported(
        "TraceLens#669", overlong, (1600, 800, 800), 4,
        says=("ending after later ones of their stream: 1", "step 1 left out"),
        says_not=("79 %",),
    ),
    "a kernel over the one that follows": Reported(
        "TraceLens#669", overlong_over_one("bwd_gemm", 900), (1600, 800, 800), 4,
        says=("beside the next one of their stream: 1", "step 3 left out: .* impossible start or end", "50 % of comm"),
    ),
    "an all-reduce into the next one": Reported(
        "TraceLens#669", overlong_over_one(NCCL, 1300), (1600, 800, 800), 4,
        says=("beside the next one of their stream: 1", "step 3 left out: .* impossible start or end", "50 % of comm"),
    ),
    "an all-reduce that may have waited": Reported(
        "", overlong_over_one(NCCL, 900), (2500, 1380, 1120), says_not=("left out",)
    ),
    "the last kernel 30 times too long": Reported(
        "", overlong_last, (1600, 800, 800), 4,
        says=("ending after the host had waited for them: 1", "step 4 left out: .* impossible start", "50 % of comm"),
        says_not=("clocks",), formats=("nsys",),
    ),
    "the only wait is for a kernel that is too long": Reported(
        "", one_wait, (1600, 800, 800), 4, says=("step 4 left out: .* impossible start or end",), says_not=("clocks",),
        formats=("nsys",),
    ),
    "a device's clock that runs twice as fast": Reported(
        "kineto#1064", twice_as_fast, (4800, 2400, 2400), 6, formats=("nsys",),
        says=("clocks of host and device disagree", "waits of the host, 2 times as much time passes on the device"),
    ),
    "a step that was cut, with the wait of the host": Reported(
        "", lambda: cut_by_time(cuts_calls=True), (2000, 1000, 1000), 5, formats=("nsys",),
        says=("step 0 left out: no launch was recorded in it", "50 % of comm"), says_not=("steps that communicate",),
    ),
    "a step that was cut, without the wait of the host": Reported(
        "", lambda: cut_by_time(cuts_calls=False), (2000, 1000, 1000), 5, formats=("nsys",),
        says=("step 0 left out: its launches seem to be recorded only in part", "50 % of comm"),
        says_not=("steps that communicate",),
    ),
    "a device's clock that jumps back": Reported(
        "", jumps_back, (1600, 800, 800), 4,
        says=("clock of their device seems to jump back", "steps 2, 3 .* left out", "50 % of communication is hidden"),
    ),
    "programmatic dependent launch": Reported("perfetto#4280", early_start, HALF, says_not=("left out",)),
    "a start before its launch": Reported(
        "kineto#1380", starts_before_launch, (2025, 1025, 1000), says_not=("clocks of host and device disagree",)
    ),
    "a step open at the end": Reported(
        "kineto#986", open_range, (400, 200, 200), 1, says=("left out: still open",), says_not=(r"0\.72 ms",)
    ),
    "copies carry out all-gathers": Reported(
        "pytorch#176613", copy_engines, HALF,
        says=("50 % of communication is hidden",), says_not=("100 % of communication", "hides all"),
    ),
    "copies that carry out an all-gather lost": Reported(
        "pytorch#176613", lambda: lost_copies(2), (1600, 800, 800), 4,
        says=("step 2 left out: 2 calls that copy or set memory have no", "50 % of communication is hidden"),
    ),
    "all copies that carry out all-gathers lost": Reported(
        "pytorch#176613", lambda: lost_copies(*range(5)), (1000, 1000, 0),
        says=("exposed is not known: copies carry out collectives",), says_not=("is hidden", "hides all", "0 %"),
    ),
    "a copy captured into a graph": Reported("", captures_a_graph, HALF, says=("5 steps",), says_not=("left out",)),
    "copies between GPUs": Reported(
        "pytorch#169338", copies_between_devices, (1550, 0, 1550), says_not=(r"at most 1\.0 %",)
    ),
    "copies between GPUs, by their call": Reported(
        "pytorch#169338", lambda: copies_between_devices(copy_kind=8, call="cudaMemcpyPeerAsync"), (1550, 0, 1550)
    ),
    "copies between GPUs of AMD, by their call": Reported(
        "pytorch#169338", lambda: copies_between_devices(copy_kind=8, call="hipMemcpyPeerAsync"), (1550, 0, 1550)
    ),
    "copies between GPUs, by their devices": Reported(
        "pytorch#169338", lambda: copies_between_devices(copy_kind=8, from_device=0, to_device=1), (1550, 0, 1550),
        formats=("nsys",),
    ),
    "copies within a GPU, by their devices": Reported(
        "", lambda: copies_between_devices(copy_kind=8, call="cudaMemcpyPeerAsync", from_device=0, to_device=0),
        (50, 0, 50), formats=("nsys",),
    ),
    "a graph's nodes on other streams each time": Reported(
        "pytorch#152114", lambda: graph_by_node(streams=lambda index, node: 101 + 4 * index + node), HALF
    ),
    "a graph's nodes on lanes": Reported(
        "pytorch#192391", lambda: graph_by_node(streams=lambda _, node: 100002 if node == 2 else 100001), HALF
    ),
    "compute waits with NCCL for a peer": Reported(
        "", waiting, (32_000, 30_800, 1200), 6,
        says=(
            "step 2 alone holds 30.0 ms of 32.0 ms of communication: overlap 96 %, without it 50 %",
            r"50 % of communication is hidden \(96 % with outliers\)",
        ),
    ),
    "a graph's node lost": Reported(
        "", lost_node, HALF, 5, says=("step 2 left out: its launches seem to be recorded only in part",),
        says_not=("steps that communicate",),
    ),
    "a graph recorded whole": Reported(
        "pegainfer#163", graph_whole, (2000, None, None), says=("--cuda-graph-trace=node",),
        says_not=(r"0\.40 ms exposed", r"communication alone 0\.40", "is hidden"), formats=("nsys",),
    ),
    "a process without kernels": Reported(
        "vllm#10708", silent_process, HALF,
        says=("process 200 launched 20 kernels or graphs, and none of them was recorded",), formats=("nsys",),
    ),
    "a process of ranges": Reported(
        "vllm#10708", process_of_ranges, HALF,
        says=(r"process \d+ has ranges of steps, but neither its launches nor its work",),
        says_not=("ranges that could",),
    ),
    "a process that names collectives": Reported(
        "vllm#10708", process_that_names_collectives, HALF,
        says=(r"process \d+ calls collectives, .* but neither its launches",),
    ),
    "two ranks in one file": Reported("sglang#11413", merged, HALF, says_not=("of 10 steps", r"0\.85 ms")),
    "expert parallelism": Reported("torchtitan#2298", expert_parallel, (1300, 0, 1300), says=(r"\(of 0 to 1\)",)),
    "steps that overlap by 3 us": Reported("pytorch#174555", with_stack, HALF, says=("5 steps",)),
    "steps are micro-batches": Reported(
        "libreyolo#453", micro_batches, HALF, 20, says=("5 of 20 steps that communicate",), says_not=("left out",)
    ),
    "start/end ranges": Reported("nsys-ai#307", start_end_ranges, HALF, formats=("nsys",)),
    "ranges of a library only": Reported(
        "nsys-ai#215", library_ranges, HALF, None, says=("no steps are marked from begin to end",), formats=("nsys",)
    ),
    "each kernel twice": Reported("kineto", duplicates, HALF, says=("20, with 5 duplicate collectives",)),
    "each all-reduce on a second stream, too": Reported(
        "", on_a_second_stream, HALF, 5, says=("5 duplicate collectives: counted twice",),
    ),
    "kernels with the number of another's launch": Reported(
        "kineto#1416", shared_numbers, HALF,
        says=("5 of 20 activities have the correlation number of another one's launch", "exposed time is tail"),
        formats=("kineto",),
    ),
    "calls and kernels with the number 0": Reported(
        "chakra#128", numbered_0, HALF, 5,
        says=("20 of 20 activities carry no correlation number", "no step is known to have launched much of it"),
        says_not=("left out",),
    ),
    "kernels without the numbers of their launches": Reported(
        "kineto#1416", without_numbers, (12000, 6000, 6000), 30,
        says=("119 of 119 activities carry no correlation number", "no step is known to have launched much of it"),
        says_not=("lost",),
    ),
    "an all-gather without arguments": Reported("chakra#178", coalesced, HALF),
}  # fmt: skip

OTHERS = {
    "steps that overlap by 3 us": [
        event(
            "python_function", "train.py(20): step", (9 + STEP * index) * US, (1011 + STEP * index) * US, PROCESS, MAIN
        )
        for index in range(5)
    ],
}


def written(name: str, capture: Capture, how: str, folder: Path) -> Path:
    if how == "nsys":
        return write_capture(folder / "x.sqlite", capture, "2025.3")
    return write_kineto(folder / "x.json", capture, others=OTHERS.get(name, ()))


@pytest.mark.parametrize(
    ("name", "how"),
    of_which_the_gate_keeps(
        [(name, case.formats[at % len(case.formats)]) for at, (name, case) in enumerate(CASES.items())],
        [(name, how) for name, case in CASES.items() for how in case.formats],
    ),
)
@pytest.mark.slow
def test_what_is_said_of_a_reported_situation_is_so(name: str, how: str, tmp_path: Path) -> None:
    case = CASES[name]
    trace = written(name, case.capture(), how, tmp_path)
    rank = json.loads(run("overlap", "--format", "json", trace).stdout)["ranks"][0]
    found = tuple(rank[f"{part}_ns"] for part in ("comm", "overlapped", "exposed"))
    assert found == tuple(None if us is None else us * US for us in case.times_us)
    steps = [one for one in rank["steps"] if one["host_ns"] is not None]
    assert len(steps) == (case.steps or 0)
    text = re.sub(r"\s+", " ", run("summary", "--notes", trace).stdout)
    for told in case.says:
        assert re.search(told, text), text
    for told in case.says_not:
        assert not re.search(told, text), text


@pytest.mark.parametrize("how", ["nsys", "kineto"])
@pytest.mark.parametrize("damage", [lost_first, lost_half_a_step, lost_calls, overlong])
def test_what_was_lost_is_no_change(damage: Callable[[], Capture], how: str, tmp_path: Path) -> None:
    """Each step that counts is equal to those of a sound capture, to the nanosecond."""
    (tmp_path / "b").mkdir()
    sound, damaged = written("", usual(6), how, tmp_path), written("", damage(), how, tmp_path / "b")
    changes = json.loads(run("compare", "--format", "json", sound, damaged).stdout)["changes"]
    assert changes
    assert not any(one["is_beyond_spread"] for one in changes)
    assert {one["change_ns"] or 0 for one in changes} == {0}, changes


@pytest.mark.parametrize("how", ["nsys", "kineto"])
def test_a_file_that_holds_all_events_twice_says_what_it_says_of_one(how: str, tmp_path: Path) -> None:
    """Each collective counted twice, so a bucket seemed to be reduced twice, and no_sync() was the advice."""
    trace, told = written("", usual(), how, tmp_path), []
    for twice in (False, True):
        if twice and how == "kineto":
            document = json.loads(trace.read_text())
            document["traceEvents"] *= 2
            trace.write_text(json.dumps(document))
        elif twice:
            with closing(sqlite3.connect(trace)) as database:
                for table in (KERNEL, CALL, NVTX):
                    database.execute(f"INSERT INTO {table} SELECT * FROM {table}")
                database.commit()
        documents = [json.loads(run(command, "--format", "json", trace).stdout) for command in ("summary", "overlap")]
        told.append([documents[0]["runs"][0]["cause"], documents[1]["ranks"], run("collectives", trace).stdout[:500]])
    assert told[0] == told[1]


@pytest.mark.parametrize("how", ["nsys", "kineto"])
def test_what_a_file_holds_twice_is_known_also_if_the_second_begins_later(how: str, tmp_path: Path) -> None:
    """Two profilers at once: each kernel counted twice, and hid communication for longer."""
    numbered, told = changed(usual(), lambda place, one: replace(one, number=1 + place)), []
    later = [replace(one, start=one.start + US, end=one.end + US) for one in numbered.kernels]
    for name, capture in (("once", numbered), ("twice", replace(numbered, kernels=[*numbered.kernels, *later]))):
        (tmp_path / name).mkdir()
        trace = written("", capture, how, tmp_path / name)
        told.append(json.loads(run("overlap", "--format", "json", trace).stdout))
    assert told[0]["ranks"] == told[1]["ranks"]
    assert "40, with 5 duplicate collectives" in " ".join(told[1]["warnings"])


def test_a_run_of_lost_steps_is_not_said_to_mark_none(tmp_path: Path) -> None:
    lost = changed(usual(), lambda _, one: replace(one, is_lost=one.name == NCCL))
    traces = [write_capture(tmp_path / "x.sqlite", usual()), write_capture(tmp_path / "y.sqlite", lost)]
    text = run("compare", "--waterfall", *traces).stdout
    assert "y: left out, it has no step that can be measured" in text
    assert "marks no whole step" not in text


def test_two_ranks_in_one_file_do_not_cut_each_others_steps(tmp_path: Path) -> None:
    for how in ("nsys", "kineto"):
        ranks = json.loads(run("overlap", "--format", "json", written("", merged(), how, tmp_path)).stdout)["ranks"]
        assert [[one["exposed_ns"] for one in rank["steps"]] for rank in ranks] == [[200 * US] * 5] * 2


@pytest.mark.parametrize("how", ["nsys", "kineto"])
def test_where_no_nccl_kernel_was_recorded_the_host_is_not_blamed(how: str, tmp_path: Path) -> None:
    """The device seems to be idle for 92 % of each step: in it, NCCL ran."""
    steps = [
        step(index, (("fwd_gemm", 20, 60, 7, 10, MAIN), ("adam", 940, 980, 7, 930, MAIN)), ()) for index in range(5)
    ]
    for one in steps:
        one.ranges.append(replace(one.ranges[0], name="nccl:all_reduce", start=one.ranges[0].start + 100 * US))
    trace = written("", job(*steps), how, tmp_path)
    assert json.loads(run("doctor", "--format", "json", trace).stdout)["findings"] == []
    assert "late" not in run("summary", "--notes", trace).stdout
    assert "no NCCL kernel was recorded" in json.loads(run("critical", "--format", "json", trace).stdout)["reason"]


def test_operators_that_call_collectives_are_no_silence(tmp_path: Path) -> None:
    """Older torch.profilers record no event of gloo: the device waits for it, and the host seemed to launch late."""
    work = (("fwd_gemm", 20, 60, 7, 10, MAIN), ("adam", 940, 980, 7, 930, MAIN))
    calls = [
        event("cpu_op", "c10d::allreduce_", (100 + STEP * at) * US, (110 + STEP * at) * US, PROCESS, MAIN)
        for at in range(5)
    ]
    trace = write_kineto(tmp_path / "x.json", job(*(step(index, work) for index in range(5))), others=calls)
    (told,) = json.loads(run("summary", "--format", "json", trace).stdout)["runs"]
    assert "'c10d::allreduce_' calls them" in told["missing"]
    assert "nothing tells when they ran" in told["headline"]
    assert (told["idle"], told["advice"]) == (None, None)
    (rank,) = json.loads(run("overlap", "--format", "json", trace).stdout)["ranks"]
    assert {one["exposed_ns"] for one in rank["steps"]} == {None}


@pytest.mark.parametrize("how", ["nsys", "kineto"])
def test_ranges_of_backward_that_are_lost_in_some_steps_change_no_part(how: str, tmp_path: Path) -> None:
    """Of one job, tail was 0.10 ms shorter and transfer 0.10 longer, and 25 % hid in backward instead of 50."""
    (tmp_path / "lossy").mkdir()
    whole, lossy = usual(8), usual(8)
    lossy.ranges[:] = [
        one for place, one in enumerate(lossy.ranges) if one.name != "backward" or place // 4 in (0, 2, 4, 6)
    ]
    files = written("", whole, how, tmp_path), written("", lossy, how, tmp_path / "lossy")
    changes = {one["part"]: one for one in json.loads(run("compare", "--format", "json", *files).stdout)["changes"]}
    assert not any(one["is_beyond_spread"] for one in changes.values())
    assert changes["tail"]["after_ns"] is None
    (rank,) = json.loads(run("overlap", "--format", "json", files[1]).stdout)["ranks"]
    assert (rank["overlap_ratio"], rank["backward_overlap_ratio"]) == (0.5, None)


@pytest.mark.parametrize(("ends", "is_busy"), [(590, False), (601, True)])
def test_a_stream_that_is_free_before_the_last_bucket_is_not_said_to_be_busy(
    ends: int, is_busy: bool, tmp_path: Path
) -> None:
    """The link is idle for 10 us before the last gradient is ready, so a smaller last bucket would help.

    us       200         400        590 600         800
    compute  BBBBBBBBBBBBCCCCCCCCCCCCCCCC..............
    NCCL     ............NNNNNNNNNNNN....MMMMMMMMMMMMMM
    """
    work = (
        ("fwd_gemm", 20, 200, 7, 10, MAIN),
        ("bwd_gemm", 200, 400, 7, 120, AUTOGRAD),
        (NCCL, 401, ends, 20, 125, AUTOGRAD),
        ("bwd_gemm", 400, 600, 7, 130, AUTOGRAD),
        (NCCL, 602, 800, 20, 135, AUTOGRAD),
        ("adam", 800, 900, 7, 510, MAIN),
    )
    trace = write_kineto(tmp_path / "x.json", job(*(step(index, work) for index in range(5))))
    assert ("Its stream is busy with earlier collectives until it starts" in one_line(trace)) == is_busy


def test_gloo_beside_nccl_is_said_to_be_in_no_figure(tmp_path: Path) -> None:
    """Nothing was said of it, though the device idles meanwhile.

    us       940       970              1020
    device   OOOOOOOOOO....................FF
    gloo     ##########################......      80 us, for 50 of which the device does not work
    """
    barriers = [
        event("user_annotation", "gloo:barrier", (940 + STEP * at) * US, (1020 + STEP * at) * US, PROCESS, 7)
        for at in range(5)
    ]
    work = (USUAL[0], USUAL[1], USUAL[2], ("adam", 800, 960, 7, 510, MAIN))
    trace = write_kineto(tmp_path / "x.json", job(*(step(index, work) for index in range(5))), others=barriers)
    assert "5 events such as 'gloo:barrier' last 0.40 ms in all, for 0.25 ms of which no device" in one_line(trace)
    assert "gloo on the host" not in one_line(write_kineto(tmp_path / "y.json", usual()))


def one_line(trace: Path) -> str:
    return " ".join(run("summary", "--notes", trace).stdout.split())


def test_idle_time_between_steps_is_not_left_to_a_table_of_idle_time_in_them(tmp_path: Path) -> None:
    """'kernels shows what it waits for', which said that no device was idle."""
    trace = write_kineto(tmp_path / "x.json", changed(usual(), lambda _, one: replace(one, name="gemm")))
    (told,) = json.loads(run("summary", "--format", "json", trace).stdout)["runs"]
    assert told["idle"].endswith(
        "12 % of a typical step: mostly from the last work of a step to the first of the next."
    )
    assert "no device was idle from the first to the last work" in run("kernels", "--table", "idle", trace).stdout


@pytest.mark.parametrize("how", ["nsys", "kineto"])
def test_where_copies_were_not_recorded_a_device_is_not_said_to_be_idle(how: str, tmp_path: Path) -> None:
    """It copies for 80 % of each step; the calls alone are in the file."""
    work = (("fwd_gemm", 20, 60, 7, 10, MAIN), ("copy", 60, 900, 7, 20, MAIN), (NCCL, 900, 940, 20, 30, MAIN))
    steps = job(*(step(index, work) for index in range(5)))
    lost = changed(
        steps,
        lambda _, one: replace(one, kind="memcpy", call="cudaMemcpyAsync", is_lost=True) if one.name == "copy" else one,
    )
    trace = written("", lost, how, tmp_path)
    (rank,) = json.loads(run("overlap", "--format", "json", trace).stdout)["ranks"]
    assert {(one["idle_ns"], one["exposed_memory_ns"], one["length"]["idle_ns"]) for one in rank["steps"]} == {
        (None,) * 3
    }
    assert {one["exposed_ns"] for one in rank["steps"]} == {40 * US}
    assert "idle" not in run("summary", trace).stdout
    (use,) = json.loads(run("kernels", "--format", "json", trace).stdout)["ranks"]
    assert (use["idle_ns"], use["idle"], "without the copies" in use["idle_reason"]) == (None, [], True)


def test_beside_a_graph_recorded_whole_no_share_of_the_step_is_all_communication(tmp_path: Path) -> None:
    """What was recorded beside it takes 40 % of the step, and it may communicate, too."""
    (row,) = csv_rows("compare", written("", graph_whole(), "nsys", tmp_path))
    assert (float(row["comm_ms"]), row["comm_of_step_%"]) == (0.4, "")


def with_streams(trace: Path, number: int | None) -> Path:
    """Write this number for each stream, or none."""
    if trace.suffix == ".sqlite":
        with closing(sqlite3.connect(trace)) as database:
            database.execute(f"UPDATE {KERNEL} SET streamId = ?", (number,))
            database.commit()
        return trace
    document = json.loads(trace.read_text())
    for one in document["traceEvents"]:
        if one.get("cat") == "kernel":
            one["args"].pop("stream", None)
            one["args"] |= {} if number is None else {"stream": number}
            one["tid"] = "a stream" if number is None else number
    trace.write_text(json.dumps(document))
    return trace


@pytest.mark.parametrize("how", ["nsys", "kineto"])
def test_where_streams_were_not_recorded_none_is_said_to_stand_still(how: str, tmp_path: Path) -> None:
    """All work seemed to be of one stream: collectives that nothing waited for held it, and had impossible ends."""
    trace = with_streams(written("", optimizer_in_backward(), how, tmp_path), None)
    text = re.sub(r"\s+", " ", run("summary", "--notes", trace).stdout)
    assert "5 steps" in text
    assert "blocking is not known: the trace does not tell on which streams work ran" in text
    assert "stands still" not in text
    assert "gloo" not in run("doctor", trace).stdout, "without a stream, it was said how to record sizes of gloo"


@pytest.mark.parametrize("how", ["nsys", "kineto"])
def test_where_all_streams_are_called_0_a_collective_beside_compute_holds_nothing_up(how: str, tmp_path: Path) -> None:
    """Half hidden by compute, it 'ran on the compute stream', where 'only kernels of other streams can overlap'."""

    def of_one_stream(name: str, capture: Capture) -> Path:
        (folder := tmp_path / name).mkdir()
        return with_streams(written("", capture, how, folder), 0)

    trace = of_one_stream("usual", usual())
    told = run("summary", "--notes", trace).stdout + run("doctor", trace).stdout
    assert "50 % of communication is hidden" in told
    assert "the trace does not tell on which streams work ran" in told
    assert "compute stream" not in told
    assert "stands still" not in told
    # If nothing runs at the same time, it may be one stream.
    in_turn = of_one_stream("in_turn", optimizer_in_backward())
    assert "on the compute stream (0)" in run("overlap", in_turn).stdout
    # Where all durations are too long, compute seems to run beside compute: streams are not the reason.
    too_long = of_one_stream("too_long", in_a_wrong_unit())
    assert "impossible start or end" in run("overlap", too_long).stdout


def optimizer_in_backward() -> Capture:
    """Autograd's thread steps on each bucket once it is reduced, and goes on with backward behind that.

    us         0  100 200 300 400 500 600 700 800
    stream 7   FFFFbbbb....oobbbb....oobbbb....oo
    stream 20  ........AAAA......AAAA......AAAA..
    """
    steps = [step(index, (("fwd_gemm", 20, 100, 7, 10, MAIN),), ()) for index in range(5)]
    syncs = []
    for index, one in enumerate(steps):
        begin = (10 + STEP * index) * US
        for bucket in range(3):
            at, call, number = begin + 250 * bucket * US, begin + (20 + 20 * bucket) * US, 100 * index + 20 * bucket
            one.ranges.append(Range("Optimizer.step#AdamW.step", call + 12 * US, call + 15 * US, AUTOGRAD))
            for place, (name, start, end, stream) in enumerate(
                [("bwd_gemm", 100, 200, 7), (NCCL, 200, 300, 20), ("adam", 300, 350, 7)]
            ):
                launch = call + (1 + 6 * place) * US
                kernel = Kernel(name, at + start * US, at + end * US, launch, AUTOGRAD, stream=stream)
                one.kernels.append(replace(kernel, number=1_000 + number + 5 * place))
            for before, after, place in ((7, 20, 1), (20, 7, 2)):
                event, of = 1 + 2 * (3 * index + bucket) + place, {"thread": AUTOGRAD, "sync_id": number + place}
                when, first = call + (6 * place - 3) * US, 1_000 + number + 5 * place
                syncs += [
                    Sync("cudaEventRecord_v3020", when, first - 2, before, event=event, **of),
                    Sync("cudaStreamWaitEvent_v3020", when + US, first - 1, after, event=event, sync_type=2, **of),
                ]
    return job(*steps, syncs=syncs)


def test_backward_stands_still_for_an_optimizer_that_steps_in_it(tmp_path: Path) -> None:
    """What waits for a bucket is the optimizer's, not backward's, which goes on behind it: nothing was found."""
    trace = write_capture(tmp_path / "x.sqlite", optimizer_in_backward())
    (finding,) = json.loads(run("doctor", "--format", "json", trace).stdout)["findings"]
    assert finding["rule"] == "backward waits for its reductions"
    assert finding["cost_ns"] == 200 * US


@pytest.mark.parametrize("bytes_", [0, 8, 1 << 22])
def test_the_norm_of_a_stage_is_not_taken_for_its_gradients(bytes_: int, tmp_path: Path) -> None:
    """A pipeline without data parallelism; without sizes it was said to reduce its gradients after backward."""
    work = (
        ("fwd_gemm", 20, 200, 7, 10, MAIN), ("ncclDevKernel_SendRecv(x)", 200, 260, 20, 12, MAIN),
        ("bwd_gemm", 260, 700, 7, 120, AUTOGRAD), ("norm", 700, 710, 7, 410, MAIN), (NCCL, 710, 760, 21, 420, MAIN),
    )  # fmt: skip
    trace = write_kineto(tmp_path / "x.json", job(*(step(index, work) for index in range(5))))
    document = json.loads(trace.read_text())
    for one in document["traceEvents"]:
        if bytes_ and one["name"] == NCCL:
            one["args"] |= {"Collective name": "allreduce", "In msg nelems": bytes_ // 4, "dtype": "Float"}
            one["args"] |= {"Out msg nelems": bytes_ // 4, "Group size": 2}
    trace.write_text(json.dumps(document))
    found = json.loads(run("doctor", "--format", "json", trace).stdout)
    rule = "gradients reduced after backward"
    assert (rule in [one["rule"] for one in found["findings"]]) == (bytes_ > 8)
    assert (rule in [one["rule"] for one in found["abstained"]]) == (bytes_ == 0)


def copies_far_ahead(steps: int) -> Capture:
    """The host launches all steps, 1 us each, before the first one ends on the device, and waits once, at the end.

    us         0         10        20        30        40        of each step on the device
    stream 7   .gggggcccccccccc..........kkk                     the copies k out of buckets take 3
    stream 20  ......AAAAAAAAAAAAAAAAAAAA
    """
    found = bucket_steps(*[20] * steps)

    def early(at: int) -> int:
        number, within = divmod(at, 40 * US)
        return number * US + within

    for kernel in found.kernels:
        kernel.launch = early(kernel.launch or 0)
        if kernel.name == "copy back":
            kernel.kind, kernel.call, kernel.bytes = "memcpy", "cudaMemcpyAsync", 1 << 20
    *waits, last = found.syncs
    syncs = [replace(one, at=early(one.at)) for one in waits if "DeviceSynchronize" not in one.call]
    syncs.append(replace(last, at=steps * US, lasts=39 * US * steps))
    ranges = [
        Range(name, US * step, US * step + lasts, MAIN)
        for step in range(steps)
        for name, lasts in ((f"step {step}", 990), ("backward", 690))
    ]
    return replace(found, ranges=ranges, syncs=syncs)


def test_steps_of_a_host_that_is_far_ahead_are_replayed(tmp_path: Path) -> None:
    """Calls of later steps lie before work of earlier ones: the begin of a step was not found, and doctor failed."""
    trace = write_capture(tmp_path / "x.sqlite", copies_far_ahead(7))
    (finding,) = json.loads(run("doctor", "--format", "json", trace).stdout)["findings"]
    assert (finding["rule"], finding["expected_gain_ns"]) == ("copies out of buckets", 3 * US)


def test_copies_of_every_third_step_are_told_of_such_a_step(tmp_path: Path) -> None:
    """The others accumulate gradients: 'expected gain 0.0 ms; at most 0.0 ms per step' was the main advice."""
    capture = copies_far_ahead(15)
    accumulates = [index % 3 > 0 for index in range(15)]
    capture.kernels = [
        kernel
        for kernel in capture.kernels
        if not accumulates[(kernel.launch or 0) // US] or kernel.name not in (NCCL, "copy back")
    ]
    capture.syncs = [one for one in capture.syncs[:-1] if not accumulates[one.at // US]] + capture.syncs[-1:]
    trace = write_capture(tmp_path / "x.sqlite", capture)
    (finding,) = json.loads(run("doctor", "--format", "json", trace).stdout)["findings"]
    assert (finding["rule"], finding["expected_gain_ns"]) == ("copies out of buckets", 3 * US)
    assert "take 3.0 µs of a typical step that copies" in finding["evidence"]


@pytest.mark.parametrize(("kind", "is_found"), [(1, False), (2, False), (8, True), (0, True)])
def test_what_copies_from_or_to_the_host_copies_no_gradients(kind: int, is_found: bool, tmp_path: Path) -> None:
    """As of the bitmap of unused parameters: in exports of nsys, gradient_as_bucket_view was the advice."""
    capture = copies_far_ahead(7)
    for kernel in capture.kernels:
        kernel.copy_kind = kind
    trace = write_capture(tmp_path / "x.sqlite", capture)
    found = json.loads(run("doctor", "--format", "json", trace).stdout)["findings"]
    assert ("copies out of buckets" in [one["rule"] for one in found]) == is_found


@pytest.mark.parametrize("how", ["nsys", "kineto"])
def test_a_process_that_drives_two_devices_is_advised_to_become_two(how: str, tmp_path: Path) -> None:
    """``nn.DataParallel``: broadcast_buffers=False of DDP, and async_op=True, were advised, which it does not have."""
    work = (
        ("ncclDevKernel_Broadcast_RING_LL(x)", 20, 120, 7, 10, MAIN), ("fwd_gemm", 120, 300, 7, 12, MAIN),
        ("bwd_gemm", 300, 700, 7, 120, AUTOGRAD), ("ncclDevKernel_Reduce_Sum_f32_RING_LL", 700, 800, 7, 300, AUTOGRAD),
    )  # fmt: skip
    one = job(*(step(index, work) for index in range(5)))
    both = replace(one, kernels=[replace(of, device=device) for of in one.kernels for device in (0, 1)])
    (finding,) = json.loads(run("doctor", "--format", "json", written("", both, how, tmp_path)).stdout)["findings"]
    assert finding["rule"] == "communication on the compute stream"
    assert "DistributedDataParallel has a process for each" in finding["advice"]
    (tmp_path / "one").mkdir()
    told = json.loads(run("doctor", "--format", "json", written("", one, how, tmp_path / "one")).stdout)["findings"]
    assert "async_op=True" in told[0]["advice"], "a process for each device"


@pytest.mark.parametrize("how", ["nsys", "kineto"])
def test_steps_beside_an_overlong_kernel_are_as_they_were(how: str, tmp_path: Path) -> None:
    (rank,) = json.loads(run("overlap", "--format", "json", written("", overlong(), how, tmp_path)).stdout)["ranks"]
    assert {one["step"]: one["overlapped_ns"] for one in rank["steps"]} == dict.fromkeys((0, 2, 3, 4), 200 * US)


MEASURING = (
    *("summary", "summary --notes", "overlap", "overlap --steps", "collectives", "collectives --by step", "critical"),
    *("doctor", "skew", "kernels", "kernels --table hidden", "compare", "compare --waterfall", "whatif", "info"),
    "check --max-exposed-ms 1",
)


@pytest.mark.parametrize("command", MEASURING)
def test_every_command_says_what_was_lost(command: str, tmp_path: Path) -> None:
    """Of a run, and of one of two runs: that command printed the figures of the other steps without a word."""
    lost = changed(usual(6), lambda place, one: replace(one, is_lost=one.name == NCCL and place < 12))
    damaged, sound = write_capture(tmp_path / "x.sqlite", lost), write_capture(tmp_path / "y.sqlite", usual(6))
    for traces in ([damaged], [damaged, sound]):
        told = run(*command.split(), *traces)
        assert "left out: 3 of 12 launches in them have no activity" in re.sub(r"\s+", " ", told.stdout + told.stderr)


def test_a_rank_whose_clocks_disagree_is_not_said_to_be_late_when_a_step_begins(tmp_path: Path) -> None:
    """Its steps begin with its first work on the device, those of the other rank with their ranges on the host."""
    late = {"fwd_gemm": (190, 200), NCCL: (500, 800)}
    work = tuple((one[0], *late.get(one[0], one[1:3]), *one[3:]) for one in USUAL)
    late_job = job(*(step(index, work) for index in range(5)))
    off = changed(late_job, lambda _, one: replace(one, start=one.start - 600 * US, end=one.end - 600 * US))
    shift = 5_000 * US
    ranks = [usual(), off]
    for rank in ranks:
        rank.ranges[:] = [replace(one, start=one.start + shift, end=(one.end or 0) + shift) for one in rank.ranges]
        rank.kernels[:] = [
            replace(one, start=one.start + shift, end=one.end + shift, launch=(one.launch or 0) + shift)
            for one in rank.kernels
        ]
    files = [write_kineto(tmp_path / f"x.rank{rank}.json", of, rank=rank) for rank, of in enumerate(ranks)]
    document = json.loads(run("skew", "--format", "json", *files).stdout)
    assert "Rank 1 arrives last in 5 of 5 steps, by 0.10 ms" in document["headline"]
    assert "when the step begins" not in document["headline"]
    assert [rank["lag_before_ns"] for rank in document["ranks"]] == [None, None]


def of_ranks(folder: Path, *ranks: Capture) -> list[Path]:
    return [write_kineto(folder / f"x.rank{rank}.json", of, rank=rank) for rank, of in enumerate(ranks)]


@pytest.mark.parametrize("how", ["nsys", "kineto"])
def test_a_step_before_a_gap_does_not_last_until_the_gap_ends(how: str, tmp_path: Path) -> None:
    """Step 3 was cut out; where the host runs ahead, step 2 was said to last 2 ms."""
    ahead = changed(usual(8), lambda _, one: replace(one, start=one.start + 1500 * US, end=one.end + 1500 * US))
    begin, end = (10 + STEP * 3) * US, (10 + STEP * 4) * US
    kernels = [one for one in ahead.kernels if not begin <= (one.launch or 0) < end]
    ranges = [one for one in ahead.ranges if not begin <= one.start < end]
    trace = written("", replace(ahead, kernels=kernels, ranges=ranges), how, tmp_path)
    (rank,) = json.loads(run("overlap", "--format", "json", trace).stdout)["ranks"]
    lengths = {one["step"]: one["length"]["ns"] for one in rank["steps"]}
    assert lengths == dict.fromkeys((0, 1, 4, 5, 6), STEP * US) | {2: None, 7: None}


def test_a_process_of_unknown_rank_may_be_the_missing_one(tmp_path: Path) -> None:
    """One of two ranks was recorded by nsys, which does not tell its number."""
    files = [write_capture(tmp_path / "x.sqlite", usual()), write_kineto(tmp_path / "y.json", usual(), rank=1)]
    document = json.loads(run("skew", "--one-run", "--format", "json", *files).stdout)
    assert document["alignment"]["missing_ranks"] == []
    assert not any("not among the traces" in warning for warning in document["warnings"])
    alone = json.loads(run("skew", "--format", "json", files[1]).stdout)
    assert alone["alignment"]["missing_ranks"] == [0]


def test_ranks_that_recorded_other_steps_are_said_to(tmp_path: Path) -> None:
    late = usual()
    late.ranges[:] = [replace(one, name=one.name.replace("#", "#10")) for one in late.ranges]
    document = json.loads(run("skew", "--format", "json", *of_ranks(tmp_path, usual(), late)).stdout)
    assert "no step was recorded on more than one rank (such as 0 to 4 and 100 to 104)" in document["headline"]


def test_one_late_step_of_twelve_is_no_reason_to_look_for_a_cause(tmp_path: Path) -> None:
    """'It is 63 us late when the step begins: look for the cause in what comes before' stood behind 'chance'."""
    drifts = usual(12)
    drifts.kernels[:] = [
        replace(one, start=one.start * 101 // 100, end=one.end * 101 // 100, launch=(one.launch or 0) * 101 // 100)
        for one in drifts.kernels
    ]
    drifts.ranges[:] = [
        replace(one, start=one.start * 101 // 100, end=(one.end or 0) * 101 // 100) for one in drifts.ranges
    ]
    document = json.loads(run("skew", "--format", "json", *of_ranks(tmp_path, usual(12), drifts)).stdout)
    assert document["headline"].endswith("in 1 of 12 steps, by 59.0 µs; so few steps do not exclude chance.")


@pytest.mark.parametrize("how", ["nsys", "kineto"])
def test_without_launches_no_step_is_said_to_communicate_0_ns(how: str, tmp_path: Path) -> None:
    """A host that runs ahead, of which no call was recorded: each step had 0 kernels' communication, 0 blocking.

    us      0   1000  2000  3000          the ranges of the steps end before the second step's work begins
    ranges  01234
    device  .000001111122222333334444
    """
    ahead = changed(usual(), lambda _, one: replace(one, launch=None))
    ahead.ranges[:] = [
        Range(f"step {index}", (10 + 100 * index) * US, (10 + 100 * (index + 1)) * US, MAIN) for index in range(5)
    ]
    document = json.loads(run("overlap", "--format", "json", written("", ahead, how, tmp_path)).stdout)
    (rank,) = document["ranks"]
    figures = ("comm_ns", "overlapped_ns", "exposed_ns", "window_ns", "blocking_ns", "tail_ns")
    assert rank["comm_ns"] == 2_000_000
    assert {(name, step[name]) for step in rank["steps"] for name in figures} == {(name, None) for name in figures}


@pytest.mark.parametrize("how", ["nsys", "kineto"])
def test_in_one_file_a_device_whose_clock_is_off_is_not_early(how: str, tmp_path: Path) -> None:
    """Process 100 was said to arrive last in all steps, by 0.25 ms, though process 200 is 0.15 ms behind it."""
    off = changed(
        merged(),
        lambda _, one: replace(one, start=one.start - 400 * US, end=one.end - 400 * US) if one.process == 200 else one,
    )
    trace = written("", off, how, tmp_path)
    document = json.loads(run("skew", "--format", "json", trace).stdout)
    assert "times of the devices in one file cannot be compared" in document["headline"]
    assert "straggler" not in run("doctor", "-q", trace).stdout


def test_csv_without_rows_has_the_header_of_one_with_rows(tmp_path: Path) -> None:
    """It was empty, which readers of CSV refuse, and any name of a column was taken."""
    silent = write_kineto(tmp_path / "x.json", usual())
    full = {
        "critical": write_capture(tmp_path / "waits.sqlite", bucket_steps(20, 20)),
        "skew": write_capture(tmp_path / "ranks.sqlite", merged(), "2025.3"),
        "doctor": write_capture(tmp_path / "host.sqlite", job(*(step(at, USUAL[:1]) for at in range(5))), "2025.3"),
        "kernels --table idle": write_kineto(
            tmp_path / "idle.json", job(*(step(at, (USUAL[0], USUAL[3])) for at in range(5)))
        ),
    }
    for command, trace in full.items():
        header, *rows = run(*command.split(), "--format", "csv", trace).stdout.splitlines()
        assert (run(*command.split(), "--format", "csv", silent).stdout, bool(rows)) == (f"{header}\n", True), command
        assert run(*command.split(), "--format", "csv", "--columns", "no", silent).exit_code == 2
