#pragma once

// How the mma path of FLASH_ATTN_BACK cuts a node into launches, and its workspace.

#include "fattn-back-mma-backward.cuh"
#include "fattn-back-mma-forward.cuh"
#include "fattn-back-mma-pieces.cuh"

#include <algorithm>

#define FATTN_BACK_MMA_BAND   (32 << 20) // bytes of streamed operands that blocks which run side by side may share
#define FATTN_BACK_MMA_BLOCKS 1024     // own tiles whose blocks finish at much the same time in any order

#define FATTN_BACK_MMA_ITEM       (384 << 10) // bytes of dS of a key tile's item
#define FATTN_BACK_MMA_PIECE_KEYS 2048      // of a row tile's item

// instances of the kernels; a node takes the first that its head sizes fit
#define FATTN_BACK_MMA_CASES(F) F(64, 64) F(96, 96) F(128, 128) F(192, 128) F(256, 256)

typedef void (*fattn_back_mma_kernel)(fattn_back_mma_params p);

struct fattn_back_mma_case {
    int Dk;
    int Dv;
    fattn_back_mma_kernel forward[2]; // without and with softcap
    fattn_back_mma_kernel backward[2];
    fattn_back_forward_config (*forward_config)(int arch);
    int (*forward_smem)(const fattn_back_forward_config & c);
    fattn_back_backward_config (*backward_config[2])(int arch);
    int (*backward_smem[2])(int arch);
    int row_blocks; // of a row tile of the backward in pieces, 0: with turns
};

// the backward of an instance
template <int Dk, int Dv, bool softcap>
struct fattn_back_mma_backward_of {
    static constexpr bool pieces = Dk > 192;

    static constexpr fattn_back_mma_kernel kernel() {
        if constexpr (pieces) {
            return flash_attn_back_mma_pieces<Dk, Dv, softcap>;
        } else {
            return flash_attn_back_mma_backward<Dk, Dv, softcap>;
        }
    }
    static fattn_back_backward_config config(const int arch) {
        if constexpr (pieces) {
            const fattn_back_pieces_config c = fattn_back_pieces_get_config<Dk, Dv, softcap>(arch);
            return { c.keys, c.rows, c.stages };
        } else {
            return fattn_back_backward_get_config<Dk, Dv, softcap>(arch);
        }
    }
    static int smem(const int arch) {
        if constexpr (pieces) {
            return fattn_back_pieces_smem<Dk, Dv, softcap>::bytes(fattn_back_pieces_get_config<Dk, Dv, softcap>(arch));
        } else {
            return fattn_back_backward_smem<Dk, Dv, softcap>::bytes(fattn_back_backward_get_config<Dk, Dv, softcap>(arch));
        }
    }
};

#define FATTN_BACK_MMA_CASE(Dk, Dv) \
    { Dk, Dv, { flash_attn_back_mma_forward<Dk, Dv, false>, flash_attn_back_mma_forward<Dk, Dv, true> }, \
        { fattn_back_mma_backward_of<Dk, Dv, false>::kernel(), fattn_back_mma_backward_of<Dk, Dv, true>::kernel() }, \
        fattn_back_forward_get_config<Dk, Dv>, fattn_back_forward_smem<Dk, Dv>::bytes, \
        { fattn_back_mma_backward_of<Dk, Dv, false>::config, fattn_back_mma_backward_of<Dk, Dv, true>::config }, \
        { fattn_back_mma_backward_of<Dk, Dv, false>::smem, fattn_back_mma_backward_of<Dk, Dv, true>::smem }, \
        fattn_back_mma_backward_of<Dk, Dv, false>::pieces ? fattn_back_pieces_blocks(Dk) : 0 },

static const fattn_back_mma_case * fattn_back_mma_get_case(const int64_t Dk, const int64_t Dv) {
    static constexpr fattn_back_mma_case cases[] = { FATTN_BACK_MMA_CASES(FATTN_BACK_MMA_CASE) };
    for (const fattn_back_mma_case & c : cases) {
        if (Dk <= c.Dk && Dv <= c.Dv) {
            return &c;
        }
    }
    return nullptr;
}

