// Memory of an optimizer whose parameters lie on several devices, in ggml-opt.cpp, which includes this behind its structs: accumulators of
// gradients and momenta lie beside their parameter. An optimizer step runs where the parameter is; of what lies elsewhere the scheduler makes it a
// copy, and what is written there is lost.

// a buffer type for what belongs to a parameter, NULL where the parameter has no memory yet
static ggml_backend_buffer_type_t ggml_opt_state_buft(const ggml_tensor * param) {
    const ggml_backend_buffer_t buffer = param->view_src ? param->view_src->buffer : param->buffer;
    if (!buffer) {
        return nullptr;
    }
    ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(buffer);
    return ggml_backend_buft_is_host(buft) ? ggml_backend_cpu_buffer_type() : buft; // the host's memory may be mapped or pinned
}

// the context of a node's accumulator and momenta; that of the scheduler's first backend where the node is no parameter
static ggml_context * ggml_opt_state_ctx(ggml_opt_context_t opt_ctx, const ggml_tensor * node) {
    ggml_backend_buffer_type_t buft = node->flags & GGML_TENSOR_FLAG_PARAM ? ggml_opt_state_buft(node) : nullptr;
    if (!buft) {
        return opt_ctx->ctx_static;
    }
    ggml_context_ptr & ctx = opt_ctx->states[buft].ctx;
    if (!ctx) {
        ctx.reset(ggml_init({ ggml_get_mem_size(opt_ctx->ctx_static), nullptr, /*no_alloc =*/true })); // as large as if all were here
    }
    return ctx.get();
}

// allocates what the contexts hold; returns the buffer of ctx_static
static ggml_backend_buffer_t ggml_opt_alloc_static(ggml_opt_context_t opt_ctx) {
    for (auto & [buft, state] : opt_ctx->states) {
        state.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(state.ctx.get(), buft));
        if (!state.buffer) {
            GGML_ABORT("no memory for the optimizer's state: %zu MiB of %s", ggml_backend_alloc_ctx_tensors_from_buft_size(state.ctx.get(), buft) >> 20,
                ggml_backend_buft_name(buft));
        }
    }
    return ggml_backend_alloc_ctx_tensors(opt_ctx->ctx_static, ggml_backend_sched_get_backend(opt_ctx->backend_sched, 0));
}
