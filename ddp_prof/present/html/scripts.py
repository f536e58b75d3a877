"""Scripts of pages: JavaScript modules become one script, because a page that is opened from disk can import no file.

The modules are those under ``ddp_prof/present/**/assets``. They import and export names as they are, one statement a
line, so that a name means the same in all of them, and no two on one page may give a name of their own twice.
"""

from __future__ import annotations

import posixpath
import re
from functools import cache
from importlib.resources import files

_IMPORT = re.compile(r'^import \{[^{}]*\} from "(\.[^"]+\.js)";\n', re.MULTILINE)


@cache
def page_script(*entries: str) -> str:
    """Return modules, after the modules that they import, as one function, so that no name is global.

    Args:
        *entries: Paths in this package, such as ``html/assets/draw.js``.
    """
    modules: dict[str, str] = {}
    for entry in entries:
        _add(entry, modules)
    return "\n".join(["(() => {", '"use strict";', *modules.values(), "})();"])


def _add(path: str, modules: dict[str, str]) -> None:
    """Add a module without its imports and exports, unless it was added before."""
    if path in modules:
        return
    source = files("ddp_prof.present").joinpath(path).read_text(encoding="utf-8")
    for imported in _IMPORT.findall(source):
        _add(posixpath.normpath(posixpath.join(posixpath.dirname(path), imported)), modules)
    modules[path] = re.sub(r"^export ", "", _IMPORT.sub("", source), flags=re.MULTILINE)
