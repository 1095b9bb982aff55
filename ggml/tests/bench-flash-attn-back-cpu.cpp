// FLASH_ATTN_BACK on the CPU against its two bars: ggml's own F32 MUL_MAT on the same cores, in GFLOP/s, and the backward of the unfused
// attention, in time. One thread count after the other; within one the four measurements take turns, and every figure is a median.
//
//     bench-flash-attn-back-cpu [repeats (9)] [threads ... (1 2)]
//
// Work of FLASH_ATTN_BACK: five products, 2*D FLOP each, over the pairs that the mask leaves, for every query head.
// The unfused backward: the nodes that ggml_build_backward_expand makes for MUL_MAT, SOFT_MAX with the mask, MUL_MAT with F32 K and V
// (V transposed already), and the first MUL_MAT and the SOFT_MAX themselves, since it needs P and FLASH_ATTN_BACK finds P too.

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-flash-attn-back.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

static constexpr int64_t D   = 128;
static constexpr int64_t H   = 8;
static constexpr int64_t Hkv = 2;
static constexpr int64_t N   = 512;
static constexpr int64_t M   = 4096;

static constexpr int64_t SQUARE = 2048;

struct timed_graph {
    ggml_cgraph * graph;
    std::vector<double> seconds;
};

static ggml_context * new_context() {
    ggml_init_params params = { ggml_tensor_overhead() * 256 + 8 * ggml_graph_overhead_custom(256, true), nullptr, /*.no_alloc =*/true };
    return ggml_init(params);
}

static void fill(ggml_tensor * t) {
    static std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    std::vector<float> x(ggml_nelements(t));
    for (float & xi : x) {
        xi = normal(rng);
    }
    if (t->type == GGML_TYPE_F32) {
        ggml_backend_tensor_set(t, x.data(), 0, ggml_nbytes(t));
    } else {
        std::vector<ggml_fp16_t> x16(x.size());
        ggml_fp32_to_fp16_row(x.data(), x16.data(), x.size());
        ggml_backend_tensor_set(t, x16.data(), 0, ggml_nbytes(t));
    }
}

// row i sees the keys up to M - N + i
static void fill_causal(ggml_tensor * mask) {
    std::vector<ggml_fp16_t> x(N * M, ggml_fp32_to_fp16(0.0f));
    for (int64_t i = 0; i < N; ++i) {
        std::fill(x.begin() + i * M + M - N + i + 1, x.begin() + (i + 1) * M, ggml_fp32_to_fp16(-INFINITY));
    }
    ggml_backend_tensor_set(mask, x.data(), 0, ggml_nbytes(mask));
}

static ggml_cgraph * mul_mat_graph(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b) {
    ggml_cgraph * graph = ggml_new_graph_custom(ctx, 16, false);
    ggml_build_forward_expand(graph, ggml_mul_mat(ctx, a, b));
    return graph;
}

// the nodes that the unfused backward needs, and the bytes of those results that are as large as the scores
static ggml_cgraph * unfused_graph(
    ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * vt, ggml_tensor * mask, ggml_tensor * d, size_t * score_bytes) {
    for (ggml_tensor * t : { q, k, vt }) {
        ggml_set_param(t);
    }
    ggml_tensor * s    = ggml_mul_mat(ctx, k, q);
    ggml_tensor * p    = ggml_soft_max_ext(ctx, s, mask, 1.0f / sqrtf(D), 0.0f);
    ggml_tensor * o    = ggml_mul_mat(ctx, vt, p);
    ggml_tensor * od   = ggml_mul(ctx, o, d);
    ggml_tensor * loss = ggml_sum(ctx, od);
    ggml_set_loss(loss);

    ggml_cgraph * all = ggml_new_graph_custom(ctx, 256, true);
    ggml_build_forward_expand(all, loss);
    ggml_build_backward_expand(ctx, all, nullptr);

    ggml_cgraph * graph = ggml_new_graph_custom(ctx, 256, false);
    *score_bytes        = 0;
    for (int i = 0; i < ggml_graph_n_nodes(all); ++i) {
        ggml_tensor * node = ggml_graph_node(all, i);
        if (node == o || node == od || node == loss) {
            continue;
        }
        ggml_graph_add_node(graph, node);
        if (!node->view_src && ggml_nelements(node) >= N * M * H) {
            *score_bytes += ggml_nbytes(node);
        }
    }
    return graph;
}

static double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

// (largest - smallest)/median, the measurements' spread
static double spread(const std::vector<double> & x) {
    const auto range = std::minmax_element(x.begin(), x.end());
    return (*range.second - *range.first) / median(x);
}

