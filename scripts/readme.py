"""Runs commands for the blocks of README.md that ``cog`` fills in, so that what it shows is what happens.

Rebuild with ``python -m cogapp -r -I scripts README.md``; the tests run it with ``--check``.
"""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

ROOT = Path(__file__).parent.parent
WIDTH = 110
"""Characters of a line: what a page of GitHub shows without scrolling."""


def console(command: str, *, lines: int | None = None) -> str:
    """A command and what it prints to a terminal, as a block of Markdown.

    Args:
        command: Run in the root of the checkout; ``ddp-prof`` is the one beside this Python.
        lines: Show only so many lines of the output.
    """
    output = [line.rstrip() for line in _run_in_terminal(command).splitlines() if line.strip()]
    shown = output if lines is None else [*output[:lines], "..."]
    return "\n".join(["```console", f"$ {command}", *shown, "```", ""])


def _run_in_terminal(command: str) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TERM": "dumb", "COLUMNS": str(WIDTH)}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 50, WIDTH, 0, 0))
    with subprocess.Popen(command, shell=True, cwd=ROOT, env=environment, stdout=theirs, stderr=theirs):  # noqa: S602
        os.close(theirs)
        printed = b""
        while block := _read(ours):
            printed += block
    os.close(ours)
    return printed.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that nobody writes any more
        return b""


def runs() -> str:
    """What each capture in ``traces/`` is, from its manifest, as a Markdown table."""
    from ddp_prof.manifest import SUFFIX, label_of, load_manifest

    lines = ["| capture | variant | ranks | model | batch | steps | recorded by | made | machine |", "|" + "---|" * 9]
    for path in sorted((ROOT / "traces").glob(f"*{SUFFIX}")):
        run = load_manifest(path)
        assert run
        name = path.name.removesuffix(SUFFIX)
        batch = f"{run.batch_size} x {run.seq_len}"
        steps = f"{run.steps} after {run.warmup}"
        machine = f"{run.machine.get('cpu', '?')}, {run.machine.get('cores', '?')} cores"
        cells = [name, label_of(path, run), run.world_size, f"{run.model_size} ({run.device}, {run.backend})", batch]
        cells += [steps, run.profiler or "no profiler", run.created, machine]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"
