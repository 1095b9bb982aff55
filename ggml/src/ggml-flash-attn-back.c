#include "ggml-flash-attn-back-impl.h"
#include "ggml-flash-attn-back-source.h"

#include <string.h>

// op_params: 0 to 4 are the forward's (scale, max_bias, logit_softcap, precision, n_kv_max), then ours, of which the last
// two are those of FLASH_ATTN_EXT nodes, too
#define N_OP_PARAMS       3 // that the gradient depends on
#define OP_PARAM_GRADS    5
#define OP_PARAM_KV_FIRST 6 // two slots
#define OP_PARAM_KV_COUNT 8 // two slots
#define OP_PARAM_SPLIT    14
#define OP_PARAM_SAVED    15 // FLASH_ATTN_EXT: marked; FLASH_ATTN_BACK: o stands for what the forward saved

#define MAX_ELEMENTS ((int64_t) 1 << 42) // of q, k, v and d, an empty dimension counting as one: sizes in bytes then fit in 64 bits

static const uint32_t GRADS_ALL =
    1u << GGML_FLASH_ATTN_BACK_DQ | 1u << GGML_FLASH_ATTN_BACK_DK | 1u << GGML_FLASH_ATTN_BACK_DV | 1u << GGML_FLASH_ATTN_BACK_DSINKS;

const char * ggml_flash_attn_back_source(void) {
    return GGML_FLASH_ATTN_BACK_SOURCE;
}

static int64_t get_op_params_i64(const struct ggml_tensor * tensor, int i) {
    int64_t value;
    memcpy(&value, tensor->op_params + i, sizeof(value));
    return value;
}

static void set_op_params_i64(struct ggml_tensor * tensor, int i, int64_t value) {
    memcpy(tensor->op_params + i, &value, sizeof(value));
}

static bool fits(const struct ggml_tensor * tensor) {
    int64_t nelements = 1;
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        if (tensor->ne[i] < 0 || tensor->ne[i] > MAX_ELEMENTS / nelements) {
            return false;
        }
        nelements *= MAX(tensor->ne[i], 1);
    }
    return true;
}

// sizes and offsets of the parts; returns the size of the whole
static size_t layout(struct ggml_flash_attn_back_node * node) {
    const int64_t nelements[GGML_FLASH_ATTN_BACK_PART_COUNT] = {
        /* DQ     = */ node->Dk * node->N * node->H * node->S,
        /* DK     = */ node->Dk * node->kv_count * node->Hkv * node->S,
        /* DV     = */ node->Dv * node->kv_count * node->Hkv * node->S,
        /* LSE    = */ node->N * node->H * node->S,
        /* D      = */ node->N * node->H * node->S,
        /* DSINKS = */ node->H,
    };

    size_t offset = 0;
    for (int part = 0; part < GGML_FLASH_ATTN_BACK_PART_COUNT; ++part) {
        const bool is_stat = part == GGML_FLASH_ATTN_BACK_LSE || part == GGML_FLASH_ATTN_BACK_D;
        node->offset[part] = offset;
        node->size[part]   = is_stat || ggml_flash_attn_back_wants(node, part) ? nelements[part] * sizeof(float) : 0;
        offset += node->size[part];
        if (part != GGML_FLASH_ATTN_BACK_LSE) { // LSE and D are one part
            offset = GGML_PAD(offset, GGML_MEM_ALIGN);
        }
    }
    return offset;
}

static void set_shape(
    struct ggml_flash_attn_back_node * node, const struct ggml_tensor * q, const struct ggml_tensor * k, const struct ggml_tensor * v) {
    node->Dk  = q->ne[0];
    node->Dv  = v->ne[0];
    node->N   = q->ne[1];
    node->M   = k->ne[1];
    node->H   = q->ne[2];
    node->Hkv = k->ne[2];
    node->S   = q->ne[3];
}

// the nodes that have parameters of ours
static void assert_kind(const struct ggml_tensor * node) {
    GGML_ASSERT((node->op == GGML_OP_FLASH_ATTN_BACK || node->op == GGML_OP_FLASH_ATTN_EXT) && "neither FLASH_ATTN_BACK nor FLASH_ATTN_EXT");
}

struct ggml_flash_attn_back_node ggml_flash_attn_back_decode(const struct ggml_tensor * tensor) {
    assert_kind(tensor);

