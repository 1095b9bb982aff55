#pragma once

#include "common.cuh"

void ggml_cuda_flash_attn_back(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// whether some path takes the node; exact: what it says runs
bool ggml_cuda_flash_attn_back_supported(int device, const ggml_tensor * dst);

// the functions of ggml-flash-attn-back.h by name, NULL for other names
void * ggml_cuda_flash_attn_back_get_proc_address(const char * name);

// digest of the sources that this library was built from
const char * ggml_cuda_flash_attn_back_source();
