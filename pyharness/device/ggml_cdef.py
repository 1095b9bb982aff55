"""What the harness uses of ggml, for cffi's API mode: layouts and values come from the headers at compile time."""

CDEF = """
#define GGML_MAX_DIMS ...
#define GGML_MAX_SRC ...
#define GGML_MEM_ALIGN ...

enum ggml_status { GGML_STATUS_ALLOC_FAILED, GGML_STATUS_SUCCESS, ... };
enum ggml_prec { GGML_PREC_DEFAULT, GGML_PREC_F32, ... };
enum ggml_type {
    GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_I8, GGML_TYPE_I32, GGML_TYPE_I64,
    GGML_TYPE_COUNT, ... };
enum ggml_op { GGML_OP_NONE, GGML_OP_CPY, GGML_OP_FLASH_ATTN_EXT, GGML_OP_FLASH_ATTN_BACK, ... };
enum ggml_tensor_flag { GGML_TENSOR_FLAG_LOSS, ... };
enum ggml_backend_dev_type { GGML_BACKEND_DEVICE_TYPE_CPU, GGML_BACKEND_DEVICE_TYPE_GPU, ... };

struct ggml_context;
struct ggml_cgraph;
struct ggml_backend_buffer;
struct ggml_backend_device;
typedef struct ggml_backend * ggml_backend_t;
typedef struct ggml_backend_device * ggml_backend_dev_t;
typedef struct ggml_backend_reg * ggml_backend_reg_t;
typedef struct ggml_backend_buffer * ggml_backend_buffer_t;
typedef struct ggml_backend_buffer_type * ggml_backend_buffer_type_t;
typedef struct ggml_backend_sched * ggml_backend_sched_t;
typedef struct ggml_backend_event * ggml_backend_event_t;
typedef struct ggml_gallocr * ggml_gallocr_t;

struct ggml_tensor {
    enum ggml_type type;
    struct ggml_backend_buffer * buffer;
    int64_t ne[...];
    size_t nb[...];
    enum ggml_op op;
    int32_t op_params[...];
    int32_t flags;
    struct ggml_tensor * src[...];
    struct ggml_tensor * view_src;
    size_t view_offs;
    void * data;
    char name[...];
    ...;
};

struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };
struct ggml_context * ggml_init(struct ggml_init_params params);
void ggml_free(struct ggml_context * ctx);
size_t ggml_tensor_overhead(void);
size_t ggml_graph_overhead_custom(size_t size, bool grads);
const char * ggml_version(void);
const char * ggml_type_name(enum ggml_type type);
const char * ggml_op_name(enum ggml_op op);
const char * ggml_status_to_string(enum ggml_status status);
size_t ggml_nbytes(const struct ggml_tensor * tensor);
int64_t ggml_nelements(const struct ggml_tensor * tensor);
size_t ggml_row_size(enum ggml_type type, int64_t ne);
void ggml_set_name(struct ggml_tensor * tensor, const char * name);
void ggml_set_input(struct ggml_tensor * tensor);
void ggml_set_output(struct ggml_tensor * tensor);
void ggml_set_param(struct ggml_tensor * tensor);
void ggml_set_loss(struct ggml_tensor * tensor);

struct ggml_tensor * ggml_new_tensor(
    struct ggml_context * ctx, enum ggml_type type, int n_dims, const int64_t * ne);
struct ggml_tensor * ggml_new_tensor_1d(struct ggml_context * ctx, enum ggml_type type, int64_t ne0);
struct ggml_tensor * ggml_new_tensor_4d(
    struct ggml_context * ctx, enum ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3);
struct ggml_tensor * ggml_add(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b);
struct ggml_tensor * ggml_sub(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b);
struct ggml_tensor * ggml_mul(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b);
struct ggml_tensor * ggml_scale(struct ggml_context * ctx, struct ggml_tensor * a, float s);
struct ggml_tensor * ggml_sum(struct ggml_context * ctx, struct ggml_tensor * a);
struct ggml_tensor * ggml_cont(struct ggml_context * ctx, struct ggml_tensor * a);
struct ggml_tensor * ggml_cast(struct ggml_context * ctx, struct ggml_tensor * a, enum ggml_type type);
struct ggml_tensor * ggml_cpy(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b);
struct ggml_tensor * ggml_set_rows(
    struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b, struct ggml_tensor * c);
struct ggml_tensor * ggml_permute(
    struct ggml_context * ctx, struct ggml_tensor * a, int axis0, int axis1, int axis2, int axis3);
struct ggml_tensor * ggml_reshape_4d(
    struct ggml_context * ctx, struct ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3);
struct ggml_tensor * ggml_repeat(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b);
struct ggml_tensor * ggml_view_1d(
    struct ggml_context * ctx, struct ggml_tensor * a, int64_t ne0, size_t offset);
struct ggml_tensor * ggml_view_4d(
    struct ggml_context * ctx, struct ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3,
    size_t nb1, size_t nb2, size_t nb3, size_t offset);
struct ggml_tensor * ggml_mul_mat(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b);
void ggml_mul_mat_set_prec(struct ggml_tensor * a, enum ggml_prec prec);
struct ggml_tensor * ggml_transpose(struct ggml_context * ctx, struct ggml_tensor * a);
struct ggml_tensor * ggml_out_prod(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b);
struct ggml_tensor * ggml_soft_max_ext(
    struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * mask, float scale, float max_bias);
struct ggml_tensor * ggml_soft_max_ext_back(
    struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b, float scale, float max_bias);
struct ggml_tensor * ggml_flash_attn_ext(
    struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * k, struct ggml_tensor * v,
    struct ggml_tensor * mask,
    float scale, float max_bias, float logit_softcap);
void ggml_flash_attn_ext_add_sinks(struct ggml_tensor * a, struct ggml_tensor * sinks);
void ggml_flash_attn_ext_set_prec(struct ggml_tensor * a, enum ggml_prec prec);
struct ggml_tensor * ggml_cross_entropy_loss(
    struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b);

struct ggml_cgraph * ggml_new_graph_custom(struct ggml_context * ctx, size_t size, bool grads);
void ggml_graph_add_node(struct ggml_cgraph * cgraph, struct ggml_tensor * tensor);
void ggml_build_forward_expand(struct ggml_cgraph * cgraph, struct ggml_tensor * tensor);
void ggml_build_backward_expand(
    struct ggml_context * ctx, struct ggml_cgraph * cgraph, struct ggml_tensor ** grad_accs);
void ggml_graph_reset(struct ggml_cgraph * cgraph);
int ggml_graph_n_nodes(struct ggml_cgraph * cgraph);
struct ggml_tensor * ggml_graph_node(struct ggml_cgraph * cgraph, int i);
struct ggml_tensor * ggml_graph_get_grad(const struct ggml_cgraph * cgraph, const struct ggml_tensor * node);

enum ggml_flash_attn_back_part { GGML_FLASH_ATTN_BACK_PART_COUNT, ... };
struct ggml_flash_attn_back_params {
    float scale; float max_bias; float logit_softcap; uint32_t grads; int64_t kv_first; int64_t kv_count;
};
struct ggml_tensor * ggml_flash_attn_back(
    struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * k, struct ggml_tensor * v,
    struct ggml_tensor * mask,
    struct ggml_tensor * sinks, struct ggml_tensor * o, struct ggml_tensor * d,
    struct ggml_flash_attn_back_params params);
bool ggml_flash_attn_back_use_saved(struct ggml_tensor * back);
void ggml_flash_attn_back_set_split(struct ggml_tensor * node, bool split);
bool ggml_flash_attn_back_has(const struct ggml_tensor * back, enum ggml_flash_attn_back_part part);
size_t ggml_flash_attn_back_offset(const struct ggml_tensor * back, enum ggml_flash_attn_back_part part);
struct ggml_tensor * ggml_flash_attn_back_view(
    struct ggml_context * ctx, struct ggml_tensor * back, enum ggml_flash_attn_back_part part);
const char * ggml_flash_attn_back_source(void);
const char * ggml_flash_attn_back_train_refusal(
    ggml_backend_dev_t dev, const struct ggml_tensor * attn, uint32_t grads);
typedef const char * (*ggml_backend_flash_attn_back_refusal_t)(
    struct ggml_backend_device * dev, const struct ggml_tensor * back);
typedef const char * (*ggml_backend_flash_attn_back_path_t)(
    struct ggml_backend_device * dev, const struct ggml_tensor * back);
typedef const char * (*ggml_backend_flash_attn_back_source_t)(void);
typedef void (*ggml_backend_flash_attn_back_units_t)(struct ggml_backend_device * dev, uint64_t * counts);

void ggml_backend_load_all_from_path(const char * dir_path);
size_t ggml_backend_dev_count(void);
ggml_backend_dev_t ggml_backend_dev_get(size_t index);
ggml_backend_dev_t ggml_backend_dev_by_name(const char * name);
const char * ggml_backend_dev_name(ggml_backend_dev_t device);
const char * ggml_backend_dev_description(ggml_backend_dev_t device);
enum ggml_backend_dev_type ggml_backend_dev_type(ggml_backend_dev_t device);
void ggml_backend_dev_memory(ggml_backend_dev_t device, size_t * free, size_t * total);
size_t ggml_backend_reg_count(void);
ggml_backend_reg_t ggml_backend_reg_get(size_t index);
ggml_backend_reg_t ggml_backend_dev_backend_reg(ggml_backend_dev_t device);
const char * ggml_backend_reg_name(ggml_backend_reg_t reg);
void * ggml_backend_reg_get_proc_address(ggml_backend_reg_t reg, const char * name);
ggml_backend_t ggml_backend_dev_init(ggml_backend_dev_t device, const char * params);
bool ggml_backend_dev_supports_op(ggml_backend_dev_t device, const struct ggml_tensor * op);
typedef void (*ggml_backend_set_n_threads_t)(ggml_backend_t backend, int n_threads);

void ggml_backend_free(ggml_backend_t backend);
ggml_backend_buffer_type_t ggml_backend_get_default_buffer_type(ggml_backend_t backend);
size_t ggml_backend_get_alignment(ggml_backend_t backend);
ggml_backend_buffer_t ggml_backend_alloc_buffer(ggml_backend_t backend, size_t size);
size_t ggml_backend_buft_get_alloc_size(ggml_backend_buffer_type_t buft, const struct ggml_tensor * tensor);
void ggml_backend_buffer_free(ggml_backend_buffer_t buffer);
void * ggml_backend_buffer_get_base(ggml_backend_buffer_t buffer);
size_t ggml_backend_buffer_get_size(ggml_backend_buffer_t buffer);
void ggml_backend_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value);
enum ggml_status ggml_backend_tensor_alloc(
    ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, void * addr);
enum ggml_status ggml_backend_view_init(struct ggml_tensor * tensor);
void ggml_backend_tensor_set(struct ggml_tensor * tensor, const void * data, size_t offset, size_t size);
void ggml_backend_tensor_get(const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);
enum ggml_status ggml_backend_graph_compute(ggml_backend_t backend, struct ggml_cgraph * cgraph);
void ggml_backend_synchronize(ggml_backend_t backend);
struct ggml_backend_buffer * ggml_backend_alloc_ctx_tensors(
    struct ggml_context * ctx, ggml_backend_t backend);
ggml_backend_sched_t ggml_backend_sched_new(
    ggml_backend_t * backends, ggml_backend_buffer_type_t * bufts, int n_backends, size_t graph_size,
    bool parallel, bool op_offload);
void ggml_backend_sched_free(ggml_backend_sched_t sched);
bool ggml_backend_sched_alloc_graph(ggml_backend_sched_t sched, struct ggml_cgraph * graph);
enum ggml_status ggml_backend_sched_graph_compute(ggml_backend_sched_t sched, struct ggml_cgraph * graph);
int ggml_backend_sched_get_n_splits(ggml_backend_sched_t sched);
void ggml_backend_sched_set_tensor_backend(
    ggml_backend_sched_t sched, struct ggml_tensor * node, ggml_backend_t backend);
ggml_backend_t ggml_backend_sched_get_tensor_backend(ggml_backend_sched_t sched, struct ggml_tensor * node);

bool ggml_backend_supports_op(ggml_backend_t backend, const struct ggml_tensor * op);
ggml_backend_dev_t ggml_backend_get_device(ggml_backend_t backend);
ggml_backend_buffer_type_t ggml_backend_dev_buffer_type(ggml_backend_dev_t device);
enum ggml_status ggml_backend_graph_compute_async(ggml_backend_t backend, struct ggml_cgraph * cgraph);
void ggml_backend_tensor_memset(struct ggml_tensor * tensor, uint8_t value, size_t offset, size_t size);
ggml_backend_event_t ggml_backend_event_new(ggml_backend_dev_t device);
void ggml_backend_event_free(ggml_backend_event_t event);
void ggml_backend_event_record(ggml_backend_event_t event, ggml_backend_t backend);
ggml_gallocr_t ggml_gallocr_new(ggml_backend_buffer_type_t buft);
void ggml_gallocr_free(ggml_gallocr_t galloc);
bool ggml_gallocr_alloc_graph(ggml_gallocr_t galloc, struct ggml_cgraph * graph);
size_t ggml_gallocr_get_buffer_size(ggml_gallocr_t galloc, int buffer_id);

enum ggml_opt_loss_type { GGML_OPT_LOSS_TYPE_CROSS_ENTROPY_IDS, ... };
enum ggml_opt_optimizer_type { GGML_OPT_OPTIMIZER_TYPE_SGD, ... };
struct ggml_opt_params {
    struct ggml_context * ctx_compute; struct ggml_tensor * inputs; struct ggml_tensor * outputs;
    enum ggml_opt_optimizer_type optimizer;
    ...;
};
typedef struct ggml_opt_context * ggml_opt_context_t;
typedef struct ggml_opt_result * ggml_opt_result_t;
struct ggml_opt_params ggml_opt_default_params(ggml_backend_sched_t sched, enum ggml_opt_loss_type loss_type);
ggml_opt_context_t ggml_opt_init(struct ggml_opt_params params);
void ggml_opt_free(ggml_opt_context_t opt_ctx);
struct ggml_tensor * ggml_opt_labels(ggml_opt_context_t opt_ctx);
void ggml_opt_alloc(ggml_opt_context_t opt_ctx, bool backward);
void ggml_opt_eval(ggml_opt_context_t opt_ctx, ggml_opt_result_t result);
ggml_opt_result_t ggml_opt_result_init(void);
void ggml_opt_result_free(ggml_opt_result_t result);
void ggml_opt_result_loss(ggml_opt_result_t result, double * loss, double * unc);
void ggml_opt_result_accuracy(ggml_opt_result_t result, double * accuracy, double * unc);

void pyharness_attach(void);
extern "Python" void pyharness_aborted(const char * message);
"""

SOURCE = """
#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-flash-attn-back.h"
#include "ggml-flash-attn-back-train.h"
#include "ggml-opt.h"

#include <stdio.h>

static void pyharness_aborted(const char * message);

static void pyharness_log(enum ggml_log_level level, const char * text, void * user_data) {
    (void) user_data;
    if (level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

// warnings and errors only on stderr; a failed GGML_ASSERT is told to Python before the process ends
static void pyharness_attach(void) {
    ggml_log_set(pyharness_log, NULL);
    ggml_set_abort_callback(pyharness_aborted);
}
"""
