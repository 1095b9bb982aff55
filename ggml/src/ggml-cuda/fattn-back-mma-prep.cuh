#pragma once

// Operands of the mma path of FLASH_ATTN_BACK, each read once or twice: bound by memory.

#include "fattn-back-mma-common.cuh"

static_assert(FATTN_BACK_MASK_ROWS == FATTN_BACK_MMA_ROWS && FATTN_BACK_MASK_ROWS == FATTN_BACK_MMA_GRANULE, "the table is of other tiles");

// power of two that brings x to [2^target, 2^(target + 1)); 127 for 0: such a row weighs nothing beside others
static __device__ __forceinline__ float fattn_back_mma_prep_exponent(const float x, const int target) {
    return x > 0.0f ? fminf(fmaxf(target - floorf(log2f(x)), -120.0f), 120.0f) : 127.0f;
}

// Means of the columns of K (y = 0) and V (y = 1), the exponents from a bound of the centred rows' norm, and what is to be computed. Grid:
// units, 2; four threads a column.
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
    const float base   = is_v && p.a.sinks != nullptr ? fabsf(mean) : 0.0f; // with sinks D' has a part as large as dO . mean(V)
    const float amax   = fattn_back_block_reduce(fmaxf(dev, base), true);
    const float inv    = amax > 0.0f && first ? 1.0f / amax : 0.0f;
    const float dev2   = fattn_back_block_reduce(dev * inv * dev * inv, false);
    const float base2  = fattn_back_block_reduce(base * inv * base * inv, false);
    const float common = fattn_back_block_reduce(fabsf(mean), true);
    const float spread = fattn_back_block_reduce(dev, true);
    const float norm   = amax * sqrtf(fmaxf(dev2, base2));
    const bool wide    = fattn_back_guard_wide(dev * inv);
    const bool few     = is_v && fattn_back_guard_few(p.a, p.mask, p.unit0 + lunit);
    if (threadIdx.x == 0) {
        const float e                     = fattn_back_mma_prep_exponent(norm, is_v ? 0 : 6);
        (is_v ? p.exp_v : p.exp_k)[lunit] = e == 127.0f ? 0.0f : e;
        if (is_v) {
            // what rounding has left of V - mean in a saved O must do for D
            const int unit   = p.unit0 + lunit;
            const bool saved = p.a.O == nullptr && p.a.saved.stamp != nullptr && *p.a.saved.stamp == FATTN_BACK_STAMP_MMA &&
                common * 0x1p-12f <= spread && (!p.a.split_all || p.a.saved.large[unit] != 0);
            p.fresh[unit] = !saved;
            p.guard.start(unit, p.a.G);
            if (few || !fattn_back_guard_in_range(norm) || (saved && p.a.saved.large[unit] == FATTN_BACK_MMA_IN_F32)) {
                p.guard.raise(unit, FATTN_BACK_GUARD_F32);
            }
            p.large[unit] = saved ? p.a.saved.large[unit] : p.a.split_all;
        } else {
            p.guard.units[p.unit0 + lunit].wide = fattn_back_guard_in_range(norm) ? wide : FATTN_BACK_GUARD_ALWAYS;
        }
    }
}

// x = hi + lo
static __device__ __forceinline__ void fattn_back_mma_prep_hilo(const float (&x)[8], half2 (&hi)[4], half2 (&lo)[4]) {
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

// Threads that convert a row, 8 components each: a power of two.
static __host__ __device__ int fattn_back_mma_prep_row_threads(const int P) {
    return P > 128 ? 32 : P > 64 ? 16
                                 : 8;
}

// sum of products, over the n threads of a row
static __device__ __forceinline__ float fattn_back_mma_prep_dot(const float (&x)[8], const float (&y)[8], const int n) {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        sum += x[c] * y[c];
    }
    for (int k = n / 2; k > 0; k /= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, k, WARP_SIZE);
    }
    return sum;
}

// K (z = 0) and V (z = 1). Grid: blocks of rows, units, 2; a thread converts 8 components.
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_convert_kv(const fattn_back_mma_params p) {
    const int lunit = blockIdx.y;
    const bool is_v = blockIdx.z == 1;
    const int P     = is_v ? p.Pv : p.Pk;

    const int n       = fattn_back_mma_prep_row_threads(P);
    const int64_t j   = (int64_t) blockIdx.x * FATTN_BACK_PREP_THREADS + threadIdx.x;
    const int64_t key = j / n;
    const int i       = j % n;
    float x[8]        = { 0.0f };
    if (key < p.keys() && i < P / 8) {
        fattn_back_mma_prep_load(p, is_v, lunit, key, i, x);
        half2 hi[4];
        half2 lo[4];
        fattn_back_mma_prep_hilo(x, hi, lo);
        const int64_t dst = (lunit * p.keys() + key) * P;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int64_t k                        = dst + fattn_back_load8_component(i, 4 * c);
            *(uint2 *) ((is_v ? p.v : p.k_hi) + k) = *(const uint2 *) (hi + 2 * c);
            if (!is_v) {
                *(uint2 *) (p.k_lo + k) = *(const uint2 *) (lo + 2 * c);
            }
        }
    }
    fattn_back_guard_lengths lengths;
    lengths.add(log2f(fattn_back_mma_prep_dot(x, x, n)), i == 0);
    fattn_back_guard_unit & unit = p.guard.units[p.unit0 + lunit];
    lengths.put(is_v ? unit.v : unit.k);
}

