"""The log of a monitor, read by its commands."""

from __future__ import annotations

import gzip
import json
import math
from html import escape
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.errors import TraceError
from ddp_prof.monitor.log import MonitorLog, load_log
from ddp_prof.monitor.report import draw_course, find_restarts, monitor_view
from tests.command_line import csv_rows, run
from tests.monitor.records import MS, courses, record, write_log


def test_a_line_that_was_not_written_to_its_end_is_left_out_with_a_note(tmp_path: Path) -> None:
    log = write_log(tmp_path, [record(1), record(2)])
    log.write_text(log.read_text()[:-40])
    loaded = load_log(log)
    assert [one["step"] for one in loaded.records] == [1000]
    (note,) = loaded.notes
    assert note == f"{log}: left out 1 line without a record of a monitor: cut off, or of another version"
    compared = run("compare", write_log(tmp_path, [record(1)], "whole.jsonl"), log, "--format", "json").stdout
    assert note in json.loads(compared)["warnings"], "it names one of two"


@pytest.mark.parametrize(
    "wrong",
    [
        {"by_rank": None},
        {"by_rank": [{"rank": 0}]},
        {"step": "x"},
        {"step_ns": "12"},
        {"late": 7},
        {"failed": 3},
        {"step_ns": math.nan},
        {"step_ns": -5},
        {"exposed_ns": math.inf},
        {"step": 2**70},
        {"overhead_ns": math.nan},
    ],
)
def test_a_record_without_what_is_read_of_it_is_left_out(wrong: dict[str, Any], tmp_path: Path) -> None:
    """``check`` of a log whose ranks were cut out ended with a traceback."""
    log = write_log(tmp_path, [record(1), {**record(2), **wrong}])
    for command in (["monitor", log], ["check", "--max-exposed-ms", "15", log], ["compare", log, log]):
        done = run(*command)
        assert (done.exit_code, "left out 1 line" in done.stdout + done.stderr) == (0, True)
    assert len(json.loads(run("monitor", log, "--format", "json").stdout)["measurements"]) == 1


def test_a_log_that_was_rotated_joined_or_edited_is_read(tmp_path: Path) -> None:
    """``monitor.jsonl.1`` was taken for a trace; a measurement that was there twice was 'started again'."""
    older, newer = courses("............", 30, 0, "step"), courses("............############", 30, 60, "step")[8:]
    rotated, log = write_log(tmp_path, older, "monitor.jsonl.1"), write_log(tmp_path, newer)
    assert "steps are longer by 30.0 ms" in run("compare", rotated, log).stdout
    assert run("check", "--max-exposed-ms", "15", rotated).exit_code == 0
    (joined := tmp_path / "joined.jsonl").write_text(f"\ufeff{rotated.read_text()}{log.read_text()}")
    view = monitor_view(load_log(joined))
    assert view.title.startswith("From step 12000 on")
    assert [note for note in view.notes if "again" in note or "left out" in note] == [
        f"{joined}: left out 4 lines that the log has already"
    ]
    joined.write_text(log.read_text() + rotated.read_text())
    back = "time goes back at step 0 (2026-11-26 10:00:00Z): parts of a log in another order, or a clock that was set"
    assert back in monitor_view(load_log(joined)).notes
    joined.write_bytes(gzip.compress(log.read_bytes()))
    assert run("monitor", joined).stderr == f"Error: {joined}: compressed by gzip: unpack it first, as by gunzip\n"


@pytest.mark.parametrize("content", ["", "{}\n", "[1]\n", "\x00\xff", "{" * 100_000, '{"schema": 2, "step": 1}\n'])
def test_what_is_no_log_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    (log := tmp_path / "monitor.jsonl").write_bytes(content.encode("latin-1"))
    with pytest.raises(TraceError, match="no record of a monitor"):
        load_log(log)
    for command in (["monitor", log], ["check", "--max-exposed-ms", "5", log], ["compare", log, log]):
        done = run(*command)
        assert done.exit_code == 1
        assert done.stderr.count("\n") == 1


def test_a_missing_log_is_one_line(tmp_path: Path) -> None:
    """It did not say what to do, as it does of a trace."""
    done = run("monitor", missing := tmp_path / "none.jsonl")
    assert (done.exit_code, done.stderr) == (1, f"Error: {missing}: No such file or directory: check the path\n")


def test_of_a_folder_its_log_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r": a folder: give the monitor\.jsonl of a job"):
        load_log(tmp_path)


