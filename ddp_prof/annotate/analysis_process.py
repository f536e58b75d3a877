"""The analysis of a monitor's traces, as a process beside the training."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

PYTHON_VARIABLE = "DDP_PROF_PYTHON"
"""Environment variable: the Python that runs the analysis if the job's Python lacks ddp_prof's dependencies.

``ddp-prof capture`` sets it."""
ANALYSIS_S = 600.0
"""How long an analysis may take."""
_JOB_ENDED = "the job ended before its analysis did"


class Analysis:
    """Runs ``python -m ddp_prof.monitor``, which analyses traces, as a process of its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._is_ended = False

    def kill(self) -> None:
        """Kill the process that runs, and start none any more."""
        self._is_ended = True
        if (running := self._process) is not None:
            with suppress(OSError):
                running.kill()

    def run(self, scratch: Path, *arguments: str) -> tuple[str, str | None]:
        """Run the analysis with these command-line arguments; return its stdout and, if it failed, the reason.

        The second element is ``None`` if it succeeded. The process runs in ``scratch``, an empty folder, and without
        the job's PYTHONPATH: there modules of the job cannot hide Python's own.
        """
        if self._is_ended:
            return "", _JOB_ENDED
        # The analysis must find ddp_prof, and not take the variables of ``ddp-prof capture`` for its own.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("DDP_PROF_")}
        environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        python = os.environ.get(PYTHON_VARIABLE) or sys.executable
        try:
            with subprocess.Popen(  # noqa: S603
                [python, "-m", "ddp_prof.monitor", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=environ,
                cwd=scratch,
            ) as self._process:
                try:
                    said, reason = self._process.communicate(timeout=ANALYSIS_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    return "", f"its analysis took longer than {ANALYSIS_S:.0f} s"
                code = self._process.returncode
        except OSError as error:
            return "", f"its analysis did not start: {error}"
        finally:
            self._process = None
        if code < 0:
            return "", _JOB_ENDED if self._is_ended else f"its analysis was ended by signal {-code}"
        if code:  # the last line on stderr is the reason
            return "", (reason.strip().splitlines() or [f"exit code {code}"])[-1]
        return said, None
