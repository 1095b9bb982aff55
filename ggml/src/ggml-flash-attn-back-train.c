#include "ggml-flash-attn-back-train.h"
#include "ggml-flash-attn-back-impl.h"

// why the device does not run a FLASH_ATTN_BACK node, NULL if it does
static const char * refusal(ggml_backend_dev_t dev, const struct ggml_tensor * back) {
    if (ggml_backend_dev_supports_op(dev, back)) {
        return NULL;
    }
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    if (!reg) { // the meta backend's
        return "the devices that share these tensors do not run FLASH_ATTN_BACK on their heads of them";
    }
    ggml_backend_flash_attn_back_refusal_t ask; // from an object's pointer, which ISO C does not convert to a function's
    *(void **) &ask     = ggml_backend_reg_get_proc_address(reg, "ggml_backend_flash_attn_back_refusal");
    const char * reason = ask ? ask(dev, back) : "the backend has no FLASH_ATTN_BACK";
    return reason ? reason : "the device does not run FLASH_ATTN_BACK on these tensors";
}

const char * ggml_flash_attn_back_train_refusal(ggml_backend_dev_t dev, const struct ggml_tensor * attn, uint32_t grads) {
    GGML_ASSERT(attn->op == GGML_OP_FLASH_ATTN_EXT && "not a FLASH_ATTN_EXT node");
    if (!ggml_backend_dev_supports_op(dev, attn)) {
        return "the device does not run FLASH_ATTN_EXT on these tensors";
    }

    struct ggml_init_params memory = {
        /*.mem_size   =*/2 * ggml_tensor_overhead(),
        /*.mem_buffer =*/NULL,
        /*.no_alloc   =*/true,
    };
    struct ggml_context * ctx = ggml_init(memory);
    struct ggml_tensor * d    = ggml_new_tensor(ctx, GGML_TYPE_F32, GGML_MAX_DIMS, attn->ne);
    if (!attn->src[GGML_FLASH_ATTN_BACK_SRC_SINKS]) {
        grads &= ~(1u << GGML_FLASH_ATTN_BACK_DSINKS);
    }
    const struct ggml_flash_attn_back_params params = {
        /*.scale         =*/ggml_get_op_params_f32(attn, 0),
        /*.max_bias      =*/ggml_get_op_params_f32(attn, 1),
        /*.logit_softcap =*/ggml_get_op_params_f32(attn, 2),
        /*.grads         =*/grads,
        /*.kv_first      =*/0,
        /*.kv_count      =*/0,
    };
    struct ggml_tensor * const * src = attn->src;

    const char * reason = ggml_flash_attn_back_broken_rule(src[0], src[1], src[2], src[3], src[4], /*o =*/NULL, d, params);
    if (!reason) {
        struct ggml_tensor * back =
            ggml_flash_attn_back(ctx, src[0], src[1], src[2], src[3], src[4], /*o =*/NULL, d, params);
        ggml_flash_attn_back_set_split(back, ggml_flash_attn_back_decode(attn).split);
        reason = refusal(dev, back);
    }
    ggml_free(ctx);
    return reason;
}

// a + b*x^2
static struct ggml_tensor * quadratic(struct ggml_context * ctx, float a, float b, struct ggml_tensor * x) {
    return ggml_scale_bias(ctx, ggml_sqr(ctx, x), b, a);
}

// gelu(x) = x*(1 + t)/2 with t = tanh(k*x + k*c*x^3), and its derivative (1 + t)/2 + x*(1 - t^2)*(k + 3*k*c*x^2)/2
struct gelu {
    struct ggml_tensor * value;
    struct ggml_tensor * derivative;
};

static struct gelu gelu(struct ggml_context * ctx, struct ggml_tensor * x) {
    const float k = 0.79788456080286535588f; // sqrt(2/pi)
    const float c = 0.044715f;

    struct ggml_tensor * t    = ggml_tanh(ctx, ggml_mul(ctx, quadratic(ctx, k, k * c, x), x));
    struct ggml_tensor * half = ggml_scale_bias(ctx, t, 0.5f, 0.5f);
    struct ggml_tensor * rest = ggml_mul(ctx, ggml_mul(ctx, quadratic(ctx, 1.0f, -1.0f, t), x), quadratic(ctx, 0.5f * k, 1.5f * k * c, x));
    return (struct gelu){ ggml_mul(ctx, half, x), ggml_add(ctx, half, rest) };
}

bool ggml_flash_attn_back_train_src_grads(
    struct ggml_context * ctx,
    struct ggml_tensor * node,
    struct ggml_tensor * grad,
    const bool needed[2],
    struct ggml_tensor * src_grads[2]) {
    src_grads[0] = NULL;
    src_grads[1] = NULL;

    if (node->op == GGML_OP_UNARY) {
        struct ggml_tensor * derivative;
        switch (ggml_get_unary_op(node)) {
            case GGML_UNARY_OP_TANH:
                derivative = quadratic(ctx, 1.0f, -1.0f, node);
                break;
            case GGML_UNARY_OP_SIGMOID:
                derivative = ggml_mul(ctx, ggml_scale_bias(ctx, node, -1.0f, 1.0f), node);
                break;
            case GGML_UNARY_OP_GELU:
                derivative = gelu(ctx, node->src[0]).derivative;
                break;
            default:
                return false;
        }
        if (needed[0]) {
            src_grads[0] = ggml_mul(ctx, derivative, grad);
        }
        return true;
    }

    if (node->op == GGML_OP_GLU && ggml_get_glu_op(node) == GGML_GLU_OP_GEGLU && node->src[1]) {
        const struct gelu g = gelu(ctx, node->src[0]);
        if (needed[0]) {
            src_grads[0] = ggml_mul(ctx, ggml_mul(ctx, g.derivative, node->src[1]), grad);
        }
        if (needed[1]) {
            src_grads[1] = ggml_mul(ctx, g.value, grad);
        }
        return true;
    }

    return false;
}
