#pragma once

// What the paths of FLASH_ATTN_BACK share: the node as kernels take it, and loads that dequantise.

#include "common.cuh"
#include "convert.cuh"
#include "dequantize.cuh"
#include "ggml-flash-attn-back-impl.h"

#include <cfloat>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>

// ggml's HIP and MUSA backends compile these files too: there rows is the only path
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
#define FATTN_BACK_TENSOR_CORES
#endif // !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)

// q, k, v, o or dO: where its rows (queries or keys) are, strides in bytes
struct fattn_back_src {
    const char * data; // NULL: not given
    int64_t nb_comp;   // between components; not used for quantised types
    int64_t nb_row;
    int64_t nb_head;
    int64_t nb_seq;
    ggml_type type;
    bool vec;          // four components can be loaded at once: they are adjacent and aligned to their size

    __host__ __device__ int64_t offset(const int64_t row, const int64_t head, const int64_t seq) const {
        return row * nb_row + head * nb_head + seq * nb_seq;
    }
};

// What the forward of a path leaves behind its result for the backward of the same path. It ends with its path's stamp in
// word 0; a backward whose kernels find another word there recomputes all, and ends with 0 there.
struct fattn_back_saved {
    uint32_t * stamp; // 4 words; NULL: nothing is saved, nor are the others there
    float * lse;      // of row fattn_back_args::row, as the path's kernels use it
    uint32_t * large; // [S*Hkv] bits of a float that the path decides by
};

#define FATTN_BACK_STAMP_HOPPER 0xa4e0edf4u
#define FATTN_BACK_STAMP_MMA    0x37d4aacfu

// of a FLASH_ATTN_EXT node, or of the one that a FLASH_ATTN_BACK node is the gradient of, where a path of this device
// runs it; else none
fattn_back_saved fattn_back_get_saved(const ggml_tensor * node);

// a FLASH_ATTN_BACK node, or a FLASH_ATTN_EXT node, which has neither o, dO nor parts
struct fattn_back_args {
    fattn_back_src q;
    fattn_back_src k;
    fattn_back_src v;
    fattn_back_src o; // D is taken from its values; where saved is there: the result behind which it is, to be used with it alone
    fattn_back_src dO;

    const char * mask; // F16, NULL: none
    int64_t mask_nb_row;
    int64_t mask_nb_head;
    int64_t mask_nb_seq;
    int mask_nheads;
    int mask_nseqs;

    const float * sinks; // NULL: none

    float scale;
    float logit_softcap; // 0: off
    float max_bias;      // 0: off
    int n_head_log2;

    int Dk;
    int Dv;
    int N; // queries
    int M; // keys
    int H;
    int Hkv;
    int G; // query heads of a KV head
    int S;

    // groups of query heads whose KV head may be hidden from them all by their own masks
    __host__ __device__ int mask_groups() const {
        return mask_nheads > 1 ? Hkv : 1;
    }

    // index of a KV head of a sequence (s*Hkv + g) among the [mask_nseqs][mask_groups()] sets of masks
    __host__ __device__ int mask_group(const int unit) const {
        return unit / Hkv % mask_nseqs * mask_groups() + unit % Hkv % mask_groups();
    }

    // number of mask heads of a group, and the i-th one
    __host__ __device__ int group_nmasks() const {
        return G < mask_nheads ? G : mask_nheads;
    }

    __host__ __device__ int group_mask(const int group, const int i) const {
        return (group % mask_groups() * G + i) % mask_nheads;
    }

    int kv_first; // keys [kv_first, kv_first + kv_count) get dK and dV
    int kv_count;

    bool split_all; // more than fp16 operands for every score, not only where logits are large

    fattn_back_saved saved;

    float * O; // FLASH_ATTN_EXT: the result, row (s, i, h) at ((s*N + i)*H + h)*Dv; NULL: not wanted

    // parts of the result, NULL: not wanted
    float * dQ;
    float * dK;
    float * dV;
    float * LSE;
    float * D;
    float * dSinks;

