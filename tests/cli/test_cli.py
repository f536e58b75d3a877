from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.cli import COMMANDS
from ddp_prof.ingest import load
from tests.command_line import csv_rows, run
from tests.conftest import ROOT
from tests.ingest.test_nsys_export import known_truth
from tests.night import of_which_the_gate_keeps
from tests.nsys_factory import write_capture

READING = set(COMMANDS) - {"capture", "tune", "monitor", "cache", "mcp", "completion"}
CONTRACT = {
    "": "schema trace source producer device attribution ranks warnings",
    "attribution": "activities device_time method",
    "ranks": "process device rank kernels collectives compute_ns comm_ns overlapped_ns exposed_ns overlap_ratio "
    "backward_overlap_ratio reason steps",
    "steps": "step kernels collectives comm_ns overlapped_ns exposed_ns tail_ns window_ns compute_only_ns "
    "exposed_memory_ns idle_ns",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    programs = {"capture": "PROGRAM", "tune": "PROGRAM"}
    others = {
        "monitor": "LOG",
        "results": "DATABASE",
        "completion": "bash|zsh|fish",
        "cache": "DDP_PROF_CACHE",
        "mcp": "Usage",
    }
    assert {**programs, **others}.get(name, "TRACE") in result.output


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(READING))
def test_the_help_ends_with_an_example_that_works(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = run(name, "--help").output.rstrip().partition("Example: ddp-prof ")[2]
    assert example.startswith(f"{name} ")
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    result = run(*example.split())
    assert result.exit_code in {0, 3}, result.stderr


def test_the_help_tells_own_options_from_those_of_reading() -> None:
    own, reading = run("overlap", "--help-all").output.split("How traces are read:")
    assert "--steps" in own
    assert "--step-range" not in own
    assert "--scheduler" in reading


@pytest.mark.parametrize("name", sorted(READING - {"results"}))
def test_the_short_help_leaves_rare_options_to_the_whole_one(name: str) -> None:
    ways = ("--help", "--help-all")
    short, whole = (set(re.findall(r"^ +(--[a-z-]+)", run(name, way).output, re.MULTILINE)) for way in ways)
    assert whole - short == {
        "--separate",
        "--one-run",
        "--jobs",
        "--scheduler",
        "--strict",
        "--no-cache",
    }
    assert {"--step-range", "--help-all"} <= short < whole


def test_json_keeps_the_contract(trace: Path) -> None:
    document = json.loads(run("overlap", "--format", "json", trace).stdout)
    (rank,) = document["ranks"]
    parts = {"": document, "attribution": document["attribution"], "ranks": rank, "steps": rank["steps"][0]}
    for part, keys in CONTRACT.items():
        assert set(keys.split()) <= parts[part].keys(), part
    assert (document["schema"], document["source"], document["device"]) == (1, "nsys-sqlite", "cuda")
    assert (rank["process"], rank["comm_ns"], rank["exposed_ns"]) == (100, 140_000_000, 36_000_000)
    assert rank["overlap_ratio"] == pytest.approx(26 / 35)
    assert all(isinstance(step["window_ns"], int) for step in rank["steps"])


def test_several_traces_give_a_list(trace: Path, tmp_path: Path) -> None:
    other = write_capture(tmp_path / "other.sqlite", known_truth(2))
    documents = json.loads(run("overlap", "--format", "json", trace, other).stdout)
    assert [document["label"] for document in documents] == ["known", "other"]


def test_csv_has_one_row_per_step(trace: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run("overlap", "--steps", "--format", "csv", trace).stdout)))
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"]
    assert {float(row["exposed_ms"]) for row in rows} == {9.0}


def test_markdown_is_a_table(trace: Path) -> None:
    lines = run("overlap", "--format", "markdown", trace).stdout.splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "74.3" in lines[2]


def test_a_pipe_gets_plain_text_without_colour(trace: Path) -> None:
    output = run("overlap", trace).stdout
    assert "\x1b" not in output
    assert "device: cuda" in output


def test_names_that_look_like_markup_stay_text(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "[bold]x[red].sqlite", known_truth(1))
    assert "[bold]x[red].sqlite" in run("overlap", path).stdout


