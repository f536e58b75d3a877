"""Checks every variant on GPUs, captures it in every setup, and packs the results.

Also compares bucketed with torch's DDP, and measures what recording costs. Works offline.

    scripts/capture_gpu.sh [--dry-run] [--minutes N] [--wheels FOLDER] [--nsys FILE] [--out FOLDER] [--max-mb MB]

The work is done in slices: the next call of the same command continues where the time of this one was over (OUT/done
lists what is done). Each slice packs its results into at most 8 files, OUT.slice1.tar.gz, OUT.slice1.2.tar.gz ...;
unpack them in another checkout to continue there. The order is
  1. preflight: what this machine has, and which recorder records CUDA here
  2. correctness of every variant on the GPU, compared with one process (scripts/dev/check_variants.py)
  3. captures of every variant in every setup, and their tables
  4. bucketed compared with torch's DDP, steps of both in turns
  5. what recording costs, runs with and without recorder in turns
The setups are
  gloo     tensors on the GPU, reduced by the host: real copies, real overlap of copies with backward
  nccl     one GPU per rank; with a single GPU two ranks that take turns on it, which every table says
  single   one rank, for which NCCL has nothing to do: the time of compute alone

Settings (environment):
  PARTS             what is done after the preflight              (default: check capture tables race cost)
  SETUPS            setups, in this order                         (default: gloo nccl single)
  VARIANTS          variants                                      (default: all of ddp_prof/variants.py)
  BUCKET_SIZES_MB   bucket sizes of bucketed                      (default: 1 10 100)
  ROUNDS            runs with and without recorder, interleaved   (default: 3; 0: none)
  DDP_STEPS         steps of each in the comparison with DDP      (default: 40; 0: none)
  BATCH_SIZE        sequences per step, of all ranks together     (default: 2 per rank)
  RETRY             1: repeat what failed in an earlier slice     (default: 0)
and those of scripts/profile_variant.sh (MODEL_SIZE, SEQ_LEN, STEPS: here 3, WARMUP: here 5, NSYS, NSYS_FLAGS,
QDSTRM_IMPORTER, VENV) and of scripts/install_nsys.sh (NSYS_FETCH).

Exit: 0 when all is done; 75 when something is left to do: call it again; 1 when the preflight found something missing,
or when all is done but a step failed (the others go on); 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from ddp_prof.capture.job import visible_gpus  # noqa: E402
from ddp_prof.capture.processes import run_tethered  # noqa: E402
from ddp_prof.train.launch import run_program  # noqa: E402  # needs nothing but Python
from ddp_prof.variants import BUCKETED, VARIANT_NAMES  # noqa: E402

CAPTURE = "scripts/profile_variant.sh"
PACKING_S = 60
"""Time reserved for packing at the end of a slice."""
LEAST_S = 60
"""No step is begun with less time left."""
MOST_S = 240
"""A step that takes longer has failed, so that a hang does not take the time of other steps."""
KILLED = (124, 137)
"""Exit codes of ``timeout`` when the time is over."""
PARTS = ("check", "capture", "tables", "race", "cost")
TABLES = ("overlap", "overlap --steps", "compare", "compare --waterfall", "collectives --by bucket", "skew")
DOCUMENTS = ("overlap", "compare", "collectives", "skew")


class LeftForNextSlice(Exception):  # noqa: N818  # not an error
    """Stops this slice: the remaining work is left to the next one."""


@dataclass(frozen=True)
class Setup:
    """How many ranks run, and where.

    Attributes:
        settings: Settings of ``scripts/profile_variant.sh``.
        shared: Arguments for our scripts if ranks share a GPU.
    """

    name: str
    ranks: int
    batch_size: int
    settings: tuple[str, ...]
    shared: tuple[str, ...]

    @property
    def backend(self) -> str:
        return "gloo" if self.name == "gloo" else "nccl"


class CaptureSlice:
    """The steps of this slice, within its time."""

    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str]) -> None:
        self._began = time.monotonic()
        self._options, self._environ = options, environ
        self._out: Path = options.out
        self._is_left = False
        self._bin = Path(environ.get("VENV") or ".venv", "bin")
        self._model_size = environ.get("MODEL_SIZE") or "medium"
        self._variants = environ.get("VARIANTS", "").split() or VARIANT_NAMES
        self._recorder = ["PROFILER=auto"]

    def run(self) -> int:
        """Do the remaining work until the time is over; return the exit code."""
        is_dry = self._options.dry_run
        if not is_dry:
            (self._out / "done").mkdir(parents=True, exist_ok=True)
            (self._out / ".slice").touch()
            if self._environ.get("RETRY") == "1":
                shutil.rmtree(self._out / "done/tables", ignore_errors=True)
                (self._out / "recorder.tried").unlink(missing_ok=True)
        try:
            self._set_up()
            if code := self._preflight():
                return code
            self._capture_setups()
            self._pack()
        except LeftForNextSlice:
            self._is_left = True
        if self._is_left:
            print("capture_gpu: the time of this slice is over: call it again to go on")
            return 75
        done = [] if is_dry else [file for file in (self._out / "done").rglob("*") if file.is_file()]
        if failures := sum(file.read_text() == "failed\n" for file in done):
            _print_error(f"{failures} of the steps above or before failed: RETRY=1 does them again")
        return int(bool(failures))

    def _set_up(self) -> None:
        if not self._options.dry_run and not visible_gpus(self._environ):
            return
        if self._options.wheels:
            self._run("env", f"WHEELS={self._options.wheels}", "scripts/env.sh", "train")
        elif not (self._bin / "python").exists():
            self._run("scripts/env.sh", "train")
        if self._options.nsys:  # if it does not record here, those of the machine are still tried
            self._run("env", f"NSYS_ARCHIVE={self._options.nsys}", "scripts/install_nsys.sh")

    def _preflight(self) -> int:
        """Find a recorder, unless an earlier slice found one that still exists; return the exit code."""
        chosen = self._out / "recorder"
        found = chosen.read_text().splitlines() if chosen.is_file() and not self._options.dry_run else []
        nsys = [word.partition("=")[2] for word in found if word.startswith("NSYS=")]
        if not found or not all(os.access(path, os.X_OK) for path in nsys):
            code = self._run(
                "timeout", "--foreground", "--kill-after=20", str(self._seconds_left()), "python3",
                "scripts/gpu_preflight.py", "--python", self._bin / "python", "--out", self._out,
            )  # fmt: skip
            if code in KILLED:  # the next slice continues with the next recorder
                raise LeftForNextSlice
            if code:
                return 1
        if not self._options.dry_run:
            self._recorder = chosen.read_text().splitlines()
        return 0

    def _capture_setups(self) -> None:
        setups = [self._setup(name, self._count_gpus()) for name in self._options.setups]
        parts: dict[str, Callable[[Setup], None]] = {
            "check": self._check,
            "capture": self._capture_all,
            "tables": self._write_tables,
            "race": self._compare_with_ddp,
            "cost": self._measure_profiling_cost,
        }
        for name, part in parts.items():
            if name in self._options.parts and not (name == "tables" and self._is_left):
                for setup in setups:
                    part(setup)

    def _count_gpus(self) -> int:
        """Return the number of GPUs that torch sees; in a dry run, which needs no torch, those of nvidia-smi."""
        if self._options.dry_run:
            return len(visible_gpus(self._environ)) or 1
        question = "import torch; print(torch.cuda.device_count())"
        return int(subprocess.run([self._bin / "python", "-c", question], capture_output=True, check=True).stdout)

    def _setup(self, name: str, gpus: int) -> Setup:
        ranks = 1 if name == "single" else max(gpus, 2)
        batch_size = self._options.batch_size or 2 * ranks  # a rank computes the same in each setup
        settings = {
            "BACKEND": "gloo" if name == "gloo" else "nccl",
            "NGPU": ranks,
            "DEVICE": "cuda",
            "MODEL_SIZE": self._model_size,
            "BATCH_SIZE": batch_size,
            "STEPS": self._environ.get("STEPS") or 3,
            "WARMUP": self._environ.get("WARMUP") or 5,
            **({"RANKS_PER_GPU": ranks} if ranks > gpus else {}),
        }
        shared = ("--ranks-per-gpu", str(ranks)) if ranks > gpus else ()
        return Setup(name, ranks, batch_size, tuple(f"{key}={value}" for key, value in settings.items()), shared)

    def _check(self, setup: Setup) -> None:
        """Compare the variants with one process, the last ones first: sharded ones have the most to lose on a GPU."""
        if setup.ranks == 1:
            return
        for variant in reversed(self._variants):
            self._step(
                f"check/{setup.name}/{variant}", self._bin / "python", "scripts/dev/check_variants.py", "--device",
                "cuda", "--backend", setup.name, *setup.shared, "--variants", variant,
                file=f"{setup.name}/equals_one_process.{variant}.txt",
            )  # fmt: skip

    def _capture_all(self, setup: Setup) -> None:
        sizes = self._environ.get("BUCKET_SIZES_MB", "1 10 100").split()
        for variant in self._variants:
            if variant == BUCKETED:
                for size in sizes:
                    self._capture(setup, f"{variant}_{size}mb", variant, "--bucket-size-mb", size)
                continue
            self._capture(setup, variant, variant)
            if variant == "torch":  # also without the hook, which has a cost, and without copies out of buckets
                self._capture(setup, "torch__no_communication_hook", variant, "--", "--no-communication-hook")
                self._capture(setup, "torch__gradient_as_bucket_view", variant, "--", "--gradient-as-bucket-view")

    def _capture(self, setup: Setup, name: str, *arguments: str) -> None:
        traces = f"TRACES_DIR={self._out / setup.name}"
        self._step(f"capture/{setup.name}/{name}", "env", traces, *self._recorder, *setup.settings, CAPTURE, *arguments)

    def _write_tables(self, setup: Setup) -> None:
        """Write the tables of a setup whose captures are all there, as text and as JSON."""
        if not self._has_captures(setup):
            _print_error(f"{setup.name} is left out, because none of its captures could be made (see above)")
            return
        folder = self._out / setup.name
        for command in TABLES:
            file = f"{setup.name}/{command.replace(' ', '_').replace('--', '')}.txt"
            self._step(f"tables/{file}", self._bin / "ddp-prof", *command.split(), folder, file=file)
        for command in DOCUMENTS:
            file = f"{setup.name}/{command}.json"
            self._step(f"tables/{file}", self._bin / "ddp-prof", command, "--format", "json", folder, file=file)

    def _has_captures(self, setup: Setup) -> bool:
        return bool(self._options.dry_run) or any((self._out / setup.name).glob("*.run.json"))

    def _compare_with_ddp(self, setup: Setup) -> None:
        if not self._options.ddp_steps or not self._has_captures(setup):
            return
        self._step(
            f"race/{setup.name}", self._bin / "python", "scripts/dev/benchmark.py", "ddp", "--device", "cuda",
            "--backend", setup.backend, "--world-size", str(setup.ranks), *setup.shared,
            "--model-size", self._model_size, "--batch-size", str(setup.batch_size),
            "--seq-len", self._environ.get("SEQ_LEN") or "128",
            "--rounds", "3", "--steps", str(self._options.ddp_steps), "--target", "1.02",
            file=f"{setup.name}/against_ddp.txt",
        )  # fmt: skip

    def _measure_profiling_cost(self, setup: Setup) -> None:
        """Run with and without recorder in turns, so that other load on the machine affects both alike."""
        if not self._options.rounds or not self._has_captures(setup):
            return
        cost = self._out / "cost" / setup.name
        for number in range(1, self._options.rounds + 1):
            for kind, recorder in (("without", ["PROFILER=none"]), ("with", self._recorder)):
                self._step(
                    f"cost/{setup.name}/{kind}.{number}", "env", f"TRACES_DIR={cost / kind}.{number}", *recorder,
                    "FORCE=1", *setup.settings, "STEPS=10", CAPTURE, BUCKETED, "--bucket-size-mb", "10",
                )  # fmt: skip
        if not self._is_left:
            self._step(
                f"cost/{setup.name}/table", self._bin / "python", "scripts/dev/profiling_cost.py", cost,
                file=f"{setup.name}/cost_of_recording.txt",
            )  # fmt: skip

    def _pack(self) -> None:
        """Pack the results of this slice under the first unused number."""
        number = 1
        while Path(f"{self._out}.slice{number}.tar.gz").exists():
            number += 1
        code = self._run(
            self._bin / "python", "scripts/dev/pack_captures.py", self._out, "--target",
            f"{self._out}.slice{number}.tar.gz", "--newer-than", self._out / ".slice", "--max-mb",
            str(self._options.max_mb), "--max-files", "8",
        )  # fmt: skip
        if code:
            _print_error("nothing was packed")

    def _step(self, name: str, *command: str | Path, file: str = "") -> None:
        """Run a step that is not done yet, if there is time.

        A failure is printed and noted, and does not stop other steps. A step that the end of the slice interrupts is
        tried a second time.

        Args:
            name: Name of its file in OUT/done.
            command: Program and arguments.
            file: File for its output, in OUT/tables.
        """
        note = self._out / "done" / name
        state = note.read_text().strip() if note.exists() else ""
        if state == "ok" or (state == "failed" and self._environ.get("RETRY") != "1"):
            return
        left = self._seconds_left()
        if not self._options.dry_run and left < LEAST_S:
            self._is_left = True
            return
        target = self._out / "tables" / file if file else None
        words = list(map(str, command))
        _print_command(words, target)
        if self._options.dry_run:
            return
        note.parent.mkdir(parents=True, exist_ok=True)
        limited = ["timeout", "--foreground", "--kill-after=20", str(min(left, MOST_S)), *words]
        if target is None:
            code, _ = run_tethered(limited)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as printed:
                code, _ = run_tethered(limited, printed.fileno())
        result = "ok"
        if code in KILLED and state != "cut" and left < MOST_S:
            result, self._is_left = "cut", True
            _print_error(f"left to the next slice: {shlex.join(words)}")
        elif code:
            result = "failed"
            _print_error(f"failed: {shlex.join(words)}")
        note.write_text(f"{result}\n")

    def _seconds_left(self) -> int:
        return round(float(self._options.minutes) * 60 - PACKING_S - (time.monotonic() - self._began))

    def _run(self, *command: str | Path) -> int:
        words = list(map(str, command))
        _print_command(words)
        return 0 if self._options.dry_run else run_tethered(words)[0]


def _print_command(words: Sequence[str], file: Path | None = None) -> None:
    print("+", shlex.join(words), *([">", shlex.quote(str(file))] if file else []), flush=True)


def _print_error(text: str) -> None:
    print(f"capture_gpu: {text}", file=sys.stderr, flush=True)


def _integer_between(least: int, most: int = 999_999_999) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number from {least} to {most}")
        return int(text)

    return number


def read_arguments(argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "capture_gpu.sh", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="print every command in order, run none; on any machine")
    parser.add_argument(
        "--minutes", type=_integer_between(3, 100_000), default=9, help="end this slice after so many (default: 9)"
    )
    parser.add_argument(
        "--wheels", metavar="FOLDER", help="make the environment offline, from these wheels and the installed torch"
    )
    parser.add_argument(
        "--nsys", metavar="FILE", help="also try the nsys in this archive, made by scripts/install_nsys.sh --pack"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_capture"), help="folder for all results; relative to the checkout"
    )
    parser.add_argument(
        "--max-mb", type=_integer_between(1, 1_000_000), default=16, help="size of a packed file (default: 16)"
    )
    options = parser.parse_args(argv)
    numbers = {"BATCH_SIZE": (1, 999_999_999, None), "ROUNDS": (0, 1000, 3), "DDP_STEPS": (0, 999_999_999, 40)}
    for name, (least, most, default) in numbers.items():
        try:
            value = _integer_between(least, most)(environ[name]) if environ.get(name) else default
        except argparse.ArgumentTypeError as error:
            parser.error(f"{name}: {error}")
        setattr(options, name.lower(), value)
    options.parts = environ.get("PARTS", " ".join(PARTS)).split()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"PARTS: no such part: {', '.join(sorted(unknown))}")
    options.setups = environ.get("SETUPS", "gloo nccl single").split()
    if unknown := set(options.setups) - {"gloo", "nccl", "single"}:
        parser.error(f"SETUPS: no such setup: {', '.join(sorted(unknown))}")
    return options


def main() -> int:
    options = read_arguments(sys.argv[1:], os.environ)
    os.chdir(ROOT)
    os.environ["CHROMIUM"] = "0"  # draws nothing here
    if options.wheels:
        os.environ.setdefault("NSYS_FETCH", "0")  # offline
    return run_program("capture_gpu", lambda: CaptureSlice(options, os.environ).run())


if __name__ == "__main__":
    sys.exit(main())
