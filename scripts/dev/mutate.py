"""Changes the package at random places, one at a time, and prints which changes the tests notice.

    .venv/bin/pip install pytest-cov
    .venv/bin/python scripts/dev/mutate.py --seed 7 --count 100 [--under analyze ingest present/tables ddp]
        [--against COMMIT] [--only NUMBER ...] [--keep FOLDER]

A change is to one operator, number or condition. All tests but those of Chromium and nsys run once and say which lines
each of them reaches; then those that reach its line run on a change, the nearest first, until one fails. What runs in a
process of its own says nothing: for a line that no test reaches, and for ``ddp``, the tests of the file's folder run.

With ``--against``, the tests of another commit run on what those of this checkout do not notice, for instance of one
before tests were dropped: what these notice alone was lost. Of its tests only those run that this checkout has not, or
not with the same text, and those that draw examples.
With ``--keep``, the copies and what was measured stay in a folder, and the next call goes on with them.

Prints a row a change: its number, place, line before and after, and the first test that fails. Exit: 1 if anything was
lost, else 0. One seed draws the same changes as long as the package is the same.
"""

from __future__ import annotations

import argparse
import ast
import copy
import io
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from coverage import CoverageData  # type: ignore[import-not-found, unused-ignore]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "ddp_prof"
UNDER = ("analyze", "ingest", "present/tables", "ddp")
OTHERS = ("cli", "runs", "present", "test_golden.py", "test_own_traces.py", "test_empty_trace.py", "test_variants.py")
"""Tests of what reads the results of another folder."""
TEST_S, STAGE_S = 400, 3600
"""Time limits of one test and of all that run on a change; a change that ends in an endless loop is noticed, too."""

NEAREST = 300
"""So many tests run on a change before those of another commit; a line of the core is reached by thousands."""

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """A place in a file, as offsets of bytes, and what stands there instead."""

    path: str
    lines: range
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def changed(node: ast.AST) -> ast.expr | None:
    """Return the expression to put in the place of this one, ``None`` where it stays."""
    new = copy.copy(node)
    if isinstance(new, ast.Compare) and len(new.ops) == 1:
        new.ops = [COMPARED[type(new.ops[0])]()]
        return new
    if isinstance(new, (ast.BinOp, ast.BoolOp)) and (other := COMPUTED.get(type(new.op))):
        new.op = other()  # type: ignore[assignment]
        return new
    if isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        return new.operand
    if isinstance(new, ast.Constant) and isinstance(new.value, bool):
        return ast.Constant(not new.value)
    if isinstance(new, ast.Constant) and isinstance(new.value, (int, float)):
        return ast.Constant(new.value + 1)
    return None


def expressions(node: ast.AST, line: int = 1) -> Iterator[tuple[int, ast.expr, ast.expr]]:
    """Line of the statement, expression, and another one for it; annotations, assertions and texts are left out."""
    if isinstance(node, ast.stmt):
        line = node.lineno
    if isinstance(node, (ast.If, ast.IfExp)) and "TYPE_CHECKING" not in ast.unparse(node.test):
        yield line, node.test, ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.expr) and (new := changed(node)):
        yield line, node, new
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.JoinedStr, ast.Assert)):
                yield from expressions(child, line)


def changes_of(root: Path, path: Path) -> list[Change]:
    source = path.read_bytes()
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    return [
        Change(
            path.relative_to(root).as_posix(),
            range(line, (old.end_lineno or line) + 1),
            lines[old.lineno - 1] + old.col_offset,
            lines[(old.end_lineno or 0) - 1] + (old.end_col_offset or 0),
            f"({ast.unparse(new)})",
        )
        for line, old, new in expressions(ast.parse(source))
    ]


def draw(root: Path, under: Sequence[str], seed: int, count: int) -> list[Change]:
    files = sorted({file for folder in under for file in (root / PACKAGE / folder).rglob("*.py")})
    drawn = [change for file in files for change in changes_of(root, file)]
    return random.Random(seed).sample(drawn, count)  # noqa: S311


