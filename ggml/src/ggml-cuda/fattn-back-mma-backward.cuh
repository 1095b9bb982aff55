#pragma once

// The backward of the mma path: dK, dV and dQ from LSE and D, five products.
//
// A block owns the keys of a tile and streams the rows that see them, the last ones first. What a tile adds to dQ goes to memory. Tiles add to
// a row in turns, the first keys first, so that the order of the sum is fixed; under a causal mask a tile starts where the tiles before it
// already are, so that its turn comes soon. Few rows would make for long queues: then there are several chains of tiles, each with a sum of
// its own. Blocks take tiles in the order in which they start, so that who is waited for has started.

#include "fattn-back-mma-prep.cuh"

struct fattn_back_backward_config {
    int keys;   // of a tile
    int rows;   // of a step, which is part of a row block or a pair of them
    int stages; // of rows in shared memory
};

// what a block owns
struct alignas(16) fattn_back_backward_place {
    int lunit;
    int range;  // of row blocks
    int kt;     // tile of keys
    int block0; // row blocks of the range, even
    int block1;
    int row0;   // the unit's first among the group's, which are fewer than 2^31
    int key0;   // the tile's first
    int sum0;   // the unit's first row among those of all chains
    float scale; // from dQ as it is summed, without the weights of its rows
};

// Shared memory of a block: K, V, stages (Q, dO and what P and dS need of the rows), P, dS, with softcap sums of dS tanh^2, the stages' items,
// what it owns
template <int Dk, int Dv, bool softcap>
struct fattn_back_backward_smem {
    using TK = fattn_back_mma_tile<Dk>;
    using TV = fattn_back_mma_tile<Dv>;
    static constexpr __host__ __device__ int v(const fattn_back_backward_config & c) { return c.keys * TK::pitch; }
    static constexpr __host__ __device__ int own(const fattn_back_backward_config & c) { return c.keys * (TK::pitch + TV::pitch); }
    static constexpr __host__ __device__ int dO(const fattn_back_backward_config & c) { return c.rows * TK::pitch; } // in a stage
    static constexpr __host__ __device__ int stat(const fattn_back_backward_config & c) { return c.rows * (TK::pitch + TV::pitch); }
    static constexpr __host__ __device__ int weight(const fattn_back_backward_config & c) { return stat(c) + c.rows * (int) sizeof(float4); }
    static constexpr __host__ __device__ int stage(const fattn_back_backward_config & c) {
        return (weight(c) + c.rows * (int) sizeof(half) + 127) / 128 * 128;
    }
    static constexpr __host__ __device__ int P(const fattn_back_backward_config & c) { return own(c) + c.stages * stage(c); }
    static constexpr __host__ __device__ int dS(const fattn_back_backward_config & c) { return P(c) + c.rows * c.keys * (int) sizeof(half); }
    static constexpr __host__ __device__ int sums(const fattn_back_backward_config & c) { return dS(c) + c.rows * c.keys * (int) sizeof(half); }
    static constexpr __host__ __device__ int meta(const fattn_back_backward_config & c) {
        return sums(c) + (softcap ? c.rows * FATTN_BACK_MMA_WARPS * (int) sizeof(float) : 0);
    }
    static constexpr __host__ __device__ int bytes(const fattn_back_backward_config & c) {
        return meta(c) + c.stages * (int) sizeof(int4) + (int) sizeof(fattn_back_backward_place);
    }
};

// the largest tiles of which two stages fit
template <int Dk, int Dv, bool softcap>
static constexpr __host__ __device__ fattn_back_backward_config fattn_back_backward_get_config(const int arch) {
    using L        = fattn_back_backward_smem<Dk, Dv, softcap>;
    const int smem = fattn_back_mma_smem(arch);
    for (int rows = softcap ? 32 : Dk <= 64 ? 128
                                            : 64;
        rows >= 16; rows /= 2) { // with softcap registers hold its derivative beside S and dP
        for (int keys = Dk + Dv <= 256 ? 128 : 64; keys >= 64; keys /= 2) {
            fattn_back_backward_config c = { keys, rows, 1 };
            const int more               = (smem - L::bytes(c)) / (L::stage(c) + (int) sizeof(int4));
            if (L::bytes(c) <= smem && (more >= 1 || rows == 16)) {
                c.stages += more < 2 ? more : 2;
                return c;
            }
        }
    }
    return {};
}

