"""Scripts of pages: JavaScript modules become one script, because a page that is opened from disk can import no file.

The modules are those under ``ddp_prof/present/**/assets``. They import and export names without renaming them, with
each such statement on one line. So a name means the same in all modules, and two modules of one page must not define
the same name.
"""

from __future__ import annotations

import posixpath
import re
from functools import cache
from importlib.resources import files

_IMPORT = re.compile(r'^import \{[^{}]*\} from "(\.[^"]+\.js)";\n', re.MULTILINE)
"""The statement that imports from another module; its group is the path of that module."""


@cache
def page_script(*entries: str) -> str:
    """Return modules as one script, each after the modules that it imports.

    The script is one function, so that no name is global.

    Args:
        *entries: Paths of modules in ``ddp_prof/present``, such as ``html/assets/draw.js``.
    """
    modules: dict[str, str] = {}
    for entry in entries:
        _add(entry, modules)
    return "\n".join(["(() => {", '"use strict";', *modules.values(), "})();"])


def _add(path: str, modules: dict[str, str]) -> None:
    """Add a module to ``modules``, after the modules that it imports; do nothing if it was added before.

    Args:
        path: Path of the module in ``ddp_prof/present``.
        modules: Source texts without imports and ``export``, by path.
    """
    if path in modules:
        return
    source = files("ddp_prof.present").joinpath(path).read_text(encoding="utf-8")
    for imported in _IMPORT.findall(source):
        _add(posixpath.normpath(posixpath.join(posixpath.dirname(path), imported)), modules)
    modules[path] = re.sub(r"^export ", "", _IMPORT.sub("", source), flags=re.MULTILINE)
