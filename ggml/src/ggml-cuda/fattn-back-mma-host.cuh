#pragma once

// How the mma path of FLASH_ATTN_BACK cuts a node into launches, and its workspace.

#include "fattn-back-prep.cuh"
#include "fattn-back-mma-scores.cuh"
#include "fattn-back-mma-grads.cuh"
#include "fattn-back-mma-fused.cuh"

#include <algorithm>

// dSinks. Grid: heads.
static __global__ void __launch_bounds__(256) flash_attn_back_mma_dsinks(const fattn_back_args args) {
    const int h      = blockIdx.x;
    const float sink = args.sinks[h];
    float sum        = 0.0f;
    for (int64_t i = threadIdx.x; i < (int64_t) args.S * args.N; i += 256) {
        const int64_t row = args.row(i % args.N, h, i / args.N);
        sum -= args.D[row] != 0.0f ? expf(sink - args.LSE[row]) * args.D[row] : 0.0f; // LSE may be as infinite as the sink
    }
    __shared__ float red[256];
    red[threadIdx.x] = sum;
    __syncthreads();
    for (int n = 128; n > 0; n /= 2) {
        if (threadIdx.x < n) {
            red[threadIdx.x] += red[threadIdx.x + n];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        args.dSinks[h] = red[0];
    }
}

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
    if (p.a.mask != nullptr) {
        const int64_t nqb = (int64_t) p.a.mask_nheads * p.a.mask_nseqs * p.QB;
        take(p.tiles, nqb * 2 * p.KT);
        take(p.seen, nqb * p.keys());
        take(p.used, p.a.mask_nseqs * p.a.mask_groups() * p.keys());
    }

    const int64_t units = plan.max_units;
    take(p.colparts, units * 2 * p.nparts * FATTN_BACK_PREP_COLPART);
    for (float ** ptr : { &p.mean_k, &p.mean_v }) {
        take(*ptr, units * FATTN_BACK_MMA_MAX_D);
    }
    take(p.exp_k, units);
    take(p.exp_v, units);
    take(p.exp_q_min, units);
    take(p.exp_dO_min, units);
    for (float ** ptr : { &p.exp_q, &p.exp_dO, &p.dot_q, &p.dot_dO }) {
        take(*ptr, units * p.rows());
    }
    for (half ** ptr : { &p.k_hi, &p.k_lo }) {
        take(*ptr, units * p.keys() * p.Pk);
    }
    for (half ** ptr : { &p.q_hi, &p.q_lo }) {
        take(*ptr, units * p.rows() * p.Pk);
    }
    take(p.v, units * p.keys() * p.Pv);
    take(p.dO, units * p.rows() * p.Pv);

    if (plan.fused) {
        take(p.stat_s, units * p.rows());
        take(p.stat_d, units * p.rows());
        take(p.split, p.split_at(units, 0, 0));
        return nbytes;
    }

    const int64_t crows = (int64_t) plan.max_cunits * plan.max_cblocks * FATTN_BACK_MMA_ROWS;
    take(p.pairs, (softcap ? 3 : 2) * crows * p.keys());
    for (float ** ptr : { &p.gmax, &p.gsum, &p.gdp, &p.gudp, &p.gu }) {
        if (softcap || (ptr != &p.gudp && ptr != &p.gu)) {
            take(*ptr, crows * 2 * p.KT);
        }
    }
    take(p.fac_q, crows * 2 * p.KT);
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
    take(p.nparts_q, plan.max_cunits * p.ntiles(true));
    take(p.nparts_kv, plan.max_cunits * p.ntiles(false));
    if (p.max_parts_q() > 1) {
        take(p.part_q, p.max_parts_q() * rows_q * p.a.Dk);
    }
    if (p.max_parts_kv() > 1) {
        take(p.part_k, p.max_parts_kv() * rows_kv * p.a.Dk);
        take(p.part_v, p.max_parts_kv() * rows_kv * p.a.Dv);
    }
    return nbytes;
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

    const int64_t units = (int64_t) args.S * args.Hkv;

    // The fused kernels' blocks must fill the device, those of dK and dV at least half of it. A split S costs them more than the others.
    const int n_kv          = (args.dK != nullptr) + (args.dV != nullptr);
    const int64_t blocks_q  = units * p.QB * args.G / FATTN_BACK_FUSED_MAX_BLOCKS;
    const int64_t blocks_kv = units * p.ntiles(false);
    plan.fused              = plan.kernels->fused[0] != nullptr && !(split_all && plan.kernels->Dk > 64) && blocks_q >= nsm / 2 &&
        (n_kv == 0 || blocks_kv >= nsm / 2);
    p.RB = GGML_PAD(p.QB * args.G, plan.fused ? FATTN_BACK_FUSED_MAX_BLOCKS : 2);

    // operands: groups of units of at most the limit, half of it beside pairs, all of one size
    const int64_t unit_stats = plan.fused ? 2 * p.rows() * sizeof(float2) + p.split_at(1, 0, 0) : 0;
    const int64_t unit_bytes = (p.keys() + p.rows()) * (2 * p.Pk + p.Pv) * sizeof(half) + unit_stats;
    plan.max_units           = std::clamp<int64_t>(workspace_limit / (plan.fused ? 1 : 2) / unit_bytes, 1, units);
    plan.max_units           = (units + (units + plan.max_units - 1) / plan.max_units - 1) / ((units + plan.max_units - 1) / plan.max_units);
    p.nparts                 = std::clamp<int64_t>(4 * nsm / (2 * plan.max_units), 1, (args.M + 63) / 64);
    if (plan.fused) {
        plan.nbytes = fattn_back_mma_layout(plan, nullptr);
        return plan;
    }

    // pairs: as many row blocks as the limit takes, of as few units as fill the device
    const int D_max           = std::max(plan.kernels->Dk, plan.kernels->Dv);
    const int nslots          = nsm * fattn_back_grads_occupancy(D_max);
    const int nkt             = p.ntiles(false);
    const int64_t block_bytes = (int64_t) p.KT * ((softcap ? 3 : 2) * FATTN_BACK_MMA_PAIRS * sizeof(half) + 2 * FATTN_BACK_MMA_ROWS * ((softcap ? 6 : 4) * sizeof(float) + 2 * sizeof(half)));
    const int64_t max_blocks  = std::max<int64_t>(workspace_limit / block_bytes, 2);
    if (max_blocks >= p.RB) {
        plan.max_cblocks = p.RB;
        plan.max_cunits  = std::min<int64_t>(max_blocks / p.RB, plan.max_units);
    } else {
        plan.max_cunits   = std::clamp<int64_t>(nslots / std::max(nkt * n_kv, 1), 1, std::min<int64_t>(max_blocks / 2, plan.max_units));
        plan.max_cblocks  = max_blocks / plan.max_cunits / 2 * 2;
        const int nchunks = (p.RB + plan.max_cblocks - 1) / plan.max_cblocks;
        plan.max_cblocks  = GGML_PAD((p.RB + nchunks - 1) / nchunks, 2);
    }

    // parts of the grads kernel's sums: several for each slot of the device, so that no block is late, but none too short
    const int slices_q    = FATTN_BACK_MMA_KEYS / fattn_back_grads_slice(arch, D_max);
    const int slices_kv   = FATTN_BACK_MMA_ROWS / fattn_back_grads_slice(arch, D_max);
    const int64_t work_q  = args.dQ != nullptr ? (int64_t) plan.max_cunits * plan.max_cblocks / 2 * p.KT * slices_q : 0;
    const int64_t work_kv = (int64_t) plan.max_cunits * plan.max_cblocks * slices_kv * nkt * n_kv;
    const int64_t len     = std::max<int64_t>((work_q + work_kv) / (4 * nslots), 16); // slices
    const int64_t len_q   = std::max<int64_t>((work_q + work_kv) / (2 * nslots), 16);
    p.len_q               = std::clamp<int64_t>(len_q / slices_q, 1, FATTN_BACK_GRADS_MAX_ITEMS);
    p.len_kv              = std::clamp<int64_t>(len / slices_kv, 1, FATTN_BACK_GRADS_MAX_ITEMS);

    // strips of the scores kernel: several for each block that fits the device
    const int64_t tiles = (int64_t) plan.max_cunits * plan.max_cblocks / 2 * p.KT;
    p.strip             = std::clamp<int64_t>(tiles / (4 * nsm), 2, FATTN_BACK_SCORES_MAX_STRIP);

    plan.nbytes = fattn_back_mma_layout(plan, nullptr);
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
    const dim3 grid((p.KT + p.strip - 1) / p.strip * (p.cblocks / 2), p.cunits);
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
        flash_attn_back_row_stats<32, softcap><<<dim3(p.crows() / 32, p.cunits), FATTN_BACK_ROWS_THREADS, 0, stream>>>(p);
    } else {
        flash_attn_back_row_stats<8, softcap><<<dim3(p.crows() / 8, p.cunits), FATTN_BACK_ROWS_THREADS, 0, stream>>>(p);
    }
    CUDA_CHECK(cudaGetLastError());
}

