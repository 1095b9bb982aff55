#pragma once

// The backward of the mma path for head sizes beyond 192: dK, dV and dQ from LSE and D, five products. There adds to dQ would cost more than
// the products: dS goes through memory instead.
//
// The pairs of a group's rows and keys are cut into pieces, and a piece's work into items. An item of a key tile streams the rows of its piece
// and forms S, dP, dV and dK; it leaves dS in a slot of the workspace. Some pieces later an item of a row tile streams dS and the keys of its
// piece, and forms dQ. What items add to the same rows of dK, dV and dQ they add in the order of the pieces, so that the bits repeat. Blocks
// take items in the order of their numbers, and an item waits for items of lower numbers only, which have all been started: for the one that
// adds before it, of a row tile for the dS of its piece, of a key tile for its slot.

#include "fattn-back-mma-prep.cuh"

#define FATTN_BACK_MMA_PAIRS (FATTN_BACK_MMA_ROWS * FATTN_BACK_MMA_GRANULE) // of a tile of dS

struct fattn_back_pieces_config {
    int keys;     // of a tile
    int rows;     // of a step, which is part of a row block or a pair of them
    int stages;   // of rows in shared memory
    int granules; // of a row tile's stages, each with a granule of keys
    bool apart;   // half of the warps form S and P, the others dP and dS
};

enum fattn_back_pieces_kind {
    FATTN_BACK_ITEM_KEYS, // of a key tile
    FATTN_BACK_ITEM_ROWS, // of a row tile
    FATTN_BACK_ITEM_END,  // there are no more
};

// what a block is at
struct alignas(16) fattn_back_pieces_item {
    int kind;
    int lunit;
    int piece;
    int row_range; // of the piece
    int key_range;
    int row_tile;  // of the piece's
    int kt0;       // key tiles
    int kt1;
    int block0;    // row blocks
    int block1;
    int row0;      // the unit's first among the group's, which are fewer than 2^31
    int key0;      // the item's first
    int dS;        // the item's first tile of dS
    int seen;      // whether some of the rows see some of the keys
};

// most row blocks of a row tile
static constexpr __host__ __device__ int fattn_back_pieces_blocks(const int Dk) {
    return Dk > 128 ? 2 : 4;
}

// Shared memory. Of a key tile: K, V, stages (Q, dO and what P and dS need of the rows), P, dS, with softcap sums of dS tanh^2, else P in F32
// where warps hand it over, the stages' first rows and states. Of a row tile, in its place: stages (dS, K). Behind it: two items.
template <int Dk, int Dv, bool softcap>
struct fattn_back_pieces_smem {
    using TK = fattn_back_mma_tile<Dk>;
    using TV = fattn_back_mma_tile<Dv>;
    static constexpr __host__ __device__ int v(const fattn_back_pieces_config & c) { return c.keys * TK::pitch; }
    static constexpr __host__ __device__ int own(const fattn_back_pieces_config & c) { return c.keys * (TK::pitch + TV::pitch); }
    static constexpr __host__ __device__ int dO(const fattn_back_pieces_config & c) { return c.rows * TK::pitch; } // in a stage
    static constexpr __host__ __device__ int stat(const fattn_back_pieces_config & c) { return c.rows * (TK::pitch + TV::pitch); }
    static constexpr __host__ __device__ int weight(const fattn_back_pieces_config & c) { return stat(c) + c.rows * (int) sizeof(float4); }
    static constexpr __host__ __device__ int stage(const fattn_back_pieces_config & c) {
        return (weight(c) + c.rows * (int) sizeof(half) + 127) / 128 * 128;
    }
    static constexpr __host__ __device__ int P(const fattn_back_pieces_config & c) { return own(c) + c.stages * stage(c); }
    static constexpr __host__ __device__ int dS(const fattn_back_pieces_config & c) { return P(c) + c.rows * c.keys * (int) sizeof(half); }
    static constexpr __host__ __device__ int sums(const fattn_back_pieces_config & c) { return dS(c) + c.rows * c.keys * (int) sizeof(half); }
    static constexpr __host__ __device__ int meta(const fattn_back_pieces_config & c) {
        return sums(c) + (softcap ? c.rows * FATTN_BACK_MMA_WARPS : c.apart ? c.rows * c.keys
                                                                            : 0) *
            (int) sizeof(float);
    }
    static constexpr __host__ __device__ int key_bytes(const fattn_back_pieces_config & c) { return meta(c) + c.stages * (int) sizeof(int2); }
    // of a row tile
    static constexpr __host__ __device__ int row_keys() { return fattn_back_pieces_blocks(Dk) * FATTN_BACK_MMA_PAIRS * (int) sizeof(half); }
    static constexpr __host__ __device__ int row_stage() { return row_keys() + FATTN_BACK_MMA_GRANULE * TK::pitch; }

    static constexpr __host__ __device__ int item(const fattn_back_pieces_config & c) {
        const int rows = c.granules * row_stage();
        return ((key_bytes(c) > rows ? key_bytes(c) : rows) + 15) / 16 * 16;
    }
    static constexpr __host__ __device__ int bytes(const fattn_back_pieces_config & c) {
        return item(c) + 2 * (int) sizeof(fattn_back_pieces_item);
    }
};

// the largest tiles of which two stages fit
template <int Dk, int Dv, bool softcap>
static constexpr __host__ __device__ fattn_back_pieces_config fattn_back_pieces_get_config(const int arch) {
    using L            = fattn_back_pieces_smem<Dk, Dv, softcap>;
    const int smem     = fattn_back_mma_smem(arch) - 2 * (int) sizeof(fattn_back_pieces_item) - 16;
    const int granules = smem / L::row_stage();
    for (int rows = softcap ? 32 : 64; rows >= 16; rows /= 2) { // with softcap registers hold its derivative beside S and dP
        for (int keys = Dk + Dv <= 256 ? 128 : 64; keys >= 64; keys /= 2) {
            fattn_back_pieces_config c = { keys, rows, 1, granules < 4 ? granules : 4, !softcap };
            const int more             = (smem - L::key_bytes(c)) / (L::stage(c) + (int) sizeof(int2));
            if (L::key_bytes(c) <= smem && (more >= 1 || rows == 16)) {
                c.stages += more < 2 ? more : 2;
                return c;
            }
        }
    }
    return {};
}

