// What the CUDA C++ that TileLang writes calls, on top of cuda_emulation.h: number types, tl:: helpers, wgmma.
//
// Belongs here: the meaning of the few templates that our programs use. A wgmma reads its operands where the hardware
// would: K-major tiles of 8 rows x 128 bytes, their 16-byte pieces swizzled.
#pragma once
#include "cuda_emulation.h"

struct Uint1 { uint32_t x; };
struct alignas(8) Uint2 { uint32_t x, y; };
struct alignas(8) Float2 { float x, y; };
#define uint1 Uint1
#define uint2 Uint2
#define float2 Float2
typedef unsigned char uchar;
typedef unsigned int uint;

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float f) {
    uint32_t u = __float_as_uint(f);
    bits = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
  operator float() const { return __uint_as_float(uint32_t(bits) << 16); }
};
struct __nv_bfloat162 { bfloat16_t x, y; };
inline Float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
inline __nv_bfloat162 __float22bfloat162_rn(Float2 f) { return {bfloat16_t(f.x), bfloat16_t(f.y)}; }
inline uint32_t __pack_nv_bfloat162(bfloat16_t a, bfloat16_t b) { return a.bits | uint32_t(b.bits) << 16; }

struct fp8_e4_t { uint8_t bits; };
struct alignas(4) fp8_e4_4_t { fp8_e4_t v[4]; };
struct alignas(8) fp8_e4_8_t { fp8_e4_t v[8]; };
typedef uint16_t __nv_fp8x2_storage_t;
enum { __NV_SATFINITE, __NV_E4M3 };
inline uint8_t to_e4m3(float x) {
  uint32_t u = __float_as_uint(fabsf(x));
  uint8_t sign = __float_as_uint(x) >> 24 & 0x80;
  if (fabsf(x) >= 448.f) return sign | 0x7e;
  if (fabsf(x) < 0.015625f) return sign | uint8_t(nearbyintf(fabsf(x) * 512.f));
  return sign | uint8_t(((u + 0x7ffff + ((u >> 20) & 1)) >> 20) - (120 << 3));
}
inline uint16_t __nv_cvt_float2_to_fp8x2(Float2 f, int, int) { return to_e4m3(f.x) | to_e4m3(f.y) << 8; }

inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __shfl_xor_sync(unsigned m, float v, int o, int) { return __shfl_xor_sync(m, v, o); }
inline void __syncwarp() { emu::wait(emu::warp()); }
inline void cudaGridDependencySynchronize() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}

namespace tl {
inline float warp_reduce_sum(float v) {
  for (int o = 16; o; o >>= 1) v += ::__shfl_xor_sync(~0u, v, o);
  return v;
}
inline float fast_rcp(float x) { return 1.f / x; }

struct GmmaDescriptor {
  const char* at;
  uint64_t operator+(int sixteenths) const { return uint64_t(at) + uint64_t(sixteenths) * 16; }
};
enum class DataType { kBFloat16, kFloat32 };
template <int, int, int> void initialize_wgmma_descriptor(GmmaDescriptor& d, void* p) { d.at = static_cast<char*>(p); }
inline void warpgroup_fence_operand(float*, int) {}
inline void warpgroup_arrive() {}
inline void fence_proxy_async() {}
inline void warpgroup_commit_batch() {}
template <int> void wait_wgmma() { __syncthreads(); }
inline float element(uint64_t tile, int row, int k) {
  uint64_t p = tile + row / 8 * 1024 + row % 8 * 128 + k * 2;
  return *reinterpret_cast<bfloat16_t*>(p ^ ((p >> 7 & 7) << 4));
}
template <DataType, DataType, DataType, int, int N, int K, bool, bool, int, int>
void wgmma_ss(uint64_t a, uint64_t b, uint32_t* c, int accumulate) {
  float* acc = reinterpret_cast<float*>(c);
  int t = int(threadIdx.x) % 128;
  for (int i = 0; i < N / 2; i++) {
    int row = t / 32 * 16 + t % 32 / 4 + i % 4 / 2 * 8, n = i / 4 * 8 + t % 4 * 2 + i % 2;
    float sum = accumulate ? acc[i] : 0.f;
    for (int k = 0; k < K; k++) sum += element(a, row, k) * element(b, n, k);
    acc[i] = sum;
  }
}
}  // namespace tl
