#pragma once

// The kernels of the Hopper path of FLASH_ATTN_BACK (sm_90a). Operands are fp16 tiles of 64 rows (fattn-back-hopper-ptx.cuh).
//
//   queries   owns rows of queries, streams K and V: LSE, D and dQ
//   keys      owns rows of keys, streams Q and dO of the group's heads: dK and dV
//
// A block is one producer warp, which walks the tiles that the mask leaves and copies them into a ring, and warpgroups that own 64 rows
// each. S and dP (keys: transposed) have the own rows as rows, so that P and dS are operands straight from the accumulators.
//
// The blocks of a band of heads or units, whose streamed operands fit the L2 cache together, run tile by tile, those with most to do
// under a causal mask first, so that the last ones to run are short.
//
// With head size <= 128 queries runs once and forms dQ before LSE and D are known: E = exp2(S - m) with a running maximum, and with a
// running estimate Dt of D
//     A = sum_j E (dP - Dt) K    B = sum_j E K    dQ = (A + (Dt - D) B) / sum_j E
// When Dt moves, A takes the difference times B. Dt follows D while the row's mass grows, so that A does not cancel.
// With head size 256 A and B do not fit the registers: queries runs once for LSE and D, and again for dQ.

#include "fattn-back-common.cuh"
#include "fattn-back-hopper-ptx.cuh"

#define FATTN_BACK_HOPPER_ROWS  64 // rows of a tile
#define FATTN_BACK_HOPPER_MAX_D 256

#define FATTN_BACK_HOPPER_SHIFT_P 8 // P is an operand times 2^8; with |dP| <= 2^8 dS stays finite
#define FATTN_BACK_HOPPER_SHIFT_E 2 // E likewise
#define FATTN_BACK_HOPPER_LAZY    4.0f // the running maximum may lag by this power of two

// log2(e)*x from which on S is computed from Q and K in two halves each; x = 28 is far out of reach for rows whose |x| is about 5
#define FATTN_BACK_HOPPER_LARGE 40.0f

#define FATTN_BACK_HOPPER_LOG2E 1.4426950408889634f

enum fattn_back_hopper_tile : uint8_t {
    FATTN_BACK_HOPPER_TILE_SKIP  = 0, // no pair
    FATTN_BACK_HOPPER_TILE_FULL  = 1, // every pair, the mask is 0
    FATTN_BACK_HOPPER_TILE_MIXED = 2, // the mask must be read
};

enum fattn_back_hopper_mode {
    FATTN_BACK_HOPPER_FUSED, // LSE, D and dQ
    FATTN_BACK_HOPPER_STATS, // LSE and D
    FATTN_BACK_HOPPER_DQ,    // dQ from LSE and D
};

// A unit is a (sequence, KV head); [units] counts from unit0.
struct fattn_back_hopper_params {
    fattn_back_args a;

    int QT;    // query tiles
    int KT;    // key tiles
    int unit0; // first unit whose operands are in the workspace
    int units;
    int band_q; // heads, units of a band
    int band_k;

    uint8_t * tiles; // [mask_nseqs][mask_nheads][QT][KT], NULL without a mask
    uint64_t * seen;  // [mask_nseqs][mask_nheads][QT][KT] bits: keys of the tile that some row sees
    uint64_t * used;  // [mask_nseqs][mask_groups][KT] keys that some row sees

    int nparts;        // of the statistics of the operands
    float * colparts; // [units][2][nparts][3*256 + 1] sums, minima, maxima of K's and V's columns, number of keys
    float2 * rowparts; // [units][G*QT] max |Q|, max |dO_i|^2
    float * mean_k;   // [S*Hkv][256]
    float * mean_v;
    float4 * scale;    // [S*Hkv] powers of two: of Q, K (with the sign of the scale), V, and of the longest row of dO
    half * k;        // [units][KT] tiles of (K - mean)*scale
    half * v;
    half * q;        // [units*G][QT] tiles of Q*scale
    half * dO;       // dO, every row with its own power of two
    float4 * rows;     // [units*G][64*QT] Q . mean(K), dO . mean(V), power of two of dO
    uint32_t * large;  // [S*Hkv] the largest log2(e)*x of a row as the bits of a float, at least 0
    float * stat;     // [units*G][QT][2][64] -LSE and D as the operands see them: centred, log2, and with 2^8 and the weight that
                       // makes up for dO's powers of two
};

// head h of the tensors from its index in the workspace
static __device__ __forceinline__ int fattn_back_hopper_seq(const fattn_back_hopper_params & p, const int lhead) {
    return (p.unit0 + lhead / p.a.G) / p.a.Hkv;
}
static __device__ __forceinline__ int fattn_back_hopper_head(const fattn_back_hopper_params & p, const int lhead) {
    return ((p.unit0 + lhead / p.a.G) % p.a.Hkv) * p.a.G + lhead % p.a.G;
}

// whether the rows that the first pass saw ask for a split S
static __device__ __forceinline__ bool fattn_back_hopper_large(const fattn_back_hopper_params & p, const int unit) {
    return __uint_as_float(p.large[p.unit0 + unit]) > FATTN_BACK_HOPPER_LARGE;
}

static __device__ __forceinline__ uint32_t fattn_back_hopper_get_tile(
    const fattn_back_hopper_params & p, const int lhead, const int qt, const int kt) {
    if (p.tiles == nullptr) {
        return kt == p.KT - 1 && p.a.M % FATTN_BACK_HOPPER_ROWS != 0 ? FATTN_BACK_HOPPER_TILE_MIXED : FATTN_BACK_HOPPER_TILE_FULL;
    }
    const int h = fattn_back_hopper_head(p, lhead) % p.a.mask_nheads;
    const int s = fattn_back_hopper_seq(p, lhead) % p.a.mask_nseqs;
    return p.tiles[(((int64_t) s * p.a.mask_nheads + h) * p.QT + qt) * p.KT + kt];
}

