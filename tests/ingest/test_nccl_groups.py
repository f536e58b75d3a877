"""Which NCCL calls may launch which collectives: the columns against a walk call by call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from ddp_prof.ingest.collectives import find_nccl_calls
from ddp_prof.ingest.names import NameTable
from ddp_prof.table import UNKNOWN, empty, fill
from ddp_prof.trace import Activities, Calls, Overhead, Spans, Trace

START, END, REDUCE, OTHER = "ncclGroupStart", "ncclGroupEnd", "ncclAllReduce", "forward"
CALLS = st.lists(st.tuples(st.sampled_from([START, END, REDUCE, REDUCE, OTHER]), st.integers(1, 3)), max_size=30)
Pairs = list[tuple[int, int]]


def trace_of(calls: list[tuple[str, int]]) -> Trace:
    """A trace with a range for each (name, thread), one after another."""
    names, rows = NameTable([""]), len(calls)
    spans = fill(
        Spans,
        rows,
        start_ns=np.arange(rows),
        end_ns=np.arange(rows) + 1,
        process=np.full(rows, 1),
        lane=np.array([thread for _, thread in calls], np.int64),
        name_id=np.array([names.intern(name) for name, _ in calls], np.int64),
    )
    nothing = (empty(Activities), spans, empty(Calls), {}, {}, empty(Overhead))
    return Trace(Path("x"), "nsys-sqlite", None, tuple(names), *nothing)


def pairs_of(calls: list[tuple[str, int]]) -> Pairs:
    found = find_nccl_calls(trace_of(calls))
    return sorted(zip(found.call.tolist(), found.member.tolist(), strict=True))


def walk(calls: list[tuple[str, int]]) -> Pairs:
    """The pairs, thread by thread and call by call."""
    pairs: Pairs = []
    for thread in {thread for _, thread in calls}:
        depth, members = 0, list[int]()
        for row, (name, own) in enumerate(calls):
            if own != thread or name == OTHER:
                continue
            if name == START:  # only the outermost group counts
                members = members if depth else []
                depth += 1
            elif name == END:  # its start may not have been recorded
                depth = max(0, depth - 1)
                if not depth:
                    pairs += [(row, member) for member in members]
                    members = []
            else:
                pairs.append((row, row))
                members.append(row)
    return sorted(pairs)


@given(CALLS)
@example([(END, 1), (END, 1), (REDUCE, 1), (START, 1), (REDUCE, 1), (END, 1)])
@example([(START, 1), (START, 2), (REDUCE, 1), (REDUCE, 2), (END, 2), (END, 1)])
@example([(START, 1), (REDUCE, 1), (START, 2), (REDUCE, 2), (END, 2)])
def test_the_end_of_an_outermost_group_may_launch_all_calls_in_it(calls: list[tuple[str, int]]) -> None:
    assert pairs_of(calls) == walk(calls)


def test_the_calls_of_a_group_are_told_in_their_order() -> None:
    found = find_nccl_calls(trace_of([(name, 7) for name in (REDUCE, START, REDUCE, START, REDUCE, END, END, END)]))
    assert found.call.tolist() == [0, 2, 4, 6, 6]
    assert found.member.tolist() == [0, 2, 4, 2, 4]
    assert UNKNOWN not in found.call
