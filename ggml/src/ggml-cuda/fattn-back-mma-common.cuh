#pragma once

// What the kernels of the mma path of FLASH_ATTN_BACK share: their parameters, and the instructions that mma.cuh does not wrap.
//
//   prep    operands to fp16 once: K and V centred, rows scaled by powers of two; the mask reduced to a table of tiles
// Up to head size 128, where there are blocks enough, two fused kernels follow (fattn-back-mma-fused.cuh), else five products, the least
// there can be:
//   scores  S = QK^T and dP = dO V^T; writes exp2(S - m) and dP in fp16, m and the sums over a granule of keys in F32
//   rows    LSE, D, and the factors that turn exp2(S - m) into P for every (row, granule)
//   grads   dV += P^T dO, dK += dS^T Q, dQ += dS K with dS = P (dP - D) formed on the operands' way to the tensor cores
// scores, rows and grads run for one chunk after the other, a chunk being the (rows x all keys) whose pairs fit the workspace.
//
// A unit is a (sequence, KV head). Its rows are blocks of 64 queries of one head, block b = (query block b/G, head b%G), so that
// all heads of the group share K, V, and in pairs of blocks mostly the mask. Row in the unit = 64*b + (query in the block).
// Pairs of a (block, key tile) are 64x128, stored as 8x8 matrices of 128 contiguous bytes: what a warp writes from accumulators
// is coalesced, and both the matrix and its transpose are operands through ldmatrix without bank conflicts.

#include "fattn-back-prep.cuh"
#include "mma.cuh"

#define FATTN_BACK_MMA_ROWS    64 // queries of a row block
#define FATTN_BACK_MMA_KEYS    128 // keys of a key tile
#define FATTN_BACK_MMA_GRANULE 64 // keys that share a row's maximum
#define FATTN_BACK_MMA_PAIRS   (FATTN_BACK_MMA_ROWS * FATTN_BACK_MMA_KEYS)

#define FATTN_BACK_MMA_SHIFT_E 4 // exp2(S - m) is stored times 2^4
#define FATTN_BACK_MMA_SHIFT_P 12 // P is an operand times 2^12
#define FATTN_BACK_MMA_SHIFT_U 8 // 1 - tanh^2 is stored times 2^8

// |log2(e) x| from which a tile's S is computed from operands split into two halves
#define FATTN_BACK_MMA_SPLIT_LIMIT 32.0f

// logical arrays in the workspace; [n] are the dimensions, units and row blocks counted from the group's or chunk's first
struct fattn_back_mma_params {
    fattn_back_args a;

    int Pk; // head sizes padded to what the kernels load, the padding is 0
    int Pv;
    int QB; // query blocks
    int RB; // row blocks of a unit, even, the last one may have no queries
    int KT; // key tiles
    fattn_back_mask_table mask; // QB query tiles, 2*KT key tiles: granules
    bool rank1;     // dQ has the term R_i * mean(K): sinks or softcap
    bool split_all; // every tile's S from split operands

    // group of units whose operands are in the workspace
    int unit0;
    int units;
    int rb0;          // their rows: the first row block, and the row blocks
    int rblocks;
    int nparts;       // of the column statistics
    float * colparts; // [units][2][nparts][3*256 + 1] sums, minima and maxima of K's and V's columns, number of keys
    float * mean_k;   // [units][256]
    float * mean_v;
    float * exp_k;    // [units] K' = (K - mean) * 2^exp_k
    float * exp_v;
    half * k_hi;     // [units][128*KT][Pk]
    half * k_lo;     // NULL: formed where it is needed
    half * v;        // [units][128*KT][Pv]
    half * q_hi;     // [units][64*rblocks][Pk] scale*log2(e)*Q * 2^exp_q
    half * q_lo;
    half * dO;       // [units][64*rblocks][Pv] dO * 2^exp_dO
    float * exp_q;    // [units][64*rblocks]
    float * exp_dO;
    float * dot_q;    // [units][64*rblocks] scale*log2(e)*Q . mean(K)
    float * dot_dO;   // [units][64*rblocks] dO . mean(V)
    int * exp_q_min;    // [units]
    int * exp_dO_min;

