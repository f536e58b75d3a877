"""What scripts import from the package is there: type checking does not look at them."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

SCRIPTS = sorted((Path(__file__).resolve().parents[2] / "scripts").rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_what_is_imported_exists(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddp_prof"):
            module = import_module(node.module or "")
            for name in (alias.name for alias in node.names):
                assert hasattr(module, name) or find_spec(f"{node.module}.{name}"), f"{node.module}.{name}"