#ifdef AMPERE_MMA_AVAILABLE
// As fattn_back_mma_logits, but a warp reads the mask together, a key a lane: the tiles here leave no registers to read it otherwise than one
// value after the other. From log2(e)*scale*qk to log2(e) times the logit, of rows of the unit's row block b and keys; -inf beyond the last key.
// row: of the block; dot_q: that of the rows; u: with softcap 1 - tanh^2
template <bool softcap, int nm, int nn, int nu>
static __device__ __forceinline__ void fattn_back_mma_pieces_logits(
    const fattn_back_mma_params & p, float (&S)[nm][nn][4], float (&u)[nm][nu][4], const int unit, const int b, const int row, const int key,
    const float * dot_q, const bool mixed) {
    const int lane    = threadIdx.x % 32;
    const int g       = lane / 4;
    const int c2      = lane % 4 * 2;
    const int h       = p.head(unit, b);
    const int q       = p.query(b) + row;
    const int nk      = p.a.M - key;
    const char * mask = nullptr;
    if (mixed && p.a.mask != nullptr) {
        mask = p.a.mask + unit / p.a.Hkv % p.a.mask_nseqs * p.a.mask_nb_seq + h % p.a.mask_nheads * p.a.mask_nb_head + key * (int64_t) sizeof(half);
    }
    const auto get_bias = [&](const int i, const int k) { // as bits; rows beyond the end have no result
        return *(const uint16_t *) (mask + min(q + i, p.a.N - 1) * p.a.mask_nb_row + k * (int) sizeof(half));
    };
    constexpr uint16_t off = 0xFC00; // -inf
    constexpr int nwords   = (8 * nn + 31) / 32;
    constexpr int nloads   = 4; // rows at once
#pragma unroll
    for (int i0 = 0; i0 < 16 * nm; i0 += 8) {
        const int mi    = i0 / 16;
        const int r     = i0 / 8 % 2;
        const float dot = softcap ? dot_q[i0 + g] : 0.0f;
        uint32_t hidden[nwords]; // keys of the lane's row, as bits
        bool any = false;        // something finite is added to a logit
        if (mixed) {             // a lane reads a key of each row
#pragma unroll
            for (int j0 = 0; j0 < 8; j0 += nloads) {
                uint16_t bias[nloads][nwords];
#pragma unroll
                for (int j = 0; j < nloads; ++j) {
#pragma unroll
                    for (int w = 0; w < nwords; ++w) {
                        const int k = w * 32 + lane;
                        bias[j][w]  = k >= min(nk, 8 * nn) ? off : mask != nullptr ? get_bias(i0 + j0 + j, k)
                                                                                   : 0;
                    }
                }
#pragma unroll
                for (int j = 0; j < nloads; ++j) {
#pragma unroll
                    for (int w = 0; w < nwords; ++w) {
                        const uint32_t bits = __ballot_sync(0xFFFFFFFF, bias[j][w] == off);
                        hidden[w]           = j0 + j == g || j0 + j == 0 ? bits : hidden[w];
                        any                 = any || (bias[j][w] != off && (bias[j][w] & 0x7FFF) != 0);
                    }
                }
            }
            any = __any_sync(0xFFFFFFFF, any);
        }
        const float slope = any ? fattn_back_slope(p.a, h) * FATTN_BACK_MMA_LOG2E : 0.0f;
#pragma unroll
        for (int ni = 0; ni < nn; ++ni) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float & x = S[mi][ni][2 * r + j];
                if constexpr (softcap) {
                    const float z        = x + dot;
                    const float f        = fattn_back_exp2(-2.0f * fabsf(z) / p.a.logit_softcap);
                    const float v        = 1.0f / (1.0f + f);
                    u[mi][ni][2 * r + j] = 4.0f * f * v * v;
                    x                    = copysignf(FATTN_BACK_MMA_LOG2E * p.a.logit_softcap * (1.0f - f) * v, z);
                }
                const int k = ni * 8 + c2 + j;
                if (mixed && (hidden[k / 32] >> k % 32 & 1) != 0) {
                    x = -INFINITY;
                } else if (any) {
                    x += slope * __half2float(__ushort_as_half(get_bias(i0 + g, k)));
                }
            }
        }
    }
}

static __device__ __forceinline__ int fattn_back_acquire(const int * x) {
    int y;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(y) : "l"(x) : "memory");
    return y;
}

// until x is n, which it only grows to
static __device__ __forceinline__ void fattn_back_wait(const int * x, const int n) {
    while (fattn_back_acquire(x) < n) {
        __nanosleep(64);
    }
}

// whether rows of some row blocks see keys of some granules, asked by a warp
static __device__ __forceinline__ bool fattn_back_mma_is_seen(
    const fattn_back_mma_params & p, const int unit, const int block0, const int block1, const int granule0, const int granule1) {
    const int n = block1 - block0;
    bool seen   = false;
    for (int i0 = 0; i0 < n * (granule1 - granule0) && !seen; i0 += WARP_SIZE) {
        const int i       = i0 + threadIdx.x % WARP_SIZE;
        const int granule = min(granule0 + i / n, granule1 - 1); // some twice
        seen              = __any_sync(0xFFFFFFFF, fattn_back_mma_tile_row(p, unit, p.rb0 + block0 + i % n).granule(granule) != FATTN_BACK_TILE_SKIP);
    }
    return seen;
}

