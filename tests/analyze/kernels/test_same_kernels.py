"""What makes two executions of a kernel the same, over the ranks of a run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.analyze.kernels.kernel_times import identify_kernels, is_mostly_overlapped, merge_keys
from ddp_prof.trace import UNKNOWN
from tests.drawing import draw_trace


@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=6), max_size=4))
def test_rows_of_all_parts_keep_their_keys(parts: list[list[str]]) -> None:
    packed = [np.unique(np.array(part, str), return_inverse=True) for part in parts]
    keys, row = merge_keys((names.tolist(), which.reshape(-1)) for names, which in packed)
    assert [keys[number] for number in row.tolist()] == [key for part in parts for key in part]
    assert len(set(keys)) == len(keys)


def test_kernels_of_one_name_are_told_apart_by_shape_and_by_what_is_added() -> None:
    trace = draw_trace(streams={7: "aabbaabbaa"})
    assert len(trace.activities) == 5
    (name,) = {trace.names[name_id] for name_id in trace.activities.name_id[::2].tolist()}
    rows, phase = np.array([0, 2, 4]), np.array([1, 1, 0])
    assert identify_kernels(trace, rows)[0] == [(name, "")]
    shaped = replace(trace, names=(*trace.names, "grid"), shape_id=np.array([UNKNOWN] * 4 + [len(trace.names)]))
    found, which = identify_kernels(shaped, rows, phase)
    assert [found[kernel] for kernel in which.tolist()] == [(name, "", 1), (name, "", 1), (name, "grid", 0)]


def test_half_of_an_execution_is_not_most_of_it() -> None:
    assert is_mostly_overlapped(np.array([4, 4, 4, 0]), np.array([0, 2, 3, 0])).tolist() == [False, False, True, False]
