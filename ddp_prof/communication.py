"""Tells by a kernel's name to which communication library it belongs, and by any name which operation it stands for.

Names of several kinds stand for an operation: kernels (``ncclDevKernel_AllReduce_...``), ranges of torch
(``nccl:all_reduce``), calls of NCCL (``ncclAllReduce``), operators (``c10d::allreduce_``), and what Kineto records
with a kernel (``_allgather_base``). So one list of words serves all of them, and a library only adds words of its own.

A kernel that belongs to none of :data:`LIBRARIES` counts as compute, unless torch.profiler recorded a collective's
arguments with it, or the user names it with ``--comm-pattern``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"
BROADCAST, REDUCE, GATHER, SCATTER, BARRIER = "broadcast", "reduce", "gather", "scatter", "barrier"
POINT_TO_POINT = "send_recv"
PEER_COPY = "peer_copy"
"""A copy from one device to another."""
DEVICE_BARRIER = "device_barrier"
"""A kernel in which devices wait for each other, for example around copies. ``dist.barrier()`` does not launch it."""
NOTIFY = "notify"
"""A kernel that prepares a collective and is a part of it, such as DeepEP's kernel that tells peers the sizes."""

OPERATIONS = (
    *(NOTIFY, BARRIER, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, POINT_TO_POINT, GATHER, SCATTER),
    *(REDUCE, PEER_COPY, DEVICE_BARRIER),
)
"""All known operations; tables store an index into this tuple."""

REDUCTIONS = (ALL_REDUCE, REDUCE_SCATTER, REDUCE)
"""Operations that add values up, so they cannot be made of copies alone."""

Words = Sequence[tuple[str, str | None]]
"""Pairs of a word and the operation that it stands for; ``None``: the operation is not known.

A word is looked for in the letters of a name: in lower case, without digits, underscores and all else.
"""

_COMMON: Words = (
    ("allreducebarrier", BARRIER),  # nccl:all_reduce_barrier
    ("allreduce", ALL_REDUCE),
    ("allgather", ALL_GATHER),
    ("reducescatter", REDUCE_SCATTER),
    ("alltoall", ALL_TO_ALL),
    ("broadcast", BROADCAST),
    ("bcast", BROADCAST),
    ("sendrecv", POINT_TO_POINT),
    ("ncclsend", POINT_TO_POINT),
    ("ncclrecv", POINT_TO_POINT),
    ("gather", GATHER),
    ("scatter", SCATTER),
    ("barrier", BARRIER),
    ("reduce", REDUCE),
)
"""Words of all libraries. The first word that a name holds counts, so a longer word stands before the words in it."""


@dataclass(frozen=True)
class Library:
    """Kernels of a communication library.

    Attributes:
        name: The library, and which of its kernels these are.
        pattern: Regular expression that is found in the names of these kernels; case is ignored.
        examples: For each rule a kernel's name and the operation that it stands for.
        seen: Where the names come from.
        words: Words of this library; they count before the common words.
        otherwise: The operation of a name without any known word.
    """

    name: str
    pattern: str
    examples: dict[str, str | None]
    seen: str
    words: Words = field(default=())
    otherwise: str | None = None

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.IGNORECASE)

    def has(self, kernel: str) -> bool:
        """Whether a kernel with this name belongs to the library."""
        return self._expression.search(kernel) is not None

    def operation_of(self, kernel: str) -> str | None:
        """Return the operation that a name of this library stands for; ``None`` if it is not known."""
        letters = _letters(kernel)
        found = (operation for word, operation in (*self.words, *_COMMON) if word in letters)
        return next(found, self.otherwise)


ONE_RANK = "oneRankReduce"
"""NCCL's kernel for a reduction in a communicator of one rank: it moves nothing to another rank."""

_OF_SOURCE = "the library's source"
_OF_TRACES = "published traces"

