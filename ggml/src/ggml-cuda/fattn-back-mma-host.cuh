#pragma once

// How the mma path of FLASH_ATTN_BACK cuts a node into launches, and its workspace.

#include "fattn-back-mma-prep.cuh"
#include "fattn-back-mma-scores.cuh"
#include "fattn-back-mma-grads.cuh"
#include "fattn-back-mma-fused.cuh"

#include <algorithm>

// instances of the kernels; a node takes the first that its head sizes fit
#define FATTN_BACK_MMA_CASES(F) F(64, 64) F(80, 80) F(96, 96) F(112, 112) F(128, 128) F(192, 128) F(256, 256)

struct fattn_back_mma_case {
    int Dk;
    int Dv;
    void (*grads[2])(const fattn_back_mma_params & p, int arch, cudaStream_t stream); // without and with softcap
    void (*fused[2])(fattn_back_mma_params & p, int arch, cudaStream_t stream);       // NULL: none
};

template <int Dk, int Dv, bool softcap>
static constexpr auto fattn_back_mma_get_fused() -> void (*)(fattn_back_mma_params &, int, cudaStream_t) {
    if constexpr (Dk == Dv && Dk <= 128) {
        return ggml_cuda_flash_attn_back_fused_case<Dk, softcap>;
    } else {
        return nullptr;
    }
}

#define FATTN_BACK_MMA_CASE(Dk, Dv) \
    { Dk, Dv, { ggml_cuda_flash_attn_back_grads_case<Dk, Dv, false>, ggml_cuda_flash_attn_back_grads_case<Dk, Dv, true> }, \
        { fattn_back_mma_get_fused<Dk, Dv, false>(), fattn_back_mma_get_fused<Dk, Dv, true>() } },

static const fattn_back_mma_case * fattn_back_mma_get_case(const int64_t Dk, const int64_t Dv) {
    static constexpr fattn_back_mma_case cases[] = { FATTN_BACK_MMA_CASES(FATTN_BACK_MMA_CASE) };
    for (const fattn_back_mma_case & c : cases) {
        if (Dk <= c.Dk && Dv <= c.Dv) {
            return &c;
        }
    }
    return nullptr;
}

#define FATTN_BACK_MMA_ROW_CHUNKS 8 // chunks whose rows are converted at once

struct fattn_back_mma_plan {
    fattn_back_mma_params p;
    const fattn_back_mma_case * kernels;
    int arch;
    int nsm;
    bool fused;      // the fused kernels
    int max_units;   // of a group
    int max_cunits;  // of a chunk
    int max_cblocks;
    size_t nbytes;   // of the workspace
};

// pointers of the workspace one after the other from base; returns its size
static size_t fattn_back_mma_layout(fattn_back_mma_plan & plan, char * base) {
    fattn_back_mma_params & p = plan.p;
    const bool softcap        = p.a.logit_softcap != 0.0f;
    size_t nbytes             = 0;
    const auto take           = [&](auto & ptr, const int64_t n) {
        ptr = (std::remove_reference_t<decltype(ptr)>) (base + nbytes);
        nbytes += GGML_PAD(n * sizeof(*ptr), 256);
    };
    p.mask.layout(p.a, p.QB, 2 * p.KT, take);

    const int64_t units = plan.max_units;
    for (float ** ptr : { &p.mean_k, &p.mean_v }) {
        take(*ptr, units * FATTN_BACK_PREP_MAX_D);
    }
    take(p.exp_k, units);
    take(p.exp_v, units);
    take(p.exp_q_min, units);
    take(p.exp_dO_min, units);
    for (float ** ptr : { &p.exp_q, &p.exp_dO, &p.dot_q, &p.dot_dO }) {
        take(*ptr, units * p.rows());
    }
    take(p.k_hi, units * p.keys() * p.Pk);
    if (plan.fused || p.split_all) {
        take(p.k_lo, units * p.keys() * p.Pk);
    }
    for (half ** ptr : { &p.q_hi, &p.q_lo }) {
        take(*ptr, units * p.rows() * p.Pk);
    }
    take(p.v, units * p.keys() * p.Pv);
    take(p.dO, units * p.rows() * p.Pv);

    // only until the mask's table and the means are known, where later arrays are
    const size_t start = nbytes;
    p.mask.layout_scratch(p.a, take);
    size_t end = nbytes;
    nbytes     = start;
    take(p.colparts, units * 2 * p.nparts * FATTN_BACK_COLUMNS_SIZE);
    end    = std::max(end, nbytes);
    nbytes = start;

    if (plan.fused) {
        take(p.stat_s, units * p.rows());
        take(p.stat_d, units * p.rows());
        take(p.split, p.split_at(units, 0, 0));
        return std::max(nbytes, end);
    }

    const int64_t crows = (int64_t) plan.max_cunits * plan.max_cblocks * FATTN_BACK_MMA_ROWS;
    take(p.pairs, (softcap ? 3 : 2) * crows * p.keys());
    for (float ** ptr : { &p.gmax, &p.gsum, &p.gdp, &p.gudp, &p.gu }) {
        if (softcap || (ptr != &p.gudp && ptr != &p.gu)) {
            take(*ptr, crows * 2 * p.KT);
        }
    }
    p.fac_q = p.gsum; // a thread reads its sums first
    for (half ** ptr : { &p.fac_v, &p.fac_k }) {
        take(*ptr, crows * 2 * p.KT);
    }
    take(p.D, crows);
    for (half ** ptr : { &p.D_hi, &p.D_lo }) {
        take(*ptr, crows);
    }
    if (p.rank1) {
        take(p.R, crows);
    }
    p.cblocks             = plan.max_cblocks;
    const int64_t rows_q  = (int64_t) plan.max_cunits * p.ntiles(true) * 128;
    const int64_t rows_kv = (int64_t) plan.max_cunits * p.ntiles(false) * FATTN_BACK_MMA_KEYS;
    take(p.nparts_q, (int64_t) plan.max_cunits * p.ntiles(true));
    take(p.nparts_kv, (int64_t) plan.max_cunits * p.ntiles(false));
    if (p.max_parts_q() > 1) {
        take(p.part_q, p.max_parts_q() * rows_q * p.a.Dk);
    }
    if (p.max_parts_kv() > 1) {
        take(p.part_k, p.max_parts_kv() * rows_kv * p.a.Dk);
        take(p.part_v, p.max_parts_kv() * rows_kv * p.a.Dv);
    }
    return std::max(nbytes, end);
}

