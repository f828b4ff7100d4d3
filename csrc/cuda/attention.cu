// Sparse attention with a sink for 64 heads x 512 on sm_90: window records (528 B) and selected latent records (288 B).
//
// Belongs here: the kernel and its launch, behind a C interface without torch (deepinfer/ops/native/cuda.py loads it).
// Does not belong here: planning (deepinfer/ops/triton/attention.py), record layouts (deepinfer/ops/records.py).
//
// A block holds all heads of one query row and walks over tiles of 64 keys; K and V are one bf16 tile in shared memory.
// Three warpgroups: `expand` reads records and writes tiles (two buffers) beside the tensor cores; `scores` computes
// Q K, the softmax and the left 256 columns of P V; `values` the right 256 columns. P goes through shared memory once.
// Q K is one m64n64 a step, 128 bytes of shared memory a cycle, which is its limit; two warpgroups with n32 each would
// read Q twice.
// Measured on an H200: 8192 rows of 128 + 512 keys in 1680 us (409 TFLOP/s). Prefetching records into the L2 when a row
// begins cost 10 us of 69 at 256 rows.
//
// SPLIT > 1: a cluster of SPLIT blocks shares a row, each a contiguous part of its tiles; sums are exchanged through
// distributed shared memory, each block finishing 512 / SPLIT columns. The parts are added in rank order, so the bits
// depend on SPLIT and on the number of tiles only.
//
// Order of dims: position 8 j + 2 q + e of a group of 32 (j, q < 4, e < 2) holds dim 8 q + j + 4 e. A word of 8 e2m1
// codes shifted by 4 j has codes j and j + 4 where two bf16 want them, so no byte moves between registers; and a lane of
// the accumulator owns 8 consecutive dims, so it stores 16 bytes. Q is permuted when it is read.
// Tiles hold K * 2^-64: a code placed in bf16 bits is its value times 2^-120 (e4m3) or 2^-126 (e2m1), and one exact
// bf16 product with the scale brings both to 2^-64.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "sm90.cuh"

