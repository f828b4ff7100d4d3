// Sixteen-lane vectors, number formats and small functions; bits are the same on every instruction set.
//
// Belongs here: arithmetic that all families share. Does not belong here: memory, tensors (common.h), loops (gemm.h).
//
// A vector always has 16 lanes, made of one, two or four registers. Sums over lanes add lane i and i+8, then i+4, i+2,
// i+1. `fma` is fused everywhere (AVX2 builds require FMA) and the compiler may not fuse on its own
// (-ffp-contract=off); so AVX-512, AVX2 and other builds agree bit for bit, which a recorded result or a mixed cluster
// can rely on.
#pragma once

#include "common.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace DI_ISA {

#if defined(__AVX512F__)
constexpr int V = 16;  // floats of a register
#elif defined(__AVX2__)
constexpr int V = 8;
#else
constexpr int V = 4;
#endif
constexpr int kParts = 16 / V;

typedef float nf __attribute__((vector_size(4 * V)));
typedef int32_t ni __attribute__((vector_size(4 * V)));
typedef float f4 __attribute__((vector_size(16)));
typedef float f8 __attribute__((vector_size(32)));

struct vf {
  nf p[kParts];
};
struct vi {
  ni p[kParts];
};

// Runs a statement for each register i of a vector. Written out: GCC keeps arrays that a loop indexes in memory.
#define DI_PART(n, ...)  \
  {                      \
    constexpr int i = n; \
    __VA_ARGS__;         \
  }
#if defined(__AVX512F__)
#define DI_PARTS(...) DI_PART(0, __VA_ARGS__)
#elif defined(__AVX2__)
#define DI_PARTS(...) DI_PART(0, __VA_ARGS__) DI_PART(1, __VA_ARGS__)
#else
#define DI_PARTS(...) DI_PART(0, __VA_ARGS__) DI_PART(1, __VA_ARGS__) DI_PART(2, __VA_ARGS__) DI_PART(3, __VA_ARGS__)
#endif
#define DI_BINARY(R, T, op)              \
  DI_INLINE R operator op(T a, T b) {    \
    R r;                                 \
    DI_PARTS(r.p[i] = a.p[i] op b.p[i]); \
    return r;                            \
  }
DI_BINARY(vf, vf, +)
DI_BINARY(vf, vf, -)
DI_BINARY(vf, vf, *)
DI_BINARY(vf, vf, /)
DI_BINARY(vi, vf, <)
DI_BINARY(vi, vf, >)
DI_BINARY(vi, vf, >=)
DI_BINARY(vi, vf, ==) DI_BINARY(vi, vf, !=) DI_BINARY(vi, vi, +) DI_BINARY(vi, vi, -) DI_BINARY(vi, vi, &)
    DI_BINARY(vi, vi, |) DI_BINARY(vi, vi, >)
#undef DI_BINARY

        DI_INLINE vf splat(float x) {
  vf r;
  DI_PARTS(r.p[i] = x - nf{});
  return r;
}
DI_INLINE vi isplat(int32_t x) {
  vi r;
  DI_PARTS(r.p[i] = x - ni{});
  return r;
}
DI_INLINE vi shl(vi a, int n) {
  DI_PARTS(a.p[i] = a.p[i] << n);
  return a;
}
DI_INLINE vi sar(vi a, int n) {
  DI_PARTS(a.p[i] = a.p[i] >> n);
  return a;
}
DI_INLINE vi bits(vf a) {
  vi r;
  DI_PARTS(r.p[i] = (ni)a.p[i]);
  return r;
}
DI_INLINE vf as_float(vi a) {
  vf r;
  DI_PARTS(r.p[i] = (nf)a.p[i]);
  return r;
}
DI_INLINE vf to_float(vi a) {
  vf r;
  DI_PARTS(r.p[i] = __builtin_convertvector(a.p[i], nf));
  return r;
}
DI_INLINE vf select(vi m, vf a, vf b) {
  DI_PARTS(a.p[i] = m.p[i] ? a.p[i] : b.p[i]);
  return a;
}
DI_INLINE vi select(vi m, vi a, vi b) {
  DI_PARTS(a.p[i] = m.p[i] ? a.p[i] : b.p[i]);
  return a;
}
DI_INLINE vf max(vf a, vf b) { return select(a > b, a, b); }  // b where a is NaN
DI_INLINE vf min(vf a, vf b) { return select(a < b, a, b); }
DI_INLINE vf abs(vf a) { return as_float(bits(a) & isplat(0x7fffffff)); }

