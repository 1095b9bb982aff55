#include "fattn-back-common.cuh"

#ifdef FATTN_BACK_TENSOR_CORES

#include "fattn-back-guard.cuh"
#include "fattn-back-rows-block.cuh"

struct fattn_back_guard_params {
    fattn_back_args a;
    fattn_back_guard guard;
    fattn_back_guard_end end;
    int query_owners; // of a unit
    int query_tiles;
    int key_owners;
    int key_tiles;
};

// units of the device's nodes since they were last asked for: ggml_backend_flash_attn_back_units
static __device__ unsigned long long fattn_back_guard_counts[3];

static __device__ __forceinline__ bool fattn_back_guard_spread(const fattn_back_guard_rows & x, const int bound) {
    return x.n > 0 && (long long) x.most * x.n - x.sum > (long long) bound * x.n;
}

// bound: of few rows
static __device__ __forceinline__ bool fattn_back_guard_stands_out(const fattn_back_guard_rows & x, const int bound) {
    const int share = 2 * (31 - __clz(max(x.n, 1))) - FATTN_BACK_GUARD_SHARE;
    return fattn_back_guard_spread(x, min(max(share, bound), FATTN_BACK_GUARD_MOST));
}

static __device__ __forceinline__ bool fattn_back_guard_alike(const fattn_back_guard_rows & x) {
    return x.n > 0 && (float) ((long long) x.most * x.n - x.sum) < FATTN_BACK_GUARD_ALIKE * x.n;
}

static __device__ __forceinline__ bool fattn_back_guard_out_of_range(const fattn_back_guard_rows & x) {
    return x.n > 0 && (x.most > 2 * FATTN_BACK_GUARD_RANGE || x.most < -2 * FATTN_BACK_GUARD_RANGE);
}

// of a unit; cancels: dSinks does
static __device__ __forceinline__ int fattn_back_guard_get_level(const fattn_back_guard_params & p, const int i, const bool cancels) {
    const fattn_back_guard_unit & unit = p.guard.units[i];
    const bool in_f32                  = fattn_back_guard_spread(unit.k, FATTN_BACK_GUARD_K) || fattn_back_guard_stands_out(unit.v, FATTN_BACK_GUARD_V) ||
        fattn_back_guard_stands_out(unit.dO, FATTN_BACK_GUARD_DO) || fattn_back_guard_out_of_range(unit.dO) || unit.wide == FATTN_BACK_GUARD_ALWAYS ||
        (p.end.large[i] > p.end.least && unit.wide != 0) ||
        (p.end.large[i] > p.end.peaked && (fattn_back_guard_spread(unit.k, FATTN_BACK_GUARD_K_PEAKED) || fattn_back_guard_alike(unit.dO)));
    if (in_f32) {
        return FATTN_BACK_GUARD_F32;
    }
    bool in_D = cancels;
    for (int j = 0; j < p.a.G && p.a.O == nullptr; ++j) {
        const uint2 D = p.guard.D[(int64_t) i * p.a.G + j];
        in_D          = in_D || __uint_as_float(D.y) > FATTN_BACK_GUARD_MEAN * __uint_as_float(D.x);
    }
    return max(unit.level, in_D ? FATTN_BACK_GUARD_D : FATTN_BACK_GUARD_FP16);
}

// Whether the terms of dSinks cancel so far that D's rounding shows; compared as a whole, as each head has one number.
static __device__ __forceinline__ bool fattn_back_guard_cancels(const fattn_back_guard_params & p) {
    if (p.a.dSinks == nullptr) {
        return false;
    }
    float square = 0.0f;
    float terms  = 0.0f;
    for (int h = 0; h < p.a.H; ++h) {
        const float2 x = p.guard.heads[h];
        square         = fmaf(x.x, x.x, square);
        terms += x.y;
    }
    return square < FATTN_BACK_GUARD_CANCEL * terms;
}

// waits until all owners of query rows of a unit have finished; they have been taken before
static __device__ __forceinline__ void fattn_back_guard_wait(const fattn_back_guard_params & p, const int unit) {
    if (threadIdx.x == 0) {
        while (*(volatile int *) &p.guard.units[unit].done != p.query_owners) {
            __nanosleep(100);
        }
    }
    __syncthreads();
    __threadfence();
}

