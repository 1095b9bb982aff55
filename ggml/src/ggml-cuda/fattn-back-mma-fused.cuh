#pragma once

// Up to head size 128, where the blocks fill the device: eight products in two kernels, and nothing of a pair in memory.
//   queries  owns rows of Q and dO, streams K and V: LSE, D and dQ
//   keys     owns rows of K and V, streams Q and dO of the group's heads: dK and dV
// A warp owns 16 or 32 rows. S and dP (keys: transposed) have them as rows, so that P and dS are operands straight from the accumulators.
//
// queries forms dQ before LSE and D are known: E = exp2(S - m) with a running maximum, and with a running estimate Dt of D
//     A = sum_j E (dP - Dt) K    B = sum_j E K    dQ = (A + (Dt - D) B) / sum_j E
// When Dt moves, A takes the difference times B. Dt follows D while the row's mass grows, so that A does not cancel.

#include "fattn-back-mma-common.cuh"

#include <algorithm>

#define FATTN_BACK_FUSED_WARPS      8
#define FATTN_BACK_FUSED_MAX_BLOCKS 4 // row blocks that a block of queries may own
#define FATTN_BACK_FUSED_BAND       (32 << 20) // bytes of streamed operands that blocks which run side by side may share
#define FATTN_BACK_FUSED_BLOCKS     1024     // own tiles whose blocks finish at much the same time in any order

#define FATTN_BACK_FUSED_SHIFT_E 10 // E is an operand times 2^10
#define FATTN_BACK_FUSED_LAZY    2.0f // the running maximum may lag by this power of two

struct fattn_back_fused_config {
    int nm;      // 16 rows of a warp
    int cols;    // streamed rows whose S is in registers
    int cols_dP; // queries: the same of dP
    int rows;    // of a streamed tile
    int nsplit;  // sets of warps that own the same rows and share the streamed tiles
    bool pairs;  // keys: two warps own the same 32 rows; each forms S and dP with half of a streamed tile, and sums half of the columns
    int stages;  // each nsplit tiles of both streamed operands

    constexpr __host__ __device__ int own() const { return FATTN_BACK_FUSED_WARPS / nsplit * nm * 16 / (pairs ? 2 : 1); }
};

// Own and streamed rows of an operand in shared memory, swizzled or padded against bank conflicts of ldmatrix.
template <int D>
struct fattn_back_fused_tile {
    static constexpr bool swizzled = D % 64 == 0;
    static constexpr int pitch     = swizzled ? 2 * D : 2 * D + 16;

    // byte of eight components
    static constexpr __host__ __device__ int at(const int row, const int chunk) {
        return row * pitch + (swizzled ? chunk ^ (row % 8) : chunk) * 16;
    }
    // 16 components times k on from a byte of the first 16
    static __device__ __forceinline__ uint32_t step(const uint32_t at, const int k) {
        return swizzled ? (at ^ (k % 4 * 32)) + k / 4 * 128 : at + k * 32;
    }
};

// Shared memory of a block: own rows of two operands, stages, what the pairs of warps exchange, the stages' items, states of items.
template <int D, bool keys, bool softcap>
struct fattn_back_fused_smem {
    static constexpr __host__ __device__ int tile(const fattn_back_fused_config & c) { // of both operands, with the queries' values
        return 2 * c.rows * fattn_back_fused_tile<D>::pitch + (keys ? c.rows * (softcap ? 5 : 4) * (int) sizeof(float) : 0);
    }
    static constexpr __host__ __device__ int own(const fattn_back_fused_config & c) {
        return 2 * c.own() * fattn_back_fused_tile<D>::pitch;
    }
    static constexpr __host__ __device__ int exchange(const fattn_back_fused_config & c) { // a warp's P and dS
        return c.pairs ? 2 * c.nm * 16 * c.cols * (int) sizeof(half) : 0;
    }
    static constexpr __host__ __device__ int meta(const fattn_back_fused_config & c) {
        return own(c) + c.stages * c.nsplit * tile(c) + FATTN_BACK_FUSED_WARPS * exchange(c);
    }
    static constexpr __host__ __device__ int bytes(const fattn_back_fused_config & c) {
        return meta(c) + c.stages * c.nsplit * (int) sizeof(int2) + FATTN_BACK_FUSED_WARPS * WARP_SIZE;
    }
};

template <int D, bool keys, bool softcap>
static constexpr __host__ __device__ fattn_back_fused_config fattn_back_fused_get_config(const int arch) {
    const int smem            = fattn_back_mma_smem(arch);
    const bool small          = smem <= 99 * 1024;
    fattn_back_fused_config c = {};
    c.rows                    = small ? 32 : 64;
    c.nsplit                  = 1;
    c.pairs                   = keys && !small && !softcap && D > 64 && D % 32 == 0;
    c.nm                      = 1;
    if (softcap) {
        c.cols = D > 64 && !keys ? 16 : 32;
    } else if (D <= 64 && (keys || smem == 227 * 1024)) {
        c.nm     = 2;
        c.cols   = 32;
        c.nsplit = keys ? 2 : 1;
    } else if (c.pairs) {
        c.nm   = 2;
        c.cols = 32;
    } else {
        c.rows = D <= 64 ? 64 : c.rows;
        c.cols = c.rows;
    }
    c.cols_dP        = D <= 64 || c.cols < 32 || smem != 227 * 1024 ? 16 : 32;
    using L          = fattn_back_fused_smem<D, keys, softcap>;
    const int stages = (smem - L::bytes(c)) / (c.nsplit * (L::tile(c) + (int) sizeof(int2)));
    c.stages         = stages < 4 ? stages : 4;
    return c;
}

#ifdef AMPERE_MMA_AVAILABLE
// sum and maximum over the four lanes that share a row
static __device__ __forceinline__ float fattn_back_quad_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}
static __device__ __forceinline__ float fattn_back_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}

