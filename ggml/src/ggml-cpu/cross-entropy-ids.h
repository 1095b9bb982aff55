#pragma once

// CROSS_ENTROPY_LOSS and CROSS_ENTROPY_LOSS_BACK on the CPU with labels of type I32: the class of each row of the logits, -1 for a row that
// does not count

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

void ggml_compute_forward_cross_entropy_loss_ids(const struct ggml_compute_params * params, struct ggml_tensor * dst);
void ggml_compute_forward_cross_entropy_loss_back_ids(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// bytes of work buffer that the loss needs with n_tasks threads
size_t ggml_cpu_cross_entropy_loss_ids_work_size(const struct ggml_tensor * dst, int n_tasks);

#ifdef __cplusplus
}
#endif
