"""Whether all that was to be recorded is in the capture: what gets lost on the way is lost without any error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path

from ddp_prof.range_names import STEP, ranges_among


def find_loss(capture: Path, expected_ranks: Collection[int], *, on_gpus: bool) -> str | None:
    """What a capture with our ranges lacks, in words; ``None`` where each rank arrived with its steps and kernels.

    Raises:
        TraceError: The capture cannot be read.
    """
    # The reader needs numpy: not before there is something to read.
    from ddp_prof.ingest.load import load_trace
    from ddp_prof.trace import Kind

    trace = load_trace(capture)
    if not trace.ranks:
        return "no range of ours arrived"
    if missing := set(expected_ranks) - set(trace.ranks.values()):
        return f"the report lacks rank {_listed(missing)}"
    spans, step_names = trace.spans, ranges_among(trace.names, STEP)
    marked = zip(spans.process.tolist(), spans.name_id.tolist(), spans.is_open.tolist(), strict=True)
    steps = Counter(process for process, name_id, is_open in marked if name_id in step_names and not is_open)
    most = max([1, *steps.values()])
    if bare := {rank for process, rank in trace.ranks.items() if steps[process] < most}:
        return f"not all steps arrived of rank {_listed(bare)}"
    with_kernels = set(trace.activities.process[trace.activities.kind == Kind.KERNEL].tolist())
    if on_gpus and (blind := {rank for process, rank in trace.ranks.items() if process not in with_kernels}):
        return f"no kernels arrived of rank {_listed(blind)}"
    return None


def _listed(ranks: Collection[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