struct fattn_back_mma_plan {
    fattn_back_mma_params p;
    const fattn_back_mma_case * kernels;
    fattn_back_forward_config forward;
    fattn_back_backward_config backward;
    int backward_smem;
    size_t ncounters; // bytes of the backward's counters, which are 0 at first
    int max_units;  // of a group
    int max_blocks; // row blocks of a unit in the workspace
    size_t nbytes;  // of the workspace
};

// pointers of the workspace one after the other from base; returns its size
static size_t fattn_back_mma_layout(fattn_back_mma_plan & plan, char * base) {
    fattn_back_mma_params & p = plan.p;
    const bool back           = p.a.O == nullptr;
    const int64_t units       = plan.max_units;
    const int64_t nrows       = units * plan.max_blocks * FATTN_BACK_MMA_ROWS;
    size_t nbytes             = 0;
    const auto take           = [&](auto & ptr, const int64_t n) {
        ptr = (std::remove_reference_t<decltype(ptr)>) (base + nbytes);
        nbytes += GGML_PAD(n * sizeof(*ptr), 256);
    };
    p.mask.layout(p.a, p.QB, 2 * p.KT, take);
    p.guard.layout(p.a, take);
    for (float ** ptr : { &p.mean_k, &p.mean_v }) {
        take(*ptr, units * FATTN_BACK_PREP_MAX_D);
    }
    for (float ** ptr : { &p.exp_k, &p.exp_v }) {
        take(*ptr, units);
    }
    for (int ** ptr : { &p.exp_q_min, &p.exp_dO_min }) {
        take(*ptr, units);
    }
    take(p.fresh, (int64_t) p.a.S * p.a.Hkv);
    take(p.large, (int64_t) p.a.S * p.a.Hkv);
    for (half ** ptr : { &p.k_hi, &p.k_lo }) {
        take(*ptr, units * p.keys() * p.Pk);
    }
    take(p.v, units * p.keys() * p.Pv);
    for (float ** ptr : { &p.exp_q, &p.dot_q }) {
        take(*ptr, nrows);
    }
    for (half ** ptr : { &p.q_hi, &p.q_lo }) {
        take(*ptr, nrows * p.Pk);
    }
    take(p.sums, p.nsplits * nrows);

    // only until the mask's table and the means are known, where later arrays are
    const size_t start = nbytes;
    p.mask.layout_scratch(p.a, take);
    size_t end = nbytes;
    nbytes     = start;
    take(p.colparts, units * 2 * p.nparts * FATTN_BACK_COLUMNS_SIZE);
    end    = std::max(end, nbytes);
    nbytes = start;

    if (!back) {
        if (p.nsplits > 1) {
            take(p.part_o, p.nsplits * nrows * p.a.Dv);
        }
        return std::max(end, nbytes);
    }
    for (float ** ptr : { &p.exp_dO, &p.dot_dO }) {
        take(*ptr, nrows);
    }
    take(p.dO, nrows * p.Pv);
    take(p.stat, nrows);
    take(p.weight, nrows);
    if (p.a.sinks != nullptr) {
        take(p.R, nrows);
    }
    take(p.ticket, 1);
    if (plan.kernels->row_blocks > 0) {
        const int64_t tiles     = p.key_tiles(plan.backward.keys);
        const int64_t ranges    = (plan.max_blocks + p.piece_rows - 1) / p.piece_rows;
        const int64_t pieces    = units * p.key_ranges(tiles) * ranges;
        const int64_t row_tiles = units * ranges * (p.piece_rows / p.row_blocks);
        take(p.formed, pieces);
        take(p.used, pieces);
        take(p.turn_k, units * tiles);
        take(p.turn_q, row_tiles);
        plan.ncounters = (char *) (p.turn_q + row_tiles) - (char *) p.ticket;
        if (p.a.dQ != nullptr) {
            const int64_t n = (int64_t) p.nslots * p.piece_rows * p.piece_tiles * FATTN_BACK_MMA_ROWS;
            take(p.dS, n * plan.backward.keys);
            if (p.a.logit_softcap != 0.0f) {
                take(p.dS_sums, n);
            }
        }
        return std::max(end, nbytes);
    }
    take(p.turn, p.nchains * nrows / 16 * FATTN_BACK_MMA_WARPS);
    if (p.nchains > 1) {
        take(p.part_q, p.nchains * nrows * p.a.Dk);
    }
    if (p.nranges > 1) {
        take(p.part_k, p.nranges * units * p.a.kv_count * p.a.Dk);
        take(p.part_v, p.nranges * units * p.a.kv_count * p.a.Dv);
    }
    return std::max(end, nbytes);
}

