// Trains one attention layer through FLASH_ATTN_EXT on the CPU: q from a projection, k and v from F32 parameters through a cast to F32,
// F16 or BF16 and a permutation, grouped heads, a causal mask, sinks. Fails unless the loss falls tenfold.

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-flash-attn-back.h"

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

static constexpr int64_t D   = 32; // head size
static constexpr int64_t H   = 4;  // query heads
static constexpr int64_t HKV = 2;  // KV heads
static constexpr int64_t N   = 8;  // queries
static constexpr int64_t M   = 12; // keys
static constexpr int64_t IN  = 16; // width of the input

static constexpr int STEPS = 100;

static void fill(ggml_tensor * t, std::mt19937 & rng) {
    std::normal_distribution<float> normal(0.0f, 0.5f);
    std::vector<float> values(ggml_nelements(t));
    for (float & value : values) {
        value = normal(rng);
    }
    ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
}

static void fill_causal(ggml_tensor * mask) {
    std::vector<ggml_fp16_t> values(N * M);
    for (int64_t i = 0; i < N; ++i) {
        for (int64_t j = 0; j < M; ++j) {
            values[i * M + j] = ggml_fp32_to_fp16(j <= M - N + i ? 0.0f : -INFINITY);
        }
    }
    ggml_backend_tensor_set(mask, values.data(), 0, ggml_nbytes(mask));
}

static bool train(ggml_type type) {
    ggml_backend_t backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    ggml_context * ctx     = ggml_init({ 1024 * ggml_tensor_overhead() + 2 * ggml_graph_overhead_custom(1024, true), nullptr, true });
    if (!backend || !ctx) {
        printf("no CPU backend\n");
        return false;
    }

    ggml_tensor * x      = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, IN, N);
    ggml_tensor * wq     = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, IN, D * H);
    ggml_tensor * k      = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, D, HKV, M);
    ggml_tensor * v      = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, D, HKV, M);
    ggml_tensor * sinks  = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, H);
    ggml_tensor * mask   = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, M, N);
    ggml_tensor * target = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, D, H, N);
    ggml_tensor * sgd    = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 2); // learning rate, weight decay

    const std::vector<ggml_tensor *> params = { wq, k, v, sinks };
    for (ggml_tensor * param : params) {
        ggml_set_param(param);
    }

    ggml_tensor * q   = ggml_permute(ctx, ggml_reshape_3d(ctx, ggml_mul_mat(ctx, wq, x), D, H, N), 0, 2, 1, 3);
    ggml_tensor * kt  = ggml_permute(ctx, ggml_cast(ctx, k, type), 0, 2, 1, 3);
    ggml_tensor * vt  = ggml_permute(ctx, ggml_cast(ctx, v, type), 0, 2, 1, 3);
    ggml_tensor * out = ggml_flash_attn_ext(ctx, q, kt, vt, mask, 1.0f / sqrtf(D), 0.0f, 0.0f);
    ggml_flash_attn_ext_add_sinks(out, sinks);
    ggml_tensor * loss = ggml_sum(ctx, ggml_sqr(ctx, ggml_sub(ctx, out, target)));
    ggml_set_loss(loss);

    ggml_cgraph * graph = ggml_new_graph_custom(ctx, 1024, true);
    ggml_build_forward_expand(graph, loss);
    ggml_build_backward_expand(ctx, graph, nullptr);
    for (ggml_tensor * param : params) {
        ggml_build_forward_expand(graph, ggml_opt_step_sgd(ctx, param, ggml_graph_get_grad(graph, param), sgd));
    }

    int n_back = 0;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        n_back += ggml_graph_node(graph, i)->op == GGML_OP_FLASH_ATTN_BACK;
    }
    if (n_back != 1) {
        printf("%d FLASH_ATTN_BACK nodes\n", n_back);
        return false;
    }

    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    std::mt19937 rng(1);
    for (ggml_tensor * t : { x, wq, k, v, sinks }) {
        fill(t, rng);
    }
    fill_causal(mask);

    // what the layer computes from other keys, values and sinks: a target that it can reach
    ggml_backend_tensor_memset(target, 0, 0, ggml_nbytes(target));
    std::vector<float> reachable(ggml_nelements(target));
    const float frozen[2] = { 0.0f, 0.0f };
    ggml_backend_tensor_set(sgd, frozen, 0, sizeof(frozen));
    ggml_graph_reset(graph);
    ggml_backend_graph_compute(backend, graph);
    ggml_backend_tensor_get(out, reachable.data(), 0, ggml_nbytes(out));
    ggml_backend_tensor_set(target, reachable.data(), 0, ggml_nbytes(target));
    for (ggml_tensor * t : { k, v, sinks }) {
        fill(t, rng);
    }

    const float rates[2] = { 0.05f, 0.0f };
    ggml_backend_tensor_set(sgd, rates, 0, sizeof(rates));
    float first = 0.0f, last = 0.0f;
    for (int step = 0; step < STEPS; ++step) {
        ggml_graph_reset(graph);
        if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
            printf("step %d failed\n", step);
            return false;
        }
        ggml_backend_tensor_get(loss, &last, 0, sizeof(last));
        first = step == 0 ? last : first;
    }
    printf("%s: loss %g before step 1, %g before step %d\n", ggml_type_name(type), first, last, STEPS);

    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    ggml_backend_free(backend);
    return last < first / 10;
}

int main() {
    printf("source %s\n", ggml_flash_attn_back_source());
    const bool f32 = train(GGML_TYPE_F32), f16 = train(GGML_TYPE_F16), bf16 = train(GGML_TYPE_BF16);
    return f32 && f16 && bf16 ? 0 : 1;
}
