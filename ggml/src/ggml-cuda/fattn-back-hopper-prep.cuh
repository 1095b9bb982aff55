#pragma once

// Operands of the Hopper path of FLASH_ATTN_BACK as tiles of fp16, and the table of tiles that the mask leaves. Bound by memory.

#include "fattn-back-hopper-kernels.cuh"

#define FATTN_BACK_HOPPER_PREP_THREADS FATTN_BACK_COLUMNS_THREADS
#define FATTN_BACK_HOPPER_AMAX_K       8 // exponent of the largest |K - mean| as an operand
#define FATTN_BACK_HOPPER_NORM_V       6 // exponent of the bound of a row of V - mean; a row of dO has a norm in [1, 2): |dP| <= 2^8

// the bits of x at the even positions
static __device__ __forceinline__ uint64_t fattn_back_hopper_spread(const uint32_t x) {
    uint64_t y = x;
    y          = (y | y << 16) & 0x0000FFFF0000FFFF;
    y          = (y | y << 8) & 0x00FF00FF00FF00FF;
    y          = (y | y << 4) & 0x0F0F0F0F0F0F0F0F;
    y          = (y | y << 2) & 0x3333333333333333;
    return (y | y << 1) & 0x5555555555555555;
}

#define FATTN_BACK_HOPPER_MASK_TILES (FATTN_BACK_HOPPER_PREP_THREADS / 32) // key tiles of a block

