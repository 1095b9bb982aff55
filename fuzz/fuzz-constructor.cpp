// ggml_flash_attn_back and the functions that read its node, on tensors without data: any sizes, strides, types and parameters.
// The constructor refuses in words exactly what its header rules out, and lays everything else out as the header says.

#include "fuzz.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <array>
#include <cstring>

using wide = __int128;

static constexpr uint32_t GRADS = 1u << GGML_FLASH_ATTN_BACK_DQ | 1u << GGML_FLASH_ATTN_BACK_DK | 1u << GGML_FLASH_ATTN_BACK_DV |
    1u << GGML_FLASH_ATTN_BACK_DSINKS;

static constexpr wide MAX_ELEMENTS = (wide) 1 << 42; // of q, k, v and d, an empty dimension counting as one

static ggml_backend_flash_attn_back_refusal_t cpu_refusal;

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    ggml_set_abort_callback(throw_refusal);
    cpu_refusal = (ggml_backend_flash_attn_back_refusal_t) ggml_backend_reg_get_proc_address(
        ggml_backend_cpu_reg(), "ggml_backend_flash_attn_back_refusal");
    CHECK(cpu_refusal);
    return 0;
}

static int64_t any_size(FuzzedDataProvider & in) {
    static const int64_t corners[] = { -1, 0, 1, 2, 3, INT32_MAX, 1ll << 31, 1ll << 32, 1ll << 40, 1ll << 59, 1ll << 62, INT64_MAX, INT64_MIN };
    switch (in.ConsumeIntegralInRange<int>(0, 3)) {
        case 0:
            return pick(in, corners);
        case 1:
            return in.ConsumeIntegral<int64_t>();
        case 2:
            return 1ll << in.ConsumeIntegralInRange<int>(0, 62);
        default:
            return in.ConsumeIntegralInRange<int64_t>(0, 600);
    }
}

static int64_t likely_size(FuzzedDataProvider & in) {
    return in.ConsumeIntegralInRange<int>(0, 15) == 15 ? any_size(in) : in.ConsumeIntegralInRange<int64_t>(1, 12);
}

static ggml_type any_type(FuzzedDataProvider & in) {
    for (;;) { // the enumeration has holes
        const ggml_type type = (ggml_type) in.ConsumeIntegralInRange<int>(0, GGML_TYPE_COUNT - 1);
        if (ggml_type_size(type) > 0 || in.remaining_bytes() == 0) {
            return ggml_type_size(type) > 0 ? type : GGML_TYPE_F32;
        }
    }
}

static ggml_tensor tensor(ggml_type type, std::array<int64_t, 4> ne) {
    ggml_tensor t = {};
    t.type        = type;
    t.nb[0]       = ggml_type_size(type);
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        t.ne[i] = ne[i];
        if (i > 0) {
            t.nb[i] = t.nb[i - 1] * (i == 1 ? t.ne[0] / ggml_blck_size(type) : t.ne[i - 1]);
        }
    }
    return t;
}

static bool has_shape(const ggml_tensor * t, std::array<int64_t, 4> ne) {
    return memcmp(t->ne, ne.data(), sizeof(t->ne)) == 0;
}

static wide elements(const ggml_tensor * t) {
    wide n = 1;
    for (const int64_t ne : t->ne) {
        n *= std::max<int64_t>(ne, 1);
        if (n > MAX_ELEMENTS) {
            break;
        }
    }
    return n;
}

