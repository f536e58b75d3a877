"""Entry point of a rank that trains several configurations in turns: ``python -m ddp_prof.train.turns PLAN``.

PLAN is a JSON file that holds a list of command lines of ``python -m ddp_prof.train``, each a list of words. Each
command line is a block of steps: its model is made, warmed up, measured and dropped before the next block begins, so
that several blocks need no more memory than one run. Blocks that follow each other run close in time, in the same
processes on the same cores, so other load on the machine affects both alike.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ddp_prof.train.__main__ import run_rank
from ddp_prof.train.arguments import parse_arguments

if __name__ == "__main__":
    sys.exit(run_rank([parse_arguments(words) for words in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))]))
