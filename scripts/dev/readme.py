"""Runs commands for the blocks of README.md and docs/ that ``cog`` fills in, so that they show real output.

Rebuild with ``python -m cogapp -r -I scripts/dev README.md``; the tests run it with ``--check``.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shlex
import struct
import sys
import termios
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WIDTH = 110
"""Characters per line that a page of GitHub shows without scrolling."""


def console(command: str, *, lines: int | None = None, width: int = WIDTH, folder: Path = ROOT) -> str:
    """Return a command of ``ddp-prof`` and its output on a terminal, as a block of Markdown.

    Args:
        command: The command line.
        lines: Show only so many lines of the output.
        width: Characters per line of the terminal.
        folder: Folder in which it runs.
    """
    output = [line.rstrip() for line in _run_in_terminal(command, width, folder).splitlines() if line.strip()]
    shown = output if lines is None else [*output[:lines], "..."]
    return "\n".join(["```console", f"$ {command}", *shown, "```", ""])


@cache
def _run_in_terminal(command: str, width: int, folder: Path) -> str:
    """Run a command, once for all pages, in a fork of this process, which has imported what most commands need."""
    from ddp_prof.cli import main

    _json_document(JSON_COMMANDS[0])  # whose keys docs/formats.md shows; forks need not import all of that again

    program, *arguments = shlex.split(command)
    assert program == "ddp-prof", command
    sys.stdout.flush()
    process, terminal = pty.fork()
    if not process:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("4H", 50, width, 0, 0))
        os.environ |= {"TERM": "dumb", "COLUMNS": str(width)}
        os.chdir(folder)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        try:
            main(arguments, prog_name=program)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    printed = b""
    while block := _read(terminal):
        printed += block
    os.close(terminal)
    os.waitpid(process, 0)
    return printed.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the end of a terminal's output on Linux
        return b""


def file(path: str) -> str:
    """Return a file of the repository as a block of Markdown."""
    return f"```\n{(ROOT / path).read_text(encoding='utf-8').rstrip()}\n```\n"


def runs(folder: str = "traces") -> str:
    """Return a Markdown table of the captures in a folder of the repository, from their manifests."""
    from ddp_prof.manifest import SUFFIX, label_of, load_manifest

    lines = ["| capture | variant | ranks | model | batch | steps | recorded by | made | machine |", "|" + "---|" * 9]
    for path in sorted((ROOT / folder).glob(f"*{SUFFIX}")):
        run = load_manifest(path)
        assert run
        name = path.name.removesuffix(SUFFIX)
        batch = f"{run.batch_size} x {run.seq_len}"
        steps = f"{run.steps} after {run.warmup}"
        machine = f"{run.machine.get('cpu', '?')}, {run.machine.get('cores', '?')} cores"
        machine = run.machine.get("gpus") or machine
        cells = [name, label_of(path, run), run.world_size, f"{run.model_size} ({run.device}, {run.backend})", batch]
        cells += [steps, run.profiler or "no profiler", run.created, machine]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


JSON_COMMANDS = (
    "overlap traces/overlap.sqlite",
    "summary traces/overlap.sqlite",
    "collectives traces/overlap.sqlite",
    "critical traces/overlap.sqlite",
    "doctor traces/flat.sqlite",
    "skew traces/overlap.sqlite",
    "kernels traces/overlap.sqlite",
    "compare traces/naive.sqlite traces/flat.sqlite",
    "whatif traces/torch.sqlite",
    "check traces/overlap.sqlite --max-tail-ms 1000",
    "info traces/overlap.sqlite",
    "results traces/results.db",
)


def json_keys() -> str:
    """Return the keys of each command's JSON document, as rows of a Markdown table."""
    return "".join(
        f"| `{command.partition(' ')[0]}` | {_keys(_json_document(command))} |\n" for command in JSON_COMMANDS
    )