LIBRARIES = (
    Library(
        "NCCL 2.27 symmetric",
        r"ncclSymDevKernel_",
        {"ncclSymDevKernel_AllReduce_AGxLL_R_sum_f32": ALL_REDUCE},
        _OF_SOURCE,
    ),
    Library(
        "NCCL >= 2.28 symmetric",
        r"ncclSymkDevKernel_",
        {"ncclSymkDevKernel_AllGather_LL": ALL_GATHER},
        _OF_SOURCE,
    ),
    Library(
        "NCCL >= 2.19, RCCL",
        r"ncclDevKernel_",
        {
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": ALL_REDUCE,
            "ncclDevKernel_Generic(ncclDevComm*, unsigned long, ncclWork*)": None,
        },
        _OF_TRACES,
    ),
    Library(
        "NCCL 2.8 to 2.18",
        r"ncclKernel_",
        {"ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)": POINT_TO_POINT},
        _OF_TRACES,
    ),
    Library(
        "NCCL <= 2.7",
        r"(?<![A-Za-z])nccl\w{1,200}Kernel",
        {"ncclAllReduceRingLLKernel_sum_f32(ncclColl)": ALL_REDUCE},
        _OF_SOURCE,
    ),
    Library(
        "NCCL, one rank",
        ONE_RANK,
        {"void oneRankReduce<FuncPreMulSum<float>>(void*, void*, ulong)": ALL_REDUCE},
        _OF_SOURCE,
        words=[("", ALL_REDUCE)],
    ),
    Library("RCCL", r"rcclGenericKernel", {"rcclGenericKernel_1(ncclDevComm*)": None}, _OF_TRACES),
    Library("MSCCL", r"mscclKernel", {"mscclKernel_Sum_half_LL_false(ncclDevComm*)": None}, _OF_TRACES),
    Library(
        "MCCL",
        r"(?<![A-Za-z])mcclKernel_",
        {"mcclKernel_AllReduce_RING_SIMPLE_Sum___mt_bfloat16(mcclWorkElem)": ALL_REDUCE},
        _OF_TRACES,
    ),
    Library(
        "PyTorch symmetric memory",
        r"multimem_\w{0,200}(?:reduce|gather)",
        {
            "multimem_all_gather_kernel<16>(...)": ALL_GATHER,
            "void c10d::symmetric_memory::multimem_all_reduce_kernel<c10::BFloat16, 16>(...)": ALL_REDUCE,
        },
        _OF_TRACES,
    ),
    Library(
        "PyTorch symmetric memory, barriers",
        r"c10d::symmetric_memory::\w{0,200}(?:barrier|signal)",
        {
            "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int)": DEVICE_BARRIER,
            "c10d::symmetric_memory::wait_signal_kernel(unsigned int**, int, int)": None,
        },
        _OF_TRACES,
        words=[("barrier", DEVICE_BARRIER)],
    ),
    Library(
        "PyTorch symmetric memory, NVSHMEM",
        r"c10d::nvshmem_extension::",
        {"c10d::nvshmem_extension::allToAllV(void*, void*, long*, long*)": ALL_TO_ALL},
        _OF_SOURCE,
    ),
    Library(
        "PyTorch symmetric memory, TensorRT-LLM",
        r"(?:one|two)_?shot_?all_?reduce",
        {"void two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16>(...)": ALL_REDUCE},
        _OF_SOURCE,
    ),
    Library(
        "vLLM, aiter",
        r"cross_device_(?:reduce|all_gather|store)|aiter::(?:allgather|reduce_scatter|ar_ll128)_",
        {
            "void vllm::cross_device_reduce_1stage<half>()": ALL_REDUCE,
            "void sglang::cross_device_reduce_scatter<__half, 8>(...)": REDUCE_SCATTER,
            "void aiter::allgather_lastdim<std::bfloat16_t, 4>(aiter::RankData*, ...)": ALL_GATHER,
            "void aiter::ar_ll128_vec_unroll2<std::bfloat16_t, 4, 512>(...)": ALL_REDUCE,
        },
        _OF_TRACES,
        words=[
            ("reducescatter", REDUCE_SCATTER),
            ("crossdevicereduce", ALL_REDUCE),
            ("aiterarll", ALL_REDUCE),
        ],
    ),
    Library(
        "QuickReduce",
        r"quickreduce::",
        {"quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot<...>>()": ALL_REDUCE},
        _OF_SOURCE,
    ),
    Library(
        "FlashInfer, TensorRT-LLM",
        r"allreduce_fusion|moeA2A(?:Dispatch|Combine)|(?:helix|moe)AllToAllKernel|mixed_comm::|rmsNormLamport"
        r"|minimax_reduce_\w{0,200}lamport",
        {
            "void allreduce_fusion_kernel_oneshot_lamport<...>()": ALL_REDUCE,
            "void flashinfer::trtllm_mnnvl_allreduce::rmsNormLamport<__nv_bfloat16, __nv_bfloat16, 1>(...)": ALL_REDUCE,
            "void flashinfer::minimax_ar::minimax_reduce_rms_kernel_lamport<__half, 4>(...)": ALL_REDUCE,
            "void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel(...)": ALL_TO_ALL,
            "void tensorrt_llm::kernels::moe_comm::moeA2ACombineKernel<...>(...)": ALL_TO_ALL,
        },
        _OF_SOURCE,
        words=[("minimaxreduce", ALL_REDUCE), ("aadispatch", ALL_TO_ALL), ("aacombine", ALL_TO_ALL)],
    ),
    Library(
        "SGLang",
        r"all_reduce_(?:one|two)_shot_(?:push_)?kernel|parallel_qknorm_across_head|reduce_scatter_res_kernel"
        r"|(?<![A-Za-z_])all_gather_kernel",
        {
            "void (anonymous namespace)::all_reduce_one_shot_push_kernel<__nv_bfloat16, 8u, true>(...)": ALL_REDUCE,
            "void (anonymous namespace)::parallel_qknorm_across_head<...>(...)": ALL_REDUCE,
        },
        _OF_TRACES,
        words=[("parallelqknorm", ALL_REDUCE)],
    ),
    Library(
        "UCC",
        r"ucc_(?:ec_cuda|eee_task)_",
        {"executor_start(ucc_ec_cuda_executor_state*, int*)": None},
        _OF_SOURCE,
    ),
    Library(
        "Mooncake",
        r"mooncake::",
        {
            "mooncake::(anonymous namespace)::allReduceExecutorKernel(mooncake::AllReduceExecutorArgs)": ALL_REDUCE,
            "void mooncake::dispatch<4, 8, 7168, 8>(mooncake::DispatchKernelArgs)": ALL_TO_ALL,
            "void mooncake::combine<4, 8, 7168, 8>(mooncake::CombineKernelArgs)": ALL_TO_ALL,
        },
        _OF_SOURCE,
        words=[("mooncakedispatch", ALL_TO_ALL), ("mooncakecombine", ALL_TO_ALL)],
    ),
    Library(
        "XLA",
        r"(?:AllReduce|RaggedAllToAll(?:Device)?|MultiGpuBarrier)KernelImpl",
        {
            "void stream_executor::gpu::RaggedAllToAllKernelImpl<8l>(...)": ALL_TO_ALL,
            "void stream_executor::gpu::MultiGpuBarrierKernelImpl<...>(...)": DEVICE_BARRIER,
        },
        _OF_TRACES,
        words=[("barrier", DEVICE_BARRIER)],
    ),
    Library(
        "NVSHMEM",
        r"nvshmemi_|_on_stream_kernel",
        {
            "void barrier_on_stream_kernel_threadgroup<1>(int, int)": DEVICE_BARRIER,
            "nvshmemi_proxy_quiet_entrypoint()": None,
        },
        _OF_SOURCE,
        words=[("barrier", DEVICE_BARRIER)],
    ),
    Library(
        "MSCCL++",
        r"mscclpp",
        {"void allreduce_simple<__half>(mscclpp::SmChannelDeviceHandle *, ...)": ALL_REDUCE},
        _OF_SOURCE,
    ),
    Library(
        "Transformer Engine",
        r"userbuffers_",
        {"kuserbuffers_pushsend(int*, int*, int4*, int4*, int)": None},
        _OF_SOURCE,
    ),
    Library(
        "oneCCL",
        r"oneccl",
        {"oneccl_reduce_base<float, 2, 16, 1, 1, 2>": None},
        _OF_TRACES,
        words=[("onecclreducebase", None)],  # all-reduces have this name, too
    ),
    Library(
        "DeepEP, UCCL",
        # The kernel that counts tokens before a dispatch only computes.
        r"(?:::ep|deep_ep(?:::legacy)?|uccl)::(?:intranode|internode|internode_ll|elastic|ep|bucket|pp|engram|comm)::"
        r"(?!get_dispatch_layout)",
        {
            "void deep_ep::intranode::dispatch<8, 768>(...)": ALL_TO_ALL,
            "void deep_ep::elastic::combine_reduce_epilogue_impl<...>(...)": ALL_TO_ALL,
            "void deep_ep::ep::reduce_grads_impl<...>(...)": None,
            "void deep_ep::intranode::notify_dispatch<8>(...)": NOTIFY,
            "void deep_ep::internode::cached_notify<false>(...)": NOTIFY,
            "void deep_ep::elastic::dispatch_deterministic_prologue_impl<...>(...)": NOTIFY,
            "void deep_ep::bucket::nvlink_all_reduce<8, 16, 1024, 1l, false, 0>(...)": ALL_REDUCE,
            "void deep_ep::intranode::barrier<8>(...)": DEVICE_BARRIER,
            "void deep_ep::internode_ll::clean_low_latency_buffer<256>(...)": DEVICE_BARRIER,
            "void deep_ep::pp::pp_send_recv<...>(...)": POINT_TO_POINT,
        },
        _OF_SOURCE,
        words=[
            ("notify", NOTIFY),
            ("prologue", NOTIFY),
            ("barrier", DEVICE_BARRIER),
            ("cleanlowlatencybuffer", DEVICE_BARRIER),
            ("reducegrads", None),
            ("dispatch", ALL_TO_ALL),
            ("combine", ALL_TO_ALL),  # before the common word within combine_reduce_epilogue
        ],
        otherwise=ALL_TO_ALL,
    ),
    Library(
        "NIXL EP",
        r"nixl_ep::(?:ep_kernels|ht)::(?!get_dispatch_layout)",
        {
            "void nixl_ep::ep_kernels::dispatch<true, false, 7168>(...)": ALL_TO_ALL,
            "void nixl_ep::ep_kernels::combine<false, 7168>(...)": ALL_TO_ALL,
            "void nixl_ep::ht::notify_dispatch<false, 2>(...)": NOTIFY,
        },
        _OF_SOURCE,
        words=[("notify", NOTIFY), ("dispatch", ALL_TO_ALL), ("combine", ALL_TO_ALL)],
        otherwise=ALL_TO_ALL,
    ),
    Library(
        "pplx",
        r"a2a_(?:dispatch|combine)_(?:send|recv)_kernel",
        {"void a2a_combine_recv_kernel<16u, 8u, ...>(...)": ALL_TO_ALL},
        _OF_SOURCE,
        words=[("", ALL_TO_ALL)],
    ),
    Library(
        "HybridEP",
        r"hybrid_ep::(?:dispatch|combine|device_sync)_kernel",
        {
            "void hybrid_ep::dispatch_kernel<...>(hybrid_ep::dispatch_kernel_param_t<unsigned short>)": ALL_TO_ALL,
            "hybrid_ep::device_sync_kernel<8>(...)": DEVICE_BARRIER,
        },
        _OF_TRACES,
        words=[("devicesync", DEVICE_BARRIER), ("", ALL_TO_ALL)],
    ),
    Library(
        "MORI",
        r"(?<![A-Za-z])Ep(?:Dispatch|Combine)\w{0,200}Kernel",
        {"EpCombineIntraNodeKernel_bf16_nop2p": ALL_TO_ALL},
        _OF_TRACES,
        words=[("", ALL_TO_ALL)],
    ),
    Library(
        "HCCL",
        r"(?<![A-Za-z])h(?:com_|ccl)",
        {
            "hcom_allReduce__586_0_1": ALL_REDUCE,
            "hcom_send__212_2_1": POINT_TO_POINT,
            "hcom_receive__212_3_1": POINT_TO_POINT,
        },
        _OF_TRACES,
        words=[("hcomsend", POINT_TO_POINT), ("hcomreceive", POINT_TO_POINT)],
    ),
    Library(
        "libraries of their own namespace",
        r"(?<![A-Za-z])(?:r|h|m|x|one)?ccl::",
        {"void ccl::v1::allgatherv_kernel<float>(...)": ALL_GATHER, "void rccl::AllReduceKernel(...)": ALL_REDUCE},
        "none yet: any kernel in a namespace that is called as such a library is taken for one of it",
    ),
    # The name begins so: block_all_reduce_kernel reduces within the device.
    Library(
        "kernels named by their collective",
        r"(?<![A-Za-z0-9_])_*all_?(?:reduce|gather|to_?all)v?_?(?:\w{0,200}_)?kernel",
        {
            "void allreduce_kernel<float, 8>(RankPtrs, RankSignals, ...)": ALL_REDUCE,
            "all_to_all_v_kernel": ALL_TO_ALL,
        },
        _OF_SOURCE,
    ),
    # At the start of a word: AsyncClear and FuncClamp contain the four letters, too.
    Library(
        "other NCCL descendants",
        r"(?-i:(?<![A-Za-z])nccl|Nccl|NCCL)",
        {"void my_nccl_all_to_all<float>()": ALL_TO_ALL, "NCCL_AllReduce_custom": ALL_REDUCE},
        "none yet: any kernel that names NCCL is taken for one",
    ),
)
"""All known libraries. The first one that has a kernel counts, so a general pattern comes after the special ones."""
MOST_NAMES = 1 << 13
"""The number of names for which the result is kept: in a run of many ranks each file has the same names."""


