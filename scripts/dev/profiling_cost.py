"""What recording costs a step: the same run with and without recorder, in turns, from the run.json of each.

    python scripts/dev/profiling_cost.py FOLDER     # with.1/*.run.json, without.1/*.run.json, with.2/..., without.2/...

The median step of each run with is held against that of the run without of its round; the median of these ratios is
the cost.
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
    """A run with the recorder, and the one without that it alternated with."""

    recorded: Manifest
    plain: Manifest

    @property
    def ratio(self) -> float:
        """Median step with the recorder by the one without."""
        return statistics.median(self.recorded.step_seconds) / statistics.median(self.plain.step_seconds)


def read_rounds(folder: Path) -> list[Round]:
    """The rounds of which both runs are there.

    Raises:
        TraceError: There is none, or one of its files is no run.json.
    """
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
    """The medians, and the cost with the least and the most that a round gave."""
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
    """Print the cost."""
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
