#pragma once

// What the kernels of the Hopper path of FLASH_ATTN_BACK and of its forward share (sm_90a). Operands are fp16 tiles of 64 rows
// (fattn-back-hopper-ptx.cuh).
//
//   forward   owns rows of queries, streams K and V: O and LSE, or LSE and D
//   combine   puts together what forward has formed of shares of the keys
//   keys      owns rows of keys, streams Q and dO of the group's heads: dK and dV
//   queries   owns rows of queries, streams K and V: dQ
//   keys_256  keys of head size 256, where the registers of a warpgroup do not hold both dK and dV of its keys; may leave dS in the workspace
//   dq        queries of head size 256 from the dS that keys_256 has left: streams K and dS
//
// A block is two warps that walk the tiles which the mask leaves and copy them into two rings, and warpgroups that own 64 rows each. S and dP
// (keys: transposed) have the own rows as rows, so that P and dS are operands straight from the accumulators. Blocks of forward, keys and queries
// take one item of own rows after the other: while the results of one are stored, the rings fill with what the next one reads.
//
// The forward forms E = exp2(S - m), rounds it to E16, and with l = sum E16 leaves Ot = sum E16 Vt / l of the centred and scaled Vt. In the
// backward D = dO16 . Ot is then the mean of the rounded dP that dS = P (dP - D) subtracts it from, with weights that add up to 1.

#include "fattn-back-prep.cuh"
#include "fattn-back-hopper-ptx.cuh"

#define FATTN_BACK_HOPPER_ROWS 64 // rows of a tile

// registers of a thread of the warpgroups that own tiles, nsums of them for sums, and of the third, which fills the rings: 504 of the three together
template <int nsums>
static constexpr int fattn_back_hopper_regs = nsums >= 128 ? 240 : 232;
template <int nsums>
static constexpr int fattn_back_hopper_regs_fill = 504 - 2 * fattn_back_hopper_regs<nsums>;

#define FATTN_BACK_HOPPER_SHIFT_P 8 // P is an operand times 2^8; with |dP| <= 2^8 dS stays finite
#define FATTN_BACK_HOPPER_SHIFT_E 2 // E likewise
#define FATTN_BACK_HOPPER_LAZY    4.0f // the running maximum may lag by this power of two

// log2(e)*x from which on S is computed from Q and K in two halves each; x = 14 is out of reach for normal rows, whose |x| is about 5
#define FATTN_BACK_HOPPER_LARGE 20.0f

// of a unit whose forward was in F32, saved instead of the largest |log2(e)*x|: inf
#define FATTN_BACK_HOPPER_IN_F32 0x7F800000u

// mean(V) over the largest distance from it, from which on the rounding of a stored O would show in D
#define FATTN_BACK_HOPPER_FLAT 1024.0f

#define FATTN_BACK_HOPPER_LOG2E 1.4426950408889634f

// The work of a launch: lists of tiles in blocks, in the order [bands][blocks][lists of a band]. Each multiprocessor takes the next item when it has
// done one, so that the long items come first and the short ones fill up.
struct fattn_back_hopper_items {
    int nlists;  // of queries: heads_q heads; of keys: units
    int nblocks; // of a list
    int band;    // lists of a band

    __host__ __device__ int count() const {
        return nlists * nblocks;
    }
    __device__ __forceinline__ void get(const int item, int & list, int & block) const {
        const int first = item / (band * nblocks) * band;
        const int i     = item - first * nblocks;
        const int n     = min(band, nlists - first);
        list            = first + i % n;
        block           = i / n;
    }
};

// A unit is a (sequence, KV head); [units] counts from unit0.
struct fattn_back_hopper_params {
    fattn_back_args a;

    int QT;    // query tiles
    int KT;    // key tiles, an even number
    int unit0; // first unit whose operands are in the workspace
    int units;
    int kt0;     // first key tile whose operands are in the workspace
    int kts;     // key tiles from there on
    int heads_q; // heads whose query tiles are one list for blocks of queries: all of a unit, or one where their work differs
    int band_q;  // lists of a band
    int band_k;  // units of a band

