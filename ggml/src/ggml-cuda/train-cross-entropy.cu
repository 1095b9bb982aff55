#include "train.cuh"

#include <cfloat>

// CROSS_ENTROPY_LOSS and its gradient: a row of logits belongs to a warp where it is short, to a block where it is long. Rows stay in global
// memory, so that any vocabulary fills the device. One pass finds maximum and sum of exponentials, each thread of its own part, and a second
// one uses them.
//
// Labels are F32 of the shape of the logits, or I32, one a row: the class, or -1 for a row that does not count. The loss is the mean over the
// rows that count, 0 if there are none; of a chunk of a batch, the chunk's part of the mean over the labels of the batch. A class that there is not
// makes loss and gradient NaN, whoever trains has refused it before.

#define TRAIN_CROSS_ENTROPY_THREADS 256  // of blocks that have several rows
#define TRAIN_CROSS_ENTROPY_REDUCE  1024 // of the block that adds up the rows

struct train_cross_entropy_args {
    const float * logits;
    const float * labels; // [nrows][nclasses], or NULL
    const int32_t * ids;  // [nrows]
    const float * grad;   // backward: of the loss
    const float * weight; // backward: one over the rows that count
    float * dst;          // forward: [nrows] loss of a row, backward: [nrows][nclasses]

    int64_t nclasses;
    int64_t nrows;

    const int32_t * counted; // [ncounted] labels that the mean is over, NULL: all count
    int64_t ncounted;
};

// sum or maximum over the width threads of a row, the same for all of them; shared holds a value of each warp
template <int width, typename Op>
static __device__ __forceinline__ float train_row_reduce(float x, float * shared, const Op op) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        x = op(x, __shfl_xor_sync(0xFFFFFFFF, x, offset, 32));
    }
    if constexpr (width > 32) {
        __syncthreads(); // shared may still be read from before
        if (threadIdx.x % 32 == 0) {
            shared[threadIdx.x / 32] = x;
        }
        __syncthreads();
        x = shared[0];
        for (int warp = 1; warp < width / 32; ++warp) {
            x = op(x, shared[warp]);
        }
    }
    return x;
}

struct train_softmax_stats {
    float max;
    float sum; // of exp(logit - max)
};

static __device__ __forceinline__ void train_softmax_add(train_softmax_stats & stats, const float max, const float x0) {
    stats.sum = max > stats.max ? stats.sum * expf(stats.max - max) : stats.sum;
    stats.max = fmaxf(stats.max, max);
    stats.sum += expf(x0 - stats.max);
}

// maximum of a row and the sum of its exponentials; -FLT_MAX rather than -INFINITY for what has seen nothing, so that differences are numbers
template <int width>
static __device__ __forceinline__ train_softmax_stats train_softmax_row(const float * logits, const int64_t nclasses, float * shared) {
    train_softmax_stats own = { -FLT_MAX, 0.0f };
    if (((uintptr_t) logits | nclasses * sizeof(float)) % sizeof(float4) == 0) {
        const float4 * logits4 = (const float4 *) logits;
#pragma unroll 2
        for (int64_t i = threadIdx.x; i < nclasses / 4; i += width) {
            const float4 x = logits4[i];
            train_softmax_add(own, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), x.x);
            own.sum += expf(x.y - own.max);
            own.sum += expf(x.z - own.max);
            own.sum += expf(x.w - own.max);
        }
    } else {
#pragma unroll 4
        for (int64_t i = threadIdx.x; i < nclasses; i += width) {
            train_softmax_add(own, logits[i], logits[i]);
        }
    }
    train_softmax_stats row;
    row.max = train_row_reduce<width>(own.max, shared, [](const float a, const float b) { return fmaxf(a, b); });
    row.sum = train_row_reduce<width>(own.sum * expf(own.max - row.max), shared, [](const float a, const float b) { return a + b; });
    return row;
}

