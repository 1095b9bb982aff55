#pragma once

// Workspace and launches of the Hopper path of FLASH_ATTN_BACK.

#include "fattn-back-hopper-prep.cuh"

#define FATTN_BACK_HOPPER_BAND   (40 << 20) // bytes of streamed operands that blocks which run side by side may share
#define FATTN_BACK_HOPPER_FEW    16       // blocks that share a head's tiles where there is seldom anything to do
#define FATTN_BACK_HOPPER_BLOCKS 1024     // tiles whose blocks finish at much the same time in any order

// a pass takes as many units as the workspace holds; first all units, then again those that need a split S
struct fattn_back_hopper_plan {
    fattn_back_hopper_params p;
    bool always_split; // GGML_PREC_F32
    int units[2];     // of a pass, not split and split
    int kts_stats;     // not split: key tiles that are in the workspace together, for LSE and D
    int kts_ds;        // with dS, 0: dS is not kept
    int units_ds;      // units whose dS is kept together
    size_t size;         // of the workspace; above the limit where one unit with S split is
};

// places the arrays in the workspace, returns its size; base may be NULL. units_ds: whose keys are there with dS, 0: of all units without.
static size_t fattn_back_hopper_layout(
    fattn_back_hopper_params & p, char * base, const int units, const int kts, const bool split, const int units_ds) {
    size_t size     = 0;
    const auto take = [&](auto *& ptr, const int64_t n) {
        ptr = (std::remove_reference_t<decltype(ptr)>) (base + size);
        size += GGML_PAD(n * sizeof(*ptr), 1024);
    };
    const int64_t heads = (int64_t) units * p.a.G;
    const int64_t total = (int64_t) p.a.S * p.a.Hkv;
    p.mask.layout(p.a, p.QT, p.KT, take);
    take(p.mean_k, total * FATTN_BACK_PREP_MAX_D);
    take(p.mean_v, total * FATTN_BACK_PREP_MAX_D);
    take(p.scale, total);
    take(p.large, total);
    take(p.rowparts, heads * p.QT);
    take(p.q, heads * p.QT * FATTN_BACK_HOPPER_ROWS * p.a.Dk * (split ? 2 : 1));
    take(p.dO, heads * p.QT * FATTN_BACK_HOPPER_ROWS * p.a.Dv);
    take(p.rows, heads * p.QT * FATTN_BACK_HOPPER_ROWS);
    take(p.stat, heads * p.QT * FATTN_BACK_HOPPER_ROWS * 2);
    // from here on only for a while
    const size_t start = size;
    take(p.colparts, (int64_t) units * 2 * p.nparts * FATTN_BACK_COLUMNS_SIZE);
    const size_t end    = size;
    size                = start;
    p.kts               = kts;
    const int64_t nkeys = (int64_t) (units_ds > 0 ? units_ds : units) * kts * FATTN_BACK_HOPPER_ROWS;
    take(p.k, nkeys * p.a.Dk * (split ? 2 : 1));
    take(p.v, nkeys * p.a.Dv);
    if (units_ds > 0) {
        take(p.ds, nkeys * p.a.G * p.QT * FATTN_BACK_HOPPER_ROWS);
    }
    return std::max(size, end);
}

