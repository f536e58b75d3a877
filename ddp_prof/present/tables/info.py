"""What a trace holds, one row per process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_prof.manifest import Manifest
from ddp_prof.present.columns import Row
from ddp_prof.present.json_documents import info_document
from ddp_prof.present.table import TableView
from ddp_prof.printable import printable
from ddp_prof.variants import variant_extras

if TYPE_CHECKING:
    from ddp_prof.analyze.inventory import ProcessInventory, TraceInventory


def info_view(inventory: TraceInventory) -> TableView:
    producer = f" {inventory.producer}" if inventory.producer else ""
    title = (
        f"{inventory.trace} · {inventory.source}{producer} · device: {inventory.device} · "
        f"{inventory.duration_ns / 1e9:.3f} s"
    )
    names = ", ".join(f"{kind} as '{printable(name[:60])}' ({writer})" for kind, name, writer in inventory.recognized)
    named = [f"recognized: {names}"] if names else []
    notes = [*_run_notes(inventory.manifest), *named, *inventory.advice, *inventory.warnings]
    return TableView(title, [_row(process) for process in inventory.processes], notes, info_document(inventory))


def _row(process: ProcessInventory) -> Row:
    return {
        "rank": process.rank,
        "process": process.process,
        "devices": ", ".join(map(str, process.devices)) or "cpu",
        "kernels": process.kernels,
        "comm_kernels": process.collectives,
        "copies": process.copies,
        "CUDA_calls": process.calls,
        "ranges": process.ranges,
        "steps": process.steps,
        "warm-up_steps": process.warmup_steps,
        "backward_ranges": process.backward_ranges,
    }


def _run_notes(run: Manifest | None) -> list[str]:
    if run is None:
        return []
    bucket = "" if run.bucket_size_mb is None else f", buckets of at most {run.bucket_size_mb:g} MiB"
    bucket += "".join(f", {extra}" for extra in variant_extras(run.options))
    parameters = sum(parameter.numel for parameter in run.parameters)
    note = (
        f"run: {run.variant}{bucket}, {run.world_size} ranks, {run.backend}, {run.model_size} model "
        f"({parameters:,} parameters), batch {run.batch_size} x {run.seq_len} tokens, "
        f"{run.steps} steps after {run.warmup} of warm-up, recorded by {run.profiler or 'no profiler'}, {run.created}"
    )
    return [note]