    // query row in LSE and D, and in dQ
    __host__ __device__ int64_t row(const int i, const int h, const int s) const {
        return ((int64_t) s * H + h) * N + i;
    }
};

// what the mask leaves of a tile of pairs
enum fattn_back_tile : uint8_t {
    FATTN_BACK_TILE_SKIP  = 0, // no pair
    FATTN_BACK_TILE_FULL  = 1, // every pair, the mask is 0
    FATTN_BACK_TILE_MIXED = 2, // the mask must be read
};

static fattn_back_src fattn_back_get_src(const ggml_tensor * t, const int dim_row, const int dim_head) {
    if (t == nullptr) {
        return {};
    }
    const size_t ts = ggml_type_size(t->type);
    bool vec        = !ggml_is_quantized(t->type) && t->nb[0] == ts && (uintptr_t) t->data % (4 * ts) == 0;
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        vec = vec && t->nb[i] % (4 * ts) == 0;
    }
    return {
        (const char *) t->data, (int64_t) t->nb[0], (int64_t) t->nb[dim_row], (int64_t) t->nb[dim_head], (int64_t) t->nb[3], t->type, vec
    };
}

// whether the node or the environment wants more than fp16 operands everywhere
static bool fattn_back_split_all(const ggml_flash_attn_back_node & node) {
    const char * all = getenv("GGML_CUDA_FATTN_BACK_SPLIT");
    return node.split || (all != nullptr && strcmp(all, "0") != 0);
}

static fattn_back_args fattn_back_get_args(const ggml_tensor * dst) {
    const ggml_flash_attn_back_node node = ggml_flash_attn_back_decode(dst);
    const ggml_tensor * mask             = dst->src[GGML_FLASH_ATTN_BACK_SRC_MASK];
    const ggml_tensor * sinks            = dst->src[GGML_FLASH_ATTN_BACK_SRC_SINKS];

    fattn_back_args args = {};
    args.q               = fattn_back_get_src(dst->src[GGML_FLASH_ATTN_BACK_SRC_Q], 1, 2);
    args.k               = fattn_back_get_src(dst->src[GGML_FLASH_ATTN_BACK_SRC_K], 1, 2);
    args.v               = fattn_back_get_src(dst->src[GGML_FLASH_ATTN_BACK_SRC_V], 1, 2);

    args.split_all = fattn_back_split_all(node);
    args.saved     = fattn_back_get_saved(dst);
    if (dst->op == GGML_OP_FLASH_ATTN_BACK) {
        if (args.saved.stamp != nullptr || !ggml_flash_attn_back_o_is_saved(dst)) {
            args.o = fattn_back_get_src(dst->src[GGML_FLASH_ATTN_BACK_SRC_O], 2, 1);
        }
        args.dO = fattn_back_get_src(dst->src[GGML_FLASH_ATTN_BACK_SRC_DO], 2, 1);
    } else {
        args.O = (float *) dst->data;
    }

    if (mask != nullptr) {
        args.mask         = (const char *) mask->data;
        args.mask_nb_row  = mask->nb[1];
        args.mask_nb_head = mask->nb[2];
        args.mask_nb_seq  = mask->nb[3];
        args.mask_nheads  = mask->ne[2];
        args.mask_nseqs   = mask->ne[3];
    }
    args.sinks = sinks != nullptr ? (const float *) sinks->data : nullptr;

    args.scale         = node.scale;
    args.logit_softcap = node.logit_softcap;
    args.max_bias      = node.max_bias;
    args.n_head_log2   = 1 << (int) floor(log2((double) node.H));

    args.Dk  = node.Dk;
    args.Dv  = node.Dv;
    args.N   = node.N;
    args.M   = node.M;
    args.H   = node.H;
    args.Hkv = node.Hkv;
    args.G   = node.H / node.Hkv;
    args.S   = node.S;

    args.kv_first = node.kv_first;
    args.kv_count = node.kv_count;

    const auto part = [&](const ggml_flash_attn_back_part p) {
        return node.size[p] > 0 ? (float *) ((char *) dst->data + node.offset[p]) : nullptr;
    };
    args.dQ     = part(GGML_FLASH_ATTN_BACK_DQ);
    args.dK     = part(GGML_FLASH_ATTN_BACK_DK);
    args.dV     = part(GGML_FLASH_ATTN_BACK_DV);
    args.LSE    = part(GGML_FLASH_ATTN_BACK_LSE);
    args.D      = part(GGML_FLASH_ATTN_BACK_D);
    args.dSinks = part(GGML_FLASH_ATTN_BACK_DSINKS);
    return args;
}

