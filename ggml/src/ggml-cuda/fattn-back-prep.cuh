#pragma once

// Operands of the mma path of FLASH_ATTN_BACK, each read once or twice: bound by memory.

#include "fattn-back-mma-common.cuh"

#define FATTN_BACK_PREP_THREADS 256

// State of a granule of keys, and which of them some row sees. Grid: granules, query blocks, mask heads * sequences; block: one thread a key.
static __global__ void __launch_bounds__(FATTN_BACK_MMA_GRANULE) flash_attn_back_mask_tiles(const fattn_back_mma_params p) {
    const int qb   = blockIdx.y;
    const int mh   = blockIdx.z % p.a.mask_nheads;
    const int ms   = blockIdx.z / p.a.mask_nheads;
    const int key  = blockIdx.x * FATTN_BACK_MMA_GRANULE + threadIdx.x;
    const int i0   = qb * FATTN_BACK_MMA_ROWS;
    const int rows = min(FATTN_BACK_MMA_ROWS, p.a.N - i0);

    bool seen = false;
    bool read = key >= p.a.M;
    if (key < p.a.M) {
        const char * mask = p.a.mask + ms * p.a.mask_nb_seq + mh * p.a.mask_nb_head + i0 * p.a.mask_nb_row + key * (int64_t) sizeof(half);
#pragma unroll 16
        for (int r = 0; r < rows; ++r) {
            const uint16_t x = *(const uint16_t *) (mask + r * p.a.mask_nb_row);
            seen             = seen || x != 0xFC00;
            read             = read || (x & 0x7FFF) != 0;
        }
    }
    const int64_t tile  = ((int64_t) blockIdx.z * p.QB + qb) * gridDim.x + blockIdx.x;
    const uint32_t bits = __ballot_sync(0xFFFFFFFF, seen);
    if (threadIdx.x % 32 == 0) {
        p.seen[tile * (FATTN_BACK_MMA_GRANULE / 32) + threadIdx.x / 32] = bits;
    }
    const bool any_seen = __syncthreads_or(seen);
    const bool any_read = __syncthreads_or(read);
    if (threadIdx.x == 0) {
        p.tiles[tile] = !any_seen ? FATTN_BACK_TILE_SKIP : any_read ? FATTN_BACK_TILE_MIXED
                                                                    : FATTN_BACK_TILE_FULL;
    }
}

// Keys that some row of a KV head sees. Grid: key blocks, mask sequences and groups; one thread a key.
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_mask_used(const fattn_back_mma_params p) {
    const int key = blockIdx.x * FATTN_BACK_PREP_THREADS + threadIdx.x;
    if (key >= p.keys()) {
        return;
    }
    const int group     = blockIdx.y;
    const int seq       = group / p.a.mask_groups();
    const int64_t words = p.keys() / 32;
    uint32_t used       = 0;
    for (int i = 0; i < p.a.group_nmasks(); ++i) {
        const int64_t mask    = (int64_t) seq * p.a.mask_nheads + p.a.group_mask(group, i);
        const uint32_t * seen = p.seen + mask * p.QB * words + key / 32;
        for (int qb = 0; qb < p.QB; ++qb) {
            used |= seen[qb * words];
        }
    }
    p.used[group * p.keys() + key] = used >> key % 32 & 1;
}

static __device__ __forceinline__ bool fattn_back_prep_used(const fattn_back_mma_params & p, const int unit, const int64_t key) {
    return key < p.a.M && (p.used == nullptr || p.used[p.a.mask_group(unit) * p.keys() + key] != 0);
}

// Sums, minima and maxima of K's (z = 0) or V's (z = 1) columns over a part of the used keys. Grid: parts, units, 2; every row of keys is
// loaded by 4*ceil(D/32) threads, 8 components each.
static __global__ void __launch_bounds__(FATTN_BACK_COLUMNS_THREADS) flash_attn_back_column_parts(const fattn_back_mma_params p) {
    const int lunit            = blockIdx.y;
    const int unit             = p.unit0 + lunit;
    const bool is_v            = blockIdx.z == 1;
    const int D                = is_v ? p.a.Dv : p.a.Dk;
    const int n                = 4 * ((D + 31) / 32);
    const int nrows            = FATTN_BACK_COLUMNS_THREADS / n;
    const int row              = threadIdx.x / n;
    const fattn_back_src & src = is_v ? p.a.v : p.a.k;
    const int key1             = (int64_t) p.a.M * (blockIdx.x + 1) / p.nparts;

    float x[3][8];
    int count = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        x[0][c] = 0.0f;
        x[1][c] = INFINITY;
        x[2][c] = -INFINITY;
    }
    constexpr int nu = 4; // keys in flight
    for (int key = (int64_t) p.a.M * blockIdx.x / p.nparts + row; row < nrows && key < key1; key += nu * nrows) {
        int64_t offset[nu];
        float y[nu][8];
#pragma unroll
        for (int u = 0; u < nu; ++u) {
            offset[u] = src.offset(min(key + u * nrows, key1 - 1), unit % p.a.Hkv, unit / p.a.Hkv);
        }
        fattn_back_load8(src, offset, fattn_back_load8_first(threadIdx.x % n), D, y);
#pragma unroll
        for (int u = 0; u < nu; ++u) {
            if (key + u * nrows < key1 && fattn_back_prep_used(p, unit, key + u * nrows)) {
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    x[0][c] += y[u][c];
                    x[1][c] = fminf(x[1][c], y[u][c]);
                    x[2][c] = fmaxf(x[2][c], y[u][c]);
                }
                count++;
            }
        }
    }
    fattn_back_column_stats(x, count, n, p.colparts + (((int64_t) lunit * 2 + blockIdx.z) * p.nparts + blockIdx.x) * FATTN_BACK_COLUMNS_SIZE);
}

