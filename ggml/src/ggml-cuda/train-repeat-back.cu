#include "train.cuh"

// REPEAT_BACK: an element of dst is the sum of its R = nr0*nr1*nr2*nr3 repeats in src. The gradient of a norm's weight has few elements and
// one repeat a token, so the repeats are split over blocks as well, and a second pass adds up what the splits found, in their order.

#define TRAIN_REPEAT_BACK_THREADS 256
#define TRAIN_REPEAT_BACK_BLOCKS  512 // enough for every device; a constant, so that the order of summation is the same on all
#define TRAIN_REPEAT_BACK_TERMS   16  // of a thread at least, where a split would leave fewer

struct train_repeat_back_args {
    const float * src;
    float * dst; // [splits][elements of dst]

    int64_t s00, s01, s02, s03; // strides of src in elements
    int64_t ne;                 // elements of dst
    uint32_t nr;                // repeats of an element
    uint32_t nr_split;          // of these a split takes

    uint32_t ne0;
    uint3 tiles0, ne1, ne2; // tiles of columns in a row of dst; its rows
    uint3 nr0, nr1, nr2;
    uint32_t stride1, stride2, stride3; // ne1, ne2, ne3 of dst: from one repeat to the next
};

// Owns blockDim.x columns of a row of dst for one split of the repeats. Grid: tiles of columns * rows of dst, splits. Thread (x, y) adds every
// blockDim.y-th repeat of column x, nr0 innermost, and the threads of a column are added up as a tree.
static __global__ void __launch_bounds__(TRAIN_REPEAT_BACK_THREADS) train_repeat_back(const train_repeat_back_args a) {
    __shared__ float sums[TRAIN_REPEAT_BACK_THREADS];

    const uint2 tile  = fast_div_modulo(blockIdx.x, a.tiles0); // row of dst, tile in it
    const uint2 row23 = fast_div_modulo(tile.x, a.ne1);
    const uint2 row3  = fast_div_modulo(row23.x, a.ne2);
    const uint32_t i0 = tile.y * blockDim.x + threadIdx.x;
    const uint32_t i1 = row23.y;
    const uint32_t i2 = row3.y;
    const uint32_t i3 = row3.x;

    const uint32_t first = blockIdx.y * a.nr_split;
    const uint32_t last  = min(first + a.nr_split, a.nr);

    float sum = 0.0f;
    if (i0 < a.ne0) {
#pragma unroll 4
        for (uint32_t r = first + threadIdx.y; r < last; r += blockDim.y) {
            const uint2 r0 = fast_div_modulo(r, a.nr0);
            const uint2 r1 = fast_div_modulo(r0.x, a.nr1);
            const uint2 r2 = fast_div_modulo(r1.x, a.nr2);
            sum += a.src[(i0 + (int64_t) r0.y * a.ne0) * a.s00 + (i1 + (int64_t) r1.y * a.stride1) * a.s01 +
                (i2 + (int64_t) r2.y * a.stride2) * a.s02 + (i3 + (int64_t) r2.x * a.stride3) * a.s03];
        }
    }

    const uint32_t tid = threadIdx.y * blockDim.x + threadIdx.x;
    sums[tid]          = sum;
    for (uint32_t n = blockDim.y / 2; n > 0; n /= 2) {
        __syncthreads();
        if (threadIdx.y < n) {
            sums[tid] += sums[tid + n * blockDim.x];
        }
    }
    if (threadIdx.y == 0 && i0 < a.ne0) {
        a.dst[blockIdx.y * a.ne + (int64_t) tile.x * a.ne0 + i0] = sums[tid];
    }
}

// Owns one element of dst: the sum of what the splits found. Grid: blocks of elements.
static __global__ void __launch_bounds__(TRAIN_REPEAT_BACK_THREADS) train_repeat_back_combine(
    const float * __restrict__ parts, float * __restrict__ dst, const int64_t ne, const int nsplits) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= ne) {
        return;
    }
    float sum = 0.0f;
#pragma unroll 8
    for (int split = 0; split < nsplits; ++split) {
        sum += parts[split * ne + i];
    }
    dst[i] = sum;
}

