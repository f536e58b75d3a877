"""Whether the code that decides what a run does is the same as before."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
GROUND = ("range_names", "run_config", "variants")
"""Modules beside the rooms of ddp and train that decide what a run does."""


def digest_code(package: Path = PACKAGE) -> str:
    """Digest of what the ranks run; what records and reads them is not among it."""
    files = [*package.glob("ddp/**/*.py"), *package.glob("train/**/*.py"), *(package / f"{name}.py" for name in GROUND)]
    contents = sha256()
    for file in sorted(files):
        contents.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes() + b"\0")
    return contents.hexdigest()[:16]
