// Index scores sum_h w_h relu(q_h . k_j) on sm_90, for 32 heads x 128 and records of e2m1 codes with E8M0 scales.
//
// Belongs here: the kernel and its launch, behind a C interface without torch (deepinfer/ops/native/cuda.py loads it).
// Does not belong here: launch plans and other shapes or architectures (deepinfer/ops/triton/indexer.py), selection
// (topk.cu).
//
// A block is W warpgroups with the queries of R rows in shared memory (N = 32 R) that walk over tiles of 64 keys
// (M = 64). A lane of a quad reads the 16 bytes of one of a key's four scale blocks and expands them to bf16 in the
// registers where the tensor core wants them, so keys never pass through shared memory and the sum over heads stays in
// a quad. One warpgroup's products run while the others expand and sum.
//
// Scores are exact up to float32 rounding of the sum over heads: codes in units of the record's largest scale are bf16
// numbers, their products add without loss (unless a record's scales differ by more than 2^8), and that sum is taken in
// one order whatever R is. So a score has the same bits however many rows or keys are scored with it.
//
// Order of dims: step s of 16, place 2 b + e (+ 8 u) of the product holds code 2 (s & 1) + u + 4 e of word s / 2 of scale
// block b. A word of 8 codes shifted by 4 j has codes j and j + 4 where two bf16 want them. Queries are permuted alike.
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int kHeads = 32, kThreads = 128;

struct Args {
  const uint32_t* q;       // [rows, 32, 17]
  const float* weights;    // [rows, 32]
  const uint8_t* pool;     // pages of 1 << page_shift entries: 64 bytes of codes each, then 4 of scales each
  const int32_t *table, *slots, *visible;  // [slots, table_width], [rows], [rows]
  const int32_t* blocks;   // [rows, num_blocks] of 1 << block_shift entries: candidates, -1 unused; null: all entries
  float* out;              // [rows, width]; with `blocks` in their order, -inf where there is no visible entry
  long long page_stride, width;  // bytes, floats
  int rows, table_width, num_blocks, block_shift, page_shift;
  int free;                // rows that see at most so many are left out (without `blocks`)
};

