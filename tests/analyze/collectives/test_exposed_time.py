"""Why communication is exposed: a picture a cause, and an oracle that looks at every instant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.analyze.root_cause import find_root_cause
from ddp_prof.present.cause_headlines import root_cause_headline
from tests.drawing import PID, draw_trace
from tests.measuring import collectives_of, results_of

STEP = {"step 0": "#" * 24}


def pairs_of(
    stream: str, compute: str, launches: dict[str, str], copies: str = "", character_ns: int = 1, **more
) -> list[dict[str, int]]:
    """What is exposed of each collective, by when and why, in characters."""
    ranges = {**STEP, "backward": "#" * 18, **more}
    streams = {7: compute, 8: copies, 9: stream}
    trace = draw_trace(ranges=ranges, launches=launches, streams=streams, character_ns=character_ns)
    found = collectives_of(trace)
    (step,) = measure_overlap(trace).ranks[0].steps
    assert sum(value.exposed_ns for value in found) == step.exposed_ns
    assert sum(value.overlapped_ns for value in found) == step.overlapped_ns
    return [{f"{part.when} {part.why}": part.ns // character_ns for part in value.exposed_by} for value in found]


def test_tail() -> None:
    assert pairs_of(
        compute=".aaaa.......",
        stream="....NNNN....",
        launches={"pt_autograd_0": "aN"},
    ) == [{"tail transfer": 3}]


def test_during_backward() -> None:
    assert pairs_of(
        compute=".aaaa....bbb",
        stream="....NNNN....",
        launches={"pt_autograd_0": "aN......b"},
    ) == [{"backward transfer": 3}]


def test_during_backward_before_an_optimizer_steps_in_it() -> None:
    assert pairs_of(
        compute=".aaaa....oo..bbb",
        stream="....NNNNN..MM...",
        launches={"pt_autograd_0": "aN..M.o.b"},
        **{"optimizer|bucket=0": ".....##"},
    ) == [{"backward transfer": 4}, {"backward queued": 2}]


def test_a_receive_that_queues_may_wait_for_its_peer_all_the_same() -> None:
    """As in a pipeline whose host runs ahead: receives follow one another on a stream, each until its peer sends."""
    trace = draw_trace(
        ranges={**STEP, "forward": "#" * 18},
        launches={"main": "NMa"},
        streams={7: "...............aaa", 9: "..NNNNNMMMMMMM"},
    )
    names = tuple("ncclDevKernel_SendRecv(x)" if name == "communication M" else name for name in trace.names)
    found = collectives_of(replace(trace, names=names))
    assert [{f"{part.when} {part.why}" for part in one.exposed_by} for one in found] == [
        {"forward transfer"},
        {"forward transfer"},
    ]


def test_launched_late() -> None:
    """Ready at 5, launched at 7: of its end, as much as it was late."""
    assert pairs_of(
        compute=".aaaa.......",
        stream=".......NNNN.",
        launches={"pt_autograd_0": "a......N"},
    ) == [{"tail launched_late": 2, "tail transfer": 2}]


def test_queued() -> None:
    """Ready at 3 and held up until 7 by another: of its end, as much as it stood in the queue."""
    assert pairs_of(
        compute=".aabbb.........",
        stream="...MMMMNNNNNN..",
        launches={"pt_autograd_0": "aMb.N"},
    ) == [{"tail transfer": 1}, {"tail queued": 1, "tail transfer": 5}]


@pytest.mark.parametrize(
    ("compute", "pairs"),
    [
        # N may need b as well as M: that M ends when b does tells nothing.
        (".aaaabbbb......", [{}, {"unknown": 4, "transfer": 2}]),
        # After 7 nothing but M holds up N; before, b may.
        (".aaaabb........", [{"transfer": 2}, {"queued": 2, "unknown": 2, "transfer": 2}]),
        # All is computed before M begins.
        (".aaaa..........", [{"transfer": 4}, {"queued": 4, "transfer": 2}]),
    ],
)
def test_within_a_graph_what_may_have_waited_for_input_is_no_queue(compute: str, pairs: list[dict[str, int]]) -> None:
    """'It waits for earlier collectives: a faster link would help' was said of a last bucket that none held up.

    One call launches all: what needs what is not recorded, also if all synchronizations are.
    """
    trace = draw_trace(ranges={"step 0": "#" * 15}, launches={"main": "a"}, streams={7: compute, 9: ".....MMMMNNNNNN"})
    correlation = np.full(len(trace.activities), ord("a"))
    whole = replace(trace, activities=replace(trace.activities, correlation=correlation), launching_calls=None)
    found = results_of(whole)
    assert [{part.why: part.ns for part in one.exposed_by} for one in found.collectives] == pairs
    (rank,) = find_rank_events(replace(whole, sync_reason="not recorded"))
    assert rank.blocking.coverage.reason == "what needs a collective within a CUDA graph is not recorded"
    if "unknown" in pairs[1] and "queued" not in pairs[1]:
        text = root_cause_headline(find_root_cause(found)).text
        assert "A CUDA graph launched it together with compute" in text
        assert "clocks" not in text


FORWARD_ONLY = {"forward": "#" * 24, "backward": ""}


def test_an_idle_stream_is_no_queue_what_was_launched_ahead_waited_for_its_input() -> None:
    """N was launched at 3. M was done at 7, and b, which feeds N, at 11: only so much of N's end is due to that."""
    assert pairs_of(
        compute=".aaa.bbbbbb......cc",
        stream="....MMM....NNNNNN..",
        launches={"main": "aMbN......c"},
        **FORWARD_ONLY,
    ) == [{"forward late_input": 1}, {"forward late_input": 4, "forward transfer": 2}]


