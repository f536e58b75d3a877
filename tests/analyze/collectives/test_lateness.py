"""A late rank costs what the step would be shorter without its lag: waits cause queues, and the last one gets both."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_prof import load_runs
from ddp_prof.analyze import doctor
from ddp_prof.analyze.collectives.arrivals import _nearly_as_late
from ddp_prof.analyze.collectives.late_by_chance import find_late_together
from ddp_prof.analyze.collectives.lateness import Queue, _within_steps
from ddp_prof.analyze.critical.what_if import WhatIf
from ddp_prof.present.cause_headlines import root_cause_headline
from ddp_prof.present.skew_headlines import skew_headline
from ddp_prof.present.tables.skew import skew_view
from ddp_prof.runs.run import Run
from ddp_prof.trace import UNKNOWN
from tests.kineto_factory import event, write_kineto
from tests.nsys_factory import NCCL, Capture, Kernel, Range, Sync, write_capture

MS = 1_000_000
RANKS, BUCKETS, STEPS, LATE = 4, 4, 6, 2
FORWARD, BUCKET, TRANSFER, OPTIMIZER = 20, 10, 8, 4


TURNS = {1: [(0,), (1,), (2,), (3,), (0,), (1,)], 2: [(0, 1), (2, 3), (0, 2), (1, 3), (0, 3), (1, 2)]}


def job(
    late_ms: int,
    transfer_ms: int = TRANSFER,
    *,
    begins_late: bool = False,
    late_ranks: Collection[int] = (LATE,),
    in_turns: int = 0,
    also_late_ms: Mapping[int, int] | None = None,
) -> Capture:
    """Each late rank is late by so much in each step, in its forward, or because it begins the step so much later.

    If ranks are late in turns, one of all ranks, or two, are in each step. Other ranks may also be late, by less.

    ms        0          20        30        40        50        60       68
    compute   ffffffffff b0        b1        b2        b3                 oo
    bucket               .........|0000000   1111111   2222222   3333333|
    """
    capture = Capture(threads={(100 + rank, 131): "pt_autograd_0" for rank in range(RANKS)})
    length = FORWARD + BUCKETS * max(BUCKET, transfer_ms) + BUCKET + transfer_ms + OPTIMIZER + late_ms + 1
    for rank in range(RANKS):
        process = 100 + rank
        whole = f"process|rank={rank}|world={RANKS}|variant=bucketed|backend=nccl|device=cuda"
        capture.ranges.append(Range(whole, 0, STEPS * length * MS, process, process, "ddp_prof"))

        def run(
            name: str, start: float, end: float, launch: float, thread: int, stream: int = 7, process: int = process
        ) -> None:
            at = (round(time * MS) for time in (start, end, launch))
            capture.kernels.append(Kernel(name, *at, thread, process, stream))

        for step in range(STEPS):
            begin = step * length + 0.1
            late = (
                late_ms
                if rank in (TURNS[in_turns][step] if in_turns else late_ranks)
                else (also_late_ms or {}).get(rank, 0)
            )
            own = begin + (late if begins_late else 0)
            step_end = round((step + 1) * length * MS)
            capture.ranges.append(Range(f"step|index={step}", round(own * MS), step_end, process, process, "ddp_prof"))
            ready = begin + FORWARD + late
            last_ready, end = begin + FORWARD + late_ms, 0.0
            backward = Range("backward", round((own + 0.2) * MS), round((own + 0.9) * MS), process, process, "ddp_prof")
            capture.ranges.append(backward)
            run("gemm_forward", own, ready, own, process)
            for bucket in range(BUCKETS):
                launch, free = own + 0.3 + 0.1 * bucket, end
                run("gemm_backward", ready, ready + BUCKET, launch, 131)
                ready, last_ready = ready + BUCKET, last_ready + BUCKET
                end = max(last_ready, end) + transfer_ms
                run(NCCL, max(ready, free), end, launch + 0.05, 131, 20)
            run("adam", end, end + OPTIMIZER, own + 1, process)
    return capture


def told(capture: Capture, tmp_path: Path) -> tuple[str, float | None, str, float | None]:
    """The sentence of the skew, what the doctor says a straggler costs, the cause, and the cost in the skew, in ms."""
    path = tmp_path / f"{len([*tmp_path.iterdir()])}.sqlite"
    (run,) = load_runs(write_capture(path, capture))
    skew = run.skew()
    (finding,) = [one for one in run.doctor().findings if one.rule == "straggler"] or [None]
    cost = skew.ranks[LATE].cost_when_last_ns
    return (
        skew_headline(skew).text,
        finding and (finding.cost_ns or 0) / MS,
        root_cause_headline(run.root_cause()).text,
        None if cost is None else cost / MS,
    )


def test_ranks_of_a_late_node_cost_what_is_gained_without_the_lag_of_all(tmp_path: Path) -> None:
    """Without the lag of one of them nothing is gained: 'compute hides all of the others' waiting' was said."""
    said, cost, _, _ = told(job(16, late_ranks=(1, 2)), tmp_path)
    alone, cost_alone, _, _ = told(job(16), tmp_path)
    assert said.startswith("Ranks 1-2 arrive last together in 6 of 6 steps, by 16.0 ms (median); such a step would")
    assert alone.startswith("Rank 2 arrives last in 6 of 6 steps, by 16.0 ms (median); such a step would be")
    assert cost == cost_alone == 16
    (run,) = load_runs(write_capture(tmp_path / "node.sqlite", job(16, late_ranks=(1, 2))))
    (finding,) = [one for one in run.doctor().findings if one.rule == "straggler"]
    assert finding.ranks == ("rank 1", "rank 2")
    assert finding.evidence.startswith("Ranks 1-2 arrive last together in 6 of 6 steps, by 16.0 ms (median); that")
    document = skew_view(run.analysis(), run.skew()).document
    assert document["group"] == {"ranks": [1, 2], "steps": 6, "lag_ns": 16 * MS, "cost_ns": 16 * MS}
    assert document["doubt"] is None


