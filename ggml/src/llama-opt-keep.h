#pragma once

#include "llama-batch.h"

#include "ggml-cpp.h"

#include <algorithm>
#include <cstring>
#include <vector>

class llm_graph_result;

// What a training keeps from step to step: its graph, and the attention masks, which lie on the device that uses them.
//
// A mask follows from the positions and sequences of the ubatch, as the memory is cleared before each batch. While these stay what they are it is
// neither filled nor copied again: a mask that is no input any more is left alone by llama_kv_cache::set_input_kq_mask().
struct llama_opt_keep {
    struct mask {
        ggml_backend_buffer_type_t buft;
        ggml_type type;
        int64_t ne[GGML_MAX_DIMS];
        bool filled;
        ggml_backend_buffer_ptr buffer;
        ggml_tensor * tensor; // of the graph
    };

    const llm_graph_result * res = nullptr; // whose graph the scheduler holds, NULL if it holds another
    ggml_context_ptr ctx;                   // of the graph's backward pass
    std::vector<mask> masks;
    std::vector<int32_t> key; // what the masks were filled for

    // puts the masks of a new graph where those of the last one were
    void bind_masks(ggml_cgraph * gf, ggml_backend_buffer_type_t buft) {
        std::vector<ggml_tensor *> found;
        for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
            for (ggml_tensor * src : ggml_graph_node(gf, i)->src) {
                if (src && src->op == GGML_OP_NONE && !src->data && !strcmp(src->name, "attn_inp_kq_mask") &&
                    std::find(found.begin(), found.end(), src) == found.end()) {
                    found.push_back(src);
                }
            }
        }
        masks.resize(found.size());
        for (size_t i = 0; i < found.size(); ++i) {
            mask & m        = masks[i];
            ggml_tensor * t = found[i];
            m.tensor        = nullptr;
            if (!m.buffer || m.buft != buft || m.type != t->type || !std::equal(m.ne, m.ne + GGML_MAX_DIMS, t->ne)) {
                m.buffer.reset(); // before there is another one
                m.buffer.reset(ggml_backend_buft_alloc_buffer(buft, ggml_backend_buft_get_alloc_size(buft, t)));
                m.buft   = buft;
                m.type   = t->type;
                m.filled = false;
                std::copy(t->ne, t->ne + GGML_MAX_DIMS, m.ne);
            }
            if (m.buffer && ggml_backend_tensor_alloc(m.buffer.get(), t, ggml_backend_buffer_get_base(m.buffer.get())) == GGML_STATUS_SUCCESS) {
                m.tensor = t;
            } // else it stays an input like any other
        }
    }

    // before inputs are set: masks that are what the ubatch needs are none
    void mark_masks(const llama_ubatch & ubatch) {
        std::vector<int32_t> now(ubatch.pos, ubatch.pos + ubatch.n_tokens * ubatch.n_pos);
        for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
            now.push_back(ubatch.n_seq_id[i]);
            now.insert(now.end(), ubatch.seq_id[i], ubatch.seq_id[i] + ubatch.n_seq_id[i]);
        }
        const bool same = now == key;
        for (mask & m : masks) {
            if (m.tensor) {
                m.tensor->flags = same && m.filled ? m.tensor->flags & ~GGML_TENSOR_FLAG_INPUT : m.tensor->flags | GGML_TENSOR_FLAG_INPUT;
                m.filled        = true;
            }
        }
        key = std::move(now);
    }
};
