"""Records of the cache on CUDA: packing, writes to rings and pages, pair pooling.

Belongs here: kernels of ops/cache.py. Does not belong here: byte layouts (records.py; offsets here follow it).

Packing takes BG scale groups a program, whatever rows they belong to: group g is group g % G of row g // G. A maximum
has no order, so bits depend on the row alone. Writes move words of 4 bytes where the widths allow.
Legend: T rows, D head dim, G groups of a row, W record width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepinfer.ops import records
from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.support import (
    INTERPRET,
    bf16,
    e4m3_code,
    e4m3_value,
    e8m0_inverse,
    f32,
    fp4_scale,
    fp8_scale,
)  # fmt: skip

INTERPRETED = bool(INTERPRET.value)
PDL = not INTERPRETED
BG = 64  # scale groups of a packing program
TILE = 2048  # elements of a writing program


def _options() -> dict[str, Any]:
    return {} if INTERPRETED else {"enable_fp_fusion": False, "launch_pdl": PDL}


# ------------------------------------------------------------------------------------------------------------- packing


@triton.jit
def fp4_words(q):
    """float32 [..., 8] within +-6 -> eight e2m1 codes in an int32, the first in the lowest bits.

    Times 2^-126 the subnormals of e2m1 are those of float32, so one rounding of the bits to nearest even serves all.
    """
    bits = (q * 1.1754943508222875e-38).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    code = ((size + 0x1FFFFF + ((size >> 22) & 1)) >> 22) | ((bits >> 28) & 8)
    return tl.sum(code << (tl.arange(0, 8) * 4)[None, None, :], 2)


@triton.jit
def divided(v, s):
    """v / s as a division rounds it wherever that decides a code: exactly where the quotient is a number, which ties
    are. s has few bits and its inverse is shared, so this is three instructions a value instead of ten and a branch.
    """
    r = tl.div_rn(1.0, s)
    q = tl.abs(v) * r
    q = tl.fma(tl.fma(-q, s, tl.abs(v)), r, q)
    sign = v.to(tl.int32, bitcast=True) & -2147483648  # of zeros too
    return (q.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _pack_window(x, rec, groups, G: tl.constexpr, SIZE: tl.constexpr, BG: tl.constexpr, PDL: tl.constexpr):
    """[D codes e4m3 | G scales E8M0 | zeros to SIZE]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    g = (tl.program_id(0) * BG + tl.arange(0, BG)).to(tl.int64)
    ok = g < groups
    lane = tl.arange(0, 32)
    v = f32(tl.load(x + g[:, None] * 32 + lane[None, :], mask=ok[:, None], other=0.0))
    e = fp8_scale(tl.maximum(tl.max(tl.abs(v), 1), 1e-4))
    row = rec + g // G * SIZE
    at = g % G
    tl.store(row[:, None] + at[:, None] * 32 + lane[None, :], e4m3_code(v * e8m0_inverse(e)[:, None]), mask=ok[:, None])
    tl.store(row + G * 32 + at, e.to(tl.uint8), mask=ok)
    for pad in tl.static_range(SIZE - G * 33):
        tl.store(row + G * 33 + pad, tl.zeros((BG,), tl.uint8), mask=ok & (at == 0))


