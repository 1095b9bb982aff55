// FLASH_ATTN_BACK and its forward on ggml's meta backend: heads split over two devices, against the CPU. Both are the CPU, too, so that a difference
// is one of the split; or, given HOST:PORT twice, RPC servers, the first of which also runs each case alone. Prints a line for each case; exits
// with 1 where one differs.

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-flash-attn-back-train.h"
#include "ggml-flash-attn-back.h"
#include "ggml.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

struct shape {
    int64_t Dk, Dv, N, M, H, Hkv, S;
    ggml_type type;
    bool sinks;
    bool pair;
    int64_t first; // KV heads of the first device
};

// the split of a source: heads lie on axis, -1 where every device has all
struct heads {
    int axis;
    const shape * of;
};

static std::map<std::string, heads> splits;

static ggml_backend_meta_split_state split_state(const ggml_tensor * tensor, void *) {
    const heads split                   = splits.at(tensor->name);
    ggml_backend_meta_split_state state = { GGML_BACKEND_SPLIT_AXIS_MIRRORED, { 0 }, { 1 }, 1 };
    if (split.axis >= 0) {
        state.axis  = ggml_backend_meta_split_axis(split.axis);
        state.ne[0] = split.of->first * tensor->ne[split.axis] / split.of->Hkv;
        state.ne[1] = tensor->ne[split.axis] - state.ne[0];
    }
    return state;
}

using parts = std::map<std::string, std::vector<float>>;

static std::vector<float> normal(int64_t n, int seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> distribution;
    std::vector<float> values(n);
    for (float & value : values) {
        value = distribution(random);
    }
    return values;
}

// a source in the context of the weights, and what it holds
static ggml_tensor * source(ggml_context * ctx, const char * name, ggml_type type, int axis, const shape & s, std::vector<int64_t> ne) {
    ggml_tensor * tensor = ggml_new_tensor(ctx, type, ne.size(), ne.data());
    ggml_set_name(tensor, name);
    splits[name] = { axis, &s };
    return tensor;
}

static void fill(ggml_tensor * tensor, int seed) {
    const std::vector<float> values = normal(ggml_nelements(tensor), seed);
    std::vector<char> data(ggml_nbytes(tensor));
    if (tensor->type == GGML_TYPE_F32) {
        memcpy(data.data(), values.data(), data.size());
    } else {
        ggml_quantize_chunk(tensor->type, values.data(), data.data(), 0, ggml_nrows(tensor), tensor->ne[0], nullptr);
    }
    ggml_backend_tensor_set(tensor, data.data(), 0, data.size());
}

static parts run(ggml_backend_dev_t dev, const shape & s) {
    ggml_backend_t backend = ggml_backend_dev_init(dev, nullptr);
    ggml_context * inputs  = ggml_init({ 16 * ggml_tensor_overhead(), nullptr, true });
    ggml_tensor * q        = source(inputs, "q", GGML_TYPE_F32, 2, s, { s.Dk, s.N, s.H, s.S });
    ggml_tensor * k        = source(inputs, "k", s.type, 2, s, { s.Dk, s.M, s.Hkv, s.S });
    ggml_tensor * v        = source(inputs, "v", s.type, 2, s, { s.Dv, s.M, s.Hkv, s.S });
    ggml_tensor * d        = source(inputs, "d", GGML_TYPE_F32, 1, s, { s.Dv, s.H, s.N, s.S });
    ggml_tensor * mask     = source(inputs, "mask", GGML_TYPE_F16, -1, s, { s.M, s.N });
    ggml_tensor * sinks    = s.sinks ? source(inputs, "sinks", GGML_TYPE_F32, 0, s, { s.H }) : nullptr;

    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(inputs, ggml_backend_dev_buffer_type(dev));
    int seed                     = 0;
    for (ggml_tensor * tensor : { q, k, v, d, mask, sinks }) {
        if (tensor) {
            fill(tensor, ++seed);
        }
    }

    ggml_context * ctx   = ggml_init({ 64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });
    const float scale    = 1.0f / std::sqrt(float(s.Dk));
    const uint32_t grads = 1u << GGML_FLASH_ATTN_BACK_DQ | 1u << GGML_FLASH_ATTN_BACK_DK | 1u << GGML_FLASH_ATTN_BACK_DV |
        (s.sinks ? 1u << GGML_FLASH_ATTN_BACK_DSINKS : 0);
    ggml_tensor * o = nullptr;
    if (s.pair) {
        o = ggml_flash_attn_ext(ctx, q, k, v, mask, scale, 0.0f, 0.0f);
        ggml_flash_attn_ext_add_sinks(o, sinks);
    }
    ggml_tensor * back = ggml_flash_attn_back(ctx, q, k, v, mask, sinks, o, d, { scale, 0.0f, 0.0f, grads, 0, 0 });
    if (s.pair && !ggml_flash_attn_back_use_saved(back)) {
        printf("the pair is none\n");
        exit(1);
    }
    std::map<std::string, ggml_tensor *> found;
    static const char * names[] = { "dq", "dk", "dv", "lse", "d", "dsinks" };
    ggml_cgraph * graph         = ggml_new_graph(ctx);
    for (int part = 0; part < GGML_FLASH_ATTN_BACK_PART_COUNT; ++part) {
        if (ggml_flash_attn_back_has(back, ggml_flash_attn_back_part(part))) {
            found[names[part]] = ggml_flash_attn_back_view(ctx, back, ggml_flash_attn_back_part(part));
            ggml_build_forward_expand(graph, found[names[part]]);
        }
    }
    found["whole"]           = back;
    ggml_gallocr_t allocator = ggml_gallocr_new(ggml_backend_dev_buffer_type(dev));
    ggml_set_output(back);
    if (!ggml_gallocr_alloc_graph(allocator, graph) || ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
        printf("the graph does not run\n");
        exit(1);
    }
    parts result;
    for (const auto & [name, tensor] : found) {
        size_t n = ggml_nelements(tensor);
        std::vector<float> values(n);
        ggml_backend_tensor_get(tensor, values.data(), 0, n * sizeof(float));
        result[name] = values;
    }
    // the padding behind the last part is nobody's
    const auto last = s.sinks ? GGML_FLASH_ATTN_BACK_DSINKS : GGML_FLASH_ATTN_BACK_D;
    result["whole"].resize(ggml_flash_attn_back_offset(back, last) / sizeof(float) + result[names[last]].size());

    ggml_gallocr_free(allocator);
    ggml_free(ctx);
    ggml_backend_buffer_free(buffer);
    ggml_free(inputs);
    ggml_backend_free(backend);
    return result;
}

