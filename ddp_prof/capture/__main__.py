"""``python -m ddp_prof.capture VARIANT ...`` captures a variant; ``scripts/profile_variant.sh`` calls it.

``python -m ddp_prof.capture --nsys`` prints the path of the nsys that would record; an empty line if there is none.
"""

import os
import sys

from ddp_prof.capture.job import choose_nsys
from ddp_prof.capture.variant import capture
from ddp_prof.train.launch import run_program


def run() -> None:
    if sys.argv[1:] == ["--nsys"]:
        nsys, _ = choose_nsys("nsys", os.environ, may_fetch=True, instead="PROFILER=kineto")
        sys.stdout.write(f"{nsys.path if nsys else ''}\n")
    else:
        sys.stdout.write(capture(sys.argv[1:], os.environ).text + "\n")


def main() -> int:
    return run_program("profile_variant", run)


if __name__ == "__main__":
    sys.exit(main())
