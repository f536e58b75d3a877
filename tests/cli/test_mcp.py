"""A real client of the Model Context Protocol asks over stdio; each figure it gets is the command line's."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from multiprocessing.context import SpawnProcess
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest

from ddp_prof.cli import COMMANDS, mcp, tables, whatif
from ddp_prof.cli.options import TraceCommand
from ddp_prof.errors import DdpProfError, shell_quote
from tests.command_line import run
from tests.conftest import IS_WHOLE_GATE, ROOT
from tests.ingest.test_nsys_export import known_truth
from tests.night import of_which_the_gate_keeps
from tests.nsys_factory import Range, write_capture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anyio.from_thread import BlockingPortal
    from mcp import Client
    from mcp.types import CallToolResult, Tool

TRACES = ROOT / "traces"
REGISTERED = json.loads(re.findall(r"```json\n(.*?)```", (ROOT / "docs/skill.md").read_text(), re.DOTALL)[0])
"""As the documents tell a client to start it."""
SERVER = REGISTERED["mcpServers"]["ddp-prof"]
PROGRAM = Path(sys.executable).with_name(SERVER["command"])


@dataclass(frozen=True)
class Question:
    """What an assistant asks.

    Attributes:
        words: As a person would say it.
        tool: That it calls.
        trace: In traces/.
        keys: Where in the document the figure stands that answers.
        figure: The figure.
    """

    words: str
    tool: str
    trace: str
    keys: tuple[str | int, ...]
    figure: object


SESSION = (
    Question("What does this trace hold?", "info", "overlap", ("processes", 1, "steps"), 10),
    Question("How much of a step is exposed?", "summary", "overlap", ("runs", 0, "exposed_ns"), 29_659_200),
    Question("How much hides on rank 1?", "overlap", "overlap", ("ranks", 1, "overlapped_ns"), 667_720_913),
    Question("What should I change?", "doctor", "flat", ("findings", 0, "rule"), "gradients reduced after backward"),
    Question("In how many of ten steps is rank 1 the last?", "skew", "bucketed_10mb", ("ranks", 1, "last_steps"), 7),
)


@pytest.fixture(scope="module", autouse=True)
def _sdk() -> None:
    if not IS_WHOLE_GATE:
        pytest.importorskip("mcp.server.mcpserver", reason="the extra 'mcp' is not installed")


@dataclass(frozen=True)
class Server:
    """A server that runs, and what it has said on stderr so far."""

    client: Client
    portal: BlockingPortal
    log: Path

    def tools(self) -> list[Tool]:
        return self.portal.call(self.client.list_tools).tools

    def ask(self, *calls: tuple[str, dict[str, Any]]) -> list[CallToolResult]:
        return [self.portal.call(self.client.call_tool, name, arguments) for name, arguments in calls]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all questions; how a server ends is asked of others."""
    from anyio.from_thread import start_blocking_portal  # Playwright keeps a loop running in the thread of the tests
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    log = tmp_path_factory.mktemp("mcp") / "log"
    started = StdioServerParameters(command=str(PROGRAM), args=SERVER["args"], cwd=ROOT)
    with (
        log.open("w") as errlog,
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(Client(stdio_client(started, errlog=errlog))) as client,
    ):
        yield Server(client, portal, log)


def text_of(result: CallToolResult) -> str:
    (content,) = result.content
    assert content.type == "text"
    return content.text


def answer_of(result: CallToolResult) -> dict[str, Any]:
    assert not result.is_error, text_of(result)
    answer: dict[str, Any] = json.loads(text_of(result))
    return answer


