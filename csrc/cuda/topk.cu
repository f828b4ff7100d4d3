// Exact top-k selection of float32 rows: score descending, position ascending on ties; ids come out ascending.
//
// Belongs here: the kernel and its launch plan, behind a C interface without torch (deepinfer/ops/native/cuda.py loads
// it). Does not belong here: scores (csrc/cuda/logits.cu, deepinfer/ops/triton/indexer.py).
//
// A row is one cluster of C blocks. A block streams its slice once and appends, in order, the scores above a bound to a
// buffer in shared memory. The bound comes from a histogram of the first step's scores and rises whenever the buffer
// fills: it is below the k-th best score seen so far, so nothing that is wanted is lost whatever the order of scores.
// Rank 0 collects what the blocks kept (a few times k) and finds the k-th key exactly with histograms of 11, 11 and 10
// bits. Order is kept throughout, so ids need no sort and equal keys are taken from the front.
// Lengths are read on the device; C follows from the shapes. Selection is integer arithmetic, so the plan never shows in
// a result.
#include <cooperative_groups.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace cg = cooperative_groups;

namespace {

constexpr int kBins = 2048;                  // 11 bits
constexpr int kLoads = 4;                    // 16-byte loads of a thread in a step
constexpr int kGroup = 128;                  // scores of a warp's load
constexpr int kMaxCluster = 8;               // portable limit
constexpr int kMaxK = 4096;
constexpr uint32_t kNoKey = 0x007fffffu;     // of -inf: keys of scores that can be chosen are larger
constexpr unsigned kAll = 0xffffffffu;
#if __CUDA_ARCH__ >= 1000
constexpr bool kAhead = false;  // 64 registers do not hold two steps as compiled for sm_100
#else
constexpr bool kAhead = true;  // the next step's scores are on their way while one is filtered
#endif

struct Args {
  const float* scores;     // [rows, stride]
  const int32_t* visible;  // [rows]: a row holds ceil(visible / unit) scores; null: width
  const int32_t* blocks;   // [rows, num_blocks]: position p means entry blocks[p / block] * block + p % block; or null
  int32_t* out;            // [rows, k]
  long long stride;        // a multiple of 4
  int width, unit, num_blocks, block, k;
  int few, many;           // the buffer is cut to at most `few` when it holds more than `many` (k <= few <= many)
};

struct Entry {
  uint32_t bits;  // of a float that is not -0
  int at;         // position in the row
};

struct Shared {
  uint32_t hist[kBins];
  uint32_t warp_sum[32];    // of find_bin
  uint32_t part[2][32];     // counts of warps in a step, of even and odd steps
  int counts[kMaxCluster];  // entries of every rank
  int bin;                  // that holds the k-th key; -1: fewer than k keys
  uint32_t need, held;      // keys wanted of that bin, keys in it
};

// Key of a float's bits: in the order of the floats.
__device__ __forceinline__ uint32_t ordered(uint32_t u) {
  return u ^ (static_cast<uint32_t>(static_cast<int32_t>(u) >> 31) | 0x80000000u);
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// *to++ = {v, at} if v > bound, to in shared memory, without a branch.
__device__ __forceinline__ void append(uint32_t& to, float v, float bound, int at) {
  asm volatile(
      "{ .reg .pred p; setp.gt.f32 p, %1, %2; @p st.shared.v2.b32 [%0], {%3, %4}; @p add.u32 %0, %0, 8; }"
      : "+r"(to) : "f"(v), "f"(bound), "r"(__float_as_uint(v)), "r"(at) : "memory");
}

// The float x with v > x for those keys alone that are larger than `key`.
__device__ __forceinline__ float bound_of(uint32_t key) {
  if (key < kNoKey) key = kNoKey;
  if (key == 0x7fffffffu) key--;  // -0 is not less than 0
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

template <int T>
__device__ __forceinline__ void clear(Shared& s) {
  for (int i = threadIdx.x; i < kBins / 4; i += T) reinterpret_cast<uint4*>(s.hist)[i] = make_uint4(0, 0, 0, 0);
}

// Finds the bin of the need-th largest key. A thread holds kBins / T bins, highest first. Ends with a barrier.
// RAW: bins are the high bits of floats, so that of a key b is 1024 less, or for negative floats 2047 - b.
template <int T, bool RAW>
__device__ void find_bin(Shared& s, uint32_t need) {
  constexpr int kEach = kBins / T;
  int t;  // not what the loop over steps holds in registers, which are scarce
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  int lane = t & 31, warp = t >> 5;
  int low = kBins - kEach * (t + 1);
  uint32_t held[kEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int bin = low + kEach - 1 - i;
    held[i] = s.hist[!RAW ? bin : low >= kBins / 2 ? bin - kBins / 2 : kBins - 1 - bin];
    sum += held[i];
  }
  uint32_t run = sum;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    uint32_t other = __shfl_up_sync(kAll, run, o);
    if (lane >= o) run += other;
  }
  if (lane == 31) s.warp_sum[warp] = run;
  if (t == 0) s.bin = -1;
  __syncthreads();
  uint32_t before = run - sum + __reduce_add_sync(kAll, lane < warp ? s.warp_sum[lane] : 0);
  if (before < need && need <= before + sum) {
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      if (before < need && need <= before + held[i]) {
        s.bin = low + kEach - 1 - i, s.need = need - before, s.held = held[i];
        break;
      }
      before += held[i];
    }
  }
  __syncthreads();
}

// What to keep of `count` (> most >= k) entries: keys > above and the first `quota` keys == above, which hold the k
// best and are at most `most`. Entries are visible to the block before and after. Where `known`, s.bin is the bin of
// the k-th key's high bits among these entries.
template <int T>
__device__ void find_cut(Shared& s, const Entry* buffer, int count, uint32_t k, uint32_t most, bool known,
                         uint32_t& above, uint32_t& quota) {
  constexpr int kShift[3] = {21, 10, 0}, kBits[3] = {11, 11, 10};
  uint32_t prefix = 0, need = k;
  quota = 0;
  if (known) prefix = s.bin, need = s.need;
#pragma unroll
  for (int pass = 0; pass < 3; pass++) {
    if (pass == 0 && known) continue;
    clear<T>(s);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += T) {
      uint32_t key = ordered(buffer[i].bits) >> kShift[pass];
      if (pass == 0 || key >> kBits[pass] == prefix) atomicAdd(&s.hist[key & ((1u << kBits[pass]) - 1)], 1u);
    }
    __syncthreads();
    find_bin<T, false>(s, need);
    prefix = prefix << kBits[pass] | s.bin, need = s.need;
    above = prefix << kShift[pass];
    if (k - need + s.held <= most) {
      above--;  // the whole bin
      return;
    }
  }
  quota = need;
}

