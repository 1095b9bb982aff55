// GGML_OPT_LOSS_TYPE_CROSS_ENTROPY_IDS in ggml-opt.cpp, which includes this behind its structs: labels are I32 [1, ndata_batch], the class of each
// datapoint, or -1 for one that does not count. A batch's loss is the mean over those that count, the loss of a result the mean over those of all
// its batches, and accuracy is a share of them.

// Bytes of logits that are there at a time, 0: all. Beyond that the output layer and the loss go through the batch in chunks, if the layer is the
// last product of a graph that is not static. Its backward forms a chunk's logits again, so that a batch never has them whole.
static size_t ggml_opt_ids_chunk_size() {
    const char * mib = getenv("GGML_OPT_LOGITS_MIB");
    return (mib ? strtoull(mib, nullptr, 10) : 256) * 1024 * 1024;
}

// rows of a chunk
static int64_t ggml_opt_ids_chunk_rows(ggml_opt_context_t opt_ctx) {
    const ggml_tensor * outputs = opt_ctx->outputs;
    const ggml_cgraph * gf      = opt_ctx->gf;
    const size_t limit          = ggml_opt_ids_chunk_size();
    if (limit == 0 || ggml_nbytes(outputs) <= limit || opt_ctx->static_graphs || outputs->op != GGML_OP_MUL_MAT || !ggml_is_matrix(outputs) ||
        !ggml_is_contiguous(outputs->src[1]) || gf->n_nodes == 0 || gf->nodes[gf->n_nodes - 1] != outputs) {
        return ggml_nrows(outputs);
    }
    const int64_t rows = limit / outputs->nb[1];
    return rows >= 64 ? rows / 64 * 64 : std::max<int64_t>(rows, 1);
}

static void ggml_opt_ids_build(ggml_opt_context_t opt_ctx, ggml_context * ctx_results) {
    ggml_tensor * outputs = opt_ctx->outputs;
    const int64_t nrows   = ggml_nrows(outputs);
    const int64_t chunk   = ggml_opt_ids_chunk_rows(opt_ctx);

    opt_ctx->labels = ggml_new_tensor_2d(ctx_results, GGML_TYPE_I32, 1, nrows);
    ggml_set_input(opt_ctx->labels);
    ggml_set_name(opt_ctx->labels, "labels");
    opt_ctx->loss_per_datapoint = true;
    opt_ctx->chunks.clear();

    ggml_tensor * loss = nullptr;
    if (chunk < nrows) {
        opt_ctx->gf->n_nodes--; // the whole outputs
    }
    for (int64_t first = 0; first < nrows; first += chunk) {
        const int64_t n      = std::min(chunk, nrows - first);
        ggml_tensor * logits = outputs;
        ggml_tensor * labels = ggml_view_1d(ctx_results, opt_ctx->labels, n, first * sizeof(int32_t));
        if (chunk < nrows) {
            ggml_tensor * h = outputs->src[1];
            logits          = ggml_mul_mat(ctx_results, outputs->src[0], ggml_view_2d(ctx_results, h, h->ne[0], n, h->nb[1], first * h->nb[1]));
            memcpy(logits->op_params, outputs->op_params, sizeof(logits->op_params));
            ggml_format_name(logits, "logits-%" PRId64, first);
        }
        ggml_tensor * part = ggml_cross_entropy_loss(ctx_results, logits, labels);
        if (chunk < nrows) {
            part->src[2] = opt_ctx->labels; // of which the mean is
        }
        loss = loss ? ggml_add(ctx_results, loss, part) : part;
        ggml_build_forward_expand(opt_ctx->gf, loss);

        ggml_tensor * pred = ggml_argmax(ctx_results, logits);
        ggml_set_name(pred, "pred");
        ggml_set_output(pred);
        ggml_build_forward_expand(opt_ctx->gf, pred);

        ggml_tensor * ncorrect = ggml_count_equal(ctx_results, pred, labels);
        ggml_set_name(ncorrect, "ncorrect");
        ggml_set_output(ncorrect);
        ggml_build_forward_expand(opt_ctx->gf, ncorrect);
        opt_ctx->chunks.push_back({ pred, ncorrect });
    }
    ggml_set_name(loss, "loss_cross_entropy");
    if (opt_ctx->opt_period > 1) {
        loss = ggml_scale(ctx_results, loss, 1.0f / opt_ctx->opt_period);
        ggml_set_name(loss, "loss_cross_entropy_scaled");
    }
    opt_ctx->loss     = loss;
    opt_ctx->pred     = opt_ctx->chunks.size() == 1 ? opt_ctx->chunks[0].first : nullptr;
    opt_ctx->ncorrect = opt_ctx->chunks.size() == 1 ? opt_ctx->chunks[0].second : nullptr;
}

