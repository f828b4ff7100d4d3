"""Hyper-connections on CUDA.

Belongs here: kernels of hc_* of ops/hyper.py. Does not belong here: their definition, Hopper's first half
(hyper_sm90.py), norms alone (norm.py).

Everything between two sublayers (`hc_boundary`) is two launches. The first writes the streams, sums them up into the
next input before its norm, and multiplies them by slices of fn; `_finish` adds the slices in their order, makes the
coefficients (Sinkhorn in registers), norms and quantises. `hc_mix` is the same pair without its other half.

The first launch has three forms: `_few` (up to FEW_ROWS rows: products by fma), `project` of hyper_sm90.py (tensor
cores), `_project` (any width, and the interpreter). The bits of a row depend on the form; with
DEEPINFER_BATCH_INVARIANT one form and one way to add its slices serve all row counts.
Kernels let the next one start after their own wait, never before: what a kernel has waited for is complete for all
later ones, so these may read weights without waiting.
All sums are explicit fma or plain additions (`enable_fp_fusion` off), so variants of a kernel have the same bits.
Legend: T rows, 4 streams, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer import envs
from deepinfer.ops import hyper as references
from deepinfer.ops.triton import hyper_sm90
from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.norm import INTERPRETED, PDL, as_type, options
from deepinfer.ops.triton.support import (
    INTERPRET,
    bf16,
    e4m3_code,
    e8m0_inverse,
    f32,
    fp8_scale,
    round_bf16,
)  # fmt: skip

INVARIANT = bool(envs.get("DEEPINFER_BATCH_INVARIANT"))
FEW_ROWS = 4
ROW_TILE = 64  # rows of a tile of `project`
PROGRAMS = 330  # of `project`: three fit on an SM


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


# ---------------------------------------------------------------------------------------------------------- first half


@triton.jit
def _rounded(x):
    """float32 -> nearest bf16 as float32."""
    if INTERPRET:
        return round_bf16(x)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _pair(x):
    """float32 -> bf16, two an instruction: the compiler's own choice for it takes one, at a quarter of the rate."""
    if INTERPRET:
        return bf16(x)
    else:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], tl.bfloat16, True, 2)


@triton.jit
def _mixed(v, f0, f1, f2, f3, post, comb, row, ok, i: tl.constexpr):
    """Stream i after a sublayer, rounded: post_i y + sum_j comb[j][i] R_j."""
    m = comb + row * 16 + i
    r = tl.load(post + row * 4 + i, mask=ok, other=0.0)[:, None] * v
    r = tl.fma(tl.load(m, mask=ok, other=0.0)[:, None], f0, r)
    r = tl.fma(tl.load(m + 4, mask=ok, other=0.0)[:, None], f1, r)
    r = tl.fma(tl.load(m + 8, mask=ok, other=0.0)[:, None], f2, r)
    return _rounded(tl.fma(tl.load(m + 12, mask=ok, other=0.0)[:, None], f3, r))


@triton.jit
def _streams(y, streams, post, comb, pre, out, x, row, c, ok, H: tl.constexpr, WRITE: tl.constexpr):
    """New streams [rows, columns] as float32; writes them and the collapsed row. WRITE 0: streams as they are."""
    at = row[:, None] * (4 * H) + c[None, :]
    inside = ok[:, None] & (c < H)[None, :]
    f0 = f32(tl.load(streams + at, mask=inside, other=0.0))
    f1 = f32(tl.load(streams + H + at, mask=inside, other=0.0))
    f2 = f32(tl.load(streams + 2 * H + at, mask=inside, other=0.0))
    f3 = f32(tl.load(streams + 3 * H + at, mask=inside, other=0.0))
    if WRITE:
        v = f32(tl.load(y + row[:, None] * H + c[None, :], mask=inside, other=0.0))
        r0 = _mixed(v, f0, f1, f2, f3, post, comb, row, ok, 0)
        r1 = _mixed(v, f0, f1, f2, f3, post, comb, row, ok, 1)
        r2 = _mixed(v, f0, f1, f2, f3, post, comb, row, ok, 2)
        r3 = _mixed(v, f0, f1, f2, f3, post, comb, row, ok, 3)
        tl.store(out + at, bf16(r0), mask=inside)
        tl.store(out + H + at, bf16(r1), mask=inside)
        tl.store(out + 2 * H + at, bf16(r2), mask=inside)
        tl.store(out + 3 * H + at, bf16(r3), mask=inside)
        p = pre + row * 4
        z = tl.load(p, mask=ok, other=0.0)[:, None] * r0
        z = tl.fma(tl.load(p + 1, mask=ok, other=0.0)[:, None], r1, z)
        z = tl.fma(tl.load(p + 2, mask=ok, other=0.0)[:, None], r2, z)
        z = tl.fma(tl.load(p + 3, mask=ok, other=0.0)[:, None], r3, z)
        tl.store(x + row[:, None] * H + c[None, :], bf16(z), mask=inside)
        return r0, r1, r2, r3
    else:
        return f0, f1, f2, f3


