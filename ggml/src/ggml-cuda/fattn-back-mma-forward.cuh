#pragma once

// The forward of the mma path: O and LSE for a training graph, or LSE and D for a backward without what a forward has saved. The sum that E
// is divided by is that of the rounded E, and D = dO . O of the rounded dO: so D is the mean of the very dP that the backward subtracts it from.

#include "fattn-back-mma-prep.cuh"

#define FATTN_BACK_FORWARD_ROWS   128 // of a block: two row blocks
#define FATTN_BACK_FORWARD_LAZY   2.0f // the running maximum may lag by this power of two
#define FATTN_BACK_FORWARD_START  4 // granules whose time a block takes to start and to end
#define FATTN_BACK_FORWARD_SPLITS 32

struct fattn_back_forward_config {
    int nm;      // 16 rows of a warp
    int nblocks; // of a multiprocessor
    int keys;    // of a stage
    int cols;    // whose S is in registers
    int stages;

    constexpr __host__ __device__ int nthreads() const { return FATTN_BACK_FORWARD_ROWS / (16 * nm) * WARP_SIZE; }
};

// Shared memory of a block: Q, stages of K and V, what it owns, the rows' scales, the stages' items.
template <int Dk, int Dv>
struct fattn_back_forward_smem {
    static constexpr int kv    = fattn_back_mma_tile<Dk>::pitch + fattn_back_mma_tile<Dv>::pitch; // of a key
    static constexpr int q     = FATTN_BACK_FORWARD_ROWS * fattn_back_mma_tile<Dk>::pitch;
    static constexpr int place = 32;

    static constexpr __host__ __device__ int stage(const fattn_back_forward_config & c) { return c.keys * kv; }
    static constexpr __host__ __device__ int own(const fattn_back_forward_config & c) { return q + c.stages * stage(c); }
    static constexpr __host__ __device__ int scales(const fattn_back_forward_config & c) { return own(c) + place; }
    static constexpr __host__ __device__ int meta(const fattn_back_forward_config & c) {
        return scales(c) + FATTN_BACK_FORWARD_ROWS * (int) sizeof(float);
    }
    static constexpr __host__ __device__ int bytes(const fattn_back_forward_config & c) { return meta(c) + c.stages * (int) sizeof(int2); }
};

// Two warps a scheduler. Where shared memory is fast beside the tensor cores a warp may have as few as 16 rows.
template <int Dk, int Dv>
static constexpr __host__ __device__ fattn_back_forward_config fattn_back_forward_get_config(const int arch) {
    using L                     = fattn_back_forward_smem<Dk, Dv>;
    const int smem              = fattn_back_mma_smem(arch);
    fattn_back_forward_config c = {};
    c.nm                        = smem > 99 * 1024 && Dv <= 128 ? 2 : 1;
    c.nblocks                   = c.nm;
    const int room              = (smem - 1024 * (c.nblocks - 1)) / c.nblocks - L::bytes(c);
    for (c.keys = FATTN_BACK_MMA_GRANULE; c.stages < 2; c.keys /= 2) {
        const int stages = room / (L::stage(c) + (int) sizeof(int2));
        c.stages         = stages < 4 ? stages : 4;
        c.cols           = c.nm * Dv > 128 && c.keys > 32 && c.nm > 1 ? 32 : c.keys;
        if (c.stages >= 2) {
            break;
        }
    }
    return c;
}

// what a block owns
struct alignas(16) fattn_back_forward_place {
    int lunit;
    int b;    // first of the two row blocks
    int split;
    int ngranules; // of the split
    int row0; // among the group's, which are fewer than 2^31
    int key0;
};

