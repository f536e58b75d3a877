"""What no contract of import-linter (pyproject.toml) can say: cycles, who uses which library, what loads what."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import grimp
import pytest

from ddp_prof.cli import COMMANDS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ddp_prof"
SOURCES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in SOURCES})

GROUND = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
SOLE_USERS = {
    "torch": {"annotate", "ddp", "train"},
    "nvtx": {"annotate"},
    "plotly": {"runs", "present"},
    "choreographer": {"present"},
    "jinja2": {"present"},
    "pandas": {"analyze"},  # analyze: only in to_frame()
    "sqlite_utils": {"benchmark"},
    "sqlite3": {"ingest", "benchmark"},
    "adbc_driver_sqlite": {"ingest"},
    "pyarrow": {"ingest"},
    "msgspec": {"ingest", "manifest", "benchmark", "tune", "monitor"},
    "distributed": {"runs"},
    "click": {"cli"},
    "mcp": {"cli"},
    "rich": {"cli", "present"},
}

# Functions of the analysis that a file of the presentation calls.
KNOWN_CALLS = {
    "present.timeline.lanes": {"union_of_one"},  # the algebra of intervals, which measures nothing
}

Edges = dict[str, set[str]]


def module_of(path: Path) -> str:
    """The dotted name below the package: ``ingest.load``; of the package itself an empty one."""
    *folders, name = path.relative_to(PACKAGE.parent).parts[1:] or ("",)
    return ".".join([*folders, name.removesuffix(".py")]).removesuffix("__init__").rstrip(".")


def room_of(path: Path) -> str:
    return module_of(path).partition(".")[0]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(path: Path) -> set[str]:
    """Dotted names of all modules imported anywhere in the file, in functions and for types, too."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@cache
def import_graph(*, with_types: bool) -> Edges:
    """Which file imports which."""
    graph = grimp.build_graph("ddp_prof", exclude_type_checking_imports=not with_types, cache_dir=None)
    return {
        module.removeprefix("ddp_prof").lstrip("."): {
            name.removeprefix("ddp_prof").lstrip(".") for name in graph.find_modules_directly_imported_by(module)
        }
        for module in graph.modules
    }


def reachable(start: str, edges: Edges) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = edges[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def cycles_in(edges: Edges) -> set[frozenset[str]]:
    """The groups of which each member reaches all others."""
    beyond = {name: reachable(name, edges) for name in edges}
    return {
        frozenset(other for other in beyond[name] if name in beyond[other]) for name in edges if name in beyond[name]
    }


def parts_of(folder: str) -> Edges:
    """The import graph of a folder: its files, and its folders as one part each. The ground floor is one part, too."""
    prefix = f"{folder}." if folder else ""

    def part(module: str) -> str | None:
        name = module.removeprefix(prefix).partition(".")[0]
        if not module.startswith(prefix) or not name:
            return None
        return "ground" if not folder and name in GROUND else name

    edges: Edges = {}
    for importer, imported in import_graph(with_types=True).items():
        if (here := part(importer)) is not None:
            edges.setdefault(here, set()).update({part(name) for name in imported} - {None, here})
    return edges


def test_cycles_are_found() -> None:
    edges = {"roof": {"wall"}, "wall": {"stair"}, "stair": {"floor", "wall"}, "floor": set()}
    assert cycles_in(edges) == {frozenset({"wall", "stair"})}


@pytest.mark.parametrize("with_types", [False, True])
def test_no_two_files_import_each_other(with_types: bool) -> None:
    assert cycles_in(import_graph(with_types=with_types)) == set()


def test_no_folder_is_circular() -> None:
    assert [folder for folder in FOLDERS if cycles_in(parts_of(module_of(folder)))] == []


@pytest.mark.slow
def test_large_libraries_have_few_users() -> None:
    users: dict[str, set[str]] = {library: set() for library in SOLE_USERS}
    for path in SOURCES:
        for library in {name.partition(".")[0] for name in imports_of(path)} & users.keys():
            users[library].add(room_of(path))
    assert users == SOLE_USERS


def test_the_presentation_takes_results_and_calls_no_analysis() -> None:
    calls: dict[str, set[str]] = {}
    for path in (PACKAGE / "present").rglob("*.py"):
        names = {name.rpartition(".") for name in imports_of(path) if name.startswith("ddp_prof.analyze.")}
        functions = {name for _, _, name in names if name.islower()}
        if functions:
            calls[module_of(path)] = functions
    assert calls == KNOWN_CALLS


def test_only_the_command_line_and_the_workload_print_and_exit() -> None:
    calls = {
        (module_of(path), node.func.id)
        for path in SOURCES
        if room_of(path) not in {"cli", "train", "benchmark"}
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert [call for call in sorted(calls) if call[1] in {"print", "exit", "quit"}] == []


@pytest.mark.parametrize("module", ["ddp_prof", "ddp_prof.annotate", "ddp_prof.cli", "ddp_prof.range_names"])
def test_importing_is_light(module: str) -> None:
    heavy = ["torch", "plotly", "pandas", "numpy", "jinja2", "pyarrow", "rich", "choreographer", "sqlite_utils", "mcp"]
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("program", ["ddp_prof.train", "ddp_prof.benchmark.sweep"])
def test_help_of_a_program_is_light(program: str) -> None:
    heavy = ["torch", "plotly", "pandas", "rich", "sqlite_utils"]
    code = f"""
import runpy, sys
sys.argv = ["program", "--help"]
try:
    runpy.run_module({program!r}, run_name="__main__")
except SystemExit:
    print([module for module in {heavy!r} if module in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--help" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_reading_never_loads_torch() -> None:
    """Even where it is installed: no command and no module of the reading side imports it, nor what records."""
    rooms = {"ingest", "analyze", "present", "runs", "cli", "capture"} & {room_of(path) for path in SOURCES}
    modules = [f"ddp_prof.{module_of(path)}" for path in SOURCES if room_of(path) in rooms]
    code = f"import sys, importlib; [importlib.import_module(m) for m in {modules}]; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_the_contracts_of_import_linter_are_kept() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_file_of_tables_has_the_name_of_its_command() -> None:
    names = {path.stem for path in (PACKAGE / "present" / "tables").glob("[!_]*.py")}
    assert names <= COMMANDS.keys(), f"no command: {names - COMMANDS.keys()}"