    struct ggml_tensor * const * src      = tensor->src;
    struct ggml_flash_attn_back_node node = { 0 };
    node.scale                            = ggml_get_op_params_f32(tensor, 0);
    node.max_bias                         = ggml_get_op_params_f32(tensor, 1);
    node.logit_softcap                    = fabsf(ggml_get_op_params_f32(tensor, 2)); // c*tanh(x/c) is even in c
    set_shape(&node, src[GGML_FLASH_ATTN_BACK_SRC_Q], src[GGML_FLASH_ATTN_BACK_SRC_K], src[GGML_FLASH_ATTN_BACK_SRC_V]);
    node.split = ggml_get_op_params_i32(tensor, OP_PARAM_SPLIT) != 0;
    if (tensor->op == GGML_OP_FLASH_ATTN_EXT) {
        node.kv_count = node.M;
        return node;
    }
    node.grads    = (uint32_t) ggml_get_op_params_i32(tensor, OP_PARAM_GRADS);
    node.kv_first = get_op_params_i64(tensor, OP_PARAM_KV_FIRST);
    node.kv_count = get_op_params_i64(tensor, OP_PARAM_KV_COUNT);
    layout(&node);
    return node;
}

bool ggml_flash_attn_back_is_marked(const struct ggml_tensor * attn) {
    return attn->op == GGML_OP_FLASH_ATTN_EXT && ggml_get_op_params_i32(attn, OP_PARAM_SAVED) != 0;
}

size_t ggml_flash_attn_back_saved_size(const struct ggml_tensor * attn) {
    if (!ggml_flash_attn_back_is_marked(attn)) {
        return 0;
    }
    // by the result's shape alone, as ggml's RPC backend remembers sizes: a word for each query head, not for each KV head
    const int64_t heads  = attn->ne[1] * attn->ne[3];
    const size_t nbytes  = ggml_nbytes(attn);
    const size_t padding = GGML_PAD(nbytes, GGML_FLASH_ATTN_BACK_SAVED_ALIGN) - nbytes;
    return padding + 16 + heads * (attn->ne[2] * sizeof(float) + sizeof(uint32_t));
}

bool ggml_flash_attn_back_o_is_saved(const struct ggml_tensor * back) {
    return back->op == GGML_OP_FLASH_ATTN_BACK && ggml_get_op_params_i32(back, OP_PARAM_SAVED) != 0;
}

// whether back is the gradient of attn: a FLASH_ATTN_EXT node of the same sources and parameters
static bool is_gradient(const struct ggml_tensor * back, const struct ggml_tensor * attn) {
    for (int i = GGML_FLASH_ATTN_BACK_SRC_Q; i <= GGML_FLASH_ATTN_BACK_SRC_SINKS; ++i) {
        if (back->src[i] != attn->src[i]) {
            return false;
        }
    }
    return attn->op == GGML_OP_FLASH_ATTN_EXT && back->op_params[OP_PARAM_SPLIT] == attn->op_params[OP_PARAM_SPLIT] &&
        memcmp(back->op_params, attn->op_params, N_OP_PARAMS * sizeof(back->op_params[0])) == 0;
}

const struct ggml_tensor * ggml_flash_attn_back_forward(const struct ggml_tensor * back) {
    const struct ggml_tensor * attn = back->src[GGML_FLASH_ATTN_BACK_SRC_O];
    if (!ggml_flash_attn_back_o_is_saved(back) || !attn || !ggml_flash_attn_back_is_marked(attn) || !is_gradient(back, attn)) {
        return NULL;
    }
    return attn;
}

bool ggml_flash_attn_back_use_saved(struct ggml_tensor * back) {
    GGML_ASSERT(back->op == GGML_OP_FLASH_ATTN_BACK && "not a FLASH_ATTN_BACK node");
    struct ggml_tensor * attn = back->src[GGML_FLASH_ATTN_BACK_SRC_O];
    if (!attn || !is_gradient(back, attn)) {
        return false;
    }
    if (!attn->data && !attn->buffer) { // else its buffer has not reserved what a mark wants
        ggml_set_op_params_i32(attn, OP_PARAM_SAVED, 1);
    }
    if (!ggml_flash_attn_back_is_marked(attn)) {
        return false;
    }
    ggml_set_op_params_i32(back, OP_PARAM_SAVED, 1);
    return true;
}