    fattn_back_mask_table mask; // QT query tiles, KT key tiles
    fattn_back_guard guard;

    int nparts;        // of the statistics of the operands
    float * colparts;  // [units][2][nparts][3*256 + 1] sums, minima, maxima of K's and V's columns, number of keys
    float2 * rowparts; // [units][G*QT] max |Q|, max |dO_i|^2
    float * mean_k;    // [S*Hkv][256]
    float * mean_v;
    float4 * scale;    // [S*Hkv] powers of two: of Q, K (with the sign of the scale), V, and of the longest row of dO
    float * weight;    // [S*Hkv*G] power of two of the longest row of a head's dO
    half * k;          // [units][kts] tiles of (K - mean)*scale
    half * v;
    half * ds;         // [units*G][kts][QT] tiles of dS^T, keys in rows, queries in the order of fattn_back_hopper_ds_query
    half * q;          // [units*G][QT] tiles of Q*scale
    half * dO;         // dO, every row with its own power of two
    float4 * rows;     // [units*G][64*QT] Q . mean(K), dO . mean(V), power of two of dO, dO16 . Ot of a given O
    uint32_t * large;  // [S*Hkv] the largest |log2(e)*x| that matters in a row, as the bits of a float; 0 where none is large
    uint32_t * known;  // [S*Hkv] whether LSE and O are those that the forward has left
    float * stat;      // [units*G][QT][2][64] -LSE and D as the operands see them: centred, log2, and with 2^8 and the weight that
                       // makes up for dO's powers of two

    int nsplits;      // shares of the keys among blocks of forward
    int nsplits_dq;   // the same of queries and dq
    uint32_t * taken; // items that the blocks of a launch have taken, 0 between launches
    fattn_back_hopper_items items; // of the launch
    float * sums;   // [units*G][nsplits][3][64*QT] maximum, sum of E16, and D; NULL where a block has all keys of its rows
    bool again;     // K and V are converted once more, for dS
    float * planes; // [units*G][nsplits][64*QT][D] O of a share; [units*G][nsplits_dq][64*QT][D] dQ of a share
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
    if (x > FATTN_BACK_HOPPER_LARGE) {
        atomicMax(p.large + p.unit0 + unit, __float_as_uint(x)); // the order does not matter
        if (x > FATTN_BACK_GUARD_LOGIT) {
            p.guard.raise(p.unit0 + unit, FATTN_BACK_GUARD_F32);
        }
    }
}

// whether LSE and D of a unit must be formed
static __device__ __forceinline__ bool fattn_back_hopper_unknown(const fattn_back_hopper_params & p, const int unit) {
    return p.a.O != nullptr || p.known[p.unit0 + unit] == 0;
}

// index of a head's mask among [mask_nseqs][mask_nheads]
static __device__ __forceinline__ int fattn_back_hopper_mask_index(const fattn_back_hopper_params & p, const int lhead) {
    return p.mask.tiles == nullptr ? 0 : fattn_back_hopper_seq(p, lhead) % p.a.mask_nseqs * p.a.mask_nheads + fattn_back_hopper_head(p, lhead) % p.a.mask_nheads;
}

// Where in the mask's table the tile of a query tile and the first key tile is; it has fewer than 2^32
static __device__ __forceinline__ uint32_t fattn_back_hopper_mask_row(const fattn_back_hopper_params & p, const int mask, const int qt) {
    return ((uint32_t) mask * p.mask.nqt + qt) * p.mask.nkt;
}

