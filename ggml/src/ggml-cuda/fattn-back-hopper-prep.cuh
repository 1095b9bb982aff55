#pragma once

// Operands of the Hopper path of FLASH_ATTN_BACK as tiles of fp16. Bound by memory.

#include "fattn-back-hopper-backward.cuh"

#define FATTN_BACK_HOPPER_AMAX_K 8 // exponent of the largest |K - mean| as an operand
#define FATTN_BACK_HOPPER_NORM_V 6 // exponent of the bound of a row of V - mean; a row of dO has a norm in [1, 2): |dP| <= 2^8

static_assert(FATTN_BACK_MASK_ROWS == FATTN_BACK_HOPPER_ROWS, "the table is of other tiles");

// rows that a thread loads together, at most those that it has of a tile
template <int D>
static constexpr int fattn_back_hopper_loads = std::min(4, FATTN_BACK_HOPPER_ROWS * D / 8 / FATTN_BACK_PREP_THREADS);

// x as row r of a tile, hilo: and what rounding leaves as row r of the next tile
template <int D, bool hilo>
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
        if constexpr (hilo) {
            *(uint2 *) (dst + FATTN_BACK_HOPPER_ROWS * D * 2) = *(const uint2 *) z;
        }
    }
}

// power of two that brings x to [2^target, 2^(target + 1))
static __device__ __forceinline__ float fattn_back_hopper_pow2(const float x, const int target) {
    return exp2f(fminf(fmaxf(target - floorf(log2f(x)), -100.0f), 100.0f));
}

// Means of the columns of K (y = 0) and V (y = 1), and their scales; whether what the forward has left can be used. Grid: units, 2; four
// threads a column.
static __global__ void __launch_bounds__(FATTN_BACK_PREP_MEAN_THREADS) flash_attn_back_hopper_means(
    const __grid_constant__ fattn_back_hopper_params p, const int D) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const bool is_v     = blockIdx.y == 1;
    const bool first    = threadIdx.x < FATTN_BACK_PREP_MAX_D; // of its column
    const float * parts = p.colparts + ((int64_t) blockIdx.x * 2 + blockIdx.y) * p.nparts * FATTN_BACK_COLUMNS_SIZE;
    float dev;
    const float mean = fattn_back_column_mean(parts, p.nparts, D, (is_v ? p.a.v : p.a.k).type, dev);
    if (first) {
        (is_v ? p.mean_v : p.mean_k)[(int64_t) (p.unit0 + blockIdx.x) * FATTN_BACK_PREP_MAX_D + threadIdx.x] = mean;
    }
    // with sinks D has a part as large as dO . mean(V)
    const float size = is_v && p.a.sinks != nullptr ? fmaxf(dev, fabsf(mean)) : dev;
    const float amax = fattn_back_block_reduce(size, true);
    const float rel  = amax > 0.0f && first ? size / amax : 0.0f;
    const float norm = amax * sqrtf(fattn_back_block_reduce(rel * rel, false));
    const float flat = fattn_back_block_reduce(first ? fabsf(mean) : 0.0f, true);
    const bool wide  = fattn_back_guard_wide(rel);
    const bool few   = is_v && fattn_back_guard_few(p.a, p.mask, p.unit0 + blockIdx.x);
    if (threadIdx.x == 0) {
        *p.taken = 0;
        if (is_v) {
            const bool stamped            = p.a.saved.stamp != nullptr && p.a.O == nullptr && p.a.saved.stamp[0] == FATTN_BACK_STAMP_HOPPER;
            const bool known              = stamped && flat <= FATTN_BACK_HOPPER_FLAT * amax;
            p.known[p.unit0 + blockIdx.x] = known;
            p.large[p.unit0 + blockIdx.x] = known ? p.a.saved.large[p.unit0 + blockIdx.x] : 0;
            p.guard.start(p.unit0 + blockIdx.x, p.a.G);
            if (few || !fattn_back_guard_in_range(norm) || (stamped && p.a.saved.large[p.unit0 + blockIdx.x] == FATTN_BACK_HOPPER_IN_F32)) {
                p.guard.raise(p.unit0 + blockIdx.x, FATTN_BACK_GUARD_F32);
            }
            p.scale[p.unit0 + blockIdx.x].z = norm > 0.0f ? fattn_back_hopper_pow2(norm, FATTN_BACK_HOPPER_NORM_V) : 1.0f;
        } else {
            p.guard.units[p.unit0 + blockIdx.x].wide = !fattn_back_guard_in_range(norm) ? FATTN_BACK_GUARD_ALWAYS : wide;

            const float scale               = amax > 0.0f ? fattn_back_hopper_pow2(amax, FATTN_BACK_HOPPER_AMAX_K) : 1.0f;
            p.scale[p.unit0 + blockIdx.x].y = copysignf(scale, p.a.scale);
        }
    }
