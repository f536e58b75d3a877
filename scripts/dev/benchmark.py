"""Measures what this toolkit costs, each time as ratios within one run.

python scripts/dev/benchmark.py ddp        # step time of our bucketed variant against torch's DDP
python scripts/dev/benchmark.py sharded    # step time of our sharded variant against DDP with ZeroRedundancyOptimizer
python scripts/dev/benchmark.py memory     # peak of memory of the two, and of ShardedOptimizer
python scripts/dev/benchmark.py ranges     # step time with ranges against without
python scripts/dev/benchmark.py ingest CAPTURE.sqlite     # reading a large capture, against SQLite alone and others
python scripts/dev/benchmark.py ranks CAPTURE.sqlite      # many ranks: one worker, two, and through a scheduler
python scripts/dev/benchmark.py timeline CAPTURE.sqlite   # the page of a timeline: build, size, first view, redraw

Each has a ``--help`` and prints whether its target was met.
"""

from __future__ import annotations

import sys
from importlib import import_module

MODULES = {
    "benchmark_training": ("ddp", "sharded", "memory", "ranges"),
    "benchmark_reading": ("ingest", "ranks"),
    "benchmark_timeline": ("timeline",),
}


def main(argv: list[str]) -> int:
    module = next((module for module, names in MODULES.items() if argv and argv[0] in names), None)
    if module is None:
        print(__doc__, file=sys.stderr)
        return 0 if argv and argv[0] in {"-h", "--help"} else 2
    status: int = import_module(module).main(argv[1:] if module == "benchmark_timeline" else argv)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
