"""What was measured of a large trace, kept for the next command beside the trace's columns.

A result is kept for the state of the trace's files, the options that it depends on, and the code that reads and
measures. A file holds the key, as a line of JSON, and then the result.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
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
_LONGEST_KEY = 1 << 20
_DAMAGED = (
    OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, ImportError, pickle.UnpicklingError,
)  # fmt: skip


@dataclass(frozen=True)
class KeptResults:
    """What the cache holds of one trace.

    Attributes:
        asked: Everything but the files and the code that results depend on; JSON can hold it.
    """

    file: Path
    folder: CacheFolder
    asked: Mapping[str, Any]
    state: dict[str, Any] = field(repr=False)

    def find(self, measure: str) -> Any:
        """Return the result of a measure; ``None`` if it is not there, or damaged."""
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
        """Keep results by measure, if the files are as they were before they were read."""
        if file_state(self.file) != self.state:
            return
        for measure, result in results.items():
            key = self._key(measure)
            self.folder.keep(self._place(key), 0, partial(_write, key, result))

    def _key(self, measure: str) -> dict[str, Any]:
        import numpy as np

        code = [code_version(_MEASURING), np.__version__]
        return {"path": os.path.abspath(self.file), "measure": measure, **self.asked, "files": self.state, "code": code}  # noqa: PTH100

    def _place(self, key: dict[str, Any]) -> Path:
        return self.folder.path([key["path"], key["measure"], *self.asked.values()], key, RESULTS)


def kept_results(file: Path, options: ReadOptions, asked: Mapping[str, Any]) -> KeptResults | None:
    """Return what the cache holds of a trace; ``None`` if it keeps nothing of it."""
    folder = cache_for(file, options)
    return KeptResults(file, folder, json.loads(json.dumps(asked)), file_state(file)) if folder else None


def read_key_of_result(place: Path) -> dict[str, Any] | None:
    """Return the key with which a result was stored; ``None`` if it is damaged."""
    try:
        with place.open("rb") as opened:
            key: dict[str, Any] = {**json.loads(opened.readline(_LONGEST_KEY))}
            return key if "path" in key else None
    except _DAMAGED:
        return None


def _write(key: dict[str, Any], result: Any, target: Path) -> None:
    with target.open("wb") as file:
        file.write(json.dumps(key).encode() + b"\n")
        write_result(result, file)
