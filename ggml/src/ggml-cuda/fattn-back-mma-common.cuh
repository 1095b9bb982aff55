#pragma once

// What the kernels of the mma path of FLASH_ATTN_BACK share: their parameters, tiles in shared memory, products, logits.
//
//   prep      operands to fp16 once: K and V centred, rows scaled by powers of two; the mask reduced to a table of tiles
//   forward   owns queries: S, O (two products); O and LSE of a training graph, or LSE and D of a backward that has neither
//   backward  owns keys: S, dP, dV, dK, dQ (five products), from LSE and D
//   pieces    the same beyond head size 192, dQ by rows from dS in memory
//
// A unit is a (sequence, KV head). Its rows are blocks of 64 queries of one head, block b = (query block b/G, head b%G), so that
// all heads of the group share K, V, and in pairs of blocks mostly the mask. Row in the unit = 64*b + (query in the block).

#include "fattn-back-prep.cuh"

#define FATTN_BACK_MMA_ROWS    64 // queries of a row block
#define FATTN_BACK_MMA_KEYS    128 // operands have keys for whole tiles of so many
#define FATTN_BACK_MMA_GRANULE 64 // keys of a tile of the mask's table
#define FATTN_BACK_MMA_WARPS   8 // of the backward kernel

#define FATTN_BACK_MMA_SHIFT_E 10 // exp2(S - m) is an operand times 2^10
#define FATTN_BACK_MMA_SHIFT_P 12 // P is an operand times 2^12
#define FATTN_BACK_MMA_LOG2E   1.4426950408889634f

// |log2(e) x| from which a unit's S is computed from operands in high and low halves
#define FATTN_BACK_MMA_HILO_LIMIT 20.0f

// large of a unit: S from high and low halves; beyond FATTN_BACK_GUARD_PEAKED, too; its forward was in F32
#define FATTN_BACK_MMA_LARGE  1
#define FATTN_BACK_MMA_PEAKED 2
#define FATTN_BACK_MMA_IN_F32 3

// arrays in the workspace; [n] are the dimensions, units and rows counted from the group's first
struct fattn_back_mma_params {
    fattn_back_args a;

    int Pk; // head sizes padded to what the kernels load, the padding is 0
    int Pv;
    int QB; // query blocks
    int RB; // row blocks of a unit, even, the last one may have no queries
    int KT; // key tiles of FATTN_BACK_MMA_KEYS
    fattn_back_mask_table mask; // QB query tiles, 2*KT key tiles: granules
    fattn_back_guard guard;

    // group of units whose operands are in the workspace
    int unit0;
    int units;
    int rb0;     // their rows: the first row block, even, and the row blocks, even
    int rblocks;
    int nparts;       // of the column statistics
    float * colparts; // [units][2][nparts][3*256 + 1] sums, minima and maxima of K's and V's columns, number of keys
    float * mean_k;   // [units][256]
    float * mean_v;
    float * exp_k;    // [units] K' = (K - mean) * 2^exp_k
    float * exp_v;
    uint32_t * large; // [S*Hkv] not 0: S from high and low halves
    uint32_t * fresh; // [S*Hkv] not 0: LSE and D, or O, are computed and not taken from what a forward has saved
    half * k_hi;      // [units][128*KT][Pk]
    half * k_lo;
    half * v;         // [units][128*KT][Pv]
    half * q_hi;      // [units][64*rblocks][Pk] scale*log2(e)*Q * 2^exp_q
    half * q_lo;
    half * dO;        // [units][64*rblocks][Pv] dO * 2^exp_dO
    float * exp_q;    // [units][64*rblocks]
    float * exp_dO;
    float * dot_q;    // [units][64*rblocks] scale*log2(e)*Q . mean(K)
    float * dot_dO;   // [units][64*rblocks] dO . mean(V)
    int * exp_q_min;  // [units]
    int * exp_dO_min;
    int band;         // units whose blocks run side by side, as they share the L2 cache

