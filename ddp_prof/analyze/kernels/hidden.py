"""What hid communication: the overlapped time of a rank by the phase and kind of the compute beside it.

Where several kernels run at once, the instant belongs to the first in the order of :data:`PHASE_ORDER`, and within a
phase to the kind that comes first by name::

    communication  ..########..
    backward       ####..####..     ##..####  ->  2 + 2 (the optimizer has the rest)
    optimizer      ........####
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.intervals import union
from ddp_prof.analyze.kernels.kinds import kind_of_compute
from ddp_prof.range_names import BACKWARD, FORWARD, OPTIMIZER, PHASES, SYNCHRONIZE
from ddp_prof.trace import UNKNOWN, Category

if TYPE_CHECKING:
    from ddp_prof.analyze.core.rank_events import RankEvents

HOST = "host"
"""Kind of what computes on a CPU, where ranges alone are known."""

PHASE_ORDER = (BACKWARD, FORWARD, OPTIMIZER, SYNCHRONIZE, None)


@dataclass(frozen=True, slots=True)
class HiddenTime:
    """Overlapped communication of a rank beside one kind of compute.

    Attributes:
        phase: Whose compute; ``None`` where the trace does not tell.
        kind: Of :mod:`.kinds`, or :data:`HOST`.
    """

    phase: str | None
    kind: str
    overlapped_ns: int


def measure_hidden(rank: RankEvents) -> tuple[HiddenTime, ...]:
    """Divide a rank's overlapped time; the parts sum to it exactly. Parts of no length are left out."""
    trace, events = rank.trace, rank.events
    rows = np.flatnonzero(events.category == Category.COMPUTE)
    left = rank.union_of(Category.COMPUTE) & rank.union_of(Category.COMMUNICATION)
    name_id = np.full(len(rows), UNKNOWN) if rank.device is None else trace.activities.name_id[events.activity[rows]]
    used, which = np.unique(name_id, return_inverse=True)
    kind_of_name = [HOST if number == UNKNOWN else kind_of_compute(trace.names[number]) for number in used.tolist()]
    kinds = sorted(set(kind_of_name))
    kind = np.array([kinds.index(name) for name in kind_of_name], np.int64)[which]
    found = []
    for phase in PHASE_ORDER:
        in_phase = events.phase[rows] == (UNKNOWN if phase is None else PHASES.index(phase))
        for number in np.unique(kind[in_phase]).tolist():
            own = rows[in_phase & (kind == number)]
            part = left & union(events.start_ns[own], events.end_ns[own])
            if len(part):
                found.append(HiddenTime(phase, kinds[number], part.length_ns))
                left = left - part
    return tuple(found)
