"""Sparse attention over window and compressed records, draft blocks, vision attention.

Belongs here: kernels of ops/attention.py. Does not belong here: record layouts (records.py).

A program holds all heads of one row; K and V are the same tile, dequantised once. Keys come in tiles of BN: window (and
draft block) tiles first, then selected entries. CHUNK tiles make a chunk with its own softmax sums; chunks are merged
in one fixed order with explicit fma. So a row's bits do not depend on whether its chunks ran side by side (`_merge`
afterwards) or one after the other in one program (many rows on sm_90), nor on unused entries at the end of its list.

Tiles hold K * 2^-64: an e4m3 or e2m1 code placed in bf16 bits is its value times 2^-120 or 2^-126, and one bf16 product
with the scale (all exact; window scales up to 2^71) brings both to 2^-64. UNIT takes it out of scores and output.
On sm_90 the real shape (64 heads x 512) runs csrc/cuda/attention.cu, or where that library was not built the Gluon
kernel of attention_sm90.py; every other shape and arch runs the Triton kernel here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer import envs
from deepinfer.ops import records
from deepinfer.ops.native import cuda
from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.support import INTERPRET, bf16, e2m1_value, e4m3_value, e8m0_value, f32, round_bf16

CHUNK = 5  # tiles of a chunk: 128 + 512 keys are two chunks, 64 rows of them fill 128 of 132 SMs
BN = 64
MERGE_HEADS = 8
INVARIANT: bool = envs.get("DEEPINFER_BATCH_INVARIANT")  # one kernel and plan for all batches
NATIVE_ENTRIES = 1024  # most entries of a row that csrc/cuda/attention.cu takes
SCRATCH = 128 << 20  # bytes of chunk sums that the Triton kernel leaves to `_merge` at once
HOST_INTERPRET = bool(INTERPRET.value)
UNIT = 1.0 if HOST_INTERPRET else 2.0**64
LOG2E = 1.4426950408889634


def _place_e4m3() -> str:
    """4 codes ($4 packed), 4 bf16 scales ($5, $6) -> 4 products in 2 registers... ($0, $1)."""
    out = ["{ .reg .b32 t, u;"]
    for i, bytes_ in enumerate(("0x1404", "0x3424")):  # codes into the high bytes of both halves
        out.append(
            f"prmt.b32 t, $2, 0, {bytes_}; shr.b32 u, t, 4; and.b32 u, u, 0x07F007F0; and.b32 t, t, 0x80008000;"
            f" or.b32 t, t, u; mul.rn.bf16x2 ${i}, t, ${3 + i};"
        )
    return " ".join(out) + " }"


def _place_e2m1() -> str:
    """4 bytes ($4), 4 bf16 scales ($5, $6) -> products of the 4 low nibbles ($0, $1) and the 4 high ones ($2, $3)."""
    out = ["{ .reg .b32 t, u, v;"]
    for i, bytes_ in enumerate(("0x4140", "0x4342")):  # two bytes into the low bytes of both halves
        out.append(f"prmt.b32 t, $4, 0, {bytes_};")
        for target, left, sign in ((i, 6, 12), (2 + i, 2, 8)):
            out.append(
                f"shl.b32 u, t, {left}; and.b32 u, u, 0x01C001C0; shl.b32 v, t, {sign}; and.b32 v, v, 0x80008000;"
                f" or.b32 u, u, v; mul.rn.bf16x2 ${target}, u, ${5 + i};"
            )
    return " ".join(out) + " }"


PLACE_E4M3 = tl.constexpr(_place_e4m3())
PLACE_E2M1 = tl.constexpr(_place_e2m1())


@triton.jit
def window_keys(j, row0, slot, pos, first, floor, R, WINDOW: tl.constexpr, G: tl.constexpr):
    """Window key j -> (record of the step's buffer?, its record number there or in the ring, valid).

    Keys 0..WINDOW-1 are positions pos-WINDOW+1..pos; keys WINDOW..WINDOW+G-1 the rows of a draft block from row0 on.
    """
    p = pos - (WINDOW - 1) + j
    if G > 0:
        fresh = j >= WINDOW
        line = row0 + j - WINDOW
    else:
        fresh = p >= first
        line = row0 - (WINDOW - 1) + j
    valid = tl.where(j < WINDOW, p >= tl.maximum(floor, 0), j < WINDOW + G)
    return fresh, tl.where(fresh, line.to(tl.int64), slot.to(tl.int64) * R + p % R), valid


@triton.jit
def query_row(row, slots, positions, rows, first, floor, G: tl.constexpr):
    """(row0, slot, pos, first, floor) of a query row; block rows (G > 0) see the ring up to the block's start."""
    if G > 0:
        b = row // G
        start = tl.load(positions + b)
        return b * G, tl.load(slots + b), start - 1, start, tl.load(floor + b)
    else:
        return (
            tl.load(rows + row),
            tl.load(slots + row),
            tl.load(positions + row),
            tl.load(first + row),
            tl.load(floor + row),
        )


@triton.jit
def _window_values(base, valid, D: tl.constexpr, BN: tl.constexpr):
    """Window records at byte pointers `base` [BN] -> keys * 2^-64 bf16 [BN, D] (float32 values in the interpreter)."""
    codes = tl.load(base[:, None] + tl.arange(0, D)[None, :], mask=valid[:, None], other=0)
    scale = tl.load(base[:, None] + D + tl.arange(0, D // 32)[None, :], mask=valid[:, None], other=0).to(tl.int32)
    if INTERPRET:
        values = e4m3_value(codes).reshape(BN, D // 32, 32) * e8m0_value(scale)[:, :, None]
        return values.reshape(BN, D)
    else:
        scale = ((scale + 56) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)  # 2^(code - 127 + 120 - 64)
        scale = tl.broadcast_to(scale[:, :, None], (BN, D // 32, 32)).reshape(BN, D)
        return tl.inline_asm_elementwise(PLACE_E4M3, "=r,=r,r,r,r", [codes, scale], tl.bfloat16, True, 4)


@triton.jit
def _latent_values(base, valid, D: tl.constexpr, BN: tl.constexpr):
    """The same of latent records."""
    codes = tl.load(base[:, None] + tl.arange(0, D // 2)[None, :], mask=valid[:, None], other=0)
    scale = tl.load(base[:, None] + D // 2 + tl.arange(0, D // 16)[None, :], mask=valid[:, None], other=0)
    if INTERPRET:
        code = codes.to(tl.int32)
        pairs = tl.join(e2m1_value(code & 15), e2m1_value(code >> 4)).reshape(BN, D // 16, 16)
        return (pairs * e4m3_value(scale)[:, :, None]).reshape(BN, D)
    else:
        # e4m3 bits at bit 20 are 2^-120 of the value; codes lack 2^126: 2^62 remains for a tile of 2^-64
        wide = (scale.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 2.475880078570760549798248448e27
        wide = (wide * 2.475880078570760549798248448e27).to(tl.bfloat16)
        wide = tl.broadcast_to(wide[:, :, None], (BN, D // 16, 8)).reshape(BN, D // 2)
        low, high = tl.inline_asm_elementwise(
            PLACE_E2M1, "=r,=r,=r,=r,r,r,r", [codes, wide], (tl.bfloat16, tl.bfloat16), True, 4
        )
        return tl.join(low, high).reshape(BN, D)


@triton.jit
def _dot(a, b, acc):
    if INTERPRET:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _fold(q, k, valid, m, mass, acc, scale2):
    """One tile into the online softmax: m, mass [BH] in log2 units, acc [BH, D]."""
    s = _dot(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), tl.float32))
    s = tl.where(valid[None, :], s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1) * scale2)
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.math.exp2(tl.fma(s, scale2, -safe[:, None]))
    alpha = tl.math.exp2(m - safe)
    mass = tl.fma(mass, alpha, tl.sum(p, 1))
    if INTERPRET:
        p = round_bf16(p)
    else:
        p = p.to(tl.bfloat16)
    return top, mass, _dot(p, k, acc * alpha[:, None])


@triton.jit(
    do_not_specialize=["row_base", "ring_rows", "table_width", "K"],
    do_not_specialize_on_alignment=["slots", "positions", "rows", "first", "floor", "selected", "table"],
)
def _attend(
    q, new, ring, slots, positions, rows, first, floor, sink, pool, selected, table, out, part, stats,
    row_base, scale2, unit, ring_rows, table_width, K,
    H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, G: tl.constexpr,
    EPP: tl.constexpr, W_BYTES: tl.constexpr, L_BYTES: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Program p: chunk p % CHUNKS of row p // CHUNKS; sums to `part` and `stats`, or the output of a single chunk."""
    NW: tl.constexpr = (WINDOW + G + BN - 1) // BN
    CHUNKS: tl.constexpr = (TILES + CHUNK - 1) // CHUNK
    head, dim = tl.arange(0, BH), tl.arange(0, D)
    live = head < H
    at = tl.program_id(0).to(tl.int64)
    row, begin = row_base + tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS * CHUNK
    end = tl.minimum(begin + CHUNK, TILES)
    at_row = tl.cast(row, tl.int64) * (H * D)
    qs = tl.load(q + at_row + (head[:, None] * D + dim[None, :]), mask=live[:, None], other=0.0)
    if INTERPRET:
        qs = f32(qs)
    row0, slot, pos, old, low = query_row(row, slots, positions, rows, first, floor, G)
    m = tl.full((BH,), float("-inf"), tl.float32)
    mass = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, D), tl.float32)
    for t in range(begin, end):
        if t < NW:  # one loop: with a loop for each kind of tile, sm_100 spills 400 bytes
            j = t * BN + tl.arange(0, BN)
            fresh, line, valid = window_keys(j, row0, slot, pos, old, low, ring_rows, WINDOW, G)
            k = _window_values(tl.where(fresh, new + line * W_BYTES, ring + line * W_BYTES), valid, D, BN)
        else:
            j = (t - NW) * BN + tl.arange(0, BN)
            entry = tl.load(selected + tl.cast(row, tl.int64) * K + j, mask=j < K, other=-1)
            valid = entry >= 0
            page = tl.load(table + tl.cast(slot, tl.int64) * table_width + entry // EPP, mask=valid, other=0)
            k = _latent_values(pool + (page.to(tl.int64) * EPP + entry % EPP) * L_BYTES, valid, D, BN)
        m, mass, acc = _fold(qs, k, valid, m, mass, acc, scale2)
    if CHUNKS > 1:
        tl.store(stats + at * (2 * BH) + head, m)
        tl.store(stats + at * (2 * BH) + BH + head, mass)
        tl.store(part + at * (BH * D) + (head[:, None] * D + dim[None, :]), acc)
    else:
        acc = _merged(part, stats, sink, at, acc, m, mass, unit, head, dim, H, D, BH, CHUNKS)
        tl.store(out + at_row + (head[:, None] * D + dim[None, :]), bf16(acc), mask=live[:, None])


@triton.jit
def _merged(
    part, stats, sink, park, acc, m, mass, unit, head, dim,
    H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Sums of the last chunk plus the parked ones, last first, over the denominator with the sink -> float32 rows."""
    sinks = tl.load(sink + head, mask=head < H, other=0.0)
    top = tl.maximum(m, sinks * 1.4426950408889634)
    for c in tl.static_range(CHUNKS - 1):
        top = tl.maximum(top, tl.load(stats + (park + c) * (2 * BH) + head))
    w = tl.math.exp2(m - top)
    den = tl.fma(mass, w, tl.math.exp2(tl.fma(sinks, 1.4426950408889634, -top)))
    acc = acc * w[:, None]
    for c in tl.static_range(CHUNKS - 1):
        w = tl.math.exp2(tl.load(stats + (park + c) * (2 * BH) + head) - top)
        den = tl.fma(tl.load(stats + (park + c) * (2 * BH) + BH + head), w, den)
        acc = tl.fma(tl.load(part + (park + c) * (BH * D) + (head[:, None] * D + dim[None, :])), w[:, None], acc)
    return acc * (unit / den)[:, None]


@triton.jit
def _merge(
    part, stats, sink, out, unit,
    H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, HEADS: tl.constexpr, CHUNKS: tl.constexpr,
    SWAPPED: tl.constexpr,
):  # fmt: skip
    """Output of HEADS heads of one row from the sums of its chunks; SWAPPED: dims in the order of attention_sm90.py."""
    head, dim = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, D)
    spot = head[:, None] * D + dim[None, :]
    park = tl.program_id(0).to(tl.int64) * CHUNKS
    last = park + CHUNKS - 1
    acc = tl.load(part + last * (BH * D) + spot)
    m = tl.load(stats + last * (2 * BH) + head)
    mass = tl.load(stats + last * (2 * BH) + BH + head)
    acc = _merged(part, stats, sink, park, acc, m, mass, unit, head, dim, H, D, BH, CHUNKS)
    if SWAPPED:
        acc = tl.permute(acc.reshape(HEADS, D // 8, 4, 2), (0, 1, 3, 2)).reshape(HEADS, D)
    tl.store(out + tl.program_id(0).to(tl.int64) * (H * D) + spot, bf16(acc), mask=(head < H)[:, None])


@functools.cache
def _programs(device: torch.device) -> int:
    """Programs of the Gluon kernel that run at once, one per SM."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _split(rows: int, tiles: int, sms: int) -> int:
    """Blocks that share a row in csrc/cuda/attention.cu: as many as fit at once (a GPC holds 16 whole ones of 8).

    One plan for all batches where bits must not depend on them; two blocks a row keep 64 rows as fast as they can be.
    """
    if INVARIANT:
        return 2 if tiles >= 4 else 1
    room = sms // 16 * 16
    return next((s for s in (8, 4, 2) if s <= tiles and s * rows <= room), 1)


def _run(
    q: Tensor,
    new: Tensor,
    ring: Tensor,
    per_row: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],  # slots, positions, rows, first, floor
    sink: Tensor,
    pool: Tensor | None,
    selected: Tensor | None,
    table: Tensor,
    scale: float,
    window: int,
    block: int,
    entries_per_page: int,
) -> Tensor:
    q = q.contiguous()
    out = torch.empty_like(q)
    t, h, d = q.shape
    if t == 0:
        return out
    assert ring.is_contiguous() and new.is_contiguous() and (pool is None or pool.is_contiguous())
    k = 0
    if pool is None or selected is None or selected.shape[1] == 0:
        pool, selected = ring, per_row[0]  # never read
    else:
        selected, k = selected.contiguous(), selected.shape[1]
    tiles = triton.cdiv(window + block, BN) + triton.cdiv(k, BN)
    chunks = triton.cdiv(tiles, CHUNK)
    bh = max(16, triton.next_power_of_2(h))
    tensors = (q, new, ring, *per_row, sink, pool, selected, table, out)
    scalars = (scale * LOG2E * UNIT, UNIT, ring.shape[1], table.stride(0), k)
    shape: dict[str, Any] = {
        "H": h, "D": d, "BH": bh, "BN": BN, "WINDOW": window, "G": block, "EPP": entries_per_page,
        "W_BYTES": records.window_bytes(d), "L_BYTES": records.latent_bytes(d), "CHUNK": CHUNK, "TILES": tiles,
    }  # fmt: skip

    def scratch(parked: int) -> tuple[Tensor, Tensor]:
        part = torch.empty((parked, bh, d), dtype=torch.float32, device=q.device)
        return part, torch.empty((parked, 2, bh), dtype=torch.float32, device=q.device)

    def merge(part: Tensor, stats: Tensor, out: Tensor, swapped: bool) -> None:
        grid = (out.shape[0], triton.cdiv(h, MERGE_HEADS))
        _merge[grid](
            part, stats, sink, out, UNIT,
            H=h, D=d, BH=bh, HEADS=MERGE_HEADS, CHUNKS=chunks, SWAPPED=int(swapped), num_warps=4,
        )  # fmt: skip

    real = _hopper(q.device) and (h, d) == (64, 512)
    lib = cuda.library() if real else ""
    fits = window <= ring.shape[1] and k <= NATIVE_ENTRIES and entries_per_page & (entries_per_page - 1) == 0
    if not isinstance(lib, str) and fits:
        sms = _programs(q.device)
        numbers = (ring.shape[1], table.stride(0), k, window, block, entries_per_page.bit_length() - 1)
        cuda.attention(lib, tensors[:-1], out, scalars[0], numbers, _split(t, tiles, sms), sms)
        return out
    if real and window + block <= CHUNK * BN:
        from deepinfer.ops.triton import attention_sm90

        width = _programs(q.device)
        split = chunks > 1 and t * chunks <= width
        items = t * chunks if split else t
        grid = min(items, width)
        part, stats = scratch(grid * (1 if split else chunks) if chunks > 1 else 1)
        shape["SPLIT"] = int(split)
        attention_sm90.attend(grid, width, (*tensors, part, stats, items), scalars, shape)
        if split:
            merge(part, stats, out, True)
        return out
    most = t if chunks == 1 else max(1, SCRATCH // (chunks * bh * d * 4))
    part, stats = scratch(min(t, most) * chunks if chunks > 1 else 1)
    for i in range(0, t, most):
        n = min(most, t - i)
        _attend[(n * chunks,)](
            *tensors, part, stats, i, *scalars, **shape, num_warps=8 if d >= 256 else 4, num_stages=1
        )
        if chunks > 1:
            merge(part, stats, out[i : i + n], False)
    return out


def attention(
    q: Tensor,
    new: Tensor,
    ring: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: Tensor,
    first: Tensor,
    floor: Tensor,
    sink: Tensor,
    pool: Tensor | None,
    selected: Tensor | None,
    page_table: Tensor,
    scale: float,
    window: int,
    ratio: int,
    page_size: int,
) -> Tensor:
    per_row = (slots, positions, rows, first, floor)
    per_page = page_size // max(1, ratio)
    return _run(q, new, ring, per_row, sink, pool, selected, page_table, scale, window, 0, per_page)


def block_attention(
    q: Tensor,
    block: Tensor,
    ring: Tensor,
    slots: Tensor,
    start: Tensor,
    floor: Tensor,
    sink: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    if slots.shape[0] == 0:
        return torch.empty_like(q)
    per_row = (slots, start, slots, slots, floor)
    return _run(
        q, block, ring, per_row, sink, None, None, slots.view(-1, 1), scale, window, q.shape[0] // slots.shape[0], 1
    )


@triton.jit
def _vision_rope(qkv, cos, sin, out, heads, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr):
    """Rotates q and k of one patch: out [2, heads, n, D]."""
    n, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, i = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    live = (head < heads) & (i < D // 2)
    at = qkv + n * (3 * heads * D) + which * heads * D + head * D + i
    a = f32(tl.load(at, mask=live, other=0.0))
    b = f32(tl.load(at + D // 2, mask=live, other=0.0))
    c = tl.load(cos + n * (D // 2) + i, mask=i < D // 2, other=0.0)
    s = tl.load(sin + n * (D // 2) + i, mask=i < D // 2, other=0.0)
    to = out + ((which * heads + head).to(tl.int64) * tl.num_programs(0) + n) * D + i
    tl.store(to, bf16(a * c - b * s), mask=live)
    tl.store(to + D // 2, bf16(b * c + a * s), mask=live)


def vision_attention(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """One rope kernel, then the library's attention: one call is one image, so its bits do not depend on others."""
    n, d = qkv.shape[0], qkv.shape[1] // (3 * heads)
    qkv = qkv.contiguous()
    if n == 0:
        return qkv.new_empty((0, heads * d))
    qk = torch.empty((2, heads, n, d), dtype=qkv.dtype, device=qkv.device)
    _vision_rope[(n, 2)](
        qkv, cos.contiguous(), sin.contiguous(), qk, heads,
        D=d, HALF=triton.next_power_of_2(d // 2), HEADS=triton.next_power_of_2(heads), num_warps=4,
    )  # fmt: skip
    v = qkv[:, 2 * heads * d :].unflatten(1, (heads, d)).transpose(0, 1)
    o = torch.nn.functional.scaled_dot_product_attention(qk[0:1], qk[1:2], v.unsqueeze(0))
    return o[0].transpose(0, 1).reshape(n, heads * d)


_POINTERS = {
    **{name: "*u8" for name in ("new", "ring", "pool")},
    **{name: "*i32" for name in ("slots", "positions", "rows", "first", "floor", "selected", "table")},
    **{name: "*fp32" for name in ("sink", "part", "stats")},
    **{"q": "*bf16", "out": "*bf16"},
}
SIGNATURE = {
    **_POINTERS,
    **{name: "i32" for name in ("row_base", "items", "ring_rows", "table_width", "K")},
    **{"scale2": "fp32", "unit": "fp32"},
}
REAL = {
    "H": 64, "D": 512, "BH": 64, "BN": BN, "WINDOW": 128, "G": 0, "EPP": 64, "W_BYTES": 528, "L_BYTES": 288,
    "CHUNK": CHUNK, "TILES": 10,
}  # fmt: skip
SHAPES = (REAL, {**REAL, "TILES": 2}, {**REAL, "TILES": 3, "G": 5})  # with entries, window only, draft block
SMALL = {**REAL, "H": 8, "D": 64, "BH": 16, "W_BYTES": 80, "L_BYTES": 48, "WINDOW": 16, "TILES": 2}


def _hopper_variants() -> list[Variant]:
    if HOST_INTERPRET:  # Gluon cannot be loaded there
        return []
    from deepinfer.ops.triton import attention_sm90 as sm90

    views = {"new32": "*i32", "ring32": "*i32", "pool16": "*i16", "pool32": "*i32"}
    return [
        Variant(
            sm90._attend_sm90,
            {**SIGNATURE, **views},
            {**shape, "LINES": sm90.lines_of(shape), "STEP": 132, "SPLIT": split},
            {90: "wgmma.mma_async"},
            {"num_warps": 8},
            gluon=True,
        )
        for shape, split in ((REAL, 1), *((shape, 0) for shape in SHAPES))
    ]


def _variants() -> list[Variant]:
    found = [
        *_hopper_variants(),
        *(Variant(_attend, SIGNATURE, s, {100: "tcgen05.mma"}, {"num_warps": 8, "num_stages": 1}) for s in SHAPES),
        Variant(_attend, SIGNATURE, SMALL, {90: "", 100: ""}, {"num_warps": 4, "num_stages": 1}),
        Variant(
            _merge,
            {**{n: _POINTERS[n] for n in ("part", "stats", "sink", "out")}, "unit": "fp32"},
            {"H": 64, "D": 512, "BH": 64, "HEADS": 8, "CHUNKS": 2, "SWAPPED": 1},
            {90: "", 100: ""},
            {"num_warps": 4},
        ),
        Variant(
            _vision_rope,
            {"qkv": "*bf16", "cos": "*fp32", "sin": "*fp32", "out": "*bf16", "heads": "i32"},
            {"D": 64, "HALF": 32, "HEADS": 16},
            {90: "", 100: ""},
            {"num_warps": 4},
        ),
    ]
    return found


VARIANTS = _variants()
