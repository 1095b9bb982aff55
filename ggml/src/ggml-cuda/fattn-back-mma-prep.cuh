#pragma once

// Operands of the mma path of FLASH_ATTN_BACK, each read once or twice: bound by memory.

#include "fattn-back-mma-common.cuh"

static_assert(FATTN_BACK_MASK_ROWS == FATTN_BACK_MMA_ROWS && FATTN_BACK_MASK_ROWS == FATTN_BACK_MMA_GRANULE, "the table is of other tiles");

// power of two that brings x to [2^target, 2^(target + 1)); 127 for 0: such a row weighs nothing beside others
static __device__ __forceinline__ float fattn_back_mma_prep_exponent(const float x, const int target) {
    return x > 0.0f ? fminf(fmaxf(target - floorf(log2f(x)), -120.0f), 120.0f) : 127.0f;
}

// Means of the columns of K (y = 0) and V (y = 1), and the exponents from a bound of the centred rows' norm. Grid: units, 2; four threads a
// column.
static __global__ void __launch_bounds__(FATTN_BACK_PREP_MEAN_THREADS) flash_attn_back_column_means(const fattn_back_mma_params p) {
    const int lunit     = blockIdx.x;
    const bool is_v     = blockIdx.y == 1;
    const bool first    = threadIdx.x < FATTN_BACK_PREP_MAX_D; // of its column
    const float * parts = p.colparts + ((int64_t) lunit * 2 + blockIdx.y) * p.nparts * FATTN_BACK_COLUMNS_SIZE;
    float dev;
    const float mean = fattn_back_column_mean(parts, p.nparts, is_v ? p.a.Dv : p.a.Dk, (is_v ? p.a.v : p.a.k).type, dev);
    if (first) {
        (is_v ? p.mean_v : p.mean_k)[lunit * FATTN_BACK_PREP_MAX_D + threadIdx.x] = mean;
    }
    const float base  = is_v && p.a.sinks != nullptr ? fabsf(mean) : 0.0f; // with sinks D' has a part as large as dO . mean(V)
    const float amax  = fattn_back_block_reduce(fmaxf(dev, base), true);
    const float inv   = amax > 0.0f && first ? 1.0f / amax : 0.0f;
    const float dev2  = fattn_back_block_reduce(dev * inv * dev * inv, false);
    const float base2 = fattn_back_block_reduce(base * inv * base * inv, false);
    if (threadIdx.x == 0) {
        const float e                     = fattn_back_mma_prep_exponent(amax * sqrtf(fmaxf(dev2, base2)), is_v ? 0 : 6);
        (is_v ? p.exp_v : p.exp_k)[lunit] = e == 127.0f ? 0.0f : e;
    }
}

// x = hi + lo
static __device__ __forceinline__ void fattn_back_mma_prep_split(const float (&x)[8], half2 (&hi)[4], half2 (&lo)[4]) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        hi[c] = __floats2half2_rn(x[2 * c + 0], x[2 * c + 1]);
        lo[c] = __floats2half2_rn(x[2 * c + 0] - __low2float(hi[c]), x[2 * c + 1] - __high2float(hi[c]));
    }
}

// The components of the i-th thread of a row of K or V, centred and scaled; keys that no row sees and padding are 0.
static __device__ __forceinline__ void fattn_back_mma_prep_load(
    const fattn_back_mma_params & p, const bool is_v, const int lunit, const int key, const int i, float (&x)[8]) {
    const fattn_back_src & src = is_v ? p.a.v : p.a.k;
    const int D                = is_v ? p.a.Dv : p.a.Dk;
    const int unit             = p.unit0 + lunit;
    const bool used            = p.mask.is_used(p.a, unit, key) && fattn_back_load8_first(i) < D;
    if (used) {
        fattn_back_load8(src, src.offset(key, unit % p.a.Hkv, unit / p.a.Hkv), fattn_back_load8_first(i), D, x);
    }
    const float scale  = exp2f((is_v ? p.exp_v : p.exp_k)[lunit]);
    const float * mean = (is_v ? p.mean_v : p.mean_k) + lunit * FATTN_BACK_PREP_MAX_D;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const int col = fattn_back_load8_component(i, c);
        x[c]          = used && col < D ? (x[c] - mean[col]) * scale : 0.0f;
    }
}

// K (z = 0) and V (z = 1). Grid: blocks of threads, units, 2; a thread converts 8 components.
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_convert_kv(const fattn_back_mma_params p) {
    const int lunit = blockIdx.y;
    const bool is_v = blockIdx.z == 1;
    const int P     = is_v ? p.Pv : p.Pk;

    const int64_t j   = (int64_t) blockIdx.x * FATTN_BACK_PREP_THREADS + threadIdx.x;
    const int64_t key = j / (P / 8);
    const int i       = j % (P / 8);
    if (key >= p.keys()) {
        return;
    }
    float x[8];
    fattn_back_mma_prep_load(p, is_v, lunit, key, i, x);
    half2 hi[4];
    half2 lo[4];
    fattn_back_mma_prep_split(x, hi, lo);
    const int64_t dst = (lunit * p.keys() + key) * P;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const int64_t k                        = dst + fattn_back_load8_component(i, 4 * c);
        *(uint2 *) ((is_v ? p.v : p.k_hi) + k) = *(const uint2 *) (hi + 2 * c);
        if (!is_v && p.k_lo != nullptr) {
            *(uint2 *) (p.k_lo + k) = *(const uint2 *) (lo + 2 * c);
        }
    }
}

