// Graphs that are not static, in ggml-opt.cpp, which includes this behind its structs: those of the last evaluation serve again, with their
// allocation, where ggml_opt_alloc_again() is called. Otherwise they are forgotten, as if they had not been kept.

static void ggml_opt_keep(ggml_opt_context_t opt_ctx) {
    opt_ctx->kept.gf             = opt_ctx->gf;
    opt_ctx->kept.gb_grad        = opt_ctx->gb_grad;
    opt_ctx->kept.gb_opt         = opt_ctx->gb_opt;
    opt_ctx->kept.allocated      = opt_ctx->allocated_graph;
    opt_ctx->kept.allocated_copy = opt_ctx->allocated_graph_copy;
}

bool ggml_opt_alloc_again(ggml_opt_context_t opt_ctx, bool backward) {
    GGML_ASSERT(!opt_ctx->eval_ready);
    // with gradient accumulation graphs differ from one evaluation to the next
    const auto & kept = opt_ctx->kept;
    if (opt_ctx->static_graphs || opt_ctx->opt_period != 1 || !kept.allocated || kept.allocated != (backward ? kept.gb_opt : kept.gf)) {
        return false;
    }
    opt_ctx->gf                   = kept.gf;
    opt_ctx->gb_grad              = kept.gb_grad;
    opt_ctx->gb_opt               = kept.gb_opt;
    opt_ctx->allocated_graph      = kept.allocated;
    opt_ctx->allocated_graph_copy = kept.allocated_copy;
    opt_ctx->eval_ready           = true;
    return true;
}
