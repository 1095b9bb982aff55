#pragma once

// What the paths of FLASH_ATTN_BACK on tensor cores share beside the node: which tiles the mask leaves, the means of K's and V's columns,
// and dSinks. A unit is a (sequence, KV head).

#include "fattn-back-guard.cuh"

#define FATTN_BACK_PREP_MAX_D        256 // largest head size
#define FATTN_BACK_PREP_THREADS      256
#define FATTN_BACK_PREP_MEAN_THREADS (4 * FATTN_BACK_PREP_MAX_D)

#define FATTN_BACK_MASK_ROWS  64 // queries and keys of a tile of the table
#define FATTN_BACK_MASK_SLOTS 4  // tiles of a query tile whose mask is kept as bits: one with each remainder of its number

// what the mask leaves; NULL without a mask
struct fattn_back_mask_table {
    uint8_t * tiles; // [mask_nseqs][mask_nheads][nqt][nkt] fattn_back_tile
    uint32_t * used; // [mask_nseqs][mask_groups][2*nkt] keys that some query sees, as bits
    uint64_t * rows; // [mask_nseqs][mask_nheads][nqt] queries that see some key, as bits
    int * slots;     // [mask_nseqs][mask_nheads][nqt][SLOTS] which mixed tiles are kept as bits: such as hold nothing but 0 and -inf
    uint64_t * bits; // the same [2][64]: of a query the keys that it sees, of a key the queries that see it

    // until the table is filled
    uint64_t * seen;   // [mask_nseqs][mask_nheads][nqt][nkt] keys of the tile that some of its queries see, as bits
    uint64_t * seeing; // the same: queries of the tile that see some of its keys

    int nqt; // query tiles
    int nkt; // key tiles

    // places the arrays with take(pointer, number of elements)
    template <typename F>
    void layout(const fattn_back_args & a, const int query_tiles, const int key_tiles, const F & take) {
        nqt = query_tiles;
        nkt = key_tiles;
        if (a.mask_nheads > 0) { // its data may not be allocated yet
            const int64_t n = (int64_t) a.mask_nseqs * a.mask_nheads * nqt;
            take(tiles, n * nkt);
            take(used, (int64_t) a.mask_nseqs * a.mask_groups() * 2 * nkt);
            take(rows, n);
            take(slots, n * FATTN_BACK_MASK_SLOTS);
            take(bits, n * FATTN_BACK_MASK_SLOTS * 2 * FATTN_BACK_MASK_ROWS);
        }
    }

    // the slot of a tile of query tile qt of a mask; there are fewer than 2^31
    __device__ __forceinline__ int slot(const int mask, const int qt, const int kt) const {
        return (mask * nqt + qt) * FATTN_BACK_MASK_SLOTS + kt % FATTN_BACK_MASK_SLOTS;
    }

    // the same of what is needed until the table is filled
    template <typename F>
    void layout_scratch(const fattn_back_args & a, const F & take) {
        const int64_t n = (int64_t) a.mask_nseqs * a.mask_nheads * nqt * nkt;
        if (n > 0) {
            take(seen, n);
            take(seeing, n);
        }
    }

    // the tiles of a query tile of head h of sequence s
    __device__ __forceinline__ const uint8_t * row(const fattn_back_args & a, const int h, const int s, const int qt) const {
        const int mask = s % a.mask_nseqs * a.mask_nheads + h % a.mask_nheads;
        return tiles + ((int64_t) mask * nqt + qt) * nkt;
    }

    // whether a query of head h of sequence s sees some key: one that does not must not count, even if it holds NaN
    __device__ __forceinline__ bool sees(const fattn_back_args & a, const int h, const int s, const int q) const {
        if (rows == nullptr) {
            return true;
        }
        const int64_t mask = (int64_t) (s % a.mask_nseqs) * a.mask_nheads + h % a.mask_nheads;
        return (rows[mask * nqt + q / FATTN_BACK_MASK_ROWS] >> q % FATTN_BACK_MASK_ROWS & 1) != 0;
    }

    // whether some query of a unit sees a key
    __device__ __forceinline__ bool is_used(const fattn_back_args & a, const int unit, const int key) const {
        return key < a.M && (used == nullptr || (used[(int64_t) a.mask_group(unit) * 2 * nkt + key / 32] >> key % 32 & 1) != 0);
    }
};

// fills the table, if there is a mask
void ggml_cuda_flash_attn_back_mask_table(const fattn_back_args & a, const fattn_back_mask_table & mask, cudaStream_t stream);

// sums, minima and maxima of the columns over a part of a unit's used keys, [3][FATTN_BACK_PREP_MAX_D], and the number of these keys
#define FATTN_BACK_COLUMNS_SIZE (3 * FATTN_BACK_PREP_MAX_D + 1)

// dst: [units][K, V][nparts][FATTN_BACK_COLUMNS_SIZE]
void ggml_cuda_flash_attn_back_columns(
    const fattn_back_args & a, const fattn_back_mask_table & mask, int unit0, int units, int nparts, float * dst, cudaStream_t stream);

// dSinks from LSE and D, if wanted; tells the guard of heads whose sinks leave next to nothing to the keys, and of terms that cancel
void ggml_cuda_flash_attn_back_sinks(const fattn_back_args & a, const fattn_back_guard & guard, cudaStream_t stream);

