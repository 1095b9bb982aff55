#include "fattn-back-common.cuh"

#ifdef FATTN_BACK_TENSOR_CORES

#include "fattn-back-prep.cuh"

#define FATTN_BACK_MASK_TILES 2 // key tiles of a block: few, for short masks to fill the device

// the bits of x at the even positions
static __device__ __forceinline__ uint64_t fattn_back_mask_spread(const uint32_t x) {
    uint64_t y = x;
    y          = (y | y << 16) & 0x0000FFFF0000FFFF;
    y          = (y | y << 8) & 0x00FF00FF00FF00FF;
    y          = (y | y << 4) & 0x0F0F0F0F0F0F0F0F;
    y          = (y | y << 2) & 0x3333333333333333;
    return (y | y << 1) & 0x5555555555555555;
}

// State of the tiles, the keys that some of their queries see, and the queries that see some of their keys. Grid: blocks of key tiles, query
// tiles, mask heads * sequences; a warp has a tile, a thread two keys.
static __global__ void __launch_bounds__(FATTN_BACK_MASK_TILES * 32) flash_attn_back_mask_tiles(
    const fattn_back_args a, const fattn_back_mask_table table) {
    const int kt      = blockIdx.x * FATTN_BACK_MASK_TILES + threadIdx.x / 32;
    const int key     = kt * FATTN_BACK_MASK_ROWS + threadIdx.x % 32 * 2;
    const int q0      = blockIdx.y * FATTN_BACK_MASK_ROWS;
    const int nq      = min(FATTN_BACK_MASK_ROWS, a.N - q0);
    const char * mask = a.mask + (blockIdx.z / a.mask_nheads) * a.mask_nb_seq + (blockIdx.z % a.mask_nheads) * a.mask_nb_head +
        q0 * a.mask_nb_row + key * (int64_t) sizeof(half);

    uint32_t seen   = 0; // of either key, not 0: some value is not -inf
    uint32_t read   = 0; // some value is not 0
    uint32_t other  = 0; // some value is neither 0 nor -inf: its first six bits differ, or others are set
    uint64_t even   = 0; // queries that see the thread's keys
    uint64_t odd    = 0;
    const auto scan = [&](const auto load) {
        constexpr int n = 32; // rows on their way at a time; where there are fewer, the last one again
#pragma unroll
        for (int i0 = 0; i0 < FATTN_BACK_MASK_ROWS; i0 += n) {
            if (i0 < nq) {
                uint32_t x[n];
#pragma unroll
                for (int i = 0; i < n; ++i) {
                    x[i] = load(mask + min(i0 + i, nq - 1) * a.mask_nb_row);
                }
#pragma unroll
                for (int i = 0; i < n; ++i) {
                    seen |= x[i] ^ 0xFC00FC00;
                    read |= x[i];
                    other |= ((x[i] ^ x[i] >> 1) & 0x7C007C00) | (x[i] & 0x03FF03FF);
                    even |= (uint64_t) ((x[i] & 0xFFFF) != 0xFC00) << (i0 + i);
                    odd |= (uint64_t) (x[i] >> 16 != 0xFC00) << (i0 + i);
                }
            }
        }
        even &= ~(uint64_t) 0 >> (FATTN_BACK_MASK_ROWS - nq);
        odd &= ~(uint64_t) 0 >> (FATTN_BACK_MASK_ROWS - nq);
    };
    if (key + 1 < a.M && ((uintptr_t) mask | a.mask_nb_row) % sizeof(uint32_t) == 0) {
        scan([](const char * x) { return *(const uint32_t *) x; });
    } else if (key + 1 < a.M) {
        scan([](const char * x) { return (uint32_t) ((const uint16_t *) x)[1] << 16 | ((const uint16_t *) x)[0]; });
    } else if (key < a.M) {
        scan([](const char * x) { return 0xFC000000 | *(const uint16_t *) x; });
    } else {
        read = 0x7FFF7FFF;
    }
    read &= 0x7FFF7FFF;
    uint64_t rows    = even | odd;
    const uint64_t s = fattn_back_mask_spread(__ballot_sync(0xFFFFFFFF, (seen & 0xFFFF) != 0)) |
        fattn_back_mask_spread(__ballot_sync(0xFFFFFFFF, seen >> 16 != 0)) << 1;
    const bool any_read = __any_sync(0xFFFFFFFF, read != 0);
    for (int n = 16; n > 0; n /= 2) {
        rows |= __shfl_xor_sync(0xFFFFFFFF, rows, n, 32);
    }
    if (threadIdx.x % 32 == 0 && kt < table.nkt) {
        const int64_t tile = ((int64_t) blockIdx.z * table.nqt + blockIdx.y) * table.nkt + kt;
        table.seen[tile]   = s;
        table.seeing[tile] = rows;
        table.tiles[tile]  = s == 0 ? FATTN_BACK_TILE_SKIP : any_read ? FATTN_BACK_TILE_MIXED
                                                                      : FATTN_BACK_TILE_FULL;
    }
    if (s == 0 || !any_read || kt >= table.nkt) {
        return;
    }

    if (__any_sync(0xFFFFFFFF, other != 0)) {
        return;
    }
    const int slot = table.slot(blockIdx.z, blockIdx.y, kt);
    if (__shfl_sync(0xFFFFFFFF, threadIdx.x % 32 == 0 ? atomicCAS(table.slots + slot, -1, kt) : 0, 0) != -1) {
        return; // another tile is there
    }
    uint32_t keys[2][2]; // that two queries see, the even and the odd ones
#pragma unroll
    for (int i = 0; i < FATTN_BACK_MASK_ROWS; ++i) {
        const uint32_t x = __ballot_sync(0xFFFFFFFF, even >> i & 1);
        const uint32_t y = __ballot_sync(0xFFFFFFFF, odd >> i & 1);
        if (threadIdx.x % 32 == i % 32) {
            keys[i / 32][0] = x;
            keys[i / 32][1] = y;
        }
    }
    uint64_t * bits = table.bits + (int64_t) slot * 2 * FATTN_BACK_MASK_ROWS;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        bits[threadIdx.x % 32 + 32 * i] = fattn_back_mask_spread(keys[i][0]) | fattn_back_mask_spread(keys[i][1]) << 1;
    }
    bits[FATTN_BACK_MASK_ROWS + threadIdx.x % 32 * 2 + 0] = even;
    bits[FATTN_BACK_MASK_ROWS + threadIdx.x % 32 * 2 + 1] = odd;
}