template <int n, int m>
static __device__ __forceinline__ void fattn_back_fused_zero(float (&x)[n][m][4]) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
#pragma unroll
        for (int j = 0; j < m; ++j) {
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                x[i][j][l] = 0.0f;
            }
        }
    }
}

// Two accumulators to an operand. Volatile, so that it is done here: the operand takes half of the registers.
static __device__ __forceinline__ uint32_t fattn_back_fused_pack(const float x, const float y) {
    uint32_t z;
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x));
    return z;
}

// accumulators to operands of 16 x 16
template <int nm, int n>
static __device__ __forceinline__ void fattn_back_fused_operand(uint32_t (&a)[n / 2][nm][4], const float (&x)[nm][n][4]) {
#pragma unroll
    for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
        for (int ni = 0; ni < n; ++ni) {
            a[ni / 2][mi][ni % 2 * 2 + 0] = fattn_back_fused_pack(x[mi][ni][0], x[mi][ni][1]);
            a[ni / 2][mi][ni % 2 * 2 + 1] = fattn_back_fused_pack(x[mi][ni][2], x[mi][ni][3]);
        }
    }
}

// x[16*nm own rows x 8*n streamed rows] of D components; a, b: what ldmatrix reads first
template <int D, typename T, int nm, int n>
static __device__ __forceinline__ void fattn_back_fused_product(float (&x)[nm][n][4], const uint32_t a, const uint32_t b) {
    fattn_back_fused_zero(x);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        uint32_t A[nm][4];
#pragma unroll
        for (int mi = 0; mi < nm; ++mi) {
            fattn_back_ldmatrix(A[mi], T::step(a, k) + mi * 16 * T::pitch);
        }
#pragma unroll
        for (int ni = 0; ni < n / 2; ++ni) {
            uint32_t B[4];
            fattn_back_ldmatrix(B, T::step(b, k) + ni * 16 * T::pitch);
#pragma unroll
            for (int mi = 0; mi < nm; ++mi) {
                fattn_back_mma(x[mi][2 * ni + 0], A[mi], B[0], B[1]);
                fattn_back_mma(x[mi][2 * ni + 1], A[mi], B[2], B[3]);
            }
        }
    }
}

// x += a X and y += b Y, each 16 streamed rows, X what ldmatrix reads from bt and Y the same to_y bytes on
template <typename T, int to_y, int nm, int n>
static __device__ __forceinline__ void fattn_back_fused_accumulate(
    float (&x)[nm][n][4], const uint32_t (&a)[nm][4], float (&y)[nm][n][4], const uint32_t (&b)[nm][4], const uint32_t bt) {
#pragma unroll
    for (int ni = 0; ni < n / 2; ++ni) {
        uint32_t X[4];
        uint32_t Y[4];
        fattn_back_ldmatrix_trans(X, T::step(bt, ni));
        if constexpr (to_y != 0) {
            fattn_back_ldmatrix_trans(Y, T::step(bt + to_y, ni));
        }
        const uint32_t (&B)[4] = to_y != 0 ? Y : X;
#pragma unroll
        for (int mi = 0; mi < nm; ++mi) {
            fattn_back_mma(x[mi][2 * ni + 0], a[mi], X[0], X[1]);
            fattn_back_mma(y[mi][2 * ni + 0], b[mi], B[0], B[1]);
            fattn_back_mma(x[mi][2 * ni + 1], a[mi], X[2], X[3]);
            fattn_back_mma(y[mi][2 * ni + 1], b[mi], B[2], B[3]);
        }
    }
}

#endif // AMPERE_MMA_AVAILABLE

