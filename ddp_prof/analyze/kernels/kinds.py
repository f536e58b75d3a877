"""What kind of work a compute kernel does, by its name: the first row of :data:`KINDS` that is found in it."""

from __future__ import annotations

import re
from typing import NamedTuple


class KernelKind(NamedTuple):
    """A kind of work, a pattern for the names of its kernels, one name as an example."""

    name: str
    pattern: str
    example: str


KINDS = (
    KernelKind(
        "attention", r"flash_|fmha|attention|attn|sdpa", "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>()"
    ),
    KernelKind("optimizer", r"multi_tensor_apply|adam|sgd_|lamb_|adagrad", "multi_tensor_apply_kernel<AdamFunctor>()"),
    KernelKind("normalization", r"norm_|_norm|cudnn::bn_|batchnorm", "cudnn::bn_bw_1C11_kernel_new<float>()"),
    KernelKind(
        "layout",
        r"nchwToNhwc|nhwcToNchw|transpose|permute|copy_kernel|CatArray",
        "void cudnn::ops::nchwToNhwcKernel<float>()",
    ),
    KernelKind(
        "convolution", r"conv(?!er[st])|wgrad|dgrad|fprop|winograd|cudnn", "sm80_xmma_wgrad_implicit_gemm_f16_execute"
    ),
    KernelKind("matrix product", r"gemm|gemv|cutlass|cublas|nvjet|^bmm_|_mm_|dot_kernel", "ampere_sgemm_128x64_nn"),
    KernelKind("embedding", r"embedding|index|gather|scatter", "void at::native::indexFuncLargeIndex<float>()"),
    KernelKind("reduction", r"reduce|softmax|triton_red|triton_per", "void at::native::reduce_kernel<512, 1>()"),
    KernelKind("elementwise", r"elementwise|triton_poi|dropout|fill", "vectorized_elementwise_kernel<4>()"),
)
OTHER = "other"
COMMUNICATION = "communication"
UNNAMED = "unnamed"

_COMPILED = [(kind.name, re.compile(kind.pattern, re.IGNORECASE)) for kind in KINDS]


def kind_of_compute(name: str) -> str:
    """The kind of a kernel that computes."""
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), OTHER)
