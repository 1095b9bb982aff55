// FLASH_ATTN_BACK on the CPU: five products per (query, key) pair that is not masked, F32 with F64 row sums.
//
// A block is a range of KV heads, a range of query rows of each of them (a row is a query of one of the head's query heads)
// and a chunk of keys. The threads go through the blocks together, in three stages with a barrier after each:
//
//     1. load   (KV head, key tile): which row tiles see which key tiles; K and V to F32, once for all rows of the block
//     2. rows   (KV head, row tile): S = Q K^T, dP = dO V^T, LSE and D, then P and dS in place, dQ += dS K
//     3. keys   (KV head, key tile): dV += P^T dO, dK += dS^T Q over the rows of the block
//
// S, dP, P and dS are kept as [key][row]: vector lanes run over rows, so that the softmax needs no horizontal operations and
// no product needs a transposed K or V. Long caches take more than one chunk and then two sweeps over the chunks, the first
// one for LSE and D only: seven products, but memory that does not grow with the cache.
//
// Blocks and tiles depend on the shape only. Every tile of a part has one owner that adds in a fixed order, so the bits do not
// depend on the number of threads.

#include "flash-attn-back.h"

#include "ggml-cpu.h"
#include "ggml-cpu-impl.h"
#include "ggml-flash-attn-back-impl.h"
#include "ggml-flash-attn-back-source.h"
#include "simd-mappings.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

namespace {

// C[m][n] (+)= sum_k A[m][k] B[k][n] with register blocks of RM rows by RN vectors; A has any strides, n is a multiple of VL

#if defined(GGML_SIMD) && !defined(__ARM_FEATURE_SVE) && !defined(__riscv_v_intrinsic)
using vec        = GGML_F32_VEC;
constexpr int VL = GGML_F32_EPR;

inline vec vec_load(const float * p) { return GGML_F32_VEC_LOAD(p); }
inline void vec_store(float * p, vec v) { GGML_F32_VEC_STORE(p, v); }
inline vec vec_set1(float x) { return GGML_F32_VEC_SET1(x); }
inline vec vec_fma(vec acc, vec a, vec b) { return GGML_F32_VEC_FMA(acc, a, b); }
#else
// no vectors of a fixed size: loops that the compiler can vectorise
constexpr int VL = 8;
struct vec {
    float x[VL];
};

inline vec vec_load(const float * p) {
    vec v;
    memcpy(v.x, p, sizeof(v.x));
    return v;
}
inline void vec_store(float * p, const vec & v) { memcpy(p, v.x, sizeof(v.x)); }
inline vec vec_set1(float x) {
    vec v;
    for (int i = 0; i < VL; ++i) {
        v.x[i] = x;
    }
    return v;
}
inline vec vec_fma(vec acc, const vec & a, const vec & b) {
    for (int i = 0; i < VL; ++i) {
        acc.x[i] += a.x[i] * b.x[i];
    }
    return acc;
}
#endif

#if defined(__AVX512F__) || defined(__aarch64__) // 32 registers
constexpr int RM = 6;
constexpr int RN = 4;
#elif defined(__AVX__)
constexpr int RM = 6;
constexpr int RN = 2;
#else
constexpr int RM = 3;
constexpr int RN = 2;
#endif

template <bool add, int rm, int rn>
inline void gemm_kernel(
    float * GGML_RESTRICT c, int64_t ldc, const float * GGML_RESTRICT a, int64_t a_m, int64_t a_k,
    const float * GGML_RESTRICT b, int64_t ldb, int64_t k) {
    vec acc[rm][rn];
    for (int i = 0; i < rm; ++i) {
        for (int j = 0; j < rn; ++j) {
            acc[i][j] = add ? vec_load(c + i * ldc + j * VL) : vec_set1(0.0f);
        }
    }
    for (int64_t l = 0; l < k; ++l) {
        vec bl[rn];
        for (int j = 0; j < rn; ++j) {
            bl[j] = vec_load(b + l * ldb + j * VL);
        }
        for (int i = 0; i < rm; ++i) {
            const vec al = vec_set1(a[i * a_m + l * a_k]);
            for (int j = 0; j < rn; ++j) {
                acc[i][j] = vec_fma(acc[i][j], bl[j], al);
            }
        }
    }
    for (int i = 0; i < rm; ++i) {
        for (int j = 0; j < rn; ++j) {
            vec_store(c + i * ldc + j * VL, acc[i][j]);
        }
    }
}

template <bool add, int rm, int rn>
void gemm_panel(
    float * c, int64_t ldc, const float * a, int64_t a_m, int64_t a_k, const float * b, int64_t ldb, int64_t m, int64_t k) {
    for (; m >= rm; m -= rm) {
        gemm_kernel<add, rm, rn>(c, ldc, a, a_m, a_k, b, ldb, k);
        c += rm * ldc;
        a += rm * a_m;
    }
    if constexpr (rm > 1) {
        if (m > 0) {
            gemm_panel<add, rm / 2, rn>(c, ldc, a, a_m, a_k, b, ldb, m, k);
        }
    }
}

template <bool add, int rn = RN>
void gemm(
    float * c, int64_t ldc, const float * a, int64_t a_m, int64_t a_k, const float * b, int64_t ldb, int64_t m, int64_t n, int64_t k) {
    for (; n >= rn * VL; n -= rn * VL) {
        gemm_panel<add, RM, rn>(c, ldc, a, a_m, a_k, b, ldb, m, k);
        c += rn * VL;
        b += rn * VL;
    }
    if constexpr (rn > 1) {
        if (n > 0) {
            gemm<add, rn / 2>(c, ldc, a, a_m, a_k, b, ldb, m, n, k);
        }
    }
}

inline uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// condition ? a : b on bits: no arithmetic depends on the condition, so that loops over lanes become vector code
inline float select(bool condition, float a, float b) {
    const uint32_t mask = 0u - (uint32_t) condition;
    return from_bits((to_bits(a) & mask) | (to_bits(b) & ~mask));
}

// the bits of an F16 as an integer in the order of the numbers, and back
inline int16_t fp16_order(int16_t bits) {
    return (int16_t) (bits ^ ((bits >> 15) & 0x7fff));
}

// exp(x) for x <= 0, 0 below exp's normal range, NaN for NaN; within 2 ulp.
// Plain arithmetic that compilers vectorise for every target: ggml_v_expf is not as wide as GGML_F32_VEC everywhere.
inline float exp_nonpositive(float x) {
    const float z = x * 1.44269504f + 0x1.8p23f; // x/ln 2, rounded, in the low bits
    const float n = z - 0x1.8p23f;
    const float r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
    const float c = 4.1665795894e-2f + r * (8.3334519073e-3f + r * (1.3981999507e-3f + r * 1.9875691500e-4f));
    const float y = 1.0f + r * (1.0f + r * (5.0000001201e-1f + r * (1.6666665459e-1f + r * c)));
    return select(x < -87.0f, 0.0f, y * from_bits((to_bits(z) << 23) + 0x3f800000));
}

constexpr int64_t ROW_TILE = 64; // rows of a tile, a multiple of RN*VL
constexpr int64_t KEY_TILE = 96; // keys of a tile, a multiple of RM

static_assert(ROW_TILE % (RN * VL) == 0 && KEY_TILE % RM == 0, "tiles are whole register blocks");

constexpr int64_t ALIGNMENT  = 64;       // of everything in the work buffer: a cache line, and the widest vector
constexpr int64_t BYTES_KV   = 18 << 20; // K and V of a block in F32
constexpr int64_t BYTES_ROWS = 36 << 20; // S, dP and the rest that a block keeps for its rows
constexpr int64_t MIN_TILES  = 8;        // row tiles that a chunk of keys must leave room for: they share its K and V

// what a row tile keeps between its key tiles
struct row_stats {
    double l[ROW_TILE]; // sum exp(s - m)
    double a[ROW_TILE]; // sum exp(s - m)*dp
    float bias[ROW_TILE]; // largest bias of the row: s goes without it, since -65504 would cost it 12 bits
    float m[ROW_TILE];    // max s, -INFINITY if there is none
    float D[ROW_TILE];
    float inv_l[ROW_TILE]; // 0 for a row whose P is 0
};

// how a row tile sees a key tile
enum tile_mask : uint8_t {
    TILE_MASKED, // no row sees a key
    TILE_PLAIN,  // every row sees every key, with no bias
    TILE_MIXED,
};

struct plan {
    ggml_flash_attn_back_node node;

