"""Norms, rotary embedding and hyper-connections on CUDA.

Belongs here: kernels of ops/hyper.py. Does not belong here: their definition.

Everything between two sublayers (`hc_boundary`) is two launches. `_project` takes 64 rows and a slice of the hidden
width: it writes the streams, sums them up into the next input before its norm, and multiplies them by the slice of fn.
`_finish` adds the slices in their order, makes the coefficients (Sinkhorn in registers), norms and quantises.
`hc_mix` is the same pair without its other half.

The product with fn is exact to float32: a stream is bf16, an element of fn the exact sum of three bf16, so three bf16
products on tensor cores replace one of float32. Tensor cores truncate when they add, so a sum of 128 products is
promoted by an ordinary addition. The slices of a sum depend on H alone: a row's bits do not depend on its batch.
Kernels let the next one start after their own wait, never before: what a kernel has waited for is complete for all
later ones, so these may read weights, and the second half of a split `hc_boundary` its streams, without waiting.
All sums are explicit fma or plain additions (`enable_fp_fusion` off), so variants of a kernel have the same bits.
Legend: T rows, 4 streams, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer.ops import hyper as references
from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.support import INTERPRET, bf16, e4m3_code, e8m0_ceil, e8m0_value, f32, round_bf16

INTERPRETED = bool(INTERPRET.value)
PDL = not INTERPRETED  # programmatic dependent launch: 0.4 us a launch less in a captured graph
BM, BK = 64, 32  # rows and columns (of every stream) of a tile: 64 x 128 against fn
WARPS, REGISTERS = 8, 128  # two programs on an SM; the kernel takes 141 when it may
GROUP = 5  # tiles of a slice
FEW_ROWS = (
    128  # up to here a program takes one tile (160 programs at H = 5120), above a whole slice (32 programs a row tile)
)
BLOCK_ROWS = (
    2048  # rows of a pair of launches: the second finds what the first wrote in L2 (21 MB of rows, 8 MB of sums)
)


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


# --------------------------------------------------------------------------------------------------------- norm, rope


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
        x, weight, out, n, stride, eps, BLOCK=block, PDL=PDL, num_warps=_norm_warps(block), **options()
    )
    return out


def _norm_warps(block: int) -> int:
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
    if INVERSE:
        si = -si
    value = f32(raw) * co + tl.where((odd == 1)[None, :], partner * si, -(partner * si))
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


# --------------------------------------------------------------------------------------------- single steps of a row


@triton.jit
def _collapse(streams, pre, out, H, C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(C):
        part = tl.load(pre + row * C + i) * f32(tl.load(streams + (row * C + i) * H + c, mask=c < H, other=0.0))
        total = part if i == 0 else total + part
    tl.store(out + row * H + c, as_type(total, out), mask=c < H)


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    t, c, h = streams.shape
    out = torch.empty((t, h), dtype=streams.dtype, device=streams.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(h))
        _collapse[(t, triton.cdiv(h, block))](
            streams.contiguous(), pre.contiguous(), out, h, C=c, BLOCK=block, PDL=PDL, num_warps=4, **options()
        )
    return out


@triton.jit
def _write(y, streams, post, comb, out, H, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < H
    v = f32(tl.load(y + row * H + c, mask=ok, other=0.0))
    at = streams + row * 4 * H + c
    f0 = f32(tl.load(at, mask=ok, other=0.0))
    f1 = f32(tl.load(at + H, mask=ok, other=0.0))
    f2 = f32(tl.load(at + 2 * H, mask=ok, other=0.0))
    f3 = f32(tl.load(at + 3 * H, mask=ok, other=0.0))
    for i in tl.static_range(4):
        m = comb + row * 16 + i
        total = tl.load(post + row * 4 + i) * v + tl.load(m) * f0
        total = total + tl.load(m + 4) * f1 + tl.load(m + 8) * f2 + tl.load(m + 12) * f3
        tl.store(out + (row * 4 + i) * H + c, as_type(total, out), mask=ok)


def hc_write(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    t, c, h = streams.shape
    if c != 4:
        return references.hc_write(y, streams, post, comb)
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if out.numel():
        block = min(1024, triton.next_power_of_2(h))
        _write[(t, triton.cdiv(h, block))](
            y.contiguous(), streams.contiguous(), post.contiguous(), comb.contiguous(), out, h,
            BLOCK=block, PDL=PDL, num_warps=4, **options(),
        )  # fmt: skip
    return out


# ---------------------------------------------------------------------------------------------------- mix and boundary


@triton.jit
def _rounded(x):
    """float32 -> nearest bf16 as float32."""
    if INTERPRET:
        return round_bf16(x)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _top(x):
    """The upper 16 bits: a bf16 value, truncated."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _add_products(acc, a, w):
    """acc + a w^T: a bf16 [BM, K], w float32 [N, K]. An fma by 1 is an addition that no dot may take over."""
    if INTERPRET:
        return acc + tl.dot(f32(a), tl.trans(w), input_precision="ieee")
    else:
        high = _top(w)
        rest = w - high
        middle = _top(rest)
        d0 = tl.dot(a, tl.trans(high.to(tl.bfloat16)))
        d1 = tl.dot(a, tl.trans(middle.to(tl.bfloat16)))
        d2 = tl.dot(a, tl.trans((rest - middle).to(tl.bfloat16)))
        return tl.fma(tl.fma(tl.fma(d2, 1.0, d1), 1.0, d0), 1.0, acc)


