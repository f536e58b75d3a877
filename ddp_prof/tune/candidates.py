"""What is worth trying: what the doctor's findings and the bounds of one capture of the program leave.

The capture is made in the same way as a run of a try: the unchanged program is marked and recorded for some steps, and
ended in order. It stays beside the store, for the commands that read captures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from ddp_prof.analyze.cost import Bounds
from ddp_prof.analyze.doctor import Diagnosis
from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.capture.job import export_reports, plan_job
from ddp_prof.errors import WorkloadError
from ddp_prof.runs import load_runs
from ddp_prof.runs.report import LoadOptions
from ddp_prof.runs.run import SUMMARY, Run
from ddp_prof.tune.measure import Program
from ddp_prof.tune.store import digest_scripts
from ddp_prof.tune.tries import TODAY, Try, parse_tries

RECORDED_STEPS = 10
OF_SCHEDULE = ("bucket_cap_mb=5,50,100",)
"""Tries that change when gradients are sent: worth it only if enough of the step waits for communication."""
OF_FINDINGS = {
    "one collective per parameter": ("bucket_cap_mb=25",),
    "one bucket for all gradients": ("bucket_cap_mb=5,25",),
    "copies out of buckets": ("gradient_as_bucket_view",),
    "vote on unused parameters": ("find_unused_parameters=false",),
    "single hardware queue": ("CUDA_DEVICE_MAX_CONNECTIONS=8",),
}
"""Findings of the doctor that a setting answers, which changes no result; others need a change of the program."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """What is worth trying, and a sentence on each reason."""

    tries: tuple[Try, ...]
    reasons: tuple[str, ...]


def choose_tries(diagnosis: Diagnosis, bounds: Bounds, step_ns: float | None, worth: float) -> Candidates:
    """Choose by what costs at least ``worth`` of a step; what a finding costs may be unknown, then it is tried."""
    texts: list[str] = []
    reasons: list[str] = []
    for finding in diagnosis.findings:
        share = finding.cost_ns / step_ns if finding.cost_ns is not None and step_ns else None
        if finding.rule in OF_FINDINGS and (share is None or share >= worth):
            texts += OF_FINDINGS[finding.rule]
            cost = "" if share is None else f", at most {100 * share:.1f} % of a step"
            reasons.append(f"{finding.rule}{cost}: {' and '.join(OF_FINDINGS[finding.rule])}")
    if bounds.schedule_ns is None or not step_ns:
        texts += OF_SCHEDULE
        reasons.append(f"what waits for communication is not known: {' and '.join(OF_SCHEDULE)}")
    else:
        share = bounds.schedule_ns / step_ns
        said = f"no schedule can gain more than {100 * share:.1f} %"
        if share >= worth:
            texts += OF_SCHEDULE
            reasons.append(f"{said}: {' and '.join(OF_SCHEDULE)}")
        else:
            reasons.append(f"{said}{'' if texts else ': nothing to tune'}")
    return Candidates(parse_tries(texts), tuple(reasons))


def find_candidates(
    program: Program, store: Path, folder: Path, environ: Mapping[str, str], worth: float
) -> Candidates:
    """Capture the program once, or read the capture that is there, and choose.

    Raises WorkloadError if it cannot be captured, TraceError if the capture cannot be read.
    """
    known = json.dumps([program.command, program.warmup, digest_scripts(program.command, folder)])
    target = store.absolute().with_suffix("") / sha256(known.encode()).hexdigest()[:8]
    files = _traces_in(target) or _capture(program, target, environ)
    return choose_for(load_runs(files, LoadOptions(one_run=True), measures=SUMMARY)[0], worth)


def choose_for(run: Run, worth: float) -> Candidates:
    """Choose by a run that was recorded."""
    (summary,) = compare_variants([run.overlap()])
    return choose_tries(run.doctor(), run.cost().bounds, summary.communicating_step_ns, worth)


def _traces_in(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.sqlite"), *folder.glob("*.json.gz")]) if folder.is_dir() else []


def _capture(program: Program, target: Path, environ: Mapping[str, str]) -> Sequence[Path]:
    target.mkdir(parents=True, exist_ok=True)
    steps = f"{program.warmup}:{program.warmup + RECORDED_STEPS}"
    job, _ = plan_job(program.command, target, "auto", steps, environ)
    # One step more than is recorded: the recording has ended before the program does.
    recorded = replace(program, command=job.command, steps=RECORDED_STEPS + 1, is_recorded=True)
    recorded.measure(TODAY, environ)
    export_reports(job, environ, "it recorded nothing")
    files = job.traces
    if not files:
        raise WorkloadError(f"no rank wrote a trace into {target}: name what to try by --try")
    return files
