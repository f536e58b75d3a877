"""What the tests themselves keep: they wait for events and not for times, and use a page only at rest."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))
BROWSER_TESTS = sorted((TESTS / "browser").glob("test_*.py"))

# Of Playwright's; what a test of a page may do has a method of Visit.
ANOTHER_WAY = re.compile(
    r"playwright|\.(_page|_rest|_do|_one|locator|evaluate\w*|mouse|keyboard|wait_for\w*|new_page)\b"
)

# Whether a program took less time than so many seconds says something of the machine. Limits of our own programs, which
# they are tested for, go by other names.
LIMITED = {"run", "communicate", "wait", "join", "poll", "check_output", "check_call", "call"}


def deadlines_in(source: str) -> list[int]:
    """Lines with a call that gives up after a time, or with a clock that a loop looks at."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            has_limit = any(keyword.arg == "timeout" for keyword in node.keywords)
            is_number = [isinstance(each, ast.Constant) and isinstance(each.value, (int, float)) for each in node.args]
            if name in LIMITED and (has_limit or (name in {"wait", "poll"} and is_number == [True])):
                found.append(node.lineno)
        if isinstance(node, ast.While) and "monotonic" in ast.unparse(node):
            found.append(node.lineno)
        if isinstance(node, ast.Name) and node.id == "deadline" and isinstance(node.ctx, ast.Store):
            found.append(node.lineno)
    return sorted(set(found))


def test_deadlines_are_found() -> None:
    source = """
deadline = monotonic() + 10
while not is_so() and monotonic() < until: pass
process.wait(20)
process.communicate(timeout=3)
subprocess.run(["true"], timeout=3)
process.wait()
device.wait(1, 20, 10)
"""
    assert deadlines_in(source) == [2, 3, 4, 5, 6]


def test_the_limit_of_time_is_that_of_pytest_timeout() -> None:
    found = {str(path.relative_to(TESTS)): deadlines_in(path.read_text(encoding="utf-8")) for path in FILES}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_pages_are_used_through_visit() -> None:
    found = {path.name: ANOTHER_WAY.findall(path.read_text(encoding="utf-8")) for path in BROWSER_TESTS}
    assert {path: names for path, names in found.items() if names} == {}
