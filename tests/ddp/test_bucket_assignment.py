"""The assignment of parameters to buckets, against its definition."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.ddp.buckets import EACH_ALONE, assign_buckets, assign_by_readiness, cap_in_bytes

KINDS = (torch.float32, torch.bfloat16)


def sized(numel: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(numel, dtype=kind, device="meta")


sizes_strategy = st.lists(
    st.builds(sized, st.integers(0, 50), st.sampled_from(KINDS)),
    max_size=30,
)
cap_strategy = st.none() | st.integers(1, 400) | st.floats(0.5, 400)


def parameters(*bytes_: int) -> list[torch.Tensor]:
    return [sized(item // 4) for item in bytes_]


def total(sizes: list[torch.Tensor], bucket: tuple[int, ...]) -> int:
    return sum(sizes[index].nbytes for index in bucket)


@given(sizes_strategy, cap_strategy)
def test_every_parameter_is_in_exactly_one_bucket(sizes: list[torch.Tensor], cap: float | None) -> None:
    assigned = [index for bucket in assign_buckets(sizes, cap) for index in bucket]
    assert sorted(assigned) == list(range(len(sizes)))


@given(sizes_strategy, cap_strategy)
def test_a_bucket_holds_one_kind_within_the_cap_unless_alone(sizes: list[torch.Tensor], cap: float | None) -> None:
    for bucket in assign_buckets(sizes, cap):
        assert len({sizes[index].dtype for index in bucket}) == 1
        assert cap is None or len(bucket) == 1 or total(sizes, bucket) <= cap


@given(sizes_strategy, cap_strategy)
def test_parameters_come_in_reverse_order(sizes: list[torch.Tensor], cap: float | None) -> None:
    buckets = assign_buckets(sizes, cap)
    for kind in KINDS:
        members = [index for bucket in buckets for index in bucket if sizes[index].dtype == kind]
        assert members == sorted(members, reverse=True)


@given(sizes_strategy, cap_strategy)
def test_buckets_come_in_the_order_in_which_backward_fills_them(sizes: list[torch.Tensor], cap: float | None) -> None:
    filled_by = [bucket[-1] for bucket in assign_buckets(sizes, cap)]
    assert filled_by == sorted(filled_by, reverse=True)


@given(sizes_strategy, cap_strategy)
def test_a_bucket_ends_only_where_the_next_parameter_does_not_fit(sizes: list[torch.Tensor], cap: float | None) -> None:
    buckets = assign_buckets(sizes, cap)
    for kind in KINDS:
        mine = [bucket for bucket in buckets if sizes[bucket[0]].dtype == kind]
        for bucket, after in pairwise(mine):
            assert cap is not None
            assert total(sizes, bucket) + sizes[after[0]].nbytes > cap


@given(sizes_strategy)
def test_without_a_cap_there_is_one_bucket_a_kind(sizes: list[torch.Tensor]) -> None:
    assert len(assign_buckets(sizes, None)) == len({size.dtype for size in sizes})


@given(sizes_strategy)
def test_each_alone(sizes: list[torch.Tensor]) -> None:
    assert assign_buckets(sizes, EACH_ALONE) == [(index,) for index in range(len(sizes))][::-1]


@pytest.mark.parametrize(
    ("sizes", "cap", "expected"),
    [
        (parameters(4, 4, 4, 4), 8, [(3, 2), (1, 0)]),
        (parameters(4, 4, 4), 8, [(2, 1), (0,)]),
        (parameters(4, 100, 4), 8, [(2,), (1,), (0,)]),  # larger than the cap: alone
        (parameters(4, 8, 4), 8, [(2,), (1,), (0,)]),
        (parameters(4, 4), 7.9, [(1,), (0,)]),  # the cap may be a fraction of a MB
        ([], 8, []),
    ],
)
def test_examples(sizes: list[torch.Tensor], cap: float, expected: list[tuple[int, ...]]) -> None:
    assert assign_buckets(sizes, cap) == expected


def test_kinds_fill_side_by_side() -> None:
    sizes = [sized(1), sized(2, torch.bfloat16)] * 2
    assert assign_buckets(sizes, 8) == [(3, 1), (2, 0)]


def test_caps_hold_for_the_buckets_in_turn_and_the_last_for_all_that_follow() -> None:
    assert assign_buckets(parameters(8, 8, 8, 8, 8, 8), [8, 16]) == [(5,), (4, 3), (2, 1), (0,)]


@given(sizes_strategy, cap_strategy)
def test_one_cap_in_a_list_is_that_cap(sizes: list[torch.Tensor], cap: float | None) -> None:
    if cap is not None:
        assert assign_buckets(sizes, [cap]) == assign_buckets(sizes, cap)


@given(sizes_strategy, cap_strategy)
def test_readiness_in_reverse_order_is_the_usual_assignment(sizes: list[torch.Tensor], cap: float | None) -> None:
    usual = assign_by_readiness(sizes, cap, [*reversed(range(len(sizes)))])
    assert usual == assign_buckets(sizes, cap)


def test_what_is_ready_first_travels_first() -> None:
    assert assign_by_readiness(parameters(4, 4, 4, 4), 8, [2, 0, 3, 1]) == [(2, 0), (3, 1)]


def test_caps_are_given_in_mb() -> None:
    assert cap_in_bytes(None) is None
    assert cap_in_bytes(2) == 2 * 2**20
    assert cap_in_bytes([1, 0.5]) == [2**20, 2**19]


@pytest.mark.parametrize("caps", [[], [1, 0], [-1]])
def test_a_list_of_caps_has_positive_ones(caps: list[float]) -> None:
    with pytest.raises(ValueError, match="bucket_size_mb must"):
        cap_in_bytes(caps)
