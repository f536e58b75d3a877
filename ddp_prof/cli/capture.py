"""The command ``ddp-prof capture``, which records a training program."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_prof.cli.options import Loader
from ddp_prof.cli.terminal import EXIT_CODE, complete_file, is_quiet, say
from ddp_prof.errors import DdpProfError, TraceError, WorkloadError, shell_path, shell_quote

if TYPE_CHECKING:
    from ddp_prof.capture.job import Job

NOTHING_RECORDED = 1
"""Exit code if the program ended well, but nothing was recorded that tells what it computed or communicated."""
_LONGEST_STEPS = 40
"""Most characters in the value of ``--steps`` or ``--every``."""
WHY_NO_REPORT = "see its output above; if that mentions sem_open, it failed before the program began: capture again"


def _read_steps(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Return the value of ``--steps`` unchanged, or raise an error unless it is ``FIRST:END`` or ``FIRST:``."""
    if value is None:
        return None
    first, colon, end = value.partition(":")
    if len(value) > _LONGEST_STEPS:
        raise click.BadParameter("no run has so many steps")
    if not (colon and first.isdecimal() and (not end or (end.isdecimal() and int(end) > int(first)))):
        raise click.BadParameter("give the first step and the one after the last, as in 10:20")
    return value


def _read_every(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Return the value of ``--every`` as ``STEPS:COUNT``, with the default of COUNT if it is missing."""
    if value is None:
        return None
    every, _, count = value.partition(":")
    count = count or "3"
    is_number = every.isdecimal() and count.isdecimal() and len(value) <= _LONGEST_STEPS
    if not is_number or int(count) < 1 or int(every) < int(count) + 2:
        wanted = "give the steps from one measurement to the next, as 1000, or 1000:5 to measure five"
        raise click.BadParameter(f"{wanted}; there must be two more of them than are measured")
    return f"{every}:{count}"


@click.command("capture", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-o", "--output", "folder", metavar="DIR", default="traces", show_default=True, help="Folder for the files.",
    type=click.Path(file_okay=False, path_type=Path),
)  # fmt: skip
@click.option(
    "--profiler", type=click.Choice(["auto", "nsys", "torch"]), default="auto", show_default=True,
    help="Nsight Systems, or torch.profiler; auto: nsys if nsys and a GPU are found.",
)  # fmt: skip
@click.option(
    "--steps",
    metavar="FIRST:END",
    callback=_read_steps,
    help="Record only these optimizer steps: 10:20 records ten, 10 to 19. Default: all.",
)
@click.option(
    "--every", metavar="STEPS[:COUNT]", callback=_read_every,
    help="Do not record the whole job: every STEPS steps, measure COUNT steps (3 by default) and log them.",
)  # fmt: skip
@click.option("--print", "shows", is_flag=True, help="Show the command line, and do not run it.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=complete_file)
@click.pass_context
def capture(
    context: click.Context,
    folder: Path,
    profiler: str,
    steps: str | None,
    every: str | None,
    shows: bool,
    program: tuple[str, ...],
) -> None:
    """Record any training program, and say how much of its communication hides.

    PROGRAM is its command line, launcher included, after --:

        ddp-prof capture -- torchrun --nproc-per-node 8 train.py

    Steps, phases and collectives are marked without a change to the program. Its output and exit code are passed
    through. With srun or mpirun, outside or within their tasks, each rank writes its own file.
    """
    from ddp_prof.capture.job import export_reports, plan_job, run_job
    from ddp_prof.capture.losses import find_losses
    from ddp_prof.capture.preflight import why_not_startable
    from ddp_prof.cli.tables import SUMMARY_ANSWER, summary_views
    from ddp_prof.present.table import TableOptions, show
    from ddp_prof.runs.report import LoadOptions

    if every and (profiler == "nsys" or steps):
        raise click.UsageError("--every measures by torch.profiler, again and again: leave out --profiler and --steps")
    job, why = plan_job(program, folder.absolute(), "torch" if every else profiler, steps, os.environ, every)
    if shows:
        say(" ".join(map(shell_quote, job.command)))
        return
    if why_not := why_not_startable(program, os.environ):  # before the files of an earlier capture are removed
        raise WorkloadError(why_not)
    if every:
        _monitor_job(context, job, every)
        return
    recorder = f"nsys {job.nsys.version}" if job.nsys else "torch.profiler"
    say(f"recording by {recorder} ({why}):", err=True)
    say("  " + " ".join(map(shell_quote, job.command)), err=True)
    for doubt in job.doubts:
        say(f"warning: {doubt}", err=True)
    code = run_job(job)
    context.meta[EXIT_CODE] = code
    try:
        export_reports(job, os.environ, WHY_NO_REPORT)
        files = job.traces
        wanted = () if job.part else SUMMARY_ANSWER.measures  # in the same reading
        load = Loader(LoadOptions(one_run=True), None, None, strict=True)
        runs = load.runs(files, "inventory", *wanted) if files else []
        for loss in find_losses(job, [content for run in runs for content in run.inventory()]):
            say(f"warning: {loss}", err=True)
    except DdpProfError as error:
        if code:
            knows_why = job.traces or job.nsys  # of nsys, the code may be its own
            say(f"nothing to read: {error if knows_why else _why_nothing(code, folder)}", err=True)
            return
        raise
    if job.part:
        kind, number = job.part.lstrip(".")[:4], job.part[5:]
        recorded = f"rank {number}" if kind == "rank" else f"the ranks of node {number}"
        together = f"read all files with 'ddp-prof overlap {shell_path(folder)}'"
        say(f"recorded {recorded}: when the other {kind}s have ended, too, {together}", err=True)
        return
    say(f"{len(files)} trace{'s' if len(files) > 1 else ''} in {folder}", err=True)
    try:
        if all(run.overlap().has_nothing for run in runs):
            say("nothing was recorded that tells what the program computed or communicated", err=True)
            context.meta[EXIT_CODE] = code or NOTHING_RECORDED
        show(TableOptions(quiet=is_quiet()), summary_views(runs))
    except TraceError as error:
        say(f"no summary: {error}", err=True)


def _why_nothing(code: int, folder: Path) -> str:
    """Return why a program that failed left no trace in ``folder``; ``code`` is its exit code, not 0."""
    name = signal.Signals(code - 128).name if code - 128 in set(signal.Signals) else ""
    ended = f"was ended by {name}" if name else f"ended with exit code {code}"
    # A launcher such as torchrun has a code of its own, whatever ended its ranks.
    above = "" if name else "see its output above; "
    way_out = "a program that is killed, or calls os._exit, needs --steps, as 1:10"
    return f"the program {ended}, and no rank wrote a trace into {folder}: {above}{way_out}"


def _monitor_job(context: click.Context, job: Job, every: str) -> None:
    """Run a program with a monitor in it, then show the job's course from the log, which may hold earlier runs.

    ``every`` is the value of ``--every``, as ``STEPS:COUNT``.
    """
    from ddp_prof.capture.job import run_job
    from ddp_prof.monitor.log import load_log, log_in, steps_of_first
    from ddp_prof.monitor.report import monitor_view
    from ddp_prof.present.table import TableOptions, show

    log = log_in(job.monitored)
    say(f"torch.profiler measures a few steps at a time; the log is {log}:", err=True)
    say("  " + " ".join(map(shell_quote, job.command)), err=True)
    context.meta[EXIT_CODE] = code = run_job(job, replaces=False)
    if log.exists():
        show(TableOptions(quiet=is_quiet()), [monitor_view(load_log(log))])
    else:
        steps = steps_of_first(*map(int, every.split(":")))
        few = f"the program made fewer than the {steps} optimizer steps that the first measurement needs"
        say(f"nothing was measured: {few}, was killed or called os._exit, or a warning above says why", err=True)
        context.meta[EXIT_CODE] = code or NOTHING_RECORDED