// State of the tiles, and which keys some row sees. Grid: blocks of key tiles, query tiles, mask heads * sequences; a warp has a tile, a thread
// two keys.
static __global__ void __launch_bounds__(FATTN_BACK_HOPPER_PREP_THREADS) flash_attn_back_hopper_mask_tiles(
    const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const int kt      = blockIdx.x * FATTN_BACK_HOPPER_MASK_TILES + threadIdx.x / 32;
    const int key     = kt * FATTN_BACK_HOPPER_ROWS + threadIdx.x % 32 * 2;
    const int q0      = blockIdx.y * FATTN_BACK_HOPPER_ROWS;
    const int nq      = min(FATTN_BACK_HOPPER_ROWS, p.a.N - q0);
    const char * mask = p.a.mask + (blockIdx.z / p.a.mask_nheads) * p.a.mask_nb_seq + (blockIdx.z % p.a.mask_nheads) * p.a.mask_nb_head +
        q0 * p.a.mask_nb_row + key * (int64_t) sizeof(half);

    uint32_t seen   = 0; // of either key, not 0: some value is not -inf
    uint32_t read   = 0; // some value is not 0
    const auto scan = [&](const auto load) {
#pragma unroll 16
        for (int i = 0; i < nq; ++i) {
            const uint32_t x = load(mask + i * p.a.mask_nb_row);
            seen |= x ^ 0xFC00FC00;
            read |= x & 0x7FFF7FFF;
        }
    };
    if (key + 1 < p.a.M && ((uintptr_t) mask | p.a.mask_nb_row) % sizeof(uint32_t) == 0) {
        scan([](const char * x) { return *(const uint32_t *) x; });
    } else if (key + 1 < p.a.M) {
        scan([](const char * x) { return (uint32_t) ((const uint16_t *) x)[1] << 16 | ((const uint16_t *) x)[0]; });
    } else if (key < p.a.M) {
        scan([](const char * x) { return 0xFC000000 | *(const uint16_t *) x; });
    } else {
        read = 0x7FFF7FFF;
    }
    const uint64_t s = fattn_back_hopper_spread(__ballot_sync(0xFFFFFFFF, (seen & 0xFFFF) != 0)) |
        fattn_back_hopper_spread(__ballot_sync(0xFFFFFFFF, seen >> 16 != 0)) << 1;
    const bool any_read = __any_sync(0xFFFFFFFF, read != 0);
    if (threadIdx.x % 32 == 0 && kt < p.KT) {
        const int64_t tile = ((int64_t) blockIdx.z * p.QT + blockIdx.y) * p.KT + kt;
        p.seen[tile]       = s;
        p.tiles[tile]      = s == 0 ? FATTN_BACK_TILE_SKIP : any_read ? FATTN_BACK_TILE_MIXED
                                                                      : FATTN_BACK_TILE_FULL;
    }
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

// Keys that some row of a KV head sees. Grid: key tiles, mask sequences and groups; the threads share the query tiles.
static __global__ void __launch_bounds__(32) flash_attn_back_hopper_mask_used(const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const int group = blockIdx.y;
    const int seq   = group / p.a.mask_groups();
    uint64_t used   = 0;
    for (int i = 0; i < p.a.group_nmasks(); ++i) {
        const int64_t mask = (int64_t) seq * p.a.mask_nheads + p.a.group_mask(group, i);
        for (int qt = threadIdx.x; qt < p.QT; qt += 32) {
            used |= p.seen[(mask * p.QT + qt) * p.KT + blockIdx.x];
        }
    }
    const uint32_t lo = __reduce_or_sync(0xFFFFFFFF, (uint32_t) used);
    const uint32_t hi = __reduce_or_sync(0xFFFFFFFF, (uint32_t) (used >> 32));
    if (threadIdx.x == 0) {
        p.used[(int64_t) group * p.KT + blockIdx.x] = (uint64_t) hi << 32 | lo;
    }
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

static __device__ __forceinline__ bool fattn_back_hopper_used(const fattn_back_hopper_params & p, const int unit, const int key) {
    if (p.used == nullptr || key >= p.a.M) {
        return key < p.a.M;
    }
    const uint64_t used = p.used[(int64_t) p.a.mask_group(unit) * p.KT + key / FATTN_BACK_HOPPER_ROWS];
    return (used >> key % FATTN_BACK_HOPPER_ROWS & 1) != 0;
}

// rows that a thread loads together, at most those that it has of a tile
template <int D>
static constexpr int fattn_back_hopper_loads = std::min(4, FATTN_BACK_HOPPER_ROWS * D / 8 / FATTN_BACK_HOPPER_PREP_THREADS);

// x as row r of a tile, split: and what rounding leaves as row r of the next tile
template <int D, bool split>
static __device__ __forceinline__ void fattn_back_hopper_store8(half * tile, const int r, const int i, const float (&x)[8]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int c = fattn_back_load8_component(i, 4 * j);
        char * dst  = (char *) tile + c / 64 * FATTN_BACK_HOPPER_PANEL + r * 128 + ((c % 64 / 8 ^ r % 8) * 16) + c % 8 * 2;
        half2 y[2];
        half2 z[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float2 x2 = make_float2(x[4 * j + 2 * k], x[4 * j + 2 * k + 1]);
            y[k]            = __floats2half2_rn(x2.x, x2.y);
            z[k]            = __floats2half2_rn(x2.x - __low2float(y[k]), x2.y - __high2float(y[k]));
        }
        *(uint2 *) dst = *(const uint2 *) y;
        if constexpr (split) {
            *(uint2 *) (dst + FATTN_BACK_HOPPER_ROWS * D * 2) = *(const uint2 *) z;
        }
    }
}

// Sums, minima and maxima of K's (z = 0) or V's (z = 1) columns over a part of the used keys. Grid: parts, units, 2.
template <int D>
static __global__ void __launch_bounds__(FATTN_BACK_HOPPER_PREP_THREADS) flash_attn_back_hopper_columns(
    const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int n            = D / 8;
    constexpr int nrows        = FATTN_BACK_HOPPER_PREP_THREADS / n;
    const int unit             = p.unit0 + blockIdx.y;
    const int i                = threadIdx.x % n;
    const int row              = threadIdx.x / n;
    const fattn_back_src & src = blockIdx.z == 0 ? p.a.k : p.a.v;
    const int key0             = (int) ((int64_t) p.a.M * blockIdx.x / p.nparts);
    const int key1             = (int) ((int64_t) p.a.M * (blockIdx.x + 1) / p.nparts);

    float x[3][8];
    int count = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        x[0][c] = 0.0f;
        x[1][c] = INFINITY;
        x[2][c] = -INFINITY;
    }
    constexpr int nloads = fattn_back_hopper_loads<D>;
    for (int key = key0 + row; key < key1; key += nloads * nrows) {
        int64_t offset[nloads];
        bool used[nloads];
        float y[nloads][8];
#pragma unroll
        for (int j = 0; j < nloads; ++j) {
            const int k = key + j * nrows;
            used[j]     = k < key1 && fattn_back_hopper_used(p, unit, k);
            offset[j]   = src.offset(min(k, key1 - 1), unit % p.a.Hkv, unit / p.a.Hkv);
        }
        fattn_back_load8(src, offset, fattn_back_load8_first(i), D, y);
#pragma unroll
        for (int j = 0; j < nloads; ++j) {
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                x[0][c] += used[j] ? y[j][c] : 0.0f;
                x[1][c] = fminf(x[1][c], used[j] ? y[j][c] : INFINITY);
                x[2][c] = fmaxf(x[2][c], used[j] ? y[j][c] : -INFINITY);
            }
            count += used[j];
        }
    }

    fattn_back_column_stats(
        x, count, n, p.colparts + (((int64_t) blockIdx.y * 2 + blockIdx.z) * p.nparts + blockIdx.x) * FATTN_BACK_COLUMNS_SIZE);
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

