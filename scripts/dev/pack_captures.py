"""Packs the results of scripts/capture_gpu.sh into a few files of limited size.

    python scripts/dev/pack_captures.py gpu_capture --max-mb 16     # gpu_capture.tar.gz
    python scripts/dev/pack_captures.py gpu_capture --max-mb 16 --max-files 8     # and gpu_capture.2.tar.gz ...

If they are too large, it leaves out the profiler's reports (their exports hold the same events), then the first steps
of the captures, as many as necessary. ``LEFT_OUT.txt`` in the first file says what is missing. The tables are not cut.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_prof.errors import DdpProfError, TraceError
from ddp_prof.train.arguments import at_least

sys.path.append(str(Path(__file__).resolve().parents[1]))
from trim_capture import trim_capture

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EXPORTS = (".sqlite", ".json.gz")
REPORTS = (".nsys-rep", ".qdstrm")
HEADER_BYTES = 1024
"""Upper limit of a file's header in an archive."""
SAFETY = 0.98
"""Share of the allowed size that files may fill: the estimate compresses them one by one."""
ALL_STEPS = 0
SMALLER = ((True, ALL_STEPS), (False, ALL_STEPS), (False, 3), (False, 2), (False, 1))
"""Whether reports are packed, and how many steps of each capture, in the order of attempts."""


def pack(folder: Path, target: Path, max_bytes: int, max_files: int = 1, newer_than: Path | None = None) -> str:
    """Write one or several archives and return what was left out.

    Args:
        folder: The folder to pack.
        target: The first archive, ``NAME.tar.gz``; the others are ``NAME.2.tar.gz``, ``NAME.3.tar.gz`` ...
        max_bytes: Largest size of an archive.
        max_files: Largest number of archives.
        newer_than: Pack only files that are newer than this one.

    Raises:
        TraceError: There is nothing to pack, or it is too large even with one step of each capture.
    """
    files = [
        path for path in _files(folder) if newer_than is None or path.stat().st_mtime >= newer_than.stat().st_mtime
    ]
    if not files:
        raise TraceError(folder, "there is nothing in it to pack", "make captures with scripts/capture_gpu.sh")
    size = 0
    for with_reports, steps in SMALLER:
        with tempfile.TemporaryDirectory(prefix="ddp_prof.pack.", dir=folder.parent) as scratch:
            copy = Path(scratch) / folder.name
            gather(folder, files, copy, with_reports=with_reports, steps=steps)
            left_out = _describe_left_out(with_reports, steps)
            (copy / "LEFT_OUT.txt").write_text(f"{left_out}\n", encoding="utf-8")
            archives = [_archive([*_files(copy)], copy, Path(scratch))]
            if archives[0].stat().st_size > max_bytes and max_files > 1:
                archives = [_archive(part, copy, Path(scratch)) for part in _parts(copy, max_bytes)]
            size = sum(archive.stat().st_size for archive in archives)
            if len(archives) <= max_files and all(archive.stat().st_size <= max_bytes for archive in archives):
                for number, archive in enumerate(archives, 1):
                    archive.replace(target if number == 1 else _numbered(target, number))
                return left_out
    raise TraceError(
        folder,
        f"{size / 1e6:.1f} MB with one step of each capture, of at most {max_files * max_bytes / 1e6:.0f}",
        "raise --max-mb, or make captures of fewer variants or of a smaller model",
    )


def _parts(folder: Path, max_bytes: int) -> list[list[Path]]:
    """Divide the files of a folder into lists that are small enough after compression."""
    parts: list[list[Path]] = [[]]
    sizes = [0]
    for path in _files(folder):
        size = len(zlib.compress(path.read_bytes())) + HEADER_BYTES
        fitting = next((number for number, taken in enumerate(sizes) if taken + size <= max_bytes * SAFETY), None)
        if fitting is None and parts[-1]:
            parts.append([])
            sizes.append(0)
        number = len(parts) - 1 if fitting is None else fitting
        parts[number].append(path)
        sizes[number] += size
    return parts


def _archive(files: Sequence[Path], folder: Path, scratch: Path) -> Path:
    with tempfile.NamedTemporaryFile(dir=scratch, suffix=".tar.gz", delete=False) as file:
        path = Path(file.name)
    with tarfile.open(path, "w:gz") as archive:
        for file_path in files:
            archive.add(file_path, Path(folder.name) / file_path.relative_to(folder))
    path.chmod(0o644)
    return path


def _numbered(target: Path, number: int) -> Path:
    return target.with_name(f"{target.name.removesuffix('.tar.gz')}.{number}.tar.gz")


def gather(folder: Path, files: Sequence[Path], copy: Path, *, with_reports: bool, steps: int) -> None:
    for path in files:
        target = copy / path.relative_to(folder)
        if path.name.endswith(REPORTS) and not with_reports:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if steps != ALL_STEPS and path.name.endswith(EXPORTS):
            trim_capture(path, target, steps)
        else:
            shutil.copy2(path, target)


def _files(folder: Path) -> Iterator[Path]:
    """Yield all files except unfinished captures, and captures that measured only the cost of recording."""
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder).parts
        is_for_times = inner[0] == "cost" and not path.name.endswith(".run.json")
        if path.is_file() and not is_for_times and not any(part.startswith(".") for part in inner):
            yield path


def _describe_left_out(with_reports: bool, steps: int) -> str:
    reports = "" if with_reports else "the profiler's own reports"
    others = "" if steps == ALL_STEPS else f"of each capture all but the last {steps} step{'s' * (steps > 1)}"
    return " and ".join(filter(None, (reports, others))) or "nothing"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-mb", type=at_least(1), default=16, help="size of a file (default: %(default)s)")
    parser.add_argument("--max-files", type=at_least(1), default=1, help="default: %(default)s")
    parser.add_argument("--target", type=Path, metavar="NAME.tar.gz", help="the first file (default: as the folder)")
    parser.add_argument("--newer-than", type=Path, metavar="FILE", help="pack only files that are newer than this one")
    arguments = parser.parse_args(argv)
    folder = arguments.folder.absolute()
    target = arguments.target or folder.with_name(f"{folder.name}.tar.gz")
    try:
        left_out = pack(folder, target, arguments.max_mb * 1_000_000, arguments.max_files, arguments.newer_than)
    except DdpProfError as error:
        print(f"pack_captures: error: {error}", file=sys.stderr)
        return 1
    for path in [target, *sorted(target.parent.glob(f"{target.name.removesuffix('.tar.gz')}.[0-9].tar.gz"))]:
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, left out: {left_out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
