// FLASH_ATTN_BACK where devices share a tensor, in ggml-backend-meta.cpp, which includes this: each device has some of the KV heads and the query
// heads that belong to them, of q, k and v on axis 2, of d and o on axis 1, of sinks on axis 0. The mask is on all of them. A device's result is
// then that of a node with fewer heads. Its parts lie at the same shares of their offsets, if no padding lies between them.

#include "ggml-flash-attn-back-impl.h"

using ggml_flash_attn_back_states = std::vector<ggml_backend_meta_split_state>;

static int64_t ggml_flash_attn_back_share(const ggml_backend_meta_split_state & state, size_t n_devs, size_t dev) {
    int64_t sum = 0;
    for (size_t s = 0; s < state.n_segments; ++s) {
        sum += state.ne[s * n_devs + dev] * state.nr[s];
    }
    return sum;
}

// whether padding lies between parts of a node with heads KV heads
static bool ggml_flash_attn_back_is_padded(const ggml_flash_attn_back_node & node, int64_t heads) {
    size_t offset = 0;
    for (int part = 0; part < GGML_FLASH_ATTN_BACK_PART_COUNT; ++part) {
        const size_t size = node.size[part] / node.Hkv * heads;
        if (size > 0 && (offset * node.Hkv != node.offset[part] * heads || (part != GGML_FLASH_ATTN_BACK_D && offset % GGML_MEM_ALIGN != 0))) {
            return true;
        }
        offset += size;
    }
    return false;
}

// why a node cannot be split as its sources are, NULL if it can
static const char * ggml_flash_attn_back_split_refusal(const ggml_tensor * back, const ggml_flash_attn_back_states & src, size_t n_devs) {
    static const int axes[] = { 2, 2, 2, GGML_BACKEND_SPLIT_AXIS_MIRRORED, 0, 1, 1 }; // by source
    for (int i = GGML_FLASH_ATTN_BACK_SRC_Q; i <= GGML_FLASH_ATTN_BACK_SRC_DO; ++i) {
        if (back->src[i] && src[i].axis != axes[i]) {
            return "q, k, v, d, o and sinks must be split by heads, the mask must be on all devices";
        }
    }
    const ggml_flash_attn_back_node node = ggml_flash_attn_back_decode(back);
    for (size_t j = 0; j < n_devs; ++j) {
        const int64_t heads = ggml_flash_attn_back_share(src[GGML_FLASH_ATTN_BACK_SRC_K], n_devs, j);
        for (int i = GGML_FLASH_ATTN_BACK_SRC_Q; i <= GGML_FLASH_ATTN_BACK_SRC_DO; ++i) {
            const int axis = axes[i];
            if (back->src[i] && axis < GGML_MAX_DIMS && ggml_flash_attn_back_share(src[i], n_devs, j) * node.Hkv != heads * back->src[i]->ne[axis]) {
                return "a device must have the query heads of its KV heads";
            }
        }
        if (ggml_flash_attn_back_is_padded(node, heads)) {
            return "padding would lie between the parts of a device's result";
        }
    }
    return nullptr;
}

// the result: for each part, and for each sequence in it, the shares of all devices
static ggml_backend_meta_split_state ggml_flash_attn_back_split(const ggml_tensor * back, const ggml_flash_attn_back_states & src, size_t n_devs) {
    bool mirrored = true;
    for (int i = GGML_FLASH_ATTN_BACK_SRC_Q; i <= GGML_FLASH_ATTN_BACK_SRC_DO; ++i) {
        mirrored = mirrored && (!back->src[i] || src[i].axis == GGML_BACKEND_SPLIT_AXIS_MIRRORED);
    }
    if (mirrored) {
        return { GGML_BACKEND_SPLIT_AXIS_MIRRORED, { 0 }, { 1 }, 1 };
    }
    const char * refusal = ggml_flash_attn_back_split_refusal(back, src, n_devs);
    if (refusal) {
        GGML_ABORT("FLASH_ATTN_BACK cannot be split over devices: %s", refusal);
    }

    const ggml_flash_attn_back_node node = ggml_flash_attn_back_decode(back);
    ggml_backend_meta_split_state state  = { GGML_BACKEND_SPLIT_AXIS_0, { 0 }, { 0 }, 0 };
    int64_t rest                         = back->ne[0];
    for (int part = 0; part < GGML_FLASH_ATTN_BACK_PART_COUNT; ++part) {
        const int64_t size = node.size[part] / sizeof(float);
        if (size == 0) {
            continue;
        }
        const uint32_t times = part == GGML_FLASH_ATTN_BACK_DSINKS ? 1 : node.S;
        for (size_t j = 0; j < n_devs; ++j) {
            const int64_t heads                     = ggml_flash_attn_back_share(src[GGML_FLASH_ATTN_BACK_SRC_K], n_devs, j);
            state.ne[state.n_segments * n_devs + j] = size / times / node.Hkv * heads;
        }
        state.nr[state.n_segments++] = times;
        rest -= size;
    }
    if (rest > 0) { // the padding at the end
        state.ne[state.n_segments * n_devs + n_devs - 1] = rest;
        state.nr[state.n_segments++]                     = 1;
    }
    return state;
}

// a view of a split result: one of its parts
static ggml_backend_meta_split_state ggml_flash_attn_back_split_view(const ggml_tensor * view, const ggml_backend_meta_split_state & k, size_t n_devs) {
    static const int axes[]              = { 2, 2, 2, 1, 1, 0 }; // by part
    const ggml_flash_attn_back_node node = ggml_flash_attn_back_decode(view->view_src);
    for (int part = 0; part < GGML_FLASH_ATTN_BACK_PART_COUNT; ++part) {
        if (node.size[part] > 0 && view->view_offs == node.offset[part] && ggml_nbytes(view) == node.size[part]) {
            ggml_backend_meta_split_state state = { ggml_backend_meta_split_axis(axes[part]), { 0 }, { 1 }, 1 };
            for (size_t j = 0; j < n_devs; ++j) {
                state.ne[j] = ggml_flash_attn_back_share(k, n_devs, j) * view->ne[axes[part]] / node.Hkv;
            }
            return state;
        }
    }
    GGML_ABORT("a view of a FLASH_ATTN_BACK that is split over devices must be a whole part");
}

// why no split of a node over devices is taken, NULL if one by KV heads is
static const char * ggml_flash_attn_back_meta_refusal(const ggml_tensor * back) {
    return ggml_flash_attn_back_is_padded(ggml_flash_attn_back_decode(back), 1) ? "padding would lie between the parts of a KV head's result" : nullptr;
}
