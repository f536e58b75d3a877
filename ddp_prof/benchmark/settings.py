"""The settings of a results database, each with the figures of all its repeats.

A setting's figure is the median over its runs of each run's median over steps; its interval follows from
:mod:`ddp_prof.benchmark.statistics`. Figures are compared only within one :class:`Testbed`: one machine with the same
versions, one model, one number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ddp_prof.benchmark.statistics import Estimate, estimate_all, quotient
from ddp_prof.benchmark.store import OK
from ddp_prof.variants import BASELINE, BUCKETED, variant_label, variant_order

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from ddp_prof.benchmark.store import Environment, Results, StoredRun, StoredStep


@dataclass(frozen=True, slots=True)
class Testbed:
    """Where and on what was measured: only figures of one testbed are compared.

    Attributes:
        environment: ``Environment.id``.
        device: ``None`` where no run of the testbed got far enough to report it.
    """

    environment: str
    model_size: str
    world_size: int
    device: str | None

    @classmethod
    def of(cls, run: StoredRun) -> Testbed:
        """That of a run which could report its device."""
        return cls(run.environment, run.model_size, run.world_size, run.device)


@dataclass(frozen=True, slots=True)
class Setting:
    """What was run, apart from the testbed.

    Attributes:
        bucket_size_mb: Cap of a bucket in MB of 2**20 bytes; ``None`` where the variant has none, or no cap.
        local_batch_size: Sequences a step of one rank.
        seq_len: Tokens of a sequence.
    """

    variant: str
    bucket_size_mb: float | None
    local_batch_size: int
    seq_len: int

    @property
    def label(self) -> str:
        """What tables and figures call the variant: ``bucketed 10 MB``."""
        return variant_label(*self.kind)

    @property
    def kind(self) -> tuple[str, float | None]:
        """Variant and bucket size."""
        return self.variant, self.bucket_size_mb

    @property
    def swept_mb(self) -> float | None:
        """The bucket size, where the variant is the one whose sizes are compared."""
        return self.bucket_size_mb if self.variant == BUCKETED else None

    @property
    def workload(self) -> tuple[int, int]:
        """Batch size and context length: settings of one workload do the same work."""
        return self.local_batch_size, self.seq_len


@dataclass(frozen=True, slots=True)
class Timing:
    """What a host timer measured of a setting, in nanoseconds: all that a published study reports.

    Attributes:
        communication_ns: From the end of backward until all gradients are there, without synchronizing first.
    """

    setting: Setting
    status: str
    step_ns: Estimate | None
    communication_ns: Estimate | None


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """Medians over the captures of a setting, in nanoseconds a step."""

    captures: int
    comm_ns: float
    overlapped_ns: float
    exposed_ns: float
    tail_ns: float | None


@dataclass(frozen=True, slots=True)
class SettingSummary:
    """All that was measured of a setting on a testbed; ``None`` is what was not.

    Attributes:
        timing: Measured without synchronizing within the step; ``status`` is ``ok`` where one run was.
        first: One of the runs, for what all of them share.
        runs: Runs that were measured.
        failed_runs: Runs that ran out of memory or failed; ``reason`` says why the first of them did.
        caveats: What restricts the meaning of the figures.
        synchronized_ns: Communication where the host waited for the device at each change of phase, as it did for
            forward, backward and optimizer.
        trace: From captures of the setting.
        peak_memory_bytes: The most that any run took.
        speedup: Step of the naive run of the same work in the same testbed over this one's; the other is that of
            communication.
    """

    testbed: Testbed
    environment: Environment | None
    timing: Timing
    first: StoredRun
    runs: int
    failed_runs: int
    reason: str | None
    caveats: tuple[str, ...]
    synchronized_ns: Estimate | None
    forward_ns: Estimate | None
    backward_ns: Estimate | None
    optimizer_ns: Estimate | None
    trace: TraceFigures | None
    peak_memory_bytes: int | None
    speedup: Estimate | None = None
    communication_speedup: Estimate | None = None

    @property
    def setting(self) -> Setting:
        """What was run."""
        return self.timing.setting


Key: TypeAlias = tuple[Testbed, Setting]


def summarize_settings(results: Results) -> tuple[SettingSummary, ...]:
    """Each setting of each testbed: testbeds as first met, settings by workload, variant and bucket size."""
    runs = _runs_by_setting(results)
    environments = {environment.id: environment for environment in results.environments}
    steps: dict[tuple[str, bool], list[StoredStep]] = {}
    for step in results.steps:
        steps.setdefault((step.run, step.is_synchronized), []).append(step)
    figures = {name: _estimate(runs, steps, *how) for name, how in FIGURES.items()}
    summaries = [
        _summarize(key, environments.get(key[0].environment), own, {name: of.get(key) for name, of in figures.items()})
        for key, own in runs.items()
    ]
    testbeds = list(dict.fromkeys(testbed for testbed, _ in runs))
    summaries.sort(key=lambda summary: (testbeds.index(summary.testbed), *setting_order(summary.setting)))
    return tuple(_with_speedups(summaries))


def setting_order(setting: Setting) -> tuple[int, int, int, str, float]:
    """Sorts settings by workload, then by variant, buckets by size."""
    return *setting.workload, *variant_order(*setting.kind)


def by_testbed(summaries: Iterable[SettingSummary]) -> dict[Testbed, list[SettingSummary]]:
    """The settings of each testbed."""
    found: dict[Testbed, list[SettingSummary]] = {}
    for summary in summaries:
        found.setdefault(summary.testbed, []).append(summary)
    return found


def _runs_by_setting(results: Results) -> dict[Key, list[StoredRun]]:
    found: dict[Key, list[StoredRun]] = {}
    for run, device in zip(results.runs, _devices(results.runs), strict=True):
        testbed = replace(Testbed.of(run), device=device)
        setting = Setting(run.variant, run.bucket_size_mb, run.local_batch_size, run.seq_len)
        found.setdefault((testbed, setting), []).append(run)
    return found


def _devices(runs: Sequence[StoredRun]) -> list[str | None]:
    """The device of each run; a run that failed before it could report it gets the device of its environment."""
    known: dict[str, list[str]] = {}
    for run in runs:
        if run.device is not None:
            known.setdefault(run.environment, []).append(run.device)
    return [run.device or next(iter(known.get(run.environment, ())), None) for run in runs]


def _of_machine(key: Key) -> Sequence[Hashable]:
    return (_machine(key),)


def _of_variant(key: Key) -> Sequence[Hashable]:
    _, setting = key
    return setting.variant, _machine(key)


FIGURES: dict[str, tuple[str, bool, Callable[[Key], Sequence[Hashable]]]] = {
    "step_ns": ("step_ns", False, _of_machine),
    "communication_ns": ("communication_ns", False, _of_variant),
    "synchronized_ns": ("communication_ns", True, _of_variant),
    "forward_ns": ("forward_ns", True, _of_machine),
    "backward_ns": ("backward_ns", True, _of_machine),
    "optimizer_ns": ("optimizer_ns", True, _of_machine),
}
"""What is estimated: the column of the steps, whether of synchronized ones, and the pools of its scatter.