static fattn_back_mma_plan fattn_back_mma_make_plan(const fattn_back_args & args, const int arch, const int nsm, const size_t limit) {
    fattn_back_mma_plan plan  = {};
    fattn_back_mma_params & p = plan.p;
    const bool softcap        = args.logit_softcap != 0.0f;
    const bool back           = args.O == nullptr;
    plan.kernels              = fattn_back_mma_get_case(args.Dk, args.Dv);
    plan.forward              = plan.kernels->forward_config(arch);
    plan.backward             = plan.kernels->backward_config[softcap](arch);
    plan.backward_smem        = plan.kernels->backward_smem[softcap](arch);
    p.a                       = args;
    p.step                    = std::max(plan.backward.rows, FATTN_BACK_MMA_ROWS);
    p.Pk                      = fattn_back_mma_pitch(plan.kernels->Dk);
    p.Pv                      = fattn_back_mma_pitch(plan.kernels->Dv);
    p.QB                      = (args.N + FATTN_BACK_MMA_ROWS - 1) / FATTN_BACK_MMA_ROWS;
    p.KT                      = (args.M + FATTN_BACK_MMA_KEYS - 1) / FATTN_BACK_MMA_KEYS;
    p.RB                      = GGML_PAD(p.QB * args.G, 2);

    const int units     = args.S * args.Hkv;
    const int key_tiles = std::max(p.key_tiles(plan.backward.keys), 1);
    const bool pieces   = back && plan.kernels->row_blocks > 0;
    const bool has_dkdv = args.dK != nullptr || args.dV != nullptr;
    // Pieces of the backward of n units of b row blocks each, of which at most so many bytes of dS are in the workspace.
    const auto cut = [&](const int n, const int b, const size_t most) {
        const int blocks   = plan.kernels->row_blocks;
        const int64_t tile = (int64_t) FATTN_BACK_MMA_ROWS * plan.backward.keys * sizeof(half);
        const auto even    = [](const int size, const int piece) { return fattn_back_even(size, std::clamp(piece, 1, size)); };
        p.row_blocks       = 4 * n * b <= nsm ? 1 : blocks; // smaller row tiles where they are few
        p.piece_tiles      = even(key_tiles, FATTN_BACK_MMA_PIECE_KEYS / plan.backward.keys);
        // rows of a key tile's item: 16 items for each multiprocessor, and three for each in the slots
        const int64_t fit    = args.dQ != nullptr ? most / (3 * nsm * tile) : INT_MAX;
        const int64_t want   = std::min<int64_t>((int64_t) n * b * key_tiles / (16 * nsm), FATTN_BACK_MMA_ITEM / tile);
        p.piece_rows         = GGML_PAD(even(b, (int) std::min(fit, want) / blocks * blocks), blocks);
        const int64_t pieces = (int64_t) n * ((b + p.piece_rows - 1) / p.piece_rows) * p.key_ranges(key_tiles);
        const int64_t slots  = std::clamp<int64_t>(most / (p.piece_rows * p.piece_tiles * tile), 1, pieces);
        p.nslots             = std::min<int64_t>(4 * nsm / p.piece_tiles + 2, slots);
        p.lag                = p.nslots * 2 / 3;
    };
    size_t most_dS = pieces && args.dQ != nullptr ? limit / 4 : 0;
    // the workspace with n units of b row blocks each, and with what shares out the work as far as there is room
    const auto set_group = [&](const int n, const int b) {
        plan.max_units  = n;
        plan.max_blocks = b;
        p.nparts        = std::clamp(2 * nsm / n, 1, (args.M + 63) / 64);
        p.nsplits = p.nchains = p.nranges = 1;
        if (pieces) {
            cut(n, b, most_dS);
        }
        plan.nbytes = fattn_back_mma_layout(plan, nullptr);
        return plan.nbytes <= limit;
    };
    const auto share = [&](int & n, const int most) {
        n           = fattn_back_most(std::max(most, 1), [&](const int m) {
            n = m;
            return fattn_back_mma_layout(plan, nullptr) <= limit;
        });
        plan.nbytes = fattn_back_mma_layout(plan, nullptr);
    };
    // Splits the keys of the forward's pairs of row blocks, so that the blocks' waves walk the fewest granules; returns how many, of all groups.
    const auto split = [&]() {
        const int64_t nblocks = (int64_t) plan.max_units * plan.max_blocks / 2;
        const int nslots      = nsm * plan.forward.nblocks;
        const int ngroups     = (units + plan.max_units - 1) / plan.max_units;
        int64_t best          = INT64_MAX / 10;
        int nsplits           = 1;
        for (int n = 1; n <= std::min(2 * p.KT, FATTN_BACK_FORWARD_SPLITS); ++n) {
            const int64_t cost = (nblocks * n + nslots - 1) / nslots * ((2 * p.KT + n - 1) / n + FATTN_BACK_FORWARD_START);
            p.nsplits          = n;
            if (n == 1 || (10 * cost < 9 * best && fattn_back_mma_layout(plan, nullptr) <= limit)) {
                best    = cost;
                nsplits = n;
            }
        }
        p.nsplits   = nsplits;
        plan.nbytes = fattn_back_mma_layout(plan, nullptr);
        return best * ngroups;
    };

    while (!set_group(1, p.RB) && most_dS > 0) {
        most_dS = most_dS < (1 << 20) ? 0 : most_dS / 2;
    }
    if (plan.nbytes <= limit) {
        // as many units as there is room for, fewer where the forward is faster then
        int64_t best  = INT64_MAX / 10;
        int max_units = 1;
        for (int n = fattn_back_even(units, fattn_back_most(units, [&](const int m) { return set_group(m, p.RB); }));; n = fattn_back_even(units, n - 1)) {
            set_group(n, p.RB);
            const int64_t cost = split();
            if (10 * cost < 9 * best) {
                best      = cost;
                max_units = n;
            }
            if (n == 1) {
                break;
            }
        }
        set_group(max_units, p.RB);
    } else {
        const int pairs = fattn_back_most(p.RB / 2, [&](const int n) { return set_group(1, 2 * n); });
        set_group(1, 2 * fattn_back_even(p.RB / 2, pairs));
    }
    split();
    p.nsm = nsm;
    if (pieces && most_dS > 0) {
        // what is left is for dS
        const auto recut = [&](const int mib) {
            cut(plan.max_units, plan.max_blocks, (size_t) mib << 20);
            plan.nbytes = fattn_back_mma_layout(plan, nullptr);
            return plan.nbytes <= limit;
        };
        recut(fattn_back_most(std::max<int>(limit >> 20, 1), recut));
    } else if (back && !pieces) {
        // two blocks for each multiprocessor, of four row blocks or more
        const int64_t tiles = (int64_t) plan.max_units * key_tiles;
        share(p.nranges, has_dkdv ? std::min<int64_t>(2 * nsm / tiles, plan.max_blocks / 4) : 1);
        // tiles that run side by side queue up for their first rows; the queue should take a quarter of their time
        const int64_t queue = std::min<int64_t>(key_tiles, (nsm + plan.max_units * p.nranges - 1) / (plan.max_units * p.nranges));
        share(p.nchains, args.dQ != nullptr ? std::min<int64_t>(4 * queue / (plan.max_blocks / p.nranges), key_tiles) : 1);
    }
    return plan;
}