def test_an_idle_stream_without_known_input_is_no_queue() -> None:
    """The stream is idle for 50 us, and of what the thread launches that launches N nothing feeds it."""
    assert pairs_of(
        compute=".aaaaaaaa......c",
        stream="...MM.....NNNN..",
        launches={"main": "a............c", "comm": ".MN"},
        character_ns=10_000,
        **FORWARD_ONLY,
    ) == [{}, {"forward transfer": 4}]


def test_what_a_device_takes_from_one_operation_to_the_next_is_no_idle_stretch() -> None:
    """5 us after M, which held up the stream since N's launch."""
    assert pairs_of(
        compute=".aa............c",
        stream="...MMMM.NNNNNN..",
        launches={"main": "a............c", "comm": "..MN"},
        character_ns=5_000,
        **FORWARD_ONLY,
    ) == [{"forward transfer": 4}, {"forward queued": 4, "forward transfer": 2}]


def test_only_the_busy_stretch_that_ends_where_a_collective_starts_is_its_queue() -> None:
    """L was done long before: without M alone N, launched at 3, would have started at 15."""
    assert pairs_of(
        compute=".aa....................c",
        stream="...LLLL........MMMNNNN..",
        launches={"main": "a....................c", "comm": ".LMN"},
        character_ns=10_000,
        **FORWARD_ONLY,
    ) == [{"forward transfer": 4}, {"forward transfer": 3}, {"forward queued": 3, "forward transfer": 1}]


def test_what_ends_after_a_collective_has_begun_does_not_feed_it() -> None:
    assert pairs_of(
        compute=".....bbbb....c",
        stream="......NNNNNN..",
        launches={"main": "...bN........c"},
        character_ns=30_000,
        **FORWARD_ONLY,
    ) == [{"forward transfer": 3}]


def test_the_copy_of_gradients_into_a_bucket_feeds_its_collective() -> None:
    """The last gradient is ready at 4, its copy at 7."""
    assert pairs_of(
        compute=".aaa..........",
        copies="....111.......",
        stream=".......NNNNN..",
        launches={"pt_autograd_0": "a1N"},
    ) == [{"tail late_input": 3, "tail transfer": 2}]


def test_that_a_gradient_comes_late_is_no_delay_of_its_collective() -> None:
    """The host runs ahead, by more than a step: the stream was busy in between, but with another step's collective."""
    trace = draw_trace(
        ranges={"step|index=0": "###", "step|index=1": "...###", "backward": "######"},
        launches={"pt_autograd_0": ".aM.bN"},
        streams={7: "......aaaa........bbbb.......", 9: "..........MMMMM.......NNNNN.."},
    )
    found = collectives_of(trace)
    assert [item.launch_ns for item in found] == [2, 5]
    assert [[(part.when, part.why, part.ns) for part in item.exposed_by] for item in found] == [
        [("tail", "transfer", 5)],
        [("tail", "transfer", 5)],
    ]


def test_synchronous() -> None:
    assert pairs_of(
        compute=".aaaa........oo",
        stream="......MM.NNNN..",
        launches={"main": ".....M..N...o", "pt_autograd_0": "a"},
        backward="#####",
        synchronize=".....########",
    ) == [{"tail blocking_call": 2}, {"tail blocking_call": 4}]


def test_a_collective_after_backward_is_synchronous_where_nothing_is_said_of_synchronizing() -> None:
    assert pairs_of(
        compute=".aaaa..........",
        stream="......MM.......",
        launches={"main": "......M........", "pt_autograd_0": "a"},
        backward="#####",
    ) == [{"tail blocking_call": 2}]


def test_an_instant_belongs_to_the_collective_that_ends_last() -> None:
    trace = draw_trace(
        ranges=STEP | {"backward": "#"},
        launches={"pt_autograd_0": "aMNO"},
        streams={7: ".aa", 8: "...MMMMMMMMM", 9: ".....NNNNNN", 10: "........OOOOOOOOO"},
    )
    first, second, third = collectives_of(trace)
    assert [item.exposed_ns for item in (first, second, third)] == [5, 0, 9]


