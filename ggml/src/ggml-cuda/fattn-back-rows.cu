// The rows path of FLASH_ATTN_BACK: F32 arithmetic without tensor cores (fattn-back-rows-block.cuh).
//
// Where the owners are too few to fill the device the walk of a block is split, each split writes its own partial result, and a second
// kernel adds the partial results in the order of the splits: one owner, one order, no atomics.

#include "fattn-back-rows-block.cuh"
#include "fattn-back-rows.cuh"

// how the work of a launch is laid out: block = ((s*Hkv + g)*nowners + owner)*nsplits + split
struct fattn_back_rows_grid {
    int nowners; // tiles of owned rows in a KV head
    int ntiles;  // tiles of the other side
    int nsplits;
    int tiles_per_split;

    int64_t nblocks(const int64_t nheads) const {
        return nheads * nowners * nsplits;
    }
};

// LSE and D, dQ, dK or dV of all rows; stats gets the softmax over a split, dst the (partial) gradient. Grid: see fattn_back_rows_grid.
template <fattn_back_rows_out out, int nc>
static __global__ void __launch_bounds__(fattn_back_rows_nthreads, fattn_back_rows_occupancy(nc))
flash_attn_back_rows(
    const fattn_back_args args, const fattn_back_rows_grid grid, const float4 * ref, const float * most, float4 * stats, float * dst,
    const int64_t split_stride) {
    constexpr bool by_query = out == FATTN_BACK_ROWS_STATS || out == FATTN_BACK_ROWS_DQ;
    __shared__ fattn_back_rows_shared shared;

    ggml_cuda_pdl_sync();

    const float down = out == FATTN_BACK_ROWS_STATS ? 1.0f : fattn_back_rows_down(*most);

    int64_t block   = blockIdx.x;
    const int split = block % grid.nsplits;
    block /= grid.nsplits;
    const int owner = by_query ? grid.nowners - 1 - block % grid.nowners : block % grid.nowners; // the longest first where causal
    block /= grid.nowners;
    const int g     = block % args.Hkv;
    const int s     = block / args.Hkv;
    const int tile0 = split * grid.tiles_per_split;
    const int tile1 = min(tile0 + grid.tiles_per_split, grid.ntiles);
    fattn_back_rows_block<out, nc>(
        args, shared, s, g, owner, tile0, tile1, ref, down, dst + split * split_stride, [&](const int r, const fattn_back_rows_softmax & sm) {
            stats[split * split_stride + args.row(r / args.G, r % args.G + g * args.G, s)] = make_float4(sm.mx, sm.mb, sm.l, sm.a);
        });
}

// The largest |dO|; most is 0 at first. Grid: any, a warp takes one row after the other.
static __global__ void __launch_bounds__(fattn_back_rows_nthreads, 1)
flash_attn_back_rows_most(const fattn_back_args args, float * most) {
    ggml_cuda_pdl_sync();

    float amax = 0.0f;
    for (int64_t row = ((int64_t) blockIdx.x * fattn_back_rows_nthreads + threadIdx.x) / WARP_SIZE; row < (int64_t) args.S * args.H * args.N;
        row += (int64_t) gridDim.x * fattn_back_rows_nthreads / WARP_SIZE) {
        const int64_t offset = args.dO.offset(row % args.N, row / args.N % args.H, row / args.N / args.H);
        for (int d = threadIdx.x % WARP_SIZE; d < args.Dv; d += WARP_SIZE) {
            amax = fmaxf(amax, fabsf(*(const float *) (args.dO.data + offset + d * args.dO.nb_comp)));
        }
    }
    amax = warp_reduce_max(amax);
    if (threadIdx.x % WARP_SIZE == 0) {
        atomicMax((uint32_t *) most, __float_as_uint(amax)); // in any order
    }
}

