// FLASH_ATTN_BACK in test-backend-ops: included there behind test_flash_attn_ext. Modes test, perf and support take the cases of
// flash-attn-back-cases.def and -perf.def, mode grad those of -grad.def that finite differences in F32 can check.
// A case's error is that of its worst part: NMSE over the whole part and over each head (dSinks, one number a head, as a whole), against the
// limits of -limits.def for the kernel path that the device takes.

#include "ggml-flash-attn-back.h"

#include <functional>
#include <numeric>

#define F32_PATH(name)
#define LIMIT(name, value) static constexpr double flash_attn_back_limit_##name = value;
#include "flash-attn-back-limits.def"
#undef LIMIT
#undef F32_PATH

#define LIMIT(name, value)
#define F32_PATH(name) #name,
static const char * const flash_attn_back_f32_paths[] = {
#include "flash-attn-back-limits.def"
};
#undef F32_PATH
#undef LIMIT

#define FLASH_ATTN_BACK(...) #__VA_ARGS__,
static const char * const flash_attn_back_cases[] = {
#include "flash-attn-back-cases.def"
};
static const char * const flash_attn_back_perf_cases[] = {
#include "flash-attn-back-perf.def"
};
static const char * const flash_attn_back_grad_cases[] = {
#include "flash-attn-back-grad.def"
};
#undef FLASH_ATTN_BACK

// the keys of a case; defaults as in pyharness/case/cases.py
struct flash_attn_back_args {
    const std::string text;

    const int64_t hsk  = integer("hsk", 0);
    const int64_t hsv  = integer("hsv", 0);
    const int64_t nh   = integer("nh", 0);
    const int64_t nhkv = integer("nhkv", 0);
    const int64_t kv   = integer("kv", 0);
    const int64_t nb   = integer("nb", 0);
    const int64_t ns   = integer("ns", 1);

    const ggml_type type_K = type("type_K");
    const ggml_type type_V = type("type_V");

    const std::string mask      = get("mask", "causal");
    const std::string mask_kind = mask.substr(0, mask.find(':'));
    const int64_t mask_width    = mask.find(':') == std::string::npos ? 0 : std::stoll(mask.substr(mask.find(':') + 1));
    const int64_t mh            = integer("mh", 1);
    const int64_t ms            = integer("ms", 1);
    const int64_t mpad          = integer("mpad", 0);

    const float max_bias    = real("max_bias");
    const float softcap     = real("softcap");
    const bool sinks        = integer("sinks", 0) != 0;
    const float scale       = real("scale") != 0.0f ? real("scale") : 1.0f / sqrtf(hsk);
    const std::string grads = get("grads", sinks ? "qkvs" : "qkv");
    const int64_t kv_first  = integer("kv_first", 0);
    const int64_t kv_count  = integer("kv_count", 0);

    const bool o             = integer("o", 0) != 0;
    const bool f32           = get("prec", "default") == "f32";
    const std::string data   = get("data", "normal");
    const std::string layout = get("layout", "cont");
    const bool vview         = integer("vview", 0) != 0;

    explicit flash_attn_back_args(const char * text) :
        text(text) {}

    // captures are files that only pyharness reads
    static bool is_capture(const char * text) {
        return strstr(text, "capture=") != nullptr;
    }

    std::string get(const std::string & key, const std::string & otherwise) const {
        const std::string all = "," + text + ",";
        const size_t pos      = all.find("," + key + "=");
        if (pos == std::string::npos) {
            return otherwise;
        }
        const size_t begin = pos + key.size() + 2;
        return all.substr(begin, all.find(',', begin) - begin);
    }

    int64_t integer(const char * key, int64_t otherwise) const {
        return std::stoll(get(key, std::to_string(otherwise)));
    }

    float real(const char * key) const {
        return std::stof(get(key, "0"));
    }