    // forward
    int nsplits;     // blocks that share the keys of a pair of row blocks
    bool again;      // only units with large logits, which the first time has found
    float2 * sums;   // [nsplits][units][64*rblocks] of the split's keys: LSE, log2 and without mean(K), and D in dP's scale without mean(V)
    float * part_o;  // [nsplits][units][64*rblocks][Dv] of the split's keys: O in V's scale without mean(V)

    // backward: log2(e) x = stat.x * product, P = exp2(log2(e) x + stat.y), dS = P (stat.z dP - stat.w)
    float4 * stat; // [units][64*rblocks]
    half * weight; // [units][64*rblocks] from dS to the weight that a unit's rows share in dK
    float * R;     // [units][64*rblocks] dQ has the term scale * R * mean(K); NULL without sinks
    int * ticket;  // number of blocks that have started
    int * turn;    // [nchains][units][64*rblocks/16][8] for a warp's columns of dQ: 1 + the key tile that was added last
    int step;      // rows whose dQ is added to at once, and a row block if they are fewer
    int nchains;   // of key tiles that add to dQ in turns; more than one: each to sums of its own
    int nranges;   // blocks that share the row blocks of a key tile
    bool accumulate; // dK and dV have sums of earlier rows
    float * part_q; // [nchains][units][64*rblocks][Dk], NULL: dQ itself
    float * part_k; // [nranges][units][kv_count][Dk], NULL: dK itself
    float * part_v; // [nranges][units][kv_count][Dv]

    // backward in pieces
    int piece_rows;  // a piece: row blocks and key tiles of a unit whose dS is in the workspace at once
    int piece_tiles;
    int row_blocks;  // of a row tile
    int nslots;      // pieces that the workspace holds
    int lag;         // pieces from one's dS to its dQ
    int nsm;         // blocks that run at once
    half * dS;       // [nslots][piece_rows][keys of the piece / 64] tiles of 64 x 64, as mma takes them
    float * dS_sums; // [nslots][piece_rows][piece_tiles][64] with softcap: of dS tanh^2, negative
    int * formed;    // [pieces] key tiles whose dS is there
    int * used;      // [pieces] row tiles whose dQ has it
    int * turn_k;    // [units][key tiles] dK and dV have the sums of so many ranges of rows
    int * turn_q;    // [units][row tiles] dQ has the sums of so many ranges of keys

    __host__ __device__ int64_t rows() const { return (int64_t) FATTN_BACK_MMA_ROWS * rblocks; }
    __host__ __device__ int64_t keys() const { return (int64_t) FATTN_BACK_MMA_KEYS * KT; }

    // key tiles of the backward, each of n keys: all where dQ is wanted, else those of the window
    __host__ __device__ int key_tile0(const int n) const { return a.dQ != nullptr ? 0 : a.kv_first / n; }
    __host__ __device__ int key_tiles(const int n) const {
        return ((a.dQ != nullptr ? a.M : a.kv_first + a.kv_count) - 1) / n + 1 - key_tile0(n);
    }

    // ranges of rows, the last rows first, and of n key tiles, each a side of a piece
    __host__ __device__ int row_ranges() const { return (rblocks + piece_rows - 1) / piece_rows; }
    __host__ __device__ int key_ranges(const int n) const { return (n + piece_tiles - 1) / piece_tiles; }

    // of row block b of the unit: query head in the unit's group, first query
    __host__ __device__ int head(const int unit, const int b) const { return unit % a.Hkv * a.G + b % a.G; }
    __host__ __device__ int query(const int b) const { return b / a.G * FATTN_BACK_MMA_ROWS; }
};

// the tiles of a row block
struct fattn_back_mma_tile_row {
    const uint8_t * tiles; // NULL: no mask
    int M;                 // keys, 0 for a row block without queries