int main(int argc, char ** argv) {
    const int repeats = argc > 1 ? atoi(argv[1]) : 9;
    std::vector<int> threads;
    for (int i = 2; i < argc; ++i) {
        threads.push_back(atoi(argv[i]));
    }
    if (threads.empty()) {
        threads = { 1, 2 };
    }
    if (repeats < 1 || *std::min_element(threads.begin(), threads.end()) < 1) {
        fprintf(stderr, "usage: %s [repeats] [threads ...]\n", argv[0]);
        return 2;
    }

    ggml_backend_load_all();
    ggml_backend_t backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    if (!backend) {
        fprintf(stderr, "no CPU backend\n");
        return 3;
    }
    const auto set_n_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(ggml_backend_get_device(backend)), "ggml_backend_set_n_threads");

    ggml_context * ctx = new_context();
    ggml_tensor * q    = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, D, N, H);
    ggml_tensor * k    = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, D, M, Hkv);
    ggml_tensor * vt   = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, M, D, Hkv);
    ggml_tensor * k16  = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, D, M, Hkv);
    ggml_tensor * v16  = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, D, M, Hkv);
    ggml_tensor * mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, M, N);
    ggml_tensor * d    = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, D, H, N);
    ggml_tensor * dp   = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, D, N, H); // d as the unfused attention has it
    ggml_tensor * a    = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, SQUARE, SQUARE);
    ggml_tensor * b    = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, SQUARE, SQUARE);

    const uint32_t grads = 1u << GGML_FLASH_ATTN_BACK_DQ | 1u << GGML_FLASH_ATTN_BACK_DK | 1u << GGML_FLASH_ATTN_BACK_DV;
    ggml_tensor * back   = ggml_flash_attn_back(ctx, q, k16, v16, mask, nullptr, nullptr, d, { 1.0f / sqrtf(D), 0.0f, 0.0f, grads, 0, 0 });

    size_t score_bytes  = 0;
    timed_graph scores  = { mul_mat_graph(ctx, k, q), {} };
    timed_graph square  = { mul_mat_graph(ctx, a, b), {} };
    timed_graph fused   = { ggml_new_graph_custom(ctx, 16, false), {} };
    timed_graph unfused = { unfused_graph(ctx, q, k, vt, mask, dp, &score_bytes), {} };
    ggml_build_forward_expand(fused.graph, back);

    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    ggml_backend_buffer_clear(buffer, 0);
    for (ggml_tensor * t : { q, k, vt, k16, v16, d, dp, a, b }) {
        fill(t);
    }
    fill_causal(mask);

    const double pairs       = (double) N * (M - N) + (double) N * (N + 1) / 2;
    const double flop_fused  = 5 * 2.0 * D * pairs * H;
    const double flop_scores = 2.0 * D * N * M * H;
    const double flop_square = 2.0 * SQUARE * SQUARE * SQUARE;

    printf("H%d/Hkv%d D%d N%d M%d, causal tail; K and V F16 (FLASH_ATTN_BACK) and F32 (unfused); median of %d, spread in brackets\n",
        (int) H, (int) Hkv, (int) D, (int) N, (int) M, repeats);
    printf("the unfused backward holds %.0f MiB of results as large as the scores\n\n", score_bytes / 1048576.0);
    printf("| threads | MUL_MAT, scores, GFLOP/s | MUL_MAT, %d^3, GFLOP/s | FLASH_ATTN_BACK, GFLOP/s | of MUL_MAT, scores "
           "| of MUL_MAT, %d^3 "
           "| FLASH_ATTN_BACK, ms | unfused, ms | times faster |\n|---|---|---|---|---|---|---|---|---|\n",
        (int) SQUARE, (int) SQUARE);

    for (const int n_threads : threads) {
        set_n_threads(backend, n_threads);
        for (int r = -1; r < repeats; ++r) { // the first turn warms up
            for (timed_graph * g : { &scores, &square, &fused, &unfused }) {
                const int64_t start = ggml_time_us();
                if (ggml_backend_graph_compute(backend, g->graph) != GGML_STATUS_SUCCESS) {
                    fprintf(stderr, "graph failed\n");
                    return 3;
                }
                const double seconds = (ggml_time_us() - start) * 1e-6;
                if (r < 0) {
                    g->seconds.clear();
                } else {
                    g->seconds.push_back(seconds);
                }
            }
        }
        const double rate_scores = flop_scores / median(scores.seconds);
        const double rate_square = flop_square / median(square.seconds);
        const double rate_fused  = flop_fused / median(fused.seconds);
        printf("| %d | %.1f (%.0f %%) | %.1f (%.0f %%) | %.1f (%.0f %%) | %.2f | %.2f | %.1f | %.1f (%.0f %%) | %.2f |\n", n_threads,
            rate_scores * 1e-9, spread(scores.seconds) * 100, rate_square * 1e-9, spread(square.seconds) * 100,
            rate_fused * 1e-9, spread(fused.seconds) * 100, rate_fused / rate_scores, rate_fused / rate_square,
            median(fused.seconds) * 1e3, median(unfused.seconds) * 1e3, spread(unfused.seconds) * 100,
            median(unfused.seconds) / median(fused.seconds));
    }

    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    ggml_backend_free(backend);
    return 0;
}
