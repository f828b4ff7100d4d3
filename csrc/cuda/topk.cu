// Exact top-k selection of float32 rows: score descending, position ascending on ties; ids come out ascending.
//
// Belongs here: the kernel and its launch plan, behind a C interface without torch (deepinfer/ops/native/cuda.py loads
// it). Does not belong here: scores (deepinfer/ops/triton/indexer.py).
//
// A row is one cluster of C blocks that keep its scores in shared memory as ordered integers, so memory is read once.
// Three histograms (11, 11 and 10 bits) find the k-th key; a count and a write pass place the ids in order, without a
// sort. Lengths are read on the device; C and the cache follow from the shapes. Selection is integer arithmetic, so the
// plan never shows in a result.
#include <cooperative_groups.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace cg = cooperative_groups;

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kBins = 2048;     // 11 bits; 8 KB beside a cache of 64 KB leave room for three blocks an SM
constexpr int kGroup = 128;     // scores of a warp's step: 16 bytes a lane
constexpr int kSlice = 16384;   // scores of a block that three blocks an SM can cache
constexpr int kCache = 49152;   // scores that one block an SM can cache
constexpr int kMaxCluster = 8;  // portable limit
constexpr unsigned kAll = 0xffffffffu;

struct Args {
  const float* scores;     // [rows, stride]
  const int32_t* visible;  // [rows]: a row holds ceil(visible / unit) scores; null: width
  const int32_t* blocks;   // [rows, num_blocks]: position p means entry blocks[p / block] * block + p % block; or null
  int32_t* out;            // [rows, k]
  long long stride;        // a multiple of 4
  int width, unit, num_blocks, block, k, cache;
};

struct Shared {
  uint32_t hist[kBins];                // of this block; of the cluster in rank 0
  uint32_t warp_sum[kWarps];           // of find_bin
  uint32_t above[kWarps], ties[kWarps];
  uint32_t rank_above[kMaxCluster], rank_ties[kMaxCluster];
  int bin;                             // that holds the k-th key; -1: fewer than k keys
  uint32_t need, held;                 // keys wanted of that bin, keys in it
};

// Order of the floats; 0 for what cannot be chosen (-inf, NaN). -0 ties with 0.
__device__ __forceinline__ uint32_t ordered(float v) {
  uint32_t u = __float_as_uint(v + 0.0f);
  u ^= static_cast<uint32_t>(static_cast<int32_t>(u) >> 31) | 0x80000000u;
  return v > -__int_as_float(0x7f800000) ? u : 0;
}

template <int C>
__device__ __forceinline__ void sync_row() {
  if constexpr (C == 1)
    __syncthreads();
  else
    cg::this_cluster().sync();
}

// Finds the bin of the need-th largest key in rank 0's histogram. Threads hold four bins each, highest first.
template <int C>
__device__ void find_bin(Shared& s, uint32_t need) {
  int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  const uint32_t* merged = s.hist;
  if constexpr (C > 1) merged = cg::this_cluster().map_shared_rank(s.hist, 0);
  int low = kBins - 4 * (t + 1);
  uint4 n = *reinterpret_cast<const uint4*>(merged + low);
  uint32_t sum = n.x + n.y + n.z + n.w, run = sum;
  for (int o = 1; o < 32; o *= 2) {
    uint32_t other = __shfl_up_sync(kAll, run, o);
    if (lane >= o) run += other;
  }
  if (lane == 31) s.warp_sum[warp] = run;
  if (t == 0) s.bin = -1;
  __syncthreads();
  uint32_t before = run - sum;
  for (int w = 0; w < warp; w++) before += s.warp_sum[w];
  if (before < need && need <= before + sum) {
    uint32_t held[4] = {n.w, n.z, n.y, n.x};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (before < need && need <= before + held[i]) {
        s.bin = low + 3 - i, s.need = need - before, s.held = held[i];
        break;
      }
      before += held[i];
    }
  }
}

// Four keys of a lane at `at` of the row's slice [first, first + length).
struct Slice {
  const float* scores;
  uint32_t* cache;
  int first, length, cached;

  __device__ __forceinline__ uint4 keys(float4 v, int at) const {
    int left = length - at;  // scores from here on
    return make_uint4(left > 0 ? ordered(v.x) : 0, left > 1 ? ordered(v.y) : 0, left > 2 ? ordered(v.z) : 0,
                      left > 3 ? ordered(v.w) : 0);
  }
  __device__ __forceinline__ float4 load(int at) const {
    return at < length ? __ldg(reinterpret_cast<const float4*>(scores + first + at)) : make_float4(0, 0, 0, 0);
  }
  __device__ __forceinline__ uint4 get(int at) const {
    if (at < cached) return *reinterpret_cast<const uint4*>(cache + at);
    return keys(load(at), at);
  }
};