static void fattn_back_mma_launch(
    const fattn_back_mma_kernel kernel, const fattn_back_mma_params & p, const dim3 grid, const int nthreads, const int smem, cudaStream_t stream) {
    if (smem > 48 * 1024) {
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    }
    kernel<<<grid, nthreads, smem, stream>>>(p);
    CUDA_CHECK(cudaGetLastError());
}

// of n threads a unit
static void fattn_back_mma_launch(const fattn_back_mma_kernel kernel, const fattn_back_mma_params & p, const int64_t n, const int nz, cudaStream_t stream) {
    const dim3 grid((n + FATTN_BACK_PREP_THREADS - 1) / FATTN_BACK_PREP_THREADS, p.units, nz);
    fattn_back_mma_launch(kernel, p, grid, FATTN_BACK_PREP_THREADS, 0, stream);
}

// as many units as fit the L2 cache, and no more than it takes to even out the blocks' work
static int fattn_back_mma_band(const fattn_back_mma_params & p, const int64_t nrows, const int ntiles) {
    const int64_t fit  = FATTN_BACK_MMA_BAND / (nrows * (p.Pk + p.Pv) * (int64_t) sizeof(half));
    const int64_t even = (FATTN_BACK_MMA_BLOCKS + ntiles - 1) / ntiles;
    return (int) std::clamp<int64_t>(std::min(fit, even), 1, p.units);
}

