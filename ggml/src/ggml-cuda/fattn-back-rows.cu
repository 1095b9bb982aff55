// The rows path of FLASH_ATTN_BACK: F32 arithmetic without tensor cores, every type, head size and feature of the operator.
//
// A block owns rows of one side of a KV head, query rows for LSE, D and dQ, keys for dK or dV, and walks over tiles of the other side
// in ascending order. The query rows of a KV head are the rows (query i, head of the group) with i major, so that K and V are
// read once for the group. Where the owners are too few to fill the device the walk is split, each split writes its own partial
// result, and a second kernel adds the partial results in the order of the splits: one owner, one order, no atomics.

#include "fattn-back-common.cuh"
#include "fattn-back-rows.cuh"

constexpr int fattn_back_rows_nthreads = 128;
constexpr int fattn_back_rows_nx       = 32;                     // rows that a block owns
constexpr int fattn_back_rows_ny       = 64;                     // rows of the other side in a tile
constexpr int fattn_back_rows_nd       = 64;                     // components in shared memory at a time
constexpr int fattn_back_rows_stride   = fattn_back_rows_nd + 4; // of a row in shared memory, keeps 16 byte accesses free of bank conflicts
constexpr int fattn_back_rows_max_head = 576;

// P is kept times this, so that what a sink leaves to the keys stays in F32's normal range where all of a gradient does
constexpr float fattn_back_rows_unit = 0x1p24f;

static_assert(fattn_back_rows_ny == fattn_back_rows_nd, "a tile of weights takes the place of a tile of components");

enum fattn_back_rows_out {
    FATTN_BACK_ROWS_STATS, // LSE and D
    FATTN_BACK_ROWS_DQ,
    FATTN_BACK_ROWS_DK,
    FATTN_BACK_ROWS_DV,
};

// how the work of a launch is laid out: block = ((s*Hkv + g)*nowners + owner)*nsplits + split
struct fattn_back_rows_grid {
    int nowners; // tiles of owned rows in a KV head
    int ntiles;  // tiles of the other side
    int nsplits;
    int tiles_per_split;