DI_INLINE nf fma1(nf a, nf b, nf c) {
#if defined(__AVX512F__)
  return (nf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (nf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (nf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  for (int l = 0; l < V; l++) c[l] = __builtin_fmaf(a[l], b[l], c[l]);
  return c;
#endif
}
DI_INLINE vf fma(vf a, vf b, vf c) {
  DI_PARTS(c.p[i] = fma1(a.p[i], b.p[i], c.p[i]));
  return c;
}

DI_INLINE nf sqrt1(nf a) {
#if defined(__AVX512F__)
  return (nf)_mm512_sqrt_ps((__m512)a);
#elif defined(__AVX2__)
  return (nf)_mm256_sqrt_ps((__m256)a);
#else
  for (int l = 0; l < V; l++) a[l] = __builtin_sqrtf(a[l]);
  return a;
#endif
}
DI_INLINE vf sqrt(vf a) {
  DI_PARTS(a.p[i] = sqrt1(a.p[i]));
  return a;
}

// Register by register: one memcpy of the whole struct would pin it to memory.
DI_INLINE vf load(const float* p) {
  vf r;
  DI_PARTS(__builtin_memcpy(&r.p[i], p + i * V, sizeof(nf)));
  return r;
}
DI_INLINE void store(float* p, vf a) { DI_PARTS(__builtin_memcpy(p + i * V, &a.p[i], sizeof(nf))); }
DI_INLINE vi load_int(const int32_t* p) {
  vi r;
  DI_PARTS(__builtin_memcpy(&r.p[i], p + i * V, sizeof(ni)));
  return r;
}
DI_INLINE void store_int(int32_t* p, vi a) { DI_PARTS(__builtin_memcpy(p + i * V, &a.p[i], sizeof(ni))); }
DI_INLINE vi iota() {
  static const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_int(lanes);
}
DI_INLINE float bits_to_float(uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
DI_INLINE uint32_t float_to_bits(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  return u;
}

// ---- sums over lanes ----

DI_INLINE f4 fold(vf a) {  // 16 -> 4 lanes
#if defined(__AVX512F__)
  f8 h = __builtin_shufflevector(a.p[0], a.p[0], 0, 1, 2, 3, 4, 5, 6, 7) +
         __builtin_shufflevector(a.p[0], a.p[0], 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
#elif defined(__AVX2__)
  f8 h = a.p[0] + a.p[1];
  return __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
#else
  return (a.p[0] + a.p[2]) + (a.p[1] + a.p[3]);
#endif
}
// Lane sums of four vectors at once: a third of the shuffles of four separate sums, the same bits.
DI_INLINE f4 sum4(vf a, vf b, vf c, vf d) {
  f4 p = fold(a), q = fold(b), r = fold(c), s = fold(d);
  f4 t = __builtin_shufflevector(p, q, 0, 1, 4, 5) + __builtin_shufflevector(p, q, 2, 3, 6, 7);
  f4 u = __builtin_shufflevector(r, s, 0, 1, 4, 5) + __builtin_shufflevector(r, s, 2, 3, 6, 7);
  return __builtin_shufflevector(t, u, 0, 2, 4, 6) + __builtin_shufflevector(t, u, 1, 3, 5, 7);
}
DI_INLINE float sum(vf a) {
  f4 t = fold(a);
  return (t[0] + t[2]) + (t[1] + t[3]);
}
DI_INLINE int32_t isum(vi a) {
  int32_t t[16], r = 0;
  store_int(t, a);
  for (int i = 0; i < 16; i++) r += t[i];
  return r;
}
DI_INLINE float max_lane(vf a) {
  auto larger = [](auto p, auto q) { return p > q ? p : q; };
#if defined(__AVX512F__)
  f8 h = larger(__builtin_shufflevector(a.p[0], a.p[0], 0, 1, 2, 3, 4, 5, 6, 7),
                __builtin_shufflevector(a.p[0], a.p[0], 8, 9, 10, 11, 12, 13, 14, 15));
  f4 t = larger(__builtin_shufflevector(h, h, 0, 1, 2, 3), __builtin_shufflevector(h, h, 4, 5, 6, 7));
#elif defined(__AVX2__)
  f8 h = larger(a.p[0], a.p[1]);
  f4 t = larger(__builtin_shufflevector(h, h, 0, 1, 2, 3), __builtin_shufflevector(h, h, 4, 5, 6, 7));
#else
  f4 t = larger(larger(a.p[0], a.p[1]), larger(a.p[2], a.p[3]));
#endif
  t = larger(t, __builtin_shufflevector(t, t, 2, 3, 0, 1));
  return larger(t[0], t[1]);
}

// ---- narrow loads and stores ----

// GCC 12 turns __builtin_convertvector between 1 and 4 bytes into scalar code (10 times slower), hence intrinsics.
DI_INLINE vi load_u8(const u8* p) {
#if defined(__AVX512F__)
  return {{(ni)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}};
#elif defined(__AVX2__)
  return {{(ni)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
           (ni)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))}};
#else
  vi r;
  DI_PARTS(for (int l = 0; l < V; l++) r.p[i][l] = p[i * V + l]);
  return r;
#endif
}
DI_INLINE vi load_i8(const void* p) {
#if defined(__AVX512F__)
  return {{(ni)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}};
#elif defined(__AVX2__)
  __m128i b = _mm_loadu_si128((const __m128i*)p);
  return {{(ni)_mm256_cvtepi8_epi32(b), (ni)_mm256_cvtepi8_epi32(_mm_srli_si128(b, 8))}};
#else
  vi r;
  DI_PARTS(for (int l = 0; l < V; l++) r.p[i][l] = static_cast<const int8_t*>(p)[i * V + l]);
  return r;
#endif
}
DI_INLINE vf load(const bf16* p) {
#if defined(__AVX512F__)
  return {{(nf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16)}};
#elif defined(__AVX2__)
  vf r;
  DI_PARTS(r.p[i] = (nf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p + i)), 16));
  return r;
#else
  vi r;
  DI_PARTS(for (int l = 0; l < V; l++) r.p[i][l] = int32_t(uint32_t(p[i * V + l]) << 16));
  return as_float(r);
#endif
}
DI_INLINE vi round_bf16_bits(vf a) {  // nearest even; NaN stays NaN; result in the upper half
  vi u = bits(a);
  vi r = u + isplat(0x7fff) + (sar(u, 16) & isplat(1));
  return select(a != a, isplat(0x7fc00000), r & isplat(int32_t(0xffff0000)));
}
DI_INLINE vf round_bf16(vf a) { return as_float(round_bf16_bits(a)); }
DI_INLINE void store(bf16* p, vf a) {
  vi r = sar(round_bf16_bits(a), 16);
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)r.p[0]));
#elif defined(__AVX2__)
  __m256i h = _mm256_packs_epi32((__m256i)r.p[0], (__m256i)r.p[1]);
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(h, 0xd8));
#else
  DI_PARTS(for (int l = 0; l < V; l++) p[i * V + l] = bf16(r.p[i][l]));
