"""Chains of small ops as one op: what the passes of deepinfer/compile put in place of them.

Belongs here: ops whose reference is a chain of other references, so that nothing but the number of launches and of
trips to memory changes. Does not belong here: new maths.
Legend: T rows, H or D width of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops import formats, records
from deepinfer.ops.common import ROWS, nbytes, randn
from deepinfer.ops.hyper import rms_norm, rope
from deepinfer.ops.moe import swiglu
from deepinfer.ops.registry import define


def _quantised(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    shape = x.shape[:-1]
    return (
        x.new_empty((*shape, width), dtype=torch.float8_e4m3fn),
        x.new_empty((*shape, width // formats.BLOCK), dtype=torch.uint8),
    )


def _norm_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for t in ROWS:
        yield (randn(g, t, 96), randn(g, 96), 1e-20)
    yield (randn(g, 5, 224)[:, :96], randn(g, 96), 1e-20)  # columns of a wider row
    yield (torch.zeros(2, 96, dtype=torch.bfloat16), randn(g, 96), 1e-20)


@define(
    "rms_norm_quant(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    fake=lambda x, weight, eps: _quantised(x, x.shape[-1]),
    inputs=_norm_inputs,
    cost=lambda x, w, eps: (7.0 * x.numel(), nbytes(x) * 1.5 + nbytes(w)),
    tolerance=1e-2,
)
def rms_norm_quant(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """quant_fp8(rms_norm(x, weight, eps)): x bf16 [T, H] -> (e4m3 [T, H], E8M0 [T, H/32])."""
    return formats.quant_fp8(rms_norm(x, weight, eps))


def _swiglu_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    yield from ((randn(g, t, 64) * 8, 10.0) for t in ROWS)


@define(
    "swiglu_quant(Tensor gate_up, float limit) -> (Tensor, Tensor)",
    fake=lambda gate_up, limit: _quantised(gate_up, gate_up.shape[1] // 2),
    inputs=_swiglu_inputs,
    cost=lambda x, limit: (9.0 * x.numel(), nbytes(x) * 1.25),
    tolerance=1e-2,
)
def swiglu_quant(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """quant_fp8(swiglu(gate_up, limit)): bf16 [T, 2I] -> (e4m3 [T, I], E8M0 [T, I/32])."""
    return formats.quant_fp8(swiglu(gate_up, limit))


def _window_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for t in ROWS:
        angle = torch.rand((t, 16), generator=g) * 6.0
        yield (randn(g, t, 64), randn(g, 64), angle.cos(), angle.sin(), 1e-20)


@define(
    "norm_rope_pack_window(Tensor kv, Tensor weight, Tensor cos, Tensor sin, float eps) -> Tensor",
    fake=lambda kv, *rest: kv.new_empty((kv.shape[0], records.window_bytes(kv.shape[1])), dtype=torch.uint8),
    inputs=_window_inputs,
    cost=lambda kv, w, cos, sin, eps: (13.0 * kv.numel(), nbytes(kv) * 1.5 + nbytes(w, cos, sin)),
    tolerance=1e-2,
)
def norm_rope_pack_window(kv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Window record of a key: pack_window(rope(rms_norm(kv, weight), cos, sin)). kv bf16 [T, D], cos, sin [T, R]."""
    return records.pack_window(rope(rms_norm(kv, weight, eps), cos, sin, False))
