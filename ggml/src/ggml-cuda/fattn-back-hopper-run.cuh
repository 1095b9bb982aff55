#pragma once

// Workspace and launches of the Hopper path of FLASH_ATTN_BACK and of its forward.

#include "fattn-back-hopper-forward.cuh"
#include "fattn-back-hopper-prep.cuh"

#define FATTN_BACK_HOPPER_BAND     (40 << 20) // bytes of streamed operands that blocks which run side by side may share
#define FATTN_BACK_HOPPER_FEW      4    // blocks a multiprocessor, or of a head, where there is seldom anything to do
#define FATTN_BACK_HOPPER_BLOCKS   1024 // tiles whose blocks finish at much the same time in any order
#define FATTN_BACK_HOPPER_START    8    // key tiles whose time a block of queries takes to start and to end
#define FATTN_BACK_HOPPER_SPLITS   16   // of the keys, at most
#define FATTN_BACK_HOPPER_PART     16   // key tiles of a part of the columns' statistics, at most where that fills the device
#define FATTN_BACK_HOPPER_LAUNCHES 24   // products of tiles whose time the launches of a range of keys take

// A pass takes as many units as the workspace holds; first all units, then again those that need a split S.
struct fattn_back_hopper_plan {
    fattn_back_hopper_params p;
    int units[2];      // of a pass, not split and split
    int nsplits[2];    // of the keys, for LSE
    int nsplits_dq[2]; // and for dQ where it is formed by itself
    int kts_ds;        // key tiles whose dS is kept together, 0: dS is not kept
    int units_ds;      // units whose dS is kept together
    size_t size;       // of the workspace; above the limit where one unit with S split is
};

// Places the arrays in the workspace for p.nsplits and p.nsplits_dq, returns its size; base may be NULL. units_ds: whose keys are there with
// dS, kts tiles of them; 0: all keys of all units without.
static size_t fattn_back_hopper_layout(
    fattn_back_hopper_params & p, char * base, const int units, const bool hilo, const int kts, const int units_ds) {
    size_t size     = 0;
    const auto take = [&](auto *& ptr, const int64_t n) {
        ptr = n > 0 ? (std::remove_reference_t<decltype(ptr)>) (base + size) : nullptr;
        size += GGML_PAD(n * sizeof(*ptr), 1024);
    };
    const bool backward = p.a.O == nullptr;
    const int64_t heads = (int64_t) units * p.a.G;
    const int64_t total = (int64_t) p.a.S * p.a.Hkv;
    const int64_t nrows = heads * p.QT * FATTN_BACK_HOPPER_ROWS;
    p.mask.layout(p.a, p.QT, p.KT, take);
    take(p.mean_k, total * FATTN_BACK_PREP_MAX_D);
    take(p.mean_v, total * FATTN_BACK_PREP_MAX_D);
    take(p.scale, total);
    take(p.weight, total * p.a.G);
    take(p.large, total);
    take(p.known, total);
    take(p.taken, 1);
    p.guard.layout(p.a, take);
    take(p.rowparts, heads * p.QT);
    take(p.q, nrows * p.a.Dk * (hilo ? 2 : 1));
    take(p.dO, backward ? nrows * p.a.Dv : 0);
    take(p.rows, nrows);
    take(p.stat, backward ? nrows * 2 : 0);
    // from here on only for a while
    const size_t start = size;
    p.mask.layout_scratch(p.a, take);
    size_t end = size;
    size       = start;
    take(p.colparts, (int64_t) units * 2 * p.nparts * FATTN_BACK_COLUMNS_SIZE);
    end                 = std::max(end, size);
    size                = start;
    p.kts               = units_ds > 0 ? kts : p.KT;
    const int64_t nkeys = (int64_t) (units_ds > 0 ? units_ds : units) * p.kts * FATTN_BACK_HOPPER_ROWS;
    take(p.k, nkeys * p.a.Dk * (hilo ? 2 : 1));
    take(p.v, nkeys * p.a.Dv);
    if (units_ds > 0) {
        take(p.ds, nkeys * p.a.G * p.QT * FATTN_BACK_HOPPER_ROWS);
        take(p.planes, p.nsplits_dq > 1 ? (int64_t) units_ds * p.a.G * p.QT * FATTN_BACK_HOPPER_ROWS * p.nsplits_dq * p.a.Dk : 0);
        return std::max(size, end);
    }
    take(p.sums, p.nsplits > 1 ? nrows * 3 * p.nsplits : 0);
    const int nplanes = !backward ? p.nsplits : p.nsplits_dq;
    take(p.planes, nplanes > 1 ? nrows * nplanes * p.a.Dk : 0);
    return std::max(size, end);
}

