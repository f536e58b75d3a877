"""Show the course of a job from the log of its monitor: sentences on what changed, a table, and a chart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from ddp_prof.columns import Row, count_noun, milliseconds
from ddp_prof.errors import printable
from ddp_prof.monitor.course import (
    CHANCE,
    FIGURES,
    LEAST,
    LEAST_IN_ALL,
    LEAST_SHARE,
    Change,
    LateRank,
    find_changes,
    find_late_ranks,
)
from ddp_prof.monitor.log import MonitorLog, count_jobs_at_once, find_other_job
from ddp_prof.present import theme
from ddp_prof.present.charts import STILL, Chart, axis, make_chart
from ddp_prof.present.columns import in_percent, ms
from ddp_prof.present.table import SCHEMA, TableView
from ddp_prof.present.text import readable_times, shown_name, shown_time, to_plain_text

HOW_TO_READ = (
    f"a change: the medians of at least {LEAST} measurements before and after it differ by "
    f"{100 * LEAST_SHARE:.0f} % of the step or more, and by more than chance explains: of 100 jobs without a change, "
    f"at most {100 * CHANCE:.0f} shows one"
)
_MOST_SHOWN = 5
"""The most restarts that are listed one by one."""
_DRAWN = {
    "step_ns": ("step", theme.LIGHT.text),
    "exposed_ns": ("exposed communication", theme.LIGHT.colors[theme.EXPOSED]),
    "overlapped_ns": ("overlapped communication", theme.LIGHT.colors[theme.OVERLAPPED]),
}


def monitor_view(log: MonitorLog) -> TableView:
    """Return a table with a row per measurement, under sentences on what changed and which rank was late."""
    changes, late = _find_course(log.records)
    said = list(sentences(log.records, changes, late))
    document = {
        "schema": SCHEMA,
        "log": str(log.file),
        "measurements": list(log.records),
        "changes": [
            {
                **asdict(change),
                **_place(log.records, change.position),
                "other_job": _other_job(log.records, change.position),
            }
            for change in changes
        ],
        "late": [
            {
                "rank": one.rank,
                "lag_ns": one.lag_ns,
                "first_step": log.records[one.first]["step"],
                "last_step": log.records[one.last]["step"],
            }
            for one in late
        ],
        "warnings": list(log.notes),
    }
    notes = [*log.notes, *_starts(log.records), *_clocks(log.records), *_costs(log.records), HOW_TO_READ]
    rows = list(map(_row, log.records))
    return TableView("\n".join(map(printable, said)), rows, notes, document, readable_times(rows))


def _find_course(records: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Change], Sequence[LateRank]]:
    """Return what changed and which ranks are late; nothing if several jobs have written the records at once."""
    if count_jobs_at_once(records):
        return [], []
    changes = find_changes(records)
    return changes, find_late_ranks(records, changes)


def sentences(
    records: Sequence[Mapping[str, Any]], changes: Sequence[Change], late: Sequence[LateRank]
) -> Iterator[str]:
    """Yield sentences on what changed, in order of time, and on which rank was late; at least one sentence."""
    if jobs := count_jobs_at_once(records):
        yield f"{jobs} jobs wrote this log at the same time: what changed cannot be told; give each a folder of its own"
        return
    for position in sorted({change.position for change in changes}):
        what = ", ".join(
            f"{FIGURES[change.figure]} {milliseconds(change.before_ns)} -> {milliseconds(change.after_ns)}"
            for change in changes
            if change.position == position
        )
        differs = _other_job(records, position)
        other_job = f"; from there on it is another job: {differs}" if differs else ""
        at = records[position]
        yield f"From step {at['step']} on ({shown_time(at['time'])}): {what}{other_job}"
    for one in late:
        first, last = (
            f"step {at['step']} ({shown_time(at['time'])})" for at in (records[one.first], records[one.last])
        )
        yield f"Rank {one.rank} is late from {first} to {last}: by {milliseconds(one.lag_ns)} in the median"
    if not changes and not late:
        if len(records) < LEAST_IN_ALL:
            few = count_noun(len(records), "measurement")
            yield f"No change found in {few}: fewer than {LEAST_IN_ALL} rarely show one"
        else:
            yield f"No change found in {count_noun(len(records), 'measurement')}, and no rank that stays late"


def _other_job(records: Sequence[Mapping[str, Any]], position: int) -> str | None:
    """Return what makes the measurements from a position on those of another job than the ones before it.

    The job may have started again on other devices, or with more ranks; the figures then differ by that, too. As many
    measurements are looked at as the shortest stretch has, because a change is not found to the measurement.
    """
    return find_other_job(records[position : position + LEAST], records[max(0, position - LEAST) : position])


def _place(records: Sequence[Mapping[str, Any]], position: int) -> dict[str, Any]:
    return {"step": records[position]["step"], "time": records[position]["time"]}


def find_restarts(records: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the position of the first measurement after each restart of the job.

    After a restart another process measures. In a log that does not say which process did, a restart shows where the
    number of the step does not increase.
    """
    return [
        at
        for at, (before, after) in enumerate(pairwise(records), 1)
        if after.get("started") != before.get("started") or after["step"] <= before["step"]
    ]