#if __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kWords = 17;  // of a record: 16 of codes, one of scales
constexpr int kTile = 64;
constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ uint32_t smem(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ uint32_t product(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// Codes J and J + 4 of 8 e2m1 codes as two bf16, times 2^-126.
template <int J>
__device__ __forceinline__ uint32_t place(uint32_t w) {
  constexpr int left = 6 - 4 * J, sign = 12 - 4 * J;
  uint32_t t = left >= 0 ? w << (left & 31) : w >> (-left & 31);
  uint32_t u = w << sign;
  return (t & 0x01C001C0u) | (u & 0x80008000u);
}

__device__ __forceinline__ uint32_t largest(uint32_t s) {
  return max(max(s & 255, s >> 8 & 255), max(s >> 16 & 255, s >> 24));
}
// Scale of block b over the largest, times 2^126, in both halves.
__device__ __forceinline__ uint32_t factor(uint32_t s, int b) {
  int code = static_cast<int>(s >> (8 * b) & 255) - static_cast<int>(largest(s)) + 253;
  return static_cast<uint32_t>(max(code, 0)) << 7 | static_cast<uint32_t>(max(code, 0)) << 23;
}
__device__ __forceinline__ float e8m0(uint32_t code) { return __uint_as_float(code ? code << 23 : 0x00400000u); }

// Named barriers of a warpgroup that waits and one that lets it go on.
__device__ __forceinline__ void barrier_sync(int id) { asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory"); }
__device__ __forceinline__ void barrier_arrive(int id) { asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory"); }

#define HIGH "1073741888"  // of the descriptor: 128-byte swizzle, groups of 8 rows 1 KB apart
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define R16(a) \
  "%" #a "0, %" #a "1, %" #a "2, %" #a "3, %" #a "4, %" #a "5, %" #a "6, %" #a "7, %" #a "8, %" #a "9"

// d [64 x 32 R] (+)= a [64 x 16] b [32 R x 16]^T; a from registers.
template <bool ADD>
__device__ __forceinline__ void mma(float (&d)[16], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 b; setp.ne.b32 p, %21, 0; mov.b64 b, {%20, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, {%16, %17, %18, %19}, b, p, 1, 1, 0; }"
      : D16(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(ADD));
}
template <bool ADD>
__device__ __forceinline__ void mma(float (&d)[64], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 b; setp.ne.b32 p, %69, 0; mov.b64 b, {%68, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
      R16(1) ", " R16(2) ", " R16(3) ", " R16(4) ", " R16(5) ", %60, %61, %62, %63}, {%64, %65, %66, %67}, b, p, 1, 1, "
      "0; }"
      : D16(0), D16(16), D16(32), D16(48) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(ADD));
}
template <bool ADD>
__device__ __forceinline__ void mma(float (&d)[128], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 b; setp.ne.b32 p, %133, 0; mov.b64 b, {%132, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
      R16(1) ", " R16(2) ", " R16(3) ", " R16(4) ", " R16(5) ", " R16(6) ", " R16(7) ", " R16(8) ", " R16(9) ", "
      R16(10) ", " R16(11) ", %120, %121, %122, %123, %124, %125, %126, %127}, {%128, %129, %130, %131}, b, p, 1, 1, "
      "0; }"
      : D16(0), D16(16), D16(32), D16(48), D16(64), D16(80), D16(96), D16(112)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(ADD));
}

// Queries of `count` rows, in units of each head's largest scale, as B of the products: rows of 64 dims with the
// 128-byte swizzle, two halves one after the other. Half of that scale goes onto the head's weight, weights [R][4][8]:
// lane q of a quad owns heads 8 j + 2 q + e, in order 2 j + e.
template <int R, int W>
__device__ void load_queries(const Args& a, int first, int count, uint8_t* tile, float* weights) {
#pragma unroll
  for (int i = threadIdx.x; i < R * kHeads * 4; i += W * kThreads) {
    const int n = i >> 2, b = i & 3, h = n % kHeads;
    const bool ok = n / kHeads < count;
    const long long head = static_cast<long long>(first) * kHeads + n;
    uint32_t words[4] = {0, 0, 0, 0}, scales = 0;
    if (ok) {
#pragma unroll
      for (int j = 0; j < 4; j++) words[j] = a.q[head * kWords + 4 * b + j];
      scales = a.q[head * kWords + 16];
    }
    const uint32_t f = factor(scales, b);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint8_t* row = tile + (j >> 1) * (R * kHeads * 128) + n * 128 + 4 * b;
      const int c = 4 * (j & 1);  // of 16 bytes
      *reinterpret_cast<uint32_t*>(row + ((c ^ (n & 7)) << 4)) = product(place<0>(words[j]), f);
      *reinterpret_cast<uint32_t*>(row + (((c + 1) ^ (n & 7)) << 4)) = product(place<1>(words[j]), f);
      *reinterpret_cast<uint32_t*>(row + (((c + 2) ^ (n & 7)) << 4)) = product(place<2>(words[j]), f);
      *reinterpret_cast<uint32_t*>(row + (((c + 3) ^ (n & 7)) << 4)) = product(place<3>(words[j]), f);
    }
    if (b == 0)
      weights[n / kHeads * kHeads + (h >> 1 & 3) * 8 + (h >> 3) * 2 + (h & 1)] =
          ok ? 0.5f * a.weights[head] * e8m0(largest(scales)) : 0.0f;
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
}

// Scores this block's tiles of the positions up to hi - 1 for rows begin .. end - 1 of the tile of R, which read one slot; N of them at a time
// (N = 1: one row). No row sees more than `seen` entries.
template <int R, int W, int N, bool CANDIDATES>
__device__ __forceinline__ void score(const Args& a, const uint8_t* tile, const float* weights, int first, int begin,
                                      int end, const int32_t* pages, int hi, int seen) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const int base = N == 1 ? begin : 0;  // first row of the product
  const uint32_t b_low = (smem(tile + base * (kHeads * 128)) & 0x3ffff) >> 4 | 1u << 16;
  constexpr int kHalf = R * kHeads * 128 / 16;  // from a step's descriptor to that of the other half
  weights += base * kHeads + q * 8;

  // Rows whose scores this lane stores, and which of its keys: all of a row for N > 1, one key for N = 1.
  constexpr int kOwn = N == 1 ? 1 : N / 4;
  const int mine = N == 1 ? begin : (q >> 1) * (N / 2) + (q & 1) * (N / 4);
  int limit[kOwn];
  float* out[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; i++) {
    const int r = mine + i;
    limit[i] = r >= begin && r < end ? a.visible[first + r] : 0;
    if (!CANDIDATES && limit[i] <= a.free) limit[i] = 0;
    out[i] = a.out + static_cast<long long>(first + r) * a.width;
  }

  const int group = threadIdx.x / kThreads;
  const int stride = gridDim.y * W * kTile;  // tiles go round the blocks of a row, and the warpgroups of a block
  const int own = static_cast<int>(threadIdx.x >> 5) % 4 * 16 + g;  // this lane's keys of a tile are own and own + 8
  const int mask = (1 << a.page_shift) - 1;
  constexpr int kAhead = N == 1 ? 2 : 1;  // tiles whose records are on their way
  struct Fetched {
    uint4 codes[2];
    uint32_t scales[2];
    int entry[2];  // of candidates, -1: none
    int page;      // of the tile to be fetched next (without candidates): read early, lest a warpgroup waits in its turn
  } fetched[kAhead];
  auto page_of = [&](int start) { return pages[min(start, hi - 1) >> a.page_shift]; };
  auto fetch = [&](Fetched& x, int start) {
    if constexpr (CANDIDATES) {
      const int32_t* blocks = a.blocks + static_cast<long long>(first) * a.num_blocks;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int p = start + own + 8 * h;
        const int block = p < hi ? blocks[p >> a.block_shift] : -1;
        const int entry = (block << a.block_shift) + (p & ((1 << a.block_shift) - 1));
        x.codes[h] = make_uint4(0, 0, 0, 0), x.scales[h] = 0, x.entry[h] = -1;
        if (block >= 0 && entry < seen) {
          const uint8_t* page = a.pool + pages[entry >> a.page_shift] * a.page_stride;
          x.codes[h] = __ldg(reinterpret_cast<const uint4*>(page + (entry & mask) * 64 + q * 16));
          x.scales[h] = __ldg(reinterpret_cast<const uint32_t*>(page + (64 << a.page_shift) + (entry & mask) * 4));
          x.entry[h] = entry;
        }
      }
    } else {  // a tile lies in one page; what lies beyond `hi` there is read and not used
      const uint8_t* page = a.pool + x.page * a.page_stride;
      const int at = (min(start, hi - 1) & -kTile & mask) + own;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        x.codes[h] = __ldg(reinterpret_cast<const uint4*>(page + at * 64 + q * 16) + 32 * h);
        x.scales[h] = __ldg(reinterpret_cast<const uint32_t*>(page + (64 << a.page_shift) + at * 4) + 8 * h);
      }
      x.page = page_of(start + kAhead * stride);
    }
  };
#pragma unroll
  for (int i = 0; i < kAhead; i++) {
    const int start = (blockIdx.y * W + group) * kTile + i * stride;
    if (!CANDIDATES) fetched[i].page = page_of(start);
    fetch(fetched[i], start);
  }
  // Warpgroups take turns at the tensor cores. Otherwise their products interleave and end at the same time, and then
  // all of them sum.
  constexpr bool kTurns = N > 1;
  if (kTurns && group == W - 1) barrier_arrive(1);
  auto step = [&](Fetched& now, int start, bool last) {
    uint32_t k[8][4];
    float scale[2];
    int key[2];  // entries of this tile
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t words[4] = {now.codes[h].x, now.codes[h].y, now.codes[h].z, now.codes[h].w};
      const uint32_t f = factor(now.scales[h], q);
      scale[h] = e8m0(largest(now.scales[h]));
      key[h] = CANDIDATES ? now.entry[h] : start + own + 8 * h;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        k[2 * j][h] = product(place<0>(words[j]), f), k[2 * j][2 + h] = product(place<1>(words[j]), f);
        k[2 * j + 1][h] = product(place<2>(words[j]), f), k[2 * j + 1][2 + h] = product(place<3>(words[j]), f);
      }
    }
    float d[16 * N];
    if constexpr (kTurns) barrier_sync(1 + group);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    mma<false>(d, k[0], b_low);
#pragma unroll
    for (int s = 1; s < 8; s++) {
      if (kTurns && s == 7) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      mma<true>(d, k[s], b_low + (s >> 2) * kHalf + (s & 3) * 2);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    fetch(now, start + kAhead * stride);  // while the products run
    if constexpr (kTurns) {
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (group < W - 1 || !last) barrier_arrive(1 + (group + 1) % W);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 16 * N; i++) asm volatile("" : "+f"(d[i])::"memory");

    float sum[N][2];
#pragma unroll
    for (int r = 0; r < N; r++) {
      const float4 w[2] = {reinterpret_cast<const float4*>(weights + r * kHeads)[0],
                           reinterpret_cast<const float4*>(weights + r * kHeads)[1]};
      const float v[8] = {w[0].x, w[0].y, w[0].z, w[0].w, w[1].x, w[1].y, w[1].z, w[1].w};
      sum[r][0] = sum[r][1] = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) {  // twice the positive part: one addition, where a maximum takes two issue slots
        const float* x = d + (r * 4 + j) * 4;
        sum[r][0] = fmaf(x[0] + fabsf(x[0]), v[2 * j], sum[r][0]);
        sum[r][1] = fmaf(x[2] + fabsf(x[2]), v[2 * j], sum[r][1]);
        sum[r][0] = fmaf(x[1] + fabsf(x[1]), v[2 * j + 1], sum[r][0]);
        sum[r][1] = fmaf(x[3] + fabsf(x[3]), v[2 * j + 1], sum[r][1]);
      }
    }
    // The four lanes of a quad, (q0 + q2) + (q1 + q3): each step hands half of the sums over.
    const bool upper = q & 2, odd = q & 1;
    auto give = [&](float stay0, float stay1, bool second, int with) {
      return (second ? stay1 : stay0) + __shfl_xor_sync(kAll, second ? stay0 : stay1, with);
    };
    if constexpr (N == 1) {
      float x = give(sum[0][0], sum[0][1], upper, 2);
      x += __shfl_xor_sync(kAll, x, 1);
      x *= upper ? scale[1] : scale[0];
      const int e = upper ? key[1] : key[0], at = start + own + (upper ? 8 : 0);
      if (!odd) {
        if (CANDIDATES && at < hi)
          out[0][at] = e >= 0 && e < limit[0] ? x : -__int_as_float(0x7f800000);
        else if (!CANDIDATES && at < limit[0])
          out[0][at] = x;
      }
    } else {
      float half[N / 2][2];
#pragma unroll
      for (int r = 0; r < N / 2; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) half[r][h] = give(sum[r][h], sum[r + N / 2][h], upper, 2);
#pragma unroll
      for (int r = 0; r < N / 4; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float x = give(half[r][h], half[r + N / 4][h], odd, 1) * scale[h];
          if (key[h] < limit[r]) out[r][key[h]] = x;
        }
    }
  };
  for (int start = blockIdx.y * W * kTile; start < hi; start += kAhead * stride) {  // the same for all warpgroups
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const int at = start + i * stride;
      if (i == 0 || at < hi) step(fetched[i], at + group * kTile, at + stride >= hi);
    }
  }
}
#endif

