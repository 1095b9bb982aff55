#pragma once

// What the backends share of FLASH_ATTN_BACK: the node decoded once, and the layout of its result.

#include "ggml-impl.h"
#include "ggml-flash-attn-back.h"

#include <math.h>

#ifdef __cplusplus
extern "C" {
#endif

// sources of a FLASH_ATTN_BACK node; the first five are those of FLASH_ATTN_EXT
enum ggml_flash_attn_back_src {
    GGML_FLASH_ATTN_BACK_SRC_Q     = 0,
    GGML_FLASH_ATTN_BACK_SRC_K     = 1,
    GGML_FLASH_ATTN_BACK_SRC_V     = 2,
    GGML_FLASH_ATTN_BACK_SRC_MASK  = 3,
    GGML_FLASH_ATTN_BACK_SRC_SINKS = 4,
    GGML_FLASH_ATTN_BACK_SRC_O     = 5,
    GGML_FLASH_ATTN_BACK_SRC_DO    = 6,
};

// a FLASH_ATTN_BACK node, decoded, or the FLASH_ATTN_EXT node of which it is the gradient, which has no parts
struct ggml_flash_attn_back_node {
    float scale;
    float max_bias;
    float logit_softcap;
    bool split;
    uint32_t grads;

    int64_t Dk;
    int64_t Dv;
    int64_t N;   // queries
    int64_t M;   // keys
    int64_t H;   // query heads
    int64_t Hkv; // KV heads
    int64_t S;   // sequences

    int64_t kv_first; // keys [kv_first, kv_first + kv_count) get dK and dV
    int64_t kv_count;

    size_t offset[GGML_FLASH_ATTN_BACK_PART_COUNT]; // bytes from data; parts that are left out share their successor's
    size_t size[GGML_FLASH_ATTN_BACK_PART_COUNT]; // bytes without padding, 0 for parts that are left out
};

GGML_API struct ggml_flash_attn_back_node ggml_flash_attn_back_decode(const struct ggml_tensor * node);

// The pair: ggml_flash_attn_back_use_saved marks a FLASH_ATTN_EXT node, whose forward then saves for the gradient behind
// its result. Saved, after padding to GGML_FLASH_ATTN_BACK_SAVED_ALIGN: a stamp of 16 bytes, float[S*H*N], uint32_t[S*H].
#define GGML_FLASH_ATTN_BACK_SAVED_ALIGN 16

// whether attn is a FLASH_ATTN_EXT node that is marked
GGML_API bool ggml_flash_attn_back_is_marked(const struct ggml_tensor * attn);

// bytes that a buffer reserves for attn, a FLASH_ATTN_EXT node, beyond ggml_nbytes; 0 if it is not marked
GGML_API size_t ggml_flash_attn_back_saved_size(const struct ggml_tensor * attn);

// whether back's o stands for what the forward saved
GGML_API bool ggml_flash_attn_back_o_is_saved(const struct ggml_tensor * back);

// the marked node that back is the gradient of: same sources and parameters; NULL if its o is anything else
GGML_API const struct ggml_tensor * ggml_flash_attn_back_forward(const struct ggml_tensor * back);

static inline bool ggml_flash_attn_back_wants(const struct ggml_flash_attn_back_node * node, enum ggml_flash_attn_back_part part) {
    return (node->grads >> part) & 1u;
}

// ALiBi slope of query head h, as in FLASH_ATTN_EXT
static inline float ggml_flash_attn_back_slope(const struct ggml_flash_attn_back_node * node, int64_t h) {
    if (node->max_bias <= 0.0f) {
        return 1.0f;
    }
    const uint32_t n_head_log2 = 1u << (uint32_t) floor(log2((double) node->H));
    const float m0             = powf(2.0f, -(node->max_bias) / n_head_log2);
    const float m1             = powf(2.0f, -(node->max_bias / 2.0f) / n_head_log2);
    return h < n_head_log2 ? powf(m0, (float) (h + 1)) : powf(m1, (float) (2 * (h - n_head_log2) + 1));
}

// the rule of ggml_flash_attn_back's arguments that these break, in words, NULL if they keep all
const char * ggml_flash_attn_back_broken_rule(
    const struct ggml_tensor * q,
    const struct ggml_tensor * k,
    const struct ggml_tensor * v,
    const struct ggml_tensor * mask,
    const struct ggml_tensor * sinks,
    const struct ggml_tensor * o,
    const struct ggml_tensor * d,
    struct ggml_flash_attn_back_params params);

// Autodiff. Gradients that node's sources need, by source index, NULL where none is needed: one FLASH_ATTN_BACK node, its parts as views.
void ggml_flash_attn_back_src_grads(
    struct ggml_context * ctx,
    struct ggml_cgraph * cgraph,
    struct ggml_tensor * node,
    struct ggml_tensor * grad,
    const bool * grads_needed,
    struct ggml_tensor * src_grads[GGML_MAX_SRC]);

// Autodiff. Whether node is a VIEW of all of its source in its order: the gradient of the one is that of the other.
bool ggml_flash_attn_back_is_whole_view(const struct ggml_tensor * node);

// Autodiff. The gradient of a CPY, CONT or VIEW node in the form that its backward case takes: contiguous unless a ROPE
// takes it, and for a VIEW of a part with an F32 gradient of zeros under it where its source has none yet.
struct ggml_tensor * ggml_flash_attn_back_prepare_grad(
    struct ggml_context * ctx,
    struct ggml_cgraph * cgraph,
    struct ggml_tensor * node,
    struct ggml_tensor * grad,
    const bool * grads_needed);

#ifdef __cplusplus
}
#endif
