"""``ddp-prof mcp``: a server of the Model Context Protocol that answers an assistant's questions about traces.

Each tool is named like a command and answers with the JSON that the command prints, so the figures are the same.
Traces are only read. Stdout belongs to the protocol: the SDK keeps other output away from it.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shlex
import signal
from collections.abc import Callable
from threading import Lock
from types import FrameType
from typing import Any

import click

from ddp_prof import __version__
from ddp_prof.cli import ACTIONABLE, error_line, tables
from ddp_prof.cli.tables import QUESTIONS, summary_measures
from ddp_prof.errors import DdpProfError
from ddp_prof.ingest.load import refuse_to_export
from ddp_prof.runs import find_files, load_runs
from ddp_prof.runs.report import LoadOptions

ONE_BY_ONE = Lock()
"""The SDK calls tools in threads; two large traces at once may not fit into the memory."""

INSTRUCTIONS = """\
Reads traces of data-parallel training (Nsight Systems, torch.profiler): how much communication is exposed, whether \
that costs time, why, and what to change. Begin with info and summary. Pass the files of all ranks of a run together.
Times are nanoseconds, ratios 0 to 1. null is not 0: it means not known; give the reason beside it, and do not compute \
a figure in its place. Exposed is not blocking: communication costs time only if something waits for it. gain_at_most \
is an upper bound. device: cpu shows what a variant does, not how fast a GPU would do it. Cite the command, and the \
warnings, notes and not_known that matter for the answer; if they say that a figure is not available, say so."""

ARGUMENTS = """
Arguments: traces, a list of files or folders, best as absolute paths; step_range and backward_range, regular
expressions for the names of ranges that are steps and backward, needed if info recognises none. A long list in the
answer is cut and named in 'cut': part=NAME and first=NUMBER return its entries from that number on."""

LONGEST = 20_000
"""Most characters in an answer, so that it fits beside the rest of an assistant's context."""
MOST_ENTRIES = (1000, 500, 200, 100, 50, 20, 10, 5, 2, 1, 0)
"""Lengths to which lists are cut; the first one is taken that makes the answer short enough."""
LEAST_WORDS = 20
"""Lists of text, such as warnings, keep at least this many entries."""


@click.command("mcp")
def mcp() -> None:
    """Answer an assistant's questions about traces, by the Model Context Protocol.

    A client starts it and talks to it over stdin and stdout. Its tools are commands that only read: summary, info,
    overlap, collectives, critical, doctor, skew, kernels, compare. Needs: pip install 'ddp-prof[mcp]'.
    """
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError as error:
        raise DdpProfError("this needs the MCP SDK, version 2 or later: pip install 'ddp-prof[mcp]'") from error
    server = MCPServer("ddp-prof", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
    for name in QUESTIONS:
        about = getattr(tables, name).help
        server.add_tool(
            _make_tool(name),
            name=name,
            description=about + ARGUMENTS,
            annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False),
            structured_output=False,
        )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    server.run()


def _stop(number: int, _frame: FrameType | None) -> None:
    """End at once, because the thread that reads stdin would wait for another line; remove temporary files."""
    atexit._run_exitfuncs()
    os._exit(128 + number)


def _make_tool(name: str) -> Callable[..., str]:
    from mcp.server.mcpserver.exceptions import ToolError

    def ask(
        traces: list[str],
        step_range: str | None = None,
        backward_range: str | None = None,
        part: str | None = None,
        first: int = 0,
    ) -> str:
        try:
            with ONE_BY_ONE:
                return _shorten_answer(
                    _answer(name, traces, LoadOptions(step_range, backward_range)), part, max(0, first)
                )
        except re.error as error:
            raise ToolError(f"not a regular expression: {error}") from error
        except ACTIONABLE as error:
            raise ToolError(error_line(error)) from error

    return ask


def _answer(name: str, traces: list[str], options: LoadOptions) -> dict[str, Any]:
    """Return the command's JSON documents, one per run, and the notes below its table."""
    files = find_files(traces)
    for file in files:
        refuse_to_export(file)
    measures, tables_of = QUESTIONS[name]
    if name == "summary":  # without the doctor if the traces are large
        measures = summary_measures(files)
    views = tables_of(load_runs(files, options, measures=measures))
    ranges = {"--step-range": options.step_range, "--backward-range": options.backward_range}
    passed = [f"{option}={value}" for option, value in ranges.items() if value]
    return {
        "command": shlex.join(["ddp-prof", name, "--format", "json", *passed, *traces]),
        "documents": [view.document for view in views],
        "notes": list(dict.fromkeys(note for view in views for note in view.notes)),
    }


def _shorten_answer(answer: dict[str, Any], part: str | None, first: int) -> str:
    """Return the answer, or the list named ``part`` from entry ``first`` on, as JSON whose long lists are cut."""
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
    try:
        for key in part.split("/"):
            whole = whole[int(key) if isinstance(whole, list) else key]
    except (KeyError, IndexError, ValueError, TypeError):
        whole = None
    if not isinstance(whole, list):
        raise DdpProfError(f"no list {part!r} in the answer: take a name that 'cut' has, such as documents/0/ranks")
    return whole


def _shorten_lists(value: Any, name: str, most: int, cut: dict[str, str], first: int = 0) -> Any:
    """Cut lists in ``value`` to ``most`` entries; write to ``cut``, for each longer list, which entries are left.

    ``first`` is the number of the first entry of ``value``, if that is a list.
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
