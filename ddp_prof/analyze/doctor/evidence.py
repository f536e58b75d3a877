"""Input of the doctor's rules: the results of the other analyses and the facts of each rank. And what rules find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from ddp_prof.analyze.collectives.gradients import NUMBER_BYTES, carry_gradients
from ddp_prof.analyze.collectives.results import RunCollectives
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.skew import RunSkew
from ddp_prof.analyze.core.attribution import MAY_REDUCE
from ddp_prof.analyze.core.bucket_copies import is_copy_within_device
from ddp_prof.analyze.critical.critical_path import RunCritical
from ddp_prof.analyze.critical.what_if import WhatIf
from ddp_prof.analyze.doctor.gradients import Gradients, median_or_zero
from ddp_prof.analyze.doctor.rank_facts import RankFacts
from ddp_prof.analyze.kernels.contention import Contention
from ddp_prof.analyze.overlap import TraceOverlap
from ddp_prof.analyze.root_cause import RootCause
from ddp_prof.analyze.why_unknown import why_no_steps
from ddp_prof.communication import BROADCAST, GATHER, OPERATIONS, PEER_COPY, REDUCE, SCATTER
from ddp_prof.table import (
    NO_TIME,
    UNKNOWN,
    Ints,
    begins_run,
    concatenate,
    distinct,
    empty,
    take_or_unknown,
)

_OF_DATA_PARALLEL = {BROADCAST, REDUCE, GATHER, SCATTER, PEER_COPY}
"""The operations of ``torch.nn.DataParallel``."""

NO_STEPS = "the trace marks no whole step (see --step-range)"
NO_PHASES = "the trace does not tell what backward launched (see --backward-range)"

NO_LAUNCHES = "no step is known to have launched what communicates"

_NO_SIZES_IN_GRAPHS = (
    "the trace does not tell the sizes of collectives that a CUDA graph launches: record some steps without graphs, "
    "or, with PyTorch later than 2.13, export by export_chrome_trace(cuda_graph_annotations=...)"
)
_BY_PROFILER, _BY_NSYS = True, False
_WHAT_TELLS_SIZES = {
    ("nccl", _BY_PROFILER): (
        "torch.profiler writes them for NCCL with PyTorch 2.2 and later, if it records the CPU, too"
    ),
    ("nccl", _BY_NSYS): "NCCL 2.16 and later tells them to nsys, and 'nsys export --include-json=true' keeps them",
    ("gloo", _BY_PROFILER): (
        "torch.profiler writes them for gloo with record_shapes=True; 'ddp-prof capture', which does not set it, marks "
        "the buckets of DDP by --profiler nsys"
    ),
    ("gloo", _BY_NSYS): "nsys records none of gloo, but ddp_prof.annotate.instrument(model) marks those of DDP",
}
"""What records the sizes of collectives, by the library and by whether torch.profiler recorded, or nsys."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in the set-up of a run that costs time.

    Attributes:
        rule: Name of the rule that found it.
        evidence, advice: What was measured, and what to do about it, in sentences.
        ranks: Names of the ranks that it concerns; empty if it concerns the whole run.
        steps: Numbers of the steps that it concerns; empty if it concerns the whole run, or if steps have no numbers.
        cost_ns: Upper limit of its cost in a typical step; ``None`` if not known, for ``cost_reason``.
        expected_gain_ns: How much shorter a typical step would be without it, by a simulation, at most ``cost_ns``;
            ``None`` if that could not be simulated, for ``gain_reason``. Of late ranks, both are those of the mean
            step: they may be late in some steps only.
        gain_low_ns, gain_high_ns: The 95 % interval of ``expected_gain_ns``; ``None`` if steps are too few for one.
        gain_reason: Why the gain, or its interval, is not known.
        argument, value: The setting to change, an argument of DistributedDataParallel or an environment variable, and
            its new value; ``None`` where the advice is no single setting, or names no value.
        cost_reason: Why ``cost_ns`` is not known.
    """

    rule: str
    evidence: str
    advice: str
    ranks: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    cost_ns: int | None = None
    expected_gain_ns: int | None = None
    gain_low_ns: int | None = None
    gain_high_ns: int | None = None
    gain_reason: str | None = None
    argument: str | None = None
    value: str | float | bool | None = None
    cost_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Abstained:
    """A rule that cannot decide with these traces, and the reason."""

    rule: str
    reason: str


@dataclass(frozen=True)
class RunEvidence:
    """The input of all rules.

    Attributes:
        analysis, collectives, overlap, critical, skew: Results of the other analyses.
        facts: One per rank, in the order of the ranks of ``analysis``.
        contention: Measures when it is called how much communication slows compute, since it reads kernels again.
        what_if: Replays steps without the cause of a finding.
        cause: Why most of the exposed time is exposed.
        compared_files: The number of traces in which contention is measured, and that of all traces; ``None`` if it is
            measured in all.
    """

    analysis: RunAnalysis
    collectives: RunCollectives
    overlap: TraceOverlap
    critical: RunCritical
    skew: RunSkew
    facts: tuple[RankFacts, ...]
    contention: Callable[[], Contention]
    what_if: WhatIf
    cause: RootCause | None = None
    compared_files: tuple[int, int] | None = None

    @property
    def is_cpu(self) -> bool:
        return self.analysis.device == "cpu"

    @cached_property
    def is_data_parallel(self) -> bool:
        """Whether one process broadcasts to its devices and reduces to one of them, as ``torch.nn.DataParallel``."""
        ranks = self.analysis.ranks
        operations = {OPERATIONS[one] for rank in ranks for one in distinct(rank.timings.operation) if one != UNKNOWN}
        return all(rank.of_several for rank in ranks) and {BROADCAST, REDUCE} <= operations <= _OF_DATA_PARALLEL

    @cached_property
    def facts_of_steps(self) -> tuple[RankFacts, ...]:
        """The facts of each rank, for figures of a step.

        Of a rank that marks no steps in a run that has some, what is measured per step is of its whole capture. That is
        no step of the run, and is left out.
        """
        return tuple(
            facts.without_steps() if self.analysis.has_steps and not rank.marks_steps else facts
            for rank, facts in zip(self.analysis.ranks, self.facts, strict=True)
        )

    @cached_property
    def gradients(self) -> Gradients:
        """The collectives of all ranks that reduce gradients in a step; a unit is a step."""
        of_ranks = []
        for index, (rank, exposure) in enumerate(zip(self.analysis.ranks, self.analysis.exposures, strict=True)):
            rows = np.flatnonzero(carry_gradients(rank) & (rank.keys != UNKNOWN))
            shared = {item.name for item in fields(Gradients)} & {item.name for item in fields(rank.timings)}
            columns = {name: getattr(rank.timings, name)[rows] for name in shared}
            # The additional last element is for UNKNOWN, which is -1.
            is_copy = np.array([*map(is_copy_within_device, rank.consumers), False])
            copied_bytes = rank.timings.consumer_bytes[rows]
            is_number = (copied_bytes != UNKNOWN) & (copied_bytes <= NUMBER_BYTES)
            is_needed = rank.timings.needed_by_backward[rows] == 1
            is_needed &= rank.timings.consumer_lane[rows] == rank.compute_stream
            of_rank = Gradients(
                rank=np.full(len(rows), index),
                unit=columns["step"],
                number=take_or_unknown(rank.step_numbers, columns["step"]),
                is_copied=is_copy[columns["consumer"]] & ~is_number,
                is_needed_on_stream=is_needed,
                exposed_ns=exposure.exposed_ns[rows],
                **columns,
            )
            of_ranks.append(of_rank)
        every = concatenate(*of_ranks) if of_ranks else empty(Gradients)

        # Steps are numbered over all ranks: one begins where the rank, or its step, differs from the row before.
        step = np.cumsum(begins_run(every.rank, every.step)) - 1
        return replace(every, step=step, unit=step)

    def where(self, found: Gradients) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the names of the ranks, and the numbers of the steps, to which the collectives belong."""
        ranks = dict.fromkeys(self.analysis.ranks[index].name for index in distinct(found.rank))
        return tuple(ranks), tuple(number for number in distinct(found.number) if number != UNKNOWN)

    def cost_ns(self, of_steps: Sequence[int]) -> int | None:
        """Return the median of costs per step; without steps, the largest cost of a rank; ``None`` without costs."""
        if not of_steps:
            return None
        return median_or_zero(of_steps) if self.analysis.has_steps else max(of_steps)

    def typical_exposed_ns(self, values: Ints) -> int | None:
        """Return the median of exposed times, or of costs that rest on them; ``None`` if exposed time is not known."""
        return None if self.collectives.reason else median_or_zero(values)

    @cached_property
    def why_no_steps(self) -> str | None:
        """Why it is not known which collectives belong to which step.

        ``None`` if that is known, or if nothing seems to reduce gradients.
        """
        if not self.analysis.has_steps:
            return why_no_steps((rank.reason for rank in self.analysis.ranks), NO_STEPS) if self.gradients else None
        communicates = any(rank.comm_ns for rank in self.overlap.ranks)
        return (
            NO_LAUNCHES if communicates and not any(rank.communicating_steps for rank in self.overlap.ranks) else None
        )

    @property
    def whole(self) -> str:
        """What medians over steps are of, in words: a step or, where nothing marks steps, the capture."""
        return "a typical step" if self.analysis.has_steps else "the capture"

    @property
    def why_no_gradients(self) -> str | None:
        """Why it is not known whether a collective reduces gradients; ``None`` if that is known, or nothing reduces."""
        ranks = self.analysis.ranks
        is_known = len(self.gradients) or any(
            (rank.timings.phase != UNKNOWN).any() or (rank.timings.backward_end_ns != NO_TIME).any() for rank in ranks
        )
        reduces = any(np.isin(rank.timings.operation, MAY_REDUCE).any() for rank in ranks)
        return NO_PHASES if reduces and not is_known else None

    @property
    def knows_queues(self) -> bool:
        """Whether it is known of all collectives on streams whether they queued: from when on they could have begun."""
        for timings in (rank.timings for rank in self.analysis.ranks):
            could_ns = np.maximum.reduce((timings.launch_ns, timings.ready_ns, timings.input_ns))
            if np.any((timings.step != UNKNOWN) & (timings.lane != UNKNOWN) & (could_ns == NO_TIME)):
                return False
        return True

    @property
    def why_no_dependencies(self) -> str | None:
        """Why the dependencies of some rank that communicates are not known; ``None`` if they are, on all of them."""
        reasons = (rank.dependencies.reason for rank in self.overlap.ranks if rank.dependencies and rank.collectives)
        return next(filter(None, reasons), None)

    @property
    def why_no_sizes(self) -> str:
        """That sizes are not known, and what records them."""
        timings = [rank.timings for rank in self.analysis.ranks]
        if all(np.all(one.graph_input_ns[one.bytes == UNKNOWN] != NO_TIME) for one in timings):
            return _NO_SIZES_IN_GRAPHS
        library = "gloo" if all(facts.is_gloo for facts in self.facts) else "nccl"
        recorded = {source == "kineto" for source, *_ in self.overlap.recorded_by}
        told = [_WHAT_TELLS_SIZES[library, by] for by in (_BY_PROFILER, _BY_NSYS) if by in recorded]
        return f"the trace does not tell the sizes of collectives: {'; '.join(told)}"

    @property
    def unknown_needs(self) -> str:
        """Why it is not known which operation needs a collective."""
        return self.why_no_dependencies or "it is not known what needs the collectives"
