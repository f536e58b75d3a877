"""The command ``ddp-prof tune``, which tries other settings on a training program."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_prof.cli.options import TraceCommand
from ddp_prof.cli.terminal import Output, complete_file, is_quiet, say
from ddp_prof.errors import DdpProfError, UsageError, WorkloadError
from ddp_prof.present.table import TableOptions, show, shown_after

if TYPE_CHECKING:
    from ddp_prof.tune.candidates import Candidates
    from ddp_prof.tune.measure import Blocks, Measured, Program
    from ddp_prof.tune.session import Limits, Session, Tuning
    from ddp_prof.tune.store import Store
    from ddp_prof.tune.tries import Try
    from ddp_prof.tune.verdicts import Verdict
    from ddp_prof.tune.why import Why


class _TuneCommand(TraceCommand):
    """A command whose last argument is a program: all after ``--``, or from the first word that is no option."""

    ignore_unknown_options = True
    allow_interspersed_args = False


def _read_share(_context: click.Context, _parameter: click.Parameter, value: str) -> float:
    """Return the share of a step that ``1%`` or ``0.5%`` means, as a number between 0 and 1."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?%", value.strip())
    if not match or not 0 < float(match[1]) < 100:
        raise click.BadParameter("give a share of the step as in 1% or 0.5%")
    return float(match[1]) / 100