// sum or maximum over the block, in a fixed order
static __device__ __forceinline__ float fattn_back_hopper_block_reduce(float x, const bool is_max) {
    __shared__ float red[32];
    x = is_max ? warp_reduce_max(x) : warp_reduce_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        red[threadIdx.x / 32] = x;
    }
    __syncthreads();
    x = red[0];
    for (int i = 1; i < blockDim.x / 32; ++i) {
        x = is_max ? fmaxf(x, red[i]) : x + red[i];
    }
    return x;
}

// power of two that brings x to [2^target, 2^(target + 1))
static __device__ __forceinline__ float fattn_back_hopper_pow2(const float x, const int target) {
    return exp2f(fminf(fmaxf(target - floorf(log2f(x)), -100.0f), 100.0f));
}

// Means of the columns of K (y = 0) and V (y = 1), and their scales. Grid: units, 2; four threads a column.
static __global__ void __launch_bounds__(4 * FATTN_BACK_HOPPER_MAX_D) flash_attn_back_hopper_means(
    const __grid_constant__ fattn_back_hopper_params p, const int D) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const int col     = threadIdx.x % FATTN_BACK_HOPPER_MAX_D;
    const bool is_v   = blockIdx.y == 1;
    const float * src = p.colparts + ((int64_t) blockIdx.x * 2 + blockIdx.y) * p.nparts * FATTN_BACK_COLUMNS_SIZE;
    __shared__ float4 red[4][FATTN_BACK_HOPPER_MAX_D]; // sum, number, minimum, maximum
    float4 x = make_float4(0.0f, 0.0f, INFINITY, -INFINITY);
    if (col < D) {
#pragma unroll 4
        for (int i = threadIdx.x / FATTN_BACK_HOPPER_MAX_D; i < p.nparts; i += 4) {
            const float * part = src + (int64_t) i * FATTN_BACK_COLUMNS_SIZE;
            x.x += part[col];
            x.y += part[3 * FATTN_BACK_HOPPER_MAX_D];
            x.z = fminf(x.z, part[1 * FATTN_BACK_HOPPER_MAX_D + col]);
            x.w = fmaxf(x.w, part[2 * FATTN_BACK_HOPPER_MAX_D + col]);
        }
    }
    red[threadIdx.x / FATTN_BACK_HOPPER_MAX_D][col] = x;
    __syncthreads();
    x = red[0][col];
    for (int i = 1; i < 4; ++i) {
        const float4 y = red[i][col];
        x              = make_float4(x.x + y.x, x.y + y.y, fminf(x.z, y.z), fmaxf(x.w, y.w));
    }
    // A mean with few bits: x - mean is then exact for most x of a 16-bit type. With all its bits every x of a binade would be rounded by
    // the same error, which would add up in D.
    const ggml_type type = (is_v ? p.a.v : p.a.k).type;
    const float exact    = x.y > 0.0f ? x.x / x.y : 0.0f;
    const float spread   = x.y > 0.0f ? fmaxf(x.w - exact, exact - x.z) / 64.0f : 0.0f;
    const float ulp      = x.y > 0.0f && (type == GGML_TYPE_F16 || type == GGML_TYPE_BF16) ? fmaxf(fabsf(x.w), fabsf(x.z)) / 1024.0f : 0.0f;
    const float step     = exp2f(floorf(log2f(fmaxf(spread, ulp))));
    const float mean     = step > 0.0f ? rintf(exact / step) * step : exact;
    const float dev      = x.y > 0.0f ? fmaxf(x.w - mean, mean - x.z) : 0.0f;
    if (threadIdx.x < FATTN_BACK_HOPPER_MAX_D) {
        (is_v ? p.mean_v : p.mean_k)[(int64_t) (p.unit0 + blockIdx.x) * FATTN_BACK_HOPPER_MAX_D + col] = mean;
    }
    // with sinks D has a part as large as dO . mean(V)
    const float size = is_v && p.a.sinks != nullptr ? fmaxf(dev, fabsf(mean)) : dev;
    const float amax = fattn_back_hopper_block_reduce(size, true);
    const float rel  = amax > 0.0f && threadIdx.x < FATTN_BACK_HOPPER_MAX_D ? size / amax : 0.0f;
    const float norm = amax * sqrtf(fattn_back_hopper_block_reduce(rel * rel, false));
    if (threadIdx.x == 0) {
        p.large[p.unit0 + blockIdx.x] = 0;
        if (is_v) {
            p.scale[p.unit0 + blockIdx.x].z = norm > 0.0f ? fattn_back_hopper_pow2(norm, FATTN_BACK_HOPPER_NORM_V) : 1.0f;
        } else {
            const float scale               = amax > 0.0f ? fattn_back_hopper_pow2(amax, FATTN_BACK_HOPPER_AMAX_K) : 1.0f;
            p.scale[p.unit0 + blockIdx.x].y = copysignf(scale, p.a.scale);
        }
    }
