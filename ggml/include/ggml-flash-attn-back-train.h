#pragma once

// What training with flash attention needs beside FLASH_ATTN_BACK.

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// why the device does not run attn, a FLASH_ATTN_EXT node, or its gradients (bits as in ggml_flash_attn_back_params), NULL if it does
GGML_API const char * ggml_flash_attn_back_train_refusal(
    ggml_backend_dev_t dev,
    const struct ggml_tensor * attn,
    uint32_t grads);

// Autodiff of TANH, SIGMOID, GELU and split GEGLU nodes: gradients of the sources that need one, NULL for the others.
// false for any other node. A GEGLU has two sources, the others one.
GGML_API bool ggml_flash_attn_back_train_src_grads(
    struct ggml_context * ctx,
    struct ggml_tensor * node,
    struct ggml_tensor * grad,
    const bool needed[2],
    struct ggml_tensor * src_grads[2]);

#ifdef __cplusplus
}
#endif
