"""What a shell user expects: suggestions, pipes, completion, as many words as wanted."""

from __future__ import annotations

import errno
import gzip
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace

import pytest
from click.shell_completion import BashComplete

from ddp_prof.cli import COMMANDS, error_line, main
from tests.command_line import run, said_on
from tests.conftest import ROOT
from tests.examples import IS_NIGHTLY


def test_a_command_that_does_not_exist_names_those_written_alike() -> None:
    result = run("overlp", "x")
    assert result.exit_code == 2
    assert "no such command 'overlp', and no file or folder of that name: did you mean 'overlap'?" in result.stderr
    assert ", ".join(COMMANDS) in run("zzz").stderr


def test_a_trace_before_its_command_is_not_said_to_be_missing(trace: Path) -> None:
    said = run(trace, "overlap").stderr
    assert f"the command comes first: 'ddp-prof overlap {trace}'" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["help"], "give --help: 'ddp-prof --help'"),
        (["help", "overlap"], "give --help: 'ddp-prof overlap --help'"),
        (["overlap", "@", "--json"], "No such option '--json'. Did you mean '--format json'?"),
        (["doctor", "@", "--csv"], "No such option '--csv'. Did you mean '--format csv'?"),
        (["timeline", "@", "--csv"], "No such option '--csv'."),  # it prints no table
        (["overlap", ""], "an empty name: is a variable of the shell not set?"),  # the current folder was read
        (["monitor", ""], "an empty name: is a variable of the shell not set? give the log"),
        (["results", ""], "an empty name: is a variable of the shell not set? give the database"),
        (["overlap", "@", "--step-range", ""], "an empty pattern fits every name"),  # each range was a step
        (["overlap", "@", "--comm-pattern", ""], "an empty pattern fits every name"),
    ],
)
def test_what_is_often_tried_leads_to_what_there_is(words: list[str], said: str, trace: Path) -> None:
    result = run(*[str(trace) if word == "@" else word for word in words])
    assert result.exit_code == 2
    assert said in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EIO, "Input/output error"), "reading or writing failed: Input/output error"),
        (OSError(errno.EIO, "Input/output error", "x"), "x: Input/output error"),
        (OSError(errno.ENOSPC, "No space left"), "the output or a temporary file: No space left: make room there, or"),
    ],
)
def test_the_system_s_error_is_no_failed_write_unless_room_lacks(error: OSError, said: str) -> None:
    assert error_line(error).startswith(said)


@pytest.mark.parametrize("words", [["sumary"], ["-q", "sumary"], ["--verbose", "sumary"], ["overlp"], ["zzz"]])
def test_nor_is_it_a_trace_to_be_left_out(words: list[str], trace: Path) -> None:
    result = run(*words, trace)
    assert result.exit_code == 2, result.stdout
    assert f"no such command {words[-1]!r}" in result.stderr


@pytest.mark.parametrize("words", [[], ["-q"], ["--step-range", "step"], ["--strict"]])
def test_without_a_command_the_summary_is_shown(words: list[str], trace: Path) -> None:
    result = run(*words, trace)
    assert result.exit_code == 0, result.stderr
    assert "communication" in result.stdout


