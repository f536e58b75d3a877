"""Runs the code in its argument: what ``python -c`` is to a rank that is forked."""

import sys

if __name__ == "__main__":
    exec(sys.argv[1])