// its state there
static __device__ __forceinline__ uint32_t fattn_back_hopper_get_tile(const fattn_back_hopper_params & p, const uint32_t row, const int kt) {
    if (p.mask.tiles == nullptr) {
        const int nkeys = p.a.M - kt * FATTN_BACK_HOPPER_ROWS;
        return nkeys <= 0 ? FATTN_BACK_TILE_SKIP : nkeys < FATTN_BACK_HOPPER_ROWS ? FATTN_BACK_TILE_MIXED
                                                                                  : FATTN_BACK_TILE_FULL;
    }
    return p.mask.tiles[row + kt];
}

// first key tile of keys: of the window, or of those in the workspace
static __device__ __forceinline__ int fattn_back_hopper_first_key(const fattn_back_hopper_params & p) {
    return max(p.a.kv_first / FATTN_BACK_HOPPER_ROWS, p.kt0);
}

static __device__ __forceinline__ int fattn_back_hopper_last_key(const fattn_back_hopper_params & p) {
    return min(p.KT, p.kt0 + p.kts);
}

// first key tile of the i-th of n shares of those in the workspace, an even one; i = n: the end
static __device__ __forceinline__ int fattn_back_hopper_share(const fattn_back_hopper_params & p, const int i, const int n) {
    const int last = fattn_back_hopper_last_key(p);
    return i == n ? last : p.kt0 + (int) ((int64_t) (last - p.kt0) * i / n / 2 * 2);
}

// the i-th sum of a share for a query, and its row of one of n planes
static __device__ __forceinline__ float & fattn_back_hopper_sum(
    const fattn_back_hopper_params & p, const int lhead, const int split, const int i, const int q) {
    return p.sums[(((int64_t) lhead * p.nsplits + split) * 3 + i) * FATTN_BACK_HOPPER_ROWS * p.QT + q];
}
template <int D>
static __device__ __forceinline__ float * fattn_back_hopper_plane(
    const fattn_back_hopper_params & p, const int lhead, const int n, const int plane, const int q) {
    return p.planes + (((int64_t) lhead * n + plane) * FATTN_BACK_HOPPER_ROWS * p.QT + q) * D;
}

// key tiles in the workspace that the window touches
static int fattn_back_hopper_window(const fattn_back_hopper_params & p) {
    if (p.a.kv_count == 0 || (p.a.dK == nullptr && p.a.dV == nullptr)) {
        return 0;
    }
    const int first = std::max(p.a.kv_first / FATTN_BACK_HOPPER_ROWS, p.kt0);
    const int last  = std::min((p.a.kv_first + p.a.kv_count - 1) / FATTN_BACK_HOPPER_ROWS, p.kt0 + p.kts - 1);
    return std::max(0, last - first + 1);
}

// of forward and queries: blocks of nwg query tiles, the last ones first, times shares of the keys
static fattn_back_hopper_items fattn_back_hopper_items_q(
    const fattn_back_hopper_params & p, const int nwg, const int nsplits) {
    return { p.units * (p.a.G / p.heads_q), (p.heads_q * p.QT + nwg - 1) / nwg * nsplits, p.band_q };
}

// of keys: blocks of nwg key tiles of the window
static fattn_back_hopper_items fattn_back_hopper_items_k(const fattn_back_hopper_params & p, const int nwg) {
    return { p.units, (fattn_back_hopper_window(p) + nwg - 1) / nwg, p.band_k };
}

// An item of forward or queries: own tiles t0, t0 + 1, .. before end, of a unit; a share of its keys.
struct fattn_back_hopper_item_q {
    int unit;
    int t0;
    int end;
    int split;

    __device__ __forceinline__ fattn_back_hopper_item_q(const fattn_back_hopper_params & p, const int item, const int nwg, const int nsplits) {
        int list;
        int block;
        p.items.get(item, list, block);
        unit  = list * p.heads_q / p.a.G;
        end   = (list + 1) * p.heads_q * p.QT;
        t0    = list * p.heads_q * p.QT + (p.items.nblocks - 1 - block) / nsplits * nwg;
        split = block % nsplits;
    }
};

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

