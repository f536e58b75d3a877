"""What a capture lacks altogether, and what records it; reports say this before everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.why_unknown import (
    LOST,
    MOST_UNNAMED,
    NOTHING,
    UNTIMED_CALLS,
    called_collectives,
    named_collectives,
    why_unknown,
    why_unknown_work,
)
from ddp_prof.range_names import PROCESS, STEP, parse_ranges
from ddp_prof.trace import Category, Trace

_RECORD_GPU = "record with nsys profile --trace=cuda,nvtx, or with ProfilerActivity.CUDA of torch.profiler"
_RECORD_AGAIN = "record again; the profiler's messages may tell why"
_MARK = "with 'from ddp_prof import annotate; annotate.instrument(model, optimizer)' in the program"
_RECORD_CPU = f"on a CPU, {_MARK}"
_NO_MODEL = "(the ranges here mark no model: 'ddp-prof capture' by itself marks one only if DDP or FSDP2 wraps it)"


class Missing(NamedTuple):
    """What a trace lacks altogether, and what records it.

    Attributes:
        of_device: A line that says so.
        on_cpu: What records it instead if the program runs on a CPU; empty where that makes no difference.
    """

    of_device: str
    on_cpu: str = ""

    @property
    def text(self) -> str:
        """Both as one line."""
        return "; ".join(filter(None, self))


def find_missing(trace: Trace, ranks: Sequence[RankEvents]) -> Missing | None:
    """Return what is missing in a trace; ``None`` if nothing is known to be. ``ranks`` are all ranks of the trace."""
    if not any(map(len, (trace.activities, trace.spans, trace.calls, trace.operators))):
        return Missing(
            "this capture is empty: no work of a GPU, no call, no range and no operator was recorded: "
            f"{_RECORD_GPU}, while the program trains"
        )
    reasons = {why_unknown_work(rank) for rank in ranks}
    if not len(trace.activities) and reasons <= {NOTHING, LOST}:
        if LOST in reasons:
            count = 0 if trace.is_launch is None else int(trace.is_launch.sum())
            launches = f"{count:,} launch{'' if count == 1 else 'es'} of kernels or graphs"
            only = f"no GPU activities were recorded, only {launches}"
            return Missing(f"{only}: the profiler lost what they ran: {_RECORD_AGAIN}")
        on_cpu = how_to_record_cpu(trace) if trace.device == "cpu" else ""
        return Missing(f"no GPU activities were recorded: {_RECORD_GPU}", on_cpu)
    is_silent = not np.any(trace.activities.category == Category.COMMUNICATION)
    # NCCL's kernels may be in CUDA graphs that were recorded whole, or among the kernels without a name.
    is_silent &= not np.any(trace.activities.category == Category.OTHER)
    is_silent &= trace.unresolved_names.share <= MOST_UNNAMED
    if len(trace.activities) and is_silent and (named := named_collectives(trace)):
        return Missing(
            f"no NCCL kernel was recorded, nor another that communicates, although '{named[0]}' names a collective: "
            "its device was not recorded, the profiler lost its kernels, or their names are not known: "
            f"{_RECORD_GPU}, for the whole step"
        )
    if (called := called_collectives(trace)) and any(why_unknown(rank) == UNTIMED_CALLS for rank in ranks):
        return Missing(
            f"nothing tells when collectives ran, although '{called[0]}' calls them: for NCCL {_RECORD_GPU}; for gloo "
            f"mark them {_MARK}"
        )
    return None


def how_to_record_cpu(trace: Trace) -> str:
    """Return what to add to a program on a CPU whose trace does not tell what the CPU did.

    The trace may hold steps and phases marked by ``ddp-prof capture``, which does not know a model that nothing wraps.
    """
    has_no_model = parse_ranges(trace.names, STEP) and not parse_ranges(trace.names, PROCESS)
    return f"{_RECORD_CPU} {_NO_MODEL}" if has_no_model else _RECORD_CPU