PARTS = (
    ("summary traces/overlap.sqlite", "runs"),
    ("overlap traces/overlap.sqlite", "attribution"),
    ("overlap traces/bucketed_10mb.sqlite", "outliers"),
    ("collectives traces/overlap.sqlite", "alignment"),
    ("collectives traces/overlap.sqlite", "alignment/clocks"),
    ("critical traces/h200/nccl/flat.sqlite", "steps/collectives"),
    ("skew traces/overlap.sqlite", "steps"),
    ("kernels traces/overlap.sqlite", "ranks"),
    ("kernels traces/overlap.sqlite", "ranks/hidden"),
    ("kernels traces/overlap.sqlite", "ranks/idle"),
    ("check traces/overlap.sqlite --max-tail-ms 1000", "runs"),
    ("check traces/overlap.sqlite --max-tail-ms 1000", "runs/verdicts"),
    ("compare traces/naive.sqlite traces/flat.sqlite", "waterfall"),
)
"""Commands, and an object in their documents; of a list, the first entry counts."""


def json_parts() -> str:
    """Return the keys of objects within documents, as rows of a Markdown table."""
    rows = ""
    for command, path in PARTS:
        found = _json_document(command)
        for key in path.split("/"):
            found = found[key][0] if isinstance(found[key], list) else found[key]
        name = command.partition(" ")[0]
        rows += f"| `{name}` | {' of '.join(f'`{key}`' for key in reversed(path.split('/')))} | {_keys(found)} |\n"
    return rows


def json_keys_of(*path: str, command: str = "overlap") -> str:
    """Return the keys of an object in a command's document; of a list in ``path``, the first entry counts."""
    found = _json_document(next(one for one in JSON_COMMANDS if one.partition(" ")[0] == command))
    for key in path:
        found = found[key][0] if isinstance(found[key], list) else found[key]
    return f"{_keys(found)}\n\n"


def figures_of(kind: str) -> str:
    """Return a Markdown table of declared figures.

    Args:
        kind: ``rank``, ``step``, ``length`` of a step, ``collective``, ``kernel``, ``skew`` of a rank, ``run``,
            ``path`` of a step, ``process``, ``parts`` of a step, or ``change`` of a part.
    """
    from ddp_prof.analyze.collectives.collective import Collective
    from ddp_prof.analyze.collectives.skew import RankSkew
    from ddp_prof.analyze.critical.critical_path import StepPath
    from ddp_prof.analyze.inventory import ProcessInventory
    from ddp_prof.analyze.kernels.kernel_times import KernelTime
    from ddp_prof.analyze.overlap import RankOverlap
    from ddp_prof.analyze.step_columns import StepLength, StepOverlap
    from ddp_prof.analyze.variants.comparison import VariantSummary
    from ddp_prof.analyze.variants.waterfall import PartChange, Parts
    from ddp_prof.columns import result_columns

    lines = ["| key | unit | meaning | null if |", "|---|---|---|---|"]
    kinds = {"rank": RankOverlap, "step": StepOverlap, "length": StepLength, "collective": Collective}
    kinds |= {"kernel": KernelTime, "skew": RankSkew, "run": VariantSummary, "path": StepPath}
    kinds |= {"process": ProcessInventory, "parts": Parts, "change": PartChange}
    for one in result_columns(kinds[kind]):
        if one.in_document:
            cells = [f"`{one.name}`", one.unit, *(text.replace("``", "`") for text in (one.meaning, one.why_null))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n"


def fault_table() -> str:
    """Return a Markdown table of what the doctor finds in each capture with a fault."""
    from ddp_prof.run_config import FAULTS

    lines = ["| fault | found | evidence |", "|---|---|---|"]
    for fault in FAULTS:
        capture = f"tests/analyze/doctor/captures/{fault.replace('-', '_')}.sqlite"
        document = _json_document(f"doctor {capture}")
        found = document["findings"]
        rules = ", ".join(finding["rule"] for finding in found) or "none"
        lines.append(f"| `{fault}` | {rules} | {' '.join(finding['evidence'] for finding in found)} |")
    return "\n".join(lines) + "\n\n"


def _keys(document: dict[str, Any]) -> str:
    return ", ".join(f"`{key}`" for key in document)


@cache
def _json_document(command: str) -> Any:
    from click.testing import CliRunner

    from ddp_prof.cli import main

    here = Path.cwd()
    os.chdir(ROOT)
    done = CliRunner().invoke(main, [*command.split(), "--format", "json"], catch_exceptions=False)
    os.chdir(here)
    assert not done.exit_code, done.stderr
    return json.loads(done.stdout)
