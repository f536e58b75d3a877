"""Summarizes each setting of a results database over its repeats.

A figure (such as the step time) of a setting is the median over its runs of the median over the steps of a run. Its
interval is found by drawing runs and not steps, see :mod:`ddp_prof.analyze.statistics`: steps of one run are more alike
than steps of two runs. Figures are compared only within one :class:`Testbed`, and there only between runs of the same
workload and repeat, which are near in time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ddp_prof.analyze.statistics import StepFigure, median_of_steps, ratio_of_repeats
from ddp_prof.benchmark.store import OK, Results, StoredRun, StoredStep
from ddp_prof.present.columns import ms
from ddp_prof.variants import BASELINE, BUCKETED, variant_label, variant_order


def label_of(variant: str, bucket_size_mb: float | None) -> str:
    """Return the label of a variant with its bucket size: ``bucketed 10 MiB``."""
    return variant_label(variant, bucket_size_mb).replace(" MB", " MiB")


@dataclass(frozen=True, slots=True)
class Testbed:
    """Machine, model, number of ranks and device of a measurement; only figures of one testbed are compared.

    ``environment`` is the id of the machine and its software, ``definitions`` the version of the analysis.
    """

    environment: str
    model_size: str
    world_size: int
    device: str | None  # None if no run got far enough to report it
    definitions: int | None = None  # None in older databases, which do not hold it

    @classmethod
    def from_run(cls, run: StoredRun) -> Testbed:
        return cls(run.environment, run.model_size, run.world_size, run.device, run.definitions)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is varied on a testbed: variant, bucket size, batch size and sequence length.

    The bucket size is ``None`` if the variant has no buckets or no cap.
    """

    variant: str
    bucket_size_mb: float | None
    local_batch_size: int
    seq_len: int

    @property
    def label(self) -> str:
        return label_of(self.variant, self.bucket_size_mb)

    @property
    def swept_mb(self) -> float | None:
        """The bucket size if the variant is ``bucketed``, whose sizes are compared; else ``None``."""
        return self.bucket_size_mb if self.variant == BUCKETED else None

    @property
    def workload(self) -> tuple[int, int]:
        """Batch size of a rank and sequence length: settings of one workload do the same work."""
        return self.local_batch_size, self.seq_len

    @property
    def work_text(self) -> str:
        return f"batch {self.local_batch_size} x {self.seq_len}"

    def order(self) -> tuple[tuple[int, int], tuple[int, str, float]]:
        """Return a sort key: by workload, then by variant, then by bucket size."""
        return self.workload, variant_order(self.variant, self.bucket_size_mb)


@dataclass(frozen=True, slots=True)
class Estimate(StepFigure):
    """A median over runs, in the unit of the field that holds it; ``medians`` holds each run's median, by repeat."""

    medians: Mapping[str, float] = field(default_factory=dict)


def estimate(medians: Mapping[str, float]) -> Estimate | None:
    """Return the median over runs, with its interval, from each run's median; ``None`` if there is no run."""
    median = median_of_steps([list(medians.values())])
    return Estimate(median.value, median.half_width, medians) if median else None


def ratio(above: Estimate | None, below: Estimate | None) -> Estimate | None:
    """Return ``above`` divided by ``below``, computed within each repeat that both have.

    If they have no repeat in common, one median is divided by the other, without an interval. ``None`` if either is
    missing or ``below`` is zero.
    """
    if above is None or below is None or not below.value:
        return None
    common = {key: above.medians[key] / value for key, value in below.medians.items() if key in above.medians and value}
    if paired := ratio_of_repeats(list(common.values())):
        return Estimate(paired.value, paired.half_width, common)
    return estimate(common) or Estimate(above.value / below.value, None)


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """The figures from the captures of a setting, per step; ``captures`` is how many there are."""

    captures: int
    comm_ns: float
    overlapped_ns: float
    exposed_ns: float
    tail_ns: float | None