@pytest.mark.parametrize(
    ("by_ms", "said", "gain_ms"),
    [
        (
            11,
            "Ranks 1-2 arrive last together in 6 of 6 steps, by 13.5 ms (median); such a step would be up to 16.0",
            16,
        ),
        (6, "Rank 2 arrives last in 6 of 6 steps, by 16.0 ms (median); such a step would be up to 10.0", 10),
    ],
)
def test_the_ranks_of_a_node_may_be_late_by_graded_lags(tmp_path: Path, by_ms: int, said: str, gain_ms: int) -> None:
    """Rank 1 is late by less than rank 2: rank 2 alone was named, whose lag costs 5 of the 16 ms."""
    found, cost, _, _ = told(job(16, also_late_ms={1: by_ms}), tmp_path)
    assert found.startswith(said)
    assert cost == gain_ms


def late_once_a_step(*late_ms: int) -> Capture:
    """Ranks that are late by these times at the only collective of each step, as of a flat buffer."""
    capture = Capture()
    for rank, late in enumerate(late_ms):
        process = 100 + rank
        for begin in range(0, STEPS * 100, 100):
            ready, last = begin + 20 + late, begin + 20 + max(late_ms)
            capture.ranges.append(Range(f"step {begin // 100}", begin * MS, (begin + 100) * MS, process, process))
            for name, start, end, stream in (("gemm", begin + 1, ready, 7), (NCCL, ready, last + 9, 20)):
                capture.kernels.append(Kernel(name, start * MS, end * MS, begin * MS, process, process, stream))
    return capture


@pytest.mark.parametrize(
    ("late_ms", "said"),
    [
        ((0, 10, 20, 30), "Process 103 arrives last in 6 of 6 steps, by 20.0 ms (median); "),
        ((0, 5, 10, 15, 20, 25), "Process 105 arrives last in 6 of 6 steps, by 15.0 ms (median); "),
        ((0, 10, 20, 30, 40), "Process 104 arrives last in 6 of 6 steps, by 25.0 ms (median); "),
        ((0, 0, 11, 16), "Process 102, process 103 arrive last together in 6 of 6 steps, by 13.5 ms (median); "),
    ],
)
def test_ranks_that_are_late_by_more_and_more_do_not_arrive_last_together(
    tmp_path: Path, late_ms: tuple[int, ...], said: str
) -> None:
    """Half of an even number did, as lags count from the median of the others."""
    found, *_ = told(late_once_a_step(*late_ms), tmp_path)
    assert found.startswith(said)