// dst = acc, or is added to: 16*m rows from the m0-th tile on, n pairs of columns 8 apart, of ncols; all loads before the first store
template <int n, int m, int N>
static __device__ __forceinline__ void fattn_back_mma_put(
    float * const (&dst)[m][2], const float (&acc)[4][N][4], const int m0, const int ncols, const bool add) {
    float2 old[m][2][n];
#pragma unroll
    for (int i = 0; i < 2 * m; ++i) {
#pragma unroll
        for (int ni = 0; ni < n; ++ni) {
            const float * from    = dst[i / 2][i % 2];
            old[i / 2][i % 2][ni] = add && from != nullptr && ni * 8 < ncols ? __ldcg((const float2 *) (from + ni * 8)) : make_float2(0.0f, 0.0f);
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * m; ++i) {
#pragma unroll
        for (int ni = 0; ni < n; ++ni) {
            const float2 x = old[i / 2][i % 2][ni];
            float * to     = dst[i / 2][i % 2];
            if (to != nullptr && ni * 8 < ncols) {
                *(float2 *) (to + ni * 8) = make_float2(acc[m0 + i / 2][ni][i % 2 * 2] + x.x, acc[m0 + i / 2][ni][i % 2 * 2 + 1] + x.y);
            }
        }
    }
}

// An item of a key tile. Returns the turn that it has had, NULL if none.
template <int Dk, int Dv, bool softcap, typename F>
static __device__ __forceinline__ int * fattn_back_mma_pieces_keys(
    const fattn_back_mma_params & p, char * smem, const volatile fattn_back_pieces_item & item, const F & take) {
    constexpr fattn_back_pieces_config c = fattn_back_pieces_get_config<Dk, Dv, softcap>(FATTN_BACK_MMA_ARCH);
    using L                              = fattn_back_pieces_smem<Dk, Dv, softcap>;
    using TK                             = fattn_back_mma_tile<Dk>;
    using TV                             = fattn_back_mma_tile<Dv>;
    using TP                             = fattn_back_mma_tile<c.keys>;
    constexpr int nthreads               = FATTN_BACK_MMA_WARPS * WARP_SIZE;
    constexpr int granules               = c.keys / FATTN_BACK_MMA_GRANULE;
    constexpr int blocks                 = c.rows > FATTN_BACK_MMA_ROWS ? c.rows / FATTN_BACK_MMA_ROWS : 1; // of a step
    constexpr int pk                     = fattn_back_mma_pitch(Dk);
    constexpr int pv                     = fattn_back_mma_pitch(Dv);
    // S and dP: 16*nm rows and 8*nn keys of a warp
    constexpr int nm = c.rows >= 64 || (c.rows >= 32 && c.apart) ? 2 : 1;
    constexpr int nw = c.apart ? FATTN_BACK_MMA_WARPS / 2 : FATTN_BACK_MMA_WARPS;
    constexpr int nn = c.keys / 8 * c.rows / (16 * nm) / nw;
    constexpr int ns = c.keys / (8 * nn); // warps side by side
    // dK of half of the warps and dV of the others: 64 keys and 8*nk or 8*nv columns
    constexpr int no = FATTN_BACK_MMA_WARPS / 2 * 64 / c.keys; // warps side by side
    constexpr int nk = Dk / 8 / no;
    constexpr int nv = Dv / 8 / no;
    static_assert(c.stages >= 1 && 16 * nm * 8 * nn * nw == c.rows * c.keys && (nn == 1 || nn % 2 == 0), "bad configuration");
    static_assert(Dk == Dv && 8 * nk * no == Dk, "bad configuration");

    const uint32_t base = fattn_back_shared(smem);
    int2 * meta         = (int2 *) (smem + L::meta(c));
    const int lane      = threadIdx.x % WARP_SIZE;
    const int warp      = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP_SIZE, 0); // known to be uniform
    const int g         = lane / 4;
    const int c2        = lane % 4 * 2;
    const int unit      = p.unit0 + item.lunit;
    const bool seen     = item.seen;
    const bool own      = (p.a.dK != nullptr || p.a.dV != nullptr) && item.kt0 * c.keys < p.a.kv_first + p.a.kv_count &&
        (item.kt0 + 1) * c.keys > p.a.kv_first; // in the window

    // the states of the granules of the tile with the row blocks from one on
    const auto get_states = [&](const int b) {
        int x = 0;
#pragma unroll
        for (int i = 0; i < blocks; ++i) {
            x |= fattn_back_mma_tile_row(p, unit, p.rb0 + b + i).granules<granules>(item.kt0 * granules) << 2 * granules * i;
        }
        return x;
    };
    if (!seen && (item.row_range > 0 || !own)) {
        return nullptr;
    }
    const bool hilo = p.large[unit] != 0;

    // Loads the next rows; of a stage the first of them (-1: no more) and the states of their granules are known.
    int first       = -WARP_SIZE; // of 32 items, one a lane
    int states      = 0;
    uint32_t todo   = 0;
    int piece       = 0; // of a row block
    const auto load = [&](const int stage) {
        const int n = seen ? (item.block1 - item.block0) / blocks : 0;
        while (todo == 0 && first + WARP_SIZE < n) {
            first += WARP_SIZE;
            states = first + lane < n ? get_states(item.block1 - (first + lane + 1) * blocks) : 0;
            todo   = __ballot_sync(0xFFFFFFFF, states != 0);
        }
        const int i = max(__ffs(todo) - 1, 0);
        int2 rows   = make_int2(-1, __shfl_sync(0xFFFFFFFF, states, i));
        if (todo != 0) {
            rows.x             = (item.block1 - (first + i + 1) * blocks) * FATTN_BACK_MMA_ROWS + piece * c.rows;
            piece              = (piece + 1) % (blocks * FATTN_BACK_MMA_ROWS / c.rows);
            todo               = piece == 0 ? todo & (todo - 1) : todo;
            const uint32_t dst = base + L::own(c) + stage * L::stage(c);
            const int row      = item.row0 + rows.x;
            fattn_back_mma_load<Dk, c.rows, nthreads>(dst, p.q_hi + (int64_t) row * pk);
            fattn_back_mma_load<Dv, c.rows, nthreads>(dst + L::dO(c), p.dO + (int64_t) row * pv);
            if (threadIdx.x < c.rows) {
                fattn_back_cp_async_16(dst + L::stat(c) + threadIdx.x * 16, p.stat + row + threadIdx.x);
            }
            if (threadIdx.x < c.rows / 8) {
                fattn_back_cp_async_16(dst + L::weight(c) + threadIdx.x * 16, p.weight + row + threadIdx.x * 8);
            }
        }
        if (threadIdx.x == 0) {
            meta[stage] = rows;
        }
        fattn_back_cp_async_commit();
    };
    if (seen) {
        fattn_back_mma_load<Dk, c.keys, nthreads>(base, p.k_hi + (int64_t) item.key0 * pk);
        fattn_back_mma_load<Dv, c.keys, nthreads>(base + L::v(c), p.v + (int64_t) item.key0 * pv);
    }
#pragma unroll 1
    for (int i = 0; i < c.stages - 1; ++i) {
        load(i);
    }

    // the warp's first row and key, or row and column
    const int s_row = warp % nw / ns * 16 * nm;
    const int s_key = warp % ns * 8 * nn;
    const bool is_k = warp >= FATTN_BACK_MMA_WARPS / 2;
    const int o_key = warp % (FATTN_BACK_MMA_WARPS / 2) / no * 64;
    const int o_col = warp % no * 8 * (is_k ? nk : nv);

    const uint32_t rows = base + L::own(c);
    const bool only_dP  = c.apart && Dk == Dv && is_k;
    const uint32_t s_q  = rows + (only_dP ? L::dO(c) : 0) + fattn_back_mma_at_a<TK>(s_row, 0);
    const uint32_t s_k  = base + (only_dP ? L::v(c) : 0) + fattn_back_mma_at_b<TK>(s_key, 0);
    const uint32_t s_dO = Dk == Dv ? s_q + L::dO(c) : rows + L::dO(c) + fattn_back_mma_at_a<TV>(s_row, 0);
    const uint32_t s_v  = Dk == Dv ? s_k + L::v(c) : base + L::v(c) + fattn_back_mma_at_b<TV>(s_key, 0);
    const uint32_t o_P  = base + (is_k ? L::dS(c) : L::P(c)) + fattn_back_mma_at_b<TP>(0, o_key / 8);
    const uint32_t o_q  = rows + (is_k ? fattn_back_mma_at_a<TK>(0, o_col / 8) : L::dO(c) + fattn_back_mma_at_a<TV>(0, o_col / 8));
    const int to_P      = L::P(c) + TP::at(s_row + g, s_key / 8) + lane % 4 * 4;

    float sums[4][nk > nv ? nk : nv][4]; // dK or dV
    fattn_back_mma_zero(sums);

    if (threadIdx.x == 0 && seen && p.a.dQ != nullptr && item.piece >= p.nslots) { // its slot is free
        fattn_back_wait(p.used + item.piece - p.nslots, p.piece_rows / p.row_blocks);
    }
    int stage = 0;
#pragma unroll 1
    while (true) {
        if constexpr (c.stages == 1) {
            __syncthreads();
            load(0);
            fattn_back_cp_async_wait<0>();
        } else {
            fattn_back_cp_async_wait<c.stages - 2>();
        }
        __syncthreads();
        const int2 now = meta[stage];
        if (now.x < 0) {
            break;
        }
        const uint32_t at = stage * L::stage(c);
        const char * stat = smem + L::own(c) + at + L::stat(c);
        if constexpr (c.stages > 1) {
            load(stage == 0 ? c.stages - 1 : stage - 1);
            stage = stage + 1 == c.stages ? 0 : stage + 1;
        }

        // S, dP
        const bool with_S  = !c.apart || !is_k;
        const bool with_dP = !c.apart || is_k;
        float products[c.apart ? 1 : 2][nm][nn][4];
        auto & S  = products[0];
        auto & dP = products[c.apart ? 0 : 1];
        if constexpr (c.apart && Dk == Dv) {
            fattn_back_mma_product<Dk>(S, s_q + at, s_k);
        } else {
            if (with_S) {
                fattn_back_mma_product<Dk>(S, s_q + at, s_k);
            }
            if (with_dP) {
                fattn_back_mma_product<Dv>(dP, s_dO + at, s_v);
            }
        }
        if (hilo && with_S) {
            fattn_back_mma_add_low<Dk>(S, s_q + at, s_k, p.q_lo + (int64_t) (item.row0 + now.x + s_row) * pk,
                p.k_lo + (int64_t) (item.key0 + s_key) * pk);
        }

        // P, dS
        const int state   = now.y >> 2 * (s_row / FATTN_BACK_MMA_ROWS * granules + s_key / FATTN_BACK_MMA_GRANULE) & 3;
        const bool mixed  = state == FATTN_BACK_TILE_MIXED;
        const bool scaled = softcap || mixed;
        const int row0    = now.x + s_row; // the warp's first
        float u[nm][softcap ? nn : 1][4];
        GGML_UNUSED(u);
        if (scaled && with_S) {
#pragma unroll
            for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float scale = *(const float *) (stat + (s_row + mi * 16 + r * 8 + g) * sizeof(float4));
#pragma unroll
                    for (int ni = 0; ni < nn; ++ni) {
                        S[mi][ni][2 * r + 0] *= scale;
                        S[mi][ni][2 * r + 1] *= scale;
                    }
                }
            }
            fattn_back_mma_pieces_logits<softcap>(p, S, u, p.unit0 + item.lunit, p.rb0 + row0 / FATTN_BACK_MMA_ROWS, row0 % FATTN_BACK_MMA_ROWS,
                item.kt0 * c.keys + s_key, p.dot_q + item.row0 + row0, mixed);
        }
        const int tile = item.dS + (row0 / FATTN_BACK_MMA_ROWS - item.block0) * p.piece_tiles * granules + s_key / FATTN_BACK_MMA_GRANULE;
        half * to_dS   = p.dS + (int64_t) tile * FATTN_BACK_MMA_PAIRS + lane * 8 +
            (s_key % FATTN_BACK_MMA_GRANULE / 16 * 4 + row0 % FATTN_BACK_MMA_ROWS / 16) * 256;
        float4 * handed = (float4 *) (smem + L::sums(c)) + warp % nw * nm * nn * WARP_SIZE + lane; // P
        if (c.apart && is_k) {
            asm volatile("bar.sync 1, %0;" ::"n"(FATTN_BACK_MMA_WARPS * WARP_SIZE) : "memory");
        }