    int64_t nblocks(const int64_t nheads) const {
        return nheads * nowners * nsplits;
    }
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

// Owns: LSE and D, dQ, dK or dV of nx rows; stats gets the softmax over a split, out the (partial) gradient of up to 64*nc components.
// Reads: q, dO, K, V, the mask, and but for STATS what fattn_back_rows_combine_stats wrote (ref, D).
// Products: S and, but for dV, dP over the components, then but for STATS W*Z over a tile with W = dS, dS, P and Z = K, q, dO.
// Grid: see fattn_back_rows_grid, 128 threads, 30 KiB of shared memory. Thread (tx, ty) holds S and dP of the rows ty + 8a and tx + 16b
// and of its rows ty + 8a the components 64c + 4tx + [0, 4) of the gradient.
template <fattn_back_rows_out out, int nc>
static __global__ void __launch_bounds__(fattn_back_rows_nthreads, fattn_back_rows_occupancy(nc))
flash_attn_back_rows(
    const fattn_back_args args, const fattn_back_rows_grid grid, const float4 * ref, float4 * stats, float * dst, const int64_t split_stride) {
    constexpr bool by_query = out == FATTN_BACK_ROWS_STATS || out == FATTN_BACK_ROWS_DQ; // else by key
    constexpr int nx        = fattn_back_rows_nx;
    constexpr int ny        = fattn_back_rows_ny;
    constexpr int stride    = fattn_back_rows_stride;
    constexpr int nq        = by_query ? nx : ny; // query rows in a tile

    alignas(16) __shared__ float X[nx * stride]; // components of owned rows, then W
    alignas(16) __shared__ float Y[ny * stride]; // components of the other side's rows
    __shared__ int64_t x_offset[2][nx];        // of the rows in q and dO or K and V, -1: no row
    __shared__ int64_t y_offset[2][ny];
    __shared__ int64_t mask_offset[nq];
    __shared__ float slope[nq];
    __shared__ float4 row_ref[nq];
    __shared__ float row_D[nq];
    __shared__ int live[2][ny];

    ggml_cuda_pdl_sync();

    const int tid  = threadIdx.x;
    const int lane = tid % WARP_SIZE;
    const int warp = tid / WARP_SIZE;
    const int tx   = warp % 2 * 8 + lane % 8;
    const int ty   = warp / 2 * 4 + lane / 8;

    int64_t block   = blockIdx.x;
    const int split = block % grid.nsplits;
    block /= grid.nsplits;
    const int owner = by_query ? grid.nowners - 1 - block % grid.nowners : block % grid.nowners; // the longest first where causal
    block /= grid.nowners;
    const int g = block % args.Hkv;
    const int s = block / args.Hkv;

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
            mask_offset[t] = args.mask != nullptr ? i * args.mask_nb_row + h % args.mask_nheads * args.mask_nb_head + s % args.mask_nseqs * args.mask_nb_seq : 0;
            slope[t]       = fattn_back_slope(args, h);
            if constexpr (out != FATTN_BACK_ROWS_STATS) {
                row_ref[t] = ref[args.row(i, h, s)];
                row_D[t]   = args.D[args.row(i, h, s)];
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
        return args.mask != nullptr ? __half2float(*((const half *) (args.mask + mask_offset[by_query ? x : y]) + j)) : 0.0f;
    };

    if (tid < nx) {
        if constexpr (by_query) {
            set_query(tid, x0 + tid, x_offset);
        } else {
            set_key(tid, x0 + tid, x_end, x_offset);
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

    const int tile_end = min((split + 1) * grid.tiles_per_split, grid.ntiles);
    for (int tile = split * grid.tiles_per_split; tile < tile_end; ++tile) {
        const int y0 = tile * ny;

        __syncthreads();
        if (tid < ny) {
            if constexpr (by_query) {
                set_key(tid, y0 + tid, y_end, y_offset);
            } else {
                set_query(tid, y0 + tid, y_offset);
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
                live[warp / 2][tx + 16 * b] = live_b >> b & 1;
            }
        }

        // a row that no owned row sees is as good as absent, whatever bytes it holds
        __syncthreads();
        const bool live_y = tid < ny && (live[0][tid] | live[1][tid]);
        if (tid < ny && !live_y) {
            y_offset[0][tid] = -1;
            y_offset[1][tid] = -1;
        }
        if (!__syncthreads_or(live_y)) {
            continue;
        }

        // S last: its last tile of Y is the first that dQ and dK need
        float dP[4][4] = { { 0.0f } };
        float S[4][4]  = { { 0.0f } };
        if (out != FATTN_BACK_ROWS_DV && !(out == FATTN_BACK_ROWS_STATS && args.o.data != nullptr)) {
            fattn_back_rows_product<by_query>(args.dO, args.v, x_offset[1], y_offset[1], args.Dv, tx, ty, X, Y, dP);
        }
        fattn_back_rows_product<by_query>(args.q, args.k, x_offset[0], y_offset[0], args.Dk, tx, ty, X, Y, S);

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
                bias[b]       = slope[by_query ? x : tx + 16 * b] * m;
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
                    const float4 r    = row_ref[by_query ? x : y];
                    const float P     = fattn_back_rows_exp((S[a][b] - r.x) + (bias[b] - r.y)) * r.z;
                    const float W     = out == FATTN_BACK_ROWS_DV ? P : P * (dP[a][b] - row_D[by_query ? x : y]) * dx[b];
                    X[x * stride + y] = seen[b] ? W : 0.0f;
                }
            }
        }

        if constexpr (out != FATTN_BACK_ROWS_STATS) {
            constexpr bool z_is_dO = out == FATTN_BACK_ROWS_DV;
            const int D            = z_is_dO ? args.Dv : args.Dk;
            const int nz           = min((y_end - y0 + 3) / 4 * 4, ny);
#pragma unroll
            for (int c = nc - 1; c >= 0; --c) {
                const int d0 = c * fattn_back_rows_nd;
                if (d0 < D) {
                    if (z_is_dO || d0 + fattn_back_rows_nd < D) {
                        __syncthreads();
                        fattn_back_rows_load_side<!by_query, ny>(z_is_dO ? args.dO : args.q, args.k, y_offset[z_is_dO], D, d0, Y);
                    }
                    __syncthreads();
                    fattn_back_rows_accumulate(X, Y, nz, tx, ty, acc[c]);
                }
            }
        }
    }

