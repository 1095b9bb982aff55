// The CPU backend on small nodes with data, strides and parameters of any kind. What its gate takes runs without touching a byte
// outside the tensors, writes every byte of every part, gives the same bits for any number of threads, and, on moderate values,
// agrees with the formulas of ggml-flash-attn-back.h in double precision.

#include "fuzz.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

static ggml_backend_flash_attn_back_refusal_t cpu_refusal;

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    ggml_cpu_init();
    cpu_refusal = (ggml_backend_flash_attn_back_refusal_t) ggml_backend_reg_get_proc_address(
        ggml_backend_cpu_reg(), "ggml_backend_flash_attn_back_refusal");
    CHECK(cpu_refusal);
    return 0;
}

// a tensor whose memory ends where its last element does
struct tensor : ggml_tensor {
    std::unique_ptr<char[]> memory;
    bool whole    = true; // strides are whole elements
    bool distinct = true; // no two elements share memory

    bool empty() const { return std::count(ne, ne + GGML_MAX_DIMS, 0) > 0; }

    char * row(int64_t i1, int64_t i2, int64_t i3) const { return (char *) data + i1 * nb[1] + i2 * nb[2] + i3 * nb[3]; }

    // calls f(row) for every row
    template <typename F>
    void rows(const F & f) const {
        for (int64_t i = 0; !empty() && i < ne[1] * ne[2] * ne[3]; ++i) {
            f(row(i % ne[1], i / ne[1] % ne[2], i / ne[1] / ne[2]));
        }
    }

    double at(int64_t i0, int64_t i1, int64_t i2, int64_t i3) const {
        float x;
        memcpy(&x, row(i1, i2, i3) + i0 * nb[0], sizeof(x));
        return x;
    }
};

// sizes [ne0, ne1, ne2, ne3]; the outer dimensions in any order, with gaps or repeated; any_stride: components of a row apart
static tensor make(FuzzedDataProvider & in, ggml_type type, std::array<int64_t, 4> ne, bool any_stride) {
    tensor t      = {};
    t.type        = type;
    t.nb[0]       = ggml_type_size(type) * (any_stride ? in.ConsumeIntegralInRange<size_t>(1, 3) : 1);
    size_t stride = ne[0] / ggml_blck_size(type) * t.nb[0];
    int order[]   = { 1, 2, 3 };
    std::swap(order[0], order[in.ConsumeIntegralInRange<int>(0, 2)]);
    std::swap(order[1], order[in.ConsumeIntegralInRange<int>(1, 2)]);
    std::copy(ne.begin(), ne.end(), t.ne);
    for (const int i : order) {
        switch (in.ConsumeIntegralInRange<int>(0, 31)) {
            case 29:
                stride += ggml_type_size(type);
                break;
            case 30:
                stride += in.ConsumeIntegralInRange<size_t>(0, 9);
                break;
            case 31:
                t.distinct = t.distinct && ne[i] <= 1;
                t.nb[i]    = 0;
                continue;
            default:
                break;
        }
        t.nb[i] = stride;
        t.whole = t.whole && stride % ggml_type_size(type) == 0;
        stride *= std::max<int64_t>(ne[i], 1);
    }
    size_t size = 0;
    if (!t.empty()) {
        size = (ne[0] / ggml_blck_size(type) - 1) * t.nb[0] + ggml_type_size(type);
        for (int i = 1; i < GGML_MAX_DIMS; ++i) {
            size += (ne[i] - 1) * t.nb[i];
        }
    }
    t.memory.reset(new char[size]);
    t.data = t.memory.get();
    memset(t.data, 0xff, size); // NaN where nothing may be read
    return t;
}

struct problem {
    std::mt19937 rng;
    bool wild; // any bits
    tensor q, k, v, mask, sinks, o, d;
    bool has_mask, has_sinks, has_o;
    ggml_flash_attn_back_params params;
    int64_t Dk, Dv, N, M, H, Hkv, S, first, count;