// Grid: bands of units whose streamed operands fit the L2 cache; in a band the own tiles with most to do under a causal mask first
// (queries: the last ones), of all its units. Block: warps with nm*16 own rows each, nsplit times.
template <int D, bool keys, bool softcap>
static __global__ void __launch_bounds__(FATTN_BACK_FUSED_WARPS * WARP_SIZE, 1) flash_attn_back_fused(const fattn_back_mma_params p) {
#ifdef AMPERE_MMA_AVAILABLE
    constexpr fattn_back_fused_config c = fattn_back_fused_get_config<D, keys, softcap>(__CUDA_ARCH__);
    using T                             = fattn_back_fused_tile<D>;
    using L                             = fattn_back_fused_smem<D, keys, softcap>;
    constexpr int nm                    = c.nm;
    constexpr int nn                    = c.cols / 8;
    constexpr int nthreads              = FATTN_BACK_FUSED_WARPS * WARP_SIZE;
    constexpr int ncols                 = c.pairs ? D / 2 : D; // of the accumulators
    constexpr int own_blocks            = c.own() / FATTN_BACK_MMA_ROWS;
    constexpr int operand               = c.rows * T::pitch; // bytes of a streamed tile
    constexpr int pitch                 = fattn_back_mma_pitch(D);
    static_assert(c.stages >= 2 && c.rows % c.cols == 0, "bad configuration");
    static_assert(keys ? c.own() == FATTN_BACK_MMA_KEYS : c.own() % FATTN_BACK_MMA_ROWS == 0, "bad configuration");

    extern __shared__ __align__(128) char smem[];
    const uint32_t base = fattn_back_shared(smem);
    int2 * meta         = (int2 *) (smem + L::meta(c));
    uint8_t * state     = (uint8_t *) (meta + c.stages * c.nsplit) + threadIdx.x / WARP_SIZE * WARP_SIZE; // of the warp
    const int lane      = threadIdx.x % WARP_SIZE;
    const int warp      = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP_SIZE, 0); // known to be uniform
    const int set       = warp / (FATTN_BACK_FUSED_WARPS / c.nsplit);
    const int wr        = warp % (FATTN_BACK_FUSED_WARPS / c.nsplit) / (c.pairs ? 2 : 1) * nm * 16; // the warp's first row of the block's
    const int part_of   = c.pairs ? warp % 2 : 0; // the warp's half of a streamed tile and of the columns
    const int g         = lane / 4;
    const int c2        = lane % 4 * 2;

    // own tile: row blocks own0/64 on, or a key tile
    const int ntiles = keys ? p.ntiles(false) : p.RB / own_blocks;
    const int band   = blockIdx.x / (p.band * ntiles);
    const int rest   = blockIdx.x % (p.band * ntiles);
    const int nunits = min(p.band, p.units - band * p.band);
    const int lunit  = band * p.band + rest % nunits;
    const int unit   = p.unit0 + lunit;
    const int tile   = keys ? p.kt_first() + rest / nunits : ntiles - 1 - rest / nunits;
    const int own0   = tile * c.own();

    const int row0 = lunit * p.rows(); // operands of a group of units have fewer than 2^31 rows
    const int key0 = lunit * p.keys();

    // n rows of an operand
    const auto load_rows = [&](const uint32_t dst, const half * x, const int row, const auto nrows) {
        constexpr int chunks = D / 8;
        constexpr int n      = decltype(nrows)::value * chunks;
        if constexpr (nthreads % chunks == 0) {
            constexpr int step = nthreads / chunks; // rows
            static_assert(n % nthreads == 0 && (!T::swizzled || step % 8 == 0), "the swizzle must not change from step to step");
            const uint32_t to = dst + T::at(threadIdx.x / chunks, threadIdx.x % chunks);
            const half * from = x + (int64_t) (row + threadIdx.x / chunks) * pitch + threadIdx.x % chunks * 8;
#pragma unroll
            for (int j = 0; j < n / nthreads; ++j) {
                fattn_back_cp_async_16(to + j * step * T::pitch, from + j * step * pitch);
            }
        } else {
            for (int t = fattn_back_rare(threadIdx.x); t < n; t += nthreads) {
                fattn_back_cp_async_16(dst + T::at(t / chunks, t % chunks), x + (int64_t) (row + t / chunks) * pitch + t % chunks * 8);
            }
        }
    };
    load_rows(base, keys ? p.k_hi : p.q_hi, (keys ? key0 : row0) + own0, std::integral_constant<int, c.own()>());
    load_rows(base + c.own() * T::pitch, keys ? p.v : p.dO, (keys ? key0 : row0) + own0, std::integral_constant<int, c.own()>());

    // The streamed items: granules of keys, or row blocks. States of an item: two bits for each own row block or granule; keys:
    // then a bit for each granule, whether queries has split S.
    const int nitems  = keys ? p.RB : 2 * p.KT;
    const auto states = [&](const int i) {
        uint32_t x  = 0;
        const int u = fattn_back_rare(lunit);
        const int t = fattn_back_rare(tile);
        if (i < nitems) {
            if constexpr (keys) {
                const fattn_back_mma_tile_row row(p, p.unit0 + u, i);
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    x |= row.granule(2 * t + k) << 2 * k;
                }
                if (x != 0 && !p.split_all) {
                    const uint4 split = *(const uint4 *) (p.split + p.split_at(u, i, 4 * t));
                    x |= (split.x | split.y) != 0 ? 0x10 : 0;
                    x |= (split.z | split.w) != 0 ? 0x20 : 0;
                }
            } else {
#pragma unroll
                for (int k = 0; k < own_blocks; ++k) {
                    x |= fattn_back_mma_tile_row(p, p.unit0 + u, t * own_blocks + k).granule(i) << 2 * k;
                }
            }
        }
        return x;
    };
    int item      = -WARP_SIZE; // 32 of them, one a lane
    uint32_t todo = 0;
    int part      = 0; // of an item
    // loads the next stage; an empty one is the last
    const auto load = [&](const int stage) {
#pragma unroll
        for (int s = 0; s < c.nsplit; ++s) {
            while (todo == 0 && item + WARP_SIZE < nitems) {
                item += WARP_SIZE;
                const uint32_t x = states(item + lane);
                __syncwarp();
                state[lane] = x;
                __syncwarp();
                todo = __ballot_sync(0xFFFFFFFF, x != 0);
            }
            const int i = __ffs(todo) - 1;
            int2 m      = make_int2(-1, 0); // first row, states
            if (i >= 0) {
                m.x                = (item + i) * 64 + part * c.rows;
                m.y                = state[i];
                const uint32_t dst = base + L::own(c) + (stage * c.nsplit + s) * L::tile(c);
                load_rows(dst, keys ? p.q_hi : p.k_hi, (keys ? row0 : key0) + m.x, std::integral_constant<int, c.rows>());
                load_rows(dst + operand, keys ? p.dO : p.v, (keys ? row0 : key0) + m.x, std::integral_constant<int, c.rows>());
                if constexpr (keys) {
                    constexpr int n = c.rows / 2; // threads that load two rows of a pair of values
                    if (threadIdx.x < 2 * n) {
                        const float2 * from = (threadIdx.x < n ? p.stat_s : p.stat_d) + row0 + m.x;
                        fattn_back_cp_async_16(dst + 2 * operand + threadIdx.x * 16, from + threadIdx.x % n * 2);
                    }
                    if constexpr (softcap) {
                        if (threadIdx.x < c.rows / 4) {
                            const float * from = p.dot_q + row0 + m.x;
                            fattn_back_cp_async_16(dst + 2 * operand + 4 * n * 8 + threadIdx.x * 16, from + threadIdx.x * 4);
                        }
                    }
                }
                part = (part + 1) % (64 / c.rows);
                if (part == 0) {
                    todo &= todo - 1;
                }
            }
            if (threadIdx.x == 0) {
                meta[stage * c.nsplit + s] = m;
            }
        }
        fattn_back_cp_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < c.stages - 1; ++i) {
        load(i);
    }

    // ldmatrix: A as 16 rows x 16 components, B as 16 rows x 16 components and as its transpose
    const uint32_t a_src  = base + T::at(wr + lane % 16, lane / 16);
    const uint32_t b_src  = base + L::own(c) + set * L::tile(c) + T::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const uint32_t bt_src = base + L::own(c) + set * L::tile(c) + T::at(lane % 16, lane / 16) + part_of * ncols * (int) sizeof(half);

    // of the own rows g and g + 8 of each 16: queries
    float scale[nm][2]; // log2(e) x = scale * product of the operands
    float m[nm][2];     // the maximum that E is relative to
    float l[nm][2];     // sum of E
    float e[nm][2];     // the lane's sum of E dP
    float lref[nm][2];  // l when Dt was set
    float Dt[nm][2];
    float ru[nm][2];    // softcap: the lane's sums of E u (dP - Dt) and E u
    float rb[nm][2];
    if constexpr (!keys) {
#pragma unroll
        for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                scale[mi][r] = exp2f(-p.exp_q[row0 + own0 + wr + mi * 16 + r * 8 + g] - p.exp_k[lunit]);
                m[mi][r]     = -INFINITY;
                l[mi][r] = e[mi][r] = lref[mi][r] = Dt[mi][r] = ru[mi][r] = rb[mi][r] = 0.0f;
            }
        }
    }

    float acc_s[nm][ncols / 8][4]; // queries: A, keys: dK
    float acc_p[nm][ncols / 8][4]; // queries: B, keys: dV
    fattn_back_fused_zero(acc_s);
    fattn_back_fused_zero(acc_p);

    int stage = 0;
