"""Changes the package at random places, one at a time, and prints which changes the tests notice.

    .venv/bin/python scripts/dev/mutate.py --seed 7 --count 100 [--under analyze ingest present/tables ddp]
        [--near] [--against COMMIT] [--only NUMBER ...]

A change is to one operator, number or condition. The tests of the file's folder run on it, then those of the commands
and of what else reads results, each until the first failure; those of Chromium and nsys do not. With ``--near``, only
those of the folder run.

With ``--against``, the tests of another commit run on what those of this checkout do not notice, for instance of one
before tests were dropped: what these notice alone was lost. Of its files only those run that differ, or draw examples.

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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "ddp_prof"
UNDER = ("analyze", "ingest", "present/tables", "ddp")
OTHERS = ("cli", "runs", "present", "test_golden.py", "test_own_traces.py", "test_empty_trace.py", "test_variants.py")
"""Tests of what reads the results of another folder; not of ``ddp``, which is read by training alone."""
TEST_S, STAGE_S = 120, 900
"""Time limits of one test and of all of a stage; a change that ends in an endless loop is noticed, too."""

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
    line: int
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


def expressions(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Expressions of a tree, each with another one for it; annotations, assertions and texts are left out."""
    if isinstance(node, (ast.If, ast.IfExp)) and "TYPE_CHECKING" not in ast.unparse(node.test):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.expr) and (new := changed(node)):
        yield node, new
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.JoinedStr, ast.Assert)):
                yield from expressions(child)


def changes_of(path: Path) -> list[Change]:
    source = path.read_bytes()
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    return [
        Change(
            path.relative_to(ROOT).as_posix(),
            old.lineno,
            lines[old.lineno - 1] + old.col_offset,
            lines[(old.end_lineno or 0) - 1] + (old.end_col_offset or 0),
            f"({ast.unparse(new)})",
        )
        for old, new in expressions(ast.parse(source))
    ]


def draw(under: Sequence[str], seed: int, count: int) -> list[Change]:
    files = sorted({file for folder in under for file in (ROOT / PACKAGE / folder).rglob("*.py")})
    drawn = [change for file in files for change in changes_of(file)]
    return random.Random(seed).sample(drawn, count)  # noqa: S311


class Copy:
    """A copy of the checkout, to be changed, with its own tests or with those of a commit."""

    def __init__(self, folder: Path, near: bool, commit: str | None = None) -> None:
        self.root = folder / "checkout"
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
        if (ROOT.parent / "shared").exists():
            (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
        self.is_other = {name: commit is not None and self._is_other(name) for name in self._test_files()}
        self.near, self.tried, self.failing = near, list[list[str]](), dict[str, bool]()
        """Whether a test fails without a change."""

    def _test_files(self) -> list[str]:
        return sorted(path.relative_to(self.root).as_posix() for path in (self.root / "tests").rglob("test_*.py"))

    def _is_other(self, name: str) -> bool:
        """Whether a test file can notice something that the checkout's does not."""
        content = (self.root / name).read_bytes()
        return b"@given" in content or not (ROOT / name).exists() or content != (ROOT / name).read_bytes()

    def stages(self, change: Change) -> Iterator[list[str]]:
        """Arguments of pytest: tests of the file's folder, then others, of each the slow ones last."""
        place = Path(change.path).relative_to(PACKAGE).parent
        own = [f"tests/{place}"]
        while not (self.root / own[0]).is_dir():
            place = place.parent
            own = [f"tests/{place}"]
        above = [f"tests/{place.parts[0]}", f"--ignore={own[0]}"] if len(place.parts) > 1 else []
        others = [] if self.near or place.parts[0] == "ddp" else [f"tests/{name}" for name in OTHERS]
        others = [name for name in others if (self.root / name).exists()]
        for places in (own, above, others):
            if any(self.is_other.values()):
                places = [name for name, other in self.is_other.items() if other and name.startswith(tuple(places))]
            for slow in ("not slow", "slow") if places else ():
                yield [*places, "-m", f"{slow} and not browser and not nsys"]

    def first_failure(self, change: Change) -> str | None:
        """Return the first test that fails with the change, and not without it."""
        file = self.root / change.path
        before = file.read_bytes()
        for stage in self.stages(change):
            if any(self.is_other.values()) and stage not in self.tried:  # many may fail with the package of today
                self.tried.append(stage)
                self.failing |= dict.fromkeys(self.run(stage, most=0), True)
            while True:
                file.write_bytes(change.apply(before))
                try:
                    found = self.run([*stage, *(f"--deselect={name}" for name, fails in self.failing.items() if fails)])
                finally:
                    file.write_bytes(before)
                if not found:
                    break
                failed = found[0]
                if failed not in self.failing:
                    self.failing[failed] = "::" in failed and self.run([failed]) != []
                if not self.failing[failed]:
                    return failed
        return None

    def run(self, arguments: Sequence[str], most: int = 1) -> list[str]:
        """Return the first tests that fail, 0: all, or what else ended pytest."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", f"timeout={TEST_S}"]
        command += [f"--maxfail={most}"]
        environment = {**os.environ, "PYTHONPATH": str(self.root)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each run would compile the package and the tests again
        try:
            done = subprocess.run(
                [*command, *arguments], cwd=self.root, env=environment, capture_output=True, text=True,
                timeout=STAGE_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return [f"no end within {STAGE_S} s"]
        if done.returncode in (0, 5):  # all passed, none chosen
            return []
        found = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
        return found or [f"pytest ended with {done.returncode}"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--under", nargs="+", default=UNDER, help=f"folders of {PACKAGE}")
    parser.add_argument("--near", action="store_true", help="only tests of the folder")
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--only", nargs="+", type=int, help="numbers of changes, for a second look")
    arguments = parser.parse_args(argv)
    lost = 0
    with tempfile.TemporaryDirectory(prefix="mutate.") as name:
        (folders := [Path(name) / "now", Path(name) / "before"])[0].mkdir()
        folders[1].mkdir()
        now = Copy(folders[0], arguments.near)
        before = Copy(folders[1], arguments.near, arguments.against) if arguments.against else None
        for number, change in enumerate(draw(arguments.under, arguments.seed, arguments.count)):
            if arguments.only and number not in arguments.only:
                continue
            source = (now.root / change.path).read_bytes()  # the checkout may change meanwhile
            there = source[change.start : change.end].decode()
            print(f"{number}: {change.path}:{change.line}: {there} -> {change.text}", flush=True)
            killer = now.first_failure(change)
            said = f"noticed by {killer}" if killer else "not noticed"
            if not killer and before and (killer := before.first_failure(change)):
                said = f"LOST: noticed before by {killer}"
                lost += 1
            print(f"    {said}", flush=True)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