// Keys that some query of a KV head sees, and queries that see some key. Grid: key tiles, then query tiles; mask sequences and groups, or
// heads. A warp has a tile, its threads share those that it meets.
static __global__ void __launch_bounds__(32) flash_attn_back_mask_used(const fattn_back_args a, const fattn_back_mask_table table) {
    const bool keys = blockIdx.x < table.nkt;
    const int tile  = keys ? blockIdx.x : blockIdx.x - table.nkt;
    const int64_t y = blockIdx.y;
    uint64_t bits   = 0;
    if (y >= a.mask_nseqs * (keys ? a.mask_groups() : a.mask_nheads)) {
        return;
    }
    if (keys) {
        for (int i = 0; i < a.group_nmasks(); ++i) {
            const int64_t mask = y / a.mask_groups() * a.mask_nheads + a.group_mask(y, i);
            for (int qt = threadIdx.x; qt < table.nqt; qt += 32) {
                bits |= table.seen[(mask * table.nqt + qt) * table.nkt + tile];
            }
        }
    } else {
        for (int kt = threadIdx.x; kt < table.nkt; kt += 32) {
            bits |= table.seeing[(y * table.nqt + tile) * table.nkt + kt];
        }
    }
    for (int n = 16; n > 0; n /= 2) {
        bits |= __shfl_xor_sync(0xFFFFFFFF, bits, n, 32);
    }
    if (keys && threadIdx.x < 2) {
        table.used[(y * table.nkt + tile) * 2 + threadIdx.x] = bits >> 32 * threadIdx.x;
    } else if (threadIdx.x == 0) {
        table.rows[y * table.nqt + tile] = bits;
    }
}