    ggml_type type(const char * key) const {
        const std::string name = get(key, "f16");
        for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
            const char * known = ggml_type_name((ggml_type) i);
            if (known && name == known) {
                return (ggml_type) i;
            }
        }
        GGML_ABORT("%s: no type %s", text.c_str(), name.c_str());
    }

    bool wants(char letter) const {
        return grads.find(letter) != std::string::npos;
    }

    // the mask [kv, nb + mpad, mh, ms]; every head and sequence has its own, rows beyond nb are NaN
    std::vector<ggml_fp16_t> make_mask(std::mt19937 & rng) const {
        std::uniform_real_distribution<float> uniform;
        std::normal_distribution<float> normal;

        std::vector<ggml_fp16_t> values(kv * (nb + mpad) * mh * ms, ggml_fp32_to_fp16(NAN));
        for (int64_t head = 0; head < mh * ms; ++head) {
            for (int64_t i = 0; i < nb; ++i) {
                const int64_t pos  = kv - nb + i - head;
                const bool no_keys = mask_kind == "rows" && (i == 0 || uniform(rng) < 0.25f);
                for (int64_t j = 0; j < kv; ++j) {
                    bool hidden = j > pos;
                    float value = max_bias > 0.0f ? -fabsf(pos - j) : 0.0f;
                    if (mask_kind == "swa") {
                        hidden = hidden || j <= pos - mask_width;
                    } else if (mask_kind == "docs") {
                        hidden = hidden || j / mask_width != pos / mask_width;
                    } else if (mask_kind == "pad") {
                        hidden = hidden || j >= kv - kv / 4;
                    } else if (mask_kind == "lowest") {
                        hidden = hidden && i != 0;
                        value  = i == 0 ? -65504.0f : 0.0f;
                    } else if (mask_kind == "bias") {
                        hidden = false;
                        value  = max_bias > 0.0f ? value : normal(rng);
                    } else if (mask_kind == "random") {
                        hidden = uniform(rng) < 0.5f;
                    } else if (mask_kind == "rows") {
                        hidden = no_keys || uniform(rng) < 0.3f;
                    }
                    values[(head * (nb + mpad) + i) * kv + j] = ggml_fp32_to_fp16(hidden ? -INFINITY : value);
                }
            }
        }
        return values;
    }

    std::mt19937 make_rng() const {
        return std::mt19937(std::hash<std::string>()(text));
    }

    std::vector<float> draw(std::mt19937 & rng, int64_t n) const {
        std::normal_distribution<float> normal;
        std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);

        const bool is_uniform = data == "uniform";
        std::vector<float> values(n);
        for (float & value : values) {
            value = is_uniform ? uniform(rng) : normal(rng);
        }
        return values;
    }
};

struct test_flash_attn_back : public test_case {
    const flash_attn_back_args a;

    ggml_tensor * q     = nullptr;
    ggml_tensor * k     = nullptr;
    ggml_tensor * v     = nullptr;
    ggml_tensor * mask  = nullptr;
    ggml_tensor * sinks = nullptr;
    ggml_tensor * o     = nullptr;
    ggml_tensor * d     = nullptr;
    ggml_tensor * back  = nullptr;

    uint64_t flops = 0;

    double summed[GGML_FLASH_ATTN_BACK_PART_COUNT] = { 0.0 }; // squared size of what a head's sums add up, 0: they do not cancel

    double limit = flash_attn_back_limit_nmse; // of the kernel path
    bool f32     = false;                      // whether it computes in F32

    // the sources as they count, [rows][ne0]; mode test only
    std::vector<float> vq, vk, vv, vd, vs, vo;
    std::vector<ggml_fp16_t> vm;

    std::vector<double> rounding[GGML_FLASH_ATTN_BACK_PART_COUNT]; // of each head, see find_rounding

    explicit test_flash_attn_back(const char * text) :
        a(text) {}

    std::string vars() override {
        return a.text;
    }

    double max_nmse_err() override {
        return limit;
    }

    // a tensor of the shape ne in one of the layouts that views of it can have
    ggml_tensor * input(ggml_context * ctx, const char * name, ggml_type type, std::array<int64_t, 4> ne, const std::string & layout) {
        ggml_tensor * t = nullptr;
        if (layout == "perm") {
            t = ggml_permute(ctx, ggml_new_tensor_4d(ctx, type, ne[0], ne[2], ne[1], ne[3]), 0, 2, 1, 3);
        } else if (layout == "cache") {
            ggml_tensor * cache = ggml_new_tensor_4d(ctx, type, ne[0], ne[1] + 32, ne[2], ne[3]);
            t                   = ggml_view_4d(ctx, cache, ne[0], ne[1], ne[2], ne[3], cache->nb[1], cache->nb[2], cache->nb[3], 0);
        } else if (layout == "strided") {
            ggml_tensor * wide = ggml_new_tensor_4d(ctx, type, 2 * ne[0], ne[1], ne[2], ne[3]);
            t                  = ggml_view_4d(ctx, wide, ne[0], ne[1], ne[2], ne[3], wide->nb[1], wide->nb[2], wide->nb[3], 0);
            t->nb[0] *= 2;
        } else if (layout == "bcast") {
            t = ggml_view_4d(ctx, ggml_new_tensor_4d(ctx, type, ne[0], ne[1], ne[2], ne[3]), ne[0], ne[1], ne[2], ne[3], 0, 0, 0, 0);
        } else {
            t = ggml_new_tensor_4d(ctx, type, ne[0], ne[1], ne[2], ne[3]);
        }
        ggml_set_name(t, name);
        return t;
    }