static fattn_back_mma_plan fattn_back_mma_make_plan(
    const fattn_back_args & args, const bool split_all, const int arch, const int nsm, const size_t workspace_limit) {
    fattn_back_mma_plan plan = {};
    plan.arch                = arch;
    plan.nsm                 = nsm;
    plan.kernels             = fattn_back_mma_get_case(args.Dk, args.Dv);

    fattn_back_mma_params & p = plan.p;
    const bool softcap        = args.logit_softcap != 0.0f;
    p.a                       = args;
    p.Pk                      = fattn_back_mma_pitch(plan.kernels->Dk);
    p.Pv                      = fattn_back_mma_pitch(plan.kernels->Dv);
    p.QB                      = (args.N + FATTN_BACK_MMA_ROWS - 1) / FATTN_BACK_MMA_ROWS;
    p.KT                      = (args.M + FATTN_BACK_MMA_KEYS - 1) / FATTN_BACK_MMA_KEYS;
    p.rank1                   = softcap || args.sinks != nullptr;
    p.split_all               = split_all;

    const int units = args.S * args.Hkv;

    // The fused kernels' blocks must fill the device, those of dK and dV at least half of it. A split S costs them more than the others.
    const int n_kv          = (args.dK != nullptr) + (args.dV != nullptr);
    const int64_t blocks_q  = (int64_t) units * p.QB * args.G / FATTN_BACK_FUSED_MAX_BLOCKS;
    const int64_t blocks_kv = (int64_t) units * p.ntiles(false);
    plan.fused              = plan.kernels->fused[0] != nullptr && !(split_all && plan.kernels->Dk > 64) && blocks_q >= nsm / 2 &&
        (n_kv == 0 || blocks_kv >= nsm / 2);
    p.RB = GGML_PAD(p.QB * args.G, plan.fused ? FATTN_BACK_FUSED_MAX_BLOCKS : 2);

    const int D_max     = std::max(plan.kernels->Dk, plan.kernels->Dv);
    const int nslots    = nsm * fattn_back_grads_occupancy(D_max);
    const int nkt       = p.ntiles(false);
    const int slices_q  = FATTN_BACK_MMA_KEYS / fattn_back_grads_slice(arch, D_max);
    const int slices_kv = FATTN_BACK_MMA_ROWS / fattn_back_grads_slice(arch, D_max);
    // Sets the chunk, returns the bytes in all. Parts of the grads kernel's sums: quarters/4 of dQ for each slot of the device and twice as
    // many of dV and dK, so that no block is late, but none too short.
    const auto set_chunk = [&](const int cunits, const int cblocks, const int quarters) {
        plan.max_cunits       = cunits;
        plan.max_cblocks      = cblocks;
        p.rblocks             = (int) std::min<int64_t>(p.RB, (int64_t) FATTN_BACK_MMA_ROW_CHUNKS * cblocks);
        const int64_t work_q  = args.dQ != nullptr ? (int64_t) cunits * cblocks / 2 * p.KT * slices_q : 0;
        const int64_t work_kv = (int64_t) cunits * cblocks * slices_kv * nkt * n_kv;
        const auto len        = [&](const int n, const int slices) { // slices is what an item has
            return (int) std::clamp<int64_t>(std::max<int64_t>((work_q + work_kv) * 4 / (n * nslots), 16) / slices, 1, FATTN_BACK_GRADS_MAX_ITEMS);
        };
        p.len_q     = len(quarters, slices_q);
        p.len_kv    = len(2 * quarters, slices_kv);
        plan.nbytes = fattn_back_mma_layout(plan, nullptr);
        return plan.nbytes;
    };

    // groups of as many units as the limit takes, half of it beside pairs
    const auto set_units = [&](const int n) {
        plan.max_units = n;
        p.nparts       = std::clamp(2 * nsm / n, 1, (args.M + 63) / 64);
        return plan.fused ? set_chunk(0, p.RB, 1) <= workspace_limit
                          : set_chunk(0, p.RB, 1) <= workspace_limit / 2 && set_chunk(1, 2, 1) <= workspace_limit;
    };
    set_units(fattn_back_even(units, fattn_back_most(units, set_units)));
    if (plan.fused) {
        return plan;
    }

    // pairs: as many row blocks as the limit takes beside parts of the sums, of as few units as fill the device
    const auto fits = [&](const int cunits, const int cblocks) { return set_chunk(cunits, cblocks, 4) <= workspace_limit; };
    int cblocks     = p.RB;
    int cunits      = 1;
    if (fits(1, p.RB)) {
        cunits = fattn_back_most(plan.max_units, [&](const int n) { return fits(n, p.RB); });
    } else {
        const int fill = std::clamp(nslots / std::max(nkt * n_kv, 1), 1, plan.max_units);
        cunits         = fattn_back_most(fill, [&](const int n) { return fits(n, 2); });
        cblocks        = 2 * fattn_back_even(p.RB / 2, fattn_back_most(p.RB / 2, [&](const int n) { return fits(cunits, 2 * n); }));
    }
    const bool even = p.KT >= 4 * p.QB; // queries see much the same number of keys, whatever the mask
    for (int quarters = even ? 4 : 8; quarters > 0 && set_chunk(cunits, cblocks, quarters) > workspace_limit; quarters /= 2) {
    }

    // strips of the scores kernel: blocks for the device once, or several times
    const int64_t npairs = (int64_t) cunits * cblocks / 2;
    const int64_t nfill  = (even ? 1 : 4) * nsm / npairs;
    p.nstrips            = std::clamp<int64_t>(nfill, (p.KT + FATTN_BACK_SCORES_MAX_STRIP - 1) / FATTN_BACK_SCORES_MAX_STRIP, (p.KT + 1) / 2);
    return plan;
}

