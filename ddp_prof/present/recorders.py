"""Words for the profilers that recorded runs, and for their versions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddp_prof.analyze.overlap import TraceOverlap
from ddp_prof.trace import SOURCE_NAMES


def profiler_name(result: TraceOverlap) -> str:
    """Return the profiler; for nsys with the versions that recorded and that exported, where they are known.

    Files of one run may be of several profilers.
    """
    return " and ".join(dict.fromkeys(name_of_profiler(*of_file) for of_file in result.recorded_by))


def name_of_profiler(source: str, recorder: str | None, exporter: str | None) -> str:
    """Return the profiler that recorded a file; for nsys with the versions, as in :func:`profiler_name`."""
    return _name_in_short(source, recorder, exporter) or _who_wrote(recorder, exporter)


def find_profilers(results: Iterable[TraceOverlap]) -> set[str]:
    """Return the names of the profilers that recorded some runs, without their versions."""
    return {SOURCE_NAMES.get(source, source) for result in results for source, *_ in result.recorded_by}


def how_recorded(results: Sequence[TraceOverlap]) -> str:
    """Say which profilers recorded some runs, and which versions of nsys exported them, where these are others.

    Figures of one job differ between nsys and torch.profiler, so where both recorded, that is said.
    """
    files = dict.fromkeys(of_file for result in results for of_file in result.recorded_by)
    in_short = dict.fromkeys(name for of_file in files if (name := _name_in_short(*of_file)))
    at_length = dict.fromkeys(
        _who_wrote(*versions) for source, *versions in files if not _name_in_short(source, *versions)
    )
    said = ", ".join([*([f"recorded by {', '.join(in_short)}"] if in_short else []), *at_length])
    if len(find_profilers(results)) < 2:
        return said
    return f"{said}: what recording adds to a step, and on a CPU what counts as communication, differs between these"


def _name_in_short(source: str, recorder: str | None, exporter: str | None) -> str | None:
    """Return the profiler of a file, with its version if only one wrote it; ``None`` if more is known of nsys."""
    name = SOURCE_NAMES.get(source, source)
    if name != "nsys" or not (recorder or exporter):
        return name
    is_one = recorder and exporter and (recorder == exporter or exporter.startswith(f"{recorder}."))
    return f"nsys {exporter}" if is_one else None


def _who_wrote(recorder: str | None, exporter: str | None) -> str:
    """Say which versions of nsys recorded and exported a file, as far as they are known."""
    by = ((recorder, "recorded by"), (exporter, "exported by"))
    return ", ".join(f"{verb} nsys {version}" for version, verb in by if version)