// Shared memory of a block of keys: nwg own tiles of two operands, a ring of streamed tiles of two. Of the first operands (Q, K) a tile is
// followed by its low halves if hilo. extra: bytes after the ring. nbars: further barriers.
template <int D, int nwg, int n1, int n2, bool hilo, int extra_bytes = 0, int nbars = 0>
struct fattn_back_hopper_smem {
    static constexpr int tile    = FATTN_BACK_HOPPER_ROWS * D * 2;
    static constexpr int tile1   = hilo ? 2 * tile : tile;
    static constexpr int own1    = 0;
    static constexpr int own2    = own1 + nwg * tile1;
    static constexpr int ring1   = own2 + nwg * tile;
    static constexpr int ring2   = ring1 + n1 * tile1;
    static constexpr int extra   = ring2 + n2 * tile;
    static constexpr int stat    = extra + extra_bytes;
    static constexpr int meta    = stat + n1 * 2 * FATTN_BACK_HOPPER_ROWS * 4;
    static constexpr int slots   = meta + n1 * 16; // items asked for
    static constexpr int own     = slots + 8;      // own tiles are here, a barrier a warpgroup
    static constexpr int full1   = own + nwg * 8;
    static constexpr int empty1  = full1 + n1 * 8;
    static constexpr int full2   = empty1 + n1 * 8;
    static constexpr int empty2  = full2 + n2 * 8;
    static constexpr int bars    = empty2 + n2 * 8;
    static constexpr int bytes   = bars + nbars * 8;
    static constexpr int stages1 = n1;
    static constexpr int stages2 = n2;
    static constexpr int groups  = nwg;
    static_assert(bytes <= 232448, "more than a multiprocessor has");
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

// nthreads: of the block, that read tiles; the barriers from bars on are the caller's
template <typename L>
static __device__ __forceinline__ void fattn_back_hopper_init(const uint32_t smem, const int nthreads) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < L::groups; ++i) {
            hopper_barrier_init(smem + L::own + 8 * i, 1);
        }
        for (int i = 0; i < L::stages1; ++i) {
            hopper_barrier_init(smem + L::full1 + 8 * i, 1);
            hopper_barrier_init(smem + L::empty1 + 8 * i, nthreads);
        }
        for (int i = 0; i < L::stages2; ++i) {
            hopper_barrier_init(smem + L::full2 + 8 * i, 1);
            hopper_barrier_init(smem + L::empty2 + 8 * i, nthreads);
        }
    }
}

// whether a unit of the launch satisfies f; for all threads of a block
template <typename F>
static __device__ __forceinline__ bool fattn_back_hopper_any(const fattn_back_hopper_params & p, F f) {
    bool any = false;
    for (int unit = threadIdx.x; unit < p.units; unit += blockDim.x) {
        any = any || f(unit);
    }
    return __syncthreads_or(any);
}

// Calls f(item) for the items that this block takes, in both warps that fill the rings; leader: in the first of them. Every block asks in vain once,
// so that the count of those taken ends as 0.
template <bool leader, typename F>
static __device__ __forceinline__ void fattn_back_hopper_take(const fattn_back_hopper_params & p, int * slots, F f) {
    const int nitems = p.items.count();
    int item         = blockIdx.x;
    for (int i = 0; hopper_any(item < nitems); i ^= 1) {
        f(item);
        if (leader && threadIdx.x % 32 == 0) {
            slots[i] = gridDim.x + atomicInc(p.taken, nitems - 1);
        }
        hopper_named_sync<64>(5);
        item = slots[i];
    }
}

