// Norms, RoPE, hyper-connections, Engram gate: small ops on rows (deepinfer/ops/hyper.py, engram.py).
//
// Where the reference is a chain of separate multiplies and adds, so is this (no fma): the bits agree.
#include "gemm.h"

namespace DI_ISA {
namespace {

template <class T>
float sum_squares(const T* x, i64 n) {
  vf s = splat(0.0f);
  columns(n, [&](i64 j, auto w) {
    vf v = load_n(x + j, w);
    s = fma(v, v, s);
  });
  return sum(s);
}

float inverse_rms(float squares, i64 n, float eps) { return 1.0f / __builtin_sqrtf(squares / float(n) + eps); }

// Calls f with a pointer of the tensor's element type.
template <class F>
void typed(const Tensor& t, F&& f) {
  if (t.is(Type::bf16)) f(t.data<bf16>());
  else f(t.data<float>());
}

Tensor rms_norm(Tensor& x, Tensor& weight, double eps) {
  check(is_float(x) && is_float(weight) && x.dim() >= 1 && weight.numel() == x.size(-1),
        "rms_norm: x [..., H] and weight [H] must be bf16 or float32");
  i64 h = x.size(-1), m = x.rows(), stride = x.row_stride();
  weight.contiguous();
  Tensor y = Tensor::like(x);
  typed(x, [&](auto* in) {
    typed(weight, [&](auto* w) {
      auto* out = y.data<std::remove_pointer_t<decltype(in)>>();
      parallel(m, 0.2 * double(h), [&](i64 begin, i64 end) {
        for (i64 i = begin; i < end; i++) {
          auto* row = in + i * stride;
          vf r = splat(inverse_rms(sum_squares(row, h), h, float(eps)));
          columns(h, [&](i64 j, auto n) { store_n(out + i * h + j, load_n(row + j, n) * r * load_n(w + j, n), n); });
        }
      });
    });
  });
  return y;
}

DI_INLINE float as_float(bf16 v) { return bits_to_float(uint32_t(v) << 16); }
DI_INLINE float as_float(float v) { return v; }
DI_INLINE void put(bf16* p, float v) {
  uint32_t u = float_to_bits(v);
  *p = v != v ? 0x7fc0 : bf16((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
DI_INLINE void put(float* p, float v) { *p = v; }

Tensor rope(Tensor& x, Tensor& cos, Tensor& sin, bool inverse) {
  check(is_float(x) && (x.dim() == 2 || x.dim() == 3), "rope: x must be bf16 or float32 [T, D] or [T, h, D]");
  i64 t = x.size(0), heads = x.dim() == 3 ? x.size(1) : 1, d = x.size(-1);
  check(cos.is(Type::f32) && sin.is(Type::f32) && cos.dim() == 2 && sin.dim() == 2 && cos.size(0) == t &&
            sin.size(0) == t && cos.size(1) == sin.size(1) && 2 * cos.size(1) <= d,
        "rope: cos and sin must be float32 [T, R] with 2R <= D");
  i64 r = cos.size(1), keep = d - 2 * r, stride = x.row_stride();
  const float *c = cos.contiguous().data<float>(), *s = sin.contiguous().data<float>();
  float sign = inverse ? -1.0f : 1.0f;
  Tensor y = Tensor::like(x);
  typed(x, [&](auto* in) {
    auto* out = y.data<std::remove_pointer_t<decltype(in)>>();
    parallel(t * heads, 0.05 * double(keep) + 0.5 * double(r), [&](i64 begin, i64 end) {
      for (i64 i = begin; i < end; i++) {
        auto *a = in + i * stride, *b = out + i * d;
        const float *ci = c + i / heads * r, *si = s + i / heads * r;
        std::memcpy(b, a, size_t(keep) * sizeof(*a));
        for (i64 j = 0; j < r; j++) {
          float u = as_float(a[keep + 2 * j]), v = as_float(a[keep + 2 * j + 1]), sn = sign * si[j];
          put(b + keep + 2 * j, u * ci[j] - v * sn);
          put(b + keep + 2 * j + 1, u * sn + v * ci[j]);
        }
      }
    });
  });
  return y;
}

// ---- chains (deepinfer/ops/fused.py): each stage is the op above, a row at a time, so the bits are the chain's ----

void norm_row(const bf16* in, const bf16* w, i64 h, float eps, bf16* out) {
  vf r = splat(inverse_rms(sum_squares(in, h), h, eps));
  columns(h, [&](i64 j, auto n) { store_n(out + j, load_n(in + j, n) * r * load_n(w + j, n), n); });
}

void quant_row(const bf16* in, i64 k, u8* codes, u8* scales) {
  for (i64 b = 0; b < k / kBlock; b++) {
    vi lo, hi;
    scales[b] = quant_block_fp8(load(in + b * kBlock), load(in + b * kBlock + 16), lo, hi);
    store_u8(codes + b * kBlock, lo);
    store_u8(codes + b * kBlock + 16, hi);
  }
}

constexpr i64 kRow = 1 << 14;  // widest row of a chain

std::tuple<Tensor, Tensor> rms_norm_quant(Tensor& x, Tensor& weight, double eps) {
  i64 h = x.size(-1), m = x.rows(), stride = x.row_stride();
  check(x.is(Type::bf16) && x.dim() == 2 && weight.is(Type::bf16) && weight.numel() == h && h % kBlock == 0 && h <= kRow,
        "rms_norm_quant: x [T, H] and weight [H] must be bf16, H % 32 == 0, H <= 16384");
  const bf16* w = weight.contiguous().data<bf16>();
  Tensor q = Tensor::empty({m, h}, Type::e4m3), s = Tensor::empty({m, h / kBlock}, Type::u8);
  parallel(m, 0.6 * double(h), [&](i64 begin, i64 end) {
    alignas(64) bf16 row[kRow];
    for (i64 i = begin; i < end; i++) {
      norm_row(x.data<bf16>() + i * stride, w, h, float(eps), row);
      quant_row(row, h, q.data<u8>() + i * h, s.data<u8>() + i * (h / kBlock));
    }
  });
  return {std::move(q), std::move(s)};
}

Tensor norm_rope_pack_window(Tensor& kv, Tensor& weight, Tensor& cos, Tensor& sin, double eps) {
  i64 d = kv.size(-1), m = kv.rows(), stride = kv.row_stride();
  check(kv.is(Type::bf16) && kv.dim() == 2 && weight.is(Type::bf16) && weight.numel() == d && d % kBlock == 0 &&
            d <= kRow && cos.is(Type::f32) && sin.is(Type::f32) && cos.dim() == 2 && cos.size(0) == m &&
            sin.size(0) == m && cos.size(1) == sin.size(1) && 2 * cos.size(1) <= d,
        "norm_rope_pack_window: kv [T, D] and weight [D] must be bf16, cos and sin float32 [T, R], 2R <= D <= 16384");
  const bf16* w = weight.contiguous().data<bf16>();
  const float *c = cos.contiguous().data<float>(), *s = sin.contiguous().data<float>();
  i64 r = cos.size(1), keep = d - 2 * r, used = d + d / kBlock, bytes = round_up(used, 16);
  Tensor rec = Tensor::empty({m, bytes}, Type::u8);
  parallel(m, 0.8 * double(d), [&](i64 begin, i64 end) {
    alignas(64) bf16 row[kRow];
    for (i64 i = begin; i < end; i++) {
      norm_row(kv.data<bf16>() + i * stride, w, d, float(eps), row);
      for (i64 j = 0; j < r; j++) {
        float u = as_float(row[keep + 2 * j]), v = as_float(row[keep + 2 * j + 1]), cj = c[i * r + j], sj = s[i * r + j];
        put(row + keep + 2 * j, u * cj - v * sj);
        put(row + keep + 2 * j + 1, u * sj + v * cj);
      }
      u8* out = rec.data<u8>() + i * bytes;
      quant_row(row, d, out, out + d);
      std::memset(out + used, 0, size_t(bytes - used));
    }
  });
  return rec;
}

// Streams: 4 in every released model, so loops over them are compiled for 4 and, once more, for any number up to 8.
constexpr int kMaxStreams = 8;

template <class F>
void with_streams(i64 c, const char* message, F&& f) {
  check(0 < c && c <= kMaxStreams, message);
  if (c == 4) f(std::integral_constant<int, 4>());
  else f(int(c));
}

// Sinkhorn for 16 rows at once: lanes = rows, one vector per matrix element m[i][j].
template <class N>
DI_INLINE void sinkhorn(vf (&m)[kMaxStreams][kMaxStreams], N c, i64 iters, float eps) {
  vf e = splat(eps);
  for (int i = 0; i < c; i++) {  // softmax of each row
    vf top = m[i][0], total = splat(0.0f);
    for (int j = 1; j < c; j++) top = max(m[i][j], top);
    for (int j = 0; j < c; j++) m[i][j] = exp(m[i][j] - top), total = total + m[i][j];
    for (int j = 0; j < c; j++) m[i][j] = m[i][j] / total + e;
  }
  for (i64 k = 0; k == 0 || k < iters; k++) {
    for (int i = 0; k && i < c; i++) {  // the first round has the softmax for its rows
      vf total = m[i][0];
      for (int j = 1; j < c; j++) total = total + m[i][j];
      vf f = splat(1.0f) / (total + e);
      for (int j = 0; j < c; j++) m[i][j] = m[i][j] * f;
    }
    for (int j = 0; j < c; j++) {
      vf total = m[0][j];
      for (int i = 1; i < c; i++) total = total + m[i][j];
      vf f = splat(1.0f) / (total + e);
      for (int i = 0; i < c; i++) m[i][j] = m[i][j] * f;
    }
  }
}

// Rows i0..i0+15 (below m) of pre, post and comb from the projections mix [c*(c+2)][ld] and the inverse norms.
template <class N>
DI_INLINE void mix_rows(N c, const float* mix, i64 ld, i64 i0, i64 m, vf rms, const float* base, const float* scale,
                        i64 iters, float eps, float* pre, float* post, float* comb) {
  alignas(64) float t[kMaxStreams * (kMaxStreams + 2)][16];
  i64 rows = std::min<i64>(16, m - i0);
  auto value = [&](int n, int kind) { return load(mix + n * ld + i0) * rms * splat(scale[kind]) + splat(base[n]); };
  for (int j = 0; j < c; j++) store(t[j], sigmoid(value(j, 0)) + splat(eps));
  for (int j = 0; j < c; j++) store(t[c + j], splat(2.0f) * sigmoid(value(c + j, 1)));
  vf mat[kMaxStreams][kMaxStreams];
  for (int a = 0; a < c; a++)
    for (int j = 0; j < c; j++) mat[a][j] = value(2 * c + a * c + j, 2);
  sinkhorn(mat, c, iters, eps);
  for (int a = 0; a < c; a++)
    for (int j = 0; j < c; j++) store(t[2 * c + a * c + j], mat[a][j]);
  for (i64 i = 0; i < rows; i++) {
    for (int j = 0; j < c; j++) pre[(i0 + i) * c + j] = t[j][i], post[(i0 + i) * c + j] = t[c + j][i];
    for (int j = 0; j < c * c; j++) comb[(i0 + i) * c * c + j] = t[2 * c + j][i];
  }
}

std::tuple<Tensor, Tensor, Tensor> hc_mix(Tensor& streams, Tensor& fn, Tensor& base, Tensor& scale, i64 iters,
                                          double hc_eps, double eps) {
  check(is_float(streams) && streams.dim() == 3, "hc_mix: streams must be bf16 or float32 [T, C, H]");
  i64 m = streams.size(0), c = streams.size(1), k = c * streams.size(2), n = c * (c + 2), mp = round_up(m, 16);
  check(fn.is(Type::f32) && fn.dim() == 2 && fn.size(0) == n && fn.size(1) == k && base.is(Type::f32) &&
            base.numel() == n && scale.is(Type::f32) && scale.numel() == 3,
        "hc_mix: fn must be float32 [C*(C+2), C*H], base [C*(C+2)], scale [3]");
  const float *b = base.contiguous().data<float>(), *s = scale.contiguous().data<float>(),
              *f = fn.contiguous().data<float>();
  streams.contiguous();
  Tensor pre = Tensor::empty({m, c}, Type::f32), post = Tensor::empty({m, c}, Type::f32),
         comb = Tensor::empty({m, c, c}, Type::f32);
  Rows r = float_rows(kX, m, k);
  float *mix = scratch<float>(kOut, (n + 1) * mp),
        *rms = mix + n * mp;  // [C*(C+2)][rows]: lanes of what follows are rows
  std::memset(mix, 0, size_t((n + 1) * mp) * sizeof(float));
  parallel(m, 0.15 * double(k), [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; i++) {
      typed(streams, [&](auto* in) { widen(in + i * k, k, r.p + i * r.ld); });
      rms[i] = inverse_rms(sum_squares(r.p + i * r.ld, k), k, float(eps));
    }
  });
  auto keep = [&](i64 i, i64 n0, vf v) {
    alignas(64) float t[16];
    store(t, v);
    for (i64 j = n0; j < std::min(n0 + 16, n); j++) mix[j * mp + i] = t[j - n0];
  };
  if (k % kBlock == 0) gemm(r.p, r.ld, m, F32Rows{f, k}, n, k / kBlock, keep);
  else gemm(r.p, r.ld, m, PlainRows<float>{f, k, k}, n, r.ld / kBlock, keep);
  with_streams(c, "hc_mix: more than 8 streams", [&](auto count) {
    parallel(mp / 16, 500, [&](i64 begin, i64 end) {
      for (i64 g = begin; g < end; g++)
        mix_rows(count, mix, mp, g * 16, m, load(rms + g * 16), b, s, iters, float(hc_eps), pre.data<float>(),
                 post.data<float>(), comb.data<float>());
    });
  });
  return {std::move(pre), std::move(post), std::move(comb)};
}

Tensor hc_collapse(Tensor& streams, Tensor& pre) {
  check(is_float(streams) && streams.dim() == 3 && pre.is(Type::f32) && pre.dim() == 2 &&
            pre.size(0) == streams.size(0) && pre.size(1) == streams.size(1),
        "hc_collapse: streams must be bf16 or float32 [T, C, H], pre float32 [T, C]");
  i64 m = streams.size(0), h = streams.size(2);
  streams.contiguous();
  const float* p = pre.contiguous().data<float>();
  Tensor y = Tensor::empty({m, h}, streams.type());
  auto run = [&](auto* in, auto c) {
    auto* out = y.data<std::remove_pointer_t<decltype(in)>>();
    parallel(m, 0.06 * double(c * h), [&](i64 begin, i64 end) {
      for (i64 i = begin; i < end; i++)
        columns(h, [&](i64 j, auto n) {
          vf s = splat(p[i * c]) * load_n(in + i * c * h + j, n);
          for (int k = 1; k < c; k++) s = s + splat(p[i * c + k]) * load_n(in + (i * c + k) * h + j, n);
          store_n(out + i * h + j, s, n);
        });
    });
  };
  with_streams(streams.size(1), "hc_collapse: more than 8 streams",
               [&](auto c) { typed(streams, [&](auto* in) { run(in, c); }); });
  return y;
}

Tensor hc_write(Tensor& y, Tensor& streams, Tensor& post, Tensor& comb) {
  check(is_float(streams) && streams.dim() == 3 && is_float(y) && y.dim() == 2,
        "hc_write: y [T, H] and streams [T, C, H] must be bf16 or float32");
  i64 m = streams.size(0), h = streams.size(2), n = streams.size(1);
  check(y.size(0) == m && y.size(1) == h && post.is(Type::f32) && post.numel() == m * n && comb.is(Type::f32) &&
            comb.numel() == m * n * n,
        "hc_write: post must be float32 [T, C] and comb [T, C, C]");
  streams.contiguous();
  const float *po = post.contiguous().data<float>(), *co = comb.contiguous().data<float>();
  i64 stride = y.row_stride();
  Tensor z = Tensor::like(streams);
  auto run = [&](auto* in, auto* add, auto c) {
    auto* out = z.data<std::remove_pointer_t<decltype(in)>>();
    parallel(m, 0.03 * double(c * (c + 1) * h), [&](i64 begin, i64 end) {
      for (i64 i = begin; i < end; i++)
        columns(h, [&](i64 j, auto w) {
          vf r[kMaxStreams], v = load_n(add + i * stride + j, w);
          for (int k = 0; k < c; k++) r[k] = load_n(in + (i * c + k) * h + j, w);
          for (int a = 0; a < c; a++) {
            vf s = splat(po[i * c + a]) * v;
            for (int k = 0; k < c; k++) s = s + splat(co[(i * c + k) * c + a]) * r[k];
            store_n(out + (i * c + a) * h + j, s, w);
          }
        });
    });
  };
  with_streams(n, "hc_write: more than 8 streams",
               [&](auto c) { typed(streams, [&](auto* in) { typed(y, [&](auto* add) { run(in, add, c); }); }); });
  return z;
}

// hc_write, hc_mix, then collapse, norm and quantise of a row while it is in the first cache.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> hc_boundary(
    Tensor& y, Tensor& streams, Tensor& post, Tensor& comb, Tensor& pre, Tensor& fn, Tensor& base, Tensor& scale,
    Tensor& norm, i64 iters, double hc_eps, double eps) {
  check(streams.is(Type::bf16) && streams.dim() == 3 && norm.is(Type::bf16) && norm.numel() == streams.size(2) &&
            streams.size(2) % kBlock == 0 && streams.size(2) <= kRow && pre.is(Type::f32) && pre.dim() == 2 &&
            pre.size(0) == streams.size(0) && pre.size(1) == streams.size(1),
        "hc_boundary: streams must be bf16 [T, C, H] with H % 32 == 0 and H <= 16384, norm bf16 [H], pre float32 [T, C]");
  Tensor z = hc_write(y, streams, post, comb);
  auto [next_pre, next_post, next_comb] = hc_mix(z, fn, base, scale, iters, hc_eps, eps);
  i64 m = z.size(0), h = z.size(2);
  const float* p = pre.contiguous().data<float>();
  const bf16* w = norm.contiguous().data<bf16>();
  Tensor x = Tensor::empty({m, h}, Type::bf16), q = Tensor::empty({m, h}, Type::e4m3),
         s = Tensor::empty({m, h / kBlock}, Type::u8);
  with_streams(z.size(1), "hc_boundary: more than 8 streams", [&](auto c) {
    parallel(m, 0.06 * double(c * h) + 0.6 * double(h), [&](i64 begin, i64 end) {
      alignas(64) bf16 row[kRow];
      for (i64 i = begin; i < end; i++) {
        const bf16* in = z.data<bf16>() + i * c * h;
        columns(h, [&](i64 j, auto n) {
          vf t = splat(p[i * c]) * load_n(in + j, n);
          for (int k = 1; k < c; k++) t = t + splat(p[i * c + k]) * load_n(in + k * h + j, n);
          store_n(row + j, t, n);
        });
        norm_row(row, w, h, float(eps), x.data<bf16>() + i * h);
        quant_row(x.data<bf16>() + i * h, h, q.data<u8>() + i * h, s.data<u8>() + i * (h / kBlock));
      }
    });
  });
  return {std::move(z), std::move(next_pre), std::move(next_post), std::move(next_comb),
          std::move(x), std::move(q), std::move(s)};
}

Tensor engram_gate(Tensor& streams, Tensor& kv, Tensor& q_weight, Tensor& k_weight, Tensor& is_image, double eps) {
  check(is_float(streams) && streams.dim() == 3 && is_float(kv) && kv.dim() == 2,
        "engram_gate: streams [T, C, H] and kv [T, (C+1)*H] must be bf16 or float32");
  i64 m = streams.size(0), c = streams.size(1), h = streams.size(2);
  check(kv.size(0) == m && kv.size(1) == (c + 1) * h && is_float(q_weight) && q_weight.numel() == c * h &&
            k_weight.type() == q_weight.type() && k_weight.numel() == c * h && is_image.is(Type::boolean) &&
            is_image.numel() == m,
        "engram_gate: kv must be [T, (C+1)*H], weights [C, H] of one dtype, is_image bool [T]");
  streams.contiguous();
  q_weight.contiguous();
  k_weight.contiguous();
  const bool* image = is_image.contiguous().data<bool>();
  i64 stride = kv.row_stride();
  float* qk = scratch<float>(kValues, c * h);
  typed(q_weight, [&](auto* q) {
    auto* k = k_weight.data<std::remove_pointer_t<decltype(q)>>();
    columns(c * h, [&](i64 j, auto n) { store_n(qk + j, load_n(q + j, n) * load_n(k + j, n), n); });
  });
  Tensor z = Tensor::like(streams);
  auto run = [&](auto* in, auto* key) {
    auto* out = z.data<std::remove_pointer_t<decltype(in)>>();
    parallel(m, 0.3 * double(c * h), [&](i64 begin, i64 end) {
      for (i64 i = begin; i < end; i++)
        for (i64 a = 0; a < c; a++) {
          auto* r = in + (i * c + a) * h;
          auto *k = key + i * stride + a * h, *v = key + i * stride + c * h;
          vf rr = splat(0.0f), kk = rr, rk = rr;
          columns(h, [&](i64 j, auto n) {
            vf x = load_n(r + j, n), y = load_n(k + j, n);
            rr = fma(x, x, rr), kk = fma(y, y, kk);
            rk = fma(x * load_n(qk + a * h + j, n), y, rk);
          });
          float norm = inverse_rms(sum(rr), h, float(eps)) * inverse_rms(sum(kk), h, float(eps));
          float dot = sum(rk) * norm * float(1.0 / __builtin_sqrt(double(h)));
          float mag = __builtin_fabsf(dot), root = __builtin_copysignf(__builtin_sqrtf(mag > 1e-6f ? mag : 1e-6f), dot);
          vf gate = image[i] ? splat(0.0f) : sigmoid(splat(root));
          columns(h, [&](i64 j, auto n) {
            store_n(out + (i * c + a) * h + j, load_n(r + j, n) + gate * load_n(v + j, n), n);
          });
        }
    });
  };
  typed(streams, [&](auto* in) { typed(kv, [&](auto* key) { run(in, key); }); });
  return z;
}

}  // namespace

const Entry rowwise_ops[] = {DI_OP(rms_norm),       DI_OP(rope),        DI_OP(hc_mix),
                             DI_OP(hc_collapse),    DI_OP(hc_write),    DI_OP(hc_boundary),
                             DI_OP(rms_norm_quant), DI_OP(engram_gate), DI_OP(norm_rope_pack_window),
                             DI_OPS_END};

}  // namespace DI_ISA
