#pragma once

// FLASH_ATTN_BACK: the gradient of ggml_flash_attn_ext.
//
// One sequence s, query head h, KV head g = h/(H/Hkv), query i, key j:
//
//     x    = scale * q_i . k_j                  (softcap c > 0: x = c * tanh(scale * q_i . k_j / c))
//     s    = x + slope_h * mask_ij              (slope_h from max_bias as in the forward)
//     LSE  = log(sum_j exp(s) [+ exp(sink_h)])
//     p    = exp(s - LSE),  dp = do_i . v_j,  D = sum_j p * dp
//     ds   = p * (dp - D) * [1 - tanh^2]
//     dq_i = scale * sum_j ds * k_j             dk_j = scale * sum_{h in group, i} ds * q_i
//     dv_j = sum_{h in group, i} p * do_i       dsink_h = -sum_{s, i} exp(sink_h - LSE) * D
//
// A row with every s = -inf has LSE = sink_h, -inf without sinks, and D = 0 and no gradient; a key that every row masks gets exact zeros.
// A sink of +inf takes all of its head's rows: LSE = +inf, p = 0, D = 0 and no gradient, that of the sink included.

#include "ggml.h"

#ifdef  __cplusplus
extern "C" {
#endif

    // parts of the result in memory order, F32, contiguous
    enum ggml_flash_attn_back_part {
        GGML_FLASH_ATTN_BACK_DQ     = 0, // [Dk, N, H, S]
        GGML_FLASH_ATTN_BACK_DK     = 1, // [Dk, kv_count, Hkv, S]
        GGML_FLASH_ATTN_BACK_DV     = 2, // [Dv, kv_count, Hkv, S]
        GGML_FLASH_ATTN_BACK_LSE    = 3, // [N, H, S]
        GGML_FLASH_ATTN_BACK_D      = 4, // [N, H, S]
        GGML_FLASH_ATTN_BACK_DSINKS = 5, // [H]

        GGML_FLASH_ATTN_BACK_PART_COUNT,
    };

    struct ggml_flash_attn_back_params {
        float    scale;
        float    max_bias;      // ALiBi, 0 = off; needs a mask
        float    logit_softcap; // 0 = off
        uint32_t grads;         // wanted gradients: bits 1u << part of DQ, DK, DV and DSINKS; LSE and D are always there
        int64_t  kv_first;      // first key that gets dK and dV
        int64_t  kv_count;      // keys that get dK and dV; 0 = all (kv_first must be 0)
    };

    // q:     [Dk, N,   H,   S] F32, any component stride but 0
    // k:     [Dk, M,   Hkv, S] any type that ggml can convert to F32, rows contiguous, H % Hkv == 0
    // v:     [Dv, M,   Hkv, S] as k, its own type; may be a view of k
    // mask:  [M,  >=N, Hm,  Sm] F16, rows contiguous, H % Hm == 0, S % Sm == 0, or NULL
    // sinks: [H] F32, or NULL
    // o:     [Dv, H,   N,   S] F32, the forward's output, from which D = do . o is taken; NULL recomputes D from q, k and v
    // d:     [Dv, H,   N,   S] F32, the gradient of the output, any component stride but 0
    // result: 1-D F32, the wanted parts in order, each part (LSE and D together) padded to GGML_MEM_ALIGN
    //
    // What a backend takes of this its supports_op says. A wrong shape, type or window aborts with the rule that it breaks.
    GGML_API struct ggml_tensor * ggml_flash_attn_back(
            struct ggml_context * ctx,
            struct ggml_tensor  * q,
            struct ggml_tensor  * k,
            struct ggml_tensor  * v,
            struct ggml_tensor  * mask,
            struct ggml_tensor  * sinks,
            struct ggml_tensor  * o,
            struct ggml_tensor  * d,
            struct ggml_flash_attn_back_params params);

    // Makes o stand for what its forward saves for the gradient, no longer for its values, as autodiff does. o must be a
    // FLASH_ATTN_EXT node of the same q, k, v, mask, sinks and parameters whose result no buffer holds yet and no other
    // node overwrites. A backend that saves nothing, or that did not run this o, computes back as if o were NULL.
    // false, and nothing changes, where o is not such a node.
    GGML_API bool ggml_flash_attn_back_use_saved(struct ggml_tensor * back);

    // Whether a kernel that rounds q and k to fp16 splits each of their values in two of fp16 (about 22 bits) for every
    // logit; else it does so only where logits are large. node: a FLASH_ATTN_BACK node, or a FLASH_ATTN_EXT node, from
    // which autodiff hands it on.
    GGML_API void ggml_flash_attn_back_set_split(struct ggml_tensor * node, bool split);

    // whether the result holds this part
    GGML_API bool ggml_flash_attn_back_has(const struct ggml_tensor * back, enum ggml_flash_attn_back_part part);

    // bytes from the result's data to a part that it holds
    GGML_API size_t ggml_flash_attn_back_offset(const struct ggml_tensor * back, enum ggml_flash_attn_back_part part);

    // a part that the result holds as a tensor of the shape above
    GGML_API struct ggml_tensor * ggml_flash_attn_back_view(
            struct ggml_context          * ctx,
            struct ggml_tensor           * back,
            enum ggml_flash_attn_back_part part);

    // digest of the sources that this library was built from: sha256 over the sorted lines of sha256sum of the patch's files
    GGML_API const char * ggml_flash_attn_back_source(void);

    // What a backend answers through ggml_backend_reg_get_proc_address:
    // "ggml_backend_flash_attn_back_refusal": why the device does not run this node, NULL if it does (supports_op is the same answer)
    // "ggml_backend_flash_attn_back_path":    name of the kernel path that the device takes for a node that it runs
    // "ggml_backend_flash_attn_back_source":  ggml_flash_attn_back_source of the backend's own library
    // "ggml_backend_flash_attn_back_units":   of the nodes that the device has run since the last call the units (a KV head of
    //                                         a sequence) that more than fp16 operands went into: those that took K and Q in
    //                                         two halves; whose LSE, D and dSinks, or all of whose results, were formed in F32
    // Of a FLASH_ATTN_EXT node the first two answer for a forward that saves something for the gradient: where there is
    // none, ggml's own runs.
    struct ggml_backend_device;
    typedef const char * (*ggml_backend_flash_attn_back_refusal_t)(
            struct ggml_backend_device * dev, const struct ggml_tensor * node);
    typedef const char * (*ggml_backend_flash_attn_back_path_t)(
            struct ggml_backend_device * dev, const struct ggml_tensor * node);
    typedef const char * (*ggml_backend_flash_attn_back_source_t)(void);
    typedef void (*ggml_backend_flash_attn_back_units_t)(struct ggml_backend_device * dev, uint64_t counts[3]);

#ifdef  __cplusplus
}
#endif
