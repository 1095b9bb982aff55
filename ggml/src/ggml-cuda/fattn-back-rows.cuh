#pragma once

#include "fattn-back-common.cuh"

// the rows path: F32 on any device, takes whatever the operator does

// NULL: takes the node
const char * ggml_cuda_flash_attn_back_rows_refusal(int device, const ggml_tensor * dst);

// its workspace takes more than the limit where the path cannot do with less
fattn_back_plan ggml_cuda_flash_attn_back_rows_plan(int device, const ggml_tensor * dst, size_t limit);