namespace {

using namespace sm90;

constexpr int kHeads = 64, kDim = 512, kTile = 64;
constexpr int kThreads = 384;
constexpr int kLines = 1024;  // most selected entries of a row
constexpr int kWindowBytes = 528, kLatentBytes = 288;
constexpr float kUnit = 18446744073709551616.0f;  // 2^64
constexpr float kLog2e = 1.4426950408889634f;

struct Args {
  const __nv_bfloat16* q;  // [rows, 64, 512]
  const uint8_t* fresh;    // window records of this step
  const uint8_t* ring;     // [slots, ring_rows, 528]
  const int32_t *slots, *positions, *rows, *first, *floor;  // per row; per block of `block` rows where block > 0
  const float* sink;
  const uint8_t* pool;      // [pages, 1 << page_shift, 288]
  const int32_t* selected;  // [rows, entries]
  const int32_t* table;     // [slots, table_width]
  __nv_bfloat16* out;
  float scale2;  // softmax scale * log2(e) * 2^64
  int count, ring_rows, table_width, entries, window, block, page_shift;
};

struct __align__(1024) Shared {
  uint8_t k[2][kTile * kDim * 2];  // tiles; at the end sums of other blocks
  uint8_t q[kHeads * kDim * 2];
  uint8_t p[2][kHeads * kTile * 2];
  float alpha[2][kHeads];     // factor of earlier sums, per tile
  float sink[kHeads];         // in log2 units
  float stats[8][2][kHeads];  // maximum and mass of every block of the cluster
  int32_t line[kLines];       // record number of a selected entry, -1: none
  uint16_t valid[2][4];       // bit per key
  uint64_t full[2], empty[2], ready[2];  // tile written, tile read, P written
};

// ---- expansion

// Codes J and J + 4 of 8 e2m1 codes as two bf16, times 2^-126.
template <int J>
__device__ __forceinline__ uint32_t place_e2m1(uint32_t w) {
  constexpr int left = 6 - 4 * J, sign = 12 - 4 * J;
  uint32_t t = left >= 0 ? w << (left & 31) : w >> (-left & 31);
  uint32_t u = w << sign;
  return (t & 0x01C001C0u) | (u & 0x80008000u);
}

// Code J of two words of 4 e4m3 codes as two bf16, times 2^-120.
template <int J>
__device__ __forceinline__ uint32_t place_e4m3(uint32_t low, uint32_t high) {
  uint32_t t = __byte_perm(low, high, (4 + J) << 12 | J << 4);
  return ((t >> 4) & 0x07F007F0u) | (t & 0x80008000u);
}

// Scale of 16 e2m1 codes (e4m3, positive) as bf16 in both halves, times 2^62.
__device__ __forceinline__ uint32_t latent_scale(uint32_t code) {
  float wide = __uint_as_float(code << 20) * 2.475880078570760549798248448e27f;  // 2^91, twice
  uint32_t bits = __float_as_uint(wide * 2.475880078570760549798248448e27f);
  return __byte_perm(bits, bits, 0x3232);
}

template <int J>
__device__ __forceinline__ void put_latent(uint32_t to, const uint4& c, uint32_t low, uint32_t high) {
  store16(to, product(place_e2m1<J>(c.x), low), product(place_e2m1<J>(c.y), low), product(place_e2m1<J>(c.z), high),
          product(place_e2m1<J>(c.w), high));
}

template <int J>
__device__ __forceinline__ void put_window(uint32_t to, const uint4& a, const uint4& b, uint32_t scale) {
  store16(to, product(place_e4m3<J>(a.x, a.y), scale), product(place_e4m3<J>(a.z, a.w), scale),
          product(place_e4m3<J>(b.x, b.y), scale), product(place_e4m3<J>(b.z, b.w), scale));
}

// Where the window keys of a row are: key j is position pos - window + 1 + j, or row j - window of the draft block.
struct Window {
  const uint8_t *fresh, *ring;  // records of key 0 in this step's buffer (may not exist) and of the ring's row 0
  int turn;                     // ring row of key 0
  int from, begin;              // first key that lies in the step's buffer; first key that exists in the ring
};

__device__ __forceinline__ Window load_window(const Args& a, int row, int& slot) {
  const bool drafts = a.block > 0;  // block rows see the ring up to the block's start
  const int b = drafts ? row / a.block : row;
  slot = a.slots[b];
  const int start = a.positions[b] - (drafts ? a.window : a.window - 1);
  const int line = drafts ? b * a.block - a.window : a.rows[b] - (a.window - 1);
  const int turn = start % a.ring_rows;
  return {a.fresh + static_cast<long long>(line) * kWindowBytes,
          a.ring + static_cast<long long>(slot) * a.ring_rows * kWindowBytes, turn < 0 ? turn + a.ring_rows : turn,
          drafts ? a.window : a.first[b] - start, max(a.floor[b], 0) - start};
}

// Record of window key j, or null where it does not exist. The ring holds a whole window, so it turns once at most.
__device__ __forceinline__ const uint8_t* window_record(const Args& a, const Window& w, int j) {
  const bool exists = j < a.window + a.block && (j >= w.begin || (a.block > 0 && j >= a.window));
  int at = w.turn + j;
  at = at >= a.ring_rows ? at - a.ring_rows : at;
  const uint8_t* record = j >= w.from ? w.fresh + j * kWindowBytes : w.ring + at * kWindowBytes;
  return exists ? record : nullptr;
}

// Half of what a thread holds of a tile: four groups of a latent key, or two of a window key.
struct Raw {
  uint4 code[4];
  uint32_t scale[4];
};

// Groups 4 g + part, 4 g + 4 + part of a window record (g: 0 or 2), or zeros without a record.
__device__ __forceinline__ void fetch_window(Raw& raw, const uint8_t* record, int part, int g) {
  const uint8_t *codes = record + part * 32, *scales = record + kDim + part;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint4* from = reinterpret_cast<const uint4*>(codes + 128 * (g + i));
    raw.code[2 * i] = record ? __ldg(from) : make_uint4(0, 0, 0, 0);
    raw.code[2 * i + 1] = record ? __ldg(from + 1) : make_uint4(0, 0, 0, 0);
    raw.scale[i] = record ? __ldg(scales + 4 * (g + i)) : 0;
  }
}

