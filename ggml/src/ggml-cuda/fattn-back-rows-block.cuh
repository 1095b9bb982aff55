#pragma once

// F32 arithmetic of FLASH_ATTN_BACK without tensor cores: every type, head size and feature of the operator.
//
// A block owns rows of one side of a KV head, query rows for LSE, D, O and dQ, keys for dK or dV, and walks over tiles of the other side
// in ascending order. The query rows of a KV head are the rows (query i, head of the group) with i major, so that K and V are
// read once for the group.

#include "fattn-back-common.cuh"

constexpr int fattn_back_rows_nthreads = 128;
constexpr int fattn_back_rows_nx       = 32;                     // rows that a block owns
constexpr int fattn_back_rows_ny       = 64;                     // rows of the other side in a tile
constexpr int fattn_back_rows_nd       = 64;                     // components in shared memory at a time
constexpr int fattn_back_rows_stride   = fattn_back_rows_nd + 4; // of a row in shared memory, keeps 16 byte accesses free of bank conflicts
constexpr int fattn_back_rows_max_head = 576;

// P is kept times this, so that what a sink leaves to the keys stays in F32's normal range where all of a gradient does
constexpr float fattn_back_rows_unit = 0x1p24f;

// What of that is taken back where dO is as long as most: its products with P stay below the end of F32's range.
static __device__ __forceinline__ float fattn_back_rows_down(const float most) {
    return most > 0x1p60f ? 0x1p-48f : 1.0f;
}

static_assert(fattn_back_rows_ny == fattn_back_rows_nd, "a tile of weights takes the place of a tile of components");

enum fattn_back_rows_out {
    FATTN_BACK_ROWS_STATS, // LSE and D
    FATTN_BACK_ROWS_DQ,
    FATTN_BACK_ROWS_DK,
    FATTN_BACK_ROWS_DV,
    FATTN_BACK_ROWS_O,
};

// exp(x) within 2 ulp for x that a softmax takes, 0 below exp's normal range, NaN for NaN; as on the CPU. ggml builds with fast
// math, where expf rounds x*log2(e) and is as inexact as x is large.
static __device__ __forceinline__ float fattn_back_rows_exp(const float x) {
    const float z = fmaf(x, 1.44269504f, 0x1.8p23f); // x/ln 2, rounded, in the low bits
    const float n = z - 0x1.8p23f;
    const float r = fmaf(-n, 0x1.7f7d1cp-20f, fmaf(-n, 0x1.62e4p-1f, x));
    float y       = fmaf(r, 1.9875691500e-4f, 1.3981999507e-3f);
    y             = fmaf(r, y, 8.3334519073e-3f);
    y             = fmaf(r, y, 4.1665795894e-2f);
    y             = fmaf(r, y, 1.6666665459e-1f);
    y             = fmaf(r, y, 5.0000001201e-1f);
    y             = fmaf(r, y, 1.0f);
    y             = fmaf(r, y, 1.0f);
    return x < -87.0f ? 0.0f : y * __uint_as_float((__float_as_uint(z) << 23) + 0x3f800000u);
}

// The softmax of a row over some of its keys: the sum l of exp(x - mx + b - mb) and the sum a of the same times dP, where x is a logit,
// b its bias and (mx, mb) those of the largest x + b. A large bias that the row's keys share never rounds its logits.
struct fattn_back_rows_softmax {
    float mx;
    float mb;
    float l;
    float a;

    __device__ __forceinline__ float max() const {
        return mx + mb;
    }

    // what the sums grow by when (mx, mb) becomes the reference
    __device__ __forceinline__ float rescale(const float mx_new, const float mb_new) const {
        return max() == -INFINITY ? 0.0f : fattn_back_rows_exp((mx - mx_new) + (mb - mb_new));
    }

    __device__ __forceinline__ void merge(const fattn_back_rows_softmax & other) {
        const bool keep    = max() >= other.max();
        const float mx_new = keep ? mx : other.mx;
        const float mb_new = keep ? mb : other.mb;
        const float f0     = rescale(mx_new, mb_new);
        const float f1     = other.rescale(mx_new, mb_new);
        l                  = f0 * l + f1 * other.l;
        a                  = f0 * a + f1 * other.a;
        mx                 = mx_new;
        mb                 = mb_new;
    }
};

