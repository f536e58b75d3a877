"""Captures every variant, trains them in turns, draws and compares; profile_all.sh calls it in the environment."""

# ruff: noqa: E402
from __future__ import annotations

import os
import signal

STOPPED = "\nprofile_all: stopped; what was captured before is kept, and the next run goes on\n"


def end_at_once(number: int, _frame: object) -> None:
    os.write(2, STOPPED.encode())
    os._exit(128 + number)


# The imports take a second, in which Ctrl-C would be a traceback.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, end_at_once)

import glob
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ddp_prof.benchmark.store import load_results
from ddp_prof.benchmark.turns import TURNS, add_captures, measure_turns
from ddp_prof.bucket_assignment import bucket_bytes
from ddp_prof.capture.job import PLACE_VARIABLES, choose_nsys, read_place
from ddp_prof.capture.processes import hold_folder, run_tethered
from ddp_prof.capture.variant import capture, read_plan
from ddp_prof.errors import DdpProfError, UsageError, printable, shell_quote
from ddp_prof.train import MODEL_SIZES
from ddp_prof.train.launch import run_program
from ddp_prof.variants import BASELINE, BUCKETED, VARIANT_NAMES

ROOT = Path(__file__).resolve().parents[1]
DDP_PROF = Path(sys.executable).with_name("ddp-prof")
MOST_TURNS_S = 86_400


def say(text: str) -> None:
    print(f"profile_all: {text}", file=sys.stderr, flush=True)


def tell_launcher(environ: dict[str, str]) -> None:
    """Say which rank this is if a launcher has started it; else forget where the ranks of another program meet."""
    if place := read_place(environ):
        names = " ".join(name for names in PLACE_VARIABLES for name in names if name in environ)
        say(
            f"a launcher started this as rank {place['RANK']} of {place['WORLD_SIZE']}, and it waits for the others: "
            f"if none did, unset {names}"
        )
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        environ.pop(name, None)
        os.environ.pop(name, None)  # from which the ranks that train in turns have theirs


def list_captures(environ: Mapping[str, str]) -> list[list[str]]:
    """Return the arguments of each capture; of bucket sizes that give the same buckets, the first one is captured."""
    variants = (environ.get("VARIANTS") or " ".join(VARIANT_NAMES)).split()
    sizes = (environ.get("BUCKET_SIZES_MB") or "1 10 100 1000").split()
    found: list[list[str]] = []
    for variant in variants:
        if variant != BUCKETED:
            read_plan([variant], environ)  # a wrong name is an error now, not after the captures before it
            found.append([variant])
            continue
        captured: dict[tuple[int, ...], str] = {}
        for size in sizes:
            arguments = [variant, "--bucket-size-mb", size]
            config = read_plan(arguments, environ).config
            buckets = bucket_bytes(MODEL_SIZES[config.model_size].parameter_counts, config.bucket_size_mb)
            if (same := captured.setdefault(buckets, size)) == size:
                found.append(arguments)
            else:
                print(f"bucketed, {size} MB: the same buckets as {same} MB, captured once")
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


def capture_all(captures: Sequence[Sequence[str]], environ: Mapping[str, str]) -> dict[str, Sequence[str]]:
    """Make the captures, print the error of each that fails, and return names and arguments of the others."""
    names = {}
    for number, arguments in enumerate(captures, 1):
        size = f", {arguments[-1]} MB" if len(arguments) > 1 else ""
        print(f"[{number}/{len(captures)}] {arguments[0]}{size} ... ", end="", flush=True)
        try:
            captured = capture(arguments, environ)
        except DdpProfError as error:
            print("failed", flush=True)
            if isinstance(error, UsageError):
                raise
            say(printable(str(error)))
            continue
        names[captured.name] = arguments
        print(captured.took, flush=True)
    return names


def traces_of(name: str, folder: Path) -> list[Path]:
    """Return the files of a capture; torch.profiler writes one per rank."""
    whole = folder / f"{name}.sqlite"
    ranks = folder.glob(f"{glob.escape(name)}.rank*.json.gz")
    return [whole] if whole.exists() else sorted(ranks, key=lambda file: (len(file.name), file.name))


def has_rounds(turns: Path) -> bool:
    """Return whether a database is there and holds rounds; where the first one failed or was stopped it holds none.

    Raises:
        TraceError: The file is something else.
    """
    return turns.exists() and bool(load_results(turns).runs)


