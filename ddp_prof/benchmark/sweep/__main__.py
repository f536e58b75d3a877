"""What ``python -m ddp_prof.benchmark.sweep`` starts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ddp_prof.benchmark.sweep.arguments import choose_grid, make_parser
from ddp_prof.benchmark.sweep.grid import default_grid
from ddp_prof.train.launch import die_with_launcher, exit_code_of

if TYPE_CHECKING:
    from argparse import Namespace


def main() -> int:
    """Run the command line; returns the exit code."""
    die_with_launcher()
    arguments = make_parser().parse_args()
    on_stop = f"stopped: {arguments.database} has the finished runs; the same command continues\n"
    return exit_code_of("ddp_prof.benchmark.sweep", lambda: _sweep(arguments), on_stop=on_stop)


def _sweep(arguments: Namespace) -> int:
    # Only now, so that --help and mistakes are answered at once.
    from ddp_prof.benchmark.sweep.probe import probe_machine
    from ddp_prof.benchmark.sweep.sweep import Plan, sweep

    machine = probe_machine()
    grid = choose_grid(arguments, default_grid(machine.gpus))
    plan = Plan(grid.jobs(), machine, arguments.database, arguments.force, arguments.profile)
    outcome = sweep(plan)
    sys.stdout.write(f"{outcome}: {arguments.database}\n")
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
