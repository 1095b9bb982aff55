// A file of its own, so that a change of the patch's tests does not compile kernels again.

#include "fattn-back.cuh"
#include "ggml-flash-attn-back-source.h"

const char * ggml_cuda_flash_attn_back_source() {
    return GGML_FLASH_ATTN_BACK_SOURCE;
}
