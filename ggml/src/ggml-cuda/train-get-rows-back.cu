#include "train.cuh"

// GET_ROWS_BACK: a row of dst is the sum of the rows of grad that were taken from it, in their order. The indices are sorted by row, stably,
// so that what belongs together lies together; then each block adds up a chunk of the sorted order, whatever rows it holds, and a last pass
// completes the rows that reach over chunks. Time follows the rows of grad, not those of dst.
//
// Sorting: tiles of the indices are sorted in shared memory, and an element's place in the whole is its place in its tile plus the number of
// smaller ones in each other tile, by binary search.

#define TRAIN_GET_ROWS_BACK_TILE    1024
#define TRAIN_GET_ROWS_BACK_CHUNK   32
#define TRAIN_GET_ROWS_BACK_COLUMNS 256

// Owns a tile of rows: writes it sorted, with the indices of its elements. What lies outside of dst becomes nrows_dst, the largest.
// Grid: tiles; a thread has an element.
static __global__ void __launch_bounds__(TRAIN_GET_ROWS_BACK_TILE) train_get_rows_back_sort(
    const int32_t * __restrict__ rows, int2 * __restrict__ tiles, const int n, const int64_t nrows_dst) {
    __shared__ int32_t tile[TRAIN_GET_ROWS_BACK_TILE];

    const int first = blockIdx.x * TRAIN_GET_ROWS_BACK_TILE;
    const int count = min(TRAIN_GET_ROWS_BACK_TILE, n - first);
    const int i     = threadIdx.x;

    int32_t row = 0;
    if (i < count) {
        row     = rows[first + i];
        row     = row >= 0 && row < nrows_dst ? row : (int32_t) nrows_dst;
        tile[i] = row;
    }
    __syncthreads();
    if (i >= count) {
        return;
    }

    int place = 0;
    for (int j = 0; j < count; ++j) {
        place += tile[j] < row || (tile[j] == row && j < i);
    }
    tiles[first + place] = make_int2(row, first + i);
}

// Owns an element of a sorted tile: puts it to its place in the whole. Grid: blocks of elements.
static __global__ void __launch_bounds__(TRAIN_GET_ROWS_BACK_COLUMNS) train_get_rows_back_merge(
    const int2 * __restrict__ tiles, int2 * __restrict__ sorted, const int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) {
        return;
    }
    const int2 element = tiles[i];
    const int own      = i / TRAIN_GET_ROWS_BACK_TILE;

    int place = i % TRAIN_GET_ROWS_BACK_TILE;
    for (int tile = 0; tile * TRAIN_GET_ROWS_BACK_TILE < n; ++tile) {
        if (tile == own) {
            continue;
        }
        const int2 * keys = tiles + tile * TRAIN_GET_ROWS_BACK_TILE;
        int low           = 0;
        int high          = min(TRAIN_GET_ROWS_BACK_TILE, n - tile * TRAIN_GET_ROWS_BACK_TILE);
        while (low < high) { // of equal ones those of earlier tiles come first
            const int middle   = (low + high) / 2;
            const bool smaller = tile < own ? keys[middle].x <= element.x : keys[middle].x < element.x;
            low                = smaller ? middle + 1 : low;
            high               = smaller ? high : middle;
        }
        place += low;
    }
    sorted[place] = element;
}

// Owns, in its columns, every row of dst whose first element lies in its chunk, and the chunk's row of parts. Grid: chunks, blocks of columns.
// parts gets what the chunk's first row of dst has in it, where that began in an earlier chunk.
static __global__ void __launch_bounds__(TRAIN_GET_ROWS_BACK_COLUMNS) train_get_rows_back_sum(const float * __restrict__ grad,
    const int2 * __restrict__ sorted, float * __restrict__ dst, float * __restrict__ parts, const int n, const int64_t ncols, const int64_t nrows_dst) {
    __shared__ int2 chunk[TRAIN_GET_ROWS_BACK_CHUNK + 1]; // from the element before it on

    const int first = blockIdx.x * TRAIN_GET_ROWS_BACK_CHUNK;
    const int count = min(TRAIN_GET_ROWS_BACK_CHUNK, n - first);
    if ((int) threadIdx.x <= count) {
        const int i        = first + threadIdx.x - 1;
        chunk[threadIdx.x] = i >= 0 ? sorted[i] : make_int2(-1, -1);
    }
    __syncthreads();

    const int64_t column = (int64_t) blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= ncols) {
        return;
    }

    int valid = count;
    while (valid > 0 && chunk[valid].x >= nrows_dst) {
        valid--;
    }

    float sum  = 0.0f;
    bool began = chunk[1].x != chunk[0].x; // the row began in this chunk