// few queries for the keys: blocks of queries have much the same to do, whatever the mask
static bool fattn_back_hopper_few(const fattn_back_hopper_params & p) {
    return p.KT >= 4 * p.QT && p.a.G * p.QT <= 65535; // the last for a grid's y
}

// blocks of n query tiles in a unit
static int64_t fattn_back_hopper_blocks(const fattn_back_hopper_params & p, const int n) {
    return (int64_t) (p.a.G / p.heads_q) * ((p.heads_q * p.QT + n - 1) / n);
}
static int64_t fattn_back_hopper_blocks_dq(const fattn_back_hopper_params & p) {
    return ((int64_t) p.a.G * p.QT + FATTN_BACK_HOPPER_DQ_TILES - 1) / FATTN_BACK_HOPPER_DQ_TILES;
}

// Into how many shares the keys go, so that nblocks blocks of queries that walk ntiles key tiles fill the device's multiprocessors; set(n)
// says whether the workspace holds n shares. Returns the key tiles that a multiprocessor then walks, with what it takes to start a block.
template <typename F>
static int64_t fattn_back_hopper_set_splits(const int64_t nblocks, const int ntiles, const int nsm, const F & set) {
    int64_t best   = INT64_MAX / 10;
    int nsplits    = 1;
    const int most = std::clamp(ntiles / FATTN_BACK_HOPPER_START, 1, FATTN_BACK_HOPPER_SPLITS);
    for (int n = 1; n <= most; ++n) {
        const int64_t cost = (nblocks * n + nsm - 1) / nsm * ((ntiles + n - 1) / n + FATTN_BACK_HOPPER_START);
        if (n == 1 || (10 * cost < 9 * best && set(n))) {
            best    = cost;
            nsplits = n;
        }
    }
    set(nsplits);
    return best;
}

static fattn_back_hopper_params fattn_back_hopper_get_params(const fattn_back_args & args) {
    fattn_back_hopper_params p = {};
    p.a                        = args;
    p.QT                       = (args.N + FATTN_BACK_HOPPER_ROWS - 1) / FATTN_BACK_HOPPER_ROWS;
    p.KT                       = (args.M + 2 * FATTN_BACK_HOPPER_ROWS - 1) / (2 * FATTN_BACK_HOPPER_ROWS) * 2;
    p.nparts                   = std::min(512, p.KT);
    p.heads_q                  = fattn_back_hopper_few(p) ? args.G : 1;
    p.nsplits                  = 1;
    p.nsplits_dq               = 1;
    return p;
}

// bytes of the smallest workspace: one unit with S split
static size_t fattn_back_hopper_least(const fattn_back_args & args) {
    fattn_back_hopper_params p = fattn_back_hopper_get_params(args);
    return fattn_back_hopper_layout(p, nullptr, 1, true, 0, 0);
}

// query tiles of a block of forward, and of queries
static constexpr int fattn_back_hopper_groups(const int D, const bool hilo) {
    return D == FATTN_BACK_PREP_MAX_D && hilo ? 1 : 2;
}

