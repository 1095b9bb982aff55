#pragma once

// The kernels of the Hopper path of FLASH_ATTN_BACK (sm_90a). Operands are fp16 tiles of 64 rows (fattn-back-hopper-ptx.cuh).
//
//   queries   owns rows of queries, streams K and V: LSE, D and dQ
//   keys      owns rows of keys, streams Q and dO of the group's heads: dK and dV
//   dq        owns rows of queries, streams K and the dS that keys has left in the workspace: dQ
//   rows      puts together what queries and dq have formed of parts of the keys
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
// With head size 256 A and B do not fit the registers: queries runs once for LSE and D, and dQ is formed by queries again, or by dq
// where there are few queries and many keys. Then all operands are there for a range of keys at a time.
// Where blocks of queries are too few for the device, or leave much of it idle at the end, several share the keys.

#include "fattn-back-prep.cuh"
#include "fattn-back-hopper-ptx.cuh"

#define FATTN_BACK_HOPPER_ROWS 64 // rows of a tile

#define FATTN_BACK_HOPPER_SHIFT_P 8 // P is an operand times 2^8; with |dP| <= 2^8 dS stays finite
#define FATTN_BACK_HOPPER_SHIFT_E 2 // E likewise
#define FATTN_BACK_HOPPER_LAZY    4.0f // the running maximum may lag by this power of two

// log2(e)*x from which on S is computed from Q and K in two halves each; x = 28 is far out of reach for rows whose |x| is about 5
#define FATTN_BACK_HOPPER_LARGE 40.0f

#define FATTN_BACK_HOPPER_LOG2E 1.4426950408889634f

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
    int kt0;     // first key tile whose operands are in the workspace
    int kts;     // key tiles from there on
    int heads_q; // heads whose query tiles are one list for blocks of queries: all of a unit, or one where their work differs
    int band_q;  // lists of a band
    int band_k;  // units of a band

    fattn_back_mask_table mask; // QT query tiles, KT key tiles

    int nparts;        // of the statistics of the operands
    float * colparts; // [units][2][nparts][3*256 + 1] sums, minima, maxima of K's and V's columns, number of keys
    float2 * rowparts; // [units][G*QT] max |Q|, max |dO_i|^2
    float * mean_k;   // [S*Hkv][256]
    float * mean_v;
    float4 * scale;    // [S*Hkv] powers of two: of Q, K (with the sign of the scale), V, and of the longest row of dO
    half * k;        // [units][kts] tiles of (K - mean)*scale
    half * v;
    half * ds;       // [units*G][kts][QT] tiles of dS^T, keys in rows, queries in the order of fattn_back_hopper_ds_query
    half * q;        // [units*G][QT] tiles of Q*scale
    half * dO;       // dO, every row with its own power of two
    float4 * rows;     // [units*G][64*QT] Q . mean(K), dO . mean(V), power of two of dO
    uint32_t * large;  // [S*Hkv] the largest |log2(e)*x| that matters in a row, as the bits of a float
    float * stat;     // [units*G][QT][2][64] -LSE and D as the operands see them: centred, log2, and with 2^8 and the weight that
                       // makes up for dO's powers of two

    int parts;    // of the key tiles in the workspace, among blocks that form LSE and D
    int parts_dq; // the same of those that form dQ from them
    int slots;    // of a row: parts of all key tiles; 0: one block has them all, and forms LSE and D itself
    float * sums; // [units*G][slots][3][64*QT] maximum, sum of E, and mean of dP with the weights E
    float * dqs;  // [units*G][planes][64*QT][D] dQ of a part; fused: A and B, two planes a part, the mean as Dt
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
static __device__ __forceinline__ void fattn_back_hopper_note(const fattn_back_hopper_params & p, const int unit, const float x) {
    atomicMax(p.large + p.unit0 + unit, __float_as_uint(x)); // the order does not matter
}

static __device__ __forceinline__ uint32_t fattn_back_hopper_get_tile(
    const fattn_back_hopper_params & p, const int lhead, const int qt, const int kt) {
    if (p.mask.tiles == nullptr) {
        return kt == p.KT - 1 && p.a.M % FATTN_BACK_HOPPER_ROWS != 0 ? FATTN_BACK_TILE_MIXED : FATTN_BACK_TILE_FULL;
    }
    return p.mask.row(p.a, fattn_back_hopper_head(p, lhead), fattn_back_hopper_seq(p, lhead), qt)[kt];
}

// first key tile of keys: of the window, or of those in the workspace
static __device__ __forceinline__ int fattn_back_hopper_first_key(const fattn_back_hopper_params & p) {
    return max(p.a.kv_first / FATTN_BACK_HOPPER_ROWS, p.kt0);
}

static __device__ __forceinline__ int fattn_back_hopper_last_key(const fattn_back_hopper_params & p) {
    return min(p.KT, p.kt0 + p.kts);
}

// first key tile of the i-th of n parts of those in the workspace; i = n: the end
static __device__ __forceinline__ int fattn_back_hopper_part(const fattn_back_hopper_params & p, const int i, const int n) {
    return p.kt0 + (int) ((int64_t) (fattn_back_hopper_last_key(p) - p.kt0) * i / n);
}

// the i-th sum of a slot for a query, and its row of one of n planes of dQ
static __device__ __forceinline__ float & fattn_back_hopper_sum(
    const fattn_back_hopper_params & p, const int lhead, const int slot, const int i, const int q) {
    return p.sums[(((int64_t) lhead * p.slots + slot) * 3 + i) * FATTN_BACK_HOPPER_ROWS * p.QT + q];
}
template <int D>
static __device__ __forceinline__ float * fattn_back_hopper_plane(
    const fattn_back_hopper_params & p, const int lhead, const int n, const int plane, const int q) {
    return p.dqs + (((int64_t) lhead * n + plane) * FATTN_BACK_HOPPER_ROWS * p.QT + q) * D;
}

// dS is an operand of a tile of its own. A thread's values of a row are adjacent there: 8j + 2c + i is column 32(j/4) + 8c + 2(j%4) + i.
#define FATTN_BACK_HOPPER_DS (FATTN_BACK_HOPPER_ROWS * FATTN_BACK_HOPPER_ROWS * 2) // bytes

static __device__ __forceinline__ char * fattn_back_hopper_ds(
    const fattn_back_hopper_params & p, const int lhead, const int qt, const int kt) {
    return (char *) p.ds + (((int64_t) lhead * p.kts + kt - p.kt0) * p.QT + qt) * FATTN_BACK_HOPPER_DS;
}

// query of a column
static __device__ __forceinline__ int fattn_back_hopper_ds_query(const int col) {
    return col / 32 * 32 + col % 8 / 2 * 8 + col / 8 % 4 * 2 + col % 2;
}