    __device__ __forceinline__ fattn_back_mma_tile_row(const fattn_back_mma_params & p, const int unit, const int b) {
        const int qb = b / p.a.G;
        tiles        = nullptr;
        M            = qb < p.QB ? p.a.M : 0;
        if (qb < p.QB && p.mask.tiles != nullptr) {
            tiles = p.mask.row(p.a, p.head(unit, b), unit / p.a.Hkv, qb);
        }
    }

    // with a granule of keys
    __device__ __forceinline__ fattn_back_tile granule(const int gr) const {
        if (tiles != nullptr) {
            return (fattn_back_tile) tiles[gr];
        }
        return gr * FATTN_BACK_MMA_GRANULE >= M     ? FATTN_BACK_TILE_SKIP
            : (gr + 1) * FATTN_BACK_MMA_GRANULE > M ? FATTN_BACK_TILE_MIXED
                                                    : FATTN_BACK_TILE_FULL;
    }
    // with n granules from the first on, two bits for each
    template <int n>
    __device__ __forceinline__ int granules(const int first) const {
        int x = 0;
#pragma unroll
        for (int i = 0; i < n; ++i) {
            x |= granule(first + i) << 2 * i;
        }
        return x;
    }
};

// LSE with the sink, and the weights of the keys and of the sink; of_keys: LSE of the keys; all log2 and without mean(K)
struct fattn_back_mma_softmax {
    bool any; // the row has a weight on keys that is a number
    bool inf; // a sink of inf takes all
    bool all; // a sink leaves the keys less than its own rounding
    float lse;
    float keys;
    float sink;

    __device__ __forceinline__ fattn_back_mma_softmax(const fattn_back_args & a, const float of_keys, const float dot_q, const int h) {
        const float of_sink = a.sinks == nullptr ? -INFINITY : a.sinks[h] == INFINITY ? INFINITY
                                                                                      : fattn_back_log2_sink(a.sinks[h], a.logit_softcap != 0.0f ? 0.0f : dot_q / FATTN_BACK_MMA_LOG2E);
        const float top     = fmaxf(of_keys, of_sink);
        inf                 = top == INFINITY;
        any                 = top > -INFINITY && !inf;
        all                 = any && of_keys < of_sink - 26.0f;
        lse                 = any ? top + log2f(exp2f(of_keys - top) + exp2f(of_sink - top)) : -INFINITY;
        keys                = any ? exp2f(of_keys - lse) : 0.0f;
        sink                = any ? exp2f(of_sink - lse) : 0.0f;
    }
};

static __device__ __forceinline__ float fattn_back_exp2(const float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// elements of an operand's row in the workspace, for an instance with head size D
static constexpr __host__ __device__ int fattn_back_mma_pitch(const int D) {
    return (D + 31) / 32 * 32;
}

// dynamic shared memory of a multiprocessor that blocks can use, by architecture
static constexpr __host__ __device__ int fattn_back_mma_smem(const int arch) {
    return arch == 900 || (arch >= 1000 && arch < 1200) ? 227 * 1024 : arch == 800 || arch == 870 ? 163 * 1024
                                                                                                  : 99 * 1024;
}

// Rows of D components in shared memory, swizzled or padded against bank conflicts of ldmatrix.
template <int D>
struct fattn_back_mma_tile {
    static constexpr bool swizzled = (D & (D - 1)) == 0;
    static constexpr int pitch     = swizzled ? 2 * D : 2 * D + 16;

    // byte of eight components
    static constexpr __host__ __device__ int at(const int row, const int chunk) {
        return row * pitch + (swizzled ? chunk ^ (row % 8) : chunk) * 16;
    }
    // 16*k components on from byte at(row, chunk), where adding 2*k to chunk carries no bit below the eights
    static __device__ __forceinline__ uint32_t step(const uint32_t at, const int k) {
        return swizzled ? (at ^ (k % 4 * 32)) + k / 4 * 128 : at + k * 32;
    }
};

#ifdef __CUDA_ARCH__
#define FATTN_BACK_MMA_ARCH __CUDA_ARCH__
#else
#define FATTN_BACK_MMA_ARCH 900
#endif // __CUDA_ARCH__

#ifdef AMPERE_MMA_AVAILABLE
// What is derived from the result is formed again where it is seldom needed, instead of kept in registers across the loop around it.
static __device__ __forceinline__ int fattn_back_rare(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

static __device__ __forceinline__ uint32_t fattn_back_shared(const void * ptr) {
    return (uint32_t) __cvta_generic_to_shared(ptr);
}

static __device__ __forceinline__ void fattn_back_cp_async_16(const uint32_t dst, const void * src) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src));
}