    ggml_tensor * build_graph(ggml_context * ctx) override {
        const std::string layout_q  = a.layout == "perm" || a.layout == "strided" ? a.layout : "cont";
        const std::string layout_kv = a.layout == "perm" || a.layout == "cache" ? a.layout : "cont";
        const std::string layout_d  = a.layout == "bcast" || a.layout == "strided" ? a.layout : "cont";

        q = input(ctx, "q", GGML_TYPE_F32, { a.hsk, a.nb, a.nh, a.ns }, layout_q);
        k = input(ctx, "k", a.type_K, { a.hsk, a.kv, a.nhkv, a.ns }, layout_kv);
        v = a.vview ? ggml_view_4d(ctx, k, a.hsv, a.kv, a.nhkv, a.ns, k->nb[1], k->nb[2], k->nb[3], 0) : input(ctx, "v", a.type_V, { a.hsv, a.kv, a.nhkv, a.ns }, layout_kv);
        d = input(ctx, "d", GGML_TYPE_F32, { a.hsv, a.nh, a.nb, a.ns }, layout_d);
        if (a.mask != "none") {
            mask = input(ctx, "mask", GGML_TYPE_F16, { a.kv, a.nb + a.mpad, a.mh, a.ms }, "cont");
        }
        if (a.sinks) {
            sinks = input(ctx, "sinks", GGML_TYPE_F32, { a.nh, 1, 1, 1 }, "cont");
        }
        if (a.o) {
            o = input(ctx, "o", GGML_TYPE_F32, { a.hsv, a.nh, a.nb, a.ns }, "cont");
        }

        ggml_flash_attn_back_params params = { a.scale, a.max_bias, a.softcap, 0, a.kv_first, a.kv_count };
        params.grads |= a.wants('q') ? 1u << GGML_FLASH_ATTN_BACK_DQ : 0;
        params.grads |= a.wants('k') ? 1u << GGML_FLASH_ATTN_BACK_DK : 0;
        params.grads |= a.wants('v') ? 1u << GGML_FLASH_ATTN_BACK_DV : 0;
        params.grads |= a.wants('s') ? 1u << GGML_FLASH_ATTN_BACK_DSINKS : 0;
        back = ggml_flash_attn_back(ctx, q, k, v, mask, sinks, o, d, params);
        ggml_flash_attn_back_set_split(back, a.f32);
        ggml_set_name(back, "out");
        return back;
    }

    // bytes of a tensor's storage: its values at their places, row by row, and NaN where there are none
    static std::vector<uint8_t> store(const ggml_tensor * t, const std::vector<float> & values, const std::vector<bool> & skip = {}) {
        const ggml_tensor * root = t->view_src ? t->view_src : t;
        std::vector<uint8_t> bytes(ggml_nbytes(root), 0xFF); // NaN in every floating point type and in the scales of quantized ones
        const std::vector<float> importance(t->ne[0], 1.0f);
        for (int64_t row = 0; row < ggml_nrows(t); ++row) {
            if (!skip.empty() && skip[row]) {
                continue;
            }
            const int64_t i1  = row % t->ne[1];
            const int64_t i2  = row / t->ne[1] % t->ne[2];
            const int64_t i3  = row / t->ne[1] / t->ne[2];
            uint8_t * dst     = bytes.data() + t->view_offs + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
            const float * src = values.data() + row * t->ne[0];
            if (t->type == GGML_TYPE_F32) {
                for (int64_t i0 = 0; i0 < t->ne[0]; ++i0) {
                    memcpy(dst + i0 * t->nb[0], src + i0, sizeof(float));
                }
            } else {
                ggml_quantize_chunk(t->type, src, dst, 0, 1, t->ne[0], importance.data());
            }
        }
        return bytes;
    }

    // a tensor's values as ggml converts them, [rows][ne0]
    static std::vector<float> load(const ggml_tensor * t, const std::vector<uint8_t> & bytes) {
        std::vector<float> values(ggml_nelements(t));
        for (int64_t row = 0; row < ggml_nrows(t); ++row) {
            const int64_t i1    = row % t->ne[1];
            const int64_t i2    = row / t->ne[1] % t->ne[2];
            const int64_t i3    = row / t->ne[1] / t->ne[2];
            const uint8_t * src = bytes.data() + t->view_offs + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
            float * dst         = values.data() + row * t->ne[0];
            if (t->type == GGML_TYPE_F32) {
                for (int64_t i0 = 0; i0 < t->ne[0]; ++i0) {
                    memcpy(dst + i0, src + i0 * t->nb[0], sizeof(float));
                }
            } else {
                ggml_get_type_traits(t->type)->to_float(src, dst, t->ne[0]);
            }
        }
        return values;
    }

