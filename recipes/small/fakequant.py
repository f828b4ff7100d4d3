"""The roundings of spec/model.md section 4 inside a differentiable graph: value rounded, gradient passed through.

Belongs here: quantise-dequantise of every format, equal to deepinfer/ops/formats.py bit for bit (tested).
Does not belong here: which tensor takes which format (twin.py), codes on disk (quantise.py).
All return x.dtype: every rounded value is exact in bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FP8_MAX, FP4_MAX = 448.0, 6.0
FLOOR = 1e-4  # least amax of FP8 groups
BLOCK, LATENT_BLOCK = 32, 16


def _pow2ceil(x: Tensor) -> Tensor:
    """Smallest power of two >= x (float32, positive, normal), from the bits."""
    bits = x.view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


def _e2m1(x: Tensor) -> Tensor:
    """Nearest even e2m1 value: steps of 1/2 below 2, 1 below 4, 2 above; saturates at 6."""
    a = x.abs().clamp_max(FP4_MAX)
    step = torch.where(a < 2.0, 0.5, torch.where(a < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(a / step) * step, x)


def _round_fp8(x: Tensor) -> Tensor:
    g = x.float().unflatten(-1, (-1, BLOCK))
    scale = _pow2ceil(g.abs().amax(-1, keepdim=True).clamp_min(FLOOR) / FP8_MAX)
    return (_e4m3(g / scale) * scale).flatten(-2).to(x.dtype)


def _round_fp8_block(w: Tensor) -> Tensor:
    g = w.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = _pow2ceil(g.abs().amax((1, 3), keepdim=True).clamp_min(FLOOR) / FP8_MAX)
    return (_e4m3(g / scale) * scale).reshape(w.shape).to(w.dtype)


def _round_fp4(x: Tensor) -> Tensor:
    g = x.float().unflatten(-1, (-1, BLOCK))
    scale = _pow2ceil(g.abs().amax(-1, keepdim=True).clamp_min(FP4_MAX * 2.0**-126) / FP4_MAX)
    return (_e2m1(g / scale) * scale).flatten(-2).to(x.dtype)


def _round_latent(x: Tensor) -> Tensor:
    g = x.float().unflatten(-1, (-1, LATENT_BLOCK))
    amax = g.abs().amax(-1, keepdim=True).clamp_min(FP4_MAX * 2.0**-9)
    scale = (amax / FP4_MAX).clamp(2.0**-9, FP8_MAX).to(torch.float8_e4m3fn).float()
    return (_e2m1(g / scale) * scale).flatten(-2).to(x.dtype)


def _straight_through(rounding: Any) -> Any:
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return rounding(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    return Rounded.apply


fp8 = _straight_through(_round_fp8)  # activations, window KV, Engram rows: per 32 along the last axis
fp8_block = _straight_through(_round_fp8_block)  # dense weights: per 32x32
fp4 = _straight_through(_round_fp4)  # expert weights, index queries and keys: per 32
latent_fp4 = _straight_through(_round_latent)  # compressed KV: per 16, e4m3 scale


def bf16(w: Tensor, like: Tensor) -> Tensor:
    """A BF16 parameter as a computation in `like.dtype` sees it."""
    return w.to(like.dtype)
