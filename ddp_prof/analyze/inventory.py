"""What a trace contains for each process, and which questions it cannot answer because something was not recorded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ddp_prof.analyze.core.attribution import BACKWARD_PHASE, gloo_names
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.steps import KNOWN_NAMES, find_phases, find_steps
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.missing import find_missing, how_to_record_cpu
from ddp_prof.analyze.quality import diagnose
from ddp_prof.analyze.why_unknown import (
    GRAPHS,
    LOST,
    NO_BACKWARD,
    NO_COMMUNICATION,
    NOTHING,
    lacks_names,
    why_unknown,
    why_unknown_work,
)
from ddp_prof.columns import ALWAYS, USUALLY, WITH_MUCH_ROOM, WITH_ROOM, ResultColumn, column
from ddp_prof.communication import GLOO
from ddp_prof.manifest import Manifest, label_of
from ddp_prof.range_names import BACKWARD, COLLECTIVES, PHASES, STEP, parse_ranges
from ddp_prof.table import Brief
from ddp_prof.trace import UNKNOWN, Category, Kind, Trace, distinct


@dataclass(frozen=True, slots=True)
class ProcessInventory:
    """The numbers of events, ranges and steps of one process. The order of the columns is that of tables."""

    rank: int | None = column("number of the rank", null="it is not known", stays=ALWAYS, describes=True)
    process: int = column("number of the operating system's process", stays=WITH_MUCH_ROOM, describes=True)
    devices: tuple[int, ...] = column(
        "numbers of the GPUs",
        parts=(
            ResultColumn(
                "devices",
                "numbers of the GPUs, or cpu; n/a if no number was recorded, or nothing of what was launched",
                get=lambda process: process.devices_text,
                stays=WITH_ROOM,
                describes=True,
            ),
        ),
    )
    kernels: int = column("kernels", stays=WITH_ROOM)
    collectives: int | None = column(
        "kernels that communicate", null="kernels have no names", key="comm_kernels", stays=WITH_ROOM
    )
    copies: int = column("memory copies and memory sets", stays=WITH_ROOM)
    calls: int = column("calls of the CUDA API", key="CUDA_calls", stays=WITH_ROOM)
    ranges: int = column("NVTX ranges", stays=WITH_ROOM)
    steps: int = column("steps that count: without those of warm-up and incomplete ones", stays=USUALLY)
    warmup_steps: int = column("steps of warm-up, which are left out", key="warm-up_steps", stays=WITH_ROOM)
    backward_ranges: int = column("ranges that name the backward pass", stays=WITH_ROOM)
    marked_collectives: int = column("collectives that ranges of ddp_prof mark")
    incomplete_steps: int = column("steps that were not recorded completely, which are left out", default=0)

    @property
    def devices_text(self) -> str:
        """The column ``devices`` of the table."""
        uses_some = self.kernels or self.copies or self.calls
        return ", ".join(map(str, self.devices)) or ("n/a" if uses_some else "cpu")


@dataclass(frozen=True, slots=True)
class TraceInventory(Brief):
    """What a trace contains.

    Attributes:
        duration_ns: From the first start to the last end of an activity or a range of the trace.
        advice: Lines, each on a question that the trace cannot answer, and on how to record what it needs.
        recognized: For steps and for each phase, one example of a name that was recognized, as a tuple: ``step`` or the
            phase, the name, the program that uses such names.
    """

    trace: Path
    label: str
    source: str
    producer: str | None
    device: str
    duration_ns: int
    world_size: int | None
    manifest: Manifest | None
    processes: tuple[ProcessInventory, ...]
    advice: tuple[str, ...]
    warnings: tuple[str, ...]
    recognized: tuple[tuple[str, str, str], ...] = ()
    recorder: str | None = None


def take_inventory(
    trace: Trace,
    step_range: str | None = None,
    backward_range: str | None = None,
    ranks: Sequence[RankEvents] | None = None,
) -> TraceInventory:
    """Return what a trace contains.

    ``step_range`` and ``backward_range`` are the user's regular expressions for the names of steps and of backward.
    ``ranks`` are all ranks of the trace, if the caller has them already.
    """
    ranks = find_rank_events(trace, step_range, backward_range) if ranks is None else ranks
    processes = [_process_inventory(trace, process, step_range, backward_range, ranks) for process in trace.processes]
    # Names are not recognized where the user passed a regular expression for them.
    recognized: list[tuple[str, str, str]] = []
    of_ranges = [trace.names[index] for index in distinct(trace.spans.name_id) if index != UNKNOWN]
    if step_range is None:
        ours = [of_ranges[index] for index in parse_ranges(of_ranges, STEP)]
        known = [(STEP, min(ours, key=_natural_sort_key), "ddp_prof")] if ours else _first_known_name(of_ranges, STEP)
        recognized += known
    for phase in PHASES:
        if phase != BACKWARD or backward_range is None:
            recognized += _first_known_name(of_ranges, phase)
    return TraceInventory(
        trace=trace.path,
        label=label_of(trace.path, trace.manifest),
        source=trace.source,
        producer=trace.producer,
        device=trace.device,
        duration_ns=trace.duration_ns,
        world_size=trace.world_size,
        manifest=trace.manifest,
        processes=tuple(processes),
        advice=tuple(_find_advice(trace, processes, ranks)),
        recognized=tuple(recognized),
        warnings=diagnose(trace, ranks),
        recorder=trace.recorder,
    )


def _first_known_name(names: Sequence[str], kind: str) -> Iterator[tuple[str, str, str]]:
    """Yield at most one item: kind, name and program of a name that is known for steps or for a phase.

    ``names`` are those of ranges, because a kernel or an operator of such a name is no phase. ``kind`` is ``step`` or a
    phase. The first pattern that matches a name counts.
    """
    for known in (known for known in KNOWN_NAMES if known.kind == kind):
        if found := list(filter(re.compile(known.pattern, re.IGNORECASE).search, names)):
            yield kind, min(found, key=_natural_sort_key), known.writer
            return


def _natural_sort_key(name: str) -> tuple[int, str]:
    return len(name), name


def _process_inventory(
    trace: Trace, process: int, step_range: str | None, backward_range: str | None, ranks: Sequence[RankEvents]
) -> ProcessInventory:
    """Return the numbers of one process. Steps are those of its first rank with steps, warm-up included."""
    mine, names = trace.activities.process == process, trace.spans.name_id[trace.spans.process == process]
    kind = trace.activities.kind[mine]
    rank = next((rank for rank in ranks if rank.process == process and rank.has_steps), None)
    mine_with_warmup = [rank.including_warmup for rank in ranks if rank.process == process]
    steps = rank.including_warmup.steps if rank else find_steps(trace, process, step_range).steps
    incomplete = min((own.incomplete_steps for own in ranks if own.process == process and own.has_steps), default=0)
    return ProcessInventory(
        process=process,
        rank=trace.ranks.get(process),
        devices=tuple(device for device in distinct(trace.activities.device[mine]) if device != UNKNOWN),
        kernels=int((kind == Kind.KERNEL).sum()),
        collectives=None
        if any(map(lacks_names, mine_with_warmup))
        else sum(int((own.is_collective & (own.events.activity != UNKNOWN)).sum()) for own in mine_with_warmup),
        copies=int(np.isin(kind, (Kind.COPY, Kind.MEMORY_SET)).sum()),
        calls=int((trace.calls.process == process).sum()),
        ranges=len(names),
        steps=int((~steps.warmup).sum()) - incomplete,
        warmup_steps=int(steps.warmup.sum()),
        backward_ranges=int((find_phases(trace, process, backward_range).kind == BACKWARD_PHASE).sum()),
        marked_collectives=int(np.isin(names, [*parse_ranges(trace.names, *COLLECTIVES)]).sum()),
        incomplete_steps=incomplete,
    )


def _find_advice(trace: Trace, processes: Sequence[ProcessInventory], ranks: Sequence[RankEvents]) -> list[str]:
    """Return a line for each question that the trace cannot answer: what is missing, and how to record it."""
    advice, has_work = [], any(len(rank.including_warmup.events) for rank in ranks)
    if not has_work and LOST in map(why_unknown_work, ranks) and (lost := find_missing(trace, ranks)):
        advice.append(f"overlap: {lost.text}")
    elif not has_work:
        lacks = "no ddp_prof ranges that tell what a CPU did instead"
        if trace.source == "kineto":
            lacks += "" if len(trace.operators) else ", no operators"
            lacks += "" if gloo_names(trace) else f", no '{GLOO}' events"
        how = "record it again"
        if not len(trace.calls):
            how = "record with nsys' --trace=cuda,nvtx, or with ProfilerActivity.CUDA, too"
        on_cpu = f"; {how_to_record_cpu(trace)}" if trace.device == "cpu" else ""
        advice.append(f"overlap: no GPU activities, {lacks}: {how}{on_cpu}")
    if len(trace.operators) and any(rank.hides_backward for rank in ranks):
        advice.append(f"overlap: {NO_BACKWARD}: run it in the thread that runs torch.profiler")
    told = (None, NOTHING, GRAPHS, NO_BACKWARD, NO_COMMUNICATION)  # by other lines, or none is needed
    reasons = [why_unknown(rank) for rank in ranks if not rank.why_left_out]
    if has_work and (reason := next((each for each in reasons if each not in told), None)):
        missing = find_missing(trace, ranks)
        advice.append(f"overlap: {missing.text if missing else reason}")
    unknown = [
        rank.blocking.coverage.reason for rank in ranks if np.any(rank.events.category == Category.COMMUNICATION)
    ]
    if reason := next(filter(None, unknown), None):
        advice.append(f"blocking: what waits for communication is not known: {reason}")
    if reason := next((rank.why_left_out for rank in ranks if rank.why_left_out), None):
        advice.append(f"steps: {reason}")
    elif not any(process.steps or process.warmup_steps for process in processes):
        unmarked = "no range that looks like a step: name yours with --step-range, or add 'step N' ranges"
        is_cut = any(rank.ranges_left_out for rank in ranks)
        cut = "none of those that are marked was recorded from its begin to its end: record more steps"
        advice.append(f"steps: {cut if is_cut else unmarked}")
    is_inferred = any(rank.backward == "inferred" for rank in ranks)  # which a warning says
    if has_work and not is_inferred and not any(process.backward_ranges for process in processes):
        how = "no range names it, and no thread is known to be autograd's; name yours with --backward-range"
        advice.append(f"backward: {how}")
    if all(process.rank is None for process in processes):
        advice.append("ranks: the trace does not tell which process is which rank")
    return advice
