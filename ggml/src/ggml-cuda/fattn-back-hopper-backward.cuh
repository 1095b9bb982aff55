#pragma once

// The backward from LSE and D: dK and dV by blocks of keys, dQ by blocks of queries.

#include "fattn-back-hopper-common.cuh"

#define FATTN_BACK_HOPPER_EXCHANGE (FATTN_BACK_HOPPER_ROWS * FATTN_BACK_HOPPER_ROWS * 4) // bytes of P of a tile, which passes between warpgroups

// dK and dV of head sizes up to 128. An item is nwg key tiles of the window. Grid: as many blocks as the device holds at a time, each takes one item
// after the other. Block: nwg warpgroups with 64 keys each, then the one that fills the rings.
template <int D, int nwg, int stages, bool hilo>
static __global__ void __launch_bounds__((nwg + 1) * 128, 1) flash_attn_back_hopper_keys(
    const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using L = fattn_back_hopper_smem<D, nwg, stages, stages, hilo>;
    extern __shared__ __align__(1024) char smem_ptr[];
    const uint32_t smem = hopper_smem(smem_ptr);
    if (!fattn_back_hopper_any(p, [&](const int unit) { return fattn_back_hopper_large(p, unit) == hilo; })) {
        return;
    }
    fattn_back_hopper_init<L>(smem, 128 * nwg);
    hopper_barrier_init_done();
    __syncthreads();
    const int first = fattn_back_hopper_first_key(p);
    const int wg    = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0); // uniform for the compiler, too

    if (wg == nwg) {
        hopper_registers_dec<fattn_back_hopper_regs_fill<D>>();
        fattn_back_hopper_fill<L>([&](auto filler) {
            fattn_back_hopper_take<filler.leads>(p, (int *) (smem_ptr + L::slots), [&](const int item) {
                int unit;
                int block;
                p.items.get(item, unit, block);
                if (fattn_back_hopper_large(p, unit) == hilo) {
                    filler.announce(smem_ptr, item);
                    filler.fill_queries(p, smem_ptr, unit, first + block * nwg);
                }
            });
            filler.announce(smem_ptr, p.items.count());
        });
        return;
    }
    hopper_registers_inc<fattn_back_hopper_regs<D>>();
    const int col       = 2 * (threadIdx.x % 4);
    const uint32_t own1 = smem + L::own1 + wg * L::tile1;
    const uint32_t own2 = smem + L::own2 + wg * L::tile;
    fattn_back_hopper_reader<L> reader(smem_ptr); // of both rings
    fattn_back_hopper_turns<(D > 64 && nwg == 2)> turns(wg);

    // the item that the ring tells of; its K and V are asked for as soon as no product reads the last one's
    const auto take = [&]() {
        const int next = reader.item();
        if (next < p.items.count()) {
            hopper_named_sync<128>(3 + wg);
            if (threadIdx.x % 128 == 0) {
                int unit;
                int block;
                p.items.get(next, unit, block);
                fattn_back_hopper_load_keys<L>(p, smem, wg, unit, first + block * nwg + wg);
            }
        }
        hopper_barrier_wait(smem + L::full2 + 8 * reader.ring.stage, reader.ring.parity);
        hopper_barrier_arrive(smem + L::empty1 + 8 * reader.ring.stage);
        hopper_barrier_arrive(smem + L::empty2 + 8 * reader.ring.stage);
        reader.ahead = 0;
        return next;
    };
    int item = take();
    for (uint32_t parity = 0; hopper_any(item < p.items.count()); parity ^= 1) {
        reader.next();
        int unit;
        int block;
        p.items.get(item, unit, block);
        const int kt   = first + block * nwg + wg;
        const float sc = fattn_back_hopper_unit(p, p.scale[p.unit0 + unit]);
        float dK[D / 2];
        float dV[D / 2];
#pragma unroll
        for (int i = 0; i < D / 2; ++i) {
            dK[i] = 0.0f;
            dV[i] = 0.0f;
        }
        uint32_t P16[16];
        uint32_t dS16[16];
        hopper_barrier_wait(smem + L::own + 8 * wg, parity);

        bool later         = false; // than the first tile
        const auto release = [&]() { // the tile before that of the ring
            if (later) {
                const int prev = reader.ring.stage == 0 ? stages - 1 : reader.ring.stage - 1;
                hopper_barrier_arrive(smem + L::empty1 + 8 * prev);
                hopper_barrier_arrive(smem + L::empty2 + 8 * prev);
            }
            later = true;
        };
        while (reader.tile()) {
            const int stage = reader.ring.stage;
            float S[32];
            float dP[32];
            const uint32_t stat = smem + L::stat + (stage * 2 * FATTN_BACK_HOPPER_ROWS + col) * (int) sizeof(float);
            reader.wait();
            reader.peek();
            hopper_wgmma_wait<1>(); // dV of the previous tile
            hopper_pin(P16);
            turns.take();
            fattn_back_hopper_product<D, hilo>(S, own1, smem + L::ring1 + stage * L::tile1);
            hopper_wgmma_wait<1>(); // dK of the previous tile
            hopper_pin(dS16);
            release();
            hopper_barrier_wait(smem + L::full2 + 8 * stage, reader.ring.parity);
            fattn_back_hopper_product<D, false>(dP, own2, smem + L::ring2 + stage * L::tile);

            float2 col_stat[8];
            fattn_back_hopper_load_columns(col_stat, stat);
            hopper_wgmma_wait<1>(); // S
            hopper_pin(S);
            if (reader.state(wg) != FATTN_BACK_TILE_FULL) {
                const fattn_back_hopper_meta meta = reader.meta();
                fattn_back_hopper_mask<true, (D > 64)>(S, p, reader.state(wg), meta.mask, meta.head, kt, meta.tile, sc);
            }
            fattn_back_hopper_probs_t(S, sc, col_stat);
            fattn_back_hopper_load_columns(col_stat, stat + FATTN_BACK_HOPPER_ROWS * (int) sizeof(float));
            fattn_back_hopper_operand(P16, S);
            turns.pass();
            fattn_back_hopper_accumulate(dV, P16, smem + L::ring2 + stage * L::tile);

            hopper_wgmma_wait<1>(); // dP
            hopper_pin(dP);
            fattn_back_hopper_ds_t(dP, S, col_stat);
            fattn_back_hopper_operand(dS16, dP);
            fattn_back_hopper_accumulate(dK, dS16, smem + L::ring1 + stage * L::tile1);
            if constexpr (hilo) {
                fattn_back_hopper_accumulate(dK, dS16, smem + L::ring1 + stage * L::tile1 + L::tile);
            }
            reader.next();
        }
        hopper_wgmma_wait<0>();
        hopper_pin(P16);
        hopper_pin(dS16);
        hopper_pin(dK);
        hopper_pin(dV);
        release();
        item = take();
        fattn_back_hopper_store_dk(p, dK, unit, kt);
        fattn_back_hopper_store_dv(p, dV, unit, kt);
    }
    turns.end();
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A row of accumulators [64 x 2*R] of a query tile, times factor, to columns col0 and on of dQ, or of plane split of several; r: the
// thread's first or second. Other keys than the first are added: one block owns the row, so that the order is that of the launches.
template <int D, int R>
static __device__ __forceinline__ void fattn_back_hopper_store_dq(const fattn_back_hopper_params & p, const float (&acc)[R],
    const float factor, const int r, const int lhead, const int split, const int q, const int col0) {
    const int64_t row = p.a.row(q, fattn_back_hopper_head(p, lhead), fattn_back_hopper_seq(p, lhead));
    float * dst       = (p.nsplits_dq == 1 ? p.a.dQ + row * D : fattn_back_hopper_plane<D>(p, lhead, p.nsplits_dq, split, q)) + col0 + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < R / 4; ++j) {
        const float2 y = make_float2(acc[4 * j + 2 * r + 0] * factor, acc[4 * j + 2 * r + 1] * factor);
        if (p.kt0 > 0) {
            hopper_add(dst + 8 * j, y);
        } else {
            *(float2 *) (dst + 8 * j) = y;
        }
    }
}

