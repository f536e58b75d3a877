"""The manifest of a run, ``run.json``: it is written beside the capture, last, and only on success.

The variant, sizes and settings of a run are always read from here, never from a file name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from ddp_prof.atomic_file import atomic_write, is_file
from ddp_prof.bounded_file import read_at_most
from ddp_prof.errors import TraceError
from ddp_prof.variants import VARIANTS, variant_extras, variant_label, variant_order

SCHEMA = 1
SUFFIX = ".run.json"
RANKS_PER_GPU = "ranks_per_gpu"
"""Key of ``Manifest.options``, and field of the ``process`` range: how many ranks share a GPU."""

_MOST = 2**53
"""More than any number of a manifest can be."""
MOST_RANKS = 1 << 20
"""More ranks than any job has: a larger number is no rank and no world size."""
_LONGEST = 1000
"""The most characters of a text in a manifest."""
_MOST_BYTES = 1 << 24
"""The most bytes of a ``run.json``."""

Item = TypeVar("Item")


class Caveat(str, Enum):
    """Why the figures of a run are not representative; the value is the text shown to users."""

    SHARED_GPU = "shared GPU: time-sliced, bandwidth and overlap not representative"
    ONE_RANK = "one rank: it has no peer to communicate with, so no figure is about communication"


CAVEATS_JOINT = "; "
"""What stands between the texts of several caveats of a run in a database of measurements."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the model."""

    name: str
    numel: int
    dtype: str
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """The bytes of its gradient. The number at the end of the data type is the bits of an element: ``float32``."""
        bits = re.search(r"(\d+)\D*$", self.dtype)
        return self.numel * max(1, int(bits[1]) // 8 if bits else 1)


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Times of one step on rank 0 by the host's clock; ``None`` if unknown.

    Attributes:
        is_synchronized: Whether the host waited for the device at each change of phase.
        step: Number of the step, counted separately for measured and for synchronized steps.
        communication_ns: From the end of backward until the variant has synchronized all gradients. Torch's DDP waits
            within backward: this wait counts both here and in ``backward_ns``. Unknown for fsdp, and for torch without
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
    """The times of blocking collectives of one message size on rank 0; ``calls`` is how many were timed."""

    bytes: int
    calls: int
    median_ns: int
    shortest_ns: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One run of the workload.

    Attributes:
        variant: Key of :data:`ddp_prof.variants.VARIANTS`.
        bucket_size_mb: Cap of a bucket in MiB; ``None`` if the variant takes no bucket size, or has no cap.
        batch_size: Sequences per step of all ranks together, of ``seq_len`` tokens each.
        step_seconds: Host time of each measured step on rank 0, including the cost of the profiler.
        communication_seconds: Time that rank 0 waited for communication in each measured step: on a CPU the host, on a
            GPU the device; empty if unknown.
        final_loss: Loss of the last measured step; ``None`` if it was not finite, because training diverged.
        profiler: The profiler that recorded the run, with its version; ``None`` for an unprofiled run.
        key: Digest of machine, settings and code. A run whose ``run.json`` exists is skipped if its digest is the same.
        parameters: The model's parameters in the order of ``model.parameters()``; with ``bucket`` and ``params`` of the
            ranges they give the content of each bucket.
        options: Further settings and facts by name, such as ``lr``, ``buckets`` and ``state_bytes``.
        host_times: The times of the measured steps, then of the synchronized steps.
        messages: The collectives of the synchronized steps by message size, if the variant waits for each collective.
        collectives: Number of collectives per step and rank; ``None`` without synchronized steps, which count them.
        communicated_bytes: Sum of the message sizes of these collectives.
        peak_memory_bytes: Largest peak of all ranks: memory allocated on the GPU, or resident memory on a CPU.
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

    @property
    def local_batch_size(self) -> int:
        """Sequences per step of one rank."""
        return self.batch_size // self.world_size


def manifest_path(trace: Path) -> Path:
    """Return the path of a trace's manifest.

    It is ``overlap.run.json`` for ``overlap.sqlite``, for ``overlap.rank0.json.gz`` and for ``overlap.node1.sqlite``:
    files with the same manifest are ranks of one run.
    """
    return trace.with_name(
        re.sub(r"(?:\.(?:rank|node)\d+)?(?:\.json\.gz|\.[^.]+|_(?:pqt|arw)dir)?$", "", trace.name, count=1) + SUFFIX
    )


def label_of(trace: Path, manifest: Manifest | None) -> str:
    """Return the label of a run in tables and figures: ``bucketed 10 MB``; without a manifest the file's name."""
    if manifest is None:
        return manifest_path(trace).name.removesuffix(SUFFIX)
    return variant_label(manifest.variant, manifest.bucket_size_mb, variant_extras(manifest.options))


def label_of_ranks(labels: Sequence[str]) -> str:
    """Return one label for a run of several files: ``job_rank{0-7}`` if their labels differ in one number only.

    Otherwise it is the first label and the number of further ones.
    """
    names = list(dict.fromkeys(labels))
    if len(names) == 1:
        return names[0]
    tokens = [re.split(r"(\d+)", name) for name in names]  # texts and numbers in turns
    if len({len(parts) for parts in tokens}) == 1:
        differ = [place for place, parts in enumerate(zip(*tokens, strict=True)) if len({*parts}) > 1]
        if len(differ) == 1 and differ[0] % 2:  # texts are at even places, numbers at odd ones
            numbers = sorted(int(parts[differ[0]]) for parts in tokens)
            return "".join([*tokens[0][: differ[0]], f"{{{format_ranges(numbers, ',')}}}", *tokens[0][differ[0] + 1 :]])
    return f"{names[0]} and {len(names) - 1} more"


def device_of(devices: Iterable[str]) -> str:
    """Return the device of a run from those of its files: ``cpu`` only if no file has another.

    Some files of a GPU job may hold no work of a device.
    """
    return max(devices, default="cpu")  # in the order of the alphabet "cpu" comes before "cuda" and "rocm"


def distinct_names(files: Iterable[Path]) -> dict[Path, str]:
    """Return a name for each file: its file name, with its last folders if several files have the same file name."""
    alike: dict[str, set[Path]] = {}
    for file in files:
        alike.setdefault(file.name, set()).add(file)
    return {file: name for same in alike.values() for file, name in distinct_ends(same).items()}


def distinct_ends(paths: Collection[Path]) -> dict[Path, str]:
    """Return for each path its last parts, as few as distinguish all paths: ``before/train``, ``after/train``."""
    parts = 1
    while len({path.parts[-parts:] for path in paths}) < len(paths):
        parts += 1
    return {path: str(Path(*path.parts[-parts:])) for path in paths}


def format_ranges(numbers: Sequence[int], between: str = ", ") -> str:
    """Return ascending numbers as ranges: ``1-3, 5`` for 1, 2, 3, 5; ``between`` stands between two ranges."""
    runs: list[list[int]] = []  # first number and, if it is another, last number of each range
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return between.join("-".join(map(str, run)) for run in runs)


def caveats_of(manifest: Manifest) -> tuple[Caveat, ...]:
    """Return why the figures of a run are not representative; empty if they are."""
    caveats = []
    sharing = manifest.options.get(RANKS_PER_GPU)
    if isinstance(sharing, int) and sharing > 1:
        caveats.append(Caveat.SHARED_GPU)
    if manifest.world_size == 1:
        caveats.append(Caveat.ONE_RANK)
    return tuple(caveats)


def in_variant_order(items: Sequence[Item], manifest_of: Callable[[Item], Manifest | None]) -> list[Item]:
    """Return runs sorted by variant, bucket size and options; in their given order if a variant is unknown.

    ``manifest_of`` returns the manifest of an item, ``None`` if it has none.
    """
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
    """Write a ``run.json``; raises as :func:`ddp_prof.atomic_file.atomic_write`."""
    record = {**asdict(manifest), "caveats": [caveat.value for caveat in caveats_of(manifest)]}
    if manifest.final_loss is not None and not math.isfinite(manifest.final_loss):
        record["final_loss"] = None
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load_manifest(path: Path) -> Manifest | None:
    """Return the manifest at a path; ``None`` if there is none.

    Raises TraceError if the file is no ``run.json`` of this package, or contradicts itself.
    """
    if not is_file(path):
        return None
    import msgspec

    try:
        data = read_at_most(path, _MOST_BYTES, "a run.json of ddp_prof", "delete it or capture the run again")
        manifest = msgspec.json.decode(data, type=Manifest)
        problem = _problem(manifest)
    except RecursionError:
        problem = "nested too deep"
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = str(error)
    if problem:
        raise TraceError(path, f"not a run.json of ddp_prof ({problem})", "delete it or capture the run again")
    return manifest


def _problem(manifest: Manifest) -> str | None:
    """Describe the first value of a manifest that cannot be right; ``None`` if there is none.

    That is a number or a text beyond its limits, or buckets that do not fit the parameters. The types are right.
    """
    # Numbers: not negative, and at least one rank.
    for name in ("world_size", "steps", "warmup", "batch_size", "seq_len", "bucket_size_mb"):
        number = getattr(manifest, name)
        most = MOST_RANKS if name == "world_size" else _MOST
        # ``name == "world_size"`` is 1 for the world size and 0 for all others: the least value.
        if number is not None and not (name == "world_size") <= number < most:
            return f"{name} is {number:g}"
    # Texts must not be too long.
    for name in ("variant", "backend", "device", "model_size", "profiler", "created"):
        if len(getattr(manifest, name) or "") > _LONGEST:
            return f"{name} is longer than {_LONGEST} characters"
    for name in ("comm_hook", "compression"):
        if len(str(manifest.options.get(name))) > _LONGEST:
            return f"{name} is longer than {_LONGEST} characters"
    buckets = manifest.options.get("buckets") or []
    if not isinstance(buckets, list):
        return "buckets are no list"
    # Buckets are lists of positions among the trained parameters, each in one bucket at most.
    free = set(range(sum(parameter.requires_grad for parameter in manifest.parameters)))
    for index, bucket in enumerate(buckets):
        if not isinstance(bucket, list) or not all(isinstance(position, int) for position in bucket):
            return f"bucket {index} is no list of positions"
        if not free.issuperset(bucket):
            return f"bucket {index} holds a parameter that does not exist or is in another bucket"
        free.difference_update(bucket)
    return None