@pytest.mark.parametrize(
    ("late", "said"),
    [
        ({"late_ranks": (1, 2)}, r"\(ranks 1-2 are late: .* shows how late ranks 1-2 are in other steps\."),
        ({"in_turns": 1}, r"\(rank \d is late in this step: .* shows who is late in other steps\."),
    ],
    ids=["together", "in turns"],
)
def test_what_queues_behind_waits_for_late_ranks_is_not_said_to_need_a_faster_link(
    tmp_path: Path, late: dict[str, Any], said: str
) -> None:
    """As of one late rank: without the lag of these, a step is 16 ms shorter, and nothing queues."""
    _, _, cause, _ = told(job(16, **late), tmp_path)
    assert "queued behind another collective" in cause
    assert "late: without that, and what queued behind it, the step is 16.0 ms shorter)" in cause.replace(
        " in this step", ""
    )
    assert re.search(said, cause)
    assert "faster link" not in cause


@pytest.mark.parametrize(("late_ms", "at_once"), [(16, 1), (2, 1), (16, 2)])
def test_ranks_that_are_late_in_turns_cost_each_step_what_its_last_ones_are_late(
    tmp_path: Path, late_ms: int, at_once: int
) -> None:
    """Each step of 89 ms is 16 ms shorter without that: the doctor found nothing, and the cause was the link."""
    (run,) = load_runs(write_capture(tmp_path / "turns.sqlite", job(late_ms, in_turns=at_once)))
    found = [one for one in run.doctor().findings if one.rule == "straggler"]
    if late_ms == 2:
        assert not found, "2 ms of 75 are jitter"
        return
    (finding,) = found
    who = "one of them arrives" if at_once == 1 else "some of them arrive"
    assert (finding.ranks, finding.cost_ns, finding.expected_gain_ns) == ((), 16 * MS, 16 * MS)
    assert finding.evidence.startswith(f"Ranks are late in turns: in 6 of 6 steps {who} last, by 16.0 ms (median)")
    told = "its late ranks, a step would be up to 16.0 ms shorter, or more if communication slows compute (mean of all"
    assert told in skew_headline(run.skew()).text, "compute hides a part of the waiting"


