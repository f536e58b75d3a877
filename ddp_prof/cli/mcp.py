"""``ddp-prof mcp``: a server of the Model Context Protocol that answers an assistant's questions about traces.

Each tool has the name of a command and answers with the JSON that the command prints, so the figures are the same.
Traces are only read. Stdout belongs to the protocol: the SDK keeps other output away from it.

A separate process answers, under a time limit: a regular expression from an assistant may need longer than the universe
is old, and only the end of the process stops it.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ddp_prof import __version__
from ddp_prof.bounded_file import held_bytes
from ddp_prof.cli import ACTIONABLE, COMMANDS, error_line
from ddp_prof.cli.options import TraceCommand
from ddp_prof.errors import DdpProfError, shell_path, shell_quote
from ddp_prof.ingest.load import refuse_to_export
from ddp_prof.new_process import without_main_module
from ddp_prof.runs import find_files, load_runs

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from mcp.server.mcpserver.tools import Tool

ONE_BY_ONE = Lock()
"""Held while a tool answers: the SDK calls tools in threads, and two large traces at once may not fit into memory."""

LEAST_S, BYTES_PER_SECOND = 60, 1_000_000
"""Time limit for an answer: ``LEAST_S`` seconds, and a second more for each ``BYTES_PER_SECOND`` bytes of its traces.

That is a tenth of the speed of a slow machine.
"""

INSTRUCTIONS = """\
Reads traces of data-parallel training (Nsight Systems, torch.profiler): how much communication is exposed, whether \
that costs time, why, and what to change. Begin with info and summary. Pass the files of all ranks of a run together.
Times are nanoseconds, ratios 0 to 1. null is not 0: it means not known; give the reason beside it, and do not compute \
a figure in its place. Exposed is not blocking: communication costs time only if something waits for it. gain_at_most \
is an upper bound. device: cpu shows what a variant does, not how fast a GPU would do it. Cite the command, and the \
warnings, notes and not_known that matter for the answer; if they say that a figure is not available, say so."""

ARGUMENTS = """
Arguments, and no others: traces, a list of files or folders, best as absolute paths; step_range and backward_range,
regular expressions for the names of ranges that are steps and backward, needed if info recognises none; warmup_steps,
the number of first steps to leave out, if a note says that they take longer. Where a note names --comm-pattern,
--one-run or --separate: comm_patterns, a list of regular expressions for the names of kernels that communicate, too;
one_run=true, all files are ranks of one run; separate=true, each is a run. A long list in the answer is cut and named
in 'cut': part=NAME and first=NUMBER return its entries from that number on."""

LONGEST = 24_000
"""Most characters in an answer, so that it fits beside the rest of an assistant's context."""
MOST_ENTRIES = (1000, 500, 200, 100, 50, 20, 10, 5, 2, 1, 0)
"""Lengths to which lists are cut; the first length that makes the answer short enough is taken."""
LEAST_WORDS = 20
"""Lists of texts, such as warnings, keep at least this many entries."""


