#pragma once

// The forward: O and LSE, or for a backward that starts from nothing LSE and D.

#include "fattn-back-hopper-common.cuh"

// Shared memory: nwg tiles of Q, rings of kn tiles of K and of V; hilo: Q and K in two halves.
template <int D, int nwg, int kn, int stages, bool hilo>
struct fattn_back_hopper_smem_forward {
    static constexpr int tile    = FATTN_BACK_HOPPER_ROWS * D * 2;
    static constexpr int tile1   = hilo ? 2 * tile : tile;
    static constexpr int ring1   = nwg * tile1;
    static constexpr int ring2   = ring1 + stages * kn * tile1;
    static constexpr int ones    = ring2 + stages * kn * tile; // 8 rows of ones
    static constexpr int meta    = ones + 1024;
    static constexpr int stat    = meta; // none
    static constexpr int slots   = meta + stages * 16; // items asked for
    static constexpr int own     = slots + 8;          // Q is here, a barrier a warpgroup
    static constexpr int full1   = own + nwg * 8;
    static constexpr int empty1  = full1 + stages * 8;
    static constexpr int full2   = empty1 + stages * 8;
    static constexpr int empty2  = full2 + stages * 8;
    static constexpr int bytes   = empty2 + stages * 8;
    static constexpr int stages1 = stages;
    static constexpr int stages2 = stages;
    static constexpr int groups  = nwg;
    static_assert(bytes <= 232448, "more than a multiprocessor has");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A thread's two rows of the softmax: row 16*warp + lane/4 of a tile and the one 8 below.
struct fattn_back_hopper_softmax {
    float m[2] = { -INFINITY, -INFINITY }; // the maximum that E is relative to
    float l[4] = { 0.0f };                 // the sum of E16: of either row in [0] and [2]

    // takes the maximum of S; returns whether the warp's maxima moved, and by which factors
    template <int kn>
    __device__ __forceinline__ bool maximum(const float (&S)[kn][32], const float sc, float (&alpha)[2]) {
        float y[2 * kn]; // of a row's columns two at a time if registers allow it: one after the other they wait for each other
#pragma unroll
        for (float & m : y) {
            m = -INFINITY;
        }
#pragma unroll
        for (int i = 0; i < 32 * kn; ++i) {
            float & m = y[i % 4 / (kn == 1 ? 2 : 1)];
            m         = fmaxf(m, S[i / 32][i % 32]);
        }
        float x[2] = { fmaxf(y[0], y[kn - 1]), fmaxf(y[kn], y[2 * kn - 1]) };
        const bool moved =
            __any_sync(0xFFFFFFFF, x[0] * sc > m[0] + FATTN_BACK_HOPPER_LAZY || x[1] * sc > m[1] + FATTN_BACK_HOPPER_LAZY);
        alpha[0] = 1.0f;
        alpha[1] = 1.0f;
        if (moved) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                x[r] = sc * fattn_back_hopper_quad_max(x[r]);
                if (x[r] > m[r] + FATTN_BACK_HOPPER_LAZY) {
                    alpha[r] = hopper_exp2(m[r] - x[r]);
                    m[r]     = x[r];
                }
            }
        }
        return moved;
    }

    // S to E16, the operand of the next product
    template <int kn>
    __device__ __forceinline__ void exponentials(uint32_t (&E16)[kn][16], const float (&S)[kn][32], const float sc) {
        const float base[2] = { m[0] == -INFINITY ? 0.0f : FATTN_BACK_HOPPER_SHIFT_E - m[0],
            m[1] == -INFINITY ? 0.0f : FATTN_BACK_HOPPER_SHIFT_E - m[1] };
#pragma unroll
        for (int i = 0; i < 16 * kn; ++i) {
            const float * x     = S[i / 16] + i % 16 * 2;
            E16[i / 16][i % 16] = hopper_pack(hopper_exp2(fmaf(x[0], sc, base[i % 2])), hopper_exp2(fmaf(x[1], sc, base[i % 2])));
        }
    }

    // Adds up E16: a product with ones, since the warps have more to do than the tensor cores. One group; ones: 8 rows of them
    template <int kn>
    __device__ __forceinline__ void add(const uint32_t (&E16)[kn][16], const uint32_t ones) {
        hopper_wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4 * kn; ++i) {
            hopper_wgmma(l, E16[i / 4] + i % 4 * 4, hopper_desc(ones));
        }
        hopper_wgmma_commit();
    }
};

