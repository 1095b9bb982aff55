#pragma once

// FLASH_ATTN_BACK on the CPU

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

void ggml_compute_forward_flash_attn_back(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// bytes of work buffer that the node needs with n_tasks threads
size_t ggml_cpu_flash_attn_back_work_size(const struct ggml_tensor * dst, int n_tasks);

// why the CPU does not run this node, NULL if it does
const char * ggml_cpu_flash_attn_back_refusal(const struct ggml_tensor * op);

// the functions of ggml-flash-attn-back.h that a backend answers by name, NULL for other names
void * ggml_cpu_flash_attn_back_get_proc_address(const char * name);

#ifdef __cplusplus
}
#endif
