// Reads nodes, one a line, and prints the workspace that the tensor-core paths plan for each; no device is asked.
// in: Dk Dv N M H Hkv S mask softcap sinks grads kv_first kv_count precise arch multiprocessors limit
// out: bytes of mma's workspace and of its smallest, then of hopper's (0 0: not its head size), the ranges of keys whose dS it keeps, and
// the shares of the keys for LSE and D, and for dQ
#include "ggml-cuda/common.cuh"
#include "ggml-cuda/fattn-back-hopper-run.cuh"
#include "ggml-cuda/fattn-back-mma-host.cuh"

#include <cstdio>
#include <cstdlib>

void ggml_abort(const char *, int, const char *, ...) {
    abort();
}

void ggml_cuda_error(const char *, const char *, const char *, int, const char *) {
    abort();
}

int ggml_cuda_get_device() {
    return 0;
}

int main() {
    fattn_back_args a = {};
    int mask, softcap, sinks, grads, precise, arch, nsm;
    size_t limit;
    static float some;
    while (scanf("%d %d %d %d %d %d %d %d %d %d %d %d %d %d %d %d %zu", &a.Dk, &a.Dv, &a.N, &a.M, &a.H, &a.Hkv, &a.S, &mask, &softcap, &sinks, &grads,
               &a.kv_first, &a.kv_count, &precise, &arch, &nsm, &limit) == 17) {
        a.G             = a.H / a.Hkv;
        a.mask          = mask > 0 ? (const char *) &some : nullptr;
        a.mask_nheads   = mask;
        a.mask_nseqs    = mask > 0;
        a.logit_softcap = softcap;
        a.sinks         = sinks ? &some : nullptr;
        a.LSE = a.D       = &some;
        a.dQ              = grads & 1 ? &some : nullptr;
        a.dK              = grads & 2 ? &some : nullptr;
        a.dV              = grads & 4 ? &some : nullptr;
        a.split_all       = precise;
        const auto mma    = [&](const size_t n) { return fattn_back_mma_make_plan(a, arch, nsm, n).nbytes; };
        const bool hopper = a.Dk == a.Dv && (a.Dk == 64 || a.Dk == 128 || a.Dk == 256);
        const auto plan   = hopper ? fattn_back_hopper_make_plan(a, limit, nsm) : fattn_back_hopper_plan{};
        const int ranges  = plan.kts_ds > 0 ? (plan.p.KT + plan.kts_ds - 1) / plan.kts_ds : 0;
        printf("%zu %zu %zu %zu %d %d %d\n", mma(limit), mma(0), plan.size, hopper ? fattn_back_hopper_least(a) : 0, ranges, plan.nsplits[0], plan.nsplits_dq[0]);
    }
}
