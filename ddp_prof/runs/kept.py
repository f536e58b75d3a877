"""Keep the results of measuring a large trace for the next command, beside the trace's columns in the cache.

A result is kept for the state of the trace's files, the options that it depends on, and the code that reads and
measures. What was drawn of the trace is a result, too, and also depends on the code that draws. A file holds the key,
as a line of JSON, and then the result.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.cache_folder import RESULTS, CacheFolder, mark_used
from ddp_prof.ingest.cached import READERS, cache_for, code_version
from ddp_prof.ingest.trace_files import file_state
from ddp_prof.runs.pickles import read_result, write_result

_MEASURING = (*READERS, "analyze/**/*.py*", "runs/report.py*", "runs/run.py*")
_DRAWING = (*_MEASURING, "present/**/*.py*", "runs/timelines.py*")
_LONGEST_KEY = 1 << 20
_DAMAGED = (
    OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, ImportError, pickle.UnpicklingError,
)  # fmt: skip
"""The errors that reading a damaged file of the cache can raise."""


@dataclass(frozen=True)
class KeptResults:
    """The results in the cache for one trace.

    Attributes:
        file: The trace.
        folder: The cache.
        asked: What results depend on apart from the files and the code: options. JSON can hold it.
        asked_of: By the name of an analysis, further options that only its result depends on.
        drawn: The names of results that are drawn, and so depend on the code that draws, too.
        state: State of the trace's files before they are read, by which a change is noticed.
    """

    file: Path
    folder: CacheFolder
    asked: Mapping[str, Any]
    asked_of: Mapping[str, Mapping[str, Any]]
    drawn: Collection[str]
    state: dict[str, Any] = field(repr=False)

    def find(self, measure: str) -> Any:
        """Return what the cache holds of an analysis of this trace; ``None`` if it holds nothing, or a damaged result.

        ``measure`` is the name of the analysis, such as ``overlap``.
        """
        key = self._key(measure)
        place = self._place(key)
        try:
            with place.open("rb") as opened:
                if json.loads(opened.readline(_LONGEST_KEY)) != key:
                    return None
                result = read_result(opened, {str(self.file.absolute()): self.file})
        except _DAMAGED:
            return None
        mark_used(place)
        return result

    def keep(self, results: Mapping[str, Any]) -> None:
        """Store the results of measures, unless the files of the trace changed while they were read."""
        if file_state(self.file) != self.state:
            return
        for measure, result in results.items():
            key = self._key(measure)
            self.folder.keep(self._place(key), 0, partial(_write, key, result))

    def _key(self, measure: str) -> dict[str, Any]:
        """Return all that the result of a measure depends on; a stored result is valid only for an equal key."""
        import numpy as np

        code = [code_version(_DRAWING if measure in self.drawn else _MEASURING), np.__version__]
        of = {"path": os.path.abspath(self.file), "measure": measure, **self._asked_for(measure)}  # noqa: PTH100
        return {**of, "files": self.state, "code": code}

    def _asked_for(self, measure: str) -> dict[str, Any]:
        """Return the options that the result of a measure depends on."""
        return {**self.asked, **self.asked_of.get(measure, {})}

    def _place(self, key: dict[str, Any]) -> Path:
        """Return the file in the cache for a key."""
        return self.folder.path([key["path"], key["measure"], *self._asked_for(key["measure"]).values()], key, RESULTS)


def kept_results(
    file: Path,
    options: ReadOptions,
    asked: Mapping[str, Any],
    asked_of: Mapping[str, Mapping[str, Any]],
    drawn: Collection[str],
) -> KeptResults | None:
    """Return access to the results in the cache for a trace; ``None`` if the cache keeps nothing of this trace.

    ``asked``, ``asked_of`` and ``drawn``: see :class:`KeptResults`.
    """
    # Through JSON and back, so that it equals what is read from a file: tuples become lists.
    folder = cache_for(file, options)
    asked, asked_of = json.loads(json.dumps([asked, asked_of]))
    return KeptResults(file, folder, asked, asked_of, drawn, file_state(file)) if folder else None


def read_key_of_result(place: Path) -> dict[str, Any] | None:
    """Return the key with which a result was stored; ``None`` if it is damaged."""
    try:
        with place.open("rb") as opened:
            key: dict[str, Any] = {**json.loads(opened.readline(_LONGEST_KEY))}
            return key if "path" in key else None
    except _DAMAGED:
        return None


def _write(key: dict[str, Any], result: Any, target: Path) -> None:
    """Write the key as a line of JSON, and then the result."""
    with target.open("wb") as file:
        file.write(json.dumps(key).encode() + b"\n")
        write_result(result, file)