// Calls f(t, states, next) for the tiles t, or runs of kn tiles from t on, in [first, last) that some of n own tiles sees, in order; get(t, w) is the state
// of tile t for the w-th, states has two bits a pair of tiles, those of an own tile together; next: those of the following tile, 0 where not known yet.
template <int n, int kn, typename G, typename F>
static __device__ __forceinline__ void fattn_back_hopper_walk(const int first, const int last, G get, F f) {
    for (int base = first; base < last; base += 32 * kn) {
        const int t     = base + threadIdx.x % 32 * kn;
        uint32_t states = 0;
#pragma unroll
        for (int w = 0; w < n; ++w) {
#pragma unroll
            for (int j = 0; j < kn; ++j) {
                if (t + j < last) {
                    states |= get(t + j, w) << 2 * (w * kn + j);
                }
            }
        }
        uint32_t todo = __ballot_sync(0xFFFFFFFF, states != 0);
        while (todo != 0) {
            const int b = __ffs(todo) - 1;
            todo &= todo - 1;
            const uint32_t next = __shfl_sync(0xFFFFFFFF, states, __ffs(todo) - 1);
            f(base + b * kn, __shfl_sync(0xFFFFFFFF, states, b), todo != 0 ? next : 0);
        }
    }
}

// acc[64 x 64] = a b^T over D columns; a and b are tiles in shared memory, hilo: each followed by its low halves. One group.
template <int D, bool hilo>
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
    if constexpr (hilo) {
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

// S += mask of a tile over sc, what S is multiplied by to be in units of log2; -inf for pairs beyond the end and where state is SKIP. mask: the head's.
// Returns the largest |S| that got a finite bias. few: there are registers for few loads at a time.
template <bool keys, bool few>
static __device__ __forceinline__ float fattn_back_hopper_mask(float (&S)[32], const fattn_back_hopper_params & p, const uint32_t state, const int mask,
    const int lhead, const int t_own, const int t_streamed, const float sc) {
    const int row    = (threadIdx.x % 128) / 32 * 16 + threadIdx.x % 32 / 4; // and row + 8
    const int col    = 2 * (threadIdx.x % 4);
    bool known       = state == FATTN_BACK_TILE_SKIP; // whether bits tell all
    uint64_t bits[2] = { 0, 0 };                      // of the rows, what they see
    if (!known && p.mask.tiles != nullptr) {
        const int slot       = p.mask.slot(mask, keys ? t_streamed : t_own, keys ? t_own : t_streamed);
        const uint64_t * src = p.mask.bits + (int64_t) slot * 2 * FATTN_BACK_HOPPER_ROWS + (keys ? FATTN_BACK_HOPPER_ROWS : 0) + row;
        known                = p.mask.slots[slot] == (keys ? t_own : t_streamed);
        bits[0]              = known ? src[0] >> col : 0; // else of another tile
        bits[1]              = known ? src[8] >> col : 0;
    }
    if (hopper_any(known)) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            S[i] = (bits[i % 4 / 2] >> (i / 4 * 8 + i % 2) & 1) != 0 ? S[i] : -INFINITY;
        }
        return 0.0f;
    }
    const int own0   = t_own * FATTN_BACK_HOPPER_ROWS + row;
    const int str0   = t_streamed * FATTN_BACK_HOPPER_ROWS + col;
    const char * src = p.a.mask;
    if (src != nullptr) {
        src += mask / p.a.mask_nheads * p.a.mask_nb_seq + mask % p.a.mask_nheads * p.a.mask_nb_head;
    }
    // not 0, which times -inf is no number
    const float per_unit = fmaxf(fattn_back_slope(p.a, fattn_back_hopper_head(p, lhead)) * FATTN_BACK_HOPPER_LOG2E / sc, FLT_MIN);
    float largest        = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int r   = i % 4 / 2;
        const int c   = i / 4 * 8 + i % 2;
        int q         = keys ? str0 + c : own0 + 8 * r;
        const int key = keys ? own0 + 8 * r : str0 + c;
        if constexpr (few) {
            asm volatile("" : "+r"(q)); // else all addresses are formed first
        }
        const char * y = src + q * p.a.mask_nb_row + key * (int64_t) sizeof(half);
        float x        = -INFINITY;
        if constexpr (few) {
            if (q < p.a.N && key < p.a.M) {
                x = src == nullptr ? 0.0f : per_unit * __half2float(*(const half *) y);
            }
        } else {
            const bool in = q < p.a.N && key < p.a.M;
            x             = in ? 0.0f : x;
            x += per_unit * __half2float(hopper_load_half(y, in && src != nullptr));
        }
        largest = fmaxf(largest, x == 0.0f || x == -INFINITY ? 0.0f : fabsf(S[i]));
        S[i] += x;
    }
    return largest;
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