@dataclass(frozen=True, slots=True)
class SettingSummary:
    """The figures of a setting on a testbed, in nanoseconds and bytes; ``None`` if not measured.

    Attributes:
        setting: The setting.
        status: ``ok`` if a run succeeded, else the status of the first failed run.
        first: One of the runs, for what all runs have in common.
        runs: Number of successful runs.
        failed_runs: Number of runs that failed or ran out of memory.
        reason: Why the first of these failed.
        caveats: What restricts the meaning of the figures.
        codes: Digests of the versions of the code that was measured.
        step_ns: Length of a measured step by the host's clock.
        communication_ns: Time from the end of backward until all gradients are there, in the same steps.
        synchronized_ns: The same time in synchronized steps, in which the host waits for the device at each change of
            phase; ``forward_ns``, ``backward_ns`` and ``optimizer_ns`` are from these steps, too.
        trace: The figures from captures.
        speedup: Step time of ``naive`` with the same workload on the same testbed, divided by this step time.
        communication_speedup: The same for ``communication_ns``.
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
        """The fraction of the step that is communication by the host timer; ``None`` if not measured."""
        step, communication = self.step_ns, self.communication_ns
        return communication.value / step.value if step and communication and step.value else None


def summarize_settings(results: Results) -> dict[Testbed, tuple[SettingSummary, ...]]:
    """Return for each testbed of a database the summaries of its settings.

    Testbeds are in the order of their first runs, settings are sorted by workload, variant and bucket size.
    """
    # Group the steps by run, and the runs by testbed and setting.
    steps: dict[tuple[str, bool], list[StoredStep]] = {}
    for step in results.steps:
        steps.setdefault((step.run, step.is_synchronized), []).append(step)
    devices = {run.environment: run.device for run in reversed(results.runs) if run.device is not None}
    runs: dict[Testbed, dict[Setting, list[StoredRun]]] = {}
    for run in results.runs:
        # A run that failed before it could report its device gets the device of its environment.
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
    """Return a summary with its speed-ups over the summary of ``naive`` of the same workload, if there is one."""
    if naive is None:
        return one
    communication = ratio(naive.communication_ns, one.communication_ns)
    return replace(one, speedup=ratio(naive.step_ns, one.step_ns), communication_speedup=communication)


def _summarize(
    setting: Setting, runs: Sequence[StoredRun], steps: Mapping[tuple[str, bool], Sequence[StoredStep]]
) -> SettingSummary:
    """Return the summary of a setting from its runs, without speed-ups.

    ``steps`` holds the steps of all runs, by the run's id and by whether the steps are synchronized.
    """
    measured = [run for run in runs if run.status == OK]
    failed = [run for run in runs if run.status != OK]

    def figure(column: str, *, synchronized: bool) -> Estimate | None:
        """Return the median over runs of one time of the steps."""
        medians = {}
        for run in measured:
            values = [getattr(step, column) for step in steps.get((run.id, synchronized), ())]
            known = [value for value in values if value is not None]
            if known:  # the key has the number of steps, as sweeps with other numbers may share a database
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
    """Return the medians of the captures' figures; ``None`` if exposed or overlapped time is not known."""

    def median(name: str) -> Any:
        values = [value for run in captures if (value := getattr(run, name)) is not None]
        return float(np.median(values)) if values else None

    exposed, overlapped = median("trace_exposed_ns"), median("trace_overlapped_ns")
    if exposed is None or overlapped is None:
        return None
    return TraceFigures(len(captures), median("trace_comm_ns"), overlapped, exposed, median("trace_tail_ns"))


def status_text(summary: SettingSummary) -> str:
    """Return the status of a setting, with the number of failed runs if only some failed."""
    if summary.status == OK and summary.failed_runs:
        return f"{OK}, {summary.failed_runs} of {summary.runs + summary.failed_runs} runs failed"
    return summary.status


def value_ms(estimate: Estimate | None) -> float | None:
    return ms(estimate.value) if estimate else None


def half_ms(estimate: Estimate | None) -> float | None:
    return ms(estimate.half_width) if estimate else None