// sum + error is the sum of the terms so far
static __device__ __forceinline__ void fattn_back_rows_add(float & sum, float & error, const float x) {
    const float y = x + error;
    const float t = sum + y;
    error         = y - (t - sum);
    sum           = t;
}

// Puts components [d0, d0 + nd) of nrows rows into a tile, zeros for rows without offset and beyond D.
template <ggml_type type, bool vec, int nrows>
static __device__ __forceinline__ void fattn_back_rows_load(
    const fattn_back_src & src, const int64_t * offset, const int D, const int d0, float * tile) {
    constexpr int nbatch = type == GGML_TYPE_F32 && !vec ? 1 : 2; // loads in flight, as many as the kernels have registers for
#pragma unroll 1
    for (int i0 = threadIdx.x; i0 < nrows * fattn_back_rows_nd / 8; i0 += nbatch * fattn_back_rows_nthreads) {
        const int e = (i0 % 8) / 4 * 32 + i0 % 4 * 4;
        float4 lo[nbatch];
        float4 hi[nbatch];
#pragma unroll
        for (int l = 0; l < nbatch; ++l) {
            const int64_t off = offset[(i0 + l * fattn_back_rows_nthreads) / 8];
            fattn_back_load8<type, vec>(src, off, d0 + e, off >= 0 ? D : 0, lo[l], hi[l]);
        }
        const bool swap = i0 % 8 >= 4; // the 8 threads of a row write to all banks at once
#pragma unroll
        for (int l = 0; l < nbatch; ++l) {
            float * row                         = tile + (i0 + l * fattn_back_rows_nthreads) / 8 * fattn_back_rows_stride + e;
            *(float4 *) (row + (swap ? 16 : 0)) = swap ? hi[l] : lo[l];
            *(float4 *) (row + (swap ? 0 : 16)) = swap ? lo[l] : hi[l];
        }
    }
}

template <int nrows>
static __device__ __forceinline__ void fattn_back_rows_load_query(
    const fattn_back_src & src, const int64_t * offset, const int D, const int d0, float * tile) {
    if (src.vec) {
        fattn_back_rows_load<GGML_TYPE_F32, true, nrows>(src, offset, D, d0, tile);
    } else {
        fattn_back_rows_load<GGML_TYPE_F32, false, nrows>(src, offset, D, d0, tile);
    }
}

template <int nrows>
static __device__ __forceinline__ void fattn_back_rows_load_key(
    const fattn_back_src & src, const int64_t * offset, const int D, const int d0, float * tile) {
    switch (src.type) {
        case GGML_TYPE_F32:
            fattn_back_rows_load_query<nrows>(src, offset, D, d0, tile);
            break;
        case GGML_TYPE_F16:
            if (src.vec) {
                fattn_back_rows_load<GGML_TYPE_F16, true, nrows>(src, offset, D, d0, tile);
            } else {
                fattn_back_rows_load<GGML_TYPE_F16, false, nrows>(src, offset, D, d0, tile);
            }
            break;
        case GGML_TYPE_BF16:
            if (src.vec) {
                fattn_back_rows_load<GGML_TYPE_BF16, true, nrows>(src, offset, D, d0, tile);
            } else {
                fattn_back_rows_load<GGML_TYPE_BF16, false, nrows>(src, offset, D, d0, tile);
            }
            break;
        case GGML_TYPE_Q8_0:
            fattn_back_rows_load<GGML_TYPE_Q8_0, true, nrows>(src, offset, D, d0, tile);
            break;
        case GGML_TYPE_Q4_0:
            fattn_back_rows_load<GGML_TYPE_Q4_0, true, nrows>(src, offset, D, d0, tile);
            break;
        case GGML_TYPE_Q4_1:
            fattn_back_rows_load<GGML_TYPE_Q4_1, true, nrows>(src, offset, D, d0, tile);
            break;
        case GGML_TYPE_Q5_0:
            fattn_back_rows_load<GGML_TYPE_Q5_0, true, nrows>(src, offset, D, d0, tile);
            break;
        case GGML_TYPE_Q5_1:
            fattn_back_rows_load<GGML_TYPE_Q5_1, true, nrows>(src, offset, D, d0, tile);
            break;
        default:
            break;
    }
}