// The passes of D = 256 over units and over ranges of keys that take the multiprocessors least time. Where many keys meet few queries, dS of
// as many key tiles as there are multiprocessors fits the workspace, and dQ costs one product instead of three. Under a causal mask the
// key tiles of a range have then much the same to do.
static void fattn_back_hopper_plan_ranges(fattn_back_hopper_plan & plan, const size_t limit, const int nsm) {
    fattn_back_hopper_params & p = plan.p;
    const fattn_back_args & a    = p.a;
    const int total              = a.S * a.Hkv;
    const bool ds                = a.dQ != nullptr && (a.dK != nullptr || a.dV != nullptr) && a.kv_count == a.M && p.KT >= 4 * p.QT &&
        fattn_back_hopper_layout(p, nullptr, 1, std::min(p.KT, nsm), false, 1) <= limit;
    // query tiles that a multiprocessor takes one after the other, n at a time
    const auto queries = [&](const int units, const int n) -> int64_t {
        return ((int64_t) units * a.G * ((p.QT + n - 1) / n) + nsm - 1) / nsm * n;
    };
    int64_t best = INT64_MAX; // products of tiles that a multiprocessor forms
    int ranges   = 0;
    int units    = total + 1;
    while (units > 1 && (ranges != 1 || (ds && plan.kts_ds == 0))) {
        units              = fattn_back_even(total, units - 1);
        const int passes   = (total + units - 1) / units;
        const size_t fixed = fattn_back_hopper_layout(p, nullptr, units, 0, false, 0);
        const size_t all   = fattn_back_hopper_layout(p, nullptr, units, p.KT, false, 0);
        if (fixed >= limit) {
            continue;
        }
        ranges        = all <= limit ? 1 : (all - fixed) / (limit - fixed) + 1;
        const int kts = (p.KT + ranges - 1) / ranges;
        size_t size   = fattn_back_hopper_layout(p, nullptr, units, kts, false, 0);
        if (size > limit) {
            continue;
        }
        const int64_t keys = ((int64_t) units * p.KT + nsm - 1) / nsm * a.G * p.QT;
        int64_t grads      = 3 * queries(units, 2) * ranges * kts + 4 * keys;
        int kts_ds         = 0;
        int units_ds       = 0;
        for (int n = 1; ds && n <= std::min(units, nsm); ++n) {
            const int k           = std::min(p.KT, nsm / n);
            const int64_t nranges = (int64_t) ((units + n - 1) / n) * ((p.KT + k - 1) / k);
            const int64_t cost    = nranges * (4 * a.G * p.QT + queries(n, FATTN_BACK_HOPPER_DQ_TILES) * (k + 8)); // 8: dQ is added
            if ((kts_ds == 0 || cost < grads) && fattn_back_hopper_layout(p, nullptr, units, k, false, n) <= limit) {
                grads    = cost;
                kts_ds   = k;
                units_ds = n;
            }
        }
        if (kts_ds > 0) {
            size = std::max(size, fattn_back_hopper_layout(p, nullptr, units, kts_ds, false, units_ds));
        }
        const int64_t cost = passes * (2 * queries(units, 2) * ranges * kts + grads);
        if (cost < best) {
            best           = cost;
            plan.units[0]  = units;
            plan.kts_stats = kts;
            plan.kts_ds    = kts_ds;
            plan.units_ds  = units_ds;
            plan.size      = size;
        }
    }
}

static fattn_back_hopper_params fattn_back_hopper_get_params(const fattn_back_args & args) {
    fattn_back_hopper_params p = {};
    p.a                        = args;
    p.QT                       = (args.N + FATTN_BACK_HOPPER_ROWS - 1) / FATTN_BACK_HOPPER_ROWS;
    p.KT                       = (args.M + FATTN_BACK_HOPPER_ROWS - 1) / FATTN_BACK_HOPPER_ROWS;
    p.nparts                   = std::min(512, p.KT);
    return p;
}

// bytes of the smallest workspace: one unit with S split
static size_t fattn_back_hopper_least(const fattn_back_args & args) {
    fattn_back_hopper_params p = fattn_back_hopper_get_params(args);
    return fattn_back_hopper_layout(p, nullptr, 1, p.KT, true, 0);
}

