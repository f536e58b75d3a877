"""``python -m ddp_prof.capture VARIANT ...``, which ``scripts/profile_variant.sh`` calls.

With ``--nsys`` in the place of a variant it prints the path of the nsys that would record.
"""

import sys

from ddp_prof.capture.variant import main

if __name__ == "__main__":
    sys.exit(main())