__device__ __forceinline__ void count_key(Shared& s, uint32_t key, uint32_t prefix, int shift, int bits) {
  if ((key >> shift >> bits) == prefix) atomicAdd(&s.hist[(key >> shift) & ((1u << bits) - 1)], 1u);
}

template <int C>
__global__ void __launch_bounds__(kThreads, 3) topk_kernel(Args a) {
  extern __shared__ __align__(16) uint32_t cache[];
  __shared__ __align__(16) Shared s;
  int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  int row = blockIdx.x / C, rank = blockIdx.x % C;
  for (int i = t; i < kBins; i += kThreads) s.hist[i] = 0;
  asm volatile("griddepcontrol.wait;" ::: "memory");

  int n = a.width;
  if (a.visible) n = min(n, (max(a.visible[row], 0) + a.unit - 1) / a.unit);
  int32_t* out = a.out + static_cast<long long>(row) * a.k;
  if (n <= a.k && !a.blocks) {  // everything is chosen; scores may not exist
    for (int i = rank * kThreads + t; i < a.k; i += C * kThreads) out[i] = i < n ? i : -1;
    return;
  }

  int per = ((n + C - 1) / C + kGroup - 1) / kGroup * kGroup;  // of a block
  Slice x;
  x.scores = a.scores + row * a.stride;
  x.cache = cache;
  x.first = rank * per;
  x.length = max(min(n - x.first, per), 0);
  x.cached = a.cache;
  // a warp owns consecutive groups, so that order is warp, step, lane, word
  int per_warp = (per / kGroup + kWarps - 1) / kWarps * kGroup;
  int begin = warp * per_warp, end = min(begin + per_warp, x.length);
  sync_row<C>();  // histograms are zero everywhere

  constexpr int kAhead = 3;  // 4 spill at 40 registers
  for (int g = begin; g < end; g += kAhead * kGroup) {
    float4 v[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++) v[i] = x.load(min(g + i * kGroup, end) + lane * 4);
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      int at = g + i * kGroup + lane * 4;
      if (g + i * kGroup >= end) break;
      uint4 key = x.keys(v[i], at);
      if (at < x.cached) *reinterpret_cast<uint4*>(cache + at) = key;  // read back by this thread only
      if (key.x) atomicAdd(&s.hist[key.x >> 21], 1u);
      if (key.y) atomicAdd(&s.hist[key.y >> 21], 1u);
      if (key.z) atomicAdd(&s.hist[key.z >> 21], 1u);
      if (key.w) atomicAdd(&s.hist[key.w >> 21], 1u);
    }
  }

  uint32_t prefix = 0, above = 0, quota = 0, need = a.k;  // chosen: key > above, and the first `quota` of key == above
  constexpr int kShift[3] = {21, 10, 0}, kBits[3] = {11, 11, 10};
