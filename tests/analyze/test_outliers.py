"""Steps that alone hold a large part of the exposed time are found, and no others."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.analyze.statistics import find_outlier_keys
from ddp_prof.present.headlines import outliers_text
from tests.drawing import draw_trace
from tests.measuring import results_of

EXPOSED = st.dictionaries(st.integers(0, 50), st.integers(0, 1_000), min_size=1, max_size=20)


def test_one_of_59_steps_that_holds_399_of_499_ms() -> None:
    """A collective stalled once, and the overlap of the whole run was said to be 84 %, without that step 96 %."""
    exposed = dict.fromkeys(range(58), 172) | {58: 39_900}
    assert find_outlier_keys(exposed) == [58]


@pytest.mark.parametrize(
    ("exposed", "found"),
    [
        ([5, 5, 5, 5], []),
        ([1, 1, 3, 1], [2]),
        ([2, 2, 5, 2], []),
        ([9, 1, 1, 12], [3, 0]),
        ([7], []),
        ([0, 0, 0], []),
        ([0, 0, 8, 0], [2]),
        ([13, *[1] * 49], [0]),  # 21 % of 62
        ([12, *[1] * 49], []),  # 19.7 % of 61
    ],
)
def test_what_is_an_outlier(exposed: list[int], found: list[int]) -> None:
    assert find_outlier_keys(dict(enumerate(exposed))) == found


@given(EXPOSED)
def test_outliers_hold_a_large_part_and_lie_far_from_the_others(exposed: dict[int, int]) -> None:
    found = find_outlier_keys(exposed)
    assert len(found) < 5
    for key, value in exposed.items():
        others = [other for name, other in exposed.items() if name != key]
        stands_out = bool(others) and 5 * value > sum(exposed.values())
        assert (key in found) == (stands_out and value >= 3 * median(others))


@given(EXPOSED, st.integers(2, 9))
def test_neither_the_unit_nor_the_order_matters(exposed: dict[int, int], unit: int) -> None:
    scaled = {key: unit * value for key, value in reversed(exposed.items())}
    assert sorted(find_outlier_keys(scaled)) == sorted(find_outlier_keys(exposed))


STALLED = draw_trace(
    ranges={"step 0": "####", "step 1": "....####", "step 2": "........####", "step 3": "............############"},
    launches={"main": "aM..bN..cO..dP"},
    streams={7: ".aa..bb..cc..dd.........", 9: "..MM..NN..OO..PPPPPPPPPP"},
)
"""Each step hides 1 of its communication and exposes 1; the last stalls and exposes 9."""


def test_figures_are_given_with_and_without_the_outlier() -> None:
    outliers = measure_overlap(STALLED).outliers
    assert outliers is not None
    assert (outliers.steps, outliers.exposed_ns, outliers.exposed_without_ns) == (((3, 9),), 12, 3)
    assert (outliers.overlap_ratio, outliers.overlap_ratio_without) == (4 / 16, 3 / 6)


def test_steps_that_only_accumulate_gradients_make_no_outlier_of_the_others() -> None:
    """Two of five steps communicate, and alike."""
    trace = draw_trace(
        ranges={f"step {step}": "." * 4 * step + "####" for step in range(5)},
        launches={"main": "a...b...cM..d...eN.."},
        streams={7: ".a...b...c...d...e..", 9: "..........MM......NN"},
    )
    assert measure_overlap(trace).outliers is None


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["step 0", "step 1", "step 2", "step 3"], "step 3 alone holds"),
        (["step 0", "step 1", "step 0", "step 1"], "step at position 3 alone holds"),
    ],
)
def test_a_step_is_named_by_a_number_only_where_that_is_its_own(names: list[str], said: str) -> None:
    """Each epoch counts anew: no step is called 3, and step 1 is two."""
    pictures = ["####", "....####", "........####", "............############"]
    trace = draw_trace(
        ranges=list(zip(names, pictures, strict=True)),
        launches={"main": "aM..bN..cO..dP"},
        streams={7: ".aa..bb..cc..dd.........", 9: "..MM..NN..OO..PPPPPPPPPP"},
    )
    for outliers in (measure_overlap(trace).outliers, results_of(trace).outliers):
        assert outliers is not None
        assert outliers_text(outliers).startswith(said)
        assert outliers_text(outliers).endswith(": overlap 25 %, without it 50 %")