class Copy:
    """A copy of the checkout, to be changed, with its own tests or with those of a commit.

    Of the tests of a commit those count that are not among the checkout's, ``beside``.
    """

    def __init__(self, folder: Path, commit: str | None = None, beside: Copy | None = None) -> None:
        self.root = folder / "checkout"
        self.beside = beside
        self.measured = folder / "reached.coverage"
        if not self.root.exists():
            self._fill(commit)
        if (ROOT.parent / "shared").exists() and not (folder / "shared").exists():
            (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
        names = sorted(path.relative_to(self.root).as_posix() for path in (self.root / "tests").rglob("test_*.py"))
        self.files = [name for name in names if not beside or self._is_other(name, beside)]
        self.failing = dict[str, bool]()
        """Whether a test fails without a change."""

    def _fill(self, commit: str | None) -> None:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file() and not (commit and name.startswith("tests/")):
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name, follow_symlinks=False)
        if commit:
            command = ["git", "archive", commit, "tests"]
            archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
            with tarfile.open(fileobj=io.BytesIO(archive)) as file:
                file.extractall(self.root, filter="data")

    def _is_other(self, name: str, beside: Copy) -> bool:
        """Whether a test file can notice something that the checkout's does not."""
        content, other = (self.root / name).read_bytes(), beside.root / name
        return b"@given" in content or not other.exists() or content != other.read_bytes()

    @cached_property
    def texts(self) -> dict[str, str]:
        """The text of each test that ran, with its decorators, without its parameters."""
        functions: dict[str, dict[str, str]] = {}
        texts: dict[str, str] = {}
        for test in self.ran:
            file, *_, name = test.partition("[")[0].split("::")
            if file not in functions:
                nodes = ast.walk(ast.parse((self.root / file).read_bytes()))
                functions[file] = {node.name: ast.unparse(node) for node in nodes if isinstance(node, ast.FunctionDef)}
            texts[test] = functions[file].get(name, "")
        return texts

    @cached_property
    def ran(self) -> set[str]:
        return {name.rpartition("|")[0] for name in self.coverage.measured_contexts() if name}

    def can_notice(self, test: str) -> bool:
        """Whether a test is none of those beside, has no text to compare, or draws examples, which may be others."""
        text, beside = self.texts[test], self.beside
        return not beside or not text or "@given" in text or beside.texts.get(test) != text

    @cached_property
    def coverage(self) -> CoverageData:
        """The lines that each test reaches; measured, if nothing was kept."""
        from coverage import CoverageData

        if not self.measured.exists():
            places = (*UNDER, *OTHERS)
            files = [name for name in self.files if name.startswith(tuple(f"tests/{place}" for place in places))]
            measure = [f"--cov={PACKAGE}", "--cov-context=test", "--cov-report=", "-n", "2", "--dist", "loadfile"]
            failed = self.run([*files, *measure, "-p", "no:cacheprovider"], most=0)
            (self.root / ".failed").write_text("\n".join(failed))
            (self.root / ".coverage").rename(self.measured)
        self.failing |= dict.fromkeys((self.root / ".failed").read_text().split("\n"), True)
        (data := CoverageData(str(self.measured))).read()
        return data

    @cached_property
    def reached(self) -> dict[str, dict[int, set[str]]]:
        """The tests that reach a line, by file of the package; of what a fixture runs, all tests of the test file."""
        data = self.coverage
        of_file: dict[str, set[str]] = {}
        for test in self.ran:
            of_file.setdefault(test.partition("::")[0], set()).add(test)
        reached: dict[str, dict[int, set[str]]] = {}
        for file in data.measured_files():
            by_line = reached[Path(file).relative_to(self.root).as_posix()] = {}
            for line, contexts in data.contexts_by_lineno(file).items():
                found: set[str] = set()
                for context in filter(None, contexts):
                    test, _, phase = context.rpartition("|")
                    found |= {test} if phase == "run" else of_file[test.partition("::")[0]]
                by_line[line] = found
        return reached

    def tests_of(self, change: Change) -> list[str]:
        """The tests to run on a change, the nearest first."""
        place = Path(change.path).relative_to(PACKAGE).parent
        by_line = {} if place.parts[:1] == ("ddp",) else self.reached.get(change.path, {})
        found = set[str]().union(*(by_line.get(line, set()) for line in change.lines))
        if not found:
            while not (self.root / "tests" / place).is_dir():
                place = place.parent
            return [name for name in self.files if name.startswith(f"tests/{place}/")]
        near = f"tests/{place}"
        parts = [f"tests/{place.parts[0]}", near]
        return sorted(
            filter(self.can_notice, found), key=lambda test: (-sum(test.startswith(part) for part in parts), test)
        )

    def first_failure(self, change: Change, among: slice = slice(None)) -> str | None:
        """Return the first test that fails with the change, and not without it, ``among`` those to run on it."""
        file = self.root / change.path
        before = file.read_bytes()
        tests = self.tests_of(change)[among]
        while True:
            left = [test for test in tests if not self.failing.get(test)]
            if not left:
                return None
            file.write_bytes(change.apply(before))
            try:
                found = self.run(left)
            finally:
                file.write_bytes(before)
            if not found:
                return None
            failed = found[0]
            if failed not in self.failing:
                self.failing[failed] = "::" in failed and self.run([failed]) != []
            if not self.failing[failed]:
                return failed
            tests = [test for test in tests if test != failed]

    def run(self, arguments: Sequence[str], most: int = 1) -> list[str]:
        """Return the first tests that fail, 0: all, or what else ended pytest."""
        (listed := self.root / ".arguments").write_text("\n".join(arguments))
        deselected = [f"--deselect={name}" for name, fails in self.failing.items() if fails and name]
        command = [sys.executable, "-m", "pytest", "-q", "-o", f"timeout={TEST_S}", f"--maxfail={most}"]
        command += ["-m", "not browser and not nsys", *deselected, f"@{listed}"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(self.root), _PATH]))}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each run would compile the package and the tests again
        try:
            done = subprocess.run(
                command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=STAGE_S, check=False
            )
        except subprocess.TimeoutExpired:
            return [f"no end within {STAGE_S} s"]
        if done.returncode in (0, 5):  # all passed, none chosen
            return []
        found = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
        return found or [f"pytest ended with {done.returncode}"]