def files_in(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def printed(command: str, *traces: Path) -> Any:
    return json.loads(run(command, "--format", "json", *traces).stdout)


def at(document: Any, keys: tuple[str | int, ...]) -> Any:
    for key in keys:
        document = document[key]
    return document


@pytest.mark.nightly  # in every gate each tool answers as its command, of a smaller capture
def test_a_session_of_five_questions(server: Server) -> None:
    before = files_in(TRACES)
    traces = [TRACES / f"{question.trace}.sqlite" for question in SESSION]
    calls = [(one.tool, {"traces": [str(trace)]}) for one, trace in zip(SESSION, traces, strict=True)]
    results = server.ask(*calls)
    assert [tool.name for tool in server.tools() if not (tool.annotations and tool.annotations.read_only_hint)] == []
    for question, trace, result in zip(SESSION, traces, results, strict=True):
        answer = answer_of(result)
        (document,) = answer["documents"]
        assert answer["cut"] == {}
        assert document == printed(question.tool, trace), question.words
        assert at(document, question.keys) == question.figure, question.words
        assert answer["command"] == f"ddp-prof {question.tool} --format json {trace}"
    assert files_in(TRACES) == before


def test_every_tool_answers_as_its_command(server: Server, tmp_path: Path) -> None:
    trace = write_capture(tmp_path / "known.sqlite", known_truth())
    before = files_in(tmp_path)
    names = [tool.name for tool in server.tools()]
    tables = ["overlap", "collectives", "critical", "doctor", "skew", "kernels", "compare", "whatif", "info"]
    assert names == ["summary", *tables]
    results = server.ask(*((name, {"traces": [str(trace)]}) for name in names))
    for name, result in zip(names, results, strict=True):
        answer = answer_of(result)
        assert (answer["documents"], answer["cut"]) == ([printed(name, trace)], {}), name
        assert answer["command"] == f"ddp-prof {name} --format json {shell_quote(trace)}"
    assert [tool.name for tool in server.tools() if not (tool.annotations and tool.annotations.read_only_hint)] == []
    assert files_in(tmp_path) == before


def test_two_runs_are_compared_as_by_the_command(server: Server) -> None:
    naive, overlap = TRACES / "naive.sqlite", TRACES / "overlap.sqlite"
    (result,) = server.ask(("compare", {"traces": [str(naive), str(overlap)]}))
    answer = answer_of(result)
    assert answer["documents"] == [printed("compare", naive, overlap)]
    assert [row["label"] for row in answer["documents"][0]["variants"]] == ["naive", "overlap"]


def test_it_abstains_where_the_tool_does(server: Server, tmp_path: Path) -> None:
    trace = write_capture(tmp_path / "known.sqlite", known_truth())
    on_cpu = TRACES / "overlap.sqlite"
    known, critical = server.ask(("summary", {"traces": [str(trace)]}), ("critical", {"traces": [str(on_cpu)]}))
    (run,) = answer_of(known)["documents"][0]["runs"]
    assert run["exposed_ns"] == 9_000_000
    assert run["blocking_ns"] is None
    assert [line for line in run["not_known"] if line.startswith("blocking is not known: ")]
    (document,) = answer_of(critical)["documents"]
    assert (document["steps"], bool(document["reason"])) == ([], True)


def test_an_error_is_one_line_with_a_way_out(server: Server, tmp_path: Path) -> None:
    report = tmp_path / "job.nsys-rep"
    report.write_bytes((TRACES / "flat.nsys-rep").read_bytes())
    overlap = str(TRACES / "overlap.sqlite")
    wrong = [
        ({"traces": []}, "no traces are given"),
        ({"traces": ["nowhere.sqlite"]}, "nowhere.sqlite: No such file or directory: check the path"),
        ({"traces": [str(report)]}, f"{report}: a raw report without its export"),
        ({"traces": [""]}, "an empty name"),
        ({"traces": [overlap], "step_range": "("}, "not a regular expression"),
        ({"traces": [overlap], "step_range": ""}, "an empty pattern fits every name"),
        ({"traces": [overlap], "comm_patterns": ["a", ""]}, "an empty pattern fits every name"),
        ({"traces": [overlap], "warmup_steps": -1}, "-1 is not in the range"),
        ({"traces": [overlap], "one_run": True, "separate": True}, "--one-run and --separate exclude each other"),
        ({"traces": [overlap], "part": "documents/0/nothing"}, "no list 'documents/0/nothing'"),
    ]
    results = server.ask(*(("overlap", arguments) for arguments, _ in wrong))
    for result, (_, told) in zip(results, wrong, strict=True):
        assert result.is_error
        assert told in text_of(result)
        assert len(text_of(result).splitlines()) == 1
    assert "Traceback" not in server.log.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.nsys-rep"]


def test_a_long_list_is_cut_and_the_rest_can_be_asked_for(server: Server) -> None:
    trace = TRACES / "overlap.sqlite"
    whole = printed("collectives", trace)["collectives"]
    (result,) = server.ask(("collectives", {"traces": [str(trace)]}))
    answer = answer_of(result)
    given = answer["documents"][0]["collectives"]
    assert 10 < len(given) < len(whole)
    assert answer["cut"] == {"documents/0/collectives": f"entries 0 to {len(given) - 1} of {len(whole)}"}
    rest = {"traces": [str(trace)], "part": "documents/0/collectives", "first": 770}
    (result,) = server.ask(("collectives", rest))
    assert answer_of(result)["documents/0/collectives"] == whole[770:]
    assert answer_of(result)["cut"] == {}


def test_an_answer_about_many_runs_is_short_and_says_what_it_lacks(server: Server) -> None:
    (result,) = server.ask(("overlap", {"traces": [str(TRACES)]}))
    answer, whole = answer_of(result), {"documents": printed("overlap", TRACES)}
    assert len(text_of(result)) <= 24_000
    assert len(answer["documents"][0]["ranks"]) == 2
    for name, words in answer["cut"].items():
        keys = tuple(int(key) if key.isdecimal() else key for key in name.split("/"))
        given = at(answer, keys)
        assert len(given) < len(at(whole, keys))
        assert words.endswith(f" of {len(at(whole, keys))}")
    steps = answer["documents"][0]["ranks"][0]["steps"]
    assert 0 < len(steps) < 10


def test_regular_expressions_reach_the_reader(server: Server, tmp_path: Path) -> None:
    trace = write_capture(tmp_path / "known.sqlite", known_truth())
    (result,) = server.ask(("overlap", {"traces": [str(trace)], "step_range": "step_([13])"}))
    answer = answer_of(result)
    assert [step["step"] for step in answer["documents"][0]["ranks"][0]["steps"]] == [1, 3]
    assert "'--step-range=step_([13])'" in answer["command"]
    (result,) = server.ask(("overlap", {"traces": [str(trace)], "step_range": "step_([13])", "warmup_steps": 1}))
    answer = answer_of(result)
    assert [step["step"] for step in answer["documents"][0]["ranks"][0]["steps"]] == [3]
    assert "--warmup-steps=1" in answer["command"]


def test_what_notes_advise_is_an_argument_and_each_answer_is_that_of_its_command(
    server: Server, tmp_path: Path
) -> None:
    naive, overlap = str(TRACES / "naive.sqlite"), str(TRACES / "overlap.sqlite")
    known = str(write_capture(tmp_path / "known.sqlite", known_truth()))
    asked: list[tuple[dict[str, Any], int]] = [
        ({"traces": [known], "comm_patterns": ["gemm.*", "no such"]}, 1),
        ({"traces": [naive, overlap], "separate": True}, 2),
        ({"traces": [known], "one_run": True}, 1),
    ]
    for (arguments, count), result in zip(asked, server.ask(*(("info", one) for one, _ in asked)), strict=True):
        answer = answer_of(result)
        assert len(answer["documents"]) == count, arguments
        found = json.loads(run(*shlex.split(answer["command"])[1:]).stdout)
        assert answer["documents"] == (found if isinstance(found, list) else [found])
    (without,) = server.ask(("info", {"traces": [known]}))
    (counted,) = server.ask(("info", asked[0][0]))
    (before,), (after,) = (answer_of(one)["documents"][0]["processes"] for one in (without, counted))
    assert after["collectives"] > before["collectives"]


def test_an_argument_that_it_does_not_know_is_refused(server: Server) -> None:
    (result,) = server.ask(("overlap", {"traces": [str(TRACES / "overlap.sqlite")], "comm_pattern": "acme"}))
    assert result.is_error
    assert "comm_pattern" in text_of(result)
    assert {tool.input_schema["additionalProperties"] for tool in server.tools()} == {False}


def test_without_the_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    done = run("mcp")
    assert done.exit_code == 1
    assert done.stderr == "Error: this needs the MCP SDK, version 2 or later: pip install 'mcp>=2'\n"


@pytest.mark.parametrize("number", of_which_the_gate_keeps([None], [None, signal.SIGTERM, signal.SIGINT]))
def test_it_ends_when_it_is_told_to(number: signal.Signals | None) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([PROGRAM, *SERVER["args"]], stdin=pipe, stdout=pipe, stderr=pipe) as server:
        assert server.stdin
        assert server.stdout
        ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        server.stdin.write(json.dumps(ping).encode() + b"\n")
        server.stdin.flush()
        assert json.loads(server.stdout.readline())["id"] == 1
        if number:
            server.send_signal(number)
        else:
            server.stdin.close()
        try:
            assert server.wait() == (128 + number if number else 0)
        finally:
            server.kill()
        assert server.stderr
        assert b"Traceback" not in server.stderr.read()


NESTED = "(a+)+$"
"""A regular expression that takes 2^61 steps on 61 letters a, and so does not end."""


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    capture = known_truth(1)
    ranges = [*capture.ranges, Range("a" * 61 + "b", 0, 5, 1)]
    return write_capture(tmp_path / "known.sqlite", replace(capture, ranges=ranges))


def test_an_answer_that_takes_too_long_is_given_up(endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = mcp.Answers()
    question = mcp.Question("overlap", (str(endless),))
    try:
        before = answers.ask(question)
        assert answers._process
        number, folder = answers._process.pid, Path(answers._folder.name if answers._folder else "")
        assert folder.is_dir()
        monkeypatch.setattr(mcp, "LEAST_S", 0.5)
        with pytest.raises(DdpProfError, match="no answer within 1 s: ask about fewer traces, or with a simpler"):
            answers.ask(question._replace(options=(f"--step-range={NESTED}",)))
        assert not Path(f"/proc/{number}").exists()
        assert not folder.exists()
        monkeypatch.undo()
        assert answers.ask(question) == before
    finally:
        answers.close()


def test_a_process_that_was_killed_is_told_and_the_next_question_answered(endless: Path) -> None:
    answers = mcp.Answers()
    question = mcp.Question("overlap", (str(endless),))
    try:
        before = answers.ask(question)
        assert answers._process
        answers._process.kill()
        answers._process.join()
        assert answers.ask(question) == before
    finally:
        answers.close()


def test_a_process_that_is_being_started_ends_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal came meanwhile: what was half started could not be killed, and the error was lost in the event loop."""
    answers, begun, may_start = mcp.Answers(), Event(), Event()
    start, started = SpawnProcess.start, list[SpawnProcess]()

    def start_later(process: SpawnProcess) -> None:
        started.append(process)
        begun.set()
        may_start.wait()
        start(process)

    monkeypatch.setattr(SpawnProcess, "start", start_later)
    threads = Thread(target=answers._start), Thread(target=answers.end)
    threads[0].start()
    begun.wait()
    threads[1].start()
    may_start.set()
    for thread in threads:
        thread.join()
    assert (answers._process, started[0].exitcode) == (None, -signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)])
def test_a_server_that_is_busy_ends_at_once(number: signal.Signals, endless: Path, tmp_path: Path) -> None:
    """Its answer is under way for ever; the process that looks for it goes with the server."""
    arguments = {"traces": [str(endless)], "step_range": NESTED}
    hello = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    }
    messages: list[dict[str, Any]] = [
        {"id": 1, "method": "initialize", "params": hello},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "overlap", "arguments": arguments}},
    ]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [PROGRAM, *SERVER["args"]], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment
    ) as server:
        assert server.stdin
        for message in messages:
            server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
            server.stdin.flush()
            if message.get("id") == 1:
                assert server.stdout
                server.stdout.readline()
        while not (workers := _children(server.pid)):
            time.sleep(0.05)
        server.send_signal(number)
        assert server.wait() == (128 + number if number == signal.SIGTERM else -number)
        for worker in workers if number == signal.SIGTERM else []:
            assert not Path(f"/proc/{worker}").exists()
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


def _children(process: int) -> list[int]:
    """The processes that a process has started, without the one that multiprocessing uses to track resources."""
    listed = Path(f"/proc/{process}/task").glob("*/children")
    children = [int(child) for file in listed for child in file.read_text().split()]
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_each_command_that_answers_with_tables_is_a_tool() -> None:
    declared = {name: getattr(tables, name, getattr(whatif, name, None)) for name in COMMANDS}
    commands = {name: command for name, command in declared.items() if isinstance(command, TraceCommand)}
    assert list(mcp.questions()) == [name for name, command in commands.items() if command.reads_traces]
    help_text, skill = mcp.mcp.help or "", (ROOT / "docs" / "skill.md").read_text(encoding="utf-8")
    told = (
        re.search("only read: (.*?)\\.", help_text, re.DOTALL),
        re.search("tools are the commands (.*?)\\.", skill, re.DOTALL),
    )
    for found in told:
        assert found
        assert set(re.findall(r"\w+", found[1])) - {"and"} == mcp.questions().keys()
