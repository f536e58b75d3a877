"""Two runs of one variant: what changed beyond their spread, and which collective did it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.kernels.contention import Contention
from ddp_prof.analyze.variants.waterfall import (
    PARTS,
    Budget,
    CollectiveChange,
    PartChange,
    compare_before_after,
    subtract_budgets,
)
from ddp_prof.ingest.load import load_trace
from ddp_prof.present.tables.compare import (
    beside_text,
    change_rows,
    change_texts,
    changed_text,
    collective_change_text,
)
from tests.analyze.collectives.test_lateness import job
from tests.analyze.variants.test_waterfall import run_of_steps
from tests.command_line import run
from tests.drawing import PID, draw_trace
from tests.measuring import analysis_of
from tests.nsys_factory import Capture, Kernel, Range, write_capture
from tests.present.test_headlines import summary

MS = 1_000_000
JITTER = (0, 1, 0, 1, 0)


def changes_between(
    before: list[tuple[int, int]],
    after: list[tuple[int, int]],
    once: tuple[int, int] = (0, 0),
    sizes: tuple[int, int] = (8, 8),
) -> dict[str, PartChange]:
    """Of two CPU runs, drawn by the start and the length of the second bucket in each of their steps.

    The second bucket has ``sizes`` bytes in the runs. Bucket 2 is reduced in the first step only, from 4 on, for as
    long as ``once`` says of each run.

    backward     ##########..........
    synchronize  ..........##########
    bucket 0     ..###...............
    bucket 1     .......#####........  start 7, length 5: 2 of it are tail
    """
    runs = []
    for second, length, size in zip((before, after), once, sizes, strict=True):
        ranges = {"process|rank=0|world=1|variant=overlap|backend=gloo|device=cpu": "#" * (20 * len(second))}
        ranges |= {f"step|index={index}": "." * (20 * index) + "#" * 20 for index in range(len(second))}
        ranges["backward"] = "##########.........." * len(second)
        ranges["synchronize"] = "..........##########" * len(second)
        ranges["all_reduce|bucket=0|bytes=8|params=1"] = "..###..............." * len(second)
        pictures = ["." * start + "#" * length + "." * (20 - start - length) for start, length in second]
        ranges[f"all_reduce|bucket=1|bytes={size}|params=1"] = "".join(pictures)
        if length:
            ranges["all_reduce|bucket=2|bytes=8|params=1"] = "....".ljust(4 + length, "#").ljust(20 * len(second), ".")
        runs.append((analysis_of(draw_trace(ranges=ranges, ranks={PID: 0}), label="overlap"), ()))
    return {change.part: change for change in compare_before_after(*runs)}


def test_a_later_launch_is_named() -> None:
    found = changes_between([(7, 5 + jitter) for jitter in JITTER], [(11, 5 + jitter) for jitter in JITTER])
    assert found["tail"].change_ns == 3, "from 2 to 5: it launches 1 after the end of backward"
    assert found["tail"].is_beyond_spread
    assert found["tail"].cause == CollectiveChange("all_reduce", 1, None, "launch", 4)
    assert change_texts([found["tail"]]) == ["tail +0.0 µs: bucket 1 launches 0.0 µs later"]


@pytest.mark.parametrize(
    ("by_ns", "text"),
    [(-500, "-0.5 µs"), (400, "+0.4 µs"), (4_000_000, "+4.00 ms"), (-12_500_000, "-12.5 ms"), (-6_000, "-6.0 µs")],
)
def test_a_change_that_rounds_to_zero_is_shown_in_smaller_units(by_ns: int, text: str) -> None:
    """'transfer -0.00 ms; rest +0.00 ms' was said of changes of half a microsecond."""
    assert change_texts([PartChange("transfer", 10**9, 10**9 + by_ns, 100, None)]) == [f"transfer {text}"]


def test_another_bucket_of_the_same_number_is_no_cause() -> None:
    """Of two buckets against eight it was said that bucket 1 launches 93 ms earlier: it has other gradients."""
    early, late = ([(start, 5 + jitter) for jitter in JITTER] for start in (7, 11))
    found = changes_between(early, late, sizes=(8, 4))
    assert found["tail"].is_beyond_spread
    assert found["tail"].cause is None
    assert changes_between(early, late, sizes=(4, 4))["tail"].cause is not None


def device_ranks(*computes: int, has_calls: bool = True, comm: str = "N") -> RunAnalysis:
    """Ranks on devices that compute for so long in each of three steps, with a tail of 3 after it.

    step     ##########
    stream 7 .aaaa.....   4
    stream 9 ..NNNNNN..   the last 3 of it are the tail, or more of it
    """
    traces = []
    for rank, compute in enumerate(computes):
        ranges = [(f"step {index}", "." * (10 * index) + "#" * 10) for index in range(3)]
        ranges += [("backward", "####......" * 3), (f"process|rank={rank}|world={len(computes)}", "#" * 30)]
        trace = draw_trace(
            ranges=ranges,
            launches={"main": "aN........bO........cP........"} if has_calls else {},
            streams={
                7: "".join(f".{a * compute}{'.' * (9 - compute)}" for a in "abc"),
                9: "".join(f"..{n * 6}.." for n in ("NOP" if comm == "N" else "nop")),
            },
            ranks={PID: rank},
            world_size=2,
        )
        traces.append(trace)
    return analysis_of(*traces, label="flat")


def parts_of(before: RunAnalysis, after: RunAnalysis) -> dict[str, int | None]:
    return {change.part: change.change_ns for change in compare_before_after((before, ()), (after, ()))}


def test_a_tail_that_is_not_known_did_not_become_transfer() -> None:
    """Without calls nothing is known to be of backward: the tail was said to be shorter by all of itself."""
    known, unknown = device_ranks(4), device_ranks(4, has_calls=False)
    changes = parts_of(known, unknown)
    assert (changes["tail"], changes["transfer"], changes["step"]) == (None, 0, 0)
    assert parts_of(known, device_ranks(5))["tail"] == -1


def test_ranks_that_one_run_lacks_change_nothing() -> None:
    """Rank 1 computes longer. Where it was recorded before alone, compute was said to be shorter."""
    changes = parts_of(device_ranks(4, 6), device_ranks(4))
    assert {part: change for part, change in changes.items() if change} == {}


def test_what_is_not_known_to_communicate_did_not_become_compute() -> None:
    """As the kernels of an unknown library: the tail was said to be gone, and compute to be longer."""
    assert parts_of(device_ranks(4, 4), device_ranks(4, 4, comm="n")) == {}


def test_a_longer_collective_is_named() -> None:
    found = changes_between([(7, 5 + jitter) for jitter in JITTER], [(7, 9 + jitter) for jitter in JITTER])
    assert found["tail"].cause == CollectiveChange("all_reduce", 1, None, "duration", 4)


def test_what_waits_longer_for_a_peer_is_no_cause_of_a_longer_tail() -> None:
    """The tail contains no waits; those of bucket 1 grow by more than the transfer of bucket 0.

    rank 0   ###########000001111.......    ###########00000001111111111
    rank 1   ###########000001111.......    ###########0000000......1111
    """
    runs = []
    for first, second in ((3, (4, 4)), (6, (10, 4))):
        traces = []
        for rank, length in enumerate(second):
            ranges = {f"process|rank={rank}|world=2|variant=overlap|backend=gloo|device=cpu": "#" * 200}
            ranges |= {f"step|index={index}": "." * (40 * index) + "#" * 40 for index in range(5)}
            ranges |= {"backward": ("#" * 10).ljust(40, ".") * 5, "synchronize": ("." * 10).ljust(40, "#") * 5}
            ranges["all_reduce|bucket=0|bytes=8|params=1"] = ("." * 10 + "#" * first).ljust(40, ".") * 5
            pictures = ("." * (10 + first + max(second) - length) + "#" * (length + jitter) for jitter in JITTER)
            ranges["all_reduce|bucket=1|bytes=8|params=1"] = "".join(one.ljust(40, ".") for one in pictures)
            traces.append(draw_trace(ranges=ranges, ranks={PID: rank}, world_size=2, path=f"{rank}.sqlite"))
        runs.append((analysis_of(*traces, label="overlap"), ()))
    found = {change.part: change for change in compare_before_after(*runs)}
    assert (found["tail"].change_ns, found["wait"].change_ns) == (3, 3)
    assert found["tail"].cause == CollectiveChange("all_reduce", 0, None, "transfer", 3)
    assert found["wait"].cause == CollectiveChange("all_reduce", 1, None, "wait", 3)


def test_an_improvement_is_named_too() -> None:
    found = changes_between([(11, 5 + jitter) for jitter in JITTER], [(7, 5 + jitter) for jitter in JITTER])
    assert (found["tail"].change_ns, found["tail"].cause) == (-3, CollectiveChange("all_reduce", 1, None, "launch", -4))


def test_what_happens_once_counts_once() -> None:
    """In the first step bucket 2 adds 8 to the tail: more than bucket 1 adds to a step, less than to all of them."""
    before, after = ([(start, 5 + jitter) for jitter in JITTER] for start in (7, 11))
    found = changes_between(before, after, once=(3, 15))
    assert found["tail"].cause == CollectiveChange("all_reduce", 1, None, "launch", 4)


def test_within_the_spread_nothing_is_told() -> None:
    lengths = (3, 9, 4, 10, 5)
    found = changes_between([(7, length) for length in lengths], [(7, length + 1) for length in lengths])
    assert found["tail"].change_ns == 1
    assert (found["tail"].is_beyond_spread, found["tail"].cause) == (False, None)
    assert {row["part"]: row["significant"] for row in change_rows(list(found.values()))}["tail"] == "within the spread"
    assert changed_text(list(found.values())) == "nothing changed beyond the spread"


def test_of_too_few_steps_it_is_not_said_that_nothing_changed() -> None:
    found = changes_between([(7, 5)] * 2, [(7, 9)] * 2)
    assert (found["tail"].change_ns, found["tail"].is_beyond_spread, found["tail"].cause) == (4, None, None)
    assert changed_text(list(found.values())) == "what changed is not known"


def test_a_collective_whose_length_scatters_is_no_cause() -> None:
    """It is 2.2 longer on average, which is within its scatter, and launches 3 later in each step."""
    found = changes_between([(7, 5)] * 5, [(10, length) for length in (5, 9, 5, 9, 8)])
    assert found["tail"].is_beyond_spread
    assert found["tail"].cause == CollectiveChange("all_reduce", 1, None, "launch", 3)


def test_the_parts_sum_to_the_step() -> None:
    found = changes_between([(7, 5 + jitter) for jitter in JITTER], [(11, 5 + jitter) for jitter in JITTER])
    assert sum(change.change_ns or 0 for part, change in found.items() if part != "step") == found["step"].change_ns


def test_what_is_not_known_of_the_runs_is_no_zero() -> None:
    """Of one rank waiting is not told from transfer: 'wait 0.00, 0.00, within the spread'."""
    found = changes_between([(7, 5 + jitter) for jitter in JITTER], [(11, 5 + jitter) for jitter in JITTER])
    for part in ("wait", "contention"):
        assert (found[part].before_ns, found[part].after_ns, found[part].change_ns) == (None, None, None)
        (row,) = change_rows([found[part]])
        assert (row["before_ms"], row["after_ms"], row["change_ms"], row["significant"]) == (
            None,
            None,
            None,
            "not known",
        )


def gpu_capture(
    launch_ms: float, length_ms: int = 10, trainer: int = 131, ends_ms: int = 30, ahead_ms: float = 0.1
) -> Capture:
    """Five steps of a GPU: a thread, autograd's if not told, computes until 30 ms; bucket launched then for 10 ms.

    Its launch call is so much ahead of its start.
    """
    capture = Capture(threads={(100, 100): "python3", (100, 131): "pt_autograd_0"})
    for step in range(5):
        begin = 100 * step + 1
        comm, scatter = begin + launch_ms, 0.01 * (step % 2)
        for name, start, end, launch, thread, stream in (
            ("gemm", begin, begin + ends_ms, begin, trainer, 7),
            ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", comm, comm + length_ms + scatter, comm - ahead_ms, trainer, 9),
            ("adam", comm + length_ms + 1, comm + length_ms + 2, begin + 29, 100, 7),
        ):  # fmt: skip
            times = [round(item * MS) for item in (start, end, launch)]
            capture.kernels.append(Kernel(name, *times, thread, 100, stream))
        capture.ranges.append(Range(f"step {step}", round(begin * MS), round((begin + 60) * MS), 100))
    return capture


def test_where_backward_is_not_known_a_longer_collective_is_named(tmp_path: Path) -> None:
    captures = [gpu_capture(25, length, trainer=100) for length in (10, 14)]
    traces = [load_trace(write_capture(tmp_path / f"{at}.sqlite", capture)) for at, capture in enumerate(captures)]
    found = {one.part: one.cause for one in compare_before_after(*((analysis_of(trace), ()) for trace in traces))}
    assert found["transfer"] == CollectiveChange("all_reduce", None, 0, "duration", 4 * MS)


@pytest.fixture
def two_runs(tmp_path: Path) -> list[str]:
    return [str(write_capture(tmp_path / f"{name}.sqlite", gpu_capture(at))) for name, at in (("old", 25), ("new", 29))]


def test_the_command_line_says_what_changed_and_why(two_runs: list[str]) -> None:
    said = run("compare", *two_runs).stdout
    assert "from old to new, mean step:" in said
    assert "tail +4.00 ms: collective 0 launches 4.00 ms later" in said
    document = json.loads(run("compare", "--format", "json", *two_runs).stdout)
    (tail,) = [change for change in document["changes"] if change["part"] == "tail"]
    assert (tail["change_ns"], tail["cause"]["moved"], tail["cause"]["by_ns"]) == (4 * MS, "launch", 4 * MS)


def test_two_runs_on_other_gpus_are_said_to_be_other_jobs(two_runs: list[str]) -> None:
    """The same step on a slower GPU was "step longer: compute +0.13 ms", with nothing on the GPU; the gate refused."""
    for path, gpu in zip(two_runs, ("Tesla V100", "NVIDIA A100"), strict=True):
        with closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT)")
            database.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, ?)", (gpu,))
            database.commit()
    said = run("compare", *two_runs).stdout
    assert "note: new is another job than old: GPUs NVIDIA A100 and Tesla V100" in said
    assert "from old to new (new is another job: GPUs NVIDIA A100 and Tesla V100), mean step:" in said
    page = Path(two_runs[0]).with_name("page.html")
    assert "new is another job than old" in run("compare", "--waterfall", "--html", str(page), *two_runs).stdout
    assert "new is another job than old: GPUs NVIDIA A100" in page.read_text(encoding="utf-8")
    document = json.loads(run("compare", "--format", "json", *two_runs).stdout)
    assert [one["other_job"] for one in document["variants"]] == [None, "GPUs NVIDIA A100 and Tesla V100"]


def test_on_a_slower_machine_no_collective_is_said_to_start_late(tmp_path: Path) -> None:
    """All takes 20 % longer but the host, which is ahead: 'collective 0 starts 5.00 ms later after its launch'."""
    one = gpu_capture(25, 10, ends_ms=30, ahead_ms=24)
    slower = gpu_capture(30, 12, ends_ms=36, ahead_ms=29)
    paths = [write_capture(tmp_path / f"{name}.sqlite", of) for name, of in (("old", one), ("new", slower))]
    said = run("compare", *map(str, paths)).stdout
    assert "compute +6.00 ms; tail +1.00 ms: collective 0 takes 2.00 ms longer; rest" in said


def test_why_nothing_is_told_of_what_changed(two_runs: list[str]) -> None:
    """Of a run whose steps are not marked the table of changes was missing, without a word."""
    with closing(sqlite3.connect(two_runs[1])) as database:
        database.execute("DELETE FROM NVTX_EVENTS")
        database.commit()
    said = " ".join(run("compare", *two_runs).stdout.split())
    assert "note: what changed is not told of new: it has no step that can be measured" in said


def test_a_run_whose_clocks_disagree_is_not_said_to_have_longer_steps(two_runs: list[str], tmp_path: Path) -> None:
    """Its steps last from device work to device work, those of the same run on one clock as their ranges."""
    shifted = tmp_path / "shifted.sqlite"
    shifted.write_bytes(Path(two_runs[0]).read_bytes())
    with closing(sqlite3.connect(shifted)) as file:
        file.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = start - 140000000, end = end - 140000000")
        file.commit()
    told = run("compare", two_runs[0], shifted, "--format", "json").stdout
    changes = {change["part"]: change["is_beyond_spread"] for change in json.loads(told)["changes"]}
    assert changes["step"] is None
    assert True not in changes.values()


def test_what_parts_of_a_step_did_is_not_known_of_a_run_that_lost_launches_one_by_one() -> None:
    """The U-Net without 2 % of its launches had longer exposed copies and idle time than the same run."""
    before, after = run_of_steps("before", [1500, 1510, 1490, 1500]), run_of_steps("after", [1200, 1210, 1190, 1200])
    lossy = replace(after, ranks=tuple(replace(rank, lost_share=0.02) for rank in after.ranks))
    for run_after, of_compute, text in (
        (after, "shorter", "step -0.3 µs; compute -0.3 µs"),
        (lossy, "not known", "step -0.3 µs"),
    ):
        changes = compare_before_after((before, ()), (run_after, ()))
        row_of = {row["part"]: row for row in change_rows(changes)}
        assert (row_of["step"]["significant"], row_of["compute"]["significant"]) == ("shorter", of_compute)
        assert changed_text(changes) == text
    alike = run_of_steps("after", [1501, 1512, 1490, 1500])
    alike = replace(alike, ranks=tuple(replace(rank, lost_share=0.02) for rank in alike.ranks))
    told = changed_text(compare_before_after((before, ()), (alike, ())))
    assert told == "the step did not change beyond the spread; what its parts did is not known"


def test_one_pair_of_equal_runs_in_twenty_seems_to_have_changed() -> None:
    """With an interval for each part alone it was every third pair; with one for the step alone, 9 of 100."""
    draw, pairs, steps = np.random.default_rng(0), 1000, 40
    nothing, differ = Contention(5, 50, 1.0, 1.0, 1.0, 1.0, 0, None), 0
    for _ in range(pairs):
        halves = draw.normal(10_000, 1_000, (2, steps, len(PARTS)))
        ends = []
        for of_run in halves:
            mean = dict(
                zip((f"{part}_ns" for part in PARTS), np.rint(of_run.mean(axis=0)).astype(int).tolist(), strict=True)
            )
            errors = 1.96 * of_run.std(axis=0, ddof=1) / steps**0.5
            widths = dict(zip(PARTS, np.rint(errors).astype(int).tolist(), strict=True))
            widths["step"] = round(1.96 * of_run.sum(axis=1).std(ddof=1) / steps**0.5)
            ends.append(
                Budget(
                    label="x", device="cuda", steps=steps, contention=nothing, knows_wait=True, knows_tail=True,
                    clocks_disagree=False, half_width_ns=widths, step_ns=sum(mean.values()), **mean,
                )
            )  # fmt: skip
        change = subtract_budgets(*ends)
        differ += any(change.is_beyond_spread(part) for part in ("step", *PARTS))
    assert differ <= 0.06 * pairs


def test_a_gate_that_fails_says_so_too(two_runs: list[str]) -> None:
    result = run("check", "--baseline", *two_runs)
    assert result.exit_code == 3
    assert (
        "note: new, mean step against the baseline: tail +4.00 ms: collective 0 launches 4.00 ms later" in result.stdout
    )


def test_a_later_start_is_not_said_to_be_a_queue() -> None:
    """What lies between launch and start may be other collectives, or compute that feeds it."""
    change = CollectiveChange(op="all_reduce", bucket=3, index=None, moved="queueing", by_ns=4_000_000)
    assert collective_change_text(change) == "bucket 3 starts 4.00 ms later after its launch"


def test_a_change_of_a_microsecond_beside_one_of_a_millisecond_is_left_to_the_table() -> None:
    """Exact lengths make it significant; it read 'transfer +0.00 ms', with a cause."""
    parts = (("step", 401_000), ("wait", 400_000), ("transfer", 1_000), ("rest", 0))
    changes = [PartChange(part, 0, by, 10, None) for part, by in parts]
    assert changed_text(changes) == "step +0.40 ms; wait +0.40 ms"
    assert [row["significant"] for row in change_rows(changes)][2] == "longer"


def test_parts_of_a_step_that_did_not_change_clearly_are_not_told_alone() -> None:
    """Of a step that was 67 ms shorter, within ±236 ms, 'transfer +13.9 ms; rest +42.5 ms' was all that was said."""
    step, rest = (
        PartChange("step", 0, -67_000_000, 236_000_000, None),
        PartChange("rest", 0, 42_500_000, 40_000_000, None),
    )
    assert changed_text([step, rest]) == "step within ±236.0 ms; rest +42.5 ms"
    assert changed_text([step]) == "nothing changed beyond the spread"


@pytest.mark.parametrize(
    ("compute_ms", "beside_ms", "device", "is_told"),
    [
        (177, 366, "cpu", True),
        (-50, -40, "cpu", True),
        (177, 50, "cpu", False),  # far less than compute became longer
        (177, -100, "cpu", False),
        (177, 366, "cuda", False),  # contention is measured there
    ],
)
def test_longer_compute_of_cpus_is_put_beside_what_it_hides(
    compute_ms: int, beside_ms: int, device: str, is_told: bool
) -> None:
    """Of smaller buckets 'compute +177 ms' was all that was told: four ranks shared two cores."""
    changes = [PartChange("compute", 0, compute_ms * MS, 30 * MS, None)]
    beside_ns = (400 * MS, (400 + beside_ms) * MS)
    before, after = (replace(summary("job", None, 0.5, 95, device), overlapped_ns=ns) for ns in beside_ns)
    assert bool(beside_text(changes, before, after)) is is_told


def test_what_rounding_leaves_to_the_rest_is_no_change() -> None:
    """The rest is the same in each step, and took what rounding of the other parts left: 2 ns, 'shorter'."""
    assert PartChange("rest", 102, 100, 0, None).is_beyond_spread is False
    assert PartChange("wait", 102, 100, 0, None).is_beyond_spread is True
    assert PartChange("rest", 120, 100, 0, None).is_beyond_spread is True


def test_ranks_that_are_late_in_one_run_alone_are_said_to_be(tmp_path: Path) -> None:
    """'collective 2 starts 4.00 ms later after its launch' was said alone: it queues behind the wait for rank 2."""
    captures = {"plain": job(0), "late": job(6), "later": job(12), "slower": job(0, transfer_ms=9)}
    paths = {name: str(write_capture(tmp_path / f"{name}.sqlite", of)) for name, of in captures.items()}

    def said(before: str, after: str) -> str | None:
        text: str | None = json.loads(run("compare", "--format", "json", paths[before], paths[after]).stdout)[
            "late_ranks"
        ]
        shown = " ".join(run("compare", paths[before], paths[after]).stdout.split())
        assert "arrives last" not in shown if text is None else f"note: {text}" in shown
        return text

    alone = (
        "Rank 2 arrives last in late, whose mean step would be up to 6.00 ms shorter without that, or more if "
        "communication slows compute (ddp-prof skew)"
    )
    assert said("plain", "late") == said("late", "plain") == alone
    both = "Rank 2 arrives last in both runs, which costs up to 12.0 ms of the mean step in later, 6.00 ms in late"
    assert said("late", "later") == f"{both} (ddp-prof skew)"
    assert said("plain", "slower") is None
    failed = " ".join(run("check", "--baseline", paths["plain"], paths["late"]).stdout.split())
    assert f"note: late, against the baseline: {alone}" in failed
