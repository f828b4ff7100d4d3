"""Sparse attention for 64 heads x 512 on sm_90, in Gluon.

Belongs here: the same work as `_attend` of attention.py (grid, arguments, order of keys, scratch) with explicit shared
memory and asynchronous wgmma. Does not belong here: planning, other shapes.

Why not plain Triton: there every dot is waited for at once, so dequantising a tile (about 700 issue cycles) never
overlaps the tensor cores. Here 8 warps hold the 64 x 512 sums (128 registers each); while P V of tile t runs, the
codes of tile t + 1, loaded during Q K, are expanded into the other K buffer.

Order of dims inside each group of 8, in Q, K and sums: 0 4 1 5 2 6 3 7. With it a register of two bf16 takes the same
nibble of two bytes (or the same byte of two words), so no byte is moved between registers; the output puts it back.
Shared memory: Q 64 KB, K 2 x 64 KB, P 8 KB, entries 2 KB: one program per SM.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait


def _latent_asm() -> str:
    """Word of 8 e2m1 codes ($4) and a bf16 scale in both halves ($5) -> 4 registers of 2 products."""
    out = ["{ .reg .b32 t, u;"]
    for i, (bits, sign) in enumerate((("shl.b32 t, $4, 6;", 12), ("shl.b32 t, $4, 2;", 8), ("shr.b32 t, $4, 2;", 4))):
        out.append(f"{bits} and.b32 t, t, 0x01C001C0; shl.b32 u, $4, {sign}; and.b32 u, u, 0x80008000;")
        out.append(f"or.b32 t, t, u; mul.rn.bf16x2 ${i}, t, $5;")
    out.append("shr.b32 t, $4, 6; and.b32 t, t, 0x01C001C0; and.b32 u, $4, 0x80008000;")
    return " ".join([*out, "or.b32 t, t, u; mul.rn.bf16x2 $3, t, $5; }"])


def _window_asm() -> str:
    """Words of e4m3 codes 0..3 ($4) and 4..7 ($5), scale ($6) -> registers (0, 4) (1, 5) (2, 6) (3, 7)."""
    out = ["{ .reg .b32 t, u;"]
    for i in range(4):
        out.append(f"prmt.b32 t, $4, $5, {4 + i << 12 | i << 4:#x}; shr.b32 u, t, 4; and.b32 u, u, 0x07F007F0;")
        out.append(f"and.b32 t, t, 0x80008000; or.b32 t, t, u; mul.rn.bf16x2 ${i}, t, $6;")
    return " ".join(out) + " }"


LATENT_ASM, WINDOW_ASM = gl.constexpr(_latent_asm()), gl.constexpr(_window_asm())
WORDS4 = gl.constexpr((gl.int32,) * 4)
# a lane owns one key: 4 (latent) or 8 (window) consecutive words of every fourth group of 32 dims
L3 = gl.constexpr(gl.BlockedLayout([1, 1, 4], [8, 4, 1], [8, 1, 1], [2, 1, 0]))
W3 = gl.constexpr(gl.BlockedLayout([1, 1, 8], [8, 4, 1], [8, 1, 1], [2, 1, 0]))
QL = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
FLAT = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))
S = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
# rows of S with the halves of both warpgroups in one lane
PAIR = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [0, 0]], [], [64, 2]
    )
)
BF16_SMEM, I32_SMEM = gl.constexpr(gl.NVMMASharedLayout(128, 16)), gl.constexpr(gl.NVMMASharedLayout(128, 32))
LINE_SMEM = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _window_keys(j, row0, slot, pos, first, floor, R, WINDOW: gl.constexpr, G: gl.constexpr):
    """`window_keys` of attention.py."""
    p = pos - (WINDOW - 1) + j
    if G > 0:
        fresh = j >= WINDOW
        line = row0 + j - WINDOW
    else:
        fresh = p >= first
        line = row0 - (WINDOW - 1) + j
    valid = gl.where(j < WINDOW, p >= gl.maximum(floor, 0), j < WINDOW + G)
    return fresh, gl.where(fresh, line.to(gl.int64), slot.to(gl.int64) * R + p % R), valid


@gluon.jit
def _put(o0, o1, o2, o3, k):
    """Registers of the four pairs of each group of 8 dims -> K tile in shared memory."""
    words = gl.join(gl.join(o0, o2), gl.join(o1, o3)).reshape([64, 256])
    k._reinterpret(gl.int32, [64, 256], I32_SMEM).store(words)
    fence_async_shared()


@gluon.jit
def _load_window(t, new, ring, new32, ring32, where, R, WINDOW: gl.constexpr, G: gl.constexpr):
    """Codes int32 [64, 16, 8] and scales [64, 16] of window tile t."""
    row0, slot, pos, first, floor = where
    KEY: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, W3))
    j = t * 64 + gl.arange(0, 64, KEY)
    fresh, line, valid = _window_keys(j, row0, slot, pos, first, floor, R, WINDOW, G)
    group = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, W3)))
    word = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, W3)))
    base = gl.where(fresh, new32 + line * 132, ring32 + line * 132)
    base = gl.expand_dims(gl.expand_dims(base, 1), 2)
    at = gl.expand_dims(gl.expand_dims(group * 8, 0), 2) + gl.expand_dims(gl.expand_dims(word, 0), 0)
    words = gl.load(base + at, mask=gl.expand_dims(gl.expand_dims(valid, 1), 2), other=0)
    KEY4: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L3))
    j = t * 64 + gl.arange(0, 64, KEY4)
    fresh, line, valid = _window_keys(j, row0, slot, pos, first, floor, R, WINDOW, G)
    group = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    base = gl.where(fresh, new + line * 528, ring + line * 528)
    at = gl.expand_dims(base, 1) + (gl.expand_dims(group, 0) + 512)
    return words, gl.load(at, mask=gl.expand_dims(valid, 1), other=0)


@gluon.jit
def _expand_window(words, scale, k):
    w0, w1 = gl.split(words.reshape([64, 16, 4, 2]))
    w0, w1 = gl.convert_layout(w0, L3, assert_trivial=True), gl.convert_layout(w1, L3, assert_trivial=True)
    scale = (scale.to(gl.int32) + 56) << 7  # bf16 bits of 2^(code - 127 + 120 - 64)
    scale = gl.expand_dims(scale | (scale << 16), 2)
    w0, scale = gl.broadcast(w0, scale)
    o0, o1, o2, o3 = gl.inline_asm_elementwise(WINDOW_ASM, "=r,=r,=r,=r,r,r,r", [w0, w1, scale], WORDS4, True, 1)
    _put(o0, o1, o2, o3, k)


@gluon.jit
def _load_latent(i, more, lines, pool16, pool32):
    """Codes int32 [64, 16, 4] and pairs of scales int16 [64, 16] of entry tile i."""
    KEY: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L3))
    line = lines.index(i).load(KEY)
    valid = (line >= 0) & more
    line = line.to(gl.int64)
    group = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, L3)))
    base = gl.expand_dims(gl.expand_dims(pool32 + line * 72, 1), 2)
    at = gl.expand_dims(gl.expand_dims(group * 4, 0), 2) + gl.expand_dims(gl.expand_dims(word, 0), 0)
    words = gl.load(base + at, mask=gl.expand_dims(gl.expand_dims(valid, 1), 2), other=0)
    at = gl.expand_dims(pool16 + line * 144 + 128, 1) + gl.expand_dims(group, 0)
    return words, gl.load(at, mask=gl.expand_dims(valid, 1), other=0)


@gluon.jit
def _expand_latent(words, scales, k):
    word = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, L3))), 0), 0)
    code = (gl.expand_dims(scales.to(gl.int32), 2) >> ((word >> 1) * 8)) & 255  # two words (16 dims) share a scale
    # e4m3 bits at bit 20 are 2^-120 of the value; e2m1 codes lack 2^126: 2^62 remains for a tile of 2^-64
    wide = (code << 20).to(gl.float32, bitcast=True) * 2.475880078570760549798248448e27
    wide = (wide * 2.475880078570760549798248448e27).to(gl.int32, bitcast=True)
    wide = (wide & -65536) | ((wide >> 16) & 0xFFFF)
    o0, o1, o2, o3 = gl.inline_asm_elementwise(LATENT_ASM, "=r,=r,=r,=r,r,r", [words, wide], WORDS4, True, 1)
    _put(o0, o1, o2, o3, k)


@gluon.jit
def _lane_sums(p):
    """[64, 64] scores -> what each lane holds of a row, [64, 2, 4]: reduced over lanes only once, at the end."""
    return gl.sum(gl.sum(p.reshape([64, 2, 4, 4, 2]), 4), 2)


@gluon.jit
def _row_max(s):
    """Maximum of [64, 64] scores. Own exchange between warpgroups: the reduction's predicated loads spill 16 bytes."""
    both = gl.convert_layout(gl.max(s.reshape([64, 2, 32]), 2), PAIR)
    return gl.convert_layout(gl.max(both, 1), gl.SliceLayout(1, S), assert_trivial=True)