// The thread's components of a row of Q, O or dO.
static __device__ __forceinline__ void fattn_back_mma_prep_load_row(const fattn_back_src & src, const int64_t offset, const int col, float (&x)[8]) {
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

// Brings the norm of a row to [2^target, 2^(target + 1)); returns the exponent.
static __device__ __forceinline__ float fattn_back_mma_prep_scale_row(float (&x)[8], const int n, const int target) {
    float amax = 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        amax = fmaxf(amax, fabsf(x[c]));
    }
    for (int k = n / 2; k > 0; k /= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, k, WARP_SIZE));
    }
    const float inv = amax > 0.0f ? 1.0f / amax : 0.0f;
    float y[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        y[c] = x[c] * inv;
    }
    const float e = fattn_back_mma_prep_exponent(amax * sqrtf(fattn_back_mma_prep_dot(y, y, n)), target);
    const float f = exp2f(e);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        x[c] *= f;
    }
    return e;
}

// Q and, in a backward, dO: rows scaled by their norm, and their products with the means; the smallest exponent is that of the longest row.
// Where a forward has saved O and LSE: D. Rows without a query, and those that see no key, are 0.
// Grid: blocks of rows, units.
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_convert_rows(const fattn_back_mma_params p) {
    const int lunit = blockIdx.y;
    const int unit  = p.unit0 + lunit;
    const int n     = fattn_back_mma_prep_row_threads(max(p.Pk, p.Pv));
    const int col   = threadIdx.x % n * 8;
    const int row   = blockIdx.x * (FATTN_BACK_PREP_THREADS / n) + threadIdx.x / n;
    const bool in   = row < p.rows();
    const int b     = p.rb0 + row / FATTN_BACK_MMA_ROWS;
    const int q     = p.query(b) + row % FATTN_BACK_MMA_ROWS;
    const int h     = p.head(unit, b);
    const int s     = unit / p.a.Hkv;

    const bool back  = p.a.O == nullptr;
    const bool saved = back && p.fresh[unit] == 0;
    const bool on    = in && q < p.a.N && p.mask.sees(p.a, h, s, q);
    float x[8]       = { 0.0f };
    float y[8]       = { 0.0f };
    float o[8]       = { 0.0f };
    if (on && col < p.a.Dk) {
        fattn_back_mma_prep_load_row(p.a.q, p.a.q.offset(q, h, s), col, x);
    }
    if (on && back && col < p.a.Dv) {
        fattn_back_mma_prep_load_row(p.a.dO, p.a.dO.offset(q, h, s), col, y);
        if (saved) {
            fattn_back_mma_prep_load_row(p.a.o, p.a.o.offset(q, h, s), col, o);
        }
    }
    float mean_k[8];
    float mean_v[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        x[c] *= p.a.scale * FATTN_BACK_MMA_LOG2E;
        mean_k[c] = p.mean_k[lunit * FATTN_BACK_PREP_MAX_D + col + c];
        mean_v[c] = p.mean_v[lunit * FATTN_BACK_PREP_MAX_D + col + c];
    }
    const int64_t lrow = lunit * p.rows() + row;
    const float dot_q  = fattn_back_mma_prep_dot(x, mean_k, n);
    const float e_q    = fattn_back_mma_prep_scale_row(x, n, 6);
    half2 hi[4];
    half2 lo[4];
    if (in && col < p.Pk) {
        fattn_back_mma_prep_hilo(x, hi, lo);
        *(uint4 *) (p.q_hi + lrow * p.Pk + col) = *(const uint4 *) hi;
        *(uint4 *) (p.q_lo + lrow * p.Pk + col) = *(const uint4 *) lo;
        if (col == 0) {
            p.exp_q[lrow] = e_q;
            p.dot_q[lrow] = dot_q;
        }
    }
    float e_dO = 127.0f;
    if (back) {
        const float dot_dO = fattn_back_mma_prep_dot(y, mean_v, n);
        e_dO               = fattn_back_mma_prep_scale_row(y, n, 0);
        fattn_back_mma_prep_hilo(y, hi, lo);
        if (in && col < p.Pv) {
            *(uint4 *) (p.dO + lrow * p.Pv + col) = *(const uint4 *) hi;
            if (col == 0) {
                p.exp_dO[lrow] = e_dO;
                p.dot_dO[lrow] = dot_dO;
            }
        }
        if (saved) {
            const float lse = on ? p.a.saved.lse[p.a.row(q, h, s)] : -INFINITY;
            const fattn_back_mma_softmax softmax(p.a, lse, dot_q, h);
            const float scale = exp2f(p.exp_v[lunit]);
            const float inv   = softmax.keys > 0.0f ? 1.0f / softmax.keys : 0.0f;
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                y[c] = c % 2 == 0 ? __low2float(hi[c / 2]) : __high2float(hi[c / 2]);
                o[c] = inv > 0.0f ? (o[c] * inv - mean_v[c]) * scale : 0.0f;
            }
            const float D = fattn_back_mma_prep_dot(y, o, n);
            if (in && col == 0) {
                p.sums[lrow] = make_float2(lse, D);
            }
        }
    }

    __shared__ int least[2];
    if (threadIdx.x < 2) {
        least[threadIdx.x] = 127;
    }
    __syncthreads();
    if (in && col == 0) {
        atomicMin(least + 0, (int) e_q);
        atomicMin(least + 1, (int) e_dO);
    }
    fattn_back_guard_lengths lengths;
    lengths.add(1.0f - 2.0f * e_dO, in && col == 0 && e_dO != 127.0f);
    lengths.put(p.guard.units[unit].dO);
    if (in && col == 0 && e_q != 127.0f && fabsf(e_q) > FATTN_BACK_GUARD_RANGE) {
        p.guard.raise(unit, FATTN_BACK_GUARD_F32);
    }
    __syncthreads();
    if (threadIdx.x < 2) {
        atomicMin((threadIdx.x == 0 ? p.exp_q_min : p.exp_dO_min) + lunit, least[threadIdx.x]); // in any order
    }
}
