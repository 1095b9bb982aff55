#pragma once

// Workspace and launches of the Hopper path of FLASH_ATTN_BACK.

#include "fattn-back-hopper-prep.cuh"

#define FATTN_BACK_HOPPER_BAND   (40 << 20) // bytes of streamed operands that blocks which run side by side may share
#define FATTN_BACK_HOPPER_BLOCKS 1024     // tiles whose blocks finish at much the same time in any order

// a pass takes as many units as the workspace holds; first all units, then again those that need a split S
struct fattn_back_hopper_plan {
    fattn_back_hopper_params p;
    bool always_split; // GGML_PREC_F32
    int units[2];     // of a pass, not split and split
    int kts_stats;     // not split: key tiles that are in the workspace together, for LSE and D
    int kts_ds;        // with dS, 0: dS is not kept
    size_t size;         // of the workspace, 0: one unit does not fit
};

// places the arrays in the workspace, returns its size; base may be NULL. ds: with dS.
static size_t fattn_back_hopper_layout(
    fattn_back_hopper_params & p, char * base, const int units, const int kts, const bool split, const bool ds) {
    size_t size     = 0;
    const auto take = [&](auto *& ptr, const int64_t n) {
        ptr = (std::remove_reference_t<decltype(ptr)>) (base + size);
        size += GGML_PAD(n * sizeof(*ptr), 1024);
    };
    const int64_t heads = (int64_t) units * p.a.G;
    const int64_t total = (int64_t) p.a.S * p.a.Hkv;
    if (p.a.mask != nullptr) {
        const int64_t n = (int64_t) p.a.mask_nseqs * p.a.mask_nheads * p.QT * p.KT;
        take(p.tiles, n);
        take(p.seen, n);
        take(p.used, (int64_t) p.a.mask_nseqs * p.a.mask_groups() * p.KT);
    }
    take(p.mean_k, total * FATTN_BACK_HOPPER_MAX_D);
    take(p.mean_v, total * FATTN_BACK_HOPPER_MAX_D);
    take(p.scale, total);
    take(p.large, total);
    take(p.rowparts, heads * p.QT);
    take(p.q, heads * p.QT * FATTN_BACK_HOPPER_ROWS * p.a.Dk * (split ? 2 : 1));
    take(p.dO, heads * p.QT * FATTN_BACK_HOPPER_ROWS * p.a.Dv);
    take(p.rows, heads * p.QT * FATTN_BACK_HOPPER_ROWS);
    take(p.stat, heads * p.QT * FATTN_BACK_HOPPER_ROWS * 2);
    // from here on only for a while
    const size_t start = size;
    take(p.colparts, (int64_t) units * 2 * p.nparts * FATTN_BACK_HOPPER_COLPART);
    const size_t end = size;
    size             = start;
    p.kts            = kts;
    take(p.k, (int64_t) units * kts * FATTN_BACK_HOPPER_ROWS * p.a.Dk * (split ? 2 : 1));
    take(p.v, (int64_t) units * kts * FATTN_BACK_HOPPER_ROWS * p.a.Dv);
    if (ds) {
        take(p.ds, heads * p.QT * kts * FATTN_BACK_HOPPER_ROWS * FATTN_BACK_HOPPER_ROWS);
    }
    return std::max(size, end);
}

