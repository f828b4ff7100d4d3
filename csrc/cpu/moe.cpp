// Router, clamped SwiGLU, routed experts (deepinfer/ops/moe.py holds schemas and references).
#include "gemm.h"

namespace DI_ISA {
namespace {

// Index of the largest of n (a multiple of 16) values, the lowest one on ties.
i64 argmax(const float* v, i64 n) {
  alignas(64) float best[16];
  int32_t at[16];
  vf top = splat(-__builtin_inff());
  vi id = isplat(0), lane = iota();
  for (i64 j = 0; j < n; j += 16) {
    vf x = load(v + j);
    vi better = x > top;
    top = select(better, x, top);
    id = select(better, lane + isplat(int32_t(j)), id);
  }
  store(best, top);
  store_int(at, id);
  int w = 0;
  for (int l = 1; l < 16; l++)
    if (best[l] > best[w] || (best[l] == best[w] && at[l] < at[w])) w = l;
  return at[w];
}

std::tuple<Tensor, Tensor> router(Tensor& x, Tensor& weight, Tensor& bias, Tensor& bias_vl, Tensor& is_image, i64 k,
                                  double scale) {
  check(is_float(x) && x.dim() == 2 && weight.dim() == 2 && is_float(weight) && weight.size(1) == x.size(1),
        "router: x [T, H] and weight [E, H] must be bf16 or float32 and share H");
  i64 m = x.size(0), h = x.size(1), e = weight.size(0), ep = round_up(e, 16);
  check(bias.is(Type::f32) && bias.numel() == e && bias_vl.is(Type::f32) && bias_vl.numel() == e,
        "router: biases must be float32 [E]");
  check(is_image.is(Type::boolean) && is_image.numel() == m, "router: is_image must be bool [T]");
  check(0 < k && k <= e, "router: k must be between 1 and the number of experts");
  const float *b = bias.contiguous().data<float>(), *bv = bias_vl.contiguous().data<float>();
  const bool* image = is_image.contiguous().data<bool>();
  Rows r = widen_rows(kX, x, m, h);
  float* s = scratch<float>(kScore, m * ep);
  auto scores = [&](i64 i, i64 n0, vf v) { store(s + i * ep + n0, sqrt(softplus(v))); };
  i64 blocks = r.ld / kBlock, ldw = weight.row_stride();
  if (weight.is(Type::bf16)) gemm(r.p, r.ld, m, PlainRows<bf16>{weight.data<bf16>(), ldw, h}, e, blocks, scores);
  else gemm(r.p, r.ld, m, PlainRows<float>{weight.data<float>(), ldw, h}, e, blocks, scores);

  Tensor ids = Tensor::empty({m, k}, Type::i32), w = Tensor::empty({m, k}, Type::f32);
  parallel(m, 0.3 * double(k * e), [&](i64 begin, i64 end) {
    float* left = scratch<float>(kValues, ep);
    for (i64 i = begin; i < end; i++) {
      const float *row = s + i * ep, *add = image[i] ? bv : b;
      int32_t* id = ids.data<int32_t>() + i * k;
      for (i64 j = 0; j < ep; j++) left[j] = j < e ? row[j] + add[j] : -__builtin_inff();
      for (i64 c = 0; c < k; c++) {  // k is small: the best of what is left
        id[c] = int32_t(argmax(left, ep));
        left[id[c]] = -__builtin_inff();
      }
      std::sort(id, id + k);
      float total = 0, *out = w.data<float>() + i * k;
      for (i64 c = 0; c < k; c++) total = total + row[id[c]];
      for (i64 c = 0; c < k; c++) out[c] = row[id[c]] / (total + 1e-20f) * float(scale);
    }
  });
  return {std::move(ids), std::move(w)};
}

template <class T>
void swiglu_row(const T* in, i64 n, float limit, T* out) {
  columns(n, [&](i64 j, auto w) { store_n(out + j, silu_mul(load_n(in + j, w), load_n(in + n + j, w), limit), w); });
}

Tensor swiglu(Tensor& gate_up, double limit) {
  check(is_float(gate_up) && gate_up.dim() == 2 && gate_up.size(1) % 2 == 0,
        "swiglu: gate_up must be bf16 or float32 [T, 2I]");
  i64 m = gate_up.size(0), n = gate_up.size(1) / 2, stride = gate_up.row_stride();
  Tensor y = Tensor::empty({m, n}, gate_up.type());
  parallel(m, 0.5 * double(n), [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; i++) {
      if (y.is(Type::bf16)) swiglu_row(gate_up.data<bf16>() + i * stride, n, float(limit), y.data<bf16>() + i * n);
      else swiglu_row(gate_up.data<float>() + i * stride, n, float(limit), y.data<float>() + i * n);
    }
  });
  return y;
}

// swiglu, then quant_fp8 of the row while it is in the first cache (deepinfer/ops/fused.py).
std::tuple<Tensor, Tensor> swiglu_quant(Tensor& gate_up, double limit) {
  i64 m = gate_up.size(0), n = gate_up.size(1) / 2, stride = gate_up.row_stride();
  check(gate_up.is(Type::bf16) && gate_up.dim() == 2 && n % kBlock == 0 && gate_up.size(1) == 2 * n && n <= (1 << 14),
        "swiglu_quant: gate_up must be bf16 [T, 2I] with I % 32 == 0, I <= 16384");
  Tensor q = Tensor::empty({m, n}, Type::e4m3), s = Tensor::empty({m, n / kBlock}, Type::u8);
  parallel(m, 0.9 * double(n), [&](i64 begin, i64 end) {
    alignas(64) bf16 row[1 << 14];
    for (i64 i = begin; i < end; i++) {
      swiglu_row(gate_up.data<bf16>() + i * stride, n, float(limit), row);
      for (i64 b = 0; b < n / kBlock; b++) {
        vi lo, hi;
        u8* out = q.data<u8>() + i * n + b * kBlock;
        s.data<u8>()[i * (n / kBlock) + b] = quant_block_fp8(load(row + b * kBlock), load(row + b * kBlock + 16), lo, hi);
        store_u8(out, lo);
        store_u8(out + 16, hi);
      }
    }
  });
  return {std::move(q), std::move(s)};
}

// The (row, slot) pairs of a call, grouped by expert.
struct Pairs {
  i64 count;
  int32_t *order, *active;  // pairs sorted by expert; ids of the experts that have any
  int32_t* first;           // where each active expert starts in `order`, and the end
  i64 num_active = 0, largest = 0;

