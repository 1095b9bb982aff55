#include "fattn-back.cuh"
#include "fattn-back-common.cuh"
#include "fattn-back-hopper.cuh"
#include "fattn-back-mma.cuh"
#include "fattn-back-rows.cuh"
#include "ggml-backend.h"

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

struct fattn_back_path {
    const char * name;
    const char * (*refusal)(int device, const ggml_tensor * dst); // NULL: takes the node
    fattn_back_plan (*plan)(int device, const ggml_tensor * dst, size_t limit);
};

// in order of preference; the last one takes whatever the operator does, so that its refusal is the operator's
static constexpr fattn_back_path fattn_back_paths[] = {
#ifdef FATTN_BACK_TENSOR_CORES
    { "hopper", ggml_cuda_flash_attn_back_hopper_refusal, ggml_cuda_flash_attn_back_hopper_plan },
    { "mma", ggml_cuda_flash_attn_back_mma_refusal, ggml_cuda_flash_attn_back_mma_plan },
#endif // FATTN_BACK_TENSOR_CORES
    { "rows", ggml_cuda_flash_attn_back_rows_refusal, ggml_cuda_flash_attn_back_rows_plan },
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

// the first plan of path or of those after it whose workspace fits room; false if there is none
static bool fattn_back_fit(
    const int device, const ggml_tensor * dst, const size_t room, const fattn_back_path * path, fattn_back_plan & plan) {
    const char * reason;
    for (; path != nullptr; path = fattn_back_choose(device, dst, &reason, path + 1)) {
        size_t limit = fattn_back_workspace_limit();
        do {
            plan = path->plan(device, dst, limit);
            if (plan.nbytes <= room) {
                return true;
            }
            limit /= 2;
        } while (limit >= FATTN_BACK_MIN_LIMIT);
    }
    return false;
}

void ggml_cuda_flash_attn_back(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const char * reason;
    const fattn_back_path * path = fattn_back_choose(ctx.device, dst, &reason);
    if (path == nullptr) {
        GGML_ABORT("FLASH_ATTN_BACK: %s", reason);
    }
    fattn_back_plan plan = path->plan(ctx.device, dst, fattn_back_workspace_limit());
    size_t & held        = fattn_back_held_by(ctx);
    if (plan.nbytes > held) {
        size_t free;
        size_t total;
        CUDA_CHECK(cudaMemGetInfo(&free, &total));
        const size_t room = held + (free - std::min(free, FATTN_BACK_SLACK)) / 21 * 20; // the pool may take a twentieth more
        if (plan.nbytes > room && !fattn_back_fit(ctx.device, dst, room, path, plan)) {
            GGML_LOG_ERROR("FLASH_ATTN_BACK: device %d has %.1f MiB free, too little for any path\n", ctx.device, free / 1048576.0);
            fattn_back_out_of_memory = true;
            return;
        }
        held = std::max(held, plan.nbytes);
    }
    ggml_cuda_pool_alloc<char> workspace(ctx.pool(), std::max<size_t>(plan.nbytes, 1));
    plan.run(workspace.get(), ctx.stream());
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

static const char * fattn_back_refusal(ggml_backend_dev_t dev, const ggml_tensor * dst) {
    const char * reason;
    fattn_back_choose(fattn_back_device_id(dev), dst, &reason);
    return reason;
}

static const char * fattn_back_path_name(ggml_backend_dev_t dev, const ggml_tensor * dst) {
    const char * reason;
    const fattn_back_path * path = fattn_back_choose(fattn_back_device_id(dev), dst, &reason);
    return path != nullptr ? path->name : nullptr;
}

void * ggml_cuda_flash_attn_back_get_proc_address(const char * name) {
    if (strcmp(name, "ggml_backend_flash_attn_back_refusal") == 0) {
        return (void *) fattn_back_refusal;
    }
    if (strcmp(name, "ggml_backend_flash_attn_back_path") == 0) {
        return (void *) fattn_back_path_name;
    }
    if (strcmp(name, "ggml_backend_flash_attn_back_source") == 0) {
        return (void *) ggml_cuda_flash_attn_back_source;
    }
    return nullptr;
}