def _starts(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a note on the restarts of the job, if there were any."""
    restarts = find_restarts(records)
    if restarts and not count_jobs_at_once(records):
        first = [records[at] for at in restarts[:_MOST_SHOWN]]
        shown = ", ".join(f"at step {at['step']} ({shown_time(at['time'])})" for at in first)
        more = f", and {len(restarts) - _MOST_SHOWN} more" if len(restarts) > _MOST_SHOWN else ""
        yield printable(f"started again {count_noun(len(restarts), 'time')}, measured from there on: {shown}{more}")


def _clocks(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a note on the first measurement that is older than the one before it, if there is one."""
    in_turn = pairwise(records)  # their times have one format, so they are compared as texts
    at = next((after for before, after in in_turn if after["time"] < before["time"]), None)
    if at is not None:
        where = f"at step {at['step']} ({shown_time(at['time'])})"
        yield printable(f"time goes back {where}: parts of a log in another order, or a clock that was set")


def _with_gaps(values: Sequence[Any], restarts: Sequence[int]) -> list[Any]:
    """Return the values with a ``None`` at each restart: the drawn line breaks there, as steps may count anew."""
    bounds = [0, *restarts, len(values)]
    return [value for start, end in pairwise(bounds) for value in (*([None] if start else []), *values[start:end])]


def _costs(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a note on how much time a measurement costs the training, if that is known.

    The cost is the time in which the profiler held up the training, and by how much the recorded steps were longer than
    the steps before. The warm-up step of the profiler is not included: in it, a rank waits for other ranks whose
    hold-up is counted already.
    """
    known = [
        record["overhead_ns"] + max(0, record["recorded_step_ns"] - record["usual_step_ns"]) * (record["steps"] or 1)
        for record in records
        if record.get("usual_step_ns") and record.get("recorded_step_ns")
    ]
    if known:
        cost = milliseconds(sorted(known)[len(known) // 2])
        yield f"a measurement cost the training {cost} in the median, without the slowdown of its warm-up step"


def _row(record: Mapping[str, Any]) -> Row:
    """Return the table's row of one measurement."""
    late, finding, step_ns = record.get("late"), record.get("finding"), record["step_ns"]
    # What could be gained is a share of the steps that communicate, whose length older logs do not hold.
    gain_ns, whole_ns = record.get("schedule_gain_ns"), record.get("communicating_step_ns") or step_ns
    return {
        "time": record["time"],
        "step": record["step"],
        "ranks": record.get("ranks"),
        "step_ms": ms(step_ns),
        "comm_ms": ms(record.get("comm_ns")),
        "overlapped_ms": ms(record.get("overlapped_ns")),
        "exposed_ms": ms(record["exposed_ns"]),
        "blocking_ms": ms(record.get("blocking_ns")),
        "slowed_ms": ms(record.get("contention_ns")),
        "overlap_%": in_percent(record.get("overlap_ratio")),
        "gain_at_most_%": in_percent(gain_ns / whole_ns if whole_ns and gain_ns is not None else None),
        "late_rank": late["rank"] if late else None,
        "lag_ms": ms(late["lag_ns"]) if late else None,
        "finding": printable(finding["rule"]) if finding else None,
        "alert": printable("; ".join(record.get("failed") or [])) or None,
    }


def draw_course(log: MonitorLog) -> Chart:
    """Return a chart of step time, exposed and overlapped communication over the steps of the job.

    Dotted lines mark changes, and shaded stretches mark late ranks. The first sentence on the job is the title, uncut:
    a page that has it as its heading does not show it twice.
    """
    records, (changes, late) = log.records, _find_course(log.records)
    said = next(iter(sentences(records, changes, late)))
    steps, restarts = [record["step"] for record in records], find_restarts(records)
    traces = [
        {
            "type": "scatter", "mode": "lines+markers", "name": name, "x": _with_gaps(steps, restarts),
            "y": _with_gaps([ms(record.get(figure)) for record in records], restarts),
            "hovertemplate": f"step %{{x}}: {name} %{{y:.2f}} ms<extra></extra>",
            "line": {"color": color, "width": 2}, "marker": {"size": 6},
        }
        for figure, (name, color) in _DRAWN.items()
    ]  # fmt: skip
    shapes = [
        {
            "type": "line", "xref": "x", "yref": "paper", "x0": steps[at], "x1": steps[at], "y0": 0, "y1": 1,
            "line": {"color": theme.LIGHT.quiet, "width": 1, "dash": "dot"},
        }
        for at in sorted({change.position for change in changes})
    ]  # fmt: skip
    stretches = [
        {
            "type": "rect", "xref": "x", "yref": "paper", "x0": steps[one.first], "x1": steps[one.last],
            "y0": 0, "y1": 1, "line": {"width": 0}, "fillcolor": theme.LIGHT.colors[theme.EXPOSED], "opacity": 0.12,
            "layer": "below",
        }
        for one in late
    ]  # fmt: skip
    labels = [
        {
            # Above its stretch it would be in the legend, at its top under the line of the step.
            "xref": "x", "x": (steps[one.first] + steps[one.last]) / 2, "yref": "paper", "y": 0, "yanchor": "bottom",
            "text": f"rank {one.rank} late", "showarrow": False,
            "font": {"size": 12, "color": theme.LIGHT.quiet},
        }
        for one in late
    ]  # fmt: skip
    what = f"{count_noun(len(records), 'measurement')} of {shown_name(log.file.name)}"
    return make_chart(
        traces, title=to_plain_text(printable(said)), subtitle=f"{what}: medians of the measured steps, ms",
        height=380, size=18, pad=16, t=110, b=60, l=70, r=30, **STILL,
        xaxis=axis("step of the job", fixedrange=True), yaxis=axis("ms", fixedrange=True, rangemode="tozero"),
        shapes=[*stretches, *shapes], annotations=labels,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right"},
    )  # fmt: skip
