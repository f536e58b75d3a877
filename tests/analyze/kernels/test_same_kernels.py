"""What makes two executions of a kernel the same, over the ranks of a run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.kernels.kernel_times import find_kernel_runs, is_mostly_overlapped, merge_keys
from ddp_prof.trace import UNKNOWN
from tests.drawing import draw_trace


@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=6), max_size=4))
def test_rows_of_all_parts_keep_their_keys(parts: list[list[str]]) -> None:
    packed = [np.unique(np.array(part, str), return_inverse=True) for part in parts]
    keys, row = merge_keys((names.tolist(), which.reshape(-1)) for names, which in packed)
    assert [keys[number] for number in row.tolist()] == [key for part in parts for key in part]
    assert len(set(keys)) == len(keys)


def test_kernels_of_one_name_are_told_apart_by_shape() -> None:
    trace = draw_trace(streams={7: "aabbaabbaa"})
    first, second = (trace.names[name_id] for name_id in trace.activities.name_id[:2].tolist())
    shaped = replace(trace, names=(*trace.names, "grid"), shape_id=np.array([UNKNOWN] * 4 + [len(trace.names)]))
    for told, shape in ((trace, ""), (shaped, "grid")):
        (rank,) = find_rank_events(told)
        runs = find_kernel_runs(rank)
        found = [runs.keys[kernel][:2] for kernel in runs.kernel.tolist()]
        assert found == [(first, ""), (second, ""), (first, ""), (second, ""), (first, shape)]
        assert len(set(runs.keys)) == len(runs.keys) == 2 + bool(shape)


def test_half_of_an_execution_is_not_most_of_it() -> None:
    assert is_mostly_overlapped(np.array([4, 4, 4, 0]), np.array([0, 2, 3, 0])).tolist() == [False, False, True, False]