// Owns LSE, D and ref of one query row per warp. Merges the splits of its softmax and the sink; D = dO . o where o is given.
static __global__ void __launch_bounds__(fattn_back_rows_nthreads, 1)
flash_attn_back_rows_combine_stats(const fattn_back_args args, const int nsplits, const float4 * stats, float4 * ref) {
    ggml_cuda_pdl_sync();

    const int lane      = threadIdx.x % WARP_SIZE;
    const int64_t nrows = (int64_t) args.S * args.H * args.N;
    const int64_t row   = ((int64_t) blockIdx.x * fattn_back_rows_nthreads + threadIdx.x) / WARP_SIZE;
    if (row >= nrows) {
        return;
    }
    const int i = row % args.N;
    const int h = row / args.N % args.H;
    const int s = row / args.N / args.H;

    fattn_back_rows_softmax sm = { -INFINITY, 0.0f, 0.0f, 0.0f };
    for (int split = lane; split < nsplits; split += WARP_SIZE) {
        const float4 f = stats[split * nrows + row];
        sm.merge({ f.x, f.y, f.z, f.w });
    }
#pragma unroll
    for (int offset = WARP_SIZE / 2; offset > 0; offset >>= 1) {
        sm.merge({ __shfl_xor_sync(0xFFFFFFFF, sm.mx, offset, WARP_SIZE), __shfl_xor_sync(0xFFFFFFFF, sm.mb, offset, WARP_SIZE),
            __shfl_xor_sync(0xFFFFFFFF, sm.l, offset, WARP_SIZE), __shfl_xor_sync(0xFFFFFFFF, sm.a, offset, WARP_SIZE) });
    }
    float LSE;
    float D;
    const float4 own = fattn_back_rows_finish(args, sm, h, LSE, D);
    if (own.x != INFINITY && args.o.data != nullptr) {
        const int64_t offset_o  = args.o.offset(i, h, s);
        const int64_t offset_dO = args.dO.offset(i, h, s);
        D                       = 0.0f;
        for (int d = lane; d < args.Dv; d += WARP_SIZE) {
            D += *(const float *) (args.o.data + offset_o + d * args.o.nb_comp) * *(const float *) (args.dO.data + offset_dO + d * args.dO.nb_comp);
        }
        D = warp_reduce_sum(D);
    }

    if (lane == 0) {
        args.LSE[row] = LSE;
        args.D[row]   = D;
        ref[row]      = own;
    }
}

// Owns one gradient of a sink per block: its rows in a fixed order.
static __global__ void __launch_bounds__(fattn_back_rows_nthreads, 1)
flash_attn_back_rows_sinks(const fattn_back_args args, const float4 * ref) {
    __shared__ float partial[fattn_back_rows_nthreads / WARP_SIZE];

    ggml_cuda_pdl_sync();

    const int h = blockIdx.x;

    float sum   = 0.0f;
    float error = 0.0f;
    for (int64_t t = threadIdx.x; t < (int64_t) args.S * args.N; t += fattn_back_rows_nthreads) {
        const int64_t row = args.row(t % args.N, h, t / args.N);
        fattn_back_rows_add(sum, error, -ref[row].w * args.D[row]);
    }
    sum = warp_reduce_sum(sum + error);
    if (threadIdx.x % WARP_SIZE == 0) {
        partial[threadIdx.x / WARP_SIZE] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0.0f;
        for (int w = 0; w < fattn_back_rows_nthreads / WARP_SIZE; ++w) {
            sum += partial[w];
        }
        args.dSinks[h] = sum;
    }
}

// Owns four elements of a gradient per thread: the sum of its splits in their order.
static __global__ void __launch_bounds__(fattn_back_rows_nthreads, 1)
flash_attn_back_rows_combine(const float4 * partial, float4 * dst, const int64_t n, const int nsplits) {
    ggml_cuda_pdl_sync();

    const int64_t i = (int64_t) blockIdx.x * fattn_back_rows_nthreads + threadIdx.x;
    if (i >= n) {
        return;
    }
    float4 sum = partial[i];
    for (int split = 1; split < nsplits; ++split) {
        const float4 x = partial[split * n + i];
        sum.x += x.x;
        sum.y += x.y;
        sum.z += x.z;
        sum.w += x.w;
    }
    dst[i] = sum;
}

// nowned rows and nother rows of the other side in each of nheads KV heads; nbytes: of the result of a split, at most limit in all
static fattn_back_rows_grid fattn_back_rows_get_grid(
    const int nsm, const int64_t nheads, const int64_t nowned, const int64_t nother, const size_t nbytes, const size_t limit) {
    fattn_back_rows_grid grid;
    grid.nowners = (nowned + fattn_back_rows_nx - 1) / fattn_back_rows_nx;
    grid.ntiles  = (nother + fattn_back_rows_ny - 1) / fattn_back_rows_ny;

    // two waves of four blocks
    int64_t nsplits      = 8 * nsm / std::max<int64_t>(nheads * grid.nowners, 1);
    nsplits              = std::min<int64_t>(nsplits, grid.ntiles);
    nsplits              = std::min<int64_t>(nsplits, limit / std::max<size_t>(nbytes, 1));
    nsplits              = std::max<int64_t>(nsplits, 1);
    grid.tiles_per_split = (grid.ntiles + nsplits - 1) / nsplits;
    grid.nsplits         = std::max((grid.ntiles + grid.tiles_per_split - 1) / std::max(grid.tiles_per_split, 1), 1);
    return grid;
}

