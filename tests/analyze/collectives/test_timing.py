"""The life of a collective, drawn: lower-case letters are compute kernels, upper-case ones collectives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_prof.analyze.collectives.gradients import carry_gradients
from ddp_prof.analyze.collectives.timing import PLACES, find_timings
from ddp_prof.analyze.core.attribution import bus_factor
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.ingest.load import load_trace
from ddp_prof.trace import NO_TIME
from tests.drawing import PID, draw_trace
from tests.measuring import collectives_of, results_of
from tests.nsys_factory import Capture, Kernel, Range, write_capture

OURS = draw_trace(
    ranges={
        "process|rank=0|world=2|variant=overlap|backend=nccl|device=cuda": "##############################",
        "step|index=4": "##############################",
        "backward": ".########.....................",
        "synchronize": ".........####.................",
        "all_reduce|bucket=0|bytes=4000|params=2": "...##########.................",
        "all_reduce|bucket=1|bytes=8000|params=1": ".......######.................",
    },
    launches={"main": ".............o................", "pt_autograd_0": ".abM..cN......................"},
    streams={7: "..aabbbb......ccc.....oo......", 9: "........MMMM.....NNNN........."},
    ranks={PID: 0},
    world_size=2,
)


def test_a_bucket_is_ready_with_its_last_gradient() -> None:
    first, second = collectives_of(OURS)
    assert (first.ready_ns, first.launch_ns, first.start_ns, first.end_ns) == (8, 3, 8, 12)
    assert (second.ready_ns, second.launch_ns, second.start_ns, second.end_ns) == (17, 7, 17, 21)
    assert {first.ready_source, second.ready_source} == {"kernel"}
    assert (first.queueing_ns, first.duration_ns, first.before_backward_end_ns) == (5, 4, 9)


def test_a_kernel_belongs_to_the_range_that_was_opened_last_before_its_launch() -> None:
    first, second = collectives_of(OURS)
    assert [(item.rank, item.step, item.index, item.bucket, item.bytes) for item in (first, second)] == [
        (0, 4, 0, 0, 4000),
        (0, 4, 1, 1, 8000),
    ]
    assert first.op == "all_reduce"
    assert (first.ranks, first.algbw_bytes_per_s, first.busbw_bytes_per_s) == (2, 1e12, 1e12)


def test_on_a_cpu_the_hook_tells_and_work_starts_at_launch() -> None:
    trace = draw_trace(
        ranges={
            "process|rank=0|world=2|variant=flat|backend=gloo|device=cpu": "##########",
            "step|index=0": "##########",
            "backward": "######....",
            "synchronize": "......###.",
            "all_reduce|bucket=0|bytes=8|params=1": "...######.",
        },
        ranks={PID: 0},
        world_size=2,
    )
    result = results_of(trace)
    (only,) = result.collectives
    assert (only.ready_ns, only.launch_ns, only.start_ns, only.end_ns, only.ready_source) == (3, 3, 3, 9, "hook")
    assert (only.overlapped_ns, only.exposed_ns, only.when_ns("tail")) == (3, 3, 3)
    assert result.alignment.missing_ranks == (1,)
    assert any("rank 1 is not among the traces" in warning for warning in result.warnings)


def test_the_ranges_of_a_sharded_optimizer_tell_their_operation() -> None:
    trace = draw_trace(
        ranges={
            "process|rank=0|world=2|variant=sharded|backend=gloo|device=cpu": "############",
            "step|index=0": "############",
            "backward": "#####.......",
            "reduce_scatter|bucket=0|bytes=8|params=1": "..###.......",
            "all_gather|bucket=0|bytes=8|params=1": "........###.",
        },
        ranks={PID: 0},
        world_size=2,
    )
    first, second = collectives_of(trace)
    assert [(item.op, item.bucket, item.bytes) for item in (first, second)] == [
        ("reduce_scatter", 0, 8),
        ("all_gather", 0, 8),
    ]
    assert [item.exposed_ns for item in (first, second)] == [0, 3]


def test_what_a_foreign_trace_does_not_tell_is_none() -> None:
    trace = draw_trace(streams={7: ".aa......", 9: "..NNN...."})
    (only,) = collectives_of(trace)
    assert (only.op, only.bucket, only.bytes, only.ready_ns, only.launch_ns, only.step) == (None,) * 6
    assert (only.transfer_ns, only.wait_ns, only.busbw_bytes_per_s, only.exposed_ns) == (None, None, None, 2)
    assert any("marks no whole step" in warning for warning in results_of(trace).warnings)


def test_a_communicator_that_nothing_names_is_the_job_only_where_it_is_the_only_one() -> None:
    """Beside another one, as of tensor or pipeline parallelism, the bus bandwidth was that of all ranks."""
    ranges = {"process|rank=0|world=8|backend=nccl|device=cuda": "#" * 9, "all_reduce|bucket=0|bytes=16": "#" * 9}
    kernels = {"communication P": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"}
    for streams, ranks in (
        ({9: "..NNNN..."}, 8),
        ({9: "..NNNN...", 11: "......NN."}, None),
        ({9: "..NNNN...", 11: "......PP."}, None),
        ({7: ".aaNNNN.."}, None),  # the stream of compute carries the collectives of all communicators
    ):
        streams = {7: ".aa......", **streams}
        trace = draw_trace(ranges=ranges, streams=streams, launches={"main": "aN"}, world_size=8)
        trace = replace(trace, names=tuple(kernels.get(name, name) for name in trace.names))
        first, *_ = [one for one in collectives_of(trace) if one.bytes]
        assert (first.bytes, first.ranks, first.busbw_bytes_per_s) == (16, ranks, ranks and 4e9 * 1.75)


def test_a_frame_has_a_row_a_collective() -> None:
    frame = results_of(OURS).to_frame()
    assert frame.shape[0] == 2
    parts = frame[["when_tail_ns", "when_backward_ns", "why_transfer_ns", "exposed_ns"]].sum()
    assert parts.tolist() == [4, 4, 8, 8]


def test_bus_bandwidth_counts_what_an_ideal_link_carries() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == 0.75
    assert bus_factor("broadcast", 4) == 1
    assert bus_factor("send_recv", 2) is None
    assert bus_factor("all_reduce", None) is None


def test_two_files_are_not_all_ranks_of_a_job() -> None:
    """Without the job's size the communicator's is not known, nor what its link carries."""
    one = draw_trace(launches={"main": "N"}, streams={9: ".NNN"}, path="a")
    other = draw_trace(launches={"main": "N"}, streams={9: ".NNN"}, path="b")
    assert [found.ranks for found in collectives_of(one, other)] == [None, None]


def test_an_all_gather_waits_for_no_gradient(tmp_path: Path) -> None:
    """The next layer's parameters, gathered by fully_shard while backward computes; the reduce-scatter waits."""
    kernels = [
        Kernel("gemm", 20, 30, 10, 131),
        Kernel("ncclDevKernel_AllGather_RING_LL(x)", 35, 40, 12, 131, stream=9),
        Kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)", 40, 45, 14, 131, stream=9),
    ]
    capture = Capture(kernels, [Range("step 0", 0, 90, 100)], {(100, 131): "pt_autograd_0"})
    found = collectives_of(load_trace(write_capture(tmp_path / "x.sqlite", capture)))
    assert [(one.op, one.ready_ns) for one in found] == [("all_gather", None), ("reduce_scatter", 30)]


