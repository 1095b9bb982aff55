#pragma once

// The instructions of sm_90a that the Hopper path of FLASH_ATTN_BACK is made of: mbarrier, bulk copy, wgmma, setmaxnreg.
//
// All operands in shared memory are tiles of 64 rows x D columns of fp16: D/64 panels of 64 rows x 128 bytes, each in the 128-byte swizzle
// (16-byte unit c of row r is at unit c ^ (r & 7)). wgmma reads such a tile with the columns as the summed dimension ("rows" operand) or
// with the rows as the summed dimension ("cols" operand) through the same descriptor.

#include <cuda_fp16.h>
#include <cstdint>
#include <type_traits>

static constexpr int FATTN_BACK_HOPPER_PANEL = 64 * 128; // bytes

static __device__ __forceinline__ uint32_t hopper_smem(const void * p) {
    return (uint32_t) __cvta_generic_to_shared(p);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A condition that all threads of the warp share, in a form that tells the compiler so: only then are the descriptors of what depends on it in
// uniform registers, where wgmma takes them from.
static __device__ __forceinline__ bool hopper_any(const bool x) {
    return __any_sync(0xFFFFFFFF, x);
}

// barrier of n threads of the block: arrive, and wait for the others as well
template <int n>
static __device__ __forceinline__ void hopper_named_arrive(const int id) {
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "n"(n) : "memory");
}

template <int n>
static __device__ __forceinline__ void hopper_named_sync(const int id) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "n"(n) : "memory");
}

static __device__ __forceinline__ void hopper_barrier_init(const uint32_t bar, const int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

// makes initialised barriers visible to the copy engine
static __device__ __forceinline__ void hopper_barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ __forceinline__ void hopper_barrier_arrive(const uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

static __device__ __forceinline__ void hopper_barrier_expect(const uint32_t bar, const uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

static __device__ __forceinline__ bool hopper_barrier_try(const uint32_t bar, const uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done;
}

// waits for the phase with this parity to complete
static __device__ __forceinline__ void hopper_barrier_wait(const uint32_t bar, const uint32_t parity) {
    while (!hopper_barrier_try(bar, parity)) {
    }
}

// makes what the thread has stored in shared memory visible to wgmma, once a barrier has passed
static __device__ __forceinline__ void hopper_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// copies bytes (a multiple of 16) that complete on the barrier
static __device__ __forceinline__ void hopper_load(const uint32_t dst, const void * src, const uint32_t bytes, const uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(bytes),
        "r"(bar) : "memory");
}

template <int n>
static __device__ __forceinline__ void hopper_registers_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}

template <int n>
static __device__ __forceinline__ void hopper_registers_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}

// descriptor of a tile: 128-byte swizzle, 1024 bytes between groups of 8 rows, one panel between groups of 64 columns
static __device__ __forceinline__ uint64_t hopper_desc(const uint32_t tile) {
    return (uint64_t) ((tile & 0x3FFFF) >> 4) | (uint64_t) (FATTN_BACK_HOPPER_PANEL >> 4) << 16 | (uint64_t) (1024 >> 4) << 32 |
        (uint64_t) 1 << 62;
}

// descriptor steps along the summed dimension, 16 elements each
static __device__ __forceinline__ constexpr uint64_t hopper_step_rows(const int k) { // columns are summed
    return ((k / 4) * FATTN_BACK_HOPPER_PANEL + (k % 4) * 32) >> 4;
}
static __device__ __forceinline__ constexpr uint64_t hopper_step_cols(const int k) { // rows are summed
    return (k * 16 * 128) >> 4;
}

// before the first wgmma and after registers that it reads or writes were touched
static __device__ __forceinline__ void hopper_wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void hopper_wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// waits until at most n groups are in flight
template <int n>
static __device__ __forceinline__ void hopper_wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}

// keeps the compiler from moving uses of registers across the waits that order them
template <typename T, int n>
static __device__ __forceinline__ void hopper_pin(T (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
        if constexpr (std::is_same_v<T, float>) {
            asm volatile("" : "+f"(x[i])::"memory");
        } else {
            asm volatile("" : "+r"(x[i])::"memory");
        }
    }
}

#define HOPPER_ACC_8(c, d, i) \
    c(d[(i) + 0]), c(d[(i) + 1]), c(d[(i) + 2]), c(d[(i) + 3]), c(d[(i) + 4]), c(d[(i) + 5]), c(d[(i) + 6]), c(d[(i) + 7])
#define HOPPER_ACC_32(c, d, i) \
    HOPPER_ACC_8(c, d, i), HOPPER_ACC_8(c, d, (i) + 8), HOPPER_ACC_8(c, d, (i) + 16), HOPPER_ACC_8(c, d, (i) + 24)
