"""Index scores and top-k selection on CUDA, in one or two levels.

Belongs here: launch plans, a portable logits kernel, block maxima, a portable selection. Does not belong here: the
logits kernel that H200 runs (csrc/cuda/logits.cu), the selection that H200 and B200 run (csrc/cuda/topk.cu).

Scores are exact: e2m1 codes times powers of two are bf16 numbers, the tensor core sums their products without loss
(unless the four scales of a key differ by more than 2^8), and the heads are added in float32 in one order. So a score
has the same bits however many rows or keys are scored with it, and only float32 rounding separates it from the
reference. Each record is scaled to its largest block scale before the dot; that scale, a power of two, goes onto the
head weight or the result.
Rows of a tile that read one slot share the decoded keys; other rows are scored alone. Logits go through a workspace of
bounded size, rows in chunks. Legend: M rows, H heads, D index dim, S entries that a slot can hold.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from deepinfer.ops import indexer
from deepinfer.ops.native import cuda
from deepinfer.ops.triton.compile import Variant
from deepinfer.ops.triton.support import INTERPRET, bf16, e2m1_value, e8m0_value

INTERPRETED = bool(INTERPRET.value)
PDL = not INTERPRETED
WORKSPACE = 512 << 20  # bytes of logits at a time
TILE = 4  # rows of the portable kernel that share decoded keys; a row's sum over heads stays in one warp
MANY_ROWS = 512  # from here on logits.cu takes eight rows a tile: a prefill, whose neighbours read one slot
FEW_ROWS = 64  # up to here rows are scored alone: as many requests in a decode step, and more programs


def _launch_options() -> dict[str, Any]:
    return {"launch_pdl": True} if PDL else {}


# ------------------------------------------------------------------------------------------------------------- logits

# Nibbles of two words -> eight pairs of bf16, scaled. A code shifted to bits 8..6 of a bf16 is its value * 2^-126,
# subnormals included; the scale brings 2^126 back. 2.4 instructions a value.
_STEP = "{shift} m, {half}, {by}; and.b32 m, m, 0x01C001C0; {sign} and.b32 s, s, 0x80008000; or.b32 m, m, s;"
_DECODE = "{ .reg .b32 lo, hi, m, s; prmt.b32 lo, $8, $9, 0x5410; prmt.b32 hi, $8, $9, 0x7632; "
for _i in range(8):
    _half, _by = "lo" if _i < 4 else "hi", 6 - 4 * (_i % 4)
    _sign = f"shl.b32 s, {_half}, {12 - 4 * (_i % 4)};"
    _DECODE += _STEP.format(shift="shl.b32" if _by > 0 else "shr.u32", half=_half, by=abs(_by), sign=_sign)
    _DECODE += f" mul.rn.bf16x2 ${_i}, m, $10; "
DECODE_ASM = tl.constexpr(_DECODE + "}")


@triton.jit
def _join8(a, b, c, d, e, f, g, h):
    """Eight [R, W] -> [R, 8 W], interleaved."""
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    even = tl.join(tl.join(a, e), tl.join(c, g))
    return tl.reshape(tl.join(even, odd), (a.shape[0], a.shape[1] * 8))


@triton.jit
def _fetch(codes, scales, ok, D: tl.constexpr, DP: tl.constexpr, FAST: tl.constexpr):
    """Records as stored. FAST (D = 128): pointers to words, a record is 16 words of codes and one of scales."""
    if FAST:
        word = tl.arange(0, 16)
        c = tl.load(codes[:, None] + word[None, :], mask=ok[:, None], other=0)
        s = tl.load(scales, mask=ok, other=0)
    else:
        byte = tl.arange(0, DP // 2)
        inside = ok[:, None] & (byte < D // 2)[None, :]
        c = tl.load(codes[:, None] + byte[None, :], mask=inside, other=0)
        s = tl.load(scales[:, None] + (byte // 16)[None, :], mask=inside, other=0)
    return c, s


@triton.jit
def _decode(c, s, DP: tl.constexpr, FAST: tl.constexpr):
    """(values [R, DP] in units of the largest scale, that scale float32 [R])."""
    if FAST:
        top = tl.maximum(tl.maximum(s & 255, (s >> 8) & 255), tl.maximum((s >> 16) & 255, (s >> 24) & 255))
        code = (s[:, None] >> ((tl.arange(0, 16) // 4) * 8)[None, :]) & 255
        if INTERPRET:
            scale = e8m0_value(tl.maximum(code - top[:, None] + 127, 0))
            v = _join8(
                e2m1_value(c & 15) * scale,
                e2m1_value((c >> 4) & 15) * scale,
                e2m1_value((c >> 8) & 15) * scale,
                e2m1_value((c >> 12) & 15) * scale,
                e2m1_value((c >> 16) & 15) * scale,
                e2m1_value((c >> 20) & 15) * scale,
                e2m1_value((c >> 24) & 15) * scale,
                e2m1_value((c >> 28) & 15) * scale,
            )
        else:
            factor = (tl.maximum(code - top[:, None] + 253, 0) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
            a0, a1, a2, a3, a4, a5, a6, a7 = tl.inline_asm_elementwise(
                DECODE_ASM,
                "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
                [c, factor],
                dtype=(tl.bfloat16,) * 8,
                is_pure=True,
                pack=2,
            )
            v = _join8(a0, a1, a2, a3, a4, a5, a6, a7)
    else:
        code = s.to(tl.int32)
        top = tl.max(code, 1)
        scale = e8m0_value(tl.maximum(code - top[:, None] + 127, 0))
        byte = c.to(tl.int32)
        pair = tl.join(e2m1_value(byte & 15) * scale, e2m1_value(byte >> 4) * scale)
        v = tl.reshape(pair, (c.shape[0], DP))
        if not INTERPRET:  # the interpreter has no bf16 arithmetic
            v = bf16(v)
    return v, e8m0_value(top)


@triton.jit
def _entries(p, blocks, end, BLOCK: tl.constexpr):
    """Entries at positions p of a row (BLOCK > 0: of its candidate blocks), -1 beyond `end` or in unused blocks."""
    if BLOCK > 0:
        b = tl.load(blocks + p // BLOCK, mask=p < end, other=-1)
        return tl.where(b >= 0, b * BLOCK + p % BLOCK, -1)
    else:
        return tl.where(p < end, p, -1)


@triton.jit
def _score(
    q, weights, pool, table, visible, blocks, out, row, count, lo, hi, seen, width, page_stride,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ENTRIES: tl.constexpr, T: tl.constexpr,
    BS: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Logits of positions lo..hi-1 for rows row..row+count-1 (count <= T) of one slot, `table` its page list.

    No row sees more than `seen` entries.
    """
    # words where FAST, else bytes
    RECORD: tl.constexpr = 17 if FAST else D // 2 + D // 32
    CODES: tl.constexpr = 16 if FAST else D // 2
    SCALES: tl.constexpr = 1 if FAST else D // 32
    col = tl.arange(0, T * HP)
    live = (col // HP < count) & (col % HP < H)
    head = (row + col // HP).to(tl.int64) * H + col % HP
    qc, qs = _fetch(q + head * RECORD, q + head * RECORD + CODES, live, D, DP, FAST)
    queries, q_scale = _decode(qc, qs, DP, FAST)
    queries = tl.trans(queries)
    w = tl.load(weights + head, mask=live, other=0.0) * q_scale
    t = tl.arange(0, T)
    limit = tl.load(visible + row + t, mask=t < count, other=0)
    target = out + (row + t).to(tl.int64) * width
    for start in tl.range(lo, hi, BS):
        p = start + tl.arange(0, BS)
        e = _entries(p, blocks, hi, BLOCK)
        ok = (e >= 0) & (e < seen)
        page = tl.load(table + e // ENTRIES, mask=ok, other=0)
        base = pool + page.to(tl.int64) * page_stride
        at = e % ENTRIES
        c, s = _fetch(base + at * CODES, base + (ENTRIES * CODES + at * SCALES), ok, D, DP, FAST)
        keys, scale = _decode(c, s, DP, FAST)
        dots = tl.maximum(tl.dot(keys, queries), 0.0) * w[None, :]
        score = tl.sum(tl.reshape(dots, (BS, T, HP)), 2) * scale[:, None]
        shown = ok[:, None] & (e[:, None] < limit[None, :])
        place = target[None, :] + p[:, None]
        if BLOCK > 0:  # every position is a candidate of the selection
            tl.store(place, tl.where(shown, score, float("-inf")), mask=(p < hi)[:, None] & (t < count)[None, :])
        else:
            tl.store(place, score, mask=shown)


@triton.jit(do_not_specialize=["M", "table_width", "num_blocks", "chunk", "free"])
def _logits(
    q, weights, pool, table, slots, visible, blocks, out, M, width, table_width, page_stride, num_blocks, chunk, free,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ENTRIES: tl.constexpr, T: tl.constexpr,
    BLOCK: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows that see at most `free` entries are left out (BLOCK = 0). Grid (tiles of T rows, chunks of positions)."""
    if PDL:
        gdc_wait()
    first = tl.program_id(0) * T
    lo = tl.program_id(1) * chunk
    if T == 1:
        slot = tl.load(slots + first).to(tl.int64)
        seen = tl.load(visible + first)
        if BLOCK > 0:
            hi = tl.minimum(lo + chunk, num_blocks * BLOCK)
        else:
            hi = tl.minimum(lo + chunk, tl.where(seen > free, seen, 0))
        if lo < hi:
            _score(
                q, weights, pool, table + slot * table_width, visible, blocks + first.to(tl.int64) * num_blocks, out,
                first, 1, lo, hi, seen, width, page_stride, H, HP, D, DP, ENTRIES, 1, 128, BLOCK, FAST,
            )  # fmt: skip
    else:
        t = tl.arange(0, T)
        mine = tl.load(slots + first + t, mask=first + t < M, other=-1)
        see = tl.load(visible + first + t, mask=first + t < M, other=0)
        see = tl.where(see > free, see, 0)
        begin = first * 0
        while begin < T:  # runs of rows of one slot
            slot = tl.sum(tl.where(t == begin, mine, 0))
            end = tl.min(tl.where((t > begin) & (mine != slot), t, T))
            seen = tl.max(tl.where((t >= begin) & (t < end), see, 0))
            hi = tl.minimum(lo + chunk, seen)
            if lo < hi:
                pages = table + slot.to(tl.int64) * table_width
                if end - begin == 1:
                    _score(
                        q, weights, pool, pages, visible, blocks, out, first + begin, 1, lo, hi, seen, width,
                        page_stride, H, HP, D, DP, ENTRIES, 1, 128, BLOCK, FAST,
                    )  # fmt: skip
                else:
                    _score(
                        q, weights, pool, pages, visible, blocks, out, first + begin, end - begin, lo, hi, seen, width,
                        page_stride, H, HP, D, DP, ENTRIES, T, 64, BLOCK, FAST,
                    )  # fmt: skip
            begin = end


# ---------------------------------------------------------------------------------------------------------- selection


@triton.jit(do_not_specialize=["count"])
def _block_max(logits, visible, out, width, count, BLOCK: tl.constexpr, BP: tl.constexpr, N: tl.constexpr):
    """Best visible entry of each block, +inf for the block of the newest. Grid (rows, groups of N blocks)."""
    row = tl.program_id(0).to(tl.int64)
    seen = tl.load(visible + row)
    b = tl.program_id(1) * N + tl.arange(0, N)
    j = tl.arange(0, BP)
    e = b[:, None] * BLOCK + j[None, :]
    v = tl.load(logits + row * width + e, mask=(j < BLOCK)[None, :] & (e < seen), other=float("-inf"))
    best = tl.where(b == (seen - 1) // BLOCK, float("inf"), tl.max(v, 1))
    tl.store(out + row * count + b, best, mask=(b < count) & (b * BLOCK < seen))


@triton.jit
def _ordered(v):
    """Order of the floats as non-negative int64; 0 for -inf. -0 ties with 0."""
    bits = (v + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.int64) & 0xFFFFFFFF
    return tl.where(v > float("-inf"), key, 0)


@triton.jit(do_not_specialize=["K", "num_blocks", "n_max"])
def _select(
    scores, visible, blocks, out, stride, n_max, unit, num_blocks, block, K,
    LENGTHS: tl.constexpr, MAPPED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """topk.cu in one program a row: four histograms of 8 bits, then a pass in order. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    n = n_max
    if LENGTHS:
        n = tl.minimum(n, (tl.maximum(tl.load(visible + row), 0) + unit - 1) // unit)
    i = tl.arange(0, N)
    out += row * K
    if (n <= K) & (not MAPPED):
        for o in range(0, K, N):
            tl.store(out + o + i, tl.where(o + i < n, o + i, -1), mask=o + i < K)
    else:
        bins = tl.arange(0, 256)
        prefix = tl.full((), 0, tl.int64)
        need = K + 0
        for step in tl.static_range(4):
            held = tl.zeros((256,), tl.int32)
            for o in range(0, n, N):
                v = tl.load(scores + row * stride + o + i, mask=o + i < n, other=float("-inf"))
                key = _ordered(v)
                match = (key > 0) & ((key >> (32 - 8 * step)) == prefix)
                held += tl.histogram(((key >> (24 - 8 * step)) & 255).to(tl.int32), 256, mask=match)
            from_top = tl.cumsum(held, 0, reverse=True)
            # fewer than `need`: bin 0 all the way down, which is every key
            digit = tl.max(tl.where(from_top >= need, bins, 0))
            need -= tl.sum(tl.where(bins > digit, held, 0))
            prefix = (prefix << 8) | digit
        placed, ties = 0, 0
        for o in range(0, n, N):
            v = tl.load(scores + row * stride + o + i, mask=o + i < n, other=float("-inf"))
            key = _ordered(v)
            over = key > prefix
            tie = (key == prefix) & (key > 0)
            rank = ties + tl.cumsum(tie.to(tl.int32), 0)
            chosen = over | (tie & (rank <= need))
            place = placed + tl.cumsum(chosen.to(tl.int32), 0) - 1
            e = o + i
            if MAPPED:
                e = tl.load(blocks + row * num_blocks + e // block, mask=chosen, other=0) * block + e % block
            tl.store(out + place, e, mask=chosen)
            placed += tl.sum(chosen.to(tl.int32))
            ties += tl.sum(tie.to(tl.int32))
        for o in range(placed, K, N):
            tl.store(out + o + i, tl.full((N,), -1, tl.int32), mask=o + i < K)


@functools.cache
def _hopper() -> Any:
    """The library, where it has the kernel of csrc/cuda/logits.cu for this device."""
    lib = "interpreted" if INTERPRETED else cuda.library()
    return None if isinstance(lib, str) or torch.cuda.get_device_capability()[0] != 9 else lib


@functools.lru_cache(4096)
def _parts(tiles: int, span: int, groups: int) -> int:
    """Blocks of logits.cu for a tile of rows, one an SM at a time, each of `groups` warpgroups with 64 keys a step.

    The fewest steps of an SM; a block's start is worth about three.
    """
    sms = torch.cuda.get_device_properties().multi_processor_count
    steps = triton.cdiv(span, 64 * groups)
    return min(range(1, min(sms, steps) + 1), key=lambda n: triton.cdiv(tiles * n, sms) * (triton.cdiv(steps, n) + 3))


def select(scores: Tensor, out: Tensor, visible: Tensor | None, unit: int, blocks: Tensor | None, block: int) -> None:
    """Fill out int32 [M, k]: `cuda.topk`, or the Triton kernel where the library is not there."""
    if not out.numel():
        return
    lib = "interpreted" if INTERPRETED else cuda.library()
    if not isinstance(lib, str) and out.shape[1] <= cuda.MAX_K:
        return cuda.topk(lib, scores, out, visible, unit, blocks, block)
    (m, n), k = scores.shape, out.shape[1]
    some = scores if visible is None else visible
    _select[(m,)](
        scores, some, out if blocks is None else blocks, out, scores.stride(0), n, unit,
        0 if blocks is None else blocks.shape[1], block, k, visible is not None, blocks is not None,
        256 if INTERPRETED else 4096, num_warps=4 if INTERPRETED else 8,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- ops


def _round4(n: int) -> int:
    return max(4, -(-n // 4) * 4)


def logits(
    q: Tensor, weights: Tensor, pool: Tensor, page_table: Tensor, slots: Tensor, visible: Tensor,
    entries: int, out: Tensor, free: int, blocks: Tensor | None = None, block: int = 0,
) -> None:  # fmt: skip
    """out float32 [M, S] = scores of the visible entries of rows that see more than `free`; others may stay unwritten.

    With `blocks` int32 [M, B], out [M, B * block] in their order, -inf where there is no visible entry.
    """
    m, h = q.shape[:2]
    dim = indexer._dim(q)
    fast = dim == 128 and pool.stride(0) % 16 == 0 and pool.data_ptr() % 16 == 0 and q.data_ptr() % 4 == 0
    span = out.shape[1] if blocks is not None else min(out.shape[1], page_table.shape[1] * entries)
    lib = _hopper()
    if lib is not None and fast and h == 32 and entries >= 64 and entries.bit_count() == 1 and block.bit_count() <= 1:
        tile = 1 if blocks is not None or m <= FEW_ROWS else 4 if m < MANY_ROWS else 8
        parts = _parts(triton.cdiv(m, tile), span, 2 if tile == 8 else 4)
        args = (lib, q, weights, pool, page_table, slots, visible, blocks, out, block, entries, free, tile, parts)
        return cuda.index_logits(*args)
    if fast:
        q, pool = q.view(torch.int32), pool.view(torch.int32)
    hp = max(16 if h <= 16 else 32, triton.next_power_of_2(h))
    tile = TILE if m > FEW_ROWS and hp <= 32 and blocks is None else 1
    tiles = triton.cdiv(m, tile)
    chunk = 256 if m <= 8 else 512 if m <= 512 else 2048
    _logits[(tiles, triton.cdiv(span, chunk))](
        q, weights, pool, page_table, slots, visible, slots if blocks is None else blocks, out, m, out.stride(0),
        page_table.shape[1], pool.stride(0), 0 if blocks is None else blocks.shape[1], chunk, free,
        h, hp, dim, max(32, triton.next_power_of_2(dim)), entries, tile, block, fast, PDL,
        num_warps=4, num_stages=3, **_launch_options(),
    )  # fmt: skip


def _chunks(m: int, width: int) -> range:
    """First rows of the chunks whose logits fit the workspace."""
    rows = max(1, min(m, WORKSPACE // (4 * width)))
    return range(0, m, rows if rows < TILE else rows // TILE * TILE)


def _ready(q: Tensor, weights: Tensor, pool: Tensor, table: Tensor, slots: Tensor, visible: Tensor) -> tuple[Any, ...]:
    if pool.stride(1) != 1:
        pool = pool.contiguous()
    return q.contiguous(), weights.contiguous(), pool, table.contiguous(), slots.contiguous(), visible.contiguous()


def _run(
    tensors: tuple[Tensor, ...], entries: int, k: int, num_blocks: int, block: int
) -> tuple[Tensor, Tensor | None]:
    """Full scores, in chunks of rows; blocks are published where `block` is set."""
    q, weights, pool, table, slots, visible = _ready(*tensors)
    m, device = q.shape[0], q.device
    selected = torch.empty((m, k), dtype=torch.int32, device=device)
    published = torch.empty((m, num_blocks), dtype=torch.int32, device=device) if block else None
    if m == 0:
        return selected, published
    capacity = table.shape[1] * entries
    width = _round4(capacity)
    free = min(k, num_blocks * block) if block else k
    steps = _chunks(m, width)
    space = torch.empty((min(m, steps.step), width), dtype=torch.float32, device=device)
    if block:
        count = triton.cdiv(capacity, block)
        best_space = torch.empty((space.shape[0], _round4(count)), dtype=torch.float32, device=device)
    for r in steps:
        at = slice(r, min(m, r + steps.step))
        scores, see = space[: at.stop - r], visible[at]
        if capacity > free:
            logits(q[at], weights[at], pool, table, slots[at], see, entries, scores, free)
        select(scores[:, :capacity], selected[at], see, 1, None, 1)
        if published is None:
            continue
        best = best_space[: at.stop - r]
        if count > num_blocks:
            bp = triton.next_power_of_2(block)
            n = max(1, 1024 // bp)
            _block_max[(at.stop - r, triton.cdiv(best.shape[1], n))](
                scores, see, best, width, best.shape[1], block, bp, n, num_warps=4
            )
        select(best[:, :count], published[at], see, block, None, 1)
    return selected, published


def index_topk(
    q: Tensor, weights: Tensor, pool: Tensor, page_table: Tensor, slots: Tensor, visible: Tensor,
    ratio: int, page_size: int, k: int,
) -> Tensor:  # fmt: skip
    """Provider of `index_topk`: two launches for a chunk of rows."""
    if q.dtype is not torch.uint8:  # exact numerics
        return indexer.index_topk(q, weights, pool, page_table, slots, visible, ratio, page_size, k)
    return _run((q, weights, pool, page_table, slots, visible), page_size // ratio, k, 0, 0)[0]


def index_topk_publish(
    q: Tensor, weights: Tensor, pool: Tensor, page_table: Tensor, slots: Tensor, visible: Tensor,
    ratio: int, page_size: int, k: int, num_blocks: int, block: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Provider of `index_topk_publish`: four launches for a chunk of rows."""
    args = (q, weights, pool, page_table, slots, visible)
    if q.dtype is not torch.uint8:
        return indexer.index_topk_publish(*args, ratio, page_size, k, num_blocks, block)
    selected, published = _run(args, page_size // ratio, k, num_blocks, block)
    assert published is not None
    return selected, published


def index_topk_blocks(
    q: Tensor, weights: Tensor, pool: Tensor, page_table: Tensor, slots: Tensor, visible: Tensor,
    ratio: int, page_size: int, k: int, blocks: Tensor, block: int,
) -> Tensor:  # fmt: skip
    """Provider of `index_topk_blocks`: two launches for a chunk of rows. Blocks ascend, as published."""
    args = (q, weights, pool, page_table, slots, visible)
    if q.dtype is not torch.uint8:
        return indexer.index_topk_blocks(*args, ratio, page_size, k, blocks, block)
    q, weights, pool, table, slots, visible = _ready(*args)
    blocks = blocks.contiguous()
    m, n = q.shape[0], blocks.shape[1] * block
    out = torch.empty((m, k), dtype=torch.int32, device=q.device)
    if m == 0:
        return out
    if n == 0:
        return out.fill_(-1)
    steps = _chunks(m, _round4(n))
    space = torch.empty((min(m, steps.step), _round4(n)), dtype=torch.float32, device=q.device)
    for r in steps:
        at = slice(r, min(m, r + steps.step))
        scores = space[: at.stop - r]
        picked = (q[at], weights[at], pool, table, slots[at], visible[at])
        logits(*picked, page_size // ratio, scores[:, :n], 0, blocks[at], block)
        select(scores[:, :n], out[at], None, 1, blocks[at], block)
    return out


# ------------------------------------------------------------------------------------------------------- compile gate


def _variants() -> list[Variant]:
    signature = {"q": "*i32", "weights": "*fp32", "pool": "*i32", "table": "*i32", "slots": "*i32", "visible": "*i32"}
    signature |= {"blocks": "*i32", "out": "*fp32", "M": "i32", "width": "i32", "table_width": "i32"}
    signature |= {"page_stride": "i32", "num_blocks": "i32", "chunk": "i32", "free": "i32"}
    out = []
    real = {"H": 32, "HP": 32, "D": 128, "DP": 128, "FAST": True, "PDL": PDL}
    tiny = {"H": 4, "HP": 16, "D": 32, "DP": 32, "FAST": False, "PDL": PDL}
    mma = {90: "wgmma", 100: "tcgen05.mma"}
    for tile, block, entries in ((1, 0, 64), (TILE, 0, 64), (1, 8, 128)):
        constants = {**real, "ENTRIES": entries, "T": tile, "BLOCK": block}
        out.append(Variant(_logits, signature, constants, mma, {"num_warps": 4, "num_stages": 3}))
    bytes_ = {**signature, "q": "*u8", "pool": "*u8"}
    for tile, block in ((1, 0), (TILE, 0), (1, 4)):
        constants = {**tiny, "ENTRIES": 8, "T": tile, "BLOCK": block}
        out.append(Variant(_logits, bytes_, constants, mma, {"num_warps": 4, "num_stages": 3}))
    maxima = {"logits": "*fp32", "visible": "*i32", "out": "*fp32", "width": "i32", "count": "i32"}
    out.append(Variant(_block_max, maxima, {"BLOCK": 8, "BP": 8, "N": 128}, {90: "", 100: ""}))
    portable = {"scores": "*fp32", "visible": "*i32", "blocks": "*i32", "out": "*i32", "stride": "i32", "n_max": "i32"}
    portable |= {"unit": "i32", "num_blocks": "i32", "block": "i32", "K": "i32"}
    for lengths, mapped in ((True, False), (False, True)):
        constants = {"LENGTHS": lengths, "MAPPED": mapped, "N": 4096}
        out.append(Variant(_select, portable, constants, {90: "", 100: ""}, {"num_warps": 8}))
    return out


VARIANTS = _variants()