// The largest exponent of 2 that scales a length; beyond the range of it a unit is formed in F32.
static __device__ __forceinline__ bool fattn_back_guard_in_range(const float x) {
    return x == 0.0f || fabsf(log2f(x)) <= FATTN_BACK_GUARD_RANGE;
}

// Whether some head of a unit has so few rows that see a key, or the unit so few keys that are seen, that their rounding does not average
// out. By all threads of a block of whole warps.
static __device__ __forceinline__ bool fattn_back_guard_few(const fattn_back_args & a, const fattn_back_mask_table & mask, const int unit) {
    const auto few = [](const int n) { return n > 0 && n < FATTN_BACK_GUARD_TERMS; };
    bool any       = false;
    if (mask.rows != nullptr) {
        for (int i = threadIdx.x / 32; i <= a.group_nmasks(); i += blockDim.x / 32) {
            const bool keys = i == a.group_nmasks();
            int n           = 0;
            if (keys) {
                const uint32_t * used = mask.used + (int64_t) a.mask_group(unit) * 2 * mask.nkt;
                for (int j = threadIdx.x % 32; j < 2 * mask.nkt; j += 32) {
                    n += __popc(used[j]);
                }
            } else {
                const int64_t head    = unit / a.Hkv % a.mask_nseqs * a.mask_nheads + a.group_mask(unit % a.Hkv, i);
                const uint64_t * rows = mask.rows + head * mask.nqt;
                for (int j = threadIdx.x % 32; j < mask.nqt; j += 32) {
                    n += __popcll(rows[j]);
                }
            }
            any = any || few(warp_reduce_sum(n));
        }
    }
    return __syncthreads_or(any);
}

// sum or maximum over the block, in a fixed order
static __device__ __forceinline__ float fattn_back_block_reduce(float x, const bool is_max) {
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

// A finite sink as the scores of its row see it, in log2 and without what they all have in common: finite, too.
static __device__ __forceinline__ float fattn_back_log2_sink(const float sink, const float common) {
    return sink == -INFINITY ? sink : fminf(fmaxf((sink - common) * 1.4426950408889634f, -FLT_MAX), FLT_MAX);
}

// Whether few columns have most of the length of a unit's rows; x: what a thread's column reaches, relative to the largest, 0 for other threads.
static __device__ __forceinline__ bool fattn_back_guard_wide(const float x) {
    const float n      = __syncthreads_count(x > 0.0f);
    const float square = fattn_back_block_reduce(x * x, false);
    const float log    = fattn_back_block_reduce(x > 0.0f ? log2f(x) : 0.0f, false);
    return n > 0.0f && log2f(square / n) > log2f(FATTN_BACK_GUARD_WIDE) + 2.0f * log / n;
}

// Mean of column threadIdx.x % FATTN_BACK_PREP_MAX_D from a unit's parts, and the largest distance from it; 0 without keys and beyond D.
// For FATTN_BACK_PREP_MEAN_THREADS threads, four a column.
static __device__ __forceinline__ float fattn_back_column_mean(
    const float * parts, const int nparts, const int D, const ggml_type type, float & dev) {
    constexpr int n = FATTN_BACK_PREP_MEAN_THREADS / FATTN_BACK_PREP_MAX_D;
    const int col   = threadIdx.x % FATTN_BACK_PREP_MAX_D;
    __shared__ float4 red[n][FATTN_BACK_PREP_MAX_D]; // sum, number, minimum, maximum
    float4 x = make_float4(0.0f, 0.0f, INFINITY, -INFINITY);
    if (col < D) {
#pragma unroll 8
        for (int i = threadIdx.x / FATTN_BACK_PREP_MAX_D; i < nparts; i += n) {
            const float * part = parts + (int64_t) i * FATTN_BACK_COLUMNS_SIZE;
            x.x += part[col];
            x.y += part[3 * FATTN_BACK_PREP_MAX_D];
            x.z = fminf(x.z, part[1 * FATTN_BACK_PREP_MAX_D + col]);
            x.w = fmaxf(x.w, part[2 * FATTN_BACK_PREP_MAX_D + col]);
        }
    }
    red[threadIdx.x / FATTN_BACK_PREP_MAX_D][col] = x;
    __syncthreads();
    x = red[0][col];
    for (int i = 1; i < n; ++i) {
        const float4 y = red[i][col];
        x              = make_float4(x.x + y.x, x.y + y.y, fminf(x.z, y.z), fmaxf(x.w, y.w));
    }
    if (x.y == 0.0f) {
        dev = 0.0f;
        return 0.0f;
    }
    // A mean with few bits: x - mean is then exact for most x of a 16-bit type. With all its bits every x of a binade would be rounded by
    // the same error, which would add up in D.
    const float exact  = x.x / x.y;
    const float spread = fmaxf(x.w - exact, exact - x.z) / 64.0f;
    const float ulp    = type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 ? fmaxf(fabsf(x.w), fabsf(x.z)) / 1024.0f : 0.0f;
    const float step   = exp2f(floorf(log2f(fmaxf(spread, ulp))));
    const float mean   = step > 0.0f ? rintf(exact / step) * step : exact;
    dev                = fmaxf(x.w - mean, mean - x.z);
    return mean;
}