// Where many keys meet few queries, dS of as many key tiles as there are multiprocessors fits the workspace, and dQ costs one product
// instead of three. Under a causal mask the key tiles of a range have then much the same to do.
static bool fattn_back_hopper_plan_ds(fattn_back_hopper_plan & plan, const size_t limit, const int nsm) {
    fattn_back_hopper_params & p = plan.p;
    const int total              = p.a.S * p.a.Hkv;
    if (p.a.Dk != FATTN_BACK_HOPPER_MAX_D || p.a.dQ == nullptr || (p.a.dK == nullptr && p.a.dV == nullptr) || p.a.kv_count < p.a.M ||
        p.KT < 4 * p.QT) {
        return false;
    }
    for (int passes = 1; passes <= total; ++passes) {
        const int units   = (total + passes - 1) / passes;
        const int kts     = std::min(p.KT, nsm / units);
        const size_t size = fattn_back_hopper_layout(p, nullptr, units, kts, false, true);
        if (kts > 0 && size <= limit) {
            size_t size_stats;
            int ranges = 0;
            do {
                ranges++;
                plan.kts_stats = (p.KT + ranges - 1) / ranges;
                size_stats     = fattn_back_hopper_layout(p, nullptr, units, plan.kts_stats, false, false);
            } while (size_stats > limit && ranges < p.KT);
            plan.units[0] = units;
            plan.kts_ds   = kts;
            plan.size     = std::max(size, size_stats);
            return plan.size <= limit;
        }
    }
    return false;
}