// Shared memory of a block: nwg own tiles of two operands, rings of n1 and n2 streamed tiles. Of the first operands (Q, K) a tile is
// followed by its low halves if split. alias: the own tiles move to registers, and the second ring takes their place.
template <int D, int nwg, int n1, int n2, int nextra, bool split, bool alias = false>
struct fattn_back_hopper_smem {
    static_assert(!alias || (!split && n2 <= 2 * nwg), "the second ring does not fit the own tiles");
    static constexpr int tile     = FATTN_BACK_HOPPER_ROWS * D * 2;
    static constexpr int tile1    = split ? 2 * tile : tile;
    static constexpr int own1     = 0;
    static constexpr int own2     = own1 + nwg * tile1;
    static constexpr int ring1    = own2 + nwg * tile;
    static constexpr int ring2    = alias ? own1 : ring1 + n1 * tile1;
    static constexpr int extra    = ring1 + n1 * tile1 + (alias ? 0 : n2 * tile);
    static constexpr int stat     = extra + nextra;
    static constexpr int meta     = stat + n1 * 2 * FATTN_BACK_HOPPER_ROWS * 4;
    static constexpr int bars     = meta + n1 * 16;
    static constexpr int own      = bars;            // own tiles are here
    static constexpr int moved    = bars + 8;       // own tiles are in registers
    static constexpr int full1    = moved + 8;
    static constexpr int empty1   = full1 + n1 * 8;
    static constexpr int full2    = empty1 + n1 * 8;
    static constexpr int empty2   = full2 + n2 * 8;
    static constexpr int pair     = empty2 + n2 * 8;   // four barriers between two warpgroups
    static constexpr int bytes    = pair + 4 * 8;
    static constexpr int stages1  = n1;
    static constexpr int stages2  = n2;
    static constexpr int groups   = nwg;
    static constexpr bool aliased = alias;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// position in a ring of n
template <int n>
struct fattn_back_hopper_ring {
    int stage       = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == n) {
            stage = 0;
            parity ^= 1;
        }
    }
};

template <typename L>
static __device__ __forceinline__ void fattn_back_hopper_init(const uint32_t smem, const int nwarps) {
    if (threadIdx.x == 0) {
        hopper_barrier_init(smem + L::own, 1);
        hopper_barrier_init(smem + L::moved, nwarps);
        for (int i = 0; i < L::stages1; ++i) {
            hopper_barrier_init(smem + L::full1 + 8 * i, 1);
            hopper_barrier_init(smem + L::empty1 + 8 * i, nwarps);
        }
        for (int i = 0; i < L::stages2; ++i) {
            hopper_barrier_init(smem + L::full2 + 8 * i, 1);
            hopper_barrier_init(smem + L::empty2 + 8 * i, nwarps);
        }
        for (int i = 0; i < 4; ++i) {
            hopper_barrier_init(smem + L::pair + 8 * i, 4);
        }
        hopper_barrier_init_done();
    }
    __syncthreads();
}

// The producer warp: own tiles t0, t0 + 1, .. of x1 and x2, then for heads lhead0 .. lhead0 + nheads - 1 the streamed tiles of y1 and y2.
// stat: also the rows' statistics. keys: the own tiles are keys.
template <typename L, bool keys>
static __device__ __forceinline__ void fattn_back_hopper_produce(
    const fattn_back_hopper_params & p, char * smem_ptr, const int unit, const int t0, const int lhead0, const int nheads) {
    const uint32_t smem  = hopper_smem(smem_ptr);
    const int lane       = threadIdx.x % 32;
    const int n_own      = keys ? p.KT : p.QT;
    const int n_streamed = keys ? p.QT : p.KT;

    const auto tiles = [](const half * x, const int64_t n, const int bytes) {
        return (const char *) x + n * bytes;
    };
    if (lane == 0) {
        const char * x1 = keys ? tiles(p.k, (int64_t) unit * n_own, L::tile1) : tiles(p.q, (int64_t) lhead0 * n_own, L::tile1);
        const char * x2 = keys ? tiles(p.v, (int64_t) unit * n_own, L::tile) : tiles(p.dO, (int64_t) lhead0 * n_own, L::tile);
        hopper_barrier_expect(smem + L::own, L::groups * (L::tile1 + L::tile));
        for (int w = 0; w < L::groups; ++w) {
            const int64_t t = min(t0 + w, n_own - 1);
            hopper_load(smem + L::own1 + w * L::tile1, x1 + t * L::tile1, L::tile1, smem + L::own);
            hopper_load(smem + L::own2 + w * L::tile, x2 + t * L::tile, L::tile, smem + L::own);
        }
    }

    if (L::aliased) {
        hopper_barrier_wait(smem + L::moved, 0);
    }
    fattn_back_hopper_ring<L::stages1> r1;
    fattn_back_hopper_ring<L::stages2> r2;
    for (int lhead = lhead0; lhead < lhead0 + nheads; ++lhead) {
        const char * y1 = keys ? tiles(p.q, (int64_t) lhead * n_streamed, L::tile1) : tiles(p.k, (int64_t) unit * n_streamed, L::tile1);
        const char * y2 = keys ? tiles(p.dO, (int64_t) lhead * n_streamed, L::tile) : tiles(p.v, (int64_t) unit * n_streamed, L::tile);
        const char * st = (const char *) (p.stat + (int64_t) lhead * n_streamed * 2 * FATTN_BACK_HOPPER_ROWS);
        for (int base = 0; base < n_streamed; base += 32) {
            uint32_t states = 0;
            for (int w = 0; w < L::groups; ++w) {
                if (base + lane < n_streamed && t0 + w < n_own) {
                    const int t = base + lane;
                    states |= fattn_back_hopper_get_tile(p, lhead, keys ? t : t0 + w, keys ? t0 + w : t) << (2 * w);
                }
            }
            uint32_t todo = __ballot_sync(0xFFFFFFFF, states != 0);
            while (todo != 0) {
                const int b = __ffs(todo) - 1;
                todo &= todo - 1;
                const uint32_t state = __shfl_sync(0xFFFFFFFF, states, b);
                if (lane == 0) {
                    const int64_t t = base + b;
                    hopper_barrier_wait(smem + L::empty1 + 8 * r1.stage, r1.parity ^ 1);
                    *(int4 *) (smem_ptr + L::meta + 16 * r1.stage) = make_int4(lhead, (int) t, (int) state, 0);
                    hopper_barrier_expect(smem + L::full1 + 8 * r1.stage, L::tile1 + (keys ? 2 * FATTN_BACK_HOPPER_ROWS * 4 : 0));
                    hopper_load(smem + L::ring1 + r1.stage * L::tile1, y1 + t * L::tile1, L::tile1, smem + L::full1 + 8 * r1.stage);
                    if (keys) {
                        hopper_load(smem + L::stat + r1.stage * 2 * FATTN_BACK_HOPPER_ROWS * 4, st + t * 2 * FATTN_BACK_HOPPER_ROWS * 4,
                            2 * FATTN_BACK_HOPPER_ROWS * 4, smem + L::full1 + 8 * r1.stage);
                    }
                    hopper_barrier_wait(smem + L::empty2 + 8 * r2.stage, r2.parity ^ 1);
                    hopper_barrier_expect(smem + L::full2 + 8 * r2.stage, L::tile);
                    hopper_load(smem + L::ring2 + r2.stage * L::tile, y2 + t * L::tile, L::tile, smem + L::full2 + 8 * r2.stage);
                }
                __syncwarp();
                r1.next();
                r2.next();
            }
        }
    }
    if (lane == 0) {
        hopper_barrier_wait(smem + L::empty1 + 8 * r1.stage, r1.parity ^ 1);
        *(int4 *) (smem_ptr + L::meta + 16 * r1.stage) = make_int4(-1, 0, 0, 0);
        hopper_barrier_arrive(smem + L::full1 + 8 * r1.stage);
    }
}

