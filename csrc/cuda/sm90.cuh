// What kernels for sm_90 use of PTX: barriers in shared memory, clusters, asynchronous matrix products.
//
// Belongs here: one function per instruction. Does not belong here: anything that knows an op.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

namespace sm90 {

constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ uint32_t smem(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void init_barrier(uint64_t* bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem(bar)), "r"(count));
}

// One arrival for a warp whose lanes have all done their part.
__device__ __forceinline__ void arrive(uint64_t* bar) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem(bar)) : "memory");
}

__device__ __forceinline__ void wait(uint64_t* bar, int parity) {
  uint32_t done = 0;
  for (int i = 0; !done; i++) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(smem(bar)), "r"(parity) : "memory");
    if (i > (1 << 20)) __trap();  // an arrival is missing: an error is better than a hang
  }
}

__device__ __forceinline__ void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Makes an initialised barrier visible to the cluster.
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Programmatic dependent launch: the next kernel may begin; this one's inputs are written.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void shrink_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N>
__device__ __forceinline__ void grow_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// The compiler knows nothing about the value from here on.
__device__ __forceinline__ void forget(int& x) { asm volatile("" : "+r"(x)); }

template <int ID, int THREADS>
__device__ __forceinline__ void named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t peer(uint32_t address, int rank) {
  uint32_t out;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(rank));
  return out;
}

// Low word of the descriptor of a 128-byte-swizzled tile; lead: step between blocks of 64 dims where N is contiguous.
__device__ __forceinline__ uint32_t descriptor(uint32_t address, int lead) {
  return uint32_t(lead >> 4) << 16 | (address & 0x3ffff) >> 4;
}
#define HIGH "1073741888"  // of every descriptor: 128-byte swizzle, groups of 8 rows 1 KB apart

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Registers written by an asynchronous product: nothing that uses them moves above this point.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define D8(b, i) "+f"(b[i]), "+f"(b[i + 1]), "+f"(b[i + 2]), "+f"(b[i + 3]), "+f"(b[i + 4]), "+f"(b[i + 5]), \
                 "+f"(b[i + 6]), "+f"(b[i + 7])
#define D32(b, i) D8(b, i), D8(b, i + 8), D8(b, i + 16), D8(b, i + 24)
#define R32                                                                                          \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R128                                                                                                 \
  R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "         \
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, "      \
      "%69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, "      \
      "%88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "     \
      "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, "     \
      "%122, %123, %124, %125, %126, %127"

// d [64 x 64] (+)= a [64 x 16] b [64 x 16]^T, both from shared memory.
template <bool ADD>
__device__ __forceinline__ void mma_scores(float (&d)[32], uint32_t a, uint32_t b) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %34, 0; mov.b64 a, {%32, " HIGH "}; mov.b64 b, {%33, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" R32 "}, a, b, p, 1, 1, 0, 0; }"
      : D32(d, 0) : "r"(a), "r"(b), "n"(ADD));
}

// d [64 x 256] += a [64 x 16] b [16 x 256]; a from shared memory or from registers.
__device__ __forceinline__ void mma_values(float (&d)[128], uint32_t a, uint32_t b) {
  asm volatile(
      "{ .reg .b64 a, b; mov.b64 a, {%128, " HIGH "}; mov.b64 b, {%129, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" R128 "}, a, b, 1, 1, 1, 0, 1; }"
      : D32(d, 0), D32(d, 32), D32(d, 64), D32(d, 96) : "r"(a), "r"(b));
}
__device__ __forceinline__ void mma_values(float (&d)[128], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{ .reg .b64 b; mov.b64 b, {%132, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" R128 "}, {%128, %129, %130, %131}, b, 1, 1, 1, 1; }"
      : D32(d, 0), D32(d, 32), D32(d, 64), D32(d, 96) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}

__device__ __forceinline__ uint32_t pair(float low, float high) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

__device__ __forceinline__ float power2(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

__device__ __forceinline__ uint32_t product(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

__device__ __forceinline__ void store4(uint32_t address, uint32_t a) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(a) : "memory");
}

// Four 8 x 8 matrices of bf16; lane 8 i + r holds the address of row r of matrix i.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t* p) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(p[0]), "r"(p[1]),
               "r"(p[2]), "r"(p[3]) : "memory");
}

// To shared memory of a block of the cluster.
__device__ __forceinline__ void store_remote(uint32_t address, float a) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(a) : "memory");
}
__device__ __forceinline__ void store_remote16(uint32_t address, const float* a) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a[0]), "f"(a[1]), "f"(a[2]),
               "f"(a[3]) : "memory");
}

// Into the L2; address and size are multiples of 16.
__device__ __forceinline__ void prefetch(const void* p, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}

__device__ __forceinline__ void store16(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

}  // namespace sm90
