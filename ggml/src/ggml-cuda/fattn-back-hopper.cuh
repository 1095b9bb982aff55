#pragma once

#include "common.cuh"

// FLASH_ATTN_BACK with wgmma, bulk copies and warp specialisation, for compute capability 9.0 and builds that hold sm_90a code

const char * ggml_cuda_flash_attn_back_hopper_refusal(int device, const ggml_tensor * dst); // NULL: takes the node
// bytes of a run under a limit; more than the limit where the path cannot do with less
size_t ggml_cuda_flash_attn_back_hopper_workspace(int device, const ggml_tensor * dst, size_t limit);

void ggml_cuda_flash_attn_back_hopper(ggml_backend_cuda_context & ctx, ggml_tensor * dst, size_t limit, char * workspace);