The scatter of whole steps comes from the machine, so all settings of an environment are pooled. Communication after
backward depends on the variant, and so does its scatter: it is pooled by variant.
"""


def _estimate(
    runs: Mapping[Key, Sequence[StoredRun]],
    steps: Mapping[tuple[str, bool], Sequence[StoredStep]],
    column: str,
    is_synchronized: bool,
    pools_of: Callable[[Key], Sequence[Hashable]],
) -> dict[Key, Estimate]:
    """One figure of all settings."""
    machines: dict[Hashable, dict[Key, dict[str, list[float]]]] = {}
    for key, own in runs.items():
        machines.setdefault(_machine(key), {})[key] = {
            _repeat(run): [
                value
                for step in steps.get((run.id, is_synchronized), ())
                if (value := getattr(step, column)) is not None
            ]
            for run in own
            if run.status == OK
        }
    found: dict[Key, Estimate] = {}
    for samples in machines.values():
        found |= estimate_all(samples, _work, pools_of)
    return found


def _repeat(run: StoredRun) -> str:
    """What runs of one block share: the repeat, and their length, since sweeps of two lengths may share a database."""
    return f"repeat {run.repeat}: {run.steps} steps after {run.warmup}"


def _machine(key: Key) -> Hashable:
    testbed, _ = key
    return testbed.environment, testbed.device


def _work(key: Key) -> Hashable:
    testbed, setting = key
    return testbed, setting.workload


def _summarize(
    key: Key, environment: Environment | None, runs: Sequence[StoredRun], figures: dict[str, Estimate | None]
) -> SettingSummary:
    testbed, setting = key
    measured = [run for run in runs if run.status == OK]
    failed = [run for run in runs if run.status != OK]
    status = OK if measured else failed[0].status
    return SettingSummary(
        testbed=testbed,
        environment=environment,
        timing=Timing(setting, status, figures.pop("step_ns"), figures.pop("communication_ns")),
        first=(measured or failed)[0],
        runs=len(measured),
        failed_runs=len(failed),
        reason=next((run.reason for run in failed if run.reason), None),
        caveats=tuple(dict.fromkeys(run.caveat for run in runs if run.caveat)),
        trace=_trace_figures(measured),
        peak_memory_bytes=max(
            (run.peak_memory_bytes for run in runs if run.peak_memory_bytes is not None), default=None
        ),
        **figures,
    )


def _trace_figures(runs: Sequence[StoredRun]) -> TraceFigures | None:
    captures = [run for run in runs if run.trace_comm_ns is not None]
    if not captures:
        return None

    def median(field: str) -> Any:
        values = [value for run in captures if (value := getattr(run, f"trace_{field}")) is not None]
        return float(np.median(values)) if values else None

    exposed = median("exposed_ns")
    overlapped = median("overlapped_ns")
    if exposed is None or overlapped is None:
        return None
    return TraceFigures(len(captures), median("comm_ns"), overlapped, exposed, median("tail_ns"))


def _with_speedups(summaries: Sequence[SettingSummary]) -> list[SettingSummary]:
    """Each with its speed-up over the naive run of the same work on the same testbed, where there is one."""
    naive = {
        (summary.testbed, summary.setting.workload): summary.timing
        for summary in summaries
        if summary.setting.variant == BASELINE
    }
    found = []
    for summary in summaries:
        own = summary.timing
        if base := naive.get((summary.testbed, summary.setting.workload)):
            step = speedup(base.step_ns, own.step_ns)
            communication = speedup(base.communication_ns, own.communication_ns)
            summary = replace(summary, speedup=step, communication_speedup=communication)
        found.append(summary)
    return found


def speedup(before: Estimate | None, after: Estimate | None) -> Estimate | None:
    """One time over another, where both are known."""
    if before is None or after is None or not after.value:
        return None
    return Estimate(1.0) if before is after else quotient(before, after)
