"""Arguments and options that commands share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddp_prof.analyze.collectives.run_analysis import Run
    from ddp_prof.analyze.overlap.overlap import TraceOverlap
    from ddp_prof.trace import Trace

Function = TypeVar("Function", bound="Callable[..., Any]")


@dataclass(frozen=True)
class Selection:
    """What the user said of names in their traces."""

    step_pattern: str | None
    backward_pattern: str | None
    comm_patterns: tuple[str, ...]

    def load(self, paths: Sequence[Path], *, with_shapes: bool = False) -> Iterator[Trace]:
        """Read the traces one by one; of a folder, all that it holds. With launch shapes where asked for."""
        from ddp_prof.ingest.load import find_traces, load_trace

        for path in paths:
            for trace in find_traces(path):
                yield load_trace(trace, extra_patterns=self.comm_patterns, with_shapes=with_shapes)

    def measure(self, paths: Sequence[Path]) -> list[TraceOverlap]:
        """Measure the runs that the traces belong to; the ranks of one run may lie in several files."""
        from ddp_prof.analyze.overlap.overlap import measure_overlap, merge_ranks
        from ddp_prof.manifest import manifest_path

        runs: dict[Path, list[TraceOverlap]] = {}
        for trace in self.load(paths):
            result = measure_overlap(trace, step_pattern=self.step_pattern, backward_pattern=self.backward_pattern)
            runs.setdefault(manifest_path(trace.path), []).append(result)
        return [merge_ranks(results) for results in runs.values()]

    def runs(self, paths: Sequence[Path], *, one_run: bool = False) -> list[Run]:
        """The collectives of the runs that the traces belong to, by their names or, if said so, all to one."""
        from ddp_prof.analyze.collectives.run_analysis import merge_traces, reduce_trace
        from ddp_prof.analyze.core.attribution import find_rank_events
        from ddp_prof.manifest import manifest_path

        parts: dict[Path, list[Run]] = {}
        for trace in self.load(paths):
            ranks = find_rank_events(trace, step_pattern=self.step_pattern, backward_pattern=self.backward_pattern)
            run = paths[0] if one_run else manifest_path(trace.path)
            parts.setdefault(run, []).append(reduce_trace(trace, ranks))
        return [merge_traces(part) for part in parts.values()]


def _regular_expression(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    try:
        for pattern in (value,) if isinstance(value, str) else value or ():
            re.compile(pattern)
    except re.error as error:
        raise click.BadParameter(f"not a regular expression: {error}") from error
    return value


traces_argument = click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=Path))


def selection_options(function: Function) -> Function:
    """Adds ``--step-range``, ``--backward-range`` and ``--comm-pattern``, handed over as one ``selection``."""

    def with_selection(
        *args: Any, step_range: str | None, backward_range: str | None, comm_pattern: tuple[str, ...], **kwargs: Any
    ) -> Any:
        return function(*args, selection=Selection(step_range, backward_range, comm_pattern), **kwargs)

    with_selection.__doc__ = function.__doc__
    with_selection.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    options = (
        click.option(
            "--comm-pattern",
            metavar="REGEX",
            multiple=True,
            callback=_regular_expression,
            help="Kernels whose name matches communicate, too. May be repeated.",
        ),
        click.option(
            "--backward-range",
            metavar="REGEX",
            callback=_regular_expression,
            help="Ranges that hold the backward pass. Default: 'backward' and the like, else autograd's threads.",
        ),
        click.option(
            "--step-range",
            metavar="REGEX",
            callback=_regular_expression,
            help="Ranges that are steps; a first group is the step's number. Default: the usual names.",
        ),
    )
    decorated: Any = with_selection
    for option in options:
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


one_run_option = click.option("--one-run", is_flag=True, help="The traces are ranks of one run, whatever their names.")

format_option = click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "csv", "markdown"]),
    default="table",
    show_default=True,
    help="How to print.",
)
