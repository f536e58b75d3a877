from __future__ import annotations

import pytest

from ddp_prof.ingest.names import COMMUNICATION_KERNELS, KernelClassifier
from ddp_prof.trace import Category

CLASSIFIER = KernelClassifier()


@pytest.mark.parametrize("family", COMMUNICATION_KERNELS, ids=lambda family: family.origin)
def test_every_family_is_known_by_its_example(family) -> None:
    assert CLASSIFIER.category(family.example) is Category.COMMUNICATION


@pytest.mark.parametrize(
    "name",
    [
        "ncclAllReduceRingLLKernel_sum_f32(ncclColl)",
        "ncclSendRecvKernel_copy_i8",
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclDevKernel_Generic(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllGather_RING_LL",
        "ncclSymDevKernel_ReduceScatter_LD_sum_bf16",
        "ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_f32",
        "void (anonymous namespace)::oneRankReduce<(anonymous namespace)::FuncPreMulSum<float> >(void*, void*, ulong)",
        "void c10d::symmetric_memory::multimem_all_reduce_kernel<c10::BFloat16, 16>(...)",
        "void (anonymous namespace)::one_shot_all_reduce_kernel<float, 16, 8, false>(...)",
        "void aiter::cross_device_reduce_2stage<__half, 8>(...)",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_twoshot_sync<...>()",
        "void tensorrt_llm::twoShotAllReduceKernel<__half, (int)8>(...)",
        "void flashinfer::trtllm_mnnvl_allreduce::twoshot_allreduce_kernel<8, __nv_bfloat16>(...)",
        "void tensorrt_llm::kernels::mnnvl::oneshotAllreduceFusionKernel<8, __half>(...)",
        "quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot<__half, CodecQ4<__half, 4>, true>, __half>",
        "void multimem_one_shot_all_reduce_kernel<c10::BFloat16, 16>(...)",
        "_multimem_all_gather_kernel",
        "void sglang::cross_device_reduce_scatter<__half, 8>(...)",
        "void barrier_all_on_stream_kernel_threadgroup<(threadgroup_t)1>()",
        "void alltoall_on_stream_kernel<float>(int, float*, float const*, unsigned long)",
        "nvshmemi_proxy_quiet_entrypoint()",
        "void tensorrt_llm::kernels::moe_comm::moeA2ACombineKernel<...>(...)",
        "void deep_ep::internode_ll::combine<false, 7168>(...)",
        "void deep_ep::elastic::dispatch<...>(...)",
        "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int, int, int, int, int, int, int, int, int, void**)",
        "NCCL_AllReduce_custom",
        "void MyNcclAllGather<float>()",
    ],
)
def test_communication_is_known(name: str) -> None:
    assert CLASSIFIER.category(name) is Category.COMMUNICATION


@pytest.mark.parametrize(
    "name",
    [
        "ampere_sgemm_128x64_nn",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(...)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(...)",
        "void flash::flash_bwd_kernel<...>(...)",
        "void deep_ep::internode::get_dispatch_layout<256, 32, 8>(...)",
        "hipblaslt_gemm_kernel",
        "void combine_gradients(float*)",
        "void moe_dispatch_kernel<float>(...)",
        "one_shot_softmax_reduce",
        "void at::native::AsyncClearKernel(int*)",
        "void kernel<FuncClamp<float>>(float*)",
        "trunccluster_kernel",
        "",
    ],
)
def test_compute_is_not_taken_for_communication(name: str) -> None:
    assert CLASSIFIER.category(name) is Category.COMPUTE