    if constexpr (out == FATTN_BACK_ROWS_STATS) {
        // merge the 16 threads of a row
        float4 * shared = (float4 *) Y;
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
                shared[warp % 2 * nx + ty + 8 * a] = make_float4(sm.mx, sm.mb, sm.l, sm.a);
            }
        }
        __syncthreads();
        if (tid < nx && x0 + tid < x_end) {
            fattn_back_rows_softmax sm[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float4 f = shared[i * nx + tid];
                sm[i]          = { f.x, f.y, f.z, f.w };
            }
            sm[0].merge(sm[1]);
            const int r                                                                    = x0 + tid;
            stats[split * split_stride + args.row(r / args.G, r % args.G + g * args.G, s)] = make_float4(sm[0].mx, sm[0].mb, sm[0].l, sm[0].a);
        }
    } else {
        const int D       = out == FATTN_BACK_ROWS_DV ? args.Dv : args.Dk;
        const float scale = out == FATTN_BACK_ROWS_DV ? 1.0f : args.scale;
        const auto finish = [&](const float x) { return scale * x / fattn_back_rows_unit; };
#pragma unroll
        for (int a = 0; a < 4; ++a) {
            const int r = x0 + ty + 8 * a;
            if (r >= x_end) {
                continue;
            }
            const int64_t row = by_query ? args.row(r / args.G, r % args.G + g * args.G, s) : ((int64_t) s * args.Hkv + g) * args.kv_count + (r - args.kv_first);
#pragma unroll
            for (int c = 0; c < nc; ++c) {
                const int d = c * fattn_back_rows_nd + 4 * tx;
                if (d < D) {
                    *(float4 *) (dst + split * split_stride + row * D + d) =
                        make_float4(finish(acc[c][a].x), finish(acc[c][a].y), finish(acc[c][a].z), finish(acc[c][a].w));
                }
            }
        }
    }
}

// Owns LSE, D and ref of one query row per warp. Merges the splits of its softmax and the sink; D = dO . o where o is given.
// P*unit = exp(x - ref.x + b - ref.y)*ref.z, ref.x = inf where a row sees no key or a sink of inf takes it; ref.w is the sink's P.
static __global__ void __launch_bounds__(fattn_back_rows_nthreads, 1)
flash_attn_back_rows_combine_stats(const fattn_back_args args, const int nsplits, const float4 * stats, float4 * ref) {
    ggml_cuda_pdl_sync();

    const int lane      = threadIdx.x % WARP_SIZE;
    const int64_t nrows = (int64_t) args.S * args.H * args.N;
    const int64_t row   = ((int64_t) blockIdx.x * fattn_back_rows_nthreads + threadIdx.x) / WARP_SIZE;
    if (row >= nrows) {
        return;
    }
    const int i = row % args.N;
    const int h = row / args.N % args.H;
    const int s = row / args.N / args.H;

    fattn_back_rows_softmax sm = { -INFINITY, 0.0f, 0.0f, 0.0f };
    for (int split = lane; split < nsplits; split += WARP_SIZE) {
        const float4 f = stats[split * nrows + row];
        sm.merge({ f.x, f.y, f.z, f.w });
    }
#pragma unroll
    for (int offset = WARP_SIZE / 2; offset > 0; offset >>= 1) {
        sm.merge({ __shfl_xor_sync(0xFFFFFFFF, sm.mx, offset, WARP_SIZE), __shfl_xor_sync(0xFFFFFFFF, sm.mb, offset, WARP_SIZE),
            __shfl_xor_sync(0xFFFFFFFF, sm.l, offset, WARP_SIZE), __shfl_xor_sync(0xFFFFFFFF, sm.a, offset, WARP_SIZE) });
    }
    const float sink     = args.sinks != nullptr ? args.sinks[h] : -INFINITY;
    const bool taken     = sink == INFINITY; // all of the row
    const bool sees_keys = sm.l != 0.0f && !taken;

    // the keys' reference stays beside a sink above it: exp(x - sink) may be below F32's range
    const double max     = (double) sm.mx + sm.mb;
    const double top     = fmax(max, (double) sink);
    const double keys    = sees_keys ? exp(max - top) : 0.0;
    const double of_sink = sink > -INFINITY && !taken ? exp(sink - top) : 0.0;
    const double total   = sees_keys ? keys * sm.l + of_sink : 1.0;

    float D = sees_keys ? (float) (keys * sm.a / total) : 0.0f;
    if (sees_keys && args.o.data != nullptr) {
        const int64_t offset_o  = args.o.offset(i, h, s);
        const int64_t offset_dO = args.dO.offset(i, h, s);
        D                       = 0.0f;
        for (int d = lane; d < args.Dv; d += WARP_SIZE) {
            D += *(const float *) (args.o.data + offset_o + d * args.o.nb_comp) * *(const float *) (args.dO.data + offset_dO + d * args.dO.nb_comp);
        }
        D = warp_reduce_sum(D);
    }

    if (lane == 0) {
        args.LSE[row] = sees_keys ? (float) (top + log(total)) : sink;
        args.D[row]   = D;
        ref[row]      = make_float4(
            sees_keys ? sm.mx : INFINITY, sm.mb, (float) (keys / total * fattn_back_rows_unit), (float) (of_sink / total));
    }
}