// acc[64 x 64] = a b^T over D columns; a and b are tiles in shared memory, split: each followed by its low halves. One group.
template <int D, bool split>
static __device__ __forceinline__ void fattn_back_hopper_product(float (&acc)[32], const uint32_t a, const uint32_t b) {
    const uint64_t da      = hopper_desc(a);
    const uint64_t db      = hopper_desc(b);
    constexpr uint64_t low = FATTN_BACK_HOPPER_ROWS * D * 2 >> 4;
    hopper_wgmma_fence();
    hopper_wgmma<true>(acc, da, db);
#pragma unroll
    for (int k = 1; k < D / 16; ++k) {
        hopper_wgmma<false>(acc, da + hopper_step_rows(k), db + hopper_step_rows(k));
    }
    if constexpr (split) {
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
            hopper_wgmma<false>(acc, da + hopper_step_rows(k), db + low + hopper_step_rows(k));
        }
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
            hopper_wgmma<false>(acc, da + low + hopper_step_rows(k), db + hopper_step_rows(k));
        }
    }
    hopper_wgmma_commit();
}

// the same with a in registers
template <int D>
static __device__ __forceinline__ void fattn_back_hopper_product(float (&acc)[32], const uint32_t (&a)[D / 4], const uint32_t b) {
    const uint64_t db = hopper_desc(b);
    hopper_wgmma_fence();
    hopper_wgmma_rows<true>(acc, a, db);
#pragma unroll
    for (int k = 1; k < D / 16; ++k) {
        hopper_wgmma_rows<false>(acc, a + 4 * k, db + hopper_step_rows(k));
    }
    hopper_wgmma_commit();
}

// acc[64 x D] += a b; a[64 x 64] in registers, b a tile in shared memory. One group.
template <int R>
static __device__ __forceinline__ void fattn_back_hopper_accumulate(float (&acc)[R], const uint32_t (&a)[16], const uint32_t b) {
    const uint64_t db = hopper_desc(b);
    hopper_wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        hopper_wgmma(acc, a + 4 * k, db + hopper_step_cols(k));
    }
    hopper_wgmma_commit();
}

// accumulators [64 x 64] to the operand of the next product
static __device__ __forceinline__ void fattn_back_hopper_operand(uint32_t (&a)[16], const float (&x)[32]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        a[i] = hopper_pack(x[2 * i + 0], x[2 * i + 1]);
    }
}

// S += mask/unit of a tile, -inf for pairs beyond the end; unit is what S is multiplied by to be added to the mask
template <bool keys>
static __device__ __forceinline__ void fattn_back_hopper_mask(
    float (&S)[32], const fattn_back_hopper_params & p, const int lhead, const int t_own, const int t_streamed, const float per_unit) {
    const int lane    = threadIdx.x % 32;
    const int own0    = t_own * FATTN_BACK_HOPPER_ROWS + (threadIdx.x % 128) / 32 * 16 + lane / 4;
    const int str0    = t_streamed * FATTN_BACK_HOPPER_ROWS + 2 * (lane % 4);
    const int h       = fattn_back_hopper_head(p, lhead);
    const int s       = fattn_back_hopper_seq(p, lhead);
    const char * mask = p.a.mask == nullptr ? nullptr : p.a.mask + (s % p.a.mask_nseqs) * p.a.mask_nb_seq + (h % p.a.mask_nheads) * p.a.mask_nb_head;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int own = own0 + (i % 4) / 2 * 8;
        const int str = str0 + i / 4 * 8 + i % 2;
        const int q   = keys ? str : own;
        const int key = keys ? own : str;
        float x       = -INFINITY;
        if (q < p.a.N && key < p.a.M) {
            x = mask == nullptr ? 0.0f : per_unit * __half2float(*(const half *) (mask + q * p.a.mask_nb_row + key * (int64_t) sizeof(half)));
        }
        S[i] += x;
    }
}

static __device__ __forceinline__ float fattn_back_hopper_slope(const fattn_back_hopper_params & p, const int lhead) {
    return fattn_back_slope(p.a, fattn_back_hopper_head(p, lhead)) * FATTN_BACK_HOPPER_LOG2E;
}