_PATH = os.environ.get("PYTHONPATH", "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--under", nargs="+", default=UNDER, help=f"folders of {PACKAGE}")
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--only", nargs="+", type=int, help="numbers of changes, for a second look")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the copies there, and go on with them")
    arguments = parser.parse_args(argv)
    lost = 0
    with ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutate.")))
        for name in ("now", "before"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        now = Copy(folder / "now")
        before = Copy(folder / "before", arguments.against, now) if arguments.against else None
        for number, change in enumerate(draw(now.root, arguments.under, arguments.seed, arguments.count)):
            if arguments.only and number not in arguments.only:
                continue
            source = (now.root / change.path).read_bytes()
            there = source[change.start : change.end].decode()
            print(f"{number}: {change.path}:{change.lines[-1]}: {there} -> {change.text}", flush=True)
            killer = now.first_failure(change, slice(NEAREST))
            # Nothing is lost where no test that is gone notices the change: the rest need not run.
            gone = before.first_failure(change) if before and not killer else None
            if not killer and (gone or not before):
                killer = now.first_failure(change, slice(NEAREST, None))
            said = (
                "not noticed"
                if not before
                else f"noticed neither by the {NEAREST} nearest tests nor by one that is gone"
            )
            if killer:
                said = f"noticed by {killer}"
            elif gone:
                said = f"LOST: noticed before by {gone}"
                lost += 1
            print(f"    {said}", flush=True)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