__device__ __forceinline__ void fetch_latent(Raw& raw, const uint8_t* record, int part) {
  const uint8_t *codes = record + part * 16, *scales = record + kDim / 2 + part * 2;
#pragma unroll
  for (int g = 0; g < 4; g++) {
    raw.code[g] = record ? __ldg(reinterpret_cast<const uint4*>(codes + 64 * g)) : make_uint4(0, 0, 0, 0);
    raw.scale[g] = record ? __ldg(reinterpret_cast<const unsigned short*>(scales + 8 * g)) : 0;
  }
}

// to: chunks of group `part` of the key; a group of four further is 16 KB further.
__device__ __forceinline__ void write_window(const Raw& raw, const uint32_t (&to)[4], uint32_t offset) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t scale = ((raw.scale[i] + 56) << 7) * 0x10001u;  // bf16 bits of 2^(code - 127 + 120 - 64)
    put_window<0>(to[0] + offset + i * 16384, raw.code[2 * i], raw.code[2 * i + 1], scale);
    put_window<1>(to[1] + offset + i * 16384, raw.code[2 * i], raw.code[2 * i + 1], scale);
    put_window<2>(to[2] + offset + i * 16384, raw.code[2 * i], raw.code[2 * i + 1], scale);
    put_window<3>(to[3] + offset + i * 16384, raw.code[2 * i], raw.code[2 * i + 1], scale);
  }
}

__device__ __forceinline__ void write_latent(const Raw& raw, const uint32_t (&to)[4], uint32_t offset) {
#pragma unroll
  for (int g = 0; g < 4; g++) {
    const uint32_t low = latent_scale(raw.scale[g] & 255), high = latent_scale(raw.scale[g] >> 8);
    put_latent<0>(to[0] + offset + g * 16384, raw.code[g], low, high);
    put_latent<1>(to[1] + offset + g * 16384, raw.code[g], low, high);
    put_latent<2>(to[2] + offset + g * 16384, raw.code[g], low, high);
    put_latent<3>(to[3] + offset + g * 16384, raw.code[g], low, high);
  }
}

// ---- warpgroups


// Rows of the block: `for (row...)`. A row's tiles begin..end-1; window tiles come first.
template <int SPLIT>
struct Plan {
  int first_row, step, begin, end, window_tiles;
  __device__ explicit Plan(const Args& a) {
    window_tiles = (a.window + a.block + kTile - 1) / kTile;
    int tiles = window_tiles + (a.entries + kTile - 1) / kTile;
    int rank = blockIdx.x % SPLIT;
    first_row = blockIdx.x / SPLIT;
    step = gridDim.x / SPLIT;
    begin = tiles * rank / SPLIT;
    end = tiles * (rank + 1) / SPLIT;
  }
};

