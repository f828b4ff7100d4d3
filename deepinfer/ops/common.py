"""Helpers that op families share: row-blocked matmul, byte counts, random example inputs.

Belongs here: what at least two families need. Does not belong here: ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.ops import formats

ROWS = (0, 1, 2, 7, 33)  # row counts every op is tried with: empty, single, pair, odd, over one block
MORE_ROWS = (*ROWS, 64)
MANY_PAGES = 33_000  # pages of an example pool whose used pages have ids beyond 2^15
ROW_BLOCK = 32


def mm_rows(x: Tensor, w: Tensor) -> Tensor:
    """x @ w.T in float32, a fixed number of rows a call: [M, K], [N, K] -> [M, N].

    BLAS picks another kernel (and summation order) for another M. Padding every call to ROW_BLOCK rows keeps a row's
    bits independent of how many rows there are.
    """
    m, wt = x.shape[0], w.t()
    out = x.new_empty((m, w.shape[0]), dtype=torch.float32)
    for i in range(0, m, ROW_BLOCK):
        n = min(ROW_BLOCK, m - i)
        block = x.new_zeros((ROW_BLOCK, x.shape[1]), dtype=torch.float32)
        block[:n] = x[i : i + n]
        out[i : i + n] = (block @ wt)[:n]
    return out


def smooth(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """fn(x) for a transcendental fn, float32 in and out, evaluated in float64.

    ATen's vectorised float32 exp, sigmoid or cos differ in the last bit from its scalar tail, so a row's bits would
    depend on its place in the tensor. Rounding the float64 value once hides that.
    """
    return fn(x.double()).float()


def nbytes(*tensors: Tensor | None) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors if t is not None))


def randn(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=g).to(dtype)


def high_pages(g: torch.Generator, *shape: int) -> Tensor:
    """Page table int32 of `shape`, no page twice, all ids just below MANY_PAGES and none zero."""
    count = math.prod(shape)
    return (MANY_PAGES - 1 - torch.randperm(count, generator=g)).view(shape).int()


def fp8_weight(g: torch.Generator, n: int, k: int) -> tuple[Tensor, Tensor]:
    return formats.quant_fp8_block(torch.randn((n, k), generator=g) * k**-0.5)


def fp4_weight(g: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    return formats.quant_fp4(torch.randn(shape, generator=g) * shape[-1] ** -0.5)