@click.command("tune", cls=_TuneCommand, reads_traces=False, example="--try bucket_cap_mb=5,50 -- torchrun train.py")
@click.option(
    "--try", "asked", metavar="SETTING", multiple=True,
    help="A setting: NAME=VALUE of DistributedDataParallel, fully_shard or the environment. Each of several values is "
    "a try of its own; A=1+B=2 sets both. May be repeated. Default: what one capture shows to be worth trying.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(3), default=30, show_default=True, help="Measured steps of each run.")
@click.option(
    "--warmup", type=click.IntRange(1), default=5, show_default=True, help="Optimizer steps before the measured ones."
)
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help="Runs of each try, at most.")
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), default=10, show_default=True,
    help="Begin no round that would end after this time.",
)  # fmt: skip
@click.option(
    "--worth", metavar="SHARE", default="1%", show_default=True, callback=_read_share,
    help="A difference below this share of the step counts as none.",
)  # fmt: skip
@click.option(
    "--store", type=Output(), default="traces/tune.db", show_default=True,
    help="Database of the runs; run the same command again to continue.",
)  # fmt: skip
@click.option(
    "--plan", is_flag=True,
    help="Run the program once (without --try: twice), then say how many runs and minutes a tuning takes, and which "
    "gains it can show.",
)  # fmt: skip
@click.option(
    "--why", is_flag=True, help="Also capture the program with today's settings and with the best try; compare both."
)
@click.option("--html", "page", type=Output(), help="Also write a page of the result.")
@click.option(
    "--in-process", is_flag=True,
    help="Change the settings between blocks of steps of one run: faster, for arguments of DistributedDataParallel. "
    "A try that is faster is also run once by itself, for its losses.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show the command lines, and run nothing.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=complete_file)
@click.pass_context
def tune(
    context: click.Context,
    asked: tuple[str, ...],
    steps: int,
    warmup: int,
    rounds: int,
    minutes: float,
    worth: float,
    store: Path,
    plan: bool,
    why: bool,
    page: Path | None,
    in_process: bool,
    dry_run: bool,
    program: tuple[str, ...],
    output: TableOptions,
) -> None:
    """Try other settings on any training program, unchanged, and say which are faster, with an interval.

    PROGRAM is its command line, launcher included, after --:

        ddp-prof tune --try gradient_as_bucket_view --try bucket_cap_mb=5,50 -- torchrun --nproc-per-node 8 train.py

    Each run is ended cleanly after --warmup and --steps steps of the optimizer. Nothing is recorded. The runs take
    turns, and each try ends as soon as it is decided. The program has DDP_PROF_TUNE=1 in its environment. Without
    --try, one capture and the doctor choose.
    """
    from ddp_prof.atomic_file import protect_files
    from ddp_prof.capture.preflight import why_not_startable
    from ddp_prof.signals import Stopped, stop_on_signals
    from ddp_prof.tune.measure import Program
    from ddp_prof.tune.report import kept_note, plan_lines, warning_of
    from ddp_prof.tune.session import Limits
    from ddp_prof.tune.store import Store

    # Wrong usage is reported before anything runs.
    _refuse_what_is_not_measured(plan, dry_run)
    tries = _read_tries(asked, context)
    job = Program(program, warmup, steps, in_process=in_process)
    limits, environ = Limits(rounds, minutes, worth), dict(os.environ)
    if in_process:
        _refuse_out_of_process(tries)
    if dry_run:
        _say_command_lines(job, tries)
        return
    job.refuse_parts(environ)
    if why_not := why_not_startable(program, environ):
        raise WorkloadError(why_not)
    context.with_resource(protect_files(Path(word) for word in program if Path(word).is_file()))
    _refuse_page(page, store)
    progress: Callable[[str], None] = _leave_out if is_quiet() else _report
    announce = cache(lambda: progress(f"note: {warning_of(limits, job)}"))
    tuned = replace(job, on_start=announce)
    because = session = None
    try:
        with stop_on_signals(), _hold_folder_of(store):
            if not tries:
                candidates = _choose(tuned, store, environ, limits.worth, progress)
                if not candidates.tries:
                    _show_nothing(candidates, page, output)
                    return
                tries = candidates.tries
            # Measure, or with --plan only say what measuring would take.
            session = _session(tuned, tries, Store(store, job, tries, Path.cwd(), environ), limits, environ, progress)
            result = None if plan else session.run()
            today = session.run_today()
            if not announce.cache_info().currsize:
                progress(f"note: {kept_note(store)}")
            if result is None:
                for line in plan_lines(limits, today, session.verdicts(of_all_kept=True)):
                    say(line)
                return
            if why and result.best:
                because = _explain(job, result.best, store, environ, progress)
    except Stopped as stop:
        kept = f"{store} has the finished runs: run the same command again to continue"
        _report(f"stopped: {kept if session and session.has_runs else 'no run was finished'}")
        context.exit(128 + stop.number)
    _show(result, because, page, output)


def _read_tries(asked: Sequence[str], context: click.Context) -> Sequence[Try]:
    """Return the tries of ``--try``; wrong usage if one cannot be read."""
    from ddp_prof.tune.tries import parse_tries

    try:
        return parse_tries(asked)
    except UsageError as error:
        raise click.UsageError(str(error), context) from error


_report = partial(say, err=True)


def _leave_out(_text: str) -> None:
    """Print nothing: what ``--quiet`` does with progress."""


def _refuse_what_is_not_measured(plan: bool, dry_run: bool) -> None:
    """Refuse options that show a measured result beside --plan or --dry-run, which have none; and both together."""
    if plan and dry_run:
        raise click.UsageError("--plan and --dry-run exclude each other")
    values = click.get_current_context().params
    output: TableOptions = values["output"]
    flag = "--plan" if plan else "--dry-run" if dry_run else ""
    shown = {"--html": values["page"], "--why": values["why"], "--format": output.form != TableOptions().form}
    for name, is_given in shown.items():
        if is_given and flag:
            raise click.UsageError(f"{flag} has no result to show: leave out {name}")
    if flag and values["in_process"]:
        raise click.UsageError(f"{flag} assumes one run for each try: leave out --in-process")


def _say_command_lines(job: Program, tries: Sequence[Try]) -> None:
    """Print the command line of each run: with today's settings, and with each try."""
    from ddp_prof.tune.tries import TODAY

    if not tries:
        raise click.UsageError("--dry-run needs --try: without it, a capture shows what is worth trying")
    for tried in (TODAY, *tries):
        say(job.shown(tried))


def _refuse_page(page: Path | None, store: Path) -> None:
    """Refuse to write the page over the program or over the store: now, not after minutes of runs."""
    from ddp_prof.atomic_file import refuse_protected

    if page:
        refuse_protected(page)
        if page.absolute() == store.absolute():
            raise click.UsageError(f"--html: {page} is the database of --store: give another file")


@contextmanager
def _hold_folder_of(store: Path) -> Iterator[None]:
    """Return a context in which no other tuning writes into the folder of the store.

    Raises:
        WorkloadError: Another tuning writes there already.
    """
    from ddp_prof.capture.processes import hold_folder

    def refuse() -> None:
        raise WorkloadError(f"{store.parent}: another tuning writes there and would disturb this one: wait for it")

    store.absolute().parent.mkdir(parents=True, exist_ok=True)
    with hold_folder(store.absolute().parent, refuse):
        yield


def _choose(
    job: Program, store: Path, environ: Mapping[str, str], worth: float, progress: Callable[[str], None]
) -> Candidates:
    """Return the settings that one capture shows to be worth trying, and print why, unless there are none.

    Args:
        job: The program.
        store: The database of the runs.
        environ: The environment of the program.
        worth: A difference below this fraction of the step counts as none.
        progress: Prints a line.
    """
    from ddp_prof.tune.candidates import find_candidates

    progress("one capture of the program shows what is worth trying (--try names settings instead)")
    candidates = find_candidates(job, store, Path.cwd(), environ, worth)
    if job.in_process:
        candidates = candidates.that_fit_in_process()
    for reason in candidates.reasons if candidates.tries else ():
        progress(reason)
    return candidates


def _refuse_out_of_process(tries: Sequence[Try]) -> None:
    """Raise an error if a try cannot be set between two steps of one run."""
    for tried in tries:
        if not tried.fits_in_process:
            raise click.UsageError(
                f"--in-process: {tried.label} cannot be set between two steps: only arguments of "
                "DistributedDataParallel can"
            )


def _session(
    job: Program,
    tries: Sequence[Try],
    store: Store,
    limits: Limits,
    environ: Mapping[str, str],
    progress: Callable[[str], None],
) -> Session:
    """Return the session that runs the tries in turns.

    Each try has runs of its own, or with ``--in-process`` blocks of steps of a run that all tries have in common.
    """
    from ddp_prof.tune.session import BlocksSession, Session

    def measure(tried: Try, limit_s: int) -> Measured:
        return job.measure(tried, environ, limit_s)

    def measure_blocks(blocks: Sequence[Try], limit_s: int) -> Blocks:
        return job.measure_blocks(blocks, environ, limit_s)

    if job.in_process:
        return BlocksSession(measure_blocks, job, tries, measure, store, limits, environ, progress)
    return Session(job, tries, measure, store, limits, environ, progress)


def _show_nothing(found: Candidates, page: Path | None, output: TableOptions) -> None:
    """Print why nothing is worth trying; if a page was asked for, also that it is not written."""
    from ddp_prof.tune.report import nothing_view

    show(output, [nothing_view(found.reasons)])
    if page:
        _report(f"no page: nothing was tried, so {page} is not written")


def _explain(
    job: Program, best: Verdict, store: Path, environ: Mapping[str, str], progress: Callable[[str], None]
) -> Why | None:
    """Capture the program with today's settings and with the best try; return the comparison.

    ``None`` if that fails: the result of the tuning, which took longer, is shown all the same.
    """
    from ddp_prof.tune.why import find_why

    progress(f"two captures, with today's settings and with {best.tried.label}, show why")
    try:
        return find_why(job, best, store, Path.cwd(), environ)
    except DdpProfError as error:
        _report(f"not compared: {error}")
        return None


def _show(result: Tuning, because: Why | None, page: Path | None, output: TableOptions) -> None:
    """Print the result of the tuning, and write the page.

    Args:
        result: The result.
        because: The captures of today's settings and of the best try, compared; ``None`` if there are none.
        page: The page to write; ``None`` for none.
        output: How to print.
    """
    from ddp_prof.cli.tables import comparison_views
    from ddp_prof.tune.page import write_tuning_page
    from ddp_prof.tune.report import tuning_view, why_view

    views = [tuning_view(result, because)]
    if because and output.form == "table":
        views.append(why_view(because))
    if because and output.form in {"table", "json"}:
        views += comparison_views([*because.runs], output)
    with shown_after(output, views):
        if page:
            write_tuning_page(result, page, because)
