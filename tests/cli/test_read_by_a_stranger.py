"""Sentences and tables that a reader could refute with the figures beside them, each on a small capture."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_reported import (
    AUTOGRAD,
    MAIN,
    PHASES,
    STEP,
    USUAL,
    job,
    lost_first,
    open_range,
    overlong,
    step,
    usual,
    without_times,
)
from tests.command_line import csv_rows, run
from tests.kineto_factory import event, write_kineto
from tests.nsys_factory import COPY, KERNEL, NCCL, US, Capture, Kernel, Range, write_capture


def text_of(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code in (0, 3), result.stderr
    return re.sub(r"\s+", " ", result.stdout)


def document_of(*arguments: object) -> Any:
    return json.loads(run(*arguments, "--format", "json").stdout)


def silent_nccl(folder: Path) -> Path:
    """NCCL's ranges without its kernels."""
    work = tuple(one for one in USUAL if one[0] != NCCL)
    capture = job(*(step(index, work, (*PHASES, ("nccl:all_reduce", 300, 310))) for index in range(3)))
    return write_capture(folder / "silent.sqlite", capture)


def graphs_alone(folder: Path) -> Path:
    """CUDA graphs that were recorded whole, and a kernel between them."""
    capture = job(*(step(index, (("graph", 20, 600, 7, 10, MAIN), USUAL[-1]), ()) for index in range(3)))
    capture.kernels = [replace(one, kind="graph") if one.name == "graph" else one for one in capture.kernels]
    return write_capture(folder / "graphs.sqlite", capture)


@pytest.mark.parametrize("make", [silent_nccl, graphs_alone])
def test_what_was_not_recorded_is_no_zero_and_no_clean_bill(make: Any, tmp_path: Path) -> None:
    trace = make(tmp_path)
    for options in ((), ("--steps",)):
        for row in csv_rows("overlap", *options, trace):
            assert (row["comm_ms"], row["overlapped_ms"], row["exposed_ms"]) == ("", "", "")
    (rank,) = document_of("overlap", trace)["ranks"]
    assert (rank["comm_ns"], rank["overlap_ratio"]) == (0, None), "sums over a rank are of what was recorded"
    for one in rank["steps"]:
        assert (one["comm_ns"], one["overlapped_ns"], one["exposed_ns"]) == (None, None, None)
    assert "no communication was overlapped" not in text_of("kernels", trace)
    assert "overlapped time not known" in text_of("kernels", trace)
    told = "all rules about communication"
    assert told in [one["rule"] for one in document_of("doctor", trace)["abstained"]]
    assert f"not decided: {told}" in text_of("doctor", trace)


def test_a_job_that_does_not_communicate_has_zeros_and_a_clean_bill(tmp_path: Path) -> None:
    work = tuple(one for one in USUAL if one[0] != NCCL)
    trace = write_capture(tmp_path / "x.sqlite", job(*(step(index, work) for index in range(3))))
    assert {row["comm_ms"] for row in csv_rows("overlap", trace)} == {"0.0"}
    assert "no communication was overlapped" in text_of("kernels", trace)
    assert "all rules about communication" not in text_of("doctor", trace)


def test_a_training_without_phases_has_no_clean_bill(tmp_path: Path) -> None:
    """All is launched by one thread, and no range names backward: nothing tells what reduces gradients."""
    work = tuple((*one[:5], MAIN) for one in USUAL)
    told = "not decided: all rules about gradients: the trace does not tell what backward launched"
    for phases, is_told in (((), True), (PHASES, False)):
        trace = write_capture(tmp_path / "x.sqlite", job(*(step(index, work, phases) for index in range(3))))
        assert (told in text_of("doctor", trace)) == is_told
        trace.unlink()


def test_a_program_that_calls_mpi_is_not_said_to_work_alone(tmp_path: Path) -> None:
    work = tuple(one for one in USUAL if one[0] != NCCL)
    capture = job(*(step(index, work) for index in range(3)))
    capture.ranges.append(Range("MPI_Send", 500 * US, 520 * US, MAIN))
    trace = write_capture(tmp_path / "x.sqlite", capture)
    said = text_of("summary", trace)
    assert "works alone" not in said
    assert "only calls of MPI communicate in this trace" in said
    capture.ranges[-1] = Range("MPI_Init", 500 * US, 520 * US, MAIN)
    assert "works alone" in text_of("summary", write_capture(tmp_path / "y.sqlite", capture))


