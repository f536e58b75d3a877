"""What an activity was for: the device's table says first, the kernel's name last.

A copy or a memory set is MEMORY and a graph launch OTHER whatever it is called. Only a kernel is classified by its
name, by the first row of :data:`COMMUNICATION_KERNELS` that is found in it; a kernel without a name is UNKNOWN.
Stream and thread names never count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ddp_prof.trace import Category, Ints


class KernelFamily(NamedTuple):
    """Kernels of one communication library: where they come from, a pattern for the kernels, one name as an example."""

    origin: str
    pattern: str
    example: str


COMMUNICATION_KERNELS = (
    KernelFamily("NCCL 2.27 symmetric", r"ncclSymDevKernel_", "ncclSymDevKernel_AllReduce_AGxLL_R_sum_f32"),
    KernelFamily("NCCL >= 2.28 symmetric", r"ncclSymkDevKernel_", "ncclSymkDevKernel_AllGather_LL"),
    KernelFamily("NCCL >= 2.19", r"ncclDevKernel_", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"),
    KernelFamily("NCCL 2.8 to 2.18", r"ncclKernel_", "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"),
    KernelFamily("NCCL <= 2.7", r"(?<![A-Za-z])nccl\w{1,200}Kernel", "ncclAllReduceRingLLKernel_sum_f32(ncclColl)"),
    KernelFamily("NCCL, one rank", r"oneRankReduce", "void oneRankReduce<FuncPreMulSum<float>>(void*, void*)"),
    KernelFamily("RCCL", r"rcclGenericKernel", "rcclGenericKernel_1(ncclDevComm*)"),
    KernelFamily("MSCCL", r"mscclKernel", "mscclKernel_Sum_half_LL_false(ncclDevComm*)"),
    # Not within a word: AsyncClear and FuncClamp hold the four letters, too.
    KernelFamily("other NCCL descendants", r"(?-i:(?<![A-Za-z])nccl|Nccl|NCCL)", "void my_nccl_all_to_all<float>()"),
    KernelFamily(
        "PyTorch symmetric memory", r"multimem_\w{0,200}(?:reduce|gather)", "multimem_all_gather_kernel<16>(...)"
    ),
    KernelFamily(
        "PyTorch symmetric memory, TensorRT-LLM",
        r"(?:one|two)_?shot_?all_?reduce",
        "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16>(...)",
    ),
    KernelFamily("vLLM, aiter", r"cross_device_(?:reduce|all_gather)", "void vllm::cross_device_reduce_1stage<half>()"),
    KernelFamily("QuickReduce", r"quickreduce::", "quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot<...>>()"),
    KernelFamily(
        "FlashInfer, TensorRT-LLM",
        r"allreduce_fusion|moeA2A(?:Dispatch|Combine)",
        "void allreduce_fusion_kernel_oneshot_lamport<...>()",
    ),
    KernelFamily("NVSHMEM", r"nvshmemi_|_on_stream_kernel", "void barrier_on_stream_kernel_threadgroup<1>(int, int)"),
    KernelFamily("MSCCL++", r"mscclpp", "void allreduce_simple<__half>(mscclpp::SmChannelDeviceHandle *, ...)"),
    KernelFamily("Transformer Engine", r"userbuffers_", "kuserbuffers_pushsend(int*, int*, int4*, int4*, int)"),
    KernelFamily("oneCCL", r"oneccl", "oneccl_reduce_base<float, 2, 16, 1, 1, 2>"),
    KernelFamily(
        "DeepEP",
        # What counts tokens before a dispatch only computes.
        r"(?:::|deep_)ep::(?:intranode|internode|internode_ll|elastic)::(?!get_dispatch_layout)",
        "void deep_ep::intranode::dispatch<8, 768>(...)",
    ),
)


class KernelClassifier:
    """Decides for kernel names whether they communicate, by the table and the user's own patterns."""

    def __init__(self, extra_patterns: Iterable[str] = ()) -> None:
        patterns = [*(family.pattern for family in COMMUNICATION_KERNELS), *extra_patterns]
        self._communication = re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.IGNORECASE)

    def categories(self, names: Sequence[str]) -> Ints:
        """The category of a kernel by the index of its name; UNKNOWN at the last position, which is index -1."""
        return np.array([*(self.category(name) for name in names), Category.UNKNOWN], np.int64)

    def category(self, name: str) -> Category:
        """COMMUNICATION where the name is known to communicate, else COMPUTE."""
        return Category.COMMUNICATION if self._communication.search(name) else Category.COMPUTE