    float draw() { return (int32_t) rng() * 0x1p-31f; }

    void fill_f32(const tensor & t) {
        t.rows([&](char * row) {
            for (int64_t c = 0; c < t.ne[0]; ++c) {
                const uint32_t bits = rng();
                const float x       = draw();
                memcpy(row + c * t.nb[0], wild ? (const void *) &bits : &x, sizeof(x));
            }
        });
    }

    void fill_kv(const tensor & t) {
        std::vector<float> x(t.ne[0]);
        std::vector<char> bytes(ggml_row_size(t.type, t.ne[0]));
        t.rows([&](char * row) {
            if (wild) {
                std::generate(bytes.begin(), bytes.end(), [&] { return (char) rng(); });
            } else {
                std::generate(x.begin(), x.end(), [&] { return draw(); });
                ggml_quantize_chunk(t.type, x.data(), bytes.data(), 0, 1, t.ne[0], nullptr);
            }
            memcpy(row, bytes.data(), bytes.size());
        });
    }

    void fill_mask(uint32_t hidden, uint32_t biased) {
        static const uint16_t biases[] = { 0x3800, 0xbc00, 0xc500, 0xfbff, 0x8000 }; // 0.5, -1, -5, -65504, -0
        mask.rows([&](char * row) {
            for (int64_t j = 0; j < M; ++j) {
                uint16_t bits = rng() % 16 < hidden ? 0xfc00 : rng() % 16 < biased ? biases[rng() % 5]
                                                                                   : 0;
                bits          = wild ? (uint16_t) rng() : bits;
                memcpy(row + j * sizeof(bits), &bits, sizeof(bits));
            }
        });
    }

    // s - x, before the softcap; -INFINITY where the mask hides the key
    double bias(int64_t s, int64_t h, int64_t i, int64_t j) const {
        if (!has_mask) {
            return 0.0;
        }
        uint16_t bits;
        memcpy(&bits, mask.row(i, h % mask.ne[2], s % mask.ne[3]) + j * sizeof(bits), sizeof(bits));
        const double n     = std::exp2(std::floor(std::log2((double) H)));
        const double slope = !(params.max_bias > 0.0f) ? 1.0 : h < n ? std::exp2(-params.max_bias / n * (h + 1))
                                                                     : std::exp2(-params.max_bias / 2 / n * (2 * (h - n) + 1));
        return bits == 0xfc00 ? -INFINITY : slope * ggml_fp16_to_fp32(bits);
    }

    bool visible(int64_t s, int64_t g, int64_t j) const {
        for (int64_t h = g * (H / Hkv); h < (g + 1) * (H / Hkv); ++h) {
            for (int64_t i = 0; i < N; ++i) {
                if (bias(s, h, i, j) > -INFINITY) {
                    return true;
                }
            }
        }
        return false;
    }

    // keys that no row sees may hold anything
    void poison() {
        for (const tensor * t : { &k, &v }) {
            for (int64_t r = 0; t->distinct && r < M * Hkv * S; ++r) {
                if (!visible(r / M / Hkv, r / M % Hkv, r % M)) {
                    memset(t->row(r % M, r / M % Hkv, r / M / Hkv), 0xff, ggml_row_size(t->type, t->ne[0]));
                }
            }
        }
    }
};

static std::vector<double> dequantize(const tensor & t, int64_t j, int64_t g, int64_t s) {
    std::vector<char> row(t.row(j, g, s), t.row(j, g, s) + ggml_row_size(t.type, t.ne[0])); // aligned
    std::vector<float> x(t.ne[0]);
    if (t.type == GGML_TYPE_F32) {
        std::copy_n((const float *) row.data(), x.size(), x.begin());
    } else {
        ggml_get_type_traits(t.type)->to_float(row.data(), x.data(), t.ne[0]);
    }
    return { x.begin(), x.end() };
}

