#pragma once

#include "fattn-back-mma-prep.cuh"

#define FATTN_BACK_SCORES_GROUP     128 // threads that share a pipeline
#define FATTN_BACK_SCORES_THREADS   (2 * FATTN_BACK_SCORES_GROUP)
#define FATTN_BACK_SCORES_SLICE     32 // components of an operand in a pipeline stage
#define FATTN_BACK_SCORES_OPERAND   (128 * FATTN_BACK_SCORES_SLICE * (int) sizeof(half)) // bytes of 128 rows of a slice
#define FATTN_BACK_SCORES_MAX_STRIP 32

// what the exponentials need of a row
struct fattn_back_scores_row {
    const half * mask; // its row, NULL without a mask
    float scale;       // log2(e) x = scale * product of the operands
    float dot;         // log2(e) x of the mean of K
    float slope;       // log2(e) * slope
};

// stages of a group's ring; with resident rows they hold keys only
static constexpr __host__ __device__ int fattn_back_scores_smem(const int Pk, const int Pv, const bool resident, const int stages) {
    return (resident ? (Pk + Pv) / FATTN_BACK_SCORES_SLICE + 2 * stages : 4 * stages) * FATTN_BACK_SCORES_OPERAND + 128 * (int) sizeof(fattn_back_scores_row);
}

#ifdef AMPERE_MMA_AVAILABLE
static __device__ __forceinline__ void fattn_back_scores_sync(const int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(FATTN_BACK_SCORES_GROUP) : "memory");
}

static __device__ __forceinline__ bool fattn_back_scores_sync_or(const int group, const bool x) {
    int y;
    asm volatile("{ .reg .pred p, q; setp.ne.s32 p, %1, 0; bar.red.or.pred q, %2, %3, p; selp.s32 %0, 1, 0, q; }"
        : "=r"(y) : "r"((int) x), "r"(group + 1), "n"(FATTN_BACK_SCORES_GROUP) : "memory");
    return y != 0;
}
#endif // AMPERE_MMA_AVAILABLE

// With more than 99 KB the rows always fit. Four stages are for these: with less the registers do not do for the loads ahead.
static constexpr __host__ __device__ bool fattn_back_scores_built(const int arch, const bool resident, const int nst) {
    return resident ? nst <= 2 || fattn_back_mma_smem(arch) > 99 * 1024 : fattn_back_mma_smem(arch) <= 99 * 1024;
}