@triton.jit
def _once(x):
    """x bf16, opaque to the compiler, which else computes the streams a second time in the tensor cores' layout: 255
    registers instead of 150.
    """
    if INTERPRET:
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.bfloat16, False, 2)


@triton.jit
def _mixed(v, f0, f1, f2, f3, post, comb, row, ok, i: tl.constexpr):
    """Stream i after a sublayer, rounded: post_i y + sum_j comb[j][i] R_j."""
    m = comb + row * 16 + i
    r = tl.load(post + row * 4 + i, mask=ok, other=0.0)[:, None] * v
    r = tl.fma(tl.load(m, mask=ok, other=0.0)[:, None], f0, r)
    r = tl.fma(tl.load(m + 4, mask=ok, other=0.0)[:, None], f1, r)
    r = tl.fma(tl.load(m + 8, mask=ok, other=0.0)[:, None], f2, r)
    return _once(bf16(tl.fma(tl.load(m + 12, mask=ok, other=0.0)[:, None], f3, r)))


@triton.jit(do_not_specialize=["T"])
def _project(
    y, streams, post, comb, pre, fn, out, x, sums, T,
    H: tl.constexpr, SLOTS: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, WRITE: tl.constexpr,
    FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BM rows x TILES tiles of BK columns. Grid (row tiles x SLOTS). sums float32 [SLOTS, T, 32].

    Columns of sums: 24 products with fn, sum of squares of the streams, of the collapsed row. WRITE 0: streams are
    taken as they are (hc_mix). FIRST 0: this launch follows one of the same op that it does not depend on, so it waits
    at its end only (a later kernel that waits for this one must find the earlier ones complete).
    """
    if PDL and not FIRST:
        gdc_launch_dependents()
    slot = tl.program_id(0) % SLOTS
    row = tl.program_id(0) // SLOTS * BM + tl.arange(0, BM)
    ok = row < T
    row = row.to(tl.int64)
    col = tl.arange(0, BK)
    n = tl.arange(0, 32)
    k = tl.arange(0, 4 * BK)
    # weights are older than any kernel that may still run: read before the wait
    fn_at = fn + n[:, None] * (4 * H) + (k // BK * H + k % BK)[None, :]
    first = slot * TILES * BK
    w = tl.load(fn_at + first, mask=(n < 24)[:, None] & (first + k % BK < H)[None, :], other=0.0)
    if PDL and FIRST:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BM, 32), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    x_squares = tl.zeros((BM,), tl.float32)
    for t in range(0, TILES):
        c = first + t * BK + col
        inside = ok[:, None] & (c < H)[None, :]
        at = row[:, None] * (4 * H) + c[None, :]
        s0 = tl.load(streams + at, mask=inside, other=0.0)
        s1 = tl.load(streams + H + at, mask=inside, other=0.0)
        s2 = tl.load(streams + 2 * H + at, mask=inside, other=0.0)
        s3 = tl.load(streams + 3 * H + at, mask=inside, other=0.0)
        if WRITE:
            flat = row[:, None] * H + c[None, :]
            v = f32(tl.load(y + flat, mask=inside, other=0.0))
            f0, f1, f2, f3 = f32(s0), f32(s1), f32(s2), f32(s3)
            s0 = _mixed(v, f0, f1, f2, f3, post, comb, row, ok, 0)
            tl.store(out + at, s0, mask=inside)
            s1 = _mixed(v, f0, f1, f2, f3, post, comb, row, ok, 1)
            tl.store(out + H + at, s1, mask=inside)
            s2 = _mixed(v, f0, f1, f2, f3, post, comb, row, ok, 2)
            tl.store(out + 2 * H + at, s2, mask=inside)
            s3 = _mixed(v, f0, f1, f2, f3, post, comb, row, ok, 3)
            tl.store(out + 3 * H + at, s3, mask=inside)
            z = tl.load(pre + row * 4, mask=ok, other=0.0)[:, None] * f32(s0)
            z = tl.fma(tl.load(pre + row * 4 + 1, mask=ok, other=0.0)[:, None], f32(s1), z)
            z = tl.fma(tl.load(pre + row * 4 + 2, mask=ok, other=0.0)[:, None], f32(s2), z)
            z = bf16(tl.fma(tl.load(pre + row * 4 + 3, mask=ok, other=0.0)[:, None], f32(s3), z))
            tl.store(x + flat, z, mask=inside)
            x_squares += tl.sum(f32(z) * f32(z), 1)
        g0, g1, g2, g3 = f32(s0), f32(s1), f32(s2), f32(s3)
        squares += tl.sum(tl.fma(g3, g3, tl.fma(g2, g2, tl.fma(g1, g1, g0 * g0))), 1)
        # [BM, BK, stream % 2, stream // 2] -> [BM, stream, BK]
        a = tl.join(tl.join(s0, s1), tl.join(s2, s3)).permute(0, 3, 2, 1).reshape(BM, 4 * BK)
        acc = _add_products(acc, a, w)
        more = (t + 1 < TILES) & (first + (t + 1) * BK + k % BK < H)
        w = tl.load(fn_at + first + (t + 1) * BK, mask=(n < 24)[:, None] & more[None, :], other=0.0)
    acc = tl.where((n == 24)[None, :], squares[:, None], tl.where((n == 25)[None, :], x_squares[:, None], acc))
    tl.store(
        sums + (tl.cast(slot, tl.int64) * T + row)[:, None] * 32 + n[None, :], acc, mask=ok[:, None] & (n < 26)[None, :]
    )
    if PDL and not FIRST:
        gdc_wait()


@triton.jit
def _total(at, step, mask, SLOTS: tl.constexpr, EACH: tl.constexpr):
    """Sum of SLOTS partial sums, EACH by EACH: the same bits whether `_project` or this adds the tiles of a slice."""
    total = tl.load(at, mask=mask, other=0.0)
    for c in tl.static_range(1, EACH):
        if c < SLOTS:
            total += tl.load(at + c * step, mask=mask, other=0.0)
    for s in tl.static_range(EACH, SLOTS, EACH):
        part = tl.load(at + s * step, mask=mask, other=0.0)
        for c in tl.static_range(1, EACH):
            if s + c < SLOTS:
                part += tl.load(at + (s + c) * step, mask=mask, other=0.0)
        total += part
    return total


@triton.jit
def _eight(x, BR: tl.constexpr):
    """[BR, 8] -> its columns."""
    even, odd = tl.split(x.reshape(BR, 4, 2))
    x04, x26 = tl.split(even.reshape(BR, 2, 2))
    x15, x37 = tl.split(odd.reshape(BR, 2, 2))
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _shares(a, b, c, d, eps):
    """Four numbers over their sum."""
    r = 1.0 / (a + b + c + d + eps)
    return a * r, b * r, c * r, d * r


@triton.jit
def _softmax(a, b, c, d, hc_eps):
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = _shares(tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top), 0.0)
    return a + hc_eps, b + hc_eps, c + hc_eps, d + hc_eps


@triton.jit
def _store4(at, a, b, c, d, ok):
    tl.store(at, a, mask=ok)
    tl.store(at + 1, b, mask=ok)
    tl.store(at + 2, c, mask=ok)
    tl.store(at + 3, d, mask=ok)


@triton.jit
def _coefficients(
    sums, base, scale, pre, post, comb, row, T, H, iters, hc_eps, eps,
    SLOTS: tl.constexpr, EACH: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """pre, post, comb of BR rows; a lane has all 24 numbers of a row."""
    ok = row < T
    row = row.to(tl.int64)
    n = tl.arange(0, 32)
    at = sums + row[:, None] * 32 + n[None, :]
    total = _total(at, tl.cast(T, tl.int64) * 32, ok[:, None] & (n < 25)[None, :], SLOTS, EACH)
    s0, s1, s2 = tl.load(scale), tl.load(scale + 1), tl.load(scale + 2)
    factor = tl.where(n < 4, s0, tl.where(n < 8, s1, s2))
    shift = tl.load(base + n, mask=n < 24, other=0.0)
    square = tl.sum(tl.where((n == 24)[None, :], total, 0.0), 1)
    r = tl.rsqrt(tl.div_rn(square, 4.0 * H) + eps)
    logit = tl.fma(total * r[:, None], factor[None, :], shift[None, :])
    # columns n = 4 q + j: [BR, q, j] -> four tensors [BR, q]
    j02, j13 = tl.split(logit.reshape(BR, 8, 2, 2))
    j0, j2 = tl.split(j02)
    j1, j3 = tl.split(j13)
    p0, o0, a0, b0, c0, d0, _a, _b = _eight(j0, BR)
    p1, o1, a1, b1, c1, d1, _a, _b = _eight(j1, BR)
    p2, o2, a2, b2, c2, d2, _a, _b = _eight(j2, BR)
    p3, o3, a3, b3, c3, d3, _a, _b = _eight(j3, BR)
    _store4(
        pre + row * 4, _sigmoid(p0) + hc_eps, _sigmoid(p1) + hc_eps, _sigmoid(p2) + hc_eps, _sigmoid(p3) + hc_eps, ok
    )
    _store4(post + row * 4, 2 * _sigmoid(o0), 2 * _sigmoid(o1), 2 * _sigmoid(o2), 2 * _sigmoid(o3), ok)
    a0, a1, a2, a3 = _softmax(a0, a1, a2, a3, hc_eps)
    b0, b1, b2, b3 = _softmax(b0, b1, b2, b3, hc_eps)
    c0, c1, c2, c3 = _softmax(c0, c1, c2, c3, hc_eps)
    d0, d1, d2, d3 = _softmax(d0, d1, d2, d3, hc_eps)
    for it in range(0, iters):
        if it > 0:
            a0, a1, a2, a3 = _shares(a0, a1, a2, a3, hc_eps)
            b0, b1, b2, b3 = _shares(b0, b1, b2, b3, hc_eps)
            c0, c1, c2, c3 = _shares(c0, c1, c2, c3, hc_eps)
            d0, d1, d2, d3 = _shares(d0, d1, d2, d3, hc_eps)
        a0, b0, c0, d0 = _shares(a0, b0, c0, d0, hc_eps)
        a1, b1, c1, d1 = _shares(a1, b1, c1, d1, hc_eps)
        a2, b2, c2, d2 = _shares(a2, b2, c2, d2, hc_eps)
        a3, b3, c3, d3 = _shares(a3, b3, c3, d3, hc_eps)
    _store4(comb + row * 16, a0, a1, a2, a3, ok)
    _store4(comb + row * 16 + 4, b0, b1, b2, b3, ok)
    _store4(comb + row * 16 + 8, c0, c1, c2, c3, ok)
    _store4(comb + row * 16 + 12, d0, d1, d2, d3, ok)


@triton.jit(do_not_specialize=["T", "iters"])
def _finish(
    sums, base, scale, norm, pre, post, comb, x, codes, exponents, T, iters, hc_eps, eps,
    H: tl.constexpr, SLOTS: tl.constexpr, EACH: tl.constexpr, BR: tl.constexpr, PIECES: tl.constexpr,
    SPREAD: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs below cdiv(T, BR) make coefficients of BR rows, the others norm and quantise a row.

    PIECES of 1024 columns a row; SPREAD: one piece a program instead of one row.
    """
    pid = tl.program_id(0)
    mixers = tl.cdiv(T, BR)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if pid < mixers:
        rows = pid * BR + tl.arange(0, BR)
        _coefficients(sums, base, scale, pre, post, comb, rows, T, H, iters, hc_eps, eps, SLOTS, EACH, BR)
    else:
        if NORM:
            if SPREAD:
                row = ((pid - mixers) // PIECES).to(tl.int64)
                begin = (pid - mixers) % PIECES
                end = begin + 1
            else:
                row = (pid - mixers).to(tl.int64)
                begin = 0
                end = PIECES
            square = _total(sums + row * 32 + 25, tl.cast(T, tl.int64) * 32, row < T, SLOTS, EACH)
            r = tl.rsqrt(tl.div_rn(square, 1.0 * H) + eps)
            for piece in range(begin, end):
                block = piece * 32 + tl.arange(0, 32)
                c = block[:, None] * 32 + tl.arange(0, 32)[None, :]
                ok = c < H
                w = f32(tl.load(norm + c, mask=ok, other=0.0))
                v = _rounded(f32(tl.load(x + row * H + c, mask=ok, other=0.0)) * r * w)
                tl.store(x + row * H + c, bf16(v), mask=ok)
                e = e8m0_ceil(tl.div_rn(tl.maximum(tl.max(tl.abs(v), 1), 1e-4), 448.0))
                q = tl.div_rn(v, e8m0_value(e)[:, None])
                q = tl.minimum(tl.maximum(q, -448.0), 448.0)
                tl.store(codes + row * H + c, e4m3_code(q), mask=ok)
                tl.store(exponents + row * (H // 32) + block, e.to(tl.uint8), mask=block * 32 < H)


def _slices(h: int, rows: int) -> tuple[int, int, int]:
    """(sums of a row, tiles that `_project` adds to one, how many of them `_finish` adds to a slice)."""
    tiles = triton.cdiv(h, BK)
    return (tiles, 1, GROUP) if rows <= FEW_ROWS else (triton.cdiv(tiles, GROUP), GROUP, 1)


def _launch(
    y: Tensor | None,
    streams: Tensor,
    previous: tuple[Tensor, Tensor, Tensor] | None,  # post, comb, pre
    weights: tuple[Tensor, Tensor, Tensor],
    norm: Tensor | None,
    iters: int,
    hc_eps: float,
    eps: float,
    block_rows: int = BLOCK_ROWS,
    stages: int = 1,
) -> tuple[Tensor, ...]:
    """(streams, pre, post, comb, x, codes, scales); without y the streams stay and the last three are left out."""
    t, _, h = streams.shape
    device = streams.device
    fn, base, scale = (w.contiguous() for w in weights)
    streams = streams.contiguous()
    pre, post = (torch.empty((t, 4), dtype=torch.float32, device=device) for _ in range(2))
    comb = torch.empty((t, 4, 4), dtype=torch.float32, device=device)
    if y is not None and previous is not None:
        y, out = y.contiguous(), torch.empty_like(streams)
        old = tuple(p.contiguous() for p in previous)
        x = torch.empty((t, h), dtype=streams.dtype, device=device)
        codes = torch.empty((t, h), dtype=torch.uint8, device=device)
        exponents = torch.empty((t, h // 32), dtype=torch.uint8, device=device)
    else:  # never read or written
        y = out = x = streams
        old, codes, exponents, norm = (post, comb, pre), streams, streams, base
    whole = out is not streams
    slots, tiles, each = _slices(h, t)
    sums = torch.empty((2, slots, min(t, block_rows), 32), dtype=torch.float32, device=device)  # two pairs may overlap
    pieces = triton.cdiv(h, 1024)
    spread = t <= 256
    br = 4 if spread else 32
    for i in range(0, t, block_rows):
        s = slice(i, min(i + block_rows, t))
        n = s.stop - s.start
        mine = sums[i // block_rows % 2]
        _project[(triton.cdiv(n, BM) * slots,)](
            y[s], streams[s], *(p[s] for p in old), fn, out[s], x[s], mine, n,
            H=h, SLOTS=slots, TILES=tiles, BM=BM, BK=BK, WRITE=whole, FIRST=i == 0, PDL=PDL,
            num_warps=WARPS, num_stages=stages, **options(maxnreg=REGISTERS),
        )  # fmt: skip
        rows = (n * pieces if spread else n) if whole else 0
        _finish[(triton.cdiv(n, br) + rows,)](
            mine, base, scale, norm, pre[s], post[s], comb[s], x[s], codes[s], exponents[s], n, iters, hc_eps, eps,
            H=h, SLOTS=slots, EACH=each, BR=br, PIECES=pieces, SPREAD=spread, NORM=whole, PDL=PDL,
            num_warps=4, **options(),
        )  # fmt: skip
    if not whole:
        return streams, pre, post, comb
    return out, pre, post, comb, x, codes.view(torch.float8_e4m3fn), exponents


def hc_mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, hc_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if streams.shape[1] != 4 or streams.dtype is not torch.bfloat16:
        return references.hc_mix(streams, fn, base, scale, iters, hc_eps, eps)
    _, pre, post, comb = _launch(None, streams, None, (fn, base, scale), None, iters, hc_eps, eps)
    return pre, post, comb


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
    **tuning: int,
) -> tuple[Tensor, ...]:
    if streams.shape[1] != 4 or streams.dtype is not torch.bfloat16:
        return references.hc_boundary(y, streams, post, comb, pre, fn, base, scale, norm, iters, hc_eps, eps)
    return _launch(y, streams, (post, comb, pre), (fn, base, scale), norm, iters, hc_eps, eps, **tuning)


# ----------------------------------------------------------------------------------------------------------- compiling

ANY = {90: "", 100: ""}
_P = "*fp32"
_PROJECT = {
    "y": "*bf16", "streams": "*bf16", "post": _P, "comb": _P, "pre": _P, "fn": _P, "out": "*bf16", "x": "*bf16",
    "sums": _P, "T": "i32",
}  # fmt: skip
_FINISH = {
    "sums": _P, "base": _P, "scale": _P, "norm": "*bf16", "pre": _P, "post": _P, "comb": _P, "x": "*bf16",
    "codes": "*u8", "exponents": "*u8", "T": "i32", "iters": "i32", "hc_eps": "fp32", "eps": "fp32",
}  # fmt: skip
_FUSION = {"enable_fp_fusion": False}


def _project_variant(slots: int, tiles: int, write: int, first: int = 1, stages: int = 1) -> Variant:
    constants = {
        "H": 5120,
        "SLOTS": slots,
        "TILES": tiles,
        "BM": BM,
        "BK": BK,
        "WRITE": write,
        "FIRST": first,
        "PDL": 1,
    }
    return Variant(
        _project,
        _PROJECT,
        constants,
        {90: "wgmma", 100: ""},
        {"num_warps": WARPS, "maxnreg": REGISTERS, "num_stages": stages, **_FUSION},
    )


def _finish_variant(slots: int, each: int, br: int, spread: int, norm: int) -> Variant:
    constants = {
        "H": 5120, "SLOTS": slots, "EACH": each, "BR": br, "PIECES": 5, "SPREAD": spread, "NORM": norm, "PDL": 1,
    }  # fmt: skip
    return Variant(_finish, _FINISH, constants, ANY, {"num_warps": 4, **_FUSION})


VARIANTS = [
    Variant(
        _rms_norm,
        {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "N": "i32", "stride": "i32", "eps": "fp32"},
        {"BLOCK": 8192, "PDL": 1},
        ANY,
        {"num_warps": 8, **_FUSION},
    ),
    Variant(
        _rope,
        {
            "x": "*bf16",
            "cos": _P,
            "sin": _P,
            "out": "*bf16",
            "heads": "i32",
            "t_stride": "i32",
            "h_stride": "i32",
        },
        {"HB": 8, "D": 512, "BD": 512, "R": 32, "INVERSE": 0, "PDL": 1},
        ANY,
        {"num_warps": 4, **_FUSION},
    ),
    Variant(
        _collapse,
        {"streams": "*bf16", "pre": _P, "out": "*bf16", "H": "i32"},
        {"C": 4, "BLOCK": 1024, "PDL": 1},
        ANY,
        {"num_warps": 4, **_FUSION},
    ),
    Variant(
        _write,
        {"y": "*bf16", "streams": "*bf16", "post": _P, "comb": _P, "out": "*bf16", "H": "i32"},
        {"BLOCK": 1024, "PDL": 1},
        ANY,
        {"num_warps": 4, **_FUSION},
    ),
    _project_variant(160, 1, 1),
    _project_variant(160, 1, 0),
    _project_variant(32, 5, 1),
    _project_variant(32, 5, 1, first=0),
    _project_variant(32, 5, 1, stages=3),
    _project_variant(32, 5, 0),
    _finish_variant(160, 5, 4, 1, 1),
    _finish_variant(160, 5, 4, 1, 0),
    _finish_variant(32, 1, 32, 0, 1),
    _finish_variant(32, 1, 32, 0, 0),
]
