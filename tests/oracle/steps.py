"""Overlap and the breakdown of a step."""

from __future__ import annotations

from ddp_prof.trace import Category
from tests.oracle.ranks import Rank, Step, united


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
    last = rank.backward_end(step)
    compute_only, exposed_memory = (compute & window) - own, (memory & window) - compute - own
    idle = window - compute - memory - own
    backward = united(rank.backward())
    return {
        "step": step.number,
        "host_ns": step.end - step.start if rank.has_steps else None,
        "kernels": sum(e.is_kernel for e in launched),
        "collectives": len(rank.of(Category.COMMUNICATION, step)),
        "comm_ns": len(own),
        "overlapped_ns": len(own & compute),
        "exposed_ns": len(own - compute),
        "tail_ns": None if last is None else len({t for t in own - compute if t >= last}),
        "backward_overlapped_ns": len(own & backward) if rank.backward(step) else None,
        "window_ns": len(window),
        "compute_only_ns": None if hides else len(compute_only),
        "exposed_memory_ns": len(exposed_memory),
        "idle_ns": None if hides else len(idle),
        "other_comm_ns": len(idle & every),
    }


def rank_figures(rank: Rank) -> dict[str, int | None]:
    """What ``RankOverlap`` says."""
    compute, every = rank.instants(Category.COMPUTE), rank.instants(Category.COMMUNICATION)
    backward = united(rank.backward())
    blind = rank.is_blind or not rank.events
    known = {
        "compute_ns": len(compute),
        "comm_ns": len(every),
        "overlapped_ns": len(every & compute),
        "exposed_ns": len(every - compute),
        "backward_overlapped_ns": len(every & backward) if backward else None,
    }
    return {name: None if blind else value for name, value in known.items()}
