"""Fused chains (ops/fused.py) on CUDA: one launch and one pass over the row each.

Belongs here: kernels of rms_norm_quant, swiglu_quant, norm_rope_pack_window. Does not belong here: the single ops.
Each stage is computed and rounded as the single kernel does it (norm.py, experts.py, linear.py, cache.py; the sum of a
norm by as many warps), so the bits are the chain's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer.ops import records
from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.experts import _silu_mul
from deepinfer.ops.triton.norm import PDL, norm_warps, options
from deepinfer.ops.triton.support import e4m3_code, e8m0_inverse, f32, fp8_scale, round_bf16


@triton.jit
def _store_quantised(v, codes, scales, N, BLOCK: tl.constexpr):
    """bf16 values as float32 [BLOCK] -> N codes at `codes`, N / 32 scales at `scales`."""
    c = tl.arange(0, BLOCK)
    groups = tl.reshape(v, (BLOCK // 32, 32))
    g = tl.arange(0, BLOCK // 32)
    e = fp8_scale(tl.maximum(tl.max(tl.abs(groups), 1), 1e-4))
    q = tl.reshape(groups * e8m0_inverse(e)[:, None], (BLOCK,))
    tl.store(codes + c, e4m3_code(q), mask=c < N)
    tl.store(scales + g, e.to(tl.uint8), mask=g * 32 < N)


@triton.jit
def _rms_norm_quant(x, weight, codes, scales, N, stride, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row a program."""
    c = tl.arange(0, BLOCK)
    w = f32(tl.load(weight + c, mask=c < N, other=0.0))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    v = f32(tl.load(x + row * stride + c, mask=c < N, other=0.0))
    mean = tl.div_rn(tl.sum(v * v), tl.cast(N, tl.float32))
    y = round_bf16(v * tl.rsqrt(mean + eps) * w)
    _store_quantised(y, codes + row * N, scales + row * (N // 32), N, BLOCK)


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if x.stride(-1) != 1:
        x = x.contiguous()
    t, n = x.shape
    codes = torch.empty((t, n), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((t, n // 32), dtype=torch.uint8, device=x.device)
    if t:
        block = triton.next_power_of_2(n)
        _rms_norm_quant[(t,)](
            x, weight, codes.view(torch.uint8), scales, n, x.stride(0), eps,
            BLOCK=block, PDL=PDL, num_warps=norm_warps(block), **options(),
        )  # fmt: skip
    return codes, scales


@triton.jit
def _swiglu_quant(gate_up, codes, scales, width, limit, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """gate_up [T, 2 width] -> codes [T, width], scales [T, width / 32]. Grid (T, width / BLOCK)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    c = first + tl.arange(0, BLOCK)
    gate = f32(tl.load(gate_up + t * 2 * width + c, mask=c < width, other=0.0))
    up = f32(tl.load(gate_up + t * 2 * width + width + c, mask=c < width, other=0.0))
    y = round_bf16(_silu_mul(gate, up, limit))
    _store_quantised(y, codes + t * width + first, scales + (t * width + first) // 32, width - first, BLOCK)


def swiglu_quant(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    t, i = gate_up.shape[0], gate_up.shape[1] // 2
    codes = torch.empty((t, i), dtype=torch.float8_e4m3fn, device=gate_up.device)
    scales = torch.empty((t, i // 32), dtype=torch.uint8, device=gate_up.device)
    if t:
        block = min(256, triton.next_power_of_2(i))
        _swiglu_quant[(t, triton.cdiv(i, block))](
            gate_up.contiguous(), codes.view(torch.uint8), scales, i, limit, BLOCK=block, PDL=PDL, num_warps=1,
            **options(),
        )  # fmt: skip
    return codes, scales


@triton.jit
def _norm_rope_pack_window(
    kv, weight, cos, sin, rec, N, stride, eps, SIZE: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row a program. A rotated column needs its neighbour: a second load of the same line."""
    c = tl.arange(0, BLOCK)
    turned = (c >= N - 2 * R) & (c < N)
    odd = (c - (N - 2 * R)) % 2
    other = tl.where(turned, c + 1 - 2 * odd, 0)
    w = f32(tl.load(weight + c, mask=c < N, other=0.0))
    w_other = f32(tl.load(weight + other, mask=turned, other=0.0))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    v = f32(tl.load(kv + row * stride + c, mask=c < N, other=0.0))
    v_other = f32(tl.load(kv + row * stride + other, mask=turned, other=0.0))
    pair = (c - (N - 2 * R)) // 2
    co = tl.load(cos + row * R + pair, mask=turned, other=1.0)
    si = tl.load(sin + row * R + pair, mask=turned, other=0.0)
    r = tl.rsqrt(tl.div_rn(tl.sum(v * v), tl.cast(N, tl.float32)) + eps)
    y = round_bf16(v * r * w)
    y_other = round_bf16(v_other * r * w_other)
    swapped = y_other * si
    turn = tl.where(odd == 1, y * co + swapped, y * co - swapped)  # -x is 0 - x here: a difference keeps a zero's sign
    y = tl.where(turned, round_bf16(turn), y)
    out = rec + row * SIZE
    _store_quantised(y, out, out + N, N, BLOCK)
    pad = tl.arange(0, 16)
    used = N + N // 32
    tl.store(out + used + pad, tl.zeros((16,), tl.uint8), mask=used + pad < SIZE)


def norm_rope_pack_window(kv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    if kv.stride(-1) != 1:
        kv = kv.contiguous()
    t, n = kv.shape
    size = records.window_bytes(n)
    rec = torch.empty((t, size), dtype=torch.uint8, device=kv.device)
    if t:
        block = triton.next_power_of_2(n)
        _norm_rope_pack_window[(t,)](
            kv, weight, cos.contiguous(), sin.contiguous(), rec, n, kv.stride(0), eps,
            SIZE=size, R=cos.shape[1], BLOCK=block, PDL=PDL, num_warps=norm_warps(block), **options(),
        )  # fmt: skip
    return rec


# ----------------------------------------------------------------------------------------------------------- compiling

_ANY = {90: "", 100: ""}
_FUSION = {"enable_fp_fusion": False}
_OUT = {"codes": "*u8", "scales": "*u8"}
VARIANTS = [
    Variant(
        _rms_norm_quant,
        {"x": "*bf16", "weight": "*bf16", **_OUT, "N": "i32", "stride": "i32", "eps": "fp32"},
        {"BLOCK": 2048, "PDL": 1},
        _ANY,
        {"num_warps": 4, **_FUSION},
    ),
    Variant(
        _swiglu_quant,
        {"gate_up": "*bf16", **_OUT, "width": "i32", "limit": "fp32"},
        {"BLOCK": 256, "PDL": 1},
        _ANY,
        {"num_warps": 1, **_FUSION},
    ),
    Variant(
        _norm_rope_pack_window,
        {
            **{"kv": "*bf16", "weight": "*bf16", "cos": "*fp32", "sin": "*fp32", "rec": "*u8"},
            **{"N": "i32", "stride": "i32", "eps": "fp32"},
        },
        {"SIZE": 528, "R": 32, "BLOCK": 512, "PDL": 1},
        _ANY,
        {"num_warps": 1, **_FUSION},
    ),
]
