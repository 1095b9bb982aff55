#pragma once

// Workspace and launches of the Hopper path of FLASH_ATTN_BACK.

#include "fattn-back-hopper-prep.cuh"

#define FATTN_BACK_HOPPER_BAND     (40 << 20) // bytes of streamed operands that blocks which run side by side may share
#define FATTN_BACK_HOPPER_FEW      16       // blocks that share a head's tiles where there is seldom anything to do
#define FATTN_BACK_HOPPER_BLOCKS   1024     // tiles whose blocks finish at much the same time in any order
#define FATTN_BACK_HOPPER_START    8        // key tiles whose time a block of queries takes to start and to end
#define FATTN_BACK_HOPPER_PARTS    16       // of the keys, at most
#define FATTN_BACK_HOPPER_LAUNCHES 24     // products of tiles whose time the launches of a range of keys take

// a pass takes as many units as the workspace holds; first all units, then again those that need a split S
struct fattn_back_hopper_plan {
    fattn_back_hopper_params p;
    bool always_split; // GGML_PREC_F32
    int units[2];     // of a pass, not split and split
    int parts[2];     // of the keys, for LSE and D
    int parts_dq[2];  // and for dQ alone
    int kts_stats;     // not split: key tiles that are in the workspace together, for LSE and D
    int kts_ds;        // with dS, 0: dS is not kept
    int units_ds;      // units whose dS is kept together
    size_t size;         // of the workspace; above the limit where one unit with S split is
};

// Places the arrays in the workspace for p.parts and p.parts_dq, returns its size; base may be NULL. units_ds: whose keys are there with dS,
// 0: of all units without.
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
    p.mask.layout_scratch(p.a, take);
    size_t end = size;
    size       = start;
    take(p.colparts, (int64_t) units * 2 * p.nparts * FATTN_BACK_COLUMNS_SIZE);
    end                 = std::max(end, size);
    size                = start;
    p.kts               = kts;
    const int64_t nkeys = (int64_t) (units_ds > 0 ? units_ds : units) * kts * FATTN_BACK_HOPPER_ROWS;
    take(p.k, nkeys * p.a.Dk * (split ? 2 : 1));
    take(p.v, nkeys * p.a.Dv);
    const int64_t nrows = (units_ds > 0 ? (int64_t) units_ds * p.a.G : heads) * p.QT * FATTN_BACK_HOPPER_ROWS;
    const bool fused    = p.a.Dk < FATTN_BACK_PREP_MAX_D;
    if (units_ds > 0) {
        take(p.ds, nkeys * p.a.G * p.QT * FATTN_BACK_HOPPER_ROWS);
    } else {
        const int ranges = kts > 0 ? (p.KT + kts - 1) / kts : 1;
        p.slots          = fused && p.parts == 1 ? 0 : ranges * p.parts;
        take(p.sums, nrows * 3 * p.slots);
    }
    const int nplanes = fused ? 2 * p.slots : p.parts_dq > 1 ? p.parts_dq
                                                             : 0;
    if (p.a.dQ != nullptr) {
        take(p.dqs, nrows * nplanes * p.a.Dk);
    }
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

// Into how many parts the keys go, so that nblocks blocks of queries that walk ntiles key tiles fill the device's multiprocessors; set(n)
// says whether the workspace holds n parts. Returns the key tiles that a multiprocessor then walks, with what it takes to start a block.
template <typename F>
static int64_t fattn_back_hopper_set_parts(const int64_t nblocks, const int ntiles, const int nsm, const F & set) {
    int64_t best   = INT64_MAX / 10;
    int parts      = 1;
    const int most = std::clamp(ntiles / FATTN_BACK_HOPPER_START, 1, FATTN_BACK_HOPPER_PARTS);
    for (int n = 1; n <= most; ++n) {
        const int64_t cost = (nblocks * n + nsm - 1) / nsm * ((ntiles + n - 1) / n + FATTN_BACK_HOPPER_START);
        if (n == 1 || (10 * cost < 9 * best && set(n))) {
            best  = cost;
            parts = n;
        }
    }
    set(parts);
    return best;
}

