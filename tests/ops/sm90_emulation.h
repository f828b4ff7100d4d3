// csrc/cuda/sm90.cuh on the CPU: mbarriers, clusters and wgmma over the fibers of cuda_emulation.h.
//
// Belongs here: what one instruction does, swizzle and fragment layouts included. Products run when they are waited for,
// or at once with `emu::eager`; `emu::slow` holds back the threads of one warpgroup: between them they show a buffer
// that is read too early or written too soon.
#pragma once
#include "cuda_emulation.h"

#include <map>

#define __CUDA_ARCH_FEAT_SM90_ALL 1
#define __grid_constant__
#define gridDim (emu::grid)
struct __nv_bfloat16 { uint16_t bits; };
struct uint2 { uint32_t x, y; };

namespace emu {
struct Arrivals { int count, pending; long phase; };
struct Product { int kind; float* d; uint32_t a, b; bool add; uint32_t quad[16]; };
inline std::map<void*, Arrivals> arrivals;
inline std::map<int, Barrier> named;
inline std::vector<std::vector<std::vector<Product>>> products;  // per thread: groups, the last one open
inline Index grid;
inline bool eager = false;
inline int slow = -1;
inline char* memory(unsigned block) {
  uintptr_t at = reinterpret_cast<uintptr_t>(dynamic[block].data());
  return reinterpret_cast<char*>((at + 1023) / 1024 * 1024);
}
// Shared addresses begin at 1024; a peer's carries its rank + 1 in the highest byte.
inline char* shared_at(uint32_t address, unsigned bytes) {
  unsigned rank = address >> 24, at = address & 0xffffff;
  if (at < 1024 || at % bytes) fprintf(stderr, "bad shared address %x\n", address), abort();
  return memory(rank ? rank - 1 : me().block) + at - 1024;
}
inline float element(uint32_t address) {
  uint16_t v;
  memcpy(&v, shared_at(address ^ (address >> 3 & 0x70), 2), 2);
  return __uint_as_float(uint32_t(v) << 16);
}
inline uint32_t bf16_bits(float f) { uint32_t u = __float_as_uint(f); return (u + 0x7fff + (u >> 16 & 1)) >> 16; }
inline float half(uint32_t pair, int i) { return __uint_as_float(i ? pair & 0xffff0000u : pair << 16); }
inline void yield() {
  do swapcontext(&me().context, &scheduler);
  while (int(me().index / 128) == slow && rand() % 16);
}
// A thread's part of a product: kind 0 scores, 1 values with A from shared memory, 2 values with A from registers.
inline void run(const Product& o) {
  const int lane = me().index % 32, warp = me().index % 128 / 32;
  const uint32_t a_at = (o.a & 0x3fff) << 4, b_at = (o.b & 0x3fff) << 4, lead = o.b >> 16 << 4;
  for (int i = 0; i < (o.kind ? 128 : 32); i++) {
    const int high = i >> 1 & 1, row = 16 * warp + lane / 4 + 8 * high, col = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    float sum = o.add ? o.d[i] : 0;
    for (int k = 0; k < 16; k++) {
      const float a = o.kind < 2 ? element(a_at + row / 8 * 1024 + row % 8 * 128 + k * 2)
                                 : half(o.quad[k % 8 / 2 * 4 + k / 8 * 2 + high], k % 2);
      const float b = o.kind ? element(b_at + col / 64 * lead + col % 64 * 2 + k / 8 * 1024 + k % 8 * 128)
                             : element(b_at + col / 8 * 1024 + col % 8 * 128 + k * 2);
      sum += a * b;
    }
    o.d[i] = sum;
  }
}
inline void issue(Product o, const uint32_t* a) {
  for (int i = 0; a && i < 16; i++) o.quad[i] = exchange(a[i % 4], int(current % 32) / 4 * 4 + i / 4);
  if (eager) run(o);
  else products[current].back().push_back(o);
}
inline void run_cluster_sm90(unsigned first, unsigned size, unsigned n, size_t bytes, void (*f)()) {
  arrivals.clear(), named.clear(), products.assign(size * n, {{}});
  run_cluster(first, size, n, 0, bytes + 1024, f);
}
}  // namespace emu