static void fattn_back_mma_convert_rows(const fattn_back_mma_params & p, cudaStream_t stream) {
    // both at once: one lies behind the other
    CUDA_CHECK(cudaMemsetAsync(p.exp_q_min, 0x7F, (p.exp_dO_min + p.units - p.exp_q_min) * sizeof(*p.exp_q_min), stream));
    fattn_back_mma_launch(flash_attn_back_convert_rows, p, p.rows() * fattn_back_mma_prep_row_threads(std::max(p.Pk, p.Pv)), 1, stream);
}

static void fattn_back_mma_run_forward(const fattn_back_mma_plan & plan, const fattn_back_mma_params & p, cudaStream_t stream) {
    fattn_back_mma_params q = p;
    const int ntiles        = p.rblocks / 2 * p.nsplits;
    q.band                  = fattn_back_mma_band(p, p.keys(), ntiles);
    fattn_back_mma_launch(plan.kernels->forward[p.a.logit_softcap != 0.0f], q, dim3(p.units * ntiles), plan.forward.nthreads(),
        plan.kernels->forward_smem(plan.forward), stream);
}

static void fattn_back_mma_run_pieces(const fattn_back_mma_plan & plan, const fattn_back_mma_params & p, cudaStream_t stream) {
    if (p.a.dQ == nullptr && ((p.a.dK == nullptr && p.a.dV == nullptr) || p.a.kv_count == 0)) {
        return;
    }
    const int nrows      = p.a.dQ != nullptr ? p.piece_rows / p.row_blocks : 0;
    const int64_t pieces = (int64_t) p.units * p.row_ranges() * p.key_ranges(p.key_tiles(plan.backward.keys));
    const int64_t items  = (pieces + p.lag) * (p.piece_tiles + nrows);
    CUDA_CHECK(cudaMemsetAsync(p.ticket, 0, plan.ncounters, stream));
    fattn_back_mma_launch(plan.kernels->backward[p.a.logit_softcap != 0.0f], p, dim3(std::min<int64_t>(items, p.nsm)),
        FATTN_BACK_MMA_WARPS * WARP_SIZE, plan.backward_smem, stream);
}