// Counts before this warp and in the block, of one number a warp.
template <int T>
__device__ __forceinline__ void across_warps(Shared& s, int& parity, uint32_t mine, uint32_t& before, uint32_t& total) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (lane == 0) s.part[parity][warp] = mine;
  __syncthreads();
  uint32_t x = lane < T / 32 ? s.part[parity][lane] : 0;
  before = __reduce_add_sync(kAll, lane < warp ? x : 0);
  total = __reduce_add_sync(kAll, x);
  parity ^= 1;  // two steps on, a barrier has passed since these were read
}

// Hands the kept entries, in order, to put(place, entry). Returns their number. put may overwrite the buffer from its
// start: places lie behind what is still to be read.
template <int T, class Put>
__device__ int keep(Shared& s, int& parity, const Entry* buffer, int count, uint32_t above, uint32_t quota, Put put) {
  const uint32_t below = (1u << (threadIdx.x & 31)) - 1;
  uint32_t overs = 0, ties = 0;
#pragma unroll 1
  for (int base = 0; base < count; base += T) {
    Entry e = {0xffffffffu, 0};  // the smallest key
    if (base + static_cast<int>(threadIdx.x) < count) e = buffer[base + threadIdx.x];
    const uint32_t key = ordered(e.bits);
    bool over = key > above, tie = quota && key == above;
    uint32_t o = __ballot_sync(kAll, over), q = __ballot_sync(kAll, tie), before, total;
    across_warps<T>(s, parity, __popc(o) | __popc(q) << 16, before, total);
    uint32_t place = overs + (before & 0xffff) + __popc(o & below), equal = ties + (before >> 16) + __popc(q & below);
    if (over || (tie && equal < quota)) put(static_cast<int>(place + min(equal, quota)), e);
    overs += total & 0xffff, ties += total >> 16;
  }
  return overs + min(ties, quota);
}