// power of two that brings x to [2^target, 2^(target + 1)); 127 for 0: such a row weighs nothing beside others
static __device__ __forceinline__ float fattn_back_prep_exponent(const float x, const int target) {
    return x > 0.0f ? fminf(fmaxf(target - floorf(log2f(x)), -120.0f), 120.0f) : 127.0f;
}

#define FATTN_BACK_PREP_MEANS_GROUPS 4

// Means of the columns, and the exponents from a bound of the centred rows' norm. Grid: units, 2; groups of threads, one a column,
// share the parts.
static __global__ void __launch_bounds__(FATTN_BACK_PREP_MEANS_GROUPS * FATTN_BACK_MMA_MAX_D) flash_attn_back_column_means(const fattn_back_mma_params p) {
    constexpr int ngroups = FATTN_BACK_PREP_MEANS_GROUPS;
    const int lunit       = blockIdx.x;
    const bool is_v       = blockIdx.y == 1;
    const int D           = is_v ? p.a.Dv : p.a.Dk;
    const int col         = threadIdx.x % FATTN_BACK_MMA_MAX_D;
    const int group       = threadIdx.x / FATTN_BACK_MMA_MAX_D;
    const float * src     = p.colparts + ((int64_t) lunit * 2 + blockIdx.y) * p.nparts * FATTN_BACK_COLUMNS_SIZE;

    float sum   = 0.0f;
    float count = 0.0f;
    float lo    = INFINITY;
    float hi    = -INFINITY;
    if (col < D) {
#pragma unroll 8
        for (int i = group; i < p.nparts; i += ngroups) {
            const float * part = src + (int64_t) i * FATTN_BACK_COLUMNS_SIZE;
            sum += part[col];
            lo = fminf(lo, part[1 * FATTN_BACK_MMA_MAX_D + col]);
            hi = fmaxf(hi, part[2 * FATTN_BACK_MMA_MAX_D + col]);
            count += part[3 * FATTN_BACK_MMA_MAX_D];
        }
    }
    __shared__ float parts[ngroups][4][FATTN_BACK_MMA_MAX_D];
    parts[group][0][col] = sum;
    parts[group][1][col] = lo;
    parts[group][2][col] = hi;
    parts[group][3][col] = count;
    __syncthreads();
    if (group > 0) {
        return;
    }
#pragma unroll
    for (int i = 1; i < ngroups; ++i) {
        sum += parts[i][0][col];
        lo = fminf(lo, parts[i][1][col]);
        hi = fmaxf(hi, parts[i][2][col]);
        count += parts[i][3][col];
    }
    const bool valid = col < D && count > 0.0f;
    float mean       = valid ? sum / count : 0.0f;
    if (valid) {
        // A mean with few bits: x - mean is then exact for most x of a 16 bit type. With all its bits every x of a binade would be
        // rounded by the same error, which would add up in D.
        const ggml_type type = (is_v ? p.a.v : p.a.k).type;
        const float spread   = fmaxf(hi - mean, mean - lo) / 64.0f;
        const float ulp      = type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 ? fmaxf(fabsf(hi), fabsf(lo)) / 1024.0f : 0.0f;
        const float step     = exp2f(floorf(log2f(fmaxf(spread, ulp))));
        mean                 = step > 0.0f ? rintf(mean / step) * step : mean;
    }
    const float dev                                                  = valid ? fmaxf(hi - mean, mean - lo) : 0.0f;
    (is_v ? p.mean_v : p.mean_k)[lunit * FATTN_BACK_MMA_MAX_D + col] = mean;

    __shared__ float red[3][FATTN_BACK_MMA_MAX_D];
    red[0][col] = fmaxf(dev, is_v && p.a.sinks != nullptr ? fabsf(mean) : 0.0f);
    __syncthreads();
    for (int n = FATTN_BACK_MMA_MAX_D / 2; n > 0; n /= 2) {
        if (col < n) {
            red[0][col] = fmaxf(red[0][col], red[0][col + n]);
        }
        __syncthreads();
    }
    const float amax = red[0][0];
    const float inv  = amax > 0.0f ? 1.0f / amax : 0.0f;
    red[1][col]      = dev * inv * dev * inv;
    red[2][col]      = mean * inv * mean * inv;
    __syncthreads();
    for (int n = FATTN_BACK_MMA_MAX_D / 2; n > 0; n /= 2) {
        if (col < n) {
            red[1][col] += red[1][col + n];
            red[2][col] += red[2][col + n];
        }
        __syncthreads();
    }
    if (col == 0) {
        // with sinks D' has a part as large as dO . mean(V)
        const float norm2                 = is_v && p.a.sinks != nullptr ? fmaxf(red[1][0], red[2][0]) : red[1][0];
        const float e                     = fattn_back_prep_exponent(amax * sqrtf(norm2), is_v ? 0 : 6);
        (is_v ? p.exp_v : p.exp_k)[lunit] = e == 127.0f ? 0.0f : e;
    }
}