// Owns one gradient of a sink per block: its rows in a fixed order.
static __global__ void __launch_bounds__(fattn_back_rows_nthreads, 1)
flash_attn_back_rows_sinks(const fattn_back_args args, const float4 * ref) {
    __shared__ float partial[fattn_back_rows_nthreads / WARP_SIZE];

    ggml_cuda_pdl_sync();

    const int h = blockIdx.x;

    float sum   = 0.0f;
    float error = 0.0f;
    for (int64_t t = threadIdx.x; t < (int64_t) args.S * args.N; t += fattn_back_rows_nthreads) {
        const int64_t row = args.row(t % args.N, h, t / args.N);
        fattn_back_rows_add(sum, error, -ref[row].w * args.D[row]);
    }
    sum = warp_reduce_sum(sum + error);
    if (threadIdx.x % WARP_SIZE == 0) {
        partial[threadIdx.x / WARP_SIZE] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0.0f;
        for (int w = 0; w < fattn_back_rows_nthreads / WARP_SIZE; ++w) {
            sum += partial[w];
        }
        args.dSinks[h] = sum;
    }
}

// Owns four elements of a gradient per thread: the sum of its splits in their order.
static __global__ void __launch_bounds__(fattn_back_rows_nthreads, 1)
flash_attn_back_rows_combine(const float4 * partial, float4 * dst, const int64_t n, const int nsplits) {
    ggml_cuda_pdl_sync();

    const int64_t i = (int64_t) blockIdx.x * fattn_back_rows_nthreads + threadIdx.x;
    if (i >= n) {
        return;
    }
    float4 sum = partial[i];
    for (int split = 1; split < nsplits; ++split) {
        const float4 x = partial[split * n + i];
        sum.x += x.x;
        sum.y += x.y;
        sum.z += x.z;
        sum.w += x.w;
    }
    dst[i] = sum;
}

// nowned rows and nother rows of the other side in each of nheads KV heads; nbytes: of the result of a split, at most limit in all
static fattn_back_rows_grid fattn_back_rows_get_grid(
    const int nsm, const int64_t nheads, const int64_t nowned, const int64_t nother, const size_t nbytes, const size_t limit) {
    fattn_back_rows_grid grid;
    grid.nowners = (nowned + fattn_back_rows_nx - 1) / fattn_back_rows_nx;
    grid.ntiles  = (nother + fattn_back_rows_ny - 1) / fattn_back_rows_ny;

    // two waves of four blocks
    int64_t nsplits      = 8 * nsm / std::max<int64_t>(nheads * grid.nowners, 1);
    nsplits              = std::min<int64_t>(nsplits, grid.ntiles);
    nsplits              = std::min<int64_t>(nsplits, limit / std::max<size_t>(nbytes, 1));
    nsplits              = std::max<int64_t>(nsplits, 1);
    grid.tiles_per_split = (grid.ntiles + nsplits - 1) / nsplits;
    grid.nsplits         = std::max((grid.ntiles + grid.tiles_per_split - 1) / std::max(grid.tiles_per_split, 1), 1);
    return grid;
}

