#pragma once

#include "common.cuh"

// the rows path: F32 on any device, takes whatever the operator does

// NULL: takes the node
const char * ggml_cuda_flash_attn_back_rows_refusal(int device, const ggml_tensor * dst);

// bytes of a run under a limit; more than the limit where the path cannot do with less
size_t ggml_cuda_flash_attn_back_rows_workspace(int device, const ggml_tensor * dst, size_t limit);

void ggml_cuda_flash_attn_back_rows(ggml_backend_cuda_context & ctx, ggml_tensor * dst, size_t limit, char * workspace);