// how a path runs a node, once
struct fattn_back_plan {
    size_t nbytes; // of the workspace
    std::function<void(char * workspace, cudaStream_t stream)> run;
};

// bytes that a path may take from the pool for partial results
static size_t fattn_back_workspace_limit() {
    const char * mib = getenv("GGML_CUDA_FATTN_BACK_WORKSPACE_MIB");
    return (size_t) (mib != nullptr ? strtoull(mib, nullptr, 10) : 256) << 20;
}

// largest n of [1, hi] that fits, 1 if none does
template <typename F>
static int fattn_back_most(int hi, const F & fits) {
    int lo = 1;
    while (lo < hi) {
        const int n = lo + (hi - lo + 1) / 2;
        if (fits(n)) {
            lo = n;
        } else {
            hi = n - 1;
        }
    }
    return lo;
}

// n divided as evenly as pieces of at most size allow: the largest piece
static int fattn_back_even(const int n, const int size) {
    const int npieces = (n + size - 1) / size;
    return (n + npieces - 1) / npieces;
}

// types of K and V that fattn_back_load8 takes
static bool fattn_back_type_supported(const ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q5_1:
            return true;
        default:
            return false;
    }
}

// whether the strides and the offset of a view keep elements aligned
static bool fattn_back_aligned(const ggml_tensor * t) {
    if (t == nullptr) {
        return true;
    }
    size_t align = 2;
    if (t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_Q4_1 || t->type == GGML_TYPE_Q5_1) {
        align = 4;
    }
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        if (t->ne[i] > 1 && t->nb[i] % align != 0) {
            return false;
        }
    }
    return t->view_offs % align == 0;
}

// why no path takes the node, of the reasons that all share; NULL: none
static const char * fattn_back_common_refusal(const ggml_tensor * dst) {
#if __FINITE_MATH_ONLY__ // with -ffast-math, as ggml builds for MUSA, no comparison finds the -inf of a hidden key
    GGML_UNUSED(dst);
    return "the build has -ffast-math";
#else
    if (!fattn_back_type_supported(dst->src[GGML_FLASH_ATTN_BACK_SRC_K]->type) ||
        !fattn_back_type_supported(dst->src[GGML_FLASH_ATTN_BACK_SRC_V]->type)) {
        return "K or V is not of type F32, F16, BF16, q8_0, q4_0, q4_1, q5_0 or q5_1";
    }
    for (int i = GGML_FLASH_ATTN_BACK_SRC_Q; i <= GGML_FLASH_ATTN_BACK_SRC_DO; ++i) {
        if (!fattn_back_aligned(dst->src[i])) {
            return "a source's strides do not keep its elements aligned";
        }
    }
    return nullptr;
#endif // __FINITE_MATH_ONLY__
}

// why no path that rounds its operands to fp16 takes the node: the rounding has to average out over a head for its NMSE to stay
// within the operator's limit
static const char * fattn_back_fp16_refusal(const ggml_flash_attn_back_node & node) {
    const bool window = node.size[GGML_FLASH_ATTN_BACK_DK] > 0 || node.size[GGML_FLASH_ATTN_BACK_DV] > 0;
    return node.N < 64 || (window ? node.kv_count : node.M) < 64
        ? "fewer than 64 queries, keys or keys of the window: a head with so few does not average the rounding to fp16"
        : nullptr;
}