#pragma unroll 1
    while (true) {
        fattn_back_cp_async_wait<c.stages - 2>();
        __syncthreads();
        if (meta[stage * c.nsplit].x < 0) {
            break;
        }
        load(stage == 0 ? c.stages - 1 : stage - 1);
        const int2 item_m     = meta[stage * c.nsplit + set];
        const uint32_t offset = stage * c.nsplit * L::tile(c);
        stage                 = stage + 1 == c.stages ? 0 : stage + 1;
        const int own_block   = wr / FATTN_BACK_MMA_ROWS;
        const int now         = item_m.y >> 2 * own_block & 3;
        const bool hidden     = now == FATTN_BACK_TILE_SKIP;
        if (!c.pairs && hidden) {
            continue; // pairs of warps go on, to the barrier of their exchange
        }
#pragma unroll 1
        for (int n0 = part_of * c.cols; n0 < (c.pairs ? (part_of + 1) * c.cols : c.rows); n0 += c.cols) {
            const uint32_t b  = b_src + offset + n0 * T::pitch;
            const uint32_t bt = bt_src + offset + n0 * T::pitch;

            float S[nm][nn][4];
            fattn_back_fused_product<D, T>(S, a_src, b);

            // where S is large: + q_lo k_hi + q_hi k_lo, the low halves from global memory
            const auto add_low = [&]() {
                const half * own_lo = (keys ? p.k_lo : p.q_lo) +
                    (int64_t) (fattn_back_rare(keys ? key0 : row0) + own0 + wr + g) * pitch + c2;
                const half * str_lo = (keys ? p.q_lo : p.k_lo) +
                    (int64_t) (fattn_back_rare(keys ? row0 : key0) + item_m.x + n0 + g) * pitch + c2;
#pragma unroll 1
                for (int k = 0; k < D / 16; ++k) {
                    uint32_t hi[nm][4];
                    uint32_t lo[nm][4];
#pragma unroll
                    for (int mi = 0; mi < nm; ++mi) {
                        fattn_back_ldmatrix(hi[mi], T::step(a_src, k) + mi * 16 * T::pitch);
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            lo[mi][i] = *(const uint32_t *) (own_lo + (mi * 16 + i % 2 * 8) * pitch + k * 16 + i / 2 * 8);
                        }
                    }
#pragma unroll
                    for (int ni = 0; ni < nn / 2; ++ni) {
                        uint32_t B[4];
                        uint32_t Blo[4];
                        fattn_back_ldmatrix(B, T::step(b, k) + ni * 16 * T::pitch);
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            Blo[i] = *(const uint32_t *) (str_lo + (ni * 16 + i / 2 * 8) * pitch + k * 16 + i % 2 * 8);
                        }
#pragma unroll
                        for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                            for (int j = 0; j < 2; ++j) {
                                fattn_back_mma(S[mi][2 * ni + j], lo[mi], B[2 * j], B[2 * j + 1]);
                                fattn_back_mma(S[mi][2 * ni + j], hi[mi], Blo[2 * j], Blo[2 * j + 1]);
                            }
                        }
                    }
                }
            };

            float u[softcap ? nm : 1][softcap ? nn : 1][4]; // 1 - tanh^2
            const char * stat = smem + L::own(c) + set * L::tile(c) + offset + 2 * operand + (n0 + c2) * 8;
            GGML_UNUSED(stat);
            const bool mixed = now == FATTN_BACK_TILE_MIXED;

            // S = log2(e) times the logit with the mask, from log2(e)*scale*qk; dot: that of K's mean
            const auto logits = [&](const auto & dot) {
                const int unit   = p.unit0 + fattn_back_rare(lunit);
                const int own    = fattn_back_rare(own0) + wr;
                const int str    = fattn_back_rare(item_m.x) + n0;
                const int head   = unit % p.a.Hkv * p.a.G + (keys ? str : own) / FATTN_BACK_MMA_ROWS % p.a.G;
                const char * row = nullptr; // of the mask, of the first query and key
                float slope      = 0.0f;
                // queries beyond the end: of the mask's last row, as they have no result
                const int nq = p.a.N - 1 - p.unit_query(keys ? str : own);
                const int nk = p.a.M - (keys ? own : str);
                if (mixed && p.a.mask != nullptr) {
                    row = p.a.mask + unit / p.a.Hkv % p.a.mask_nseqs * p.a.mask_nb_seq + head % p.a.mask_nheads * p.a.mask_nb_head +
                        p.unit_query(keys ? str : own) * p.a.mask_nb_row + (keys ? own : str) * (int64_t) sizeof(half);
                    slope = fattn_back_slope(p.a, head) * 1.4426950408889634f;
                }
#pragma unroll
                for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                    for (int ni = 0; ni < nn; ++ni) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            float & x = S[mi][ni][i];
                            if constexpr (softcap) {
                                const float z = x + dot(mi, ni, i);
                                const float f = fattn_back_exp2(-2.0f * fabsf(z) / p.a.logit_softcap);
                                const float v = 1.0f / (1.0f + f);
                                u[mi][ni][i]  = 4.0f * f * v * v;
                                x             = copysignf(1.4426950408889634f * p.a.logit_softcap * (1.0f - f) * v, z);
                            }
                            const int q   = keys ? ni * 8 + c2 + i % 2 : mi * 16 + i / 2 * 8 + g;
                            const int key = keys ? mi * 16 + i / 2 * 8 + g : ni * 8 + c2 + i % 2;
                            if (mixed && key >= nk) {
                                x = -INFINITY;
                            } else if (row != nullptr) {
                                const char * bias = row + min(q, nq) * p.a.mask_nb_row + key * (int64_t) sizeof(half);
                                x += slope * __half2float(*(const half *) bias);
                            }
                        }
                    }
                }
            };

            if constexpr (keys) {
                if (p.split_all || (item_m.y >> (4 + own_block) & 1) != 0) {
                    add_low();
                }
                if (softcap || mixed) {
#pragma unroll
                    for (int ni = 0; ni < nn; ++ni) {
                        const float4 s = *(const float4 *) (stat + ni * 64);
#pragma unroll
                        for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                S[mi][ni][i] *= i % 2 == 0 ? s.x : s.z;
                            }
                        }
                    }
                    logits([&](const int, const int ni, const int i) {
                        return *(const float *) (smem + L::own(c) + set * L::tile(c) + offset + 2 * operand + c.rows * 16 +
                            (n0 + ni * 8 + c2 + i % 2) * 4);
                    });
                }
                const bool scaled = softcap || mixed;