static uint32_t train_pow2_at_most(const int64_t n) {
    uint32_t pow2 = 1;
    while (2 * (int64_t) pow2 <= n) {
        pow2 *= 2;
    }
    return pow2;
}

bool ggml_cuda_train_repeat_back(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * src = dst->src[0];

    GGML_ASSERT(ggml_can_repeat(dst, src));

    int64_t nr[GGML_MAX_DIMS];
    int64_t stride[GGML_MAX_DIMS];
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        if (dst->ne[i] == 0 || src->nb[i] % sizeof(float) != 0) {
            return false;
        }
        nr[i]     = src->ne[i] / dst->ne[i];
        stride[i] = src->nb[i] / sizeof(float);
    }
    const int64_t nrepeats = nr[0] * nr[1] * nr[2] * nr[3];
    const int64_t ne       = ggml_nelements(dst);
    if (src->type != GGML_TYPE_F32 || dst->type != GGML_TYPE_F32 || !ggml_is_contiguous(dst) || nrepeats == 0 || nrepeats > INT32_MAX || ne > INT32_MAX) {
        return false;
    }

    // a block has the shape of what there is: columns of dst beside each other, then repeats
    const uint32_t columns = std::min<uint32_t>(train_pow2_at_most(2 * dst->ne[0] - 1), TRAIN_REPEAT_BACK_THREADS);
    const uint32_t height  = std::min<uint32_t>(train_pow2_at_most(std::max<int64_t>(nrepeats / 4, 1)), TRAIN_REPEAT_BACK_THREADS / std::min(columns, 32u));
    const dim3 block(std::min(columns, TRAIN_REPEAT_BACK_THREADS / height), height, 1);

    const int64_t tiles0  = (dst->ne[0] + block.x - 1) / block.x;
    const int64_t tiles   = tiles0 * ggml_nrows(dst);
    const int64_t useful  = (nrepeats + block.y * TRAIN_REPEAT_BACK_TERMS - 1) / (block.y * TRAIN_REPEAT_BACK_TERMS);
    const int64_t wanted  = (TRAIN_REPEAT_BACK_BLOCKS + tiles - 1) / tiles;
    const int64_t split   = (nrepeats + std::min(useful, wanted) - 1) / std::min(useful, wanted);
    const int64_t nsplits = (nrepeats + split - 1) / split;

    cudaStream_t stream = ctx.stream();
    ggml_cuda_pool_alloc<float> parts(ctx.pool());

    train_repeat_back_args a;
    a.src      = (const float *) src->data;
    a.dst      = nsplits > 1 ? parts.alloc(nsplits * ne) : (float *) dst->data;
    a.s00      = stride[0];
    a.s01      = stride[1];
    a.s02      = stride[2];
    a.s03      = stride[3];
    a.ne       = ne;
    a.nr       = nrepeats;
    a.nr_split = split;
    a.ne0      = dst->ne[0];
    a.tiles0   = init_fastdiv_values(tiles0);
    a.ne1      = init_fastdiv_values(dst->ne[1]);
    a.ne2      = init_fastdiv_values(dst->ne[2]);
    a.nr0      = init_fastdiv_values(nr[0]);
    a.nr1      = init_fastdiv_values(nr[1]);
    a.nr2      = init_fastdiv_values(nr[2]);
    a.stride1  = dst->ne[1];
    a.stride2  = dst->ne[2];
    a.stride3  = dst->ne[3];

    train_repeat_back<<<dim3(tiles, nsplits, 1), block, 0, stream>>>(a);
    CUDA_CHECK(cudaGetLastError());
    if (nsplits > 1) {
        const int64_t blocks = (ne + TRAIN_REPEAT_BACK_THREADS - 1) / TRAIN_REPEAT_BACK_THREADS;
        train_repeat_back_combine<<<blocks, TRAIN_REPEAT_BACK_THREADS, 0, stream>>>(a.dst, (float *) dst->data, ne, nsplits);
        CUDA_CHECK(cudaGetLastError());
    }
    return true;
}