    // fused kernels: what a row's keys need, log2(e) x = s.x * product, P = exp2(log2(e) x + s.y), dS = P (d.x dP - d.y)
    int band;        // units whose blocks run side by side
    float2 * stat_s; // [units][64*RB]
    float2 * stat_d;
    uint8_t * split; // [units][RB][4*KT][4] whether 16 rows had split S with 32 keys

    // chunk
    int cunit0; // in the group
    int cunits;
    int cb0;    // first row block
    int cblocks;
    int nstrips; // blocks of the scores kernel that share the key tiles of a pair of row blocks
    int len_q;  // key tiles of a part of dQ's sums
    int len_kv; // row blocks of a part of dK's and dV's sums
    bool accumulate; // dK and dV have an earlier chunk's sums
    half * pairs;  // [planes: exp2(S - m), dP, with softcap 1 - tanh^2][cunits][cblocks][KT] tiles
    int64_t plane;  // elements of a plane
    float * gmax;   // [cunits][2*KT][64*cblocks] m, then sums over the granule's keys of E = exp2(S - m), E dP, E u dP, E u
    float * gsum;
    float * gdp;
    float * gudp;   // with softcap: u = 1 - tanh^2
    float * gu;
    float * fac_q;  // [cunits][2*KT][64*cblocks] exp2(m - LSE) for dQ, dV and dK with their rows' scales
    half * fac_v;
    half * fac_k;
    float * D;      // [cunits][64*cblocks] in dP's scale, also as a sum of two fp16
    half * D_hi;
    half * D_lo;
    float * R;      // [cunits][64*cblocks]
    int * nparts_q;  // [cunits][tiles of dQ] parts that have something to sum
    int * nparts_kv; // [cunits][tiles of the window]
    float * part_q;    // [parts][cunits][tiles of dQ][128][Dk]
    float * part_k;    // [parts][cunits][tiles of the window][128][Dk]
    float * part_v;    // [parts][cunits][tiles of the window][128][Dv]

    __host__ __device__ int64_t rows() const { return (int64_t) FATTN_BACK_MMA_ROWS * rblocks; }
    __host__ __device__ int64_t keys() const { return (int64_t) FATTN_BACK_MMA_KEYS * KT; }
    __host__ __device__ int64_t crows() const { return (int64_t) FATTN_BACK_MMA_ROWS * cblocks; }
    __host__ __device__ int64_t crow0() const { return (int64_t) FATTN_BACK_MMA_ROWS * (cb0 - rb0); } // the chunk's first of the rows

    // first tile of a row block of the chunk
    __host__ __device__ int64_t tile(const int cu, const int cb, const int kt) const {
        return (((int64_t) cu * cblocks + cb) * KT + kt) * FATTN_BACK_MMA_PAIRS;
    }
    // tiles of the grads kernel: dQ's, or key tiles of the window
    __host__ __device__ int kt_first() const { return a.kv_first / FATTN_BACK_MMA_KEYS; }
    __host__ __device__ int ntiles(const bool is_q) const {
        return is_q ? cblocks / 2 : (a.kv_first + a.kv_count - 1) / FATTN_BACK_MMA_KEYS + 1 - kt_first();
    }
    __host__ __device__ int max_parts_q() const { return (KT + len_q - 1) / len_q; }
    __host__ __device__ int max_parts_kv() const { return (cblocks + len_kv - 1) / len_kv; }

    __host__ __device__ int64_t split_at(const int lunit, const int b, const int keys32) const {
        return (((int64_t) lunit * RB + b) * 4 * KT + keys32) * 4;
    }

