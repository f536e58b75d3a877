"""What communicates, and by which operation: each row of the table, and names that only look like one."""

from __future__ import annotations

import re

import pytest

from ddp_prof.communication import LIBRARIES, OPERATIONS, Library, library_of, operation_of
from ddp_prof.ingest.names import kernel_categories
from ddp_prof.trace import Category


def category_of(name: str) -> Category:
    return Category(kernel_categories([name])[0])


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_each_example_of_a_library_is_its_own_and_tells_its_operation(library: Library) -> None:
    assert library.examples
    assert library.seen
    for kernel, operation in library.examples.items():
        assert library_of(kernel) is library, f"an earlier row has {kernel}"
        assert operation_of(kernel) == operation
        assert category_of(kernel) is Category.COMMUNICATION


def test_each_rule_of_the_table_has_an_example() -> None:
    """So that no rule stands there whose last name went, and none is spelt so that it finds nothing."""
    for library in LIBRARIES:
        letters = [re.sub(r"[^a-z]", "", kernel.lower()) for kernel in library.examples]
        for word, operation in library.words:
            of_word = [kernel for kernel, text in zip(library.examples, letters, strict=True) if word in text]
            assert operation in [library.examples[kernel] for kernel in of_word], (library.name, word)
            assert operation is None or operation in OPERATIONS


def test_names_of_libraries_are_given_once() -> None:
    names = [library.name for library in LIBRARIES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclSymkDevKernel_ReduceScatter_LL", "reduce_scatter"),
        ("_allgather_base", "all_gather"),
        ("all_to_allv", "all_to_all"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "send_recv"),
        ("broadcast", "broadcast"),
        ("send", "send_recv"),
        ("nccl:send 0->1", "send_recv"),
        ("nccl:all_reduce_barrier, op_id = 7", "barrier"),
        ("nccl:coalesced", None),
        ("void vllm::cross_device_reduce_1stage<float, 2>(...)", "all_reduce"),
        ("void sglang::cross_device_reduce_scatter<__half, 8>(...)", "reduce_scatter"),
        ("void deep_ep::intranode::combine<__nv_bfloat16, 8>(...)", "all_to_all"),
        ("void deep_ep::intranode::barrier<8>(...)", "device_barrier"),
        ("hybrid_ep::combine_kernel<...>(...)", "all_to_all"),
        ("hybrid_ep::device_sync_kernel<8>(...)", "device_barrier"),
        ("EpCombineIntraNodeKernel_bf16_nop2p", "all_to_all"),
        ("void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel(...)", "all_to_all"),
        ("void a2a_combine_recv_kernel<16u, 8u, ...>(...)", "all_to_all"),
        ("void nixl_ep::ep_kernels::dispatch<true, false, 7168>(...)", "all_to_all"),
        ("void mooncake::combine<4, 8, 7168, 8>(mooncake::CombineKernelArgs)", "all_to_all"),
        ("void flashinfer::minimax_ar::minimax_reduce_rms_kernel_lamport<__half, 4>(...)", "all_reduce"),
        ("void deep_ep::bucket::nvlink_all_reduce<8, 16, 1024, 1l, false, 0>(...)", "all_reduce"),
        ("void (anonymous namespace)::all_reduce_one_shot_push_kernel<__nv_bfloat16, 8u, true>(...)", "all_reduce"),
        ("void stream_executor::gpu::MultiGpuBarrierKernelImpl<...>(...)", "device_barrier"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", None),
        ("oneccl_reduce_base<float, 2, 16, 1, 1, 2>", None),
    ],
)
def test_operations_are_told_from_names(name: str, operation: str | None) -> None:
    assert operation_of(name) == operation


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
        "void aiter::allgather_lastdim<std::bfloat16_t, 4>(aiter::RankData*, aiter::RankSignals, aiter::Signal*, ...)",
        "void aiter::allgather_vec<std::bfloat16_t, 8>(...)",
        "void aiter::reduce_scatter_split_first_dim<std::bfloat16_t, 8>(...)",
        "void aiter::ar_ll128_vec_unroll2<std::bfloat16_t, 4, 512>(...)",
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
        "void tensorrt_llm::kernels::helixAllToAllKernel<true>(tensorrt_llm::kernels::HelixAllToAllParams)",
        "void flashinfer::mixed_comm::fused_allreduce_allgather_kernel<...>(...)",
        "void flashinfer::trtllm_mnnvl_allreduce::rmsNormLamport<__nv_bfloat16, __nv_bfloat16, 1>(...)",
        "void flashinfer::minimax_ar::minimax_reduce_rms_kernel_lamport<__half, 4>(...)",
        "void vllm::minimax_ar::minimax_reduce_qk_rms_kernel_lamport_float4<__nv_bfloat16, 4, 6144, 1024>(...)",
        "void (anonymous namespace)::parallel_qknorm_across_head<...>(...)",
        "kernel_copy_multi_aligned(ucc_eee_task_copy_multi)",
        "executor_kernel(ucc_ec_cuda_executor volatile*, int)",
        "void (anonymous namespace)::reduce_scatter_res_kernel<8u, false, true>((anonymous namespace)::Params)",
        "void (anonymous namespace)::all_gather_kernel<8u, true>((anonymous namespace)::Params)",
        "void mooncake::combine<4, 8, 7168, 8>(mooncake::CombineKernelArgs)",
        "void deep_ep::internode_ll::combine<false, 7168>(...)",
        "void tensorrt_llm::kernels::fused_moe_impl::moeAllToAllKernel<8, false>(...)",
        "void (anonymous namespace)::all_reduce_two_shot_kernel<__half, 8u, true>(...)",
        "void stream_executor::gpu::AllReduceKernelImpl<float, (xla::ReductionKind)0>(...)",
        "void stream_executor::gpu::RaggedAllToAllDeviceKernelImpl<16l>(...)",
        "void stream_executor::gpu::MultiGpuBarrierKernelImpl<(stream_executor::gpu::PlatformType)0>(...)",
        "void deep_ep::elastic::dispatch<...>(...)",
        "void deep_ep::legacy::intranode::dispatch<8, 768, 8192>(...)",
        "void deep_ep::ep::hybrid_combine<...>(...)",
        "void deep_ep::bucket::nvlink_all_reduce<8, 16, 1024, 1l, false, 0>(...)",
        "void nixl_ep::ht::notify_dispatch<false, 2>(...)",
        "void a2a_dispatch_send_kernel<true, true, 16ul, 8ul, ...>(...)",
        "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int, int, int, int, int, int, int, int, int, void**)",
        "hybrid_ep::device_sync_kernel<8>(...)",
        "EpCombineIntraNodeKernel_bf16_nop2p",
        "void uccl::internode_ll::dispatch<true, false, 7168>(...)",
        "c10d::symmetric_memory::wait_signal_kernel(unsigned int**, int, int, int, int, unsigned long)",
        "_ZN5aiter33reduce_scatter_cross_device_storeIDF16bLi8EEEvPNS_8RankDataENS_11RankSignalsE",
        "NCCL_AllReduce_custom",
        "void MyNcclAllGather<float>()",
        "hcom_reduceScatter__586_1_1",
        "hcom_alltoallv__012_0_1",
        "hcclAllReduceKernel",
        "void ccl::v1::reduce_scatter_kernel<float>(...)",
        "oneccl_allreduce_pcie",
        "void rccl::AllReduceKernel(...)",
        "void allreduce_kernel<(anonymous namespace)::Type, (ReduceType)0>(rocshmem_team_t*, float*, float const*)",
        "allReduceKernel(float*, float*, int)",
        "_all_gather_kernel",
    ],
)
def test_communication_is_known(name: str) -> None:
    assert category_of(name) is Category.COMMUNICATION


