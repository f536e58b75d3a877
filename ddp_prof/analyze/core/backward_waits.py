"""Where the host waits for the device during backward, so that it launches the rest of backward late."""

from __future__ import annotations

import numpy as np

from ddp_prof.analyze.core.attribution import BACKWARD_PHASE, SYNCHRONIZE_PHASE, last_by_step
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.table import NO_TIME, UNKNOWN, Ints, take_or_unknown


def waits_in_backward(rank: RankEvents) -> tuple[Ints, Ints]:
    """Return the host's calls that waited in a pass of backward, before its last collective, and their steps.

    The calls are indices into ``rank.host_calls.rows``. A call counts if it began after the first launch of the pass's
    compute and before the launch of the pass's last collective, and if a thread made it that trains: the main thread,
    or one that launches backward.
    """
    waits = rank.host_calls.waited if rank.device is not None and len(rank.events) else np.empty(0, np.int64)
    if not len(waits) or rank.clocks_disagree:
        return waits[:0], waits[:0]
    waits = waits[np.isin(rank.host_calls.thread[waits], [*rank.training_threads])]
    operations, passes = rank.operations, rank.passes
    is_of_pass = np.isin(operations.phase, (BACKWARD_PHASE, SYNCHRONIZE_PHASE)) & (rank.pass_of_operation != UNKNOWN)
    last = last_by_step(operations.launch_ns[is_of_pass], rank.pass_of_operation[is_of_pass], len(passes))
    start_ns = rank.host_calls.start_ns[waits]
    step = rank.steps.index_at(start_ns)
    row = passes.of_launches(step, np.full(len(waits), UNKNOWN), start_ns, np.zeros(len(waits), np.bool_))
    counts = (start_ns > take_or_unknown(passes.first_ns, row, NO_TIME)) & (
        start_ns < take_or_unknown(last, row, NO_TIME)
    )
    return waits[counts], step[counts]