// rows by_query: of q and dO, else of K and V
template <bool by_query, int nrows>
static __device__ __forceinline__ void fattn_back_rows_load_side(
    const fattn_back_src & query, const fattn_back_src & key, const int64_t * offset, const int D, const int d0, float * tile) {
    if constexpr (by_query) {
        fattn_back_rows_load_query<nrows>(query, offset, D, d0, tile);
    } else {
        fattn_back_rows_load_key<nrows>(key, offset, D, d0, tile);
    }
}

// acc[a][b] += X[ty + 8a] . Y[tx + 16b] over D components
template <bool by_query>
static __device__ __forceinline__ void fattn_back_rows_product(
    const fattn_back_src & query, const fattn_back_src & key, const int64_t * x_offset, const int64_t * y_offset, const int D,
    const int tx, const int ty, float * X, float * Y, float (&acc)[4][4]) {
    for (int d0 = 0; d0 < D; d0 += fattn_back_rows_nd) {
        __syncthreads();
        fattn_back_rows_load_side<by_query, fattn_back_rows_nx>(query, key, x_offset, D, d0, X);
        fattn_back_rows_load_side<!by_query, fattn_back_rows_ny>(query, key, y_offset, D, d0, Y);
        __syncthreads();

        const int nd = min(D - d0, fattn_back_rows_nd);
#pragma unroll 1
        for (int d = 0; d < nd; d += 4) {
            float4 x[4];
#pragma unroll
            for (int a = 0; a < 4; ++a) {
                x[a] = *(const float4 *) (X + (ty + 8 * a) * fattn_back_rows_stride + d);
            }
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const float4 y = *(const float4 *) (Y + (tx + 16 * b) * fattn_back_rows_stride + d);
#pragma unroll
                for (int a = 0; a < 4; ++a) {
                    acc[a][b] += x[a].x * y.x;
                    acc[a][b] += x[a].y * y.y;
                    acc[a][b] += x[a].z * y.z;
                    acc[a][b] += x[a].w * y.w;
                }
            }
        }
    }
}

// acc[a] += W[ty + 8a] * Z[4tx + [0, 4)] over n rows of Z, n % 4 == 0
static __device__ __forceinline__ void fattn_back_rows_accumulate(
    const float * W, const float * Z, const int n, const int tx, const int ty, float4 (&acc)[4]) {
#pragma unroll 1
    for (int y = 0; y < n; y += 4) {
        float4 w[4];
#pragma unroll
        for (int a = 0; a < 4; ++a) {
            w[a] = *(const float4 *) (W + (ty + 8 * a) * fattn_back_rows_stride + y);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float4 z = *(const float4 *) (Z + (y + k) * fattn_back_rows_stride + 4 * tx);
#pragma unroll
            for (int a = 0; a < 4; ++a) {
                const float w_ak = k == 0 ? w[a].x : k == 1 ? w[a].y
                    : k == 2                                ? w[a].z
                                                            : w[a].w;
                acc[a].x += w_ak * z.x;
                acc[a].y += w_ak * z.y;
                acc[a].z += w_ak * z.z;
                acc[a].w += w_ak * z.w;
            }
        }
    }
}

constexpr int fattn_back_rows_occupancy(const int nc) {
    return nc <= 2 ? 4 : nc <= 4 ? 3
                                 : 2;
}

// Shared memory of a block.
struct fattn_back_rows_shared {
    alignas(16) float X[fattn_back_rows_nx * fattn_back_rows_stride]; // components of owned rows, then W
    alignas(16) float Y[fattn_back_rows_ny * fattn_back_rows_stride]; // components of the other side's rows
    int64_t x_offset[2][fattn_back_rows_nx]; // of the rows in q and dO or K and V, -1: no row
    int64_t y_offset[2][fattn_back_rows_ny];
    int64_t mask_offset[fattn_back_rows_ny]; // from here on of the query rows of a tile
    float slope[fattn_back_rows_ny];
    float4 row_ref[fattn_back_rows_ny];
    float row_D[fattn_back_rows_ny];
    int live[2][fattn_back_rows_ny];
};