@pytest.mark.parametrize("command", sorted(READING))
@pytest.mark.parametrize("content", [None, b"", b"\0random\xff" * 50, b"SQLite format 3\0"])
def test_what_is_no_trace_is_one_line_and_exit_code_1(command: str, content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "bad.sqlite"
    if content is not None:
        path.write_bytes(content)
    needed = {"timeline": ["-o", tmp_path / "out"], "report": ["-o", tmp_path / "out"], "check": ["--min-overlap", "0"]}
    result = run(command, path, *needed.get(command, []))
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: {path}: ")


@pytest.mark.parametrize("arguments", [["overlap"], ["overlap", "--format", "xml", "x"], ["nonsense"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_a_pattern_that_is_none_is_wrong_usage(trace: Path) -> None:
    result = run("overlap", "--step-range", "(", trace)
    assert result.exit_code == 2
    assert "not a regular expression" in result.stderr


def test_a_step_to_draw_is_not_ignored_without_a_drawing(trace: Path) -> None:
    result = run("collectives", "--step", "7", trace)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--step is the step that --html and --png show: give one of them" in result.stderr


def test_compare_takes_naive_as_the_measure(trace: Path, tmp_path: Path) -> None:
    naive = write_capture(tmp_path / "naive.sqlite", known_truth())
    document = json.loads(run("compare", "--format", "json", naive, trace).stdout)
    assert [(entry["label"], entry["speedup"]) for entry in document["variants"]] == [("naive", 1.0), ("known", 1.0)]
    assert document["variants"][0]["exposed_ns"] == 9_000_000


def test_speedups_are_over_naive_only_where_it_is_among_the_runs(trace: Path, tmp_path: Path) -> None:
    naive, on_cpu = write_capture(tmp_path / "naive.sqlite", known_truth()), ROOT / "traces" / "flat.sqlite"
    alone, beside_naive = (run("compare", *traces, on_cpu).stdout for traces in ([trace], [naive, trace]))
    for said in ("speedup: over naive", "no speedup of flat: naive ran on another device"):
        assert said not in alone
        assert said in beside_naive


def test_a_step_that_does_not_communicate_has_no_tail(tmp_path: Path) -> None:
    """As it has no share that overlaps: 'tail 0.00' stood beside 'overlap n/a'."""
    truth = known_truth()
    truth.kernels = [kernel for kernel in truth.kernels if "nccl" not in kernel.name or kernel.start >= 200_000_000]
    rows = csv_rows("overlap", "--steps", write_capture(tmp_path / "x.sqlite", truth))
    assert [(row["overlap_%"] != "", row["tail_ms"]) for row in rows] == [(False, "")] * 2 + [(True, "9.0")] * 2


def test_info_says_what_is_missing(tmp_path: Path) -> None:
    capture = known_truth(1)
    capture.ranges.clear()
    result = run("info", write_capture(tmp_path / "x.sqlite", capture))
    assert "--step-range" in result.stdout
    assert "--backward-range" in result.stdout


def test_a_reader_that_stops_early_is_no_error(trace: Path) -> None:
    command = [sys.executable, "-m", "ddp_prof", "overlap", "--format", "json", str(trace)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ) as process:
        assert process.stdout
        process.stdout.close()
        assert process.stderr
        assert b"Traceback" not in process.stderr.read()


def run_without(closed: str, *words: object) -> subprocess.CompletedProcess[bytes]:
    """The program, started by a shell with streams closed, such as ``>&-``."""
    shell = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-m", "ddp_prof", *map(str, words)]
    return subprocess.run(shell, capture_output=True, check=False)


@pytest.mark.parametrize("closed", of_which_the_gate_keeps([">&- 2>&-"], [">&-", "2>&-", ">&- 2>&-"]))
@pytest.mark.slow
def test_output_that_is_closed_is_no_error(closed: str, trace: Path) -> None:
    """The exit code is still the answer of ``check``."""
    for most, code in (("1000", 0), ("0", 3)):
        done = run_without(closed, "check", "--max-exposed-ms", most, trace)
        assert (done.returncode, b"Traceback" in done.stderr) == (code, False)


@pytest.mark.slow
def test_an_answer_that_nobody_sees_is_an_error(trace: Path) -> None:
    """``overlap >&-`` printed nothing, and its exit code was 0."""
    done = run_without(">&-", "overlap", trace)
    assert (done.returncode, done.stderr.count(b"stdout is closed")) == (1, 1)


@pytest.mark.slow
def test_a_page_that_is_written_is_an_answer(trace: Path) -> None:
    page = trace.with_suffix(".html")
    done = run_without(">&-", "timeline", "-o", page, trace)
    assert (done.returncode, page.is_file()) == (0, True), done.stderr


def test_characters_that_the_terminal_lacks_are_replaced(trace: Path) -> None:
    command = [sys.executable, "-m", "ddp_prof", "overlap", str(trace)]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}  # as LANG=en_US.ISO-8859-1
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"??????" in done.stdout  # of the line below the names of columns, which Latin-1 cannot show


def test_a_folder_stands_for_the_traces_in_it(trace: Path) -> None:
    write_capture(trace.with_name("other.sqlite"), known_truth(1))
    trace.with_suffix(".nsys-rep").write_bytes(b"the report of an export beside it is not read")
    documents = json.loads(run("overlap", "--format", "json", trace.parent).stdout)
    assert [document["label"] for document in documents] == ["known", "other"]


# The user presses control-C while the command line imports a library.
INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from ddp_prof.__main__ import main
main()
"""


@pytest.mark.parametrize("closed", ["", "2>&-"])
def test_a_command_that_is_interrupted_while_it_is_loaded_says_so_in_one_line(closed: str) -> None:
    """Python printed a traceback of the imports."""
    shell = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", INTERRUPTED_IMPORT, "--help"]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    said = "" if closed else "stopped by SIGINT; what was written before is complete\n"
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", said)


# Runs the command line and counts the calls of our functions. At one of them the user presses control-C, and then ends
# the program in other ways, during the clean-up and once more when the command has ended.
INTERRUPTED = """
import os, signal, sys
at, calls = int(sys.argv.pop(1)), 0

def count(frame, event, argument):
    global calls
    if event == "call" and "ddp_prof" in frame.f_code.co_filename:
        calls += 1
        if calls == at:
            try:
                os.kill(os.getpid(), signal.{signal})
            finally:
                end_in_all_ways()

def end_in_all_ways():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)

sys.setprofile(count)
from ddp_prof.cli import main
try:
    main()
finally:
    sys.setprofile(None)
    if at > 0:
        end_in_all_ways()
    print(calls, file=sys.stderr)
"""


SHARES, SIGNALS = (0.1, 0.7, 0.95), (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def interrupted(at: int, trace: Path, number: signal.Signals) -> subprocess.CompletedProcess[str]:
    script = INTERRUPTED.replace("{signal}", number.name)
    command = [sys.executable, "-c", script, str(at), "overlap", "--steps", str(trace)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """A trace, how many calls of ours the command makes on it, and what it prints."""
    trace = write_capture(tmp_path_factory.mktemp("whole") / "known.sqlite", known_truth())
    whole = interrupted(-1, trace, signal.SIGINT)
    assert whole.returncode == 0
    calls = int(whole.stderr.split()[-1])
    assert calls > 100
    return trace, calls, whole.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("share", "number"), of_which_the_gate_keeps([(0.7, signal.SIGINT)], product(SHARES, SIGNALS)))
def test_an_interrupted_command_leaves_the_trace_as_it_was(
    share: float, number: signal.Signals, uninterrupted: tuple[Path, int, str]
) -> None:
    trace, calls, whole = uninterrupted
    before = hashlib.sha256(trace.read_bytes()).digest()
    done = interrupted(int(share * calls), trace, number)
    assert done.returncode == 128 + number
    assert whole.startswith(done.stdout)
    assert f"stopped by {number.name}; what was written before is complete" in done.stderr
    assert "Traceback" not in done.stderr
    assert hashlib.sha256(trace.read_bytes()).digest() == before
    assert [path.name for path in trace.parent.iterdir()] == [trace.name]


def test_a_signal_whose_exception_python_loses_is_told_at_the_end(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda failure: lost.append(failure.exc_type))
    load_trace = load.load_trace

    def read(*arguments: Any) -> Any:
        Dying()
        return load_trace(*arguments)

    monkeypatch.setattr(load, "load_trace", read)
    result = run("overlap", trace)
    assert lost == [KeyboardInterrupt]
    assert result.exit_code == 128 + signal.SIGINT
    assert "stopped by SIGINT" in result.stderr


# A program that runs two commands; while the first one reads, the user ends the program.
TWO_COMMANDS = """
import os, signal, sys
from click.testing import CliRunner
from ddp_prof.cli import main
from ddp_prof.ingest import load

load_trace = load.load_trace

def interrupted(*arguments):
    os.kill(os.getpid(), signal.{signal})
    return load_trace(*arguments)

load.load_trace = interrupted
for _ in range(2):
    print(CliRunner().invoke(main, ["overlap", sys.argv[1]]).exit_code, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly)])
def test_a_signal_ends_the_program_that_runs_a_command(number: signal.Signals, tmp_path: Path) -> None:
    """A script of thousands of commands lost one of them by each SIGTERM, and went on."""
    trace = write_capture(tmp_path / "known.sqlite", known_truth(1))
    command = [sys.executable, "-c", TWO_COMMANDS.replace("{signal}", number.name), str(trace)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (-number, "")


@pytest.mark.parametrize(
    ("error", "told"), [(MemoryError(), "there is not enough memory"), (RecursionError(), "nested too deep")]
)
def test_what_the_machine_cannot_do_is_one_line(
    error: BaseException, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth(1))

    def fail(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr("ddp_prof.ingest.nsys_export._activities", fail)
    result = run("overlap", path)
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert told in result.stderr
