#pragma once

#include "fattn-back-mma-common.cuh"

#define FATTN_BACK_GRADS_SLICE     32 // rows (dV, dK) or keys (dQ) of a pipeline stage
#define FATTN_BACK_GRADS_MAX_ITEMS 256 // of a block
#define FATTN_BACK_GRADS_MAX_TILES 16 // of a block
#define FATTN_BACK_GRADS_LIST_SIZE (FATTN_BACK_GRADS_MAX_ITEMS * 4 + FATTN_BACK_GRADS_MAX_TILES * 8 + 32 + 256 * 4) // with D of dQ's rows
#define FATTN_BACK_GRADS_PLANE     (FATTN_BACK_GRADS_SLICE * FATTN_BACK_MMA_KEYS * (int) sizeof(half))

// architecture of this pass of the compiler; the host's launch bounds are not used
#ifdef __CUDA_ARCH__
#    define FATTN_BACK_GRADS_ARCH __CUDA_ARCH__
#else
#    define FATTN_BACK_GRADS_ARCH 900
#endif

// What a block does. Up to head size 128, where the shared memory takes it, its two groups of 4 warps share a stage: dV and dK of a key tile share the pairs, dQ of two pairs
// of row blocks shares K. Beyond, the two groups have half of the columns each of one gradient of one tile.
enum fattn_back_grads_role { FATTN_BACK_GRADS_KV,
    FATTN_BACK_GRADS_V,
    FATTN_BACK_GRADS_K,
    FATTN_BACK_GRADS_Q };

static constexpr __host__ __device__ bool fattn_back_grads_shared(const int arch, const int D) {
    return D <= 128 && fattn_back_mma_smem(arch) > 99 * 1024;
}

static constexpr __host__ __device__ int fattn_back_grads_threads(const int arch, const int D) {
    return D <= 128 && !fattn_back_grads_shared(arch, D) ? 128 : 256;
}

// blocks of a multiprocessor
static constexpr __host__ __device__ int fattn_back_grads_occupancy(const int arch, const int D) {
    return fattn_back_mma_smem(arch) <= 99 * 1024 ? 1 : fattn_back_grads_threads(arch, D) == 128 ? (D <= 64 ? 3 : 2)
                                                                                                 : 1;
}

// pairs of row blocks of a dQ tile
static constexpr __host__ __device__ int fattn_back_grads_pairs_q(const int arch, const int D) {
    return fattn_back_grads_shared(arch, D) ? 2 : 1;
}

// Layout of a stage: planes of 32x128 pairs, 32 rows of the other operands padded against bank conflicts, factors and D.
struct fattn_back_grads_stage {
    int planes;
    int pairs;   // bytes of a group's pairs
    int operand; // offset of the operand Q or K, or dO if there is no other
    int dO;      // offset of dO
    int factors; // offset: dV, dK: of dV for 2 granules x rows, the same for dK, D_hi, D_lo of the rows; dQ: 128 floats for each group
    int bytes;
};

static constexpr __host__ __device__ fattn_back_grads_stage fattn_back_grads_get_stage(
    const int arch, const fattn_back_grads_role role, const int Dk, const int Dv, const bool softcap) {
    const bool is_q  = role == FATTN_BACK_GRADS_Q;
    const int npairs = is_q ? fattn_back_grads_pairs_q(arch, Dk > Dv ? Dk : Dv) : 1;

    fattn_back_grads_stage st = {};
    st.planes                 = role == FATTN_BACK_GRADS_V ? 1 : softcap ? 3
                                                                         : 2;
    st.pairs                  = st.planes * FATTN_BACK_GRADS_PLANE;
    st.operand                = npairs * st.pairs;
    st.dO                     = st.operand + (role == FATTN_BACK_GRADS_V ? 0 : FATTN_BACK_GRADS_SLICE * (2 * Dk + 16));
    st.factors                = st.dO + (role == FATTN_BACK_GRADS_K || is_q ? 0 : FATTN_BACK_GRADS_SLICE * (2 * Dv + 16));
    st.bytes                  = st.factors + (is_q ? 512 * npairs : 12 * FATTN_BACK_GRADS_SLICE);
    return st;
}