    static void set(ggml_tensor * t, const std::vector<uint8_t> & bytes) {
        ggml_backend_tensor_set(t->view_src ? t->view_src : t, bytes.data(), 0, bytes.size());
    }

    float slope(int64_t h) const {
        if (a.max_bias <= 0.0f) {
            return 1.0f;
        }
        const int64_t n = 1ll << (int) floor(log2((double) a.nh));
        return h < n ? powf(2.0f, -a.max_bias * (h + 1) / n) : powf(2.0f, -a.max_bias / 2.0f * (2 * (h - n) + 1) / n);
    }

    // sum of products, and how much of its square F32 may lose: of each product, and of the sum after each
    struct dot_product {
        double sum     = 0.0;
        double squares = 0.0;

        dot_product(const float * x, const float * y, int64_t n, double factor = 1.0) {
            for (int64_t c = 0; c < n; ++c) {
                const double product = factor * x[c] * y[c];
                sum += product;
                squares += product * product;
            }
            squares = n * (squares + sum * sum);
        }
    };

    // a query of a head and the keys that it sees, in double precision
    struct attention_row {
        int64_t i, h, s, kv_head;

        std::vector<int64_t> keys;
        std::vector<double> p;
        std::vector<double> score;
        std::vector<double> dtanh;   // 1 - tanh^2 of the softcap
        std::vector<double> of_score; // what F32 may lose of the score's square, with the softcap's derivative
        std::vector<double> of_dtanh; // and of that of ln(1 - tanh^2)

        double lse;
    };

    attention_row make_row(int64_t row) const {
        attention_row r = { row % a.nb, row / a.nb % a.nh, row / a.nb / a.nh, 0, {}, {}, {}, {}, {}, {}, 0.0 };
        r.kv_head       = r.s * a.nhkv + r.h / (a.nh / a.nhkv);

        const ggml_fp16_t * bias = vm.empty() ? nullptr : &vm[((r.s % a.ms * a.mh + r.h % a.mh) * (a.nb + a.mpad) + r.i) * a.kv];
        double max               = vs.empty() ? -INFINITY : vs[r.h];
        for (int64_t j = 0; j < a.kv; ++j) {
            const float b = bias ? ggml_fp16_to_fp32(bias[j]) : 0.0f;
            if (b == -INFINITY) {
                continue;
            }
            const dot_product qk(&vq[row * a.hsk], &vk[(r.kv_head * a.kv + j) * a.hsk], a.hsk, a.scale);
            const double t     = a.softcap > 0.0f ? tanh(qk.sum / a.softcap) : 0.0;
            const double dtanh = 1.0 - t * t;
            const double score = (a.softcap > 0.0f ? a.softcap * t : qk.sum) + slope(r.h) * b;
            r.keys.push_back(j);
            r.score.push_back(score);
            r.dtanh.push_back(dtanh);
            r.of_score.push_back(qk.squares * dtanh * dtanh + score * score);
            r.of_dtanh.push_back(a.softcap > 0.0f ? 4.0 * t * t / (a.softcap * a.softcap) * qk.squares : 0.0);
            max = std::max(max, score);
        }
        double total = vs.empty() ? 0.0 : exp(vs[r.h] - max);
        for (const double score : r.score) {
            total += exp(score - max);
        }
        r.lse = total > 0.0 ? max + log(total) : -INFINITY;
        for (const double score : r.score) {
            r.p.push_back(exp(score - r.lse));
        }
        return r;
    }

    // the forward's output [hsv, nh, nb, ns] in double precision
    std::vector<float> forward() const {
        std::vector<float> out(a.hsv * a.nh * a.nb * a.ns);
        for (int64_t row = 0; row < a.nb * a.nh * a.ns; ++row) {
            const attention_row r = make_row(row);
            for (int64_t c = 0; c < a.hsv; ++c) {
                double sum = 0.0;
                for (size_t n = 0; n < r.keys.size(); ++n) {
                    sum += r.p[n] * vv[(r.kv_head * a.kv + r.keys[n]) * a.hsv + c];
                }
                out[((r.s * a.nb + r.i) * a.nh + r.h) * a.hsv + c] = sum;
            }
        }
        return out;
    }