// Shared memory of a block: nwg own tiles of two operands, rings of n1 and n2 streamed tiles. Of the first operands (Q, K) a tile is
// followed by its low halves if split. alias: the own tiles move to registers, and the second ring takes their place.
// with_exchange: P of two tiles passes between warpgroups.
template <int D, int nwg, int n1, int n2, bool split, bool alias = false, bool with_exchange = false>
struct fattn_back_hopper_smem {
    static_assert(!alias || (!split && n2 <= 2 * nwg), "the second ring does not fit the own tiles");
    static constexpr int tile     = FATTN_BACK_HOPPER_ROWS * D * 2;
    static constexpr int tile1    = split ? 2 * tile : tile;
    static constexpr int own1     = 0;
    static constexpr int own2     = own1 + nwg * tile1;
    static constexpr int ring1    = own2 + nwg * tile;
    static constexpr int ring2    = alias ? own1 : ring1 + n1 * tile1;
    static constexpr int extra    = ring1 + n1 * tile1 + (alias ? 0 : n2 * tile);
    static constexpr int exchange = FATTN_BACK_HOPPER_ROWS * FATTN_BACK_HOPPER_ROWS * 4;
    static constexpr int stat     = extra + (with_exchange ? 2 * exchange : 0);
    static constexpr int meta     = stat + n1 * 2 * FATTN_BACK_HOPPER_ROWS * 4;
    static constexpr int bars     = meta + n1 * 16;
    static constexpr int own      = bars;            // own tiles are here
    static constexpr int moved    = bars + 8;       // own tiles are in registers
    static constexpr int full1    = moved + 8;
    static constexpr int empty1   = full1 + n1 * 8;
    static constexpr int full2    = empty1 + n1 * 8;
    static constexpr int empty2   = full2 + n2 * 8;
    static constexpr int full_p   = empty2 + n2 * 8; // P of the exchange
    static constexpr int empty_p  = full_p + (with_exchange ? 2 * 8 : 0);
    static constexpr int bytes    = empty_p + (with_exchange ? 2 * 8 : 0);
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

// nthreads: of the block, that read tiles
template <typename L>
static __device__ __forceinline__ void fattn_back_hopper_init(const uint32_t smem, const int nthreads) {
    if (threadIdx.x == 0) {
        hopper_barrier_init(smem + L::own, 1);
        hopper_barrier_init(smem + L::moved, nthreads);
        for (int i = 0; i < L::stages1; ++i) {
            hopper_barrier_init(smem + L::full1 + 8 * i, 1);
            hopper_barrier_init(smem + L::empty1 + 8 * i, nthreads);
        }
        for (int i = 0; i < L::stages2; ++i) {
            hopper_barrier_init(smem + L::full2 + 8 * i, 1);
            hopper_barrier_init(smem + L::empty2 + 8 * i, nthreads);
        }
        for (int i = L::full_p; i < L::bytes; i += 8) {
            hopper_barrier_init(smem + i, 128);
        }
        hopper_barrier_init_done();
    }
    __syncthreads();
}

// Calls f(t, states) for the tiles t in [first, last) that some of the own tiles t0, .. t0 + n - 1 before end sees, in order; states: two bits
// each. keys: the own tiles are keys, seen by the head; else they are of [units*G][QT].
template <bool keys, int n, typename F>
static __device__ __forceinline__ void fattn_back_hopper_walk(
    const fattn_back_hopper_params & p, const int lhead, const int t0, const int end, const int first, const int last, F f) {
    for (int base = first; base < last; base += 32) {
        const int t     = base + threadIdx.x % 32;
        uint32_t states = 0;
        for (int w = 0; w < n; ++w) {
            const int own = t0 + w;
            if (t < last && own < end) {
                states |= (keys ? fattn_back_hopper_get_tile(p, lhead, t, own) : fattn_back_hopper_get_tile(p, own / p.QT, own % p.QT, t)) << (2 * w);
            }
        }
        uint32_t todo = __ballot_sync(0xFFFFFFFF, states != 0);
        while (todo != 0) {
            const int b = __ffs(todo) - 1;
            todo &= todo - 1;
            f(base + b, __shfl_sync(0xFFFFFFFF, states, b));
        }
    }
}

// The producer warp: own tiles t0, t0 + 1, .. before end of x1 and x2, then for heads lhead0 .. lhead0 + nheads - 1 the streamed tiles
// [first, last) of y1 and y2. keys: the own tiles are keys, and the rows' statistics are streamed, too; else they are of [units*G][QT].
template <typename L, bool keys>
static __device__ __forceinline__ void fattn_back_hopper_produce(const fattn_back_hopper_params & p, char * smem_ptr, const int unit,
    const int t0, const int end, const int lhead0, const int nheads, const int first, const int last) {
    const uint32_t smem = hopper_smem(smem_ptr);
    const int lane      = threadIdx.x % 32;

    // tile t of a unit's or of a head's
    const auto key_tile = [&](const half * x, const int t, const int bytes) {
        return (const char *) x + ((int64_t) unit * p.kts + t - p.kt0) * bytes;
    };
    const auto query_tile = [&](const half * x, const int lhead, const int t, const int bytes) {
        return (const char *) x + ((int64_t) lhead * p.QT + t) * bytes;
    };
    if (lane == 0) {
        hopper_barrier_expect(smem + L::own, L::groups * (L::tile1 + L::tile));
        for (int w = 0; w < L::groups; ++w) {
            const int t     = min(t0 + w, end - 1);
            const char * x1 = keys ? key_tile(p.k, t, L::tile1) : query_tile(p.q, 0, t, L::tile1);
            const char * x2 = keys ? key_tile(p.v, t, L::tile) : query_tile(p.dO, 0, t, L::tile);
            hopper_load(smem + L::own1 + w * L::tile1, x1, L::tile1, smem + L::own);
            hopper_load(smem + L::own2 + w * L::tile, x2, L::tile, smem + L::own);
        }
    }

    if (L::aliased) {
        hopper_barrier_wait(smem + L::moved, 0);
    }
    fattn_back_hopper_ring<L::stages1> r1;
    fattn_back_hopper_ring<L::stages2> r2;
    for (int lhead = lhead0; lhead < lhead0 + nheads; ++lhead) {
        fattn_back_hopper_walk<keys, L::groups>(p, lhead, t0, end, first, last, [&](const int t, const uint32_t states) {
            if (lane == 0) {
                constexpr int nstat  = 2 * FATTN_BACK_HOPPER_ROWS * 4;
                const uint32_t full1 = smem + L::full1 + 8 * r1.stage;
                const uint32_t full2 = smem + L::full2 + 8 * r2.stage;
                const char * y1      = keys ? query_tile(p.q, lhead, t, L::tile1) : key_tile(p.k, t, L::tile1);
                const char * y2      = keys ? query_tile(p.dO, lhead, t, L::tile) : key_tile(p.v, t, L::tile);
                hopper_barrier_wait(smem + L::empty1 + 8 * r1.stage, r1.parity ^ 1);
                *(int4 *) (smem_ptr + L::meta + 16 * r1.stage) = make_int4(lhead, t, (int) states, 0);
                hopper_barrier_expect(full1, L::tile1 + (keys ? nstat : 0));
                hopper_load(smem + L::ring1 + r1.stage * L::tile1, y1, L::tile1, full1);
                if (keys) {
                    const char * stat = (const char *) p.stat + ((int64_t) lhead * p.QT + t) * nstat;
                    hopper_load(smem + L::stat + r1.stage * nstat, stat, nstat, full1);
                }
                hopper_barrier_wait(smem + L::empty2 + 8 * r2.stage, r2.parity ^ 1);
                hopper_barrier_expect(full2, L::tile);
                hopper_load(smem + L::ring2 + r2.stage * L::tile, y2, L::tile, full2);
            }
            __syncwarp();
            r1.next();
            r2.next();
        });
    }
    if (lane == 0) {
        hopper_barrier_wait(smem + L::empty1 + 8 * r1.stage, r1.parity ^ 1);
        *(int4 *) (smem_ptr + L::meta + 16 * r1.stage) = make_int4(0, 0, -1, 0);
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

// the same with a, or its first columns, in registers
template <int D, int n>
static __device__ __forceinline__ void fattn_back_hopper_product(
    float (&acc)[32], const uint32_t (&a16)[n], const uint32_t a, const uint32_t b) {
    const uint64_t da = hopper_desc(a);
    const uint64_t db = hopper_desc(b);
    hopper_wgmma_fence();
    hopper_wgmma_rows<true>(acc, a16, db);
#pragma unroll
    for (int k = 1; k < D / 16; ++k) {
        if (4 * k < n) {
            hopper_wgmma_rows<false>(acc, a16 + 4 * k, db + hopper_step_rows(k));
        } else {
            hopper_wgmma<false>(acc, da + hopper_step_rows(k), db + hopper_step_rows(k));
        }
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

// acc[64 x 2*R] += a^T b; a[64 x 64] and b tiles in shared memory. The caller commits.
template <int R>
static __device__ __forceinline__ void fattn_back_hopper_accumulate_t(float (&acc)[R], const uint32_t a, const uint32_t b) {
    const uint64_t da = hopper_desc(a);
    const uint64_t db = hopper_desc(b);
    hopper_wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        hopper_wgmma_cols(acc, da + hopper_step_cols(k), db + hopper_step_cols(k));
    }
}

// accumulators [64 x 64] to the operand of the next product
static __device__ __forceinline__ void fattn_back_hopper_operand(uint32_t (&a)[16], const float (&x)[32]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        a[i] = hopper_pack(x[2 * i + 0], x[2 * i + 1]);
    }
}

// S += mask of a tile over sc, what S is multiplied by to be in units of log2; -inf for pairs beyond the end. Returns the largest |S| that got a
// finite bias.
template <bool keys>
static __device__ __forceinline__ float fattn_back_hopper_mask(
    float (&S)[32], const fattn_back_hopper_params & p, const int lhead, const int t_own, const int t_streamed, const float sc) {
    const int lane    = threadIdx.x % 32;
    const int own0    = t_own * FATTN_BACK_HOPPER_ROWS + (threadIdx.x % 128) / 32 * 16 + lane / 4;
    const int str0    = t_streamed * FATTN_BACK_HOPPER_ROWS + 2 * (lane % 4);
    const int h       = fattn_back_hopper_head(p, lhead);
    const int s       = fattn_back_hopper_seq(p, lhead);
    const char * mask = p.a.mask;
    if (mask != nullptr) {
        mask += (s % p.a.mask_nseqs) * p.a.mask_nb_seq + (h % p.a.mask_nheads) * p.a.mask_nb_head;
    }
    // not 0, which times -inf is no number
    const float per_unit = fmaxf(fattn_back_slope(p.a, h) * FATTN_BACK_HOPPER_LOG2E / sc, FLT_MIN);
    float largest        = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int own = own0 + (i % 4) / 2 * 8;
        const int str = str0 + i / 4 * 8 + i % 2;
        const int q   = keys ? str : own;
        const int key = keys ? own : str;
        float x       = -INFINITY;
        if (q < p.a.N && key < p.a.M) {
            const char * src = mask + q * p.a.mask_nb_row + key * (int64_t) sizeof(half);
            x                = mask == nullptr ? 0.0f : per_unit * __half2float(*(const half *) src);
        }
        largest = fmaxf(largest, x == 0.0f || x == -INFINITY ? 0.0f : fabsf(S[i]));
        S[i] += x;
    }
    return largest;
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

// what mean(K) is multiplied by where the sink takes its part from a row of dQ; LSE and D are there
static __device__ __forceinline__ float fattn_back_hopper_sink(const fattn_back_hopper_params & p, const int h, const int64_t row) {
    if (p.a.sinks == nullptr || fabsf(p.a.sinks[h]) == INFINITY) {
        return 0.0f;
    }
    return p.a.scale * p.a.D[row] * hopper_exp2((p.a.sinks[h] - p.a.LSE[row]) * FATTN_BACK_HOPPER_LOG2E);
}

// A row of accumulators [64 x 2*R] of a query tile, times factor, to columns col0 and on of dQ, or of plane part of several; r: the
// thread's first or second. In dQ the first keys also bring what the sink takes. Other keys are added: one block owns the row, so that the
// order is that of the launches.
template <int D, int R>
static __device__ __forceinline__ void fattn_back_hopper_store_dq(const fattn_back_hopper_params & p, const float (&acc)[R],
    const float factor, const int r, const int lhead, const int nplanes, const int plane, const int q, const int col0) {
    const int h        = fattn_back_hopper_head(p, lhead);
    const int64_t row  = p.a.row(q, h, fattn_back_hopper_seq(p, lhead));
    const int col      = col0 + 2 * (threadIdx.x % 4);
    const float sink   = nplanes == 1 && p.kt0 == 0 ? fattn_back_hopper_sink(p, h, row) : 0.0f;
    const float * mean = p.mean_k + (int64_t) (p.unit0 + lhead / p.a.G) * FATTN_BACK_PREP_MAX_D + col;
    float * dst        = (nplanes == 1 ? p.a.dQ + row * D : fattn_back_hopper_plane<D>(p, lhead, nplanes, plane, q)) + col;
#pragma unroll
    for (int j = 0; j < R / 4; ++j) {
        float2 y = make_float2(acc[4 * j + 2 * r + 0] * factor, acc[4 * j + 2 * r + 1] * factor);
        if (sink != 0.0f) {
            y.x = fmaf(sink, mean[8 * j + 0], y.x);
            y.y = fmaf(sink, mean[8 * j + 1], y.y);
        }
        if (p.kt0 > 0) {
            hopper_add(dst + 8 * j, y);
        } else {
            *(float2 *) (dst + 8 * j) = y;
        }
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

// What a streamed tile is: head, index, states. One lane reads for the warp: shared memory answers late while wgmma reads from it.
struct fattn_back_hopper_meta {
    int4 x;

    __device__ __forceinline__ explicit fattn_back_hopper_meta(const char * src) {
        x = threadIdx.x % 32 == 0 ? *(const int4 *) src : make_int4(0, 0, 0, 0);
    }
    __device__ __forceinline__ int get(const int y) const {
        return __shfl_sync(0xFFFFFFFF, y, 0);
    }
};

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

// Two warpgroups in turns: one takes up a tile when the other has come to a certain point of its own, so that one has work for the tensor
// cores while the other forms P. Off where it does not pay, as with head size 64. Named barriers 1 and 2.
template <bool on>
struct fattn_back_hopper_turns {
    int wg;

    __device__ __forceinline__ explicit fattn_back_hopper_turns(const int wg) :
        wg(wg) {
        if (on && wg == 1) {
            pass();
        }
    }
    __device__ __forceinline__ void take() const {
        if constexpr (on) {
            hopper_named_sync<256>(1 + wg);
        }
    }
    __device__ __forceinline__ void pass() const {
        if constexpr (on) {
            hopper_named_arrive<256>(2 - wg);
        }
    }
    __device__ __forceinline__ void end() const {
        if (on && wg == 0) {
            take();
        }
    }
};

// product of a thread's part of rows of two accumulators; r: the row or the one 8 below
static __device__ __forceinline__ float fattn_back_hopper_row_dot(const float (&x)[32], const float (&y)[32], const int r) {
    float sum[2] = { 0.0f, 0.0f };
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        sum[0] = fmaf(x[4 * j + 2 * r + 0], y[4 * j + 2 * r + 0], sum[0]);
        sum[1] = fmaf(x[4 * j + 2 * r + 1], y[4 * j + 2 * r + 1], sum[1]);
    }
    return sum[0] + sum[1];
}

// accumulators times a factor for each of the thread's rows
template <int R>
static __device__ __forceinline__ void fattn_back_hopper_scale(float (&acc)[R], const float (&x)[2]) {
    hopper_pin(acc);
#pragma unroll
    for (int i = 0; i < R; ++i) {
        acc[i] *= x[i % 4 / 2];
    }
    hopper_pin(acc);
}

// what -LSE is stored with: P is an operand times 2^8 and times what makes up for the power of two of its row of dO
static __device__ __forceinline__ float fattn_back_hopper_shift(const float4 scale, const float4 row) {
    return FATTN_BACK_HOPPER_SHIFT_P + log2f(scale.w) - log2f(row.z); // their quotient may be too small for a float
}

// factor from Q'K' to log2; what is below that adds nothing to a logit, and the mask is divided by it
static __device__ __forceinline__ float fattn_back_hopper_unit(const fattn_back_hopper_params & p, const float4 scale) {
    return fmaxf(p.a.scale * FATTN_BACK_HOPPER_LOG2E / scale.x / scale.y, 0x1p-100f);
}

// LSE and D of query q of a head's tiles, x of its rows, from the maximum m of its keys' logits, the sum of E and the mean of dP; stored by
// one of its threads. Returns P of all keys, and D as the operands see it.
static __device__ __forceinline__ float2 fattn_back_hopper_finish(const fattn_back_hopper_params & p, const int lhead, const int q,
    const float4 scale, const float4 x, const float m, const float sum, const float mean, const bool store) {
    const int h       = fattn_back_hopper_head(p, lhead);
    const bool sinks  = p.a.sinks != nullptr;
    const bool taken  = sinks && p.a.sinks[h] == INFINITY; // all of the row by the sink
    const float sink  = sinks && !taken ? (p.a.sinks[h] - p.a.scale * x.x) * FATTN_BACK_HOPPER_LOG2E : -INFINITY;
    const float keys  = sum > 0.0f && !taken ? m - FATTN_BACK_HOPPER_SHIFT_E + log2f(sum) : -INFINITY; // LSE without the sink
    const float top   = fmaxf(keys, sink);
    const float lse   = top == -INFINITY ? -INFINITY : top + log2f(hopper_exp2(keys - top) + hopper_exp2(sink - top));
    const float pkeys = keys == -INFINITY ? 0.0f : hopper_exp2(keys - lse);
    const float psink = sink == -INFINITY ? 0.0f : hopper_exp2(sink - lse);
    const float Dk    = pkeys * mean;
    const float Dc    = Dk - psink * x.y * scale.z * x.z; // D without the part of V's mean
    if (store) {
        const bool valid             = q < p.a.N && lse != -INFINITY;
        float * stat                 = p.stat + ((int64_t) lhead * p.QT + q / FATTN_BACK_HOPPER_ROWS) * 2 * FATTN_BACK_HOPPER_ROWS + q % FATTN_BACK_HOPPER_ROWS;
        stat[0]                      = valid ? fattn_back_hopper_shift(scale, x) - lse : -INFINITY;
        stat[FATTN_BACK_HOPPER_ROWS] = valid ? Dc : 0.0f;
        if (q < p.a.N) {
            const int64_t i = p.a.row(q, h, fattn_back_hopper_seq(p, lhead));
            p.a.LSE[i]      = lse == -INFINITY ? (taken ? INFINITY : lse) : lse * (1.0f / FATTN_BACK_HOPPER_LOG2E) + p.a.scale * x.x;
            p.a.D[i]        = lse == -INFINITY ? 0.0f : Dk / scale.z / x.z + pkeys * x.y;
        }
    }
    return make_float2(pkeys, Dc);
}

#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)

// dK and dV. Grid: units of a band, blocks of nwg key tiles of the window, bands. Block: nwg warpgroups with 64 keys each, then the
// producer.
template <int D, int nwg, int stages, int nregs, bool split>
static __global__ void __launch_bounds__((nwg + 1) * 128, 1) flash_attn_back_hopper_keys(
    const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using L = fattn_back_hopper_smem<D, nwg, stages, stages, split>;
    extern __shared__ __align__(1024) char smem_ptr[];
    const uint32_t smem = hopper_smem(smem_ptr);
    const int unit      = blockIdx.z * p.band_k + blockIdx.x;
    if (unit >= p.units || fattn_back_hopper_large(p, unit) != split) {
        return;
    }
    fattn_back_hopper_init<L>(smem, 128 * nwg);
    const int t0 = fattn_back_hopper_first_key(p) + blockIdx.y * nwg;
    const int wg = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0); // uniform for the compiler, too

    if (wg == nwg) {
        if constexpr (nwg > 1) {
            hopper_registers_dec<24>();
        }
        if (threadIdx.x / 32 == 4 * nwg) {
            fattn_back_hopper_produce<L, true>(p, smem_ptr, unit, t0, fattn_back_hopper_last_key(p), unit * p.a.G, p.a.G, 0, p.QT);
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
        fattn_back_hopper_turns<(D > 64 && nwg == 2)> turns(wg);
        int prev = -1;
        while (true) {
            hopper_barrier_wait(smem + L::full1 + 8 * ring.stage, ring.parity);
            const fattn_back_hopper_meta meta(smem_ptr + L::meta + 16 * ring.stage);
            const int states = meta.get(meta.x.z);
            if (states < 0) {
                break;
            }
            float S[32];
            float dP[32];
            const uint32_t stat = smem + L::stat + (ring.stage * 2 * FATTN_BACK_HOPPER_ROWS + col) * (int) sizeof(float);
            hopper_wgmma_wait<1>(); // dV of the previous tile
            hopper_pin(P16);
            turns.take();
            fattn_back_hopper_product<D, split>(S, own1, smem + L::ring1 + ring.stage * L::tile1);
            hopper_wgmma_wait<1>(); // dK of the previous tile
            hopper_pin(dS16);
            if (prev >= 0) {
                hopper_barrier_arrive(smem + L::empty1 + 8 * prev);
                hopper_barrier_arrive(smem + L::empty2 + 8 * prev);
            }
            hopper_barrier_wait(smem + L::full2 + 8 * ring.stage, ring.parity);
            fattn_back_hopper_product<D, false>(dP, own2, smem + L::ring2 + ring.stage * L::tile);

            float2 col_stat[8];
            fattn_back_hopper_load_columns(col_stat, stat);
            hopper_wgmma_wait<1>(); // S
            hopper_pin(S);
            if ((states >> 2 * wg & 3) != FATTN_BACK_TILE_FULL) {
                const int lhead = meta.get(meta.x.x);
                fattn_back_hopper_mask<true>(S, p, lhead, t0 + wg, meta.get(meta.x.y), sc);
            }
            fattn_back_hopper_probs_t(S, sc, col_stat);
            fattn_back_hopper_load_columns(col_stat, stat + FATTN_BACK_HOPPER_ROWS * (int) sizeof(float));
            fattn_back_hopper_operand(P16, S);
            turns.pass();
            fattn_back_hopper_accumulate(dV, P16, smem + L::ring2 + ring.stage * L::tile);

            hopper_wgmma_wait<1>(); // dP
            hopper_pin(dP);
            fattn_back_hopper_ds_t(dP, S, col_stat);
            fattn_back_hopper_operand(dS16, dP);
            fattn_back_hopper_accumulate(dK, dS16, smem + L::ring1 + ring.stage * L::tile1);

            prev = ring.stage;
            ring.next();
        }
        turns.end();
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

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A warpgroup of keys_split: of S, P and dV (first), or of dP, dS and dK
template <typename L, int D, bool split, bool ds, bool first>
static __device__ __forceinline__ void fattn_back_hopper_keys_half(
    const fattn_back_hopper_params & p, char * smem_ptr, const int unit, const int t0) {
    constexpr int stages = L::stages1;
    const uint32_t smem  = hopper_smem(smem_ptr);
    const int warp       = threadIdx.x % 128 / 32;
    const int lane       = threadIdx.x % 32;
    const int col        = 2 * (lane % 4);
    const float sc       = fattn_back_hopper_unit(p, p.scale[p.unit0 + unit]);

    float acc[D / 2];
#pragma unroll
    for (int i = 0; i < D / 2; ++i) {
        acc[i] = 0.0f;
    }
    uint32_t X16[16];

    fattn_back_hopper_ring<stages> ring;
    fattn_back_hopper_ring<2> pair; // of the exchange
    const uint32_t own = smem + (first ? L::own1 : L::own2);
    hopper_barrier_wait(smem + L::own, 0);
    uint32_t own16[split ? 1 : D / 8]; // half of the own columns: what comes from registers need not come from shared memory
    if constexpr (!split) {
#pragma unroll
        for (int k = 0; k < D / 32; ++k) {
            hopper_load_rows(own16 + 4 * k, own, k);
        }
    }
    int prev = -1;
    while (true) {
        hopper_barrier_wait(smem + L::full1 + 8 * ring.stage, ring.parity);
        const fattn_back_hopper_meta meta(smem_ptr + L::meta + 16 * ring.stage);
        const int states = meta.get(meta.x.z);
        if (states < 0) {
            break;
        }
        float X[32]; // S, then P; dP, then dS
        if constexpr (!first) {
            hopper_barrier_wait(smem + L::full2 + 8 * ring.stage, ring.parity);
        }
        const uint32_t streamed = smem + (first ? L::ring1 + ring.stage * L::tile1 : L::ring2 + ring.stage * L::tile);
        if constexpr (split) {
            fattn_back_hopper_product<D, first>(X, own, streamed);
        } else {
            fattn_back_hopper_product<D>(X, own16, own, streamed);
        }
        float2 col_stat[8];
        fattn_back_hopper_load_columns(
            col_stat, smem + L::stat + ((2 * ring.stage + (first ? 0 : 1)) * FATTN_BACK_HOPPER_ROWS + col) * (int) sizeof(float));
        hopper_wgmma_wait<1>(); // all of the previous tile
        hopper_pin(X16);
        if (stages > 1 && prev >= 0) {
            hopper_barrier_arrive(smem + L::empty1 + 8 * prev);
            hopper_barrier_arrive(smem + L::empty2 + 8 * prev);
        }
        hopper_wgmma_wait<0>();
        hopper_pin(X);

        float4 * slot          = (float4 *) (smem_ptr + L::extra + pair.stage * L::exchange + warp * (L::exchange / 4)) + lane;
        const uint32_t full_p  = smem + L::full_p + 8 * pair.stage;
        const uint32_t empty_p = smem + L::empty_p + 8 * pair.stage;
        if constexpr (first) {
            if ((states & 3) != FATTN_BACK_TILE_FULL) {
                const int lhead = meta.get(meta.x.x);
                fattn_back_hopper_mask<true>(X, p, lhead, t0, meta.get(meta.x.y), sc);
            }
            fattn_back_hopper_probs_t(X, sc, col_stat);
            hopper_barrier_wait(empty_p, pair.parity ^ 1);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                slot[32 * i] = make_float4(X[4 * i + 0], X[4 * i + 1], X[4 * i + 2], X[4 * i + 3]);
            }
            hopper_barrier_arrive(full_p);
            fattn_back_hopper_operand(X16, X);
            hopper_barrier_wait(smem + L::full2 + 8 * ring.stage, ring.parity);
            fattn_back_hopper_accumulate(acc, X16, smem + L::ring2 + ring.stage * L::tile);
        } else {
            hopper_barrier_wait(full_p, pair.parity);
            float P[32];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                *(float4 *) (P + 4 * i) = slot[32 * i];
            }
            fattn_back_hopper_ds_t(X, P, col_stat);
            hopper_barrier_arrive(empty_p);
            fattn_back_hopper_operand(X16, X);
            if constexpr (ds) {
                char * dst = fattn_back_hopper_ds(p, meta.get(meta.x.x), meta.get(meta.x.y), t0) + (warp * 16 + lane / 4) * 128;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        *(uint4 *) (dst + r * 8 * 128 + ((4 * h + lane % 4) ^ (lane / 4)) * 16) =
                            make_uint4(X16[8 * h + r], X16[8 * h + r + 2], X16[8 * h + r + 4], X16[8 * h + r + 6]);
                    }
                }
            }
            fattn_back_hopper_accumulate(acc, X16, smem + L::ring1 + ring.stage * L::tile1);
        }
        pair.next();
        if constexpr (stages == 1) {
            hopper_wgmma_wait<0>();
            hopper_barrier_arrive(smem + L::empty1);
            hopper_barrier_arrive(smem + L::empty2);
        }

        prev = ring.stage;
        ring.next();
    }
    hopper_wgmma_wait<0>();
    hopper_pin(X16);
    hopper_pin(acc);
    if constexpr (first) {
        fattn_back_hopper_store_dv(p, acc, unit, t0);
    } else {
        fattn_back_hopper_store_dk(p, acc, unit, t0);
    }
}

#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)

// dK and dV for D = 256, where a warpgroup's registers hold one of them: the first forms S, P and dV, the second dP, dS and dK.
// P passes through shared memory from thread to thread, in F32. Grid: units of a band, key tiles of the window, bands. Block: two
// warpgroups, the producer. ds: dS goes to the workspace.
template <int D, int stages, bool split, bool ds>
static __global__ void __launch_bounds__(3 * 128, 1) flash_attn_back_hopper_keys_split(const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using L = fattn_back_hopper_smem<D, 1, stages, stages, split, false, true>;
    extern __shared__ __align__(1024) char smem_ptr[];
    const uint32_t smem = hopper_smem(smem_ptr);
    const int unit      = blockIdx.z * p.band_k + blockIdx.x;
    if (unit >= p.units || fattn_back_hopper_large(p, unit) != split) {
        return;
    }
    fattn_back_hopper_init<L>(smem, 256);
    const int t0 = fattn_back_hopper_first_key(p) + blockIdx.y;
    const int wg = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0); // uniform for the compiler, too

    if (wg == 2) {
        hopper_registers_dec<split ? 56 : 24>();
        if (threadIdx.x / 32 == 8) {
            fattn_back_hopper_produce<L, true>(p, smem_ptr, unit, t0, fattn_back_hopper_last_key(p), unit * p.a.G, p.a.G, 0, p.QT);
        }
    } else {
        hopper_registers_inc<split ? 224 : 240>();
        if (wg == 0) {
            fattn_back_hopper_keys_half<L, D, split, ds, true>(p, smem_ptr, unit, t0);
        } else {
            fattn_back_hopper_keys_half<L, D, split, ds, false>(p, smem_ptr, unit, t0);
        }
    }
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

#define FATTN_BACK_HOPPER_DQ_TILES 3 // query tiles of a block of dq

// Shared memory of dq: stages of a tile of K and the block's tiles of dS
template <int D, int n>
struct fattn_back_hopper_smem_dq {
    static constexpr int tile  = FATTN_BACK_HOPPER_ROWS * D * 2;
    static constexpr int ds    = tile;
    static constexpr int stage = ds + FATTN_BACK_HOPPER_DQ_TILES * FATTN_BACK_HOPPER_DS;
    static constexpr int meta  = n * stage;
    static constexpr int full  = meta + n * 8;
    static constexpr int empty = full + n * 8;
    static constexpr int bytes = empty + n * 8;
};

// dQ from dS and K of the key tiles in the workspace, added to what came of the keys before. Grid: units, parts of the keys of blocks of
// three query tiles of the unit's heads. Block: two warpgroups, the producer. The first has the first query tile, the second the second, and
// each half of the columns of the third: K is read from L2 for as many queries as the registers hold sums of.
template <int D, int stages>
static __global__ void __launch_bounds__(3 * 128, 1) flash_attn_back_hopper_dq(const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using L = fattn_back_hopper_smem_dq<D, stages>;
    extern __shared__ __align__(1024) char smem_ptr[];
    const uint32_t smem = hopper_smem(smem_ptr);
    const int unit      = blockIdx.x;
    if (fattn_back_hopper_large(p, unit)) {
        return;
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            hopper_barrier_init(smem + L::full + 8 * i, 1);
            hopper_barrier_init(smem + L::empty + 8 * i, 256);
        }
        hopper_barrier_init_done();
    }
    __syncthreads();
    const int part = blockIdx.y % p.parts_dq;
    const int end  = (unit + 1) * p.a.G * p.QT;
    const int t0   = unit * p.a.G * p.QT + blockIdx.y / p.parts_dq * FATTN_BACK_HOPPER_DQ_TILES;
    const int wg   = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0); // uniform for the compiler, too
    fattn_back_hopper_ring<stages> ring;

