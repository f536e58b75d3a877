"""A figure does not depend on the command that prints it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.present.timeline.build import build_timeline
from ddp_prof.present.timeline.model import WAITING
from ddp_prof.runs import load_runs
from ddp_prof.runs.run import timeline_sources
from tests.command_line import csv_rows, run
from tests.conftest import ROOT
from tests.night import one_of_each_kind
from tests.nsys_factory import NCCL, US, Capture, Kernel, Range, Sync, bucket_steps, write_capture
from tests.nsys_factory import STEP_NS as STEP_OF_BUCKET

KERNELS, STEPS, STEP_NS = 12, 8, 100_000


def contended(factor: float) -> Capture:
    """Twelve kernels of one name a step, the n-th of 1,000 + 100 n ns; beside most of them a collective in even steps.

    Beside it they take 1.3 times as long. In odd steps one of another launch shape comes first, so that only who knows
    shapes compares the n-th with the n-th. All lengths are multiplied by ``factor``.
    """
    found = Capture(threads={(100, 100): "python3", (100, 131): "pt_autograd_0"})
    for step in range(STEPS):
        time, launch = step * STEP_NS + 1000, step * STEP_NS + 900

        def kernel(length: float, grid: int = 64) -> None:
            nonlocal time, launch
            launch += 5
            end = time + round(factor * length)
            found.kernels.append(Kernel("gemm", time, end, launch, 131, grid=grid))
            time = end

        communicates = step % 2 == 0
        kernel(200, 64 if communicates else 7)
        if communicates:
            found.kernels.pop()
        start = time
        for position in range(KERNELS):
            kernel((1000 + 100 * position + 10 * (step % 3)) * (1.3 if communicates and position < 9 else 1))
            if communicates and position == 8:
                comm = Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", start, time, launch + 1, 131, stream=9)
                found.kernels.append(comm)
        found.ranges.append(Range(f"step_{step}", step * STEP_NS + 900, time + 100, 100))
    return found


@pytest.fixture
def before_and_after(tmp_path: Path) -> list[Path]:
    return [write_capture(tmp_path / f"{name}.sqlite", contended(by)) for name, by in (("old", 1), ("new", 1.5))]


def test_a_gate_says_what_compare_says(before_and_after: list[Path]) -> None:
    """It read no launch shapes, so that its contention was another one."""
    compared = json.loads(run("compare", "--format", "json", *before_and_after).stdout)
    assert [budget["contention"]["slowdown"] for budget in compared["waterfall"]["budgets"]] == pytest.approx(
        [1.3] * 2, abs=0.01
    )
    title = next(line for line in run("compare", *before_and_after).stdout.splitlines() if line.startswith("from old"))
    checked = run("check", before_and_after[1], "--baseline", before_and_after[0], "--format", "json")
    notes = json.loads(checked.stdout)["warnings"]
    said = [note.partition("new, mean step against the baseline: ")[2] for note in notes]
    assert title == f"from old to new, mean step: {'; '.join(filter(None, said))}"
    assert "contention +" in title


def test_a_notebook_tells_kernels_apart_as_the_command_does(before_and_after: list[Path]) -> None:
    """Whatever was asked of the run before."""
    told = json.loads(run("kernels", "--top", "0", "--format", "json", before_and_after[0]).stdout)["kernels"]
    for measures in ((), ("overlap",)):
        (loaded,) = load_runs(before_and_after[0], measures=measures)
        loaded.overlap()
        found = loaded.device_use().kernels
        assert [(kernel.shape, kernel.count) for kernel in found] == [(row["shape"], row["count"]) for row in told]
        assert len({kernel.shape for kernel in found}) == 2


def beyond_steps(capture: Capture) -> Capture:
    """The same with one more all-reduce after the last step, for which a copy waits for 6 us."""
    at = len(capture.ranges) * STEP_OF_BUCKET
    capture.kernels += [
        Kernel(NCCL, at + 10 * US, at + 11 * US, at + 300, 100, stream=20, number=904),
        Kernel("other", at + 1 * US, at + 5 * US, at + 500, 100, number=906),
        Kernel("copy back", at + 11 * US, at + 13 * US, at + 700, 100, kind="memcpy", number=908),
    ]
    capture.syncs += [
        Sync("cudaEventRecord_v3020", at + 400, 905, 20, event=5, sync_id=900),
        Sync("cudaStreamWaitEvent_v3020", at + 600, 907, 7, event=5, sync_id=900),
    ]
    return capture


def in_text(text: str) -> str:
    (found,) = re.findall(r"stands still for communication for ([0-9.]+ .s)", text)
    return str(found)


def test_all_commands_say_the_same_of_blocking(tmp_path: Path) -> None:
    of_steps = [10 * US, 0, 13 * US, 20 * US, 12 * US]
    trace = write_capture(tmp_path / "x.sqlite", beyond_steps(bucket_steps(20, 4, 23, 30, 22)), "2023.4")
    typical, total = 12 * US, 61 * US

    def read_json(*command: str) -> Any:
        return json.loads(run(*command, trace, "--format", "json").stdout)

    def blocking_ms(*command: str) -> list[float]:
        return [float(row["blocking_ms"]) for row in csv_rows(*command, trace)]

    (rank,) = read_json("overlap")["ranks"]
    assert [step["blocking_ns"] for step in rank["steps"]] == of_steps
    assert rank["blocking_ns"] == total
    assert blocking_ms("overlap") == [total / 1e6]
    assert blocking_ms("overlap", "--steps") == [ns / 1e6 for ns in of_steps]

    of_collectives = read_json("collectives")["collectives"]
    assert {one["step"]: one["blocking_ns"] for one in of_collectives} == dict(enumerate(of_steps)) | {None: 6 * US}
    assert blocking_ms("collectives") == [ns / 1e6 for ns in [6 * US, *of_steps]], "that of no step comes first"

    (variant,), (summary,) = read_json("compare")["variants"], read_json("summary")["runs"]
    assert (variant["blocking_ns"], variant["blocked_steps"]) == (typical, 4)
    assert summary["blocking_ns"] == typical
    assert blocking_ms("compare") == [typical / 1e6]
    for percentile, expected in ((50, typical), (100, 20 * US)):
        checked = read_json("check", "--max-blocking-ms", "1", "--percentile", str(percentile))
        assert checked["runs"][0]["verdicts"][0]["measured"] == expected

    said = {
        in_text(run(*command, trace).stdout) for command in (("summary", "--notes"), ("overlap",), ("collectives",))
    }
    assert said == {"12.0 µs"}

    (loaded,) = load_runs(trace)
    assert loaded.overlap().to_frame().blocking_ns.tolist() == [total]
    assert loaded.collectives().to_frame().blocking_ns.tolist() == [6 * US, *of_steps]
    (drawn,) = build_timeline(timeline_sources([loaded])).panels[0].ranks
    boxes = next(lane for lane in drawn.lanes if lane.kind == WAITING).boxes
    assert (boxes.end_ns - boxes.start_ns).tolist() == [ns for ns in [*of_steps, 6 * US] if ns]


def test_no_command_makes_a_number_of_what_is_not_known(tmp_path: Path) -> None:
    capture = beyond_steps(bucket_steps(20, 4, 23, has_event_records=False))
    trace = write_capture(tmp_path / "x.sqlite", capture, "2024.6")
    numbers = []
    for command in ("overlap", "collectives", "compare", "summary", "critical"):
        text = run(command, trace, "--format", "json").stdout
        numbers += re.findall(r'"(?:blocking|slack|gain(?:_at_most)?)_ns": ([^,}]+)', text)
        assert "stands still" not in text
    assert set(numbers) == {"null"}
    for command in ("overlap", "collectives", "compare"):
        assert {row["blocking_ms"] for row in csv_rows(command, trace)} == {""}
    checked = run("check", trace, "--max-blocking-ms", "0.001", "--format", "json")
    (verdict,) = json.loads(checked.stdout)["runs"][0]["verdicts"]
    assert (checked.exit_code, verdict["measured"], verdict["status"]) == (3, None, "unknown")


FOREIGN = ROOT.parent / "shared" / "traces"
CAPTURES = [
    *sorted((ROOT / "traces").glob("*.sqlite")),
    *sorted(FOREIGN.glob("*.gz")),
    *sorted(FOREIGN.glob("*.sqlite")),
]


def test_a_csv_file_of_kernels_has_all_of_json() -> None:
    """It held 15 of 71, which only stderr said."""
    trace = Path(__file__).parents[2] / "traces" / "h200" / "nccl" / "torch.sqlite"
    kernels = json.loads(run("kernels", "--format", "json", trace).stdout)["kernels"]
    assert len(run("kernels", "--format", "csv", trace).stdout.splitlines()) == 1 + len(kernels) > 16
    assert len(run("kernels", "--format", "csv", "--top", "3", trace).stdout.splitlines()) == 1 + 3


@pytest.mark.slow
@pytest.mark.parametrize("trace", one_of_each_kind(CAPTURES), ids=lambda path: path.name)
def test_what_two_commands_print_is_one_figure(trace: Path) -> None:
    """Steps, collectives, times and shares of overlap, collectives, kernels, info, compare, summary and check."""

    def document(command: str, *options: str) -> Any:
        return json.loads(run(command, *options, "--format", "json", trace).stdout)

    if "record " in (refused := run("overlap", trace)).stderr and refused.exit_code == 1:
        pytest.skip("a trace of another program")
    ranks = {(rank["process"], rank["device"]): rank for rank in document("overlap")["ranks"]}
    collectives, kernels = document("collectives"), document("kernels", "--top", "0")
    (compared,), (summary,) = document("compare")["variants"], document("summary")["runs"]
    steps = [sum(step["host_ns"] is not None for step in rank["steps"]) for rank in ranks.values()]
    assert sorted(process["steps"] for process in document("info")["processes"]) == sorted(steps)
    assert compared["steps"] == summary["steps"] == max(steps)
    (_, profiler, *_), (_, of_info, *_) = (run(command, trace).stdout.split(" · ") for command in ("kernels", "info"))
    assert of_info == profiler, "'kineto' and 'nsys-sqlite' are no names of profilers"
    for key, rank in ranks.items():
        own = [one for one in collectives["collectives"] if (one["process"], one["device"]) == key]
        assert len(own) == rank["collectives"]
        assert sum(one["exposed_ns"] for one in own) == (rank["exposed_ns"] or 0)
        assert sum(part["ns"] for one in own for part in one["exposed_by"]) == (rank["exposed_ns"] or 0)
        if rank["reason"] is None and rank["steps"]:
            assert sum(step["exposed_ns"] for step in rank["steps"]) <= rank["exposed_ns"]
    hidden = {(one["process"], one["device"]): one["overlapped_ns"] for one in kernels["ranks"]}
    # A sum over nothing is 0 in `overlap`, also where communication was lost; `kernels` tells that as not known.
    lost = {key for key, rank in ranks.items() if rank["reason"] and not rank["comm_ns"] and hidden[key] is None}
    assert hidden == {key: None if key in lost else rank["overlapped_ns"] for key, rank in ranks.items()}
    for name in ("label", "step_ns", "comm_ns", "overlapped_ns", "exposed_ns", "blocking_ns"):
        assert summary[name] == compared[name], name
    known = [rank for rank in ranks.values() if rank["overlap_ratio"] is not None]
    if known and len(known) == len(ranks):
        share = sum(rank["overlapped_ns"] for rank in known) / sum(rank["comm_ns"] for rank in known)
        assert compared["overlap_ratio"] == pytest.approx(share)
    (checked,) = document("check", "--min-overlap", "0")["runs"]
    (verdict,) = checked["verdicts"]
    least = min((rank["overlap_ratio"] for rank in known), default=None)
    assert verdict["measured"] == (pytest.approx(least) if len(known) == len(ranks) and known else None)