// Threads 256..383. Warp w holds keys 16 w .. 16 w + 15 of a tile: lane % 8 (+ 8) is the key, lane / 8 the part of dims.
template <int SPLIT>
__device__ __forceinline__ void expand(const Args& a, Shared& s, const Plan<SPLIT>& plan) {
  int thread = threadIdx.x - 256, part = thread % 32 / 8, key = thread / 32 * 16 + thread % 8;
  uint32_t to[4];  // chunk j of group 4 g + part, for g = 0 and the first key
#pragma unroll
  for (int j = 0; j < 4; j++)
    to[j] = smem(s.k[0]) + (part >> 1) * 8192 + key * 128 + (((4 * (part & 1) + j) ^ (thread % 8)) << 4);
  const int low = max(plan.begin - plan.window_tiles, 0) * kTile;
  const int high = min((plan.end - plan.window_tiles) * kTile, a.entries);
  int n = 0;
  for (int row = plan.first_row; row < a.count; row += plan.step) {
    forget(part), forget(key), forget(thread);  // nothing computed from them outlives a row: registers are few
    const int32_t* selected = a.selected + static_cast<long long>(row) * a.entries + low + thread;
    int entry[4];
#pragma unroll
    for (int i = 0; i < 4; i++) entry[i] = SPLIT > 1 && low + thread + 128 * i < high ? __ldg(selected + 128 * i) : -1;
    Raw left, right;
    int slot;
    const Window w = load_window(a, row, slot);
    if (SPLIT == 1 && thread == 0 && row + plan.step < a.count)  // the next row's Q
      prefetch(a.q + static_cast<long long>(row + plan.step) * kHeads * kDim, kHeads * kDim * 2);
    auto window = [&](int t, int i) { return window_record(a, w, t * kTile + key + 8 * i); };
    auto line = [&](int t, int i) { return s.line[(t - plan.window_tiles) * kTile - low + key + 8 * i]; };
    auto latent = [&](int t, int i) {
      const int found = line(t, i);
      return found >= 0 ? a.pool + static_cast<long long>(found) * kLatentBytes : nullptr;
    };
    if (plan.begin < plan.window_tiles) {
      fetch_window(left, window(plan.begin, 0), part, 0);
      fetch_window(right, window(plan.begin, 0), part, 2);
    }
    if (high > low) {
      const int lines = (plan.end - plan.window_tiles) * kTile - low;
      const int32_t* table = a.table + static_cast<long long>(slot) * a.table_width;
      auto look_up = [&](int e, int at) {
        const int page = e < 0 ? 0 : __ldg(table + (e >> a.page_shift));
        if (at < lines) s.line[at] = e < 0 ? -1 : (page << a.page_shift) + (e & ((1 << a.page_shift) - 1));
      };
      named_barrier<2, 128>();  // lines of the row before are read
#pragma unroll
      for (int i = 0; i < 4; i++) {  // a lone row wants them early; a walk over rows wants the registers
        if (SPLIT == 1) entry[i] = low + thread + 128 * i < high ? __ldg(selected + 128 * i) : -1;
      }
#pragma unroll
      for (int i = 0; i < 4; i++) look_up(entry[i], thread + 128 * i);
#pragma unroll 1
      for (int at = thread + 512; at < lines; at += 128) look_up(low + at < high ? __ldg(selected + at - thread) : -1, at);
      named_barrier<2, 128>();
    }
    if (plan.begin >= plan.window_tiles) {
      fetch_latent(left, latent(plan.begin, 0), part);
      fetch_latent(right, latent(plan.begin, 1), part);
    }
    for (int t = plan.begin; t < plan.end; t++, n++) {
      const int buffer = n & 1;
      const uint32_t base = buffer * (kTile * kDim * 2);
      bool valid0, valid1;
      wait(&s.empty[buffer], (n >> 1 & 1) ^ 1);
      if (t < plan.window_tiles) {
        valid0 = window(t, 0) != nullptr, valid1 = window(t, 1) != nullptr;
        write_window(left, to, base);
        fetch_window(left, window(t, 1), part, 0);
        write_window(right, to, base + 32768);
        fetch_window(right, window(t, 1), part, 2);
        write_window(left, to, base + 1024);
        if (t + 1 < plan.end) {
          if (t + 1 < plan.window_tiles)
            fetch_window(left, window(t + 1, 0), part, 0);
          else
            fetch_latent(left, latent(t + 1, 0), part);
        }
        write_window(right, to, base + 32768 + 1024);
        if (t + 1 < plan.end) {
          if (t + 1 < plan.window_tiles)
            fetch_window(right, window(t + 1, 0), part, 2);
          else
            fetch_latent(right, latent(t + 1, 1), part);
        }
      } else {
        valid0 = line(t, 0) >= 0, valid1 = line(t, 1) >= 0;
        write_latent(left, to, base);
        if (t + 1 < plan.end) fetch_latent(left, latent(t + 1, 0), part);
        write_latent(right, to, base + 1024);
        if (t + 1 < plan.end) fetch_latent(right, latent(t + 1, 1), part);
      }
      const unsigned bits0 = __ballot_sync(kAll, valid0), bits1 = __ballot_sync(kAll, valid1);
      if (thread % 32 == 0) s.valid[buffer][thread / 32] = static_cast<uint16_t>((bits0 & 255) | (bits1 & 255) << 8);
      fence_proxy();
      arrive(&s.full[buffer]);
    }
    if (SPLIT > 1) break;
  }
}

