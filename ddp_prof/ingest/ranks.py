"""Which process is which rank, and how many there are, by what the program itself said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.range_names import PROCESS, parse_range

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddp_prof.ingest.string_table import NameTable
    from ddp_prof.trace import Spans


def ranks_of(spans: Spans, names: NameTable) -> Mapping[int, int]:
    """Rank by process id, from the ``process|rank=...`` ranges; processes without one are absent."""
    ranks: dict[int, int] = {}
    for index, name in enumerate(names.as_tuple()):
        if name.startswith(PROCESS) and (rank := parse_range(name).number("rank")) is not None:
            ranks |= dict.fromkeys(map(int, np.unique(spans.process[spans.name_id == index])), rank)
    return ranks


def world_size_of(names: NameTable) -> int | None:
    """Ranks in the job, from the ``process|...|world=...`` ranges; ``None`` without one, or where they disagree."""
    ours = (name for name in names.as_tuple() if name.startswith(PROCESS))
    found = {world for name in ours if (world := parse_range(name).number("world")) is not None}
    return found.pop() if len(found) == 1 else None