// dS of D = 256: of as many key tiles as fit the workspace with n of the pass' units; least is what recomputing costs. Where many keys meet few
// queries dQ then costs one product instead of three; under a causal mask the key tiles of a range have much the same to do.
static void fattn_back_hopper_plan_ds(fattn_back_hopper_plan & plan, const size_t limit, const int nsm, int64_t least) {
    fattn_back_hopper_params & p = plan.p;
    const fattn_back_args & a    = p.a;
    const int units              = plan.units[0];
    if (a.dQ == nullptr || (a.dK == nullptr && a.dV == nullptr) || a.kv_count != a.M || !fattn_back_hopper_few(p) ||
        fattn_back_hopper_layout(p, nullptr, units, false, std::min(p.KT, nsm), 1) > limit) {
        return;
    }
    const int nsplits_dq = p.nsplits_dq;
    for (int n = 1; n <= std::min(units, nsm); n += 1 + n / 8) {
        for (int waves = 1; (waves / 2) * (nsm / n) < p.KT; waves *= 2) {
            const int k     = std::min(p.KT, waves * (nsm / n));
            const auto size = [&]() { return fattn_back_hopper_layout(p, nullptr, units, false, k, n); };
            p.nsplits_dq    = 1;
            if (size() > limit) {
                break;
            }
            const int64_t walked  = fattn_back_hopper_set_splits(n * fattn_back_hopper_blocks_dq(p), k, nsm, [&](const int m) {
                p.nsplits_dq = m;
                return size() <= limit;
            });
            const int64_t nranges = (int64_t) ((units + n - 1) / n) * ((p.KT + k - 1) / k);
            const int64_t cost    = nranges * (4 * waves * a.G * p.QT + FATTN_BACK_HOPPER_DQ_TILES * walked + FATTN_BACK_HOPPER_LAUNCHES);
            if (cost < least) {
                least              = cost;
                plan.nsplits_dq[0] = p.nsplits_dq;
                plan.kts_ds        = k;
                plan.units_ds      = n;
                plan.size          = std::max(plan.size, size());
            }
        }
    }
    p.nsplits_dq = nsplits_dq;
}

// units of a band: as many as their streamed operands fit the L2 cache, and no more than it takes to even out the blocks' work
static int fattn_back_hopper_band(const fattn_back_hopper_params & p, const int64_t nrows, const int ntiles, const int units) {
    const int64_t fit  = FATTN_BACK_HOPPER_BAND / (nrows * p.a.Dk * 4);
    const int64_t even = (FATTN_BACK_HOPPER_BLOCKS + ntiles - 1) / ntiles;
    return (int) std::max<int64_t>(1, std::min({ fit, even, (int64_t) units }));
}