    // squared error that plain F32 arithmetic may make in each head of a part, to first order, as in pyharness/case/reference.py
    void find_rounding() {
        const auto square   = [](double x) { return x * x; };
        const auto length2  = [&](const float * x, int64_t n) { return std::inner_product(x, x + n, x, 0.0); };
        const double unit   = ldexp(1.0, -48);
        const double tiny   = ldexp(1.0, -252);
        const double scale2 = square(a.scale);
        const int64_t group = a.nh / a.nhkv;
        const int64_t end   = a.kv_count > 0 ? a.kv_first + a.kv_count : a.kv;

        rounding[GGML_FLASH_ATTN_BACK_DQ].assign(a.nh * a.ns, a.nb * a.hsk * tiny);
        rounding[GGML_FLASH_ATTN_BACK_DK].assign(a.nhkv * a.ns, (end - a.kv_first) * a.hsk * tiny);
        rounding[GGML_FLASH_ATTN_BACK_DV].assign(a.nhkv * a.ns, (end - a.kv_first) * a.hsv * tiny);
        rounding[GGML_FLASH_ATTN_BACK_LSE].assign(a.nh * a.ns, a.nb * tiny);
        rounding[GGML_FLASH_ATTN_BACK_D].assign(a.nh * a.ns, a.nb * tiny);
        rounding[GGML_FLASH_ATTN_BACK_DSINKS].assign(1, a.nh * tiny);
        for (int64_t row = 0; row < a.nb * a.nh * a.ns; ++row) {
            const attention_row r = make_row(row);
            const float * q_row   = &vq[row * a.hsk];
            const float * d_row   = &vd[((r.s * a.nb + r.i) * a.nh + r.h) * a.hsv];
            if (r.lse == -INFINITY) {
                continue;
            }
            std::vector<dot_product> dp;
            double p_sum = 0.0, p_square = 0.0, pdp_square = 0.0, into_lse = 0.0, d_sum = 0.0, into_d = 0.0;
            for (size_t n = 0; n < r.keys.size(); ++n) {
                dp.emplace_back(d_row, &vv[(r.kv_head * a.kv + r.keys[n]) * a.hsv], a.hsv);
                p_sum += r.p[n];
                p_square += square(r.p[n]);
                pdp_square += square(r.p[n] * dp[n].sum);
                into_lse += r.p[n] * r.of_score[n];
                d_sum += r.p[n] * dp[n].sum;
            }
            for (size_t n = 0; n < r.keys.size(); ++n) {
                into_d += r.p[n] * (dp[n].squares + square(dp[n].sum - d_sum) * r.of_score[n]);
            }
            const double of_lse = p_sum * into_lse + square(r.lse) + a.kv * p_square;
            double of_d         = p_sum * into_d + a.kv * pdp_square;
            if (a.o) {
                const dot_product given(d_row, &vo[((r.s * a.nb + r.i) * a.nh + r.h) * a.hsv], a.hsv);
                of_d = given.squares;
            }
            of_d += square(d_sum);

            double of_dq = 0.0, of_dk = 0.0, of_dv = 0.0, d_into_dq = 0.0;
            for (size_t n = 0; n < r.keys.size(); ++n) {
                const double slope = r.p[n] * r.dtanh[n];
                const double k2    = length2(&vk[(r.kv_head * a.kv + r.keys[n]) * a.hsk], a.hsk);
                const double ds2   = square(slope * (dp[n].sum - d_sum));
                const double of_ds = ds2 * (r.of_score[n] + r.of_dtanh[n] + of_lse) + square(slope) * dp[n].squares;
                of_dq += (of_ds + a.kv * ds2) * k2;
                d_into_dq += slope * sqrt(k2);
                if (r.keys[n] >= a.kv_first && r.keys[n] < end) {
                    of_dk += of_ds + a.nb * group * ds2 + square(slope) * of_d;
                    of_dv += square(r.p[n]) * (r.of_score[n] + of_lse + a.nb * group);
                }
            }
            const int64_t head = r.s * a.nh + r.h;
            rounding[GGML_FLASH_ATTN_BACK_DQ][head] += unit * scale2 * (of_dq + of_d * square(d_into_dq));
            rounding[GGML_FLASH_ATTN_BACK_DK][r.kv_head] += unit * scale2 * length2(q_row, a.hsk) * of_dk;
            rounding[GGML_FLASH_ATTN_BACK_DV][r.kv_head] += unit * length2(d_row, a.hsv) * of_dv;
            rounding[GGML_FLASH_ATTN_BACK_LSE][head] += unit * of_lse;
            rounding[GGML_FLASH_ATTN_BACK_D][head] += unit * of_d;
            if (a.sinks) {
                const double p_sink = exp(vs[r.h] - r.lse);
                rounding[GGML_FLASH_ATTN_BACK_DSINKS][0] += unit * square(p_sink) * (of_d + square(d_sum) * (of_lse + a.nb));
            }
        }
    }

