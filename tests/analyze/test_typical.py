from pathlib import Path

import numpy as np
import pytest

import ddp_prof as dp
from ddp_prof.analyze.typical import PARTS, find_typical_step, typical_step_of
from ddp_prof.analyze.variants.comparison import compare_variants


def step(**parts: int) -> list[int]:
    return [parts.get(name, 0) for name in PARTS]


def of_one_rank(*steps: list[int]) -> int | None:
    return typical_step_of([(np.arange(len(steps)), np.array(steps))])


def test_it_is_near_to_the_median_of_each_part() -> None:
    """Step 1 has the usual length, but four times the usual copies; step 3 is a little longer than usual."""
    usual = step(compute_only=200, exposed=50, exposed_memory=10)
    copies = step(compute_only=200, exposed=10, exposed_memory=50)
    longer = step(compute_only=204, exposed=50, exposed_memory=11)
    assert of_one_rank(step(compute_only=300), copies, step(compute_only=170, exposed=60), longer, usual) == 3


@pytest.mark.parametrize(("at", "chosen"), [(0, 3), (4, 1)])
def test_the_first_and_last_step_are_not_chosen_where_another_fits(at: int, chosen: int) -> None:
    steps = [step(compute_only=100 + 10 * distance) for distance in (-2, -1, 3, 1, 2)]
    steps[at] = step(compute_only=100)
    assert of_one_rank(*steps) == chosen


def test_the_first_is_chosen_if_the_only_other_one_stands_out() -> None:
    assert of_one_rank(step(idle=10), step(idle=90, exposed=40), step(idle=11, exposed=1)) == 2
    assert of_one_rank(step(idle=10), step(idle=90, exposed=40), step(idle=10)) == 0


def test_ranks_choose_together() -> None:
    """Step 1 is usual on the first rank alone, step 3 on both."""
    lengths = [[100, 100, 104, 99, 90], [100, 190, 104, 99, 90]]
    ranks = [(np.arange(5), np.array([step(idle=length) for length in of_rank])) for of_rank in lengths]
    assert typical_step_of(ranks) == 3
    assert typical_step_of([(np.arange(0), np.empty((0, len(PARTS)), np.int64))]) is None


def test_a_step_that_a_rank_lost_is_not_chosen_where_all_have_another() -> None:
    """What its collectives waited for cannot be told there: it said "in transfer or waiting for a peer"."""
    first = (np.arange(6), np.array([step(idle=length) for length in (99, 100, 97, 104, 112, 101)]))
    second = (np.array([2, 3, 4]), np.array([step(idle=length) for length in (97, 104, 112)]))
    assert typical_step_of([first]) == 1
    assert typical_step_of([first, second]) == 3
    assert typical_step_of([first, (np.array([7]), np.array([step(idle=100)]))]) == 1


def test_of_equally_near_steps_it_is_the_one_that_exposes_most() -> None:
    assert of_one_rank(step(exposed=1), step(exposed=3)) == 1
    assert find_typical_step(np.array([3, 4, 5, 6]), np.array([step(idle=7)] * 4)) == 4


class TestPublic:
    UNET = "nsys2022_4_ddp_unet_a100_rank0of4.sqlite"

    def test_the_unet_opens_on_a_usual_step(self, shared_traces: Path) -> None:
        """By its exposed time alone the last of 59 was typical, the one with most copies exposed: 5.98 ms."""
        (run,) = dp.load_runs(shared_traces / self.UNET)
        (rank,) = run.overlap().ranks
        lengths = {step.step_key: step.length for step in rank.marked_steps}
        shown = lengths[run.collectives().typical_step]
        copies = np.median([length.exposed_memory_ns or 0 for length in lengths.values()])
        assert shown.exposed_memory_ns == pytest.approx(copies, rel=0.1)
        assert shown not in (
            lengths[min(lengths, key=lambda key: key or 0)],
            lengths[max(lengths, key=lambda key: key or 0)],
        )

    def test_tables_tell_the_parts_of_the_step_that_pages_open_on(self, shared_traces: Path) -> None:
        (run,) = dp.load_runs(shared_traces / self.UNET)
        (rank,), (summary,) = run.overlap().ranks, compare_variants([run.overlap()])
        typical = run.collectives().typical_step
        (shown,) = (step.length for step in rank.marked_steps if step.step_key == typical)
        assert (shown.ns, shown.exposed_memory_ns) == (summary.nearest_step_ns, summary.exposed_memory_ns)