template <int C, int T>
__global__ void __launch_bounds__(T, 1024 / T) topk_kernel(Args a) {
  extern __shared__ __align__(16) uint8_t memory[];
  __shared__ __align__(16) Shared s;
  Entry* buffer = reinterpret_cast<Entry*>(memory);
  constexpr int kStep = T * 4 * kLoads;
  int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  int row = blockIdx.x / C, rank = blockIdx.x % C;
  clear<T>(s);
  asm volatile("griddepcontrol.launch_dependents;\n griddepcontrol.wait;" ::: "memory");

  int n = a.width;
  if (a.visible) n = min(n, (max(a.visible[row], 0) + a.unit - 1) / a.unit);
  if (n <= a.k && !a.blocks) {  // everything is chosen; scores may not exist
#pragma unroll 1
    for (int i = rank * T + t; i < a.k; i += C * T) a.out[static_cast<long long>(row) * a.k + i] = i < n ? i : -1;
    return;
  }
  const int per = ((n + C - 1) / C + kGroup - 1) / kGroup * kGroup;  // of a block
  const int first = rank * per, length = max(min(n - first, per), 0);
  const float* scores = a.scores + row * a.stride;
  int at = first + warp * (kGroup * kLoads) + lane * 4;  // a warp's loads are consecutive

  const float kNone = -__int_as_float(0x7f800000);
  auto load = [&](float4 (&v)[kLoads], int at) {
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      v[i] = make_float4(kNone, kNone, kNone, kNone);
      if (at + i * kGroup < first + length) v[i] = __ldg(reinterpret_cast<const float4*>(scores + at + i * kGroup));
    }
  };
  float4 v[kLoads], next[kLoads];
  load(v, at);
  float bound = bound_of(0);
  __syncthreads();  // the histogram is clear

  int count = 0, parity = 0;
  bool known = false;
#pragma unroll 1
  for (int step = 0; step < length; step += kStep) {
    if (kAhead) load(next, at + kStep);
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      v[i].x += 0.0f, v[i].y += 0.0f, v[i].z += 0.0f, v[i].w += 0.0f;  // no -0
      const int left = first + length - at - i * kGroup;
      if (left < 4) {  // the row ends here
        if (left < 2) v[i].y = kNone;
        if (left < 3) v[i].z = kNone;
        v[i].w = kNone;
      }
    }
    if (step == 0 && length > a.few) {  // a first bound
      auto count = [&](float v) {
        if (v > bound) atomicAdd(&s.hist[__float_as_uint(v) >> 21], 1u);
      };
#pragma unroll
      for (int i = 0; i < kLoads; i++) count(v[i].x), count(v[i].y), count(v[i].z), count(v[i].w);
      __syncthreads();
      find_bin<T, true>(s, a.k);
      if (s.bin >= 0) bound = bound_of((static_cast<uint32_t>(s.bin) << 21) - 1), known = kAhead && C == 1 && length <= kStep;
    }
    uint32_t mine = 0;  // entries of every load: a byte holds up to 128
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      const uint32_t one = 1u << (8 * i);
      mine += (v[i].x > bound ? one : 0) + (v[i].y > bound ? one : 0);
      mine += (v[i].z > bound ? one : 0) + (v[i].w > bound ? one : 0);
    }
    uint32_t run = mine;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      uint32_t other = __shfl_up_sync(kAll, run, o);
      if (lane >= o) run += other;
    }
    const uint32_t all = __shfl_sync(kAll, run, 31);
    uint32_t before, total;
    across_warps<T>(s, parity, (all & 255) + (all >> 8 & 255) + (all >> 16 & 255) + (all >> 24), before, total);
    if (all) {
      uint32_t base = shared_address(buffer + count + before);
#pragma unroll
      for (int i = 0; i < kLoads; i++) {
        uint32_t to = base + 8 * ((run - mine) >> (8 * i) & 255);
        append(to, v[i].x, bound, at + i * kGroup);
        append(to, v[i].y, bound, at + i * kGroup + 1);
        append(to, v[i].z, bound, at + i * kGroup + 2);
        append(to, v[i].w, bound, at + i * kGroup + 3);
        base += 8 * (all >> (8 * i) & 255);
      }
    }
    count += total;
    const bool last = step + kStep >= length;
    if (count > (last ? a.few : a.many) && !(last && C == 1)) {
      uint32_t above, quota;
      __syncthreads();
      find_cut<T>(s, buffer, count, a.k, a.few, false, above, quota);
      count = keep<T>(s, parity, buffer, count, above, quota, [&](int place, Entry e) { buffer[place] = e; });
      bound = bound_of(above);  // with a quota: k keys at least as large came before
    }
    if (!kAhead) load(next, at + kStep);
