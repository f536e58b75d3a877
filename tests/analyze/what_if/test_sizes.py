"""Where the bytes of gradients are from: each source alone, and sources that do not fit the capture."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddp_prof.analyze.what_if.link import LESS_THAN_NOTHING, NOT_LONGER, LinkFit, fit_link
from ddp_prof.analyze.what_if.rules import fill_at_most, fill_until_reached, find_rules, split_at_sums, torch_rule_of
from ddp_prof.analyze.what_if.sizes import (
    BY_RULE,
    COPIES,
    GRIDS,
    IN_REVERSE,
    MANIFEST,
    PARAMETERS,
    UNUSED,
    WHOLE_BUCKETS,
    Gradients,
    find_gradients,
)
from tests.analyze.what_if.ticking import Job

MB = 2**20
SIZES = tuple(one * MB for one in (3, 1, 16, 40, 2, 30, 9))
JOB = Job(SIZES, works=(100.0,) * 7, copy_per_mb=5)
BUCKETS = [[0], [1, 2, 3], [4, 5], [6]]
STRUCTURE = JOB.capture(BUCKETS, steps=3)


def known(found: Gradients | str) -> Gradients:
    assert isinstance(found, Gradients), found
    return found


def test_copies_out_of_buckets_are_exact() -> None:
    found = known(find_gradients(STRUCTURE))
    assert (found.source, found.doubts, found.buckets) == (f"ranges, {COPIES}", (), BUCKETS)
    alone = known(find_gradients(replace(STRUCTURE, sizes_from=None)))
    assert (alone.source, alone.doubts, alone.buckets) == (COPIES, (), BUCKETS), "grids divide them"


def test_copies_alone_are_divided_by_torchs_rule() -> None:
    found = known(find_gradients(replace(STRUCTURE, sizes_from=None, into=None)))
    assert (found.source, found.buckets) == (COPIES, BUCKETS)
    assert found.doubts == (BY_RULE.format(cap=25),)


@pytest.mark.parametrize(("source", "given"), [(MANIFEST, "manifest"), (PARAMETERS, "parameters")])
def test_parameters_fill_buckets_from_the_last_one(source: str, given: str) -> None:
    bare = replace(STRUCTURE, into=None, out=None, sizes_from=None)
    found = known(find_gradients(bare, **{given: SIZES[::-1]}))
    assert (found.source, found.buckets) == (source, BUCKETS)
    assert found.doubts == (IN_REVERSE, BY_RULE.format(cap=25))


def test_grids_are_rounded_up() -> None:
    found = known(find_gradients(replace(STRUCTURE, out=None, sizes_from=None)))
    assert (found.source, found.buckets) == (GRIDS, BUCKETS)
    assert "rounded up" in found.doubts[0]


def test_grids_of_a_recent_torch_tell_no_sizes() -> None:
    """Its threads compute four or eight numbers each; when gradients are ready is still known."""
    assert STRUCTURE.into is not None
    into = replace(STRUCTURE.into, bytes=STRUCTURE.into.bytes // 2, knows_bytes=False)
    assert isinstance(find_gradients(replace(STRUCTURE, into=into, out=None, sizes_from=None)), str)
    assert known(find_gradients(replace(STRUCTURE, into=into))).source == f"ranges, {COPIES}"


def test_what_is_copied_into_a_bucket_is_its_own_whatever_the_rule() -> None:
    """Three buckets by ``bucket_cap_mb=25``, as Accelerate sets it, and three others by torch's default.

    The default was taken, so one of 26 MiB counted as 5: of a job with such a first bucket, in which nothing changes
    the step by more than 0.2 %, larger buckets were predicted to gain 2.8 % (1.7 to 3.9).
    """
    sizes = tuple(one * MB for one in (5, 21, 26, 26))
    explicit = [[0, 1], [2], [3]]
    recorded = Job(sizes, works=(100.0,) * 4).capture(explicit, steps=3)
    assert recorded.into is not None
    for numbers in (1, 2):  # a thread copies four, or eight
        into = replace(recorded.into, bytes=recorded.into.bytes // numbers, knows_bytes=False)
        found = known(find_gradients(replace(recorded, into=into, out=None, sizes_from=None), parameters=sizes[::-1]))
        assert (found.source, found.doubts, found.buckets) == (PARAMETERS, (IN_REVERSE,), explicit)
    others = replace(recorded.into, bytes=recorded.into.bytes // 5, knows_bytes=False)
    found = known(find_gradients(replace(recorded, into=others, out=None, sizes_from=None), parameters=sizes[::-1]))
    assert found.buckets == [[0], [1, 2], [3]], "they copy something else"


def test_bytes_of_buckets_alone_can_only_be_joined() -> None:
    found = known(find_gradients(replace(STRUCTURE, out=None, into=None)))
    assert (found.source, found.doubts, found.are_single) == ("ranges", (WHOLE_BUCKETS,), False)
    assert found.bytes.tolist() == [sum(SIZES[at] for at in bucket) for bucket in BUCKETS]


def test_parameters_of_another_model_are_not_used() -> None:
    bare = replace(STRUCTURE, into=None, out=None)
    found = known(find_gradients(bare, parameters=(5 * MB, 7 * MB)))
    assert found.source == "ranges", "they do not sum to what ranges say"
    assert found.doubts[0].startswith("--parameters says 2 gradients of 12.0 MiB, which do not fit its 4 collectives")
    better = known(find_gradients(STRUCTURE, parameters=(5 * MB, 7 * MB)))
    assert better.doubts == (UNUSED.format(source=COPIES),), "it is said that a file is not used"
    said = find_gradients(replace(bare, sizes_from=None), parameters=(5 * MB, 7 * MB))
    assert isinstance(said, str)
    assert "2 gradients of 12.0 MiB" in said
    assert said.endswith("give the file of this model")


def test_torchs_rule_closes_a_bucket_that_reaches_its_cap() -> None:
    sizes = np.array(SIZES)
    assert fill_until_reached(sizes, MB, 25 * MB) == BUCKETS
    rule = torch_rule_of(sizes, BUCKETS)
    assert rule is not None
    assert (rule.first_bytes, rule.low_bytes, rule.high_bytes) == (MB, 17 * MB, 32 * MB)
    assert rule.buckets(sizes, 100 * MB) == [[0], [1, 2, 3, 4, 5, 6]]
    assert fill_at_most(sizes, 25 * MB) == [[0, 1, 2], [3], [4], [5], [6]]
    one_cap = fill_until_reached(sizes, 40 * MB, 40 * MB)
    assert torch_rule_of(sizes, one_cap) is not None
    assert torch_rule_of(sizes, [[0, 2], [1, 3], [4, 5, 6]]) is None


def test_sizes_are_split_where_their_sums_are() -> None:
    split = split_at_sums(np.array([1, 2, 3, 4]), np.array([3, 7]))
    assert split is not None
    assert split.tolist() == [0, 0, 1, 1]
    assert split_at_sums(np.array([1, 2, 3, 4]), np.array([2, 8])) is None
    assert split_at_sums(np.array([1, 2]), np.array([3, 1])) is None


class TestLink:
    def test_a_line_is_found_exactly(self) -> None:
        sizes = np.array([1, 4, 9, 20]) * MB
        link = fit_link(np.tile(5e5 + 0.01 * sizes, (3, 1)), sizes)
        assert isinstance(link, LinkFit)
        assert (link.times.overhead_ns, link.times.ns_per_byte) == (pytest.approx(5e5), pytest.approx(0.01))
        assert link.slope_error == pytest.approx(0, abs=1e-9)
        assert (link.reaches(40 * MB), link.reaches(41 * MB)) == (True, False)

    def test_sizes_that_hardly_differ(self) -> None:
        for sizes in ([5, 5, 5], [2, 5, 7], [4, 15, 9]):
            assert "another bucket size" in str(fit_link(np.ones((3, 3)), np.array(sizes) * MB))

    def test_times_that_do_not_grow_with_size(self) -> None:
        sizes = np.array([1, 4, 9]) * MB
        falling = fit_link(np.tile([9.0, 5.0, 1.0], (2, 1)), sizes)
        without_overhead = fit_link(np.tile(0.01 * sizes - 1e4, (2, 1)), sizes)
        assert str(falling).startswith(NOT_LONGER)
        assert str(without_overhead).startswith(LESS_THAN_NOTHING), "they do take longer"

    def test_a_turned_line_says_the_same_of_the_mean_size(self) -> None:
        link = fit_link(np.array([[1400.0, 1900.0, 3100.0]]), np.array([1000, 2000, 4000]))
        assert isinstance(link, LinkFit)
        for share in (-0.05, 0.05):
            turned = link.turned(share)
            assert turned.ns_per_byte != link.times.ns_per_byte
            assert turned.overhead_ns + turned.ns_per_byte * 7000 / 3 == pytest.approx(6400 / 3)

    def test_a_turned_line_is_not_negative(self) -> None:
        link = fit_link(np.array([[100.0, 900.0, 400.0]]), np.array([1000, 2000, 4000]))
        assert isinstance(link, LinkFit)
        for share in (-1.0, 1.0):
            assert link.turned(share).overhead_ns >= 0
            assert link.turned(share).ns_per_byte >= 0


def test_the_rule_of_a_file_with_many_parameters_is_the_largest_cap() -> None:
    """Every cap was tried one after another: files of thousands of parameters took minutes."""
    random = np.random.default_rng(1)
    for count in (1, 2, 9, 30):
        sizes = random.integers(1, 2 * MB, count)
        caps = sorted({int(sizes[low:high].sum()) for low in range(count) for high in range(low + 1, count + 1)})
        for calls in range(1, count + 2):
            likely = [(MB, 25.0 * MB), *((min(MB, c), c) for c in caps[::-1]), *((c, c) for c in caps[::-1])]
            fits = [rule for rule in likely if len(fill_until_reached(sizes, *rule)) == calls]
            assert find_rules(sizes, calls)[:1] == fits[:1]
    assert find_rules(np.full(100_000, 4096), 20_000) == [(5 * 4096, 5 * 4096)]


def test_of_several_rules_that_give_as_many_buckets_that_counts_which_explains_the_times() -> None:
    """Gradients of 1, 6, 2 and 8 MiB are three buckets with caps of 5 and of 8 MiB. That of 8 was taken, as the larger.

    So 5 MiB, the setting of today, was called a loss.
    """
    sizes = tuple(mb * MB for mb in (1, 6, 2, 8))
    assert find_rules(np.array(sizes), 3) == [(MB, 8 * MB), (MB, 6 * MB), (2 * MB, 2 * MB)]
    for today in ([[0], [1], [2, 3]], [[0], [1, 2], [3]]):
        bare = replace(Job(sizes, works=(200.0,) * 4).capture(today), into=None, sizes_from=None)
        assert known(find_gradients(bare, parameters=sizes[::-1])).buckets == today