// A warpgroup of keys_256: of S, P and dV (first), or of dP, dS and dK
template <typename L, int D, bool hilo, bool ds, bool first>
static __device__ __forceinline__ void fattn_back_hopper_keys_256_half(
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

    fattn_back_hopper_reader<L> reader(smem_ptr); // of both rings
    fattn_back_hopper_ring<2> pair;               // of the exchange
    const uint32_t own = smem + (first ? L::own1 : L::own2);
    hopper_barrier_wait(smem + L::own, 0);
    uint32_t own16[hilo ? 1 : D / 8]; // half of the own columns: what comes from registers need not come from shared memory
    if constexpr (!hilo) {
#pragma unroll
        for (int k = 0; k < D / 32; ++k) {
            hopper_load_rows(own16 + 4 * k, own, k);
        }
    }
    int prev = -1;
    while (reader.tile()) {
        const fattn_back_hopper_ring<stages> ring = reader.ring;
        reader.wait();
        reader.peek();
        float X[32]; // S, then P; dP, then dS
        if constexpr (!first) {
            hopper_barrier_wait(smem + L::full2 + 8 * ring.stage, ring.parity);
        }
        const uint32_t streamed = smem + (first ? L::ring1 + ring.stage * L::tile1 : L::ring2 + ring.stage * L::tile);
        if constexpr (hilo) {
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

        float4 * slot          = (float4 *) (smem_ptr + L::extra + pair.stage * FATTN_BACK_HOPPER_EXCHANGE + warp * (FATTN_BACK_HOPPER_EXCHANGE / 4)) + lane;
        const uint32_t full_p  = smem + L::bars + 8 * pair.stage;
        const uint32_t empty_p = smem + L::bars + 16 + 8 * pair.stage;
        if constexpr (first) {
            if (reader.state(0) != FATTN_BACK_TILE_FULL) {
                const fattn_back_hopper_meta meta = reader.meta();
                fattn_back_hopper_mask<true, true>(X, p, reader.state(0), meta.mask, meta.head, t0, meta.tile, sc);
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
                const fattn_back_hopper_meta meta = reader.meta();
                const float weight                = p.weight[p.unit0 * p.a.G + meta.head] / p.scale[p.unit0 + unit].w; // of the head's dS as an operand of dQ
                uint32_t x[16];
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    x[i] = weight == 1.0f ? X16[i] : hopper_pack(X[2 * i] * weight, X[2 * i + 1] * weight);
                }
                char * dst = fattn_back_hopper_ds(p, meta.head, meta.tile, t0) + (warp * 16 + lane / 4) * 128;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        *(uint4 *) (dst + r * 8 * 128 + ((4 * h + lane % 4) ^ (lane / 4)) * 16) =
                            make_uint4(x[8 * h + r], x[8 * h + r + 2], x[8 * h + r + 4], x[8 * h + r + 6]);
                    }
                }
            }
            fattn_back_hopper_accumulate(acc, X16, smem + L::ring1 + ring.stage * L::tile1);
            if constexpr (hilo) {
                fattn_back_hopper_accumulate(acc, X16, smem + L::ring1 + ring.stage * L::tile1 + L::tile);
            }
        }
        pair.next();
        if constexpr (stages == 1) {
            hopper_wgmma_wait<0>();
            hopper_barrier_arrive(smem + L::empty1);
            hopper_barrier_arrive(smem + L::empty2);
        }

        prev = ring.stage;
        reader.next();
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
// warpgroups, then the one that fills the rings. ds: dS goes to the workspace.
template <int D, int stages, bool hilo, bool ds>
static __global__ void __launch_bounds__(3 * 128, 1) flash_attn_back_hopper_keys_256(const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using L = fattn_back_hopper_smem<D, 1, stages, stages, hilo, 2 * FATTN_BACK_HOPPER_EXCHANGE, 4>;
    extern __shared__ __align__(1024) char smem_ptr[];
    const uint32_t smem = hopper_smem(smem_ptr);
    const int unit      = blockIdx.z * p.band_k + blockIdx.x;
    if (unit >= p.units || fattn_back_hopper_large(p, unit) != hilo) {
        return;
    }
    fattn_back_hopper_init<L>(smem, 256);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; ++i) {
            hopper_barrier_init(smem + L::bars + 8 * i, 128);
        }
        hopper_barrier_init_done();
    }
    __syncthreads();
    const int t0 = fattn_back_hopper_first_key(p) + blockIdx.y;
    const int wg = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0); // uniform for the compiler, too

    if (wg == 2) {
        hopper_registers_dec<hilo ? 56 : fattn_back_hopper_regs_fill<D>>();
        if (threadIdx.x == 2 * 128) {
            fattn_back_hopper_load_keys<L>(p, smem, 0, unit, t0);
        }
        fattn_back_hopper_fill<L>([&](auto filler) {
            filler.fill_queries(p, smem_ptr, unit, t0);
            filler.announce(smem_ptr, 0);
        });
    } else {
        hopper_registers_inc<hilo ? 224 : fattn_back_hopper_regs<D>>();
        if (wg == 0) {
            fattn_back_hopper_keys_256_half<L, D, hilo, ds, true>(p, smem_ptr, unit, t0);
        } else {
            fattn_back_hopper_keys_256_half<L, D, hilo, ds, false>(p, smem_ptr, unit, t0);
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
// three query tiles of the unit's heads. Block: two warpgroups, then the one that fills the ring. The first has the first query tile, the second the second, and
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
    const int split = blockIdx.y % p.nsplits_dq;
    const int end   = (unit + 1) * p.a.G * p.QT;
    const int t0    = unit * p.a.G * p.QT + blockIdx.y / p.nsplits_dq * FATTN_BACK_HOPPER_DQ_TILES;
    const int wg    = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0); // uniform for the compiler, too
    fattn_back_hopper_ring<stages> ring;

    if (wg == 2) {
        hopper_registers_dec<fattn_back_hopper_regs_fill<D>>();
        if (threadIdx.x / 32 == 8) {
            const int first = fattn_back_hopper_share(p, split, p.nsplits_dq);
            const int last  = fattn_back_hopper_share(p, split + 1, p.nsplits_dq);
            uint32_t rows[FATTN_BACK_HOPPER_DQ_TILES];
#pragma unroll
            for (int w = 0; w < FATTN_BACK_HOPPER_DQ_TILES; ++w) {
                rows[w] = t0 + w < end ? fattn_back_hopper_mask_row(p, fattn_back_hopper_mask_index(p, (t0 + w) / p.QT), (t0 + w) % p.QT) : 0;
            }
            const auto get = [&](const int t, const int w) { return t0 + w < end ? fattn_back_hopper_get_tile(p, rows[w], t) : FATTN_BACK_TILE_SKIP; };
            fattn_back_hopper_walk<FATTN_BACK_HOPPER_DQ_TILES, 1>(first, last, get, [&](const int t, const uint32_t states, uint32_t) {
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
        hopper_registers_inc<fattn_back_hopper_regs<D>>();
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
        const auto factor  = [&](const int tile) { // of its head
            const float weight = p.weight[p.unit0 * p.a.G + tile / p.QT];
            return p.a.scale / scale.y / scale.z / weight / (1 << FATTN_BACK_HOPPER_SHIFT_P);
        };
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = fattn_back_hopper_ds_query(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r);
            const auto q  = [&](const int tile) { return tile < end ? tile % p.QT * FATTN_BACK_HOPPER_ROWS + row : INT_MAX; };
            if (q(t0 + wg) < p.a.N) {
                fattn_back_hopper_store_dq<D>(p, own, factor(t0 + wg), r, (t0 + wg) / p.QT, split, q(t0 + wg), 0);
            }
            if (q(t0 + 2) < p.a.N) {
                fattn_back_hopper_store_dq<D>(p, shared, factor(t0 + 2), r, (t0 + 2) / p.QT, split, q(t0 + 2), wg * (D / 2));
            }
        }
    }
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

// dQ. An item is nwg query tiles and a share of the keys. Grid: as many blocks as the device holds at a time, each takes one item after the other.
// Block: nwg warpgroups with 64 queries each, then the one that fills the rings.
template <int D, int nwg, int n1, int n2, bool hilo>
static __global__ void __launch_bounds__((nwg + 1) * 128, 1) flash_attn_back_hopper_queries(
    const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using L = fattn_back_hopper_smem<D, nwg, n1, n2, hilo>;
    extern __shared__ __align__(1024) char smem_ptr[];
    const uint32_t smem = hopper_smem(smem_ptr);
    if (!fattn_back_hopper_any(p, [&](const int unit) { return fattn_back_hopper_large(p, unit) == hilo; })) {
        return;
    }
    fattn_back_hopper_init<L>(smem, 128 * nwg);
    hopper_barrier_init_done();
    __syncthreads();
    const int wg = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);

    if (wg == nwg) {
        if constexpr (nwg > 1) {
            hopper_registers_dec<fattn_back_hopper_regs_fill<D / 2>>();
        }
        fattn_back_hopper_fill<L>([&](auto filler) {
            fattn_back_hopper_take<filler.leads>(p, (int *) (smem_ptr + L::slots), [&](const int i) {
                const fattn_back_hopper_item_q item(p, i, nwg, p.nsplits_dq);
                if (fattn_back_hopper_large(p, item.unit) == hilo) {
                    filler.announce(smem_ptr, i);
                    filler.template fill_keys<1>(p, smem_ptr, item, p.nsplits_dq);
                }
            });
            filler.announce(smem_ptr, p.items.count());
        });
        return;
    }
    if constexpr (nwg > 1) {
        hopper_registers_inc<fattn_back_hopper_regs<D / 2>>();
    }
    const uint32_t own1 = smem + L::own1 + wg * L::tile1;
    const uint32_t own2 = smem + L::own2 + wg * L::tile;
    const int row       = (threadIdx.x % 128) / 32 * 16 + (threadIdx.x % 32) / 4; // and row + 8
    fattn_back_hopper_reader<L> reader(smem_ptr);
    fattn_back_hopper_ring<n2> ring2;
    fattn_back_hopper_turns<(D == 128 && nwg == 2)> turns(wg);

    const auto take = [&]() { // the item that the ring tells of; its Q and dO are asked for as soon as no product reads the last one's
        const int next = reader.item();
        if (next < p.items.count()) {
            hopper_named_sync<128>(3 + wg);
            if (threadIdx.x % 128 == 0) {
                const fattn_back_hopper_item_q item(p, next, nwg, p.nsplits_dq);
                const int64_t i    = min(item.t0 + wg, item.end - 1);
                const uint32_t own = smem + L::own + 8 * wg;
                hopper_barrier_expect(own, L::tile1 + L::tile);
                hopper_load(own1, (const char *) p.q + i * L::tile1, L::tile1, own);
                hopper_load(own2, (const char *) p.dO + i * L::tile, L::tile, own);
            }
        }
        hopper_barrier_wait(smem + L::full2 + 8 * ring2.stage, ring2.parity);
        hopper_barrier_arrive(smem + L::empty1 + 8 * reader.ring.stage);
        hopper_barrier_arrive(smem + L::empty2 + 8 * ring2.stage);
        ring2.next();
        reader.ahead = 0;
        return next;
    };
    int i = take();
    for (uint32_t parity = 0; hopper_any(i < p.items.count()); parity ^= 1) {
        reader.next();
        const fattn_back_hopper_item_q item(p, i, nwg, p.nsplits_dq);
        const float4 scale  = p.scale[p.unit0 + item.unit];
        const float sc      = fattn_back_hopper_unit(p, scale);
        const int tile      = min(item.t0 + wg, item.end - 1);
        const int lhead     = tile / p.QT;
        const int qt        = tile % p.QT;
        const float4 * rows = p.rows + (int64_t) tile * FATTN_BACK_HOPPER_ROWS + row;

        float dQ[D / 2];
#pragma unroll
        for (float & x : dQ) {
            x = 0.0f;
        }
        uint32_t dS16[16];
        float nlse[2];
        float D_i[2];
        const float * stat = p.stat + (int64_t) tile * 2 * FATTN_BACK_HOPPER_ROWS + row;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // dQ's rows need no common weight, which would cost the short ones bits
            nlse[r] = stat[8 * r] - fattn_back_hopper_shift(scale, rows[8 * r]) + FATTN_BACK_HOPPER_SHIFT_P;
            D_i[r]  = stat[8 * r + FATTN_BACK_HOPPER_ROWS];
        }
        hopper_barrier_wait(smem + L::own + 8 * wg, parity);

        int prev1 = -1;
        while (reader.tile()) {
            const int stage = reader.ring.stage;
            float S[32];
            float dP[32];
            reader.wait();
            reader.peek();
            turns.take();
            fattn_back_hopper_product<D, hilo>(S, own1, smem + L::ring1 + stage * L::tile1);
            hopper_wgmma_wait<1>(); // dQ of the previous tile
            hopper_pin(dS16);
            if (n1 > 1 && prev1 >= 0) {
                hopper_barrier_arrive(smem + L::empty1 + 8 * prev1);
            }
            hopper_barrier_wait(smem + L::full2 + 8 * ring2.stage, ring2.parity);
            fattn_back_hopper_product<D, false>(dP, own2, smem + L::ring2 + ring2.stage * L::tile);
            turns.pass();

            hopper_wgmma_wait<1>(); // S
            hopper_pin(S);
            if (reader.state(wg) != FATTN_BACK_TILE_FULL) {
                fattn_back_hopper_mask<false, (D > 128)>(
                    S, p, reader.state(wg), fattn_back_hopper_mask_index(p, lhead), lhead, qt, reader.meta().tile, sc);
            }
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                S[i] = hopper_exp2(fmaf(S[i], sc, nlse[i % 4 / 2]));
            }
            hopper_wgmma_wait<0>();
            hopper_pin(dP);
            hopper_barrier_arrive(smem + L::empty2 + 8 * ring2.stage);
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                dP[i] = S[i] * (dP[i] - D_i[i % 4 / 2]);
            }
            fattn_back_hopper_operand(dS16, dP);
            fattn_back_hopper_accumulate(dQ, dS16, smem + L::ring1 + stage * L::tile1);
            if constexpr (hilo) {
                fattn_back_hopper_accumulate(dQ, dS16, smem + L::ring1 + stage * L::tile1 + L::tile);
            }
            if constexpr (n1 == 1) {
                hopper_wgmma_wait<0>();
                hopper_barrier_arrive(smem + L::empty1);
            }
            prev1 = stage;
            reader.next();
            ring2.next();
        }
        hopper_wgmma_wait<0>();
        hopper_pin(dQ);
        hopper_pin(dS16);
        if (n1 > 1 && prev1 >= 0) {
            hopper_barrier_arrive(smem + L::empty1 + 8 * prev1);
        }
        const float weight[2] = { rows[0].z, rows[8].z };
        i                     = take();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int q = qt * FATTN_BACK_HOPPER_ROWS + row + 8 * r;
            if (item.t0 + wg < item.end && q < p.a.N) {
                const float factor = p.a.scale / scale.y / scale.z / weight[r] / (1 << FATTN_BACK_HOPPER_SHIFT_P);
                fattn_back_hopper_store_dq<D>(p, dQ, factor, r, lhead, item.split, q, 0);
            }
        }
    }
    turns.end();
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}

// dQ of shares of the keys put together. Grid: blocks of rows of the query tiles, heads.
template <int D, bool hilo>
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_hopper_combine_dq(
    const __grid_constant__ fattn_back_hopper_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int n = D / 4; // threads of a row
    const int lhead = blockIdx.y;
    const int q     = (blockIdx.x * FATTN_BACK_PREP_THREADS + threadIdx.x) / n;
    const int col   = threadIdx.x % n * 4;
    if (q >= p.a.N || fattn_back_hopper_large(p, lhead / p.a.G) != hilo) {
        return;
    }
    float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = 0; i < p.nsplits_dq; ++i) {
        const float4 x = *(const float4 *) (fattn_back_hopper_plane<D>(p, lhead, p.nsplits_dq, i, q) + col);
        y              = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
    }
    *(float4 *) (p.a.dQ + p.a.row(q, fattn_back_hopper_head(p, lhead), fattn_back_hopper_seq(p, lhead)) * D + col) = y;
#else
    GGML_UNUSED_VARS(p);
    NO_DEVICE_CODE;
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
}
