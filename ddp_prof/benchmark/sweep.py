"""The sweep, ``python -m ddp_prof.benchmark.sweep``: measures every variant in every setting, several times.

The results go into a database. Runs that it has already are skipped; each new run is written as soon as it ends.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, redirect_stderr
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from hashlib import sha256
from itertools import count, product
from pathlib import Path
from typing import Any

from ddp_prof.analyze import DEFINITIONS
from ddp_prof.benchmark import store
from ddp_prof.benchmark.store import FAILED, OK, OUT_OF_MEMORY, Environment, StoredMessages, StoredRun, StoredStep
from ddp_prof.capture.processes import hold_folder
from ddp_prof.capture.variant import capture as capture_variant
from ddp_prof.capture.variant import digest_code
from ddp_prof.errors import DdpProfError, OutOfMemoryError, TraceError, WorkloadError
from ddp_prof.manifest import CAVEATS_JOINT, Manifest, caveats_of, load_manifest
from ddp_prof.run_config import RunConfig
from ddp_prof.train import MODEL_SIZES
from ddp_prof.train.arguments import NO_CAP, at_least, bucket_size
from ddp_prof.train.launch import die_with_launcher, launch, run_program
from ddp_prof.variants import BUCKETED, VARIANT_NAMES, VARIANTS


def main() -> int:
    """Run the sweep that the command line requests; return the exit code."""
    die_with_launcher()
    arguments = make_parser().parse_args()

    def run() -> int:
        machine = probe_machine()
        grid = choose_grid(arguments, default_grid(machine.gpus))
        outcome = sweep(grid.jobs(), machine, arguments.database, force=arguments.force, profile=arguments.profile)
        sys.stdout.write(f"{outcome}: {arguments.database}\n")
        return 0 if outcome.is_good else 1

    on_stop = f"stopped: the finished runs, if any, are in {arguments.database}; the same command continues\n"
    return run_program("ddp_prof.benchmark.sweep", run, on_stop=on_stop)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddp_prof.benchmark.sweep",
        description="Run each variant in each setting several times and write the times into a results database. A "
        "run that the database already has, of the same code on the same machine, is not repeated, so an interrupted "
        "sweep continues where it stopped. A run that ran out of memory is not repeated, a failed run is.",
        epilog="Exit codes: 0 done, runs that were out of memory included, 1 a run failed, 2 wrong usage. "
        "MASTER_PORT and MASTER_ADDR are honoured as by ddp_prof.train. "
        "Example: python -m ddp_prof.benchmark.sweep --variants naive flat --seq-len 64 --repeats 5",
    )
    group = parser.add_argument_group("settings; several values are separated by blanks")

    def add(flag: str, dest: str, text: str, metavar: str = "N", **more: Any) -> None:
        group.add_argument(flag, dest=dest, nargs="+", metavar=metavar, help=text, **more)

    text = f"of {', '.join(VARIANT_NAMES)} (default: all)"
    add("--variants", "variants", text, "VARIANT", choices=VARIANT_NAMES)
    text = f"of {', '.join(MODEL_SIZES)} (default: xl on two GPUs, else mini)"
    add("--model-size", "model_sizes", text, "SIZE", choices=list(MODEL_SIZES))
    add("--world-size", "world_sizes", "ranks (default: 2)", type=at_least(1))
    text = "sequences a step of one rank (default: 2 4 on two GPUs, else 2)"
    add("--batch-sizes", "local_batch_sizes", text, type=at_least(1))
    text = "tokens of a sequence (default: 128 256 512 on two GPUs, else 32 64 128)"
    add("--seq-len", "seq_lens", text, type=at_least(1))
    text = "bucket sizes of bucketed in MiB; none: no cap (default: 1 10 100 1000 on two GPUs, else 1 10 100)"
    add("--bucket-sizes-mb", "bucket_sizes_mb", text, "MIB", type=bucket_size)

    group = parser.add_argument_group("each run")
    text = "measured steps, and as many synchronized ones after them (default: 10 on two GPUs, else 4)"
    group.add_argument("--steps", type=at_least(1), metavar="N", help=text)
    text = "steps before (default: 5 on two GPUs, else 2)"
    group.add_argument("--warmup", type=at_least(0), metavar="N", help=text)
    group.add_argument("--repeats", type=at_least(1), metavar="N", help="runs of each setting (default: 3)")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    group.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto", help="default: %(default)s")

    group = parser.add_argument_group("outcome")
    text = "where results go (default: %(default)s)"
    group.add_argument("--database", type=Path, default=Path("traces/results.db"), metavar="PATH", help=text)
    group.add_argument("--force", action="store_true", help="repeat and replace runs that the database has")
    group.add_argument(
        "--profile",
        action="store_true",
        help="also capture each setting once under a profiler, into a folder beside the database: overlapped and "
        "exposed communication cannot be measured by the host's clock",
    )
    return parser


def choose_grid(arguments: argparse.Namespace, grid: Grid) -> Grid:
    """Return a grid with the values that the command line requests, without duplicates.

    Dimensions and options that it does not name have the values of ``grid``.
    """
    asked = {field.name: getattr(arguments, field.name, None) for field in fields(Grid)}
    given = {name: value for name, value in asked.items() if value is not None}
    several = {name: tuple(dict.fromkeys(value)) for name, value in given.items() if isinstance(value, list)}
    if "bucket_sizes_mb" in several:
        several["bucket_sizes_mb"] = tuple(None if size == NO_CAP else size for size in several["bucket_sizes_mb"])
    return replace(grid, **(given | several))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What a sweep measures: the values of each dimension, all of which are combined, and the options of all runs."""

    variants: tuple[str, ...] = VARIANT_NAMES
    bucket_sizes_mb: tuple[float | None, ...]  # of bucketed; None is no cap
    model_sizes: tuple[str, ...]
    world_sizes: tuple[int, ...] = (2,)
    local_batch_sizes: tuple[int, ...]
    seq_lens: tuple[int, ...]
    steps: int
    warmup: int
    repeats: int = 3
    device: str = "auto"
    backend: str = "auto"

    def jobs(self) -> list[Job]:
        """Return all runs, in the order in which to make them: repeats, in each all sizes, for each all variants.

        So the runs of the variants are near in time, and slow changes of the machine affect all variants alike. Each
        repeat begins with another variant, so that no variant always runs first after a change of sizes.
        """
        # Each variant with its bucket sizes; only ``bucketed`` has several.
        candidates = [
            (variant, size)
            for variant in self.variants
            for size in (self.bucket_sizes_mb if variant == BUCKETED else (VARIANTS[variant].default_bucket_size_mb,))
        ]
        sizes = list(product(self.model_sizes, self.world_sizes, self.local_batch_sizes, self.seq_lens))
        jobs = []
        for repeat in range(self.repeats):
            # Rotate the variants by one in each repeat.
            first = repeat % len(candidates)
            rotated = candidates[first:] + candidates[:first]
            for (model_size, ranks, local_batch_size, seq_len), (variant, bucket) in product(sizes, rotated):
                config = RunConfig(
                    variant=variant,
                    bucket_size_mb=bucket,
                    model_size=model_size,
                    world_size=ranks,
                    batch_size=ranks * local_batch_size,
                    seq_len=seq_len,
                    steps=self.steps,
                    synchronized_steps=self.steps,
                    warmup=self.warmup,
                    device=self.device,
                    backend=self.backend,
                )
                jobs.append(Job(config, repeat))
        return jobs


