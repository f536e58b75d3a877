"""Large and small messages that take equally long do not wait for bandwidth."""

from __future__ import annotations

from pathlib import Path

import pytest

import ddp_prof as dp
from tests.ingest.test_kineto_json import event, write

SMALL, LARGE = 321_271, 2_082_411
"""Numbers of floats: 1.3 and 8.3 MB."""


def reduced(path: Path, large_us: int, steps: int = 3, large: int = LARGE) -> dp.Run:
    """DDP by gloo: in each step an all-reduce that takes 100 us, and one of more bytes, both after all compute."""
    return captured(path, [(SMALL, 0, 100), (large, 100, large_us)], steps)


def captured(path: Path, messages: list[tuple[int, int, int]], steps: int = 3, ranks: tuple[int, ...] = ()) -> dp.Run:
    """DDP by gloo: all-reduces after all compute of each step, given by elements, start in the step and length in us.

    ``ranks`` are those that are recorded of a job of two; if there are none, no file tells its rank.
    """
    events = []
    for step in range(steps):
        at = 1000 * step
        events += [
            event("user_annotation", f"step|index={step}", f"{at}", "1000"),
            event("user_annotation", "backward", f"{at}", "950"),
            *(event("cpu_op", "autograd::engine::evaluate_function: Mm", f"{at + 10 * n}", "10") for n in range(8)),
        ]
        for thread, (elements, begin, length) in enumerate(messages, 2):
            shapes = {"Input Dims": [[elements]], "Input type": ["float"]}
            begins = f"{at + 100 + begin}"
            events.append(event("cpu_op", "c10d::allreduce_", begins, "1"))
            events.append(event("user_annotation", "gloo:all_reduce", begins, f"{length}", tid=thread, **shapes))
    files = [
        write(path / f"x.rank{rank}.json", events, distributedInfo={"backend": "gloo", "rank": rank, "world_size": 2})
        for rank in ranks
    ]
    (run,) = dp.load_runs(files or write(path / "x.json", events))
    return run


@pytest.mark.parametrize(
    ("large_us", "steps", "large", "is_found"),
    [(100, 3, LARGE, True), (108, 3, LARGE, True), (130, 3, LARGE, False), (600, 3, LARGE, False),
     (100, 2, LARGE, False), (100, 3, 3 * SMALL, False), (50, 3, LARGE, True)],
    ids=["equal", "little longer", "longer", "by bandwidth", "too few", "sizes alike", "shorter"],
)  # fmt: skip
def test_doctor_and_cause_say_where_time_does_not_depend_on_size(
    large_us: int, steps: int, large: int, is_found: bool, tmp_path: Path
) -> None:
    run = reduced(tmp_path, large_us, steps, large)
    rules = [finding.rule for finding in run.doctor().findings]
    assert ("time does not depend on size" in rules) == is_found
    cause = run.root_cause()
    assert cause is not None
    assert (cause.alike is not None) == is_found
    if cause.alike:
        sizes = (cause.alike.small_bytes, cause.alike.large_bytes)
        assert sizes == (4 * SMALL, 4 * LARGE)
        assert (cause.alike.small_ns, cause.alike.large_ns) == (100_000, 1000 * large_us)


@pytest.mark.parametrize(
    ("messages", "is_found"),
    [([(LARGE, 0, 400), (SMALL, 10, 450)], False),  # the link sends the large one first: 2 MB in 100 us
     ([(SMALL, 0, 370)] * 6 + [(LARGE, 420, 400)], False),  # each of six has a sixth of the link
     ([(SMALL, 0, 420), (LARGE, 10, 420)], True)],  # a peer is late for both
    ids=["in order", "in equal parts", "late peer"],
)  # fmt: skip
def test_a_message_that_shares_its_link_with_others_may_wait_for_their_bytes(
    messages: list[tuple[int, int, int]], is_found: bool, tmp_path: Path
) -> None:
    run = captured(tmp_path, [(size, 2 * n + begin, length) for n, (size, begin, length) in enumerate(messages)])
    assert ("time does not depend on size" in [finding.rule for finding in run.doctor().findings]) == is_found
    cause = run.root_cause()
    assert cause is not None
    assert (cause.alike is not None) == is_found


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_of_a_job_whose_ranks_are_all_recorded_no_further_ranks_are_asked_for(
    ranks: tuple[int, ...], tmp_path: Path
) -> None:
    run = captured(tmp_path, [(SMALL, 0, 100), (LARGE, 100, 100)], ranks=ranks)
    (finding,) = (one for one in run.doctor().findings if one.rule == "time does not depend on size")
    assert ("Record all ranks" in finding.advice) == (ranks == (0,))
    assert "easure the latency of a small all-reduce" in finding.advice