@lru_cache(MOST_NAMES)
def library_of(kernel: str) -> Library | None:
    """Return the communication library to which a kernel belongs, by its name; ``None`` if it computes."""
    return next((library for library in LIBRARIES if library.has(kernel)), None)


@lru_cache(MOST_NAMES)
def operation_of(name: str) -> str | None:
    """Return the operation that a name stands for; ``None`` if unknown, as for ``ncclDevKernel_Generic``.

    >>> operation_of("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'all_reduce'
    """
    if library := library_of(name):
        return library.operation_of(name)
    letters = _letters(name)
    if letters in ("send", "recv"):
        return POINT_TO_POINT
    return next((operation for word, operation in _COMMON if word in letters), None)


def _letters(name: str) -> str:
    """Return only the letters of a name, in lower case."""
    return re.sub(r"[^a-z]", "", name.lower())


GLOO = "gloo:"
"""Start of the names of gloo's events in torch.profiler."""
NCCL_RANGE = re.compile(
    r"[nxm]ccl:_?(all|reduce|broadcast|gather|scatter|coalesced|send|recv)|nccl(All|Reduce|Broadcast|Send|Recv)", re.I
)
"""Names of the ranges that NCCL, or torch for it or for the libraries of Intel and Moore Threads, opens around
a collective's call."""