def test_where_too_many_choices_of_ranks_are_late_the_gain_is_what_they_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each choice would take a replay of all ranks: 200 of them for 200 steps."""
    replayed: list[object] = []
    replay = WhatIf.without_lag
    monkeypatch.setattr(WhatIf, "without_lag", lambda *given: replayed.append(given) or replay(*given))
    for most, replays in ((4, 1), (3, 0)):
        replayed.clear()
        monkeypatch.setattr("ddp_prof.analyze.doctor.gains._MOST_REPLAYS", most)
        (run,) = load_runs(write_capture(tmp_path / f"{most}.sqlite", job(16, in_turns=1)))
        (finding,) = [one for one in run.doctor().findings if one.rule == "straggler"]
        assert (finding.expected_gain_ns, len(replayed)) == (16 * MS, replays), "one of four ranks in each step"


def late_in_steps(*of_steps: Collection[int], ranks: int = 8) -> Any:
    return np.array([[rank in of_step for rank in range(ranks)] for of_step in of_steps])


def test_ranks_are_late_together_only_beyond_chance() -> None:
    node = late_in_steps(*[range(4, 8)] * 4)
    assert find_late_together(node) == (4, 5, 6, 7)
    assert find_late_together(node[:1]) == (), "one step shows no habit"
    assert find_late_together(late_in_steps(*[(3,)] * 9)) == (), "one rank is no group"
    assert find_late_together(late_in_steps(*[range(5)] * 9)) == (), "lags are told from the median: most are no group"
    assert find_late_together(late_in_steps((0, 1), (2, 3), (4, 5), (6, 7), (1, 2), (3, 4))) == ()
    assert find_late_together(late_in_steps(*[()] * 9)) == ()
    partly = late_in_steps((4, 5), (4, 5, 6), (5,), (4, 5), (4, 5), ())
    assert find_late_together(partly) == (4, 5), "who is late with them now and then does not belong to them"


def test_who_is_late_because_it_waited_is_not_late_together_with_whom_it_waited_for() -> None:
    # Rank 0 is early; rank 1 is last; rank 2 waits for it, and is then late for others; ranks 3 and 4 are late, too.
    lags = np.array([[0.0, 100.0, np.nan, 85.0, 70.0], [0.0, 90.0, 95.0, 99.0, np.nan]])
    waits = np.array([[100, 0, 90, 15, 30], [100, 0, 0, 0, 0]])
    arrivals = np.array([[0, 100, 10, 85, 70], [200, 290, 295, 299, 0]])
    assert _nearly_as_late(lags, arrivals, waits, 100).tolist() == [False, True, False, True, False]


def test_a_lag_costs_itself_in_skew_doctor_and_cause(tmp_path: Path) -> None:
    """The others wait 2 ms for it at the last bucket, and 4 behind the one before, which waited for it, too."""
    skew, doctor, cause, cost = told(job(6), tmp_path)
    assert cost == doctor == 6
    assert "Rank 2 arrives last in 6 of 6 steps, by 6.00 ms (median); such a step would be up to 6.00 ms" in skew
    assert "rank 2 is late: without that, and what queued behind it, the step is 6.00 ms shorter" in cause
    assert "a faster link" not in cause


def test_a_queue_behind_a_collective_of_another_step_is_no_cost_of_this_one() -> None:
    """The lag of one step was followed into the next, or not, by which of both came first in its step.

    step     0    0    1    1    not matched
    queue    A <- B <- C <- D <- E
    """
    queue = Queue(np.array([UNKNOWN, 0, 1, 2, 3]), np.array([0, 5, 5, 5, 5]), np.full(5, UNKNOWN))
    within = _within_steps(queue, np.array([0, 0, 1, 1, UNKNOWN]))
    assert within.before.tolist() == [UNKNOWN, 0, UNKNOWN, 2, UNKNOWN]
    assert within.queued_ns.tolist() == queue.queued_ns.tolist()


def test_nobody_late_costs_nothing(tmp_path: Path) -> None:
    skew, doctor, cause, cost = told(job(0), tmp_path)
    assert (doctor, cost) == (None, None)
    assert skew == "No rank is late by more than the clocks' residual."
    assert "late" not in cause


@pytest.mark.parametrize(
    ("late_ms", "transfer_ms"), [(6, 8), (6, 12), (3, 2), (12, 8), (1, 30), (6, 60), (30, 8), (50, 2), (40, 15)]
)
def test_it_costs_what_the_step_would_be_shorter(late_ms: int, transfer_ms: int, tmp_path: Path) -> None:
    """Where the queue of transfers is longer than the lag, only the first bucket's arrival counts: still the lag."""
    _, doctor, _, cost = told(job(late_ms, transfer_ms), tmp_path)
    assert cost == pytest.approx(late_ms, abs=0.01)
    assert doctor == cost


def test_lateness_older_than_the_step_is_told(tmp_path: Path) -> None:
    assert re.search(r"6\.00 ms late when the step begins", told(job(6, begins_late=True), tmp_path)[0])
    assert "when the step begins" not in told(job(6), tmp_path)[0]