    // whether the device that holds the node computes it in F32
    bool takes_f32_path() const {
        ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(back->buffer)); // none: host memory
        dev                    = dev ? dev : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        const auto path        = (ggml_backend_flash_attn_back_path_t) ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(dev), "ggml_backend_flash_attn_back_path");
        const std::string name = path ? path(dev, back) : "";
        return std::find(std::begin(flash_attn_back_f32_paths), std::end(flash_attn_back_f32_paths), name) != std::end(flash_attn_back_f32_paths);
    }

    void initialize_tensors(ggml_context * ctx) override {
        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t != nullptr; t = ggml_get_next_tensor(ctx, t)) {
            if (!t->view_src && ggml_nbytes(t) > 0) {
                const std::vector<float> poison(ggml_nbytes(t) / sizeof(float), 1e30f); // a part that is not written differs
                ggml_backend_tensor_set(t, poison.data(), 0, poison.size() * sizeof(float));
            }
        }

        f32   = takes_f32_path();
        limit = f32 ? flash_attn_back_limit_f32_nmse : flash_attn_back_limit_nmse;

        std::mt19937 rng = a.make_rng();
        if (mask) {
            vm = a.make_mask(rng);
            ggml_backend_tensor_set(mask, vm.data(), 0, vm.size() * sizeof(ggml_fp16_t));
        }

        // keys that no row sees stay unwritten; what one head's mask hides is counted once, the target has 3.7e9 pairs
        std::vector<bool> unseen(a.kv * a.nhkv * a.ns, mask != nullptr);
        const int64_t window_end = a.kv_count > 0 ? a.kv_first + a.kv_count : a.kv;
        uint64_t pairs           = mask ? 0 : a.nb * a.kv * a.nh * a.ns;
        uint64_t pairs_in_window = mask ? 0 : a.nb * (window_end - a.kv_first) * a.nh * a.ns;
        for (int64_t im = 0; mask && im < a.mh * a.ms; ++im) {
            std::vector<int64_t> seen(a.kv); // by how many rows
            for (int64_t i = 0; i < a.nb; ++i) {
                for (int64_t j = 0; j < a.kv; ++j) {
                    seen[j] += vm[(im * (a.nb + a.mpad) + i) * a.kv + j] != 0xFC00; // -Inf
                }
            }
            for (int64_t head = 0; head < a.nh * a.ns; ++head) {
                const int64_t h = head % a.nh;
                const int64_t s = head / a.nh;
                if (s % a.ms * a.mh + h % a.mh != im) {
                    continue;
                }
                for (int64_t j = 0; j < a.kv; ++j) {
                    if (seen[j] > 0) {
                        unseen[(s * a.nhkv + h / (a.nh / a.nhkv)) * a.kv + j] = false;
                    }
                    pairs += seen[j];
                    pairs_in_window += j >= a.kv_first && j < window_end ? seen[j] : 0;
                }
            }
        }
        flops = 2 * (pairs * (a.hsk + a.hsv + (a.wants('q') ? a.hsk : 0)) + pairs_in_window * ((a.wants('k') ? a.hsk : 0) + (a.wants('v') ? a.hsv : 0)));

        vq = a.draw(rng, ggml_nelements(q));
        vk = a.draw(rng, ggml_nelements(k));
        vv = a.draw(rng, ggml_nelements(v));
        vd = a.draw(rng, ggml_nelements(d));
        vs = a.draw(rng, a.sinks ? a.nh : 0);

        const std::vector<float> mean = a.draw(rng, a.hsk);
        for (size_t i = 0; i < vq.size(); ++i) {
            vq[i] *= a.data == "logits" ? 6.0f : a.data == "outlier" && i % a.hsk < 2 ? 30.0f
                                                                                      : 1.0f;
        }
        for (size_t i = 0; i < vk.size(); ++i) {
            vk[i] *= a.data == "logits" ? 6.0f : a.data == "outlier" && i % a.hsk < 2 ? 10.0f
                                                                                      : 1.0f;
            vk[i] += a.data == "kmean" ? 8.0f * mean[i % a.hsk] : 0.0f;
        }
        for (float & value : vv) {
            value = a.data == "vconst" ? 1.0f + 1e-3f * value : value;
        }
        for (float & value : vd) {
            value *= a.data == "tiny" ? 1e-7f : a.data == "huge" ? 1e4f
                : a.data == "zero"                               ? 0.0f
                                                                 : 1.0f;
        }

        const auto energy = [](const std::vector<float> & x) {
            return std::accumulate(x.begin(), x.end(), 0.0, [](double sum, float value) { return sum + (double) value * value; });
        };
        const double heads = a.nh * a.ns;
        const double q2    = energy(vq) / heads / std::max<int64_t>(a.nb, 1); // a row's
        const double k2    = energy(vk) / a.nhkv / a.ns / a.kv;
        const double v2    = energy(vv) / a.nhkv / a.ns / a.kv;
        const double d2    = energy(vd) / heads; // a head's
        const double scale = (double) a.scale * a.scale;

        summed[GGML_FLASH_ATTN_BACK_DQ] = scale * d2 * v2 * k2;
        summed[GGML_FLASH_ATTN_BACK_DK] = scale * d2 * v2 * q2 * a.nh / a.nhkv;
        summed[GGML_FLASH_ATTN_BACK_D]  = d2 * v2;

        const std::vector<uint8_t> bytes_k = store(k, vk, unseen);
        const std::vector<uint8_t> bytes_v = a.vview ? bytes_k : store(v, vv, unseen);
        const std::vector<uint8_t> bytes_d = store(d, vd);
        set(q, store(q, vq));
        set(k, bytes_k);
        set(v, bytes_v);
        set(d, bytes_d);
        if (sinks) {
            set(sinks, store(sinks, vs));
        }
        if (mode == MODE_TEST) {
            vk = load(k, bytes_k);
            vv = load(v, bytes_v);
            vd = load(d, bytes_d);
            vo = o ? forward() : vo;
        }
        if (o) {
            set(o, store(o, mode == MODE_TEST ? vo : a.draw(rng, ggml_nelements(o)))); // timings do not depend on it
        }
    }

    uint64_t op_flops(ggml_tensor * t) override {
        GGML_UNUSED(t);
        return flops;
    }

    // NMSE; for what fp16 cannot hold where the sums cancel to zero, and what F32 cannot hold, the error in units of its own limit
    double part_nmse(const float * got, const float * want, int64_t n, double size, const std::function<double()> & of_f32) const {
        double error = 0.0, norm = 0.0;
        for (int64_t i = 0; i < n; ++i) {
            if (got[i] != want[i]) { // also equal infinities, the LSE of rows without keys
                error += ((double) got[i] - want[i]) * ((double) got[i] - want[i]);
            }
            norm += std::isinf(want[i]) ? 0.0 : (double) want[i] * want[i];
        }
        if (!f32 && error > 0.0 && norm <= 1e-12 * size) {
            return error / size * (flash_attn_back_limit_nmse / flash_attn_back_limit_zero);
        }
        if (error > limit / 10.0 * norm) {
            norm += flash_attn_back_limit_rounding / limit * of_f32();
        }
        return error == 0.0 ? 0.0 : error / norm;
    }

    double err(const float * got, const float * want, size_t n) override {
        if (n != (size_t) ggml_nelements(back)) {
            return nmse(got, want, n); // a sentinel
        }
        const int64_t kv_count = a.kv_count > 0 ? a.kv_count : a.kv;
        const struct {
            ggml_flash_attn_back_part part;
            int64_t head, heads;
        } parts[] = {
            { GGML_FLASH_ATTN_BACK_DQ, a.hsk * a.nb, a.nh * a.ns },
            { GGML_FLASH_ATTN_BACK_DK, a.hsk * kv_count, a.nhkv * a.ns },
            { GGML_FLASH_ATTN_BACK_DV, a.hsv * kv_count, a.nhkv * a.ns },
            { GGML_FLASH_ATTN_BACK_LSE, a.nb, a.nh * a.ns },
            { GGML_FLASH_ATTN_BACK_D, a.nb, a.nh * a.ns },
            { GGML_FLASH_ATTN_BACK_DSINKS, a.nh, 1 },
        };
        double worst = 0.0;
        for (const auto & p : parts) {
            if (!ggml_flash_attn_back_has(back, p.part)) {
                continue;
            }
            const size_t offset = ggml_flash_attn_back_offset(back, p.part) / sizeof(float);
            const auto compare  = [&](int64_t first, int64_t n) { // heads
                const int64_t at  = offset + first * p.head;
                const auto of_f32 = [&] {
                    if (rounding[p.part].empty()) {
                        find_rounding();
                    }
                    return std::accumulate(rounding[p.part].begin() + first, rounding[p.part].begin() + first + n, 0.0);
                };
                worst = std::max(worst, part_nmse(got + at, want + at, n * p.head, n * summed[p.part], of_f32));
            };
            compare(0, p.heads);
            for (int64_t head = 0; head < p.heads; ++head) {
                compare(head, 1);
            }
        }
        vq = vk = vv = vd = vs = vo = {};
        vm                          = {};
        return worst;
    }
};