def default_grid(gpus: int) -> Grid:
    """Return the grid of the course's study if there are two GPUs, else one that two CPU cores finish in minutes."""
    if gpus >= 2:
        return Grid(
            bucket_sizes_mb=(1.0, 10.0, 100.0, 1000.0),
            model_sizes=("xl",),
            local_batch_sizes=(2, 4),
            seq_lens=(128, 256, 512),
            steps=10,
            warmup=5,
        )
    return Grid(
        bucket_sizes_mb=(1.0, 10.0, 100.0),  # 37 MB of gradients: from 100 MB on there is one bucket
        model_sizes=("mini",),
        local_batch_sizes=(2,),
        seq_lens=(32, 64, 128),
        steps=4,
        warmup=2,
    )


KNOWN, CAPTURED, NOT_CAPTURED = "there before", "captured", "captures failed"


class Outcome(Counter[str]):
    """The numbers of runs and captures of a sweep by what happened to them; its text is one line for users."""

    @property
    def is_good(self) -> bool:
        return not self[FAILED] and not self[NOT_CAPTURED]  # a run may be missing because it ran out of memory

    def __str__(self) -> str:
        words = (KNOWN, OUT_OF_MEMORY, FAILED, CAPTURED, NOT_CAPTURED)
        counts = [f"{self[word]} {word.replace('_', ' ')}" for word in words if self[word]]
        return ", ".join([f"{self[OK]} runs measured", *counts])