template <fattn_back_rows_out out>
static void fattn_back_rows_launch(
    const fattn_back_args & args, const fattn_back_rows_grid & grid, const float4 * ref, const float * most, float4 * stats, float * dst,
    const int64_t split_stride, cudaStream_t stream) {
    const ggml_cuda_kernel_launch_params params(
        dim3(grid.nblocks((int64_t) args.S * args.Hkv), 1, 1), dim3(fattn_back_rows_nthreads, 1, 1), 0, stream);
    if constexpr (out == FATTN_BACK_ROWS_STATS) {
        ggml_cuda_kernel_launch(flash_attn_back_rows<out, 0>, params, args, grid, ref, most, stats, dst, split_stride);
    } else {
        const int nc = ((out == FATTN_BACK_ROWS_DV ? args.Dv : args.Dk) + fattn_back_rows_nd - 1) / fattn_back_rows_nd;
        if (nc <= 1) {
            ggml_cuda_kernel_launch(flash_attn_back_rows<out, 1>, params, args, grid, ref, most, stats, dst, split_stride);
        } else if (nc <= 2) {
            ggml_cuda_kernel_launch(flash_attn_back_rows<out, 2>, params, args, grid, ref, most, stats, dst, split_stride);
        } else if (nc <= 4) {
            ggml_cuda_kernel_launch(flash_attn_back_rows<out, 4>, params, args, grid, ref, most, stats, dst, split_stride);
        } else {
            constexpr int nc_max = fattn_back_rows_max_head / fattn_back_rows_nd;
            ggml_cuda_kernel_launch(flash_attn_back_rows<out, nc_max>, params, args, grid, ref, most, stats, dst, split_stride);
        }
    }
}

// a pass over all rows: its grid and its place among the partial results
struct fattn_back_rows_pass {
    float * dst; // NULL: not wanted
    fattn_back_rows_grid grid;
    int64_t nelements; // of the result of a split, floats
    size_t nbytes;     // of all splits' results, 0: there is one split, which writes the result itself
};

struct fattn_back_rows_plan {
    fattn_back_args args;
    fattn_back_rows_pass pass[FATTN_BACK_ROWS_DV + 1];
    int nsm;
    size_t ref_bytes; // what combine_stats keeps of every row comes first in the workspace, then the largest |dO|
};

static fattn_back_rows_pass fattn_back_rows_get_pass(
    const fattn_back_args & args, const fattn_back_rows_out out, float * dst, const int nsm, const size_t limit) {
    fattn_back_rows_pass pass = {};
    if (dst == nullptr) {
        return pass;
    }
    const int64_t nqueries = (int64_t) args.N * args.G;
    const int64_t nheads   = (int64_t) args.S * args.Hkv;
    const bool by_queries  = out == FATTN_BACK_ROWS_STATS || out == FATTN_BACK_ROWS_DQ;
    const int width        = out == FATTN_BACK_ROWS_STATS ? 4 : (out == FATTN_BACK_ROWS_DV ? args.Dv : args.Dk);
    pass.dst               = dst;
    pass.nelements         = nheads * (by_queries ? nqueries : args.kv_count) * width;
    pass.grid              = fattn_back_rows_get_grid(
        nsm, nheads, by_queries ? nqueries : args.kv_count, by_queries ? args.M : nqueries, pass.nelements * sizeof(float), limit);
    pass.nbytes = pass.grid.nsplits > 1 || out == FATTN_BACK_ROWS_STATS ? pass.grid.nsplits * pass.nelements * sizeof(float) : 0;
    return pass;
}

// one gradient, by the rows that own it
template <fattn_back_rows_out out>
static void fattn_back_rows_gradient(
    const fattn_back_rows_plan & plan, const float4 * ref, const float * most, float * partial, cudaStream_t stream) {
    const fattn_back_rows_pass & pass = plan.pass[out];
    if (pass.dst == nullptr) {
        return;
    }
    if (pass.nbytes == 0) {
        fattn_back_rows_launch<out>(plan.args, pass.grid, ref, most, nullptr, pass.dst, 0, stream);
        return;
    }
    fattn_back_rows_launch<out>(plan.args, pass.grid, ref, most, nullptr, partial, pass.nelements, stream);

    const int64_t n = pass.nelements / 4;
    ggml_cuda_kernel_launch(flash_attn_back_rows_combine,
        ggml_cuda_kernel_launch_params(
            dim3((n + fattn_back_rows_nthreads - 1) / fattn_back_rows_nthreads, 1, 1), dim3(fattn_back_rows_nthreads, 1, 1), 0, stream),
        (const float4 *) partial, (float4 *) pass.dst, n, pass.grid.nsplits);
}

