"""``python -m ddp_prof``: the same as ``ddp-prof``, where that is not on the PATH."""

from ddp_prof.cli import main

if __name__ == "__main__":
    main()
