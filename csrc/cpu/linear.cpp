// Dense linears and the activation quantiser (deepinfer/ops/linear.py holds schemas and references).
#include "gemm.h"

namespace DI_ISA {
namespace {

std::tuple<Tensor, Tensor> quant_fp8(Tensor& x) {
  check(is_float(x) && x.dim() >= 1 && x.size(-1) % kBlock == 0,
        "quant_fp8: x must be bf16 or float32 [..., K], K % 32 == 0");
  i64 k = x.size(-1), m = x.rows(), stride = x.row_stride();
  i64 shape[8];
  std::copy(x.sizes(), x.sizes() + x.dim(), shape);
  Tensor q = Tensor::empty(shape, x.dim(), Type::e4m3);
  shape[x.dim() - 1] = k / kBlock;
  Tensor s = Tensor::empty(shape, x.dim(), Type::u8);
  auto run = [&](auto* data) {
    parallel(m, 0.4 * double(k), [&](i64 begin, i64 end) {
      for (i64 i = begin; i < end; i++)
        for (i64 b = 0; b < k / kBlock; b++) {
          auto* in = data + i * stride + b * kBlock;
          u8* out = q.data<u8>() + i * k + b * kBlock;
          vi lo, hi;
          s.data<u8>()[i * (k / kBlock) + b] = quant_block_fp8(load(in), load(in + 16), lo, hi);
          store_u8(out, lo);
          store_u8(out + 16, hi);
        }
    });
  };
  if (x.is(Type::bf16)) run(x.data<bf16>());
  else run(x.data<float>());
  return {std::move(q), std::move(s)};
}

template <class W>
void gemm_into(const Rows& x, i64 m, const W& w, i64 n, i64 blocks, Tensor& y, i64 column,
               const float* bias = nullptr) {
  i64 ld = y.size(1);
  bool wide = y.is(Type::f32);
  gemm(x.p, x.ld, m, w, n, blocks, [&](i64 i, i64 n0, vf v) {
    if (bias) v = v + load_n(bias + n0, n - n0);
    if (wide) store_n(y.data<float>() + i * ld + column + n0, v, n - n0);
    else store_n(y.data<bf16>() + i * ld + column + n0, v, n - n0);
  });
}

Fp8Rows fp8_weight(Tensor& w, Tensor& s, const char* message) {
  check(w.is(Type::e4m3) && s.is(Type::u8) && w.dim() == 2 && s.dim() == 2 && w.size(1) % kBlock == 0, message);
  check(s.size(1) == w.size(1) / kBlock && s.size(0) == (w.size(0) + 31) / 32, message);
  return {w.contiguous().data<u8>(), s.contiguous().data<u8>(), w.size(1), s.size(1), 0};
}

Tensor linear_fp8(Tensor& x, Tensor& x_scale, Tensor& weight, Tensor& weight_scale) {
  Fp8Rows w = fp8_weight(weight, weight_scale, "linear_fp8: weight must be e4m3 [N, K] with uint8 scales [N/32, K/32]");
  check(x.is(Type::e4m3) && x.dim() == 2 && x.size(1) == weight.size(1) && x_scale.is(Type::u8) && x_scale.dim() == 2 &&
            x_scale.size(1) == x.size(1) / kBlock && x_scale.size(0) == x.size(0),
        "linear_fp8: x must be e4m3 [T, K] with uint8 scales [T, K/32] and the K of the weight");
  i64 m = x.size(0), k = x.size(1), n = weight.size(0);
  i64 ldx = x.row_stride(), lds = x_scale.row_stride();
  Rows r = float_rows(kX, m, k);
  parallel(m, 0.1 * double(k), [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; i++)
      expand_fp8(x.data<u8>() + i * ldx, x_scale.data<u8>() + i * lds, k, r.p + i * r.ld);
  });
  Tensor y = Tensor::empty({m, n}, Type::bf16);
  gemm_into(r, m, w, n, k / kBlock, y, 0);
  return y;
}

Tensor linear_dequant(Tensor& x, Tensor& weight, Tensor& weight_scale, i64 groups) {
  Fp8Rows w = fp8_weight(weight, weight_scale,
                         "linear_dequant: weight must be e4m3 [groups*N, K] with uint8 scales [groups*N/32, K/32]");
  i64 k = weight.size(1);
  check(is_float(x) && x.dim() == 2 && groups > 0 && x.size(1) == groups * k && weight.size(0) % groups == 0,
        "linear_dequant: x must be bf16 or float32 [T, groups*K] for a weight [groups*N, K]");
  i64 m = x.size(0), n = weight.size(0) / groups;
  Rows r = widen_rows(kX, x, m, groups * k);
  Tensor y = Tensor::empty({m, groups * n}, x.type());
  for (i64 g = 0; g < groups; g++) {
    w.first = g * n;
    gemm_into(Rows{r.p + g * k, r.ld}, m, w, n, k / kBlock, y, g * n);
  }
  return y;
}

Tensor linear(Tensor& x, Tensor& weight, Maybe& bias, bool out_f32) {
  check(is_float(x) && is_float(weight) && x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1),
        "linear: x [T, K] and weight [N, K] must be bf16 or float32 and share K");
  i64 m = x.size(0), k = x.size(1), n = weight.size(0), ldw = weight.row_stride();
  const float* b = nullptr;
  if (bias.defined()) {
    check(is_float(bias) && bias.numel() == n, "linear: bias must be bf16 or float32 [N]");
    float* wide = scratch<float>(kValues, n);
    bias.contiguous();
    if (bias.is(Type::bf16)) widen(bias.data<bf16>(), n, wide);
    else widen(bias.data<float>(), n, wide);
    b = wide;
  }
  Rows r = widen_rows(kX, x, m, k);
  Tensor y = Tensor::empty({m, n}, out_f32 ? Type::f32 : x.type());
  i64 blocks = round_up(k, kBlock) / kBlock;
  if (weight.is(Type::bf16)) gemm_into(r, m, PlainRows<bf16>{weight.data<bf16>(), ldw, k}, n, blocks, y, 0, b);
  else if (k % kBlock == 0) gemm_into(r, m, F32Rows{weight.data<float>(), ldw}, n, blocks, y, 0, b);
  else gemm_into(r, m, PlainRows<float>{weight.data<float>(), ldw, k}, n, blocks, y, 0, b);
  return y;
}

}  // namespace

const Entry linear_ops[] = {DI_OP(quant_fp8), DI_OP(linear_fp8), DI_OP(linear_dequant), DI_OP(linear), DI_OPS_END};

}  // namespace DI_ISA