    int64_t group;    // query heads per KV head
    int64_t n_heads;  // KV heads of all sequences
    int64_t n_rows;   // rows of a KV head: its query heads' queries
    int64_t ldk, ldv; // Dk and Dv in whole vectors
    int64_t planes;   // matrices that are kept for a row tile: S (then P), dP (then dS), and with a softcap 1 - tanh^2

    // a block
    int64_t heads;    // KV heads
    int64_t tiles;    // row tiles of a KV head
    int64_t keys;     // keys of a chunk, whole tiles
    int64_t n_chunks;

    // the work buffer, in bytes
    size_t k, v, q, dO, strip, stats, masks, loaded, finite; // shared
    size_t local, local_size;                                // per thread
    size_t size;
};

int64_t div_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

int64_t round_up(int64_t a, int64_t b) {
    return div_up(a, b) * b;
}

// n things in as few equal shares of at most max as possible
int64_t share(int64_t n, int64_t max) {
    return n > 0 ? div_up(n, div_up(n, max)) : 1;
}

plan make_plan(const ggml_tensor * dst, int n_tasks) {
    plan p;
    p.node    = ggml_flash_attn_back_decode(dst);
    p.group   = p.node.H / p.node.Hkv;
    p.n_heads = p.node.Hkv * p.node.S;
    p.n_rows  = p.node.N * p.group;
    p.ldk     = round_up(std::max<int64_t>(p.node.Dk, 1), VL);
    p.ldv     = round_up(std::max<int64_t>(p.node.Dv, 1), VL);
    p.planes  = p.node.logit_softcap > 0.0f ? 3 : 2;

    const int64_t f32      = sizeof(float);
    const int64_t kv_bytes = (p.ldk + p.ldv) * f32;
    const int64_t max_keys = std::min(BYTES_KV / kv_bytes, BYTES_ROWS / (MIN_TILES * ROW_TILE * p.planes * f32)) / KEY_TILE * KEY_TILE;
    p.keys                 = round_up(share(p.node.M, std::max(max_keys, KEY_TILE)), KEY_TILE);
    p.n_chunks             = std::max<int64_t>(div_up(p.node.M, p.keys), 1);

    const int64_t row_bytes = ROW_TILE * (p.keys * p.planes + p.ldk + p.ldv) * f32 + sizeof(row_stats) + p.n_chunks * (p.keys / KEY_TILE);
    const int64_t max_tiles = std::max<int64_t>(BYTES_ROWS / row_bytes, 1);
    p.tiles                 = share(div_up(p.n_rows, ROW_TILE), max_tiles);
    p.heads                 = share(p.n_heads, std::max<int64_t>(std::min(max_tiles / p.tiles, BYTES_KV / (p.keys * kv_bytes)), 1));

    const int64_t keys  = p.heads * p.keys;
    const int64_t tiles = p.heads * p.tiles;
    size_t size         = 0;
    const auto take     = [&](int64_t bytes) {
        const size_t offset = size;
        size += round_up(bytes, ALIGNMENT);
        return offset;
    };
    p.k      = take(keys * p.ldk * f32);
    p.v      = take(keys * p.ldv * f32);
    p.q      = take(tiles * ROW_TILE * p.ldk * f32);
    p.dO     = take(tiles * ROW_TILE * p.ldv * f32);
    p.strip  = take(tiles * ROW_TILE * p.keys * p.planes * f32);
    p.stats  = take(tiles * sizeof(row_stats));
    p.masks  = take(tiles * p.n_chunks * (p.keys / KEY_TILE));
    p.loaded = take(keys / KEY_TILE);
    p.finite = take(keys);

    const int64_t local_rows = ROW_TILE * (2 * p.ldk + p.ldv + KEY_TILE); // Q^T, dQ, dO^T, bias
    const int64_t local_keys = KEY_TILE * (p.ldk + p.ldv);              // dK, dV
    p.local_size             = round_up(std::max(local_rows, local_keys) * f32, ALIGNMENT);
    p.local                  = take(n_tasks * p.local_size);
    p.size                   = size + ALIGNMENT; // to align the buffer
    return p;
}

const char * row(const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    return (const char *) t->data + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
}

void to_f32(const ggml_tensor * t, const char * src, float * dst) {
    switch (t->type) {
        case GGML_TYPE_F32:
            memcpy(dst, src, t->ne[0] * sizeof(float));
            break;
        case GGML_TYPE_F16:
            ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) src, dst, t->ne[0]);
            break;
        case GGML_TYPE_BF16:
            ggml_cpu_bf16_to_fp32((const ggml_bf16_t *) src, dst, t->ne[0]);
            break;
        default:
            ggml_get_type_traits(t->type)->to_float(src, dst, t->ne[0]);
            break;
    }
}