#pragma unroll
  for (int pass = 0; pass < 3; pass++) {
    if (pass > 0) {
      for (int g = begin; g < end; g += kGroup) {
        uint4 key = x.get(g + lane * 4);
        count_key(s, key.x, prefix, kShift[pass], kBits[pass]);
        count_key(s, key.y, prefix, kShift[pass], kBits[pass]);
        count_key(s, key.z, prefix, kShift[pass], kBits[pass]);
        count_key(s, key.w, prefix, kShift[pass], kBits[pass]);
      }
    }
    if constexpr (C > 1) {  // add to rank 0's; few bins are not empty
      __syncthreads();
      if (rank) {
        uint32_t* merged = cg::this_cluster().map_shared_rank(s.hist, 0);
        for (int i = t; i < kBins; i += kThreads) {
          if (uint32_t c = s.hist[i]) atomicAdd(merged + i, c), s.hist[i] = 0;
        }
      }
    }
    sync_row<C>();
    find_bin<C>(s, need);
    sync_row<C>();  // s.bin is written, and rank 0's histogram was read
    int bin = s.bin;
    if (bin < 0) break;  // fewer than k: all that can be chosen are
    prefix = (prefix << kBits[pass]) | bin, need = s.need;
    if (need == s.held || pass == 2) {
      above = prefix << kShift[pass];
      if (need == s.held) above--;  // the whole bin
      else quota = need;
      break;
    }
    if (rank == 0)
      for (int i = t; i < kBins; i += kThreads) s.hist[i] = 0;
    sync_row<C>();
  }

  // how many come before this warp
  uint32_t more = 0, equal = 0;
  for (int g = begin; g < end; g += kGroup) {
    uint4 key = x.get(g + lane * 4);
    more += (key.x > above) + (key.y > above) + (key.z > above) + (key.w > above);
    equal += (key.x == above) + (key.y == above) + (key.z == above) + (key.w == above);
  }
  more = __reduce_add_sync(kAll, more), equal = __reduce_add_sync(kAll, equal);
  if (lane == 0) s.above[warp] = more, s.ties[warp] = equal;
  __syncthreads();
  more = equal = 0;
  for (int w = 0; w < warp; w++) more += s.above[w], equal += s.ties[w];
  uint32_t all_more = more, all_equal = equal;
  for (int w = warp; w < kWarps; w++) all_more += s.above[w], all_equal += s.ties[w];
  if constexpr (C > 1) {
    auto cluster = cg::this_cluster();
    if (t < C) {
      *cluster.map_shared_rank(&s.rank_above[rank], t) = all_more;
      *cluster.map_shared_rank(&s.rank_ties[rank], t) = all_equal;
    }
    cluster.sync();  // the last access to another block's memory
    all_more = all_equal = 0;
#pragma unroll
    for (int r = 0; r < C; r++) {
      if (r < rank) more += s.rank_above[r], equal += s.rank_ties[r];
      all_more += s.rank_above[r], all_equal += s.rank_ties[r];
    }
  }
  if (rank == 0)
    for (int i = all_more + min(all_equal, quota) + t; i < a.k; i += kThreads) out[i] = -1;

  for (int g = begin; g < end; g += kGroup) {
    uint4 four = x.get(g + lane * 4);
    uint32_t key[4] = {four.x, four.y, four.z, four.w};
    uint32_t mine = 0;  // chosen so far: above in the low half, ties in the high half
#pragma unroll
    for (int i = 0; i < 4; i++) mine += key[i] > above ? 1u : (quota && key[i] == above) ? 0x10000u : 0u;
    if (!__any_sync(kAll, mine)) continue;
    uint32_t run = mine;
    for (int o = 1; o < 32; o *= 2) {
      uint32_t other = __shfl_up_sync(kAll, run, o);
      if (lane >= o) run += other;
    }
    uint32_t m = more + ((run - mine) & 0xffff), e = equal + ((run - mine) >> 16);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      bool over = key[i] > above, tie = quota && key[i] == above;
      if (over || (tie && e < quota)) {
        int id = x.first + g + lane * 4 + i;
        if (a.blocks) id = a.blocks[static_cast<long long>(row) * a.num_blocks + id / a.block] * a.block + id % a.block;
        out[m + min(e, quota)] = id;
      }
      m += over, e += tie;
    }
    run = __shfl_sync(kAll, run, 31);
    more += run & 0xffff, equal += run >> 16;
  }
}

template <int C>
cudaError_t launch(const Args& a, int rows, cudaStream_t stream) {
  static bool ready[64] = {};
  int device = 0;
  cudaError_t code = cudaGetDevice(&device);
  if (code) return code;
  if (device >= 64 || !ready[device]) {
    code = cudaFuncSetAttribute(topk_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, kCache * 4);
    if (!code) code = cudaFuncSetAttribute(topk_kernel<C>, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
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
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(a.cache) * 4;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = C == 1 ? 1 : 2;
  return cudaLaunchKernelEx(&config, topk_kernel<C>, a);
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
  if (stride % 4 || width < 0 || unit <= 0 || (blocks && block <= 0) || rows > (1 << 27)) return cudaErrorInvalidValue;
  int c = 1;
  while (c < kMaxCluster && width > c * kSlice) c *= 2;
  while (c < kMaxCluster && rows * c < 132 && width > c * 4096) c *= 2;  // few rows: more blocks a row
  int per = ((width + c - 1) / c + kGroup - 1) / kGroup * kGroup;
  Args a{scores, visible, blocks, out, stride, width, unit, num_blocks, block, k, per < kCache ? per : kCache};
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  switch (c) {
    case 1: return launch<1>(a, rows, s);
    case 2: return launch<2>(a, rows, s);
    case 4: return launch<4>(a, rows, s);
    default: return launch<8>(a, rows, s);
  }
}
