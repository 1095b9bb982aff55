#pragma once

#include "fattn-back-common.cuh"

// FLASH_ATTN_BACK on tensor cores through mma.sync, Ampere and newer

// NULL: takes the node
const char * ggml_cuda_flash_attn_back_mma_refusal(int device, const ggml_tensor * dst);

// NULL: takes a FLASH_ATTN_EXT node whose gradient the path takes
const char * ggml_cuda_flash_attn_back_mma_forward_refusal(int device, const ggml_tensor * attn);

// of the gradient or of the FLASH_ATTN_EXT node; its workspace takes more than the limit where the path cannot do with less
fattn_back_plan ggml_cuda_flash_attn_back_mma_plan(int device, const ggml_tensor * dst, size_t limit);
