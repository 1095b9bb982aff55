#pragma once

#include "fattn-back-common.cuh"

// FLASH_ATTN_BACK with wgmma, bulk copies and warp specialisation, for compute capability 9.0 and builds that hold sm_90a code

// NULL: takes the node
const char * ggml_cuda_flash_attn_back_hopper_refusal(int device, const ggml_tensor * dst);

// NULL: takes a FLASH_ATTN_EXT node whose gradient the path takes
const char * ggml_cuda_flash_attn_back_hopper_forward_refusal(int device, const ggml_tensor * attn);

// of the gradient or of the FLASH_ATTN_EXT node; its workspace takes more than the limit where the path cannot do with less
fattn_back_plan ggml_cuda_flash_attn_back_hopper_plan(int device, const ggml_tensor * dst, size_t limit);