// the rules of ggml-flash-attn-back.h
static bool keeps_the_rules(
    const ggml_tensor * q, const ggml_tensor * k, const ggml_tensor * v, const ggml_tensor * mask, const ggml_tensor * sinks,
    const ggml_tensor * o, const ggml_tensor * d, const ggml_flash_attn_back_params & params) {
    const int64_t Dk = q->ne[0], N = q->ne[1], H = q->ne[2], S = q->ne[3], M = k->ne[1], Hkv = k->ne[2], Dv = v->ne[0];
    if (q->type != GGML_TYPE_F32 || q->nb[0] == 0 || Hkv <= 0 || H % Hkv != 0 || !has_shape(k, { Dk, M, Hkv, S }) ||
        !has_shape(v, { Dv, M, Hkv, S })) {
        return false;
    }
    for (const ggml_tensor * t : { k, v }) {
        if (t->nb[0] != ggml_type_size(t->type)) {
            return false;
        }
    }
    if (!d || d->type != GGML_TYPE_F32 || d->nb[0] == 0 || !has_shape(d, { Dv, H, N, S }) ||
        (o && (o->type != GGML_TYPE_F32 || !has_shape(o, { Dv, H, N, S })))) {
        return false;
    }
    for (const ggml_tensor * t : { q, k, v, d }) {
        if (*std::min_element(t->ne, t->ne + GGML_MAX_DIMS) < 0 || elements(t) > MAX_ELEMENTS) {
            return false;
        }
    }
    if (mask && (mask->type != GGML_TYPE_F16 || mask->nb[0] != 2 || mask->ne[0] != M || mask->ne[1] < N || mask->ne[2] < 1 || mask->ne[3] < 1 || H % mask->ne[2] != 0 || S % mask->ne[3] != 0)) {
        return false;
    }
    if (!mask && !(params.max_bias <= 0.0f)) {
        return false;
    }
    if (sinks && (sinks->type != GGML_TYPE_F32 || !has_shape(sinks, { H, 1, 1, 1 }) || !ggml_is_contiguous(sinks))) {
        return false;
    }
    if ((params.grads & ~GRADS) != 0 || (!sinks && params.grads & 1u << GGML_FLASH_ATTN_BACK_DSINKS)) {
        return false;
    }
    if (params.kv_first < 0 || params.kv_count < 0 || (params.kv_count == 0 && params.kv_first != 0) ||
        (wide) params.kv_first + params.kv_count > M) {
        return false;
    }
    return true;
}

