// x @ w.T for weights stored row by row in any format: every linear, expert, router and score goes through here.
//
// Belongs here: row readers of the weight formats, the micro-kernel, tiling. Does not belong here: ops.
//
// Lane l of an accumulator sums columns l, l+16, l+32, ... in ascending order with fused multiply-adds; then the lanes
// are summed by the fixed tree of simd.h. Tile sizes, row counts, cache blocks and threads decide only which sums run
// side by side, never their order: a row's bits depend on nothing but the row. K is padded with zeros to blocks of 32.
// With up to kDirectRows rows codes are expanded in registers; with more, a tile of 16 weight rows is expanded once.
#pragma once

#include "simd.h"

namespace DI_ISA {

constexpr i64 kBlock = 32;  // columns a step of the micro-kernel takes: one E8M0 scale
constexpr i64 kTileN = 16;
constexpr i64 kTileBlocks = 16;  // 16 x 512 floats: 32 KB
constexpr i64 kTileM = 128;      // rows of x per task
constexpr i64 kDirectRows = 4;

#if defined(__AVX512F__)
constexpr int kRM = 4, kRN = 4, kRN1 = 8;  // accumulators: 32 registers of 16 lanes
#else
constexpr int kRM = 2, kRN = 2, kRN1 = 4;  // 16 registers of 8 lanes (or 32 of 4)
#endif

inline i64 round_up(i64 n, i64 m) { return (n + m - 1) / m * m; }

// ---- weight rows: `row(n)` gives a reader, `load(b, lo, hi)` the columns of block b ----

struct F32Rows {
  static constexpr bool kExpanded = true;
  const float* w;
  i64 ld;
  struct Row {
    const float* p;
    DI_INLINE void load(i64 b, vf& lo, vf& hi) const {
      lo = DI_ISA::load(p + b * kBlock);
      hi = DI_ISA::load(p + b * kBlock + 16);
    }
  };
  Row row(i64 n) const { return {w + n * ld}; }
};

// Plain rows of any K: the last block may be cut.
template <class T>
struct PlainRows {
  static constexpr bool kExpanded = false;
  const T* w;
  i64 ld, k;
  struct Row {
    const T* p;
    i64 whole, rest;
    DI_INLINE void load(i64 b, vf& lo, vf& hi) const {
      if (__builtin_expect(b < whole, 1)) {
        lo = DI_ISA::load(p + b * kBlock);
        hi = DI_ISA::load(p + b * kBlock + 16);
      } else {
        T tmp[32] = {};
        __builtin_memcpy(tmp, p + b * kBlock, rest * sizeof(T));
        lo = DI_ISA::load(tmp);
        hi = DI_ISA::load(tmp + 16);
      }
    }
  };
  Row row(i64 n) const { return {w + n * ld, k / kBlock, k % kBlock}; }
};

struct Fp8Rows {  // e4m3, one E8M0 scale per 32x32
  static constexpr bool kExpanded = false;
  const u8 *w, *s;
  i64 ld, lds, first;  // row 0 is row `first` of the matrix (which need not start a block)
  struct Row {
    const u8 *p, *s;
    DI_INLINE void load(i64 b, vf& lo, vf& hi) const {
      vf scale = splat(e8m0(s[b]) * 256.0f);
      lo = e4m3_256th(p + b * kBlock) * scale;
      hi = e4m3_256th(p + b * kBlock + 16) * scale;
    }
  };
  Row row(i64 n) const { return {w + (first + n) * ld, s + (first + n) / 32 * lds}; }
};

// Packed e2m1, one E8M0 scale per row and 32 columns. A block of x holds its even columns, then the odd ones: `split`.
struct Fp4Rows {
  static constexpr bool kExpanded = false;
  const u8 *w, *s;
  i64 ld, lds;
  struct Row {
    const u8 *p, *s;
    DI_INLINE void load(i64 b, vf& lo, vf& hi) const { e2m1(p + b * 16, e8m0(s[b]), lo, hi); }
  };
  Row row(i64 n) const { return {w + n * ld, s + n * lds}; }
};

// Columns of a block in the order of Fp4Rows.
DI_INLINE void split(const float* in, float* out) {
  for (int i = 0; i < 16; i++) out[i] = in[2 * i], out[16 + i] = in[2 * i + 1];
}

// ---- micro-kernel ----

// c[i*16 + j] = dot(x row i, weight row j) over blocks [b0, b1); unless `first` and `last`, sums travel through `part`.
template <int RM, int RN, class Row>
DI_INLINE void micro(const float* x, i64 ldx, const Row* r, i64 b0, i64 b1, bool first, bool last, vf* part, float* c) {
  vf acc[RM][RN];
  for (int i = 0; i < RM; i++)
    for (int j = 0; j < RN; j++) acc[i][j] = first ? splat(0.0f) : part[i * RN + j];
  for (i64 b = b0; b < b1; b++) {
    const float* xb = x + b * kBlock;
#pragma GCC unroll 8
    for (int j = 0; j < RN; j++) {
      vf lo, hi;
      r[j].load(b, lo, hi);
#pragma GCC unroll 4
      for (int i = 0; i < RM; i++) acc[i][j] = fma(load(xb + i * ldx), lo, acc[i][j]);
#pragma GCC unroll 4
      for (int i = 0; i < RM; i++) acc[i][j] = fma(load(xb + i * ldx + 16), hi, acc[i][j]);
    }
  }
  if (!last) {
    for (int i = 0; i < RM; i++)
      for (int j = 0; j < RN; j++) part[i * RN + j] = acc[i][j];
    return;
  }
  constexpr int kAll = RM * RN;
  static_assert(kAll % 4 == 0);
#pragma GCC unroll 4
  for (int q = 0; q < kAll; q += 4) {
    f4 s = sum4(acc[q / RN][q % RN], acc[(q + 1) / RN][(q + 1) % RN], acc[(q + 2) / RN][(q + 2) % RN],
                acc[(q + 3) / RN][(q + 3) % RN]);
    if constexpr (RN % 4 == 0) {
      __builtin_memcpy(c + (q / RN) * kTileN + q % RN, &s, 16);
    } else {
      for (int t = 0; t < 4; t++) c[((q + t) / RN) * kTileN + (q + t) % RN] = s[t];
    }
  }
}

template <int RM, int RN, class Row>
inline void direct(const float* x, i64 ldx, i64 m, const Row* r, i64 n, i64 blocks, float* c) {
  for (i64 i = 0; i < m; i += RM)
    for (int j = 0; j < n; j += RN)
      micro<RM, RN>(x + i * ldx, ldx, r + j, 0, blocks, true, true, nullptr, c + i * kTileN + j);
}

// Columns n0..n0+15 of the product for m <= kTileM rows: c [m rounded up to kRM][16]. Rows of x up to that bound must
// be readable. Columns at or beyond `n` hold anything.
template <class W>
inline void gemm_tile(const float* x, i64 ldx, i64 m, const W& w, i64 n, i64 n0, i64 blocks, float* c) {
  typename W::Row rows[kTileN];
  i64 width = std::min(kTileN, n - n0);
  for (i64 j = 0; j < kTileN; j++) rows[j] = w.row(std::min(n0 + j, n - 1));
  if (m == 1) return direct<1, kRN1>(x, ldx, m, rows, width, blocks, c);
  if (W::kExpanded || m <= kDirectRows) {
    if (blocks <= kTileBlocks || m <= kRM) return direct<kRM, kRN>(x, ldx, m, rows, width, blocks, c);
  }
  float* tile = scratch<float>(kTile, kTileN * kTileBlocks * kBlock);
  vf* part = scratch<vf>(kPart, (kTileM + kRM) * kTileN);
  for (i64 b0 = 0; b0 < blocks; b0 += kTileBlocks) {
    i64 b1 = std::min(b0 + kTileBlocks, blocks);
    F32Rows::Row r[kTileN];
    for (i64 j = 0; j < round_up(width, kRN); j++) {
      if constexpr (W::kExpanded) {
        r[j] = rows[j];
      } else {
        float* t = tile + j * kTileBlocks * kBlock;
        for (i64 b = b0; b < b1; b++) {
          vf lo, hi;
          rows[j].load(b, lo, hi);
          store(t + (b - b0) * kBlock, lo);
          store(t + (b - b0) * kBlock + 16, hi);
        }
        r[j] = {t - b0 * kBlock};
      }
    }
    for (i64 i = 0; i < m; i += kRM)
      for (int j = 0; j < width; j += kRN)
        micro<kRM, kRN>(x + i * ldx, ldx, r + j, b0, b1, b0 == 0, b1 == blocks, part + i * kTileN + j * kRM,
                        c + i * kTileN + j);
  }
}

inline double gemm_ns(i64 m, i64 n, i64 k) { return double(n) * double(k) * (0.04 + 0.0125 * double(m)); }

// out(i, n0, v): row i of the product, columns n0..n0+15 (those below n count). x [m rounded up to kRM, ldx].
template <class W, class Out>
inline void gemm(const float* x, i64 ldx, i64 m, const W& w, i64 n, i64 blocks, Out&& out) {
  i64 tiles = (n + kTileN - 1) / kTileN, chunks = (m + kTileM - 1) / kTileM;
  parallel(tiles * chunks, gemm_ns(std::min(m, kTileM), kTileN, blocks * kBlock), [&](i64 begin, i64 end) {
    alignas(64) float c[(kTileM + kRM) * kTileN];
    for (i64 t = begin; t < end; t++) {
      i64 m0 = t / tiles * kTileM, n0 = t % tiles * kTileN, rows = std::min(kTileM, m - m0);
      gemm_tile(x + m0 * ldx, ldx, rows, w, n, n0, blocks, c);
      for (i64 i = 0; i < rows; i++) out(m0 + i, n0, load(c + i * kTileN));
    }
  });
}

// ---- activations as floats ----

struct Rows {
  float* p;
  i64 ld;
};

// Scratch for m rows of k floats, padded with zero columns to blocks and zero rows to kRM.
inline Rows float_rows(Slot slot, i64 m, i64 k) {
  i64 ld = round_up(k, kBlock), mp = round_up(m, kRM);
  float* p = scratch<float>(slot, mp * ld);
  std::memset(p + m * ld, 0, size_t((mp - m) * ld) * sizeof(float));
  if (ld != k)
    for (i64 i = 0; i < m; i++) std::memset(p + i * ld + k, 0, size_t(ld - k) * sizeof(float));
  return {p, ld};
}

template <class T>
DI_INLINE void widen(const T* in, i64 k, float* out) {
  columns(k, [&](i64 j, auto n) { store_n(out + j, load_n(in + j, n), n); });
}

// bf16 or float32 rows -> floats.
inline Rows widen_rows(Slot slot, Tensor& x, i64 m, i64 k) {
  i64 stride = x.row_stride();
  Rows r = float_rows(slot, m, k);
  parallel(m, 0.05 * double(k), [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; i++) {
      if (x.is(Type::bf16)) widen(x.data<bf16>() + i * stride, k, r.p + i * r.ld);
      else widen(x.data<float>() + i * stride, k, r.p + i * r.ld);
    }
  });
  return r;
}

// e4m3 codes with a scale per 32 -> floats.
DI_INLINE void expand_fp8(const u8* codes, const u8* scales, i64 k, float* out) {
  for (i64 b = 0; b < k / kBlock; b++) {
    float s = e8m0(scales[b]);
    store(out + b * kBlock, e4m3(codes + b * kBlock, s));
    store(out + b * kBlock + 16, e4m3(codes + b * kBlock + 16, s));
  }
}

// 32 floats -> e4m3 codes and their scale (formats.quant_fp8).
DI_INLINE u8 quant_block_fp8(vf a, vf b, vi& ca, vi& cb) {
  float amax = max_lane(max(abs(a), abs(b)));
  u8 s = e8m0_ceil((amax > 1e-4f ? amax : 1e-4f) / 448.0f);
  vf inv = splat(e8m0_inverse(s));
  ca = e4m3_code(clamp448(a * inv));
  cb = e4m3_code(clamp448(b * inv));
  return s;
}

}  // namespace DI_ISA
