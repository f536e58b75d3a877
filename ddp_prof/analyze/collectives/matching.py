"""Which collectives of several ranks are one and the same.

Ranks issue the collectives of a communicator in one order (otherwise they would hang). So of each communicator the
n-th of a step on one rank is the n-th of that step on the others; where the profiler noted the number within the
communicator, that one counts. What does not fit is left unmatched: another operation or size, another count in a step.
Sends and receives are no collectives and have no match.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.core.operations import OPERATIONS, POINT_TO_POINT
from ddp_prof.trace import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from ddp_prof.analyze.collectives.timing import RankCollectives
    from ddp_prof.trace import Ints

_NO_COLLECTIVE = OPERATIONS.index(POINT_TO_POINT)


@dataclass(frozen=True)
class Matches:
    """Collectives that at least two ranks took part in.

    Attributes:
        rows: A row a collective and a column a rank: its row in the rank's timings, ``UNKNOWN`` where it has none.
        unmatched: Collectives of all ranks that found no match though other ranks are there.
    """

    rows: Ints
    unmatched: int

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, ranks: Sequence[RankCollectives], name: str) -> Ints:
        """A column of the ranks' timings, laid out as :attr:`rows`; ``UNKNOWN`` where a rank has no part."""
        columns = [
            np.append(getattr(rank.timings, name), UNKNOWN)[self.rows[:, index]] for index, rank in enumerate(ranks)
        ]
        return np.stack(columns, axis=1) if columns else np.empty((0, 0), np.int64)


def match_collectives(ranks: Sequence[RankCollectives]) -> Matches:
    """Find the collectives that several ranks have in common."""
    found: dict[Hashable, list[int]] = {}
    for column, rank in enumerate(ranks):
        for row, key in enumerate(_keys(rank)):
            if key is not None:
                found.setdefault(key, [UNKNOWN] * len(ranks))[column] = row
    shared = [rows for rows in found.values() if len(ranks) - rows.count(UNKNOWN) > 1 and _agree(ranks, rows)]
    matched = sum(len(ranks) - rows.count(UNKNOWN) for rows in shared)
    candidates = sum(int((rank.timings.operation != _NO_COLLECTIVE).sum()) for rank in ranks)
    return Matches(
        np.array(shared, np.int64).reshape(len(shared), len(ranks)), candidates - matched if len(ranks) > 1 else 0
    )


def _keys(rank: RankCollectives) -> list[Hashable | None]:
    """What identifies each collective of a rank on all ranks; the number in the step must be told by the same count."""
    timings = rank.timings
    groups = [rank.groups[group] if group != UNKNOWN else "" for group in timings.group.tolist()]
    steps = [None if key == UNKNOWN else key for key in rank.keys.tolist()]
    total = Counter(zip(groups, steps, strict=True))
    count: Counter[tuple[str, int | None]] = Counter()
    keys: list[Hashable | None] = []
    for group, step, sequence, operation in zip(
        groups, steps, timings.sequence.tolist(), timings.operation.tolist(), strict=True
    ):
        position = count[group, step]
        count[group, step] += 1
        if operation == _NO_COLLECTIVE:
            keys.append(None)
        elif sequence != UNKNOWN:
            keys.append((group, sequence))
        else:
            keys.append(None if step is None else (group, step, position, total[group, step]))
    return keys


def _agree(ranks: Sequence[RankCollectives], rows: Sequence[int]) -> bool:
    """Whether all parts are of one operation and, as far as known, of one size."""
    parts = [(rank.timings, row) for rank, row in zip(ranks, rows, strict=True) if row != UNKNOWN]
    operations = {int(timings.operation[row]) for timings, row in parts}
    sizes = {int(timings.bytes[row]) for timings, row in parts} - {UNKNOWN}
    return len(operations) == 1 and len(sizes) <= 1