  Pairs(const int32_t* ids, i64 pairs, i64 experts) : count(pairs) {
    int32_t* memory = scratch<int32_t>(kPairs, pairs + 3 * (experts + 1));
    order = memory, first = order + pairs, active = first + experts + 1;
    int32_t* start = active + experts + 1;
    std::memset(start, 0, size_t(experts + 1) * sizeof(int32_t));
    for (i64 p = 0; p < pairs; p++) {
      check(0 <= ids[p] && ids[p] < experts, "experts: an id is not below the number of experts");
      start[ids[p] + 1]++;
    }
    first[0] = 0;
    for (i64 e = 0; e < experts; e++) {
      i64 n = start[e + 1];
      if (n) active[num_active++] = int32_t(e), first[num_active] = int32_t(first[num_active - 1] + n);
      largest = std::max(largest, n);
      start[e + 1] += start[e];
    }
    for (i64 p = 0; p < pairs; p++) order[start[ids[p]]++] = int32_t(p);
  }
};

// One call of `experts`: up (w13, SwiGLU, rounding) for all pairs, then down (w2), then sums over slots. A task is an
// active expert and a range of its outputs, so threads share the work of one row as well as of many; weights are read
// once.
template <bool exact>
struct Experts {
  const Tensor &x, &x_scale;
  const float* weights;
  Fp4Rows w13, w2;
  i64 slots, h, inner, ldx, lds;
  float limit;
  const Pairs& pairs;
  float* acts = nullptr;  // [pairs, inner], columns split like Fp4Rows
  using Out = std::conditional_t<exact, float, bf16>;
  Out* down = nullptr;  // [pairs, h]

  const int32_t* of(i64 a, i64& m) const {
    m = pairs.first[a + 1] - pairs.first[a];
    return pairs.order + pairs.first[a];
  }

