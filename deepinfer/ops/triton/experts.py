"""Mixture of experts on CUDA: router, SwiGLU, routed FP4 experts.

Belongs here: routing, the choice of a variant, the portable expert kernels. Does not belong here: the Hopper kernel and
its weight layout (experts_sm90.py).

`experts` is up to four launches without a host sync: item lists (not for one row), gate+up with SwiGLU, routing weight
and quantisation in its epilogue, down with bf16 rows out, sum of a row's slots in slot order. An item is one expert and
up to NT of its (row, slot) pairs. Both GEMMs read the weights once per item, so NT follows the mean number of pairs per
expert; it never changes the bits of a row: a pair is one column of fp8 dots of 32 k, promoted to float32 in k order.
Legend: T rows, K chosen experts, P = T K pairs, H hidden, I expert width, E experts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer.ops import moe
from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.support import INTERPRET, bf16, e4m3_code, e8m0_value, f32, round_bf16

INTERPRETED = bool(INTERPRET.value)
PDL = not INTERPRETED  # programmatic dependent launch: 0.4 us a launch less in a captured graph


def _launch_options() -> dict[str, Any]:
    return {"launch_pdl": True} if PDL else {}


# ----------------------------------------------------------------------------------------------------------- routing


# row counts and lists are not specialised on, so that a warmed-up engine never compiles
@triton.jit(do_not_specialize=["P"], do_not_specialize_on_alignment=["ids"])
def _route_pairs(ids, items, pairs, P, E, NT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Few pairs: item slot i belongs to pair i when that is the first, or the NT-th next, of its expert. Grid (P,)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    e = tl.load(ids + i)
    match = tl.load(ids + j, mask=j < P, other=-1) == e
    match = match & (j < P)
    before = tl.sum(tl.where(match & (j < i), 1, 0))
    total = tl.sum(tl.where(match, 1, 0))
    leads = (e >= 0) & (e < E) & (before % NT == 0)
    place = tl.cumsum(tl.where(match, 1, 0), 0) - 1 - before
    tl.store(pairs + i * NT + place, j, mask=match & (place >= 0) & (place < NT) & leads)
    count = tl.minimum(total - before, NT)
    tl.store(items + 2 * i, tl.where(leads, e | (count << 16), -1))
    tl.store(items + 2 * i + 1, i * NT)


@triton.jit(do_not_specialize=["P", "SLOTS"], do_not_specialize_on_alignment=["ids"])
def _route_experts(ids, items, pairs, P, E, SLOTS, NT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Many pairs: program e lists the pairs of expert e in order. Grid (E,).

    Items of e start at slot first // NT + e, first = pairs of lower experts: room for all without knowing how the lower
    experts split. Slots that stay free hold -1.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    e = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for o in range(0, P, BLOCK):
        v = tl.load(ids + o + j, mask=o + j < P, other=-1)
        lower += tl.where((v >= 0) & (v < e), 1, 0)
        equal += tl.where(v == e, 1, 0)
    first = tl.sum(lower)
    count = tl.sum(equal)
    at = first
    for o in range(0, P, BLOCK):
        match = tl.load(ids + o + j, mask=o + j < P, other=-1) == e
        one = tl.where(match, 1, 0)
        tl.store(pairs + at + tl.cumsum(one, 0) - 1, o + j, mask=match)
        at += tl.sum(one)
    begin = first // NT + e
    end = tl.where(e == E - 1, SLOTS, (first + count) // NT + e + 1)
    for o in range(0, end - begin, 64):
        n = o + tl.arange(0, 64)
        left = count - n * NT
        slot = begin + n
        tl.store(items + 2 * slot, tl.where(left > 0, e | (tl.minimum(left, NT) << 16), -1), mask=slot < end)
        tl.store(items + 2 * slot + 1, first + n * NT, mask=slot < end)


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _combine(y, ids, out, H, E, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out float32 [T, H] = sum over the K slots of a row, in slot order, of y bf16 [T K, H]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(K):
        e = tl.load(ids + t * K + s)
        total += f32(tl.load(y + (t * K + s) * H + c, mask=(c < H) & (e >= 0) & (e < E), other=0.0))
    tl.store(out + t * H + c, total, mask=c < H)


def _slots(pairs: int, experts: int, nt: int) -> int:
    """Item slots (an upper bound that depends on shapes only)."""
    return pairs if _few(pairs, experts, nt) else pairs // nt + experts


def _few(pairs: int, experts: int, nt: int) -> bool:
    return pairs <= 512 and pairs <= experts + pairs // nt


def _route(ids: Tensor, experts: int, nt: int) -> tuple[Tensor, Tensor]:
    """Items int32 [slots, 2] and pair lists for ids int32 [T, K]."""
    p = ids.numel()
    slots = _slots(p, experts, nt)
    items = torch.empty((slots, 2), dtype=torch.int32, device=ids.device)
    if _few(p, experts, nt):
        pairs = torch.empty((p * nt,), dtype=torch.int32, device=ids.device)
        _route_pairs[(p,)](ids, items, pairs, p, experts, nt, 512, PDL, num_warps=4, **_launch_options())
    else:
        pairs = torch.empty((p,), dtype=torch.int32, device=ids.device)
        _route_experts[(experts,)](
            ids, items, pairs, p, experts, slots, nt, 1024, PDL, num_warps=4, **_launch_options()
        )
    return items, pairs


# ------------------------------------------------------------------------------------------- portable expert kernels


@triton.jit
def _silu_mul(gate, up, limit):
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _codes(bytes_, BN: tl.constexpr):
    """Packed e2m1 uint8 [BN, 16] -> e4m3 of value * 2^-6 [BN, 32]; the bits fit as they are, subnormals too."""
    low = ((bytes_ & 7) << 2) | ((bytes_ & 8) << 4)
    high = ((bytes_ >> 2) & 28) | (bytes_ & 128)
    return tl.reshape(tl.join(low, high), (BN, 32)).to(tl.float8e4nv, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=["items", "pairs", "weights"])
def _portable(
    w,
    w_scale,
    x,
    x_scale,
    items,
    pairs,
    weights,
    out,
    out_scale,
    limit,
    N,
    K,
    XDIV: tl.constexpr,
    BN: tl.constexpr,
    NT: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One kernel for both projections on weights as stored. Grid (tiles, items); arguments as experts_sm90.grouped.

    ACT: N = 2 I; a tile is BN / 2 channels, gate rows first, then up rows. Dimensions are multiples of 32.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(0)
    item = tl.program_id(1)
    word = tl.load(items + 2 * item)
    if word >= 0:
        start = tl.load(items + 2 * item + 1)
        e = (word & 0xFFFF).to(tl.int64)
        count = word >> 16
        HALF: tl.constexpr = BN // 2
        r = tl.arange(0, BN)
        if ACT:
            row = tile * HALF + r % HALF + (r // HALF) * (N // 2)
            row_ok = tile * HALF + r % HALF < N // 2
        else:
            row = tile * BN + r
            row_ok = row < N
        m = tl.arange(0, NT)
        ok = m < count
        pair = tl.load(pairs + start + m, mask=ok, other=0)
        x_row = (pair // XDIV).to(tl.int64)
        b = tl.arange(0, 16)
        k = tl.arange(0, 32)
        w_p = w + (e * N + row)[:, None] * (K // 2) + b[None, :]
        s_p = w_scale + (e * N + row) * (K // 32)
        x_p = x + x_row[None, :] * K + k[:, None]
        xs_p = x_scale + x_row * (K // 32)
        acc = tl.zeros((BN, NT), tl.float32)
        for g in range(0, K // 32):
            code = tl.load(w_p + g * 16, mask=row_ok[:, None], other=0)
            sw = e8m0_value(tl.load(s_p + g, mask=row_ok, other=0).to(tl.int32))
            xv = tl.load(x_p + g * 32, mask=ok[None, :], other=0.0)
            sx = e8m0_value(tl.load(xs_p + g, mask=ok, other=0).to(tl.int32))
            acc += tl.dot(_codes(code, BN), xv) * (sw[:, None] * sx[None, :])
        acc = acc * 64.0
        if ACT:
            G: tl.constexpr = HALF // 32
            gate, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF, NT)), (1, 2, 0)))
            weight = tl.load(weights + pair, mask=ok, other=0.0)
            act = _silu_mul(round_bf16(gate), round_bf16(up), limit) * weight[None, :]
            act = tl.reshape(round_bf16(act), (G, 32, NT))
            amax = tl.maximum(tl.max(tl.abs(act), axis=1), 1e-4)
            bits = amax.to(tl.int32, bitcast=True)
            # smallest power of two >= amax / 448, 448 = 1.75 * 2^8, without a division
            code = (bits >> 23) - 8 + tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
            q = act * tl.expand_dims(((254 - code) << 23).to(tl.float32, bitcast=True), 1)
            c = tile * HALF + tl.arange(0, HALF)
            at = out + pair.to(tl.int64)[None, :] * (N // 2) + c[:, None]
            tl.store(at, tl.reshape(e4m3_code(q), (HALF, NT)), mask=ok[None, :] & (c < N // 2)[:, None])
            g = tile * G + tl.arange(0, G)
            at = out_scale + pair.to(tl.int64)[None, :] * (N // 64) + g[:, None]
            tl.store(at, code.to(tl.uint8), mask=ok[None, :] & (g < N // 64)[:, None])
        else:
            at = out + pair.to(tl.int64)[None, :] * N + row[:, None]
            tl.store(at, bf16(acc), mask=ok[None, :] & row_ok[:, None])


# --------------------------------------------------------------------------------------------------------------- ops

# tokens of an item -> warps (16 rows of weights each), ring slots, one wgmma in flight instead of two, register cap
_HOPPER: dict[int, tuple[int, int, bool, int | None]] = {
    8: (4, 4, False, None),
    16: (4, 4, False, None),
    32: (4, 4, True, None),
    64: (8, 3, True, 128),
}


def tokens_per_item(pairs: int, experts: int) -> int:
    """NT by the mean number of pairs of an expert: 8 up to 4, 16 up to 10, 32 up to 28 (64 rows, top 6 of 384: 1)."""
    mean = pairs / experts
    return 8 if mean <= 4 else 16 if mean <= 10 else 32 if mean <= 28 else 64


@functools.cache
def _hopper(device: int | None) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) == (9, 0)


def _fragment_order(w13: Tensor, w2: Tensor) -> bool:
    """Whether weights of these shapes are kept in the Hopper kernel's layout."""
    if INTERPRETED or not _hopper(w13.device.index):
        return False
    from deepinfer.ops.triton import experts_sm90 as hopper

    return hopper.fits(w13.shape[1], 2 * w13.shape[2]) and hopper.fits(w2.shape[1], 2 * w2.shape[2])