def test_the_course_names_what_changed_and_who_was_late(tmp_path: Path) -> None:
    records = courses("..........######..........", 10, 30)
    for at in range(10, 16):
        records[at]["late"] = record(at, late=(1, 20.0))["late"]
    log = write_log(tmp_path, records)
    said = run("monitor", log).stdout
    assert "From step 10000 on (2026-11-26 10:10:00Z): exposed 10.0 ms -> 30.0 ms" in said
    assert "From step 16000 on (2026-11-26 10:16:00Z): exposed 30.0 ms -> 9.95 ms" in said
    assert "Rank 1 is late from step 10000 (2026-11-26 10:10:00Z) to step 15000" in said
    document = json.loads(run("monitor", log, "--format", "json").stdout)
    assert [(change["figure"], change["step"]) for change in document["changes"]] == [
        ("exposed_ns", 10000),
        ("exposed_ns", 16000),
    ]
    assert document["late"] == [{"rank": 1, "lag_ns": 20 * MS, "first_step": 10000, "last_step": 15000}]
    rows = csv_rows("monitor", log)
    assert [row["step"] for row in rows] == [str(1000 * number) for number in range(26)]
    assert [row["late_rank"] for row in rows] == [""] * 10 + ["1"] * 6 + [""] * 10


def test_its_page_has_each_sentence_once_and_its_table_a_line_per_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page had the first sentence twice, once cut, and no other one; a time was broken within its seconds."""
    records = courses("............##########", 10, 30, "step")
    for at in range(4, 10):
        records[at]["late"] = record(at, late=(1, 20.0))["late"]
    log = load_log(write_log(tmp_path, records))
    sentences = run("monitor", log.file, "--html", tmp_path / "course.html").stdout.splitlines()[:2]
    assert [said.split(" step ")[0] for said in sentences] == ["From", "Rank 1 is late from"]
    assert f"<h1>{escape(sentences[0])}</h1>\n<p>{escape(sentences[1])}</p>" in (tmp_path / "course.html").read_text()
    # A chart's title is hidden where it is the page's heading; the second sentence is longer than a name may be.
    for chosen, said in ((records, sentences[0]), (records[:12], sentences[1])):
        title = draw_course(MonitorLog(log.file, tuple(chosen), ()))["layout"]["title"]["text"]
        assert title == f"<b>{escape(said)}</b>"
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("monitor", log.file).stdout.split("─\n")[1].splitlines()[:22]
    assert [line[:20] for line in lines] == [f"2026-11-26 10:{minute:02}:00Z" for minute in range(22)]


def test_a_change_at_which_the_job_got_other_ranks_is_said_to_be_of_another_job(tmp_path: Path) -> None:
    """A job that went on with twice the ranks was "step 50.0 ms -> 30.0 ms", and nothing else."""
    records = courses("............############", 50, 30, "step")
    more = [{**one, "world_size": 4 if at >= 12 else 2} for at, one in enumerate(records)]
    change = "From step 12000 on (2026-11-26 10:12:00Z): step 50.0 ms -> 30.0 ms"
    for log, differs in ((records, None), (more, "ranks 4 and 2")):
        file = write_log(tmp_path, log)
        other_job = f"; from there on it is another job: {differs}" if differs else ""
        assert run("monitor", file).stdout.splitlines()[0] == f"{change}{other_job}"
        (found,) = json.loads(run("monitor", file, "--format", "json").stdout)["changes"]
        assert found["other_job"] == differs


def test_few_measurements_are_told_to_show_few_changes(tmp_path: Path) -> None:
    """'too few to tell a change (14 are needed)', although 12 tell one where a single figure varies."""
    told = run("monitor", write_log(tmp_path, courses("....", 10, 30))).stdout
    assert told.startswith("No change found in 4 measurements: fewer than 14 rarely show one")
    assert "From step 6000 on" in run("monitor", write_log(tmp_path, courses("......######", 10, 30))).stdout
    assert "No change found in 14 measurements" in run("monitor", write_log(tmp_path, courses("." * 14, 10, 30))).stdout


def test_check_judges_each_measurement_by_its_worst_rank(tmp_path: Path) -> None:
    log = write_log(tmp_path, courses("...##...", 10, 30))
    passed = run("check", "--max-exposed-ms", "31", "--min-overlap", "40%", log)
    assert (passed.exit_code, passed.stdout.splitlines()[0]) == (
        0,
        "passed, 16 of 16 cases met (2 requirements, 8 measurements)",
    )
    failed = json.loads((done := run("check", "--max-exposed-ms", "20", "--format", "json", log)).stdout)
    assert done.exit_code == 3
    assert [one["step"] for one in failed["verdicts"] if one["verdict"] == "failed"] == [3000, 4000]


def test_a_verdict_says_log_unit_and_why(tmp_path: Path) -> None:
    """Times were ms, beside 20.00 of 20.00 stood 'failed', and of two logs neither a table nor a row said which."""
    (tmp_path / "b").mkdir()
    logs = [write_log(tmp_path, [record(1)]), write_log(tmp_path / "b", [record(1, exposed=20.004)])]
    limits = ("check", "--max-exposed-ms", "20", "--min-overlap", "0.4", *logs)
    done = run(*limits, "--format", "json")
    both = [one["verdicts"] for one in json.loads(done.stdout)]
    keys = ("requirement", "unit", "measured", "limit", "status", "reason", "rank")
    assert [one[key] for one in both[1] for key in keys[:5]] == [
        *("min overlap", "ratio", 0.4, 0.4, "passed"),
        *("max exposed", "ns", 20_004_000, 20_000_000, "failed"),
    ]
    assert {key for of_log in both for one in of_log for key in keys if key not in one} == set()
    titles = [f"{logs[0]}: passed, 2 of 2 requirements met", f"{logs[1]}: failed, 1 of 2 requirements not met"]
    assert done.stderr.splitlines() == titles
    assert [row["run"] for row in csv_rows(*limits)] == [str(logs[0])] * 2 + [str(logs[1])]
    assert csv_rows(*limits)[2]["why"] == "beyond the limit by less than the table shows"
    assert [line for line in run(*limits).stdout.splitlines() if line in titles] == titles
    assert run(*limits, "--format", "markdown").stdout.count("### ddp-prof check: ") == 2
    compared = json.loads(run("compare", *logs, "--format", "json").stdout)["logs"]
    assert [one["exposed_ns"] for one in compared] == [10_000_000, 20_004_000]


def test_what_one_rank_does_not_know_is_not_passed(tmp_path: Path) -> None:
    log = write_log(tmp_path, [record(1)])
    done = run("check", "--max-tail-ms", "6", "--format", "json", log)
    (verdict,) = json.loads(done.stdout)["verdicts"]
    why = "the known ranks meet the limit; not known of every rank"
    assert (done.exit_code, verdict["verdict"], verdict["why"]) == (3, "unknown", why)

    def title(*limits: str) -> str:
        return run("check", *limits, log).stdout.splitlines()[0]

    assert title("--max-tail-ms", "6") == "unknown, 1 of 1 requirement cannot be judged"
    both = "failed, 1 of 2 requirements not met, 1 cannot be judged"
    assert title("--max-tail-ms", "6", "--max-exposed-ms", "0.001") == both


def test_a_rank_without_a_result_is_not_passed(tmp_path: Path) -> None:
    """Its figures are in no row, so the others met each limit."""
    one = record(1)
    alone = write_log(tmp_path, [{**one, "by_rank": one["by_rank"][:1], "missing_ranks": [1]}])
    done = run("check", "--max-exposed-ms", "100", "--format", "json", alone)
    (verdict,) = json.loads(done.stdout)["verdicts"]
    why = "the known ranks meet the limit; not known of rank 1, which has no result"
    assert (done.exit_code, verdict["verdict"], verdict["why"]) == (3, "unknown", why)
    assert run("check", "--max-exposed-ms", "1", alone).stdout.startswith("failed, 1 of 1 requirement")


def test_logs_of_other_jobs_are_not_compared(tmp_path: Path) -> None:
    few = write_log(tmp_path, courses("............", 50, 0, "step"), "few.jsonl")
    slower = courses("............", 60, 0, "step")
    many = write_log(tmp_path, [{**one, "world_size": 8} for one in slower], "many.jsonl")
    gpu = write_log(tmp_path, [{**one, "device": "cuda"} for one in slower], "gpu.jsonl")
    assert "not compared: these are other jobs, ranks 8 and 2" in run("compare", few, many).stdout
    assert "steps are longer by 10.0 ms" in run("compare", few, gpu).stdout, "the device of one is not known"


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--all-ranks"],
        ["--max-cost-ms", "1"],
        ["--max-exposed-ms", "1", "--percentile", "90"],
        ["--max-exposed-ms", "1", "--max-regression", "5%"],
    ],
)
def test_check_refuses_what_a_log_cannot_tell(options: list[str], tmp_path: Path) -> None:
    assert run("check", *options, write_log(tmp_path, [record(1)])).exit_code == 2


def test_a_log_among_traces_is_refused(tmp_path: Path) -> None:
    assert run("compare", write_log(tmp_path, [record(1)]), tmp_path / "x.sqlite").exit_code == 2


def test_compare_tells_a_difference_beyond_both_intervals_only(tmp_path: Path) -> None:
    first = write_log(tmp_path, courses("............", 50, 0, "step"), "first.jsonl")
    same = write_log(tmp_path, courses("............", 50.02, 0, "step"), "same.jsonl")
    slower = write_log(tmp_path, courses("............", 60, 0, "step"), "slower.jsonl")
    said = run("compare", first, same, slower).stdout
    assert "same.jsonl against" in said
    assert said.splitlines()[0].split(": ")[1] == "cannot be told"
    assert "steps are longer by 10.0 ms" in said.splitlines()[1]


def test_of_a_log_whose_step_changed_what_came_since_is_compared(tmp_path: Path) -> None:
    """Medians were of both levels: 'steps are longer by 50.0 ms ± 46.6 ms', though those at the end differ by 5."""
    first = write_log(tmp_path, courses("......########", 30, 100, "step"), "first.jsonl")
    second = write_log(tmp_path, courses("..........##########", 31, 105, "step"), "second.jsonl")
    (said,) = (document := json.loads(run("compare", first, second, "--format", "json").stdout))["differences"]
    names = f"{second} from step 10000 on against {first} from step 6000 on"
    assert said.startswith(f"{names}: steps are longer by 5.0")
    assert [(one["measurements"], one["since_step"]) for one in document["logs"]] == [(8, 6000), (10, 10000)]
    (told,) = [note for note in document["warnings"] if note.startswith(str(first))]
    assert "its step changed, last from step 6000 on (30.0 ms -> 100" in told


def test_a_log_of_several_jobs_at_once_is_not_compared(tmp_path: Path) -> None:
    """Half of its measurements were of another job; 'ddp-prof monitor' told so, and compare took their median."""
    records = courses("............", 50, 0, "step")
    alone = write_log(tmp_path, records, "alone.jsonl")
    mixed = [{**one, "started": f"2026-11-26T09:00:0{at % 2}+00:00"} for at, one in enumerate(records)]
    both = write_log(tmp_path, mixed, "both.jsonl")
    said = run("compare", alone, both).stdout
    assert said.startswith(f"{both} against {alone}: not compared: several jobs wrote {both} at the same time")


def test_the_page_is_written_and_the_log_is_safe(tmp_path: Path) -> None:
    log = write_log(tmp_path, courses("......########", 10, 30))
    before = log.read_bytes()
    assert run("monitor", log, "--html", tmp_path / "course.html").exit_code == 0
    assert (tmp_path / "course.html").stat().st_size > 10_000
    assert run("monitor", log, "--html", log).exit_code == 1
    assert log.read_bytes() == before


def test_a_restart_is_told_and_ends_the_line_that_is_drawn(tmp_path: Path) -> None:
    """The job is started again from step 2000; the second restart goes on, and only the process tells it."""
    steps = [(1, "a"), (2, "a"), (3, "a"), (2, "b"), (3, "b"), (4, "c")]
    log = load_log(write_log(tmp_path, [{**record(number), "started": job} for number, job in steps]))
    assert find_restarts(log.records) == [3, 5]
    assert find_restarts([record(number) for number in (1, 2, 2, 1, 5)]) == [2, 3]
    step = draw_course(log)["data"][0]
    assert step["x"] == [1000, 2000, 3000, None, 2000, 3000, None, 4000]
    assert [at for at, value in enumerate(step["y"]) if value is None] == [3, 6]
    (told,) = [note for note in monitor_view(log).notes if note.startswith("started again")]
    place = "at step 2000 (2026-11-26 10:02:00Z), at step 4000 (2026-11-26 10:04:00Z)"
    assert told == f"started again 2 times, measured from there on: {place}"


@pytest.mark.parametrize(
    ("writers", "begun", "jobs"),
    [
        ("aaaaaaaabbbbbbbb", {"a": 0, "b": 8}, 0),  # started again
        ("abababababababab", {"a": 0, "b": 0}, 2),
        ("aabbbbbbbbbbbbbb", {"a": 0, "b": 1}, 2),  # b had begun when a logged its last record
        ("aaaabcbcbcbcbccc", {"a": 0, "b": 4, "c": 5}, 2),
    ],
)
def test_of_a_log_that_several_jobs_write_at_once_no_change_is_told(
    writers: str, begun: dict[str, int], jobs: int, tmp_path: Path
) -> None:
    """'Started again 1 time' was said of it, and one job's steps were a change of the other's.

    ``writers``: the job that wrote each record, one a minute; ``begun``: when each began, in minutes.
    """
    started = {job: f"2026-11-26T10:{minute:02}:00.{ord(job)}+00:00" for job, minute in begun.items()}
    records = [
        {**record(number, step=30 if job == "a" else 60), "started": started[job]}
        for number, job in enumerate(writers, 1)
    ]
    view = monitor_view(load_log(write_log(tmp_path, records)))
    assert view.title.startswith(f"{jobs} jobs wrote this log at the same time") == bool(jobs)
    assert any("started again 1 time" in note for note in view.notes) != bool(jobs)
    assert bool(view.document["changes"]) != bool(jobs)