// ALiBi slope of query head h, as in FLASH_ATTN_EXT
static __device__ __forceinline__ float fattn_back_slope(const fattn_back_args & args, const int h) {
    if (args.max_bias <= 0.0f) {
        return 1.0f;
    }
    const int n = args.n_head_log2;
    // not 0, which times -inf is no number
    return fmaxf(exp2f(h < n ? -(args.max_bias * (h + 1)) / n : -(0.5f * args.max_bias * (2 * (h - n) + 1)) / n), FLT_MIN);
}

// The logit of a product q . k, and its derivative by scale * (q . k). tanh through exp: the fast one is too inexact, and 1 - tanh^2 cancels
// for large x; by its series where 1 - exp cancels.
static __device__ __forceinline__ float fattn_back_logit(const fattn_back_args & args, const float qk, float & dx) {
    if (args.logit_softcap == 0.0f) {
        dx = 1.0f;
        return args.scale * qk;
    }
    const float x = args.scale * qk / args.logit_softcap;
    const float u = expf(-2.0f * fabsf(x));
    const float r = 1.0f / (1.0f + u);
    const float w = u * r;
    dx            = 4.0f * w * r;
    const float y = fabsf(x) < 0x1p-5f ? fmaf(x * x, x * (-1.0f / 3), x) : copysignf(1.0f - 2.0f * w, x); // each within 3e-6
    return args.logit_softcap * y;
}

// components [e, e + 4) of a row that is not quantised
template <ggml_type type, bool vec>
static __device__ __forceinline__ float4 fattn_back_load4(const fattn_back_src & src, const int64_t offset, const int e) {
    if constexpr (type == GGML_TYPE_F32) {
        float4 x;
        if constexpr (vec) {
            ggml_cuda_memcpy_1<sizeof(x)>(&x, src.data + offset + e * sizeof(float));
        } else {
            x.x = *(const float *) (src.data + offset + (e + 0) * src.nb_comp);
            x.y = *(const float *) (src.data + offset + (e + 1) * src.nb_comp);
            x.z = *(const float *) (src.data + offset + (e + 2) * src.nb_comp);
            x.w = *(const float *) (src.data + offset + (e + 3) * src.nb_comp);
        }
        return x;
    } else {
        using T = std::conditional_t<type == GGML_TYPE_F16, half, nv_bfloat16>;
        T x[4];
        ggml_cuda_memcpy_1<sizeof(x), vec ? sizeof(x) : sizeof(T)>(x, src.data + offset + e * sizeof(T));
        return make_float4(
            ggml_cuda_cast<float>(x[0]), ggml_cuda_cast<float>(x[1]), ggml_cuda_cast<float>(x[2]), ggml_cuda_cast<float>(x[3]));
    }
}