// zeros if not valid
static __device__ __forceinline__ void fattn_back_cp_async_16(const uint32_t dst, const void * src, const bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0));
}

static __device__ __forceinline__ void fattn_back_cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int n>
static __device__ __forceinline__ void fattn_back_cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

static __device__ __forceinline__ void fattn_back_ldmatrix(uint32_t (&x)[4], const uint32_t src) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(src));
}

// the first two of the four matrices
static __device__ __forceinline__ void fattn_back_ldmatrix_half(uint32_t (&x)[4], const uint32_t src) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(src));
}

static __device__ __forceinline__ void fattn_back_ldmatrix_trans_half(uint32_t (&x)[4], const uint32_t src) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(src));
}

static __device__ __forceinline__ void fattn_back_ldmatrix_trans(uint32_t (&x)[4], const uint32_t src) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(src));
}

// D[16x8] += A[16x16] B[16x8]
static __device__ __forceinline__ void fattn_back_mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t b0, const uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two accumulators to an operand. Volatile, so that it is done here: the operand takes half of the registers.
static __device__ __forceinline__ uint32_t fattn_back_mma_pack(const float x, const float y) {
    uint32_t z;
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x));
    return z;
}

// over the four lanes that share a row
static __device__ __forceinline__ float fattn_back_quad_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}
static __device__ __forceinline__ float fattn_back_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}

template <int n, int m>
static __device__ __forceinline__ void fattn_back_mma_zero(float (&x)[n][m][4]) {
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

// Bytes of the first ldmatrix of an operand's 16 rows: of A, or of B whose rows are summed over; and of B, or of A whose rows are summed over.
template <typename T>
static __device__ __forceinline__ int fattn_back_mma_at_a(const int row, const int chunk) {
    return T::at(row + threadIdx.x % 16, chunk + threadIdx.x % 32 / 16);
}
template <typename T>
static __device__ __forceinline__ int fattn_back_mma_at_b(const int row, const int chunk) {
    return T::at(row + threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8, chunk + threadIdx.x / 8 % 2);
}

// n rows of D components from global to shared memory
template <int D, int n, int nthreads>
static __device__ __forceinline__ void fattn_back_mma_load(const uint32_t dst, const half * src) {
    using T              = fattn_back_mma_tile<D>;
    constexpr int chunks = D / 8;
    constexpr int step   = nthreads / chunks; // rows
    if constexpr (nthreads % chunks == 0 && n % step == 0 && (!T::swizzled || step % 8 == 0)) {
        const uint32_t to = dst + T::at(threadIdx.x / chunks, threadIdx.x % chunks);
        const half * from = src + threadIdx.x / chunks * fattn_back_mma_pitch(D) + threadIdx.x % chunks * 8;
#pragma unroll
        for (int j = 0; j < n / step; ++j) {
            fattn_back_cp_async_16(to + j * step * T::pitch, from + j * step * fattn_back_mma_pitch(D));
        }
    } else {
        for (int t = fattn_back_rare(threadIdx.x); t < n * chunks; t += nthreads) {
            fattn_back_cp_async_16(dst + T::at(t / chunks, t % chunks), src + t / chunks * fattn_back_mma_pitch(D) + t % chunks * 8);
        }
    }
}

// x[16*nm rows of A x 8*nn rows of B] of D components; a, b: what ldmatrix reads first
template <int D, int nm, int nn>
static __device__ __forceinline__ void fattn_back_mma_product(float (&x)[nm][nn][4], const uint32_t a, const uint32_t b) {
    using T = fattn_back_mma_tile<D>;
    fattn_back_mma_zero(x);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        uint32_t A[nm][4];
#pragma unroll
        for (int mi = 0; mi < nm; ++mi) {
            fattn_back_ldmatrix(A[mi], T::step(a, k) + mi * 16 * T::pitch);
        }
#pragma unroll
        for (int ni = 0; ni < nn; ni += 2) {
            uint32_t B[4];
            if constexpr (nn == 1) {
                fattn_back_ldmatrix_half(B, T::step(b, k));
            } else {
                fattn_back_ldmatrix(B, T::step(b, k) + ni * 8 * T::pitch);
            }
#pragma unroll
            for (int mi = 0; mi < nm; ++mi) {
                fattn_back_mma(x[mi][ni], A[mi], B[0], B[1]);
                if constexpr (nn > 1) {
                    fattn_back_mma(x[mi][ni + 1], A[mi], B[2], B[3]);
                }
            }
        }
    }
}

