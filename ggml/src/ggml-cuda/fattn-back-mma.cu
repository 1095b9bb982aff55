#include "fattn-back-mma.cuh"

#ifdef FATTN_BACK_TENSOR_CORES

#include "fattn-back-mma-host.cuh"

const char * ggml_cuda_flash_attn_back_mma_refusal(const int device, const ggml_tensor * dst) {
    const ggml_flash_attn_back_node node = ggml_flash_attn_back_decode(dst);
    const auto & info                    = ggml_cuda_info().devices[device];

    if (!ampere_mma_available(info.cc) || !cp_async_available(info.cc)) {
        return "the device or the build has no mma of Ampere or newer";
    }
    const fattn_back_mma_case * kernels = fattn_back_mma_get_case(node.Dk, node.Dv);
    if (node.Dk % 8 != 0 || node.Dv % 8 != 0 || kernels == nullptr) {
        return "the head sizes are not multiples of 8 up to 256";
    }
    if ((size_t) fattn_back_mma_smem(ggml_cuda_highest_compiled_arch(info.cc)) > info.smpbo) {
        return "the device has too little shared memory";
    }
    const ggml_tensor * mask = dst->src[GGML_FLASH_ATTN_BACK_SRC_MASK];
    const int64_t max_grid   = 65535; // in y and z
    if (node.S == 0 || node.H == 0) {
        return "there are no sequences or no heads";
    }
    // with outlier channels in every operand dQ misses the limit (1.6e-5)
    if (node.logit_softcap != 0.0f && dst->src[GGML_FLASH_ATTN_BACK_SRC_SINKS] != nullptr) {
        return "a softcap together with sinks";
    }
    // its tanh, 1 - exp, would leave logits that are small beside the cap too few bits
    if (node.logit_softcap > 1e4f) {
        return "a softcap above 10000 (0 is none)";
    }
    if (const char * reason = fattn_back_fp16_refusal(node)) {
        return reason;
    }
    if (node.S * node.Hkv > max_grid || (mask != nullptr && (mask->ne[2] * mask->ne[3] > max_grid || node.N > max_grid * FATTN_BACK_MMA_ROWS))) {
        return "more than 65535 KV heads, masks or blocks of queries";
    }
    if (node.M > INT_MAX / 2 || node.N * (node.H / node.Hkv) > INT_MAX / 8) {
        return "more than 2^30 keys or 2^28 queries in a KV head";
    }
    return nullptr;
}

const char * ggml_cuda_flash_attn_back_mma_forward_refusal(const int, const ggml_tensor *) {
    return nullptr;
}

fattn_back_plan ggml_cuda_flash_attn_back_mma_plan(const int device, const ggml_tensor * dst, const size_t limit) {
    const auto & info        = ggml_cuda_info().devices[device];
    fattn_back_mma_plan plan = fattn_back_mma_make_plan(fattn_back_get_args(dst), ggml_cuda_highest_compiled_arch(info.cc), info.nsm, limit);
    return { plan.nbytes, [plan](char * workspace, cudaStream_t stream) mutable { fattn_back_mma_run(plan, workspace, stream); } };
}

#endif // FATTN_BACK_TENSOR_CORES