// dO16 . O over a row of accumulators [64 x D] of a tile; r: the thread's first or second row
template <int D>
static __device__ __forceinline__ float fattn_back_hopper_dot_do(
    const fattn_back_hopper_params & p, const float (&O)[D / 2], const int tile, const int r) {
    const int row   = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
    const char * dO = (const char *) p.dO + (int64_t) tile * FATTN_BACK_HOPPER_ROWS * D * 2 + row * 128 + threadIdx.x % 4 * 4;
    float sum       = 0.0f;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
        const float2 x = __half22float2(*(const half2 *) (dO + j / 8 * FATTN_BACK_HOPPER_PANEL + (j % 8 ^ row % 8) * 16));
        sum            = fmaf(O[4 * j + 2 * r + 0], x.x, sum);
        sum            = fmaf(O[4 * j + 2 * r + 1], x.y, sum);
    }
    return fattn_back_hopper_quad_sum(sum);
}

// What a warpgroup's rows of a query tile have come to: O, or LSE and D, or a share's part of them
template <int D, bool hilo>
static __device__ __forceinline__ void fattn_back_hopper_put_rows(const fattn_back_hopper_params & p, const float (&O)[D / 2],
    const fattn_back_hopper_softmax & rows, const float4 scale, const int unit, const int tile, const int split) {
    const int lhead  = tile / p.QT;
    const int qt     = tile % p.QT;
    const bool whole = p.sums == nullptr; // the item has all keys of its rows
    if (!hilo && whole) {
        // of the other pairs of a row only those near its maximum have a P that matters
        fattn_back_hopper_note(p, unit, fmaxf(rows.m[0] == -INFINITY ? 0.0f : fabsf(rows.m[0]), rows.m[1] == -INFINITY ? 0.0f : fabsf(rows.m[1])));
    }
    const int row       = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const float2 * mean = (const float2 *) (p.mean_v + (int64_t) (p.unit0 + unit) * FATTN_BACK_PREP_MAX_D) + threadIdx.x % 4;
    float4 common[2]; // what is read stands before what is written, so that one does not wait for the other
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        common[r] = p.rows[(int64_t) tile * FATTN_BACK_HOPPER_ROWS + row + 8 * r];
    }
    float factor[2];
    float pkeys[2] = { 0.0f, 0.0f }; // without a part of V's mean in a share's
    float * dst[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int q      = qt * FATTN_BACK_HOPPER_ROWS + row + 8 * r;
        const int h      = fattn_back_hopper_head(p, lhead);
        const int s      = fattn_back_hopper_seq(p, lhead);
        const float sum  = rows.l[2 * r];
        const float inv  = sum > 0.0f ? 1.0f / sum : 0.0f;
        const float keys = sum > 0.0f ? rows.m[r] - FATTN_BACK_HOPPER_SHIFT_E + log2f(sum) : -INFINITY;
        const bool first = threadIdx.x % 4 == 0;
        factor[r]        = inv;
        if (p.a.O == nullptr) {
            const float D_i = inv * fattn_back_hopper_dot_do<D>(p, O, tile, r);
            if (whole) {
                fattn_back_hopper_finish(p, lhead, q, scale, common[r], keys, D_i, first);
            } else if (first) {
                fattn_back_hopper_sum(p, lhead, split, 2, q) = D_i;
            }
        } else if (whole) {
            pkeys[r]  = fattn_back_hopper_finish(p, lhead, q, scale, common[r], keys, 0.0f, false);
            factor[r] = pkeys[r] * inv / scale.z;
            dst[r]    = p.a.O + (((int64_t) s * p.a.N + q) * p.a.H + h) * D;
            if (first && q < p.a.N) {
                p.a.saved.lse[p.a.row(q, h, s)] = keys;
            }
        } else {
            dst[r] = fattn_back_hopper_plane<D>(p, lhead, p.nsplits, split, q);
        }
        if (!whole && first) {
            fattn_back_hopper_sum(p, lhead, split, 0, q) = rows.m[r];
            fattn_back_hopper_sum(p, lhead, split, 1, q) = sum;
        }
    }
    if (p.a.O == nullptr) {
        return;
    }