#endif
}
DI_INLINE void store_u8(u8* p, vi a) {  // 0..255
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)a.p[0]));
#elif defined(__AVX2__)
  __m256i h = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)a.p[0], (__m256i)a.p[1]), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1)));
#else
  DI_PARTS(for (int l = 0; l < V; l++) p[i * V + l] = u8(a.p[i][l]));
#endif
}
// ---- rows of any length ----

// f(j, width) for j = 0, 16, ... below n; `width` is Whole (known at compile time), or the lanes left at the end.
using Whole = std::integral_constant<int, 16>;
template <class F>
DI_INLINE void columns(i64 n, F&& f) {
  i64 j = 0;
  for (; j + 16 <= n; j += 16) f(j, Whole());
  if (j < n) f(j, n - j);
}
template <class T>
DI_INLINE vf load_n(const T* p, Whole) {
  return load(p);
}
template <class T>
DI_INLINE vf load_n(const T* p, i64 n) {
  if (n >= 16) return load(p);
  T tmp[16] = {};
  __builtin_memcpy(tmp, p, size_t(n) * sizeof(T));
  return load(tmp);
}
template <class T>
DI_INLINE void store_n(T* p, vf a, Whole) {
  store(p, a);
}
template <class T>
DI_INLINE void store_n(T* p, vf a, i64 n) {
  if (n >= 16) return store(p, a);
  T tmp[16];
  store(tmp, a);
  __builtin_memcpy(p, tmp, size_t(n) * sizeof(T));
}