#else
    GGML_UNUSED_VARS(p, D);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Tile x of K (y < units), V (y < 2*units), or of Q and dO of a head, with what their rows have in common with the means and with a known O.
// Keys that no row sees, rows that see no key, and padding are 0. hilo: K and Q in two halves, units whose rows ask for it.
template <int D, bool hilo>
static __device__ __forceinline__ void fattn_back_hopper_convert_tile(const fattn_back_hopper_params & p, const int tile_x, const int tile_y) {
    constexpr int n     = D / 8;
    constexpr int size1 = FATTN_BACK_HOPPER_ROWS * D * (hilo ? 2 : 1);
    const int i         = threadIdx.x % n;
    if (tile_y < 2 * p.units) {
        const bool is_v = tile_y >= p.units;
        const int lunit = tile_y - (is_v ? p.units : 0);
        const int kt    = p.kt0 + tile_x;
        if (kt >= fattn_back_hopper_last_key(p) || (hilo && !fattn_back_hopper_large(p, lunit))) {
            return;
        }
        const int unit             = p.unit0 + lunit;
        const fattn_back_src & src = is_v ? p.a.v : p.a.k;
        const float scale          = is_v ? p.scale[p.unit0 + lunit].z : p.scale[p.unit0 + lunit].y;
        const int size             = is_v ? FATTN_BACK_HOPPER_ROWS * D : size1;
        half * tile                = (is_v ? p.v : p.k) + ((int64_t) lunit * p.kts + tile_x) * size;
        float mean[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const int64_t j = (int64_t) (p.unit0 + lunit) * FATTN_BACK_PREP_MAX_D + fattn_back_load8_component(i, c);
            mean[c]         = is_v ? p.mean_v[j] : p.mean_k[j];
        }
        const bool measure   = !hilo && !p.again;
        constexpr int nrows  = FATTN_BACK_PREP_THREADS / n;
        constexpr int nloads = fattn_back_hopper_loads<D>;
        fattn_back_guard_lengths lengths;
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
                const bool used = p.mask.is_used(p.a, unit, kt * FATTN_BACK_HOPPER_ROWS + r);
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    x[j][c] = used ? (x[j][c] - mean[c]) * scale : 0.0f;
                }
                if (measure) {
                    lengths.add<n>(x[j], i == 0);
                }
                if (is_v) {
                    fattn_back_hopper_store8<D, false>(tile, r, i, x[j]);
                } else {
                    fattn_back_hopper_store8<D, hilo>(tile, r, i, x[j]);
                }
            }
        }
        if (measure) {
            lengths.put(is_v ? p.guard.units[unit].v : p.guard.units[unit].k);
        }
        return;
    }

    const int lhead = tile_y - 2 * p.units;
    const int lunit = lhead / p.a.G;
    if (tile_x >= p.QT || (hilo && !fattn_back_hopper_large(p, lunit))) {
        return;
    }
    const int h        = fattn_back_hopper_head(p, lhead);
    const int s        = fattn_back_hopper_seq(p, lhead);
    const int64_t tile = (int64_t) lhead * p.QT + tile_x;
    const float sq     = hilo ? p.scale[p.unit0 + lunit].x : 1.0f; // known when the unit comes again
    float mean_k[8];
    float mean_v[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        mean_k[c] = p.mean_k[(int64_t) (p.unit0 + lunit) * FATTN_BACK_PREP_MAX_D + fattn_back_load8_component(i, c)];
        mean_v[c] = p.mean_v[(int64_t) (p.unit0 + lunit) * FATTN_BACK_PREP_MAX_D + fattn_back_load8_component(i, c)];
    }
    float qmax = 0.0f;
    float omax = 0.0f;
    fattn_back_guard_lengths lengths;
    const bool has_dO   = p.a.dO.data != nullptr;
    const bool has_O    = has_dO && p.known[p.unit0 + lunit] != 0;
    const float scale_v = p.scale[p.unit0 + lunit].z;