// Grid (tiles of R rows, blocks that share a tile's positions).
template <int R, int W, bool CANDIDATES>
__global__ void __launch_bounds__(W * kThreads, 1) logits_kernel(const __grid_constant__ Args a) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t tile[];
  float* weights = reinterpret_cast<float*>(tile + R * kHeads * 256);
  asm volatile("griddepcontrol.launch_dependents;\n griddepcontrol.wait;" ::: "memory");
  const int first = blockIdx.x * R, count = min(R, a.rows - first), lo = blockIdx.y * W * kTile;
  auto seen_by = [&](int r) {
    const int n = a.visible[first + r];
    return n > a.free || CANDIDATES ? n : 0;
  };
  int most = 0;
  for (int r = 0; r < count; r++) most = max(most, seen_by(r));
  const int all = CANDIDATES ? a.num_blocks << a.block_shift : most;
  if (lo >= all) return;
  load_queries<R, W>(a, first, count, tile, weights);
  for (int begin = 0, end; begin < count; begin = end) {  // runs of rows of one slot
    const int slot = a.slots[first + begin];
    int seen = seen_by(begin);
    for (end = begin + 1; end < count && a.slots[first + end] == slot; end++) seen = max(seen, seen_by(end));
    const int hi = CANDIDATES ? all : seen;
    if (lo >= hi) continue;
    const int32_t* pages = a.table + static_cast<long long>(slot) * a.table_width;
    if (R == 1 || end - begin == 1)
      score<R, W, 1, CANDIDATES>(a, tile, weights, first, begin, end, pages, hi, seen);
    else
      score<R, W, R, false>(a, tile, weights, first, begin, end, pages, hi, seen);
  }