#else
    GGML_UNUSED_VARS(p, D);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

// A tile of K (y < units), V (y < 2*units), or of Q and dO of a head, with what their rows have in common with the means.
// Keys that no row sees and padding are 0. Grid: max(key tiles, query tiles), 2*units + heads or, for further keys, without the heads.
// split: K and Q in two halves, units whose rows ask for it.
template <int D, bool split>
static __global__ void __launch_bounds__(FATTN_BACK_HOPPER_PREP_THREADS) flash_attn_back_hopper_convert(
    const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int n     = D / 8;
    constexpr int size1 = FATTN_BACK_HOPPER_ROWS * D * (split ? 2 : 1);
    const int i         = threadIdx.x % n;
    if (blockIdx.y < 2 * p.units) {
        const bool is_v = blockIdx.y >= p.units;
        const int lunit = blockIdx.y - (is_v ? p.units : 0);
        const int kt    = p.kt0 + blockIdx.x;
        if (kt >= fattn_back_hopper_last_key(p) || (split && !fattn_back_hopper_large(p, lunit))) {
            return;
        }
        const int unit             = p.unit0 + lunit;
        const fattn_back_src & src = is_v ? p.a.v : p.a.k;
        const float scale          = is_v ? p.scale[p.unit0 + lunit].z : p.scale[p.unit0 + lunit].y;
        const int size             = is_v ? FATTN_BACK_HOPPER_ROWS * D : size1;
        half * tile                = (is_v ? p.v : p.k) + ((int64_t) lunit * p.kts + blockIdx.x) * size;
        float mean[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const int64_t j = (int64_t) (p.unit0 + lunit) * FATTN_BACK_HOPPER_MAX_D + fattn_back_load8_component(i, c);
            mean[c]         = is_v ? p.mean_v[j] : p.mean_k[j];
        }
        constexpr int nrows  = FATTN_BACK_HOPPER_PREP_THREADS / n;
        constexpr int nloads = fattn_back_hopper_loads<D>;
        for (int r0 = threadIdx.x / n; r0 < FATTN_BACK_HOPPER_ROWS; r0 += nloads * nrows) {
            int64_t offset[nloads];
            float x[nloads][8];
#pragma unroll
            for (int j = 0; j < nloads; ++j) {
                const int key = kt * FATTN_BACK_HOPPER_ROWS + r0 + j * nrows;
                offset[j]     = src.offset(min(key, p.a.M - 1), unit % p.a.Hkv, unit / p.a.Hkv);
            }
            fattn_back_load8(src, offset, fattn_back_load8_first(i), D, x);
#pragma unroll
            for (int j = 0; j < nloads; ++j) {
                const int r     = r0 + j * nrows;
                const bool used = fattn_back_hopper_used(p, unit, kt * FATTN_BACK_HOPPER_ROWS + r);
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    x[j][c] = used ? (x[j][c] - mean[c]) * scale : 0.0f;
                }
                if (is_v) {
                    fattn_back_hopper_store8<D, false>(tile, r, i, x[j]);
                } else {
                    fattn_back_hopper_store8<D, split>(tile, r, i, x[j]);
                }
            }
        }
        return;
    }

    const int lhead = blockIdx.y - 2 * p.units;
    const int lunit = lhead / p.a.G;
    if (blockIdx.x >= p.QT || (split && !fattn_back_hopper_large(p, lunit))) {
        return;
    }
    const int h        = fattn_back_hopper_head(p, lhead);
    const int s        = fattn_back_hopper_seq(p, lhead);
    const int64_t tile = (int64_t) lhead * p.QT + blockIdx.x;
    const float sq     = split ? p.scale[p.unit0 + lunit].x : 1.0f; // known when the unit comes again
    float mean_k[8];
    float mean_v[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        mean_k[c] = p.mean_k[(int64_t) (p.unit0 + lunit) * FATTN_BACK_HOPPER_MAX_D + fattn_back_load8_component(i, c)];
        mean_v[c] = p.mean_v[(int64_t) (p.unit0 + lunit) * FATTN_BACK_HOPPER_MAX_D + fattn_back_load8_component(i, c)];
    }
    float qmax = 0.0f;
    float omax = 0.0f;
