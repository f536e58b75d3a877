"""Chooses what is worth trying, by the doctor's findings and the bounds on gains in one capture of the program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from ddp_prof.analyze.collectives.gradients import carry_gradients
from ddp_prof.analyze.cost import Bounds
from ddp_prof.analyze.doctor import Diagnosis
from ddp_prof.analyze.doctor.buckets import MANY_BUCKETS, SINGLE_BUCKET
from ddp_prof.analyze.doctor.evidence import Finding
from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.runs import load_runs
from ddp_prof.runs.report import LoadOptions
from ddp_prof.runs.run import SUMMARY, Run
from ddp_prof.table import UNKNOWN, distinct_rows, select
from ddp_prof.tune.measure import Program
from ddp_prof.tune.recorded import record
from ddp_prof.tune.tries import TODAY, Try, parse_tries
from ddp_prof.variants import BYTES_PER_MB

USUAL_SIZES = ((5, 16), (50, 6), (100, 1))
"""Sizes of buckets in MiB, and how many buckets at most a smaller size leaves of a model for which these are large.

They change when gradients are sent, and by how many collectives. They are tried only if enough of the step waits for
communication or, as fewer collectives take less time, if communication may slow compute by enough.
"""
SIZES_OF_FINDINGS = {MANY_BUCKETS: "25", SINGLE_BUCKET: "5,25"}
"""Sizes of buckets in MiB that are tried for a finding whose advice names none: those of collectives are not known."""
CHANGES_RESULTS = frozenset(("broadcast_buffers",))
"""Settings of the doctor's advice that change results, so that they are tried only when asked for."""


def tries_of(finding: Finding) -> tuple[str, ...]:
    """Return the tries, as ``--try`` takes them, that may remove the cost of a finding without a change of results.

    Without any, the finding needs a change of the program.
    """
    if finding.value is None and (sizes := SIZES_OF_FINDINGS.get(finding.rule)):
        return (f"bucket_cap_mb={sizes}",)
    if finding.argument is None or finding.value is None or finding.argument in CHANGES_RESULTS:
        return ()
    return (finding.argument if finding.value is True else f"{finding.argument}={finding.value}",)


def sizes_to_try(whole_mb: float | None) -> str:
    """Return the sizes of buckets to try, as ``--try`` takes them, for gradients of so many MiB; ``None``: not known.

    A size above that of all gradients leaves one bucket, as any other one above it does.
    """
    sizes = []
    for size, buckets in USUAL_SIZES:
        mb = size if whole_mb is None else min(size, whole_mb / buckets)
        sizes.append(f"{math.ceil(mb) if buckets == 1 else float(f'{mb:.2g}'):g}")
    return f"bucket_cap_mb={','.join(sizes)}"


@dataclass(frozen=True, slots=True)
class Candidates:
    """What is worth trying, and the reasons, one line each."""

    tries: tuple[Try, ...]
    reasons: tuple[str, ...]

    def that_fit_in_process(self) -> Candidates:
        """Return only the tries that can be set between two steps, with a reason that names the other tries."""
        left = ", ".join(tried.label for tried in self.tries if not tried.fits_in_process)
        fitting = tuple(tried for tried in self.tries if tried.fits_in_process)
        return Candidates(fitting, (*self.reasons, *([f"left out, for --in-process: {left}"] if left else [])))


def choose_tries(
    diagnosis: Diagnosis, bounds: Bounds, step_ns: float | None, worth: float, whole_mb: float | None = None
) -> Candidates:
    """Return the tries that may gain at least the fraction ``worth`` of a step.

    Args:
        diagnosis: The doctor's findings. If it is unknown what a finding costs, it is tried.
        bounds: How much hiding communication, and how much another network, could gain at most.
        step_ns: Length of a step; ``None`` if not known.
        worth: The smallest gain that is worth having, as a fraction of a step.
        whole_mb: MiB of all gradients; ``None`` if not known.
    """
    # Settings that answer findings.
    texts: list[str] = []
    reasons: list[str] = []
    for finding in diagnosis.findings:
        share = finding.cost_ns / step_ns if finding.cost_ns is not None and step_ns else None
        if (tries := tries_of(finding)) and (share is None or share >= worth):
            texts += tries
            cost = "" if share is None else f", at most {100 * share:.1f} % of a step"
            reasons.append(f"{finding.rule}{cost}: trying {' and '.join(tries)}")
    # Bucket sizes, unless they could not gain enough.
    sizes = sizes_to_try(whole_mb)
    if bounds.schedule_ns is None or not step_ns:
        texts.append(sizes)
        unknown = "how much of a step waits for communication is not known"
        reasons.append(f"{unknown}: trying {sizes}")
    else:
        share, with_contention = (max(0, ns or 0) / step_ns for ns in (bounds.schedule_ns, bounds.high_ns))
        said = f"hiding communication can gain no more than {100 * share:.1f} %"
        if share < worth <= with_contention:
            more = f"{100 * (with_contention - share):.1f} %"
            said += f", but fewer collectives slow compute for less time, which may gain up to {more} more"
        if max(share, with_contention) >= worth:
            texts.append(sizes)
            reasons.append(f"{said}: trying {sizes}")
        else:
            reasons.append(f"{said}{'' if texts else ': nothing to tune'}")
    return Candidates(parse_tries(texts), tuple(reasons))


def find_candidates(
    program: Program, store: Path, folder: Path, environ: Mapping[str, str], worth: float
) -> Candidates:
    """Capture the program once, or read the capture that is there, and return what is worth trying.

    Args:
        program: The program.
        store: The file of the tuning; captures lie beside it.
        folder: Where the program is started.
        environ: Its environment.
        worth: The smallest gain that is worth having, as a fraction of a step.

    Raises:
        WorkloadError: The program cannot be captured.
        TraceError: The capture cannot be read.
    """
    files = record(program, TODAY, store, folder, environ)
    return choose_for(load_runs(files, LoadOptions(one_run=True), measures=SUMMARY)[0], worth)


def choose_for(run: Run, worth: float) -> Candidates:
    """Return what is worth trying by a captured run; ``worth`` is as in :func:`find_candidates`."""
    (summary,) = compare_variants([run.overlap()])
    return choose_tries(run.doctor(), run.cost().bounds, summary.communicating_step_ns, worth, _gradients_mb(run))


def _gradients_mb(run: Run) -> float | None:
    """Return how many MiB of gradients a rank reduces in a pass of backward (median); ``None`` if not known."""
    passes = []
    for rank in run.analysis().ranks:
        timings = select(rank.timings, carry_gradients(rank) & (rank.timings.step != UNKNOWN))
        if np.any(timings.bytes == UNKNOWN):
            return None
        _, of_pass = distinct_rows(timings.step, timings.backward_end_ns)
        passes += np.bincount(of_pass, weights=timings.bytes).tolist()
    return median(passes) / BYTES_PER_MB if passes else None
