// GGML_OPT_LOSS_TYPE_CROSS_ENTROPY_IDS in ggml-opt.cpp, which includes this behind its structs: labels are I32 [1, ndata_batch], the class of each
// datapoint, or -1 for one that does not count. A batch's loss is the mean over those that count, the loss of a result the mean over those of all
// its batches, and accuracy is a share of them.

static void ggml_opt_ids_build_loss(ggml_opt_context_t opt_ctx, ggml_context * ctx_results) {
    opt_ctx->labels = ggml_new_tensor_2d(ctx_results, GGML_TYPE_I32, 1, ggml_nrows(opt_ctx->outputs));
    ggml_set_input(opt_ctx->labels);
    ggml_set_name(opt_ctx->labels, "labels");
    opt_ctx->loss = ggml_cross_entropy_loss(ctx_results, opt_ctx->outputs, opt_ctx->labels);
    ggml_set_name(opt_ctx->loss, "loss_cross_entropy");
    if (opt_ctx->opt_period > 1) {
        opt_ctx->loss = ggml_scale(ctx_results, opt_ctx->loss, 1.0f / opt_ctx->opt_period);
        ggml_set_name(opt_ctx->loss, "loss_cross_entropy_scaled");
    }
    opt_ctx->loss_per_datapoint = true;
}

static void ggml_opt_ids_build_results(ggml_opt_context_t opt_ctx, ggml_context * ctx_results) {
    opt_ctx->pred = ggml_argmax(ctx_results, opt_ctx->outputs);
    ggml_set_name(opt_ctx->pred, "pred");
    ggml_set_output(opt_ctx->pred);
    ggml_build_forward_expand(opt_ctx->gf, opt_ctx->pred);

    opt_ctx->ncorrect = ggml_count_equal(ctx_results, opt_ctx->pred, ggml_reshape_1d(ctx_results, opt_ctx->labels, ggml_nelements(opt_ctx->labels)));
    ggml_set_name(opt_ctx->ncorrect, "ncorrect");
    ggml_set_output(opt_ctx->ncorrect);
    ggml_build_forward_expand(opt_ctx->gf, opt_ctx->ncorrect);
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
