"""Measures speed-ups in turns: the same ranks train all variants one after another, unprofiled, in several rounds.

Captures are made one after another. If other load on the machine gets less meanwhile, the later variant looks faster.
Here each round starts the ranks anew, and they train all variants, a block of steps each; every second round in reverse
order. So each round gives one ratio of each variant to ``naive``, from steps that are seconds apart, and rounds differ
from each other as runs of different days do. The interval of a speed-up is computed over the rounds.

The rounds are stored as the repeats of a results database (:mod:`.store`) beside the captures, :data:`TURNS`.
``ddp-prof results`` reads it, and ``compare`` and ``report`` take their speed-ups from it.
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
"""Name of the database in the folder of the captures."""
LEAST_ROUNDS, MOST_ROUNDS = LEAST_STEPS, 16
STEPS, WARMUP = 3, 2
"""Measured steps and warm-up steps of a block; torch's DDP makes its buckets in the first two steps."""


def measure_turns(
    configs: Sequence[RunConfig],
    path: Path,
    seconds: float,
    *,
    force: bool = False,
    progress: Callable[[int], None] = lambda _round: None,
) -> int:
    """Train the configurations in rounds until ``seconds`` have passed; return the number of rounds.

    There are at least :data:`LEAST_ROUNDS` and at most :data:`MOST_ROUNDS` rounds.

    Args:
        configs: The configurations; all have the same number of ranks and the same device.
        path: The database. If it holds enough rounds of exactly these settings, by the same code, nothing is trained.
        seconds: How long to go on.
        force: Train in any case.
        progress: Called with the number of finished rounds before each round.

    Raises:
        WorkloadError: A configuration failed; nothing of its round is kept.
    """
    # Imported here because what reads the file needs neither.
    from ddp_prof.benchmark.sweep import Job, measure_in_turns, probe_machine, rows_of

    # Keep the rounds that are there, or begin anew.
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
            order = list(range(len(blocks)))[:: -1 if rounds % 2 else 1]  # every second round in reverse order
            outcomes = measure_in_turns([blocks[index] for index in order])
            if failed := next((outcome for outcome in outcomes if isinstance(outcome, WorkloadError)), None):
                raise failed
            for index, outcome in zip(order, outcomes, strict=True):
                rows = rows_of(Job(blocks[index], rounds), machine, outcome)
                store.write_run(database, machine.environment, *rows)
            rounds += 1
    return rounds


def _block_of(config: RunConfig) -> RunConfig:
    """Return a configuration with the number of steps of a block.

    Variants that wait for each all-reduce get one synchronized step, in which messages are timed.
    """
    timed = config.variant in {BASELINE, "flat"}
    return replace(config, steps=STEPS, warmup=WARMUP, synchronized_steps=int(timed))


def add_captures(path: Path, captures: Sequence[tuple[RunConfig, Sequence[Path]]]) -> None:
    """Write the file and the figures of each capture into the row of its setting's first run in the database.

    ``captures`` are pairs of a configuration and its traces. A capture that is noted already and unchanged since, or
    that cannot be read, is left out.
    """
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
"""For each run, by its first file, the median step in nanoseconds of each round, by the name of the round."""


def load_turns(runs: Sequence[Run]) -> Turns:
    """Return the rounds that were measured for the settings of runs, from the databases beside their traces.

    A run is left out if the database has no setting like the one in its ``run.json``: the same machine, device, model
    and workload, and no options. Raises TraceError if a file with the name of the database is something else.
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
    """Return the median step of each round for the setting of a manifest; empty if it was not measured."""
    options = RunConfig(variant=manifest.variant).manifest_options()
    if any(manifest.options.get(name, value) != value for name, value in options.items()):
        return {}  # turns are measured with default options only
    place = (manifest.model_size, manifest.world_size, manifest.device)
    setting = Setting(manifest.variant, manifest.bucket_size_mb, manifest.local_batch_size, manifest.seq_len)
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