@pytest.mark.parametrize(
    "name",
    [
        "ampere_sgemm_128x64_nn",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(...)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(...)",
        "void flash::flash_bwd_kernel<...>(...)",
        "void deep_ep::internode::get_dispatch_layout<256, 32, 8>(...)",
        "void deep_ep::legacy::layout::get_dispatch_layout<256, 4, 8>(...)",
        "void hybrid_ep::scan<256, 8>(...)",
        "hipblaslt_gemm_kernel",
        "reduce_scatter_dk_kernel(__nv_bfloat16*, __nv_bfloat16 const*, int, int, int, int)",
        "void aiter::local_device_load_rmsnorm<std::bfloat16_t, 512, 2>(aiter::RankSignals, ...)",
        "void flashinfer::norm::RMSNormKernel<8, __nv_bfloat16>(...)",
        "void combine_gradients(float*)",
        "void moe_dispatch_kernel<float>(...)",
        "one_shot_softmax_reduce",
        "void at::native::AsyncClearKernel(int*)",
        "void kernel<FuncClamp<float>>(float*)",
        "trunccluster_kernel",
        "void block_all_reduce_kernel<float>(float*)",
        "void warpAllReduceKernel<float>(float*)",
        "void oneflow::ccl_helper<float>(float*)",
        "void cccl::detail::scan_kernel<float>(float*)",
        "",
    ],
)
def test_compute_is_not_taken_for_communication(name: str) -> None:
    assert category_of(name) is Category.COMPUTE