// The passes of D = 256 over units and over ranges of keys that take the multiprocessors least time. Where many keys meet few queries, dS of
// as many key tiles as there are multiprocessors fits the workspace, and dQ costs one product instead of three. Under a causal mask the
// key tiles of a range have then much the same to do.
static void fattn_back_hopper_plan_ranges(fattn_back_hopper_plan & plan, const size_t limit, const int nsm) {
    fattn_back_hopper_params & p = plan.p;
    const fattn_back_args & a    = p.a;
    const int total              = a.S * a.Hkv;
    const bool ds                = a.dQ != nullptr && (a.dK != nullptr || a.dV != nullptr) && a.kv_count == a.M && fattn_back_hopper_few(p) &&
        fattn_back_hopper_layout(p, nullptr, 1, std::min(p.KT, nsm), false, 1) <= limit;
    int64_t best = INT64_MAX; // products of tiles that a multiprocessor forms
    int ranges   = 0;
    int units    = total + 1;
    while (units > 1 && (ranges != 1 || (ds && plan.kts_ds == 0))) {
        units              = fattn_back_even(total, units - 1);
        p.parts            = 1;
        p.parts_dq         = 1;
        const int passes   = (total + units - 1) / units;
        const size_t fixed = fattn_back_hopper_layout(p, nullptr, units, 0, false, 0);
        const size_t all   = fattn_back_hopper_layout(p, nullptr, units, p.KT, false, 0);
        if (fixed >= limit) {
            continue;
        }
        ranges          = all <= limit ? 1 : (all - fixed) / (limit - fixed) + 1;
        const int kts   = (p.KT + ranges - 1) / ranges;
        const auto size = [&]() { return fattn_back_hopper_layout(p, nullptr, units, kts, false, 0); };
        if (size() > limit) {
            continue;
        }
        int64_t cost  = 2 * 2 * ranges * fattn_back_hopper_set_parts(units * fattn_back_hopper_blocks(p, 2), kts, nsm, [&](const int n) {
            p.parts = n;
            return size() <= limit;
        });
        size_t nbytes = size();
        int64_t grads = 3 * 2 * ranges * fattn_back_hopper_set_parts(units * fattn_back_hopper_blocks(p, 2), kts, nsm, [&](const int n) {
            p.parts_dq = n;
            return size() <= limit;
        });
        grads += 4 * (((int64_t) units * p.KT + nsm - 1) / nsm) * a.G * p.QT;
        size_t nbytes_dq = size();
        int parts_dq     = p.parts_dq;
        int kts_ds       = 0;
        int units_ds     = 0;
        for (int n = 1; ds && n <= std::min(units, nsm); n += 1 + n / 8) {
            for (int waves = 1; (waves / 2) * (nsm / n) < p.KT; waves *= 2) {
                const int k        = std::min(p.KT, waves * (nsm / n));
                const auto size_ds = [&]() { return fattn_back_hopper_layout(p, nullptr, units, k, false, n); };
                p.parts_dq         = 1;
                if (size_ds() > limit) {
                    break;
                }
                const int64_t walked  = fattn_back_hopper_set_parts(n * fattn_back_hopper_blocks_dq(p), k, nsm, [&](const int m) {
                    p.parts_dq = m;
                    return size_ds() <= limit;
                });
                const int64_t nranges = (int64_t) ((units + n - 1) / n) * ((p.KT + k - 1) / k);
                const int64_t cost_ds =
                    nranges * (4 * waves * a.G * p.QT + FATTN_BACK_HOPPER_DQ_TILES * walked + FATTN_BACK_HOPPER_LAUNCHES);
                if (kts_ds == 0 || cost_ds < grads) {
                    grads     = cost_ds;
                    nbytes_dq = size_ds();
                    parts_dq  = p.parts_dq;
                    kts_ds    = k;
                    units_ds  = n;
                }
            }
        }
        cost = passes * (cost + grads);
        if (cost < best) {
            best             = cost;
            plan.units[0]    = units;
            plan.parts[0]    = p.parts;
            plan.parts_dq[0] = parts_dq;
            plan.kts_stats   = kts;
            plan.kts_ds      = kts_ds;
            plan.units_ds    = units_ds;
            plan.size        = std::max(nbytes, nbytes_dq);
        }
    }
}

