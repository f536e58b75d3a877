"""The headline follows the typical step, and all its figures are that step's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given

import ddp_prof as dp
from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.analyze.root_cause import RootCause, explain_run, find_root_cause
from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.analyze.why_unknown import LOST_LAUNCHES
from ddp_prof.present.cause_headlines import root_cause_headline
from ddp_prof.present.headlines import gain_headline
from ddp_prof.trace import Trace
from tests.analyze.doctor.test_gpu_rules import diagnose
from tests.analyze.random_runs import runs
from tests.drawing import PID, draw_trace
from tests.examples import examples
from tests.ingest.test_kineto_json import event, write
from tests.measuring import analysis_of, results_of

PHASES = {
    "backward": "######......######......######..............",
    "step 0": "###########",
    "step 1": "............###########",
    "step 2": "........................####################",
}


def cause_of(trace: Trace) -> RootCause:
    cause = find_root_cause(results_of(trace))
    assert cause is not None
    return cause


def test_one_stalled_step_does_not_decide() -> None:
    """Two steps expose 2 within backward; the third 10 in its tail, more than both."""
    trace = draw_trace(
        ranges=PHASES,
        launches={"pt_autograd_0": "aMc.........bNd.........eO"},
        streams={7: ".aa..cc......bb..dd......ee.................", 9: "..MMM.........NNN..........OOOOOOOOOO......."},
    )
    cause = cause_of(trace)
    assert (cause.when, cause.exposed_ns, cause.pair_ns) == ("backward", 2, 2)
    assert (cause.total_exposed_ns, cause.steps) == (14, 3)


def test_where_launches_of_communication_are_lost_it_is_not_known_what_exposes_it() -> None:
    """Of the second step's two collectives one was told as its only one, and hiding it to gain no more than that one.

    Beside that stood that no step is known to have launched any.
    """
    trace = draw_trace(
        ranges={"step 0": "##########..........", "step 1": "..........##########"},
        launches={"main": "aB........cD........"},
        streams={7: ".aa........cc.......", 20: "...BBB.......DD.EEE."},
    )
    found = results_of(trace)
    assert found.reason is None
    assert found.why_no_cause == LOST_LAUNCHES
    (run,) = compare_variants([measure_overlap(trace)])
    assert gain_headline(run) == (
        "0 % of communication is hidden; what the rest costs per step is not known, because no step is known to have "
        "launched much of it."
    )
    headline = root_cause_headline(find_root_cause(found), found.why_no_cause, found.blocking).text
    assert (
        headline == "What exposes communication is not known: which calls launched communication in steps is not known."
    )
    told = {one.rule: one.reason for one in diagnose(trace).abstained}
    assert told["large last bucket"] == told["launch-bound host"] == LOST_LAUNCHES


def test_the_figure_of_a_step_shows_the_step_that_the_headline_is_about() -> None:
    """Most is communicated in step 2 and least in step 0, where most is exposed."""
    trace = draw_trace(
        ranges=PHASES,
        launches={"pt_autograd_0": "aM..........bN..........eO"},
        streams={7: ".aa..........bbbbb.......eeeeeeeee..........", 9: "...MMM........NNNNN.......OOOOOOOO.........."},
    )
    cause = cause_of(trace)
    assert (results_of(trace).typical_step, cause.step, cause.exposed_ns) == (1, 1, 1)


def test_of_two_steps_the_one_that_exposes_more_is_typical() -> None:
    trace = draw_trace(
        ranges={name: picture for name, picture in PHASES.items() if name != "step 2"},
        launches={"pt_autograd_0": "aM..........bN.........."},
        streams={7: ".aa..........bb.........", 9: "..MM..........NNNN......"},
    )
    cause = cause_of(trace)
    assert (cause.step, cause.exposed_ns) == (1, 3)


def test_of_a_receive_it_is_not_known_whether_it_waits_though_it_is_of_other_collectives() -> None:
    ranks = [
        draw_trace(
            ranges={"step 0": "#" * 24, "forward": "#" * 20},
            launches={"main": "aNMb"},
            streams={7: ".aaaaaa.........bb", 9: "..NNN", 10: "......MMMMMMMMMM"},
            ranks={PID: rank},
            path=f"rank{rank}",
        )
        for rank in range(2)
    ]
    names = [tuple("ncclDevKernel_SendRecv(x)" if "M" in name else name for name in one.names) for one in ranks]
    found = results_of(*(replace(one, names=own) for one, own in zip(ranks, names, strict=True)))
    assert {one.exposed_wait_ns for one in found.collectives} == {0, None}
    cause = find_root_cause(found)
    assert cause is not None
    assert "in transfer or waiting for a peer: all of that in" in root_cause_headline(cause).text


def test_the_lead_is_the_median_of_the_ranks() -> None:
    """The collective begins 1, 2 and 7 before the end of backward."""
    ranks = [
        draw_trace(
            ranges={"step 0": "#" * 24, "backward": "#" * 14},
            launches={"pt_autograd_0": "aM"},
            streams={7: "." + "a" * (10 + lead) + "." * 20, 9: "." * 11 + "M" * 12},
            ranks={PID: rank},
            path=f"rank{rank}",
        )
        for rank, lead in enumerate((1, 7, 2))
    ]
    cause = find_root_cause(results_of(*ranks))
    assert cause is not None
    assert cause.lead_ns == 2


def test_a_typical_step_that_hides_all_says_so() -> None:
    trace = draw_trace(
        ranges=PHASES,
        launches={"pt_autograd_0": "aM..........bN..........eO"},
        streams={7: ".aaaa........bbbb........ee.................", 9: "..MM..........NN...........OOOO............."},
    )
    cause = cause_of(trace)
    assert (cause.exposed_ns, cause.pair_ns, cause.total_exposed_ns) == (0, 0, 4)


def test_of_five_collectives_one_is_launched_after_backward() -> None:
    """As of two of 128 ranks, whose headline said that all five of a step start after backward."""
    trace = draw_trace(
        ranges={"step 0": "#" * 30, "forward": "#####.........", "backward": ".....#######"},
        launches={"main": "fM...bN.c...O."},
        streams={7: ".fff..bb..cc..................", 9: "..MM...NN.......OOOOOOOO......"},
    )
    cause = cause_of(trace)
    assert (cause.when, cause.why, cause.blocking) == ("tail", "blocking_call", "after_backward")
    assert (cause.alike_per_step, cause.collectives_per_step) == (1, 3)


def test_the_only_collective_of_a_step_is_queued_behind_no_other() -> None:
    """The host is 17 ms ahead, so the all-reduce of the step before runs after the launch; all waits for b."""
    trace = draw_trace(
        ranges={"step 0": "##", "step 1": "..##", "step 2": "....##"},
        launches={"main": "aMbNcO"},
        streams={
            7: "..aaaaaaaa.....bbbbbbbb.....cccccccc......",
            9: "..........MMMM.........NNNN.........OOOO..",
        },
        character_ns=1_000_000,
    )
    cause = cause_of(trace)
    assert (cause.why, cause.pair_ns) == ("late_input", cause.exposed_ns)
    assert "queued" not in root_cause_headline(cause).text


def test_the_length_of_the_typical_step_is_known_over_all_ranks() -> None:
    ranks = [
        draw_trace(
            ranges=PHASES,
            launches={"pt_autograd_0": "aM..........bN..........eO"},
            streams={
                7: ".aa..........bb..........ee.................",
                9: "...MMM........NN...........OOOO.............",
            },
            ranks={PID: rank},
            path=f"rank{rank}",
        )
        for rank in range(2)
    ]
    cause = explain_run(analysis_of(*ranks)).root_cause
    assert cause is not None
    assert (cause.step, cause.step_ns) == (1, 2 * 11)


def test_the_length_of_the_typical_step_is_the_devices_where_the_host_runs_ahead() -> None:
    """As long as the steps of the tables, not as the 4 ns in which the host asked for them."""
    trace = draw_trace(
        ranges={"step|index=0": "####", "step|index=1": "....####", "step|index=2": "........####"},
        launches={"main": "aM..bN..cO.."},
        streams={
            7: "....aaaaaa....bbbbbb....cccccc....",
            9: "..........MMMM......NNNN......OOOO",
        },
    )
    cause = explain_run(analysis_of(trace)).root_cause
    assert cause is not None
    assert cause.step_ns == 10


def test_without_launches_nothing_is_said_to_be_between_phases() -> None:
    """The capture was trimmed: steps are there, and no call that tells what belongs to them."""
    trace = draw_trace(ranges={"step 0": "#" * 12, "backward": "####"}, streams={7: ".aa.......", 9: "..NNNN...."})
    cause = find_root_cause(results_of(trace))
    assert cause is not None
    assert (cause.when, cause.why, cause.has_launch) == ("unknown", "transfer", False)
    assert "the phase is not known" in root_cause_headline(cause).text


def test_without_steps_no_step_is_said_to_stand_still() -> None:
    """The time of the whole capture was called that of a typical step."""
    found = results_of(draw_trace(launches={"main": "aNb"}, streams={7: "aaNNNNbb"}, character_ns=1_000_000))
    headline = root_cause_headline(find_root_cause(found), found.reason, found.blocking)
    assert headline.claim == "Work stood still for communication for 4.00 ms in all"


def test_the_second_message_of_a_bucket_is_told_from_the_first() -> None:
    """Of what came late: it is reduced after the first, so a hook could not have launched it sooner."""
    ranges = {
        "process|rank=0|world=2": "#" * 24,
        "step|index=0": "#" * 24,
        "backward": "#########",
        "synchronize": ".........##########",
        "all_reduce|bucket=0|bytes=8|params=1": "....#####",
        "all_reduce|bucket=1|bytes=8|params=1": ".......####",
        "all_reduce|bucket=1|bytes=4|params=1|late=1": "...........######",
    }
    cause = find_root_cause(results_of(draw_trace(ranges=ranges, ranks={PID: 0})))
    assert cause is not None
    assert (cause.why, cause.bucket, cause.bytes, cause.collective_ns) == ("blocking_call", 1, 4, 6)
    assert cause.follows_own_bucket
    del ranges["all_reduce|bucket=1|bytes=8|params=1"]
    alone = find_root_cause(results_of(draw_trace(ranges=ranges, ranks={PID: 0})))
    assert alone is not None
    assert not alone.follows_own_bucket


def test_collectives_without_buckets_do_not_follow_one_of_their_own() -> None:
    """A loop over ``all_reduce(parameter.grad)`` was told that a smaller last bucket would help; it has no buckets."""
    reduces = [("gloo:all_reduce", "........###........."), ("gloo:all_reduce", "............######..")]
    phases = [("process|rank=0|world=2", "#" * 20), ("step|index=0", "#" * 20), ("backward", "..#####.............")]
    cause = find_root_cause(results_of(draw_trace(ranges=[*phases, *reduces], ranks={PID: 0})))
    assert cause is not None
    assert (cause.why, cause.bucket, cause.index) == ("blocking_call", None, 1)
    assert not cause.follows_own_bucket
    assert "If gradient hooks launched them" in root_cause_headline(cause).text


def test_the_gather_of_a_bucket_is_not_taken_for_its_reduction() -> None:
    """Both carry bucket 0: the headline told the middle of both starts, after backward's end, as the reduction's."""
    trace = draw_trace(
        ranges={
            "process|rank=0|world=1|variant=sharded|backend=gloo|device=cpu": "#" * 30,
            "step|index=0": "#" * 30,
            "backward": "######........",
            "synchronize": "......####....",
            "reduce_scatter|bucket=0|bytes=8|params=1": ".....#####....",
            "optimizer": "..........##..",
            "all_gather|bucket=0|bytes=8|params=1": "...........###",
        },
        ranks={PID: 0},
        world_size=1,
    )
    cause = cause_of(trace)
    assert (cause.operation, cause.bucket, cause.last_bucket, cause.lead_ns) == ("reduce_scatter", 0, 0, 1)
    assert (cause.collectives_per_step, cause.same_operation_per_step, cause.is_last) == (2, 1, True)


def test_the_last_bucket_of_a_pass_is_the_last_though_another_network_follows() -> None:
    """As of a critic of three buckets, and of a generator of two, each with a backward of its own."""
    mib = 1 << 20
    reduces = [
        (f"all_reduce|bucket={bucket}|bytes={size * mib}|params=2", picture)
        for bucket, size, picture in [
            (0, 8, "....##.................................."),
            (1, 8, "......##................................"),
            (2, 9, "........########........................"),
            (0, 4, "........................##.............."),
            (1, 5, "..........................###..........."),
        ]
    ]
    phases = [
        ("forward", "##................###..................."),
        ("backward", "..#######............######.........."),
    ]
    waits = ("synchronize", ".........#######...........###..........")
    trace = draw_trace(
        ranges=[("process|rank=0|world=2", "#" * 40), ("step|index=0", "#" * 40), *phases, waits, *reduces],
        ranks={PID: 0},
    )
    cause = cause_of(trace)
    assert (cause.when, cause.bucket, cause.passes, cause.is_last) == ("tail", 2, 2, True)
    assert cause.smaller_bucket_mb == 4
    assert "the last bucket of its pass (9 MiB)" in root_cause_headline(cause).text
    only = replace(cause, gradients_per_pass=1)
    assert only.smaller_bucket_mb is None, "a network of one bucket has no smaller last one"


@pytest.mark.parametrize(
    ("other", "picture"),
    [
        ("all_reduce|bytes=4", "..............##...."),
        ("all_reduce|bytes=4000", "..............##...."),
        ("all_reduce|bytes=240", "........#..........."),
    ],
    ids=["a loss", "a metric", "a vote on unused parameters"],
)
def test_the_last_bucket_is_the_last_though_what_is_no_bucket_follows(other: str, picture: str) -> None:
    """'large last bucket' was not found, and a last bucket beside a loss was said to be one parameter."""
    mib = 1 << 20
    reduces = [
        (f"all_reduce|bucket=0|bytes={8 * mib}|params=2", "....##.............."),
        (f"all_reduce|bucket=1|bytes={9 * mib}|params=2", ".......#######......"),
        (other, picture),
    ]
    phases = [
        ("forward", "##.................."),
        ("backward", "..#######..........."),
        ("optimizer", "...........#........"),
    ]
    waits = ("synchronize", ".........##.#####...")
    trace = draw_trace(
        ranges=[("process|rank=0|world=2", "#" * 20), ("step|index=0", "#" * 20), *phases, waits, *reduces],
        ranks={PID: 0},
    )
    cause = cause_of(trace)
    assert (cause.when, cause.bucket, cause.exceeds_others, cause.smaller_bucket_mb) == ("tail", 1, False, 4)
    assert "A smaller last bucket would shorten it" in root_cause_headline(cause).text


@pytest.mark.parametrize(("first", "advice_mb"), [("all_reduce", 4), ("reduce_scatter", None)])
def test_shards_that_groups_of_ranks_reduce_are_no_buckets_of_ddp(first: str, advice_mb: int | None) -> None:
    """FSDP in groups (HSDP) scatters its gradients, then all-reduces the shards; it has no bucket_cap_mb."""
    mib = 1 << 20
    reduces = [
        (f"{first}|bucket=0|bytes={16 * mib}|params=2", "....##.............."),
        (f"all_reduce|bucket=0|bytes={8 * mib}|params=2", "......##............"),
        (f"{first}|bucket=1|bytes={16 * mib}|params=2", ".......#............"),
        (f"all_reduce|bucket=1|bytes={9 * mib}|params=2", "........########...."),
    ]
    phases = [("forward", "##.................."), ("backward", "..#######...........")]
    waits = ("synchronize", ".........#######....")
    trace = draw_trace(
        ranges=[("process|rank=0|world=2", "#" * 20), ("step|index=0", "#" * 20), *phases, waits, *reduces],
        ranks={PID: 0},
    )
    cause = cause_of(trace)
    assert (cause.when, cause.operation, cause.bucket, cause.is_last) == ("tail", "all_reduce", 1, True)
    assert cause.smaller_bucket_mb == advice_mb


@pytest.mark.slow
@examples(60, suppress_health_check=list(HealthCheck))
@given(runs())
def test_figures_are_of_one_step(traces: tuple[Trace, ...]) -> None:
    results = results_of(*traces)
    found, cause = results.collectives, find_root_cause(results)
    exposed: dict[int | None, int] = {}
    for collective in found:
        exposed[collective.step_key] = exposed.get(collective.step_key, 0) + collective.exposed_ns
    if cause is None:
        assert not sum(exposed.values())
        return
    assert 0 <= cause.collective_ns <= cause.pair_ns <= cause.exposed_ns <= cause.total_exposed_ns
    assert cause.wait_ns <= cause.exposed_ns
    assert 1 <= cause.alike_per_step <= cause.collectives_per_step
    assert 1 <= cause.same_operation_per_step <= cause.collectives_per_step
    values = [value for key, value in exposed.items() if key is not None] or list(exposed.values())
    assert cause.exposed_ns in values


def carries(launches: dict[str, str], streams: dict[int, str], *, inferred: bool = False) -> bool:
    """Whether what the headline is about is taken for a reduction of gradients; every collective is an all-reduce."""
    ranges = {"step 0": "#" * 30, "optimizer": "............##"}
    if not inferred:
        ranges |= {"forward": "####", "backward": "....#####"}
    trace = draw_trace(ranges=ranges, launches=launches, streams=streams)
    names = tuple(f"ncclDevKernel_AllReduce {name}" if "communication" in name else name for name in trace.names)
    cause = find_root_cause(results_of(replace(trace, names=names)))
    assert cause is not None
    assert cause.operation == "all_reduce"
    return cause.carries_gradients


COMPUTE = ".ff.bb.cc....................."


@pytest.mark.parametrize("inferred", [False, True], ids=["named", "inferred"])
def test_hooks_and_buckets_are_advised_only_for_what_may_carry_gradients(inferred: bool) -> None:
    """Without ranges of phases, each all-reduce of tensors in backward was one of gradients."""
    by_hooks = {"main": "f......", "pt_autograd_0": "....bMcN"}
    assert carries(by_hooks, {7: COMPUTE, 9: ".......MM.NNNNNNNN"}, inferred=inferred), "DDP"
    after = {"main": "f........MN", "pt_autograd_0": "....b.c"}
    assert carries(after, {7: COMPUTE, 9: "..........MM.NNNNNNNN"}, inferred=inferred), "naive"
    loss = {"main": "f.T.", "pt_autograd_0": "....bMcNOP"}
    assert carries(loss, {7: COMPUTE, 9: "...T...MM.NNNNNNNNOOPP"}, inferred=inferred), "a loss that is averaged before"
    norm = {"main": "f.........N", "pt_autograd_0": "....bMc"}
    assert not carries(norm, {7: COMPUTE, 9: ".......MM.....NNNNNNNN"}, inferred=inferred), (
        "the norm of gradients that hooks have reduced"
    )
    tensors = {"main": "fT.......", "pt_autograd_0": "....bMcN"}
    assert not carries(tensors, {7: COMPUTE, 9: "..T....MM.NNNNNNNN"}, inferred=inferred), (
        "tensor parallelism, in forward and backward"
    )


@pytest.mark.parametrize(("main", "follows"), [("aMbN......", True), ("aMb...N...", False)])
def test_what_was_launched_after_another_one_ended_did_not_wait_for_it(main: str, follows: bool) -> None:
    """Both start right behind the other one: the first was launched while that ran, the second was not."""
    trace = draw_trace(
        ranges={"step 0": "#" * 20, "backward": "#" * 5 + "." * 15},
        launches={"pt_autograd_0": main},
        streams={7: ".aabb...............", 9: "..MMM..NNNNNNNNN...."},
    )
    cause = cause_of(trace)
    assert (cause.index, cause.follows_another) == (1, follows)


def buckets_on_the_host(sizes: list[int], pictures: list[str], **phases: str) -> Trace:
    """A step of a rank whose host reduces buckets of these sizes; phases are those of the host."""
    reduces = [
        (f"all_reduce|bucket={bucket}|bytes={size}|params=2", picture)
        for bucket, (size, picture) in enumerate(zip(sizes, pictures, strict=True))
    ]
    whole = "#" * len(pictures[0])
    ranges = [("process|rank=0|world=2", whole), ("step|index=0", whole), *phases.items(), *reduces]
    return draw_trace(ranges=ranges, ranks={PID: 0})


@pytest.mark.parametrize(("sizes", "exceeds"), [([1, 9], False), ([1, 4, 9], True), ([1, 5, 9], False)])
def test_that_the_first_bucket_is_small_makes_no_other_one_large(sizes: list[int], exceeds: bool) -> None:
    pictures = ["....##..............", "......##............", "........########...."]
    phases = {
        "forward": "##..................",
        "backward": "..#######...........",
        "synchronize": ".........#######....",
    }
    pictures = [*pictures[: len(sizes) - 1], pictures[-1]]
    assert cause_of(buckets_on_the_host(sizes, pictures, **phases)).exceeds_others == exceeds


@pytest.mark.parametrize(("optimizer", "times"), [("." * 20, 2), ("........##..........", 1)])
def test_a_bucket_is_not_reduced_twice_where_an_optimizer_runs_in_between(optimizer: str, times: int) -> None:
    ranges = [
        ("process|rank=0|world=2", "#" * 20),
        ("step|index=0", "#" * 20),
        ("backward", "####......####......"),
        ("optimizer", optimizer),
        ("synchronize", "....####......######"),
        ("all_reduce|bucket=0|bytes=8|params=1", "..######............"),
        ("all_reduce|bucket=0|bytes=8|params=1", "............########"),
    ]
    assert cause_of(draw_trace(ranges=ranges, ranks={PID: 0})).times_per_step == times


def test_the_size_is_not_known_where_that_of_ranks_differs() -> None:
    ranks = [
        draw_trace(
            ranges={
                f"process|rank={rank}|world=2": "#" * 12,
                "step|index=0": "#" * 12,
                "backward": "####........",
                "synchronize": "....########",
                f"all_reduce|bytes={size}": "..##########",
            },
            ranks={PID: rank},
            path=f"rank{rank}",
        )
        for rank, size in enumerate((8, 12))
    ]
    cause = find_root_cause(results_of(*ranks))
    assert cause is not None
    assert (cause.ranks, cause.bytes) == (2, None)
    assert cause_of(ranks[1]).bytes == 12


def test_a_bucket_that_another_one_follows_is_not_the_last() -> None:
    trace = draw_trace(
        ranges={
            "process|rank=0|world=2": "#" * 12,
            "step|index=0": "#" * 12,
            "backward": "######......",
            "synchronize": "......######",
            "all_reduce|bucket=0|bytes=8|params=1": "....#######.",
            "all_reduce|bucket=1|bytes=8|params=1": ".........###",
        },
        ranks={PID: 0},
    )
    cause = cause_of(trace)
    assert (cause.bucket, cause.is_last) == (0, False)


@pytest.mark.parametrize(("world", "knows_wait"), [(2, True), (3, False)])
def test_a_rank_that_was_not_recorded_may_be_the_one_that_was_waited_for(world: int, knows_wait: bool) -> None:
    ranks = [
        draw_trace(
            ranges={"step 0": "#" * 24, "backward": "#" * 14},
            launches={"pt_autograd_0": "aM"},
            streams={7: "." + "a" * 10, 9: "." * 11 + "M" * 12},
            ranks={PID: rank},
            world_size=world,
            path=f"rank{rank}",
        )
        for rank in range(2)
    ]
    cause = find_root_cause(results_of(*ranks))
    assert cause is not None
    assert cause.knows_wait == knows_wait


def test_without_a_world_size_all_that_is_recorded_takes_part() -> None:
    """Unless one of the ranks lost its collectives, or a process all of its work: it may have arrived last."""

    def rank_of(rank: int, collective: str = "M" * 12) -> Trace:
        return draw_trace(
            ranges={"step 0": "#" * 24, "backward": "#" * 14},
            launches={"pt_autograd_0": "aM"},
            streams={7: "." + "a" * 10, 9: "." * 11 + collective},
            ranks={PID: rank},
            path=f"rank{rank}",
        )

    both = results_of(rank_of(0), rank_of(1))
    third = results_of(rank_of(0), rank_of(1), rank_of(2, ""))
    lost = replace(both, run=replace(both.run, unrecorded=1))
    causes = [find_root_cause(found) for found in (both, third, lost)]
    assert [cause is not None and cause.knows_wait for cause in causes] == [True, False, False]


@pytest.mark.parametrize(("world", "knows_wait"), [(1, True), (2, False), (None, False)])
def test_the_only_rank_of_a_job_waits_for_no_peer(world: int | None, knows_wait: bool) -> None:
    """'In transfer or waiting for a peer' was said of a job of one rank."""
    trace = draw_trace(
        ranges={"step 0": "#" * 24, "backward": "#" * 14},
        launches={"pt_autograd_0": "aM"},
        streams={7: "." + "a" * 10, 9: "." * 11 + "M" * 12},
        ranks={PID: 0},
        world_size=world,
    )
    assert cause_of(trace).knows_wait == knows_wait


def test_a_bucket_of_gloo_is_held_up_by_all_that_were_launched_before_it(tmp_path: Path) -> None:
    #  launches   012......................
    #  thread     .0000000111112222222222     while 0 and 1 run, of which 1 was taken up after the launch of 2
    events = [event("user_annotation", "step|index=0", "0", "1000"), event("user_annotation", "backward", "0", "950")]
    events += [event("cpu_op", "autograd::engine::evaluate_function: Mm", f"{9 * n}", "9") for n in range(9)]
    for launch, begin, end in ((20, 25, 305), (40, 305, 505), (60, 505, 920)):
        events.append(event("cpu_op", "c10d::allreduce_", f"{launch}", "1"))
        events.append(event("user_annotation", "gloo:all_reduce", f"{begin}", f"{end - begin}", tid=2))
    (run,) = dp.load_runs(write(tmp_path / "x.json", events))
    cause = run.root_cause()
    assert cause is not None
    assert (cause.index, cause.held_up_ns) == (2, 445_000)


def test_on_a_device_streams_tell_what_holds_a_collective_up() -> None:
    trace = draw_trace(
        ranges={"step 0": "#" * 24, "backward": "#" * 6},
        launches={"pt_autograd_0": "abMN"},
        streams={7: "aabb....................", 9: ".....MMMM...............", 10: "......NNNNNNNNNNNN......"},
    )
    cause = cause_of(trace)
    assert (cause.index, cause.held_up_ns) == (1, 0)


@pytest.mark.parametrize(("third_us", "said"), [(700, "earlier collectives run for 0.40 ms"), (310, "Smaller buckets")])
def test_what_gloo_takes_up_late_is_not_advised_to_be_launched_earlier(
    third_us: int, said: str, tmp_path: Path
) -> None:
    """Two threads of gloo, both at work until 700: the third bucket, launched at 305, is taken up then.

    ::

        backward   ########################
        thread 2     1111111111111111111111111
        thread 3      2222222222222222222222222333333333334
    """
    events = []
    for step in range(3):
        at = 1000 * step
        events += [
            event("user_annotation", f"step|index={step}", f"{at}", "1000"),
            event("user_annotation", "backward", f"{at}", "950"),
            *(event("cpu_op", "autograd::engine::evaluate_function: Mm", f"{at + 60 * n}", "60") for n in range(10)),
        ]
        for launch, begin, end, thread in (
            (20, 25, 705, 2),
            (40, 45, 700, 3),
            (305, third_us, 920, 3),
            (306, 921, 930, 2),
        ):
            events.append(event("cpu_op", "c10d::allreduce_", f"{at + launch}", "1"))
            events.append(event("user_annotation", "gloo:all_reduce", f"{at + begin}", f"{end - begin}", tid=thread))
    (run,) = dp.load_runs(write(tmp_path / "x.json", events))
    cause = run.root_cause()
    assert cause is not None
    assert said in root_cause_headline(cause).text