// What a thread brings of Q: 16 bytes of eight groups of a head. Four lanes share a head.
struct Query {
  uint4 v[8];
};

__device__ __forceinline__ void fetch_query(Query& x, const Args& a, int row, int head, int half) {
  const uint4* from = reinterpret_cast<const uint4*>(a.q + static_cast<long long>(row) * kHeads * kDim + head * kDim);
#pragma unroll
  for (int i = 0; i < 8; i++) x.v[i] = __ldg(from + threadIdx.x % 4 + 4 * (8 * half + i));
}

// Into shared memory, dims in the order of the tiles.
__device__ __forceinline__ void put_query(const Query& x, Shared& s, int head, int half) {
  const uint32_t to = smem(s.q) + head * 128 + threadIdx.x % 4 * 4;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int group = 8 * half + i;
    const uint32_t r[4] = {__byte_perm(x.v[i].x, x.v[i].z, 0x5410), __byte_perm(x.v[i].x, x.v[i].z, 0x7632),
                           __byte_perm(x.v[i].y, x.v[i].w, 0x5410), __byte_perm(x.v[i].y, x.v[i].w, 0x7632)};
#pragma unroll
    for (int j = 0; j < 4; j++)
      store4(to + (group >> 1) * 8192 + (((4 * (group & 1) + j) ^ (head & 7)) << 4), r[j]);
  }
}

// Threads 0..255: Q of the first row, and the sink.
__device__ __forceinline__ void load_query(const Args& a, Shared& s, int row) {
  const int head = threadIdx.x / 4;
  const float sink = threadIdx.x < kHeads ? __ldg(a.sink + threadIdx.x) : 0;
  Query left, right;
  fetch_query(left, a, row, head, 0);
  fetch_query(right, a, row, head, 1);
  if (threadIdx.x < kHeads) s.sink[threadIdx.x] = sink * kLog2e;
  put_query(left, s, head, 0);
  put_query(right, s, head, 1);
}

// Columns of 32-dim groups GROUPS of the warpgroup's sums (index I of a group: d[16 I ..]) -> out.
template <int FIRST, int GROUPS>
__device__ __forceinline__ void store_output(const Args& a, const float* d, int row, int column) {
  const int lane = threadIdx.x % 32, head = 16 * (threadIdx.x / 32 % 4) + lane / 4;
  __nv_bfloat16* to = a.out + (static_cast<long long>(row) * kHeads + head) * kDim + column + 8 * (lane % 4);
#pragma unroll
  for (int g = 0; g < GROUPS; g++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float* f = d + 16 * (FIRST + g) + 2 * h;
      uint4 v = make_uint4(pair(f[0], f[4]), pair(f[8], f[12]), pair(f[1], f[5]), pair(f[9], f[13]));
      *reinterpret_cast<uint4*>(to + 8 * h * kDim + 32 * g) = v;
    }
}

// Threads 0..127, after the barrier behind the cluster's stats: factor of this block's sums of heads head and head + 8.
template <int SPLIT>
__device__ __forceinline__ float final_factor(const Shared& s, int head, int rank) {
  const float sink = s.sink[head];
  float top = sink;
#pragma unroll
  for (int c = 0; c < SPLIT; c++) top = fmaxf(top, s.stats[c][0][head]);
  float mass = power2(sink - top);
#pragma unroll
  for (int c = 0; c < SPLIT; c++) mass = fmaf(s.stats[c][1][head], power2(s.stats[c][0][head] - top), mass);
  return power2(s.stats[rank][0][head] - top) * (kUnit / mass);
}