#pragma unroll 8
    for (int i = 1; i <= valid; ++i) {
        const int2 element = chunk[i];
        sum += grad[element.y * ncols + column];
        if (i == count || chunk[i + 1].x != element.x) {
            (began ? dst + element.x * ncols : parts + blockIdx.x * ncols)[column] = sum;
            sum                                                                    = 0.0f;
            began                                                                  = true;
        }
    }
}

// Completes, in its columns, the row of dst that reaches beyond its chunk, if it began there. Grid: chunks but the last, blocks of columns.
static __global__ void __launch_bounds__(TRAIN_GET_ROWS_BACK_COLUMNS) train_get_rows_back_complete(
    const int2 * __restrict__ sorted, float * __restrict__ dst, const float * __restrict__ parts, const int n, const int64_t ncols, const int64_t nrows_dst) {
    const int first = blockIdx.x * TRAIN_GET_ROWS_BACK_CHUNK;
    int next        = first + TRAIN_GET_ROWS_BACK_CHUNK;
    const int row   = sorted[next - 1].x;
    if (row >= nrows_dst || sorted[next].x != row || (first > 0 && sorted[first - 1].x == row)) {
        return;
    }

    const int64_t column = (int64_t) blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= ncols) {
        return;
    }

    float sum = dst[row * ncols + column];
    for (; next < n && sorted[next].x == row; next += TRAIN_GET_ROWS_BACK_CHUNK) {
        sum += parts[next / TRAIN_GET_ROWS_BACK_CHUNK * ncols + column];
    }
    dst[row * ncols + column] = sum;
}

bool ggml_cuda_train_get_rows_back(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * grad = dst->src[0];
    const ggml_tensor * rows = dst->src[1];

    const int64_t n       = ggml_nelements(rows);
    const int64_t ncols   = dst->ne[0];
    const int64_t columns = (ncols + TRAIN_GET_ROWS_BACK_COLUMNS - 1) / TRAIN_GET_ROWS_BACK_COLUMNS;
    if (grad->type != GGML_TYPE_F32 || rows->type != GGML_TYPE_I32 || dst->type != GGML_TYPE_F32 || !ggml_is_contiguous(grad) ||
        !ggml_is_contiguous(rows) || !ggml_is_contiguous(dst) || ggml_nrows(dst) != dst->ne[1] || ggml_nrows(grad) != n ||
        ggml_nrows(rows) != 1 || dst->ne[1] >= INT32_MAX || n == 0 || n > INT32_MAX - TRAIN_GET_ROWS_BACK_TILE || columns > UINT16_MAX) {
        return false;
    }

    const int64_t ntiles  = (n + TRAIN_GET_ROWS_BACK_TILE - 1) / TRAIN_GET_ROWS_BACK_TILE;
    const int64_t nchunks = (n + TRAIN_GET_ROWS_BACK_CHUNK - 1) / TRAIN_GET_ROWS_BACK_CHUNK;

    ggml_cuda_pool_alloc<int2> tiles(ctx.pool(), n);
    ggml_cuda_pool_alloc<int2> sorted(ctx.pool(), n);
    ggml_cuda_pool_alloc<float> parts(ctx.pool(), nchunks * ncols);

    const float * grad_d   = (const float *) grad->data;
    const int32_t * rows_d = (const int32_t *) rows->data;
    float * dst_d          = (float *) dst->data;
    cudaStream_t stream    = ctx.stream();

    CUDA_CHECK(cudaMemsetAsync(dst_d, 0, ggml_nbytes(dst), stream));
    train_get_rows_back_sort<<<ntiles, TRAIN_GET_ROWS_BACK_TILE, 0, stream>>>(rows_d, tiles.get(), n, dst->ne[1]);
    CUDA_CHECK(cudaGetLastError());
    if (ntiles > 1) {
        const int64_t blocks = (n + TRAIN_GET_ROWS_BACK_COLUMNS - 1) / TRAIN_GET_ROWS_BACK_COLUMNS;
        train_get_rows_back_merge<<<blocks, TRAIN_GET_ROWS_BACK_COLUMNS, 0, stream>>>(tiles.get(), sorted.get(), n);
        CUDA_CHECK(cudaGetLastError());
    }
    const int2 * order = ntiles > 1 ? sorted.get() : tiles.get();
    train_get_rows_back_sum<<<dim3(nchunks, columns, 1), TRAIN_GET_ROWS_BACK_COLUMNS, 0, stream>>>(
        grad_d, order, dst_d, parts.get(), n, ncols, dst->ne[1]);
    CUDA_CHECK(cudaGetLastError());
    if (nchunks > 1) {
        train_get_rows_back_complete<<<dim3(nchunks - 1, columns, 1), TRAIN_GET_ROWS_BACK_COLUMNS, 0, stream>>>(
            order, dst_d, parts.get(), n, ncols, dst->ne[1]);
        CUDA_CHECK(cudaGetLastError());
    }
    return true;
}
