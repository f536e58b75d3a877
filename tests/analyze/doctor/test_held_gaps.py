"""A gap of a stream is held if its next work had been launched long before: launching earlier would not fill it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.analyze.core.attribution import Events
from ddp_prof.analyze.doctor.rank_facts import LAUNCHED_AHEAD_NS, _held_gaps, _union_of
from ddp_prof.table import fill
from ddp_prof.trace import NO_TIME, Ints

UNIT_NS = LAUNCHED_AHEAD_NS // 2
ON, OTHER = 7, 20
operations = st.tuples(
    st.integers(0, 30), st.integers(0, 4), st.one_of(st.none(), st.integers(0, 30)), st.sampled_from([ON, OTHER])
)


@given(st.lists(operations, min_size=1, max_size=12))
def test_gaps_after_which_all_that_begins_was_launched_ahead_are_held(
    drawn: list[tuple[int, int, int | None, int]],
) -> None:
    start, length, launch = (
        np.array([NO_TIME if value is None else value * UNIT_NS for value in column], np.int64)
        for column in list(zip(*drawn, strict=True))[:3]
    )
    lane: Ints = np.array([one[3] for one in drawn], np.int64)
    events = fill(Events, len(drawn), start_ns=start, end_ns=start + length, lane=lane, launch_ns=launch)
    busy = _union_of(events, lane == ON)
    held = _held_gaps(busy, events, lane == ON)

    # Unit by unit: when the stream is busy, and of each gap whether all that begins after it was launched ahead.
    mine = [(at, at + took, launched) for at, took, launched, stream in drawn if stream == ON]
    is_busy = [any(first <= unit < last for first, last, _ in mine) for unit in range(40)]
    expected = []
    for unit in range(40):
        before = max((at for at in range(unit + 1) if is_busy[at]), default=None)
        after = next((at for at in range(unit, 40) if is_busy[at]), None)
        if is_busy[unit] or before is None or after is None:
            continue
        idle_from = before + 1
        launches = [launched for first, _, launched in mine if first == after]
        if all(launched is not None and launched < idle_from - 2 for launched in launches):
            expected.append(unit)
    units = np.arange(40) * UNIT_NS
    assert np.flatnonzero(held.covered_ns(units, units + UNIT_NS)).tolist() == expected
    assert (held.length_ns + busy.length_ns, len(held & busy)) == ((held | busy).length_ns, 0)