// The keys that a split has: every nsplits-th granule. Grid: bands of units whose K and V fit the L2 cache; in a band the rows with most to
// do under a causal mask first, of all its units. Block: two row blocks of a unit, 16 or 32 rows a warp with S, E and O in registers.
template <int Dk, int Dv, bool softcap>
static __global__ void __launch_bounds__(fattn_back_forward_get_config<Dk, Dv>(FATTN_BACK_MMA_ARCH).nthreads(), fattn_back_forward_get_config<Dk, Dv>(FATTN_BACK_MMA_ARCH).nblocks)
flash_attn_back_mma_forward(const fattn_back_mma_params p) {
#ifdef AMPERE_MMA_AVAILABLE
    constexpr fattn_back_forward_config c = fattn_back_forward_get_config<Dk, Dv>(__CUDA_ARCH__);
    using L                               = fattn_back_forward_smem<Dk, Dv>;
    using TK                              = fattn_back_mma_tile<Dk>;
    using TV                              = fattn_back_mma_tile<Dv>;
    constexpr int nm                      = c.nm;
    constexpr int nn                      = c.cols / 8;
    constexpr int pk                      = fattn_back_mma_pitch(Dk);
    constexpr int pv                      = fattn_back_mma_pitch(Dv);
    static_assert(c.stages >= 2 && c.keys % c.cols == 0, "bad configuration");

    extern __shared__ __align__(128) char smem[];
    const uint32_t base = fattn_back_shared(smem);
    int2 * meta         = (int2 *) (smem + L::meta(c));
    const int lane      = threadIdx.x % WARP_SIZE;
    const int warp      = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP_SIZE, 0); // known to be uniform
    const int wr        = warp * nm * 16; // the warp's first row of the block's
    const int own       = wr / FATTN_BACK_MMA_ROWS; // its row block
    const int g         = lane / 4;
    const int c2        = lane % 4 * 2;

    const volatile fattn_back_forward_place & place = *(fattn_back_forward_place *) (smem + L::own(c)); // read where it is needed
    if (threadIdx.x == 0) {
        const int ntiles                                 = p.rblocks / 2 * p.nsplits;
        const int band                                   = blockIdx.x / (p.band * ntiles);
        const int rest                                   = blockIdx.x % (p.band * ntiles);
        const int nunits                                 = min(p.band, p.units - band * p.band);
        const int lunit                                  = band * p.band + rest % nunits;
        const int tile                                   = p.rblocks / 2 - 1 - rest / nunits / p.nsplits;
        const int split                                  = rest / nunits % p.nsplits;
        *(fattn_back_forward_place *) (smem + L::own(c)) = {
            lunit, p.rb0 + 2 * tile, split, (2 * p.KT - split + p.nsplits - 1) / p.nsplits,
            (int) (lunit * p.rows()) + tile * FATTN_BACK_FORWARD_ROWS, (int) (lunit * p.keys())
        };
    }
    __syncthreads();
    if (p.fresh[p.unit0 + place.lunit] == 0 || (p.again && p.large[p.unit0 + place.lunit] == 0)) {
        return;
    }

    float * scales = (float *) (smem + L::scales(c)); // log2(e) x = scale * product of the operands
    for (int i = threadIdx.x; i < FATTN_BACK_FORWARD_ROWS; i += c.nthreads()) {
        scales[i] = exp2f(-p.exp_q[place.row0 + i] - p.exp_k[place.lunit]);
    }
    const volatile float * scale = scales + wr + g;
    fattn_back_mma_load<Dk, FATTN_BACK_FORWARD_ROWS, c.nthreads()>(base, p.q_hi + (int64_t) place.row0 * pk);

    // Loads the next keys that one of the row blocks sees; an item is the first of them (-1: no more) and both states.
    int first       = -WARP_SIZE; // of 32 granules, one a lane
    int states      = 0;
    uint32_t todo   = 0;
    int piece       = 0; // of a granule
    const auto load = [&](const int stage) {
        while (todo == 0 && first + WARP_SIZE < place.ngranules) {
            first += WARP_SIZE;
            states = 0;
            if (first + lane < place.ngranules) {
                const int gr   = (first + lane) * p.nsplits + place.split;
                const int unit = p.unit0 + place.lunit;
                states         = fattn_back_mma_tile_row(p, unit, place.b).granule(gr) | fattn_back_mma_tile_row(p, unit, place.b + 1).granule(gr) << 2;
            }
            todo = __ballot_sync(0xFFFFFFFF, states != 0);
        }
        const int i = max(__ffs(todo) - 1, 0);
        int2 item   = make_int2(-1, __shfl_sync(0xFFFFFFFF, states, i));
        if (todo != 0) {
            item.x             = ((first + i) * p.nsplits + place.split) * FATTN_BACK_MMA_GRANULE + piece * c.keys;
            piece              = (piece + 1) % (FATTN_BACK_MMA_GRANULE / c.keys);
            todo               = piece == 0 ? todo & (todo - 1) : todo;
            const uint32_t dst = base + L::q + stage * L::stage(c);
            fattn_back_mma_load<Dk, c.keys, c.nthreads()>(dst, p.k_hi + (int64_t) (place.key0 + item.x) * pk);
            fattn_back_mma_load<Dv, c.keys, c.nthreads()>(dst + c.keys * TK::pitch, p.v + (int64_t) (place.key0 + item.x) * pv);
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

    const uint32_t q_src = base + fattn_back_mma_at_a<TK>(wr, 0);
    const uint32_t k_src = base + L::q + fattn_back_mma_at_b<TK>(0, 0);
    const uint32_t v_src = base + L::q + c.keys * TK::pitch + fattn_back_mma_at_a<TV>(0, 0);

    const auto note = [&](const float x) { // |log2(e) x| that matters
        if (x > FATTN_BACK_MMA_HILO_LIMIT) {
            uint32_t * large   = p.large + p.unit0 + place.lunit;
            const uint32_t now = x > FATTN_BACK_GUARD_PEAKED ? FATTN_BACK_MMA_PEAKED : FATTN_BACK_MMA_LARGE;
            if (*large < now) {
                atomicMax(large, now);
            }
        }
        if (x > FATTN_BACK_GUARD_LOGIT) {
            p.guard.raise(p.unit0 + place.lunit, FATTN_BACK_GUARD_F32);
        }
    };
    // of the rows g and g + 8 of each 16
    float m[nm][2];     // the maximum that E is relative to
    float l[nm][2];     // sum of the rounded E
    float O[nm][Dv / 8][4];
    fattn_back_mma_zero(O);
#pragma unroll
    for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            m[mi][r] = -INFINITY;
            l[mi][r] = 0.0f;
        }
    }

    int stage = 0;
