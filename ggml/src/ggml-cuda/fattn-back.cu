#include "fattn-back.cuh"
#include "fattn-back-common.cuh"
#include "fattn-back-hopper.cuh"
#include "fattn-back-mma.cuh"
#include "fattn-back-rows.cuh"
#include "fattn.cuh"
#include "ggml-backend.h"
#include "ggml-backend-impl.h"
#include "ggml-cuda.h"

#ifdef FATTN_BACK_TENSOR_CORES
#include "fattn-back-guard.cuh"
#endif // FATTN_BACK_TENSOR_CORES

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

struct fattn_back_path {
    const char * name;
    const char * (*refusal)(int device, const ggml_tensor * dst); // NULL: takes the node
    fattn_back_plan (*plan)(int device, const ggml_tensor * dst, size_t limit); // of a FLASH_ATTN_EXT node: of its forward
    const char * (*forward_refusal)(int device, const ggml_tensor * attn); // NULL: there is no forward
};

// in order of preference; the last one takes whatever the operator does, so that its refusal is the operator's
static constexpr fattn_back_path fattn_back_paths[] = {
#ifdef FATTN_BACK_TENSOR_CORES
#ifndef FATTN_BACK_NO_HOPPER // see GGML_CUDA_FATTN_BACK_PATHS
    { "hopper", ggml_cuda_flash_attn_back_hopper_refusal, ggml_cuda_flash_attn_back_hopper_plan,
        ggml_cuda_flash_attn_back_hopper_forward_refusal },
#endif
#ifndef FATTN_BACK_NO_MMA
    { "mma", ggml_cuda_flash_attn_back_mma_refusal, ggml_cuda_flash_attn_back_mma_plan, ggml_cuda_flash_attn_back_mma_forward_refusal },
#endif
#endif // FATTN_BACK_TENSOR_CORES
    { "rows", ggml_cuda_flash_attn_back_rows_refusal, ggml_cuda_flash_attn_back_rows_plan, nullptr },
};

// the first path from begin on that takes the node; NULL if none does, then reason says why
static const fattn_back_path * fattn_back_choose(
    const int device, const ggml_tensor * dst, const char ** reason, const fattn_back_path * begin = fattn_back_paths) {
    const char * forced = getenv("GGML_CUDA_FATTN_BACK_PATH");
    *reason             = fattn_back_common_refusal(dst);
    if (*reason != nullptr) {
        return nullptr;
    }
    for (const fattn_back_path * path = begin; path != std::end(fattn_back_paths); ++path) {
        if (forced != nullptr && strcmp(forced, path->name) != 0) {
            continue;
        }
        *reason = path->refusal(device, dst);
        if (*reason == nullptr) {
            return path;
        }
    }
    if (*reason == nullptr && begin == fattn_back_paths) {
        static const std::string unknown = [] {
            std::string s = "GGML_CUDA_FATTN_BACK_PATH must be one of:";
            for (const fattn_back_path & path : fattn_back_paths) {
                s += std::string(" ") + path.name;
            }
            GGML_LOG_ERROR("%s\n", s.c_str());
            return s;
        }();
        *reason = unknown.c_str();
    }
    return nullptr;
}

// The pool ends the process where the device has no memory left, so what a run takes is compared with what is free before.
// The pool keeps what it has got: bytes of the largest workspace of each pool, so that a run within them need not ask.
// The maps are of all contexts; an entry is its context's own.
static std::mutex fattn_back_held_mutex;
static std::map<const ggml_backend_cuda_context *, std::map<const ggml_cuda_pool *, size_t>> fattn_back_held;

static size_t & fattn_back_held_by(ggml_backend_cuda_context & ctx) {
    std::lock_guard<std::mutex> lock(fattn_back_held_mutex);
    return fattn_back_held[&ctx][&ctx.pool()];
}

static thread_local bool fattn_back_out_of_memory = false;

// what the pool rounds up to, and what a driver that loads a kernel may need
static constexpr size_t FATTN_BACK_SLACK     = 16 << 20;
static constexpr size_t FATTN_BACK_MIN_LIMIT = 1 << 20;

// bytes that the current device has left
static size_t fattn_back_free() {
    size_t free;
    size_t total;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return free;
}