// Owns: LSE and D, O, dQ, dK or dV of the owner-th nx rows of KV head g of sequence s, over the tiles [tile0, tile_end) of the other side.
// down: fattn_back_rows_down. STATS calls put(row of the unit, softmax over these tiles), a thread a row; else dst gets the gradient, up to 64*nc components.
// Reads: q, dO, K, V, the mask, and but for STATS what fattn_back_rows_finish wrote (ref, D).
// Products: S and, but for dV and O, dP over the components, then but for STATS W*Z over a tile with W = dS, dS, P, P and Z = K, q, dO, V.
// Block: 128 threads, 30 KiB of shared memory. Thread (tx, ty) holds S and dP of the rows ty + 8a and tx + 16b
// and of its rows ty + 8a the components 64c + 4tx + [0, 4) of the gradient.
template <fattn_back_rows_out out, int nc, typename F>
static __device__ __forceinline__ void fattn_back_rows_block(const fattn_back_args & args, fattn_back_rows_shared & shared, const int s,
    const int g, const int owner, const int tile0, const int tile_end, const float4 * ref, const float down, float * dst, const F & put) {
    constexpr bool by_query = out == FATTN_BACK_ROWS_STATS || out == FATTN_BACK_ROWS_DQ || out == FATTN_BACK_ROWS_O; // else by key
    constexpr bool of_p     = out == FATTN_BACK_ROWS_DV || out == FATTN_BACK_ROWS_O;
    constexpr int nx        = fattn_back_rows_nx;
    constexpr int ny        = fattn_back_rows_ny;
    constexpr int stride    = fattn_back_rows_stride;
    constexpr int nq        = by_query ? nx : ny; // query rows in a tile

    float * X = shared.X;
    float * Y = shared.Y;

    const int tid  = threadIdx.x;
    const int lane = tid % WARP_SIZE;
    const int warp = tid / WARP_SIZE;
    const int tx   = warp % 2 * 8 + lane % 8;
    const int ty   = warp / 2 * 4 + lane / 8;

    const int nqueries = args.N * args.G;
    const int x0       = owner * nx + (by_query ? 0 : args.kv_first);
    const int x_end    = by_query ? nqueries : args.kv_first + args.kv_count;
    const int y_end    = by_query ? args.M : nqueries;

    const auto set_query = [&](const int t, const int r, int64_t (*offset)[nq]) {
        const int i      = r / args.G;
        const int h      = r % args.G + g * args.G;
        const bool valid = r < nqueries;
        offset[0][t]     = valid ? args.q.offset(i, h, s) : -1;
        offset[1][t]     = valid ? args.dO.offset(i, h, s) : -1;
        if (valid) {
            shared.mask_offset[t] = args.mask != nullptr ? i * args.mask_nb_row + h % args.mask_nheads * args.mask_nb_head + s % args.mask_nseqs * args.mask_nb_seq : 0;
            shared.slope[t]       = fattn_back_slope(args, h);
            if constexpr (out != FATTN_BACK_ROWS_STATS) {
                shared.row_ref[t] = ref[args.row(i, h, s)];
            }
            if constexpr (out == FATTN_BACK_ROWS_DQ || out == FATTN_BACK_ROWS_DK) {
                shared.row_D[t] = args.D[args.row(i, h, s)];
            }
        }
    };
    const auto set_key = [&](const int t, const int j, const int j_end, int64_t (*offset)[by_query ? ny : nx]) {
        offset[0][t] = j < j_end ? args.k.offset(j, g, s) : -1;
        offset[1][t] = j < j_end ? args.v.offset(j, g, s) : -1;
    };

    // of owned row x and row y of the tile at y0, -inf also where there is no row or no key
    const auto mask_at = [&](const int x, const int y0, const int y) {
        if (x0 + x >= x_end || y0 + y >= y_end) {
            return -INFINITY;
        }
        const int j = by_query ? y0 + y : x0 + x;
        return args.mask != nullptr ? __half2float(*((const half *) (args.mask + shared.mask_offset[by_query ? x : y]) + j)) : 0.0f;
    };

    if (tid < nx) {
        if constexpr (by_query) {
            set_query(tid, x0 + tid, shared.x_offset);
        } else {
            set_key(tid, x0 + tid, x_end, shared.x_offset);
        }
    }

    float4 acc[nc > 0 ? nc : 1][4] = { { { 0.0f, 0.0f, 0.0f, 0.0f } } };
    fattn_back_rows_softmax softmax[4];
    float l_error[4] = { 0.0f };
    float a_error[4] = { 0.0f };
#pragma unroll
    for (int a = 0; a < 4; ++a) {
        softmax[a] = { -INFINITY, 0.0f, 0.0f, 0.0f };
    }

    for (int tile = tile0; tile < tile_end; ++tile) {
        const int y0 = tile * ny;

        __syncthreads();
        if (tid < ny) {
            if constexpr (by_query) {
                set_key(tid, y0 + tid, y_end, shared.y_offset);
            } else {
                set_query(tid, y0 + tid, shared.y_offset);
            }
        }
        __syncthreads();

        int live_b = 0; // bit b: some owned row of this thread sees row tx + 16b
#pragma unroll
        for (int a = 0; a < 4; ++a) {
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                live_b |= (mask_at(ty + 8 * a, y0, tx + 16 * b) != -INFINITY) << b;
            }
        }
        live_b |= __shfl_xor_sync(0xFFFFFFFF, live_b, 8, WARP_SIZE);
        live_b |= __shfl_xor_sync(0xFFFFFFFF, live_b, 16, WARP_SIZE);
        if (lane < 8) {
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                shared.live[warp / 2][tx + 16 * b] = live_b >> b & 1;
            }
        }

        // a row that no owned row sees is as good as absent, whatever bytes it holds
        __syncthreads();
        const bool live_y = tid < ny && (shared.live[0][tid] | shared.live[1][tid]);
        if (tid < ny && !live_y) {
            shared.y_offset[0][tid] = -1;
            shared.y_offset[1][tid] = -1;
        }
        if (!__syncthreads_or(live_y)) {
            continue;
        }

        // S last: its last tile of Y is the first that dQ and dK need
        float dP[4][4] = { { 0.0f } };
        float S[4][4]  = { { 0.0f } };
        if (!of_p && !(out == FATTN_BACK_ROWS_STATS && (args.o.data != nullptr || args.dO.data == nullptr))) {
            fattn_back_rows_product<by_query>(args.dO, args.v, shared.x_offset[1], shared.y_offset[1], args.Dv, tx, ty, X, Y, dP);
        }
        fattn_back_rows_product<by_query>(args.q, args.k, shared.x_offset[0], shared.y_offset[0], args.Dk, tx, ty, X, Y, S);

        __syncthreads();