#pragma unroll 2
    for (int r = threadIdx.x / n; r < FATTN_BACK_HOPPER_ROWS; r += FATTN_BACK_HOPPER_PREP_THREADS / n) {
        const int q = blockIdx.x * FATTN_BACK_HOPPER_ROWS + r;
        float x[8]  = { 0.0f };
        float y[8]  = { 0.0f };
        if (q < p.a.N) {
            fattn_back_load8(p.a.q, p.a.q.offset(q, h, s), fattn_back_load8_first(i), D, x);
            fattn_back_load8(p.a.dO, p.a.dO.offset(q, h, s), fattn_back_load8_first(i), D, y);
        }
        float amax = 0.0f;
        float qk   = 0.0f;
        float ov   = 0.0f;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            qmax = fmaxf(qmax, fabsf(x[c]));
            amax = fmaxf(amax, fabsf(y[c]));
            qk   = fmaf(x[c], mean_k[c], qk);
            ov   = fmaf(y[c], mean_v[c], ov);
        }
        amax            = warp_reduce_max<n>(amax);
        const float inv = amax > 0.0f ? 1.0f / amax : 0.0f;
        float norm2     = 0.0f;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            norm2 += y[c] * inv * y[c] * inv;
        }
        qk               = warp_reduce_sum<n>(qk);
        ov               = warp_reduce_sum<n>(ov);
        const float norm = amax * sqrtf(warp_reduce_sum<n>(norm2));
        const float w    = fattn_back_hopper_pow2(norm, 0); // the largest power for a row of zeros, which then weighs nothing
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            y[c] *= w;
        }
        omax = fmaxf(omax, norm);
        if (i == 0) {
            p.rows[tile * FATTN_BACK_HOPPER_ROWS + r] = make_float4(qk, ov, w, 0.0f);
        }
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            x[c] *= sq;
        }
        fattn_back_hopper_store8<D, split>(p.q + tile * size1, r, i, x);
        fattn_back_hopper_store8<D, false>(p.dO + tile * FATTN_BACK_HOPPER_ROWS * D, r, i, y);
    }
    qmax = fattn_back_hopper_block_reduce(qmax, true);
    omax = fattn_back_hopper_block_reduce(omax, true);
    if (threadIdx.x == 0) {
        p.rowparts[(int64_t) lhead * p.QT + blockIdx.x] = make_float2(qmax, omax);
    }
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