// Sums of a warpgroup -> out, and Q of the next row into shared memory; WG: which 256 columns.
template <int SPLIT, int WG>
__device__ __forceinline__ void finish(const Args& a, Shared& s, float (&d)[128], int row, int next) {
  const int thread = threadIdx.x % 128, head = 16 * (thread / 32) + thread % 32 / 4;
  const int rank = blockIdx.x % SPLIT;
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; h++) factor[h] = final_factor<SPLIT>(s, head + 8 * h, rank);
#pragma unroll
  for (int i = 0; i < 128; i++) d[i] *= factor[i >> 1 & 1];
  if constexpr (SPLIT == 1) {
    int query_head = threadIdx.x / 4;
    forget(query_head);  // as in `expand`
    Query left, right;  // on their way while the output is written
    fetch_query(left, a, min(next, a.count - 1), query_head, 0);
    store_output<0, 4>(a, d, row, 256 * WG);
    fetch_query(right, a, min(next, a.count - 1), query_head, 1);
    store_output<4, 4>(a, d, row, 256 * WG + 128);
    put_query(left, s, query_head, 0);
    put_query(right, s, query_head, 1);
  } else {
    constexpr int MINE = SPLIT / 2, REGS = 128 / MINE;  // slices of this warpgroup
    const uint32_t area = smem(s.k[0]);
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const int target = WG * MINE + i;
      if (target == rank) continue;
      const uint32_t to = peer(area, target) + (rank * (REGS / 4) * 128 + thread) * 16;
#pragma unroll
      for (int v = 0; v < REGS / 4; v++)
        store_remote16(to + v * 2048, d + REGS * i + 4 * v);
    }
    cluster_sync();
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      if (WG * MINE + i != rank) continue;
#pragma unroll
      for (int v = 0; v < REGS / 4; v++) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int c = 0; c < SPLIT; c++) {
          const float* f = d + REGS * i + 4 * v;
          float4 x = make_float4(f[0], f[1], f[2], f[3]);
          if (c != rank) x = *reinterpret_cast<const float4*>(s.k[0] + ((c * (REGS / 4) + v) * 128 + thread) * 16);
          sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        }
        d[REGS * i + 4 * v] = sum.x, d[REGS * i + 4 * v + 1] = sum.y;
        d[REGS * i + 4 * v + 2] = sum.z, d[REGS * i + 4 * v + 3] = sum.w;
      }
      store_output<0, REGS / 16>(a, d + REGS * i, row, (WG * MINE + i) * (kDim / SPLIT));
    }
  }
}

__device__ __forceinline__ void rescale(float (&d)[128], float a0, float a1) {
  if (__any_sync(kAll, a0 != 1.0f || a1 != 1.0f)) {
#pragma unroll
    for (int i = 0; i < 128; i++) d[i] *= i >> 1 & 1 ? a1 : a0;
  }
}

// Threads 0..127.
template <int SPLIT>
__device__ __forceinline__ void scores(const Args& a, Shared& s, const Plan<SPLIT>& plan) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = 16 * warp + lane / 4;
  const uint32_t q_desc = descriptor(smem(s.q), 16);
  const uint32_t p_to = smem(s.p[0]) + (16 * warp + lane % 16) * 128;  // stmatrix: rows of this lane
  int n = 0;
  load_query(a, s, plan.first_row);
  for (int row = plan.first_row; row < a.count; row += plan.step) {
    fence_proxy();
    named_barrier<1, 256>();  // Q is there
    float d[128], sc[32];
#pragma unroll
    for (int i = 0; i < 128; i++) d[i] = 0;
    float top[2] = {-INFINITY, -INFINITY}, mass[2] = {0, 0};
    uint32_t p[16];
    auto multiply = [&](int n) {  // Q K of the tile in its buffer, not waited for
      const uint32_t k_desc = descriptor(smem(s.k[n & 1]), 16);
      wait(&s.full[n & 1], n >> 1 & 1);
      mma_fence();
      mma_scores<false>(sc, q_desc, k_desc);
#pragma unroll
      for (int i = 1; i < 32; i++)
        mma_scores<true>(sc, q_desc + (i >> 2) * 512 + (i & 3) * 2, k_desc + (i >> 2) * 512 + (i & 3) * 2);
      mma_commit();
    };
    auto softmax = [&](int n) {  // scores -> P in registers and shared memory; sums rescaled
      const uint2 word = *reinterpret_cast<const uint2*>(s.valid[n & 1]);
      if ((word.x & word.y) != kAll) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
          const int key = 8 * (i >> 2) + 2 * (lane % 4) + (i & 1);
          const uint32_t bits = i < 16 ? word.x : word.y;
          if (!(bits >> (key & 31) & 1)) sc[i] = -INFINITY;
        }
      }
      float alpha[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float m = sc[2 * h];
#pragma unroll
        for (int j = 0; j < 8; j++) m = fmaxf(m, fmaxf(sc[4 * j + 2 * h], sc[4 * j + 2 * h + 1]));
        m = fmaxf(m, __shfl_xor_sync(kAll, m, 1));
        m = fmaxf(m, __shfl_xor_sync(kAll, m, 2));
        m = fmaxf(top[h], m * a.scale2);
        const float safe = m == -INFINITY ? 0.0f : m;
        alpha[h] = power2(top[h] - safe);
        top[h] = m;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const float x = power2(fmaf(sc[4 * j + 2 * h], a.scale2, -safe));
          const float y = power2(fmaf(sc[4 * j + 2 * h + 1], a.scale2, -safe));
          sum += x + y;
          p[2 * j + h] = pair(x, y);
        }
        mass[h] = fmaf(mass[h], alpha[h], sum);
        if (lane % 4 == 0) s.alpha[n & 1][head + 8 * h] = alpha[h];
      }