    if (wg == 2) {
        hopper_registers_dec<24>();
        if (threadIdx.x / 32 == 8) {
            const int first = fattn_back_hopper_part(p, part, p.parts_dq);
            const int last  = fattn_back_hopper_part(p, part + 1, p.parts_dq);
            fattn_back_hopper_walk<false, FATTN_BACK_HOPPER_DQ_TILES>(p, 0, t0, end, first, last, [&](const int t, const uint32_t states) {
                if (threadIdx.x % 32 == 0) {
                    const uint32_t full = smem + L::full + 8 * ring.stage;
                    const uint32_t dst  = smem + ring.stage * L::stage;
                    hopper_barrier_wait(smem + L::empty + 8 * ring.stage, ring.parity ^ 1);
                    *(int *) (smem_ptr + L::meta + 8 * ring.stage) = states;
                    hopper_barrier_expect(full, L::tile + __popc((states | states >> 1) & 0x55555555) * FATTN_BACK_HOPPER_DS);
                    const char * k = (const char *) p.k + ((int64_t) unit * p.kts + t - p.kt0) * L::tile;
                    hopper_load(dst, k, L::tile, full);
                    for (int w = 0; w < FATTN_BACK_HOPPER_DQ_TILES; ++w) {
                        if ((states >> 2 * w & 3) != FATTN_BACK_TILE_SKIP) {
                            const char * ds = fattn_back_hopper_ds(p, (t0 + w) / p.QT, (t0 + w) % p.QT, t);
                            hopper_load(dst + L::ds + w * FATTN_BACK_HOPPER_DS, ds, FATTN_BACK_HOPPER_DS, full);
                        }
                    }
                }
                __syncwarp();
                ring.next();
            });
            if (threadIdx.x % 32 == 0) {
                hopper_barrier_wait(smem + L::empty + 8 * ring.stage, ring.parity ^ 1);
                *(int *) (smem_ptr + L::meta + 8 * ring.stage) = -1;
                hopper_barrier_arrive(smem + L::full + 8 * ring.stage);
            }
        }
    } else {
        hopper_registers_inc<240>();
        float own[D / 2];
        float shared[D / 4];
#pragma unroll
        for (float & x : own) {
            x = 0.0f;
        }
#pragma unroll
        for (float & x : shared) {
            x = 0.0f;
        }
        int prev = -1;
        while (true) {
            hopper_barrier_wait(smem + L::full + 8 * ring.stage, ring.parity);
            const int states = __shfl_sync(0xFFFFFFFF, threadIdx.x % 32 == 0 ? *(const int *) (smem_ptr + L::meta + 8 * ring.stage) : 0, 0);
            if (states < 0) {
                break;
            }
            const uint32_t k  = smem + ring.stage * L::stage;
            const uint32_t ds = k + L::ds;
            if ((states >> 2 * wg & 3) != FATTN_BACK_TILE_SKIP) {
                fattn_back_hopper_accumulate_t(own, ds + wg * FATTN_BACK_HOPPER_DS, k);
            }
            if ((states >> 4) != FATTN_BACK_TILE_SKIP) {
                fattn_back_hopper_accumulate_t(shared, ds + 2 * FATTN_BACK_HOPPER_DS, k + wg * (D / 128) * FATTN_BACK_HOPPER_PANEL);
            }
            hopper_wgmma_commit();
            hopper_wgmma_wait<1>();
            if (prev >= 0) {
                hopper_barrier_arrive(smem + L::empty + 8 * prev);
            }
            prev = ring.stage;
            ring.next();
        }
        hopper_wgmma_wait<0>();
        hopper_pin(own);
        hopper_pin(shared);
        const float4 scale = p.scale[p.unit0 + unit];
        const float factor = p.a.scale / scale.y / scale.z / scale.w / (1 << FATTN_BACK_HOPPER_SHIFT_P);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = fattn_back_hopper_ds_query(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r);
            const auto q  = [&](const int tile) { return tile < end ? tile % p.QT * FATTN_BACK_HOPPER_ROWS + row : INT_MAX; };
            if (q(t0 + wg) < p.a.N) {
                fattn_back_hopper_store_dq<D>(p, own, factor, r, (t0 + wg) / p.QT, p.parts_dq, part, q(t0 + wg), 0);
            }
            if (q(t0 + 2) < p.a.N) {
                fattn_back_hopper_store_dq<D>(p, shared, factor, r, (t0 + 2) / p.QT, p.parts_dq, part, q(t0 + 2), wg * (D / 2));
            }
        }
    }
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