// Threads that convert a row of Q or dO, 8 components each: a power of two.
static __host__ __device__ int fattn_back_mma_prep_row_threads(const int P) {
    return P > 128 ? 32 : P > 64 ? 16
                                 : 8;
}

// Q (z = 0) and dO (z = 1), rows scaled by their norm, and their products with the means; the smallest exponent is that of the longest row.
// Grid: blocks of rows, units, 2.
// Rows without a query, and those that see no key, are 0.
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_convert_rows(const fattn_back_mma_params p) {
    const int lunit            = blockIdx.y;
    const int unit             = p.unit0 + lunit;
    const bool is_dO           = blockIdx.z == 1;
    const int D                = is_dO ? p.a.Dv : p.a.Dk;
    const int P                = is_dO ? p.Pv : p.Pk;
    const fattn_back_src & src = is_dO ? p.a.dO : p.a.q;

    const int n   = fattn_back_mma_prep_row_threads(P);
    const int col = threadIdx.x % n * 8;
    const int row = blockIdx.x * (FATTN_BACK_PREP_THREADS / n) + threadIdx.x / n;
    const int b   = p.rb0 + row / FATTN_BACK_MMA_ROWS;
    const int q   = (b / p.a.G) * FATTN_BACK_MMA_ROWS + row % FATTN_BACK_MMA_ROWS;
    const int h   = (unit % p.a.Hkv) * p.a.G + b % p.a.G;
    const int s   = unit / p.a.Hkv;

    float x[8] = { 0.0f };
    if (row < p.rows() && q < p.a.N && col < D && p.mask.sees(p.a, h, s, q)) {
        const int64_t offset = src.offset(q, h, s);
        if (src.vec) {
            ggml_cuda_memcpy_1<16>(x, src.data + offset + (col + 0) * sizeof(float));
            ggml_cuda_memcpy_1<16>(x + 4, src.data + offset + (col + 4) * sizeof(float));
        } else {
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                x[c] = *(const float *) (src.data + offset + (col + c) * src.nb_comp);
            }
        }
    }
    const float scale  = is_dO ? 1.0f : p.a.scale * 1.4426950408889634f;
    const float * mean = (is_dO ? p.mean_v : p.mean_k) + lunit * FATTN_BACK_PREP_MAX_D + col;
    float amax         = 0.0f;
    float dot          = 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        x[c] *= scale;
        amax = fmaxf(amax, fabsf(x[c]));
        dot += x[c] * mean[c];
    }
    for (int k = n / 2; k > 0; k /= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, k, WARP_SIZE));
        dot += __shfl_xor_sync(0xFFFFFFFF, dot, k, WARP_SIZE);
    }
    const float inv = amax > 0.0f ? 1.0f / amax : 0.0f;
    float norm2     = 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        norm2 += x[c] * inv * x[c] * inv;
    }
    for (int k = n / 2; k > 0; k /= 2) {
        norm2 += __shfl_xor_sync(0xFFFFFFFF, norm2, k, WARP_SIZE);
    }
    const float e = fattn_back_mma_prep_exponent(amax * sqrtf(norm2), is_dO ? 0 : 6);
    const float f = exp2f(e);

    if (row < p.rows() && col < P) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            x[c] *= f;
        }
        half2 hi[4];
        half2 lo[4];
        fattn_back_mma_prep_split(x, hi, lo);
        const int64_t dst                          = (lunit * p.rows() + row) * P + col;
        *(uint4 *) ((is_dO ? p.dO : p.q_hi) + dst) = *(const uint4 *) hi;
        if (!is_dO) {
            *(uint4 *) (p.q_lo + dst) = *(const uint4 *) lo;
        }
        if (col == 0) {
            const int64_t r                 = lunit * p.rows() + row;
            (is_dO ? p.exp_dO : p.exp_q)[r] = e;
            (is_dO ? p.dot_dO : p.dot_q)[r] = dot;
        }
    }

    __shared__ float red[FATTN_BACK_PREP_THREADS];
    red[threadIdx.x] = row < p.rows() ? e : 127.0f;
    __syncthreads();
    if (threadIdx.x < WARP_SIZE) {
        float x = red[threadIdx.x];
        for (int i = threadIdx.x + WARP_SIZE; i < FATTN_BACK_PREP_THREADS; i += WARP_SIZE) {
            x = fminf(x, red[i]);
        }
        for (int k = WARP_SIZE / 2; k > 0; k /= 2) {
            x = fminf(x, __shfl_xor_sync(0xFFFFFFFF, x, k, WARP_SIZE));
        }
        if (threadIdx.x == 0) {
            atomicMin((is_dO ? p.exp_dO_min : p.exp_q_min) + lunit, (int) x); // in any order
        }
    }
}