// What F32 may be off by: an operation by U of its result, exp by 2 ulp, and what follows from that to the first order; 1 % more for the rest.
constexpr double U   = 0x1p-24;
constexpr double EXP = 4 * U;

struct sum {
    double value  = 0.0;
    double size   = 0.0; // of its terms' magnitudes
    double error  = 0.0; // of what its terms are off by
    int64_t terms = 0;

    void add(double x, double e = 0.0) {
        value += x;
        size += std::fabs(x);
        error += e;
        terms += 1;
    }

    // a rounding for each term, and of a term: its product, the scale, and its part of the sum in two chunks of keys
    double tolerance() const { return 1.01 * (error + (terms + 4) * U * size) + 1e-30; }
};

struct gradients {
    std::vector<sum> part[GGML_FLASH_ATTN_BACK_PART_COUNT];
};

static gradients reference(const problem & p) {
    gradients out;
    const int64_t W   = p.count;
    const int64_t n[] = { p.Dk * p.N * p.H * p.S, p.Dk * W * p.Hkv * p.S, p.Dv * W * p.Hkv * p.S, p.N * p.H * p.S, p.N * p.H * p.S, p.H };
    for (int i = 0; i < GGML_FLASH_ATTN_BACK_PART_COUNT; ++i) {
        out.part[i].resize(n[i]);
    }
    std::vector<std::vector<double>> k(p.M), v(p.M);
    for (int64_t sg = 0; sg < p.S * p.Hkv; ++sg) {
        const int64_t s = sg / p.Hkv, g = sg % p.Hkv;
        for (int64_t j = 0; j < p.M; ++j) {
            k[j] = dequantize(p.k, j, g, s);
            v[j] = dequantize(p.v, j, g, s);
        }
        for (int64_t hi = 0; hi < p.H / p.Hkv * p.N; ++hi) {
            const int64_t h = g * (p.H / p.Hkv) + hi / p.N, i = hi % p.N;
            const int64_t r   = (s * p.H + h) * p.N + i;
            const double c    = p.params.logit_softcap;
            const double sink = p.has_sinks ? p.sinks.at(h, 0, 0, 0) : -INFINITY;
            double least = INFINITY, most = -INFINITY; // biases
            for (int64_t j = 0; j < p.M; ++j) {
                const double b = p.bias(s, h, i, j);
                least          = std::min(least, b == -INFINITY ? least : b);
                most           = std::max(most, b);
            }
            // a bias that all keys share may be left out of the scores
            const double shared = most > sink ? std::fabs(most) : 0.0;
            const double shift  = least == most && !p.has_sinks ? 0.0 : std::fabs(most);

            // scores, the derivative of the softcap, and what they are off by: absolute, relative
            std::vector<double> score(p.M, -INFINITY), score_error(p.M), so_far(p.M), dtanh(p.M, 1.0), dtanh_error(p.M);
            std::vector<sum> dp(p.M);
            double max = -INFINITY;
            for (int64_t j = 0; j < p.M; ++j) {
                const double b = p.bias(s, h, i, j);
                so_far[j]      = max;
                if (b == -INFINITY) {
                    continue;
                }
                sum qk;
                for (int64_t e = 0; e < p.Dk; ++e) {
                    qk.add(p.params.scale * p.q.at(e, i, h, s) * k[j][e]);
                }
                for (int64_t e = 0; e < p.Dv; ++e) {
                    dp[j].add(p.d.at(e, h, i, s) * v[j][e]);
                }
                double x     = qk.value;
                double error = qk.tolerance();
                if (c != 0.0) {
                    const double t = std::tanh(x / c);
                    dtanh[j]       = 1.0 / std::pow(std::cosh(x / c), 2);
                    dtanh_error[j] = 2 * std::fabs(t / c) * (error + 2 * U * std::fabs(x)) + EXP + 4 * U;
                    error          = dtanh[j] * (error + 2 * U * std::fabs(x)) + std::fabs(c * t) * (2 * EXP + 4 * U);
                    x              = c * t;
                }
                score[j]       = x + b;
                score_error[j] = error + U * (std::fabs(x) + 5 * (most - b) + 4 * shift);
                max            = std::max(max, score[j]);
                so_far[j]      = max;
            }
            const double max_key = max;
            max                  = std::max(max, sink);
            if (max == -INFINITY) {
                out.part[GGML_FLASH_ATTN_BACK_LSE][r].value = -INFINITY;
                continue;
            }
            double l = std::exp(sink - max);
            for (int64_t j = 0; j < p.M; ++j) {
                l += std::exp(score[j] - max);
            }
            const double lse    = max + std::log(l);
            const double p_sink = std::exp(sink - lse);
            std::vector<double> P(p.M), P_error(p.M), sum_error(p.M); // errors of exp(score - max), and of it in a sum, relative
            double l_error = p_sink > 0.0 ? p_sink * U * (std::fabs(sink) + shared) : 0.0;
            double rescale = 0.0; // every new maximum multiplies the sums so far
            for (int64_t j = p.M - 1; j >= 0; --j) {
                rescale += j + 1 < p.M && so_far[j] < so_far[j + 1] ? EXP : 0.0;
                P[j] = std::exp(score[j] - lse);
                if (P[j] > 0.0) {
                    P_error[j]   = score_error[j] + U * (max - score[j]) + EXP;
                    sum_error[j] = P_error[j] + rescale + U * (max_key - so_far[j]);
                    l_error += P[j] * sum_error[j];
                }
            }
            sum D;
            for (int64_t e = 0; e < p.Dv && p.has_o && max_key > -INFINITY; ++e) {
                D.value += p.d.at(e, h, i, s) * p.o.at(e, h, i, s);
            }
            for (int64_t j = 0; j < p.M && !p.has_o; ++j) {
                D.value += P[j] * dp[j].value;
                D.error += P[j] * (std::fabs(dp[j].value) * (sum_error[j] + 2 * U) + dp[j].tolerance());
            }
            D.error += std::fabs(D.value) * ((p.has_o ? 0.0 : l_error) + 2 * U);
            const double lse_error = l_error + 4 * U * (std::fabs(lse) + shared);

            out.part[GGML_FLASH_ATTN_BACK_LSE][r].add(lse, lse_error);
            out.part[GGML_FLASH_ATTN_BACK_D][r] = D;
            out.part[GGML_FLASH_ATTN_BACK_DSINKS][h].add(-p_sink * D.value, p_sink * (std::fabs(D.value) * lse_error + D.tolerance()));
            for (int64_t j = 0; j < p.M; ++j) {
                if (P[j] == 0.0) {
                    continue;
                }
                const double error      = P_error[j] + l_error + 2 * U;
                const double dp_D       = dp[j].value - D.value;
                const double dp_D_error = dp[j].tolerance() + D.tolerance() + std::fabs(dp_D) * (error + dtanh_error[j] + 3 * U);
                const double ds         = p.params.scale * P[j] * dtanh[j];
                const int64_t w         = j - p.first;
                const bool in           = w >= 0 && w < W;
                for (int64_t e = 0; e < p.Dk; ++e) {
                    const double x = p.q.at(e, i, h, s);
                    out.part[GGML_FLASH_ATTN_BACK_DQ][r * p.Dk + e].add(ds * dp_D * k[j][e], std::fabs(ds * k[j][e]) * dp_D_error);
                    if (in) {
                        out.part[GGML_FLASH_ATTN_BACK_DK][(sg * W + w) * p.Dk + e].add(ds * dp_D * x, std::fabs(ds * x) * dp_D_error);
                    }
                }
                for (int64_t e = 0; e < p.Dv && in; ++e) {
                    const double x = p.d.at(e, h, i, s);
                    out.part[GGML_FLASH_ATTN_BACK_DV][(sg * W + w) * p.Dv + e].add(P[j] * x, std::fabs(P[j] * x) * error);
                }
            }
        }
    }
    return out;
}

