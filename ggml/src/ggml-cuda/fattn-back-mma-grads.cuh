#pragma once

#include "fattn-back-mma-common.cuh"

#define FATTN_BACK_GRADS_MAX_ITEMS 256 // of a part
#define FATTN_BACK_GRADS_LIST_SIZE (FATTN_BACK_GRADS_MAX_ITEMS * 4 + 32 + 128 * 4) // the items, counts, and D of dQ's rows

enum fattn_back_grad { FATTN_BACK_GRAD_V,
    FATTN_BACK_GRAD_K,
    FATTN_BACK_GRAD_Q };

// up to head size 128 a block has 4 warps with 32 rows each and all columns, beyond twice as many that have half of the columns
static constexpr __host__ __device__ int fattn_back_grads_threads(const int D) {
    return D <= 128 ? 128 : 256;
}

// blocks of a multiprocessor
static constexpr __host__ __device__ int fattn_back_grads_occupancy(const int D) {
    return D <= 64 ? 3 : D <= 128 ? 2
                                  : 1;
}

// rows (dV, dK) or keys (dQ) of a pipeline stage
static constexpr __host__ __device__ int fattn_back_grads_slice(const int arch, const int D) {
    return fattn_back_mma_smem(arch) < 227 * 1024 && D <= 128 ? 16 : 32;
}

// Layout of a stage: planes of slice x 128 pairs, slice rows of the other operand padded against bank conflicts, factors and D.
struct fattn_back_grads_stage {
    int planes;
    int plane;   // bytes
    int operand; // offset of dO, Q or K
    int factors; // offset: of dV for 2 granules x slice rows, the same for dK, D_hi, D_lo of the rows; dQ: 128 floats
    int bytes;

    constexpr __host__ __device__ fattn_back_grads_stage(const fattn_back_grad grad, const int slice, const int D, const bool softcap) :
        planes(grad == FATTN_BACK_GRAD_V ? 1 : softcap ? 3
                                                       : 2),
        plane(slice * FATTN_BACK_MMA_KEYS * (int) sizeof(half)),
        operand(planes * plane),
        factors(operand + slice * (2 * D + 16)),
        bytes(factors + (grad == FATTN_BACK_GRAD_Q ? 512 : 12 * slice)) {}
};

// shared memory of a block, and the stages in it
static constexpr __host__ __device__ int fattn_back_grads_smem(const int arch, const int D) {
    const int n = fattn_back_grads_occupancy(D);
    return (fattn_back_mma_smem(arch) - 1024 * (n - 1)) / n / 128 * 128;
}

static constexpr __host__ __device__ int fattn_back_grads_stages(const int arch, const int D_max, const int stage_bytes) {
    const int n = (fattn_back_grads_smem(arch, D_max) - FATTN_BACK_GRADS_LIST_SIZE) / stage_bytes;
    return n < 6 ? n : 6;
}