// runs the first plan whose workspace fits what is free: of path, for ever smaller limits, then of the paths that next
// gives; false if none fits
template <typename N>
static bool fattn_back_run(
    ggml_backend_cuda_context & ctx, const ggml_tensor * dst, const fattn_back_path * path, const N & next) {
    size_t limit         = fattn_back_workspace_limit();
    fattn_back_plan plan = path->plan(ctx.device, dst, limit);
    size_t & held        = fattn_back_held_by(ctx);
    if (plan.nbytes > held) {
        const size_t free = fattn_back_free();
        // the pool may take a twentieth more
        const size_t room = held + (free - std::min(free, FATTN_BACK_SLACK)) / 21 * 20;
        while (plan.nbytes > room) {
            limit /= 2;
            if (limit < FATTN_BACK_MIN_LIMIT) {
                limit = fattn_back_workspace_limit();
                path  = next(path);
                if (path == nullptr) {
                    return false;
                }
            }
            plan = path->plan(ctx.device, dst, limit);
        }
        held = std::max(held, plan.nbytes);
    }
    ggml_cuda_pool_alloc<char> workspace(ctx.pool(), std::max<size_t>(plan.nbytes, 1));
    plan.run(workspace.get(), ctx.stream());
    return true;
}

void ggml_cuda_flash_attn_back(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const char * reason;
    const fattn_back_path * path = fattn_back_choose(ctx.device, dst, &reason);
    if (path == nullptr) {
        GGML_ABORT("FLASH_ATTN_BACK: %s", reason);
    }
    const auto next = [&](const fattn_back_path * p) { return fattn_back_choose(ctx.device, dst, &reason, p + 1); };
    if (!fattn_back_run(ctx, dst, path, next)) {
        const double free = fattn_back_free() / 1048576.0;
        GGML_LOG_ERROR("FLASH_ATTN_BACK: device %d has %.1f MiB free, too little for any path\n", ctx.device, free);
        fattn_back_out_of_memory = true;
    }
}

// the path whose forward runs attn: the one that takes its gradient, if it has a forward that takes it
static const fattn_back_path * fattn_back_choose_forward(
    const int device, const ggml_tensor * attn, const char ** reason) {
    const fattn_back_path * path = fattn_back_choose(device, attn, reason);
    if (path == nullptr) {
        return nullptr;
    }
    *reason = path->forward_refusal != nullptr ? path->forward_refusal(device, attn) : "the path has no forward";
    return *reason == nullptr ? path : nullptr;
}

// the device whose memory holds attn and what is saved behind it, -1 if there is none
static int fattn_back_saved_device(const ggml_tensor * attn) {
    const uintptr_t data = (uintptr_t) attn->data;
    if (!ggml_flash_attn_back_is_marked(attn) || data == 0 || attn->buffer == nullptr || attn->view_src != nullptr) {
        return -1;
    }
    const uintptr_t base = (uintptr_t) ggml_backend_buffer_get_base(attn->buffer);
    const uintptr_t end  = base + ggml_backend_buffer_get_size(attn->buffer);
    if (data < base || data + ggml_cuda_flash_attn_train_alloc_size(attn) > end || data % GGML_FLASH_ATTN_BACK_SAVED_ALIGN != 0) {
        return -1;
    }
    for (int device = 0; device < ggml_backend_cuda_get_device_count(); ++device) {
        if (attn->buffer->buft == ggml_backend_cuda_buffer_type(device)) {
            return device;
        }
    }
    return -1;
}

fattn_back_saved fattn_back_get_saved(const ggml_tensor * node) {
    const ggml_tensor * attn = node;
    if (node->op == GGML_OP_FLASH_ATTN_BACK) {
        attn = ggml_flash_attn_back_forward(node);
        if (attn == nullptr || attn->buffer == nullptr || node->buffer == nullptr ||
            node->buffer->buft != attn->buffer->buft) {
            return {};
        }
    }
    const int device = fattn_back_saved_device(attn);
    const char * reason;
    if (device < 0 || (node != attn && fattn_back_choose_forward(device, attn, &reason) == nullptr)) {
        return {};
    }
    const size_t offset                   = GGML_PAD(ggml_nbytes(attn), GGML_FLASH_ATTN_BACK_SAVED_ALIGN);
    const ggml_flash_attn_back_node shape = ggml_flash_attn_back_decode(attn);
    uint32_t * stamp                      = (uint32_t *) ((char *) attn->data + offset);
    float * lse                           = (float *) (stamp + 4);
    return { stamp, lse, (uint32_t *) (lse + shape.S * shape.H * shape.N) };
}

