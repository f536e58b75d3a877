"""The table of variants, which all rooms read."""

from __future__ import annotations

import pytest

from ddp_prof.variants import BASELINE, VARIANT_NAMES, variant_and_size, variant_extras, variant_label, variant_order


@pytest.mark.parametrize(
    ("name", "bucket_size_mb", "label"),
    [
        ("naive", None, "naive"),
        ("bucketed", 10.0, "bucketed 10 MB"),
        ("bucketed", 0.5, "bucketed 0.5 MB"),
        ("bucketed", None, "bucketed no cap"),
        ("torch", None, "torch"),
        ("torch", 25.0, "torch 25 MB"),
        ("of_a_later_version", None, "of_a_later_version"),
    ],
)
def test_label(name: str, bucket_size_mb: float | None, label: str) -> None:
    assert variant_label(name, bucket_size_mb) == label
    for shown in (label, f"before/{label}", f"{label} + bf16"):
        assert variant_and_size(shown) == (name, bucket_size_mb)


@pytest.mark.parametrize("label", ["my run MB", "my 10 MB.sqlite", "my 1x MB", ""])
def test_the_name_of_a_file_tells_no_bucket_size(label: str) -> None:
    assert variant_and_size(label)[1] is None


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({}, "bucketed 10 MB"),
        ({"comm_hook": None, "no_communication_hook": False}, "bucketed 10 MB"),
        ({"comm_hook": "powersgd"}, "bucketed 10 MB + powersgd"),
        ({"compression": "powersgd-4", "step_in_backward": True}, "bucketed 10 MB + powersgd-4 + step in backward"),
        ({"no_communication_hook": True}, "bucketed 10 MB + no communication hook"),
        ({"comm_hook": ["of another version"], "no_communication_hook": "no"}, "bucketed 10 MB"),
    ],
)
def test_a_label_says_what_the_options_add(options: dict[str, object], label: str) -> None:
    assert variant_label("bucketed", 10.0, variant_extras(options)) == label


def test_variants_sort_in_their_order_and_buckets_by_size() -> None:
    ordered: list[tuple[str, float | None]] = [
        ("naive", None),
        ("flat", None),
        ("overlap", None),
        ("bucketed", 1.0),
        ("bucketed", 10.0),
        ("bucketed", None),
        ("torch", None),
        ("torch", 25.0),
        ("later_a", None),
        ("later_b", None),
    ]
    shuffled = ordered[::-1]
    assert sorted(shuffled, key=lambda variant: variant_order(*variant)) == ordered


def test_the_baseline_is_a_variant_and_comes_first() -> None:
    assert VARIANT_NAMES[0] == BASELINE


@pytest.mark.torch
def test_the_package_has_a_class_for_each() -> None:
    from ddp_prof.ddp import VARIANTS  # imports torch

    assert tuple(VARIANTS) == VARIANT_NAMES