static std::unique_ptr<char[]> run(ggml_context * ctx, ggml_tensor * back, int n_threads, uint8_t garbage) {
    std::unique_ptr<char[]> result(new char[ggml_nbytes(back)]);
    memset(result.get(), garbage, ggml_nbytes(back));
    back->data          = result.get();
    ggml_cgraph * graph = ggml_new_graph_custom(ctx, 16, false);
    ggml_build_forward_expand(graph, back);
    ggml_cplan cplan = ggml_graph_plan(graph, n_threads, nullptr);
    std::unique_ptr<uint8_t[]> work(new uint8_t[cplan.work_size]);
    memset(work.get(), garbage, cplan.work_size);
    cplan.work_data = work.get();
    CHECK(ggml_graph_compute(graph, &cplan) == GGML_STATUS_SUCCESS);
    return result;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    FuzzedDataProvider in(data, size);

    static const ggml_type types[] = { GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_Q4_0,
        GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_MXFP4, GGML_TYPE_Q4_K };
    const ggml_type type_k         = pick(in, types);
    const ggml_type type_v         = pick(in, types);
    const auto head_size           = [&](ggml_type type) {
        const int64_t block = ggml_blck_size(type);
        return block * in.ConsumeIntegralInRange<int64_t>(block == 1 ? 0 : 1, block == 1 ? 40 : 64 / std::min<int64_t>(block, 64));
    };

    problem p         = {};
    p.Dk              = head_size(type_k);
    p.Dv              = head_size(type_v);
    p.N               = in.ConsumeIntegralInRange<int64_t>(0, in.ConsumeIntegralInRange<int>(0, 7) == 7 ? 140 : 12);
    p.M               = in.ConsumeIntegralInRange<int64_t>(0, in.ConsumeIntegralInRange<int>(0, 7) == 7 ? 300 : 40);
    p.Hkv             = in.ConsumeIntegralInRange<int64_t>(1, 3);
    p.H               = p.Hkv * in.ConsumeIntegralInRange<int64_t>(0, 3);
    p.S               = in.ConsumeIntegralInRange<int64_t>(0, 2);
    const int large   = in.ConsumeIntegralInRange<int>(0, 63);
    const bool blocks = ggml_blck_size(type_k) * ggml_blck_size(type_v) > 1;
    if (large == 63) { // keys in more than one chunk
        p.Dk = p.Dv = blocks ? 256 : 2;
        p.M         = in.ConsumeIntegralInRange<int64_t>(9000, 9400);
        p.N         = std::min<int64_t>(p.N, 1);
    } else if (large == 62 && !blocks) { // rows in more than one block
        p.Dk = p.Dv = 1;
        p.M         = std::min<int64_t>(p.M, 8);
        p.N         = in.ConsumeIntegralInRange<int64_t>(42000, 44000);
    }
    if (p.N * p.M * p.H * p.S * (p.Dk + p.Dv) > 4 << 20) {
        return -1;
    }

    p.wild      = in.ConsumeIntegralInRange<int>(0, 3) == 3;
    p.has_mask  = in.ConsumeIntegralInRange<int>(0, 3) < 3;
    p.has_sinks = in.ConsumeBool();
    p.has_o     = in.ConsumeBool();
    p.rng.seed(in.ConsumeIntegral<uint32_t>());

    p.q     = make(in, GGML_TYPE_F32, { p.Dk, p.N, p.H, p.S }, true);
    p.k     = make(in, type_k, { p.Dk, p.M, p.Hkv, p.S }, false);
    p.v     = make(in, type_v, { p.Dv, p.M, p.Hkv, p.S }, false);
    p.d     = make(in, GGML_TYPE_F32, { p.Dv, p.H, p.N, p.S }, true);
    p.o     = make(in, GGML_TYPE_F32, { p.Dv, p.H, p.N, p.S }, true);
    p.sinks = make(in, GGML_TYPE_F32, { p.H, 1, 1, 1 }, false);
    p.mask  = make(in, GGML_TYPE_F16, { p.M, p.N + in.ConsumeIntegralInRange<int64_t>(0, 3), in.ConsumeBool() && p.H ? p.H : 1, in.ConsumeBool() && p.S ? p.S : 1 }, false);
    for (const tensor * t : { &p.q, &p.d, &p.o, &p.sinks }) {
        p.fill_f32(*t);
    }
    p.fill_kv(p.k);
    p.fill_kv(p.v);
    p.fill_mask(in.ConsumeIntegralInRange<int>(0, 16), in.ConsumeIntegralInRange<int>(0, 16));
    p.poison();

    static const float scales[]   = { 0.25f, 0.0625f, -0.125f };
    static const float softcaps[] = { 0.0f, 0.0f, 1.0f, -10.0f };
    p.params.scale                = p.wild ? in.ConsumeFloatingPoint<float>() : pick(in, scales);
    p.params.logit_softcap        = p.wild ? in.ConsumeFloatingPoint<float>() : pick(in, softcaps);
    p.params.max_bias             = p.has_mask && in.ConsumeBool() ? (p.wild ? in.ConsumeFloatingPoint<float>() : 8.0f) : 0.0f;
    p.params.grads                = in.ConsumeIntegral<uint8_t>() & 7;
    p.params.grads |= (uint32_t) (p.has_sinks && in.ConsumeBool()) << GGML_FLASH_ATTN_BACK_DSINKS;
    p.count = p.M;
    if (p.M > 0 && in.ConsumeBool()) {
        p.first = p.params.kv_first = in.ConsumeIntegralInRange<int64_t>(0, p.M - 1);
        p.count = p.params.kv_count = in.ConsumeIntegralInRange<int64_t>(1, p.M - p.first);
    }

    static uint8_t memory[64 * 1024];
    ggml_context * ctx = ggml_init({ sizeof(memory), memory, /*.no_alloc =*/true });
    ggml_tensor * back = ggml_flash_attn_back(
        ctx, &p.q, &p.k, &p.v, p.has_mask ? &p.mask : nullptr, p.has_sinks ? &p.sinks : nullptr, p.has_o ? &p.o : nullptr, &p.d, p.params);

    const char * why = cpu_refusal(ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0), back);
    const bool whole = p.sinks.whole && p.q.whole && p.k.whole && p.v.whole && p.d.whole && (!p.has_mask || p.mask.whole) && (!p.has_o || p.o.whole);
    CHECK(!why || !whole);
    if (!why) {
        const auto one  = run(ctx, back, 1, 0xaa);
        const auto many = run(ctx, back, in.ConsumeIntegralInRange<int>(0, 31) == 31 ? 2 : 1, 0x55);
        const auto want = p.wild ? gradients{} : reference(p);
        for (int i = 0; i < GGML_FLASH_ATTN_BACK_PART_COUNT; ++i) {
            const auto part = (ggml_flash_attn_back_part) i;
            if (!ggml_flash_attn_back_has(back, part)) {
                continue;
            }
            const size_t offset      = ggml_flash_attn_back_offset(back, part);
            const ggml_tensor * view = ggml_flash_attn_back_view(ctx, back, part);
            CHECK(memcmp(one.get() + offset, many.get() + offset, ggml_nbytes(view)) == 0);
            const float * got = (const float *) (one.get() + offset);
            for (size_t e = 0; e < want.part[i].size(); ++e) {
                const sum & w = want.part[i][e];
                if (!(got[e] == w.value || std::fabs(got[e] - w.value) <= w.tolerance())) {
                    fprintf(stderr, "part %d, element %zu: got %.9g, want %.9g, may be off by %.9g\n", i, e, got[e], w.value, w.tolerance());
                    abort();
                }
            }
        }
    }
    ggml_free(ctx);
    return 0;
}