def sweep(jobs: Sequence[Job], machine: Machine, path: Path, *, force: bool = False, profile: bool = False) -> Outcome:
    """Make the runs that the database lacks, then the captures; return how many there were of each kind.

    The captures come last, as they would disturb the runs.

    Args:
        jobs: The runs that the database should have.
        machine: This machine.
        path: The database.
        force: Make all runs again.
        profile: Also capture each setting once.

    Raises:
        WorkloadError: Another sweep or capture writes into the folder.
    """
    folder, environment = path.parent, machine.environment

    def refuse() -> None:
        raise WorkloadError(f"{folder}: another sweep or capture writes there: wait for it, or name another --database")

    with closing(store.open_database(path)) as database, hold_folder(folder, refuse):
        stored = {run.id: run for run in store.load_results(path).runs}
        # Find out which runs and captures are missing or were made by other code.
        missing, captures, today = [], [], (machine.code, DEFINITIONS)
        for job in jobs:
            run = None if force else stored.get(job.run_id(environment.id))
            # A run that ran out of memory would do so again; any other failure may have been chance.
            if run and (run.status == FAILED or (run.code, run.definitions) != today):
                run = None
            if run is None:
                missing.append(job)
            if profile and job.repeat == 0 and not (run and run.trace):
                captures.append(job)
        # Make the runs.
        outcome = Outcome({KNOWN: len(jobs) - len(missing)})
        report = _progress(len(missing) + len(captures))
        for job in missing:
            run, steps, messages = rows_of(job, machine, measure(job.config))
            store.write_run(database, environment, run, steps, messages)
            stored[run.id] = run
            outcome[run.status] += 1
            report(f"{job.config}, repeat {job.repeat + 1}", _describe(run, steps))
        # Make the captures, each into a folder for its sizes, and write their figures into the rows of the runs.
        for job in captures:
            config, run = job.config, stored[job.run_id(environment.id)]
            said = "skipped, since the run did not finish"
            if run.status == OK:
                sizes = f"{config.model_size}_{config.world_size}ranks_{config.local_batch_size}x{config.seq_len}"
                try:
                    file, figures = capture(config, path.with_suffix("") / sizes, force=force)
                    trace = os.path.relpath(file.absolute(), folder.absolute())
                    store.update_run(database, replace(run, trace=trace, **figures))  # type: ignore[arg-type]
                    said = "done"
                except WorkloadError as error:
                    said = f"failed: {error}"
                outcome[CAPTURED if said == "done" else NOT_CAPTURED] += 1
            report(f"{config}, capture", said)
        return outcome


def _progress(total: int) -> Callable[[str, str], None]:
    """Return a function that prints a line about a run or capture that has ended, with the time that is left.

    ``total`` is how many there will be.
    """
    begun_s, numbers = time.monotonic(), count(1)

    def report(what: str, outcome: str) -> None:
        ended = next(numbers)
        left_s = (time.monotonic() - begun_s) / ended * (total - ended)
        sys.stderr.write(f"[{ended}/{total}] {what}: {outcome} ({format_time(left_s)} left)\n")
        sys.stderr.flush()

    return report