// running max, sum exp(s - m) and sum exp(s - m)*dp of a row tile
template <bool has_dp>
void update_stats(row_stats & stats, const float * GGML_RESTRICT s, const float * GGML_RESTRICT dp, int64_t n_keys, int64_t n_lanes) {
    float m[ROW_TILE];
    memcpy(m, stats.m, sizeof(m));
    for (int64_t j = 0; j < n_keys; ++j) {
        for (int64_t i = 0; i < n_lanes; ++i) {
            m[i] = s[j * ROW_TILE + i] > m[i] ? s[j * ROW_TILE + i] : m[i]; // m where s is NaN
        }
    }

    double l[ROW_TILE];
    double a[ROW_TILE];
    for (int64_t i = 0; i < n_lanes; ++i) {
        const float m_old   = stats.m[i];
        stats.m[i]          = m[i];
        m[i]                = select(m[i] == -INFINITY, 0.0f, m[i]);
        const float rescale = exp_nonpositive(m_old - m[i]);
        l[i]                = stats.l[i] * rescale;
        a[i]                = stats.a[i] * rescale;
    }
    for (int64_t j = 0; j < n_keys; ++j) {
        for (int64_t i = 0; i < n_lanes; ++i) {
            const float e = exp_nonpositive(s[j * ROW_TILE + i] - m[i]);
            l[i] += e;
            if constexpr (has_dp) {
                a[i] += select(e == 0.0f, 0.0f, e * dp[j * ROW_TILE + i]); // dp may be NaN where the mask hides a key
            }
        }
    }
    memcpy(stats.l, l, n_lanes * sizeof(double));
    memcpy(stats.a, a, n_lanes * sizeof(double));
}

// S -> P, dP -> dS (without the scale)
template <bool has_softcap>
void softmax_back(
    const row_stats & stats, float * GGML_RESTRICT s, float * GGML_RESTRICT dp, const float * GGML_RESTRICT dtanh,
    int64_t n_keys, int64_t n_lanes) {
    float m[ROW_TILE];
    for (int64_t i = 0; i < n_lanes; ++i) {
        m[i] = select(stats.m[i] == -INFINITY, 0.0f, stats.m[i]);
    }
    for (int64_t j = 0; j < n_keys; ++j) {
        for (int64_t i = 0; i < n_lanes; ++i) {
            const int64_t ji = j * ROW_TILE + i;
            const float p    = exp_nonpositive(s[ji] - m[i]) * stats.inv_l[i];
            float ds         = p * (dp[ji] - stats.D[i]);
            if constexpr (has_softcap) {
                ds *= dtanh[ji];
            }
            s[ji]  = p;
            dp[ji] = select(p == 0.0f, 0.0f, ds); // as above
        }
    }
}

// x = c*tanh(x/c), dtanh = 1 - tanh^2(x/c)
void softcap(float c, float * GGML_RESTRICT x, float * GGML_RESTRICT dtanh, int64_t n) {
    const float inv_c = 1.0f / c;
    for (int64_t i = 0; i < n; ++i) {
        const float y       = x[i] * inv_c;
        const float z       = y * y;
        const float e       = exp_nonpositive(-2.0f * fabsf(y));
        const float t       = (1.0f - e) / (1.0f + e);
        const float poly    = 2.0f / 15 + z * (-17.0f / 315 + z * (62.0f / 2835 + z * (-1382.0f / 155925)));
        const float t_small = y * (1.0f + z * (-1.0f / 3 + z * poly));
        x[i]                = c * select(z < 0.0625f, t_small, copysignf(t, y));
        dtanh[i]            = 4.0f * e / ((1.0f + e) * (1.0f + e));
    }
}

struct flash_attn_back {
    const ggml_compute_params * params;
    ggml_tensor * dst;

    const plan p                           = make_plan(dst, params->nth);
    const ggml_flash_attn_back_node & node = p.node;

