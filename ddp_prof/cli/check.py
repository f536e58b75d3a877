"""The command ``ddp-prof check``, which checks runs against requirements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_prof.cli.monitor import check_logs, logs_among
from ddp_prof.cli.options import Loader, TraceCommand
from ddp_prof.cli.terminal import EXIT_CODE, progress, say, say_lines
from ddp_prof.present.table import TableOptions, TableView, show
from ddp_prof.runs.run import Run, are_one_variant, what_changed

if TYPE_CHECKING:
    from ddp_prof.analyze.variants.regression_gate import GateReport

NS_PER_MS = 1_000_000


def _parse_share(_context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """Return the share from 0 to 1 that ``80%`` or ``0.8`` means.

    ``1`` is refused for --max-regression: it would allow twice the baseline, and most users would mean 1 %.
    """
    if text is None:
        return None
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        meant = f"{text}% or {share / 100:g}" if 1 < share <= 100 and not text.endswith("%") else "80% or 0.8"
        raise click.BadParameter(f"{text!r} is not a share from 0 to 1: write it like {meant}")
    if share == 1 and parameter.name == "max_regression":
        raise click.BadParameter(f"{text!r} allows twice the baseline: write one per cent as 1% or 0.01")
    return share


def _milliseconds_to_ns(_context: click.Context, _parameter: click.Parameter, ms: float | None) -> int | None:
    """Return the nanoseconds of an option in milliseconds; ``None`` if it is not given."""
    if ms is None:
        return None
    if not 0 <= ms < math.inf:
        raise click.BadParameter(f"{ms:g} is not a length of time in milliseconds")
    return round(ms * NS_PER_MS)


_limit_option = partial(click.option, type=float, callback=_milliseconds_to_ns)
"""An option that is a limit of time in ms; its value is in ns."""


@click.command("check", cls=TraceCommand, example="--min-overlap 50% --max-tail-ms 40 traces/overlap.sqlite")
@click.option(
    "--min-overlap",
    metavar="SHARE",
    callback=_parse_share,
    help="Lower limit of the share of communication that compute hides, such as 80%.",
)
@_limit_option("--max-exposed-ms", "max_exposed_ns", help="Upper limit of exposed communication in a step.")
@_limit_option(
    "--max-tail-ms", "max_tail_ns", help="Upper limit of exposed communication after backward's last compute in a step."
)
@_limit_option(
    "--max-blocking-ms",
    "max_blocking_ns",
    help="Upper limit of the time of a step in which a stream (on a CPU: the host) stands still for communication.",
)
@_limit_option(
    "--max-cost-ms",
    "max_cost_ns",
    help="Upper limit of the cost of communication in a step: standstill, and slowdown of compute.",
)
@click.option(
    "--baseline",
    "baselines",
    metavar="TRACE",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A run to compare with. May be repeated, for the ranks of one run.",
)
@click.option(
    "--max-regression",
    metavar="SHARE",
    callback=_parse_share,
    help="By how much step time and exposed time may exceed the baseline's.  [default: 5%]",
)
@click.option(
    "--percentile",
    type=click.FloatRange(0, 100),
    default=50,
    show_default=True,
    help="Percentile of the steps to which the limits in ms apply; 100 is the worst step.",
)
@click.option("--all-ranks", is_flag=True, help="Require the traces of all ranks of the job.")
def check(
    traces: tuple[Path, ...],
    load: Loader,
    min_overlap: float | None,
    max_exposed_ns: int | None,
    max_tail_ns: int | None,
    max_blocking_ns: int | None,
    max_cost_ns: int | None,
    baselines: tuple[Path, ...],
    max_regression: float | None,
    percentile: float,
    all_ranks: bool,
    output: TableOptions,
) -> None:
    """Check runs against requirements: exit code 0 if all are met, 3 if one is not.

    The worst of the given ranks decides, by the median over its steps; --percentile chooses another percentile. A
    requirement that cannot be judged from the traces is not met. A run fails against the baseline only if the
    difference of medians, or of means, is beyond --max-regression and beyond the spread of both runs. For a pull
    request, use --format markdown. In a monitor.jsonl, each measurement is judged.
    """
    if max_regression is not None and not baselines:
        raise click.UsageError("--max-regression needs a --baseline")
    if logs := logs_among(traces):
        if baselines or all_ranks or max_cost_ns is not None or percentile != 50:
            need = "--baseline, --all-ranks, --max-cost-ms and --percentile need traces"
            raise click.UsageError(f"{need}, and {logs[0]} is the log of a monitor")
        of_logs = {
            "min_overlap": min_overlap,
            "max_exposed_ns": max_exposed_ns,
            "max_tail_ns": max_tail_ns,
            "max_blocking_ns": max_blocking_ns,
        }
        views, passed = check_logs(logs, of_logs)
        _show_verdicts(views, output, passed=passed)
        return
    has_limit_of_time = any(limit is not None for limit in (max_exposed_ns, max_tail_ns, max_blocking_ns, max_cost_ns))
    if min_overlap is None and not (has_limit_of_time or baselines or all_ranks):
        raise click.UsageError(
            "nothing is required: give --min-overlap, --max-exposed-ms, --max-tail-ms, --max-blocking-ms, "
            "--max-cost-ms, --all-ranks or --baseline"
        )
    if percentile != 50 and not has_limit_of_time:
        raise click.UsageError("--percentile needs a limit in ms: no other requirement is of single steps")

    from ddp_prof.analyze.variants.regression_gate import DEFAULT_REGRESSION, Requirements, check_run, find_differences
    from ddp_prof.present.tables.check import check_view

    load = replace(load, strict=True)  # a trace that cannot be read must not pass
    compared = _load_baseline(load, baselines) if baselines else None
    baseline = compared.overlap() if compared else None
    requirements = Requirements(
        min_overlap=min_overlap,
        max_exposed_ns=max_exposed_ns,
        max_tail_ns=max_tail_ns,
        max_blocking_ns=max_blocking_ns,
        max_cost_ns=max_cost_ns,
        percentile=percentile,
        baseline=baseline,
        max_regression=DEFAULT_REGRESSION if max_regression is None else max_regression,
        all_ranks=all_ranks,
    )
    checks: list[GateReport] = []
    causes: list[str] = []
    runs = load.runs(traces, "overlap", *(() if max_cost_ns is None else ("kernels",)))
    # Judge each run; where it fails against the baseline, look for what changed.
    for run in runs:
        result = run.overlap()
        differences = (
            find_differences(result, baseline, run.manifest, compared.manifest) if compared and baseline else ()
        )
        costs = None if max_cost_ns is None else run.cost().steps
        checks.append(check_run(result, replace(requirements, incomparable=differences), costs))
        if compared and checks[-1].fails_against_baseline and are_one_variant([compared, run]):
            causes += _find_causes(compared, run, runs)
    _show_verdicts([check_view(checks, baseline, causes)], output, passed=all(check.passed for check in checks))


def _find_causes(compared: Run, run: Run, runs: Sequence[Run]) -> list[str]:
    """Say what changed from the baseline to a run that fails against it; ``runs`` are all that are checked."""
    from ddp_prof.present.tables.compare import change_texts

    with progress("looking for the cause"):
        changed = what_changed(compared, run, names=("the baseline", run.label), others=runs)
    return [f"{run.label}, against the baseline: {text}" for text in changed.causes] + [
        f"{run.label}, mean step against the baseline: {text}" for text in change_texts(changed.parts)
    ]


def _load_baseline(load: Loader, baselines: Sequence[Path]) -> Run:
    """Read the run to compare with, which may be several files.

    Raises:
        click.BadParameter: The files are several runs.
    """
    baseline, *more_baselines = load.runs(baselines, "overlap")
    if more_baselines:
        names = ", ".join(run.label for run in (baseline, *more_baselines))
        way_out = "give one, or --one-run if these are its ranks"
        what = f"{1 + len(more_baselines)} runs ({names}), but a baseline is one run: {way_out}"
        raise click.BadParameter(what, param_hint="--baseline")
    return baseline


def _show_verdicts(views: Sequence[TableView], output: TableOptions, *, passed: bool) -> None:
    """Print the verdicts; set the exit code, 3 if a requirement is not met."""
    from ddp_prof.present.tables.check import check_summary

    if output.form == "markdown":
        for view in views:
            say_lines(check_summary(view).removesuffix("\n"))
    else:
        show(output, views)
    if not passed:
        if output.form in ("csv", "json"):  # the other forms contain it
            for view in views:
                say(view.title, err=True)
        click.get_current_context().meta[EXIT_CODE] = 3
    click.get_current_context().meta.setdefault(EXIT_CODE, 0)
