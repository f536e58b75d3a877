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
    events = []
    for step in range(steps):
        at = 1000 * step
        events += [
            event("user_annotation", f"step|index={step}", f"{at}", "1000"),
            event("user_annotation", "backward", f"{at}", "950"),
            *(event("cpu_op", "autograd::engine::evaluate_function: Mm", f"{at + 20 * n}", "20") for n in range(4)),
        ]
        begin = at + 100
        for elements, length in ((SMALL, 100), (large, large_us)):
            shapes = {"Input Dims": [[elements]], "Input type": ["float"]}
            events.append(event("cpu_op", "c10d::allreduce_", f"{begin}", "1"))
            events.append(event("user_annotation", "gloo:all_reduce", f"{begin}", f"{length}", tid=2, **shapes))
            begin += length
    (run,) = dp.load_runs(write(path / "x.json", events))
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