@pytest.mark.parametrize(
    "command",
    ["timeline x --steps @", "timeline x --steps 1-@", "timeline x --steps @-@", "collectives x --step @",
     "kernels x --top @", "overlap x --jobs @", "capture --steps @:1 -- true",
     "capture --steps 1:@ -- true"],
)  # fmt: skip
def test_a_number_of_5000_digits_is_wrong_usage(command: str, trace: Path) -> None:
    """Before 3.10.7, Python reads numbers of any length; of as many rows, or processes, there are just fewer."""
    words = command.replace("@", "9" * 5000).split()
    result = run(*(trace if word == "x" else word for word in words))
    if not hasattr(sys, "get_int_max_str_digits") and words[2] in ("--top", "--jobs"):
        assert result.exit_code == 0, result.stderr
        return
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    "option", ["timeline --png x.html", "timeline --svg x.png", "skew --png x", "compare --png x.svg"]
)
def test_a_picture_of_another_kind_than_its_name_says_is_wrong_usage(
    option: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command, *words = option.split()
    result = run(command, trace, *words)
    assert result.exit_code == 2
    assert f"{words[-1]} does not end in {words[0].replace('--', '.')}" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [trace.name]


def test_no_summary_is_cut() -> None:
    said = run("--help").stdout.partition("Commands:")[2]
    assert "..." not in said
    assert max(map(len, said.splitlines())) <= 80
    assert set(COMMANDS) <= set(said.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_of_a_commands_help_is_longer_than_a_terminal(command: str) -> None:
    assert max(map(len, run(command, "--help").stdout.splitlines())) <= 80


def test_a_trace_comes_from_stdin(trace: Path) -> None:
    piped = run("overlap", "-", "--format", "csv", stdin=trace.read_bytes()).stdout.splitlines()
    named = run("overlap", trace, "--format", "csv").stdout.splitlines()
    assert [line.partition(",")[2] for line in piped] == [line.partition(",")[2] for line in named]
    assert len(piped) > 1


@pytest.mark.parametrize("command", ["overlap", "doctor", "info", "check --min-overlap 1%"])
def test_what_comes_from_stdin_is_named_as_it_was_given(command: str, trace: Path) -> None:
    """It was '/tmp/ddp_prof.stdin.q9t40_37/stdin', another file each time, which is gone when that is read."""
    text, document = (
        run(*command.split(), "-", *more, stdin=trace.read_bytes()).stdout for more in ((), ("--format", "json"))
    )
    assert "ddp_prof.stdin." not in text + document
    told = json.loads(document)
    assert (told["runs"][0] if "runs" in told else told)["trace"] == "-"
    assert run(*command.split(), "-", stdin=b"").stderr.startswith("Error: -: an empty file")


def test_what_is_packed_on_stdin_is_unpacked_before_it_comes() -> None:
    """'gunzip -k -' was said, which names no file."""
    packed = gzip.compress(b"SQLite format 3\0" + bytes(99))
    assert run("info", "-", stdin=packed).stderr.endswith("torch.profiler only: unpack it first, by gunzip\n")


def test_what_comes_from_stdin_has_a_bound(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that never ends would fill the disk."""
    free = 2 * trace.stat().st_size
    room = SimpleNamespace(free=free)
    monkeypatch.setattr("shutil.disk_usage", lambda _: room)
    assert run("overlap", "-", stdin=trace.read_bytes()).exit_code == 0
    room.free -= 2
    refused = run("overlap", "-", stdin=trace.read_bytes())
    assert (refused.exit_code, refused.stdout) == (1, "")
    (line,) = refused.stderr.splitlines()
    assert f"-: it sends more than {free // 2 - 1:,} bytes" in line


def test_an_endless_stdin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=6_000_000))
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout
        source = SimpleNamespace(buffer=writer.stdout)
        monkeypatch.setattr("ddp_prof.cli.options.sys", SimpleNamespace(stdin=source))
        refused = run("overlap", "-")
        writer.stdout.close()
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (1, 1)


@pytest.mark.parametrize("command", ["export", "timeline"])
def test_what_is_made_goes_to_stdout(
    command: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file.json"
    assert run(command, trace, "-o", file).stdout.strip() == str(file)
    assert run(command, trace, "-o", "-").stdout_bytes == file.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.json", "known.sqlite"]


@pytest.mark.parametrize("before", [True, False])
def test_quiet_leaves_out_the_notes_and_nothing_else(before: bool, trace: Path) -> None:
    whole = run("collectives", trace).stdout
    quiet = run(*(["-q", "collectives"] if before else ["collectives", "-q"]), trace).stdout
    assert "note: " in whole
    assert quiet == "".join(line for line in whole.splitlines(keepends=True) if not line.startswith("note: "))


@pytest.mark.usefixtures("no_browser")
def test_quiet_leaves_out_why_there_are_no_pictures(trace: Path, tmp_path: Path) -> None:
    assert "note: pictures need Chromium" in run("report", trace, "-o", tmp_path / "pages").stderr
    assert run("report", "-q", trace, "-o", tmp_path / "pages").stderr == ""


def test_verbose_says_on_stderr_what_is_read(trace: Path) -> None:
    code = "from ddp_prof.cli import main; main()"
    command = [sys.executable, "-c", code, "overlap", "-v", "--format", "csv", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{trace}: nsys-sqlite, " in done.stderr
    assert str(trace) not in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_for_the_shell(shell: str) -> None:
    assert "_DDP_PROF_COMPLETE" in run("completion", shell).stdout


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("over", "plain,overlap"),
        ("traces/ove", "file,traces/ove"),  # the trace needs no command
        ("traces/overlap.sqlite --not", "plain,--notes"),
        ("capture --profiler t", "plain,torch"),
        ("capture -- torchrun tra", "file,tra"),
        ("tune -- ./tra", "file,./tra"),
    ],
)
def test_the_completion_of_bash_completes(line: str, completed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = line.split()
    monkeypatch.setenv("COMP_WORDS", f"ddp-prof {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert BashComplete(main, {}, "ddp-prof", "_DDP_PROF_COMPLETE").complete() == completed


def test_one_rank_tells_no_skew_and_the_others_are_asked_for(trace: Path) -> None:
    said = run("skew", trace).stdout
    assert "traces of at least two ranks" in said
    assert "─" not in said, "no table of zeros"


def test_a_share_in_percent_is_shown_as_it_should_be_written(trace: Path) -> None:
    assert "write it like 95% or 0.95" in run("check", trace, "--min-overlap", "95").stderr


def test_own_results_come_before_those_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "traces/results.db" in run("results").stderr
    own = tmp_path / "traces" / "local" / "results.db"
    own.parent.mkdir(parents=True)
    own.write_bytes((ROOT / "traces" / "results.db").read_bytes())
    result = run("results", "-q")
    assert (result.exit_code, "naive" in result.stdout) == (0, True)


READING = ("overlap", "collectives", "skew", "kernels", "compare", "check --min-overlap 1%", "info", "export")


# A program that runs one command after the other, each with the delay in front of it.
PROGRAM = """
import shlex, sys
import ddp_prof.cli.terminal
from ddp_prof.cli import main
for command in sys.argv[1:]:
    delay_s, *words = shlex.split(command)
    ddp_prof.cli.terminal.DELAY_S = float(delay_s)
    main(words, standalone_mode=False)
    for stream in (sys.stdout, sys.stderr):
        print(end="\\f", file=stream, flush=True)
"""


def said_on_a_terminal(commands: list[str], folder: Path) -> list[tuple[str, str]]:
    """What each command prints where stderr alone is a terminal: on stdout, and there."""
    ours, theirs = pty.openpty()
    environment = {
        **os.environ, "BROWSER_PATH": str(folder / "none"), "TERM": "xterm", "COLUMNS": "9999", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    program = [sys.executable, "-c", PROGRAM, *commands]
    with (
        TemporaryFile() as printed,
        subprocess.Popen(program, stdout=printed, stderr=theirs, env=environment, cwd=folder) as process,
    ):
        os.close(theirs)
        said = said_on(ours)
        assert process.wait() == 0, said.decode()
        printed.seek(0)
        return list(zip(*(out.decode().split("\f")[:-1] for out in (printed.read(), said)), strict=True))


@pytest.mark.slow
def test_what_takes_long_shows_its_progress_on_a_terminal_and_nowhere_else(trace: Path, tmp_path: Path) -> None:
    """What the command prints stays as it is."""
    reading, report = READING if IS_NIGHTLY else READING[:1], f"report '{trace}' -o pages"
    commands = [f"0 {command} '{trace}'{quiet}" for command in reading for quiet in ("", " -q")]
    *heard, slow, fast = said_on_a_terminal([*commands, f"0 {report}", f"600 {report}"], tmp_path)
    for command, (printed, said), (quiet, nothing) in zip(reading, heard[::2], heard[1::2], strict=True):
        assert "reading" in said, command
        assert nothing == "", command
        assert quiet == "".join(line for line in printed.splitlines(keepends=True) if not line.startswith("note: "))
    for (printed, said), is_shown in ((slow, True), (fast, False)):
        assert printed.strip() == "pages/index.html"
        assert ("comparing the runs" in said) == is_shown
