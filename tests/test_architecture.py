"""The table of who may import whom, walked over the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ddp_prof"
BOTTOM = {"errors", "range_names", "trace", "manifest"}

MAY_IMPORT = {
    "errors": set(),
    "range_names": {"errors"},
    "trace": {"errors", "manifest"},
    "manifest": {"errors"},
    "ingest": BOTTOM,
    "analyze": BOTTOM,
    "ddp": {"range_names", "errors"},
    "train": {"ddp", *BOTTOM},
    "present": {"analyze", *BOTTOM},
    "benchmark": {"analyze", "present", "train", *BOTTOM},
    "cli": {"ingest", "analyze", "present", "benchmark", *BOTTOM},
}
SOLE_USERS = {
    "torch": {"ddp", "train", "benchmark"},
    "nvtx": {"ddp"},
    "plotly": {"present", "benchmark"},
    "kaleido": {"present"},
    "pandas": {"present", "analyze"},  # analyze: only in to_frame()
    "sqlite_utils": {"benchmark"},
    "sqlite3": {"ingest", "benchmark"},
    "adbc_driver_sqlite": {"ingest"},
    "pyarrow": {"ingest"},
    "msgspec": {"ingest", "manifest"},
    "click": {"cli"},
    "rich": {"cli", "present", "benchmark"},
}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """The top-level module or package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Dotted names of all modules imported anywhere in the file, in functions and for types, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_stay_within_the_layers(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    for name in imports_of(path):
        top, _, rest = name.partition(".")
        if top == "ddp_prof":
            other = rest.partition(".")[0]
            assert other in MAY_IMPORT[room] | {room, "", "__version__"}, f"{room} may not import {name}"
        elif top in SOLE_USERS:
            assert room in SOLE_USERS[top], f"{room} may not use {top}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_command_line_and_the_workload_print_and_exit(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    allowed = room_of(path) in {"cli", "train", "benchmark"}
    assert allowed or not calls & {"print", "exit", "quit"}


@pytest.mark.parametrize("module", ["ddp_prof", "ddp_prof.cli", "ddp_prof.range_names"])
def test_importing_is_light(module: str) -> None:
    heavy = ["torch", "plotly", "pandas", "numpy", "pyarrow", "rich", "kaleido", "sqlite_utils"]
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_reading_never_loads_torch() -> None:
    code = (
        "import sys; from ddp_prof.cli import COMMANDS, main; from importlib import import_module;"
        "[import_module(f'ddp_prof.cli.{name}') for name in COMMANDS];"
        "import ddp_prof.ingest.load, ddp_prof.ingest.nsys_sqlite, ddp_prof.ingest.kineto_json;"
        "import ddp_prof.analyze.overlap.overlap; print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