// ---- formats (spec/model.md section 4) ----

DI_INLINE float e8m0(u8 c) { return bits_to_float(c ? uint32_t(c) << 23 : 1u << 22); }
// 1 / e8m0(c) for c = 1..254.
DI_INLINE float e8m0_inverse(u8 c) { return bits_to_float(c < 254 ? uint32_t(254 - c) << 23 : 1u << 22); }
DI_INLINE u8 e8m0_ceil(float x) {
  uint32_t u = float_to_bits(x);
  return u8((u >> 23) + ((u & 0x7fffff) != 0));
}

// 16 e4m3 codes times 2^-8: a float16 with the same bits has a bias of 15 instead of 7. The caller's scale absorbs it.
DI_INLINE vf e4m3_256th(const u8* p) {
#if defined(__AVX512F__)
  __m256i h = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  return {{(nf)_mm512_cvtph_ps(_mm256_and_si256(h, _mm256_set1_epi16(int16_t(0xbfff))))}};
#elif defined(__AVX2__)
  __m256i h = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  h = _mm256_and_si256(h, _mm256_set1_epi16(int16_t(0xbfff)));
  return {{(nf)_mm256_cvtph_ps(_mm256_castsi256_si128(h)), (nf)_mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))}};
#else
  vi c = load_u8(p);
  vf f = as_float(shl(c & isplat(0x7f), 20) | shl(c & isplat(0x80), 24));
  return f * splat(0x1p112f);
#endif
}
// 16 e4m3 codes times `scale`, NaN codes included (activations and records; stored weights have none).
DI_INLINE vf e4m3(const u8* p, float scale) {
  vi nan = (load_u8(p) & isplat(0x7f)) > isplat(0x7e);
  return select(nan, splat(__builtin_nanf("")), e4m3_256th(p) * splat(scale * 256.0f));
}
DI_INLINE float e4m3_value(u8 c) {  // one code, as a scale
  float m = c & 0x78 ? bits_to_float((uint32_t(c & 0x7f) << 20) + (120u << 23)) : float(c & 7) * 0x1p-9f;
  return (c & 0x7f) == 0x7f ? __builtin_nanf("") : c & 0x80 ? -m : m;
}
// Nearest-even e4m3 codes of |x| <= 448.
DI_INLINE vi e4m3_code(vf x) {
  vi u = bits(abs(x));
  vi normal = sar(u + isplat(0x7ffff) + (sar(u, 20) & isplat(1)), 20) - isplat(120 << 3);
  vi small = bits(abs(x) + splat(16384.0f)) - bits(splat(16384.0f));  // one ulp of 2^14 is 2^-9, the subnormal step
  vi code = select(abs(x) < splat(0x1p-6f), small, normal);
  code = select(x != x, isplat(0x7f), code);
  return code | (sar(bits(x), 24) & isplat(0x80));
}
DI_INLINE vf clamp448(vf x) {
  return select(x > splat(448.0f), splat(448.0f), select(x < splat(-448.0f), splat(-448.0f), x));
}

// 32 packed e2m1 codes times `scale`: the 16 even columns, then the 16 odd ones (nobody needs them interleaved).
DI_INLINE void e2m1(const u8* p, float scale, vf& even, vf& odd) {
  vi c = load_u8(p);
#if defined(__AVX512F__)
  const __m512 values =
      _mm512_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f);
  __m512 table = _mm512_mul_ps(values, _mm512_set1_ps(scale));
  even.p[0] = (nf)_mm512_permutexvar_ps((__m512i)c.p[0], table);
  odd.p[0] = (nf)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)c.p[0], 4), table);
#elif defined(__AVX2__)
  __m256 table = _mm256_mul_ps(_mm256_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f), _mm256_set1_ps(scale));
  auto value = [&](ni n) { return (nf)((ni)_mm256_permutevar8x32_ps(table, (__m256i)n) ^ (n & 8) << 28); };
  DI_PARTS(even.p[i] = value(c.p[i]); odd.p[i] = value(c.p[i] >> 4));
