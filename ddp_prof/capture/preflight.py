"""Finds what a program lacks for its recording before it starts; otherwise that may show after an hour only."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_prof.errors import printable
from ddp_prof.ingest.nsys_program import Nsys

PROBE_LIMIT_S = 60
"""Seconds to wait for the answer of the program's Python."""
LAST_OLD_NSYS, FIRST_SILENT_NVTX = [2023, 4], "0.2.12"
"""Under nsys up to this release, the package nvtx from this release on emits no range, and raises no error."""
LEAST_FREE_BYTES = 512 * 2**20
"""With less free space on the disk there is a doubt about the recording."""

# Prints, as JSON, the version of torch, whether that torch has CUDA, and the version of nvtx. It does not import torch,
# which would take seconds. Only builds of torch with CUDA have an NVTX of their own.
_PROBE = """
import json, pathlib
from importlib.metadata import version
from importlib.util import find_spec
def of(name):
    try:
        return version(name)
    except Exception:
        return ""
torch = find_spec("torch")
text = pathlib.Path(torch.origin).with_name("version.py").read_text() if torch and torch.origin else ""
cuda = [line for line in text.splitlines() if line.startswith("cuda")]
print(json.dumps([of("torch") if torch else "", bool(cuda) and "None" not in cuda[0].split("=")[-1], of("nvtx")]))
"""


@dataclass(frozen=True)
class Interpreter:
    """The Python that runs a program: its path and the versions of packages, empty if a package is not installed.

    ``torch_has_nvtx`` is whether its torch can emit NVTX ranges by itself.
    """

    path: str
    torch: str
    torch_has_nvtx: bool
    nvtx: str


def why_not_startable(program: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return why a command line cannot be started, with the way out; ``None`` if its program is found.

    Words like ``NAME=value`` before the program are variables of the environment, as for ``env``.
    """
    words = [*program]
    while words and re.match(r"[A-Za-z_][A-Za-z0-9_]*=", words[0]):
        del words[0]
    wanted = "give the command line that starts your training, launcher included, after --"
    if not words or not words[0]:
        return f"there is no program to start: {wanted}"
    name, shown = words[0], printable(words[0])
    if shutil.which(name, path=environ.get("PATH")):
        return None
    file = Path(name)
    if file.is_dir():
        return f"{shown} is a folder: {wanted}"
    if file.is_file() and file.suffix == ".py":
        return f"{shown} is a script, not a program: start it as 'python {shown}'"
    if file.is_file():
        on_path = os.access(file, os.X_OK) and os.sep not in name
        return (
            f"{shown} is not on PATH: give ./{shown}" if on_path else f"{shown} is not executable: chmod +x makes it so"
        )
    return f"there is no program {shown!r}: {wanted}"


def find_interpreter(program: Sequence[str], environ: Mapping[str, str]) -> Interpreter | None:
    """Find the Python that a command line starts, directly or by a script such as torchrun, and ask what it has.

    Returns ``None`` if there is no such Python or it does not answer.
    """
    found = shutil.which(program[0], path=environ.get("PATH"))
    if found is None:
        return None
    path = found if Path(found).name.startswith("python") else _interpreter_of_script(Path(found), environ.get("PATH"))
    if path is None:
        return None
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run(  # noqa: S603 - what the user is about to run anyway
            [path, "-c", _PROBE], capture_output=True, text=True, env=dict(environ), timeout=PROBE_LIMIT_S, check=True
        )
        torch, torch_has_nvtx, nvtx = json.loads(done.stdout)
        return Interpreter(path, torch, torch_has_nvtx, nvtx)
    return None


def _interpreter_of_script(script: Path, search: str | None) -> str | None:
    """Return the Python in the first lines (``#!``) of a script, as pip writes it for torchrun and accelerate.

    ``search`` is the PATH by which ``/usr/bin/env`` finds it. Returns ``None`` if they name no Python.
    """
    with suppress(OSError, ValueError), script.open("rb") as file:  # ValueError: a quotation without an end
        first, second = (file.readline(4096).decode(errors="replace") for _ in range(2))
        words = first[2:].split() if first.startswith("#!") else []
        # Where the path has blanks or is long, pip writes a script of sh that begins as a text in Python.
        if words[:1] == ["/bin/sh"] and second.startswith("'''exec' "):
            words = shlex.split(second.removeprefix("'''exec' "))
        if words and Path(words[0]).name.startswith("python"):
            return words[0]
        if words[:1] == ["/usr/bin/env"] and len(words) == 2 and words[1].startswith("python"):
            return shutil.which(words[1], path=search)
    return None


def why_no_ranges(nsys: Nsys, python: Interpreter) -> str | None:
    """Return why nsys would see no range of the program, with the command that helps; ``None`` if it will see ranges.

    The program's ranges reach nsys through torch's own NVTX, else through the package nvtx.
    """
    if python.torch_has_nvtx:
        return None
    wanted = f"{python.path} -m pip install 'nvtx<{FIRST_SILENT_NVTX}'"
    if not python.nvtx:
        return f"the program's Python lacks the package nvtx, by which nsys {nsys.version} sees steps: {wanted}"
    is_old = _numbers(nsys.version)[: len(LAST_OLD_NSYS)] <= LAST_OLD_NSYS
    if is_old and _numbers(python.nvtx) >= _numbers(FIRST_SILENT_NVTX):
        return f"nsys {nsys.version} sees no range of nvtx {python.nvtx} in the program's Python: {wanted}"
    return None


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)]


def find_doubts(python: Interpreter | None, folder: Path) -> list[str]:
    """Return one line for each further problem that may spoil a recording into ``folder``."""
    doubts = []
    if python and not python.torch:
        doubts.append(f"the program's Python ({python.path}) has no torch, so no step can be marked")
    place = next((each for each in (folder, *folder.parents) if each.exists()), None)  # the folder may not exist yet
    if place and (free := shutil.disk_usage(place).free) < LEAST_FREE_BYTES:
        doubts.append(f"only {free / 2**20:.0f} MiB are free in {place}: a recording may need more")
    return doubts
