"""Makes the table of what a trace contains."""

from __future__ import annotations

from dataclasses import asdict

from ddp_prof.analyze.inventory import TraceInventory
from ddp_prof.columns import count_noun, table_row
from ddp_prof.errors import printable, shown_path
from ddp_prof.manifest import Manifest
from ddp_prof.present.recorders import name_of_profiler
from ddp_prof.present.table import SCHEMA, TableView
from ddp_prof.present.text import source_name
from ddp_prof.variants import variant_extras


def info_view(inventory: TraceInventory) -> TableView:
    """Return the table of what a trace contains, with a row per process, and advice in its notes."""
    profiler = name_of_profiler(inventory.source, inventory.recorder, inventory.producer)
    length = f"{inventory.duration_ns / 1e9:.3f} s"
    title = f"{source_name(inventory.trace, 1)} · {profiler} · device: {inventory.device} · {length}"
    rows = [table_row(process) for process in inventory.processes]
    made = [_how_made(inventory.manifest)] if inventory.manifest else []
    names = ", ".join(f"{kind} as '{printable(name[:60])}' ({writer})" for kind, name, writer in inventory.recognized)
    named = [f"recognized: {names}"] if names else []
    document = {"schema": SCHEMA, **asdict(inventory), "trace": shown_path(inventory.trace)}
    return TableView(title, rows, [*made, *named, *inventory.advice, *inventory.warnings], document)


def _how_made(run: Manifest) -> str:
    """Say how a run was made, from its manifest."""
    bucket = "" if run.bucket_size_mb is None else f", buckets of at most {run.bucket_size_mb:g} MiB"
    bucket += "".join(f", {extra}" for extra in variant_extras(run.options))
    parameters = sum(parameter.numel for parameter in run.parameters)
    return (
        f"run: {run.variant}{bucket}, {count_noun(run.world_size, 'rank')}, {run.backend}, {run.model_size} model "
        f"({count_noun(parameters, 'parameter')}), batch {run.batch_size} x {run.seq_len} tokens, "
        f"{count_noun(run.steps, 'step')} after {run.warmup} of warm-up, recorded by {run.profiler or 'no profiler'}, "
        f"{run.created}"
    )