#ifdef AMPERE_MMA_AVAILABLE
// 128 rows (keys for dV and dK, queries for dQ) x NC columns of a gradient: the sum over one part of the row blocks or key tiles that have
// pairs, p.len_kv or p.len_q of them. The operand P or dS is formed in registers. tile: key tile, or pair of row blocks.
template <int NC, int D_max, fattn_back_grad grad, bool softcap>
static __device__ __forceinline__ void fattn_back_grads_tile(
    const fattn_back_mma_params & p, const int cunit, const int tile, const int part) {
    constexpr bool is_q    = grad == FATTN_BACK_GRAD_Q;
    constexpr bool is_v    = grad == FATTN_BACK_GRAD_V;
    constexpr int nthreads = fattn_back_grads_threads(D_max);
    constexpr int slice    = fattn_back_grads_slice(__CUDA_ARCH__, D_max);
    constexpr fattn_back_grads_stage st(grad, slice, NC, softcap);
    constexpr int nst = fattn_back_grads_stages(__CUDA_ARCH__, D_max, st.bytes);
    constexpr int ncw = NC / (nthreads / 128); // columns of a warp
    static_assert(ncw % 16 == 0, "bad head size");
    static_assert(nst >= 2, "too little shared memory");

    extern __shared__ __align__(128) char smem[];
    const uint32_t smem_base = fattn_back_shared(smem);
    const int lane           = threadIdx.x % WARP_SIZE;
    const int wm             = threadIdx.x / WARP_SIZE % 4;
    const int wn             = threadIdx.x / WARP_SIZE / 4;
    const int lunit          = p.cunit0 + cunit;
    const int unit           = p.unit0 + lunit;

    // the row blocks or key tiles of this part, in order
    int * items    = (int *) (smem + fattn_back_grads_smem(__CUDA_ARCH__, D_max) - FATTN_BACK_GRADS_LIST_SIZE);
    int * count    = items + FATTN_BACK_GRADS_MAX_ITEMS;
    float * D_rows = (float *) (count + 8); // dQ
    if constexpr (is_q) {
        if (threadIdx.x < 128) {
            D_rows[threadIdx.x] = p.D[cunit * p.crows() + tile * 128 + threadIdx.x];
        }
    }
    const int len                          = is_q ? p.len_q : p.len_kv;
    const int n_it                         = is_q ? p.KT : p.cblocks;
    const fattn_back_mma_tile_row tiles[2] = { { p, unit, p.cb0 + 2 * tile }, { p, unit, p.cb0 + 2 * tile + 1 } }; // dQ
    int total                              = 0;
#pragma unroll 1
    for (int base = 0; base < n_it; base += nthreads) {
        const int i = base + threadIdx.x;
        bool active = false;
        if (i < n_it) {
            if constexpr (is_q) {
                active = tiles[0].get(i) != FATTN_BACK_TILE_SKIP || tiles[1].get(i) != FATTN_BACK_TILE_SKIP;
            } else {
                active = fattn_back_mma_tile_row(p, unit, p.cb0 + i).get(tile) != FATTN_BACK_TILE_SKIP;
            }
        }
        const uint32_t bits = __ballot_sync(0xFFFFFFFF, active);
        if (lane == 0) {
            count[threadIdx.x / WARP_SIZE] = __popc(bits);
        }
        __syncthreads();
        int index = total - part * len + __popc(bits & ((1u << lane) - 1));
#pragma unroll
        for (int w = 0; w < nthreads / WARP_SIZE; ++w) {
            const int n = count[w];
            index += w < threadIdx.x / WARP_SIZE ? n : 0;
            total += n;
        }
        if (active && index >= 0 && index < len) {
            items[index] = i;
        }
        __syncthreads();
    }
    const int nitems   = max(min(total - part * len, len), 0);
    const bool partial = total > len;
    if (part == 0 && threadIdx.x == 0) {
        (is_q ? p.nparts_q : p.nparts_kv)[cunit * p.ntiles(is_q) + tile - (is_q ? 0 : p.kt_first())] = (total + len - 1) / len;
    }
    if (nitems == 0 && (part > 0 || (!is_q && p.accumulate))) {
        return;
    }

    // loads
    constexpr int nslices      = is_q ? FATTN_BACK_MMA_KEYS / slice : FATTN_BACK_MMA_ROWS / slice;
    constexpr int pitch        = fattn_back_mma_pitch(NC);
    const int64_t block_stride = (int64_t) p.KT * FATTN_BACK_MMA_PAIRS;
    const half * ld_pairs      = nullptr;
    const half * ld_operand    = nullptr;
    const char * ld_factors    = nullptr;
    int ld_item                = 0;
    int ld_left                = 0; // slices of the row block or key tile
    int ld_stage               = 0;
    const auto load_item       = [&]() {
        const int i          = items[ld_item++];
        const int t          = fattn_back_rare(tile);
        const int64_t u      = fattn_back_rare(lunit);
        const half * operand = is_v ? p.dO + u * p.rows() * pitch : is_q ? p.k_hi + u * p.keys() * pitch
                                                                         : p.q_hi + u * p.rows() * pitch;
        ld_left              = nslices;
        if constexpr (is_q) { // 16 x slice/8 matrices of 8x8
            ld_pairs   = p.pairs + p.tile(cunit, 2 * t, i) + threadIdx.x / slice * 16 * 64 + threadIdx.x % slice * 8;
            ld_operand = operand + (int64_t) i * FATTN_BACK_MMA_KEYS * pitch;
            ld_factors = (const char *) (p.fac_q + p.granule(cunit, 2 * i) + t * 128 + threadIdx.x % 32 * 4);
        } else {              // slice/8 x 16 matrices
            ld_pairs    = p.pairs + p.tile(cunit, i, t) + threadIdx.x * 8;
            ld_operand  = operand + (p.crow0() + i * FATTN_BACK_MMA_ROWS) * pitch;
            const int j = threadIdx.x % 64 / (slice / 8);
            ld_factors  = (const char *) ((
                                              j < 4 ? (j < 2 ? p.fac_v : p.fac_k) + p.granule(cunit, 2 * t + j % 2) : (j == 4 ? p.D_hi : p.D_lo) + cunit * p.crows()) +
                i * FATTN_BACK_MMA_ROWS + threadIdx.x % (slice / 8) * 8);
        }
    };
    const auto load = [&]() {
        if (ld_left == 0 && ld_item < nitems) {
            load_item();
        }
        if (ld_left != 0) {
            const uint32_t dst = smem_base + ld_stage * st.bytes;
            // dQ: a row of matrices is slice threads, nthreads/slice of the 8 rows of a block at a time
            constexpr int steps = 8 * slice / nthreads; // of a block
            const half * src    = ld_pairs;
#pragma unroll
            for (int j = 0; j < st.plane / 16 / nthreads; ++j) {
#pragma unroll
                for (int i = 0; i < st.planes; ++i) {
                    fattn_back_cp_async_16(dst + i * st.plane + (j * nthreads + threadIdx.x) * 16, src + i * p.plane);
                }
                if constexpr (is_q) {
                    src += j % steps == steps - 1 ? block_stride - (steps - 1) * (nthreads / slice) * 16 * 64 : nthreads / slice * 16 * 64;
                    asm volatile("" : "+l"(src)); // else the compiler would keep all of these addresses in registers
                } else {
                    src += nthreads * 8;
                }
            }
            constexpr int n = slice * NC / 8;
#pragma unroll
            for (int j = 0; j < (n + nthreads - 1) / nthreads; ++j) {
                const int t = j * nthreads + threadIdx.x;
                if (n % nthreads == 0 || t < n) {
                    const int r = t / (NC / 8);
                    const int c = t % (NC / 8);
                    fattn_back_cp_async_16(dst + st.operand + r * (2 * NC + 16) + c * 16, ld_operand + r * pitch + c * 8);
                }
            }
            if (threadIdx.x < (is_q ? 32 : 6 * slice / 8)) {
                fattn_back_cp_async_16(dst + st.factors + threadIdx.x * 16, ld_factors);
            }
            ld_stage = ld_stage + 1 == nst ? 0 : ld_stage + 1;
            ld_left--;
            ld_operand += slice * pitch;
            if constexpr (is_q) {
                ld_pairs += slice * 8;
                ld_factors += ld_left * slice == FATTN_BACK_MMA_GRANULE ? p.crows() * sizeof(float) : 0;
            } else {
                ld_pairs += slice / 8 * 16 * 64;
                ld_factors += slice * sizeof(half);
            }
        }
        fattn_back_cp_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < nst - 1; ++i) {
        load();
    }

    const int g  = lane / 4;
    const int c2 = lane % 4 * 2;

    // ldmatrix: lane/8 is the matrix, lane%8 its row
    const uint32_t a_src = smem_base + (lane % 8) * 16 +
        (is_q ? ((wm * 4 + lane / 8 % 2) * (slice / 8) + lane / 16) * 128 : (lane / 16 * 16 + wm * 4 + lane / 8 % 2) * 128);
    const uint32_t b_src = smem_base + st.operand + lane % 16 * (2 * NC + 16) + (wn * ncw + lane / 16 * 8) * 2;

    float acc[2][ncw / 8][4];

    const auto product = [&](const uint32_t offset) { // of a slice
        const char * fac = smem + offset + st.factors;
        // dV, dK: factors and D of the lane's pairs of rows, [slice's 16][first or second 8]
        half2 f[slice / 16][2];
        half2 hi[slice / 16][2];
        half2 lo[slice / 16][2];
        GGML_UNUSED(f);
        GGML_UNUSED(hi);
        GGML_UNUSED(lo);
        if constexpr (!is_q) {
#pragma unroll
            for (int k = 0; k < slice / 16; ++k) {
#pragma unroll
                for (int l = 0; l < 2; ++l) {
                    const char * fac_row = fac + (k * 16 + l * 8 + c2) * 2;
                    f[k][l]              = *(const half2 *) (fac_row + (wm / 2 + (is_v ? 0 : 2)) * slice * 2);
                    if constexpr (!is_v) {
                        hi[k][l] = *(const half2 *) (fac_row + 4 * slice * 2);
                        lo[k][l] = *(const half2 *) (fac_row + 5 * slice * 2);
                    }
                }
            }
        }
#pragma unroll
        for (int kk = 0; kk < slice / 16; ++kk) {
            uint32_t A[2][4];
#pragma unroll
            for (int mi = 0; mi < 2; ++mi) {
                const uint32_t src = a_src + offset + (is_q ? mi * 2 * (slice / 8) * 128 + kk * 2 * 128 : kk * 2 * 16 * 128 + mi * 2 * 128);
                uint32_t E[4];
                uint32_t dP[4];
                uint32_t u[4];
                GGML_UNUSED(dP);
                GGML_UNUSED(u);
                if constexpr (is_q) {
                    fattn_back_ldmatrix(E, src);
                    fattn_back_ldmatrix(dP, src + st.plane);
                    if constexpr (softcap) {
                        fattn_back_ldmatrix(u, src + 2 * st.plane);
                    }
                } else {
                    fattn_back_ldmatrix_trans(E, src);
                    if constexpr (!is_v) {
                        fattn_back_ldmatrix_trans(dP, src + st.plane);
                        if constexpr (softcap) {
                            fattn_back_ldmatrix_trans(u, src + 2 * st.plane);
                        }
                    }
                }
                // dQ: factors and D of the lane's rows
                float fq[2];
                float D[2];
                GGML_UNUSED(fq);
                GGML_UNUSED(D);
                if constexpr (is_q) {
#pragma unroll
                    for (int l = 0; l < 2; ++l) {
                        const int row = wm * 32 + mi * 16 + l * 8 + g;
                        fq[l]         = ((const float *) fac)[row];
                        D[l]          = D_rows[row];
                    }
                }
#pragma unroll
                for (int l = 0; l < 4; ++l) {
                    // l%2: the lane's row or the one 8 on; l/2: the first or the second 8 of the slice's 16
                    half2 x;
                    if constexpr (is_q) {
                        // rounded once: the sum over the keys must stay 0, what is left of it is multiplied by what K has in common
                        const float2 e = __half22float2(fattn_back_as_half2(E[l]));
                        const float2 d = __half22float2(fattn_back_as_half2(dP[l]));
                        float2 ds      = make_float2(e.x * fq[l % 2] * (d.x - D[l % 2]), e.y * fq[l % 2] * (d.y - D[l % 2]));
                        if constexpr (softcap) {
                            const float2 v = __half22float2(fattn_back_as_half2(u[l]));
                            ds.x *= v.x;
                            ds.y *= v.y;
                        }
                        x = __floats2half2_rn(ds.x, ds.y);
                    } else {
                        x = __hmul2(fattn_back_as_half2(E[l]), f[kk][l / 2]);
                        if constexpr (!is_v) {
                            if constexpr (softcap) {
                                x = __hmul2(x, fattn_back_as_half2(u[l]));
                            }
                            // D in two parts: dP - D must not lose what dP and D have in common
                            x = __hmul2(x, __hsub2(__hsub2(fattn_back_as_half2(dP[l]), hi[kk][l / 2]), lo[kk][l / 2]));
                        }
                    }
                    A[mi][l] = fattn_back_as_uint(x);
                }
            }
#pragma unroll
            for (int ni = 0; ni < ncw / 16; ++ni) {
                uint32_t B[4];
                fattn_back_ldmatrix_trans(B, b_src + offset + kk * 16 * (2 * NC + 16) + ni * 32);
#pragma unroll
                for (int mi = 0; mi < 2; ++mi) {
                    fattn_back_mma(acc[mi][2 * ni + 0], A[mi], B[0], B[1]);
                    fattn_back_mma(acc[mi][2 * ni + 1], A[mi], B[2], B[3]);
                }
            }
        }
    };

#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
#pragma unroll
        for (int ni = 0; ni < ncw / 8; ++ni) {
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                acc[mi][ni][l] = 0.0f;
            }
        }
    }
    int stage = 0;