#pragma unroll
    for (int j0 = 0; j0 < D / 8; j0 += 8) {
        float2 x[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            x[j] = mean[4 * (j0 + j)];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (qt * FATTN_BACK_HOPPER_ROWS + row + 8 * r < p.a.N) {
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float * y = O + 4 * (j0 + j) + 2 * r;
                    *(float2 *) (dst[r] + 8 * (j0 + j) + threadIdx.x % 4 * 2) =
                        make_float2(fmaf(pkeys[r], x[j].x, y[0] * factor[r]), fmaf(pkeys[r], x[j].y, y[1] * factor[r]));
                }
            }
        }
    }
}

#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)

// An item is nwg query tiles and a share of the keys. Grid: as many blocks as the device holds at a time, each takes one item after the other. Block:
// nwg warpgroups with 64 queries each, then the one that fills the rings, also for the next item. S of the next keys is on its way
// before O takes what the exponentials of these have given.
template <int D, int nwg, int kn, int stages, bool hilo>
static __global__ void __launch_bounds__((nwg + 1) * 128, 1) flash_attn_back_hopper_forward(const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using L = fattn_back_hopper_smem_forward<D, nwg, kn, stages, hilo>;
    extern __shared__ __align__(1024) char smem_ptr[];
    const uint32_t smem = hopper_smem(smem_ptr);
    if (!fattn_back_hopper_any(
            p, [&](const int unit) { return fattn_back_hopper_unknown(p, unit) && (!hilo || fattn_back_hopper_large(p, unit)); })) {
        return;
    }
    fattn_back_hopper_init<L>(smem, 128 * nwg);
    hopper_barrier_init_done();
    if (threadIdx.x < 256) {
        *(uint32_t *) (smem_ptr + L::ones + 4 * threadIdx.x) = 0x3C003C00;
    }
    hopper_fence();
    __syncthreads();
    const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0); // uniform for the compiler, too
    const int wg    = nwg > 1 ? group : 0;

    if (group == nwg) {
        if constexpr (nwg > 1) {
            hopper_registers_dec<fattn_back_hopper_regs_fill<D / 2>>();
        }
        fattn_back_hopper_fill<L>([&](auto filler) {
            fattn_back_hopper_take<filler.leads>(p, (int *) (smem_ptr + L::slots), [&](const int i) {
                const fattn_back_hopper_item_q item(p, i, nwg, p.nsplits);
                if (fattn_back_hopper_unknown(p, item.unit) && (!hilo || fattn_back_hopper_large(p, item.unit))) {
                    filler.announce(smem_ptr, i);
                    filler.template fill_keys<kn>(p, smem_ptr, item, p.nsplits);
                }
            });
            filler.announce(smem_ptr, p.items.count());
        });
        return;
    }
    if constexpr (nwg > 1) {
        hopper_registers_inc<fattn_back_hopper_regs<D / 2>>();
    }
    const uint32_t own = smem + wg * L::tile1;
    fattn_back_hopper_reader<L> reader(smem_ptr);
    fattn_back_hopper_ring<stages> ring2;
    fattn_back_hopper_turns<(nwg == 2)> turns(wg);

    const auto release = [&]() { // the stage at hand; on to the next
        hopper_barrier_arrive(smem + L::empty1 + 8 * reader.ring.stage);
        reader.next();
    };
    const auto take = [&]() { // the item that the ring tells of; its Q is asked for as soon as no product reads the last one's
        const int next = reader.item();
        reader.ahead   = 0;
        if (next < p.items.count()) {
            hopper_named_sync<128>(3 + wg);
            if (threadIdx.x % 128 == 0) {
                const fattn_back_hopper_item_q item(p, next, nwg, p.nsplits);
                hopper_barrier_expect(smem + L::own + 8 * wg, L::tile1);
                hopper_load(own, (const char *) p.q + (int64_t) min(item.t0 + wg, item.end - 1) * L::tile1, L::tile1, smem + L::own + 8 * wg);
            }
        }
        return next;
    };
    int i = take();
    for (uint32_t parity = 0; hopper_any(i < p.items.count()); parity ^= 1) {
        hopper_barrier_wait(smem + L::full2 + 8 * ring2.stage, ring2.parity); // the stage of V that comes with an item's number
        hopper_barrier_arrive(smem + L::empty2 + 8 * ring2.stage);
        ring2.next();
        release();
        const fattn_back_hopper_item_q item(p, i, nwg, p.nsplits);
        const int unit     = item.unit;
        const float4 scale = p.scale[p.unit0 + unit];
        const float sc     = fattn_back_hopper_unit(p, scale);
        const int tile     = min(item.t0 + wg, item.end - 1);
        const int lhead    = tile / p.QT;
        const int qt       = tile % p.QT;

        float O[D / 2];
#pragma unroll
        for (float & x : O) {
            x = 0.0f;
        }
        uint32_t E16[kn][16];
        fattn_back_hopper_softmax rows;
        hopper_barrier_wait(smem + L::own + 8 * wg, parity);

        const auto scores = [&](float (&S)[kn][32]) {
#pragma unroll
            for (int j = 0; j < kn; ++j) {
                fattn_back_hopper_product<D, hilo>(S[j], own, smem + L::ring1 + (reader.ring.stage * kn + j) * L::tile1);
            }
        };
        const auto mask = [&](float (&S)[kn][32]) {
#pragma unroll
            for (int j = 0; j < kn; ++j) {
                const uint32_t state = reader.state(wg * kn + j);
                if (state != FATTN_BACK_TILE_FULL) {
                    const float x = sc * fattn_back_hopper_mask<false, (D > 64)>(S[j], p, state, fattn_back_hopper_mask_index(p, lhead), lhead, qt, reader.meta().tile + j, sc);
                    if (!hilo) {
                        fattn_back_hopper_note(p, unit, x);
                    }
                }
            }
        };
        const auto accumulate = [&]() {
            hopper_barrier_wait(smem + L::full2 + 8 * ring2.stage, ring2.parity);
#pragma unroll
            for (int j = 0; j < kn; ++j) {
                fattn_back_hopper_accumulate(O, E16[j], smem + L::ring2 + (ring2.stage * kn + j) * L::tile);
            }
            rows.add(E16, smem + L::ones);
        };

        float alpha[2];
        if constexpr (D == 256 && hilo) { // no registers for more than one thing at a time
            while (reader.tile()) {
                float S[kn][32];
                reader.wait();
                reader.peek();
                scores(S);
                hopper_wgmma_wait<0>();
                hopper_pin(S[0]);
                mask(S);
                release();
                if (rows.maximum(S, sc, alpha)) {
                    fattn_back_hopper_scale(O, alpha);
                    fattn_back_hopper_scale(rows.l, alpha);
                }
                rows.exponentials(E16, S, sc);
                accumulate();
                hopper_wgmma_wait<0>();
                hopper_pin(E16[0]);
                hopper_pin(O);
                hopper_pin(rows.l);
                hopper_barrier_arrive(smem + L::empty2 + 8 * ring2.stage);
                ring2.next();
            }
            i = take();
        } else if (reader.tile()) {
            {
                float S[kn][32];
                reader.wait();
                reader.peek();
                turns.take();
                scores(S);
                turns.pass();
                hopper_wgmma_wait<0>();
#pragma unroll
                for (int j = 0; j < kn; ++j) {
                    hopper_pin(S[j]);
                }
                mask(S);
                release();
                rows.maximum(S, sc, alpha);
                rows.exponentials(E16, S, sc);
            }
            while (reader.tile()) {
                float S[kn][32];
                reader.wait();
                reader.peek();
                turns.take();
                scores(S);
                accumulate();
                turns.pass();
                hopper_wgmma_wait<kn + 1>(); // S
#pragma unroll
                for (int j = 0; j < kn; ++j) {
                    hopper_pin(S[j]);
                }
                mask(S);
                release();
                const bool moved = rows.maximum(S, sc, alpha);
                hopper_wgmma_wait<0>(); // O: it was given out in full before S was there
#pragma unroll
                for (int j = 0; j < kn; ++j) {
                    hopper_pin(E16[j]);
                }
                hopper_barrier_arrive(smem + L::empty2 + 8 * ring2.stage);
                ring2.next();
                if (moved) {
                    fattn_back_hopper_scale(O, alpha);
                    fattn_back_hopper_scale(rows.l, alpha);
                }
                rows.exponentials(E16, S, sc);
            }
            accumulate();
            i = take();
            hopper_wgmma_wait<0>();
#pragma unroll
            for (int j = 0; j < kn; ++j) {
                hopper_pin(E16[j]);
            }
            hopper_pin(O);
            hopper_pin(rows.l);
            hopper_barrier_arrive(smem + L::empty2 + 8 * ring2.stage);
            ring2.next();
        } else {
            i = take();
        }

        if (item.t0 + wg < item.end) {
            fattn_back_hopper_put_rows<D, hilo>(p, O, rows, scale, unit, tile, item.split);
        }
    }
    turns.end();
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