// LSE, D and dQ, by mode. Grid: lists of a band, parts of the keys of blocks of nwg query tiles, the last ones first, bands. Block: nwg
// warpgroups with 64 queries each, then the producer. regs: Q and dO as operands from registers.
template <int D, int nwg, int n1, int n2, int nregs, fattn_back_hopper_mode mode, bool regs, bool split>
static __global__ void __launch_bounds__((nwg + 1) * 128, 1) flash_attn_back_hopper_queries(
    const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    static_assert(!regs || mode == FATTN_BACK_HOPPER_STATS, "no registers left for Q and dO");
    using L = fattn_back_hopper_smem<D, nwg, n1, n2, split, regs>;
    extern __shared__ __align__(1024) char smem_ptr[];
    const uint32_t smem = hopper_smem(smem_ptr);
    const int list      = blockIdx.z * p.band_q + blockIdx.x;
    const int unit      = list * p.heads_q / p.a.G;
    if (unit >= p.units || ((split || mode == FATTN_BACK_HOPPER_DQ) && fattn_back_hopper_large(p, unit) != split)) {
        return;
    }
    fattn_back_hopper_init<L>(smem, 128 * nwg);
    const int parts = mode == FATTN_BACK_HOPPER_DQ ? p.parts_dq : p.parts;
    const int part  = blockIdx.y % parts;
    const int end   = (list + 1) * p.heads_q * p.QT;
    const int t0    = list * p.heads_q * p.QT + (gridDim.y - 1 - blockIdx.y) / parts * nwg;
    const int wg    = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);

    if (wg == nwg) {
        if constexpr (nwg > 1) {
            hopper_registers_dec<24>();
        }
        if (threadIdx.x / 32 == 4 * nwg) {
            fattn_back_hopper_produce<L, false>(
                p, smem_ptr, unit, t0, end, 0, 1, fattn_back_hopper_part(p, part, parts), fattn_back_hopper_part(p, part + 1, parts));
        }
    } else {
        if constexpr (nwg > 1) {
            hopper_registers_inc<nregs>();
        }
        constexpr bool has_dq = mode != FATTN_BACK_HOPPER_STATS;
        constexpr bool fused  = mode == FATTN_BACK_HOPPER_FUSED;
        constexpr bool watch  = !split && mode != FATTN_BACK_HOPPER_DQ; // for logits that are too large without the split
        const float4 scale    = p.scale[p.unit0 + unit];
        const float sc        = fattn_back_hopper_unit(p, scale);
        const uint32_t own1   = smem + L::own1 + wg * L::tile1;
        const uint32_t own2   = smem + L::own2 + wg * L::tile;
        const int row         = (threadIdx.x % 128) / 32 * 16 + (threadIdx.x % 32) / 4; // and row + 8
        const int tile        = min(t0 + wg, end - 1);
        const int lhead       = tile / p.QT;
        const int qt          = tile % p.QT;
        const float4 * rows   = p.rows + (int64_t) tile * FATTN_BACK_HOPPER_ROWS + row;

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
        float e[2]    = { 0.0f, 0.0f };           // sum of E (dP - Dt)
        float Dt[2]   = { 0.0f, 0.0f };
        float lref[2] = { 0.0f, 0.0f };           // l when Dt was set
        if constexpr (mode == FATTN_BACK_HOPPER_DQ) {
            const float * stat = p.stat + (int64_t) tile * 2 * FATTN_BACK_HOPPER_ROWS + row;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                // dQ's rows need no common weight, which would cost the short ones bits
                m[r]  = stat[8 * r] - fattn_back_hopper_shift(scale, rows[8 * r]) + FATTN_BACK_HOPPER_SHIFT_P;
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
            hopper_barrier_arrive(smem + L::moved);
        }
        fattn_back_hopper_turns<(fused && D > 64 && nwg == 2)> turns(wg);
        int prev1 = -1;
        while (true) {
            hopper_barrier_wait(smem + L::full1 + 8 * ring1.stage, ring1.parity);
            const fattn_back_hopper_meta meta(smem_ptr + L::meta + 16 * ring1.stage);
            const int states = meta.get(meta.x.z);
            if (states < 0) {
                break;
            }
            float S[32];
            float dP[32];
            turns.take();
            if constexpr (regs) {
                fattn_back_hopper_product<D>(S, Q16, own1, smem + L::ring1 + ring1.stage * L::tile1);
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
                hopper_barrier_arrive(smem + L::empty1 + 8 * prev1);
            }
            hopper_barrier_wait(smem + L::full2 + 8 * ring2.stage, ring2.parity);
            if constexpr (regs) {
                fattn_back_hopper_product<D>(dP, dO16, own2, smem + L::ring2 + ring2.stage * L::tile);
            } else {
                fattn_back_hopper_product<D, false>(dP, own2, smem + L::ring2 + ring2.stage * L::tile);
            }
            turns.pass();

            hopper_wgmma_wait<1>(); // S
            hopper_pin(S);
            if constexpr (!has_dq) {
                hopper_barrier_arrive(smem + L::empty1 + 8 * ring1.stage);
            }
            if ((states >> 2 * wg & 3) != FATTN_BACK_TILE_FULL) {
                const float x = sc * fattn_back_hopper_mask<false>(S, p, lhead, qt, meta.get(meta.x.y), sc);
                if (watch && x > FATTN_BACK_HOPPER_LARGE) {
                    fattn_back_hopper_note(p, unit, x);
                }
            }

            if constexpr (mode == FATTN_BACK_HOPPER_DQ) {
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    S[i] = hopper_exp2(fmaf(S[i], sc, m[i % 4 / 2]));
                }
                hopper_wgmma_wait<0>();
                hopper_pin(dP);
            } else {
                float x[2] = { -INFINITY, -INFINITY };
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    x[i % 4 / 2] = fmaxf(x[i % 4 / 2], S[i]);
                }
                if (__any_sync(0xFFFFFFFF, x[0] * sc > m[0] + FATTN_BACK_HOPPER_LAZY || x[1] * sc > m[1] + FATTN_BACK_HOPPER_LAZY)) {
                    float alpha[2] = { 1.0f, 1.0f };
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        x[r] = sc * fattn_back_hopper_quad_max(x[r]);
                        if (x[r] > m[r] + FATTN_BACK_HOPPER_LAZY) {
                            alpha[r] = hopper_exp2(m[r] - x[r]);
                            m[r]     = x[r];
                        }
                        l[r] *= alpha[r];
                        e[r] *= alpha[r];
                        lref[r] *= alpha[r];
                    }
                    if constexpr (fused) {
                        fattn_back_hopper_scale(A, alpha);
                        fattn_back_hopper_scale(B, alpha);
                    }
                }
                float sum[2] = { 0.0f, 0.0f };
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float base = m[r] == -INFINITY ? 0.0f : FATTN_BACK_HOPPER_SHIFT_E - m[r];
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        S[4 * j + 2 * r + 0] = hopper_exp2(fmaf(S[4 * j + 2 * r + 0], sc, base));
                        S[4 * j + 2 * r + 1] = hopper_exp2(fmaf(S[4 * j + 2 * r + 1], sc, base));
                        sum[r] += S[4 * j + 2 * r + 0] + S[4 * j + 2 * r + 1];
                    }
                }
                if constexpr (fused) {
                    hopper_pin(S); // E is formed while dP is on its way, which with D = 256 has not paid
                    hopper_wgmma_wait<0>(); // dP, here because all warps of a group have to wait together
                    hopper_pin(dP);
                    // the warp's rows move together, so that they move seldom
                    if (__any_sync(0xFFFFFFFF, l[0] + sum[0] > 1.5f * lref[0] || l[1] + sum[1] > 1.5f * lref[1])) {
                        hopper_pin(A);
                        hopper_pin(B);
                        float c[2];
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            lref[r]         = l[r] + sum[r];
                            const float all = fattn_back_hopper_quad_sum(lref[r]);
                            const float x   = fattn_back_hopper_quad_sum(e[r] + fattn_back_hopper_row_dot(S, dP, r) - Dt[r] * sum[r]);
                            c[r]            = all > 0.0f ? -x / all : 0.0f;
                            Dt[r] -= c[r];
                            e[r] += c[r] * l[r];
                        }
#pragma unroll
                        for (int i = 0; i < D / 2; ++i) {
                            A[i] = fmaf(c[i % 4 / 2], B[i], A[i]);
                        }
                        hopper_pin(A);
                        hopper_pin(B);
                    }
                    fattn_back_hopper_operand(E16, S);
                    fattn_back_hopper_accumulate(B, E16, smem + L::ring1 + ring1.stage * L::tile1);
                }
                l[0] += sum[0];
                l[1] += sum[1];
                if constexpr (!fused) {
                    hopper_wgmma_wait<0>(); // dP
                    hopper_pin(dP);
                    e[0] += fattn_back_hopper_row_dot(S, dP, 0);
                    e[1] += fattn_back_hopper_row_dot(S, dP, 1);
                }
            }
            hopper_barrier_arrive(smem + L::empty2 + 8 * ring2.stage);
            if constexpr (has_dq) {
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    dP[i] = S[i] * (dP[i] - Dt[i % 4 / 2]);
                    if constexpr (fused) {
                        e[i % 4 / 2] += dP[i];
                    }
                }
                fattn_back_hopper_operand(dS16, dP);
                fattn_back_hopper_accumulate(A, dS16, smem + L::ring1 + ring1.stage * L::tile1);
            }

            if constexpr (has_dq && n1 == 1) {
                hopper_wgmma_wait<0>();
                hopper_barrier_arrive(smem + L::empty1);
            }

            prev1 = ring1.stage;
            ring1.next();
            ring2.next();
        }
        turns.end();
        hopper_wgmma_wait<0>();
        if constexpr (has_dq) {
            hopper_pin(A);
            hopper_pin(dS16);
        }
        if constexpr (fused) {
            hopper_pin(B);
            hopper_pin(E16);
        }

        if constexpr (watch) {
            // of the other pairs of a row only those near its maximum have a P that matters
            fattn_back_hopper_note(p, unit, fmaxf(m[0] == -INFINITY ? 0.0f : fabsf(m[0]), m[1] == -INFINITY ? 0.0f : fabsf(m[1])));
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int q = qt * FATTN_BACK_HOPPER_ROWS + row + 8 * r;
            if (t0 + wg >= end) {
                continue;
            }
            const float4 x       = rows[8 * r];
            const float scale_dq = p.a.scale / scale.y / scale.z / x.z;
            if constexpr (mode == FATTN_BACK_HOPPER_DQ) {
                if (q < p.a.N) {
                    fattn_back_hopper_store_dq<D>(p, A, scale_dq / (1 << FATTN_BACK_HOPPER_SHIFT_P), r, lhead, parts, part, q, 0);
                }
            } else {
                const float sum  = fattn_back_hopper_quad_sum(l[r]);
                const float all  = fattn_back_hopper_quad_sum(e[r] + Dt[r] * l[r]);
                const float mean = sum > 0.0f ? all / sum : 0.0f;
                const bool store = threadIdx.x % 4 == 0;
                float Dc         = mean;
                float factor     = 1.0f;
                if (fused && p.slots == 0) {
                    const float2 y = fattn_back_hopper_finish(p, lhead, q, scale, x, m[r], sum, mean, store);
                    factor         = sum > 0.0f ? y.x / sum * scale_dq : 0.0f;
                    Dc             = y.y;
                    __syncwarp(); // LSE and D are written
                } else if (store) {
                    const int slot                              = p.kt0 / p.kts * parts + part;
                    fattn_back_hopper_sum(p, lhead, slot, 0, q) = m[r];
                    fattn_back_hopper_sum(p, lhead, slot, 1, q) = sum;
                    fattn_back_hopper_sum(p, lhead, slot, 2, q) = mean;
                }
                if constexpr (fused) {
#pragma unroll
                    for (int i = 0; i < D / 4; ++i) {
                        float & a = A[i / 2 * 4 + 2 * r + i % 2];
                        a         = fmaf(Dt[r] - Dc, B[i / 2 * 4 + 2 * r + i % 2], a);
                    }
                    if (p.a.dQ != nullptr && q < p.a.N) {
                        const int nplanes = p.slots == 0 ? 1 : 2 * parts;
                        fattn_back_hopper_store_dq<D>(p, A, factor, r, lhead, nplanes, 2 * part, q, 0);
                        if (nplanes > 1) {
                            fattn_back_hopper_store_dq<D>(p, B, factor, r, lhead, nplanes, 2 * part + 1, q, 0);
                        }
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

// Puts together what blocks have formed of parts of the keys: LSE, D and dQ, by mode. Grid: blocks of rows of the query tiles, heads.
template <int D, fattn_back_hopper_mode mode, bool split>
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_hopper_rows(
    const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int n = mode == FATTN_BACK_HOPPER_STATS ? 1 : D / 4; // threads of a row
    const int lhead = blockIdx.y;
    const int unit  = lhead / p.a.G;
    const int q     = (blockIdx.x * FATTN_BACK_PREP_THREADS + threadIdx.x) / n;
    const int col   = threadIdx.x % n * 4;
    if (q >= p.QT * FATTN_BACK_HOPPER_ROWS || ((split || mode == FATTN_BACK_HOPPER_DQ) && fattn_back_hopper_large(p, unit) != split)) {
        return;
    }
    float4 dq      = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto add = [&](const int nplanes, const int plane, const float factor) {
        const float4 x = *(const float4 *) (fattn_back_hopper_plane<D>(p, lhead, nplanes, plane, q) + col);
        dq             = make_float4(fmaf(factor, x.x, dq.x), fmaf(factor, x.y, dq.y), fmaf(factor, x.z, dq.z), fmaf(factor, x.w, dq.w));
    };
    const bool has_dq = mode != FATTN_BACK_HOPPER_STATS && p.a.dQ != nullptr && q < p.a.N;
    if constexpr (mode == FATTN_BACK_HOPPER_DQ) {
        for (int i = 0; has_dq && i < p.parts_dq; ++i) {
            add(p.parts_dq, i, 1.0f);
        }
    } else {
        const float4 scale = p.scale[p.unit0 + unit];
        const float4 x     = p.rows[(int64_t) lhead * p.QT * FATTN_BACK_HOPPER_ROWS + q];
        float m            = -INFINITY;
        for (int i = 0; i < p.slots; ++i) {
            m = fmaxf(m, fattn_back_hopper_sum(p, lhead, i, 0, q));
        }
        const auto weight = [&](const int i) { return m == -INFINITY ? 0.0f : hopper_exp2(fattn_back_hopper_sum(p, lhead, i, 0, q) - m); };
        float sum         = 0.0f;
        float mean        = 0.0f;
        for (int i = 0; i < p.slots; ++i) {
            const float l = weight(i) * fattn_back_hopper_sum(p, lhead, i, 1, q);
            sum += l;
            mean = fmaf(l, fattn_back_hopper_sum(p, lhead, i, 2, q), mean);
        }
        mean           = sum > 0.0f ? mean / sum : 0.0f;
        const float2 y = fattn_back_hopper_finish(p, lhead, q, scale, x, m, sum, mean, col == 0);
        __syncwarp(); // LSE and D are written
        const float factor = sum > 0.0f ? y.x / sum * p.a.scale / scale.y / scale.z / x.z : 0.0f;
        for (int i = 0; has_dq && i < p.slots; ++i) {
            const float f = factor * weight(i);
            add(2 * p.slots, 2 * i, f);
            add(2 * p.slots, 2 * i + 1, f * (fattn_back_hopper_sum(p, lhead, i, 2, q) - y.y));
        }
    }
    if (has_dq) {
        const int h        = fattn_back_hopper_head(p, lhead);
        const int64_t row  = p.a.row(q, h, fattn_back_hopper_seq(p, lhead));
        const float sink   = fattn_back_hopper_sink(p, h, row);
        const float * mean = p.mean_k + (int64_t) (p.unit0 + unit) * FATTN_BACK_PREP_MAX_D + col;
        if (sink != 0.0f) {
            dq = make_float4(fmaf(sink, mean[0], dq.x), fmaf(sink, mean[1], dq.y), fmaf(sink, mean[2], dq.z), fmaf(sink, mean[3], dq.w));
        }
        *(float4 *) (p.a.dQ + row * D + col) = dq;
    }
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}