#pragma unroll
        for (int mi = 0; mi < nm; ++mi) {
            float4 x[2];
            float sum[2] = { 0.0f, 0.0f };
            GGML_UNUSED(sum);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                x[r]   = *(const float4 *) (stat + (s_row + mi * 16 + r * 8 + g) * sizeof(float4));
                x[r].x = scaled ? 1.0f : x[r].x;
                x[r].y = state == FATTN_BACK_TILE_SKIP ? -INFINITY : x[r].y;
            }
            const auto put = [&](const int ni, const int r, const int to, const uint32_t y) {
                if (own) {
                    *(uint32_t *) (smem + (to_P ^ (ni * 16)) + (mi * 16 + r * 8) * TP::pitch + to) = y;
                }
            };
            constexpr int np = nn == 1 ? 1 : 2;
#pragma unroll
            for (int n0 = 0; n0 < nn; n0 += np) {
                alignas(16) float P[np][4];
#pragma unroll
                for (int n = 0; n < np; ++n) {
                    const int ni = n0 + n;
                    if (with_S) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            P[n][i] = fattn_back_exp2(fmaf(S[mi][ni][i], x[i / 2].x, x[i / 2].y));
                        }
                        if (c.apart) {
                            handed[(mi * nn + ni) * WARP_SIZE] = *(const float4 *) P[n];
                        }
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            put(ni, r, 0, fattn_back_mma_pack(P[n][2 * r], P[n][2 * r + 1]));
                        }
                    } else {
                        *(float4 *) P[n] = handed[(mi * nn + ni) * WARP_SIZE];
                    }
                }
                if (!with_dP) {
                    continue;
                }
                uint32_t out[2 * np]; // dS
