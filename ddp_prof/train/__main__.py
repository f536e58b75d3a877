"""Entry point of the workload: with ``--world-size`` it starts the ranks, else it is one rank.

A process that torchrun or our own launcher has started is one rank, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ddp_prof.atomic_file import is_stream, refuse_protected
from ddp_prof.errors import DdpProfError, WorkloadError
from ddp_prof.train.arguments import Arguments, parse_arguments
from ddp_prof.train.launch import die_with_launcher, launch, leave_failure, run_program


def main() -> int:
    """Run one rank, or start all ranks and wait for them; return the exit code."""
    arguments = parse_arguments()
    world_size = arguments.world_size
    if world_size is None or "RANK" in os.environ:
        return run_rank([arguments])

    def start_ranks() -> None:
        clear_outputs(arguments)
        launch(world_size, ["-m", "ddp_prof.train", *sys.argv[1:]])

    return run_program("ddp_prof.train", start_ranks)


def clear_outputs(arguments: Arguments) -> None:
    """Make the folders of the output files, and remove an old ``run.json``: with it this run would look finished.

    A device or a pipe stays. Raises WorkloadError if that is not possible, TraceError if a capture is there.
    """
    paths = [path for path in (arguments.run_json, arguments.kineto) if path is not None]
    try:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        if arguments.run_json is not None:
            refuse_protected(arguments.run_json)
            if not is_stream(arguments.run_json):
                arguments.run_json.unlink(missing_ok=True)
    except OSError as error:
        raise WorkloadError(f"cannot write {error.filename}: {error.strerror}") from error


def run_rank(blocks: Sequence[Arguments]) -> int:
    """Be one rank of a run that trains the configurations in ``blocks`` one after another; return the exit code."""
    die_with_launcher()
    # Imported here because they load torch: usage errors appear before that.
    from ddp_prof.train import run
    from ddp_prof.train.process_group import find_place

    try:
        place = find_place(os.environ)
    except DdpProfError as error:
        return _fail(error)
    try:
        if place.rank == 0:
            for arguments in blocks:
                clear_outputs(arguments)
        seat, *_ = [run.check(arguments, place) for arguments in blocks]
    except DdpProfError as error:  # every rank fails in the same way
        return _fail(error, place.rank, is_common=True)
    try:
        run.run(blocks, place, seat)
    except DdpProfError as error:
        os._exit(_fail(error, place.rank))  # a normal exit could wait for threads of a broken process group
    except KeyboardInterrupt:
        os._exit(130)  # 128 plus the number of SIGINT
    return 0


def _fail(error: DdpProfError, rank: int = 0, *, is_common: bool = False) -> int:
    """Report a failure in one line and return the exit code.

    A rank of our launcher leaves the message to the launcher. Otherwise the rank prints it; if ``is_common``, that is,
    if all ranks fail in this way, only rank 0 does.
    """
    if not leave_failure(rank, error) and not (is_common and rank):
        sys.stderr.write(f"ddp_prof.train: error: {error}\n")
        sys.stderr.flush()
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
