"""Norms and manifold-constrained hyper-connections (mHC): the small row-wise ops around every sublayer.

Belongs here: rms_norm, mix, collapse, write, rope, and everything between two sublayers as one op (hc_boundary). All
are functional and row-independent.
Does not belong here: which coefficients a sublayer uses when (model/hyper_connections.py).
Legend: T rows, C = 4 streams, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops import formats
from deepinfer.ops.common import MORE_ROWS, mm_rows, nbytes, randn, smooth
from deepinfer.ops.registry import define


def _norm_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for t in MORE_ROWS:
        yield (randn(g, t, 96), randn(g, 96), 1e-20)
    yield (torch.zeros(2, 96, dtype=torch.bfloat16), randn(g, 96), 1e-20)


@define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    fake=lambda x, weight, eps: torch.empty_like(x),
    inputs=_norm_inputs,
    cost=lambda x, w, eps: (4.0 * x.numel(), 2 * nbytes(x) + nbytes(w)),
    tolerance=5e-3,
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] * rsqrt(mean(x^2) + eps) * weight [H]; float32 inside, one cast to x.dtype. spec/model.md 5."""
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _rope_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for t in MORE_ROWS:
        angle = torch.rand((t, 8), generator=g) * 6.0
        yield (randn(g, t, 3, 32), angle.cos(), angle.sin(), False)
        yield (randn(g, t, 32), angle.cos(), angle.sin(), True)


@define(
    "rope(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor",
    fake=lambda x, cos, sin, inverse: torch.empty_like(x),
    inputs=_rope_inputs,
    cost=lambda x, cos, sin, inverse: (6.0 * x.numel(), 2 * nbytes(x) + nbytes(cos, sin)),
    tolerance=1e-3,
)
def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Rotate the last 2*R dims of x [T, D] or [T, h, D] in interleaved pairs; cos, sin float32 [T, R]. spec/model.md 6.

    `inverse` applies the conjugate rotation. float32 inside, cast back to x.dtype.
    """
    n = 2 * cos.shape[1]
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    sin = -sin if inverse else sin
    pairs = x[..., -n:].float().unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-n], rotated.to(x.dtype)), dim=-1)


def _mix_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for t in MORE_ROWS:
        fn = torch.randn((24, 4 * 64), generator=g) * 0.05
        yield (
            randn(g, t, 4, 64),
            fn,
            torch.randn(24, generator=g),
            torch.rand(3, generator=g),
            20,
            1e-6,
            1e-20,
        )


@define(
    "hc_mix(Tensor streams, Tensor fn, Tensor base, Tensor scale, int iters, float hc_eps, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    fake=lambda streams, fn, base, scale, iters, hc_eps, eps: (
        fn.new_empty((streams.shape[0], streams.shape[1])),
        fn.new_empty((streams.shape[0], streams.shape[1])),
        fn.new_empty((streams.shape[0], streams.shape[1], streams.shape[1])),
    ),
    inputs=_mix_inputs,
    cost=lambda r, fn, base, scale, it, he, e: (
        2.0 * r.shape[0] * fn.numel(),
        nbytes(r, fn) + 96.0 * r.shape[0],
    ),
    tolerance=1e-5,
)
def hc_mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, hc_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """mHC coefficients of one sublayer. spec/model.md 9.

    streams [T, C, H], fn float32 [C*(C+2), C*H], base [C*(C+2)], scale [3] ->
    float32 pre [T, C], post [T, C], comb [T, C, C] (doubly stochastic after `iters` Sinkhorn rounds).
    """
    c = streams.shape[1]
    u = streams.float().flatten(1)
    m = mm_rows(u, fn) * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
    pre = smooth(torch.sigmoid, m[:, :c] * scale[0] + base[:c]) + hc_eps
    post = 2.0 * smooth(torch.sigmoid, m[:, c : 2 * c] * scale[1] + base[c : 2 * c])
    logits = (m[:, 2 * c :] * scale[2] + base[2 * c :]).unflatten(1, (c, c))
    comb = smooth(lambda z: torch.softmax(z, dim=2), logits) + hc_eps
    comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    return pre, post, comb


def _collapse_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    yield from ((randn(g, t, 4, 64), torch.rand((t, 4), generator=g)) for t in MORE_ROWS)


@define(
    "hc_collapse(Tensor streams, Tensor pre) -> Tensor",
    fake=lambda streams, pre: streams.new_empty((streams.shape[0], streams.shape[2])),
    inputs=_collapse_inputs,
    cost=lambda r, pre: (2.0 * r.numel(), nbytes(r, pre) * 1.25),
    tolerance=1e-3,
)
def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """sum_i pre_i * R_i: streams [T, C, H], pre float32 [T, C] -> [T, H] in streams.dtype."""
    f = streams.float()
    y = pre[:, 0, None] * f[:, 0]
    for i in range(1, f.shape[1]):  # fixed order, not a reduction that BLAS or ATen may reorder
        y = y + pre[:, i, None] * f[:, i]
    return y.to(streams.dtype)


def _write_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for t in MORE_ROWS:
        yield (
            randn(g, t, 64),
            randn(g, t, 4, 64),
            torch.rand((t, 4), generator=g),
            torch.rand((t, 4, 4), generator=g),
        )


@define(
    "hc_write(Tensor y, Tensor streams, Tensor post, Tensor comb) -> Tensor",
    fake=lambda y, streams, post, comb: torch.empty_like(streams),
    inputs=_write_inputs,
    cost=lambda y, r, post, comb: (10.0 * r.numel(), 2 * nbytes(r) + nbytes(y, post, comb)),
    tolerance=1e-3,
)
def hc_write(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """R'_i = post_i * y + sum_j comb[j][i] * R_j: y [T, H], streams [T, C, H] -> [T, C, H]. spec/model.md 9."""
    f = streams.float()
    out = post.unsqueeze(2) * y.float().unsqueeze(1)
    for j in range(f.shape[1]):
        out = out + comb[:, j].unsqueeze(2) * f[:, j].unsqueeze(1)
    return out.to(streams.dtype)


