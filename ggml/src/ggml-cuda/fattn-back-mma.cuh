#pragma once

#include "common.cuh"

// FLASH_ATTN_BACK on tensor cores through mma.sync, Ampere and newer

// why this path does not take the node, NULL if it does
const char * ggml_cuda_flash_attn_back_mma_refusal(int device, const ggml_tensor * dst);

// bytes of a run under a limit; more than the limit where the path cannot do with less
size_t ggml_cuda_flash_attn_back_mma_workspace(int device, const ggml_tensor * dst, size_t limit);

void ggml_cuda_flash_attn_back_mma(ggml_backend_cuda_context & ctx, ggml_tensor * dst, size_t limit, char * workspace);