// FLASH_ATTN_EXT with q, k, v and sinks as parameters and a random gradient of its output
struct test_flash_attn_ext_grad : public test_case {
    const flash_attn_back_args a;

    ggml_tensor * mask = nullptr;

    std::vector<ggml_tensor *> inputs; // q, k, v, d, sinks

    explicit test_flash_attn_ext_grad(const char * text) :
        a(text) {}

    std::string op_desc(ggml_tensor * t) override {
        GGML_UNUSED(t);
        return "FLASH_ATTN_EXT_GRAD";
    }

    std::string vars() override {
        return a.text;
    }

    double max_nmse_err() override {
        return 5e-4; // test_flash_attn_ext's
    }

    bool grad_precise() override {
        return true;
    }

    double max_maa_err() override {
        return 1e-3; // a mean of relative errors, which gradients near zero dominate
    }

    // mode grad divides by the gradients: every one must differ from zero, so every row sees two keys and every key is seen
    static bool is_checkable(const flash_attn_back_args & a) {
        return a.type_K == GGML_TYPE_F32 && a.type_V == GGML_TYPE_F32 && !a.vview && a.nb < a.kv && a.mh * a.ms == 1 &&
            (a.mask == "none" || a.mask == "causal" || a.mask == "bias");
    }

    ggml_tensor * param(ggml_context * ctx, const char * name, std::array<int64_t, 4> ne) {
        const bool perm = a.layout == "perm";
        ggml_tensor * t = perm ? ggml_new_tensor_4d(ctx, GGML_TYPE_F32, ne[0], ne[2], ne[1], ne[3]) : ggml_new_tensor_4d(ctx, GGML_TYPE_F32, ne[0], ne[1], ne[2], ne[3]);
        if (a.wants(name[0])) {
            ggml_set_param(t);
        }
        ggml_set_name(t, name);
        inputs.push_back(t);
        return perm ? ggml_permute(ctx, t, 0, 2, 1, 3) : t;
    }

