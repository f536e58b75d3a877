"""The names of a trace, and the category of a kernel by its name.

A kernel communicates if its name matches a pattern of :data:`COMMUNICATION_KERNELS`; else it computes, unless
torch.profiler recorded a collective's arguments with it. A kernel without a name is UNKNOWN. The names of copies,
memory sets, graph launches, streams and threads do not matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2s
from typing import Any

import numpy as np

from ddp_prof.errors import TraceError
from ddp_prof.ingest.sqlite_columns import SqliteFile, integer_array
from ddp_prof.trace import UNKNOWN, Category, Ints, SyncKind, distinct_rows

MOST_LETTERS = 4096
"""Longer names are cut: the time of some regular expressions grows with the square of the length."""


class NameTable(dict[str, int]):
    """The names of a trace, each string once, numbered in the order of arrival. It becomes ``Trace.names``."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__((name, number) for number, name in enumerate(names))

    def intern(self, name: str) -> int:
        """Return the number of a string, a new one for a new string. A digest replaces the end of a long string."""
        if len(name) > MOST_LETTERS:
            name = f"{name[: MOST_LETTERS - 20]}…{blake2s(name.encode(errors='replace'), digest_size=8).hexdigest()}"
        return self.setdefault(name, len(self))

    def fill_unknown(self, name_id: Ints, name: str) -> Ints:
        is_unknown = name_id == UNKNOWN
        return np.where(is_unknown, self.intern(name), name_id) if is_unknown.any() else name_id

    def intern_ids(self, string_ids: Ints, strings: Mapping[int, str], shorten: Callable[[str], str] = str) -> Ints:
        """Return the numbers of the strings that a column refers to, ``UNKNOWN`` for ids without a string."""
        first, which = distinct_rows(string_ids)
        texts = [shorten(strings.get(value, "")) for value in string_ids[first].tolist()]
        return np.array([self.intern(text) if text else UNKNOWN for text in texts], np.int64)[which]


def read_strings(file: SqliteFile) -> dict[int, str]:
    """Return the strings of an export by id, without the empty ones.

    Raises TraceError if one id has two strings, as in a database that is put together from several exports.
    """
    rows = file.rows("SELECT id, value FROM StringIds") if file.has_columns("StringIds", "id", "value") else []
    strings: dict[int, str] = {}
    for key, text in rows:
        if isinstance(key, int) and isinstance(text, str) and text and strings.setdefault(key, text) != text:
            reason = f"two strings have the number {key}: it is put together from several exports"
            raise TraceError(file.path, reason, "give each export as a file of its own")
    return strings


def intern_texts(column: Any, names: NameTable) -> Ints:
    """Return indices into ``names`` for an Arrow array of text, ``UNKNOWN`` for an empty text."""
    import pyarrow

    # Not pyarrow.compute: importing it takes longer than all of this.
    from pyarrow._compute import call_function

    encoded = call_function("dictionary_encode", [column])
    texts = [text.decode(errors="replace") for text in encoded.dictionary.view(pyarrow.binary()).to_pylist()]
    index = np.array([names.intern(text) if text else UNKNOWN for text in texts], np.int64)
    return index[integer_array(encoded.indices)]


COMMUNICATION_KERNELS = {
    "NCCL 2.27 symmetric": r"ncclSymDevKernel_",
    "NCCL >= 2.28 symmetric": r"ncclSymkDevKernel_",
    "NCCL >= 2.19": r"ncclDevKernel_",
    "NCCL 2.8 to 2.18": r"ncclKernel_",
    "NCCL <= 2.7": r"(?<![A-Za-z])nccl\w{1,200}Kernel",
    "NCCL, one rank": r"oneRankReduce",
    "RCCL": r"rcclGenericKernel",
    "MSCCL": r"mscclKernel",
    "MCCL": r"(?<![A-Za-z])mcclKernel_",
    # At the start of a word: AsyncClear and FuncClamp contain the four letters, too.
    "other NCCL descendants": r"(?-i:(?<![A-Za-z])nccl|Nccl|NCCL)",
    "PyTorch symmetric memory": r"multimem_\w{0,200}(?:reduce|gather)",
    "PyTorch symmetric memory, barriers": r"c10d::symmetric_memory::\w{0,200}(?:barrier|signal)",
    "PyTorch symmetric memory, NVSHMEM": r"c10d::nvshmem_extension::",
    "PyTorch symmetric memory, TensorRT-LLM": r"(?:one|two)_?shot_?all_?reduce",
    "vLLM, aiter": r"cross_device_(?:reduce|all_gather|store)|aiter::(?:allgather|reduce_scatter|ar_ll128)_",
    "QuickReduce": r"quickreduce::",
    "FlashInfer, TensorRT-LLM": (
        r"allreduce_fusion|moeA2A(?:Dispatch|Combine)|(?:helix|moe)AllToAllKernel|mixed_comm::|rmsNormLamport"
        r"|minimax_reduce_\w{0,200}lamport"
    ),
    "SGLang": (
        r"all_reduce_(?:one|two)_shot_(?:push_)?kernel|parallel_qknorm_across_head|reduce_scatter_res_kernel"
        r"|(?<![A-Za-z_])all_gather_kernel"
    ),
    "UCC": r"ucc_(?:ec_cuda|eee_task)_",
    "Mooncake": r"mooncake::",
    "XLA": r"(?:AllReduce|RaggedAllToAll(?:Device)?|MultiGpuBarrier)KernelImpl",
    "NVSHMEM": r"nvshmemi_|_on_stream_kernel",
    "MSCCL++": r"mscclpp",
    "Transformer Engine": r"userbuffers_",
    "oneCCL": r"oneccl",
    # The kernel that counts tokens before a dispatch only computes.
    "DeepEP, UCCL": (
        r"(?:::ep|deep_ep(?:::legacy)?|uccl)::(?:intranode|internode|internode_ll|elastic|ep|bucket|pp|engram|comm)::"
        "(?!get_dispatch_layout)"
    ),
    "NIXL EP": r"nixl_ep::(?:ep_kernels|ht)::(?!get_dispatch_layout)",
    "pplx": r"a2a_(?:dispatch|combine)_(?:send|recv)_kernel",
    "HybridEP": r"hybrid_ep::(?:dispatch|combine|device_sync)_kernel",
    "MORI": r"(?<![A-Za-z])Ep(?:Dispatch|Combine)\w{0,200}Kernel",
}
"""Patterns for names of communication kernels, by library; case is ignored."""

WAITING_CALLS = {
    "StreamWaitEvent": SyncKind.STREAM_WAIT,
    "EventSynchronize": SyncKind.HOST_WAIT_EVENT,
    "StreamSynchronize": SyncKind.HOST_WAIT_STREAM,
    "DeviceSynchronize": SyncKind.HOST_WAIT_DEVICE,
    "CtxSynchronize": SyncKind.HOST_WAIT_DEVICE,
    "Memcpy": SyncKind.COPY,
}
"""API calls by the beginning of their names, which follows ``cuda``, ``cu``, ``hip`` or ``musa``."""


def kernel_categories(names: Iterable[str], comm_patterns: Iterable[str] = ()) -> Ints:
    """Return COMMUNICATION or COMPUTE for each name, and UNKNOWN at the last position, which is index -1."""
    patterns = (*COMMUNICATION_KERNELS.values(), *comm_patterns)
    communicating = re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.IGNORECASE)
    found = (Category.COMMUNICATION if communicating.search(name) else Category.COMPUTE for name in names)
    return np.array([*found, Category.UNKNOWN], np.int64)