// What a stage of the first ring holds. Shared memory answers late while wgmma reads from it, so what a step needs is read a step ahead.
struct fattn_back_hopper_meta {
    int head;   // of the queries, or an item's number
    int tile;   // the first of the run
    int states; // and from bit 8 on those of the next stage, 0 where they are in that stage only; -1: a number and no tile
    int mask;   // the head's
};

// A warpgroup's place in the first ring
template <typename L>
struct fattn_back_hopper_reader {
    const char * smem_ptr;
    fattn_back_hopper_ring<L::stages1> ring;
    int states;
    int ahead; // of the stage, as read

    __device__ __forceinline__ explicit fattn_back_hopper_reader(const char * smem_ptr) :
        smem_ptr(smem_ptr) {
        look();
    }
    __device__ __forceinline__ const fattn_back_hopper_meta & meta() const {
        return *(const fattn_back_hopper_meta *) (smem_ptr + L::meta + 16 * ring.stage);
    }
    __device__ __forceinline__ void wait() const {
        hopper_barrier_wait(hopper_smem(smem_ptr) + L::full1 + 8 * ring.stage, ring.parity);
    }
    // what the stage at hand holds, by waiting for it
    __device__ __forceinline__ void look() {
        wait();
        states = __shfl_sync(0xFFFFFFFF, meta().states, 0);
        states = states < 0 ? -1 : states & 0xFF;
    }
    // asks what the next one holds; the stage at hand is here
    __device__ __forceinline__ void peek() {
        ahead = hopper_load_int(hopper_smem(&meta().states));
    }
    // on to the next stage
    __device__ __forceinline__ void next() {
        ring.next();
        states = __shfl_sync(0xFFFFFFFF, ahead, 0) >> 8;
        if (states == 0) {
            look();
        }
    }
    __device__ __forceinline__ bool tile() const {
        return states >= 0;
    }
    __device__ __forceinline__ uint32_t state(const int i) const {
        return states >> 2 * i & 3;
    }
    __device__ __forceinline__ int item() const {
        return __shfl_sync(0xFFFFFFFF, meta().head, 0);
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

// Own tile t of K and V of a unit for warpgroup wg, on its barrier; by one thread
template <typename L>
static __device__ __forceinline__ void fattn_back_hopper_load_keys(
    const fattn_back_hopper_params & p, const uint32_t smem, const int wg, const int unit, const int t) {
    const int64_t i    = (int64_t) unit * p.kts + min(t, fattn_back_hopper_last_key(p) - 1) - p.kt0;
    const uint32_t own = smem + L::own + 8 * wg;
    hopper_barrier_expect(own, L::tile1 + L::tile);
    hopper_load(smem + L::own1 + wg * L::tile1, (const char *) p.k + i * L::tile1, L::tile1, own);
    hopper_load(smem + L::own2 + wg * L::tile, (const char *) p.v + i * L::tile, L::tile, own);
}

// One of the two warps that fill a block's rings: i = 1 that of K, or of Q with its rows' statistics, and what the tiles are; i = 2 that of V or dO
template <typename L, int i>
struct fattn_back_hopper_filler {
    static constexpr int nstat  = 2 * FATTN_BACK_HOPPER_ROWS * 4;
    static constexpr bool leads = i == 1;

    fattn_back_hopper_ring<i == 1 ? L::stages1 : L::stages2> ring;

    // a stage without a tile: the number of the next item
    __device__ __forceinline__ void announce(char * smem_ptr, const int item) {
        if (threadIdx.x % 32 == 0) {
            const uint32_t smem = hopper_smem(smem_ptr);
            hopper_barrier_wait(smem + (i == 1 ? L::empty1 : L::empty2) + 8 * ring.stage, ring.parity ^ 1);
            if (i == 1) {
                *(fattn_back_hopper_meta *) (smem_ptr + L::meta + 16 * ring.stage) = { item, 0, -1, 0 };
            }
            hopper_barrier_arrive(smem + (i == 1 ? L::full1 : L::full2) + 8 * ring.stage);
        }
        __syncwarp();
        ring.next();
    }

    // a stage of n tiles of 64 rows; stat: those of their rows, NULL without
    __device__ __forceinline__ void fill(char * smem_ptr, const fattn_back_hopper_meta & meta, const void * tiles, const int n, const float * stat) {
        constexpr int bytes = i == 1 ? L::tile1 : L::tile;
        if (threadIdx.x % 32 == 0) {
            const uint32_t smem = hopper_smem(smem_ptr);
            const uint32_t full = smem + (i == 1 ? L::full1 : L::full2) + 8 * ring.stage;
            hopper_barrier_wait(smem + (i == 1 ? L::empty1 : L::empty2) + 8 * ring.stage, ring.parity ^ 1);
            if (i == 1) {
                *(fattn_back_hopper_meta *) (smem_ptr + L::meta + 16 * ring.stage) = meta;
            }
            hopper_barrier_expect(full, n * bytes + (stat != nullptr ? nstat : 0));
            hopper_load(smem + (i == 1 ? L::ring1 : L::ring2) + ring.stage * n * bytes, tiles, n * bytes, full);
            if (stat != nullptr) {
                hopper_load(smem + L::stat + ring.stage * nstat, stat, nstat, full);
            }
        }
        __syncwarp();
        ring.next();
    }

    // the tiles of Q or dO of the unit's heads that see some of the own key tiles t0, t0 + 1, ..
    __device__ __forceinline__ void fill_queries(const fattn_back_hopper_params & p, char * smem_ptr, const int unit, const int t0) {
        for (int lhead = unit * p.a.G; lhead < (unit + 1) * p.a.G; ++lhead) {
            const int mask     = fattn_back_hopper_mask_index(p, lhead);
            const uint32_t row = fattn_back_hopper_mask_row(p, mask, 0);
            const auto get     = [&](const int t, const int w) {
                return t0 + w < fattn_back_hopper_last_key(p) ? fattn_back_hopper_get_tile(p, row + t * p.mask.nkt, t0 + w) : FATTN_BACK_TILE_SKIP;
            };
            fattn_back_hopper_walk<L::groups, 1>(0, p.QT, get, [&](const int t, const uint32_t states, const uint32_t next) {
                const int64_t tile = (int64_t) lhead * p.QT + t;
                if (i == 1) {
                    fill(smem_ptr, { lhead, t, (int) (states | next << 8), mask }, (const char *) p.q + tile * L::tile1, 1, p.stat + tile * 2 * FATTN_BACK_HOPPER_ROWS);
                } else {
                    fill(smem_ptr, { 0, 0, 0, 0 }, (const char *) p.dO + tile * L::tile, 1, nullptr);
                }
            });
        }
    }

    // the runs of kn tiles of K or V, of share split of n, that some own query tile sees
    template <int kn>
    __device__ __forceinline__ void fill_keys(
        const fattn_back_hopper_params & p, char * smem_ptr, const fattn_back_hopper_item_q & item, const int n) {
        uint32_t rows[L::groups];
#pragma unroll
        for (int w = 0; w < L::groups; ++w) {
            const int tile = min(item.t0 + w, item.end - 1); // that of the tile before twice does no harm
            rows[w]        = fattn_back_hopper_mask_row(p, fattn_back_hopper_mask_index(p, tile / p.QT), tile % p.QT);
        }
        const int first   = fattn_back_hopper_share(p, item.split, n);
        const int last    = fattn_back_hopper_share(p, item.split + 1, n);
        const int64_t at0 = (int64_t) item.unit * p.kts - p.kt0;
        const auto get    = [&](const int t, const int w) { return fattn_back_hopper_get_tile(p, rows[w], t); };
        fattn_back_hopper_walk<L::groups, kn>(first, last, get, [&](const int t, const uint32_t states, const uint32_t next) {
            const char * tiles = i == 1 ? (const char *) p.k + (at0 + t) * L::tile1 : (const char *) p.v + (at0 + t) * L::tile;
            fill(smem_ptr, { 0, t, (int) (states | next << 8), 0 }, tiles, kn, nullptr);
        });
    }
};

// f(filler) in each of the two warps that fill the rings, the first of the block's last warpgroup
template <typename L, typename F>
static __device__ __forceinline__ void fattn_back_hopper_fill(F f) {
    const int warp = (threadIdx.x - blockDim.x + 128) / 32;
    if (warp == 0) {
        f(fattn_back_hopper_filler<L, 1>());
    } else if (warp == 1) {
        f(fattn_back_hopper_filler<L, 2>());
    }
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

// LSE and D of query q of a head's tiles, x of its rows, from LSE of the keys alone and the mean of dP; stored by one of its threads.
// Returns P of all keys.
static __device__ __forceinline__ float fattn_back_hopper_finish(const fattn_back_hopper_params & p, const int lhead, const int q,
    const float4 scale, const float4 x, float keys, const float mean, const bool store) {
    const int h       = fattn_back_hopper_head(p, lhead);
    const bool sinks  = p.a.sinks != nullptr;
    const bool taken  = sinks && p.a.sinks[h] == INFINITY; // all of the row by the sink
    const float sink  = sinks && !taken ? fattn_back_log2_sink(p.a.sinks[h], p.a.scale * x.x) : -INFINITY;
    keys              = taken ? -INFINITY : keys;
    const float top   = fmaxf(keys, sink);
    const float lse   = top == -INFINITY ? -INFINITY : top + log2f(hopper_exp2(keys - top) + hopper_exp2(sink - top));
    const float pkeys = keys == -INFINITY ? 0.0f : hopper_exp2(keys - lse);
    if (store) {
        const float psink            = sink == -INFINITY ? 0.0f : hopper_exp2(sink - lse);
        const float Dk               = pkeys * mean;
        const bool valid             = q < p.a.N && lse != -INFINITY;
        float * stat                 = p.stat + ((int64_t) lhead * p.QT + q / FATTN_BACK_HOPPER_ROWS) * 2 * FATTN_BACK_HOPPER_ROWS + q % FATTN_BACK_HOPPER_ROWS;
        stat[0]                      = valid ? fattn_back_hopper_shift(scale, x) - lse : -INFINITY;
        stat[FATTN_BACK_HOPPER_ROWS] = valid ? Dk - psink * x.y * scale.z * x.z : 0.0f; // D without the part of V's mean
        if (q < p.a.N) {
            const int64_t i = p.a.row(q, h, fattn_back_hopper_seq(p, lhead));
            // a sink that leaves the keys less than its own rounding is LSE, to the end of F32's range
            p.a.LSE[i]       = sinks && (taken || keys < sink - 26.0f) ? p.a.sinks[h] : lse * (1.0f / FATTN_BACK_HOPPER_LOG2E) + p.a.scale * x.x;
            const float part = lse == -INFINITY ? 0.0f : Dk / scale.z / x.z;
            p.a.D[i]         = lse == -INFINITY ? 0.0f : part + pkeys * x.y;
            p.guard.note((int64_t) p.unit0 * p.a.G + lhead, p.a.D[i], part);
        }
    }
    return pkeys;
}

#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
