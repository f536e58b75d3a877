"""``python -m ddp_prof.capture VARIANT ...``, which ``scripts/profile_variant.sh`` calls.

``python -m ddp_prof.capture --nsys`` prints the path of the nsys that would record.
"""

import os
import sys

from ddp_prof.capture.recorder import choose_nsys
from ddp_prof.capture.variant import UsageError, capture, describe_failure, say
from ddp_prof.errors import DdpProfError
from ddp_prof.train.launch import Stopped, stop_on_signals


def main() -> int:
    try:
        with stop_on_signals():
            if sys.argv[1:] == ["--nsys"]:
                nsys, _ = choose_nsys("nsys", os.environ, may_fetch=True)
                sys.stdout.write(f"{nsys.path if nsys else ''}\n")
            else:
                sys.stdout.write(capture(sys.argv[1:], os.environ) + "\n")
    except (DdpProfError, OSError) as error:
        say(describe_failure(error))
        return 2 if isinstance(error, UsageError) else 1
    except Stopped as stop:
        return 128 + stop.number
    return 0


if __name__ == "__main__":
    sys.exit(main())