#pragma unroll 1
    while (true) {
        fattn_back_cp_async_wait<c.stages - 2>();
        __syncthreads();
        const int2 item = meta[stage];
        if (item.x < 0) {
            break;
        }
        load(stage == 0 ? c.stages - 1 : stage - 1);
        const uint32_t at = stage * L::stage(c);
        stage             = stage + 1 == c.stages ? 0 : stage + 1;
        const int now     = item.y >> 2 * own & 3;
        if (now == FATTN_BACK_TILE_SKIP) {
            continue;
        }
        const bool mixed  = now == FATTN_BACK_TILE_MIXED;
        const bool scaled = softcap || mixed;
#pragma unroll 1
        for (int n0 = 0; n0 < c.keys; n0 += c.cols) {
            // S
            float S[nm][nn][4];
            fattn_back_mma_product<Dk>(S, q_src, k_src + at + n0 * TK::pitch);
            if (p.again) {
                fattn_back_mma_add_low<Dk>(S, q_src, k_src + at + n0 * TK::pitch, p.q_lo + (int64_t) (place.row0 + wr) * pk,
                    p.k_lo + (int64_t) (place.key0 + item.x + n0) * pk);
            }
            if (scaled) {
                float big = 0.0f;
#pragma unroll
                for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
                    for (int ni = 0; ni < nn; ++ni) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            S[mi][ni][i] *= scale[mi * 16 + i / 2 * 8];
                            big = fmaxf(big, fabsf(S[mi][ni][i]));
                        }
                    }
                }
                note(big);
                float u[nm][softcap ? nn : 1][4];
                const float before = fattn_back_mma_logits<softcap>(
                    p, S, u, p.unit0 + place.lunit, place.b + own, wr % FATTN_BACK_MMA_ROWS, item.x + n0, p.dot_q + place.row0 + wr, mixed);
                if (softcap && before > FATTN_BACK_GUARD_SOFTCAP * FATTN_BACK_MMA_LOG2E * p.a.logit_softcap) {
                    p.guard.raise(p.unit0 + place.lunit, FATTN_BACK_GUARD_F32);
                }
            }
            // E
            uint32_t E16[nn / 2][nm][4];