// Puts together what blocks of forward have formed of shares of the keys. Grid: blocks of rows of the query tiles, heads.
template <int D, bool hilo>
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_hopper_combine(
    const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int n = D / 4; // threads of a row
    const int lhead = blockIdx.y;
    const int unit  = lhead / p.a.G;
    const int q     = (blockIdx.x * FATTN_BACK_PREP_THREADS + threadIdx.x) / n;
    const int col   = threadIdx.x % n * 4;
    if (q >= p.QT * FATTN_BACK_HOPPER_ROWS || !fattn_back_hopper_unknown(p, unit) || (hilo && !fattn_back_hopper_large(p, unit))) {
        return;
    }
    const float4 scale = p.scale[p.unit0 + unit];
    const float4 x     = p.rows[(int64_t) lhead * p.QT * FATTN_BACK_HOPPER_ROWS + q];
    float m            = -INFINITY;
    for (int i = 0; i < p.nsplits; ++i) {
        m = fmaxf(m, fattn_back_hopper_sum(p, lhead, i, 0, q));
    }
    const auto weight = [&](const int i) { // of the share's mean in the row's
        return m == -INFINITY ? 0.0f : hopper_exp2(fattn_back_hopper_sum(p, lhead, i, 0, q) - m) * fattn_back_hopper_sum(p, lhead, i, 1, q);
    };
    float sum = 0.0f;
    for (int i = 0; i < p.nsplits; ++i) {
        sum += weight(i);
    }
    const float inv  = sum > 0.0f ? 1.0f / sum : 0.0f;
    const float keys = sum > 0.0f ? m - FATTN_BACK_HOPPER_SHIFT_E + log2f(sum) : -INFINITY;
    if (!hilo && col == 0 && m != -INFINITY) {
        fattn_back_hopper_note(p, unit, fabsf(m));
    }
    if (p.a.O == nullptr) {
        float D_i = 0.0f;
        for (int i = 0; i < p.nsplits; ++i) {
            D_i = fmaf(weight(i) * inv, fattn_back_hopper_sum(p, lhead, i, 2, q), D_i);
        }
        fattn_back_hopper_finish(p, lhead, q, scale, x, keys, D_i, col == 0);
    } else if (q < p.a.N) {
        float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int i = 0; i < p.nsplits; ++i) {
            const float f  = weight(i) * inv;
            const float4 z = *(const float4 *) (fattn_back_hopper_plane<D>(p, lhead, p.nsplits, i, q) + col);
            y              = make_float4(fmaf(f, z.x, y.x), fmaf(f, z.y, y.y), fmaf(f, z.z, y.z), fmaf(f, z.w, y.w));
        }
        const int h        = fattn_back_hopper_head(p, lhead);
        const int s        = fattn_back_hopper_seq(p, lhead);
        const float pkeys  = fattn_back_hopper_finish(p, lhead, q, scale, x, keys, 0.0f, false);
        const float f      = pkeys / scale.z;
        const float * mean = p.mean_v + (int64_t) (p.unit0 + unit) * FATTN_BACK_PREP_MAX_D + col;
        if (col == 0) {
            p.a.saved.lse[p.a.row(q, h, s)] = keys;
        }
        *(float4 *) (p.a.O + (((int64_t) s * p.a.N + q) * p.a.H + h) * D + col) =
            make_float4(fmaf(pkeys, mean[0], f * y.x), fmaf(pkeys, mean[1], f * y.y), fmaf(pkeys, mean[2], f * y.z), fmaf(pkeys, mean[3], f * y.w));
    }
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}