@gluon.jit
def _row_sums(mass):
    both = gl.convert_layout(gl.sum(mass, 2), PAIR)
    return gl.convert_layout(gl.sum(both, 1), gl.SliceLayout(1, ACC), assert_trivial=True)


@gluon.jit
def _zero_sums():
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    return m, _lane_sums(gl.zeros([64, 64], gl.float32, S)), gl.zeros([64, 512], gl.float32, ACC)


@gluon.jit
def _scores(q, k):
    zero = gl.zeros([64, 64], gl.float32, S)
    return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _softmax(s, valid, m, mass, acc, p_smem, scale2):
    """Scores of a tile -> P in shared memory; m, mass, acc rescaled to the new maximum."""
    valid = gl.expand_dims(valid, 0)
    s = gl.where(valid, s, float("-inf"))
    top = gl.maximum(m, _row_max(s) * scale2)
    safe = gl.where(top == float("-inf"), 0.0, top)
    p = gl.exp2(gl.fma(s, gl.full_like(s, scale2), gl.zeros_like(s) - gl.expand_dims(safe, 1)))
    alpha = gl.exp2(m - safe)
    part = _lane_sums(p)
    SUMS: gl.constexpr = part.type.layout
    wide = gl.convert_layout(alpha, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)), assert_trivial=True)
    mass = gl.fma(mass, gl.expand_dims(gl.expand_dims(wide, 1), 2) + gl.zeros_like(part), part)
    acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, ACC), assert_trivial=True), 1)
    p_smem.store(p.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    return top, mass, acc


@gluon.jit
def _window_valid(t, where, WINDOW: gl.constexpr, G: gl.constexpr):
    """Which keys of window tile t exist, in the layout of score columns."""
    row0, slot, pos, first, floor = where
    j = t * 64 + gl.arange(0, 64, gl.SliceLayout(0, S))
    return _window_keys(j, row0, slot, pos, first, floor, 1, WINDOW, G)[2]


@gluon.jit
def _window_part(
    m, mass, acc, q_smem, k_smem, p_smem, new, ring, new32, ring32, lines, pool16, pool32, where, ring_rows,
    scale2, more, WINDOW: gl.constexpr, G: gl.constexpr, NW: gl.constexpr, NL: gl.constexpr,
):  # fmt: skip
    """Window tiles 0..NW-1; leaves the first entry tile in its K buffer."""
    words, scales = _load_window(0, new, ring, new32, ring32, where, ring_rows, WINDOW, G)
    _expand_window(words, scales, k_smem.index(0))
    for t in range(0, NW - 1):
        gl.thread_barrier()
        s = warpgroup_mma_wait(0, [_scores(q_smem, k_smem.index(t % 2))])
        m, mass, acc = _softmax(s, _window_valid(t, where, WINDOW, G), m, mass, acc, p_smem, scale2)
        acc = warpgroup_mma(p_smem, k_smem.index(t % 2), acc, is_async=True)
        # not loaded during Q K: 36 more registers would spill
        words, scales = _load_window(t + 1, new, ring, new32, ring32, where, ring_rows, WINDOW, G)
        _expand_window(words, scales, k_smem.index((t + 1) % 2))
        acc = warpgroup_mma_wait(0, [acc])
    LAST: gl.constexpr = NW - 1
    gl.thread_barrier()
    s = _scores(q_smem, k_smem.index(LAST % 2))
    if NL > 0:
        codes, pairs = _load_latent(0, more, lines, pool16, pool32)
    s = warpgroup_mma_wait(0, [s])
    m, mass, acc = _softmax(s, _window_valid(LAST, where, WINDOW, G), m, mass, acc, p_smem, scale2)
    acc = warpgroup_mma(p_smem, k_smem.index(LAST % 2), acc, is_async=True)
    if NL > 0:
        _expand_latent(codes, pairs, k_smem.index(NW % 2))
    return m, mass, warpgroup_mma_wait(0, [acc])


@gluon.jit
def _entry_part(
    m, mass, acc, q_smem, k_smem, p_smem, lines, pool16, pool32, scale2,
    begin, end, stop, NW: gl.constexpr, NL: gl.constexpr,
):  # fmt: skip
    """Entry tiles begin..end-1 (numbers count window tiles too); prefetches up to tile stop-1."""
    for t in range(begin, end):
        gl.thread_barrier()
        s = _scores(q_smem, k_smem.index(t % 2))
        words, scales = _load_latent(gl.minimum(t + 1 - NW, NL - 1), t + 1 < stop, lines, pool16, pool32)
        valid = lines.index(t - NW).load(gl.SliceLayout(0, S)) >= 0
        s = warpgroup_mma_wait(0, [s])
        m, mass, acc = _softmax(s, valid, m, mass, acc, p_smem, scale2)
        acc = warpgroup_mma(p_smem, k_smem.index(t % 2), acc, is_async=True)
        _expand_latent(words, scales, k_smem.index((t + 1) % 2))
        acc = warpgroup_mma_wait(0, [acc])
    return m, mass, acc


@gluon.jit
def _first_entries(t, k_smem, lines, pool16, pool32, NW: gl.constexpr):
    """Entry tile t into its K buffer, for a chunk without window tiles."""
    words, scales = _load_latent(t - NW, True, lines, pool16, pool32)
    _expand_latent(words, scales, k_smem.index(t % 2))


# row counts must not compile anew (5 s each)
@gluon.jit(
    do_not_specialize=["items", "ring_rows", "table_width", "K"],
    do_not_specialize_on_alignment=["slots", "positions", "rows", "first", "floor", "selected", "table"],
)
def _attend_sm90(
    q, new, ring, slots, positions, rows, first, floor, sink, pool, selected, table, out, part, stats,
    items, scale2, unit, ring_rows, table_width, K, new32, ring32, pool16, pool32,
    H: gl.constexpr, D: gl.constexpr, BH: gl.constexpr, BN: gl.constexpr, WINDOW: gl.constexpr, G: gl.constexpr,
    EPP: gl.constexpr, W_BYTES: gl.constexpr, L_BYTES: gl.constexpr, CHUNK: gl.constexpr, TILES: gl.constexpr,
    SPLIT: gl.constexpr, LINES: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    NW: gl.constexpr = (WINDOW + G + 63) // 64
    NL: gl.constexpr = TILES - NW
    CHUNKS: gl.constexpr = (TILES + CHUNK - 1) // CHUNK
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [64, 512], BF16_SMEM)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], BF16_SMEM)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [64, 64], BF16_SMEM)
    lines = gl.allocate_shared_memory(gl.int32, [LINES, 64], LINE_SMEM)
    flat = lines._reinterpret(gl.int32, [LINES * 64], LINE_SMEM)
    q_at = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, QL)) * 512, 1) + gl.expand_dims(
        gl.arange(0, 512, gl.SliceLayout(0, QL)), 0
    )
    o_row = gl.arange(0, 64, gl.SliceLayout(1, ACC))
    o_at = gl.expand_dims(o_row * 512, 1) + gl.expand_dims(gl.arange(0, 512, gl.SliceLayout(0, ACC)), 0)
    for item in range(gl.program_id(0), items, STEP):
        if SPLIT:
            row, c0, c1, park = item // CHUNKS, item % CHUNKS, item % CHUNKS + 1, item
        else:
            row, c0, c1, park = item, 0, CHUNKS, gl.program_id(0) * CHUNKS
        wide_row = row.to(gl.int64)
        qs = gl.load(q + wide_row * 32768 + q_at)
        if G > 0:
            b = row // G
            start = gl.load(positions + b)
            where = (b * G, gl.load(slots + b), start - 1, start, gl.load(floor + b))
        else:
            where = (
                gl.load(rows + row),
                gl.load(slots + row),
                gl.load(positions + row),
                gl.load(first + row),
                gl.load(floor + row),
            )
        slot = where[1]
        if NL > 0:  # page table look-ups of all entries at once: two dependent loads a row instead of two a tile
            j = gl.arange(0, LINES * 64, FLAT)
            entry = gl.load(selected + wide_row * K + j, mask=j < K, other=-1)
            page = gl.load(table + slot.to(gl.int64) * table_width + entry // EPP, mask=entry >= 0, other=0)
            flat.store(gl.where(entry >= 0, page * EPP + entry % EPP, -1))
        qs = qs.reshape([64, 64, 2, 4]).permute([0, 1, 3, 2]).reshape([64, 512])
        q_smem.store(gl.convert_layout(qs, QL, assert_trivial=True))
        fence_async_shared()
        stop = gl.minimum(c1 * CHUNK, TILES)

        m, mass, acc = _zero_sums()
        if SPLIT:
            if c0 == 0:
                m, mass, acc = _window_part(
                    m, mass, acc, q_smem, k_smem, p_smem, new, ring, new32, ring32, lines, pool16, pool32, where,
                    ring_rows, scale2, stop > NW, WINDOW, G, NW, NL,
                )  # fmt: skip
            else:
                _first_entries(c0 * CHUNK, k_smem, lines, pool16, pool32, NW)
        else:
            m, mass, acc = _window_part(
                m, mass, acc, q_smem, k_smem, p_smem, new, ring, new32, ring32, lines, pool16, pool32, where, ring_rows,
                scale2, stop > NW, WINDOW, G, NW, NL,
            )  # fmt: skip
        if CHUNKS > 1:
            for c in range(c0, c1):
                m, mass, acc = _entry_part(
                    m, mass, acc, q_smem, k_smem, p_smem, lines, pool16, pool32, scale2,
                    gl.maximum(c * CHUNK, NW), gl.minimum(c * CHUNK + CHUNK, TILES), stop, NW, NL,
                )  # fmt: skip
                if SPLIT or c + 1 < c1:
                    at = gl.to_tensor(park + (0 if SPLIT else c)).to(gl.int64)
                    gl.store(part + at * 32768 + o_at, acc)
                    o_m = gl.convert_layout(m, gl.SliceLayout(1, ACC), assert_trivial=True)
                    gl.store(stats + at * 128 + o_row, o_m)
                    gl.store(stats + at * 128 + 64 + o_row, _row_sums(mass))
                    m, mass, acc = _zero_sums()
        elif NL > 0:
            m, mass, acc = _entry_part(
                m, mass, acc, q_smem, k_smem, p_smem, lines, pool16, pool32, scale2, NW, TILES, stop, NW, NL
            )
        if not SPLIT:  # a thread reads back only what it wrote: same layout
            m, mass = gl.convert_layout(m, gl.SliceLayout(1, ACC), assert_trivial=True), _row_sums(mass)
            park = gl.to_tensor(park).to(gl.int64)
            sinks = gl.load(sink + o_row)
            top = gl.maximum(m, sinks * 1.4426950408889634)
            for c in gl.static_range(CHUNKS - 1):
                top = gl.maximum(top, gl.load(stats + (park + c) * 128 + o_row))
            w = gl.exp2(m - top)
            den = gl.fma(mass, w, gl.exp2(gl.fma(sinks, gl.full_like(sinks, 1.4426950408889634), -top)))
            acc = acc * gl.expand_dims(w, 1)
            for c in gl.static_range(CHUNKS - 1):
                w = gl.exp2(gl.load(stats + (park + c) * 128 + o_row) - top)
                den = gl.fma(gl.load(stats + (park + c) * 128 + 64 + o_row), w, den)
                parked = gl.load(part + (park + c) * 32768 + o_at)
                acc = gl.fma(parked, gl.expand_dims(w, 1) + gl.zeros_like(parked), acc)
            acc = acc * gl.expand_dims(unit / den, 1)
            gl.thread_barrier()
            stage = k_smem.index(0)
            stage.store(acc.to(gl.bfloat16))
            o = stage.load(QL).reshape([64, 64, 4, 2]).permute([0, 1, 3, 2]).reshape([64, 512])
            gl.store(out + wide_row * 32768 + q_at, gl.convert_layout(o, QL, assert_trivial=True))
            gl.thread_barrier()


def attend(grid: int, step: int, args: tuple[Any, ...], scalars: tuple[Any, ...], shape: dict[str, Any]) -> None:
    """Launch with the arguments of `_attend` (attention.py); step: SMs, what a program advances by."""
    new, ring, pool = args[1], args[2], args[9]
    views = (new.view(torch.int32), ring.view(torch.int32), pool.view(torch.int16), pool.view(torch.int32))
    _attend_sm90[(grid,)](*args, *scalars, *views, **shape, LINES=lines_of(shape), STEP=step, num_warps=8)


def lines_of(shape: dict[str, Any]) -> int:
    """Entry tiles, rounded to a power of two (at least the 8 that fill all warps)."""
    entry_tiles = shape["TILES"] - -(-(shape["WINDOW"] + shape["G"]) // 64)
    return max(8, 1 << (entry_tiles - 1).bit_length()) if entry_tiles else 8