    const ggml_tensor * q     = dst->src[GGML_FLASH_ATTN_BACK_SRC_Q];
    const ggml_tensor * k     = dst->src[GGML_FLASH_ATTN_BACK_SRC_K];
    const ggml_tensor * v     = dst->src[GGML_FLASH_ATTN_BACK_SRC_V];
    const ggml_tensor * mask  = dst->src[GGML_FLASH_ATTN_BACK_SRC_MASK];
    const ggml_tensor * sinks = dst->src[GGML_FLASH_ATTN_BACK_SRC_SINKS];
    const ggml_tensor * o     = ggml_flash_attn_back_o_is_saved(dst) ? nullptr : dst->src[GGML_FLASH_ATTN_BACK_SRC_O];
    const ggml_tensor * d     = dst->src[GGML_FLASH_ATTN_BACK_SRC_DO];

    const bool want_dq = ggml_flash_attn_back_wants(&node, GGML_FLASH_ATTN_BACK_DQ);
    const bool want_dk = ggml_flash_attn_back_wants(&node, GGML_FLASH_ATTN_BACK_DK);
    const bool want_dv = ggml_flash_attn_back_wants(&node, GGML_FLASH_ATTN_BACK_DV);

    char * const work   = (char *) round_up((int64_t) (uintptr_t) params->wdata, ALIGNMENT);
    float * const local = (float *) (work + p.local + params->ith * p.local_size);

    // the block
    int64_t head0       = 0; // first KV head
    int64_t n_heads     = 0;
    int64_t row0        = 0; // first row of every head
    int64_t n_tiles     = 0; // row tiles of every head
    int64_t key0        = 0; // first key
    int64_t n_keys      = 0;
    int64_t n_key_tiles = 0;
    bool do_stats       = false; // this sweep finds LSE and D
    bool do_grads       = false; // this sweep finds the gradients

    int64_t next_item = 0;

    float * part(ggml_flash_attn_back_part which) const {
        return (float *) ((char *) dst->data + node.offset[which]);
    }

    // calls f(i) for i in [0, n), each on one thread, and waits for all
    template <typename F>
    void for_items(int64_t n, const F & f) {
        for (;;) {
            const int64_t i = ggml_threadpool_chunk_add(params->threadpool, 1) - next_item;
            if (i >= n) {
                break;
            }
            f(i);
        }
        next_item += n + params->nth; // every thread took one number too many
        ggml_barrier(params->threadpool);
    }

