"""Speed-ups in turns: variants trained one after another by one set of ranks, unprofiled, in several rounds.

Captures are made one after another, so that a machine that gets quieter meanwhile makes the later variant look faster.
Here each round starts the ranks anew and trains all variants, a block of steps each; every second one backwards.
So a round gives one ratio of each variant to ``naive``, of steps that are seconds apart, and rounds differ as runs of
another day do. The interval of a speed-up is that of the rounds.

The rounds are the repeats of a results database (:mod:`.store`) beside the captures, :data:`TURNS`, which
``ddp-prof results`` reads, too. ``compare`` and ``report`` take speed-ups from there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from ddp_prof.analyze import DEFINITIONS
from ddp_prof.analyze.statistics import LEAST_STEPS
from ddp_prof.benchmark import store
from ddp_prof.benchmark.settings import Setting, summarize_settings
from ddp_prof.benchmark.store import Results, StoredRun
from ddp_prof.errors import WorkloadError
from ddp_prof.run_config import RunConfig
from ddp_prof.variants import BASELINE

if TYPE_CHECKING:
    from ddp_prof.manifest import Manifest
    from ddp_prof.runs.run import Run

TURNS = "turns.db"
"""Name of the file in the folder of the captures."""
LEAST_ROUNDS, MOST_ROUNDS = LEAST_STEPS, 16
STEPS, WARMUP = 3, 2
"""Steps of a block; torch's DDP makes its buckets in the first two."""


def measure_turns(
    configs: Sequence[RunConfig],
    path: Path,
    seconds: float,
    *,
    force: bool = False,
    progress: Callable[[int], None] = lambda _round: None,
) -> int:
    """Train the configurations in rounds for this time, and in three rounds at least; return the number of rounds.

    If ``path`` holds rounds of the same code and settings, nothing is trained, unless ``force``.
    All configurations have the same ranks and device. Raises WorkloadError if a configuration fails: of a round all are
    kept, or none.
    """
    # Imported here because what reads the file needs neither.
    from ddp_prof.benchmark.sweep import Job, measure_in_turns, probe_machine, rows_of

    machine = probe_machine()
    blocks = [_block_of(config) for config in configs]
    ids = [Job(block, 0).run_id(machine.environment.id) for block in blocks]
    if path.exists():
        stored = store.load_results(path).runs
        current = [run for run in stored if (run.code, run.definitions) == (machine.code, DEFINITIONS)]
        if not force and len(current) == len(stored) and {*ids} == {run.id for run in stored if run.repeat == 0}:
            rounds = 1 + max(run.repeat for run in stored)
            if rounds >= LEAST_ROUNDS:
                return rounds
        for suffix in ("", "-journal", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    began, rounds = monotonic(), 0
    with closing(store.open_database(path)) as database:
        while rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and monotonic() - began < seconds):
            progress(rounds)
            order = list(range(len(blocks)))[:: -1 if rounds % 2 else 1]
            outcomes = measure_in_turns([blocks[index] for index in order])
            if failed := next((outcome for outcome in outcomes if isinstance(outcome, WorkloadError)), None):
                raise failed
            for index, outcome in zip(order, outcomes, strict=True):
                rows = rows_of(Job(blocks[index], rounds), machine, outcome)
                store.write_run(database, machine.environment, *rows)
            rounds += 1
    return rounds


def _block_of(config: RunConfig) -> RunConfig:
    """Configure a block of steps; variants that wait for each all-reduce get a synchronized step to time messages."""
    timed = config.variant in {BASELINE, "flat"}
    return replace(config, steps=STEPS, warmup=WARMUP, synchronized_steps=int(timed))


def add_captures(path: Path, captures: Sequence[tuple[RunConfig, Sequence[Path]]]) -> None:
    """Note in the database the files and figures of the captures; a capture that cannot be read is left out."""
    from ddp_prof.benchmark.sweep import read_figures

    files = {_setting_of(config): traces for config, traces in captures if traces}
    noted_at = path.stat().st_mtime
    with closing(store.open_database(path)) as database:
        for run in store.load_results(path).runs:
            if run.repeat != 0 or not (traces := files.get(_setting_of(run))):
                continue
            trace = os.path.relpath(traces[0].absolute(), path.parent.absolute())
            if run.trace == trace and all(file.stat().st_mtime <= noted_at for file in traces):
                continue
            with suppress(WorkloadError):
                store.update_run(database, replace(run, trace=trace, **read_figures(traces)))  # type: ignore[arg-type]


def _setting_of(run: RunConfig | StoredRun) -> Setting:
    return Setting(run.variant, run.bucket_size_mb, run.local_batch_size, run.seq_len)


Turns = Mapping[Path, Mapping[str, float]]
"""For each run, by its first file: the median step of each round in nanoseconds."""


def load_turns(runs: Sequence[Run]) -> Turns:
    """Read the turns that lie beside the traces of runs, for the settings of these runs.

    A run whose ``run.json`` names another machine, device, model or amount of work has none. Raises TraceError if a
    file of that name is something else.
    """
    turns: dict[Path, Mapping[str, float]] = {}
    results_of: dict[Path, Results | None] = {}
    for run in runs:
        path = run.files[0].with_name(TURNS)
        if path not in results_of:
            results_of[path] = store.load_results(path) if path.is_file() else None
        results, manifest = results_of[path], run.manifest
        if results is None or manifest is None:
            continue
        if rounds := _rounds_of(manifest, results):
            turns[run.files[0]] = rounds
    return turns


def _rounds_of(manifest: Manifest, results: Results) -> Mapping[str, float]:
    options = RunConfig(variant=manifest.variant).manifest_options()
    if any(manifest.options.get(name, value) != value for name, value in options.items()):
        return {}  # the turns have no options
    place = (manifest.model_size, manifest.world_size, manifest.device)
    local_batch_size = manifest.batch_size // manifest.world_size
    setting = Setting(manifest.variant, manifest.bucket_size_mb, local_batch_size, manifest.seq_len)
    machines = {one.id: (one.cpu, one.cores, one.gpus, one.torch) for one in results.environments}
    machine = (*(manifest.machine.get(name) for name in ("cpu", "cores", "gpus")), manifest.versions.get("torch"))
    for testbed, summaries in summarize_settings(results).items():
        if (testbed.model_size, testbed.world_size, testbed.device) != place:
            continue
        if machines.get(testbed.environment) != machine or testbed.definitions != DEFINITIONS:
            continue
        steps = next((summary.step_ns for summary in summaries if summary.setting == setting), None)
        return steps.medians if steps else {}
    return {}
