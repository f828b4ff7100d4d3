"""Norm and rotary embedding on CUDA.

Belongs here: kernels of rms_norm and rope of ops/hyper.py, launch options of the norm and hyper families. Does not
belong here: hyper-connections (hyper.py), norms fused with writes to the cache (cache.py).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.support import INTERPRET, bf16, f32

INTERPRETED = bool(INTERPRET.value)
PDL = not INTERPRETED  # programmatic dependent launch: 0.4 us a launch less in a captured graph


def options(**more: Any) -> dict[str, Any]:
    """Launch options: no implicit fma, and PDL where kernels are compiled."""
    return {} if INTERPRETED else {"enable_fp_fusion": False, "launch_pdl": PDL, **more}


@triton.jit
def as_type(x, pointer):
    """float32 -> the type that `pointer` points to (bf16 or float32)."""
    if pointer.dtype.element_ty == tl.bfloat16:
        return bf16(x)
    else:
        return x


@triton.jit
def _rms_norm(x, weight, out, N, stride, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row a program."""
    c = tl.arange(0, BLOCK)
    w = f32(tl.load(weight + c, mask=c < N, other=0.0))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    v = f32(tl.load(x + row * stride + c, mask=c < N, other=0.0))
    mean = tl.div_rn(tl.sum(v * v), tl.cast(N, tl.float32))
    tl.store(out + row * N + c, as_type(v * tl.rsqrt(mean + eps) * w, out), mask=c < N)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    n = x.shape[-1]
    if not (x.dim() == 2 and x.stride(1) == 1):
        x = x.contiguous()
    stride = x.stride(0) if x.dim() == 2 else n
    block = triton.next_power_of_2(n)
    _rms_norm[(out.numel() // n,)](
        x, weight, out, n, stride, eps, BLOCK=block, PDL=PDL, num_warps=norm_warps(block), **options()
    )
    return out


def norm_warps(block: int) -> int:
    """A function of the width alone: the order of the sum follows it."""
    return max(1, min(8, block // 512))


@triton.jit
def _rope(
    x, cos, sin, out, heads, t_stride, h_stride, HB: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr,
    INVERSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HB heads of one row. A rotated column needs its neighbour: a second load of the same line."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HB + tl.arange(0, HB)
    c = tl.arange(0, BD)
    turned = (c >= D - 2 * R) & (c < D)
    at = x + row * t_stride + h[:, None] * h_stride
    ok = (h < heads)[:, None] & (c < D)[None, :]
    raw = tl.load(at + c[None, :], mask=ok, other=0.0)
    odd = (c - (D - 2 * R)) % 2
    partner = f32(tl.load(at + (c + 1 - 2 * odd)[None, :], mask=ok & turned[None, :], other=0.0))
    pair = (c - (D - 2 * R)) // 2
    co = tl.load(cos + row * R + pair, mask=turned, other=1.0)[None, :]
    si = tl.load(sin + row * R + pair, mask=turned, other=0.0)[None, :]
    # a difference, not a sum with the negative: 0 - x, which negation is here, turns the sign of a zero
    value = tl.where((odd != INVERSE)[None, :], f32(raw) * co + partner * si, f32(raw) * co - partner * si)
    target = out + (row * heads + h[:, None]) * D + c[None, :]
    tl.store(target, tl.where(turned[None, :], as_type(value, out), raw), mask=ok)


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    if x.stride(-1) != 1:
        x = x.contiguous()
    t, heads, d = (x.shape[0], 1, x.shape[1]) if x.dim() == 2 else x.shape
    bd = triton.next_power_of_2(d)
    hb = max(1, min(triton.next_power_of_2(heads), 4096 // bd))
    _rope[(t, triton.cdiv(heads, hb))](
        x, cos.contiguous(), sin.contiguous(), out, heads, x.stride(0), x.stride(1) if x.dim() == 3 else d,
        HB=hb, D=d, BD=bd, R=cos.shape[1], INVERSE=inverse, PDL=PDL, num_warps=4, **options(),
    )  # fmt: skip
    return out


# ----------------------------------------------------------------------------------------------------------- compiling

_ANY = {90: "", 100: ""}
_FUSION = {"enable_fp_fusion": False}
VARIANTS = [
    Variant(
        _rms_norm,
        {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "N": "i32", "stride": "i32", "eps": "fp32"},
        {"BLOCK": 8192, "PDL": 1},
        _ANY,
        {"num_warps": 8, **_FUSION},
    ),
    Variant(
        _rope,
        {
            "x": "*bf16",
            "cos": "*fp32",
            "sin": "*fp32",
            "out": "*bf16",
            "heads": "i32",
            "t_stride": "i32",
            "h_stride": "i32",
        },
        {"HB": 8, "D": 512, "BD": 512, "R": 32, "INVERSE": 0, "PDL": 1},
        _ANY,
        {"num_warps": 4, **_FUSION},
    ),
]