static void check_layout(ggml_context * ctx, ggml_tensor * back, const ggml_flash_attn_back_params & params) {
    const ggml_tensor * q = back->src[0];
    const ggml_tensor * k = back->src[1];
    const ggml_tensor * v = back->src[2];
    const int64_t W       = params.kv_count ? params.kv_count : k->ne[1];
    const struct {
        ggml_flash_attn_back_part part;
        std::array<int64_t, 4> ne;
    } parts[] = {
        { GGML_FLASH_ATTN_BACK_DQ, { q->ne[0], q->ne[1], q->ne[2], q->ne[3] } },
        { GGML_FLASH_ATTN_BACK_DK, { k->ne[0], W, k->ne[2], k->ne[3] } },
        { GGML_FLASH_ATTN_BACK_DV, { v->ne[0], W, v->ne[2], v->ne[3] } },
        { GGML_FLASH_ATTN_BACK_LSE, { q->ne[1], q->ne[2], q->ne[3], 1 } },
        { GGML_FLASH_ATTN_BACK_D, { q->ne[1], q->ne[2], q->ne[3], 1 } },
        { GGML_FLASH_ATTN_BACK_DSINKS, { q->ne[2], 1, 1, 1 } },
    };
    wide end = 0;
    for (const auto & p : parts) {
        const bool stat = p.part == GGML_FLASH_ATTN_BACK_LSE || p.part == GGML_FLASH_ATTN_BACK_D;
        const bool has  = stat || (params.grads >> p.part & 1);
        CHECK(ggml_flash_attn_back_has(back, p.part) == has);
        size_t offset      = 0;
        ggml_tensor * view = nullptr;
        CHECK(accepted([&] { offset = ggml_flash_attn_back_offset(back, p.part); }) == has);
        CHECK(accepted([&] { view = ggml_flash_attn_back_view(ctx, back, p.part); }) == has);
        if (!has) {
            continue;
        }
        wide bytes = sizeof(float);
        for (int i = 0; i < GGML_MAX_DIMS; ++i) {
            bytes *= p.ne[i];
        }
        CHECK((wide) offset == end);
        CHECK(view->type == GGML_TYPE_F32 && has_shape(view, p.ne) && ggml_is_contiguous(view));
        CHECK(view->view_src == back && view->view_offs == offset);
        end += bytes;
        if (p.part != GGML_FLASH_ATTN_BACK_LSE) {
            end = (end + GGML_MEM_ALIGN - 1) / GGML_MEM_ALIGN * GGML_MEM_ALIGN;
        }
    }
    CHECK(back->type == GGML_TYPE_F32 && (wide) back->ne[0] * (wide) sizeof(float) == end);
    CHECK(has_shape(back, { back->ne[0], 1, 1, 1 }));
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    FuzzedDataProvider in(data, size);

    int64_t Dk = likely_size(in), Dv = likely_size(in), N = likely_size(in), M = likely_size(in), Hkv = likely_size(in), S = likely_size(in);
    int64_t H = in.ConsumeBool() ? likely_size(in) : (int64_t) ((uint64_t) Hkv * in.ConsumeIntegralInRange<uint64_t>(1, 8));

    ggml_tensor q     = tensor(GGML_TYPE_F32, { Dk, N, H, S });
    ggml_tensor k     = tensor(any_type(in), { Dk, M, Hkv, S });
    ggml_tensor v     = tensor(any_type(in), { Dv, M, Hkv, S });
    ggml_tensor mask  = tensor(GGML_TYPE_F16, { M, N + (N < INT64_MAX && in.ConsumeBool()), in.ConsumeBool() ? H : 1, in.ConsumeBool() ? S : 1 });
    ggml_tensor sinks = tensor(GGML_TYPE_F32, { H, 1, 1, 1 });
    ggml_tensor o     = tensor(GGML_TYPE_F32, { Dv, H, N, S });
    ggml_tensor d     = o;

    ggml_tensor * const all[] = { &q, &k, &v, &mask, &sinks, &o, &d };
    const int given           = in.ConsumeIntegral<uint8_t>();
    for (int n = in.ConsumeIntegralInRange<int>(0, 3); n > 0; --n) {
        ggml_tensor * t = pick(in, all);
        const int i     = in.ConsumeIntegralInRange<int>(0, GGML_MAX_DIMS - 1);
        switch (in.ConsumeIntegralInRange<int>(0, 3)) {
            case 0:
                t->type = any_type(in);
                break;
            case 1:
                t->nb[i] = (size_t) any_size(in);
                break;
            default:
                t->ne[i] = any_size(in);
                break;
        }
    }

    ggml_flash_attn_back_params params = {};
    params.scale                       = in.ConsumeFloatingPoint<float>();
    params.max_bias                    = in.ConsumeBool() ? 0.0f : in.ConsumeFloatingPoint<float>();
    params.logit_softcap               = in.ConsumeFloatingPoint<float>();
    params.grads                       = in.ConsumeIntegral<uint32_t>() & (in.ConsumeIntegralInRange<int>(0, 7) == 7 ? ~0u : GRADS);
    if (in.ConsumeBool()) {
        params.kv_first = likely_size(in);
        params.kv_count = likely_size(in);
    }

    ggml_tensor * const m  = given & 1 ? &mask : nullptr;
    ggml_tensor * const s  = given & 2 ? &sinks : nullptr;
    ggml_tensor * const oo = given & 4 ? &o : nullptr;
    ggml_tensor * const dd = (given & 0x78) ? &d : nullptr;

    static uint8_t memory[64 * 1024];
    ggml_context * ctx = ggml_init({ sizeof(memory), memory, /*.no_alloc =*/true });
    ggml_tensor * back = nullptr;
    const bool taken   = accepted([&] { back = ggml_flash_attn_back(ctx, &q, &k, &v, m, s, oo, dd, params); });
    CHECK(taken == keeps_the_rules(&q, &k, &v, m, s, oo, dd, params));
    CHECK(!accepted([&] { ggml_flash_attn_back_set_split(&q, false); })); // a node of another kind
    CHECK(!accepted([&] { ggml_flash_attn_back_use_saved(&q); }));
    CHECK(!accepted([&] { ggml_flash_attn_back_has(&q, GGML_FLASH_ATTN_BACK_DQ); }));
    if (taken) {
        check_layout(ctx, back, params);
        for (const ggml_flash_attn_back_part none : { GGML_FLASH_ATTN_BACK_PART_COUNT, (ggml_flash_attn_back_part) 7 }) {
            CHECK(!ggml_flash_attn_back_has(back, none));
            CHECK(!accepted([&] { ggml_flash_attn_back_offset(back, none); }));
            CHECK(!accepted([&] { ggml_flash_attn_back_view(ctx, back, none); }));
        }
        CHECK(accepted([&] { ggml_flash_attn_back_set_split(back, in.ConsumeBool()); }));

        const char * why = cpu_refusal(ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0), back);
        CHECK(why || (q.type == GGML_TYPE_F32 && d.type == GGML_TYPE_F32));
        if (!why) { // what the gate takes can be planned
            ggml_cgraph * graph = ggml_new_graph_custom(ctx, 16, false);
            ggml_graph_add_node(graph, back);
            const int n_threads    = in.ConsumeIntegralInRange<int>(1, GGML_MAX_N_THREADS);
            const ggml_cplan cplan = ggml_graph_plan(graph, n_threads, nullptr);
            CHECK(cplan.work_size < (size_t) 1 << 62);
        }
    }
    ggml_free(ctx);
    return 0;
}
