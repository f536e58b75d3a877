"""One communicator that runs gathers and scatters one after the other, though they need not wait for each other."""

from __future__ import annotations

import numpy as np

from ddp_prof.analyze.core.collective_ranges import OPERATIONS
from ddp_prof.analyze.doctor.evidence import Finding, RunEvidence, typical
from ddp_prof.table import NO_TIME, UNKNOWN

RULE = "one communicator serializes gathers and scatters"
_GATHER, _SCATTER = OPERATIONS.index("all_gather"), OPERATIONS.index("reduce_scatter")


def examine(run: RunEvidence) -> Finding | None:
    """Found where gathers and scatters of one stream wait for one another in most steps."""
    if run.is_cpu:
        return None
    found, waits, ranks = 0, [], []
    for rank in run.analysis.ranks:
        timings = rank.timings
        rows = np.flatnonzero(np.isin(timings.operation, (_GATHER, _SCATTER)) & (timings.launch_ns != NO_TIME))
        rows = rows[np.lexsort((timings.start_ns[rows], timings.lane[rows]))]
        if len(rows) < 2:
            continue
        before, after = rows[:-1], rows[1:]
        differs = timings.operation[before] != timings.operation[after]
        differs &= timings.lane[before] == timings.lane[after]
        could_ns = np.maximum(timings.launch_ns[after], timings.start_ns[before])
        queued = np.where(differs, np.maximum(0, timings.end_ns[before] - could_ns), 0)
        step = timings.step[after]
        per_step = [int(queued[step == one].sum()) for one in np.unique(step[step != UNKNOWN])]
        if per_step and np.median(per_step) > 0:
            found += int((queued > 0).sum())
            waits += per_step
            ranks.append(rank.name)
    if not ranks:
        return None
    return Finding(
        RULE,
        f"{found:,} gathers and scatters waited behind one of the other kind on their stream, for "
        f"{typical(waits) / 1e6:.2f} ms of a typical step.",
        "Give all-gathers and reduce-scatters communicators of their own.",
        tuple(ranks),
        (),
        typical(waits),
    )
