#pragma once

#include "common.cuh"

// the rows path: F32 on any device, takes whatever the operator does

// NULL: takes the node
const char * ggml_cuda_flash_attn_back_rows_refusal(int device, const ggml_tensor * dst);

void ggml_cuda_flash_attn_back_rows(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