// Grid: as many blocks as the device holds at a time. They take the items of work one after the other: owners of query rows of all units, of
// keys for dK, for dV, then heads of dSinks; an item waits for those of its unit before it, which run already.
template <int nc, bool forward>
static __global__ void __launch_bounds__(fattn_back_rows_nthreads, fattn_back_rows_occupancy(nc))
flash_attn_back_guard(const __grid_constant__ fattn_back_guard_params p) {
    const fattn_back_args & a = p.a;
    const int nunits          = a.S * a.Hkv;
    const bool cancels        = fattn_back_guard_cancels(p);
    bool any                  = false;
    int counts[3]             = { 0 };
    for (int unit = threadIdx.x; unit < nunits; unit += fattn_back_rows_nthreads) {
        const int level   = fattn_back_guard_get_level(p, unit, cancels);
        const bool beyond = level != FATTN_BACK_GUARD_FP16;
        any               = any || beyond;
        counts[0] += p.end.large[unit] > p.end.least;
        counts[1] += level == FATTN_BACK_GUARD_D;
        counts[2] += level == FATTN_BACK_GUARD_F32;
        if (forward && blockIdx.x == 0 && a.saved.stamp != nullptr) {
            a.saved.large[unit] = beyond ? p.end.in_f32 : p.end.large[unit];
        }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0 && a.saved.stamp != nullptr) {
        *a.saved.stamp = p.end.stamp;
    }
    if (blockIdx.x == 0) {
        for (int i = 0; i < 3; ++i) {
            const int n = warp_reduce_sum(counts[i]);
            if (threadIdx.x % WARP_SIZE == 0 && n > 0) {
                atomicAdd(fattn_back_guard_counts + i, (unsigned long long) n);
            }
        }
    }
    if (!__syncthreads_or(any)) {
        return;
    }

    __shared__ fattn_back_rows_shared shared;
    __shared__ unsigned long long ticket;
    const auto none                   = [](const int, const fattn_back_rows_softmax &) {};
    const auto get_down               = [&](const int unit) { return fattn_back_rows_down(exp2f(0.5f * p.guard.units[unit].dO.most)); };
    const unsigned long long nqueries = (unsigned long long) nunits * p.query_owners;
    const unsigned long long nkeys    = forward ? 0 : (unsigned long long) nunits * p.key_owners;
    const unsigned long long nheads   = forward || a.dSinks == nullptr ? 0 : a.H;
    const unsigned long long nitems   = nqueries + 2 * nkeys + nheads;
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0) {
            ticket = atomicAdd(p.guard.ticket, 1ull);
        }
        __syncthreads();
        unsigned long long item = ticket;
        if (item >= nitems) {
            return;
        }
        if (item < nqueries) {
            const int unit  = item / p.query_owners;
            const int owner = p.query_owners - 1 - item % p.query_owners; // the longest first where causal
            const int level = fattn_back_guard_get_level(p, unit, cancels);
            const int g     = unit % a.Hkv;
            const int s     = unit / a.Hkv;
            if (level == FATTN_BACK_GUARD_FP16) {
                continue;
            }
            fattn_back_rows_block<FATTN_BACK_ROWS_STATS, 0>(
                a, shared, s, g, owner, 0, p.query_tiles, nullptr, 1.0f, nullptr, [&](const int r, const fattn_back_rows_softmax & sm) {
                    const int h       = r % a.G + g * a.G;
                    const int64_t row = a.row(r / a.G, h, s);
                    float LSE;
                    float D;
                    p.guard.ref[row] = fattn_back_rows_finish(a, sm, h, LSE, D);
                    if constexpr (!forward) {
                        a.LSE[row] = LSE;
                        a.D[row]   = D;
                    }
                });
            __threadfence();
            __syncthreads();
            if constexpr (forward) {
                fattn_back_rows_block<FATTN_BACK_ROWS_O, nc>(a, shared, s, g, owner, 0, p.query_tiles, p.guard.ref, 1.0f, a.O, none);
            } else {
                if (threadIdx.x == 0) {
                    atomicAdd(&p.guard.units[unit].done, 1);
                }
                if (level == FATTN_BACK_GUARD_F32 && a.dQ != nullptr) {
                    const float down = get_down(unit);
                    fattn_back_rows_block<FATTN_BACK_ROWS_DQ, nc>(a, shared, s, g, owner, 0, p.query_tiles, p.guard.ref, down, a.dQ, none);
                }
            }
            continue;
        }
        if constexpr (!forward) {
            item -= nqueries;
            if (item < 2 * nkeys) {
                const bool is_v = item >= nkeys;
                item -= is_v ? nkeys : 0;
                const int unit  = item / p.key_owners;
                const int owner = item % p.key_owners;
                const int g     = unit % a.Hkv;
                const int s     = unit / a.Hkv;
                if ((is_v ? a.dV : a.dK) == nullptr || fattn_back_guard_get_level(p, unit, cancels) != FATTN_BACK_GUARD_F32) {
                    continue;
                }
                fattn_back_guard_wait(p, unit);
                const float down = get_down(unit);
                if (is_v) {
                    fattn_back_rows_block<FATTN_BACK_ROWS_DV, nc>(a, shared, s, g, owner, 0, p.key_tiles, p.guard.ref, down, a.dV, none);
                } else {
                    fattn_back_rows_block<FATTN_BACK_ROWS_DK, nc>(a, shared, s, g, owner, 0, p.key_tiles, p.guard.ref, down, a.dK, none);
                }
                continue;
            }
            const int h      = item - 2 * nkeys;
            const float sink = a.sinks[h];
            float sum        = 0.0f;
            float error      = 0.0f;
            bool changed     = false;
            for (int s = 0; s < a.S; ++s) {
                const int unit    = s * a.Hkv + h / a.G;
                const bool in_f32 = fattn_back_guard_get_level(p, unit, cancels) != FATTN_BACK_GUARD_FP16;
                if (in_f32) {
                    fattn_back_guard_wait(p, unit);
                    changed = true;
                }
                for (int i = threadIdx.x; i < a.N; i += fattn_back_rows_nthreads) {
                    const int64_t row = a.row(i, h, s);
                    const float D     = a.D[row];
                    if (D != 0.0f) { // else LSE may be as infinite as the sink
                        fattn_back_rows_add(sum, error, -D * (in_f32 ? p.guard.ref[row].w : expf(sink - a.LSE[row])));
                    }
                }
            }
            float * partial = shared.X;
            sum             = warp_reduce_sum(sum + error);
            if (threadIdx.x % WARP_SIZE == 0) {
                partial[threadIdx.x / WARP_SIZE] = sum;
            }
            __syncthreads();
            if (threadIdx.x == 0 && changed) {
                sum = 0.0f;
                for (int w = 0; w < fattn_back_rows_nthreads / WARP_SIZE; ++w) {
                    sum += partial[w];
                }
                a.dSinks[h] = sum;
            }
        }
    }
}