#pragma unroll
                for (int i = 0; i < 2 * np; ++i) {
                    const int n  = i / 2;
                    const int r  = i % 2;
                    const int ni = n0 + n;
                    float dS[2];
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        dS[j] = P[n][2 * r + j] * fmaf(dP[mi][ni][2 * r + j], x[r].z, -x[r].w);
                        if constexpr (softcap) {
                            sum[r] += dS[j] * (u[mi][ni][2 * r + j] - 1.0f);
                            dS[j] *= u[mi][ni][2 * r + j];
                        }
                    }
                    out[i] = fattn_back_mma_pack(dS[0], dS[1]);
                    put(ni, r, L::dS(c) - L::P(c), out[i]);
                }
                if (p.a.dQ != nullptr) {
                    if constexpr (nn == 1) {
                        *(uint2 *) (to_dS + mi * 256 + s_key / 8 % 2 * 4) = make_uint2(out[0], out[1]);
                    } else {
                        *(uint4 *) (to_dS + (n0 / 2 * 4 + mi) * 256) = make_uint4(out[0], out[1], out[2], out[3]);
                    }
                }
            }
            if constexpr (softcap) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    sum[r] = fattn_back_quad_sum(sum[r]);
                    if (lane % 4 == 0) {
                        ((float *) (smem + L::sums(c)))[(s_row + mi * 16 + r * 8 + g) * ns + warp % ns] = sum[r];
                    }
                }
            }
        }
        if (c.apart) {
            if (!is_k) {
                asm volatile("bar.arrive 1, %0;" ::"n"(FATTN_BACK_MMA_WARPS * WARP_SIZE) : "memory");
            }
            asm volatile("bar.sync %0, %1;" ::"r"(is_k ? 3 : 2), "n"(FATTN_BACK_MMA_WARPS / 2 * WARP_SIZE) : "memory");
        } else if (own || softcap) {
            __syncthreads();
        }
        if constexpr (softcap) {
            if (threadIdx.x < c.rows && p.a.dQ != nullptr) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < ns; ++i) {
                    sum += ((const float *) (smem + L::sums(c)))[threadIdx.x * ns + i];
                }
                const int row  = now.x + threadIdx.x;
                const int tile = item.dS / granules + (row / FATTN_BACK_MMA_ROWS - item.block0) * p.piece_tiles;

                p.dS_sums[(int64_t) tile * FATTN_BACK_MMA_ROWS + row % FATTN_BACK_MMA_ROWS] = sum;
            }
        }

        // dV, dK
        const auto get_operand = [&](uint32_t (&A)[4][4], const int k) { // P or dS, transposed, of 16 rows
#pragma unroll
            for (int mi = 0; mi < 4; ++mi) {
                fattn_back_ldmatrix_trans(A[mi], TP::step(o_P, mi) + k * 16 * TP::pitch);
            }
            if (is_k) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const half2 weight = *(const half2 *) (stat + L::weight(c) - L::stat(c) + (k * 16 + i / 2 * 8 + c2) * sizeof(half));
#pragma unroll
                    for (int mi = 0; mi < 4; ++mi) {
                        half2 & x = *(half2 *) &A[mi][i];
                        x         = __hmul2(x, weight);
                    }
                }
            }
        };
        if (own) {
#pragma unroll
            for (int k = 0; k < c.rows / 16; ++k) {
                uint32_t A[4][4];
                get_operand(A, k);
                fattn_back_mma_accumulate<TK>(sums, A, o_q + at + k * 16 * TK::pitch);
            }
            if (hilo && is_k) {
#pragma unroll 1
                for (int k = 0; k < c.rows / 16; ++k) {
                    uint32_t A[4][4];
                    get_operand(A, k);
                    fattn_back_mma_accumulate_low<Dk>(sums, A, p.q_lo + (int64_t) (item.row0 + now.x + k * 16) * pk + o_col);
                }
            }
        }
    }
    fattn_back_cp_async_wait<0>();
    if (!own) {
        return nullptr;
    }
    take();
    int * turn = p.turn_k + item.lunit * p.key_tiles(c.keys) + item.kt0 - p.key_tile0(c.keys);
    if (item.row_range > 0) {
        if (warp == 0) {
            int before         = item.row_range; // as many ranges of rows have their sums in dK and dV
            const auto seen_by = [&](const int range) {
                const int end = p.rblocks - range * p.piece_rows;
                return fattn_back_mma_is_seen(p, unit, end - p.piece_rows, end, item.kt0 * granules, (item.kt0 + 1) * granules);
            };
            while (before > 1 && !seen_by(before - 1)) {
                --before;
            }
            if (lane == 0) {
                fattn_back_wait(turn, before);
            }
        }
        __syncthreads();
    }
    const int k0     = item.kt0 * c.keys + o_key + g - p.a.kv_first; // of the window
    const auto store = [&](float * out, const int D, const auto cols, const float factor) {
        constexpr int n = decltype(cols)::value;
        if (out == nullptr) {
            return;
        }
#pragma unroll
        for (int m0 = 0; m0 < 4; m0 += 2) {
            float * dst[2][2];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int k       = k0 + m0 * 16 + i * 8;
                dst[i / 2][i % 2] = k >= 0 && k < p.a.kv_count ? out + ((int64_t) unit * p.a.kv_count + k) * D + o_col + c2 : nullptr;
            }
#pragma unroll
            for (int ni = 0; ni < n; ++ni) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    sums[m0 + i / 4][ni][i % 4] *= factor;
                }
            }
            fattn_back_mma_put<n>(dst, sums, m0, D - o_col - c2, p.accumulate || item.row_range > 0);
        }
    };
    const float e_v = -FATTN_BACK_MMA_SHIFT_P - p.exp_dO_min[item.lunit];
    if (is_k) {
        store(p.a.dK, p.a.Dk, std::integral_constant<int, nk>(),
            exp2f(e_v - p.exp_v[item.lunit] - p.exp_q_min[item.lunit]) / FATTN_BACK_MMA_LOG2E);
    } else {
        store(p.a.dV, p.a.Dv, std::integral_constant<int, nv>(), exp2f(e_v));
    }
    return turn;
}

