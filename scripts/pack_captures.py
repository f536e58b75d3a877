"""Packs what scripts/capture_gpu.sh made into one file of at most so many MB, to carry away.

    python scripts/pack_captures.py gpu_capture --max-mb 16     # gpu_capture.tar.gz

What does not fit is left out in this order, and the file says so itself (``LEFT_OUT.txt``): the profiler's own reports
(their exports hold the same), then steps of the captures, as many as it takes, from the first on. The tables always are
of all steps.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from trim_capture import trim_capture

from ddp_prof.errors import DdpProfError, TraceError
from ddp_prof.train.arguments import at_least

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EXPORTS = (".sqlite", ".json.gz")
REPORTS = (".nsys-rep", ".qdstrm")
ALL_STEPS = 0
SMALLER = ((True, ALL_STEPS), (False, ALL_STEPS), (False, 3), (False, 2), (False, 1))
"""Whether reports are packed, and how many steps of each capture, in the order in which it is tried."""


def pack(folder: Path, target: Path, max_bytes: int) -> str:
    """Write ``target``; returns what had to be left out, in words.

    Raises:
        TraceError: There is nothing to pack, or even with one step of each capture it is too large.
    """
    if not any(_files(folder)):
        raise TraceError(folder, "there is nothing in it to pack", "make captures with scripts/capture_gpu.sh")
    size = 0
    for with_reports, steps in SMALLER:
        with tempfile.TemporaryDirectory(prefix="ddp_prof.pack.", dir=folder.parent) as scratch:
            copy = Path(scratch) / folder.name
            gather(folder, copy, with_reports=with_reports, steps=steps)
            left_out = _in_words(with_reports, steps)
            (copy / "LEFT_OUT.txt").write_text(f"{left_out}\n", encoding="utf-8")
            partial = Path(scratch) / target.name
            with tarfile.open(partial, "w:gz") as archive:
                archive.add(copy, folder.name)
            size = partial.stat().st_size
            if size <= max_bytes:
                partial.replace(target)
                return left_out
    raise TraceError(
        folder,
        f"{size / 1e6:.1f} MB with one step of each capture, of at most {max_bytes / 1e6:.0f}",
        "raise --max-mb, or make captures of fewer variants or of a smaller model",
    )


def gather(folder: Path, copy: Path, *, with_reports: bool, steps: int) -> None:
    """Copy what is to be packed, with so many steps of each capture."""
    for path in _files(folder):
        target = copy / path.relative_to(folder)
        if path.name.endswith(REPORTS) and not with_reports:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if steps != ALL_STEPS and path.name.endswith(EXPORTS):
            trim_capture(path, target, steps)
        else:
            shutil.copy2(path, target)


def _files(folder: Path) -> Iterator[Path]:
    """All but unfinished captures, and those that were made for their times alone."""
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder).parts
        is_for_times = inner[0] == "cost" and not path.name.endswith(".run.json")
        if path.is_file() and not is_for_times and not any(part.startswith(".") for part in inner):
            yield path


def _in_words(with_reports: bool, steps: int) -> str:
    reports = "" if with_reports else "the profiler's own reports"
    others = "" if steps == ALL_STEPS else f"of each capture all but the last {steps} step{'s' * (steps > 1)}"
    return " and ".join(filter(None, (reports, others))) or "nothing"


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-mb", type=at_least(1), default=16, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    folder = arguments.folder.absolute()
    target = folder.with_name(f"{folder.name}.tar.gz")
    try:
        left_out = pack(folder, target, arguments.max_mb * 1_000_000)
    except DdpProfError as error:
        print(f"pack_captures: error: {error}", file=sys.stderr)
        return 1
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB, left out: {left_out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