static fattn_back_hopper_plan fattn_back_hopper_make_plan(
    const fattn_back_args & args, const bool always_split, const size_t limit, const int nsm) {
    fattn_back_hopper_plan plan  = {};
    fattn_back_hopper_params & p = plan.p;
    p                            = fattn_back_hopper_get_params(args);
    plan.always_split            = always_split;
    plan.kts_stats               = p.KT;
    const int total              = args.S * args.Hkv;
    const auto size              = [&](const int n, const bool split) { return fattn_back_hopper_layout(p, nullptr, n, p.KT, split, 0); };
    const auto units             = [&](const bool split, const size_t room) {
        return fattn_back_even(total, fattn_back_most(total, [&](const int n) { return size(n, split) <= room; }));
    };
    plan.units[1]           = units(true, limit);
    const size_t size_split = size(plan.units[1], true);
    const size_t room       = std::max(limit, size_split);
    if (args.Dk == FATTN_BACK_PREP_MAX_D && !always_split) {
        fattn_back_hopper_plan_ranges(plan, room, nsm);
    } else {
        plan.units[0] = units(false, room);
        plan.size     = size(plan.units[0], false);
    }
    plan.size = std::max(plan.size, size_split);
    return plan;
}

// kernel with more shared memory than is given without asking
template <auto kernel>
static void fattn_back_hopper_launch(
    const fattn_back_hopper_params & p, const dim3 grid, const int nthreads, const int shared, cudaStream_t stream) {
    static bool raised[GGML_CUDA_MAX_DEVICES] = { false };
    const int id                              = ggml_cuda_get_device();
    if (!raised[id]) {
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
        raised[id] = true;
    }
    kernel<<<grid, nthreads, shared, stream>>>(p);
    CUDA_CHECK(cudaGetLastError());
}

static dim3 fattn_back_hopper_grid(const int n, const int band, const int ntiles) {
    return dim3(band, ntiles, (n + band - 1) / band);
}