def test_a_missing_peer_comes_before_a_late_launch() -> None:
    """Ready at 3, launched at 6, the peer comes at 12: an earlier launch would have changed nothing until then."""
    ranks = [
        draw_trace(
            ranges={**STEP, "backward": "#" * 18},
            launches={"pt_autograd_0": "a.....N"},
            streams={7: ".aa...........", 9: stream},
            ranks={PID: rank},
            path=f"rank{rank}",
        )
        for rank, stream in enumerate(["......NNNNNNNN", "............NN"])
    ]
    early, late = collectives_of(*ranks)
    assert [(part.when, part.why, part.ns) for part in early.exposed_by] == [
        ("tail", "launched_late", 2),
        ("tail", "peer_wait", 6),
    ]
    assert [(part.when, part.why, part.ns) for part in late.exposed_by] == [("tail", "launched_late", 2)]


def test_in_forward_what_forward_waits_for() -> None:
    """An all-gather before forward's first compute and one within it; the time between phases is neither's."""
    assert pairs_of(
        compute="..ff..ff..bb.....",
        stream="GG..HHHH....NNN..",
        launches={"main": "G.f.H.f", "pt_autograd_0": "..........bN"},
        forward="#########",
        backward=".........########",
    ) == [{"forward transfer": 2}, {"forward transfer": 2}, {"tail transfer": 3}]


def test_without_phases_nothing_is_said_of_backward() -> None:
    trace = draw_trace(launches={"main": "a.Nb"}, streams={7: "aa....bb", 9: "..NN...."})
    (only,) = collectives_of(trace)
    assert [(part.when, part.why, part.ns) for part in only.exposed_by] == [("unknown", "transfer", 2)]


def test_on_the_stream_of_compute_a_collective_holds_compute_up_itself() -> None:
    trace = draw_trace(ranges=STEP | {"forward": "#" * 20}, launches={"main": "aNb"}, streams={7: "aaNNNNbb"})
    (only,) = collectives_of(trace)
    assert only.blocking == "compute_stream"
    assert [(part.when, part.why, part.ns) for part in only.exposed_by] == [("forward", "blocking_call", 4)]


@pytest.mark.slow
def test_on_real_captures_causes_add_up_to_the_exposed_time_of_each_step(shared_traces: Path) -> None:
    from ddp_prof.errors import TraceError
    from ddp_prof.ingest.load import load_trace
    from tests.examples import IS_NIGHTLY
    from tests.night import kept_by_the_gate

    paths = sorted(path for path in shared_traces.iterdir() if path.name.endswith((".sqlite", ".gz")))
    for path in paths if IS_NIGHTLY else kept_by_the_gate(paths):
        try:
            trace = load_trace(path)
        except TraceError:  # of other programs
            continue
        found = collectives_of(trace)
        assert all(sum(part.ns for part in value.exposed_by) == value.exposed_ns for value in found), path
        for rank in measure_overlap(trace).ranks:
            for step in rank.steps:
                own = [
                    value
                    for value in found
                    if (value.process, value.device, value.step) == (rank.process, rank.device, step.step)
                ]
                if step.step is not None:
                    assert sum(summary.exposed_ns for summary in own) == (step.exposed_ns or 0), path


def test_of_the_eight_collectives_of_a_real_ddp_step_the_last_is_exposed(shared_traces: Path) -> None:
    from ddp_prof.ingest.load import load_trace

    found = collectives_of(load_trace(shared_traces / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite"))
    by_position = [[value for value in found if value.index == index] for index in range(8)]
    assert [len(item) for item in by_position] == [59] * 8
    last = sum(item.exposed_ns for item in by_position[-1])
    assert last == sum(value.when_ns("tail") for value in found) == pytest.approx(12.62e6, rel=1e-3)
    assert last > sum(value.exposed_ns for value in found) / 2


def test_our_own_variants_are_exposed_for_the_reasons_they_are_made_for(own_traces: list[Path]) -> None:
    from ddp_prof.analyze.root_cause import find_root_cause
    from ddp_prof.ingest.load import load_trace

    found = {}
    for path in own_traces:
        trace = load_trace(path)
        found[path.stem] = find_root_cause(results_of(trace))
    for name in ("naive", "flat"):
        cause = found[name]
        assert (cause.when, cause.why, cause.blocking) == ("tail", "blocking_call", "after_backward")
        assert cause.pair_ns == cause.exposed_ns
    for name, parameters in (("overlap", 1), ("bucketed_100mb", 39)):
        cause = found[name]
        assert cause.when == "tail"
        assert cause.is_last
        assert (cause.parameters[0], len(cause.parameters)) == ("embedding.weight", parameters)


def test_the_typical_step_reduces_gradients_where_others_only_broadcast() -> None:
    """As Lightning's broadcast, once a batch, where gradients are accumulated over three."""
    trace = draw_trace(
        ranges={
            "step 0": "####",
            "step 1": "....####",
            "step 2": "........##########",
            "backward": "..##..##..########",
        },
        launches={"main": "B.a.F.c.H.deD....."},
        streams={7: "..a...c...de......", 20: "B...F...H...DDDDDD"},
    )
    broadcast = {f"communication {letter}": "ncclDevKernel_Broadcast_RING_LL(x)" for letter in "BFH"}
    found = results_of(replace(trace, names=tuple(broadcast.get(name, name) for name in trace.names)))
    assert sorted(found.exposed_by_step.values()) == [1, 1, 7]
    assert found.exposed_by_step[found.typical_step] == 7
