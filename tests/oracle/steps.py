"""Overlap, the breakdown of a step, and how long it took."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from ddp_prof.trace import Category
from tests.oracle.ranks import Event, Rank, Step, united


def step_figures(rank: Rank, step: Step) -> dict[str, int | None]:
    """What ``StepOverlap`` says."""
    compute, memory = rank.instants(Category.COMPUTE), rank.instants(Category.MEMORY)
    every, own = rank.instants(Category.COMMUNICATION), rank.instants(Category.COMMUNICATION, step)
    launched = [e for e in rank.events if e.step is step]
    start = min((e.start for e in launched), default=None)
    end = max((e.end for e in launched), default=None)
    if rank.device is None:
        start = step.start if start is None else min(start, step.start)
        end = step.end if end is None else max(end, step.end)
    window = set() if start is None or end is None else set(range(start, end))
    hides = any(e.category in (Category.OTHER, Category.UNKNOWN) for e in rank.events)
    passes = rank.passes(step) if rank.has_steps else []
    compute_only, exposed_memory = (compute & window) - own, (memory & window) - compute - own
    idle = window - compute - memory - own
    backward = united(rank.backward())
    known = {
        "step": step.number,
        "host_ns": step.end - step.start if rank.has_steps else None,
        "kernels": sum(e.is_kernel for e in launched),
        "collectives": sum(e.step is step for e in rank.collectives()),
        "passes": len(passes) or None,
    }
    figures = {
        "comm_ns": len(own),
        "overlapped_ns": len(own & compute),
        "exposed_ns": len(own - compute),
        "tail_ns": len(tail(rank, step) - compute)
        if passes and own and all(p.end is not None for p in passes)
        else None,
        "backward_overlapped_ns": len(own & backward) if rank.backward(step) else None,
        "window_ns": len(window),
        "compute_only_ns": None if hides else len(compute_only),
        "exposed_memory_ns": len(exposed_memory),
        "idle_ns": None if hides else len(idle),
        "other_comm_ns": len(idle & every),
    }
    if hides_waits(rank):
        figures |= dict.fromkeys(("overlapped_ns", "exposed_ns", "tail_ns", "backward_overlapped_ns"))
    elif hides_graphs(rank):
        figures = dict.fromkeys(figures) | {name: figures[name] for name in ("comm_ns", "window_ns")}
    if is_unseen(rank):
        figures |= dict.fromkeys(("comm_ns", "overlapped_ns", "exposed_ns", "backward_overlapped_ns"))
    if misses_launches(rank) or _is_unnamed(rank):
        return known | dict.fromkeys(("kernels", "collectives", *figures))
    return known | figures


def _is_unnamed(rank: Rank) -> bool:
    return (rank.is_unnamed and not hides_graphs(rank)) or takes_no_time(rank)


def takes_no_time(rank: Rank) -> bool:
    """Whether it communicates, and all of that takes no time, if nothing worse is known of it."""
    sent = rank.select_category(Category.COMMUNICATION)
    return bool(sent) and not united(sent) and not (rank.is_blind or hides_graphs(rank))


def is_unseen(rank: Rank) -> bool:
    """Whether it may have communicated, and nothing of that was recorded in what counts."""
    if united(rank.select_category(Category.COMMUNICATION)) or takes_no_time(rank):
        return False
    is_left_out = rank.has_steps and not rank.steps
    if rank.is_silent and rank.world_size == 1 and not is_left_out:
        return False
    return is_left_out or hides_graphs(rank) or rank.communicates_elsewhere or rank.is_unnamed or rank.may_have_lost


def tail(rank: Rank, step: Step) -> set[int]:
    """The instants after the end of its pass of what ends last of the operations that run then."""
    operations = [e for e in rank.collectives() if e.step is step]
    found = set()
    for time in united([part for e in operations for part in e.parts]):
        owner = max((e.end, place) for place, e in enumerate(operations) if e.start <= time < e.end)[1]
        own = rank.pass_of(operations[owner])
        if own is not None and own.end is not None and time >= own.end:
            found.add(time)
    return found


def hides_graphs(rank: Rank) -> bool:
    """Whether graphs were recorded whole: what computed is not known, nor what it hid."""
    return any(e.category == Category.OTHER for e in rank.events)


def hides_waits(rank: Rank) -> bool:
    """A CPU that marks no wait: what of a collective is within a phase was computing or waiting."""
    both = rank.instants(Category.COMPUTE) & rank.instants(Category.COMMUNICATION)
    return rank.device is None and not rank.synchronize and bool(both)


def misses_launches(rank: Rank) -> bool:
    """Whether of more than a fifth of the communication no step is known, though it ran in steps."""
    sent = rank.select_category(Category.COMMUNICATION)
    lost = united([e for e in sent if e.step is None and not e.has_launch])
    during = {time for step in rank.steps for time in range(step.start, step.end)}
    if rank.steps and not any(e.step for e in rank.events):
        during = set(range(rank.steps[0].start, max([rank.steps[-1].end, *(e.end for e in rank.events)])))
    return 5 * len(lost & during) > len(united(sent))


def runs_ahead(rank: Rank) -> bool:
    """Whether most work that its steps gave to the device was done outside of their ranges on the host.

    Also whether more than 5 % of it was done between two ranges, if it is known of some step when the next one begins
    on the device.
    """
    if rank.clocks_disagree:  # then only the device's clock tells how long a step lasts
        return rank.has_steps
    own = work_of_steps(rank)
    if len(own) > 2 * sum(step.start <= time < step.end for step, time in own):
        return rank.has_steps
    gaps = [
        range(step.end, following.start)
        for step, following in pairwise(rank.all_steps)
        if {id(step), id(following)} <= {*map(id, rank.steps)}
    ]
    between = sum(time in gap for gap in gaps for _, time in own)
    is_known = any(begins_and_ends(rank, step) for step in rank.steps)
    return rank.has_steps and is_known and between > 0.05 * len(own)


def work_of_steps(rank: Rank) -> list[tuple[Step, int]]:
    steps = [(step_of_work(rank, e), e) for e in rank.events if e.stream is not None]
    return [(step, time) for step, e in steps if step for time in e.instants]


def step_of_work(rank: Rank, event: Event) -> Step | None:
    """The step that launched it; if no launch was recorded, the last that began before it."""
    begun = [step for step in rank.steps if step.start <= event.start and event.launch is None]
    return event.step or max(begun, key=lambda step: step.start, default=None)


def window_of_length(rank: Rank, step: Step) -> set[int] | None:
    """The instants of a step: its host's range, or all until the next one's first work; ``None`` if it is not known."""
    if rank.is_lost:
        return None
    if not runs_ahead(rank):
        before = rank.all_steps[: rank.all_steps.index(step)][-1:]
        reaches_out = any(not one.start <= time < one.end for one, time in work_of_steps(rank))
        if reaches_out and before and before[0] in rank.incomplete:  # its work may have reached into this one
            return None
        return set(range(step.start, step.end))
    edges = begins_and_ends(rank, step)
    return None if edges is None else set(range(*edges))


def begins_and_ends(rank: Rank, step: Step) -> tuple[int, int] | None:
    """When a step begins on the device, and when the next one does."""
    following = rank.all_steps[rank.all_steps.index(step) + 1 :][:1]
    edges = [first_work(rank, one) for one in (step, *following) if one in rank.steps]
    return None if len(edges) < 2 or None in edges or edges[1] < edges[0] else tuple(edges)


def first_work(rank: Rank, step: Step) -> int | None:
    """The first start on the stream on which the step computes most."""
    own = [e for e in rank.events if e.step is step and e.stream is not None]
    busy: Counter[int] = Counter()
    for e in own:
        if e.category not in (Category.COMMUNICATION, Category.MEMORY):
            busy[e.stream] += e.end - e.start
    busiest = min((stream for stream in busy if busy[stream] == max(busy.values())), default=None)
    return min((e.start for e in own if e.stream == busiest), default=None)


def length_figures(rank: Rank, step: Step) -> dict[str, int | None]:
    """What ``StepLength`` says."""
    window = window_of_length(rank, step) if rank.has_steps else None
    names = ("compute_only_ns", "overlapped_ns", "exposed_ns", "exposed_memory_ns", "idle_ns")
    if window is None:
        return dict.fromkeys(("start_ns", "ns", *names))
    compute, memory = rank.instants(Category.COMPUTE), rank.instants(Category.MEMORY)
    every = rank.instants(Category.COMMUNICATION)
    parts = (compute - every, compute & every, every - compute, memory - compute - every)
    lengths = [len(part & window) for part in parts]
    figures = dict(zip(names, (*lengths, len(window) - sum(lengths)), strict=True))
    hides = any(e.category in (Category.OTHER, Category.UNKNOWN) for e in rank.events)
    if hides:
        figures |= {"compute_only_ns": None, "idle_ns": None}
    if rank.is_blind or not rank.events or hides_graphs(rank) or rank.is_unnamed or takes_no_time(rank):
        figures = dict.fromkeys(names)
    elif hides_waits(rank):
        figures |= dict.fromkeys(("overlapped_ns", "exposed_ns"))
    start = first_work(rank, step) if runs_ahead(rank) else step.start
    return {"start_ns": start, "ns": len(window), **figures}


def _loses_backward(rank: Rank) -> bool:
    """Whether a step without compute of backward has as many collectives as one with both."""
    has = [(sum(e.step is step for e in rank.collectives()), bool(rank.backward(step))) for step in rank.steps]
    least = min((count for count, knows in has if knows and count), default=None)
    return least is not None and any(count >= least for count, knows in has if not knows)


def rank_figures(rank: Rank) -> dict[str, int | None]:
    """What ``RankOverlap`` says."""
    compute, every = rank.instants(Category.COMPUTE), rank.instants(Category.COMMUNICATION)
    backward = united(rank.backward())
    blind = rank.is_blind or not rank.events
    known = {
        "compute_ns": len(united(rank.select_category(Category.COMPUTE))),
        "comm_ns": len(every),
        "overlapped_ns": len(every & compute),
        "exposed_ns": len(every - compute),
        "backward_overlapped_ns": len(every & backward) if backward and not _loses_backward(rank) else None,
    }
    is_left_out = rank.has_steps and not rank.steps
    if (hides_graphs(rank) or hides_waits(rank) or is_left_out) and every:
        known |= dict.fromkeys(("overlapped_ns", "exposed_ns", "backward_overlapped_ns"))
    if takes_no_time(rank):
        known |= dict.fromkeys(("comm_ns", "overlapped_ns", "exposed_ns", "backward_overlapped_ns"))
    if hides_waits(rank):
        known["compute_ns"] = None
    return {name: None if blind else value for name, value in known.items()}
