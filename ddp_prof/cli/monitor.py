"""The command ``ddp-prof monitor``, which shows the log of a job's monitor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from ddp_prof.cli.options import InputPath, TraceCommand
from ddp_prof.cli.terminal import Output
from ddp_prof.errors import printable
from ddp_prof.present.table import TableOptions, TableView, show, shown_after


@click.command("monitor", cls=TraceCommand, reads_traces=False, example="--html course.html monitor/monitor.jsonl")
@click.option("--html", "page", type=Output(), help="Also write a page that shows the course.")
@click.argument("log", type=InputPath("give the log"))
def monitor(log: Path, page: Path | None, output: TableOptions) -> None:
    """The course of a training job, from the log of its monitor: what changed and when, and which rank was late.

    LOG is the monitor.jsonl that annotate.Monitor writes, or 'ddp-prof capture --every 1000'. A row is a measurement.
    """
    from ddp_prof.monitor.log import load_log
    from ddp_prof.monitor.report import draw_course, monitor_view

    loaded = load_log(log)
    view = monitor_view(loaded)
    with shown_after(output, [view]):
        if page:
            from ddp_prof.atomic_file import protect_files
            from ddp_prof.present.html.page import write_figure

            with protect_files([log]):
                title, *more = view.title.splitlines()
                write_figure(draw_course(loaded), title=title, more=more, page=page)


def logs_among(traces: Sequence[Path]) -> list[Path]:
    """Return the logs of monitors among the arguments of a command that takes either logs or traces.

    A log may have been rotated: ``monitor.jsonl.1``, ``monitor.jsonl-20261126``.

    Raises:
        click.UsageError: There are both.
    """
    logs = [trace for trace in traces if ".jsonl" in trace.name]
    if logs and len(logs) < len(traces):
        raise click.UsageError(f"{logs[0]} is the log of a monitor, and the others are traces: give one kind")
    return logs


def check_logs(logs: Sequence[Path], limits: Mapping[str, float | None]) -> tuple[list[TableView], bool]:
    """Judge each measurement in the logs; return the verdicts on each log, and whether all limits are met.

    Args:
        logs: The logs.
        limits: The limits by name; ``None`` for a limit that is not asked for.

    Raises:
        click.UsageError: No limit is asked for.
    """
    from ddp_prof.monitor.gate import check_log
    from ddp_prof.monitor.log import load_log

    asked = {name: limit for name, limit in limits.items() if limit is not None}
    if not asked:
        raise click.UsageError(
            "the log of a monitor is judged by --min-overlap, --max-exposed-ms, --max-tail-ms and "
            "--max-blocking-ms: give one of them"
        )
    checked = [check_log(load_log(log), asked) for log in logs]
    views = [view for view, _ in checked]
    if len(logs) > 1:  # a narrow table has no room for the name of the log
        views = [replace(one, title=printable(f"{log}: {one.title}")) for log, one in zip(logs, views, strict=True)]
    return views, all(passed for _, passed in checked)


def show_logs_compared(logs: Sequence[Path], output: TableOptions) -> None:
    """Print a comparison of the jobs of several logs, by the medians over their measurements."""
    from ddp_prof.monitor.gate import compare_logs
    from ddp_prof.monitor.log import load_log

    show(output, [compare_logs([load_log(log) for log in logs])])