// accumulators [64 x D] of key tile t times factor to dK or dV of a unit
template <int R>
static __device__ __forceinline__ void fattn_back_hopper_store(
    const fattn_back_hopper_params & p, float * dst, const float (&acc)[R], const float factor, const int unit, const int t) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = t * FATTN_BACK_HOPPER_ROWS + (threadIdx.x % 128) / 32 * 16 + lane / 4 + 8 * r - p.a.kv_first;
        if (row >= 0 && row < p.a.kv_count) {
            float * x = dst + ((int64_t) (p.unit0 + unit) * p.a.kv_count + row) * (2 * R) + 2 * (lane % 4);
#pragma unroll
            for (int j = 0; j < R / 4; ++j) {
                *(float2 *) (x + 8 * j) = make_float2(acc[4 * j + 2 * r + 0] * factor, acc[4 * j + 2 * r + 1] * factor);
            }
        }
    }
}
template <int R>
static __device__ __forceinline__ void fattn_back_hopper_store_dk(
    const fattn_back_hopper_params & p, const float (&acc)[R], const int unit, const int t) {
    if (p.a.dK != nullptr) {
        const float4 scale = p.scale[p.unit0 + unit];
        const float factor = p.a.scale / (1 << FATTN_BACK_HOPPER_SHIFT_P) / scale.x / scale.z / scale.w;
        fattn_back_hopper_store(p, p.a.dK, acc, factor, unit, t);
    }
}
template <int R>
static __device__ __forceinline__ void fattn_back_hopper_store_dv(
    const fattn_back_hopper_params & p, const float (&acc)[R], const int unit, const int t) {
    if (p.a.dV != nullptr) {
        const float factor = 1.0f / (1 << FATTN_BACK_HOPPER_SHIFT_P) / p.scale[p.unit0 + unit].w;
        fattn_back_hopper_store(p, p.a.dV, acc, factor, unit, t);
    }
}

// sum or maximum over the four threads that share a row
static __device__ __forceinline__ float fattn_back_hopper_quad_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
    x += __shfl_xor_sync(0xFFFFFFFF, x, 2);
    return x;
}
static __device__ __forceinline__ float fattn_back_hopper_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
    return x;
}

// the warp no longer reads what these barriers guard
static __device__ __forceinline__ void fattn_back_hopper_release(const uint32_t empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        hopper_barrier_arrive(empty);
    }
}
static __device__ __forceinline__ void fattn_back_hopper_release(const uint32_t empty1, const uint32_t empty2) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        hopper_barrier_arrive(empty1);
        hopper_barrier_arrive(empty2);
    }
}

// Values of the queries that are the thread's columns of S^T. Shared memory answers late while wgmma reads from it, so they are asked for
// before the waits that their use follows.
static __device__ __forceinline__ void fattn_back_hopper_load_columns(float2 (&x)[8], const uint32_t src) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        x[j] = hopper_load_float2(src + 8 * j * (int) sizeof(float));
    }
}

// P from S and dS from P and dP; S^T has a query per column
static __device__ __forceinline__ void fattn_back_hopper_probs_t(float (&S)[32], const float sc, const float2 (&nlse)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        S[4 * j + 0] = hopper_exp2(fmaf(S[4 * j + 0], sc, nlse[j].x));
        S[4 * j + 1] = hopper_exp2(fmaf(S[4 * j + 1], sc, nlse[j].y));
        S[4 * j + 2] = hopper_exp2(fmaf(S[4 * j + 2], sc, nlse[j].x));
        S[4 * j + 3] = hopper_exp2(fmaf(S[4 * j + 3], sc, nlse[j].y));
    }
}
static __device__ __forceinline__ void fattn_back_hopper_ds_t(float (&dP)[32], const float (&P)[32], const float2 (&D)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        dP[4 * j + 0] = P[4 * j + 0] * (dP[4 * j + 0] - D[j].x);
        dP[4 * j + 1] = P[4 * j + 1] * (dP[4 * j + 1] - D[j].y);
        dP[4 * j + 2] = P[4 * j + 2] * (dP[4 * j + 2] - D[j].x);
        dP[4 * j + 3] = P[4 * j + 3] * (dP[4 * j + 3] - D[j].y);
    }
}

// factor from Q'K' to log2
static __device__ __forceinline__ float fattn_back_hopper_unit(const fattn_back_hopper_params & p, const float4 scale) {
    return p.a.scale * FATTN_BACK_HOPPER_LOG2E / scale.x / scale.y;
}

#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)

