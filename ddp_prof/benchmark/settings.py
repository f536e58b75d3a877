"""The settings of a results database, each with the figures of all its repeats.

A setting's figure is the median over its runs of each run's median over steps. Its interval is found by drawing runs,
see :mod:`ddp_prof.analyze.statistics`: steps of one run are more alike than steps of two runs. Figures are compared
only within one :class:`Testbed`, and there within a repeat of the same work, whose runs are near in time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ddp_prof.analyze.statistics import StepMedian, median_of_steps, ratio_of_repeats
from ddp_prof.benchmark.store import OK, Results, StoredRun, StoredStep
from ddp_prof.present.columns import ms
from ddp_prof.variants import BASELINE, BUCKETED, variant_label, variant_order


def label_of(variant: str, bucket_size_mb: float | None) -> str:
    """Name a variant with its bucket size and unit."""
    return variant_label(variant, bucket_size_mb).replace(" MB", " MiB")


@dataclass(frozen=True, slots=True)
class Testbed:
    """Machine, model and number of ranks of a measurement; only figures of one testbed are compared."""

    environment: str
    model_size: str
    world_size: int
    device: str | None  # not known where no run got far enough to report it
    definitions: int | None = None  # not known of databases from before

    @classmethod
    def from_run(cls, run: StoredRun) -> Testbed:
        return cls(run.environment, run.model_size, run.world_size, run.device, run.definitions)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting, without the testbed. The bucket size is ``None`` if the variant has no buckets or no cap."""

    variant: str
    bucket_size_mb: float | None
    local_batch_size: int
    seq_len: int

    @property
    def label(self) -> str:
        return label_of(self.variant, self.bucket_size_mb)

    @property
    def swept_mb(self) -> float | None:
        """The bucket size of the variant whose sizes are compared."""
        return self.bucket_size_mb if self.variant == BUCKETED else None

    @property
    def workload(self) -> tuple[int, int]:
        """Batch size and context length: settings of one workload do the same work."""
        return self.local_batch_size, self.seq_len

    @property
    def work_text(self) -> str:
        return f"batch {self.local_batch_size} x {self.seq_len}"

    def order(self) -> tuple[tuple[int, int], tuple[int, str, float]]:
        return self.workload, variant_order(self.variant, self.bucket_size_mb)


@dataclass(frozen=True, slots=True)
class Estimate(StepMedian):
    """The median over runs, in the unit of the field that holds it; ``medians`` are each run's, by its repeat."""

    medians: Mapping[str, float] = field(default_factory=dict)


def estimate(medians: Mapping[str, float]) -> Estimate | None:
    median = median_of_steps([list(medians.values())])
    return Estimate(median.value, median.half_width, medians) if median else None


def ratio(above: Estimate | None, below: Estimate | None) -> Estimate | None:
    """Divide one figure by another: repeat by repeat where both have the same repeats, else one median by the other."""
    if above is None or below is None or not below.value:
        return None
    common = {key: above.medians[key] / value for key, value in below.medians.items() if key in above.medians and value}
    if paired := ratio_of_repeats(list(common.values())):
        return Estimate(paired.value, paired.half_width, common)
    return estimate(common) or Estimate(above.value / below.value, None)


@dataclass(frozen=True, slots=True)
class TraceFigures:
    captures: int
    comm_ns: float
    overlapped_ns: float
    exposed_ns: float
    tail_ns: float | None


@dataclass(frozen=True, slots=True)
class SettingSummary:
    """The figures of a setting on a testbed, in nanoseconds and bytes; ``None`` if not measured.

    Attributes:
        first: One of the runs, for what all runs have in common.
        reason: Why the first of ``failed_runs`` failed, or ran out of memory.
        communication_ns: From the end of backward until all gradients are there, without synchronizing, as ``step_ns``.
        synchronized_ns: The same in steps in which the host waits for the device at each change of phase.
        speedup: Step of the naive run of the same work in the same testbed over this one's.
    """

    setting: Setting
    status: str
    first: StoredRun
    runs: int
    failed_runs: int
    reason: str | None
    caveats: tuple[str, ...]
    codes: tuple[str | None, ...]
    step_ns: Estimate | None
    communication_ns: Estimate | None
    synchronized_ns: Estimate | None
    forward_ns: Estimate | None
    backward_ns: Estimate | None
    optimizer_ns: Estimate | None
    trace: TraceFigures | None
    peak_memory_bytes: int | None
    speedup: Estimate | None = None
    communication_speedup: Estimate | None = None

    @property
    def communication_share(self) -> float | None:
        step, communication = self.step_ns, self.communication_ns
        return communication.value / step.value if step and communication and step.value else None