  void gather_x(const int32_t* p, i64 m, float* out) const {
    alignas(64) float tmp[kBlock];
    for (i64 i = 0; i < m; i++) {
      i64 row = p[i] / slots;
      for (i64 b = 0; b < h / kBlock; b++) {
        const float* in = tmp;
        if constexpr (exact) in = x.data<float>() + row * ldx + b * kBlock;
        else expand_fp8(x.data<u8>() + row * ldx + b * kBlock, x_scale.data<u8>() + row * lds + b, kBlock, tmp);
        split(in, out + i * h + b * kBlock);
      }
    }
  }

  // Columns [c, c+32) of the activation of m pairs: gate and up, SwiGLU, routing weight, rounding.
  void up_block(const Fp4Rows& gate, const Fp4Rows& up, const float* xe, const int32_t* p, i64 m, i64 c,
                float* g) const {
    float *g1 = g + kTileM * kTileN * 2, *u = g1 + kTileM * kTileN * 2, *u1 = u + kTileM * kTileN * 2;
    gemm_tile(xe, h, m, gate, inner, c, h / kBlock, g);
    gemm_tile(xe, h, m, gate, inner, c + 16, h / kBlock, g1);
    gemm_tile(xe, h, m, up, inner, c, h / kBlock, u);
    gemm_tile(xe, h, m, up, inner, c + 16, h / kBlock, u1);
    for (i64 i = 0; i < m; i++) {
      vf w = splat(weights[p[i]]);
      alignas(64) float act[kBlock];
      if constexpr (exact) {
        store(act, silu_mul(load(g + i * 16), load(u + i * 16), limit) * w);
        store(act + 16, silu_mul(load(g1 + i * 16), load(u1 + i * 16), limit) * w);
      } else {
        vf lo = silu_mul(round_bf16(load(g + i * 16)), round_bf16(load(u + i * 16)), limit) * w;
        vf hi = silu_mul(round_bf16(load(g1 + i * 16)), round_bf16(load(u1 + i * 16)), limit) * w;
        vi a, b;
        u8 codes[kBlock], s = quant_block_fp8(round_bf16(lo), round_bf16(hi), a, b);
        store_u8(codes, a);
        store_u8(codes + 16, b);
        expand_fp8(codes, &s, kBlock, act);
      }
      split(act, acts + i64(p[i]) * inner + c);
    }
  }

  void up(i64 a, i64 c0, i64 c1, float* xe) const {
    i64 m, e = pairs.active[a];
    const int32_t* p = of(a, m);
    Fp4Rows gate{w13.w + e * 2 * inner * w13.ld, w13.s + e * 2 * inner * w13.lds, w13.ld, w13.lds};
    Fp4Rows upw{gate.w + inner * w13.ld, gate.s + inner * w13.lds, w13.ld, w13.lds};
    float* g = scratch<float>(kOut, 8 * kTileM * kTileN);
    for (i64 c = c0; c < c1; c += kBlock)
      for (i64 i = 0; i < m; i += kTileM) up_block(gate, upw, xe + i * h, p + i, std::min(kTileM, m - i), c, g);
  }

  void down_tiles(i64 a, i64 n0, i64 n1, float* ae) const {
    i64 m, e = pairs.active[a];
    const int32_t* p = of(a, m);
    Fp4Rows w{w2.w + e * h * w2.ld, w2.s + e * h * w2.lds, w2.ld, w2.lds};
    float* c = scratch<float>(kOut, 8 * kTileM * kTileN);
    for (i64 n = n0; n < n1; n += kTileN)
      for (i64 i0 = 0; i0 < m; i0 += kTileM) {
        i64 rows = std::min(kTileM, m - i0);
        gemm_tile(ae + i0 * inner, inner, rows, w, h, n, inner / kBlock, c);
        for (i64 i = 0; i < rows; i++) store(down + i64(p[i0 + i]) * h + n, load(c + i * kTileN));
      }
  }

  // f(active expert, begin, end, rows) over ranges of `step` of `width` outputs; `gather` collects the expert's rows of
  // k.
  template <class G, class F>
  void tasks(i64 width, i64 step, i64 k, G&& gather, F&& f) const {
    i64 ranges = (width + step - 1) / step;
    double ns = gemm_ns((pairs.count + pairs.num_active - 1) / std::max<i64>(pairs.num_active, 1), step, k);
    parallel(pairs.num_active * ranges, ns, [&](i64 begin, i64 end) {
      float* in = scratch<float>(kX, round_up(pairs.largest, 4) * k);
      i64 have = -1;
      for (i64 t = begin; t < end;) {
        i64 a = t / ranges, c0 = t % ranges * step;
        i64 t1 = std::min(end, (a + 1) * ranges), c1 = std::min(width, c0 + (t1 - t) * step);
        if (a != have) {
          i64 m;
          const int32_t* p = of(have = a, m);
          gather(p, m, in);
          std::memset(in + m * k, 0, size_t((round_up(m, 4) - m) * k) * sizeof(float));
        }
        f(a, c0, c1, in);
        t = t1;
      }
    });
  }

