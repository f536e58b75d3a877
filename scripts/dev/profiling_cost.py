"""Prints what recording costs in a step, from the run.json of runs with and without recorder in turns.

    python scripts/dev/profiling_cost.py FOLDER     # with.1/*.run.json, without.1/*.run.json, with.2/..., without.2/...

Each round gives the ratio of the median steps of both runs; the cost is the median of these ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ddp_prof.errors import DdpProfError, TraceError
from ddp_prof.manifest import SUFFIX, Manifest, caveats_of, load_manifest

if TYPE_CHECKING:
    from collections.abc import Sequence


class Round(NamedTuple):
    """A run with the recorder, and the run without it of the same round."""

    recorded: Manifest
    plain: Manifest

    @property
    def ratio(self) -> float:
        """Median step with the recorder, divided by that without."""
        return statistics.median(self.recorded.step_seconds) / statistics.median(self.plain.step_seconds)


def read_rounds(folder: Path) -> list[Round]:
    """Return the rounds with both runs; raises TraceError if there are none, or if a file is not a run.json."""
    rounds = []
    for path in sorted(folder.glob(f"with.*/*{SUFFIX}")):
        recorded = load_manifest(path)
        plain = load_manifest(folder / path.parent.name.replace("with", "without") / path.name)
        if recorded and plain:
            rounds.append(Round(recorded, plain))
    if not rounds:
        raise TraceError(folder, "no round with both with.N and without.N", "make them with scripts/capture_gpu.sh")
    return rounds


def describe(rounds: Sequence[Round]) -> str:
    """Return the lines to print: medians, and the cost with its least and largest value in a round."""
    ratios = [round_.ratio for round_ in rounds]
    recorded, plain = (
        1000 * statistics.median(seconds for run in runs for seconds in run.step_seconds)
        for runs in zip(*rounds, strict=True)
    )
    run = rounds[0].recorded
    lines = [
        f"{run.variant}, {run.world_size} ranks, {run.backend}, device: {run.device}, {run.model_size} model",
        f"without recorder: {plain:.2f} ms per step (median of {len(rounds)} rounds of {run.steps})",
        f"with {run.profiler}: {recorded:.2f} ms per step",
        f"cost {statistics.median(ratios) - 1:+.1%} (rounds: {min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%})",
    ]
    return "\n".join([*lines, *(caveat.value for caveat in caveats_of(run))])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    try:
        print(describe(read_rounds(parser.parse_args(argv).folder)))
    except DdpProfError as error:
        print(f"profiling_cost: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
