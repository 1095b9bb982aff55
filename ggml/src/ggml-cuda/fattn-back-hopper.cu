#include "fattn-back-hopper.cuh"

#ifdef FATTN_BACK_TENSOR_CORES

#include "fattn-back-hopper-run.cuh"

// Its limit of threads tells whether the code that the driver chose for the device is sm_90a.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FATTN_BACK_HOPPER_PROBE 32
#else
#define FATTN_BACK_HOPPER_PROBE 64
#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
static __global__ void __launch_bounds__(FATTN_BACK_HOPPER_PROBE) flash_attn_back_hopper_probe() {
}

#define FATTN_BACK_HOPPER_LEAST 7000 // measured (docs/notes/2026-11-30-hopper.md)

static bool fattn_back_hopper_built(const int device) {
    static int built[GGML_CUDA_MAX_DEVICES] = { 0 }; // 0: not asked yet, 1: no, 2: yes
    if (built[device] == 0) {
        ggml_cuda_set_device(device);
        cudaFuncAttributes attr;
        CUDA_CHECK(cudaFuncGetAttributes(&attr, flash_attn_back_hopper_probe));
        built[device] = attr.maxThreadsPerBlock == 32 ? 2 : 1;
    }
    return built[device] == 2;
}

const char * ggml_cuda_flash_attn_back_hopper_refusal(const int device, const ggml_tensor * dst) {
    const ggml_flash_attn_back_node node = ggml_flash_attn_back_decode(dst);
    const auto & info                    = ggml_cuda_info().devices[device];

    if (info.cc != GGML_CUDA_CC_HOPPER || !fattn_back_hopper_built(device)) {
        return "the device is not of compute capability 9.0 or the build has no sm_90a code";
    }
    if (node.Dk != node.Dv || (node.Dk != 64 && node.Dk != 128 && node.Dk != 256)) {
        return "the head sizes are not both 64, 128 or 256";
    }
    if (node.logit_softcap != 0.0f || node.scale == 0.0f) {
        return "there is a softcap or the scale is 0";
    }
    if (const char * reason = fattn_back_fp16_refusal(node)) {
        return reason;
    }
    if (node.S * node.H == 0) {
        return "there are no heads";
    }
    const ggml_tensor * mask = dst->src[GGML_FLASH_ATTN_BACK_SRC_MASK];
    const int64_t max_grid   = 65535; // in y and z
    if (node.S * (2 * node.Hkv + node.H) > max_grid || (mask != nullptr && mask->ne[2] * mask->ne[3] > max_grid) ||
        std::max(node.N, node.M) > max_grid * FATTN_BACK_HOPPER_ROWS) {
        return "more heads, masks, queries or keys than a grid holds";
    }
    fattn_back_args args = fattn_back_get_args(dst);
    args.O               = nullptr; // the forward of a node and its gradient are of one path
    if (fattn_back_hopper_least(args) > fattn_back_workspace_limit()) {
        return "the operands of one KV head do not fit the workspace";
    }
    // where there is little to do mma is faster, the more so the fewer the queries of a head
    const auto tiles     = [](const int64_t n) { return (n + FATTN_BACK_HOPPER_ROWS - 1) / FATTN_BACK_HOPPER_ROWS; };
    const int64_t ntiles = (2 * tiles(node.N) - 1) * tiles(node.M) * node.H * node.S;
    if (getenv("GGML_CUDA_FATTN_BACK_PATH") == nullptr && ntiles < FATTN_BACK_HOPPER_LEAST) {
        return "too few queries and keys for it to be the fastest";
    }
    return nullptr;
}

const char * ggml_cuda_flash_attn_back_hopper_forward_refusal(const int, const ggml_tensor *) {
    return nullptr;
}

fattn_back_plan ggml_cuda_flash_attn_back_hopper_plan(const int device, const ggml_tensor * node, const size_t limit) {
    const fattn_back_hopper_plan plan =
        fattn_back_hopper_make_plan(fattn_back_get_args(node), limit, ggml_cuda_info().devices[device].nsm);
    return { plan.size, [plan](char * workspace, cudaStream_t stream) { fattn_back_hopper_run(plan, workspace, stream); } };
}

#endif // FATTN_BACK_TENSOR_CORES
