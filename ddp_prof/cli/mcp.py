"""``ddp-prof mcp``: a server of the Model Context Protocol, through which an assistant asks about traces.

A tool is called as a command, and answers with what that command prints as JSON, so the figures are those of the
command line. Traces are only read. Stdout belongs to the protocol: the SDK keeps it from all that prints.
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
Reads traces of data-parallel training (Nsight Systems, torch.profiler): what of the communication is exposed, whether \
that costs time, why, and what to change. Begin with info and summary. Give the files of all ranks of a run together.
Times are nanoseconds, ratios 0 to 1. null is not 0: it means not known; say the reason beside it, and compute no \
figure in its place. Exposed is not blocking: only what something waits for costs time. gain_at_most is an upper \
bound. device: cpu shows what a variant does, not how fast a GPU would do it. Cite the command and the warnings, notes \
and not_known that bear on the answer; where they say that a figure is not available, say so."""

ARGUMENTS = """
Arguments: traces, a list of files or folders, best absolute; step_range and backward_range, regular expressions for the
names of ranges that are steps and backward, where info says that none was recognised. A long list in the answer is cut
and named in 'cut': part=NAME and first=NUMBER give its entries from that one on."""

LONGEST = 20_000
"""Characters of an answer: what an assistant can read at once, beside all else."""
MOST_ENTRIES = (1000, 500, 200, 100, 50, 20, 10, 5, 2, 1, 0)
"""Entries to which lists are cut: the first of these with which the answer is not too long."""
LEAST_WORDS = 20
"""Warnings and other lines that are always kept."""


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
    """End at once: the thread that reads stdin would wait for its next line. Temporary files are removed."""
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
    """What the command prints as JSON, a document per run, and the notes below its table."""
    files = find_files(traces)
    for file in files:
        refuse_to_export(file)
    measures, tables_of = QUESTIONS[name]
    if name == "summary":  # by the size of the traces
        measures = summary_measures(files)
    views = tables_of(load_runs(files, options, measures=measures))
    ranges = {"--step-range": options.step_range, "--backward-range": options.backward_range}
    said = [f"{option}={value}" for option, value in ranges.items() if value]
    return {
        "command": shlex.join(["ddp-prof", name, "--format", "json", *said, *traces]),
        "documents": [view.document for view in views],
        "notes": list(dict.fromkeys(note for view in views for note in view.notes)),
    }


def _shorten_answer(answer: dict[str, Any], part: str | None, first: int) -> str:
    """The answer, or one list of it from an entry on, as JSON that is short enough: long lists are cut."""
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
    """The list of that name: ``documents/0/collectives``."""
    try:
        for key in part.split("/"):
            whole = whole[int(key) if isinstance(whole, list) else key]
    except (KeyError, IndexError, ValueError, TypeError):
        whole = None
    if not isinstance(whole, list):
        raise DdpProfError(f"no list {part!r} in the answer: take a name that 'cut' has, such as documents/0/ranks")
    return whole


def _shorten_lists(value: Any, name: str, most: int, cut: dict[str, str], first: int = 0) -> Any:
    """The same with lists of ``most`` entries, numbered from ``first`` on; ``cut`` gets the names of longer ones."""
    if isinstance(value, dict):
        return {key: _shorten_lists(each, f"{name}/{key}", most, cut) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    kept = most if any(isinstance(each, dict | list) for each in value) else max(most, LEAST_WORDS)
    if len(value) > kept:
        given = f"entries {first} to {first + kept - 1}" if kept else "none"
        cut[name] = f"{given} of {first + len(value)}"
    return [_shorten_lists(each, f"{name}/{number}", most, cut) for number, each in enumerate(value[:kept], first)]
