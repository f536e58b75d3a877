"""Runs a program as ``python -c`` does, in a process forked from a server of the tests that has imported torch.

For what a program does until its very end. What is loaded with torch has been loaded already: where that is what is
tested, Python must be started.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import tempfile
import threading
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def run_python(
    code: str,
    *arguments: object,
    prepare: Callable[[], object] | None = None,
    to_the_end: bool = False,
    **environment: str,
) -> CompletedProcess[str]:
    """What a program said, and its exit code.

    ``prepare`` is called in its process before. At its end it waits for its threads and calls what ``atexit`` knows;
    ``to_the_end`` Python is also taken down, which takes a second, most of it for torch.
    """
    from tests.ddp.gloo_ranks import FORKING  # imports torch

    with tempfile.TemporaryDirectory() as folder:
        words = [*map(str, arguments)]
        process = FORKING.Process(
            target=_run, args=(code, words, os.environ | environment, str(Path.cwd()), folder, prepare, to_the_end)
        )
        process.start()
        process.join()
        said, told = (Path(folder, name).read_text(encoding="utf-8") for name in ("1", "2"))
    return CompletedProcess(words, process.exitcode or 0, said, told)


def _run(
    code: str,
    words: list[str],
    environment: dict[str, str],
    here: str,
    folder: str,
    prepare: Callable[[], object] | None,
    to_the_end: bool,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(here)
    for number in (1, 2):
        os.dup2(os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))  # Python has read that of the server
    if prepare:
        prepare()
    sys.argv = ["-c", *words]
    sys.modules["__main__"] = ModuleType("__main__")
    ended = 0
    try:
        exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
    except SystemExit as end:
        ended = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        ended = 1
    if to_the_end:
        ctypes.pythonapi.Py_Exit(ended)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)