// S = QK^T and dP = dO V^T of 128 rows (two row blocks of a unit) and every nstrips-th key tile, 128x128 at a time: E = exp2(S - m) and
// dP to the pair workspace, m and the sums over E, E dP to the granule arrays.
// Grid: pairs of row blocks (neighbours share K and V in L2), strips of key tiles, units of the chunk.
// Block: two groups of 2x2 warps that take the strip's tiles in turns and never wait for each other, one computes exponentials while the
// other keeps the tensor cores busy. A warp has 64 rows x 64 keys; m is a warp's own, so that no sum crosses warps.
// Shared memory: Q and dO of the 128 rows (resident), and for each group a ring of stages, each a slice of 32 components of 128 keys;
// where that does not fit, a stage holds the rows' slice as well. The loads run ahead over a group's tiles.
// Split S is q_hi k_hi + q_hi k_lo + q_lo k_hi: with p.split_all of every tile, else of those whose q_hi k_hi is large somewhere. These
// form k_lo from K in the ring, as it would take a third of the operands' memory.
template <bool softcap, bool resident, int nst>
static __global__ void __launch_bounds__(FATTN_BACK_SCORES_THREADS, 1) flash_attn_back_scores(const fattn_back_mma_params p) {
#ifdef AMPERE_MMA_AVAILABLE
    if constexpr (!fattn_back_scores_built(__CUDA_ARCH__, resident, nst)) {
        NO_DEVICE_CODE;
        return;
    }
    constexpr int slice    = FATTN_BACK_SCORES_SLICE;
    constexpr int operand  = FATTN_BACK_SCORES_OPERAND;
    constexpr int stage_sz = resident ? operand : 2 * operand;

    // slices of S and dP
    const int nk = p.Pk / slice;
    const int nv = p.Pv / slice;

    extern __shared__ __align__(128) char smem[];
    const int rows_sz            = resident ? (nk + nv) * operand : 0;
    fattn_back_scores_row * rows = (fattn_back_scores_row *) (smem + rows_sz + 2 * nst * stage_sz);

    const int group  = __shfl_sync(0xFFFFFFFF, threadIdx.x / FATTN_BACK_SCORES_GROUP, 0); // known to be uniform
    const int thread = threadIdx.x % FATTN_BACK_SCORES_GROUP;
    const int lane   = thread % WARP_SIZE;
    constexpr int nm = 4;  // 16 rows of a warp
    constexpr int nw = 8 / nm;  // warps by rows
    const int wr     = thread / WARP_SIZE % nw * nm * 16; // first row of the warp
    const int wm     = wr / FATTN_BACK_MMA_ROWS;        // row block
    const int wn     = thread / WARP_SIZE / nw;         // granule of the key tile

    const int rp    = softcap ? fattn_back_rare(blockIdx.x) : (int) blockIdx.x; // else sm_120 spills
    const int cunit = blockIdx.z;
    const int lunit = p.cunit0 + cunit;
    const int unit  = p.unit0 + lunit;
    const int b0    = p.cb0 + 2 * rp;

    // tile i of the strip is key tile kt_of(i): whatever band of keys the mask leaves, the strips have much the same to do
    const auto kt_of = [&](const int i) { return fattn_back_rare(blockIdx.y) + i * p.nstrips; };
    // the group's tiles of the strip, and which of them the warp's row block sees not at all or without a mask, as bits
    uint32_t todo;
    uint32_t skip;
    uint32_t full;
    {
        const int kt                  = kt_of(lane);
        const bool in                 = kt < p.KT;
        const fattn_back_tile tile[2] = {
            in ? fattn_back_mma_tile_row(p, unit, b0).get(kt) : FATTN_BACK_TILE_SKIP,
            in ? fattn_back_mma_tile_row(p, unit, b0 + 1).get(kt) : FATTN_BACK_TILE_SKIP,
        };
        const uint32_t active = __ballot_sync(0xFFFFFFFF, tile[0] != FATTN_BACK_TILE_SKIP || tile[1] != FATTN_BACK_TILE_SKIP);
        if (active == 0) {
            return;
        }
        todo = __ballot_sync(0xFFFFFFFF, (active & (1u << lane)) != 0 && __popc(active & ((1u << lane) - 1)) % 2 == group);
        skip = __ballot_sync(0xFFFFFFFF, (wm == 0 ? tile[0] : tile[1]) == FATTN_BACK_TILE_SKIP);
        full = __ballot_sync(0xFFFFFFFF, (wm == 0 ? tile[0] : tile[1]) == FATTN_BACK_TILE_FULL);
    }

    const uint32_t smem_base = fattn_back_shared(smem);
    const int row0           = lunit * p.rows() + p.crow0() + 2 * rp * FATTN_BACK_MMA_ROWS; // operands of a group of units have fewer than 2^31 rows
    if (group == 0 && thread < 128) {
        const int b                 = b0 + thread / FATTN_BACK_MMA_ROWS;
        const int h                 = (unit % p.a.Hkv) * p.a.G + b % p.a.G;
        const int q                 = min((b / p.a.G) * FATTN_BACK_MMA_ROWS + thread % FATTN_BACK_MMA_ROWS, p.a.N - 1);
        fattn_back_scores_row & row = rows[thread];
        row.mask                    = p.a.mask == nullptr ? nullptr : (const half *) (p.a.mask + (unit / p.a.Hkv % p.a.mask_nseqs) * p.a.mask_nb_seq + (h % p.a.mask_nheads) * p.a.mask_nb_head + q * p.a.mask_nb_row);
        row.scale                   = exp2f(-p.exp_q[row0 + thread] - p.exp_k[lunit]);
        row.dot                     = p.dot_q[row0 + thread];
        row.slope                   = fattn_back_slope(p.a, h) * 1.4426950408889634f;
    }

    // loads: thread t copies 16 bytes of rows t/4 + 32*i
    const int ld_row      = thread / 4;
    const int ld_chunk    = thread % 4;
    constexpr int ld_rows = FATTN_BACK_SCORES_GROUP / 4;
    const uint32_t ld_off = ld_row * 64 + ((ld_chunk ^ ((ld_row / 2) % 4)) << 4);
    if constexpr (resident) {
        for (int i = group; i < nk + nv; i += 2) {
            const int pitch  = i < nk ? p.Pk : p.Pv;
            const half * src = (i < nk ? p.q_hi + i * slice : p.dO + (i - nk) * slice) + (int64_t) (row0 + ld_row) * pitch + ld_chunk * 8;
#pragma unroll
            for (int j = 0; j < nm; ++j) {
                fattn_back_cp_async_16(smem_base + i * operand + ld_off + j * ld_rows * 64, src + j * ld_rows * pitch);
            }
        }
        fattn_back_cp_async_commit();
    }

    const uint32_t ring  = smem_base + rows_sz + group * nst * stage_sz;
    const int ld_b       = lunit * p.keys() + ld_row;
    uint32_t ld_todo     = todo;
    int ld_part          = 0; // 0: q_hi k_hi, 1: q_lo k_hi, 2: q_hi k_lo, 3: dO v
    int ld_left          = 0; // slices of the part
    int ld_stage         = 0;
    int ld_step          = 0; // elements of 32 rows
    const half * ld_A    = nullptr;
    const half * ld_B    = nullptr;
    const auto load_part = [&]() {
        const int kt     = kt_of(__ffs(ld_todo) - 1);
        const bool is_dP = ld_part == 3;
        const int pitch  = is_dP ? p.Pv : p.Pk;
        ld_left          = is_dP ? nv : nk;
        ld_step          = ld_rows * pitch;
        ld_B             = (is_dP ? p.v : ld_part == 2 ? p.k_lo
                                                       : p.k_hi) +
            (int64_t) (ld_b + kt * FATTN_BACK_MMA_KEYS) * pitch + ld_chunk * 8;
        if constexpr (!resident) {
            ld_A = (is_dP ? p.dO : ld_part == 1 ? p.q_lo
                                                : p.q_hi) +
                (int64_t) (row0 + ld_row) * pitch + ld_chunk * 8;
        }
    };
    load_part();
    const auto load = [&]() {
        if (ld_todo != 0) {
            const uint32_t dst = ring + ld_stage * stage_sz + ld_off;
#pragma unroll
            for (int i = 0; i < nm; ++i) {
                fattn_back_cp_async_16(dst + i * ld_rows * 64, ld_B + i * ld_step);
                if constexpr (!resident) {
                    fattn_back_cp_async_16(dst + i * ld_rows * 64 + operand, ld_A + i * ld_step);
                }
            }
            ld_stage = ld_stage + 1 == nst ? 0 : ld_stage + 1;
            ld_B += slice;
            if constexpr (!resident) {
                ld_A += slice;
            }
            if (--ld_left == 0) {
                ld_todo &= ld_part == 3 ? ld_todo - 1 : ld_todo;
                ld_part = ld_part == 3 ? 0 : ld_part == 1 && p.split_all ? 2
                                                                         : 3;
                load_part();
            }
        }
        fattn_back_cp_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < nst - 1; ++i) {
        load();
    }
    if constexpr (resident) {
        fattn_back_cp_async_wait<nst - 1>();
    }
    __syncthreads();

    // ldmatrix: A as 16 rows x 16 components, B as 16 keys x 16 components
    const int a_row      = wr + lane % 16;
    const int b_row      = wn * 64 + lane % 8 + lane / 16 * 8;
    const uint32_t a_src = (resident ? smem_base : ring + operand) + a_row * 64 + (((lane / 16) ^ ((a_row / 2) % 4)) << 4);
    const uint32_t b_src = ring + b_row * 64 + (((lane / 8 % 2) ^ ((b_row / 2) % 4)) << 4);
    const int r          = lane / 4;   // row of an accumulator, and r + 8
    const int c2         = lane % 4 * 2; // first of its two keys

    float acc[nm][8][4];
    int stage       = 0;
    const auto zero = [&]() {
#pragma unroll
        for (int mi = 0; mi < nm; ++mi) {
#pragma unroll
            for (int ni = 0; ni < 8; ++ni) {
#pragma unroll
                for (int l = 0; l < 4; ++l) {
                    acc[mi][ni][l] = 0.0f;
                }
            }
        }
    };
    // acc += the product of slice i: keys at b_off in the ring, rows at a_off or of x in global memory
    const auto multiply = [&](const int i, const uint32_t b_off, const uint32_t a_off, const auto x) {
#pragma unroll
        for (int kk = 0; kk < 2; ++kk) {
            uint32_t B[4][4];
#pragma unroll
            for (int ni = 0; ni < 4; ++ni) {
                fattn_back_ldmatrix(B[ni], ((b_src + b_off) ^ (kk * 32)) + ni * 16 * 64);
            }
#pragma unroll
            for (int mi = 0; mi < nm; ++mi) {
                uint32_t A[4];
                if constexpr (std::is_pointer_v<decltype(x)>) {
                    const half * src = x + (int64_t) (row0 + wr + mi * 16 + r) * p.Pk + i * slice + kk * 16 + c2;
#pragma unroll
                    for (int l = 0; l < 4; ++l) {
                        A[l] = *(const uint32_t *) (src + l % 2 * 8 * p.Pk + l / 2 * 8);
                    }
                } else {
                    fattn_back_ldmatrix(A, ((a_src + a_off) ^ (kk * 32)) + mi * 16 * 64);
                }
#pragma unroll
                for (int ni = 0; ni < 8; ++ni) {
                    fattn_back_mma(acc[mi][ni], A, B[ni / 2][ni % 2 * 2 + 0], B[ni / 2][ni % 2 * 2 + 1]);
                }
            }
        }
    };
    // of the next n slices that are loaded; resident: rows from slice a on
    const auto product = [&](const int n, const int a, const auto x) {
        for (int i = 0; i < n; ++i) {
            fattn_back_cp_async_wait<nst - 2>();
            fattn_back_scores_sync(group);
            load();
            const uint32_t b_off = stage * stage_sz;
            multiply(i, b_off, resident ? (a + i) * operand : b_off, x);
            stage = stage + 1 == nst ? 0 : stage + 1;
        }
    };
    // of q_hi and k_lo of a key tile; nothing may be on its way to the ring
    const auto product_k_lo = [&](const int kt) {
#pragma unroll 1
        for (int i = 0; i < nk; ++i) {
#pragma unroll 1
            for (int j = 0; j < nm; ++j) {
                const int t   = fattn_back_rare(threadIdx.x); // what it takes is formed again, the accumulators leave few registers
                const int row = t % FATTN_BACK_SCORES_GROUP / 4 + j * ld_rows;
                float x[8];
                half2 hi[4];
                half2 lo[4];
                fattn_back_mma_prep_load(p, false, fattn_back_rare(lunit), kt * FATTN_BACK_MMA_KEYS + row, 4 * i + t % 4, x);
                fattn_back_mma_prep_split(x, hi, lo);
                const uint32_t dst = fattn_back_rare(smem_base) + rows_sz + t / FATTN_BACK_SCORES_GROUP * nst * stage_sz + row * 64;
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(dst + (((2 * c + t % 4 / 2) ^ (row / 2 % 4)) << 4) + t % 2 * 8),
                        "r"(fattn_back_as_uint(lo[2 * c])), "r"(fattn_back_as_uint(lo[2 * c + 1])) : "memory");
                }
            }
            fattn_back_scores_sync(group);
            if constexpr (resident) {
                multiply(i, 0, i * operand, nullptr);
            } else {
                multiply(i, 0, 0, p.q_hi);
            }
            fattn_back_scores_sync(group);
        }
    };

    for (; todo != 0; todo &= todo - 1) {
        const int kt       = kt_of(__ffs(todo) - 1);
        const uint32_t bit = todo & -todo;

        zero();
        product(nk, 0, nullptr);
        bool large = p.split_all;
        if (!p.split_all) {
#pragma unroll
            for (int mi = 0; mi < nm; ++mi) {
                float amax[2] = { 0.0f, 0.0f };
#pragma unroll
                for (int ni = 0; ni < 8; ++ni) {
#pragma unroll
                    for (int l = 0; l < 4; ++l) {
                        amax[l / 2] = fmaxf(amax[l / 2], fabsf(acc[mi][ni][l]));
                    }
                }
#pragma unroll
                for (int l = 0; l < 2; ++l) {
                    large = large || amax[l] * rows[wr + mi * 16 + r + l * 8].scale > FATTN_BACK_MMA_SPLIT_LIMIT;
                }
            }
            large = fattn_back_scores_sync_or(group, large);
        }
        if (large) {
            fattn_back_cp_async_wait<0>();
            fattn_back_scores_sync(group);
            if (!p.split_all) {
                product_k_lo(kt);
            }
            // restart the loads behind q_hi k_hi of this tile
            ld_todo  = todo;
            ld_part  = 1;
            ld_stage = stage;
            load_part();
#pragma unroll 1
            for (int i = 0; i < nst - 1; ++i) {
                load();
            }
            if constexpr (resident) {
                product(nk, 0, p.q_lo);
            } else {
                product(nk, 0, nullptr);
            }
            if (p.split_all) {
                product(nk, 0, nullptr);
            }
        }

        // accumulators to E; dst: the warp's first 8x8 matrix, a lane's two keys
        half * dst       = p.pairs + p.tile(cunit, 2 * rp + wm, kt) + (wr % FATTN_BACK_MMA_ROWS / 8 * 16 + wn * 8) * 64 + lane * 2;
        const int64_t gr = p.granule(cunit, 2 * kt + wn) + 2 * rp * FATTN_BACK_MMA_ROWS + wr;
        uint32_t E[nm][8][2];
#pragma unroll
        for (int mi = 0; mi < nm; ++mi) {
            // of rows r and r + 8: S = acc*scale, and its maximum
            float scale[2] = { rows[wr + mi * 16 + r].scale, rows[wr + mi * 16 + r + 8].scale };
            float m[2]     = { -INFINITY, -INFINITY };
            if (softcap || (full & bit) == 0) {
                const fattn_back_scores_row row[2] = { rows[wr + mi * 16 + r], rows[wr + mi * 16 + r + 8] };
#pragma unroll
                for (int ni = 0; ni < 8; ++ni) {
                    float u[4];
#pragma unroll
                    for (int l = 0; l < 4; ++l) {
                        float & x = acc[mi][ni][l];
                        x *= scale[l / 2];
                        if constexpr (softcap) {
                            const float y = x + row[l / 2].dot;
                            const float f = fattn_back_exp2(-2.0f * fabsf(y) / p.a.logit_softcap);
                            const float g = 1.0f / (1.0f + f);
                            u[l]          = (4 << FATTN_BACK_MMA_SHIFT_U) * f * g * g;
                            x             = copysignf(1.4426950408889634f * p.a.logit_softcap * (1.0f - f) * g, y);
                        }
                        const int key = kt * FATTN_BACK_MMA_KEYS + wn * 64 + ni * 8 + c2 + l % 2;
                        if ((skip & bit) != 0 || key >= p.a.M) {
                            x = -INFINITY;
                        } else if ((full & bit) == 0 && row[l / 2].mask != nullptr) {
                            x += row[l / 2].slope * __half2float(row[l / 2].mask[key]);
                        }
                    }
                    if constexpr (softcap) {
                        half * dst_u                 = dst + 2 * p.plane + (mi * 2 * 16 + ni) * 64;
                        *(half2 *) (dst_u)           = __floats2half2_rn(u[0], u[1]);
                        *(half2 *) (dst_u + 16 * 64) = __floats2half2_rn(u[2], u[3]);
                    }
                }
                scale[0] = 1.0f;
                scale[1] = 1.0f;
            }
#pragma unroll
            for (int ni = 0; ni < 8; ++ni) {
#pragma unroll
                for (int l = 0; l < 4; ++l) {
                    m[l / 2] = fmaxf(m[l / 2], acc[mi][ni][l]);
                }
            }
#pragma unroll
            for (int l = 0; l < 2; ++l) {
                m[l] = fmaxf(m[l], __shfl_xor_sync(0xFFFFFFFF, m[l], 1));
                m[l] = fmaxf(m[l], __shfl_xor_sync(0xFFFFFFFF, m[l], 2));
                m[l] *= scale[l];
                if (lane % 4 == 0) {
                    p.gmax[gr + mi * 16 + r + l * 8] = m[l];
                }
                m[l] = m[l] == -INFINITY ? 0.0f : m[l] - FATTN_BACK_MMA_SHIFT_E;
            }
#pragma unroll
            for (int ni = 0; ni < 8; ++ni) {
#pragma unroll
                for (int l = 0; l < 2; ++l) {
                    const half2 e = __floats2half2_rn(
                        fattn_back_exp2(acc[mi][ni][2 * l + 0] * scale[l] - m[l]), fattn_back_exp2(acc[mi][ni][2 * l + 1] * scale[l] - m[l]));
                    E[mi][ni][l]                                     = fattn_back_as_uint(e);
                    *(half2 *) (dst + ((mi * 2 + l) * 16 + ni) * 64) = e;
                }
            }
            // the sums of the rounded E, so that P sums to 1: a product with ones
            float sum[4] = { 0.0f };
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const uint32_t A[4] = { E[mi][2 * k][0], E[mi][2 * k][1], E[mi][2 * k + 1][0], E[mi][2 * k + 1][1] };
                fattn_back_mma(sum, A, 0x3C003C00, 0x3C003C00);
            }
            if (lane % 4 == 0) {
                p.gsum[gr + mi * 16 + r]     = sum[0];
                p.gsum[gr + mi * 16 + r + 8] = sum[2];
            }
        }
        zero();
        product(nv, nk, nullptr);