static fattn_back_hopper_plan fattn_back_hopper_make_plan(
    const fattn_back_args & args, const bool always_split, const size_t limit, const int nsm) {
    fattn_back_hopper_plan plan  = {};
    fattn_back_hopper_params & p = plan.p;
    p.a                          = args;
    p.QT                         = (args.N + FATTN_BACK_HOPPER_ROWS - 1) / FATTN_BACK_HOPPER_ROWS;
    p.KT                         = (args.M + FATTN_BACK_HOPPER_ROWS - 1) / FATTN_BACK_HOPPER_ROWS;
    p.nparts                     = std::min(512, p.KT);
    plan.always_split            = always_split;
    const int total              = args.S * args.Hkv;
    const bool ds                = !always_split && fattn_back_hopper_plan_ds(plan, limit, nsm);
    if (!ds) {
        plan.kts_stats = p.KT;
        plan.kts_ds    = 0;
        plan.size      = 0;
    }
    for (int split = ds ? 1 : 0; split < 2; ++split) {
        int passes = 0;
        size_t size;
        do {
            if (passes == total) {
                plan.size = 0;
                return plan;
            }
            passes++;
            plan.units[split] = (total + passes - 1) / passes;
            size              = fattn_back_hopper_layout(p, nullptr, plan.units[split], p.KT, split != 0, false);
        } while (size > limit);
        plan.size = std::max(plan.size, size);
    }
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

// key tiles that the window touches
static int fattn_back_hopper_window(const fattn_back_hopper_params & p) {
    return (p.a.kv_first + p.a.kv_count - 1) / FATTN_BACK_HOPPER_ROWS - p.a.kv_first / FATTN_BACK_HOPPER_ROWS + 1;
}

// bands: as many units as their streamed operands fit the L2 cache, and no more than it takes to even out the blocks' work
static void fattn_back_hopper_set_bands(fattn_back_hopper_params & p) {
    const auto band = [&](const int64_t nrows, const int ntiles) {
        const int64_t fit  = FATTN_BACK_HOPPER_BAND / (nrows * p.a.Dk * 4);
        const int64_t even = (FATTN_BACK_HOPPER_BLOCKS + ntiles - 1) / ntiles;
        return (int) std::max<int64_t>(1, std::min({ fit, even, (int64_t) p.units }));
    };
    p.band_q = p.a.G * band(p.a.M, p.QT * p.a.G);
    p.band_k = p.a.kv_count > 0 ? band(p.a.N, fattn_back_hopper_window(p)) : 1;
}

template <int D, int nwg, int stages, int nregs, bool split>
static void fattn_back_hopper_keys(const fattn_back_hopper_params & p, cudaStream_t stream) {
    using L = fattn_back_hopper_smem<D, nwg, stages, stages, split>;
    fattn_back_hopper_launch<flash_attn_back_hopper_keys<D, nwg, stages, nregs, split>>(
        p, fattn_back_hopper_grid(p.units, p.band_k, (fattn_back_hopper_window(p) + nwg - 1) / nwg), (nwg + 1) * 128, L::bytes, stream);
}

template <int D, int stages, bool split, bool ds>
static void fattn_back_hopper_keys_split(const fattn_back_hopper_params & p, cudaStream_t stream) {
    using L          = fattn_back_hopper_smem<D, 1, stages, stages, split, false, true>;
    const int ntiles = ds ? std::min(p.kts, p.KT - p.kt0) : fattn_back_hopper_window(p);
    const int band   = ds ? p.units : p.band_k;
    fattn_back_hopper_launch<flash_attn_back_hopper_keys_split<D, stages, split, ds>>(
        p, fattn_back_hopper_grid(p.units, band, ntiles), 3 * 128, L::bytes, stream);
}

template <int D, int nwg, int stages>
static void fattn_back_hopper_dq(const fattn_back_hopper_params & p, cudaStream_t stream) {
    using L = fattn_back_hopper_smem_dq<D, nwg, stages>;
    fattn_back_hopper_launch<flash_attn_back_hopper_dq<D, nwg, stages>>(
        p, dim3(p.units * p.a.G, (p.QT + nwg - 1) / nwg), (nwg + 1) * 128, L::bytes, stream);
}

// K and V of the key tiles from kt0 on, and Q and dO if with_rows
template <int D, bool split>
static void fattn_back_hopper_convert(const fattn_back_hopper_params & p, const bool with_rows, cudaStream_t stream) {
    const dim3 tiles(with_rows ? std::max(p.kts, p.QT) : p.kts, (with_rows ? 2 + p.a.G : 2) * p.units);
    flash_attn_back_hopper_convert<D, split><<<tiles, FATTN_BACK_HOPPER_PREP_THREADS, 0, stream>>>(p);
    CUDA_CHECK(cudaGetLastError());
}

template <int D, bool split>
static void fattn_back_hopper_prep(const fattn_back_hopper_params & p, cudaStream_t stream) {
    const int n = FATTN_BACK_HOPPER_PREP_THREADS;
    if constexpr (!split) {
        flash_attn_back_hopper_columns<D><<<dim3(p.nparts, p.units, 2), n, 0, stream>>>(p);
        flash_attn_back_hopper_means<<<dim3(p.units, 2), 4 * FATTN_BACK_HOPPER_MAX_D, 0, stream>>>(p, D);
    }
    fattn_back_hopper_convert<D, split>(p, true, stream);
    if constexpr (!split) {
        flash_attn_back_hopper_rescale<D><<<dim3(p.QT, p.a.G * p.units), n, 0, stream>>>(p);
    }
    CUDA_CHECK(cudaGetLastError());
}

// kernels of a head size
template <int D, bool split>
static void fattn_back_hopper_main(const fattn_back_hopper_params & p, cudaStream_t stream) {
    const bool has_keys = (p.a.dK != nullptr || p.a.dV != nullptr) && p.a.kv_count > 0;
    if constexpr (D == 256) {
        if constexpr (split) {
            fattn_back_hopper_queries<D, 1, 1, 2, 240, FATTN_BACK_HOPPER_STATS, false, true>(p, stream);
        } else {
            fattn_back_hopper_queries<D, 2, 3, 4, 240, FATTN_BACK_HOPPER_STATS, true, false>(p, stream);
        }
        if (p.a.dQ != nullptr) {
            if constexpr (split) {
                fattn_back_hopper_queries<D, 1, 1, 2, 240, FATTN_BACK_HOPPER_DQ, false, true>(p, stream);
            } else {
                fattn_back_hopper_queries<D, 2, 2, 1, 240, FATTN_BACK_HOPPER_DQ, false, false>(p, stream);
            }
        }
        if (has_keys) {
            fattn_back_hopper_keys_split<D, split ? 1 : 2, split, false>(p, stream);
        }
    } else {
        constexpr int stages = split ? 2 : 4;
        fattn_back_hopper_queries<D, 2, stages, stages, 240, FATTN_BACK_HOPPER_FUSED, false, split>(p, stream);
        if (has_keys) {
            fattn_back_hopper_keys<D, 2, stages, 240, split>(p, stream);
        }
    }
}

// All of a pass with dS in the workspace: LSE and D of ranges of keys, then dS, dK, dV and dQ of ranges of keys
template <int D>
static void fattn_back_hopper_pass_ds(
    const fattn_back_hopper_plan & plan, fattn_back_hopper_params & p, char * workspace, cudaStream_t stream) {
    fattn_back_hopper_layout(p, workspace, plan.units[0], plan.kts_stats, false, false);
    fattn_back_hopper_set_bands(p);
    for (p.kt0 = 0; p.kt0 < p.KT; p.kt0 += p.kts) {
        if (p.kt0 == 0) {
            fattn_back_hopper_prep<D, false>(p, stream);
        } else {
            fattn_back_hopper_convert<D, false>(p, false, stream);
        }
        fattn_back_hopper_queries<D, 2, 3, 4, 240, FATTN_BACK_HOPPER_STATS, true, false>(p, stream);
    }
    fattn_back_hopper_layout(p, workspace, plan.units[0], plan.kts_ds, false, true);
    for (p.kt0 = 0; p.kt0 < p.KT; p.kt0 += p.kts) {
        fattn_back_hopper_convert<D, false>(p, false, stream);
        fattn_back_hopper_keys_split<D, 2, false, true>(p, stream);
        fattn_back_hopper_dq<D, 2, 4>(p, stream);
    }
    p.kt0 = 0;
}

template <int D>
static void fattn_back_hopper_passes(const fattn_back_hopper_plan & plan, char * workspace, cudaStream_t stream) {
    fattn_back_hopper_params p = plan.p;
    const int total            = p.a.S * p.a.Hkv;
    for (int split = 0; split < 2; ++split) {
        fattn_back_hopper_layout(p, workspace, plan.units[split], split != 0 ? p.KT : plan.kts_stats, split != 0, false);
        if (split == 0 && p.a.mask != nullptr) {
            constexpr int n = FATTN_BACK_HOPPER_PREP_THREADS / FATTN_BACK_HOPPER_ROWS;
            const dim3 grid((p.KT + n - 1) / n, p.QT, p.a.mask_nheads * p.a.mask_nseqs);
            flash_attn_back_hopper_mask_tiles<<<grid, FATTN_BACK_HOPPER_PREP_THREADS, 0, stream>>>(p);
            flash_attn_back_hopper_mask_used<<<dim3(p.KT, p.a.mask_nseqs * p.a.mask_groups()), 32, 0, stream>>>(p);
            CUDA_CHECK(cudaGetLastError());
        }
        for (p.unit0 = 0; p.unit0 < total; p.unit0 += p.units) {
            p.units = std::min(plan.units[split], total - p.unit0);
            fattn_back_hopper_set_bands(p);
            if (split != 0) {
                fattn_back_hopper_prep<D, true>(p, stream);
                fattn_back_hopper_main<D, true>(p, stream);
            } else if (plan.kts_ds > 0) {
                if constexpr (D == FATTN_BACK_HOPPER_MAX_D) {
                    fattn_back_hopper_pass_ds<D>(plan, p, workspace, stream);
                }
            } else {
                fattn_back_hopper_prep<D, false>(p, stream);
                if (plan.always_split) {
                    CUDA_CHECK(cudaMemsetAsync(p.large + p.unit0, 0x7F, p.units * sizeof(*p.large), stream));
                } else {
                    fattn_back_hopper_main<D, false>(p, stream);
                }
            }
        }
    }
    if (p.a.dSinks != nullptr) {
        flash_attn_back_hopper_sinks<<<p.a.H, FATTN_BACK_HOPPER_PREP_THREADS, 0, stream>>>(p);
        CUDA_CHECK(cudaGetLastError());
    }
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