#pragma unroll
        for (int a = 0; a < 4; ++a) {
            const int x = ty + 8 * a;
            float bias[4];
            bool seen[4];
            float dx[4];
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const float m = mask_at(x, y0, tx + 16 * b);
                seen[b]       = m != -INFINITY;
                bias[b]       = shared.slope[by_query ? x : tx + 16 * b] * m;
                S[a][b]       = fattn_back_logit(args, S[a][b], dx[b]);
            }
            if constexpr (out == FATTN_BACK_ROWS_STATS) {
                fattn_back_rows_softmax & sm = softmax[a];
                float mx                     = sm.mx;
                float mb                     = sm.mb;
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    if (seen[b] && S[a][b] + bias[b] > mx + mb) {
                        mx = S[a][b];
                        mb = bias[b];
                    }
                }
                const float f = sm.rescale(mx, mb);
                sm.mx         = mx;
                sm.mb         = mb;
                sm.l *= f;
                sm.a *= f;
                l_error[a] *= f;
                a_error[a] *= f;
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    const float e = seen[b] && S[a][b] + bias[b] != -INFINITY ? fattn_back_rows_exp((S[a][b] - mx) + (bias[b] - mb)) : 0.0f;
                    fattn_back_rows_add(sm.l, l_error[a], e);
                    fattn_back_rows_add(sm.a, a_error[a], seen[b] ? e * dP[a][b] : 0.0f);
                }
            } else {
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    const int y       = tx + 16 * b;
                    const float4 r    = shared.row_ref[by_query ? x : y];
                    const float P     = fattn_back_rows_exp((S[a][b] - r.x) + (bias[b] - r.y)) * r.z * down;
                    const float W     = of_p ? P : P * (dP[a][b] - shared.row_D[by_query ? x : y]) * dx[b];
                    X[x * stride + y] = seen[b] ? W : 0.0f;
                }
            }
        }

        if constexpr (out != FATTN_BACK_ROWS_STATS) {
            const int D  = of_p ? args.Dv : args.Dk;
            const int nz = min((y_end - y0 + 3) / 4 * 4, ny);
#pragma unroll
            for (int c = nc - 1; c >= 0; --c) {
                const int d0 = c * fattn_back_rows_nd;
                if (d0 < D) {
                    if (of_p || d0 + fattn_back_rows_nd < D) {
                        __syncthreads();
                        fattn_back_rows_load_side<!by_query, ny>(of_p ? args.dO : args.q, of_p ? args.v : args.k, shared.y_offset[of_p], D, d0, Y);
                    }
                    __syncthreads();
                    fattn_back_rows_accumulate(X, Y, nz, tx, ty, acc[c]);
                }
            }
        }
    }

    if constexpr (out == FATTN_BACK_ROWS_STATS) {
        // merge the 16 threads of a row
        float4 * sums = (float4 *) Y;
        __syncthreads();
#pragma unroll
        for (int a = 0; a < 4; ++a) {
            fattn_back_rows_softmax sm = softmax[a];
            sm.l += l_error[a];
            sm.a += a_error[a];
#pragma unroll
            for (int offset = 4; offset > 0; offset >>= 1) {
                sm.merge({ __shfl_xor_sync(0xFFFFFFFF, sm.mx, offset, WARP_SIZE), __shfl_xor_sync(0xFFFFFFFF, sm.mb, offset, WARP_SIZE),
                    __shfl_xor_sync(0xFFFFFFFF, sm.l, offset, WARP_SIZE), __shfl_xor_sync(0xFFFFFFFF, sm.a, offset, WARP_SIZE) });
            }
            if (lane % 8 == 0) {
                sums[warp % 2 * nx + ty + 8 * a] = make_float4(sm.mx, sm.mb, sm.l, sm.a);
            }
        }
        __syncthreads();
        if (tid < nx && x0 + tid < x_end) {
            fattn_back_rows_softmax sm[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float4 f = sums[i * nx + tid];
                sm[i]          = { f.x, f.y, f.z, f.w };
            }
            sm[0].merge(sm[1]);
            put(x0 + tid, sm[0]);
        }
    } else {
        const int D       = of_p ? args.Dv : args.Dk;
        const float scale = of_p ? 1.0f : args.scale;
        const auto finish = [&](const float x) { return scale * x / (fattn_back_rows_unit * down); };
#pragma unroll
        for (int a = 0; a < 4; ++a) {
            const int r = x0 + ty + 8 * a;
            if (r >= x_end) {
                continue;
            }
            int64_t row;
            if constexpr (out == FATTN_BACK_ROWS_O) {
                row = ((int64_t) s * args.N + r / args.G) * args.H + r % args.G + g * args.G;
            } else if constexpr (by_query) {
                row = args.row(r / args.G, r % args.G + g * args.G, s);
            } else {
                row = ((int64_t) s * args.Hkv + g) * args.kv_count + (r - args.kv_first);
            }
#pragma unroll
            for (int c = 0; c < nc; ++c) {
                const int d = c * fattn_back_rows_nd + 4 * tx;
                if (d < D) {
                    *(float4 *) (dst + row * D + d) =
                        make_float4(finish(acc[c][a].x), finish(acc[c][a].y), finish(acc[c][a].z), finish(acc[c][a].w));
                }
            }
        }
    }
}