#pragma unroll 1
    for (int i = 0; i < nitems * nslices; ++i) {
        fattn_back_cp_async_wait<nst - 2>();
        __syncthreads();
        load();
        product(stage * st.bytes);
        stage = stage + 1 == nst ? 0 : stage + 1;
    }
    fattn_back_cp_async_wait<0>();

    // rows g and g + 8 of the lane's 16: where they go, NULL for nowhere
    const int D      = is_v ? p.a.Dv : p.a.Dk;
    const float e_kv = is_q ? p.exp_v[lunit] + p.exp_k[lunit] : p.exp_dO_min[lunit] + (is_v ? 0.0f : p.exp_v[lunit] + p.exp_q_min[lunit]);
    float * out      = is_q ? p.a.dQ : is_v ? p.a.dV
                                            : p.a.dK;
    float * dst[2][2];
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
#pragma unroll
        for (int l = 0; l < 2; ++l) {
            const int row = tile * 128 + wm * 32 + mi * 16 + l * 8 + g;
            float scale   = 0.0f;
            float R       = 0.0f;
            dst[mi][l]    = nullptr;
            if (out != nullptr && p.valid_row(is_q, row)) {
                dst[mi][l] = (partial ? p.part_row(is_q ? p.part_q : is_v ? p.part_v
                                                                          : p.part_k,
                                            is_q, part, cunit, row, D)
                                      : out + p.out_row(is_q, cunit, row) * D) +
                    wn * ncw + c2;
                if constexpr (is_q) {
                    scale = p.a.scale * exp2f(-FATTN_BACK_MMA_SHIFT_P - e_kv - p.exp_dO[lunit * p.rows() + p.crow0() + row]);
                    R     = p.rank1 && part == 0 ? p.a.scale * p.R[cunit * p.crows() + row] : 0.0f;
                } else {
                    scale = (is_v ? 1.0f : 0.6931471805599453f) * exp2f(-FATTN_BACK_MMA_SHIFT_P - e_kv);
                }
            }
#pragma unroll
            for (int ni = 0; ni < ncw / 8; ++ni) {
                acc[mi][ni][2 * l + 0] *= scale;
                acc[mi][ni][2 * l + 1] *= scale;
            }
            if (is_q && p.rank1) {
#pragma unroll
                for (int ni = 0; ni < ncw / 8; ++ni) {
                    const float * mean = p.mean_k + lunit * FATTN_BACK_PREP_MAX_D + wn * ncw + ni * 8 + c2;
                    acc[mi][ni][2 * l + 0] += R * mean[0];
                    acc[mi][ni][2 * l + 1] += R * mean[1];
                }
            }
        }
    }
    // all loads before the first store
    if (!is_q && p.accumulate && !partial) {
#pragma unroll
        for (int mi = 0; mi < 2; ++mi) {
#pragma unroll
            for (int l = 0; l < 2; ++l) {
                if (dst[mi][l] != nullptr) {
#pragma unroll
                    for (int ni = 0; ni < ncw / 8; ++ni) {
                        const float2 old = wn * ncw + ni * 8 + c2 < D ? *(const float2 *) (dst[mi][l] + ni * 8) : make_float2(0.0f, 0.0f);
                        acc[mi][ni][2 * l + 0] += old.x;
                        acc[mi][ni][2 * l + 1] += old.y;
                    }
                }
            }
        }
    }
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
#pragma unroll
        for (int l = 0; l < 2; ++l) {
            if (dst[mi][l] != nullptr) {
#pragma unroll
                for (int ni = 0; ni < ncw / 8; ++ni) {
                    if (wn * ncw + ni * 8 + c2 < D) {
                        *(float2 *) (dst[mi][l] + ni * 8) = make_float2(acc[mi][ni][2 * l + 0], acc[mi][ni][2 * l + 1]);
                    }
                }
            }
        }
    }
}
#endif // AMPERE_MMA_AVAILABLE