#pragma unroll
                for (int ni = 0; ni < nn; ++ni) {
                    float4 s = *(const float4 *) (stat + ni * 64);
                    s.x      = scaled ? 1.0f : s.x;
                    s.z      = scaled ? 1.0f : s.z;
                    if (c.pairs && hidden) {
                        s.y = s.w = -INFINITY;
                    }
#pragma unroll
                    for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            S[mi][ni][i] = fattn_back_exp2(fmaf(S[mi][ni][i], i % 2 == 0 ? s.x : s.z, i % 2 == 0 ? s.y : s.w));
                        }
                    }
                }
                float dP[nm][nn][4];
                fattn_back_fused_product<D, T>(dP, a_src + c.own() * T::pitch, b + operand);
#pragma unroll
                for (int ni = 0; ni < nn; ++ni) {
                    const float4 s = *(const float4 *) (stat + c.rows * 8 + ni * 64);
#pragma unroll
                    for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            float x = S[mi][ni][i];
                            if constexpr (softcap) {
                                x *= u[mi][ni][i];
                            }
                            dP[mi][ni][i] = x * fmaf(dP[mi][ni][i], i % 2 == 0 ? s.x : s.z, -(i % 2 == 0 ? s.y : s.w));
                        }
                    }
                }
                uint32_t P16[nn / 2][nm][4];
                uint32_t dS16[nn / 2][nm][4];
                fattn_back_fused_operand(P16, S);
                fattn_back_fused_operand(dS16, dP);
                uint4 * exchange = (uint4 *) (smem + L::meta(c) - (FATTN_BACK_FUSED_WARPS - warp) * L::exchange(c)) + lane;
                if constexpr (c.pairs) {
#pragma unroll
                    for (int k = 0; k < nn / 2; ++k) {
#pragma unroll
                        for (int mi = 0; mi < nm; ++mi) {
                            ggml_cuda_memcpy_1<16>(exchange + ((k * nm + mi) * 2 + 0) * WARP_SIZE, P16[k][mi]);
                            ggml_cuda_memcpy_1<16>(exchange + ((k * nm + mi) * 2 + 1) * WARP_SIZE, dS16[k][mi]);
                        }
                    }
                }