static void fattn_back_mma_run_backward(const fattn_back_mma_plan & plan, const fattn_back_mma_params & p, cudaStream_t stream) {
    fattn_back_mma_params q = p;
    const bool softcap      = p.a.logit_softcap != 0.0f;
    const int ntiles        = p.key_tiles(plan.backward.keys) * p.nranges;
    if (p.a.dQ != nullptr || ((p.a.dK != nullptr || p.a.dV != nullptr) && p.a.kv_count > 0)) {
        q.band             = fattn_back_mma_band(p, p.rows(), ntiles);
        const size_t nturn = p.nchains * p.units * p.rows() / 16 * FATTN_BACK_MMA_WARPS;
        CUDA_CHECK(cudaMemsetAsync(p.ticket, 0, (char *) (p.turn + nturn) - (char *) p.ticket, stream));
        fattn_back_mma_launch(plan.kernels->backward[softcap], q, dim3(p.units * ntiles), FATTN_BACK_MMA_WARPS * WARP_SIZE,
            plan.backward_smem, stream);
    }
    if (p.a.dQ != nullptr) {
        fattn_back_mma_launch(flash_attn_back_mma_finish_dq, p, p.rows() * (p.a.Dk / 4), 1, stream);
    }
    if (p.nranges > 1) {
        fattn_back_mma_launch(flash_attn_back_mma_finish_dkdv, p, (int64_t) p.a.kv_count * (std::max(p.a.Dk, p.a.Dv) / 4), 2, stream);
    }
}

// The group's rows. A unit with large logits is computed again, as all of its rows must have the same S as the backward.
static void fattn_back_mma_run_group(const fattn_back_mma_plan & plan, fattn_back_mma_params & p, cudaStream_t stream) {
    const bool back     = p.a.O == nullptr;
    const auto run_rows = [&](const bool first, const bool last) {
        for (p.rb0 = 0; p.rb0 < p.RB; p.rb0 += plan.max_blocks) {
            p.rblocks    = std::min(plan.max_blocks, p.RB - p.rb0);
            p.accumulate = p.rb0 > 0;
            fattn_back_mma_convert_rows(p, stream);
            for (const bool again : { false, true }) {
                p.again = again;
                if (again ? last : first && !p.a.split_all) {
                    fattn_back_mma_run_forward(plan, p, stream);
                }
            }
            if (back) {
                fattn_back_mma_launch(flash_attn_back_mma_stats, p, p.rows(), 1, stream);
                (plan.kernels->row_blocks > 0 ? fattn_back_mma_run_pieces : fattn_back_mma_run_backward)(plan, p, stream);
            } else if (p.nsplits > 1) {
                p.again = !first;
                fattn_back_mma_launch(flash_attn_back_mma_merge, p, p.rows() * (p.a.Dv / 4), 1, stream);
            }
        }
    };
    if (back || p.a.split_all || plan.max_blocks >= p.RB) {
        run_rows(true, true);
    } else {
        run_rows(true, false);
        run_rows(false, true);
    }
}

static void fattn_back_mma_run(fattn_back_mma_plan & plan, char * workspace, cudaStream_t stream) {
    fattn_back_mma_params & p = plan.p;
    fattn_back_mma_layout(plan, workspace);
    const bool back = p.a.O == nullptr;
    if (!back && p.a.saved.stamp != nullptr) {
        p.large = p.a.saved.large;
    }
    ggml_cuda_flash_attn_back_mask_table(p.a, p.mask, stream);

    const int units = p.a.S * p.a.Hkv;
    for (p.unit0 = 0; p.unit0 < units; p.unit0 += plan.max_units) {
        p.units = std::min(plan.max_units, units - p.unit0);
        ggml_cuda_flash_attn_back_columns(p.a, p.mask, p.unit0, p.units, p.nparts, p.colparts, stream);
        flash_attn_back_column_means<<<dim3(p.units, 2), FATTN_BACK_PREP_MEAN_THREADS, 0, stream>>>(p);
        CUDA_CHECK(cudaGetLastError());
        fattn_back_mma_launch(flash_attn_back_convert_kv, p, p.keys() * fattn_back_mma_prep_row_threads(std::max(p.Pk, p.Pv)), 2, stream);
        fattn_back_mma_run_group(plan, p, stream);
    }
    if (back) {
        ggml_cuda_flash_attn_back_sinks(p.a, p.guard, stream);
    }
    ggml_cuda_flash_attn_back_guard(p.a, p.guard, { p.large, 0, FATTN_BACK_MMA_LARGE, back ? 0 : FATTN_BACK_STAMP_MMA, FATTN_BACK_MMA_IN_F32 }, stream);
}