def test_one_step_has_no_spread(tmp_path: Path) -> None:
    (one,) = document_of("compare", write_capture(tmp_path / "x.sqlite", usual(1)))["variants"]
    assert (one["step_ns"], one["step_spread_ns"]) == (STEP * US, None)
    (several,) = document_of("compare", write_capture(tmp_path / "y.sqlite", usual(3)))["variants"]
    assert several["step_spread_ns"] == 0
    text = run("compare", tmp_path / "x.sqlite", write_capture(tmp_path / "z.sqlite", usual(1))).stdout
    assert "no part of it changed; too few steps for a spread" in text
    assert "within the spread" not in text.replace("a smaller change is within the spread", "")


def test_collectives_on_the_stream_of_compute_are_not_a_late_host(tmp_path: Path) -> None:
    """Compute 570 us, collectives 310, and 120 of the host after them: the host delays the step by 120 at most."""
    work = (("gemm", 2, 252, 7, 1, MAIN), (NCCL, 252, 562, 7, 2, MAIN), ("gemm", 562, 882, 7, 3, MAIN))
    trace = write_kineto(tmp_path / "x.json", job(*(step(index, work, ()) for index in range(5))))
    found = {one["rule"]: one["cost_ns"] for one in document_of("doctor", trace)["findings"]}
    assert found == {"communication on the compute stream": 310 * US}


def sized(folder: Path, *counts: int, rank: int = 0, op: str = "allreduce") -> Path:
    """A step each with a collective of so many floats, in a job of two ranks."""
    events = []
    for number, count in enumerate(counts, 1):
        at = (10 + STEP * number) * US
        about = {"Collective name": op, "In msg nelems": count, "dtype": "Float", "Group size": 2}
        of_device = {"correlation": number, "stream": 20, "device": rank}
        events += [
            event("user_annotation", f"ProfilerStep#{number}", at, at + STEP * US, 1, 1),
            event("cuda_runtime", "cudaLaunchKernel", at + 5 * US, at + 6 * US, 1, 1, correlation=number),
            event("kernel", NCCL, at + 50 * US, at + 500 * US, rank, 20, **of_device, **about),
        ]
    return write_kineto(folder / f"job.rank{rank}.json", Capture(), rank=rank, others=events)