// Sums, minima and maxima of columns over a block in a fixed order, and the number of rows in them: x and count are those of the thread,
// which has the components of threadIdx.x % n. dst: FATTN_BACK_COLUMNS_SIZE
static __device__ __forceinline__ void fattn_back_column_stats(const float (&x)[3][8], const int count, const int n, float * dst) {
    const int nrows = FATTN_BACK_PREP_THREADS / n;
    __shared__ float red[FATTN_BACK_PREP_THREADS][3 * 8 + 1]; // what is last is the number
#pragma unroll
    for (int what = 0; what < 3; ++what) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            red[threadIdx.x][8 * what + c] = x[what][c];
        }
    }
    red[threadIdx.x][3 * 8] = count;
    __syncthreads();
    for (int j = threadIdx.x; j < 3 * 8 * n; j += FATTN_BACK_PREP_THREADS) {
        const int what = j / (8 * n);
        const int i    = j % (8 * n) / 8;
        const int c    = j % 8;
        float y        = red[i][8 * what + c];
#pragma unroll 8
        for (int r = 1; r < nrows; ++r) {
            const float z = red[r * n + i][8 * what + c];
            y             = what == 0 ? y + z : what == 1 ? fminf(y, z)
                                                          : fmaxf(y, z);
        }
        dst[what * FATTN_BACK_PREP_MAX_D + fattn_back_load8_component(i, c)] = y;
    }
    if (threadIdx.x == 0) {
        float y = 0.0f;
#pragma unroll 8
        for (int r = 0; r < nrows; ++r) {
            y += red[r * n][3 * 8];
        }
        dst[3 * FATTN_BACK_PREP_MAX_D] = y;
    }
}

// Statistics of K's (z = 0) or V's (z = 1) columns over a part of the used keys. Grid: parts, units, 2; every row of keys is loaded by
// 4*ceil(D/32) threads, 8 components each.
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_columns(
    const fattn_back_args a, const fattn_back_mask_table mask, const int unit0, float * dst) {
    const int unit             = unit0 + blockIdx.y;
    const bool is_v            = blockIdx.z == 1;
    const int D                = is_v ? a.Dv : a.Dk;
    const fattn_back_src & src = is_v ? a.v : a.k;
    const int n                = 4 * ((D + 31) / 32);
    const int nrows            = FATTN_BACK_PREP_THREADS / n;
    const int i                = threadIdx.x % n;
    const int row              = threadIdx.x / n;
    const int key0             = (int) ((int64_t) a.M * blockIdx.x / gridDim.x);
    const int key1             = (int) ((int64_t) a.M * (blockIdx.x + 1) / gridDim.x);

    float x[3][8];
    int count = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        x[0][c] = 0.0f;
        x[1][c] = INFINITY;
        x[2][c] = -INFINITY;
    }
    constexpr int nloads = 4; // keys in flight
    for (int key = key0 + row; row < nrows && key < key1; key += nloads * nrows) {
        int64_t offset[nloads];
        bool used[nloads];
        float y[nloads][8];
#pragma unroll
        for (int j = 0; j < nloads; ++j) {
            const int k = key + j * nrows;
            used[j]     = k < key1 && mask.is_used(a, unit, k);
            offset[j]   = src.offset(min(k, key1 - 1), unit % a.Hkv, unit / a.Hkv);
        }
        fattn_back_load8(src, offset, fattn_back_load8_first(i), D, y);
#pragma unroll
        for (int j = 0; j < nloads; ++j) {
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                x[0][c] += used[j] ? y[j][c] : 0.0f;
                x[1][c] = fminf(x[1][c], used[j] ? y[j][c] : INFINITY);
                x[2][c] = fmaxf(x[2][c], used[j] ? y[j][c] : -INFINITY);
            }
            count += used[j];
        }
    }
    const int64_t part = ((int64_t) blockIdx.y * 2 + blockIdx.z) * gridDim.x + blockIdx.x;
    fattn_back_column_stats(x, count, n, dst + part * FATTN_BACK_COLUMNS_SIZE);
}