    void restart_items() {
        next_item = 0;
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, 0);
        }
        ggml_barrier(params->threadpool);
    }

    // index of a row tile in the block's buffers
    int64_t tile_index(int64_t ih, int64_t it) const {
        return ih * p.tiles + it;
    }

    int64_t tile_rows(int64_t it) const {
        return std::min(ROW_TILE, p.n_rows - (row0 + it * ROW_TILE));
    }

    int64_t tile_keys(int64_t jt) const {
        return std::min(KEY_TILE, n_keys - jt * KEY_TILE);
    }

    tile_mask & mask_of(int64_t ih, int64_t it, int64_t jt) const {
        return ((tile_mask *) (work + p.masks))[tile_index(ih, it) * p.n_chunks * (p.keys / KEY_TILE) + key0 / KEY_TILE + jt];
    }

    float * strip(int64_t ih, int64_t it, int64_t jt, int64_t plane) const {
        return (float *) (work + p.strip) + ((tile_index(ih, it) * p.planes + plane) * p.keys + jt * KEY_TILE) * ROW_TILE;
    }

    float * block_k(int64_t ih, int64_t jt) const { return (float *) (work + p.k) + (ih * p.keys + jt * KEY_TILE) * p.ldk; }
    float * block_v(int64_t ih, int64_t jt) const { return (float *) (work + p.v) + (ih * p.keys + jt * KEY_TILE) * p.ldv; }

    float * block_q(int64_t ih, int64_t it) const { return (float *) (work + p.q) + tile_index(ih, it) * ROW_TILE * p.ldk; }
    float * block_do(int64_t ih, int64_t it) const { return (float *) (work + p.dO) + tile_index(ih, it) * ROW_TILE * p.ldv; }

    // whether keys of the block's key tile get dK and dV
    bool in_window(int64_t jt) const {
        const int64_t key = key0 + jt * KEY_TILE;
        return key < node.kv_first + node.kv_count && key + tile_keys(jt) > node.kv_first;
    }

    // consecutive queries of one query head
    struct segment {
        int64_t row; // in the row tile
        int64_t n;
        int64_t i, h, s; // first query, query head, sequence
    };

    // calls f(segment) for the rows of a row tile
    template <typename F>
    void for_segments(int64_t ih, int64_t it, const F & f) const {
        const int64_t head   = head0 + ih;
        const int64_t n_rows = tile_rows(it);
        int64_t i            = (row0 + it * ROW_TILE) % node.N;
        int64_t h            = (row0 + it * ROW_TILE) / node.N + head % node.Hkv * p.group;
        for (int64_t r = 0; r < n_rows;) {
            const int64_t n = std::min(node.N - i, n_rows - r);
            f(segment{ r, n, i, h, head / node.Hkv });
            r += n;
            i = 0;
            h += 1;
        }
    }

    const char * mask_rows(const segment & x) const {
        return row(mask, x.i, x.h % mask->ne[2], x.s % mask->ne[3]);
    }

    // first row of a row tile in the parts that are [.., N, H, S]
    int64_t part_row(int64_t ih, int64_t it) const {
        return (head0 + ih) * p.n_rows + row0 + it * ROW_TILE;
    }

    tile_mask scan_mask(int64_t ih, int64_t it, int64_t jt) const {
        if (!mask) {
            return TILE_PLAIN;
        }
        if (mask->ne[2] == 1 && node.N % ROW_TILE == 0 && it >= node.N / ROW_TILE) {
            return mask_of(ih, it - node.N / ROW_TILE, jt); // the same queries of the head before
        }
        const int64_t nk  = tile_keys(jt);
        uint16_t any_bias = 0;
        uint16_t any_open = 0;
        for_segments(ih, it, [&](const segment & x) {
            const char * rows = mask_rows(x);
            for (int64_t i = 0; i < x.n; ++i) {
                const ggml_fp16_t * m = (const ggml_fp16_t *) (rows + i * mask->nb[1]) + key0 + jt * KEY_TILE;
                for (int64_t j = 0; j < nk; ++j) {
                    any_bias |= m[j] & 0x7fff;
                    any_open |= m[j] ^ 0xfc00; // -inf
                }
            }
        });
        return !any_open ? TILE_MASKED : any_bias ? TILE_MIXED
                                                  : TILE_PLAIN;
    }

    // stage 1; keep: K and V of the block's heads and chunk are still there
    void load_keys(int64_t ih, int64_t jt, bool keep) {
        bool visible = false;
        for (int64_t it = 0; it < n_tiles; ++it) {
            tile_mask & m = mask_of(ih, it, jt);
            if (do_stats) { // the first sweep
                m = scan_mask(ih, it, jt);
            }
            visible = visible || m != TILE_MASKED;
        }

        uint8_t & loaded = ((uint8_t *) (work + p.loaded))[ih * (p.keys / KEY_TILE) + jt];
        loaded           = loaded && keep;
        if (loaded || !visible) {
            return;
        }
        loaded = true;

        uint8_t * finite = (uint8_t *) (work + p.finite) + ih * p.keys + jt * KEY_TILE;
        for (int64_t j = 0; j < tile_keys(jt); ++j) {
            const int64_t key  = key0 + jt * KEY_TILE + j;
            const int64_t head = head0 + ih;
            float * kj         = block_k(ih, jt) + j * p.ldk;
            float * vj         = block_v(ih, jt) + j * p.ldv;
            to_f32(k, row(k, key, head % node.Hkv, head / node.Hkv), kj);
            to_f32(v, row(v, key, head % node.Hkv, head / node.Hkv), vj);
            std::fill(kj + node.Dk, kj + p.ldk, 0.0f);
            std::fill(vj + node.Dv, vj + p.ldv, 0.0f);

            int n_bad = 0;
            for (int64_t c = 0; c < node.Dk; ++c) {
                n_bad += !(fabsf(kj[c]) <= FLT_MAX);
            }
            finite[j] = n_bad == 0;
        }
    }

    // rows of q (times the scale) or d of a row tile as they are and transposed
    static void load_row(const char * src, size_t stride, float factor, int64_t n, int64_t ld, float * dst_row, float * dst_col) {
        for (int64_t c = 0; c < ld; ++c) {
            const float x         = c < n ? factor * *(const float *) (src + c * stride) : 0.0f;
            dst_row[c]            = x;
            dst_col[c * ROW_TILE] = x;
        }
    }

    // the rows' largest biases; 0 where a sink is larger
    void find_bias(int64_t ih, int64_t it, row_stats & stats) const {
        std::fill(stats.bias, stats.bias + ROW_TILE, 0.0f);
        if (!mask) {
            return;
        }
        for_segments(ih, it, [&](const segment & x) {
            const float slope = ggml_flash_attn_back_slope(&node, x.h);
            const float sink  = sinks ? ((const float *) sinks->data)[x.h] : -INFINITY;
            const char * rows = mask_rows(x);
            for (int64_t i = 0; i < x.n; ++i) {
                const int16_t * m = (const int16_t *) (rows + i * mask->nb[1]);
                int16_t max       = INT16_MIN;
                for (int64_t key = 0; key < node.M; ++key) {
                    const int16_t order = fp16_order(m[key]);
                    max                 = order > max ? order : max;
                }
                const float bias      = slope * ggml_fp16_to_fp32((ggml_fp16_t) fp16_order(max));
                stats.bias[x.row + i] = bias > sink ? bias : 0.0f;
            }
        });
    }

    // S and dP of a row tile and a key tile
    void scores(
        int64_t ih, int64_t it, int64_t jt, int64_t n_lanes, const row_stats & stats, const float * qt, const float * dot, float * bias,
        bool with_dp) {
        const int64_t nk = tile_keys(jt);
        float * s        = strip(ih, it, jt, 0);

        gemm<false>(s, ROW_TILE, block_k(ih, jt), p.ldk, 1, qt, ROW_TILE, nk, n_lanes, node.Dk);
        if (with_dp) {
            gemm<false>(strip(ih, it, jt, 1), ROW_TILE, block_v(ih, jt), p.ldv, 1, dot, ROW_TILE, nk, n_lanes, node.Dv);
        }
        if (node.logit_softcap > 0.0f) {
            float * dtanh = strip(ih, it, jt, 2);
            for (int64_t j = 0; j < nk; ++j) {
                softcap(node.logit_softcap, s + j * ROW_TILE, dtanh + j * ROW_TILE, n_lanes);
            }
        }
        // a tile without a bias loses the rows' largest ones as the others do
        const bool biased = std::any_of(stats.bias, stats.bias + n_lanes, [](float x) { return x != 0.0f; });
        if (biased || mask_of(ih, it, jt) == TILE_MIXED) {
            for_segments(ih, it, [&](const segment & x) {
                const float slope = ggml_flash_attn_back_slope(&node, x.h);
                const char * rows = mask_rows(x);
                for (int64_t i = 0; i < x.n; ++i) {
                    float * bias_row     = bias + x.row + i;
                    const float max_bias = stats.bias[x.row + i];
                    float m[KEY_TILE];
                    ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) (rows + i * mask->nb[1]) + key0 + jt * KEY_TILE, m, nk);
                    for (int64_t j = 0; j < nk; ++j) {
                        bias_row[j * ROW_TILE] = select(m[j] == -INFINITY, -INFINITY, slope * m[j] - max_bias);
                    }
                }
            });
            for (int64_t j = 0; j < nk; ++j) {
                // s may be NaN where the mask hides a key
                for (int64_t i = 0; i < n_lanes; ++i) {
                    const int64_t ji = j * ROW_TILE + i;
                    s[ji]            = select(bias[ji] == -INFINITY, -INFINITY, s[ji] + bias[ji]);
                }
            }
        }
    }

    // do . o of a segment's query
    double dot_o(const segment & x, int64_t i) const {
        const char * o_row = row(o, x.h, x.i + i, x.s);
        const char * d_row = row(d, x.h, x.i + i, x.s);
        double sum         = 0.0;
        for (int64_t c = 0; c < node.Dv; ++c) {
            sum += (double) *(const float *) (o_row + c * o->nb[0]) * *(const float *) (d_row + c * d->nb[0]);
        }
        return sum;
    }

    // LSE and D of a row tile from its sums
    void finish_stats(int64_t ih, int64_t it, row_stats & stats) {
        float * lse = part(GGML_FLASH_ATTN_BACK_LSE) + part_row(ih, it);
        float * D   = part(GGML_FLASH_ATTN_BACK_D) + part_row(ih, it);
        for_segments(ih, it, [&](const segment & x) {
            for (int64_t i = x.row; i < x.row + x.n; ++i) {
                const float sink = sinks ? ((const float *) sinks->data)[x.h] - stats.bias[i] : -INFINITY;
                double l         = stats.l[i];
                double a         = stats.a[i];
                const bool empty = l == 0.0 || sink == INFINITY; // P is 0
                // the keys' m stays beside a sink above it: exp(s - sink) may be below exp_nonpositive's range
                const double top  = std::max(stats.m[i], sink);
                const double keys = std::exp(stats.m[i] - top);
                l                 = l * keys + std::exp(sink - top);
                a                 = a * keys;
                stats.inv_l[i]    = empty ? 0.0f : (float) (keys / l);
                stats.D[i]        = empty ? 0.0f : (float) (o ? dot_o(x, i - x.row) : a / l);
                lse[i]            = empty ? sink : (float) (top + std::log(l) + stats.bias[i]);
                D[i]              = stats.D[i];
            }
        });
    }

    // stage 2
    void do_rows(int64_t ih, int64_t it, bool first_chunk, bool last_chunk) {
        const int64_t n_rows  = tile_rows(it);
        const int64_t n_lanes = round_up(n_rows, VL);
        float * qt            = local;
        float * dot           = qt + ROW_TILE * p.ldk;
        float * dq            = dot + ROW_TILE * p.ldv;
        float * bias          = dq + ROW_TILE * p.ldk;
        float * qr            = block_q(ih, it);
        float * dor           = block_do(ih, it);

        std::fill(qt, dq, 0.0f);
        std::fill(bias, bias + KEY_TILE * ROW_TILE, 0.0f);
        for_segments(ih, it, [&](const segment & x) {
            for (int64_t i = 0; i < x.n; ++i) {
                const int64_t r = x.row + i;
                load_row(row(q, x.i + i, x.h, x.s), q->nb[0], node.scale, node.Dk, p.ldk, qr + r * p.ldk, qt + r);
                load_row(row(d, x.h, x.i + i, x.s), d->nb[0], 1.0f, node.Dv, p.ldv, dor + r * p.ldv, dot + r);
            }
        });

        row_stats & stats = ((row_stats *) (work + p.stats))[tile_index(ih, it)];
        if (do_stats) {
            if (first_chunk) {
                find_bias(ih, it, stats);
                std::fill(stats.l, stats.l + ROW_TILE, 0.0);
                std::fill(stats.a, stats.a + ROW_TILE, 0.0);
                std::fill(stats.m, stats.m + ROW_TILE, -INFINITY);
            }
            const bool with_dp = !o || (do_grads && (want_dq || want_dk));
            for (int64_t jt = 0; jt < n_key_tiles; ++jt) {
                if (mask_of(ih, it, jt) == TILE_MASKED) {
                    continue;
                }
                scores(ih, it, jt, n_lanes, stats, qt, dot, bias, with_dp);
                if (o) {
                    update_stats<false>(stats, strip(ih, it, jt, 0), nullptr, tile_keys(jt), n_lanes);
                } else {
                    update_stats<true>(stats, strip(ih, it, jt, 0), strip(ih, it, jt, 1), tile_keys(jt), n_lanes);
                }
            }
            if (last_chunk) {
                finish_stats(ih, it, stats);
            }
        }
        if (!do_grads) {
            return;
        }

        std::fill(dq, dq + ROW_TILE * p.ldk, 0.0f);
        for (int64_t jt = 0; jt < n_key_tiles; ++jt) {
            if (mask_of(ih, it, jt) == TILE_MASKED || (!want_dq && !in_window(jt))) {
                continue;
            }
            if (!do_stats) {
                scores(ih, it, jt, n_lanes, stats, qt, dot, bias, want_dq || want_dk);
            }
            float * s  = strip(ih, it, jt, 0);
            float * ds = strip(ih, it, jt, 1);
            if (node.logit_softcap > 0.0f) {
                softmax_back<true>(stats, s, ds, strip(ih, it, jt, 2), tile_keys(jt), n_lanes);
            } else {
                softmax_back<false>(stats, s, ds, nullptr, tile_keys(jt), n_lanes);
            }
            if (want_dq) {
                add_dq(ih, jt, ds, n_rows, dq);
            }
        }

        for (int64_t i = 0; i < n_rows; ++i) {
            if (stats.inv_l[i] == 0.0f) { // nothing of a row whose P is 0, not even NaN, may reach dK and dV
                std::fill(qr + i * p.ldk, qr + (i + 1) * p.ldk, 0.0f);
                std::fill(dor + i * p.ldv, dor + (i + 1) * p.ldv, 0.0f);
            }
        }
        if (want_dq) {
            float * out = part(GGML_FLASH_ATTN_BACK_DQ) + part_row(ih, it) * node.Dk;
            for (int64_t i = 0; i < n_rows; ++i) {
                for (int64_t c = 0; c < node.Dk; ++c) {
                    out[i * node.Dk + c] = (first_chunk ? 0.0f : out[i * node.Dk + c]) + node.scale * dq[i * p.ldk + c];
                }
            }
        }
    }

    // dQ += dS K without the keys that are not finite: a row that sees such a key has dS = NaN throughout, for the others it is 0*NaN
    void add_dq(int64_t ih, int64_t jt, const float * ds, int64_t n_rows, float * dq) const {
        const uint8_t * finite = (const uint8_t *) (work + p.finite) + ih * p.keys + jt * KEY_TILE;
        const uint8_t * end    = finite + tile_keys(jt);
        for (const uint8_t * first = finite; first < end;) {
            const uint8_t * last = std::find(first, end, 0);
            const int64_t j      = first - finite;
            gemm<true>(dq, p.ldk, ds + j * ROW_TILE, 1, ROW_TILE, block_k(ih, jt) + j * p.ldk, p.ldk, n_rows, p.ldk, last - first);
            first = std::find(last, end, 1);
        }
    }

    // stage 3
    void do_keys(int64_t ih, int64_t jt) {
        const int64_t key   = key0 + jt * KEY_TILE;
        const int64_t first = std::max(node.kv_first, key);
        const int64_t last  = std::min(node.kv_first + node.kv_count, key + tile_keys(jt));
        const int64_t nk    = last - first;
        const int64_t out   = (head0 + ih) * node.kv_count + first - node.kv_first;
        if (nk <= 0) {
            return;
        }
        float * dk = local;
        float * dv = dk + KEY_TILE * p.ldk;
        if (want_dk) {
            load_part(dk, p.ldk, part(GGML_FLASH_ATTN_BACK_DK) + out * node.Dk, node.Dk, nk);
        }
        if (want_dv) {
            load_part(dv, p.ldv, part(GGML_FLASH_ATTN_BACK_DV) + out * node.Dv, node.Dv, nk);
        }
        for (int64_t it = 0; it < n_tiles; ++it) {
            if (mask_of(ih, it, jt) == TILE_MASKED) {
                continue;
            }
            const int64_t ofs = (first - key) * ROW_TILE;
            if (want_dk) {
                gemm<true>(dk, p.ldk, strip(ih, it, jt, 1) + ofs, ROW_TILE, 1, block_q(ih, it), p.ldk, nk, p.ldk, tile_rows(it));
            }
            if (want_dv) {
                gemm<true>(dv, p.ldv, strip(ih, it, jt, 0) + ofs, ROW_TILE, 1, block_do(ih, it), p.ldv, nk, p.ldv, tile_rows(it));
            }
        }
        if (want_dk) {
            store_part(part(GGML_FLASH_ATTN_BACK_DK) + out * node.Dk, node.Dk, dk, p.ldk, nk);
        }
        if (want_dv) {
            store_part(part(GGML_FLASH_ATTN_BACK_DV) + out * node.Dv, node.Dv, dv, p.ldv, nk);
        }
    }

    // the sum over the rows of earlier blocks
    void load_part(float * tile, int64_t ld, const float * src, int64_t n, int64_t n_rows) const {
        std::fill(tile, tile + n_rows * ld, 0.0f);
        for (int64_t i = 0; row0 > 0 && i < n_rows; ++i) {
            memcpy(tile + i * ld, src + i * n, n * sizeof(float));
        }
    }

    static void store_part(float * part_rows, int64_t n, const float * tile, int64_t ld, int64_t n_rows) {
        for (int64_t i = 0; i < n_rows; ++i) {
            memcpy(part_rows + i * n, tile + i * ld, n * sizeof(float));
        }
    }

    void do_sink(int64_t h) {
        const float * lse = part(GGML_FLASH_ATTN_BACK_LSE);
        const float * D   = part(GGML_FLASH_ATTN_BACK_D);
        const float sink  = ((const float *) sinks->data)[h];
        double sum        = 0.0;
        for (int64_t s = 0; s < node.S; ++s) {
            for (int64_t i = 0; i < node.N && std::isfinite(sink); ++i) { // D is 0 under a sink of INFINITY
                const int64_t r = (s * node.H + h) * node.N + i;
                sum -= std::exp((double) sink - lse[r]) * D[r];
            }
        }
        part(GGML_FLASH_ATTN_BACK_DSINKS)[h] = (float) sum;
    }

    void run() {
        const bool grads          = want_dq || want_dk || want_dv;
        const int64_t n_sweeps    = p.n_chunks > 1 && grads ? 2 : 1;
        const int64_t n_row_tiles = div_up(p.n_rows, ROW_TILE);

        for (head0 = 0; head0 < p.n_heads; head0 += p.heads) {
            n_heads             = std::min(p.heads, p.n_heads - head0);
            int64_t loaded_key0 = -1;

            int64_t tile0 = 0;
            do { // once without rows: dK and dV are zeros then
                row0    = tile0 * ROW_TILE;
                n_tiles = std::min(p.tiles, n_row_tiles - tile0);
                restart_items();

                for (int64_t sweep = 0; sweep < n_sweeps; ++sweep) {
                    do_stats = sweep == 0;
                    do_grads = sweep == n_sweeps - 1 && grads;

                    for (int64_t chunk = 0; chunk < p.n_chunks; ++chunk) {
                        key0        = chunk * p.keys;
                        n_keys      = std::min(p.keys, node.M - key0);
                        n_key_tiles = div_up(n_keys, KEY_TILE);

                        for_items(n_heads * n_key_tiles, [&](int64_t i) {
                            load_keys(i / n_key_tiles, i % n_key_tiles, loaded_key0 == key0);
                        });
                        loaded_key0 = key0;

                        for_items(n_heads * n_tiles, [&](int64_t i) {
                            do_rows(i / n_tiles, i % n_tiles, chunk == 0, chunk == p.n_chunks - 1);
                        });

                        if (do_grads && (want_dk || want_dv)) {
                            for_items(n_heads * n_key_tiles, [&](int64_t i) {
                                do_keys(i / n_key_tiles, i % n_key_tiles);
                            });
                        }
                    }
                }
                tile0 += p.tiles;
            } while (tile0 < n_row_tiles);
        }

        if (ggml_flash_attn_back_wants(&node, GGML_FLASH_ATTN_BACK_DSINKS)) {
            restart_items();
            for_items(node.H, [&](int64_t h) { do_sink(h); });
        }
    }
};

