"""Captures the program once with the settings of a try: it is marked and recorded for some steps, then ended.

Captures stay beside the file of the tuning (the store), where other commands can read them. A capture that is there is
not made again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from shutil import rmtree

from ddp_prof.capture.job import export_reports, plan_job
from ddp_prof.errors import WorkloadError
from ddp_prof.tune.measure import Program
from ddp_prof.tune.store import deciding_variables, digest_scripts
from ddp_prof.tune.tries import Try

RECORDED_STEPS = 10


def record(program: Program, tried: Try, store: Path, folder: Path, environ: Mapping[str, str]) -> list[Path]:
    """Return the traces of a capture of the program with the settings of a try; make it if it is not there.

    Args:
        program: The program.
        tried: The settings.
        store: The file of the tuning, beside which the captures lie.
        folder: Where the program is started.
        environ: Its environment.

    Raises:
        WorkloadError: The program fails, or ends before its last step, or no rank is recorded.
    """
    # The name of the folder is a digest, so another program, a changed script or another setting of NCCL in the
    # environment has another folder.
    scripts, variables = digest_scripts(program.command, folder), deciding_variables(environ)
    known = json.dumps([program.command, program.warmup, scripts, variables], sort_keys=True)
    name = re.sub(r"[^\w.=+-]", "_", tried.label)
    target = store.absolute().with_suffix("") / sha256(known.encode()).hexdigest()[:8] / name
    target.mkdir(parents=True, exist_ok=True)
    if files := sorted([*target.glob("*.sqlite"), *target.glob("*.json.gz")]):
        return files
    steps = f"{program.warmup}:{program.warmup + RECORDED_STEPS}"
    job, _ = plan_job(program.command, target, "auto", steps, environ)
    # One step more than is recorded: the recording has ended before the program does.
    recorded = replace(program, command=job.command, steps=RECORDED_STEPS + 1, is_recorded=True)
    way_out = "see whether 'ddp-prof capture' records the program"
    try:
        recorded.measure(tried, environ)
        export_reports(job, environ, way_out)
    except BaseException:  # else the next time the traces of some ranks would be taken for the capture
        rmtree(target, ignore_errors=True)
        raise
    if not job.traces:
        raise WorkloadError(f"no rank wrote a trace into {target}: {way_out}")
    return job.traces