const char * ggml_cuda_flash_attn_back_rows_refusal(const int device, const ggml_tensor * dst) {
    const ggml_flash_attn_back_node node = ggml_flash_attn_back_decode(dst);

    if (ggml_cuda_info().devices[device].warp_size != WARP_SIZE) {
        return "the device's warps do not have 32 threads";
    }
    if (ggml_cuda_info().devices[device].smpb < 32 * 1024) {
        return "the device has less than 32 KiB of shared memory per block";
    }
    if (node.Dk % 8 != 0 || node.Dk > fattn_back_rows_max_head || node.Dv % 8 != 0 || node.Dv > fattn_back_rows_max_head) {
        return "the head sizes are not multiples of 8 up to 576";
    }

    // the indices of rows in a KV head and of blocks are 32 bit; where there are splits the blocks are few
    const int64_t nqueries = node.N * (node.H / node.Hkv);
    const int64_t nheads   = node.S * node.Hkv;
    const int64_t nmax     = INT_MAX - fattn_back_rows_ny;
    if (nqueries > nmax || node.M > nmax || node.S * node.H * node.N > nmax ||
        nheads * ((node.kv_count + fattn_back_rows_nx - 1) / fattn_back_rows_nx) > nmax) {
        return "more than 2^31 - 65 queries or keys in a KV head, query rows or tiles of keys";
    }
    return nullptr;
}

static void fattn_back_rows_run(const fattn_back_rows_plan & plan, char * workspace, cudaStream_t stream) {
    const fattn_back_args & args = plan.args;
    const int64_t nrows          = (int64_t) args.S * args.H * args.N;
    float4 * ref                 = (float4 *) workspace;
    float * most                 = (float *) (workspace + plan.ref_bytes - 256);
    float * partial              = (float *) (workspace + plan.ref_bytes);

    CUDA_CHECK(cudaMemsetAsync(most, 0, sizeof(*most), stream));

    // nothing to do without queries, but K and V still get their zeros
    if (nrows > 0) {
        const fattn_back_rows_grid & grid = plan.pass[FATTN_BACK_ROWS_STATS].grid;
        ggml_cuda_kernel_launch(flash_attn_back_rows_most,
            ggml_cuda_kernel_launch_params(dim3(plan.nsm, 1, 1), dim3(fattn_back_rows_nthreads, 1, 1), 0, stream), args, most);
        fattn_back_rows_launch<FATTN_BACK_ROWS_STATS>(args, grid, nullptr, nullptr, (float4 *) partial, nullptr, nrows, stream);
        ggml_cuda_kernel_launch(flash_attn_back_rows_combine_stats,
            ggml_cuda_kernel_launch_params(
                dim3((nrows * WARP_SIZE + fattn_back_rows_nthreads - 1) / fattn_back_rows_nthreads, 1, 1),
                dim3(fattn_back_rows_nthreads, 1, 1), 0, stream),
            args, grid.nsplits, (const float4 *) partial, ref);
    }

    fattn_back_rows_gradient<FATTN_BACK_ROWS_DQ>(plan, ref, most, partial, stream);
    fattn_back_rows_gradient<FATTN_BACK_ROWS_DK>(plan, ref, most, partial, stream);
    fattn_back_rows_gradient<FATTN_BACK_ROWS_DV>(plan, ref, most, partial, stream);

    if (args.dSinks != nullptr) {
        ggml_cuda_kernel_launch(flash_attn_back_rows_sinks,
            ggml_cuda_kernel_launch_params(dim3(args.H, 1, 1), dim3(fattn_back_rows_nthreads, 1, 1), 0, stream),
            args, (const float4 *) ref);
    }
}

fattn_back_plan ggml_cuda_flash_attn_back_rows_plan(const int device, const ggml_tensor * dst, const size_t limit) {
    fattn_back_args args = fattn_back_get_args(dst);
    if (args.saved.stamp != nullptr) { // by another path
        args.o = {};
    }
    const auto pass = [&](const fattn_back_rows_out out, float * part) {
        return fattn_back_rows_get_pass(args, out, part, ggml_cuda_info().devices[device].nsm, limit);
    };
    const fattn_back_rows_plan plan = {
        args,
        { pass(FATTN_BACK_ROWS_STATS, args.LSE), pass(FATTN_BACK_ROWS_DQ, args.dQ), pass(FATTN_BACK_ROWS_DK, args.dK),
            pass(FATTN_BACK_ROWS_DV, args.dV) },
        ggml_cuda_info().devices[device].nsm,
        GGML_PAD((size_t) args.S * args.H * args.N * sizeof(float4), 256) + 256,
    };
    size_t partial = 0;
    for (const fattn_back_rows_pass & p : plan.pass) {
        partial = std::max(partial, p.nbytes);
    }
    return { plan.ref_bytes + partial, [plan](char * workspace, cudaStream_t stream) { fattn_back_rows_run(plan, workspace, stream); } };
}