// Owns the loss of a row, threadIdx.y of the block. Grid: blocks of rows; width threads a row.
template <int width>
static __global__ void __launch_bounds__(width < TRAIN_CROSS_ENTROPY_THREADS ? TRAIN_CROSS_ENTROPY_THREADS : width)
train_cross_entropy(const train_cross_entropy_args a) {
    __shared__ float shared[width / 32];

    const int64_t row = (int64_t) blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= a.nrows) {
        return;
    }
    const int32_t id = a.ids ? a.ids[row] : 0;
    if (id == -1) {
        if (threadIdx.x == 0) {
            a.dst[row] = 0.0f;
        }
        return;
    }
    const float * logits            = a.logits + row * a.nclasses;
    const train_softmax_stats stats = train_softmax_row<width>(logits, a.nclasses, shared);
    const float log_sum             = logf(stats.sum);

    float loss = 0.0f;
    if (a.ids) {
        loss = id >= 0 && id < a.nclasses ? log_sum - (logits[id] - stats.max) : NAN;
    } else {
        const float * labels = a.labels + row * a.nclasses;
        for (int64_t i = threadIdx.x; i < a.nclasses; i += width) {
            loss -= (logits[i] - stats.max - log_sum) * labels[i];
        }
        loss = train_row_reduce<width>(loss, shared, [](const float x, const float y) { return x + y; });
    }
    if (threadIdx.x == 0) {
        a.dst[row] = loss;
    }
}

// Owns the gradient of a row, threadIdx.y of the block. Grid: blocks of rows; width threads a row.
template <int width>
static __global__ void __launch_bounds__(width < TRAIN_CROSS_ENTROPY_THREADS ? TRAIN_CROSS_ENTROPY_THREADS : width)
train_cross_entropy_back(const train_cross_entropy_args a) {
    __shared__ float shared[width / 32];

    const int64_t row = (int64_t) blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= a.nrows) {
        return;
    }
    float * dst      = a.dst + row * a.nclasses;
    const int32_t id = a.ids ? a.ids[row] : 0;
    if (id == -1) {
        for (int64_t i = threadIdx.x; i < a.nclasses; i += width) {
            dst[i] = 0.0f;
        }
        return;
    }
    const float * logits            = a.logits + row * a.nclasses;
    const train_softmax_stats stats = train_softmax_row<width>(logits, a.nclasses, shared);
    const float weight              = id >= 0 && id < a.nclasses ? *a.grad * *a.weight : NAN;
    const float scale               = 1.0f / stats.sum;

    const float * labels = a.ids ? nullptr : a.labels + row * a.nclasses;
    const auto value     = [&](const float x, const int64_t i) {
        const float label = labels ? labels[i] : float(i == id);
        return (expf(x - stats.max) * scale - label) * weight;
    };
    if (((uintptr_t) logits | (uintptr_t) dst | a.nclasses * sizeof(float)) % sizeof(float4) == 0) {
        for (int64_t i = threadIdx.x; i < a.nclasses / 4; i += width) {
            const float4 x      = ((const float4 *) logits)[i];
            ((float4 *) dst)[i] = make_float4(value(x.x, 4 * i), value(x.y, 4 * i + 1), value(x.z, 4 * i + 2), value(x.w, 4 * i + 3));
        }
    } else {
        for (int64_t i = threadIdx.x; i < a.nclasses; i += width) {
            dst[i] = value(logits[i], i);
        }
    }
}

// One block: the sum of nrows losses over the number of nids labels that count, and one over that number, whichever is asked for.
static __global__ void __launch_bounds__(TRAIN_CROSS_ENTROPY_REDUCE) train_cross_entropy_mean(const float * __restrict__ losses, const int64_t nrows,
    const int32_t * __restrict__ ids, const int64_t nids, float * __restrict__ mean, float * __restrict__ weight) {
    __shared__ float sums[TRAIN_CROSS_ENTROPY_REDUCE];
    __shared__ int counts[TRAIN_CROSS_ENTROPY_REDUCE];

    float sum = 0.0f;
    int count = 0;
    if (losses) {
#pragma unroll 4
        for (int64_t row = threadIdx.x; row < nrows; row += TRAIN_CROSS_ENTROPY_REDUCE) {
            sum += losses[row];
        }
    }
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < nids; i += TRAIN_CROSS_ENTROPY_REDUCE) {
        count += ids ? ids[i] != -1 : 1;
    }
    sums[threadIdx.x]   = sum;
    counts[threadIdx.x] = count;
    for (int n = TRAIN_CROSS_ENTROPY_REDUCE / 2; n > 0; n /= 2) {
        __syncthreads();
        if ((int) threadIdx.x < n) {
            sums[threadIdx.x] += sums[threadIdx.x + n];
            counts[threadIdx.x] += counts[threadIdx.x + n];
        }
    }
    if (threadIdx.x != 0) {
        return;
    }
    if (mean) {
        *mean = counts[0] > 0 ? sums[0] / counts[0] : 0.0f;
    }
    if (weight) {
        *weight = counts[0] > 0 ? 1.0f / counts[0] : 0.0f;
    }
}