#pragma unroll 2
    for (int r = threadIdx.x / n; r < FATTN_BACK_HOPPER_ROWS; r += FATTN_BACK_PREP_THREADS / n) {
        const int q = tile_x * FATTN_BACK_HOPPER_ROWS + r;
        float x[8]  = { 0.0f };
        float y[8]  = { 0.0f };
        if (q < p.a.N && p.mask.sees(p.a, h, s, q)) {
            fattn_back_load8(p.a.q, p.a.q.offset(q, h, s), fattn_back_load8_first(i), D, x);
            if (has_dO) {
                fattn_back_load8(p.a.dO, p.a.dO.offset(q, h, s), fattn_back_load8_first(i), D, y);
            }
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
        lengths.add(2.0f * log2f(norm), i == 0);
        float dot     = 0.0f;
        float4 common = make_float4(qk, ov, w, 0.0f);
        if (has_O && q < p.a.N) {
            const float pkeys = fattn_back_hopper_finish(p, lhead, q, p.scale[p.unit0 + lunit], common, p.a.saved.lse[p.a.row(q, h, s)], 0.0f, false);
            const float inv   = pkeys > 0.0f ? 1.0f / pkeys : 0.0f;
            float o[8];
            fattn_back_load8(p.a.o, p.a.o.offset(q, h, s), fattn_back_load8_first(i), D, o);
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                dot = fmaf(__half2float(__float2half_rn(y[c])), (o[c] * inv - mean_v[c]) * scale_v, dot);
            }
            common.w = pkeys > 0.0f ? 1.0f : 0.0f;
        }
        common.w = common.w * warp_reduce_sum<n>(dot);
        if (i == 0) {
            p.rows[tile * FATTN_BACK_HOPPER_ROWS + r] = common;
        }
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            x[c] *= sq;
        }
        fattn_back_hopper_store8<D, hilo>(p.q + tile * size1, r, i, x);
        if (has_dO) {
            fattn_back_hopper_store8<D, false>(p.dO + tile * FATTN_BACK_HOPPER_ROWS * D, r, i, y);
        }
    }
    if (has_dO && !hilo) {
        lengths.put(p.guard.units[p.unit0 + lunit].dO);
    }
    qmax = fattn_back_block_reduce(qmax, true);
    omax = fattn_back_block_reduce(omax, true);
    if (threadIdx.x == 0) {
        p.rowparts[(int64_t) lhead * p.QT + tile_x] = make_float2(qmax, omax);
    }
}

#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)

// nx * ny tiles. Grid: nx, ny; hilo: fewer blocks, as there is seldom anything to do.
template <int D, bool hilo>
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_hopper_convert(
    const __grid_constant__ fattn_back_hopper_params p, const int nx, const int ny) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (hilo) {
        if (fattn_back_hopper_any(p, [&](const int unit) { return fattn_back_hopper_large(p, unit); })) {
            for (int64_t i = blockIdx.x; i < (int64_t) nx * ny; i += gridDim.x) {
                fattn_back_hopper_convert_tile<D, hilo>(p, i % nx, i / nx);
            }
        }
    } else {
        fattn_back_hopper_convert_tile<D, hilo>(p, blockIdx.x, blockIdx.y);
    }
#else
    GGML_UNUSED_VARS(p, nx, ny);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

