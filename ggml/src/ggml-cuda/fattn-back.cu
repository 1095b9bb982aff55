#include "fattn-back.cuh"
#include "fattn-back-common.cuh"
#include "fattn-back-hopper.cuh"
#include "fattn-back-mma.cuh"
#include "fattn-back-rows.cuh"
#include "ggml-backend.h"

#include <cstdlib>
#include <cstring>

struct fattn_back_path {
    const char * name;
    const char * (*refusal)(int device, const ggml_tensor * dst); // NULL: takes the node
    void (*run)(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
};

// in order of preference; the last one takes whatever the operator does, so that its refusal is the operator's
static constexpr fattn_back_path fattn_back_paths[] = {
    { "hopper", ggml_cuda_flash_attn_back_hopper_refusal, ggml_cuda_flash_attn_back_hopper },
    { "mma", ggml_cuda_flash_attn_back_mma_refusal, ggml_cuda_flash_attn_back_mma },
    { "rows", ggml_cuda_flash_attn_back_rows_refusal, ggml_cuda_flash_attn_back_rows },
};

// the path that runs the node; NULL if none does, then reason says why
static const fattn_back_path * fattn_back_choose(const int device, const ggml_tensor * dst, const char ** reason) {
    const char * forced = getenv("GGML_CUDA_FATTN_BACK_PATH");
    *reason             = fattn_back_common_refusal(dst);
    if (*reason != nullptr) {
        return nullptr;
    }
    for (const fattn_back_path & path : fattn_back_paths) {
        if (forced != nullptr && strcmp(forced, path.name) != 0) {
            continue;
        }
        *reason = path.refusal(device, dst);
        if (*reason == nullptr) {
            return &path;
        }
    }
    if (*reason == nullptr) {
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

void ggml_cuda_flash_attn_back(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const char * reason;
    const fattn_back_path * path = fattn_back_choose(ctx.device, dst, &reason);
    if (path == nullptr) {
        GGML_ABORT("FLASH_ATTN_BACK: %s", reason);
    }
    path->run(ctx, dst);
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