// shared memory of a block, and the stages of a role in it
static constexpr __host__ __device__ int fattn_back_grads_smem(const int arch, const int D) {
    const int n = fattn_back_grads_occupancy(arch, D);
    return (fattn_back_mma_smem(arch) - 1024 * (n - 1)) / n / 128 * 128;
}

static constexpr __host__ __device__ int fattn_back_grads_stages(
    const int arch, const fattn_back_grads_role role, const int Dk, const int Dv, const bool softcap) {
    const int n = (fattn_back_grads_smem(arch, Dk > Dv ? Dk : Dv) - FATTN_BACK_GRADS_LIST_SIZE) / fattn_back_grads_get_stage(arch, role, Dk, Dv, softcap).bytes;
    return n < 6 ? n : 6;
}

#ifdef AMPERE_MMA_AVAILABLE
// 128 rows (keys for dV and dK, queries for dQ) x columns of a gradient for every group, of one tile after the other: the sum over one part
// of the row blocks or key tiles that have pairs, p.len_q or p.len_kv of them; all of them if the block has several tiles.
// The operand P or dS is formed in registers. tile: first key tile, or index of one or two pairs of row blocks.
template <int Dk, int Dv, fattn_back_grads_role role, bool softcap>
static __device__ __forceinline__ void fattn_back_grads_tiles(
    const fattn_back_mma_params & p, const int cunit, const int tile0, const int ntiles, const int part) {
    constexpr int D_max                 = Dk > Dv ? Dk : Dv;
    constexpr bool is_q                 = role == FATTN_BACK_GRADS_Q;
    constexpr bool shared               = fattn_back_grads_shared(FATTN_BACK_GRADS_ARCH, D_max);
    constexpr int nthreads              = fattn_back_grads_threads(FATTN_BACK_GRADS_ARCH, D_max);
    constexpr int slice                 = FATTN_BACK_GRADS_SLICE;
    constexpr int plane_sz              = FATTN_BACK_GRADS_PLANE;
    constexpr int npairs                = is_q ? fattn_back_grads_pairs_q(FATTN_BACK_GRADS_ARCH, D_max) : 1;
    constexpr fattn_back_grads_stage st = fattn_back_grads_get_stage(FATTN_BACK_GRADS_ARCH, role, Dk, Dv, softcap);
    constexpr int nst                   = fattn_back_grads_stages(FATTN_BACK_GRADS_ARCH, role, Dk, Dv, softcap);
    constexpr int NC                    = role == FATTN_BACK_GRADS_V ? Dv : Dk;
    constexpr bool split                = D_max > 128; // two groups, by columns
    constexpr int ncw                   = split ? NC / 2 : NC; // columns of a warp
    static_assert(ncw % 16 == 0 && (!shared || Dk == Dv), "bad head sizes");
    static_assert(nst >= 2, "too little shared memory");

    extern __shared__ __align__(128) char smem[];
    const uint32_t smem_base = fattn_back_shared(smem);
    const int lane           = threadIdx.x % WARP_SIZE;
    const int wm             = threadIdx.x / WARP_SIZE % 4;
    const int group          = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP_SIZE / 4, 0); // known to be uniform
    const int wn             = split ? group : 0;
    const int lunit          = p.cunit0 + cunit;
    const int unit           = p.unit0 + lunit;

    // The row blocks or key tiles of this part, in order, in shared memory. For dQ with the pairs of row blocks that have pairs there.
    int * items    = (int *) (smem + fattn_back_grads_smem(FATTN_BACK_GRADS_ARCH, D_max) - FATTN_BACK_GRADS_LIST_SIZE);
    int * nitems   = items + FATTN_BACK_GRADS_MAX_ITEMS;  // of a tile in this part
    int * nall     = nitems + FATTN_BACK_GRADS_MAX_TILES; // of a tile
    int * count    = nall + FATTN_BACK_GRADS_MAX_TILES;
    float * D_rows = (float *) (count + 8); // dQ
    if constexpr (is_q) {
        if (threadIdx.x < npairs * 128) {
            D_rows[threadIdx.x] = p.D[cunit * p.crows() + min((int64_t) tile0 * npairs * 128 + threadIdx.x, p.crows() - 1)];
        }
    }
    const int len  = is_q ? p.len_q : p.len_kv;
    const int n_it = is_q ? p.KT : p.cblocks;
    int ld_items   = 0;