#pragma unroll
                for (int k = 0; k < nn / 2; ++k) {
                    fattn_back_fused_accumulate<T, operand>(acc_s, dS16[k], acc_p, P16[k], bt + k * 16 * T::pitch);
                }
                if constexpr (c.pairs) {
                    // the other half of the streamed tile
                    __syncthreads();
                    exchange += (1 - 2 * part_of) * L::exchange(c) / (int) sizeof(uint4);
                    const uint32_t bt_other = bt + (1 - 2 * part_of) * c.cols * T::pitch;
#pragma unroll
                    for (int k = 0; k < nn / 2; ++k) {
#pragma unroll
                        for (int mi = 0; mi < nm; ++mi) {
                            ggml_cuda_memcpy_1<16>(P16[k][mi], exchange + ((k * nm + mi) * 2 + 0) * WARP_SIZE);
                            ggml_cuda_memcpy_1<16>(dS16[k][mi], exchange + ((k * nm + mi) * 2 + 1) * WARP_SIZE);
                        }
                        fattn_back_fused_accumulate<T, operand>(acc_s, dS16[k], acc_p, P16[k], bt_other + k * 16 * T::pitch);
                    }
                }
            } else {
                float top[nm][2];
                const auto row_max = [&]() {
#pragma unroll
                    for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            top[mi][r] = -INFINITY;
#pragma unroll
                            for (int ni = 0; ni < nn; ++ni) {
                                top[mi][r] = fmaxf(top[mi][r], fmaxf(S[mi][ni][2 * r], S[mi][ni][2 * r + 1]));
                            }
                            top[mi][r] = fattn_back_quad_max(top[mi][r]);
                        }
                    }
                };
                row_max();
                bool split = p.split_all;
                if (!p.split_all) {
                    // Where the mask and a softcap leave S as it is, a negative S matters in rows only that have no larger one.
                    bool large = false;
#pragma unroll
                    for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            const float x = top[mi][r] * scale[mi][r];
                            large         = large || x > FATTN_BACK_MMA_SPLIT_LIMIT || fmaxf(x, m[mi][r]) < -FATTN_BACK_MMA_SPLIT_LIMIT;
                            if (softcap || mixed) {
#pragma unroll
                                for (int ni = 0; ni < nn; ++ni) {
                                    large = large ||
                                        fminf(S[mi][ni][2 * r], S[mi][ni][2 * r + 1]) * scale[mi][r] < -FATTN_BACK_MMA_SPLIT_LIMIT;
                                }
                            }
                        }
                    }
                    split = __any_sync(0xFFFFFFFF, large);
                    if (split && lane < nm * ((c.cols + 31) / 32)) {
                        const int b                                    = (own0 + wr) / FATTN_BACK_MMA_ROWS;
                        const int keys32                               = (item_m.x + n0) / 32 + lane / nm;
                        const int rows16                               = wr % FATTN_BACK_MMA_ROWS / 16 + lane % nm;
                        p.split[p.split_at(lunit, b, keys32) + rows16] = 1;
                    }
                }
                if (split) {
                    add_low();
                    row_max();
                }
                float to_log2[nm][2];
#pragma unroll
                for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        to_log2[mi][r] = softcap || mixed ? 1.0f : scale[mi][r];
                    }
                }
                if (softcap || mixed) {
#pragma unroll
                    for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                        for (int ni = 0; ni < nn; ++ni) {
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                S[mi][ni][i] *= scale[mi][i / 2];
                            }
                        }
                    }
                    logits([&](const int mi, const int, const int i) {
                        return p.dot_q[fattn_back_rare(row0) + own0 + wr + mi * 16 + i / 2 * 8 + g];
                    });
                    row_max();
                }

                float alpha[nm][2];
                bool moves = false;
#pragma unroll
                for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const float x = top[mi][r] * to_log2[mi][r];
                        alpha[mi][r]  = 1.0f;
                        if (x > m[mi][r] + FATTN_BACK_FUSED_LAZY) {
                            alpha[mi][r] = fattn_back_exp2(m[mi][r] - x);
                            m[mi][r]     = x;
                            moves        = true;
                        }
                    }
                }
                if (__any_sync(0xFFFFFFFF, moves)) {
#pragma unroll
                    for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            l[mi][r] *= alpha[mi][r];
                            e[mi][r] *= alpha[mi][r];
                            lref[mi][r] = 0.0f;
                            if constexpr (softcap) {
                                ru[mi][r] *= alpha[mi][r];
                                rb[mi][r] *= alpha[mi][r];
                            }
#pragma unroll
                            for (int ni = 0; ni < D / 8; ++ni) {
#pragma unroll
                                for (int i = 2 * r; i < 2 * r + 2; ++i) {
                                    acc_s[mi][ni][i] *= alpha[mi][r];
                                    acc_p[mi][ni][i] *= alpha[mi][r];
                                }
                            }
                        }
                    }
                }
#pragma unroll
                for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const float shift = m[mi][r] == -INFINITY ? 0.0f : FATTN_BACK_FUSED_SHIFT_E - m[mi][r];
#pragma unroll
                        for (int ni = 0; ni < nn; ++ni) {
#pragma unroll
                            for (int i = 0; i < 2; ++i) {
                                float & x = S[mi][ni][2 * r + i];
                                x         = fattn_back_exp2(fmaf(x, to_log2[mi][r], shift));
                            }
                        }
                    }
                }
                uint32_t E16[nn / 2][nm][4];
                fattn_back_fused_operand(E16, S);
                constexpr int nd = c.cols_dP / 8;
#pragma unroll
                for (int n1 = 0; n1 < nn; n1 += nd) {
                    // the sum of the rounded E, so that P sums to 1: a product with ones
#pragma unroll
                    for (int mi = 0; mi < nm; ++mi) {
                        float sum[4] = { 0.0f };
#pragma unroll
                        for (int k = 0; k < nd / 2; ++k) {
                            fattn_back_mma(sum, E16[n1 / 2 + k][mi], 0x3C003C00, 0x3C003C00);
                        }
                        l[mi][0] += sum[0];
                        l[mi][1] += sum[2];
                    }
                    float dP[nm][nd][4];
                    fattn_back_fused_product<D, T>(dP, a_src + c.own() * T::pitch, b + operand + n1 * 8 * T::pitch);
                    float E[nm][nd][4];
                    moves = false;
#pragma unroll
                    for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                        for (int ni = 0; ni < nd; ++ni) {
#pragma unroll
                            for (int r = 0; r < 2; ++r) {
                                const float2 x       = __half22float2(fattn_back_as_half2(E16[(n1 + ni) / 2][mi][ni % 2 * 2 + r]));
                                E[mi][ni][2 * r + 0] = x.x;
                                E[mi][ni][2 * r + 1] = x.y;
                                e[mi][r]             = fmaf(x.x, dP[mi][ni][2 * r + 0], e[mi][r]);
                                e[mi][r]             = fmaf(x.y, dP[mi][ni][2 * r + 1], e[mi][r]);
                                moves                = moves || l[mi][r] > 1.5f * lref[mi][r];
                            }
                        }
                    }
                    // the warp's rows move together, so that they move seldom
                    if (__any_sync(0xFFFFFFFF, moves)) {
#pragma unroll
                        for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                            for (int r = 0; r < 2; ++r) {
                                const float sum   = fattn_back_quad_sum(e[mi][r]);
                                const float D_new = l[mi][r] > 0.0f ? sum / l[mi][r] : 0.0f;
                                const float f     = Dt[mi][r] - D_new;
                                Dt[mi][r]         = D_new;
                                lref[mi][r]       = l[mi][r];
                                if constexpr (softcap) {
                                    ru[mi][r] = fmaf(f, rb[mi][r], ru[mi][r]);
                                }
#pragma unroll
                                for (int ni = 0; ni < D / 8; ++ni) {
#pragma unroll
                                    for (int i = 2 * r; i < 2 * r + 2; ++i) {
                                        acc_s[mi][ni][i] = fmaf(f, acc_p[mi][ni][i], acc_s[mi][ni][i]);
                                    }
                                }
                            }
                        }
                    }
                    if (p.a.dQ == nullptr) {
                        continue;
                    }