size_t ggml_cuda_flash_attn_train_alloc_size(const ggml_tensor * tensor) {
    const size_t saved = tensor->op == GGML_OP_FLASH_ATTN_EXT ? ggml_flash_attn_back_saved_size(tensor) : 0;
    return saved > 0 ? ggml_nbytes(tensor) + saved : 0;
}

bool ggml_cuda_flash_attn_train(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    if (fattn_back_saved_device(dst) != ctx.device) {
        return false;
    }
    const char * reason;
    const fattn_back_path * path = fattn_back_choose_forward(ctx.device, dst, &reason);
    const auto next              = [](const fattn_back_path *) -> const fattn_back_path * { return nullptr; };
    if (path == nullptr || !fattn_back_run(ctx, dst, path, next)) {
        ggml_cuda_flash_attn_ext(ctx, dst); // its own scratch is where saved is
        CUDA_CHECK(cudaMemsetAsync(fattn_back_get_saved(dst).stamp, 0, sizeof(uint32_t), ctx.stream()));
    }
    return true;
}

bool ggml_cuda_flash_attn_back_failed() {
    return std::exchange(fattn_back_out_of_memory, false);
}

void ggml_cuda_flash_attn_back_forget(const ggml_backend_cuda_context * ctx) {
    std::lock_guard<std::mutex> lock(fattn_back_held_mutex);
    fattn_back_held.erase(ctx);
}

bool ggml_cuda_flash_attn_back_supported(const int device, const ggml_tensor * dst) {
    const char * reason;
    return fattn_back_choose(device, dst, &reason) != nullptr;
}

// index of a device in its registry, which is the id that this backend knows it by
static int fattn_back_device_id(ggml_backend_dev_t dev) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    for (size_t i = 0; i < ggml_backend_reg_dev_count(reg); ++i) {
        if (ggml_backend_reg_dev_get(reg, i) == dev) {
            return (int) i;
        }
    }
    GGML_ABORT("FLASH_ATTN_BACK: not a device of this backend");
}

// the path that runs the node, of either kind
static const fattn_back_path * fattn_back_choose_any(ggml_backend_dev_t dev, const ggml_tensor * dst, const char ** reason) {
    const int device   = fattn_back_device_id(dev);
    const bool forward = dst->op == GGML_OP_FLASH_ATTN_EXT;
    return forward ? fattn_back_choose_forward(device, dst, reason) : fattn_back_choose(device, dst, reason);
}

static const char * fattn_back_refusal(ggml_backend_dev_t dev, const ggml_tensor * dst) {
    const char * reason;
    fattn_back_choose_any(dev, dst, &reason);
    return reason;
}

static const char * fattn_back_path_name(ggml_backend_dev_t dev, const ggml_tensor * dst) {
    const char * reason;
    const fattn_back_path * path = fattn_back_choose_any(dev, dst, &reason);
    return path != nullptr ? path->name : nullptr;
}

static void fattn_back_units(ggml_backend_dev_t dev, uint64_t counts[3]) {
    counts[0] = counts[1] = counts[2] = 0;
#ifdef FATTN_BACK_TENSOR_CORES
    ggml_cuda_flash_attn_back_units(fattn_back_device_id(dev), counts);
#endif // FATTN_BACK_TENSOR_CORES
    GGML_UNUSED(dev);
}

void * ggml_cuda_flash_attn_back_get_proc_address(const char * name) {
    if (strcmp(name, "ggml_backend_flash_attn_back_refusal") == 0) {
        return (void *) fattn_back_refusal;
    }
    if (strcmp(name, "ggml_backend_flash_attn_back_path") == 0) {
        return (void *) fattn_back_path_name;
    }
    if (strcmp(name, "ggml_backend_flash_attn_back_units") == 0) {
        return (void *) fattn_back_units;
    }
    if (strcmp(name, "ggml_backend_flash_attn_back_source") == 0) {
        return (void *) ggml_cuda_flash_attn_back_source;
    }
    return nullptr;
}