def prepare_experts(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> tuple[Tensor, ...]:
    """Weights as stored -> the layout that `experts` reads, same shapes and bytes (unchanged where not Hopper's)."""
    if not _fragment_order(w13, w2):
        return w13, w13_scale, w2, w2_scale
    return fragment_order(w13, w13_scale, w2, w2_scale)


def fragment_order(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, batch: int = 4) -> tuple[Tensor, ...]:
    """`prepare_experts` for Hopper; a few experts at a time, so that it needs about 3 GB beside the result."""
    from deepinfer.ops.triton import experts_sm90 as hopper

    def rows(w: Tensor) -> Tensor:  # tile of 64 rows = 32 channels: (w, gate or up, g)
        b, n, width = w.shape
        return w.view(b, 2, n // 64, 4, 8, width).permute(0, 2, 3, 1, 4, 5).reshape(b, n, width)

    out = tuple(torch.empty_like(w) for w in (w13, w13_scale, w2, w2_scale))
    for i in range(0, w13.shape[0], batch):
        part = slice(i, i + batch)
        out[0][part], out[1][part] = hopper.pack(rows(w13[part]), rows(w13_scale[part]))
        out[2][part], out[3][part] = hopper.pack(w2[part], w2_scale[part])
    return out


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
    """Provider of `experts`; weights as `prepare_experts` returns them. Ids outside [0, E) contribute nothing."""
    if x_scale is None:  # exact numerics is what the reference defines, on weights as stored
        if _fragment_order(w13, w2):
            raise ValueError("experts: exact numerics needs weights as stored, these are prepared for a kernel")
        return moe.experts(x, x_scale, ids, weights, w13, w13_scale, w2, w2_scale, limit)
    t, h = x.shape
    out = torch.empty((t, h), dtype=torch.float32, device=x.device)
    if t == 0:
        return out
    nt = tokens_per_item(ids.numel(), w13.shape[0])
    parts = (x.contiguous(), x_scale.contiguous(), ids.contiguous(), weights.contiguous())
    run = _run_hopper if _fragment_order(w13, w2) else _run_portable
    y = run(*parts, w13, w13_scale, w2, w2_scale, limit, nt)
    grid = (t, triton.cdiv(h, 512))
    _combine[grid](y, parts[2], out, h, w13.shape[0], ids.shape[1], 512, PDL, num_warps=4, **_launch_options())
    return out


def gemm(
    x: Tensor,
    x_scale: Tensor,
    lists: tuple[Tensor, Tensor],
    weights: Tensor,
    w: Tensor,
    w_scale: Tensor,
    limit: float,
    nt: int,
    *,
    xdiv: int,
    act: bool,
    one: bool = False,
    shape: tuple[int, int, bool, int | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """One projection on Hopper, arguments as experts_sm90.grouped. act: (e4m3 [P, I], E8M0); else (bf16 [P, N], -).

    `shape` replaces the entry of _HOPPER (bench).
    """
    from deepinfer.ops.triton import experts_sm90 as hopper

    (items, pairs), p, n, k = lists, weights.numel(), w.shape[1], 2 * w.shape[2]
    if act:
        out = torch.empty((p, n // 2), dtype=torch.float8_e4m3fn, device=x.device)
        out_scale = torch.empty((p, n // 64), dtype=torch.uint8, device=x.device)
    else:
        out = torch.empty((p, n), dtype=torch.bfloat16, device=x.device)
        out_scale = x_scale  # not written
    nw, stages, serial, cap = shape or _HOPPER[nt]
    hopper.grouped[(n // (16 * nw), p if one else items.shape[0])](
        w.view(torch.int32), w_scale.view(torch.int32), x, x_scale.view(torch.int32), items, pairs, weights,
        out.view(torch.uint8) if act else out, out_scale, limit, w.shape[0], N=n, K=k, XDIV=xdiv, NT=nt, NW=nw,
        ST=stages, SERIAL=serial, ONE=one, ACT=act, num_warps=nw, maxnreg=cap, **_launch_options(),
    )  # fmt: skip
    return out, out_scale


def _run_hopper(
    x: Tensor,
    x_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    limit: float,
    nt: int,
    shape: tuple[int, int, bool, int | None] | None = None,
) -> Tensor:
    """Rows of every pair after w2, bf16 [P, H]."""
    one = x.shape[0] == 1
    lists = (ids, ids) if one else _route(ids, w13.shape[0], nt)
    act = gemm(x, x_scale, lists, weights, w13, w13_scale, limit, nt, xdiv=ids.shape[1], act=True, one=one, shape=shape)
    return gemm(*act, lists, weights, w2, w2_scale, limit, nt, xdiv=1, act=False, one=one, shape=shape)[0]


def _run_portable(
    x: Tensor,
    x_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    limit: float,
    nt: int,
) -> Tensor:
    h, k, p, e, i = x.shape[1], ids.shape[1], ids.numel(), w13.shape[0], w13.shape[1] // 2
    nt = 16 if nt <= 16 else 32
    items, pairs = _route(ids, e, nt)
    act = torch.empty((p, i), dtype=torch.float8_e4m3fn, device=x.device)
    act_scale = torch.empty((p, i // 32), dtype=torch.uint8, device=x.device)
    y = torch.empty((p, h), dtype=torch.bfloat16, device=x.device)
    bn = 128 if i % 64 == 0 and h % 128 == 0 else 64
    meta = {"BN": bn, "NT": nt, "PDL": PDL, "num_warps": 4, **_launch_options()}
    _portable[(triton.cdiv(i, bn // 2), items.shape[0])](
        w13, w13_scale, x, x_scale, items, pairs, weights, act.view(torch.uint8), act_scale, limit, 2 * i, h,
        XDIV=k, ACT=True, **meta,
    )  # fmt: skip
    _portable[(triton.cdiv(h, bn), items.shape[0])](
        w2, w2_scale, act, act_scale, items, pairs, weights, y, act_scale, limit, h, i,
        XDIV=1, ACT=False, **meta,
    )  # fmt: skip
    return y


# ---------------------------------------------------------------------------------------------------- router, swiglu

_SPLITS, _BK = 10, 64  # K segments of the router GEMM, summed in order; real rows: 8 dots of 64 each


@triton.jit(do_not_specialize=["T"])
def _router_gemm(
    x, w, out, T, E, H,
    SPLITS: tl.constexpr, LOOP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """logits float32 = x bf16 [T, H] w bf16 [E, H]^T. Grid (T / BM, E / BN, 1 or SPLITS).

    LOOP: a program adds the segments itself and writes [T, E]; otherwise a segment a program, partials [SPLITS, T, E],
    which the selection adds in the same order: the same bits.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    segment = tl.cdiv(tl.cdiv(H, BK), SPLITS) * BK
    x_p = x + m.to(tl.int64)[:, None] * H + k[None, :]
    w_p = w + n.to(tl.int64)[None, :] * H + k[:, None]
    m_ok = (m < T)[:, None]
    n_ok = (n < E)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    first = tl.program_id(2)
    for s in range(first, SPLITS if LOOP else first + 1):
        acc = tl.zeros((BM, BN), tl.float32)
        for o in range(s * segment, tl.minimum((s + 1) * segment, H), BK):
            a = tl.load(x_p + o, mask=m_ok & (o + k < H)[None, :], other=0.0)
            b = tl.load(w_p + o, mask=n_ok & (o + k < H)[:, None], other=0.0)
            if INTERPRET:
                acc = tl.dot(f32(a), f32(b), acc)
            else:
                acc = tl.dot(a, b, acc)
        total += acc
    to = out + (first * T + m).to(tl.int64)[:, None] * E + n[None, :]
    tl.store(to, total, mask=m_ok & n_ok)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["is_image"])
def _router_select(
    logits, bias, bias_vl, is_image, ids, weights, T, E, scale,
    SPLITS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Top K of a row: largest choice first, ties to the lower id; written in ascending order of ids. Grid (T,)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    ok = e < E
    x = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(SPLITS):
        x += tl.load(logits + (s * T + t) * E + e, mask=ok, other=0.0)
    # softplus; log1p(p) = log(1 + p) p / ((1 + p) - 1), exact where 1 + p rounds
    p = tl.exp(tl.minimum(x, 20.0))
    q = 1.0 + p
    soft = tl.where(q == 1.0, p, tl.log(q) * (p / tl.where(q == 1.0, 1.0, q - 1.0)))
    score = tl.sqrt(tl.where(x > 20.0, x, soft))
    image = tl.load(is_image + t) != 0
    extra = tl.where(image, tl.load(bias_vl + e, mask=ok, other=0.0), tl.load(bias + e, mask=ok, other=0.0))
    choice = tl.where(ok, score + extra, float("-inf"))
    picked = e < 0
    for _ in tl.static_range(K):
        best = tl.argmax(choice, 0, tie_break_left=True)
        picked = picked | (e == best)
        choice = tl.where(e == best, float("-inf"), choice)
    place = tl.cumsum(tl.where(picked, 1, 0), 0) - 1
    total = tl.sum(tl.where(picked & (place == 0), score, 0.0))
    for i in tl.static_range(1, K):  # slot order
        total += tl.sum(tl.where(picked & (place == i), score, 0.0))
    tl.store(ids + t * K + place, e, mask=picked)
    tl.store(weights + t * K + place, score / (total + 1e-20) * scale, mask=picked)


def router(
    x: Tensor, weight: Tensor, bias: Tensor, bias_vl: Tensor, is_image: Tensor, k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Provider of `router`. Two launches; few rows are split over K to fill the device, many rows over rows."""
    if x.dtype is not torch.bfloat16:  # exact numerics
        return moe.router(x, weight, bias, bias_vl, is_image, k, scale)
    (t, h), e = x.shape, weight.shape[0]
    ids = torch.empty((t, k), dtype=torch.int32, device=x.device)
    weights = torch.empty((t, k), dtype=torch.float32, device=x.device)
    if t == 0:
        return ids, weights
    splits, bm = (_SPLITS, 16) if t <= 256 else (1, 64)
    logits = torch.empty((splits, t, e), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(t, bm), triton.cdiv(e, 32 if bm == 16 else 64), splits)
    _router_gemm[grid](
        x.contiguous(), weight.contiguous(), logits, t, e, h, _SPLITS, splits == 1, bm, 32 if bm == 16 else 64, _BK,
        PDL, num_warps=bm // 8 if bm > 32 else 4, num_stages=3, **_launch_options(),
    )  # fmt: skip
    _router_select[(t,)](
        logits, bias, bias_vl, is_image.view(torch.uint8), ids, weights, t, e, scale, splits, k,
        triton.next_power_of_2(e), PDL, num_warps=1, **_launch_options(),
    )  # fmt: skip
    return ids, weights


@triton.jit
def _swiglu(gate_up, out, width, limit, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """gate_up [T, 2 width] -> out [T, width]. Grid (T, width / BLOCK)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = f32(tl.load(gate_up + t * 2 * width + c, mask=c < width, other=0.0))
    up = f32(tl.load(gate_up + t * 2 * width + width + c, mask=c < width, other=0.0))
    act = _silu_mul(gate, up, limit)
    if out.dtype.element_ty == tl.float32:
        tl.store(out + t * width + c, act, mask=c < width)
    else:
        tl.store(out + t * width + c, bf16(act), mask=c < width)


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """Provider of `swiglu`."""
    t, i = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((t, i), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _swiglu[(t, triton.cdiv(i, 1024))](
            gate_up.contiguous(), out, i, limit, 1024, PDL, num_warps=4, **_launch_options()
        )
    return out


# ---------------------------------------------------------------------------------------------------- compile gate


def _variants() -> list[Variant]:
    both = {90: "griddepcontrol.wait", 100: "griddepcontrol.wait"}
    lists = {"ids": "*i32", "items": "*i32", "pairs": "*i32", "P": "i32", "E": "i32"}
    out = [
        Variant(_route_pairs, lists, {"NT": 8, "BLOCK": 512, "PDL": True}, both),
        Variant(
            _route_experts, {**lists, "SLOTS": "i32"}, {"NT": 64, "BLOCK": 1024, "PDL": True}, both
        ),
        Variant(
            _combine,
            {"y": "*bf16", "ids": "*i32", "out": "*fp32", "H": "i32", "E": "i32"},
            {"K": 6, "BLOCK": 512, "PDL": True},
            both,
        ),
        Variant(
            _router_select,
            {"logits": "*fp32", "bias": "*fp32", "bias_vl": "*fp32", "is_image": "*u8", "ids": "*i32",
             "weights": "*fp32", "T": "i32", "E": "i32", "scale": "fp32"},
            {"SPLITS": _SPLITS, "K": 6, "BLOCK": 512, "PDL": True},
            both,
            {"num_warps": 1},
        ),
        Variant(
            _swiglu,
            {"gate_up": "*bf16", "out": "*bf16", "width": "i32", "limit": "fp32"},
            {"BLOCK": 1024, "PDL": True},
            both,
        ),
    ]  # fmt: skip
    gemm = {"x": "*bf16", "w": "*bf16", "out": "*fp32", "T": "i32", "E": "i32", "H": "i32"}
    for bm, bn, loop in ((16, 32, False), (64, 64, True)):
        constants = {"SPLITS": _SPLITS, "LOOP": loop, "BM": bm, "BN": bn, "BK": _BK, "PDL": True}
        archs = {90: "wgmma", 100: "tcgen05.mma"} if bm == 64 else {90: "mma.sync", 100: "mma.sync"}
        out.append(Variant(_router_gemm, gemm, constants, archs, {"num_warps": 8 if bm == 64 else 4}))
    chain = {"items": "*i32", "pairs": "*i32", "weights": "*fp32", "limit": "fp32"}
    for act in (True, False):
        portable = {"w": "*u8", "w_scale": "*u8", "x": "*fp8e4nv", "x_scale": "*u8", "out_scale": "*u8", **chain}
        portable |= {"out": "*u8" if act else "*bf16", "N": "i32", "K": "i32"}
        for nt in (16, 32):
            constants = {"XDIV": 6 if act else 1, "BN": 128, "NT": nt, "ACT": act, "PDL": True}
            out.append(Variant(_portable, portable, constants, {90: "wgmma", 100: "tcgen05.mma"}))
    if INTERPRETED:
        return out
    from deepinfer.ops.triton import experts_sm90 as hopper

    signature = {"w_ptr": "*i32", "ws_ptr": "*i32", "x_ptr": "*fp8e4nv", "xs_ptr": "*i32", "out_scale_ptr": "*u8"}
    for nt, (nw, stages, serial, cap) in _HOPPER.items():
        for act, one in ((True, False), (False, False)) + (((True, True), (False, True)) if nt == 8 else ()):
            n, k, xdiv = (4608, 5120, 6) if act else (5120, 2304, 1)
            constants = {"N": n, "K": k, "XDIV": xdiv, "NT": nt, "NW": nw, "ST": stages, "SERIAL": serial}
            options = {"num_warps": nw, **({"maxnreg": cap} if cap else {})}
            types = {**signature, **chain, "E": "i32", "out_ptr": "*u8" if act else "*bf16"}
            out.append(
                Variant(hopper.grouped, types, {**constants, "ONE": one, "ACT": act}, {90: "wgmma"}, options, True)
            )
    return out


VARIANTS = _variants()