static fattn_back_hopper_plan fattn_back_hopper_make_plan(const fattn_back_args & args, const size_t limit, const int nsm) {
    fattn_back_hopper_plan plan  = {};
    fattn_back_hopper_params & p = plan.p;
    p                            = fattn_back_hopper_get_params(args);
    const int total              = args.S * args.Hkv;
    p.nparts                     = std::min(p.nparts, std::max((nsm + total - 1) / total, p.KT / FATTN_BACK_HOPPER_PART));
    const bool has_dq            = args.O == nullptr && args.dQ != nullptr;
    size_t room                  = limit;
    for (int hilo = 1; hilo >= 0; --hilo) {
        const auto size  = [&](const int n) { return fattn_back_hopper_layout(p, nullptr, n, hilo != 0, 0, 0); };
        p.nsplits        = 1;
        p.nsplits_dq     = 1;
        const int most   = fattn_back_most(total, [&](const int n) { return size(n) <= room; });
        const int units  = fattn_back_even(total, most);
        room             = std::max(room, size(units)); // one unit with S split
        const int64_t nb = units * fattn_back_hopper_blocks(p, fattn_back_hopper_groups(args.Dk, hilo != 0));
        const auto set   = [&](int & nsplits) {
            return fattn_back_hopper_set_splits(nb, p.KT, nsm, [&](const int n) {
                nsplits = n;
                return size(units) <= room;
            });
        };
        set(p.nsplits);
        const int64_t walked  = has_dq ? set(p.nsplits_dq) : 0;
        plan.units[hilo]      = units;
        plan.nsplits[hilo]    = p.nsplits;
        plan.nsplits_dq[hilo] = p.nsplits_dq;
        plan.size             = std::max(plan.size, size(units));
        if (hilo == 0 && has_dq && args.Dk == FATTN_BACK_PREP_MAX_D) {
            const int64_t keys = 4 * (((int64_t) units * p.KT + nsm - 1) / nsm) * args.G * p.QT;
            fattn_back_hopper_plan_ds(plan, room, nsm, 3 * 2 * walked + keys);
        }
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

// the same where blocks take items
template <auto kernel>
static void fattn_back_hopper_launch(
    fattn_back_hopper_params p, const fattn_back_hopper_items & items, const int nthreads, const int shared, cudaStream_t stream) {
    p.items = items;
    fattn_back_hopper_launch<kernel>(
        p, dim3(std::min(items.count(), ggml_cuda_info().devices[ggml_cuda_get_device()].nsm)), nthreads, shared, stream);
}

static dim3 fattn_back_hopper_grid(const int n, const int band, const int ntiles) {
    return dim3(band, ntiles, (n + band - 1) / band);
}

// blocks of threads of a row each, or of n threads of a row
static dim3 fattn_back_hopper_grid_rows(const fattn_back_hopper_params & p, const int n) {
    const int64_t nthreads = (int64_t) p.QT * FATTN_BACK_HOPPER_ROWS * n;
    return dim3((nthreads + FATTN_BACK_PREP_THREADS - 1) / FATTN_BACK_PREP_THREADS, p.units * p.a.G);
}

static void fattn_back_hopper_set_bands(fattn_back_hopper_params & p) {
    p.band_q = p.a.G / p.heads_q * fattn_back_hopper_band(p, p.a.M, p.QT * p.a.G, p.units);
    p.band_k = fattn_back_hopper_band(p, p.a.N, std::max(1, fattn_back_hopper_window(p)), p.units);
}

// K and V of the key tiles from kt0 on, and Q and dO if with_rows
template <int D, bool hilo>
static void fattn_back_hopper_convert(const fattn_back_hopper_params & p, const bool with_rows, cudaStream_t stream) {
    const int nx    = with_rows ? std::max(p.kts, p.QT) : p.kts;
    const int ny    = (with_rows ? 2 + p.a.G : 2) * p.units;
    const dim3 grid = hilo ? dim3(FATTN_BACK_HOPPER_FEW * ggml_cuda_info().devices[ggml_cuda_get_device()].nsm) : dim3(nx, ny);
    flash_attn_back_hopper_convert<D, hilo><<<grid, FATTN_BACK_PREP_THREADS, 0, stream>>>(p, nx, ny);
    CUDA_CHECK(cudaGetLastError());
}

template <int D, bool hilo>
static void fattn_back_hopper_prep(const fattn_back_hopper_params & p, cudaStream_t stream) {
    if constexpr (!hilo) {
        ggml_cuda_flash_attn_back_columns(p.a, p.mask, p.unit0, p.units, p.nparts, p.colparts, stream);
        flash_attn_back_hopper_means<<<dim3(p.units, 2), FATTN_BACK_PREP_MEAN_THREADS, 0, stream>>>(p, D);
    }
    fattn_back_hopper_convert<D, hilo>(p, true, stream);
    if constexpr (!hilo) {
        const dim3 few(std::min(p.QT, FATTN_BACK_HOPPER_FEW), p.a.G * p.units);
        flash_attn_back_hopper_rescale<D><<<few, FATTN_BACK_PREP_THREADS, 0, stream>>>(p);
        if (p.a.split_all) {
            CUDA_CHECK(cudaMemsetAsync(p.large + p.unit0, 0x7F, p.units * sizeof(*p.large), stream));
        }
    }
    CUDA_CHECK(cudaGetLastError());
}

template <int D, int nwg, int kn, int stages, bool hilo>
static void fattn_back_hopper_forward_shape(const fattn_back_hopper_params & p, cudaStream_t stream) {
    using L = fattn_back_hopper_smem_forward<D, nwg, kn, stages, hilo>;
    fattn_back_hopper_launch<flash_attn_back_hopper_forward<D, nwg, kn, stages, hilo>>(
        p, fattn_back_hopper_items_q(p, nwg, p.nsplits), (nwg + 1) * 128, L::bytes, stream);
}

// O and LSE, or LSE and D
template <int D, bool hilo>
static void fattn_back_hopper_forward(const fattn_back_hopper_params & p, cudaStream_t stream) {
    if constexpr (D == 256) {
        fattn_back_hopper_forward_shape<D, hilo ? 1 : 2, 1, hilo ? 1 : 2, hilo>(p, stream);
    } else if constexpr (D == 128) {
        fattn_back_hopper_forward_shape<D, 2, hilo ? 1 : 2, hilo ? 2 : 3, hilo>(p, stream);
    } else {
        fattn_back_hopper_forward_shape<D, 2, hilo ? 1 : 2, 4, hilo>(p, stream);
    }
    if (p.nsplits > 1) {
        flash_attn_back_hopper_combine<D, hilo><<<fattn_back_hopper_grid_rows(p, D / 4), FATTN_BACK_PREP_THREADS, 0, stream>>>(p);
        CUDA_CHECK(cudaGetLastError());
    }
    if (p.a.saved.stamp != nullptr && p.a.O == nullptr) {
        flash_attn_back_hopper_known<hilo><<<fattn_back_hopper_grid_rows(p, 1), FATTN_BACK_PREP_THREADS, 0, stream>>>(p);
        CUDA_CHECK(cudaGetLastError());
    }
}

// dK and dV; ds: and dS of all queries of D = 256
template <int D, bool hilo, bool ds>
static void fattn_back_hopper_keys(const fattn_back_hopper_params & p, cudaStream_t stream) {
    const int ntiles = fattn_back_hopper_window(p);
    if (ntiles == 0) {
        return;
    }
    if constexpr (D == FATTN_BACK_PREP_MAX_D) {
        constexpr int stages = hilo ? 1 : 2;
        using L              = fattn_back_hopper_smem<D, 1, stages, stages, hilo, 2 * FATTN_BACK_HOPPER_EXCHANGE, 4>;
        fattn_back_hopper_launch<flash_attn_back_hopper_keys_256<D, stages, hilo, ds>>(
            p, fattn_back_hopper_grid(p.units, ds ? p.units : p.band_k, ntiles), 3 * 128, L::bytes, stream);
    } else {
        constexpr int stages = hilo ? 2 : 4;
        using L              = fattn_back_hopper_smem<D, 2, stages, stages, hilo>;
        fattn_back_hopper_launch<flash_attn_back_hopper_keys<D, 2, stages, hilo>>(
            p, fattn_back_hopper_items_k(p, 2), 3 * 128, L::bytes, stream);
    }
}

template <int D, bool hilo>
static void fattn_back_hopper_combine_dq(const fattn_back_hopper_params & p, cudaStream_t stream) {
    if (p.nsplits_dq > 1) {
        flash_attn_back_hopper_combine_dq<D, hilo><<<fattn_back_hopper_grid_rows(p, D / 4), FATTN_BACK_PREP_THREADS, 0, stream>>>(p);
        CUDA_CHECK(cudaGetLastError());
    }
}

// the gradients from LSE and D
template <int D, bool hilo>
static void fattn_back_hopper_grads(const fattn_back_hopper_params & p, cudaStream_t stream) {
    if (p.a.dQ != nullptr) {
        constexpr int nwg = fattn_back_hopper_groups(D, hilo);
        constexpr int n1  = D < FATTN_BACK_PREP_MAX_D ? (hilo ? 2 : 4) : hilo ? 1
                                                                              : 2;
        constexpr int n2  = D < FATTN_BACK_PREP_MAX_D ? n1 : hilo ? 2
                                                                  : 1;
        fattn_back_hopper_launch<flash_attn_back_hopper_queries<D, nwg, n1, n2, hilo>>(p,
            fattn_back_hopper_items_q(p, nwg, p.nsplits_dq), (nwg + 1) * 128,
            fattn_back_hopper_smem<D, nwg, n1, n2, hilo>::bytes, stream);
        fattn_back_hopper_combine_dq<D, hilo>(p, stream);
    }
    fattn_back_hopper_keys<D, hilo, false>(p, stream);
}

// the same with dS in the workspace, of n units at a time, and a range of keys at a time
template <int D>
static void fattn_back_hopper_grads_ds(const fattn_back_hopper_params & all, const int n, cudaStream_t stream) {
    for (int unit = 0; unit < all.units; unit += n) {
        fattn_back_hopper_params p = all;
        const int64_t nrows        = (int64_t) unit * p.a.G * p.QT * FATTN_BACK_HOPPER_ROWS;
        p.again                    = true;
        p.unit0 += unit;
        p.units = std::min(n, all.units - unit);
        p.q += nrows * D;
        p.dO += nrows * D;
        p.stat += nrows * 2;
        for (; p.kt0 < p.KT; p.kt0 += p.kts) {
            fattn_back_hopper_convert<D, false>(p, false, stream);
            fattn_back_hopper_keys<D, false, true>(p, stream);
            fattn_back_hopper_launch<flash_attn_back_hopper_dq<D, 4>>(p, dim3(p.units, fattn_back_hopper_blocks_dq(p) * p.nsplits_dq), 3 * 128,
                fattn_back_hopper_smem_dq<D, 4>::bytes, stream);
        }
        fattn_back_hopper_combine_dq<D, false>(p, stream);
    }
}

// one pass over p.units units from p.unit0 on
template <int D, bool hilo>
static void fattn_back_hopper_pass(
    const fattn_back_hopper_plan & plan, fattn_back_hopper_params p, char * workspace, cudaStream_t stream) {
    fattn_back_hopper_prep<D, hilo>(p, stream);
    fattn_back_hopper_forward<D, hilo>(p, stream);
    if (p.a.O != nullptr) {
        return;
    }
    if constexpr (D == FATTN_BACK_PREP_MAX_D && !hilo) {
        if (plan.kts_ds > 0) {
            p.nsplits_dq = plan.nsplits_dq[0];
            fattn_back_hopper_layout(p, workspace, plan.units[0], false, plan.kts_ds, plan.units_ds);
            fattn_back_hopper_grads_ds<D>(p, plan.units_ds, stream);
            return;
        }
    }
    fattn_back_hopper_grads<D, hilo>(p, stream);
}

template <int D>
static void fattn_back_hopper_run(const fattn_back_hopper_plan & plan, char * workspace, cudaStream_t stream) {
    fattn_back_hopper_params p = plan.p;
    const int total            = p.a.S * p.a.Hkv;
    for (int hilo = 0; hilo < 2; ++hilo) {
        p.nsplits    = plan.nsplits[hilo];
        p.nsplits_dq = hilo == 0 && plan.kts_ds > 0 ? 1 : plan.nsplits_dq[hilo];
        fattn_back_hopper_layout(p, workspace, plan.units[hilo], hilo != 0, 0, 0);
        if (hilo == 0) {
            ggml_cuda_flash_attn_back_mask_table(p.a, p.mask, stream);
        }
        for (p.unit0 = 0; p.unit0 < total; p.unit0 += p.units) {
            p.units = std::min(plan.units[hilo], total - p.unit0);
            fattn_back_hopper_set_bands(p);
            if (hilo != 0) {
                fattn_back_hopper_pass<D, true>(plan, p, workspace, stream);
            } else {
                fattn_back_hopper_pass<D, false>(plan, p, workspace, stream);
            }
        }
    }
    const auto bits = [](const float x) {
        uint32_t y;
        memcpy(&y, &x, sizeof(y));
        return y;
    };
    const bool forward             = p.a.O != nullptr;
    const fattn_back_guard_end end = { p.large, bits(FATTN_BACK_HOPPER_LARGE), bits(FATTN_BACK_GUARD_PEAKED),
        forward ? FATTN_BACK_STAMP_HOPPER : 0, FATTN_BACK_HOPPER_IN_F32 };
    if (forward) {
        ggml_cuda_flash_attn_back_guard(p.a, p.guard, end, stream);
        return;
    }
    if (p.a.sinks != nullptr && p.a.dQ != nullptr) {
        flash_attn_back_hopper_sinks_dq<<<dim3(p.a.N, p.a.H, p.a.S), D / 4, 0, stream>>>(p);
        CUDA_CHECK(cudaGetLastError());
    }
    ggml_cuda_flash_attn_back_sinks(p.a, p.guard, stream);
    ggml_cuda_flash_attn_back_guard(p.a, p.guard, end, stream);
}

static void fattn_back_hopper_run(const fattn_back_hopper_plan & plan, char * workspace, cudaStream_t stream) {
    switch (plan.p.a.Dk) {
        case 64:
            fattn_back_hopper_run<64>(plan, workspace, stream);
            break;
        case 128:
            fattn_back_hopper_run<128>(plan, workspace, stream);
            break;
        case 256:
            fattn_back_hopper_run<256>(plan, workspace, stream);
            break;
        default:
            GGML_ABORT("unexpected head size");
    }
}
