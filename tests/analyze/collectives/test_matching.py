"""Which collectives are one and the same, also where one rank began to record steps without numbers later."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddp_prof.ingest.load import load_trace
from tests.drawing import PID, draw_trace
from tests.ingest.test_kineto_json import event, write
from tests.measuring import analysis_of

LENGTHS = (13, 17, 12, 19, 14, 16, 11, 18, 15, 12, 20, 13, 17, 14)


def rank_trace(rank: int, first: int):
    """Each step has one collective before its end; the steps carry no numbers, and the file starts at ``first``."""
    ranges = [(f"process|rank={rank}|world=2", "#" * 300)]
    at = 5 * rank
    for length in LENGTHS[first:]:
        ranges.append(("step|", " " * at + "#" * (length - 1)))
        ranges.append(("all_reduce|bucket=0|bytes=4", " " * (at + length - 6) + "####"))
        at += length
    return draw_trace(ranges=ranges, ranks={PID: rank}, world_size=2, path=f"rank{rank}.sqlite")


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (0, 4), (3, 0), (2, 3)])
def test_steps_that_begin_apart_are_recognised(first: int, second: int) -> None:
    run = analysis_of(rank_trace(0, first), rank_trace(1, second))
    own, other = run.ranks
    assert (own.keys_of_steps - first).tolist()[0] == (other.keys_of_steps - second).tolist()[0]
    assert len(run.matches) == len(LENGTHS) - max(first, second)
    assert any("another number of steps earlier" in warning for warning in run.warnings)


def test_what_the_clocks_say_ran_minutes_apart_is_a_doubt() -> None:
    early, late = rank_trace(0, 0), rank_trace(1, 0)
    for seconds, doubted in ((0, False), (300, True)):
        run = analysis_of(replace(early, epoch_ns=10**18), replace(late, epoch_ns=10**18 + seconds * 10**9))
        assert any("300 s apart" in warning for warning in run.warnings) is doubted


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


@pytest.mark.parametrize(
    ("streams", "world", "warns"),
    [({9: "..MMNN"}, 4, False), ({9: "..MM..", 11: "....NN"}, 4, True), ({9: "..MM..", 11: "....NN"}, 2, False)],
)
def test_streams_without_names_of_communicators_are_a_doubt(streams: dict[int, str], world: int, warns: bool) -> None:
    """As of tensor and data parallelism: rank 1 may share a communicator with rank 0 for M, and with rank 2 for N."""
    traces = [
        draw_trace(
            ranges={"step 0": "######"}, launches={"main": "MN"}, streams=streams, ranks={PID: rank},
            world_size=world, path=f"{rank}",
        )
        for rank in (0, 1)
    ]  # fmt: skip
    assert any("communicators apart" in warning for warning in analysis_of(*traces).warnings) is warns