#else
  vf s = splat(scale), up = splat(0x1p126f);
  even = as_float(shl(c & isplat(7), 22) | shl(c & isplat(8), 28)) * up * s;
  odd = as_float(shl(c & isplat(0x70), 18) | shl(c & isplat(0x80), 24)) * up * s;
#endif
}
// Even and odd columns of a block -> the columns in order.
DI_INLINE void interleave(vf even, vf odd, vf& lo, vf& hi) {
#if defined(__AVX512F__)
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  __m512 e = (__m512)even.p[0], o = (__m512)odd.p[0];
  lo.p[0] = (nf)_mm512_permutex2var_ps(e, first, o);
  hi.p[0] = (nf)_mm512_permutex2var_ps(e, _mm512_add_epi32(first, _mm512_set1_epi32(8)), o);
#else
  float e[16], o[16], t[32];
  store(e, even);
  store(o, odd);
  for (int i = 0; i < 16; i++) t[2 * i] = e[i], t[2 * i + 1] = o[i];
  lo = load(t), hi = load(t + 16);
#endif
}
// Nearest-even saturating e2m1 codes.
DI_INLINE vi e2m1_code(vf x) {
  vf a = abs(x);
  vi below = (a > splat(0.25f)) + (a >= splat(0.75f)) + (a > splat(1.25f)) + (a >= splat(1.75f));
  below = below + (a > splat(2.5f)) + (a >= splat(3.5f)) + (a > splat(5.0f));  // each true is -1
  return (isplat(0) - below) | (sar(bits(x), 28) & isplat(8));
}

// ---- functions ----

// e^x, relative error below 2e-7; 0 below -87.3.
DI_INLINE vf exp(vf x) {
  vf y = min(x, splat(88.3f));
  y = select(x != x, x, y);
  const vf magic = splat(12582912.0f);
  vf t = fma(y, splat(1.44269504f), magic);
  vi n = bits(t) - bits(magic);
  vf k = t - magic;
  vf r = fma(k, splat(-0.693145752f), y);
  r = fma(k, splat(-1.42860677e-6f), r);
  vf p = fma(splat(1.38888889e-3f), r, splat(8.33333333e-3f));
  p = fma(p, r, splat(4.16666667e-2f));
  p = fma(p, r, splat(1.66666667e-1f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  p = p * as_float(shl(n + isplat(127), 23));
  return select(x < splat(-87.3f), splat(0.0f), p);
}
DI_INLINE vf sigmoid(vf x) { return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - x)); }
DI_INLINE float exp(float x) { return exp(splat(x)).p[0][0]; }

// log x for normal x >= 1, relative error below 2e-7 (absolute near 1).
DI_INLINE vf log(vf x) {
  vi u = bits(x) - isplat(0x3f3504f3);  // mantissa into [sqrt(1/2), sqrt(2))
  vf e = to_float(sar(u, 23));
  vf m = as_float((u & isplat(0x7fffff)) + isplat(0x3f3504f3));
  vf f = m - splat(1.0f), s = f / (splat(2.0f) + f), z = s * s;
  vf p = fma(splat(0.24279079f), z, splat(0.28498787f));
  p = fma(p, z, splat(0.40000972f));
  p = fma(p, z, splat(0.66666663f));
  vf h = splat(0.5f) * f * f;
  return fma(e, splat(0.693147181f), s * fma(p, z, h) - h + f);
}
// log(1 + e^x) as torch computes it: x above 20.
DI_INLINE vf softplus(vf x) {
  vf t = exp(x), u = splat(1.0f) + t;
  vf y = log(u) + (t - (u - splat(1.0f))) / u;
  return select(x > splat(20.0f), x, y);
}

// silu(min(g, limit)) * clamp(u, -limit, limit)
DI_INLINE vf silu_mul(vf g, vf u, float limit) {
  vf l = splat(limit), m = splat(-limit);
  g = select(g > l, l, g);
  u = select(u > l, l, select(u < m, m, u));
  return g * sigmoid(g) * u;
}

}  // namespace DI_ISA
