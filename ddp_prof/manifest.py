"""``run.json``: what a capture was a capture of, written beside it, last, and only on success.

Nothing about a run is ever read from a file name: the variant, the sizes and the settings are here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from ddp_prof.atomic_file import atomic_write, is_file
from ddp_prof.errors import TraceError
from ddp_prof.variants import VARIANTS, variant_extras, variant_label, variant_order

SCHEMA = 1
SUFFIX = ".run.json"
RANKS_PER_GPU = "ranks_per_gpu"
"""Key of ``Manifest.options``, and field of the ``process`` range: how many ranks have one GPU."""

_MOST = 2**53
MOST_RANKS = 1 << 20
"""More than any job has: a larger number is no rank, and no number of ranks."""
_LONGEST = 1000

Item = TypeVar("Item")


class Caveat(str, Enum):
    """Why the figures of a run are not representative; the value is the text that is shown."""

    SHARED_GPU = "shared GPU: time-sliced, bandwidth and overlap not representative"
    ONE_RANK = "one rank: it has no peer to communicate with, so no figure is about communication"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the model, in the order of ``model.parameters()``."""

    name: str
    numel: int
    dtype: str
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Time of a step on rank 0 by the host's clock; ``None`` for what is not known.

    Attributes:
        is_synchronized: Whether the host waited for the device at each change of phase.
        communication_ns: From the end of backward until the variant has synchronized all gradients; of torch's DDP,
            which waits within backward, the end of backward, counted in both; not known of fsdp and of torch without
            its communication hook.
    """

    is_synchronized: bool
    step: int
    step_ns: int
    forward_ns: int | None
    backward_ns: int | None
    communication_ns: int | None
    optimizer_ns: int | None


@dataclass(frozen=True, slots=True)
class MessageTimes:
    """All-reduces of one size, for each of which rank 0 waited: how many were timed, and their times on rank 0."""

    bytes: int
    calls: int
    median_ns: int
    shortest_ns: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One run of the workload.

    Attributes:
        variant: Key of :data:`ddp_prof.variants.VARIANTS`.
        bucket_size_mb: Cap of a bucket in MiB; ``None`` where the variant has none, or no cap.
        step_seconds: Host seconds of each measured step on rank 0, profiler's cost included.
        communication_seconds: Of each measured step that rank 0 spent waiting for communication: the host's on a CPU,
            the device's on a GPU; empty where this is not known.
        final_loss: ``None`` where it was not finite: training diverged.
        profiler: What recorded the run, with its version; ``None`` for an unprofiled run.
        key: Digest of machine, settings and code; a finished run is skipped only where it is unchanged.
        parameters: The model's parameters in order, which with the ranges' ``bucket`` and ``params`` gives
            each bucket's content.
        host_times: Of the measured steps, then of the synchronized ones.
        messages: Of the synchronized steps, where the variant blocks in each all-reduce.
        collectives: A step's, of one rank; ``None`` where no synchronized steps were taken, which count them.
        communicated_bytes: A step's, of one rank: the sum of its messages; ``None`` as above.
        peak_memory_bytes: Of the rank that needed most: allocated on the GPU, on a CPU resident.
    """

    variant: str
    bucket_size_mb: float | None
    world_size: int
    backend: str
    device: str
    model_size: str
    batch_size: int
    seq_len: int
    steps: int
    warmup: int
    seed: int
    step_seconds: tuple[float, ...]
    communication_seconds: tuple[float, ...]
    final_loss: float | None
    profiler: str | None
    key: str | None
    versions: dict[str, str]
    machine: dict[str, str | int]
    git_commit: str | None
    command: tuple[str, ...]
    created: str
    parameters: tuple[Parameter, ...]
    options: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA
    host_times: tuple[HostTimes, ...] = ()
    messages: tuple[MessageTimes, ...] = ()
    collectives: int | None = None
    communicated_bytes: int | None = None
    peak_memory_bytes: int | None = None


def manifest_path(trace: Path) -> Path:
    """Where the manifest of a trace lies.

    ``overlap.sqlite`` has ``overlap.run.json`` beside it, and so have ``overlap.rank0.json.gz`` and its peers, and
    ``overlap.node1.sqlite``: files with one manifest are the ranks of one run.
    """
    return trace.with_name(
        re.sub(r"(?:\.(?:rank|node)\d+)?(?:\.json\.gz|\.[^.]+|_(?:pqt|arw)dir)?$", "", trace.name, count=1) + SUFFIX
    )


def label_of(trace: Path, manifest: Manifest | None) -> str:
    """Label of a run in tables and figures: ``bucketed 10 MB``; without a manifest the file's name."""
    if manifest is None:
        return manifest_path(trace).name.removesuffix(SUFFIX)
    return variant_label(manifest.variant, manifest.bucket_size_mb, variant_extras(manifest.options))