// predictions and hits of a batch
static void ggml_opt_ids_results(ggml_opt_context_t opt_ctx, ggml_opt_result_t result, int64_t ncounted) {
    result->counted.push_back(ncounted);
    for (const auto & [pred, ncorrect] : opt_ctx->chunks) {
        const size_t n = result->pred.size();
        result->pred.resize(n + ggml_nelements(pred));
        ggml_backend_tensor_get(pred, result->pred.data() + n, 0, ggml_nbytes(pred));
        int64_t hits;
        ggml_backend_tensor_get(ncorrect, &hits, 0, sizeof(hits));
        result->ncorrect += hits;
    }
}

// datapoints of the batch that count, -1 for other losses; refuses the batch if a label is no class
static int64_t ggml_opt_ids_check(ggml_opt_context_t opt_ctx) {
    if (opt_ctx->loss_type != GGML_OPT_LOSS_TYPE_CROSS_ENTROPY_IDS) {
        return -1;
    }
    const int64_t nclasses = opt_ctx->outputs->ne[0];
    std::vector<int32_t> labels(ggml_nelements(opt_ctx->labels));
    ggml_backend_tensor_get(opt_ctx->labels, labels.data(), 0, ggml_nbytes(opt_ctx->labels));
    int64_t ncounted = 0;
    for (size_t i = 0; i < labels.size(); ++i) {
        if (labels[i] < -1 || labels[i] >= nclasses) {
            GGML_ABORT("label %d of datapoint %zu is neither -1 nor one of %" PRId64 " classes", labels[i], i, nclasses);
        }
        ncounted += labels[i] >= 0;
    }
    return ncounted;
}

static void ggml_opt_ids_loss(ggml_opt_result_t result, double * loss, double * unc) {
    const size_t nbatches = result->loss.size();

    int64_t ncounted   = 0;
    double sum         = 0.0;
    double sum_squared = 0.0;
    for (size_t i = 0; i < nbatches; ++i) {
        const double loss_batch = (double) result->loss[i] * result->opt_period;
        ncounted += result->counted[i];
        sum += result->counted[i] * loss_batch;
        sum_squared += result->counted[i] * loss_batch * loss_batch;
    }
    *loss = ncounted > 0 ? sum / ncounted : 0.0;
    if (unc) {
        *unc = ncounted > 0 && nbatches >= 2 ? sqrt(std::max(sum_squared / ncounted - *loss * *loss, 0.0) / (nbatches - 1)) : NAN;
    }
}

static void ggml_opt_ids_accuracy(ggml_opt_result_t result, double * accuracy, double * unc) {
    int64_t ncounted = 0;
    for (const int64_t n : result->counted) {
        ncounted += n;
    }
    *accuracy = result->ncorrect >= 0 && ncounted > 0 ? double(result->ncorrect) / ncounted : NAN;
    if (unc) {
        *unc = ncounted >= 2 ? sqrt(*accuracy * (1.0 - *accuracy) / (ncounted - 1)) : NAN;
    }
}