def format_time(seconds: float) -> str:
    """Return a length of time as text: ``90 s``, ``12 min`` or ``2 h 05 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def _describe(run: StoredRun, steps: Sequence[StoredStep]) -> str:
    """Return in a few words how a run ended: median step and waiting time, or why it failed."""
    if run.status == FAILED:
        return f"failed: {run.reason}"
    if run.status == OUT_OF_MEMORY:
        return str(run.reason)
    free = [step for step in steps if not step.is_synchronized]
    step_ms = statistics.median(step.step_ns for step in free) / 1e6
    waits = [step.communication_ns for step in free if step.communication_ns is not None]
    wait = f"{statistics.median(waits) / 1e6:.0f} ms" if waits else "n/a"
    return f"step {step_ms:.0f} ms, waiting for gradients {wait}"


@dataclass(frozen=True, slots=True)
class Job:
    """One run to make: a configuration and the number of the repeat, from 0 on."""

    config: RunConfig
    repeat: int

    def run_id(self, environment: str) -> str:
        """Return the id of the run in the database: a digest of settings, repeat and environment.

        The measured code is not part of it: if the code changes, the new run replaces the old one, so a setting never
        has runs of two versions of the code.
        """
        config = self.config
        cap = config.bucket_size_mb
        if cap is None and VARIANTS[config.variant].can_be_uncapped:
            cap = math.inf  # as in the ids of existing databases
        names = ("variant", "model_size", "world_size", "local_batch_size", "seq_len")
        setting = {name: getattr(config, name) for name in names} | {"bucket_size_mb": cap}
        conditions = {name: getattr(config, name) for name in ("steps", "warmup", "seed", "device", "backend")}
        return digest([{"setting": setting, "repeat": self.repeat}, conditions, environment])


def digest(value: Any) -> str:  # whatever JSON can hold
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine and the code that is measured on it."""

    environment: Environment
    gpus: int  # that torch can use
    git_commit: str | None
    code: str  # digest of the code that is measured


def probe_machine() -> Machine:
    """Return what is known of this machine; raise WorkloadError if torch does not work here.

    Another process imports torch, which takes seconds, and is asked.
    """
    code = "import json; from ddp_prof.train.record import describe_host; print(json.dumps(describe_host()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603  # our own
    if done.returncode:
        reason = next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")
        raise WorkloadError(f"torch does not work in {sys.prefix}: {reason}: run scripts/env.sh train")
    host = json.loads(done.stdout.splitlines()[-1])
    versions = {name: host["versions"].get(name) for name in ("python", "torch", "cuda", "nccl", "ddp_prof")}
    facts = host["machine"] | versions
    return Machine(Environment(id=digest(facts), **facts), host["gpus"], host["git_commit"], digest_code())


def measure(config: RunConfig) -> Manifest | WorkloadError:
    """Train one configuration; return its manifest, or the error if the run failed."""
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as directory:
        run_json = Path(directory, "run.json")
        command = ["-m", "ddp_prof.train", *config.argv(), "--run-json", str(run_json)]
        return _launch(config, command, [run_json])[0]


def measure_in_turns(configs: Sequence[RunConfig]) -> list[Manifest | WorkloadError]:
    """Train all configurations one after another with the same ranks; return their manifests in the same order.

    If one configuration fails, the error is returned for each of them. All must have the number of ranks, the device
    and the backend of the first.
    """
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as directory:
        files = [Path(directory, f"{number}.run.json") for number in range(len(configs))]
        plan = Path(directory, "plan.json")
        lines = [[*config.argv(), "--run-json", str(file)] for config, file in zip(configs, files, strict=True)]
        plan.write_text(json.dumps(lines), encoding="utf-8")
        return _launch(configs[0], ["-m", "ddp_prof.train.turns", str(plan)], files)


def _launch(config: RunConfig, command: Sequence[str], files: Sequence[Path]) -> list[Manifest | WorkloadError]:
    """Run the ranks and return the manifests that they wrote to ``files``, or their error once for each file.

    ``command`` are the arguments of Python, ``config`` gives the number of ranks.
    """
    try:
        launch(config.world_size or 1, command, log=files[0].with_name("log"), forked=True)
    except WorkloadError as error:
        return [error] * len(files)
    lost = WorkloadError("the ranks ended well, but left no run.json")
    return [load_manifest(file) or lost for file in files]