#pragma unroll
        for (int mi = 0; mi < nm; ++mi) {
            uint32_t dP[8][2];
#pragma unroll
            for (int ni = 0; ni < 8; ++ni) {
#pragma unroll
                for (int l = 0; l < 2; ++l) {
                    const half2 x                                              = __floats2half2_rn(acc[mi][ni][2 * l + 0], acc[mi][ni][2 * l + 1]);
                    dP[ni][l]                                                  = fattn_back_as_uint(x);
                    *(half2 *) (dst + p.plane + ((mi * 2 + l) * 16 + ni) * 64) = x;
                }
            }
            // sums of E dP: the diagonal of E dP^T, whose operands the accumulators are
            float lo[4] = { 0.0f };
            float hi[4] = { 0.0f };
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const uint32_t A[4] = { E[mi][2 * k][0], E[mi][2 * k][1], E[mi][2 * k + 1][0], E[mi][2 * k + 1][1] };
                fattn_back_mma(lo, A, dP[2 * k][0], dP[2 * k + 1][0]);
                fattn_back_mma(hi, A, dP[2 * k][1], dP[2 * k + 1][1]);
            }
            if (lane % 4 == r / 2) {
                p.gdp[gr + mi * 16 + r]     = r % 2 == 0 ? lo[0] : lo[1];
                p.gdp[gr + mi * 16 + r + 8] = r % 2 == 0 ? hi[2] : hi[3];
            }
            if constexpr (softcap) {
                float sum_u[2]   = { 0.0f };
                float sum_udp[2] = { 0.0f };
#pragma unroll
                for (int ni = 0; ni < 8; ++ni) {
#pragma unroll
                    for (int l = 0; l < 2; ++l) {
                        const float2 u = __half22float2(*(const half2 *) (dst + 2 * p.plane + ((mi * 2 + l) * 16 + ni) * 64));
                        const float2 e = __half22float2(fattn_back_as_half2(E[mi][ni][l]));
                        const float2 x = __half22float2(fattn_back_as_half2(dP[ni][l]));
                        sum_u[l] += e.x * u.x + e.y * u.y;
                        sum_udp[l] += e.x * u.x * x.x + e.y * u.y * x.y;
                    }
                }
#pragma unroll
                for (int l = 0; l < 2; ++l) {
#pragma unroll
                    for (int n = 1; n < 4; n *= 2) {
                        sum_u[l] += __shfl_xor_sync(0xFFFFFFFF, sum_u[l], n);
                        sum_udp[l] += __shfl_xor_sync(0xFFFFFFFF, sum_udp[l], n);
                    }
                    if (lane % 4 == 0) {
                        p.gu[gr + mi * 16 + r + l * 8]   = sum_u[l];
                        p.gudp[gr + mi * 16 + r + l * 8] = sum_udp[l];
                    }
                }
            }
        }
    }
