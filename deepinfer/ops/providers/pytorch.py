"""torch's own operators (cuBLAS, fused attention, MXFP8 matmul), where one computes exactly an op of ours.

Belongs here: calls of public torch functions. Does not belong here: references, which are torch too but written to
define. cuBLAS and fused attention were timed on the H200 beside our kernels (bench/results/h200/ops.json); as providers
`linear` and `vision_attention` have not been seen to equal the references there.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.ops.providers import SM90, SM100, SM103, Binding, lacks_functions

FP32, BF16 = torch.float32, torch.bfloat16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_f32: bool) -> Tensor:
    """cuBLAS: float32 sums; a bias is added to them before the one rounding, as the reference does."""
    if x.dtype is FP32:
        y = x @ weight.float().t()
    elif bias is None and not out_f32:
        return F.linear(x, weight)
    else:
        y = torch.mm(x, weight.t(), out_dtype=FP32)
    if bias is not None:
        y = y + bias.float()
    return y if out_f32 else y.to(x.dtype)


def vision_attention(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Rotation in float32, then scaled_dot_product_attention (FlashAttention or cuDNN, as torch chooses)."""
    q, k, v = qkv.unflatten(1, (3, heads, -1)).unbind(1)  # [n, heads, d]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=2)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=2).to(qkv.dtype)

    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (rotate(q), rotate(k), v))  # [1, heads, n, d]
    return F.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1).flatten(1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def swizzle(scale: Tensor) -> Tensor:
    """E8M0 [M, K/32] in the order that block-scaled tensor cores load: tiles of 128 rows x 4 scales, zero-padded.

    Inside a tile byte (row % 32) * 16 + (row // 32 % 4) * 4 + column holds a scale (SwizzleType.SWIZZLE_32_4_4).
    """
    m, k = scale.shape
    padded = F.pad(scale, (0, -k % 4, 0, -m % 128))
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4)  # [M/128, row // 32, row % 32, K/128, column]
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def linear_fp8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """F.scaled_mm in MXFP8: every row of the weight has its own scale per 32 there, so ours are repeated."""
    from torch.nn.functional import ScalingType, SwizzleType

    per_row = weight_scale.repeat_interleave(32, dim=0)
    a, b = (swizzle(s).view(torch.float8_e8m0fnu) for s in (x_scale, per_row))
    out: Tensor = F.scaled_mm(
        x, weight.t(), a, ScalingType.BlockWise1x32, b, ScalingType.BlockWise1x32,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4, swizzle_b=SwizzleType.SWIZZLE_32_4_4, output_dtype=BF16,
    )  # fmt: skip
    return out


SCALED_MM = (
    "scaled_mm(mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a=None, swizzle_b=None,"
    " bias=None, output_dtype=torch.bfloat16, contraction_dim=(), use_fast_accum=False)"
)
ANY = (SM90, SM100, SM103)
BINDINGS = (
    Binding("linear", "torch", linear, archs=ANY),
    Binding("vision_attention", "torch", vision_attention, archs=ANY),
    Binding(
        "rms_norm",
        "torch",
        rms_norm,
        archs=ANY,
        measured={SM90: "equal to the reference; 5.2 us at one row where ours takes 1.4"},
    ),
    Binding(
        "linear_fp8",
        "torch",
        linear_fp8,
        archs=(SM100, SM103),
        refused={SM90: "scaled_mm takes MXFP8 on SM100 only; on SM90 one scale per tensor, row or 128"},
        recorded=SCALED_MM,
        why_not=functools.partial(lacks_functions, SCALED_MM, "torch.nn.functional"),
    ),
    Binding(
        "index_topk",
        "torch",
        always="torch.topk selects only, promises no order of ties, takes 110 us (64 rows of 131,072) to our 23",
    ),
)
