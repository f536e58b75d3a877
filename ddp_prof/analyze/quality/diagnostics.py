"""What a trace does not let one say: one line each, with the way to record it better."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.intervals import union
from ddp_prof.manifest import RANKS_PER_GPU, Caveat, caveats_of
from ddp_prof.range_names import PROCESS, parse_range
from ddp_prof.trace import UNKNOWN, Category, Kind, distinct

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddp_prof.analyze.core.rank_events import RankEvents
    from ddp_prof.trace import Trace

OVERHEAD_LIMIT = 0.01
"""Share of a capture's duration from which the profiler's own work is reported."""

SUSPECT_LIMIT = 0.01
"""Share of the kernels' summed time from which an unknown kernel with a telling name is reported."""

_TELLING = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|send_?recv|nvshmem|ccl|multimem", re.I)


def diagnose(trace: Trace, ranks: Sequence[RankEvents]) -> tuple[str, ...]:
    """All doubts about the figures of a trace."""
    return (
        *(caveat.value for caveat in find_caveats(trace)),
        *trace.warnings,
        *_about_steps(ranks),
        *_about_launches(trace),
        *_about_overhead(trace, ranks),
        *_about_streams(ranks),
        *_about_names(trace),
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
        yield "backward is inferred: what autograd's threads launched (no range names it; see --backward-range)"


def _about_launches(trace: Trace) -> Iterator[str]:
    activities = trace.activities
    if graphs := int((activities.kind == Kind.GRAPH).sum()):
        yield (
            f"{graphs} CUDA graph launches were recorded whole: the kernels in them, collectives included, are not in "
            "this trace; record with --cuda-graph-trace=node"
        )
    if len(activities) and not len(trace.calls):
        yield "no CUDA API calls: nothing can be attributed to steps or phases; record with --trace=cuda,nvtx"
    elif orphans := int((trace.launching_calls == UNKNOWN).sum()):
        yield (
            f"{orphans:,} of {len(activities):,} activities have no launching call and belong to no step or phase: "
            "the capture seems to be trimmed"
        )


def _about_overhead(trace: Trace, ranks: Sequence[RankEvents]) -> Iterator[str]:
    """The profiler's own work during the measured steps; what it did before is nobody's time."""
    measured = union(
        np.concatenate([np.empty(0, np.int64), *(rank.steps.start_ns for rank in ranks)]),
        np.concatenate([np.empty(0, np.int64), *(rank.steps.end_ns for rank in ranks)]),
    )
    share = (union(trace.overhead.start_ns, trace.overhead.end_ns) & measured).length_ns / max(1, measured.length_ns)
    if share > OVERHEAD_LIMIT:
        yield f"the profiler itself was at work in {share:.1%} of the measured time: times are that much unsure"


def _about_streams(ranks: Sequence[RankEvents]) -> Iterator[str]:
    for rank in ranks:
        events, is_kernel = rank.events, rank.events.kernel == 1
        busy_ns = {
            lane: int((events.end_ns[rows] - events.start_ns[rows]).sum())
            for lane in distinct(events.lane[is_kernel])
            if (rows := is_kernel & (events.category == Category.COMPUTE) & (events.lane == lane)).any()
        }
        if not busy_ns:
            continue
        busiest = max(busy_ns, key=busy_ns.__getitem__)
        sharing = is_kernel & (events.category == Category.COMMUNICATION) & (events.lane == busiest)
        if count := int(sharing.sum()):
            yield (
                f"process {rank.process}, device {rank.device}: {count:,} of the collectives ran on the compute "
                f"stream ({busiest}), where nothing can overlap with them but kernels of other streams"
            )


def _about_names(trace: Trace) -> Iterator[str]:
    """Kernels without a name; kernels that take time, were taken for compute, and are named like collectives."""
    if (unresolved := trace.unresolved_names).kernels:
        yield (
            f"{unresolved.kernels:,} of {unresolved.of_kernels:,} kernels have no name: "
            "whether they compute or communicate is not known"
        )
    activities = trace.activities
    kernels = activities.kind == Kind.KERNEL
    duration = np.where(kernels, activities.end_ns - activities.start_ns, 0)
    computing = kernels & (activities.category == Category.COMPUTE)
    total = np.bincount(activities.name_id[computing], weights=duration[computing], minlength=len(trace.names))
    for name_id in np.flatnonzero(total > SUSPECT_LIMIT * duration.sum()).tolist():
        if _TELLING.search(trace.names[name_id]):
            yield (
                f"'{trace.names[name_id][:80]}' was taken for compute, but its name matches a collective: if it "
                "is one, say so with --comm-pattern"
            )