  Tensor run(i64 m) {
    acts = scratch<float>(kActs, pairs.count * inner);
    down = scratch<Out>(kDown, pairs.count * h);
    tasks(inner, 64, h, [&](auto... v) { gather_x(v...); }, [&](auto... v) { up(v...); });
    auto gather_acts = [&](const int32_t* p, i64 rows, float* out) {
      for (i64 i = 0; i < rows; i++)
        std::memcpy(out + i * inner, acts + i64(p[i]) * inner, size_t(inner) * sizeof(float));
    };
    tasks(h, 128, inner, gather_acts, [&](auto... v) { down_tiles(v...); });
    Tensor y = Tensor::empty({m, h}, Type::f32);
    parallel(m, 0.05 * double(slots * h), [&](i64 begin, i64 end) {
      for (i64 i = begin; i < end; i++)
        for (i64 c = 0; c < h; c += 16) {
          vf s = splat(0.0f);
          for (i64 j = 0; j < slots; j++) s = s + load(down + (i * slots + j) * h + c);
          store(y.data<float>() + i * h + c, s);
        }
    });
    return y;
  }
};

Fp4Rows fp4_weight(Tensor& w, Tensor& s, i64 e, i64 n, i64 k) {
  check(w.is(Type::u8) && s.is(Type::u8) && w.dim() == 3 && s.dim() == 3 && w.size(0) == e && w.size(1) == n &&
            w.size(2) == k / 2 && s.size(0) == e && s.size(1) == n && s.size(2) == k / 32,
        "experts: weights must be uint8 [E, N, K/2] with scales [E, N, K/32]: w13 with N = 2I, K = H; w2 "
        "with N = H, K = I");
  return {w.contiguous().data<u8>(), s.contiguous().data<u8>(), k / 2, k / 32};
}

Tensor experts(Tensor& x, Maybe& x_scale, Tensor& ids, Tensor& weights, Tensor& w13, Tensor& w13_scale, Tensor& w2,
               Tensor& w2_scale, double limit) {
  bool exact = !x_scale.defined();
  check(x.dim() == 2 && x.is(exact ? Type::f32 : Type::e4m3),
        "experts: x must be e4m3 [T, H] with x_scale, or float32 without");
  i64 m = x.size(0), h = x.size(1), e = w13.size(0), inner = w13.size(1) / 2;
  check(h % kBlock == 0 && inner % kBlock == 0, "experts: hidden size and expert width must be multiples of 32");
  check(ids.dim() == 2 && ids.size(0) == m, "experts: ids must be int32 [T, K]");
  i64 slots = ids.size(1);
  const int32_t* id = indices(ids, m * slots, "experts: ids must be int32 [T, K]");
  check(weights.is(Type::f32) && weights.numel() == m * slots, "experts: weights must be float32 [T, K]");
  check(exact || (x_scale.is(Type::u8) && x_scale.dim() == 2 && x_scale.size(0) == m && x_scale.size(1) == h / kBlock),
        "experts: x_scale must be uint8 [T, H/32]");
  const float* w = weights.contiguous().data<float>();
  Fp4Rows up = fp4_weight(w13, w13_scale, e, 2 * inner, h), down = fp4_weight(w2, w2_scale, e, h, inner);
  i64 ldx = x.row_stride();
  Pairs pairs(id, m * slots, e);
  if (exact) return Experts<true>{x, x_scale, w, up, down, slots, h, inner, ldx, 0, float(limit), pairs}.run(m);
  i64 lds = x_scale.row_stride();
  return Experts<false>{x, x_scale, w, up, down, slots, h, inner, ldx, lds, float(limit), pairs}.run(m);
}

}  // namespace

const Entry moe_ops[] = {DI_OP(router), DI_OP(swiglu), DI_OP(swiglu_quant), DI_OP(experts), DI_OPS_END};

}  // namespace DI_ISA