#else
    GGML_UNUSED(p);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

// threads for nrows rows, few rows have many granules
static constexpr __host__ __device__ int fattn_back_rows_threads(const int nrows) {
    return nrows == 8 ? 1024 : 512;
}

// LSE and D of nrows rows from their granules, and for every granule the factors that turn E into an operand P.
// Grid: blocks of nrows rows, units of the chunk. Block: a row's granules are dealt to the threads, whose sums are
// combined in a fixed order.
template <int nrows, bool softcap>
static __global__ void __launch_bounds__(fattn_back_rows_threads(nrows), 1) flash_attn_back_row_stats(const fattn_back_mma_params p) {
    constexpr int nparts  = fattn_back_rows_threads(nrows) / nrows;
    constexpr int nsums   = softcap ? 4 : 2;
    constexpr float log2e = 1.4426950408889634f;
    constexpr float ln2   = 0.6931471805599453f;

    const int tr       = threadIdx.x % nrows;
    const int part     = threadIdx.x / nrows;
    const int cunit    = blockIdx.y;
    const int lunit    = p.cunit0 + cunit;
    const int unit     = p.unit0 + lunit;
    const int crow     = blockIdx.x * nrows + tr;
    const int cb       = crow / FATTN_BACK_MMA_ROWS;
    const int b        = p.cb0 + cb;
    const int h        = (unit % p.a.Hkv) * p.a.G + b % p.a.G;
    const int q        = (b / p.a.G) * FATTN_BACK_MMA_ROWS + crow % FATTN_BACK_MMA_ROWS;
    const int64_t lrow = lunit * p.rows() + p.crow0() + crow;

    // the row's tiles, and those of the pair of blocks
    const fattn_back_mma_tile_row tiles(p, unit, b);
    const fattn_back_mma_tile_row tiles2(p, unit, b ^ 1);

    float m          = -INFINITY;
    float sum[nsums] = { 0.0f };
    constexpr int nu = 4; // granules in flight
    for (int gr0 = part; gr0 < 2 * p.KT; gr0 += nu * nparts) {
        float gm[nu];
        float x[nu][nsums];
        float m_new = m;
#pragma unroll
        for (int u = 0; u < nu; ++u) {
            const int gr    = gr0 + u * nparts;
            const bool seen = gr < 2 * p.KT && tiles.get(gr / 2) != FATTN_BACK_TILE_SKIP;
            const int64_t i = p.granule(cunit, gr) + crow;
            gm[u]           = seen ? p.gmax[i] : -INFINITY;
            x[u][0]         = seen ? p.gsum[i] : 0.0f;
            x[u][1]         = seen ? p.gdp[i] : 0.0f;
            if constexpr (softcap) {
                x[u][2] = seen ? p.gudp[i] : 0.0f;
                x[u][3] = seen ? p.gu[i] : 0.0f;
            }
            m_new = fmaxf(m_new, gm[u]);
        }
        if (m_new == -INFINITY) {
            continue;
        }
        const float f_old = fattn_back_exp2(m - m_new);
#pragma unroll
        for (int k = 0; k < nsums; ++k) {
            sum[k] *= f_old;
#pragma unroll
            for (int u = 0; u < nu; ++u) {
                sum[k] += x[u][k] * fattn_back_exp2(gm[u] - m_new - FATTN_BACK_MMA_SHIFT_E);
            }
        }
        m = m_new;
    }

    __shared__ float red[1 + nsums][nparts][nrows];
    __shared__ float row_lse[nrows];
    red[0][part][tr] = m;
#pragma unroll
    for (int k = 0; k < nsums; ++k) {
        red[1 + k][part][tr] = sum[k];
    }
    __syncthreads();
    for (int n = nparts / 2; n > 0; n /= 2) {
        if (part < n) {
            const float m2    = red[0][part + n][tr];
            const float m_new = fmaxf(m, m2);
            const float f     = m == -INFINITY ? 0.0f : fattn_back_exp2(m - m_new);
            const float f2    = m2 == -INFINITY ? 0.0f : fattn_back_exp2(m2 - m_new);
#pragma unroll
            for (int k = 0; k < nsums; ++k) {
                sum[k]               = sum[k] * f + red[1 + k][part + n][tr] * f2;
                red[1 + k][part][tr] = sum[k];
            }
            m                = m_new;
            red[0][part][tr] = m;
        }
        __syncthreads();
    }

    const float e_q  = p.exp_q[lrow];
    const float e_dO = p.exp_dO[lrow];
    if (part == 0) {
        const float dot_q  = softcap ? 0.0f : p.dot_q[lrow];
        const float dot_dO = p.dot_dO[lrow];
        const float sink   = p.a.sinks != nullptr ? log2e * p.a.sinks[h] - dot_q : -INFINITY; // S here lacks the constant that K's mean makes
        const float m_keys = m;
        m                  = fmaxf(m, sink);

        float lse  = -INFINITY;
        float Draw = 0.0f;
        float D    = 0.0f;
        float R    = 0.0f;
        if (m > -INFINITY && m < INFINITY) { // a sink of inf takes all
            const float f = m_keys == -INFINITY ? 0.0f : fattn_back_exp2(m_keys - m);
#pragma unroll
            for (int k = 0; k < nsums; ++k) {
                sum[k] *= f;
            }
            const float p_sink  = fattn_back_exp2(sink - m);
            const float total   = sum[0] + p_sink;
            const float unscale = exp2f(-e_dO - p.exp_v[lunit]); // from dP's units
            lse                 = m + log2f(total);
            D                   = sum[1] / total;
            Draw                = D * unscale + dot_dO * (sum[0] / total);
            if (p.a.sinks != nullptr) {
                const float d_sink = p_sink / total * dot_dO;
                D -= d_sink != 0.0f ? d_sink * exp2f(e_dO + p.exp_v[lunit]) : 0.0f; // the exponent of a row of zeros is large
                R = p_sink / total * Draw;
            }
            if constexpr (softcap) {
                R = (sum[2] - D * sum[3]) / total * unscale * (1.0f / (1 << FATTN_BACK_MMA_SHIFT_U));
            }
        }
        const int64_t c = cunit * p.crows() + crow;
        const half D_hi = __float2half_rn(D);
        p.D[c]          = D;
        p.D_hi[c]       = D_hi;
        p.D_lo[c]       = __float2half_rn(D - __half2float(D_hi));
        if (p.rank1) {
            p.R[c] = R;
        }
        row_lse[tr] = lse;
        if (q < p.a.N) {
            const int64_t row = p.a.row(q, h, unit / p.a.Hkv);
            p.a.LSE[row]      = m == INFINITY ? INFINITY : ln2 * (lse + dot_q);
            p.a.D[row]        = Draw;
        }
    }
    __syncthreads();

    const float lse     = row_lse[tr];
    const bool row_used = q < p.a.N && lse > -INFINITY;
    const float f_v     = exp2f(p.exp_dO_min[lunit] - e_dO);
    const float f_u     = softcap ? 1.0f / (1 << FATTN_BACK_MMA_SHIFT_U) : 1.0f;
    const float f_k     = f_u * exp2f(p.exp_dO_min[lunit] - e_dO + p.exp_q_min[lunit] - e_q);
    for (int gr0 = part; gr0 < 2 * p.KT; gr0 += nu * nparts) {
        bool on[nu];
        float f[nu];
#pragma unroll
        for (int u = 0; u < nu; ++u) {
            const int gr = gr0 + u * nparts;
            on[u]        = gr < 2 * p.KT && (tiles.get(gr / 2) != FATTN_BACK_TILE_SKIP || tiles2.get(gr / 2) != FATTN_BACK_TILE_SKIP);
        }
#pragma unroll
        for (int u = 0; u < nu; ++u) {
            f[u] = row_used && on[u] ? p.gmax[p.granule(cunit, gr0 + u * nparts) + crow] - lse : -INFINITY;
        }
#pragma unroll
        for (int u = 0; u < nu; ++u) {
            if (on[u]) {
                const int64_t i = p.granule(cunit, gr0 + u * nparts) + crow;
                const float x   = fattn_back_exp2(f[u] + (FATTN_BACK_MMA_SHIFT_P - FATTN_BACK_MMA_SHIFT_E));
                p.fac_q[i]      = x * f_u;
                p.fac_v[i]      = __float2half_rn(x * f_v);
                p.fac_k[i]      = __float2half_rn(x * f_k);
            }
        }
    }
}
