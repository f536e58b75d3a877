"""Results as bytes, on their way between processes: MessagePack, which carries data and no code.

What comes out is a number, a text, an array, a path or one of the classes named here, whatever the bytes are.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

_ANALYZE = "ddp_prof.analyze"
_HOMES = {
    "ddp_prof.runs.report": ("LoadOptions", "Task", "Failure"),
    "ddp_prof.runs.pages": ("PagesTask",),
    "ddp_prof.manifest": ("Manifest", "Parameter", "HostTimes", "MessageTimes", "Caveat"),
    f"{_ANALYZE}.intervals": ("Intervals",),
    f"{_ANALYZE}.core.device_phases": ("DevicePhases",),
    f"{_ANALYZE}.core.blocking": ("DependencyCoverage",),
    f"{_ANALYZE}.core.step_times": ("StepTimes",),
    f"{_ANALYZE}.overlap.coverage": ("Attribution",),
    f"{_ANALYZE}.overlap.overlap": ("TraceOverlap", "RankOverlap", "StepOverlap", "StepLength"),
    f"{_ANALYZE}.collectives.timing": ("RankCollectives", "CollectiveTimings"),
    f"{_ANALYZE}.collectives.critical_path": ("RankChains",),
    f"{_ANALYZE}.dependencies.critical_path": ("Chains",),
    f"{_ANALYZE}.doctor.evidence": ("RankFacts",),
    f"{_ANALYZE}.collectives.run_analysis": ("RunAnalysis",),
    f"{_ANALYZE}.quality.inventory": ("TraceInventory", "ProcessInventory"),
    f"{_ANALYZE}.variants.contention": ("KernelSamples",),
    f"{_ANALYZE}.kernels.device_use": ("RankUse",),
    f"{_ANALYZE}.kernels.hidden": ("HiddenTime",),
    f"{_ANALYZE}.kernels.idle": ("IdleTime",),
    f"{_ANALYZE}.kernels.kernel_times": ("KernelRuns",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_RESULT, _ARRAY, _PATH, _LIST = range(4)
"""What an extension of MessagePack holds."""


def encode(value: Any) -> bytes:
    """A result as bytes.

    Raises:
        TypeError: It holds something that is no result.
    """
    return msgspec.msgpack.encode(_plain(value))


def decode(data: bytes, paths: Mapping[str, Path] | None = None) -> Any:
    """The result that :func:`encode` made bytes of.

    Args:
        data: The bytes.
        paths: What some paths are called here.
    """

    def extended(code: int, held: memoryview) -> Any:
        inner = _restored(decoder.decode(held))
        if code == _RESULT:
            name, *values = inner
            return resolve_name(f"{_HOME_OF[name]}:{name}")(*values)
        if code == _ARRAY:
            kind, shape, content = inner
            return np.frombuffer(content, kind).reshape(shape)
        return _List(inner) if code == _LIST else (paths or {}).get(inner) or Path(inner)

    decoder = msgspec.msgpack.Decoder(ext_hook=extended)
    return _restored(decoder.decode(data))


def _plain(value: Any) -> Any:
    """What MessagePack knows; an array of it is a tuple."""
    if value is None or type(value) in {bool, int, float, str, bytes}:
        return value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return _extension(_LIST, [_plain(item) for item in value])
    if isinstance(value, np.ndarray):
        return _extension(_ARRAY, [value.dtype.str, value.shape, value.tobytes()])
    if isinstance(value, Path):
        return _extension(_PATH, str(value))
    name = type(value).__name__
    if isinstance(value, Enum) and type(value).__module__ == _HOME_OF.get(name):
        return _extension(_RESULT, [name, value.value])
    if is_dataclass(value) and type(value).__module__ == _HOME_OF.get(name):
        return _extension(_RESULT, [name, *(_plain(getattr(value, field.name)) for field in fields(value))])
    raise TypeError(f"{name} is no result that is handed on")


def _extension(code: int, held: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(held))


class _List(tuple[Any, ...]):
    """A list, until the arrays round it are tuples."""


def _restored(value: Any) -> Any:
    if isinstance(value, _List):
        return list(value)
    if isinstance(value, list):
        return tuple(map(_restored, value))
    return {key: _restored(item) for key, item in value.items()} if isinstance(value, dict) else value