@triton.jit
def _squares(r0, r1, r2, r3):
    return tl.sum(tl.fma(r3, r3, tl.fma(r2, r2, tl.fma(r1, r1, r0 * r0))), 1)


@triton.jit(do_not_specialize=["T"])
def _few(
    y, streams, post, comb, pre, fn, out, x, sums, T,
    H: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, WRITE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to BM rows, BK columns of every stream a program. sums float32 [H / BK, T, 32]: 24 products, squares."""
    slot = tl.program_id(0)
    row = tl.arange(0, BM)
    n = tl.arange(0, 32)
    c = slot * BK + tl.arange(0, BK)
    # weights are older than any kernel that may still run: read before the wait
    fn_at = fn + n[:, None] * (4 * H) + c[None, :]
    ok = (n < 24)[:, None] & (c < H)[None, :]
    w0 = tl.load(fn_at, mask=ok, other=0.0)
    w1 = tl.load(fn_at + H, mask=ok, other=0.0)
    w2 = tl.load(fn_at + 2 * H, mask=ok, other=0.0)
    w3 = tl.load(fn_at + 3 * H, mask=ok, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    r0, r1, r2, r3 = _streams(y, streams, post, comb, pre, out, x, row, c, row < T, H, WRITE)
    acc = r0[:, None, :] * w0[None, :, :]
    acc = tl.fma(r1[:, None, :], w1[None, :, :], acc)
    acc = tl.fma(r2[:, None, :], w2[None, :, :], acc)
    acc = tl.fma(r3[:, None, :], w3[None, :, :], acc)
    at = sums + (slot * T + row) * 32
    tl.store(at[:, None] + n[None, :], tl.sum(acc, 2), mask=(row < T)[:, None] & (n < 24)[None, :])
    tl.store(at + 24, _squares(r0, r1, r2, r3), mask=row < T)


@triton.jit(do_not_specialize=["T"])
def _project(
    y, streams, post, comb, pre, fn, out, x, sums, T,
    H: tl.constexpr, SLOTS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, WRITE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BM rows x BK columns of every stream, any width. Grid (row tiles x SLOTS). sums as `_few`."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(0) % SLOTS
    row = (tl.program_id(0) // SLOTS * BM + tl.arange(0, BM)).to(tl.int64)
    n = tl.arange(0, 32)
    c = slot * BK + tl.arange(0, BK)
    r0, r1, r2, r3 = _streams(y, streams, post, comb, pre, out, x, row, c, row < T, H, WRITE)
    fn_at = fn + n[None, :] * (4 * H) + c[:, None]
    ok = (n < 24)[None, :] & (c < H)[:, None]
    acc = tl.dot(r0, tl.load(fn_at, mask=ok, other=0.0), input_precision="ieee")
    acc = tl.dot(r1, tl.load(fn_at + H, mask=ok, other=0.0), acc, input_precision="ieee")
    acc = tl.dot(r2, tl.load(fn_at + 2 * H, mask=ok, other=0.0), acc, input_precision="ieee")
    acc = tl.dot(r3, tl.load(fn_at + 3 * H, mask=ok, other=0.0), acc, input_precision="ieee")
    at = sums + (tl.cast(slot, tl.int64) * T + row) * 32
    tl.store(at[:, None] + n[None, :], acc, mask=(row < T)[:, None] & (n < 24)[None, :])
    tl.store(at + 24, _squares(r0, r1, r2, r3), mask=row < T)


# --------------------------------------------------------------------------------------------------------- second half


@triton.jit
def _inverse(x):
    """1 / x to one unit in the last place, x normal: one instruction; a division is eight, of which 156 follow each
    other in Sinkhorn's iterations.
    """
    if INTERPRET:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _shares(a, b, c, d, eps):
    """Four numbers over their sum."""
    r = _inverse((a + b) + (c + d) + eps)
    return a * r, b * r, c * r, d * r


@triton.jit
def _softmax(a, b, c, d, hc_eps):
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = _shares(tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top), 0.0)
    return a + hc_eps, b + hc_eps, c + hc_eps, d + hc_eps


@triton.jit
def _row(q, p, o, a, b, c, d):
    """[BR] numbers -> columns 0..5 of [BR, 8]: pre, post, then comb, of one stream."""
    x = tl.where((q == 0)[None, :], p[:, None], o[:, None])
    x = tl.where((q == 2)[None, :], a[:, None], x)
    x = tl.where((q == 3)[None, :], b[:, None], x)
    x = tl.where((q == 4)[None, :], c[:, None], x)
    return tl.where((q == 5)[None, :], d[:, None], x)


@triton.jit
def _group(x, q, i: tl.constexpr):
    """Column i of x [BR, 8]: a sum with zeros, so exact, and it stays in the lanes of a row."""
    return tl.sum(tl.where((q == i)[None, :], x, 0.0), 1)


@triton.jit
def _coefficients(
    sums, base, scale, pre, post, comb, row, T, H, iters, hc_eps, eps,
    SLOTS: tl.constexpr, SP: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """pre, post, comb of BR rows; SP slices are read side by side, then every lane has all 24 numbers of a row."""
    ok = row < T
    row = row.to(tl.int64)
    n = tl.arange(0, 32)
    part = tl.arange(0, SP)
    step = tl.cast(T, tl.int64) * 32
    at = sums + row[:, None, None] * 32 + n[None, None, :]
    total = tl.zeros((BR, SP, 32), tl.float32)
    for s in tl.static_range(0, SLOTS, SP):
        p = s + part
        # all 32 columns, 7 of them never written nor used: a mask of 25 would keep loads from being 16 bytes
        mask = ok[:, None, None] & (p < SLOTS)[None, :, None] & (n >= 0)[None, None, :]
        total += tl.load(at + p[None, :, None] * step, mask=mask, other=0.0)
    total = tl.sum(total, 1)
    s0, s1, s2 = tl.load(scale), tl.load(scale + 1), tl.load(scale + 2)
    factor = tl.where(n < 4, s0, tl.where(n < 8, s1, s2))
    shift = tl.load(base + n, mask=n < 24, other=0.0)
    square = tl.sum(tl.where((n == 24)[None, :], total, 0.0), 1)
    r = tl.rsqrt(tl.div_rn(square, 4.0 * H) + eps)
    logit = tl.fma(total * r[:, None], factor[None, :], shift[None, :])
    # columns n = 4 q + j: four tensors [BR, q]
    j02, j13 = tl.split(logit.reshape(BR, 8, 2, 2))
    j0, j2 = tl.split(j02)
    j1, j3 = tl.split(j13)
    q = tl.arange(0, 8)
    p0, o0, a0, b0, c0, d0 = (
        _group(j0, q, 0), _group(j0, q, 1), _group(j0, q, 2), _group(j0, q, 3), _group(j0, q, 4), _group(j0, q, 5),
    )  # fmt: skip
    p1, o1, a1, b1, c1, d1 = (
        _group(j1, q, 0), _group(j1, q, 1), _group(j1, q, 2), _group(j1, q, 3), _group(j1, q, 4), _group(j1, q, 5),
    )  # fmt: skip
    p2, o2, a2, b2, c2, d2 = (
        _group(j2, q, 0), _group(j2, q, 1), _group(j2, q, 2), _group(j2, q, 3), _group(j2, q, 4), _group(j2, q, 5),
    )  # fmt: skip
    p3, o3, a3, b3, c3, d3 = (
        _group(j3, q, 0), _group(j3, q, 1), _group(j3, q, 2), _group(j3, q, 3), _group(j3, q, 4), _group(j3, q, 5),
    )  # fmt: skip
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
    x0 = _row(q, _sigmoid(p0) + hc_eps, 2 * _sigmoid(o0), a0, b0, c0, d0)
    x1 = _row(q, _sigmoid(p1) + hc_eps, 2 * _sigmoid(o1), a1, b1, c1, d1)
    x2 = _row(q, _sigmoid(p2) + hc_eps, 2 * _sigmoid(o2), a2, b2, c2, d2)
    x3 = _row(q, _sigmoid(p3) + hc_eps, 2 * _sigmoid(o3), a3, b3, c3, d3)
    # one store: each has a trip through shared memory to its layout
    x = tl.join(tl.join(x0, x2), tl.join(x1, x3)).reshape(BR, 32)
    to = tl.where((n < 4)[None, :], pre + row[:, None] * 4 + n[None, :], post + row[:, None] * 4 + (n - 4)[None, :])
    to = tl.where((n < 8)[None, :], to, comb + row[:, None] * 16 + (n - 8)[None, :])
    tl.store(to, x, mask=ok[:, None] & (n < 24)[None, :])


@triton.jit(do_not_specialize=["T", "iters"])
def _finish(
    sums, base, scale, norm, pre, post, comb, x, codes, exponents, T, iters, hc_eps, eps,
    H: tl.constexpr, SLOTS: tl.constexpr, SP: tl.constexpr, BR: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs below cdiv(T, BR) make coefficients of BR rows, the others norm and quantise a row, in pieces of 1024
    columns that stay in registers.
    """
    pid = tl.program_id(0)
    mixers = tl.cdiv(T, BR)
    if pid < mixers:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        _coefficients(
            sums,
            base,
            scale,
            pre,
            post,
            comb,
            (mixers - 1 - pid) * BR + tl.arange(0, BR),
            T,
            H,
            iters,
            hc_eps,
            eps,
            SLOTS,
            SP,
            BR,
        )
    else:
        if NORM:
            # the last rows of the first half first: they are still in the L2
            row = (T - 1 - (pid - mixers)).to(tl.int64)
            block = tl.arange(0, 32)
            at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
            weights = ()
            for c in tl.static_range(0, H, 1024):
                weights += (tl.load(norm + c + at, mask=c + at < H, other=0.0),)  # type: ignore[assignment]
            if PDL:
                gdc_wait()
                gdc_launch_dependents()
            squares = tl.zeros((32, 32), tl.float32)
            pieces = ()
            for c in tl.static_range(0, H, 1024):
                v = tl.load(x + row * H + c + at, mask=c + at < H, other=0.0)
                pieces += (v,)  # type: ignore[assignment]
                squares = tl.fma(f32(v), f32(v), squares)
            r = tl.rsqrt(tl.div_rn(tl.sum(tl.sum(squares, 1), 0), 1.0 * H) + eps)
            for c in tl.static_range(0, H, 1024):
                ok = c + at < H
                v = f32(pieces[c // 1024]) * r * f32(weights[c // 1024])
                v16 = _pair(v)
                v = f32(v16)
                e = fp8_scale(tl.maximum(tl.max(tl.abs(v), 1), 1e-4))
                tl.store(x + row * H + c + at, v16, mask=ok)
                tl.store(codes + row * H + c + at, e4m3_code(v * e8m0_inverse(e)[:, None]), mask=ok)
                tl.store(exponents + row * (H // 32) + c // 32 + block, e.to(tl.uint8), mask=c + block * 32 < H)


class Plan(NamedTuple):
    """How a launch pair is cut: by the form of the first half, and by its second half's way to read slices."""

    form: str  # "few", "sm90" or "any"
    columns: int  # of every stream, of a slice
    groups: int  # programs that share the rows, of every slice
    mixer: int  # rows of a program that makes coefficients
    side: int  # slices that it reads side by side


def _plan(t: int, h: int) -> Plan:
    if INTERPRETED or h % 64:
        return Plan("any", 32, triton.cdiv(t, 16), 8, 4)
    groups = max(1, min(triton.cdiv(t, ROW_TILE), PROGRAMS * 64 // h))
    if INVARIANT:
        return Plan("sm90", 64, groups, 8, 4)
    if t <= FEW_ROWS:
        return Plan("few", 32, 1, 1, 32)
    if t <= ROW_TILE:
        return Plan("sm90", 32, 1, 1, 32)
    return Plan("sm90", 64, groups, *((4, 8) if t <= 1024 else (32, 1)))


def _first(plan: Plan, tensors: tuple[Tensor, ...], t: int, h: int, slots: int, write: bool) -> None:
    """Launch the first half."""
    if plan.form == "few":
        rows = triton.next_power_of_2(t)
        _few[(slots,)](*tensors, t, H=h, BM=rows, BK=plan.columns, WRITE=write, PDL=PDL, num_warps=4, **options())
    elif plan.form == "any":
        _project[(slots * plan.groups,)](
            *tensors, t, H=h, SLOTS=slots, BM=16, BK=plan.columns, WRITE=write, PDL=PDL, num_warps=4, **options()
        )
    else:
        hyper_sm90.project[(slots * plan.groups,)](
            *tensors, t, H=h, SLOTS=slots, STEPS=plan.columns // 32, NW=ROW_TILE // 16, WRITE=write,
            num_warps=ROW_TILE // 16, **options(),
        )  # fmt: skip


def _launch(
    y: Tensor | None,
    streams: Tensor,
    previous: tuple[Tensor, Tensor, Tensor] | None,  # post, comb, pre
    weights: tuple[Tensor, Tensor, Tensor],
    norm: Tensor | None,
    iters: int,
    hc_eps: float,
    eps: float,
    plan: Plan | None = None,
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
    plan = plan or _plan(t, h)
    slots = triton.cdiv(h, plan.columns)
    if t:
        sums = torch.empty((slots, t, 32), dtype=torch.float32, device=device)
        _first(plan, (y, streams, *old, fn, out, x, sums), t, h, slots, whole)
        _finish[(triton.cdiv(t, plan.mixer) + (t if whole else 0),)](
            sums, base, scale, norm, pre, post, comb, x, codes, exponents, t, iters, hc_eps, eps,
            H=h, SLOTS=slots, SP=plan.side, BR=plan.mixer, NORM=whole, PDL=PDL, num_warps=4, **options(),
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
    plan: Plan | None = None,
) -> tuple[Tensor, ...]:
    if streams.shape[1] != 4 or streams.dtype is not torch.bfloat16:
        return references.hc_boundary(y, streams, post, comb, pre, fn, base, scale, norm, iters, hc_eps, eps)
    return _launch(y, streams, (post, comb, pre), (fn, base, scale), norm, iters, hc_eps, eps, plan)


# ----------------------------------------------------------------------------------------------------------- compiling

ANY = {90: "", 100: ""}
_P = "*fp32"
_FIRST = {
    "y": "*bf16", "streams": "*bf16", "post": _P, "comb": _P, "pre": _P, "fn": _P, "out": "*bf16", "x": "*bf16",
    "sums": _P, "T": "i32",
}  # fmt: skip
_FINISH = {
    "sums": _P, "base": _P, "scale": _P, "norm": "*bf16", "pre": _P, "post": _P, "comb": _P, "x": "*bf16",
    "codes": "*u8", "exponents": "*u8", "T": "i32", "iters": "i32", "hc_eps": "fp32", "eps": "fp32",
}  # fmt: skip
_FUSION = {"enable_fp_fusion": False}


def _few_variant(rows: int, write: int) -> Variant:
    constants = {"H": 5120, "BM": rows, "BK": 32, "WRITE": write, "PDL": 1}
    return Variant(_few, _FIRST, constants, ANY, {"num_warps": 4, **_FUSION})


def _project_variant(steps: int, write: int) -> Variant:
    constants = {"H": 5120, "SLOTS": 160 // steps, "STEPS": steps, "NW": ROW_TILE // 16, "WRITE": write}
    tensors = {f"{name}_ptr" if name != "T" else name: kind for name, kind in _FIRST.items()}
    wanted = {90: "mma.sync", 100: "mma.sync"}
    return Variant(hyper_sm90.project, tensors, constants, wanted, {"num_warps": ROW_TILE // 16, **_FUSION}, gluon=True)


def _finish_variant(slots: int, rows: int, side: int, norm: int) -> Variant:
    constants = {"H": 5120, "SLOTS": slots, "SP": side, "BR": rows, "NORM": norm, "PDL": 1}
    return Variant(_finish, _FINISH, constants, ANY, {"num_warps": 4, **_FUSION})


VARIANTS = [
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
    *(_few_variant(rows, write) for rows in (1, FEW_ROWS) for write in (0, 1)),
    *(_project_variant(steps, write) for steps in (1, 2) for write in (0, 1)),
    Variant(
        _project,
        _FIRST,
        {"H": 192, "SLOTS": 6, "BM": 16, "BK": 32, "WRITE": 1, "PDL": 1},
        ANY,
        {"num_warps": 4, **_FUSION},
    ),
    *(_finish_variant(*cut, norm) for cut in ((160, 1, 32), (80, 4, 8), (80, 8, 4), (80, 32, 1)) for norm in (0, 1)),
]