// x = hi + lo
static __device__ __forceinline__ void fattn_back_prep_split(const float (&x)[8], half2 (&hi)[4], half2 (&lo)[4]) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        hi[c] = __floats2half2_rn(x[2 * c + 0], x[2 * c + 1]);
        lo[c] = __floats2half2_rn(x[2 * c + 0] - __low2float(hi[c]), x[2 * c + 1] - __high2float(hi[c]));
    }
}

// The components of the i-th thread of a row of K or V, centred and scaled; keys that no row sees and padding are 0.
static __device__ __forceinline__ void fattn_back_prep_load(
    const fattn_back_mma_params & p, const bool is_v, const int lunit, const int key, const int i, float (&x)[8]) {
    const fattn_back_src & src = is_v ? p.a.v : p.a.k;
    const int D                = is_v ? p.a.Dv : p.a.Dk;
    const int unit             = p.unit0 + lunit;
    const bool used            = fattn_back_prep_used(p, unit, key) && fattn_back_load8_first(i) < D;
    if (used) {
        fattn_back_load8(src, src.offset(key, unit % p.a.Hkv, unit / p.a.Hkv), fattn_back_load8_first(i), D, x);
    }
    const float scale  = exp2f((is_v ? p.exp_v : p.exp_k)[lunit]);
    const float * mean = (is_v ? p.mean_v : p.mean_k) + lunit * FATTN_BACK_MMA_MAX_D;
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
    fattn_back_prep_load(p, is_v, lunit, key, i, x);
    half2 hi[4];
    half2 lo[4];
    fattn_back_prep_split(x, hi, lo);
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
static __host__ __device__ int fattn_back_prep_row_threads(const int P) {
    return P > 128 ? 32 : P > 64 ? 16
                                 : 8;
}

// Q (z = 0) and dO (z = 1), rows scaled by their norm, and their products with the means; the smallest exponent is that of the longest row.
// Grid: blocks of rows, units, 2.
// Rows without a query are 0.
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_convert_rows(const fattn_back_mma_params p) {
    const int lunit            = blockIdx.y;
    const int unit             = p.unit0 + lunit;
    const bool is_dO           = blockIdx.z == 1;
    const int D                = is_dO ? p.a.Dv : p.a.Dk;
    const int P                = is_dO ? p.Pv : p.Pk;
    const fattn_back_src & src = is_dO ? p.a.dO : p.a.q;

    const int n   = fattn_back_prep_row_threads(P);
    const int col = threadIdx.x % n * 8;
    const int row = blockIdx.x * (FATTN_BACK_PREP_THREADS / n) + threadIdx.x / n;
    const int b   = p.rb0 + row / FATTN_BACK_MMA_ROWS;
    const int q   = (b / p.a.G) * FATTN_BACK_MMA_ROWS + row % FATTN_BACK_MMA_ROWS;

    float x[8] = { 0.0f };
    if (row < p.rows() && q < p.a.N && col < D) {
        const int64_t offset = src.offset(q, (unit % p.a.Hkv) * p.a.G + b % p.a.G, unit / p.a.Hkv);
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
    const float * mean = (is_dO ? p.mean_v : p.mean_k) + lunit * FATTN_BACK_MMA_MAX_D + col;
    float amax         = 0.0f;
    float dot          = 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        x[c] *= scale;
        amax = fmaxf(amax, fabsf(x[c]));
        dot += x[c] * mean[c];
    }
    for (int k = n / 2; k > 0; k /= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, k));
        dot += __shfl_xor_sync(0xFFFFFFFF, dot, k);
    }
    const float inv = amax > 0.0f ? 1.0f / amax : 0.0f;
    float norm2     = 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        norm2 += x[c] * inv * x[c] * inv;
    }
    for (int k = n / 2; k > 0; k /= 2) {
        norm2 += __shfl_xor_sync(0xFFFFFFFF, norm2, k);
    }
    const float e = fattn_back_prep_exponent(amax * sqrtf(norm2), is_dO ? 0 : 6);
    const float f = exp2f(e);

    if (row < p.rows() && col < P) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            x[c] *= f;
        }
        half2 hi[4];
        half2 lo[4];
        fattn_back_prep_split(x, hi, lo);
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
            x = fminf(x, __shfl_xor_sync(0xFFFFFFFF, x, k));
        }
        if (threadIdx.x == 0) {
            atomicMin((is_dO ? p.exp_dO_min : p.exp_q_min) + lunit, (int) x); // in any order
        }
    }
}