def summarize_settings(results: Results) -> dict[Testbed, tuple[SettingSummary, ...]]:
    """Summarize each setting; testbeds in order of their first runs, settings by workload, variant and bucket size."""
    steps: dict[tuple[str, bool], list[StoredStep]] = {}
    for step in results.steps:
        steps.setdefault((step.run, step.is_synchronized), []).append(step)
    devices = {run.environment: run.device for run in reversed(results.runs) if run.device is not None}
    runs: dict[Testbed, dict[Setting, list[StoredRun]]] = {}
    for run in results.runs:
        # A run that failed before it could report its device gets that of its environment.
        testbed = replace(Testbed.from_run(run), device=run.device or devices.get(run.environment))
        setting = Setting(run.variant, run.bucket_size_mb, run.local_batch_size, run.seq_len)
        runs.setdefault(testbed, {}).setdefault(setting, []).append(run)
    summaries_of = {}
    for testbed, settings in runs.items():
        summaries = [_summarize(setting, settings[setting], steps) for setting in sorted(settings, key=Setting.order)]
        naive = {one.setting.workload: one for one in summaries if one.setting.variant == BASELINE}
        summaries_of[testbed] = tuple(_with_speedups(one, naive.get(one.setting.workload)) for one in summaries)
    return summaries_of


def _with_speedups(one: SettingSummary, naive: SettingSummary | None) -> SettingSummary:
    if naive is None:
        return one
    communication = ratio(naive.communication_ns, one.communication_ns)
    return replace(one, speedup=ratio(naive.step_ns, one.step_ns), communication_speedup=communication)


def _summarize(
    setting: Setting, runs: Sequence[StoredRun], steps: Mapping[tuple[str, bool], Sequence[StoredStep]]
) -> SettingSummary:
    """The figures of a setting over its runs.

    ``steps`` holds the steps of each run, by its id and by whether the host synchronized after each phase.
    """
    measured = [run for run in runs if run.status == OK]
    failed = [run for run in runs if run.status != OK]

    def figure(column: str, *, synchronized: bool) -> Estimate | None:
        medians = {}
        for run in measured:
            values = [getattr(step, column) for step in steps.get((run.id, synchronized), ())]
            known = [value for value in values if value is not None]
            if known:  # sweeps of two lengths may share a database
                medians[f"repeat {run.repeat}: {run.steps} steps after {run.warmup}"] = float(np.median(known))
        return estimate(medians)

    return SettingSummary(
        setting=setting,
        status=OK if measured else failed[0].status,
        first=(measured or failed)[0],
        runs=len(measured),
        failed_runs=len(failed),
        reason=next((run.reason for run in failed if run.reason), None),
        caveats=tuple(dict.fromkeys(run.caveat for run in runs if run.caveat)),
        codes=tuple(dict.fromkeys(run.code for run in measured)),
        step_ns=figure("step_ns", synchronized=False),
        communication_ns=figure("communication_ns", synchronized=False),
        synchronized_ns=figure("communication_ns", synchronized=True),
        forward_ns=figure("forward_ns", synchronized=True),
        backward_ns=figure("backward_ns", synchronized=True),
        optimizer_ns=figure("optimizer_ns", synchronized=True),
        trace=_trace_figures([run for run in measured if run.trace_comm_ns is not None]),
        peak_memory_bytes=max((size for run in runs if (size := run.peak_memory_bytes) is not None), default=None),
    )


def _trace_figures(captures: Sequence[StoredRun]) -> TraceFigures | None:
    def median(name: str) -> Any:
        values = [value for run in captures if (value := getattr(run, name)) is not None]
        return float(np.median(values)) if values else None

    exposed, overlapped = median("trace_exposed_ns"), median("trace_overlapped_ns")
    if exposed is None or overlapped is None:
        return None
    return TraceFigures(len(captures), median("trace_comm_ns"), overlapped, exposed, median("trace_tail_ns"))


def status_text(summary: SettingSummary) -> str:
    if summary.status == OK and summary.failed_runs:
        return f"{OK}, {summary.failed_runs} of {summary.runs + summary.failed_runs} runs not"
    return summary.status


def value_ms(estimate: Estimate | None) -> float | None:
    return ms(estimate.value) if estimate else None


def half_ms(estimate: Estimate | None) -> float | None:
    return ms(estimate.half_width) if estimate else None