// Grid: heads.
static __global__ void __launch_bounds__(FATTN_BACK_PREP_THREADS) flash_attn_back_sinks(const fattn_back_args a, const fattn_back_guard guard) {
    const int h      = blockIdx.x;
    const float sink = a.sinks[h];
    float sum        = 0.0f;
    float terms      = 0.0f; // squared
    for (int s = 0; s < a.S; ++s) {
        float left = 0.0f; // what the sink leaves to the keys of a row, at most
        for (int q = threadIdx.x; q < a.N; q += FATTN_BACK_PREP_THREADS) {
            const int64_t row = a.row(q, h, s);
            const float D     = a.D[row];
            const float P     = expf(sink - a.LSE[row]);
            left              = fmaxf(left, 1.0f - P);
            if (D != 0.0f) { // else LSE may be as infinite as the sink
                sum -= P * D;
                terms = fmaf(P * D, P * D, terms);
            }
        }
        left = fattn_back_block_reduce(left, true);
        if (threadIdx.x == 0 && fabsf(sink) != INFINITY && left < FATTN_BACK_GUARD_SINK) {
            guard.raise(s * a.Hkv + h / a.G, FATTN_BACK_GUARD_F32);
        }
    }
    sum   = fattn_back_block_reduce(sum, false);
    terms = fattn_back_block_reduce(terms, false);
    if (threadIdx.x == 0 && a.dSinks != nullptr) {
        a.dSinks[h]    = sum;
        guard.heads[h] = make_float2(sum, terms);
    }
}

void ggml_cuda_flash_attn_back_mask_table(const fattn_back_args & a, const fattn_back_mask_table & mask, cudaStream_t stream) {
    if (a.mask == nullptr) {
        return;
    }
    const size_t nslots = (size_t) a.mask_nseqs * a.mask_nheads * mask.nqt * FATTN_BACK_MASK_SLOTS;
    CUDA_CHECK(cudaMemsetAsync(mask.slots, 0xFF, nslots * sizeof(*mask.slots), stream));
    constexpr int n = FATTN_BACK_MASK_TILES;
    const dim3 grid((mask.nkt + n - 1) / n, mask.nqt, a.mask_nheads * a.mask_nseqs);
    flash_attn_back_mask_tiles<<<grid, n * 32, 0, stream>>>(a, mask);
    CUDA_CHECK(cudaGetLastError());
    const int most = std::max(a.mask_groups(), a.mask_nheads);
    flash_attn_back_mask_used<<<dim3(mask.nkt + mask.nqt, a.mask_nseqs * most), 32, 0, stream>>>(a, mask);
    CUDA_CHECK(cudaGetLastError());
}

void ggml_cuda_flash_attn_back_columns(
    const fattn_back_args & a, const fattn_back_mask_table & mask, const int unit0, const int units, const int nparts, float * dst,
    cudaStream_t stream) {
    flash_attn_back_columns<<<dim3(nparts, units, 2), FATTN_BACK_PREP_THREADS, 0, stream>>>(a, mask, unit0, dst);
    CUDA_CHECK(cudaGetLastError());
}

void ggml_cuda_flash_attn_back_sinks(const fattn_back_args & a, const fattn_back_guard & guard, cudaStream_t stream) {
    if (a.sinks != nullptr) {
        flash_attn_back_sinks<<<a.H, FATTN_BACK_PREP_THREADS, 0, stream>>>(a, guard);
        CUDA_CHECK(cudaGetLastError());
    }
}

#endif // FATTN_BACK_TENSOR_CORES