@click.command("mcp")
def mcp() -> None:
    """Answer an assistant's questions about traces, by the Model Context Protocol.

    A client starts it and talks to it over stdin and stdout. Its tools are commands that only read: summary, info,
    overlap, collectives, critical, doctor, skew, kernels, compare, whatif. Needs: pip install 'mcp>=2'.
    """
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError as error:
        raise DdpProfError("this needs the MCP SDK, version 2 or later: pip install 'mcp>=2'") from error
    tools = [_make_tool(name, (command.help or "") + ARGUMENTS) for name, command in questions().items()]
    server = MCPServer("ddp-prof", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING", tools=tools)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    server.run()


def questions() -> dict[str, TraceCommand]:
    """Return the commands that answer with tables of traces, by name."""
    commands = {name: getattr(import_module(module), name) for name, module in COMMANDS.items() if module in TABLES}
    return {name: command for name, command in commands.items() if getattr(command, "answer", None)}


TABLES = ("ddp_prof.cli.tables", "ddp_prof.cli.whatif")
"""Modules whose commands answer questions."""


def _stop(number: int, _frame: FrameType | None) -> None:
    """End the server at once and remove temporary files; the thread that reads stdin would wait for another line."""
    try:
        ANSWERS.end()
        atexit._run_exitfuncs()
    finally:  # the event loop would swallow an error, and the server live on
        os._exit(128 + number)


def _make_tool(name: str, description: str) -> Tool:
    """Return a tool, which takes the arguments that an assistant gives and no others, and returns JSON."""
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.server.mcpserver.tools import Tool
    from mcp.types import ToolAnnotations

    def ask(
        traces: list[str],
        step_range: str | None = None,
        backward_range: str | None = None,
        warmup_steps: int = 0,
        comm_patterns: list[str] | None = None,
        one_run: bool = False,
        separate: bool = False,
        part: str | None = None,
        first: int = 0,
    ) -> str:
        # Answers a question; ARGUMENTS describes the parameters to the assistant.
        if not traces:
            raise ToolError("no traces are given: name at least one file or folder")
        options = [
            *([] if step_range is None else [f"--step-range={step_range}"]),
            *([] if backward_range is None else [f"--backward-range={backward_range}"]),
            *([f"--warmup-steps={warmup_steps}"] if warmup_steps else []),
            *[f"--comm-pattern={pattern}" for pattern in comm_patterns or ()],
            *["--one-run"] * one_run,
            *["--separate"] * separate,
        ]
        question = Question(name, tuple(traces), tuple(options), part, max(0, first))
        try:
            with ONE_BY_ONE:
                return ANSWERS.ask(question)
        except DdpProfError as error:
            raise ToolError(error_line(error)) from error

    hints = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
    tool = Tool.from_function(ask, name, description=description, annotations=hints, structured_output=False)
    # The SDK drops an argument that the function lacks, and the answer would be to another question.
    known = tool.fn_metadata.arg_model
    tool.fn_metadata.arg_model = type("Arguments", (known,), {"model_config": {"extra": "forbid"}})
    tool.parameters["additionalProperties"] = False
    return tool


class Question(NamedTuple):
    """What an assistant asks.

    Attributes:
        name: The command.
        traces: Files and folders.
        options: How the traces are read, as options of the command line.
        part: Name of a list in the answer, of which only entries from ``first`` on are wanted; ``None`` for the whole
            answer.
        first: Number of the first entry that is wanted.
    """

    name: str
    traces: tuple[str, ...]
    options: tuple[str, ...] = ()
    part: str | None = None
    first: int = 0


class Answers:
    """A process that answers questions one after the other; if an answer takes too long, the process is killed.

    The process starts with the first question. Its temporary files are in a folder that the server's own process
    removes.
    """

    def __init__(self) -> None:
        """Start nothing yet: the process, its connection and its folder are made for the first question."""
        self._process: BaseProcess | None = None
        self._connection: Connection[Any, Any] | None = None
        self._folder: TemporaryDirectory[str] | None = None
        self._starting = Lock()

    def ask(self, question: Question) -> str:
        """Return the answer as JSON.

        Raises:
            DdpProfError: There is no answer, or none in time.
        """
        limit_s = LEAST_S + _bytes_of(question.traces) / BYTES_PER_SECOND
        if self._process is None or not self._process.is_alive():
            self._start()
        assert self._connection is not None
        try:
            self._connection.send((question, limit_s))
            if not self._connection.poll(limit_s):
                self.close()
                raise DdpProfError(
                    f"no answer within {limit_s:.0f} s: ask about fewer traces, or with a simpler regular expression"
                )
            is_answer, text = self._connection.recv()
        except (OSError, EOFError) as error:
            self.close()
            raise DdpProfError("the process that answers was killed, perhaps for want of memory") from error
        if not is_answer:
            raise DdpProfError(text)
        return str(text)

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._connection = self._folder = None

    def end(self) -> None:
        """End the process as :meth:`close` does; for the signal handler, which runs in the main thread.

        It waits until no other thread is starting a process: a half-started process could not be killed, and would live
        on.
        """
        with self._starting:
            self.close()

    def _start(self) -> None:
        """Start the process, and before that end the last one."""
        with self._starting:
            self.close()
            context = get_context("spawn")
            self._folder = TemporaryDirectory(prefix="ddp_prof.")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve_answers, args=(theirs, self._folder.name), daemon=True)
            with without_main_module():
                self._process.start()
            theirs.close()


ANSWERS = Answers()


