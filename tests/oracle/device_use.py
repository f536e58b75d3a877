"""What hid communication, and why a device was idle, instant by instant."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from ddp_prof.trace import Category, Trace
from tests.oracle.ranks import Rank, Step

HIDING = ("backward", "forward", "optimizer", "synchronize", None)
HOST = ("synchronize", "forward", "backward", "optimizer")


def hidden_by_phase(rank: Rank) -> Counter[str | None]:
    """Overlapped instants by the phase of the compute beside them, the first of ``HIDING`` where there are several."""
    found: Counter[str | None] = Counter()
    computes = [e for e in (*rank.events, *rank.beside) if e.category == Category.COMPUTE]
    for instant in rank.instants(Category.COMPUTE) & rank.instants(Category.COMMUNICATION):
        phases = {e.phase for e in computes if e.start <= instant < e.end}
        found[next(phase for phase in HIDING if phase in phases)] += 1
    return found


def idle_causes(rank: Rank, trace: Trace, phases: dict[str, list[tuple[int, int]]]) -> Counter[str]:
    """Idle instants of all steps by cause; ``phases`` are the host's ranges."""
    found: Counter[str] = Counter()
    for step in rank.steps:
        own = rank.instants(Category.COMMUNICATION, step)
        busy = rank.instants(Category.COMPUTE) | rank.instants(Category.MEMORY) | own
        for instant in _window(rank, step) - busy:
            found[_cause(rank, instant, trace, phases)] += 1
    return found


def inferred_backward(rank: Rank) -> list[tuple[int, int]]:
    """From the first launch of backward to the last before one of another phase or step; only of steps."""
    known = [e for e in rank.events if None not in (e.launch, e.phase, e.step)] if rank.has_steps else []
    runs = groupby(sorted(known, key=lambda e: e.launch), key=lambda e: (e.phase == "backward", id(e.step)))
    launches = [[e.launch for e in run] for (is_backward, _), run in runs if is_backward]
    return [(run[0], run[-1]) for run in launches]


def _window(rank: Rank, step: Step) -> set[int]:
    own = [e for e in rank.events if e.step is step]
    edges = [edge for e in own for edge in (e.start, e.end)]
    edges += [step.start, step.end] if rank.device is None else []
    return set(range(min(edges), max(edges))) if edges else set()


def _cause(rank: Rank, instant: int, trace: Trace, phases: dict[str, list[tuple[int, int]]]) -> str:
    if instant in rank.instants(Category.COMMUNICATION):
        return "communication of another step"
    if rank.clocks_disagree:
        return "unknown"
    overhead = zip(trace.overhead.start_ns, trace.overhead.end_ns, strict=True)
    if any(start <= instant < end for start, end in overhead):
        return "the profiler at work"
    if rank.device is not None:
        later = [e for e in rank.events if e.start > instant and e.end > e.start]
        first = min((e.start for e in later), default=None)
        launches = [e.launch for e in later if e.start == first and e.launch is not None]
        if not launches:
            return "unknown"
        if min(launches) <= instant:
            return "launched, not begun"
    for phase in (*HOST, "inferred"):
        if any(start <= instant < end for start, end in phases.get(phase, [])):
            return f"host in {phase.replace('inferred', 'backward')}"
    return "host outside of named phases"
