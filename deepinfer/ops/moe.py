"""Mixture of experts: routing, clamped SwiGLU, routed experts.

Belongs here: router, expert GEMMs, activation. Does not belong here: exchange between ranks (deepinfer/parallel).
Legend: T rows, H hidden, I expert width, E experts, K chosen experts. `w13` holds gate rows, then up rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops import formats
from deepinfer.ops.common import MORE_ROWS, fp4_weight, mm_rows, nbytes, randn, smooth
from deepinfer.ops.registry import define


def _router_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    bias, bias_vl = torch.randn((2, 12), generator=g) * 0.1
    for t in MORE_ROWS:
        yield (randn(g, t, 96), randn(g, 12, 96), bias, bias_vl, torch.arange(t) % 3 == 0, 3, 1.5)
    some = torch.randn((2, 384), generator=g) * 0.1
    yield (randn(g, 7, 96), randn(g, 384, 96), *some, torch.arange(7) % 2 == 0, 6, 1.5)
    yield (
        randn(g, 4, 96),
        torch.zeros(300, 96).bfloat16(),
        torch.zeros(300),
        torch.zeros(300),
        torch.zeros(4) > 0,
        6,
        1.5,
    )


@define(
    "router(Tensor x, Tensor weight, Tensor bias, Tensor bias_vl, Tensor is_image, int k, float scale)"
    " -> (Tensor, Tensor)",
    fake=lambda x, weight, bias, bias_vl, is_image, k, scale: (
        x.new_empty((x.shape[0], k), dtype=torch.int32),
        x.new_empty((x.shape[0], k), dtype=torch.float32),
    ),
    inputs=_router_inputs,
    cost=lambda x, w, b, bv, im, k, s: (2.0 * x.shape[0] * w.numel(), nbytes(x, w, b)),
    tolerance=1e-4,
)
def router(
    x: Tensor, weight: Tensor, bias: Tensor, bias_vl: Tensor, is_image: Tensor, k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """sqrt(softplus) scores, bias only for the choice (bias_vl on image rows), ties to the lower id. spec/model.md 7.

    x [T, H], weight bf16 [E, H], bias/bias_vl float32 [E], is_image bool [T] ->
    ids int32 [T, k] ascending, weights float32 [T, k] that sum to `scale`.
    """
    s = torch.sqrt(smooth(torch.nn.functional.softplus, mm_rows(x.float(), weight.float())))
    choice = s + torch.where(is_image.unsqueeze(1), bias_vl, bias)
    ids = torch.sort(choice, dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
    w = s.gather(1, ids)
    total = w[:, 0]
    for i in range(1, k):  # slot order
        total = total + w[:, i]
    return ids.to(torch.int32), w / (total + 1e-20).unsqueeze(1) * scale


def _swiglu_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    yield from ((randn(g, t, 64) * 8, 10.0) for t in MORE_ROWS)


@define(
    "swiglu(Tensor gate_up, float limit) -> Tensor",
    fake=lambda gate_up, limit: gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2)),
    inputs=_swiglu_inputs,
    cost=lambda x, limit: (6.0 * x.numel(), nbytes(x) * 1.5),
    tolerance=1e-3,
)
def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit): [T, 2I] -> [T, I] in gate_up.dtype, float32 inside."""
    return _swiglu(gate_up, limit).to(gate_up.dtype)


def _swiglu(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=1)
    return smooth(torch.nn.functional.silu, gate.clamp_max(limit)) * up.clamp(-limit, limit)


def _expert_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    e, h, i = 6, 96, 32
    weights = (*fp4_weight(g, e, 2 * i, h), *fp4_weight(g, e, h, i))
    for t in MORE_ROWS:
        ids = torch.stack([torch.randperm(e, generator=g)[:2] for _ in range(t)] or [torch.zeros(2)])[:t].int()
        w = torch.rand((t, 2), generator=g)
        yield (*formats.quant_fp8(randn(g, t, h)), ids, w, *weights, 10.0)
        same = torch.tensor([0, 3], dtype=torch.int32).repeat(t, 1)
        yield (*formats.quant_fp8(randn(g, t, h)), same, w, *weights, 10.0)  # all rows on two experts
    many = 300  # expert ids beyond a byte
    wide = (*fp4_weight(g, many, 2 * i, h), *fp4_weight(g, many, h, i))
    high = torch.stack([many - 1 - torch.randperm(60, generator=g)[:2].sort(descending=True).values for _ in range(7)])
    yield (*formats.quant_fp8(randn(g, 7, h)), high.int(), torch.rand((7, 2), generator=g), *wide, 10.0)
    yield (randn(g, 3, h, dtype=torch.float32), None, ids[:3], w[:3], *weights, 10.0)


def _expert_cost(x: Tensor, xs: Tensor, ids: Tensor, *rest: Any) -> tuple[float, float]:
    w13, s13, w2, s2 = rest[1:5]
    used = float(torch.unique(ids).numel()) / w13.shape[0]
    per_row = 4.0 * (w13[0].numel() + w2[0].numel())
    return ids.numel() * per_row, used * nbytes(w13, s13, w2, s2) + nbytes(x, xs) + 4.0 * x.numel()


@define(
    "experts(Tensor x, Tensor? x_scale, Tensor ids, Tensor weights, Tensor w13, Tensor w13_scale, Tensor w2,"
    " Tensor w2_scale, float limit) -> Tensor",
    fake=lambda x, *rest: x.new_empty(x.shape, dtype=torch.float32),
    inputs=_expert_inputs,
    cost=_expert_cost,
    tolerance=5e-3,
)
def experts(
    x: Tensor,
    x_scale: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    limit: float,
) -> Tensor:
    """Routed experts, FP4 weights. spec/model.md 7.

    x e4m3 [T, H] with E8M0 x_scale [T, H/32] (exact: float32, None); ids int32 [T, K] ascending, weights float32 [T,
    K]; w13 uint8 [E, 2I, H/2], w2 uint8 [E, H, I/2], scales E8M0 per 32 along the input -> float32 [T, H], summed in
    slot order. The routing weight multiplies the activation before it is rounded for w2.
    """
    exact = x_scale is None
    f = x if x_scale is None else formats.dequant_fp8(x, x_scale)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in torch.unique(ids).tolist():  # ascending experts = ascending slots of every row
        row, slot = (ids == e).nonzero(as_tuple=True)
        gate_up = mm_rows(f[row], formats.dequant_fp4(w13[e], w13_scale[e]))
        if not exact:
            gate_up = gate_up.bfloat16().float()
        act = _swiglu(gate_up, limit) * weights[row, slot].unsqueeze(1)
        if not exact:
            act = formats.dequant_fp8(*formats.quant_fp8(act.bfloat16()))
        y = mm_rows(act, formats.dequant_fp4(w2[e], w2_scale[e]))
        out[row] += y if exact else y.bfloat16().float()  # a row meets an expert at most once
    return out
