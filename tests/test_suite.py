"""What the tests themselves keep: they wait for events and not for times, and use a page only at rest.

What is left to the night is not collected, so that whoever reads what the gate skipped sees what the machine lacks.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.night import OF_THE_NIGHT, is_left_to_the_night

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
NAMED = re.compile(r"timeout|monotonic|deadline|\b(wait|poll)\b")
"""One of these stands where there is a limit; other sources need not be parsed."""


def deadlines_in(source: str) -> list[int]:
    """Lines with a call that gives up after a time, or with a clock that a loop looks at."""
    found = []
    for node in ast.walk(ast.parse(source)) if NAMED.search(source) else ():
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


# What a script of the night brings or asks for: a test that needs it has that script's marker.
SKIPPED_FOR_THE_NIGHT = re.compile(
    r"skipif\([^)]*(IS_NIGHTLY|os\.environ)"
    r"|(find_spec|importorskip)\(.?(trainer|tracker|library|lightning|transformers|accelerate|wandb|mlflow|tensorboard)\b"
)


def test_the_gate_skips_nothing_that_the_night_runs() -> None:
    found = {path.name for path in FILES if SKIPPED_FOR_THE_NIGHT.search(path.read_text(encoding="utf-8"))}
    assert found == set()


@pytest.mark.parametrize("marker", sorted(OF_THE_NIGHT))
def test_a_test_of_the_night_is_collected_where_it_is_asked_for(marker: str) -> None:
    assert is_left_to_the_night(["torch", marker], "", is_nightly=False)
    assert is_left_to_the_night(["torch", marker], "not torch and not slow", is_nightly=False)
    assert not is_left_to_the_night(["torch", marker], f"torch and {marker}", is_nightly=False)
    assert not is_left_to_the_night(["torch"], "", is_nightly=False)
    assert is_left_to_the_night(["torch", marker], "", is_nightly=True) == (marker != "nightly")


def test_pages_are_used_through_visit() -> None:
    found = {path.name: ANOTHER_WAY.findall(path.read_text(encoding="utf-8")) for path in BROWSER_TESTS}
    assert {path: names for path, names in found.items() if names} == {}