// dK and dV. Grid: units of a band, blocks of nwg key tiles of the window, bands. Block: nwg warpgroups with 64 keys each, then the
// producer.
template <int D, int nwg, int stages, int nregs, bool split>
static __global__ void __launch_bounds__((nwg + 1) * 128, 1) flash_attn_back_hopper_keys(const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using L = fattn_back_hopper_smem<D, nwg, stages, stages, 0, split>;
    extern __shared__ __align__(1024) char smem_ptr[];
    const uint32_t smem = hopper_smem(smem_ptr);
    const int unit      = blockIdx.z * p.band_k + blockIdx.x;
    if (unit >= p.units || fattn_back_hopper_large(p, unit) != split) {
        return;
    }
    fattn_back_hopper_init<L>(smem, 4 * nwg);
    const int t0 = p.a.kv_first / FATTN_BACK_HOPPER_ROWS + blockIdx.y * nwg;
    const int wg = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0); // uniform for the compiler, too

    if (wg == nwg) {
        if constexpr (nwg > 1) {
            hopper_registers_dec<nwg == 3 ? 32 : 24>();
        }
        if (threadIdx.x / 32 == 4 * nwg) {
            fattn_back_hopper_produce<L, true>(p, smem_ptr, unit, t0, unit * p.a.G, p.a.G);
        }
    } else {
        if constexpr (nwg > 1) {
            hopper_registers_inc<nregs>();
        }
        const int col       = 2 * (threadIdx.x % 4);
        const float sc      = fattn_back_hopper_unit(p, p.scale[p.unit0 + unit]);
        const uint32_t own1 = smem + L::own1 + wg * L::tile1;
        const uint32_t own2 = smem + L::own2 + wg * L::tile;

        float dK[D / 2];
        float dV[D / 2];
#pragma unroll
        for (int i = 0; i < D / 2; ++i) {
            dK[i] = 0.0f;
            dV[i] = 0.0f;
        }
        uint32_t P16[16];
        uint32_t dS16[16];

        fattn_back_hopper_ring<stages> ring;
        hopper_barrier_wait(smem + L::own, 0);
        int prev = -1;
        while (true) {
            hopper_barrier_wait(smem + L::full1 + 8 * ring.stage, ring.parity);
            const int4 meta = *(const int4 *) (smem_ptr + L::meta + 16 * ring.stage);
            if (meta.x < 0) {
                break;
            }
            float S[32];
            float dP[32];
            const uint32_t stat = smem + L::stat + (ring.stage * 2 * FATTN_BACK_HOPPER_ROWS + col) * (int) sizeof(float);
            hopper_wgmma_wait<1>(); // dV of the previous tile
            hopper_pin(P16);
            fattn_back_hopper_product<D, split>(S, own1, smem + L::ring1 + ring.stage * L::tile1);
            hopper_wgmma_wait<1>(); // dK of the previous tile
            hopper_pin(dS16);
            if (prev >= 0) {
                fattn_back_hopper_release(smem + L::empty1 + 8 * prev, smem + L::empty2 + 8 * prev);
            }
            hopper_barrier_wait(smem + L::full2 + 8 * ring.stage, ring.parity);
            fattn_back_hopper_product<D, false>(dP, own2, smem + L::ring2 + ring.stage * L::tile);

            float2 col_stat[8];
            fattn_back_hopper_load_columns(col_stat, stat);
            hopper_wgmma_wait<1>(); // S
            hopper_pin(S);
            if ((meta.z >> 2 * wg & 3) != FATTN_BACK_HOPPER_TILE_FULL) {
                fattn_back_hopper_mask<true>(S, p, meta.x, t0 + wg, meta.y, fattn_back_hopper_slope(p, meta.x) / sc);
            }
            fattn_back_hopper_probs_t(S, sc, col_stat);
            fattn_back_hopper_load_columns(col_stat, stat + FATTN_BACK_HOPPER_ROWS * (int) sizeof(float));
            fattn_back_hopper_operand(P16, S);
            fattn_back_hopper_accumulate(dV, P16, smem + L::ring2 + ring.stage * L::tile);

            hopper_wgmma_wait<1>(); // dP
            hopper_pin(dP);
            fattn_back_hopper_ds_t(dP, S, col_stat);
            fattn_back_hopper_operand(dS16, dP);
            fattn_back_hopper_accumulate(dK, dS16, smem + L::ring1 + ring.stage * L::tile1);

            prev = ring.stage;
            ring.next();
        }
        hopper_wgmma_wait<0>();
        hopper_pin(P16);
        hopper_pin(dS16);
        hopper_pin(dK);
        hopper_pin(dV);

        fattn_back_hopper_store_dk(p, dK, unit, t0 + wg);
        fattn_back_hopper_store_dv(p, dV, unit, t0 + wg);
    }
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

