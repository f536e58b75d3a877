"""Names of the GPUs that a process would see, without torch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

ANSWER_LIMIT_S = 60


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """As CUDA counts: nvidia-smi also shows what ``CUDA_VISIBLE_DEVICES`` hides, and all parts of a divided one."""
    names = _ask("--query-gpu=name", "--format=csv,noheader")
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        is_divided = bool(names) and any(line.strip().startswith("MIG ") for line in _ask("-L"))
        return names[:1] if is_divided else names
    found: list[str] = []
    for entry in visible.replace(",", " ").split():
        if entry.startswith("MIG-"):  # of several instances a process sees one
            return found + names[:1]
        if entry.startswith("GPU-"):
            found += names[:1]
        elif re.fullmatch(r"[0-9]{1,4}", entry) and int(entry) < len(names):
            found.append(names[int(entry)])
        else:  # as for CUDA the first that is none ends the list
            break
    return found


def _ask(*question: str) -> list[str]:
    """Lines of its answer; none without a driver, which it says on stdout, where names are otherwise."""
    try:
        done = subprocess.run(  # noqa: S603
            ["nvidia-smi", *question],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=ANSWER_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
