"""Runs commands for the blocks of README.md that ``cog`` fills in, so that what it shows is what happens.

Rebuild with ``python -m cogapp -r -I scripts README.md``; the tests run it with ``--check``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def console(command: str, *, lines: int | None = None) -> str:
    """A command and what it prints, as a block of Markdown.

    Args:
        command: Run in the root of the checkout; ``ddp-prof`` is the one beside this Python.
        lines: Show only so many lines of the output.
    """
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1"}
    done = subprocess.run(command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)  # noqa: S602
    output = [line.rstrip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    shown = output if lines is None else [*output[:lines], "..."]
    return "\n".join(["```console", f"$ {command}", *shown, "```", ""])


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