def label_of_ranks(labels: Sequence[str]) -> str:
    """Label of a run of several files: ``job_rank{0-7}`` if their names differ in a number."""
    names = list(dict.fromkeys(labels))
    if len(names) == 1:
        return names[0]
    tokens = [re.split(r"(\d+)", name) for name in names]
    if len({len(parts) for parts in tokens}) == 1:
        differ = [place for place, parts in enumerate(zip(*tokens, strict=True)) if len({*parts}) > 1]
        if len(differ) == 1 and differ[0] % 2:  # texts are at even places, numbers at odd ones
            numbers = sorted(int(parts[differ[0]]) for parts in tokens)
            return "".join([*tokens[0][: differ[0]], f"{{{format_ranges(numbers, ',')}}}", *tokens[0][differ[0] + 1 :]])
    return f"{names[0]} and {len(names) - 1} more"


def device_of(devices: Iterable[str]) -> str:
    """The device of a run by those of its files: one of a GPU job may hold no device's work, as where that was lost."""
    return max(devices, default="cpu")  # "cuda" comes last


def distinct_names(files: Iterable[Path]) -> dict[Path, str]:
    """What files are called: each by its name, those of one name in several folders with what differs of these."""
    alike: dict[str, set[Path]] = {}
    for file in files:
        alike.setdefault(file.name, set()).add(file)
    found: dict[Path, str] = {}
    for same in alike.values():
        parts = 1
        while len({file.parts[-parts:] for file in same}) < len(same):
            parts += 1
        found |= {file: str(Path(*file.parts[-parts:])) for file in same}
    return found


def format_ranges(numbers: Sequence[int], between: str = ", ") -> str:
    """``1-3, 5`` for 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return between.join("-".join(map(str, run)) for run in runs)


def caveats_of(manifest: Manifest) -> tuple[Caveat, ...]:
    """The caveats of a run, for everything that shows it, its ``run.json`` included."""
    caveats = []
    sharing = manifest.options.get(RANKS_PER_GPU)
    if isinstance(sharing, int) and sharing > 1:
        caveats.append(Caveat.SHARED_GPU)
    if manifest.world_size == 1:
        caveats.append(Caveat.ONE_RANK)
    return tuple(caveats)


def in_variant_order(items: Sequence[Item], manifest_of: Callable[[Item], Manifest | None]) -> list[Item]:
    """Runs in the order of their variants, buckets by size; as given where not all are of a known variant."""
    manifests = [manifest_of(item) for item in items]
    if not all(manifest and manifest.variant in VARIANTS for manifest in manifests):
        return list(items)
    keys = [
        (variant_order(manifest.variant, manifest.bucket_size_mb), variant_extras(manifest.options))
        for manifest in manifests
        if manifest
    ]
    return [items[index] for index in sorted(range(len(items)), key=keys.__getitem__)]


def write_manifest(manifest: Manifest, path: Path) -> None:
    record = {**asdict(manifest), "caveats": [caveat.value for caveat in caveats_of(manifest)]}
    if manifest.final_loss is not None and not math.isfinite(manifest.final_loss):
        record["final_loss"] = None
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load_manifest(path: Path) -> Manifest | None:
    """Read a manifest; ``None`` where there is none, TraceError where it is not ours or cannot be true."""
    if not is_file(path):
        return None
    import msgspec

    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        problem = _problem(manifest)
    except RecursionError:
        problem = "nested too deep"
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = str(error)
    if problem:
        raise TraceError(path, f"not a run.json of ddp_prof ({problem})", "delete it or capture the run again")
    return manifest


def _problem(manifest: Manifest) -> str | None:
    """Describe a contradiction in a manifest with correct types; ``None`` if there is none."""
    for name in ("world_size", "steps", "warmup", "batch_size", "seq_len", "bucket_size_mb"):
        number = getattr(manifest, name)
        most = MOST_RANKS if name == "world_size" else _MOST
        if number is not None and not (name == "world_size") <= number < most:
            return f"{name} is {number:g}"
    for name in ("variant", "backend", "device", "model_size", "profiler", "created"):
        if len(getattr(manifest, name) or "") > _LONGEST:
            return f"{name} is longer than {_LONGEST} characters"
    for name in ("comm_hook", "compression"):
        if len(str(manifest.options.get(name))) > _LONGEST:
            return f"{name} is longer than {_LONGEST} characters"
    return _problem_of_buckets(manifest)


def _problem_of_buckets(manifest: Manifest) -> str | None:
    """Buckets are lists of positions among the trained parameters, each of which is in one bucket at most."""
    buckets = manifest.options.get("buckets") or []
    free = set(range(sum(parameter.requires_grad for parameter in manifest.parameters)))
    if not isinstance(buckets, list):
        return "buckets are no list"
    for index, bucket in enumerate(buckets):
        if not isinstance(bucket, list) or not all(isinstance(position, int) for position in bucket):
            return f"bucket {index} is no list of positions"
        if not free.issuperset(bucket):
            return f"bucket {index} holds a parameter that does not exist or is in another bucket"
        free.difference_update(bucket)
    return None