// The scales of a unit's Q and dO, and of the dO of its heads; tiles of Q again where the values are out of the range that fp16 holds well. Grid: blocks that share the
// query tiles, heads.
template <int D>
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_hopper_rescale(
    const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int n = D / 8;
    const int lunit = blockIdx.y / p.a.G;
    float qmax      = 0.0f;
    float omax      = 0.0f;
    float head      = 0.0f;
    for (int64_t i = threadIdx.x; i < p.a.G * p.QT; i += FATTN_BACK_PREP_THREADS) {
        const float2 x = p.rowparts[(int64_t) lunit * p.a.G * p.QT + i];
        qmax           = fmaxf(qmax, x.x);
        omax           = fmaxf(omax, x.y);
        head           = fmaxf(head, i / p.QT == blockIdx.y % p.a.G ? x.y : 0.0f);
    }
    qmax              = fattn_back_block_reduce(qmax, true);
    omax              = fattn_back_block_reduce(omax, true);
    head              = fattn_back_block_reduce(head, true);
    const bool good   = qmax == 0.0f || (qmax >= 0x1p-6f && qmax < 0x1p15f);
    const float scale = good ? 1.0f : fattn_back_hopper_pow2(qmax, FATTN_BACK_HOPPER_AMAX_K);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        p.weight[p.unit0 * p.a.G + blockIdx.y] = fattn_back_hopper_pow2(head > 0.0f ? head : omax, 0);
    }
    if (blockIdx.x == 0 && blockIdx.y % p.a.G == 0 && threadIdx.x == 0) {
        p.scale[p.unit0 + lunit].x = scale;
        p.scale[p.unit0 + lunit].w = fattn_back_hopper_pow2(omax, 0);
        if (!fattn_back_guard_in_range(qmax)) {
            p.guard.raise(p.unit0 + lunit, FATTN_BACK_GUARD_F32);
        }
    }
    if (good) {
        return;
    }
    const int i = threadIdx.x % n;
    const int h = fattn_back_hopper_head(p, blockIdx.y);
    const int s = fattn_back_hopper_seq(p, blockIdx.y);
    for (int t = blockIdx.x; t < p.QT; t += gridDim.x) {
        for (int r = threadIdx.x / n; r < FATTN_BACK_HOPPER_ROWS; r += FATTN_BACK_PREP_THREADS / n) {
            const int q = t * FATTN_BACK_HOPPER_ROWS + r;
            float x[8]  = { 0.0f };
            if (q < p.a.N && p.mask.sees(p.a, h, s, q)) {
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

// LSE and D of units whose forward has left LSE and O. Grid: blocks of rows of the query tiles, heads.
template <bool hilo>
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_hopper_known(
    const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const int lhead = blockIdx.y;
    const int unit  = lhead / p.a.G;
    const int q     = blockIdx.x * FATTN_BACK_PREP_THREADS + threadIdx.x;
    if (q >= p.QT * FATTN_BACK_HOPPER_ROWS || fattn_back_hopper_unknown(p, unit) || fattn_back_hopper_large(p, unit) != hilo) {
        return;
    }
    const float4 x   = p.rows[(int64_t) lhead * p.QT * FATTN_BACK_HOPPER_ROWS + q];
    const float keys = q < p.a.N ? p.a.saved.lse[p.a.row(q, fattn_back_hopper_head(p, lhead), fattn_back_hopper_seq(p, lhead))] : -INFINITY;
    fattn_back_hopper_finish(p, lhead, q, p.scale[p.unit0 + unit], x, keys, x.w, true);
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

// Adds to dQ what the sinks take: mean(K) is not part of the operands, and the P of the keys do not add up to 1. Grid: queries, heads,
// sequences; a thread has four components.
static __global__ void flash_attn_back_hopper_sinks_dq(const __grid_constant__ fattn_back_hopper_params p) {
    const int h        = blockIdx.y;
    const int s        = blockIdx.z;
    const int64_t row  = p.a.row(blockIdx.x, h, s);
    const float sink   = p.a.sinks[h];
    const float * mean = p.mean_k + (int64_t) (s * p.a.Hkv + h / p.a.G) * FATTN_BACK_PREP_MAX_D + 4 * threadIdx.x;
    if (fabsf(sink) == INFINITY || p.a.D[row] == 0.0f) {
        return;
    }
    const float f  = p.a.scale * p.a.D[row] * exp2f((sink - p.a.LSE[row]) * FATTN_BACK_HOPPER_LOG2E);
    float4 * dst   = (float4 *) (p.a.dQ + row * p.a.Dk) + threadIdx.x;
    const float4 x = *dst;
    *dst           = make_float4(fmaf(f, mean[0], x.x), fmaf(f, mean[1], x.y), fmaf(f, mean[2], x.z), fmaf(f, mean[3], x.w));
}
