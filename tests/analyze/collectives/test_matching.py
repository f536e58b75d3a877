"""Steps without numbers that one rank began to record a step later than the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.ingest.load import load_trace
from tests.drawing import PID, draw_trace
from tests.ingest.test_kineto_json import event, write
from tests.measuring import analysis_of

LENGTHS = (13, 17, 12, 19, 14, 16)


def rank_trace(rank: int, first: int):
    """Each step has one collective before its end; the steps carry no numbers, and the file starts at ``first``."""
    ranges = [(f"process|rank={rank}|world=2", "#" * 200)]
    at = 5 * rank
    for length in LENGTHS[first:]:
        ranges.append(("step|", " " * at + "#" * (length - 1)))
        ranges.append(("all_reduce|bucket=0|bytes=4", " " * (at + length - 6) + "####"))
        at += length
    return draw_trace(ranges=ranges, ranks={PID: rank}, world_size=2, path=f"rank{rank}.sqlite")


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_steps_shifted_by_one_are_recognised(first: int, second: int) -> None:
    run = analysis_of(rank_trace(0, first), rank_trace(1, second))
    own, other = run.ranks
    assert (own.keys_of_steps - first).tolist()[0] == (other.keys_of_steps - second).tolist()[0]
    assert len(run.matches) == len(LENGTHS) - 1
    assert any("another number of steps earlier" in warning for warning in run.warnings)


def test_steps_that_begin_together_stay_as_they_are() -> None:
    run = analysis_of(rank_trace(0, 0), rank_trace(1, 0))
    assert len(run.matches) == len(LENGTHS)
    assert not any("steps earlier" in warning for warning in run.warnings)


def test_groups_that_one_was_split_into_are_told_apart_by_their_ranks(tmp_path: Path) -> None:
    """Of four ranks 0 and 1 are a group, 2 and 3 another one; torch 2.4 calls both "1"."""
    traces = []
    for rank, duration in enumerate((5, 4, 9, 8)):
        noted = {
            "Collective name": "allreduce", "Process Group Name": "1", "Group size": 2, "Seq": 7,
            "Process Group Ranks": "[0, 1]" if rank < 2 else "[2, 3]",
        }  # fmt: skip
        kernel = event("kernel", "ncclDevKernel_Generic", "10", str(duration), stream=9, device=0, **noted)
        path = write(tmp_path / f"{rank}.json", [kernel], distributedInfo={"rank": rank, "world_size": 4})
        traces.append(load_trace(path))
    run = analysis_of(*traces)
    assert len(run.matches) == 2
    assert [wait.tolist() for wait in run.waits_ns] == [[1_000], [0], [1_000], [0]]
