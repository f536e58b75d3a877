"""What is said of collectives, in rows and in JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_prof.analyze.collectives.results import measure_collectives
from ddp_prof.analyze.collectives.step_view import view_step
from ddp_prof.analyze.collectives.straggler import measure_skew
from ddp_prof.analyze.root_cause import find_root_cause
from ddp_prof.ingest.load import load_trace
from ddp_prof.present.cause_headlines import exposed_words, root_cause_headline
from ddp_prof.present.charts.collectives import draw_step_collectives
from ddp_prof.present.headlines import Headline
from ddp_prof.present.skew_headlines import skew_headline
from ddp_prof.present.tables import collectives
from ddp_prof.present.tables.collectives import COLLECTIVES_SCHEMA, collectives_view, rows_of_step
from ddp_prof.present.tables.critical import critical_headline, critical_view
from ddp_prof.runs import load_runs
from ddp_prof.trace import Trace
from tests.analyze.collectives.test_timing import OURS
from tests.charts import validated
from tests.drawing import PID, draw_trace
from tests.measuring import analysis_of, results_of
from tests.nsys_factory import US, bucket_steps, write_capture
from tests.present.runs import cpu_run

CONTRACT = {
    "": "schema collectives alignment headline warnings",
    "collectives": "rank process device step index op bucket bytes ready_ns launch_ns start_ns end_ns duration_ns "
    "overlapped_ns exposed_ns exposed_by transfer_ns wait_ns busbw_bytes_per_s",
    "exposed_by": "when why ns",
    "alignment": "method residual_p50_ns residual_p95_ns missing_ranks",
}


def view_of(trace, by: str = "collective"):
    run = analysis_of(trace)
    result = measure_collectives(run)
    cause = find_root_cause(result)
    return collectives_view(run, result, root_cause_headline(cause, result.reason), by)


def test_the_document_keeps_the_contract() -> None:
    document = json.loads(json.dumps(view_of(OURS).document, allow_nan=False))
    first = document["collectives"][0]
    parts = {"": document, "collectives": first, "exposed_by": first["exposed_by"][0]}
    parts |= {"alignment": document["alignment"]}
    for part, keys in CONTRACT.items():
        assert set(keys.split()) <= parts[part].keys(), part
    assert (document["schema"], first["bytes"], first["transfer_ns"]) == (COLLECTIVES_SCHEMA, 4000, None)


@pytest.mark.parametrize(("by", "rows"), [("collective", 2), ("step", 1), ("bucket", 2)])
def test_rows_sum_to_the_same(by: str, rows: int) -> None:
    found = view_of(OURS, by).rows
    assert len(found) == rows
    assert sum(row["exposed_ms"] for row in found) * 1e6 == pytest.approx(8)
    assert sum(row["when_tail_ms"] for row in found) * 1e6 == pytest.approx(4)


def test_the_cause_of_a_row_is_the_transfer_alone_if_waiting_is_known() -> None:
    collectives = measure_collectives(analysis_of(OURS)).collectives
    one = next(each for each in collectives if each.exposed_by and each.exposed_wait_ns is None)
    part = replace(one.exposed_by[0], when="tail", why="transfer")
    said = [exposed_words(replace(one, exposed_by=(part,), exposed_wait_ns=wait_ns)) for wait_ns in (None, 0)]
    assert said == ["tail, in transfer or waiting for a peer", "tail, in transfer"]


def test_blocking_is_not_summed_over_the_collectives_alone_of_which_it_is_known(tmp_path: Path) -> None:
    """Of one of four the launch of what waited for it is lost: the row told of three, and overlap of none."""
    capture = bucket_steps(20, 20, 20, 20)
    for kernel in capture.kernels:
        kernel.call = "cudaMemcpyAsync" if kernel.kind == "memcpy" else kernel.call
        kernel.launch = None if kernel.number == 18 else kernel.launch
    trace = load_trace(write_capture(tmp_path / "x.sqlite", capture))
    assert [row["blocking_ms"] for row in view_of(trace, "step").rows] == [0.01, None, 0.01, 0.01]
    assert [row["blocking_ms"] for row in view_of(trace, "group").rows] == [None]


def test_thousands_of_rows_are_shortened_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert view_of(OURS).digest is None
    monkeypatch.setattr(collectives, "MOST_READ", 1)
    assert view_of(OURS).digest is not None


def test_of_many_ranks_few_rows_are_shortened_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "MOST_ROWS", 0)
    assert view_of(OURS, "step").digest is not None


@pytest.mark.parametrize(("by", "is_said"), [("collective", False), ("step", False), ("bucket", True), ("group", True)])
def test_sums_over_several_steps_are_called_totals(by: str, is_said: bool) -> None:
    notes = view_of(cpu_run(steps=2), by).notes
    assert ("times are totals over 2 steps; for each step: --by step" in notes) == is_said
    assert not any("totals" in note for note in view_of(cpu_run(steps=1), by).notes)


def test_times_are_within_the_step() -> None:
    first, second = view_of(cpu_run(steps=2)).rows
    assert (first["ready_ms"], first["start_ms"], first["end_ms"]) == (0, 0, 4e-6)
    assert (second["ready_ms"], second["end_ms"]) == (0, 4e-6)


@pytest.mark.parametrize("by", ["step", "bucket", "group"])
def test_sums_are_of_all_collectives_whatever_a_row_stands_for(by: str) -> None:
    (run,) = load_runs(["traces/bucketed_1mb.sqlite"])
    result = run.collectives()
    rows = collectives_view(run.analysis(), result, Headline("x"), by).rows
    for name in ("exposed", "blocking"):
        whole = sum(getattr(one, f"{name}_ns") for one in result.collectives)
        assert sum(row[f"{name}_ms"] for row in rows) == pytest.approx(whole / 1e6)
    assert sum(row["collectives"] for row in rows) == len(result.collectives)


def test_of_two_steps_of_one_number_each_has_a_row() -> None:
    trace = cpu_run(steps=3)
    epochs = replace(trace, names=tuple(name.replace("index=2", "index=0") for name in trace.names))
    assert [(row["step"], row["collectives"]) for row in view_of(epochs, "step").rows] == [(0, 1), (1, 1), (0, 1)]


def of_backward(rank: int = 0, *, is_named: bool, steps: int = 1) -> Trace:
    """Steps of a CPU job whose backward has a range, or has none; rank 1 is late by 1 ns."""
    ranges = {
        f"process|rank={rank}|world=2|variant=overlap|backend=gloo|device=cpu": "#" * 20 * steps,
        **{f"step|index={step}": "." * 20 * step + "#" * 20 for step in range(steps)},
        "forward": "####................" * steps,
        "synchronize": "..........####......" * steps,
        "optimizer": "...............####." * steps,
        "all_reduce|bucket=0|bytes=8|params=1": (".......######......." if rank == 0 else "........#####.......")
        * steps,
    }
    backward = {"backward": "....######.........." * steps} if is_named else {}
    return draw_trace(ranges={**ranges, **backward}, ranks={PID: rank}, world_size=2)


def test_a_collective_is_all_hidden_only_if_compute_hides_it() -> None:
    """Time of several at once is counted with one of them, be it exposed or hidden.

    Of the others it was said that they are hidden; then of those under compute that they are exposed, with another one.
    """
    trace = draw_trace(
        ranges={"step 0": "################"},
        launches={"main": "aABCDE.........."},
        streams={
            7: ".aaaaaaaa.......", 9: "..AA............", 20: "..........BBBB..", 30: "..........CCCC..",
            40: ".....DDD........", 50: ".....EEE........",
        },
    )  # fmt: skip
    found = results_of(trace)
    alone, *beside = rows_of_step(found, found.of_step(0))
    assert alone["cause"] == "all hidden"
    assert [row["exposed_ms"] > 0 for row in beside].count(True) == 1
    causes = sorted(row["cause"] for row in beside if not row["exposed_ms"])
    assert causes == ["all hidden", *["hidden, or counted with another collective"] * 2]


@pytest.mark.parametrize("is_named", [True, False])
def test_where_it_is_not_known_what_hides_nothing_tells_what_is_exposed(is_named: bool) -> None:
    traces = [of_backward(rank, is_named=is_named, steps=6) for rank in (0, 1)]
    found = results_of(*traces)
    frame, rows = found.to_frame(), rows_of_step(found, found.of_step(2))
    assert frame["exposed_ns"].notna().all() == frame["why_transfer_ns"].notna().all() == is_named
    assert {row["exposed_ms"] is not None for row in rows} == {bool(row["cause"]) for row in rows} == {is_named}
    chart = validated(draw_step_collectives)(found.run, 2, view_step(found.run, 2), Headline("a step"))
    bars = {bar.name.split(":")[0] for bar in chart.data if bar.type == "bar"}
    assert bars == ({"compute", "overlapped", "exposed"} if is_named else {"compute", "communication"})
    skew = measure_skew(found.run)
    assert {rank.exposed_wait_ns is not None for rank in skew.ranks} == {is_named}
    assert {wait is not None for step in skew.steps for wait in step.waits_ns} == {is_named}
    assert skew.straggler == 1
    assert ("shorter without its lag" in skew_headline(skew).text) == is_named, "the transfer would end earlier"
    assert ("what that costs is not known" in skew_headline(skew).text) != is_named


@pytest.mark.parametrize("by", ["collective", "step", "bucket"])
def test_where_it_is_not_known_what_hides_rows_do_not_tell_what_is_exposed(by: str) -> None:
    """The headline said that it is not known, and the rows beneath it told some."""
    unknown, known = (view_of(of_backward(is_named=is_named), by) for is_named in (False, True))
    told = [
        {name: row[name] for name in ("exposed_ms", "overlapped_ms", "when_tail_ms", "why_transfer_ms", "blocking_ms")}
        for view in (unknown, known)
        for row in view.rows
    ]
    assert set(told[0].values()) == {None}
    assert None not in told[1].values()
    assert unknown.rows[0]["duration_ms"] == known.rows[0]["duration_ms"]
    (one,) = unknown.document["collectives"]
    assert (one["exposed_ns"], one["overlapped_ns"], one["exposed_by"], one["blocking_ns"]) == (None,) * 4


@pytest.mark.parametrize(
    ("lengths", "without_work", "told"), [((20, 12), 0, "2 steps"), ((20,), 0, "1 step"), ((20, 12), 1, "1 step")]
)
def test_steps_without_work_are_steps_as_other_commands_count_them(
    lengths: tuple[int, ...], without_work: int, told: str, tmp_path: Path
) -> None:
    capture = bucket_steps(*lengths)
    of_last = [*filter(lambda one: one.number > 10, [*capture.kernels, *capture.syncs])] if without_work else []
    capture.kernels = [kernel for kernel in capture.kernels if kernel not in of_last]
    capture.syncs = [sync for sync in capture.syncs if sync not in of_last]
    (run,) = load_runs(write_capture(tmp_path / "x.sqlite", capture))
    title = critical_view(run.analysis(), run.critical()).title.partition("\n")[0]
    assert title.partition(" · device: cuda · ")[2].removesuffix(" with work") == told
    assert len(run.overlap().ranks[0].steps) == len(lengths) - without_work


def test_the_path_of_median_length_is_not_called_that_of_the_typical_step(tmp_path: Path) -> None:
    """Headlines are about step 1, which has the median exposed time, and the path said to be typical was of step 0."""
    capture = bucket_steps(12, 20, 30)
    last = next(kernel for kernel in capture.kernels if kernel.kind == "memcpy")
    last.end = 37 * US
    (run,) = load_runs(write_capture(tmp_path / "x.sqlite", capture))
    assert {path.step: path.path_ns // US for path in run.critical().steps} == {0: 36, 1: 27, 2: 37}
    assert run.collectives().typical_step == 1
    headline = critical_headline(run.critical())
    assert headline.startswith("The critical path of median length, 36.0 µs in step 0, counted from its first ")
    assert "typical" not in headline


def test_where_few_paths_have_a_collective_their_number_is_told(tmp_path: Path) -> None:
    """As where gradients are accumulated over four steps: 'no collective is on it' was all, of a step that has none."""
    (run,) = load_runs(write_capture(tmp_path / "x.sqlite", bucket_steps(12, 12, 20, 12)))
    critical = run.critical()
    none = tuple(replace(path, collectives=()) for path in critical.steps)
    assert critical_headline(replace(critical, steps=none)).endswith(": no collective is on it.")
    some = tuple(path if path.step == 2 else replace(path, collectives=()) for path in critical.steps)
    assert critical_headline(replace(critical, steps=some)).endswith(": no collective is on it; 1 of 4 paths has one.")


def test_what_a_collective_gains_without_its_peers_counts_waiting_for_them(tmp_path: Path) -> None:
    """As of a pipeline's receive, which is never matched: it would end 8.07 ms earlier without delay of the peer."""
    (run,) = load_runs(write_capture(tmp_path / "x.sqlite", bucket_steps(12, 20, 30)))
    critical = run.critical()
    alone = "If its collective 0 took no time and waited for no peer, it would end 10.0 µs earlier."
    assert critical_headline(critical).endswith(alone)
    (known,) = critical.median.collectives
    path = replace(critical.median, collectives=(replace(known, is_matched=True),))
    assert critical_headline(replace(critical, steps=(path,))).endswith(alone.replace(" and waited for no peer", ""))


def test_of_how_many_collectives_the_gain_is_not_known_is_told(tmp_path: Path) -> None:
    (run,) = load_runs(write_capture(tmp_path / "x.sqlite", bucket_steps(12, 20, 30)))
    critical = run.critical()
    first, *others = critical.steps
    unknown = replace(first, collectives=tuple(replace(one, gain_ns=None) for one in first.collectives))
    said = [critical_view(run.analysis(), replace(critical, steps=(one, *others))).notes for one in (first, unknown)]
    note = "what collectives would gain is not known: 1 of 3 on the paths is not found on the other ranks"
    assert [note in notes for notes in said] == [False, True]
    assert not any("would gain is not known" in text for text in said[0])
