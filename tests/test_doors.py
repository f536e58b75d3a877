"""What CONTRIBUTING says of an addition is true: each is made in a copy, in as many places as it says, and works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.golden import ROOT

A_RULE = """

def always(run: RunEvidence) -> Finding:
    return Finding("there is a run", f"It has {len(run.analysis.ranks)} ranks.", "Nothing.")
"""
A_LIBRARY = """
    Library(
        "a library that nobody has",
        r"acme_comm_",
        {"acme_comm_AllGather": ALL_GATHER},
        "a test",
    ),"""
A_FORMAT = '''
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.kineto_json import load_kineto_json
from ddp_prof.trace import Trace


def load_acme(path: Path, options: ReadOptions) -> Trace:
    """The trace of torch.profiler behind the letters of the format."""
    with TemporaryDirectory() as folder:
        inner = Path(folder) / "inner.json"
        inner.write_bytes(path.read_bytes()[4:])
        return replace(load_kineto_json(inner, options), path=path, source="acme")
'''
A_READER = """
    Reader(
        "acme", (".acme",), recognises=lambda head: head.startswith(b"ACME"), load="ddp_prof.ingest.acme:load_acme"
    ),"""


@dataclass(frozen=True)
class Door:
    """An addition: its section, what follows which text in which file, and a command that then prints something."""

    section: str
    changes: dict[str, tuple[str, str]]
    command: list[str]
    prints: str


DOORS = {
    "rule": Door(
        "Adding a rule",
        {
            "ddp_prof/analyze/doctor/communication.py": ("", A_RULE),
            "ddp_prof/analyze/doctor/__init__.py": ("    communication.compute_stream,", "\n    communication.always,"),
            "docs/doctor.md": ("| rule | looks for |\n|---|---|", "\n| there is a run | any run |"),
        },
        ["doctor", "traces/overlap.sqlite"],
        "there is a run: It has 2 ranks. Nothing.",
    ),
    "library": Door(
        "Adding a collective library",
        {"ddp_prof/communication.py": ("LIBRARIES = (", A_LIBRARY)},
        ["collectives", "--by", "collective", "named.json"],
        "all_gather",
    ),
    "format": Door(
        "Adding a format",
        {
            "ddp_prof/ingest/acme.py": ("", A_FORMAT),
            "ddp_prof/ingest/load.py": ("READERS = (", A_READER),
            "ddp_prof/trace.py": ("SOURCE_NAMES = {", '"acme": "the profiler of Acme", '),
            "docs/formats.md": ("|---|---|---|\n", "| trace of Acme (`.acme`) | a test | its first bytes |\n"),
        },
        ["overlap", "some.acme"],
        "the profiler of Acme",
    ),
}
RUN = "import sys; sys.path.insert(0, sys.argv.pop(1)); from ddp_prof.cli import main; main()"


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.slow
def test_an_addition_is_as_many_places_as_contributing_says(tmp_path: Path, door: Door) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition(f"## {door.section}\n")[2]
    items = re.findall(r"^\d\. (.*(?:\n   .*)*)", text.partition("\n## ")[0], re.MULTILINE)
    assert len(items) == len(door.changes)
    for item, place in zip(items, door.changes, strict=True):
        assert place in item or Path(place).parent.as_posix() in item

    shutil.copytree(ROOT / "ddp_prof", tmp_path / "ddp_prof")  # with its compiled modules
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("figures"))
    for place, (after, added) in door.changes.items():
        path = tmp_path / place
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        assert after in before
        path.write_text(before.replace(after, after + added, 1) if after else before + added, encoding="utf-8")
    shutil.copytree(ROOT / "traces", tmp_path / "traces", ignore=shutil.ignore_patterns("h200", "*.nsys-rep"))
    write_traces(tmp_path)

    command = [sys.executable, "-c", RUN, str(tmp_path), *door.command, "--format", "table"]
    variables = {"DDP_PROF_CACHE": "off", "PATH": ""}
    ran = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert not ran.returncode, ran.stderr
    assert door.prints in " ".join(ran.stdout.split())


def write_traces(folder: Path) -> None:
    """A trace of torch.profiler with a kernel of the new library, and the same in the new format."""
    kernel = {"ph": "X", "cat": "kernel", "name": "acme_comm_AllGather", "pid": 0, "tid": 7, "ts": 0.0, "dur": 9.0}
    events = [{**kernel, "args": {"device": 0, "stream": 7, "correlation": 1}}]
    text = json.dumps({"schemaVersion": 1, "traceEvents": events})
    (folder / "named.json").write_text(text, encoding="utf-8")
    (folder / "some.acme").write_bytes(b"ACME" + text.encode())