#ifdef AMPERE_MMA_AVAILABLE
// The only accesses that follow are adds, which memory performs behind those that were performed when the turn was given.
static __device__ __forceinline__ int fattn_back_mma_get_turn(const int * x) {
    int y;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(y) : "l"(x) : "memory");
    return y;
}

static __device__ __forceinline__ void fattn_back_mma_give_turn(int * x, const int y) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(x), "r"(y) : "memory");
}

static __device__ __forceinline__ void fattn_back_mma_add(float * dst, const float x, const float y) {
#if __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(dst), "f"(x), "f"(y) : "memory");
#else
    atomicAdd(dst + 0, x);
    atomicAdd(dst + 1, y);
#endif // __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
}
#endif // AMPERE_MMA_AVAILABLE

// Grid: bands of units whose Q and dO fit the L2 cache; in a band the first keys first, of all its units; ranges of rows. Block: 8 warps; of S,
// dP and dQ a warp has some rows and columns of the step, of dK and dV 32 keys and some columns. P and dS pass through shared memory.
template <int Dk, int Dv, bool softcap>
static __global__ void __launch_bounds__(FATTN_BACK_MMA_WARPS * WARP_SIZE, 1) flash_attn_back_mma_backward(const fattn_back_mma_params p) {
#ifdef AMPERE_MMA_AVAILABLE
    constexpr fattn_back_backward_config c = fattn_back_backward_get_config<Dk, Dv, softcap>(__CUDA_ARCH__);
    using L                                = fattn_back_backward_smem<Dk, Dv, softcap>;
    using TK                               = fattn_back_mma_tile<Dk>;
    using TV                               = fattn_back_mma_tile<Dv>;
    using TP                               = fattn_back_mma_tile<c.keys>;
    constexpr int nthreads                 = FATTN_BACK_MMA_WARPS * WARP_SIZE;
    constexpr int granules                 = c.keys / FATTN_BACK_MMA_GRANULE;
    constexpr int blocks                   = c.rows > FATTN_BACK_MMA_ROWS ? c.rows / FATTN_BACK_MMA_ROWS : 1; // of a step
    constexpr int pk                       = fattn_back_mma_pitch(Dk);
    constexpr int pv                       = fattn_back_mma_pitch(Dv);
    // S and dP: 16*nm rows and 8*nn keys of a warp
    constexpr int nm = c.rows >= 64 ? 2 : 1;
    constexpr int nn = c.keys / 8 * c.rows / (16 * nm) / FATTN_BACK_MMA_WARPS;
    constexpr int ns = c.keys / (8 * nn); // warps side by side
    // dQ: 16*mq rows and 8*nq columns
    constexpr int mq = c.rows >= 64 && Dk % 64 == 0 ? 2 : 1;
    constexpr int nq = Dk / 8 * c.rows / (16 * mq) / FATTN_BACK_MMA_WARPS;
    // dK and dV: 32 keys and 8*nk and 8*nv columns
    constexpr int nk = Dk / 8 * c.keys / 32 / FATTN_BACK_MMA_WARPS;
    constexpr int nv = Dv / 8 * c.keys / 32 / FATTN_BACK_MMA_WARPS;
    static_assert(c.stages >= 1 && 16 * nm * 8 * nn * FATTN_BACK_MMA_WARPS == c.rows * c.keys && (nn == 1 || nn % 2 == 0), "bad configuration");
    static_assert(16 * mq * 8 * nq * FATTN_BACK_MMA_WARPS == c.rows * Dk && 32 * 8 * nk * FATTN_BACK_MMA_WARPS == c.keys * Dk, "bad configuration");

    extern __shared__ __align__(128) char smem[];
    const uint32_t base = fattn_back_shared(smem);
    int4 * meta         = (int4 *) (smem + L::meta(c));
    const int lane      = threadIdx.x % WARP_SIZE;
    const int warp      = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP_SIZE, 0); // known to be uniform
    const int g         = lane / 4;
    const int c2        = lane % 4 * 2;

    const volatile fattn_back_backward_place & place = *(fattn_back_backward_place *) (meta + c.stages); // read where it is needed
    if (threadIdx.x == 0) {
        const int block                                  = atomicAdd(p.ticket, 1);
        const int ntiles                                 = p.key_tiles(c.keys) * p.nranges;
        const int band                                   = block / (p.band * ntiles);
        const int rest                                   = block % (p.band * ntiles);
        const int nunits                                 = min(p.band, p.units - band * p.band);
        const int lunit                                  = band * p.band + rest % nunits;
        const int range                                  = rest / nunits % p.nranges;
        const int kt                                     = p.key_tile0(c.keys) + rest / nunits / p.nranges;
        *(fattn_back_backward_place *) (meta + c.stages) = {
            lunit, range, kt, (int) ((int64_t) p.rblocks / 2 * range / p.nranges * 2), (int) ((int64_t) p.rblocks / 2 * (range + 1) / p.nranges * 2),
            (int) (lunit * p.rows()), (int) (lunit * p.keys()) + kt * c.keys, (int) ((kt % p.nchains * p.units + lunit) * p.rows()),
            p.a.scale * exp2f(-FATTN_BACK_MMA_SHIFT_P - p.exp_dO_min[lunit] - p.exp_v[lunit] - p.exp_k[lunit])
        };
    }
    __syncthreads();
    const bool own  = (p.a.dK != nullptr || p.a.dV != nullptr) && place.kt * c.keys < p.a.kv_first + p.a.kv_count && (place.kt + 1) * c.keys > p.a.kv_first;
    const bool hilo = p.large[p.unit0 + place.lunit] != 0;

    fattn_back_mma_load<Dk, c.keys, nthreads>(base, p.k_hi + (int64_t) place.key0 * pk);
    fattn_back_mma_load<Dv, c.keys, nthreads>(base + L::v(c), p.v + (int64_t) place.key0 * pv);

    // the states of the granules of a tile with the row blocks from one on
    const auto get_states = [&](const int b, const int kt) {
        int x = 0;
#pragma unroll
        for (int i = 0; i < blocks; ++i) {
            x |= fattn_back_mma_tile_row(p, p.unit0 + place.lunit, b + i).granules<granules>(kt * granules) << 2 * granules * i;
        }
        return x;
    };

    // Loads the next rows; an item is the first of them (-1: no more), the states of their granules, what the turn is when the tile may add to
    // dQ (1 + the key tile before it in its chain, 0 for the first), and the query block of the first row block.
    int first       = -WARP_SIZE; // of 32 items, one a lane
    int states      = 0;
    int before      = 0;
    int qb          = 0;
    uint32_t todo   = 0;
    int piece       = 0; // of a row block
    const auto load = [&](const int stage) {
        const int n = (place.block1 - place.block0) / blocks;
        while (todo == 0 && first + WARP_SIZE < n) {
            first += WARP_SIZE;
            states = 0;
            before = 0;
            if (first + lane < n) {
                const int b = p.rb0 + place.block1 - (first + lane + 1) * blocks;
                states      = get_states(b, place.kt);
                qb          = b / p.a.G;
                for (int k = place.kt - p.nchains; k >= 0 && states != 0 && before == 0 && p.a.dQ != nullptr; k -= p.nchains) {
                    before = get_states(b, k) != 0 ? k + 1 : 0;
                }
            }
            todo = __ballot_sync(0xFFFFFFFF, states != 0);
        }
        const int i = max(__ffs(todo) - 1, 0);
        int4 item   = make_int4(-1, __shfl_sync(0xFFFFFFFF, states, i), __shfl_sync(0xFFFFFFFF, before, i), __shfl_sync(0xFFFFFFFF, qb, i));
        if (todo != 0) {
            item.x             = (place.block1 - (first + i + 1) * blocks) * FATTN_BACK_MMA_ROWS + piece * c.rows;
            piece              = (piece + 1) % (blocks * FATTN_BACK_MMA_ROWS / c.rows);
            todo               = piece == 0 ? todo & (todo - 1) : todo;
            const uint32_t dst = base + L::own(c) + stage * L::stage(c);
            const int row      = place.row0 + item.x;
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
            meta[stage] = item;
        }
        fattn_back_cp_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < c.stages - 1; ++i) {
        load(i);
    }

    // the warp's first row and key, or row and column
    const int s_row = warp / ns * 16 * nm;
    const int s_key = warp % ns * 8 * nn;
    const int q_row = warp / (Dk / 8 / nq) * 16 * mq;
    const int q_col = warp % (Dk / 8 / nq) * 8 * nq;
    const int o_key = warp / (Dk / 8 / nk) * 32;
    const int k_col = warp % (Dk / 8 / nk) * 8 * nk;
    const int v_col = warp % (Dv / 8 / nv) * 8 * nv;

    const uint32_t rows = base + L::own(c);
    const uint32_t s_q  = rows + fattn_back_mma_at_a<TK>(s_row, 0);
    const uint32_t s_dO = rows + L::dO(c) + fattn_back_mma_at_a<TV>(s_row, 0);
    const uint32_t s_k  = base + fattn_back_mma_at_b<TK>(s_key, 0);
    const uint32_t s_v  = base + L::v(c) + fattn_back_mma_at_b<TV>(s_key, 0);
    const uint32_t o_P  = base + L::P(c) + fattn_back_mma_at_b<TP>(0, o_key / 8);
    const uint32_t o_dO = rows + L::dO(c) + fattn_back_mma_at_a<TV>(0, v_col / 8);
    const uint32_t o_q  = rows + fattn_back_mma_at_a<TK>(0, k_col / 8);
    const uint32_t q_dS = base + L::dS(c) + fattn_back_mma_at_a<TP>(q_row, 0);
    const uint32_t q_k  = base + fattn_back_mma_at_a<TK>(0, q_col / 8);
    const int to_P      = L::P(c) + TP::at(s_row + g, s_key / 8) + lane % 4 * 4;

    float dK[2][nk][4];
    float dV[2][nv][4];
    fattn_back_mma_zero(dK);
    fattn_back_mma_zero(dV);

    int * added        = nullptr; // the turn that the next tile waits for
    const auto release = [&]() {
        __syncwarp();
        if (lane == 0 && added != nullptr) {
            fattn_back_mma_give_turn(added, place.kt + 1);
        }
        added = nullptr;
    };

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
        const int4 item = meta[stage];
        if (item.x < 0) {
            break;
        }
        const uint32_t at = stage * L::stage(c);
        const char * stat = smem + L::own(c) + at + L::stat(c);
        if constexpr (c.stages > 1) {
            load(stage == 0 ? c.stages - 1 : stage - 1);
            stage = stage + 1 == c.stages ? 0 : stage + 1;
        }

        // S, dP
        float S[nm][nn][4];
        fattn_back_mma_product<Dk>(S, s_q + at, s_k);
        if (hilo) {
            fattn_back_mma_add_low<Dk>(S, s_q + at, s_k, p.q_lo + (int64_t) (place.row0 + item.x + s_row) * pk,
                p.k_lo + (int64_t) (place.key0 + s_key) * pk);
        }
        float dP[nm][nn][4];
        fattn_back_mma_product<Dv>(dP, s_dO + at, s_v);
        release();

        // P, dS
        const int now     = item.y >> 2 * (s_row / FATTN_BACK_MMA_ROWS * granules + s_key / FATTN_BACK_MMA_GRANULE) & 3;
        const bool mixed  = now == FATTN_BACK_TILE_MIXED;
        const bool scaled = softcap || mixed;
        float u[nm][softcap ? nn : 1][4];
        GGML_UNUSED(u);
        if (scaled) {
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
            fattn_back_mma_logits<softcap>(p, S, u, p.unit0 + place.lunit, p.rb0 + (item.x + s_row) / FATTN_BACK_MMA_ROWS, (item.x + s_row) % FATTN_BACK_MMA_ROWS,
                place.kt * c.keys + s_key, p.dot_q + place.row0 + item.x + s_row, mixed);
        }