const char * ggml_flash_attn_back_broken_rule(
    const struct ggml_tensor * q,
    const struct ggml_tensor * k,
    const struct ggml_tensor * v,
    const struct ggml_tensor * mask,
    const struct ggml_tensor * sinks,
    const struct ggml_tensor * o,
    const struct ggml_tensor * d,
    struct ggml_flash_attn_back_params params) {
#define RULE(x, words) \
    if (!(x)) { \
        return words; \
    }
    RULE(q->type == GGML_TYPE_F32, "q must be F32");
    RULE(fits(q) && fits(k) && fits(v), "q, k and v must have at most 2^42 elements");
    RULE(k->ne[0] == q->ne[0], "k and q must have the same head size");
    RULE(v->ne[1] == k->ne[1] && v->ne[2] == k->ne[2], "k and v must have the same keys and heads");
    RULE(k->ne[3] == q->ne[3] && v->ne[3] == q->ne[3], "q, k and v must have the same number of sequences");
    RULE(k->ne[2] > 0 && q->ne[2] % k->ne[2] == 0, "the query heads must be a multiple of the KV heads");
    RULE(k->nb[0] == ggml_type_size(k->type) && v->nb[0] == ggml_type_size(v->type), "rows of k and v must be contiguous");

    RULE(d && d->type == GGML_TYPE_F32, "d must be F32");
    RULE(fits(d), "d must have at most 2^42 elements");
    RULE(d->ne[0] == v->ne[0] && d->ne[1] == q->ne[2] && d->ne[2] == q->ne[1] && d->ne[3] == q->ne[3], "d must have the shape [Dv, H, N, S]");
    RULE(q->nb[0] != 0 && d->nb[0] != 0, "q and d must not have a component stride of 0");
    RULE(!o || (o->type == GGML_TYPE_F32 && ggml_are_same_shape(o, d)), "o must be F32 with the shape of d");

    if (mask) {
        RULE(mask->type == GGML_TYPE_F16, "the mask must be F16");
        RULE(mask->ne[0] == k->ne[1] && mask->ne[1] >= q->ne[1], "the mask must have the shape [M, >=N, Hm, Sm]");
        RULE(mask->ne[2] > 0 && q->ne[2] % mask->ne[2] == 0 && mask->ne[3] > 0 && q->ne[3] % mask->ne[3] == 0,
            "the mask's heads and sequences must divide q's");
        RULE(mask->nb[0] == sizeof(ggml_fp16_t), "rows of the mask must be contiguous");
    }
    RULE(params.max_bias <= 0.0f || mask, "ALiBi needs a mask");
    RULE(!sinks || (sinks->type == GGML_TYPE_F32 && ggml_is_vector(sinks) && sinks->ne[0] == q->ne[2] && ggml_is_contiguous(sinks)),
        "sinks must be F32 with the shape [H]");

    RULE((params.grads & ~GRADS_ALL) == 0, "grads takes the bits of DQ, DK, DV and DSINKS");
    RULE(sinks || !(params.grads & 1u << GGML_FLASH_ATTN_BACK_DSINKS), "dSinks need sinks");

    RULE(params.kv_count > 0 || (params.kv_count == 0 && params.kv_first == 0), "a key window needs a count");
    RULE(params.kv_first >= 0 && params.kv_count <= k->ne[1] - params.kv_first, "the key window must lie inside the keys");
#undef RULE
    return NULL;
}

struct ggml_tensor * ggml_flash_attn_back(
    struct ggml_context * ctx,
    struct ggml_tensor * q,
    struct ggml_tensor * k,
    struct ggml_tensor * v,
    struct ggml_tensor * mask,
    struct ggml_tensor * sinks,
    struct ggml_tensor * o,
    struct ggml_tensor * d,
    struct ggml_flash_attn_back_params params) {
    const char * broken = ggml_flash_attn_back_broken_rule(q, k, v, mask, sinks, o, d, params);
    if (broken) {
        GGML_ABORT("ggml_flash_attn_back: %s", broken);
    }

    struct ggml_flash_attn_back_node node = { 0 };
    node.grads                            = params.grads;
    set_shape(&node, q, k, v);
    node.kv_first = params.kv_first;
    node.kv_count = params.kv_count > 0 ? params.kv_count : node.M;

    struct ggml_tensor * result = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, layout(&node) / sizeof(float));

    ggml_set_op_params_f32(result, 0, params.scale);
    ggml_set_op_params_f32(result, 1, params.max_bias);
    ggml_set_op_params_f32(result, 2, params.logit_softcap);
    ggml_set_op_params_i32(result, OP_PARAM_GRADS, params.grads);
    set_op_params_i64(result, OP_PARAM_KV_FIRST, node.kv_first);
    set_op_params_i64(result, OP_PARAM_KV_COUNT, node.kv_count);

    result->op                                  = GGML_OP_FLASH_ATTN_BACK;
    result->src[GGML_FLASH_ATTN_BACK_SRC_Q]     = q;
    result->src[GGML_FLASH_ATTN_BACK_SRC_K]     = k;
    result->src[GGML_FLASH_ATTN_BACK_SRC_V]     = v;
    result->src[GGML_FLASH_ATTN_BACK_SRC_MASK]  = mask;
    result->src[GGML_FLASH_ATTN_BACK_SRC_SINKS] = sinks;
    result->src[GGML_FLASH_ATTN_BACK_SRC_O]     = o;
    result->src[GGML_FLASH_ATTN_BACK_SRC_DO]    = d;

    return result;
}