static fattn_back_hopper_params fattn_back_hopper_get_params(const fattn_back_args & args) {
    fattn_back_hopper_params p = {};
    p.a                        = args;
    p.QT                       = (args.N + FATTN_BACK_HOPPER_ROWS - 1) / FATTN_BACK_HOPPER_ROWS;
    p.KT                       = (args.M + FATTN_BACK_HOPPER_ROWS - 1) / FATTN_BACK_HOPPER_ROWS;
    p.nparts                   = std::min(512, p.KT);
    p.heads_q                  = fattn_back_hopper_few(p) ? args.G : 1;
    p.parts                    = 1;
    p.parts_dq                 = 1;
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
    // blocks have nwg query tiles; returns the bytes in all
    const auto share = [&](const bool split, const size_t room, const int nwg) {
        const int n    = plan.units[split];
        const auto set = [&](const int parts) {
            p.parts    = parts;
            p.parts_dq = args.Dk == FATTN_BACK_PREP_MAX_D ? parts : 1;
            return size(n, split) <= room;
        };
        fattn_back_hopper_set_parts(n * fattn_back_hopper_blocks(p, nwg), p.KT, nsm, set);
        plan.parts[split]    = p.parts;
        plan.parts_dq[split] = p.parts_dq;
        return size(n, split);
    };
    const bool ranges       = args.Dk == FATTN_BACK_PREP_MAX_D;
    plan.units[1]           = units(true, limit);
    const size_t room       = std::max(limit, size(plan.units[1], true));
    const size_t size_split = share(true, room, ranges ? 1 : 2);
    if (ranges && !always_split) {
        fattn_back_hopper_plan_ranges(plan, room, nsm);
    } else {
        p.parts       = 1;
        p.parts_dq    = 1;
        plan.units[0] = units(false, room);
        plan.size     = share(false, room, 2);
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
    using L         = fattn_back_hopper_smem<D, nwg, n1, n2, split, regs>;
    const int parts = mode == FATTN_BACK_HOPPER_DQ ? p.parts_dq : p.parts;
    fattn_back_hopper_launch<flash_attn_back_hopper_queries<D, nwg, n1, n2, nregs, mode, regs, split>>(
        p, fattn_back_hopper_grid(p.units * (p.a.G / p.heads_q), p.band_q, (p.heads_q * p.QT + nwg - 1) / nwg * parts), (nwg + 1) * 128,
        L::bytes, stream);
}

template <int D, fattn_back_hopper_mode mode, bool split>
static void fattn_back_hopper_rows(const fattn_back_hopper_params & p, cudaStream_t stream) {
    const int nthreads = p.QT * FATTN_BACK_HOPPER_ROWS * (mode == FATTN_BACK_HOPPER_STATS ? 1 : D / 4);
    const dim3 grid((nthreads + FATTN_BACK_PREP_THREADS - 1) / FATTN_BACK_PREP_THREADS, p.units * p.a.G);
    flash_attn_back_hopper_rows<D, mode, split><<<grid, FATTN_BACK_PREP_THREADS, 0, stream>>>(p);
    CUDA_CHECK(cudaGetLastError());
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
    p.band_q = p.a.G / p.heads_q * band(p.a.M, p.QT * p.a.G);
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
    fattn_back_hopper_launch<flash_attn_back_hopper_dq<D, stages>>(
        p, dim3(p.units, fattn_back_hopper_blocks_dq(p) * p.parts_dq), 3 * 128, fattn_back_hopper_smem_dq<D, stages>::bytes, stream);
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
        fattn_back_hopper_rows<D, FATTN_BACK_HOPPER_STATS, true>(p, stream);
        if (p.a.dQ != nullptr) {
            fattn_back_hopper_queries<D, 1, 1, 2, 240, FATTN_BACK_HOPPER_DQ, false, true>(p, stream);
            if (p.parts_dq > 1) {
                fattn_back_hopper_rows<D, FATTN_BACK_HOPPER_DQ, true>(p, stream);
            }
        }
        if (has_keys) {
            fattn_back_hopper_keys_split<D, 1, true, false>(p, stream);
        }
    } else {
        constexpr int stages = split ? 2 : 4;
        fattn_back_hopper_queries<D, 2, stages, stages, 240, FATTN_BACK_HOPPER_FUSED, false, split>(p, stream);
        if (p.slots > 0) {
            fattn_back_hopper_rows<D, FATTN_BACK_HOPPER_FUSED, split>(p, stream);
        }
        if (has_keys) {
            fattn_back_hopper_keys<D, 2, stages, 240, split>(p, stream);
        }
    }
}

// LSE and D of D = 256, from ranges of keys
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
    fattn_back_hopper_rows<D, FATTN_BACK_HOPPER_STATS, false>(p, stream);
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
    if (p.parts_dq > 1 && p.a.dQ != nullptr) {
        fattn_back_hopper_rows<D, FATTN_BACK_HOPPER_DQ, false>(p, stream);
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
        if (p.parts_dq > 1) {
            fattn_back_hopper_rows<D, FATTN_BACK_HOPPER_DQ, false>(p, stream);
        }
    }
}

template <int D>
static void fattn_back_hopper_passes(const fattn_back_hopper_plan & plan, char * workspace, cudaStream_t stream) {
    fattn_back_hopper_params p = plan.p;
    const int total            = p.a.S * p.a.Hkv;
    for (int split = 0; split < 2; ++split) {
        p.parts    = plan.parts[split];
        p.parts_dq = plan.parts_dq[split];
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
                const bool ds = plan.kts_ds > 0;
                p.parts_dq    = ds ? 1 : plan.parts_dq[0];
                fattn_back_hopper_layout(p, workspace, plan.units[0], plan.kts_stats, false, 0);
                fattn_back_hopper_stats<D>(p, stream);
                if (ds) {
                    p.parts_dq = plan.parts_dq[0];
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