template <int D, int nwg, int n1, int n2, int nregs, fattn_back_hopper_mode mode, bool regs, bool split>
static void fattn_back_hopper_queries(const fattn_back_hopper_params & p, cudaStream_t stream) {
    using L = fattn_back_hopper_smem<D, nwg, n1, n2, split, regs>;
    fattn_back_hopper_launch<flash_attn_back_hopper_queries<D, nwg, n1, n2, nregs, mode, regs, split>>(
        p, fattn_back_hopper_grid(p.units * p.a.G, p.band_q, (p.QT + nwg - 1) / nwg), (nwg + 1) * 128, L::bytes, stream);
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

// bands: as many units as their streamed operands fit the L2 cache, and no more than it takes to even out the blocks' work
static void fattn_back_hopper_set_bands(fattn_back_hopper_params & p) {
    const auto band = [&](const int64_t nrows, const int ntiles) {
        const int64_t fit  = FATTN_BACK_HOPPER_BAND / (nrows * p.a.Dk * 4);
        const int64_t even = (FATTN_BACK_HOPPER_BLOCKS + ntiles - 1) / ntiles;
        return (int) std::max<int64_t>(1, std::min({ fit, even, (int64_t) p.units }));
    };
    p.band_q = p.a.G * band(p.a.M, p.QT * p.a.G);
    p.band_k = band(p.a.N, std::max(1, fattn_back_hopper_window(p)));
}

template <int D, int nwg, int stages, int nregs, bool split>
static void fattn_back_hopper_keys(const fattn_back_hopper_params & p, cudaStream_t stream) {
    using L = fattn_back_hopper_smem<D, nwg, stages, stages, split>;
    fattn_back_hopper_launch<flash_attn_back_hopper_keys<D, nwg, stages, nregs, split>>(
        p, fattn_back_hopper_grid(p.units, p.band_k, (fattn_back_hopper_window(p) + nwg - 1) / nwg), (nwg + 1) * 128, L::bytes, stream);
}

template <int D, int stages, bool split, bool ds>
static void fattn_back_hopper_keys_split(const fattn_back_hopper_params & p, cudaStream_t stream) {
    using L        = fattn_back_hopper_smem<D, 1, stages, stages, split, false, true>;
    const int band = ds ? p.units : p.band_k;
    fattn_back_hopper_launch<flash_attn_back_hopper_keys_split<D, stages, split, ds>>(
        p, fattn_back_hopper_grid(p.units, band, fattn_back_hopper_window(p)), 3 * 128, L::bytes, stream);
}

template <int D, int stages>
static void fattn_back_hopper_dq(const fattn_back_hopper_params & p, cudaStream_t stream) {
    const int nblocks = (p.QT + FATTN_BACK_HOPPER_DQ_TILES - 1) / FATTN_BACK_HOPPER_DQ_TILES;
    fattn_back_hopper_launch<flash_attn_back_hopper_dq<D, stages>>(
        p, dim3(p.units * p.a.G, nblocks), 3 * 128, fattn_back_hopper_smem_dq<D, stages>::bytes, stream);
}

// K and V of the key tiles from kt0 on, and Q and dO if with_rows
template <int D, bool split>
static void fattn_back_hopper_convert(const fattn_back_hopper_params & p, const bool with_rows, cudaStream_t stream) {
    const dim3 tiles(with_rows ? std::max(p.kts, p.QT) : p.kts, (with_rows ? 2 + p.a.G : 2) * p.units);
    flash_attn_back_hopper_convert<D, split><<<tiles, FATTN_BACK_PREP_THREADS, 0, stream>>>(p);
    CUDA_CHECK(cudaGetLastError());
}

template <int D, bool split>
static void fattn_back_hopper_prep(const fattn_back_hopper_params & p, cudaStream_t stream) {
    if constexpr (!split) {
        ggml_cuda_flash_attn_back_columns(p.a, p.mask, p.unit0, p.units, p.nparts, p.colparts, stream);
        flash_attn_back_hopper_means<<<dim3(p.units, 2), FATTN_BACK_PREP_MEAN_THREADS, 0, stream>>>(p, D);
    }
    fattn_back_hopper_convert<D, split>(p, true, stream);
    if constexpr (!split) {
        const dim3 few(std::min(p.QT, FATTN_BACK_HOPPER_FEW), p.a.G * p.units);
        flash_attn_back_hopper_rescale<D><<<few, FATTN_BACK_PREP_THREADS, 0, stream>>>(p);
    }
    CUDA_CHECK(cudaGetLastError());
}

// the products of all keys of units; D = 256 only where S is split
template <int D, bool split>
static void fattn_back_hopper_main(const fattn_back_hopper_params & p, cudaStream_t stream) {
    const bool has_keys = fattn_back_hopper_window(p) > 0;
    if constexpr (D == FATTN_BACK_PREP_MAX_D) {
        static_assert(split, "without the split in ranges of keys");
        fattn_back_hopper_queries<D, 1, 1, 2, 240, FATTN_BACK_HOPPER_STATS, false, true>(p, stream);
        if (p.a.dQ != nullptr) {
            fattn_back_hopper_queries<D, 1, 1, 2, 240, FATTN_BACK_HOPPER_DQ, false, true>(p, stream);
        }
        if (has_keys) {
            fattn_back_hopper_keys_split<D, 1, true, false>(p, stream);
        }
    } else {
        constexpr int stages = split ? 2 : 4;
        fattn_back_hopper_queries<D, 2, stages, stages, 240, FATTN_BACK_HOPPER_FUSED, false, split>(p, stream);
        if (has_keys) {
            fattn_back_hopper_keys<D, 2, stages, 240, split>(p, stream);
        }
    }
}

// LSE and D of D = 256, for ranges of keys
template <int D>
static void fattn_back_hopper_stats(fattn_back_hopper_params p, cudaStream_t stream) {
    for (; p.kt0 < p.KT; p.kt0 += p.kts) {
        if (p.kt0 == 0) {
            fattn_back_hopper_prep<D, false>(p, stream);
        } else {
            fattn_back_hopper_convert<D, false>(p, false, stream);
        }
        fattn_back_hopper_queries<D, 2, 3, 4, 240, FATTN_BACK_HOPPER_STATS, true, false>(p, stream);
    }
}

// the gradients of ranges of keys from LSE and D
template <int D>
static void fattn_back_hopper_grads(fattn_back_hopper_params p, cudaStream_t stream) {
    for (; p.kt0 < p.KT; p.kt0 += p.kts) {
        if (p.kts < p.KT) {
            fattn_back_hopper_convert<D, false>(p, false, stream);
        }
        if (p.a.dQ != nullptr) {
            fattn_back_hopper_queries<D, 2, 2, 1, 240, FATTN_BACK_HOPPER_DQ, false, false>(p, stream);
        }
        if (fattn_back_hopper_window(p) > 0) {
            fattn_back_hopper_set_bands(p);
            fattn_back_hopper_keys_split<D, 2, false, false>(p, stream);
        }
    }
}

// the same with dS in the workspace, of n units at a time
template <int D>
static void fattn_back_hopper_grads_ds(const fattn_back_hopper_params & all, const int n, cudaStream_t stream) {
    for (int unit = 0; unit < all.units; unit += n) {
        fattn_back_hopper_params p = all;
        const int64_t nrows        = (int64_t) unit * p.a.G * p.QT * FATTN_BACK_HOPPER_ROWS;
        p.unit0 += unit;
        p.units = std::min(n, all.units - unit);
        p.q += nrows * D;
        p.dO += nrows * D;
        p.stat += nrows * 2;
        for (; p.kt0 < p.KT; p.kt0 += p.kts) {
            fattn_back_hopper_convert<D, false>(p, false, stream);
            fattn_back_hopper_keys_split<D, 2, false, true>(p, stream);
            fattn_back_hopper_dq<D, 4>(p, stream);
        }
    }
}

template <int D>
static void fattn_back_hopper_passes(const fattn_back_hopper_plan & plan, char * workspace, cudaStream_t stream) {
    fattn_back_hopper_params p = plan.p;
    const int total            = p.a.S * p.a.Hkv;
    for (int split = 0; split < 2; ++split) {
        fattn_back_hopper_layout(p, workspace, plan.units[split], split != 0 ? p.KT : plan.kts_stats, split != 0, 0);
        if (split == 0) {
            ggml_cuda_flash_attn_back_mask_table(p.a, p.mask, stream);
        }
        for (p.unit0 = 0; p.unit0 < total; p.unit0 += p.units) {
            p.units = std::min(plan.units[split], total - p.unit0);
            fattn_back_hopper_set_bands(p);
            if (split != 0) {
                fattn_back_hopper_prep<D, true>(p, stream);
                fattn_back_hopper_main<D, true>(p, stream);
            } else if (plan.always_split) {
                fattn_back_hopper_prep<D, false>(p, stream);
                CUDA_CHECK(cudaMemsetAsync(p.large + p.unit0, 0x7F, p.units * sizeof(*p.large), stream));
            } else if constexpr (D == FATTN_BACK_PREP_MAX_D) {
                fattn_back_hopper_layout(p, workspace, plan.units[0], plan.kts_stats, false, 0);
                fattn_back_hopper_stats<D>(p, stream);
                if (plan.kts_ds > 0) {
                    fattn_back_hopper_layout(p, workspace, plan.units[0], plan.kts_ds, false, plan.units_ds);
                    fattn_back_hopper_grads_ds<D>(p, plan.units_ds, stream);
                } else {
                    fattn_back_hopper_grads<D>(p, stream);
                }
            } else {
                fattn_back_hopper_prep<D, false>(p, stream);
                fattn_back_hopper_main<D, false>(p, stream);
            }
        }
    }
    ggml_cuda_flash_attn_back_sinks(p.a, stream);
}

static void fattn_back_hopper_run(const fattn_back_hopper_plan & plan, char * workspace, cudaStream_t stream) {
    switch (plan.p.a.Dk) {
        case 64:
            fattn_back_hopper_passes<64>(plan, workspace, stream);
            break;
        case 128:
            fattn_back_hopper_passes<128>(plan, workspace, stream);
            break;
        case 256:
            fattn_back_hopper_passes<256>(plan, workspace, stream);
            break;
        default:
            GGML_ABORT("unexpected head size");
    }
}