void ggml_flash_attn_back_set_split(struct ggml_tensor * node, bool split) {
    assert_kind(node);
    ggml_set_op_params_i32(node, OP_PARAM_SPLIT, split);
}

bool ggml_flash_attn_back_has(const struct ggml_tensor * back, enum ggml_flash_attn_back_part part) {
    const struct ggml_flash_attn_back_node node = ggml_flash_attn_back_decode(back);
    return part == GGML_FLASH_ATTN_BACK_LSE || part == GGML_FLASH_ATTN_BACK_D || ggml_flash_attn_back_wants(&node, part);
}

size_t ggml_flash_attn_back_offset(const struct ggml_tensor * back, enum ggml_flash_attn_back_part part) {
    GGML_ASSERT(ggml_flash_attn_back_has(back, part) && "the result does not hold this part");
    return ggml_flash_attn_back_decode(back).offset[part];
}

struct ggml_tensor * ggml_flash_attn_back_view(struct ggml_context * ctx, struct ggml_tensor * back, enum ggml_flash_attn_back_part part) {
    const size_t offset                                              = ggml_flash_attn_back_offset(back, part);
    const struct ggml_flash_attn_back_node node                      = ggml_flash_attn_back_decode(back);
    const int64_t ne[GGML_FLASH_ATTN_BACK_PART_COUNT][GGML_MAX_DIMS] = {
        /* DQ     = */ { node.Dk, node.N, node.H, node.S },
        /* DK     = */ { node.Dk, node.kv_count, node.Hkv, node.S },
        /* DV     = */ { node.Dv, node.kv_count, node.Hkv, node.S },
        /* LSE    = */ { node.N, node.H, node.S, 1 },
        /* D      = */ { node.N, node.H, node.S, 1 },
        /* DSINKS = */ { node.H, 1, 1, 1 },
    };
    const int64_t * n = ne[part];
    const size_t nb1  = n[0] * sizeof(float);
    const size_t nb2  = n[1] * nb1;
    const size_t nb3  = n[2] * nb2;
    return ggml_view_4d(ctx, back, n[0], n[1], n[2], n[3], nb1, nb2, nb3, offset);
}

static bool needs_grad(const struct ggml_cgraph * cgraph, const struct ggml_tensor * tensor, const bool * grads_needed) {
    if (!tensor) {
        return false;
    }
    const size_t i = ggml_hash_find(&cgraph->visited_hash_set, tensor);
    return i != GGML_HASHSET_FULL && ggml_bitset_get(cgraph->visited_hash_set.used, i) && grads_needed[i];
}

// whether a node of the graph may write into attn's result
static bool is_overwritten(const struct ggml_cgraph * cgraph, const struct ggml_tensor * attn) {
    for (int i = 0; i < cgraph->n_nodes; ++i) {
        const struct ggml_tensor * node = cgraph->nodes[i];
        const enum ggml_op op           = node->op;
        const bool shows                = op == GGML_OP_VIEW || op == GGML_OP_RESHAPE || op == GGML_OP_PERMUTE || op == GGML_OP_TRANSPOSE;
        if (node->view_src == attn && !shows) {
            return true;
        }
    }
    return false;
}

