"""Every function, class and constant of the package has a user beside tests; what others call by name is said here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ddp_prof"

# Called by others, by these names.
CALLED_BY_OTHERS = {
    "Python": {"__getattr__", "__dir__", "__init_subclass__"},
    "pickle": {"persistent_id", "persistent_load"},
    "click": {"list_commands", "format_commands", "format_options"},
    "trainers, which call back": {
        "on_train_begin", "on_train_start", "on_train_end", "on_exception",
    },
    "type checkers": {"ModuleSpec"},
}  # fmt: skip
CALLED_BY_NAME = ["@*.command", "@derived"]  # by what a user types, and as columns of tables


def names_in_strings(source: str) -> set[str]:
    """Names of what is loaded by name: in strings without blanks, ``"module:function"``, and in code given as text."""
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    loading = [text for text in texts if isinstance(text, str) and (not re.search(r"\s", text) or " import " in text)]
    return {name for text in loading for name in re.findall(r"[A-Za-z_]\w*", text)}


def unused(*folders: Path) -> dict[str, str]:
    """What no program of these folders uses in the first one: places by name."""
    vulture = pytest.importorskip("vulture")
    found = vulture.Vulture(ignore_decorators=CALLED_BY_NAME)
    found.scavenge([str(folder) for folder in folders])
    items = [
        item
        for item in found.get_unused_code(min_confidence=60)
        if Path(item.filename).is_relative_to(folders[0])
        and item.typ != "attribute"  # set for others to read, as of a connection
        and (item.typ != "variable" or item.name.isupper())  # fields are columns of what is shown
    ]
    # Only sources that hold such a name are looked into: that takes a third of the time of all.
    names = re.compile("|".join({re.escape(item.name) for item in items}) or "$.")
    sources = [path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")]
    known = set().union(*(names_in_strings(source) for source in sources if names.search(source)))
    return {item.name: f"{item.filename}:{item.first_lineno}" for item in items if item.name not in known}


def test_what_nobody_uses_is_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        'USED, LEFT = 1, 2\nLOADED = "package.module:by_name"\nprint(USED, LOADED)\n'
        "def by_name(): pass\ndef forgotten(): pass\n"
    )
    assert unused(tmp_path).keys() == {"LEFT", "forgotten"}


@pytest.mark.slow
def test_everything_has_a_user() -> None:
    found = unused(PACKAGE, ROOT / "scripts")
    others = set().union(*CALLED_BY_OTHERS.values())
    assert {name: place for name, place in found.items() if name not in others} == {}
    assert others - found.keys() == set(), "exceptions that are none any more"


def test_what_messages_tell_to_install_is_what_the_extras_ask_for() -> None:
    """They named extras of a package that no index has."""
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    told = [
        requirement
        for file in (ROOT / "ddp_prof").rglob("*.py")
        for requirement in re.findall(r"pip install '([^'{]+)'", file.read_text(encoding="utf-8"))
    ]
    assert {"choreographer", "mcp", "distributed"} <= {re.split(r"[<>=]", one)[0] for one in told}
    for requirement in told:
        assert f'"{requirement}"' in extras, requirement