// An item of a row tile. Returns the turn that it has had, NULL if none.
template <int Dk, int Dv, bool softcap, typename F>
static __device__ __forceinline__ int * fattn_back_mma_pieces_rows(
    const fattn_back_mma_params & p, char * smem, const volatile fattn_back_pieces_item & item, const F & take) {
    constexpr fattn_back_pieces_config c = fattn_back_pieces_get_config<Dk, Dv, softcap>(FATTN_BACK_MMA_ARCH);
    using L                              = fattn_back_pieces_smem<Dk, Dv, softcap>;
    using TK                             = fattn_back_mma_tile<Dk>;
    constexpr int nthreads               = FATTN_BACK_MMA_WARPS * WARP_SIZE;
    constexpr int granules               = c.keys / FATTN_BACK_MMA_GRANULE;
    constexpr int blocks                 = fattn_back_pieces_blocks(Dk);
    constexpr int pk                     = fattn_back_mma_pitch(Dk);
    // 64 rows and 8*nq columns of a warp
    constexpr int nq = Dk / 8 * blocks / FATTN_BACK_MMA_WARPS;
    static_assert(c.granules >= 2 && 8 * nq * FATTN_BACK_MMA_WARPS == blocks * Dk && nq % 2 == 0, "bad configuration");

    const uint32_t base = fattn_back_shared(smem);
    const int lane      = threadIdx.x % WARP_SIZE;
    const int warp      = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP_SIZE, 0); // known to be uniform
    const int unit      = p.unit0 + item.lunit;

    // the row blocks that see a granule, as bits
    const auto get_seeing = [&](const int gr) {
        int x = 0;
#pragma unroll
        for (int i = 0; i < blocks; ++i) {
            if (item.block0 + i < item.block1) {
                x |= (fattn_back_mma_tile_row(p, unit, p.rb0 + item.block0 + i).granule(gr) != FATTN_BACK_TILE_SKIP) << i;
            }
        }
        return x;
    };
    const bool seen = item.seen;
    int before      = item.key_range; // as many ranges of keys have their sums in dQ
    if (warp == 0) {
        if (lane == 0) {
            if (seen) {
                fattn_back_wait(p.formed + item.piece, p.piece_tiles);
            } else if (item.piece >= p.nslots) { // who waits for this piece knows that those before it are used
                fattn_back_wait(p.used + item.piece - p.nslots, p.piece_rows / p.row_blocks);
            }
        }
        const int n = p.piece_tiles * granules;
        const int k = p.key_tile0(c.keys) * granules;
        while (before > 1 && !fattn_back_mma_is_seen(p, unit, item.block0, item.block1, k + (before - 1) * n, k + before * n)) {
            --before;
        }
    }
    if (!seen && item.key_range > 0) {
        return nullptr;
    }

    const int w_block  = warp / (FATTN_BACK_MMA_WARPS / blocks);
    const int col      = warp % (FATTN_BACK_MMA_WARPS / blocks) * 8 * nq;
    const uint32_t q_S = base + w_block * FATTN_BACK_MMA_PAIRS * (int) sizeof(half) + lane * 16;
    const uint32_t q_k = base + L::row_keys() + fattn_back_mma_at_a<TK>(0, col / 8);
    float dQ[4][nq][4];
    fattn_back_mma_zero(dQ);
    const bool hilo = p.large[unit] != 0;
