"""Compute that waits for reduced gradients does not make backward end later: of a comm hook, or of an optimizer."""

from __future__ import annotations

from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.analyze.root_cause import find_root_cause
from ddp_prof.table import NO_TIME
from ddp_prof.trace import Category, Kind, Trace
from tests.analyze.critical.scheduler import Device
from tests.analyze.doctor.test_gpu_rules import MS, with_sizes
from tests.drawing import draw_trace
from tests.measuring import collectives_of, results_of

US, MIB = 1_000, 1 << 20
HOOK = 25
"""The stream of a hook; backward computes on stream 7, and NCCL's is 20."""


def reducing(
    buckets: int,
    stream: int,
    *,
    steps: int = 1,
    again: bool = False,
    late: bool = False,
    kernel: str = "",
    takes_ns: int = 3 * MS // 4,
) -> Trace:
    """Backward of two buckets, of which each is converted on a stream once it is reduced; ``again``: and reduced again.

    With ``late``, backward computes on after the last bucket. ``kernel`` is the name of the reductions.
    """
    device = Device()
    for step in range(steps):
        with device.range(f"step {step}"):
            with device.range("forward"):
                device.launch(US, 7, MS, is_collective=False)
            with device.range("backward"):
                for bucket in range(buckets):
                    device.launch(US, 7, MS, is_collective=False)
                    for source in (7, stream)[: 1 + again]:
                        device.record(1, source, 1)
                        device.wait(1, 20, 1)
                        device.launch(US, 20, takes_ns, is_collective=True, name=kernel)
                        device.record(1, 20, 2)
                        device.wait(1, stream, 2)
                        device.launch(US, stream, 10 * US, is_collective=False, name="convert")
                    device.record(1, stream, 100 + bucket)
                if late:
                    device.launch(US, 7, 5 * MS, is_collective=False, name="late")
            for bucket in range(buckets):
                device.wait(1, 7, 100 + bucket)
            with device.range("optimizer"):
                device.launch(US, 7, MS, is_collective=False)
            device.synchronize(US)
    return device.trace()


def backward_end_of(trace: Trace) -> tuple[str, int]:
    """Which operation ends backward, and when."""
    (rank,) = find_rank_events(trace)
    (end,) = rank.passes.end_ns.tolist()
    activities = trace.activities
    (row,) = (activities.end_ns == end).nonzero()[0]
    return trace.names[activities.name_id[row]], int(row)


def test_what_converts_the_last_bucket_does_not_end_backward() -> None:
    """The tail of the fp16 hook was 0, its large last bucket was not found, and it was said that no compute ran."""
    name, row = backward_end_of(reducing(2, HOOK))
    assert (name, row) == ("gemm", 4), "forward, backward, reduction, conversion, backward"
    assert backward_end_of(reducing(2, HOOK, kernel="ncclDevKernel_Generic_1(x)")) == (name, row), "as RCCL's"
    cause = find_root_cause(results_of(with_sizes(reducing(4, HOOK, steps=6), [24 * MIB])))
    assert cause is not None
    assert (cause.when, cause.pair_ns, cause.smaller_bucket_mb) == ("tail", 3 * MS // 4, 12)


def test_a_smaller_last_bucket_is_no_advice_where_the_link_is_busy_until_it_starts() -> None:
    """Gradients of a bucket take 1 ms. In its place two halves would end when it does: only an earlier first one helps.

    ms         0   1   2   3   4   5
    backward   gggggggggggggggg
    reduction  ....111112222233333444444
    """
    cause = find_root_cause(results_of(with_sizes(reducing(4, HOOK, steps=6, takes_ns=9 * MS // 8), [24 * MIB])))
    assert cause is not None
    assert (cause.when, cause.why, cause.is_last_bucket, cause.follows_another) == ("tail", "transfer", True, True)
    assert cause.smaller_bucket_mb is None


def test_what_a_collective_needs_may_be_a_part_of_backward() -> None:
    """As the steps of PowerSGD, between its two reductions; what converts a shard on the scatters' stream is none."""
    assert backward_end_of(reducing(3, HOOK, again=True))[0] == "convert", "it makes what is reduced next"
    assert backward_end_of(reducing(3, 20))[0] == "gemm", "as FSDP's, on the stream of the scatters"


def test_compute_of_the_stream_that_computes_gradients_ends_backward_whatever_it_waits_for() -> None:
    """As of a tensor-parallel layer, or if each hook waits for its reduction."""
    assert backward_end_of(reducing(2, 7))[0] == "convert"
    assert backward_end_of(reducing(2, 7, late=True))[0] == "late"
    assert backward_end_of(reducing(2, HOOK, late=True))[0] == "late"


def test_what_follows_a_gather_by_copies_is_backwards_own() -> None:
    """As where copy engines gather: c computes with the weights that were gathered on its stream."""
    trace = draw_trace(
        ranges={"step 0": "#" * 12, "backward": "#" * 10},
        launches={"main": "a1c........."},
        streams={7: ".aaaaaaa", HOOK: "...11...cc.."},
    )
    gathers = trace.activities.kind == Kind.COPY
    trace.activities.category[gathers] = Category.COMMUNICATION
    (rank,) = find_rank_events(trace)
    assert rank.passes.end_ns.tolist() == [10]


def test_where_all_of_backward_waits_for_reductions_no_tail_is_told() -> None:
    """All that was exposed in such a step was its tail; its collectives were exposed outside of named phases."""
    trace = draw_trace(
        ranges=[("step 0", "#" * 12), ("step 1", "." * 12 + "#" * 12), ("backward", "#" * 8 + "." * 4 + "#" * 8)],
        launches={"main": "aN..........Mc.........."},
        streams={7: ".aaaaaaa", 20: ".....NNNN", HOOK: "." * 13 + "MMMM.cc"},
    )
    (rank,) = find_rank_events(trace)
    assert rank.passes.end_ns.tolist() == [8, NO_TIME]
    tails = [step.tail_ns for step in measure_overlap(trace).ranks[0].steps]
    assert tails == [1, None]
    assert [one.when_ns("tail") for one in collectives_of(trace)] == [1, 0]