#pragma unroll
                    for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                        for (int ni = 0; ni < nd; ++ni) {
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                if constexpr (softcap) {
                                    E[mi][ni][i] *= u[mi][n1 + ni][i];
                                    rb[mi][i / 2] += E[mi][ni][i];
                                }
                                dP[mi][ni][i] = E[mi][ni][i] * (dP[mi][ni][i] - Dt[mi][i / 2]);
                                if constexpr (softcap) {
                                    ru[mi][i / 2] += dP[mi][ni][i];
                                }
                            }
                        }
                    }
                    uint32_t dS16[nd / 2][nm][4];
                    fattn_back_fused_operand(dS16, dP);
                    if constexpr (softcap) {
                        uint32_t Eu[nd / 2][nm][4];
                        fattn_back_fused_operand(Eu, E);
#pragma unroll
                        for (int k = 0; k < nd / 2; ++k) {
                            fattn_back_fused_accumulate<T, 0>(acc_s, dS16[k], acc_p, Eu[k], bt + (n1 / 2 + k) * 16 * T::pitch);
                        }
                    } else {
#pragma unroll
                        for (int k = 0; k < nd / 2; ++k) {
                            fattn_back_fused_accumulate<T, 0>(acc_s, dS16[k], acc_p, E16[n1 / 2 + k], bt + (n1 / 2 + k) * 16 * T::pitch);
                        }
                    }
                }
            }
        }
    }
    fattn_back_cp_async_wait<0>();

    if constexpr (keys) {
        if constexpr (c.nsplit > 1) {
            // the sets' sums, in their order
            static_assert(c.nsplit == 2 && L::meta(c) >= nthreads / 2 * nm * D / 8 * 8 * 4, "not done");
            float4 * sums = (float4 *) smem + threadIdx.x % (nthreads / 2);
            __syncthreads();
            if (set == 1) {
#pragma unroll
                for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                    for (int ni = 0; ni < D / 8; ++ni) {
                        ggml_cuda_memcpy_1<16>(sums + ((mi * D / 8 + ni) * 2 + 0) * (nthreads / 2), acc_s[mi][ni]);
                        ggml_cuda_memcpy_1<16>(sums + ((mi * D / 8 + ni) * 2 + 1) * (nthreads / 2), acc_p[mi][ni]);
                    }
                }
            }
            __syncthreads();
            if (set == 1) {
                return;
            }
#pragma unroll
            for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                for (int ni = 0; ni < D / 8; ++ni) {
                    float x[4];
                    float y[4];
                    ggml_cuda_memcpy_1<16>(x, sums + ((mi * D / 8 + ni) * 2 + 0) * (nthreads / 2));
                    ggml_cuda_memcpy_1<16>(y, sums + ((mi * D / 8 + ni) * 2 + 1) * (nthreads / 2));
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        acc_s[mi][ni][i] += x[i];
                        acc_p[mi][ni][i] += y[i];
                    }
                }
            }
        }
        const auto store = [&](float * dst, const int head_size, const float (&acc)[nm][ncols / 8][4], const float factor) {
            if (dst == nullptr) {
                return;
            }
#pragma unroll
            for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int key = own0 + wr + mi * 16 + r * 8 + g;
                    if (key >= p.a.kv_first && key < p.a.kv_first + p.a.kv_count) {
                        float * x = dst + ((int64_t) unit * p.a.kv_count + key - p.a.kv_first) * head_size + part_of * ncols + c2;
#pragma unroll
                        for (int ni = 0; ni < ncols / 8; ++ni) {
                            if (part_of * ncols + ni * 8 + c2 < head_size) {
                                *(float2 *) (x + ni * 8) = make_float2(acc[mi][ni][2 * r] * factor, acc[mi][ni][2 * r + 1] * factor);
                            }
                        }
                    }
                }
            }
        };
        const float e_v = -FATTN_BACK_MMA_SHIFT_P - p.exp_dO_min[lunit];
        store(p.a.dV, p.a.Dv, acc_p, exp2f(e_v));
        store(p.a.dK, p.a.Dk, acc_s, 0.6931471805599453f * exp2f(e_v - p.exp_v[lunit] - p.exp_q_min[lunit]));
    } else {
        const int first = fattn_back_rare(tile) * c.own() + wr;
        const int b     = first / FATTN_BACK_MMA_ROWS;
        const int head  = unit % p.a.Hkv * p.a.G + b % p.a.G;
#pragma unroll
        for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int lrow      = first + mi * 16 + r * 8 + g;
                const int q         = p.unit_query(lrow);
                const int64_t row   = row0 + lrow;
                const float mass    = l[mi][r];
                const float sum     = fattn_back_quad_sum(e[mi][r]);
                const float sum_u   = softcap ? fattn_back_quad_sum(ru[mi][r]) : 0.0f;
                const float mass_u  = softcap ? fattn_back_quad_sum(rb[mi][r]) : 0.0f;
                const float e_q     = p.exp_q[row];
                const float e_dO    = p.exp_dO[row];
                const float dot_q   = softcap ? 0.0f : p.dot_q[row];
                const float dot_dO  = p.dot_dO[row];
                const float unscale = exp2f(-e_dO - p.exp_v[lunit]); // from dP's units
                const float of_keys = mass > 0.0f ? m[mi][r] - FATTN_BACK_FUSED_SHIFT_E + log2f(mass) : -INFINITY;
                // S here lacks the constant that K's mean makes
                const float sink = p.a.sinks != nullptr ? 1.4426950408889634f * p.a.sinks[head] - dot_q : -INFINITY;
                const float top  = fmaxf(of_keys, sink);
                const bool any   = top > -INFINITY && top < INFINITY && q < p.a.N; // a sink of inf takes all
                float lse        = -INFINITY;
                float weight     = 0.0f; // from E to P
                float D_row      = 0.0f;
                float Draw       = 0.0f;
                float R          = 0.0f;
                if (any) {
                    lse                = top + log2f(fattn_back_exp2(of_keys - top) + fattn_back_exp2(sink - top));
                    const float p_keys = fattn_back_exp2(of_keys - lse);
                    const float p_sink = fattn_back_exp2(sink - lse);
                    weight             = mass > 0.0f ? p_keys / mass : 0.0f;
                    D_row              = sum * weight;
                    Draw               = D_row * unscale + dot_dO * p_keys;
                    if (p.a.sinks != nullptr) {
                        D_row -= dot_dO != 0.0f ? p_sink * dot_dO * exp2f(e_dO + p.exp_v[lunit]) : 0.0f; // that of a row of zeros is large
                        R = p_sink * Draw;
                    }
                    if constexpr (softcap) {
                        R = (sum_u + (Dt[mi][r] - D_row) * mass_u) * weight * unscale;
                    }
                }
                if (lane % 4 == 0) {
                    const float f = exp2f(p.exp_q_min[lunit] - e_q);
                    p.stat_s[row] = make_float2(
                        exp2f(-e_q - p.exp_k[lunit]), any ? FATTN_BACK_MMA_SHIFT_P + p.exp_dO_min[lunit] - e_dO - lse : -INFINITY);
                    p.stat_d[row] = make_float2(f, f * D_row);
                    if (q < p.a.N) {
                        const int64_t i = p.a.row(q, head, unit / p.a.Hkv);
                        p.a.LSE[i]      = top == INFINITY ? INFINITY : 0.6931471805599453f * (lse + dot_q);
                        p.a.D[i]        = Draw;
                    }
                }
                if (p.a.dQ != nullptr && q < p.a.N) {
                    const float factor = p.a.scale * weight * exp2f(-e_dO - p.exp_v[lunit] - p.exp_k[lunit]);
                    const float fb     = factor * (Dt[mi][r] - D_row);
                    float * dst        = p.a.dQ + p.a.row(q, head, unit / p.a.Hkv) * p.a.Dk + c2;
#pragma unroll
                    for (int ni = 0; ni < D / 8; ++ni) {
                        if (ni * 8 + c2 < p.a.Dk) {
                            float2 x;
                            x.x = acc_s[mi][ni][2 * r + 0] * factor + acc_p[mi][ni][2 * r + 0] * fb;
                            x.y = acc_s[mi][ni][2 * r + 1] * factor + acc_p[mi][ni][2 * r + 1] * fb;
                            if (p.rank1) {
                                const float * mean = p.mean_k + lunit * FATTN_BACK_PREP_MAX_D + ni * 8 + c2;
                                x.x += p.a.scale * R * mean[0];
                                x.y += p.a.scale * R * mean[1];
                            }
                            *(float2 *) (dst + ni * 8) = x;
                        }
                    }
                }
            }
        }
    }