#pragma unroll 1
    for (int part = 0; part < (hilo ? 2 : 1) && seen; ++part) { // with K's high and low halves
        int first       = -WARP_SIZE; // of 32 granules, one a lane
        int seeing      = 0;
        uint32_t todo   = 0;
        int loaded      = 0;
        const auto load = [&](const int stage) {
            const int n = (item.kt1 - item.kt0) * granules;
            while (todo == 0 && first + WARP_SIZE < n) {
                first += WARP_SIZE;
                seeing = first + lane < n ? get_seeing(item.kt0 * granules + first + lane) : 0;
                todo   = __ballot_sync(0xFFFFFFFF, seeing != 0);
            }
            if (todo != 0) {
                const int i        = __ffs(todo) - 1;
                const int rows     = __shfl_sync(0xFFFFFFFF, seeing, i);
                const uint32_t dst = base + stage * L::row_stage();
                todo &= todo - 1;
#pragma unroll
                for (int b = 0; b < blocks; ++b) {
                    if (item.block0 + b >= item.block1) {
                        break;
                    }
                    const int tile   = item.dS + b * p.piece_tiles * granules + first + i;
                    const half * src = p.dS + (int64_t) tile * FATTN_BACK_MMA_PAIRS + threadIdx.x * 8;
#pragma unroll
                    for (int j = 0; j < FATTN_BACK_MMA_PAIRS / 8 / nthreads; ++j) {
                        fattn_back_cp_async_16(
                            dst + (b * FATTN_BACK_MMA_PAIRS / 8 + j * nthreads + threadIdx.x) * 16, src + j * nthreads * 8, (rows >> b & 1) != 0);
                    }
                }
                fattn_back_mma_load<Dk, FATTN_BACK_MMA_GRANULE, nthreads>(
                    dst + L::row_keys(), (part == 0 ? p.k_hi : p.k_lo) + (int64_t) (item.key0 + (first + i) * FATTN_BACK_MMA_GRANULE) * pk);
                ++loaded;
            }
            fattn_back_cp_async_commit();
        };
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < c.granules - 1; ++i) {
            load(i);
        }
        int stage = 0;
#pragma unroll 1
        for (int i = 0; i < loaded; ++i) {
            fattn_back_cp_async_wait<c.granules - 2>();
            __syncthreads();
            load(stage == 0 ? c.granules - 1 : stage - 1);
            const uint32_t at = stage * L::row_stage();
            stage             = stage + 1 == c.granules ? 0 : stage + 1;
            if (item.block0 + w_block >= item.block1) {
                continue;
            }
#pragma unroll
            for (int k = 0; k < FATTN_BACK_MMA_GRANULE / 16; ++k) {
                uint32_t A[4][4];
#pragma unroll
                for (int mi = 0; mi < 4; ++mi) {
                    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                        : "=r"(A[mi][0]), "=r"(A[mi][1]), "=r"(A[mi][2]), "=r"(A[mi][3]) : "r"(q_S + at + (k * 4 + mi) * 512));
                }
                fattn_back_mma_accumulate<TK>(dQ, A, q_k + at + k * 16 * TK::pitch);
            }
        }
        fattn_back_cp_async_wait<0>();
    }

    take();
    int * turn = p.turn_q + (item.lunit * p.row_ranges() + item.row_range) * (p.piece_rows / p.row_blocks) + item.row_tile;
    if (item.key_range > 0) {
        if (threadIdx.x == 0) {
            fattn_back_wait(turn, before);
        }
        __syncthreads();
    }
    const int block     = item.block0 + w_block;
    const int head      = p.head(unit, p.rb0 + block);
    const int query     = p.query(p.rb0 + block) + lane / 4;
    const int c2        = lane % 4 * 2;
    const float scale   = p.a.scale * exp2f(-FATTN_BACK_MMA_SHIFT_P - p.exp_dO_min[item.lunit] - p.exp_v[item.lunit] - p.exp_k[item.lunit]);
    const float * means = p.mean_k + item.lunit * FATTN_BACK_PREP_MAX_D + col + c2;
    if (block < item.block1) {
#pragma unroll
        for (int m0 = 0; m0 < 4; m0 += 2) {
            float * dst[2][2];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int q       = query + m0 * 16 + i * 8;
                const int64_t row = item.row0 + block * FATTN_BACK_MMA_ROWS + q % FATTN_BACK_MMA_ROWS;
                dst[i / 2][i % 2] = q < p.a.N ? p.a.dQ + p.a.row(q, head, unit / p.a.Hkv) * p.a.Dk + col + c2 : nullptr;
                if (q >= p.a.N) {
                    continue;
                }
                const float factor = scale / p.stat[row].z;
                float rank1        = p.R != nullptr && item.key_range == 0 ? p.a.scale * p.R[row] : 0.0f; // what all keys have in common
                if constexpr (softcap) {
                    float sum = 0.0f;
                    for (int kt = item.kt0; kt < item.kt1; ++kt) {
                        if (fattn_back_mma_tile_row(p, unit, p.rb0 + block).granules<granules>(kt * granules) != 0) {
                            const int tile = item.dS / granules + w_block * p.piece_tiles + kt - item.kt0;
                            sum += p.dS_sums[(int64_t) tile * FATTN_BACK_MMA_ROWS + q % FATTN_BACK_MMA_ROWS];
                        }
                    }
                    rank1 += sum * factor * exp2f(p.exp_k[item.lunit]);
                }
#pragma unroll
                for (int ni = 0; ni < nq; ++ni) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        float & x = dQ[m0 + i / 2][ni][i % 2 * 2 + j];
                        x         = x * factor + (rank1 != 0.0f ? rank1 * means[ni * 8 + j] : 0.0f);
                    }
                }
            }
            fattn_back_mma_put<nq>(dst, dQ, m0, p.a.Dk - col - c2, item.key_range > 0);
        }
    }
    return turn;
}