def _boundary_inputs(g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for t in MORE_ROWS:
        yield (
            randn(g, t, 64),
            randn(g, t, 4, 64),
            torch.rand((t, 4), generator=g),
            torch.rand((t, 4, 4), generator=g),
            torch.rand((t, 4), generator=g),
            torch.randn((24, 4 * 64), generator=g) * 0.05,
            torch.randn(24, generator=g),
            torch.rand(3, generator=g),
            randn(g, 64),
            20,
            1e-6,
            1e-20,
        )


@define(
    "hc_boundary(Tensor y, Tensor streams, Tensor post, Tensor comb, Tensor pre, Tensor fn, Tensor base, Tensor scale,"
    " Tensor norm, int iters, float hc_eps, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=lambda y, streams, post, comb, pre, fn, base, scale, norm, iters, hc_eps, eps: (
        torch.empty_like(streams),
        fn.new_empty(pre.shape),
        fn.new_empty(post.shape),
        fn.new_empty(comb.shape),
        streams.new_empty(y.shape),
        streams.new_empty(y.shape, dtype=torch.float8_e4m3fn),
        streams.new_empty((y.shape[0], y.shape[1] // formats.BLOCK), dtype=torch.uint8),
    ),
    inputs=_boundary_inputs,
    cost=lambda y, r, post, comb, pre, fn, base, scale, norm, it, he, e: (
        12.0 * r.numel() + 2.0 * r.shape[0] * fn.numel(),
        2 * nbytes(r) + nbytes(y, norm, fn) + y.numel() * (3 + 1 / 32) + 192.0 * r.shape[0],
    ),
    tolerance=5e-3,
)
def hc_boundary(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    iters: int,
    hc_eps: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From the output of one sublayer to the quantised input of the next. spec/model.md 9.

    y [T, H], streams [T, C, H]; post [T, C], comb [T, C, C], pre [T, C] of the sublayer that made y; fn, base, scale,
    norm [H] of the next one -> (streams after it, pre, post, comb of the next one, its input x [T, H], and that as
    e4m3 codes [T, H] and E8M0 scales [T, H/32]).
    """
    streams = hc_write(y, streams, post, comb)
    mixed = hc_mix(streams, fn, base, scale, iters, hc_eps, eps)
    x = rms_norm(hc_collapse(streams, pre), norm, eps)
    return (streams, *mixed, x, *formats.quant_fp8(x))
