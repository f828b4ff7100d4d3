"""Sinkhorn normalisation of mHC with a backward pass that keeps the sums only.

Belongs here: the operation on CPU (torch) and CUDA (one Triton kernel each way). Does not belong here: mHC (twin.py).

Each half step divides by the sums s of one axis: c' = c / s. From c' and s follow c = c' * s and
dL/dc = (g - sum(g * c')) / s, so that the backward pass runs from the result and the saved sums; autograd would keep
forty matrices a row. As separate kernels the forty half steps would cost more than the rest of a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU only
    triton = None

ROWS = 128  # matrices a program holds


def _forward(comb: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor]:
    sums = []
    for i in range(2 * iters - 1):  # columns first, then rows and columns in turn
        s = comb.sum(1 + i % 2, keepdim=True) + eps
        comb = comb / s
        sums.append(s.flatten(1))
    return comb, torch.stack(sums)


def _backward(comb: Tensor, sums: Tensor, grad: Tensor) -> Tensor:
    for i in reversed(range(sums.shape[0])):
        axis = 1 + i % 2
        s = sums[i].unsqueeze(axis)
        grad = (grad - (grad * comb).sum(axis, keepdim=True)) / s
        comb = comb * s
    return grad


if triton is not None:

    @triton.jit
    def _forward_kernel(x, out, sums, n, eps, HALF_STEPS: tl.constexpr, BLOCK: tl.constexpr):
        rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        four = tl.arange(0, 4)
        at = rows[:, None, None] * 16 + four[None, :, None] * 4 + four[None, None, :]
        live = (rows < n)[:, None, None]
        vector = rows[:, None] * 4 + four[None, :]
        comb = tl.load(x + at, mask=live, other=1.0)
        for i in tl.static_range(HALF_STEPS):
            s = tl.sum(comb, axis=1 + i % 2) + eps
            tl.store(sums + i * n * 4 + vector, s, mask=(rows < n)[:, None])
            comb = comb / tl.expand_dims(s, 1 + i % 2)
        tl.store(out + at, comb, mask=live)

    @triton.jit
    def _backward_kernel(x, sums, grad, out, n, HALF_STEPS: tl.constexpr, BLOCK: tl.constexpr):
        rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        four = tl.arange(0, 4)
        at = rows[:, None, None] * 16 + four[None, :, None] * 4 + four[None, None, :]
        live = (rows < n)[:, None, None]
        vector = rows[:, None] * 4 + four[None, :]
        comb = tl.load(x + at, mask=live, other=0.0)
        g = tl.load(grad + at, mask=live, other=0.0)
        for i in tl.static_range(HALF_STEPS - 1, -1, -1):
            s = tl.expand_dims(tl.load(sums + i * n * 4 + vector, mask=(rows < n)[:, None], other=1.0), 1 + i % 2)
            g = (g - tl.expand_dims(tl.sum(g * comb, axis=1 + i % 2), 1 + i % 2)) / s
            comb = comb * s
        tl.store(out + at, g, mask=live)


def _use_kernel(comb: Tensor) -> bool:
    return triton is not None and comb.is_cuda and comb.shape[1] == 4


@torch.library.custom_op("recipes_small::sinkhorn", mutates_args=())
def _sinkhorn(comb: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor]:
    if not _use_kernel(comb):
        return _forward(comb, iters, eps)
    return launch_forward(comb.contiguous(), iters, eps)


@torch.library.custom_op("recipes_small::sinkhorn_backward", mutates_args=())
def _sinkhorn_backward(comb: Tensor, sums: Tensor, grad: Tensor) -> Tensor:
    if not _use_kernel(comb):
        return _backward(comb, sums, grad)
    return launch_backward(comb, sums, grad.contiguous())


def launch_forward(comb: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor]:
    n, half = comb.shape[0], 2 * iters - 1
    out, sums = torch.empty_like(comb), comb.new_empty((half, n, 4))
    _forward_kernel[(triton.cdiv(n, ROWS),)](comb, out, sums, n, eps, HALF_STEPS=half, BLOCK=ROWS)
    return out, sums


def launch_backward(comb: Tensor, sums: Tensor, grad: Tensor) -> Tensor:
    n, out = comb.shape[0], torch.empty_like(comb)
    _backward_kernel[(triton.cdiv(n, ROWS),)](comb, sums, grad, out, n, HALF_STEPS=sums.shape[0], BLOCK=ROWS)
    return out


@_sinkhorn.register_fake
def _(comb: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor]:
    n = comb.shape[1]
    return torch.empty_like(comb), comb.new_empty((2 * iters - 1, comb.shape[0], n))


@_sinkhorn_backward.register_fake
def _(comb: Tensor, sums: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(comb)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output)


def _grad(ctx: Any, grad: Tensor, _sums: Tensor) -> tuple[Tensor, None, None]:
    return _sinkhorn_backward(*ctx.saved_tensors, grad), None, None


_sinkhorn.register_autograd(_grad, setup_context=_setup)


def sinkhorn(comb: Tensor, iters: int, eps: float) -> Tensor:
    """comb float32 [N, C, C], positive -> nearly doubly stochastic after `iters` rounds (spec/model.md 9)."""
    return _sinkhorn(comb.contiguous(), iters, eps)[0]
