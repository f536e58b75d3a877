"""The program ``ddp-prof``, which ``python -m ddp_prof`` starts, too, where it is not on the PATH."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line; a Ctrl-C while its modules are imported ends the program in one line, as a later one does.

    The command line handles signals itself as soon as a command begins.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    from ddp_prof.cli import main as run

    run()


def _stop(number: int, _frame: FrameType | None) -> None:
    """End the program at once: an exception would be lost in some imports, and nothing is there to clean up."""
    line = f"stopped by {signal.Signals(number).name}; what was written before is complete\n"
    try:
        os.write(2, line.encode())
    finally:  # stderr may be closed
        os._exit(128 + number)


if __name__ == "__main__":
    main()