#pragma unroll
    for (int i = 0; i < kLoads; i++) v[i] = next[i];
    at += kStep;
  }

  if constexpr (C > 1) {
    auto cluster = cg::this_cluster();
    cluster.sync();  // nobody writes to a block that has not begun
    if (t < C) *cluster.map_shared_rank(&s.counts[rank], t) = count;
    cluster.sync();
    int before = 0, total = 0;
#pragma unroll
    for (int r = 0; r < C; r++) {
      if (r < rank) before += s.counts[r];
      total += s.counts[r];
    }
    if (rank) {
      unsigned long long* to = reinterpret_cast<unsigned long long*>(cluster.map_shared_rank(buffer, 0)) + before;
      for (int i = t; i < count; i += T) to[i] = reinterpret_cast<const unsigned long long*>(buffer)[i];
    }
    cluster.sync();
    if (rank) return;
    count = total;
  } else {
    __syncthreads();
  }

  int32_t* out = a.out + static_cast<long long>(row) * a.k;
  uint32_t above = 0, quota = 0;
  if (count > a.k) find_cut<T>(s, buffer, count, a.k, a.k, known, above, quota);
  count = keep<T>(s, parity, buffer, count, above, quota, [&](int place, Entry e) {
    int id = e.at;
    if (a.blocks) id = a.blocks[static_cast<long long>(row) * a.num_blocks + id / a.block] * a.block + id % a.block;
    out[place] = id;
  });
#pragma unroll 1
  for (int i = count + t; i < a.k; i += T) out[i] = -1;
}

template <int C, int T>
cudaError_t launch(Args& a, int rows, cudaStream_t stream) {
  constexpr int kStep = T * 4 * kLoads;
  a.many = a.k < 1024 ? 2048 : 2 * a.k;
  a.few = (a.many + a.k) / 2;
  const int all = C * a.few, full = a.many + kStep;
  const int bytes = (all > full ? all : full) * static_cast<int>(sizeof(Entry));
  static bool ready[64] = {};
  int device = 0;
  cudaError_t code = cudaGetDevice(&device);
  if (code) return code;
  if (device >= 64 || !ready[device]) {
    code = cudaFuncSetAttribute(topk_kernel<C, T>, cudaFuncAttributeMaxDynamicSharedMemorySize, 216 << 10);
    if (!code) code = cudaFuncSetAttribute(topk_kernel<C, T>, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
    if (code) return code;
    if (device < 64) ready[device] = true;
  }
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = C, attributes[1].val.clusterDim.y = 1, attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(rows) * C);
  config.blockDim = dim3(T);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = C == 1 ? 1 : 2;
  return cudaLaunchKernelEx(&config, topk_kernel<C, T>, a);
}

}  // namespace

#define DI_EXPORT extern "C" __attribute__((visibility("default")))

// Build stamp, read from the file by build_cuda.py; `used` keeps it.
__attribute__((used)) static const char deepinfer_stamp[] = "DEEPINFER_STAMP=" DI_STAMP;

// Version of the interface below; the loader refuses another one.
DI_EXPORT int deepinfer_cuda_version() { return 1; }

DI_EXPORT const char* deepinfer_cuda_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

// The k best of every row (see Args) on a stream of the current device. Returns a cudaError_t.
DI_EXPORT int deepinfer_topk(const float* scores, long long stride, int rows, int width, const int32_t* visible,
                             int unit, const int32_t* blocks, int num_blocks, int block, int32_t* out, int k,
                             void* stream) {
  if (rows <= 0 || k <= 0) return 0;
  if (stride % 4 || width < 0 || unit <= 0 || (blocks && block <= 0) || rows > (1 << 27) || k > kMaxK)
    return cudaErrorInvalidValue;
  Args a{scores, visible, blocks, out, stride, width, unit, num_blocks, block, k, 0, 0};
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (rows > 132) return launch<1, 512>(a, rows, s);  // two blocks an SM, one reads while the other finishes
  int c = 1;                                          // at most a block an SM
  while (c < (k > 2048 ? 4 : kMaxCluster) && rows * c <= 66 && width > c * 16384) c *= 2;
  switch (c) {
    case 1: return launch<1, 1024>(a, rows, s);
    case 2: return launch<2, 1024>(a, rows, s);
    case 4: return launch<4, 1024>(a, rows, s);
    default: return launch<8, 1024>(a, rows, s);
  }
}