def test_what_begins_before_a_gradient_is_there_does_not_wait_for_it() -> None:
    """N reduces the gradients of b; c, of the next layer, was launched before it."""
    trace = draw_trace(
        ranges={"step 0": "#" * 20, "backward": "####"},
        launches={"main": "bcN."},
        streams={7: ".bbb..cccc", 9: "....NNNN"},
    )
    (only,) = collectives_of(trace)
    assert (only.ready_ns, only.ready_source) == (None, None)


def test_what_forward_launches_waits_for_no_gradient() -> None:
    """Two microbatches: N, of tensor parallelism, is launched by the second forward, long after the first backward."""
    trace = draw_trace(
        ranges={"step 0": "#" * 20, "forward": "###......###", "backward": "...###......##"},
        launches={"main": "f..b.....gN..c"},
        streams={7: ".ff.bb......gg....cc", 9: "..............NNNN.."},
    )
    (only,) = collectives_of(trace)
    assert (only.phase, only.ready_ns, only.ready_source) == ("forward", None, None)
    assert {part.why for part in only.exposed_by} == {"late_input"}, "it was said to be launched late"


@pytest.mark.parametrize("is_named", [False, True])
def test_what_the_optimizer_launches_waits_for_no_gradient(is_named: bool) -> None:
    """As the sum of squares of a norm. Where no range names the optimizer, it may be the gradients."""
    optimizer = {"optimizer": "........######"} if is_named else {}
    trace = draw_trace(
        ranges={"step 0": "##############", "backward": "#####"} | optimizer,
        launches={"main": "a........N...."},
        streams={7: ".aaa..........", 9: "..........NNN."},
    )
    (only,) = collectives_of(trace)
    assert (only.phase, only.blocking) == ("optimizer" if is_named else None, "after_backward")
    assert (only.ready_ns, only.ready_source) == ((None, None) if is_named else (4, "kernel"))