template <bool softcap, bool resident, int nst>
static bool fattn_back_mma_try_scores(const fattn_back_mma_plan & plan, cudaStream_t stream) {
    const fattn_back_mma_params & p = plan.p;
    const int smem                  = fattn_back_scores_smem(p.Pk, p.Pv, resident, nst);
    if (smem > fattn_back_mma_smem(plan.arch) || !fattn_back_scores_built(plan.arch, resident, nst)) {
        return false;
    }
    CUDA_SET_SHARED_MEMORY_LIMIT((flash_attn_back_scores<softcap, resident, nst>), fattn_back_mma_smem(plan.arch));
    const dim3 grid(p.cblocks / 2, p.nstrips, p.cunits);
    flash_attn_back_scores<softcap, resident, nst><<<grid, FATTN_BACK_SCORES_THREADS, smem, stream>>>(p);
    CUDA_CHECK(cudaGetLastError());
    return true;
}

template <bool softcap>
static void fattn_back_mma_run_scores(const fattn_back_mma_plan & plan, cudaStream_t stream) {
    const fattn_back_mma_params & p = plan.p;
    if (!fattn_back_mma_try_scores<softcap, true, 4>(plan, stream) && !fattn_back_mma_try_scores<softcap, true, 2>(plan, stream)) {
        fattn_back_mma_try_scores<softcap, false, 3>(plan, stream);
    }
    if (p.KT < 128) {
        flash_attn_back_row_stats<32, softcap><<<dim3(p.crows() / 32, p.cunits), fattn_back_rows_threads(32), 0, stream>>>(p);
    } else {
        flash_attn_back_row_stats<8, softcap><<<dim3(p.crows() / 8, p.cunits), fattn_back_rows_threads(8), 0, stream>>>(p);
    }
    CUDA_CHECK(cudaGetLastError());
}