    // query of a row of the unit
    __device__ __forceinline__ int unit_query(const int row) const {
        return row / FATTN_BACK_MMA_ROWS / a.G * FATTN_BACK_MMA_ROWS + row % FATTN_BACK_MMA_ROWS;
    }
    // row: of the chunk (dQ), or key; whether it is in the result, and its index there
    __device__ __forceinline__ int query(const int row) const {
        return unit_query(cb0 * FATTN_BACK_MMA_ROWS + row);
    }
    __device__ __forceinline__ bool valid_row(const bool is_q, const int row) const {
        return is_q ? row < crows() && query(row) < a.N : row >= a.kv_first && row < a.kv_first + a.kv_count;
    }
    __device__ __forceinline__ int64_t out_row(const bool is_q, const int cunit, const int row) const {
        const int unit = unit0 + cunit0 + cunit;
        return is_q ? a.row(query(row), unit % a.Hkv * a.G + (cb0 + row / FATTN_BACK_MMA_ROWS) % a.G, unit / a.Hkv) : (int64_t) unit * a.kv_count + row - a.kv_first;
    }
    __device__ __forceinline__ float * part_row(float * parts, const bool is_q, const int part, const int cunit, const int row, const int D) const {
        return parts + (((int64_t) part * cunits + cunit) * ntiles(is_q) * 128 + (is_q ? row : row - kt_first() * FATTN_BACK_MMA_KEYS)) * D;
    }

    // granule sums and factors of a unit of the chunk
    __host__ __device__ int64_t granule(const int cu, const int gr) const {
        return ((int64_t) cu * 2 * KT + gr) * crows();
    }
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
            tiles = p.mask.row(p.a, (unit % p.a.Hkv) * p.a.G + b % p.a.G, unit / p.a.Hkv, qb);
        }
    }

    // with granule gr of keys
    __device__ __forceinline__ fattn_back_tile granule(const int gr) const {
        if (tiles != nullptr) {
            return (fattn_back_tile) tiles[gr];
        }
        return gr * FATTN_BACK_MMA_GRANULE >= M     ? FATTN_BACK_TILE_SKIP
            : (gr + 1) * FATTN_BACK_MMA_GRANULE > M ? FATTN_BACK_TILE_MIXED
                                                    : FATTN_BACK_TILE_FULL;
    }
    // with a key tile
    __device__ __forceinline__ fattn_back_tile get(const int kt) const {
        const fattn_back_tile first = granule(2 * kt);
        return first == granule(2 * kt + 1) ? first : FATTN_BACK_TILE_MIXED;
    }
};

static __device__ __forceinline__ float fattn_back_exp2(const float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

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

// 16 zeros if !on
static __device__ __forceinline__ void fattn_back_cp_async_16(const uint32_t dst, const void * src, const bool on) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(on ? 16 : 0));
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

static __device__ __forceinline__ void fattn_back_ldmatrix_trans(uint32_t (&x)[4], const uint32_t src) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(src));
}

// D[16x8] += A[16x16] B[16x8]
static __device__ __forceinline__ void fattn_back_mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t b0, const uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ half2 fattn_back_as_half2(const uint32_t x) {
    return *(const half2 *) &x;
}

static __device__ __forceinline__ uint32_t fattn_back_as_uint(const half2 x) {
    return *(const uint32_t *) &x;
}
#endif // AMPERE_MMA_AVAILABLE

// elements of an operand's row in the workspace, for an instance with head size D
static constexpr __host__ __device__ int fattn_back_mma_pitch(const int D) {
    return (D + 31) / 32 * 32;
}

// dynamic shared memory of a multiprocessor that blocks can use, by architecture
static constexpr __host__ __device__ int fattn_back_mma_smem(const int arch) {
    return arch == 900 || (arch >= 1000 && arch < 1200) ? 227 * 1024 : arch == 800 || arch == 870 ? 163 * 1024
                                                                                                  : 99 * 1024;
}