// whether the strides and the offset of a view keep elements aligned: to the power of two in their size, at most 4
bool aligned(const ggml_tensor * t) {
    const size_t size  = ggml_type_size(t->type);
    const size_t align = std::min(size & -size, sizeof(float));
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        if (t->ne[i] > 1 && t->nb[i] % align != 0) {
            return false;
        }
    }
    return t->view_offs % align == 0;
}

const char * refusal(ggml_backend_device * /*dev*/, const ggml_tensor * node) {
    if (node->op == GGML_OP_FLASH_ATTN_EXT) {
        return "the CPU's forward saves nothing";
    }
    return ggml_cpu_flash_attn_back_refusal(node);
}

const char * path(ggml_backend_device * /*dev*/, const ggml_tensor * node) {
    return node->op == GGML_OP_FLASH_ATTN_EXT ? nullptr : "cpu";
}

const char * source(void) {
    return GGML_FLASH_ATTN_BACK_SOURCE;
}

} // namespace

size_t ggml_cpu_flash_attn_back_work_size(const ggml_tensor * dst, int n_tasks) {
    // a device that has none of the heads plans for the node all the same, and does not compute it
    return dst->src[GGML_FLASH_ATTN_BACK_SRC_K]->ne[2] > 0 ? make_plan(dst, n_tasks).size : 0;
}