template <fattn_back_rows_out out>
static void fattn_back_rows_launch(
    const fattn_back_args & args, const fattn_back_rows_grid & grid, const float4 * ref, float4 * stats, float * dst,
    const int64_t split_stride, cudaStream_t stream) {
    const ggml_cuda_kernel_launch_params params(
        dim3(grid.nblocks((int64_t) args.S * args.Hkv), 1, 1), dim3(fattn_back_rows_nthreads, 1, 1), 0, stream);
    if constexpr (out == FATTN_BACK_ROWS_STATS) {
        ggml_cuda_kernel_launch(flash_attn_back_rows<out, 0>, params, args, grid, ref, stats, dst, split_stride);
    } else {
        const int nc = ((out == FATTN_BACK_ROWS_DV ? args.Dv : args.Dk) + fattn_back_rows_nd - 1) / fattn_back_rows_nd;
        if (nc <= 1) {
            ggml_cuda_kernel_launch(flash_attn_back_rows<out, 1>, params, args, grid, ref, stats, dst, split_stride);
        } else if (nc <= 2) {
            ggml_cuda_kernel_launch(flash_attn_back_rows<out, 2>, params, args, grid, ref, stats, dst, split_stride);
        } else if (nc <= 4) {
            ggml_cuda_kernel_launch(flash_attn_back_rows<out, 4>, params, args, grid, ref, stats, dst, split_stride);
        } else {
            constexpr int nc_max = fattn_back_rows_max_head / fattn_back_rows_nd;
            ggml_cuda_kernel_launch(flash_attn_back_rows<out, nc_max>, params, args, grid, ref, stats, dst, split_stride);
        }
    }
}

// a pass over all rows: its grid and its place among the partial results
struct fattn_back_rows_pass {
    float * dst; // NULL: not wanted
    fattn_back_rows_grid grid;
    int64_t nelements; // of the result of a split, floats
    size_t nbytes;     // of all splits' results, 0: there is one split, which writes the result itself
};

struct fattn_back_rows_plan {
    fattn_back_args args;
    fattn_back_rows_pass pass[FATTN_BACK_ROWS_DV + 1];
    size_t ref_bytes; // what combine_stats keeps of every row comes first in the workspace
};

static fattn_back_rows_pass fattn_back_rows_get_pass(
    const fattn_back_args & args, const fattn_back_rows_out out, float * dst, const int nsm, const size_t limit) {
    fattn_back_rows_pass pass = {};
    if (dst == nullptr) {
        return pass;
    }
    const int64_t nqueries = (int64_t) args.N * args.G;
    const int64_t nheads   = (int64_t) args.S * args.Hkv;
    const bool by_queries  = out == FATTN_BACK_ROWS_STATS || out == FATTN_BACK_ROWS_DQ;
    const int width        = out == FATTN_BACK_ROWS_STATS ? 4 : (out == FATTN_BACK_ROWS_DV ? args.Dv : args.Dk);
    pass.dst               = dst;
    pass.nelements         = nheads * (by_queries ? nqueries : args.kv_count) * width;
    pass.grid              = fattn_back_rows_get_grid(
        nsm, nheads, by_queries ? nqueries : args.kv_count, by_queries ? args.M : nqueries, pass.nelements * sizeof(float), limit);
    pass.nbytes = pass.grid.nsplits > 1 || out == FATTN_BACK_ROWS_STATS ? pass.grid.nsplits * pass.nelements * sizeof(float) : 0;
    return pass;
}

// one gradient, by the rows that own it
template <fattn_back_rows_out out>
static void fattn_back_rows_gradient(const fattn_back_rows_plan & plan, const float4 * ref, float * partial, cudaStream_t stream) {
    const fattn_back_rows_pass & pass = plan.pass[out];
    if (pass.dst == nullptr) {
        return;
    }
    if (pass.nbytes == 0) {
        fattn_back_rows_launch<out>(plan.args, pass.grid, ref, nullptr, pass.dst, 0, stream);
        return;
    }
    fattn_back_rows_launch<out>(plan.args, pass.grid, ref, nullptr, partial, pass.nelements, stream);

    const int64_t n = pass.nelements / 4;
    ggml_cuda_kernel_launch(flash_attn_back_rows_combine,
        ggml_cuda_kernel_launch_params(
            dim3((n + fattn_back_rows_nthreads - 1) / fattn_back_rows_nthreads, 1, 1), dim3(fattn_back_rows_nthreads, 1, 1), 0, stream),
        (const float4 *) partial, (float4 *) pass.dst, n, pass.grid.nsplits);
}