#pragma unroll
            for (int mi = 0; mi < nm; ++mi) {
                float alpha[2] = { 1.0f, 1.0f };
                float f[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float top = -INFINITY;
#pragma unroll
                    for (int ni = 0; ni < nn; ++ni) {
                        top = fmaxf(top, fmaxf(S[mi][ni][2 * r], S[mi][ni][2 * r + 1]));
                    }
                    f[r] = scaled ? 1.0f : scale[mi * 16 + r * 8];
                    top  = fattn_back_quad_max(top) * f[r];
                    note(scaled ? 0.0f : top);
                    if (top > m[mi][r] + FATTN_BACK_FORWARD_LAZY) {
                        alpha[r] = fattn_back_exp2(m[mi][r] - top);
                        m[mi][r] = top;
                    }
                }
                if (__any_sync(0xFFFFFFFF, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        l[mi][r] *= alpha[r];
#pragma unroll
                        for (int ni = 0; ni < Dv / 8; ++ni) {
                            O[mi][ni][2 * r + 0] *= alpha[r];
                            O[mi][ni][2 * r + 1] *= alpha[r];
                        }
                    }
                }
                float sum[4] = { 0.0f }; // of the rounded E: a product with ones
#pragma unroll
                for (int ni = 0; ni < nn; ++ni) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const float shift               = m[mi][r] == -INFINITY ? 0.0f : FATTN_BACK_MMA_SHIFT_E - m[mi][r];
                        E16[ni / 2][mi][ni % 2 * 2 + r] = fattn_back_mma_pack(
                            fattn_back_exp2(fmaf(S[mi][ni][2 * r + 0], f[r], shift)), fattn_back_exp2(fmaf(S[mi][ni][2 * r + 1], f[r], shift)));
                    }
                    if (ni % 2 == 1) {
                        fattn_back_mma(sum, E16[ni / 2][mi], 0x3C003C00, 0x3C003C00);
                    }
                }
                l[mi][0] += sum[0];
                l[mi][1] += sum[2];
            }
            // O
#pragma unroll
            for (int k = 0; k < nn / 2; ++k) {
                fattn_back_mma_accumulate<TV>(O, E16[k], v_src + at + (n0 + k * 16) * TV::pitch);
            }
        }
    }
    fattn_back_cp_async_wait<0>();

    const int lunit     = place.lunit;
    const int unit      = p.unit0 + lunit;
    const int b         = place.b + own;
    const float unscale = exp2f(-p.exp_v[lunit]);