static void fattn_back_mma_run(fattn_back_mma_plan & plan, char * workspace, cudaStream_t stream) {
    fattn_back_mma_params & p = plan.p;
    fattn_back_mma_layout(plan, workspace);

    const bool softcap = p.a.logit_softcap != 0.0f;
    if (p.a.mask != nullptr) {
        const dim3 grid(2 * p.KT, p.QB, p.a.mask_nheads * p.a.mask_nseqs);
        flash_attn_back_mask_tiles<<<grid, FATTN_BACK_MMA_GRANULE, 0, stream>>>(p);
        CUDA_CHECK(cudaGetLastError());
        const dim3 grid_used((p.keys() + FATTN_BACK_PREP_THREADS - 1) / FATTN_BACK_PREP_THREADS, p.a.mask_nseqs * p.a.mask_groups());
        flash_attn_back_mask_used<<<grid_used, FATTN_BACK_PREP_THREADS, 0, stream>>>(p);
        CUDA_CHECK(cudaGetLastError());
    }

    const int units = p.a.S * p.a.Hkv;
    const int n_kv  = (p.a.dK != nullptr) + (p.a.dV != nullptr);
    for (p.unit0 = 0; p.unit0 < units; p.unit0 += plan.max_units) {
        p.units = std::min(plan.max_units, units - p.unit0);

        flash_attn_back_column_parts<<<dim3(p.nparts, p.units, 2), FATTN_BACK_PREP_THREADS, 0, stream>>>(p);
        CUDA_CHECK(cudaGetLastError());
        flash_attn_back_column_means<<<dim3(p.units, 2), FATTN_BACK_PREP_MEANS_GROUPS * FATTN_BACK_MMA_MAX_D, 0, stream>>>(p);
        CUDA_CHECK(cudaGetLastError());
        const int64_t nkv = p.keys() * (std::max(p.Pk, p.Pv) / 8);
        flash_attn_back_convert_kv<<<dim3((nkv + FATTN_BACK_PREP_THREADS - 1) / FATTN_BACK_PREP_THREADS, p.units, 2), FATTN_BACK_PREP_THREADS, 0, stream>>>(p);
        CUDA_CHECK(cudaGetLastError());
        CUDA_CHECK(cudaMemsetAsync(p.exp_q_min, 0x7F, p.units * sizeof(*p.exp_q_min), stream));
        CUDA_CHECK(cudaMemsetAsync(p.exp_dO_min, 0x7F, p.units * sizeof(*p.exp_dO_min), stream));
        const int nrows = FATTN_BACK_PREP_THREADS / fattn_back_prep_row_threads(std::max(p.Pk, p.Pv));
        flash_attn_back_convert_rows<<<dim3((p.rows() + nrows - 1) / nrows, p.units, 2), FATTN_BACK_PREP_THREADS, 0, stream>>>(p);
        CUDA_CHECK(cudaGetLastError());

        if (plan.fused) {
            CUDA_CHECK(cudaMemsetAsync(p.split, 0, p.split_at(p.units, 0, 0), stream));
            plan.kernels->fused[softcap](p, plan.arch, stream);
            continue;
        }
        for (p.cunit0 = 0; p.cunit0 < p.units; p.cunit0 += plan.max_cunits) {
            p.cunits = std::min(plan.max_cunits, p.units - p.cunit0);
            for (p.cb0 = 0; p.cb0 < p.RB; p.cb0 += plan.max_cblocks) {
                p.cblocks    = std::min(plan.max_cblocks, p.RB - p.cb0);
                p.plane      = (int64_t) p.cunits * p.cblocks * p.KT * FATTN_BACK_MMA_PAIRS;
                p.accumulate = p.cb0 > 0;

                if (softcap) {
                    fattn_back_mma_run_scores<true>(plan, stream);
                    plan.kernels->grads[1](p, plan.arch, stream);
                } else {
                    fattn_back_mma_run_scores<false>(plan, stream);
                    plan.kernels->grads[0](p, plan.arch, stream);
                }

                const int tiles_q  = p.a.dQ != nullptr && p.max_parts_q() > 1 ? p.cunits * p.ntiles(true) : 0;
                const int tiles_kv = n_kv > 0 && p.max_parts_kv() > 1 ? p.cunits * p.ntiles(false) : 0;
                if (tiles_q + tiles_kv > 0) {
                    flash_attn_back_reduce<<<FATTN_BACK_REDUCE_BLOCKS *(p.cunits * p.ntiles(true) + 2 * tiles_kv), FATTN_BACK_REDUCE_THREADS, 0, stream>>>(p);
                    CUDA_CHECK(cudaGetLastError());
                }
            }
        }
    }
    if (p.a.dSinks != nullptr) {
        flash_attn_back_mma_dsinks<<<p.a.H, 256, 0, stream>>>(p.a);
        CUDA_CHECK(cudaGetLastError());
    }
}
