"""What was measured of a large trace, kept for the next command beside the trace's columns.

A result is kept for the state of the trace's files, the options that it depends on, and the code that reads and
measures. A file is a line of JSON, with the key and a checksum, and the result.
"""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.cache_folder import RESULTS, CacheFolder, mark_used
from ddp_prof.ingest.cached import READERS, cache_for, code_version
from ddp_prof.ingest.trace_files import file_state
from ddp_prof.runs.pickles import pickle_with_names, unpickle_result

_MEASURING = (*READERS, "analyze/**/*.py*", "runs/report.py*")
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
                head = json.loads(opened.readline(_LONGEST_KEY))
                data = opened.read()
            if head["key"] != key or head["crc32"] != zlib.crc32(data):
                return None
            found = unpickle_result(data, {str(self.file.absolute()): self.file})
        except _DAMAGED:
            return None
        mark_used(place)
        return found

    def keep(self, results: Mapping[str, Any]) -> None:
        """Keep results by measure, if the files are as they were before they were read."""
        if file_state(self.file) != self.state:
            return
        for measure, result in results.items():
            key, data = self._key(measure), pickle_with_names(result)
            head = json.dumps({"key": key, "crc32": zlib.crc32(data)}).encode() + b"\n"
            self.folder.keep(self._place(key), len(head) + len(data), lambda target: _write(target, head, data))  # noqa: B023

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
    """Return the key with which a result was kept; ``None`` if it is damaged."""
    try:
        with place.open("rb") as opened:
            key: dict[str, Any] = json.loads(opened.readline(_LONGEST_KEY))["key"]
            return key
    except _DAMAGED:
        return None


def _write(target: Path, *parts: bytes) -> None:
    with target.open("wb") as file:
        file.writelines(parts)
