"""What a trace does not let one say: one line each, with the way to record it better."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.intervals import EVER, union
from ddp_prof.manifest import RANKS_PER_GPU, Caveat, caveats_of
from ddp_prof.range_names import PROCESS, parse_range
from ddp_prof.trace import UNKNOWN, Category, Kind, distinct, select

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddp_prof.analyze.core.rank_events import RankEvents
    from ddp_prof.analyze.intervals import Intervals
    from ddp_prof.trace import Activities, Trace

OVERHEAD_LIMIT = 0.01
"""Share of a capture's duration from which the profiler's own work is reported."""

SUSPECT_LIMIT = 0.01
"""Share of the kernels' summed time from which an unknown kernel with a telling name is reported."""

_TELLING = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|send_?recv|nvshmem|ccl|multimem", re.I)


@dataclass(frozen=True)
class Evidence:
    """What doubts follow from; that of the parts of a capture adds up.

    Attributes:
        said: What is said of a trace or of steps, a line each.
        of_overhead: What is said of the profiler's own work.
        activities: Their number; ``graphs`` and ``orphans``, those without a launching call, are some of them.
        repeated: Collectives that are in the trace more than once: of one stream, and of one time.
        calls: The number of calls.
        busy_ns: Compute of each stream of a process and device; ``collectives`` the number of collectives on it.
        compute_ns: Summed time of the kernels that were taken for compute, by name.
        kernels_ns: Of all kernels.
    """

    said: tuple[str, ...] = ()
    of_overhead: tuple[str, ...] = ()
    activities: int = 0
    graphs: int = 0
    orphans: int = 0
    calls: int = 0
    repeated: int = 0
    busy_ns: Counter[tuple[int, int | None, int]] = field(default_factory=Counter)
    collectives: Counter[tuple[int, int | None, int]] = field(default_factory=Counter)
    compute_ns: Counter[str] = field(default_factory=Counter)
    kernels_ns: int = 0

    def __add__(self, other: Evidence) -> Evidence:
        values = {item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)}
        lines = {name: tuple(dict.fromkeys(values[name])) for name in ("said", "of_overhead")}
        return Evidence(**{**values, **lines})

    def busiest_stream(self, process: int, device: int | None) -> int:
        """The stream of a device on which most compute time is spent, ``UNKNOWN`` where there is none."""
        busy_ns = {lane: ns for (*owner, lane), ns in self.busy_ns.items() if owner == [process, device] and ns}
        return max(sorted(busy_ns), key=busy_ns.__getitem__, default=UNKNOWN)

    def doubts(self) -> tuple[str, ...]:
        """All doubts, a line each."""
        recorded = (*_about_launches(self), *_about_repetition(self))
        return (*self.said, *recorded, *self.of_overhead, *_about_streams(self), *_about_names(self))


def diagnose(trace: Trace, ranks: Sequence[RankEvents]) -> tuple[str, ...]:
    """All doubts about the figures of a trace."""
    return gather_evidence(trace, ranks).doubts()


def gather_evidence(trace: Trace, ranks: Sequence[RankEvents], span: Intervals = EVER) -> Evidence:
    """What doubts follow from, of the activities that start in a span."""
    activities, counts = trace.activities, span.holds(trace.activities.start_ns)
    duration = np.where(counts & (activities.kind == Kind.KERNEL), activities.end_ns - activities.start_ns, 0)
    computing = activities.category == Category.COMPUTE
    total = np.bincount(activities.name_id[computing], weights=duration[computing], minlength=len(trace.names))
    busy_ns, collectives = Counter[tuple[int, int | None, int]](), Counter[tuple[int, int | None, int]]()
    for rank in ranks:
        events = rank.events
        kernels = (events.kernel == 1) & (events.lane != UNKNOWN) & span.holds(events.start_ns)
        busy, collective = (kernels & (events.category == kind) for kind in (Category.COMPUTE, Category.COMMUNICATION))
        for lane in distinct(events.lane[kernels]):
            key, rows = (rank.process, rank.device, lane), np.flatnonzero(busy & (events.lane == lane))
            busy_ns[key] += int((events.end_ns[rows] - events.start_ns[rows]).sum())
            collectives[key] += int((collective & (events.lane == lane)).sum())
    return Evidence(
        said=(
            *(caveat.value for caveat in find_caveats(trace)),
            *trace.warnings,
            *_about_steps(ranks),
            *_about_unnamed(trace),
        ),
        of_overhead=tuple(_about_overhead(trace, ranks)),
        activities=int(counts.sum()),
        graphs=int((counts & (activities.kind == Kind.GRAPH)).sum()),
        orphans=int((counts & (trace.launching_calls == UNKNOWN)).sum()),
        calls=len(trace.calls),
        repeated=_repeated(select(activities, counts & (activities.category == Category.COMMUNICATION))),
        busy_ns=busy_ns,
        collectives=collectives,
        compute_ns=Counter({trace.names[name]: int(total[name]) for name in np.flatnonzero(total).tolist()}),
        kernels_ns=int(duration.sum()),
    )


