"""What is said of a run's exposed time, and what to do about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_prof.analyze.collectives.alignment import Alignment
from ddp_prof.analyze.collectives.results import RunBlocking
from ddp_prof.analyze.collectives.skew import RankSkew, RunSkew, StepSkew
from ddp_prof.analyze.root_cause import RootCause
from ddp_prof.analyze.variants.comparison import VariantSummary
from ddp_prof.present.cause_headlines import cause_headline, cause_in_short, root_cause_headline
from ddp_prof.present.comparison_headlines import describe_changes
from ddp_prof.present.headlines import Headline, gain_headline
from ddp_prof.present.skew_headlines import skew_headline

MS = 1_000_000

TAIL = RootCause(
    step=3, steps=10, exposed_ns=100, total_exposed_ns=1000, when="tail", why="transfer", pair_ns=82, wait_ns=0,
    knows_wait=True, collectives_per_step=8, operation="all_reduce", blocking=None, alike_per_step=8,
    same_operation_per_step=8, bucket=7, last_bucket=7, index=7, is_last=True, follows_own_bucket=False,
    collective_ns=82, bytes=61 * 2**20, parameters=("embedding", "norm"), lead_ns=300_000,
    gradients_per_pass=8, ends_gradients=True,
)  # fmt: skip


def test_the_cause_of_what_is_not_known_is_not_that_compute_hides_it() -> None:
    assert cause_headline(None, "kernels have no ends", None) == "not known: kernels have no ends."
    assert cause_headline(None, None, None) == "Compute hides all communication."


def text_of(**change: object) -> str:
    return root_cause_headline(replace(TAIL, **change)).text


def test_the_headline_names_pair_bucket_size_parameters_and_time() -> None:
    assert text_of() == (
        "82 % of the typical step's exposed time is tail, in transfer: the last bucket (61 MiB, embedding, norm) "
        "starts 0.30 ms before backward ends. A smaller last bucket would shorten it."
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 1}, "82 % of exposed time is tail"),
        ({"parameters": ("embedding",)}, "It holds a single parameter"),
        ({"parameters": ("embedding", "norm", "head")}, "(61 MiB, embedding, norm and 1 more) starts"),
        ({"lead_ns": -2_000}, "starts 2.0 µs after backward ends"),
        (
            {"operation": "reduce_scatter", "collectives_per_step": 16, "bucket": 2, "is_last": False},
            "the reduce-scatter of bucket 2 (of 0 to 7, 61 MiB, embedding, norm) starts 0.30 ms before backward ends",
        ),
        ({"lead_ns": 0}, "starts when backward ends"),
        ({"passes": 3}, "starts 0.30 ms before its pass of backward ends. "),
        ({"passes": 3, "lead_passes": 2}, "starts 0.30 ms before its pass of backward ends (median of 2)"),
        ({"passes": 3, "lead_passes": 3, "lead_ns": 0}, "starts when its pass of backward ends (median of 3)"),
        ({"bucket": None, "bytes": None, "parameters": ()}, "the last collective starts"),
        ({"wait_ns": 2}, "is tail, in transfer: "),
        ({"wait_ns": 41}, "tail, in transfer (a peer was missing in 41 % of the exposed time): the last bucket"),
        ({"wait_ns": 41}, "A smaller last bucket"),
        ({"wait_ns": 51}, "'ddp-prof skew' shows whether the same rank is late each time."),
        ({"knows_wait": False}, "tail, in transfer or waiting for a peer"),
        ({"same_operation_per_step": 1, "gradients_per_pass": 1}, "Smaller buckets would start earlier"),
        ({"knows_wait": False}, "A smaller last bucket would shorten it, if it is transfer."),
        (
            {"parameters": (), "bytes": 97 * 2**20},
            "would shorten it: with DistributedDataParallel, bucket_cap_mb=48 divides it unless one parameter is most",
        ),
        ({"parameters": (), "operation": "reduce_scatter"}, "A smaller last bucket would shorten it."),
        ({"follows_another": True}, "smaller buckets would help only as far as the first bucket starts earlier; fewer"),
        # A last collective that gloo takes up 25.8 ms after backward is not late for its size.
        ({"held_up_ns": 26 * MS}, "Between its launch and its start earlier collectives run for 26.0 ms: fewer bytes"),
        ({"is_last": False, "bucket": 3}, "bucket 3 (of 0 to 7, 61 MiB, embedding, norm) starts"),
        # Of several models with a bucket each.
        ({"is_last": False, "bucket": 0, "last_bucket": 0}, "bucket 0 (61 MiB, embedding, norm) starts"),
        ({"ends_gradients": False, "bucket": 3}, "Smaller buckets would start earlier"),
        ({"bytes": 12 * 2**10}, "With so few bytes it is latency, which smaller buckets would not shorten."),
        ({"why": "queued"}, "It waits for earlier collectives on its stream: fewer bytes or a faster link would help."),
        (
            {"why": "queued", "are_many_and_small": True},
            "many and small: each costs its latency, so fewer, larger",
        ),
        ({"why": "queued", "knows_wait": False}, "or a faster link would help, if these transfer rather than wait."),
        # What it is queued behind may wait for a peer: of a late rank whose capture marks no steps, a link was advised.
        (
            {"why": "queued", "wait_ns": 37},
            "if these transfer rather than wait. 'ddp-prof skew' shows whether the same rank is late each time.",
        ),
        (
            {"parameters": ("embedding",), "knows_wait": False},
            "or a faster link would hide more of it, if it is transfer.",
        ),
        ({"bytes": 12 * 2**10, "knows_wait": False}, "With so few bytes it is latency or waiting, which smaller"),
        ({"why": "launched_late"}, "tail, launched late by the host"),
        (
            {"why": "blocking_call", "blocking": "after_backward"},
            "tail, in collectives launched after backward: these are all 8 collectives of a step.",
        ),
        (
            {"why": "blocking_call", "blocking": "after_backward", "collectives_per_step": 1, "alike_per_step": 1},
            "this is the only collective of a step. If gradient hooks launched it in several buckets, backward could",
        ),
        ({"why": "peer_wait", "when": "backward", "collective_ns": 41}, "waiting for a peer: 50 % of that in the"),
        ({"why": "peer_wait", "wait_ns": 82}, "'ddp-prof skew' shows whether the same rank is late each time."),
        (
            {"why": "late_input", "when": "forward"},
            "held up by late input: all of that in the last bucket (61 MiB, embedding, norm). Its input ended",
        ),
        (
            {"when": "outside", "collectives_per_step": 1, "same_operation_per_step": 1, "bucket": None},
            "outside of named phases, in transfer: it is that of the only collective (61 MiB, embedding, norm).",
        ),
        (
            {"when": "forward", "operation": "broadcast", "same_operation_per_step": 1, "bucket": None},
            "during forward, in transfer: all of that in the only broadcast (61 MiB, embedding, norm).",
        ),
        ({"why": "queued", "when": "backward", "is_last": False, "bucket": 3}, "of that in bucket 3 (of 0 to 7, "),
        ({"when": "unknown"}, "see the notes, --step-range and --backward-range"),
    ],
)
def test_the_headline_says_what_to_do(change: dict[str, object], words: str) -> None:
    assert words in text_of(**change)


def test_of_what_is_hardly_a_part_of_the_step_nothing_is_advised() -> None:
    """As of a U-Net: 0.22 ms of a step of 29.8 ms."""
    advice = "A smaller last bucket"
    assert advice in text_of(pair_ns=1_000, exposed_ns=1_100, step_ns=100_000)
    text = text_of(pair_ns=740, exposed_ns=1_100, step_ns=100_000)
    assert advice not in text
    assert text.endswith("That is 0.7 % of the step.")


def test_of_a_transfer_in_backward_it_is_only_said_that_no_compute_ran() -> None:
    assert text_of(when="backward").endswith(" No compute ran meanwhile.")
    text, advice = cause_in_short(replace(TAIL, when="backward"), None, None)
    assert (text.endswith(" No compute ran meanwhile."), advice) == (True, ""), "it stood there as the change to make"
    assert cause_in_short(TAIL, None, None)[1] == "A smaller last bucket would shorten it."


def test_a_collective_on_the_stream_of_compute_is_not_said_to_follow_backward() -> None:
    """As of a vLLM capture, which has no backward."""
    text = text_of(when="unknown", why="blocking_call", blocking="compute_stream", lead_ns=None)
    assert "on the stream of compute" in text
    assert "backward" not in text


def test_only_as_many_are_said_to_be_launched_after_backward_as_are() -> None:
    """As of two of 128 ranks: five sends and receives a step, of which the last is launched after backward."""
    change = {"operation": "send_recv", "bucket": None, "why": "blocking_call", "blocking": "after_backward"}
    text = text_of(**change, collectives_per_step=5, alike_per_step=1, carries_gradients=False)
    assert text.endswith("is tail, in collectives launched after backward: this is 1 of 5 collectives of a step.")


def test_a_collective_that_holds_little_is_not_named() -> None:
    """As of 74 all-reduces, of which the largest holds a tenth."""
    text = text_of(when="unknown", why="blocking_call", blocking="compute_stream", collective_ns=8)
    assert "spread over 8 collectives, with at most 10 % in one" in text


def test_no_advice_about_buckets_for_what_carries_no_gradients() -> None:
    """All-to-alls of experts and gathers of parameters are no buckets of gradients."""
    assert "bucket" not in text_of(operation="all_to_all", bucket=None, parameters=(), carries_gradients=False)
    assert "hooks" not in text_of(carries_gradients=False, why="blocking_call", blocking="after_backward")


def test_hooks_are_no_advice_for_the_second_message_of_a_bucket() -> None:
    """As of what came to a bucket late, which is reduced after all buckets."""
    change = {"why": "blocking_call", "blocking": "after_backward"}
    assert "hooks" in text_of(**change)
    assert "hooks" not in text_of(**change, follows_own_bucket=True)


def test_a_bucket_that_is_reduced_in_each_pass_of_a_step_is_said_to_be() -> None:
    """As of four passes whose gradients are accumulated without no_sync, of which the last one was blamed."""
    change = {"when": "outside", "times_per_step": 4}
    assert text_of(**change).endswith(
        " The step reduces this bucket 4 times: if it accumulates gradients, no_sync() in all passes but the last "
        "leaves the others out."
    )
    assert text_of(**change, bucket=None).endswith(
        " The 4 passes of backward of the step reduce the same sizes: if the step accumulates gradients, no_sync() in "
        "all passes but the last leaves the others out."
    )


def test_where_the_typical_step_hides_all_nothing_is_advised() -> None:
    """As where one step of 59 holds all exposed time."""
    assert text_of(exposed_ns=0, pair_ns=0, total_exposed_ns=39_900_000) == (
        "Compute hides all communication of the typical step; other steps expose 39.9 ms in all."
    )


def test_nothing_exposed_and_nothing_at_all_are_told_apart() -> None:
    assert root_cause_headline(None).text == "Compute hides all communication."
    unknown = root_cause_headline(replace(TAIL, exposed_ns=0), "CUDA graphs were recorded whole")
    assert unknown.text == "Whether communication is exposed is not known: CUDA graphs were recorded whole."


@pytest.mark.parametrize("change", [{}, {"wait_ns": 41}, {"why": "blocking_call"}, {"why": "late_input"}])
def test_the_claim_can_stand_alone(change: dict[str, object]) -> None:
    headline = root_cause_headline(replace(TAIL, **change))
    assert headline.claim.startswith("82 % of the typical step's exposed time is ")
    assert headline.claim[-1] not in ".,:"
    assert len(headline.claim) < 120
    assert headline.text == headline.claim + headline.joint + headline.detail


def test_a_claim_without_detail_ends_as_a_sentence() -> None:
    assert Headline("Nothing was found").text == "Nothing was found."


def summary(
    label: str, speedup: float | None, ratio: float | None, comm_ms: float, device: str = "cuda"
) -> VariantSummary:
    times = dict.fromkeys(("step_spread_ns", "overlapped_ns", "exposed_ns", "tail_ns", "backward_overlap_ratio"))
    return VariantSummary(
        label=label, device=device, ranks=2, steps=10, step_ns=1e8, collectives=1, comm_ns=comm_ms * 1e6,
        overlap_ratio=ratio, speedup=speedup, supported=None if speedup in (None, 1) else True, **times,
    )  # fmt: skip


def test_the_story_reconciles_the_share_hidden_with_the_time_saved() -> None:
    naive, flat = summary("naive", 1, 0, 85), summary("flat", 2, 0, 34)
    overlap = summary("overlap", 1.25, 0.67, 96)
    runs = [replace(naive, exposed_ns=84_000_000), overlap, replace(flat, exposed_ns=33_000_000)]
    assert " ".join(describe_changes(runs)) == (
        "In these captures overlap hides most, 67 % of its communication; its median step is 20 % shorter than that of "
        "naive. flat is fastest: its median step is 50 % shorter, and it hides 0 %. It communicates for 34.0 ms of a "
        "step, naive for 85.0 ms; 33.0 ms and 84.0 ms of that are exposed."
    )


def test_a_share_that_one_of_two_runs_does_not_know_is_not_compared() -> None:
    naive, flat = replace(summary("naive", 1, 0, 85), exposed_ns=84_000_000), summary("flat", 2, 0, 34)
    (_, said) = describe_changes([naive, summary("overlap", 1.25, 0.67, 96), flat])
    assert said.endswith("It communicates for 34.0 ms of a step, naive for 85.0 ms.")


def test_no_run_is_fastest_where_another_is_as_fast() -> None:
    runs = [summary("naive", 1, 0, 85), summary("overlap", 1.1, 0.67, 96), summary("flat", 1.34, 0, 34)]
    runs += [replace(summary("torch", 1.33, 0.4, 50), step_ns=101_000_000), summary("fsdp", 0.5, 0, 50)]
    runs[2:] = [replace(run, find_step_half_width=lambda: 1_000_000) for run in runs[2:4]] + runs[4:]
    assert describe_changes(runs)[1] == (
        "flat has the shortest median step, 25 % shorter, and it hides 0 %, but is not clearly faster than torch."
    )


def test_what_few_steps_communicate_is_not_told_as_that_of_each_step() -> None:
    """As where gradients are accumulated: the median is of the steps that communicate."""
    flat = replace(summary("flat", 2, 0, 34), communicating_steps=2)
    told = " ".join(describe_changes([summary("naive", 1, 0, 85), summary("overlap", 1.25, 0.67, 96), flat]))
    assert "It communicates for 34.0 ms of a step that communicates, naive for 85.0 ms." in told


def test_the_story_is_told_against_the_baseline_and_not_against_what_is_as_fast() -> None:
    (told,) = describe_changes([summary("flat", 1, 0.5, 34), summary("naive", 1, 0, 85)])
    assert (
        told
        == "In these captures flat hides most, 50 % of its communication; its median step is as long as that of naive."
    )


def test_the_story_of_one_winner_is_short_and_says_that_cpu_ranks_share_cores() -> None:
    first, second = describe_changes([summary("naive", 1, 0, 85, "cpu"), summary("overlap", 0.8, 0.67, 96, "cpu")])
    assert first.startswith(
        "In these captures overlap hides most, 67 % of its communication; its median step is 25 % longer than that"
    )
    assert "fastest" not in first
    assert "ranks share cores" in second


def test_a_run_is_fastest_only_where_that_is_supported() -> None:
    """Two captures one after another: the machine was three times as fast in the second."""
    naive, overlap = summary("naive", 1, 0, 85), replace(summary("overlap", 1.25, 0.67, 96), supported=False)
    flat = replace(summary("flat", None, 0, 34), supported=False, confounded_by="compute")
    few = describe_changes([naive, replace(overlap, supported=None)])
    assert few[0].endswith("20 % shorter than that of naive, which so few steps do not show to be more than chance.")
    slowed = replace(flat, confounded_by="compute beside communication")
    assert describe_changes([naive, overlap, slowed])[1].endswith(
        "is longer compute, by a busier machine or by the communication beside it."
    )
    assert describe_changes([naive, overlap, flat]) == [
        (
            "In these captures overlap hides most, 67 % of its communication; its median step is not clearly different "
            "from that of naive."
        ),
        (
            "No speed-up of flat is reported: most of the difference from naive is compute, which no variant changes, "
            "as on a machine that was busier."
        ),
    ]


@pytest.mark.parametrize("runs", [[], [summary("a", None, 0.5, 1)], [summary("naive", 1, 0, 1)]])
def test_without_anything_to_compare_there_is_no_story(runs: list[VariantSummary]) -> None:
    assert describe_changes(runs) == []


def test_runs_that_hide_as_much_as_can_be_shown_share_the_praise() -> None:
    runs = [summary("naive", 1, 0, 85), summary("a", 1.1, 0.669, 85), summary("b", 1.1, 0.671, 85)]
    assert describe_changes(runs)[0].startswith(
        "In these captures b hides most, 67 % of its communication (a hides as much); "
    )
    runs.append(summary("c", 1.1, 0.67, 85))
    assert describe_changes(runs)[0].startswith(
        "In these captures b hides most, 67 % of its communication (a and c hide as much); "
    )


def test_a_run_that_hides_no_more_than_the_baseline_is_not_said_to_hide_most() -> None:
    runs = [summary("naive", 1, 0, 85), summary("flat", 2, 0, 34)]
    assert " ".join(describe_changes(runs)) == (
        "No run hides more of its communication than naive, which hides 0 %. flat is fastest: its median step is 50 % "
        "shorter, and it hides 0 %. It communicates for 34.0 ms of a step, naive for 85.0 ms."
    )
    unknown = [replace(runs[0], overlap_ratio=None), runs[1]]
    assert "hides most" not in " ".join(describe_changes(unknown))
    slower = describe_changes([summary("naive", 1, 0.3, 85), summary("flat", 0.9, 0.1, 34)])
    assert slower == ["No run hides more of its communication than naive, which hides 30 %."]


def test_what_the_fastest_run_hides_is_left_out_where_it_is_not_known() -> None:
    graph = replace(summary("graph", 2, 0, 34), overlap_ratio=None, comm_ns=None)
    runs = [summary("naive", 1, 0, 85), summary("overlap", 1.25, 0.67, 96), graph]
    assert describe_changes(runs)[1] == "graph is fastest: its median step is 50 % shorter."


@pytest.mark.parametrize(
    ("last_steps", "said"),
    [
        ([0, 0], "No rank is late by more than the clocks' residual."),
        ([0, 2], "Rank 1 arrives last in 2 of 10 steps, by 3.00 ms (median); so few steps do not exclude chance."),
        ([3, 5], "No rank is last more often than chance explains; rank 1 is last most often, in 5 of 10 steps."),
        (
            [5, 5],
            "No rank is last more often than chance explains; each of the 2 ranks is last in 5 of 10 steps.",
        ),
        (
            [4, 4, 2],
            "No rank is last more often than chance explains; 2 ranks are last most often, each in 4 of 10 steps.",
        ),
    ],
)
def test_the_rank_that_is_last_most_often_is_named_where_it_is_one(last_steps: list[int], said: str) -> None:
    assert skew_headline(skew_of(last_steps, cost_ns=0)).text == said


def test_what_ranks_cost_that_are_late_in_turns_is_told() -> None:
    """'No rank is last more often than chance explains' was all that was said where 0.60 of 2.11 ms went that way."""
    costs = "Without the lag of its last rank, a step would be up to 0.60 ms shorter (mean of all steps)."
    assert skew_headline(skew_of([5, 5], cost_ns=600_000)).text.endswith(f"is last in 5 of 10 steps. {costs}")
    assert skew_headline(skew_of([5, 5], cost_ns=None)).text.endswith("is last in 5 of 10 steps.")


def skew_of(last_steps: list[int], cost_ns: int | None) -> RunSkew:
    rank = RankSkew(
        rank=0, process=1, device=None, collectives=10, last_collectives=0, last_steps=0, lag_ns=0, worst_lag_ns=0,
        exposed_wait_ns=0, cost_ns=0, lag_when_last_ns=3_000_000,
    )  # fmt: skip
    ranks = tuple(replace(rank, rank=number, last_steps=count) for number, count in enumerate(last_steps))
    steps = (StepSkew(step=0, lags_ns=(0, 0), last=None, cost_ns=cost_ns),) * 10
    return RunSkew(ranks, steps, None, Alignment("one clock", 0, 0, (), ()), None, ())


NOTHING_BLOCKED = RunBlocking(
    typical_ns=0, total_ns=0, steps=59, blocked_steps=0, collectives=472, needed=472, least_slack_ns=605_183
)


def test_where_nothing_waited_it_says_that_hiding_gains_nothing_and_why() -> None:
    text = root_cause_headline(replace(TAIL, total_exposed_ns=21_800_000), None, NOTHING_BLOCKED).text
    assert text == (
        "Nothing waited for communication: each of 472 collectives ended at least 0.61 ms before what needs it could "
        "begin, so hiding the 21.8 ms that are exposed in all would gain nothing."
    )
    assert cause_headline(TAIL, None, NOTHING_BLOCKED).startswith("none that costs time: each of 472 collectives ended")


def test_collectives_that_nothing_needs_are_not_said_to_have_slack() -> None:
    text = root_cause_headline(None, None, replace(NOTHING_BLOCKED, needed=0, least_slack_ns=None)).text
    assert text == "Nothing waited for communication: nothing is known to need a collective."


def test_a_run_in_which_few_steps_stood_still_says_in_how_many() -> None:
    blocking = replace(NOTHING_BLOCKED, total_ns=2_000_000, blocked_steps=3, least_slack_ns=None)
    assert root_cause_headline(TAIL, None, blocking).text == (
        "Nothing waits for communication in a typical step: 3 of 59 steps stood still for it, for 2.00 ms in all."
    )


def test_what_blocks_comes_before_what_is_exposed() -> None:
    blocking = replace(NOTHING_BLOCKED, typical_ns=4_000_000, total_ns=9_000_000, blocked_steps=59, least_slack_ns=None)
    headline = root_cause_headline(TAIL, None, blocking)
    assert headline.claim == "A typical step stands still for communication for 4.00 ms"
    assert headline.detail == root_cause_headline(TAIL).text
    beside = root_cause_headline(TAIL, None, replace(blocking, exceeds_exposed=True)).claim
    assert beside == "A stream of a typical step stands still for communication for 4.00 ms"


@pytest.mark.parametrize(
    ("limit_ns", "gain", "end"),
    [
        (None, 0.2, "(20 %) is exposed, so hiding all of it would gain at most 20 % of a typical step."),
        (20 * MS, 0.2, "(20 %) is exposed, so hiding all of it would gain at most 20 % of a typical step."),
        (2 * MS, 0.02, "but it delays other work by at most 2.00 ms, so hiding all of it ... 2.0 % of a typical step."),
        (30 * MS, 0.2, "(20 %) is exposed, so hiding all of it would gain at most 20 % of a typical step."),
        (0, 0.0, "but nothing waits for it in a typical step: hiding all of it would gain nothing there."),
    ],
)
def test_the_limit_of_blocking_bounds_the_gain(limit_ns: int | None, gain: float, end: str) -> None:
    run = replace(
        summary("job", None, 0.5, 20),
        steps=3,
        communicating_steps=3,
        communicating_step_ns=100 * MS,
        exposed_ns=20 * MS,
        blocking_at_most_ns=limit_ns,
    )
    assert run.gain_at_most == gain
    assert gain_headline(run).endswith(end.replace("...", "would gain at most"))
    assert replace(run, blocking_ns=MS).gain_at_most == 0.01
    assert replace(run, blocking_ns=MS, host_waits_usually=True).gain_at_most == max(gain, 0.01)
    assert "is exposed, and the host waits for it, so hiding" in gain_headline(replace(run, host_waits_usually=True))
    both = replace(run, blocking_ns=30 * MS, host_waits_usually=True)  # a stream waits while another one computes
    assert both.gain_at_most == 0.3
    assert "a stream stands still for communication for 30.0 ms, and the host waits for it, so" in gain_headline(both)
    tiny = replace(run, blocking_ns=2_500)  # 0.0025 %
    assert "gain at most 0.1 % of" in gain_headline(tiny), "a limit is not rounded down to 0.0 %"
    beside = replace(both, hideable_ns=25 * MS)
    assert (beside.gain_at_most, replace(beside, host_waits_usually=False).gain_at_most) == (0.25, 0.25)


def test_a_rank_without_others_does_not_hide_what_it_sends_to_nobody() -> None:
    """'40 % of communication is hidden' was said of the collectives of a job of one rank."""
    run = replace(summary("job", None, 0.4, 20), communicating_steps=10, communicating_step_ns=100 * MS)
    text = gain_headline(replace(run, ranks=1, world_size=1, exposed_ns=20 * MS))
    assert text.startswith(
        "The only rank of its job sends nothing to another one; 20.0 ms of a 100.0 ms step (20 %) is exposed time of "
        "its collectives, so hiding all of it would gain at most 20 %"
    )