#else
    GGML_UNUSED(p);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

template <int D, bool keys, bool softcap>
static void fattn_back_fused_launch(const fattn_back_mma_params & p, const int arch, cudaStream_t stream) {
    const fattn_back_fused_config c = fattn_back_fused_get_config<D, keys, softcap>(arch);
    const int smem                  = fattn_back_fused_smem<D, keys, softcap>::bytes(c);
    const int ntiles                = keys ? p.ntiles(false) : p.RB * FATTN_BACK_MMA_ROWS / c.own();
    CUDA_SET_SHARED_MEMORY_LIMIT((flash_attn_back_fused<D, keys, softcap>), smem);
    flash_attn_back_fused<D, keys, softcap><<<p.units * ntiles, FATTN_BACK_FUSED_WARPS * WARP_SIZE, smem, stream>>>(p);
    CUDA_CHECK(cudaGetLastError());
}

template <int D, bool softcap>
static void ggml_cuda_flash_attn_back_fused_case(fattn_back_mma_params & p, const int arch, cudaStream_t stream) {
    // as many units as fit the L2 cache, and no more than it takes to even out the blocks' work
    const auto band = [&](const int64_t nrows, const int ntiles) {
        const int64_t fit  = FATTN_BACK_FUSED_BAND / (nrows * (p.Pk + p.Pv) * (int64_t) sizeof(half));
        const int64_t even = (FATTN_BACK_FUSED_BLOCKS + ntiles - 1) / ntiles;
        return (int) std::clamp<int64_t>(std::min(fit, even), 1, p.units);
    };
    p.band = band(p.keys(), p.RB / FATTN_BACK_FUSED_MAX_BLOCKS);
    fattn_back_fused_launch<D, false, softcap>(p, arch, stream);
    if (p.a.dK != nullptr || p.a.dV != nullptr) {
        p.band = band(p.rows(), p.ntiles(false));
        fattn_back_fused_launch<D, true, softcap>(p, arch, stream);
    }
}