void ggml_compute_forward_flash_attn_back(const ggml_compute_params * params, ggml_tensor * dst) {
    flash_attn_back op = { params, dst };
    GGML_ASSERT(params->wsize >= op.p.size);
    op.run();
}

const char * ggml_cpu_flash_attn_back_refusal(const ggml_tensor * op) {
    const ggml_tensor * q     = op->src[GGML_FLASH_ATTN_BACK_SRC_Q];
    const ggml_tensor * mask  = op->src[GGML_FLASH_ATTN_BACK_SRC_MASK];
    const ggml_tensor * sinks = op->src[GGML_FLASH_ATTN_BACK_SRC_SINKS];
    const ggml_tensor * o     = op->src[GGML_FLASH_ATTN_BACK_SRC_O];
    const ggml_tensor * d     = op->src[GGML_FLASH_ATTN_BACK_SRC_DO];

    for (const ggml_tensor * t : { q, o, d, sinks, op }) {
        if (t && t->type != GGML_TYPE_F32) {
            return "q, o, d, sinks and the result must be F32";
        }
    }
    for (const ggml_tensor * t : { op->src[GGML_FLASH_ATTN_BACK_SRC_K], op->src[GGML_FLASH_ATTN_BACK_SRC_V] }) {
        if (t->type != GGML_TYPE_F32 && !ggml_get_type_traits(t->type)->to_float) {
            return "the type of k or v has no conversion to F32";
        }
        if (t->nb[0] != ggml_type_size(t->type) || t->ne[0] % ggml_blck_size(t->type) != 0) {
            return "rows of k and v must be contiguous and whole blocks";
        }
    }
    if (mask && (mask->type != GGML_TYPE_F16 || mask->nb[0] != sizeof(ggml_fp16_t))) {
        return "the mask must be F16 with contiguous rows";
    }
    for (int i = GGML_FLASH_ATTN_BACK_SRC_Q; i <= GGML_FLASH_ATTN_BACK_SRC_DO; ++i) {
        if (op->src[i] && !aligned(op->src[i])) {
            return "a source's strides do not keep its elements aligned";
        }
    }
    if (!ggml_is_contiguous(op) || (sinks && !ggml_is_contiguous(sinks))) {
        return "sinks and the result must be contiguous";
    }
    return nullptr;
}

void * ggml_cpu_flash_attn_back_get_proc_address(const char * name) {
    if (strcmp(name, "ggml_backend_flash_attn_back_refusal") == 0) {
        return (void *) (ggml_backend_flash_attn_back_refusal_t) refusal;
    }
    if (strcmp(name, "ggml_backend_flash_attn_back_path") == 0) {
        return (void *) (ggml_backend_flash_attn_back_path_t) path;
    }
    if (strcmp(name, "ggml_backend_flash_attn_back_source") == 0) {
        return (void *) (ggml_backend_flash_attn_back_source_t) source;
    }
    return nullptr;
}