void ggml_flash_attn_back_src_grads(
    struct ggml_context * ctx,
    struct ggml_cgraph * cgraph,
    struct ggml_tensor * node,
    struct ggml_tensor * grad,
    const bool * grads_needed,
    struct ggml_tensor * src_grads[GGML_MAX_SRC]) {
    static const struct {
        enum ggml_flash_attn_back_src src;
        enum ggml_flash_attn_back_part part;
    } map[] = {
        { GGML_FLASH_ATTN_BACK_SRC_Q, GGML_FLASH_ATTN_BACK_DQ },
        { GGML_FLASH_ATTN_BACK_SRC_K, GGML_FLASH_ATTN_BACK_DK },
        { GGML_FLASH_ATTN_BACK_SRC_V, GGML_FLASH_ATTN_BACK_DV },
        { GGML_FLASH_ATTN_BACK_SRC_SINKS, GGML_FLASH_ATTN_BACK_DSINKS },
    };
    const int n_map = sizeof(map) / sizeof(map[0]);

    uint32_t grads = 0;
    for (int i = 0; i < n_map; ++i) {
        grads |= (uint32_t) needs_grad(cgraph, node->src[map[i].src], grads_needed) << map[i].part;
    }

    for (int i = 0; i < GGML_MAX_SRC; ++i) {
        src_grads[i] = NULL;
    }
    if (grads == 0) {
        return;
    }

    struct ggml_tensor * back = ggml_flash_attn_back(
        ctx, node->src[0], node->src[1], node->src[2], node->src[3], node->src[4], /*o =*/node, grad,
        (struct ggml_flash_attn_back_params){
            /*.scale         =*/ggml_get_op_params_f32(node, 0),
            /*.max_bias      =*/ggml_get_op_params_f32(node, 1),
            /*.logit_softcap =*/ggml_get_op_params_f32(node, 2),
            /*.grads         =*/grads,
            /*.kv_first      =*/0,
            /*.kv_count      =*/0,
        });
    // the forward's precision is left out: GGML_PREC_F32 there means sums in F32, which all backends have
    ggml_flash_attn_back_set_split(back, ggml_get_op_params_i32(node, OP_PARAM_SPLIT) != 0);
    if (is_overwritten(cgraph, node) || !ggml_flash_attn_back_use_saved(back)) {
        // not its values: a forward that rounds q, v or its sums to 16 bit makes D = do . o too inexact where V is nearly
        // constant
        back->src[GGML_FLASH_ATTN_BACK_SRC_O] = NULL;
    }

    for (int i = 0; i < n_map; ++i) {
        if (grads & 1u << map[i].part) {
            src_grads[map[i].src] = ggml_flash_attn_back_view(ctx, back, map[i].part);
        }
    }
}

bool ggml_flash_attn_back_is_whole_view(const struct ggml_tensor * node) {
    return node->op == GGML_OP_VIEW && node->type == GGML_TYPE_F32 && ggml_is_contiguous(node) &&
        ggml_are_same_layout(node, node->src[0]);
}

struct ggml_tensor * ggml_flash_attn_back_prepare_grad(
    struct ggml_context * ctx,
    struct ggml_cgraph * cgraph,
    struct ggml_tensor * node,
    struct ggml_tensor * grad,
    const bool * grads_needed) {
    if (node->op != GGML_OP_CPY && node->op != GGML_OP_CONT && node->op != GGML_OP_VIEW) {
        return grad;
    }
    const bool shows_part = node->op == GGML_OP_VIEW && !ggml_flash_attn_back_is_whole_view(node);
    if (shows_part && needs_grad(cgraph, node->src[0], grads_needed)) {
        struct ggml_tensor * src = node->src[0];
        const size_t i           = ggml_hash_find(&cgraph->visited_hash_set, src);
        if (!cgraph->grads[i]) {
            // zeros that do not read src: 0*src is NaN where a KV cache has unwritten cells, and src may not be F32. They
            // are a number repeated, as a leaf of src's shape would have memory from the first node to the last.
            struct ggml_tensor * zero  = ggml_fill(ctx, ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1), 0.0f);
            struct ggml_tensor * shape = ggml_new_tensor(ctx, GGML_TYPE_F32, GGML_MAX_DIMS, src->ne);
            cgraph->grads[i]           = ggml_repeat(ctx, zero, shape);
        }
    }
    if (node->op == GGML_OP_VIEW && !shows_part && node->src[0]->op == GGML_OP_ROPE) {
        return grad; // for ROPE_BACK, which takes it as it lies
    }
    return ggml_is_contiguous(grad) ? grad : ggml_cont(ctx, grad);
}
