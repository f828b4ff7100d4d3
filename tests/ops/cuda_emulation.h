// Runs a CUDA kernel of csrc/cuda on the CPU, for tests without a GPU: threads of a cluster are fibers of one thread.
//
// Belongs here: the few builtins that our kernels use. A barrier waits until all its threads arrived; where they do not
// all arrive, the program aborts instead of hanging. Fibers switch at barriers only, so races do not show.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <vector>

using std::max;
using std::min;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __restrict__

struct uint4 { uint32_t x, y, z, w; };
struct float4 { float x, y, z, w; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emu {
struct Barrier { int size = 0, arrived = 0; long phase = 0; };
struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  unsigned block, index;
  bool done = false;
  uint32_t value = 0;
};
inline std::vector<Thread> threads;
inline std::vector<Barrier> warp_barriers, block_barriers;
inline Barrier cluster_barrier;
inline std::vector<std::vector<char>> shared, dynamic;  // per block of the cluster
inline ucontext_t scheduler;
inline size_t current;
inline unsigned cluster_size, first_block, block_threads;
inline Thread& me() { return threads[current]; }
inline void wait(Barrier& b) {
  long phase = b.phase;
  if (++b.arrived == b.size) { b.arrived = 0, b.phase++; return; }
  for (long spins = 0; b.phase == phase; spins++) {
    if (spins > 100000) fprintf(stderr, "a barrier never fills\n"), abort();
    swapcontext(&me().context, &scheduler);
  }
}
inline Barrier& warp() { return warp_barriers[current / 32]; }
inline uint32_t exchange(uint32_t v, int lane) {
  me().value = v;
  wait(warp());
  uint32_t got = threads[current / 32 * 32 + lane].value;
  wait(warp());
  return got;
}
inline void (*entry)();
inline void body() {
  entry();
  me().done = true;
  swapcontext(&me().context, &scheduler);
}
// One cluster of `size` blocks; memory of a block starts as garbage.
inline void run_cluster(unsigned first, unsigned size, unsigned n, size_t static_bytes, size_t dynamic_bytes, void (*f)()) {
  cluster_size = size, first_block = first, block_threads = n, entry = f;
  shared.assign(size, std::vector<char>(static_bytes, char(0x5a)));
  dynamic.assign(size, std::vector<char>(dynamic_bytes + 16, char(0x5a)));
  warp_barriers.assign(size * n / 32, {}), block_barriers.assign(size, {});
  for (auto& b : warp_barriers) b.size = 32;
  for (auto& b : block_barriers) b.size = int(n);
  cluster_barrier = {}, cluster_barrier.size = int(size * n);
  threads.resize(size * n);
  for (unsigned i = 0; i < size * n; i++) {
    Thread& t = threads[i];
    t.block = i / n, t.index = i % n, t.done = false;
    t.stack.resize(32768);
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.data(), t.context.uc_stack.ss_size = t.stack.size(), t.context.uc_link = nullptr;
    makecontext(&t.context, body, 0);
  }
  for (bool left = true; left;) {
    left = false;
    for (current = 0; current < threads.size(); current++)
      if (!threads[current].done) left = true, swapcontext(&scheduler, &threads[current].context);
  }
}
struct Index { unsigned x, y; };
inline unsigned second = 0, second_size = 1;  // blockIdx.y, gridDim.y
inline Index thread_index() { return {me().index, 0}; }
inline Index block_index() { return {first_block + me().block, second}; }
}  // namespace emu

#define threadIdx (emu::thread_index())
#define blockIdx (emu::block_index())
#define gridDim (emu::Index{0, emu::second_size})

inline void __syncthreads() { emu::wait(emu::block_barriers[emu::me().block]); }
inline uint32_t __shfl_up_sync(unsigned, uint32_t v, int o) {
  int lane = int(emu::current % 32);
  return emu::exchange(v, lane >= o ? lane - o : lane);
}
inline uint32_t __shfl_sync(unsigned, uint32_t v, int lane) { return emu::exchange(v, lane); }
inline uint32_t __float_as_uint(float v) { uint32_t u; memcpy(&u, &v, 4); return u; }
inline float __uint_as_float(uint32_t u) { float v; memcpy(&v, &u, 4); return v; }
using std::fabs;
inline float __shfl_xor_sync(unsigned, float v, int o) {
  return __uint_as_float(emu::exchange(__float_as_uint(v), int(emu::current % 32) ^ o));
}
inline uint32_t __reduce_add_sync(unsigned, uint32_t v) {
  emu::me().value = v;
  emu::wait(emu::warp());
  uint32_t sum = 0;
  for (int i = 0; i < 32; i++) sum += emu::threads[emu::current / 32 * 32 + i].value;
  emu::wait(emu::warp());
  return sum;
}
inline uint32_t __ballot_sync(unsigned m, bool v) { return __reduce_add_sync(m, v ? 1u << (emu::current % 32) : 0); }
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline float __int_as_float(int u) { float v; memcpy(&v, &u, 4); return v; }
template <class T> T __ldg(const T* p) { return *p; }
inline uint32_t atomicAdd(uint32_t* p, uint32_t v) { uint32_t old = *p; *p += v; return old; }

namespace cooperative_groups {
struct cluster_group {
  void sync() const { emu::wait(emu::cluster_barrier); }
  template <class T> T* map_shared_rank(T* p, unsigned rank) const {
    for (auto* memory : {&emu::shared, &emu::dynamic}) {
      long at = reinterpret_cast<char*>(p) - (*memory)[emu::me().block].data();
      if (at >= 0 && at < long((*memory)[0].size())) return reinterpret_cast<T*>((*memory)[rank].data() + at);
    }
    fprintf(stderr, "not shared memory\n"), abort();
  }
};
inline cluster_group this_cluster() { return {}; }
}  // namespace cooperative_groups