#pragma unroll
      for (int j = 0; j < 8; j += 2)  // 16 rows x 16 keys
        store_matrices(p_to + (n & 1) * 8192 + (((j + lane / 16) ^ (lane & 7)) << 4), p + 2 * j);
      fence_proxy();
      arrive(&s.ready[n & 1]);
      rescale(d, alpha[0], alpha[1]);
      const uint32_t v_desc = descriptor(smem(s.k[n & 1]), 8192);
      mma_fence();
#pragma unroll
      for (int i = 0; i < 4; i++) mma_values(d, p + 4 * i, v_desc + i * 128);
      mma_commit();
    };
    const int end = n + plan.end - plan.begin;
    multiply(n);
    mma_wait<0>();
    pin(sc);
    for (; n + 1 < end; n++) {
      softmax(n);
      multiply(n + 1);
      mma_wait<1>();
      arrive(&s.empty[n & 1]);
      mma_wait<0>();
      pin(d);
      pin(sc);
    }
    softmax(n);
    mma_wait<0>();
    pin(d);
    arrive(&s.empty[n & 1]);
    n++;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      mass[h] += __shfl_xor_sync(kAll, mass[h], 1);
      mass[h] += __shfl_xor_sync(kAll, mass[h], 2);
      if (lane % 4 == 0) {
        const uint32_t at = smem(&s.stats[blockIdx.x % SPLIT][0][head + 8 * h]);
#pragma unroll
        for (int c = 0; c < SPLIT; c++) {
          const uint32_t to = SPLIT == 1 ? at : peer(at, c);
          store_remote(to, top[h]);
          store_remote(to + kHeads * 4, mass[h]);
        }
      }
    }
    if (SPLIT == 1)
      named_barrier<1, 256>();  // stats are there, Q is read
    else
      cluster_sync();
    finish<SPLIT, 0>(a, s, d, row, row + plan.step);
    if (SPLIT > 1) break;
  }
}