template <bool forward>
static void fattn_back_guard_launch(const fattn_back_guard_params & p, cudaStream_t stream) {
    const int nsm = ggml_cuda_info().devices[ggml_cuda_get_device()].nsm;
    const int D   = std::max(p.a.Dk, p.a.Dv);
    if (D <= 64) {
        flash_attn_back_guard<1, forward><<<nsm * fattn_back_rows_occupancy(1), fattn_back_rows_nthreads, 0, stream>>>(p);
    } else if (D <= 128) {
        flash_attn_back_guard<2, forward><<<nsm * fattn_back_rows_occupancy(2), fattn_back_rows_nthreads, 0, stream>>>(p);
    } else {
        flash_attn_back_guard<4, forward><<<nsm * fattn_back_rows_occupancy(4), fattn_back_rows_nthreads, 0, stream>>>(p);
    }
    CUDA_CHECK(cudaGetLastError());
}

void ggml_cuda_flash_attn_back_guard(
    const fattn_back_args & a, const fattn_back_guard & guard, const fattn_back_guard_end & end, cudaStream_t stream) {
    const auto owners = [](const int n) { return (n + fattn_back_rows_nx - 1) / fattn_back_rows_nx; };
    const auto tiles  = [](const int n) { return (n + fattn_back_rows_ny - 1) / fattn_back_rows_ny; };
    const bool has_kv = a.dK != nullptr || a.dV != nullptr;

    fattn_back_guard_params p = { a, guard, end, owners(a.N * a.G), tiles(a.M), has_kv ? owners(a.kv_count) : 0, tiles(a.N * a.G) };
    p.a.o                     = {}; // what a forward has saved is of fp16 operands
    if (a.O != nullptr) {
        fattn_back_guard_launch<true>(p, stream);
    } else {
        fattn_back_guard_launch<false>(p, stream);
    }
}

void ggml_cuda_flash_attn_back_units(const int device, uint64_t * counts) {
    const unsigned long long none[3] = { 0 };
    unsigned long long found[3];
    ggml_cuda_set_device(device);
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpyFromSymbol(found, fattn_back_guard_counts, sizeof(found)));
    CUDA_CHECK(cudaMemcpyToSymbol(fattn_back_guard_counts, none, sizeof(none)));
    std::copy(found, found + 3, counts);
}

#endif // FATTN_BACK_TENSOR_CORES