// LSE, D and ref of query i of head h of sequence s from its softmax over all keys, and the sink.
// P*unit = exp(x - ref.x + b - ref.y)*ref.z, ref.x = inf where a row sees no key or a sink of inf takes it; ref.w is the sink's P.
static __device__ __forceinline__ float4 fattn_back_rows_finish(
    const fattn_back_args & args, const fattn_back_rows_softmax & sm, const int h, float & LSE, float & D) {
    const float sink     = args.sinks != nullptr ? args.sinks[h] : -INFINITY;
    const bool taken     = sink == INFINITY; // all of the row
    const bool sees_keys = sm.l != 0.0f && !taken;

    // the keys' reference stays beside a sink above it: exp(x - sink) may be below F32's range
    const double max     = (double) sm.mx + sm.mb;
    const double top     = fmax(max, (double) sink);
    const double keys    = sees_keys ? exp(max - top) : 0.0;
    const double of_sink = sink > -INFINITY && !taken ? exp(sink - top) : 0.0;
    const double total   = sees_keys ? keys * sm.l + of_sink : 1.0;

    LSE = sees_keys ? (float) (top + log(total)) : sink;
    D   = sees_keys ? (float) (keys * sm.a / total) : 0.0f;
    return make_float4(sees_keys ? sm.mx : INFINITY, sm.mb, (float) (keys / total * fattn_back_rows_unit), (float) (of_sink / total));
}