@triton.jit
def _pack_latent(x, rec, groups, G: tl.constexpr, SIZE: tl.constexpr, BG: tl.constexpr, PDL: tl.constexpr):
    """[D/2 bytes of two e2m1 codes | G scales e4m3, one per 16 | zeros to SIZE]. Records as words and as bytes."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    g = (tl.program_id(0) * BG + tl.arange(0, BG)).to(tl.int64)
    ok = g < groups
    word = tl.arange(0, 2)[None, :]
    at = (g * 16)[:, None, None] + word[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    v = f32(tl.load(x + at, mask=ok[:, None, None], other=0.0))
    amax = tl.maximum(tl.max(tl.max(tl.abs(v), 2), 1), 6.0 * 0.001953125)
    e = e4m3_code(tl.minimum(tl.maximum(tl.div_rn(amax, 6.0), 0.001953125), 448.0))
    q = divided(v, e4m3_value(e)[:, None, None])
    words = rec.to(tl.pointer_type(tl.int32))
    to = (g // G * (SIZE // 4) + g % G * 2)[:, None] + word
    tl.store(words + to, fp4_words(tl.minimum(tl.maximum(q, -6.0), 6.0)), mask=ok[:, None])
    row = rec + g // G * SIZE
    tl.store(row + G * 8 + g % G, e, mask=ok)
    for pad in tl.static_range(SIZE - G * 9):
        tl.store(row + G * 9 + pad, tl.zeros((BG,), tl.uint8), mask=ok & (g % G == 0))


@triton.jit
def _pack_index(x, rec, groups, G: tl.constexpr, SIZE: tl.constexpr, BG: tl.constexpr, PDL: tl.constexpr):
    """[D/2 bytes of two e2m1 codes | G scales E8M0, one per 32]. Records as words and as bytes."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    g = (tl.program_id(0) * BG + tl.arange(0, BG)).to(tl.int64)
    ok = g < groups
    word = tl.arange(0, 4)[None, :]
    at = (g * 32)[:, None, None] + word[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    v = f32(tl.load(x + at, mask=ok[:, None, None], other=0.0))
    e = fp4_scale(tl.maximum(tl.max(tl.max(tl.abs(v), 2), 1), 7.052966104933725e-38))  # 6 * 2^-126
    if SIZE % 4 == 0:
        words = rec.to(tl.pointer_type(tl.int32))
        to = (g // G * (SIZE // 4) + g % G * 4)[:, None] + word
        tl.store(words + to, fp4_words(v * e8m0_inverse(e)[:, None, None]), mask=ok[:, None])
    else:  # records of a small head: codes byte by byte
        both = fp4_words(v * e8m0_inverse(e)[:, None, None])
        for i in tl.static_range(4):
            to = rec + (g // G * SIZE + g % G * 16)[:, None] + word * 4 + i
            tl.store(to, (both >> (8 * i)).to(tl.uint8), mask=ok[:, None])
    tl.store(rec + g // G * SIZE + G * 16 + g % G, e.to(tl.uint8), mask=ok)


def _pack(kernel: Any, x: Tensor, size: int, block: int) -> Tensor:
    if x.dtype is torch.float32:
        return x.clone()
    x = x.contiguous()
    rec = torch.empty((*x.shape[:-1], size), dtype=torch.uint8, device=x.device)
    groups = x.numel() // block
    if groups:
        kernel[(triton.cdiv(groups, BG),)](
            x, rec, groups, G=x.shape[-1] // block, SIZE=size, BG=BG, PDL=PDL, num_warps=4, **_options()
        )
    return rec


def pack_window(kv: Tensor) -> Tensor:
    return _pack(_pack_window, kv, records.window_bytes(kv.shape[-1]), 32)


def pack_latent(kv: Tensor) -> Tensor:
    return _pack(_pack_latent, kv, records.latent_bytes(kv.shape[-1]), 16)


def pack_index(x: Tensor) -> Tensor:
    return _pack(_pack_index, x, records.index_bytes(x.shape[-1]), 32)


# -------------------------------------------------------------------------------------------------------------- writes


@triton.jit
def _ring_write(
    ring, rec, slots, positions, run_last, T, SIZE, W, BR: tl.constexpr, BW: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    w = tl.arange(0, BW)
    pos = tl.load(positions + row, mask=row < T, other=0)
    newest = tl.load(run_last + row, mask=row < T, other=0)
    slot = tl.load(slots + row, mask=row < T, other=0).to(tl.int64)
    ok = ((row < T) & (pos > newest - SIZE))[:, None] & (w < W)[None, :]
    target = slot * SIZE + pos % SIZE
    value = tl.load(rec + row.to(tl.int64)[:, None] * W + w[None, :], mask=ok, other=0)
    tl.store(ring + target[:, None] * W + w[None, :], value, mask=ok)


@triton.jit
def _page_write(
    pool, rec, table, slots, positions, T, W, CODES, table_width, ratio, page_size,
    BR: tl.constexpr, BW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Word w of an entry goes to the codes of its page (w < CODES) or to the scales behind all codes."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    w = tl.arange(0, BW)
    pos = tl.load(positions + row, mask=row < T, other=0)
    done = (row < T) & ((pos + 1) % ratio == 0)
    slot = tl.load(slots + row, mask=done, other=0).to(tl.int64)
    page = tl.load(table + slot * table_width + pos // page_size, mask=done, other=0).to(tl.int64)
    entry = pos % page_size // ratio
    entries = page_size // ratio
    ok = done[:, None] & (w < W)[None, :]
    value = tl.load(rec + row.to(tl.int64)[:, None] * W + w[None, :], mask=ok, other=0)
    inside = tl.where(
        (w < CODES)[None, :],
        entry[:, None] * CODES + w[None, :],
        entries * CODES + entry[:, None] * (W - CODES) + (w - CODES)[None, :],
    )
    tl.store(pool + page[:, None] * (entries * W) + inside, value, mask=ok)


def _words(width: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Byte tensors as int32 where `width` bytes and their addresses allow."""
    whole = width % 4 == 0 and all(t.data_ptr() % 4 == 0 and t.shape[-1] % 4 == 0 for t in tensors)
    return tuple(t.view(torch.int32) for t in tensors) if whole else tensors


def _rows(width: int, rows: int) -> tuple[int, int]:
    """(rows of a program, padded width): few rows spread over many programs."""
    bw = triton.next_power_of_2(width)
    return max(1, (TILE if rows > 256 else TILE // 16) // bw), bw


def ring_write(ring: Tensor, rec: Tensor, slots: Tensor, positions: Tensor, run_last: Tensor) -> None:
    t = rec.shape[0]
    if t == 0:
        return
    assert ring.is_contiguous()
    size = ring.shape[1]
    rec = rec.contiguous()
    if rec.dtype is torch.uint8:
        ring, rec = _words(rec.shape[1], ring, rec)
    width = rec.shape[1]
    br, bw = _rows(width, t)
    _ring_write[(triton.cdiv(t, br),)](
        ring, rec, slots, positions, run_last, t, size, width, BR=br, BW=bw, PDL=PDL, num_warps=4, **_options()
    )


def _paged(
    pool: Tensor, rec: Tensor, table: Tensor, slots: Tensor, positions: Tensor, ratio: int, page_size: int, codes: int
) -> None:
    """`codes` bytes of an entry are kept apart from its scales (0: the entry is one piece)."""
    t = rec.shape[0]
    if t == 0:
        return
    assert pool.is_contiguous() and table.stride(1) == 1
    rec = rec.contiguous()
    if rec.dtype is torch.uint8:
        whole = rec.shape[1]
        pool, rec = _words(codes | (whole - codes) | whole, pool, rec)
        codes = codes * rec.shape[1] // whole
    width = rec.shape[1]
    br, bw = _rows(width, t)
    _page_write[(triton.cdiv(t, br),)](
        pool, rec, table, slots, positions, t, width, codes or width, table.stride(0), ratio, page_size,
        BR=br, BW=bw, PDL=PDL, num_warps=4, **_options(),
    )  # fmt: skip


def page_write(
    pool: Tensor,
    rec: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    ratio: int,
    page_size: int,
) -> None:
    _paged(pool, rec, page_table, slots, positions, ratio, page_size, 0)


def index_page_write(
    pool: Tensor,
    rec: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    ratio: int,
    page_size: int,
) -> None:
    codes = 0 if pool.dtype is torch.float32 else rec.shape[1] * 16 // 17  # D/2 of D/2 + D/32 bytes
    _paged(pool, rec, page_table, slots, positions, ratio, page_size, codes)


# ------------------------------------------------------------------------------------------------------------- pooling


@triton.jit
def _pair_pool(kv_gate, open_pair, slots, positions, run_start, out, D, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < D
    pos = tl.load(positions + row)
    own = kv_gate + tl.cast(row, tl.int64) * 2 * D
    stored = open_pair + (tl.load(slots + row).to(tl.int64) * N + (pos + N - 1) % N) * 2 * D
    above = row > tl.load(run_start + row)
    full = ok & (pos % 2 == 1)
    v1 = tl.load(own + c, mask=full, other=0.0)
    s1 = tl.load(own + D + c, mask=full, other=0.0)
    v0 = tl.load(own - 2 * D + c, mask=full & above, other=0.0) + tl.load(
        stored + c, mask=full & (above == 0), other=0.0
    )
    s0 = tl.load(own - D + c, mask=full & above, other=0.0) + tl.load(
        stored + D + c, mask=full & (above == 0), other=0.0
    )
    w1 = 1.0 / (1.0 + tl.exp(s0 - s1))
    value = v0 * (1.0 - w1) + v1 * w1
    at = out + tl.cast(row, tl.int64) * D + c
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(at, bf16(value), mask=ok)
    else:
        tl.store(at, value, mask=ok)


def pair_pool(
    kv_gate: Tensor, open_pair: Tensor, slots: Tensor, positions: Tensor, run_start: Tensor, out_f32: bool
) -> Tensor:
    t, d = kv_gate.shape[0], kv_gate.shape[1] // 2
    out = torch.empty((t, d), dtype=torch.float32 if out_f32 else torch.bfloat16, device=kv_gate.device)
    if out.numel():
        block = min(512, triton.next_power_of_2(d))
        _pair_pool[(t, triton.cdiv(d, block))](
            kv_gate.contiguous(), open_pair.contiguous(), slots, positions, run_start, out, d, open_pair.shape[1],
            BLOCK=block, PDL=PDL, num_warps=4, **_options(),
        )  # fmt: skip
    return out


# ----------------------------------------------------------------------------------------------------------- compiling

_ANY = {90: "", 100: ""}
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_PACK = {"x": "*bf16", "rec": "*u8", "groups": "i32"}
_META = {"slots": "*i32", "positions": "*i32"}


def _ring(kind: str, br: int, bw: int) -> Variant:
    signature = {"ring": kind, "rec": kind, **_META, "run_last": "*i32", "T": "i32", "SIZE": "i32", "W": "i32"}
    return Variant(_ring_write, signature, {"BR": br, "BW": bw, "PDL": 1}, _ANY, _OPTIONS)


def _page(kind: str, br: int, bw: int) -> Variant:
    scalars = dict.fromkeys(("T", "W", "CODES", "table_width", "ratio", "page_size"), "i32")
    signature = {"pool": kind, "rec": kind, "table": "*i32", **_META, **scalars}
    return Variant(_page_write, signature, {"BR": br, "BW": bw, "PDL": 1}, _ANY, _OPTIONS)


VARIANTS = [
    Variant(_pack_window, _PACK, {"G": 16, "SIZE": 528, "BG": BG, "PDL": 1}, _ANY, _OPTIONS),
    Variant(_pack_latent, _PACK, {"G": 32, "SIZE": 288, "BG": BG, "PDL": 1}, _ANY, _OPTIONS),
    Variant(_pack_index, _PACK, {"G": 4, "SIZE": 68, "BG": BG, "PDL": 1}, _ANY, _OPTIONS),
    _ring("*i32", 8, 256),
    _ring("*i32", 2048, 1),
    _ring("*fp32", 2, 1024),
    _page("*i32", 16, 128),
    _page("*i32", 64, 32),
    _page("*u8", 32, 64),
    Variant(
        _pair_pool,
        {
            "kv_gate": "*fp32",
            "open_pair": "*fp32",
            **_META,
            "run_start": "*i32",
            "out": "*bf16",
            "D": "i32",
            "N": "i32",
        },
        {"BLOCK": 512, "PDL": 1},
        _ANY,
        _OPTIONS,
    ),
]