#define HOPPER_ACC_64(c, d, i)  HOPPER_ACC_32(c, d, i), HOPPER_ACC_32(c, d, (i) + 32)
#define HOPPER_ACC_128(c, d, i) HOPPER_ACC_64(c, d, i), HOPPER_ACC_64(c, d, (i) + 64)

#define HOPPER_REGS_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HOPPER_REGS_64 \
    HOPPER_REGS_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HOPPER_REGS_128 \
    HOPPER_REGS_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d[64 x 64] = a[64 x 16] b[64 x 16]^T (+ d), both in shared memory. What d held before the first step is not an operand, so that
// its registers are free until then.
template <bool first>
static __device__ __forceinline__ void hopper_wgmma(float (&d)[32], const uint64_t a, const uint64_t b) {
    if constexpr (first) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, 0, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" HOPPER_REGS_32 "}, %32, %33, p, 1, 1, 0, 0;\n"
            "}\n" : HOPPER_ACC_32("=f", d, 0) : "l"(a), "l"(b));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" HOPPER_REGS_32 "}, %32, %33, 1, 1, 1, 0, 0;\n"
            : HOPPER_ACC_32("+f", d, 0) : "l"(a), "l"(b));
    }
}

// the same with a in registers
template <bool first>
static __device__ __forceinline__ void hopper_wgmma_rows(float (&d)[32], const uint32_t * a, const uint64_t b) {
    if constexpr (first) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, 0, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" HOPPER_REGS_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n"
            "}\n" : HOPPER_ACC_32("=f", d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" HOPPER_REGS_32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;\n"
            : HOPPER_ACC_32("+f", d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
}

// d[64 x 2*R] += a[64 x 16] b[16 x 2*R], a in registers, b in shared memory
template <int R>
static __device__ __forceinline__ void hopper_wgmma(float (&d)[R], const uint32_t * a, const uint64_t b) {
    static_assert(R == 32 || R == 64 || R == 128, "unexpected number of columns");
    if constexpr (R == 32) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" HOPPER_REGS_32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
            : HOPPER_ACC_32("+f", d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else if constexpr (R == 64) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" HOPPER_REGS_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
            : HOPPER_ACC_64("+f", d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" HOPPER_REGS_128 "}, "
                     "{%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"
            : HOPPER_ACC_128("+f", d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
}

// d[64 x 8] += a[64 x 16] b[8 x 16]^T, a in registers, b in shared memory
static __device__ __forceinline__ void hopper_wgmma(float (&d)[4], const uint32_t * a, const uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d[64 x 2*R] += a[16 x 64]^T b[16 x 2*R], both in shared memory
template <int R>
static __device__ __forceinline__ void hopper_wgmma_cols(float (&d)[R], const uint64_t a, const uint64_t b) {
    static_assert(R == 64 || R == 128, "unexpected number of columns");
    if constexpr (R == 64) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" HOPPER_REGS_64 "}, %64, %65, 1, 1, 1, 1, 1;\n"
            : HOPPER_ACC_64("+f", d, 0) : "l"(a), "l"(b));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" HOPPER_REGS_128 "}, %128, %129, 1, 1, 1, 1, 1;\n"
            : HOPPER_ACC_128("+f", d, 0) : "l"(a), "l"(b));
    }
}

// operand of the k-th step along the columns, rows 16*warp to 16*warp + 15 of a tile
static __device__ __forceinline__ void hopper_load_rows(uint32_t * a, const uint32_t tile, const int k) {
    const int lane      = threadIdx.x % 32;
    const int row       = threadIdx.x % 128 / 32 * 16 + lane % 16;
    const uint32_t addr = tile + k / 4 * FATTN_BACK_HOPPER_PANEL + row * 128 + ((2 * (k % 4) + lane / 16) ^ row % 8) * 16;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(addr) : "memory");
}

// a load that stays where it is written
static __device__ __forceinline__ float2 hopper_load_float2(const uint32_t addr) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(addr) : "memory");
    return x;
}

// from global memory, or 0, without a branch, so that several are on their way
static __device__ __forceinline__ half hopper_load_half(const void * src, const bool on) {
    uint16_t x;
    asm("{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "mov.b16 %0, 0;\n"
        "@p ld.global.b16 %0, [%1];\n"
        "}\n" : "=h"(x) : "l"(src), "r"((int) on));
    return __ushort_as_half(x);
}

static __device__ __forceinline__ int hopper_load_int(const uint32_t addr) {
    int x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(addr) : "memory");
    return x;
}

// adds to memory; the thread does not wait for what was there
static __device__ __forceinline__ void hopper_add(float * dst, const float2 x) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(dst), "f"(x.x), "f"(x.y) : "memory");
}

static __device__ __forceinline__ float hopper_exp2(const float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ uint32_t hopper_pack(const float lo, const float hi) {
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}

#endif // defined(__CUDA_ARCH_FEAT_SM90_ALL)
