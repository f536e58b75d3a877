"""Options, start and failures of ranks, for scripts that start themselves as several ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ddp_prof.errors import DdpProfError
from ddp_prof.manifest import Caveat
from ddp_prof.train.launch import die_with_launcher, launch, leave_failure, run_program

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    import torch

    from ddp_prof.train.process_group import RankInfo

Result = TypeVar("Result")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that determine where the ranks run."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto", help="default: what fits")
    parser.add_argument("--ranks-per-gpu", type=int, metavar="N", help="let so many ranks take turns on each GPU")


def run_ranks(
    arguments: argparse.Namespace,
    measure: Callable[[RankInfo, torch.device], Result],
    report: Callable[[Result], None],
) -> int:
    """Start this script again as ``world_size`` ranks or, in a rank, do its work; return the exit code.

    Args:
        arguments: ``world_size`` and the options of :func:`add_options`.
        measure: Called on each rank, within the process group.
        report: Called on rank 0 with its result; a DdpProfError makes the script fail.
    """
    if "RANK" not in os.environ:
        return run_program(Path(sys.argv[0]).stem, lambda: launch(arguments.world_size, sys.argv))
    die_with_launcher()
    from ddp_prof.train.process_group import choose_seat, find_place, process_group

    place = find_place(os.environ)
    try:
        seat = choose_seat(arguments, place)  # type: ignore[arg-type]  # it reads the three options alone
        with process_group(place, seat, 120):
            result = measure(place, seat.device)
        if place.rank == 0:
            print(f"{place.world} ranks, {seat.backend}, device: {seat.device.type}")
            if seat.ranks_per_gpu > 1:
                print(Caveat.SHARED_GPU.value)
            report(result)
    except DdpProfError as error:
        leave_failure(place.rank, error)
        sys.stdout.flush()
        os._exit(1)
    return 0
