#pragma once

// Kernels of a training step that stand in for upstream's. Each gives the same bits in every run: an element has one owner and a fixed
// order of summation, no atomics on floats.

#include "common.cuh"

// false: not taken, the caller runs upstream's
bool ggml_cuda_train_repeat_back(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
bool ggml_cuda_train_get_rows_back(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
bool ggml_cuda_train_out_prod(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

void ggml_cuda_train_cross_entropy_loss(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void ggml_cuda_train_cross_entropy_loss_back(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
