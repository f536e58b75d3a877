"""The settings of a results database as rows: the short ones of a table, and the long ones of ``results.csv``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_prof.benchmark.settings import speedup
from ddp_prof.benchmark.store import OK
from ddp_prof.present.columns import ms, percent
from ddp_prof.variants import BASELINE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddp_prof.benchmark.settings import SettingSummary, Timing
    from ddp_prof.benchmark.statistics import Estimate
    from ddp_prof.present.columns import Row

NS_PER_S = 1e9


def setting_rows(summaries: Sequence[SettingSummary]) -> list[Row]:
    """A row for each setting; ``±`` is half of the 95 % interval. Columns of traces are there where one was made."""
    has_traces = any(summary.trace for summary in summaries)
    return [_setting_row(summary, has_traces=has_traces) for summary in summaries]


def _setting_row(summary: SettingSummary, *, has_traces: bool) -> Row:
    timing = summary.timing
    return {
        "variant": summary.setting.label,
        "batch": summary.setting.local_batch_size,
        "context": summary.setting.seq_len,
        "status": status_text(summary),
        "runs": summary.runs,
        "step_ms": value_ms(timing.step_ns),
        "step_±_ms": half_ms(timing.step_ns),
        "comm_ms": value_ms(timing.communication_ns),
        "comm_±_ms": half_ms(timing.communication_ns),
        "comm_%": share_percent(timing),
        "synchronized_comm_ms": value_ms(summary.synchronized_ns),
        **({f"trace_{part}_ms": _trace_ms(summary, part) for part in ("exposed", "tail")} if has_traces else {}),
        "collectives": summary.first.collectives,
        "speedup": summary.speedup.value if summary.speedup else None,
        "speedup_±": summary.speedup.paired_half_width if summary.speedup else None,
    }


def csv_rows(summaries: Iterable[SettingSummary]) -> list[Row]:
    """A row for each setting: the columns that the course's study asks for, then all others.

    ``avg_comm_time_ms`` is the host time between the end of backward and the last gradient, *without* synchronizing
    first, as the study measured; on a GPU it includes device work of backward that is still pending. The times are
    medians over runs of medians over steps, although the study's column names say average.
    """
    return [_csv_row(summary) for summary in summaries]


def _csv_row(summary: SettingSummary) -> Row:
    run, timing, setting = summary.first, summary.timing, summary.setting
    step = timing.step_ns
    row: Row = {
        "implementation": setting.variant,
        **{name: getattr(run, name) for name in ("model_size", "d_model", "num_layers", "world_size")},
        "avg_step_time_ms": value_ms(step),
        "avg_comm_time_ms": value_ms(timing.communication_ns),
        "comm_overhead_pct": share_percent(timing),
        "num_comm_ops": run.collectives,
        "speedup_vs_naive": summary.speedup.value if summary.speedup else None,
        "comm_speedup_vs_naive": summary.communication_speedup.value if summary.communication_speedup else None,
        "bucket_size_mb": setting.bucket_size_mb,
        "local_batch_size": setting.local_batch_size,
        "seq_len": setting.seq_len,
        "status": timing.status,
        "reason": summary.reason,
        "runs": summary.runs,
        "failed_runs": summary.failed_runs,
        "steps_per_run": run.steps,
        "step_time_spread_ms": half_ms(step),
        "comm_time_spread_ms": half_ms(timing.communication_ns),
        "speedup_spread": summary.speedup.paired_half_width if summary.speedup else None,
        "spread_between_runs": None if step is None else int(step.is_between_runs),
        "comm_time_synchronized_ms": value_ms(summary.synchronized_ns),
        "comm_time_synchronized_spread_ms": half_ms(summary.synchronized_ns),
    }
    for phase in ("forward", "backward", "optimizer"):
        estimate = getattr(summary, f"{phase}_ns")
        row |= {f"{phase}_ms": value_ms(estimate), f"{phase}_spread_ms": half_ms(estimate)}
    return row | {
        "trace_captures": summary.trace.captures if summary.trace else None,
        **{f"trace_{part}_ms": _trace_ms(summary, part) for part in ("comm", "overlapped", "exposed", "tail")},
        "comm_bytes": run.communicated_bytes,
        "gradient_bytes": run.gradient_bytes,
        "parameters": run.parameters,
        "peak_memory_bytes": summary.peak_memory_bytes,
        "tokens_per_s": run.tokens / step.value * NS_PER_S if step and step.value else None,
        "device": summary.testbed.device,
        "backend": run.backend,
        "caveat": "; ".join(summary.caveats) or None,
        "environment": summary.testbed.environment,
        **{name: getattr(summary.environment, name, None) for name in ("cpu", "cores", "gpus", "torch", "ddp_prof")},
        "git_commit": run.git_commit,
    }


def comparison_rows(study: Sequence[Timing], summaries: Sequence[SettingSummary]) -> list[Row]:
    """A row for each setting of the published study, with ours of the same variant, bucket size, batch and context."""
    ours = {summary.setting: summary for summary in summaries}
    naive = {timing.setting.workload: timing for timing in study if timing.setting.variant == BASELINE}
    rows: list[Row] = []
    for published in study:
        setting, own = published.setting, ours.get(published.setting)
        base = naive.get(setting.workload)
        ratio = speedup(base.step_ns, published.step_ns) if base else None
        step, communication = (own.timing.step_ns, own.timing.communication_ns) if own else (None, None)
        rows.append(
            {
                "variant": setting.label,
                "batch": setting.local_batch_size,
                "context": setting.seq_len,
                "study_status": published.status,
                "study_step_ms": value_ms(published.step_ns),
                "study_comm_ms": value_ms(published.communication_ns),
                "study_comm_%": share_percent(published),
                "study_speedup": ratio.value if ratio else None,
                "status": status_text(own) if own else None,
                "step_ms": value_ms(step),
                "step_±_ms": half_ms(step),
                "comm_ms": value_ms(communication),
                "comm_%": share_percent(own.timing) if own else None,
                "speedup": own.speedup.value if own and own.speedup else None,
            }
        )
    return rows


def status_text(summary: SettingSummary) -> str:
    """The status; where runs ended differently, how many did."""
    if summary.timing.status == OK and summary.failed_runs:
        return f"{OK}, {summary.failed_runs} of {summary.runs + summary.failed_runs} runs not"
    return summary.timing.status


def share_percent(timing: Timing) -> float | None:
    """Communication's share of the step by the host timer, in percent."""
    step, communication = timing.step_ns, timing.communication_ns
    return percent(communication.value / step.value) if step and communication and step.value else None


def value_ms(estimate: Estimate | None) -> float | None:
    """The figure in milliseconds."""
    return ms(estimate.value) if estimate else None


def half_ms(estimate: Estimate | None) -> float | None:
    """Half of its 95 % interval, in milliseconds."""
    return ms(estimate.half_width) if estimate else None


def _trace_ms(summary: SettingSummary, part: str) -> float | None:
    return ms(getattr(summary.trace, f"{part}_ns")) if summary.trace else None