// components [e, e + 4) and [e + 16, e + 20) of a row of D components, 0 beyond its end; e % 32 in 0, 4, 8, 12:
// the components that share bytes in the 4 and 5 bit types
template <ggml_type type, bool vec>
static __device__ __forceinline__ void fattn_back_load8(
    const fattn_back_src & src, const int64_t offset, const int e, const int D, float4 & lo, float4 & hi) {
    lo = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    hi = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if constexpr (type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16) {
        if (e < D) {
            lo = fattn_back_load4<type, vec>(src, offset, e);
        }
        if (e + 16 < D) {
            hi = fattn_back_load4<type, vec>(src, offset, e + 16);
        }
    } else if (e < D) {
        const char * row = src.data + offset;
        const int ib     = e / 32;
        const int iqs    = e % 32;
        if constexpr (type == GGML_TYPE_Q8_0) {
            const block_q8_0 & b = ((const block_q8_0 *) row)[ib];
            const float d        = b.d;
            char4 ql;
            char4 qh;
            ggml_cuda_memcpy_1<sizeof(ql), 2>(&ql, b.qs + iqs);
            ggml_cuda_memcpy_1<sizeof(qh), 2>(&qh, b.qs + iqs + 16);
            lo = make_float4(d * ql.x, d * ql.y, d * ql.z, d * ql.w);
            hi = make_float4(d * qh.x, d * qh.y, d * qh.z, d * qh.w);
        } else {
            float2 x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (type == GGML_TYPE_Q4_0) {
                    dequantize_q4_0(row, ib, iqs + i, x[i]);
                } else if constexpr (type == GGML_TYPE_Q4_1) {
                    dequantize_q4_1(row, ib, iqs + i, x[i]);
                } else if constexpr (type == GGML_TYPE_Q5_0) {
                    dequantize_q5_0(row, ib, iqs + i, x[i]);
                } else {
                    static_assert(type == GGML_TYPE_Q5_1, "unexpected type");
                    dequantize_q5_1(row, ib, iqs + i, x[i]);
                }
            }
            lo = make_float4(x[0].x, x[1].x, x[2].x, x[3].x);
            hi = make_float4(x[0].y, x[1].y, x[2].y, x[3].y);
        }
    }
}

// the same of n rows, the type at run time; x[..][0..3] and x[..][4..7]. Rows that are loaded together are on their way together.
template <int n>
static __device__ __forceinline__ void fattn_back_load8(
    const fattn_back_src & src, const int64_t (&offset)[n], const int e, const int D, float (&x)[n][8]) {
    const auto load = [&](const auto type, const auto vec) {
#pragma unroll
        for (int r = 0; r < n; ++r) {
            fattn_back_load8<decltype(type)::value, decltype(vec)::value>(src, offset[r], e, D, *(float4 *) x[r], *(float4 *) (x[r] + 4));
        }
    };
    const auto with_vec = [&](const auto type) {
        if (src.vec) {
            load(type, std::true_type());
        } else {
            load(type, std::false_type());
        }
    };
    switch (src.type) {
        case GGML_TYPE_F32:
            return with_vec(std::integral_constant<ggml_type, GGML_TYPE_F32>());
        case GGML_TYPE_F16:
            return with_vec(std::integral_constant<ggml_type, GGML_TYPE_F16>());
        case GGML_TYPE_BF16:
            return with_vec(std::integral_constant<ggml_type, GGML_TYPE_BF16>());
        case GGML_TYPE_Q8_0:
            return load(std::integral_constant<ggml_type, GGML_TYPE_Q8_0>(), std::false_type());
        case GGML_TYPE_Q4_0:
            return load(std::integral_constant<ggml_type, GGML_TYPE_Q4_0>(), std::false_type());
        case GGML_TYPE_Q4_1:
            return load(std::integral_constant<ggml_type, GGML_TYPE_Q4_1>(), std::false_type());
        case GGML_TYPE_Q5_0:
            return load(std::integral_constant<ggml_type, GGML_TYPE_Q5_0>(), std::false_type());
        case GGML_TYPE_Q5_1:
            return load(std::integral_constant<ggml_type, GGML_TYPE_Q5_1>(), std::false_type());
        default:
            break;
    }
}
static __device__ __forceinline__ void fattn_back_load8(
    const fattn_back_src & src, const int64_t offset, const int e, const int D, float (&x)[8]) {
    const int64_t offsets[1] = { offset };
    fattn_back_load8(src, offsets, e, D, reinterpret_cast<float (&)[1][8]>(x));
}

// With fattn_back_load8, ceil(D/32)*4 threads load a row: first component of the i-th one, component of its c-th value.
static __device__ __forceinline__ int fattn_back_load8_first(const int i) {
    return i / 4 * 32 + i % 4 * 4;
}
static __device__ __forceinline__ int fattn_back_load8_component(const int i, const int c) {
    return fattn_back_load8_first(i) + c / 4 * 16 + c % 4;
}