#pragma unroll
        for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row     = s_row + mi * 16 + r * 8 + g;
                const float4 x    = *(const float4 *) (stat + row * sizeof(float4));
                const float scale = scaled ? 1.0f : x.x;
                const float shift = now == FATTN_BACK_TILE_SKIP ? -INFINITY : x.y;
                float sum         = 0.0f;
                GGML_UNUSED(sum);
#pragma unroll
                for (int ni = 0; ni < nn; ++ni) {
                    float P[2];
                    float dS[2];
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int i = 2 * r + j;
                        P[j]        = fattn_back_exp2(fmaf(S[mi][ni][i], scale, shift));
                        dS[j]       = P[j] * fmaf(dP[mi][ni][i], x.z, -x.w);
                        if constexpr (softcap) {
                            sum += dS[j] * (u[mi][ni][i] - 1.0f);
                            dS[j] *= u[mi][ni][i];
                        }
                    }
                    char * dst                               = smem + (to_P ^ (ni * 16)) + (mi * 16 + r * 8) * TP::pitch;
                    *(uint32_t *) dst                        = fattn_back_mma_pack(P[0], P[1]);
                    *(uint32_t *) (dst + L::dS(c) - L::P(c)) = fattn_back_mma_pack(dS[0], dS[1]);
                }
                if constexpr (softcap) {
                    sum = fattn_back_quad_sum(sum);
                    if (lane % 4 == 0) {
                        ((float *) (smem + L::sums(c)))[row * ns + warp % ns] = sum;
                    }
                }
            }
        }
        __syncthreads();
        // asked for before the products, needed behind them
        int * turn = p.turn + (int64_t) (place.sum0 + item.x) / 16 * FATTN_BACK_MMA_WARPS + warp;
        int now_at = lane == 0 && item.z != 0 ? fattn_back_mma_get_turn(turn) : 0;

        // dV, dK
        const auto get_dS = [&](uint32_t (&A)[2][4], const int k) { // transposed, of 16 rows
            fattn_back_ldmatrix_trans(A[0], o_P + L::dS(c) - L::P(c) + k * 16 * TP::pitch);
            fattn_back_ldmatrix_trans(A[1], TP::step(o_P, 1) + L::dS(c) - L::P(c) + k * 16 * TP::pitch);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const half2 weight = *(const half2 *) (stat + L::weight(c) - L::stat(c) + (k * 16 + i / 2 * 8 + c2) * sizeof(half));
#pragma unroll
                for (int mi = 0; mi < 2; ++mi) {
                    half2 & x = *(half2 *) &A[mi][i];
                    x         = __hmul2(x, weight);
                }
            }
        };
        if (own) {
#pragma unroll
            for (int k = 0; k < c.rows / 16; ++k) {
                uint32_t A[2][4];
                fattn_back_ldmatrix_trans(A[0], o_P + k * 16 * TP::pitch);
                fattn_back_ldmatrix_trans(A[1], TP::step(o_P, 1) + k * 16 * TP::pitch);
                fattn_back_mma_accumulate<TV>(dV, A, o_dO + at + k * 16 * TV::pitch);
                get_dS(A, k);
                fattn_back_mma_accumulate<TK>(dK, A, o_q + at + k * 16 * TK::pitch);
            }
            if (hilo) {
#pragma unroll 1
                for (int k = 0; k < c.rows / 16; ++k) {
                    uint32_t A[2][4];
                    get_dS(A, k);
                    fattn_back_mma_accumulate_low<Dk>(dK, A, p.q_lo + (int64_t) (place.row0 + item.x + k * 16) * pk + k_col);
                }
            }
        }

        // dQ
        if (p.a.dQ != nullptr) {
            float dQ[mq][nq][4];
            fattn_back_mma_zero(dQ);
#pragma unroll
            for (int k = 0; k < c.keys / 16; ++k) {
                uint32_t A[mq][4];
#pragma unroll
                for (int mi = 0; mi < mq; ++mi) {
                    fattn_back_ldmatrix(A[mi], TP::step(q_dS, k) + mi * 16 * TP::pitch);
                }
                fattn_back_mma_accumulate<TK>(dQ, A, q_k + k * 16 * TK::pitch);
            }
            if (hilo) {
#pragma unroll 1
                for (int k = 0; k < c.keys / 16; ++k) {
                    uint32_t A[mq][4];
#pragma unroll
                    for (int mi = 0; mi < mq; ++mi) {
                        fattn_back_ldmatrix(A[mi], TP::step(q_dS, k) + mi * 16 * TP::pitch);
                    }
                    fattn_back_mma_accumulate_low<Dk>(dQ, A, p.k_lo + (int64_t) (place.key0 + k * 16) * pk + q_col);
                }
            }
            while (lane == 0 && now_at != item.z) {
                now_at = fattn_back_mma_get_turn(turn);
            }
            __syncwarp();
            added = turn;
            // the warp's row block: its query head in the group, its first query
            const int lunit   = place.lunit;
            int head          = p.rb0 + item.x / FATTN_BACK_MMA_ROWS - item.w * p.a.G + q_row / FATTN_BACK_MMA_ROWS;
            const bool next   = head == p.a.G;
            head              = next ? 0 : head;
            const int query   = (item.w + next) * FATTN_BACK_MMA_ROWS + (item.x + q_row) % FATTN_BACK_MMA_ROWS;
            const int64_t row = p.nchains > 1 ? place.sum0 + item.x + q_row : ((int64_t) (p.unit0 + lunit) * p.a.G + head) * p.a.N + query;
            float * dst0      = (p.nchains > 1 ? p.part_q : p.a.dQ) + row * p.a.Dk;
            const float scale = place.scale;
#pragma unroll
            for (int mi = 0; mi < mq; ++mi) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int i = mi * 16 + r * 8 + g;
                    if (query + i >= p.a.N) {
                        continue;
                    }
                    const float factor = scale / ((const float4 *) stat)[q_row + i].z;
                    float * dst        = dst0 + i * p.a.Dk;
                    float rank1        = 0.0f; // what all keys have in common
                    if constexpr (softcap) {
#pragma unroll
                        for (int k = 0; k < ns; ++k) {
                            rank1 += ((const float *) (smem + L::sums(c)))[(q_row + i) * ns + k];
                        }
                        rank1 *= factor * exp2f(p.exp_k[lunit]);
                    }
#pragma unroll
                    for (int ni = 0; ni < nq; ++ni) {
                        const int col = q_col + ni * 8 + c2;
                        if (col < p.a.Dk) {
                            float2 x = make_float2(dQ[mi][ni][2 * r] * factor, dQ[mi][ni][2 * r + 1] * factor);
                            if constexpr (softcap) {
                                x.x += rank1 * p.mean_k[lunit * FATTN_BACK_PREP_MAX_D + col];
                                x.y += rank1 * p.mean_k[lunit * FATTN_BACK_PREP_MAX_D + col + 1];
                            }
                            if (item.z == 0) {
                                *(float2 *) (dst + col) = x;
                            } else {
                                fattn_back_mma_add(dst + col, x.x, x.y);
                            }
                        }
                    }
                }
            }
        }
    }
    fattn_back_cp_async_wait<0>();
    release();

    const int lunit  = place.lunit;
    const int k0     = place.kt * c.keys + o_key + g - p.a.kv_first; // of the window
    const auto store = [&](float * out, float * part, const int D, const int col, auto & acc, const float factor) {
        if (out == nullptr || !own) {
            return;
        }
        constexpr int n = sizeof(acc[0]) / sizeof(acc[0][0]);
#pragma unroll
        for (int mi = 0; mi < 2; ++mi) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int k = k0 + mi * 16 + r * 8;
                if (k < 0 || k >= p.a.kv_count) {
                    continue;
                }
                float * dst = p.nranges > 1 ? part + (((int64_t) place.range * p.units + lunit) * p.a.kv_count + k) * D
                                            : out + ((int64_t) (p.unit0 + lunit) * p.a.kv_count + k) * D;
                dst += col + c2;
                float2 old[n]; // all loads before the first store
#pragma unroll
                for (int ni = 0; ni < n; ++ni) {
                    old[ni] = p.accumulate && p.nranges == 1 && col + c2 + ni * 8 < D ? *(const float2 *) (dst + ni * 8) : make_float2(0.0f, 0.0f);
                }
#pragma unroll
                for (int ni = 0; ni < n; ++ni) {
                    if (col + c2 + ni * 8 < D) {
                        *(float2 *) (dst + ni * 8) =
                            make_float2(acc[mi][ni][2 * r] * factor + old[ni].x, acc[mi][ni][2 * r + 1] * factor + old[ni].y);
                    }
                }
            }
        }
    };
    const float e_v = -FATTN_BACK_MMA_SHIFT_P - p.exp_dO_min[lunit];
    store(p.a.dV, p.part_v, p.a.Dv, v_col, dV, exp2f(e_v));
    store(p.a.dK, p.part_k, p.a.Dk, k_col, dK, exp2f(e_v - p.exp_v[lunit] - p.exp_q_min[lunit]) / FATTN_BACK_MMA_LOG2E);
