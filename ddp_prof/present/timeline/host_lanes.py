"""What the host did: steps and phases, the program's own ranges, its CUDA calls."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.present import theme
from ddp_prof.present.text import milliseconds, percent
from ddp_prof.present.timeline.boxes import PHASE_CODE, View, codes_of, make_boxes, nest, stack
from ddp_prof.present.timeline.model import CALLS, HOST, RANGES, Lane
from ddp_prof.range_names import PROCESS
from ddp_prof.trace import UNKNOWN, Trace, concatenate, distinct, select

INFERRED = "backward (inferred: launched by autograd's threads)"


def host_lane(rank: RankEvents, view: View) -> Lane:
    """Steps on the upper row, their phases below."""
    measured, rank = rank, rank.including_warmup
    seen = np.flatnonzero(view.is_visible(rank.steps.start_ns, rank.steps.end_ns) & rank.has_steps)
    steps = make_boxes(
        view,
        rank.steps.start_ns[seen],
        rank.steps.end_ns[seen],
        codes_of(theme.STEP, len(seen)),
        name_id=np.arange(len(seen), dtype=np.int64),
        step=rank.step_keys[seen],
    )
    told, inferred = (
        select(item, view.is_visible(item.start_ns, item.end_ns)) for item in (rank.phases, rank.inferred_backward)
    )
    phases = concatenate(told, inferred)
    ranges = make_boxes(
        view,
        phases.start_ns,
        phases.end_ns,
        PHASE_CODE[phases.kind],
        name_id=np.repeat([UNKNOWN, len(seen)], [len(told), len(inferred)]),
        step=rank.step_at(phases.start_ns),
        level=stack(phases.start_ns, phases.end_ns) + steps.level.max(initial=-1) + 1,
    )
    parts = measured.breakdown
    columns = (measured.step_keys.tolist(), parts.comm_ns.tolist(), parts.overlapped_ns.tolist())
    shares = {key: times for key, *times in zip(*columns, strict=True)}
    keys, names = rank.step_keys.tolist(), rank.steps.names
    titles = [_step_title(names[row], *shares.get(keys[row], (0, 0))) for row in seen.tolist()]
    return Lane("host", HOST, concatenate(steps, ranges), (*titles, INFERRED))


def _step_title(name: str, comm_ns: int, overlapped_ns: int) -> str:
    if not comm_ns:
        return name
    return f"{name}: {percent(overlapped_ns / comm_ns)} of {milliseconds(comm_ns)} communication overlapped"


def range_lanes(rank: RankEvents, view: View) -> Iterator[Lane]:
    """The program's own ranges: those that nest by depth, below them those that may cross."""
    trace, spans = rank.trace, rank.trace.spans
    is_named = np.array([not name.startswith(f"{PROCESS}|") for name in trace.names], np.bool_)[spans.name_id]
    seen = np.flatnonzero((spans.process == rank.process) & is_named & view.is_visible(spans.start_ns, spans.end_ns))
    for thread in distinct(spans.lane[seen]):
        own = seen[spans.lane[seen] == thread]
        nested, crossing = own[spans.is_start_end[own] == 0], own[spans.is_start_end[own] == 1]
        depth = nest(spans.start_ns[nested], spans.end_ns[nested])
        below = stack(spans.start_ns[crossing], spans.end_ns[crossing]) + depth.max(initial=-1) + 1
        rows = np.concatenate([nested, crossing])
        boxes = make_boxes(
            view,
            spans.start_ns[rows],
            spans.end_ns[rows],
            codes_of(theme.RANGE, len(rows)),
            name_id=spans.name_id[rows],
            step=rank.step_at(spans.start_ns[rows]),
            level=np.concatenate([depth, below]),
        )
        yield Lane(f"ranges, {thread_name(trace, rank.process, thread)}", RANGES, boxes, trace.names)


def call_lanes(rank: RankEvents, view: View) -> Iterator[Lane]:
    """All calls of the process, and of those before what is seen the ones that launched it.

    None where they were not read whole.
    """
    trace, calls, details = rank.trace, rank.trace.calls, rank.trace.call_details
    if details is None:
        return
    is_seen = view.is_visible(calls.start_ns, details.end_ns)
    launchers = trace.launching_calls[view.is_visible(trace.activities.start_ns, trace.activities.end_ns)]
    is_seen[launchers[launchers != UNKNOWN]] = True
    seen = np.flatnonzero(is_seen & (calls.process == rank.process))
    for thread in distinct(calls.lane[seen]):
        rows = seen[calls.lane[seen] == thread]
        start, end = calls.start_ns[rows], details.end_ns[rows]
        boxes = make_boxes(
            view,
            start,
            end,
            codes_of(theme.CALL, len(rows)),
            name_id=details.name_id[rows],
            step=rank.step_at(start),
            call=rows,
            level=nest(start, end),
        )
        yield Lane(f"CUDA calls, {thread_name(trace, rank.process, thread)}", CALLS, boxes, trace.names)


def thread_name(trace: Trace, process: int, thread: int) -> str:
    """What a thread is called: by its name, and by its number, since many have one name."""
    if thread == process:
        return "main thread"
    name = trace.threads.get((process, thread), f"thread {thread}")
    return name if str(thread) in name else f"{name} ({thread})"