// The scales of a unit's Q and dO; tiles of Q again where the values are out of the range that fp16 holds well. Grid: blocks that share the
// query tiles, heads.
template <int D>
static __global__ void __launch_bounds__(FATTN_BACK_HOPPER_PREP_THREADS) flash_attn_back_hopper_rescale(
    const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int n = D / 8;
    const int lunit = blockIdx.y / p.a.G;
    float qmax      = 0.0f;
    float omax      = 0.0f;
    for (int64_t i = threadIdx.x; i < p.a.G * p.QT; i += FATTN_BACK_HOPPER_PREP_THREADS) {
        const float2 x = p.rowparts[(int64_t) lunit * p.a.G * p.QT + i];
        qmax           = fmaxf(qmax, x.x);
        omax           = fmaxf(omax, x.y);
    }
    qmax              = fattn_back_hopper_block_reduce(qmax, true);
    omax              = fattn_back_hopper_block_reduce(omax, true);
    const bool good   = qmax == 0.0f || (qmax >= 0x1p-6f && qmax < 0x1p15f);
    const float scale = good ? 1.0f : fattn_back_hopper_pow2(qmax, FATTN_BACK_HOPPER_AMAX_K);
    if (blockIdx.x == 0 && blockIdx.y % p.a.G == 0 && threadIdx.x == 0) {
        p.scale[p.unit0 + lunit].x = scale;
        p.scale[p.unit0 + lunit].w = fattn_back_hopper_pow2(omax, 0);
    }
    if (good) {
        return;
    }
    const int i = threadIdx.x % n;
    const int h = fattn_back_hopper_head(p, blockIdx.y);
    const int s = fattn_back_hopper_seq(p, blockIdx.y);
    for (int t = blockIdx.x; t < p.QT; t += gridDim.x) {
        for (int r = threadIdx.x / n; r < FATTN_BACK_HOPPER_ROWS; r += FATTN_BACK_HOPPER_PREP_THREADS / n) {
            const int q = t * FATTN_BACK_HOPPER_ROWS + r;
            float x[8]  = { 0.0f };
            if (q < p.a.N) {
                fattn_back_load8(p.a.q, p.a.q.offset(q, h, s), fattn_back_load8_first(i), D, x);
            }
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                x[c] *= scale;
            }
            fattn_back_hopper_store8<D, false>(p.q + ((int64_t) blockIdx.y * p.QT + t) * FATTN_BACK_HOPPER_ROWS * D, r, i, x);
        }
    }
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

// dSinks from LSE and D. Grid: heads.
static __global__ void __launch_bounds__(FATTN_BACK_HOPPER_PREP_THREADS) flash_attn_back_hopper_sinks(
    const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const int h      = blockIdx.x;
    const float sink = p.a.sinks[h];
    float sum        = 0.0f;
    for (int s = 0; s < p.a.S; ++s) {
        for (int q = threadIdx.x; q < p.a.N; q += FATTN_BACK_HOPPER_PREP_THREADS) {
            const int64_t row = p.a.row(q, h, s);
            if (p.a.LSE[row] != -INFINITY) { // a sink of -INFINITY is none
                sum -= expf(sink - p.a.LSE[row]) * p.a.D[row];
            }
        }
    }
    sum = fattn_back_hopper_block_reduce(sum, false);
    if (threadIdx.x == 0) {
        p.a.dSinks[h] = sum;
    }
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}