@pytest.mark.parametrize(
    ("optimizer", "launches", "compute", "reduces"),
    [
        ("...####.......", "a..u.....b....", ".aaauuu...bb..", True),
        ("..........##..", "a..b......u...", ".aaabbb....u..", False),
    ],
)
def test_only_what_follows_the_update_after_backward_reduces_no_gradients(
    optimizer: str, launches: str, compute: str, reduces: bool
) -> None:
    """A hook in backward has stepped on some parameters, and N, after backward, reduces the gradients of others."""
    trace = draw_trace(
        ranges={"step 0": "################", "backward": "##########", "optimizer": optimizer},
        launches={"pt_autograd_0": launches, "main": "............N..."},
        streams={7: compute, 9: ".............NN."},
    )
    (rank,) = find_rank_events(trace)
    found = find_timings(rank)
    assert [PLACES[one] for one in found.timings.place.tolist()] == [None if reduces else "after_optimizer"]
    assert carry_gradients(found).tolist() == [reduces]


def test_gradients_are_reduced_after_backward_beside_the_activations_of_tensor_parallelism() -> None:
    """T and U of its group hid that M and N of the other one are of gradients: no finding was about these."""
    trace = draw_trace(
        ranges={"step 0": "#" * 20, "forward": "####", "backward": "....####"},
        launches={"main": "fT..bU..MN"},
        streams={7: ".ff..bb......", 9: "..TT..UU..MMNN"},
    )
    (rank,) = find_rank_events(trace)
    found = find_timings(rank)
    apart = replace(found.timings, group=np.array([0, 0, 1, 1]))
    assert carry_gradients(replace(found, timings=apart)).tolist() == [False, False, True, True]


def test_within_a_graph_nothing_tells_when_gradients_are_ready() -> None:
    """One call launches backward and its all-reduce, which may begin before the last kernel of that call ends."""
    trace = draw_trace(
        ranges={"step 0": "#" * 12, "backward": "###"}, launches={"main": ".a"}, streams={7: "..aa...", 9: "....NN...."}
    )
    correlation = trace.activities.correlation.copy()
    correlation[:] = correlation[0]
    whole = replace(trace, activities=replace(trace.activities, correlation=correlation), launching_calls=None)
    (only,) = collectives_of(whole)
    assert (only.launch_ns, only.phase, only.ready_ns) == (1, "backward", None)


def test_what_feeds_a_collective_is_told_as_the_recorded_waits_tell_it(shared_traces: Path) -> None:
    """Of each of the 472 all-reduces of a real capture: the end of the last operation that its stream waited for."""
    (rank,) = find_rank_events(load_trace(shared_traces / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite"))
    activities, edges = rank.trace.activities, rank.dependencies().edges
    recorded: dict[tuple[int, int], int] = {}
    for producer, consumer in zip(edges.producer.tolist(), edges.consumer.tolist(), strict=True):
        key = int(activities.start_ns[consumer]), int(activities.end_ns[consumer])
        recorded[key] = max(recorded.get(key, NO_TIME), int(activities.end_ns[producer]))
    timings = find_timings(rank).timings
    starts, ends = timings.start_ns.tolist(), timings.end_ns.tolist()
    assert len(timings) == 472
    assert timings.input_ns.tolist() == [recorded[key] for key in zip(starts, ends, strict=True)]