// The same of the low halves of A and of B with the high ones of the other; the low halves from global memory, of the first rows.
template <int D, int nm, int nn>
static __device__ __forceinline__ void fattn_back_mma_add_low(
    float (&x)[nm][nn][4], const uint32_t a, const uint32_t b, const half * a_lo, const half * b_lo) {
    using T             = fattn_back_mma_tile<D>;
    constexpr int pitch = fattn_back_mma_pitch(D);
    const int lane      = threadIdx.x % 32;
    a_lo += lane / 4 * pitch + lane % 4 * 2;
    b_lo += lane / 4 * pitch + lane % 4 * 2;
#pragma unroll 1
    for (int k = 0; k < D / 16; ++k) {
        uint32_t hi[nm][4];
        uint32_t lo[nm][4];
#pragma unroll
        for (int mi = 0; mi < nm; ++mi) {
            fattn_back_ldmatrix(hi[mi], T::step(a, k) + mi * 16 * T::pitch);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                lo[mi][i] = *(const uint32_t *) (a_lo + (mi * 16 + i % 2 * 8) * pitch + k * 16 + i / 2 * 8);
            }
        }
#pragma unroll
        for (int ni = 0; ni < nn; ++ni) {
            uint32_t B[4];
            fattn_back_ldmatrix_half(B, T::step(b, k) + ni * 8 * T::pitch);
            const half * src      = b_lo + ni * 8 * pitch + k * 16;
            const uint32_t Blo[2] = { *(const uint32_t *) src, *(const uint32_t *) (src + 8) };
#pragma unroll
            for (int mi = 0; mi < nm; ++mi) {
                fattn_back_mma(x[mi][ni], lo[mi], B[0], B[1]);
                fattn_back_mma(x[mi][ni], hi[mi], Blo[0], Blo[1]);
            }
        }
    }
}

// x += a B, B 16 rows of what ldmatrix reads from b
template <typename T, int nm, int nn>
static __device__ __forceinline__ void fattn_back_mma_accumulate(float (&x)[nm][nn][4], const uint32_t (&a)[nm][4], const uint32_t b) {
#pragma unroll
    for (int ni = 0; ni + 1 < nn; ni += 2) {
        uint32_t B[4];
        fattn_back_ldmatrix_trans(B, T::step(b, ni / 2));
#pragma unroll
        for (int mi = 0; mi < nm; ++mi) {
            fattn_back_mma(x[mi][ni + 0], a[mi], B[0], B[1]);
            fattn_back_mma(x[mi][ni + 1], a[mi], B[2], B[3]);
        }
    }
    if constexpr (nn % 2 == 1) {
        uint32_t B[4];
        fattn_back_ldmatrix_trans_half(B, T::step(b, nn / 2));
#pragma unroll
        for (int mi = 0; mi < nm; ++mi) {
            fattn_back_mma(x[mi][nn - 1], a[mi], B[0], B[1]);
        }
    }
}

