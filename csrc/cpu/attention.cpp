// Attention with a sink over window and compressed records, draft blocks, images (deepinfer/ops/attention.py).
//
// A task expands the keys of its row once into floats, then runs two products with fixed orders: scores over the head
// dimension (gemm.h) and values over the keys in list order (`weigh`). Unused records are never touched.
#include "gemm.h"

namespace DI_ISA {
namespace {

// Records of one pool: packed bytes or float32 (deepinfer/ops/records.py).
struct Records {
  const u8* base = nullptr;
  i64 outer = 0, inner = 0;  // byte strides of the two leading dims
  bool packed = true;

  static Records of(Tensor& t, i64 bytes, i64 dim, const char* message) {
    bool packed = t.is(Type::u8);
    check((packed && t.size(-1) == bytes) || (t.is(Type::f32) && t.size(-1) == dim), message);
    if (t.stride(-1) != 1) t.contiguous();
    i64 item = packed ? 1 : 4;
    return {t.data<u8>(), t.dim() == 3 ? t.stride(0) * item : 0, t.stride(-2) * item, packed};
  }
  const u8* at(i64 i, i64 j) const { return base + i * outer + j * inner; }
};

i64 window_bytes(i64 dim) { return round_up(dim + dim / 32, 16); }
i64 latent_bytes(i64 dim) { return round_up(dim / 2 + dim / 16, 16); }

void read_window(const u8* rec, bool packed, i64 dim, float* out) {
  if (packed) expand_fp8(rec, rec + dim, dim, out);
  else std::memcpy(out, rec, size_t(dim) * sizeof(float));
}

void read_latent(const u8* rec, bool packed, i64 dim, float* out) {
  if (!packed) return void(std::memcpy(out, rec, size_t(dim) * sizeof(float)));
  const u8* scales = rec + dim / 2;
  for (i64 b = 0; b < dim / 32; b++) {
    vf lo, hi, even, odd;
    e2m1(rec + b * 16, 1.0f, even, odd);
    interleave(even, odd, lo, hi);
    store(out + b * 32, lo * splat(e4m3_value(scales[2 * b])));
    store(out + b * 32 + 16, hi * splat(e4m3_value(scales[2 * b + 1])));
  }
}

// out[i][c..] = sum_j p[i][j] * v[j][c..] for rows i < m (padded to kRM) and c < dim (a multiple of 16), j ascending.
template <int RM, int RC>
DI_INLINE void weigh_block(const float* p, i64 ldp, i64 n, const float* v, i64 ldv, vf (&acc)[RM][RC]) {
  for (int i = 0; i < RM; i++)
    for (int c = 0; c < RC; c++) acc[i][c] = splat(0.0f);
  for (i64 j = 0; j < n; j++)
    for (int c = 0; c < RC; c++) {
      vf k = load(v + j * ldv + c * 16);
      for (int i = 0; i < RM; i++) acc[i][c] = fma(splat(p[i * ldp + j]), k, acc[i][c]);
    }
}

template <class Out>
void weigh(const float* p, i64 ldp, i64 m, i64 n, const float* v, i64 ldv, i64 dim, Out&& out) {
  constexpr int kWide = V == 16 ? 4 : 2;
  for (i64 i = 0; i < m; i += kRM) {
    auto emit = [&](i64 c, const auto& acc) {
      for (i64 r = 0; r < std::min<i64>(kRM, m - i); r++)
        for (size_t w = 0; w < sizeof(acc[0]) / sizeof(vf); w++) out(i + r, c + i64(w) * 16, acc[r][w]);
    };
    i64 c = 0;
    for (; c + 16 * kWide <= dim; c += 16 * kWide) {
      vf acc[kRM][kWide];
      weigh_block<kRM, kWide>(p + i * ldp, ldp, n, v + c, ldv, acc);
      emit(c, acc);
    }
    for (; c < dim; c += 16) {
      vf acc[kRM][1];
      weigh_block<kRM, 1>(p + i * ldp, ldp, n, v + c, ldv, acc);
      emit(c, acc);
    }
  }
}

// s[j] <- exp(s[j] - top) for n scores, zeros up to the next 16; returns the factor 1 / (sum + exp(sink - top)).
float softmax_row(float* s, i64 n, float sink) {
  i64 np = round_up(n, 16);
  for (i64 j = n; j < np; j++) s[j] = -__builtin_inff();
  vf top = splat(sink);
  for (i64 j = 0; j < np; j += 16) top = max(load(s + j), top);
  vf t = splat(max_lane(top)), total = splat(0.0f);
  for (i64 j = 0; j < np; j += 16) {
    vf e = exp(load(s + j) - t);
    store(s + j, e);
    total = total + e;
  }
  return 1.0f / (sum(total) + exp(sink - t.p[0][0]));
}

// Heads [h0, h1) of one row over `n` expanded keys [n, dim]: bf16 or float32 q and out, both [heads, dim].
template <class T>
void attend(const T* q, T* out, i64 h0, i64 h1, const float* keys, i64 n, i64 dim, const float* sink, float scale) {
  i64 m = h1 - h0, mp = round_up(m, kRM), lds = round_up(n, 16);
  if (n == 0) return void(std::memset(out + h0 * dim, 0, size_t(m * dim) * sizeof(T)));
  float* qf = scratch<float>(kQuery, mp * dim);
  widen(q + h0 * dim, m * dim, qf);
  std::memset(qf + m * dim, 0, size_t((mp - m) * dim) * sizeof(float));
  float* s = scratch<float>(kScore, mp * lds);
  alignas(64) float c[(kTileM + kRM) * kTileN], factor[kTileM];
  vf by = splat(scale);
  for (i64 j = 0; j < n; j += kTileN) {
    gemm_tile(qf, dim, m, F32Rows{keys, dim}, n, j, dim / kBlock, c);
    for (i64 i = 0; i < m; i++) store(s + i * lds + j, load(c + i * kTileN) * by);
  }
  for (i64 i = 0; i < m; i++) factor[i] = softmax_row(s + i * lds, n, sink[h0 + i]);
  std::memset(s + m * lds, 0, size_t((mp - m) * lds) * sizeof(float));
  weigh(s, lds, m, n, keys, dim, dim,
        [&](i64 i, i64 col, vf v) { store(out + (h0 + i) * dim + col, v * splat(factor[i])); });
}

// Rows times groups of heads as tasks; `list(row, keys)` expands the row's keys and returns their number.
template <class List>
Tensor attend_rows(Tensor& q, Tensor& sink, double scale, i64 max_keys, List&& list) {
  i64 m = q.size(0), heads = q.size(1), dim = q.size(2);
  check(sink.is(Type::f32) && sink.numel() == heads, "attention: sink must be float32 [heads]");
  const float* sinks = sink.contiguous().data<float>();
  q.contiguous();
  Tensor out = Tensor::like(q);
  double row_ns = 200 + 0.025 * double(heads * dim * max_keys);
  i64 group = heads;  // of heads: one row of a large model still feeds all threads
  if (row_ns > kMinParallelNs && m < 4 * num_threads()) group = std::min<i64>(heads, 16);
  group = std::min(group, kTileM);
  i64 groups = (heads + group - 1) / group;
  std::atomic<bool> bad{false};
  parallel(m * groups, row_ns / double(groups), [&](i64 begin, i64 end) {
    float* keys = scratch<float>(kKeys, max_keys * dim);
    i64 have = -1, n = 0;
    for (i64 t = begin; t < end; t++) {
      i64 row = t / groups, h0 = t % groups * group, h1 = std::min(heads, h0 + group);
      if (row != have) n = list(row, keys), have = row;
      if (n < 0) return bad.store(true);
      if (q.is(Type::bf16))
        attend(q.data<bf16>() + row * heads * dim, out.data<bf16>() + row * heads * dim, h0, h1, keys, n, dim, sinks,
               float(scale));
      else
        attend(q.data<float>() + row * heads * dim, out.data<float>() + row * heads * dim, h0, h1, keys, n, dim, sinks,
               float(scale));
    }
  });
  check(!bad, "attention: a slot, row or page index is out of range");
  return out;
}

void check_query(const Tensor& q) {
  check(is_float(q) && q.dim() == 3 && q.size(2) % kBlock == 0,
        "attention: q must be bf16 or float32 [M, heads, D], D % 32 == 0");
}

Tensor attention(Tensor& q, Tensor& fresh, Tensor& ring, Tensor& slots, Tensor& positions, Tensor& rows, Tensor& first,
                 Tensor& floor, Tensor& sink, Maybe& pool, Maybe& selected, Tensor& page_table, double scale,
                 i64 window, i64 ratio, i64 page_size) {
  check_query(q);
  i64 m = q.size(0), dim = q.size(2);
  check(fresh.dim() == 2 && ring.dim() == 3, "attention: new must be [N, W] and ring [S, R, W]");
  Records recent =
      Records::of(fresh, window_bytes(dim), dim, "attention: new is not made of window records of this head size");
  Records old =
      Records::of(ring, window_bytes(dim), dim, "attention: ring is not made of window records of this head size");
  const char* message = "attention: slots, positions, rows, first and floor must be int32 [M]";
  const int32_t *slot = indices(slots, m, message), *pos = indices(positions, m, message),
                *own = indices(rows, m, message);
  const int32_t *start = indices(first, m, message), *low = indices(floor, m, message);
  i64 num_new = fresh.size(0), num_slots = ring.size(0), size = ring.size(1), k = 0, entries = 1;
  Records latents;
  const int32_t *sel = nullptr, *table = nullptr;
  if (pool.defined() && selected.defined()) {
    check(pool.dim() == 3 && ratio > 0 && page_size >= ratio,
          "attention: pool must be [P, page_size/ratio, L] with ratio > 0");
    latents =
        Records::of(pool, latent_bytes(dim), dim, "attention: pool is not made of latent records of this head size");
    check(selected.dim() == 2 && page_table.is(Type::i32) && page_table.dim() == 2,
          "attention: selected [M, k] and page_table [S, pages] must be int32");
    k = selected.size(1), entries = page_size / ratio;
    sel = indices(selected, m * k, "attention: selected must be int32 [M, k]");
    table = page_table.contiguous().data<int32_t>();
  }
  auto list = [&](i64 r, float* keys) -> i64 {
    if (slot[r] < 0 || slot[r] >= num_slots || own[r] < 0 || own[r] >= num_new) return -1;
    i64 n = 0, p = pos[r];
    for (i64 at = std::max<i64>({p - window + 1, low[r], 0}); at <= p; at++, n++) {
      bool in_step = at >= start[r];
      const Records& from = in_step ? recent : old;
      const u8* rec = in_step ? recent.at(0, std::max<i64>(own[r] - (p - at), 0)) : old.at(slot[r], at % size);
      read_window(rec, from.packed, dim, keys + n * dim);
    }
    for (i64 j = 0; j < k; j++) {
      i64 entry = sel[r * k + j], page = entry * ratio / page_size;
      if (entry < 0) continue;
      if (slot[r] >= page_table.size(0) || page >= page_table.size(1)) return -1;
      page = table[slot[r] * page_table.size(1) + page];
      if (page < 0 || page >= pool.size(0)) return -1;
      read_latent(latents.at(page, entry % entries), latents.packed, dim, keys + n++ * dim);
    }
    return n;
  };
  return attend_rows(q, sink, scale, window + k, list);
}

Tensor block_attention(Tensor& q, Tensor& block, Tensor& ring, Tensor& slots, Tensor& start, Tensor& floor,
                       Tensor& sink, double scale, i64 window) {
  check_query(q);
  i64 b = slots.numel(), dim = q.size(2), size = ring.size(1), num_slots = ring.size(0);
  if (b == 0 || q.size(0) == 0) return Tensor::like(q);
  check(q.size(0) % b == 0 && block.dim() == 2 && block.size(0) == q.size(0) && ring.dim() == 3,
        "block_attention: q and block must have B*g rows");
  i64 g = q.size(0) / b;
  Records now = Records::of(block, window_bytes(dim), dim,
                            "block_attention: block is not made of window records of this head size");
  Records old = Records::of(ring, window_bytes(dim), dim,
                            "block_attention: ring is not made of window records of this head size");
  const char* message = "block_attention: slots, start and floor must be int32 [B]";
  const int32_t *slot = indices(slots, b, message), *first = indices(start, b, message),
                *low = indices(floor, b, message);
  auto list = [&](i64 r, float* keys) -> i64 {
    i64 i = r / g, n = 0;
    if (slot[i] < 0 || slot[i] >= num_slots) return -1;
    for (i64 at = std::max<i64>({i64(first[i]) - window, low[i], 0}); at < first[i]; at++)
      read_window(old.at(slot[i], at % size), old.packed, dim, keys + n++ * dim);
    for (i64 j = 0; j < g; j++) read_window(now.at(0, i * g + j), now.packed, dim, keys + n++ * dim);
    return n;
  };
  return attend_rows(q, sink, scale, window + g, list);
}

// Rotates halves of a head by its patch's angles and rounds to the type of qkv: d floats, zeros up to the next 32.
template <class T>
void rotate_head(const T* in, const float* cos, const float* sin, i64 d, float* out) {
  i64 h = d / 2;
  columns(h, [&](i64 j, auto n) {
    vf a = load_n(in + j, n), b = load_n(in + h + j, n), c = load_n(cos + j, n), s = load_n(sin + j, n);
    vf lo = a * c - b * s, hi = b * c + a * s;
    if constexpr (std::is_same_v<T, bf16>) lo = round_bf16(lo), hi = round_bf16(hi);
    store_n(out + j, lo, n);
    store_n(out + h + j, hi, n);
  });
  std::memset(out + d, 0, size_t(round_up(d, kBlock) - d) * sizeof(float));
}

template <class T>
void image_attention(const T* qkv, const float* cos, const float* sin, i64 n, i64 heads, i64 d, T* out) {
  constexpr i64 kRows = 16;
  i64 dp = round_up(d, kBlock), lds = round_up(n, 16), width = heads * d;
  float *keys = scratch<float>(kKeys, heads * n * dp), *values = scratch<float>(kValues, heads * n * dp);
  parallel(heads * n, double(d), [&](i64 begin, i64 end) {
    for (i64 t = begin; t < end; t++) {
      i64 h = t / n, r = t % n;
      rotate_head(qkv + (r * 3 + 1) * width + h * d, cos + r * (d / 2), sin + r * (d / 2), d, keys + t * dp);
      widen(qkv + (r * 3 + 2) * width + h * d, d, values + t * dp);
      std::memset(values + t * dp + d, 0, size_t(dp - d) * sizeof(float));
    }
  });
  i64 blocks = (n + kRows - 1) / kRows;
  vf scale = splat(float(1.0 / __builtin_sqrt(double(d))));
  parallel(heads * blocks, 0.03 * double(kRows * n * dp), [&](i64 begin, i64 end) {
    float *q = scratch<float>(kQuery, kRows * dp), *s = scratch<float>(kScore, kRows * lds);
    alignas(64) float c[kRows * kTileN], factor[kRows];
    for (i64 t = begin; t < end; t++) {
      i64 h = t / blocks, r0 = t % blocks * kRows, m = std::min(kRows, n - r0);
      for (i64 i = 0; i < m; i++)
        rotate_head(qkv + (r0 + i) * 3 * width + h * d, cos + (r0 + i) * (d / 2), sin + (r0 + i) * (d / 2), d,
                    q + i * dp);
      std::memset(q + m * dp, 0, size_t((kRows - m) * dp) * sizeof(float));
      for (i64 j = 0; j < n; j += kTileN) {
        gemm_tile(q, dp, m, F32Rows{keys + h * n * dp, dp}, n, j, dp / kBlock, c);
        for (i64 i = 0; i < m; i++) store(s + i * lds + j, load(c + i * kTileN) * scale);
      }
      for (i64 i = 0; i < m; i++) factor[i] = softmax_row(s + i * lds, n, -__builtin_inff());
      std::memset(s + m * lds, 0, size_t((kRows - m) * lds) * sizeof(float));
      weigh(s, lds, m, n, values + h * n * dp, dp, round_up(d, 16), [&](i64 i, i64 col, vf v) {
        store_n(out + (r0 + i) * width + h * d + col, v * splat(factor[i]), d - col);
      });
    }
  });
}

Tensor vision_attention(Tensor& qkv, Tensor& cos, Tensor& sin, i64 heads) {
  check(is_float(qkv) && qkv.dim() == 2 && heads > 0 && qkv.size(1) % (6 * heads) == 0,
        "vision_attention: qkv must be bf16 or float32 [n, 3*heads*d], d even");
  i64 n = qkv.size(0), d = qkv.size(1) / (3 * heads);
  check(cos.is(Type::f32) && sin.is(Type::f32) && cos.numel() == n * d / 2 && sin.numel() == n * d / 2,
        "vision_attention: cos and sin must be float32 [n, d/2]");
  qkv.contiguous();
  const float *c = cos.contiguous().data<float>(), *s = sin.contiguous().data<float>();
  Tensor out = Tensor::empty({n, heads * d}, qkv.type());
  if (n == 0) return out;
  if (qkv.is(Type::bf16)) image_attention(qkv.data<bf16>(), c, s, n, heads, d, out.data<bf16>());
  else image_attention(qkv.data<float>(), c, s, n, heads, d, out.data<float>());
  return out;
}

}  // namespace

const Entry attention_ops[] = {DI_OP(attention), DI_OP(block_attention), DI_OP(vision_attention), DI_OPS_END};

}  // namespace DI_ISA