#endif
}

template <int R, int W, bool CANDIDATES>
cudaError_t launch(const Args& a, int parts, cudaStream_t stream) {
  static bool ready[64] = {};
  const int bytes = R * kHeads * 256 + R * kHeads * 4;
  int device = 0;
  cudaError_t code = cudaGetDevice(&device);
  if (code) return code;
  if (device >= 64 || !ready[device]) {
    code = cudaFuncSetAttribute(logits_kernel<R, W, CANDIDATES>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (code) return code;
    if (device < 64) ready[device] = true;
  }
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((a.rows + R - 1) / R, parts);
  config.blockDim = dim3(W * kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, logits_kernel<R, W, CANDIDATES>, a);
}

}  // namespace

// Scores (see Args) on a stream of the current device, `tile` rows a block, `parts` blocks for them. A cudaError_t.
extern "C" __attribute__((visibility("default"))) int deepinfer_index_logits(
    const uint32_t* q, const float* weights, const uint8_t* pool, const int32_t* table, const int32_t* slots,
    const int32_t* visible, const int32_t* blocks, float* out, long long page_stride, long long width, int rows,
    int table_width, int num_blocks, int block_shift, int page_shift, int free, int tile, int parts, void* stream) {
  if (rows <= 0) return 0;
  if (parts <= 0 || parts > 65535 || (blocks ? tile != 1 : page_shift < 6)) return cudaErrorInvalidValue;
  const Args a{q,     weights, pool, table,       slots,      visible,     blocks,    out,
               page_stride, width,   rows, table_width, num_blocks, block_shift, page_shift, free};
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  switch (tile) {  // warpgroups fill the registers of an SM
    case 1: return blocks ? launch<1, 4, true>(a, parts, s) : launch<1, 4, false>(a, parts, s);
    case 4: return launch<4, 4, false>(a, parts, s);
    case 8: return launch<8, 2, false>(a, parts, s);
    default: return cudaErrorInvalidValue;
  }
}
