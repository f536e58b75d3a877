"""The command ``ddp-prof whatif``, which predicts what other settings would change."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_prof.cli.options import Answer, Loader, TraceCommand
from ddp_prof.errors import printable
from ddp_prof.present.table import TableOptions, TableView, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.analyze.what_if.questions import Question
    from ddp_prof.runs.run import Run


_MOST = 1_000_000
"""What sizes of buckets and factors must be below."""


def _read_numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[float, ...]:
    """Return the distinct positive numbers in ``1,5,25``; none if the option is not given."""
    numbers, asked = [], f"give positive numbers below {_MOST:,}, such as 0.5,2"
    for word in (text or "").split(","):
        if not word.strip():
            continue
        try:
            number = float(word)
        except ValueError:
            number = math.nan
        if not 0 < number < _MOST:
            raise click.BadParameter(f"'{word.strip()}' cannot be used: {asked}", context, parameter)
        numbers.append(number)
    if text is not None and not numbers:
        raise click.BadParameter(f"there is no number: {asked}", context, parameter)
    return tuple(dict.fromkeys(numbers))


def _what_if_views(
    runs: list[Run],
    questions: Sequence[Question] = (),
    parameters: Sequence[int] | None = None,
    calibration: Run | None = None,
) -> list[TableView]:
    """Return the predictions for each run.

    Args:
        runs: The runs.
        questions: The changes to predict; if empty, the usual ones.
        parameters: Bytes of each trained parameter; ``None`` if only the trace tells them.
        calibration: Another capture of the same job, which hides more or less communication; ``None`` for none.
    """
    from ddp_prof.present.tables.whatif import what_if_view

    return [what_if_view(run.overlap(), run.cost(), run.what_if(questions, parameters, calibration)) for run in runs]


@click.command(
    "whatif",
    cls=TraceCommand,
    answer=Answer(("overlap", "kernels", "structure"), _what_if_views),
    example="--bucket-sizes-mb 5,25,100 --views traces/torch.sqlite",
)
@click.option(
    "--bucket-sizes-mb", "sizes", metavar="MB,...", callback=_read_numbers,
    help="Other caps of a bucket, in MiB as bucket_cap_mb of DistributedDataParallel.",
)  # fmt: skip
@click.option("--one-bucket", is_flag=True, help="All gradients in one bucket.")
@click.option("--views", is_flag=True, help="gradient_as_bucket_view=True: nothing is copied out of buckets.")
@click.option("--together", is_flag=True, help="With --views: each bucket size together with views, too.")
@click.option("--bf16", is_flag=True, help="Half of the bytes on the wire; the cost of converting is not included.")
@click.option(
    "--time-per-byte", "factors", metavar="FACTOR,...", callback=_read_numbers,
    help="A link that takes this many times as long per byte: 0.5 is twice as fast.",
)  # fmt: skip
@click.option(
    "--without", type=click.Choice(["communication", "waits"]), multiple=True,
    help="No communication, or no waits for late ranks; needs the captures of all ranks.",
)  # fmt: skip
@click.option("--ranks", type=click.IntRange(1), help="Another number of ranks; always refused, with the reason.")
@click.option(
    "--parameters", type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="The bytes of each trained parameter, a line each, where the trace does not tell them.",
)  # fmt: skip
@click.option(
    "--calibrate", metavar="TRACE", type=click.Path(path_type=Path),
    help="Another capture of the job that hides more or less communication: both tell how much compute is slowed.",
)  # fmt: skip
def whatif(
    traces: tuple[Path, ...],
    load: Loader,
    sizes: tuple[float, ...],
    one_bucket: bool,
    views: bool,
    together: bool,
    bf16: bool,
    factors: tuple[float, ...],
    without: tuple[str, ...],
    ranks: int | None,
    parameters: Path | None,
    calibrate: Path | None,
    output: TableOptions,
) -> None:
    """What other buckets, views or a faster network would change in a step, with an interval, or why that is not known.

    A change is the difference between two simulations, of the new step and of today's step. It is called a gain or a
    loss only if its 90 % interval excludes 0. Without a question the usual questions are asked. If the answer is not
    in a capture, the reason is shown, and what to capture instead.

    \b
    These lines of Python write the file for --parameters:
        with open("parameters.txt", "w") as file:
            for name, p in model.named_parameters():
                if p.requires_grad:
                    print(p.nbytes, name, file=file)
    """  # noqa: D301
    from ddp_prof.analyze.what_if import questions as ask
    from ddp_prof.ingest.parameter_file import read_parameters

    # One question for each change that the options name; a list times a flag that is not given is empty.
    questions: list[Question] = [ask.Question(ask.BUCKET_SIZE, mb) for mb in sizes]
    questions += [ask.Question(ask.ONE_BUCKET)] * one_bucket + [ask.Question(ask.VIEWS)] * views
    if together:
        if not (views and questions[:-1]):
            raise click.UsageError("--together: give --views, and --bucket-sizes-mb or --one-bucket")
        # The last question so far is that on views alone.
        questions += [replace(one, with_views=True) for one in questions[:-1]]
    questions += [ask.Question(ask.HALF_BYTES)] * bf16
    questions += [ask.Question(ask.TIME_PER_BYTE, factor) for factor in factors]
    of = {"communication": ask.COMMUNICATION, "waits": ask.WAITS}
    questions += [ask.Question(of[one]) for one in dict.fromkeys(without)]
    questions += [] if ranks is None else [ask.Question(ask.RANKS, float(ranks))]
    parameter_bytes = read_parameters(parameters) if parameters else None
    calibrations = load.runs((calibrate,), "overlap", "structure") if calibrate else []
    if len(calibrations) > 1:
        raise click.UsageError(
            f"--calibrate: there are {len(calibrations)} runs in {printable(str(calibrate))}: give one"
        )
    show(
        output,
        _what_if_views(load.runs_for(traces, output), questions, parameter_bytes, next(iter(calibrations), None)),
    )