// dK and dV for D = 256, where a warpgroup's registers hold one of them: the first forms S, P and dV, the second dP, dS and dK.
// P passes through shared memory from thread to thread, in F32. Grid: units of a band, key tiles
// of the window, bands. Block: two warpgroups, the producer.
template <int D, int stages, bool split>
static __global__ void __launch_bounds__(3 * 128, 1) flash_attn_back_hopper_keys_split(const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int exchange = FATTN_BACK_HOPPER_ROWS * FATTN_BACK_HOPPER_ROWS * 4;
    using L                = fattn_back_hopper_smem<D, 1, stages, stages, 2 * exchange, split>;
    extern __shared__ __align__(1024) char smem_ptr[];
    const uint32_t smem = hopper_smem(smem_ptr);
    const int unit      = blockIdx.z * p.band_k + blockIdx.x;
    if (unit >= p.units || fattn_back_hopper_large(p, unit) != split) {
        return;
    }
    fattn_back_hopper_init<L>(smem, 8);
    const int t0 = p.a.kv_first / FATTN_BACK_HOPPER_ROWS + blockIdx.y;
    const int wg = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0); // uniform for the compiler, too

    if (wg == 2) {
        hopper_registers_dec<split ? 56 : 24>();
        if (threadIdx.x / 32 == 8) {
            fattn_back_hopper_produce<L, true>(p, smem_ptr, unit, t0, unit * p.a.G, p.a.G);
        }
    } else {
        hopper_registers_inc<split ? 224 : 240>();
        const int tid = threadIdx.x % 128;
        const int col = 2 * (tid % 4);
        float acc[D / 2];
#pragma unroll
        for (int i = 0; i < D / 2; ++i) {
            acc[i] = 0.0f;
        }
        uint32_t X16[16];

        fattn_back_hopper_ring<stages> ring;
        fattn_back_hopper_ring<2> pair;
        hopper_barrier_wait(smem + L::own, 0);
        int prev = -1;

        if (wg == 0) {
            const float sc = fattn_back_hopper_unit(p, p.scale[p.unit0 + unit]);
            while (true) {
                hopper_barrier_wait(smem + L::full1 + 8 * ring.stage, ring.parity);
                const int4 meta = *(const int4 *) (smem_ptr + L::meta + 16 * ring.stage);
                if (meta.x < 0) {
                    break;
                }
                float X[32]; // S, then P
                fattn_back_hopper_product<D, split>(X, smem + L::own1, smem + L::ring1 + ring.stage * L::tile1);
                float2 col_stat[8];
                fattn_back_hopper_load_columns(col_stat, smem + L::stat + (2 * ring.stage * FATTN_BACK_HOPPER_ROWS + col) * (int) sizeof(float));
                hopper_wgmma_wait<1>(); // all of the previous tile
                hopper_pin(X16);
                if (stages > 1 && prev >= 0) {
                    fattn_back_hopper_release(smem + L::empty1 + 8 * prev, smem + L::empty2 + 8 * prev);
                }
                hopper_wgmma_wait<0>();
                hopper_pin(X);
                if ((meta.z & 3) != FATTN_BACK_HOPPER_TILE_FULL) {
                    fattn_back_hopper_mask<true>(X, p, meta.x, t0, meta.y, fattn_back_hopper_slope(p, meta.x) / sc);
                }
                fattn_back_hopper_probs_t(X, sc, col_stat);
                hopper_barrier_wait(smem + L::pair + 8 * (2 + pair.stage), pair.parity ^ 1);
                float4 * P = (float4 *) (smem_ptr + L::extra + pair.stage * exchange) + tid;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    P[128 * i] = make_float4(X[4 * i + 0], X[4 * i + 1], X[4 * i + 2], X[4 * i + 3]);
                }
                fattn_back_hopper_release(smem + L::pair + 8 * pair.stage);
                pair.next();
                fattn_back_hopper_operand(X16, X);
                hopper_barrier_wait(smem + L::full2 + 8 * ring.stage, ring.parity);
                fattn_back_hopper_accumulate(acc, X16, smem + L::ring2 + ring.stage * L::tile);
                if constexpr (stages == 1) {
                    hopper_wgmma_wait<0>();
                    fattn_back_hopper_release(smem + L::empty1, smem + L::empty2);
                }

                prev = ring.stage;
                ring.next();
            }
            hopper_wgmma_wait<0>();
            hopper_pin(X16);
            hopper_pin(acc);
            fattn_back_hopper_store_dv(p, acc, unit, t0);
        } else {
            while (true) {
                hopper_barrier_wait(smem + L::full1 + 8 * ring.stage, ring.parity);
                if (((const int4 *) (smem_ptr + L::meta + 16 * ring.stage))->x < 0) {
                    break;
                }
                hopper_barrier_wait(smem + L::full2 + 8 * ring.stage, ring.parity);
                float X[32]; // dP, then dS
                fattn_back_hopper_product<D, false>(X, smem + L::own2, smem + L::ring2 + ring.stage * L::tile);
                float2 col_stat[8];
                fattn_back_hopper_load_columns(
                    col_stat, smem + L::stat + ((2 * ring.stage + 1) * FATTN_BACK_HOPPER_ROWS + col) * (int) sizeof(float));
                hopper_wgmma_wait<1>(); // all of the previous tile
                hopper_pin(X16);
                if (stages > 1 && prev >= 0) {
                    fattn_back_hopper_release(smem + L::empty1 + 8 * prev, smem + L::empty2 + 8 * prev);
                }
                hopper_wgmma_wait<0>();
                hopper_pin(X);
                hopper_barrier_wait(smem + L::pair + 8 * pair.stage, pair.parity);
                float P[32];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    *(float4 *) (P + 4 * i) = ((const float4 *) (smem_ptr + L::extra + pair.stage * exchange))[128 * i + tid];
                }
                fattn_back_hopper_ds_t(X, P, col_stat);
                fattn_back_hopper_release(smem + L::pair + 8 * (2 + pair.stage));
                pair.next();
                fattn_back_hopper_operand(X16, X);
                fattn_back_hopper_accumulate(acc, X16, smem + L::ring1 + ring.stage * L::tile1);
                if constexpr (stages == 1) {
                    hopper_wgmma_wait<0>();
                    fattn_back_hopper_release(smem + L::empty1, smem + L::empty2);
                }

                prev = ring.stage;
                ring.next();
            }
            hopper_wgmma_wait<0>();
            hopper_pin(X16);
            hopper_pin(acc);
            fattn_back_hopper_store_dk(p, acc, unit, t0);
        }
    }
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