const char * ggml_cuda_flash_attn_back_rows_refusal(const int device, const ggml_tensor * dst) {
    const ggml_flash_attn_back_node node = ggml_flash_attn_back_decode(dst);

    if (ggml_cuda_info().devices[device].warp_size != WARP_SIZE) {
        return "the device's warps do not have 32 threads";
    }
    if (ggml_cuda_info().devices[device].smpb < 32 * 1024) {
        return "the device has less than 32 KiB of shared memory per block";
    }
    if (node.Dk % 8 != 0 || node.Dk > fattn_back_rows_max_head || node.Dv % 8 != 0 || node.Dv > fattn_back_rows_max_head) {
        return "the head sizes are not multiples of 8 up to 576";
    }

    // the indices of rows in a KV head and of blocks are 32 bit; where there are splits the blocks are few
    const int64_t nqueries = node.N * (node.H / node.Hkv);
    const int64_t nheads   = node.S * node.Hkv;
    const int64_t nmax     = INT_MAX - fattn_back_rows_ny;
    if (nqueries > nmax || node.M > nmax || node.S * node.H * node.N > nmax ||
        nheads * ((node.kv_count + fattn_back_rows_nx - 1) / fattn_back_rows_nx) > nmax) {
        return "more than 2^31 - 65 queries or keys in a KV head, query rows or tiles of keys";
    }
    return nullptr;
}

static void fattn_back_rows_run(const fattn_back_rows_plan & plan, char * workspace, cudaStream_t stream) {
    const fattn_back_args & args = plan.args;
    const int64_t nrows          = (int64_t) args.S * args.H * args.N;
    float4 * ref                 = (float4 *) workspace;
    float * partial              = (float *) (workspace + plan.ref_bytes);

    // nothing to do without queries, but K and V still get their zeros
    if (nrows > 0) {
        const fattn_back_rows_grid & grid = plan.pass[FATTN_BACK_ROWS_STATS].grid;
        fattn_back_rows_launch<FATTN_BACK_ROWS_STATS>(args, grid, nullptr, (float4 *) partial, nullptr, nrows, stream);
        ggml_cuda_kernel_launch(flash_attn_back_rows_combine_stats,
            ggml_cuda_kernel_launch_params(
                dim3((nrows * WARP_SIZE + fattn_back_rows_nthreads - 1) / fattn_back_rows_nthreads, 1, 1),
                dim3(fattn_back_rows_nthreads, 1, 1), 0, stream),
            args, grid.nsplits, (const float4 *) partial, ref);
    }

    fattn_back_rows_gradient<FATTN_BACK_ROWS_DQ>(plan, ref, partial, stream);
    fattn_back_rows_gradient<FATTN_BACK_ROWS_DK>(plan, ref, partial, stream);
    fattn_back_rows_gradient<FATTN_BACK_ROWS_DV>(plan, ref, partial, stream);

    if (args.dSinks != nullptr) {
        ggml_cuda_kernel_launch(flash_attn_back_rows_sinks,
            ggml_cuda_kernel_launch_params(dim3(args.H, 1, 1), dim3(fattn_back_rows_nthreads, 1, 1), 0, stream),
            args, (const float4 *) ref);
    }
}

fattn_back_plan ggml_cuda_flash_attn_back_rows_plan(const int device, const ggml_tensor * dst, const size_t limit) {
    fattn_back_args args = fattn_back_get_args(dst);
    if (args.saved.stamp != nullptr) { // by another path
        args.o = {};
    }
    const auto pass = [&](const fattn_back_rows_out out, float * part) {
        return fattn_back_rows_get_pass(args, out, part, ggml_cuda_info().devices[device].nsm, limit);
    };
    const fattn_back_rows_plan plan = {
        args,
        { pass(FATTN_BACK_ROWS_STATS, args.LSE), pass(FATTN_BACK_ROWS_DQ, args.dQ), pass(FATTN_BACK_ROWS_DK, args.dK),
            pass(FATTN_BACK_ROWS_DV, args.dV) },
        GGML_PAD((size_t) args.S * args.H * args.N * sizeof(float4), 256),
    };
    size_t partial = 0;
    for (const fattn_back_rows_pass & p : plan.pass) {
        partial = std::max(partial, p.nbytes);
    }
    return { plan.ref_bytes + partial, [plan](char * workspace, cudaStream_t stream) { fattn_back_rows_run(plan, workspace, stream); } };
}