// the chunk from row block p.cb0 on
static void fattn_back_mma_run_chunk(fattn_back_mma_plan & plan, cudaStream_t stream) {
    fattn_back_mma_params & p = plan.p;
    p.cblocks                 = std::min(plan.max_cblocks, p.RB - p.cb0);
    p.plane                   = (int64_t) p.cunits * p.cblocks * p.KT * FATTN_BACK_MMA_PAIRS;
    p.accumulate              = p.cb0 > 0;

    const bool softcap = p.a.logit_softcap != 0.0f;
    if (softcap) {
        fattn_back_mma_run_scores<true>(plan, stream);
    } else {
        fattn_back_mma_run_scores<false>(plan, stream);
    }
    plan.kernels->grads[softcap](p, plan.arch, stream);

    const int tiles_q  = p.a.dQ != nullptr && p.max_parts_q() > 1 ? p.cunits * p.ntiles(true) : 0;
    const int tiles_kv = (p.a.dK != nullptr || p.a.dV != nullptr) && p.max_parts_kv() > 1 ? p.cunits * p.ntiles(false) : 0;
    if (tiles_q + tiles_kv > 0) {
        flash_attn_back_reduce<<<FATTN_BACK_REDUCE_BLOCKS *(p.cunits * p.ntiles(true) + 2 * tiles_kv), FATTN_BACK_REDUCE_THREADS, 0, stream>>>(p);
        CUDA_CHECK(cudaGetLastError());
    }
}

static void fattn_back_mma_run(fattn_back_mma_plan & plan, char * workspace, cudaStream_t stream) {
    fattn_back_mma_params & p = plan.p;
    fattn_back_mma_layout(plan, workspace);

    const bool softcap = p.a.logit_softcap != 0.0f;
    ggml_cuda_flash_attn_back_mask_table(p.a, p.mask, stream);

    const int units = p.a.S * p.a.Hkv;
    for (p.unit0 = 0; p.unit0 < units; p.unit0 += plan.max_units) {
        p.units = std::min(plan.max_units, units - p.unit0);

        ggml_cuda_flash_attn_back_columns(p.a, p.mask, p.unit0, p.units, p.nparts, p.colparts, stream);
        flash_attn_back_column_means<<<dim3(p.units, 2), FATTN_BACK_PREP_MEAN_THREADS, 0, stream>>>(p);
        CUDA_CHECK(cudaGetLastError());
        const int64_t nkv = p.keys() * (std::max(p.Pk, p.Pv) / 8);
        flash_attn_back_convert_kv<<<dim3((nkv + FATTN_BACK_PREP_THREADS - 1) / FATTN_BACK_PREP_THREADS, p.units, 2), FATTN_BACK_PREP_THREADS, 0, stream>>>(p);
        CUDA_CHECK(cudaGetLastError());
        for (p.rb0 = 0; p.rb0 < p.RB; p.rb0 += p.rblocks) {
            // both at once: one lies behind the other
            CUDA_CHECK(cudaMemsetAsync(p.exp_q_min, 0x7F, (p.exp_dO_min + p.units - p.exp_q_min) * sizeof(*p.exp_q_min), stream));
            const int nrows = FATTN_BACK_PREP_THREADS / fattn_back_mma_prep_row_threads(std::max(p.Pk, p.Pv));
            flash_attn_back_convert_rows<<<dim3((p.rows() + nrows - 1) / nrows, p.units, 2), FATTN_BACK_PREP_THREADS, 0, stream>>>(p);
            CUDA_CHECK(cudaGetLastError());

            if (plan.fused) {
                CUDA_CHECK(cudaMemsetAsync(p.split, 0, p.split_at(p.units, 0, 0), stream));
                plan.kernels->fused[softcap](p, plan.arch, stream);
                continue;
            }
            for (p.cunit0 = 0; p.cunit0 < p.units; p.cunit0 += plan.max_cunits) {
                p.cunits = std::min(plan.max_cunits, p.units - p.cunit0);
                for (p.cb0 = p.rb0; p.cb0 < std::min(p.rb0 + p.rblocks, p.RB); p.cb0 += plan.max_cblocks) {
                    fattn_back_mma_run_chunk(plan, stream);
                }
            }
        }
    }
    ggml_cuda_flash_attn_back_sinks(p.a, stream);
}
