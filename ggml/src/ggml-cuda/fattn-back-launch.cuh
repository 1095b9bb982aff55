#pragma once

// For common.cuh of ggml up to 0.11: what the paths take of newer ones. Kernels are launched without programmatic dependent launches.

#ifndef GGML_CUDA_CC_HOPPER
#define GGML_CUDA_CC_HOPPER 900
#endif

struct ggml_cuda_kernel_launch_params {
    dim3 block_nums;
    dim3 block_dims;
    size_t shmem;
    cudaStream_t stream;

    ggml_cuda_kernel_launch_params(const dim3 block_nums, const dim3 block_dims, const size_t shmem, const cudaStream_t stream) :
        block_nums(block_nums),
        block_dims(block_dims),
        shmem(shmem),
        stream(stream) {}
};

template <typename K, typename... Args>
static void ggml_cuda_kernel_launch(K kernel, const ggml_cuda_kernel_launch_params & params, Args &&... args) {
    kernel<<<params.block_nums, params.block_dims, params.shmem, params.stream>>>(std::forward<Args>(args)...);
    CUDA_CHECK(cudaGetLastError());
}

static __device__ __forceinline__ void ggml_cuda_pdl_sync() {}