#pragma unroll
    for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i       = wr + mi * 16 + r * 8 + g;
            const int64_t row = place.row0 + i;
            const int q       = p.query(b) + i % FATTN_BACK_MMA_ROWS;
            const int h       = p.head(unit, b);
            const float mass  = l[mi][r];
            const float inv   = mass > 0.0f ? 1.0f / mass : 0.0f;
            const float lse   = mass > 0.0f ? m[mi][r] - FATTN_BACK_MMA_SHIFT_E + log2f(mass) : -INFINITY;
            note(m[mi][r] == -INFINITY ? 0.0f : -m[mi][r]); // all keys of the row have as large a logit
            float D = 0.0f;
            if (p.a.O == nullptr) {
#pragma unroll
                for (int ni = 0; ni < Dv / 8; ++ni) {
                    const float2 dO = __half22float2(*(const half2 *) (p.dO + row * pv + ni * 8 + c2));
                    D += dO.x * O[mi][ni][2 * r] + dO.y * O[mi][ni][2 * r + 1];
                }
                D = fattn_back_quad_sum(D) * inv;
            } else if (p.nsplits == 1) {
                if (q < p.a.N) {
                    const fattn_back_mma_softmax softmax(p.a, lse, p.dot_q[row], h);
                    float * dst        = p.a.O + ((int64_t) (unit / p.a.Hkv * p.a.N + q) * p.a.H + h) * p.a.Dv + c2;
                    const float * mean = p.mean_v + lunit * FATTN_BACK_PREP_MAX_D + c2;
#pragma unroll
                    for (int ni = 0; ni < Dv / 8; ++ni) {
                        if (ni * 8 + c2 < p.a.Dv) {
                            *(float2 *) (dst + ni * 8) = make_float2(softmax.keys * (O[mi][ni][2 * r + 0] * inv * unscale + mean[ni * 8 + 0]),
                                softmax.keys * (O[mi][ni][2 * r + 1] * inv * unscale + mean[ni * 8 + 1]));
                        }
                    }
                    if (p.a.saved.stamp != nullptr && lane % 4 == 0) {
                        p.a.saved.lse[p.a.row(q, h, unit / p.a.Hkv)] = lse;
                    }
                }
                continue;
            } else {
                float * dst = p.part_o + ((int64_t) place.split * p.units * p.rows() + row) * p.a.Dv + c2;
#pragma unroll
                for (int ni = 0; ni < Dv / 8; ++ni) {
                    if (ni * 8 + c2 < p.a.Dv) {
                        *(float2 *) (dst + ni * 8) = make_float2(O[mi][ni][2 * r + 0] * inv, O[mi][ni][2 * r + 1] * inv);
                    }
                }
            }
            if (lane % 4 == 0) {
                p.sums[(int64_t) place.split * p.units * p.rows() + row] = make_float2(lse, D);
            }
        }
    }
#else
    GGML_UNUSED(p);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

// LSE of a row's splits; weight: of each
template <typename F>
static __device__ __forceinline__ float fattn_back_forward_merge(const fattn_back_mma_params & p, const int64_t row, const int nsplits, const F & weigh) {
    const float2 * sums  = p.sums + row;
    const int64_t stride = p.units * p.rows();
    float top            = -INFINITY;
    for (int i = 0; i < nsplits; ++i) {
        top = fmaxf(top, sums[i * stride].x);
    }
    if (top == -INFINITY) {
        return -INFINITY;
    }
    float mass = 0.0f;
    for (int i = 0; i < nsplits; ++i) {
        mass += exp2f(sums[i * stride].x - top);
    }
    const float lse = nsplits == 1 ? top : top + log2f(mass);
    for (int i = 0; i < nsplits; ++i) {
        const float2 x = sums[i * stride];
        weigh(i, nsplits == 1 ? 1.0f : exp2f(x.x - top) / mass, x.y);
    }
    return lse;
}

// O and LSE from the splits. Grid: blocks of 4 components of a row each, units.
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_mma_merge(const fattn_back_mma_params p) {
    const int unit    = p.unit0 + blockIdx.y;
    const int n       = p.a.Dv / 4;
    const int64_t j   = (int64_t) blockIdx.x * FATTN_BACK_PREP_THREADS + threadIdx.x;
    const int lrow    = j / n;
    const int col     = j % n * 4;
    const int b       = p.rb0 + lrow / FATTN_BACK_MMA_ROWS;
    const int q       = p.query(b) + lrow % FATTN_BACK_MMA_ROWS;
    const int h       = p.head(unit, b);
    const int64_t row = blockIdx.y * p.rows() + lrow;
    if (lrow >= p.rows() || q >= p.a.N || (p.again && p.large[unit] == 0)) {
        return;
    }
    float4 o        = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float lse = fattn_back_forward_merge(p, row, p.nsplits, [&](const int i, const float weight, float) {
        const float4 x = *(const float4 *) (p.part_o + ((int64_t) i * p.units * p.rows() + row) * p.a.Dv + col);
        o              = make_float4(o.x + weight * x.x, o.y + weight * x.y, o.z + weight * x.z, o.w + weight * x.w);
    });
    const fattn_back_mma_softmax softmax(p.a, lse, p.dot_q[row], h);
    const float unscale = exp2f(-p.exp_v[blockIdx.y]);
    const float4 mean   = *(const float4 *) (p.mean_v + blockIdx.y * FATTN_BACK_PREP_MAX_D + col);
    const int s         = unit / p.a.Hkv;
    *(float4 *) (p.a.O + ((int64_t) (s * p.a.N + q) * p.a.H + h) * p.a.Dv + col) =
        make_float4(softmax.keys * (o.x * unscale + mean.x), softmax.keys * (o.y * unscale + mean.y), softmax.keys * (o.z * unscale + mean.z),
            softmax.keys * (o.w * unscale + mean.w));
    if (col == 0 && p.a.saved.stamp != nullptr) {
        p.a.saved.lse[p.a.row(q, h, s)] = lse;
    }
}