#pragma unroll 1
    for (int t = 0; t < ntiles; ++t) {
        int total = 0;
#pragma unroll 1
        for (int base = 0; base < n_it; base += nthreads) {
            const int i = base + threadIdx.x;
            int on      = 0;
            if (i < n_it) {
                if constexpr (is_q) {
#pragma unroll
                    for (int k = 0; k < 2 * npairs; ++k) {
                        const int b = (tile0 + t) * npairs * 2 + k;
                        on |= (b < p.cblocks && fattn_back_mma_tile_row(p, unit, p.cb0 + b).get(i) != FATTN_BACK_MMA_TILE_SKIP) << k / 2;
                    }
                } else {
                    on = fattn_back_mma_tile_row(p, unit, p.cb0 + i).get(tile0 + t) != FATTN_BACK_MMA_TILE_SKIP;
                }
            }
            const uint32_t bits = __ballot_sync(0xFFFFFFFF, on != 0);
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
            if (on != 0 && index >= 0 && index < len) {
                items[ld_items + index] = i * 64 + t * 4 + on;
            }
            __syncthreads();
        }
        const int n = max(min(total - part * len, len), 0);
        ld_items += n;
        if (threadIdx.x == 0) {
            nitems[t] = n;
            nall[t]   = total;
            if (part == 0) {
                (is_q ? p.nparts_q : p.nparts_kv)[cunit * p.ntiles(is_q) + tile0 + t - (is_q ? 0 : p.kt_first())] = (total + len - 1) / len;
            }
        }
    }
    if (ld_items == 0 && (part > 0 || (!is_q && p.accumulate))) {
        return;
    }
    __syncthreads();

    // loads
    constexpr int nslices      = is_q ? FATTN_BACK_MMA_KEYS / slice : FATTN_BACK_MMA_ROWS / slice;
    constexpr int pitch_k      = fattn_back_mma_pitch(Dk);
    constexpr int pitch_v      = fattn_back_mma_pitch(Dv);
    const int64_t block_stride = (int64_t) p.KT * FATTN_BACK_MMA_PAIRS;
    const half * ld_pairs      = nullptr;
    const half * ld_operand    = nullptr;
    const half * ld_dO         = nullptr;
    const char * ld_factors    = nullptr;
    int ld_on                  = 0; // the item's pairs of row blocks that have pairs, as bits
    int ld_left                = 0; // slices of the row block or key tile
    int ld_stage               = 0;
    const auto load_item       = [&]() {
        const int i    = *items / 64;
        const int tile = tile0 + *items / 4 % 16;
        ld_on          = *items % 4;
        items++;
        ld_items--;
        ld_left = nslices;
        if constexpr (is_q) { // 16 x 4 matrices of 8x8 from each pair of row blocks
            ld_pairs   = p.pairs + p.tile(cunit, 2 * npairs * tile, i) + threadIdx.x / slice * 16 * 64 + threadIdx.x % slice * 8;
            ld_operand = p.k_hi + (lunit * p.keys() + (int64_t) i * FATTN_BACK_MMA_KEYS) * pitch_k;
            ld_factors = (const char *) (p.fac_q + p.granule(cunit, 2 * i) + tile * npairs * 128 + threadIdx.x % 64 * 4);
        } else {              // 4 x 16 matrices
            const int64_t row = lunit * p.rows() + (int64_t) (p.cb0 + i) * FATTN_BACK_MMA_ROWS;
            ld_pairs          = p.pairs + p.tile(cunit, i, tile) + threadIdx.x * 8;
            ld_operand        = p.q_hi + row * pitch_k;
            ld_dO             = p.dO + row * pitch_v;
            const int j       = threadIdx.x % 64 / (slice / 8);
            ld_factors        = (const char *) ((
                                                    j < 4 ? (j < 2 ? p.fac_v : p.fac_k) + p.granule(cunit, 2 * tile + j % 2) : (j == 4 ? p.D_hi : p.D_lo) + cunit * p.crows()) +
                i * FATTN_BACK_MMA_ROWS + threadIdx.x % (slice / 8) * 8);
        }
    };
    const auto load_rows = [&](const uint32_t dst, const half * src, const auto head_size, const int pitch) {
        constexpr int D = decltype(head_size)::value;
        constexpr int n = slice * D / 8;
#pragma unroll
        for (int j = 0; j < (n + nthreads - 1) / nthreads; ++j) {
            const int t = j * nthreads + threadIdx.x;
            if (n % nthreads == 0 || t < n) {
                const int r = t / (D / 8);
                const int c = t % (D / 8);
                fattn_back_cp_async_16(dst + r * (2 * D + 16) + c * 16, src + r * pitch + c * 8);
            }
        }
    };
    const auto load = [&]() {
        if (ld_left == 0 && ld_items > 0) {
            load_item();
        }
        if (ld_left != 0) {
            const uint32_t dst = smem_base + ld_stage * st.bytes;
            // dQ: a row of 8x8 matrices is slice threads, nthreads/slice of the 8 rows of a block at a time
            constexpr int n     = plane_sz / 16 / nthreads;
            constexpr int steps = 8 * slice / nthreads; // of a block
            const half * src    = ld_pairs;
#pragma unroll
            for (int j = 0; j < npairs * n; ++j) {
#pragma unroll
                for (int i = 0; i < st.planes; ++i) {
                    const uint32_t to = dst + j / n * st.pairs + i * plane_sz + (j % n * nthreads + threadIdx.x) * 16;
                    if constexpr (npairs > 1) {
                        fattn_back_cp_async_16(to, src + i * p.plane, ld_on & (1 << j / n));
                    } else {
                        fattn_back_cp_async_16(to, src + i * p.plane);
                    }
                }
                if constexpr (is_q) {
                    src += j % steps == steps - 1 ? block_stride - (steps - 1) * (nthreads / slice) * 16 * 64 : nthreads / slice * 16 * 64;
                    asm volatile("" : "+l"(src)); // else the compiler would keep all of these addresses in registers
                } else {
                    src += nthreads * 8;
                }
            }
            if constexpr (role != FATTN_BACK_GRADS_V) {
                load_rows(dst + st.operand, ld_operand, std::integral_constant<int, Dk>(), pitch_k);
            }
            if constexpr (role == FATTN_BACK_GRADS_KV || role == FATTN_BACK_GRADS_V) {
                load_rows(dst + st.dO, ld_dO, std::integral_constant<int, Dv>(), pitch_v);
            }
            if (threadIdx.x < (is_q ? 32 * npairs : 6 * slice / 8)) {
                if constexpr (npairs > 1) {
                    fattn_back_cp_async_16(dst + st.factors + threadIdx.x * 16, ld_factors, ld_on & (threadIdx.x < 32 ? 1 : 2));
                } else {
                    fattn_back_cp_async_16(dst + st.factors + threadIdx.x * 16, ld_factors);
                }
            }
            ld_stage = ld_stage + 1 == nst ? 0 : ld_stage + 1;
            ld_left--;
            ld_operand += slice * pitch_k;
            if constexpr (is_q) {
                ld_pairs += slice * 8;
                ld_factors += ld_left * slice == FATTN_BACK_MMA_GRANULE ? p.crows() * sizeof(float) : 0;
            } else {
                ld_pairs += slice / 8 * 16 * 64;
                ld_dO += slice * pitch_v;
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
    const uint32_t a_src = smem_base + (is_q && shared ? group * st.pairs : 0) + (lane % 8) * 16 +
        (is_q ? ((wm * 4 + lane / 8 % 2) * (slice / 8) + lane / 16) * 128 : (lane / 16 * 16 + wm * 4 + lane / 8 % 2) * 128);
    const uint32_t b_src = smem_base + lane % 16 * (2 * NC + 16) + (wn * ncw + lane / 16 * 8) * 2 + (role == FATTN_BACK_GRADS_KV && group == 0 ? st.dO : st.operand);

    float acc[2][ncw / 8][4];

    // a slice; is_v: of dV, else of dK or dQ
    const auto product = [&](const uint32_t offset, const auto dV) {
        constexpr bool is_v = decltype(dV)::value;
        GGML_UNUSED(is_v);
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
                    fattn_back_ldmatrix(dP, src + plane_sz);
                    if constexpr (softcap) {
                        fattn_back_ldmatrix(u, src + 2 * plane_sz);
                    }
                } else {
                    fattn_back_ldmatrix_trans(E, src);
                    if constexpr (!is_v) {
                        fattn_back_ldmatrix_trans(dP, src + plane_sz);
                        if constexpr (softcap) {
                            fattn_back_ldmatrix_trans(u, src + 2 * plane_sz);
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
                        const int row = (shared ? group * 128 : 0) + wm * 32 + mi * 16 + l * 8 + g;
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

    int stage = 0;
#pragma unroll 1
    for (int t = 0; t < ntiles; ++t) {
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
        const int n = nitems[t] * nslices;
#pragma unroll 1
        for (int i = 0; i < n; ++i) {
            fattn_back_cp_async_wait<nst - 2>();
            __syncthreads();
            load();
            if constexpr (role == FATTN_BACK_GRADS_KV) {
                if (group == 0) {
                    product(stage * st.bytes, std::true_type());
                } else {
                    product(stage * st.bytes, std::false_type());
                }
            } else {
                product(stage * st.bytes, std::integral_constant<bool, role == FATTN_BACK_GRADS_V>());
            }
            stage = stage + 1 == nst ? 0 : stage + 1;
        }
        if (!is_q && p.accumulate && n == 0) {
            continue;
        }

        // rows g and g + 8 of the lane's 16: where they go, NULL for nowhere
        const bool is_v    = role == FATTN_BACK_GRADS_V || (role == FATTN_BACK_GRADS_KV && group == 0);
        const bool partial = nall[t] > len;
        const int D        = is_v ? p.a.Dv : p.a.Dk;
        const float e_kv   = is_q ? p.exp_v[lunit] + p.exp_k[lunit] : p.exp_dO_min[lunit] + (is_v ? 0.0f : p.exp_v[lunit] + p.exp_q_min[lunit]);
        float * out        = is_q ? p.a.dQ : is_v ? p.a.dV
                                                  : p.a.dK;
        float * dst[2][2];
#pragma unroll
        for (int mi = 0; mi < 2; ++mi) {
#pragma unroll
            for (int l = 0; l < 2; ++l) {
                const int row = (tile0 + t) * npairs * 128 + (npairs > 1 ? group * 128 : 0) + wm * 32 + mi * 16 + l * 8 + g;
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
                        scale = p.a.scale * exp2f(-FATTN_BACK_MMA_SHIFT_P - e_kv - p.exp_dO[lunit * p.rows() + (int64_t) p.cb0 * FATTN_BACK_MMA_ROWS + row]);
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
                        const float * mean = p.mean_k + lunit * FATTN_BACK_MMA_MAX_D + wn * ncw + ni * 8 + c2;
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
    fattn_back_cp_async_wait<0>();
}
#endif // AMPERE_MMA_AVAILABLE

// dQ, dV and dK of a chunk. Grid: the parts of dQ's tiles, the last rows first, then those of dV's and dK's tiles in the window.
// A part of a tile with few pairs has nothing to do and exits; a tile with one part goes to the result, the others' parts are added later.
// Where there are few row blocks a block has several tiles of dV or dK, whose loads run ahead while the result of one is written.
// Shared memory: a ring of stages, each of some rows or keys, and the list of row blocks or key tiles.
template <int Dk, int Dv, bool softcap>
static __global__ void __launch_bounds__(fattn_back_grads_threads(FATTN_BACK_GRADS_ARCH, Dk > Dv ? Dk : Dv),
    fattn_back_grads_threads(FATTN_BACK_GRADS_ARCH, Dk > Dv ? Dk : Dv) == 128 ? (Dk <= 64 && Dv <= 64 ? 3 : 2) : 1)
flash_attn_back_grads(const fattn_back_mma_params p) {
#ifdef AMPERE_MMA_AVAILABLE
    constexpr bool shared = fattn_back_grads_shared(FATTN_BACK_GRADS_ARCH, Dk > Dv ? Dk : Dv);
    int i                 = blockIdx.x;
    const int tiles_q     = p.ntiles(true);
    const int nq          = p.a.dQ != nullptr ? p.cunits * tiles_q * p.max_parts_q() : 0;
    if (i < nq) {
        const int cunit = i % p.cunits;
        i /= p.cunits;
        fattn_back_grads_tiles<Dk, Dv, FATTN_BACK_GRADS_Q, softcap>(p, cunit, tiles_q - 1 - i % tiles_q, 1, i / tiles_q);
        return;
    }
    i -= nq;
    bool is_v = p.a.dV != nullptr;
    if (!shared && p.a.dV != nullptr && p.a.dK != nullptr) {
        is_v = i % 2 == 0; // side by side, as they read the same pairs
        i /= 2;
    }
    const int tiles = p.ntiles(false);
    const int nsets = (tiles + p.tiles_kv - 1) / p.tiles_kv;
    const int cunit = i % p.cunits;
    i /= p.cunits;
    const int first = i % nsets * p.tiles_kv;
    const int n     = min(p.tiles_kv, tiles - first);
    const int part  = i / nsets;
    if constexpr (shared) {
        fattn_back_grads_tiles<Dk, Dv, FATTN_BACK_GRADS_KV, softcap>(p, cunit, p.kt_first() + first, n, part);
    } else if (is_v) {
        fattn_back_grads_tiles<Dk, Dv, FATTN_BACK_GRADS_V, softcap>(p, cunit, p.kt_first() + first, n, part);
    } else {
        fattn_back_grads_tiles<Dk, Dv, FATTN_BACK_GRADS_K, softcap>(p, cunit, p.kt_first() + first, n, part);
    }
#else
    GGML_UNUSED(p);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

template <int Dk, int Dv, bool softcap>
static void ggml_cuda_flash_attn_back_grads_case(const fattn_back_mma_params & p, const int arch, cudaStream_t stream) {
    constexpr int D_max   = Dk > Dv ? Dk : Dv;
    const int n_kv        = fattn_back_grads_shared(arch, D_max) ? p.a.dK != nullptr || p.a.dV != nullptr : (p.a.dK != nullptr) + (p.a.dV != nullptr);
    const int64_t sets    = (p.ntiles(false) + p.tiles_kv - 1) / p.tiles_kv;
    const int64_t nblocks = p.cunits * ((p.a.dQ != nullptr ? (int64_t) p.ntiles(true) * p.max_parts_q() : 0) + n_kv * sets * p.max_parts_kv());
    if (nblocks == 0) {
        return;
    }
    const int smem = fattn_back_grads_smem(arch, D_max);
    CUDA_SET_SHARED_MEMORY_LIMIT((flash_attn_back_grads<Dk, Dv, softcap>), smem);
    flash_attn_back_grads<Dk, Dv, softcap><<<nblocks, fattn_back_grads_threads(arch, D_max), smem, stream>>>(p);
    CUDA_CHECK(cudaGetLastError());
}

#define FATTN_BACK_REDUCE_THREADS 256
#define FATTN_BACK_REDUCE_BLOCKS  16 // of a tile

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
    const int rows      = is_q ? p.rows_q : FATTN_BACK_MMA_KEYS;
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
