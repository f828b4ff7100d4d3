"""Dense linears and the activation quantiser in front of them.

Belongs here: everything that multiplies activations by a dense matrix. Does not belong here: experts (moe.py).
Shapes: T rows, K inputs, N outputs. Weights are [N, K] as stored. Sums are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops import formats
from deepinfer.ops.common import MORE_ROWS, fp8_weight, mm_rows, nbytes, randn
from deepinfer.ops.registry import define


def _quant_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    yield from ((randn(g, t, 96),) for t in MORE_ROWS)


@define(
    "quant_fp8(Tensor x) -> (Tensor, Tensor)",
    fake=lambda x: (
        torch.empty_like(x, dtype=torch.float8_e4m3fn),
        x.new_empty((*x.shape[:-1], x.shape[-1] // formats.BLOCK), dtype=torch.uint8),
    ),
    inputs=_quant_inputs,
    cost=lambda x: (3.0 * x.numel(), nbytes(x) * 1.5),
)
def quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP8 activation: x bf16 [T, K] -> (e4m3 [T, K], E8M0 uint8 [T, K/32]). spec/model.md 4."""
    return formats.quant_fp8(x)


def _fp8_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for t in MORE_ROWS:
        yield (*formats.quant_fp8(randn(g, t, 96)), *fp8_weight(g, 64, 96))


@define(
    "linear_fp8(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale) -> Tensor",
    fake=lambda x, x_scale, weight, weight_scale: x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16),
    inputs=_fp8_inputs,
    cost=lambda x, xs, w, ws: (
        2.0 * x.shape[0] * w.numel(),
        nbytes(x, xs, w, ws) + 2.0 * x.shape[0] * w.shape[0],
    ),
    tolerance=1e-3,
)
def linear_fp8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """FP8 linear: codes e4m3 [T, K] and E8M0 [T, K/32], weight e4m3 [N, K] and E8M0 [N/32, K/32] -> bf16 [T, N]."""
    w = formats.dequant_fp8_block(weight, weight_scale)
    return mm_rows(formats.dequant_fp8(x, x_scale), w).to(torch.bfloat16)


def _dequant_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for t in MORE_ROWS:
        yield (randn(g, t, 2 * 96), *fp8_weight(g, 2 * 64, 96), 2)
    yield (randn(g, 3, 96, dtype=torch.float32), *fp8_weight(g, 64, 96), 1)


@define(
    "linear_dequant(Tensor x, Tensor weight, Tensor weight_scale, int groups) -> Tensor",
    fake=lambda x, weight, weight_scale, groups: x.new_empty((x.shape[0], weight.shape[0])),
    inputs=_dequant_inputs,
    cost=lambda x, w, ws, groups: (
        2.0 * x.shape[0] * w.numel(),
        nbytes(x, w, ws) + float(x.element_size() * x.shape[0] * w.shape[0]),
    ),
    tolerance=1e-3,
)
def linear_dequant(x: Tensor, weight: Tensor, weight_scale: Tensor, groups: int) -> Tensor:
    """FP8 weight, unquantised activation, `groups` independent blocks (wo_a; and every FP8 linear of exact numerics).

    x [T, groups*K], weight e4m3 [groups*N, K], scales [groups*N/32, K/32] -> [T, groups*N] in x.dtype. spec/model.md
    6.7.
    """
    w = formats.dequant_fp8_block(weight, weight_scale).unflatten(0, (groups, -1))
    xg = x.float().unflatten(1, (groups, -1))
    return torch.cat([mm_rows(xg[:, i], w[i]) for i in range(groups)], dim=1).to(x.dtype)


def _linear_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for t in MORE_ROWS:
        yield (randn(g, t, 96), randn(g, 40, 96), None, True)
    yield (randn(g, 5, 96), randn(g, 40, 96), randn(g, 40), False)
    yield (randn(g, 5, 96, dtype=torch.float32), randn(g, 40, 96), None, False)


@define(
    "linear(Tensor x, Tensor weight, Tensor? bias, bool out_f32) -> Tensor",
    fake=lambda x, weight, bias, out_f32: x.new_empty(
        (x.shape[0], weight.shape[0]), dtype=torch.float32 if out_f32 else x.dtype
    ),
    inputs=_linear_inputs,
    cost=lambda x, w, b, f: (
        2.0 * x.shape[0] * w.numel(),
        nbytes(x, w, b) + (4.0 if f else 2.0) * x.shape[0] * w.shape[0],
    ),
    tolerance=1e-3,
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_f32: bool) -> Tensor:
    """BF16 weight [N, K], x [T, K] bf16 or float32, float32 sums -> [T, N] float32 or x.dtype. bias [N] optional."""
    y = mm_rows(x.float(), weight.float())
    if bias is not None:
        y += bias.float()
    return y if out_f32 else y.to(x.dtype)