inline void __trap() { abort(); }
inline void __syncwarp() { emu::wait(emu::warp()); }
inline bool __any_sync(unsigned m, bool v) { return __ballot_sync(m, v) != 0; }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t select) {
  uint64_t all = uint64_t(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; i++) out |= uint32_t(all >> (8 * (select >> 4 * i & 7)) & 255) << 8 * i;
  return out;
}

namespace sm90 {
constexpr unsigned kAll = 0xffffffffu;
inline uint32_t smem(const void* p) {
  return uint32_t(reinterpret_cast<const char*>(p) - emu::memory(emu::me().block)) + 1024;
}
inline void init_barrier(uint64_t* bar, int count) { emu::arrivals[bar] = {count, count, 0}; }
inline void arrive(uint64_t* bar) {
  __syncwarp();
  emu::Arrivals& b = emu::arrivals.at(bar);
  if (threadIdx.x % 32 == 0 && --b.pending == 0) b.pending = b.count, b.phase++;
}
inline void wait(uint64_t* bar, int parity) {
  emu::Arrivals& b = emu::arrivals.at(bar);
  for (long spins = 0; (b.phase & 1) == parity; spins++) {
    if (spins > 1000000) fprintf(stderr, "an mbarrier never fills\n"), abort();
    emu::yield();
  }
}
inline void fence_proxy() {}
inline void publish_barriers() {}
inline void launch_dependents() {}
inline void wait_for_inputs() {}
template <int N> void shrink_registers() {}
template <int N> void grow_registers() {}
inline void forget(int&) {}
template <int ID, int THREADS> void named_barrier() {
  emu::Barrier& b = emu::named[int(emu::me().block) * 16 + ID];
  b.size = THREADS;
  emu::wait(b);
}
inline void cluster_sync() { emu::wait(emu::cluster_barrier); }
inline uint32_t peer(uint32_t address, int rank) { return address | uint32_t(rank + 1) << 24; }
inline uint32_t descriptor(uint32_t address, int lead) { return uint32_t(lead >> 4) << 16 | address >> 4; }
inline void mma_fence() {}
inline void mma_commit() { emu::products[emu::current].emplace_back(); }
template <int N> void mma_wait() {
  auto& groups = emu::products[emu::current];
  for (; int(groups.size()) > N + 1; groups.erase(groups.begin()))
    for (auto& o : groups[0]) emu::run(o);
}
template <int N> void pin(float (&)[N]) {}
template <bool ADD> void mma_scores(float (&d)[32], uint32_t a, uint32_t b) { emu::issue({0, d, a, b, ADD}, nullptr); }
inline void mma_values(float (&d)[128], uint32_t a, uint32_t b) { emu::issue({1, d, a, b, true}, nullptr); }
inline void mma_values(float (&d)[128], const uint32_t* a, uint32_t b) { emu::issue({2, d, 0, b, true}, a); }
inline uint32_t pair(float low, float high) { return emu::bf16_bits(low) | emu::bf16_bits(high) << 16; }
inline float power2(float x) { return exp2f(x); }
inline uint32_t product(uint32_t a, uint32_t b) {
  return pair(emu::half(a, 0) * emu::half(b, 0), emu::half(a, 1) * emu::half(b, 1));
}
inline void store4(uint32_t to, uint32_t a) { memcpy(emu::shared_at(to, 4), &a, 4); }
inline void store16(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t v[4] = {a, b, c, d};
  memcpy(emu::shared_at(to, 16), v, 16);
}
inline void store_matrices(uint32_t address, const uint32_t* p) {
  const int lane = int(emu::current % 32);
  for (int i = 0; i < 4; i++) memcpy(emu::shared_at(emu::exchange(address, 8 * i + lane / 4), 16) + 4 * (lane % 4), p + i, 4);
}
inline void store_remote(uint32_t to, float a) { memcpy(emu::shared_at(to, 4), &a, 4); }
inline void store_remote16(uint32_t to, const float* a) { memcpy(emu::shared_at(to, 16), a, 16); }
inline void prefetch(const void*, int) {}
}  // namespace sm90