// dQ, dV and dK of a chunk. Grid: the parts of dQ's tiles, the last rows first, then those of dV's and dK's tiles in the window.
// A part of a tile with few pairs has nothing to do and exits; a tile with one part goes to the result, the others' parts are added later.
// Shared memory: a ring of stages, each of some rows or keys, and the list of row blocks or key tiles.
template <int Dk, int Dv, bool softcap>
static __global__ void __launch_bounds__(fattn_back_grads_threads(Dk > Dv ? Dk : Dv), fattn_back_grads_occupancy(Dk > Dv ? Dk : Dv))
flash_attn_back_grads(const fattn_back_mma_params p) {
#ifdef AMPERE_MMA_AVAILABLE
    constexpr int D_max = Dk > Dv ? Dk : Dv;
    int i               = blockIdx.x;
    const int tiles_q   = p.ntiles(true);
    const int nq        = p.a.dQ != nullptr ? p.cunits * tiles_q * p.max_parts_q() : 0;
    if (i < nq) {
        const int cunit = i % p.cunits;
        i /= p.cunits;
        fattn_back_grads_tile<Dk, D_max, FATTN_BACK_GRAD_Q, softcap>(p, cunit, tiles_q - 1 - i % tiles_q, i / tiles_q);
        return;
    }
    i -= nq;
    bool is_v = p.a.dV != nullptr;
    if (p.a.dV != nullptr && p.a.dK != nullptr) {
        is_v = i % 2 == 0; // side by side, as they read the same pairs
        i /= 2;
    }
    const int tiles = p.ntiles(false);
    const int cunit = i % p.cunits;
    i /= p.cunits;
    const int tile = p.kt_first() + i % tiles;
    const int part = i / tiles;
    if (is_v) {
        fattn_back_grads_tile<Dv, D_max, FATTN_BACK_GRAD_V, softcap>(p, cunit, tile, part);
    } else {
        fattn_back_grads_tile<Dk, D_max, FATTN_BACK_GRAD_K, softcap>(p, cunit, tile, part);
    }
#else
    GGML_UNUSED(p);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

template <int Dk, int Dv, bool softcap>
static void ggml_cuda_flash_attn_back_grads_case(const fattn_back_mma_params & p, const int arch, cudaStream_t stream) {
    constexpr int D_max   = Dk > Dv ? Dk : Dv;
    const int n_kv        = (p.a.dK != nullptr) + (p.a.dV != nullptr);
    const int64_t nblocks = p.cunits * ((p.a.dQ != nullptr ? (int64_t) p.ntiles(true) * p.max_parts_q() : 0) + (int64_t) n_kv * p.ntiles(false) * p.max_parts_kv());
    if (nblocks == 0) {
        return;
    }
    const int smem = fattn_back_grads_smem(arch, D_max);
    CUDA_SET_SHARED_MEMORY_LIMIT((flash_attn_back_grads<Dk, Dv, softcap>), smem);
    flash_attn_back_grads<Dk, Dv, softcap><<<nblocks, fattn_back_grads_threads(D_max), smem, stream>>>(p);
    CUDA_CHECK(cudaGetLastError());
}

#define FATTN_BACK_REDUCE_THREADS 256
#define FATTN_BACK_REDUCE_BLOCKS  32 // of a tile

// The sum of a tile's parts, in their order. Grid: FATTN_BACK_REDUCE_BLOCKS * (tiles of dQ, of dK, of dV).
static __global__ void __launch_bounds__(FATTN_BACK_REDUCE_THREADS) flash_attn_back_reduce(const fattn_back_mma_params p) {
    int i           = blockIdx.x / FATTN_BACK_REDUCE_BLOCKS;
    const bool is_q = i < p.cunits * p.ntiles(true);
    i -= is_q ? 0 : p.cunits * p.ntiles(true);
    const int ntiles = p.ntiles(is_q);
    const bool is_v  = i >= p.cunits * ntiles;
    i -= is_v ? p.cunits * ntiles : 0;
    const int nparts = (is_q ? p.nparts_q : p.nparts_kv)[i];
    float * out      = is_q ? p.a.dQ : is_v ? p.a.dV
                                            : p.a.dK;
    if (nparts <= 1 || out == nullptr) {
        return;
    }
    const int cunit     = i / ntiles;
    const int tile      = i % ntiles + (is_q ? 0 : p.kt_first());
    const int rows      = FATTN_BACK_MMA_KEYS;
    const int D         = is_v ? p.a.Dv : p.a.Dk;
    const float * parts = is_q ? p.part_q : is_v ? p.part_v
                                                 : p.part_k;
    for (int j = blockIdx.x % FATTN_BACK_REDUCE_BLOCKS * FATTN_BACK_REDUCE_THREADS + threadIdx.x; j < rows * (D / 4); j += FATTN_BACK_REDUCE_BLOCKS * FATTN_BACK_REDUCE_THREADS) {
        const int row = tile * rows + j / (D / 4);
        const int col = j % (D / 4) * 4;
        if (!p.valid_row(is_q, row)) {
            continue;
        }
        float4 * dst = (float4 *) (out + p.out_row(is_q, cunit, row) * D + col);
        float4 sum   = !is_q && p.accumulate ? *dst : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int k = 0; k < nparts; ++k) {
            const float4 x = *(const float4 *) (p.part_row((float *) parts, is_q, k, cunit, row, D) + col);
            sum.x += x.x;
            sum.y += x.y;
            sum.z += x.z;
            sum.w += x.w;
        }
        *dst = sum;
    }
}