// Takes the next item that a block is needed for, and says of those before it that they are done; called by a warp.
template <int Dk, int Dv, bool softcap>
static __device__ __forceinline__ void fattn_back_mma_take(const fattn_back_mma_params & p, fattn_back_pieces_item & item) {
    constexpr fattn_back_pieces_config c = fattn_back_pieces_get_config<Dk, Dv, softcap>(FATTN_BACK_MMA_ARCH);
    constexpr int granules               = c.keys / FATTN_BACK_MMA_GRANULE;
    const int ntiles                     = p.key_tiles(c.keys);
    const int row_tiles                  = p.a.dQ != nullptr ? p.piece_rows / p.row_blocks : 0;
    const int nranges                    = p.key_ranges(ntiles);
    const int npieces                    = p.units * p.row_ranges() * nranges;
#pragma unroll 1
    while (true) {
        const int ticket = __shfl_sync(0xFFFFFFFF, threadIdx.x % WARP_SIZE == 0 ? atomicAdd(p.ticket, 1) : 0, 0);
        const int step   = ticket / (p.piece_tiles + row_tiles);
        const int number = ticket % (p.piece_tiles + row_tiles);
        const bool keys  = number < p.piece_tiles;
        const int piece  = keys ? step : step - p.lag;
        const bool end   = step >= npieces + (p.a.dQ != nullptr ? p.lag : 0);
        if (!end && (piece < 0 || piece >= npieces)) {
            continue;
        }
        const int lunit     = piece % p.units;
        const int key_range = piece / p.units % nranges;
        const int row_range = piece / p.units / nranges;
        const int kt        = p.key_tile0(c.keys) + key_range * p.piece_tiles + (keys ? number : 0);
        const int kt1       = p.key_tile0(c.keys) + min((key_range + 1) * p.piece_tiles, ntiles);
        const int rb1       = p.rblocks - row_range * p.piece_rows;
        const int rb0       = max(rb1 - p.piece_rows, 0);
        const int block0    = keys ? rb0 : rb0 + (number - p.piece_tiles) * p.row_blocks;
        const int block1    = keys ? rb1 : min(block0 + p.row_blocks, rb1);
        const bool some     = !end && kt < kt1 && block0 < block1;
        const bool seen     = some &&
            fattn_back_mma_is_seen(p, p.unit0 + lunit, block0, block1, kt * granules, (keys ? kt + 1 : kt1) * granules);
        // Where nothing is seen there is nothing to do, but the first range of each writes zeros. Who waits for a piece to be used knows that
        // the slot's pieces before it are.
        const bool skip = !end && !seen && (!some || (keys ? row_range : key_range) > 0) &&
            (keys || !some || piece < p.nslots || fattn_back_acquire(p.used + piece - p.nslots) >= row_tiles);
        if (threadIdx.x % WARP_SIZE == 0 && skip && p.a.dQ != nullptr) {
            __threadfence();
            atomicAdd((keys ? p.formed : p.used) + piece, 1);
        }
        if (threadIdx.x % WARP_SIZE == 0 && !skip) {
            const int slot = piece % p.nslots * p.piece_rows + (keys ? 0 : block0 - rb0);
            item.kind      = end ? FATTN_BACK_ITEM_END : keys ? FATTN_BACK_ITEM_KEYS
                                                              : FATTN_BACK_ITEM_ROWS;
            item.lunit     = lunit;
            item.piece     = piece;
            item.row_range = row_range;
            item.key_range = key_range;
            item.row_tile  = number - p.piece_tiles;
            item.kt0       = kt;
            item.kt1       = kt1;
            item.block0    = block0;
            item.block1    = block1;
            item.row0      = lunit * p.rows();
            item.key0      = lunit * p.keys() + kt * c.keys;
            item.dS        = (slot * p.piece_tiles + (keys ? number : 0)) * granules;
            item.seen      = seen;
        }
        if (!__shfl_sync(0xFFFFFFFF, skip, 0)) {
            break;
        }
    }
}
#endif // AMPERE_MMA_AVAILABLE

// Grid: as many blocks as run at once. Block: 8 warps; of S and dP a warp has some rows and keys of the step, of dK or of dV 64 keys and some
// columns, of dQ 64 rows and some columns. P and dS pass through shared memory.
template <int Dk, int Dv, bool softcap>
static __global__ void __launch_bounds__(FATTN_BACK_MMA_WARPS * WARP_SIZE, 1) flash_attn_back_mma_pieces(const fattn_back_mma_params p) {
#ifdef AMPERE_MMA_AVAILABLE
    constexpr fattn_back_pieces_config c = fattn_back_pieces_get_config<Dk, Dv, softcap>(FATTN_BACK_MMA_ARCH);
    using L                              = fattn_back_pieces_smem<Dk, Dv, softcap>;
    extern __shared__ __align__(128) char smem[];
    fattn_back_pieces_item * items = (fattn_back_pieces_item *) (smem + L::item(c));
    const bool taker               = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP_SIZE, 0) == 1; // the warp that takes items
    bool taken                     = false;
    if (taker) {
        fattn_back_mma_take<Dk, Dv, softcap>(p, items[0]);
    }
    int * turn  = nullptr; // of the item before, for the thread that says when it is done
    int * count = nullptr;
    int value   = 0;
#pragma unroll 1
    for (int i = 0;; i ^= 1) {
        __syncthreads();
        const volatile fattn_back_pieces_item & item = items[i]; // read where it is needed
        const int kind                               = item.kind;
        if (threadIdx.x == 0 && (turn != nullptr || count != nullptr)) {
            __threadfence();
            if (turn != nullptr) {
                *(volatile int *) turn = value;
            }
            if (count != nullptr) {
                atomicAdd(count, 1);
            }
        }
        if (kind == FATTN_BACK_ITEM_END) {
            break;
        }
        taken           = false;
        const auto take = [&]() {
            if (taker) {
                fattn_back_mma_take<Dk, Dv, softcap>(p, items[i ^ 1]);
            }
            taken = true;
        };
        if (kind == FATTN_BACK_ITEM_KEYS) {
            turn  = fattn_back_mma_pieces_keys<Dk, Dv, softcap>(p, smem, item, take);
            value = item.row_range + 1;
        } else {
            turn  = fattn_back_mma_pieces_rows<Dk, Dv, softcap>(p, smem, item, take);
            value = item.key_range + 1;
        }
        count = p.a.dQ != nullptr ? (kind == FATTN_BACK_ITEM_KEYS ? p.formed : p.used) + item.piece : nullptr;
        if (!taken) {
            take();
        }
    }
#else
    GGML_UNUSED(p);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}