// Threads 128..255.
template <int SPLIT>
__device__ __forceinline__ void values(const Args& a, Shared& s, const Plan<SPLIT>& plan) {
  const int lane = threadIdx.x % 32, head = 16 * (threadIdx.x / 32 % 4) + lane / 4;
  int n = 0;
  load_query(a, s, plan.first_row);
  for (int row = plan.first_row; row < a.count; row += plan.step) {
    fence_proxy();
    named_barrier<1, 256>();
    float d[128];
#pragma unroll
    for (int i = 0; i < 128; i++) d[i] = 0;
    for (const int end = n + plan.end - plan.begin; n < end; n++) {
      wait(&s.full[n & 1], n >> 1 & 1);
      wait(&s.ready[n & 1], n >> 1 & 1);
      rescale(d, s.alpha[n & 1][head], s.alpha[n & 1][head + 8]);
      const uint32_t p_desc = descriptor(smem(s.p[n & 1]), 16), v_desc = descriptor(smem(s.k[n & 1]) + 4 * 8192, 8192);
      mma_fence();
#pragma unroll
      for (int i = 0; i < 4; i++) mma_values(d, p_desc + 2 * i, v_desc + i * 128);
      mma_commit();
      mma_wait<0>();
      pin(d);
      arrive(&s.empty[n & 1]);
    }
    if (SPLIT == 1)
      named_barrier<1, 256>();
    else
      cluster_sync();
    finish<SPLIT, 1>(a, s, d, row, row + plan.step);
    if (SPLIT > 1) break;
  }
}

template <int SPLIT>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ Args a) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    if (smem(memory) & 1023) __trap();
    for (int i = 0; i < 2; i++) {
      init_barrier(&s.full[i], 4);
      init_barrier(&s.empty[i], 8);
      init_barrier(&s.ready[i], 4);
    }
    publish_barriers();
  }
  __syncthreads();
  if (SPLIT > 1) cluster_sync();  // nobody writes to a block that has not begun
  wait_for_inputs();
  launch_dependents();  // not before: the next kernel may rely on those before this one to be done
  const Plan<SPLIT> plan(a);
  if (threadIdx.x >= 256) {
    shrink_registers<88>();  // 88 + 2 x 208 = 3 x 168, what the block was given at launch: more would wait for ever
    expand<SPLIT>(a, s, plan);
    if (SPLIT > 1) {
      cluster_sync();
      cluster_sync();
    }
  } else {
    grow_registers<208>();
    if (threadIdx.x < 128)
      scores<SPLIT>(a, s, plan);
    else
      values<SPLIT>(a, s, plan);
  }
#endif
}

template <int SPLIT>
cudaError_t launch(const Args& a, int sms, cudaStream_t stream) {
  static bool ready[64] = {};
  int device = 0;
  cudaError_t code = cudaGetDevice(&device);
  if (code) return code;
  if (device >= 64 || !ready[device]) {
    code = cudaFuncSetAttribute(attention_kernel<SPLIT>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
    if (code) return code;
    if (device < 64) ready[device] = true;
  }
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = SPLIT, attributes[1].val.clusterDim.y = 1, attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(SPLIT == 1 ? (a.count < sms ? a.count : sms) : a.count * SPLIT);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = SPLIT == 1 ? 1 : 2;
  return cudaLaunchKernelEx(&config, attention_kernel<SPLIT>, a);
}

}  // namespace

// Attention of `count` query rows (see Args) on a stream of the current device, `split` blocks a row. A cudaError_t.
extern "C" __attribute__((visibility("default"))) int deepinfer_attention(
    const void* q, const uint8_t* fresh, const uint8_t* ring, const int32_t* slots, const int32_t* positions,
    const int32_t* rows, const int32_t* first, const int32_t* floor, const float* sink, const uint8_t* pool,
    const int32_t* selected, const int32_t* table, void* out, float scale2, int count, int ring_rows, int table_width,
    int entries, int window, int block, int page_shift, int split, int sms, void* stream) {
  if (count <= 0) return 0;
  const int tiles = (window + block + kTile - 1) / kTile + (entries + kTile - 1) / kTile;
  if (entries < 0 || entries > kLines || window <= 0 || window > ring_rows || block < 0 || split > tiles || count > (1 << 27))
    return cudaErrorInvalidValue;
  Args a{static_cast<const __nv_bfloat16*>(q), fresh, ring, slots, positions, rows, first, floor, sink, pool, selected,
         table, static_cast<__nv_bfloat16*>(out), scale2, count, ring_rows, table_width, entries, window, block,
         page_shift};
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  switch (split) {
    case 1: return launch<1>(a, sms, s);
    case 2: return launch<2>(a, sms, s);
    case 4: return launch<4>(a, sms, s);
    case 8: return launch<8>(a, sms, s);
    default: return cudaErrorInvalidValue;
  }
}
