#include "train.cuh"

#include <cctype>
#include <cstdlib>
#include <string>

// OUT_PROD of F32 matrices in BF16 with F32 sums, where GGML_CUDA_CUBLAS_COMPUTE_TYPE=bf16 asks for it, as upstream's
// MUL_MAT does: operands are rounded once for each product, results are F32.

#define TRAIN_BF16_THREADS 256

struct alignas(8) train_bf16x4 {
    nv_bfloat16 x[4];
};

// Owns four numbers, or what is left of them. Grid: blocks of TRAIN_BF16_THREADS.
static __global__ void __launch_bounds__(TRAIN_BF16_THREADS)
train_round_to_bf16(const float * __restrict__ x, nv_bfloat16 * __restrict__ y, const int64_t n) {
    const int64_t i = 4 * ((int64_t) blockIdx.x * TRAIN_BF16_THREADS + threadIdx.x);
    if (i + 4 <= n && (uintptr_t) x % sizeof(float4) == 0) {
        const float4 v            = *(const float4 *) (x + i);
        *(train_bf16x4 *) (y + i) = { __float2bfloat16(v.x), __float2bfloat16(v.y), __float2bfloat16(v.z), __float2bfloat16(v.w) };
        return;
    }
    for (int64_t j = i; j < n && j < i + 4; ++j) {
        y[j] = __float2bfloat16(x[j]);
    }
}

// t in BF16, with the strides that it has in elements
static const nv_bfloat16 * train_to_bf16(
    ggml_cuda_pool_alloc<nv_bfloat16> & alloc, const ggml_tensor * t, cudaStream_t stream) {
    const int64_t n       = ggml_nelements(t);
    const int64_t nblocks = (n + 4 * TRAIN_BF16_THREADS - 1) / (4 * TRAIN_BF16_THREADS);
    nv_bfloat16 * y       = alloc.alloc(n);
    train_round_to_bf16<<<nblocks, TRAIN_BF16_THREADS, 0, stream>>>((const float *) t->data, y, n);
    CUDA_CHECK(cudaGetLastError());
    return y;
}

static bool train_wants_bf16() {
    const char * env = getenv("GGML_CUDA_CUBLAS_COMPUTE_TYPE");
    std::string type = env ? env : "";
    for (char & c : type) {
        c = std::tolower(c);
    }
    return type == "bf16";
}

bool ggml_cuda_train_out_prod(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];

    const int cc          = ggml_cuda_info().devices[ctx.device].cc;
    const bool transposed = ggml_is_transposed(src1);
    const bool fits       = dst->ne[2] == 1 && dst->ne[3] == 1 && ggml_is_contiguous(src0) &&
        (transposed ? ggml_is_contiguously_allocated(src1) : ggml_is_contiguous(src1));
    if (!fits || !train_wants_bf16() || !GGML_CUDA_CC_IS_NVIDIA(cc) || cc < GGML_CUDA_CC_AMPERE) {
        return false;
    }

    ggml_cuda_pool_alloc<nv_bfloat16> a(ctx.pool());
    ggml_cuda_pool_alloc<nv_bfloat16> b(ctx.pool());
    const nv_bfloat16 * a_d = train_to_bf16(a, src0, ctx.stream());
    const nv_bfloat16 * b_d = train_to_bf16(b, src1, ctx.stream());

    const int64_t m   = dst->ne[0];
    const int64_t n   = dst->ne[1];
    const int64_t k   = src0->ne[1];
    const float alpha = 1.0f;
    const float beta  = 0.0f;
    CUBLAS_CHECK(
        cublasGemmEx(ctx.cublas_handle(), CUBLAS_OP_N, transposed ? CUBLAS_OP_N : CUBLAS_OP_T, m, n, k,
            &alpha, a_d, CUDA_R_16BF, m, b_d, CUDA_R_16BF, transposed ? k : n,
            &beta, dst->data, CUDA_R_32F, dst->nb[1] / sizeof(float), CUBLAS_COMPUTE_32F,
            CUBLAS_GEMM_DEFAULT_TENSOR_OP));
    return true;
}
