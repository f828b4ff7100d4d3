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
from deepinfer.ops.triton import experts_router
from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.support import INTERPRET, bf16, e4m3_code, e8m0_value, f32, round_bf16

INTERPRETED = bool(INTERPRET.value)
# one kernel, and with it the same bits of a row, for every number of rows
INVARIANT = experts_router.INVARIANT
router = experts_router.router
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
    """out float32 [T, H] = sum over the K slots of a row, in slot order, of y bf16 [T K, H].

    Ids are read before the wait: the kernel before let this one start after gate+up had waited for them.
    """
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    absent = 0
    for s in tl.static_range(K):
        e = tl.load(ids + t * K + s)
        absent |= tl.where((e >= 0) & (e < E), 0, 1 << s)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(K):
        ok = (c < H) & ((absent >> s) & 1 == 0)
        total += f32(tl.load(y + (t * K + s) * H + c, mask=ok, other=0.0))
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

# Pairs of an expert from which prefill's kernel serves. Off: its tile of 8 warps has run on an H200 (7.8 ms for 8,192
# rows, `grouped` 11.6) but its results have not been compared there since products no longer cross a loop's back edge.
# When `*/prefill` and `prefill-row-bits` of tests/gpu/check_experts.py pass: 18 (1,024 rows, 16: equal; 2,048: 0.7x).
PREFILL_MEAN = 1 << 30


def tokens_per_item(pairs: int, experts: int) -> int:
    """NT by the mean number of pairs of an expert: 8 up to 4 (64 rows, top 6 of 384: 1), 16 up to 20, then 64."""
    mean = pairs / experts
    return 8 if mean <= 4 else 16 if mean <= 20 else 64


def _prefills(pairs: int, experts: int, w13: Tensor, w2: Tensor) -> bool:
    from deepinfer.ops.triton.experts_prefill_sm90 import fits

    return pairs > PREFILL_MEAN * experts and fits(w13.shape[1]) and fits(w2.shape[1])


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
    pairs, e = ids.numel(), w13.shape[0]
    parts = (x.contiguous(), x_scale.contiguous(), ids.contiguous(), weights.contiguous())
    if not _fragment_order(w13, w2):
        run = _run_portable
    elif INVARIANT:
        run = _run_grouped
    else:
        run = _run_one if t == 1 else _run_prefill if _prefills(pairs, e, w13, w2) else _run_grouped
    y = run(*parts, w13, w13_scale, w2, w2_scale, limit)
    grid = (t, triton.cdiv(h, 512))
    _combine[grid](y, parts[2], out, h, e, ids.shape[1], 512, PDL, num_warps=4, **_launch_options())
    return out


# every _run_* returns the rows of every pair after w2, bf16 [P, H]


def _run_one(
    x: Tensor,
    x_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    limit: float,
) -> Tensor:
    """One row on Hopper: no lists, its experts streamed."""
    from deepinfer.ops.triton.experts_one_sm90 import project

    act = project(x, x_scale, ids, weights, w13, w13_scale, limit, act=True)
    return project(*act, ids, weights, w2, w2_scale, limit, act=False)[0]


def _run_grouped(
    x: Tensor,
    x_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    limit: float,
) -> Tensor:
    """Any number of rows on Hopper, a row's bits the same in all."""
    from deepinfer.ops.triton.experts_sm90 import project

    nt = tokens_per_item(ids.numel(), w13.shape[0])
    lists = _route(ids, w13.shape[0], nt)
    act = project(x, x_scale, lists, weights, w13, w13_scale, limit, nt, xdiv=ids.shape[1], act=True)
    return project(*act, lists, weights, w2, w2_scale, limit, nt, xdiv=1, act=False)[0]


def _run_prefill(
    x: Tensor,
    x_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    limit: float,
) -> Tensor:
    """Many rows on Hopper."""
    from deepinfer.ops.triton.experts_prefill_sm90 import expanded, project, widths

    tiles = widths(ids.numel(), w13.shape[0])
    lists = _route(ids, w13.shape[0], tiles[0])
    k = ids.shape[1]
    act = project(*expanded(x, x_scale), lists, weights, w13, w13_scale, limit, xdiv=k, act=True, tiles=tiles)
    return project(*expanded(*act), lists, weights, w2, w2_scale, limit, xdiv=1, act=False, tiles=tiles)[0]


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
) -> Tensor:
    """Weights as stored."""
    h, k, p, e, i = x.shape[1], ids.shape[1], ids.numel(), w13.shape[0], w13.shape[1] // 2
    nt = 16 if tokens_per_item(p, e) <= 16 else 32
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


# ------------------------------------------------------------------------------------------------------------ swiglu


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
        Variant(_route_experts, {**lists, "SLOTS": "i32"}, {"NT": 64, "BLOCK": 1024, "PDL": True}, both),
        Variant(
            _combine,
            {"y": "*bf16", "ids": "*i32", "out": "*fp32", "H": "i32", "E": "i32"},
            {"K": 6, "BLOCK": 512, "PDL": True},
            both,
        ),
        Variant(
            _swiglu,
            {"gate_up": "*bf16", "out": "*bf16", "width": "i32", "limit": "fp32"},
            {"BLOCK": 1024, "PDL": True},
            both,
        ),
    ]  # fmt: skip
    chain = {"items": "*i32", "pairs": "*i32", "weights": "*fp32", "limit": "fp32"}
    for act in (True, False):
        portable = {"w": "*u8", "w_scale": "*u8", "x": "*fp8e4nv", "x_scale": "*u8", "out_scale": "*u8", **chain}
        portable |= {"out": "*u8" if act else "*bf16", "N": "i32", "K": "i32"}
        for nt in (16, 32):
            constants = {"XDIV": 6 if act else 1, "BN": 128, "NT": nt, "ACT": act, "PDL": True}
            out.append(Variant(_portable, portable, constants, {90: "wgmma", 100: "tcgen05.mma"}))
    if INTERPRETED:  # it has no Gluon
        return out
    from deepinfer.ops.triton import experts_one_sm90, experts_prefill_sm90, experts_sm90

    return out + experts_sm90.variants() + experts_one_sm90.variants() + experts_prefill_sm90.variants()


VARIANTS = _variants() + experts_router.VARIANTS