def test_rows_of_buckets_can_be_told_apart_in_a_narrow_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of one position and other sizes in other steps."""
    monkeypatch.setenv("COLUMNS", "40")
    said = run("collectives", "--by", "bucket", sized(tmp_path, 1000, 2000, 3000)).stdout
    assert re.findall(r" (4000|8000|12000) ", said) == ["4000", "8000", "12000"], said


def test_without_a_backward_nothing_is_said_to_be_no_tail(tmp_path: Path) -> None:
    work = (("gemm", 20, 200, 7, 10, MAIN), (NCCL, 100, 300, 20, 50, MAIN), ("adam", 300, 400, 7, 60, MAIN))
    capture = job(*(step(index, work, (("forward", 5, 100),)) for index in range(3)))
    capture.threads.clear()
    trace = write_capture(tmp_path / "x.sqlite", capture)
    for by in ("collective", "step", "bucket"):
        for row in csv_rows("collectives", "--by", by, trace):
            assert (row["when_tail_ms"], row["when_backward_ms"]) == ("", "")
            assert float(row["exposed_ms"]) > 0
    assert {row["when_tail_ms"] for row in csv_rows("collectives", write_capture(tmp_path / "y.sqlite", usual(3)))} == {
        "0.2"
    }


def test_idle_and_exposed_time_have_one_share_each(tmp_path: Path) -> None:
    """The share of the typical step is not that of the medians, so a second one contradicts the first."""
    work = tuple((what, start // 10, end // 10, *more) for what, start, end, *more in USUAL)
    steps = [step(index, tuple((a, b, c, d, e // 10, f) for a, b, c, d, e, f in work)) for index in range(5)]
    idle = document_of("summary", write_capture(tmp_path / "x.sqlite", job(*steps)))["runs"][0]["idle"]
    assert "longer than communication is exposed" in idle
    assert len(re.findall(r"\d %", idle)) == 1, idle


def test_sizes_that_differ_between_ranks_are_not_those_of_the_first(tmp_path: Path) -> None:
    for rank, count in enumerate((1000, 2_000_000)):
        sized(tmp_path, *[count] * 3, rank=rank, op="all_to_allv")
    said = document_of("summary", tmp_path)["runs"][0]["cause"]
    assert "iB" not in said, said


def test_a_launch_that_lasts_is_not_called_queued_work(tmp_path: Path) -> None:
    """A call may take milliseconds, to load a module: its work is not queued meanwhile."""
    work = (*USUAL[:3], ("adam", 850, 900, 7, 510, MAIN))
    said = text_of("kernels", write_capture(tmp_path / "x.sqlite", job(*(step(index, work) for index in range(3)))))
    assert "from the beginning of the call that launched the next work" in said
    assert "was queued but had not started" not in said


def test_durations_of_collectives_that_run_at_once_are_called_sums(tmp_path: Path) -> None:
    work = (*USUAL, (NCCL, 410, 790, 21, 301, MAIN))
    both = write_capture(tmp_path / "x.sqlite", job(*(step(index, work) for index in range(3))))
    note = "durations are summed over collectives that may run at once"
    assert note in text_of("collectives", "--by", "step", both)
    assert note not in text_of("collectives", "--by", "step", write_capture(tmp_path / "y.sqlite", usual(3)))


def test_a_requirement_that_no_rank_can_judge_was_decided_by_none(tmp_path: Path) -> None:
    two = [
        step(index, tuple(one for one in USUAL if one[0] != NCCL), process=process)
        for index in range(3)
        for process in (100, 200)
    ]
    trace = write_capture(tmp_path / "x.sqlite", job(*two))
    (row,) = csv_rows("check", "--max-tail-ms", "1", trace)
    assert (row["verdict"], row["decided_by"]) == ("unknown", "all ranks")


def test_a_gate_has_the_ranks_that_are_given_and_speaks_of_no_figures_that_it_lacks() -> None:
    """A trace of 1 of 2 ranks was decided by 'all ranks', and 'the worst rank' by 'medians over all ranks'."""
    traces = Path(__file__).parents[2] / "traces"
    (row,) = csv_rows("check", "--all-ranks", traces / "h200/gloo/bucketed_1mb.rank0.json.gz")
    assert (row["measured"], row["limit"], row["decided_by"]) == ("1", "2", "1 of 2 ranks")
    differ, medians = "ranks differ: rank 0 exposes", "figures per step are medians over the steps of all ranks"
    for command, says_medians in ((["check", "--max-exposed-ms", "50"], False), (["overlap"], True)):
        text = text_of(*command, traces / "bucketed_1mb.sqlite")
        assert (differ in text, medians in text) == (True, says_medians)


def test_a_gate_against_a_baseline_alone_speaks_of_no_worst_rank() -> None:
    """'the worst rank decides' stood under two requirements that medians over all ranks decide."""
    traces = Path(__file__).parents[2] / "traces"
    against = ("--baseline", traces / "naive.sqlite", traces / "flat.sqlite")
    for limits, says_worst in (([], False), (["--max-exposed-ms", "50"], True)):
        assert ("the worst rank decides" in text_of("check", *limits, *against)) == says_worst


def test_a_skew_that_is_not_known_is_not_drawn(tmp_path: Path) -> None:
    """The page had two empty charts under 'The skew is not known'."""
    trace = Path(__file__).parents[2] / "traces/h200/gloo/naive.rank0.json.gz"
    drawn = run("skew", trace, "--html", tmp_path / "skew.html")
    assert (drawn.exit_code, (tmp_path / "skew.html").exists()) == (1, False)
    assert drawn.stderr.count("at least two ranks of a run are needed") == 1


def test_parts_of_a_window_stand_beside_the_window(tmp_path: Path) -> None:
    (row, *_) = csv_rows("overlap", "--steps", write_capture(tmp_path / "x.sqlite", usual(3)))
    names = list(row)
    after = names[names.index("window_ms") + 1 :][:5]
    assert after == ["compute_only_ms", "overlapped_ms", "exposed_ms", "exposed_memory_ms", "idle_ms"]
    assert sum(float(row[name]) for name in after) == pytest.approx(float(row["window_ms"]))


def test_a_host_that_may_have_waited_hid_nothing_that_is_known(tmp_path: Path) -> None:
    """Of gloo in a phase it is not known whether the host computed meanwhile: no command tells what was overlapped."""
    process = Range("process|rank=0|world=2|variant=overlap|backend=gloo|device=cpu", 0, 900, 1, domain="ddp_prof")
    step_range = Range("step|index=0", 10, 800, 1, domain="ddp_prof")
    phases = [Range("forward", 20, 100, 1, domain="ddp_prof"), Range("backward", 100, 500, 1, domain="ddp_prof")]
    collective = Range("all_reduce|bucket=0|bytes=8|params=1", 300, 700, 2, domain="ddp_prof")
    capture = Capture(ranges=[process, step_range, *phases, collective])
    trace = write_capture(tmp_path / "x.sqlite", capture)
    (rank,) = document_of("overlap", trace)["ranks"]
    (one,) = document_of("collectives", trace)["collectives"]
    names = ("overlapped_ns", "exposed_ns")
    assert [rank[name] for name in names] == [one[name] for name in names] == [None, None]
    assert (rank["comm_ns"], rank["compute_ns"]) == (400, None)
    (step_found,) = rank["steps"]
    assert {step_found[name] for name in (*names, "tail_ns")} == {None}
    assert (step_found["compute_only_ns"], step_found["idle_ns"]) == (280, 110)
    assert document_of("kernels", trace)["ranks"][0]["overlapped_ns"] is None


def test_collectives_that_take_no_time_are_of_unknown_length(tmp_path: Path) -> None:
    work = tuple((what, start, start if what == NCCL else end, *more) for what, start, end, *more in USUAL)
    steps = [step(index, tuple((a, b, c, d, e, f) for a, b, c, d, e, f in work)) for index in range(3)]
    trace = write_capture(tmp_path / "x.sqlite", job(*steps))
    (rank,) = document_of("overlap", trace)["ranks"]
    figures = [rank, *rank["steps"], *document_of("collectives", trace)["collectives"]]
    assert {one[name] for one in figures for name in ("overlapped_ns", "exposed_ns")} == {None}
    assert rank["collectives"] == 3


def test_shares_of_a_step_stand_beside_its_length(tmp_path: Path) -> None:
    """The median of two steps of 1000 and 1100 us is no step: shares of it would be of another length."""
    longer = step(1, USUAL)
    longer.kernels[-1] = replace(longer.kernels[-1], end=longer.kernels[-1].end + 90 * US)
    longer.ranges[0] = replace(longer.ranges[0], end=(longer.ranges[0].end or 0) + 100 * US)
    trace = write_capture(tmp_path / "x.sqlite", job(step(0), longer, step(3), step(4, late=50)))
    (found,) = document_of("summary", trace)["runs"]
    said = text_of("summary", trace)
    (beside,) = re.findall(r"(\S+) ms: compute alone", said)
    assert beside == f"{found['nearest_step_ns'] / 1e6:.2f}", said


DAMAGED = {
    "16 of 16 launches in them have no activity": lost_first,
    "an activity in it has an impossible start or end": overlong,
    "have no start and are left out": without_times,
    "still open when the recording ended": open_range,
}


@pytest.mark.parametrize("told", DAMAGED)
def test_the_short_answer_tells_what_was_recorded_wrongly(told: str, tmp_path: Path) -> None:
    """What was chosen or inferred is left to the notes; of what is damaged the answer speaks itself."""
    path = tmp_path / "x.json"
    assert told in text_of("summary", write_kineto(path, DAMAGED[told]()))
    said = text_of("summary", write_capture(tmp_path / "y.sqlite", usual()))
    assert "blocking" in said
    assert "note" in said
    assert " notes " not in said


def test_the_short_answer_tells_what_its_figures_stand_for() -> None:
    """24.8 ms per step are exposed on neither rank; and of which step 14 % are exposed, where 13 % are."""
    said = text_of("summary", "traces/bucketed_10mb.sqlite")
    assert "24.8 ms of a 191.9 ms step (13 %) is exposed" in said
    assert "ranks differ: rank 0 exposes 30.7 ms per step, rank 1 15.2 ms" in said
    assert "step typical, 187.7 ms: compute alone 61 %, overlapped 25 %, exposed 14 %" in said


def test_the_short_answer_tells_the_median_beside_a_typical_step_of_another_length() -> None:
    """'30.4 ms of a 202.2 ms step' stood above 'typical, 213.6 ms', and no word why these differ."""
    said = text_of("summary", "traces/bucketed_1mb.sqlite")
    assert " of a 202.2 ms step (" in said
    assert "step typical, 213.6 ms (median 202.2 ms): compute alone 55 %" in said


def test_the_short_answer_tells_of_a_rank_that_is_in_no_figure(tmp_path: Path) -> None:
    silent = job(*(step(index, tuple(one for one in USUAL if one[0] != NCCL)) for index in range(5)))
    files = [write_capture(tmp_path / f"x.rank{rank}.sqlite", one) for rank, one in enumerate((usual(), silent))]
    assert "no overlap figure: nothing in this trace is known to communicate" in text_of("summary", "--one-run", *files)


def test_a_process_that_only_computes_beside_the_ranks_lost_no_kernels(tmp_path: Path) -> None:
    """'No NCCL kernel was recorded, although ranges name collectives' was said of one that decodes images.

    Those ranges are the rank's. Without them, 'nothing in this trace communicates' was said, though the rank does.
    """
    for with_ranges in (True, False):
        capture = usual()
        capture.kernels += [
            Kernel("decode_jpeg", at * US, at * US + 50 * US, at * US - 9 * US, 900, process=900, device=1)
            for at in range(100, 5000, 400)
        ]
        if with_ranges:
            capture.ranges.append(Range("nccl:all_reduce", 300 * US, 320 * US, AUTOGRAD))
        path = write_capture(tmp_path / f"x{with_ranges}.sqlite", capture)
        said = text_of("summary", "--notes", path)
        assert "process 900: no overlap figure: nothing of this process is known to communicate" in said
        assert "ranges name collectives" not in said
        assert "nothing in this trace" not in said
        reasons = {one["process"]: one["reason"] for one in document_of("overlap", path)["ranks"]}
        assert reasons == {100: None, 900: "nothing of this process is known to communicate"}


def test_a_device_that_only_computes_beside_one_that_communicates_lost_no_kernels(tmp_path: Path) -> None:
    """The critical path was not known: 'no NCCL kernel was recorded'.

    The ranges are the process's, and its other device has their kernels. Nor does 'nothing in this trace' communicate.
    """
    capture = usual()
    capture.kernels += [
        Kernel("second_half", at * US, at * US + 50 * US, at * US - 9 * US, AUTOGRAD, stream=17, device=1)
        for at in range(100, 5000, 400)
    ]
    capture.ranges.append(Range("nccl:all_reduce", 300 * US, 320 * US, AUTOGRAD))
    path = write_capture(tmp_path / "x.sqlite", capture)
    said = text_of("summary", "--notes", path)
    assert "device 1 of process 100: no overlap figure: nothing of this device is known to communicate" in said
    for command in ("summary", "critical", "compare"):
        assert "ranges name collectives" not in text_of(command, path)
    assert document_of("compare", "--waterfall", path)["waterfall"]["budgets"]


@pytest.mark.parametrize("command", ["summary", "overlap", "collectives", "doctor", "info", "check"])
def test_steps_that_were_cut_off_are_marked_though_none_is_whole(command: str, tmp_path: Path) -> None:
    """'The trace marks no steps' stood beside '5 ranges that could be steps left out: still open'.

    'Recognized: step as 'step 0'' stood beside 'no range that looks like a step'.
    """
    cut = usual()
    cut.ranges = [replace(one, end=None) for one in cut.ranges]
    more = ("--max-tail-ms", "1") if command == "check" else ()
    said = text_of(command, write_capture(tmp_path / "x.sqlite", cut), *more)
    assert "ranges that could be steps left out: still open when the recording ended" in said
    told = {"info": "none of those that are marked was recorded from its begin", "summary": "marked from begin to end"}
    assert told.get(command, "whole step") in said
    for claim in (
        "marks no step",
        "no steps are marked (",
        "no steps in this trace",
        "no range that looks like a step",
    ):
        assert claim not in said


class TestActivitiesWithoutANumberOfADevice:
    """'Process 200 use a device -1', and 'device -1 of process 100 only copies: it is no rank, and left out'."""

    @staticmethod
    def written(path: Path, *without: str) -> Path:
        """Two processes on one device each; the first also copies. ``without``: tables that lack the device."""
        capture = usual()
        capture.kernels += [replace(one, process=200, thread=one.thread + 100) for one in capture.kernels]
        capture.ranges += [replace(one, process=200, thread=one.thread + 100) for one in capture.ranges]
        capture.kernels.append(Kernel("x", 450 * US, 480 * US, 440 * US, MAIN, stream=9, kind="memcpy", copy_kind=1))
        write_capture(path, capture)
        with closing(sqlite3.connect(path)) as database, database:
            for table in without:
                database.execute(f"UPDATE {table} SET deviceId = NULL")
        return path

    def test_copies_are_on_the_only_device_that_the_process_uses(self, tmp_path: Path) -> None:
        whole, lacking = (
            self.written(tmp_path / f"{folder}.sqlite", *without) for folder, without in (("x", ()), ("y", (COPY,)))
        )
        assert csv_rows("overlap", lacking)[0] | {"run": "x"} == csv_rows("overlap", whole)[0]
        assert "only copies" not in text_of("summary", "--notes", lacking)

    def test_no_device_is_made_up(self, tmp_path: Path) -> None:
        path = self.written(tmp_path / "x.sqlite", KERNEL, COPY)
        for command in ("summary --notes", "overlap --wide", "kernels", "info --wide", "skew"):
            said = text_of(*command.split(), path)
            assert " -1" not in said
            assert "they share one" not in said
        assert "activities have no number of a device: those of a process are taken for" in text_of("overlap", path)
        for command in ("overlap", "kernels"):
            assert [one["device"] for one in document_of(command, path)["ranks"]] == [None, None]
        assert all("GPU -1" not in one["args"].get("name", "") for one in perfetto_events(path, tmp_path))


def perfetto_events(trace: Path, folder: Path) -> list[dict[str, Any]]:
    run("export", trace, "-o", folder / "out.json")
    return [one for one in json.loads((folder / "out.json").read_text())["traceEvents"] if one["ph"] == "M"]


def test_of_two_devices_of_which_one_copies_to_the_other_something_communicates(tmp_path: Path) -> None:
    """As in DataParallel: beside 'gain no more than 2.00 ms' nothing in the trace was known to communicate."""
    capture = usual()
    own = [one for one in capture.kernels if one.name != NCCL]
    on_other = [replace(one, device=1, stream=8) for one in own if one.kind == "kernel"]
    copies = [
        Kernel("x", at * US, (at + 50) * US, (at - 9) * US, MAIN, stream=9, device=1, kind="memcpy", copy_kind=10)
        for at in range(900, 5000, 1000)
    ]
    path = write_capture(tmp_path / "x.sqlite", replace(capture, kernels=[*own, *on_other, *copies]))
    assert "peer_copy" in text_of("collectives", "--by", "collective", path)
    for command in ("summary --notes", "whatif", "doctor", "overlap"):
        assert "nothing in this trace" not in text_of(*command.split(), path)