// LSE and D of the result, and what the backward needs of a row. Grid: blocks of rows, units.
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_mma_stats(const fattn_back_mma_params p) {
    const int lunit = blockIdx.y;
    const int unit  = p.unit0 + lunit;
    const int lrow  = blockIdx.x * FATTN_BACK_PREP_THREADS + threadIdx.x;
    const int b     = p.rb0 + lrow / FATTN_BACK_MMA_ROWS;
    const int q     = p.query(b) + lrow % FATTN_BACK_MMA_ROWS;
    const int h     = p.head(unit, b);
    if (lrow >= p.rows()) {
        return;
    }
    const int64_t row = lunit * p.rows() + lrow;
    float D           = 0.0f; // in dP's units, without what dO . mean(V) adds to it
    const float lse   = fattn_back_forward_merge(
        p, row, p.fresh[unit] != 0 ? p.nsplits : 1, [&](const int, const float weight, const float x) { D += weight * x; });
    const float e_q    = p.exp_q[row];
    const float e_dO   = p.exp_dO[row];
    const float dot_q  = p.a.logit_softcap != 0.0f ? 0.0f : p.dot_q[row];
    const float dot_dO = p.dot_dO[row];
    const fattn_back_mma_softmax softmax(p.a, lse, dot_q, h);
    const float part = D * softmax.keys * exp2f(-e_dO - p.exp_v[lunit]);
    const float Draw = part + dot_dO * softmax.keys;
    p.guard.note((int64_t) unit * p.a.G + b % p.a.G, q < p.a.N ? Draw : 0.0f, q < p.a.N ? part : 0.0f);
    const float d_sink = softmax.sink * dot_dO;
    D *= softmax.keys;
    D -= d_sink != 0.0f ? d_sink * exp2f(e_dO + p.exp_v[lunit]) : 0.0f; // the exponent of a row of zeros is large

    // the rows of a unit share the weight that P has as an operand, as do those of dS once they are multiplied with their weights
    const bool on   = softmax.any && q < p.a.N;
    const float e_P = p.exp_dO_min[lunit] - e_dO;
    const float f   = exp2f(fminf(-e_P, 100.0f));
    p.stat[row]     = make_float4(
        exp2f(-e_q - p.exp_k[lunit]), on ? FATTN_BACK_MMA_SHIFT_P + e_P - softmax.lse : -INFINITY, f, f * D);
    p.weight[row] = __float2half_rn(exp2f(p.exp_q_min[lunit] - e_q - fminf(-e_P, 100.0f)));
    if (p.R != nullptr) {
        p.R[row] = softmax.sink * Draw;
    }
    if (q < p.a.N) {
        const int64_t i = p.a.row(q, h, unit / p.a.Hkv);
        p.a.LSE[i]      = softmax.inf || softmax.all ? p.a.sinks[h] : (softmax.lse + dot_q) / FATTN_BACK_MMA_LOG2E;
        p.a.D[i]        = Draw;
    }
}