// LSE, D and dQ, by mode. Grid: heads of a band, blocks of nwg query tiles, the last ones first, bands. Block: nwg warpgroups
// with 64 queries each, then the producer. regs: Q and dO as operands from registers.
template <int D, int nwg, int n1, int n2, int nregs, fattn_back_hopper_mode mode, bool regs, bool split>
static __global__ void __launch_bounds__((nwg + 1) * 128, 1) flash_attn_back_hopper_queries(
    const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    static_assert(!regs || mode == FATTN_BACK_HOPPER_STATS, "no registers left for Q and dO");
    using L = fattn_back_hopper_smem<D, nwg, n1, n2, 0, split, regs>;
    extern __shared__ __align__(1024) char smem_ptr[];
    const uint32_t smem = hopper_smem(smem_ptr);
    const int lhead     = blockIdx.z * p.band_q + blockIdx.x;
    const int unit      = lhead / p.a.G;
    if (unit >= p.units || ((split || mode == FATTN_BACK_HOPPER_DQ) && fattn_back_hopper_large(p, unit) != split)) {
        return;
    }
    fattn_back_hopper_init<L>(smem, 4 * nwg);
    const int t0 = (gridDim.y - 1 - blockIdx.y) * nwg;
    const int wg = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);

    if (wg == nwg) {
        if constexpr (nwg > 1) {
            hopper_registers_dec<nwg == 3 ? 32 : 24>();
        }
        if (threadIdx.x / 32 == 4 * nwg) {
            fattn_back_hopper_produce<L, false>(p, smem_ptr, unit, t0, lhead, 1);
        }
    } else {
        if constexpr (nwg > 1) {
            hopper_registers_inc<nregs>();
        }
        constexpr bool has_dq = mode != FATTN_BACK_HOPPER_STATS;
        constexpr bool fused  = mode == FATTN_BACK_HOPPER_FUSED;
        const float4 scale    = p.scale[p.unit0 + unit];
        const float sc        = fattn_back_hopper_unit(p, scale);
        const uint32_t own1   = smem + L::own1 + wg * L::tile1;
        const uint32_t own2   = smem + L::own2 + wg * L::tile;
        const int row         = (threadIdx.x % 128) / 32 * 16 + (threadIdx.x % 32) / 4; // and row + 8
        float * stat          = p.stat + ((int64_t) lhead * p.QT + min(t0 + wg, p.QT - 1)) * 2 * FATTN_BACK_HOPPER_ROWS + row;

        float A[has_dq ? D / 2 : 1];
        float B[fused ? D / 2 : 1];
#pragma unroll
        for (float & x : A) {
            x = 0.0f;
        }
#pragma unroll
        for (float & x : B) {
            x = 0.0f;
        }
        uint32_t E16[fused ? 16 : 1];
        uint32_t dS16[has_dq ? 16 : 1];

        float m[2]    = { -INFINITY, -INFINITY }; // the maximum that E is relative to
        float l[2]    = { 0.0f, 0.0f };           // sum of E
        float e[2]    = { 0.0f, 0.0f };           // sum of E dP
        float Dt[2]   = { 0.0f, 0.0f };
        float lref[2] = { 0.0f, 0.0f };           // l when Dt was set
        if constexpr (mode == FATTN_BACK_HOPPER_DQ) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                m[r]  = stat[8 * r];
                Dt[r] = stat[8 * r + FATTN_BACK_HOPPER_ROWS];
            }
        }

        fattn_back_hopper_ring<n1> ring1;
        fattn_back_hopper_ring<n2> ring2;
        hopper_barrier_wait(smem + L::own, 0);
        uint32_t Q16[regs ? D / 4 : 1];
        uint32_t dO16[regs ? D / 4 : 1];
        if constexpr (regs) {
#pragma unroll
            for (int k = 0; k < D / 16; ++k) {
                hopper_load_rows(Q16 + 4 * k, own1, k);
                hopper_load_rows(dO16 + 4 * k, own2, k);
            }
            fattn_back_hopper_release(smem + L::moved);
        }
        int prev1 = -1;
        while (true) {
            hopper_barrier_wait(smem + L::full1 + 8 * ring1.stage, ring1.parity);
            const int4 meta = *(const int4 *) (smem_ptr + L::meta + 16 * ring1.stage);
            if (meta.x < 0) {
                break;
            }
            float S[32];
            float dP[32];
            if constexpr (regs) {
                fattn_back_hopper_product<D>(S, Q16, smem + L::ring1 + ring1.stage * L::tile1);
            } else {
                fattn_back_hopper_product<D, split>(S, own1, smem + L::ring1 + ring1.stage * L::tile1);
            }
            if constexpr (fused) {
                hopper_wgmma_wait<0>(); // A and B of the previous tile must not be in flight where they are rescaled
                hopper_pin(E16);
                hopper_pin(dS16);
            } else if constexpr (has_dq) {
                hopper_wgmma_wait<1>(); // A of the previous tile
                hopper_pin(dS16);
            }
            if (has_dq && n1 > 1 && prev1 >= 0) {
                fattn_back_hopper_release(smem + L::empty1 + 8 * prev1);
            }
            hopper_barrier_wait(smem + L::full2 + 8 * ring2.stage, ring2.parity);
            if constexpr (regs) {
                fattn_back_hopper_product<D>(dP, dO16, smem + L::ring2 + ring2.stage * L::tile);
            } else {
                fattn_back_hopper_product<D, false>(dP, own2, smem + L::ring2 + ring2.stage * L::tile);
            }

            hopper_wgmma_wait<1>(); // S
            hopper_pin(S);
            if constexpr (!has_dq) {
                fattn_back_hopper_release(smem + L::empty1 + 8 * ring1.stage);
            }
            if ((meta.z >> 2 * wg & 3) != FATTN_BACK_HOPPER_TILE_FULL) {
                fattn_back_hopper_mask<false>(S, p, lhead, t0 + wg, meta.y, fattn_back_hopper_slope(p, lhead) / sc);
            }

            if constexpr (mode == FATTN_BACK_HOPPER_DQ) {
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    S[i] = hopper_exp2(fmaf(S[i], sc, m[i % 4 / 2]));
                }
                hopper_wgmma_wait<0>();
                hopper_pin(dP);
            } else {
                float alpha[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float x = -INFINITY;
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        x = fmaxf(x, fmaxf(S[4 * j + 2 * r + 0], S[4 * j + 2 * r + 1]));
                    }
                    x        = sc * fattn_back_hopper_quad_max(x);
                    alpha[r] = 1.0f;
                    if (x > m[r] + FATTN_BACK_HOPPER_LAZY) {
                        alpha[r] = hopper_exp2(m[r] - x);
                        m[r]     = x;
                    }
                    const float base = m[r] == -INFINITY ? 0.0f : FATTN_BACK_HOPPER_SHIFT_E - m[r];
                    float sum        = 0.0f;
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        S[4 * j + 2 * r + 0] = hopper_exp2(fmaf(S[4 * j + 2 * r + 0], sc, base));
                        S[4 * j + 2 * r + 1] = hopper_exp2(fmaf(S[4 * j + 2 * r + 1], sc, base));
                        sum += S[4 * j + 2 * r + 0] + S[4 * j + 2 * r + 1];
                    }
                    l[r] = l[r] * alpha[r] + (fused ? fattn_back_hopper_quad_sum(sum) : sum);
                }
                if constexpr (fused) {
                    hopper_pin(S); // E is formed while dP is on its way, which with D = 256 has not paid
                }
                hopper_wgmma_wait<0>(); // dP
                hopper_pin(dP);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float sum[2] = { 0.0f, 0.0f };
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        sum[0] = fmaf(S[4 * j + 2 * r + 0], dP[4 * j + 2 * r + 0], sum[0]);
                        sum[1] = fmaf(S[4 * j + 2 * r + 1], dP[4 * j + 2 * r + 1], sum[1]);
                    }
                    e[r] = e[r] * alpha[r] + (fused ? fattn_back_hopper_quad_sum(sum[0] + sum[1]) : sum[0] + sum[1]);
                }
                if constexpr (fused) {
                    lref[0] *= alpha[0];
                    lref[1] *= alpha[1];
                    // the warp's rows move together, so that they move seldom
                    if (__any_sync(0xFFFFFFFF, l[0] > 1.5f * lref[0] || l[1] > 1.5f * lref[1] || alpha[0] != 1.0f || alpha[1] != 1.0f)) {
                        float c[2];
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            const float Dnew = l[r] > 0.0f ? e[r] / l[r] : 0.0f;
                            c[r]             = (Dt[r] - Dnew) * alpha[r];
                            Dt[r]            = Dnew;
                            lref[r]          = l[r];
                        }
                        hopper_pin(A);
                        hopper_pin(B);
#pragma unroll
                        for (int i = 0; i < D / 2; ++i) {
                            A[i] = fmaf(c[i % 4 / 2], B[i], A[i] * alpha[i % 4 / 2]);
                            B[i] *= alpha[i % 4 / 2];
                        }
                        hopper_pin(A);
                        hopper_pin(B);
                    }
                    fattn_back_hopper_operand(E16, S);
                    fattn_back_hopper_accumulate(B, E16, smem + L::ring1 + ring1.stage * L::tile1);
                }
            }
            fattn_back_hopper_release(smem + L::empty2 + 8 * ring2.stage);
            if constexpr (has_dq) {
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    dP[i] = S[i] * (dP[i] - Dt[i % 4 / 2]);
                }
                fattn_back_hopper_operand(dS16, dP);
                fattn_back_hopper_accumulate(A, dS16, smem + L::ring1 + ring1.stage * L::tile1);
            }

            if constexpr (has_dq && n1 == 1) {
                hopper_wgmma_wait<0>();
                fattn_back_hopper_release(smem + L::empty1);
            }

            prev1 = ring1.stage;
            ring1.next();
            ring2.next();
        }
        hopper_wgmma_wait<0>();
        if constexpr (has_dq) {
            hopper_pin(A);
            hopper_pin(dS16);
        }
        if constexpr (fused) {
            hopper_pin(B);
            hopper_pin(E16);
        }

        if constexpr (!split && mode != FATTN_BACK_HOPPER_DQ) {
            atomicMax(p.large + p.unit0 + unit, __float_as_uint(fmaxf(0.0f, fmaxf(m[0], m[1])))); // the order does not matter
        }
        const int h = fattn_back_hopper_head(p, lhead);
        const int s = fattn_back_hopper_seq(p, lhead);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int q = (t0 + wg) * FATTN_BACK_HOPPER_ROWS + row + 8 * r;
            if (t0 + wg >= p.QT) {
                continue;
            }
            const float4 x    = p.rows[((int64_t) lhead * p.QT + t0 + wg) * FATTN_BACK_HOPPER_ROWS + row + 8 * r];
            const float sink  = p.a.sinks == nullptr ? -INFINITY : (p.a.sinks[h] - p.a.scale * x.x) * FATTN_BACK_HOPPER_LOG2E;
            const float shift = FATTN_BACK_HOPPER_SHIFT_P + log2f(scale.w / x.z);
            float psink;
            float Draw;
            float factor;    // of A
            float fb = 0.0f; // of B
            if constexpr (mode == FATTN_BACK_HOPPER_DQ) {
                psink  = sink == -INFINITY ? 0.0f : hopper_exp2(sink + m[r] - shift);
                Draw   = Dt[r] / scale.z / x.z + x.y;
                factor = p.a.scale / scale.y / scale.z / scale.w / (1 << FATTN_BACK_HOPPER_SHIFT_P);
            } else {
                const float sum  = fused ? l[r] : fattn_back_hopper_quad_sum(l[r]);
                const float sumd = fused ? e[r] : fattn_back_hopper_quad_sum(e[r]);
                const float keys = sum > 0.0f ? m[r] - FATTN_BACK_HOPPER_SHIFT_E + log2f(sum) : -INFINITY; // LSE without the sink
                const float top  = fmaxf(keys, sink);
                const float lse  = top == -INFINITY ? -INFINITY : top + log2f(hopper_exp2(keys - top) + hopper_exp2(sink - top));
                const float w    = keys == -INFINITY ? 0.0f : hopper_exp2(keys - lse) / sum;
                psink            = sink == -INFINITY ? 0.0f : hopper_exp2(sink - lse);
                const float Dc   = sumd * w - psink * x.y * scale.z * x.z;
                Draw             = lse == -INFINITY ? 0.0f : Dc / scale.z / x.z + x.y;
                factor           = w * p.a.scale / scale.y / scale.z / x.z;
                fb               = factor * (Dt[r] - Dc);
                if (threadIdx.x % 4 == 0) {
                    const bool valid                     = q < p.a.N && lse != -INFINITY;
                    stat[8 * r]                          = valid ? shift - lse : -INFINITY;
                    stat[8 * r + FATTN_BACK_HOPPER_ROWS] = valid ? Dc : 0.0f;
                    if (q < p.a.N) {
                        const int64_t i = p.a.row(q, h, s);
                        p.a.LSE[i]      = lse == -INFINITY ? -INFINITY : lse * (1.0f / FATTN_BACK_HOPPER_LOG2E) + p.a.scale * x.x;
                        p.a.D[i]        = Draw;
                    }
                }
            }
            if constexpr (has_dq) {
                if (p.a.dQ != nullptr && q < p.a.N) {
                    float * dst        = p.a.dQ + p.a.row(q, h, s) * D + 2 * (threadIdx.x % 4);
                    const float R      = p.a.scale * psink * Draw;
                    const float * mean = p.mean_k + (int64_t) (p.unit0 + unit) * FATTN_BACK_HOPPER_MAX_D + 2 * (threadIdx.x % 4);
#pragma unroll
                    for (int j = 0; j < D / 8; ++j) {
                        float2 y = make_float2(A[4 * j + 2 * r + 0] * factor, A[4 * j + 2 * r + 1] * factor);
                        if constexpr (fused) {
                            y.x = fmaf(B[4 * j + 2 * r + 0], fb, y.x);
                            y.y = fmaf(B[4 * j + 2 * r + 1], fb, y.y);
                        }
                        if (psink != 0.0f) {
                            y.x = fmaf(R, mean[8 * j + 0], y.x);
                            y.y = fmaf(R, mean[8 * j + 1], y.y);
                        }
                        *(float2 *) (dst + 8 * j) = y;
                    }
                }
            }
        }
    }
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}
