"""Writes the bytecode of the package and of the tests once, for all processes of pytest, which begin at the same time.

    .venv/bin/python scripts/dev/compile_tests.py FOLDER

FOLDER keeps compiled tests, for the next clone. In a clean clone each process would compile all of it, because none
finds what the others have not yet written. pytest adds to each assertion what it says of a failure, which takes
longer than to compile it. How is not public: should these functions of pytest change, its processes do it themselves,
as they do without this script.
"""

from __future__ import annotations

import compileall
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).resolve().parents[2]
STATE = SimpleNamespace(trace=lambda _text: None)


class Compiler:
    """A plugin that compiles the tests in the place of running them."""

    def __init__(self, kept: Path) -> None:
        self.kept = kept

    def pytest_cmdline_main(self, config: pytest.Config) -> int:
        for file in sorted((ROOT / "tests").rglob("*.py")):
            if not file.name.startswith(("test_", "conftest")):
                compileall.compile_file(file, quiet=2)
                continue
            folder = rewrite.get_cache_dir(file)
            compiled = folder / f"{file.stem}{rewrite.PYC_TAIL}"
            if rewrite._read_pyc(file, compiled) is None and rewrite.try_makedirs(folder):
                kept = self.kept / (".".join(file.relative_to(ROOT).with_suffix("").parts) + rewrite.PYC_TAIL)
                if rewrite._read_pyc(file, kept) is None:
                    content, code = rewrite._rewrite_test(file, config)
                    rewrite._write_pyc(STATE, code, content, kept)
                shutil.copy(kept, compiled)
        return 0


if __name__ == "__main__":
    compileall.compile_dir(ROOT / "ddp_prof", quiet=2)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    try:
        pytest.main([f"--rootdir={ROOT}", "-p", "no:cacheprovider"], plugins=[Compiler(folder)])
    except (AttributeError, TypeError, ValueError) as error:
        sys.stderr.write(f"compile_tests: pytest has changed, so its processes compile the tests: {error!r}\n")
