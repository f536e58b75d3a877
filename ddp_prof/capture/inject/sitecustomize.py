"""Runs at the start of every Python that ``ddp-prof capture`` or ``tune`` starts; acts when the program imports torch.

It then marks the program with ranges or, for ``tune``, tries settings in it. Python finds this module by PYTHONPATH. It
needs the standard library only. A ``sitecustomize`` that Python would have found without it runs, too.
"""

import importlib.util
import os
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PROCESS = os.getpid()
"""The process in which Python started: a fork of it, such as one of multiprocessing, has another number."""


class AfterTorch:
    """An import finder that Python asks first; when torch is imported, it has :func:`mark` called after torch loads."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """Return, for torch, how to load it and to call :func:`mark` after that; ``None`` for all other modules.

        It may be asked several times: programs find out by ``importlib.util.find_spec`` whether there is a torch.
        """
        if name != "torch":
            return None
        finders = [finder.find_spec for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (find(name, path, target) for find in finders)), None)  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_mark(module: ModuleType) -> None:
                load(module)
                sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
                mark()

            spec.loader.exec_module = load_and_mark  # type: ignore[method-assign]
        return spec


def mark() -> None:
    """Start to mark the program or, for ``tune``, to try settings in it; an error is only printed.

    It uses the ddp_prof that started the program, which need not be installed for this Python.
    """
    try:
        folder = Path(os.environ["DDP_PROF_PACKAGE"])
        if "ddp_prof" not in sys.modules:  # import it from its folder
            spec = importlib.util.spec_from_file_location(
                "ddp_prof", folder / "__init__.py", submodule_search_locations=[str(folder)]
            )
            assert spec is not None
            assert spec.loader is not None
            sys.modules["ddp_prof"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules["ddp_prof"])
        module = "trial" if "DDP_PROF_TRIAL" in os.environ else "unattended"
        importlib.import_module(f"ddp_prof.annotate.{module}").start()
    except Exception as error:  # must not stop the program
        reason = f"so it sees none of its steps: {type(error).__name__}: {error}"
        with suppress(AttributeError, OSError, ValueError):  # the program has no stderr, or has closed it
            sys.stderr.write(f"ddp-prof could not be loaded into this program, {reason}\n")


def run_original_sitecustomize() -> None:
    """Run the sitecustomize that would have been found without this one."""
    here = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if Path(path).resolve() != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, AfterTorch())
run_original_sitecustomize()
