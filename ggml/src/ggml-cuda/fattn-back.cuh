#pragma once

#include "common.cuh"

// takes less workspace where the device has less; where it has too little for any path nothing runs, and failed() says so
void ggml_cuda_flash_attn_back(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// a FLASH_ATTN_EXT node: false if it is not marked for training; else it is run, and what the backward may use of it is
// saved behind its result
bool ggml_cuda_flash_attn_train(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// bytes that a buffer needs for tensor and what is saved behind it; 0 if nothing is
size_t ggml_cuda_flash_attn_train_alloc_size(const ggml_tensor * tensor);

// whether a node of this thread did not run since the last call
bool ggml_cuda_flash_attn_back_failed();

// to be called when a context ends
void ggml_cuda_flash_attn_back_forget(const ggml_backend_cuda_context * ctx);

// whether some path takes the node; exact: what it says runs
bool ggml_cuda_flash_attn_back_supported(int device, const ggml_tensor * dst);

// the functions of ggml-flash-attn-back.h by name, NULL for other names
void * ggml_cuda_flash_attn_back_get_proc_address(const char * name);

// digest of the sources that this library was built from
const char * ggml_cuda_flash_attn_back_source();