static double nmse(const std::vector<float> & got, const std::vector<float> & want) {
    double error = 0.0;
    double sum   = 0.0;
    for (size_t i = 0; i < want.size(); ++i) {
        error += (double(got[i]) - want[i]) * (double(got[i]) - want[i]);
        sum += double(want[i]) * want[i];
    }
    return sum > 0.0 ? error / sum : error;
}

static ggml_backend_dev_t server(const char * endpoint) {
    using add              = ggml_backend_reg_t (*)(const char * endpoint);
    ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
    ggml_backend_reg_t reg = rpc ? ((add) ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server"))(endpoint) : nullptr;
    if (!reg) {
        printf("no RPC server at %s\n", endpoint);
        exit(1);
    }
    return ggml_backend_reg_dev_get(reg, 0);
}

int main(int argc, char ** argv) {
    ggml_backend_load_all();
    ggml_backend_dev_t cpu       = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_dev_t devices[] = { cpu, cpu };
    for (int i = 1; i < argc && i <= 2; ++i) {
        devices[i - 1] = server(argv[i]);
    }
    ggml_backend_dev_t meta = ggml_backend_meta_device(devices, 2, split_state, nullptr);

    const shape shapes[] = {
        { 64, 64, 16, 24, 8, 4, 1, GGML_TYPE_F32, false, false, 2 },
        { 64, 64, 16, 24, 8, 4, 1, GGML_TYPE_F16, false, true, 3 },
        { 64, 32, 20, 40, 4, 2, 3, GGML_TYPE_F32, false, true, 1 },
        { 64, 64, 16, 24, 6, 2, 2, GGML_TYPE_Q8_0, true, false, 1 },
        { 40, 40, 8, 24, 8, 8, 1, GGML_TYPE_F32, true, true, 5 },
        { 64, 64, 16, 24, 4, 2, 1, GGML_TYPE_F32, true, false, 2 }, // the second device has none
    };
    int failed = 0;
    for (const shape & s : shapes) {
        const parts want = run(cpu, s);
        double worst     = 0.0;
        for (ggml_backend_dev_t dev : { devices[0], meta }) {
            const parts got = run(dev, s);
            for (const auto & [name, values] : want) {
                const double error = nmse(got.at(name), values);
                worst              = std::isnan(error) ? INFINITY : std::max(worst, error);
            }
        }
        const bool ok = worst <= 1e-12;
        failed += !ok;
        printf("%-6s  %d of %d KV heads, H=%d, D=%d/%d, N=%d, M=%d, S=%d, %s%s%s: NMSE %.1e\n", ok ? "ok" : "FAILED", int(s.first), int(s.Hkv), int(s.H),
            int(s.Dk), int(s.Dv), int(s.N), int(s.M), int(s.S), ggml_type_name(s.type), s.sinks ? ", sinks" : "", s.pair ? ", pair" : "", worst);
    }

    // a node whose parts would be padded, asked of the device before it has any split
    for (int64_t n : { 16, 3 }) {
        const shape s        = { 64, 64, n, 24, 2, 2, 1, GGML_TYPE_F32, false, false, 1 };
        ggml_context * ctx   = ggml_init({ 16 * ggml_tensor_overhead(), nullptr, true });
        ggml_tensor * q      = source(ctx, "q", GGML_TYPE_F32, 2, s, { s.Dk, s.N, s.H, s.S });
        ggml_tensor * k      = source(ctx, "k", GGML_TYPE_F32, 2, s, { s.Dk, s.M, s.Hkv, s.S });
        ggml_tensor * v      = source(ctx, "v", GGML_TYPE_F32, 2, s, { s.Dv, s.M, s.Hkv, s.S });
        ggml_tensor * sinks  = source(ctx, "sinks", GGML_TYPE_F32, 0, s, { s.H });
        ggml_tensor * attn   = ggml_flash_attn_ext(ctx, q, k, v, nullptr, 0.125f, 0.0f, 0.0f);
        const uint32_t grads = 1u << GGML_FLASH_ATTN_BACK_DQ | 1u << GGML_FLASH_ATTN_BACK_DSINKS;
        ggml_flash_attn_ext_add_sinks(attn, sinks);
        const char * reason = ggml_flash_attn_back_train_refusal(meta, attn, grads);
        printf("N=%d: %s\n", int(n), reason ? reason : "taken");
        ggml_free(ctx);
    }
    return failed ? 1 : 0;
}
