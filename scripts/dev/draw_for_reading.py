"""Draws functions and docstrings of the package for somebody to read who has never seen the code.

    python scripts/dev/draw_for_reading.py SEED [--count 30]

The same seed draws the same of the same commit. What is not understood at first sight is to be mended.
"""

from __future__ import annotations

import argparse
import ast
import random
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ddp_prof"
LEAST_LINES = 4
"""Shorter functions say what they do by their name."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("seed", type=int)
    arguments.add_argument("--count", type=int, default=30)
    options = arguments.parse_args()

    functions: list[str] = []
    docstrings: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                continue
            line = getattr(node, "lineno", 1)
            place = f"{path.relative_to(PACKAGE.parent)}:{line} {getattr(node, 'name', '')}"
            if docstring := ast.get_docstring(node):
                docstrings.append(f"== {place}\n{docstring}\n")
            if isinstance(node, ast.FunctionDef) and node.end_lineno and node.end_lineno - line >= LEAST_LINES:
                functions.append("\n".join([f"== {place}", *lines[line - 1 : node.end_lineno], ""]))
    draw = random.Random(options.seed)  # noqa: S311 - no secret
    for title, drawn in (("functions", functions), ("docstrings", docstrings)):
        print(f"#### {options.count} of {len(drawn)} {title}, seed {options.seed}\n")
        print("\n".join(draw.sample(drawn, options.count)))


if __name__ == "__main__":
    main()
