#pragma once

// The guard of the paths on tensor cores: units (sequence, KV head) that fp16 operands cannot hold get their results in F32.
//
// The preparation measures every unit as it reads its operands; what it finds are integers, so that the order of the blocks does not
// matter. One launch at the end of a node forms the results of the units that are beyond the bound again, in F32. It costs a node
// without such units the launch alone: its blocks read what was measured and leave. docs/design.md derives the bound.

#include "fattn-back-common.cuh"

// what of a unit is formed in F32
enum fattn_back_guard_level : int {
    FATTN_BACK_GUARD_FP16 = 0,
    FATTN_BACK_GUARD_D    = 1, // LSE, D and dSinks
    FATTN_BACK_GUARD_F32  = 2,
};

// Lengths of rows as 2*log2, rounded; rows that do not count or are 0 are left out.
struct fattn_back_guard_rows {
    int most;
    int n;
    long long sum;
};

struct fattn_back_guard_unit {
    fattn_back_guard_rows k; // less the means of the columns
    fattn_back_guard_rows v;
    fattn_back_guard_rows dO;
    int level; // at least
    int wide;  // 1: few columns of K have most of its length, F32 where logits are large, too; ALWAYS: F32
    int done;  // owners of query rows that have finished
};

// The bound. Lengths of rows, 2*log2: the longest less the mean, beyond which a unit is formed in F32.
#define FATTN_BACK_GUARD_K        4
#define FATTN_BACK_GUARD_K_PEAKED 3
#define FATTN_BACK_GUARD_V        8
#define FATTN_BACK_GUARD_DO       14
#define FATTN_BACK_GUARD_ALIKE    0.25f // of dO, below which all are as long
// V and dO: no long row harms while it is half as long as all rows together, which average its rounding; but up to this
#define FATTN_BACK_GUARD_SHARE 2
#define FATTN_BACK_GUARD_MOST  24
// |log2(e)*x| from which on few keys have a row: then K_PEAKED and ALIKE hold, too; from which on its steps in F32 show in P
#define FATTN_BACK_GUARD_PEAKED 40.0f
#define FATTN_BACK_GUARD_LOGIT  16384.0f
// mean square of K's columns over their geometric mean, where logits are large
#define FATTN_BACK_GUARD_WIDE   8.0f
#define FATTN_BACK_GUARD_ALWAYS 2
// log2 of the lengths that powers of two scale
#define FATTN_BACK_GUARD_RANGE 90
// rows of a head that see a key, and keys that are seen, fewer of which do not average the rounding
#define FATTN_BACK_GUARD_TERMS 16
// |x| over the softcap from which on 1 - tanh^2 loses bits
#define FATTN_BACK_GUARD_SOFTCAP 4.0f
// what a head's sink leaves to the keys of every row
#define FATTN_BACK_GUARD_SINK 0x1p-8f
// the part of D without the mean of V over D, the largest of a head each; dSinks^2 over the sum of its squared terms
#define FATTN_BACK_GUARD_MEAN   8.0f
#define FATTN_BACK_GUARD_CANCEL 0.06f

// in the workspace
struct fattn_back_guard {
    fattn_back_guard_unit * units; // [S*Hkv]
    float4 * ref;                  // [S*H*N] softmax of a row, of units in F32
    float2 * heads;                // [H] sum of dSinks' terms and of their squares
    uint2 * D;                     // [S*H] largest |D| and largest part of it without the mean of V, as bits
    unsigned long long * ticket;   // items of work that blocks have taken

    // places the arrays with take(pointer, number of elements)
    template <typename F>
    void layout(const fattn_back_args & a, const F & take) {
        take(units, (int64_t) a.S * a.Hkv);
        take(ref, (int64_t) a.S * a.H * a.N);
        take(heads, a.H);
        take(D, (int64_t) a.S * a.H);
        take(ticket, 1);
    }

    // a unit of G heads before anything is measured; by one thread. wide is written by itself.
    __device__ __forceinline__ void start(const int unit, const int G) const {
        const fattn_back_guard_rows none = { -1000, 0, 0 };
        units[unit].k = units[unit].v = units[unit].dO = none;
        units[unit].level                              = FATTN_BACK_GUARD_FP16;
        units[unit].done                               = 0;
        if (unit == 0) {
            *ticket = 0;
        }
        for (int i = 0; i < G; ++i) {
            D[(int64_t) unit * G + i] = make_uint2(0, 0);
        }
    }

    // D of a row of a head, and the part of it without the mean of V
    __device__ __forceinline__ void note(const int64_t head, const float all, const float part) const {
        const auto most = [](uint32_t & dst, const float x) {
            const uint32_t y = __float_as_uint(fabsf(x));
            if (y > dst) { // seldom; what is read may be an earlier maximum
                atomicMax(&dst, y);
            }
        };
        most(D[head].x, all);
        most(D[head].y, part);
    }

    __device__ __forceinline__ void raise(const int unit, const fattn_back_guard_level level) const {
        atomicMax(&units[unit].level, level);
    }
};

// what a thread measures of rows
struct fattn_back_guard_lengths {
    int most = -1000;
    int sum  = 0;
    int n    = 0;

    // a row of length x, 2*log2; on: this thread counts it
    __device__ __forceinline__ void add(const float x, const bool on) {
        if (on && x > -300.0f) { // not of zeros, nor NaN
            const int length = __float2int_rn(fminf(x, 300.0f));
            most             = max(most, length);
            sum += length;
            ++n;
        }
    }
    // a row that nthreads threads have
    template <int nthreads>
    __device__ __forceinline__ void add(const float (&x)[8], const bool on) {
        float square = 0.0f;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            square = fmaf(x[c], x[c], square);
        }
        add(log2f(warp_reduce_sum<nthreads>(square)), on);
    }
    // adds what the threads of a warp have measured to a unit's
    __device__ __forceinline__ void put(fattn_back_guard_rows & dst) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
        const int most_of_all = __reduce_max_sync(0xFFFFFFFF, most);
        const int sum_of_all  = __reduce_add_sync(0xFFFFFFFF, sum);
        const int n_of_all    = __reduce_add_sync(0xFFFFFFFF, n);
        if (threadIdx.x % 32 == 0 && n_of_all > 0) {
            atomicMax(&dst.most, most_of_all);
            atomicAdd(&dst.n, n_of_all);
            atomicAdd((unsigned long long *) &dst.sum, (unsigned long long) (long long) sum_of_all);
        }
#else
        GGML_UNUSED(dst);
#endif // !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    }
};

// what the preparation and the forward of a path leave for the guard
struct fattn_back_guard_end {
    const uint32_t * large; // [S*Hkv] units above least take K and Q in two halves
    uint32_t least;
    uint32_t peaked;        // as least, of logits beyond FATTN_BACK_GUARD_PEAKED
    uint32_t stamp;         // of a forward: what it saves ends with it; of a backward 0
    uint32_t in_f32;        // what a forward saves for units in F32 instead of large
};

// Forms what units beyond the bound have of O, LSE, D, dSinks and gradients in F32, and ends a node: its stamp.
void ggml_cuda_flash_attn_back_guard(
    const fattn_back_args & a, const fattn_back_guard & guard, const fattn_back_guard_end & end, cudaStream_t stream);

// units of the nodes that a device has run since the last call: those that took K and Q in two halves, those whose LSE, D and dSinks, and
// those of which everything was formed in F32
void ggml_cuda_flash_attn_back_units(int device, uint64_t * counts);