def rows_of(
    job: Job, machine: Machine, outcome: Manifest | WorkloadError
) -> tuple[StoredRun, list[StoredStep], list[StoredMessages]]:
    """Return the rows of a run for the database: the run, its steps and its messages.

    ``outcome`` is the run's manifest, or its error: then there are no steps and messages.
    """
    config, size = job.config, MODEL_SIZES[job.config.model_size]
    manifest = None if isinstance(outcome, Exception) else outcome
    measured = ("backend", "device", "collectives", "communicated_bytes", "peak_memory_bytes")
    reported: dict[str, Any] = {name: getattr(manifest, name, None) for name in measured}
    run = StoredRun(
        **config.row_fields(),
        id=job.run_id(machine.environment.id),
        environment=machine.environment.id,
        repeat=job.repeat,
        d_model=size.d_model,
        num_layers=size.layers,
        parameters=size.parameter_count,
        gradient_bytes=size.gradient_bytes(),
        **reported,
        status=OK if manifest else OUT_OF_MEMORY if isinstance(outcome, OutOfMemoryError) else FAILED,
        reason=None if manifest else str(outcome),
        caveat=CAVEATS_JOINT.join(caveat.value for caveat in caveats_of(manifest)) or None if manifest else None,
        tokens=config.batch_size * config.seq_len,
        created=manifest.created if manifest else datetime.now(timezone.utc).isoformat(timespec="seconds"),
        git_commit=machine.git_commit,
        command=" ".join(("python -m ddp_prof.train", *config.argv())),
        code=machine.code,
        definitions=DEFINITIONS,
    )
    steps = [StoredStep(run=run.id, **asdict(times)) for times in manifest.host_times] if manifest else []
    messages = [StoredMessages(run=run.id, **asdict(times)) for times in manifest.messages] if manifest else []
    return run, steps, messages


def capture(config: RunConfig, folder: Path, *, force: bool) -> tuple[Path, dict[str, int | None]]:
    """Capture a run into a folder, unless it has a capture that is up to date; return the first file and the figures.

    The figures are as of :func:`read_figures`. With ``force`` the capture is made in any case. Raises WorkloadError if
    it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = replace(config, synchronized_steps=0)  # no capture shows them
    settings = {"TRACES_DIR": str(folder.absolute()), "VENV": sys.prefix, "FORCE": str(int(force)), "VERBOSE": "0"}
    settings |= {"DEVICE": config.device, "NGPU": str(config.world_size or 2)}
    try:
        with redirect_stderr(io.StringIO()):  # a sweep says one line per capture
            name = capture_variant(config.script_argv(), {**os.environ, **settings}).name
    except DdpProfError as error:
        raise WorkloadError(str(error)) from error
    files = sorted([*folder.glob(f"{name}.sqlite"), *folder.glob(f"{name}.rank*.json.gz")])
    if not files:
        raise WorkloadError(f"the capture left no trace in {folder}: is PROFILER=none?")
    return files[0], read_figures(files)


def read_figures(files: Sequence[Path]) -> dict[str, int | None]:
    """Return the figures that ``ddp-prof compare`` shows of a capture, by the names of columns of the database.

    They are nanoseconds, ``None`` if not known. Raises WorkloadError if the capture cannot be measured.
    """
    from ddp_prof.analyze.variants.comparison import compare_variants
    from ddp_prof.runs import load_runs
    from ddp_prof.runs.report import LoadOptions

    try:
        (run,) = load_runs(files, LoadOptions(one_run=True), measures=("overlap",))
        (summary,) = compare_variants([run.overlap()])
    except TraceError as error:
        raise WorkloadError(f"{files[0]} cannot be measured: {error}") from error
    return {f"trace_{part}_ns": getattr(summary, f"{part}_ns") for part in ("comm", "overlapped", "exposed", "tail")}


if __name__ == "__main__":
    sys.exit(main())