    ggml_tensor * build_graph(ggml_context * ctx) override {
        ggml_tensor * q = param(ctx, "q", { a.hsk, a.nb, a.nh, a.ns });
        ggml_tensor * k = param(ctx, "k", { a.hsk, a.kv, a.nhkv, a.ns });
        ggml_tensor * v = param(ctx, "v", { a.hsv, a.kv, a.nhkv, a.ns });
        if (a.mask != "none") {
            mask = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, a.kv, a.nb + a.mpad, a.mh, a.ms);
            ggml_set_name(mask, "mask");
        }
        ggml_tensor * out = ggml_flash_attn_ext(ctx, q, k, v, mask, a.scale, a.max_bias, a.softcap);
        ggml_tensor * d   = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, a.hsv, a.nh, a.nb, a.ns);
        ggml_set_name(d, "d");
        inputs.push_back(d);
        if (a.sinks) {
            ggml_tensor * sinks = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, a.nh);
            if (a.wants('s')) {
                ggml_set_param(sinks);
            }
            ggml_set_name(sinks, "sinks");
            inputs.push_back(sinks);
            ggml_flash_attn_ext_add_sinks(out, sinks);
        }
        out = ggml_mul(ctx, out, d);
        ggml_set_name(out, "out");
        return out;
    }

    void initialize_tensors(ggml_context * ctx) override {
        test_case::initialize_tensors(ctx);
        std::mt19937 rng = a.make_rng();
        for (ggml_tensor * t : inputs) {
            const std::vector<float> values = a.draw(rng, ggml_nelements(t));
            ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
        }
        if (mask) {
            const std::vector<ggml_fp16_t> values = a.make_mask(rng);
            ggml_backend_tensor_set(mask, values.data(), 0, ggml_nbytes(mask));
        }
    }
};

static void add_flash_attn_back_cases(std::vector<std::unique_ptr<test_case>> & test_cases) {
    for (const char * text : flash_attn_back_cases) {
        if (!flash_attn_back_args::is_capture(text)) {
            test_cases.emplace_back(new test_flash_attn_back(text));
        }
    }
    for (const char * text : flash_attn_back_grad_cases) {
        if (test_flash_attn_ext_grad::is_checkable(flash_attn_back_args(text))) {
            test_cases.emplace_back(new test_flash_attn_ext_grad(text));
        }
    }
}

static void add_flash_attn_back_perf_cases(std::vector<std::unique_ptr<test_case>> & test_cases) {
    for (const char * text : flash_attn_back_perf_cases) {
        if (!flash_attn_back_args::is_capture(text)) {
            test_cases.emplace_back(new test_flash_attn_back(text));
        }
    }
}