def test_a_rank_that_did_not_wait_gains_nothing(tmp_path: Path) -> None:
    """Rank 2's times are all 0.15 ms later, as on a clock that is off: each collective takes as long on each rank."""
    capture = job(0)
    process = 100 + LATE
    moved = [
        replace(one, start=one.start + MS * 3 // 20, end=one.end + MS * 3 // 20) if one.process == process else one
        for one in capture.kernels
    ]
    skew, doctor, cause, cost = told(replace(capture, kernels=moved), tmp_path)
    assert "Rank 2 arrives last in 6 of 6 steps, by 0.15 ms" in skew
    assert (doctor, cost) == (None, 0)
    assert "late" not in cause


def test_it_costs_the_same_whether_pictures_are_drawn_or_not(tmp_path: Path) -> None:
    """Between two collectives of a queue a kernel runs; without the lag, it would run beside the second of them."""
    capture = job(6, 12)
    between = [
        replace(one, name="unscale", start=one.end, end=one.end + 15_000, stream=7, number=None)
        for one in capture.kernels
        if one.name == NCCL
    ]
    moved = [replace(one, start=one.start + 15_000) if one.name == NCCL else one for one in capture.kernels]
    path = write_capture(tmp_path / "x.sqlite", replace(capture, kernels=[*moved, *between]))
    costs = []
    for to_draw in (False, True):
        (run,) = load_runs(path)
        run.options = replace(run.options, to_draw=to_draw)
        costs.append([rank.cost_ns for rank in run.skew().ranks])
    assert costs[0] == costs[1]


@pytest.mark.parametrize("is_told", [True, False], ids=["number of ranks", "launches alone"])
def test_where_a_rank_is_missing_what_may_be_waiting_is_not_said_to_be_transfer(is_told: bool, tmp_path: Path) -> None:
    """The rank that is not there is late: its file was not given, or its profiler lost the kernels."""
    capture, process = job(6), 100 + LATE
    if is_told:
        kernels = [one for one in capture.kernels if one.process != process]
        ranges = [one for one in capture.ranges if one.process != process]
    else:
        kernels = [replace(one, is_lost=one.process == process) for one in capture.kernels]
        ranges = [one for one in capture.ranges if not one.name.startswith("process|")]
    (run,) = load_runs(write_capture(tmp_path / "x.sqlite", replace(capture, kernels=kernels, ranges=ranges)))
    cause = root_cause_headline(run.root_cause()).text
    assert "queued behind another collective" in cause
    assert "fewer bytes or a faster link would help, if these transfer rather than wait" in cause


@pytest.mark.parametrize(("most_ns", "is_told"), [(0, False), (1000, True)])
def test_what_gains_nothing_by_its_own_simulation_is_no_finding(
    most_ns: int, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of one layer are late alike: without one of them the other one is."""
    gain = {"expected_gain_ns": 0, "gain_low_ns": 0, "gain_high_ns": most_ns}
    monkeypatch.setattr(doctor, "with_expected_gain", lambda run, one: replace(one, **gain))
    (run,) = load_runs(write_capture(tmp_path / "x.sqlite", job(6)))
    assert ("straggler" in [one.rule for one in run.doctor().findings]) == is_told


def test_without_steps_a_rank_that_is_last_at_most_collectives_is_undecided(tmp_path: Path) -> None:
    capture = job(6)
    ranges = [one for one in capture.ranges if not one.name.startswith("step|")]
    (run,) = load_runs(write_capture(tmp_path / "x.sqlite", replace(capture, ranges=ranges)))
    reasons = [one.reason for one in run.doctor().abstained if one.rule == "straggler"]
    said = "rank 2 arrives last at 24 of 24 collectives, and the trace marks no whole step (see --step-range)"
    assert reasons == [said]


def one_step(rank: int, calls: list[tuple[str, int, int, int]]) -> Capture:
    """A step of 40 ms with these calls: (kernel, stream, start, end in ms) or (record or wait, stream, event, 0)."""
    process = 100 + rank
    capture = Capture(ranges=[Range("step 0", 0, 40 * MS, process, process)])
    for number, (name, stream, first, second) in enumerate(calls, 1):
        at = number * 1000
        if name in {"cudaEventRecord", "cudaStreamWaitEvent"}:
            capture.syncs.append(
                Sync(f"{name}_v3020", at, number, stream, event=first, thread=process, process=process, device=rank)
            )
        else:
            kind = "memcpy" if name == "copy" else "kernel"
            about = (name, first * MS, second * MS, at, process, process, stream, rank)
            capture.kernels.append(Kernel(*about, kind=kind, number=number))
    return capture


def buckets_copied_back(kernel: str) -> Capture:
    """DDP copies each bucket back when it has arrived: rank 0 stands still for A, B and C, 8, 3 and 3 ms.

    ms             4       8      12      16      20
    rank 0    kkkkk|AAAAAAAAAAAAAAA|BBBBBBB|CCCCCCC|        a, b and c begin when A, B and C end
              .....................aa......bb......cc
    rank 1    kkkkkkkkkkkkk|AAAAAAA|BBBBBBB|CCCCCCC|        4 ms late
    """
    record, wait = "cudaEventRecord", "cudaStreamWaitEvent"
    whole = Capture()
    for rank, ready in enumerate((4, 8)):
        calls = [("gemm", 7, 0, ready), (record, 7, 1, 0), (wait, 20, 1, 0)]
        for number, (start, end) in enumerate([(ready, 12), (12, 16), (16, 20)], 2):
            calls += [(kernel, 20, start, end), (record, 20, number, 0)]
        for number, end in enumerate((12, 16, 20), 2):
            calls += [(wait, 7, number, 0), ("copy", 7, end, end + 1)]
        own = one_step(rank, calls)
        whole = replace(
            whole,
            kernels=whole.kernels + own.kernels,
            ranges=whole.ranges + own.ranges,
            syncs=whole.syncs + own.syncs,
        )
    return whole


def test_one_lag_costs_itself_though_the_stream_stands_still_for_each_bucket(tmp_path: Path) -> None:
    (run,) = load_runs(write_capture(tmp_path / "x.sqlite", buckets_copied_back(NCCL), "2022.2"))
    assert run.overlap().ranks[0].blocking_ns == (8 + 3 + 3) * MS
    assert run.skew().ranks[1].cost_ns == 4 * MS


@pytest.mark.parametrize("kernel", [NCCL, "ncclDevKernel_SendRecv(x)"])
def test_the_gain_of_what_is_not_found_on_the_other_rank_is_not_known(kernel: str, tmp_path: Path) -> None:
    """The other rank still sent and received, and the step ended no earlier: 0 was said of each all-to-all."""
    (run,) = load_runs(write_capture(tmp_path / "x.sqlite", buckets_copied_back(kernel), "2022.2"))
    (path,) = run.critical().steps
    assert path.collectives
    for one in path.collectives:
        assert one.is_matched == (one.gain_ns is not None) == (kernel == NCCL)


def test_a_rank_that_is_late_because_it_waited_for_another_one_is_not_the_late_one(tmp_path: Path) -> None:
    """Ranks 2 and 3 share a layer: rank 3 is 6 ms late at its all-reduce, so both are late at those of gradients.

    ms        0     6     8        14
    rank 2    TTTTTTTTTTTTggggDDDDDD     waits for rank 3 (T), then rank 0 waits for it (D)
    rank 3    kkkkkkTTTTTTggggDDDDDD
    rank 0    ggggDDDDDDDDDDDDDDDDDD     and rank 1 likewise
    """
    events = []
    for rank in range(4):
        late, group = (6 if rank > 1 else 0), [rank % 2, rank % 2 + 2]
        own: list[tuple[str, int, int, list[int] | None]] = [(NCCL, 10 + late, 20, group)]
        if rank > 1:
            own = [("gemm", 0, 6, None)] * (rank == 3) + [(NCCL, 6 * (rank == 3), 8, [2, 3]), *own]
        else:
            own = [(NCCL, 0, 2, [0, 1]), *own]
        found = []
        for step in range(8):
            at = 30 * step * MS
            found.append(event("user_annotation", f"ProfilerStep#{step}", at, at + 29 * MS, 1, 1))
            for place, (name, start, end, ranks) in enumerate(own):
                number, launch = 10 * step + place + 1, at + 1000 * (place + 1)
                about: dict[str, Any] = {"correlation": number, "device": rank, "stream": 7 if ranks is None else 20}
                if ranks:
                    about |= {"Collective name": "allreduce", "Process Group Name": str(ranks), "Group size": 2}
                    about |= {"Process Group Ranks": str(ranks), "In msg nelems": 8, "dtype": "Float"}
                found.append(event("cuda_runtime", "cudaLaunchKernel", launch, launch + 500, 1, 1, correlation=number))
                found.append(
                    event("kernel", name, at + start * MS + 9000, at + end * MS + 9000, rank, about["stream"], **about)
                )
        events.append(found)
    paths = [
        write_kineto(tmp_path / f"x.rank{rank}.json", Capture(), rank=rank, world=4, others=of_rank)
        for rank, of_rank in enumerate(events)
    ]
    (run,) = load_runs(paths)
    assert [rank.last_steps for rank in run.skew().ranks] == [0, 0, 0, 8]
    assert skew_headline(run.skew()).text.startswith("Rank 3 arrives last in 8 of 8 steps, by 6.00 ms")


@pytest.mark.parametrize(("off_ms", "has_steps", "costs"), [(0, True, 2 * MS), (-5, True, 2 * MS), (0, False, None)])
def test_what_queued_behind_the_wait_counts(off_ms: int, has_steps: bool, costs: int | None, tmp_path: Path) -> None:
    """The times of rank 0's device are 5 ms early, so it is not known when it launched: 'compute hides all' was said.

    Without steps, what a lag costs is not followed through the queue: 0 was said.

    ms        0   2   4   6   8   10  12  14
    compute   ggggggggggggggggggggggggg
    rank 0        AAAAAAAAAAAABBBBBBBBBBBB     waits for 2 ms, and B queues
    rank 1            AAAAAAAABBBBBBBBBBBB
    """
    paths = []
    for rank, begins in enumerate((2, 4)):
        events, off = [], off_ms * (rank == 0)
        for step in range(6):
            at = 20 * step * MS + 8000
            if has_steps:
                events.append(event("user_annotation", f"ProfilerStep#{step}", at, at + 19 * MS, 1, 1))
            for place, (name, start, end) in enumerate((("gemm", 0, 12), (NCCL, begins, 8), (NCCL, 8, 14))):
                about = {"correlation": 10 * step + place + 1, "device": 0, "stream": 20 if name == NCCL else 7}
                events.append(event("cuda_runtime", "cudaLaunchKernel", at + place, at + place + 1, 1, 1, **about))
                times = (at + (time + off) * MS + 8000 for time in (start, end))
                events.append(event("kernel", name, *times, 0, about["stream"], **about))
        paths.append(write_kineto(tmp_path / f"x.rank{rank}.json", Capture(), rank=rank, world=2, others=events))
    (run,) = load_runs(paths)
    rank = run.skew().ranks[1]
    assert (rank.cost_when_last_ns if has_steps else rank.cost_ns) == costs
    assert ("up to 2.00 ms shorter" in skew_headline(run.skew()).text) == has_steps


Operation = tuple[str, int, float, float]
"""Name, stream, start and end in ms; a collective has the name of its communicator, whose ranks these are."""


def recorded_without_waits(ranks: list[list[list[Operation]]], tmp_path: Path) -> Run:
    """Steps of 20 ms, given for each rank, as torch.profiler records them by default."""
    paths = []
    for rank, steps in enumerate(ranks):
        events = []
        for step, operations in enumerate(steps):
            at = 20 * step * MS + 8000
            events.append(event("user_annotation", f"ProfilerStep#{step}", at, at + 19 * MS, 1, 1))
            for place, (name, stream, start, end) in enumerate(operations):
                about: dict[str, Any] = {"correlation": 100 * step + place + 1, "device": 0, "stream": stream}
                events.append(event("cuda_runtime", "cudaLaunchKernel", at + place, at + place + 1, 1, 1, **about))
                if name.isdigit():
                    about |= {"Collective name": "allreduce", "Process Group Name": name, "Group size": len(name)}
                    about |= {"Process Group Ranks": str([*map(int, name)]), "In msg nelems": 8, "dtype": "Float"}
                times = (at + round(time * MS) + 8000 for time in (start, end))
                events.append(event("kernel", NCCL if name.isdigit() else name, *times, 0, stream, **about))
        path = tmp_path / f"x.rank{rank}.json"
        paths.append(write_kineto(path, Capture(), rank=rank, world=len(ranks), others=events))
    (run,) = load_runs(paths)
    return run


def cost_of_the_last_rank(ranks: list[list[Operation]], tmp_path: Path) -> float:
    """What the last rank costs in each of 6 equal steps, in ms."""
    skew = recorded_without_waits([[operations] * 6 for operations in ranks], tmp_path).skew()
    assert skew.straggler == len(ranks) - 1
    return (skew.ranks[-1].cost_when_last_ns or 0) / MS


@pytest.mark.parametrize("rare", [3, 5])
def test_a_rank_that_is_late_now_and_then_is_told_by_what_that_costs(rare: int, tmp_path: Path) -> None:
    """Rank 0 writes checkpoints; in the other steps another rank is last, by chance and by little.

    'No rank is last more often than chance explains', and 'No finding', where each fourth step lasted 5 ms longer.
    """
    ranks = []
    for rank in range(4):
        steps = list[list[Operation]]()
        for step in range(20):
            is_costly = step % rare == rare - 1
            latest, by = (0, 5.0) if is_costly else (1 + step % 3, 0.1)
            ready = 2 + by * (rank == latest)
            steps.append([("gemm", 7, 0, ready), ("0123", 20, ready, 4 + by), ("adam", 7, 4.001 + by, 5 + by)])
        ranks.append(steps)
    run = recorded_without_waits(ranks, tmp_path)
    times = 20 // rare
    assert skew_headline(run.skew()).text.startswith(f"Rank 0 arrives last in {times} of 20 steps, by 5.00 ms")
    (finding,) = [one for one in run.doctor().findings if one.rule == "straggler"]
    assert finding.ranks == ("rank 0",)
    assert finding.expected_gain_ns == pytest.approx(5 * MS * times / 20, rel=0.01)
    assert f"5.00 ms in such a step, {5 * times / 20:.2f} ms in the mean step" in finding.evidence


def test_compute_that_began_when_a_collective_ended_begins_earlier_without_the_wait(tmp_path: Path) -> None:
    """Where a layer waits for its parameters, only what queued behind them was seen to move: it filled the gap.

    'Up to 1.00 ms' was said of these, and 4 us of 0.89 ms in a simulated job.

    ms              0     3   4   5   6       9
    parameters      AAAAAAAAAA|BBB|CCC|            waits for rank 1, which begins the step 3 ms late
    layers          ..........fffffffffffffff
    without         AAA|BBB|CCC|
    the lag         ...fffffffffffffff
    """
    rest = [("01", 20, 4.0, 5.0), ("01", 20, 5.0, 6.0), ("gemm", 7, 4.001, 9.0)]
    late = [[("01", 20, start, 4.0), *rest] for start in (0.0, 3.0)]
    assert cost_of_the_last_rank(late, tmp_path) == pytest.approx(3, abs=0.01)


def test_what_is_sent_between_nodes_waits_for_what_is_summed_within_each(tmp_path: Path) -> None:
    """Without its lag, a rank still has to wait for its node: 4 ms were said, of which 1 is the node's transfer.

    ms                 0       2       4       6       8   9   10
    rank 0  compute    gggggggg|gggggggg|...................o
            in node            |RRR|   |RRR|
            between                |AAAAAAAAAA|BBBBBBBBBBBBB|     waits for rank 2, and rank 1 for rank 3
    rank 3  compute    gggggggggggggg|gggggggggggggg|........o
            in node                  |RRR|          |RRR|          rank 2 waits for it, from 2 and 4.5 on
            between                      |AAA|          |BBB|
    """
    ranks = []
    for rank, (first, second) in enumerate([(2, 4), (2, 4), (2, 4), (3.5, 7)]):
        node, pair = ("01", "23")[rank // 2], ("02", "13")[rank % 2]
        ends = (3, 5) if rank < 2 else (4.5, 8)
        ranks.append(
            [
                ("gemm", 7, 0, first),
                (node, 20, first, ends[0]),
                (pair, 24, ends[0], 5.5),
                ("gemm", 7, first, second),
                (node, 20, max(second, ends[0]), ends[1]),
                (pair, 24, max(5.5, ends[1]), 9),
                ("adam", 7, 9.001, 10),
            ]
        )
    assert cost_of_the_last_rank(ranks, tmp_path) == pytest.approx(3, abs=0.01)


def test_what_began_before_the_end_of_the_one_before_did_not_queue_behind_it(tmp_path: Path) -> None:
    """6 ms were said: without the lag, B was taken to begin 4 ms earlier than it did.

    ms        0     2       6   8   10  12
    rank 0    gggggg|gggggggg|...........o
                    AAAAAAAAAAAA
                            BBBBBBBBBBBBB         each waits 4 ms for rank 1
    """
    ranks = [
        [
            ("gemm", 7, 0, 2 + late),
            ("01", 20, 2 + late, 8),
            ("01", 20, 6 + late, 12),
            ("gemm", 7, 2 + late, 6 + late),
            ("adam", 7, 12.001, 13),
        ]
        for late in (0, 4)
    ]
    assert cost_of_the_last_rank(ranks, tmp_path) == pytest.approx(4, abs=0.01)