#else
    GGML_UNUSED(p);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

// dQ from its chains, with what sinks leave of mean(K); rows without keys are 0. Grid: blocks of 4 components of a row each, units.
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_mma_finish_dq(const fattn_back_mma_params p) {
    const int unit    = p.unit0 + blockIdx.y;
    const int n       = p.a.Dk / 4;
    const int64_t j   = (int64_t) blockIdx.x * FATTN_BACK_PREP_THREADS + threadIdx.x;
    const int lrow    = j / n;
    const int col     = j % n * 4;
    const int b       = p.rb0 + lrow / FATTN_BACK_MMA_ROWS;
    const int q       = p.query(b) + lrow % FATTN_BACK_MMA_ROWS;
    const int64_t row = blockIdx.y * p.rows() + lrow;
    if (lrow >= p.rows() || q >= p.a.N) {
        return;
    }
    float4 * dst = (float4 *) (p.a.dQ + p.a.row(q, p.head(unit, b), unit / p.a.Hkv) * p.a.Dk + col);
    float4 sum   = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = 0; i < p.nchains; ++i) {
        const int64_t step = (i * p.units * p.rows() + row) / p.step * p.step; // its first row
        if (p.turn[step / 16 * FATTN_BACK_MMA_WARPS] == 0) {
            continue;
        }
        if (p.nchains == 1 && p.R == nullptr) {
            return;
        }
        const float4 x = p.nchains == 1 ? *dst : *(const float4 *) (p.part_q + (i * p.units * p.rows() + row) * p.a.Dk + col);
        sum            = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
    }
    if (p.R != nullptr) {
        const float R     = p.a.scale * p.R[row];
        const float4 mean = *(const float4 *) (p.mean_k + blockIdx.y * FATTN_BACK_PREP_MAX_D + col);
        sum               = make_float4(sum.x + R * mean.x, sum.y + R * mean.y, sum.z + R * mean.z, sum.w + R * mean.w);
    }
    *dst = sum;
}

// dK (z = 0) and dV (z = 1) from the ranges of rows. Grid: blocks of 4 components of a key each, units, 2.
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_mma_finish_dkdv(const fattn_back_mma_params p) {
    const int D          = blockIdx.z == 0 ? p.a.Dk : p.a.Dv;
    float * out          = blockIdx.z == 0 ? p.a.dK : p.a.dV;
    const float * part   = blockIdx.z == 0 ? p.part_k : p.part_v;
    const int64_t j      = ((int64_t) blockIdx.x * FATTN_BACK_PREP_THREADS + threadIdx.x) * 4;
    const int64_t stride = (int64_t) p.a.kv_count * D; // of a unit
    if (out == nullptr || j >= stride) {
        return;
    }
    float4 * dst = (float4 *) (out + (p.unit0 + blockIdx.y) * stride + j);
    float4 sum   = p.accumulate ? *dst : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = 0; i < p.nranges; ++i) {
        const float4 x = *(const float4 *) (part + ((int64_t) i * p.units + blockIdx.y) * stride + j);
        sum            = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
    }
    *dst = sum;
}
