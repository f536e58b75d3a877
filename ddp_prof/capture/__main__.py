"""``python -m ddp_prof.capture``, which ``scripts/profile_variant.sh`` calls."""

import sys

from ddp_prof.capture.variant import main

if __name__ == "__main__":
    sys.exit(main())
