"""Every headline that captures give, with the numbers that it rests on, so that each can be read and judged.

python scripts/dev/print_headlines.py                          # traces/*.sqlite
python scripts/dev/print_headlines.py --one-run a.json b.json  # the ranks of one run
python scripts/dev/print_headlines.py folder/*.sqlite
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_prof.errors import TraceError
from ddp_prof.present.headlines import root_cause_headline, skew_headline
from ddp_prof.runs import load_runs
from ddp_prof.runs.report import LoadOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddp_prof.analyze.root_cause import RootCause
    from ddp_prof.runs.run import Run

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Print the headlines of each capture, or of the captures of one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--one-run", action="store_true", help="the files are the ranks of one run")
    arguments = parser.parse_args()
    paths = arguments.paths or sorted((ROOT / "traces").glob("*.sqlite"))
    for group in [paths] if arguments.one_run else [[path] for path in paths]:
        print("\n".join(_lines(group, LoadOptions(one_run=arguments.one_run))), end="\n\n")


def _lines(paths: list[Path], options: LoadOptions) -> list[str]:
    try:
        return [line for run in load_runs(paths, options) for line in _lines_of_run(run)]
    except TraceError as error:
        return [f"== {paths[0].name}: {error}"]


def _lines_of_run(run: Run) -> Iterator[str]:
    result, overlap, cause = run.collectives(), run.overlap(), run.root_cause()
    found = result.collectives
    yield f"== {', '.join(path.name for path in run.files)}: {len(found)} collectives, {len(overlap.ranks)} ranks"
    yield f"  EXPOSED  {root_cause_headline(cause, result.reason).text}"
    if cause is not None:
        yield from _evidence(cause)
    pairs: Counter[str] = Counter()
    for collective in found:
        pairs.update({f"{part.when}/{part.why}": part.ns for part in collective.exposed_by})
    yield f"    all steps: {', '.join(f'{pair} {_ms(ns)}' for pair, ns in pairs.most_common()) or 'nothing exposed'}"
    yield f"    operations: {dict(Counter(collective.op for collective in found))}"
    yield f"    outliers: {overlap.outliers}"
    yield f"  SKEW     {skew_headline(run.skew()).text}"
    yield from (f"    note: {warning}" for warning in result.warnings)


def _evidence(cause: RootCause) -> Iterator[str]:
    """What the sentence about exposed time rests on."""
    yield (
        f"    typical step {cause.step}, of {cause.steps} steps: {_ms(cause.exposed_ns)} exposed, {_ms(cause.pair_ns)} "
        f"of it {cause.when}/{cause.why}, {_ms(cause.wait_ns)} with a peer missing"
    )
    yield (
        f"    of {cause.collectives_per_step} collectives per step the largest: "
        f"index {cause.index}, {cause.operation}, "
        f"{cause.bytes} bytes, {_ms(cause.collective_ns)}, blocking: {cause.blocking}, as {cause.alike_per_step} of a "
        f"step; starts {cause.lead_ns} ns before backward ends"
    )


def _ms(time_ns: int) -> str:
    return f"{time_ns / 1e6:.3f} ms"


if __name__ == "__main__":
    main()
