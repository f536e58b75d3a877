"""Captures every variant, draws the timelines and compares; profile_all.sh calls it in the environment."""

from __future__ import annotations

import glob
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_prof.capture.job import choose_nsys
from ddp_prof.capture.processes import run_tethered
from ddp_prof.capture.variant import capture
from ddp_prof.errors import DdpProfError, UsageError, printable
from ddp_prof.train.launch import run_program
from ddp_prof.variants import BUCKETED, VARIANT_NAMES

ROOT = Path(__file__).resolve().parents[1]
DDP_PROF = Path(sys.executable).with_name("ddp-prof")


def say(text: str) -> None:
    print(f"profile_all: {text}", file=sys.stderr, flush=True)


def list_captures(environ: Mapping[str, str]) -> list[list[str]]:
    variants = (environ.get("VARIANTS") or " ".join(VARIANT_NAMES)).split()
    sizes = (environ.get("BUCKET_SIZES_MB") or "1 10 100").split()
    found = []
    for variant in variants:
        found += [[variant, "--bucket-size-mb", size] for size in sizes] if variant == BUCKETED else [[variant]]
    return found


def choose_profiler(environ: dict[str, str]) -> None:
    """Choose the profiler for all captures, so that the reason is printed only once."""
    if environ.get("PROFILER", "auto") == "auto":
        nsys, why = choose_nsys("auto", environ, may_fetch=True)
        if nsys is None:
            environ["PROFILER"] = "kineto"
            say(f"torch.profiler records, {why}")
        else:
            environ["NSYS"] = nsys.path


def capture_all(captures: Sequence[Sequence[str]], environ: Mapping[str, str]) -> list[str]:
    """Make the captures, print the error of each that fails, and return the names of the others."""
    names = []
    for number, arguments in enumerate(captures, 1):
        size = f", {arguments[-1]} MB" if len(arguments) > 1 else ""
        print(f"[{number}/{len(captures)}] {arguments[0]}{size} ... ", end="", flush=True)
        try:
            name, _, result = capture(arguments, environ).partition(": ")
        except DdpProfError as error:
            print("failed", flush=True)
            if isinstance(error, UsageError):
                raise
            say(printable(str(error)))
            continue
        names.append(name)
        print(result.rpartition(" in ")[2], flush=True)
    return names


def traces_of(name: str, folder: Path) -> list[Path]:
    """Return the files of a capture; torch.profiler writes one per rank."""
    whole = folder / f"{name}.sqlite"
    ranks = folder.glob(f"{glob.escape(name)}.rank*.json.gz")
    return [whole] if whole.exists() else sorted(ranks, key=lambda file: (len(file.name), file.name))


def draw(traces: Sequence[Path], figures: Path, *, is_forced: bool) -> bool:
    """Draw the timelines if they are older than a trace or the code; return whether this succeeded."""
    index = figures / "index.html"
    origins = [*traces, *(file for file in (ROOT / "ddp_prof").rglob("*") if file.is_file() and file.suffix != ".pyc")]
    drawn = index.stat().st_mtime if index.exists() and not is_forced else 0
    if all(file.stat().st_mtime <= drawn for file in origins):
        return True
    print("drawing the timelines", flush=True)
    code, printed = run_tethered([str(DDP_PROF), "report", *map(str, traces), "-o", str(figures)], subprocess.PIPE)
    if code:
        print(printed, end="", flush=True)
    return code == 0


def profile_all(environ: dict[str, str]) -> int:
    traces = Path(environ.get("TRACES_DIR") or ROOT / "traces" / "local")
    figures = Path(environ.get("FIGURES_DIR") or ROOT / "figures" / "local")
    # Paths are printed relative to the checkout, as one would type them.
    traces, figures = (path.relative_to(ROOT) if path.is_relative_to(ROOT) else path for path in (traces, figures))
    environ["TRACES_DIR"] = str(traces)
    try:
        traces.mkdir(parents=True, exist_ok=True)
        figures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say(f"{error.filename}: {error.strerror}: set TRACES_DIR and FIGURES_DIR to folders of yours")
        return 1
    captures = list_captures(environ)
    if not captures:
        raise UsageError(f"VARIANTS or BUCKET_SIZES_MB names nothing to capture; there are {' '.join(VARIANT_NAMES)}")
    choose_profiler(environ)
    names = capture_all(captures, environ)
    if not names:
        return 1
    found = [file for name in names for file in traces_of(name, traces)]
    is_drawn = draw(found, figures, is_forced=environ.get("FORCE") == "1")
    print(flush=True)
    code, _ = run_tethered([str(DDP_PROF), "compare", *map(str, found)])
    example = "overlap" if "overlap" in names else names[0]
    files = " ".join(map(str, traces_of(example, traces)))
    print(
        f'\nNext, after "source {environ.get("VENV") or ".venv"}/bin/activate":\n'
        f"  open {figures}/index.html\n  ddp-prof overlap {files} --steps\n  ddp-prof timeline {files} -o timeline.html"
    )
    if failed := len(captures) - len(names) + (not is_drawn) + (code != 0):
        say(f"{failed} of the steps above failed")
    return int(bool(failed))


def main() -> int:
    os.chdir(ROOT)
    on_stop = "\nprofile_all: stopped; what was captured before is kept, and the next run goes on\n"
    return run_program("profile_all", lambda: profile_all(dict(os.environ)), on_stop=on_stop)


if __name__ == "__main__":
    sys.exit(main())