def _serve_answers(connection: Connection[Any, Any], folder: str) -> None:
    """Answer questions until the server ends; the body of the process.

    Stdin and stdout belong to the server's protocol, so this process reads from nowhere and prints to stderr.

    Args:
        connection: Receives a question with its time limit in seconds; sends whether there is an answer, and the answer
            or the error.
        folder: The folder for temporary files.
    """
    # Descriptors: 0 is stdin, 1 stdout, 2 stderr.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    tempfile.tempdir = folder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # These end the process; SIGALRM is the signal of the timer below.
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    with suppress(EOFError):
        while True:
            question, limit_s = connection.recv()
            # If the server is killed meanwhile, this timer ends the process.
            signal.setitimer(signal.ITIMER_REAL, 2 * limit_s)
            try:
                answer = _answer(question.name, list(question.traces), list(question.options))
                reply = True, _shorten_answer(answer, question.part, question.first)
            except click.UsageError as error:
                reply = False, error.format_message()
            except ACTIONABLE as error:
                reply = False, error_line(error)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send(reply)


def _bytes_of(traces: Iterable[str]) -> int:
    """Return how many bytes the files in these traces and folders hold; what cannot be read counts as 0."""
    total = 0
    for trace in map(Path, traces):
        with suppress(OSError):
            files = trace.iterdir() if trace.is_dir() else (trace,)
            total += sum(held_bytes(file) for file in files if file.is_file())
    return total


def _answer(name: str, traces: list[str], options: list[str]) -> dict[str, Any]:
    """Return the command's JSON documents, one per run, and the notes below its tables.

    Args:
        name: The command.
        traces: Files and folders.
        options: How they are read, as options of the command line.
    """
    command = questions()[name]
    read = command.parse_load_options([*options, "--", *traces])
    files = find_files(traces)
    for file in files:
        refuse_to_export(file)
    assert command.answer is not None
    views = command.answer.views(load_runs(files, read, measures=command.answer.measures_for(as_json=True)))
    words = ["ddp-prof", name, "--format", "json", *options]
    return {
        "command": " ".join((*map(shell_quote, words), *map(shell_path, traces))),
        "documents": [view.document for view in views],
        "notes": list(dict.fromkeys(note for view in views for note in view.notes)),
    }


def _shorten_answer(answer: dict[str, Any], part: str | None, first: int) -> str:
    """Return the answer as JSON whose long lists are cut so that it has at most ``LONGEST`` characters.

    Args:
        answer: The answer.
        part: Name of a list in it; then only this list is returned.
        first: Number of the first entry of that list to return.
    """
    # A copy with plain lists and dictionaries.
    whole = json.loads(json.dumps(answer, allow_nan=False))
    if part is not None:
        whole = {"command": whole["command"], part: _find_list(whole, part)[first:]}
    for most in MOST_ENTRIES:
        cut: dict[str, str] = {}
        shown = {
            key: _shorten_lists(value, key, most, cut, first if key == part else 0) for key, value in whole.items()
        }
        text = json.dumps({**shown, "cut": cut}, separators=(",", ":"))
        if len(text) <= LONGEST:
            break
    return text


def _find_list(whole: Any, part: str) -> list[Any]:
    """Return the list with a name such as ``documents/0/ranks`` in an answer.

    Raises:
        DdpProfError: There is no such list.
    """
    try:
        for key in part.split("/"):
            whole = whole[int(key) if isinstance(whole, list) else key]
    except (KeyError, IndexError, ValueError, TypeError):
        whole = None
    if not isinstance(whole, list):
        raise DdpProfError(f"no list {part!r} in the answer: take a name that 'cut' has, such as documents/0/ranks")
    return whole


def _shorten_lists(value: Any, name: str, most: int, cut: dict[str, str], first: int = 0) -> Any:
    """Return ``value`` with each list in it cut to ``most`` entries.

    Args:
        value: A part of an answer.
        name: Its name, such as ``documents/0``.
        most: Most entries of a list; a list of texts keeps at least ``LEAST_WORDS``.
        cut: Gets, for the name of each list that is cut, which of its entries are left.
        first: Number of the first entry of ``value``, if that is a list.
    """
    if isinstance(value, dict):
        return {key: _shorten_lists(each, f"{name}/{key}", most, cut) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    kept = most if any(isinstance(each, dict | list) for each in value) else max(most, LEAST_WORDS)
    if len(value) > kept:
        left = f"entries {first} to {first + kept - 1}" if kept else "none"
        cut[name] = f"{left} of {first + len(value)}"
    return [_shorten_lists(each, f"{name}/{number}", most, cut) for number, each in enumerate(value[:kept], first)]
