from __future__ import annotations

import pytest

from ddp_prof.present.text import percent, size


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (None, "n/a"), (0, "0 %"), (1, "100 %"), (0.501, "50 %"), (0.004, "0.4 %"), (0.996, "99.6 %"),
        (1.62, "162 %"), (-0.195, "-20 %"), (-0.004, "-0.4 %"),
    ],
)  # fmt: skip
def test_a_share_is_rounded_but_not_to_nothing_or_all(ratio: float | None, text: str) -> None:
    assert percent(ratio) == text


@pytest.mark.parametrize(
    ("number", "text"), [(1000, "0.977 KiB"), (10**6, "977 KiB"), (2**20, "1 MiB"), (2**30, "1 GiB")]
)
def test_units_of_sizes_are_of_1024(number: int, text: str) -> None:
    assert size(number) == text