def find_caveats(trace: Trace) -> tuple[Caveat, ...]:
    """Why the run is not representative, by its ``run.json``; of a shared GPU the trace's own ranges tell, too."""
    caveats = caveats_of(trace.manifest) if trace.manifest else ()
    processes = (parse_range(name) for name in trace.names if name.startswith(f"{PROCESS}|"))
    if Caveat.SHARED_GPU not in caveats and any((process.number(RANKS_PER_GPU) or 1) > 1 for process in processes):
        return (Caveat.SHARED_GPU, *caveats)
    return caveats


def _about_steps(ranks: Sequence[RankEvents]) -> Iterator[str]:
    yield from dict.fromkeys(note for rank in ranks for note in rank.step_notes)
    if left_out := max((rank.warmup_steps for rank in ranks), default=0):
        yield f"{left_out} warm-up step{'s' if left_out > 1 else ''} left out"
    if any(rank.backward == "inferred" for rank in ranks):
        yield "backward is inferred from what autograd's threads launched: no range names it (see --backward-range)"


def _about_launches(evidence: Evidence) -> Iterator[str]:
    if evidence.graphs:
        yield (
            f"CUDA graphs were recorded whole, {evidence.graphs} launches: the kernels in them, collectives included, "
            "are not in this trace; record with --cuda-graph-trace=node"
        )
    if evidence.activities and not evidence.calls:
        yield "no CUDA API calls: nothing can be attributed to steps or phases; record with --trace=cuda,nvtx"
    elif evidence.orphans:
        yield (
            f"{evidence.orphans:,} of {evidence.activities:,} activities have no launching call and belong to no step "
            "or phase: the capture seems to be trimmed"
        )


def _repeated(collectives: Activities) -> int:
    columns = (collectives.start_ns, collectives.end_ns, collectives.lane, collectives.device, collectives.process)
    order = np.lexsort(columns)
    return int(np.all([np.diff(column[order]) == 0 for column in columns], axis=0).sum())


def _about_repetition(evidence: Evidence) -> Iterator[str]:
    if evidence.repeated:
        yield f"collectives that are in the trace again: {evidence.repeated:,}; they count again, their time does not"


def _about_overhead(trace: Trace, ranks: Sequence[RankEvents]) -> Iterator[str]:
    """The profiler's own work during the measured steps; what it did before is nobody's time."""
    measured = union(
        np.concatenate([np.empty(0, np.int64), *(rank.steps.start_ns for rank in ranks)]),
        np.concatenate([np.empty(0, np.int64), *(rank.steps.end_ns for rank in ranks)]),
    )
    share = (union(trace.overhead.start_ns, trace.overhead.end_ns) & measured).length_ns / max(1, measured.length_ns)
    if share > OVERHEAD_LIMIT:
        yield f"the profiler itself was at work in {share:.1%} of the measured time: times are uncertain by as much"


def _about_streams(evidence: Evidence) -> Iterator[str]:
    owners = {(process, device) for process, device, _ in evidence.busy_ns}
    for process, device in sorted(owners, key=lambda owner: (owner[0], owner[1] or 0)):
        busiest = evidence.busiest_stream(process, device)
        if count := evidence.collectives[process, device, busiest]:
            yield (
                f"process {process}, device {device}: {count:,} collective{'' if count == 1 else 's'} ran on the "
                f"compute stream ({busiest}): only kernels of other streams can overlap with them"
            )


def _about_unnamed(trace: Trace) -> Iterator[str]:
    if (unresolved := trace.unresolved_names).kernels:
        yield (
            f"{unresolved.kernels:,} of {unresolved.of_kernels:,} kernels have no name: "
            "whether they compute or communicate is not known"
        )


def _about_names(evidence: Evidence) -> Iterator[str]:
    """Kernels that take time, were taken for compute, and are named like collectives."""
    for name, ns in sorted(evidence.compute_ns.items(), key=lambda item: (-item[1], item[0])):
        if ns > SUSPECT_LIMIT * evidence.kernels_ns and _TELLING.search(name):
            yield (
                f"'{name[:80]}' counts as compute, but its name looks like a collective's: if it is one, say so with "
                "--comm-pattern"
            )