// rows of a few classes share a block; long ones get so many threads that the rows in flight stay in the L2 cache from one pass to the next
#define TRAIN_CROSS_ENTROPY_LAUNCH(kernel, a, stream) \
    do { \
        if ((a).nclasses <= 1024) { \
            const int nrows_block = TRAIN_CROSS_ENTROPY_THREADS / 32; \
            kernel<32><<<((a).nrows + nrows_block - 1) / nrows_block, dim3(32, nrows_block, 1), 0, stream>>>(a); \
        } else if ((a).nclasses <= 8192) { \
            kernel<256><<<(a).nrows, 256, 0, stream>>>(a); \
        } else { \
            kernel<1024><<<(a).nrows, 1024, 0, stream>>>(a); \
        } \
        CUDA_CHECK(cudaGetLastError()); \
    } while (0)

// batch: the labels of the whole batch, NULL if these are
static train_cross_entropy_args train_cross_entropy_operands(const ggml_tensor * logits, const ggml_tensor * labels, const ggml_tensor * batch) {
    batch = batch ? batch : labels;
    GGML_ASSERT(logits->type == GGML_TYPE_F32);
    GGML_ASSERT(labels->type == GGML_TYPE_F32 || labels->type == GGML_TYPE_I32);
    GGML_ASSERT(ggml_is_contiguous(logits));
    GGML_ASSERT(ggml_is_contiguous(labels));
    GGML_ASSERT(ggml_nelements(labels) == (labels->type == GGML_TYPE_I32 ? ggml_nrows(logits) : ggml_nelements(logits)));
    GGML_ASSERT(ggml_nrows(logits) <= INT32_MAX);
    GGML_ASSERT(batch->type == labels->type && ggml_is_contiguous(batch));

    train_cross_entropy_args a = {};
    a.logits                   = (const float *) logits->data;
    a.labels                   = labels->type == GGML_TYPE_F32 ? (const float *) labels->data : nullptr;
    a.ids                      = labels->type == GGML_TYPE_I32 ? (const int32_t *) labels->data : nullptr;
    a.nclasses                 = logits->ne[0];
    a.nrows                    = ggml_nrows(logits);
    a.counted                  = batch->type == GGML_TYPE_I32 ? (const int32_t *) batch->data : nullptr;
    a.ncounted                 = batch->type == GGML_TYPE_I32 ? ggml_nelements(batch) : a.nrows;
    return a;
}

void ggml_cuda_train_cross_entropy_loss(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    GGML_ASSERT(dst->type == GGML_TYPE_F32 && ggml_is_scalar(dst));

    train_cross_entropy_args a = train_cross_entropy_operands(dst->src[0], dst->src[1], dst->src[2]);
    cudaStream_t stream        = ctx.stream();
    ggml_cuda_pool_alloc<float> losses(ctx.pool(), a.nrows);
    a.dst = losses.get();

    TRAIN_CROSS_ENTROPY_LAUNCH(train_cross_entropy, a, stream);
    train_cross_entropy_mean<<<1, TRAIN_CROSS_ENTROPY_REDUCE, 0, stream>>>(
        a.dst, a.nrows, a.counted, a.ncounted, (float *) dst->data, nullptr);
    CUDA_CHECK(cudaGetLastError());
}

void ggml_cuda_train_cross_entropy_loss_back(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * grad = dst->src[0];

    GGML_ASSERT(grad->type == GGML_TYPE_F32 && ggml_is_scalar(grad));
    GGML_ASSERT(dst->type == GGML_TYPE_F32 && ggml_is_contiguous(dst) && ggml_are_same_shape(dst, dst->src[1]));

    train_cross_entropy_args a = train_cross_entropy_operands(dst->src[1], dst->src[2], dst->src[3]);
    cudaStream_t stream        = ctx.stream();
    ggml_cuda_pool_alloc<float> weight(ctx.pool(), 1);
    a.grad   = (const float *) grad->data;
    a.weight = weight.get();
    a.dst    = (float *) dst->data;

    train_cross_entropy_mean<<<1, TRAIN_CROSS_ENTROPY_REDUCE, 0, stream>>>(nullptr, 0, a.counted, a.ncounted, nullptr, weight.get());
    CUDA_CHECK(cudaGetLastError());
    TRAIN_CROSS_ENTROPY_LAUNCH(train_cross_entropy_back, a, stream);
}
