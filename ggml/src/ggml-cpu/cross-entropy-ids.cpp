// The loss is the mean over the rows that count, 0 if there are none; of a chunk of a batch, the chunk's part of the mean over the labels of the
// batch. Rows are shared among the threads, and their losses are added up by one
// thread in their order, so that the bits do not depend on the number of threads.

#include "cross-entropy-ids.h"

#include "ggml-cpu-impl.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

struct operands {
    const ggml_tensor * logits;
    const int32_t * labels;
    const ggml_tensor * batch; // labels of the whole batch

    int64_t nclasses;
    int64_t nrows;
    int64_t first; // rows of this thread
    int64_t last;

    operands(const ggml_compute_params * params, const ggml_tensor * logits, const ggml_tensor * labels, const ggml_tensor * batch) :
        logits(logits),
        labels((const int32_t *) labels->data),
        batch(batch ? batch : labels),
        nclasses(logits->ne[0]),
        nrows(ggml_nrows(logits)) {
        GGML_ASSERT(logits->type == GGML_TYPE_F32 && ggml_is_contiguous(logits));
        GGML_ASSERT(labels->type == GGML_TYPE_I32 && ggml_is_contiguous(labels) && ggml_nelements(labels) == nrows);
        GGML_ASSERT(this->batch->type == GGML_TYPE_I32 && ggml_is_contiguous(this->batch));
        const int64_t share = (nrows + params->nth - 1) / params->nth;
        first               = std::min(share * params->ith, nrows);
        last                = std::min(first + share, nrows);
    }

    int64_t counted() const {
        const int32_t * first = (const int32_t *) batch->data;
        return ggml_nelements(batch) - std::count(first, first + ggml_nelements(batch), -1);
    }

    // class of a row, -1 if it does not count
    int32_t label(int64_t row) const {
        if (labels[row] < -1 || labels[row] >= nclasses) {
            GGML_ABORT("label %d of row %lld is neither -1 nor one of %lld classes", labels[row], (long long) row, (long long) nclasses);
        }
        return labels[row];
    }

    // exponentials of a row over its largest logit to y; returns their sum
    double softmax(int64_t row, float * y, float & max) const {
        const float * x = (const float *) logits->data + row * nclasses;
        max             = -INFINITY;
        ggml_vec_max_f32(nclasses, &max, x);
        return ggml_vec_soft_max_f32(nclasses, y, x, max);
    }
};

} // namespace

size_t ggml_cpu_cross_entropy_loss_ids_work_size(const ggml_tensor * dst, int n_tasks) {
    return ggml_nrows(dst->src[0]) * sizeof(double) + n_tasks * dst->src[0]->ne[0] * sizeof(float);
}

void ggml_compute_forward_cross_entropy_loss_ids(const ggml_compute_params * params, ggml_tensor * dst) {
    const operands op(params, dst->src[0], dst->src[1], dst->src[2]);

    GGML_ASSERT(dst->type == GGML_TYPE_F32 && ggml_is_scalar(dst));
    GGML_ASSERT(params->wsize >= ggml_cpu_cross_entropy_loss_ids_work_size(dst, params->nth));

    double * losses = (double *) params->wdata;
    float * scratch = (float *) (losses + op.nrows) + params->ith * op.nclasses;
    for (int64_t row = op.first; row < op.last; ++row) {
        const int32_t label = op.label(row);
        losses[row]         = 0.0;
        if (label >= 0) {
            float max;
            const double sum = op.softmax(row, scratch, max);
            losses[row]      = log(sum) + ((double) max - ((const float *) op.logits->data)[row * op.nclasses + label]);
        }
    }
    ggml_barrier(params->threadpool);

    if (params->ith == 0) {
        const int64_t counted = op.counted();
        double sum            = 0.0;
        for (int64_t row = 0; row < op.nrows; ++row) {
            sum += losses[row];
        }
        *(float *) dst->data = counted > 0 ? sum / counted : 0.0;
    }
}

void ggml_compute_forward_cross_entropy_loss_back_ids(const ggml_compute_params * params, ggml_tensor * dst) {
    const operands op(params, dst->src[1], dst->src[2], dst->src[3]);

    GGML_ASSERT(dst->type == GGML_TYPE_F32 && ggml_is_contiguous(dst) && ggml_are_same_shape(dst, dst->src[1]));
    GGML_ASSERT(dst->src[0]->type == GGML_TYPE_F32 && ggml_is_scalar(dst->src[0]));

    const int64_t counted = op.counted();
    const double weight   = counted > 0 ? (double) *(const float *) dst->src[0]->data / counted : 0.0;
    for (int64_t row = op.first; row < op.last; ++row) {
        float * y           = (float *) dst->data + row * op.nclasses;
        const int32_t label = op.label(row);
        if (label < 0) {
            memset(y, 0, op.nclasses * sizeof(float));
            continue;
        }
        float max;
        const double sum = op.softmax(row, y, max);
        const double p   = y[label] / sum;
        ggml_vec_scale_f32(op.nclasses, y, weight / sum);
        y[label] = weight * (p - 1.0);
    }
}