def draw(traces: Sequence[Path], figures: Path, *, is_forced: bool) -> bool:
    """Draw the timelines if they are older than a trace or the code; return whether this succeeded.

    Step and tail over bucket size, with the model of bucketing, are drawn from the turns.
    """
    index = figures / "index.html"
    turns = [file for file in {trace.with_name(TURNS) for trace in traces} if has_rounds(file)]
    origins = [
        *traces,
        *turns,
        *(file for file in (ROOT / "ddp_prof").rglob("*") if file.is_file() and file.suffix != ".pyc"),
    ]
    drawn = index.stat().st_mtime if index.exists() and not is_forced else 0
    if all(file.stat().st_mtime <= drawn for file in origins):
        return True
    print("drawing the timelines", flush=True)
    commands = [["results", *map(str, turns)]] if turns else []
    for command in [*commands, ["report", *map(str, traces)]]:
        code, printed = run_tethered([str(DDP_PROF), *command, "-o", str(figures)], subprocess.PIPE)
        if code:
            print(printed, end="", flush=True)
            return False
    return True


def read_seconds(environ: Mapping[str, str]) -> float:
    text = environ.get("TURNS_S") or "60"
    with suppress(ValueError):
        if 0 <= float(text) <= MOST_TURNS_S:
            return float(text)
    raise UsageError(f"TURNS_S={text[:80]}: not a number of seconds up to {MOST_TURNS_S}")


def busy_text(ranks: int) -> str:
    """Say whether other programs competed with the ranks, whose own load is about one each."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= 2 * max(ranks, cores) + 2:
        return ""
    return f" (the machine is busy, with a load of {load:.0f} on {cores} cores: speed-ups are those of a busy machine)"


def train_in_turns(
    names: Mapping[str, Sequence[str]], traces: Path, seconds: float, environ: Mapping[str, str]
) -> bool:
    """Measure the speed-ups of what was captured, by training in turns; return whether this succeeded.

    Ranks that a launcher starts, as those of several machines, do not train in turns.
    """
    plans = {name: read_plan(arguments, environ) for name, arguments in names.items()}
    path = traces / TURNS
    if any(plan.place or plan.torchrun for plan in plans.values()):
        say("no speed-ups in turns: a launcher starts the ranks")
        return True
    if not seconds or not any(plan.config.variant == BASELINE for plan in plans.values()):
        return True

    def show(done: int) -> None:
        print("training in turns, without a profiler: round 1" if not done else f", {done + 1}", end="", flush=True)

    try:
        with hold_folder(traces, lambda: say(f"waiting for another capture into {traces}")):
            before = path.stat().st_mtime if path.exists() else 0
            configs = [plan.config for plan in plans.values()]
            rounds = measure_turns(configs, path, seconds, force=environ.get("FORCE") == "1", progress=show)
            is_new = path.stat().st_mtime != before
            up_to_date = f"training in turns: up to date, {rounds} rounds"
            print(busy_text(configs[0].world_size or 1) if is_new else up_to_date, flush=True)
            add_captures(path, [(plan.config, traces_of(name, traces)) for name, plan in plans.items()])
    except DdpProfError as error:
        print(flush=True)
        say(printable(f"no speed-ups in turns: {error}"))
        return False
    return True


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
    has_rounds(traces / TURNS)  # captures take minutes, and whatever follows them reads this file
    seconds, captures = read_seconds(environ), list_captures(environ)
    if not captures:
        raise UsageError(f"VARIANTS or BUCKET_SIZES_MB names nothing to capture; there are {' '.join(VARIANT_NAMES)}")
    tell_launcher(environ)
    choose_profiler(environ)
    names = capture_all(captures, environ)
    if not names:
        return 1
    found = [file for name in names for file in traces_of(name, traces)]
    is_trained = train_in_turns(names, traces, seconds, environ)
    is_drawn = draw(found, figures, is_forced=environ.get("FORCE") == "1")
    print(flush=True)
    code, _ = run_tethered([str(DDP_PROF), "compare", *map(str, found)])
    study = figures / "results.md"
    example = "overlap" if "overlap" in names else next(iter(names))
    files = " ".join(map(shell_quote, traces_of(example, traces)))
    activate = shell_quote(f"{environ.get('VENV') or '.venv'}/bin/activate")
    print(
        f'\nNext, after "source {activate}":\n'
        f"  open {shell_quote(figures / 'index.html')}{f' and {shell_quote(study)}' if study.exists() else ''}\n"
        f"  ddp-prof overlap {files} --steps\n  ddp-prof timeline {files} -o timeline.html"
    )
    if failed := len(captures) - len(names) + (not is_trained) + (not is_drawn) + (code != 0):
        say(f"{failed} of the steps above failed")
    return int(bool(failed))


def main() -> int:
    os.chdir(ROOT)
    return run_program("profile_all", lambda: profile_all(dict(os.environ)), on_stop=STOPPED)


if __name__ == "__main__":
    sys.exit(main())