// x += a B, B the low halves of 16 rows and some columns in global memory
template <int D, int nm, int nn>
static __device__ __forceinline__ void fattn_back_mma_accumulate_low(float (&x)[nm][nn][4], const uint32_t (&a)[nm][4], const half * b_lo) {
    constexpr int pitch = fattn_back_mma_pitch(D);
    const half * src    = b_lo + threadIdx.x % 4 * 2 * pitch + threadIdx.x % 32 / 4;
#pragma unroll
    for (int ni = 0; ni < nn; ++ni) {
        uint32_t B[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const half2 y = __halves2half2(src[i * 8 * pitch + ni * 8], src[(i * 8 + 1) * pitch + ni * 8]);
            B[i]          = *(const uint32_t *) &y;
        }
#pragma unroll
        for (int mi = 0; mi < nm; ++mi) {
            fattn_back_mma(x[mi][ni], a[mi], B[0], B[1]);
        }
    }
}

// From log2(e)*scale*qk to log2(e) times the logit with the mask, of rows of the unit's row block b and keys; -inf beyond the last key.
// row: of the block; dot_q: that of the rows; u: with softcap 1 - tanh^2. Returns the largest |log2(e) x| before the softcap.
template <bool softcap, int nm, int nn, int nu>
static __device__ __forceinline__ float fattn_back_mma_logits(
    const fattn_back_mma_params & p, float (&S)[nm][nn][4], float (&u)[nm][nu][4], const int unit, const int b, const int row, const int key,
    const float * dot_q, const bool mixed) {
    const int g       = threadIdx.x % 32 / 4;
    const int c2      = threadIdx.x % 4 * 2;
    const int h       = p.head(unit, b);
    const int q       = p.query(b) + row;
    const int nk      = p.a.M - key;
    const char * mask = nullptr;
    float slope       = 0.0f;
    float largest     = 0.0f;
    if (mixed && p.a.mask != nullptr) {
        mask  = p.a.mask + unit / p.a.Hkv % p.a.mask_nseqs * p.a.mask_nb_seq + h % p.a.mask_nheads * p.a.mask_nb_head + key * (int64_t) sizeof(half);
        slope = fattn_back_slope(p.a, h) * FATTN_BACK_MMA_LOG2E;
    }
#pragma unroll
    for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i         = mi * 16 + r * 8 + g;
            const char * biases = mask + min(q + i, p.a.N - 1) * p.a.mask_nb_row; // rows beyond the end have no result
            const float dot     = softcap ? dot_q[i] : 0.0f;
#pragma unroll
            for (int ni = 0; ni < nn; ++ni) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float & x = S[mi][ni][2 * r + j];
                    if constexpr (softcap) {
                        const float z        = x + dot;
                        largest              = fmaxf(largest, fabsf(z));
                        const float f        = fattn_back_exp2(-2.0f * fabsf(z) / p.a.logit_softcap);
                        const float v        = 1.0f / (1.0f + f);
                        u[mi][ni][2 * r + j] = 4.0f * f * v * v;
                        x                    = copysignf(FATTN_BACK_MMA_LOG2E * p.a.logit_softcap * (1.0f - f) * v, z);
                    }
                    const int k = ni * 8 + c2 + j;
                    if (mixed && k >= nk) {
                        x = -INFINITY;
                    } else if (mask != nullptr) {
                        x += slope * __half2float(*(const half *) (biases + k * sizeof(half)));
                    }
                }
            }
        }
    }
    return largest;
}
#endif // AMPERE_MMA_AVAILABLE
